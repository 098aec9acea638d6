/* The sum of a vector over all ranks.

   cc -O2 all_reduce.c -o all_reduce $(pkg-config --cflags --libs pleach)
   pleach run -n 4 ./all_reduce */
#include <stdio.h>
#include <stdlib.h>

#include <pleach.h>

#define COUNT ((size_t)1 << 20)

static void check(pleachResult_t result, const char *call) {
    if (result != pleachSuccess) {
        fprintf(stderr, "%s: %s: %s\n", call, pleachGetErrorString(result), pleachGetLastError(NULL));
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

int main(void) {
    pleachComm_t comm;
    void *memory, *registration;
    float *data;
    size_t index;
    int rank, ranks;

    CHECK(pleachCommInitFromEnv(&comm, NULL));
    CHECK(pleachCommUserRank(comm, &rank));
    CHECK(pleachCommCount(comm, &ranks));

    /* Registered memory is reduced in place, without copies. Any other memory works too. */
    CHECK(pleachMemAlloc(&memory, COUNT * sizeof(float)));
    CHECK(pleachCommRegister(comm, memory, COUNT * sizeof(float), &registration));
    data = memory;
    for (index = 0; index < COUNT; ++index) data[index] = (float)rank;
    CHECK(pleachAllReduce(data, data, COUNT, pleachFloat32, pleachSum, comm, NULL));
    if (rank == 0) printf("sum over %d ranks: %g\n", ranks, data[0]);
    if (data[COUNT - 1] != (float)(ranks * (ranks - 1) / 2)) return 1;

    CHECK(pleachCommDeregister(comm, registration));
    CHECK(pleachMemFree(memory));
    CHECK(pleachCommFinalize(comm));
    CHECK(pleachCommDestroy(comm));
    return 0;
}
