/* Blocks that the daemon's own work keeps for a moment: who needs their room waits, and no longer
 * than he must; who needs what others keep is refused at once. */
#include "daemon/upkeep.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>

#include "tests/engine_house.h"

#define BLOCKS 4 /* of the host tier, and of the chain */
#define TOKENS (BLOCKS * 4)

struct kept {
    struct house house;
    uint64_t session;
    uint64_t space;
    uint64_t sequence; /* holds the chain, which fills the tier */
    uint32_t blocks[BLOCKS];
};

static void kept_start(struct kept *kept)
{
    const struct kvk_geometry geometry = house_geometry();
    const struct house_options options = {
        .host_bytes = BLOCKS * kvk_geometry_block_bytes(&geometry), .threads = true};
    uint32_t tokens[TOKENS], count = 0;
    house_init(&kept->house);
    kept->house.config.scrub_bytes_per_second = 0;
    house_start(&kept->house, &options);
    kept->space = house_space(&kept->house, "m");
    kept->session = house_session(&kept->house);
    house_tokens(tokens, TOKENS, 1);
    kept->sequence =
        house_open(&kept->house, kept->session, kept->space, tokens, TOKENS).sequence_id;
    house_seal(&kept->house, kept->session, kept->sequence, TOKENS);
    struct kvk_cache *cache = kept->house.cache;
    kvk_lock(&cache->lock);
    for (uint32_t id = 0; id < kvk_index_block_id_end(cache->index); id++) {
        if (kvk_block_is_whole(kvk_index_block(cache->index, id))) {
            cr_assert_lt(count, BLOCKS);
            kept->blocks[count++] = id;
        }
    }
    kvk_unlock(&cache->lock);
    cr_assert_eq(count, BLOCKS);
}

static void kept_stop(struct kept *kept)
{
    kvk_session_end(kept->house.cache, kept->session);
    kvk_cache_check(kept->house.cache);
    house_stop(&kept->house);
}

static void borrow_all(struct kept *kept)
{
    kvk_lock(&kept->house.cache->lock);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        kvk_upkeep_borrow(kept->house.cache, kept->blocks[i], KVK_TIER_HOST);
    }
    kvk_unlock(&kept->house.cache->lock);
}

static void return_all(struct kept *kept)
{
    kvk_lock(&kept->house.cache->lock);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        kvk_upkeep_return(kept->house.cache, kept->blocks[i], KVK_TIER_HOST);
    }
    kvk_unlock(&kept->house.cache->lock);
}

static bool keeps_room(struct kept *kept)
{
    kvk_lock(&kept->house.cache->lock);
    bool keeps = kvk_upkeep_keeps_room(kept->house.cache);
    kvk_unlock(&kept->house.cache->lock);
    return keeps;
}

/* ---- Another thread, that needs the room ---- */

struct opener {
    struct kept *kept;
    enum kvk_status status;
    uint64_t sequence;
    _Atomic bool done;
};

static void *open_other(void *context)
{
    struct opener *opener = context;
    uint32_t tokens[TOKENS];
    struct kvk_sequence_reply reply;
    house_tokens(tokens, TOKENS, 1000);
    opener->status = house_try_open(&opener->kept->house, opener->kept->session,
                                    opener->kept->space, tokens, TOKENS, &reply);
    opener->sequence = reply.sequence_id;
    atomic_store(&opener->done, true);
    return NULL;
}

Test(upkeep, who_needs_the_room_waits_for_it, .timeout = 290)
{
    struct kept kept;
    kept_start(&kept);
    cr_assert_not(keeps_room(&kept));
    borrow_all(&kept);
    cr_assert_not(keeps_room(&kept), "the sequence keeps them too");
    house_close(&kept.house, kept.session, kept.sequence);
    cr_assert(keeps_room(&kept));

    struct opener opener = {.kept = &kept};
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, open_other, &opener), 0);
    house_sleep_ms(100);
    cr_assert_not(atomic_load(&opener.done), "it waits");
    return_all(&kept);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(opener.status, KVK_OK, "%s", kept.house.error.text);
    cr_assert_not(keeps_room(&kept));
    house_close(&kept.house, kept.session, opener.sequence);
    kept_stop(&kept);
}

/* What a sequence keeps as well would not be free afterwards. */
Test(upkeep, who_needs_what_others_keep_is_refused, .timeout = 290)
{
    struct kept kept;
    kept_start(&kept);
    borrow_all(&kept);
    struct opener opener = {.kept = &kept};
    (void)open_other(&opener);
    cr_assert_eq(opener.status, KVK_EXHAUSTED);
    return_all(&kept);
    house_close(&kept.house, kept.session, kept.sequence);
    kept_stop(&kept);
}

/* Two works at once: both keep it, and nobody else does. */
Test(upkeep, kept_twice)
{
    struct kept kept;
    kept_start(&kept);
    borrow_all(&kept);
    borrow_all(&kept);
    cr_assert_not(keeps_room(&kept));
    house_close(&kept.house, kept.session, kept.sequence);
    cr_assert(keeps_room(&kept));
    return_all(&kept);
    cr_assert(keeps_room(&kept));
    return_all(&kept);
    cr_assert_not(keeps_room(&kept));
    kept_stop(&kept);
}

static void lasting_all(struct kept *kept,
                        void (*with)(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier))
{
    kvk_lock(&kept->house.cache->lock);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        with(kept->house.cache, kept->blocks[i], KVK_TIER_HOST);
    }
    kvk_unlock(&kept->house.cache->lock);
}

/* What a disk takes its time for is waited for a while; and beside brief work each is told apart.
 */
Test(upkeep, what_lasts_is_waited_for_a_while, .timeout = 290)
{
    struct kept kept;
    kept_start(&kept);
    struct kvk_cache *cache = kept.house.cache;
    lasting_all(&kept, kvk_upkeep_borrow_lasting);
    house_close(&kept.house, kept.session, kept.sequence);
    cr_assert(keeps_room(&kept));
    kvk_lock(&cache->lock);
    cr_assert_not(kvk_upkeep_keeps_room_briefly(cache));
    kvk_unlock(&cache->lock);
    borrow_all(&kept);
    return_all(&kept);
    cr_assert(keeps_room(&kept), "the lasting ones are there still");

    struct opener opener = {.kept = &kept};
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, open_other, &opener), 0);
    house_sleep_ms(100);
    cr_assert_not(atomic_load(&opener.done), "it waits");
    lasting_all(&kept, kvk_upkeep_return_lasting);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(opener.status, KVK_OK, "%s", kept.house.error.text);
    house_close(&kept.house, kept.session, opener.sequence);
    kept_stop(&kept);
}

/* A disk that hangs may hang for ever. */
Test(upkeep, what_hangs_is_not_waited_for, .timeout = 290)
{
    struct kept kept;
    kept_start(&kept);
    lasting_all(&kept, kvk_upkeep_borrow_lasting);
    house_close(&kept.house, kept.session, kept.sequence);
    uint64_t begun = kvk_clock_now(kvk_clock_monotonic());
    struct opener opener = {.kept = &kept};
    (void)open_other(&opener);
    cr_assert_eq(opener.status, KVK_EXHAUSTED);
    cr_assert_geq(kvk_clock_now(kvk_clock_monotonic()) - begun, KVK_UPKEEP_LASTING_NS / 2);
    cr_assert_not(keeps_room(&kept));
    lasting_all(&kept, kvk_upkeep_return_lasting);
    kept_stop(&kept);
}
