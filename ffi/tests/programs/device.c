/* Devices: put with signal, get, atomics, keys that are wrong, memory of the user, ranks that
   leave: device RANK RANKS ID-FILE FABRIC. */
#include <pthread.h>

#include "meet.h"

#define LENGTH 100000
#define LONG_MS 20000

static pleachDevice_t device;
static int rank, ranks, next, previous;
static int released;

static void release(void *address, void *context) {
    CHECK(context == &released);
    free(address);
    ++released;
}

/* Adds to a word of rank 0 a thousand times, from two threads of each rank. */
static void *adder(void *word) {
    int round;
    for (round = 0; round < 500; ++round) {
        pleachTransfer_t transfer;
        uint64_t old;
        OK(pleachAtomicAdd(device, 0, word, 1, &transfer));
        OK(pleachTransferWait(device, transfer, LONG_MS, &old));
    }
    return NULL;
}

static void *waiter(void *unused) {
    (void)unused;
    OK(pleachSignalWait(device, previous, 3, 1, LONG_MS, NULL));
    return NULL;
}

static void meet(void) { OK(pleachDeviceExchange(device, NULL, NULL, 0)); }

static void transfers(pleachRemoteSlice_t *all, pleachRegion_t region, unsigned char *bytes, const uint64_t *word) {
    pleachRemoteSlice_t target = all[2 * next], wrong;
    pleachTransfer_t put, get, swap;
    unsigned char payload[PLEACH_PAYLOAD_BYTES];
    uint64_t count = 0, old = 0;
    pthread_t threads[2];
    size_t index;

    memset(bytes, rank + 1, LENGTH);
    OK(pleachPut(device, next, region, 0, LENGTH, &target, 0, "hello", 5, &put));
    OK(pleachSignalWait(device, previous, 0, 1, LONG_MS, payload));
    CHECK(memcmp(payload, "hello", 5) == 0);
    for (index = 0; index < LENGTH; ++index) CHECK(bytes[LENGTH + index] == previous + 1);
    OK(pleachTransferWait(device, put, LONG_MS, NULL));
    EXPECT(pleachInvalidArgument, pleachTransferWait(device, put, 0, NULL));
    OK(pleachSignalCount(device, previous, 0, &count));
    CHECK(count == 1);
    EXPECT(pleachTimeout, pleachSignalWait(device, previous, 0, 2, 20, NULL));
    SAYS("1 of 2");
    meet();

    /* A part of the peer's second half, which holds what its own peer has put there. */
    target.offset += 10, target.length = 7;
    OK(pleachGet(device, next, &target, region, 3, 7, &get));
    OK(pleachTransferWait(device, get, LONG_MS, NULL));
    for (index = 0; index < 7; ++index) CHECK(bytes[3 + index] == rank + 1);
    meet();

    if (rank != 0) {
        CHECK(pthread_create(&threads[0], NULL, adder, &all[1]) == 0);
        CHECK(pthread_create(&threads[1], NULL, adder, &all[1]) == 0);
        CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
    }
    meet();
    if (rank == 0) CHECK(*word == (uint64_t)(ranks - 1) * 1000);
    meet();
    if (rank == 1) {
        OK(pleachAtomicCompareSwap(device, 0, &all[1], 5, 6, &swap));
        OK(pleachTransferWait(device, swap, LONG_MS, &old));
        CHECK(old == (uint64_t)(ranks - 1) * 1000);
    }

    /* Two threads that wait, while a third part of the program submits. */
    CHECK(pthread_create(&threads[0], NULL, waiter, NULL) == 0);
    CHECK(pthread_create(&threads[1], NULL, waiter, NULL) == 0);
    meet();
    OK(pleachSignal(device, next, 3, NULL, 0, NULL));
    CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
    meet();

    /* What cannot be. */
    EXPECT(pleachInvalidArgument, pleachPut(device, rank, region, 0, 1, &target, 0, NULL, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachPut(device, next, region, 0, 8, &target, 0, NULL, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachPut(device, next, region, 2 * LENGTH, 7, &target, 0, NULL, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachPut(device, next, region, SIZE_MAX, 7, &target, 0, NULL, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachPut(device, next, region, 0, 7, NULL, 0, NULL, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachPut(device, next, region, 0, 7, &target, 64, NULL, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachPut(device, next, region, 0, 7, &target, 0, bytes, 49, NULL));
    EXPECT(pleachInvalidArgument, pleachPut(device, next, region, 0, 7, &target, 0, NULL, 9, NULL));
    EXPECT(pleachInvalidArgument, pleachAtomicAdd(device, next, &target, 1, NULL));
    EXPECT(pleachInvalidArgument, pleachSignal(device, next, -1, NULL, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachSignalWait(device, ranks, 0, 1, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachDeviceExchange(device, NULL, NULL, 4));
    EXPECT(pleachInvalidArgument, pleachDeviceExchange(device, bytes, bytes, PLEACH_EXCHANGE_BYTES + 1));
    meet();
    wrong = target, wrong.key ^= 0x5555;
    if (rank == 0) {
        pleachResult_t result = RESULT(pleachPut(device, next, region, 0, 7, &wrong, PLEACH_NO_SIGNAL, NULL, 0, &put));
        if (result == pleachSuccess) result = RESULT(pleachTransferWait(device, put, LONG_MS, NULL));
        CHECK(result == pleachRemoteError);
    }
}

int main(int argc, char **argv) {
    pleachUniqueId id;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachDeviceInfo_t info = PLEACH_DEVICE_INFO_INITIALIZER;
    pleachRemoteSlice_t own[2], *all;
    pleachRegion_t region, user = NULL, word_region;
    void *address, *word, *mine;
    pleachResult_t result;
    CHECK(argc == 5);
    rank = atoi(argv[1]), ranks = atoi(argv[2]), next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    share_id(argv[3], rank, &id);
    config.fabric = argv[4], config.timeoutMs = LONG_MS;
    OK(pleachDeviceOpen(&device, ranks, id, rank, &config));
    OK(pleachDeviceGetInfo(device, &info));
    CHECK(info.rank == rank && info.nranks == ranks && strcmp(info.fabric, argv[4]) == 0);
    OK(pleachRegionAlloc(device, 2 * LENGTH, &address, &region));
    OK(pleachRegionAlloc(device, sizeof(uint64_t), &word, &word_region));
    OK(pleachRegionExport(region, LENGTH, LENGTH, &own[0]));
    OK(pleachRegionExport(word_region, 0, 8, &own[1]));
    EXPECT(pleachInvalidArgument, pleachRegionExport(region, 1, 2 * LENGTH, &own[0]));
    EXPECT(pleachInvalidArgument, pleachRegionExport(region, 0, 1, NULL));
    CHECK((all = malloc((size_t)ranks * sizeof own)) != NULL && (mine = malloc(LENGTH)) != NULL);
    OK(pleachDeviceExchange(device, own, all, sizeof own));

    /* Memory of the user, where the fabric takes it. */
    EXPECT(pleachInvalidArgument, pleachRegionRegister(device, mine, LENGTH, NULL, NULL, &user));
    EXPECT(pleachInvalidArgument, pleachRegionRegister(device, NULL, LENGTH, release, &released, &user));
    result = RESULT(pleachRegionRegister(device, mine, LENGTH, release, &released, &user));
    if (strcmp(argv[4], "shm") == 0) {
        CHECK(result == pleachInvalidUsage && user == NULL && released == 0);
        SAYS("pleachRegionAlloc");
        free(mine);
    } else {
        pleachTransfer_t put;
        CHECK(result == pleachSuccess);
        memset(mine, 9, LENGTH);
        OK(pleachPut(device, next, user, 0, LENGTH, &all[2 * next], 1, NULL, 0, &put));
        OK(pleachTransferWait(device, put, LONG_MS, NULL));
        OK(pleachSignalWait(device, previous, 1, 1, LONG_MS, NULL));
        CHECK(((unsigned char *)address)[2 * LENGTH - 1] == 9);
        OK(pleachRegionRelease(user));
        EXPECT(pleachInvalidArgument, pleachRegionRelease(user));
        meet();
        CHECK(released == 1);
    }
    transfers(all, region, address, word);
    free(all);
    OK(pleachRegionRelease(word_region));
    /* The last rank leaves; the others are told. A wrong key of rank 0 may have cost rank 1
     * before. */
    if (rank == ranks - 1) {
        OK(pleachDeviceClose(device));
        EXPECT(pleachInvalidArgument, pleachDeviceClose(device));
        EXPECT(pleachInvalidArgument, pleachSignalWait(device, 0, 0, 1, 0, NULL));
    } else if (rank == 0) {
        EXPECT(pleachRemoteError, pleachSignalWait(device, ranks - 1, 5, 1, LONG_MS, NULL));
        (void)RESULT(pleachDeviceClose(device));
    }
    OK(pleachRegionRelease(region));
    return 0;
}
