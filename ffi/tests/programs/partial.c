/* Partial all-reduce when nobody is late, when a rank is late, and when ranks do not agree or
 * leave: partial RANK RANKS ID-FILE. */
#include <pthread.h>

#include "meet.h"

#define COUNT 100
#define RANKS_MAX 64

static int rank, ranks;
static const char *path;
static pleachComm_t comm;

/* Returns when all ranks are so far. */
static void meet(void) {
    static int number;
    char name[2048];
    CHECK((size_t)snprintf(name, sizeof name, "%s.meet-%d", path, number++) < sizeof name);
    all_are_here(name, rank, ranks);
}

static int64_t ones(int of) { return (int64_t)1 << (8 * of); }

/* What the ranks below `end` give, together. */
static int64_t ones_below(int end) {
    int64_t sum = 0;
    int of;
    for (of = 0; of < end; ++of) sum += ones(of);
    return sum;
}

static void write_ones(pleachPartial_t partial) {
    void *data = NULL;
    size_t index;
    OK(pleachPartialContribution(partial, &data));
    CHECK(data != NULL);
    for (index = 0; index < COUNT; ++index) ((int64_t *)data)[index] = ones(rank);
}

static void all_are(const void *data, int64_t value) {
    size_t index;
    CHECK(data != NULL);
    for (index = 0; index < COUNT; ++index) CHECK(((const int64_t *)data)[index] == value);
}

typedef pleachResult_t lists(pleachPartial_t, int *, size_t, size_t *);

/* The list is that of the ranks from `first` to below `end`. */
static void ranks_are(lists *list, pleachPartial_t partial, int first, int end) {
    int found[RANKS_MAX], at;
    size_t count = 99, most = (size_t)(end - first);
    CHECK(list(partial, NULL, 0, &count) == pleachSuccess && count == most);
    CHECK(list(partial, found, RANKS_MAX, &count) == pleachSuccess && count == most);
    for (at = 0; at < end - first; ++at) CHECK(found[at] == first + at);
    /* No more than there is room for. */
    if (most == 0) return;
    found[most - 1] = -7;
    CHECK(list(partial, found, most - 1, &count) == pleachSuccess && count == most);
    CHECK(found[most - 1] == -7);
}

static pleachPartial_t begun(const pleachPartialConfig_t *config) {
    pleachPartial_t partial = NULL;
    OK(pleachPartialInit(&partial, COUNT, pleachInt64, pleachSum, config, comm));
    CHECK(partial != NULL);
    return partial;
}

static void nobody_is_late(void) {
    pleachPartialConfig_t config = PLEACH_PARTIAL_CONFIG_INITIALIZER;
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartial_t partial = begun(NULL);
    void *data;
    size_t count;
    int number;
    EXPECT(pleachInvalidUsage, pleachPartialContributors(partial, NULL, 0, &count));
    SAYS("no round");
    for (number = 0; number < 5; ++number) {
        write_ones(partial);
        OK(pleachPartialContribute(partial, &round));
        CHECK(round.size == sizeof round && round.number == (uint64_t)number && round.missed == 0);
        CHECK(round.own == pleachOwnCounted && round.contributors == ranks);
        CHECK(round.correction == NULL && round.corrected == 0);
        all_are(round.result, ones_below(ranks));
        ranks_are(pleachPartialContributors, partial, 0, ranks);
        ranks_are(pleachPartialCorrected, partial, 0, 0);
        /* The next contribution is apart from the result that is read. */
        write_ones(partial);
        all_are(round.result, ones_below(ranks));
    }
    OK(pleachPartialFinish(partial, &round));
    CHECK(round.own == pleachOwnAbstained && round.contributors == 0);
    EXPECT(pleachInvalidUsage, pleachPartialFinish(partial, &round));
    EXPECT(pleachInvalidUsage, pleachPartialContribute(partial, &round));
    EXPECT(pleachInvalidUsage, pleachPartialAbstain(partial, &round));
    SAYS("finished");
    OK(pleachPartialDestroy(partial));
    EXPECT(pleachInvalidArgument, pleachPartialContribute(partial, &round));
    SAYS("destroyed");

    /* Floats, divided by the contributors; the last rank has nothing to give. */
    config.activation = "all", config.divisor = pleachDivisorContributors;
    OK(pleachPartialInit(&partial, 1, pleachFloat32, pleachSum, &config, comm));
    OK(pleachPartialContribution(partial, &data));
    *(float *)data = 6;
    if (rank == ranks - 1)
        OK(pleachPartialAbstain(partial, &round));
    else
        OK(pleachPartialContribute(partial, &round));
    CHECK(round.own == (rank == ranks - 1 ? pleachOwnAbstained : pleachOwnCounted));
    CHECK(*(const float *)round.result == 6);
    ranks_are(pleachPartialContributors, partial, 0, ranks - 1);
    OK(pleachPartialFinish(partial, &round));
    OK(pleachPartialDestroy(partial));
}

/* The next contribution is written while the round of the one before goes on. */
static void a_started_one_is_waited_for(void) {
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
    pleachPartial_t partial = begun(NULL);
    void *first, *second;
    uint64_t counted[RANKS_MAX] = {0};
    size_t count;
    int number, of;
    EXPECT(pleachInvalidUsage, pleachPartialWait(partial, &round));
    SAYS("no contribution");
    for (number = 0; number < 5; ++number) {
        write_ones(partial);
        OK(pleachPartialContribution(partial, &first));
        OK(pleachPartialStartContribute(partial));
        EXPECT(pleachInvalidUsage, pleachPartialContributors(partial, NULL, 0, &count));
        EXPECT(pleachInvalidUsage, pleachPartialStartContribute(partial));
        EXPECT(pleachInvalidUsage, pleachPartialContribute(partial, &round));
        EXPECT(pleachInvalidUsage, pleachPartialAbstain(partial, &round));
        EXPECT(pleachInvalidUsage, pleachPartialFinish(partial, &round));
        OK(pleachPartialContribution(partial, &second));
        CHECK(first != second);
        *(int64_t *)second = 7;
        OK(pleachPartialWait(partial, &round));
        CHECK(round.number == (uint64_t)number && round.missed == 0 && round.own == pleachOwnCounted);
        all_are(round.result, ones_below(ranks));
        ranks_are(pleachPartialContributors, partial, 0, ranks);
        OK(pleachPartialContribution(partial, &first));
        CHECK(first == second && *(int64_t *)first == 7);
    }
    EXPECT(pleachInvalidUsage, pleachPartialWait(partial, &round));
    OK(pleachPartialGetReport(partial, &report, counted, (size_t)ranks - 1));
    CHECK(report.size == sizeof report && report.rounds == 5 && report.ranks == ranks);
    CHECK(report.late == 0 && report.missed == 0 && counted[ranks - 1] == 0);
    for (of = 0; of < ranks - 1; ++of) CHECK(counted[of] == 5);
    OK(pleachPartialFinish(partial, &round));
    EXPECT(pleachInvalidUsage, pleachPartialStartContribute(partial));
    OK(pleachPartialDestroy(partial));
}

/* The last rank contributes when the first round has ended without it. */
static void one_is_late(int late, int own) {
    pleachPartialConfig_t config = PLEACH_PARTIAL_CONFIG_INITIALIZER;
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
    pleachPartial_t partial;
    char activation[32];
    int is_last = rank == ranks - 1, counted = own == pleachOwnCarried ? ranks : ranks - 1;
    snprintf(activation, sizeof activation, "quorum:%d", ranks - 1);
    config.activation = activation, config.late = late;
    partial = begun(&config);
    write_ones(partial);
    if (!is_last) OK(pleachPartialContribute(partial, &round));
    meet();
    if (is_last) OK(pleachPartialContribute(partial, &round));
    CHECK(round.number == 0 && round.missed == 0 && round.own == (is_last ? own : pleachOwnCounted));
    CHECK(round.contributors == ranks - 1 && round.correction == NULL);
    all_are(round.result, ones_below(ranks - 1));
    ranks_are(pleachPartialContributors, partial, 0, ranks - 1);
    meet();

    /* The next round has what came late, or not. */
    if (!is_last) {
        write_ones(partial);
        OK(pleachPartialContribute(partial, &round));
    }
    meet();
    if (is_last) OK(pleachPartialAbstain(partial, &round));
    CHECK(round.number == 1 && round.missed == 0 && round.contributors == counted);
    CHECK(round.own == (is_last ? pleachOwnAbstained : pleachOwnCounted));
    all_are(round.result, ones_below(counted));
    ranks_are(pleachPartialContributors, partial, 0, counted);
    if (own == pleachOwnCorrected) {
        CHECK(round.corrected == 1);
        all_are(round.correction, ones(ranks - 1));
        ranks_are(pleachPartialCorrected, partial, ranks - 1, ranks);
    } else {
        CHECK(round.corrected == 0 && round.correction == NULL);
        ranks_are(pleachPartialCorrected, partial, 0, 0);
    }
    OK(pleachPartialFinish(partial, &round));
    CHECK(round.contributors == 0);
    OK(pleachPartialGetReport(partial, &report, NULL, 0));
    CHECK(report.rounds == 3 && report.late == (uint64_t)is_last);
    CHECK(report.carried == (uint64_t)(is_last && own == pleachOwnCarried));
    CHECK(report.dropped == (uint64_t)(is_last && own == pleachOwnDropped));
    CHECK(report.corrected == (uint64_t)(is_last && own == pleachOwnCorrected));
    OK(pleachPartialDestroy(partial));
}

/* Rounds that rank 0 asks for otherwise than the others are refused on all ranks before the first
 * one, and both ways are named. */
static void refused_on_all(size_t count, pleachDataType_t type, pleachRedOp_t op,
                           const pleachPartialConfig_t *config, const char *of_rank_0,
                           const char *of_others) {
    pleachPartial_t partial = NULL;
    EXPECT(pleachInvalidUsage, pleachPartialInit(&partial, count, type, op, config, comm));
    SAYS("ask for the same on all");
    SAYS(of_rank_0);
    SAYS(of_others);
    CHECK(partial == NULL);
    OK(pleachBarrier(comm, NULL));
}

/* What is not the same on all ranks is refused on all, and the communicator goes on. */
static void ranks_differ(void) {
    pleachPartialConfig_t config = PLEACH_PARTIAL_CONFIG_INITIALIZER;
    int is_first = rank == 0;
    refused_on_all(is_first ? 7 : 8, pleachFloat32, pleachSum, NULL, "7 f32 (sum)", "8 f32 (sum)");
    refused_on_all(7, is_first ? pleachInt32 : pleachFloat32, pleachSum, NULL, "7 i32 (sum)", "7 f32 (sum)");
    refused_on_all(7, pleachFloat32, is_first ? pleachMax : pleachSum, NULL, "7 f32 (max)", "7 f32 (sum)");
    config.activation = is_first ? "solo" : "majority", config.divisor = pleachDivisorNone;
    refused_on_all(7, pleachFloat32, pleachSum, &config, ", solo, ", ", majority, ");
    config.activation = "quorum:2", config.late = is_first ? pleachLateDrop : pleachLateCorrect;
    refused_on_all(7, pleachFloat32, pleachSum, &config, "late: drop", "late: correct");
    config.late = pleachLateDefault;
    config.divisor = is_first ? pleachDivisorWorld : pleachDivisorContributors;
    refused_on_all(7, pleachFloat32, pleachSum, &config, "divisor: world", "divisor: contributors");
    config.divisor = pleachDivisorNone, config.stalenessMax = is_first ? 3 : 4;
    refused_on_all(7, pleachFloat32, pleachSum, &config, "at most 3 rounds", "at most 4 rounds");
}

/* A round to which no rank gives anything is an error on all ranks, and the next one works. */
static void all_abstain(void) {
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartial_t partial = begun(NULL);
    EXPECT(pleachInvalidUsage, pleachPartialAbstain(partial, &round));
    SAYS("no rank had anything to give");
    write_ones(partial);
    OK(pleachPartialContribute(partial, &round));
    all_are(round.result, ones_below(ranks));
    OK(pleachPartialFinish(partial, &round));
    OK(pleachPartialDestroy(partial));
}

/* Contributes; again where another thread's short call was in the way. */
static void *contributes(void *partial) {
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachResult_t result;
    while ((result = RESULT(pleachPartialContribute(partial, &round))) == pleachInvalidUsage) {
        SAYS("another thread");
        pause_ms(1);
    }
    CHECK(result == pleachSuccess);
    all_are(round.result, ones_below(ranks));
    return NULL;
}

/* While a thread of rank 0 waits for the others, another one is refused. */
static void a_second_thread_is_refused(void) {
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
    pleachPartial_t partial = begun(NULL);
    pthread_t thread;
    void *data;
    size_t count;
    write_ones(partial);
    if (rank == 0) {
        CHECK(pthread_create(&thread, NULL, contributes, partial) == 0);
        while (RESULT(pleachPartialContribution(partial, &data)) == pleachSuccess) pause_ms(1);
        SAYS("another thread");
        EXPECT(pleachInvalidUsage, pleachPartialContribute(partial, &round));
        EXPECT(pleachInvalidUsage, pleachPartialAbstain(partial, &round));
        EXPECT(pleachInvalidUsage, pleachPartialFinish(partial, &round));
        EXPECT(pleachInvalidUsage, pleachPartialStartContribute(partial));
        EXPECT(pleachInvalidUsage, pleachPartialWait(partial, &round));
        EXPECT(pleachInvalidUsage, pleachPartialGetReport(partial, &report, NULL, 0));
        EXPECT(pleachInvalidUsage, pleachPartialContributors(partial, NULL, 0, &count));
        EXPECT(pleachInvalidUsage, pleachPartialCorrected(partial, NULL, 0, &count));
        meet();
        CHECK(pthread_join(thread, NULL) == 0);
    } else {
        meet();
        contributes(partial);
    }
    ranks_are(pleachPartialContributors, partial, 0, ranks);
    OK(pleachPartialFinish(partial, &round));
    OK(pleachPartialDestroy(partial));
}

/* A rank that leaves before the others have finished ends the rounds, but not the communicator. */
static void one_leaves(void) {
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartial_t partial = begun(NULL);
    void *data = NULL;
    size_t count;
    write_ones(partial);
    if (rank != ranks - 1) {
        char left[32];
        EXPECT(pleachRemoteError, pleachPartialContribute(partial, &round));
        snprintf(left, sizeof left, "rank %d", ranks - 1);
        SAYS(left);
        EXPECT(pleachRemoteError, pleachPartialAbstain(partial, &round));
        EXPECT(pleachInvalidUsage, pleachPartialContributors(partial, NULL, 0, &count));
        /* The contribution is still there. */
        OK(pleachPartialContribution(partial, &data));
        all_are(data, ones(rank));
    }
    OK(pleachPartialDestroy(partial));
    OK(pleachBarrier(comm, NULL));
}

int main(int argc, char **argv) {
    pleachUniqueId id;
    pleachPartial_t partial = NULL;
    CHECK(argc == 4);
    rank = atoi(argv[1]), ranks = atoi(argv[2]), path = argv[3];
    CHECK(ranks >= 2 && ranks < 8);
    share_id(path, rank, &id);
    OK(pleachCommInitRank(&comm, ranks, id, rank));
    nobody_is_late();
    a_started_one_is_waited_for();
    one_is_late(pleachLateDefault, pleachOwnCarried);
    one_is_late(pleachLateCarry, pleachOwnCarried);
    one_is_late(pleachLateDrop, pleachOwnDropped);
    one_is_late(pleachLateCorrect, pleachOwnCorrected);
    ranks_differ();
    all_abstain();
    a_second_thread_is_refused();
    one_leaves();
    /* The rounds do not need the communicator that they were made of. */
    partial = begun(NULL);
    OK(pleachCommFinalize(comm));
    OK(pleachCommDestroy(comm));
    write_ones(partial);
    contributes(partial);
    OK(pleachPartialFinish(partial, &(pleachRound_t)PLEACH_ROUND_INITIALIZER));
    OK(pleachPartialDestroy(partial));
    EXPECT(pleachInvalidArgument, pleachPartialInit(&partial, 1, pleachInt8, pleachSum, NULL, comm));
    return 0;
}
