/*
 * Is the file sound enough to be read at all? LMDB checks no page: one that was damaged outside of
 * us, or a file that was cut, can end the process that reads it. A daemon that starts must not die
 * of it again and again, so where there is a reason to doubt, another process reads everything
 * first, and if that one dies, the catalogue is refused in words.
 *
 * Reasons to doubt: the file is shorter than it says, or a process that opened it before never came
 * to say that it had read it (the mark "opening" in the folder).
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "hosttier/catalogue_internal.h"

#define WHOLE 0
#define REFUSED 42 /* LMDB does not open it, and will say so again */
#define UNSOUND 43 /* it opens, but not all of it can be read */
#define CPU_SECONDS_MAX 300
#define FREE_TABLE 0
#define MAIN_TABLE 1

/* ---- The process that reads ---- */

static uint64_t bytes_sum(const MDB_val *value)
{
    const uint8_t *bytes = value->mv_data;
    uint64_t sum = 0;
    for (size_t i = 0; i < value->mv_size; i++) {
        sum += bytes[i];
    }
    return sum;
}

static int table_read(MDB_txn *transaction, MDB_dbi table, uint64_t *sum)
{
    MDB_cursor *cursor;
    MDB_val key;
    MDB_val value;
    int code = mdb_cursor_open(transaction, table, &cursor);
    while (code == 0 && (code = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
        *sum += bytes_sum(&key) + bytes_sum(&value);
        if (table > MAIN_TABLE) { /* once more, from the root */
            MDB_val again;
            code = mdb_get(transaction, table, &key, &again);
            if (code != 0) {
                return MDB_CORRUPTED;
            }
            *sum += again.mv_size;
        }
    }
    return code == MDB_NOTFOUND ? 0 : code;
}

/* Every table that the main one names, and the two that every environment has. */
static int all_read(MDB_txn *transaction, uint64_t *sum)
{
    static const char *const names[KVK_CATALOGUE_TABLE_COUNT] = KVK_CATALOGUE_TABLE_NAMES;
    int code = table_read(transaction, FREE_TABLE, sum);
    if (code == 0) {
        code = table_read(transaction, MAIN_TABLE, sum);
    }
    for (int i = 0; i < KVK_CATALOGUE_TABLE_COUNT && code == 0; i++) {
        MDB_dbi table;
        code = mdb_dbi_open(transaction, names[i], 0, &table);
        code = code == 0 ? table_read(transaction, table, sum) : code;
        code = code == MDB_NOTFOUND ? 0 : code; /* never made */
    }
    return code;
}

_Noreturn static void read_and_exit(const struct kvk_catalogue *catalogue)
{
    const struct rlimit none = {.rlim_cur = 0};
    MDB_env *environment;
    MDB_txn *transaction;
    volatile uint64_t sum = 0;
    uint64_t read = 0;
    const struct rlimit limit = {.rlim_cur = CPU_SECONDS_MAX, .rlim_max = CPU_SECONDS_MAX};
    (void)setrlimit(RLIMIT_CORE, &none);
    (void)setrlimit(RLIMIT_CPU, &limit); /* pages that lead in a circle */
    int code = mdb_env_create(&environment);
    if (code == 0) {
        code = mdb_env_set_mapsize(environment, catalogue->map_bytes);
    }
    if (code == 0) {
        code = mdb_env_set_maxdbs(environment, KVK_CATALOGUE_TABLE_COUNT);
    }
    if (code == 0) { /* the folder is locked by our parent */
        code = mdb_env_open(environment, catalogue->path, MDB_RDONLY | MDB_NOLOCK | MDB_NOTLS, 0);
    }
    if (code == 0) {
        code = mdb_txn_begin(environment, NULL, MDB_RDONLY, &transaction);
    }
    if (code != 0) {
        _exit(REFUSED);
    }
    code = all_read(transaction, &read);
    sum = read; /* so that the reading is not left out */
    _exit(code == 0 && sum == read ? WHOLE : UNSOUND);
}

static enum kvk_status fail_unsound(const struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "durable.folder",
                    "durable.folder: the catalogue is damaged so that it cannot be read; move it "
                    "away to begin anew (%.120s)",
                    catalogue->path);
}

static enum kvk_status probe(const struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    kvk_log(KVK_LOG_WARNING, "catalogue_probed", "text=\"its last opening did not end well\"");
    pid_t child = fork();
    if (child == 0) {
        read_and_exit(catalogue);
    }
    if (child < 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "durable.folder",
                        "durable.folder: no process to check it with: %s", strerror(errno));
    }
    int result = 0;
    while (waitpid(child, &result, 0) < 0) {
        if (errno != EINTR) {
            return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "durable.folder",
                            "durable.folder: its check was lost: %s", strerror(errno));
        }
    }
    bool answered =
        WIFEXITED(result) && (WEXITSTATUS(result) == WHOLE || WEXITSTATUS(result) == REFUSED);
    return answered ? KVK_OK : fail_unsound(catalogue, error);
}

/* ---- Reasons to doubt ---- */

/* Cut? By what its root pages say; they are read, not mapped, so this is safe. */
static bool is_cut(const struct kvk_catalogue *catalogue)
{
    char path[sizeof(catalogue->path) + sizeof("/data.mdb")];
    struct stat file;
    MDB_env *environment;
    MDB_envinfo info;
    MDB_stat stat_now;
    bool cut = false;
    (void)snprintf(path, sizeof(path), "%s/data.mdb", catalogue->path);
    if (stat(path, &file) != 0 || file.st_size == 0 || mdb_env_create(&environment) != 0) {
        return false;
    }
    if (mdb_env_set_mapsize(environment, catalogue->map_bytes) == 0 &&
        mdb_env_open(environment, catalogue->path, MDB_RDONLY | MDB_NOLOCK, 0) == 0 &&
        mdb_env_info(environment, &info) == 0 && mdb_env_stat(environment, &stat_now) == 0) {
        cut = (uint64_t)file.st_size < (info.me_last_pgno + 1) * stat_now.ms_psize;
    }
    mdb_env_close(environment);
    return cut;
}

static void mark_path(const struct kvk_catalogue *catalogue, char *path, size_t size)
{
    (void)snprintf(path, size, "%s/opening", catalogue->path);
}

enum kvk_status kvk_catalogue_probe(struct kvk_catalogue *catalogue, struct kvk_error *error)
{
    char path[sizeof(catalogue->path) + sizeof("/opening")];
    mark_path(catalogue, path, sizeof(path));
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool doubt = fd < 0 && errno == EEXIST;
    if (fd >= 0) {
        (void)close(fd);
    }
    catalogue->marked = fd >= 0 || doubt; /* a disk that takes no mark is told of soon enough */
    if (!doubt && !is_cut(catalogue)) {
        return KVK_OK;
    }
    return probe(catalogue, error);
}

void kvk_catalogue_trust(struct kvk_catalogue *catalogue)
{
    char path[sizeof(catalogue->path) + sizeof("/opening")];
    if (catalogue->marked) {
        mark_path(catalogue, path, sizeof(path));
        (void)unlink(path);
        catalogue->marked = false;
    }
}
