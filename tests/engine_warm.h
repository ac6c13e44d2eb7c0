/*
 * Daemons that die and what the next one finds: a keeper process, a folder, engines in children
 * that are killed for real, and chains whose tokens say what their bytes must be.
 */
#ifndef KVK_TESTS_ENGINE_WARM_H
#define KVK_TESTS_ENGINE_WARM_H

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

static inline void keeper_start(struct place *place)
{
    place->keeper = fork();
    cr_assert_geq(place->keeper, 0);
    if (place->keeper == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(kvk_keeper_main(place->socket, 60000));
    }
    for (int i = 0; i < PATIENCE_MS / 5 && !unix_listens(place->socket); i++) {
        house_sleep_ms(5);
    }
}

static inline void keeper_kill(struct place *place)
{
    (void)kill(place->keeper, SIGKILL);
    (void)waitpid(place->keeper, NULL, 0);
    (void)unlink(place->socket);
}

static inline void place_init(struct place *place)
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

static inline void place_finish(struct place *place)
{
    char command[128];
    keeper_kill(place);
    (void)snprintf(command, sizeof(command), "rm -rf %s", place->folder);
    cr_assert_eq(system(command), 0);
    (void)munmap(place->shared, sizeof(*place->shared));
}

static inline void daemon_start(struct place *place)
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

static inline void daemon_stop(struct place *place)
{
    house_stop(&place->house);
}

/* Run a daemon in a process of its own until it kills itself. */
static inline void daemon_die(struct place *place, void (*life)(struct place *place))
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

static inline struct kvk_group *place_group(struct place *place)
{
    struct kvk_space *space = kvk_table_get(&place->house.cache->space_table, place->space_id);
    cr_assert_not_null(space);
    return space->groups[0];
}

/* ---- Chains: tokens say what the bytes must be ---- */

static inline void bytes_of(uint32_t first_token, uint8_t bytes[BLOCK_BYTES])
{
    struct kvk_random random;
    kvk_random_init(&random, first_token);
    kvk_random_fill(&random, bytes, BLOCK_BYTES);
}

static inline void chain_write(struct place *place, uint64_t sequence_id, const uint32_t *tokens,
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
static inline uint64_t chain_open(struct place *place, const uint32_t *tokens, uint64_t count)
{
    struct kvk_sequence_reply reply =
        house_open(&place->house, place->session_id, place->space_id, tokens, count);
    chain_write(place, reply.sequence_id, tokens, reply.cached_tokens / BLOCK_TOKENS,
                count / BLOCK_TOKENS);
    house_seal(&place->house, place->session_id, reply.sequence_id, count);
    return reply.sequence_id;
}

static inline void chain_put(struct place *place, uint32_t first, uint64_t count)
{
    uint32_t tokens[1024];
    house_tokens(tokens, count, first);
    house_close(&place->house, place->session_id, chain_open(place, tokens, count));
}

static inline const struct kvk_block *chain_block(struct place *place, uint64_t sequence_id,
                                                  uint64_t i, uint32_t *id)
{
    struct kvk_cache *cache = place->house.cache;
    const struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_id);
    *id = sequence->groups[0].blocks[i];
    return kvk_index_block(cache->index, *id);
}

/* How many tokens of the chain are hit; every byte of them must be right. */
static inline uint64_t chain_read(struct place *place, uint32_t first, uint64_t count)
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

static inline struct kvk_restore_counts counts_of(struct place *place)
{
    struct kvk_restore_counts counts;
    kvk_warm_counts(place->house.cache, &counts);
    return counts;
}

/* ---- Lives ---- */

static inline void life_of_one_chain(struct place *place)
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

/* More than the device tier holds, so that blocks lie in both tiers. */
static inline void life_of_many_chains(struct place *place)
{
    for (uint32_t i = 0; i < 12; i++) {
        chain_put(place, 1000 * (i + 1), CHAIN_TOKENS);
    }
    kvk_cache_maintain(place->house.cache);
    place->shared->numbers[0] = place_group(place)->tier_blocks[KVK_TIER_HOST];
    place->shared->numbers[1] = place_group(place)->tier_blocks[KVK_TIER_DEVICE];
}

#endif
