/* The table against a plain array, with keys that collide and removals in between. */
#include "base/table.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#include "base/random.h"

#define KEY_COUNT 300

/* Every present key is found, every absent one is not, and the walk sees each once. */
static void check(const struct kvk_table *table, const uint64_t *keys, const uint32_t *values)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < KEY_COUNT; i++) {
        cr_assert_eq(kvk_table_get_index(table, keys[i]), values[i], "key %u", i);
        count += values[i] != KVK_TABLE_NONE ? 1 : 0;
    }
    cr_assert_eq(table->count, count);
    size_t place = 0;
    uint32_t walked = 0;
    while (kvk_table_next(table, &place) != NULL) {
        walked++;
    }
    cr_assert_eq(walked, count);
}

static void run(uint64_t seed, uint32_t count_max)
{
    struct kvk_random random;
    struct kvk_table table;
    uint64_t keys[KEY_COUNT];
    uint32_t values[KEY_COUNT];
    kvk_random_init(&random, seed);
    cr_assert_eq(kvk_table_init(&table, count_max), KVK_OK);
    for (uint32_t i = 0; i < KEY_COUNT; i++) {
        keys[i] = seed % 2 == 0 ? i : kvk_random_next(&random);
        values[i] = KVK_TABLE_NONE;
    }
    for (uint32_t step = 0; step < 30000; step++) {
        uint32_t i = (uint32_t)kvk_random_below(&random, KEY_COUNT);
        bool full = table.count == count_max;
        /* Spells of filling and of emptying. */
        if (kvk_random_chance(&random, step / 2000 % 2 == 0 ? 0.7 : 0.3)) {
            enum kvk_status status = kvk_table_put_index(&table, keys[i], step);
            if (values[i] != KVK_TABLE_NONE) {
                cr_assert_eq(status, KVK_EXISTS);
            } else if (full) {
                cr_assert_eq(status, KVK_EXHAUSTED);
            } else {
                cr_assert_eq(status, KVK_OK);
                values[i] = step;
            }
        } else {
            cr_assert_eq(kvk_table_remove_index(&table, keys[i]), values[i]);
            values[i] = KVK_TABLE_NONE;
        }
        if (step % 16 == 0) {
            check(&table, keys, values);
        }
    }
    check(&table, keys, values);
    kvk_table_finish(&table);
}

Test(base_table, agrees_with_an_array)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        run(seed, 4);
        run(seed, 100);
        run(seed, KEY_COUNT);
    }
}

Test(base_table, holds_pointers)
{
    struct kvk_table table;
    int things[3];
    cr_assert_eq(kvk_table_init(&table, 2), KVK_OK);
    cr_assert_null(kvk_table_get(&table, 0));
    cr_assert_eq(kvk_table_put(&table, 0, &things[0]), KVK_OK);
    cr_assert_eq(kvk_table_put(&table, UINT64_MAX, &things[1]), KVK_OK);
    cr_assert_eq(kvk_table_put(&table, 5, &things[2]), KVK_EXHAUSTED);
    cr_assert_eq(kvk_table_put(&table, 0, &things[2]), KVK_EXISTS);
    cr_assert_eq(kvk_table_get(&table, 0), &things[0]);
    cr_assert_eq(kvk_table_get(&table, UINT64_MAX), &things[1]);
    cr_assert_eq(kvk_table_remove(&table, 0), &things[0]);
    cr_assert_null(kvk_table_remove(&table, 0));
    cr_assert_eq(kvk_table_put(&table, 5, &things[2]), KVK_OK);
    kvk_table_finish(&table);
}

/* The documented way to drop entries while walking reaches every entry. */
Test(base_table, drops_while_walking)
{
    struct kvk_table table;
    cr_assert_eq(kvk_table_init(&table, 1000), KVK_OK);
    for (uint32_t key = 0; key < 1000; key++) {
        cr_assert_eq(kvk_table_put_index(&table, key, key), KVK_OK);
    }
    size_t place = 0;
    const struct kvk_table_entry *entry = NULL;
    while ((entry = kvk_table_next(&table, &place)) != NULL) {
        if (entry->key % 3 != 0) {
            (void)kvk_table_remove_index(&table, entry->key);
            place--;
        }
    }
    for (uint32_t key = 0; key < 1000; key++) {
        uint32_t expected = key % 3 == 0 ? key : KVK_TABLE_NONE;
        cr_assert_eq(kvk_table_get_index(&table, key), expected);
    }
    kvk_table_finish(&table);
}
