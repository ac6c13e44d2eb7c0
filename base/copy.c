#include "base/copy.h"

#include <stdatomic.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy_path.h"

_Static_assert(sizeof(XXH3_state_t) <= sizeof(struct kvk_checksum_state), "the state fits");
_Static_assert(_Alignof(XXH3_state_t) <= _Alignof(struct kvk_checksum_state), "and is aligned");

/* Best first. */
static const struct kvk_copy_path *const paths[] = {
    &kvk_copy_path_avx512,
    &kvk_copy_path_avx2,
    &kvk_copy_path_plain,
};
#define PATH_COUNT (sizeof(paths) / sizeof(paths[0]))

static _Atomic(const struct kvk_copy_path *) chosen;

bool kvk_copy_path_select(const char *name)
{
    for (size_t i = 0; i < PATH_COUNT; i++) {
        bool wanted = name == NULL || strcmp(name, paths[i]->name) == 0;
        if (wanted && paths[i]->works()) {
            atomic_store(&chosen, paths[i]);
            return true;
        }
    }
    return false;
}

static const struct kvk_copy_path *path(void)
{
    const struct kvk_copy_path *now = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (now == NULL) {
        bool found = kvk_copy_path_select(NULL); /* threads that race here choose the same */
        KVK_ASSERT(found);
        now = atomic_load(&chosen);
    }
    return now;
}

const char *kvk_copy_path_name(void)
{
    return path()->name;
}

static XXH3_state_t *hash_state(struct kvk_checksum_state *state)
{
    return (XXH3_state_t *)(void *)state->bytes;
}

void kvk_copy_checksum(void *target, const void *source, size_t size, uint64_t *checksum)
{
    struct kvk_checksum_state state;
    kvk_checksum_begin(&state);
    kvk_checksum_add_copy(&state, target, source, size);
    *checksum = kvk_checksum_end(&state);
}

void kvk_copy_stream(void *target, const void *source, size_t size)
{
    if (size > 0) {
        path()->copy(target, source, size);
    }
}

uint64_t kvk_checksum(const void *source, size_t size)
{
    return path()->hash(source, size);
}

void kvk_checksum_begin(struct kvk_checksum_state *state)
{
    (void)XXH3_64bits_reset(hash_state(state)); /* fails for NULL only */
}

void kvk_checksum_add(struct kvk_checksum_state *state, const void *source, size_t size)
{
    if (size > 0) {
        path()->add(hash_state(state), source, size);
    }
}

void kvk_checksum_add_copy(struct kvk_checksum_state *state, void *target, const void *source,
                           size_t size)
{
    if (size > 0) {
        path()->add_copy(hash_state(state), target, source, size);
    }
}

uint64_t kvk_checksum_end(const struct kvk_checksum_state *state)
{
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)state->bytes);
}
