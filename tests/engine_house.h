/*
 * A whole engine for tests: configuration, tenants, CPU devices, cache, and short words for the
 * calls that every test makes. Everything fails the test where it goes wrong.
 */
#ifndef KVK_TESTS_ENGINE_HOUSE_H
#define KVK_TESTS_ENGINE_HOUSE_H

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "daemon/cache_internal.h"
#include "daemon/durable.h"
#include "tests/folder.h"
#include "tests/patience.h"

struct house {
    struct kvk_config config;
    struct kvk_durable durable; /* by config.durable_folder: "" is nothing */
    struct kvk_tenants *tenants;
    struct kvk_clock_manual manual;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    struct kvk_error error;
    char folder[32]; /* made for KVKEEP_TEST_DURABLE, or "" */
};

struct house_options {
    uint64_t device_bytes;
    uint64_t host_bytes;
    bool threads;
    bool manual_clock;
    struct kvk_disk *disk; /* borrowed, in place of that of the folder; and its bytes */
    uint64_t disk_bytes;
    struct kvk_device *device; /* of the device tier, the cache's from then on; NULL: a CPU's */
};

static inline struct kvk_device *house_device(void)
{
    const struct kvk_device_cpu_options options = {.attend_thread_count = 2};
    struct kvk_device *device = NULL;
    struct kvk_error error;

    cr_assert_eq(kvk_device_cpu_open(&options, &device, &error), KVK_OK, "%s", error.text);
    return device;
}

static inline struct kvk_caller house_caller(const struct kvk_credential *credential)
{
    return (struct kvk_caller){
        .credential = credential, .call = "Test", .may_block = true, .deadline_ns = UINT64_MAX};
}

/* house->config is set up; it may be changed before house_start(). */
static inline void house_init(struct house *house)
{
    memset(house, 0, sizeof(*house));
    kvk_log_set_level(KVK_LOG_ERROR); /* what these tests provoke is no news */
    kvk_config_init(&house->config);
    house->config.blocks = 65536;
    house->config.roots = 1024;
    house->config.sequences = 4096;
    house->config.leases = 4096;
    house->config.transfers = 4096;
    house->config.instances = 64;
    house->config.sessions = 128;
    house->config.tokens = 65536;
    house->config.tenant_percent = 100; /* limits as small as tests' have no parts */
    house->config.test_hooks = true;
    house->config.policy = KVK_EVICT_LRU;
    house->config.device_free_percent = 0;
    house->config.keeper = KVK_CONFIG_KEEPER_NO; /* a test that wants one runs it itself */
}

/* With KVKEEP_TEST_DURABLE every house has a catalogue, in a folder that goes with it: ctest runs
 * the cases both ways. */
static inline void house_durable(struct house *house, const struct house_options *options)
{
    if (getenv("KVKEEP_TEST_DURABLE") == NULL || house->config.durable_folder[0] != '\0' ||
        options->disk != NULL) {
        return;
    }
    (void)snprintf(house->folder, sizeof(house->folder), "/tmp/kvkeep-house.XXXXXX");
    cr_assert_not_null(mkdtemp(house->folder));
    (void)snprintf(house->config.durable_folder, sizeof(house->config.durable_folder), "%s/data",
                   house->folder);
}

static inline void house_start(struct house *house, const struct house_options *options)
{
    const struct kvk_credential *credential = NULL;

    house->config.device_bytes = options->device_bytes;
    house->config.host_bytes = options->host_bytes;
    kvk_clock_manual_init(&house->manual, 1000 * KVK_NS_PER_SECOND);
    house_durable(house, options);
    cr_assert_eq(kvk_durable_open(&house->config, &house->durable, &house->error), KVK_OK, "%s",
                 house->error.text);
    const struct kvk_tenants_options tenants_options = {.config = &house->config,
                                                        .catalogue = house->durable.catalogue};
    cr_assert_eq(kvk_tenants_open(&tenants_options, &house->tenants, &house->error), KVK_OK, "%s",
                 house->error.text);
    if (options->disk != NULL) { /* without a folder, so not before the configuration is checked */
        house->config.disk_bytes = options->disk_bytes;
    }
    const struct kvk_cache_options cache_options = {
        .config = &house->config,
        .tenants = house->tenants,
        .clock = options->manual_clock ? &house->manual.clock : NULL,
        .device = options->device != NULL     ? options->device
                  : options->device_bytes > 0 ? house_device()
                                              : NULL,
        .host_device = options->host_bytes > 0 || options->device != NULL ? house_device() : NULL,
        .catalogue = house->durable.catalogue,
        .disk = options->disk != NULL ? options->disk : house->durable.disk,
        .keeper = house->durable.keeper,
        .threads = options->threads,
    };
    cr_assert_eq(kvk_cache_create(&cache_options, &house->cache, &house->error), KVK_OK, "%s",
                 house->error.text);
    cr_assert_eq(kvk_durable_start(house->cache, &house->error), KVK_OK, "%s", house->error.text);
    if (house->config.credential_count == 0) {
        cr_assert_eq(kvk_tenants_authenticate(house->tenants, NULL, 0, true, (uint32_t)geteuid(),
                                              &credential, &house->error),
                     KVK_OK);
        house->caller = house_caller(credential);
    }
}

static inline void house_stop(struct house *house)
{
    kvk_cache_check(house->cache);
    kvk_durable_stop(house->cache);
    kvk_cache_destroy(house->cache);
    kvk_tenants_destroy(house->tenants);
    kvk_durable_close(&house->durable);
    kvk_config_finish(&house->config);
    if (house->folder[0] != '\0') {
        folder_remove(house->folder);
        house->folder[0] = '\0';
    }
}

/* The caller of a token's credential. */
static inline struct kvk_caller house_caller_of(struct house *house, const char *token)
{
    const struct kvk_credential *credential = NULL;
    cr_assert_eq(kvk_tenants_authenticate(house->tenants, (const uint8_t *)token, strlen(token),
                                          false, 0, &credential, &house->error),
                 KVK_OK, "%s", house->error.text);
    return house_caller(credential);
}

static inline struct kvk_view house_view(const char *text)
{
    return (struct kvk_view){.data = (const uint8_t *)text, .size = strlen(text)};
}

/* ---- Spaces ---- */

/* Two layers, two KV heads of 8 values, fp32, 4 tokens: 1 KiB a block and shard. */
static inline struct kvk_geometry house_geometry(void)
{
    return (struct kvk_geometry){.layers = 2,
                                 .kv_heads = 2,
                                 .head_size_k = 8,
                                 .head_size_v = 8,
                                 .block_tokens = 4,
                                 .format_k = KVK_FORMAT_FP32,
                                 .format_v = KVK_FORMAT_FP32,
                                 .layout = KVK_LAYOUT_HEADS_FIRST,
                                 .attention = KVK_ATTENTION_SELF,
                                 .tensor_shards = 1,
                                 .pipeline_shards = 1};
}

static inline uint64_t house_space_of(struct house *house, const struct kvk_caller *caller,
                                      const char *model, const struct kvk_geometry *groups,
                                      uint32_t group_count)
{
    struct kvk_space_request request = {.block_tokens = groups[0].block_tokens,
                                        .group_count = group_count};
    struct kvk_space_reply reply;

    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
    for (uint32_t i = 0; i < group_count; i++) {
        request.groups[i] = groups[i];
    }
    cr_assert_eq(kvk_space_open(house->cache, caller, &request, &reply, &house->error), KVK_OK,
                 "%s", house->error.text);
    return reply.space_id;
}

static inline uint64_t house_space(struct house *house, const char *model)
{
    const struct kvk_geometry geometry = house_geometry();
    return house_space_of(house, &house->caller, model, &geometry, 1);
}

/* ---- Sessions ---- */

/* This very process, without a pidfd of its own: the engine makes one. */
static inline struct kvk_hello house_hello(void)
{
    return (struct kvk_hello){
        .local = true, .pid = (int32_t)getpid(), .uid = (uint32_t)geteuid(), .pidfd = -1};
}

static inline struct kvk_welcome house_begin(struct house *house, const struct kvk_hello *hello)
{
    struct kvk_welcome welcome;
    cr_assert_eq(kvk_session_begin(house->cache, &house->caller, hello, &welcome, &house->error),
                 KVK_OK, "%s", house->error.text);
    return welcome;
}

static inline uint64_t house_session(struct house *house)
{
    const struct kvk_hello hello = house_hello();
    return house_begin(house, &hello).session_id;
}

/* ---- Sequences ---- */

static inline void house_tokens(uint32_t *tokens, uint64_t count, uint32_t first)
{
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = first + (uint32_t)i;
    }
}

static inline enum kvk_status house_try_open(struct house *house, uint64_t session_id,
                                             uint64_t space_id, const uint32_t *tokens,
                                             uint64_t count, struct kvk_sequence_reply *reply)
{
    struct kvk_tables tables = {.part_count = 0};
    const struct kvk_open_request request = {.session_id = session_id,
                                             .space_id = space_id,
                                             .prompt = {.tokens = tokens, .token_count = count},
                                             .tier = -1};
    enum kvk_status status =
        kvk_sequence_open(house->cache, &house->caller, &request, reply, &tables, &house->error);
    kvk_tables_finish(&tables);
    return status;
}

static inline struct kvk_sequence_reply house_open(struct house *house, uint64_t session_id,
                                                   uint64_t space_id, const uint32_t *tokens,
                                                   uint64_t count)
{
    struct kvk_sequence_reply reply;
    cr_assert_eq(house_try_open(house, session_id, space_id, tokens, count, &reply), KVK_OK, "%s",
                 house->error.text);
    return reply;
}

static inline enum kvk_status house_try_seal(struct house *house, uint64_t session_id,
                                             uint64_t sequence_id, uint64_t expected,
                                             uint64_t length)
{
    struct kvk_seal_reply reply;
    const struct kvk_seal_request request = {.session_id = session_id,
                                             .sequence_id = sequence_id,
                                             .expected_length = expected,
                                             .length = length,
                                             .all_ranks = true};
    return kvk_sequence_seal(house->cache, &house->caller, &request, &reply, &house->error);
}

static inline void house_seal(struct house *house, uint64_t session_id, uint64_t sequence_id,
                              uint64_t length)
{
    cr_assert_eq(house_try_seal(house, session_id, sequence_id, length, length), KVK_OK, "%s",
                 house->error.text);
}

static inline void house_close(struct house *house, uint64_t session_id, uint64_t sequence_id)
{
    struct kvk_close_reply reply;
    cr_assert_eq(kvk_sequence_close(house->cache, &house->caller, session_id, &sequence_id, 1,
                                    &reply, &house->error),
                 KVK_OK, "%s", house->error.text);
}

static inline uint64_t house_cached(struct house *house, uint64_t space_id, const uint32_t *tokens,
                                    uint64_t count)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {.space_id = space_id,
                                               .prompt = {.tokens = tokens, .token_count = count}};
    cr_assert_eq(kvk_lookup(house->cache, &house->caller, &request, &reply, &house->error), KVK_OK,
                 "%s", house->error.text);
    return reply.cached_tokens;
}

/* Bytes that cannot leave the tier now. */
static inline uint64_t house_bound(struct house *house, enum kvk_tier tier)
{
    kvk_lock(&house->cache->lock);
    uint64_t bytes = house->cache->tiers[tier].bound_bytes;
    kvk_unlock(&house->cache->lock);
    return bytes;
}

static inline uint64_t house_quarantine(struct house *house, enum kvk_tier tier)
{
    kvk_lock(&house->cache->lock);
    uint64_t bytes = house->cache->tiers[tier].quarantine_bytes;
    kvk_unlock(&house->cache->lock);
    return bytes;
}

static inline void house_sleep_ms(long ms)
{
    const struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&time, NULL);
}

#endif
