/*
 * grpc.health.v1: Check and Watch, for the whole server ("") and per service.
 *
 * A watcher is told through its call's own wake-ups, so that no gRPC call is made under the lock.
 * It leaves the list before its call is ended, and that is what makes waking it safe.
 */
#include "daemon/server_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "grpc/health/v1/health.pb-c.h"

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;

#define SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
#define SERVICE_UNKNOWN GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN
#define NOTHING_SENT GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__UNKNOWN

/* One Watch stream. */
struct kvk_health_watch {
    struct kvk_health *health;
    struct kvk_call *call;
    struct kvk_health_watch *next, *previous; /* health->lock */
    serving_status sent;                      /* the call's callbacks only */
    char service[sizeof(((struct kvk_health_service *)NULL)->name)];
};

void kvk_health_init(struct kvk_health *health)
{
    kvk_lock_init(&health->lock);
}

void kvk_health_finish(struct kvk_health *health)
{
    KVK_ASSERT(health->watcher_count == 0);
    kvk_lock_finish(&health->lock);
}

static struct kvk_health_service *service_find(struct kvk_health *health, const char *name)
{
    KVK_ASSERT(kvk_lock_held(&health->lock));
    for (uint32_t i = 0; i < health->service_count; i++) {
        if (strcmp(health->services[i].name, name) == 0) {
            return &health->services[i];
        }
    }
    return NULL;
}

static void wake_all(struct kvk_health *health)
{
    KVK_ASSERT(kvk_lock_held(&health->lock));
    for (struct kvk_health_watch *watch = health->watchers; watch != NULL; watch = watch->next) {
        kvk_call_wake(watch->call);
    }
}

enum kvk_status kvk_health_set(struct kvk_health *health, const char *service, bool serving)
{
    enum kvk_status status = KVK_OK;
    kvk_lock(&health->lock);
    struct kvk_health_service *found = service_find(health, service);
    if (found == NULL && health->service_count < KVK_SERVER_HEALTH_SERVICES_MAX &&
        strlen(service) < sizeof(found->name)) {
        found = &health->services[health->service_count++];
        (void)snprintf(found->name, sizeof(found->name), "%s", service);
    }
    if (found == NULL) {
        status = KVK_EXHAUSTED;
    } else {
        found->serving = serving;
        wake_all(health);
    }
    kvk_unlock(&health->lock);
    return status;
}

void kvk_health_drain(struct kvk_health *health)
{
    kvk_lock(&health->lock);
    health->draining = true;
    wake_all(health);
    kvk_unlock(&health->lock);
}

static serving_status service_state(struct kvk_health *health, const char *name, bool *draining)
{
    kvk_lock(&health->lock);
    const struct kvk_health_service *found = service_find(health, name);
    serving_status state = SERVICE_UNKNOWN;
    if (found != NULL) {
        state = found->serving && !health->draining ? SERVING : NOT_SERVING;
    }
    *draining = health->draining;
    kvk_unlock(&health->lock);
    return state;
}

static void pack_state(struct kvk_call *call, serving_status state)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = state;
    size_t size = grpc__health__v1__health_check_response__get_packed_size(&response);
    (void)grpc__health__v1__health_check_response__pack(&response,
                                                        kvk_call_reply_alloc(call, size));
}

/* The service that the request names; NULL: the call was failed. */
static Grpc__Health__V1__HealthCheckRequest *take_request(struct kvk_call *call)
{
    struct kvk_bytes bytes = kvk_call_message(call);
    Grpc__Health__V1__HealthCheckRequest *request =
        grpc__health__v1__health_check_request__unpack(NULL, bytes.size_bytes, bytes.data);
    struct kvk_error error;
    if (request == NULL) {
        (void)kvk_fail(&error, KVK_INVALID, KVK_CAUSE_FIELD, "", "not a HealthCheckRequest");
        kvk_call_fail(call, &error);
    } else if (strlen(request->service) >= sizeof(((struct kvk_health_watch *)NULL)->service)) {
        grpc__health__v1__health_check_request__free_unpacked(request, NULL);
        request = NULL;
        (void)kvk_fail(&error, KVK_NOT_FOUND, KVK_CAUSE_FIELD, "service", "no such service");
        kvk_call_fail(call, &error);
    }
    return request;
}

static void check_called(struct kvk_call *call, void *user_data)
{
    struct kvk_health *health = user_data;
    Grpc__Health__V1__HealthCheckRequest *request = take_request(call);
    if (request == NULL) {
        return;
    }
    bool draining;
    serving_status state = service_state(health, request->service, &draining);
    grpc__health__v1__health_check_request__free_unpacked(request, NULL);
    if (state == SERVICE_UNKNOWN) {
        struct kvk_error error;
        (void)kvk_fail(&error, KVK_NOT_FOUND, KVK_CAUSE_FIELD, "service", "no such service");
        kvk_call_fail(call, &error);
        return;
    }
    pack_state(call, state);
    kvk_call_reply(call);
}

/* ---- Watch ---- */

static bool watch_link(struct kvk_health_watch *watch)
{
    struct kvk_health *health = watch->health;
    kvk_lock(&health->lock);
    bool room = health->watcher_count < KVK_SERVER_WATCHERS_MAX;
    if (room) {
        watch->next = health->watchers;
        if (watch->next != NULL) {
            watch->next->previous = watch;
        }
        health->watchers = watch;
        health->watcher_count++;
    }
    kvk_unlock(&health->lock);
    return room;
}

static void watch_unlink(struct kvk_health_watch *watch)
{
    struct kvk_health *health = watch->health;
    kvk_lock(&health->lock);
    if (watch->next != NULL) {
        watch->next->previous = watch->previous;
    }
    if (watch->previous != NULL) {
        watch->previous->next = watch->next;
    } else {
        health->watchers = watch->next;
    }
    health->watcher_count--;
    kvk_unlock(&health->lock);
}

/* Send the state where it is another than was sent last. A full queue or a lost client is nothing
 * to us: on_sent brings us here again, on_cancel ends it. */
static void watch_update(struct kvk_call *call)
{
    struct kvk_health_watch *watch = kvk_call_context(call);
    bool draining;
    serving_status state = service_state(watch->health, watch->service, &draining);
    if (state != watch->sent) {
        pack_state(call, state);
        if (kvk_call_send(call) == KVK_OK) {
            watch->sent = state;
        }
    }
    if (draining) {
        watch_unlink(watch);
        kvk_call_finish(call);
    }
}

static void watch_cancelled(struct kvk_call *call)
{
    watch_unlink(kvk_call_context(call));
    kvk_call_finish(call);
}

static const struct kvk_stream_events watch_events = {
    .on_sent = watch_update,
    .on_wake = watch_update,
    .on_cancel = watch_cancelled,
    .on_done = free,
};

static void watch_called(struct kvk_call *call, void *user_data)
{
    struct kvk_health *health = user_data;
    Grpc__Health__V1__HealthCheckRequest *request = take_request(call);
    if (request == NULL) {
        return;
    }
    struct kvk_health_watch *watch = calloc(1, sizeof(*watch));
    if (watch != NULL) {
        watch->health = health;
        watch->call = call;
        watch->sent = NOTHING_SENT;
        (void)snprintf(watch->service, sizeof(watch->service), "%s", request->service);
    }
    grpc__health__v1__health_check_request__free_unpacked(request, NULL);
    if (watch != NULL) {
        /* Before it is in the list, for a wake-up needs the stream. */
        kvk_call_stream(call, &watch_events, watch);
    }
    if (watch == NULL || !watch_link(watch)) {
        struct kvk_error error;
        (void)kvk_fail(&error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "too many health watchers");
        kvk_call_fail(call, &error);
        return;
    }
    watch_update(call);
}

uint32_t kvk_health_methods(struct kvk_health *health, struct kvk_method *methods)
{
    methods[0] = (struct kvk_method){
        .path = "/grpc.health.v1.Health/Check",
        .kind = KVK_METHOD_UNARY,
        .class = KVK_CLASS_INLINE,
        .on_call = check_called,
        .user_data = health,
    };
    methods[1] = (struct kvk_method){
        .path = "/grpc.health.v1.Health/Watch",
        .kind = KVK_METHOD_SERVER_STREAM,
        .class = KVK_CLASS_BULK,
        .on_call = watch_called,
        .user_data = health,
    };
    return 2;
}
