/*
 * How much memory there is for this process: what the machine has, and what the control groups
 * that it is in allow, version 1 or 2. Whoever takes more is not told so: the system ends some
 * process, not always that one.
 */
#ifndef KVK_BASE_MACHINE_MEMORY_H
#define KVK_BASE_MACHINE_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

struct kvk_machine_memory {
    uint64_t limit_bytes;     /* of the machine, or of a control group where that is less */
    uint64_t available_bytes; /* that can still be taken, by the system's estimate: what it can give
                                 back at once, as cached files, counts as available */
    bool is_group;            /* limit_bytes is a control group's */
};

/* From the files of /proc and /sys below `root` ("" is the real one). False: they tell nothing.
 * Reads some small files: not with a lock held. */
bool kvk_machine_memory(const char *root, struct kvk_machine_memory *memory);

#endif
