/* What the test programs of the tensor exchange share. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "meet.h"

/* How long calls wait; an answer comes far sooner. */
#define LONG_MS 40000
#define SOON_MS 10000

static inline pleachEndpoint_t open_endpoint(const char *fabric) {
    pleachEndpointOptions_t options = PLEACH_ENDPOINT_OPTIONS_INITIALIZER;
    pleachEndpoint_t endpoint = NULL;
    options.listen = "127.0.0.1:0", options.fabric = fabric, options.timeoutMs = LONG_MS;
    OK(pleachEndpointOpen(&endpoint, &options));
    return endpoint;
}

static inline pleachPeer_t peer_of(pleachEndpoint_t endpoint, pleachEndpoint_t other) {
    char address[PLEACH_ADDRESS_BYTES];
    pleachPeer_t peer = NULL;
    OK(pleachEndpointAddress(other, address, sizeof address));
    OK(pleachEndpointConnect(endpoint, address, &peer));
    return peer;
}

/* Sends `count` numbers of this value. */
static inline void send_numbers(pleachEndpoint_t endpoint, uint64_t step, const char *name, size_t count, int32_t value) {
    pleachTensor_t tensor = NULL;
    void *data = NULL;
    size_t at;
    OK(pleachTensorAlloc(endpoint, pleachInt32, 1, &count, &data, &tensor));
    for (at = 0; at < count; ++at) ((int32_t *)data)[at] = value;
    OK(pleachEndpointSend(endpoint, step, name, tensor, 0));
    OK(pleachTensorRelease(tensor));
}

static inline pleachTensorInfo_t info_of(pleachTensor_t tensor) {
    pleachTensorInfo_t info = PLEACH_TENSOR_INFO_INITIALIZER;
    OK(pleachTensorGetInfo(tensor, &info));
    return info;
}

/* Whether a tensor has `count` numbers of this value. */
static inline int has_numbers(pleachTensor_t tensor, size_t count, int32_t value) {
    const pleachTensorInfo_t info = info_of(tensor);
    size_t at;
    if (info.ndim != 1 || info.dims[0] != count || info.bytes != 4 * count || info.datatype != pleachInt32) return 0;
    for (at = 0; at < count; ++at)
        if (((const int32_t *)info.data)[at] != value) return 0;
    return 1;
}

static inline pleachExchangeFailure_t last_failure(void) {
    pleachExchangeFailure_t failure = PLEACH_EXCHANGE_FAILURE_INITIALIZER;
    OK(pleachGetLastExchangeFailure(&failure));
    return failure;
}

/* The last failure of this thread has this kind and is about this key. */
static inline void has_failed(int kind, uint64_t step, const char *name) {
    const pleachExchangeFailure_t failure = last_failure();
    CHECK(failure.kind == kind);
    CHECK(failure.step == step && strcmp(failure.name, name) == 0);
    CHECK(strlen(failure.text) > 10 && strcmp(failure.text, pleachGetLastError(NULL)) == 0);
}

/* Nothing of this endpoint is lent or held any more. */
static inline void all_is_back(pleachEndpoint_t endpoint) {
    const long begun = now_ms();
    pleachEndpointCounts_t counts = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
    do {
        CHECK(now_ms() - begun < LONG_MS);
        pause_ms(1);
        OK(pleachEndpointGetCounts(endpoint, &counts));
    } while (counts.bytesLent > 0 || counts.bytesHeld > 0 || counts.leases > 0);
}

#endif
