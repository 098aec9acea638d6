/* What the test programs share: checks that say where they failed. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pleach.h"

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s; last error: %s\n", __FILE__, __LINE__, #condition, \
                    pleachGetLastError(NULL));                                                     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Notes a result that is no success where PLEACH_SEEN says, for the comparison with what pleach.h
 * says of the function. */
static inline pleachResult_t seen(const char *call, pleachResult_t result) {
    const char *path = getenv("PLEACH_SEEN");
    FILE *file;
    if (result != pleachSuccess && path != NULL && (file = fopen(path, "a")) != NULL) {
        fprintf(file, "%.*s %d\n", (int)strcspn(call, "( "), call, (int)result);
        fclose(file);
    }
    return result;
}

#define RESULT(call) seen(#call, (call))
#define EXPECT(result, call) CHECK(RESULT(call) == (result))
#define OK(call) EXPECT(pleachSuccess, call)
/* A mistake of the caller, which no other rank hears of. */
#define REFUSED(call) CHECK(is_refusal(RESULT(call)))

static inline int is_refusal(pleachResult_t result) {
    return result == pleachInvalidArgument || result == pleachInvalidUsage;
}

/* The last error of this thread holds these words. */
#define SAYS(words) CHECK(strstr(pleachGetLastError(NULL), words) != NULL)

#endif
