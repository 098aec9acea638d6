/* Every rank puts a tensor into the memory of the next rank, without a copy and without a receive.

   cc -O2 tensor_put.c -o tensor_put $(pkg-config --cflags --libs pleach)
   pleach run -n 4 ./tensor_put */
#include <stdio.h>
#include <stdlib.h>

#include <pleach.h>

#define ELEMENTS ((size_t)1 << 20)
#define BYTES (ELEMENTS * sizeof(float))
#define STEPS 10
#define TIMEOUT_MS 10000

/* The signal slots of a rank: a tensor has come, and the place for the next one is free. */
enum { ARRIVED, FREE };

static void check(pleachResult_t result, const char *call) {
    if (result != pleachSuccess) {
        fprintf(stderr, "%s: %s: %s\n", call, pleachGetErrorString(result), pleachGetLastError(NULL));
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

int main(void) {
    pleachDevice_t device;
    pleachDeviceInfo_t info = PLEACH_DEVICE_INFO_INITIALIZER;
    pleachRegion_t region, counter_region;
    pleachRemoteSlice_t own[2], *all;
    pleachTransfer_t transfer;
    void *address, *counter;
    float *outgoing, *incoming;
    uint64_t step, before;
    size_t index;
    int next, previous;

    /* Meet the other ranks. */
    CHECK(pleachDeviceOpenFromEnv(&device, NULL));
    CHECK(pleachDeviceGetInfo(device, &info));
    if (info.nranks < 2) {
        fprintf(stderr, "start it with 2 ranks or more\n");
        return 1;
    }
    next = (info.rank + 1) % info.nranks, previous = (info.rank + info.nranks - 1) % info.nranks;

    /* One region: the outgoing tensor first, then the place for the incoming one. A second region
       is a counter. */
    CHECK(pleachRegionAlloc(device, 2 * BYTES, &address, &region));
    CHECK(pleachRegionAlloc(device, sizeof(uint64_t), &counter, &counter_region));
    outgoing = address, incoming = outgoing + ELEMENTS;

    /* Tell all ranks where to put tensors. */
    CHECK(pleachRegionExport(region, BYTES, BYTES, &own[0]));
    CHECK(pleachRegionExport(counter_region, 0, sizeof(uint64_t), &own[1]));
    if ((all = malloc((size_t)info.nranks * sizeof own)) == NULL) return 1;
    CHECK(pleachDeviceExchange(device, own, all, sizeof own));

    for (step = 1; step <= STEPS; ++step) {
        for (index = 0; index < ELEMENTS; ++index) outgoing[index] = (float)info.rank + (float)step;
        /* The next rank has used the tensor of the last step. */
        CHECK(pleachSignalWait(device, next, FREE, step - 1, TIMEOUT_MS, NULL));
        CHECK(pleachPut(device, next, region, 0, BYTES, &all[2 * next], ARRIVED, &step, sizeof step,
                        &transfer));
        CHECK(pleachSignalWait(device, previous, ARRIVED, step, TIMEOUT_MS, NULL));
        for (index = 0; index < ELEMENTS; ++index) {
            if (incoming[index] != (float)previous + (float)step) {
                fprintf(stderr, "element %lu is %g\n", (unsigned long)index, incoming[index]);
                return 1;
            }
        }
        CHECK(pleachSignal(device, previous, FREE, NULL, 0, NULL));
        /* The outgoing tensor may be overwritten. */
        CHECK(pleachTransferWait(device, transfer, TIMEOUT_MS, NULL));
    }

    /* Every rank counts itself in the memory of rank 0, which would be slow for data. */
    if (info.rank != 0) {
        CHECK(pleachAtomicAdd(device, 0, &all[1], 1, &transfer));
        CHECK(pleachTransferWait(device, transfer, TIMEOUT_MS, &before));
    }
    CHECK(pleachDeviceExchange(device, NULL, NULL, 0));
    if (info.rank == 0) printf("%d tensors of %lu MiB each, %lu ranks counted\n", STEPS,
                               (unsigned long)(BYTES >> 20), (unsigned long)*(uint64_t *)counter + 1);
    CHECK(pleachDeviceExchange(device, NULL, NULL, 0));
    free(all);
    CHECK(pleachRegionRelease(region));
    CHECK(pleachRegionRelease(counter_region));
    CHECK(pleachDeviceClose(device));
    return 0;
}
