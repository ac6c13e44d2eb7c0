/*
 * What a tenant makes the daemon keep besides bytes of blocks: bounded however small the things
 * are, of whatever kind; named where it is refused; and counted to the byte (kvk_cache_check()
 * counts all of it again).
 */
#include "daemon/metadata.h"
#include "tests/engine_tenants.h"

#define MIB (UINT64_C(1) << 20)
#define HOST KVK_TIER_HOST

static uint64_t bytes_of(struct party *party, uint32_t tenant)
{
    struct kvk_cache *cache = party->house.cache;
    kvk_lock(&cache->lock);
    uint64_t bytes = kvk_metadata_bytes(cache, party_tenant(party, tenant));
    kvk_unlock(&cache->lock);
    return bytes;
}

static uint32_t count_of(struct party *party, uint32_t tenant, enum kvk_metadata_kind kind)
{
    struct kvk_cache *cache = party->house.cache;
    kvk_lock(&cache->lock);
    uint32_t count = kvk_metadata_kind_count(cache, party_tenant(party, tenant), kind);
    kvk_unlock(&cache->lock);
    return count;
}

/* Two tenants; the first is who tries. */
static void begin(struct party *party, uint64_t metadata_bytes, uint32_t over_quota)
{
    party_init(party, 2);
    party->house.config.tenant_metadata_bytes = metadata_bytes;
    party->house.config.tenant_percent = 75;
    party->house.config.tenants[0].over_quota = over_quota;
    party_start(party, 0, 4096);
}

static void expect_refused(struct party *party, enum kvk_status status, const char *field,
                           uint64_t limit)
{
    const struct kvk_error *error = &party->house.error;
    cr_assert_eq(status, KVK_EXHAUSTED, "%s", error->text);
    cr_expect_eq(error->cause, KVK_CAUSE_TENANT_LIMIT, "%s", error->text);
    cr_expect_str_eq(error->field, field, "%s: %s", error->field, error->text);
    cr_expect_eq(error->limit, limit, "%s", error->text);
    kvk_cache_check(party->house.cache);
}

/* ---- Blocks of one byte, with a thousand tokens ---- */

#define TINY_TOKENS 1024

static uint64_t tiny_space(struct party *party, const char *model)
{
    const struct kvk_geometry tiny = {.layers = 1,
                                      .kv_heads = 1,
                                      .block_tokens = TINY_TOKENS,
                                      .layout = KVK_LAYOUT_OPAQUE,
                                      .attention = KVK_ATTENTION_SELF,
                                      .tensor_shards = 1,
                                      .pipeline_shards = 1,
                                      .opaque_bytes = 16};
    party_be(party, 0);
    return house_space_of(&party->house, &party->house.caller, model, &tiny, 1);
}

static enum kvk_status tiny_store(struct party *party, uint64_t space, uint32_t name)
{
    uint32_t tokens[TINY_TOKENS];
    struct kvk_sequence_reply reply;
    party_be(party, 0);
    house_tokens(tokens, TINY_TOKENS, name * TINY_TOKENS);
    enum kvk_status status =
        house_try_open(&party->house, party->sessions[0], space, tokens, TINY_TOKENS, &reply);
    if (status == KVK_OK) {
        house_seal(&party->house, party->sessions[0], reply.sequence_id, TINY_TOKENS);
        house_close(&party->house, party->sessions[0], reply.sequence_id);
    }
    return status;
}

static void tiny_blocks(uint32_t over_quota)
{
    struct party party;
    begin(&party, MIB, over_quota);
    uint64_t space = tiny_space(&party, "tiny");
    for (uint32_t i = 0; i < 20; i++) {
        party_store(&party, 1, i, 1);
    }
    uint32_t refused = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        enum kvk_status status = tiny_store(&party, space, i);
        if (status != KVK_OK) {
            expect_refused(&party, status, "metadata_limit_bytes", MIB);
            refused++;
        }
        cr_assert_leq(bytes_of(&party, 0), MIB);
    }
    uint32_t blocks = count_of(&party, 0, KVK_METADATA_BLOCKS);
    cr_expect_gt(blocks, 100);
    cr_expect_lt(blocks, 256, "a block takes more than its tokens: 4 KiB");
    cr_expect_eq(refused, over_quota == KVK_OVER_QUOTA_REFUSE ? 1000 - blocks : 0);
    cr_expect_eq(party_usage(&party, 0).limit_refusals, refused);
    cr_expect_eq(party_usage(&party, 0).limit_evictions,
                 over_quota == KVK_OVER_QUOTA_REFUSE ? 0 : 1000 - blocks);
    cr_expect_eq(party_cached(&party, 1, 0, 20), 20, "the neighbour still has 20");
    party_stop(&party);
}

Test(metadata, tiny_blocks_push_out_ones_own)
{
    tiny_blocks(KVK_OVER_QUOTA_EVICT);
}

Test(metadata, tiny_blocks_are_refused_where_so_configured)
{
    tiny_blocks(KVK_OVER_QUOTA_REFUSE);
}

/* The numbers too: a tenant with all the bytes in the world leaves others a part of the table. */
Test(metadata, nobody_has_all_records)
{
    struct party party;
    party_init(&party, 2);
    party.house.config.tenant_percent = 75;
    party.house.config.blocks = 256;
    party_start(&party, 0, 4096);
    for (uint32_t i = 0; i < 20; i++) {
        party_store(&party, 1, i, 1);
    }
    for (uint32_t i = 0; i < 1000; i++) {
        party_store(&party, 0, i, 1);
        cr_assert_leq(count_of(&party, 0, KVK_METADATA_BLOCKS), 192);
    }
    cr_expect_eq(count_of(&party, 0, KVK_METADATA_BLOCKS), 192, "75 percent");
    cr_expect_eq(party_cached(&party, 1, 0, 20), 20);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

/* Blocks that are held cannot go: then it is refused, whatever the quota says. */
Test(metadata, held_records_are_no_way_past_it)
{
    struct party party;
    struct kvk_sequence_reply reply;
    begin(&party, MIB, KVK_OVER_QUOTA_EVICT);
    uint64_t space = tiny_space(&party, "tiny");
    enum kvk_status status = KVK_OK;
    uint32_t opened = 0;
    while (status == KVK_OK) {
        uint32_t tokens[TINY_TOKENS];
        house_tokens(tokens, TINY_TOKENS, opened * TINY_TOKENS);
        status =
            house_try_open(&party.house, party.sessions[0], space, tokens, TINY_TOKENS, &reply);
        opened++;
        cr_assert_leq(bytes_of(&party, 0), MIB);
    }
    expect_refused(&party, status, "metadata_limit_bytes", MIB);
    cr_expect_gt(opened, 50);
    kvk_session_end(party.house.cache, party.sessions[0]);
    kvk_cache_maintain(party.house.cache);
    cr_expect_lt(bytes_of(&party, 0), 64 * 1024, "what is left is spaces");
    party_stop(&party);
}

/* ---- Content digests ---- */

Test(metadata, digests_are_counted_and_room_for_them_is_kept)
{
    struct party party;
    begin(&party, MIB, KVK_OVER_QUOTA_EVICT);
    party_be(&party, 0);
    uint32_t last = 0;
    for (uint32_t name = 0; name < 400; name++) {
        uint32_t tokens[64];
        struct kvk_content_span spans[64];
        house_tokens(tokens, 64, 100000 + name * 64);
        for (uint32_t i = 0; i < 64; i++) {
            spans[i] = (struct kvk_content_span){.first = i, .count = 1, .digest_size = 64};
            memset(spans[i].digest, (int)name, 64);
        }
        struct kvk_sequence_reply reply;
        const struct kvk_open_request request = {
            .session_id = party.sessions[0],
            .space_id = party.spaces[0],
            .prompt = {.tokens = tokens, .token_count = 64, .spans = spans, .span_count = 64},
            .tier = -1};
        cr_assert_eq(kvk_sequence_open(party.house.cache, &party.house.caller, &request, &reply,
                                       NULL, &party.house.error),
                     KVK_OK, "%s", party.house.error.text);
        uint64_t opened = bytes_of(&party, 0);
        house_seal(&party.house, party.sessions[0], reply.sequence_id, 64);
        cr_assert_leq(bytes_of(&party, 0), opened, "sealing takes what was kept");
        house_close(&party.house, party.sessions[0], reply.sequence_id);
        cr_assert_leq(bytes_of(&party, 0), MIB);
        kvk_cache_check(party.house.cache);
        last = count_of(&party, 0, KVK_METADATA_BLOCKS);
    }
    cr_expect_lt(last, MIB / (4 * 64), "four digests of 64 bytes each at least");
    cr_expect_gt(last, 1000);
    party_stop(&party);
}

/* ---- Things without any block ---- */

/* Until it is refused; how many there were. */
static uint32_t open_empty(struct party *party, uint64_t space, const char *salt,
                           uint64_t growth_tokens)
{
    char salts[64];
    struct kvk_sequence_reply reply;
    for (uint32_t count = 0;; count++) {
        (void)snprintf(salts, sizeof(salts), "%s%u", salt, count);
        const struct kvk_open_request request = {
            .session_id = party->sessions[0],
            .space_id = space,
            .prompt = {.salt = (const uint8_t *)salts,
                       .salt_size = salt[0] == '\0' ? 0 : strlen(salts)},
            .growth_tokens = growth_tokens,
            .tier = -1};
        if (kvk_sequence_open(party->house.cache, &party->house.caller, &request, &reply, NULL,
                              &party->house.error) != KVK_OK) {
            return count;
        }
    }
}

Test(metadata, empty_sequences)
{
    struct party party;
    begin(&party, 64 * MIB, KVK_OVER_QUOTA_EVICT);
    party_be(&party, 0);
    cr_expect_eq(open_empty(&party, party.spaces[0], "", 0), 3072);
    expect_refused(&party, KVK_EXHAUSTED, "sequences", 3072);
    party_store(&party, 1, 1, 1);
    party_stop(&party);
}

Test(metadata, sequences_with_much_room_for_tokens)
{
    struct party party;
    begin(&party, MIB, KVK_OVER_QUOTA_EVICT);
    party.house.config.tokens = 65536;
    uint64_t space = tiny_space(&party, "tiny");
    uint32_t opened = open_empty(&party, space, "", 4096); /* which takes 16 KiB of tokens alone */
    cr_expect_gt(opened, 16);
    cr_expect_lt(opened, 64);
    expect_refused(&party, KVK_EXHAUSTED, "metadata_limit_bytes", MIB);
    party_stop(&party);
}

Test(metadata, salts)
{
    struct party party;
    begin(&party, 64 * MIB, KVK_OVER_QUOTA_EVICT);
    party_be(&party, 0);
    uint32_t before = count_of(&party, 0, KVK_METADATA_ROOTS);
    cr_expect_eq(open_empty(&party, party.spaces[0], "salt", 0), 768 - before);
    expect_refused(&party, KVK_EXHAUSTED, "roots", 768);
    party_store(&party, 1, 1, 1);
    cr_expect_eq(count_of(&party, 1, KVK_METADATA_ROOTS), 1);
    party_stop(&party);
}

Test(metadata, spaces)
{
    struct party party;
    party_init(&party, 2);
    party.house.config.tenant_percent = 75;
    party.house.config.spaces = 16;
    party_start(&party, 0, 4096);
    party_be(&party, 0);
    enum kvk_status status = KVK_OK;
    uint32_t count = 0;
    uint32_t token = 1;
    struct kvk_sequence_reply sequence;
    for (; status == KVK_OK && count < 100; count++) { /* each in use: unused ones would go */
        char model[32];
        struct kvk_space_reply reply;
        struct kvk_space_request request = {.block_tokens = 4, .group_count = 1};
        (void)snprintf(model, sizeof(model), "model-%u", count);
        request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
        request.groups[0] = house_geometry();
        status = kvk_space_open(party.house.cache, &party.house.caller, &request, &reply,
                                &party.house.error);
        if (status == KVK_OK) {
            sequence = house_open(&party.house, party.sessions[0], reply.space_id, &token, 1);
        }
    }
    expect_refused(&party, status, "spaces", 12);
    house_close(&party.house, party.sessions[0], sequence.sequence_id);
    kvk_cache_maintain(party.house.cache);
    (void)house_space(&party.house, "in the place of one that is not used");
    cr_expect_eq(count_of(&party, 0, KVK_METADATA_SPACES), 12);
    party_be(&party, 1);
    (void)house_space(&party.house, "another");
    party_stop(&party);
}

Test(metadata, sessions_and_instances)
{
    struct party party;
    begin(&party, 64 * MIB, KVK_OVER_QUOTA_EVICT);
    party_be(&party, 0);
    const struct kvk_hello hello = house_hello();
    struct kvk_welcome welcome;
    enum kvk_status status = KVK_OK;
    while (status == KVK_OK) {
        status = kvk_session_begin(party.house.cache, &party.house.caller, &hello, &welcome,
                                   &party.house.error);
    }
    expect_refused(&party, status, "instances", 48);
    party_be(&party, 1);
    (void)house_session(&party.house);
    party_stop(&party);
}

Test(metadata, scratch_memory)
{
    struct party party;
    begin(&party, 8 * MIB, KVK_OVER_QUOTA_EVICT);
    party_be(&party, 0);
    enum kvk_status status = KVK_OK;
    uint32_t mapped = 0;
    for (uint32_t i = 0; i < 40 && status == KVK_OK; i++) {
        const struct kvk_map_request request = {
            .session_id = house_session(&party.house), .kind = KVK_MAP_SCRATCH, .size_bytes = MIB};
        struct kvk_map_reply reply;
        status = kvk_session_map(party.house.cache, &party.house.caller, &request, &reply,
                                 &party.house.error);
        if (status == KVK_PRECONDITION) {
            party_stop(&party);
            cr_skip_test("a side socket is needed for this: see engine_process");
        }
        mapped += status == KVK_OK ? 1 : 0;
        cr_assert_leq(bytes_of(&party, 0), 8 * MIB);
    }
    expect_refused(&party, status, "metadata_limit_bytes", 8 * MIB);
    cr_expect_eq(mapped, 7);
    party_stop(&party);
}

Test(metadata, leases_and_transfers)
{
    struct party party;
    party_init(&party, 2);
    party.house.config.tenant_percent = 75;
    party.house.config.leases = 64;
    party.house.config.transfers = 64;
    party_start(&party, 0, 4096);
    party_store(&party, 0, 7, 2);
    party_be(&party, 0);
    uint32_t tokens[8];
    house_tokens(tokens, 8, 7000);
    enum kvk_status status = KVK_OK;
    struct kvk_pin_reply lease = {0};
    const struct kvk_pin_request pin = {.session_id = party.sessions[0],
                                        .space_id = party.spaces[0],
                                        .prompt = {.tokens = tokens, .token_count = 8},
                                        .ttl_ms = 60000};
    uint64_t lease_id = 0;
    while (status == KVK_OK) {
        status = kvk_lease_pin(party.house.cache, &party.house.caller, &pin, &lease, NULL,
                               &party.house.error);
        lease_id = status == KVK_OK ? lease.lease_id : lease_id;
    }
    expect_refused(&party, status, "leases", 48);
    status = KVK_OK;
    uint64_t ticket;
    const struct kvk_transfer_request transfer = {
        .session_id = party.sessions[0], .lease_id = lease_id, .block_count = 2};
    while (status == KVK_OK) {
        status = kvk_transfer_begin(party.house.cache, &party.house.caller, &transfer, &ticket,
                                    NULL, &party.house.error);
    }
    expect_refused(&party, status, "transfers", 48);
    kvk_session_end(party.house.cache, party.sessions[0]);
    cr_expect_eq(count_of(&party, 0, KVK_METADATA_LEASES), 0);
    cr_expect_eq(count_of(&party, 0, KVK_METADATA_TRANSFERS), 0);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

/* ---- Whose limit, and what is shown ---- */

Test(metadata, a_tenants_own_limit_goes_first)
{
    struct party party;
    party_init(&party, 2);
    party.house.config.tenant_percent = 75;
    party.house.config.tenant_metadata_bytes = 64 * MIB;
    party_quota(&party, 0)->metadata_limit_bytes = MIB;
    party_start(&party, 0, 4096);
    party.house.config.tokens = 65536;
    uint64_t space = tiny_space(&party, "tiny");
    (void)open_empty(&party, space, "", 4096);
    expect_refused(&party, KVK_EXHAUSTED, "metadata_limit_bytes", MIB);

    struct kvk_tenant_quota quota;
    kvk_quota_get(party.house.cache, party_tenant(&party, 0), &quota);
    quota.metadata_limit_bytes = MIB + 1;
    cr_expect_eq(
        kvk_quota_set(party.house.cache, party_tenant(&party, 0), &quota, &party.house.error),
        KVK_INVALID);
    cr_expect_str_eq(party.house.error.field, "metadata_limit_bytes");
    quota.metadata_limit_bytes = 2 * MIB;
    cr_assert_eq(
        kvk_quota_set(party.house.cache, party_tenant(&party, 0), &quota, &party.house.error),
        KVK_OK);
    cr_expect_gt(open_empty(&party, space, "", 4096), 16, "a changed limit holds at once");
    expect_refused(&party, KVK_EXHAUSTED, "metadata_limit_bytes", 2 * MIB);
    party_stop(&party);
}

/* One tenant alone may have all numbers: nobody is crowded out. */
Test(metadata, alone)
{
    struct party party;
    party_init(&party, 1);
    party.house.config.blocks = 256;
    party_start(&party, 0, 4096);
    for (uint32_t i = 0; i < 300; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_expect_eq(count_of(&party, 0, KVK_METADATA_BLOCKS), 256);
    party_stop(&party);
}

struct found {
    double bytes, limit;
};

static void find(void *context, const char *name, double value)
{
    struct found *found = context;
    if (strcmp(name, "kvkeep_tenant_metadata_bytes{tenant=\"tenant-1\"}") == 0) {
        found->bytes = value;
    }
    if (strcmp(name, "kvkeep_tenant_metadata_limit_bytes{tenant=\"tenant-1\"}") == 0) {
        found->limit = value;
    }
}

Test(metadata, each_sees_its_own)
{
    struct party party;
    struct kvk_metadata_report *rows = NULL;
    uint32_t count = 0;
    begin(&party, MIB, KVK_OVER_QUOTA_EVICT);
    party_store(&party, 1, 1, 3);
    party_be(&party, 1);
    const struct kvk_view all = {.size = 0};
    cr_assert_eq(kvk_report_metadata(party.house.cache, &party.house.caller, all, &rows, &count,
                                     &party.house.error),
                 KVK_OK);
    cr_assert_eq(count, 1);
    cr_expect_eq(rows[0].tenant, party_tenant(&party, 1));
    cr_expect_eq(rows[0].bytes, bytes_of(&party, 1));
    cr_expect_eq(rows[0].limit_bytes, MIB);
    cr_expect_eq(rows[0].kinds[KVK_METADATA_BLOCKS].count, 3);
    cr_expect_eq(rows[0].kinds[KVK_METADATA_SPACES].count, 1);
    cr_expect_eq(rows[0].kinds[KVK_METADATA_SESSIONS].count, 1);
    cr_expect_eq(rows[0].kinds[KVK_METADATA_SEQUENCES].count_limit, 3072);
    free(rows);
    struct found found = {0};
    kvk_report_stats(party.house.cache, find, &found);
    cr_expect_eq(found.bytes, (double)bytes_of(&party, 1));
    cr_expect_eq(found.limit, (double)MIB);
    cr_expect_eq(kvk_report_metadata(party.house.cache, &party.house.caller, house_view("tenant-0"),
                                     &rows, &count, &party.house.error),
                 KVK_PERMISSION);
    party_stop(&party);
}
