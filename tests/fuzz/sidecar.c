/*
 * Any damage to the records of kept memory: a daemon leaves, whoever keeps its files has a sidecar
 * changed as the input says, and the next daemon starts on that. It must start, serve no byte that
 * is not its block's, and its laws must hold.
 *
 * An input is a list of changes: where, which, at what offset, how many bytes, the bytes. Checksums
 * can be asked to be made anew, so that what lies behind them is reached too; but words that were
 * never written together with their place are not made anew, since nothing but the daemon does so.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/durable.h"
#include "daemon/sidecar_internal.h"
#include "hosttier/keeper_internal.h"
#include "tests/engine_bare.h"
#include "tests/folder.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BLOCK_TOKENS 4
#define BLOCK_BYTES 1024
#define CHAINS 5
#define CHAIN_BLOCKS 4
#define CHAIN_TOKENS (CHAIN_BLOCKS * BLOCK_TOKENS)
#define FILES_MAX 16
#define CHANGES_MAX 64
#define EXTENT_BYTES 4096

/* ---- Whoever keeps the files: a table in this process ---- */

struct file {
    char name[KVK_KEEPER_NAME_SIZE];
    int fd;
};

static struct {
    struct kvk_keeper keeper;
    struct file files[FILES_MAX];
    uint32_t count;
} held;

static enum kvk_status held_take(struct kvk_keeper *keeper,
                                 void (*visit)(void *context, const char *name, int fd),
                                 void *context, struct kvk_error *error)
{
    (void)keeper;
    (void)error;
    for (uint32_t i = 0; i < held.count; i++) {
        int fd = fcntl(held.files[i].fd, F_DUPFD_CLOEXEC, 0);
        KVK_ASSERT(fd >= 0);
        visit(context, held.files[i].name, fd);
    }
    return KVK_OK;
}

static enum kvk_status held_put(struct kvk_keeper *keeper, const char *name, int fd,
                                struct kvk_error *error)
{
    (void)keeper;
    (void)error;
    KVK_ASSERT(held.count < FILES_MAX);
    struct file *file = &held.files[held.count++];
    (void)snprintf(file->name, sizeof(file->name), "%s", name);
    file->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    KVK_ASSERT(file->fd >= 0);
    return KVK_OK;
}

static enum kvk_status held_drop(struct kvk_keeper *keeper, const char *name,
                                 struct kvk_error *error)
{
    (void)keeper;
    for (uint32_t i = 0; i < held.count; i++) {
        if (strcmp(held.files[i].name, name) == 0) {
            (void)close(held.files[i].fd);
            held.files[i] = held.files[--held.count];
            return KVK_OK;
        }
    }
    return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "name", "no such file");
}

static void held_disconnect(struct kvk_keeper *keeper)
{
    (void)keeper;
}

static const struct kvk_keeper_ops held_ops = {.name = "table",
                                               .take = held_take,
                                               .put = held_put,
                                               .drop = held_drop,
                                               .disconnect = held_disconnect};

static void held_empty(void)
{
    while (held.count > 0) {
        (void)close(held.files[--held.count].fd);
    }
}

/* ---- What the first daemon left, kept to begin every input from ---- */

struct extent {
    off_t at;
    uint8_t bytes[EXTENT_BYTES];
};

struct picture {
    char name[KVK_KEEPER_NAME_SIZE];
    off_t size;
    int seals;
    struct extent *extents; /* [count] */
    uint32_t count;
};

static struct picture pictures[FILES_MAX];
static uint32_t picture_count;

static void picture_take(const struct file *file, struct picture *picture)
{
    struct stat info;
    int result = fstat(file->fd, &info);
    KVK_ASSERT(result == 0);
    memcpy(picture->name, file->name, sizeof(picture->name));
    picture->size = info.st_size;
    picture->seals = fcntl(file->fd, F_GET_SEALS);
    off_t at = 0;
    while ((at = lseek(file->fd, at, SEEK_DATA)) >= 0) {
        picture->extents =
            realloc(picture->extents, (picture->count + 1) * sizeof(*picture->extents));
        KVK_ASSERT(picture->extents != NULL);
        struct extent *extent = &picture->extents[picture->count++];
        extent->at = at;
        memset(extent->bytes, 0, sizeof(extent->bytes));
        ssize_t got = pread(file->fd, extent->bytes, sizeof(extent->bytes), at);
        KVK_ASSERT(got > 0);
        at += EXTENT_BYTES;
    }
}

static void picture_hang(const struct picture *picture)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    KVK_ASSERT(fd >= 0);
    int result = ftruncate(fd, picture->size);
    KVK_ASSERT(result == 0);
    for (uint32_t i = 0; i < picture->count; i++) {
        const struct extent *extent = &picture->extents[i];
        ssize_t put = pwrite(fd, extent->bytes, sizeof(extent->bytes), extent->at);
        KVK_ASSERT(put == (ssize_t)sizeof(extent->bytes));
    }
    result = fcntl(fd, F_ADD_SEALS, picture->seals);
    KVK_ASSERT(result == 0);
    struct file *file = &held.files[held.count++];
    memcpy(file->name, picture->name, sizeof(file->name));
    file->fd = fd;
}

/* ---- A daemon's engine ---- */

static struct {
    char folder[64];
    struct kvk_config config;
    struct kvk_durable durable;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    uint64_t space_id;
    uint64_t session_id;
} house;

static void configure(void)
{
    kvk_config_init(&house.config);
    (void)snprintf(house.config.durable_folder, sizeof(house.config.durable_folder), "%s/data",
                   house.folder);
    house.config.keeper = KVK_CONFIG_KEEPER_NO; /* the table is in its place */
    house.config.catalogue_bytes = UINT64_C(16) << 20;
    house.config.device_bytes = (uint64_t)8 * BLOCK_BYTES;
    house.config.host_bytes = (uint64_t)32 * BLOCK_BYTES;
    house.config.blocks = 256;
    house.config.sequences = 16;
    house.config.sessions = 4;
    house.config.instances = 4;
    house.config.policy = KVK_EVICT_LRU;
    house.config.device_free_percent = 0;
    house.config.huge_pages = false;
}

static void house_begin(void)
{
    struct kvk_error error;
    const struct kvk_geometry geometry = bare_geometry(2, 2, 8, BLOCK_TOKENS);
    configure();
    enum kvk_status status = kvk_durable_open(&house.config, &house.durable, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_tenants_options tenants = {.config = &house.config,
                                                .catalogue = house.durable.catalogue};
    status = kvk_tenants_open(&tenants, &house.tenants, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_cache_options options = {.config = &house.config,
                                              .tenants = house.tenants,
                                              .device = bare_device(),
                                              .host_device = bare_device(),
                                              .catalogue = house.durable.catalogue,
                                              .keeper = &held.keeper};
    status = kvk_cache_create(&options, &house.cache, &error);
    KVK_ASSERT(status == KVK_OK);
    status = kvk_durable_start(house.cache, &error);
    KVK_ASSERT(status == KVK_OK);
    kvk_cache_check(house.cache);
    house.caller = bare_user(house.tenants);
    house.space_id = bare_space(house.cache, &house.caller, "m", &geometry).space_id;
    house.session_id = bare_session(house.cache, &house.caller);
}

static void house_end(void)
{
    kvk_session_end(house.cache, house.session_id);
    kvk_cache_check(house.cache);
    kvk_durable_stop(house.cache);
    kvk_cache_destroy(house.cache);
    kvk_tenants_destroy(house.tenants);
    kvk_durable_close(&house.durable);
    kvk_config_finish(&house.config);
}

/* ---- Chains whose tokens say what their bytes must be ---- */

static void bytes_of(uint32_t first_token, uint8_t bytes[BLOCK_BYTES])
{
    struct kvk_random random;
    kvk_random_init(&random, first_token);
    kvk_random_fill(&random, bytes, BLOCK_BYTES);
}

static void write_block(uint64_t sequence_id, uint64_t block, uint32_t first_token)
{
    uint8_t bytes[BLOCK_BYTES];
    struct kvk_error error;
    const struct kvk_write_piece piece = {
        .block = block, .data = bytes, .size_bytes = sizeof(bytes)};
    bytes_of(first_token, bytes);
    enum kvk_status status = kvk_sequence_write(house.cache, &house.caller, house.session_id,
                                                sequence_id, &piece, &error);
    KVK_ASSERT(status == KVK_OK);
}

static void check_block(const struct kvk_sequence *sequence, uint64_t i, uint32_t first_token)
{
    uint8_t bytes[BLOCK_BYTES];
    const struct kvk_block *block =
        kvk_index_block(house.cache->index, sequence->groups[0].blocks[i]);
    const uint8_t *found = kvk_block_address(house.cache, block, kvk_block_tier(block), 0);
    bytes_of(first_token, bytes);
    KVK_ASSERT(memcmp(found, bytes, sizeof(bytes)) == 0);
}

/* Open a chain, check what is hit; with `fill`, write and seal the rest. */
static uint64_t chain_open(uint32_t first, bool fill)
{
    uint32_t tokens[CHAIN_TOKENS];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    struct kvk_error error;
    for (uint32_t i = 0; i < CHAIN_TOKENS; i++) {
        tokens[i] = first + i;
    }
    const struct kvk_open_request request = {
        .session_id = house.session_id,
        .space_id = house.space_id,
        .prompt = {.tokens = tokens, .token_count = CHAIN_TOKENS},
        .tier = -1};
    enum kvk_status status =
        kvk_sequence_open(house.cache, &house.caller, &request, &reply, &tables, &error);
    kvk_tables_finish(&tables);
    if (status == KVK_EXHAUSTED && !fill) {
        return 0; /* what the records say may still be written stays out of use */
    }
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_sequence *sequence =
        kvk_table_get(&house.cache->sequence_table, reply.sequence_id);
    for (uint64_t i = 0; i < reply.cached_tokens / BLOCK_TOKENS; i++) {
        check_block(sequence, i, tokens[i * BLOCK_TOKENS]);
    }
    for (uint64_t i = reply.cached_tokens / BLOCK_TOKENS; fill && i < CHAIN_BLOCKS; i++) {
        write_block(reply.sequence_id, i, tokens[i * BLOCK_TOKENS]);
    }
    if (fill) {
        const struct kvk_seal_request seal = {.session_id = house.session_id,
                                              .sequence_id = reply.sequence_id,
                                              .expected_length = CHAIN_TOKENS,
                                              .length = CHAIN_TOKENS};
        struct kvk_seal_reply sealed;
        status = kvk_sequence_seal(house.cache, &house.caller, &seal, &sealed, &error);
        KVK_ASSERT(status == KVK_OK);
    }
    struct kvk_close_reply closing;
    status = kvk_sequence_close(house.cache, &house.caller, house.session_id, &reply.sequence_id, 1,
                                &closing, &error);
    KVK_ASSERT(status == KVK_OK);
    return reply.cached_tokens;
}

static void house_remove(void)
{
    folder_remove(house.folder);
}

static void first_daemon(void)
{
    kvk_log_set_level(KVK_LOG_ERROR);
    (void)snprintf(house.folder, sizeof(house.folder), "%s/kvk-fuzz-XXXXXX",
                   access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    char *made = mkdtemp(house.folder);
    KVK_ASSERT(made != NULL);
    (void)atexit(house_remove);
    kvk_lock_init(&held.keeper.lock);
    kvk_condition_init(&held.keeper.free);
    held.keeper.ops = &held_ops;
    held.keeper.socket = -1;
    house_begin();
    for (uint32_t i = 0; i < CHAINS; i++) {
        (void)chain_open(1000 * (i + 1), true);
    }
    house_end();
    for (uint32_t i = 0; i < held.count; i++) {
        picture_take(&held.files[i], &pictures[picture_count++]);
    }
    held_empty();
}

/* ---- Changes ---- */

enum {
    IN_HEADER,
    IN_PROCESSES,
    IN_DEVICE_WORDS,
    IN_HOST_WORDS,
    IN_ENTRIES,
    SUM_HEADER,
    SUM_ENTRY,
    MOVE_WORD,
};

static struct kvk_sidecar mapped; /* the sidecar that is changed */

static void sidecar_map(void)
{
    for (uint32_t i = 0; i < held.count; i++) {
        const char *name = held.files[i].name;
        if (strcmp(name + strlen(name) - 5, "-side") != 0) {
            continue;
        }
        struct stat info;
        int result = fstat(held.files[i].fd, &info);
        KVK_ASSERT(result == 0);
        uint8_t *base = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED,
                             held.files[i].fd, 0);
        KVK_ASSERT(base != MAP_FAILED);
        mapped.region.address = base;
        mapped.region.size_bytes = (size_t)info.st_size;
        mapped.header = (struct kvk_sidecar_header *)(void *)base;
        uint64_t processes = mapped.header->process_capacity * sizeof(struct kvk_sidecar_process);
        uint64_t words = KVK_SIDECAR_PAGE +
                         (processes + KVK_SIDECAR_PAGE - 1) / KVK_SIDECAR_PAGE * KVK_SIDECAR_PAGE;
        for (int t = 0; t < KVK_MEMORY_TIER_COUNT; t++) {
            mapped.words[t] =
                (uint64_t *)(void *)(base + words) + (size_t)t * KVK_SIDECAR_SLOTS_MAX;
        }
        mapped.entries =
            (uint8_t *)(mapped.words[KVK_MEMORY_TIER_COUNT - 1] + KVK_SIDECAR_SLOTS_MAX);
        return;
    }
    KVK_UNREACHABLE();
}

/* Of the header as it was, whatever stands there now. */
static struct kvk_sidecar_header shape;

static void entry_sum(uint8_t which)
{
    struct kvk_sidecar_header now = *mapped.header;
    uint32_t number = which % (shape.entry_high + 1);
    *mapped.header = shape;
    struct kvk_sidecar_entry *entry = kvk_sidecar_entry_at(&mapped, number);
    if ((uint32_t)entry->salt_size + entry->extra_size <= shape.inline_size) {
        entry->checksum = kvk_sidecar_sum(&mapped, number);
    }
    *mapped.header = now;
}

static uint8_t *place_of(uint8_t where, uint8_t which, uint8_t offset, size_t *room)
{
    uint8_t *base = mapped.region.address;
    switch (where) {
    case IN_HEADER:
        *room = sizeof(struct kvk_sidecar_header) - offset % sizeof(struct kvk_sidecar_header);
        return base + offset % sizeof(struct kvk_sidecar_header);
    case IN_PROCESSES:
        *room = 64;
        return base + KVK_SIDECAR_PAGE + offset % 64;
    case IN_DEVICE_WORDS:
    case IN_HOST_WORDS:
        *room = sizeof(uint64_t);
        return (uint8_t *)&mapped.words[where - IN_DEVICE_WORDS][which % 40];
    case IN_ENTRIES:
        *room = 64;
        return mapped.entries + (size_t)(which % (shape.entry_high + 1)) * shape.entry_size +
               offset % shape.entry_size;
    default:
        return NULL;
    }
}

/* Answers how many bytes it used. */
static size_t change(const uint8_t *data, size_t size)
{
    if (size < 4) {
        return size;
    }
    uint8_t where = data[0] % 8;
    size_t length = data[3] % 32;
    size_t room = 0;
    length = length < size - 4 ? length : size - 4;
    uint8_t *at = place_of(where, data[1], data[2], &room);
    if (at != NULL) {
        memcpy(at, data + 4, length < room ? length : room);
        return 4 + length;
    }
    if (where == SUM_HEADER) {
        mapped.header->checksum =
            kvk_checksum(mapped.header, offsetof(struct kvk_sidecar_header, checksum));
    } else if (where == SUM_ENTRY) {
        entry_sum(data[1]);
    } else {
        uint64_t *words = mapped.words[data[3] % KVK_MEMORY_TIER_COUNT];
        words[data[1] % 40] = words[data[2] % 40];
    }
    return 4;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (picture_count == 0) {
        first_daemon();
    }
    for (uint32_t i = 0; i < picture_count; i++) {
        picture_hang(&pictures[i]);
    }
    sidecar_map();
    shape = *mapped.header;
    bool untouched = size == 0;
    for (int i = 0; i < CHANGES_MAX && size > 0; i++) {
        size_t used = change(data, size);
        data += used;
        size -= used;
    }
    (void)munmap(mapped.region.address, mapped.region.size_bytes);
    house_begin();
    uint64_t hit = 0;
    for (uint32_t i = 0; i < CHAINS; i++) {
        hit += chain_open(1000 * (i + 1), false);
    }
    KVK_ASSERT(!untouched || hit == (uint64_t)CHAINS * CHAIN_TOKENS);
    house_end();
    held_empty();
    return 0;
}
