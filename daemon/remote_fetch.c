/*
 * One prompt, from the question what the store has of it to blocks in host memory.
 *
 * The whole chain is asked for at once, in every layer group: what is here too, so that ancestors
 * are touched with their children, since the store evicts by its own rule. Where both together
 * have more than is here, and to fetch it is estimated to be quicker than to compute it, it comes
 * in rounds of bounded size, parents first: into loose slots, compared, checksummed, and only then,
 * under the lock, sealed and put into the index. The first gap ends it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "daemon/remote_internal.h"
#include "daemon/sidecar.h"
#include "index/content.h"

#define IN_STORE 0x80U /* beside the bits of tiers */
#define ITEMS_MAX 256U /* blocks of a round */
#define ROUND_PART 16U /* a round takes at most such a part of the tier */
#define TIERS_LOCAL ((1U << KVK_TIER_COUNT) - 1U)

_Static_assert((IN_STORE & TIERS_LOCAL) == 0, "the bit is apart");

/* What is known of a group's chain. */
struct chain {
    struct kvk_remote_space space;  /* with the generation */
    uint8_t *has;                   /* [blocks] tiers here, IN_STORE; ours, as the next ones */
    struct kvk_remote_block *asked; /* [blocks] */
    uint8_t *witnesses;             /* [blocks x witness_bytes] */
};

struct item {
    uint32_t group;
    uint32_t slot;
    uint64_t position;
    enum kvk_tier tier;
    bool good;
    uint8_t *narrow;                /* where its bytes come to; NULL: its slot */
    bool wrong;                     /* what lies there is not right, and never will be */
    struct kvk_remote_block *block; /* in its round's */
    uint8_t *witness;               /* as it came */
    uint64_t checksums[KVK_SHARD_COUNT_MAX];
};

struct round {
    struct item items[ITEMS_MAX];
    uint32_t count;
    uint64_t end;                    /* positions below it are done when the round is */
    struct kvk_remote_block *blocks; /* [count] by group; ours, as the next two */
    struct kvk_remote_piece *pieces;
    uint8_t *witnesses;
    uint8_t *narrow; /* blocks that come in a compact form, and are widened into their slots */
};

struct work {
    struct kvk_remote_job *job;
    struct kvk_remote_store *store;
    struct kvk_cache *cache;
    struct kvk_space *space;          /* referenced */
    struct kvk_remote_member *member; /* as long as the space is; its `fleet` with the lock */
    uint64_t number;                  /* the fleet's generation */
    uint64_t blocks;                  /* asked for */
    uint64_t local;                   /* of the prefix that is here */
    uint64_t boundary;                /* of what is here and in the store */
    uint32_t witness_bytes;
    struct chain chains[KVK_GROUP_COUNT_MAX];
    uint32_t *kept; /* [kept_count] blocks that came, held until the end; ours */
    uint32_t kept_count, kept_capacity;
};

/* ---- States that look-ups see ---- */

static void state_set(struct work *work, enum kvk_remote_use_state state)
{
    struct kvk_remote_recent *recent = work->job->recent;
    KVK_ASSERT(kvk_lock_held(&work->cache->lock));
    recent->state = (uint8_t)state;
    recent->changed_ns = kvk_clock_now(kvk_clock_monotonic());
}

static void end_as(struct work *work, enum kvk_remote_use_state state)
{
    kvk_lock(&work->cache->lock);
    work->store->stats.asks_failed += state == KVK_REMOTE_USE_FAILED ? 1 : 0;
    state_set(work, state);
    kvk_unlock(&work->cache->lock);
}

/* ---- Begin ---- */

static struct kvk_content content_of(const struct work *work, uint64_t blocks)
{
    const struct kvk_prompt *prompt = &work->job->prompt;
    return (struct kvk_content){
        .tokens = prompt->tokens,
        .token_count = blocks * work->space->block_tokens,
        .spans = prompt->spans,
        .span_count = prompt->span_count,
    };
}

/* The space as it was when it was asked for, and may share: nothing else is worth going on. */
static bool is_current(const struct work *work)
{
    uint64_t number;
    const struct kvk_remote_member *member = kvk_remote_member_of(work->cache, work->space);
    return member != NULL && work->space->generation == work->job->generation &&
           kvk_fleet_generation(member->fleet, &number) && number == work->number;
}

static bool space_take(struct work *work)
{
    struct kvk_cache *cache = work->cache;
    struct kvk_space *space = kvk_table_get(&cache->space_table, work->job->space_id);
    struct kvk_remote_member *member = space == NULL ? NULL : kvk_remote_member_of(cache, space);
    if (member == NULL || space->generation != work->job->generation ||
        !kvk_fleet_generation(member->fleet, &work->number)) {
        return false;
    }
    work->space = space;
    work->member = member;
    work->blocks = work->job->blocks;
    work->witness_bytes = kvk_fleet_witness_bytes(space->block_tokens);
    work->job->prompt.token_count = work->blocks * space->block_tokens;
    for (uint32_t g = 0; g < space->group_count; g++) {
        work->chains[g].space = member->groups[g];
        work->chains[g].space.generation = work->number;
    }
    space->reference_count++;
    return true;
}

static bool chains_allocate(struct work *work)
{
    bool enough = true;
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        struct chain *chain = &work->chains[g];
        chain->has = calloc(work->blocks, 1);
        chain->asked = calloc(work->blocks, sizeof(*chain->asked));
        chain->witnesses = malloc(work->blocks * work->witness_bytes);
        enough = enough && chain->has != NULL && chain->asked != NULL && chain->witnesses != NULL;
    }
    return enough;
}

static void work_end(struct work *work)
{
    struct kvk_cache *cache = work->cache;
    kvk_lock(&cache->lock);
    for (uint32_t i = work->kept_count; i > 0; i--) { /* children first */
        kvk_block_let_go(cache, work->kept[i - 1]);
    }
    KVK_ASSERT(work->space->reference_count > 0);
    work->space->reference_count--;
    pthread_cond_broadcast(&cache->changed);
    kvk_unlock(&cache->lock);
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        kvk_remote_space_finish(&work->chains[g].space);
        free(work->chains[g].has);
        free(work->chains[g].asked);
        free(work->chains[g].witnesses);
    }
    free(work->kept);
}

/* ---- Asking ---- */

/* Names and witnesses of all blocks, in all groups. */
static bool chains_walk(struct work *work)
{
    const struct kvk_prompt *prompt = &work->job->prompt;
    const struct kvk_content content = content_of(work, work->blocks);
    uint32_t block_tokens = work->space->block_tokens;
    struct kvk_fleet_chain *walk = NULL;
    struct kvk_error error;
    uint8_t *extra = malloc(kvk_content_size_max(block_tokens));
    if (extra == NULL || kvk_fleet_chain_create(&work->member->identity, &walk, &error) != KVK_OK) {
        free(extra);
        return false;
    }
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        struct chain *chain = &work->chains[g];
        struct kvk_fleet_link link;
        kvk_fleet_chain_root(walk, g, prompt->salt, prompt->salt_size, &link);
        for (uint64_t i = 0; i < work->blocks; i++) {
            size_t extra_size =
                content.span_count == 0
                    ? 0
                    : kvk_content_bytes(&content, i * block_tokens, block_tokens, extra);
            kvk_fleet_chain_next(walk, &link, content.tokens + i * block_tokens, extra, extra_size,
                                 &chain->asked[i].id, chain->witnesses + i * work->witness_bytes);
        }
    }
    kvk_fleet_chain_destroy(walk);
    free(extra);
    return true;
}

/* What is here of it. */
static void local_find(struct work *work)
{
    struct kvk_cache *cache = work->cache;
    struct kvk_space *space = work->space;
    struct kvk_prefix prefix;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    kvk_space_roots_find(cache, space, work->job->prompt.salt, work->job->prompt.salt_size, roots);
    kvk_prefix_find(cache, space, roots, &work->job->prompt, work->job->prompt.token_count,
                    &prefix);
    work->local = prefix.blocks;
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct chain *chain = &work->chains[g];
        memset(chain->has, 0, work->blocks);
        for (uint64_t i = 0; i < prefix.known[g]; i++) {
            chain->has[i] = cache->path_tiers[g][i] & TIERS_LOCAL;
        }
    }
}

/* What the store said of blocks that are here: they need not be sent, or have to be again. */
static void there_note(struct work *work)
{
    struct kvk_cache *cache = work->cache;
    struct kvk_space *space = work->space;
    const struct kvk_content content = content_of(work, work->blocks);
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    kvk_space_roots_find(cache, space, work->job->prompt.salt, work->job->prompt.salt_size, roots);
    for (uint32_t g = 0; g < space->group_count; g++) {
        if (roots[g] == KVK_ROOT_NONE) {
            continue;
        }
        struct kvk_match match = {
            .cursor = {.root = roots[g], .block = KVK_BLOCK_NONE},
            .path = cache->path[g],
            .path_capacity = work->blocks,
        };
        kvk_index_match(cache->index, &content, &match);
        for (uint64_t i = 0; i < match.path_count; i++) {
            uint8_t *flags = &work->store->flags[cache->path[g][i]];
            enum kvk_remote_result result = work->chains[g].asked[i].result;
            if (result == KVK_REMOTE_HIT) {
                *flags |= KVK_REMOTE_THERE;
            } else if (result < KVK_REMOTE_FULL) {
                *flags &= (uint8_t)~KVK_REMOTE_THERE;
            }
        }
    }
}

static void batch_fill(struct kvk_remote_batch *batch, const struct chain *chain, uint64_t first,
                       uint64_t end, bool chained)
{
    *batch = (struct kvk_remote_batch){
        .operation = KVK_REMOTE_EXISTS,
        .space = &chain->space,
        .blocks = chain->asked + first,
        .block_count = (uint32_t)(end - first),
        .chain = chained,
    };
}

/* One round trip. False: the store did not say. */
static bool ask(struct work *work)
{
    struct kvk_remote_batch batches[2 * KVK_GROUP_COUNT_MAX];
    uint32_t count = 0;
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        const struct chain *chain = &work->chains[g];
        bool windowed = work->space->groups[g]->windowed;
        uint64_t split = windowed ? work->blocks : work->local;
        if (split > 0) { /* a gap among what is here ends nothing */
            batch_fill(&batches[count++], chain, 0, split, false);
        }
        if (split < work->blocks) {
            batch_fill(&batches[count++], chain, split, work->blocks, true);
        }
    }
    kvk_remote_run(work->store, batches, count, work->cache->config->remote.ask_ms);
    uint64_t silent = 0;
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        struct chain *chain = &work->chains[g];
        for (uint64_t i = 0; i < work->blocks; i++) {
            enum kvk_remote_result result = chain->asked[i].result;
            chain->has[i] |= result == KVK_REMOTE_HIT ? (uint8_t)IN_STORE : 0;
            silent += i == work->local && result > KVK_REMOTE_FULL && result != KVK_REMOTE_SKIPPED
                          ? 1
                          : 0;
        }
    }
    return silent == 0; /* what comes next after what is here was answered */
}

/* ---- Is it worth it? ---- */

static bool is_wanted(const struct work *work, uint32_t g, uint64_t position)
{
    return (work->chains[g].has[position] & TIERS_LOCAL) == 0 &&
           kvk_group_sees(work->space->groups[g], work->boundary, position);
}

static void estimate(const struct work *work, uint64_t *fetch_ns, uint64_t *recompute_ns)
{
    const struct kvk_space *space = work->space;
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        for (uint64_t i = 0; i < work->boundary; i++) {
            bytes += is_wanted(work, g, i) ? kvk_remote_stored_bytes(space->groups[g]) : 0;
        }
    }
    *fetch_ns = kvk_remote_fetch_ns(work->store, bytes);
    *recompute_ns = kvk_space_recompute_ns(space, work->local * space->block_tokens,
                                           work->boundary * space->block_tokens);
}

/* The boundary of both together, and whether to go on. The verdict is the prompt's state. */
static enum kvk_remote_use_state judge(struct work *work)
{
    const uint8_t *has[KVK_GROUP_COUNT_MAX];
    uint64_t fetch_ns = 0;
    uint64_t recompute_ns = 0;
    enum kvk_remote_use_state state = KVK_REMOTE_USE_ABSENT;
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        has[g] = work->chains[g].has;
    }
    work->boundary = kvk_boundary_find(work->space, has, work->blocks);
    if (work->boundary > work->local) {
        estimate(work, &fetch_ns, &recompute_ns);
        bool is_left = recompute_ns != 0 && fetch_ns >= recompute_ns;
        state = is_left ? KVK_REMOTE_USE_LEFT : KVK_REMOTE_USE_FETCHING;
    }
    kvk_lock(&work->cache->lock);
    struct kvk_remote_stats *stats = &work->store->stats;
    stats->ask_hits += work->boundary > work->local ? 1 : 0;
    stats->recomputes += state == KVK_REMOTE_USE_LEFT ? 1 : 0;
    stats->fetches += state == KVK_REMOTE_USE_FETCHING ? 1 : 0;
    work->job->recent->blocks = work->boundary;
    work->job->recent->fetch_ns = fetch_ns;
    work->job->recent->recompute_ns = recompute_ns;
    state_set(work, state);
    there_note(work);
    kvk_unlock(&work->cache->lock);
    return state;
}

/* ---- A round: slots ---- */

static bool target_of(const struct kvk_group *group, enum kvk_tier *tier)
{
    *tier = group->tiers[KVK_TIER_HOST].present ? KVK_TIER_HOST : KVK_TIER_DEVICE;
    return group->tiers[*tier].present && group->tiers[*tier].regions[0].fd >= 0;
}

/* A slot as for anything that is computed: idle blocks that are worth less may go for it. */
static bool slot_get_drops(struct work *work, struct kvk_group *group, enum kvk_tier tier,
                           uint32_t *slot)
{
    struct kvk_cache *cache = work->cache;
    const struct kvk_caller quiet = {
        .may_block = true,
        .deadline_ns =
            kvk_clock_now(kvk_clock_monotonic()) + cache->config->remote.fetch_ms * KVK_NS_PER_MS,
    };
    for (;;) {
        struct kvk_error error;
        enum kvk_status status = kvk_room_slot(cache, group, tier, &quiet, slot, &error);
        if (status != KVK_WOULD_BLOCK) {
            return status == KVK_OK;
        }
        struct kvk_room_want want = {.tier = tier};
        want.counts[group->index] = 1;
        if (kvk_room_make_drops(cache, work->space, &want, &quiet, &error) != KVK_OK ||
            work->store->stopping) {
            return false;
        }
    }
}

static uint64_t round_bytes_max(const struct work *work, enum kvk_tier tier)
{
    uint64_t part = work->cache->tiers[tier].pool.limit_bytes / ROUND_PART;
    uint64_t batch = work->cache->config->remote.batch_bytes;
    return part < batch ? part : batch;
}

static void round_give(struct work *work, struct round *round, uint32_t first)
{
    for (uint32_t i = first; i < round->count; i++) {
        struct item *item = &round->items[i];
        kvk_slot_give(work->cache, work->space->groups[item->group], item->tier, item->slot);
    }
    round->count = first;
}

/* Slots for the next positions from `next` on: a position with all its groups, or not at all.
 * False: there is no room. */
static bool round_begin(struct work *work, struct round *round, uint64_t next)
{
    struct kvk_cache *cache = work->cache;
    const struct kvk_space *space = work->space;
    uint64_t bytes = 0;
    bool enough = true;
    round->count = 0;
    kvk_lock(&cache->lock);
    while (next < work->boundary && enough) {
        uint32_t before = round->count;
        if (before + space->group_count > ITEMS_MAX) {
            break;
        }
        for (uint32_t g = 0; g < space->group_count && enough; g++) {
            struct kvk_group *group = space->groups[g];
            struct item *item = &round->items[round->count];
            if (!is_wanted(work, g, next)) {
                continue;
            }
            *item = (struct item){.group = g, .position = next};
            enough = target_of(group, &item->tier) &&
                     (bytes == 0 || bytes + group->forms[item->tier].block_bytes <=
                                        round_bytes_max(work, item->tier)) &&
                     slot_get_drops(work, group, item->tier, &item->slot);
            bytes += group->forms[item->tier].block_bytes;
            round->count += enough ? 1 : 0;
        }
        if (!enough) {
            round_give(work, round, before);
            break;
        }
        next++;
    }
    kvk_unlock(&cache->lock);
    round->end = next;
    return round->count > 0;
}

/* ---- A round: bytes ---- */

static bool round_allocate(struct work *work, struct round *round)
{
    uint64_t pieces = 0;
    KVK_ASSERT(round->count > 0);
    uint64_t narrow_bytes = 0;
    for (uint32_t i = 0; i < round->count; i++) {
        const struct kvk_group *group = work->space->groups[round->items[i].group];
        bool converts = kvk_remote_converts(group, round->items[i].tier);
        pieces += 1 + group->shard_count;
        narrow_bytes += converts ? kvk_remote_form(group)->block_bytes : 0;
    }
    round->narrow = narrow_bytes > 0 ? malloc(narrow_bytes) : NULL;
    round->blocks = calloc(round->count, sizeof(*round->blocks));
    round->pieces = calloc(pieces, sizeof(*round->pieces));
    round->witnesses = malloc((size_t)round->count * work->witness_bytes);
    return round->blocks != NULL && round->pieces != NULL && round->witnesses != NULL &&
           (round->narrow != NULL || narrow_bytes == 0);
}

static void round_free(struct round *round)
{
    free(round->blocks);
    free(round->pieces);
    free(round->witnesses);
    free(round->narrow);
    round->narrow = NULL;
    round->blocks = NULL;
    round->pieces = NULL;
    round->witnesses = NULL;
}

/* Where one block's bytes go: its witness apart, its shards into its slot. How many pieces. */
static uint32_t item_pieces(const struct work *work, struct item *item,
                            struct kvk_remote_piece *pieces)
{
    const struct kvk_group *group = work->space->groups[item->group];
    const struct kvk_tier_form *form = kvk_remote_form(group);
    uint8_t *narrow = item->narrow;
    pieces[0] = (struct kvk_remote_piece){item->witness, work->witness_bytes};
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        pieces[1 + shard] = (struct kvk_remote_piece){
            narrow != NULL ? narrow : kvk_slot_address(group, item->tier, item->slot, shard),
            form->shard_bytes[shard]};
        narrow += narrow != NULL ? form->shard_bytes[shard] : 0;
    }
    return 1 + group->shard_count;
}

/* Of what a header alone does not show, so that nobody would ever send it again. */
static bool is_wrong(enum kvk_remote_result result)
{
    return result == KVK_REMOTE_NOT_OURS || result == KVK_REMOTE_TRUNCATED ||
           result == KVK_REMOTE_DAMAGED || result == KVK_REMOTE_FOREIGN ||
           result == KVK_REMOTE_OTHER_KEY;
}

/* The right value of a name is the right block only if it says so itself. */
static void item_judge(struct work *work, struct item *item, uint64_t *failed, uint64_t *forged)
{
    const struct kvk_group *group = work->space->groups[item->group];
    const uint8_t *witness =
        work->chains[item->group].witnesses + item->position * work->witness_bytes;
    if (item->block->result != KVK_REMOTE_HIT) {
        item->wrong = is_wrong(item->block->result);
        (*failed)++;
        return;
    }
    if (memcmp(item->witness, witness, work->witness_bytes) != 0) {
        item->wrong = true;
        (*forged)++;
        return;
    }
    const struct kvk_tier_form *form = kvk_remote_form(group);
    const uint8_t *narrow = item->narrow;
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        uint8_t *target = kvk_slot_address(group, item->tier, item->slot, shard);
        if (narrow != NULL) {
            kvk_tier_form_widen(form, &group->geometry, shard, narrow, target,
                                &item->checksums[shard]);
            narrow += form->shard_bytes[shard];
        } else {
            item->checksums[shard] = kvk_checksum(target, form->shard_bytes[shard]);
        }
    }
    item->good = true;
}

/* What is wrong goes, and what lies behind it in the chain, which is of no use without it: so that
 * right values can come, for a header that is right says nothing of the bytes behind it. */
static void wrong_drop(struct work *work, const struct round *round)
{
    struct kvk_remote_batch batches[KVK_GROUP_COUNT_MAX];
    uint32_t batch_count = 0;
    uint64_t first = work->boundary;
    for (uint32_t i = round->count; i > 0; i--) {
        first = round->items[i - 1].wrong ? round->items[i - 1].position : first;
    }
    for (uint32_t g = 0; g < work->space->group_count && first < work->boundary; g++) {
        batches[batch_count++] = (struct kvk_remote_batch){
            .operation = KVK_REMOTE_DROP,
            .space = &work->chains[g].space,
            .blocks = work->chains[g].asked + first,
            .block_count = (uint32_t)(work->boundary - first),
        };
    }
    if (batch_count > 0) {
        kvk_remote_run(work->store, batches, batch_count, work->cache->config->remote.ask_ms);
    }
}

static void round_fetch(struct work *work, struct round *round)
{
    struct kvk_remote_batch batches[KVK_GROUP_COUNT_MAX];
    uint32_t batch_count = 0;
    uint32_t done = 0;
    struct kvk_remote_piece *pieces = round->pieces;
    uint8_t *narrow = round->narrow;
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        uint32_t first = done;
        for (uint32_t i = 0; i < round->count; i++) {
            struct item *item = &round->items[i];
            if (item->group != g) {
                continue;
            }
            item->block = &round->blocks[done];
            item->witness = round->witnesses + (size_t)done * work->witness_bytes;
            if (kvk_remote_converts(work->space->groups[g], item->tier)) {
                item->narrow = narrow;
                narrow += kvk_remote_form(work->space->groups[g])->block_bytes;
            }
            uint32_t count = item_pieces(work, item, pieces);
            *item->block = (struct kvk_remote_block){
                .id = work->chains[g].asked[item->position].id,
                .pieces = pieces,
                .piece_count = count,
            };
            pieces += count;
            done++;
        }
        if (done > first) {
            batches[batch_count++] = (struct kvk_remote_batch){
                .operation = KVK_REMOTE_FETCH,
                .space = &work->chains[g].space,
                .blocks = round->blocks + first,
                .block_count = done - first, /* no chain: behind one that is wrong, too */
            };
        }
    }
    kvk_remote_run(work->store, batches, batch_count, work->cache->config->remote.fetch_ms);
}

/* ---- A round: putting in ---- */

static bool keep(struct work *work, uint32_t id)
{
    if (work->kept_count == work->kept_capacity) {
        uint32_t capacity = work->kept_capacity * 2 + ITEMS_MAX;
        uint32_t *grown = realloc(work->kept, capacity * sizeof(*grown));
        if (grown == NULL) {
            return false;
        }
        work->kept = grown;
        work->kept_capacity = capacity;
    }
    kvk_block_keep(work->cache, id);
    work->kept[work->kept_count++] = id;
    return true;
}

/* It is found from here on: its worth begins to count. */
static void admit(struct work *work, struct kvk_group *group, uint32_t id, uint64_t position)
{
    struct kvk_cache *cache = work->cache;
    kvk_evict_admit(cache->evict, kvk_index_block(cache->index, id),
                    kvk_space_block_cost(work->space, position), group->windowed, cache->stamp,
                    kvk_policy_now(cache));
    kvk_sidecar_block_changed(cache, group, id);
    kvk_block_settle(cache, id);
    kvk_disk_offer(cache, id, true);
}

/* Somebody has put the same block in meanwhile, or knew it without bytes in memory: it gets ours,
 * or ours is not needed. The block that counts. */
static uint32_t meet(struct work *work, struct kvk_group *group, uint32_t winner, uint32_t ours,
                     uint64_t position)
{
    struct kvk_cache *cache = work->cache;
    const struct kvk_block *known = kvk_index_block(cache->index, winner);
    bool has_slot = known->slot[KVK_TIER_DEVICE] != KVK_SLOT_NONE ||
                    known->slot[KVK_TIER_HOST] != KVK_SLOT_NONE;
    if (known->state == KVK_BLOCK_HOLLOW) {
        kvk_block_fill(cache, winner, ours);
        admit(work, group, winner, position);
        return winner;
    }
    if (!has_slot && kvk_block_is_whole(known)) {
        kvk_block_adopt(cache, winner, ours);
        return winner;
    }
    return ours;
}

/* The slot becomes a sealed block behind the cursor. False: it could not, and is given back. */
static bool item_land(struct work *work, struct item *item, struct kvk_cursor *cursor,
                      const struct kvk_content *content)
{
    struct kvk_cache *cache = work->cache;
    struct kvk_group *group = work->space->groups[item->group];
    uint32_t id = kvk_room_id_free(cache, group)
                      ? kvk_block_create(cache, group, item->tier, item->slot)
                      : KVK_BLOCK_NONE;
    if (id == KVK_BLOCK_NONE) {
        kvk_slot_give(cache, group, item->tier, item->slot);
        return false;
    }
    uint32_t winner = KVK_BLOCK_NONE;
    uint32_t landed = id;
    memcpy(kvk_block_checksums(cache, kvk_index_block(cache->index, id), item->tier),
           item->checksums, group->shard_count * sizeof(item->checksums[0]));
    kvk_block_seal(cache, id);
    enum kvk_status status = kvk_index_insert(cache->index, cursor, content, id, &winner);
    if (status == KVK_OK) {
        (void)kvk_metadata_extra_add(cache, group, id);
        kvk_events_tiers(cache, group, id, 0, kvk_index_block(cache->index, id)->tier_mask);
        admit(work, group, id, item->position);
    } else if (status == KVK_EXISTS) {
        kvk_index_anchor(cache->index, winner); /* filling it must not lose its place */
        landed = meet(work, group, winner, id, item->position);
        kvk_index_unanchor(cache->index, winner);
    }
    bool known = status == KVK_EXISTS && landed == id; /* ours is not needed */
    bool kept = status != KVK_EXHAUSTED && keep(work, known ? winner : landed);
    if (kept) {
        work->store->flags[known ? winner : landed] |= KVK_REMOTE_THERE;
        work->store->stats.fetched_blocks++;
        work->store->stats.fetched_bytes += kvk_remote_stored_bytes(group);
    }
    kvk_block_unpin(cache, landed, item->tier);
    kvk_block_release(cache, landed, false);
    return kept;
}

/* One position of a group: what came, or a place for what is elsewhere (public, or of before a
 * window). The cursor stands behind it. */
static bool step(struct work *work, uint32_t g, struct item *item, struct kvk_cursor *cursor,
                 const struct kvk_content *content)
{
    struct kvk_cache *cache = work->cache;
    uint32_t parent = cursor->block;
    if (parent != KVK_BLOCK_NONE) {
        kvk_index_anchor(cache->index, parent); /* making room must not take it */
    }
    bool done = item != NULL
                    ? item_land(work, item, cursor, content)
                    : kvk_room_id_free(cache, work->space->groups[g]) &&
                          kvk_block_know(cache, work->space->groups[g], cursor, content) == KVK_OK;
    if (parent != KVK_BLOCK_NONE) {
        kvk_index_unanchor(cache->index, parent);
        if (!done) {
            kvk_block_settle(cache, parent); /* a place that nobody needs goes */
        }
    }
    return done;
}

/* Where each group's chain stands before position `first`. */
static void cursors_find(const struct work *work, const uint32_t roots[KVK_GROUP_COUNT_MAX],
                         uint64_t first, struct kvk_cursor cursors[KVK_GROUP_COUNT_MAX])
{
    const struct kvk_content content = content_of(work, first);
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        struct kvk_match match = {
            .cursor = {.root = roots[g], .block = KVK_BLOCK_NONE},
            .path_capacity = first,
        };
        kvk_index_match(work->cache->index, &content, &match);
        cursors[g] = match.cursor;
    }
}

/* All of a position, in all groups. False: it ends here; what is left of the round is given back by
 * the caller from *next on. */
static bool position_land(struct work *work, struct round *round, uint64_t position, uint32_t *next,
                          struct kvk_cursor cursors[KVK_GROUP_COUNT_MAX],
                          const struct kvk_content *content)
{
    for (uint32_t i = *next; i < round->count && round->items[i].position == position; i++) {
        if (!round->items[i].good) {
            return false;
        }
    }
    for (uint32_t g = 0; g < work->space->group_count; g++) {
        struct item *item = NULL;
        if (*next < round->count && round->items[*next].position == position &&
            round->items[*next].group == g) {
            item = &round->items[(*next)++];
        }
        while (cursors[g].blocks < position + (item == NULL ? 1 : 0)) {
            if (!step(work, g, NULL, &cursors[g], content)) {
                if (item != NULL) { /* nobody else has its slot any more */
                    kvk_slot_give(work->cache, work->space->groups[g], item->tier, item->slot);
                }
                return false;
            }
        }
        if (item != NULL && !step(work, g, item, &cursors[g], content)) {
            return false;
        }
    }
    return true;
}

/* False: the first gap, or it was invalidated, or there is no room. */
static bool round_land(struct work *work, struct round *round, uint64_t first)
{
    struct kvk_cache *cache = work->cache;
    struct kvk_space *space = work->space;
    struct kvk_cursor cursors[KVK_GROUP_COUNT_MAX];
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    const struct kvk_content content = content_of(work, work->boundary);
    uint32_t next = 0;
    bool landed = false;
    kvk_lock(&cache->lock);
    if (!is_current(work)) {
        work->store->stats.overtaken += round->count;
    } else if (kvk_space_roots(cache, space, work->job->prompt.salt, work->job->prompt.salt_size,
                               roots, NULL) == KVK_OK) {
        cursors_find(work, roots, first, cursors);
        cache->stamp++;
        landed = true;
        for (uint64_t position = first; position < round->end && landed; position++) {
            landed = position_land(work, round, position, &next, cursors, &content);
            work->store->stats.fetched_tokens += landed ? space->block_tokens : 0;
        }
        for (uint32_t g = 0; g < space->group_count; g++) {
            uint32_t end = cursors[g].block;
            if (end != KVK_BLOCK_NONE &&
                kvk_index_block(cache->index, end)->state == KVK_BLOCK_HOLLOW) {
                kvk_block_settle(cache, end);
            }
        }
        kvk_space_roots_release(cache, space, roots);
    }
    round_give(work, round, next);
    kvk_unlock(&cache->lock);
    return landed;
}

/* ---- The whole ---- */

static bool round_run(struct work *work, struct round *round, uint64_t first)
{
    uint64_t failed = 0;
    uint64_t forged = 0;
    if (!round_allocate(work, round)) {
        kvk_lock(&work->cache->lock);
        round_give(work, round, 0);
        kvk_unlock(&work->cache->lock);
        round_free(round);
        return false;
    }
    round_fetch(work, round);
    for (uint32_t i = 0; i < round->count; i++) {
        item_judge(work, &round->items[i], &failed, &forged);
    }
    wrong_drop(work, round);
    bool landed = round_land(work, round, first);
    round_free(round);
    if (failed + forged > 0) {
        kvk_lock(&work->cache->lock);
        work->store->stats.fetch_failures += failed;
        work->store->stats.witness_failures += forged;
        kvk_unlock(&work->cache->lock);
        kvk_log(KVK_LOG_DEBUG, "remote_fetch_short", "space=%llu failed=%llu forged=%llu",
                (unsigned long long)work->job->space_id, (unsigned long long)failed,
                (unsigned long long)forged);
    }
    return landed;
}

static uint64_t first_wanted(const struct work *work, uint64_t position)
{
    for (; position < work->boundary; position++) {
        for (uint32_t g = 0; g < work->space->group_count; g++) {
            if (is_wanted(work, g, position)) {
                return position;
            }
        }
    }
    return position;
}

static void fetch(struct work *work)
{
    struct round *round = calloc(1, sizeof(*round));
    uint64_t next = first_wanted(work, 0);
    bool going = round != NULL;
    while (going && next < work->boundary) {
        if (!round_begin(work, round, next)) {
            kvk_lock(&work->cache->lock);
            work->store->stats.fetch_unroomed++;
            kvk_unlock(&work->cache->lock);
            break;
        }
        going = round_run(work, round, next);
        next = first_wanted(work, round->end);
    }
    free(round);
}

void kvk_remote_job_run(struct kvk_remote_job *job)
{
    struct kvk_cache *cache = job->store->cache;
    struct work *work = calloc(1, sizeof(*work));
    kvk_lock(&cache->lock);
    job->store->stats.asks++;
    if (work != NULL) {
        *work = (struct work){.job = job, .store = job->store, .cache = cache};
    }
    bool taken = work != NULL && space_take(work);
    if (!taken) {
        job->store->stats.asks_failed++;
        job->recent->state = KVK_REMOTE_USE_FAILED;
    }
    kvk_unlock(&cache->lock);
    if (!taken) {
        free(work);
        return;
    }
    bool ready = chains_allocate(work) && chains_walk(work);
    if (ready) {
        kvk_lock(&cache->lock);
        local_find(work);
        kvk_unlock(&cache->lock);
    }
    if (!ready || !ask(work)) {
        end_as(work, KVK_REMOTE_USE_FAILED);
    } else if (judge(work) == KVK_REMOTE_USE_FETCHING) {
        fetch(work);
        end_as(work, KVK_REMOTE_USE_DONE);
    }
    work_end(work);
    free(work);
}
