/*
 * A folder of its own for each test of the disk store, a disk opened in it, and system calls that
 * fail as they are told.
 */
#ifndef KVK_TESTS_DISK_HOUSE_H
#define KVK_TESTS_DISK_HOUSE_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "hosttier/disk.h"
#include "tests/patience.h"

#define DISK_HOUSE_PATH_SIZE 128

static inline int disk_house_remove(const char *path, const struct stat *about, int kind,
                                    struct FTW *place)
{
    (void)about;
    (void)kind;
    (void)place;
    return remove(path);
}

static inline void disk_house_make(char path[DISK_HOUSE_PATH_SIZE])
{
    const char *root = getenv("TMPDIR");
    (void)snprintf(path, DISK_HOUSE_PATH_SIZE, "%s/kvkeep-disk-XXXXXX",
                   root != NULL ? root : "/tmp");
    KVK_ASSERT(mkdtemp(path) != NULL);
}

static inline void disk_house_clear(const char *path)
{
    (void)nftw(path, disk_house_remove, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

static inline uint32_t disk_house_descriptors(void)
{
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    KVK_ASSERT(folder != NULL);
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

/* ---- Calls that fail ---- */

/* What the calls do from now on; errno, or 0 for going well. Any thread. */
struct disk_faults {
    _Atomic int read_error, write_error, sync_error, allocate_error, punch_error;
    _Atomic uint32_t interrupts; /* so many calls answer EINTR or EAGAIN first, in turn */
    _Atomic uint32_t short_step; /* move at most so many bytes at a time; 0: all */
    _Atomic uint32_t delay_us;
    _Atomic uint64_t write_limit; /* past this offset ENOSPC; 0: none */
    _Atomic uint64_t reads, writes, syncs, allocates, punches;
    _Atomic uint64_t unaligned; /* reads and writes that begin inside a page */
    _Atomic uint32_t writing;   /* now */
    _Atomic uint32_t writing_most;
};

static inline int disk_fault(struct disk_faults *faults, int error)
{
    uint32_t delay_us = atomic_load(&faults->delay_us);
    if (delay_us > 0) {
        (void)usleep(delay_us);
    }
    uint32_t left = atomic_load(&faults->interrupts);
    while (left > 0) {
        if (atomic_compare_exchange_weak(&faults->interrupts, &left, left - 1)) {
            errno = left % 2 == 0 ? EINTR : EAGAIN;
            return -1;
        }
    }
    errno = error;
    return error != 0 ? -1 : 0;
}

static inline size_t disk_fault_size(struct disk_faults *faults, size_t size)
{
    uint32_t step = atomic_load(&faults->short_step);
    return step != 0 && step < size ? step : size;
}

static inline ssize_t disk_fault_read(void *context, int fd, void *buffer, size_t size,
                                      off_t offset)
{
    struct disk_faults *faults = context;
    atomic_fetch_add(&faults->reads, 1);
    atomic_fetch_add(&faults->unaligned, offset % 4096 != 0 ? 1 : 0);
    if (disk_fault(faults, atomic_load(&faults->read_error)) != 0) {
        return -1;
    }
    return pread(fd, buffer, disk_fault_size(faults, size), offset);
}

static inline ssize_t disk_fault_write(void *context, int fd, const void *buffer, size_t size,
                                       off_t offset)
{
    struct disk_faults *faults = context;
    uint64_t limit = atomic_load(&faults->write_limit);
    atomic_fetch_add(&faults->writes, 1);
    atomic_fetch_add(&faults->unaligned, offset % 4096 != 0 ? 1 : 0);
    uint32_t now = atomic_fetch_add(&faults->writing, 1) + 1;
    uint32_t most = atomic_load(&faults->writing_most);
    while (most < now && !atomic_compare_exchange_weak(&faults->writing_most, &most, now)) {
    }
    ssize_t moved = -1;
    if (limit != 0 && (uint64_t)offset + size > limit) {
        errno = ENOSPC;
    } else if (disk_fault(faults, atomic_load(&faults->write_error)) == 0) {
        moved = pwrite(fd, buffer, disk_fault_size(faults, size), offset);
    }
    int failed = errno;
    atomic_fetch_sub(&faults->writing, 1);
    errno = failed;
    return moved;
}

static inline int disk_fault_allocate(void *context, int fd, off_t offset, off_t size)
{
    struct disk_faults *faults = context;
    atomic_fetch_add(&faults->allocates, 1);
    if (disk_fault(faults, atomic_load(&faults->allocate_error)) != 0) {
        return -1;
    }
    return fallocate(fd, 0, offset, size);
}

static inline int disk_fault_punch(void *context, int fd, off_t offset, off_t size)
{
    struct disk_faults *faults = context;
    atomic_fetch_add(&faults->punches, 1);
    if (disk_fault(faults, atomic_load(&faults->punch_error)) != 0) {
        return -1;
    }
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size);
}

static inline int disk_fault_sync(void *context, int fd)
{
    struct disk_faults *faults = context;
    atomic_fetch_add(&faults->syncs, 1);
    if (disk_fault(faults, atomic_load(&faults->sync_error)) != 0) {
        return -1;
    }
    return fdatasync(fd);
}

static inline struct kvk_disk_io disk_fault_io(struct disk_faults *faults)
{
    return (struct kvk_disk_io){.read = disk_fault_read,
                                .write = disk_fault_write,
                                .allocate = disk_fault_allocate,
                                .punch = disk_fault_punch,
                                .sync = disk_fault_sync,
                                .context = faults};
}

#endif
