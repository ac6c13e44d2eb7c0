/*
 * The disk's files: their names (numbers alone), room in them, and what becomes of them behind our
 * back.
 *
 * A file is followed by one bit per slot, "there": allocated or written as far as we know. A file
 * that became shorter loses the bits past its end, so that the hole that the next write past it
 * leaves is an error to who reads there, not zeros.
 */
#include "hosttier/disk_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"

#define NAME_SIZE 64
#define NAME_FORMAT "blocks-%016" PRIx64 "-%" PRIu32
#define PROBE_NAME "probe"
#define STAT_BLOCK_BYTES 512U
#define ALLOCATE_TRIES_MAX 100U /* of a call that signals interrupt */

static void name_make(char name[NAME_SIZE], uint64_t space_id, uint32_t group)
{
    (void)snprintf(name, NAME_SIZE, NAME_FORMAT, space_id, group);
}

/* Is this one of our names, exactly? */
static bool name_read(const char *name, uint64_t *space_id, uint32_t *group)
{
    char again[NAME_SIZE];
    if (sscanf(name, "blocks-%16" SCNx64 "-%" SCNu32, space_id, group) != 2) {
        return false;
    }
    name_make(again, *space_id, *group);
    return strcmp(name, again) == 0;
}

static enum kvk_status fail_errno(struct kvk_error *error, int failed, const char *what,
                                  const char *name)
{
    enum kvk_status status = KVK_INTERNAL;
    if (failed == ENOSPC || failed == EDQUOT) {
        status = KVK_EXHAUSTED;
    } else if (failed == EROFS || failed == EACCES || failed == EPERM) {
        status = KVK_UNAVAILABLE;
    }
    return kvk_fail(error, status, KVK_CAUSE_NONE, "", "%s disk file %s: %s", what, name,
                    strerror(failed));
}

/* Open one of the folder's files, direct if that is wanted and to be had. -1 and errno. */
static int file_open_fd(const struct kvk_disk *disk, const char *name, bool want_direct,
                        bool *direct)
{
    int flags = O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC;
    *direct = want_direct;
    int fd = openat(disk->folder_fd, name, flags | (want_direct ? O_DIRECT : 0), 0600);
    if (fd < 0 && want_direct && errno == EINVAL) {
        *direct = false;
        fd = openat(disk->folder_fd, name, flags, 0600);
    }
    if (fd < 0) {
        return -1;
    }
    struct stat about;
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) {
        (void)close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

/* ---- The probe's file ---- */

/* What direct I/O of this file system wants memory aligned to; 0: it cannot. */
static uint32_t direct_align(int fd)
{
    struct statx about;
    memset(&about, 0, sizeof(about));
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) != 0 ||
        (about.stx_mask & STATX_DIOALIGN) == 0) {
        return KVK_DISK_ALIGN; /* it does not say: what every one takes */
    }
    if (about.stx_dio_mem_align == 0 || about.stx_dio_offset_align == 0 ||
        about.stx_dio_offset_align > KVK_DISK_ALIGN || about.stx_dio_mem_align > KVK_DISK_ALIGN) {
        return 0;
    }
    return about.stx_dio_mem_align;
}

int kvk_disk_probe(struct kvk_disk *disk)
{
    const struct kvk_disk_io *io = &disk->io;
    _Alignas(KVK_DISK_ALIGN) uint8_t page[KVK_DISK_ALIGN];
    bool direct = false;

    if (disk->probe_fd < 0) {
        disk->probe_fd = file_open_fd(disk, PROBE_NAME, disk->direct, &direct);
        if (disk->probe_fd < 0) {
            return errno;
        }
    }
    disk->probe_count++;
    memset(page, (int)(disk->probe_count & 0xFF), sizeof(page));
    ssize_t moved = io->write(io->context, disk->probe_fd, page, sizeof(page), 0);
    if (moved < 0) {
        return errno;
    }
    if (moved != (ssize_t)sizeof(page)) {
        return EIO;
    }
    if (io->sync(io->context, disk->probe_fd) != 0) {
        return errno;
    }
    memset(page, (int)(~disk->probe_count & 0xFF), sizeof(page));
    moved = io->read(io->context, disk->probe_fd, page, sizeof(page), 0);
    if (moved < 0) {
        return errno;
    }
    for (size_t i = 0; i < sizeof(page); i++) {
        if (moved != (ssize_t)sizeof(page) || page[i] != (disk->probe_count & 0xFF)) {
            return KVK_DISK_ENDED;
        }
    }
    return 0;
}

enum kvk_status kvk_disk_probe_open(struct kvk_disk *disk, bool want_direct,
                                    struct kvk_error *error)
{
    disk->probe_fd = file_open_fd(disk, PROBE_NAME, want_direct, &disk->direct);
    if (disk->probe_fd < 0) {
        return fail_errno(error, errno, "opening", PROBE_NAME);
    }
    if (disk->direct) {
        disk->memory_align = direct_align(disk->probe_fd);
        disk->direct = disk->memory_align != 0;
    }
    int failed = kvk_disk_probe(disk);
    if (failed == EINVAL && disk->direct) {
        disk->direct = false; /* the open took O_DIRECT, the write does not */
    }
    if (!disk->direct && want_direct) {
        (void)close(disk->probe_fd);
        bool direct = false;
        disk->probe_fd = file_open_fd(disk, PROBE_NAME, false, &direct);
        failed = disk->probe_fd < 0 ? errno : kvk_disk_probe(disk);
    }
    if (!disk->direct) {
        disk->memory_align = 1;
    }
    if (failed != 0) {
        /* A disk that fails now may not fail later: it is there, and said to be bad. */
        (void)kvk_disk_health_failed(disk, KVK_DISK_KIND_WRITE, failed, "the probe");
    }
    return KVK_OK;
}

/* ---- What is there ---- */

static void there_set(struct kvk_disk_file *file, uint32_t slot, bool there)
{
    uint8_t bit = (uint8_t)(1U << slot % 8);
    if (there) {
        (void)atomic_fetch_or(&file->there[slot / 8], bit);
    } else {
        (void)atomic_fetch_and(&file->there[slot / 8], (uint8_t)~bit);
    }
}

bool kvk_disk_file_there(const struct kvk_disk_file *file, uint32_t slot)
{
    return (atomic_load(&file->there[slot / 8]) & 1U << slot % 8) != 0;
}

static void end_raise(struct kvk_disk_file *file, uint64_t end)
{
    uint64_t known = atomic_load(&file->end);
    while (known < end && !atomic_compare_exchange_weak(&file->end, &known, end)) {
    }
}

void kvk_disk_file_wrote(struct kvk_disk_file *file, uint32_t slot, uint64_t end)
{
    end_raise(file, end);
    if (!kvk_disk_file_there(file, slot)) {
        there_set(file, slot, true);
    }
}

void kvk_disk_file_look(struct kvk_disk_file *file)
{
    struct stat about;
    uint64_t known = atomic_load(&file->end);
    if (fstat(file->fd, &about) != 0 || (uint64_t)about.st_size >= known) {
        return;
    }
    /* One of those who see it takes the end down, and what lay past it. */
    uint64_t size = (uint64_t)about.st_size;
    if (!atomic_compare_exchange_strong(&file->end, &known, size)) {
        return;
    }
    uint32_t lost = 0;
    uint64_t last = (known + file->slot_bytes - 1) / file->slot_bytes;
    for (uint64_t slot = size / file->slot_bytes; slot < last && slot < file->slot_count; slot++) {
        lost += kvk_disk_file_there(file, (uint32_t)slot) ? 1 : 0;
        there_set(file, (uint32_t)slot, false);
    }
    kvk_log(KVK_LOG_ERROR, "disk_file_shrunk",
            "space=%" PRIu64 " group=%u size_bytes=%" PRIu64 " known_bytes=%" PRIu64
            " lost_slots=%u",
            file->space_id, file->group, size, known, lost);
}

/* ---- Open, close, remove ---- */

uint64_t kvk_disk_shard_stride(uint64_t shard_bytes)
{
    return kvk_disk_round_up(shard_bytes);
}

static enum kvk_status file_measure(struct kvk_disk_file *file, const char *name,
                                    struct kvk_error *error)
{
    struct stat about;
    if (fstat(file->fd, &about) != 0) {
        return fail_errno(error, errno, "looking at", name);
    }
    file->there = calloc((size_t)file->slot_count / 8 + 1, 1);
    if (file->there == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for disk file %s",
                        name);
    }
    uint64_t size = (uint64_t)about.st_size;
    uint64_t most = file->slot_bytes * file->slot_count;
    if (size > most && ftruncate(file->fd, (off_t)most) == 0) {
        size = most; /* it was configured larger before: nobody names those slots any more */
    }
    atomic_store(&file->end, size);
    uint64_t whole = size / file->slot_bytes;
    for (uint64_t slot = 0; slot < whole && slot < file->slot_count; slot++) {
        there_set(file, (uint32_t)slot, true);
    }
    return KVK_OK;
}

enum kvk_status kvk_disk_file_open(struct kvk_disk *disk, uint64_t space_id, uint32_t group,
                                   uint64_t slot_bytes, uint32_t slot_count,
                                   struct kvk_disk_file **file, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(slot_bytes > 0 && slot_bytes % KVK_DISK_ALIGN == 0);
    KVK_ASSERT(slot_count > 0);
    char name[NAME_SIZE];
    name_make(name, space_id, group);
    *file = NULL;
    if (slot_bytes > (uint64_t)INT64_MAX / slot_count) {
        return kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_LIMIT, "slot_count", slot_count,
                              (uint64_t)INT64_MAX / slot_bytes,
                              "disk file %s would be larger than a file can be", name);
    }
    struct kvk_disk_file *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for disk file %s",
                        name);
    }
    made->disk = disk;
    made->space_id = space_id;
    made->group = group;
    made->slot_bytes = slot_bytes;
    made->slot_count = slot_count;
    made->fd = file_open_fd(disk, name, disk->direct, &made->direct);
    enum kvk_status status =
        made->fd < 0 ? fail_errno(error, errno, "opening", name) : file_measure(made, name, error);
    /* The name is durable before a record can name what is in it. */
    if (status == KVK_OK && fsync(disk->folder_fd) != 0) {
        status = fail_errno(error, errno, "making", name);
    }
    atomic_fetch_add(&disk->file_count, 1);
    if (status != KVK_OK) {
        kvk_disk_file_close(made);
        return status;
    }
    *file = made;
    return KVK_OK;
}

void kvk_disk_file_close(struct kvk_disk_file *file)
{
    if (file == NULL) {
        return;
    }
    KVK_ASSERT(kvk_locks_held() == 0);
    if (file->fd >= 0) {
        (void)close(file->fd);
    }
    atomic_fetch_sub(&file->disk->file_count, 1);
    free(file->there);
    free(file);
}

enum kvk_status kvk_disk_file_remove(struct kvk_disk *disk, uint64_t space_id, uint32_t group,
                                     struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    char name[NAME_SIZE];
    name_make(name, space_id, group);
    if (unlinkat(disk->folder_fd, name, 0) != 0 && errno != ENOENT) {
        return fail_errno(error, errno, "removing", name);
    }
    if (fsync(disk->folder_fd) != 0) {
        return fail_errno(error, errno, "removing", name);
    }
    return KVK_OK;
}

enum kvk_status kvk_disk_sweep(struct kvk_disk *disk,
                               bool (*known)(void *context, uint64_t space_id, uint32_t group),
                               void *context, uint32_t *file_count, uint64_t *bytes,
                               struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    *file_count = 0;
    *bytes = 0;
    int fd = openat(disk->folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = fd >= 0 ? fdopendir(fd) : NULL;
    if (folder == NULL) {
        enum kvk_status status = fail_errno(error, errno, "listing", ".");
        if (fd >= 0) {
            (void)close(fd);
        }
        return status;
    }
    enum kvk_status status = KVK_OK;
    for (const struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        uint64_t space_id = 0;
        uint32_t group = 0;
        struct stat about;
        if (!name_read(entry->d_name, &space_id, &group) || known(context, space_id, group)) {
            continue;
        }
        bool seen = fstatat(disk->folder_fd, entry->d_name, &about, AT_SYMLINK_NOFOLLOW) == 0;
        if (unlinkat(disk->folder_fd, entry->d_name, 0) != 0) {
            status = fail_errno(error, errno, "removing", entry->d_name);
            continue;
        }
        (*file_count)++;
        *bytes += seen ? (uint64_t)about.st_blocks * STAT_BLOCK_BYTES : 0;
    }
    (void)closedir(folder);
    if (*file_count > 0 && fsync(disk->folder_fd) != 0 && status == KVK_OK) {
        status = fail_errno(error, errno, "listing", ".");
    }
    return status;
}

/* ---- Room ---- */

/* Where the file system cannot allocate ahead: zeros are written. */
static int zeros_write(struct kvk_disk_file *file, uint64_t offset, uint64_t size)
{
    struct kvk_disk *disk = file->disk;
    const struct kvk_disk_io *io = &disk->io;
    uint8_t *zeros = NULL;
    while (zeros == NULL) {
        zeros = kvk_disk_bounce_take(&disk->queue, KVK_DISK_BEHIND, KVK_DISK_STEP_BYTES);
        if (zeros == NULL) {
            kvk_disk_bounce_wait(&disk->queue, KVK_DISK_BEHIND, KVK_DISK_STEP_BYTES);
        }
    }
    memset(zeros, 0, KVK_DISK_STEP_BYTES);
    int failed = 0;
    uint32_t tries = 0;
    while (size > 0 && failed == 0) {
        size_t step = size < KVK_DISK_STEP_BYTES ? (size_t)size : KVK_DISK_STEP_BYTES;
        ssize_t moved = io->write(io->context, file->fd, zeros, step, (off_t)offset);
        uint64_t progress = moved > 0 ? (uint64_t)moved / KVK_DISK_ALIGN * KVK_DISK_ALIGN : 0;
        if (progress > 0) {
            offset += progress;
            size -= progress;
            tries = 0;
            continue;
        }
        tries++;
        failed = moved >= 0 ? EIO : errno;
        if ((failed == EINTR || failed == EAGAIN) && tries < ALLOCATE_TRIES_MAX) {
            failed = 0;
        }
    }
    kvk_disk_bounce_give(&disk->queue, zeros);
    return failed;
}

static int range_allocate(struct kvk_disk_file *file, uint64_t offset, uint64_t size)
{
    const struct kvk_disk_io *io = &file->disk->io;
    int failed = EINTR;
    for (uint32_t i = 0; i < ALLOCATE_TRIES_MAX && failed == EINTR; i++) {
        failed = io->allocate(io->context, file->fd, (off_t)offset, (off_t)size) == 0 ? 0 : errno;
    }
    if (failed == EOPNOTSUPP || failed == ENOSYS) {
        failed = zeros_write(file, offset, size);
    }
    if (failed != 0) {
        /* What was got of it goes back: nobody has these slots. */
        (void)io->punch(io->context, file->fd, (off_t)offset, (off_t)size);
    }
    return failed;
}

enum kvk_status kvk_disk_file_allocate(struct kvk_disk_file *file, uint32_t first_slot,
                                       uint32_t slot_count, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(slot_count > 0 && first_slot < file->slot_count);
    KVK_ASSERT(slot_count <= file->slot_count - first_slot);
    enum kvk_status status = kvk_disk_health_admits(file->disk, KVK_DISK_KIND_WRITE, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_disk_file_look(file);
    uint64_t offset = first_slot * file->slot_bytes;
    uint64_t size = slot_count * file->slot_bytes;
    char name[NAME_SIZE];
    name_make(name, file->space_id, file->group);
    int failed = range_allocate(file, offset, size);
    if (failed == ENOSPC || failed == EDQUOT || failed == EFBIG) {
        kvk_disk_health_full(file->disk, true, name);
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", size, 0,
                              "no space on the file system for %" PRIu64 " bytes of disk file %s",
                              size, name);
    }
    if (failed != 0) {
        (void)kvk_disk_health_failed(file->disk, KVK_DISK_KIND_WRITE, failed, name);
        return fail_errno(error, failed, "allocating in", name);
    }
    kvk_disk_health_full(file->disk, false, name);
    end_raise(file, offset + size);
    for (uint32_t i = 0; i < slot_count; i++) {
        there_set(file, first_slot + i, true);
    }
    return KVK_OK;
}

enum kvk_status kvk_disk_file_punch(struct kvk_disk_file *file, uint32_t first_slot,
                                    uint32_t slot_count, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(slot_count > 0 && first_slot < file->slot_count);
    KVK_ASSERT(slot_count <= file->slot_count - first_slot);
    const struct kvk_disk_io *io = &file->disk->io;
    for (uint32_t i = 0; i < slot_count; i++) {
        there_set(file, first_slot + i, false);
    }
    off_t offset = (off_t)(first_slot * file->slot_bytes);
    off_t size = (off_t)(slot_count * file->slot_bytes);
    int failed = EINTR;
    for (uint32_t i = 0; i < ALLOCATE_TRIES_MAX && failed == EINTR; i++) {
        failed = io->punch(io->context, file->fd, offset, size) == 0 ? 0 : errno;
    }
    if (failed == EOPNOTSUPP || failed == ENOSYS) {
        kvk_disk_health_unpunched(file->disk); /* the file keeps it, and uses it again */
        return KVK_OK;
    }
    if (failed != 0) {
        char name[NAME_SIZE];
        name_make(name, file->space_id, file->group);
        (void)kvk_disk_health_failed(file->disk, KVK_DISK_KIND_WRITE, failed, name);
        return fail_errno(error, failed, "giving back room of", name);
    }
    return KVK_OK;
}

uint64_t kvk_disk_file_bytes(const struct kvk_disk_file *file)
{
    struct stat about;
    if (fstat(file->fd, &about) != 0) {
        return 0;
    }
    return (uint64_t)about.st_blocks * STAT_BLOCK_BYTES;
}

enum kvk_status kvk_disk_sync(struct kvk_disk_file *file, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    const struct kvk_disk_io *io = &file->disk->io;
    enum kvk_status status = kvk_disk_health_admits(file->disk, KVK_DISK_KIND_SYNC, error);
    if (status != KVK_OK) {
        return status;
    }
    char name[NAME_SIZE];
    name_make(name, file->space_id, file->group);
    int failed = EINTR;
    for (uint32_t i = 0; i < ALLOCATE_TRIES_MAX && failed == EINTR; i++) {
        failed = io->sync(io->context, file->fd) == 0 ? 0 : errno;
    }
    struct stat about;
    if (failed == 0 && (fstat(file->fd, &about) != 0 || about.st_nlink == 0)) {
        failed = ENOENT; /* synced, but no name leads there any more */
    }
    if (failed == 0 && (uint64_t)about.st_size < atomic_load(&file->end)) {
        kvk_disk_file_look(file);
        failed = KVK_DISK_ENDED;
    }
    if (failed != 0) {
        status = kvk_disk_health_failed(file->disk, KVK_DISK_KIND_SYNC, failed, name);
        return kvk_fail(error, status, KVK_CAUSE_NONE, "", "syncing disk file %s: %s", name,
                        failed == KVK_DISK_ENDED ? "it is shorter than it was" : strerror(failed));
    }
    kvk_disk_health_good(file->disk, KVK_DISK_KIND_SYNC, 0);
    return KVK_OK;
}
