#include "daemon/disk_flush.h"

#include <time.h>

#include "base/assert.h"
#include "daemon/disk_tier_internal.h"

#define LOOK_MS 5                   /* between two looks at the queue */
#define ANSWER_NS KVK_NS_PER_SECOND /* left of the caller's time, so that it hears the answer */

static bool is_over(const struct kvk_caller *caller, uint64_t until_ns)
{
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    return now_ns >= until_ns ||
           (caller->deadline_ns != UINT64_MAX && now_ns + ANSWER_NS >= caller->deadline_ns) ||
           (caller->cancelled != NULL && caller->cancelled(caller->cancelled_context));
}

/* The disk tier's thread does the work; where there is none, this one. False: nothing moves. */
static bool step_drops(struct kvk_cache *cache)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    if (!cache->threads) {
        uint32_t before = tier->behind.count;
        bool more = kvk_disk_round_drops(cache);
        return more || tier->behind.count < before;
    }
    const struct timespec pause = {.tv_nsec = LOOK_MS * (long)KVK_NS_PER_MS};
    (void)pthread_cond_signal(&tier->wake);
    kvk_unlock(&cache->lock);
    (void)nanosleep(&pause, NULL);
    kvk_lock(&cache->lock);
    return true;
}

void kvk_disk_flush_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                          uint64_t until_ns, struct kvk_disk_flush *flush)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_disk_tier *tier = cache->disk_tier;
    *flush = (struct kvk_disk_flush){.left_blocks = 0};
    if (tier == NULL) {
        return;
    }
    uint64_t before = cache->stats.disk_written_blocks;
    /* What has left the queue is written when its round has ended. */
    while ((tier->behind.count > 0 || tier->round_running) && kvk_disk_is_usable(cache) &&
           !is_over(caller, until_ns) && step_drops(cache)) {
    }
    flush->written_blocks = cache->stats.disk_written_blocks - before;
    flush->left_blocks = tier->behind.count;
}
