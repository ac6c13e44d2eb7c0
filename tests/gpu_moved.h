/*
 * Attention over pages that a test has in the processor's memory, by a device that has its own:
 * they are copied there for the call. One item at a time.
 */
#ifndef KVK_TESTS_GPU_MOVED_H
#define KVK_TESTS_GPU_MOVED_H

#include "tests/unit/gpu_case.h"

#define GPU_MOVED_PAGES_MAX 512

/* Copies each page once, however often the table names it in a row. */
static inline enum kvk_status gpu_moved_pages(struct kvk_device *gpu,
                                              const struct kvk_attend *attend,
                                              const struct kvk_region *region,
                                              const void *pages[GPU_MOVED_PAGES_MAX],
                                              struct kvk_error *error)
{
    const struct kvk_attend_item *item = &attend->items[0];
    uint64_t bytes = gpu_case_page_bytes(attend);
    enum kvk_status status = KVK_OK;
    uint64_t slot = 0;

    for (uint32_t i = 0; i < item->page_count && status == KVK_OK; i++) {
        if (item->pages[i] == NULL) {
            pages[i] = NULL;
        } else if (i > 0 && item->pages[i] == item->pages[i - 1]) {
            pages[i] = pages[i - 1];
        } else {
            const struct kvk_copy copy = {.target = kvk_region_at(region, slot++ * bytes),
                                          .source = item->pages[i],
                                          .size_bytes = bytes};
            status = gpu->ops->copy(gpu, &copy, 1, error);
            pages[i] = copy.target;
        }
    }
    return status;
}

/* As trap_target.attend: the context is the device. */
static inline enum kvk_status gpu_moved_attend(void *context, const struct kvk_attend *attend,
                                               struct kvk_error *error)
{
    static const void *pages[GPU_MOVED_PAGES_MAX];
    struct kvk_device *gpu = context;
    struct kvk_attend_item item = attend->items[0];
    struct kvk_attend asked = *attend;
    struct kvk_region region;
    uint64_t bytes = gpu_case_page_bytes(attend);
    struct kvk_error own; /* the caller may want none */

    KVK_ASSERT(attend->item_count == 1 && item.page_count <= GPU_MOVED_PAGES_MAX);
    error = error == NULL ? &own : error;
    if (item.page_count == 0) {
        return gpu->ops->attend(gpu, attend, error);
    }
    enum kvk_status status = gpu->ops->alloc(gpu, bytes * (item.page_count + UINT64_C(1)), bytes,
                                             "pages", &region, error);
    if (status != KVK_OK) {
        return status;
    }
    status = gpu->ops->back(gpu, &region, 0, bytes * item.page_count, error);
    if (status == KVK_OK) {
        status = gpu_moved_pages(gpu, attend, &region, pages, error);
    }
    if (status == KVK_OK) {
        item.pages = pages;
        asked.items = &item;
        status = gpu->ops->attend(gpu, &asked, error);
    }
    gpu->ops->free(gpu, &region);
    return status;
}

#endif
