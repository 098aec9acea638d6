/* Destroy, abort and a second thread while a call waits: interrupted RANK RANKS ID-FILE. */
#include <pthread.h>

#include "meet.h"

/* Far above what a loaded machine needs, far below the minute that a call waits. */
#define SOON_MS 10000

static int rank, ranks;
static pleachComm_t comm;

struct outcome {
    pleachResult_t result;
    int64_t sum;
    char text[512];
};

static pleachComm_t joined(const char *path, const char *part) {
    pleachUniqueId id;
    pleachComm_t made = NULL;
    share_id_of(path, part, rank, &id);
    OK(pleachCommInitRank(&made, ranks, id, rank));
    return made;
}

static void *reduces(void *context) {
    struct outcome *outcome = context;
    int64_t own = rank + 1;
    outcome->result = RESULT(pleachAllReduce(&own, &outcome->sum, 1, pleachInt64, pleachSum, comm, NULL));
    snprintf(outcome->text, sizeof outcome->text, "%s", pleachGetLastError(NULL));
    return NULL;
}

/* A thread of rank 0 that is in a call which no other rank has made. */
static pthread_t waiting(struct outcome *outcome) {
    pthread_t thread;
    int late = -1;
    long until = now_ms() + SOON_MS;
    CHECK(pthread_create(&thread, NULL, reduces, outcome) == 0);
    while (late < 0) {
        CHECK(now_ms() < until);
        OK(pleachCommGetWaitsFor(comm, &late));
        pause_ms(1);
    }
    CHECK(late > 0 && late < ranks);
    return thread;
}

int main(int argc, char **argv) {
    struct outcome outcome = {pleachInProgress, 0, ""};
    pleachUniqueId id; /* of "aborted" and "destroyed": only says that rank 0 is so far */
    pthread_t thread;
    long begun;
    CHECK(argc == 4);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);

    /* Abort: the call that waits here and the next calls elsewhere end at once. */
    comm = joined(argv[3], "abort");
    if (rank == 0) {
        thread = waiting(&outcome);
        begun = now_ms();
        OK(pleachCommAbort(comm));
        CHECK(pthread_join(thread, NULL) == 0);
        share_id_of(argv[3], "aborted", rank, &id);
        CHECK(now_ms() - begun < SOON_MS);
        if (outcome.result != pleachRemoteError || strstr(outcome.text, "abort") == NULL) {
            fprintf(stderr, "the call that was aborted: result %d: %s\n", (int)outcome.result, outcome.text);
            return 1;
        }
    } else {
        pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
        share_id_of(argv[3], "aborted", rank, &id);
        EXPECT(pleachRemoteError, pleachBarrier(comm, NULL));
        OK(pleachCommGetFailure(comm, &failure));
        CHECK(failure.kind == pleachFailureAborted && failure.rank == 0);
        OK(pleachCommDestroy(comm));
    }
    EXPECT(pleachInvalidArgument, pleachBarrier(comm, NULL));

    /* Destroy: the handle is gone at once, and the call that waits is carried out. */
    comm = joined(argv[3], "destroy");
    if (rank == 0) {
        thread = waiting(&outcome);
        begun = now_ms();
        OK(pleachCommDestroy(comm));
        CHECK(now_ms() - begun < SOON_MS);
        EXPECT(pleachInvalidArgument, pleachCommDestroy(comm));
        EXPECT(pleachInvalidArgument, pleachCommSetTimeout(comm, 1));
        share_id_of(argv[3], "destroyed", rank, &id);
        CHECK(pthread_join(thread, NULL) == 0);
    } else {
        share_id_of(argv[3], "destroyed", rank, &id);
        reduces(&outcome);
        OK(pleachCommDestroy(comm));
    }
    CHECK(outcome.result == pleachSuccess && outcome.sum == (int64_t)ranks * (ranks + 1) / 2);
    return 0;
}
