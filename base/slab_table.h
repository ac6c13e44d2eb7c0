/*
 * How a process opens device memory that the daemon lends it: one table per region, a read-only
 * file that is passed over the side socket.
 *
 * Device memory has no descriptor. Each slab is an allocation of its own with a handle that CUDA
 * makes (cudaIpcOpenMemHandle() in the other process); slabs come and go while the process has the
 * table, so it looks a slot up here when it meets one that lies in no slab it has opened.
 *
 * The daemon writes an entry first and its slot_count last; it clears slot_count first. While a
 * process has the table no entry in it goes away: a slab that others could have opened is given to
 * nobody else.
 */
#ifndef KVK_BASE_SLAB_TABLE_H
#define KVK_BASE_SLAB_TABLE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define KVK_SLAB_TABLE_MAGIC UINT64_C(0x313042414c534b56) /* "VKSLAB01" in memory */
#define KVK_SLAB_HANDLE_SIZE 64

struct kvk_slab_entry {
    uint32_t slot_count; /* 0: nothing here. Read it with acquire */
    uint32_t reserved;
    uint64_t first_slot;
    uint8_t handle[KVK_SLAB_HANDLE_SIZE]; /* cudaIpcMemHandle_t; what it opens begins with the first
                                             slot, and slot n lies n x slot_bytes further */
};

struct kvk_slab_table {
    uint64_t magic;
    uint64_t slot_bytes;
    uint8_t device_uuid[16]; /* cudaDeviceProp.uuid of the GPU that has it */
    uint32_t entry_capacity;
    uint32_t entry_end; /* entries from here on were never written. Read it with acquire */
    struct kvk_slab_entry entries[];
};

static_assert(sizeof(struct kvk_slab_entry) == 80, "stored");
static_assert(offsetof(struct kvk_slab_table, entries) == 40, "stored");

/* The entry that has the slot, or NULL. No lock: read it again where the answer matters later. */
static inline const struct kvk_slab_entry *kvk_slab_table_find(const struct kvk_slab_table *table,
                                                               uint64_t slot)
{
    uint32_t end = __atomic_load_n(&table->entry_end, __ATOMIC_ACQUIRE);
    for (uint32_t i = 0; i < end && i < table->entry_capacity; i++) {
        const struct kvk_slab_entry *entry = &table->entries[i];
        uint32_t count = __atomic_load_n(&entry->slot_count, __ATOMIC_ACQUIRE);
        if (count > 0 && slot >= entry->first_slot && slot - entry->first_slot < count) {
            return entry;
        }
    }
    return NULL;
}

#endif
