/*
 * The journal of what went: blocks that were forgotten, and copies that left their tier to make
 * room. It answers, for a prompt that missed: was this block ever here, when did it go, why, and to
 * make room for whom.
 *
 * A ring of fixed memory, the newest `capacity` events, found by the block's key through lists by
 * hash. As in index/ghosts.h the lists are never mended: they run from newer to older, so a link
 * that leads to a newer event, or to one of another list, is where the list was overwritten and
 * ends. Adding writes one place and one head: O(1), no allocation.
 *
 * Nothing in it is of the prompt itself: a key is a hash with the tenant's secret.
 *
 * Locking: the cache lock.
 */
#ifndef KVK_DAEMON_JOURNAL_H
#define KVK_DAEMON_JOURNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "index/block.h"
#include "index/key.h"

/* Why it went. Numbers are the API's; only added to. */
enum kvk_gone_reason {
    KVK_GONE_NONE = 0,
    KVK_GONE_EVICTED = 1,     /* room was made in its tier, for `for_space_id` */
    KVK_GONE_IDLE = 2,        /* not used for as long as its tenant or space allows */
    KVK_GONE_QUOTA = 3,       /* its own tenant's limit was reached */
    KVK_GONE_INVALIDATED = 4, /* by a call */
    KVK_GONE_DAMAGED = 5,     /* its bytes could not be read, or did not match */
    KVK_GONE_ABORTED = 6,     /* it was opened, but its writer went before it was sealed */
    KVK_GONE_FORGOTTEN = 7,   /* its tenant was deleted */
    KVK_GONE_LIMIT = 8,       /* all block records of the configuration were in use */
};
#define KVK_GONE_REASON_COUNT 9

const char *kvk_gone_reason_name(enum kvk_gone_reason reason); /* "evicted", never NULL */

struct kvk_gone {
    struct kvk_key key;
    uint64_t time_ns;       /* the cache's clock */
    uint64_t space_id;      /* its own */
    uint64_t for_space_id;  /* who got the room; 0: nobody in particular */
    uint64_t for_tenant_id; /* whose that is; 0: nobody's */
    uint32_t idle_ms;       /* since its last use, when it went; saturating */
    float score;            /* its worth to eviction, as it was last known; 0: not asked */
    uint32_t position;      /* blocks before it in its chain */
    uint16_t use_count;
    uint8_t group;
    uint8_t tier;   /* that it left: enum kvk_tier */
    uint8_t left;   /* tiers that still had a copy: bits; 0: it was forgotten */
    uint8_t reason; /* enum kvk_gone_reason */
    uint32_t next;  /* in its list: place + 1; 0: the end. The journal's own */
};

struct kvk_journal {
    struct kvk_gone *entries; /* [capacity], ours */
    uint32_t *heads;          /* [capacity] place + 1; 0: none; ours */
    uint32_t capacity;
    uint32_t next_place;
    uint64_t added; /* ever */
    uint64_t counts[KVK_GONE_REASON_COUNT];
};

/* KVK_EXHAUSTED: no memory. `capacity` may be 0: nothing is kept, only counted. */
KVK_CHECKED enum kvk_status kvk_journal_init(struct kvk_journal *journal, uint32_t capacity);
void kvk_journal_finish(struct kvk_journal *journal);

/* The key will be added soon: a hint that lets the memory come near meanwhile. */
void kvk_journal_expect(const struct kvk_journal *journal, struct kvk_key key);
void kvk_journal_add(struct kvk_journal *journal, const struct kvk_gone *gone);

/* The newest event of this key in this space and group by which it was forgotten, or, with
 * `any_tier`, by which any copy of it went. NULL: none that is still known. Valid until the next
 * is added. */
const struct kvk_gone *kvk_journal_find(const struct kvk_journal *journal, struct kvk_key key,
                                        uint64_t space_id, uint32_t group, bool any_tier);

/* The oldest event that is still known; NULL: none. Events before it, if any, were overwritten. */
const struct kvk_gone *kvk_journal_oldest(const struct kvk_journal *journal);
static inline bool kvk_journal_has_overwritten(const struct kvk_journal *journal)
{
    return journal->added > journal->capacity;
}

uint64_t kvk_journal_bytes(const struct kvk_journal *journal); /* of memory */

#endif
