#include "gpu/attend_shared.h"

#include <stdbool.h>
#include <stdlib.h>

#include "base/assert.h"

/* Members that have all pages before `page` in common; those before `begin` are in segments. */
struct branch {
    uint32_t first_member;
    uint32_t member_count;
    uint32_t begin;
    uint32_t page;
};

/* What tells members apart. */
struct key {
    uint32_t next;     /* the next page that is there */
    uintptr_t page;    /* 0: there is none */
    uint64_t position; /* under a window: others see something else */
    uint64_t first_token;
    uint32_t item;
};

struct splitting {
    const struct kvk_attend *attend;
    struct kvk_attend_split *split;
    struct branch *branches; /* a stack; disjoint members, so [item_count] at most */
    uint32_t branch_count;
    struct key *keys; /* [item_count], for sorting members apart */
    uint64_t tokens_min;
};

static const struct kvk_attend_item *member(const struct splitting *work, uint32_t index)
{
    return &work->attend->items[work->split->members[index]];
}

/* The first page from `page` on that is there, or the table's end. Absent pages are in other hands:
 * they neither join items nor part them. */
static uint32_t next_present(const struct kvk_attend_item *item, uint32_t page)
{
    while (page < item->page_count && item->pages[page] == NULL) {
        page++;
    }
    return page;
}

/* Behind the last page that all of the branch's members have, from branch->page on. */
static uint32_t common_end(const struct splitting *work, const struct branch *branch)
{
    const struct kvk_attend_item *first = member(work, branch->first_member);
    uint32_t end = first->page_count;

    for (uint32_t i = 1; i < branch->member_count; i++) {
        const struct kvk_attend_item *other = member(work, branch->first_member + i);
        uint32_t page = branch->page;
        end = other->page_count < end ? other->page_count : end;
        while (page < end && first->pages[page] == other->pages[page]) {
            page++;
        }
        end = page;
    }
    while (end > branch->page && first->pages[end - 1] == NULL) {
        end--;
    }
    return end;
}

static void segment_add(struct splitting *work, const struct branch *branch, uint32_t end)
{
    work->split->segments[work->split->segment_count++] = (struct kvk_attend_segment){
        .first_member = branch->first_member,
        .member_count = branch->member_count,
        .first_page = branch->begin,
        .page_count = end - branch->begin,
    };
}

static int key_compare(const void *left, const void *right)
{
    const struct key *a = left;
    const struct key *b = right;

    if (a->page != b->page) {
        return a->page < b->page ? -1 : 1;
    }
    if (a->next != b->next) {
        return a->next < b->next ? -1 : 1;
    }
    if (a->position != b->position) {
        return a->position < b->position ? -1 : 1;
    }
    if (a->first_token != b->first_token) {
        return a->first_token < b->first_token ? -1 : 1;
    }
    return a->item < b->item ? -1 : 1;
}

/* Put members whose next page is the same side by side, and push a branch for each such group. */
static void branch_out(struct splitting *work, const struct branch *branch)
{
    struct branch next = *branch;

    for (uint32_t i = 0; i < branch->member_count; i++) {
        const struct kvk_attend_item *item = member(work, branch->first_member + i);
        uint32_t page = next_present(item, branch->page);
        work->keys[i] = (struct key){
            .next = page,
            .page = page < item->page_count ? (uintptr_t)item->pages[page] : 0,
            .position = work->attend->window != 0 ? item->position : 0,
            .first_token = item->first_token,
            .item = work->split->members[branch->first_member + i],
        };
    }
    qsort(work->keys, branch->member_count, sizeof(work->keys[0]), key_compare);
    next.member_count = 0;
    for (uint32_t i = 0; i < branch->member_count; i++) {
        const struct key *key = &work->keys[i];
        const struct key *before = i > 0 ? &work->keys[i - 1] : key;
        bool alike = key->page != 0 && key->page == before->page && key->next == before->next &&
                     key->position == before->position && key->first_token == before->first_token;
        work->split->members[branch->first_member + i] = key->item;
        if (i > 0 && !alike) {
            work->branches[work->branch_count++] = next;
            next.first_member += next.member_count;
            next.member_count = 0;
        }
        next.member_count++;
    }
    work->branches[work->branch_count++] = next;
}

static void branch_split(struct splitting *work, struct branch branch)
{
    if (branch.member_count == 1) {
        uint32_t end = member(work, branch.first_member)->page_count;
        if (end > branch.begin || branch.begin == 0) {
            segment_add(work, &branch, end);
        }
        return;
    }
    uint32_t end = common_end(work, &branch);
    uint64_t tokens = (uint64_t)(end - branch.begin) * work->attend->block_tokens;
    if (end > branch.begin && tokens >= work->tokens_min) {
        segment_add(work, &branch, end);
        branch.begin = end;
    }
    branch.page = end;
    branch_out(work, &branch);
}

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                    "no memory to find what a batch shares");
}

enum kvk_status kvk_attend_split_init(struct kvk_attend_split *split,
                                      const struct kvk_attend *attend, uint64_t tokens_min,
                                      struct kvk_error *error)
{
    size_t count = attend->item_count;
    struct splitting work = {.attend = attend, .split = split, .tokens_min = tokens_min};
    enum kvk_status status = KVK_OK;

    *split = (struct kvk_attend_split){
        .segments = calloc(2 * count, sizeof(*split->segments)),
        .members = calloc(count, sizeof(*split->members)),
    };
    work.branches = calloc(count, sizeof(*work.branches));
    work.keys = calloc(count, sizeof(*work.keys));
    if (split->segments == NULL || split->members == NULL || work.branches == NULL ||
        work.keys == NULL) {
        status = no_memory(error);
        kvk_attend_split_finish(split);
        goto done;
    }
    for (uint32_t i = 0; i < count; i++) {
        split->members[i] = i;
    }
    branch_out(&work, &(struct branch){.member_count = (uint32_t)count});
    while (work.branch_count > 0) {
        KVK_ASSERT(work.branch_count <= count);
        branch_split(&work, work.branches[--work.branch_count]);
        KVK_ASSERT(split->segment_count <= 2 * count);
    }
done:
    free(work.keys);
    free(work.branches);
    return status;
}

void kvk_attend_split_finish(struct kvk_attend_split *split)
{
    free(split->segments);
    free(split->members);
    *split = (struct kvk_attend_split){.segments = NULL};
}
