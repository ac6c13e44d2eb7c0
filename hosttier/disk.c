/*
 * Opening the disk, and the calls that move bytes: pieces are cut into requests, a window of them
 * is kept under way, and what comes back is copied, hashed and accounted on the caller's thread.
 */
#include "hosttier/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "hosttier/disk_internal.h"

#define DEPTH_DEFAULT 64U
#define THREADS_DEFAULT 4U
#define PROBE_MS_DEFAULT 5000U
#define WHAT_SIZE 96

/* ---- Opening ---- */

/* Make the folder where it is missing, and its name durable. */
static enum kvk_status folder_open(struct kvk_disk *disk, struct kvk_error *error)
{
    const char *folder = disk->folder;
    bool made = mkdir(folder, 0700) == 0;
    if (!made && errno != EEXIST) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "folder",
                        "the disk's folder could not be made: %s", strerror(errno));
    }
    disk->folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (disk->folder_fd < 0) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "folder",
                        "the disk's folder could not be opened: %s", strerror(errno));
    }
    int parent = made ? openat(disk->folder_fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (parent >= 0) {
        (void)fsync(parent); /* without it the folder is made again at the next start */
        (void)close(parent);
    }
    return KVK_OK;
}

static void options_take(struct kvk_disk *disk, const struct kvk_disk_options *options)
{
    disk->probe_ms = options->probe_ms != 0 ? options->probe_ms : PROBE_MS_DEFAULT;
    disk->thread_count = options->thread_count != 0 ? options->thread_count : THREADS_DEFAULT;
    disk->io = options->io != NULL ? *options->io : kvk_disk_system_io;
    disk->folder_fd = -1;
    disk->probe_fd = -1;
    disk->memory_align = 1;
    kvk_lock_init(&disk->feeling.lock);
    kvk_condition_init(&disk->feeling.changed);
}

/* Start who does the I/O: the ring if it is wanted and to be had, else threads. */
static enum kvk_status runner_start(struct kvk_disk *disk, bool want_uring, uint32_t depth,
                                    struct kvk_error *error)
{
    enum kvk_status status = kvk_disk_queue_init(&disk->queue, depth, error);
    if (status != KVK_OK) {
        return status;
    }
    if (want_uring) {
        struct kvk_error refused;
        if (kvk_disk_uring_start(disk, &refused) == KVK_OK) {
            disk->uring = true;
            return KVK_OK;
        }
        char reason[KVK_ERROR_TEXT_SIZE];
        kvk_log(KVK_LOG_INFO, "disk_without_uring", "reason=%s",
                kvk_log_text(reason, sizeof(reason), refused.text));
    }
    if (disk->queue.depth > disk->thread_count) {
        disk->queue.depth = disk->thread_count;
    }
    status = kvk_disk_threads_start(disk, error);
    if (status != KVK_OK) {
        kvk_disk_queue_finish(&disk->queue);
    }
    return status;
}

static void disk_free(struct kvk_disk *disk)
{
    kvk_disk_health_stop(disk);
    if (disk->probe_fd >= 0) {
        (void)close(disk->probe_fd);
    }
    if (disk->folder_fd >= 0) {
        (void)close(disk->folder_fd);
    }
    (void)pthread_cond_destroy(&disk->feeling.changed);
    kvk_lock_finish(&disk->feeling.lock);
    free(disk->folder);
    free(disk);
}

enum kvk_status kvk_disk_open(const struct kvk_disk_options *options, struct kvk_disk **disk,
                              struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    uint32_t depth = options->depth != 0 ? options->depth : DEPTH_DEFAULT;
    *disk = NULL;
    if (depth > KVK_DISK_DEPTH_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "depth", depth,
                              KVK_DISK_DEPTH_MAX, "depth must be at most %u", KVK_DISK_DEPTH_MAX);
    }
    if (options->thread_count > KVK_DISK_THREADS_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "thread_count",
                              options->thread_count, KVK_DISK_THREADS_MAX,
                              "thread_count must be at most %u", KVK_DISK_THREADS_MAX);
    }
    struct kvk_disk *made = calloc(1, sizeof(*made));
    char *folder = strdup(options->folder);
    if (made == NULL || folder == NULL) {
        free(made);
        free(folder);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the disk");
    }
    made->folder = folder;
    options_take(made, options);
    enum kvk_status status = folder_open(made, error);
    if (status == KVK_OK) {
        status = kvk_disk_probe_open(made, options->direct, error);
    }
    if (status == KVK_OK) {
        status = kvk_disk_health_start(made, error);
    }
    if (status == KVK_OK) {
        status = runner_start(made, options->uring && options->io == NULL, depth, error);
    }
    if (status != KVK_OK) {
        disk_free(made);
        return status;
    }
    *disk = made;
    return KVK_OK;
}

void kvk_disk_close(struct kvk_disk *disk)
{
    if (disk == NULL) {
        return;
    }
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(atomic_load(&disk->file_count) == 0);
    if (disk->uring) {
        kvk_disk_uring_stop(disk);
    } else {
        kvk_disk_threads_stop(disk);
    }
    kvk_disk_queue_finish(&disk->queue);
    disk_free(disk);
}

const char *kvk_disk_path_name(const struct kvk_disk *disk)
{
    if (disk->uring) {
        return disk->direct ? "uring+direct" : "uring";
    }
    return disk->direct ? "threads+direct" : "threads";
}

bool kvk_disk_goes_straight(const struct kvk_disk *disk, const void *memory, uint64_t size_bytes)
{
    return (uintptr_t)memory % disk->memory_align == 0 && size_bytes % KVK_DISK_ALIGN == 0;
}

/* ---- A call ---- */

/* What a call is about, and how far it is. */
struct moving {
    struct kvk_disk *disk;
    enum kvk_disk_class class;
    bool write;
    struct kvk_disk_piece *pieces; /* [count] */
    uint32_t count;
    uint32_t piece;        /* being cut: what is before it is issued */
    uint64_t cut_bytes;    /* of that piece */
    uint32_t hashed;       /* write: pieces before it are hashed */
    uint32_t under_way;    /* requests */
    uint32_t bounce_bytes; /* of the buffer that was not to be had; 0: none */
    uint64_t moved_bytes;
    struct kvk_error error; /* the first failure */
    struct kvk_disk_run run;
};

static void piece_failed(struct moving *moving, uint32_t index, enum kvk_status status,
                         const struct kvk_error *error)
{
    KVK_ASSERT(status != KVK_OK);
    if (moving->error.status == KVK_OK) {
        moving->error = *error;
    }
    if (moving->pieces[index].status == KVK_OK) {
        moving->pieces[index].status = status;
    }
}

static void piece_name(const struct kvk_disk_piece *piece, char what[WHAT_SIZE])
{
    (void)snprintf(what, WHAT_SIZE, "slot %" PRIu32 " of space %" PRIu64 " group %" PRIu32,
                   piece->slot, piece->file->space_id, piece->file->group);
}

/* A request of the piece failed: with an errno, or because the file ended. */
static void request_failed(struct moving *moving, uint32_t index, int failed)
{
    char what[WHAT_SIZE];
    struct kvk_error error;
    piece_name(&moving->pieces[index], what);
    enum kvk_status status = kvk_disk_health_failed(
        moving->disk, moving->write ? KVK_DISK_KIND_WRITE : KVK_DISK_KIND_READ, failed, what);
    (void)kvk_fail(&error, status, KVK_CAUSE_NONE, "", "%s %s: %s",
                   moving->write ? "writing" : "reading", what,
                   failed == KVK_DISK_ENDED ? "the file is shorter than it was" : strerror(failed));
    if (failed == KVK_DISK_ENDED) {
        kvk_disk_file_look(moving->pieces[index].file);
    }
    piece_failed(moving, index, status, &error);
}

/* Before the first byte of a piece: may it be moved at all? */
static bool piece_begin(struct moving *moving, uint32_t index)
{
    const struct kvk_disk_piece *piece = &moving->pieces[index];
    struct kvk_error error;
    KVK_ASSERT(piece->slot < piece->file->slot_count);
    KVK_ASSERT(piece->offset % KVK_DISK_ALIGN == 0 && piece->offset < piece->file->slot_bytes);
    KVK_ASSERT(piece->size_bytes > 0);
    KVK_ASSERT(kvk_disk_round_up(piece->size_bytes) <= piece->file->slot_bytes - piece->offset);
    enum kvk_status status = kvk_disk_health_admits(
        moving->disk, moving->write ? KVK_DISK_KIND_WRITE : KVK_DISK_KIND_READ, &error);
    if (status != KVK_OK) {
        piece_failed(moving, index, status, &error);
        return false;
    }
    if (index == 0 || moving->pieces[index - 1].file != piece->file) {
        kvk_disk_file_look(piece->file);
    }
    if (!moving->write && !kvk_disk_file_there(piece->file, piece->slot)) {
        request_failed(moving, index, KVK_DISK_ENDED);
        return false;
    }
    return true;
}

static struct kvk_disk_request *request_find(struct moving *moving)
{
    for (uint32_t i = 0; i < KVK_DISK_WINDOW; i++) {
        if (!moving->run.requests[i].busy) {
            return &moving->run.requests[i];
        }
    }
    return NULL;
}

/* Cut the next request off the current piece. False: it needs a buffer, and none is free. */
static bool request_cut(struct moving *moving, struct kvk_disk_request *request)
{
    struct kvk_disk *disk = moving->disk;
    const struct kvk_disk_piece *piece = &moving->pieces[moving->piece];
    uint8_t *memory = (uint8_t *)piece->memory + moving->cut_bytes;
    uint64_t left = piece->size_bytes - moving->cut_bytes;
    uint32_t bytes = left < KVK_DISK_STEP_BYTES ? (uint32_t)left : KVK_DISK_STEP_BYTES;
    bool straight = !piece->file->direct || (uintptr_t)memory % disk->memory_align == 0;
    uint8_t *bounce = NULL;

    if (straight && bytes >= KVK_DISK_ALIGN) {
        bytes = bytes / KVK_DISK_ALIGN * KVK_DISK_ALIGN;
    } else {
        bounce = kvk_disk_bounce_take(&disk->queue, moving->class, bytes);
        if (bounce == NULL) {
            moving->bounce_bytes = bytes;
            return false;
        }
    }
    uint32_t size = (uint32_t)kvk_disk_round_up(bytes);
    if (bounce != NULL && moving->write) {
        memcpy(bounce, memory, bytes);
        memset(bounce + bytes, 0, size - bytes);
    }
    *request = (struct kvk_disk_request){
        .run = &moving->run,
        .memory = bounce != NULL ? bounce : memory,
        .file_offset = piece->slot * piece->file->slot_bytes + piece->offset + moving->cut_bytes,
        .size = size,
        .fd = piece->file->fd,
        .class = (uint8_t)moving->class,
        .write = moving->write,
        .direct = piece->file->direct,
        .busy = true,
        .piece = moving->piece,
        .bounce = bounce,
        .target = memory,
        .target_bytes = bytes,
    };
    moving->cut_bytes += bytes;
    return true;
}

/* Fill the window. */
static void requests_feed(struct moving *moving)
{
    struct kvk_disk_request *first = NULL;
    struct kvk_disk_request *last = NULL;
    uint32_t count = 0;

    moving->bounce_bytes = 0;
    while (moving->piece < moving->count) {
        struct kvk_disk_piece *piece = &moving->pieces[moving->piece];
        if (moving->cut_bytes == 0 && !piece_begin(moving, moving->piece)) {
            moving->piece++;
            continue;
        }
        struct kvk_disk_request *request = request_find(moving);
        if (request == NULL || !request_cut(moving, request)) {
            break;
        }
        if (last != NULL) {
            last->next = request;
        } else {
            first = request;
        }
        last = request;
        count++;
        if (moving->cut_bytes == piece->size_bytes) {
            moving->piece++;
            moving->cut_bytes = 0;
        }
    }
    if (count > 0) {
        moving->under_way += count;
        kvk_disk_queue_push(&moving->disk->queue, first, last, count);
    }
}

/* Has every request of the piece come back? */
static bool piece_is_over(const struct moving *moving, uint32_t index)
{
    if (index > moving->piece || (index == moving->piece && moving->cut_bytes > 0)) {
        return false;
    }
    for (uint32_t i = 0; i < KVK_DISK_WINDOW; i++) {
        if (moving->run.requests[i].busy && moving->run.requests[i].piece == index) {
            return false;
        }
    }
    return true;
}

/* What a request moved is settled: its bytes copied out, its fate noted. */
static void request_settle(struct moving *moving, struct kvk_disk_request *request)
{
    struct kvk_disk *disk = moving->disk;
    const struct kvk_disk_piece *piece = &moving->pieces[request->piece];
    if (request->error != 0) {
        request_failed(moving, request->piece, request->error);
    } else {
        if (request->bounce != NULL && !moving->write) {
            memcpy(request->target, request->bounce, request->target_bytes);
        }
        kvk_disk_health_good(disk, moving->write ? KVK_DISK_KIND_WRITE : KVK_DISK_KIND_READ,
                             request->target_bytes);
        moving->moved_bytes += request->target_bytes;
        if (moving->write) {
            kvk_disk_file_wrote(piece->file, piece->slot, request->file_offset + request->size);
        }
    }
    if (request->bounce != NULL) {
        kvk_disk_bounce_give(&disk->queue, request->bounce);
        request->bounce = NULL;
    }
    request->busy = false;
    moving->under_way--;
}

static void piece_hash(struct kvk_disk_piece *piece)
{
    if (piece->checksum != NULL && piece->status == KVK_OK) {
        *piece->checksum = kvk_checksum(piece->memory, piece->size_bytes);
    }
}

/* How many requests to wait for. Whoever waits for bytes gets each at once, and hashes it while the
 * rest is read. What is written behind has nothing to do but to refill the window: every waking
 * would take a processor from somebody. */
static uint32_t count_to_wait_for(const struct moving *moving)
{
    KVK_ASSERT(moving->under_way > 0);
    if (moving->class != KVK_DISK_BEHIND || !moving->write) {
        return 1;
    }
    bool refills = moving->piece < moving->count && moving->under_way > KVK_DISK_WINDOW / 2;
    return refills ? KVK_DISK_WINDOW / 2 : moving->under_way;
}

/* Wait for what is done, settle it, refill the window, and only then hash: the disk goes on
 * meanwhile. */
static void requests_wait(struct moving *moving)
{
    struct kvk_disk_queue *queue = &moving->disk->queue;
    uint32_t touched[KVK_DISK_WINDOW];
    uint32_t touched_count = 0;

    kvk_lock(&queue->lock);
    moving->run.wanted_count = count_to_wait_for(moving);
    while (moving->run.finished_count < moving->run.wanted_count) {
        (void)kvk_condition_wait(&moving->run.done, &queue->lock, UINT64_MAX);
    }
    struct kvk_disk_request *chain = moving->run.finished;
    moving->run.finished = NULL;
    moving->run.finished_count = 0;
    moving->run.wanted_count = 0;
    kvk_unlock(&queue->lock);

    while (chain != NULL) {
        struct kvk_disk_request *request = chain;
        chain = request->next;
        uint32_t index = request->piece;
        request_settle(moving, request);
        if (!moving->write && piece_is_over(moving, index)) {
            touched[touched_count] = index;
            touched_count++;
        }
    }
    requests_feed(moving);
    for (uint32_t i = 0; i < touched_count; i++) {
        piece_hash(&moving->pieces[touched[i]]);
    }
}

/* What is written is hashed while it is under way. */
static void written_hash(struct moving *moving)
{
    while (moving->write && moving->hashed < moving->piece) {
        piece_hash(&moving->pieces[moving->hashed]);
        moving->hashed++;
    }
}

static enum kvk_status pieces_move(struct kvk_disk *disk, enum kvk_disk_class class, bool write,
                                   struct kvk_disk_piece *pieces, uint32_t count,
                                   struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT((uint32_t) class < KVK_DISK_CLASS_COUNT);
    struct moving moving = {
        .disk = disk, .class = class, .write = write, .pieces = pieces, .count = count};
    for (uint32_t i = 0; i < count; i++) {
        pieces[i].status = KVK_OK;
    }
    kvk_condition_init(&moving.run.done);
    uint64_t begin_ns = kvk_disk_now();
    requests_feed(&moving);
    while (moving.under_way > 0 || moving.piece < count) {
        written_hash(&moving);
        if (moving.under_way > 0) {
            requests_wait(&moving);
        } else {
            /* Only who holds no buffer waits for one, so that somebody always gets on. */
            KVK_ASSERT(moving.bounce_bytes > 0);
            kvk_disk_bounce_wait(&disk->queue, class, moving.bounce_bytes);
            requests_feed(&moving);
        }
    }
    written_hash(&moving);
    if (moving.moved_bytes > 0) {
        kvk_disk_health_speed(disk, write, moving.moved_bytes, kvk_disk_now() - begin_ns);
    }
    (void)pthread_cond_destroy(&moving.run.done);
    if (moving.error.status != KVK_OK && error != NULL) {
        *error = moving.error;
    }
    return moving.error.status;
}

enum kvk_status kvk_disk_read(struct kvk_disk *disk, enum kvk_disk_class class,
                              struct kvk_disk_piece *pieces, uint32_t count,
                              struct kvk_error *error)
{
    return pieces_move(disk, class, false, pieces, count, error);
}

enum kvk_status kvk_disk_write(struct kvk_disk *disk, enum kvk_disk_class class,
                               struct kvk_disk_piece *pieces, uint32_t count,
                               struct kvk_error *error)
{
    return pieces_move(disk, class, true, pieces, count, error);
}
