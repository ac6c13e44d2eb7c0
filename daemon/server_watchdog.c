#include "daemon/server_watchdog.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/notify.h"

#define STATUS_NS (10 * KVK_NS_PER_SECOND) /* between STATUS= lines where there is no watchdog */

struct kvk_watchdog {
    struct kvk_server *server; /* borrowed */
    struct kvk_cache *cache;   /* borrowed */
    uint64_t limit_ns;         /* no longer than this may either be silent; 0: no watchdog */
    uint64_t period_ns;
    uint64_t turns;    /* of the look-up thread, as last seen */
    uint64_t turns_ns; /* when they had changed */
    bool silent;       /* told in the log */
    struct kvk_lock lock;
    pthread_cond_t wake;
    bool stop; /* lock */
    pthread_t thread;
};

static uint64_t now_ns(void)
{
    return kvk_clock_now(kvk_clock_monotonic());
}

static unsigned percent(const struct kvk_cache_pulse *pulse, int tier)
{
    uint64_t limit = pulse->limit_bytes[tier];
    return limit == 0 ? 0 : (unsigned)((double)pulse->used_bytes[tier] * 100 / (double)limit);
}

/* What hangs, or NULL. */
static const char *hanging(struct kvk_watchdog *watchdog, const struct kvk_cache_pulse *pulse)
{
    struct kvk_server_stats stats;
    uint64_t now = now_ns();
    kvk_server_stats(watchdog->server, &stats);
    if (stats.turns != watchdog->turns) {
        watchdog->turns = stats.turns;
        watchdog->turns_ns = now;
    }
    if (watchdog->limit_ns == 0) {
        return NULL;
    }
    if (now - watchdog->turns_ns > watchdog->limit_ns) {
        return "lookup_thread";
    }
    return pulse->silent_ns > watchdog->limit_ns ? "maintenance" : NULL;
}

static void tell(struct kvk_watchdog *watchdog)
{
    struct kvk_cache_pulse pulse;
    kvk_cache_pulse(watchdog->cache, &pulse);
    const char *who = hanging(watchdog, &pulse);
    if (who != NULL) {
        if (!watchdog->silent) {
            kvk_log(KVK_LOG_ERROR, "watchdog_silent", "hangs=%s", who);
        }
        watchdog->silent = true;
        return;
    }
    watchdog->silent = false;
    char message[256];
    (void)snprintf(
        message, sizeof(message),
        "%sSTATUS=serving: %u sequences, %u leases, %u sessions; device %u %% used, host "
        "%u %%",
        watchdog->limit_ns > 0 ? "WATCHDOG=1\n" : "", pulse.sequences, pulse.leases, pulse.sessions,
        percent(&pulse, 0), percent(&pulse, 1));
    kvk_notify(message);
}

static void *run(void *argument)
{
    struct kvk_watchdog *watchdog = argument;
    kvk_lock(&watchdog->lock);
    while (!watchdog->stop) {
        kvk_unlock(&watchdog->lock);
        tell(watchdog);
        kvk_lock(&watchdog->lock);
        uint64_t until_ns = now_ns() + watchdog->period_ns;
        while (!watchdog->stop && kvk_condition_wait(&watchdog->wake, &watchdog->lock, until_ns)) {
        }
    }
    kvk_unlock(&watchdog->lock);
    return NULL;
}

enum kvk_status kvk_watchdog_create(struct kvk_server *server, struct kvk_cache *cache,
                                    struct kvk_watchdog **watchdog, struct kvk_error *error)
{
    *watchdog = NULL;
    if (!kvk_notify_open()) {
        return KVK_OK;
    }
    struct kvk_watchdog *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the watchdog");
    }
    made->server = server;
    made->cache = cache;
    made->turns_ns = now_ns();
    made->limit_ns = kvk_notify_watchdog_us() * 1000;
    /* A third, so that one message may be late. */
    made->period_ns = made->limit_ns > 0 ? made->limit_ns / 3 : STATUS_NS;
    kvk_lock_init(&made->lock);
    kvk_condition_init(&made->wake);
    /* Signals are for the daemon's main thread. */
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(&made->thread, NULL, run, made);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result != 0) {
        kvk_lock_finish(&made->lock);
        free(made);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no thread for the watchdog");
    }
    (void)pthread_setname_np(made->thread, "kvk-watchdog");
    *watchdog = made;
    return KVK_OK;
}

void kvk_watchdog_destroy(struct kvk_watchdog *watchdog)
{
    if (watchdog == NULL) {
        return;
    }
    kvk_lock(&watchdog->lock);
    watchdog->stop = true;
    (void)pthread_cond_broadcast(&watchdog->wake);
    kvk_unlock(&watchdog->lock);
    (void)pthread_join(watchdog->thread, NULL);
    (void)pthread_cond_destroy(&watchdog->wake);
    kvk_lock_finish(&watchdog->lock);
    free(watchdog);
}
