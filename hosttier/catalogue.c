#include "hosttier/catalogue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "hosttier/catalogue_internal.h"

#define FOLDER_MODE 0700
#define FILE_MODE 0600
#define MAP_BYTES_DEFAULT (UINT64_C(64) << 30)
#define MAP_BYTES_MIN (UINT64_C(1) << 20)
#define READERS_MAX 64
#define FIELD "durable.folder"

/* ---- Failures ---- */

static enum kvk_status status_of(int code)
{
    switch (code) {
    case MDB_MAP_FULL:
    case MDB_DBS_FULL:
    case MDB_READERS_FULL:
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
        return KVK_EXHAUSTED;
    case MDB_VERSION_MISMATCH:
        return KVK_PRECONDITION;
    case MDB_INVALID:
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_INCOMPATIBLE:
        return KVK_DATA_LOSS;
    case MDB_NOTFOUND:
        return KVK_NOT_FOUND;
    default:
        return KVK_UNAVAILABLE; /* the disk's word: it may be better another time */
    }
}

static const char *advice_of(int code)
{
    switch (code) {
    case MDB_MAP_FULL:
        return ": raise durable.catalogue_bytes";
    case MDB_INVALID:
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_INCOMPATIBLE:
    case MDB_VERSION_MISMATCH:
        return ": not a catalogue of this program, or damaged; move the folder away to begin anew";
    default:
        return "";
    }
}

enum kvk_status kvk_catalogue_fail(const struct kvk_catalogue *catalogue, int code,
                                   const char *doing, struct kvk_error *error)
{
    const char *field = code == MDB_MAP_FULL ? "durable.catalogue_bytes" : FIELD;
    return kvk_fail(error, status_of(code), KVK_CAUSE_NONE, field, "%s: %s: %s%s (%.80s)", field,
                    doing, mdb_strerror(code), advice_of(code), catalogue->path);
}

void kvk_catalogue_count_damage(struct kvk_catalogue *catalogue, const char *kind)
{
    if (atomic_fetch_add(&catalogue->damaged_records, 1) == 0) {
        kvk_log(KVK_LOG_WARNING, "catalogue_record_damaged", "kind=%s", kind);
    }
}

/* ---- The folder ---- */

static enum kvk_status fail_folder(const char *path, const char *reason, struct kvk_error *error)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, FIELD, FIELD ": %s: %.140s", reason, path);
}

static enum kvk_status folder_make(const char *path, struct kvk_error *error)
{
    struct stat found;
    char reason[96];
    if (mkdir(path, FOLDER_MODE) != 0 && errno != EEXIST) {
        (void)snprintf(reason, sizeof(reason), "cannot be made: %s", strerror(errno));
        return fail_folder(path, reason, error);
    }
    if (stat(path, &found) != 0) {
        (void)snprintf(reason, sizeof(reason), "cannot be looked at: %s", strerror(errno));
        return fail_folder(path, reason, error);
    }
    if (!S_ISDIR(found.st_mode)) {
        return fail_folder(path, "is not a folder", error);
    }
    if (found.st_uid != geteuid()) {
        return fail_folder(path, "belongs to another user", error);
    }
    if ((found.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        return fail_folder(path, "may be written by others: chmod 700", error);
    }
    return KVK_OK;
}

/* Held until the descriptor is closed, also by the process's end however it comes. */
static enum kvk_status folder_lock(const char *folder, int *fd, struct kvk_error *error)
{
    char path[4096 + 8];
    char reason[96];
    (void)snprintf(path, sizeof(path), "%s/lock", folder);
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, FILE_MODE);
    if (*fd < 0) {
        (void)snprintf(reason, sizeof(reason), "its lock file cannot be opened: %s",
                       strerror(errno));
        return fail_folder(folder, reason, error);
    }
    if (flock(*fd, LOCK_EX | LOCK_NB) != 0) {
        bool held = errno == EWOULDBLOCK;
        (void)snprintf(reason, sizeof(reason), "cannot be locked: %s", strerror(errno));
        (void)close(*fd);
        *fd = -1;
        if (!held) {
            return fail_folder(folder, reason, error);
        }
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, FIELD,
                        FIELD ": another process uses it: %.140s", folder);
    }
    return KVK_OK;
}

/* ---- The environment ---- */

static enum kvk_status tables_open(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    static const char *const names[KVK_CATALOGUE_TABLE_COUNT] = KVK_CATALOGUE_TABLE_NAMES;
    MDB_txn *transaction;
    int code = mdb_txn_begin(catalogue->environment, NULL, 0, &transaction);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "opening", error);
    }
    for (int i = 0; i < KVK_CATALOGUE_TABLE_COUNT && code == 0; i++) {
        code = mdb_dbi_open(transaction, names[i], MDB_CREATE, &catalogue->tables[i]);
    }
    if (code != 0) {
        mdb_txn_abort(transaction);
        return kvk_catalogue_fail(catalogue, code, "opening", error);
    }
    code = mdb_txn_commit(transaction);
    return code == 0 ? KVK_OK : kvk_catalogue_fail(catalogue, code, "opening", error);
}

/* Commits are synced in full: none of LMDB's flags that trade that away is ever set. */
static enum kvk_status environment_open(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    MDB_env *environment;
    int code = mdb_env_create(&environment);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "opening", error);
    }
    code = mdb_env_set_mapsize(environment, catalogue->map_bytes);
    if (code == 0) {
        code = mdb_env_set_maxdbs(environment, KVK_CATALOGUE_TABLE_COUNT);
    }
    if (code == 0) {
        code = mdb_env_set_maxreaders(environment, READERS_MAX);
    }
    if (code == 0) {
        code = mdb_env_open(environment, catalogue->path, MDB_NOTLS, FILE_MODE);
    }
    if (code != 0) {
        mdb_env_close(environment);
        return kvk_catalogue_fail(catalogue, code, "opening", error);
    }
    int dead = 0;
    (void)mdb_reader_check(environment, &dead); /* places that a killed process left taken */
    catalogue->environment = environment;
    enum kvk_status status = tables_open(catalogue, error);
    if (status != KVK_OK) {
        mdb_env_close(environment);
        catalogue->environment = NULL;
    }
    return status;
}

/* LMDB gives an environment up when it could not write its root page: open it again. Readers have
 * to be gone; where one is not, the next try does it. */
static enum kvk_status environment_open_again(struct kvk_catalogue *catalogue,
                                              struct kvk_error *error)
{
    if (pthread_rwlock_trywrlock(&catalogue->environment_gate) != 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, FIELD,
                        FIELD ": the catalogue is being opened again after a failed write");
    }
    if (catalogue->environment != NULL) {
        mdb_env_close(catalogue->environment);
        catalogue->environment = NULL;
    }
    enum kvk_status status = environment_open(catalogue, error);
    int failed = pthread_rwlock_unlock(&catalogue->environment_gate);
    KVK_ASSERT(failed == 0);
    return status;
}

/* ---- Transactions ---- */

static void gate_enter(struct kvk_catalogue *catalogue)
{
    int failed = pthread_rwlock_rdlock(&catalogue->environment_gate);
    KVK_ASSERT(failed == 0);
}

static void gate_leave(struct kvk_catalogue *catalogue)
{
    int failed = pthread_rwlock_unlock(&catalogue->environment_gate);
    KVK_ASSERT(failed == 0);
}

static int begin_try(struct kvk_catalogue *catalogue, unsigned flags, MDB_txn **handle)
{
    gate_enter(catalogue);
    int code = MDB_PANIC;
    if (catalogue->environment != NULL) {
        code = mdb_txn_begin(catalogue->environment, NULL, flags, handle);
    }
    if (code != 0) {
        gate_leave(catalogue);
    }
    return code;
}

static enum kvk_status begin(struct kvk_catalogue *catalogue, unsigned flags,
                             struct kvk_catalogue_transaction *transaction, const char *doing,
                             struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    transaction->catalogue = catalogue;
    transaction->handle = NULL;
    int code = begin_try(catalogue, flags, &transaction->handle);
    if (code == MDB_PANIC) {
        enum kvk_status status = environment_open_again(catalogue, error);
        if (status != KVK_OK) {
            return status;
        }
        code = begin_try(catalogue, flags, &transaction->handle);
    }
    return code == 0 ? KVK_OK : kvk_catalogue_fail(catalogue, code, doing, error);
}

enum kvk_status kvk_catalogue_read_begin(struct kvk_catalogue *catalogue,
                                         struct kvk_catalogue_transaction *transaction,
                                         struct kvk_error *error)
{
    return begin(catalogue, MDB_RDONLY, transaction, "reading", error);
}

enum kvk_status kvk_catalogue_write_begin(struct kvk_catalogue *catalogue,
                                          struct kvk_catalogue_transaction *transaction,
                                          struct kvk_error *error)
{
    return begin(catalogue, 0, transaction, "writing", error);
}

/* Pages that are in use, by LMDB's own count, and records. */
struct measure {
    uint64_t used_bytes;
    uint64_t counts[KVK_CATALOGUE_TABLE_COUNT];
};

#define FREE_TABLE 0 /* LMDB's own two tables */
#define MAIN_TABLE 1
#define ROOT_PAGES 2

static int measure_table(MDB_txn *transaction, MDB_dbi table, struct measure *measure,
                         uint64_t *count)
{
    MDB_stat stat;
    int code = mdb_stat(transaction, table, &stat);
    if (code == 0) {
        measure->used_bytes +=
            (stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages) * stat.ms_psize;
        *count = stat.ms_entries;
    }
    return code;
}

static int measure_take(const struct kvk_catalogue *catalogue, MDB_txn *transaction,
                        struct measure *measure)
{
    uint64_t ignored;
    *measure = (struct measure){.used_bytes = 0};
    int code = measure_table(transaction, FREE_TABLE, measure, &ignored);
    if (code == 0) {
        code = measure_table(transaction, MAIN_TABLE, measure, &ignored);
    }
    for (int i = 0; i < KVK_CATALOGUE_TABLE_COUNT && code == 0; i++) {
        code = measure_table(transaction, catalogue->tables[i], measure, &measure->counts[i]);
    }
    measure->used_bytes += ROOT_PAGES * (uint64_t)sysconf(_SC_PAGESIZE);
    return code;
}

static void measure_keep(struct kvk_catalogue *catalogue, const struct measure *measure)
{
    atomic_store(&catalogue->used_bytes, measure->used_bytes);
    for (int i = 0; i < KVK_CATALOGUE_TABLE_COUNT; i++) {
        atomic_store(&catalogue->counts[i], measure->counts[i]);
    }
}

enum kvk_status kvk_catalogue_write_commit(struct kvk_catalogue_transaction *transaction,
                                           struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = transaction->catalogue;
    struct measure measure;
    int code = measure_take(catalogue, transaction->handle, &measure);
    if (code != 0) {
        mdb_txn_abort(transaction->handle);
    } else {
        code = mdb_txn_commit(transaction->handle);
    }
    gate_leave(catalogue);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "committing", error);
    }
    measure_keep(catalogue, &measure);
    return KVK_OK;
}

void kvk_catalogue_abort(struct kvk_catalogue_transaction *transaction)
{
    mdb_txn_abort(transaction->handle);
    gate_leave(transaction->catalogue);
}

enum kvk_status kvk_catalogue_check_room(struct kvk_catalogue *catalogue, uint64_t bytes,
                                         struct kvk_error *error)
{
    uint64_t wanted =
        atomic_load(&catalogue->used_bytes) + kvk_catalogue_queued_bytes(catalogue) + bytes;
    if (wanted <= catalogue->live_bytes_max) {
        return KVK_OK;
    }
    return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "durable.catalogue_bytes", wanted,
                          catalogue->live_bytes_max,
                          "durable.catalogue_bytes: the catalogue is full");
}

enum kvk_status kvk_catalogue_put(struct kvk_catalogue_transaction *transaction,
                                  enum kvk_catalogue_table table, const struct kvk_record_key *key,
                                  const struct kvk_record_bytes *bytes, struct kvk_error *error)
{
    struct kvk_record_key copy = *key;
    MDB_val key_value = {.mv_size = copy.size, .mv_data = copy.bytes};
    MDB_val value = {.mv_size = bytes->size, .mv_data = bytes->data};
    int code =
        mdb_put(transaction->handle, transaction->catalogue->tables[table], &key_value, &value, 0);
    return code == 0 ? KVK_OK : kvk_catalogue_fail(transaction->catalogue, code, "writing", error);
}

enum kvk_status kvk_catalogue_delete(struct kvk_catalogue_transaction *transaction,
                                     enum kvk_catalogue_table table,
                                     const struct kvk_record_key *key, struct kvk_error *error)
{
    struct kvk_record_key copy = *key;
    MDB_val key_value = {.mv_size = copy.size, .mv_data = copy.bytes};
    int code =
        mdb_del(transaction->handle, transaction->catalogue->tables[table], &key_value, NULL);
    return code == 0 ? KVK_OK : kvk_catalogue_fail(transaction->catalogue, code, "removing", error);
}

/* ---- Opening and closing ---- */

static enum kvk_status measure_now(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    struct kvk_catalogue_transaction transaction;
    struct measure measure;
    enum kvk_status status = kvk_catalogue_read_begin(catalogue, &transaction, error);
    if (status != KVK_OK) {
        return status;
    }
    int code = measure_take(catalogue, transaction.handle, &measure);
    kvk_catalogue_abort(&transaction);
    if (code != 0) {
        return kvk_catalogue_fail(catalogue, code, "reading", error);
    }
    measure_keep(catalogue, &measure);
    return KVK_OK;
}

static enum kvk_status folders_take(struct kvk_catalogue *catalogue, const char *folder,
                                    struct kvk_error *error)
{
    int size = snprintf(catalogue->path, sizeof(catalogue->path), "%s/catalogue", folder);
    if (folder[0] == '\0' || size < 0 || (size_t)size >= sizeof(catalogue->path)) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, FIELD, strlen(folder),
                              sizeof(catalogue->path) - sizeof("/catalogue"),
                              FIELD ": its path must have 1 to %zu bytes",
                              sizeof(catalogue->path) - sizeof("/catalogue"));
    }
    enum kvk_status status = folder_make(folder, error);
    if (status == KVK_OK) {
        status = folder_lock(folder, &catalogue->lock_fd, error);
    }
    if (status == KVK_OK) {
        status = folder_make(catalogue->path, error);
    }
    return status;
}

/* A file is there for sure after a power cut only once its folder was synced too: LMDB syncs what
 * it writes, not the names of its files. From our folder up to that in which the caller's lies. */
static enum kvk_status names_sync(const struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    static const char *const above[] = {".", "..", "../.."};
    int folder = open(catalogue->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool synced = folder >= 0;
    for (size_t i = 0; i < sizeof(above) / sizeof(above[0]) && synced; i++) {
        int fd = openat(folder, above[i], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 && errno == EACCES && i == 2) {
            break; /* the place of the caller's folder is not ours to look after */
        }
        synced = fd >= 0 && fsync(fd) == 0;
        if (fd >= 0) {
            (void)close(fd);
        }
    }
    int failed = errno;
    if (folder >= 0) {
        (void)close(folder);
    }
    return synced ? KVK_OK : kvk_catalogue_fail(catalogue, failed, "syncing names", error);
}

enum kvk_status kvk_catalogue_open_format(const struct kvk_catalogue_options *options,
                                          uint32_t format,
                                          const struct kvk_catalogue_migration *migrations,
                                          uint32_t migration_count, struct kvk_catalogue **result,
                                          struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    struct kvk_catalogue *catalogue = calloc(1, sizeof(*catalogue));
    if (catalogue == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the catalogue");
    }
    uint64_t map_bytes = options->map_bytes == 0 ? MAP_BYTES_DEFAULT : options->map_bytes;
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    map_bytes = map_bytes < MAP_BYTES_MIN ? MAP_BYTES_MIN : map_bytes;
    catalogue->map_bytes = map_bytes / page_bytes * page_bytes;
    catalogue->live_bytes_max = catalogue->map_bytes / 4 * 3;
    catalogue->lock_fd = -1;
    catalogue->threads = options->threads;
    int failed = pthread_rwlock_init(&catalogue->environment_gate, NULL);
    KVK_ASSERT(failed == 0);
    kvk_catalogue_queue_init(&catalogue->queue, options);
    enum kvk_status status = folders_take(catalogue, options->folder, error);
    if (status == KVK_OK) {
        status = kvk_catalogue_probe(catalogue, error);
    }
    if (status == KVK_OK) {
        status = environment_open(catalogue, error);
    }
    if (status == KVK_OK) {
        status = names_sync(catalogue, error);
    }
    if (status == KVK_OK) {
        status = kvk_catalogue_format_settle(catalogue, format, migrations, migration_count, error);
    }
    if (status == KVK_OK) {
        status = kvk_catalogue_sweep(catalogue, error);
    }
    if (status == KVK_OK) {
        status = measure_now(catalogue, error);
    }
    if (status == KVK_OK && catalogue->threads) {
        status = kvk_catalogue_writer_start(catalogue, error);
    }
    if (status != KVK_OK) {
        kvk_catalogue_close(catalogue);
        return status;
    }
    *result = catalogue;
    return KVK_OK;
}

enum kvk_status kvk_catalogue_open(const struct kvk_catalogue_options *options,
                                   struct kvk_catalogue **catalogue, struct kvk_error *error)
{
    static const struct kvk_catalogue_migration steps[] = {
        {.from = 1, .run = kvk_catalogue_spaces_migrate_1},
    };
    return kvk_catalogue_open_format(options, KVK_CATALOGUE_FORMAT, steps,
                                     sizeof(steps) / sizeof(steps[0]), catalogue, error);
}

void kvk_catalogue_close(struct kvk_catalogue *catalogue)
{
    if (catalogue == NULL) {
        return;
    }
    kvk_catalogue_writer_stop(catalogue);
    if (catalogue->environment != NULL) {
        mdb_env_close(catalogue->environment);
        kvk_catalogue_trust(catalogue); /* it was no harm, read or not */
    }
    kvk_catalogue_queue_finish(&catalogue->queue);
    int failed = pthread_rwlock_destroy(&catalogue->environment_gate);
    KVK_ASSERT(failed == 0);
    if (catalogue->lock_fd >= 0) {
        (void)close(catalogue->lock_fd); /* last: whoever waits for the folder finds all written */
    }
    free(catalogue);
}

/* ---- Figures ---- */

void kvk_catalogue_stats(struct kvk_catalogue *catalogue, struct kvk_catalogue_stats *stats)
{
    struct kvk_catalogue_queue *queue = &catalogue->queue;
    kvk_lock(&queue->lock);
    uint64_t queued =
        (uint64_t)queue->filling.count + queue->committing.count - queue->committed_count;
    kvk_unlock(&queue->lock);
    *stats = (struct kvk_catalogue_stats){
        .tenants = atomic_load(&catalogue->counts[KVK_CATALOGUE_TENANTS]),
        .credentials = atomic_load(&catalogue->counts[KVK_CATALOGUE_CREDENTIALS]),
        .spaces = atomic_load(&catalogue->counts[KVK_CATALOGUE_SPACES]),
        .blocks = atomic_load(&catalogue->counts[KVK_CATALOGUE_BLOCKS]),
        .used_bytes = atomic_load(&catalogue->used_bytes),
        .limit_bytes = catalogue->live_bytes_max,
        .queued = queued,
        .commits = atomic_load(&catalogue->commits),
        .committed_operations = atomic_load(&catalogue->committed_operations),
        .commit_failures = atomic_load(&catalogue->commit_failures),
        .commit_ns = atomic_load(&catalogue->commit_ns),
        .damaged_records = atomic_load(&catalogue->damaged_records),
        .failing = atomic_load(&queue->failing),
    };
}
