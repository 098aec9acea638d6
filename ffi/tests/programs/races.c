/* Every function from several threads while another thread ends what it works on, in a world of one
   rank: each call succeeds or says what is wrong. */
#include <pthread.h>

#include "meet.h"

#define THREADS 3
#define ROUNDS 30

/* What a call may say of a handle that another thread ends meanwhile. */
#define ANSWERED(call) answered(#call, (call))

static void answered(const char *call, pleachResult_t result) {
    seen(call, result);
    if (result == pleachSuccess || result == pleachRemoteError || is_refusal(result)) return;
    fprintf(stderr, "%s: result %d: %s\n", call, (int)result, pleachGetLastError(NULL));
    exit(1);
}

static pleachComm_t comm;
static pleachDevice_t device;
static pleachRegion_t shared_region;
static pleachPartial_t shared_partial;
static void *shared_memory;
static volatile int is_over;
static int by_abort;

static void release(void *address, void *context) { (void)address, (void)context; }

static void asks_communicator(void) {
    pleachFailure_t failure = PLEACH_FAILURE_INITIALIZER;
    pleachArrivalSkew_t skew = PLEACH_ARRIVAL_SKEW_INITIALIZER;
    pleachResult_t error;
    pleachRedOp_t op = pleachSum;
    void *handle = NULL;
    float scalar = 2;
    int number;
    ANSWERED(pleachCommCount(comm, &number));
    ANSWERED(pleachCommUserRank(comm, &number));
    ANSWERED(pleachCommGetAsyncError(comm, &error));
    ANSWERED(pleachCommGetFailure(comm, &failure));
    ANSWERED(pleachCommGetArrivalSkew(comm, 0, &skew));
    ANSWERED(pleachCommGetWaitsFor(comm, &number));
    ANSWERED(pleachCommSetTimeout(comm, 1000));
    ANSWERED(pleachRedOpCreatePreMulSum(&op, &scalar, pleachFloat32, pleachScalarHostImmediate, comm));
    ANSWERED(pleachRedOpDestroy(op, comm));
    ANSWERED(pleachCommRegister(comm, shared_memory, 64, &handle));
    ANSWERED(pleachCommDeregister(comm, handle));
    ANSWERED(pleachCommRegisterWithRelease(comm, &scalar, sizeof scalar, release, NULL, &handle));
    ANSWERED(pleachCommDeregister(comm, handle));
    ANSWERED(pleachMemFree(&scalar));
    ANSWERED(pleachGetVersion(&number));
    CHECK(strlen(pleachGetErrorString(number % 10)) > 0);
}

static void calls_communicator(void) {
    float in[4] = {1, 2, 3, 4}, out[4];
    size_t counts[1] = {4};
    pleachComm_t part = NULL;
    pleachPartial_t partial = NULL;
    pleachUniqueId id;
    void *memory = NULL;
    ANSWERED(pleachGroupStart());
    ANSWERED(pleachAllReduce(in, out, 4, pleachFloat32, pleachSum, comm, NULL));
    ANSWERED(pleachGroupEnd());
    ANSWERED(pleachBroadcast(in, out, 4, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachBcast(out, 4, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachReduce(in, out, 4, pleachFloat32, pleachMax, 0, comm, NULL));
    ANSWERED(pleachReduceScatter(in, out, 4, pleachFloat32, pleachSum, comm, NULL));
    ANSWERED(pleachAllGather(in, out, 4, pleachFloat32, comm, NULL));
    ANSWERED(pleachAlltoAll(in, out, 4, pleachFloat32, comm, NULL));
    ANSWERED(pleachGather(in, out, 4, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachScatter(in, out, 4, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachSend(in, 4, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachRecv(in, 4, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachAllGatherV(in, out, counts, pleachFloat32, comm, NULL));
    ANSWERED(pleachReduceScatterV(in, out, counts, pleachFloat32, pleachSum, comm, NULL));
    ANSWERED(pleachAlltoAllV(in, counts, out, counts, pleachFloat32, comm, NULL));
    ANSWERED(pleachGatherV(in, out, counts, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachScatterV(in, out, counts, pleachFloat32, 0, comm, NULL));
    ANSWERED(pleachBarrier(comm, NULL));
    ANSWERED(pleachCommSplit(comm, 0, 0, &part, NULL));
    if (part != NULL) OK(pleachCommDestroy(part));
    ANSWERED(pleachPartialInit(&partial, 4, pleachFloat32, pleachSum, NULL, comm));
    if (partial != NULL) {
        pleachRound_t round = PLEACH_ROUND_INITIALIZER;
        ANSWERED(pleachPartialFinish(partial, &round));
        OK(pleachPartialDestroy(partial));
    }
    ANSWERED(pleachMemAlloc(&memory, 100));
    ANSWERED(pleachMemFree(memory));
    OK(pleachGetUniqueId(&id));
    OK(pleachCommInitRank(&part, 1, id, 0));
    ANSWERED(pleachCommAbort(part));
    OK(pleachGetUniqueId(&id));
    OK(pleachCommInitRankConfig(&part, 1, id, 0, NULL));
    ANSWERED(pleachCommFinalize(part));
    OK(pleachCommDestroy(part));
}

static void uses_partial(void) {
    pleachRound_t round = PLEACH_ROUND_INITIALIZER;
    pleachPartialReport_t report = PLEACH_PARTIAL_REPORT_INITIALIZER;
    uint64_t counted;
    void *data;
    size_t count;
    int rank = -1;
    ANSWERED(pleachPartialContribution(shared_partial, &data));
    ANSWERED(pleachPartialContribute(shared_partial, &round));
    ANSWERED(pleachPartialStartContribute(shared_partial));
    ANSWERED(pleachPartialWait(shared_partial, &round));
    ANSWERED(pleachPartialGetReport(shared_partial, &report, &counted, 1));
    ANSWERED(pleachPartialContributors(shared_partial, &rank, 1, &count));
    ANSWERED(pleachPartialCorrected(shared_partial, &rank, 1, &count));
    ANSWERED(pleachPartialAbstain(shared_partial, &round));
    if (by_abort) ANSWERED(pleachPartialFinish(shared_partial, &round));
}

static void uses_device(void) {
    pleachDeviceInfo_t info = PLEACH_DEVICE_INFO_INITIALIZER;
    pleachRemoteSlice_t slice = {1, 0, 8};
    pleachRegion_t region = NULL;
    pleachTransfer_t transfer = 0;
    pleachDevice_t other = NULL;
    pleachUniqueId id;
    void *address;
    uint64_t count;
    char bytes[8] = "abc";
    ANSWERED(pleachDeviceGetInfo(device, &info));
    ANSWERED(pleachDeviceExchange(device, bytes, bytes, 4));
    ANSWERED(pleachRegionAlloc(device, 64, &address, &region));
    ANSWERED(pleachRegionExport(region, 0, 8, &slice));
    ANSWERED(pleachRegionRelease(region));
    ANSWERED(pleachRegionRegister(device, bytes, 8, release, NULL, &region));
    ANSWERED(pleachRegionRelease(region));
    ANSWERED(pleachRegionExport(shared_region, 0, 8, &slice));
    ANSWERED(pleachPut(device, 0, shared_region, 0, 8, &slice, 0, NULL, 0, &transfer));
    ANSWERED(pleachGet(device, 0, &slice, shared_region, 0, 8, &transfer));
    ANSWERED(pleachAtomicAdd(device, 0, &slice, 1, &transfer));
    ANSWERED(pleachAtomicCompareSwap(device, 0, &slice, 1, 2, &transfer));
    ANSWERED(pleachSignal(device, 0, 0, NULL, 0, &transfer));
    ANSWERED(pleachTransferWait(device, transfer, 1, NULL));
    ANSWERED(pleachSignalWait(device, 0, 0, 1, 1, NULL));
    ANSWERED(pleachSignalCount(device, 0, 0, &count));
    OK(pleachGetUniqueId(&id));
    OK(pleachDeviceOpen(&other, 1, id, 0, NULL));
    OK(pleachDeviceClose(other));
}

static void *uses_all(void *number) {
    while (!is_over) {
        asks_communicator();
        /* One thread calls: calls of several threads are in no order. */
        if (*(int *)number == 0) calls_communicator();
        uses_partial();
        uses_device();
    }
    return NULL;
}

static void *destroys(void *ended) {
    *(int *)ended = (by_abort ? RESULT(pleachCommAbort(comm)) : RESULT(pleachCommDestroy(comm))) == pleachSuccess;
    *(int *)ended += 16 * (RESULT(pleachDeviceClose(device)) == pleachSuccess);
    *(int *)ended += 256 * (RESULT(pleachRegionRelease(shared_region)) == pleachSuccess);
    *(int *)ended += 4096 * (RESULT(pleachPartialDestroy(shared_partial)) == pleachSuccess);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS], ends[2];
    int numbers[THREADS], ended[2], round, at;
    for (round = 0; round < ROUNDS; ++round) {
        is_over = 0, by_abort = round % 2;
        OK(pleachMemAlloc(&shared_memory, 4096));
        OK(pleachCommInitFromEnv(&comm, NULL));
        OK(pleachDeviceOpenFromEnv(&device, NULL));
        OK(pleachRegionAlloc(device, 64, &(void *){NULL}, &shared_region));
        OK(pleachPartialInit(&shared_partial, 4, pleachFloat32, pleachSum, NULL, comm));
        for (at = 0; at < THREADS; ++at) {
            numbers[at] = at;
            CHECK(pthread_create(&threads[at], NULL, uses_all, &numbers[at]) == 0);
        }
        pause_ms(round % 5);
        /* Two threads end everything: each handle is ended once. */
        for (at = 0; at < 2; ++at) CHECK(pthread_create(&ends[at], NULL, destroys, &ended[at]) == 0);
        for (at = 0; at < 2; ++at) CHECK(pthread_join(ends[at], NULL) == 0);
        CHECK(ended[0] + ended[1] == 1 + 16 + 256 + 4096);
        pause_ms(1);
        is_over = 1;
        for (at = 0; at < THREADS; ++at) CHECK(pthread_join(threads[at], NULL) == 0);
        OK(pleachMemFree(shared_memory));
    }
    return 0;
}
