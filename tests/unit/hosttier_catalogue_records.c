/*
 * Records as bytes: what was written is read; what was changed in any byte, cut, grown, or put
 * under another key is known as damaged, and is left out and counted where it lies in the
 * catalogue.
 */
#include <math.h>

#include "base/bytes.h"
#include "tests/catalogue_house.h"

/* One record of each kind, with its key and a reader that says whether it is believed. */
struct specimen {
    const char *kind;
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    bool (*read)(const void *key, size_t key_size, const void *data, size_t size);
};

static bool read_mark(const void *key, size_t key_size, const void *data, size_t size)
{
    uint32_t format;
    return kvk_record_read_mark(key, key_size, data, size, &format);
}

static bool read_tenant(const void *key, size_t key_size, const void *data, size_t size)
{
    struct kvk_tenant_record record;
    return kvk_record_read_tenant(key, key_size, data, size, &record);
}

static bool read_credential(const void *key, size_t key_size, const void *data, size_t size)
{
    struct kvk_credential_record record;
    return kvk_record_read_credential(key, key_size, data, size, &record);
}

static bool read_space(const void *key, size_t key_size, const void *data, size_t size)
{
    struct kvk_space_record record;
    return kvk_record_read_space(key, key_size, data, size, &record);
}

static bool read_generation(const void *key, size_t key_size, const void *data, size_t size)
{
    uint64_t number;
    return kvk_record_read_number(KVK_RECORD_GENERATION, key, key_size, data, size, &number);
}

static bool read_counter(const void *key, size_t key_size, const void *data, size_t size)
{
    uint64_t number;
    return kvk_record_read_number(KVK_RECORD_COUNTER, key, key_size, data, size, &number);
}

static bool read_block(const void *key, size_t key_size, const void *data, size_t size)
{
    static struct kvk_record_scratch scratch;
    struct kvk_disk_block_record record;
    return kvk_record_read_block(key, key_size, data, size, &scratch, &record);
}

static bool read_value(const void *key, size_t key_size, const void *data, size_t size)
{
    const void *value;
    size_t value_size;
    return kvk_record_read_value(key, key_size, data, size, &value, &value_size);
}

#define SPECIMENS 8

static void specimens_make(struct specimen specimens[SPECIMENS])
{
    struct block_example block;
    struct kvk_tenant_record tenant = example_tenant("tenant");
    const struct kvk_credential_record credential = example_credential("credential");
    const struct kvk_space_record space = example_space(5, 6);
    const struct specimen kinds[SPECIMENS] = {
        {.kind = "mark", .read = read_mark},
        {.kind = "tenant", .read = read_tenant},
        {.kind = "credential", .read = read_credential},
        {.kind = "space", .read = read_space},
        {.kind = "generation", .read = read_generation},
        {.kind = "counter", .read = read_counter},
        {.kind = "block", .read = read_block},
        {.kind = "value", .read = read_value},
    };
    memcpy(specimens, kinds, sizeof(kinds));
    tenant.id = 3;
    example_block(&block, 5, 1, 77, 9);
    block.record.position = 0;
    block.record.salt_size = 7;
    for (int i = 0; i < SPECIMENS; i++) {
        cr_assert(kvk_record_key_name(specimens[i].kind, &specimens[i].key));
    }
    kvk_record_key_id(5, &specimens[3].key);
    kvk_record_key_id(5, &specimens[4].key);
    kvk_record_key_block(5, 1, 77, &specimens[6].key);
    struct specimen *at = specimens;
    cr_assert_eq(kvk_record_write_mark(&at[0].key, 1, &at[0].bytes), KVK_OK);
    cr_assert_eq(kvk_record_write_tenant(&at[1].key, &tenant, &at[1].bytes), KVK_OK);
    cr_assert_eq(kvk_record_write_credential(&at[2].key, &credential, &at[2].bytes), KVK_OK);
    cr_assert_eq(kvk_record_write_space(&at[3].key, &space, &at[3].bytes), KVK_OK);
    cr_assert_eq(kvk_record_write_number(KVK_RECORD_GENERATION, &at[4].key, 8, &at[4].bytes),
                 KVK_OK);
    cr_assert_eq(kvk_record_write_number(KVK_RECORD_COUNTER, &at[5].key, 8, &at[5].bytes), KVK_OK);
    cr_assert_eq(kvk_record_write_block(&at[6].key, &block.record, &at[6].bytes), KVK_OK);
    cr_assert_eq(kvk_record_write_value(&at[7].key, "some value", 10, &at[7].bytes), KVK_OK);
}

static void specimens_free(struct specimen specimens[SPECIMENS])
{
    for (int i = 0; i < SPECIMENS; i++) {
        free(specimens[i].bytes.data);
    }
}

static bool believed(const struct specimen *specimen)
{
    return specimen->read(specimen->key.bytes, specimen->key.size, specimen->bytes.data,
                          specimen->bytes.size);
}

Test(records, every_byte_counts)
{
    struct specimen specimens[SPECIMENS];
    specimens_make(specimens);
    for (int i = 0; i < SPECIMENS; i++) {
        struct specimen *at = &specimens[i];
        cr_assert(believed(at), "%s", at->kind);
        for (size_t byte = 0; byte < at->bytes.size; byte++) {
            for (int change = 1; change < 256; change++) {
                at->bytes.data[byte] ^= (uint8_t)change;
                cr_assert_not(believed(at), "%s byte %zu", at->kind, byte);
                at->bytes.data[byte] ^= (uint8_t)change;
            }
        }
        for (uint32_t byte = 0; byte < at->key.size; byte++) {
            at->key.bytes[byte] ^= 1;
            cr_assert_not(believed(at), "%s under another key", at->kind);
            at->key.bytes[byte] ^= 1;
        }
        cr_assert(believed(at));
    }
    specimens_free(specimens);
}

Test(records, a_record_has_one_size)
{
    struct specimen specimens[SPECIMENS];
    specimens_make(specimens);
    for (int i = 0; i < SPECIMENS; i++) {
        const struct specimen *at = &specimens[i];
        for (size_t size = 0; size < at->bytes.size; size++) {
            uint8_t *cut = malloc(size + 1); /* of its own, so that a sanitizer sees the end */
            memcpy(cut, at->bytes.data, size);
            cr_assert_not(at->read(at->key.bytes, at->key.size, cut, size), "%s cut to %zu",
                          at->kind, size);
            free(cut);
        }
        uint8_t *grown = calloc(1, at->bytes.size + 8);
        memcpy(grown, at->bytes.data, at->bytes.size);
        cr_assert_not(at->read(at->key.bytes, at->key.size, grown, at->bytes.size + 1));
        cr_assert_not(at->read(at->key.bytes, 0, grown, at->bytes.size));
        free(grown);
        for (int k = 0; k < SPECIMENS; k++) {
            if (k != i) {
                cr_assert_not(
                    specimens[k].read(at->key.bytes, at->key.size, at->bytes.data, at->bytes.size),
                    "%s is no %s", at->kind, specimens[k].kind);
            }
        }
    }
    specimens_free(specimens);
}

/* A checksum that is right does not make a field right: whoever can write the file is no friend. */
Test(records, fields_are_checked_behind_the_checksum)
{
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    struct block_example block;
    kvk_record_key_block(5, 1, 77, &key);
    example_block(&block, 5, 1, 77, 1);
    const struct kvk_disk_block_record good = block.record;

    const struct {
        const char *what;
        struct kvk_disk_block_record record;
    } bad[] = {
#define BAD(member, value) {#member, .record.member = (value)}
        BAD(shard_count, 0),
        BAD(shard_count, KVK_CATALOGUE_SHARDS_MAX + 1),
        BAD(token_count, 0),
        BAD(token_count, KVK_RECORD_TOKENS_MAX + 1),
        BAD(extra_size, KVK_RECORD_EXTRA_MAX + 1),
        BAD(salt_size, KVK_RECORD_SALT_MAX + 1),
        BAD(cost, NAN),
        BAD(cost, -1.0F),
#undef BAD
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct kvk_disk_block_record record = good;
        record.position = 0;
        record.salt_size = 0;
        if (strcmp(bad[i].what, "shard_count") == 0) {
            record.shard_count = bad[i].record.shard_count;
        } else if (strcmp(bad[i].what, "token_count") == 0) {
            record.token_count = bad[i].record.token_count;
        } else if (strcmp(bad[i].what, "extra_size") == 0) {
            record.extra_size = bad[i].record.extra_size;
        } else if (strcmp(bad[i].what, "salt_size") == 0) {
            record.salt_size = bad[i].record.salt_size;
        } else {
            record.cost = bad[i].record.cost;
        }
        cr_assert_eq(kvk_record_write_block(&key, &record, &bytes), KVK_INVALID, "%s", bad[i].what);
    }
    struct kvk_disk_block_record salted = good;
    salted.position = 1;
    salted.salt_size = 1;
    cr_assert_eq(kvk_record_write_block(&key, &salted, &bytes), KVK_INVALID,
                 "only the first block of a chain knows the salt");
}

Test(records, largest_records_go_through)
{
    static struct kvk_record_scratch scratch;
    static uint32_t tokens[KVK_RECORD_TOKENS_MAX];
    static uint64_t checksums[KVK_CATALOGUE_SHARDS_MAX];
    uint8_t *extra = calloc(1, KVK_RECORD_EXTRA_MAX);
    uint8_t salt[KVK_RECORD_SALT_MAX] = {1};
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    struct kvk_disk_block_record back;
    tokens[KVK_RECORD_TOKENS_MAX - 1] = 5;
    const struct kvk_disk_block_record record = {
        .space_id = UINT64_MAX,
        .group = UINT32_MAX,
        .slot = UINT32_MAX,
        .tokens = tokens,
        .token_count = KVK_RECORD_TOKENS_MAX,
        .extra = extra,
        .extra_size = KVK_RECORD_EXTRA_MAX,
        .salt = salt,
        .salt_size = KVK_RECORD_SALT_MAX,
        .checksums = checksums,
        .shard_count = KVK_CATALOGUE_SHARDS_MAX,
    };
    kvk_record_key_block(UINT64_MAX, UINT32_MAX, UINT32_MAX, &key);
    cr_assert_eq(kvk_record_write_block(&key, &record, &bytes), KVK_OK);
    cr_assert(kvk_record_read_block(key.bytes, key.size, bytes.data, bytes.size, &scratch, &back));
    cr_assert(same_block(&record, &back));
    free(bytes.data);
    free(extra);
}

/* ---- Damage in the catalogue itself ---- */

struct place {
    enum kvk_catalogue_table table;
    struct kvk_record_key key;
};

/* Exchange one byte of a stored value, past everything that checks. */
static void spoil(struct shelf *shelf, const struct place *place, size_t byte)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key = place->key;
    MDB_val name = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val value;
    cr_assert_eq(kvk_catalogue_write_begin(shelf->catalogue, &transaction, &shelf->error), KVK_OK);
    cr_assert_eq(mdb_get(transaction.handle, shelf->catalogue->tables[place->table], &name, &value),
                 0);
    uint8_t *copy = malloc(value.mv_size);
    memcpy(copy, value.mv_data, value.mv_size);
    copy[byte % value.mv_size] ^= 0x40;
    const struct kvk_record_bytes bytes = {.data = copy, .size = value.mv_size};
    cr_assert_eq(kvk_catalogue_put(&transaction, place->table, &place->key, &bytes, &shelf->error),
                 KVK_OK);
    cr_assert_eq(kvk_catalogue_write_commit(&transaction, &shelf->error), KVK_OK);
    free(copy);
}

static void count_space(void *context, const struct kvk_space_record *record)
{
    (void)record;
    ++*(uint32_t *)context;
}

static uint32_t spaces_seen(struct shelf *shelf)
{
    uint32_t count = 0;
    cr_assert_eq(kvk_catalogue_spaces(shelf->catalogue, count_space, &count, &shelf->error),
                 KVK_OK);
    return count;
}

static void count_tenant(void *context, const struct kvk_tenant_record *record)
{
    (void)record;
    ++*(uint32_t *)context;
}

Test(records, damage_is_left_out_and_counted)
{
    struct shelf shelf;
    struct place place = {.table = KVK_CATALOGUE_BLOCKS};
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    shelf_put_space(&shelf, 2, 1);
    shelf_put_space(&shelf, 3, 1);
    for (uint32_t slot = 0; slot < 100; slot++) {
        shelf_put_block(&shelf, 1, 0, slot, 1, NULL);
    }
    shelf_flush(&shelf);
    for (uint32_t slot = 0; slot < 100; slot += 2) {
        kvk_record_key_block(1, 0, slot, &place.key);
        spoil(&shelf, &place, slot * 3);
    }
    shelf_reopen(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 50);
    cr_assert_eq(shelf_stats(&shelf).damaged_records, 50);

    place.table = KVK_CATALOGUE_SPACES;
    kvk_record_key_id(2, &place.key);
    spoil(&shelf, &place, 40);
    cr_assert_eq(spaces_seen(&shelf), 2);
    place.table = KVK_CATALOGUE_GENERATIONS;
    kvk_record_key_id(1, &place.key);
    spoil(&shelf, &place, 16);
    cr_assert_eq(spaces_seen(&shelf), 1,
                 "without its generation a space could bring back what was invalidated");
    const struct kvk_space_generation next = {1, 100};
    cr_assert_eq(kvk_catalogue_set_generations(shelf.catalogue, &next, 1, &shelf.error), KVK_OK);
    cr_assert_eq(spaces_seen(&shelf), 2, "a newer generation mends it");

    struct kvk_tenant_record tenant = example_tenant("t");
    uint32_t count = 0;
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &tenant, &shelf.error), KVK_OK);
    place.table = KVK_CATALOGUE_TENANTS;
    cr_assert(kvk_record_key_name("t", &place.key));
    spoil(&shelf, &place, 60);
    cr_assert_eq(kvk_catalogue_tenants(shelf.catalogue, count_tenant, &count, &shelf.error),
                 KVK_OK);
    cr_assert_eq(count, 0);
    place.table = KVK_CATALOGUE_META;
    cr_assert(kvk_record_key_name("next-tenant", &place.key));
    spoil(&shelf, &place, 20);
    tenant = example_tenant("another");
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &tenant, &shelf.error), KVK_DATA_LOSS,
                 "better nobody new than an id twice");
    cr_assert(kvk_record_key_name("format", &place.key));
    spoil(&shelf, &place, 16);
    shelf_close(&shelf);
    cr_assert_eq(kvk_catalogue_open(&shelf.options, &shelf.catalogue, &shelf.error), KVK_DATA_LOSS);
    shelf_finish(&shelf);
}
