/*
 * The disk's runner where there is no io_uring: a few threads, each with one plain read or write
 * under way. Also how the system's own calls look as a struct kvk_disk_io.
 */
#include "hosttier/disk_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"

static ssize_t system_read(void *context, int fd, void *buffer, size_t size, off_t offset)
{
    (void)context;
    return pread(fd, buffer, size, offset);
}

static ssize_t system_write(void *context, int fd, const void *buffer, size_t size, off_t offset)
{
    (void)context;
    return pwrite(fd, buffer, size, offset);
}

static int system_allocate(void *context, int fd, off_t offset, off_t size)
{
    (void)context;
    return fallocate(fd, 0, offset, size);
}

static int system_punch(void *context, int fd, off_t offset, off_t size)
{
    (void)context;
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size);
}

static int system_sync(void *context, int fd)
{
    (void)context;
    return fdatasync(fd);
}

const struct kvk_disk_io kvk_disk_system_io = {
    .read = system_read,
    .write = system_write,
    .allocate = system_allocate,
    .punch = system_punch,
    .sync = system_sync,
    .context = NULL,
};

static void request_run(struct kvk_disk *disk, struct kvk_disk_request *request)
{
    const struct kvk_disk_io *io = &disk->io;
    int64_t result = 0;
    do {
        uint8_t *memory = request->memory + request->done;
        size_t size = request->size - request->done;
        off_t offset = (off_t)(request->file_offset + request->done);
        errno = 0;
        ssize_t moved = request->write ? io->write(io->context, request->fd, memory, size, offset)
                                       : io->read(io->context, request->fd, memory, size, offset);
        result = moved >= 0 ? (int64_t)moved : -(int64_t)(errno != 0 ? errno : EIO);
    } while (!kvk_disk_request_advance(request, result));
}

static void *thread_main(void *context)
{
    struct kvk_disk *disk = context;
    struct kvk_disk_queue *queue = &disk->queue;

    kvk_lock(&queue->lock);
    for (;;) {
        struct kvk_disk_request *request = kvk_disk_queue_pick(queue);
        if (request != NULL) {
            kvk_unlock(&queue->lock);
            request_run(disk, request);
            kvk_disk_queue_done(queue, request);
            kvk_lock(&queue->lock);
            continue;
        }
        if (queue->stopping) {
            break;
        }
        (void)kvk_condition_wait(&queue->work, &queue->lock, UINT64_MAX);
    }
    kvk_unlock(&queue->lock);
    return NULL;
}

enum kvk_status kvk_disk_threads_start(struct kvk_disk *disk, struct kvk_error *error)
{
    for (uint32_t i = 0; i < disk->thread_count; i++) {
        int failed = pthread_create(&disk->threads[i], NULL, thread_main, disk);
        if (failed != 0) {
            kvk_disk_threads_stop(disk);
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                            "disk thread %u of %u could not be started: %s", i, disk->thread_count,
                            strerror(failed));
        }
        disk->threads_running++;
    }
    return KVK_OK;
}

void kvk_disk_threads_stop(struct kvk_disk *disk)
{
    struct kvk_disk_queue *queue = &disk->queue;
    kvk_lock(&queue->lock);
    queue->stopping = true;
    (void)pthread_cond_broadcast(&queue->work);
    kvk_unlock(&queue->lock);
    for (uint32_t i = 0; i < disk->threads_running; i++) {
        (void)pthread_join(disk->threads[i], NULL);
    }
    disk->threads_running = 0;
}
