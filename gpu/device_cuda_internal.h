/*
 * The insides of the CUDA device, for gpu/device_cuda*.c alone.
 *
 * Who owns what: the device owns its GPUs, these their lanes; a region owns its slabs. What memory
 * lies where is in one sorted table of ranges, by which copies find their way.
 *
 * Locking: `ranges_lock` over the table, `lanes_lock` over the free lanes, a region's windows.lock
 * over its slabs. All are leaves, and none is held during a call into CUDA.
 */
#ifndef KVK_GPU_DEVICE_CUDA_INTERNAL_H
#define KVK_GPU_DEVICE_CUDA_INTERNAL_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/slab_table.h"
#include "gpu/copy_cpu.h"
#include "gpu/device_cuda.h"

/* Pieces of work of one lane that are under way at a time. */
#define KVK_CUDA_RING 8

#define KVK_CUDA_LANE_COUNT_MAX 64

/* Exported memory is mapped by whole units of the driver: a slab shares none of them with what
 * another process may not see. */
#define KVK_CUDA_UNIT_BYTES (UINT64_C(2) << 20)

struct kvk_cuda_gpu {
    int ordinal;
    uint32_t index; /* in device_cuda.gpus */
    struct cudaDeviceProp properties;
    bool reaches_host;           /* kernels may use the host's own addresses of locked memory */
    struct kvk_cuda_lane *lanes; /* [lane_count], ours */
    struct kvk_cuda_lane *free_lanes; /* by lane.next_free */
    pthread_mutex_t lanes_lock;
    pthread_cond_t lane_free;
};

/* What one call works with. Made at open; buffers come when they are first needed. */
struct kvk_cuda_lane {
    struct kvk_cuda_gpu *gpu;
    struct kvk_cuda_lane *next_free;
    cudaStream_t stream;
    cudaEvent_t events[KVK_CUDA_RING];
    uint8_t *parts;        /* pinned, [KVK_CUDA_RING][part_bytes]; NULL: not needed yet */
    uint8_t *list;         /* device memory, part_bytes: lists of small pieces */
    uint8_t *attend_host;  /* pinned: what is sent, and then what comes back */
    uint8_t *attend_bytes; /* device memory: what was sent, then the kernels' own */
    size_t attend_host_size, attend_bytes_size;
};

/* Memory that copies reach: of a GPU, or page-locked on the host. */
struct kvk_cuda_range {
    uintptr_t begin, end;
    int32_t gpu; /* index; -1: the host's */
    uint64_t id; /* never the same again: runs of pieces stay within one */
};

struct kvk_device_cuda {
    struct kvk_device device; /* first: a kvk_device pointer is one to this */
    struct kvk_memory_watch watch;
    struct kvk_copy_cpu copy; /* for pieces both ends of which are the host's */
    struct kvk_cuda_gpu gpus[KVK_CUDA_GPU_COUNT_MAX];
    uint32_t gpu_count;
    uint32_t lane_count;
    uint64_t part_bytes;
    uint32_t split_tokens;
    _Atomic bool lost;
    _Atomic uint64_t memory_failures, call_failures;
    pthread_mutex_t health_lock; /* of the next two: a leaf, never held during a call */
    int32_t lost_error;
    char reason[KVK_DEVICE_REASON_SIZE];
    _Atomic bool lock_told; /* that memory of the host could not be locked */
    _Atomic uint32_t region_count;
    pthread_rwlock_t ranges_lock;
    struct kvk_cuda_range *ranges; /* [range_count] by address; ours */
    uint32_t range_count, range_capacity;
    uint64_t next_range_id;
};

static inline struct kvk_device_cuda *kvk_device_cuda_of(struct kvk_device *device)
{
    return (struct kvk_device_cuda *)device;
}

/* ---- Failures: device_cuda_error.c ---- */

/* What a call of CUDA that failed means; `what` is a verb's phrase ("copying 3 pieces"). Marks the
 * device as lost where it is. */
enum kvk_status kvk_cuda_fail(struct kvk_device_cuda *cuda, const struct kvk_cuda_gpu *gpu,
                              cudaError_t result, const char *what, struct kvk_error *error);
enum kvk_status kvk_cuda_fail_lost(struct kvk_error *error);
void kvk_cuda_health(struct kvk_device *device, struct kvk_device_health *health);
/* The GPU is the thread's current one, and not lost. */
KVK_CHECKED enum kvk_status kvk_cuda_enter(struct kvk_device_cuda *cuda,
                                           const struct kvk_cuda_gpu *gpu, struct kvk_error *error);

/* ---- Lanes: device_cuda.c ---- */

/* Waits for one. */
struct kvk_cuda_lane *kvk_cuda_lane_take(struct kvk_cuda_gpu *gpu);
void kvk_cuda_lane_give(struct kvk_cuda_lane *lane);

/* ---- Ranges: device_cuda_memory.c ---- */

/* The range that has all of [address, address + size_bytes). False: none; what it would need is
 * then not reachable, or in parts of several. */
bool kvk_cuda_range_find(struct kvk_device_cuda *cuda, const void *address, uint64_t size_bytes,
                         struct kvk_cuda_range *range);
/* KVK_EXHAUSTED: no memory for the table. */
KVK_CHECKED enum kvk_status kvk_cuda_range_add(struct kvk_device_cuda *cuda, const void *address,
                                               uint64_t size_bytes, int32_t gpu,
                                               struct kvk_error *error);
void kvk_cuda_range_remove(struct kvk_device_cuda *cuda, const void *address);

void kvk_cuda_memory_backed(void *context, void *address, uint64_t size_bytes);
void kvk_cuda_memory_leaving(void *context, void *address, uint64_t size_bytes);

enum kvk_status kvk_cuda_alloc_at(struct kvk_device *device, uint32_t place, uint64_t size_bytes,
                                  uint64_t piece_bytes, const char *name, struct kvk_region *region,
                                  struct kvk_error *error);
enum kvk_status kvk_cuda_alloc(struct kvk_device *device, uint64_t size_bytes, uint64_t piece_bytes,
                               const char *name, struct kvk_region *region,
                               struct kvk_error *error);
void kvk_cuda_free(struct kvk_device *device, struct kvk_region *region);
void kvk_cuda_leave(struct kvk_device *device, struct kvk_region *region);
enum kvk_status kvk_cuda_back(struct kvk_device *device, struct kvk_region *region, uint64_t offset,
                              uint64_t size_bytes, struct kvk_error *error);
enum kvk_status kvk_cuda_punch(struct kvk_device *device, struct kvk_region *region,
                               uint64_t offset, uint64_t size_bytes, struct kvk_error *error);
uint64_t kvk_cuda_backed_bytes(struct kvk_device *device, const struct kvk_region *region);
enum kvk_status kvk_cuda_export(struct kvk_device *device, const struct kvk_region *region,
                                struct kvk_export *export, struct kvk_error *error);

/* ---- Copies and attention: device_cuda_copy.c, device_cuda_attend.c ---- */

enum kvk_status kvk_cuda_copy(struct kvk_device *device, const struct kvk_copy *copies,
                              uint32_t copy_count, struct kvk_error *error);
enum kvk_status kvk_cuda_attend(struct kvk_device *device, const struct kvk_attend *attend,
                                struct kvk_error *error);

#endif
