/*
 * The CUDA device: one or several GPUs as one kvk_device.
 *
 * Memory is allocated slab by slab, each an allocation of its own that other processes can open
 * (base/slab_table.h); what memory pools give could not be exported. A slab comes zeroed. Regions
 * are dealt out to the GPUs by alloc_at(): all of a region lies on one.
 *
 * Copies are batches with stream order: runs of equal pieces go to the copy engine in one call,
 * crowds of small ones by a kernel, host memory that is not page-locked over pinned buffers.
 * A call returns when the bytes are there. Checksums are taken by the processor, on the host's end
 * of a copy, while the next pieces are under way.
 *
 * Failures: no memory on the GPU is KVK_EXHAUSTED and changes nothing. A GPU that is lost (fallen
 * off the bus, memory errors, a fault in a kernel: what CUDA calls sticky) loses the whole device:
 * is_lost() says so from then on, and every operation refuses with KVK_PRECONDITION.
 *
 * Built without CUDA, kvk_device_cuda_open() says so: KVK_UNSUPPORTED.
 *
 * Locking: thread safe; locks of its own, none held during a call into CUDA.
 */
#ifndef KVK_GPU_DEVICE_CUDA_H
#define KVK_GPU_DEVICE_CUDA_H

#include "gpu/device.h"

#define KVK_CUDA_GPU_COUNT_MAX 16

struct kvk_device_cuda_options {
    const uint32_t *ordinals; /* [ordinal_count] as CUDA counts them; borrowed for the call */
    uint32_t ordinal_count;   /* 0: the first GPU alone */
    uint32_t lane_count;      /* calls that work on one GPU at a time; more wait. 0: 8 */
    uint64_t part_bytes;      /* of the pinned buffers, 8 for each lane that needs them; 0: 1 MiB */
    uint32_t split_tokens;    /* a test's wish: see struct kvk_cuda_limits */
};

/* KVK_UNAVAILABLE: there is no driver, no GPU, or none with that number; the error's text says
 * which. KVK_UNSUPPORTED: built without CUDA. KVK_INVALID: ordinals that cannot be meant. */
KVK_CHECKED enum kvk_status kvk_device_cuda_open(const struct kvk_device_cuda_options *options,
                                                 struct kvk_device **device,
                                                 struct kvk_error *error);

/* Tells the device what memory of the host to lock, so that its copies need no buffers: for struct
 * kvk_device_cpu_options. Where locking fails, copies take the longer way, and the log says so
 * once. It lives as long as the device; every region it was told of goes first. */
const struct kvk_memory_watch *kvk_device_cuda_watch(struct kvk_device *device);

/* Was it built with CUDA? */
bool kvk_device_cuda_is_built(void);

#endif
