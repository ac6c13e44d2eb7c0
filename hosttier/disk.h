/*
 * Blocks on disk: one sparse file of equal slots per layer group, whose slabs are preallocated when
 * they are taken and punched out when they are given back.
 *
 * Who has which slot is not known here: that is the engine's arena, as for memory. This file only
 * moves bytes, and knows how the disk feels. Reads and writes go past the page cache (O_DIRECT) by
 * io_uring, with ordinary reads and writes on a few threads where the kernel or the file system
 * has neither. Memory of any alignment is taken; what is not aligned goes through buffers of ours.
 *
 * A failing disk is the world's: an error is a status and counted, repeated ones turn the tier
 * KVK_DISK_FAILING and at last KVK_DISK_OFF, with the reason in words. From OFF a probe now and
 * then brings it back. Nothing here ever serves bytes: the caller verifies checksums.
 *
 * Locking: thread safe; everything that takes a disk may block, so none of it is called with a lock
 * held (asserted), but for kvk_disk_health() and the rates.
 */
#ifndef KVK_HOSTTIER_DISK_H
#define KVK_HOSTTIER_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"

#define KVK_DISK_ALIGN 4096U

struct kvk_disk;
struct kvk_disk_file;

/* The few system calls that matter, so that tests can fail, tear, record and reorder them. NULL in
 * the options: the system's own. Each returns as the call does, and sets errno. */
struct kvk_disk_io {
    ssize_t (*read)(void *context, int fd, void *buffer, size_t size, off_t offset);
    ssize_t (*write)(void *context, int fd, const void *buffer, size_t size, off_t offset);
    int (*allocate)(void *context, int fd, off_t offset, off_t size);
    int (*punch)(void *context, int fd, off_t offset, off_t size);
    int (*sync)(void *context, int fd);
    void *context;
};

struct kvk_disk_options {
    const char *folder;           /* made where missing, mode 0700; files in it 0600 */
    uint32_t depth;               /* requests under way at a time; 0: 64 */
    uint32_t thread_count;        /* of the fallback; 0: 4 */
    bool direct;                  /* O_DIRECT where the file system has it */
    bool uring;                   /* io_uring where the kernel has it; not with `io` */
    const struct kvk_disk_io *io; /* borrowed; tests */
    uint64_t probe_ms;            /* how often OFF is tried again; 0: 5,000 */
};

KVK_CHECKED enum kvk_status kvk_disk_open(const struct kvk_disk_options *options,
                                          struct kvk_disk **disk, struct kvk_error *error);
void kvk_disk_close(struct kvk_disk *disk); /* after all its files are closed; NULL is fine */

/* "uring+direct", "threads+direct", "uring", "threads": for status and logs. */
const char *kvk_disk_path_name(const struct kvk_disk *disk);

/* Do `size_bytes` at this address move without a buffer of ours? */
bool kvk_disk_goes_straight(const struct kvk_disk *disk, const void *memory, uint64_t size_bytes);

/* ---- Files: named by numbers alone, so that no name of a tenant or model is a path ---- */

/* Bytes that a shard of `shard_bytes` takes in a slot, and so the stride of a slot. */
uint64_t kvk_disk_shard_stride(uint64_t shard_bytes);

/* Open, or make, the file of a group. `slot_count` slots are addressable; it is sparse. A file that
 * is shorter than what was allocated before reads as errors there, not as zeros. */
KVK_CHECKED enum kvk_status kvk_disk_file_open(struct kvk_disk *disk, uint64_t space_id,
                                               uint32_t group, uint64_t slot_bytes,
                                               uint32_t slot_count, struct kvk_disk_file **file,
                                               struct kvk_error *error);
void kvk_disk_file_close(struct kvk_disk_file *file);
KVK_CHECKED enum kvk_status kvk_disk_file_remove(struct kvk_disk *disk, uint64_t space_id,
                                                 uint32_t group, struct kvk_error *error);
/* Remove every block file of the folder that `known` does not name; how many, and their bytes. */
KVK_CHECKED enum kvk_status
kvk_disk_sweep(struct kvk_disk *disk,
               bool (*known)(void *context, uint64_t space_id, uint32_t group), void *context,
               uint32_t *file_count, uint64_t *bytes, struct kvk_error *error);

/* Preallocate, or give back, a run of slots. KVK_EXHAUSTED: no space on the file system. */
KVK_CHECKED enum kvk_status kvk_disk_file_allocate(struct kvk_disk_file *file, uint32_t first_slot,
                                                   uint32_t slot_count, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_disk_file_punch(struct kvk_disk_file *file, uint32_t first_slot,
                                                uint32_t slot_count, struct kvk_error *error);
uint64_t kvk_disk_file_bytes(const struct kvk_disk_file *file); /* really allocated */

/* ---- Moving bytes ---- */

struct kvk_disk_piece {
    struct kvk_disk_file *file;
    uint32_t slot;
    uint64_t offset;        /* in the slot: a multiple of KVK_DISK_ALIGN */
    void *memory;           /* read into, or written from; the caller's until the run returns */
    uint64_t size_bytes;    /* any; the rest up to the alignment is written as zeros */
    uint64_t *checksum;     /* NULL, or where the XXH3 64-bit hash of these bytes is stored */
    enum kvk_status status; /* out: KVK_OK, KVK_INTERNAL (I/O error, short), KVK_EXHAUSTED (full),
                               KVK_UNAVAILABLE (not tried) */
};

enum kvk_disk_class {
    KVK_DISK_RESTORE = 0, /* somebody waits */
    KVK_DISK_AHEAD = 1,   /* read-ahead, scrub */
    KVK_DISK_BEHIND = 2,  /* write-behind */
};

/*
 * Read or write all pieces, `depth` at a time, in any order, and wait: it returns only when nothing
 * touches their memory any more, failed or not. The classes share the disk; a lower number goes
 * first. KVK_OK: every piece is KVK_OK. Else the first failure; each piece has its own status.
 * KVK_UNAVAILABLE: the disk is OFF (for a write also: read-only), so this piece was not tried.
 */
KVK_CHECKED enum kvk_status kvk_disk_read(struct kvk_disk *disk, enum kvk_disk_class class,
                                          struct kvk_disk_piece *pieces, uint32_t count,
                                          struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_disk_write(struct kvk_disk *disk, enum kvk_disk_class class,
                                           struct kvk_disk_piece *pieces, uint32_t count,
                                           struct kvk_error *error);
/* What was written to the file before is durable when it returns. Where it fails, nothing that was
 * written since the last sync that went well may be named by a record, whatever a later one says:
 * the system may have given up those pages. Also fails where the file has lost its name. */
KVK_CHECKED enum kvk_status kvk_disk_sync(struct kvk_disk_file *file, struct kvk_error *error);

/* ---- How it feels ---- */

/* A disk that needs so long for a batch of reads or writes (16 MiB at most, as the tier makes them)
 * is slow. It is not turned off: its measured rate falls, and with that the blocks that it is worth
 * asking for. */
#define KVK_DISK_STALL_NS UINT64_C(2000000000)

enum kvk_disk_state {
    KVK_DISK_GOOD = 0,
    KVK_DISK_FAILING, /* the last request of some kind failed, or it is read-only */
    KVK_DISK_OFF,     /* nothing is tried but a probe now and then */
};

struct kvk_disk_health {
    enum kvk_disk_state state;
    bool read_only;   /* writes are refused by the system; reads go on */
    bool full;        /* the file system has no space; cleared by the next allocation that works */
    bool slow;        /* the last batch of requests took longer than KVK_DISK_STALL_NS */
    char reason[160]; /* of the last failure, "" if never */
    /* errors: requests that failed; short_reads: those where the file ended first */
    uint64_t read_errors, write_errors, sync_errors, short_reads, full_errors;
    uint64_t read_bytes, written_bytes;
    uint64_t read_rate, write_rate; /* bytes/s, moving averages of batches; 0: not known yet */
    uint64_t stalls;                /* batches that took longer than KVK_DISK_STALL_NS */
    uint64_t turned_off;            /* times */
    uint64_t probes;                /* while OFF or read-only */
    uint64_t unpunched;             /* times that room was not given back: no hole punching here */
};
void kvk_disk_health(struct kvk_disk *disk, struct kvk_disk_health *health);

#endif
