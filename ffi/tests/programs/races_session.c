/* Every function of windows and sessions from several threads while another thread ends what it
   works on, in a world of one rank: each call succeeds or says what is wrong. */
#include <pthread.h>
#include <signal.h>

#include "meet.h"

#define THREADS 3
#define ROUNDS 15

#define ANSWERED(call) answered(#call, (call))

static pleachComm_t comm;
static pleachWindow_t shared_window;
static pleachSession_t shared_session;
static volatile int is_over;

/* What a call may say of a handle that another thread ends meanwhile, and of a session whose step
   another thread has failed. */
static void answered(const char *call, pleachResult_t result) {
    seen(call, result);
    if (result == pleachSuccess || result == pleachRemoteError || is_refusal(result)) return;
    if (result == pleachLeft || result == pleachStepFailed) return;
    fprintf(stderr, "%s: result %d: %s\n", call, (int)result, pleachGetLastError(NULL));
    exit(1);
}

static void arrived(const pleachArrival_t *arrival, void *context) { (void)arrival, (void)context; }

static void uses_window(void) {
    float data[4] = {1, 2, 3, 4};
    size_t count;
    int is_free;
    ANSWERED(pleachWindowPublish(shared_window, data, NULL, NULL));
    ANSWERED(pleachWindowRead(shared_window, 0, 0, 4, data, NULL, NULL));
    ANSWERED(pleachWindowReadTorn(shared_window, 0, 1, 2, data, NULL));
    ANSWERED(pleachWindowIsFree(shared_window, 0, 0, &is_free));
    ANSWERED(pleachWindowWrite(shared_window, 0, 0, data, 4, NULL));
    ANSWERED(pleachWindowPoll(shared_window, 0, arrived, NULL, &count));
}

/* `split`: that of this thread, once it has one. */
static void uses_session(int number, int *split) {
    pleachVerdict_t verdict = PLEACH_VERDICT_INITIALIZER;
    pleachSessionInfo_t info = PLEACH_SESSION_INFO_INITIALIZER;
    pleachMember_t members[1];
    pleachComm_t epoch = NULL, part = NULL;
    uint64_t step;
    void *data = NULL;
    size_t count;
    char name[8];
    ANSWERED(pleachSessionGetInfo(shared_session, &info));
    ANSWERED(pleachSessionBuffer(shared_session, 64, &data));
    ANSWERED(pleachSessionFreeBuffer(shared_session, data));
    snprintf(name, sizeof name, "%d", number);
    ANSWERED(pleachSessionState(shared_session, name, 4, pleachFloat32, &data));
    ANSWERED(pleachSessionGetState(shared_session, name, &data));
    if (*split < 0) ANSWERED(pleachSessionSplit(shared_session, &number, 1, split));
    ANSWERED(pleachSessionNext(shared_session, &step, &epoch));
    ANSWERED(pleachBarrier(epoch, NULL));
    ANSWERED(pleachSessionGetSplit(shared_session, *split, &part));
    ANSWERED(pleachBarrier(part, NULL));
    ANSWERED(pleachSessionCommit(shared_session, number == 1, &verdict));
    ANSWERED(pleachSessionGetChange(shared_session, pleachChangeMembers, members, 1, &count));
    ANSWERED(pleachSessionAudit(shared_session));
}

static void *uses_all(void *context) {
    int number = *(int *)context, split = -1;
    while (!is_over) {
        uses_window();
        uses_session(number, &split);
        if (number == 0) {
            pleachWindow_t window = NULL;
            ANSWERED(pleachWindowInit(&window, 4, pleachFloat32, 1, comm));
            if (window != NULL) {
                ANSWERED(pleachWindowFinalize(window));
                OK(pleachWindowDestroy(window));
            }
        }
    }
    return NULL;
}

static void *destroys(void *ended) {
    ANSWERED(pleachWindowFinalize(shared_window));
    ANSWERED(pleachSessionLeaveAfterStep(shared_session));
    ANSWERED(pleachSessionLeave(shared_session));
    *(int *)ended = RESULT(pleachWindowDestroy(shared_window)) == pleachSuccess;
    *(int *)ended += 16 * (RESULT(pleachSessionDestroy(shared_session)) == pleachSuccess);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS], ends[2];
    int numbers[THREADS], ended[2], round, at;
    pleachUniqueId id;
    for (round = 0; round < ROUNDS; ++round) {
        is_over = 0;
        OK(pleachCommInitFromEnv(&comm, NULL));
        OK(pleachWindowInit(&shared_window, 4, pleachFloat32, 1, comm));
        if (round % 2) {
            OK(pleachSessionJoinFromEnv(&shared_session, NULL, NULL));
        } else {
            OK(pleachGetUniqueId(&id));
            OK(pleachSessionJoin(&shared_session, 1, id, 0, NULL, NULL));
        }
        OK(pleachSessionLeaveOn(shared_session, SIGUSR1));
        for (at = 0; at < THREADS; ++at) {
            numbers[at] = at;
            CHECK(pthread_create(&threads[at], NULL, uses_all, &numbers[at]) == 0);
        }
        pause_ms(round % 5);
        /* Two threads end everything: each handle is ended once. */
        for (at = 0; at < 2; ++at) CHECK(pthread_create(&ends[at], NULL, destroys, &ended[at]) == 0);
        for (at = 0; at < 2; ++at) CHECK(pthread_join(ends[at], NULL) == 0);
        CHECK(ended[0] + ended[1] == 1 + 16);
        is_over = 1;
        for (at = 0; at < THREADS; ++at) CHECK(pthread_join(threads[at], NULL) == 0);
        OK(pleachCommDestroy(comm));
    }
    return 0;
}
