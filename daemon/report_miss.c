#include "daemon/report_miss.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/disk_tier.h"
#include "daemon/report_internal.h"

#define LOOKED_MAX 1024      /* missing blocks whose keys are looked for in the journal */
#define SALTS_MAX 65536      /* roots that are tried for the same tokens */
#define SALTS_SLICE 256      /* with the lock held in one go */
#define GENERATIONS_BACK 4   /* invalidations of the space that are looked behind */
#define BACK_BLOCKS_MAX 4096 /* blocks that are hashed for each of them */

const char *kvk_miss_name(enum kvk_miss miss)
{
    switch (miss) {
    case KVK_MISS_NONE:
        break;
    case KVK_MISS_SHORT:
        return "shorter_than_a_block";
    case KVK_MISS_BELOW_MINIMUM:
        return "below_minimum";
    case KVK_MISS_GONE:
        return "gone";
    case KVK_MISS_NEVER:
        return "never_sealed";
    case KVK_MISS_FORGOTTEN:
        return "not_known_any_more";
    case KVK_MISS_OTHER_SALT:
        return "other_salt";
    case KVK_MISS_WRITING:
        return "being_written";
    case KVK_MISS_ON_DISK:
        return "on_disk";
    }
    return "nothing_missing";
}

/* One question while it is answered. The space is referenced: it stays where the lock is dropped.
 */
struct question {
    struct kvk_cache *cache;
    const struct kvk_scope *scope;
    struct kvk_space *space;
    const struct kvk_prompt *prompt;
    uint64_t wanted; /* blocks that could be a hit */
    struct kvk_content content;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    struct kvk_miss_report *report;
};

static uint64_t since_ms(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? (now_ns - then_ns) / KVK_NS_PER_MS : 0;
}

/* ---- Which block is missing ---- */

/* The first block of the group that a hit of the whole would need and that has no bytes. */
static uint64_t first_missing(const struct question *question, uint32_t g, uint64_t known)
{
    const struct kvk_cache *cache = question->cache;
    const struct kvk_group *group = question->space->groups[g];
    for (uint64_t i = 0; i < known; i++) {
        if (cache->path_tiers[g][i] == 0 && kvk_group_sees(group, question->wanted, i)) {
            return i;
        }
    }
    for (uint64_t i = known; i < question->wanted; i++) {
        if (kvk_group_sees(group, question->wanted, i)) {
            return i;
        }
    }
    return question->wanted;
}

/* Walk the chain of each group; the group that misses first, and where. */
static void find_missing(struct question *question, const struct kvk_prefix *prefix)
{
    struct kvk_miss_report *report = question->report;
    report->missing_block = question->wanted;
    for (uint32_t g = 0; g < question->space->group_count; g++) {
        uint64_t missing = first_missing(question, g, prefix->known[g]);
        if (missing < report->missing_block) {
            report->missing_block = missing;
            report->group = g;
        }
    }
}

/* The key that stands before block `index` of the missing group's chain, as far as it is known:
 * *from is the block that the key is before. */
static struct kvk_key key_before(const struct question *question, uint64_t known, uint64_t index,
                                 uint64_t *from)
{
    const struct kvk_cache *cache = question->cache;
    uint32_t g = question->report->group;
    struct kvk_key key = {0};
    *from = index < known ? index : known;
    if (*from > 0) {
        return kvk_index_block(cache->index, cache->path[g][*from - 1])->key;
    }
    enum kvk_status status = kvk_space_root_key(question->space, g, question->prompt->salt,
                                                question->prompt->salt_size, 0, &key);
    KVK_ASSERT(status == KVK_OK);
    return key;
}

static const struct kvk_gone *journal_find(const struct question *question, struct kvk_key key)
{
    return kvk_journal_find(&question->cache->journal, key, question->space->id,
                            question->report->group, false);
}

/* Look for the missing block in the journal, and count how many behind it are there too. */
static const struct kvk_gone *journal_ask(struct question *question, struct kvk_key key,
                                          uint64_t from, struct kvk_gone *found)
{
    struct kvk_miss_report *report = question->report;
    const struct kvk_gone *result = NULL;
    const struct kvk_hasher *hasher = kvk_space_hasher(question->space);
    for (uint64_t i = from; i < question->wanted; i++) {
        if (report->missing_looked == LOOKED_MAX ||
            !kvk_index_key_step(question->cache->index, hasher, question->space->block_tokens,
                                &question->content, i, &key)) {
            break;
        }
        if (i < report->missing_block) {
            continue;
        }
        const struct kvk_gone *gone = journal_find(question, key);
        report->missing_looked++;
        report->missing_gone += gone != NULL ? 1 : 0;
        if (i == report->missing_block && gone != NULL) {
            *found = *gone;
            result = found;
        }
    }
    return result;
}

/* Was it there before the space was invalidated? Its key was another one then. */
static const struct kvk_gone *journal_ask_back(const struct question *question,
                                               struct kvk_gone *found)
{
    const struct kvk_space *space = question->space;
    const struct kvk_prompt *prompt = question->prompt;
    uint32_t group = question->report->group;
    uint64_t missing = question->report->missing_block;
    for (uint64_t back = 1; back < space->generation && back <= GENERATIONS_BACK; back++) {
        struct kvk_key key;
        if (missing >= BACK_BLOCKS_MAX ||
            kvk_space_root_key(space, group, prompt->salt, prompt->salt_size, back, &key) !=
                KVK_OK) {
            return NULL;
        }
        bool known = true;
        for (uint64_t i = 0; i <= missing && known; i++) {
            known = kvk_index_key_step(question->cache->index, kvk_space_hasher(space),
                                       space->block_tokens, &question->content, i, &key);
        }
        const struct kvk_gone *gone = known ? journal_find(question, key) : NULL;
        if (gone != NULL) {
            *found = *gone;
            return found;
        }
    }
    return NULL;
}

/* ---- Other salts ---- */

struct salts {
    const struct question *question;
    bool found;
};

static bool try_salt(void *context, uint32_t root, const uint8_t *salt, size_t salt_size)
{
    struct salts *salts = context;
    const struct question *question = salts->question;
    const struct kvk_cache *cache = question->cache;
    (void)salt;
    (void)salt_size;
    uint32_t g = question->report->group;
    if (root == question->roots[g] || !kvk_root_is_current(cache, root) ||
        kvk_index_root_user(cache->index, root) >> 32 != question->space->groups[g]->number) {
        return true;
    }
    uint64_t wanted = question->report->missing_block + 1;
    struct kvk_match match = {
        .cursor = {.root = root, .block = KVK_BLOCK_NONE},
        .path_capacity = wanted,
    };
    kvk_index_match(cache->index, &question->content, &match);
    salts->found = match.path_count == wanted &&
                   kvk_index_block(cache->index, match.cursor.block)->tier_mask != 0;
    return !salts->found;
}

static bool is_under_other_salt_drops(const struct question *question)
{
    struct salts salts = {.question = question};
    uint32_t next = 0;
    for (uint32_t tried = 0; tried < SALTS_MAX && next != KVK_ROOT_NONE; tried += SALTS_SLICE) {
        uint64_t work = UINT64_MAX / 2;
        next = kvk_index_roots_visit(question->cache->index, next, SALTS_SLICE, try_salt, &salts);
        if (salts.found) {
            return true;
        }
        kvk_report_slice_drops(question->cache, &work, 0);
    }
    return false;
}

/* ---- Being written ---- */

static bool writes_it(const struct question *question, const struct kvk_sequence *sequence)
{
    const struct kvk_prompt *prompt = question->prompt;
    uint64_t tokens = (question->report->missing_block + 1) * question->space->block_tokens;
    return sequence->space == question->space &&
           sequence->whole_blocks <= question->report->missing_block &&
           sequence->committed >= tokens && sequence->salt_size == prompt->salt_size &&
           (prompt->salt_size == 0 ||
            memcmp(sequence->salt, prompt->salt, prompt->salt_size) == 0) &&
           memcmp(sequence->tokens, prompt->tokens, tokens * sizeof(*prompt->tokens)) == 0;
}

static uint64_t writer_find_drops(const struct question *question)
{
    struct kvk_cache *cache = question->cache;
    const struct kvk_table_entry *entry;
    uint64_t work = 0;
    size_t place = 0;
    for (size_t before = 0; (entry = kvk_table_next(&cache->sequence_table, &place)) != NULL;
         before = place) {
        const struct kvk_sequence *sequence = (const struct kvk_sequence *)entry->value;
        if (writes_it(question, sequence)) {
            return sequence->id;
        }
        kvk_report_slice_drops(cache, &work, place - before);
    }
    return 0;
}

/* ---- Putting it together ---- */

/* Whose room it became: a tenant is told of itself alone, and that it was another. */
static void gone_fill(const struct question *question, const struct kvk_gone *gone)
{
    struct kvk_cache *cache = question->cache;
    struct kvk_miss_report *report = question->report;
    report->miss = KVK_MISS_GONE;
    report->gone = *gone;
    report->gone_age_ms = since_ms(kvk_clock_now(cache->clock), gone->time_ns);
    if (gone->for_tenant_id == 0) {
        return;
    }
    report->gone_for_other = gone->for_tenant_id != question->space->tenant->id;
    const struct kvk_tenant *tenant = kvk_tenants_find(cache->tenants, gone->for_tenant_id);
    bool may_know = question->scope->credential->admin || !report->gone_for_other;
    report->gone_for = may_know ? tenant : NULL;
    if (!may_know) {
        report->gone.for_space_id = 0;
        report->gone.for_tenant_id = 0;
    }
}

static void journal_reach(const struct question *question)
{
    const struct kvk_journal *journal = &question->cache->journal;
    const struct kvk_gone *oldest = kvk_journal_oldest(journal);
    if (oldest != NULL && kvk_journal_has_overwritten(journal)) {
        question->report->journal_reach_ms =
            since_ms(kvk_clock_now(question->cache->clock), oldest->time_ns) + 1;
    }
}

static void judge_missing_drops(struct question *question, const struct kvk_prefix *prefix)
{
    struct kvk_miss_report *report = question->report;
    struct kvk_gone copy;
    uint64_t from;
    struct kvk_key key =
        key_before(question, prefix->known[report->group], report->missing_block, &from);
    const struct kvk_gone *gone = journal_ask(question, key, from, &copy);
    if (gone == NULL) {
        gone = journal_ask_back(question, &copy);
        report->gone_before = gone != NULL;
    }
    journal_reach(question);
    /* Who writes it now is the better answer than why an earlier copy went. */
    report->writing_sequence_id = writer_find_drops(question);
    if (report->writing_sequence_id != 0) {
        report->miss = KVK_MISS_WRITING;
    } else if (gone != NULL) {
        gone_fill(question, gone);
    } else if (is_under_other_salt_drops(question)) {
        report->miss = KVK_MISS_OTHER_SALT;
    } else {
        report->miss = report->journal_reach_ms > 0 ? KVK_MISS_FORGOTTEN : KVK_MISS_NEVER;
    }
}

/* The first block of the prefix that a query sees and that lies on disk alone; else their number.
 */
static uint64_t first_on_disk(const struct question *question, const struct kvk_prefix *prefix)
{
    uint64_t first = prefix->blocks;
    for (uint32_t g = 0; g < question->space->group_count; g++) {
        for (uint64_t i = 0; i < first; i++) {
            if (question->cache->path_tiers[g][i] == 1U << KVK_TIER_DISK &&
                kvk_group_sees(question->space->groups[g], prefix->blocks, i)) {
                first = i;
            }
        }
    }
    return first;
}

/* Everything has bytes somewhere, and a look-up says so. An opening leaves what is on disk alone
 * where it is, if reading is not estimated to be quicker than computing. */
static void judge_present(const struct question *question, const struct kvk_prefix *prefix)
{
    struct kvk_miss_report *report = question->report;
    struct kvk_disk_estimate estimate;
    report->missing_block = question->wanted;
    kvk_disk_estimate(question->cache, question->space, prefix, &estimate);
    if (estimate.disk_tokens > 0 && kvk_disk_is_left(&estimate)) {
        report->miss = KVK_MISS_ON_DISK;
        report->missing_block = first_on_disk(question, prefix);
        report->cached_tokens = report->missing_block * question->space->block_tokens;
        report->partial_tokens = 0;
        report->load_ns = estimate.restore_ns;
        report->recompute_ns = estimate.recompute_ns;
    }
}

/* What of the next block an opening would take from another one. */
static void find_part(struct question *question, const struct kvk_prefix *prefix, uint64_t limit)
{
    struct kvk_prefix with_part = *prefix;
    kvk_partial_find(question->cache, question->space, question->roots, question->prompt, limit,
                     &with_part);
    question->report->partial_tokens = with_part.partial_tokens;
    question->report->cached_tokens = kvk_prefix_tokens(question->space, &with_part);
}

static void answer_drops(struct question *question, bool leave_last)
{
    struct kvk_cache *cache = question->cache;
    struct kvk_space *space = question->space;
    const struct kvk_prompt *prompt = question->prompt;
    struct kvk_miss_report *report = question->report;
    struct kvk_prefix prefix;
    uint64_t limit = kvk_prefix_limit(space, prompt, leave_last);
    report->block_tokens = space->block_tokens;
    report->minimum_tokens = space->lookup_min_tokens;
    report->prompt_blocks = prompt->token_count / space->block_tokens;
    question->wanted = limit / space->block_tokens;
    if (question->wanted > cache->path_capacity) {
        question->wanted = cache->path_capacity;
    }
    struct kvk_prompt own = *prompt;
    own.use_public = false; /* the journal knows of the space's own chain alone */
    kvk_space_roots_find(cache, space, prompt->salt, prompt->salt_size, question->roots);
    kvk_prefix_find(cache, space, question->roots, &own, limit, &prefix);
    find_part(question, &prefix, limit);
    if (question->wanted == 0) {
        uint64_t asked = prompt->token_count - (leave_last && prompt->token_count > 0 ? 1 : 0);
        bool is_below = report->prompt_blocks > 0 && asked < space->lookup_min_tokens;
        report->miss = is_below ? KVK_MISS_BELOW_MINIMUM : KVK_MISS_SHORT;
        return;
    }
    question->content = (struct kvk_content){
        .tokens = prompt->tokens,
        .token_count = question->wanted * space->block_tokens,
        .spans = prompt->spans,
        .span_count = prompt->span_count,
    };
    kvk_remote_known(cache, space, prompt, limit, &prefix, &report->remote);
    find_missing(question, &prefix);
    if (report->missing_block < question->wanted) {
        judge_missing_drops(question, &prefix);
    } else {
        judge_present(question, &prefix);
    }
}

/* ---- In words ---- */

struct words {
    char *text; /* [size] */
    size_t size;
    size_t used;
};

KVK_PRINTF(2, 3)
static void say(struct words *words, const char *format, ...)
{
    va_list arguments;
    if (words->used + 1 >= words->size) {
        return;
    }
    va_start(arguments, format);
    int size = vsnprintf(words->text + words->used, words->size - words->used, format, arguments);
    va_end(arguments);
    size_t left = words->size - words->used - 1;
    words->used += size < 0 ? 0 : (size_t)size < left ? (size_t)size : left;
}

static void say_age(struct words *words, uint64_t ms)
{
    if (ms < 10000) {
        say(words, "%.1f s", (double)ms / 1000);
    } else if (ms < UINT64_C(7200000)) {
        say(words, "%.0f s", (double)ms / 1000);
    } else {
        say(words, "%.1f h", (double)ms / 3600000);
    }
}

static void say_gone(struct words *words, const struct kvk_miss_report *report)
{
    static const char *const reasons[KVK_GONE_REASON_COUNT] = {
        [KVK_GONE_EVICTED] = "was evicted to make room",
        [KVK_GONE_IDLE] = "went because it was idle for too long",
        [KVK_GONE_QUOTA] = "went because its tenant's limit was reached",
        [KVK_GONE_INVALIDATED] = "was invalidated",
        [KVK_GONE_DAMAGED] =
            "was dropped because its bytes could not be read, or did not match their checksum",
        [KVK_GONE_ABORTED] = "was begun, but its writer ended before it was sealed",
        [KVK_GONE_FORGOTTEN] = "went with its tenant's data",
        [KVK_GONE_LIMIT] = "went because all block records ([limits] blocks) were in use",
    };
    const struct kvk_gone *gone = &report->gone;
    say(words, "it %s ", reasons[gone->reason]);
    say_age(words, report->gone_age_ms);
    say(words, " ago");
    if (gone->reason == KVK_GONE_EVICTED && report->gone_for_other) {
        say(words, ", for %s%.64s", report->gone_for == NULL ? "another tenant" : "tenant ",
            report->gone_for == NULL ? "" : report->gone_for->name);
    } else if (gone->reason == KVK_GONE_EVICTED && gone->for_space_id != 0) {
        say(words, ", for its own tenant (space %llu)", (unsigned long long)gone->for_space_id);
    }
    if (gone->use_count > 0) {
        say(words, "; it had been used %u times, last ", gone->use_count);
        say_age(words, gone->idle_ms);
        say(words, " before");
    }
    if (report->missing_gone > 1) {
        say(words, ". Of the %llu missing blocks %llu had been there",
            (unsigned long long)report->missing_looked, (unsigned long long)report->missing_gone);
    }
    say(words, ".");
}

static void say_missing(struct words *words, const struct kvk_miss_report *report)
{
    switch (report->miss) {
    case KVK_MISS_GONE:
        say_gone(words, report);
        break;
    case KVK_MISS_NEVER:
        say(words, "nobody sealed it since the daemon started.");
        break;
    case KVK_MISS_FORGOTTEN:
        say(words, "it was never sealed, or went longer ago than the journal reaches (");
        say_age(words, report->journal_reach_ms);
        say(words, "; [limits] journal_entries).");
        break;
    case KVK_MISS_OTHER_SALT:
        say(words, "it is cached under another salt: only requests with the same salt share.");
        break;
    case KVK_MISS_WRITING:
        say(words, "sequence %llu has it and has not sealed it on all ranks yet.",
            (unsigned long long)report->writing_sequence_id);
        break;
    case KVK_MISS_ON_DISK:
        say(words,
            "it lies on disk alone, and reading it (%.3f ms) is not estimated to be quicker than "
            "computing it (%.3f ms).",
            (double)report->load_ns / 1e6, (double)report->recompute_ns / 1e6);
        break;
    case KVK_MISS_NONE:
    case KVK_MISS_SHORT:
    case KVK_MISS_BELOW_MINIMUM:
        break;
    }
}

/* What the remote store was asked for, and said. */
static void say_remote(struct words *words, const struct kvk_miss_report *report)
{
    const struct kvk_remote_use *remote = &report->remote;
    switch (remote->state) {
    case KVK_REMOTE_USE_NONE:
        break;
    case KVK_REMOTE_USE_ASKED:
        say(words, " The remote store is being asked for it.");
        break;
    case KVK_REMOTE_USE_FETCHING:
        say(words, " %llu tokens of it are coming from the remote store (%.3f ms).",
            (unsigned long long)remote->tokens, (double)remote->fetch_ns / 1e6);
        break;
    case KVK_REMOTE_USE_DONE:
        say(words,
            remote->tokens > 0 ? " The remote store had %llu tokens more of it; they did "
                                 "not all come, or went again."
                               : " What the remote store had of it has come.",
            (unsigned long long)remote->tokens);
        break;
    case KVK_REMOTE_USE_ABSENT:
        say(words, " The remote store has no more of it.");
        break;
    case KVK_REMOTE_USE_LEFT:
        say(words,
            " The remote store has %llu tokens more of it, but fetching them (%.3f ms) is not "
            "estimated to be quicker than computing them (%.3f ms).",
            (unsigned long long)remote->tokens, (double)remote->fetch_ns / 1e6,
            (double)remote->recompute_ns / 1e6);
        break;
    case KVK_REMOTE_USE_FAILED:
        say(words, " The remote store was asked for it and did not answer.");
        break;
    case KVK_REMOTE_USE_BUSY:
        say(words, " The remote store was not asked for it: too many prompts waited.");
        break;
    }
}

/* Behind a sentence about whole blocks. */
static void say_part(struct words *words, const struct kvk_miss_report *report)
{
    if (report->partial_tokens > 0) {
        say(words,
            " The last %llu of the cached tokens are a part of another block, and are copied.",
            (unsigned long long)report->partial_tokens);
    }
}

static void sentence_make(struct kvk_miss_report *report)
{
    struct words words = {.text = report->sentence, .size = sizeof(report->sentence)};
    if (report->miss == KVK_MISS_SHORT) {
        say(&words, "The prompt has no whole block of %u tokens that could be a hit.",
            report->block_tokens);
        say_part(&words, report);
        return;
    }
    if (report->miss == KVK_MISS_BELOW_MINIMUM) {
        say(&words, "The space does not look up prefixes under %u tokens.", report->minimum_tokens);
        return;
    }
    if (report->miss == KVK_MISS_NONE) {
        say(&words, "Nothing is missing: all %llu blocks are cached.",
            (unsigned long long)report->missing_block);
        say_part(&words, report);
        return;
    }
    unsigned long long first_token = report->missing_block * report->block_tokens;
    say(&words, "%llu tokens are cached. Block %llu of the chain (tokens %llu to %llu",
        (unsigned long long)report->cached_tokens, (unsigned long long)report->missing_block,
        first_token, first_token + report->block_tokens - 1);
    if (report->group > 0) {
        say(&words, ", layer group %u", report->group);
    }
    say(&words, ") is the first that is missing: ");
    say_missing(&words, report);
    say_part(&words, report);
    say_remote(&words, report);
}

enum kvk_status kvk_report_miss(struct kvk_cache *cache, const struct kvk_caller *caller,
                                uint64_t space_id, const struct kvk_prompt *prompt, bool leave_last,
                                struct kvk_miss_report *report, struct kvk_error *error)
{
    const struct kvk_scope scope = {.credential = caller->credential};
    *report = (struct kvk_miss_report){.miss = KVK_MISS_NONE};
    kvk_lock(&cache->lock);
    struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
    /* Another tenant's space answers as if there were none. */
    if (space == NULL || !kvk_scope_sees(&scope, space->tenant)) {
        kvk_unlock(&cache->lock);
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id", "no such space");
    }
    struct question question = {
        .cache = cache, .scope = &scope, .space = space, .prompt = prompt, .report = report};
    space->reference_count++;
    answer_drops(&question, leave_last);
    space->reference_count--;
    kvk_unlock(&cache->lock);
    sentence_make(report);
    return KVK_OK;
}
