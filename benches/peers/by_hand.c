/* A loop by hand: what two processes reach without any library. See measure.h for the arguments.
 *
 * All-reduce of float, two ways, of which the quicker counts:
 *   eager   up to EAGER_BYTES each rank writes its input into a slot, beside a sequence word and
 *           a signature, and adds what the other wrote; run and signature are checked as a library
 *           must;
 *   mapped  the two meet by a cache line each, each adds its half straight out of both buffers
 *           into both, and they meet again.
 * With "slice" as the first argument, of memory that the other one cannot reach: each rank copies
 * what the other adds into blocks that both map, the other adds its own and leaves the sum there as
 * well, and the first one copies it back. Three passes over half the data a rank, and every line of
 * a block goes from core to core twice and is claimed for writing twice.
 *
 * Ping-pong of up to 48 bytes: payload and counter in one cache line, written by one side and read
 * by the other.
 */
#include "measure.h"

#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#define EAGER_BYTES 4096L
#define LINE_BYTES 48L /* of payload beside counter and signature */
#define SLOTS 2 /* a rank is at most one run ahead */
#define BLOCK_BYTES (32L << 10) /* of a slice, copied at once: stays in the cache of one core */
#define BLOCKS 4 /* of one rank under way */
#define SEGMENT_BYTES (32L << 30) /* of addresses; only what is touched is memory */
#define ALIGNED __attribute__((aligned(64)))

struct slot {
    _Atomic uint64_t run;
    uint64_t signature;
    char payload[EAGER_BYTES];
} ALIGNED;

struct line {
    _Atomic uint64_t count;
} ALIGNED;

/* What a rank has given to be added and has added, in blocks since the beginning. */
struct staged {
    struct line given, added;
    char blocks[BLOCKS][BLOCK_BYTES] ALIGNED;
};

struct shared {
    struct slot slots[2][SLOTS];
    struct staged staged[2];
    struct line meeting[2];
    double number[2][2];
};

/* A rank's own view. */
struct by_hand {
    struct shared *shared;
    char *segment[2]; /* of both ranks, at the same offsets */
    size_t used;
    uint64_t met, run, signature, balls, numbers, blocks;
    int eager, slice;
};

static void meet(struct peer *peer) {
    struct by_hand *by_hand = peer->context;
    uint64_t met = ++by_hand->met;
    /* Release: pairs with the acquire of the other rank, which then sees all that was written
     * before. */
    atomic_store_explicit(&by_hand->shared->meeting[peer->rank].count, met, memory_order_release);
    while (atomic_load_explicit(&by_hand->shared->meeting[1 - peer->rank].count, memory_order_acquire) < met) {
    }
}

static double greatest(struct peer *peer, double own) {
    struct by_hand *by_hand = peer->context;
    double *number = by_hand->shared->number[++by_hand->numbers & 1];
    number[peer->rank] = own;
    meet(peer);
    return number[0] > number[1] ? number[0] : number[1];
}

/* What makes two calls the same, chained over all calls. */
static uint64_t signed_call(uint64_t before, long count) {
    return (before ^ ((uint64_t)count << 16 | 7)) * 0x9E3779B97F4A7C15u;
}

static void add(float *restrict into, const float *restrict other, long count) {
    for (long place = 0; place < count; place++) into[place] += other[place];
}

static void eager(struct peer *peer, float *data, long count) {
    struct by_hand *by_hand = peer->context;
    uint64_t run = ++by_hand->run;
    by_hand->signature = signed_call(by_hand->signature, count);
    struct slot *mine = &by_hand->shared->slots[peer->rank][run % SLOTS];
    struct slot *others = &by_hand->shared->slots[1 - peer->rank][run % SLOTS];
    memcpy(mine->payload, data, (size_t)count * sizeof(float));
    mine->signature = by_hand->signature;
    /* Release: pairs with the acquire of the other rank, which then reads payload and signature. */
    atomic_store_explicit(&mine->run, run, memory_order_release);
    uint64_t seen;
    while ((seen = atomic_load_explicit(&others->run, memory_order_acquire)) < run) {
    }
    if (seen != run || others->signature != by_hand->signature) fail("the other rank makes another call");
    /* Two summands: the sum is the same in either order. */
    add(data, (const float *)others->payload, count);
}

static void mapped(struct peer *peer, float *data, long count) {
    struct by_hand *by_hand = peer->context;
    size_t offset = (size_t)((char *)data - by_hand->segment[peer->rank]);
    float *restrict first = (float *)(by_hand->segment[0] + offset);
    float *restrict second = (float *)(by_hand->segment[1] + offset);
    long half = (count / 2 + 15) / 16 * 16;
    long begin = peer->rank ? half : 0, end = peer->rank ? count : half;
    if (end > count) end = count;
    meet(peer);
    for (long place = begin; place < end; place++) {
        float sum = first[place] + second[place];
        first[place] = sum;
        second[place] = sum;
    }
    meet(peer);
}

static void await_count(struct line *line, uint64_t least) {
    /* Acquire: pairs with the release of the other rank, whose block is then visible. */
    while (atomic_load_explicit(&line->count, memory_order_acquire) < least) {
    }
}

/* The block of `count` elements in two halves, of which rank r adds the r-th: the part that `rank`
 * adds, block by block. */
static long part(long count, int rank, long block, long *begin) {
    long half = (count / 2 + 15) / 16 * 16, length = BLOCK_BYTES / (long)sizeof(float);
    long end = rank ? count : half;
    *begin = (rank ? half : 0) + block * length;
    return *begin >= end ? 0 : end - *begin < length ? end - *begin : length;
}

static void slices(struct peer *peer, float *data, long count) {
    struct by_hand *by_hand = peer->context;
    struct staged *mine = &by_hand->shared->staged[peer->rank], *others = &by_hand->shared->staged[1 - peer->rank];
    uint64_t base = by_hand->blocks;
    long half = (count / 2 + 15) / 16 * 16, length = BLOCK_BYTES / (long)sizeof(float);
    long blocks = (half + length - 1) / length;
    for (long block = 0; block < blocks + BLOCKS - 1; block++) {
        long begin, elements;
        if (block < blocks) {
            /* What the other one is to add; its place is free, as its last sum was taken below. */
            elements = part(count, 1 - peer->rank, block, &begin);
            memcpy(mine->blocks[(base + block) % BLOCKS], data + begin, (size_t)elements * sizeof(float));
            /* Release: the other rank then reads the block. */
            atomic_store_explicit(&mine->given.count, base + block + 1, memory_order_release);
            await_count(&others->given, base + block + 1);
            elements = part(count, peer->rank, block, &begin);
            float *restrict own = data + begin, *restrict other = (float *)others->blocks[(base + block) % BLOCKS];
            for (long place = 0; place < elements; place++) {
                float sum = own[place] + other[place];
                own[place] = sum;
                other[place] = sum;
            }
            /* Release: the other rank then reads the sums. */
            atomic_store_explicit(&mine->added.count, base + block + 1, memory_order_release);
        }
        long back = block - (BLOCKS - 1);
        if (back < 0 || back >= blocks) continue;
        await_count(&others->added, base + back + 1);
        elements = part(count, 1 - peer->rank, back, &begin);
        memcpy(data + begin, mine->blocks[(base + back) % BLOCKS], (size_t)elements * sizeof(float));
    }
    by_hand->blocks = base + blocks;
}

static void ping_pong(struct peer *peer, float *data, long count) {
    struct by_hand *by_hand = peer->context;
    uint64_t ball = ++by_hand->balls;
    size_t bytes = (size_t)count * sizeof(float);
    struct slot *mine = &by_hand->shared->slots[peer->rank][0], *others = &by_hand->shared->slots[1 - peer->rank][0];
    by_hand->signature = signed_call(by_hand->signature, count);
    for (int turn = 0; turn < 2; turn++) {
        if (turn == peer->rank) {
            memcpy(mine->payload, data, bytes);
            mine->signature = by_hand->signature;
            /* Release: pairs with the acquire below, on the other rank. */
            atomic_store_explicit(&mine->run, ball, memory_order_release);
        } else {
            while (atomic_load_explicit(&others->run, memory_order_acquire) != ball) {
            }
            if (others->signature != by_hand->signature) fail("the other rank makes another call");
            memcpy(data, others->payload, bytes);
        }
    }
}

static void run(struct peer *peer, enum collective collective, float *data, float *output, long count) {
    (void)output;
    struct by_hand *by_hand = peer->context;
    if (collective == BARRIER) {
        meet(peer);
    } else if (collective == PING_PONG) {
        ping_pong(peer, data, count);
    } else if (by_hand->slice) {
        slices(peer, data, count);
    } else if (by_hand->eager) {
        eager(peer, data, count);
    } else {
        mapped(peer, data, count);
    }
}

static int next_way(struct peer *peer, enum collective collective, long bytes, int way) {
    struct by_hand *by_hand = peer->context;
    by_hand->eager = way == 1;
    return way == 0 || (way == 1 && !by_hand->slice && collective == ALL_REDUCE && bytes <= EAGER_BYTES);
}

/* The same offsets on both ranks, as both allocate in the same order. */
static void *allocate(struct peer *peer, size_t bytes) {
    struct by_hand *by_hand = peer->context;
    char *memory = by_hand->segment[peer->rank] + by_hand->used;
    by_hand->used += bytes;
    if (by_hand->used > SEGMENT_BYTES) fail("no memory: give smaller sizes");
    return memory;
}

static void release(struct peer *peer, void *memory, size_t bytes) {
    struct by_hand *by_hand = peer->context;
    meet(peer); /* The other rank may still be reading. */
    madvise(memory, bytes, MADV_REMOVE);
    by_hand->used -= bytes;
}

static void *shared_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory: no address space for the segments");
    return memory;
}

int main(int count, char **arguments) {
    int slice = count > 1 && strcmp(arguments[1], "slice") == 0;
    struct task task = read_task(count - slice, arguments + slice);
    if (task.collective != ALL_REDUCE && task.collective != BARRIER && task.collective != PING_PONG)
        fail("no loop by hand for this collective: there is one for all-reduce, barrier and ping-pong");
    for (int size = 0; size < task.sizes; size++) {
        if (task.collective == PING_PONG && task.bytes[size] > LINE_BYTES) fail("ping-pong of a line: at most 48 bytes");
    }
    struct by_hand by_hand = {.shared = shared_memory(sizeof(struct shared)), .slice = slice};
    for (int rank = 0; rank < 2; rank++) by_hand.segment[rank] = shared_memory(SEGMENT_BYTES);
    pid_t child = fork();
    if (child < 0) fail("no process: fork fails");
    struct peer peer = {
        .rank = child == 0, .ranks = 2, .context = &by_hand, .barrier = meet, .greatest = greatest,
        .run = run, .allocate = slice ? NULL : allocate, .release = slice ? NULL : release, .next_way = next_way,
    };
    int status = measure_all(&peer, &task);
    if (child == 0) _exit(status);
    int others = 0;
    waitpid(child, &others, 0);
    return status || others;
}
