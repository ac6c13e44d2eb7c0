/*
 * A device: memory that holds blocks, copies in and out of it, and attention over it.
 *
 * One small table of operations, so that the engine is the same on a CPU and on a GPU. The CPU
 * device is a real backend: its memory is a sealed memfd that workers map, its copies are
 * checksummed streaming stores, its attention is vectorised and threaded.
 *
 * Locking: operations are thread safe and may block; never call one with a lock held.
 * Host-tier memory is made of regions of the CPU device too (kvk_device_cpu_open() with its own
 * options), whichever device the device tier has.
 */
#ifndef KVK_GPU_DEVICE_H
#define KVK_GPU_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "gpu/attend.h"

struct kvk_device;

/*
 * Parts of a region that are mapped one by one, where something is backed in them. The whole of a
 * hundred tenants' files, each as large as the tier, is more than a process has addresses for.
 * A mapping reaches past its window's end by `reach_bytes`, so that a piece which begins in the
 * window lies in one run.
 */
struct kvk_windows {
    pthread_mutex_t lock; /* a leaf of the device's own, held while the system works: over backing,
                             punching and mapping; not for reading addresses */
    uint64_t window_bytes;
    uint64_t reach_bytes;
    uint64_t count;
    _Atomic(uint8_t *) addresses[]; /* [count]; NULL: nothing is backed there */
};

/* How other processes reach a region that has no file of its own bytes. */
struct kvk_slab_export {
    int fd; /* a file with a struct kvk_slab_table (base/slab_table.h), for the side socket; -1:
               they cannot. Owned by the region */
};

/* A sparse run of device memory: address space that is backed slab by slab. */
struct kvk_region {
    uint8_t *address;            /* on the CPU device readable and writable by the daemon; NULL: by
                                    windows, see kvk_region_at() */
    uint64_t size_bytes;         /* of address space; 0: no region */
    int fd;                      /* sealed memfd (CPU device), or -1; owned by the region */
    struct kvk_windows *windows; /* the device's own; NULL where `address` is set */
    struct kvk_slab_export *slabs; /* the device's own; NULL where `fd` is what is passed on */
};

/* Where the piece that begins at `offset` lies; NULL where nothing is backed around it. Stable
 * while the piece is backed; no lock. */
static inline uint8_t *kvk_region_at(const struct kvk_region *region, uint64_t offset)
{
    if (region->address != NULL) {
        return region->address + offset;
    }
    const struct kvk_windows *windows = region->windows;
    uint8_t *window = atomic_load_explicit(&windows->addresses[offset / windows->window_bytes],
                                           memory_order_acquire);
    return window == NULL ? NULL : window + offset % windows->window_bytes;
}

/* One contiguous piece to copy. Either end may be any host address or device memory. */
struct kvk_copy {
    void *target;
    const void *source;
    uint64_t size_bytes;
    uint64_t *checksum; /* in/out or NULL: where not NULL, the XXH3 64-bit hash of these bytes is
                           stored here; taken on the way, in the same pass over the memory */
};

enum kvk_export_kind {
    KVK_EXPORT_MEMFD = 1,    /* region.fd, to be passed over the side socket */
    KVK_EXPORT_CUDA_IPC = 2, /* region.slabs->fd: a table of handles, one per slab */
};

struct kvk_export {
    enum kvk_export_kind kind;
    int fd; /* borrowed from the region */
};

/* Who is told what memory of the CPU device is backed, as addresses: a GPU locks its pages, so that
 * its copy engines reach them. Both are called without a lock; `leaving` before the pages go, for
 * ranges that may hold several that were backed, parts that were not, or nothing. */
struct kvk_memory_watch {
    void (*backed)(void *context, void *address, uint64_t size_bytes);
    void (*leaving)(void *context, void *address, uint64_t size_bytes);
    void *context;
};

struct kvk_device_info {
    char name[64];
    char path[32]; /* which kernels run: "avx512_bf16", "avx512", "avx2", "plain" */
    uint32_t thread_count;
    uint64_t memory_bytes; /* 0: bounded by configuration alone */
};

#define KVK_DEVICE_REASON_SIZE 192

/* What of a device went wrong so far. */
struct kvk_device_health {
    bool can_fail;                       /* it is one that can fall away: a GPU */
    bool lost;                           /* as is_lost says */
    int32_t error;                       /* the driver's number of what lost it; 0: not lost */
    uint64_t memory_failures;            /* calls that found no memory on it: refusals */
    uint64_t call_failures;              /* others that failed alone, and were survived */
    char reason[KVK_DEVICE_REASON_SIZE]; /* of the loss, or else of the last failure; "": none */
};

struct kvk_device_ops {
    void (*info)(struct kvk_device *device, struct kvk_device_info *info);
    void (*close)(struct kvk_device *device); /* after all its regions were freed */
    /* Reserve address space; nothing is backed yet. Reads of unbacked ranges give zeros. What is
     * used together lies in runs of at most `piece_bytes`, so that a large region may be mapped by
     * windows; 0: all of it is used as one run. */
    enum kvk_status (*alloc)(struct kvk_device *device, uint64_t size_bytes, uint64_t piece_bytes,
                             const char *name, struct kvk_region *region, struct kvk_error *error);
    /* Its bytes go back at once, even where a process still maps it: that one then sees zeros. */
    void (*free)(struct kvk_device *device, struct kvk_region *region);
    /* Memory that outlives the process; both NULL where the device has none (region.fd is -1).
     * adopt: a region of a file that was one before, with what is backed in it; the descriptor is
     * the region's where it succeeds. leave: unmap it and let go, the bytes stay for whoever holds
     * the file. */
    enum kvk_status (*adopt)(struct kvk_device *device, int fd, uint64_t size_bytes,
                             uint64_t piece_bytes, struct kvk_region *region,
                             struct kvk_error *error);
    void (*leave)(struct kvk_device *device, struct kvk_region *region);
    /* Back a range and touch it, so that later writes do not fault; or punch it out, so that old
     * mappings see zeros there. Offsets and sizes in bytes; rounded inward to pages on punch. */
    enum kvk_status (*back)(struct kvk_device *device, struct kvk_region *region, uint64_t offset,
                            uint64_t size_bytes, struct kvk_error *error);
    enum kvk_status (*punch)(struct kvk_device *device, struct kvk_region *region, uint64_t offset,
                             uint64_t size_bytes, struct kvk_error *error);
    /* Bytes really backed, strays that a mapping worker faulted in included. */
    uint64_t (*backed_bytes)(struct kvk_device *device, const struct kvk_region *region);
    /* Copy all pieces; returns when nothing reads or writes them any more, failed or not. In
     * small steps that yield the processor, so that look-ups on other threads go on. */
    enum kvk_status (*copy)(struct kvk_device *device, const struct kvk_copy *copies,
                            uint32_t copy_count, struct kvk_error *error);
    enum kvk_status (*attend)(struct kvk_device *device, const struct kvk_attend *attend,
                              struct kvk_error *error);
    enum kvk_status (*export)(struct kvk_device *device, const struct kvk_region *region,
                              struct kvk_export *export, struct kvk_error *error);
    /* As alloc, on that part of the device which serves `place` (the number of a shard): several
     * GPUs share out what they hold by it. NULL: the device is one. */
    enum kvk_status (*alloc_at)(struct kvk_device *device, uint32_t place, uint64_t size_bytes,
                                uint64_t piece_bytes, const char *name, struct kvk_region *region,
                                struct kvk_error *error);
    /* Has it fallen away for good, with all that lay on it? From then on every operation refuses
     * with KVK_PRECONDITION, since trying again does not help, and freeing works. Waits for
     * nothing: may be asked with a lock held. NULL: it never does. */
    bool (*is_lost)(const struct kvk_device *device);
    /* As alloc, for bytes that other tenants' processes map: mapped whole by the daemon, and then
     * sealed, so that nobody can map it writably any more, whatever he does with the descriptor.
     * Such memory cannot be punched: it goes when it is freed, and stays while a process maps it
     * (as zeros). NULL: the device has none of that kind. */
    enum kvk_status (*alloc_public)(struct kvk_device *device, uint64_t size_bytes,
                                    const char *name, struct kvk_region *region,
                                    struct kvk_error *error);
    /* Waits for nothing: may be asked with a lock held. NULL: nothing can go wrong. */
    void (*health)(struct kvk_device *device, struct kvk_device_health *health);
};

struct kvk_device {
    const struct kvk_device_ops *ops;
};

struct kvk_device_cpu_options {
    uint32_t attend_thread_count; /* 0: as many as processors */
    uint32_t copy_thread_count;   /* threads that share one big copy; 0 or 1: the caller alone */
    uint64_t copy_step_bytes;     /* bytes between yields; 0: 256 KiB */
    bool huge_pages;              /* ask for transparent huge pages */
    bool interleave;              /* pages over all NUMA nodes, where there are several */
    bool lock_memory;             /* what is backed is never paged out */
    uint64_t window_bytes;        /* of regions that are mapped by windows, whole pages; 0: 1 GiB */
    const char *path;             /* force one of kvk_device_info.path; NULL: the best there is */
    const struct kvk_memory_watch *watch; /* borrowed for the device's life; NULL: nobody */
    uint32_t test_copy_delay_us;          /* test hook: sleep before each piece */
};

KVK_CHECKED enum kvk_status kvk_device_cpu_open(const struct kvk_device_cpu_options *options,
                                                struct kvk_device **device,
                                                struct kvk_error *error);

#endif
