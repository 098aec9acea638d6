/* What this machine can do at most: memory, one cache line between two cores, a stream over
 * loopback. One JSON object a limit: what, value, unit. Argument: how long to measure each, in
 * ms. */
#include "measure.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CACHE_BYTES (256L << 10) /* a core's share of each operand: inside its second cache */
#define MEMORY_BYTES (64L << 20)
#define STREAM_BYTES (1L << 20) /* of a write */
#define BATCH 100 /* round trips */
#define SAMPLES 1000

static void print(const char *what, double value, const char *unit) {
    printf("{\"what\":\"%s\",\"value\":%.4f,\"unit\":\"%s\"}\n", what, value, unit);
    fflush(stdout);
}

static double median(double *samples, int count) {
    qsort(samples, (size_t)count, sizeof(double), by_value);
    return samples[count / 2];
}

static void copy(float *into, float *left, float *right, long count) {
    (void)right;
    memcpy(into, left, (size_t)count * sizeof(float));
}

static void add(float *restrict into, float *restrict left, float *restrict right, long count) {
    for (long place = 0; place < count; place++) into[place] = left[place] + right[place];
}

/* GB/s of what is written. */
static double written_gb_s(void (*run)(float *, float *, float *, long), long bytes, double time_us) {
    float *memory[3], sum = 0;
    for (int which = 0; which < 3; which++) {
        memory[which] = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory[which] == MAP_FAILED) fail("no memory for the limits");
        memset(memory[which], 1, (size_t)bytes);
    }
    double samples[SAMPLES], began = now_us();
    int count = 0;
    while (count < SAMPLES && (count < SAMPLES_MIN || now_us() - began < time_us)) {
        double start = now_us();
        run(memory[0], memory[1], memory[2], bytes / (long)sizeof(float));
        samples[count++] = now_us() - start;
        sum += memory[0][count];
    }
    for (int which = 0; which < 3; which++) munmap(memory[which], (size_t)bytes);
    if (sum < 0) fail("sums are wrong");
    return (double)bytes / median(samples, count) / 1e3;
}

struct line {
    _Atomic uint64_t count;
} __attribute__((aligned(64)));

/* A cache line there and another one back, in ns. */
static double line_round_trip_ns(double time_us) {
    struct line *lines = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (lines == MAP_FAILED) fail("no memory for the limits");
    pid_t child = fork();
    int rank = child == 0;
    pin_to(rank);
    double samples[SAMPLES], began = now_us();
    uint64_t ball = 0;
    int count = 0;
    while (count < SAMPLES) {
        double start = now_us();
        /* The last ball of the last batch says whether there is another. */
        int last = !rank && now_us() - began > time_us && count >= SAMPLES_MIN;
        for (int trip = 0; trip < BATCH; trip++) {
            ball += 2;
            if (rank) {
                /* Acquire and release pair with those of the other rank. */
                uint64_t seen;
                while ((seen = atomic_load_explicit(&lines[0].count, memory_order_acquire)) < ball) {
                }
                atomic_store_explicit(&lines[1].count, ball, memory_order_release);
                last = seen & 1;
            } else {
                uint64_t sent = ball | (uint64_t)(last && trip == BATCH - 1);
                atomic_store_explicit(&lines[0].count, sent, memory_order_release);
                while (atomic_load_explicit(&lines[1].count, memory_order_acquire) < ball) {
                }
            }
        }
        samples[count++] = (now_us() - start) * 1e3 / BATCH;
        if (last) break;
    }
    if (rank) _exit(0);
    waitpid(child, NULL, 0);
    munmap(lines, PAGE);
    return median(samples, count);
}

/* GB/s of one stream over loopback, from one process to another. */
static double stream_gb_s(double time_us) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&address, &length))
        fail("no loopback: a socket cannot listen");
    char *memory = malloc(STREAM_BYTES);
    memset(memory, 1, STREAM_BYTES);
    pid_t child = fork();
    if (child == 0) {
        pin_to(1);
        int connection = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(connection, (struct sockaddr *)&address, length)) _exit(1);
        for (double began = now_us(); now_us() - began < time_us;) {
            if (write(connection, memory, STREAM_BYTES) <= 0) _exit(1);
        }
        _exit(0);
    }
    pin_to(0);
    int connection = accept(listener, NULL, NULL);
    double began = now_us();
    long received = 0, got;
    while ((got = read(connection, memory, STREAM_BYTES)) > 0) received += got;
    double took = now_us() - began;
    waitpid(child, NULL, 0);
    free(memory);
    return (double)received / took / 1e3;
}

int main(int count, char **arguments) {
    double time_us = (count > 1 ? atof(arguments[1]) : 100) * 1e3;
    pin_to(0);
    print("memcpy, cache", written_gb_s(copy, CACHE_BYTES, time_us), "GB/s");
    print("memcpy, memory", written_gb_s(copy, MEMORY_BYTES, time_us), "GB/s");
    print("add, cache", written_gb_s(add, CACHE_BYTES, time_us), "GB/s");
    print("add, memory", written_gb_s(add, MEMORY_BYTES, time_us), "GB/s");
    print("cache line, round trip", line_round_trip_ns(time_us), "ns");
    print("loopback, stream", stream_gb_s(time_us), "GB/s");
    return 0;
}
