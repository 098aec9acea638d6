/* A job of which a process is killed in the middle of a step, and the others go on: session RANK
 * RANKS ID-FILE FABRIC. The last rank kills itself. */
#include <signal.h>

#include "meet.h"

#define COUNT 5000
#define KILLED_AT 6
#define STEPS 20

static int rank, ranks;

static pleachSession_t joined(const char *path, const char *fabric) {
    pleachElastic_t elastic = PLEACH_ELASTIC_INITIALIZER;
    elastic.fewest = 2, elastic.most = 8, elastic.program = "session.c";
    /* All ranks are there from the first step on, however slow the machine is. */
    elastic.beginWaitMs = 60000;
    return join_session(path, rank, ranks, fabric, &elastic);
}

/* Memory, before the first step. */
static void memory(pleachSession_t session, int64_t **sums, double **weights) {
    void *other = NULL, *same = NULL;
    OK(pleachSessionBuffer(session, COUNT * sizeof **sums, (void **)sums));
    OK(pleachSessionState(session, "weights", COUNT, pleachFloat64, (void **)weights));
    CHECK((*weights)[0] == 0 && (*weights)[COUNT - 1] == 0 && (*sums)[COUNT - 1] == 0);
    OK(pleachSessionGetState(session, "weights", &same));
    CHECK(same == *weights);
    EXPECT(pleachInvalidArgument, pleachSessionState(session, "weights", 1, pleachInt8, &other));
    SAYS("weights");
    CHECK(other == NULL);
    EXPECT(pleachInvalidArgument, pleachSessionGetState(session, "bias", &other));
    SAYS("bias");
    OK(pleachSessionBuffer(session, 100, &other));
    OK(pleachSessionFreeBuffer(session, other));
    EXPECT(pleachInvalidArgument, pleachSessionFreeBuffer(session, other));
}

/* In the part of the seats that are even, or of those that are odd: the bits of its members. */
static pleachResult_t part_of(pleachSession_t session, int split, int seat, int64_t bits) {
    int64_t own = (int64_t)1 << seat, parity = seat % 2 ? 0xaa : 0x55;
    pleachComm_t part = NULL, same = NULL;
    pleachResult_t result;
    OK(pleachSessionGetSplit(session, split, &part));
    OK(pleachSessionGetSplit(session, split, &same));
    CHECK(part != NULL && part == same);
    result = RESULT(pleachAllReduce(&own, &own, 1, pleachInt64, pleachBitOr, part, NULL));
    if (result == pleachSuccess) CHECK(own == (bits & parity));
    return result;
}

/* A step: each member gives one bit and its seat + 1. Returns what became of the last call. */
static pleachResult_t attempt(pleachSession_t session, int split, pleachComm_t comm, int seat, uint64_t step, int64_t *sums) {
    int64_t bits = (int64_t)1 << seat;
    int members, at;
    pleachResult_t result;
    OK(pleachCommCount(comm, &members));
    /* Nobody receives it. */
    if (seat == 0 && step == KILLED_AT && members == ranks) OK(pleachSend(&bits, 1, pleachInt64, 1, comm, NULL));
    sums[0] = bits;
    for (at = 1; at < COUNT; ++at) sums[at] = (int64_t)step + 1;
    /* In the session's memory, in place; then in memory of the program. */
    result = RESULT(pleachAllReduce(sums, sums, COUNT, pleachInt64, pleachSum, comm, NULL));
    if (result != pleachSuccess) return result;
    /* All members have begun the step. */
    if (seat == ranks - 1 && step == KILLED_AT) raise(SIGKILL);
    result = RESULT(pleachAllReduce(&bits, &bits, 1, pleachInt64, pleachBitOr, comm, NULL));
    if (result != pleachSuccess) return result;
    CHECK(bits == sums[0]);
    for (at = 1; at < COUNT; ++at) CHECK(sums[at] == members * ((int64_t)step + 1));
    return part_of(session, split, seat, bits);
}

/* The change names who was killed, and who goes on, and counts the message that nobody received. */
static void the_killed_one_is_named(pleachSession_t session, int seat, const pleachVerdict_t *verdict) {
    pleachMember_t members[8];
    size_t count = 9;
    int at;
    CHECK(verdict->left == 1 && verdict->came == 0 && verdict->members == ranks - 1);
    CHECK(verdict->epoch > verdict->from && verdict->step == KILLED_AT);
    OK(pleachSessionGetChange(session, pleachChangeLeft, members, 8, &count));
    CHECK(count == 1 && members[0].seat == ranks - 1 && members[0].incarnation != 0);
    /* A tool between may hide the end of the process from the kernel's witness. */
    CHECK(members[0].reason == pleachReasonDied || members[0].reason == pleachReasonUnreachable);
    CHECK(strstr(verdict->text, "seat ") != NULL);
    OK(pleachSessionGetChange(session, pleachChangeCame, NULL, 0, &count));
    CHECK(count == 0);
    members[1].seat = -7;
    OK(pleachSessionGetChange(session, pleachChangeMembers, members, 1, &count));
    CHECK(count == (size_t)ranks - 1 && members[0].seat == 0 && members[1].seat == -7);
    OK(pleachSessionGetChange(session, pleachChangeMembers, members, 8, &count));
    for (at = 0; at < ranks - 1; ++at) {
        CHECK(members[at].seat == at && members[at].reason == pleachReasonNone);
        CHECK(members[at].unreceivedTo == (seat == 0 && at == 1) && members[at].unreceivedFrom == (seat == 1 && at == 0));
    }
}

int main(int argc, char **argv) {
    pleachVerdict_t verdict = PLEACH_VERDICT_INITIALIZER;
    pleachSessionInfo_t info = PLEACH_SESSION_INFO_INITIALIZER;
    pleachSession_t session;
    pleachComm_t comm = NULL, former = NULL, part = NULL;
    uint64_t step = 99;
    int64_t *sums, own = 0;
    double *weights, *held;
    size_t count;
    int seat, retries = 0, at, split = -1;
    const int parities[8] = {0, 1, 0, 1, 0, 1, 0, 1};
    CHECK(argc == 5);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);
    session = joined(argv[3], argv[4]);
    memory(session, &sums, &weights);
    OK(pleachSessionSplit(session, parities, 8, &split));
    CHECK(split == 0);
    OK(pleachSessionGetInfo(session, &info));
    CHECK(info.size == sizeof info && info.step == 0 && info.seat == rank);
    seat = info.seat;
    EXPECT(pleachInvalidUsage, pleachSessionGetChange(session, pleachChangeLeft, NULL, 0, &count));
    EXPECT(pleachInvalidUsage, pleachSessionCommit(session, pleachSuccess, &verdict));
    SAYS("pleachSessionNext");

    while (info.step < STEPS) {
        int outcome;
        OK(pleachSessionNext(session, &step, &comm));
        CHECK(step == info.step && comm != NULL);
        if (former == NULL) former = comm;
        outcome = attempt(session, split, comm, seat, step, sums);
        /* A step fails once on rank 0, by the program. */
        if (step == 2 && rank == 0 && retries == 0) outcome = -1;
        if (outcome == pleachRemoteError) {
            pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
            OK(pleachCommGetFailure(comm, &failure));
            if (failure.kind == pleachFailureNone) {
                /* It was the call of the part. */
                OK(pleachSessionGetSplit(session, split, &part));
                OK(pleachCommGetFailure(part, &failure));
            }
            CHECK(failure.kind == pleachFailureChanged);
        }
        /* What the program says of a step whose call has failed does not count. */
        OK(pleachSessionCommit(session, step == KILLED_AT ? pleachSuccess : outcome, &verdict));
        if (verdict.kind == pleachVerdictRetry) {
            ++retries;
            if (verdict.left > 0) the_killed_one_is_named(session, seat, &verdict);
            else CHECK(step == 2 && verdict.came == 0 && verdict.members == ranks);
        } else {
            CHECK(verdict.kind == pleachVerdictCommitted && verdict.text[0] == 0);
            CHECK(verdict.members == (step < KILLED_AT ? ranks : ranks - 1));
            CHECK(sums[0] == ((int64_t)1 << verdict.members) - 1);
            OK(pleachSessionGetState(session, "weights", (void **)&held));
            CHECK(held == weights);
            for (at = 0; at < COUNT; ++at) weights[at] += (double)sums[1] / verdict.members;
            own += (int64_t)step + 1;
            OK(pleachSessionAudit(session));
        }
        OK(pleachSessionGetInfo(session, &info));
        CHECK(info.step == verdict.step);
    }
    /* Step 2 was repeated once, and the step of the death. */
    CHECK(retries == 2);
    CHECK(own == STEPS * (STEPS + 1) / 2);
    for (at = 0; at < COUNT; ++at) CHECK(weights[at] == (double)own);
    CHECK(comm != former);
    EXPECT(pleachInvalidArgument, pleachBarrier(former, NULL));

    OK(pleachSessionLeave(session));
    EXPECT(pleachInvalidUsage, pleachSessionNext(session, &step, &comm));
    SAYS("has left");
    EXPECT(pleachInvalidUsage, pleachSessionLeave(session));
    OK(pleachSessionGetState(session, "weights", (void **)&held));
    CHECK(held[COUNT - 1] == (double)own);
    OK(pleachSessionDestroy(session));
    EXPECT(pleachInvalidArgument, pleachSessionDestroy(session));
    return 0;
}
