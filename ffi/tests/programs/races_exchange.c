/* Every function of the tensor exchange from several threads while others end what it works on:
   each call succeeds or says what is wrong: races_exchange 0 1 ID-FILE FABRIC. */
#include <pthread.h>

#include "exchange.h"

#define THREADS 3
#define ROUNDS 12

/* What a call may say of a handle that another thread ends meanwhile. */
#define ANSWERED(call) answered(#call, (call))

static pleachResult_t answered(const char *call, pleachResult_t result) {
    seen(call, result);
    if (result == pleachSuccess || result == pleachRemoteError || result == pleachTimeout || result == pleachInProgress
        || is_refusal(result))
        return result;
    fprintf(stderr, "%s: result %d: %s\n", call, (int)result, pleachGetLastError(NULL));
    exit(1);
}

static pleachEndpoint_t endpoint, sender;
static pleachPeer_t peer;
static pleachTensor_t shared_tensor;
static pleachReceive_t shared_receive;
static volatile int is_over;
static pthread_mutex_t counted = PTHREAD_MUTEX_INITIALIZER;
static int started, ended, sent, released;

static void count(int *number, int more) {
    pthread_mutex_lock(&counted);
    *number += more;
    pthread_mutex_unlock(&counted);
}

static int all_are_called(void) {
    int are;
    pthread_mutex_lock(&counted);
    are = started == ended && sent == released;
    pthread_mutex_unlock(&counted);
    return are;
}

static void received(void *context, pleachResult_t result, pleachTensor_t tensor) {
    (void)context;
    if (result == pleachSuccess) OK(pleachTensorRelease(tensor));
    else CHECK(tensor == NULL && last_failure().kind != pleachExchangeNone);
    count(&ended, 1);
}

static void release(void *address, void *context) {
    CHECK(context == NULL);
    OK(pleachLendableFree(address));
    count(&released, 1);
}

static void sends(uint64_t step) {
    const size_t dim = 30;
    const char *name = "published";
    pleachTensor_t tensor = NULL;
    void *data = NULL;
    ANSWERED(pleachTensorAlloc(sender, pleachFloat32, 1, &dim, &data, &tensor));
    ANSWERED(pleachEndpointSend(sender, step, "w", tensor, 100));
    ANSWERED(pleachEndpointPublish(sender, 1000, 1, &name, &tensor));
    ANSWERED(pleachTensorRelease(tensor));
    data = NULL;
    if (ANSWERED(pleachLendableAlloc(sender, 200, &data)) == pleachSuccess) {
        if (ANSWERED(pleachEndpointSendMemory(sender, step, "v", data, pleachInt16, 1, &dim, release, NULL, 100)) == pleachSuccess)
            count(&sent, 1);
        else OK(pleachLendableFree(data));
    }
    ANSWERED(pleachEndpointAbort(sender, step + 500, "over"));
    ANSWERED(pleachEndpointCleanUp(sender, step + 500));
    ANSWERED(pleachEndpointSend(sender, step, "u", shared_tensor, 100));
}

static void receives(uint64_t step) {
    pleachTensorInfo_t info = PLEACH_TENSOR_INFO_INITIALIZER;
    pleachEndpointCounts_t counts = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
    pleachExchangeFailure_t failure = PLEACH_EXCHANGE_FAILURE_INITIALIZER;
    char address[PLEACH_ADDRESS_BYTES] = "127.0.0.1:1";
    pleachTensor_t tensor = NULL;
    pleachReceive_t receive = NULL, told = NULL;
    pleachPeer_t other = NULL;
    uint64_t incarnation;
    int ready;
    ANSWERED(pleachPeerShareRegions(peer, 200));
    if (ANSWERED(pleachPeerReceive(peer, step, "w", 20, &tensor)) == pleachSuccess) {
        OK(pleachTensorGetInfo(tensor, &info));
        OK(pleachTensorRelease(tensor));
    }
    if (ANSWERED(pleachPeerStartReceive(peer, step, "v", 20, received, NULL, &told)) == pleachSuccess) count(&started, 1);
    ANSWERED(pleachPeerStartReceive(peer, step, "u", 20, NULL, NULL, &receive));
    ANSWERED(pleachReceiveTest(receive, &ready));
    if (ANSWERED(pleachReceiveWait(receive, 5, &tensor)) == pleachSuccess) OK(pleachTensorRelease(tensor));
    ANSWERED(pleachReceiveCancel(receive));
    if (step % 2) ANSWERED(pleachReceiveCancel(told));
    ANSWERED(pleachEndpointReceive(sender, step, "w", 1, &tensor));
    if (tensor != NULL) OK(pleachTensorRelease(tensor));
    ANSWERED(pleachTensorGetInfo(shared_tensor, &info));
    ANSWERED(pleachReceiveTest(shared_receive, &ready));
    ANSWERED(pleachReceiveWait(shared_receive, 1, &tensor));
    ANSWERED(pleachEndpointGetCounts(endpoint, &counts));
    ANSWERED(pleachEndpointIncarnation(endpoint, &incarnation));
    ANSWERED(pleachPeerIncarnation(peer, &incarnation));
    ANSWERED(pleachEndpointAddress(sender, address, sizeof address));
    ANSWERED(pleachEndpointConnect(endpoint, address, &other));
    ANSWERED(pleachPeerClose(other));
    ANSWERED(pleachGetLastExchangeFailure(&failure));
}

static void *uses_all(void *number) {
    uint64_t step = *(uint64_t *)number;
    for (; !is_over; step += 10) sends(step), receives(step);
    return NULL;
}

static void *destroys(void *by_this) {
    int *done = by_this;
    *done = RESULT(pleachPeerClose(peer)) == pleachSuccess;
    *done += 16 * (RESULT(pleachTensorRelease(shared_tensor)) == pleachSuccess);
    *done += 256 * (RESULT(pleachReceiveCancel(shared_receive)) == pleachSuccess);
    *done += 4096 * (RESULT(pleachEndpointClose(sender)) == pleachSuccess);
    *done += 65536 * (RESULT(pleachEndpointClose(endpoint)) == pleachSuccess);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS], ends[2];
    uint64_t numbers[THREADS];
    pleachEndpointOptions_t options = PLEACH_ENDPOINT_OPTIONS_INITIALIZER;
    pleachEndpoint_t other;
    const size_t dim = 10;
    int done[2], round, at;
    long begun;
    CHECK(argc == 5);
    for (round = 0; round < ROUNDS; ++round) {
        is_over = 0, started = ended = sent = released = 0;
        endpoint = open_endpoint(argv[4]), sender = open_endpoint(argv[4]);
        peer = peer_of(endpoint, sender);
        OK(pleachTensorAlloc(sender, pleachInt8, 1, &dim, NULL, &shared_tensor));
        OK(pleachPeerStartReceive(peer, 2000, "never", 0, NULL, NULL, &shared_receive));
        for (at = 0; at < THREADS; ++at) {
            numbers[at] = (uint64_t)at;
            CHECK(pthread_create(&threads[at], NULL, uses_all, &numbers[at]) == 0);
        }
        pause_ms(round % 4 * 10);
        /* Two threads end everything: each handle is ended once. */
        for (at = 0; at < 2; ++at) CHECK(pthread_create(&ends[at], NULL, destroys, &done[at]) == 0);
        for (at = 0; at < 2; ++at) CHECK(pthread_join(ends[at], NULL) == 0);
        CHECK(done[0] + done[1] == 1 + 16 + 256 + 4096 + 65536);
        pause_ms(1);
        is_over = 1;
        for (at = 0; at < THREADS; ++at) CHECK(pthread_join(threads[at], NULL) == 0);
        /* Every callback is called once, at the latest when all that was received is released. */
        begun = now_ms();
        while (!all_are_called() && now_ms() - begun < LONG_MS) pause_ms(1);
        CHECK(all_are_called());
    }
    ANSWERED(pleachEndpointOpen(&other, &options));
    OK(pleachEndpointClose(other));
    return 0;
}
