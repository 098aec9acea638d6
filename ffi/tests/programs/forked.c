/* A process that was forked from a rank: its calls are errors that say so, it may join by itself,
   and the rank goes on: forked RANK RANKS ID-FILE. */
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "meet.h"

static pleachComm_t comm;
static pleachDevice_t device;
static pleachRegion_t region;
static void *memory, *handle;
static int other_rank;

/* Every call that another rank would have to hear of, and every one that changes something. */
#define FORBIDDEN(call) EXPECT(pleachInvalidUsage, call)

static void of_communicator(void) {
    float data[4] = {1, 2, 3, 4};
    pleachComm_t part = comm;
    void *other = NULL;
    int number = -1;
    FORBIDDEN(pleachAllReduce(data, data, 4, pleachFloat32, pleachSum, comm, NULL));
    SAYS("fork");
    FORBIDDEN(pleachBcast(data, 4, pleachFloat32, 0, comm, NULL));
    FORBIDDEN(pleachSend(data, 4, pleachFloat32, other_rank, comm, NULL));
    FORBIDDEN(pleachBarrier(comm, NULL));
    OK(pleachGroupStart());
    OK(pleachAllReduce(data, data, 4, pleachFloat32, pleachSum, comm, NULL));
    FORBIDDEN(pleachGroupEnd());
    FORBIDDEN(pleachCommSplit(comm, 0, 0, &part, NULL));
    CHECK(part == NULL);
    FORBIDDEN(pleachCommRegister(comm, memory, 64, &other));
    FORBIDDEN(pleachCommFinalize(comm));
    CHECK(data[0] == 1 && data[3] == 4);
    /* What asks nobody works. */
    OK(pleachCommCount(comm, &number));
    CHECK(number >= 2);
}

static void of_device(void) {
    pleachDeviceInfo_t info = PLEACH_DEVICE_INFO_INITIALIZER;
    pleachRemoteSlice_t slice = {1, 0, 8};
    uint64_t count = 0;
    char bytes[4] = "abc";
    FORBIDDEN(pleachDeviceGetInfo(device, &info));
    SAYS("fork");
    FORBIDDEN(pleachDeviceExchange(device, bytes, bytes, 1));
    FORBIDDEN(pleachPut(device, other_rank, region, 0, 8, &slice, PLEACH_NO_SIGNAL, NULL, 0, NULL));
    FORBIDDEN(pleachSignalCount(device, other_rank, 0, &count));
    FORBIDDEN(pleachTransferWait(device, 1, 0, NULL));
    FORBIDDEN(pleachDeviceClose(device));
}

/* The child joins others of its own. */
static void of_its_own(void) {
    pleachUniqueId id;
    pleachComm_t alone = NULL;
    int32_t one = 1;
    OK(pleachGetUniqueId(&id));
    OK(pleachCommInitRank(&alone, 1, id, 0));
    OK(pleachAllReduce(&one, &one, 1, pleachInt32, pleachSum, alone, NULL));
    CHECK(one == 1);
    OK(pleachCommDestroy(alone));
}

int main(int argc, char **argv) {
    int rank, ranks, status = -1, round;
    int32_t one;
    pid_t child;
    pleachUniqueId id;
    void *address;
    CHECK(argc == 4);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);
    other_rank = (rank + 1) % ranks;
    share_id_of(argv[3], "comm", rank, &id);
    OK(pleachCommInitRank(&comm, ranks, id, rank));
    share_id_of(argv[3], "device", rank, &id);
    OK(pleachDeviceOpen(&device, ranks, id, rank, NULL));
    OK(pleachRegionAlloc(device, 64, &address, &region));
    OK(pleachMemAlloc(&memory, 64));
    OK(pleachCommRegister(comm, memory, 64, &handle));
    OK(pleachBarrier(comm, NULL));
    for (round = 0; round < 2; ++round) {
        CHECK((child = fork()) >= 0);
        if (child == 0) {
            of_communicator();
            of_device();
            of_its_own();
            /* The child may leave in silence, or end its copies of the handles. */
            if (round == 1) {
                OK(pleachRegionRelease(region));
                OK(pleachCommDestroy(comm));
            }
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        one = 1;
        OK(pleachAllReduce(&one, &one, 1, pleachInt32, pleachSum, comm, NULL));
        CHECK(one == ranks);
        OK(pleachDeviceExchange(device, NULL, NULL, 0));
    }
    OK(pleachCommDeregister(comm, handle));
    OK(pleachMemFree(memory));
    OK(pleachRegionRelease(region));
    OK(pleachDeviceClose(device));
    OK(pleachCommFinalize(comm));
    OK(pleachCommDestroy(comm));
    return 0;
}
