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
                    pleachGetLastError());                                                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define EXPECT(result, call) CHECK((call) == (result))
#define OK(call) EXPECT(pleachSuccess, call)

/* The last error of this thread holds these words. */
#define SAYS(words) CHECK(strstr(pleachGetLastError(), words) != NULL)

#endif
