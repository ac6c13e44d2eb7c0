/*
 * A catalogue in a folder of its own under /tmp, and records with every field filled, for tests.
 */
#ifndef KVK_TESTS_CATALOGUE_HOUSE_H
#define KVK_TESTS_CATALOGUE_HOUSE_H

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "hosttier/catalogue_internal.h"
#include "tests/folder.h"
#include "tests/patience.h"

struct shelf {
    char folder[64];
    struct kvk_catalogue_options options;
    struct kvk_catalogue *catalogue;
    struct kvk_error error;
};

static inline void shelf_init(struct shelf *shelf)
{
    memset(shelf, 0, sizeof(*shelf));
    kvk_log_set_level(KVK_LOG_ERROR);
    (void)snprintf(shelf->folder, sizeof(shelf->folder), "/tmp/kvkeep-catalogue-XXXXXX");
    cr_assert_not_null(mkdtemp(shelf->folder));
    shelf->options = (struct kvk_catalogue_options){
        .folder = shelf->folder, .map_bytes = UINT64_C(64) << 20, .commit_ms_max = 1};
}

static inline void shelf_open(struct shelf *shelf)
{
    cr_assert_eq(kvk_catalogue_open(&shelf->options, &shelf->catalogue, &shelf->error), KVK_OK,
                 "%s", shelf->error.text);
}

static inline void shelf_close(struct shelf *shelf)
{
    kvk_catalogue_close(shelf->catalogue);
    shelf->catalogue = NULL;
}

static inline void shelf_reopen(struct shelf *shelf)
{
    shelf_close(shelf);
    shelf_open(shelf);
}

static inline void shelf_finish(struct shelf *shelf)
{
    shelf_close(shelf);
    folder_remove(shelf->folder);
}

/* ---- Records that depend on one number ---- */

struct block_example {
    struct kvk_disk_block_record record;
    uint32_t tokens[64];
    uint64_t checksums[4];
    uint8_t extra[96];
    uint8_t salt[32];
};

static inline void example_block(struct block_example *example, uint64_t space_id, uint32_t group,
                                 uint32_t slot, uint64_t seed)
{
    struct kvk_random random;
    kvk_random_init(&random, seed * 1000003 + slot);
    memset(example, 0, sizeof(*example));
    kvk_random_fill(&random, example->tokens, sizeof(example->tokens));
    kvk_random_fill(&random, example->checksums, sizeof(example->checksums));
    kvk_random_fill(&random, example->extra, sizeof(example->extra));
    kvk_random_fill(&random, example->salt, sizeof(example->salt));
    struct kvk_disk_block_record *record = &example->record;
    record->space_id = space_id;
    record->group = group;
    record->slot = slot;
    record->generation = kvk_random_next(&random);
    kvk_random_fill(&random, record->key.bytes, sizeof(record->key.bytes));
    kvk_random_fill(&random, record->parent.bytes, sizeof(record->parent.bytes));
    record->position = (uint32_t)kvk_random_below(&random, 3);
    record->use_count = (uint32_t)kvk_random_next(&random);
    record->used_s = kvk_random_next(&random);
    record->cost = (float)kvk_random_unit(&random);
    record->tokens = example->tokens;
    record->token_count = 1 + (uint32_t)kvk_random_below(&random, 64);
    record->extra = example->extra;
    record->extra_size = (size_t)kvk_random_below(&random, sizeof(example->extra) + 1);
    record->salt = example->salt;
    record->salt_size =
        record->position == 0 ? (size_t)kvk_random_below(&random, sizeof(example->salt) + 1) : 0;
    record->checksums = example->checksums;
    record->shard_count = 1 + (uint32_t)kvk_random_below(&random, 4);
}

static inline bool same_bytes(const void *a, const void *b, size_t size)
{
    return size == 0 || memcmp(a, b, size) == 0;
}

static inline bool same_block(const struct kvk_disk_block_record *a,
                              const struct kvk_disk_block_record *b)
{
    return a->space_id == b->space_id && a->group == b->group && a->slot == b->slot &&
           a->generation == b->generation && same_bytes(&a->key, &b->key, sizeof(a->key)) &&
           same_bytes(&a->parent, &b->parent, sizeof(a->parent)) && a->position == b->position &&
           a->use_count == b->use_count && a->used_s == b->used_s && a->cost == b->cost &&
           a->token_count == b->token_count &&
           same_bytes(a->tokens, b->tokens, a->token_count * sizeof(*a->tokens)) &&
           a->extra_size == b->extra_size && same_bytes(a->extra, b->extra, a->extra_size) &&
           a->salt_size == b->salt_size && same_bytes(a->salt, b->salt, a->salt_size) &&
           a->shard_count == b->shard_count &&
           same_bytes(a->checksums, b->checksums, a->shard_count * sizeof(*a->checksums));
}

static inline struct kvk_tenant_record example_tenant(const char *name)
{
    struct kvk_tenant_record record = {
        .created_s = 1700000000,
        .mode = KVK_TENANT_SHADOW,
        .may_publish = true,
        .forgetting = true,
        .quota = {.guaranteed_bytes = {1, 2, 3, 4},
                  .limit_bytes = {5, 6, 7, UINT64_MAX},
                  .sequences = 8,
                  .leases = 9,
                  .requests_per_second = 10,
                  .request_burst = 11,
                  .over_quota = 1,
                  .idle_ms = 12},
    };
    (void)snprintf(record.name, sizeof(record.name), "%s", name);
    for (size_t i = 0; i < sizeof(record.secret); i++) {
        record.secret[i] = (uint8_t)(i * 7 + 1);
    }
    return record;
}

static inline struct kvk_credential_record example_credential(const char *name)
{
    struct kvk_credential_record record = {
        .tenant_ids = {3, UINT64_MAX, 5},
        .tenant_count = 3,
        .admin = true,
        .token_count = 2,
        .uids = {1000, 0, UINT32_MAX},
        .uid_count = 3,
        .certificate_subject = "engine.example",
    };
    (void)snprintf(record.name, sizeof(record.name), "%s", name);
    for (uint32_t i = 0; i < 2; i++) {
        memset(record.tokens[i].digest, (int)(0x30 + i), sizeof(record.tokens[i].digest));
        record.tokens[i].created_s = 100 + i;
        record.tokens[i].expires_s = 200 + i;
    }
    return record;
}

static inline struct kvk_space_record example_space(uint64_t id, uint64_t tenant_id)
{
    static const uint8_t identity[] = "o/m/n\0with a NUL";
    static const uint8_t shape[] = "\1\2\3";
    return (struct kvk_space_record){.id = id,
                                     .tenant_id = tenant_id,
                                     .generation = 7,
                                     .identity = identity,
                                     .identity_size = sizeof(identity),
                                     .shape = shape,
                                     .shape_size = sizeof(shape)};
}

static inline void shelf_put_block(struct shelf *shelf, uint64_t space_id, uint32_t group,
                                   uint32_t slot, uint64_t seed, uint64_t *ticket)
{
    struct block_example example;
    example_block(&example, space_id, group, slot, seed);
    cr_assert_eq(kvk_catalogue_block_put(shelf->catalogue, &example.record, ticket), KVK_OK);
}

static inline void shelf_put_space(struct shelf *shelf, uint64_t id, uint64_t tenant_id)
{
    const struct kvk_space_record record = example_space(id, tenant_id);
    cr_assert_eq(kvk_catalogue_put_space(shelf->catalogue, &record, &shelf->error), KVK_OK, "%s",
                 shelf->error.text);
}

static inline void shelf_flush(struct shelf *shelf)
{
    cr_assert_eq(kvk_catalogue_flush(shelf->catalogue, &shelf->error), KVK_OK, "%s",
                 shelf->error.text);
}

/* How many block records a space has; each must be the example of `seeds[slot]`, where given. */
struct block_count {
    const uint64_t *seeds;
    uint64_t seed;
    uint64_t count;
    uint64_t last; /* group << 32 | slot, for the order */
    bool wrong;
};

static inline bool count_block(void *context, const struct kvk_disk_block_record *record)
{
    struct block_count *count = context;
    struct block_example example;
    uint64_t seed = count->seeds != NULL ? count->seeds[record->slot] : count->seed;
    example_block(&example, record->space_id, record->group, record->slot, seed);
    uint64_t place = (uint64_t)record->group << 32 | record->slot;
    if (!same_block(&example.record, record) || (count->count > 0 && place <= count->last)) {
        count->wrong = true;
    }
    count->last = place;
    count->count++;
    return true;
}

static inline uint64_t shelf_count_blocks(struct shelf *shelf, uint64_t space_id, uint64_t seed)
{
    struct block_count count = {.seed = seed};
    cr_assert_eq(
        kvk_catalogue_blocks(shelf->catalogue, space_id, count_block, &count, &shelf->error),
        KVK_OK, "%s", shelf->error.text);
    cr_assert_not(count.wrong);
    return count.count;
}

static inline struct kvk_catalogue_stats shelf_stats(struct shelf *shelf)
{
    struct kvk_catalogue_stats stats;
    kvk_catalogue_stats(shelf->catalogue, &stats);
    return stats;
}

#endif
