/*
 * Session: the stream that is open for as long as a worker's process lives.
 *
 * The first message says hello and is answered by welcome. Later ones are heartbeats. Notices come
 * from whatever thread has something to tell: they are noted here, merged where they pile up, and
 * sent by the stream's own callbacks. However the stream ends (the client's half-close or loss, a
 * wrong message, the drain), the session ends in stream_end(), once, before the call does: the
 * engine tells nothing more after that.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "daemon/rpc_private.h"

#define INVALIDATED_MAX 32 /* spaces remembered until they are sent */
#define DRAIN_POLL_NS (5 * KVK_NS_PER_MS)

struct kvk_rpc_session {
    const struct kvk_rpc_bound *bound;
    struct kvk_rpc_sessions *sessions;
    struct kvk_call *call;
    uint64_t session_id; /* 0: not begun, or ended */
    bool ended;          /* the call was ended; callbacks alone */

    struct kvk_rpc_session *next;  /* sessions->lock */
    struct kvk_rpc_session **link; /* what points here; NULL: not in the list; sessions->lock */

    struct kvk_lock lock; /* the notices that wait */
    bool draining;
    uint64_t ranks_ended; /* bit per rank */
    uint64_t invalidated[INVALIDATED_MAX];
    uint32_t invalidated_count;
    bool invalidated_more; /* others, too */
};
_Static_assert(KVK_SHARD_COUNT_MAX <= 64, "a bit for every rank");

/* ---- notices ---- */

static void notice_add_space(struct kvk_rpc_session *session, uint64_t space_id)
{
    for (uint32_t i = 0; i < session->invalidated_count; i++) {
        if (session->invalidated[i] == space_id) {
            return;
        }
    }
    if (session->invalidated_count < INVALIDATED_MAX) {
        session->invalidated[session->invalidated_count++] = space_id;
    } else {
        session->invalidated_more = true;
    }
}

/* Any thread. Not after kvk_session_end(), so the call is there. */
static void on_notice(void *context, enum kvk_notice_kind kind, uint64_t value)
{
    struct kvk_rpc_session *session = context;
    kvk_lock(&session->lock);
    switch (kind) {
    case KVK_NOTICE_DRAINING:
        session->draining = true;
        break;
    case KVK_NOTICE_RANK_ENDED:
        session->ranks_ended |= UINT64_C(1) << (value % 64);
        break;
    case KVK_NOTICE_INVALIDATED:
        notice_add_space(session, value);
        break;
    }
    kvk_unlock(&session->lock);
    kvk_call_wake(session->call);
}

/* The next notice; false: none waits. */
static bool notice_take(struct kvk_rpc_session *session, enum kvk_notice_kind *kind,
                        uint64_t *value)
{
    bool found = true;
    *value = 0;
    kvk_lock(&session->lock);
    if (session->draining) {
        session->draining = false;
        *kind = KVK_NOTICE_DRAINING;
    } else if (session->ranks_ended != 0) {
        *kind = KVK_NOTICE_RANK_ENDED;
        *value = (uint64_t)__builtin_ctzll(session->ranks_ended);
        session->ranks_ended &= session->ranks_ended - 1;
    } else if (session->invalidated_count > 0) {
        *kind = KVK_NOTICE_INVALIDATED;
        *value = session->invalidated[--session->invalidated_count];
    } else if (session->invalidated_more) {
        *kind = KVK_NOTICE_INVALIDATED; /* value 0: spaces that could not be listed */
        session->invalidated_more = false;
    } else {
        found = false;
    }
    kvk_unlock(&session->lock);
    return found;
}

/* ---- sending ---- */

static enum kvk_status send_event(struct kvk_call *call, const Kvkeep__V1__SessionEvent *event)
{
    uint8_t *buffer = kvk_call_reply_alloc(call, kvkeep__v1__session_event__get_packed_size(event));
    (void)kvkeep__v1__session_event__pack(event, buffer);
    return kvk_call_send(call);
}

static enum kvk_status send_welcome(struct kvk_rpc_session *session,
                                    const struct kvk_welcome *welcome)
{
    const struct kvk_rpc *rpc = session->bound->rpc;
    Kvkeep__V1__SessionWelcome message = KVKEEP__V1__SESSION_WELCOME__INIT;
    message.session_id = welcome->session_id;
    message.instance_token =
        kvk_rpc_bytes(welcome->instance_token, sizeof(welcome->instance_token));
    if (kvk_call_peer(session->call)->kind == KVK_PEER_UNIX) {
        message.side_socket_path = kvk_rpc_text(rpc->side_path);
        message.side_token = kvk_rpc_bytes(welcome->side_token, sizeof(welcome->side_token));
    }
    message.boot_id = kvk_rpc_bytes(rpc->boot_id, sizeof(rpc->boot_id));
    Kvkeep__V1__SessionEvent event = KVKEEP__V1__SESSION_EVENT__INIT;
    event.welcome = &message;
    return send_event(session->call, &event);
}

/* As many as the queue takes; the rest goes when one of them is sent. */
static void send_notices(struct kvk_rpc_session *session)
{
    enum kvk_notice_kind kind;
    uint64_t value;
    _Static_assert((int)KVK_NOTICE_INVALIDATED ==
                       (int)KVKEEP__V1__SESSION_NOTICE__KIND__KIND_INVALIDATED,
                   "numbers agree");
    while (kvk_call_sends_pending(session->call) == 0 && notice_take(session, &kind, &value)) {
        Kvkeep__V1__SessionNotice message = KVKEEP__V1__SESSION_NOTICE__INIT;
        message.kind = (Kvkeep__V1__SessionNotice__Kind)kind;
        message.value = value;
        Kvkeep__V1__SessionEvent event = KVKEEP__V1__SESSION_EVENT__INIT;
        event.notice = &message;
        if (send_event(session->call, &event) != KVK_OK) {
            return; /* the client is gone: on_cancel comes */
        }
    }
}

/* ---- the end ---- */

static void list_remove(struct kvk_rpc_session *session)
{
    kvk_lock(&session->sessions->lock);
    if (session->link != NULL) {
        *session->link = session->next;
        if (session->next != NULL) {
            session->next->link = session->link;
        }
        session->link = NULL;
    }
    kvk_unlock(&session->sessions->lock);
}

/* `error` NULL: in order. In a callback of the stream only, and the last that it does. */
static void stream_end(struct kvk_rpc_session *session, const struct kvk_error *error)
{
    KVK_ASSERT(!session->ended);
    session->ended = true;
    list_remove(session);
    if (session->session_id != 0) {
        kvk_session_end(session->bound->rpc->cache, session->session_id);
        session->session_id = 0;
    }
    if (error == NULL) {
        kvk_call_finish(session->call);
    } else {
        kvk_call_fail(session->call, error);
    }
}

static void on_done(void *context)
{
    struct kvk_rpc_session *session = context;
    KVK_ASSERT(session->ended);
    atomic_fetch_sub(&session->sessions->count, 1);
    kvk_lock_finish(&session->lock);
    free(session);
}

static void on_cancel(struct kvk_call *call)
{
    struct kvk_error error;
    enum kvk_status status =
        kvk_fail(&error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the client is gone");
    error.status = status;
    stream_end(kvk_call_context(call), &error);
}

static void on_half_close(struct kvk_call *call)
{
    stream_end(kvk_call_context(call), NULL);
}

/* ---- hello ---- */

static enum kvk_status check_hello(const Kvkeep__V1__SessionHello *asked, struct kvk_hello *hello,
                                   struct kvk_error *error)
{
    enum kvk_status status = kvk_rpc_check_name(&asked->tenant, 0, KVK_NAME_SIZE - 1,
                                                "hello.tenant", &hello->tenant, error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_name(&asked->name, 0, KVK_NAME_SIZE - 1, "hello.name", &hello->name,
                                    error);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (asked->instance_token.len != 0 && asked->instance_token.len != KVK_TOKEN_SIZE) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "hello.instance_token",
                              asked->instance_token.len, KVK_TOKEN_SIZE,
                              "hello.instance_token must be empty or %u bytes", KVK_TOKEN_SIZE);
    }
    if (asked->rank >= KVK_SHARD_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "hello.rank", asked->rank,
                              KVK_SHARD_COUNT_MAX - 1, "hello.rank must be below %u",
                              KVK_SHARD_COUNT_MAX);
    }
    hello->instance_token =
        (struct kvk_view){.data = asked->instance_token.data, .size = asked->instance_token.len};
    hello->rank = asked->rank;
    return KVK_OK;
}

static enum kvk_status session_begin(struct kvk_rpc_session *session, struct kvk_rpc_run *run,
                                     const Kvkeep__V1__SessionHello *asked, struct kvk_error *error)
{
    const struct kvk_peer *peer = kvk_call_peer(session->call);
    const bool local = peer->kind == KVK_PEER_UNIX;
    struct kvk_hello hello = {.local = local,
                              .pid = local ? peer->pid : 0,
                              .uid = peer->uid,
                              .pidfd = local ? peer->pidfd : -1,
                              .on_notice = on_notice,
                              .context = session};
    struct kvk_welcome welcome;
    enum kvk_status status = check_hello(asked, &hello, error);
    if (status == KVK_OK) {
        status = kvk_session_begin(run->rpc->cache, &run->caller, &hello, &welcome, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    session->session_id = welcome.session_id;
    if (send_welcome(session, &welcome) != KVK_OK) {
        return kvk_fail(error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the client is gone");
    }
    return KVK_OK;
}

static enum kvk_status take_message(struct kvk_rpc_session *session, struct kvk_error *error)
{
    struct kvk_rpc_run run;
    ProtobufCMessage *message;
    enum kvk_status status = kvk_rpc_run_begin(&run, session->bound, session->call, true, error);
    if (status == KVK_OK) {
        status = kvk_wire_unpack(run.rpc->config, &run.memory->arena,
                                 &kvkeep__v1__session_request__descriptor,
                                 kvk_call_message(session->call), &message, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    const Kvkeep__V1__SessionHello *hello = ((const Kvkeep__V1__SessionRequest *)message)->hello;
    if (session->session_id == 0 && hello != NULL) {
        return session_begin(session, &run, hello, error);
    }
    if (session->session_id == 0 || hello != NULL) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "hello",
                        hello != NULL ? "hello comes in the first message only"
                                      : "hello is required in the first message");
    }
    return KVK_OK; /* a heartbeat */
}

static bool on_message(struct kvk_call *call)
{
    struct kvk_rpc_session *session = kvk_call_context(call);
    struct kvk_error error = {.status = KVK_OK};
    enum kvk_status status = take_message(session, &error);
    if (status != KVK_OK) {
        error.status = status;
        stream_end(session, &error);
        return false;
    }
    return true;
}

/* ---- waking up: notices, and the drain ---- */

static void on_progress(struct kvk_call *call)
{
    struct kvk_rpc_session *session = kvk_call_context(call);
    send_notices(session);
    if (atomic_load(&session->sessions->end) && kvk_call_sends_pending(call) == 0) {
        stream_end(session, NULL);
    }
}

static const struct kvk_stream_events session_events = {
    .on_message = on_message,
    .on_half_close = on_half_close,
    .on_sent = on_progress,
    .on_wake = on_progress,
    .on_cancel = on_cancel,
    .on_done = on_done,
};

static struct kvk_rpc_session *session_create(const struct kvk_rpc_bound *bound,
                                              struct kvk_call *call)
{
    struct kvk_rpc_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return NULL;
    }
    session->bound = bound;
    session->sessions = &bound->rpc->sessions;
    session->call = call;
    kvk_lock_init(&session->lock);
    atomic_fetch_add(&session->sessions->count, 1);
    return session;
}

static void list_add(struct kvk_rpc_session *session)
{
    struct kvk_rpc_sessions *sessions = session->sessions;
    kvk_lock(&sessions->lock);
    session->next = sessions->first;
    session->link = &sessions->first;
    if (session->next != NULL) {
        session->next->link = &session->next;
    }
    sessions->first = session;
    kvk_unlock(&sessions->lock);
    if (atomic_load(&sessions->end)) {
        kvk_call_wake(session->call); /* whoever ended them all may have missed this one */
    }
}

void kvk_rpc_session(struct kvk_call *call, void *rpc_bound)
{
    struct kvk_rpc_run run;
    struct kvk_error error;
    enum kvk_status status = kvk_rpc_run_begin(&run, rpc_bound, call, true, &error);
    struct kvk_rpc_session *session = NULL;
    if (status == KVK_OK) {
        session = session_create(rpc_bound, call);
        if (session == NULL) {
            status =
                kvk_fail(&error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the session");
        }
    }
    if (status != KVK_OK) {
        error.status = status;
        kvk_call_fail(call, &error);
        return;
    }
    kvk_call_stream(call, &session_events, session);
    list_add(session);
}

/* ---- the drain ---- */

void kvk_rpc_sessions_init(struct kvk_rpc_sessions *sessions)
{
    kvk_lock_init(&sessions->lock);
}

void kvk_rpc_sessions_join(struct kvk_rpc_sessions *sessions)
{
    atomic_store(&sessions->stop, true);
    if (sessions->drain_thread_runs) {
        (void)pthread_join(sessions->drain_thread, NULL);
        sessions->drain_thread_runs = false;
    }
}

void kvk_rpc_sessions_finish(struct kvk_rpc_sessions *sessions)
{
    KVK_ASSERT(sessions->first == NULL && atomic_load(&sessions->count) == 0);
    kvk_lock_finish(&sessions->lock);
}

static void end_all(struct kvk_rpc_sessions *sessions)
{
    atomic_store(&sessions->end, true);
    kvk_lock(&sessions->lock);
    for (struct kvk_rpc_session *at = sessions->first; at != NULL; at = at->next) {
        kvk_call_wake(at->call);
    }
    kvk_unlock(&sessions->lock);
}

/*
 * A draining server takes no new call, so nothing is left for a session once the calls that were
 * under way have ended. Until then it must stay: they work on what it owns.
 */
static void *drain_run(void *argument)
{
    struct kvk_rpc *rpc = argument;
    struct kvk_rpc_sessions *sessions = &rpc->sessions;
    const struct timespec pause = {.tv_nsec = (long)DRAIN_POLL_NS};
    while (!atomic_load(&sessions->stop)) {
        struct kvk_server_stats stats;
        kvk_server_stats(rpc->server, &stats);
        if (stats.live_calls <= atomic_load(&sessions->count)) {
            break;
        }
        (void)nanosleep(&pause, NULL);
    }
    end_all(sessions);
    return NULL;
}

void kvk_rpc_sessions_drain(struct kvk_rpc *rpc)
{
    kvk_sessions_drain(rpc->cache);
    rpc->sessions.drain_thread_runs =
        pthread_create(&rpc->sessions.drain_thread, NULL, drain_run, rpc) == 0;
    if (!rpc->sessions.drain_thread_runs) {
        end_all(&rpc->sessions); /* no thread to be had: better soon than never */
    }
}
