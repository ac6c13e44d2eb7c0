/*
 * A disk for tests in a folder of its own under /tmp, whose few system calls can be made to fail,
 * tear, wait or let others in, one at a time or at random.
 */
#ifndef KVK_TESTS_FAULTY_DISK_H
#define KVK_TESTS_FAULTY_DISK_H

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hosttier/disk.h"
#include "tests/folder.h"

struct faulty_disk {
    char folder[64];
    struct kvk_disk_io io;
    struct kvk_disk *disk;
    _Atomic int fail_reads; /* so many of the next fail with this errno… */
    _Atomic int fail_writes;
    _Atomic int fail_syncs;
    _Atomic int fail_allocations;
    _Atomic int short_reads; /* or end early */
    _Atomic int torn_writes; /* say that all was written, but half was */
    _Atomic int read_errno, write_errno;
    _Atomic int delay_us; /* of each read and write */
    _Atomic long reads, writes, syncs;
};

static inline bool faulty_take(_Atomic int *count)
{
    int left = atomic_load(count);
    while (left > 0 && !atomic_compare_exchange_weak(count, &left, left - 1)) {
    }
    return left > 0;
}

static inline void faulty_wait(const struct faulty_disk *faulty)
{
    int us = atomic_load(&faulty->delay_us);
    if (us > 0) {
        (void)usleep((unsigned)us);
    }
}

static inline ssize_t faulty_read(void *context, int fd, void *buffer, size_t size, off_t offset)
{
    struct faulty_disk *faulty = context;
    atomic_fetch_add(&faulty->reads, 1);
    faulty_wait(faulty);
    if (faulty_take(&faulty->fail_reads)) {
        errno = atomic_load(&faulty->read_errno);
        return -1;
    }
    if (faulty_take(&faulty->short_reads)) {
        return 0;
    }
    return pread(fd, buffer, size, offset);
}

static inline ssize_t faulty_write(void *context, int fd, const void *buffer, size_t size,
                                   off_t offset)
{
    struct faulty_disk *faulty = context;
    atomic_fetch_add(&faulty->writes, 1);
    faulty_wait(faulty);
    if (faulty_take(&faulty->fail_writes)) {
        errno = atomic_load(&faulty->write_errno);
        return -1;
    }
    if (faulty_take(&faulty->torn_writes)) {
        ssize_t half = pwrite(fd, buffer, size / 2, offset);
        return half < 0 ? half : (ssize_t)size;
    }
    return pwrite(fd, buffer, size, offset);
}

static inline int faulty_allocate(void *context, int fd, off_t offset, off_t size)
{
    struct faulty_disk *faulty = context;
    if (faulty_take(&faulty->fail_allocations)) {
        errno = ENOSPC;
        return -1;
    }
    return fallocate(fd, 0, offset, size);
}

static inline int faulty_punch(void *context, int fd, off_t offset, off_t size)
{
    (void)context;
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size);
}

static inline int faulty_sync(void *context, int fd)
{
    struct faulty_disk *faulty = context;
    atomic_fetch_add(&faulty->syncs, 1);
    if (faulty_take(&faulty->fail_syncs)) {
        errno = EIO;
        return -1;
    }
    return fdatasync(fd);
}

static inline enum kvk_status faulty_open(struct faulty_disk *faulty, struct kvk_error *error)
{
    faulty->io = (struct kvk_disk_io){.read = faulty_read,
                                      .write = faulty_write,
                                      .allocate = faulty_allocate,
                                      .punch = faulty_punch,
                                      .sync = faulty_sync,
                                      .context = faulty};
    const struct kvk_disk_options options = {
        .folder = faulty->folder, .thread_count = 1, .io = &faulty->io, .probe_ms = 20};
    return kvk_disk_open(&options, &faulty->disk, error);
}

static inline bool faulty_init_at(struct faulty_disk *faulty, const char *where)
{
    memset(faulty, 0, sizeof(*faulty));
    atomic_store(&faulty->read_errno, EIO);
    atomic_store(&faulty->write_errno, EIO);
    (void)snprintf(faulty->folder, sizeof(faulty->folder), "%s/kvkeep-disk-XXXXXX", where);
    return mkdtemp(faulty->folder) != NULL;
}

static inline bool faulty_init(struct faulty_disk *faulty)
{
    return faulty_init_at(faulty, "/tmp");
}

static inline void faulty_finish(struct faulty_disk *faulty)
{
    kvk_disk_close(faulty->disk);
    faulty->disk = NULL;
    folder_remove(faulty->folder);
}

#endif
