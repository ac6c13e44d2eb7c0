/*
 * The disk's runner on io_uring: one thread owns the ring, submits what the queue gives it and
 * takes what is done. It is woken through an eventfd that the ring itself reads, so that it
 * waits in one place for both new work and completions.
 */
#include "hosttier/disk_internal.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/priority.h"

#define BATCH 64U /* completions taken at a time */
#define REFUSED_PAUSE_US 1000U

struct kvk_disk_ring {
    struct kvk_disk *disk; /* borrowed */
    struct io_uring uring; /* the thread's */
    uint64_t wake_count;   /* what the eventfd is read into */
    pthread_t thread;
    pthread_cond_t started; /* with the queue's lock */
    bool is_started;
    int failed; /* errno of the set-up */
    uint32_t under_way;
};

static struct io_uring_sqe *next_sqe(struct kvk_disk_ring *ring)
{
    /* The ring has an entry for every request of the depth and one for the wake-up. */
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
    if (sqe == NULL) {
        (void)io_uring_submit(&ring->uring);
        sqe = io_uring_get_sqe(&ring->uring);
    }
    KVK_ASSERT(sqe != NULL);
    return sqe;
}

static void request_issue(struct kvk_disk_ring *ring, struct kvk_disk_request *request)
{
    struct io_uring_sqe *sqe = next_sqe(ring);
    uint8_t *memory = request->memory + request->done;
    uint32_t size = request->size - request->done;
    uint64_t offset = request->file_offset + request->done;
    if (request->write) {
        io_uring_prep_write(sqe, request->fd, memory, size, offset);
    } else {
        io_uring_prep_read(sqe, request->fd, memory, size, offset);
    }
    io_uring_sqe_set_data(sqe, request);
}

static void wake_arm(struct kvk_disk_ring *ring)
{
    struct io_uring_sqe *sqe = next_sqe(ring);
    io_uring_prep_read(sqe, ring->disk->queue.wake_fd, &ring->wake_count, sizeof(ring->wake_count),
                       0);
    io_uring_sqe_set_data(sqe, NULL);
}

/* Take what is done; false: nothing was. */
static bool completions_take(struct kvk_disk_ring *ring)
{
    struct io_uring_cqe *cqes[BATCH];
    unsigned count = io_uring_peek_batch_cqe(&ring->uring, cqes, BATCH);
    struct kvk_disk_request *over = NULL;

    for (unsigned i = 0; i < count; i++) {
        struct kvk_disk_request *request = io_uring_cqe_get_data(cqes[i]);
        int32_t result = cqes[i]->res;
        io_uring_cqe_seen(&ring->uring, cqes[i]);
        if (request == NULL) {
            wake_arm(ring);
        } else if (kvk_disk_request_advance(request, result)) {
            ring->under_way--;
            request->next = over;
            over = request;
        } else {
            request_issue(ring, request);
        }
    }
    if (over != NULL) {
        kvk_disk_queue_done(&ring->disk->queue, over);
    }
    return count > 0;
}

/* Issue what may go now. True: nothing is under way and nothing more will come. */
static bool requests_take(struct kvk_disk_ring *ring)
{
    struct kvk_disk_queue *queue = &ring->disk->queue;
    struct kvk_disk_request *chain = NULL;

    kvk_lock(&queue->lock);
    for (struct kvk_disk_request *request = kvk_disk_queue_pick(queue); request != NULL;
         request = kvk_disk_queue_pick(queue)) {
        request->next = chain;
        chain = request;
    }
    bool over = queue->stopping && chain == NULL && ring->under_way == 0;
    queue->sleeping = true; /* from here on a push writes to the eventfd */
    kvk_unlock(&queue->lock);

    /* The chain is the wrong way round; the order in which they came is kept. */
    struct kvk_disk_request *ordered = NULL;
    while (chain != NULL) {
        struct kvk_disk_request *request = chain;
        chain = request->next;
        request->next = ordered;
        ordered = request;
    }
    while (ordered != NULL) {
        struct kvk_disk_request *request = ordered;
        ordered = request->next;
        request->next = NULL;
        request_issue(ring, request);
        ring->under_way++;
    }
    return over;
}

/* The newest way of running a ring that this kernel has. Made by the thread that uses it. */
static int ring_init(struct kvk_disk_ring *ring)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int failed = ENOSYS;
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        failed = -io_uring_queue_init(ring->disk->queue.depth + 1, &ring->uring, flags[i]);
        if (failed != EINVAL) {
            break;
        }
    }
    return failed;
}

static void *ring_main(void *context)
{
    struct kvk_disk_ring *ring = context;
    struct kvk_disk_queue *queue = &ring->disk->queue;

    kvk_priority_works();
    int failed = ring_init(ring);
    kvk_lock(&queue->lock);
    ring->failed = failed;
    ring->is_started = true;
    (void)pthread_cond_signal(&ring->started);
    kvk_unlock(&queue->lock);
    if (failed != 0) {
        return NULL;
    }
    wake_arm(ring);
    bool told = false;
    while (!requests_take(ring)) {
        int submitted = io_uring_submit_and_wait(&ring->uring, 1);
        if (submitted < 0 && submitted != -EINTR && submitted != -EAGAIN && submitted != -EBUSY &&
            !told) {
            told = true; /* what waits is submitted again: nothing is lost by it */
            kvk_log(KVK_LOG_WARNING, "disk_ring_refused", "error=%d", -submitted);
        }
        bool any = false;
        while (completions_take(ring)) {
            any = true;
        }
        if (submitted < 0 && !any) {
            (void)usleep(REFUSED_PAUSE_US);
        }
    }
    io_uring_queue_exit(&ring->uring);
    return NULL;
}

static void ring_free(struct kvk_disk *disk)
{
    (void)close(disk->queue.wake_fd);
    disk->queue.wake_fd = -1;
    (void)pthread_cond_destroy(&disk->ring->started);
    free(disk->ring);
    disk->ring = NULL;
}

enum kvk_status kvk_disk_uring_start(struct kvk_disk *disk, struct kvk_error *error)
{
    struct kvk_disk_queue *queue = &disk->queue;
    struct kvk_disk_ring *ring = calloc(1, sizeof(*ring));
    if (ring == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the disk's ring");
    }
    ring->disk = disk;
    kvk_condition_init(&ring->started);
    disk->ring = ring;
    queue->wake_fd = eventfd(0, EFD_CLOEXEC);
    int failed = queue->wake_fd >= 0 ? pthread_create(&ring->thread, NULL, ring_main, ring) : errno;
    if (failed == 0) {
        kvk_lock(&queue->lock);
        while (!ring->is_started) {
            (void)kvk_condition_wait(&ring->started, &queue->lock, UINT64_MAX);
        }
        failed = ring->failed;
        kvk_unlock(&queue->lock);
        if (failed != 0) {
            (void)pthread_join(ring->thread, NULL);
        }
    }
    if (failed != 0) {
        ring_free(disk);
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "", "io_uring is not to be had: %s",
                        strerror(failed));
    }
    return KVK_OK;
}

void kvk_disk_uring_stop(struct kvk_disk *disk)
{
    struct kvk_disk_queue *queue = &disk->queue;
    kvk_lock(&queue->lock);
    queue->stopping = true;
    kvk_unlock(&queue->lock);
    uint64_t one = 1;
    ssize_t ignored = write(queue->wake_fd, &one, sizeof(one));
    (void)ignored;
    (void)pthread_join(disk->ring->thread, NULL);
    ring_free(disk);
}
