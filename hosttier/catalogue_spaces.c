/*
 * Spaces with their generations, and the reading of block records.
 *
 * A generation has a record of its own: an invalidation rewrites 24 bytes, not an identity. A space
 * whose generation cannot be read is not given out at all, for an older one would bring back what
 * was invalidated.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "hosttier/catalogue_internal.h"

#define REMOVE_COUNT 4096 /* block records that one transaction removes */

static enum kvk_status fail_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a record");
}

/* ---- Generations ---- */

/* KVK_NOT_FOUND: none is recorded. KVK_DATA_LOSS: it is damaged. */
static enum kvk_status generation_get(struct kvk_catalogue_transaction *transaction, uint64_t id,
                                      uint64_t *generation, struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    struct kvk_record_key key;
    kvk_record_key_id(id, &key);
    MDB_val wanted = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val value;
    int code =
        mdb_get(transaction->handle, catalogue->tables[KVK_CATALOGUE_GENERATIONS], &wanted, &value);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "reading a generation", error);
    }
    if (!kvk_record_read_number(KVK_RECORD_GENERATION, key.bytes, key.size, value.mv_data,
                                value.mv_size, generation)) {
        return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "space_id",
                        "the generation of a space is damaged");
    }
    return KVK_OK;
}

/* Never back: whoever comes late with an older one changes nothing. */
static enum kvk_status generation_raise(struct kvk_catalogue_transaction *transaction, uint64_t id,
                                        uint64_t generation, struct kvk_error *error)
{
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    uint64_t known = 0;
    enum kvk_status status = generation_get(transaction, id, &known, error);
    if (status != KVK_OK && status != KVK_NOT_FOUND && status != KVK_DATA_LOSS) {
        return status;
    }
    if (status == KVK_OK && known >= generation) {
        return KVK_OK;
    }
    kvk_record_key_id(id, &key);
    if (kvk_record_write_number(KVK_RECORD_GENERATION, &key, generation, &bytes) != KVK_OK) {
        return fail_memory(error);
    }
    status = kvk_catalogue_put(transaction, KVK_CATALOGUE_GENERATIONS, &key, &bytes, error);
    free(bytes.data);
    return status;
}

static enum kvk_status space_is_known(struct kvk_catalogue_transaction *transaction, uint64_t id,
                                      struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    struct kvk_record_key key;
    kvk_record_key_id(id, &key);
    MDB_val wanted = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val value;
    int code =
        mdb_get(transaction->handle, catalogue->tables[KVK_CATALOGUE_SPACES], &wanted, &value);
    return code == 0 ? KVK_OK : kvk_catalogue_fail(catalogue, code, "looking for a space", error);
}

enum kvk_status kvk_catalogue_set_generations(struct kvk_catalogue *catalogue,
                                              const struct kvk_space_generation *generations,
                                              size_t count, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    if (count == 0) {
        return KVK_OK;
    }
    enum kvk_status status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    for (size_t i = 0; i < count && status == KVK_OK; i++) {
        status = space_is_known(&transaction, generations[i].space_id, error);
        if (status == KVK_OK) {
            status = generation_raise(&transaction, generations[i].space_id,
                                      generations[i].generation, error);
        } else if (status == KVK_NOT_FOUND) {
            status = KVK_OK;
        }
    }
    if (status != KVK_OK) {
        kvk_catalogue_abort(&transaction);
        return status;
    }
    return kvk_catalogue_write_commit(&transaction, error);
}

/* ---- Spaces ---- */

enum kvk_status kvk_catalogue_put_space(struct kvk_catalogue *catalogue,
                                        const struct kvk_space_record *record,
                                        struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    kvk_record_key_id(record->id, &key);
    enum kvk_status status =
        record->id == 0 ? KVK_INVALID : kvk_record_write_space(&key, record, &bytes);
    if (status == KVK_EXHAUSTED) {
        return fail_memory(error);
    }
    if (status != KVK_OK) {
        return kvk_fail(error, status, KVK_CAUSE_FIELD, "space",
                        "space: an id is 0, or identity or shape are past their limits");
    }
    status = kvk_catalogue_check_room(catalogue, bytes.size, error);
    if (status == KVK_OK) {
        status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    }
    if (status == KVK_OK) {
        status = kvk_catalogue_put(&transaction, KVK_CATALOGUE_SPACES, &key, &bytes, error);
        if (status == KVK_OK) {
            status = generation_raise(&transaction, record->id, record->generation, error);
        }
        if (status != KVK_OK) {
            kvk_catalogue_abort(&transaction);
        } else {
            status = kvk_catalogue_write_commit(&transaction, error);
        }
    }
    free(bytes.data);
    return status;
}

enum kvk_status kvk_catalogue_delete_blocks(struct kvk_catalogue_transaction *transaction,
                                            uint64_t space_id, uint32_t count, bool *more,
                                            struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    MDB_cursor *cursor;
    struct kvk_record_key key;
    *more = false;
    int code =
        mdb_cursor_open(transaction->handle, catalogue->tables[KVK_CATALOGUE_BLOCKS], &cursor);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "removing", error);
    }
    kvk_record_key_block(space_id, 0, 0, &key);
    MDB_val found = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val value;
    code = mdb_cursor_get(cursor, &found, &value, MDB_SET_RANGE);
    while (code == 0 && found.mv_size >= KVK_RECORD_ID_KEY_SIZE &&
           memcmp(found.mv_data, key.bytes, KVK_RECORD_ID_KEY_SIZE) == 0) {
        if (count == 0) {
            *more = true;
            break;
        }
        count--;
        code = mdb_cursor_del(cursor, 0);
        if (code == 0) {
            code = mdb_cursor_get(cursor, &found, &value, MDB_NEXT);
        }
    }
    mdb_cursor_close(cursor);
    return code == 0 || code == MDB_NOTFOUND
               ? KVK_OK
               : kvk_catalogue_fail(catalogue, code, "removing", error);
}

static enum kvk_status remove_slice(struct kvk_catalogue *catalogue, uint64_t space_id, bool first,
                                    bool *more, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key;
    kvk_record_key_id(space_id, &key);
    enum kvk_status status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    if (first) {
        status = kvk_catalogue_delete(&transaction, KVK_CATALOGUE_SPACES, &key, error);
    }
    if (first && status == KVK_OK) {
        status = kvk_catalogue_delete(&transaction, KVK_CATALOGUE_GENERATIONS, &key, error);
        status = status == KVK_NOT_FOUND ? KVK_OK : status;
    }
    if (status == KVK_OK) {
        status = kvk_catalogue_delete_blocks(&transaction, space_id, REMOVE_COUNT, more, error);
    }
    if (status != KVK_OK) {
        kvk_catalogue_abort(&transaction);
        return status;
    }
    return kvk_catalogue_write_commit(&transaction, error);
}

/* The space goes in the first transaction; block records that a crash leaves behind belong to
 * nobody from then on, and are swept at the next opening. */
enum kvk_status kvk_catalogue_remove_space(struct kvk_catalogue *catalogue, uint64_t space_id,
                                           struct kvk_error *error)
{
    bool more = true;
    enum kvk_status status = kvk_catalogue_flush(catalogue, error);
    for (bool first = true; status == KVK_OK && (first || more); first = false) {
        status = remove_slice(catalogue, space_id, first, &more, error);
    }
    return status;
}

enum kvk_status kvk_catalogue_spaces(struct kvk_catalogue *catalogue,
                                     void (*visit)(void *context,
                                                   const struct kvk_space_record *record),
                                     void *context, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    MDB_cursor *cursor;
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    int code =
        mdb_cursor_open(transaction.handle, catalogue->tables[KVK_CATALOGUE_SPACES], &cursor);
    if (code == 0) {
        MDB_val key;
        MDB_val value;
        while ((code = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
            struct kvk_space_record record;
            if (kvk_record_read_space(key.mv_data, key.mv_size, value.mv_data, value.mv_size,
                                      &record) &&
                generation_get(&transaction, record.id, &record.generation, NULL) == KVK_OK) {
                visit(context, &record);
            } else {
                kvk_catalogue_count_damage(catalogue, "space");
            }
        }
        mdb_cursor_close(cursor);
    }
    kvk_catalogue_abort(&transaction);
    return code == MDB_NOTFOUND ? KVK_OK : kvk_catalogue_fail(catalogue, code, "reading", error);
}

/* ---- Migration ---- */

/* The record under the cursor, which may be moved by writing. */
static int space_migrate(MDB_cursor *cursor, MDB_val *found, const MDB_val *value)
{
    struct kvk_space_record record;
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    if (!kvk_record_read_space_1(found->mv_data, found->mv_size, value->mv_data, value->mv_size,
                                 &record)) {
        return 0;
    }
    kvk_record_key_id(record.id, &key);
    if (kvk_record_write_space(&key, &record, &bytes) != KVK_OK) {
        return ENOMEM;
    }
    MDB_val name = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val written = {.mv_size = bytes.size, .mv_data = bytes.data};
    int code = mdb_cursor_put(cursor, &name, &written, MDB_CURRENT);
    free(bytes.data);
    return code;
}

enum kvk_status kvk_catalogue_spaces_migrate_1(struct kvk_catalogue_transaction *transaction,
                                               struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    MDB_cursor *cursor;
    int code =
        mdb_cursor_open(transaction->handle, catalogue->tables[KVK_CATALOGUE_SPACES], &cursor);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "migrating", error);
    }
    MDB_val found;
    MDB_val value;
    while ((code = mdb_cursor_get(cursor, &found, &value, MDB_NEXT)) == 0 &&
           (code = space_migrate(cursor, &found, &value)) == 0) {
    }
    mdb_cursor_close(cursor);
    return code == MDB_NOTFOUND ? KVK_OK : kvk_catalogue_fail(catalogue, code, "migrating", error);
}

/* ---- Blocks ---- */

static int blocks_walk(struct kvk_catalogue *catalogue, MDB_cursor *cursor, uint64_t space_id,
                       struct kvk_record_scratch *scratch,
                       bool (*visit)(void *context, const struct kvk_disk_block_record *record),
                       void *context)
{
    struct kvk_record_key key;
    struct kvk_disk_block_record record;
    kvk_record_key_block(space_id, 0, 0, &key);
    MDB_val found = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val value;
    int code = mdb_cursor_get(cursor, &found, &value, MDB_SET_RANGE);
    while (code == 0 && found.mv_size >= KVK_RECORD_ID_KEY_SIZE &&
           memcmp(found.mv_data, key.bytes, KVK_RECORD_ID_KEY_SIZE) == 0) {
        if (!kvk_record_read_block(found.mv_data, found.mv_size, value.mv_data, value.mv_size,
                                   scratch, &record)) {
            kvk_catalogue_count_damage(catalogue, "block");
        } else if (!visit(context, &record)) {
            return 0;
        }
        code = mdb_cursor_get(cursor, &found, &value, MDB_NEXT);
    }
    return code == MDB_NOTFOUND ? 0 : code;
}

enum kvk_status kvk_catalogue_blocks(struct kvk_catalogue *catalogue, uint64_t space_id,
                                     bool (*visit)(void *context,
                                                   const struct kvk_disk_block_record *record),
                                     void *context, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    MDB_cursor *cursor;
    struct kvk_record_scratch *scratch = malloc(sizeof(*scratch));
    if (scratch == NULL) {
        return fail_memory(error);
    }
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        free(scratch);
        return status;
    }
    int code =
        mdb_cursor_open(transaction.handle, catalogue->tables[KVK_CATALOGUE_BLOCKS], &cursor);
    if (code == 0) {
        code = blocks_walk(catalogue, cursor, space_id, scratch, visit, context);
        mdb_cursor_close(cursor);
    }
    kvk_catalogue_abort(&transaction);
    free(scratch);
    return code == 0 ? KVK_OK : kvk_catalogue_fail(catalogue, code, "reading", error);
}
