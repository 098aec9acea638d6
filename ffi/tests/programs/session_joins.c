/* A job that all ranks but the last one begin, and that the last one joins. It reads the state
 * behind its first step: session_joins RANK RANKS ID-FILE FABRIC. */
#include <unistd.h>

#include "meet.h"

#define COUNT 3000
#define LATE_AT 3
#define STEPS_OF_LATE 5

static int rank, ranks;

static pleachSession_t joined(const char *path, const char *fabric) {
    pleachElastic_t elastic = PLEACH_ELASTIC_INITIALIZER;
    elastic.fewest = (uint32_t)ranks - 1, elastic.most = 8, elastic.program = "session_joins.c";
    elastic.beginWaitMs = 20, elastic.heal = pleachHealHidden;
    return join_session(path, rank, ranks, fabric, &elastic);
}

/* The change names who came, and nobody repeats a step for it. */
static void the_late_one_is_named(pleachSession_t session) {
    pleachMember_t members[8];
    size_t count = 9;
    OK(pleachSessionGetChange(session, pleachChangeCame, members, 8, &count));
    CHECK(count == 1 && members[0].seat == ranks - 1 && members[0].reason == pleachReasonNone);
    OK(pleachSessionGetChange(session, pleachChangeLeft, NULL, 0, &count));
    CHECK(count == 0);
}

int main(int argc, char **argv) {
    pleachVerdict_t verdict = PLEACH_VERDICT_INITIALIZER;
    pleachSessionInfo_t info = PLEACH_SESSION_INFO_INITIALIZER;
    pleachSession_t session;
    pleachComm_t comm = NULL;
    char late[1024];
    int64_t sums[2], all = 0;
    double *state = NULL;
    uint64_t step = 0, epoch = 0;
    int own = 0, neutral = 0, at, is_late, members;
    CHECK(argc == 5);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);
    is_late = rank == ranks - 1;
    snprintf(late, sizeof late, "%s.late", argv[3]);
    for (at = 0; is_late && access(late, F_OK) != 0; ++at) {
        CHECK(at < 6000);
        pause_ms(10);
    }
    session = joined(argv[3], argv[4]);
    OK(pleachSessionState(session, "sum", COUNT, pleachFloat64, (void **)&state));
    for (sums[1] = 0; sums[1] == 0;) {
        OK(pleachSessionNext(session, &step, &comm));
        OK(pleachSessionGetInfo(session, &info));
        CHECK(info.seat == rank && (info.contributes || is_late));
        if (epoch != 0 && info.epoch != epoch && !is_late) the_late_one_is_named(session);
        epoch = info.epoch;
        neutral += !info.contributes;
        sums[0] = (int64_t)1 << info.seat, sums[1] = is_late && own >= STEPS_OF_LATE;
        OK(pleachAllReduce(sums, sums, 2, pleachInt64, pleachSum, comm, NULL));
        OK(pleachCommCount(comm, &members));
        all = ((int64_t)1 << members) - 1;
        CHECK(sums[0] == (info.contributes ? all : all - ((int64_t)1 << rank)) || sums[0] == all >> 1);
        OK(pleachSessionCommit(session, pleachSuccess, &verdict));
        CHECK(verdict.kind == pleachVerdictCommitted);
        OK(pleachSessionGetState(session, "sum", (void **)&state));
        CHECK(state != NULL);
        CHECK(state[0] == state[COUNT - 1] && (step == 0 || state[0] != 0));
        for (at = 0; at < COUNT; ++at) state[at] += (double)sums[0];
        ++own;
        if (rank == 0 && step == LATE_AT) {
            FILE *file = fopen(late, "w");
            CHECK(file != NULL && fclose(file) == 0);
        }
    }
    CHECK(neutral == (is_late ? 1 : 0));
    OK(pleachSessionAudit(session));
    OK(pleachSessionLeave(session));
    OK(pleachSessionDestroy(session));
    return 0;
}
