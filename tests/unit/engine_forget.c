/* Forgetting a tenant: nothing of it is left, nothing of others is touched. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/forget.h"
#include "tests/engine_tenants.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST
#define FILES_MAX 64

/* What the tenant's memory files held, by descriptors of our own that outlive theirs. */
struct files {
    int fds[FILES_MAX];
    uint32_t count;
};

static uint8_t pattern_of(uint32_t tenant)
{
    return (uint8_t)(0xa0 + tenant);
}

/* Every slot in use gets the tenant's byte; returns how many bytes were written. */
static uint64_t write_all(struct party *party, uint32_t tenant)
{
    struct kvk_cache *cache = party->house.cache;
    uint64_t bytes = 0;
    kvk_lock(&cache->lock);
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        if (space->tenant != party_tenant(party, tenant)) {
            continue;
        }
        for (uint32_t g = 0; g < space->group_count; g++) {
            for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
                struct kvk_group_tier *at = &space->groups[g]->tiers[i];
                for (uint32_t slot = 0; at->present && slot < kvk_arena_slot_capacity(&at->arena);
                     slot++) {
                    if (at->owners[slot] != 0) {
                        memset(at->regions[0].address + slot * BLOCK, pattern_of(tenant), BLOCK);
                        at->checksums[slot] = 0; /* taken again at its next move */
                        bytes += BLOCK;
                    }
                }
            }
        }
    }
    kvk_unlock(&cache->lock);
    return bytes;
}

static void files_keep(struct party *party, uint32_t tenant, struct files *files)
{
    struct kvk_cache *cache = party->house.cache;
    files->count = 0;
    kvk_lock(&cache->lock);
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        for (uint32_t g = 0; space->tenant == party_tenant(party, tenant) && g < space->group_count;
             g++) {
            for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
                struct kvk_group_tier *at = &space->groups[g]->tiers[i];
                for (uint32_t shard = 0; at->present && shard < space->groups[g]->shard_count;
                     shard++) {
                    cr_assert_lt(files->count, FILES_MAX);
                    files->fds[files->count++] = dup(at->regions[shard].fd);
                }
            }
        }
    }
    kvk_unlock(&cache->lock);
    cr_assert_gt(files->count, 0);
}

/* Bytes of this value in all of them. */
static uint64_t files_scan(const struct files *files, uint8_t value)
{
    uint64_t found = 0;
    for (uint32_t i = 0; i < files->count; i++) {
        static uint8_t buffer[1 << 16];
        ssize_t size;
        off_t offset = 0;
        while ((size = pread(files->fds[i], buffer, sizeof(buffer), offset)) > 0) {
            for (ssize_t k = 0; k < size; k++) {
                found += buffer[k] == value ? 1 : 0;
            }
            offset += size;
        }
        cr_assert_eq(size, 0);
    }
    return found;
}

static void files_close(struct files *files)
{
    for (uint32_t i = 0; i < files->count; i++) {
        (void)close(files->fds[i]);
    }
}

static enum kvk_status forget(struct party *party, uint32_t tenant,
                              struct kvk_forget_counts *counts)
{
    return kvk_tenant_forget(party->house.cache, &party->house.caller, party_tenant(party, tenant),
                             counts, &party->house.error);
}

static void fill(struct party *party, uint32_t tenant, uint32_t prompts)
{
    for (uint32_t i = 0; i < prompts; i++) {
        party_store(party, tenant, i, 2);
    }
}

Test(forget, nothing_of_it_is_left_and_nothing_of_others_is_touched)
{
    struct party party;
    struct files files;
    struct files others;
    struct kvk_forget_counts counts;
    struct kvk_sequence_reply reply;
    struct kvk_pin_reply pinned;
    uint32_t tokens[8];
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[HOST] = 20 * BLOCK;
    party_start(&party, 16, 64);
    fill(&party, 0, 20);
    fill(&party, 1, 10);
    party_be(&party, 0);
    const struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
    uint64_t second = house_space_of(&party.house, &party.house.caller, "second", groups, 2);
    house_tokens(tokens, 8, 77000);
    struct kvk_sequence_reply sealed =
        house_open(&party.house, party.sessions[0], second, tokens, 8);
    house_seal(&party.house, party.sessions[0], sealed.sequence_id, 8);
    cr_assert_eq(party_try_open(&party, 0, 19, 3, &reply), KVK_OK);
    house_tokens(tokens, 8, 18000);
    const struct kvk_pin_request request = {.session_id = party.sessions[0],
                                            .space_id = party.spaces[0],
                                            .prompt = {.tokens = tokens, .token_count = 8},
                                            .ttl_ms = 600000};
    cr_assert_eq(kvk_lease_pin(party.house.cache, &party.house.caller, &request, &pinned, NULL,
                               &party.house.error),
                 KVK_OK);
    uint64_t written = write_all(&party, 0);
    uint64_t written_by_other = write_all(&party, 1);
    files_keep(&party, 0, &files);
    files_keep(&party, 1, &others);
    cr_assert_eq(files_scan(&files, pattern_of(0)), written);
    uint64_t device = party_blocks(&party, 0, DEVICE) * BLOCK;
    uint64_t host = party_blocks(&party, 0, HOST) * BLOCK;
    cr_assert_gt(device, 0);
    cr_assert_gt(host, 0);

    cr_assert_eq(forget(&party, 0, &counts), KVK_OK, "%s", party.house.error.text);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(counts.bytes[DEVICE], device);
    cr_assert_eq(counts.bytes[HOST], host);
    cr_assert_eq(counts.instances, 1);
    cr_assert_eq(counts.sequences, 2);
    cr_assert_eq(counts.leases, 1);
    cr_assert_eq(counts.spaces, 2);
    cr_assert_eq(counts.left_bytes, 0);
    cr_assert_eq(counts.writers, 0);
    cr_assert_eq(party_blocks(&party, 0, DEVICE) + party_blocks(&party, 0, HOST), 0);
    cr_assert_eq(files_scan(&files, pattern_of(0)), 0, "no byte is left in any file of it");
    cr_assert_eq(party.house.cache->tiers[HOST].guaranteed_bytes, 0, "nor a guarantee");

    cr_assert_gt(party.house.cache->journal.counts[KVK_GONE_FORGOTTEN], 0);
    cr_assert_eq(party.house.cache->mrcs.count, 1, "nor what was learned of it");

    cr_assert_eq(files_scan(&others, pattern_of(1)), written_by_other);
    cr_assert_eq(party_cached(&party, 1, 0, 10), 10);
    for (const struct kvk_space *space = party.house.cache->spaces; space != NULL;
         space = space->next) {
        cr_assert(space->tenant == party_tenant(&party, 1));
    }
    cr_assert_eq(party_try_open(&party, 0, 1, 1, &reply), KVK_NOT_FOUND, "its session is over");

    cr_assert_eq(forget(&party, 0, &counts), KVK_OK, "again: there is nothing");
    cr_assert_eq(counts.spaces + counts.instances + counts.bytes[HOST], 0);
    files_close(&files);
    files_close(&others);
    party_stop(&party);
}

/* Its place may be given to another tenant: it begins with nothing. */
Test(forget, its_place_in_the_tables_is_free)
{
    struct party party;
    struct kvk_forget_counts counts;
    party_init(&party, 2);
    party_quota(&party, 0)->limit_bytes[DEVICE] = 4 * BLOCK;
    party_start(&party, 32, 0);
    fill(&party, 0, 10);
    cr_assert_gt(party_usage(&party, 0).sealed_blocks, 0);
    cr_assert_eq(forget(&party, 0, &counts), KVK_OK);
    uint32_t index = party_tenant(&party, 0)->index;
    const struct kvk_tenant_state *state = &party.house.cache->tenant_states[index];
    cr_assert(state->tenant == NULL);
    cr_assert_eq(state->quota.limit_bytes[DEVICE], 0);
    cr_assert_eq(state->usage.sealed_blocks, 0);
    party_stop(&party);
}

Test(forget, a_live_writer_is_waited_for_and_named)
{
    struct party party;
    struct files files;
    struct kvk_forget_counts counts;
    struct kvk_sequence_reply reply;
    struct kvk_welcome welcome;
    uint8_t side[KVK_TOKEN_SIZE];
    party_init(&party, 2);
    party_start(&party, 0, 64);
    party_be(&party, 0);
    const struct kvk_hello hello = house_hello();
    welcome = house_begin(&party.house, &hello);
    memcpy(side, welcome.side_token, sizeof(side));
    uint64_t session_id = 0;
    int pidfd = -1;
    cr_assert_eq(kvk_side_bind(party.house.cache, side, (int32_t)getpid(), (uint32_t)geteuid(),
                               &session_id, &pidfd),
                 KVK_OK);
    (void)close(pidfd);
    const struct kvk_map_request map = {.session_id = welcome.session_id,
                                        .kind = KVK_MAP_SLOTS,
                                        .space_id = party.spaces[0],
                                        .tier = HOST};
    struct kvk_map_reply mapped;
    cr_assert_eq(
        kvk_session_map(party.house.cache, &party.house.caller, &map, &mapped, &party.house.error),
        KVK_OK, "%s", party.house.error.text);
    int fds[2];
    cr_assert_eq(kvk_side_take(party.house.cache, session_id, mapped.map_token, fds), KVK_OK);
    party.sessions[0] = welcome.session_id;
    fill(&party, 0, 10);
    cr_assert_eq(party_try_open(&party, 0, 100, 3, &reply), KVK_OK); /* granted, not sealed */
    (void)write_all(&party, 0);
    files_keep(&party, 0, &files);

    cr_assert_eq(forget(&party, 0, &counts), KVK_UNAVAILABLE);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_QUARANTINE);
    cr_assert_gt(party.house.error.retry_after_ms, 0);
    cr_assert_eq(counts.writers, 1);
    cr_assert_eq(counts.writer_pid, (int32_t)getpid());
    cr_assert_eq(counts.left_bytes, 3 * BLOCK, "what was granted to the live process");
    cr_assert_leq(files_scan(&files, pattern_of(0)), 3 * BLOCK, "all else has gone: %llu",
                  (unsigned long long)files_scan(&files, pattern_of(0)));
    kvk_cache_check(party.house.cache);

    /* The process ends. */
    kvk_lock(&party.house.cache->lock);
    struct kvk_session *session =
        kvk_table_get(&party.house.cache->session_table, welcome.session_id);
    cr_assert_not_null(session);
    session->process_gone = true;
    kvk_unlock(&party.house.cache->lock);
    kvk_side_closed(party.house.cache, welcome.session_id);
    cr_assert_eq(forget(&party, 0, &counts), KVK_OK, "%s", party.house.error.text);
    cr_assert_eq(counts.spaces, 1);
    cr_assert_eq(files_scan(&files, pattern_of(0)), 0);
    (void)close(fds[0]);
    (void)close(fds[1]);
    files_close(&files);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(forget, who_may_not_block_is_sent_back)
{
    struct party party;
    struct kvk_forget_counts counts;
    party_init(&party, 1);
    party_start(&party, 32, 0);
    fill(&party, 0, 4);
    party.house.caller.may_block = false;
    cr_assert_eq(forget(&party, 0, &counts), KVK_WOULD_BLOCK);
    party.house.caller.may_block = true;
    cr_assert_eq(party_cached(&party, 0, 0, 4), 4);
    party_stop(&party);
}
