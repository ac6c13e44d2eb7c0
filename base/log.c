#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

static _Atomic int minimum_level = KVK_LOG_INFO;
static _Atomic int output = STDERR_FILENO;

void kvk_log_set_level(enum kvk_log_level level)
{
    atomic_store_explicit(&minimum_level, (int)level, memory_order_relaxed);
}

bool kvk_log_enabled(enum kvk_log_level level)
{
    return (int)level >= atomic_load_explicit(&minimum_level, memory_order_relaxed);
}

const char *kvk_log_level_name(enum kvk_log_level level)
{
    switch (level) {
    case KVK_LOG_DEBUG:
        return "debug";
    case KVK_LOG_INFO:
        return "info";
    case KVK_LOG_WARNING:
        return "warning";
    case KVK_LOG_ERROR:
        return "error";
    }
    return "unknown";
}

bool kvk_log_level_from_name(const char *name, enum kvk_log_level *level)
{
    for (int i = KVK_LOG_DEBUG; i <= KVK_LOG_ERROR; i++) {
        if (strcmp(name, kvk_log_level_name((enum kvk_log_level)i)) == 0) {
            *level = (enum kvk_log_level)i;
            return true;
        }
    }
    return false;
}

void kvk_log_set_descriptor(int descriptor)
{
    atomic_store_explicit(&output, descriptor, memory_order_relaxed);
}

/* The part that every line has. The wall clock is for people, the other one for intervals. */
static size_t format_head(char *line, size_t size, enum kvk_log_level level, const char *event)
{
    struct timespec wall = {0};
    (void)clock_gettime(CLOCK_REALTIME, &wall); /* a line without the right time is still a line */
    struct tm calendar = {0};
    (void)gmtime_r(&wall.tv_sec, &calendar);
    char date[32] = "";
    (void)strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &calendar);
    uint64_t up_ms = kvk_clock_now(kvk_clock_monotonic()) / KVK_NS_PER_MS;
    int length = snprintf(line, size, "%s level=%s time=%s.%03ldZ up=%llu.%03u", event,
                          kvk_log_level_name(level), date, wall.tv_nsec / 1000000,
                          (unsigned long long)(up_ms / 1000), (unsigned)(up_ms % 1000));
    KVK_ASSERT(length > 0);
    return (size_t)length < size ? (size_t)length : size - 1;
}

static void write_line(const char *line, size_t size)
{
    ssize_t written = 0;
    do {
        written = write(atomic_load_explicit(&output, memory_order_relaxed), line, size);
    } while (written < 0 && errno == EINTR);
    /* A log that cannot be written has nowhere to say so; the daemon goes on. */
}

void kvk_log(enum kvk_log_level level, const char *event, const char *pairs, ...)
{
    if (!kvk_log_enabled(level)) {
        return;
    }
    int errno_before = errno; /* a caller may log first and look at errno after */
    char line[KVK_LOG_LINE_SIZE];
    size_t room = sizeof(line) - 1; /* the line's end takes the last byte */
    size_t length = format_head(line, room, level, event);
    if (pairs[0] != '\0' && length + 2 < room) {
        line[length++] = ' ';
        va_list arguments;
        va_start(arguments, pairs);
        int more = vsnprintf(line + length, room - length, pairs, arguments);
        va_end(arguments);
        if (more > 0) {
            size_t left = room - length - 1;
            length += (size_t)more < left ? (size_t)more : left;
        }
    }
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)line[i];
        if (byte < 0x20 || byte == 0x7f) {
            line[i] = '?';
        }
    }
    line[length++] = '\n';
    write_line(line, length);
    errno = errno_before;
}

const char *kvk_log_text(char *target, size_t target_size, const char *text)
{
    static const char ending[] = "...\"";
    KVK_ASSERT(target_size >= 8);
    size_t length = 0;
    target[length++] = '"';
    for (const char *at = text; *at != '\0'; at++) {
        unsigned char byte = (unsigned char)*at;
        char escaped[8];
        int size = 0;
        if (byte == '"' || byte == '\\') {
            size = snprintf(escaped, sizeof(escaped), "\\%c", *at);
        } else if (byte < 0x20 || byte == 0x7f) {
            size = snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
        } else {
            size = snprintf(escaped, sizeof(escaped), "%c", *at);
        }
        KVK_ASSERT(size > 0);
        if (length + (size_t)size + sizeof(ending) > target_size) {
            memcpy(target + length, ending, sizeof(ending));
            return target;
        }
        memcpy(target + length, escaped, (size_t)size);
        length += (size_t)size;
    }
    target[length++] = '"';
    target[length] = '\0';
    return target;
}
