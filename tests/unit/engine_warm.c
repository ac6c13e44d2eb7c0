/*
 * Memory that outlives the daemon: a keeper process, daemons that are killed or stopped, and what
 * the next one finds. A daemon that dies is a child of the test, killed for real.
 */
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "daemon/process_watch.h"
#include "daemon/sidecar_internal.h"
#include "daemon/warm.h"
#include "hosttier/keeper.h"
#include "tests/engine_store.h"

#define BLOCK_TOKENS 4
#define BLOCK_BYTES 1024
#define CHAIN_BLOCKS 8
#define CHAIN_TOKENS (CHAIN_BLOCKS * BLOCK_TOKENS)

struct place {
    char folder[64];
    char socket[96];
    pid_t keeper;
    uint64_t device_bytes, host_bytes;
    uint32_t window;
    uint32_t blocks;
    struct shared *shared; /* with the daemons that die */
    struct house house;
    uint64_t space_id;
    uint64_t session_id;
};

/* What a daemon that died had to say before. */
struct shared {
    uint32_t generations[64];
    uint32_t slots[64];
    uint64_t numbers[16];
};

/* ---- The place ---- */

static void keeper_start(struct place *place)
{
    place->keeper = fork();
    cr_assert_geq(place->keeper, 0);
    if (place->keeper == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(kvk_keeper_main(place->socket, 60000));
    }
    for (int i = 0; i < 400 && access(place->socket, F_OK) != 0; i++) {
        house_sleep_ms(5);
    }
    house_sleep_ms(20);
}

static void keeper_kill(struct place *place)
{
    (void)kill(place->keeper, SIGKILL);
    (void)waitpid(place->keeper, NULL, 0);
    (void)unlink(place->socket);
}

static void place_init(struct place *place)
{
    memset(place, 0, sizeof(*place));
    (void)snprintf(place->folder, sizeof(place->folder), "/tmp/kvk-warm-XXXXXX");
    cr_assert_not_null(mkdtemp(place->folder));
    (void)snprintf(place->socket, sizeof(place->socket), "%s/keeper", place->folder);
    place->device_bytes = 64 * BLOCK_BYTES;
    place->host_bytes = 64 * BLOCK_BYTES;
    place->blocks = 4096;
    place->shared = mmap(NULL, sizeof(*place->shared), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(place->shared, MAP_FAILED);
    keeper_start(place);
}

static void place_finish(struct place *place)
{
    char command[128];
    keeper_kill(place);
    (void)snprintf(command, sizeof(command), "rm -rf %s", place->folder);
    cr_assert_eq(system(command), 0);
    (void)munmap(place->shared, sizeof(*place->shared));
}

static void daemon_start(struct place *place)
{
    struct kvk_geometry geometry = house_geometry();
    const struct house_options options = {.device_bytes = place->device_bytes,
                                          .host_bytes = place->host_bytes};
    house_init(&place->house);
    struct kvk_config *config = &place->house.config;
    (void)snprintf(config->durable_folder, sizeof(config->durable_folder), "%s/data",
                   place->folder);
    (void)snprintf(config->keeper_socket, sizeof(config->keeper_socket), "%s", place->socket);
    config->catalogue_bytes = UINT64_C(64) << 20;
    config->keeper = KVK_CONFIG_KEEPER_PROCESS;
    config->blocks = place->blocks;
    house_start(&place->house, &options);
    kvk_cache_check(place->house.cache);
    geometry.window = place->window;
    place->space_id = house_space_of(&place->house, &place->house.caller, "model", &geometry, 1);
    place->session_id = house_session(&place->house);
}

static void daemon_stop(struct place *place)
{
    house_stop(&place->house);
}

/* Run a daemon in a process of its own until it kills itself. */
static void daemon_die(struct place *place, void (*life)(struct place *place))
{
    pid_t pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        daemon_start(place);
        life(place);
        kvk_cache_check(place->house.cache);
        (void)kill(getpid(), SIGKILL);
    }
    int result = 0;
    cr_assert_eq(waitpid(pid, &result, 0), pid);
    cr_assert(WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL, "the daemon failed by itself");
}

static struct kvk_group *place_group(struct place *place)
{
    struct kvk_space *space = kvk_table_get(&place->house.cache->space_table, place->space_id);
    cr_assert_not_null(space);
    return space->groups[0];
}

/* ---- Chains: tokens say what the bytes must be ---- */

static void bytes_of(uint32_t first_token, uint8_t bytes[BLOCK_BYTES])
{
    struct kvk_random random;
    kvk_random_init(&random, first_token);
    kvk_random_fill(&random, bytes, BLOCK_BYTES);
}

static void chain_write(struct place *place, uint64_t sequence_id, const uint32_t *tokens,
                        uint64_t first_block, uint64_t blocks)
{
    for (uint64_t i = first_block; i < blocks; i++) {
        uint8_t bytes[BLOCK_BYTES];
        const struct kvk_write_piece piece = {
            .block = i, .data = bytes, .size_bytes = sizeof(bytes)};
        bytes_of(tokens[i * BLOCK_TOKENS], bytes);
        cr_assert_eq(kvk_sequence_write(place->house.cache, &place->house.caller, place->session_id,
                                        sequence_id, &piece, &place->house.error),
                     KVK_OK, "%s", place->house.error.text);
    }
}

/* Open, write, seal; the sequence stays open. */
static uint64_t chain_open(struct place *place, const uint32_t *tokens, uint64_t count)
{
    struct kvk_sequence_reply reply =
        house_open(&place->house, place->session_id, place->space_id, tokens, count);
    chain_write(place, reply.sequence_id, tokens, reply.cached_tokens / BLOCK_TOKENS,
                count / BLOCK_TOKENS);
    house_seal(&place->house, place->session_id, reply.sequence_id, count);
    return reply.sequence_id;
}

static void chain_put(struct place *place, uint32_t first, uint64_t count)
{
    uint32_t tokens[1024];
    house_tokens(tokens, count, first);
    house_close(&place->house, place->session_id, chain_open(place, tokens, count));
}

static const struct kvk_block *chain_block(struct place *place, uint64_t sequence_id, uint64_t i,
                                           uint32_t *id)
{
    struct kvk_cache *cache = place->house.cache;
    const struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_id);
    *id = sequence->groups[0].blocks[i];
    return kvk_index_block(cache->index, *id);
}

/* How many tokens of the chain are hit; every byte of them must be right. */
static uint64_t chain_read(struct place *place, uint32_t first, uint64_t count)
{
    uint32_t tokens[1024];
    house_tokens(tokens, count, first);
    struct kvk_sequence_reply reply;
    if (house_try_open(&place->house, place->session_id, place->space_id, tokens, count, &reply) !=
        KVK_OK) {
        return house_cached(&place->house, place->space_id, tokens, count);
    }
    for (uint64_t i = 0; i < reply.cached_tokens / BLOCK_TOKENS; i++) {
        uint8_t bytes[BLOCK_BYTES];
        uint32_t id;
        bytes_of(tokens[i * BLOCK_TOKENS], bytes);
        const struct kvk_block *block = chain_block(place, reply.sequence_id, i, &id);
        const uint8_t *found =
            kvk_block_address(place->house.cache, block, kvk_block_tier(block), 0);
        cr_assert_eq(memcmp(found, bytes, sizeof(bytes)), 0, "block %llu is not what was sealed",
                     (unsigned long long)i);
    }
    house_close(&place->house, place->session_id, reply.sequence_id);
    return reply.cached_tokens;
}

static struct kvk_restore_counts counts_of(struct place *place)
{
    struct kvk_restore_counts counts;
    kvk_warm_counts(place->house.cache, &counts);
    return counts;
}

/* ---- After a crash ---- */

static void life_of_one_chain(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    uint64_t sequence_id = chain_open(place, tokens, CHAIN_TOKENS);
    for (uint64_t i = 0; i < CHAIN_BLOCKS; i++) {
        uint32_t id;
        const struct kvk_block *block = chain_block(place, sequence_id, i, &id);
        place->shared->slots[i] = block->slot[KVK_TIER_DEVICE];
        place->shared->generations[i] =
            kvk_block_generation(place->house.cache, block, KVK_TIER_DEVICE);
    }
    place->shared->numbers[0] = sequence_id;
}

Test(engine_warm, what_was_sealed_is_hit_again_with_its_bytes)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.records, CHAIN_BLOCKS);
    cr_assert_eq(counts.blocks, CHAIN_BLOCKS);
    cr_assert_eq(counts.copies[KVK_TIER_DEVICE], CHAIN_BLOCKS);
    cr_assert_eq(counts.orphans + counts.wrong + counts.crowded + counts.duplicates, 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 1001, CHAIN_TOKENS), 0);
    /* They lie where they lay, and readers' generations hold. */
    const struct kvk_group_tier *at = &place_group(&place)->tiers[KVK_TIER_DEVICE];
    for (uint64_t i = 0; i < CHAIN_BLOCKS; i++) {
        uint32_t slot = place.shared->slots[i];
        cr_assert_neq(at->owners[slot], 0);
        cr_assert_eq(((const uint32_t *)(void *)at->generations.address)[slot],
                     place.shared->generations[i]);
    }
    /* A sequence of before is not known, and that is a plain answer. */
    struct kvk_close_reply reply;
    cr_assert_eq(kvk_sequence_close(place.house.cache, &place.house.caller, place.session_id,
                                    &place.shared->numbers[0], 1, &reply, &place.house.error),
                 KVK_NOT_FOUND);
    daemon_stop(&place);
    place_finish(&place);
}

static void life_that_reads(struct place *place)
{
    cr_assert_eq(chain_read(place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    chain_put(place, 2000, CHAIN_TOKENS);
}

Test(engine_warm, it_comes_back_time_and_again)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    for (int i = 0; i < 3; i++) {
        daemon_die(&place, life_that_reads);
    }
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 2000, CHAIN_TOKENS), CHAIN_TOKENS);
    kvk_cache_check(place.house.cache);
    daemon_stop(&place);
    place_finish(&place);
}

/* More than the device tier holds, so that blocks lie in both tiers. */
static void life_of_many_chains(struct place *place)
{
    for (uint32_t i = 0; i < 12; i++) {
        chain_put(place, 1000 * (i + 1), CHAIN_TOKENS);
    }
    kvk_cache_maintain(place->house.cache);
    place->shared->numbers[0] = place_group(place)->tier_blocks[KVK_TIER_HOST];
    place->shared->numbers[1] = place_group(place)->tier_blocks[KVK_TIER_DEVICE];
}

Test(engine_warm, both_tiers_come_back)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    cr_assert_gt(place.shared->numbers[0], 0);
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.copies[KVK_TIER_HOST], place.shared->numbers[0]);
    cr_assert_eq(counts.copies[KVK_TIER_DEVICE], place.shared->numbers[1]);
    for (uint32_t i = 0; i < 12; i++) {
        cr_assert_eq(chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS), CHAIN_TOKENS);
    }
    for (int i = 0; i < 4; i++) {
        kvk_cache_maintain(place.house.cache); /* takes none of it for strays */
    }
    for (uint32_t i = 0; i < 12; i++) {
        cr_assert_eq(chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS), CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

/* The oldest go first, also where they are older than the daemon. */
Test(engine_warm, the_order_of_uses_outlives_the_daemon)
{
    struct place place;
    place_init(&place);
    place.host_bytes = 0;
    place.device_bytes = 16 * BLOCK_BYTES;
    daemon_start(&place);
    chain_put(&place, 1000, CHAIN_TOKENS);
    house_sleep_ms(1100); /* uses are told apart by the second */
    chain_put(&place, 2000, CHAIN_TOKENS);
    house_sleep_ms(1100);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS); /* used again */
    daemon_stop(&place);
    daemon_start(&place);
    chain_put(&place, 3000, 2 * BLOCK_TOKENS);
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS), CHAIN_TOKENS);
    house_tokens(tokens, CHAIN_TOKENS, 2000);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS),
                 CHAIN_TOKENS - 2 * BLOCK_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- What does not come back ---- */

static void life_of_halves(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    struct kvk_sequence_reply reply =
        house_open(&place->house, place->session_id, place->space_id, tokens, CHAIN_TOKENS);
    chain_write(place, reply.sequence_id, tokens, 0, CHAIN_BLOCKS);
    house_seal(&place->house, place->session_id, reply.sequence_id, CHAIN_TOKENS);
    house_close(&place->house, place->session_id, reply.sequence_id);
    /* Written, but not sealed. */
    house_tokens(tokens, CHAIN_TOKENS, 2000);
    reply = house_open(&place->house, place->session_id, place->space_id, tokens, CHAIN_TOKENS);
    chain_write(place, reply.sequence_id, tokens, 0, CHAIN_BLOCKS);
    uint32_t id;
    const struct kvk_block *block = chain_block(place, reply.sequence_id, 0, &id);
    place->shared->slots[0] = block->slot[KVK_TIER_DEVICE];
    place->shared->generations[0] =
        kvk_block_generation(place->house.cache, block, KVK_TIER_DEVICE);
}

Test(engine_warm, what_was_not_sealed_is_free)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_halves);
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 2000, CHAIN_TOKENS), 0);
    const struct kvk_cache *cache = place.house.cache;
    cr_assert_eq(cache->tiers[KVK_TIER_DEVICE].used_bytes, CHAIN_BLOCKS * BLOCK_BYTES);
    cr_assert_eq(cache->tiers[KVK_TIER_DEVICE].quarantine_bytes, 0);
    /* Whoever reads it without a pin sees that it is another's now. */
    const struct kvk_group_tier *at = &place_group(&place)->tiers[KVK_TIER_DEVICE];
    cr_assert_gt(((const uint32_t *)(void *)at->generations.address)[place.shared->slots[0]],
                 place.shared->generations[0]);
    daemon_stop(&place);
    place_finish(&place);
}

static void life_of_invalidation(struct place *place)
{
    chain_put(place, 1000, CHAIN_TOKENS);
    struct kvk_invalidate_reply reply;
    const struct kvk_invalidate_request request = {.space_id = place->space_id};
    cr_assert_eq(kvk_invalidate(place->house.cache, &place->house.caller, &request, &reply,
                                &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    chain_put(place, 2000, CHAIN_TOKENS);
}

Test(engine_warm, what_was_invalidated_stays_so)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_invalidation);
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    cr_assert_eq(chain_read(&place, 2000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, without_the_keeper_the_start_is_cold)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    keeper_kill(&place);
    keeper_start(&place);
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).records, 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    chain_put(&place, 1000, CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* The keeper is killed while the daemon serves: it goes on, keeps nothing, and says so. */
Test(engine_warm, a_keeper_that_dies_is_missed_by_nobody)
{
    struct place place;
    place_init(&place);
    daemon_start(&place);
    chain_put(&place, 1000, CHAIN_TOKENS);
    keeper_kill(&place);
    const struct kvk_geometry geometry = house_geometry();
    uint64_t other = house_space_of(&place.house, &place.house.caller, "other", &geometry, 1);
    cr_assert_neq(other, place.space_id);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    keeper_start(&place);
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).records, 0);
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- A planned restart ---- */

Test(engine_warm, a_daemon_that_was_stopped_comes_back_warm)
{
    struct place place;
    place_init(&place);
    daemon_start(&place);
    life_of_many_chains(&place);
    daemon_stop(&place);
    daemon_start(&place);
    for (uint32_t i = 0; i < 12; i++) {
        cr_assert_eq(chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS), CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

static uint32_t keeper_count(struct place *place)
{
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = place->socket, .hold_ms = 60000};
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK, "%s", error.text);
    uint32_t count = kvk_keeper_count(keeper);
    kvk_keeper_disconnect(keeper);
    return count;
}

/* ---- Another configuration ---- */

Test(engine_warm, a_smaller_tier_takes_what_fits)
{
    struct place place;
    place_init(&place);
    place.host_bytes = 0;
    daemon_die(&place, life_of_one_chain);
    place.device_bytes = 5 * BLOCK_BYTES;
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).crowded, CHAIN_BLOCKS - 5);
    cr_assert_eq(place.house.cache->tiers[KVK_TIER_DEVICE].used_bytes, 5 * BLOCK_BYTES);
    uint64_t blocks = 0; /* of the chain's beginning, in slots that there still are */
    while (place.shared->slots[blocks] < 5) {
        blocks++;
    }
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS),
                 blocks * BLOCK_TOKENS);
    chain_put(&place, 7000, 5 * BLOCK_TOKENS);
    daemon_stop(&place);
    /* As large as before again: the slots that had no place are not what they were. */
    place.device_bytes = 64 * BLOCK_BYTES;
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 7000, 5 * BLOCK_TOKENS), 5 * BLOCK_TOKENS);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    chain_put(&place, 1000, CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, a_larger_tier_begins_cold)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    place.host_bytes = 128 * BLOCK_BYTES; /* the device tier stays as it was */
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.copies[KVK_TIER_HOST], 0);
    cr_assert_eq(counts.copies[KVK_TIER_DEVICE], place.shared->numbers[1]);
    for (uint32_t i = 0; i < 12; i++) {
        (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
        chain_put(&place, 100000 + 1000 * i, CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, a_tier_that_is_no_more_lets_go_of_its_files)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    cr_assert_eq(keeper_count(&place), 5); /* a sidecar, and slots and generations of two tiers */
    place.host_bytes = 0;
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).copies[KVK_TIER_DEVICE], place.shared->numbers[1]);
    cr_assert_eq(counts_of(&place).copies[KVK_TIER_HOST], 0);
    daemon_stop(&place);
    cr_assert_eq(keeper_count(&place), 3);
    place_finish(&place);
}

Test(engine_warm, fewer_blocks_may_be_known_than_there_were)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    place.blocks = 20;
    daemon_start(&place);
    cr_assert_leq(counts_of(&place).blocks, 20);
    cr_assert_gt(counts_of(&place).crowded, 0);
    for (uint32_t i = 0; i < 12; i++) {
        (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- Salts, contents, windows ---- */

static uint64_t salted_cached(struct place *place, const char *salt,
                              const struct kvk_content_span *span)
{
    uint32_t tokens[CHAIN_TOKENS];
    struct kvk_lookup_reply reply;
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    const struct kvk_lookup_request request = {.space_id = place->space_id,
                                               .prompt = {.tokens = tokens,
                                                          .token_count = CHAIN_TOKENS,
                                                          .salt = (const uint8_t *)salt,
                                                          .salt_size = strlen(salt),
                                                          .spans = span,
                                                          .span_count = span == NULL ? 0 : 1}};
    cr_assert_eq(
        kvk_lookup(place->house.cache, &place->house.caller, &request, &reply, &place->house.error),
        KVK_OK);
    return reply.cached_tokens;
}

static void salted_put(struct place *place, const char *salt, const struct kvk_content_span *span)
{
    uint32_t tokens[CHAIN_TOKENS];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    const struct kvk_open_request request = {.session_id = place->session_id,
                                             .space_id = place->space_id,
                                             .prompt = {.tokens = tokens,
                                                        .token_count = CHAIN_TOKENS,
                                                        .salt = (const uint8_t *)salt,
                                                        .salt_size = strlen(salt),
                                                        .spans = span,
                                                        .span_count = span == NULL ? 0 : 1},
                                             .tier = -1};
    cr_assert_eq(kvk_sequence_open(place->house.cache, &place->house.caller, &request, &reply,
                                   &tables, &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    kvk_tables_finish(&tables);
    house_seal(&place->house, place->session_id, reply.sequence_id, CHAIN_TOKENS);
    house_close(&place->house, place->session_id, reply.sequence_id);
}

static const struct kvk_content_span image = {
    .first = 6, .count = 9, .digest_size = 16, .digest = {1, 2, 3}};

static void life_of_salts(struct place *place)
{
    char longest[256];
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    salted_put(place, "alice", NULL);
    salted_put(place, "bob", &image);
    salted_put(place, longest, NULL);
}

Test(engine_warm, salts_and_contents_come_back_and_stay_apart)
{
    struct place place;
    struct kvk_content_span other = image;
    char longest[256];
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    other.digest[0] = 9;
    place_init(&place);
    daemon_die(&place, life_of_salts);
    daemon_start(&place);
    cr_assert_eq(salted_cached(&place, "alice", NULL), CHAIN_TOKENS);
    cr_assert_eq(salted_cached(&place, "bob", &image), CHAIN_TOKENS);
    cr_assert_eq(salted_cached(&place, longest, NULL), CHAIN_TOKENS);
    cr_assert_eq(salted_cached(&place, "bob", &other), BLOCK_TOKENS);
    cr_assert_eq(salted_cached(&place, "bob", NULL), BLOCK_TOKENS);
    cr_assert_eq(salted_cached(&place, "alice", &image), BLOCK_TOKENS);
    cr_assert_eq(salted_cached(&place, "", NULL), 0);
    daemon_stop(&place);
    place_finish(&place);
}

/* A block whose content does not fit beside its tokens is not kept, and neither is what follows. */
static void life_of_a_long_content(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    struct kvk_content_span spans[4];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    for (uint32_t i = 0; i < 4; i++) {
        spans[i] = (struct kvk_content_span){.first = 12 + i, .count = 1, .digest_size = 64};
        spans[i].digest[0] = (uint8_t)i;
    }
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    const struct kvk_open_request request = {
        .session_id = place->session_id,
        .space_id = place->space_id,
        .prompt = {.tokens = tokens, .token_count = CHAIN_TOKENS, .spans = spans, .span_count = 4},
        .tier = -1};
    cr_assert_eq(kvk_sequence_open(place->house.cache, &place->house.caller, &request, &reply,
                                   &tables, &place->house.error),
                 KVK_OK);
    kvk_tables_finish(&tables);
    house_seal(&place->house, place->session_id, reply.sequence_id, CHAIN_TOKENS);
    house_close(&place->house, place->session_id, reply.sequence_id);
    place->shared->numbers[0] = place->house.cache->stats.unkept_blocks;
    for (int i = 0; i < 3; i++) {
        kvk_cache_maintain(place->house.cache);
    }
    place->shared->numbers[1] = place->house.cache->stats.unkept_blocks;
}

Test(engine_warm, a_content_that_does_not_fit_is_counted_and_not_kept)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_a_long_content);
    cr_assert_eq(place.shared->numbers[0], 1);
    cr_assert_eq(place.shared->numbers[1], 1, "and not tried again");
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.blocks, 3);
    cr_assert_eq(counts.orphans, CHAIN_BLOCKS - 4);
    cr_assert_eq(place.house.cache->tiers[KVK_TIER_DEVICE].used_bytes, 3 * BLOCK_BYTES);
    daemon_stop(&place);
    place_finish(&place);
}

/* Under a window of 8 tokens only the last blocks have bytes; their ancestors come back hollow. */
static void life_under_a_window(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    chain_put(place, 1000, CHAIN_TOKENS);
    /* The pool is 10 blocks: another chain takes the oldest positions. */
    chain_put(place, 2000, 5 * BLOCK_TOKENS);
    place->shared->numbers[0] = house_cached(&place->house, place->space_id, tokens, CHAIN_TOKENS);
    place->shared->numbers[1] = place_group(place)->state_counts[KVK_BLOCK_HOLLOW];
}

Test(engine_warm, hollow_ancestors_come_back_hollow)
{
    struct place place;
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    place_init(&place);
    place.window = 8;
    place.host_bytes = 0;
    place.device_bytes = 10 * BLOCK_BYTES;
    daemon_die(&place, life_under_a_window);
    cr_assert_gt(place.shared->numbers[1], 0, "nothing was hollow");
    daemon_start(&place);
    cr_assert_eq(place_group(&place)->state_counts[KVK_BLOCK_HOLLOW], place.shared->numbers[1]);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS),
                 place.shared->numbers[0]);
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- Damage ---- */

/* The keeper's files, mapped as whoever can reach them would. */
struct kept_file {
    char name[KVK_KEEPER_NAME_SIZE];
    int fd;
};

struct kept_files {
    struct kept_file files[32];
    uint32_t count;
};

static void kept_visit(void *context, const char *name, int fd)
{
    struct kept_files *files = context;
    cr_assert_lt(files->count, 32);
    (void)snprintf(files->files[files->count].name, KVK_KEEPER_NAME_SIZE, "%s", name);
    files->files[files->count].fd = fd;
    files->count++;
}

static void kept_take(struct place *place, struct kept_files *files)
{
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = place->socket, .hold_ms = 60000};
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error;
    files->count = 0;
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK, "%s", error.text);
    cr_assert_eq(kvk_keeper_take(keeper, kept_visit, files, &error), KVK_OK);
    kvk_keeper_disconnect(keeper);
}

static void kept_close(struct kept_files *files)
{
    for (uint32_t i = 0; i < files->count; i++) {
        (void)close(files->files[i].fd);
    }
}

static int kept_find(const struct kept_files *files, const char *end)
{
    for (uint32_t i = 0; i < files->count; i++) {
        size_t size = strlen(files->files[i].name);
        if (size >= strlen(end) && strcmp(files->files[i].name + size - strlen(end), end) == 0) {
            return files->files[i].fd;
        }
    }
    cr_assert_fail("no such file");
    return -1;
}

static void byte_flip(int fd, off_t at)
{
    uint8_t byte = 0;
    cr_assert_eq(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
}

Test(engine_warm, a_flipped_bit_of_a_block_is_found_before_it_moves)
{
    struct place place;
    struct kept_files files;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    kept_take(&place, &files);
    byte_flip(kept_find(&files, "-0-0-0"), (off_t)place.shared->slots[5] * BLOCK_BYTES + 77);
    kept_close(&files);
    daemon_start(&place);
    struct kvk_cache *cache = place.house.cache;
    kvk_lock(&cache->lock);
    uint32_t id = place_group(&place)->tiers[KVK_TIER_DEVICE].owners[place.shared->slots[5]] - 1;
    kvk_block_hold(cache, id, false);
    cache->passing_holds++;
    cr_assert_eq(kvk_block_checksum_drops(cache, &id, 1, true, &place.house.error), KVK_DATA_LOSS);
    cache->passing_holds--;
    kvk_block_release(cache, id, false);
    kvk_unlock(&cache->lock);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 5 * BLOCK_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, a_flipped_bit_of_a_record_costs_that_record_and_what_hangs_from_it)
{
    struct place place;
    struct kept_files files;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    daemon_start(&place);
    uint64_t offset = kvk_sidecar_entry_offset(place_group(&place), 3) + 60;
    daemon_stop(&place);
    kept_take(&place, &files);
    byte_flip(kept_find(&files, "-side"), (off_t)offset);
    kept_close(&files);
    daemon_start(&place);
    cr_assert_eq(place.house.cache->stats.torn_records, 1);
    cr_assert_eq(counts_of(&place).orphans, CHAIN_BLOCKS - 4);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 3 * BLOCK_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* Any bytes anywhere in header, processes, words and entries: no crash, and no byte of another's.
 */
Test(engine_warm, whatever_stands_in_a_sidecar_no_wrong_byte_is_served, .timeout = 120)
{
    struct place place;
    struct kvk_random random;
    place_init(&place);
    kvk_random_init(&random, 20251129);
    for (int round = 0; round < 60; round++) {
        struct kept_files files;
        daemon_die(&place, life_of_many_chains);
        kept_take(&place, &files);
        int fd = kept_find(&files, "-side");
        off_t at = 0;
        uint32_t flips = 0;
        while (flips < 40 && (at = lseek(fd, at, SEEK_DATA)) >= 0) {
            for (uint64_t i = 0; i < 2 + kvk_random_below(&random, 6); i++) {
                uint64_t bytes = kvk_random_next(&random);
                size_t size = 1 + kvk_random_below(&random, 8);
                off_t place_at = at + (off_t)kvk_random_below(&random, round % 2 ? 4096 : 512);
                cr_assert_eq(pwrite(fd, &bytes, size, place_at), (ssize_t)size);
                flips++;
            }
            at += 4096;
        }
        kept_close(&files);
        daemon_start(&place);
        for (uint32_t i = 0; i < 12; i++) {
            (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
        }
        kvk_cache_check(place.house.cache);
        daemon_stop(&place);
    }
    place_finish(&place);
}

Test(engine_warm, files_that_are_no_regions_are_refused)
{
    struct place place;
    struct kvk_error error;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = place.socket, .hold_ms = 60000};
    struct kvk_keeper *keeper = NULL;
    struct kept_files files = {.count = 0};
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK);
    cr_assert_eq(kvk_keeper_take(keeper, kept_visit, &files, &error), KVK_OK);
    for (uint32_t i = 0; i < files.count; i++) {
        const char *name = files.files[i].name;
        if (strstr(name, "-0-0-0") != NULL) {
            /* Unsealed: it could be cut under the daemon. */
            int loose = memfd_create("loose", MFD_CLOEXEC);
            cr_assert_eq(ftruncate(loose, 1 << 20), 0);
            cr_assert_eq(kvk_keeper_drop(keeper, name, &error), KVK_OK);
            cr_assert_eq(kvk_keeper_put(keeper, name, loose, &error), KVK_OK);
            (void)close(loose);
        }
    }
    kept_close(&files);
    kvk_keeper_disconnect(keeper);
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).copies[KVK_TIER_DEVICE], 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    chain_put(&place, 1000, CHAIN_TOKENS);
    daemon_stop(&place);
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- Workers that live on ---- */

static pid_t worker_start(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    }
    while (pid == 0) {
        (void)pause();
    }
    return pid;
}

static void worker_end(pid_t pid)
{
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
}

/* A session of a process that is not the daemon's, which is given the slots to write. The
 * descriptors stay here: what counts is that it could have them. */
static uint64_t worker_session(struct place *place, pid_t pid)
{
    struct kvk_hello hello = house_hello();
    hello.pid = pid;
    struct kvk_welcome welcome = house_begin(&place->house, &hello);
    uint64_t session_id;
    int pidfd;
    int fds[2];
    cr_assert_eq(kvk_side_bind(place->house.cache, welcome.side_token, pid, (uint32_t)geteuid(),
                               &session_id, &pidfd),
                 KVK_OK);
    (void)close(pidfd);
    const struct kvk_map_request request = {.session_id = session_id,
                                            .kind = KVK_MAP_SLOTS,
                                            .space_id = place->space_id,
                                            .tier = KVK_TIER_DEVICE};
    struct kvk_map_reply reply;
    cr_assert_eq(kvk_session_map(place->house.cache, &place->house.caller, &request, &reply,
                                 &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    cr_assert_eq(kvk_side_take(place->house.cache, session_id, reply.map_token, fds), KVK_OK);
    return session_id;
}

static pid_t old_workers[2];

static void life_with_workers(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    chain_put(place, 1000, CHAIN_TOKENS);
    for (int i = 0; i < 2 && old_workers[i] != 0; i++) {
        place->session_id = worker_session(place, old_workers[i]);
    }
    house_tokens(tokens, CHAIN_TOKENS, 2000);
    struct kvk_sequence_reply reply =
        house_open(&place->house, place->session_id, place->space_id, tokens, CHAIN_TOKENS);
    for (uint64_t i = 0; i < CHAIN_BLOCKS; i++) {
        uint32_t id;
        place->shared->slots[i] =
            chain_block(place, reply.sequence_id, i, &id)->slot[KVK_TIER_DEVICE];
    }
}

static bool is_granted_away(struct place *place)
{
    const struct kvk_group_tier *at = &place_group(place)->tiers[KVK_TIER_DEVICE];
    for (uint64_t i = 0; i < CHAIN_BLOCKS; i++) {
        uint32_t owner = at->owners[place->shared->slots[i]];
        if (owner == 0 || (kvk_index_block(place->house.cache->index, owner - 1)->flags &
                           KVK_BLOCK_QUARANTINED) == 0) {
            return false;
        }
    }
    return true;
}

Test(engine_warm, what_an_old_worker_may_still_write_is_given_to_nobody)
{
    struct place place;
    place_init(&place);
    place.host_bytes = 0;
    place.device_bytes = 24 * BLOCK_BYTES;
    old_workers[0] = worker_start();
    old_workers[1] = worker_start();
    daemon_die(&place, life_with_workers);
    daemon_start(&place);
    struct kvk_cache *cache = place.house.cache;
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), CHAIN_BLOCKS * BLOCK_BYTES);
    cr_assert(is_granted_away(&place));
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    /* The pool is full of it: 24 - 8 slots are there for all else. */
    for (uint32_t i = 0; i < 10; i++) {
        chain_put(&place, 10000 + 1000 * i, CHAIN_TOKENS);
        kvk_cache_maintain(cache);
        cr_assert(is_granted_away(&place));
    }
    kvk_cache_check(cache);
    /* Both must be gone: one of them is not enough. */
    worker_end(old_workers[0]);
    for (int i = 0; i < 3; i++) {
        kvk_cache_maintain(cache);
    }
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), CHAIN_BLOCKS * BLOCK_BYTES);
    kvk_cache_check(cache);
    worker_end(old_workers[1]);
    for (int i = 0; i < 3; i++) {
        kvk_cache_maintain(cache);
    }
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(cache->waiting_sessions, NULL);
    kvk_cache_check(cache);
    daemon_stop(&place);
    place_finish(&place);
}

/* Still not after a second crash; and a daemon that stops waits for no old worker. */
static void life_of_nothing(struct place *place)
{
    cr_assert(is_granted_away(place));
}

Test(engine_warm, an_old_worker_outlives_several_daemons)
{
    struct place place;
    place_init(&place);
    old_workers[0] = worker_start();
    old_workers[1] = 0;
    daemon_die(&place, life_with_workers);
    daemon_die(&place, life_of_nothing);
    daemon_start(&place);
    cr_assert(is_granted_away(&place));
    daemon_stop(&place);
    daemon_start(&place);
    cr_assert(is_granted_away(&place));
    daemon_stop(&place);
    worker_end(old_workers[0]);
    daemon_start(&place);
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(place.house.cache->tiers[KVK_TIER_DEVICE].used_bytes, CHAIN_BLOCKS * BLOCK_BYTES);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, where_a_worker_is_gone_its_slots_are_free_at_once)
{
    struct place place;
    place_init(&place);
    old_workers[0] = worker_start();
    old_workers[1] = 0;
    daemon_die(&place, life_with_workers);
    worker_end(old_workers[0]);
    daemon_start(&place);
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* More is still being written than the configuration has blocks for: the group begins cold, with
 * files that no old worker has. */
Test(engine_warm, what_cannot_be_set_aside_is_left_behind)
{
    struct place place;
    place_init(&place);
    old_workers[0] = worker_start();
    old_workers[1] = 0;
    daemon_die(&place, life_with_workers);
    place.blocks = 12;
    daemon_start(&place);
    cr_assert_eq(house_quarantine(&place.house, KVK_TIER_DEVICE), 0);
    cr_assert_eq(counts_of(&place).records, 0);
    chain_put(&place, 5000, 4 * BLOCK_TOKENS);
    cr_assert_eq(chain_read(&place, 5000, 4 * BLOCK_TOKENS), 4 * BLOCK_TOKENS);
    daemon_stop(&place);
    worker_end(old_workers[0]);
    place_finish(&place);
}

Test(engine_warm, processes_are_known_by_number_and_start)
{
    int pidfd = -1;
    pid_t pid = worker_start();
    uint64_t start = kvk_process_start(pid);
    cr_assert_gt(start, 0);
    cr_assert_eq(kvk_process_look(pid, start, &pidfd), KVK_PROCESS_ALIVE);
    (void)close(pidfd);
    cr_assert_eq(kvk_process_look(pid, start + 1, &pidfd), KVK_PROCESS_GONE); /* another's number */
    (void)kill(pid, SIGKILL);
    siginfo_t info;
    cr_assert_eq(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
    cr_assert_eq(kvk_process_look(pid, start, &pidfd), KVK_PROCESS_GONE); /* not yet reaped */
    (void)waitpid(pid, NULL, 0);
    cr_assert_eq(kvk_process_look(pid, start, &pidfd), KVK_PROCESS_GONE);
}

/* ---- Killed anywhere ---- */

/* Random work until the parent kills it: chains of all lengths, under pressure in both tiers. */
static void life_at_random(struct place *place, uint64_t seed)
{
    struct kvk_random random;
    kvk_random_init(&random, seed);
    for (;;) {
        uint32_t first = 1000 * (uint32_t)(1 + kvk_random_below(&random, 24));
        uint64_t blocks = 1 + kvk_random_below(&random, CHAIN_BLOCKS);
        uint32_t tokens[CHAIN_TOKENS];
        house_tokens(tokens, CHAIN_TOKENS, first);
        if (kvk_random_chance(&random, 0.5)) {
            chain_put(place, first, blocks * BLOCK_TOKENS);
        } else if (kvk_random_chance(&random, 0.1)) {
            const struct kvk_invalidate_request request = {.space_id = place->space_id};
            struct kvk_invalidate_reply reply;
            cr_assert_eq(kvk_invalidate(place->house.cache, &place->house.caller, &request, &reply,
                                        &place->house.error),
                         KVK_OK);
        } else if (kvk_random_chance(&random, 0.3)) {
            kvk_cache_maintain(place->house.cache);
        } else {
            (void)chain_read(place, first, blocks * BLOCK_TOKENS);
        }
        place->shared->numbers[0]++;
    }
}

Test(engine_warm, killed_at_any_instruction_it_comes_back_with_right_bytes, .timeout = 300)
{
    struct place place;
    struct kvk_random random;
    uint64_t blocks = 0;
    place_init(&place);
    place.device_bytes = 40 * BLOCK_BYTES;
    place.host_bytes = 60 * BLOCK_BYTES;
    kvk_random_init(&random, 7);
    for (int round = 0; round < 100; round++) {
        place.shared->numbers[0] = 0;
        pid_t pid = fork();
        if (pid == 0) {
            daemon_start(&place);
            for (uint32_t i = 0; i < 24; i++) {
                (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
            }
            life_at_random(&place, (uint64_t)round);
        }
        int result;
        while (__atomic_load_n(&place.shared->numbers[0], __ATOMIC_RELAXED) == 0 &&
               waitpid(pid, &result, WNOHANG) == 0) {
            house_sleep_ms(1);
        }
        const struct timespec pause = {.tv_nsec = (long)kvk_random_below(&random, 12000000)};
        (void)nanosleep(&pause, NULL);
        (void)kill(pid, SIGKILL);
        cr_assert_eq(waitpid(pid, &result, 0), pid);
        cr_assert(WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL, "round %d failed", round);
        if (round % 10 == 9) {
            daemon_start(&place);
            blocks += counts_of(&place).blocks;
            kvk_cache_check(place.house.cache);
            daemon_stop(&place);
        }
    }
    cr_assert_gt(blocks, 0);
    place_finish(&place);
}
