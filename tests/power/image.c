#include "tests/power/image.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"

#define FILES_MAX 4096
#define FOLDERS_MAX 64

/* ---- The record ---- */

static const void *payload_of(const struct record *record)
{
    return record + 1;
}

void image_log_open(struct image_log *log, const char *path)
{
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    KVK_ASSERT(fd >= 0 && fstat(fd, &about) == 0 && about.st_size > 0);
    log->size = (size_t)about.st_size;
    log->bytes = mmap(NULL, log->size, PROT_READ, MAP_PRIVATE, fd, 0);
    KVK_ASSERT(log->bytes != MAP_FAILED);
    (void)close(fd);

    size_t capacity = log->size / sizeof(struct record) + 1;
    log->records = calloc(capacity, sizeof(*log->records));
    log->ends = calloc(capacity, sizeof(*log->ends));
    KVK_ASSERT(log->records != NULL && log->ends != NULL);
    log->record_count = 0;
    for (size_t at = 0; log->size - at >= sizeof(struct record);) {
        /* Payloads have any length, so records lie anyhow: they are copied to be read. */
        struct record *record = malloc(sizeof(*record));
        KVK_ASSERT(record != NULL);
        memcpy(record, log->bytes + at, sizeof(*record));
        KVK_ASSERT(record->magic == RECORD_MAGIC);
        size_t payload = (size_t)record->payload_bytes;
        if (payload > log->size - at - sizeof(*record)) {
            free(record); /* the daemon was killed while it wrote this one down */
            break;
        }
        record = realloc(record, sizeof(*record) + payload + 1);
        KVK_ASSERT(record != NULL);
        uint8_t *copy = (uint8_t *)(record + 1);
        memcpy(copy, log->bytes + at + sizeof(*record), payload);
        copy[payload] = '\0';
        at += sizeof(*record) + payload;
        log->records[log->record_count] = record;
        log->ends[log->record_count] = at;
        log->record_count++;
    }
}

void image_log_close(struct image_log *log)
{
    for (size_t i = 0; i < log->record_count; i++) {
        free((void *)(uintptr_t)log->records[i]);
    }
    free(log->records);
    free(log->ends);
    (void)munmap((void *)(uintptr_t)log->bytes, log->size);
}

/* ---- What is durable ---- */

struct folder_state {
    char name[RECORD_NAME_SIZE];
    size_t synced; /* changes of names before this record are durable */
};

struct plan {
    const struct image_log *log;
    size_t count;     /* records that happened */
    uint8_t *ended;   /* [number] */
    size_t *ended_at; /* [number] record of the end */
    uint32_t numbers;
    size_t *synced; /* [file] what ended before this record is durable */
    struct folder_state folders[FOLDERS_MAX];
    uint32_t folder_count;
};

static struct folder_state *folder_state(struct plan *plan, const char *name)
{
    for (uint32_t i = 0; i < plan->folder_count; i++) {
        if (strcmp(plan->folders[i].name, name) == 0) {
            return &plan->folders[i];
        }
    }
    KVK_ASSERT(plan->folder_count < FOLDERS_MAX);
    struct folder_state *made = &plan->folders[plan->folder_count++];
    (void)snprintf(made->name, sizeof(made->name), "%s", name);
    made->synced = 0;
    return made;
}

static struct folder_state *folder_above(struct plan *plan, const char *name)
{
    char above[RECORD_NAME_SIZE];
    const char *slash = strrchr(name, '/');
    (void)snprintf(above, sizeof(above), "%.*s", slash == NULL ? 0 : (int)(slash - name), name);
    return folder_state(plan, above);
}

static void plan_init(struct plan *plan, const struct image_log *log, size_t count)
{
    memset(plan, 0, sizeof(*plan));
    plan->log = log;
    plan->count = count;
    for (size_t i = 0; i < count; i++) {
        uint32_t number = log->records[i]->number;
        plan->numbers = number >= plan->numbers ? number + 1 : plan->numbers;
    }
    plan->ended = calloc(plan->numbers + 1, 1);
    plan->ended_at = calloc(plan->numbers + 1, sizeof(*plan->ended_at));
    plan->synced = calloc(FILES_MAX, sizeof(*plan->synced));
    size_t *begun_at = calloc(plan->numbers + 1, sizeof(*begun_at));
    KVK_ASSERT(plan->ended != NULL && plan->ended_at != NULL && plan->synced != NULL &&
               begun_at != NULL);
    for (size_t i = 0; i < count; i++) {
        const struct record *record = log->records[i];
        switch (record->operation) {
        case RECORD_WRITE_BEGIN:
        case RECORD_SYNC_BEGIN:
        case RECORD_FOLDER_SYNC_BEGIN:
            begun_at[record->number] = i;
            break;
        case RECORD_WRITE_END:
            plan->ended[record->number] = 1;
            plan->ended_at[record->number] = i;
            break;
        case RECORD_SYNC_END:
            if (plan->synced[record->file] < begun_at[record->number]) {
                plan->synced[record->file] = begun_at[record->number];
            }
            break;
        case RECORD_FOLDER_SYNC_END: {
            const struct record *begin = log->records[begun_at[record->number]];
            struct folder_state *folder = folder_state(plan, payload_of(begin));
            folder->synced = begun_at[record->number];
            break;
        }
        default:
            break;
        }
    }
    free(begun_at);
}

static void plan_finish(struct plan *plan)
{
    free(plan->ended);
    free(plan->ended_at);
    free(plan->synced);
}

static bool is_durable(const struct plan *plan, size_t at)
{
    const struct record *record = plan->log->records[at];
    if (record->operation != RECORD_WRITE_BEGIN) {
        return at < plan->synced[record->file];
    }
    if (plan->ended[record->number] == 0) {
        return false;
    }
    return (record->flags & RECORD_FLAG_SYNCED) != 0 ||
           plan->ended_at[record->number] < plan->synced[record->file];
}

/* ---- Contents ---- */

struct content {
    uint8_t *bytes; /* [capacity]; ours */
    uint64_t size;
    uint64_t capacity;
};

static void content_reach(struct content *content, uint64_t size)
{
    if (size > content->capacity) {
        uint64_t capacity = size * 2 + 1;
        content->bytes = realloc(content->bytes, capacity);
        KVK_ASSERT(content->bytes != NULL);
        memset(content->bytes + content->capacity, 0, capacity - content->capacity);
        content->capacity = capacity;
    }
    content->size = size > content->size ? size : content->size;
}

static void content_write(struct content *content, const struct record *record, uint64_t from,
                          uint64_t to)
{
    const uint8_t *bytes = payload_of(record);
    content_reach(content, record->offset + to);
    memcpy(content->bytes + record->offset + from, bytes + from, to - from);
}

/* Some of its sectors, as they lie in the file. */
static void content_write_sectors(struct content *content, const struct record *record,
                                  struct kvk_random *random)
{
    uint64_t at = 0;
    while (at < record->size_bytes) {
        uint64_t end =
            ((record->offset + at) / IMAGE_SECTOR_BYTES + 1) * IMAGE_SECTOR_BYTES - record->offset;
        end = end < record->size_bytes ? end : record->size_bytes;
        if (kvk_random_chance(random, 0.5)) {
            content_write(content, record, at, end);
        }
        at = end;
    }
}

static void content_apply(struct content *content, const struct record *record)
{
    switch (record->operation) {
    case RECORD_WRITE_BEGIN:
        content_write(content, record, 0, record->size_bytes);
        break;
    case RECORD_ALLOCATE:
        content_reach(content, record->offset + record->size_bytes);
        break;
    case RECORD_PUNCH:
        if (record->offset < content->size) {
            uint64_t left = content->size - record->offset;
            memset(content->bytes + record->offset, 0,
                   record->size_bytes < left ? record->size_bytes : left);
        }
        break;
    case RECORD_TRUNCATE:
        content_reach(content, record->size_bytes);
        memset(content->bytes + record->size_bytes, 0, content->capacity - record->size_bytes);
        content->size = record->size_bytes;
        break;
    default:
        KVK_UNREACHABLE();
    }
}

static bool is_content(const struct record *record)
{
    return record->operation == RECORD_WRITE_BEGIN || record->operation == RECORD_ALLOCATE ||
           record->operation == RECORD_PUNCH || record->operation == RECORD_TRUNCATE;
}

/* What became of one operation that was not durable. True: something of it is there. */
static bool content_apply_open(struct content *content, const struct record *record,
                               enum image_mode mode, struct kvk_random *random)
{
    bool is_write = record->operation == RECORD_WRITE_BEGIN;
    switch (mode) {
    case IMAGE_NOTHING:
    case IMAGE_PREFIX:
        return false; /* what is before the cut was applied by the caller */
    case IMAGE_ALL:
        content_apply(content, record);
        return true;
    case IMAGE_SECTORS:
        if (is_write) {
            content_write_sectors(content, record, random);
            return true;
        }
        break;
    case IMAGE_SOME:
        break;
    }
    if (kvk_random_chance(random, 0.5)) {
        content_apply(content, record);
        return true;
    }
    return false;
}

static void contents_build(const struct plan *plan, enum image_mode mode, size_t cut,
                           struct kvk_random *random, struct content *contents,
                           struct image_facts *facts)
{
    for (size_t i = 0; i < plan->count; i++) {
        const struct record *record = plan->log->records[i];
        if (!is_content(record)) {
            continue;
        }
        KVK_ASSERT(record->file < FILES_MAX);
        struct content *content = &contents[record->file];
        bool is_write = record->operation == RECORD_WRITE_BEGIN;
        if (is_durable(plan, i)) {
            content_apply(content, record);
            facts->durable_writes += is_write ? 1 : 0;
            continue;
        }
        bool kept = false;
        if (mode == IMAGE_PREFIX && i < cut) {
            content_apply(content, record);
            kept = true;
        } else if (mode == IMAGE_PREFIX && i == cut && is_write) {
            content_write_sectors(content, record, random);
            kept = true;
        } else {
            kept = content_apply_open(content, record, mode, random);
        }
        facts->open_writes += is_write ? 1 : 0;
        facts->kept_writes += is_write && kept ? 1 : 0;
    }
}

/* ---- Names ---- */

struct names {
    char files[FILES_MAX][RECORD_NAME_SIZE]; /* [file]; "": has no name */
    char folders[FOLDERS_MAX][RECORD_NAME_SIZE];
    uint32_t folder_count;
};

static uint32_t name_find(const struct names *names, const char *name)
{
    for (uint32_t i = 1; i < FILES_MAX; i++) {
        if (strcmp(names->files[i], name) == 0) {
            return i;
        }
    }
    return 0;
}

static void names_apply(struct names *names, const struct record *record)
{
    const char *name = payload_of(record);
    switch (record->operation) {
    case RECORD_CREATE:
        (void)snprintf(names->files[record->file], RECORD_NAME_SIZE, "%s", name);
        break;
    case RECORD_MKDIR:
        KVK_ASSERT(names->folder_count < FOLDERS_MAX);
        (void)snprintf(names->folders[names->folder_count++], RECORD_NAME_SIZE, "%s", name);
        break;
    case RECORD_UNLINK:
        names->files[name_find(names, name)][0] = '\0';
        break;
    case RECORD_RENAME: {
        const char *target = name + strlen(name) + 1;
        uint32_t file = name_find(names, name);
        names->files[name_find(names, target)][0] = '\0';
        if (file != 0) {
            (void)snprintf(names->files[file], RECORD_NAME_SIZE, "%s", target);
        }
        break;
    }
    default:
        KVK_UNREACHABLE();
    }
}

static bool is_name(const struct record *record)
{
    return record->operation == RECORD_CREATE || record->operation == RECORD_MKDIR ||
           record->operation == RECORD_UNLINK || record->operation == RECORD_RENAME;
}

/* Durable ones, and of the rest those before a random one: names change in order. */
static void names_build(struct plan *plan, enum image_mode mode, size_t cut,
                        struct kvk_random *random, struct names *names)
{
    size_t until = plan->count;
    if (mode == IMAGE_NOTHING) {
        until = 0;
    } else if (mode == IMAGE_PREFIX) {
        until = cut;
    } else if (mode != IMAGE_ALL) {
        until = (size_t)kvk_random_below(random, plan->count + 1);
    }
    for (size_t i = 0; i < plan->count; i++) {
        const struct record *record = plan->log->records[i];
        if (is_name(record) && (i < until || i < folder_above(plan, payload_of(record))->synced)) {
            names_apply(names, record);
        }
    }
}

/* ---- Writing it out ---- */

static void file_write(const char *path, const struct content *content)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOENT) {
        return; /* its folder did not make it */
    }
    KVK_ASSERT(fd >= 0);
    for (uint64_t at = 0; at < content->size;) {
        ssize_t wrote = write(fd, content->bytes + at, content->size - at);
        KVK_ASSERT(wrote > 0);
        at += (uint64_t)wrote;
    }
    (void)close(fd);
}

/* Somewhere from the first operation on that was not durable. */
static size_t cut_choose(const struct plan *plan, struct kvk_random *random)
{
    size_t first = 0;
    while (first < plan->count &&
           (!is_content(plan->log->records[first]) || is_durable(plan, first))) {
        first++;
    }
    return first + (size_t)kvk_random_below(random, plan->count - first + 1);
}

void image_build(const struct image_log *log, size_t record_count, enum image_mode mode,
                 struct kvk_random *random, const char *folder, struct image_facts *facts)
{
    struct plan plan;
    struct names *names = calloc(1, sizeof(*names));
    struct content *contents = calloc(FILES_MAX, sizeof(*contents));
    KVK_ASSERT(names != NULL && contents != NULL && record_count <= log->record_count);
    *facts = (struct image_facts){0};
    plan_init(&plan, log, record_count);
    size_t cut = cut_choose(&plan, random);
    names_build(&plan, mode, cut, random, names);
    contents_build(&plan, mode, cut, random, contents, facts);

    char path[4096 + RECORD_NAME_SIZE];
    KVK_ASSERT(mkdir(folder, 0700) == 0);
    for (uint32_t i = 0; i < names->folder_count; i++) {
        (void)snprintf(path, sizeof(path), "%s/%s", folder, names->folders[i]);
        KVK_ASSERT(mkdir(path, 0700) == 0);
    }
    for (uint32_t i = 1; i < FILES_MAX; i++) {
        if (names->files[i][0] != '\0') {
            (void)snprintf(path, sizeof(path), "%s/%s", folder, names->files[i]);
            file_write(path, &contents[i]);
            facts->files++;
        }
    }
    for (uint32_t i = 0; i < FILES_MAX; i++) {
        free(contents[i].bytes);
    }
    free(contents);
    free(names);
    plan_finish(&plan);
}
