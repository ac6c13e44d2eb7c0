/*
 * Long calls give up the lock between slices. What others may see then, and what becomes of the
 * call where its instance ends or its prefix is invalidated in between.
 *
 * Without threads the engine's pause is a sched_yield(): the one below does what the test asks for,
 * so that it happens exactly there.
 */
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

#include "tests/engine_stage.h"

#define LENGTH 38 /* tokens: nine whole blocks and a tail */
#define BLOCKS 10

static struct {
    struct stage *stage;
    void (*act)(struct stage *stage); /* in each pause; NULL: nothing */
    uint32_t pauses;
    bool inside;
    bool has_ending; /* a thread that ends the session */
    uint64_t ids[8]; /* of what the call is about */
    uint32_t count;
    uint64_t child;
} between;

static bool ending_paused(void);

int sched_yield(void)
{
    if (ending_paused()) {
        return 0;
    }
    if (between.stage != NULL && !between.inside && kvk_locks_held() == 0) {
        between.inside = true;
        between.pauses++;
        stage_check(between.stage);
        if (between.act != NULL) {
            between.act(between.stage);
        }
        stage_check(between.stage);
        between.inside = false;
    }
    return 0;
}

/* Three references in one go. */
static void slices_start(struct stage *stage)
{
    const struct kvk_test_control control = {.slice_blocks = 3};
    stage_start(stage, 0, 64);
    cr_assert_eq(kvk_cache_test_control(stage->house.cache, &control, &stage->house.error), KVK_OK);
    memset(&between, 0, sizeof(between));
    between.stage = stage;
}

static void slices_stop(struct stage *stage)
{
    between.act = NULL;
    cr_expect_eq(stage->house.cache->passing_holds, 0);
    stage_stop(stage);
    between.stage = NULL;
}

/* A sequence with all its tokens written and sealed. */
static uint64_t sealed(struct stage *stage, uint32_t first)
{
    uint32_t tokens[LENGTH];
    house_tokens(tokens, LENGTH, first);
    uint64_t id = stage_open(stage, tokens, LENGTH).sequence_id;
    stage_fill(stage, id, first);
    return id;
}

static uint64_t cached(struct stage *stage, uint32_t first)
{
    uint32_t tokens[LENGTH];
    house_tokens(tokens, LENGTH, first);
    return stage_hit(stage, tokens, LENGTH, false);
}

static void begin(void (*act)(struct stage *stage))
{
    between.pauses = 0;
    between.act = act;
}

static void session_end(struct stage *stage)
{
    kvk_session_end(stage->house.cache, stage->session);
}

static enum kvk_status sequence_look(struct stage *stage, uint64_t id)
{
    struct kvk_sequence_reply reply;
    return kvk_sequence_get(stage->house.cache, &stage->house.caller, stage->session, id, &reply,
                            NULL, &stage->house.error);
}

/* ---- Fork ---- */

/* No child can be used, nor is one told; the parent is not to be had. */
static void fork_look(struct stage *stage)
{
    struct kvk_cache *cache = stage->house.cache;
    uint64_t ids[3];
    size_t place = 0;
    const struct kvk_table_entry *entry;
    cr_expect_eq(cache->sequence_table.count, 4);
    while ((entry = kvk_table_next(&cache->sequence_table, &place)) != NULL) {
        cr_expect_eq(sequence_look(stage, entry->key), KVK_UNAVAILABLE);
    }
    cr_expect_eq(stage_try_fork(stage, between.ids[0], LENGTH, 3, "f", ids), KVK_UNAVAILABLE);
    cr_expect_eq(stage->house.error.cause, KVK_CAUSE_BUSY);
    struct kvk_close_reply closed;
    cr_expect_eq(kvk_sequence_close(cache, &stage->house.caller, stage->session, between.ids, 1,
                                    &closed, &stage->house.error),
                 KVK_UNAVAILABLE);
}

Test(slices, a_fork_is_seen_when_all_of_it_is_there)
{
    struct stage stage;
    uint64_t ids[3];
    uint64_t again[3];
    slices_start(&stage);
    between.ids[0] = sealed(&stage, 1);
    begin(fork_look);
    STAGE_OK(&stage, stage_try_fork(&stage, between.ids[0], LENGTH, 3, "f", ids));
    cr_expect_eq(between.pauses, 3 * BLOCKS / 3);
    begin(NULL);
    STAGE_OK(&stage, stage_try_fork(&stage, between.ids[0], LENGTH, 3, "f", again));
    cr_expect_eq(memcmp(ids, again, sizeof(ids)), 0);
    for (uint32_t i = 0; i < 3; i++) {
        cr_expect_eq(stage_get(&stage, ids[i]).length, LENGTH);
        for (uint32_t b = 0; b < BLOCKS; b++) {
            cr_expect_eq(stage_block(&stage, ids[i], b), stage_block(&stage, between.ids[0], b));
        }
    }
    slices_stop(&stage);
}

Test(slices, a_fork_whose_session_ends_leaves_nothing)
{
    struct stage stage;
    uint64_t ids[3];
    slices_start(&stage);
    uint64_t id = sealed(&stage, 1);
    begin(session_end);
    cr_expect_eq(stage_try_fork(&stage, id, LENGTH, 3, "", ids), KVK_ABORTED);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_SESSION_ENDED);
    cr_expect_geq(between.pauses, 1);
    begin(NULL);
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage.house.cache->sequence_table.count, 0);
    cr_expect_eq(stage.house.cache->instance_count, 0);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_HOST), 0);
    cr_expect_eq(cached(&stage, 1), LENGTH / 4 * 4);
    slices_stop(&stage);
}

/* Two calls that pause by turns: the session's end, which has doomed a child and not come to the
 * parent, waits in its first pause until the fork is over. */
static struct {
    pthread_t thread;
    sem_t paused;
    sem_t over;
} ending;

static bool ending_paused(void)
{
    static bool once;
    if (!between.has_ending || !pthread_equal(pthread_self(), ending.thread)) {
        return false;
    }
    if (!once) {
        once = true;
        cr_assert_eq(sem_post(&ending.paused), 0);
        cr_assert_eq(sem_wait(&ending.over), 0);
    }
    return true;
}

static void *ending_run(void *stage)
{
    session_end((struct stage *)stage);
    return NULL;
}

static void fork_end(struct stage *stage)
{
    begin(NULL);
    between.has_ending = true;
    kvk_lock(&stage->house.cache->lock); /* until the thread is known */
    cr_assert_eq(pthread_create(&ending.thread, NULL, ending_run, stage), 0);
    kvk_unlock(&stage->house.cache->lock);
    cr_assert_eq(sem_wait(&ending.paused), 0);
}

Test(slices, a_fork_during_its_instances_end_leaves_nothing, .timeout = 30)
{
    struct stage stage;
    uint64_t ids[3];
    slices_start(&stage);
    uint64_t id = sealed(&stage, 1);
    cr_assert_eq(sem_init(&ending.paused, 0, 0), 0);
    cr_assert_eq(sem_init(&ending.over, 0, 0), 0);
    begin(fork_end);
    cr_expect_eq(stage_try_fork(&stage, id, LENGTH, 3, "", ids), KVK_ABORTED);
    begin(NULL);
    cr_assert_eq(sem_post(&ending.over), 0);
    cr_assert_eq(pthread_join(ending.thread, NULL), 0);
    between.has_ending = false;
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage.house.cache->sequence_table.count, 0);
    cr_expect_eq(stage.house.cache->instance_count, 0);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_HOST), 0);
    slices_stop(&stage);
}

static void prefix_invalidate(struct stage *stage)
{
    uint32_t tokens[LENGTH];
    house_tokens(tokens, LENGTH, 1);
    const struct kvk_prompt prefix = {.tokens = tokens, .token_count = 4};
    const struct kvk_invalidate_request request = {.space_id = stage->space, .prefix = &prefix};
    struct kvk_invalidate_reply reply;
    STAGE_OK(stage, kvk_invalidate(stage->house.cache, &stage->house.caller, &request, &reply,
                                   &stage->house.error));
}

Test(slices, what_is_invalidated_during_a_fork_is_not_indexed_by_a_child)
{
    struct stage stage;
    uint32_t more[8];
    uint64_t ids[2];
    slices_start(&stage);
    uint64_t id = sealed(&stage, 1);
    begin(prefix_invalidate);
    STAGE_OK(&stage, stage_try_fork(&stage, id, LENGTH, 2, "", ids));
    cr_expect_geq(between.pauses, 1);
    begin(NULL);
    house_tokens(more, 8, LENGTH + 1);
    for (uint32_t i = 0; i < 2; i++) {
        stage_append(&stage, ids[i], LENGTH, more, 8, false);
        stage_fill(&stage, ids[i], 1);
    }
    cr_expect_eq(cached(&stage, 1), 0);
    slices_stop(&stage);
}

Test(slices, a_caller_that_must_not_wait_is_told_so_before_anything_happens)
{
    struct stage stage;
    uint64_t ids[3];
    struct kvk_close_reply closed;
    slices_start(&stage);
    uint64_t id = sealed(&stage, 1);
    begin(NULL);
    stage.house.caller.may_block = false;
    cr_expect_eq(stage_try_fork(&stage, id, LENGTH, 3, "", ids), KVK_WOULD_BLOCK);
    cr_expect_eq(kvk_sequence_close(stage.house.cache, &stage.house.caller, stage.session, &id, 1,
                                    &closed, &stage.house.error),
                 KVK_WOULD_BLOCK);
    cr_expect_eq(between.pauses, 0);
    cr_expect_eq(stage.house.cache->sequence_table.count, 1);
    cr_expect_eq(stage_get(&stage, id).length, LENGTH);
    stage.house.caller.may_block = true;
    stage_close(&stage, id);
    slices_stop(&stage);
}

/* ---- Close ---- */

/* All are closed, and none can be closed again. */
static void close_look(struct stage *stage)
{
    struct kvk_close_reply closed;
    for (uint32_t i = 0; i < between.count; i++) {
        cr_expect_eq(sequence_look(stage, between.ids[i]), KVK_NOT_FOUND);
        cr_expect_eq(kvk_sequence_close(stage->house.cache, &stage->house.caller, stage->session,
                                        &between.ids[i], 1, &closed, &stage->house.error),
                     KVK_NOT_FOUND);
    }
}

static void close_three(struct stage *stage, void (*act)(struct stage *stage))
{
    struct kvk_close_reply closed;
    slices_start(stage);
    for (uint32_t i = 0; i < 3; i++) {
        between.ids[i] = sealed(stage, 1 + i * 1000);
    }
    between.count = 3;
    begin(act);
    STAGE_OK(stage, kvk_sequence_close(stage->house.cache, &stage->house.caller, stage->session,
                                       between.ids, 3, &closed, &stage->house.error));
    cr_expect_geq(between.pauses, 3 * BLOCKS / 3 - 1);
    begin(NULL);
    cr_expect_eq(closed.cached_blocks, 3 * (BLOCKS - 1));
    cr_expect_eq(closed.freed_blocks, 3);
    cr_expect_eq(stage->house.cache->sequence_table.count, 0);
    cr_expect_eq(stage_bound(stage, KVK_TIER_HOST), 0);
}

Test(slices, a_close_closes_all_at_once)
{
    struct stage stage;
    close_three(&stage, close_look);
    slices_stop(&stage);
}

Test(slices, a_close_goes_on_when_its_session_ends)
{
    struct stage stage;
    close_three(&stage, session_end);
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage.house.cache->instance_count, 0);
    slices_stop(&stage);
}

/* ---- Leases ---- */

static enum kvk_status lease_renew(struct stage *stage, uint64_t lease_id)
{
    return kvk_lease_renew(stage->house.cache, &stage->house.caller, stage->session, lease_id, 1000,
                           &stage->house.error);
}

static void lease_look(struct stage *stage)
{
    uint64_t released;
    for (uint32_t i = 0; i < between.count; i++) {
        cr_expect_eq(lease_renew(stage, between.ids[i]), KVK_NOT_FOUND);
        cr_expect_eq(kvk_lease_release(stage->house.cache, &stage->house.caller, stage->session,
                                       &between.ids[i], 1, &released, &stage->house.error),
                     KVK_NOT_FOUND);
    }
}

/* Their time is over, and maintenance comes round. */
static void lease_expire(struct stage *stage)
{
    stage_pass_ms(stage, 5000);
    kvk_cache_maintain(stage->house.cache);
}

static uint64_t lease_take(struct stage *stage, uint32_t first)
{
    uint32_t tokens[LENGTH];
    struct kvk_pin_reply reply;
    house_tokens(tokens, LENGTH, first);
    const struct kvk_pin_request request = {.session_id = stage->session,
                                            .space_id = stage->space,
                                            .prompt = {.tokens = tokens, .token_count = LENGTH},
                                            .ttl_ms = 1000,
                                            .copy_pin = true};
    STAGE_OK(stage, kvk_lease_pin(stage->house.cache, &stage->house.caller, &request, &reply,
                                  &stage->tables, &stage->house.error));
    return reply.lease_id;
}

static void release_three(struct stage *stage, void (*act)(struct stage *stage))
{
    uint64_t released;
    slices_start(stage);
    stage_close(stage, sealed(stage, 1));
    for (uint32_t i = 0; i < 3; i++) {
        between.ids[i] = lease_take(stage, 1);
    }
    between.count = 3;
    begin(act);
    STAGE_OK(stage, kvk_lease_release(stage->house.cache, &stage->house.caller, stage->session,
                                      between.ids, 3, &released, &stage->house.error));
    cr_expect_geq(between.pauses, 3 * (BLOCKS - 1) / 3);
    begin(NULL);
    cr_expect_eq(released, 3 * (BLOCKS - 1));
    cr_expect_eq(stage->house.cache->lease_table.count, 0);
    cr_expect_null(stage->house.cache->lease_heap);
    cr_expect_eq(stage_stats(stage).leases_expired, 0);
    cr_expect_eq(stage_bound(stage, KVK_TIER_HOST), 0);
}

Test(slices, a_release_releases_all_at_once)
{
    struct stage stage;
    release_three(&stage, lease_look);
    slices_stop(&stage);
}

Test(slices, a_release_goes_on_when_their_time_is_over)
{
    struct stage stage;
    release_three(&stage, lease_expire);
    slices_stop(&stage);
}

Test(slices, a_release_goes_on_when_its_session_ends)
{
    struct stage stage;
    release_three(&stage, session_end);
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage.house.cache->instance_count, 0);
    slices_stop(&stage);
}

Test(slices, a_long_lease_that_is_over_ends_by_maintenance)
{
    struct stage stage;
    slices_start(&stage);
    stage_close(&stage, sealed(&stage, 1));
    uint64_t id = lease_take(&stage, 1);
    stage_pass_ms(&stage, 5000);
    begin(NULL);
    cr_expect_eq(lease_renew(&stage, id), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LEASE_EXPIRED);
    cr_expect_eq(between.pauses, 0, "renewing does not wait");
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage.house.cache->lease_table.count, 0);
    cr_expect_eq(lease_renew(&stage, id), KVK_PRECONDITION, "it is remembered");
    slices_stop(&stage);
}

/* ---- Seal ---- */

/* What is found is whole blocks of what was sealed; the sequence is not to be had. */
static void seal_look(struct stage *stage)
{
    uint64_t found = cached(stage, 1);
    cr_expect_eq(found % 4, 0);
    cr_expect_lt(found, LENGTH);
    cr_expect_eq(sequence_look(stage, between.ids[0]), KVK_UNAVAILABLE);
}

static enum kvk_status seal_written(struct stage *stage, void (*act)(struct stage *stage))
{
    uint32_t tokens[LENGTH];
    house_tokens(tokens, LENGTH, 1);
    between.ids[0] = stage_open(stage, tokens, LENGTH).sequence_id;
    STAGE_OK(stage, stage_try_write(stage, between.ids[0], 0, 0, 0, LENGTH, 1));
    begin(act);
    enum kvk_status status =
        house_try_seal(&stage->house, stage->session, between.ids[0], LENGTH, LENGTH);
    cr_expect_geq(between.pauses, BLOCKS - 1);
    begin(NULL);
    return status;
}

Test(slices, a_seal_shows_whole_blocks)
{
    struct stage stage;
    slices_start(&stage);
    cr_expect_eq(seal_written(&stage, seal_look), KVK_OK);
    cr_expect_eq(cached(&stage, 1), LENGTH / 4 * 4);
    cr_expect_eq(stage_get(&stage, between.ids[0]).sealed_tokens, LENGTH);
    slices_stop(&stage);
}

Test(slices, a_seal_whose_session_ends_is_told_and_what_is_whole_stays)
{
    struct stage stage;
    slices_start(&stage);
    cr_expect_eq(seal_written(&stage, session_end), KVK_ABORTED);
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage.house.cache->sequence_table.count, 0);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_HOST), 0);
    cr_expect_eq(cached(&stage, 1), LENGTH / 4 * 4);
    slices_stop(&stage);
}

Test(slices, a_seal_goes_on_when_its_prefix_is_invalidated)
{
    struct stage stage;
    slices_start(&stage);
    cr_expect_eq(seal_written(&stage, prefix_invalidate), KVK_OK);
    cr_expect_eq(cached(&stage, 1), 0);
    cr_expect_eq(stage_get(&stage, between.ids[0]).sealed_tokens, LENGTH);
    slices_stop(&stage);
}

/* ---- The end of an instance, and invalidation ---- */

static void count_alone(struct stage *stage)
{
    (void)stage;
}

Test(slices, an_instance_ends_in_slices)
{
    struct stage stage;
    slices_start(&stage);
    for (uint32_t i = 0; i < 2; i++) {
        (void)sealed(&stage, 1 + i * 1000);
        (void)lease_take(&stage, 1 + i * 1000);
    }
    begin(count_alone);
    session_end(&stage);
    cr_expect_geq(between.pauses, 4 * (BLOCKS - 1) / 3);
    begin(NULL);
    cr_expect_eq(stage.house.cache->instance_count, 0);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_HOST), 0);
    slices_stop(&stage);
}

/* One is forked from a sequence that the invalidation has not come to yet. */
static void fork_once(struct stage *stage)
{
    for (uint32_t i = 0; i < between.count && between.child == 0; i++) {
        const struct kvk_sequence *sequence =
            kvk_table_get(&stage->house.cache->sequence_table, between.ids[i]);
        if (!sequence->groups[0].detached) {
            STAGE_OK(stage, stage_try_fork(stage, between.ids[i], 6, 1, "", &between.child));
        }
    }
}

Test(slices, an_invalidation_reaches_what_is_forked_meanwhile)
{
    struct stage stage;
    uint32_t tokens[6];
    struct kvk_sequence_reply reply;
    slices_start(&stage);
    house_tokens(tokens, 6, 1);
    for (uint32_t i = 0; i < 6; i++) { /* drafts: they are in no chain, and in nobody's way */
        between.ids[i] = stage_open(&stage, tokens, 0).sequence_id;
        stage_append(&stage, between.ids[i], 0, tokens, 6, true);
        stage_fill(&stage, between.ids[i], 1);
    }
    between.count = 6;
    begin(fork_once);
    prefix_invalidate(&stage);
    cr_expect_geq(between.pauses, 1);
    begin(NULL);
    cr_assert_neq(between.child, 0);
    STAGE_OK(&stage, stage_try_commit(&stage, between.child, 6, 6, &reply));
    cr_expect_eq(cached(&stage, 1), 0);
    slices_stop(&stage);
}
