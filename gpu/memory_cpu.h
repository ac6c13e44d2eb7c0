/*
 * The CPU device's memory: sealed, sparse memfds that workers map.
 *
 * A region's file has its full size from the start and is sealed against shrinking, growing and
 * further seals: no process that maps it can pull pages from under another, and no mapping ever
 * meets the file's end (SIGBUS). Memory comes and goes by backing and punching ranges; after a
 * punch, mappings made before read zeros there. What a process writes, or even reads, in a range
 * that is not backed is faulted in and counts as backed.
 *
 * A public region is one that processes of other tenants may map: it is sealed against new writable
 * mappings too, once the daemon has its own. The kernel then refuses to punch it, so that its
 * memory is exactly as large as what it is for, and ends as a whole.
 */
#ifndef KVK_GPU_MEMORY_CPU_H
#define KVK_GPU_MEMORY_CPU_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "gpu/device.h"

struct kvk_memory_cpu_wishes {
    uint64_t window_bytes; /* regions larger than this are mapped by windows; whole pages */
    bool huge_pages;       /* where the kernel gives them */
    bool interleave;       /* page by page over all NUMA nodes that have memory */
    bool lock;             /* what is backed is not paged out; failing that is told */
};

/* `piece_bytes` as in struct kvk_device_ops. */
KVK_CHECKED enum kvk_status kvk_memory_cpu_alloc(uint64_t size_bytes, uint64_t piece_bytes,
                                                 const char *name,
                                                 const struct kvk_memory_cpu_wishes *wishes,
                                                 struct kvk_region *region,
                                                 struct kvk_error *error);

/* Sealed against new writable mappings, by whatever descriptor. Mapped as one run. */
KVK_CHECKED enum kvk_status kvk_memory_cpu_alloc_public(uint64_t size_bytes, const char *name,
                                                        const struct kvk_memory_cpu_wishes *wishes,
                                                        struct kvk_region *region,
                                                        struct kvk_error *error);

/*
 * A region of a file that was a region before, in another process: what is backed stays, and the
 * descriptor is the region's from here. Only what kvk_memory_cpu_alloc() makes is taken: memory
 * without a name in any file system, of this user, sealed against shrinking, growing and further
 * seals, and no smaller than asked for. What lies past that is given back to the system.
 * KVK_INVALID: another kind of file; KVK_OUT_OF_RANGE: too small. The descriptor is then untouched.
 */
KVK_CHECKED enum kvk_status kvk_memory_cpu_adopt(int fd, uint64_t size_bytes, uint64_t piece_bytes,
                                                 const struct kvk_memory_cpu_wishes *wishes,
                                                 struct kvk_region *region,
                                                 struct kvk_error *error);

/* Gives all bytes back at once, even where another process still maps the file. Those of a public
 * region are overwritten with zeros; the memory itself goes with the last mapping. */
void kvk_memory_cpu_free(struct kvk_region *region);

/* Unmaps and closes; what is backed stays for whoever holds the file. */
void kvk_memory_cpu_leave(struct kvk_region *region);

/* KVK_EXHAUSTED: the system has no such memory; nothing was backed. */
KVK_CHECKED enum kvk_status kvk_memory_cpu_back(struct kvk_region *region, uint64_t offset,
                                                uint64_t size_bytes,
                                                const struct kvk_memory_cpu_wishes *wishes,
                                                struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_memory_cpu_punch(struct kvk_region *region, uint64_t offset,
                                                 uint64_t size_bytes, struct kvk_error *error);
uint64_t kvk_memory_cpu_backed_bytes(const struct kvk_region *region);

#endif
