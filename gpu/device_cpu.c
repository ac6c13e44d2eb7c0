#include "gpu/device.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/lock.h"
#include "gpu/attend_cpu.h"
#include "gpu/copy_cpu.h"
#include "gpu/memory_cpu.h"
#include "gpu/threads.h"

#define WINDOW_BYTES_DEFAULT (UINT64_C(1) << 30)

/* The CPU device: a thin table over its memory, its copies and its attention. */
struct device_cpu {
    struct kvk_device device; /* first: a kvk_device pointer is one to this */
    const struct kvk_attend_kernel *kernel;
    struct kvk_threads *attend_threads; /* ours */
    struct kvk_copy_cpu copy;
    struct kvk_memory_cpu_wishes wishes;
    const struct kvk_memory_watch *watch; /* borrowed; NULL: nobody */
    _Atomic uint32_t region_count;        /* given out and not freed */
};

static struct device_cpu *device_of(struct kvk_device *device)
{
    /* Every operation may block. */
    KVK_ASSERT(kvk_locks_held() == 0);
    return (struct device_cpu *)device;
}

static void cpu_info(struct kvk_device *device, struct kvk_device_info *info)
{
    const struct device_cpu *cpu = (const struct device_cpu *)device;

    *info = (struct kvk_device_info){.thread_count = kvk_threads_count(cpu->attend_threads)};
    (void)snprintf(info->name, sizeof(info->name), "cpu");
    (void)snprintf(info->path, sizeof(info->path), "%s", kvk_attend_kernel_name(cpu->kernel));
}

static void cpu_close(struct kvk_device *device)
{
    struct device_cpu *cpu = device_of(device);

    KVK_ASSERT(atomic_load(&cpu->region_count) == 0);
    kvk_copy_cpu_finish(&cpu->copy);
    kvk_threads_destroy(cpu->attend_threads);
    free(cpu);
}

/* Tell who watches of every run of addresses that shows a part of the range: with windows, what
 * lies where two meet has two addresses. */
static void watch_tell(const struct kvk_region *region, uint64_t offset, uint64_t size_bytes,
                       void (*tell)(void *context, void *address, uint64_t size_bytes),
                       void *context)
{
    const struct kvk_windows *windows = region->windows;
    if (windows == NULL) {
        tell(context, region->address + offset, size_bytes);
        return;
    }
    uint64_t end = offset + size_bytes;
    uint64_t first = offset > windows->reach_bytes ? offset - windows->reach_bytes : 0;
    for (uint64_t i = first / windows->window_bytes;
         i < windows->count && i * windows->window_bytes < end; i++) {
        uint8_t *address = atomic_load(&windows->addresses[i]);
        uint64_t begin = i * windows->window_bytes;
        uint64_t stop = begin + windows->window_bytes + windows->reach_bytes;
        uint64_t from = offset > begin ? offset : begin;
        stop = end < stop ? end : stop;
        if (address != NULL && from < stop) {
            tell(context, address + (from - begin), stop - from);
        }
    }
}

static void watch_leaving(const struct device_cpu *cpu, const struct kvk_region *region,
                          uint64_t offset, uint64_t size_bytes)
{
    if (cpu->watch != NULL && size_bytes > 0) {
        watch_tell(region, offset, size_bytes, cpu->watch->leaving, cpu->watch->context);
    }
}

static enum kvk_status cpu_alloc(struct kvk_device *device, uint64_t size_bytes,
                                 uint64_t piece_bytes, const char *name, struct kvk_region *region,
                                 struct kvk_error *error)
{
    struct device_cpu *cpu = device_of(device);

    enum kvk_status status =
        kvk_memory_cpu_alloc(size_bytes, piece_bytes, name, &cpu->wishes, region, error);
    if (status == KVK_OK) {
        atomic_fetch_add(&cpu->region_count, 1);
    }
    return status;
}

static enum kvk_status cpu_alloc_public(struct kvk_device *device, uint64_t size_bytes,
                                        const char *name, struct kvk_region *region,
                                        struct kvk_error *error)
{
    struct device_cpu *cpu = device_of(device);

    enum kvk_status status =
        kvk_memory_cpu_alloc_public(size_bytes, name, &cpu->wishes, region, error);
    if (status == KVK_OK) {
        atomic_fetch_add(&cpu->region_count, 1);
    }
    return status;
}

static void cpu_free(struct kvk_device *device, struct kvk_region *region)
{
    struct device_cpu *cpu = device_of(device);

    watch_leaving(cpu, region, 0, region->size_bytes);
    kvk_memory_cpu_free(region);
    uint32_t before = atomic_fetch_sub(&cpu->region_count, 1);
    KVK_ASSERT(before > 0);
}

static enum kvk_status cpu_adopt(struct kvk_device *device, int fd, uint64_t size_bytes,
                                 uint64_t piece_bytes, struct kvk_region *region,
                                 struct kvk_error *error)
{
    struct device_cpu *cpu = device_of(device);

    enum kvk_status status =
        kvk_memory_cpu_adopt(fd, size_bytes, piece_bytes, &cpu->wishes, region, error);
    if (status == KVK_OK) {
        atomic_fetch_add(&cpu->region_count, 1);
    }
    return status;
}

static void cpu_leave(struct kvk_device *device, struct kvk_region *region)
{
    struct device_cpu *cpu = device_of(device);

    watch_leaving(cpu, region, 0, region->size_bytes);
    kvk_memory_cpu_leave(region);
    uint32_t before = atomic_fetch_sub(&cpu->region_count, 1);
    KVK_ASSERT(before > 0);
}

static enum kvk_status cpu_back(struct kvk_device *device, struct kvk_region *region,
                                uint64_t offset, uint64_t size_bytes, struct kvk_error *error)
{
    struct device_cpu *cpu = device_of(device);

    enum kvk_status status = kvk_memory_cpu_back(region, offset, size_bytes, &cpu->wishes, error);
    if (status == KVK_OK && cpu->watch != NULL && size_bytes > 0) {
        watch_tell(region, offset, size_bytes, cpu->watch->backed, cpu->watch->context);
    }
    return status;
}

static enum kvk_status cpu_punch(struct kvk_device *device, struct kvk_region *region,
                                 uint64_t offset, uint64_t size_bytes, struct kvk_error *error)
{
    watch_leaving(device_of(device), region, offset, size_bytes);
    return kvk_memory_cpu_punch(region, offset, size_bytes, error);
}

static uint64_t cpu_backed_bytes(struct kvk_device *device, const struct kvk_region *region)
{
    (void)device;
    return kvk_memory_cpu_backed_bytes(region);
}

static enum kvk_status cpu_copy(struct kvk_device *device, const struct kvk_copy *copies,
                                uint32_t copy_count, struct kvk_error *error)
{
    struct device_cpu *cpu = device_of(device);

    (void)error; /* memory to memory: nothing can fail */
    kvk_copy_cpu_run(&cpu->copy, copies, copy_count);
    return KVK_OK;
}

static enum kvk_status cpu_attend(struct kvk_device *device, const struct kvk_attend *attend,
                                  struct kvk_error *error)
{
    struct device_cpu *cpu = device_of(device);

    enum kvk_status status = kvk_attend_check(attend, error);
    if (status != KVK_OK) {
        return status;
    }
    return kvk_attend_cpu_run(cpu->kernel, cpu->attend_threads, attend, error);
}

static enum kvk_status cpu_export(struct kvk_device *device, const struct kvk_region *region,
                                  struct kvk_export *export, struct kvk_error *error)
{
    (void)device;
    (void)error;
    *export = (struct kvk_export){.kind = KVK_EXPORT_MEMFD, .fd = region->fd};
    return KVK_OK;
}

static const struct kvk_device_ops cpu_ops = {
    .info = cpu_info,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .adopt = cpu_adopt,
    .leave = cpu_leave,
    .back = cpu_back,
    .punch = cpu_punch,
    .backed_bytes = cpu_backed_bytes,
    .copy = cpu_copy,
    .attend = cpu_attend,
    .export = cpu_export,
    .alloc_public = cpu_alloc_public,
};

/* Processors that this process may run on: a container often has fewer than the machine. */
static uint32_t processor_count(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return (uint32_t)CPU_COUNT(&set);
    }
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (uint32_t)online : 1;
}

static enum kvk_status thread_count_check(const char *field, uint32_t count,
                                          struct kvk_error *error)
{
    if (count > KVK_THREAD_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, count,
                              KVK_THREAD_COUNT_MAX, "%u threads, more than %u", count,
                              KVK_THREAD_COUNT_MAX);
    }
    return KVK_OK;
}

enum kvk_status kvk_device_cpu_open(const struct kvk_device_cpu_options *options,
                                    struct kvk_device **device, struct kvk_error *error)
{
    static const struct kvk_device_cpu_options defaults;

    if (options == NULL) {
        options = &defaults;
    }
    enum kvk_status status =
        thread_count_check("attend_thread_count", options->attend_thread_count, error);
    if (status == KVK_OK) {
        status = thread_count_check("copy_thread_count", options->copy_thread_count, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    const struct kvk_attend_kernel *kernel = kvk_attend_kernel_find(options->path);
    if (kernel == NULL) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "path",
                        "this processor has no attention kernels of that name");
    }
    struct device_cpu *cpu = calloc(1, sizeof(*cpu));
    if (cpu == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a device");
    }
    cpu->device.ops = &cpu_ops;
    cpu->kernel = kernel;
    cpu->watch = options->watch;
    cpu->wishes = (struct kvk_memory_cpu_wishes){
        .window_bytes = options->window_bytes == 0 ? WINDOW_BYTES_DEFAULT : options->window_bytes,
        .huge_pages = options->huge_pages,
        .interleave = options->interleave,
        .lock = options->lock_memory};
    uint32_t thread_count = options->attend_thread_count;
    if (thread_count == 0) {
        thread_count = processor_count();
    }
    status = kvk_threads_create(thread_count, "kvk-attend", &cpu->attend_threads, error);
    if (status != KVK_OK) {
        goto fail_threads;
    }
    status = kvk_copy_cpu_init(&cpu->copy, options, error);
    if (status != KVK_OK) {
        goto fail_copy;
    }
    *device = &cpu->device;
    return KVK_OK;

fail_copy:
    kvk_threads_destroy(cpu->attend_threads);
fail_threads:
    free(cpu);
    return status;
}
