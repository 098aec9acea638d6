// The header in C++17: everything is there, with the linkage of C.
#include "check.h"

int main() {
    pleachComm_t comm = nullptr;
    OK(pleachCommInitFromEnv(&comm, nullptr));
    int64_t own = 41, sum = 0;
    OK(pleachAllReduce(&own, &sum, 1, pleachInt64, pleachSum, comm, nullptr));
    CHECK(sum == 41);
    OK(pleachCommDestroy(comm));
    return 0;
}
