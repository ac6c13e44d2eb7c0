#include "daemon/mrc.h"

#include <stdlib.h>

#include "base/assert.h"
#include "daemon/cache_internal.h"

#define OFFER_MASK 7U /* one key in eight is offered */
#define HALF_LIFE_NS (6 * 3600 * KVK_NS_PER_SECOND)
/* A followed reference takes about 300 ns: so many a second are a hundredth of the time. */
#define FOLLOWED_PER_SECOND UINT64_C(33000)

/* ---- Who is followed ---- */

enum kvk_status kvk_mrcs_init(struct kvk_mrcs *mrcs, const struct kvk_config *config)
{
    *mrcs = (struct kvk_mrcs){.count_max = config->mrc_samples == 0 ? 0 : config->mrc_tenants};
    if (mrcs->count_max == 0) {
        return KVK_OK;
    }
    mrcs->list = calloc(mrcs->count_max, sizeof(*mrcs->list));
    mrcs->of_tenant = calloc(KVK_TENANT_COUNT_MAX, sizeof(*mrcs->of_tenant));
    if (mrcs->list == NULL || mrcs->of_tenant == NULL) {
        kvk_mrcs_finish(mrcs);
        return KVK_EXHAUSTED;
    }
    return KVK_OK;
}

void kvk_mrcs_finish(struct kvk_mrcs *mrcs)
{
    for (uint32_t i = 0; i < mrcs->count_max && mrcs->list != NULL; i++) {
        kvk_shards_destroy(mrcs->list[i].shards);
    }
    free(mrcs->list);
    free(mrcs->of_tenant);
    *mrcs = (struct kvk_mrcs){0};
}

uint64_t kvk_mrcs_bytes(const struct kvk_mrcs *mrcs)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < mrcs->count_max; i++) {
        bytes += mrcs->list[i].shards != NULL ? kvk_shards_bytes(mrcs->list[i].shards) : 0;
    }
    return bytes;
}

static struct kvk_mrc *mrc_of(const struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    const struct kvk_mrcs *mrcs = &cache->mrcs;
    uint32_t place = mrcs->count_max == 0 ? 0 : mrcs->of_tenant[tenant->index];
    if (place == 0 || mrcs->list[place - 1].tenant_id != tenant->id) {
        return NULL;
    }
    return &mrcs->list[place - 1];
}

void kvk_mrc_begin(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_mrcs *mrcs = &cache->mrcs;
    if (mrcs->count_max == 0 || mrc_of(cache, tenant) != NULL || mrcs->count == mrcs->count_max) {
        return;
    }
    uint32_t place = 0;
    while (mrcs->list[place].shards != NULL) {
        place++;
    }
    struct kvk_mrc *mrc = &mrcs->list[place];
    if (kvk_shards_create(cache->config->mrc_samples, 1.0 / (OFFER_MASK + 1), &mrc->shards) !=
        KVK_OK) {
        return; /* the next space of its tries again */
    }
    mrc->tenant_id = tenant->id;
    mrc->aged_ns = kvk_clock_now(cache->clock);
    mrc->followed = 0;
    mrcs->of_tenant[tenant->index] = place + 1;
    mrcs->count++;
}

void kvk_mrc_end(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_mrc *mrc = mrc_of(cache, tenant);
    if (mrc != NULL) {
        kvk_shards_destroy(mrc->shards);
        *mrc = (struct kvk_mrc){0};
        cache->mrcs.of_tenant[tenant->index] = 0;
        cache->mrcs.count--;
    }
}

/* ---- References ---- */

uint32_t kvk_mrc_group(const struct kvk_space *space)
{
    for (uint32_t g = 0; g < space->group_count; g++) {
        if (!space->groups[g]->windowed) {
            return g;
        }
    }
    return 0;
}

/* A boundary is a hit where all groups agree, so a block stands for that of each group. */
static uint64_t position_bytes(const struct kvk_space *space)
{
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        bytes += space->groups[g]->block_bytes;
    }
    return bytes;
}

static void refer(struct kvk_shards *shards, struct kvk_key key, uint64_t bytes,
                  enum kvk_shards_kind kind)
{
    uint32_t hash = (uint32_t)(key.high >> (64 - KVK_SHARDS_HASH_BITS));
    if ((key.low & OFFER_MASK) == 0 && hash < kvk_shards_threshold(shards)) {
        kvk_shards_refer(shards, key, hash, bytes, kind);
    }
}

void kvk_mrc_opened(struct kvk_cache *cache, const struct kvk_sequence *sequence)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_space *space = sequence->space;
    const struct kvk_mrc *mrc = mrc_of(cache, space->tenant);
    if (mrc == NULL) {
        return;
    }
    const struct kvk_sequence_group *table = &sequence->groups[kvk_mrc_group(space)];
    uint64_t bytes = position_bytes(space);
    uint64_t known = 0;
    /* Deepest first, as eviction counts them: a parent is always used after its children. */
    for (uint64_t i = sequence->cached / space->block_tokens; i > 0; i--) {
        if (table->blocks[i - 1] == KVK_BLOCK_NONE) {
            continue; /* outside the window: not asked for */
        }
        const struct kvk_block *block = kvk_index_block(cache->index, table->blocks[i - 1]);
        if (block->run != UINT32_MAX) { /* else invalidated meanwhile */
            refer(mrc->shards, block->key, bytes, KVK_SHARDS_KNOWN);
            known++;
        }
    }
    kvk_shards_count(mrc->shards, KVK_SHARDS_KNOWN, known);
}

void kvk_mrc_sealed(struct kvk_cache *cache, const struct kvk_sequence *sequence, uint64_t first,
                    uint64_t end)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_space *space = sequence->space;
    const struct kvk_mrc *mrc = mrc_of(cache, space->tenant);
    const struct kvk_sequence_group *table = &sequence->groups[kvk_mrc_group(space)];
    if (mrc == NULL || table->detached || table->cursor.blocks != end) {
        return; /* what is not in the chain has no key */
    }
    uint64_t bytes = position_bytes(space);
    uint32_t id = table->cursor.block;
    uint64_t asked = 0;
    for (uint64_t i = end; i > first; i--) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        bool is_asked = i <= sequence->asked_blocks;
        refer(mrc->shards, block->key, bytes, is_asked ? KVK_SHARDS_NEW : KVK_SHARDS_PUT);
        asked += is_asked ? 1 : 0;
        id = block->parent;
    }
    kvk_shards_count(mrc->shards, KVK_SHARDS_NEW, asked);
}

/* ---- Keeping to the budget ---- */

void kvk_mrc_maintain(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_mrcs *mrcs = &cache->mrcs;
    uint64_t now_ns = kvk_clock_now(cache->clock);
    uint64_t passed_ns = now_ns - mrcs->maintained_ns;
    uint64_t followed = 0;
    struct kvk_mrc *most = NULL;
    uint64_t most_followed = 0;
    for (uint32_t i = 0; i < mrcs->count_max; i++) {
        struct kvk_mrc *mrc = &mrcs->list[i];
        if (mrc->shards == NULL) {
            continue;
        }
        struct kvk_shards_stats stats;
        kvk_shards_stats(mrc->shards, &stats);
        uint64_t here = stats.followed - mrc->followed;
        mrc->followed = stats.followed;
        followed += here;
        if (here > most_followed) {
            most = mrc;
            most_followed = here;
        }
        while (now_ns - mrc->aged_ns >= HALF_LIFE_NS) {
            mrc->aged_ns += HALF_LIFE_NS;
            kvk_shards_age(mrc->shards, 0.5);
        }
    }
    bool is_too_much = mrcs->maintained_ns != 0 &&
                       (double)followed > (double)FOLLOWED_PER_SECOND * (double)passed_ns / 1e9;
    /* A round too short to judge by is judged with the next. */
    if (is_too_much && followed > FOLLOWED_PER_SECOND / 20) {
        kvk_shards_halve(most->shards);
    }
    mrcs->maintained_ns = now_ns;
}
