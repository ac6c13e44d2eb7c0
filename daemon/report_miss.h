/*
 * Why did this prompt miss? How far it is cached, which block of its chain is the first that is
 * missing, and what is known of that one: when it went, why, and to make room for whom.
 *
 * Never tokens, and of other tenants only that it was another: their names are for admins.
 */
#ifndef KVK_DAEMON_REPORT_MISS_H
#define KVK_DAEMON_REPORT_MISS_H

#include "daemon/cache.h"
#include "daemon/journal.h"
#include "daemon/remote_store.h"

/* What is the matter with the first block that is missing. Numbers are the API's. */
enum kvk_miss {
    KVK_MISS_NONE = 0,          /* nothing is missing: the whole prompt is a hit */
    KVK_MISS_SHORT = 1,         /* the prompt has no whole block */
    KVK_MISS_BELOW_MINIMUM = 2, /* shorter than the space looks up: `minimum_tokens` */
    KVK_MISS_GONE = 3,          /* it was there: `gone` says what became of it */
    KVK_MISS_NEVER = 4,         /* nobody sealed it, as far back as the journal reaches */
    KVK_MISS_FORGOTTEN = 5,     /* as NEVER, but the journal has forgotten things since */
    KVK_MISS_OTHER_SALT = 6,    /* never under this salt; it is cached under another one */
    KVK_MISS_WRITING = 7,       /* a sequence writes it now, and has not sealed it */
    KVK_MISS_ON_DISK = 8,       /* only on disk, and reading it is not estimated to be quicker */
};
#define KVK_MISS_COUNT 9

const char *kvk_miss_name(enum kvk_miss miss); /* "never_sealed", never NULL */

struct kvk_miss_report {
    enum kvk_miss miss;
    uint64_t prompt_blocks;  /* whole ones */
    uint64_t cached_tokens;  /* that a look-up finds now; KVK_MISS_ON_DISK: an opening */
    uint64_t partial_tokens; /* of them, the last: a part of another block, see partial.c */
    uint32_t block_tokens;
    uint32_t minimum_tokens;
    uint64_t missing_block; /* index in the chain of the first that is missing */
    uint32_t group;         /* the layer group where it is missing */
    struct kvk_gone gone;   /* where `miss` is KVK_MISS_GONE; `left` as then */
    bool gone_before;       /* it went by an invalidation of the whole space */
    uint64_t gone_age_ms;
    const struct kvk_tenant *gone_for; /* KVK_GONE_EVICTED: whose room it became, where the caller
                                          may know it; NULL: nobody's, or not to be told */
    bool gone_for_other;               /* it was another tenant's */
    uint64_t missing_gone;   /* of the missing blocks of this group, those that the journal knows */
    uint64_t missing_looked; /* of so many */
    uint64_t writing_sequence_id; /* KVK_MISS_WRITING; 0: of another instance's */
    uint64_t load_ns;             /* KVK_MISS_ON_DISK: reading against computing it */
    uint64_t recompute_ns;
    uint64_t journal_reach_ms;    /* how far back the journal reaches; 0: it has lost nothing */
    struct kvk_remote_use remote; /* what is known of the rest in the remote store */
    char sentence[768];           /* all of it in words */
};

KVK_CHECKED enum kvk_status kvk_report_miss(struct kvk_cache *cache,
                                            const struct kvk_caller *caller, uint64_t space_id,
                                            const struct kvk_prompt *prompt, bool leave_last,
                                            struct kvk_miss_report *report,
                                            struct kvk_error *error);

#endif
