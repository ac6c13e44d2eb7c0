/*
 * Fibers: stacks that take turns on one thread of the processor. fiber_x86.cpp and fiber_any.cpp
 * are two ways to switch; one of them is built.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvk_sim
{

struct fiber {
    void *context;      /* where it goes on */
    uint8_t *stack;     /* its own, above a guard page; NULL: the thread's that began it all */
    size_t stack_bytes; /* without the guard page */
    void *shadow;       /* the address sanitizer's, while another runs */
};

/* Makes its stack. */
void fiber_init(fiber *self, size_t stack_bytes);
/* Not while it runs. */
void fiber_finish(fiber *self);

/* The next switch to it calls `entry`, which never returns, but switches away when it is done. */
void fiber_begin(fiber *self, void (*entry)(void));

/* Leave `from` and go on where `to` left off. */
void fiber_switch(fiber *from, fiber *to);

/* To be called first where a switch arrives for the first time. */
void fiber_arrived(fiber *self);

} // namespace kvk_sim
