/*
 * The catalogue's rare records that are found by a name: tenants, credentials, values.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "hosttier/catalogue_internal.h"

#define REMOVE_COUNT 1024 /* spaces that are removed with one list */

static enum kvk_status fail_record(enum kvk_status status, const char *what,
                                   struct kvk_error *error)
{
    if (status == KVK_EXHAUSTED) {
        return kvk_fail(error, status, KVK_CAUSE_NONE, "", "no memory for a record");
    }
    return kvk_fail(error, status, KVK_CAUSE_FIELD, what, "%s: a field is past its limit", what);
}

static enum kvk_status fail_name(const char *what, struct kvk_error *error)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, what, 0, KVK_RECORD_KEY_MAX,
                          "%s: its name must be UTF-8 of 1 to %d bytes", what, KVK_RECORD_KEY_MAX);
}

/* ---- One record in, one out ---- */

static enum kvk_status put_alone(struct kvk_catalogue *catalogue, enum kvk_catalogue_table table,
                                 const struct kvk_record_key *key,
                                 const struct kvk_record_bytes *bytes, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    enum kvk_status status = kvk_catalogue_check_room(catalogue, bytes->size, error);
    if (status == KVK_OK) {
        status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    status = kvk_catalogue_put(&transaction, table, key, bytes, error);
    if (status != KVK_OK) {
        kvk_catalogue_abort(&transaction);
        return status;
    }
    return kvk_catalogue_write_commit(&transaction, error);
}

static enum kvk_status delete_alone(struct kvk_catalogue *catalogue, enum kvk_catalogue_table table,
                                    const struct kvk_record_key *key, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    enum kvk_status status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    status = kvk_catalogue_delete(&transaction, table, key, error);
    if (status != KVK_OK) {
        kvk_catalogue_abort(&transaction);
        return status;
    }
    return kvk_catalogue_write_commit(&transaction, error);
}

/* Every record of a table, in a read transaction; `visit` says whether it could read the record. */
static enum kvk_status walk(struct kvk_catalogue *catalogue, enum kvk_catalogue_table table,
                            const char *kind,
                            bool (*visit)(void *context, const MDB_val *key, const MDB_val *value),
                            void *context, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    MDB_cursor *cursor;
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    int code = mdb_cursor_open(transaction.handle, catalogue->tables[table], &cursor);
    if (code == 0) {
        MDB_val key;
        MDB_val value;
        while ((code = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
            if (!visit(context, &key, &value)) {
                kvk_catalogue_count_damage(catalogue, kind);
            }
        }
        mdb_cursor_close(cursor);
    }
    kvk_catalogue_abort(&transaction);
    return code == MDB_NOTFOUND ? KVK_OK : kvk_catalogue_fail(catalogue, code, "reading", error);
}

/* ---- Tenants ---- */

struct tenant_visit {
    void (*visit)(void *context, const struct kvk_tenant_record *record);
    void *context;
};

static bool tenant_visit(void *context, const MDB_val *key, const MDB_val *value)
{
    const struct tenant_visit *visit = context;
    struct kvk_tenant_record record;
    if (!kvk_record_read_tenant(key->mv_data, key->mv_size, value->mv_data, value->mv_size,
                                &record)) {
        return false;
    }
    visit->visit(visit->context, &record);
    return true;
}

enum kvk_status kvk_catalogue_tenants(struct kvk_catalogue *catalogue,
                                      void (*visit)(void *context,
                                                    const struct kvk_tenant_record *record),
                                      void *context, struct kvk_error *error)
{
    struct tenant_visit with = {.visit = visit, .context = context};
    return walk(catalogue, KVK_CATALOGUE_TENANTS, "tenant", tenant_visit, &with, error);
}

/* The tenant with this id, by its key; in any transaction. */
static enum kvk_status tenant_find(struct kvk_catalogue_transaction *transaction, uint64_t id,
                                   struct kvk_record_key *key, struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    MDB_cursor *cursor;
    int code =
        mdb_cursor_open(transaction->handle, catalogue->tables[KVK_CATALOGUE_TENANTS], &cursor);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "reading", error);
    }
    MDB_val name;
    MDB_val value;
    enum kvk_status status = KVK_NOT_FOUND;
    while (status == KVK_NOT_FOUND &&
           (code = mdb_cursor_get(cursor, &name, &value, MDB_NEXT)) == 0) {
        struct kvk_tenant_record record;
        if (kvk_record_read_tenant(name.mv_data, name.mv_size, value.mv_data, value.mv_size,
                                   &record) &&
            record.id == id) {
            memcpy(key->bytes, name.mv_data, name.mv_size);
            key->size = (uint32_t)name.mv_size;
            status = KVK_OK;
        }
    }
    mdb_cursor_close(cursor);
    if (status == KVK_NOT_FOUND && code != MDB_NOTFOUND) {
        return kvk_catalogue_fail(catalogue, code, "reading", error);
    }
    if (status == KVK_NOT_FOUND) {
        (void)kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "tenant_id",
                       "the catalogue has no tenant of this id");
    }
    return status;
}

/* The next id that was never given; one more afterwards. A counter that is damaged must not give
 * an id twice: better nobody new. */
static enum kvk_status tenant_id_take(struct kvk_catalogue_transaction *transaction,
                                      uint64_t at_least, uint64_t *id, struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    struct kvk_record_key key;
    bool named = kvk_record_key_name("next-tenant", &key);
    KVK_ASSERT(named);
    MDB_val name = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val value;
    uint64_t next = 1;
    int code = mdb_get(transaction->handle, catalogue->tables[KVK_CATALOGUE_META], &name, &value);
    if (code == 0 && !kvk_record_read_number(KVK_RECORD_COUNTER, key.bytes, key.size, value.mv_data,
                                             value.mv_size, &next)) {
        kvk_catalogue_count_damage(catalogue, "counter");
        return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "durable.folder",
                        "durable.folder: the count of tenants' ids is damaged");
    }
    if (code != 0 && code != MDB_NOTFOUND) {
        return kvk_catalogue_fail(catalogue, code, "reading", error);
    }
    *id = next > at_least ? next : at_least;
    struct kvk_record_bytes bytes;
    enum kvk_status status = kvk_record_write_number(KVK_RECORD_COUNTER, &key, *id + 1, &bytes);
    if (status != KVK_OK) {
        return fail_record(status, "tenant", error);
    }
    status = kvk_catalogue_put(transaction, KVK_CATALOGUE_META, &key, &bytes, error);
    free(bytes.data);
    return status;
}

/* Which id does the record get? Its name's own, or a new one. */
static enum kvk_status tenant_id_settle(struct kvk_catalogue_transaction *transaction,
                                        const struct kvk_record_key *key,
                                        struct kvk_tenant_record *record, struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    struct kvk_record_key copy = *key;
    struct kvk_tenant_record known;
    MDB_val name = {.mv_size = copy.size, .mv_data = copy.bytes};
    MDB_val value;
    int code =
        mdb_get(transaction->handle, catalogue->tables[KVK_CATALOGUE_TENANTS], &name, &value);
    if (code == 0 &&
        kvk_record_read_tenant(copy.bytes, copy.size, value.mv_data, value.mv_size, &known)) {
        if (record->id != 0 && record->id != known.id) {
            return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, "tenant",
                            "a tenant of this name has another id");
        }
        record->id = known.id;
        return KVK_OK;
    }
    if (code != 0 && code != MDB_NOTFOUND) {
        return kvk_catalogue_fail(catalogue, code, "reading", error);
    }
    if (record->id == 0) {
        return tenant_id_take(transaction, 1, &record->id, error);
    }
    struct kvk_record_key other;
    enum kvk_status status = tenant_find(transaction, record->id, &other, NULL);
    if (status == KVK_OK) {
        return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, "tenant",
                        "the id belongs to a tenant of another name");
    }
    uint64_t taken;
    return status == KVK_NOT_FOUND ? tenant_id_take(transaction, record->id, &taken, error)
                                   : kvk_fail(error, status, KVK_CAUSE_NONE, "durable.folder",
                                              "durable.folder: the tenants cannot be read");
}

enum kvk_status kvk_catalogue_put_tenant(struct kvk_catalogue *catalogue,
                                         struct kvk_tenant_record *record, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key;
    struct kvk_record_bytes bytes = {.data = NULL};
    if (!kvk_record_key_name(record->name, &key)) {
        return fail_name("tenant", error);
    }
    enum kvk_status status = kvk_catalogue_check_room(catalogue, sizeof(*record), error);
    if (status == KVK_OK) {
        status = kvk_catalogue_write_begin(catalogue, &transaction, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    uint64_t id = record->id;
    status = tenant_id_settle(&transaction, &key, record, error);
    if (status == KVK_OK) {
        status = kvk_record_write_tenant(&key, record, &bytes);
        status = status == KVK_OK ? KVK_OK : fail_record(status, "tenant", error);
    }
    if (status == KVK_OK) {
        status = kvk_catalogue_put(&transaction, KVK_CATALOGUE_TENANTS, &key, &bytes, error);
    }
    free(bytes.data);
    if (status == KVK_OK) {
        status = kvk_catalogue_write_commit(&transaction, error);
    } else {
        kvk_catalogue_abort(&transaction);
    }
    if (status != KVK_OK) {
        record->id = id;
    }
    return status;
}

/* ---- Removing a tenant: spaces first, the tenant last, so that what a crash leaves is found ----
 */

struct space_list {
    uint64_t tenant_id;
    uint64_t ids[REMOVE_COUNT];
    uint32_t count;
};

static void space_collect(void *context, const struct kvk_space_record *record)
{
    struct space_list *list = context;
    if (record->tenant_id == list->tenant_id && list->count < REMOVE_COUNT) {
        list->ids[list->count++] = record->id;
    }
}

static enum kvk_status spaces_remove(struct kvk_catalogue *catalogue, struct space_list *list,
                                     struct kvk_error *error)
{
    do {
        list->count = 0;
        enum kvk_status status = kvk_catalogue_spaces(catalogue, space_collect, list, error);
        if (status != KVK_OK) {
            return status;
        }
        for (uint32_t i = 0; i < list->count; i++) {
            status = kvk_catalogue_remove_space(catalogue, list->ids[i], error);
            if (status != KVK_OK && status != KVK_NOT_FOUND) {
                return status;
            }
        }
    } while (list->count == REMOVE_COUNT);
    return KVK_OK;
}

enum kvk_status kvk_catalogue_remove_tenant(struct kvk_catalogue *catalogue, uint64_t tenant_id,
                                            struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key;
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    status = tenant_find(&transaction, tenant_id, &key, error);
    kvk_catalogue_abort(&transaction);
    if (status != KVK_OK) {
        return status;
    }
    struct space_list *list = calloc(1, sizeof(*list));
    if (list == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a list of spaces");
    }
    list->tenant_id = tenant_id;
    status = spaces_remove(catalogue, list, error);
    free(list);
    return status == KVK_OK ? delete_alone(catalogue, KVK_CATALOGUE_TENANTS, &key, error) : status;
}

/* ---- Credentials ---- */

enum kvk_status kvk_catalogue_put_credential(struct kvk_catalogue *catalogue,
                                             const struct kvk_credential_record *record,
                                             struct kvk_error *error)
{
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    if (!kvk_record_key_name(record->name, &key)) {
        return fail_name("credential", error);
    }
    enum kvk_status status = kvk_record_write_credential(&key, record, &bytes);
    if (status != KVK_OK) {
        return fail_record(status, "credential", error);
    }
    status = put_alone(catalogue, KVK_CATALOGUE_CREDENTIALS, &key, &bytes, error);
    free(bytes.data);
    return status;
}

enum kvk_status kvk_catalogue_remove_credential(struct kvk_catalogue *catalogue, const char *name,
                                                struct kvk_error *error)
{
    struct kvk_record_key key;
    if (!kvk_record_key_name(name, &key)) {
        return fail_name("credential", error);
    }
    return delete_alone(catalogue, KVK_CATALOGUE_CREDENTIALS, &key, error);
}

struct credential_visit {
    void (*visit)(void *context, const struct kvk_credential_record *record);
    void *context;
};

static bool credential_visit(void *context, const MDB_val *key, const MDB_val *value)
{
    const struct credential_visit *visit = context;
    struct kvk_credential_record record;
    if (!kvk_record_read_credential(key->mv_data, key->mv_size, value->mv_data, value->mv_size,
                                    &record)) {
        return false;
    }
    visit->visit(visit->context, &record);
    return true;
}

enum kvk_status kvk_catalogue_credentials(struct kvk_catalogue *catalogue,
                                          void (*visit)(void *context,
                                                        const struct kvk_credential_record *record),
                                          void *context, struct kvk_error *error)
{
    struct credential_visit with = {.visit = visit, .context = context};
    return walk(catalogue, KVK_CATALOGUE_CREDENTIALS, "credential", credential_visit, &with, error);
}

/* ---- Values ---- */

enum kvk_status kvk_catalogue_put_value(struct kvk_catalogue *catalogue, const char *name,
                                        const void *value, size_t size, struct kvk_error *error)
{
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    if (!kvk_record_key_name(name, &key)) {
        return fail_name("value", error);
    }
    enum kvk_status status = kvk_record_write_value(&key, value, size, &bytes);
    if (status != KVK_OK) {
        return fail_record(status, "value", error);
    }
    status = put_alone(catalogue, KVK_CATALOGUE_VALUES, &key, &bytes, error);
    free(bytes.data);
    return status;
}

enum kvk_status kvk_catalogue_get_value(struct kvk_catalogue *catalogue, const char *name,
                                        void *value, size_t *size, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key;
    if (!kvk_record_key_name(name, &key)) {
        return fail_name("value", error);
    }
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    MDB_val name_value = {.mv_size = key.size, .mv_data = key.bytes};
    MDB_val found;
    const void *bytes;
    size_t found_size;
    int code =
        mdb_get(transaction.handle, catalogue->tables[KVK_CATALOGUE_VALUES], &name_value, &found);
    if (code != 0) {
        status = kvk_catalogue_fail(catalogue, code, "reading a value", error);
    } else if (!kvk_record_read_value(key.bytes, key.size, found.mv_data, found.mv_size, &bytes,
                                      &found_size)) {
        kvk_catalogue_count_damage(catalogue, "value");
        status = kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "value",
                          "a value of the catalogue is damaged");
    } else if (found_size > *size) {
        status = kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "size", found_size, *size,
                                "the value is larger than the room for it");
    } else {
        memcpy(value, bytes, found_size);
        *size = found_size;
    }
    kvk_catalogue_abort(&transaction);
    return status;
}
