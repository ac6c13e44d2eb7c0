/*
 * The CPU device's memory: sealed, sparse memfds that workers map.
 *
 * A region's file has its full size from the start and is sealed against shrinking, growing and
 * further seals: no process that maps it can pull pages from under another, and no mapping ever
 * meets the file's end (SIGBUS). Memory comes and goes by backing and punching ranges; after a
 * punch, mappings made before read zeros there. What a process writes, or even reads, in a range
 * that is not backed is faulted in and counts as backed.
 */
#ifndef KVK_GPU_MEMORY_CPU_H
#define KVK_GPU_MEMORY_CPU_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "gpu/device.h"

KVK_CHECKED enum kvk_status kvk_memory_cpu_alloc(uint64_t size_bytes, const char *name,
                                                 bool huge_pages, struct kvk_region *region,
                                                 struct kvk_error *error);

/* Gives all bytes back at once, even where another process still maps the file. */
void kvk_memory_cpu_free(struct kvk_region *region);

/* KVK_EXHAUSTED: the system has no such memory; nothing was backed. */
KVK_CHECKED enum kvk_status kvk_memory_cpu_back(struct kvk_region *region, uint64_t offset,
                                                uint64_t size_bytes, bool huge_pages,
                                                struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_memory_cpu_punch(struct kvk_region *region, uint64_t offset,
                                                 uint64_t size_bytes, struct kvk_error *error);
uint64_t kvk_memory_cpu_backed_bytes(const struct kvk_region *region);

#endif
