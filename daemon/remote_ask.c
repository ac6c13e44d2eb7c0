/*
 * Asking: what look-ups say they miss, and what they are told.
 *
 * A look-up copies its prompt into a ring of bytes and goes on; an asker takes it from there. What
 * came of it is remembered for a while under the prompt's fingerprint, so that who looks up again
 * is told, and the store is not asked again at once.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "daemon/remote_internal.h"

#define AGAIN_NS KVK_NS_PER_SECOND /* before the store is asked for the same prompt again */
#define PROBES 8U                  /* places of the table that a prompt may be in */
#define ALIGN 8U

_Static_assert((KVK_REMOTE_RECENT & (KVK_REMOTE_RECENT - 1)) == 0, "places are a mask");

const char *kvk_remote_use_name(enum kvk_remote_use_state state)
{
    static const char *const names[KVK_REMOTE_USE_STATE_COUNT] = {
        [KVK_REMOTE_USE_NONE] = "none",         [KVK_REMOTE_USE_ASKED] = "asked",
        [KVK_REMOTE_USE_FETCHING] = "fetching", [KVK_REMOTE_USE_DONE] = "done",
        [KVK_REMOTE_USE_ABSENT] = "absent",     [KVK_REMOTE_USE_LEFT] = "left",
        [KVK_REMOTE_USE_FAILED] = "failed",     [KVK_REMOTE_USE_BUSY] = "busy",
    };
    return names[state];
}

/* ---- Life ---- */

enum kvk_status kvk_remote_asks_create(struct kvk_remote_store *store, struct kvk_error *error)
{
    const struct kvk_remote_config *config = &store->cache->config->remote;
    store->ask_capacity = config->ask_queue;
    store->ask_size = config->ask_bytes / ALIGN * ALIGN;
    store->asks = calloc(store->ask_capacity, sizeof(*store->asks));
    store->ask_bytes = malloc(store->ask_size);
    store->recent = calloc(KVK_REMOTE_RECENT, sizeof(*store->recent));
    return store->asks != NULL && store->ask_bytes != NULL && store->recent != NULL
               ? KVK_OK
               : kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                          "no memory for the remote store");
}

void kvk_remote_asks_destroy(struct kvk_remote_store *store)
{
    free(store->asks);
    free(store->ask_bytes);
    free(store->recent);
}

/* ---- Recent prompts ---- */

static bool is_under_way(const struct kvk_remote_recent *recent)
{
    return recent->state == KVK_REMOTE_USE_ASKED || recent->state == KVK_REMOTE_USE_FETCHING;
}

static uint64_t mixed(uint64_t sum, uint64_t value)
{
    sum = (sum ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return sum ^ sum >> 32;
}

/* Finds what was remembered, and decides nothing: two prompts that had the same one would but be
 * told of each other. */
static void fingerprint(const struct kvk_space *space, const struct kvk_prompt *prompt,
                        uint64_t blocks, uint64_t result[2])
{
    uint64_t tokens = blocks * space->block_tokens;
    uint64_t sum = kvk_checksum(prompt->tokens, tokens * sizeof(*prompt->tokens));
    sum = mixed(sum, tokens);
    sum = mixed(sum, prompt->salt_size);
    sum = prompt->salt_size == 0 ? sum : mixed(sum, kvk_checksum(prompt->salt, prompt->salt_size));
    for (uint32_t i = 0; i < prompt->span_count && prompt->spans[i].first < tokens; i++) {
        const struct kvk_content_span *span = &prompt->spans[i];
        sum = mixed(sum, span->first);
        sum = mixed(sum, span->count);
        sum = mixed(sum, kvk_checksum(span->digest, span->digest_size));
    }
    result[0] = sum;
    result[1] = mixed(space->generation, space->id) | 1U;
}

static struct kvk_remote_recent *recent_find(const struct kvk_remote_store *store,
                                             const uint64_t print[2])
{
    for (uint32_t i = 0; i < PROBES; i++) {
        struct kvk_remote_recent *recent = &store->recent[(print[0] + i) & (KVK_REMOTE_RECENT - 1)];
        if (recent->fingerprint[0] == print[0] && recent->fingerprint[1] == print[1]) {
            return recent;
        }
    }
    return NULL;
}

/* The oldest of its places; NULL: all are of prompts that are under way. */
static struct kvk_remote_recent *recent_place(const struct kvk_remote_store *store,
                                              const uint64_t print[2])
{
    struct kvk_remote_recent *oldest = NULL;
    for (uint32_t i = 0; i < PROBES; i++) {
        struct kvk_remote_recent *recent = &store->recent[(print[0] + i) & (KVK_REMOTE_RECENT - 1)];
        if (!is_under_way(recent) && (oldest == NULL || recent->changed_ns < oldest->changed_ns)) {
            oldest = recent;
        }
    }
    return oldest;
}

static void tell(const struct kvk_space *space, const struct kvk_prefix *prefix,
                 const struct kvk_remote_recent *recent, struct kvk_remote_use *use)
{
    use->state = (enum kvk_remote_use_state)recent->state;
    use->fetch_ns = recent->fetch_ns;
    use->recompute_ns = recent->recompute_ns;
    use->tokens = recent->blocks > prefix->blocks
                      ? (recent->blocks - prefix->blocks) * space->block_tokens
                      : 0;
}

/* ---- The ring ---- */

/* Room for `size` bytes in one piece: where, as a number of the ring's. False: there is none. */
static bool room_take(struct kvk_remote_store *store, uint64_t size, uint64_t *start)
{
    uint64_t place = store->ask_head % store->ask_size;
    uint64_t skip = place + size > store->ask_size ? store->ask_size - place : 0;
    if (size > store->ask_size ||
        store->ask_head + skip + size - store->ask_tail > store->ask_size) {
        return false;
    }
    *start = store->ask_head + skip;
    store->ask_head = *start + size;
    return true;
}

static uint64_t aligned(uint64_t size)
{
    return (size + ALIGN - 1) / ALIGN * ALIGN;
}

static uint8_t *ring_at(const struct kvk_remote_store *store, uint64_t number)
{
    return store->ask_bytes + number % store->ask_size;
}

/* False: so many wait already. */
static bool ask_add(struct kvk_remote_store *store, const struct kvk_space *space,
                    const struct kvk_prompt *prompt, uint64_t blocks,
                    struct kvk_remote_recent *recent)
{
    uint64_t tokens = blocks * space->block_tokens;
    uint32_t spans = 0;
    while (spans < prompt->span_count && prompt->spans[spans].first < tokens) {
        spans++;
    }
    uint64_t token_size = aligned(tokens * sizeof(*prompt->tokens));
    uint64_t span_size = aligned(spans * sizeof(*prompt->spans));
    uint64_t start;
    if (store->ask_count == store->ask_capacity ||
        !room_take(store, token_size + span_size + aligned(prompt->salt_size), &start)) {
        return false;
    }
    struct kvk_remote_ask_entry *entry =
        &store->asks[(store->ask_first + store->ask_count) % store->ask_capacity];
    *entry = (struct kvk_remote_ask_entry){
        .space_id = space->id,
        .generation = space->generation,
        .recent = (uint32_t)(recent - store->recent),
        .span_count = spans,
        .blocks = blocks,
        .token_offset = start,
        .span_offset = start + token_size,
        .salt_offset = start + token_size + span_size,
        .salt_size = prompt->salt_size,
        .end = store->ask_head,
        .use_public = prompt->use_public,
    };
    memcpy(ring_at(store, entry->token_offset), prompt->tokens, tokens * sizeof(*prompt->tokens));
    if (spans > 0) {
        memcpy(ring_at(store, entry->span_offset), prompt->spans, spans * sizeof(*prompt->spans));
    }
    if (prompt->salt_size > 0) {
        memcpy(ring_at(store, entry->salt_offset), prompt->salt, prompt->salt_size);
    }
    store->ask_count++;
    store->asks_waiting++;
    pthread_cond_signal(&store->ask_wake);
    return true;
}

/* ---- Look-ups ---- */

/* Blocks that may be asked for; 0: it is not worth asking. */
static uint64_t blocks_asked(const struct kvk_cache *cache, const struct kvk_space *space,
                             uint64_t token_limit, const struct kvk_prefix *prefix)
{
    const struct kvk_remote_store *store = cache->remote;
    uint64_t blocks = token_limit / space->block_tokens;
    uint64_t fit = store->ask_size / 2 / (space->block_tokens * sizeof(uint32_t));
    blocks = blocks < fit ? blocks : fit;
    blocks = blocks < cache->path_capacity ? blocks : cache->path_capacity;
    blocks = blocks < KVK_REMOTE_BLOCKS_MAX ? blocks : KVK_REMOTE_BLOCKS_MAX;
    uint64_t missing = blocks > prefix->blocks ? blocks - prefix->blocks : 0;
    bool enough =
        missing > 0 && missing * space->block_tokens >= cache->config->remote.fetch_tokens;
    return enough ? blocks : 0;
}

void kvk_remote_known(struct kvk_cache *cache, const struct kvk_space *space,
                      const struct kvk_prompt *prompt, uint64_t token_limit,
                      const struct kvk_prefix *prefix, struct kvk_remote_use *use)
{
    *use = (struct kvk_remote_use){.state = KVK_REMOTE_USE_NONE};
    if (kvk_remote_member_of(cache, space) == NULL) {
        return;
    }
    uint64_t blocks = blocks_asked(cache, space, token_limit, prefix);
    uint64_t print[2];
    if (blocks > 0) {
        fingerprint(space, prompt, blocks, print);
        const struct kvk_remote_recent *recent = recent_find(cache->remote, print);
        if (recent != NULL) {
            tell(space, prefix, recent, use);
        }
    }
}

void kvk_remote_ask(struct kvk_cache *cache, struct kvk_space *space,
                    const struct kvk_prompt *prompt, uint64_t token_limit,
                    const struct kvk_prefix *prefix, struct kvk_remote_use *use)
{
    struct kvk_remote_store *store = cache->remote;
    *use = (struct kvk_remote_use){.state = KVK_REMOTE_USE_NONE};
    if (kvk_remote_member_of(cache, space) == NULL) {
        return;
    }
    uint64_t blocks = blocks_asked(cache, space, token_limit, prefix);
    if (blocks == 0) {
        return;
    }
    uint64_t print[2];
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    fingerprint(space, prompt, blocks, print);
    struct kvk_remote_recent *recent = recent_find(store, print);
    if (recent != NULL && (is_under_way(recent) || now_ns - recent->changed_ns < AGAIN_NS)) {
        tell(space, prefix, recent, use);
        return;
    }
    recent = recent != NULL ? recent : recent_place(store, print);
    if (recent == NULL || !ask_add(store, space, prompt, blocks, recent)) {
        store->stats.asks_dropped++;
        use->state = KVK_REMOTE_USE_BUSY;
        return;
    }
    *recent = (struct kvk_remote_recent){
        .fingerprint = {print[0], print[1]},
        .changed_ns = now_ns,
        .state = KVK_REMOTE_USE_ASKED,
    };
    use->state = KVK_REMOTE_USE_ASKED;
}

/* ---- Askers ---- */

static struct kvk_remote_ask_entry *ask_take(struct kvk_remote_store *store)
{
    for (uint32_t i = 0; i < store->ask_count; i++) {
        struct kvk_remote_ask_entry *entry =
            &store->asks[(store->ask_first + i) % store->ask_capacity];
        if (!entry->taken) {
            entry->taken = true;
            store->asks_waiting--;
            return entry;
        }
    }
    return NULL;
}

/* What is done leaves the rings, in their order. */
static void asks_leave(struct kvk_remote_store *store)
{
    while (store->ask_count > 0 && store->asks[store->ask_first].done) {
        store->ask_tail = store->asks[store->ask_first].end;
        store->ask_first = (store->ask_first + 1) % store->ask_capacity;
        store->ask_count--;
    }
}

void *kvk_remote_asker_main(void *argument)
{
    struct kvk_remote_store *store = argument;
    struct kvk_cache *cache = store->cache;
    (void)pthread_setname_np(pthread_self(), "kvk-remote-ask");
    kvk_lock(&cache->lock);
    while (!store->stopping) {
        struct kvk_remote_ask_entry *entry = ask_take(store);
        if (entry == NULL) {
            (void)kvk_condition_wait(&store->ask_wake, &cache->lock, UINT64_MAX);
            continue;
        }
        struct kvk_remote_job job = {
            .store = store,
            .space_id = entry->space_id,
            .generation = entry->generation,
            .blocks = entry->blocks,
            .recent = &store->recent[entry->recent],
            .prompt =
                {
                    .tokens = (const uint32_t *)(const void *)ring_at(store, entry->token_offset),
                    .spans = (const struct kvk_content_span *)(const void *)ring_at(
                        store, entry->span_offset),
                    .span_count = entry->span_count,
                    .salt = ring_at(store, entry->salt_offset),
                    .salt_size = entry->salt_size,
                    .use_public = entry->use_public,
                },
        };
        kvk_unlock(&cache->lock);
        kvk_remote_job_run(&job);
        kvk_lock(&cache->lock);
        KVK_ASSERT(!is_under_way(job.recent));
        entry->done = true;
        asks_leave(store);
    }
    kvk_unlock(&cache->lock);
    return NULL;
}
