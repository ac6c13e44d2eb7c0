/*
 * What the files of the catalogue share. Private to hosttier/catalogue*.c and their tests.
 *
 * Locks: `environment_gate` is held shared by every transaction, and alone by whoever opens the
 * environment again after LMDB gave it up (a failed write of its root page); it is the only lock
 * here that is held across I/O, and nothing but transactions takes it. `queue.lock` is a leaf.
 */
#ifndef KVK_HOSTTIER_CATALOGUE_INTERNAL_H
#define KVK_HOSTTIER_CATALOGUE_INTERNAL_H

#include <lmdb.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/lock.h"
#include "hosttier/catalogue_records.h"

#define KVK_CATALOGUE_FORMAT 2 /* of the whole; a catalogue of another is migrated or refused */

enum kvk_catalogue_table {
    KVK_CATALOGUE_META,
    KVK_CATALOGUE_TENANTS,
    KVK_CATALOGUE_CREDENTIALS,
    KVK_CATALOGUE_SPACES,
    KVK_CATALOGUE_GENERATIONS,
    KVK_CATALOGUE_BLOCKS,
    KVK_CATALOGUE_VALUES,
};
#define KVK_CATALOGUE_TABLE_COUNT 7
#define KVK_CATALOGUE_TABLE_NAMES                                                                  \
    {                                                                                              \
        "meta", "tenants", "credentials", "spaces", "generations", "blocks", "values"              \
    }

/* ---- The queue of block operations: catalogue_writer.c ---- */

struct kvk_catalogue_operation {
    uint8_t key[KVK_RECORD_BLOCK_KEY_SIZE];
    uint64_t first_ticket; /* of all that were queued for this key and replaced by this one */
    struct kvk_record_bytes record; /* ours; data NULL: a removal */
};

/* Operations in the order of first_ticket, at most one per key. */
struct kvk_catalogue_batch {
    struct kvk_catalogue_operation *operations; /* [count], ours */
    uint32_t count, capacity;
    uint32_t *places; /* [place_count] operation + 1 by hash of its key; 0: empty. Ours */
    uint32_t place_count;
    uint64_t put_bytes;   /* of records */
    uint64_t last_ticket; /* given to one of its operations */
};

struct kvk_catalogue_queue {
    struct kvk_lock lock;
    pthread_cond_t wake; /* the writer: something to do */
    pthread_cond_t done; /* who flushes: a round is over */
    struct kvk_catalogue_batch filling;
    struct kvk_catalogue_batch committing; /* the committer's; its count is read under the lock */
    uint32_t committed_count;              /* of committing: already durable */
    bool committer_busy;
    bool stopping;
    uint64_t next_ticket;
    uint64_t first_queued_ns; /* of filling */
    uint64_t flush_ticket;    /* somebody waits for this one */
    uint64_t rounds;          /* of the committer, failed ones too */
    uint64_t failures;
    uint64_t retry_ns; /* not before; 0: nothing failed */
    uint64_t pause_ns;
    struct kvk_error error; /* of the last failure */
    uint32_t operations_max;
    uint64_t commit_ns_max;
    void (*committed)(void *context);
    void *context;
    _Atomic uint64_t committed_ticket;
    _Atomic bool failing;
};

struct kvk_catalogue {
    char path[4096]; /* of the environment's folder */
    int lock_fd;     /* ours; holds the folder */
    bool marked;     /* as being opened: see catalogue_probe.c */
    uint64_t map_bytes;
    uint64_t live_bytes_max; /* puts beyond are refused; the rest is for copies on write */
    bool threads;
    pthread_rwlock_t environment_gate;
    MDB_env *environment; /* NULL: lost, and to be opened again */
    MDB_dbi tables[KVK_CATALOGUE_TABLE_COUNT];
    struct kvk_catalogue_queue queue;
    pthread_t writer;
    bool writer_running;
    /* As of the last write. */
    _Atomic uint64_t used_bytes;
    _Atomic uint64_t counts[KVK_CATALOGUE_TABLE_COUNT];
    _Atomic uint64_t commits, committed_operations, commit_failures, commit_ns;
    _Atomic uint64_t damaged_records;
};

/* ---- Transactions: catalogue.c ---- */

struct kvk_catalogue_transaction {
    struct kvk_catalogue *catalogue;
    MDB_txn *handle;
};

KVK_CHECKED enum kvk_status kvk_catalogue_read_begin(struct kvk_catalogue *catalogue,
                                                     struct kvk_catalogue_transaction *transaction,
                                                     struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_catalogue_write_begin(struct kvk_catalogue *catalogue,
                                                      struct kvk_catalogue_transaction *transaction,
                                                      struct kvk_error *error);
/* Durable when it returns KVK_OK; nothing is changed otherwise. Ends the transaction. */
KVK_CHECKED enum kvk_status
kvk_catalogue_write_commit(struct kvk_catalogue_transaction *transaction, struct kvk_error *error);
void kvk_catalogue_abort(struct kvk_catalogue_transaction *transaction); /* ends a read, too */

/* LMDB's word for it as ours, with the folder's name. */
KVK_CHECKED enum kvk_status kvk_catalogue_fail(const struct kvk_catalogue *catalogue, int code,
                                               const char *doing, struct kvk_error *error);
void kvk_catalogue_count_damage(struct kvk_catalogue *catalogue, const char *kind);

/* Is there room for a new record of so many bytes, beside what is queued? */
KVK_CHECKED enum kvk_status kvk_catalogue_check_room(struct kvk_catalogue *catalogue,
                                                     uint64_t bytes, struct kvk_error *error);

/* Put or delete in a write transaction; deleting what is not there is KVK_NOT_FOUND. */
KVK_CHECKED enum kvk_status kvk_catalogue_put(struct kvk_catalogue_transaction *transaction,
                                              enum kvk_catalogue_table table,
                                              const struct kvk_record_key *key,
                                              const struct kvk_record_bytes *bytes,
                                              struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_catalogue_delete(struct kvk_catalogue_transaction *transaction,
                                                 enum kvk_catalogue_table table,
                                                 const struct kvk_record_key *key,
                                                 struct kvk_error *error);

/* ---- The writer: catalogue_writer.c ---- */

void kvk_catalogue_queue_init(struct kvk_catalogue_queue *queue,
                              const struct kvk_catalogue_options *options);
void kvk_catalogue_queue_finish(struct kvk_catalogue_queue *queue);
KVK_CHECKED enum kvk_status kvk_catalogue_writer_start(struct kvk_catalogue *catalogue,
                                                       struct kvk_error *error);
void kvk_catalogue_writer_stop(struct kvk_catalogue *catalogue); /* commits what it can, first */
uint64_t kvk_catalogue_queued_bytes(struct kvk_catalogue *catalogue);

/* ---- Versions: catalogue_format.c ---- */

/* From one format to the next, in the transaction that also writes the new mark. */
struct kvk_catalogue_migration {
    uint32_t from;
    enum kvk_status (*run)(struct kvk_catalogue_transaction *transaction, struct kvk_error *error);
};

/* What kvk_catalogue_open() does, with the format and the steps to it given: for tests of formats
 * that do not exist yet. */
KVK_CHECKED enum kvk_status
kvk_catalogue_open_format(const struct kvk_catalogue_options *options, uint32_t format,
                          const struct kvk_catalogue_migration *migrations,
                          uint32_t migration_count, struct kvk_catalogue **catalogue,
                          struct kvk_error *error);

/* Read the mark and bring the catalogue to `format`; a new one is marked. */
KVK_CHECKED enum kvk_status
kvk_catalogue_format_settle(struct kvk_catalogue *catalogue, uint32_t format,
                            const struct kvk_catalogue_migration *migrations,
                            uint32_t migration_count, struct kvk_error *error);
/* Remove block records whose space has no record: what a removal that was interrupted left. */
KVK_CHECKED enum kvk_status kvk_catalogue_sweep(struct kvk_catalogue *catalogue,
                                                struct kvk_error *error);

/* ---- Doubt: catalogue_probe.c ---- */

/* Mark the catalogue as being opened. Where it was left marked, or is cut, see by another process
 * whether it can be read. KVK_DATA_LOSS: that one died of it. Before the environment is opened. */
KVK_CHECKED enum kvk_status kvk_catalogue_probe(struct kvk_catalogue *catalogue,
                                                struct kvk_error *error);

/* ---- Spaces: catalogue_spaces.c ---- */

/* From format 1 to 2: spaces have a mode, which is "on" for all that there are. A damaged record
 * stays as it is, and is known as such by whoever reads it. */
KVK_CHECKED enum kvk_status
kvk_catalogue_spaces_migrate_1(struct kvk_catalogue_transaction *transaction,
                               struct kvk_error *error);

/* Remove block records from the first of `space_id` on, at most `count`; `more`: there are others.
 * In a write transaction. */
KVK_CHECKED enum kvk_status
kvk_catalogue_delete_blocks(struct kvk_catalogue_transaction *transaction, uint64_t space_id,
                            uint32_t count, bool *more, struct kvk_error *error);

#endif
