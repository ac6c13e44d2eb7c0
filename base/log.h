/*
 * Log lines for people and for grep: the event first, then key=value.
 *
 *     lease_expired level=info time=2026-01-31T12:00:00.123Z up=17.250 lease=42 age_ms=30000
 *
 * One line is one write to standard error, so that lines of several threads and processes do not
 * mix. A line never holds tokens or a tenant's data. Whatever a value holds, a line stays one
 * line: control characters come out as '?', and what is too long is cut.
 *
 * Locking: none needed; any thread may log. Not to be called where a write may not block.
 */
#ifndef KVK_BASE_LOG_H
#define KVK_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define KVK_LOG_LINE_SIZE 1024 /* the longest line, its end included */

enum kvk_log_level {
    KVK_LOG_DEBUG = 0,
    KVK_LOG_INFO = 1,
    KVK_LOG_WARNING = 2,
    KVK_LOG_ERROR = 3,
};

/* What is below the level is not written. INFO at the start. Any thread, any time. */
void kvk_log_set_level(enum kvk_log_level level);
bool kvk_log_enabled(enum kvk_log_level level);
const char *kvk_log_level_name(enum kvk_log_level level); /* "info" */
KVK_CHECKED bool kvk_log_level_from_name(const char *name, enum kvk_log_level *level);

/* Where lines go: a descriptor, which stays the caller's. Standard error at the start. */
void kvk_log_set_descriptor(int descriptor);

/*
 * Write one line. `event` is a word such as "lease_expired"; `pairs` formats "key=value key=value"
 * and may be "". Text from outside goes through kvk_log_text() first.
 */
void kvk_log(enum kvk_log_level level, const char *event, const char *pairs, ...) KVK_PRINTF(3, 4);

/* `text` as a value: in quotes, with '"', '\\' and control characters escaped, cut to fit with
 * "..." before the last quote. Returns `target`; target_size is at least 8. */
const char *kvk_log_text(char *target, size_t target_size, const char *text);

#endif
