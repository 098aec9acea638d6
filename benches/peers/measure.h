/* The measuring protocol of all peers: the same as that of `pleach bench --reuse`, see
 * src/cli/bench/live.rs.
 *
 * A sample fills memory, lets all ranks meet, runs iterations back to back for at least
 * SAMPLE_MIN_US, and checks the result. Its time is that of the slowest rank divided by the
 * iterations. In place, iterations of a sample work on the same memory (a sum of n ranks grows
 * n-fold each time, exact up to CHAIN_EXPONENT); with --fresh each has memory of its own.
 *
 * A program fills `struct peer`, whose functions are all that differs, and calls measure_all(). Its
 * standard output is one JSON object a size. Plain C that is also C++.
 */
#ifndef PLEACH_PEERS_MEASURE_H
#define PLEACH_PEERS_MEASURE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define SAMPLE_MIN_US 10.0
#define MARGIN 2           /* how much longer a sample is planned */
#define ITERATIONS_MAX 256 /* of a sample */
#define SAMPLES_MIN 5
#define SAMPLES_MAX 1000
#define PATIENCE 20 /* times the time for a size, after which it ends with fewer samples */
#define PATIENCE_SAMPLES 16 /* after which patience is looked at */
#define WARMUP 8
#define WARMUP_LARGE 3
#define LARGE_BYTES (1L << 20)
#define REUSE_MIN 4 /* iterations of a sample on the same memory: at least so many, */
#define REUSE_MAX 16 /* and up to so many where */
#define REUSE_BYTES (64L << 20) /* they move no more than this. */
#define CHAIN_EXPONENT (127 - 8) /* of float, less the bits of what is summed */
#define PERIOD 1009 /* elements after which inputs repeat */
#define RANKS_MAX 64
#define SIZES_MAX 64
#define PAGE 4096L

enum collective {
    ALL_REDUCE,
    REDUCE,
    BROADCAST,
    ALL_GATHER,
    REDUCE_SCATTER,
    GATHER,
    SCATTER,
    ALL_TO_ALL,
    BARRIER,
    SEND_RECV, /* messages from rank 0 to rank 1 */
    PING_PONG, /* there and back; the time is that of one way */
    COLLECTIVES
};

static const char *const COLLECTIVE_NAMES[COLLECTIVES] = {
    "all-reduce", "reduce",     "broadcast", "all-gather", "reduce-scatter", "gather",
    "scatter",    "all-to-all", "barrier",   "send-recv",  "ping-pong",
};

struct task {
    enum collective collective;
    int fresh;
    int pin;
    double time_us; /* for each size, about */
    long bytes[SIZES_MAX];
    int sizes;
};

struct peer {
    int rank, ranks;
    void *context;
    void (*barrier)(struct peer *);
    /* The greatest of all ranks' numbers. */
    double (*greatest)(struct peer *, double);
    /* One iteration; `count` is of a part: the whole of all-gather has `ranks` of them. */
    void (*run)(struct peer *, enum collective, float *data, float *output, long count);
    /* May be null: where memory must be of a special kind, `bytes` of it. */
    void *(*allocate)(struct peer *, size_t bytes);
    void (*release)(struct peer *, void *, size_t bytes);
    /* May be null: chooses a way for the next size; false where there is no other. The quickest
     * counts. */
    int (*next_way)(struct peer *, enum collective, long bytes, int way);
};

static inline double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static inline void fail(const char *what) {
    fprintf(stderr, "error: %s\n", what);
    exit(1);
}

/* Keeps this thread on the given one of the processors that the program might use when it first
 * called this. */
static inline void pin_to(int index) {
    static cpu_set_t allowed;
    cpu_set_t only;
    if (CPU_COUNT(&allowed) == 0) sched_getaffinity(0, sizeof allowed, &allowed);
    index %= CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && index-- == 0) {
            CPU_ZERO(&only);
            CPU_SET(cpu, &only);
            sched_setaffinity(0, sizeof only, &only);
            return;
        }
    }
}

/* PROGRAM COLLECTIVE TIME_MS same|fresh pinned|free BYTES... */
static inline struct task read_task(int count, char **arguments) {
    struct task task;
    memset(&task, 0, sizeof task);
    if (count < 5) fail("bad arguments: give COLLECTIVE TIME_MS same|fresh pinned|free BYTES...");
    int known = 0;
    while (known < COLLECTIVES && strcmp(arguments[1], COLLECTIVE_NAMES[known]) != 0) known++;
    if (known == COLLECTIVES) fail("bad arguments: no such collective");
    task.collective = (enum collective)known;
    task.time_us = atof(arguments[2]) * 1e3;
    task.fresh = strcmp(arguments[3], "fresh") == 0;
    task.pin = strcmp(arguments[4], "pinned") == 0;
    for (int place = 5; place < count && task.sizes < SIZES_MAX; place++) task.bytes[task.sizes++] = atol(arguments[place]);
    if (task.collective == BARRIER) {
        task.sizes = 1;
        task.bytes[0] = 0;
    }
    return task;
}

/* What a rank gives at a place of the table: small, so that sums are exact. */
static inline float given(int rank, long place) {
    uint64_t mixed = ((uint64_t)place + (uint64_t)rank * 31) * 0x9E3779B97F4A7C15u;
    return (float)((mixed >> 40) % 4);
}

struct plan {
    struct peer *peer;
    enum collective collective;
    long count;  /* elements of a part */
    long in, out; /* elements of input and of separate output */
    int slots, chain;
    float *data, *output;
    long data_stride, output_stride; /* in elements */
    long sample;
    uint64_t errors;
};

static inline long padded(long elements) {
    return (elements * (long)sizeof(float) + PAGE - 1) / PAGE * PAGE / (long)sizeof(float);
}

static inline void fill(const struct plan *plan, float *data, long begin) {
    float table[2 * PERIOD];
    for (long place = 0; place < 2 * PERIOD; place++) table[place] = given(plan->peer->rank, place % PERIOD);
    for (long done = 0; done < plan->in; done += PERIOD) {
        long left = plan->in - done < PERIOD ? plan->in - done : PERIOD;
        memcpy(data + done, table + begin % PERIOD, (size_t)left * sizeof(float));
    }
}

/* How many of `count` elements are not those of `rank` (or, where it is negative, of the sum), at
 * `begin`. */
static inline uint64_t differing(const struct plan *plan, const float *found, long count, int rank, long begin) {
    const struct peer *peer = plan->peer;
    float table[2 * PERIOD];
    for (long place = 0; place < 2 * PERIOD; place++) {
        float value = 0;
        for (int other = 0; other < peer->ranks; other++) {
            if (rank < 0 || rank == other) value += given(other, place % PERIOD);
        }
        if (rank < 0 && plan->collective == ALL_REDUCE) {
            for (int again = 1; again < plan->chain; again++) value *= (float)peer->ranks;
        } else if (rank < 0 && plan->collective == REDUCE) {
            value += (float)(plan->chain - 1) * (value - given(0, place % PERIOD));
        }
        table[place] = value;
    }
    uint64_t wrong = 0;
    for (long done = 0; done < count; done += PERIOD) {
        long left = count - done < PERIOD ? count - done : PERIOD;
        if (memcmp(found + done, table + begin % PERIOD, (size_t)left * sizeof(float)) == 0) continue;
        for (long place = 0; place < left; place++) wrong += found[done + place] != table[begin % PERIOD + place];
    }
    return wrong;
}

static inline uint64_t wrong_elements(const struct plan *plan, const float *data, const float *output, long begin) {
    const struct peer *peer = plan->peer;
    long count = plan->count;
    uint64_t wrong = 0;
    switch (plan->collective) {
    case ALL_REDUCE: return differing(plan, data, count, -1, begin);
    case REDUCE: return differing(plan, data, count, peer->rank == 0 ? -1 : peer->rank, begin);
    case BROADCAST: return differing(plan, data, count, 0, begin);
    case SEND_RECV:
    case PING_PONG: return peer->rank < 2 ? differing(plan, data, count, 0, begin) : 0;
    case REDUCE_SCATTER: return differing(plan, output, count, -1, begin + peer->rank * count);
    case SCATTER: return differing(plan, output, count, 0, begin + peer->rank * count);
    case GATHER:
        if (peer->rank != 0) return 0; /* fall through */
    case ALL_GATHER:
        for (int from = 0; from < peer->ranks; from++) wrong += differing(plan, output + from * count, count, from, begin);
        return wrong;
    case ALL_TO_ALL:
        for (int from = 0; from < peer->ranks; from++)
            wrong += differing(plan, output + from * count, count, from, begin + peer->rank * count);
        return wrong;
    default: return 0;
    }
}

static inline void *take(struct peer *peer, long elements) {
    size_t bytes = (size_t)elements * sizeof(float);
    if (peer->allocate) return peer->allocate(peer, bytes);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory: give smaller sizes");
    return memory;
}

static inline void give(struct peer *peer, void *memory, long elements) {
    size_t bytes = (size_t)elements * sizeof(float);
    if (peer->release) {
        peer->release(peer, memory, bytes);
    } else {
        munmap(memory, bytes);
    }
}

static inline void allocate_slots(struct plan *plan) {
    long slots = plan->slots;
    plan->data = (float *)take(plan->peer, plan->data_stride * slots);
    plan->output = plan->out ? (float *)take(plan->peer, plan->output_stride * slots) : NULL;
}

static inline void release_slots(struct plan *plan) {
    give(plan->peer, plan->data, plan->data_stride * plan->slots);
    if (plan->output) give(plan->peer, plan->output, plan->output_stride * plan->slots);
}

/* One sample; the time of an iteration on the slowest rank. */
static inline double run_sample(struct plan *plan) {
    struct peer *peer = plan->peer;
    long first = plan->sample * 17;
    for (int slot = 0; slot < plan->slots; slot++) fill(plan, plan->data + slot * plan->data_stride, first + slot);
    peer->barrier(peer);
    double began = now_us();
    for (int slot = 0; slot < plan->slots; slot++) {
        float *data = plan->data + slot * plan->data_stride;
        float *output = plan->output ? plan->output + slot * plan->output_stride : data;
        for (int again = 0; again < plan->chain; again++) peer->run(peer, plan->collective, data, output, plan->count);
    }
    double took = now_us() - began;
    for (int slot = 0; slot < plan->slots; slot++) {
        float *data = plan->data + slot * plan->data_stride;
        float *output = plan->output ? plan->output + slot * plan->output_stride : data;
        plan->errors += wrong_elements(plan, data, output, first + slot);
    }
    plan->sample++;
    return peer->greatest(peer, took) / plan->slots / plan->chain / (plan->collective == PING_PONG ? 2 : 1);
}

static inline int by_value(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Most iterations of a sum in place that are exact. */
static inline int chain_max(const struct peer *peer, enum collective collective) {
    int bits = 0;
    while ((1 << bits) < peer->ranks) bits++;
    if (collective != ALL_REDUCE || bits == 0) return ITERATIONS_MAX;
    return (1 << bits) == peer->ranks ? 1 + CHAIN_EXPONENT / bits : 1 + (24 - 8) / bits;
}

static inline void size_plan(struct plan *plan, const struct task *task, long iterations) {
    long reuse = plan->in ? REUSE_BYTES / (plan->in * (long)sizeof(float)) : 1;
    reuse = reuse < REUSE_MIN ? REUSE_MIN : reuse > REUSE_MAX ? REUSE_MAX : reuse;
    if (iterations > ITERATIONS_MAX) iterations = ITERATIONS_MAX;
    if (task->fresh) {
        plan->slots = (int)iterations;
        plan->chain = 1;
        return;
    }
    if (iterations < reuse) iterations = reuse;
    int most = chain_max(plan->peer, plan->collective);
    plan->slots = (int)((iterations + most - 1) / most);
    plan->chain = (int)((iterations + plan->slots - 1) / plan->slots);
}

struct measured {
    double median_us, late_us;
    uint64_t errors;
    long samples;
};

static inline struct measured measure_one(struct peer *peer, const struct task *task, long bytes) {
    int has_parts = task->collective >= ALL_GATHER && task->collective <= ALL_TO_ALL;
    struct plan plan;
    memset(&plan, 0, sizeof plan);
    plan.peer = peer;
    plan.collective = task->collective;
    plan.count = bytes / (long)sizeof(float) / (has_parts ? peer->ranks : 1);
    long whole = plan.count * peer->ranks;
    int whole_in = task->collective == REDUCE_SCATTER || task->collective == SCATTER || task->collective == ALL_TO_ALL;
    int whole_out = task->collective == ALL_GATHER || task->collective == GATHER || task->collective == ALL_TO_ALL;
    plan.in = whole_in ? whole : plan.count;
    plan.out = whole_out ? whole : has_parts ? plan.count : 0;
    plan.data_stride = padded(plan.in ? plan.in : 1);
    plan.output_stride = padded(plan.out);
    plan.slots = plan.chain = 1;
    allocate_slots(&plan);
    double warm[WARMUP];
    int warmup = bytes < LARGE_BYTES ? WARMUP : WARMUP_LARGE;
    for (int place = 0; place < warmup; place++) warm[place] = run_sample(&plan);
    qsort(warm, (size_t)warmup, sizeof(double), by_value);
    double usual = warm[warmup / 2] > 0.01 ? warm[warmup / 2] : 0.01;
    release_slots(&plan);

    size_plan(&plan, task, (long)(SAMPLE_MIN_US * MARGIN / usual) + 1);
    allocate_slots(&plan);
    run_sample(&plan);
    usual = run_sample(&plan);
    long iterations = (long)plan.slots * plan.chain;
    double wanted = task->time_us / ((usual > 0.01 ? usual : 0.01) * (double)iterations);
    long samples = wanted > SAMPLES_MAX ? SAMPLES_MAX : wanted < SAMPLES_MIN ? SAMPLES_MIN : (long)wanted;
    double *times = (double *)malloc((size_t)samples * sizeof(double));
    double began = now_us();
    for (long place = 0; place < samples; place++) {
        times[place] = run_sample(&plan);
        /* Filling, checking and meeting take time too; all ranks must come to the same end. */
        if (place % PATIENCE_SAMPLES == PATIENCE_SAMPLES - 1 &&
            peer->greatest(peer, now_us() - began) > task->time_us * PATIENCE) {
            samples = place + 1;
        }
    }
    qsort(times, (size_t)samples, sizeof(double), by_value);
    struct measured measured;
    measured.median_us = times[(samples * 50 + 99) / 100 - 1];
    measured.late_us = times[(samples * 99 + 99) / 100 - 1];
    measured.errors = (uint64_t)peer->greatest(peer, (double)plan.errors);
    measured.samples = samples;
    free(times);
    release_slots(&plan);
    return measured;
}

/* Measures every size and prints it on rank 0; the exit status. */
static inline int measure_all(struct peer *peer, const struct task *task) {
    uint64_t errors = 0;
    if (task->pin) pin_to(peer->rank);
    for (int size = 0; size < task->sizes; size++) {
        struct measured best;
        memset(&best, 0, sizeof best);
        for (int way = 0; way == 0 || (peer->next_way && peer->next_way(peer, task->collective, task->bytes[size], way)); way++) {
            if (way == 0 && peer->next_way) peer->next_way(peer, task->collective, task->bytes[size], way);
            struct measured measured = measure_one(peer, task, task->bytes[size]);
            measured.errors += best.errors;
            if (way == 0 || measured.median_us < best.median_us) {
                best = measured;
            } else {
                best.errors = measured.errors;
            }
        }
        errors += best.errors;
        if (peer->rank == 0) {
            printf("{\"collective\":\"%s\",\"bytes\":%ld,\"time_us_p50\":%.4f,\"time_us_p99\":%.4f,\"samples\":%ld,\"errors\":%lu}\n",
                   COLLECTIVE_NAMES[task->collective], task->bytes[size], best.median_us, best.late_us, best.samples,
                   (unsigned long)best.errors);
            fflush(stdout);
        }
    }
    return errors ? 1 : 0;
}

#endif
