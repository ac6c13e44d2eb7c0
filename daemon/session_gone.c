/*
 * Processes: is one gone, and what must wait for that.
 *
 * A stream that ended says nothing about the process behind it: it may live on with its mappings.
 * So what it was granted and has not sealed stays in quarantine, and what it copies under a ticket
 * stays pinned, until its pidfd says that it is gone and its side socket (which children may have
 * inherited, together with the mappings) is at its end.
 */
#include "daemon/session_internal.h"

#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"

#define SWEEP_COUNT 256 /* sessions that one round of maintenance looks at */

/* ---- Quarantine ---- */

struct kvk_session *kvk_instance_writer(struct kvk_instance *instance,
                                        const struct kvk_group *group, enum kvk_tier tier)
{
    for (struct kvk_session *session = instance->sessions; session != NULL;
         session = session->next) {
        if (session->process_gone || session->leaving) {
            continue;
        }
        for (const struct kvk_mapping *mapping = session->mappings; mapping != NULL;
             mapping = mapping->next) {
            if (mapping->kind == KVK_MAP_SLOTS && mapping->taken && mapping->writable &&
                mapping->group == group && mapping->tier == tier) {
                return session;
            }
        }
    }
    return NULL;
}

void kvk_session_quarantine(struct kvk_cache *cache, struct kvk_session *session, uint32_t block)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(!session->leaving);
    if (session->quarantine_count == session->quarantine_capacity) {
        uint32_t capacity =
            session->quarantine_capacity == 0 ? 64 : session->quarantine_capacity * 2;
        uint32_t *grown = realloc(session->quarantine, capacity * sizeof(grown[0]));
        /* Four bytes for each block that is there: a daemon that cannot get them has no memory
         * left for anything, and to give the block to others would break a law. */
        KVK_ASSERT(grown != NULL);
        session->quarantine = grown;
        session->quarantine_capacity = capacity;
    }
    session->quarantine[session->quarantine_count] = block;
    session->quarantine_count++;
    if ((kvk_index_block(cache->index, block)->flags & KVK_BLOCK_QUARANTINED) == 0) {
        cache->stats.quarantined_blocks++; /* once, whoever else is waited for */
    }
    kvk_block_set_quarantined(cache, block, true);
}

static void quarantine_pop(struct kvk_cache *cache, struct kvk_session *session)
{
    session->quarantine_count--;
    uint32_t block = session->quarantine[session->quarantine_count];
    enum kvk_tier tier = kvk_block_tier(kvk_index_block(cache->index, block));

    /* Several processes may be waited for: see warm.c. The last one frees it. */
    if (kvk_index_block(cache->index, block)->hold_count == 1) {
        kvk_block_set_quarantined(cache, block, false);
    }
    kvk_block_unpin(cache, block, tier);
    kvk_block_release(cache, block, false);
}

/* ---- Is the process gone? ---- */

/* Has the process ended that opened the session? Asks without waiting, which the lock's holder
 * may. */
static bool process_ended(const struct kvk_session *session)
{
    struct pollfd process = {.fd = session->pidfd, .events = POLLIN};
    return session->pidfd >= 0 && poll(&process, 1, 0) == 1 && (process.revents & POLLIN) != 0;
}

static void process_look(struct kvk_session *session)
{
    if (!session->process_gone && !session->side_bound) {
        session->process_gone = process_ended(session);
    }
}

/* May its process still write, or copy under a ticket, in memory of ours? Descriptors that never
 * went out cannot be used. */
static bool must_wait(const struct kvk_session *session)
{
    if (session->process_gone) {
        return false;
    }
    for (const struct kvk_mapping *mapping = session->mappings; mapping != NULL;
         mapping = mapping->next) {
        if (mapping->kind == KVK_MAP_SLOTS && mapping->taken &&
            (mapping->writable || session->transfers != NULL)) {
            return true;
        }
    }
    KVK_ASSERT(session->quarantine_count == 0);
    return false;
}

/* ---- Leaving ---- */

static void unlink_session(struct kvk_cache *cache, struct kvk_session *session)
{
    struct kvk_session **at =
        session->instance != NULL ? &session->instance->sessions : &cache->waiting_sessions;
    while (*at != session) {
        KVK_ASSERT(*at != NULL);
        at = &(*at)->next;
    }
    *at = session->next;
    if (session->instance != NULL && session->instance->opener == session) {
        session->instance->opener = NULL;
    }
    void *removed = kvk_table_remove(&cache->session_table, session->id);
    KVK_ASSERT(removed == session);
    kvk_metadata_sub(cache, session->tenant, KVK_METADATA_SESSIONS, 1, session->metadata_bytes);
}

static void leave_drops(struct kvk_cache *cache, struct kvk_session *session)
{
    uint32_t work = 0;

    session->leaving = true;
    while (session->quarantine_count > 0 || session->transfers != NULL) {
        if (session->quarantine_count > 0) {
            quarantine_pop(cache, session);
        } else {
            work += session->transfers->pin_count;
            kvk_transfer_finish(cache, session->transfers);
        }
        if (kvk_slice_drops(cache, &work)) {
            (void)pthread_cond_broadcast(&cache->changed);
        }
    }
    unlink_session(cache, session);
    struct kvk_mapping *mappings = kvk_session_mappings_detach(session, true);
    (void)pthread_cond_broadcast(&cache->changed);

    kvk_unlock(&cache->lock);
    kvk_mappings_destroy_unlocked(cache, mappings);
    if (session->pidfd >= 0) {
        (void)close(session->pidfd);
    }
    free(session->quarantine);
    kvk_secret_wipe(session->side_token, sizeof(session->side_token));
    free(session);
    kvk_lock(&cache->lock);
}

void kvk_session_settle_drops(struct kvk_cache *cache, struct kvk_session *session)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (session->connected || session->ending || session->leaving) {
        return;
    }
    process_look(session);
    if (!must_wait(session)) {
        leave_drops(cache, session);
        return;
    }
    struct kvk_mapping *mappings = kvk_session_mappings_detach(session, false);
    kvk_metadata_session(cache, session);
    if (mappings != NULL) {
        kvk_unlock(&cache->lock);
        kvk_mappings_destroy_unlocked(cache, mappings);
        kvk_lock(&cache->lock);
    }
}

/* ---- What tells ---- */

void kvk_side_closed(struct kvk_cache *cache, uint64_t session_id)
{
    kvk_lock(&cache->lock);
    struct kvk_session *session = kvk_table_get(&cache->session_table, session_id);
    if (session != NULL) {
        session->side_bound = false;
        process_look(session);
        kvk_session_settle_drops(cache, session);
    }
    kvk_unlock(&cache->lock);
}

void kvk_side_process_ended(struct kvk_cache *cache, uint64_t session_id)
{
    kvk_lock(&cache->lock);
    struct kvk_session *session = kvk_table_get(&cache->session_table, session_id);
    if (session != NULL) {
        process_look(session);
        kvk_session_settle_drops(cache, session);
    }
    kvk_unlock(&cache->lock);
}

static void session_maintain_drops(struct kvk_cache *cache, struct kvk_session *session)
{
    if (!session->connected) {
        kvk_session_settle_drops(cache, session);
        return;
    }
    if (process_ended(session)) {
        /* A child that it forked holds the stream open; the session was not the child's. */
        uint64_t id = session->id;
        kvk_unlock(&cache->lock);
        kvk_session_end(cache, id);
        kvk_lock(&cache->lock);
        return;
    }
    struct kvk_mapping *late = kvk_session_mappings_expire(session, kvk_clock_now(cache->clock));
    kvk_metadata_session(cache, session);
    if (late != NULL) {
        kvk_unlock(&cache->lock);
        kvk_mappings_destroy_unlocked(cache, late);
        kvk_lock(&cache->lock);
    }
}

void kvk_sessions_maintain(struct kvk_cache *cache)
{
    uint64_t ids[SWEEP_COUNT];
    uint32_t count = 0;

    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (struct kvk_instance *instance = cache->instances; instance != NULL;) {
        struct kvk_instance *next = instance->next;
        kvk_instance_finish(cache, instance);
        instance = next;
    }
    while (count < SWEEP_COUNT) {
        const struct kvk_table_entry *entry =
            kvk_table_next(&cache->session_table, &cache->session_place);
        if (entry == NULL) {
            cache->session_place = 0; /* the next round begins anew */
            break;
        }
        ids[count] = entry->key;
        count++;
    }
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_session *session = kvk_table_get(&cache->session_table, ids[i]);
        if (session != NULL) {
            session_maintain_drops(cache, session);
        }
    }
}
