/* The ring of ghosts. */
#include "index/ghosts.h"

#include "base/assert.h"
#include "base/pages.h"

_Static_assert(sizeof(struct kvk_ghost) + sizeof(uint32_t) == 16, "16 bytes a ghost");

/* kvk_ghost.seen, from its top: 3 bits of use count (0: taken), 7 bits of fingerprint, 22 bits of
 * time in steps of 2^26 ns. */
#define MARK_BITS 7
#define TIME_BITS 22
#define TIME_STEP_BITS 26
#define USE_COUNT_SHIFT (MARK_BITS + TIME_BITS)
#define MARK_MASK ((UINT32_C(1) << MARK_BITS) - 1)
#define TIME_MASK ((UINT32_C(1) << TIME_BITS) - 1)

/* Lists hold one ghost on average. Where all keys are equal, a test, they would hold them all. */
#define LIST_LENGTH_MAX 64

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

static void ring_finish(struct kvk_ghost_ring *ring)
{
    kvk_pages_destroy(ring->heads, ring->capacity * sizeof(*ring->heads));
    kvk_pages_destroy(ring->entries, ring->capacity * sizeof(*ring->entries));
    *ring = (struct kvk_ghost_ring){0};
}

static enum kvk_status ring_init(struct kvk_ghost_ring *ring, uint32_t capacity)
{
    *ring = (struct kvk_ghost_ring){.capacity = capacity};
    if (capacity == 0) {
        return KVK_OK;
    }
    ring->heads = kvk_pages_create(capacity * sizeof(*ring->heads));
    ring->entries = kvk_pages_create(capacity * sizeof(*ring->entries));
    if (ring->heads == NULL || ring->entries == NULL) {
        ring_finish(ring);
        return KVK_EXHAUSTED;
    }
    return KVK_OK;
}

static uint32_t *ring_head(const struct kvk_ghost_ring *ring, uint32_t fingerprint)
{
    return &ring->heads[((uint64_t)fingerprint * ring->capacity) >> 32];
}

/* How many ghosts came after the one at `place`. */
static uint32_t ring_rank(const struct kvk_ghost_ring *ring, uint32_t place)
{
    return place < ring->next_place ? ring->next_place - 1 - place
                                    : ring->next_place - 1 + (ring->capacity - place);
}

/* The ghost of this key and its rank, or NULL. */
static struct kvk_ghost *ring_find(const struct kvk_ghost_ring *ring, struct kvk_key key,
                                   uint32_t *rank)
{
    if (ring->capacity == 0) {
        return NULL;
    }
    const uint32_t *head = ring_head(ring, fingerprint_of(key));
    int64_t rank_before = -1;
    uint32_t link = *head;
    for (int step = 0; step < LIST_LENGTH_MAX && link != 0; step++) {
        struct kvk_ghost *ghost = &ring->entries[link - 1];
        *rank = ring_rank(ring, link - 1);
        if (*rank <= rank_before || ring_head(ring, ghost->fingerprint) != head) {
            return NULL;
        }
        if (ghost->seen != 0 && ghost_is(ghost, key)) {
            return ghost;
        }
        rank_before = *rank;
        link = ghost->next;
    }
    return NULL;
}

static void ring_add(struct kvk_ghost_ring *ring, struct kvk_key key, uint32_t seen)
{
    uint32_t *head = ring_head(ring, fingerprint_of(key));
    ring->entries[ring->next_place] = (struct kvk_ghost){
        .fingerprint = fingerprint_of(key),
        .next = *head,
        .seen = seen,
    };
    ring->next_place++;
    *head = ring->next_place;
    if (ring->next_place == ring->capacity) {
        ring->next_place = 0;
    }
    ring->added++;
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
    if (ghosts->current.added >= ghosts->current.capacity && ghosts->older.capacity > 0) {
        ring_finish(&ghosts->older);
    }
}

void kvk_ghosts_expect(const struct kvk_ghosts *ghosts, struct kvk_key key)
{
    if (ghosts->current.capacity > 0) {
        __builtin_prefetch(ring_head(&ghosts->current, fingerprint_of(key)), 1);
    }
}

bool kvk_ghosts_take(struct kvk_ghosts *ghosts, struct kvk_key key, uint64_t now_ns,
                     uint64_t *age_ns, uint32_t *use_count)
{
    uint32_t rank;
    struct kvk_ghost *ghost = ring_find(&ghosts->current, key, &rank);
    if (ghost == NULL) {
        ghost = ring_find(&ghosts->older, key, &rank);
        /* What is in the older ring counts as if it lay in the current one, behind what is there:
         * what would have been overwritten by now is no ghost. */
        if (ghost == NULL || rank + ghosts->current.added >= ghosts->current.capacity) {
            return false;
        }
    }
    *age_ns = (uint64_t)((time_steps(now_ns) - ghost->seen) & TIME_MASK) << TIME_STEP_BITS;
    *use_count = ghost->seen >> USE_COUNT_SHIFT;
    ghost->seen = 0;
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
