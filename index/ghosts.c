/* The ring of ghosts. */
#include "index/ghosts.h"

#include <stdlib.h>

#include "base/assert.h"

_Static_assert(sizeof(struct kvk_ghost) + sizeof(uint32_t) == 16, "16 bytes a ghost");

/* kvk_ghost.seen, from its top: 3 bits of use count (0: taken), 7 bits of fingerprint, 22 bits of
 * time in steps of 2^26 ns. */
#define MARK_BITS 7
#define TIME_BITS 22
#define TIME_STEP_BITS 26
#define USE_COUNT_SHIFT (MARK_BITS + TIME_BITS)
#define MARK_MASK ((UINT32_C(1) << MARK_BITS) - 1)
#define TIME_MASK ((UINT32_C(1) << TIME_BITS) - 1)

static uint32_t time_steps(uint64_t ns)
{
    return (uint32_t)(ns >> TIME_STEP_BITS) & TIME_MASK;
}

static uint32_t fingerprint_of(struct kvk_key key)
{
    return (uint32_t)key.high;
}

static uint32_t mark_of(struct kvk_key key)
{
    return (uint32_t)(key.high >> 32) & MARK_MASK;
}

static bool ghost_is(const struct kvk_ghost *ghost, struct kvk_key key)
{
    return ghost->fingerprint == fingerprint_of(key) &&
           ((ghost->seen >> TIME_BITS) & MARK_MASK) == mark_of(key);
}

/* ---- One ring ---- */

static enum kvk_status ring_init(struct kvk_ghost_ring *ring, uint32_t capacity)
{
    *ring = (struct kvk_ghost_ring){.capacity = capacity};
    if (capacity == 0) {
        return KVK_OK;
    }
    /* Zero pages: what is not used yet costs no memory. */
    ring->heads = calloc(capacity, sizeof(*ring->heads));
    ring->entries = calloc(capacity, sizeof(*ring->entries));
    if (ring->heads == NULL || ring->entries == NULL) {
        free(ring->heads);
        free(ring->entries);
        *ring = (struct kvk_ghost_ring){0};
        return KVK_EXHAUSTED;
    }
    return KVK_OK;
}

static void ring_finish(struct kvk_ghost_ring *ring)
{
    free(ring->heads);
    free(ring->entries);
    *ring = (struct kvk_ghost_ring){0};
}

static uint32_t *ring_head(const struct kvk_ghost_ring *ring, uint32_t fingerprint)
{
    return &ring->heads[((uint64_t)fingerprint * ring->capacity) >> 32];
}

/* The link that names the ghost of this key, or NULL. */
static uint32_t *ring_find(const struct kvk_ghost_ring *ring, struct kvk_key key)
{
    if (ring->capacity == 0) {
        return NULL;
    }
    uint32_t *link = ring_head(ring, fingerprint_of(key));
    while (*link != 0) {
        struct kvk_ghost *ghost = &ring->entries[*link - 1];
        if (ghost_is(ghost, key)) {
            return link;
        }
        link = &ghost->next;
    }
    return NULL;
}

/* Out of its list; its place in the ring stays empty until it comes round again. */
static struct kvk_ghost ring_unlink(struct kvk_ghost_ring *ring, uint32_t *link)
{
    struct kvk_ghost *ghost = &ring->entries[*link - 1];
    struct kvk_ghost taken = *ghost;
    *link = ghost->next;
    ghost->seen = 0;
    return taken;
}

static void ring_add(struct kvk_ghost_ring *ring, struct kvk_key key, uint32_t seen)
{
    uint32_t *known = ring_find(ring, key);
    if (known != NULL) {
        (void)ring_unlink(ring, known);
    }
    uint32_t place = (uint32_t)(ring->added % ring->capacity);
    struct kvk_ghost *ghost = &ring->entries[place];
    if (ghost->seen != 0) {
        uint32_t *link = ring_head(ring, ghost->fingerprint);
        while (*link != place + 1) {
            KVK_ASSERT(*link != 0);
            link = &ring->entries[*link - 1].next;
        }
        (void)ring_unlink(ring, link);
    }
    uint32_t *head = ring_head(ring, fingerprint_of(key));
    *ghost = (struct kvk_ghost){.fingerprint = fingerprint_of(key), .next = *head, .seen = seen};
    *head = place + 1;
    ring->added++;
}

/* How many ghosts came after the one at `place`. */
static uint64_t ring_rank(const struct kvk_ghost_ring *ring, uint32_t place)
{
    uint32_t next = (uint32_t)(ring->added % ring->capacity);
    return place < next ? next - 1 - place : next - 1 + (ring->capacity - place);
}

/* ---- Both rings ---- */

enum kvk_status kvk_ghosts_init(struct kvk_ghosts *ghosts, uint32_t capacity)
{
    *ghosts = (struct kvk_ghosts){0};
    return ring_init(&ghosts->current, capacity);
}

void kvk_ghosts_finish(struct kvk_ghosts *ghosts)
{
    ring_finish(&ghosts->current);
    ring_finish(&ghosts->older);
}

enum kvk_status kvk_ghosts_resize(struct kvk_ghosts *ghosts, uint32_t capacity)
{
    if (capacity == ghosts->current.capacity) {
        return KVK_OK;
    }
    struct kvk_ghost_ring created;
    enum kvk_status status = ring_init(&created, capacity);
    if (status != KVK_OK) {
        return status;
    }
    if (ghosts->current.added == 0) {
        ring_finish(&ghosts->current); /* nothing in it that could become the older one */
    } else {
        ring_finish(&ghosts->older);
        ghosts->older = ghosts->current;
    }
    ghosts->current = created;
    if (capacity == 0) {
        ring_finish(&ghosts->older);
    }
    return KVK_OK;
}

void kvk_ghosts_add(struct kvk_ghosts *ghosts, struct kvk_key key, uint64_t used_ns,
                    uint32_t use_count)
{
    if (ghosts->current.capacity == 0) {
        return;
    }
    KVK_ASSERT(use_count > 0);
    uint32_t count = use_count < KVK_GHOST_USE_COUNT_MAX ? use_count : KVK_GHOST_USE_COUNT_MAX;
    ring_add(&ghosts->current, key,
             count << USE_COUNT_SHIFT | mark_of(key) << TIME_BITS | time_steps(used_ns));
    if (ghosts->current.added >= ghosts->current.capacity) {
        ring_finish(&ghosts->older);
    }
}

bool kvk_ghosts_take(struct kvk_ghosts *ghosts, struct kvk_key key, uint64_t now_ns,
                     uint64_t *age_ns, uint32_t *use_count)
{
    struct kvk_ghost_ring *ring = &ghosts->current;
    uint32_t *link = ring_find(ring, key);
    if (link == NULL) {
        ring = &ghosts->older;
        link = ring_find(ring, key);
        /* What is in the older ring counts as if it lay in the current one, behind what is there:
         * what would have been overwritten by now is no ghost. */
        if (link == NULL ||
            ring_rank(ring, *link - 1) + ghosts->current.added >= ghosts->current.capacity) {
            return false;
        }
    }
    struct kvk_ghost taken = ring_unlink(ring, link);
    *age_ns = (uint64_t)((time_steps(now_ns) - taken.seen) & TIME_MASK) << TIME_STEP_BITS;
    *use_count = taken.seen >> USE_COUNT_SHIFT;
    return true;
}

static uint64_t ring_bytes(const struct kvk_ghost_ring *ring)
{
    return (uint64_t)ring->capacity * (sizeof(*ring->heads) + sizeof(*ring->entries));
}

uint64_t kvk_ghosts_bytes(const struct kvk_ghosts *ghosts)
{
    return ring_bytes(&ghosts->current) + ring_bytes(&ghosts->older);
}
