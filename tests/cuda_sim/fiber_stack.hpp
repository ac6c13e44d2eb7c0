/* What both ways to switch fibers share: stacks, and telling the address sanitizer of them. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/cuda_sim/fiber.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
static inline void __sanitizer_start_switch_fiber(void **, const void *, size_t)
{
}
static inline void __sanitizer_finish_switch_fiber(void *, const void **, size_t *)
{
}
#endif

namespace kvk_sim
{

static inline void stack_make(fiber *self, size_t stack_bytes)
{
    size_t guard = (size_t)sysconf(_SC_PAGESIZE);
    void *memory = mmap(nullptr, guard + stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
        perror("cuda_sim: no memory for a stack");
        abort();
    }
    self->stack = (uint8_t *)memory + guard;
    self->stack_bytes = stack_bytes;
}

static inline void stack_free(fiber *self)
{
    size_t guard = (size_t)sysconf(_SC_PAGESIZE);

    if (munmap(self->stack - guard, guard + self->stack_bytes) != 0) {
        abort();
    }
    self->stack = nullptr;
}

} // namespace kvk_sim
