/*
 * The CUDA device's memory: slabs that are allocations of their own, and the table of ranges.
 *
 * A region is addresses per piece rather than one run: windows of one piece each, so that slabs lie
 * wherever CUDA puts them. A region that is used as one run is one allocation, made at once.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/lock.h"
#include "base/log.h"
#include "gpu/device_cuda_internal.h"

/* Entries that a table has for each slab that fills a region, beside a few: a place may be backed
 * in parts. */
#define TABLE_SPARE 64
#define TABLE_ENTRIES_MAX UINT32_C(65536)
#define ENTRY_NONE UINT32_MAX

struct slab {
    uint8_t *address;
    uint64_t first_piece;
    uint64_t piece_count;
    uint32_t entry; /* of the table, or ENTRY_NONE */
};

struct region_cuda {
    struct kvk_slab_export export; /* first: region.slabs is a pointer to this */
    struct kvk_slab_table *table;  /* mapped; NULL: other processes cannot open it */
    size_t table_bytes;
    struct kvk_cuda_gpu *gpu;
    uint64_t piece_bytes;
    uint64_t piece_count;
    struct slab *slabs; /* [slab_count], ours; windows.lock */
    uint32_t slab_count, slab_capacity;
    bool backing; /* a call makes slabs, without the lock: two must not make the same one */
    pthread_cond_t backed; /* that call is over */
    _Atomic uint64_t backed_bytes;
};

static struct region_cuda *region_of(const struct kvk_region *region)
{
    return (struct region_cuda *)region->slabs;
}

/* ---- Ranges ---- */

/* The first range that ends after the address. */
static uint32_t range_place(const struct kvk_device_cuda *cuda, uintptr_t address)
{
    uint32_t low = 0;
    uint32_t high = cuda->range_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (cuda->ranges[middle].end <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

bool kvk_cuda_range_find(struct kvk_device_cuda *cuda, const void *address, uint64_t size_bytes,
                         struct kvk_cuda_range *range)
{
    uintptr_t begin = (uintptr_t)address;
    (void)pthread_rwlock_rdlock(&cuda->ranges_lock);
    uint32_t at = range_place(cuda, begin);
    bool found = at < cuda->range_count && cuda->ranges[at].begin <= begin &&
                 size_bytes <= cuda->ranges[at].end - begin;
    if (found) {
        *range = cuda->ranges[at];
    }
    (void)pthread_rwlock_unlock(&cuda->ranges_lock);
    return found;
}

enum kvk_status kvk_cuda_range_add(struct kvk_device_cuda *cuda, const void *address,
                                   uint64_t size_bytes, int32_t gpu, struct kvk_error *error)
{
    uintptr_t begin = (uintptr_t)address;
    enum kvk_status status = KVK_OK;
    (void)pthread_rwlock_wrlock(&cuda->ranges_lock);
    if (cuda->range_count == cuda->range_capacity) {
        uint32_t capacity = cuda->range_capacity == 0 ? 64 : 2 * cuda->range_capacity;
        struct kvk_cuda_range *ranges = realloc(cuda->ranges, capacity * sizeof(*ranges));
        if (ranges == NULL) {
            status = KVK_EXHAUSTED;
        } else {
            cuda->ranges = ranges;
            cuda->range_capacity = capacity;
        }
    }
    if (status == KVK_OK) {
        uint32_t at = range_place(cuda, begin);
        KVK_ASSERT(at == cuda->range_count || begin + size_bytes <= cuda->ranges[at].begin);
        memmove(&cuda->ranges[at + 1], &cuda->ranges[at],
                (cuda->range_count - at) * sizeof(cuda->ranges[0]));
        cuda->ranges[at] = (struct kvk_cuda_range){
            .begin = begin, .end = begin + size_bytes, .gpu = gpu, .id = ++cuda->next_range_id};
        cuda->range_count++;
    }
    (void)pthread_rwlock_unlock(&cuda->ranges_lock);
    return status == KVK_OK
               ? KVK_OK
               : kvk_fail(error, status, KVK_CAUSE_NONE, "", "no memory for a GPU's memory map");
}

void kvk_cuda_range_remove(struct kvk_device_cuda *cuda, const void *address)
{
    uintptr_t begin = (uintptr_t)address;
    (void)pthread_rwlock_wrlock(&cuda->ranges_lock);
    uint32_t at = range_place(cuda, begin);
    KVK_ASSERT(at < cuda->range_count && cuda->ranges[at].begin == begin);
    cuda->range_count--;
    memmove(&cuda->ranges[at], &cuda->ranges[at + 1],
            (cuda->range_count - at) * sizeof(cuda->ranges[0]));
    (void)pthread_rwlock_unlock(&cuda->ranges_lock);
}

/* ---- Memory of the host that is locked ---- */

/* The next stretch of [*begin, end) that is in no range. False: none is left. */
static bool gap_next(struct kvk_device_cuda *cuda, uintptr_t *begin, uintptr_t end,
                     uintptr_t *gap_end)
{
    (void)pthread_rwlock_rdlock(&cuda->ranges_lock);
    uint32_t at = range_place(cuda, *begin);
    while (at < cuda->range_count && cuda->ranges[at].begin <= *begin) {
        *begin = cuda->ranges[at++].end;
    }
    *gap_end =
        at < cuda->range_count && cuda->ranges[at].begin < end ? cuda->ranges[at].begin : end;
    (void)pthread_rwlock_unlock(&cuda->ranges_lock);
    return *begin < end;
}

static bool stretch_lock(struct kvk_device_cuda *cuda, uintptr_t begin, uintptr_t end)
{
    void *address = (void *)begin;
    struct kvk_error error;
    if (kvk_cuda_enter(cuda, &cuda->gpus[0], &error) != KVK_OK) {
        return false;
    }
    /* Mapped, since crowds of small pieces are copied by a kernel. */
    cudaError_t result =
        cudaHostRegister(address, end - begin, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (result == cudaSuccess) {
        if (kvk_cuda_range_add(cuda, address, end - begin, -1, &error) == KVK_OK) {
            return true;
        }
        (void)cudaHostUnregister(address);
    } else {
        (void)kvk_cuda_fail(cuda, &cuda->gpus[0], result, "locking memory of the host", &error);
    }
    if (!atomic_exchange(&cuda->lock_told, true)) {
        char text[KVK_ERROR_TEXT_SIZE];
        kvk_log(KVK_LOG_WARNING, "host_memory_not_locked", "text=%s",
                kvk_log_text(text, sizeof(text), error.text));
    }
    return false;
}

/* Whole pages alone: what is beside them may be another range's. */
void kvk_cuda_memory_backed(void *context, void *address, uint64_t size_bytes)
{
    struct kvk_device_cuda *cuda = context;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)address + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)address + size_bytes) / page * page;
    uintptr_t gap_end;
    while (begin < end && gap_next(cuda, &begin, end, &gap_end)) {
        if (!stretch_lock(cuda, begin, gap_end)) {
            return;
        }
        begin = gap_end;
    }
}

/* The first of the host's ranges that touches [begin, end). */
static bool locked_next(struct kvk_device_cuda *cuda, uintptr_t begin, uintptr_t end,
                        struct kvk_cuda_range *range)
{
    (void)pthread_rwlock_rdlock(&cuda->ranges_lock);
    uint32_t at = range_place(cuda, begin);
    while (at < cuda->range_count && cuda->ranges[at].begin < end && cuda->ranges[at].gpu >= 0) {
        at++;
    }
    bool found = at < cuda->range_count && cuda->ranges[at].begin < end;
    if (found) {
        *range = cuda->ranges[at];
    }
    (void)pthread_rwlock_unlock(&cuda->ranges_lock);
    return found;
}

void kvk_cuda_memory_leaving(void *context, void *address, uint64_t size_bytes)
{
    struct kvk_device_cuda *cuda = context;
    uintptr_t begin = (uintptr_t)address;
    uintptr_t end = begin + size_bytes;
    struct kvk_cuda_range range;

    KVK_ASSERT(kvk_locks_held() == 0);
    while (locked_next(cuda, begin, end, &range)) {
        kvk_cuda_range_remove(cuda, (void *)range.begin);
        /* Of a lost GPU too: where that fails the driver let go of it already. */
        (void)cudaSetDevice(cuda->gpus[0].ordinal);
        if (cudaHostUnregister((void *)range.begin) != cudaSuccess) {
            (void)cudaGetLastError();
        }
        begin = range.end;
    }
}

/* ---- The table for other processes ---- */

static void table_close(struct region_cuda *own)
{
    if (own->table != NULL) {
        (void)munmap(own->table, own->table_bytes);
    }
    if (own->export.fd >= 0) {
        (void)close(own->export.fd);
    }
    own->table = NULL;
    own->export.fd = -1;
}

/* Without it the region is the daemon's alone; nothing else is lost. */
static void table_make(struct region_cuda *own, uint64_t size_bytes)
{
    uint64_t entries = size_bytes / KVK_CUDA_UNIT_BYTES * 2 + TABLE_SPARE;
    if (entries > TABLE_ENTRIES_MAX) {
        entries = TABLE_ENTRIES_MAX;
    }
    own->table_bytes = sizeof(*own->table) + entries * sizeof(own->table->entries[0]);
    own->export.fd = memfd_create("kvkeep-slabs", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (own->export.fd < 0 || ftruncate(own->export.fd, (off_t)own->table_bytes) != 0 ||
        fcntl(own->export.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        table_close(own);
        return;
    }
    void *table =
        mmap(NULL, own->table_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, own->export.fd, 0);
    /* No other process writes in it, whatever it opens. */
    if (table == MAP_FAILED ||
        fcntl(own->export.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
        if (table != MAP_FAILED) {
            (void)munmap(table, own->table_bytes);
        }
        table_close(own);
        return;
    }
    own->table = table;
    own->table->slot_bytes = own->piece_bytes;
    own->table->entry_capacity = (uint32_t)entries;
    memcpy(own->table->device_uuid, &own->gpu->properties.uuid, sizeof(own->table->device_uuid));
    own->table->magic = KVK_SLAB_TABLE_MAGIC;
}

/* Nobody reads an entry before its slot_count is there. The windows' lock is held. */
static void entry_publish(struct region_cuda *own, struct slab *slab,
                          const cudaIpcMemHandle_t *handle)
{
    struct kvk_slab_table *table = own->table;
    _Static_assert(sizeof(*handle) == KVK_SLAB_HANDLE_SIZE, "stored");
    uint32_t at = 0;
    while (at < table->entry_end && table->entries[at].slot_count > 0) {
        at++;
    }
    if (at == table->entry_capacity) {
        return; /* nobody else can open this slab */
    }
    struct kvk_slab_entry *entry = &table->entries[at];
    entry->first_slot = slab->first_piece;
    memcpy(entry->handle, handle, sizeof(entry->handle));
    __atomic_store_n(&entry->slot_count, (uint32_t)slab->piece_count, __ATOMIC_RELEASE);
    if (at == table->entry_end) {
        __atomic_store_n(&table->entry_end, at + 1, __ATOMIC_RELEASE);
    }
    slab->entry = at;
}

static void entry_withdraw(struct region_cuda *own, const struct slab *slab)
{
    if (slab->entry != ENTRY_NONE) {
        struct kvk_slab_entry *entry = &own->table->entries[slab->entry];
        __atomic_store_n(&entry->slot_count, 0, __ATOMIC_RELEASE);
        memset(entry->handle, 0, sizeof(entry->handle));
    }
}

/* ---- Slabs ---- */

/* Memory that never shows what another had in it, in whole units of the driver. */
static enum kvk_status memory_make(struct kvk_device_cuda *cuda, struct kvk_cuda_gpu *gpu,
                                   uint64_t size_bytes, uint8_t **address, struct kvk_error *error)
{
    void *memory = NULL;
    uint64_t units = (size_bytes + KVK_CUDA_UNIT_BYTES - 1) / KVK_CUDA_UNIT_BYTES;
    enum kvk_status status = kvk_cuda_enter(cuda, gpu, error);
    if (status != KVK_OK) {
        return status;
    }
    cudaError_t result = cudaMalloc(&memory, units * KVK_CUDA_UNIT_BYTES);
    if (result != cudaSuccess) {
        return kvk_cuda_fail(cuda, gpu, result, "allocating a slab", error);
    }
    struct kvk_cuda_lane *lane = kvk_cuda_lane_take(gpu);
    result = cudaMemsetAsync(memory, 0, units * KVK_CUDA_UNIT_BYTES, lane->stream);
    cudaError_t waited = cudaStreamSynchronize(lane->stream);
    kvk_cuda_lane_give(lane);
    result = result == cudaSuccess ? waited : result;
    if (result != cudaSuccess) {
        status = kvk_cuda_fail(cuda, gpu, result, "clearing a slab", error);
    } else {
        status = kvk_cuda_range_add(cuda, memory, size_bytes, (int32_t)gpu->index, error);
    }
    if (status != KVK_OK) {
        (void)cudaFree(memory);
        return status;
    }
    *address = memory;
    return KVK_OK;
}

static void memory_unmake(struct kvk_device_cuda *cuda, const struct kvk_cuda_gpu *gpu,
                          uint8_t *address)
{
    kvk_cuda_range_remove(cuda, address);
    if (!atomic_load(&cuda->lost)) {
        struct kvk_error error;
        cudaError_t result = cudaSetDevice(gpu->ordinal);
        result = result == cudaSuccess ? cudaFree(address) : result;
        if (result != cudaSuccess) {
            (void)kvk_cuda_fail(cuda, gpu, result, "freeing a slab", &error);
        }
    }
}

/* The windows' lock is held. */
static bool slab_remember(struct region_cuda *own, const struct slab *slab)
{
    if (own->slab_count == own->slab_capacity) {
        uint32_t capacity = own->slab_capacity == 0 ? 8 : 2 * own->slab_capacity;
        struct slab *slabs = realloc(own->slabs, capacity * sizeof(*slabs));
        if (slabs == NULL) {
            return false;
        }
        own->slabs = slabs;
        own->slab_capacity = capacity;
    }
    own->slabs[own->slab_count++] = *slab;
    atomic_fetch_add(&own->backed_bytes, slab->piece_count * own->piece_bytes);
    return true;
}

/* One call at a time: where several want the same place, all but the first find it backed. */
static void backing_begin(struct kvk_region *region)
{
    struct region_cuda *own = region_of(region);
    (void)pthread_mutex_lock(&region->windows->lock);
    while (own->backing) {
        (void)pthread_cond_wait(&own->backed, &region->windows->lock);
    }
    own->backing = true;
    (void)pthread_mutex_unlock(&region->windows->lock);
}

static void backing_end(struct kvk_region *region)
{
    struct region_cuda *own = region_of(region);
    (void)pthread_mutex_lock(&region->windows->lock);
    own->backing = false;
    (void)pthread_cond_broadcast(&own->backed);
    (void)pthread_mutex_unlock(&region->windows->lock);
}

/* Pieces [first, first + count), none of which is backed. */
static enum kvk_status slab_make(struct kvk_device_cuda *cuda, struct kvk_region *region,
                                 uint64_t first, uint64_t count, struct kvk_error *error)
{
    struct region_cuda *own = region_of(region);
    struct kvk_windows *windows = region->windows;
    struct slab slab = {.first_piece = first, .piece_count = count, .entry = ENTRY_NONE};
    cudaIpcMemHandle_t handle;
    enum kvk_status status =
        memory_make(cuda, own->gpu, count * own->piece_bytes, &slab.address, error);
    if (status != KVK_OK) {
        return status;
    }
    bool exported = own->table != NULL && cudaIpcGetMemHandle(&handle, slab.address) == cudaSuccess;
    if (!exported) {
        (void)cudaGetLastError(); /* a platform without it: the memory is the daemon's alone */
    }
    (void)pthread_mutex_lock(&windows->lock);
    if (exported) {
        entry_publish(own, &slab, &handle);
    }
    bool remembered = slab_remember(own, &slab);
    if (!remembered) {
        entry_withdraw(own, &slab);
    }
    (void)pthread_mutex_unlock(&windows->lock);
    if (!remembered) {
        memory_unmake(cuda, own->gpu, slab.address);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a slab");
    }
    for (uint64_t i = 0; i < count; i++) {
        atomic_store_explicit(&windows->addresses[first + i], slab.address + i * own->piece_bytes,
                              memory_order_release);
    }
    return KVK_OK;
}

/* ---- Regions ---- */

static struct kvk_windows *windows_create(uint64_t count, uint64_t piece_bytes)
{
    struct kvk_windows *windows =
        calloc(1, sizeof(*windows) + count * sizeof(windows->addresses[0]));
    if (windows != NULL) {
        (void)pthread_mutex_init(&windows->lock, NULL);
        windows->window_bytes = piece_bytes;
        windows->count = count;
    }
    return windows;
}

static void region_end(struct kvk_device_cuda *cuda, struct kvk_region *region)
{
    struct region_cuda *own = region_of(region);
    if (region->windows != NULL) {
        (void)pthread_mutex_destroy(&region->windows->lock);
        free(region->windows);
    }
    table_close(own);
    (void)pthread_cond_destroy(&own->backed);
    free(own->slabs);
    free(own);
    *region = (struct kvk_region){.fd = -1};
    uint32_t before = atomic_fetch_sub(&cuda->region_count, 1);
    KVK_ASSERT(before > 0);
}

enum kvk_status kvk_cuda_alloc_at(struct kvk_device *device, uint32_t place, uint64_t size_bytes,
                                  uint64_t piece_bytes, const char *name, struct kvk_region *region,
                                  struct kvk_error *error)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    KVK_ASSERT(kvk_locks_held() == 0);
    (void)name;
    if (size_bytes == 0 || size_bytes > INT64_MAX) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "size_bytes",
                        "a region cannot have %llu bytes", (unsigned long long)size_bytes);
    }
    struct region_cuda *own = calloc(1, sizeof(*own));
    if (own == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a region");
    }
    own->export.fd = -1;
    (void)pthread_cond_init(&own->backed, NULL);
    own->gpu = &cuda->gpus[place % cuda->gpu_count];
    own->piece_bytes = piece_bytes == 0 ? size_bytes : piece_bytes;
    own->piece_count = (size_bytes + own->piece_bytes - 1) / own->piece_bytes;
    struct kvk_region made = {.size_bytes = size_bytes, .fd = -1, .slabs = &own->export};
    enum kvk_status status = KVK_OK;
    if (piece_bytes == 0) {
        status = memory_make(cuda, own->gpu, size_bytes, &made.address, error);
        atomic_store(&own->backed_bytes, status == KVK_OK ? size_bytes : 0);
    } else {
        made.windows = windows_create(own->piece_count, piece_bytes);
        if (made.windows == NULL) {
            status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a region");
        } else {
            table_make(own, size_bytes);
        }
    }
    atomic_fetch_add(&cuda->region_count, 1);
    if (status != KVK_OK) {
        region_end(cuda, &made);
        return status;
    }
    *region = made;
    return KVK_OK;
}

enum kvk_status kvk_cuda_alloc(struct kvk_device *device, uint64_t size_bytes, uint64_t piece_bytes,
                               const char *name, struct kvk_region *region, struct kvk_error *error)
{
    return kvk_cuda_alloc_at(device, 0, size_bytes, piece_bytes, name, region, error);
}

static void region_let_go(struct kvk_device *device, struct kvk_region *region, bool give_back)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    struct region_cuda *own = region_of(region);
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(region->size_bytes > 0);
    if (region->address != NULL) {
        memory_unmake(cuda, own->gpu, region->address);
    }
    for (uint32_t i = 0; i < own->slab_count; i++) {
        if (give_back) {
            memory_unmake(cuda, own->gpu, own->slabs[i].address);
        } else {
            kvk_cuda_range_remove(cuda, own->slabs[i].address);
        }
    }
    region_end(cuda, region);
}

void kvk_cuda_free(struct kvk_device *device, struct kvk_region *region)
{
    region_let_go(device, region, true);
}

/* What another process has open stays as it is until this one ends: it is given to nobody else. */
void kvk_cuda_leave(struct kvk_device *device, struct kvk_region *region)
{
    region_let_go(device, region, false);
}

enum kvk_status kvk_cuda_back(struct kvk_device *device, struct kvk_region *region, uint64_t offset,
                              uint64_t size_bytes, struct kvk_error *error)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    const struct region_cuda *own = region_of(region);
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(offset <= region->size_bytes && size_bytes <= region->size_bytes - offset);
    enum kvk_status status = KVK_OK;
    if (region->windows != NULL && size_bytes > 0) {
        uint64_t at = offset / own->piece_bytes;
        uint64_t end = (offset + size_bytes + own->piece_bytes - 1) / own->piece_bytes;
        backing_begin(region);
        while (at < end && status == KVK_OK) {
            uint64_t stop = at;
            while (stop < end && atomic_load(&region->windows->addresses[stop]) == NULL) {
                stop++;
            }
            if (stop > at) {
                status = slab_make(cuda, region, at, stop - at, error);
            }
            at = stop + 1;
        }
        backing_end(region);
    }
    return status;
}

/* Take one slab that lies whole in pieces [first, end) out of the region's list. */
static bool slab_take_out(struct kvk_region *region, uint64_t first, uint64_t end,
                          struct slab *slab)
{
    struct region_cuda *own = region_of(region);
    bool found = false;
    (void)pthread_mutex_lock(&region->windows->lock);
    for (uint32_t i = 0; i < own->slab_count && !found; i++) {
        const struct slab *at = &own->slabs[i];
        if (at->first_piece >= first && at->first_piece + at->piece_count <= end) {
            *slab = *at;
            entry_withdraw(own, slab);
            own->slabs[i] = own->slabs[--own->slab_count];
            atomic_fetch_sub(&own->backed_bytes, slab->piece_count * own->piece_bytes);
            found = true;
        }
    }
    (void)pthread_mutex_unlock(&region->windows->lock);
    return found;
}

enum kvk_status kvk_cuda_punch(struct kvk_device *device, struct kvk_region *region,
                               uint64_t offset, uint64_t size_bytes, struct kvk_error *error)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    struct region_cuda *own = region_of(region);
    struct slab slab;
    KVK_ASSERT(kvk_locks_held() == 0);
    (void)error;
    if (region->windows == NULL) {
        return KVK_OK; /* one run comes and goes as a whole */
    }
    uint64_t first = (offset + own->piece_bytes - 1) / own->piece_bytes;
    uint64_t end = (offset + size_bytes) / own->piece_bytes;
    while (slab_take_out(region, first, end, &slab)) {
        for (uint64_t i = 0; i < slab.piece_count; i++) {
            atomic_store(&region->windows->addresses[slab.first_piece + i], NULL);
        }
        memory_unmake(cuda, own->gpu, slab.address);
    }
    return KVK_OK;
}

uint64_t kvk_cuda_backed_bytes(struct kvk_device *device, const struct kvk_region *region)
{
    (void)device;
    return atomic_load(&region_of(region)->backed_bytes);
}

enum kvk_status kvk_cuda_export(struct kvk_device *device, const struct kvk_region *region,
                                struct kvk_export *export, struct kvk_error *error)
{
    (void)device;
    if (region->slabs->fd < 0) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "tier",
                        "this memory cannot be opened by other processes");
    }
    *export = (struct kvk_export){.kind = KVK_EXPORT_CUDA_IPC, .fd = region->slabs->fd};
    return KVK_OK;
}
