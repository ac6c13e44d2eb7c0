/*
 * Which format the catalogue has, and how it gets to the one that this program writes: step by
 * step, each in one transaction with the new mark, so that a crash leaves the old or the new. What
 * is newer than this program is refused: it would be misread.
 */
#include "base/assert.h"
#include "base/log.h"
#include "hosttier/catalogue_internal.h"

#include <stdlib.h>

#define SWEEP_COUNT 4096 /* block records that one transaction removes */

static void mark_key(struct kvk_record_key *key)
{
    bool named = kvk_record_key_name("format", key);
    KVK_ASSERT(named);
}

static enum kvk_status mark_put(struct kvk_catalogue_transaction *transaction, uint32_t format,
                                struct kvk_error *error)
{
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    mark_key(&key);
    if (kvk_record_write_mark(&key, format, &bytes) != KVK_OK) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a record");
    }
    enum kvk_status status =
        kvk_catalogue_put(transaction, KVK_CATALOGUE_META, &key, &bytes, error);
    free(bytes.data);
    return status;
}

/* The format as it stands; 0: an empty catalogue, never marked. */
static enum kvk_status mark_get(struct kvk_catalogue *catalogue, uint32_t *format,
                                struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key;
    mark_key(&key);
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    MDB_val key_value = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val value;
    int code =
        mdb_get(transaction.handle, catalogue->tables[KVK_CATALOGUE_META], &key_value, &value);
    *format = 0;
    if (code == 0 &&
        !kvk_record_read_mark(key.bytes, key.size, value.mv_data, value.mv_size, format)) {
        status = kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "durable.folder",
                          "durable.folder: the mark of its format is damaged; move the folder "
                          "away to begin anew (%.100s)",
                          catalogue->path);
    } else if (code != 0 && code != MDB_NOTFOUND) {
        status = kvk_catalogue_fail(catalogue, code, "reading", error);
    }
    kvk_catalogue_abort(&transaction);
    return status;
}

/* Records without a mark are not ours to read. */
static enum kvk_status check_empty(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    for (int i = 0; i < KVK_CATALOGUE_TABLE_COUNT && status == KVK_OK; i++) {
        MDB_stat stat;
        int code = mdb_stat(transaction.handle, catalogue->tables[i], &stat);
        if (code != 0) {
            status = kvk_catalogue_fail(catalogue, code, "reading", error);
        } else if (stat.ms_entries > 0) {
            status = kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_NONE, "durable.folder",
                              "durable.folder: it has records but no mark of their format; move "
                              "the folder away to begin anew (%.100s)",
                              catalogue->path);
        }
    }
    kvk_catalogue_abort(&transaction);
    return status;
}

static enum kvk_status step(struct kvk_catalogue *catalogue,
                            const struct kvk_catalogue_migration *migration, uint32_t to,
                            struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    enum kvk_status status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    if (migration != NULL) {
        status = migration->run(&transaction, error);
    }
    if (status == KVK_OK) {
        status = mark_put(&transaction, to, error);
    }
    if (status != KVK_OK) {
        kvk_catalogue_abort(&transaction);
        return status;
    }
    status = kvk_catalogue_write_commit(&transaction, error);
    if (status == KVK_OK && migration != NULL) {
        kvk_log(KVK_LOG_INFO, "catalogue_migrated", "from=%u to=%u", migration->from, to);
    }
    return status;
}

static const struct kvk_catalogue_migration *
migration_from(const struct kvk_catalogue_migration *migrations, uint32_t count, uint32_t from)
{
    for (uint32_t i = 0; i < count; i++) {
        if (migrations[i].from == from) {
            return &migrations[i];
        }
    }
    return NULL;
}

enum kvk_status kvk_catalogue_format_settle(struct kvk_catalogue *catalogue, uint32_t format,
                                            const struct kvk_catalogue_migration *migrations,
                                            uint32_t migration_count, struct kvk_error *error)
{
    uint32_t found;
    enum kvk_status status = mark_get(catalogue, &found, error);
    if (status != KVK_OK) {
        return status;
    }
    if (found == 0) {
        status = check_empty(catalogue, error);
        return status == KVK_OK ? step(catalogue, NULL, format, error) : status;
    }
    if (found > format) {
        return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_NONE, "durable.folder", found,
                              format,
                              "durable.folder: its catalogue has format %u, written by a newer "
                              "kvkeep; this one knows %u (%.100s)",
                              found, format, catalogue->path);
    }
    for (; found < format && status == KVK_OK; found++) {
        const struct kvk_catalogue_migration *migration =
            migration_from(migrations, migration_count, found);
        if (migration == NULL) {
            return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_NONE, "durable.folder", found,
                                  format,
                                  "durable.folder: its catalogue has format %u, which this kvkeep "
                                  "cannot bring to %u (%.100s)",
                                  found, format, catalogue->path);
        }
        status = step(catalogue, migration, found + 1, error);
    }
    return status;
}

/* ---- What an interrupted removal left ---- */

/* The first space, from `space_id` on, that has block records but no record; 0: there is none. */
static enum kvk_status orphan_find(struct kvk_catalogue *catalogue,
                                   struct kvk_record_scratch *scratch, uint64_t *space_id,
                                   struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    MDB_cursor *cursor;
    struct kvk_record_key key;
    uint64_t from = *space_id;
    *space_id = 0;
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    int code =
        mdb_cursor_open(transaction.handle, catalogue->tables[KVK_CATALOGUE_BLOCKS], &cursor);
    if (code != 0) {
        kvk_catalogue_abort(&transaction);
        return kvk_catalogue_fail(catalogue, code, "reading", error);
    }
    for (;;) {
        struct kvk_disk_block_record record;
        kvk_record_key_block(from, 0, 0, &key);
        MDB_val found = {.mv_size = key.size, .mv_data = key.bytes};
        MDB_val value;
        code = mdb_cursor_get(cursor, &found, &value, MDB_SET_RANGE);
        if (code != 0) {
            break;
        }
        if (!kvk_record_read_block(found.mv_data, found.mv_size, value.mv_data, value.mv_size,
                                   scratch, &record)) {
            break; /* where keys may be damaged nothing is removed by them */
        }
        uint64_t at = record.space_id;
        kvk_record_key_id(at, &key);
        MDB_val wanted = {.mv_size = key.size, .mv_data = key.bytes};
        code =
            mdb_get(transaction.handle, catalogue->tables[KVK_CATALOGUE_SPACES], &wanted, &value);
        if (code == MDB_NOTFOUND) {
            *space_id = at;
            code = 0;
            break;
        }
        if (code != 0 || at == UINT64_MAX) {
            break;
        }
        from = at + 1;
    }
    mdb_cursor_close(cursor);
    kvk_catalogue_abort(&transaction);
    return code == 0 || code == MDB_NOTFOUND
               ? KVK_OK
               : kvk_catalogue_fail(catalogue, code, "reading", error);
}

static enum kvk_status blocks_remove(struct kvk_catalogue *catalogue, uint64_t space_id,
                                     struct kvk_error *error)
{
    bool more = true;
    while (more) {
        struct kvk_catalogue_transaction transaction;
        enum kvk_status status = kvk_catalogue_write_begin(catalogue, &transaction, error);
        if (status != KVK_OK) {
            return status;
        }
        status = kvk_catalogue_delete_blocks(&transaction, space_id, SWEEP_COUNT, &more, error);
        if (status != KVK_OK) {
            kvk_catalogue_abort(&transaction);
            return status;
        }
        status = kvk_catalogue_write_commit(&transaction, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

enum kvk_status kvk_catalogue_sweep(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    uint64_t space_id = 1;
    struct kvk_record_scratch *scratch = malloc(sizeof(*scratch));
    if (scratch == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a record");
    }
    enum kvk_status status = KVK_OK;
    while (status == KVK_OK) {
        status = orphan_find(catalogue, scratch, &space_id, error);
        if (status != KVK_OK || space_id == 0) {
            break;
        }
        kvk_log(KVK_LOG_INFO, "catalogue_orphans", "space=%llu", (unsigned long long)space_id);
        status = blocks_remove(catalogue, space_id, error);
    }
    free(scratch);
    return status;
}
