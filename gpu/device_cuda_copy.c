/*
 * Copies of the CUDA device: a batch is put on one stream, in as few calls as its pieces allow, and
 * the processor hashes what has landed while the rest is under way.
 *
 * The work of a batch goes through a ring. An entry is one call's worth; it is settled (its event
 * waited for, its bytes hashed or fetched from a buffer) in the order in which it was put in, at
 * the latest when its place is needed again. So there is never more under way than the ring has
 * places, and every buffer is free again when its entry is settled.
 */
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/lock.h"
#include "gpu/device_cuda_internal.h"
#include "gpu/kernels/kernels.h"

/* Pieces up to this size are small: the copy engine takes longer to begin than to copy. */
#define SMALL_BYTES (UINT64_C(32) << 10)
#define SMALL_COUNT_MIN 8

/* What one call to the copy engine copies at most, so that hashing has something to begin with. */
#define RUN_BYTES_MAX (UINT64_C(8) << 20)
#define PITCH_MAX (UINT64_C(1) << 30)

struct entry {
    uint32_t first;      /* piece */
    uint32_t count;      /* pieces whose last byte lands with it; hashed when settled */
    bool hash_targets;   /* their checksums are of the targets, which are the host's */
    uint8_t *fetch_from; /* a buffer's bytes that go to the host when settled; NULL: none */
    uint8_t *fetch_to;   /* NULL: only to be hashed */
    uint64_t fetch_bytes;
    bool fetch_first, fetch_last; /* part of its piece */
};

/* The pieces of one batch that one GPU copies. */
struct pass {
    struct kvk_device_cuda *cuda;
    struct kvk_cuda_lane *lane;
    const struct kvk_copy *copies;
    struct entry ring[KVK_CUDA_RING];
    uint32_t begun_count; /* entries put in; entry n is in place n % KVK_CUDA_RING */
    uint32_t settled_count;
    struct kvk_checksum_state fetched; /* of the piece that is being fetched in parts */
    cudaError_t result;                /* the first failure */
};

/* Where a piece's ends lie. */
struct ends {
    struct kvk_cuda_range source, target;
    bool source_known, target_known;
};

static bool is_of_gpu(bool known, const struct kvk_cuda_range *range)
{
    return known && range->gpu >= 0;
}

static struct ends ends_find(struct kvk_device_cuda *cuda, const struct kvk_copy *copy)
{
    struct ends ends = {.source_known = false};
    ends.source_known = kvk_cuda_range_find(cuda, copy->source, copy->size_bytes, &ends.source);
    ends.target_known = kvk_cuda_range_find(cuda, copy->target, copy->size_bytes, &ends.target);
    return ends;
}

/* The GPU that copies the piece: the one it goes to, else the one it comes from; -1: none. */
static int32_t ends_gpu(const struct ends *ends)
{
    if (is_of_gpu(ends->target_known, &ends->target)) {
        return ends->target.gpu;
    }
    return is_of_gpu(ends->source_known, &ends->source) ? ends->source.gpu : -1;
}

/* ---- The ring ---- */

static void pass_fail(struct pass *pass, cudaError_t result)
{
    if (pass->result == cudaSuccess) {
        pass->result = result;
    }
}

static void entry_fetch(struct pass *pass, const struct entry *entry)
{
    const struct kvk_copy *copy = &pass->copies[entry->first];
    bool hashed = copy->checksum != NULL;
    if (hashed && entry->fetch_first) {
        kvk_checksum_begin(&pass->fetched);
    }
    if (hashed && entry->fetch_to != NULL) {
        kvk_checksum_add_copy(&pass->fetched, entry->fetch_to, entry->fetch_from,
                              entry->fetch_bytes);
    } else if (hashed) {
        kvk_checksum_add(&pass->fetched, entry->fetch_from, entry->fetch_bytes);
    } else {
        kvk_copy_stream(entry->fetch_to, entry->fetch_from, entry->fetch_bytes);
    }
    if (hashed && entry->fetch_last) {
        *copy->checksum = kvk_checksum_end(&pass->fetched);
    }
}

/* Wait for the oldest entry, and do what was left to do for it. */
static void entry_settle(struct pass *pass)
{
    uint32_t place = pass->settled_count % KVK_CUDA_RING;
    const struct entry *entry = &pass->ring[place];
    KVK_ASSERT(pass->settled_count < pass->begun_count);
    pass->settled_count++;
    cudaError_t result = cudaEventSynchronize(pass->lane->events[place]);
    if (result != cudaSuccess) {
        pass_fail(pass, result);
    }
    if (pass->result != cudaSuccess) {
        return; /* what is there may be anything */
    }
    if (entry->fetch_from != NULL) {
        entry_fetch(pass, entry);
    }
    for (uint32_t i = 0; entry->hash_targets && i < entry->count; i++) {
        const struct kvk_copy *copy = &pass->copies[entry->first + i];
        if (copy->checksum != NULL) {
            *copy->checksum = kvk_checksum(copy->target, copy->size_bytes);
        }
    }
}

/* A free place, and its number. */
static struct entry *entry_begin(struct pass *pass, uint32_t *place)
{
    if (pass->begun_count - pass->settled_count == KVK_CUDA_RING) {
        entry_settle(pass);
    }
    *place = pass->begun_count % KVK_CUDA_RING;
    pass->ring[*place] = (struct entry){.count = 0};
    return &pass->ring[*place];
}

/* The calls for the entry were made, with this result of theirs. */
static void entry_end(struct pass *pass, uint32_t place, cudaError_t result)
{
    if (result == cudaSuccess) {
        result = cudaEventRecord(pass->lane->events[place], pass->lane->stream);
    }
    if (result == cudaSuccess) {
        pass->begun_count++;
    } else {
        pass_fail(pass, result);
    }
}

/* ---- Pieces ---- */

static uint8_t *part_of(const struct pass *pass, uint32_t place)
{
    return pass->lane->parts + place * pass->cuda->part_bytes;
}

static cudaError_t parts_need(struct pass *pass)
{
    void *memory = NULL;
    if (pass->lane->parts != NULL) {
        return cudaSuccess;
    }
    cudaError_t result =
        cudaHostAlloc(&memory, KVK_CUDA_RING * pass->cuda->part_bytes, cudaHostAllocPortable);
    pass->lane->parts = memory;
    return result;
}

/* A piece one end of which is not locked, or between places of a GPU with a checksum: part by part
 * over pinned buffers. */
static void piece_by_parts(struct pass *pass, uint32_t index, bool from_gpu, bool to_gpu)
{
    const struct kvk_copy *copy = &pass->copies[index];
    struct kvk_checksum_state sent;
    cudaError_t result = parts_need(pass);
    if (result != cudaSuccess) {
        pass_fail(pass, result);
        return;
    }
    if (copy->checksum != NULL && !from_gpu) {
        kvk_checksum_begin(&sent);
    }
    for (uint64_t at = 0; at < copy->size_bytes && pass->result == cudaSuccess;) {
        uint64_t left = copy->size_bytes - at;
        uint64_t bytes = left < pass->cuda->part_bytes ? left : pass->cuda->part_bytes;
        const uint8_t *source = (const uint8_t *)copy->source + at;
        uint8_t *target = (uint8_t *)copy->target + at;
        uint32_t place;
        struct entry *entry = entry_begin(pass, &place);
        uint8_t *part = part_of(pass, place);
        entry->first = index;
        if (!from_gpu) {
            if (copy->checksum != NULL) {
                kvk_checksum_add_copy(&sent, part, source, bytes);
            } else {
                kvk_copy_stream(part, source, bytes);
            }
            result =
                cudaMemcpyAsync(target, part, bytes, cudaMemcpyHostToDevice, pass->lane->stream);
        } else {
            entry->fetch_from = part;
            entry->fetch_to = to_gpu ? NULL : target;
            entry->fetch_bytes = bytes;
            entry->fetch_first = at == 0;
            entry->fetch_last = bytes == left;
            result =
                cudaMemcpyAsync(part, source, bytes, cudaMemcpyDeviceToHost, pass->lane->stream);
        }
        entry_end(pass, place, result);
        at += bytes;
    }
    if (copy->checksum != NULL && !from_gpu && pass->result == cudaSuccess) {
        *copy->checksum = kvk_checksum_end(&sent);
    }
}

/* How many pieces from `first` on lie at equal distances, at both ends within one range: those go
 * in one call. */
static uint32_t run_length(const struct pass *pass, uint32_t first, uint32_t limit,
                           const struct ends *ends, uint64_t *source_step, uint64_t *target_step)
{
    const struct kvk_copy *copy = &pass->copies[first];
    uint64_t size = copy->size_bytes;
    uint32_t count = 1;
    *source_step = size;
    *target_step = size;
    while (first + count < limit && (count + 1) * size <= RUN_BYTES_MAX) {
        const struct kvk_copy *next = &copy[count];
        uintptr_t source = (uintptr_t)next->source;
        uintptr_t target = (uintptr_t)next->target;
        uintptr_t source_before = (uintptr_t)copy[count - 1].source;
        uintptr_t target_before = (uintptr_t)copy[count - 1].target;
        if (next->size_bytes != size || source < source_before + size ||
            target < target_before + size || source + size > ends->source.end ||
            target + size > ends->target.end) {
            break;
        }
        if (count == 1) {
            *source_step = source - source_before;
            *target_step = target - target_before;
        }
        if (source - source_before != *source_step || target - target_before != *target_step ||
            *source_step > PITCH_MAX || *target_step > PITCH_MAX) {
            break;
        }
        count++;
    }
    return count;
}

static void run_copy(struct pass *pass, uint32_t first, uint32_t count, const struct ends *ends,
                     uint64_t source_step, uint64_t target_step)
{
    const struct kvk_copy *copy = &pass->copies[first];
    cudaStream_t stream = pass->lane->stream;
    bool from_gpu = ends->source.gpu >= 0;
    bool to_gpu = ends->target.gpu >= 0;
    enum cudaMemcpyKind kind = from_gpu && to_gpu ? cudaMemcpyDefault
                               : from_gpu         ? cudaMemcpyDeviceToHost
                                                  : cudaMemcpyHostToDevice;
    uint32_t place;
    struct entry *entry = entry_begin(pass, &place);
    entry->first = first;
    entry->count = count;
    entry->hash_targets = !to_gpu;
    cudaError_t result;
    if (count == 1) {
        result = cudaMemcpyAsync(copy->target, copy->source, copy->size_bytes, kind, stream);
    } else {
        result = cudaMemcpy2DAsync(copy->target, target_step, copy->source, source_step,
                                   copy->size_bytes, count, kind, stream);
    }
    entry_end(pass, place, result);
    for (uint32_t i = 0; !from_gpu && pass->result == cudaSuccess && i < count; i++) {
        if (copy[i].checksum != NULL) { /* the copy engine only reads them meanwhile */
            *copy[i].checksum = kvk_checksum(copy[i].source, copy[i].size_bytes);
        }
    }
}

/* ---- Crowds of small pieces ---- */

static bool is_small(const struct pass *pass, const struct kvk_copy *copy, const struct ends *ends)
{
    bool reaches = pass->lane->gpu->reaches_host;
    int32_t gpu = (int32_t)pass->lane->gpu->index;
    return copy->size_bytes <= SMALL_BYTES && copy->checksum == NULL && ends->source_known &&
           ends->target_known && (ends->source.gpu == gpu || (ends->source.gpu < 0 && reaches)) &&
           (ends->target.gpu == gpu || (ends->target.gpu < 0 && reaches));
}

static uint32_t crowd_length(const struct pass *pass, uint32_t first, uint32_t limit)
{
    uint32_t count = 0;
    uint64_t most = pass->cuda->part_bytes / sizeof(struct kvk_cuda_piece);
    while (first + count < limit && count < most) {
        const struct kvk_copy *copy = &pass->copies[first + count];
        const struct ends ends = ends_find(pass->cuda, copy);
        if (!is_small(pass, copy, &ends)) {
            break;
        }
        count++;
    }
    return count;
}

static void crowd_copy(struct pass *pass, uint32_t first, uint32_t count)
{
    struct kvk_cuda_lane *lane = pass->lane;
    uint64_t most = 0;
    uint32_t place;
    cudaError_t result = parts_need(pass);
    if (result == cudaSuccess && lane->list == NULL) {
        void *list = NULL;
        result = cudaMalloc(&list, pass->cuda->part_bytes);
        lane->list = list;
    }
    if (result != cudaSuccess) {
        pass_fail(pass, result);
        return;
    }
    (void)entry_begin(pass, &place);
    struct kvk_cuda_piece *pieces = (struct kvk_cuda_piece *)(void *)part_of(pass, place);
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_copy *copy = &pass->copies[first + i];
        pieces[i] = (struct kvk_cuda_piece){
            .source = copy->source, .target = copy->target, .size_bytes = copy->size_bytes};
        most = copy->size_bytes > most ? copy->size_bytes : most;
    }
    /* The stream's order keeps the list until the launch before this one has read it. */
    result = cudaMemcpyAsync(lane->list, pieces, count * sizeof(*pieces), cudaMemcpyHostToDevice,
                             lane->stream);
    if (result == cudaSuccess) {
        result =
            (cudaError_t)kvk_cuda_copy_launch((const void *)lane->list, count, most, lane->stream);
    }
    entry_end(pass, place, result);
}

/* ---- A batch ---- */

/* Pieces [first, limit) are all of the pass's GPU. */
static void pieces_copy(struct pass *pass, uint32_t first, uint32_t limit)
{
    while (first < limit && pass->result == cudaSuccess) {
        const struct kvk_copy *copy = &pass->copies[first];
        const struct ends ends = ends_find(pass->cuda, copy);
        bool from_gpu = is_of_gpu(ends.source_known, &ends.source);
        bool to_gpu = is_of_gpu(ends.target_known, &ends.target);
        bool direct = ends.source_known && ends.target_known;
        uint32_t crowd = direct ? crowd_length(pass, first, limit) : 0;
        if (copy->size_bytes == 0) {
            if (copy->checksum != NULL) {
                *copy->checksum = kvk_checksum(copy->source, 0);
            }
            first++;
        } else if (crowd >= SMALL_COUNT_MIN) {
            crowd_copy(pass, first, crowd);
            first += crowd;
        } else if (!direct) {
            piece_by_parts(pass, first, from_gpu, to_gpu);
            first++;
        } else {
            uint64_t source_step;
            uint64_t target_step;
            uint32_t count = run_length(pass, first, limit, &ends, &source_step, &target_step);
            run_copy(pass, first, count, &ends, source_step, target_step);
            for (uint32_t i = 0; from_gpu && to_gpu && i < count; i++) {
                if (copy[i].checksum != NULL) { /* fetched for that alone */
                    piece_by_parts(pass, first + i, true, true);
                }
            }
            first += count;
        }
    }
}

/* Returns when nothing of it is under way any more, failed or not. */
static enum kvk_status gpu_copy(struct kvk_device_cuda *cuda, struct kvk_cuda_gpu *gpu,
                                const struct kvk_copy *copies, uint32_t copy_count,
                                struct kvk_error *error)
{
    enum kvk_status status = kvk_cuda_enter(cuda, gpu, error);
    if (status != KVK_OK) {
        return status;
    }
    struct pass pass = {
        .cuda = cuda, .lane = kvk_cuda_lane_take(gpu), .copies = copies, .result = cudaSuccess};
    pieces_copy(&pass, 0, copy_count);
    while (pass.settled_count < pass.begun_count) {
        entry_settle(&pass);
    }
    if (pass.result != cudaSuccess) {
        (void)cudaStreamSynchronize(pass.lane->stream);
    }
    kvk_cuda_lane_give(pass.lane);
    return pass.result == cudaSuccess ? KVK_OK
                                      : kvk_cuda_fail(cuda, gpu, pass.result, "copying", error);
}

enum kvk_status kvk_cuda_copy(struct kvk_device *device, const struct kvk_copy *copies,
                              uint32_t copy_count, struct kvk_error *error)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    enum kvk_status status = KVK_OK;
    KVK_ASSERT(kvk_locks_held() == 0);
    for (uint32_t first = 0; first < copy_count && status == KVK_OK;) {
        struct ends ends = ends_find(cuda, &copies[first]);
        int32_t gpu = ends_gpu(&ends);
        uint32_t count = 1;
        while (first + count < copy_count) {
            ends = ends_find(cuda, &copies[first + count]);
            if (ends_gpu(&ends) != gpu) {
                break;
            }
            count++;
        }
        if (gpu < 0) {
            kvk_copy_cpu_run(&cuda->copy, &copies[first], count);
        } else {
            status = gpu_copy(cuda, &cuda->gpus[gpu], &copies[first], count, error);
        }
        first += count;
    }
    return status;
}
