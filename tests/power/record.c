/*
 * Loaded before kvkeepd (LD_PRELOAD): writes down everything that is done to files below one folder
 * in the order in which it is done, so that a test can build what a power cut could have left.
 *
 *     KVKEEP_RECORD_FOLDER  what is watched
 *     KVKEEP_RECORD_LOG     where it is written down, outside of that
 *
 * Bytes that are written through a mapping are not seen; LMDB writes its data with write calls, and
 * what it maps to write is its lock file, which means nothing after a restart.
 */
#include "tests/power/record.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define DESCRIPTORS_MAX 65536
#define FILES_MAX 4096

struct watched {
    uint32_t file; /* 0: not watched, or a folder */
    bool folder;
    bool synced;
    char name[RECORD_NAME_SIZE]; /* of a folder */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct watched *descriptors[DESCRIPTORS_MAX];
static char names[FILES_MAX][RECORD_NAME_SIZE]; /* [file]; "": gone */
static uint32_t file_count = 1;
static uint32_t next_number = 1;
static char folder[4096];
static size_t folder_size; /* 0: nothing is watched */
static char log_path[4096];
static int log_fd = -1;

__attribute__((constructor)) static void record_start(void)
{
    const char *watch = getenv("KVKEEP_RECORD_FOLDER");
    const char *log = getenv("KVKEEP_RECORD_LOG");
    if (watch == NULL || log == NULL || realpath(watch, folder) == NULL) {
        return;
    }
    (void)snprintf(log_path, sizeof(log_path), "%s", log);
    folder_size = strlen(folder);
}

/* At the first thing that is written down: at its start a daemon closes what it does not know. */
static void log_open(void)
{
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
                          0600);
    if (log_fd < 0) {
        abort();
    }
}

/* ---- Writing down; with the lock ---- */

static void put_bytes(const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    while (size > 0) {
        ssize_t wrote = syscall(SYS_write, log_fd, at, size);
        if (wrote < 0 && errno == EINTR) {
            continue;
        }
        if (wrote <= 0) {
            abort(); /* a record with holes would prove nothing */
        }
        at += wrote;
        size -= (size_t)wrote;
    }
}

static void put(struct record record, const void *payload)
{
    if (log_fd < 0) {
        log_open();
    }
    record.magic = RECORD_MAGIC;
    put_bytes(&record, sizeof(record));
    put_bytes(payload, record.payload_bytes);
}

static uint32_t put_once(uint8_t operation, uint32_t file, uint64_t offset, uint64_t size,
                         const void *payload, size_t payload_bytes)
{
    struct record record = {.operation = operation,
                            .file = file,
                            .number = next_number++,
                            .offset = offset,
                            .size_bytes = size,
                            .payload_bytes = payload_bytes};
    put(record, payload);
    return record.number;
}

static void put_end(uint8_t operation, uint32_t file, uint32_t number, uint64_t size)
{
    put((struct record){.operation = operation, .file = file, .number = number, .size_bytes = size},
        NULL);
}

/* ---- Names ---- */

/* The name below the folder of what the descriptor is open on; false: it is elsewhere. */
static bool name_of(int fd, char *name)
{
    char link[64];
    char path[4096 + RECORD_NAME_SIZE];
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof(path) - 1);
    if (size < 0 || folder_size == 0) {
        return false;
    }
    path[size] = '\0';
    if (strncmp(path, folder, folder_size) != 0 ||
        (path[folder_size] != '/' && path[folder_size] != '\0')) {
        return false;
    }
    const char *rest = path + folder_size + (path[folder_size] == '/' ? 1 : 0);
    (void)snprintf(name, RECORD_NAME_SIZE, "%s", rest);
    return true;
}

/* The same of a path that may not be there (any more). */
static bool name_at(int at, const char *path, char *name)
{
    char base[RECORD_NAME_SIZE];
    char above[4096];
    const char *slash = strrchr(path, '/');
    (void)snprintf(base, sizeof(base), "%s", slash == NULL ? path : slash + 1);
    (void)snprintf(above, sizeof(above), "%.*s", slash == NULL ? 1 : (int)(slash - path),
                   slash == NULL ? "." : path);
    int fd = (int)syscall(SYS_openat, at, above[0] == '\0' ? "/" : above, O_PATH | O_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    char folder_name[RECORD_NAME_SIZE];
    bool inside = name_of(fd, folder_name);
    (void)syscall(SYS_close, fd);
    if (inside) {
        int size = snprintf(name, RECORD_NAME_SIZE, "%s%s%s", folder_name,
                            folder_name[0] == '\0' ? "" : "/", base);
        inside = size < RECORD_NAME_SIZE;
    }
    return inside;
}

static uint32_t file_find(const char *name)
{
    for (uint32_t i = 1; i < file_count; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return 0;
}

static uint32_t file_make(const char *name)
{
    if (file_count == FILES_MAX) {
        abort();
    }
    uint32_t file = file_count++;
    (void)snprintf(names[file], RECORD_NAME_SIZE, "%s", name);
    (void)put_once(RECORD_CREATE, file, 0, 0, name, strlen(name));
    return file;
}

/* ---- Descriptors ---- */

static const struct watched *watched(int fd)
{
    return fd >= 0 && fd < DESCRIPTORS_MAX ? descriptors[fd] : NULL;
}

static void descriptor_note(int fd, int flags)
{
    char name[RECORD_NAME_SIZE];
    struct stat about;
    int error = errno;
    if (fd < 0 || fd >= DESCRIPTORS_MAX || (flags & O_PATH) != 0 || !name_of(fd, name) ||
        fstat(fd, &about) != 0) {
        errno = error;
        return;
    }
    struct watched *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        abort();
    }
    (void)pthread_mutex_lock(&lock);
    made->folder = S_ISDIR(about.st_mode);
    made->synced = (flags & O_DSYNC) != 0;
    (void)snprintf(made->name, sizeof(made->name), "%s", name);
    if (!made->folder) {
        made->file = file_find(name);
        made->file = made->file == 0 ? file_make(name) : made->file;
    }
    free(descriptors[fd]);
    descriptors[fd] = made;
    if ((flags & O_TRUNC) != 0 && !made->folder) {
        (void)put_once(RECORD_TRUNCATE, made->file, 0, 0, NULL, 0);
    }
    (void)pthread_mutex_unlock(&lock);
    errno = error;
}

static int open_noted(int at, const char *path, int flags, mode_t mode)
{
    int fd = (int)syscall(SYS_openat, at, path, flags, mode);
    if (folder_size > 0) {
        descriptor_note(fd, flags);
    }
    return fd;
}

static mode_t mode_of(int flags, va_list arguments)
{
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

#define OPEN_BODY(at)                                                                              \
    va_list arguments;                                                                             \
    va_start(arguments, flags);                                                                    \
    mode_t mode = mode_of(flags, arguments);                                                       \
    va_end(arguments);                                                                             \
    return open_noted(at, path, flags, mode)

int open(const char *path, int flags, ...)
{
    OPEN_BODY(AT_FDCWD);
}

int open64(const char *path, int flags, ...)
{
    OPEN_BODY(AT_FDCWD);
}

int openat(int at, const char *path, int flags, ...)
{
    OPEN_BODY(at);
}

int openat64(int at, const char *path, int flags, ...)
{
    OPEN_BODY(at);
}

int close(int fd)
{
    if (fd >= 0 && fd < DESCRIPTORS_MAX && fd != log_fd) {
        (void)pthread_mutex_lock(&lock);
        free(descriptors[fd]);
        descriptors[fd] = NULL;
        (void)pthread_mutex_unlock(&lock);
    }
    return (int)syscall(SYS_close, fd);
}

/* ---- Bytes ---- */

static ssize_t write_noted(int fd, const struct iovec *parts, int count, off_t offset)
{
    size_t size = 0;
    for (int i = 0; i < count; i++) {
        size += parts[i].iov_len;
    }
    uint8_t *bytes = malloc(size + 1);
    if (bytes == NULL) {
        abort();
    }
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        memcpy(bytes + at, parts[i].iov_base, parts[i].iov_len);
        at += parts[i].iov_len;
    }
    (void)pthread_mutex_lock(&lock);
    const struct watched *file = watched(fd);
    uint32_t number = file->file;
    struct record record = {.operation = RECORD_WRITE_BEGIN,
                            .flags = file->synced ? RECORD_FLAG_SYNCED : 0,
                            .file = number,
                            .number = next_number++,
                            .offset = (uint64_t)offset,
                            .size_bytes = size,
                            .payload_bytes = size};
    put(record, bytes);
    (void)pthread_mutex_unlock(&lock);
    ssize_t wrote = syscall(SYS_pwrite64, fd, bytes, size, offset);
    if (wrote < 0 && errno == EINVAL) { /* O_DIRECT wants the caller's own memory */
        wrote = syscall(SYS_pwritev, fd, parts, count, offset, 0);
    }
    int error = errno;
    (void)pthread_mutex_lock(&lock);
    put_end(RECORD_WRITE_END, number, record.number, wrote > 0 ? (uint64_t)wrote : 0);
    (void)pthread_mutex_unlock(&lock);
    free(bytes);
    errno = error;
    return wrote;
}

static bool is_file(int fd)
{
    (void)pthread_mutex_lock(&lock);
    const struct watched *file = folder_size > 0 ? watched(fd) : NULL;
    bool yes = file != NULL && file->file != 0;
    (void)pthread_mutex_unlock(&lock);
    return yes;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    return is_file(fd) ? write_noted(fd, parts, count, offset)
                       : syscall(SYS_pwritev, fd, parts, count, offset, 0);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset)
{
    return pwritev(fd, parts, count, offset);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset)
{
    const struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    return is_file(fd) ? write_noted(fd, &part, 1, offset)
                       : syscall(SYS_pwrite64, fd, bytes, size, offset);
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset)
{
    return pwrite(fd, bytes, size, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    if (!is_file(fd)) {
        return syscall(SYS_writev, fd, parts, count);
    }
    off_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t wrote = write_noted(fd, parts, count, offset);
    if (wrote > 0) {
        (void)lseek(fd, offset + wrote, SEEK_SET);
    }
    return wrote;
}

ssize_t write(int fd, const void *bytes, size_t size)
{
    const struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    return is_file(fd) ? writev(fd, &part, 1) : syscall(SYS_write, fd, bytes, size);
}

/* ---- Size and room: noted when done, with nobody in between ---- */

static int changed_noted(int fd, long result, uint8_t operation, uint64_t offset, uint64_t size)
{
    if (result == 0) {
        (void)put_once(operation, watched(fd)->file, offset, size, NULL, 0);
    }
    int error = errno;
    (void)pthread_mutex_unlock(&lock);
    errno = error;
    return (int)result;
}

int fallocate(int fd, int mode, off_t offset, off_t size)
{
    if (!is_file(fd)) {
        return (int)syscall(SYS_fallocate, fd, mode, offset, size);
    }
    (void)pthread_mutex_lock(&lock);
    bool punch = (mode & 2) != 0; /* FALLOC_FL_PUNCH_HOLE */
    return changed_noted(fd, syscall(SYS_fallocate, fd, mode, offset, size),
                         punch ? RECORD_PUNCH : RECORD_ALLOCATE, (uint64_t)offset, (uint64_t)size);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t size)
{
    return fallocate(fd, mode, offset, size);
}

int ftruncate(int fd, off_t size)
{
    if (!is_file(fd)) {
        return (int)syscall(SYS_ftruncate, fd, size);
    }
    (void)pthread_mutex_lock(&lock);
    return changed_noted(fd, syscall(SYS_ftruncate, fd, size), RECORD_TRUNCATE, 0, (uint64_t)size);
}

int ftruncate64(int fd, off64_t size)
{
    return ftruncate(fd, size);
}

/* ---- Syncing ---- */

static int sync_noted(int fd, long call)
{
    (void)pthread_mutex_lock(&lock);
    const struct watched *what = folder_size > 0 ? watched(fd) : NULL;
    uint32_t number = 0;
    uint32_t file = what != NULL ? what->file : 0;
    bool is_folder = what != NULL && what->folder;
    if (is_folder) {
        number = put_once(RECORD_FOLDER_SYNC_BEGIN, 0, 0, 0, what->name, strlen(what->name));
    } else if (file != 0) {
        number = put_once(RECORD_SYNC_BEGIN, file, 0, 0, NULL, 0);
    }
    (void)pthread_mutex_unlock(&lock);
    int result = (int)syscall(call, fd);
    if (number != 0 && result == 0) {
        (void)pthread_mutex_lock(&lock);
        put_end(is_folder ? RECORD_FOLDER_SYNC_END : RECORD_SYNC_END, file, number, 0);
        (void)pthread_mutex_unlock(&lock);
    }
    return result;
}

int fsync(int fd)
{
    return sync_noted(fd, SYS_fsync);
}

int fdatasync(int fd)
{
    return sync_noted(fd, SYS_fdatasync);
}

/* ---- Names that come and go ---- */

int mkdirat(int at, const char *path, mode_t mode)
{
    char name[RECORD_NAME_SIZE];
    (void)pthread_mutex_lock(&lock);
    int result = (int)syscall(SYS_mkdirat, at, path, mode);
    int error = errno;
    if (result == 0 && folder_size > 0 && name_at(at, path, name)) {
        (void)put_once(RECORD_MKDIR, 0, 0, 0, name, strlen(name));
    }
    (void)pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int mkdir(const char *path, mode_t mode)
{
    return mkdirat(AT_FDCWD, path, mode);
}

int unlinkat(int at, const char *path, int flags)
{
    char name[RECORD_NAME_SIZE];
    (void)pthread_mutex_lock(&lock);
    bool inside = folder_size > 0 && name_at(at, path, name);
    int result = (int)syscall(SYS_unlinkat, at, path, flags);
    int error = errno;
    if (result == 0 && inside) {
        uint32_t file = file_find(name);
        names[file][0] = '\0';
        (void)put_once(RECORD_UNLINK, file, 0, 0, name, strlen(name));
    }
    (void)pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

int renameat(int from_at, const char *from, int to_at, const char *to)
{
    char both[2 * RECORD_NAME_SIZE];
    char to_name[RECORD_NAME_SIZE];
    (void)pthread_mutex_lock(&lock);
    bool inside = folder_size > 0 && name_at(from_at, from, both) && name_at(to_at, to, to_name);
    int result = (int)syscall(SYS_renameat, from_at, from, to_at, to);
    int error = errno;
    if (result == 0 && inside) {
        uint32_t file = file_find(both);
        uint32_t over = file_find(to_name);
        names[over][0] = '\0';
        (void)snprintf(names[file], RECORD_NAME_SIZE, "%s", to_name);
        size_t size = strlen(both) + 1;
        (void)snprintf(both + size, RECORD_NAME_SIZE, "%s", to_name);
        (void)put_once(RECORD_RENAME, file, 0, 0, both, size + strlen(to_name));
    }
    (void)pthread_mutex_unlock(&lock);
    errno = error;
    return result;
}

int rename(const char *from, const char *to)
{
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
