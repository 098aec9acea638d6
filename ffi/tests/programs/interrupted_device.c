/* A device that is closed while threads wait on it, and a peer that is killed: interrupted_device
   RANK RANKS ID-FILE FABRIC. The last rank ends by SIGKILL. */
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "meet.h"

/* How long functions wait; an answer comes far sooner. */
#define LONG_MS 40000
#define SOON_MS 10000
#define LENGTH 4096

static int rank, ranks;
static pleachDevice_t device;

static void open_device(const char *path, const char *part, const char *fabric) {
    pleachUniqueId id;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    config.fabric = fabric, config.timeoutMs = LONG_MS;
    share_id_of(path, part, rank, &id);
    OK(pleachDeviceOpen(&device, ranks, id, rank, &config));
}

/* Where the kernel shows the threads of this process that have begun. */
static char threads_at[3][64];
static int begun_count;
static pthread_mutex_t begun_lock = PTHREAD_MUTEX_INITIALIZER;

/* The calling thread is about to wait. */
static void begins(void) {
    char name[64];
    ssize_t length = readlink("/proc/thread-self", name, sizeof name - 1);
    CHECK(length > 0);
    name[length] = 0;
    CHECK(pthread_mutex_lock(&begun_lock) == 0);
    snprintf(threads_at[begun_count++], sizeof threads_at[0], "/proc/%.40s/stat", name);
    CHECK(pthread_mutex_unlock(&begun_lock) == 0);
}

/* How many of them sleep. */
static int asleep(void) {
    int index, count = 0;
    CHECK(pthread_mutex_lock(&begun_lock) == 0);
    for (index = 0; index < begun_count; index++) {
        char line[512];
        const char *state;
        FILE *file = fopen(threads_at[index], "r");
        CHECK(file != NULL && fgets(line, sizeof line, file) != NULL && fclose(file) == 0);
        state = strrchr(line, ')');
        count += state != NULL && state[2] == 'S';
    }
    CHECK(pthread_mutex_unlock(&begun_lock) == 0);
    return count;
}

static void *waits(void *unused) {
    (void)unused;
    begins();
    EXPECT(pleachInvalidUsage, pleachSignalWait(device, rank == 0 ? 1 : 0, 0, 1, LONG_MS, NULL));
    SAYS("closed by another thread");
    return NULL;
}

static void *exchanges(void *unused) {
    (void)unused;
    begins();
    EXPECT(pleachInvalidUsage, pleachDeviceExchange(device, NULL, NULL, 0));
    return NULL;
}

int main(int argc, char **argv) {
    pleachRemoteSlice_t own, all[64];
    pleachRegion_t region;
    pleachTransfer_t transfer;
    pleachResult_t result;
    pthread_t threads[3];
    void *address;
    long begun;
    int last;
    CHECK(argc == 5);
    rank = atoi(argv[1]), ranks = atoi(argv[2]), last = ranks - 1;

    /* Rank 0 closes its device while three of its threads wait; the others are told. */
    open_device(argv[3], "close", argv[4]);
    if (rank == 0) {
        CHECK(pthread_create(&threads[0], NULL, waits, NULL) == 0);
        CHECK(pthread_create(&threads[1], NULL, waits, NULL) == 0);
        CHECK(pthread_create(&threads[2], NULL, exchanges, NULL) == 0);
        begun = now_ms();
        while (asleep() < 3) {
            CHECK(now_ms() - begun < LONG_MS);
            pause_ms(1);
        }
        pause_ms(50); /* under valgrind a thread sleeps also while another one runs */
        begun = now_ms();
        OK(pleachDeviceClose(device));
        CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
        CHECK(pthread_join(threads[2], NULL) == 0);
        CHECK(now_ms() - begun < SOON_MS);
        EXPECT(pleachInvalidArgument, pleachDeviceClose(device));
    } else {
        begun = now_ms();
        EXPECT(pleachRemoteError, pleachSignalWait(device, 0, 0, 1, LONG_MS, NULL));
        SAYS("rank 0");
        CHECK(now_ms() - begun < SOON_MS);
        (void)RESULT(pleachDeviceClose(device));
    }

    /* The last rank is killed while the others wait for it. */
    open_device(argv[3], "killed", argv[4]);
    OK(pleachRegionAlloc(device, LENGTH, &address, &region));
    OK(pleachRegionExport(region, 0, LENGTH, &own));
    CHECK(ranks <= 64);
    OK(pleachDeviceExchange(device, &own, all, sizeof own));
    if (rank == last) {
        OK(pleachSignalWait(device, 0, 0, 1, LONG_MS, NULL));
        raise(SIGKILL);
    }
    if (rank == 0) OK(pleachSignal(device, last, 0, NULL, 0, NULL));
    begun = now_ms();
    EXPECT(pleachRemoteError, pleachSignalWait(device, last, 1, 1, LONG_MS, NULL));
    CHECK(pleachGetLastError(NULL)[0] != 0 && strstr(pleachGetLastError(NULL), "is lost") != NULL);
    EXPECT(pleachRemoteError, pleachDeviceExchange(device, NULL, NULL, 0));
    /* Each operation on it ends, at the latest when it is waited for. */
    result = RESULT(pleachPut(device, last, region, 0, LENGTH, &all[last], PLEACH_NO_SIGNAL, NULL, 0, &transfer));
    if (result == pleachSuccess) result = RESULT(pleachTransferWait(device, transfer, LONG_MS, NULL));
    CHECK(result == pleachRemoteError);
    result = RESULT(pleachGet(device, last, &all[last], region, 0, LENGTH, &transfer));
    if (result == pleachSuccess) result = RESULT(pleachTransferWait(device, transfer, LONG_MS, NULL));
    CHECK(result == pleachRemoteError);
    result = RESULT(pleachSignal(device, last, 0, NULL, 0, &transfer));
    if (result == pleachSuccess) result = RESULT(pleachTransferWait(device, transfer, LONG_MS, NULL));
    CHECK(result == pleachRemoteError);
    CHECK(now_ms() - begun < SOON_MS);
    /* The others go on. */
    if (ranks > 2) {
        int next = (rank + 1) % last, previous = (rank + last - 1) % last;
        memset(address, rank + 1, 8);
        OK(pleachPut(device, next, region, 0, 8, &(pleachRemoteSlice_t){all[next].key, 8, 8}, 2, NULL, 0, NULL));
        OK(pleachSignalWait(device, previous, 2, 1, LONG_MS, NULL));
        CHECK(((unsigned char *)address)[8] == previous + 1);
        /* So that nobody closes before all have looked. */
        OK(pleachSignal(device, next, 3, NULL, 0, NULL));
        OK(pleachSignalWait(device, previous, 3, 1, LONG_MS, NULL));
    }
    OK(pleachRegionRelease(region));
    (void)RESULT(pleachDeviceClose(device));
    return 0;
}
