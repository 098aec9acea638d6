/* Every function with NULL, with nonsense, at the wrong time and after the end, in a world of one
 * rank. */
#include "check.h"

/* Calls whose arguments are NULL, or whose communicator is none. */
static void no_buffers(pleachComm_t comm) {
    size_t counts[1] = {4};
    REFUSED(pleachAllReduce(NULL, NULL, 4, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachBroadcast(NULL, NULL, 4, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachBcast(NULL, 4, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachReduce(NULL, NULL, 4, pleachFloat32, pleachSum, 0, comm, NULL));
    REFUSED(pleachReduceScatter(NULL, NULL, 4, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachReduceScatter(NULL, NULL, SIZE_MAX, pleachFloat64, pleachSum, comm, NULL));
    REFUSED(pleachAllGather(NULL, NULL, 4, pleachFloat32, comm, NULL));
    REFUSED(pleachAllGather(NULL, NULL, SIZE_MAX, pleachFloat64, comm, NULL));
    REFUSED(pleachAlltoAll(NULL, NULL, 4, pleachFloat32, comm, NULL));
    REFUSED(pleachAlltoAll(NULL, NULL, 4, 99, comm, NULL));
    REFUSED(pleachGather(NULL, NULL, 4, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachScatter(NULL, NULL, 4, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachSend(NULL, 4, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachRecv(NULL, 4, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachAllGatherV(NULL, NULL, counts, pleachFloat32, comm, NULL));
    REFUSED(pleachReduceScatterV(NULL, NULL, counts, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachAlltoAllV(NULL, counts, NULL, counts, pleachFloat32, comm, NULL));
    REFUSED(pleachGatherV(NULL, NULL, counts, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachGatherV(NULL, NULL, NULL, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachGatherV(NULL, NULL, counts, pleachFloat32, 1, comm, NULL));
    REFUSED(pleachScatterV(NULL, NULL, counts, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachScatterV(NULL, NULL, NULL, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachScatterV(NULL, NULL, counts, pleachFloat32, -1, comm, NULL));
}

/* Every function that takes a partial all-reduce, with one that is none. */
static void no_partial(pleachPartial_t partial) {
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
    void *data = &round;
    int ranks[1];
    size_t count;
    REFUSED(pleachPartialContribution(partial, &data));
    CHECK(data == NULL);
    REFUSED(pleachPartialContribute(partial, &round));
    REFUSED(pleachPartialStartContribute(partial));
    REFUSED(pleachPartialWait(partial, &round));
    REFUSED(pleachPartialAbstain(partial, &round));
    REFUSED(pleachPartialFinish(partial, &round));
    REFUSED(pleachPartialGetReport(partial, &report, NULL, 0));
    CHECK(report.rounds == 0 && report.ranks == 0);
    CHECK(round.result == NULL && round.own == 0);
    REFUSED(pleachPartialContributors(partial, ranks, 1, &count));
    REFUSED(pleachPartialCorrected(partial, ranks, 1, &count));
    EXPECT(pleachInvalidArgument, pleachPartialDestroy(partial));
}

/* Partial all-reduce with wrong arguments, at the wrong time and after its end. */
static void partials(pleachComm_t comm) {
    pleachPartialConfig_t config = PLEACH_PARTIAL_CONFIG_INITIALIZER;
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
    pleachPartial_t partial = NULL, other = NULL;
    const char *wrong[] = {"",           "some",         "quorum:",     "quorum:0",   "quorum:2",
                           "quorum:1+3", "deadline:-1s", "deadline:0s", "deadline:p0"};
    void *data;
    int ranks[1] = {-1};
    size_t count, at;
    no_partial(NULL);
    SAYS("partial is NULL");
    no_partial((pleachPartial_t)(uintptr_t)0x123456789abcu);
    REFUSED(pleachPartialInit(NULL, 4, pleachFloat32, pleachSum, NULL, comm));
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, NULL, NULL));
    REFUSED(pleachPartialInit(&partial, SIZE_MAX, pleachFloat32, pleachSum, NULL, comm));
    EXPECT(pleachSystemError, pleachPartialInit(&partial, SIZE_MAX / 4, pleachInt8, pleachSum, NULL, comm));
    REFUSED(pleachPartialInit(&partial, 4, 12, pleachSum, NULL, comm));
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, 5, NULL, comm));
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachBitAnd, NULL, comm));
    SAYS("take sum");
    config.size = 3;
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, &config, comm));
    SAYS("PLEACH_PARTIAL_CONFIG_INITIALIZER");
    config.size = sizeof config;
    for (at = 0; at < sizeof wrong / sizeof *wrong; ++at) {
        config.activation = wrong[at];
        REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, &config, comm));
    }
    config.activation = NULL, config.late = 4;
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, &config, comm));
    SAYS("config->late is 4");
    config.late = 0, config.divisor = -1;
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, &config, comm));
    SAYS("config->divisor is -1");
    config.divisor = pleachDivisorWorld;
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachMax, &config, comm));
    config.divisor = 0, config.reserved = 1;
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, &config, comm));
    OK(pleachGroupStart());
    REFUSED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, NULL, comm));
    OK(pleachGroupEnd());
    CHECK(partial == NULL);

    OK(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, NULL, comm));
    REFUSED(pleachPartialContribution(partial, NULL));
    REFUSED(pleachPartialContribute(partial, NULL));
    REFUSED(pleachPartialAbstain(partial, NULL));
    REFUSED(pleachPartialFinish(partial, NULL));
    REFUSED(pleachPartialWait(partial, NULL));
    REFUSED(pleachPartialGetReport(partial, NULL, NULL, 0));
    REFUSED(pleachPartialGetReport(partial, &report, NULL, 1));
    report.size = 8;
    REFUSED(pleachPartialGetReport(partial, &report, NULL, 0));
    SAYS("PLEACH_PARTIAL_REPORT_INITIALIZER");
    round.size = 8;
    REFUSED(pleachPartialContribute(partial, &round));
    SAYS("PLEACH_ROUND_INITIALIZER");
    round.size = sizeof round;
    REFUSED(pleachPartialContributors(partial, ranks, 1, &count));
    REFUSED(pleachPartialCorrected(partial, ranks, 1, &count));
    OK(pleachGroupStart());
    REFUSED(pleachPartialContribute(partial, &round));
    REFUSED(pleachPartialStartContribute(partial));
    REFUSED(pleachPartialWait(partial, &round));
    REFUSED(pleachPartialAbstain(partial, &round));
    REFUSED(pleachPartialFinish(partial, &round));
    OK(pleachGroupEnd());
    EXPECT(pleachInvalidUsage, pleachPartialAbstain(partial, &round));
    SAYS("no rank had anything to give");
    OK(pleachPartialContribution(partial, &data));
    ((float *)data)[3] = 5;
    OK(pleachPartialContribute(partial, &round));
    CHECK(((const float *)round.result)[3] == 5 && round.contributors == 1);
    REFUSED(pleachPartialContributors(partial, NULL, 1, &count));
    REFUSED(pleachPartialContributors(partial, ranks, 1, NULL));
    REFUSED(pleachPartialCorrected(partial, NULL, 1, &count));
    CHECK(ranks[0] == -1);
    OK(pleachPartialContributors(partial, ranks, 1, &count));
    CHECK(ranks[0] == 0 && count == 1);
    OK(pleachPartialDestroy(partial));
    no_partial(partial);
    /* Nothing is to be added. */
    OK(pleachPartialInit(&other, 0, pleachFloat32, pleachSum, NULL, comm));
    no_partial(partial);
    OK(pleachPartialContribute(other, &round));
    OK(pleachPartialFinish(other, &round));
    OK(pleachPartialDestroy(other));
}

/* Every function that takes a communicator, with one that is none. */
static void no_communicator(pleachComm_t comm) {
    pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
    pleachResult_t error;
    pleachComm_t other = NULL;
    pleachRedOp_t op;
    float factor = 2;
    int number;
    no_buffers(comm);
    REFUSED(pleachBarrier(comm, NULL));
    REFUSED(pleachCommDestroy(comm));
    REFUSED(pleachCommAbort(comm));
    REFUSED(pleachCommFinalize(comm));
    REFUSED(pleachCommCount(comm, &number));
    REFUSED(pleachCommUserRank(comm, &number));
    REFUSED(pleachCommSplit(comm, 0, 0, &other, NULL));
    CHECK(other == NULL);
    REFUSED(pleachCommSetTimeout(comm, 1));
    REFUSED(pleachCommGetAsyncError(comm, &error));
    REFUSED(pleachCommGetFailure(comm, &failure));
    REFUSED(pleachRedOpCreatePreMulSum(&op, &factor, pleachFloat32, pleachScalarHostImmediate, comm));
    REFUSED(pleachRedOpDestroy(0, comm));
}

int main(void) {
    pleachUniqueId id, wrong;
    pleachComm_t comm = NULL, other = NULL;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
    pleachRedOp_t op;
    float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    size_t counts[1] = {4}, huge[1] = {SIZE_MAX};
    int number;
    unsigned kind;

    CHECK(strlen(pleachGetLastError(NULL)) == 0);
    for (number = -2; number < 12; ++number) CHECK(strlen(pleachGetErrorString(number)) > 0);
    REFUSED(pleachGetVersion(NULL));
    SAYS("version is NULL");
    OK(pleachGetVersion(&number));
    CHECK(number == 10000 * PLEACH_VERSION_MAJOR + 100 * PLEACH_VERSION_MINOR + PLEACH_VERSION_PATCH);
    REFUSED(pleachGetUniqueId(NULL));
    OK(pleachGetUniqueId(&id));
    memset(&wrong, 0x5a, sizeof wrong);
    REFUSED(pleachCommInitRank(NULL, 1, id, 0));
    REFUSED(pleachCommInitRank(&comm, 1, wrong, 0));
    REFUSED(pleachCommInitRank(&comm, 0, id, 0));
    REFUSED(pleachCommInitRank(&comm, -1, id, 0));
    REFUSED(pleachCommInitRank(&comm, 1, id, 1));
    REFUSED(pleachCommInitRank(&comm, 1, id, -1));
    config.size = 3;
    REFUSED(pleachCommInitRankConfig(&comm, 1, id, 0, &config));
    SAYS("PLEACH_CONFIG_INITIALIZER");
    config.size = sizeof config, config.fabric = "pigeon";
    REFUSED(pleachCommInitRankConfig(&comm, 1, id, 0, &config));
    SAYS("pigeon");
    config.fabric = NULL, config.reproducible = 7;
    REFUSED(pleachCommInitRankConfig(&comm, 1, id, 0, &config));
    CHECK(comm == NULL);
    REFUSED(pleachCommInitFromEnv(NULL, NULL));

    no_communicator(NULL);
    no_communicator((pleachComm_t)(uintptr_t)0x123456789abcu);

    OK(pleachCommInitFromEnv(&comm, NULL));
    CHECK(comm != NULL);
    REFUSED(pleachCommCount(comm, NULL));
    REFUSED(pleachCommUserRank(comm, NULL));
    REFUSED(pleachCommGetAsyncError(comm, NULL));
    REFUSED(pleachCommGetFailure(comm, NULL));
    failure.size = 8;
    REFUSED(pleachCommGetFailure(comm, &failure));
    REFUSED(pleachCommSplit(comm, 0, 0, NULL, NULL));
    REFUSED(pleachCommSplit(comm, -7, 0, &other, NULL));
    config.reproducible = 0, config.size = 3;
    REFUSED(pleachCommSplit(comm, 0, 0, &other, &config));
    SAYS("PLEACH_CONFIG_INITIALIZER");
    config.size = sizeof config, config.fabric = "tcp";
    REFUSED(pleachCommSplit(comm, 0, 0, &other, &config));
    SAYS("timeoutMs");
    CHECK(other == NULL);
    REFUSED(pleachRedOpCreatePreMulSum(NULL, data, pleachFloat32, pleachScalarHostImmediate, comm));
    REFUSED(pleachRedOpCreatePreMulSum(&op, NULL, pleachFloat32, pleachScalarHostImmediate, comm));
    REFUSED(pleachRedOpCreatePreMulSum(&op, data, 99, pleachScalarHostImmediate, comm));
    REFUSED(pleachRedOpCreatePreMulSum(&op, data, pleachFloat32, pleachScalarDevice, comm));
    SAYS("pleachScalarHostImmediate");
    REFUSED(pleachRedOpCreatePreMulSum(&op, data, pleachFloat32, 7, comm));
    REFUSED(pleachRedOpDestroy(pleachSum, comm));
    REFUSED(pleachRedOpDestroy(UINT32_MAX, comm));

    /* Arguments of calls. */
    REFUSED(pleachAllReduce(NULL, data, 4, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachAllReduce(data, NULL, 4, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachAllReduce(data, data + 1, 4, pleachFloat32, pleachSum, comm, NULL));
    SAYS("overlap");
    REFUSED(pleachAllReduce((char *)data + 1, (char *)data + 1, 4, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachAllReduce(data, data, SIZE_MAX, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachAllReduce(data, data, 4, 12, pleachSum, comm, NULL));
    REFUSED(pleachAllReduce(data, data, 4, pleachFloat32, 5, comm, NULL));
    REFUSED(pleachAllReduce(data, data, 4, pleachFloat32, pleachBitOr, comm, NULL));
    REFUSED(pleachAllReduce(data, data, 4, pleachFloat32, pleachSum, comm, data));
    SAYS("stream");
    REFUSED(pleachBroadcast(data, data, 4, pleachFloat32, 1, comm, NULL));
    REFUSED(pleachBroadcast(data, data, 4, pleachFloat32, -1, comm, NULL));
    REFUSED(pleachBcast(data, 4, pleachFloat32, 1, comm, NULL));
    REFUSED(pleachReduce(data, data, 4, pleachFloat32, pleachSum, 9, comm, NULL));
    REFUSED(pleachGather(data, data, 4, pleachFloat32, 1, comm, NULL));
    REFUSED(pleachScatter(data, data, 4, pleachFloat32, 1, comm, NULL));
    REFUSED(pleachSend(data, 4, pleachFloat32, 0, comm, NULL));
    REFUSED(pleachSend(data, 4, pleachFloat32, 3, comm, NULL));
    REFUSED(pleachRecv(data, 4, pleachFloat32, -1, comm, NULL));
    REFUSED(pleachAllGatherV(data, data, NULL, pleachFloat32, comm, NULL));
    REFUSED(pleachAllGatherV(data, data, huge, pleachFloat32, comm, NULL));
    REFUSED(pleachReduceScatterV(data, data, NULL, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachAlltoAllV(data, counts, data + 4, NULL, pleachFloat32, comm, NULL));
    REFUSED(pleachAlltoAllV(data, NULL, data + 4, counts, pleachFloat32, comm, NULL));
    OK(pleachAlltoAllV(data, counts, data + 4, counts, pleachFloat32, comm, NULL));
    CHECK(data[4] == 1 && data[7] == 4);
    OK(pleachAllReduce(NULL, NULL, 0, pleachFloat32, pleachSum, comm, NULL));
    for (kind = 0; kind < 40; ++kind)
        CHECK(pleachAllReduce(NULL, NULL, 0, kind, pleachSum, comm, NULL)
              == (kind < 12 || kind == 32 || kind == 33 ? pleachSuccess : pleachInvalidArgument));

    /* Groups of calls. */
    EXPECT(pleachInvalidUsage, pleachGroupEnd());
    OK(pleachGroupStart());
    REFUSED(pleachCommSplit(comm, 0, 0, &other, NULL));
    REFUSED(pleachCommFinalize(comm));
    REFUSED(pleachCommInitFromEnv(&other, NULL));
    OK(pleachGroupEnd());
    OK(pleachGroupStart());
    OK(pleachAllReduce(data, data, 4, pleachFloat32, pleachSum, comm, NULL));
    REFUSED(pleachAllReduce(data, NULL, 4, pleachFloat32, pleachSum, comm, NULL));
    EXPECT(pleachInvalidArgument, pleachGroupEnd());
    for (number = 0; number < 64; ++number) OK(pleachGroupStart());
    EXPECT(pleachInvalidUsage, pleachGroupStart());
    for (number = 0; number < 64; ++number) OK(pleachGroupEnd());

    no_buffers(comm);
    partials(comm);
    OK(pleachCommAbort(comm));
    no_communicator(comm);
    OK(pleachCommInitFromEnv(&other, NULL));
    CHECK(other != comm);
    no_communicator(comm);
    OK(pleachCommFinalize(other));
    EXPECT(pleachInvalidUsage, pleachCommFinalize(other));
    EXPECT(pleachInvalidUsage, pleachBarrier(other, NULL));
    OK(pleachCommDestroy(other));
    no_communicator(other);
    return 0;
}
