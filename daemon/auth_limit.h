/*
 * Failed attempts to say who one is, counted per source (an address, or a uid of this machine):
 * each source has a bucket of attempts that fills up again with time. With an empty one, who shows
 * nothing or something wrong is refused without hearing whether it was; so is a right token of the
 * configuration file, since people choose those and it might have been guessed.
 *
 * A right token of kvkeep's own making, a certificate and a uid are let in even then: nobody
 * guesses 256 random bits, so refusing them would protect nothing, and would let one process lock
 * out another behind the same address.
 *
 * The table is of fixed size. When it is full, the source that has the most attempts left and was
 * silent for longest makes room: an attacker with many addresses wins more attempts for each,
 * nothing else.
 *
 * Locking: a leaf of its own, taken for failures, and for others only while some source's bucket is
 * empty.
 */
#ifndef KVK_DAEMON_AUTH_LIMIT_H
#define KVK_DAEMON_AUTH_LIMIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/lock.h"
#include "base/status.h"

#define KVK_AUTH_SOURCE_COUNT 4096
#define KVK_AUTH_SOURCE_WAYS 8 /* places that one source can have */

/* Whom attempts count against: the first byte says what kind, the rest who. */
struct kvk_auth_source {
    uint8_t bytes[20];
};

struct kvk_auth_slot;

struct kvk_auth_limit {
    struct kvk_lock lock;
    uint64_t attempts;  /* of a full bucket; 0: no limit */
    uint64_t refill_ns; /* for one attempt */
    uint64_t key;       /* of the hash, so that nobody chooses who shares places with whom */
    struct kvk_auth_slot *slots;    /* [KVK_AUTH_SOURCE_COUNT]; ours */
    _Atomic uint64_t engaged_until; /* after it every bucket has an attempt again */
    _Atomic uint64_t refused;
};

KVK_CHECKED enum kvk_status kvk_auth_limit_init(struct kvk_auth_limit *limit, uint64_t attempts,
                                                uint64_t refill_ms, struct kvk_error *error);
void kvk_auth_limit_finish(struct kvk_auth_limit *limit);

/* Sources, from what the server knows. IPv6 addresses count by their first 64 bits. */
struct kvk_auth_source kvk_auth_source_uid(uint32_t uid);
struct kvk_auth_source kvk_auth_source_address(const uint8_t *address, uint32_t size_bytes);

/* Might some source be refused now? Cheap, for every call. */
bool kvk_auth_limit_is_engaged(const struct kvk_auth_limit *limit, uint64_t now_ns);

/* A failed attempt. KVK_EXHAUSTED, with a time to try again: the source had none left. */
KVK_CHECKED enum kvk_status kvk_auth_limit_fail(struct kvk_auth_limit *limit,
                                                const struct kvk_auth_source *source,
                                                uint64_t now_ns, struct kvk_error *error);
/* May the source be heard? Takes nothing. KVK_EXHAUSTED as above. */
KVK_CHECKED enum kvk_status kvk_auth_limit_check(struct kvk_auth_limit *limit,
                                                 const struct kvk_auth_source *source,
                                                 uint64_t now_ns, struct kvk_error *error);

#endif
