/*
 * The plain model of the simulation (tests/sim/engine.c): what each sequence, lease and transfer
 * holds, which prefixes were ever sealed, and the bytes that follow from them. One program includes
 * it; nothing here calls the engine but to compare.
 */
#ifndef KVK_TESTS_SIM_MODEL_H
#define KVK_TESTS_SIM_MODEL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "daemon/cache_internal.h"
#include "hosttier/catalogue.h"
#include "tests/faulty_disk.h"

#define PAST 48

enum {
    SPACES = 3,
    INSTANCES = 5,
    RANKS_MAX = 2,
    SEQUENCES = 24,
    LEASES = 12,
    TRANSFERS = 6,
    BLOCK_TOKENS = 4,
    LENGTH_MAX = 48,
    VOCABULARY = 2, /* few tokens: prompts share */
    DEPTH_MAX = 3,
    SEALED_MAX = 1 << 16
};

#define SIM_ASSERT(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            sim_failed(#condition, __LINE__);                                                      \
        }                                                                                          \
    } while (0)

struct sim_instance {
    bool open;
    uint32_t space; /* all of its sequences are of this one */
    uint32_t rank_count;
    uint64_t sessions[RANKS_MAX]; /* 0: not joined, or ended */
    uint32_t life;                /* tells instances of one place apart */
};

struct sim_sequence {
    bool open;
    uint32_t life; /* tells sequences of one place apart across a dropped lock */
    uint32_t instance;
    uint64_t id;
    uint32_t salt;
    uint32_t tokens[LENGTH_MAX + 8];
    uint64_t length;
    uint64_t committed;
    uint64_t rank_sealed[RANKS_MAX];
    bool swapped;
};

struct sim_lease {
    bool open;
    uint32_t instance;
    uint64_t id;
    uint32_t salt;
    uint64_t tokens;
    uint64_t prefixes[LENGTH_MAX + 8]; /* [token]: what its bytes follow from */
    uint64_t until_ns;
};

struct sim_transfer {
    bool open;
    uint32_t instance;
    uint64_t id;
};

struct sim {
    uint64_t seed;
    uint64_t events;
    uint64_t done;
    uint32_t depth;
    struct kvk_random random;
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_clock_manual clock;
    struct kvk_caller callers[2]; /* by tenant */
    uint64_t space_ids[SPACES];
    struct kvk_geometry groups[SPACES][2];
    enum kvk_format disk_formats[SPACES][2];
    enum kvk_format host_formats[SPACES][2]; /* then the disk's are the same */
    uint32_t group_counts[SPACES];
    uint32_t rank_counts[SPACES];
    double flops_per_second[SPACES];
    bool partial_reuse[SPACES]; /* where it may be on; it is switched now and then */
    struct sim_instance instances[INSTANCES];
    struct sim_sequence sequences[SEQUENCES];
    struct sim_lease leases[LEASES];
    struct sim_transfer transfers[TRANSFERS];
    uint32_t lives;
    uint64_t sealed[SEALED_MAX]; /* prefixes that were sealed somewhere: the only ones to hit */
    uint64_t sealed_count;
    uint64_t generations[SPACES]; /* one more with each invalidation of the whole */
    struct kvk_tables tables;
    /* what happened, so that a run that tests nothing is seen */
    uint64_t hits, partial_hits, hit_tokens, refusals, reads, swaps, nested, copy_failures, ended;
    uint64_t pauses;
    bool closing; /* the world ends: nothing comes in between any more */
    /* the disk below, and what lasts; NULL: none */
    struct faulty_disk faulty;
    struct kvk_catalogue *catalogue;
    uint64_t disk_faults;
    struct sim_past { /* prompts that were sealed: some come back */
        uint32_t space, salt;
        uint64_t length;
        uint32_t tokens[LENGTH_MAX];
    } past[PAST];
    uint32_t past_count;
};

static struct sim sim;

static _Noreturn void sim_failed(const char *condition, int line)
{
    fprintf(stderr, "seed %llu event %llu depth %u: %s (line %d)\n", (unsigned long long)sim.seed,
            (unsigned long long)sim.done, sim.depth, condition, line);
    abort();
}

static uint32_t pick(uint32_t below)
{
    return (uint32_t)kvk_random_below(&sim.random, below);
}

static bool chance(double probability)
{
    return kvk_random_chance(&sim.random, probability);
}

/* ---- prefixes and bytes ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* What a prefix of a space and salt is known by; its bytes do not depend on the generation. */
static uint64_t prefix_root(uint32_t space, uint32_t salt)
{
    return mix(((uint64_t)space << 8 | salt) + 77);
}

static uint64_t prefix_fold(uint64_t prefix, uint32_t token)
{
    return mix(prefix * UINT64_C(0x9e3779b97f4a7c15) + token + 1);
}

static uint64_t word_of(uint32_t space, uint64_t prefix, uint32_t group, uint32_t rank,
                        uint32_t part)
{
    uint64_t word = mix(prefix + group * 1000003u + rank * 10007u + part * 101u + 1);
    enum kvk_format format = sim.disk_formats[space][group];
    if (format != KVK_FORMAT_NONE) {
        /* Values that a compact format gives back to the bit: its largest, its negative, and 0. */
        const float most = format == KVK_FORMAT_FP8_E4M3 ? 448.0F : 127.0F;
        const float values[2] = {most * (float)((int)(word % 3) - 1),
                                 most * (float)((int)(word / 3 % 3) - 1)};
        const float none = 0.0F; /* not -0 */
        memcpy(&word, values[0] == 0 ? &none : &values[0], sizeof none);
        memcpy((uint8_t *)&word + sizeof none, values[1] == 0 ? &none : &values[1], sizeof none);
    }
    return word;
}

static void prefixes_make(uint32_t space, uint32_t salt, const uint32_t *tokens, uint64_t count,
                          uint64_t *prefixes)
{
    uint64_t prefix = prefix_root(space, salt);
    for (uint64_t t = 0; t < count; t++) {
        prefix = prefix_fold(prefix, tokens[t]);
        prefixes[t] = prefix;
    }
}

/* Of a sealed block some of the tokens: as far as they are alike, a hit may end within it. */
static uint64_t part_of(uint64_t prefix)
{
    return mix(prefix + UINT64_C(0x2545f4914f6cdd1d));
}

/* A sealed prefix counts within its space's generation. */
static uint64_t sealed_name(uint32_t space, uint64_t prefix)
{
    return mix(prefix + sim.generations[space] * UINT64_C(0x51ed270b));
}

static void sealed_add(uint32_t space, uint64_t prefix)
{
    if (sim.sealed_count * 2 > SEALED_MAX) {
        /* Forgetting would call right hits false: allow everything, and say so by a full table. */
        return;
    }
    uint64_t name = sealed_name(space, prefix);
    uint64_t at = name % SEALED_MAX;
    while (sim.sealed[at] != 0 && sim.sealed[at] != name) {
        at = (at + 1) % SEALED_MAX;
    }
    sim.sealed_count += sim.sealed[at] == 0 ? 1 : 0;
    sim.sealed[at] = name;
}

static bool sealed_has(uint32_t space, uint64_t prefix)
{
    if (sim.sealed_count * 2 > SEALED_MAX) {
        return true;
    }
    uint64_t name = sealed_name(space, prefix);
    uint64_t at = name % SEALED_MAX;
    while (sim.sealed[at] != 0) {
        if (sim.sealed[at] == name) {
            return true;
        }
        at = (at + 1) % SEALED_MAX;
    }
    return false;
}

/* ---- who calls ---- */

static uint32_t tenant_of(uint32_t space)
{
    return space == SPACES - 1 ? 1 : 0; /* the last space is the other tenant's */
}

/* Some calls may not wait, some have no time at all. (Without threads the engine never sleeps for
 * others to give room: on one thread nobody would.) */
static const struct kvk_caller *caller_of(uint32_t space)
{
    struct kvk_caller *caller = &sim.callers[tenant_of(space)];
    caller->may_block = !chance(0.1);
    caller->deadline_ns = chance(0.03) ? kvk_clock_now(kvk_clock_monotonic()) : UINT64_MAX;
    return caller;
}

static struct kvk_error error;

static bool went_well(enum kvk_status status)
{
    if (status != KVK_OK && status != KVK_WOULD_BLOCK) {
        sim.refusals++;
        SIM_ASSERT(error.text[0] != '\0');
        SIM_ASSERT(status != KVK_INTERNAL || sim.copy_failures > 0);
    }
    return status == KVK_OK;
}

static uint64_t rank_session(const struct sim_instance *instance, uint32_t rank)
{
    return instance->sessions[rank];
}

/* A session of the instance that is there. */
static uint64_t any_session(const struct sim_instance *instance)
{
    return instance->sessions[0];
}

/* ---- the model's sequences ---- */

static struct sim_sequence *sequence_pick(void)
{
    uint32_t from = pick(SEQUENCES);
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        struct sim_sequence *sequence = &sim.sequences[(from + i) % SEQUENCES];
        if (sequence->open) {
            return sequence;
        }
    }
    return NULL;
}

static struct sim_sequence *sequence_free(void)
{
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        if (!sim.sequences[i].open) {
            return &sim.sequences[i];
        }
    }
    return NULL;
}

static uint32_t space_of(const struct sim_sequence *sequence)
{
    return sim.instances[sequence->instance].space;
}

static uint64_t sealed_of(const struct sim_sequence *sequence)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t r = 0; r < sim.rank_counts[space_of(sequence)]; r++) {
        least = sequence->rank_sealed[r] < least ? sequence->rank_sealed[r] : least;
    }
    return least;
}

/* Hold the engine's view against the model's, where no call works on the sequence. */
static void sequence_compare(const struct sim_sequence *sequence)
{
    struct kvk_sequence_reply reply;
    uint32_t life = sequence->life;
    enum kvk_status status = kvk_sequence_get(
        sim.cache, &sim.callers[tenant_of(space_of(sequence))],
        any_session(&sim.instances[sequence->instance]), sequence->id, &reply, &sim.tables, &error);
    if (!sequence->open || sequence->life != life || status == KVK_UNAVAILABLE) {
        return;
    }
    SIM_ASSERT(status == KVK_OK);
    SIM_ASSERT(reply.length == sequence->length);
    SIM_ASSERT(reply.committed_tokens == sequence->committed);
    SIM_ASSERT(reply.sealed_tokens == sealed_of(sequence));
    SIM_ASSERT((reply.state == KVK_SEQUENCE_SWAPPED_OUT) == sequence->swapped);
}

static void tokens_make(uint32_t *tokens, uint64_t count)
{
    for (uint64_t t = 0; t < count; t++) {
        tokens[t] = pick(VOCABULARY);
    }
}

/* A prompt that begins like a sequence that is open, as often as not. */
static void prompt_make(uint32_t *tokens, uint64_t count)
{
    tokens_make(tokens, count);
    const struct sim_sequence *sequence = sequence_pick();
    if (sequence != NULL && chance(0.5)) {
        uint64_t same = pick((uint32_t)sequence->length + 1);
        memcpy(tokens, sequence->tokens, (same < count ? same : count) * sizeof tokens[0]);
    }
}

static struct kvk_prompt prompt_of(const uint32_t *tokens, uint64_t count, const uint32_t *salt)
{
    struct kvk_prompt prompt = {.tokens = tokens, .token_count = count};
    if (*salt > 0) {
        prompt.salt = (const uint8_t *)salt;
        prompt.salt_size = 1;
    }
    return prompt;
}

static void sealed_mark(const struct sim_sequence *sequence)
{
    uint64_t prefixes[LENGTH_MAX + 8];
    uint64_t sealed = sealed_of(sequence);
    uint64_t whole = sealed < sequence->committed ? sealed : sequence->committed;
    prefixes_make(space_of(sequence), sequence->salt, sequence->tokens, whole, prefixes);
    for (uint64_t b = 1; b * BLOCK_TOKENS <= whole; b++) {
        sealed_add(space_of(sequence), prefixes[b * BLOCK_TOKENS - 1]);
        for (uint64_t t = (b - 1) * BLOCK_TOKENS; t + 1 < b * BLOCK_TOKENS; t++) {
            sealed_add(space_of(sequence), part_of(prefixes[t]));
        }
    }
}

static void hit_check(uint32_t space, uint32_t salt, const uint32_t *tokens, uint64_t cached,
                      uint64_t partial)
{
    uint64_t prefixes[LENGTH_MAX + 8];
    SIM_ASSERT(cached % BLOCK_TOKENS == partial);
    SIM_ASSERT(partial == 0 || sim.partial_reuse[space]);
    if (cached == 0) {
        return;
    }
    prefixes_make(space, salt, tokens, cached, prefixes);
    uint64_t last = prefixes[cached - 1];
    SIM_ASSERT(sealed_has(space, partial > 0 ? part_of(last) : last));
    sim.partial_hits += partial > 0 ? 1 : 0;
    sim.hits++;
    sim.hit_tokens += cached;
}

/* ---- bytes of a sequence ---- */

static uint64_t row_offset(uint64_t token, uint32_t part)
{
    return part * BLOCK_TOKENS * 8 + token % BLOCK_TOKENS * 8; /* [K or V][token], 8 bytes each */
}

/* Write what is granted to one rank, as a worker would through gRPC. False: refused. */
static bool sequence_write(struct sim_sequence *sequence, uint32_t rank)
{
    uint32_t space = space_of(sequence);
    uint32_t life = sequence->life;
    uint64_t prefixes[LENGTH_MAX + 8];
    prefixes_make(space, sequence->salt, sequence->tokens, sequence->length, prefixes);
    for (uint64_t t = sequence->rank_sealed[rank]; t < sequence->length; t++) {
        for (uint32_t g = 0; g < sim.group_counts[space]; g++) {
            for (uint32_t part = 0; part < 2; part++) {
                uint64_t word = word_of(space, prefixes[t], g, rank, part);
                struct kvk_write_piece piece = {.group = g,
                                                .rank = rank,
                                                .block = t / BLOCK_TOKENS,
                                                .offset = row_offset(t, part),
                                                .data = (const uint8_t *)&word,
                                                .size_bytes = 8};
                struct kvk_caller caller = *caller_of(space);
                caller.may_block = true;
                if (!went_well(kvk_sequence_write(
                        sim.cache, &caller, rank_session(&sim.instances[sequence->instance], rank),
                        sequence->id, &piece, &error)) ||
                    sequence->life != life || !sequence->open) {
                    return false;
                }
            }
        }
    }
    return true;
}

/* Read one block of a sequence or lease and hold its sealed tokens against the pattern. */
static void block_verify(uint32_t space, uint64_t session_id, uint64_t sequence_id,
                         uint64_t lease_id, uint64_t block, const uint64_t *prefixes,
                         uint64_t tokens)
{
    uint32_t group = pick(sim.group_counts[space]);
    uint32_t rank = pick(sim.rank_counts[space]);
    struct kvk_read_request request = {.session_id = session_id,
                                       .sequence_id = sequence_id,
                                       .lease_id = lease_id,
                                       .group = group,
                                       .rank = rank,
                                       .block = block};
    const uint8_t *data = NULL;
    uint64_t size_bytes = 0;
    struct kvk_read_handle handle;
    struct kvk_caller caller = *caller_of(space);
    caller.may_block = true;
    if (!went_well(
            kvk_read_begin(sim.cache, &caller, &request, &data, &size_bytes, &handle, &error))) {
        return;
    }
    SIM_ASSERT(size_bytes == 2 * BLOCK_TOKENS * 8);
    for (uint64_t t = block * BLOCK_TOKENS; t < (block + 1) * BLOCK_TOKENS && t < tokens; t++) {
        for (uint32_t part = 0; part < 2; part++) {
            uint64_t word;
            memcpy(&word, data + row_offset(t, part), sizeof word);
            SIM_ASSERT(word == word_of(space, prefixes[t], group, rank, part));
        }
    }
    sim.reads++;
    kvk_read_end(sim.cache, &handle);
}

/* ---- Spaces ---- */

static struct kvk_geometry geometry(uint32_t ranks, uint32_t window, uint32_t sinks)
{
    return (struct kvk_geometry){.layers = 1,
                                 .kv_heads = ranks,
                                 .head_size_k = 2,
                                 .head_size_v = 2,
                                 .block_tokens = BLOCK_TOKENS,
                                 .format_k = KVK_FORMAT_FP32,
                                 .format_v = KVK_FORMAT_FP32,
                                 .layout = KVK_LAYOUT_HEADS_FIRST,
                                 .attention = KVK_ATTENTION_SELF,
                                 .tensor_shards = ranks,
                                 .pipeline_shards = 1,
                                 .window = window,
                                 .sinks = sinks};
}

#endif
