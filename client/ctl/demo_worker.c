/*
 * A worker of the demonstration: serves requests of the built-in workload as an inference engine
 * would, with made-up K/V that follows from the tokens, and verifies every byte that it reads.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "client/ctl/demo.h"
#include "client/ctl/workload.h"

enum {
    BLOCK_TOKENS = 16,
    LAYERS = 2,
    KV_HEADS = 2,
    HEAD_SIZE = 32,                 /* bf16 values */
    ROW_WORDS = HEAD_SIZE * 2 / 8,  /* 8-byte words of one token, head, layer, K or V */
    PLANES = LAYERS * 2 * KV_HEADS, /* rows of one token */
    BLOCK_BYTES = PLANES * BLOCK_TOKENS * ROW_WORDS * 8
};

struct demo_worker {
    const struct demo_settings *settings;
    struct demo_shared *shared;
    struct kvkeep_client *client;
    struct kvkeep_session *session;
    struct kvkeep_space space;
    struct kvkeep_map maps[3]; /* by enum kvkeep_tier */
    uint32_t space_mark;       /* tells tenants and models apart where prefixes are remembered */
    struct workload workload;
    uint64_t prefixes[WORKLOAD_TOKENS_MAX + 1]; /* [t]: the prefix that ends with token t */
    struct kvk_error error;
};

static uint64_t add(_Atomic uint64_t *counter, uint64_t count)
{
    return atomic_fetch_add_explicit(counter, count, memory_order_relaxed);
}

/* ---- prefixes seen by anybody: what a cache without end would hit ---- */

static bool seen(struct demo_worker *worker, uint64_t prefix_of_tokens, bool insert)
{
    struct demo_shared *shared = worker->shared;
    uint64_t prefix = workload_fold(prefix_of_tokens, worker->space_mark);
    uint64_t wanted = prefix == 0 ? 1 : prefix;
    for (uint32_t i = 0; i < 64; i++) {
        _Atomic uint64_t *place = &shared->seen[(prefix + i) % DEMO_SEEN_COUNT];
        uint64_t found = atomic_load(place);
        if (found == wanted) {
            return true;
        }
        if (found == 0 && (!insert || atomic_compare_exchange_strong(place, &found, wanted))) {
            return false;
        }
    }
    return false;
}

/* ---- bytes ---- */

static uint64_t *token_row(uint64_t *block, uint32_t plane, uint64_t position)
{
    return block + ((uint64_t)plane * BLOCK_TOKENS + position % BLOCK_TOKENS) * ROW_WORDS;
}

static void token_write(struct demo_worker *worker, uint64_t *block, uint64_t position)
{
    for (uint32_t plane = 0; plane < PLANES; plane++) {
        uint64_t *row = token_row(block, plane, position);
        for (uint32_t w = 0; w < ROW_WORDS; w++) {
            row[w] = workload_word(worker->prefixes[position], plane * ROW_WORDS + w);
        }
    }
}

static bool token_is_right(struct demo_worker *worker, uint64_t *block, uint64_t position)
{
    uint64_t wrong = 0;
    for (uint32_t plane = 0; plane < PLANES; plane++) {
        const uint64_t *row = token_row(block, plane, position);
        for (uint32_t w = 0; w < ROW_WORDS; w++) {
            wrong |= row[w] ^ workload_word(worker->prefixes[position], plane * ROW_WORDS + w);
        }
    }
    return wrong == 0;
}

/* The slot of a block, mapped on first use; NULL: failed, the error says why. */
static uint64_t *block_slot(struct demo_worker *worker, const struct kvkeep_table *table,
                            uint64_t block)
{
    enum kvkeep_tier tier = (enum kvkeep_tier)table->tiers[block];
    if (tier != KVKEEP_TIER_DEVICE && tier != KVKEEP_TIER_HOST) {
        (void)kvk_fail(&worker->error, KVK_INTERNAL, KVK_CAUSE_NONE, "tables",
                       "block %llu has no place", (unsigned long long)block);
        return NULL;
    }
    struct kvkeep_map *map = &worker->maps[tier];
    if (map->address == NULL && kvkeep_map_slots(worker->session, &worker->space, 0, 0, tier, false,
                                                 map, &worker->error) != KVK_OK) {
        return NULL;
    }
    return (uint64_t *)(void *)(map->address + table->slots[block] * map->slot_stride);
}

static bool verify(struct demo_worker *worker, const struct kvkeep_sequence *sequence,
                   uint64_t first, uint64_t last)
{
    for (uint64_t t = first; t < last; t++) {
        uint64_t *block = block_slot(worker, &sequence->groups[0], t / BLOCK_TOKENS);
        if (block == NULL) {
            return false;
        }
        if (!token_is_right(worker, block, t)) {
            add(&worker->shared->mismatches, 1);
        }
        add(&worker->shared->bytes_verified, BLOCK_BYTES / BLOCK_TOKENS);
    }
    return true;
}

/* Write the tokens that are granted, up to `last`. */
static bool write_tokens(struct demo_worker *worker, const struct kvkeep_sequence *sequence,
                         uint64_t last)
{
    for (uint64_t t = sequence->grant_first; t < last; t++) {
        uint64_t *block = block_slot(worker, &sequence->groups[0], t / BLOCK_TOKENS);
        if (block == NULL) {
            return false;
        }
        token_write(worker, block, t);
    }
    add(&worker->shared->tokens_written, last - sequence->grant_first);
    add(&worker->shared->bytes_written,
        (last - sequence->grant_first) * (BLOCK_BYTES / BLOCK_TOKENS));
    return true;
}

static void prefixes_make(struct demo_worker *worker, const uint32_t *tokens, uint64_t first,
                          uint64_t count)
{
    for (uint64_t t = first; t < count; t++) {
        worker->prefixes[t] = workload_fold(t == 0 ? 0 : worker->prefixes[t - 1], tokens[t]);
    }
}

static void mark_seen(struct demo_worker *worker, uint64_t tokens)
{
    for (uint64_t b = 1; b * BLOCK_TOKENS <= tokens; b++) {
        (void)seen(worker, worker->prefixes[b * BLOCK_TOKENS - 1], true);
    }
}

/* ---- what happens to a sequence ---- */

/* Grow by the model's answer, in steps; some of it speculated, half of that rejected. */
static bool generate(struct demo_worker *worker, struct kvkeep_sequence *sequence,
                     struct workload_conversation *conversation, uint32_t count)
{
    struct kvk_random *random = &worker->workload.random;
    uint32_t end = conversation->token_count + count;
    end = end > WORKLOAD_TOKENS_MAX ? WORKLOAD_TOKENS_MAX : end;
    while (conversation->token_count < end) {
        uint32_t at = conversation->token_count;
        uint32_t step = 1 + (uint32_t)kvk_random_below(random, 8);
        step = step > end - at ? end - at : step;
        bool draft = kvk_random_chance(random, 0.3);
        workload_answer(&worker->workload, conversation, step);
        prefixes_make(worker, conversation->tokens, at, at + step);
        if (kvkeep_append(worker->session, sequence, conversation->tokens + at, step, draft,
                          &worker->error) != KVK_OK ||
            !write_tokens(worker, sequence, sequence->length) ||
            kvkeep_seal(worker->session, sequence, sequence->length, true, &worker->error) !=
                KVK_OK) {
            return false;
        }
        if (draft) {
            uint32_t accepted = (step + 1) / 2;
            add(&worker->shared->drafts, step);
            if (kvkeep_commit(worker->session, sequence, accepted, &worker->error) != KVK_OK) {
                return false;
            }
            conversation->token_count = at + accepted;
        }
    }
    return true;
}

/* Preempted: out to the host, read there through gRPC, back in, every byte the same. */
static bool preempt(struct demo_worker *worker, struct kvkeep_sequence *sequence)
{
    struct kvkeep_swap out;
    struct kvkeep_swap in;
    if (kvkeep_swap_out(worker->session, sequence, &out, &worker->error) != KVK_OK) {
        return worker->error.status == KVK_EXHAUSTED;
    }
    uint64_t bytes[BLOCK_BYTES / 8];
    uint64_t block =
        kvk_random_below(&worker->workload.random, sequence->sealed_tokens / BLOCK_TOKENS + 1);
    block = block * BLOCK_TOKENS >= sequence->sealed_tokens ? 0 : block;
    if (kvkeep_read(worker->session, sequence, NULL, 0, 0, block, 1, bytes, sizeof bytes,
                    &worker->error) != KVK_OK) {
        return false;
    }
    for (uint64_t t = block * BLOCK_TOKENS;
         t < sequence->sealed_tokens && t < (block + 1) * BLOCK_TOKENS; t++) {
        add(&worker->shared->mismatches, token_is_right(worker, bytes, t) ? 0 : 1);
    }
    add(&worker->shared->bytes_streamed, sizeof bytes);
    for (;;) {
        if (kvkeep_swap_in(worker->session, sequence, &in, &worker->error) == KVK_OK) {
            break;
        }
        if (worker->error.status != KVK_EXHAUSTED) {
            return false;
        }
        add(&worker->shared->refusals, 1);
        (void)usleep(2000);
    }
    add(&worker->shared->swaps, 1);
    add(&worker->shared->swapped_bytes, out.moved_bytes + in.moved_bytes);
    return verify(worker, sequence, 0, sequence->sealed_tokens);
}

/* Forks share all that was; each goes on with other tokens, and none sees another's. */
static bool fork_round(struct demo_worker *worker, struct kvkeep_sequence *sequence,
                       const struct workload_conversation *conversation)
{
    enum { FORKS = 3, STEP = 5 };
    struct kvkeep_sequence forks[FORKS];
    if (conversation->token_count + STEP > WORKLOAD_TOKENS_MAX) {
        return true;
    }
    if (kvkeep_fork(worker->session, sequence, FORKS, forks, &worker->error) != KVK_OK) {
        return worker->error.status == KVK_EXHAUSTED;
    }
    add(&worker->shared->forks, FORKS);
    uint64_t at = sequence->length;
    bool going = true;
    for (uint32_t f = 0; f < FORKS && going; f++) {
        uint32_t tokens[STEP];
        for (uint32_t i = 0; i < STEP; i++) {
            tokens[i] = f * 1000 + i;
            worker->prefixes[at + i] =
                workload_fold(at + i == 0 ? 0 : worker->prefixes[at + i - 1], tokens[i]);
        }
        enum kvk_status status =
            kvkeep_append(worker->session, &forks[f], tokens, STEP, false, &worker->error);
        if (status == KVK_EXHAUSTED) {
            add(&worker->shared->refusals, 1);
            continue;
        }
        going = status == KVK_OK && write_tokens(worker, &forks[f], forks[f].length) &&
                kvkeep_seal(worker->session, &forks[f], forks[f].length, true, &worker->error) ==
                    KVK_OK &&
                verify(worker, &forks[f], 0, forks[f].length);
        mark_seen(worker, forks[f].length);
    }
    for (uint32_t f = 0; f < FORKS; f++) {
        struct kvk_error error;
        if (kvkeep_close(worker->session, &forks[f], &error) != KVK_OK && going) {
            worker->error = error;
            going = false;
        }
    }
    return going;
}

/* Read a leased prefix in mapped memory, the way a reader without a copy pin must. */
static bool lease_round(struct demo_worker *worker, const struct kvkeep_prompt *prompt)
{
    struct kvkeep_lease lease;
    if (kvkeep_pin(worker->session, &worker->space, prompt, 5000, false, &lease, &worker->error) !=
        KVK_OK) {
        return false;
    }
    add(&worker->shared->leases, 1);
    for (uint64_t b = 0; b < lease.cached_tokens / BLOCK_TOKENS; b++) {
        uint64_t copy[BLOCK_BYTES / 8];
        const struct kvkeep_table *table = &lease.groups[0];
        uint64_t *slot = block_slot(worker, table, b);
        if (slot == NULL) {
            return false;
        }
        const struct kvkeep_map *map = &worker->maps[table->tiers[b]];
        memcpy(copy, slot, sizeof copy);
        atomic_thread_fence(memory_order_acquire);
        if (map->generations[table->slots[b]] != table->generations[b]) {
            add(&worker->shared->lost_reads, 1); /* moved on to another tier, or gone */
            continue;
        }
        for (uint64_t t = b * BLOCK_TOKENS; t < (b + 1) * BLOCK_TOKENS; t++) {
            add(&worker->shared->mismatches, token_is_right(worker, copy, t) ? 0 : 1);
        }
        add(&worker->shared->bytes_verified, sizeof copy);
    }
    return kvkeep_release(worker->session, &lease, &worker->error) == KVK_OK;
}

/* ---- requests ---- */

static void count_lookup(struct demo_worker *worker, const struct workload_conversation *prompt,
                         uint64_t cached, uint64_t took_ns)
{
    struct demo_shared *shared = worker->shared;
    uint64_t blocks = prompt->token_count / BLOCK_TOKENS;
    uint64_t ceiling = 0;
    while (ceiling < blocks &&
           seen(worker, worker->prefixes[(ceiling + 1) * BLOCK_TOKENS - 1], false)) {
        ceiling++;
    }
    add(&shared->blocks, blocks);
    add(&shared->hit_blocks, cached / BLOCK_TOKENS);
    /* Others may have sealed since the look-up was answered; never below what was hit. */
    add(&shared->ceiling_blocks, ceiling > cached / BLOCK_TOKENS ? ceiling : cached / BLOCK_TOKENS);
    uint32_t at = atomic_fetch_add(&shared->latency_count, 1);
    if (at < DEMO_LATENCY_COUNT) {
        shared->latency_ns[at] = took_ns > UINT32_MAX ? UINT32_MAX : (uint32_t)took_ns;
    }
}

/* Open, waiting while the pool is full of others' sequences. */
static enum kvk_status open_patiently(struct demo_worker *worker,
                                      const struct kvkeep_prompt *prompt, uint32_t growth,
                                      struct kvkeep_sequence *sequence)
{
    struct kvkeep_open_options options = {
        .leave_last = true, .retry = true, .growth_tokens = growth};
    for (int tries = 0;; tries++) {
        enum kvk_status status = kvkeep_sequence_open(worker->session, &worker->space, prompt,
                                                      &options, sequence, &worker->error);
        if (status != KVK_EXHAUSTED || worker->error.cause == KVK_CAUSE_TOO_LARGE ||
            tries == 2000) {
            return status;
        }
        add(&worker->shared->refusals, 1);
        uint64_t wait_ms = worker->error.retry_after_ms;
        (void)usleep((useconds_t)(wait_ms == 0 || wait_ms > 20 ? 2000 : wait_ms * 1000));
    }
}

static bool serve(struct demo_worker *worker, struct kvkeep_sequence *sequence,
                  struct workload_conversation *conversation, uint32_t output_count)
{
    struct kvk_random *random = &worker->workload.random;
    if (!verify(worker, sequence, 0, sequence->cached_tokens)) {
        return false;
    }
    if (worker->settings->crash && kvk_random_chance(random, 0.004)) {
        (void)write_tokens(worker, sequence,
                           sequence->cached_tokens +
                               (sequence->length - sequence->cached_tokens) / 2);
        (void)raise(SIGKILL);
    }
    if (!write_tokens(worker, sequence, sequence->length) ||
        kvkeep_seal(worker->session, sequence, sequence->length, true, &worker->error) != KVK_OK) {
        return false;
    }
    if (kvk_random_chance(random, 0.15) && !preempt(worker, sequence)) {
        return false;
    }
    if (!generate(worker, sequence, conversation, output_count)) {
        return false;
    }
    mark_seen(worker, sequence->length);
    return !kvk_random_chance(random, 0.1) || fork_round(worker, sequence, conversation);
}

static bool request(struct demo_worker *worker)
{
    uint32_t output_count;
    struct workload_conversation *conversation = workload_next(&worker->workload, &output_count);
    prefixes_make(worker, conversation->tokens, 0, conversation->token_count);
    struct kvkeep_prompt prompt = {.tokens = conversation->tokens,
                                   .token_count = conversation->token_count};
    struct kvkeep_lookup found;
    uint64_t began_ns = kvk_clock_now(kvk_clock_monotonic());
    if (kvkeep_lookup(worker->client, &worker->space, &prompt, false, &found, &worker->error) !=
        KVK_OK) {
        return false;
    }
    count_lookup(worker, conversation, found.cached_tokens,
                 kvk_clock_now(kvk_clock_monotonic()) - began_ns);
    if (kvk_random_chance(&worker->workload.random, 0.1) && !lease_round(worker, &prompt)) {
        return false;
    }
    struct kvkeep_sequence sequence;
    /* Room for the answer and a round of forks' tails beside it. */
    if (open_patiently(worker, &prompt, output_count + 16, &sequence) != KVK_OK) {
        return false;
    }
    bool served = serve(worker, &sequence, conversation, output_count);
    bool refused = !served && worker->error.status == KVK_EXHAUSTED;
    if (refused) {
        add(&worker->shared->refusals, 1);
        workload_drop(conversation);
    }
    struct kvk_error error;
    if (kvkeep_close(worker->session, &sequence, &error) != KVK_OK) {
        worker->error = error;
        return false;
    }
    add(&worker->shared->requests, 1);
    return served || refused;
}

static bool worker_open(struct demo_worker *worker, const struct ctl_options *options,
                        uint32_t number)
{
    static const struct kvk_geometry geometry = {.layers = LAYERS,
                                                 .kv_heads = KV_HEADS,
                                                 .head_size_k = HEAD_SIZE,
                                                 .head_size_v = HEAD_SIZE,
                                                 .block_tokens = BLOCK_TOKENS,
                                                 .format_k = KVK_FORMAT_BF16,
                                                 .format_v = KVK_FORMAT_BF16,
                                                 .layout = KVK_LAYOUT_HEADS_FIRST,
                                                 .attention = KVK_ATTENTION_SELF,
                                                 .tensor_shards = 1,
                                                 .pipeline_shards = 1};
    /* Two models, so that the pool is shared by spaces; cost as of an 8B model. */
    struct kvkeep_space_options space = {
        .identity = {.model = number % 4 == 3 ? "demo-small" : "demo-large"},
        .block_tokens = BLOCK_TOKENS,
        .groups = &geometry,
        .group_count = 1,
        .flops_per_token = 16.06e9,
        .flops_per_token_position = 524288.0,
        .flops_per_second = 4e14};
    char name[32];
    (void)snprintf(name, sizeof name, "demo worker %u", number);
    struct kvkeep_options connect = {
        .target = options->target, .token = options->token, .tls = options->tls};
    struct kvkeep_session_options session = {.name = name};
    struct kvkeep_server_info info;
    if (kvkeep_connect(&connect, &worker->client, &worker->error) != KVK_OK ||
        kvkeep_server_info(worker->client, &info, &worker->error) != KVK_OK) {
        return false;
    }
    if (info.tenant_count > 1) { /* workers are dealt out over the tenants */
        session.tenant = info.tenants[number % info.tenant_count];
        space.tenant = session.tenant;
    }
    worker->space_mark =
        (info.tenant_count > 1 ? number % info.tenant_count : 0) * 2 + (number % 4 == 3 ? 1 : 0);
    return kvkeep_space_open(worker->client, &space, &worker->space, &worker->error) == KVK_OK &&
           kvkeep_session_open(worker->client, &session, &worker->session, &worker->error) ==
               KVK_OK;
}

int demo_worker_run(const struct ctl_options *options, const struct demo_settings *settings,
                    struct demo_shared *shared, uint32_t number, uint64_t seed)
{
    struct demo_worker *worker = calloc(1, sizeof *worker);
    if (worker == NULL) {
        return CTL_FAILED;
    }
    worker->settings = settings;
    worker->shared = shared;
    workload_init(&worker->workload, seed);
    bool going = worker_open(worker, options, number);
    while (going) {
        uint64_t left = atomic_load(&shared->requests_left);
        if (left == 0) {
            break;
        }
        if (atomic_compare_exchange_weak(&shared->requests_left, &left, left - 1)) {
            going = request(worker);
        }
    }
    if (!going && add(&shared->failures, 1) == 0) {
        (void)snprintf(shared->failure, sizeof shared->failure, "%s [%s]", worker->error.text,
                       kvk_cause_name(worker->error.cause));
    }
    for (int tier = 0; tier < 3; tier++) {
        kvkeep_unmap(&worker->maps[tier]);
    }
    kvkeep_session_close(worker->session);
    kvkeep_disconnect(worker->client);
    free(worker);
    return going ? CTL_OK : CTL_FAILED;
}
