/*
 * The engine's insides, for daemon/'s engine files alone (not for rpc or main).
 *
 * The state itself, and who owns what in it, is in daemon/cache_state.h.
 *
 * Locking: every field and function needs cache.lock, unless it says otherwise. Functions
 * named *_unlocked are called without it and take it themselves; those named *_drops give it up
 * in between and take it again: what was read before may have changed.
 *
 * Order of locks: cache.lock, then nothing. The mover, the devices and the log are leaves that are
 * never called with it (the log apart).
 *
 * How a block is changed: change its holds, pins or copies by the functions of block_store.c; each
 * ends in kvk_block_settle(), which brings counters and eviction queues in line. Nothing else
 * touches queues or counters.
 */
#ifndef KVK_DAEMON_CACHE_INTERNAL_H
#define KVK_DAEMON_CACHE_INTERNAL_H

#include "daemon/cache_state.h"

/* ================= space.c ================= */

/* The space, if the caller may act for its tenant; KVK_NOT_FOUND otherwise, alike for both. */
KVK_CHECKED enum kvk_status kvk_space_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           uint64_t space_id, struct kvk_space **space,
                                           struct kvk_error *error);
/* May anything be done for it? As kvk_tenant_check(), and the space's own mode. */
KVK_CHECKED enum kvk_status kvk_space_check(const struct kvk_space *space, struct kvk_error *error);
/* Neither it nor its tenant is in shadow mode: what is cached is found, and what is sealed is put
 * into the index. */
bool kvk_space_shares(const struct kvk_space *space);
struct kvk_group *kvk_group_of(const struct kvk_cache *cache, const struct kvk_block *block);
/* The host tier holds the group's blocks in a compact format. Then only what nobody holds goes down
 * there, and whoever holds a block that has a copy on the device keeps that one: he was promised
 * the sealed bytes. What lies there alone may be held, and gives the same bytes each time. */
static inline bool kvk_group_is_compact_below(const struct kvk_group *group)
{
    return group->forms[KVK_TIER_HOST].compact;
}
static inline bool kvk_space_is_compact_below(const struct kvk_space *space)
{
    bool compact = false;
    for (uint32_t g = 0; g < space->group_count; g++) {
        compact = compact || kvk_group_is_compact_below(space->groups[g]);
    }
    return compact;
}

/* Open the root of each group for a salt, at the space's generation: references are the caller's.
 * All or none. root.user is (space id, generation) as kvk_root_is_current() reads it. */
KVK_CHECKED enum kvk_status kvk_space_roots(struct kvk_cache *cache, struct kvk_space *space,
                                            const uint8_t *salt, size_t salt_size,
                                            uint32_t roots[KVK_GROUP_COUNT_MAX],
                                            struct kvk_error *error);
/* May its tenant have those roots of the salt that are not there yet? As kvk_metadata_admit(). */
KVK_CHECKED enum kvk_status kvk_space_roots_admit(struct kvk_cache *cache,
                                                  const struct kvk_space *space,
                                                  const uint8_t *salt, size_t salt_size,
                                                  struct kvk_error *error);
/* The roots as they are known, KVK_ROOT_NONE where they are not; without references, so valid while
 * the lock is held. Allocates nothing: for look-ups. */
void kvk_space_roots_find(const struct kvk_cache *cache, const struct kvk_space *space,
                          const uint8_t *salt, size_t salt_size,
                          uint32_t roots[KVK_GROUP_COUNT_MAX]);
void kvk_space_roots_release(struct kvk_cache *cache, struct kvk_space *space,
                             const uint32_t roots[KVK_GROUP_COUNT_MAX]);
/* The key of a group's root, whether it is there or not; `back` generations ago. KVK_EXHAUSTED: no
 * memory (with `back` 0: never). */
KVK_CHECKED enum kvk_status kvk_space_root_key(const struct kvk_space *space, uint32_t group,
                                               const uint8_t *salt, size_t salt_size, uint64_t back,
                                               struct kvk_key *key);
const struct kvk_hasher *kvk_space_hasher(const struct kvk_space *space);
/* Not invalidated since it was opened. */
bool kvk_root_is_current(const struct kvk_cache *cache, uint32_t root);
/* Relative cost of block `position` of the space. */
float kvk_space_block_cost(const struct kvk_space *space, uint64_t position);
/* Estimates in ns for tokens [first, last); 0: not known. */
uint64_t kvk_space_recompute_ns(const struct kvk_space *space, uint64_t first, uint64_t last);
void kvk_space_destroy_all(struct kvk_cache *cache);

/* ================= block_store.c: holds, pins, copies, counters, queues ================= */

/* Bring counters and queues in line with the block (and its parent) after a change. */
void kvk_block_settle(struct kvk_cache *cache, uint32_t block);

/* One more holder / one less. `leased`: the holder is a lease. The last release of a sealed,
 * indexed, current block makes it EVICTABLE; of an unindexed or invalidated one frees it; of an
 * unsealed one aborts it. */
void kvk_block_hold(struct kvk_cache *cache, uint32_t block, bool leased);
void kvk_block_release(struct kvk_cache *cache, uint32_t block, bool leased);
void kvk_block_pin(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
void kvk_block_unpin(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);

/* A hold and a pin of a call that uses the copy without the lock and gives both back at its end
 * (a read, an attention, a copy). Counted in cache.passing_holds. */
void kvk_block_borrow(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
void kvk_block_return(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
/* The same without a pin: the block stays, its copies may move. */
void kvk_block_keep(struct kvk_cache *cache, uint32_t block);
void kvk_block_let_go(struct kvk_cache *cache, uint32_t block);

/* Blocks that are dropped until kvk_gone_end() go for this reason, to make room for `space` (NULL:
 * for nobody in particular); the journal says so. The lock is not dropped in between. Not nested.
 */
void kvk_gone_begin(struct kvk_cache *cache, enum kvk_gone_reason reason,
                    const struct kvk_space *space);
void kvk_gone_end(struct kvk_cache *cache);
/* Into the journal: a copy of the (indexed) block leaves `tier`, `left` are the tiers that still
 * have one. Called by block_store.c, before anything of the block changes. */
void kvk_gone_note(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint8_t left,
                   enum kvk_gone_reason otherwise);
/* A block of this key would have come, but its writer went. */
void kvk_gone_note_aborted(struct kvk_cache *cache, const struct kvk_sequence *sequence);

/* Take a held block without children and anchors out of the index: no look-up finds it any more,
 * and its last release frees it. */
void kvk_block_unindex(struct kvk_cache *cache, uint32_t block);

/* The block's bytes count as quarantine from now on, or no longer. */
void kvk_block_set_quarantined(struct kvk_cache *cache, uint32_t block, bool quarantined);

/* The tier of the copy to read: device before host. The block must have a slot in memory: what is
 * held has one (a copy on disk alone is held only by those who are restoring it). */
enum kvk_tier kvk_block_tier(const struct kvk_block *block);

/* Can other processes reach the tier's memory, and how? A descriptor of it, or of the table of its
 * slabs (base/slab_table.h); -1: not at all. */
int kvk_tier_descriptor(const struct kvk_group_tier *at, uint32_t shard);
/* Slabs of it are opened one by one by processes that would keep them: none leaves meanwhile. */
bool kvk_tier_is_lent(const struct kvk_group_tier *at);

/* Address of a shard of a slot that has memory. */
uint8_t *kvk_slot_address(const struct kvk_group *group, enum kvk_tier tier, uint32_t slot,
                          uint32_t shard);
/* Address of a shard of the block's copy or slot in a tier. */
uint8_t *kvk_block_address(const struct kvk_cache *cache, const struct kvk_block *block,
                           enum kvk_tier tier, uint32_t shard);
uint32_t kvk_block_generation(const struct kvk_cache *cache, const struct kvk_block *block,
                              enum kvk_tier tier);
uint64_t *kvk_block_checksums(const struct kvk_cache *cache, const struct kvk_block *block,
                              enum kvk_tier tier); /* [shard_count] */

/* Drop one copy; the last one forgets the block (HOLLOW, or FREE and gone). It must not be pinned
 * or copying there; the last copy must not be held. Counts an eviction where `evicted`. */
void kvk_block_drop_copy(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, bool evicted);

/* The bytes in this tier do not match their checksum: they count as no copy any more, are found by
 * nobody, and go when nobody pins them or holds the block for them. A last copy that nobody holds
 * goes at once, and the block may go with it. */
void kvk_block_discredit(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);

/* The bytes in this tier were discredited, and are now those that were sealed: they count again.
 * checksums: [group.shard_count]. */
void kvk_block_recredit(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier,
                        const uint64_t *checksums);

/* Seal an unsealed block whose bytes are all there: it gets its copy bit. */
void kvk_block_seal(struct kvk_cache *cache, uint32_t block);

/* Give `winner` (hollow, indexed) the bytes of `block` (sealed, private, one holder); `block` is
 * freed, the caller's hold and pins are now on the winner. */
void kvk_block_fill(struct kvk_cache *cache, uint32_t winner, uint32_t block);

/* `ours` (sealed, private, one holder) is the same block as `winner`, which has its bytes on disk
 * alone: the winner gets our copy in memory, with its hold and pins; `ours` is gone. */
void kvk_block_adopt(struct kvk_cache *cache, uint32_t winner, uint32_t ours);

/* For restore.c: the loose slot is a whole copy of the block, with these checksums [shard_count].
 * Nothing is settled: the caller holds the block, and releases it when all is there. */
void kvk_block_put_back(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint32_t slot,
                        const uint64_t *checksums);

/* A new block of the group with `slot`, RESERVED: one hold and one pin, the caller's.
 * KVK_BLOCK_NONE: config.blocks are known already. */
uint32_t kvk_block_create(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          uint32_t slot);
/* The next block of the content has a place in the chain, though its bytes are elsewhere: public.
 * The cursor stands behind it, whether it was there already or is new and hollow; it goes with the
 * next settling unless the caller anchors it. KVK_EXHAUSTED: no ids or memory; nothing changed. */
KVK_CHECKED enum kvk_status kvk_block_know(struct kvk_cache *cache, struct kvk_group *group,
                                           struct kvk_cursor *cursor,
                                           const struct kvk_content *content);
/* A copy has landed: the loose slot is the block's, its checksums are the caller's to store. */
void kvk_block_attach(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint32_t slot);
/* An unsealed block's bytes were copied: the loose slot in `target` becomes its slot, its pins go
 * along, the old slot is free. */
void kvk_block_relocate(struct kvk_cache *cache, uint32_t block, enum kvk_tier target,
                        uint32_t slot);

/* A whole, unpinned block's bytes were copied within its tier: the loose slot becomes its slot,
 * with these checksums [shard_count]; the old slot is free. */
void kvk_block_reslot(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint32_t slot,
                      const uint64_t *checksums);

/* Take a free slot of the arena's slabs for a copy under way, or KVK_SLOT_NONE; give it back. It is
 * loose meanwhile: used, bound, nobody's. */
uint32_t kvk_slot_take(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier);
void kvk_slot_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                   uint32_t slot);

/* The same for a slot that was taken when the process began, by its number: its memory, or its part
 * of the file, is there. KVK_EXISTS, KVK_EXHAUSTED, KVK_INVALID as kvk_arena_take_at();
 * KVK_EXHAUSTED also where there is no memory for the queues. */
KVK_CHECKED enum kvk_status kvk_slot_take_at(struct kvk_cache *cache, struct kvk_group *group,
                                             enum kvk_tier tier, uint32_t slot);
/* The same whatever its tenant's limit is: for what must be kept out of use. */
KVK_CHECKED enum kvk_status kvk_slot_keep_at(struct kvk_cache *cache, struct kvk_group *group,
                                             enum kvk_tier tier, uint32_t slot);

/* A slot of the disk that left its block is free again: its record's removal is committed. */
void kvk_slot_retire(struct kvk_cache *cache, struct kvk_group *group, uint32_t slot);

/* May the last copy in memory go without leaving a child with bytes there behind? */
static inline bool kvk_block_is_leaf(const struct kvk_group *group, const struct kvk_block *block)
{
    return group->windowed || block->memory_children == 0;
}

/* The next part of a table answer, its arrays carved from tables.memory. */
struct kvk_table_part *kvk_tables_part(struct kvk_tables *tables, uint32_t group,
                                       uint64_t first_block, uint32_t count);
/* Fill one part of a table answer from block ids: slots, tiers, generations. */
void kvk_table_fill(const struct kvk_cache *cache, const uint32_t *blocks, uint32_t count,
                    struct kvk_table_part *part);
/* Room in tables.memory for `entries` entries over all parts, and no part yet. Unlocked; grows,
 * never shrinks. */
KVK_CHECKED enum kvk_status kvk_tables_reserve_unlocked(struct kvk_tables *tables, uint64_t entries,
                                                        struct kvk_error *error);

/* ================= room.c: reserving slots, evicting, demoting ================= */

/* What a call wants reserved, over all groups, all or nothing. */
struct kvk_room_want {
    enum kvk_tier tier;
    uint32_t counts[KVK_GROUP_COUNT_MAX]; /* blocks per group */
    uint64_t growth_bytes;     /* to be kept beside them (OpenSequence): there must be room for it;
                                  the caller adds it to tiers[tier].growth_bytes */
    uint64_t own_growth_bytes; /* of tiers[tier].growth_bytes, what this call may use (Append); the
                                  caller takes it off again */
    uint64_t sequence_id;      /* for the journal */
};

/*
 * Reserve fresh blocks (state RESERVED, one hold and one pin in the tier each, the caller's), in
 * `blocks[group]` [counts[group]]. Evicts and hands slabs over as needed.
 * KVK_WOULD_BLOCK: room can be made, but only by copying or punching: nothing changed; call
 * kvk_room_make_drops() and try again. KVK_EXHAUSTED: it cannot; the error says why (cause, needed,
 * limit, retry hint) and the journal has it.
 */
KVK_CHECKED enum kvk_status kvk_room_reserve(struct kvk_cache *cache, struct kvk_space *space,
                                             const struct kvk_room_want *want,
                                             uint32_t *blocks[KVK_GROUP_COUNT_MAX],
                                             const struct kvk_caller *caller,
                                             struct kvk_error *error);

/* An id for one more block: where config.blocks are known it may be had only at the price of
 * another, idle one. False: there is none that may go. */
bool kvk_room_id_free(struct kvk_cache *cache, const struct kvk_group *group);
/* Let the tenant's own idle blocks go until all that is kept for it (metadata.h) is so little,
 * where its quota lets them go at all; within reason. */
void kvk_room_records_free(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                           uint64_t bytes);

/* A slot in another tier for a copy of an existing block; no hold, no state change. Used up by
 * kvk_tier_copy_drops(), or given back. KVK_WOULD_BLOCK as kvk_room_reserve(). `caller` NULL: not
 * on anybody's behalf; growth that is kept is no hindrance and nothing is noted. */
KVK_CHECKED enum kvk_status kvk_room_slot(struct kvk_cache *cache, struct kvk_group *group,
                                          enum kvk_tier tier, const struct kvk_caller *caller,
                                          uint32_t *slot, struct kvk_error *error);
void kvk_room_slot_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                        uint32_t slot);

/* Demote a bounded batch of victims, back or punch slabs, so that a reservation that would have
 * blocked gets further. Drops the lock. KVK_DEADLINE, KVK_CANCELLED, or KVK_EXHAUSTED where nothing
 * can be done any more. */
KVK_CHECKED enum kvk_status kvk_room_make_drops(struct kvk_cache *cache, struct kvk_space *space,
                                                const struct kvk_room_want *want,
                                                const struct kvk_caller *caller,
                                                struct kvk_error *error);

/* Reserve, making room as long as the caller may block and has time: the loop over both. The lock
 * is dropped only if the caller may block. */
KVK_CHECKED enum kvk_status kvk_room_reserve_drops(struct kvk_cache *cache, struct kvk_space *space,
                                                   const struct kvk_room_want *want,
                                                   uint32_t *blocks[KVK_GROUP_COUNT_MAX],
                                                   const struct kvk_caller *caller,
                                                   struct kvk_error *error);

/* Why would `needed_bytes` not fit in the tier now? Fills cause, value, limit, retry hint and text,
 * returns KVK_EXHAUSTED; also writes the journal. */
KVK_CHECKED enum kvk_status kvk_room_refuse(struct kvk_cache *cache, enum kvk_tier tier,
                                            uint64_t needed_bytes, struct kvk_space *space,
                                            uint64_t sequence_id, const struct kvk_caller *caller,
                                            struct kvk_error *error);
/* Any refusal worth remembering (RESOURCE_EXHAUSTED, PRECONDITION…). */
void kvk_refusal_note(struct kvk_cache *cache, const struct kvk_caller *caller,
                      const struct kvk_tenant *tenant, uint64_t sequence_id, uint64_t needed_bytes,
                      const struct kvk_error *error);
/* The refusal that was noted last has hint and advice by now. */
void kvk_refusal_amend(struct kvk_cache *cache, const struct kvk_error *error);

/* ================= public.c ================= */

struct kvk_prefix;

/* Is it in the slots of a public prefix? Nobody's chain has it then: it is held, or gone. */
static inline bool kvk_block_is_public(const struct kvk_cache *cache, uint32_t id)
{
    return kvk_group_of(cache, kvk_index_block(cache->index, id))->space->is_public;
}

/* What is public of the prompt's first `limit` blocks, into cache.path and path_tiers wherever the
 * space's own chain has no bytes in memory. Fills prefix->known and publication; returns how many
 * blocks from the start are filled in all groups now. */
uint64_t kvk_public_merge(struct kvk_cache *cache, const struct kvk_space *space,
                          const struct kvk_prompt *prompt, uint64_t limit,
                          struct kvk_prefix *prefix);
/* Fills prefix->public_blocks. */
void kvk_public_count(const struct kvk_cache *cache, struct kvk_prefix *prefix);
/* A look-up, a lease or a sequence has found so much of it. */
void kvk_public_hit(struct kvk_cache *cache, uint64_t public_id, uint64_t tokens);
/* The space was invalidated: what was public before is not for it any more, and what was published
 * from it is withdrawn. With `prefix`: only publications that begin with it. */
void kvk_public_invalidated(struct kvk_cache *cache, struct kvk_space *space,
                            const struct kvk_prompt *prefix);
/* All that the tenant has published is withdrawn. */
void kvk_public_forget(struct kvk_cache *cache, const struct kvk_tenant *tenant);
/* Public spaces of the tenant that others hold or map still. */
uint32_t kvk_public_spaces_held(const struct kvk_cache *cache, const struct kvk_tenant *tenant);
/* The public space, if the session may map it: its tenant has a space of the same identity and
 * geometry, and it is published, or the session's instance holds blocks there. */
KVK_CHECKED enum kvk_status kvk_public_map_find(struct kvk_cache *cache,
                                                const struct kvk_session *session,
                                                uint64_t space_id, struct kvk_space **space,
                                                struct kvk_error *error);
/* Spaces of withdrawn prefixes go once nobody holds or maps anything there. Drops the lock. */
void kvk_public_maintain_drops(struct kvk_cache *cache);
/* The files of what was withdrawn go, durably. KVK_UNAVAILABLE: one could not; it is tried again by
 * maintenance and by whoever calls this. */
KVK_CHECKED enum kvk_status kvk_public_settle_drops(struct kvk_cache *cache,
                                                    struct kvk_error *error);
void kvk_public_withdraw_all_unlocked(struct kvk_cache *cache);

/* ================= quota.c ================= */

/* The tables of all tenants that are there; for kvk_cache_create(). */
KVK_CHECKED enum kvk_status kvk_tenant_states_create(struct kvk_cache *cache,
                                                     struct kvk_error *error);
struct kvk_tenant_state *kvk_tenant_state_of(const struct kvk_cache *cache,
                                             const struct kvk_tenant *tenant);
/* A space comes to its tenant's list, or leaves it. */
void kvk_quota_space_link(struct kvk_cache *cache, struct kvk_space *space);
void kvk_quota_space_unlink(struct kvk_cache *cache, struct kvk_space *space);

/* So many bytes more, or less, are bound (or kept for growth): in the tier's sum, in its tenant's
 * and in what is guarded. */
void kvk_quota_bound_change(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                            enum kvk_tier tier, uint64_t bytes, bool add);
void kvk_quota_growth_change(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                             enum kvk_tier tier, uint64_t before_bytes, uint64_t after_bytes);

/* Would `bytes` more of slots pass the tenant's limit of the tier? */
bool kvk_quota_is_full(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                       enum kvk_tier tier, uint64_t bytes);
/* Bytes of slots that it may still have; UINT64_MAX: no limit. */
uint64_t kvk_quota_left(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                        enum kvk_tier tier);
/* Bytes that it has above its guarantee: what others may take. */
uint64_t kvk_quota_spare(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         enum kvk_tier tier);
/* With `bytes` more it would still be within its guarantee. */
bool kvk_quota_is_due(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_tier tier, uint64_t bytes);

enum kvk_quota_verdict {
    KVK_QUOTA_OK = 0,
    KVK_QUOTA_LIMIT,      /* over its own limit */
    KVK_QUOTA_GUARANTEED, /* what others are guaranteed would not be left for them */
};
/* May the tenant have `needed` bytes of slots and keep `growth` more, of which `own_growth` were
 * kept before? */
enum kvk_quota_verdict kvk_quota_admits(const struct kvk_cache *cache,
                                        const struct kvk_tenant *tenant, enum kvk_tier tier,
                                        uint64_t needed_bytes, uint64_t growth_bytes,
                                        uint64_t own_growth_bytes);
/* The refusal of a verdict, with its numbers and the time to try again. */
enum kvk_status kvk_quota_fail(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                               enum kvk_tier tier, uint64_t needed_bytes,
                               enum kvk_quota_verdict verdict, struct kvk_error *error);

/* What was bound for the tenant, before blocks that nobody held are held for it. */
struct kvk_quota_mark {
    uint64_t bound_bytes[KVK_TIER_COUNT];
};
void kvk_quota_mark(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                    struct kvk_quota_mark *mark);
/* Have the holds taken since left less than others are guaranteed? KVK_EXHAUSTED: give them back.
 */
KVK_CHECKED enum kvk_status kvk_quota_check_holds(const struct kvk_cache *cache,
                                                  const struct kvk_tenant *tenant,
                                                  const struct kvk_quota_mark *mark,
                                                  struct kvk_error *error);

/* `more` sequences (leases) of the tenant: KVK_EXHAUSTED over its limit. */
KVK_CHECKED enum kvk_status kvk_quota_check_count(const struct kvk_tenant_state *state,
                                                  bool sequences, uint32_t more,
                                                  struct kvk_error *error);
/* Drop up to `count` copies on disk of a tenant above its limit there: disk_room.c. */
void kvk_disk_trim(struct kvk_cache *cache, struct kvk_tenant_state *state, uint32_t count);
/* A bounded part of what a lowered limit and idle times leave to do. Drops the lock. */
void kvk_quota_maintain_drops(struct kvk_cache *cache);
/* Drop what was idle for too long: a bounded round. idle.c. */
void kvk_idle_round(struct kvk_cache *cache);

/* ================= usage.c ================= */

/* The tenant's bytes in the tier are about to change. */
void kvk_usage_advance(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                       enum kvk_tier tier);
/* state.usage as it is now. */
void kvk_usage_refresh(struct kvk_cache *cache, struct kvk_tenant_state *state);
/* The tenant's place in the tables is nobody's any more: it has nothing. */
void kvk_usage_end(struct kvk_cache *cache, struct kvk_tenant_state *state);
/* Nor has it counters in the catalogue. */
void kvk_usage_forget_unlocked(struct kvk_cache *cache, const struct kvk_tenant *tenant);
/* Now and then: counters to the catalogue. Drops the lock. */
void kvk_usage_maintain_drops(struct kvk_cache *cache);

/* ================= transfer between tiers: tiering.c ================= */

/*
 * Copy blocks to `tier`, each with a slot there taken by kvk_room_slot(). Every block must be held
 * or be in the caller's transfer by TRANSFER_BEGIN (which this does). Drops the lock while bytes
 * move. Checksums of whole copies are verified on the way; an unsealed block's is stored. On
 * KVK_OK all have their copy in `tier` (an unsealed block has moved with its pins: its old slot is
 * free). The host tier is exclusive: what was copied to the device loses its host copy unless that
 * is pinned. On failure no block has changed, and all new slots are given back; KVK_DATA_LOSS: a
 * source did not match: that copy is discredited, and counted.
 */
struct kvk_move {
    uint32_t block;
    uint32_t slot; /* in the target tier */
};
KVK_CHECKED enum kvk_status kvk_tier_copy_drops(struct kvk_cache *cache, enum kvk_tier tier,
                                                const struct kvk_move *moves, uint32_t move_count,
                                                struct kvk_error *error);

/* The two halves of it, for those who choose blocks one by one. Begin borrows the block and takes
 * it out of its queue; run ends every move that was begun, and where it went well drops the source
 * copy if that is wanted and nobody pins it. */
void kvk_tier_move_begin(struct kvk_cache *cache, enum kvk_tier tier, const struct kvk_move *move);
KVK_CHECKED enum kvk_status kvk_tier_moves_run_drops(struct kvk_cache *cache, enum kvk_tier tier,
                                                     const struct kvk_move *moves,
                                                     uint32_t move_count, bool drop_source,
                                                     struct kvk_error *error);

/* Copy the first bytes of one block into another (copy-on-write of a tail): all shards, whole
 * slots. Both are held by the caller. Drops the lock. */
KVK_CHECKED enum kvk_status kvk_block_clone_drops(struct kvk_cache *cache, uint32_t target,
                                                  uint32_t source, struct kvk_error *error);

/* Take (or verify) the checksums of whole blocks where they lie. Drops the lock; blocks must be
 * held. verify false: store them (at seal). */
KVK_CHECKED enum kvk_status kvk_block_checksum_drops(struct kvk_cache *cache,
                                                     const uint32_t *blocks, uint32_t count,
                                                     bool verify, struct kvk_error *error);

/* Demotion ahead of need: keep config.device_free_percent of the device tier free or clean. One
 * bounded batch. Drops the lock. */
void kvk_tier_run_ahead_drops(struct kvk_cache *cache);
/* Punch slabs that left their arenas; give the budget back. Drops the lock. False, without having
 * dropped it: there are none, or another thread has them in hand. */
bool kvk_tier_punch_drops(struct kvk_cache *cache);
/* What is punched out is not charged any more; frees the punch. */
void kvk_tier_punch_end(struct kvk_cache *cache, struct kvk_punch *punch);
uint64_t kvk_tier_load_ns(const struct kvk_cache *cache, uint64_t bytes); /* estimate */

/* ================= lost.c ================= */

/* The tier's device has fallen away for good. */
bool kvk_tier_is_lost(const struct kvk_cache *cache, enum kvk_tier tier);
/* Where blocks go when nobody says where: to the device, or the host where there is none or its GPU
 * has fallen away. */
enum kvk_tier kvk_tier_first(const struct kvk_cache *cache);
/* What of the device tier's device went wrong so far. */
void kvk_tier_health(const struct kvk_cache *cache, struct kvk_device_health *health);
/* KVK_PRECONDITION where it has: nothing new may come to lie there. Trying again does not help. */
KVK_CHECKED enum kvk_status kvk_tier_check_there(const struct kvk_cache *cache, enum kvk_tier tier,
                                                 struct kvk_error *error);
/* Where it has, forget what lay there, over at most `count` block ids. */
void kvk_lost_slice(struct kvk_cache *cache, uint32_t count);

/* ================= slice.c ================= */

/* Between slices of long work: whoever waits for the lock gets it, one who sleeps for it too, who
 * would come too late for the moment in which a mere yield leaves it free. */
void kvk_pause_drops(struct kvk_cache *cache);
/* One reference to a block more was taken or given back: pause after each cache.slice_blocks of
 * them. True: the lock was dropped. */
bool kvk_slice_drops(struct kvk_cache *cache, uint32_t *work);
/* May the caller do so much, or is it one that must not pause? Then KVK_WOULD_BLOCK, so that a
 * thread does it that may. */
static inline enum kvk_status kvk_slice_admit(const struct kvk_cache *cache,
                                              const struct kvk_caller *caller, uint64_t blocks)
{
    return blocks < cache->slice_blocks || caller->may_block ? KVK_OK : KVK_WOULD_BLOCK;
}

/* ================= maintenance: cache.c, invalidate.c, room.c ================= */

/* Memory of the engine's own tables: index, tokens, policy, journal, curves. O(1), or nearly. */
uint64_t kvk_cache_metadata_bytes(const struct kvk_cache *cache);
/* Memory that workers have for operands of attention, and what attention has on the device for
 * blocks that it brings there; it counts in no tier. Walks the sessions. */
uint64_t kvk_cache_workspace_bytes(const struct kvk_cache *cache);
/* attention_workspace.c: the latter; what of it stands idle goes; all of it, without the lock. */
uint64_t kvk_workspace_bytes(const struct kvk_cache *cache);
void kvk_workspaces_maintain_drops(struct kvk_cache *cache);
void kvk_workspaces_finish(struct kvk_cache *cache);
/* Time in all in which the daemon itself stood still (stopped, or the machine slept), what is not
 * noted yet included: lease time is the clock's less this. */
uint64_t kvk_cache_stood_still(const struct kvk_cache *cache, uint64_t now_ns);
/* Free what invalidated roots left behind, over at most `count` block ids. */
void kvk_purge_slice(struct kvk_cache *cache, uint32_t count);
/* Another node of the fleet has invalidated the space: when this returns, no look-up finds what was
 * here of it. Without the lock. */
void kvk_invalidated_elsewhere(struct kvk_cache *cache, uint64_t space_id);
/* Give back slabs that stand empty, and memory where there is no budget for it; back places ahead
 * of need. Drops the lock. */
void kvk_room_tidy_drops(struct kvk_cache *cache);
/* Every law of the engine's own, with the lock held; kvk_cache_check() takes it. */
void kvk_cache_check_locked(struct kvk_cache *cache);

/* ================= lookup.c ================= */

/* The longest boundary in all groups at once, of a prompt under roots[] (KVK_ROOT_NONE: nothing).
 * Fills cache.path[g] (block ids from the start) and path_tiers[g]; `blocks` is the boundary.
 * `token_limit`: the boundary lies at or below it (leave_last). */
struct kvk_prefix {
    uint64_t blocks;
    uint64_t known[KVK_GROUP_COUNT_MAX]; /* path entries that are filled */
    uint64_t own[KVK_GROUP_COUNT_MAX]; /* blocks from the start that the space's own chain knows */
    const struct kvk_publication *publication; /* whose blocks are among them; NULL: nobody's. Valid
                                                  while the lock is held */
    uint64_t public_blocks;                    /* of `blocks`, in group 0 */
    uint64_t hashed_bytes;
    uint32_t partial_tokens; /* behind `blocks`: see partial.c */
    uint32_t
        partial[KVK_GROUP_COUNT_MAX]; /* the blocks that begin with them, where there are any */
};
void kvk_prefix_find(struct kvk_cache *cache, struct kvk_space *space,
                     const uint32_t roots[KVK_GROUP_COUNT_MAX], const struct kvk_prompt *prompt,
                     uint64_t token_limit, struct kvk_prefix *prefix);
/* The longest boundary up to `limit` where every group has what a query from there sees: blocks
 * whose entry in tiers[group] is not 0. */
uint64_t kvk_boundary_find(const struct kvk_space *space,
                           const uint8_t *const tiers[KVK_GROUP_COUNT_MAX], uint64_t limit);
/* Some of path_tiers were changed: the boundary as it is now, at or below prefix->blocks. */
void kvk_prefix_shorten(const struct kvk_cache *cache, const struct kvk_space *space,
                        struct kvk_prefix *prefix);
/* Does a query after `blocks` blocks see block `index` of the group? */
bool kvk_group_sees(const struct kvk_group *group, uint64_t blocks, uint64_t index);
/* Does one after `tokens` tokens see the whole block `index`? */
bool kvk_group_sees_at(const struct kvk_group *group, uint64_t tokens, uint64_t index);
/* Does everything lie in memory that it sees of whole blocks of the path? */
bool kvk_prefix_sees_memory(const struct kvk_cache *cache, const struct kvk_space *space,
                            uint64_t tokens);
/* Tokens that a look-up may find: 0 below the space's lookup_min_tokens. */
uint64_t kvk_prefix_limit(const struct kvk_space *space, const struct kvk_prompt *prompt,
                          bool leave_last);
/* Count one query and what it hit; of a retry only that it was one. */
void kvk_prefix_count(struct kvk_cache *cache, struct kvk_space *space, uint64_t query_tokens,
                      uint64_t hit_tokens, bool retry);
/* Count a use of every block of the boundary that is seen, deepest first. */
void kvk_prefix_use(struct kvk_cache *cache, struct kvk_space *space,
                    const struct kvk_prefix *prefix);
uint64_t kvk_policy_now(const struct kvk_cache *cache);
/* A look-up, or moving what it found, took so long. */
void kvk_prefix_cost(struct kvk_cache *cache, struct kvk_space *space, uint64_t begun_ns);

/* ================= partial.c: hits that end within a block ================= */

/* KVK_INVALID: no block of the group, which is called `name`, can be cut. */
KVK_CHECKED enum kvk_status kvk_partial_check(const struct kvk_geometry *geometry, const char *name,
                                              struct kvk_error *error);
/* Where the space allows it and the prompt does: the part of a block that is a hit behind the
 * prefix that was found, in memory. Fills partial_tokens and partial; under a window `blocks` may
 * grow, since a query behind the part sees less of what was before. */
void kvk_partial_find(struct kvk_cache *cache, const struct kvk_space *space,
                      const uint32_t roots[KVK_GROUP_COUNT_MAX], const struct kvk_prompt *prompt,
                      uint64_t token_limit, struct kvk_prefix *prefix);
static inline uint64_t kvk_prefix_tokens(const struct kvk_space *space,
                                         const struct kvk_prefix *prefix)
{
    return prefix->blocks * space->block_tokens + prefix->partial_tokens;
}
/* So many tokens of a query were found in a part of a block. */
void kvk_partial_count(struct kvk_cache *cache, const struct kvk_space *space, uint64_t tokens,
                       bool retry);

/* The blocks that parts are copied from, borrowed for a call: one of each group, or none. */
struct kvk_partial_sources {
    uint32_t count;
    uint32_t blocks[KVK_GROUP_COUNT_MAX];
    uint8_t tiers[KVK_GROUP_COUNT_MAX];
};
void kvk_partial_borrow(struct kvk_cache *cache, const struct kvk_space *space,
                        const struct kvk_prefix *prefix, struct kvk_partial_sources *sources);
void kvk_partial_return(struct kvk_cache *cache, struct kvk_partial_sources *sources);
/* Into fresh blocks of ours, `targets` [group]. Drops the lock. What does not match its checksum
 * is discredited: KVK_DATA_LOSS. */
KVK_CHECKED enum kvk_status kvk_partial_copy_drops(struct kvk_cache *cache, const uint32_t *targets,
                                                   const struct kvk_partial_sources *sources,
                                                   struct kvk_error *error);
/* They were used, at cache.stamp. */
void kvk_partial_use(struct kvk_cache *cache, const struct kvk_space *space,
                     const struct kvk_partial_sources *sources);

/* ================= sequence files ================= */

/* The sequence, if it is the session's instance's; KVK_NOT_FOUND / KVK_PERMISSION / busy. */
KVK_CHECKED enum kvk_status kvk_sequence_find(struct kvk_cache *cache,
                                              const struct kvk_caller *caller, uint64_t session_id,
                                              uint64_t sequence_id, struct kvk_session **session,
                                              struct kvk_sequence **sequence,
                                              struct kvk_error *error);

/* End a sequence that its instance loses: what is unsealed goes to the quarantine of each session
 * whose live process may write there, else back at once. Busy ones are doomed instead. */
void kvk_sequence_abandon_drops(struct kvk_cache *cache, struct kvk_sequence *sequence);
/* Blocks that its tables name, of all groups. */
uint64_t kvk_sequence_blocks(const struct kvk_sequence *sequence);
/* A rank ended: cut the sequence back to what is sealed by all; quarantine as above. */
void kvk_sequence_rank_ended(struct kvk_cache *cache, struct kvk_sequence *sequence,
                             struct kvk_session *session);

/* ================= lease.c ================= */

/* Release all, in slices, and free it; nobody finds it meanwhile. */
void kvk_lease_end_drops(struct kvk_cache *cache, struct kvk_lease *lease);
/* Blocks that its tables name, of all groups. */
uint64_t kvk_lease_blocks(const struct kvk_lease *lease);
void kvk_leases_expire_drops(struct kvk_cache *cache); /* bounded */
KVK_CHECKED enum kvk_status kvk_lease_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           uint64_t session_id, uint64_t lease_id,
                                           struct kvk_session **session, struct kvk_lease **lease,
                                           struct kvk_error *error);
void kvk_transfer_finish(struct kvk_cache *cache, struct kvk_transfer *transfer);
uint64_t kvk_lease_clock(const struct kvk_cache *cache);

/* ================= session.c ================= */

/* The session, if it is the caller's tenant's and connected. KVK_NOT_FOUND (session ended). */
KVK_CHECKED enum kvk_status kvk_session_find(struct kvk_cache *cache,
                                             const struct kvk_caller *caller, uint64_t session_id,
                                             struct kvk_session **session, struct kvk_error *error);
/* May a live process of this instance write the group's slots in the tier? One that can, or NULL.
 */
struct kvk_session *kvk_instance_writer(struct kvk_instance *instance,
                                        const struct kvk_group *group, enum kvk_tier tier);
/* Take over the last hold and pin of an unsealed block until the session's process is gone. */
void kvk_session_quarantine(struct kvk_cache *cache, struct kvk_session *session, uint32_t block);
/* One bounded round: processes without a side socket, tokens that were not used, instances whose
 * last busy call has ended. Drops the lock. */
void kvk_sessions_maintain(struct kvk_cache *cache);
/* Tell the sessions of a tenant (NULL: of all). Without the lock. */
void kvk_sessions_notify_unlocked(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                  enum kvk_notice_kind kind, uint64_t value);
/* The daemon ends: end every session and wait for no process. Without the lock. */
void kvk_sessions_end_all_unlocked(struct kvk_cache *cache);
uint64_t kvk_cache_new_id(struct kvk_cache *cache);

#endif
