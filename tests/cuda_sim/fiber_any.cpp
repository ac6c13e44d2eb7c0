/* Switching fibers where there is no way of our own: by the C library, which asks the kernel each
 * time and so takes ten times as long. */
#include "tests/cuda_sim/fiber.hpp"

#include <stdlib.h>
#include <ucontext.h>

#include "tests/cuda_sim/fiber_stack.hpp"

namespace kvk_sim
{

static ucontext_t *context_of(fiber *self)
{
    if (self->context == nullptr) {
        self->context = calloc(1, sizeof(ucontext_t));
        if (self->context == nullptr) {
            abort();
        }
    }
    return (ucontext_t *)self->context;
}

void fiber_init(fiber *self, size_t stack_bytes)
{
    stack_make(self, stack_bytes);
}

void fiber_finish(fiber *self)
{
    stack_free(self);
    free(self->context);
    self->context = nullptr;
}

void fiber_begin(fiber *self, void (*entry)(void))
{
    ucontext_t *context = context_of(self);

    if (getcontext(context) != 0) {
        abort();
    }
    context->uc_stack.ss_sp = self->stack;
    context->uc_stack.ss_size = self->stack_bytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}

void fiber_switch(fiber *from, fiber *to)
{
    __sanitizer_start_switch_fiber(&from->shadow, to->stack, to->stack_bytes);
    if (swapcontext(context_of(from), context_of(to)) != 0) {
        abort();
    }
    __sanitizer_finish_switch_fiber(from->shadow, nullptr, nullptr);
}

void fiber_arrived(fiber *)
{
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

} // namespace kvk_sim
