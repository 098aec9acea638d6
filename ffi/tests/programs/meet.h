/* How the ranks of a test program meet. */
#ifndef MEET_H
#define MEET_H

#include <time.h>

#include "check.h"

static inline void pause_ms(long milliseconds) {
    struct timespec time;
    time.tv_sec = milliseconds / 1000, time.tv_nsec = milliseconds % 1000 * 1000000;
    nanosleep(&time, NULL);
}

static inline long now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Rank 0 makes the unique id and writes it to a file; the others wait for it. */
static void share_id(const char *path, int rank, pleachUniqueId *id) {
    FILE *file;
    if (rank == 0) {
        char hidden[4096];
        OK(pleachGetUniqueId(id));
        CHECK((size_t)snprintf(hidden, sizeof hidden, "%s.part", path) < sizeof hidden);
        CHECK((file = fopen(hidden, "wb")) != NULL);
        CHECK(fwrite(id, sizeof *id, 1, file) == 1 && fclose(file) == 0);
        CHECK(rename(hidden, path) == 0);
    } else {
        while ((file = fopen(path, "rb")) == NULL) pause_ms(1);
        CHECK(fread(id, sizeof *id, 1, file) == 1 && fclose(file) == 0);
    }
}

/* The id of a part of a program that meets more than once. */
static inline void share_id_of(const char *path, const char *part, int rank, pleachUniqueId *id) {
    char name[4096];
    CHECK((size_t)snprintf(name, sizeof name, "%s.%s", path, part) < sizeof name);
    share_id(name, rank, id);
}

/* Returns when all ranks are so far, by no call of the library: a call that returns here may still
 * go on elsewhere. */
static inline void all_are_here(const char *path, int rank, int ranks) {
    char name[4096];
    FILE *file;
    int of;
    CHECK((size_t)snprintf(name, sizeof name, "%s.here-%d", path, rank) < sizeof name);
    CHECK((file = fopen(name, "wb")) != NULL && fclose(file) == 0);
    for (of = 0; of < ranks; ++of) {
        snprintf(name, sizeof name, "%s.here-%d", path, of);
        while ((file = fopen(name, "rb")) == NULL) pause_ms(1);
        fclose(file);
    }
}

/* Joins a session over the ranks' common file; `elastic` says the rest. */
static inline pleachSession_t join_session(const char *path, int rank, int ranks, const char *fabric,
                                           const pleachElastic_t *elastic) {
    pleachConfig_t config = PLEACH_CONFIG_INITIALIZER;
    pleachSession_t session = NULL;
    pleachUniqueId id;
    share_id(path, rank, &id);
    config.fabric = fabric;
    OK(pleachSessionJoin(&session, ranks, id, rank, elastic, &config));
    CHECK(session != NULL);
    return session;
}

#endif
