#include "base/slots.h"

#include <stdlib.h>

#include "base/assert.h"

#define WORD_BITS 64U
#define SLABS_PER_POOL 64U

/* ---- Pool ---- */

void kvk_pool_init(struct kvk_pool *pool, uint64_t limit_bytes)
{
    *pool = (struct kvk_pool){.limit_bytes = limit_bytes};
}

uint64_t kvk_pool_free_bytes(const struct kvk_pool *pool)
{
    KVK_ASSERT(pool->slab_bytes <= pool->limit_bytes);
    uint64_t left = pool->limit_bytes - pool->slab_bytes;
    /* Strays come without asking and may exceed what is left. */
    return pool->charge_bytes < left ? left - pool->charge_bytes : 0;
}

/* ---- Lists of slabs by fullness ---- */

static uint32_t slab_level(const struct kvk_slab *slab)
{
    if (slab->used_count == 0) {
        return 0;
    }
    if (slab->used_count == slab->slot_count) {
        return KVK_ARENA_LEVEL_COUNT;
    }
    uint64_t share = (uint64_t)slab->used_count * (KVK_ARENA_LEVEL_COUNT - 1) / slab->slot_count;
    return 1 + (uint32_t)share;
}

static void list_add(struct kvk_arena *arena, uint32_t number)
{
    struct kvk_slab *slab = &arena->slabs[number];
    slab->level = slab_level(slab);
    slab->previous = KVK_SLAB_NONE;
    slab->next = KVK_SLAB_NONE;
    if (slab->level == KVK_ARENA_LEVEL_COUNT) {
        return;
    }
    slab->next = arena->levels[slab->level];
    if (slab->next != KVK_SLAB_NONE) {
        arena->slabs[slab->next].previous = number;
    }
    arena->levels[slab->level] = number;
}

static void list_remove(struct kvk_arena *arena, uint32_t number)
{
    struct kvk_slab *slab = &arena->slabs[number];
    if (slab->level == KVK_ARENA_LEVEL_COUNT) {
        return;
    }
    if (slab->previous != KVK_SLAB_NONE) {
        arena->slabs[slab->previous].next = slab->next;
    } else {
        KVK_ASSERT(arena->levels[slab->level] == number);
        arena->levels[slab->level] = slab->next;
    }
    if (slab->next != KVK_SLAB_NONE) {
        arena->slabs[slab->next].previous = slab->previous;
    }
}

static void list_update(struct kvk_arena *arena, uint32_t number)
{
    if (slab_level(&arena->slabs[number]) != arena->slabs[number].level) {
        list_remove(arena, number);
        list_add(arena, number);
    }
}

/* ---- Bits ---- */

static uint64_t *slab_free_bits(const struct kvk_arena *arena, uint32_t number)
{
    return arena->free_bits + (size_t)number * arena->slab_words;
}

static uint64_t *slab_summary_bits(const struct kvk_arena *arena, uint32_t number)
{
    return arena->summary_bits + (size_t)number * arena->slab_summaries;
}

/* Set the lowest `count` bits of `words`, which are all zero. */
static void bits_fill(uint64_t *words, uint32_t count)
{
    uint32_t whole = count / WORD_BITS;
    for (uint32_t i = 0; i < whole; i++) {
        words[i] = UINT64_MAX;
    }
    if (count % WORD_BITS != 0) {
        words[whole] = (UINT64_C(1) << (count % WORD_BITS)) - 1;
    }
}

/* Clear the lowest `count` bits of `words`, which must all be set. */
static void bits_clear(uint64_t *words, uint32_t count)
{
    uint32_t whole = count / WORD_BITS;
    for (uint32_t i = 0; i < whole; i++) {
        KVK_ASSERT(words[i] == UINT64_MAX);
        words[i] = 0;
    }
    if (count % WORD_BITS != 0) {
        KVK_ASSERT(words[whole] == (UINT64_C(1) << (count % WORD_BITS)) - 1);
        words[whole] = 0;
    }
}

static uint32_t words_for(uint32_t bit_count)
{
    return bit_count / WORD_BITS + (bit_count % WORD_BITS != 0 ? 1 : 0);
}

/* ---- Arena ---- */

static void choose_sizes(struct kvk_arena *arena)
{
    uint64_t slab_bytes = arena->pool->limit_bytes / SLABS_PER_POOL;
    if (slab_bytes > KVK_SLAB_BYTES_MAX) {
        slab_bytes = KVK_SLAB_BYTES_MAX;
    }
    uint64_t slab_slots = slab_bytes / arena->slot_bytes;
    arena->slab_slots = slab_slots == 0 ? 1 : (uint32_t)slab_slots;

    uint64_t slots = arena->pool->limit_bytes / arena->slot_bytes;
    uint64_t places = slots / arena->slab_slots + (slots % arena->slab_slots != 0 ? 1 : 0);
    if (arena->slab_slots > 1) {
        places += places / 4 + 1; /* only then can a slab be short */
    }
    uint64_t places_max = (KVK_SLOT_NONE - 1) / arena->slab_slots;
    arena->slab_capacity = (uint32_t)(places < places_max ? places : places_max);
    arena->slab_words = words_for(arena->slab_slots);
    arena->slab_summaries = words_for(arena->slab_words);
}

/* Every slot a slab of its own: none is ever short, so that there are places for all. */
static void narrow_sizes(struct kvk_arena *arena, uint32_t slot_count)
{
    arena->slab_slots = 1;
    arena->slab_words = 1;
    arena->slab_summaries = 1;
    arena->slab_capacity = slot_count;
}

static enum kvk_status arena_init(struct kvk_arena *arena, struct kvk_pool *pool,
                                  uint64_t slot_bytes, uint32_t slot_count)
{
    KVK_ASSERT(slot_bytes > 0);
    *arena = (struct kvk_arena){
        .pool = pool,
        .slot_bytes = slot_bytes,
        .place_returned = KVK_SLAB_NONE,
    };
    choose_sizes(arena);
    if (slot_count > 0) {
        narrow_sizes(arena, slot_count);
    }
    for (uint32_t level = 0; level < KVK_ARENA_LEVEL_COUNT; level++) {
        arena->levels[level] = KVK_SLAB_NONE;
    }
    if (arena->slab_capacity == 0) {
        return KVK_OK; /* not one slot fits: every grow says so */
    }
    arena->slabs = calloc(arena->slab_capacity, sizeof(*arena->slabs));
    arena->free_bits = calloc(arena->slab_capacity, arena->slab_words * sizeof(uint64_t));
    arena->summary_bits = calloc(arena->slab_capacity, arena->slab_summaries * sizeof(uint64_t));
    if (arena->slabs == NULL || arena->free_bits == NULL || arena->summary_bits == NULL) {
        kvk_arena_finish(arena);
        return KVK_EXHAUSTED;
    }
    return KVK_OK;
}

enum kvk_status kvk_arena_init(struct kvk_arena *arena, struct kvk_pool *pool, uint64_t slot_bytes)
{
    return arena_init(arena, pool, slot_bytes, 0);
}

enum kvk_status kvk_arena_init_for(struct kvk_arena *arena, struct kvk_pool *pool,
                                   uint64_t slot_bytes, uint32_t slot_count)
{
    KVK_ASSERT(slot_count > 0);
    return arena_init(arena, pool, slot_bytes, slot_count);
}

void kvk_arena_finish(struct kvk_arena *arena)
{
    uint64_t bytes = arena->slot_count * arena->slot_bytes;
    KVK_ASSERT(arena->pool->slab_bytes >= bytes);
    arena->pool->slab_bytes -= bytes;
    free(arena->slabs);
    free(arena->free_bits);
    free(arena->summary_bits);
    *arena = (struct kvk_arena){.pool = arena->pool};
}

uint32_t kvk_arena_slot_capacity(const struct kvk_arena *arena)
{
    return arena->slab_capacity * arena->slab_slots;
}

static uint32_t fullest_slab(const struct kvk_arena *arena)
{
    for (uint32_t level = KVK_ARENA_LEVEL_COUNT; level > 0; level--) {
        if (arena->levels[level - 1] != KVK_SLAB_NONE) {
            return arena->levels[level - 1];
        }
    }
    return KVK_SLAB_NONE;
}

static void slot_mark(struct kvk_arena *arena, uint32_t number, uint32_t index)
{
    uint32_t word = index / WORD_BITS;
    uint64_t *bits = slab_free_bits(arena, number) + word;
    *bits &= ~(UINT64_C(1) << (index % WORD_BITS));
    if (*bits == 0) {
        slab_summary_bits(arena, number)[word / WORD_BITS] &= ~(UINT64_C(1) << (word % WORD_BITS));
    }
    arena->slabs[number].used_count++;
    arena->used_count++;
    list_update(arena, number);
}

uint32_t kvk_arena_take(struct kvk_arena *arena)
{
    uint32_t number = fullest_slab(arena);
    if (number == KVK_SLAB_NONE) {
        return KVK_SLOT_NONE;
    }
    struct kvk_slab *slab = &arena->slabs[number];
    uint64_t *summaries = slab_summary_bits(arena, number);
    while (summaries[slab->hint] == 0) {
        slab->hint++;
        KVK_ASSERT(slab->hint < arena->slab_summaries);
    }
    uint32_t word = slab->hint * WORD_BITS + (uint32_t)__builtin_ctzll(summaries[slab->hint]);
    uint64_t bits = slab_free_bits(arena, number)[word];
    KVK_ASSERT(bits != 0);
    uint32_t index = word * WORD_BITS + (uint32_t)__builtin_ctzll(bits);
    slot_mark(arena, number, index);
    return slab->first_slot + index;
}

void kvk_arena_give(struct kvk_arena *arena, uint32_t slot)
{
    KVK_ASSERT(kvk_arena_is_used(arena, slot));
    uint32_t number = kvk_arena_slab_of(arena, slot);
    struct kvk_slab *slab = &arena->slabs[number];
    uint32_t word = (slot - slab->first_slot) / WORD_BITS;
    uint32_t summary = word / WORD_BITS;
    slab_free_bits(arena, number)[word] |= UINT64_C(1) << ((slot - slab->first_slot) % WORD_BITS);
    slab_summary_bits(arena, number)[summary] |= UINT64_C(1) << (word % WORD_BITS);
    if (summary < slab->hint) {
        slab->hint = summary;
    }
    slab->used_count--;
    arena->used_count--;
    list_update(arena, number);
}

bool kvk_arena_is_used(const struct kvk_arena *arena, uint32_t slot)
{
    if (slot >= kvk_arena_slot_capacity(arena)) {
        return false;
    }
    uint32_t number = kvk_arena_slab_of(arena, slot);
    const struct kvk_slab *slab = &arena->slabs[number];
    uint32_t index = slot - number * arena->slab_slots;
    if (index >= slab->slot_count) {
        return false;
    }
    uint64_t bits = slab_free_bits(arena, number)[index / WORD_BITS];
    return (bits >> (index % WORD_BITS) & 1) == 0;
}

/* A place in the file without a slab; those that had one before come first. */
uint32_t kvk_arena_next_place(const struct kvk_arena *arena)
{
    if (arena->place_returned != KVK_SLAB_NONE) {
        return arena->place_returned;
    }
    return arena->place_fresh < arena->slab_capacity ? arena->place_fresh : KVK_SLAB_NONE;
}

static uint32_t place_take(struct kvk_arena *arena)
{
    uint32_t number = kvk_arena_next_place(arena);
    if (number == KVK_SLAB_NONE) {
        return number;
    }
    if (number == arena->place_returned) {
        arena->place_returned = arena->slabs[number].next;
    } else {
        arena->place_fresh++;
    }
    return number;
}

uint32_t kvk_arena_grow(struct kvk_arena *arena)
{
    uint64_t fitting = kvk_pool_free_bytes(arena->pool) / arena->slot_bytes;
    if (fitting == 0) {
        return KVK_SLAB_NONE;
    }
    uint32_t number = place_take(arena);
    if (number == KVK_SLAB_NONE) {
        return KVK_SLAB_NONE;
    }
    struct kvk_slab *slab = &arena->slabs[number];
    KVK_ASSERT(slab->slot_count == 0);
    *slab = (struct kvk_slab){
        .first_slot = number * arena->slab_slots,
        .slot_count = fitting < arena->slab_slots ? (uint32_t)fitting : arena->slab_slots,
    };
    bits_fill(slab_free_bits(arena, number), slab->slot_count);
    bits_fill(slab_summary_bits(arena, number), words_for(slab->slot_count));
    list_add(arena, number);
    arena->pool->slab_bytes += slab->slot_count * arena->slot_bytes;
    arena->slab_count++;
    arena->slot_count += slab->slot_count;
    return number;
}

void kvk_arena_shrink(struct kvk_arena *arena, uint32_t number)
{
    KVK_ASSERT(number < arena->slab_capacity);
    struct kvk_slab *slab = &arena->slabs[number];
    KVK_ASSERT(slab->slot_count > 0);
    KVK_ASSERT(slab->used_count == 0);
    uint64_t bytes = slab->slot_count * arena->slot_bytes;
    KVK_ASSERT(arena->pool->slab_bytes >= bytes);
    list_remove(arena, number);
    bits_clear(slab_free_bits(arena, number), slab->slot_count);
    bits_clear(slab_summary_bits(arena, number), words_for(slab->slot_count));
    arena->pool->slab_bytes -= bytes;
    arena->slab_count--;
    arena->slot_count -= slab->slot_count;
    *slab = (struct kvk_slab){.next = arena->place_returned};
    arena->place_returned = number;
}

/* Give slots [first, end) of a slab to whoever wants them. Its list is the caller's to settle. */
static void slots_add(struct kvk_arena *arena, uint32_t number, uint32_t end)
{
    struct kvk_slab *slab = &arena->slabs[number];
    uint32_t first = slab->slot_count;
    KVK_ASSERT(end > first);
    KVK_ASSERT(end <= arena->slab_slots);
    for (uint32_t i = first; i < end; i++) {
        uint32_t word = i / WORD_BITS;
        slab_free_bits(arena, number)[word] |= UINT64_C(1) << (i % WORD_BITS);
        slab_summary_bits(arena, number)[word / WORD_BITS] |= UINT64_C(1) << (word % WORD_BITS);
    }
    if (first / WORD_BITS / WORD_BITS < slab->hint) {
        slab->hint = first / WORD_BITS / WORD_BITS;
    }
    slab->slot_count = end;
    arena->slot_count += end - first;
    arena->pool->slab_bytes += (end - first) * arena->slot_bytes;
}

/* The free place `number` gets a slab, still without slots. */
static void place_take_at(struct kvk_arena *arena, uint32_t number)
{
    if (number >= arena->place_fresh) {
        for (uint32_t i = number; i > arena->place_fresh; i--) { /* the lowest comes first */
            arena->slabs[i - 1].next = arena->place_returned;
            arena->place_returned = i - 1;
        }
        arena->place_fresh = number + 1;
    } else {
        uint32_t *link = &arena->place_returned;
        while (*link != number) {
            KVK_ASSERT(*link != KVK_SLAB_NONE);
            link = &arena->slabs[*link].next;
        }
        *link = arena->slabs[number].next;
    }
    arena->slabs[number] = (struct kvk_slab){.first_slot = number * arena->slab_slots};
}

enum kvk_status kvk_arena_take_at(struct kvk_arena *arena, uint32_t slot)
{
    if (slot >= kvk_arena_slot_capacity(arena)) {
        return KVK_INVALID;
    }
    if (kvk_arena_is_used(arena, slot)) {
        return KVK_EXISTS;
    }
    uint32_t number = kvk_arena_slab_of(arena, slot);
    struct kvk_slab *slab = &arena->slabs[number];
    uint32_t index = slot - number * arena->slab_slots;
    if (index >= slab->slot_count) {
        uint64_t missing = index + 1 - slab->slot_count;
        if (missing > kvk_pool_free_bytes(arena->pool) / arena->slot_bytes) {
            return KVK_EXHAUSTED;
        }
        if (slab->slot_count == 0) {
            place_take_at(arena, number);
            arena->slab_count++;
        } else {
            list_remove(arena, number);
        }
        slots_add(arena, number, index + 1);
        list_add(arena, number);
    }
    slot_mark(arena, number, index);
    return KVK_OK;
}

void kvk_arena_fill_out(struct kvk_arena *arena)
{
    for (uint32_t number = 0; number < arena->place_fresh; number++) {
        struct kvk_slab *slab = &arena->slabs[number];
        uint64_t fitting = kvk_pool_free_bytes(arena->pool) / arena->slot_bytes;
        uint32_t missing = arena->slab_slots - slab->slot_count;
        if (slab->slot_count == 0 || missing == 0 || fitting == 0) {
            continue;
        }
        missing = fitting < missing ? (uint32_t)fitting : missing;
        list_remove(arena, number);
        slots_add(arena, number, slab->slot_count + missing);
        list_add(arena, number);
    }
}

uint32_t kvk_arena_empty_slab(const struct kvk_arena *arena)
{
    return arena->levels[0];
}

uint32_t kvk_arena_slab_of(const struct kvk_arena *arena, uint32_t slot)
{
    KVK_ASSERT(slot < kvk_arena_slot_capacity(arena));
    return slot / arena->slab_slots;
}

/* ---- Checking ---- */

static void slab_check(const struct kvk_arena *arena, uint32_t number)
{
    const struct kvk_slab *slab = &arena->slabs[number];
    const uint64_t *bits = slab_free_bits(arena, number);
    const uint64_t *summaries = slab_summary_bits(arena, number);
    uint32_t free_count = 0;
    for (uint32_t word = 0; word < arena->slab_words; word++) {
        free_count += (uint32_t)__builtin_popcountll(bits[word]);
        bool any = (summaries[word / WORD_BITS] >> (word % WORD_BITS) & 1) != 0;
        KVK_ASSERT(any == (bits[word] != 0));
        KVK_ASSERT(!any || word / WORD_BITS >= slab->hint);
    }
    KVK_ASSERT(free_count + slab->used_count == slab->slot_count);
    if (slab->slot_count > 0) {
        KVK_ASSERT(slab->slot_count <= arena->slab_slots);
        KVK_ASSERT(slab->first_slot == number * arena->slab_slots);
        KVK_ASSERT(slab->level == slab_level(slab));
    }
}

static void lists_check(const struct kvk_arena *arena)
{
    uint32_t listed = 0;
    for (uint32_t level = 0; level < KVK_ARENA_LEVEL_COUNT; level++) {
        uint32_t previous = KVK_SLAB_NONE;
        for (uint32_t i = arena->levels[level]; i != KVK_SLAB_NONE; i = arena->slabs[i].next) {
            KVK_ASSERT(arena->slabs[i].slot_count > 0);
            KVK_ASSERT(arena->slabs[i].level == level);
            KVK_ASSERT(arena->slabs[i].previous == previous);
            previous = i;
            listed++;
            KVK_ASSERT(listed <= arena->slab_count);
        }
    }
    uint32_t full = 0;
    for (uint32_t i = 0; i < arena->slab_capacity; i++) {
        const struct kvk_slab *slab = &arena->slabs[i];
        full += slab->slot_count > 0 && slab->used_count == slab->slot_count ? 1 : 0;
    }
    KVK_ASSERT(listed + full == arena->slab_count);
}

static void arena_check(const struct kvk_arena *arena)
{
    uint32_t slab_count = 0;
    uint32_t slot_count = 0;
    uint32_t used_count = 0;
    for (uint32_t i = 0; i < arena->slab_capacity; i++) {
        slab_check(arena, i);
        slab_count += arena->slabs[i].slot_count > 0 ? 1 : 0;
        slot_count += arena->slabs[i].slot_count;
        used_count += arena->slabs[i].used_count;
    }
    KVK_ASSERT(slab_count == arena->slab_count);
    KVK_ASSERT(slot_count == arena->slot_count);
    KVK_ASSERT(used_count == arena->used_count);
    lists_check(arena);
}

void kvk_pool_check(const struct kvk_pool *pool, struct kvk_arena *const *arenas,
                    uint32_t arena_count)
{
    uint64_t slab_bytes = 0;
    for (uint32_t i = 0; i < arena_count; i++) {
        KVK_ASSERT(arenas[i]->pool == pool);
        arena_check(arenas[i]);
        slab_bytes += arenas[i]->slot_count * arenas[i]->slot_bytes;
    }
    KVK_ASSERT(slab_bytes == pool->slab_bytes);
    KVK_ASSERT(slab_bytes <= pool->limit_bytes);
}
