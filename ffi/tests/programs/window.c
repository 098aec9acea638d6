/* Windows: what ranks publish and read, write and poll, and what they are told when one asks for
 * another window, is late or leaves: window RANK RANKS ID-FILE FABRIC. */
#include <pthread.h>

#include "meet.h"

#define COUNT 1000
#define LIMIT_MS 3000

static int rank, ranks;
static const char *path;
static pleachComm_t comm;

/* Returns when all ranks are so far. */
static void meet(void) {
    static int number;
    char name[2048];
    CHECK((size_t)snprintf(name, sizeof name, "%s.meet-%d", path, number++) < sizeof name);
    all_are_here(name, rank, ranks);
}

static pleachWindow_t opened(int slots) {
    pleachWindow_t window = NULL;
    OK(pleachWindowInit(&window, COUNT, pleachFloat64, slots, comm));
    CHECK(window != NULL);
    return window;
}

static pleachWord_t word_of(int number) {
    pleachWord_t word;
    memset(&word, 0, sizeof word);
    word.bytes[0] = (uint8_t)number;
    word.bytes[PLEACH_WORD_BYTES - 1] = 0xee;
    return word;
}

static void fill(double *data, double value) {
    int at;
    for (at = 0; at < COUNT; ++at) data[at] = value + at;
}

static void published_and_read(pleachWindow_t window) {
    double own[COUNT], theirs[COUNT];
    pleachWord_t word, given = word_of(rank + 1);
    uint64_t version = 99;
    int of, at, next = (rank + 1) % ranks;
    /* Nothing was published. */
    theirs[7] = 1;
    OK(pleachWindowRead(window, next, 0, COUNT, theirs, &version, &word));
    CHECK(version == 0 && theirs[7] == 0 && word.bytes[0] == 0);
    meet();
    fill(own, 10000 * rank);
    OK(pleachWindowPublish(window, own, &given, &version));
    CHECK(version == 1);
    meet();
    for (of = 0; of < ranks; ++of) {
        OK(pleachWindowRead(window, of, 3, 4, theirs, &version, &word));
        for (at = 0; at < 4; ++at) CHECK(theirs[at] == 10000 * of + 3 + at);
        given = word_of(of + 1);
        CHECK(version == 1 && memcmp(&word, &given, sizeof word) == 0);
        OK(pleachWindowReadTorn(window, of, COUNT - 1, 1, theirs, &version));
        CHECK(theirs[0] == 10000 * of + COUNT - 1 && version == 1);
    }
    /* What a caller does not ask for is not stored, and nothing may be read. */
    OK(pleachWindowRead(window, next, 0, 1, theirs, NULL, NULL));
    OK(pleachWindowReadTorn(window, next, COUNT, 0, NULL, NULL));
    meet();
    fill(own, -1);
    OK(pleachWindowPublish(window, own, NULL, NULL));
    meet();
    OK(pleachWindowRead(window, next, 0, COUNT, theirs, &version, &word));
    CHECK(version == 2 && theirs[0] == -1 && theirs[COUNT - 1] == COUNT - 2 && word.bytes[0] == 0);
    meet();
    REFUSED(pleachWindowRead(window, ranks, 0, 1, theirs, NULL, NULL));
    REFUSED(pleachWindowRead(window, -1, 0, 1, theirs, NULL, NULL));
    REFUSED(pleachWindowRead(window, next, COUNT - 1, 2, theirs, NULL, NULL));
    SAYS("2 elements from element 999 on");
    REFUSED(pleachWindowRead(window, next, SIZE_MAX, 2, theirs, NULL, NULL));
}

/* What a poll has seen of each writer. */
struct seen_writes {
    int number[8];
    int is_again;
    pleachWindow_t window;
};

static void arrived(const pleachArrival_t *arrival, void *context) {
    struct seen_writes *all = context;
    const double *data = arrival->data;
    int number = all->number[arrival->source]++;
    CHECK(arrival->source != rank && arrival->slot == number % 2);
    CHECK(arrival->word.bytes[0] == number && arrival->word.bytes[PLEACH_WORD_BYTES - 1] == 0xee);
    CHECK(arrival->count == (size_t)number);
    if (number > 0) CHECK(data[0] == arrival->source && data[number - 1] == arrival->source + number - 1);
    /* A function that is called by a poll makes no call on the window. */
    if (!all->is_again++) {
        EXPECT(pleachInvalidUsage, pleachWindowPoll(all->window, 0, arrived, context, NULL));
        SAYS("another call on this window");
    }
}

static void written_and_polled(pleachWindow_t window) {
    struct seen_writes met = {{0}, 0, NULL};
    double data[COUNT];
    size_t count, all = 0;
    int number, of, is_free;
    met.window = window;
    fill(data, rank);
    /* A slot that has a write is free when the peer has polled it. */
    for (number = 0; number < 6; ++number)
        for (of = 0; of < ranks; ++of) {
            pleachWord_t word = word_of(number);
            if (of == rank) continue;
            do {
                OK(pleachWindowPoll(window, 0, arrived, &met, &count));
                all += count;
                OK(pleachWindowIsFree(window, of, number % 2, &is_free));
            } while (!is_free);
            OK(pleachWindowWrite(window, of, number % 2, data, (size_t)number, &word));
        }
    while (all < (size_t)(6 * (ranks - 1))) {
        OK(pleachWindowPoll(window, 60000, arrived, &met, &count));
        CHECK(count > 0);
        all += count;
    }
    for (of = 0; of < ranks; ++of) CHECK(met.number[of] == (of == rank ? 0 : 6));
    meet();
    OK(pleachWindowPoll(window, 1, arrived, &met, &count));
    CHECK(count == 0);
    REFUSED(pleachWindowWrite(window, rank, 0, data, 1, NULL));
    REFUSED(pleachWindowWrite(window, (rank + 1) % ranks, 2, data, 1, NULL));
    REFUSED(pleachWindowWrite(window, (rank + 1) % ranks, -1, data, 1, NULL));
    REFUSED(pleachWindowWrite(window, (rank + 1) % ranks, 0, data, COUNT + 1, NULL));
    REFUSED(pleachWindowIsFree(window, rank, 0, &is_free));
    REFUSED(pleachWindowIsFree(window, ranks, 0, &is_free));
}

/* Windows that rank 0 asks for otherwise are refused on all ranks, and both ways are named. */
static void refused_on_all(size_t count, pleachDataType_t type, int slots, const char *words) {
    pleachWindow_t window = NULL;
    EXPECT(pleachInvalidUsage, pleachWindowInit(&window, count, type, slots, comm));
    SAYS("ask for the same on all");
    SAYS(words);
    CHECK(window == NULL);
    OK(pleachBarrier(comm, NULL));
}

static void ranks_differ(void) {
    int is_first = rank == 0;
    refused_on_all(is_first ? 7 : 8, pleachFloat32, 1, "7 f32 with 1 slots");
    /* As many bytes. */
    refused_on_all(is_first ? 8 : 4, is_first ? pleachFloat32 : pleachFloat64, 1, "4 f64 with 1 slots");
    refused_on_all(7, pleachInt8, is_first ? 2 : 1, "7 i8 with 2 slots");
}

/* Waits for a write; again where another thread's short call was in the way. */
static void *waits(void *window) {
    struct seen_writes none = {{0}, 1, NULL};
    pleachResult_t result;
    size_t count = 9;
    while ((result = RESULT(pleachWindowPoll(window, 60000, arrived, &none, &count))) == pleachInvalidUsage) {
        SAYS("another call on this window");
        pause_ms(1);
    }
    CHECK(result == pleachSuccess && count == 1);
    return NULL;
}

/* While a thread waits for a write, another thread is refused. */
static void a_second_thread_is_refused(void) {
    pleachWindow_t window = opened(2);
    pleachWord_t word = word_of(0);
    double data[COUNT];
    pthread_t thread;
    uint64_t version;
    fill(data, 0);
    if (rank == 0) {
        CHECK(pthread_create(&thread, NULL, waits, window) == 0);
        while (RESULT(pleachWindowPublish(window, data, NULL, &version)) == pleachSuccess) pause_ms(1);
        SAYS("another call on this window");
        meet();
        CHECK(pthread_join(thread, NULL) == 0);
    } else {
        meet();
        if (rank == 1) OK(pleachWindowWrite(window, 0, 0, data, 0, &word));
    }
    OK(pleachWindowFinalize(window));
    EXPECT(pleachInvalidUsage, pleachWindowFinalize(window));
    EXPECT(pleachInvalidUsage, pleachWindowPublish(window, data, NULL, NULL));
    SAYS("finalized");
    OK(pleachWindowDestroy(window));
    EXPECT(pleachInvalidArgument, pleachWindowPublish(window, data, NULL, NULL));
    SAYS("destroyed");
}

/* A peer that does not poll keeps a writer to its deadline, which ends the window on all ranks. */
static void one_does_not_poll(void) {
    pleachWindow_t window;
    double data[COUNT] = {0};
    int slot;
    pleachResult_t result = pleachSuccess;
    OK(pleachCommSetTimeout(comm, LIMIT_MS));
    /* All ranks come at once, as their timeout is short. */
    meet();
    OK(pleachWindowInit(&window, COUNT, pleachFloat64, 1, comm));
    OK(pleachCommSetTimeout(comm, 0));
    if (rank == 0) {
        for (slot = 0; slot < 2; ++slot) result = RESULT(pleachWindowWrite(window, 1, 0, data, COUNT, NULL));
        CHECK(result == pleachTimeout);
        SAYS("rank 1");
    }
    meet();
    if (rank != 0) {
        /* The verdict is the same here. */
        do result = RESULT(pleachWindowRead(window, 0, 0, 1, data, NULL, NULL));
        while (result == pleachSuccess);
        CHECK(result == pleachTimeout);
        SAYS("rank 1");
    }
    meet();
    OK(pleachWindowDestroy(window));
    OK(pleachBarrier(comm, NULL));
}

/* A rank that leaves ends the window for those that read it, but not the communicator. */
static void one_leaves(void) {
    pleachWindow_t window = opened(1);
    double data[COUNT];
    char left[32];
    meet();
    if (rank == ranks - 1) {
        OK(pleachWindowDestroy(window));
        meet();
    } else {
        pleachResult_t result;
        meet();
        do result = RESULT(pleachWindowRead(window, ranks - 1, 0, COUNT, data, NULL, NULL));
        while (result == pleachSuccess);
        CHECK(result == pleachRemoteError);
        snprintf(left, sizeof left, "rank %d", ranks - 1);
        SAYS(left);
        OK(pleachWindowDestroy(window));
    }
    OK(pleachBarrier(comm, NULL));
}

int main(int argc, char **argv) {
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachWindow_t window;
    pleachUniqueId id;
    double data[COUNT];
    CHECK(argc == 5);
    rank = atoi(argv[1]), ranks = atoi(argv[2]), path = argv[3], config.fabric = argv[4];
    CHECK(ranks >= 2 && ranks <= 8);
    share_id(path, rank, &id);
    OK(pleachCommInitRankConfig(&comm, ranks, id, rank, &config));
    window = opened(2);
    published_and_read(window);
    written_and_polled(window);
    meet();
    OK(pleachWindowFinalize(window));
    OK(pleachWindowDestroy(window));
    ranks_differ();
    a_second_thread_is_refused();
    one_does_not_poll();
    one_leaves();
    /* A window does not need the communicator that it was made of. */
    window = opened(1);
    OK(pleachCommFinalize(comm));
    OK(pleachCommDestroy(comm));
    fill(data, rank);
    OK(pleachWindowPublish(window, data, NULL, NULL));
    meet();
    OK(pleachWindowRead(window, ranks - 1, 0, 1, data, NULL, NULL));
    CHECK(data[0] == ranks - 1);
    OK(pleachWindowFinalize(window));
    OK(pleachWindowDestroy(window));
    EXPECT(pleachInvalidArgument, pleachWindowInit(&window, 1, pleachInt8, 1, comm));
    return 0;
}
