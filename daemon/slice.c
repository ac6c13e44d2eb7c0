/* Long work under the lock goes in slices, and leaves the lock to whoever waits in between. */
#include <sched.h>
#include <time.h>

#include "base/assert.h"
#include "daemon/cache_internal.h"

#define PAUSE_NS 100000

void kvk_pause_drops(struct kvk_cache *cache)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    kvk_unlock(&cache->lock);
    (void)(cache->threads ? nanosleep(&pause, NULL) : sched_yield());
    kvk_lock(&cache->lock);
}

bool kvk_slice_drops(struct kvk_cache *cache, uint32_t *work)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    (*work)++;
    if (*work < cache->slice_blocks) {
        return false;
    }
    *work = 0;
    kvk_pause_drops(cache);
    return true;
}
