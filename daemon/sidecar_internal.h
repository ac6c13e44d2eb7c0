/*
 * How a sidecar's file is laid out. Everything here is stored; the daemon that reads it may be
 * newer than the one that wrote it, on the same machine, since the memory does not outlive that.
 */
#ifndef KVK_DAEMON_SIDECAR_INTERNAL_H
#define KVK_DAEMON_SIDECAR_INTERNAL_H

#include "daemon/cache_internal.h"
#include "daemon/kept.h"
#include "daemon/sidecar.h"

#define KVK_SIDECAR_MAGIC UINT64_C(0x72616365646973eb) /* not text: its first byte is none */
#define KVK_SIDECAR_VERSION 2U
#define KVK_SIDECAR_PAGE UINT64_C(4096)

/* Slots of a tier that there are words for: address space alone, so the file's layout does not
 * depend on how large the tiers are configured. */
#define KVK_SIDECAR_SLOTS_MAX (UINT32_C(1) << 26)

struct kvk_sidecar_header {
    uint64_t magic;
    uint32_t version;
    uint32_t header_size;
    uint64_t space_id;
    uint64_t tenant_id;
    uint64_t shard_digest; /* of the bytes of each shard */
    uint64_t nonce;        /* of this file: part of every entry's checksum */
    uint64_t namespace_id; /* where the processes' numbers mean something */
    uint32_t group;
    uint32_t shard_count;
    uint32_t block_tokens;
    uint32_t inline_size; /* of salt and content bytes together */
    uint32_t entry_size;
    uint32_t entry_capacity;
    uint32_t process_capacity;
    uint32_t reserved;
    uint64_t checksum;   /* of what is above; below may change */
    uint32_t entry_high; /* entries from here on were never used */
    uint32_t reserved_too;
};
_Static_assert(sizeof(struct kvk_sidecar_header) == 104, "stored");

struct kvk_sidecar_process {
    uint64_t start;     /* clock ticks since the machine began */
    uint32_t tier_mask; /* whose slots it may write */
    uint32_t pid;       /* written last; 0: no process */
};
_Static_assert(sizeof(struct kvk_sidecar_process) == 16, "stored");

/*
 * A word: its state in the low byte; where it is SEALED, the entry above it, and above that a check
 * of both, of where the word stands and of this file. A word that was damaged would otherwise hand
 * one block's bytes to another block, whose record is whole.
 */
enum kvk_word_state {
    KVK_WORD_FREE = 0, /* what a hole in the file reads as */
    KVK_WORD_GRANTED = 1,
    KVK_WORD_SEALED = 2,
};
#define KVK_WORD_ENTRY_SHIFT 8
#define KVK_WORD_CHECK_SHIFT 40

static inline enum kvk_word_state kvk_word_state(uint64_t word)
{
    return (enum kvk_word_state)(word & 0xff);
}

static inline uint32_t kvk_word_entry(uint64_t word)
{
    return (uint32_t)(word >> KVK_WORD_ENTRY_SHIFT);
}

/* Behind it: u64 checksums[shard_count], u32 tokens[block_tokens], the salt, the content bytes.
 * Where the host tier is compact, header.shard_count is twice the group's: the checksums of what
 * lies on the device, and behind them of what lies on the host. */
struct kvk_sidecar_entry {
    uint64_t checksum; /* of what follows from `key` on; 0: no entry here */
    uint32_t use_count;
    uint32_t used_s; /* last use, seconds since 1970 */
    struct kvk_key key;
    struct kvk_key parent;
    uint32_t position;
    uint16_t salt_size;
    uint16_t extra_size;
    uint64_t checksums[];
};
_Static_assert(sizeof(struct kvk_sidecar_entry) == 56, "stored");

struct kvk_sidecar {
    struct kvk_region region;
    struct kvk_sidecar_header *header;      /* mapped, as the next three */
    struct kvk_sidecar_process *processes;  /* [header.process_capacity] */
    uint64_t *words[KVK_MEMORY_TIER_COUNT]; /* [KVK_SIDECAR_SLOTS_MAX]; NULL: not kept */
    uint8_t *entries;                       /* [header.entry_capacity] of header.entry_size */
    uint16_t *process_refs;                 /* [header.process_capacity], ours */
    uint32_t *free_entries;                 /* [header.entry_capacity], zero pages, ours */
    uint32_t free_count;
    uint32_t used_count;
    uint32_t entry_backed; /* entries that have memory */
    bool frozen;           /* the cache is leaving: what is recorded stays as it is */
    struct kvk_sidecar_found found;
    uint64_t *bound; /* [entry_high / 64 + 1] while it is restored: entries of a block. Ours */
};

/* What the slot's word says where it is the entry's. */
static inline uint64_t kvk_word_sealed(const struct kvk_sidecar *sidecar, enum kvk_tier tier,
                                       uint32_t slot, uint32_t entry)
{
    uint64_t place = (uint64_t)tier << 32 | slot;
    uint64_t mixed = sidecar->header->nonce ^ place * UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ mixed >> 32 ^ entry) * UINT64_C(0xd6e8feb86659fd93);
    mixed = (mixed ^ mixed >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return mixed >> KVK_WORD_CHECK_SHIFT << KVK_WORD_CHECK_SHIFT |
           (uint64_t)entry << KVK_WORD_ENTRY_SHIFT | KVK_WORD_SEALED;
}

/* Does the word say so, undamaged? */
static inline bool kvk_word_is_sealed(const struct kvk_sidecar *sidecar, enum kvk_tier tier,
                                      uint32_t slot, uint64_t word)
{
    return word == kvk_word_sealed(sidecar, tier, slot, kvk_word_entry(word));
}

/* Where its group has a sidecar. */
static inline bool kvk_sidecar_has_entry(const struct kvk_cache *cache, uint32_t block)
{
    return cache->records[block] != 0 && cache->records[block] != KVK_RECORD_UNKEPT;
}

static inline struct kvk_sidecar_entry *kvk_sidecar_entry_at(const struct kvk_sidecar *sidecar,
                                                             uint32_t entry)
{
    return (struct kvk_sidecar_entry *)(void *)(sidecar->entries +
                                                (size_t)entry * sidecar->header->entry_size);
}

static inline uint32_t *kvk_sidecar_tokens(const struct kvk_sidecar *sidecar,
                                           struct kvk_sidecar_entry *entry)
{
    return (uint32_t *)(void *)(entry->checksums + sidecar->header->shard_count);
}

/* The salt, and behind it the content bytes. */
static inline uint8_t *kvk_sidecar_inline(const struct kvk_sidecar *sidecar,
                                          struct kvk_sidecar_entry *entry)
{
    return (uint8_t *)(kvk_sidecar_tokens(sidecar, entry) + sidecar->header->block_tokens);
}

/* Of an entry as it stands there; its sizes must be in range. Never 0. */
uint64_t kvk_sidecar_sum(const struct kvk_sidecar *sidecar, uint32_t entry);

/* The entry is nobody's any more. */
void kvk_sidecar_entry_free(struct kvk_sidecar *sidecar, uint32_t entry);

static inline void kvk_word_write(struct kvk_sidecar *sidecar, enum kvk_tier tier, uint32_t slot,
                                  uint64_t word)
{
    __atomic_store_n(&sidecar->words[tier][slot], word, __ATOMIC_RELEASE);
}

#endif
