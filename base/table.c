#include "base/table.h"

#include "base/assert.h"
#include "base/pages.h"

enum kvk_status kvk_table_init(struct kvk_table *table, uint32_t count_max)
{
    KVK_ASSERT(count_max > 0);
    KVK_ASSERT(count_max <= UINT32_C(1) << 30);
    size_t place_count = 8;
    while (place_count < (size_t)count_max * 2) {
        place_count *= 2;
    }
    *table = (struct kvk_table){.place_mask = place_count - 1, .count_max = count_max};
    table->entries = kvk_pages_create(place_count * sizeof(*table->entries));
    return table->entries != NULL ? KVK_OK : KVK_EXHAUSTED;
}

void kvk_table_finish(struct kvk_table *table)
{
    kvk_pages_destroy(table->entries, (table->place_mask + 1) * sizeof(*table->entries));
    *table = (struct kvk_table){0};
}

/* Where a key would like to be. Ids are often consecutive: mix, so that neighbours do not clump. */
static size_t home(const struct kvk_table *table, uint64_t key)
{
    key = (key ^ (key >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    key = (key ^ (key >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    return (size_t)(key ^ (key >> 32)) & table->place_mask;
}

/* The key's place, or the empty one where it would go. At least half are empty, so there is one. */
static size_t find(const struct kvk_table *table, uint64_t key)
{
    size_t place = home(table, key);
    while (table->entries[place].value != 0 && table->entries[place].key != key) {
        place = (place + 1) & table->place_mask;
    }
    return place;
}

static enum kvk_status put(struct kvk_table *table, uint64_t key, uintptr_t value)
{
    struct kvk_table_entry *entry = &table->entries[find(table, key)];
    if (entry->value != 0) {
        return KVK_EXISTS;
    }
    if (table->count == table->count_max) {
        return KVK_EXHAUSTED;
    }
    *entry = (struct kvk_table_entry){.key = key, .value = value};
    table->count++;
    return KVK_OK;
}

/* Close the gap: an entry after it moves in unless that would put it before its home. */
static void close_gap(struct kvk_table *table, size_t gap)
{
    size_t place = gap;
    for (;;) {
        place = (place + 1) & table->place_mask;
        if (table->entries[place].value == 0) {
            break;
        }
        size_t from_home = (place - home(table, table->entries[place].key)) & table->place_mask;
        size_t from_gap = (place - gap) & table->place_mask;
        if (from_home >= from_gap) {
            table->entries[gap] = table->entries[place];
            gap = place;
        }
    }
    table->entries[gap] = (struct kvk_table_entry){0};
}

static uintptr_t take(struct kvk_table *table, uint64_t key)
{
    size_t place = find(table, key);
    uintptr_t value = table->entries[place].value;
    if (value != 0) {
        close_gap(table, place);
        table->count--;
    }
    return value;
}

static uint32_t index_of(uintptr_t value)
{
    return value == 0 ? KVK_TABLE_NONE : (uint32_t)(value - 1);
}

enum kvk_status kvk_table_put(struct kvk_table *table, uint64_t key, void *pointer)
{
    KVK_ASSERT(pointer != NULL);
    return put(table, key, (uintptr_t)pointer);
}

enum kvk_status kvk_table_put_index(struct kvk_table *table, uint64_t key, uint32_t index)
{
    KVK_ASSERT(index != KVK_TABLE_NONE);
    return put(table, key, (uintptr_t)index + 1);
}

void *kvk_table_get(const struct kvk_table *table, uint64_t key)
{
    return (void *)table->entries[find(table, key)].value;
}

uint32_t kvk_table_get_index(const struct kvk_table *table, uint64_t key)
{
    return index_of(table->entries[find(table, key)].value);
}

void *kvk_table_remove(struct kvk_table *table, uint64_t key)
{
    return (void *)take(table, key);
}

uint32_t kvk_table_remove_index(struct kvk_table *table, uint64_t key)
{
    return index_of(take(table, key));
}

const struct kvk_table_entry *kvk_table_next(const struct kvk_table *table, size_t *place)
{
    while (*place <= table->place_mask) {
        const struct kvk_table_entry *entry = &table->entries[(*place)++];
        if (entry->value != 0) {
            return entry;
        }
    }
    return NULL;
}
