/* Every function of windows and sessions with NULL, with nonsense, at the wrong time and after the
 * end, in a world of one rank. */
#include <signal.h>

#include "check.h"

static void arrived(const pleachArrival_t *arrival, void *context) { (void)arrival, (void)context; }

/* Every function that takes a window, with one that is none. */
static void no_window(pleachWindow_t window) {
    float data[4] = {0, 0, 0, 0};
    uint64_t version;
    size_t count;
    int is_free;
    REFUSED(pleachWindowPublish(window, data, NULL, &version));
    REFUSED(pleachWindowRead(window, 0, 0, 4, data, &version, NULL));
    REFUSED(pleachWindowReadTorn(window, 0, 0, 4, data, &version));
    REFUSED(pleachWindowIsFree(window, 0, 0, &is_free));
    REFUSED(pleachWindowWrite(window, 0, 0, data, 4, NULL));
    REFUSED(pleachWindowPoll(window, 0, arrived, NULL, &count));
    REFUSED(pleachWindowFinalize(window));
    EXPECT(pleachInvalidArgument, pleachWindowDestroy(window));
}

static void windows(pleachComm_t comm) {
    float data[4] = {1, 2, 3, 4};
    pleachWindow_t window = NULL, other = NULL;
    uint64_t version = 0;
    size_t count = 9;
    int is_free;
    no_window(NULL);
    SAYS("window is NULL");
    no_window((pleachWindow_t)(uintptr_t)0x123456789abcu);
    REFUSED(pleachWindowInit(NULL, 4, pleachFloat32, 1, comm));
    REFUSED(pleachWindowInit(&window, 4, pleachFloat32, 1, NULL));
    REFUSED(pleachWindowInit(&window, SIZE_MAX, pleachFloat32, 1, comm));
    REFUSED(pleachWindowInit(&window, SIZE_MAX / 8, pleachFloat32, 1, comm));
    REFUSED(pleachWindowInit(&window, 4, 12, 1, comm));
    REFUSED(pleachWindowInit(&window, 4, pleachFloat32, -1, comm));
    REFUSED(pleachWindowInit(&window, 4, pleachFloat32, 65536, comm));
    REFUSED(pleachWindowInit(&window, 4, pleachFloat32, 65535, comm));
    SAYS("slots");
    OK(pleachGroupStart());
    REFUSED(pleachWindowInit(&window, 4, pleachFloat32, 1, comm));
    OK(pleachGroupEnd());
    CHECK(window == NULL);

    OK(pleachWindowInit(&window, 4, pleachFloat32, 1, comm));
    REFUSED(pleachWindowPublish(window, NULL, NULL, NULL));
    REFUSED(pleachWindowRead(window, 0, 0, 4, NULL, NULL, NULL));
    REFUSED(pleachWindowRead(window, 1, 0, 4, data, NULL, NULL));
    REFUSED(pleachWindowRead(window, -1, 0, 4, data, NULL, NULL));
    REFUSED(pleachWindowRead(window, 0, 1, 4, data, NULL, NULL));
    REFUSED(pleachWindowReadTorn(window, 0, 5, 0, data, NULL));
    REFUSED(pleachWindowReadTorn(window, 0, 1, SIZE_MAX, data, NULL));
    REFUSED(pleachWindowIsFree(window, 0, 0, NULL));
    REFUSED(pleachWindowIsFree(window, 0, 0, &is_free));
    REFUSED(pleachWindowIsFree(window, 0, 70000, &is_free));
    REFUSED(pleachWindowWrite(window, 0, 0, data, 4, NULL));
    REFUSED(pleachWindowWrite(window, 1, 0, data, 4, NULL));
    REFUSED(pleachWindowPoll(window, 0, NULL, NULL, NULL));
    OK(pleachGroupStart());
    REFUSED(pleachWindowPublish(window, data, NULL, NULL));
    REFUSED(pleachWindowPoll(window, 0, arrived, NULL, NULL));
    REFUSED(pleachWindowFinalize(window));
    OK(pleachGroupEnd());
    OK(pleachWindowPoll(window, 1, arrived, NULL, &count));
    CHECK(count == 0);
    OK(pleachWindowPublish(window, data, NULL, &version));
    CHECK(version == 1);
    memset(data, 0, sizeof data);
    OK(pleachWindowRead(window, 0, 1, 3, data, NULL, NULL));
    CHECK(data[0] == 2 && data[2] == 4 && data[3] == 0);
    OK(pleachWindowFinalize(window));
    REFUSED(pleachWindowFinalize(window));
    OK(pleachWindowDestroy(window));
    no_window(window);
    /* Nothing is published, and nothing is written. */
    OK(pleachWindowInit(&other, 0, pleachFloat32, 0, comm));
    no_window(window);
    OK(pleachWindowPublish(other, NULL, NULL, NULL));
    OK(pleachWindowRead(other, 0, 0, 0, NULL, NULL, NULL));
    OK(pleachWindowDestroy(other));
}

/* Every function that takes a session, with one that is none. */
static void no_session(pleachSession_t session) {
    pleachVerdict_t verdict = PLEACH_VERDICT_INITIALIZER;
    pleachSessionInfo_t info = PLEACH_SESSION_INFO_INITIALIZER;
    pleachMember_t members[1];
    pleachComm_t comm = NULL;
    uint64_t step;
    void *data = &step;
    size_t count;
    int split = 7;
    REFUSED(pleachSessionState(session, "x", 4, pleachFloat32, &data));
    CHECK(data == NULL);
    REFUSED(pleachSessionGetState(session, "x", &data));
    REFUSED(pleachSessionBuffer(session, 4, &data));
    REFUSED(pleachSessionFreeBuffer(session, &data));
    REFUSED(pleachSessionNext(session, &step, &comm));
    CHECK(comm == NULL);
    REFUSED(pleachSessionCommit(session, 0, &verdict));
    CHECK(verdict.kind == 0);
    REFUSED(pleachSessionGetChange(session, pleachChangeLeft, members, 1, &count));
    REFUSED(pleachSessionSplit(session, NULL, 0, &split));
    CHECK(split == -1);
    REFUSED(pleachSessionGetSplit(session, 0, &comm));
    REFUSED(pleachSessionAudit(session));
    REFUSED(pleachSessionGetInfo(session, &info));
    REFUSED(pleachSessionLeaveOn(session, SIGTERM));
    REFUSED(pleachSessionLeaveAfterStep(session));
    REFUSED(pleachSessionLeave(session));
    EXPECT(pleachInvalidArgument, pleachSessionDestroy(session));
}

static void no_join(void) {
    pleachElastic_t elastic = PLEACH_ELASTIC_INITIALIZER;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachSession_t session = NULL;
    pleachUniqueId id, wrong;
    OK(pleachGetUniqueId(&id));
    memset(&wrong, 0x5a, sizeof wrong);
    REFUSED(pleachSessionJoin(NULL, 1, id, 0, NULL, NULL));
    REFUSED(pleachSessionJoin(&session, 1, wrong, 0, NULL, NULL));
    REFUSED(pleachSessionJoin(&session, 0, id, 0, NULL, NULL));
    REFUSED(pleachSessionJoin(&session, 1, id, -1, NULL, NULL));
    REFUSED(pleachSessionJoin(&session, 1, id, 1, NULL, NULL));
    REFUSED(pleachSessionJoinFromEnv(NULL, NULL, NULL));
    elastic.size = 8;
    REFUSED(pleachSessionJoinFromEnv(&session, &elastic, NULL));
    SAYS("PLEACH_ELASTIC_INITIALIZER");
    elastic.size = sizeof elastic, elastic.fewest = 3, elastic.most = 2;
    REFUSED(pleachSessionJoinFromEnv(&session, &elastic, NULL));
    SAYS("3 to 2 members");
    elastic.most = 4;
    REFUSED(pleachSessionJoinFromEnv(&session, &elastic, NULL));
    elastic.fewest = 1, elastic.heal = 2;
    REFUSED(pleachSessionJoinFromEnv(&session, &elastic, NULL));
    SAYS("elastic->heal");
    config.fabric = "pigeon";
    REFUSED(pleachSessionJoinFromEnv(&session, NULL, &config));
    config.fabric = NULL, config.size = 3;
    REFUSED(pleachSessionJoinFromEnv(&session, NULL, &config));
    OK(pleachGroupStart());
    REFUSED(pleachSessionJoinFromEnv(&session, NULL, NULL));
    REFUSED(pleachSessionJoin(&session, 1, id, 0, NULL, NULL));
    OK(pleachGroupEnd());
    CHECK(session == NULL);
}

static void sessions(void) {
    pleachVerdict_t verdict = PLEACH_VERDICT_INITIALIZER;
    pleachSessionInfo_t info = PLEACH_SESSION_INFO_INITIALIZER;
    pleachSession_t session = NULL, other = NULL;
    pleachComm_t comm = NULL, same = NULL, part = NULL;
    pleachWindow_t window = NULL;
    pleachMember_t members[1];
    uint64_t step = 9;
    float *data = NULL, plain[2] = {1, 2};
    void *state = NULL;
    size_t count, ignored;
    int colours[2] = {0, -2}, split = 7;
    no_session(NULL);
    SAYS("session is NULL");
    no_session((pleachSession_t)(uintptr_t)0x123456789abcu);
    no_join();

    OK(pleachSessionJoinFromEnv(&session, NULL, NULL));
    REFUSED(pleachSessionNext(session, NULL, &comm));
    REFUSED(pleachSessionNext(session, &step, NULL));
    REFUSED(pleachSessionCommit(session, 0, NULL));
    REFUSED(pleachSessionCommit(session, 0, &verdict));
    verdict.size = 8;
    REFUSED(pleachSessionCommit(session, 0, &verdict));
    SAYS("PLEACH_VERDICT_INITIALIZER");
    verdict.size = sizeof verdict, info.size = 8;
    REFUSED(pleachSessionGetInfo(session, NULL));
    REFUSED(pleachSessionGetInfo(session, &info));
    SAYS("PLEACH_SESSION_INFO_INITIALIZER");
    info.size = sizeof info;
    REFUSED(pleachSessionState(session, NULL, 4, pleachFloat32, &state));
    REFUSED(pleachSessionState(session, "x", 4, 99, &state));
    REFUSED(pleachSessionState(session, "x", 4, pleachFloat32, NULL));
    REFUSED(pleachSessionState(session, "x", SIZE_MAX, pleachFloat32, &state));
    REFUSED(pleachSessionGetState(session, NULL, &state));
    REFUSED(pleachSessionGetState(session, "x", NULL));
    REFUSED(pleachSessionGetState(session, "x", &state));
    CHECK(state == NULL);
    REFUSED(pleachSessionBuffer(session, 0, &state));
    REFUSED(pleachSessionBuffer(session, SIZE_MAX, &state));
    REFUSED(pleachSessionBuffer(session, 4, NULL));
    REFUSED(pleachSessionFreeBuffer(session, NULL));
    REFUSED(pleachSessionFreeBuffer(session, plain));
    REFUSED(pleachSessionGetChange(session, pleachChangeLeft, members, 1, NULL));
    REFUSED(pleachSessionGetChange(session, pleachChangeLeft, NULL, 1, &count));
    REFUSED(pleachSessionSplit(session, colours, 1, NULL));
    REFUSED(pleachSessionSplit(session, NULL, 1, &split));
    REFUSED(pleachSessionSplit(session, colours, 2, &split));
    SAYS("PLEACH_SPLIT_NOCOLOR");
    CHECK(split == -1);
    OK(pleachSessionSplit(session, colours, 1, &split));
    CHECK(split == 0);
    OK(pleachSessionSplit(session, NULL, 0, &split));
    CHECK(split == 1);
    REFUSED(pleachSessionGetSplit(session, 0, &comm));
    SAYS("no step has begun");
    REFUSED(pleachSessionLeaveOn(session, SIGKILL));
    REFUSED(pleachSessionLeaveOn(session, -3));
    OK(pleachSessionLeaveOn(session, SIGUSR1));
    OK(pleachSessionState(session, "x", 2, pleachBfloat16, &state));
    OK(pleachSessionBuffer(session, 8, (void **)&data));
    OK(pleachGroupStart());
    REFUSED(pleachSessionNext(session, &step, &comm));
    REFUSED(pleachSessionCommit(session, 0, &verdict));
    REFUSED(pleachSessionLeave(session));
    OK(pleachGroupEnd());

    /* A job of one process. */
    OK(pleachSessionNext(session, &step, &comm));
    CHECK(step == 0 && comm != NULL);
    REFUSED(pleachSessionNext(session, &step, &same));
    REFUSED(pleachSessionGetSplit(session, 2, &same));
    REFUSED(pleachSessionGetSplit(session, -1, &same));
    REFUSED(pleachSessionGetSplit(session, 0, NULL));
    REFUSED(pleachSessionSplit(session, colours, 1, &split));
    OK(pleachSessionGetSplit(session, 1, &same));
    CHECK(same == NULL);
    OK(pleachSessionGetSplit(session, 0, &part));
    OK(pleachSessionGetSplit(session, 0, &same));
    CHECK(same == part && part != comm);
    OK(pleachBarrier(part, NULL));
    REFUSED(pleachSessionAudit(session));
    SAYS("a step has begun");
    OK(pleachAllReduce(data, data, 2, pleachFloat32, pleachSum, comm, NULL));
    OK(pleachAllReduce(plain, data, 2, pleachFloat32, pleachSum, comm, NULL));
    CHECK(data[1] == 2);
    REFUSED(pleachAllReduce(data, data, 3, 99, pleachSum, comm, NULL));
    OK(pleachSessionCommit(session, 0, &verdict));
    CHECK(verdict.kind == pleachVerdictCommitted && verdict.members == 1 && verdict.step == 1);
    REFUSED(pleachSessionCommit(session, 0, &verdict));
    REFUSED(pleachSessionGetChange(session, pleachChangeLeft, members, 1, &count));
    OK(pleachSessionNext(session, &step, &same));
    CHECK(step == 1 && same == comm);
    if (RESULT(pleachWindowInit(&window, 1, pleachInt8, 1, comm)) == pleachSuccess)
        OK(pleachWindowDestroy(window));
    /* Its communicator may be destroyed, and is made again. */
    OK(pleachCommDestroy(comm));
    OK(pleachSessionCommit(session, 0, &verdict));
    OK(pleachSessionNext(session, &step, &same));
    CHECK(step == 2 && same != comm);
    /* A step that fails for ever. */
    for (count = 0; RESULT(pleachSessionCommit(session, -1, &verdict)) == pleachSuccess; ++count) {
        CHECK(verdict.kind == pleachVerdictRetry && verdict.left == 0 && verdict.came == 0);
        REFUSED(pleachSessionGetChange(session, 0, members, 1, &ignored));
        OK(pleachSessionNext(session, &step, &same));
        CHECK(step == 2);
    }
    SAYS("step 2 failed 4 times in a row on this member");
    CHECK(count == 3);
    OK(pleachSessionGetChange(session, pleachChangeMembers, members, 1, &count));
    CHECK(count == 1 && members[0].seat == 0);
    OK(pleachSessionAudit(session));
    OK(pleachSessionGetInfo(session, &info));
    CHECK(info.step == 2 && info.epoch >= 3);
    OK(pleachSessionLeaveAfterStep(session));
    EXPECT(pleachLeft, pleachSessionNext(session, &step, &same));
    CHECK(same == NULL);
    OK(pleachSessionLeave(session));
    REFUSED(pleachSessionLeave(session));
    REFUSED(pleachSessionGetInfo(session, &info));
    REFUSED(pleachSessionBuffer(session, 8, &state));
    OK(pleachSessionGetState(session, "x", &state));
    data[0] = 7;
    OK(pleachSessionFreeBuffer(session, data));
    OK(pleachSessionDestroy(session));
    no_session(session);
    OK(pleachSessionJoinFromEnv(&other, NULL, NULL));
    no_session(session);
    OK(pleachSessionNext(other, &step, &comm));
    OK(pleachSessionDestroy(other));
    EXPECT(pleachInvalidArgument, pleachBarrier(comm, NULL));
}

int main(void) {
    pleachComm_t comm = NULL;
    OK(pleachCommInitFromEnv(&comm, NULL));
    windows(comm);
    OK(pleachCommDestroy(comm));
    sessions();
    return 0;
}
