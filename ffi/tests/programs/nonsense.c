/* Every function with NULL, with nonsense, at the wrong time and after the end, in a world of one rank. */
#include "check.h"

#define REFUSED(call) CHECK((call) == pleachInvalidArgument || (call) == pleachInvalidUsage)

int main(void) {
    pleachUniqueId id, wrong;
    pleachComm_t comm = NULL, other = NULL, never = (pleachComm_t)(uintptr_t)0x123456789abcu;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
    pleachResult_t error;
    pleachRedOp_t op;
    float data[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    size_t counts[1] = {4}, huge[1] = {SIZE_MAX};
    int number;
    unsigned kind;

    CHECK(strlen(pleachGetLastError()) == 0);
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

    /* No communicator. */
    REFUSED(pleachBarrier(NULL, NULL));
    REFUSED(pleachBarrier(never, NULL));
    REFUSED(pleachCommDestroy(NULL));
    REFUSED(pleachCommAbort(never));
    REFUSED(pleachCommFinalize(NULL));
    REFUSED(pleachCommCount(never, &number));
    REFUSED(pleachCommUserRank(NULL, &number));
    REFUSED(pleachCommSplit(never, 0, 0, &other));
    REFUSED(pleachCommSetTimeout(NULL, 1));
    REFUSED(pleachCommGetAsyncError(never, &error));
    REFUSED(pleachCommGetFailure(NULL, &failure));
    REFUSED(pleachRedOpCreatePreMulSum(&op, data, pleachFloat32, NULL));
    REFUSED(pleachRedOpDestroy(0, NULL));

    OK(pleachCommInitFromEnv(&comm, NULL));
    CHECK(comm != NULL);
    REFUSED(pleachCommCount(comm, NULL));
    REFUSED(pleachCommUserRank(comm, NULL));
    REFUSED(pleachCommGetAsyncError(comm, NULL));
    REFUSED(pleachCommGetFailure(comm, NULL));
    failure.size = 8;
    REFUSED(pleachCommGetFailure(comm, &failure));
    REFUSED(pleachCommSplit(comm, 0, 0, NULL));
    REFUSED(pleachCommSplit(comm, -7, 0, &other));
    REFUSED(pleachRedOpCreatePreMulSum(NULL, data, pleachFloat32, comm));
    REFUSED(pleachRedOpCreatePreMulSum(&op, NULL, pleachFloat32, comm));
    REFUSED(pleachRedOpCreatePreMulSum(&op, data, 99, comm));
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
    REFUSED(pleachCommSplit(comm, 0, 0, &other));
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

    OK(pleachCommAbort(comm));
    REFUSED(pleachBarrier(comm, NULL));
    REFUSED(pleachCommAbort(comm));
    OK(pleachCommInitFromEnv(&other, NULL));
    CHECK(other != comm);
    REFUSED(pleachBarrier(comm, NULL));
    OK(pleachCommDestroy(other));
    return 0;
}
