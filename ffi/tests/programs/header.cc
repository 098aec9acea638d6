// The header in C++17: everything is there, with the linkage of C.
#include "check.h"

// Programs for NCCL write most element types by these names.
static_assert(pleachChar == pleachInt8 && pleachInt == pleachInt32 && pleachHalf == pleachFloat16, "");
static_assert(pleachFloat == pleachFloat32 && pleachDouble == pleachFloat64, "");

int main() {
    pleachComm_t comm = nullptr;
    OK(pleachCommInitFromEnv(&comm, nullptr));
    int64_t own = 41, sum = 0;
    OK(pleachAllReduce(&own, &sum, 1, pleachInt64, pleachSum, comm, nullptr));
    CHECK(sum == 41);
    OK(pleachCommDestroy(comm));
    return 0;
}
