/* The CUDA device on the simulator: opening, slabs, and what other processes are told of them. */
#include <pthread.h>
#include <sys/mman.h>

#include "base/slab_table.h"
#include "tests/cuda_sim/device_house.h"

static void setup(void)
{
    device_house_open(2, 50, 64 * MIB);
}

TestSuite(cuda_memory, .init = setup, .fini = device_house_close);

Test(cuda_open, says_why_it_cannot)
{
    static const uint32_t twice[] = {1, 1};
    static const uint32_t far[] = {3};
    const struct kvk_device_cuda_options double_options = {.ordinals = twice, .ordinal_count = 2};
    const struct kvk_device_cuda_options far_options = {.ordinals = far, .ordinal_count = 1};
    const struct kvk_device_cuda_options many = {.ordinals = far, .ordinal_count = 17};
    struct kvk_sim_options sim = {.device_count = 0};
    struct kvk_error error;

    kvk_sim_reset(&sim);
    cr_assert_eq(kvk_device_cuda_open(NULL, &device, &error), KVK_UNAVAILABLE);
    cr_assert_not_null(strstr(error.text, "no CUDA driver"), "%s", error.text);
    sim.device_count = 2;
    kvk_sim_reset(&sim);
    cr_assert_eq(kvk_device_cuda_open(&double_options, &device, &error), KVK_INVALID);
    cr_assert_not_null(strstr(error.text, "GPU 1 twice"), "%s", error.text);
    cr_assert_eq(kvk_device_cuda_open(&far_options, &device, &error), KVK_UNAVAILABLE);
    cr_assert_not_null(strstr(error.text, "no GPU 3"), "%s", error.text);
    cr_assert_eq(kvk_device_cuda_open(&many, &device, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "device.gpus");
    kvk_sim_fail("cudaFuncGetAttributes", 1, cudaErrorNoKernelImageForDevice, false);
    cr_assert_eq(kvk_device_cuda_open(NULL, &device, &error), KVK_UNAVAILABLE);
    cr_assert_not_null(strstr(error.text, "cannot be used"), "%s", error.text);
    kvk_sim_fail("cudaStreamCreateWithFlags", 2, cudaErrorDevicesUnavailable, false);
    cr_assert_eq(kvk_device_cuda_open(NULL, &device, &error), KVK_UNAVAILABLE);
    cr_assert_eq(kvk_device_cuda_open(NULL, &device, &error), KVK_OK, "%s", error.text);
    device->ops->close(device);
}

Test(cuda_memory, says_what_it_is)
{
    struct kvk_device_info info;
    device->ops->info(device, &info);
    cr_assert_str_eq(info.name, "2 x simulated GPU");
    cr_assert_str_eq(info.path, "cuda_sm_90");
    cr_assert_eq(info.memory_bytes, 2 * 64 * MIB);
    cr_assert_not(device->ops->is_lost(device));
}

static bool is_filled(const uint8_t *bytes, uint64_t size_bytes, uint8_t value)
{
    for (uint64_t i = 0; i < size_bytes; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

/* What one space had in its slabs is never seen in another's. */
Test(cuda_memory, slabs_come_zeroed)
{
    uint8_t bytes[3 * 1000];
    struct kvk_error error;
    struct kvk_region region = region_make(device, 1000, 100, 6);
    cr_assert_null(region.address);
    cr_assert_null(kvk_region_at(&region, 6 * 1000), "nothing is backed there");
    memset(bytes, 0x5a, sizeof(bytes));
    copy_one(kvk_region_at(&region, 3 * 1000), bytes, sizeof(bytes));
    kvk_sim_peek(bytes, kvk_region_at(&region, 2 * 1000), sizeof(bytes));
    cr_assert(is_filled(bytes, 1000, 0));
    cr_assert(is_filled(bytes + 1000, 2000, 0x5a));
    cr_assert_eq(device->ops->backed_bytes(device, &region), 6000);

    cr_assert_eq(device->ops->punch(device, &region, 0, 6000, &error), KVK_OK);
    cr_assert_null(kvk_region_at(&region, 3 * 1000));
    cr_assert_eq(device->ops->backed_bytes(device, &region), 0);
    cr_assert_eq(kvk_sim_device_bytes(), 0);
    cr_assert_eq(device->ops->back(device, &region, 0, 6000, &error), KVK_OK);
    kvk_sim_peek(bytes, kvk_region_at(&region, 3 * 1000), sizeof(bytes));
    cr_assert(is_filled(bytes, sizeof(bytes), 0));
    device->ops->free(device, &region);
}

/* A place that is backed a second time, further, keeps what it has where it is. */
Test(cuda_memory, backing_further_moves_nothing)
{
    struct kvk_error error;
    struct kvk_region region = region_make(device, 4096, 64, 3);
    uint8_t *first = kvk_region_at(&region, 0);
    cr_assert_eq(device->ops->back(device, &region, 0, 8 * 4096, &error), KVK_OK);
    cr_assert_eq(kvk_region_at(&region, 0), first);
    cr_assert_not_null(kvk_region_at(&region, 7 * 4096));
    cr_assert_null(kvk_region_at(&region, 8 * 4096));
    cr_assert_eq(device->ops->backed_bytes(device, &region), 8 * 4096);
    /* Less than the place: the slab stays. */
    cr_assert_eq(device->ops->punch(device, &region, 0, 2 * 4096, &error), KVK_OK);
    cr_assert_eq(kvk_region_at(&region, 0), first);
    device->ops->free(device, &region);
}

static void *back_run(void *argument)
{
    struct kvk_error error;
    return device->ops->back(device, argument, 8 * 4096, 8 * 4096, &error) == KVK_OK ? NULL
                                                                                     : argument;
}

/* Several calls that want room in the same place make one slab: a second one would be what the
 * daemon uses, while other processes have the first. */
Test(cuda_memory, a_place_is_backed_once_whoever_asks)
{
    for (int round = 0; round < 20; round++) {
        struct kvk_region region = region_make(device, 4096, 64, 0);
        pthread_t threads[4];
        void *failed[4];
        for (int i = 0; i < 4; i++) {
            cr_assert_eq(pthread_create(&threads[i], NULL, back_run, &region), 0);
        }
        for (int i = 0; i < 4; i++) {
            (void)pthread_join(threads[i], &failed[i]);
            cr_assert_null(failed[i]);
        }
        cr_assert_eq(device->ops->backed_bytes(device, &region), 8 * 4096);
        cr_assert_eq(kvk_sim_device_bytes(), 2 * MIB, "a slab is a unit of 2 MiB");
        device->ops->free(device, &region);
    }
}

Test(cuda_memory, regions_are_dealt_out_to_the_gpus)
{
    struct kvk_region regions[2];
    struct kvk_error error;
    for (uint32_t shard = 0; shard < 2; shard++) {
        cr_assert_eq(
            device->ops->alloc_at(device, shard, 40 * MIB, MIB, "shard", &regions[shard], &error),
            KVK_OK);
        cr_assert_eq(device->ops->back(device, &regions[shard], 0, 40 * MIB, &error), KVK_OK,
                     "both together are more than one GPU has: %s", error.text);
    }
    device->ops->free(device, &regions[0]);
    device->ops->free(device, &regions[1]);
}

Test(cuda_memory, a_full_gpu_is_a_refusal)
{
    struct kvk_error error;
    struct kvk_region region = region_make(device, MIB, 256, 60);
    cr_assert_eq(device->ops->back(device, &region, 60 * MIB, 8 * MIB, &error), KVK_EXHAUSTED);
    cr_assert_not_null(strstr(error.text, "MemoryAllocation"), "%s", error.text);
    cr_assert_not(device->ops->is_lost(device));
    cr_assert_null(kvk_region_at(&region, 60 * MIB));
    cr_assert_eq(device->ops->backed_bytes(device, &region), 60 * MIB);
    cr_assert_eq(device->ops->back(device, &region, 60 * MIB, 4 * MIB, &error), KVK_OK, "%s",
                 error.text);
    device->ops->free(device, &region);
}

Test(cuda_memory, one_run_is_one_allocation)
{
    struct kvk_region region;
    struct kvk_error error;
    cr_assert_eq(device->ops->alloc(device, 65536, 0, "canary", &region, &error), KVK_OK);
    cr_assert_not_null(region.address);
    cr_assert_eq(region.fd, -1);
    uint8_t out[64];
    uint8_t back[64];
    memset(out, 0x77, sizeof(out));
    copy_one(region.address + 65536 - 64, out, 64);
    copy_one(back, region.address + 65536 - 64, 64);
    cr_assert_arr_eq(out, back, 64);
    device->ops->free(device, &region);
    cr_assert_eq(device->ops->alloc(device, 0, 0, "none", &region, &error), KVK_INVALID);
}

/* ---- What other processes are told ---- */

Test(cuda_memory, the_table_says_where_slots_are)
{
    struct kvk_region region = region_make(device, 4096, 1024, 8);
    struct kvk_export export;
    struct kvk_error error;
    cr_assert_eq(device->ops->export(device, &region, &export, &error), KVK_OK);
    cr_assert_eq(export.kind, KVK_EXPORT_CUDA_IPC);
    cr_assert_eq(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, export.fd, 0), MAP_FAILED,
                 "nobody else may write in it");
    struct kvk_slab_table *table = mmap(NULL, 4096, PROT_READ, MAP_SHARED, export.fd, 0);
    cr_assert_neq(table, MAP_FAILED);
    cr_assert_eq(table->magic, KVK_SLAB_TABLE_MAGIC);
    cr_assert_eq(table->slot_bytes, 4096);
    cr_assert_arr_eq(table->device_uuid, "kvkeep-sim-gpu-0", 16);

    const struct kvk_slab_entry *entry = kvk_slab_table_find(table, 7);
    cr_assert_not_null(entry);
    cr_assert_eq(entry->first_slot, 0);
    cr_assert_eq(entry->slot_count, 8);
    cr_assert_null(kvk_slab_table_find(table, 8));
    cr_assert_eq(device->ops->back(device, &region, 16 * 4096, 8 * 4096, &error), KVK_OK);
    cr_assert_eq(kvk_slab_table_find(table, 23)->first_slot, 16);
    cr_assert_eq(device->ops->punch(device, &region, 0, 8 * 4096, &error), KVK_OK);
    cr_assert_null(kvk_slab_table_find(table, 0));
    cr_assert_not_null(kvk_slab_table_find(table, 16));
    /* A place in the table is used again. */
    cr_assert_eq(device->ops->back(device, &region, 0, 8 * 4096, &error), KVK_OK);
    cr_assert_eq(table->entry_end, 2);
    device->ops->free(device, &region);
    (void)munmap(table, 4096);
}

/* A platform that lends nothing serves all the same. */
Test(cuda_memory, without_handles_the_memory_is_the_daemons_alone)
{
    kvk_sim_fail("cudaIpcGetMemHandle", 1, cudaErrorNotSupported, false);
    struct kvk_region region = region_make(device, 4096, 64, 8);
    struct kvk_slab_table *table = mmap(NULL, 4096, PROT_READ, MAP_SHARED, region.slabs->fd, 0);
    cr_assert_null(kvk_slab_table_find(table, 0));
    cr_assert_not_null(kvk_region_at(&region, 0));
    device->ops->free(device, &region);
    (void)munmap(table, 4096);
}

/* ---- Memory of the host ---- */

Test(cuda_memory, what_the_host_backs_is_locked_until_it_goes)
{
    struct kvk_error error;
    struct kvk_region region = region_make(host, 8192, 1024, 16); /* by windows of 1 MiB */
    cr_assert_not_null(region.windows);
    cr_assert_eq(kvk_sim_pinned_bytes(), 16 * 8192);
    /* More of the same place: what is locked stays so. */
    cr_assert_eq(host->ops->back(host, &region, 0, 32 * 8192, &error), KVK_OK);
    cr_assert_eq(kvk_sim_pinned_bytes(), 32 * 8192);
    cr_assert_eq(kvk_sim_call_count("cudaHostRegister"), 2);
    cr_assert_eq(host->ops->punch(host, &region, 0, 32 * 8192, &error), KVK_OK);
    cr_assert_eq(kvk_sim_pinned_bytes(), 0);
    cr_assert_eq(host->ops->back(host, &region, 0, 512 * 8192, &error), KVK_OK);
    cr_assert_geq(kvk_sim_pinned_bytes(), 512 * 8192);
    host->ops->free(host, &region);
    cr_assert_eq(kvk_sim_pinned_bytes(), 0);
}

Test(cuda_memory, what_cannot_be_locked_is_copied_all_the_same)
{
    kvk_sim_fail("cudaHostRegister", 1, cudaErrorNotSupported, false);
    struct kvk_region from = region_make(host, 4096, 512, 16);
    struct kvk_region to = region_make(device, 4096, 512, 16);
    cr_assert_eq(kvk_sim_call_count("cudaHostRegister"), 1);
    cr_assert_eq(kvk_sim_pinned_bytes(), 0);
    uint8_t *bytes = kvk_region_at(&from, 0);
    uint8_t back[16 * 4096];
    for (uint32_t i = 0; i < sizeof(back); i++) {
        bytes[i] = (uint8_t)(i * 7 + i / 256);
    }
    copy_one(kvk_region_at(&to, 0), bytes, sizeof(back));
    kvk_sim_peek(back, kvk_region_at(&to, 0), sizeof(back));
    cr_assert_arr_eq(back, bytes, sizeof(back));
    host->ops->free(host, &from);
    device->ops->free(device, &to);
}
