/* The functions of the tensor exchange with NULL, with nonsense and after the end. */
#include "exchange.h"

static void received(void *context, pleachResult_t result, pleachTensor_t tensor) {
    (void)context, (void)result, (void)tensor;
    exit(1);
}

static void release(void *address, void *context) {
    (void)address, (void)context;
    exit(1);
}

static void no_endpoint(pleachEndpoint_t endpoint) {
    pleachEndpointCounts_t counts = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
    char address[PLEACH_ADDRESS_BYTES] = "";
    const char *name = "w";
    const size_t dim = 4;
    uint64_t incarnation;
    pleachTensor_t tensor = (pleachTensor_t)(uintptr_t)1;
    pleachPeer_t peer = (pleachPeer_t)(uintptr_t)1;
    void *data = NULL;
    REFUSED(pleachEndpointClose(endpoint));
    REFUSED(pleachEndpointAddress(endpoint, address, sizeof address));
    REFUSED(pleachEndpointGetCounts(endpoint, &counts));
    REFUSED(pleachEndpointIncarnation(endpoint, &incarnation));
    REFUSED(pleachTensorAlloc(endpoint, pleachFloat32, 1, &dim, &data, &tensor));
    CHECK(tensor == NULL);
    REFUSED(pleachEndpointSend(endpoint, 1, "w", NULL, 1));
    REFUSED(pleachEndpointSendMemory(endpoint, 1, "w", &counts, pleachInt32, 1, &dim, release, NULL, 1));
    REFUSED(pleachEndpointPublish(endpoint, 1, 1, &name, &tensor));
    REFUSED(pleachEndpointPublish(endpoint, 1, 0, NULL, NULL));
    REFUSED(pleachEndpointAbort(endpoint, 1, "reason"));
    REFUSED(pleachEndpointCleanUp(endpoint, 1));
    REFUSED(pleachEndpointReceive(endpoint, 1, "w", 1, &tensor));
    REFUSED(pleachEndpointConnect(endpoint, "127.0.0.1:1", &peer));
    CHECK(peer == NULL);
    REFUSED(pleachLendableAlloc(endpoint, 8, &data));
}

static void no_peer(pleachPeer_t peer) {
    pleachTensor_t tensor = (pleachTensor_t)(uintptr_t)1;
    pleachReceive_t receive = (pleachReceive_t)(uintptr_t)1;
    uint64_t incarnation;
    REFUSED(pleachPeerShareRegions(peer, 1));
    REFUSED(pleachPeerIncarnation(peer, &incarnation));
    REFUSED(pleachPeerReceive(peer, 1, "w", 1, &tensor));
    CHECK(tensor == NULL);
    REFUSED(pleachPeerStartReceive(peer, 1, "w", 1, received, NULL, &receive));
    CHECK(receive == NULL);
    REFUSED(pleachPeerClose(peer));
}

static void no_tensor(pleachEndpoint_t endpoint, pleachTensor_t tensor) {
    pleachTensorInfo_t info = PLEACH_TENSOR_INFO_INITIALIZER;
    const char *name = "w";
    REFUSED(pleachTensorGetInfo(tensor, &info));
    REFUSED(pleachEndpointSend(endpoint, 1, "w", tensor, 1));
    REFUSED(pleachEndpointPublish(endpoint, 1, 1, &name, &tensor));
    REFUSED(pleachTensorRelease(tensor));
}

static void no_receive(pleachReceive_t receive) {
    pleachTensor_t tensor = (pleachTensor_t)(uintptr_t)1;
    int ready = 1;
    REFUSED(pleachReceiveTest(receive, &ready));
    CHECK(!ready);
    REFUSED(pleachReceiveWait(receive, 1, &tensor));
    CHECK(tensor == NULL);
    REFUSED(pleachReceiveCancel(receive));
}

static void wrong_options(void) {
    pleachEndpointOptions_t options = PLEACH_ENDPOINT_OPTIONS_INITIALIZER;
    pleachEndpoint_t endpoint = NULL, other = NULL;
    char address[PLEACH_ADDRESS_BYTES];
    REFUSED(pleachEndpointOpen(NULL, NULL));
    options.size = 7;
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    SAYS("PLEACH_ENDPOINT_OPTIONS_INITIALIZER");
    options.size = sizeof options, options.listen = "nowhere";
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    options.listen = "\xff";
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    SAYS("UTF-8");
    options.listen = NULL, options.fabric = "pigeon";
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    SAYS("auto, shm, tcp, verbs or none");
    options.fabric = NULL, options.secretFile = "/nowhere/secret";
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    SAYS("/nowhere/secret");
    options.secretFile = NULL, options.requireRegions = 2;
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    options.requireRegions = 1, options.fabric = "none";
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    SAYS("regions are required");
    options.requireRegions = 0, options.reserved = 1;
    REFUSED(pleachEndpointOpen(&endpoint, &options));
    CHECK(endpoint == NULL);
    OK(pleachEndpointOpen(&endpoint, NULL));
    OK(pleachEndpointAddress(endpoint, address, sizeof address));
    options.reserved = 0, options.fabric = NULL, options.listen = address;
    EXPECT(pleachSystemError, pleachEndpointOpen(&other, &options));
    REFUSED(pleachEndpointAddress(endpoint, NULL, 0));
    REFUSED(pleachEndpointAddress(endpoint, address, strlen(address)));
    OK(pleachEndpointAddress(endpoint, address, strlen(address) + 1));
    OK(pleachEndpointClose(endpoint));
}

/* Limits that a caller sets, and what exceeds them. */
static void limits(void) {
    pleachEndpointOptions_t options = PLEACH_ENDPOINT_OPTIONS_INITIALIZER;
    pleachEndpoint_t endpoint;
    pleachTensor_t tensor = NULL, none;
    const size_t small = 60, large = 1 << 20;
    void *data;
    options.bytesHeldMax = 100, options.bytesLentMax = 100, options.bytesLendableMax = 1 << 16, options.timeoutMs = 20;
    OK(pleachEndpointOpen(&endpoint, &options));
    REFUSED(pleachTensorAlloc(endpoint, pleachUint8, 1, &large, NULL, &tensor));
    SAYS("lendable memory");
    REFUSED(pleachLendableAlloc(endpoint, large, &data));
    CHECK(tensor == NULL && data == NULL);
    OK(pleachTensorAlloc(endpoint, pleachUint8, 1, &small, NULL, &tensor));
    OK(pleachEndpointSend(endpoint, 1, "w", tensor, 0));
    EXPECT(pleachTimeout, pleachEndpointSend(endpoint, 1, "w", tensor, 0));
    has_failed(pleachExchangeTimeout, 1, "w");
    EXPECT(pleachTimeout, pleachEndpointReceive(endpoint, 1, "v", 0, &none));
    OK(pleachTensorRelease(tensor));
    OK(pleachTensorAlloc(endpoint, pleachUint16, 1, &small, NULL, &tensor));
    REFUSED(pleachEndpointSend(endpoint, 1, "w", tensor, 0));
    has_failed(pleachExchangeExhausted, 1, "w");
    OK(pleachTensorRelease(tensor));
    OK(pleachEndpointClose(endpoint));
}

static void wrong_arguments(pleachEndpoint_t endpoint, pleachPeer_t peer) {
    pleachEndpointCounts_t counts = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
    pleachExchangeFailure_t failure = PLEACH_EXCHANGE_FAILURE_INITIALIZER;
    pleachTensorInfo_t info = PLEACH_TENSOR_INFO_INITIALIZER;
    const size_t dims[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, huge[2] = {SIZE_MAX, 2};
    pleachEndpoint_t other = open_endpoint("none");
    pleachTensor_t tensor = NULL;
    pleachReceive_t receive;
    pleachPeer_t wrong = NULL;
    const char *const none[1] = {NULL}, *const empty[1] = {""};
    char longest[1026], data[8] = {0};
    void *memory = NULL;
    size_t at;
    memset(longest, 'w', sizeof longest - 1);
    longest[1025] = 0;
    REFUSED(pleachEndpointGetCounts(endpoint, NULL));
    REFUSED(pleachEndpointIncarnation(endpoint, NULL));
    REFUSED(pleachPeerIncarnation(peer, NULL));
    counts.size = 8;
    REFUSED(pleachEndpointGetCounts(endpoint, &counts));
    REFUSED(pleachGetLastExchangeFailure(NULL));
    failure.size = 8;
    REFUSED(pleachGetLastExchangeFailure(&failure));
    REFUSED(pleachTensorAlloc(endpoint, pleachFloat32, 1, dims, NULL, NULL));
    REFUSED(pleachTensorAlloc(endpoint, pleachFloat32, 1, NULL, NULL, &tensor));
    REFUSED(pleachTensorAlloc(endpoint, pleachFloat32, 9, dims, NULL, &tensor));
    SAYS("more than 8");
    REFUSED(pleachTensorAlloc(endpoint, pleachFloat32, SIZE_MAX, dims, NULL, &tensor));
    REFUSED(pleachTensorAlloc(endpoint, pleachFloat32, 2, huge, NULL, &tensor));
    for (at = 0; at < 40; ++at)
        if (at >= 12 && at != 32 && at != 33) REFUSED(pleachTensorAlloc(endpoint, (pleachDataType_t)at, 1, dims, NULL, &tensor));
    REFUSED(pleachLendableAlloc(endpoint, 0, &memory));
    REFUSED(pleachLendableAlloc(endpoint, 8, NULL));
    REFUSED(pleachLendableAlloc(endpoint, SIZE_MAX, &memory));
    REFUSED(pleachLendableFree(data));
    OK(pleachLendableFree(NULL));
    CHECK(tensor == NULL && memory == NULL);
    OK(pleachTensorAlloc(endpoint, pleachFloat32, 1, dims, NULL, &tensor));
    REFUSED(pleachTensorGetInfo(tensor, NULL));
    info.size = 8;
    REFUSED(pleachTensorGetInfo(tensor, &info));
    REFUSED(pleachEndpointSend(endpoint, 1, NULL, tensor, 1));
    REFUSED(pleachEndpointSend(endpoint, 1, "", tensor, 1));
    REFUSED(pleachEndpointSend(endpoint, 1, longest, tensor, 1));
    SAYS("1024");
    REFUSED(pleachEndpointSend(endpoint, 1, "\xc3(", tensor, 1));
    REFUSED(pleachEndpointSend(other, 1, "w", tensor, 1));
    SAYS("another endpoint");
    REFUSED(pleachEndpointPublish(endpoint, 1, 1, NULL, &tensor));
    REFUSED(pleachEndpointPublish(endpoint, 1, 1, none, &tensor));
    REFUSED(pleachEndpointPublish(endpoint, 1, 1, empty, &tensor));
    REFUSED(pleachEndpointPublish(endpoint, 1, 1, empty, NULL));
    REFUSED(pleachEndpointSendMemory(endpoint, 1, "w", NULL, pleachInt8, 1, dims, release, NULL, 1));
    REFUSED(pleachEndpointSendMemory(endpoint, 1, "w", data, 99, 1, dims, release, NULL, 1));
    REFUSED(pleachEndpointSendMemory(endpoint, 1, "w", data, pleachInt8, 1, NULL, release, NULL, 1));
    REFUSED(pleachEndpointSendMemory(endpoint, 1, NULL, data, pleachInt8, 1, dims, release, NULL, 1));
    REFUSED(pleachEndpointAbort(endpoint, 1, "\xff"));
    OK(pleachTensorRelease(tensor));

    REFUSED(pleachEndpointConnect(endpoint, NULL, &wrong));
    REFUSED(pleachEndpointConnect(endpoint, "127.0.0.1:1", NULL));
    REFUSED(pleachEndpointConnect(endpoint, "127.0.0.1", &wrong));
    SAYS("HOST:PORT");
    CHECK(wrong == NULL);
    OK(pleachEndpointConnect(endpoint, "127.0.0.1:1", &wrong));
    EXPECT(pleachRemoteError, pleachPeerReceive(wrong, 1, "w", 1000, &tensor));
    has_failed(pleachExchangeUnavailable, 1, "w");
    EXPECT(pleachRemoteError, pleachPeerStartReceive(wrong, 1, "w", 1000, received, NULL, &receive));
    EXPECT(pleachRemoteError, pleachPeerShareRegions(wrong, 1000));
    OK(pleachPeerClose(wrong));
    REFUSED(pleachPeerReceive(peer, 1, "w", 1, NULL));
    REFUSED(pleachPeerReceive(peer, 1, NULL, 1, &tensor));
    REFUSED(pleachPeerReceive(peer, 1, "", 1, &tensor));
    REFUSED(pleachEndpointReceive(endpoint, 1, NULL, 1, &tensor));
    REFUSED(pleachEndpointReceive(endpoint, 1, "w", 1, NULL));
    REFUSED(pleachPeerStartReceive(peer, 1, "w", 1, NULL, NULL, NULL));
    REFUSED(pleachPeerStartReceive(peer, 1, "", 1, received, NULL, &receive));
    OK(pleachPeerStartReceive(peer, 1, "w", 0, NULL, NULL, &receive));
    REFUSED(pleachReceiveTest(receive, NULL));
    REFUSED(pleachReceiveWait(receive, 1, NULL));
    OK(pleachReceiveCancel(receive));
    no_receive(receive);
    OK(pleachEndpointClose(other));
}

int main(void) {
    pleachExchangeFailure_t failure = PLEACH_EXCHANGE_FAILURE_INITIALIZER;
    pleachEndpoint_t endpoint, sender;
    pleachPeer_t peer;
    pleachTensor_t tensor;
    OK(pleachGetLastExchangeFailure(&failure));
    CHECK(failure.kind == pleachExchangeNone && failure.text[0] == 0);
    no_endpoint(NULL);
    SAYS("endpoint is NULL");
    no_endpoint((pleachEndpoint_t)(uintptr_t)0x7fffffffu);
    no_peer(NULL);
    no_peer((pleachPeer_t)(uintptr_t)0x123456789abcu);
    no_receive(NULL);
    no_receive((pleachReceive_t)(uintptr_t)77777);
    wrong_options();
    limits();
    endpoint = open_endpoint("none"), sender = open_endpoint("none");
    no_tensor(endpoint, NULL);
    no_tensor(endpoint, (pleachTensor_t)(uintptr_t)0x100001);
    peer = peer_of(endpoint, sender);
    wrong_arguments(endpoint, peer);
    send_numbers(sender, 1, "w", 10, 1);
    OK(pleachPeerReceive(peer, 1, "w", 0, &tensor));
    /* A number beside that of a handle. */
    no_peer((pleachPeer_t)((uintptr_t)peer + ((uintptr_t)1 << 20)));
    OK(pleachTensorRelease(tensor));
    no_tensor(endpoint, tensor);
    OK(pleachPeerClose(peer));
    no_peer(peer);
    SAYS("destroyed");
    OK(pleachEndpointClose(endpoint));
    no_endpoint(endpoint);
    OK(pleachEndpointClose(sender));
    return 0;
}
