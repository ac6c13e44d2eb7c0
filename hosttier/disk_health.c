/*
 * How the disk feels: what failed, how often in a row, and whether it is tried at all.
 *
 * GOOD -a failure-> FAILING -KVK_DISK_OFF_FAILURES of one kind in a row-> OFF -a probe that went
 * well-> GOOD. FAILING is GOOD again once each kind that failed went well. Two things are not the
 * disk's failing: no space, which says so to who writes, and a file that is shorter than it
 * was, which concerns that file. Neither turns the disk off. A system that is read-only
 * refuses writes without trying until the prober finds that it takes them again.
 */
#include "hosttier/disk_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"

#define SPEED_BYTES (UINT64_C(256) << 20) /* what was measured before counts half from here on */
#define SPEED_NS (10 * KVK_NS_PER_SECOND)

static const char *kind_name(enum kvk_disk_kind kind)
{
    switch (kind) {
    case KVK_DISK_KIND_READ:
        return "reading";
    case KVK_DISK_KIND_WRITE:
        return "writing";
    case KVK_DISK_KIND_SYNC:
        return "syncing";
    }
    KVK_UNREACHABLE();
}

static const char *state_name(enum kvk_disk_state state)
{
    switch (state) {
    case KVK_DISK_GOOD:
        return "good";
    case KVK_DISK_FAILING:
        return "failing";
    case KVK_DISK_OFF:
        return "off";
    }
    KVK_UNREACHABLE();
}

static void state_set(struct kvk_disk_feeling *feeling, enum kvk_disk_state state)
{
    if (feeling->health.state == state) {
        return;
    }
    /* A disk that fails now and then shall not fill the log. */
    uint64_t now_ns = kvk_disk_now();
    bool off = state == KVK_DISK_OFF || feeling->health.state == KVK_DISK_OFF;
    if (off || feeling->told_ns == 0 || now_ns - feeling->told_ns >= KVK_NS_PER_SECOND) {
        enum kvk_log_level level = state == KVK_DISK_GOOD ? KVK_LOG_INFO : KVK_LOG_WARNING;
        char reason[sizeof(feeling->health.reason) + 32];
        feeling->told_ns = now_ns;
        kvk_log(level, "disk_state", "from=%s to=%s reason=%s", state_name(feeling->health.state),
                state_name(state), kvk_log_text(reason, sizeof(reason), feeling->health.reason));
    }
    feeling->health.state = state;
    if (state == KVK_DISK_OFF) {
        feeling->health.turned_off++;
        (void)pthread_cond_signal(&feeling->changed);
    }
}

/* What the failures in a row make of it; from OFF only a probe leads back. */
static void state_follow(struct kvk_disk_feeling *feeling)
{
    if (feeling->health.state == KVK_DISK_OFF) {
        return;
    }
    bool any = feeling->health.read_only;
    for (uint32_t kind = 0; kind < KVK_DISK_KIND_COUNT; kind++) {
        if (feeling->failures[kind] >= KVK_DISK_OFF_FAILURES) {
            state_set(feeling, KVK_DISK_OFF);
            return;
        }
        any = any || feeling->failures[kind] > 0;
    }
    state_set(feeling, any ? KVK_DISK_FAILING : KVK_DISK_GOOD);
}

void kvk_disk_health_good(struct kvk_disk *disk, enum kvk_disk_kind kind, uint64_t bytes)
{
    struct kvk_disk_feeling *feeling = &disk->feeling;
    kvk_lock(&feeling->lock);
    if (kind == KVK_DISK_KIND_READ) {
        feeling->health.read_bytes += bytes;
    } else if (kind == KVK_DISK_KIND_WRITE) {
        feeling->health.written_bytes += bytes;
    }
    if (feeling->failures[kind] > 0) {
        feeling->failures[kind] = 0;
        state_follow(feeling);
    }
    kvk_unlock(&feeling->lock);
}

static void failure_count(struct kvk_disk_feeling *feeling, enum kvk_disk_kind kind)
{
    switch (kind) {
    case KVK_DISK_KIND_READ:
        feeling->health.read_errors++;
        break;
    case KVK_DISK_KIND_WRITE:
        feeling->health.write_errors++;
        break;
    case KVK_DISK_KIND_SYNC:
        feeling->health.sync_errors++;
        break;
    }
}

enum kvk_status kvk_disk_health_failed(struct kvk_disk *disk, enum kvk_disk_kind kind, int error,
                                       const char *what)
{
    struct kvk_disk_feeling *feeling = &disk->feeling;
    struct kvk_disk_health *health = &feeling->health;
    bool no_space = error == ENOSPC || error == EDQUOT;

    kvk_lock(&feeling->lock);
    (void)snprintf(health->reason, sizeof(health->reason), "%s %s: %s", kind_name(kind), what,
                   error == KVK_DISK_ENDED ? "the file is shorter than it was" : strerror(error));
    if (no_space) {
        health->full = true;
        health->full_errors++;
    } else if (error == KVK_DISK_ENDED) {
        if (kind == KVK_DISK_KIND_READ) {
            health->short_reads++;
        } else {
            failure_count(feeling, kind);
        }
        if (feeling->failures[kind] == 0) {
            feeling->failures[kind] = 1;
        }
    } else {
        failure_count(feeling, kind);
        if (error == EROFS) {
            health->read_only = true;
            (void)pthread_cond_signal(&feeling->changed);
        } else {
            feeling->failures[kind]++;
        }
    }
    state_follow(feeling);
    kvk_unlock(&feeling->lock);
    return no_space ? KVK_EXHAUSTED : KVK_INTERNAL;
}

void kvk_disk_health_full(struct kvk_disk *disk, bool full, const char *what)
{
    struct kvk_disk_feeling *feeling = &disk->feeling;
    kvk_lock(&feeling->lock);
    feeling->health.full = full;
    if (full) {
        feeling->health.full_errors++;
        (void)snprintf(feeling->health.reason, sizeof(feeling->health.reason),
                       "allocating %s: no space on the file system", what);
    }
    kvk_unlock(&feeling->lock);
}

void kvk_disk_health_unpunched(struct kvk_disk *disk)
{
    kvk_lock(&disk->feeling.lock);
    disk->feeling.health.unpunched++;
    kvk_unlock(&disk->feeling.lock);
}

enum kvk_status kvk_disk_health_admits(struct kvk_disk *disk, enum kvk_disk_kind kind,
                                       struct kvk_error *error)
{
    struct kvk_disk_feeling *feeling = &disk->feeling;
    struct kvk_disk_health *health = &feeling->health;
    enum kvk_status status = KVK_OK;

    kvk_lock(&feeling->lock);
    if (health->state == KVK_DISK_OFF) {
        status = kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "", "the disk is off: %s",
                          health->reason);
    } else if (kind == KVK_DISK_KIND_WRITE && health->read_only) {
        status = kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                          "the disk's file system is read-only: %s", health->reason);
    }
    kvk_unlock(&feeling->lock);
    if (status != KVK_OK) {
        kvk_error_retry(error, disk->probe_ms);
    }
    return status;
}

void kvk_disk_health_speed(struct kvk_disk *disk, bool write, uint64_t bytes, uint64_t ns)
{
    struct kvk_disk_feeling *feeling = &disk->feeling;
    kvk_lock(&feeling->lock);
    struct kvk_disk_speed *speed = write ? &feeling->write_speed : &feeling->read_speed;
    if (speed->bytes > SPEED_BYTES || speed->ns > SPEED_NS) {
        speed->bytes /= 2;
        speed->ns /= 2;
    }
    speed->bytes += bytes;
    speed->ns += ns;
    feeling->health.slow = ns > KVK_DISK_STALL_NS;
    if (feeling->health.slow) {
        feeling->health.stalls++;
        (void)snprintf(feeling->health.reason, sizeof(feeling->health.reason),
                       "%s %llu bytes took %llu ms", write ? "writing" : "reading",
                       (unsigned long long)bytes, (unsigned long long)(ns / KVK_NS_PER_MS));
    }
    kvk_unlock(&feeling->lock);
}

static uint64_t speed_rate(const struct kvk_disk_speed *speed)
{
    if (speed->ns == 0) {
        return 0;
    }
    return (uint64_t)((double)speed->bytes * (double)KVK_NS_PER_SECOND / (double)speed->ns);
}

void kvk_disk_health(struct kvk_disk *disk, struct kvk_disk_health *health)
{
    kvk_lock(&disk->feeling.lock);
    *health = disk->feeling.health;
    health->read_rate = speed_rate(&disk->feeling.read_speed);
    health->write_rate = speed_rate(&disk->feeling.write_speed);
    kvk_unlock(&disk->feeling.lock);
}

/* ---- The prober ---- */

static bool wants_probe(const struct kvk_disk_feeling *feeling)
{
    return feeling->health.state == KVK_DISK_OFF || feeling->health.read_only;
}

static void probe_note(struct kvk_disk_feeling *feeling, int failed)
{
    feeling->health.probes++;
    if (failed == 0) {
        memset(feeling->failures, 0, sizeof(feeling->failures));
        feeling->health.read_only = false;
        state_set(feeling, KVK_DISK_GOOD);
    } else {
        (void)snprintf(feeling->health.reason, sizeof(feeling->health.reason), "the probe: %s",
                       failed == KVK_DISK_ENDED ? "other bytes came back" : strerror(failed));
    }
}

static void *prober_main(void *context)
{
    struct kvk_disk *disk = context;
    struct kvk_disk_feeling *feeling = &disk->feeling;

    kvk_lock(&feeling->lock);
    while (!feeling->stopping) {
        if (!wants_probe(feeling)) {
            (void)kvk_condition_wait(&feeling->changed, &feeling->lock, UINT64_MAX);
            continue;
        }
        uint64_t until_ns = kvk_disk_now() + disk->probe_ms * KVK_NS_PER_MS;
        while (!feeling->stopping &&
               kvk_condition_wait(&feeling->changed, &feeling->lock, until_ns)) {
        }
        if (!feeling->stopping && wants_probe(feeling)) {
            kvk_unlock(&feeling->lock);
            int failed = kvk_disk_probe(disk);
            kvk_lock(&feeling->lock);
            probe_note(feeling, failed);
        }
    }
    kvk_unlock(&feeling->lock);
    return NULL;
}

enum kvk_status kvk_disk_health_start(struct kvk_disk *disk, struct kvk_error *error)
{
    struct kvk_disk_feeling *feeling = &disk->feeling;
    int failed = pthread_create(&feeling->prober, NULL, prober_main, disk);
    if (failed != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                        "the disk's prober could not be started: %s", strerror(failed));
    }
    feeling->prober_running = true;
    return KVK_OK;
}

void kvk_disk_health_stop(struct kvk_disk *disk)
{
    struct kvk_disk_feeling *feeling = &disk->feeling;
    if (!feeling->prober_running) {
        return;
    }
    kvk_lock(&feeling->lock);
    feeling->stopping = true;
    (void)pthread_cond_signal(&feeling->changed);
    kvk_unlock(&feeling->lock);
    (void)pthread_join(feeling->prober, NULL);
    feeling->prober_running = false;
}
