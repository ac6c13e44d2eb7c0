#include "daemon/session.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/process_watch.h"
#include "daemon/session_internal.h"

uint64_t kvk_cache_new_id(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    cache->next_id++;
    if (cache->next_id == 0) {
        cache->next_id = 1;
    }
    return cache->next_id;
}

/* ---- Finding ---- */

static enum kvk_status refuse_ended(struct kvk_error *error)
{
    return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_SESSION_ENDED, "session_id",
                    "the session is not known, or it or its instance has ended");
}

enum kvk_status kvk_session_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 uint64_t session_id, struct kvk_session **session,
                                 struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_session *found = kvk_table_get(&cache->session_table, session_id);
    if (found == NULL || !found->connected || found->instance == NULL || found->instance->ending ||
        !kvk_credential_allows(caller->credential, found->tenant)) {
        return refuse_ended(error);
    }
    *session = found;
    return kvk_tenant_check(found->tenant, error);
}

/* All tokens are compared, whichever is the one, so that time tells nothing. */
static struct kvk_instance *find_instance(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                          const uint8_t *token)
{
    struct kvk_instance *found = NULL;

    for (struct kvk_instance *instance = cache->instances; instance != NULL;
         instance = instance->next) {
        bool equal = kvk_secret_equal(instance->token, token, KVK_TOKEN_SIZE);
        if (equal && instance->tenant == tenant && !instance->ending) {
            found = instance;
        }
    }
    return found;
}

static bool has_rank(const struct kvk_instance *instance, uint32_t rank)
{
    for (const struct kvk_session *session = instance->sessions; session != NULL;
         session = session->next) {
        if (session->connected && session->rank == rank) {
            return true;
        }
    }
    return false;
}

static bool has_connected(const struct kvk_instance *instance)
{
    for (const struct kvk_session *session = instance->sessions; session != NULL;
         session = session->next) {
        if (session->connected) {
            return true;
        }
    }
    return false;
}

/* ---- Beginning ---- */

static enum kvk_status hello_check(const struct kvk_hello *hello, struct kvk_error *error)
{
    if (hello->name.size >= KVK_NAME_SIZE || !kvk_utf8_ok(hello->name.data, hello->name.size)) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "hello.name", hello->name.size,
                              KVK_NAME_SIZE - 1, "hello.name must be UTF-8 of at most %d bytes",
                              KVK_NAME_SIZE - 1);
    }
    if (hello->instance_token.size != 0 && hello->instance_token.size != KVK_TOKEN_SIZE) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "hello.instance_token",
                              hello->instance_token.size, KVK_TOKEN_SIZE,
                              "hello.instance_token must be empty or of %d bytes", KVK_TOKEN_SIZE);
    }
    if (hello->rank >= KVK_SHARD_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "hello.rank", hello->rank,
                              KVK_SHARD_COUNT_MAX - 1, "hello.rank must be 0 to %d",
                              KVK_SHARD_COUNT_MAX - 1);
    }
    return KVK_OK;
}

/* A descriptor of the process that is ours; -1 where there is none to be had. */
static int own_pidfd(const struct kvk_hello *hello)
{
    if (!hello->local) {
        return -1;
    }
    if (hello->pidfd >= 0) {
        return fcntl(hello->pidfd, F_DUPFD_CLOEXEC, 0);
    }
    return hello->pid > 0 ? (int)syscall(SYS_pidfd_open, hello->pid, 0) : -1;
}

static struct kvk_session *session_create(const struct kvk_hello *hello,
                                          const struct kvk_tenant *tenant)
{
    struct kvk_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return NULL;
    }
    session->tenant = tenant;
    session->rank = hello->rank;
    session->connected = true;
    session->local = hello->local;
    session->pid = hello->local ? hello->pid : 0;
    session->uid = hello->local ? hello->uid : UINT32_MAX;
    session->on_notice = hello->on_notice;
    session->context = hello->context;
    session->pidfd = own_pidfd(hello);
    session->process_start = session->pid > 0 ? kvk_process_start(session->pid) : 0;
    return session;
}

/* Of a session that was never begun. */
static void session_discard(struct kvk_session *session)
{
    if (session == NULL) {
        return;
    }
    if (session->pidfd >= 0) {
        (void)close(session->pidfd);
    }
    free(session);
}

static struct kvk_instance *instance_create(const struct kvk_hello *hello,
                                            const struct kvk_tenant *tenant)
{
    struct kvk_instance *instance = calloc(1, sizeof(*instance));
    if (instance == NULL) {
        return NULL;
    }
    instance->tenant = tenant;
    kvk_random_secret(instance->token, sizeof(instance->token));
    if (hello->name.size > 0) {
        memcpy(instance->name, hello->name.data, hello->name.size);
    }
    return instance;
}

static enum kvk_status refuse_limit(struct kvk_error *error, const char *field, uint32_t limit)
{
    return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, field, limit, limit,
                          "%s (%u) are there already", field, limit);
}

/* Which instance the session would be of: `fresh`, or the one that it joins. */
static enum kvk_status choose_instance(struct kvk_cache *cache, const struct kvk_hello *hello,
                                       const struct kvk_tenant *tenant, struct kvk_instance *fresh,
                                       struct kvk_instance **instance, struct kvk_error *error)
{
    if (cache->draining) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_DRAINING, "",
                        "the daemon is shutting down");
    }
    if (cache->session_table.count >= cache->config->sessions) {
        return refuse_limit(error, "limits.sessions", cache->config->sessions);
    }
    enum kvk_status status = kvk_metadata_admit(cache, tenant, KVK_METADATA_SESSIONS, 1,
                                                sizeof(struct kvk_session), error);
    if (status == KVK_OK && fresh != NULL) {
        status = kvk_metadata_admit(cache, tenant, KVK_METADATA_INSTANCES, 1,
                                    sizeof(struct kvk_session) + sizeof(*fresh), error);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (fresh != NULL) {
        if (cache->instance_count >= cache->config->instances) {
            return refuse_limit(error, "limits.instances", cache->config->instances);
        }
        *instance = fresh;
        return KVK_OK;
    }
    struct kvk_instance *found = find_instance(cache, tenant, hello->instance_token.data);
    if (found == NULL) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_SESSION_ENDED, "hello.instance_token",
                        "no instance has this token, or it has ended");
    }
    if (has_rank(found, hello->rank)) {
        return kvk_fail_limit(error, KVK_EXISTS, KVK_CAUSE_FIELD, "hello.rank", hello->rank, 0,
                              "rank %u of the instance has a session already", hello->rank);
    }
    *instance = found;
    return KVK_OK;
}

static void instance_link(struct kvk_cache *cache, struct kvk_instance *instance,
                          struct kvk_session *opener)
{
    instance->id = kvk_cache_new_id(cache);
    instance->begun_ns = kvk_clock_now(cache->clock);
    instance->opener = opener;
    instance->next = cache->instances;
    if (cache->instances != NULL) {
        cache->instances->previous = instance;
    }
    cache->instances = instance;
    cache->instance_count++;
    kvk_metadata_add(cache, instance->tenant, KVK_METADATA_INSTANCES, 1, sizeof(*instance));
}

static void session_link(struct kvk_cache *cache, struct kvk_session *session,
                         struct kvk_instance *instance, struct kvk_welcome *welcome)
{
    enum kvk_status status;

    /* Whoever has the id can call for the session, so it is random. */
    do {
        kvk_random_secret(&session->id, sizeof(session->id));
        session->id >>= 1; /* see kvk_cache_create(): a number in JSON too */
        status = session->id == 0 ? KVK_EXISTS
                                  : kvk_table_put(&cache->session_table, session->id, session);
    } while (status == KVK_EXISTS);
    KVK_ASSERT(status == KVK_OK);

    session->instance = instance;
    session->instance_id = instance->id;
    session->next = instance->sessions;
    instance->sessions = session;
    kvk_metadata_add(cache, session->tenant, KVK_METADATA_SESSIONS, 1, 0);
    kvk_metadata_session(cache, session);

    *welcome = (struct kvk_welcome){.session_id = session->id};
    memcpy(welcome->instance_token, instance->token, KVK_TOKEN_SIZE);
    if (session->local) {
        kvk_random_secret(session->side_token, KVK_TOKEN_SIZE);
        session->side_token_until_ns = kvk_clock_now(cache->clock) + KVK_TOKEN_MS * KVK_NS_PER_MS;
        memcpy(welcome->side_token, session->side_token, KVK_TOKEN_SIZE);
    }
}

enum kvk_status kvk_session_begin(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  const struct kvk_hello *hello, struct kvk_welcome *welcome,
                                  struct kvk_error *error)
{
    const struct kvk_tenant *tenant = NULL;

    enum kvk_status status = hello_check(hello, error);
    if (status == KVK_OK) {
        status = kvk_credential_tenant(caller->credential, hello->tenant.data, hello->tenant.size,
                                       &tenant, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    bool opens = hello->instance_token.size == 0;
    struct kvk_instance *fresh = opens ? instance_create(hello, tenant) : NULL;
    struct kvk_session *session = session_create(hello, tenant);
    if (session == NULL || (opens && fresh == NULL)) {
        free(fresh);
        session_discard(session);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a session");
    }

    struct kvk_error reason = {.status = KVK_OK};
    struct kvk_instance *instance = NULL;
    kvk_lock(&cache->lock);
    /* Again, for it may be forgotten by now: nothing must be hung from it after that. */
    status = kvk_tenant_check(tenant, &reason);
    bool lives = status == KVK_OK;
    if (lives) {
        status = choose_instance(cache, hello, tenant, fresh, &instance, &reason);
    }
    if (status == KVK_OK) {
        KVK_ASSERT(instance != NULL);
        if (opens) {
            instance_link(cache, instance, session);
        }
        session_link(cache, session, instance, welcome);
    } else if (lives) {
        kvk_refusal_note(cache, caller, tenant, 0, 0, &reason);
    }
    kvk_unlock(&cache->lock);

    if (status != KVK_OK) {
        free(fresh);
        session_discard(session);
        if (error != NULL) {
            *error = reason;
        }
    }
    return status;
}

/* ---- Notices: collected with the lock held, told without it ---- */

struct notice {
    struct kvk_session *session;
    void (*on_notice)(void *context, enum kvk_notice_kind kind, uint64_t value);
    void *context;
};

/* As many as an instance has connected ranks. */
struct notices {
    struct notice notices[KVK_SHARD_COUNT_MAX];
    uint32_t count;
};

static void notice_add(struct notices *notices, struct kvk_session *session)
{
    if (!session->connected || session->on_notice == NULL) {
        return;
    }
    KVK_ASSERT(notices->count < KVK_SHARD_COUNT_MAX);
    notices->notices[notices->count] = (struct notice){
        .session = session, .on_notice = session->on_notice, .context = session->context};
    notices->count++;
    session->notices_running++;
}

static void notices_tell_drops(struct kvk_cache *cache, struct notices *notices,
                               enum kvk_notice_kind kind, uint64_t value)
{
    if (notices->count == 0) {
        return;
    }
    kvk_unlock(&cache->lock);
    KVK_ASSERT(kvk_locks_held() == 0);
    for (uint32_t i = 0; i < notices->count; i++) {
        notices->notices[i].on_notice(notices->notices[i].context, kind, value);
    }
    kvk_lock(&cache->lock);
    /* A session stays as long as a notice runs: kvk_session_end() waits for it. */
    for (uint32_t i = 0; i < notices->count; i++) {
        KVK_ASSERT(notices->notices[i].session->notices_running > 0);
        notices->notices[i].session->notices_running--;
    }
    notices->count = 0;
    (void)pthread_cond_broadcast(&cache->changed);
}

void kvk_sessions_notify_unlocked(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                  enum kvk_notice_kind kind, uint64_t value)
{
    KVK_ASSERT(!kvk_lock_held(&cache->lock));
    uint64_t *ids = calloc(cache->config->sessions, sizeof(ids[0]));
    if (ids == NULL) {
        kvk_log(KVK_LOG_WARNING, "notices_dropped", "kind=%d reason=memory", (int)kind);
        return;
    }
    kvk_lock(&cache->lock);
    uint32_t count = 0;
    size_t place = 0;
    const struct kvk_table_entry *entry;
    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        KVK_ASSERT(count < cache->config->sessions);
        ids[count] = entry->key;
        count++;
    }
    struct notices notices = {.count = 0};
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_session *session = kvk_table_get(&cache->session_table, ids[i]);
        if (session != NULL && (tenant == NULL || session->tenant == tenant)) {
            notice_add(&notices, session);
        }
        if (notices.count == KVK_SHARD_COUNT_MAX || i + 1 == count) {
            notices_tell_drops(cache, &notices, kind, value);
        }
    }
    kvk_unlock(&cache->lock);
    free(ids);
}

void kvk_sessions_drain(struct kvk_cache *cache)
{
    kvk_lock(&cache->lock);
    cache->draining = true;
    kvk_unlock(&cache->lock);
    kvk_sessions_notify_unlocked(cache, NULL, KVK_NOTICE_DRAINING, 0);
}

/* ---- Ending ---- */

static struct kvk_sequence *first_not_doomed(const struct kvk_instance *instance)
{
    struct kvk_sequence *sequence = instance->sequences;
    while (sequence != NULL && sequence->doomed) {
        sequence = sequence->next;
    }
    return sequence;
}

/* Likewise of those that a call gives back. */
static struct kvk_lease *first_not_ending(const struct kvk_instance *instance)
{
    struct kvk_lease *lease = instance->leases;
    while (lease != NULL && lease->ending) {
        lease = lease->next;
    }
    return lease;
}

/* What a sequence or lease without many blocks costs is work, too. */
static void end_slice_drops(struct kvk_cache *cache, uint64_t blocks, uint32_t *work)
{
    *work += blocks < cache->slice_blocks ? (uint32_t)blocks : 0; /* a longer one has paused */
    (void)kvk_slice_drops(cache, work);
}

/* Give back all that the instance owns. Sequences that a call works on are ended by that call, and
 * so are leases. */
static void instance_end_drops(struct kvk_cache *cache, struct kvk_instance *instance)
{
    uint32_t work = 0;

    KVK_ASSERT(!instance->ending);
    instance->ending = true;
    cache->stats.instances_ended++;
    kvk_log(KVK_LOG_INFO, "instance_ended", "instance=%llu sequences=%u leases=%u",
            (unsigned long long)instance->id, instance->sequence_count, instance->lease_count);
    for (;;) {
        struct kvk_sequence *sequence = first_not_doomed(instance);
        struct kvk_lease *lease = sequence == NULL ? first_not_ending(instance) : NULL;
        uint64_t blocks;
        if (sequence != NULL) {
            blocks = kvk_sequence_blocks(sequence);
            kvk_sequence_abandon_drops(cache, sequence);
        } else if (lease != NULL) {
            blocks = kvk_lease_blocks(lease);
            kvk_lease_end_drops(cache, lease);
        } else {
            break;
        }
        end_slice_drops(cache, blocks, &work);
    }
    instance->ended = true;
    (void)pthread_cond_broadcast(&cache->changed);
}

void kvk_instance_finish(struct kvk_cache *cache, struct kvk_instance *instance)
{
    if (!instance->ended || instance->sequences != NULL || instance->leases != NULL) {
        return;
    }
    while (instance->sessions != NULL) {
        struct kvk_session *session = instance->sessions;
        instance->sessions = session->next;
        session->instance = NULL;
        session->next = cache->waiting_sessions;
        cache->waiting_sessions = session;
    }
    if (instance->previous != NULL) {
        instance->previous->next = instance->next;
    } else {
        cache->instances = instance->next;
    }
    if (instance->next != NULL) {
        instance->next->previous = instance->previous;
    }
    KVK_ASSERT(cache->instance_count > 0);
    cache->instance_count--;
    kvk_metadata_sub(cache, instance->tenant, KVK_METADATA_INSTANCES, 1, sizeof(*instance));
    kvk_secret_wipe(instance->token, sizeof(instance->token));
    free(instance);
}

/* Cut the instance's sequences back to what all ranks have sealed. Sequences that are opened
 * meanwhile need no cut: the rank has written nothing of them. */
static void rank_end_drops(struct kvk_cache *cache, struct kvk_instance *instance,
                           struct kvk_session *session)
{
    uint32_t count = 0;
    uint32_t work = 0;
    uint64_t *ids = calloc(instance->sequence_count + 1u, sizeof(ids[0]));

    for (struct kvk_sequence *sequence = instance->sequences; sequence != NULL;) {
        struct kvk_sequence *next = sequence->next;
        if (ids != NULL) {
            ids[count] = sequence->id;
            count++;
        } else {
            kvk_sequence_rank_ended(cache, sequence, session); /* no memory: in one go */
        }
        sequence = next;
    }
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, ids[i]);
        if (sequence == NULL || sequence->instance != instance) {
            continue;
        }
        uint64_t blocks = kvk_sequence_blocks(sequence);
        work += blocks < cache->slice_blocks ? (uint32_t)blocks : cache->slice_blocks;
        kvk_sequence_rank_ended(cache, sequence, session);
        if (kvk_slice_drops(cache, &work) && (session->instance != instance || instance->ending)) {
            break; /* it ended meanwhile, and with it all of them */
        }
    }
    free(ids);
}

void kvk_session_end(struct kvk_cache *cache, uint64_t session_id)
{
    struct notices notices = {.count = 0};

    kvk_lock(&cache->lock);
    struct kvk_session *session = kvk_table_get(&cache->session_table, session_id);
    if (session == NULL || !session->connected) {
        /* Another ends it, and may still tell it notices that were on their way. */
        while (session != NULL && session->notices_running > 0) {
            (void)kvk_condition_wait(&cache->changed, &cache->lock, UINT64_MAX);
            session = kvk_table_get(&cache->session_table, session_id);
        }
        kvk_unlock(&cache->lock);
        return;
    }
    session->connected = false;
    session->ending = true; /* from here to its end it is nobody else's to free */
    session->on_notice = NULL;
    while (session->notices_running > 0) {
        (void)kvk_condition_wait(&cache->changed, &cache->lock, UINT64_MAX);
    }
    cache->stats.sessions_ended++;

    struct kvk_instance *instance = session->instance;
    if (instance != NULL && !instance->ending) {
        if (session == instance->opener || !has_connected(instance)) {
            instance_end_drops(cache, instance);
        } else {
            rank_end_drops(cache, instance, session);
        }
        if (session->instance != NULL) {
            for (struct kvk_session *other = session->instance->sessions; other != NULL;
                 other = other->next) {
                notice_add(&notices, other);
            }
        }
        notices_tell_drops(cache, &notices, KVK_NOTICE_RANK_ENDED, session->rank);
        if (session->instance != NULL) {
            kvk_instance_finish(cache, session->instance);
        }
    }
    session->ending = false;
    kvk_session_settle_drops(cache, session);
    kvk_unlock(&cache->lock);
}

void kvk_sessions_end_all_unlocked(struct kvk_cache *cache)
{
    for (;;) {
        kvk_lock(&cache->lock);
        size_t place = 0;
        const struct kvk_table_entry *entry = kvk_table_next(&cache->session_table, &place);
        if (entry == NULL) {
            break;
        }
        uint64_t session_id = entry->key;
        struct kvk_session *session = kvk_table_get(&cache->session_table, session_id);
        session->process_gone = true;
        if (!session->connected) {
            KVK_ASSERT(!session->ending && !session->leaving);
            kvk_session_settle_drops(cache, session);
        }
        kvk_unlock(&cache->lock);
        kvk_session_end(cache, session_id);
    }
    for (struct kvk_instance *instance = cache->instances; instance != NULL;) {
        struct kvk_instance *next = instance->next;
        kvk_instance_finish(cache, instance);
        instance = next;
    }
    KVK_ASSERT(cache->instances == NULL);
    KVK_ASSERT(cache->waiting_sessions == NULL);
    kvk_unlock(&cache->lock);
}
