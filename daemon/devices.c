#include "daemon/devices.h"

#include "base/bytes.h"
#include "base/log.h"
#include "base/machine_memory.h"
#include "gpu/device_cuda.h"

/* The GPUs, or none where that is no reason not to start. */
static enum kvk_status gpus_open(const struct kvk_config *config, struct kvk_device **device,
                                 struct kvk_error *error)
{
    const struct kvk_device_cuda_options options = {.ordinals = config->device_gpus,
                                                    .ordinal_count = config->device_gpu_count};
    struct kvk_device_info info;
    char text[KVK_ERROR_TEXT_SIZE];
    enum kvk_status status = kvk_device_cuda_open(&options, device, error);
    if (status == KVK_OK) {
        (*device)->ops->info(*device, &info);
        kvk_log(KVK_LOG_INFO, "gpus", "name=%s kernels=%s bytes=%llu",
                kvk_log_text(text, sizeof(text), info.name), info.path,
                (unsigned long long)info.memory_bytes);
        if (config->device_bytes > info.memory_bytes) {
            kvk_log(KVK_LOG_WARNING, "gpus_too_small",
                    "text=\"tiers.device_bytes is more than the GPUs have\"");
        }
        return KVK_OK;
    }
    if (config->device_required || status == KVK_INVALID) {
        return status;
    }
    kvk_log(KVK_LOG_WARNING, "no_gpu", "text=%s serves_on=cpu",
            kvk_log_text(text, sizeof(text), error->text));
    *device = NULL;
    return KVK_OK;
}

/* Tiers that can never be had would be somebody's end when they fill. */
static enum kvk_status memory_check(const struct kvk_config *config, uint64_t device_bytes,
                                    struct kvk_error *error)
{
    struct kvk_machine_memory memory;
    char wanted[KVK_BYTES_TEXT_SIZE];
    char there[KVK_BYTES_TEXT_SIZE];
    uint64_t sum = device_bytes + config->host_bytes;
    if (config->overcommit || !kvk_machine_memory("", &memory) || sum <= memory.limit_bytes) {
        return KVK_OK;
    }
    const char *field = config->host_bytes > 0 ? "tiers.host_bytes" : "tiers.device_bytes";
    return kvk_fail_limit(
        error, KVK_INVALID, KVK_CAUSE_FIELD, field, sum, memory.limit_bytes,
        "%s%s takes %s, but %s has %s: make it smaller, or set tiers.overcommit",
        device_bytes > 0 && config->host_bytes > 0 ? "tiers.device_bytes with " : "", field,
        kvk_bytes_text(sum, wanted), memory.is_group ? "the control group" : "the machine",
        kvk_bytes_text(memory.limit_bytes, there));
}

enum kvk_status kvk_devices_check_memory(const struct kvk_config *config, struct kvk_error *error)
{
    return memory_check(config, config->device_kind == KVK_DEVICE_CUDA ? 0 : config->device_bytes,
                        error);
}

enum kvk_status kvk_devices_open(const struct kvk_config *config, struct kvk_device **device,
                                 struct kvk_device **host, struct kvk_error *error)
{
    struct kvk_device_cpu_options options = {.attend_thread_count = config->attend_threads,
                                             .huge_pages = config->huge_pages,
                                             .interleave = config->interleave_memory,
                                             .lock_memory = config->lock_memory};
    enum kvk_status status = KVK_OK;
    *device = NULL;
    *host = NULL;
    if (config->device_bytes > 0 && config->device_kind == KVK_DEVICE_CUDA) {
        status = gpus_open(config, device, error);
        if (status == KVK_OK && *device != NULL) {
            status = memory_check(config, 0, error);
        }
        if (status == KVK_OK && *device != NULL) {
            struct kvk_device_cpu_options locked = options;
            locked.watch = kvk_device_cuda_watch(*device);
            return kvk_device_cpu_open(&locked, host, error);
        }
    }
    if (status == KVK_OK && *device == NULL) {
        status = memory_check(config, config->device_bytes, error);
    }
    if (status == KVK_OK && config->device_bytes > 0) {
        status = kvk_device_cpu_open(&options, device, error);
    }
    if (status == KVK_OK && config->host_bytes > 0) {
        status = kvk_device_cpu_open(&options, host, error);
    }
    return status;
}
