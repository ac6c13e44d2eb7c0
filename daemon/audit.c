#include "daemon/audit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/lock.h"
#include "base/log.h"

#define LINE_SIZE 4096
#define FILE_NAME "audit.log"

struct kvk_audit {
    /* Not a kvk_lock: the file is written under it, which no engine lock may be. */
    pthread_mutex_t mutex;
    int folder_fd; /* ours; -1: no file */
    int fd;        /* ours; -1: could not be opened, tried again with the next line */
    uint64_t size_bytes;
    uint64_t bytes_max;
    struct kvk_audit_stats stats;
};

/* ---- Lines ---- */

struct line {
    char text[LINE_SIZE];
    size_t size;
};

/* Never past the end: what does not fit is left out, and the line stays JSON, since room for its
 * end is kept by the sizes of what goes in. */
static void line_add(struct line *line, const char *text)
{
    size_t size = strlen(text);
    if (size < LINE_SIZE - line->size) {
        memcpy(line->text + line->size, text, size + 1);
        line->size += size;
    }
}

/* At most `limit` bytes of it, escaped. */
static void line_add_escaped(struct line *line, const char *text, size_t limit)
{
    size_t end = line->size + limit;
    for (const unsigned char *at = (const unsigned char *)text; *at != '\0'; at++) {
        char piece[8] = {(char)*at, '\0'};
        if (*at == '"' || *at == '\\') {
            (void)snprintf(piece, sizeof(piece), "\\%c", *at);
        } else if (*at < 0x20 || *at == 0x7f) {
            (void)snprintf(piece, sizeof(piece), "\\u%04x", *at);
        }
        /* A character of several bytes goes whole or not at all. */
        bool begins = (*at & 0xc0) != 0x80;
        if (line->size + (begins ? 6 : 1) > end) {
            return;
        }
        line_add(line, piece);
    }
}

static void line_add_field(struct line *line, const char *key, const char *value, size_t limit)
{
    line_add(line, ",\"");
    line_add(line, key);
    line_add(line, "\":\"");
    line_add_escaped(line, value, limit);
    line_add(line, "\"");
}

static void line_make(struct line *line, const struct kvk_audit_entry *entry)
{
    struct timespec now = {.tv_sec = 0};
    struct tm broken;
    char when[64] = "";
    (void)clock_gettime(CLOCK_REALTIME, &now);
    if (gmtime_r(&now.tv_sec, &broken) != NULL) {
        (void)strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &broken);
    }
    line->size = 0;
    line_add(line, "{\"time\":\"");
    line_add(line, when);
    char millis[32];
    (void)snprintf(millis, sizeof(millis), ".%03ldZ\"", now.tv_nsec / 1000000);
    line_add(line, millis);
    line_add_field(line, "who", entry->who, 768);
    line_add_field(line, "peer", entry->peer, 256);
    line_add_field(line, "call", entry->call, 64);
    line_add_field(line, "object", entry->object, 768);
    line_add_field(line, "details", entry->details, 1024);
    line_add_field(line, "result", kvk_status_name(entry->result), 32);
    line_add_field(line, "reason", entry->reason, 512);
    line_add(line, "}\n");
}

/* ---- The file ---- */

static bool file_open(struct kvk_audit *audit)
{
    struct stat state;
    audit->fd = openat(audit->folder_fd, FILE_NAME,
                       O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (audit->fd < 0) {
        return false;
    }
    audit->size_bytes = fstat(audit->fd, &state) == 0 ? (uint64_t)state.st_size : 0;
    return true;
}

static void file_close(struct kvk_audit *audit)
{
    if (audit->fd >= 0) {
        (void)close(audit->fd);
        audit->fd = -1;
    }
}

static bool file_rotate(struct kvk_audit *audit)
{
    file_close(audit);
    return renameat(audit->folder_fd, FILE_NAME, audit->folder_fd, FILE_NAME ".1") == 0 &&
           file_open(audit);
}

/* False: errno says why. */
static bool file_append(struct kvk_audit *audit, const struct line *line)
{
    if (audit->fd < 0 && !file_open(audit)) {
        return false;
    }
    if (audit->size_bytes + line->size > audit->bytes_max && audit->size_bytes > 0 &&
        !file_rotate(audit)) {
        return false;
    }
    ssize_t written = write(audit->fd, line->text, line->size);
    if (written < 0) {
        return false;
    }
    audit->size_bytes += (uint64_t)written;
    if ((size_t)written < line->size) {
        errno = ENOSPC;
        return false;
    }
    return fdatasync(audit->fd) == 0;
}

/* ---- Life ---- */

enum kvk_status kvk_audit_open(const char *folder, uint64_t bytes_max, struct kvk_audit **audit,
                               struct kvk_error *error)
{
    struct kvk_audit *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the audit log");
    }
    made->folder_fd = -1;
    made->fd = -1;
    made->bytes_max = bytes_max;
    (void)pthread_mutex_init(&made->mutex, NULL);
    if (folder[0] != '\0') {
        made->folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (made->folder_fd < 0 || !file_open(made)) {
            enum kvk_status status = kvk_fail(
                error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "durable.folder",
                "durable.folder: " FILE_NAME " in it cannot be opened: %s", strerror(errno));
            kvk_audit_close(made);
            return status;
        }
    }
    *audit = made;
    return KVK_OK;
}

void kvk_audit_close(struct kvk_audit *audit)
{
    if (audit == NULL) {
        return;
    }
    file_close(audit);
    if (audit->folder_fd >= 0) {
        (void)close(audit->folder_fd);
    }
    (void)pthread_mutex_destroy(&audit->mutex);
    free(audit);
}

void kvk_audit_write(struct kvk_audit *audit, const struct kvk_audit_entry *entry)
{
    struct line line;
    line_make(&line, entry);
    kvk_log(KVK_LOG_INFO, "audit", "line=%.*s", (int)(line.size > 0 ? line.size - 1 : 0),
            line.text);
    (void)pthread_mutex_lock(&audit->mutex);
    audit->stats.entries++;
    bool failed = audit->folder_fd >= 0 && !file_append(audit, &line);
    int reason = errno;
    audit->stats.failures += failed;
    (void)pthread_mutex_unlock(&audit->mutex);
    if (failed) {
        kvk_log(KVK_LOG_ERROR, "audit_not_written", "errno=%d", reason);
    }
}

void kvk_audit_stats(struct kvk_audit *audit, struct kvk_audit_stats *stats)
{
    (void)pthread_mutex_lock(&audit->mutex);
    *stats = audit->stats;
    (void)pthread_mutex_unlock(&audit->mutex);
}
