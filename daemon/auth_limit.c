#include "daemon/auth_limit.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/random.h"

_Static_assert(KVK_AUTH_SOURCE_COUNT % KVK_AUTH_SOURCE_WAYS == 0, "whole sets");

enum { SOURCE_UID = 1, SOURCE_IPV4 = 2, SOURCE_IPV6 = 3 };

/* A bucket as the time at which it will be full: the emptier, the later. A source that is not in
 * the table has a full one. */
struct kvk_auth_slot {
    struct kvk_auth_source source;
    uint64_t full_ns; /* 0: nobody's */
};

enum kvk_status kvk_auth_limit_init(struct kvk_auth_limit *limit, uint64_t attempts,
                                    uint64_t refill_ms, struct kvk_error *error)
{
    memset(limit, 0, sizeof(*limit));
    limit->attempts = attempts;
    limit->refill_ns = refill_ms * KVK_NS_PER_MS;
    limit->slots = calloc(KVK_AUTH_SOURCE_COUNT, sizeof(*limit->slots));
    if (limit->slots == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for the table of failed attempts");
    }
    kvk_random_secret(&limit->key, sizeof(limit->key));
    kvk_lock_init(&limit->lock);
    return KVK_OK;
}

void kvk_auth_limit_finish(struct kvk_auth_limit *limit)
{
    if (limit->slots != NULL) {
        kvk_lock_finish(&limit->lock);
        free(limit->slots);
        limit->slots = NULL;
    }
}

struct kvk_auth_source kvk_auth_source_uid(uint32_t uid)
{
    struct kvk_auth_source source = {.bytes = {SOURCE_UID}};
    kvk_store_le32(source.bytes + 1, uid);
    return source;
}

struct kvk_auth_source kvk_auth_source_address(const uint8_t *address, uint32_t size_bytes)
{
    struct kvk_auth_source source = {.bytes = {SOURCE_IPV4}};
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (size_bytes == 16 && memcmp(address, mapped, sizeof(mapped)) == 0) {
        address += sizeof(mapped);
        size_bytes = 4;
    }
    if (size_bytes == 16) {
        source.bytes[0] = SOURCE_IPV6;
        size_bytes = 8; /* the rest is the other end's to choose */
    }
    memcpy(source.bytes + 1, address, size_bytes);
    return source;
}

static struct kvk_auth_slot *set_of(const struct kvk_auth_limit *limit,
                                    const struct kvk_auth_source *source)
{
    uint64_t mixed = limit->key;
    for (size_t i = 0; i < sizeof(source->bytes); i++) {
        mixed = (mixed ^ source->bytes[i]) * UINT64_C(0x100000001b3);
        mixed ^= mixed >> 29;
    }
    mixed *= UINT64_C(0x9e3779b97f4a7c15);
    uint64_t set = (mixed >> 32) % (KVK_AUTH_SOURCE_COUNT / KVK_AUTH_SOURCE_WAYS);
    return &limit->slots[set * KVK_AUTH_SOURCE_WAYS];
}

/* The source's place, or NULL. */
static struct kvk_auth_slot *slot_find(struct kvk_auth_slot *set,
                                       const struct kvk_auth_source *source)
{
    for (uint32_t i = 0; i < KVK_AUTH_SOURCE_WAYS; i++) {
        if (set[i].full_ns != 0 && memcmp(&set[i].source, source, sizeof(*source)) == 0) {
            return &set[i];
        }
    }
    return NULL;
}

/* The one that will be full first. */
static struct kvk_auth_slot *slot_take(struct kvk_auth_slot *set,
                                       const struct kvk_auth_source *source)
{
    struct kvk_auth_slot *victim = &set[0];
    for (uint32_t i = 1; i < KVK_AUTH_SOURCE_WAYS; i++) {
        if (set[i].full_ns < victim->full_ns) {
            victim = &set[i];
        }
    }
    *victim = (struct kvk_auth_slot){.source = *source};
    return victim;
}

static enum kvk_status refuse(struct kvk_auth_limit *limit, uint64_t wait_ns,
                              struct kvk_error *error)
{
    atomic_fetch_add(&limit->refused, 1);
    enum kvk_status status = kvk_fail_limit(
        error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "server.auth_failures", limit->attempts + 1,
        limit->attempts, "too many attempts to authenticate failed from here");
    kvk_error_retry(error, wait_ns / KVK_NS_PER_MS + 1);
    return status;
}

bool kvk_auth_limit_is_engaged(const struct kvk_auth_limit *limit, uint64_t now_ns)
{
    return atomic_load_explicit(&limit->engaged_until, memory_order_relaxed) > now_ns;
}

enum kvk_status kvk_auth_limit_fail(struct kvk_auth_limit *limit,
                                    const struct kvk_auth_source *source, uint64_t now_ns,
                                    struct kvk_error *error)
{
    if (limit->attempts == 0) {
        return KVK_OK;
    }
    uint64_t whole_ns = limit->attempts * limit->refill_ns;
    uint64_t wait_ns = 0;
    kvk_lock(&limit->lock);
    struct kvk_auth_slot *set = set_of(limit, source);
    struct kvk_auth_slot *slot = slot_find(set, source);
    if (slot == NULL) {
        slot = slot_take(set, source);
    }
    uint64_t full_ns = (slot->full_ns > now_ns ? slot->full_ns : now_ns) + limit->refill_ns;
    if (full_ns > now_ns + whole_ns) {
        wait_ns = full_ns - now_ns - whole_ns;
    } else {
        slot->full_ns = full_ns;
    }
    /* Empty now: until its next attempt comes, the source is to be looked at. */
    uint64_t empty_until = slot->full_ns + limit->refill_ns;
    if (empty_until > now_ns + whole_ns) {
        empty_until -= whole_ns;
        if (atomic_load(&limit->engaged_until) < empty_until) {
            atomic_store(&limit->engaged_until, empty_until);
        }
    }
    kvk_unlock(&limit->lock);
    return wait_ns > 0 ? refuse(limit, wait_ns, error) : KVK_OK;
}

enum kvk_status kvk_auth_limit_check(struct kvk_auth_limit *limit,
                                     const struct kvk_auth_source *source, uint64_t now_ns,
                                     struct kvk_error *error)
{
    uint64_t whole_ns = limit->attempts * limit->refill_ns;
    uint64_t wait_ns = 0;
    if (!kvk_auth_limit_is_engaged(limit, now_ns)) {
        return KVK_OK;
    }
    kvk_lock(&limit->lock);
    const struct kvk_auth_slot *slot = slot_find(set_of(limit, source), source);
    if (slot != NULL && slot->full_ns + limit->refill_ns > now_ns + whole_ns) {
        wait_ns = slot->full_ns + limit->refill_ns - now_ns - whole_ns;
    }
    kvk_unlock(&limit->lock);
    return wait_ns > 0 ? refuse(limit, wait_ns, error) : KVK_OK;
}
