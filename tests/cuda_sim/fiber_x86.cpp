/* Switching fibers on x86-64: the registers that a call must keep, and the stack. */
#include "tests/cuda_sim/fiber.hpp"

#include <stdlib.h>

#include "tests/cuda_sim/fiber_stack.hpp"

extern "C" void kvk_sim_fiber_switch(void **from, void *to);

asm(".text\n"
    ".globl kvk_sim_fiber_switch\n"
    ".type kvk_sim_fiber_switch, @function\n"
    "kvk_sim_fiber_switch:\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n"
    ".size kvk_sim_fiber_switch, . - kvk_sim_fiber_switch\n");

#define KEPT_REGISTERS 6

namespace kvk_sim
{

void fiber_init(fiber *self, size_t stack_bytes)
{
    stack_make(self, stack_bytes);
}

void fiber_finish(fiber *self)
{
    stack_free(self);
}

void fiber_begin(fiber *self, void (*entry)(void))
{
    void **top = (void **)(self->stack + self->stack_bytes);

    *--top = nullptr; /* where a call would have pushed its way back: so the stack is aligned */
    *--top = (void *)entry;
    for (int i = 0; i < KEPT_REGISTERS; i++) {
        *--top = nullptr;
    }
    self->context = top;
}

void fiber_switch(fiber *from, fiber *to)
{
    __sanitizer_start_switch_fiber(&from->shadow, to->stack, to->stack_bytes);
    kvk_sim_fiber_switch(&from->context, to->context);
    __sanitizer_finish_switch_fiber(from->shadow, nullptr, nullptr);
}

void fiber_arrived(fiber *)
{
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

} // namespace kvk_sim
