/*
 * How long a test waits. A test fails for what is wrong, never for a machine that is busy: it waits
 * for what must come as long as it may take anywhere, and ends as soon as it is there.
 *
 * What kvkeep promises within a time ("free within a second of its end") is asked for as promised
 * only where KVKEEP_TEST_CALM is set, as the long scripts do on a machine of their own. Elsewhere
 * it must come too, and how long it took is printed.
 */
#ifndef KVK_TESTS_PATIENCE_H
#define KVK_TESTS_PATIENCE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATIENCE_MS 120000 /* for what must come */
#define PROMISE_FACTOR 60  /* a busy machine's */

static inline uint64_t promised_ms(uint64_t ms)
{
    return getenv("KVKEEP_TEST_CALM") != NULL ? ms : ms * PROMISE_FACTOR;
}

/* Does somebody listen at the path of a unix socket? A file there only says that it is bound. */
static inline bool unix_listens(const char *path)
{
    char line[512];
    bool listens = false;
    FILE *file = fopen("/proc/net/unix", "r");
    while (file != NULL && !listens && fgets(line, sizeof(line), file) != NULL) {
        unsigned flags = 0;
        char *at = strstr(line, path);
        listens = at != NULL && strcspn(at, "\n") == strlen(path) &&
                  sscanf(line, "%*s %*s %*s %x", &flags) == 1 && (flags & 0x10000U) != 0;
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return listens;
}

#endif
