/* Two programs: one sends tensors by key, the other one receives them, and reads them where they
   are.

   cc -O2 tensor_exchange.c -o tensor_exchange $(pkg-config --cflags --libs pleach)
   ./tensor_exchange                    sends, and prints its address
   ./tensor_exchange 127.0.0.1:40001    receives from this address */
#include <stdio.h>
#include <stdlib.h>

#include <pleach.h>

#define ROWS ((size_t)1024)
#define COLUMNS ((size_t)256)
#define STEPS 10

static void check(pleachResult_t result, const char *call) {
    if (result != pleachSuccess) {
        fprintf(stderr, "%s: %s: %s\n", call, pleachGetErrorString(result), pleachGetLastError(NULL));
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

/* Sends a tensor a step, and waits until the receiver has said that it is done. */
static void send_all(pleachEndpoint_t endpoint) {
    const size_t dims[] = {ROWS, COLUMNS};
    char address[PLEACH_ADDRESS_BYTES];
    pleachTensor_t tensor;
    uint64_t step;
    CHECK(pleachEndpointAddress(endpoint, address, sizeof address));
    printf("%s\n", address);
    fflush(stdout);
    for (step = 0; step < STEPS; ++step) {
        void *data;
        float *element;
        size_t index;
        /* In lendable memory: the receiver reads the elements there. */
        CHECK(pleachTensorAlloc(endpoint, pleachFloat32, 2, dims, &data, &tensor));
        for (element = data, index = 0; index < ROWS * COLUMNS; ++index) element[index] = (float)step;
        CHECK(pleachEndpointSend(endpoint, step, "activations", tensor, 0));
        /* The endpoint keeps the tensor for its receiver. */
        CHECK(pleachTensorRelease(tensor));
    }
    /* The last step is published: any number of programs may receive it. */
    CHECK(pleachTensorAlloc(endpoint, pleachInt64, 0, NULL, NULL, &tensor));
    CHECK(pleachEndpointPublish(endpoint, STEPS, 1, (const char *const[]){"end"}, &tensor));
    CHECK(pleachTensorRelease(tensor));
}

/* Waits until every tensor was received and given back. */
static void wait_for_receiver(pleachEndpoint_t endpoint) {
    pleachEndpointCounts_t counts = PLEACH_ENDPOINT_COUNTS_INITIALIZER;
    pleachTensor_t none;
    do {
        /* A receive of a key that nobody sends: a pause. */
        (void)pleachEndpointReceive(endpoint, UINT64_MAX, "nothing", 10, &none);
        CHECK(pleachEndpointGetCounts(endpoint, &counts));
    } while (counts.sentInPlace + counts.sentInline <= STEPS || counts.bytesLent > 0);
}

static void receive_all(pleachEndpoint_t endpoint, const char *address) {
    pleachTensorInfo_t info = PLEACH_TENSOR_INFO_INITIALIZER;
    pleachTensor_t tensor;
    pleachPeer_t sender;
    uint64_t step;
    size_t index;
    CHECK(pleachEndpointConnect(endpoint, address, &sender));
    for (step = 0; step < STEPS; ++step) {
        double sum = 0;
        CHECK(pleachPeerReceive(sender, step, "activations", 10000, &tensor));
        CHECK(pleachTensorGetInfo(tensor, &info));
        for (index = 0; index < info.bytes / sizeof(float); ++index) sum += ((const float *)info.data)[index];
        printf("step %lu: %lu x %lu, %s, sum %g\n", (unsigned long)step, (unsigned long)info.dims[0],
               (unsigned long)info.dims[1], info.way == pleachTensorInPlace ? "in place" : "copied", sum);
        if (sum != (double)(ROWS * COLUMNS * step)) exit(1);
        /* The sender may use the memory again. */
        CHECK(pleachTensorRelease(tensor));
    }
    CHECK(pleachPeerReceive(sender, STEPS, "end", 10000, &tensor));
    CHECK(pleachTensorRelease(tensor));
    CHECK(pleachPeerClose(sender));
}

int main(int argc, char **argv) {
    pleachEndpoint_t endpoint;
    CHECK(pleachEndpointOpen(&endpoint, NULL));
    if (argc > 1) {
        receive_all(endpoint, argv[1]);
    } else {
        send_all(endpoint);
        wait_for_receiver(endpoint);
    }
    CHECK(pleachEndpointClose(endpoint));
    return 0;
}
