/* What ranks are told when a rank makes another call, is late, or is gone:
   failures RANK RANKS ID-FILE. Rank 1 ends without a word in the last part. */
#include "meet.h"

#define LIMIT_MS 200
/* Any rank but 0. */
#define LATE -1

static pleachComm_t joined(const char *path, const char *part, int rank, int ranks) {
    pleachUniqueId id;
    pleachComm_t comm = NULL;
    share_id_of(path, part, rank, &id);
    OK(pleachCommInitRank(&comm, ranks, id, rank));
    return comm;
}

static void expect_failure(pleachComm_t comm, int kind, int about, const char *operation, pleachResult_t result) {
    pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
    pleachResult_t error = pleachSuccess;
    OK(pleachCommGetAsyncError(comm, &error));
    CHECK(error == result);
    OK(pleachCommGetFailure(comm, &failure));
    CHECK(failure.kind == kind && failure.host == 0 && failure.foundBy >= 0);
    CHECK(failure.rank == about || (about == LATE && failure.rank > 0));
    CHECK(strlen(failure.text) > 20 && strstr(failure.operation, operation) != NULL);
    CHECK(failure.step[0] != 0 && strstr(failure.text, failure.step) != NULL);
    CHECK(kind != pleachFailureTimedOut || failure.waitedMs >= LIMIT_MS);
    /* The first failure stays. */
    EXPECT(result, pleachBarrier(comm, NULL));
    OK(pleachCommDestroy(comm));
}

int main(int argc, char **argv) {
    int rank, ranks;
    char split_path[4096];
    float data[4] = {0, 0, 0, 0};
    pleachComm_t comm, part = NULL, part_of_part = NULL;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    CHECK(argc == 4);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);
    CHECK((size_t)snprintf(split_path, sizeof split_path, "%s.split", argv[3]) < sizeof split_path);

    /* Another call. */
    comm = joined(argv[3], "mismatch", rank, ranks);
    if (rank == 1) {
        EXPECT(pleachInvalidUsage, pleachBarrier(comm, NULL));
    } else {
        EXPECT(pleachInvalidUsage, pleachAllReduce(data, data, 4, pleachFloat32, pleachSum, comm, NULL));
    }
    SAYS("barrier");
    SAYS("all-reduce of 4 f32");
    OK(pleachCommDestroy(comm));

    /* A rank that is late. */
    comm = joined(argv[3], "late", rank, ranks);
    if (rank == 0) {
        OK(pleachCommSetTimeout(comm, LIMIT_MS));
        EXPECT(pleachTimeout, pleachAllReduce(data, data, 4, pleachFloat32, pleachSum, comm, NULL));
        SAYS(ranks == 2 ? "rank 1" : "rank ");
        expect_failure(comm, pleachFailureTimedOut, LATE, "all-reduce of 4 f32", pleachTimeout);
    } else {
        /* Hears of it in its next call, which is another one. */
        pleachComm_t next = joined(argv[3], "lost", rank, ranks);
        CHECK(pleachAllReduce(data, data, 4, pleachFloat32, pleachSum, comm, NULL) != pleachSuccess);
        OK(pleachCommDestroy(comm));
        comm = next;
    }
    if (rank == 0) comm = joined(argv[3], "lost", rank, ranks);

    /* A rank that is late to a split. */
    OK(pleachCommSplit(comm, 0, rank, &part, NULL));
    if (rank == 0) {
        OK(pleachCommSetTimeout(part, LIMIT_MS));
        EXPECT(pleachTimeout, pleachCommSplit(part, 0, rank, &part_of_part, NULL));
        expect_failure(part, pleachFailureTimedOut, LATE, "all-gather", pleachTimeout);
        all_are_here(split_path, rank, 1);
    } else {
        all_are_here(split_path, rank, 1);
        CHECK(pleachCommSplit(part, 0, rank, &part_of_part, NULL) != pleachSuccess);
        OK(pleachCommDestroy(part));
    }
    CHECK(part_of_part == NULL);

    /* A part of a communicator with a deadline of its own. */
    config.timeoutMs = LIMIT_MS;
    OK(pleachCommSplit(comm, 0, rank, &part, &config));
    if (rank == 0) {
        EXPECT(pleachTimeout, pleachBcast(data, 4, pleachFloat32, 1, part, NULL));
        expect_failure(part, pleachFailureTimedOut, LATE, "broadcast root 1 of 4 f32", pleachTimeout);
        all_are_here(argv[3], rank, 1);
    } else {
        all_are_here(argv[3], rank, 1);
        CHECK(pleachBarrier(part, NULL) != pleachSuccess);
        OK(pleachCommDestroy(part));
    }

    /* A rank that is gone. */
    if (rank == 1) _Exit(0);
    EXPECT(pleachRemoteError, pleachCommSplit(comm, 0, rank, &part, NULL));
    CHECK(part == NULL);
    expect_failure(comm, pleachFailureLost, 1, "", pleachRemoteError);
    return 0;
}
