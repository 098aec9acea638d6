/* The functions of devices and of registered memory with NULL, with nonsense and after the end, in
 * a world of one rank. */
#include "check.h"

static void release(void *address, void *context) {
    (void)address, (void)context;
    exit(1);
}

static void memory(pleachComm_t comm) {
    void *handle = NULL;
    float data[4] = {0};
    int late;
    pleachArrivalSkew_t skew = PLEACH_ARRIVAL_SKEW_INITIALIZER;
    REFUSED(pleachCommRegister(comm, data, sizeof data, &handle));
    REFUSED(pleachCommRegisterWithRelease(comm, data, sizeof data, release, NULL, &handle));
    REFUSED(pleachCommDeregister(comm, data));
    REFUSED(pleachCommGetArrivalSkew(comm, 0, &skew));
    REFUSED(pleachCommGetWaitsFor(comm, &late));
    REFUSED(pleachMemAlloc(NULL, 8));
    REFUSED(pleachMemAlloc(&handle, 0));
    EXPECT(pleachSystemError, pleachMemAlloc(&handle, SIZE_MAX));
    CHECK(handle == NULL);
    REFUSED(pleachMemFree(data));
    OK(pleachMemFree(NULL));
}

static void no_device(pleachDevice_t device) {
    pleachDeviceInfo_t info = PLEACH_DEVICE_INFO_INITIALIZER;
    pleachRegion_t region = NULL;
    pleachRemoteSlice_t slice = {1, 2, 3};
    pleachTransfer_t transfer = 7;
    void *address = NULL;
    uint64_t count;
    char own[4] = "abc", all[4];
    REFUSED(pleachDeviceClose(device));
    REFUSED(pleachDeviceGetInfo(device, &info));
    REFUSED(pleachDeviceExchange(device, own, all, 4));
    REFUSED(pleachRegionAlloc(device, 8, &address, &region));
    REFUSED(pleachRegionRegister(device, own, 4, release, NULL, &region));
    REFUSED(pleachPut(device, 0, region, 0, 0, &slice, 0, NULL, 0, &transfer));
    CHECK(transfer == 0);
    REFUSED(pleachGet(device, 0, &slice, region, 0, 0, &transfer));
    REFUSED(pleachAtomicAdd(device, 0, &slice, 1, &transfer));
    REFUSED(pleachAtomicCompareSwap(device, 0, &slice, 1, 2, &transfer));
    REFUSED(pleachSignal(device, 0, 0, NULL, 0, &transfer));
    REFUSED(pleachTransferWait(device, 1, 1000, NULL));
    REFUSED(pleachSignalWait(device, 0, 0, 1, 1000, NULL));
    REFUSED(pleachSignalCount(device, 0, 0, &count));
}

int main(void) {
    pleachDevice_t device = NULL;
    pleachDeviceInfo_t info = PLEACH_DEVICE_INFO_INITIALIZER;
    pleachRegion_t region = NULL, no_region = (pleachRegion_t)(uintptr_t)1000;
    pleachRemoteSlice_t slice = {1, 2, 3};
    pleachUniqueId id;
    pleachComm_t comm = NULL;
    void *address = NULL;
    char own[4] = "abc", all[4];
    memset(&id, 0, sizeof id);
    REFUSED(pleachDeviceOpen(NULL, 1, id, 0, NULL));
    REFUSED(pleachDeviceOpen(&device, 1, id, 0, NULL));
    REFUSED(pleachDeviceOpen(&device, 2, id, 2, NULL));
    REFUSED(pleachDeviceOpenFromEnv(NULL, NULL));
    no_device(NULL);
    no_device((pleachDevice_t)(uintptr_t)0x7fffffffu);
    OK(pleachGroupStart());
    EXPECT(pleachInvalidUsage, pleachDeviceOpenFromEnv(&device, NULL));
    OK(pleachGroupEnd());

    OK(pleachDeviceOpenFromEnv(&device, NULL));
    REFUSED(pleachDeviceGetInfo(device, NULL));
    info.size = 1;
    REFUSED(pleachDeviceGetInfo(device, &info));
    REFUSED(pleachRegionAlloc(device, 0, &address, &region));
    REFUSED(pleachRegionAlloc(device, 8, NULL, &region));
    REFUSED(pleachRegionAlloc(device, 8, &address, NULL));
    EXPECT(pleachSystemError, pleachRegionAlloc(device, SIZE_MAX, &address, &region));
    REFUSED(pleachRegionRegister(device, own, SIZE_MAX, release, NULL, &region));
    REFUSED(pleachRegionRegister(device, own, 4, release, NULL, NULL));
    REFUSED(pleachRegionRelease(NULL));
    REFUSED(pleachRegionRelease(no_region));
    REFUSED(pleachRegionExport(no_region, 0, 0, &slice));
    REFUSED(pleachTransferWait(device, 0, 1000, NULL));
    REFUSED(pleachTransferWait(device, UINT64_MAX, 1000, NULL));
    REFUSED(pleachSignal(device, 0, 0, NULL, 0, NULL));
    REFUSED(pleachSignalWait(device, -1, 0, 1, 1000, NULL));
    REFUSED(pleachSignalCount(device, 1, 0, NULL));
    OK(pleachDeviceExchange(device, own, all, 4));
    CHECK(memcmp(own, all, 4) == 0);
    OK(pleachRegionAlloc(device, 8, &address, &region));
    REFUSED(pleachPut(device, 0, region, 0, 8, &slice, 0, NULL, 0, NULL));
    OK(pleachRegionExport(region, 8, 0, &slice));
    REFUSED(pleachRegionExport(region, 9, 0, &slice));
    OK(pleachDeviceClose(device));
    no_device(device);
    SAYS("destroyed");
    /* A region outlives its device. */
    memset(address, 1, 8);
    OK(pleachRegionRelease(region));
    REFUSED(pleachRegionRelease(region));

    memory(NULL);
    memory((pleachComm_t)(uintptr_t)77777);
    OK(pleachCommInitFromEnv(&comm, NULL));
    OK(pleachCommDestroy(comm));
    memory(comm);
    return 0;
}
