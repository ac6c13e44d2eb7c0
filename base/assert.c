#include "base/assert.h"

#include <execinfo.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define FRAME_COUNT_MAX 48

_Noreturn void kvk_assert_failed(const char *condition, const char *file, int line)
{
    /* No heap and no stdio buffers: whatever broke may have broken those too. */
    char text[512];
    int size = snprintf(text, sizeof(text), "assertion failed: condition=\"%s\" at=%s:%d pid=%d\n",
                        condition, file, line, (int)getpid());
    if (size > 0) {
        size_t count = (size_t)size < sizeof(text) ? (size_t)size : sizeof(text) - 1;
        ssize_t written = write(STDERR_FILENO, text, count);
        (void)written; /* there is nobody left to tell */
    }
    void *frames[FRAME_COUNT_MAX];
    int frame_count = backtrace(frames, FRAME_COUNT_MAX);
    backtrace_symbols_fd(frames, frame_count, STDERR_FILENO);
    abort();
}
