/* Tensors by key: first between two endpoints of this process, then between all ranks: exchange
   RANK RANKS ID-FILE FABRIC. */
#include <pthread.h>

#include "exchange.h"

static int way; /* of tensors that come from a peer */

/* What a callback was told. */
struct told {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int times, released;
    pleachResult_t result;
    int kind;
    pleachTensor_t tensor;
    void *memory;
};

static struct told *new_told(void) {
    struct told *told = calloc(1, sizeof *told);
    CHECK(told != NULL && pthread_mutex_init(&told->lock, NULL) == 0 && pthread_cond_init(&told->changed, NULL) == 0);
    return told;
}

static void received(void *context, pleachResult_t result, pleachTensor_t tensor) {
    struct told *told = context;
    pthread_mutex_lock(&told->lock);
    told->times += 1, told->result = result, told->tensor = tensor;
    if (result != pleachSuccess) {
        CHECK(tensor == NULL && last_failure().result == (int)result);
        told->kind = last_failure().kind;
    }
    pthread_cond_broadcast(&told->changed);
    pthread_mutex_unlock(&told->lock);
}

/* Gives lendable memory back, which is a call of the library. */
static void released(void *address, void *context) {
    struct told *told = context;
    if (told->memory != NULL) OK(pleachLendableFree(told->memory));
    pthread_mutex_lock(&told->lock);
    told->released += 1, told->memory = address;
    pthread_cond_broadcast(&told->changed);
    pthread_mutex_unlock(&told->lock);
}

/* Waits until `count` calls have come, and a moment more for one too many. */
static void wait_for(struct told *told, const int *counted, int count) {
    pthread_mutex_lock(&told->lock);
    while (*counted < count) pthread_cond_wait(&told->changed, &told->lock);
    pthread_mutex_unlock(&told->lock);
    pause_ms(2);
    pthread_mutex_lock(&told->lock);
    CHECK(*counted == count);
    pthread_mutex_unlock(&told->lock);
}

static void shapes(pleachEndpoint_t sender, pleachPeer_t peer) {
    const pleachDataType_t types[] = {pleachInt8, pleachUint8, pleachInt32, pleachUint32, pleachInt64, pleachUint64, pleachFloat16,
        pleachFloat32, pleachFloat64, pleachBfloat16, pleachFloat8e4m3, pleachFloat8e5m2, pleachInt16, pleachUint16};
    const size_t dims[PLEACH_DIMENSIONS_MAX] = {2, 1, 3, 1, 1, 1, 1, 5}, none[] = {4, 0};
    pleachTensorInfo_t info, own;
    pleachTensor_t tensor;
    size_t at;
    void *data;
    for (at = 0; at < sizeof types / sizeof *types; ++at) {
        OK(pleachTensorAlloc(sender, types[at], 8, dims, &data, &tensor));
        own = info_of(tensor);
        CHECK(own.data == data && own.way == pleachTensorOwn && (uintptr_t)data % 64 == 0);
        memset(data, (int)at + 1, own.bytes);
        /* Sent twice: each is received once. */
        OK(pleachEndpointSend(sender, 1, "typed", tensor, 0));
        OK(pleachEndpointSend(sender, 1, "typed", tensor, 0));
        OK(pleachTensorRelease(tensor));
        OK(pleachPeerReceive(peer, 1, "typed", 0, &tensor));
        info = info_of(tensor);
        CHECK(info.datatype == types[at] && info.ndim == 8 && memcmp(info.dims, dims, sizeof dims) == 0);
        CHECK(info.way == way && info.bytes == own.bytes && info.bytes % 30 == 0);
        CHECK(((const unsigned char *)info.data)[info.bytes - 1] == at + 1);
        OK(pleachTensorRelease(tensor));
        OK(pleachPeerReceive(peer, 1, "typed", 0, &tensor));
        OK(pleachTensorRelease(tensor));
    }
    OK(pleachTensorAlloc(sender, pleachFloat64, 2, none, NULL, &tensor));
    OK(pleachEndpointSend(sender, 1, "empty", tensor, 0));
    OK(pleachTensorRelease(tensor));
    OK(pleachPeerReceive(peer, 1, "empty", 0, &tensor));
    info = info_of(tensor);
    CHECK(info.bytes == 0 && info.ndim == 2 && info.dims[0] == 4 && info.dims[1] == 0);
    /* A received tensor is not sent as it is. */
    REFUSED(pleachEndpointSend(sender, 1, "again", tensor, 0));
    OK(pleachTensorRelease(tensor));
    send_numbers(sender, 1, "own", 7, 3);
    OK(pleachEndpointReceive(sender, 1, "own", 0, &tensor));
    CHECK(has_numbers(tensor, 7, 3) && info_of(tensor).way == pleachTensorLocal);
    OK(pleachTensorRelease(tensor));
    all_is_back(sender);
}

static void failures(pleachEndpoint_t sender, pleachPeer_t peer, const char *address) {
    pleachTensor_t tensor = NULL, pair[2];
    pleachReceive_t receive;
    const char *names[2] = {"layer.0.weight", "layer.1.weight"};
    const char *twice[2] = {"a", "a"};
    int ready, at;
    EXPECT(pleachTimeout, pleachPeerReceive(peer, 2, "never", 30, &tensor));
    CHECK(tensor == NULL);
    has_failed(pleachExchangeTimeout, 2, "never");
    CHECK(last_failure().waitedMs >= 30 && strcmp(last_failure().peer, address) == 0);
    EXPECT(pleachTimeout, pleachEndpointReceive(sender, 2, "never", 1, &tensor));
    has_failed(pleachExchangeTimeout, 2, "never");
    CHECK(last_failure().peer[0] == 0);

    for (at = 0; at < 2; ++at) OK(pleachTensorAlloc(sender, pleachInt32, 0, NULL, NULL, &pair[at]));
    OK(pleachEndpointPublish(sender, 3, 2, names, pair));
    REFUSED(pleachEndpointPublish(sender, 3, 2, twice, pair));
    SAYS("twice");
    for (at = 0; at < 2; ++at) OK(pleachTensorRelease(pair[at]));
    for (at = 0; at < 4; ++at) {
        OK(pleachPeerReceive(peer, 3, names[at % 2], 0, &tensor));
        OK(pleachTensorRelease(tensor));
    }
    EXPECT(pleachInvalidArgument, pleachPeerReceive(peer, 3, "layer.1.weights", 0, &tensor));
    has_failed(pleachExchangeNotFound, 3, "layer.1.weights");
    SAYS("layer.1.weight");
    OK(pleachEndpointPublish(sender, 3, 0, NULL, NULL));

    OK(pleachPeerStartReceive(peer, 4, "w", 0, NULL, NULL, &receive));
    OK(pleachReceiveTest(receive, &ready));
    CHECK(!ready);
    EXPECT(pleachInProgress, pleachReceiveWait(receive, 0, &tensor));
    EXPECT(pleachInProgress, pleachReceiveWait(receive, 5, &tensor));
    OK(pleachEndpointAbort(sender, 4, "worker 3 is lost"));
    EXPECT(pleachRemoteError, pleachReceiveWait(receive, LONG_MS, &tensor));
    has_failed(pleachExchangeAborted, 4, "w");
    SAYS("worker 3 is lost");
    EXPECT(pleachInvalidArgument, pleachReceiveWait(receive, 0, &tensor));
    OK(pleachEndpointCleanUp(sender, 4));
    OK(pleachEndpointAbort(sender, 5, NULL));
    OK(pleachTensorAlloc(sender, pleachInt32, 0, NULL, NULL, &tensor));
    EXPECT(pleachRemoteError, pleachEndpointSend(sender, 5, "w", tensor, 0));
    has_failed(pleachExchangeAborted, 5, "w");
    OK(pleachTensorRelease(tensor));
    OK(pleachEndpointCleanUp(sender, 5));
}

static void *waits(void *receive) {
    pleachTensor_t tensor;
    /* The other thread looks now and then whether this one waits. */
    do EXPECT(pleachInvalidUsage, pleachReceiveWait(receive, LONG_MS, &tensor));
    while (strstr(pleachGetLastError(NULL), "another thread waits") != NULL);
    has_failed(pleachExchangeCancelled, 6, "cancelled");
    return NULL;
}

static void receives(pleachEndpoint_t sender, pleachPeer_t peer) {
    pleachReceive_t receive, other;
    pleachTensor_t tensor;
    pthread_t thread;
    long begun;
    int ready = 0;
    OK(pleachPeerStartReceive(peer, 6, "w", 0, NULL, NULL, &receive));
    send_numbers(sender, 6, "w", 1000, 5);
    while (!ready) OK(pleachReceiveTest(receive, &ready));
    OK(pleachReceiveWait(receive, 0, &tensor));
    CHECK(has_numbers(tensor, 1000, 5) && info_of(tensor).way == way);
    OK(pleachTensorRelease(tensor));
    REFUSED(pleachReceiveCancel(receive));
    /* A receive that is cancelled leaves its tensor for the next, also when it has come. */
    OK(pleachPeerStartReceive(peer, 6, "w", 0, NULL, NULL, &receive));
    OK(pleachPeerStartReceive(peer, 6, "w", 0, NULL, NULL, &other));
    send_numbers(sender, 6, "w", 3, 1);
    for (ready = 0; !ready;) OK(pleachReceiveTest(receive, &ready));
    OK(pleachReceiveCancel(receive));
    OK(pleachReceiveWait(other, LONG_MS, &tensor));
    CHECK(has_numbers(tensor, 3, 1));
    OK(pleachTensorRelease(tensor));
    /* One that another thread waits for. */
    OK(pleachPeerStartReceive(peer, 6, "cancelled", 0, NULL, NULL, &receive));
    CHECK(pthread_create(&thread, NULL, waits, receive) == 0);
    do pause_ms(2);
    while (RESULT(pleachReceiveWait(receive, 0, &tensor)) == pleachInProgress);
    SAYS("another thread waits");
    begun = now_ms();
    OK(pleachReceiveCancel(receive));
    CHECK(pthread_join(thread, NULL) == 0 && now_ms() - begun < SOON_MS);
    all_is_back(sender);
}

static void callbacks(pleachEndpoint_t sender, pleachPeer_t peer) {
    struct told *told = new_told();
    pleachReceive_t receive = NULL;
    int round;
    for (round = 0; round < 20; ++round) {
        char name[20];
        snprintf(name, sizeof name, "told %d", round);
        /* It is there before or after. */
        if (round % 2) send_numbers(sender, 7, name, 10, round);
        OK(pleachPeerStartReceive(peer, 7, name, 0, received, told, NULL));
        if (round % 2 == 0) send_numbers(sender, 7, name, 10, round);
        wait_for(told, &told->times, round + 1);
        CHECK(told->result == pleachSuccess && has_numbers(told->tensor, 10, round));
        OK(pleachTensorRelease(told->tensor));
    }
    told->times = 0;
    OK(pleachPeerStartReceive(peer, 7, "late", 30, received, told, NULL));
    wait_for(told, &told->times, 1);
    CHECK(told->result == pleachTimeout && told->kind == pleachExchangeTimeout);
    OK(pleachPeerStartReceive(peer, 7, "cancelled", 0, received, told, &receive));
    EXPECT(pleachInvalidUsage, pleachReceiveWait(receive, 0, &told->tensor));
    OK(pleachReceiveCancel(receive));
    wait_for(told, &told->times, 2);
    CHECK(told->result == pleachInvalidUsage && told->kind == pleachExchangeCancelled);
    REFUSED(pleachReceiveCancel(receive));
    OK(pleachPeerStartReceive(peer, 7, "aborted", 0, received, told, &receive));
    OK(pleachEndpointAbort(sender, 7, NULL));
    wait_for(told, &told->times, 3);
    CHECK(told->result == pleachRemoteError && told->kind == pleachExchangeAborted);
    REFUSED(pleachReceiveCancel(receive));
    OK(pleachEndpointCleanUp(sender, 7));
    free(told);
    all_is_back(sender);
}

/* Memory of an allocator, of which parts are sent. */
static void memory(pleachEndpoint_t sender, pleachPeer_t peer) {
    struct told *told = new_told();
    const size_t dims[] = {2, 8}, count = 16, too_many = 64;
    pleachTensor_t tensor;
    void *allocated;
    int32_t *numbers, elsewhere[16] = {0};
    int at;
    OK(pleachLendableAlloc(sender, 200, &allocated));
    for (numbers = allocated, at = 0; at < 50; ++at) numbers[at] = at;
    OK(pleachEndpointSendMemory(sender, 8, "part", numbers + 16, pleachInt32, 2, dims, released, told, 0));
    OK(pleachPeerReceive(peer, 8, "part", 0, &tensor));
    CHECK(info_of(tensor).dims[1] == 8 && ((const int32_t *)info_of(tensor).data)[15] == 31);
    if (way == pleachTensorInPlace) {
        /* It lies in the memory that was sent, as long as it is held. */
        CHECK(told->released == 0);
        numbers[31] = 77;
        CHECK(((const int32_t *)info_of(tensor).data)[15] == 77);
    }
    OK(pleachTensorRelease(tensor));
    wait_for(told, &told->released, 1);
    CHECK(told->memory == numbers + 16);
    /* Memory that is freed while a receiver reads it is not used again before. */
    told->memory = NULL;
    OK(pleachEndpointSendMemory(sender, 8, "freed", numbers, pleachInt32, 1, &count, released, told, 0));
    OK(pleachPeerReceive(peer, 8, "freed", 0, &tensor));
    OK(pleachLendableFree(allocated));
    REFUSED(pleachLendableFree(allocated));
    OK(pleachLendableAlloc(sender, 200, &allocated));
    memset(allocated, -1, 200);
    CHECK(((const int32_t *)info_of(tensor).data)[15] == 15);
    OK(pleachTensorRelease(tensor));
    wait_for(told, &told->released, 2);
    /* A callback may free the memory itself. */
    told->memory = allocated;
    OK(pleachEndpointSendMemory(sender, 8, "given", allocated, pleachInt32, 1, &count, released, told, 0));
    OK(pleachPeerReceive(peer, 8, "given", 0, &tensor));
    CHECK(((const int32_t *)info_of(tensor).data)[15] == -1);
    OK(pleachTensorRelease(tensor));
    wait_for(told, &told->released, 3);
    REFUSED(pleachLendableFree(allocated));
    /* What lies elsewhere, crookedly or without a callback is copied. */
    elsewhere[15] = 9, told->memory = NULL;
    OK(pleachEndpointSendMemory(sender, 8, "copied", elsewhere, pleachInt32, 1, &count, released, told, 0));
    wait_for(told, &told->released, 4);
    elsewhere[15] = 10, told->memory = NULL;
    OK(pleachPeerReceive(peer, 8, "copied", 0, &tensor));
    CHECK(((const int32_t *)info_of(tensor).data)[15] == 9);
    OK(pleachTensorRelease(tensor));
    OK(pleachLendableAlloc(sender, 200, &allocated));
    ((int32_t *)allocated)[1] = 4;
    OK(pleachEndpointSendMemory(sender, 8, "plain", allocated, pleachInt32, 1, &count, NULL, NULL, 0));
    OK(pleachEndpointSendMemory(sender, 8, "crooked", (int32_t *)allocated + 1, pleachInt32, 1, &count, released, told, 0));
    wait_for(told, &told->released, 5);
    told->memory = NULL;
    ((int32_t *)allocated)[1] = 5;
    OK(pleachLendableFree(allocated));
    OK(pleachPeerReceive(peer, 8, "plain", 0, &tensor));
    CHECK(((const int32_t *)info_of(tensor).data)[1] == 4);
    OK(pleachTensorRelease(tensor));
    OK(pleachPeerReceive(peer, 8, "crooked", 0, &tensor));
    CHECK(((const int32_t *)info_of(tensor).data)[0] == 4);
    OK(pleachTensorRelease(tensor));
    /* A call that fails gives nothing back. */
    OK(pleachEndpointAbort(sender, 9, NULL));
    OK(pleachLendableAlloc(sender, 200, &allocated));
    EXPECT(pleachRemoteError, pleachEndpointSendMemory(sender, 9, "w", allocated, pleachInt32, 1, &count, released, told, 0));
    EXPECT(pleachRemoteError, pleachEndpointSendMemory(sender, 9, "w", elsewhere, pleachInt32, 1, &count, released, told, 0));
    OK(pleachEndpointSendMemory(sender, 8, "beyond", elsewhere, pleachInt32, 1, &count, released, told, 0));
    wait_for(told, &told->released, 6);
    REFUSED(pleachEndpointSendMemory(sender, 8, "w", allocated, pleachInt32, 9, &too_many, released, told, 0));
    OK(pleachEndpointCleanUp(sender, 8));
    OK(pleachEndpointCleanUp(sender, 9));
    OK(pleachLendableFree(allocated));
    all_is_back(sender);
    CHECK(told->released == 6);
    free(told);
}

/* Endpoints that end while others use them. */
static void ends(const char *fabric) {
    pleachEndpointOptions_t options = PLEACH_ENDPOINT_OPTIONS_INITIALIZER;
    pleachEndpoint_t sender = open_endpoint(fabric), receiver = open_endpoint(fabric);
    pleachPeer_t peer = peer_of(receiver, sender), anew;
    struct told *told = new_told();
    char address[PLEACH_ADDRESS_BYTES];
    pleachTensor_t tensor, held;
    void *allocated;
    const size_t count = 50;
    uint64_t first, second, known;
    OK(pleachEndpointAddress(sender, address, sizeof address));
    OK(pleachEndpointIncarnation(sender, &first));
    OK(pleachPeerIncarnation(peer, &known));
    CHECK(first != 0 && known == 0);
    send_numbers(sender, 1, "held", 100, 1);
    OK(pleachPeerReceive(peer, 1, "held", 0, &held));
    OK(pleachPeerIncarnation(peer, &known));
    CHECK(known == first);
    OK(pleachLendableAlloc(sender, 200, &allocated));
    OK(pleachEndpointSendMemory(sender, 1, "never", allocated, pleachInt32, 1, &count, released, told, 0));
    OK(pleachPeerStartReceive(peer, 2, "w", 0, received, told, NULL));
    OK(pleachEndpointClose(sender));
    wait_for(told, &told->times, 1);
    CHECK(told->result == pleachRemoteError && told->kind == pleachExchangeUnavailable);
    wait_for(told, &told->released, 1);
    OK(pleachLendableFree(allocated));
    CHECK(has_numbers(held, 100, 1));
    /* Restarted, it is another one. */
    options.listen = address, options.fabric = fabric;
    OK(pleachEndpointOpen(&sender, &options));
    EXPECT(pleachRemoteError, pleachPeerReceive(peer, 1, "w", 0, &tensor));
    has_failed(pleachExchangeAborted, 1, "w");
    SAYS("restarted");
    OK(pleachEndpointConnect(receiver, address, &anew));
    send_numbers(sender, 1, "w", 2, 2);
    OK(pleachPeerReceive(anew, 1, "w", 0, &tensor));
    CHECK(has_numbers(tensor, 2, 2));
    OK(pleachEndpointIncarnation(sender, &second));
    OK(pleachPeerIncarnation(anew, &known));
    CHECK(known == second && second != first);
    OK(pleachPeerIncarnation(peer, &known));
    CHECK(known == first);
    OK(pleachTensorRelease(tensor));
    /* The receiver's own end: what waits is told before the call returns. */
    OK(pleachPeerStartReceive(anew, 2, "w", 0, received, told, NULL));
    OK(pleachEndpointClose(receiver));
    CHECK(told->times == 2 && told->result != pleachSuccess && told->kind == pleachExchangeUnavailable);
    EXPECT(pleachInvalidUsage, pleachPeerReceive(anew, 1, "w", 0, &tensor));
    EXPECT(pleachInvalidUsage, pleachPeerStartReceive(anew, 1, "w", 0, received, told, NULL));
    EXPECT(pleachInvalidUsage, pleachPeerShareRegions(anew, 0));
    CHECK(has_numbers(held, 100, 1));
    OK(pleachTensorRelease(held));
    OK(pleachPeerClose(anew));
    OK(pleachPeerClose(peer));
    OK(pleachEndpointClose(sender));
    CHECK(told->times == 2 && told->released == 1);
    free(told);
}

/* Every rank sends to the rank before it. */
static void between_ranks(const char *path, int rank, int ranks, const char *fabric) {
    pleachEndpoint_t endpoint = open_endpoint(fabric);
    pleachPeer_t next;
    char name[4096], address[PLEACH_ADDRESS_BYTES];
    pleachTensor_t tensor, held[8];
    FILE *file;
    int step;
    OK(pleachEndpointAddress(endpoint, address, sizeof address));
    CHECK((size_t)snprintf(name, sizeof name, "%s.address-%d", path, rank) < sizeof name);
    CHECK((file = fopen(name, "w")) != NULL && fputs(address, file) >= 0 && fclose(file) == 0);
    all_are_here(path, rank, ranks);
    snprintf(name, sizeof name, "%s.address-%d", path, (rank + 1) % ranks);
    CHECK((file = fopen(name, "r")) != NULL && fgets(address, sizeof address, file) != NULL && fclose(file) == 0);
    OK(pleachEndpointConnect(endpoint, address, &next));
    if (way == pleachTensorInPlace) OK(pleachPeerShareRegions(next, 0));
    else EXPECT(pleachInvalidUsage, pleachPeerShareRegions(next, 0));
    for (step = 0; step < 200; ++step) {
        const size_t count = (size_t)(step % 50) * 100;
        if (step >= 8) OK(pleachTensorRelease(held[step % 8]));
        send_numbers(endpoint, (uint64_t)step, "ring", count, 1000 * rank + step);
        OK(pleachPeerReceive(next, (uint64_t)step, "ring", 0, &held[step % 8]));
        CHECK(has_numbers(held[step % 8], count, 1000 * ((rank + 1) % ranks) + step));
        CHECK(info_of(held[step % 8]).way == way);
    }
    for (step = 0; step < 8; ++step) OK(pleachTensorRelease(held[step]));
    all_is_back(endpoint);
    /* Nobody ends before all have received: each tells the one that it has received from. */
    send_numbers(endpoint, 1000, "done", 1, 1);
    OK(pleachPeerReceive(next, 1000, "done", 0, &tensor));
    OK(pleachTensorRelease(tensor));
    all_is_back(endpoint);
    OK(pleachPeerClose(next));
    OK(pleachEndpointClose(endpoint));
}

int main(int argc, char **argv) {
    pleachEndpoint_t sender, receiver;
    pleachEndpointCounts_t counts = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
    char address[PLEACH_ADDRESS_BYTES];
    pleachPeer_t peer;
    CHECK(argc == 5);
    way = strcmp(argv[4], "shm") == 0 ? pleachTensorInPlace : pleachTensorInline;
    if (atoi(argv[1]) == 0) {
        sender = open_endpoint(argv[4]), receiver = open_endpoint(argv[4]);
        peer = peer_of(receiver, sender);
        if (way == pleachTensorInPlace) OK(pleachPeerShareRegions(peer, 0));
        OK(pleachEndpointAddress(sender, address, sizeof address));
        shapes(sender, peer);
        failures(sender, peer, address);
        receives(sender, peer);
        callbacks(sender, peer);
        memory(sender, peer);
        OK(pleachEndpointGetCounts(receiver, &counts));
        CHECK((way == pleachTensorInPlace ? counts.receivedInline : counts.receivedInPlace) == 0);
        OK(pleachPeerClose(peer));
        OK(pleachEndpointClose(receiver));
        OK(pleachEndpointClose(sender));
        ends(argv[4]);
    }
    between_ranks(argv[3], atoi(argv[1]), atoi(argv[2]), argv[4]);
    return 0;
}
