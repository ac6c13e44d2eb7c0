#include "daemon/journal.h"

#include "base/assert.h"
#include "base/pages.h"

_Static_assert(sizeof(struct kvk_gone) == 72, "72 bytes an event");

/* Lists hold one event on average. Where all keys are equal, a test, they would hold them all. */
#define LIST_LENGTH_MAX 64

const char *kvk_gone_reason_name(enum kvk_gone_reason reason)
{
    switch (reason) {
    case KVK_GONE_NONE:
        break;
    case KVK_GONE_EVICTED:
        return "evicted";
    case KVK_GONE_IDLE:
        return "idle";
    case KVK_GONE_QUOTA:
        return "quota";
    case KVK_GONE_INVALIDATED:
        return "invalidated";
    case KVK_GONE_DAMAGED:
        return "damaged";
    case KVK_GONE_ABORTED:
        return "aborted";
    case KVK_GONE_FORGOTTEN:
        return "forgotten";
    case KVK_GONE_LIMIT:
        return "limit";
    }
    return "none";
}

enum kvk_status kvk_journal_init(struct kvk_journal *journal, uint32_t capacity)
{
    *journal = (struct kvk_journal){.capacity = capacity};
    if (capacity == 0) {
        return KVK_OK;
    }
    journal->entries = kvk_pages_create(capacity * sizeof(*journal->entries));
    journal->heads = kvk_pages_create(capacity * sizeof(*journal->heads));
    if (journal->entries == NULL || journal->heads == NULL) {
        kvk_journal_finish(journal);
        return KVK_EXHAUSTED;
    }
    return KVK_OK;
}

void kvk_journal_finish(struct kvk_journal *journal)
{
    kvk_pages_destroy(journal->heads, journal->capacity * sizeof(*journal->heads));
    kvk_pages_destroy(journal->entries, journal->capacity * sizeof(*journal->entries));
    *journal = (struct kvk_journal){0};
}

static uint32_t *head_of(const struct kvk_journal *journal, struct kvk_key key)
{
    return &journal->heads[((key.high >> 32) * journal->capacity) >> 32];
}

void kvk_journal_expect(const struct kvk_journal *journal, struct kvk_key key)
{
    if (journal->capacity > 0) {
        __builtin_prefetch(head_of(journal, key), 1);
        __builtin_prefetch(&journal->entries[journal->next_place], 1);
        /* An entry may lie in two lines. */
        __builtin_prefetch((const char *)(&journal->entries[journal->next_place] + 1) - 1, 1);
    }
}

void kvk_journal_add(struct kvk_journal *journal, const struct kvk_gone *gone)
{
    KVK_ASSERT(gone->reason > KVK_GONE_NONE && gone->reason < KVK_GONE_REASON_COUNT);
    journal->counts[gone->reason]++;
    if (journal->capacity == 0) {
        return;
    }
    uint32_t *head = head_of(journal, gone->key);
    struct kvk_gone *entry = &journal->entries[journal->next_place];
    *entry = *gone;
    entry->next = *head;
    journal->next_place++;
    *head = journal->next_place;
    if (journal->next_place == journal->capacity) {
        journal->next_place = 0;
    }
    journal->added++;
}

/* How many events came after the one at `place`. */
static uint32_t rank_of(const struct kvk_journal *journal, uint32_t place)
{
    return place < journal->next_place ? journal->next_place - 1 - place
                                       : journal->next_place - 1 + (journal->capacity - place);
}

const struct kvk_gone *kvk_journal_find(const struct kvk_journal *journal, struct kvk_key key,
                                        uint64_t space_id, uint32_t group, bool any_tier)
{
    if (journal->capacity == 0) {
        return NULL;
    }
    const uint32_t *head = head_of(journal, key);
    int64_t rank_before = -1;
    uint32_t link = *head;
    for (int step = 0; step < LIST_LENGTH_MAX && link != 0; step++) {
        const struct kvk_gone *entry = &journal->entries[link - 1];
        uint32_t rank = rank_of(journal, link - 1);
        if (rank <= rank_before || head_of(journal, entry->key) != head) {
            return NULL;
        }
        if (kvk_key_equal(entry->key, key) && entry->space_id == space_id &&
            entry->group == group && (any_tier || entry->left == 0)) {
            return entry;
        }
        rank_before = rank;
        link = entry->next;
    }
    return NULL;
}

const struct kvk_gone *kvk_journal_oldest(const struct kvk_journal *journal)
{
    if (journal->added == 0 || journal->capacity == 0) {
        return NULL;
    }
    return &journal->entries[kvk_journal_has_overwritten(journal) ? journal->next_place : 0];
}

uint64_t kvk_journal_bytes(const struct kvk_journal *journal)
{
    return journal->capacity * (sizeof(*journal->entries) + sizeof(*journal->heads));
}
