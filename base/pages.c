/* Large tables on huge pages, and sparse ones on small pages. */
#include "base/pages.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/assert.h"

#define HUGE_PAGE_SIZE ((size_t)2 << 20)

static size_t rounded(size_t size)
{
    return (size + HUGE_PAGE_SIZE - 1) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
}

static void unmap(uint8_t *start, size_t size)
{
    if (size > 0) {
        int failed = munmap(start, size);
        KVK_ASSERT(failed == 0);
    }
}

void *kvk_pages_create(size_t size)
{
    if (size < HUGE_PAGE_SIZE) {
        return calloc(1, size);
    }
    /* One huge page more than needed, and what lies outside the alignment given back. */
    size_t mapped_size = rounded(size) + HUGE_PAGE_SIZE;
    uint8_t *mapped =
        mmap(NULL, mapped_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return NULL;
    }
    size_t before = rounded((uintptr_t)mapped) - (uintptr_t)mapped;
    unmap(mapped, before);
    unmap(mapped + before + rounded(size), mapped_size - before - rounded(size));
    /* Only advice: without it everything works, more slowly. */
    (void)madvise(mapped + before, rounded(size), MADV_HUGEPAGE);
    return mapped + before;
}

void kvk_pages_destroy(void *pages, size_t size)
{
    if (size < HUGE_PAGE_SIZE) {
        free(pages);
    } else if (pages != NULL) {
        unmap(pages, rounded(size));
    }
}

void *kvk_pages_create_sparse(size_t size)
{
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}

void kvk_pages_destroy_sparse(void *pages, size_t size)
{
    if (pages != NULL) {
        unmap(pages, size);
    }
}
