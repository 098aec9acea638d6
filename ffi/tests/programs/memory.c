/* Registered memory of communicators, who is late, two threads: memory RANK RANKS ID-FILE
 * FABRIC. */
#include <pthread.h>

#include "meet.h"

#define COUNT 30000

static int rank, ranks, released;
static pleachComm_t comm;

static void release(void *address, void *context) {
    CHECK(context == &released && address != NULL);
    ++released;
}

static void *asks(void *unused) {
    int round, late;
    pleachArrivalSkew_t skew = PLEACH_ARRIVAL_SKEW_INITIALIZER;
    (void)unused;
    for (round = 0; round < 200; ++round) {
        OK(pleachCommGetWaitsFor(comm, &late));
        CHECK(late >= -1 && late < ranks && late != rank);
        OK(pleachCommGetArrivalSkew(comm, (rank + 1) % ranks, &skew));
    }
    return NULL;
}

static void *reduces(void *unused) {
    int round;
    (void)unused;
    for (round = 0; round < 100; ++round) {
        int32_t one[4] = {1, 1, 1, 1};
        OK(pleachAllReduce(one, one, 4, pleachInt32, pleachSum, comm, NULL));
        CHECK(one[0] == ranks && one[3] == ranks);
    }
    return NULL;
}

static void reduce(float *in, float *out) {
    size_t index;
    for (index = 0; index < COUNT; ++index) in[index] = (float)rank + 1;
    OK(pleachAllReduce(in, out, COUNT, pleachFloat32, pleachSum, comm, NULL));
    for (index = 0; index < COUNT; ++index) CHECK(out[index] == (float)(ranks * (ranks + 1) / 2));
}

int main(int argc, char **argv) {
    pleachUniqueId id;
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachArrivalSkew_t skew = PLEACH_ARRIVAL_SKEW_INITIALIZER;
    void *memory, *handle, *second, *user_handle = NULL;
    float *data, *user;
    pthread_t threads[2];
    pleachResult_t result;
    int late;
    CHECK(argc == 5);
    rank = atoi(argv[1]), ranks = atoi(argv[2]);
    share_id(argv[3], rank, &id);
    config.fabric = argv[4];
    OK(pleachCommInitRankConfig(&comm, ranks, id, rank, &config));

    EXPECT(pleachInvalidArgument, pleachMemAlloc(NULL, 8));
    EXPECT(pleachInvalidArgument, pleachMemAlloc(&memory, 0));
    EXPECT(pleachSystemError, pleachMemAlloc(&memory, SIZE_MAX));
    OK(pleachMemAlloc(&memory, 2 * COUNT * sizeof(float)));
    data = memory;
    EXPECT(pleachInvalidArgument, pleachMemFree(data + 1));
    EXPECT(pleachInvalidArgument, pleachCommRegister(comm, NULL, 8, &handle));
    EXPECT(pleachInvalidArgument, pleachCommRegister(comm, memory, 0, &handle));
    EXPECT(pleachInvalidArgument, pleachCommRegister(comm, memory, 8, NULL));
    EXPECT(pleachInvalidArgument, pleachCommRegister(NULL, memory, 8, &handle));
    EXPECT(pleachInvalidArgument,
           pleachCommRegisterWithRelease(comm, memory, 8, release, &released, &handle));
    OK(pleachCommRegister(comm, memory, 2 * COUNT * sizeof(float), &handle));
    OK(pleachCommRegister(comm, memory, 8, &second));
    CHECK(handle != second);
    reduce(data, data);
    reduce(data, data + COUNT);
    /* A block at its place, and one half that is not registered. */
    CHECK((user = malloc(COUNT * sizeof *user)) != NULL);
    reduce(user, data);
    reduce(data, user);
    data[rank] = (float)rank;
    OK(pleachAllGather(data + rank, data, 1, pleachFloat32, comm, NULL));
    for (late = 0; late < ranks; ++late) CHECK(data[late] == (float)late);
    EXPECT(pleachInvalidArgument, pleachAllReduce(data, data + 1, COUNT, pleachFloat32, pleachSum, comm, NULL));
    EXPECT(pleachInvalidArgument,
           pleachAllReduce((char *)memory + 1, (char *)memory + 1, 8, pleachFloat32, pleachSum, comm, NULL));

    /* Memory of the user. */
    result = RESULT(pleachCommRegisterWithRelease(comm, user, COUNT * sizeof *user, release, &released, &user_handle));
    if (result == pleachSuccess) {
        reduce(user, user);
        reduce(user, data);
        OK(pleachCommDeregister(comm, user_handle));
        CHECK(released == 1);
    } else {
        CHECK(result == pleachInvalidUsage && user_handle == NULL && released == 0);
        SAYS("pleachMemAlloc");
    }
    CHECK((result == pleachSuccess) == (strcmp(argv[4], "tcp") == 0));
    reduce(user, user);
    free(user);

    OK(pleachCommDeregister(comm, second));
    EXPECT(pleachInvalidArgument, pleachCommDeregister(comm, second));
    EXPECT(pleachInvalidArgument, pleachCommDeregister(comm, NULL));
    /* Freed while it is registered: it stays. */
    OK(pleachMemFree(memory));
    EXPECT(pleachInvalidArgument, pleachMemFree(memory));
    OK(pleachMemFree(NULL));
    reduce(data, data);
    OK(pleachCommDeregister(comm, handle));

    /* Rank 1 is late, several times: other programs may delay rank 0 as well. */
    EXPECT(pleachInvalidArgument, pleachCommGetArrivalSkew(comm, rank, &skew));
    EXPECT(pleachInvalidArgument, pleachCommGetArrivalSkew(comm, -1, &skew));
    EXPECT(pleachInvalidArgument, pleachCommGetArrivalSkew(comm, 0, NULL));
    EXPECT(pleachInvalidArgument, pleachCommGetWaitsFor(comm, NULL));
    OK(pleachBarrier(comm, NULL));
    for (late = 0; late < 5; ++late) {
        if (rank == 1) pause_ms(30);
        OK(pleachBarrier(comm, NULL));
    }
    if (rank == 0 && ranks == 2) {
        OK(pleachCommGetArrivalSkew(comm, 1, &skew));
        CHECK(skew.calls > 0 && skew.last > 0 && skew.longestNs > 15000000 && skew.sumNs >= skew.longestNs);
        CHECK(skew.medianNs <= skew.p99Ns && skew.p99Ns <= skew.longestNs);
    }

    /* A thread that asks while another one calls, and two threads that make the same calls. */
    CHECK(pthread_create(&threads[0], NULL, asks, NULL) == 0);
    CHECK(pthread_create(&threads[1], NULL, reduces, NULL) == 0);
    reduces(NULL);
    CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
    OK(pleachCommFinalize(comm));
    OK(pleachCommDestroy(comm));
    return 0;
}
