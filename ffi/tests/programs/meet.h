/* How the ranks of a test program meet. */
#ifndef MEET_H
#define MEET_H

#include "check.h"

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
        while ((file = fopen(path, "rb")) == NULL) {
        }
        CHECK(fread(id, sizeof *id, 1, file) == 1 && fclose(file) == 0);
    }
}

#endif
