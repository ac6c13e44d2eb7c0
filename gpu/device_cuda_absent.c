/* The CUDA device of a build without CUDA: it says so. */
#include "gpu/device_cuda.h"

#include "base/assert.h"

enum kvk_status kvk_device_cuda_open(const struct kvk_device_cuda_options *options,
                                     struct kvk_device **device, struct kvk_error *error)
{
    (void)options;
    (void)device;
    return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "device.kind",
                    "this kvkeepd was built without CUDA");
}

const struct kvk_memory_watch *kvk_device_cuda_watch(struct kvk_device *device)
{
    (void)device;
    KVK_UNREACHABLE(); /* nobody was given such a device */
}

bool kvk_device_cuda_is_built(void)
{
    return false;
}
