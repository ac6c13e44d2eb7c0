/*
 * A worker's load for tests of the whole daemon: sequences of documents that share their first
 * tokens are opened, verified, written, sealed, swapped, grown, forked and closed, in any order. A
 * call may be refused for want of room, and may fail where the daemon is about to be killed.
 */
#ifndef KVK_TESTS_DAEMON_LOAD_H
#define KVK_TESTS_DAEMON_LOAD_H

#include "tests/daemon_worker.h"

enum {
    DOCUMENTS = 40,
    DOCUMENT_TOKENS = 64,
    SHARED_TOKENS = 16, /* the first of each four documents */
};

/* In memory that master and workers share. */
struct load {
    char target[96];
    _Atomic bool going;             /* the daemon is about to be killed: calls may fail */
    _Atomic uint64_t began, sealed; /* sequences, by all workers */
    _Atomic uint64_t swapped, refused;
};
static struct load *load;
static struct prompt prompt; /* each process's own */

/* Four documents share their first tokens. */
static inline void document(uint32_t number, uint64_t tokens)
{
    prompt.count = 0;
    for (uint32_t i = 0; i < tokens; i++) {
        uint32_t base = i < SHARED_TOKENS ? number / 4 * 100000 : number * 100000 + 50000;
        prompt_add(&prompt, base + i + 1);
    }
}

/* A call that may fail only while the daemon goes, or for want of room. True: go on. */
static inline bool went_well(enum kvk_status status, const char *what)
{
    if (status == KVK_OK) {
        return true;
    }
    if (atomic_load(&load->going)) {
        exit(0); /* killed soon anyway */
    }
    CHECK(status == KVK_EXHAUSTED, "%s: %s [%s]", what, self.error.text,
          kvk_cause_name(self.error.cause));
    atomic_fetch_add(&load->refused, 1);
    pause_us(500);
    return false;
}

static inline bool map_tier(uint8_t tier)
{
    struct kvkeep_map *map = &self.maps[tier];
    return map->address != NULL ||
           went_well(kvkeep_map_slots(self.session, &self.space, 0, 0, (enum kvkeep_tier)tier,
                                      false, map, &self.error),
                     "MapMemory");
}

static inline bool map_all(const struct kvkeep_sequence *sequence)
{
    for (uint64_t i = 0; i < sequence->groups[0].count; i++) {
        if (!map_tier(sequence->groups[0].tiers[i])) {
            return false;
        }
    }
    return true;
}

static inline void worker_swap(struct kvkeep_sequence *sequence, struct kvk_random *random)
{
    if (!went_well(kvkeep_swap_out(self.session, sequence, NULL, &self.error), "SwapOut")) {
        return;
    }
    pause_us(kvk_random_below(random, 2000));
    if (went_well(kvkeep_swap_in(self.session, sequence, NULL, &self.error), "SwapIn") &&
        map_all(sequence)) {
        worker_verify(sequence, &prompt, 0, sequence->sealed_tokens);
        atomic_fetch_add(&load->swapped, 1);
    }
}

static inline void worker_grow(struct kvkeep_sequence *sequence, struct kvk_random *random)
{
    uint32_t tokens[8];
    uint32_t count = 1 + (uint32_t)kvk_random_below(random, 8);
    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = (uint32_t)kvk_random_below(random, 3) + 7;
    }
    if (!went_well(kvkeep_append(self.session, sequence, tokens, count, false, &self.error),
                   "Append") ||
        !map_all(sequence)) {
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        prompt_add(&prompt, tokens[i]);
    }
    worker_write(sequence, &prompt, sequence->grant_first, prompt.count);
    (void)went_well(kvkeep_seal(self.session, sequence, prompt.count, false, &self.error), "Seal");
}

static inline void worker_forks(struct kvkeep_sequence *sequence)
{
    struct kvkeep_sequence fork_of;
    if (went_well(kvkeep_fork(self.session, sequence, 1, &fork_of, &self.error), "Fork")) {
        (void)went_well(kvkeep_close(self.session, &fork_of, &self.error), "Close");
    }
}

/* One sequence's life; `tokens` of a document that prompt holds. */
static inline void one_life(struct kvk_random *random)
{
    struct kvkeep_sequence sequence;
    if (!went_well(worker_try_open(&prompt, NULL, &sequence), "OpenSequence")) {
        return;
    }
    atomic_fetch_add(&load->began, 1);
    if (map_all(&sequence)) {
        worker_verify(&sequence, &prompt, 0, sequence.cached_tokens);
        worker_write(&sequence, &prompt, sequence.grant_first, prompt.count);
        if (went_well(kvkeep_seal(self.session, &sequence, prompt.count, false, &self.error),
                      "Seal")) {
            atomic_fetch_add(&load->sealed, 1);
            uint64_t what = kvk_random_below(random, 6);
            if (what == 0) {
                worker_swap(&sequence, random);
            } else if (what == 1) {
                worker_grow(&sequence, random);
            } else if (what == 2) {
                worker_forks(&sequence);
            }
        }
    }
    while (!went_well(kvkeep_close(self.session, &sequence, &self.error), "Close")) {
    }
}

static inline void open_worker(const char *tenant, const char *model)
{
    worker_daemon_goes = &load->going;
    if (self.client == NULL) {
        worker_open(&(struct worker_options){
            .target = load->target, .tenant = tenant, .model = model, .timeout_ms = 20000});
    }
}

#endif
