/*
 * What goes to the disk next.
 *
 * Restores go first. Write-behind and read-ahead have a bounded part of the depth, and a small one
 * while a restore is waiting or was seen a moment ago: what is already at the device cannot be
 * called back, so the bound is what a restore may have to wait for. Every sixteenth choice
 * goes the other way round, so that a flood of restores starves nobody.
 */
#include "hosttier/disk_internal.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"

#define RESTORE_ECHO_NS (20 * KVK_NS_PER_MS) /* a restore counts as waiting for so long */
#define TURN_PICKS 16U
#define BEHIND_MAX 16U /* requests of write-behind at the device */

static uint32_t at_least_one(uint32_t count)
{
    return count > 0 ? count : 1;
}

static enum kvk_status bounces_init(struct kvk_disk_bounces *bounces, uint32_t size_bytes,
                                    uint32_t count, struct kvk_error *error)
{
    bounces->size_bytes = size_bytes;
    bounces->count = count;
    void *memory = mmap(NULL, (size_t)size_bytes * count, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for disk buffers");
    }
    bounces->memory = memory;
    for (uint32_t i = 0; i < count; i++) {
        bounces->free[i] = (uint16_t)i;
    }
    bounces->free_count = count;
    return KVK_OK;
}

static void bounces_finish(struct kvk_disk_bounces *bounces)
{
    KVK_ASSERT(bounces->free_count == bounces->count);
    if (bounces->memory != NULL) {
        (void)munmap(bounces->memory, (size_t)bounces->size_bytes * bounces->count);
    }
}

enum kvk_status kvk_disk_queue_init(struct kvk_disk_queue *queue, uint32_t depth,
                                    struct kvk_error *error)
{
    memset(queue, 0, sizeof(*queue));
    queue->depth = depth;
    queue->wake_fd = -1;
    kvk_lock_init(&queue->lock);
    kvk_condition_init(&queue->work);
    kvk_condition_init(&queue->bounce_set);
    enum kvk_status status =
        bounces_init(&queue->big, KVK_DISK_STEP_BYTES, KVK_DISK_BIG_COUNT, error);
    if (status == KVK_OK) {
        status = bounces_init(&queue->small, KVK_DISK_ALIGN, KVK_DISK_SMALL_COUNT, error);
    }
    if (status != KVK_OK) {
        queue->big.free_count = queue->big.count;
        queue->small.free_count = queue->small.count;
        kvk_disk_queue_finish(queue);
    }
    return status;
}

void kvk_disk_queue_finish(struct kvk_disk_queue *queue)
{
    bounces_finish(&queue->big);
    bounces_finish(&queue->small);
    (void)pthread_cond_destroy(&queue->work);
    (void)pthread_cond_destroy(&queue->bounce_set);
    kvk_lock_finish(&queue->lock);
}

void kvk_disk_queue_push(struct kvk_disk_queue *queue, struct kvk_disk_request *first,
                         struct kvk_disk_request *last, uint32_t count)
{
    uint8_t class = first->class;
    KVK_ASSERT(class < KVK_DISK_CLASS_COUNT);
    KVK_ASSERT(last->next == NULL);
    kvk_lock(&queue->lock);
    KVK_ASSERT(!queue->stopping);
    if (queue->last[class] != NULL) {
        queue->last[class]->next = first;
    } else {
        queue->first[class] = first;
    }
    queue->last[class] = last;
    queue->waiting[class] += count;
    bool wake = queue->sleeping;
    queue->sleeping = false;
    if (queue->wake_fd < 0) {
        if (count > 1) {
            (void)pthread_cond_broadcast(&queue->work);
        } else {
            (void)pthread_cond_signal(&queue->work);
        }
    }
    kvk_unlock(&queue->lock);
    if (wake && queue->wake_fd >= 0) {
        uint64_t one = 1;
        /* It can only fail where the counter is full, and then the thread is awake. */
        ssize_t ignored = write(queue->wake_fd, &one, sizeof(one));
        (void)ignored;
    }
}

/* How many of the class may be at the device now. */
static uint32_t class_limit(const struct kvk_disk_queue *queue, uint32_t class)
{
    if (class == KVK_DISK_RESTORE) {
        return queue->depth;
    }
    bool restoring =
        queue->waiting[KVK_DISK_RESTORE] > 0 || queue->running[KVK_DISK_RESTORE] > 0 ||
        (queue->restore_ns != 0 && kvk_disk_now() - queue->restore_ns < RESTORE_ECHO_NS);
    if (class == KVK_DISK_AHEAD) {
        return at_least_one(restoring ? queue->depth / 8 : queue->depth / 2);
    }
    uint32_t half = queue->depth / 2;
    return at_least_one(restoring ? queue->depth / 16 : half < BEHIND_MAX ? half : BEHIND_MAX);
}

struct kvk_disk_request *kvk_disk_queue_pick(struct kvk_disk_queue *queue)
{
    KVK_ASSERT(kvk_lock_held(&queue->lock));
    uint32_t running = 0;
    for (uint32_t class = 0; class < KVK_DISK_CLASS_COUNT; class ++) {
        running += queue->running[class];
    }
    if (running >= queue->depth) {
        return NULL;
    }
    bool turned = queue->picks % TURN_PICKS == TURN_PICKS - 1;
    for (uint32_t i = 0; i < KVK_DISK_CLASS_COUNT; i++) {
        uint32_t class = turned ? KVK_DISK_CLASS_COUNT - 1 - i : i;
        struct kvk_disk_request *request = queue->first[class];
        if (request == NULL || queue->running[class] >= class_limit(queue, class)) {
            continue;
        }
        queue->first[class] = request->next;
        if (request->next == NULL) {
            queue->last[class] = NULL;
        }
        request->next = NULL;
        queue->waiting[class]--;
        queue->running[class]++;
        queue->picks++;
        if (class == KVK_DISK_RESTORE) {
            queue->restore_ns = kvk_disk_now();
        }
        return request;
    }
    return NULL;
}

bool kvk_disk_request_advance(struct kvk_disk_request *request, int64_t result)
{
    KVK_ASSERT(result <= (int64_t)request->size - (int64_t)request->done);
    if (result == -EINTR || result == -EAGAIN) {
        request->tries++;
        if (request->tries < KVK_DISK_TRIES_MAX) {
            return false;
        }
        request->error = EIO;
        return true;
    }
    if (result < 0) {
        request->error = (int)-result;
        return true;
    }
    /* What goes past the page cache goes on at a whole block, if need be with bytes that were
     * there already. */
    uint32_t progress = (uint32_t)result;
    if (request->direct) {
        progress = progress / KVK_DISK_ALIGN * KVK_DISK_ALIGN;
    }
    request->done += progress;
    if (request->done == request->size) {
        return true;
    }
    if (progress == 0) {
        request->error = request->write ? EIO : KVK_DISK_ENDED;
        return true;
    }
    request->tries = 0;
    return false;
}

void kvk_disk_queue_done(struct kvk_disk_queue *queue, struct kvk_disk_request *chain)
{
    kvk_lock(&queue->lock);
    while (chain != NULL) {
        struct kvk_disk_request *request = chain;
        chain = request->next;
        KVK_ASSERT(queue->running[request->class] > 0);
        queue->running[request->class]--;
        if (request->class == KVK_DISK_RESTORE) {
            queue->restore_ns = kvk_disk_now();
        }
        struct kvk_disk_run *run = request->run;
        request->next = run->finished;
        run->finished = request;
        run->finished_count++;
        /* With the lock: the run is in its caller's frame, which may go once this is seen. */
        if (run->finished_count == run->wanted_count) {
            (void)pthread_cond_signal(&run->done);
        }
    }
    if (queue->wake_fd < 0) {
        (void)pthread_cond_signal(&queue->work); /* a class may have been at its limit */
    }
    kvk_unlock(&queue->lock);
}

/* ---- Bounce buffers ---- */

static struct kvk_disk_bounces *bounces_for(struct kvk_disk_queue *queue, uint32_t size)
{
    KVK_ASSERT(size > 0 && size <= KVK_DISK_STEP_BYTES);
    return size <= KVK_DISK_ALIGN ? &queue->small : &queue->big;
}

/* Half of them are kept for restores. */
static bool bounce_free(const struct kvk_disk_bounces *bounces, enum kvk_disk_class class)
{
    return bounces->free_count > (class == KVK_DISK_RESTORE ? 0 : bounces->count / 2);
}

uint8_t *kvk_disk_bounce_take(struct kvk_disk_queue *queue, enum kvk_disk_class class,
                              uint32_t size)
{
    struct kvk_disk_bounces *bounces = bounces_for(queue, size);
    uint8_t *bounce = NULL;
    kvk_lock(&queue->lock);
    if (bounce_free(bounces, class)) {
        bounces->free_count--;
        bounce = bounces->memory + (size_t)bounces->free[bounces->free_count] * bounces->size_bytes;
    }
    kvk_unlock(&queue->lock);
    return bounce;
}

void kvk_disk_bounce_give(struct kvk_disk_queue *queue, uint8_t *bounce)
{
    struct kvk_disk_bounces *bounces = &queue->small;
    size_t offset = (size_t)((uintptr_t)bounce - (uintptr_t)bounces->memory);
    if (bounce < bounces->memory || offset >= (size_t)bounces->size_bytes * bounces->count) {
        bounces = &queue->big;
        offset = (size_t)((uintptr_t)bounce - (uintptr_t)bounces->memory);
    }
    KVK_ASSERT(offset % bounces->size_bytes == 0);
    KVK_ASSERT(offset / bounces->size_bytes < bounces->count);
    kvk_lock(&queue->lock);
    KVK_ASSERT(bounces->free_count < bounces->count);
    bounces->free[bounces->free_count] = (uint16_t)(offset / bounces->size_bytes);
    bounces->free_count++;
    (void)pthread_cond_broadcast(&queue->bounce_set);
    kvk_unlock(&queue->lock);
}

void kvk_disk_bounce_wait(struct kvk_disk_queue *queue, enum kvk_disk_class class, uint32_t size)
{
    struct kvk_disk_bounces *bounces = bounces_for(queue, size);
    kvk_lock(&queue->lock);
    while (!bounce_free(bounces, class)) {
        (void)kvk_condition_wait(&queue->bounce_set, &queue->lock, UINT64_MAX);
    }
    kvk_unlock(&queue->lock);
}
