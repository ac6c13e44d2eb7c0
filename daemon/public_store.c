/*
 * Files of public prefixes: see public_store.h.
 *
 *     header | tokens | spans | places of all groups | checksums | checksum of all this | bytes
 *
 * Little-endian. The bytes of blocks are those of their slots: group by group, block by block,
 * shard by shard.
 */
#include "daemon/public_store.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/copy.h"
#include "base/log.h"

#define MAGIC UINT64_C(0x3130627570766b6b) /* "kkvpub01" */
#define FOLDER "public"
#define WHOLE_MAX (UINT64_C(1) << 32) /* of what comes before the bytes */
#define TEMPORARY "new-"

struct stored_header {
    uint8_t magic[8];
    uint8_t id[8];
    uint8_t tenant_id[8];
    uint8_t source_id[8];
    uint8_t generation[8];
    uint8_t published_s[8];
    uint8_t block_count[4];
    uint8_t block_tokens[4];
    uint8_t span_count[4];
    uint8_t group_count[4];
    uint8_t sum_count[8];
    uint8_t counts[KVK_GROUP_COUNT_MAX][4];
};
_Static_assert(sizeof(struct stored_header) == 104, "stored");

struct stored_span {
    uint8_t first[8];
    uint8_t count[8];
    uint8_t digest_size[4];
    uint8_t digest[KVK_DIGEST_SIZE_MAX];
};
_Static_assert(sizeof(struct stored_span) == 84, "stored");

/* ---- Names ---- */

static bool folder_path(const struct kvk_cache *cache, char *path, size_t size)
{
    const char *folder = cache->config->durable_folder;
    int length = snprintf(path, size, "%s/" FOLDER, folder);
    return folder[0] != '\0' && length > 0 && (size_t)length < size;
}

/* The folder, made where it is missing; -1: there is none. */
static int folder_open(const struct kvk_cache *cache)
{
    char path[KVK_FOLDER_SIZE + 16];
    if (!folder_path(cache, path, sizeof(path)) || (mkdir(path, 0700) != 0 && errno != EEXIST)) {
        return -1;
    }
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

static void file_name(uint64_t id, char name[32])
{
    (void)snprintf(name, 32, "%016" PRIx64, id);
}

static void failed(const char *event, uint64_t id)
{
    int reason = errno;
    kvk_log(KVK_LOG_ERROR, event, "public=%llu reason=\"%s\"", (unsigned long long)id,
            strerror(reason));
}

/* ---- Writing ---- */

static bool write_all(int fd, const void *bytes, uint64_t size)
{
    const uint8_t *from = bytes;
    while (size > 0) {
        ssize_t written = write(fd, from, size > (1U << 30) ? 1U << 30 : size);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return false;
        }
        from += written;
        size -= (uint64_t)written;
    }
    return true;
}

static uint64_t blocks_of(const struct kvk_public_record *record)
{
    uint64_t blocks = 0;
    for (uint32_t g = 0; g < record->group_count; g++) {
        blocks += record->counts[g];
    }
    return blocks;
}

/* Of everything before the bytes, its own checksum apart. */
static uint64_t head_size(const struct kvk_public_record *record, uint64_t sum_count)
{
    return sizeof(struct stored_header) +
           (uint64_t)record->block_count * record->block_tokens * sizeof(uint32_t) +
           record->span_count * sizeof(struct stored_span) + blocks_of(record) * sizeof(uint32_t) +
           sum_count * sizeof(uint64_t);
}

static void header_write(const struct kvk_public_record *record, uint64_t sum_count,
                         struct stored_header *header)
{
    memset(header, 0, sizeof(*header));
    kvk_store_le64(header->magic, MAGIC);
    kvk_store_le64(header->id, record->id);
    kvk_store_le64(header->tenant_id, record->tenant_id);
    kvk_store_le64(header->source_id, record->source_id);
    kvk_store_le64(header->generation, record->generation);
    kvk_store_le64(header->published_s, record->published_s);
    kvk_store_le32(header->block_count, record->block_count);
    kvk_store_le32(header->block_tokens, record->block_tokens);
    kvk_store_le32(header->span_count, record->span_count);
    kvk_store_le32(header->group_count, record->group_count);
    kvk_store_le64(header->sum_count, sum_count);
    for (uint32_t g = 0; g < record->group_count; g++) {
        kvk_store_le32(header->counts[g], record->counts[g]);
    }
}

static uint8_t *words_write(uint8_t *at, const uint32_t *words, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        kvk_store_le32(at, words[i]);
        at += sizeof(uint32_t);
    }
    return at;
}

/* The head as bytes; where the checksums belong is left to the caller, as is its own at the end. */
static uint8_t *head_make(const struct kvk_public_record *record, uint64_t sum_count,
                          uint8_t **sums)
{
    uint8_t *head = calloc(1, head_size(record, sum_count) + sizeof(uint64_t));
    if (head == NULL) {
        return NULL;
    }
    header_write(record, sum_count, (struct stored_header *)(void *)head);
    uint8_t *at = words_write(head + sizeof(struct stored_header), record->tokens,
                              (uint64_t)record->block_count * record->block_tokens);
    for (uint32_t i = 0; i < record->span_count; i++) {
        struct stored_span *span = (struct stored_span *)(void *)at;
        kvk_store_le64(span->first, record->spans[i].first);
        kvk_store_le64(span->count, record->spans[i].count);
        kvk_store_le32(span->digest_size, record->spans[i].digest_size);
        memcpy(span->digest, record->spans[i].digest, record->spans[i].digest_size);
        at += sizeof(*span);
    }
    for (uint32_t g = 0; g < record->group_count; g++) {
        at = words_write(at, record->places[g], record->counts[g]);
    }
    *sums = at;
    return head;
}

/* Bytes of the blocks behind the head, and their checksums into it. The blocks are held and pinned,
 * so that their addresses stay. */
static bool data_write(struct kvk_cache *cache, int fd, const struct kvk_public_record *record,
                       const struct kvk_space *space, uint32_t *const *blocks, uint8_t *sums)
{
    for (uint32_t g = 0; g < record->group_count; g++) {
        const struct kvk_group *group = space->groups[g];
        for (uint32_t i = 0; i < record->counts[g]; i++) {
            for (uint32_t shard = 0; shard < group->shard_count; shard++) {
                kvk_lock(&cache->lock);
                const struct kvk_block *block = kvk_index_block(cache->index, blocks[g][i]);
                const uint8_t *bytes = kvk_block_address(cache, block, KVK_TIER_HOST, shard);
                uint64_t sum = kvk_block_checksums(cache, block, KVK_TIER_HOST)[shard];
                kvk_unlock(&cache->lock);
                kvk_store_le64(sums, sum);
                sums += sizeof(uint64_t);
                if (!write_all(fd, bytes, group->shard_bytes[shard])) {
                    return false;
                }
            }
        }
    }
    return true;
}

static bool file_write(struct kvk_cache *cache, int fd, const struct kvk_public_record *record,
                       const struct kvk_space *space, uint32_t *const *blocks)
{
    uint64_t sum_count = 0;
    uint8_t *sums = NULL;
    for (uint32_t g = 0; g < record->group_count; g++) {
        sum_count += (uint64_t)record->counts[g] * space->groups[g]->shard_count;
    }
    uint64_t size = head_size(record, sum_count);
    uint8_t *head = head_make(record, sum_count, &sums);
    bool written = head != NULL && lseek(fd, (off_t)(size + sizeof(uint64_t)), SEEK_SET) >= 0 &&
                   data_write(cache, fd, record, space, blocks, sums);
    if (written) {
        kvk_store_le64(head + size, kvk_checksum(head, size));
        written = lseek(fd, 0, SEEK_SET) == 0 && write_all(fd, head, size + sizeof(uint64_t)) &&
                  fsync(fd) == 0;
    }
    free(head);
    return written;
}

bool kvk_public_store_unlocked(struct kvk_cache *cache, const struct kvk_public_record *record,
                               const struct kvk_space *space,
                               uint32_t *const blocks[KVK_GROUP_COUNT_MAX])
{
    char name[32];
    char temporary[40];
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->config->durable_folder[0] == '\0') {
        return false;
    }
    file_name(record->id, name);
    (void)snprintf(temporary, sizeof(temporary), TEMPORARY "%s", name);
    int folder = folder_open(cache);
    int fd = folder < 0 ? -1
                        : openat(folder, temporary,
                                 O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool stored = fd >= 0 && file_write(cache, fd, record, space, blocks) &&
                  renameat(folder, temporary, folder, name) == 0 && fsync(folder) == 0;
    if (!stored) {
        failed("public_not_stored", record->id);
        (void)(folder >= 0 && unlinkat(folder, temporary, 0) == 0);
        (void)(folder >= 0 && unlinkat(folder, name, 0) == 0);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    if (folder >= 0) {
        (void)close(folder);
    }
    return stored;
}

bool kvk_public_unstore_unlocked(const struct kvk_cache *cache, uint64_t id)
{
    char name[32];
    KVK_ASSERT(kvk_locks_held() == 0);
    file_name(id, name);
    int folder = folder_open(cache);
    bool gone =
        folder >= 0 && (unlinkat(folder, name, 0) == 0 || errno == ENOENT) && fsync(folder) == 0;
    if (!gone) {
        failed("public_not_removed", id);
    }
    if (folder >= 0) {
        (void)close(folder);
    }
    return gone;
}

/* ---- Reading ---- */

static bool read_all(int fd, uint64_t offset, void *bytes, uint64_t size)
{
    uint8_t *to = bytes;
    while (size > 0) {
        ssize_t got = pread(fd, to, size > (1U << 30) ? 1U << 30 : size, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return false;
        }
        to += got;
        offset += (uint64_t)got;
        size -= (uint64_t)got;
    }
    return true;
}

static void header_read(const struct stored_header *header, struct kvk_public_record *record,
                        uint64_t *sum_count)
{
    *record = (struct kvk_public_record){
        .id = kvk_load_le64(header->id),
        .tenant_id = kvk_load_le64(header->tenant_id),
        .source_id = kvk_load_le64(header->source_id),
        .generation = kvk_load_le64(header->generation),
        .published_s = kvk_load_le64(header->published_s),
        .block_count = kvk_load_le32(header->block_count),
        .block_tokens = kvk_load_le32(header->block_tokens),
        .span_count = kvk_load_le32(header->span_count),
        .group_count = kvk_load_le32(header->group_count),
    };
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        record->counts[g] = kvk_load_le32(header->counts[g]);
    }
    *sum_count = kvk_load_le64(header->sum_count);
}

/* Within what the configuration allows, so that nothing below overflows. */
static bool header_is_possible(const struct kvk_cache *cache,
                               const struct kvk_public_record *record, uint64_t sum_count)
{
    bool possible =
        record->id != 0 && record->block_count > 0 && record->block_tokens > 0 &&
        (uint64_t)record->block_count * record->block_tokens <= cache->config->tokens &&
        record->span_count <= cache->config->spans && record->group_count > 0 &&
        record->group_count <= KVK_GROUP_COUNT_MAX &&
        sum_count <= (uint64_t)record->block_count * KVK_GROUP_COUNT_MAX * KVK_SHARD_COUNT_MAX;
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        possible = possible && record->counts[g] <= record->block_count &&
                   (g < record->group_count || record->counts[g] == 0);
    }
    return possible;
}

static bool spans_read(const uint8_t *stored, struct kvk_content_span *spans, uint32_t count,
                       uint64_t tokens)
{
    uint64_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct stored_span *from = (const struct stored_span *)(const void *)stored + i;
        struct kvk_content_span *span = &spans[i];
        span->first = kvk_load_le64(from->first);
        span->count = kvk_load_le64(from->count);
        span->digest_size = kvk_load_le32(from->digest_size);
        if (span->first < next || span->first >= tokens || span->count == 0 ||
            span->count > tokens - span->first || span->digest_size == 0 ||
            span->digest_size > KVK_DIGEST_SIZE_MAX) {
            return false;
        }
        memcpy(span->digest, from->digest, span->digest_size);
        next = span->first + span->count;
    }
    return true;
}

/* The arrays as the machine has them, in one piece: sums, spans, tokens, places. */
static bool arrays_read(struct kvk_public_file *file, const uint8_t *head, uint64_t sum_count)
{
    struct kvk_public_record *record = &file->record;
    uint64_t tokens = (uint64_t)record->block_count * record->block_tokens;
    uint64_t words = tokens + blocks_of(record);
    file->memory = calloc(1, sum_count * sizeof(uint64_t) +
                                 record->span_count * sizeof(struct kvk_content_span) +
                                 words * sizeof(uint32_t));
    if (file->memory == NULL) {
        return false;
    }
    uint64_t *sums = (uint64_t *)(void *)file->memory;
    struct kvk_content_span *spans = (struct kvk_content_span *)(void *)(sums + sum_count);
    uint32_t *all = (uint32_t *)(void *)(spans + record->span_count);
    const uint8_t *at = head + sizeof(struct stored_header);
    for (uint64_t i = 0; i < tokens; i++, at += sizeof(uint32_t)) {
        all[i] = kvk_load_le32(at);
    }
    if (!spans_read(at, spans, record->span_count, tokens)) {
        return false;
    }
    at += record->span_count * sizeof(struct stored_span);
    record->tokens = all;
    record->spans = spans;
    uint32_t *places = all + tokens;
    for (uint32_t g = 0; g < record->group_count; g++) {
        record->places[g] = places;
        for (uint32_t i = 0; i < record->counts[g]; i++, at += sizeof(uint32_t)) {
            places[i] = kvk_load_le32(at);
            if (places[i] >= record->block_count || (i > 0 && places[i] <= places[i - 1])) {
                return false;
            }
        }
        places += record->counts[g];
    }
    for (uint64_t i = 0; i < sum_count; i++, at += sizeof(uint64_t)) {
        sums[i] = kvk_load_le64(at);
    }
    file->sums = sums;
    return true;
}

static bool head_read(const struct kvk_cache *cache, struct kvk_public_file *file)
{
    struct stored_header header;
    struct stat status;
    uint64_t sum_count = 0;
    if (fstat(file->fd, &status) != 0 || !S_ISREG(status.st_mode) ||
        !read_all(file->fd, 0, &header, sizeof(header)) || kvk_load_le64(header.magic) != MAGIC) {
        return false;
    }
    header_read(&header, &file->record, &sum_count);
    if (!header_is_possible(cache, &file->record, sum_count)) {
        return false;
    }
    uint64_t size = head_size(&file->record, sum_count);
    if (size > WHOLE_MAX || size + sizeof(uint64_t) > (uint64_t)status.st_size) {
        return false;
    }
    uint8_t *head = malloc(size + sizeof(uint64_t));
    bool whole = head != NULL && read_all(file->fd, 0, head, size + sizeof(uint64_t)) &&
                 kvk_load_le64(head + size) == kvk_checksum(head, size) &&
                 arrays_read(file, head, sum_count);
    free(head);
    file->data_offset = size + sizeof(uint64_t);
    return whole;
}

bool kvk_public_file_open(const struct kvk_cache *cache, const char *name,
                          struct kvk_public_file *file)
{
    char right[32];
    *file = (struct kvk_public_file){.fd = -1};
    int folder = folder_open(cache);
    if (folder >= 0) {
        file->fd = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        (void)close(folder);
    }
    bool whole = file->fd >= 0 && head_read(cache, file);
    if (whole) {
        file_name(file->record.id, right);
        whole = strcmp(name, right) == 0;
    }
    if (!whole) {
        kvk_public_file_close(file);
    }
    return whole;
}

void kvk_public_file_close(struct kvk_public_file *file)
{
    if (file->fd >= 0) {
        (void)close(file->fd);
    }
    free(file->memory);
    *file = (struct kvk_public_file){.fd = -1};
}

bool kvk_public_file_read(const struct kvk_public_file *file, uint64_t offset, void *bytes,
                          uint64_t size, uint64_t sum)
{
    return read_all(file->fd, file->data_offset + offset, bytes, size) &&
           kvk_checksum(bytes, size) == sum;
}

/* ---- The start ---- */

/* False: the file is of no use, now or later. */
static bool restore_one(struct kvk_cache *cache, const char *name)
{
    struct kvk_public_file file;
    struct kvk_error error;
    if (!kvk_public_file_open(cache, name, &file)) {
        kvk_log(KVK_LOG_WARNING, "public_file_refused", "file=%s reason=\"damaged\"", name);
        return false;
    }
    enum kvk_status status = kvk_public_put_back(cache, &file, &error);
    if (status != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "public_file_refused", "public=%llu reason=\"%s\"",
                (unsigned long long)file.record.id, error.text);
    }
    kvk_public_file_close(&file);
    /* What only the configuration is in the way of may come back at another start. */
    return status != KVK_NOT_FOUND && status != KVK_DATA_LOSS;
}

void kvk_public_restore(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    int folder = cache->config->durable_folder[0] != '\0' ? folder_open(cache) : -1;
    DIR *entries = folder < 0 ? NULL : fdopendir(folder);
    const struct dirent *entry;
    while (entries != NULL && (entry = readdir(entries)) != NULL) {
        bool file = entry->d_name[0] != '.';
        bool unfinished = strncmp(entry->d_name, TEMPORARY, strlen(TEMPORARY)) == 0;
        if (file && (unfinished || !restore_one(cache, entry->d_name))) {
            (void)unlinkat(dirfd(entries), entry->d_name, 0);
        }
    }
    if (entries != NULL) {
        (void)closedir(entries);
    } else if (folder >= 0) {
        (void)close(folder);
    }
}
