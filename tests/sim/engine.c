/*
 * The simulation: the real engine, the CPU device, a clock that is moved by hand, one seed.
 *
 * Random requests of several tenants, instances and ranks run against tiny pools. Wherever the
 * engine drops its lock, to copy or between slices of long work, other random requests run before
 * it goes on, on the same thread: interleavings happen exactly there, and a seed replays them.
 * Copies fail, clocks jump, clients end in the middle of anything. After every event all laws are
 * checked, and what the engine answers is held against a plain model: what each sequence holds, and
 * which prefixes were ever sealed. Every K/V byte follows from the tokens before it, so a byte that
 * is another sequence's, another tenant's or an older one is found when it is read.
 *
 *     test_sim_engine [--seeds N] [--first N] [--events N]
 */
#include <getopt.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "tests/sim_model.h"

/* ================= events ================= */

static void event_lookup(void)
{
    uint32_t space = pick(SPACES);
    uint32_t salt = pick(2);
    uint32_t tokens[LENGTH_MAX];
    uint64_t count = pick(LENGTH_MAX);
    prompt_make(tokens, count);
    struct kvk_lookup_request request = {.space_id = sim.space_ids[space],
                                         .prompt = prompt_of(tokens, count, &salt),
                                         .leave_last = chance(0.5)};
    struct kvk_lookup_reply reply;
    const struct kvk_caller *caller = caller_of(space);
    if (chance(0.02)) { /* another tenant's caller finds nothing there */
        caller = &sim.callers[1 - tenant_of(space)];
        SIM_ASSERT(kvk_lookup(sim.cache, caller, &request, &reply, &error) == KVK_NOT_FOUND);
        return;
    }
    if (went_well(kvk_lookup(sim.cache, caller, &request, &reply, &error))) {
        hit_check(space, salt, tokens, reply.cached_tokens, reply.partial_tokens);
        SIM_ASSERT(reply.cached_tokens + (request.leave_last && count > 0 ? 1 : 0) <= count);
    }
    if (chance(0.3)) {
        uint64_t touched = 0;
        const struct kvk_priority_hint hint = {.first_token = pick(8),
                                               .token_count = 1 + pick(16),
                                               .priority = pick(KVK_HINT_PRIORITY_MAX + 1),
                                               .duration_ms = 1 + pick(20000)};
        request.prompt.hints = &hint;
        request.prompt.hint_count = pick(2);
        (void)went_well(
            kvk_touch(sim.cache, caller, request.space_id, &request.prompt, &touched, &error));
    }
}

static void event_begin(void)
{
    uint32_t i = pick(INSTANCES);
    struct sim_instance *instance = &sim.instances[i];
    if (instance->open) {
        return;
    }
    uint32_t space = pick(SPACES);
    struct kvk_hello hello = {.pidfd = -1, .rank = 0};
    struct kvk_welcome welcome;
    if (!went_well(kvk_session_begin(sim.cache, caller_of(space), &hello, &welcome, &error))) {
        return;
    }
    *instance = (struct sim_instance){
        .open = true, .space = space, .rank_count = sim.rank_counts[space], .life = ++sim.lives};
    instance->sessions[0] = welcome.session_id;
    for (uint32_t r = 1; r < instance->rank_count; r++) {
        hello.rank = r;
        hello.instance_token = (struct kvk_view){welcome.instance_token, KVK_TOKEN_SIZE};
        struct kvk_welcome joined;
        if (went_well(kvk_session_begin(sim.cache, caller_of(space), &hello, &joined, &error))) {
            instance->sessions[r] = joined.session_id;
        }
    }
}

/* The opener goes: everything of the instance with it, whatever runs. */
static void event_end(void)
{
    uint32_t i = pick(INSTANCES);
    struct sim_instance *instance = &sim.instances[i];
    if (!instance->open || !chance(0.2)) {
        return;
    }
    uint64_t sessions[RANKS_MAX];
    memcpy(sessions, instance->sessions, sizeof sessions);
    uint32_t count = instance->rank_count;
    instance->open = false;
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        sim.sequences[s].open = sim.sequences[s].open && sim.sequences[s].instance != i;
    }
    for (uint32_t l = 0; l < LEASES; l++) {
        sim.leases[l].open = sim.leases[l].open && sim.leases[l].instance != i;
    }
    for (uint32_t t = 0; t < TRANSFERS; t++) {
        sim.transfers[t].open = sim.transfers[t].open && sim.transfers[t].instance != i;
    }
    sim.ended++;
    for (uint32_t r = count; r-- > 0;) {
        if (sessions[r] != 0 && (r == 0 || chance(0.5))) {
            kvk_session_end(sim.cache, sessions[r]);
        }
    }
    for (uint32_t r = 1; r < count; r++) { /* ending late, or twice, changes nothing */
        if (sessions[r] != 0) {
            kvk_session_end(sim.cache, sessions[r]);
        }
    }
}

static void event_open(void)
{
    uint32_t i = pick(INSTANCES);
    const struct sim_instance *instance = &sim.instances[i];
    struct sim_sequence *sequence = sequence_free();
    if (!instance->open || sequence == NULL) {
        return;
    }
    uint32_t life = instance->life;
    struct sim_sequence made = {.open = true, .instance = i, .life = ++sim.lives};
    made.salt = pick(2);
    made.length = made.committed = pick(LENGTH_MAX / 2);
    prompt_make(made.tokens, made.length);
    const struct sim_past *past = &sim.past[pick(PAST)];
    if (chance(0.4) && past->length > 0 && past->space == instance->space) {
        made.salt = past->salt;
        made.length = made.committed = past->length;
        memcpy(made.tokens, past->tokens, past->length * sizeof made.tokens[0]);
    }
    struct kvk_open_request request = {.session_id = any_session(instance),
                                       .space_id = sim.space_ids[instance->space],
                                       .prompt = prompt_of(made.tokens, made.length, &made.salt),
                                       .leave_last = chance(0.3),
                                       .growth_tokens = chance(0.3) ? pick(8) : 0,
                                       .tier = chance(0.2) ? (int)pick(2) : -1,
                                       .leave_on_host = chance(0.3),
                                       .no_lookup = chance(0.1)};
    struct kvk_sequence_reply reply;
    uint32_t space = instance->space;
    *sequence = (struct sim_sequence){.open = false};
    if (!went_well(kvk_sequence_open(sim.cache, caller_of(space), &request, &reply, &sim.tables,
                                     &error))) {
        return;
    }
    SIM_ASSERT(instance->open && instance->life == life);
    hit_check(space, made.salt, made.tokens, reply.cached_tokens, reply.partial_tokens);
    made.id = reply.sequence_id;
    SIM_ASSERT(reply.sealed_tokens == reply.cached_tokens);
    for (uint32_t r = 0; r < RANKS_MAX; r++) {
        made.rank_sealed[r] = reply.cached_tokens;
    }
    sequence = sequence_free(); /* others may have opened meanwhile */
    if (sequence == NULL) {
        struct kvk_close_reply closed;
        (void)went_well(kvk_sequence_close(sim.cache, caller_of(space), request.session_id,
                                           &made.id, 1, &closed, &error));
        return;
    }
    *sequence = made;
}

static void event_append(void)
{
    struct sim_sequence *sequence = sequence_pick();
    if (sequence == NULL || sequence->length >= LENGTH_MAX) {
        return;
    }
    uint32_t life = sequence->life;
    uint32_t tokens[8];
    uint64_t count = 1 + pick(6);
    count = count > LENGTH_MAX - sequence->length ? LENGTH_MAX - sequence->length : count;
    tokens_make(tokens, count);
    bool draft = chance(0.3);
    struct kvk_append_request request = {.session_id =
                                             any_session(&sim.instances[sequence->instance]),
                                         .sequence_id = sequence->id,
                                         .expected_length = sequence->length,
                                         .tokens = tokens,
                                         .token_count = count,
                                         .draft = draft};
    struct kvk_sequence_reply reply;
    bool drafts_before = sequence->committed < sequence->length;
    if (!went_well(kvk_sequence_append(sim.cache, caller_of(space_of(sequence)), &request, &reply,
                                       &sim.tables, &error))) {
        return;
    }
    SIM_ASSERT(sequence->open && sequence->life == life);
    SIM_ASSERT(draft || !drafts_before);
    memcpy(sequence->tokens + sequence->length, tokens, count * sizeof tokens[0]);
    sequence->length += count;
    sequence->committed += draft ? 0 : count;
}

static void event_seal(void)
{
    struct sim_sequence *sequence = sequence_pick();
    if (sequence == NULL || sequence->swapped) {
        return;
    }
    uint32_t life = sequence->life;
    uint32_t space = space_of(sequence);
    uint64_t length = sequence->length;
    for (uint32_t r = 0; r < sim.rank_counts[space]; r++) {
        uint64_t session_id = rank_session(&sim.instances[sequence->instance], r);
        if (session_id == 0 || (chance(0.1) && r > 0)) {
            return;
        }
        if (!sequence_write(sequence, r) || sequence->length != length) {
            return;
        }
        struct kvk_seal_request request = {.session_id = session_id,
                                           .sequence_id = sequence->id,
                                           .expected_length = length,
                                           .length = length};
        struct kvk_seal_reply reply;
        /* Others can find the blocks before this call returns. */
        struct sim_sequence after = *sequence;
        after.rank_sealed[r] = length;
        sealed_mark(&after);
        if (!went_well(kvk_sequence_seal(sim.cache, caller_of(space), &request, &reply, &error))) {
            return;
        }
        SIM_ASSERT(sequence->open && sequence->life == life);
        sequence->rank_sealed[r] = length;
        SIM_ASSERT(reply.sealed_tokens == sealed_of(sequence));
        if (sequence->committed <= LENGTH_MAX / 2) {
            struct sim_past *past = &sim.past[sim.past_count++ % PAST];
            past->space = space;
            past->salt = sequence->salt;
            past->length = sequence->committed;
            memcpy(past->tokens, sequence->tokens, past->length * sizeof past->tokens[0]);
        }
    }
}

static void cut(struct sim_sequence *sequence, uint64_t length)
{
    sequence->length = length;
    sequence->committed = sequence->committed < length ? sequence->committed : length;
    for (uint32_t r = 0; r < RANKS_MAX; r++) {
        sequence->rank_sealed[r] =
            sequence->rank_sealed[r] < length ? sequence->rank_sealed[r] : length;
    }
}

static void event_cut(void)
{
    struct sim_sequence *sequence = sequence_pick();
    if (sequence == NULL) {
        return;
    }
    uint32_t life = sequence->life;
    uint64_t session_id = any_session(&sim.instances[sequence->instance]);
    const struct kvk_caller *caller = caller_of(space_of(sequence));
    struct kvk_sequence_reply reply;
    bool right = chance(0.9);
    uint64_t expected = sequence->length + (right ? 0 : 1 + pick(3));
    uint64_t drafts = sequence->length - sequence->committed;
    if (drafts > 0 && chance(0.7)) {
        uint64_t accept = pick((uint32_t)drafts + 2);
        /* Others can find what this seals before the call returns. */
        struct sim_sequence after = *sequence;
        if (accept <= drafts && right) {
            after.committed += accept;
            cut(&after, after.committed);
            sealed_mark(&after);
        }
        enum kvk_status status = kvk_sequence_commit(sim.cache, caller, session_id, sequence->id,
                                                     expected, accept, &reply, &sim.tables, &error);
        if (went_well(status)) {
            SIM_ASSERT(right && accept <= drafts && sequence->life == life);
            memcpy(after.tokens, sequence->tokens, sizeof after.tokens);
            *sequence = after;
        }
        return;
    }
    uint64_t length = pick((uint32_t)sequence->length + 3);
    enum kvk_status status = kvk_sequence_truncate(sim.cache, caller, session_id, sequence->id,
                                                   expected, length, &reply, &sim.tables, &error);
    if (went_well(status)) {
        SIM_ASSERT(sequence->life == life);
        /* A wrong expected length passes only as a repeat of what was done just before. */
        SIM_ASSERT(length <= sequence->length && (right || length == sequence->length));
        cut(sequence, length);
    }
}

static void event_fork(void)
{
    struct sim_sequence *sequence = sequence_pick();
    struct sim_sequence *place = sequence_free();
    if (sequence == NULL || place == NULL) {
        return;
    }
    uint64_t session_id = any_session(&sim.instances[sequence->instance]);
    uint32_t space = space_of(sequence);
    struct kvk_request_id none = {.size = 0};
    uint64_t ids[2];
    uint32_t count = 1 + pick(2);
    if (!went_well(kvk_sequence_fork(sim.cache, caller_of(space), session_id, sequence->id,
                                     sequence->length, count, &none, ids, &error))) {
        return;
    }
    SIM_ASSERT(sealed_of(sequence) == sequence->length);
    SIM_ASSERT(!sequence->swapped);
    for (uint32_t f = 0; f < count; f++) {
        place = sequence_free();
        if (place == NULL) {
            struct kvk_close_reply closed;
            struct kvk_caller patient = *caller_of(space);
            patient.may_block = true;
            SIM_ASSERT(went_well(
                kvk_sequence_close(sim.cache, &patient, session_id, &ids[f], 1, &closed, &error)));
            continue;
        }
        *place = *sequence;
        place->id = ids[f];
        place->life = ++sim.lives;
    }
}

static void event_swap(void)
{
    struct sim_sequence *sequence = sequence_pick();
    if (sequence == NULL) {
        return;
    }
    uint32_t life = sequence->life;
    uint64_t session_id = any_session(&sim.instances[sequence->instance]);
    const struct kvk_caller *caller = caller_of(space_of(sequence));
    struct kvk_swap_reply reply;
    bool out = !sequence->swapped;
    enum kvk_status status = out ? kvk_sequence_swap_out(sim.cache, caller, session_id,
                                                         sequence->id, &reply, &sim.tables, &error)
                                 : kvk_sequence_swap_in(sim.cache, caller, session_id, sequence->id,
                                                        &reply, &sim.tables, &error);
    if (went_well(status)) {
        SIM_ASSERT(sequence->open && sequence->life == life);
        SIM_ASSERT(!out || sealed_of(sequence) == sequence->length);
        sequence->swapped = out;
        sim.swaps++;
    }
}

static void event_close(void)
{
    struct sim_sequence *sequence = sequence_pick();
    if (sequence == NULL) {
        return;
    }
    uint32_t life = sequence->life;
    struct kvk_close_reply reply;
    uint64_t ids[2] = {sequence->id, sequence->id};
    uint64_t session_id = any_session(&sim.instances[sequence->instance]);
    const struct kvk_caller *caller = caller_of(space_of(sequence));
    if (chance(0.1)) { /* named twice: refused, nothing closed */
        SIM_ASSERT(kvk_sequence_close(sim.cache, caller, session_id, ids, 2, &reply, &error) !=
                   KVK_OK);
        return;
    }
    if (went_well(kvk_sequence_close(sim.cache, caller, session_id, ids, 1, &reply, &error))) {
        if (sequence->life == life) {
            sequence->open = false;
        }
    }
}

static void event_read(void)
{
    struct sim_sequence *sequence = sequence_pick();
    if (sequence == NULL || sealed_of(sequence) == 0) {
        return;
    }
    uint64_t prefixes[LENGTH_MAX + 8];
    uint64_t sealed = sealed_of(sequence);
    prefixes_make(space_of(sequence), sequence->salt, sequence->tokens, sealed, prefixes);
    block_verify(space_of(sequence), any_session(&sim.instances[sequence->instance]), sequence->id,
                 0, pick((uint32_t)((sealed - 1) / BLOCK_TOKENS) + 1), prefixes, sealed);
}

/* ---- leases ---- */

static void event_pin(void)
{
    uint32_t i = pick(INSTANCES);
    const struct sim_instance *instance = &sim.instances[i];
    struct sim_lease *lease = &sim.leases[pick(LEASES)];
    if (!instance->open || lease->open) {
        return;
    }
    uint32_t salt = pick(2);
    uint32_t tokens[LENGTH_MAX];
    uint64_t count = pick(LENGTH_MAX);
    prompt_make(tokens, count);
    struct kvk_pin_request request = {.session_id = any_session(instance),
                                      .space_id = sim.space_ids[instance->space],
                                      .prompt = prompt_of(tokens, count, &salt),
                                      .ttl_ms = 1 + pick(500),
                                      .copy_pin = chance(0.5)};
    struct kvk_pin_reply reply;
    if (!went_well(kvk_lease_pin(sim.cache, caller_of(instance->space), &request, &reply,
                                 &sim.tables, &error)) ||
        reply.lease_id == 0) {
        return;
    }
    hit_check(instance->space, salt, tokens, reply.cached_tokens, 0);
    *lease = (struct sim_lease){.open = true,
                                .instance = i,
                                .id = reply.lease_id,
                                .salt = salt,
                                .tokens = reply.cached_tokens,
                                .until_ns = kvk_clock_now(&sim.clock.clock) +
                                            request.ttl_ms * KVK_NS_PER_MS};
    prefixes_make(instance->space, salt, tokens, reply.cached_tokens, lease->prefixes);
}

static void event_lease(void)
{
    struct sim_lease *lease = &sim.leases[pick(LEASES)];
    if (!lease->open) {
        return;
    }
    const struct sim_instance *instance = &sim.instances[lease->instance];
    uint64_t session_id = any_session(instance);
    bool expired = kvk_clock_now(&sim.clock.clock) >= lease->until_ns;
    if (chance(0.6)) {
        uint64_t reads = sim.reads;
        block_verify(instance->space, session_id, 0, lease->id,
                     pick((uint32_t)(lease->tokens / BLOCK_TOKENS)), lease->prefixes,
                     lease->tokens);
        SIM_ASSERT(!expired || sim.reads == reads); /* past its time: no byte */
        return;
    }
    uint64_t released = 0;
    enum kvk_status status = kvk_lease_release(sim.cache, caller_of(instance->space), session_id,
                                               &lease->id, 1, &released, &error);
    SIM_ASSERT(status == KVK_OK || expired);
    if (status == KVK_OK) {
        SIM_ASSERT(kvk_lease_release(sim.cache, caller_of(instance->space), session_id, &lease->id,
                                     1, &released, &error) != KVK_OK);
    }
    lease->open = false;
}

static void event_transfer(void)
{
    struct sim_transfer *transfer = &sim.transfers[pick(TRANSFERS)];
    if (transfer->open) {
        const struct sim_instance *instance = &sim.instances[transfer->instance];
        const struct kvk_caller *caller = caller_of(instance->space);
        SIM_ASSERT(kvk_transfer_end(sim.cache, caller, any_session(instance), transfer->id,
                                    &error) == KVK_OK);
        SIM_ASSERT(kvk_transfer_end(sim.cache, caller, any_session(instance), transfer->id,
                                    &error) != KVK_OK);
        transfer->open = false;
        return;
    }
    struct sim_sequence *sequence = sequence_pick();
    if (sequence == NULL || sequence->length == 0) {
        return;
    }
    struct kvk_transfer_request request = {
        .session_id = any_session(&sim.instances[sequence->instance]),
        .sequence_id = sequence->id,
        .write = chance(0.3),
        .first_block = pick((uint32_t)((sequence->length - 1) / BLOCK_TOKENS) + 1),
        .block_count = 1};
    uint64_t ticket = 0;
    if (went_well(kvk_transfer_begin(sim.cache, caller_of(space_of(sequence)), &request, &ticket,
                                     &sim.tables, &error))) {
        *transfer =
            (struct sim_transfer){.open = true, .instance = sequence->instance, .id = ticket};
    }
}

/* ---- the world ---- */

static void event_invalidate(void)
{
    if (!chance(0.05)) {
        return;
    }
    uint32_t space = pick(SPACES);
    struct kvk_invalidate_request request = {.space_id = sim.space_ids[space]};
    struct kvk_invalidate_reply reply;
    struct kvk_prompt prefix;
    uint32_t tokens[BLOCK_TOKENS];
    uint32_t salt = pick(2);
    bool whole = chance(0.5);
    if (!whole) {
        tokens_make(tokens, BLOCK_TOKENS);
        prefix = prompt_of(tokens, BLOCK_TOKENS, &salt);
        request.prefix = &prefix;
    }
    struct kvk_caller caller = *caller_of(space);
    caller.may_block = true;
    if (went_well(kvk_invalidate(sim.cache, &caller, &request, &reply, &error)) && whole) {
        sim.generations[space]++;
        struct kvk_lookup_reply found;
        uint32_t any[LENGTH_MAX];
        tokens_make(any, LENGTH_MAX);
        struct kvk_lookup_request lookup = {.space_id = request.space_id,
                                            .prompt = prompt_of(any, LENGTH_MAX, &salt)};
        SIM_ASSERT(kvk_lookup(sim.cache, &caller, &lookup, &found, &error) == KVK_OK);
        hit_check(space, salt, any, found.cached_tokens, found.partial_tokens);
    }
}

static void event_time(void)
{
    static const uint64_t steps_ms[] = {1, 10, 100, 700};
    uint64_t now_ns = kvk_clock_now(&sim.clock.clock);
    kvk_clock_manual_set(&sim.clock, now_ns + steps_ms[pick(4)] * KVK_NS_PER_MS);
    kvk_cache_maintain(sim.cache);
}

static void event_fault(void)
{
    if (chance(0.1)) {
        struct kvk_test_control control = {.fail_next_copy = true};
        SIM_ASSERT(kvk_cache_test_control(sim.cache, &control, &error) == KVK_OK);
        sim.copy_failures++;
    }
}

/* A round of the disk's; now and then one of the things that disks do, to the next few requests. */
static void event_disk(void)
{
    struct faulty_disk *faulty = &sim.faulty;
    _Atomic int *kinds[] = {&faulty->fail_reads,  &faulty->fail_writes, &faulty->fail_syncs,
                            &faulty->short_reads, &faulty->torn_writes, &faulty->fail_allocations};
    if (faulty->disk == NULL) {
        return;
    }
    kvk_cache_maintain(sim.cache);
    if (chance(0.3)) { /* what nobody met is over */
        for (uint32_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
            atomic_store(kinds[i], 0);
        }
    }
    if (!chance(0.05)) {
        return;
    }
    atomic_store(kinds[pick(sizeof kinds / sizeof kinds[0])], (int)(1 + pick(4)));
    atomic_store(&faulty->write_errno, chance(0.3) ? ENOSPC : EIO);
    sim.disk_faults++;
}

/* A quota that may be anything: below what is used, impossible, none at all. */
static void event_quota(void)
{
    uint32_t t = pick(2);
    if (sim.seed % 3 == 0 || !chance(0.1)) {
        return; /* in every third seed there are none */
    }
    struct kvk_tenant_quota quota = {.over_quota = chance(0.5),
                                     .idle_ms = chance(0.2) ? 1 + pick(60000) : 0,
                                     .sequences = chance(0.2) ? 1 + pick(16) : 0,
                                     .leases = chance(0.2) ? 1 + pick(8) : 0};
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        uint64_t blocks = sim.cache->tiers[i].pool.limit_bytes / 64;
        quota.limit_bytes[i] = chance(0.4) ? 64 * (uint64_t)pick((uint32_t)blocks + 8) : 0;
        quota.guaranteed_bytes[i] = chance(0.4) ? 64 * (uint64_t)pick((uint32_t)blocks + 2) : 0;
    }
    const struct kvk_tenant *tenant = kvk_tenants_get(sim.tenants, t);
    if (kvk_quota_set(sim.cache, tenant, &quota, &error) != KVK_OK) {
        SIM_ASSERT(error.status == KVK_INVALID && error.field[0] != '\0');
    }
}

static void space_open(uint32_t s, enum kvk_partial_reuse reuse)
{
    struct kvk_space_request request = {.block_tokens = BLOCK_TOKENS,
                                        .group_count = sim.group_counts[s],
                                        .flops_per_token = 10,
                                        .flops_per_token_position = 1,
                                        .flops_per_second = sim.flops_per_second[s],
                                        .partial_reuse = reuse};
    request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){(const uint8_t *)"same for both", 13 - (s == 1 ? 1 : 0)};
    memcpy(request.groups, sim.groups[s], sizeof sim.groups[s]);
    if (sim.space_ids[s] == 0 || chance(0.5)) { /* of one that is there, as it is */
        memcpy(request.disk_formats, sim.disk_formats[s], sizeof sim.disk_formats[s]);
        memcpy(request.host_formats, sim.host_formats[s], sizeof sim.host_formats[s]);
    }
    struct kvk_space_reply reply;
    struct kvk_caller caller = *caller_of(s);
    caller.may_block = true;
    SIM_ASSERT(kvk_space_open(sim.cache, &caller, &request, &reply, &error) == KVK_OK);
    SIM_ASSERT(reply.partial_reuse == (reuse == KVK_PARTIAL_REUSE_ON) ||
               reuse == KVK_PARTIAL_REUSE_AS_IT_IS);
    sim.space_ids[s] = reply.space_id;
}

/* Open a space again, as a process that joins does, and switch its partial reuse. */
static void event_space(void)
{
    uint32_t s = pick(SPACES);
    enum kvk_partial_reuse reuse =
        (enum kvk_partial_reuse)(chance(0.7) ? KVK_PARTIAL_REUSE_ON : pick(2));
    if (sim.partial_reuse[s]) {
        space_open(s, reuse);
    }
}

static void event_run(void)
{
    static void (*const events[])(void) = {
        event_lookup,     event_lookup, event_begin,  event_open,  event_open,  event_open,
        event_append,     event_append, event_append, event_seal,  event_seal,  event_seal,
        event_seal,       event_cut,    event_fork,   event_swap,  event_swap,  event_close,
        event_close,      event_read,   event_read,   event_pin,   event_lease, event_transfer,
        event_invalidate, event_end,    event_time,   event_fault, event_disk,  event_disk,
        event_quota,      event_space,
    };
    events[pick(sizeof events / sizeof events[0])]();
    sim.done++;
    const struct sim_sequence *sequence = sequence_pick();
    if (sequence != NULL && sim.depth == 0) {
        sequence_compare(sequence);
    }
    kvk_cache_check(sim.cache);
}

/* Where the engine has dropped its lock to copy: others come in between. */
static void between(void *context)
{
    (void)context;
    if (sim.depth >= DEPTH_MAX) {
        return;
    }
    sim.depth++;
    for (uint32_t i = pick(3); i > 0; i--) {
        struct kvk_tables tables = sim.tables; /* the call outside still fills its own */
        struct kvk_error outside = error;
        sim.tables = (struct kvk_tables){.part_count = 0};
        event_run();
        sim.nested++;
        kvk_tables_finish(&sim.tables);
        sim.tables = tables;
        error = outside;
    }
    sim.depth--;
}

/* The engine's pause between slices of long work, where there are no threads: the same. */
int sched_yield(void)
{
    if (sim.cache != NULL && !sim.closing && kvk_locks_held() == 0) {
        sim.pauses++;
        between(NULL);
    }
    return 0;
}

/* ================= a seed ================= */

static struct kvk_device *device_open(void)
{
    const struct kvk_device_cpu_options options = {.attend_thread_count = 1, .window_bytes = 4096};
    struct kvk_device *device = NULL;
    SIM_ASSERT(kvk_device_cpu_open(&options, &device, &error) == KVK_OK);
    return device;
}

/* In three of four seeds there is a disk, in half of those a catalogue that outlives slots. */
static void disk_make(void)
{
    const char *where = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    if (chance(0.25)) {
        return;
    }
    SIM_ASSERT(faulty_init_at(&sim.faulty, where));
    SIM_ASSERT(faulty_open(&sim.faulty, &error) == KVK_OK);
    sim.config.disk_bytes = 4096 * (2 + pick(60));
    if (chance(0.7)) { /* little memory, so that the disk is needed */
        sim.config.device_bytes = sim.config.device_bytes > 0 ? 64 * (8 + pick(24)) : 0;
        sim.config.host_bytes = sim.config.host_bytes > 0 ? 64 * (8 + pick(24)) : 0;
    }
    sim.config.disk_admit_uses = 1 + pick(2);
    sim.config.disk_read_ahead = pick(2) * 16;
    if (chance(0.5)) {
        const struct kvk_catalogue_options options = {.folder = sim.faulty.folder,
                                                      .map_bytes = UINT64_C(16) << 20};
        SIM_ASSERT(kvk_catalogue_open(&options, &sim.catalogue, &error) == KVK_OK);
    }
}

static void disk_end(void)
{
    kvk_catalogue_close(sim.catalogue);
    if (sim.faulty.disk != NULL) {
        faulty_finish(&sim.faulty);
    }
}

static void config_make(void)
{
    kvk_config_init(&sim.config);
    sim.config.test_hooks = true;
    sim.config.policy = chance(0.5) ? KVK_EVICT_LRU : KVK_EVICT_RP_COST;
    sim.config.blocks = 512;
    sim.config.roots = 256;
    sim.config.sequences = 64;
    sim.config.leases = 64;
    sim.config.transfers = 64;
    sim.config.instances = 16;
    sim.config.sessions = 64;
    sim.config.tokens = 4096;
    sim.config.spaces = 8;
    sim.config.device_free_percent = pick(20);
    /* A block is 64 or 128 bytes: at most 256 blocks in all. */
    sim.config.device_bytes = chance(0.15) ? 0 : 64 * (8 + pick(120));
    sim.config.host_bytes = sim.config.device_bytes > 0 && chance(0.15) ? 0 : 64 * (8 + pick(120));
    sim.config.tenant_count = 2;
    sim.config.tenants = calloc(2, sizeof sim.config.tenants[0]);
    sim.config.credential_count = 2;
    free(sim.config.credentials);
    sim.config.credentials = calloc(2, sizeof sim.config.credentials[0]);
    for (uint32_t t = 0; t < 2; t++) {
        snprintf(sim.config.tenants[t].name, KVK_NAME_SIZE, "tenant %u", t);
        struct kvk_credential_config *credential = &sim.config.credentials[t];
        snprintf(credential->name, KVK_NAME_SIZE, "credential %u", t);
        snprintf(credential->token, KVK_NAME_SIZE, "a token of tenant %u", t);
        credential->tenants[0] = t;
        credential->tenant_count = 1;
    }
}

static void spaces_open(void)
{
    for (uint32_t s = 0; s < SPACES; s++) {
        sim.rank_counts[s] = s == 1 ? 2 : 1;
        sim.group_counts[s] = s == 2 ? 1 : 1 + s;
        sim.groups[s][0] = geometry(sim.rank_counts[s], 0, 0);
        sim.groups[s][1] = geometry(sim.rank_counts[s], 9, 4);
        sim.flops_per_second[s] = chance(0.7) ? 0 : 1e6;
        bool compact = chance(0.4);
        for (uint32_t g = 0; compact && g < sim.group_counts[s]; g++) {
            static const enum kvk_format formats[] = {KVK_FORMAT_NONE, KVK_FORMAT_FP8_E4M3,
                                                      KVK_FORMAT_INT8_CHANNEL};
            sim.disk_formats[s][g] = formats[pick(3)];
        }
        if (compact && sim.config.device_bytes > 0 && chance(0.6)) {
            memcpy(sim.host_formats[s], sim.disk_formats[s], sizeof sim.host_formats[s]);
        }
        sim.partial_reuse[s] = chance(0.6) && sim.host_formats[s][0] == KVK_FORMAT_NONE &&
                               sim.host_formats[s][1] == KVK_FORMAT_NONE;
        space_open(s, sim.partial_reuse[s] ? KVK_PARTIAL_REUSE_ON : KVK_PARTIAL_REUSE_AS_IT_IS);
    }
}

static void world_open(uint64_t seed)
{
    memset(&sim, 0, sizeof sim);
    sim.seed = seed;
    kvk_random_init(&sim.random, seed);
    kvk_clock_manual_init(&sim.clock, 1000 * KVK_NS_PER_SECOND);
    config_make();
    SIM_ASSERT(kvk_tenants_create(&sim.config, &sim.tenants, &error) == KVK_OK);
    disk_make();
    struct kvk_cache_options options = {
        .disk = sim.faulty.disk,
        .catalogue = sim.catalogue,
        .config = &sim.config,
        .tenants = sim.tenants,
        .clock = &sim.clock.clock,
        .device = sim.config.device_bytes > 0 ? device_open() : NULL,
        .host_device = sim.config.host_bytes > 0 ? device_open() : NULL,
    };
    SIM_ASSERT(kvk_cache_create(&options, &sim.cache, &error) == KVK_OK);
    for (uint32_t t = 0; t < 2; t++) {
        const struct kvk_credential *credential = NULL;
        const char *token = sim.config.credentials[t].token;
        SIM_ASSERT(kvk_tenants_authenticate(sim.tenants, (const uint8_t *)token, strlen(token),
                                            false, 0, &credential, &error) == KVK_OK);
        sim.callers[t] = (struct kvk_caller){.credential = credential, .call = "Simulation"};
    }
    kvk_disk_tidy_unlocked(sim.cache);
    spaces_open();
    if (chance(0.7)) { /* else no call is long enough for a pause */
        const struct kvk_test_control control = {.slice_blocks = 1 + pick(8)};
        SIM_ASSERT(kvk_cache_test_control(sim.cache, &control, &error) == KVK_OK);
    }
    kvk_mover_test_hook(sim.cache->mover, between, NULL);
    kvk_disk_test_hook(sim.cache, between, NULL);
}

/* With all sessions closed and the index emptied, all is free. */
static void world_close(void)
{
    kvk_mover_test_hook(sim.cache->mover, NULL, NULL);
    kvk_disk_test_hook(sim.cache, NULL, NULL);
    sim.closing = true;
    for (uint32_t i = 0; i < INSTANCES; i++) {
        for (uint32_t r = 0; r < RANKS_MAX && sim.instances[i].open; r++) {
            if (sim.instances[i].sessions[r] != 0) {
                kvk_session_end(sim.cache, sim.instances[i].sessions[r]);
            }
        }
    }
    for (uint32_t s = 0; s < SPACES; s++) {
        struct kvk_invalidate_request request = {.space_id = sim.space_ids[s]};
        struct kvk_invalidate_reply reply;
        struct kvk_caller caller = *caller_of(s);
        caller.may_block = true;
        SIM_ASSERT(kvk_invalidate(sim.cache, &caller, &request, &reply, &error) == KVK_OK);
    }
    for (uint32_t round = 0; round < 100; round++) {
        event_time();
    }
    kvk_cache_check(sim.cache);
    for (uint32_t t = 0; t < KVK_TIER_COUNT; t++) {
        SIM_ASSERT(sim.cache->tiers[t].used_bytes == 0);
        SIM_ASSERT(sim.cache->tiers[t].bound_bytes == 0);
        SIM_ASSERT(sim.cache->tiers[t].growth_bytes == 0);
    }
    SIM_ASSERT(kvk_index_block_count(sim.cache->index) == 0);
    kvk_cache_destroy(sim.cache);
    kvk_tenants_destroy(sim.tenants);
    kvk_config_finish(&sim.config);
    kvk_tables_finish(&sim.tables);
    disk_end();
}

static void seed_run(uint64_t seed, uint64_t events)
{
    world_open(seed);
    while (sim.done < events) {
        event_run();
    }
    printf("seed %llu: device %llu, host %llu bytes, %s: %llu events (%llu in between, %llu "
           "pauses), %llu hits "
           "(%llu in part, %llu given up), "
           "%llu reads, %llu swaps, %llu refusals, %llu ends, %llu faults, disk %llu bytes%s, "
           "%llu written, %llu restored (%llu widened), %llu faults, host %llu narrowed, "
           "%llu widened\n",
           (unsigned long long)seed, (unsigned long long)sim.config.device_bytes,
           (unsigned long long)sim.config.host_bytes,
           sim.config.policy == KVK_EVICT_LRU ? "lru" : "rp-cost", (unsigned long long)sim.done,
           (unsigned long long)sim.nested, (unsigned long long)sim.pauses,
           (unsigned long long)sim.hits, (unsigned long long)sim.partial_hits,
           (unsigned long long)sim.cache->stats.partial_given_up, (unsigned long long)sim.reads,
           (unsigned long long)sim.swaps, (unsigned long long)sim.refusals,
           (unsigned long long)sim.ended, (unsigned long long)sim.copy_failures,
           (unsigned long long)(sim.faulty.disk != NULL ? sim.config.disk_bytes : 0),
           sim.catalogue != NULL ? " recorded" : "",
           (unsigned long long)sim.cache->stats.disk_written_blocks,
           (unsigned long long)sim.cache->stats.disk_restored_blocks,
           (unsigned long long)sim.cache->stats.disk_widened_blocks,
           (unsigned long long)sim.disk_faults,
           (unsigned long long)sim.cache->stats.host_narrowed_blocks,
           (unsigned long long)sim.cache->stats.host_widened_blocks);
    fflush(stdout);
    SIM_ASSERT(events < 10000 || (sim.hits > 0 && sim.reads > 0 && sim.refusals > 0));
    world_close();
}

int main(int argc, char **argv)
{
    static const struct option names[] = {{"seeds", required_argument, NULL, 's'},
                                          {"first", required_argument, NULL, 'f'},
                                          {"events", required_argument, NULL, 'e'},
                                          {NULL, 0, NULL, 0}};
    uint64_t seeds = 6;
    uint64_t first = 1;
    uint64_t events = 15000;
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (option == 's') {
            seeds = strtoull(optarg, NULL, 10);
        } else if (option == 'f') {
            first = strtoull(optarg, NULL, 10);
        } else if (option == 'e') {
            events = strtoull(optarg, NULL, 10);
        } else {
            return 2;
        }
    }
    kvk_log_set_level(KVK_LOG_ERROR);
    for (uint64_t seed = first; seed < first + seeds; seed++) {
        seed_run(seed, events);
    }
    return 0;
}
