/*
 * A kvkeepd that is killed and started again in one folder, with all that outlives it: catalogue,
 * disk tier and keeper.
 */
#ifndef KVK_TESTS_DAEMON_RESTART_H
#define KVK_TESTS_DAEMON_RESTART_H

#include <ftw.h>
#include <sys/stat.h>

#include "tests/daemon_look.h"
#include "tests/folder.h"

struct durable_daemon {
    struct daemon daemon;
    char config[96];
    uint64_t disk_bytes;
};

struct durable_setup {
    uint64_t device_bytes;
    uint64_t host_bytes;
    uint64_t disk_bytes;
    bool keeper;
    const char *durable; /* more lines of [durable]; NULL: none */
    const char *rest;    /* more sections; NULL: none */
};

static inline void durable_configure(struct durable_daemon *durable,
                                     const struct durable_setup *setup)
{
    struct daemon *daemon = &durable->daemon;
    char rest[2048];
    daemon_place(daemon, durable->config, sizeof(durable->config));
    (void)snprintf(rest, sizeof(rest),
                   "[durable]\nfolder = %s/data\ndisk_bytes = %llu B\ndisk_admit_uses = 1\n"
                   "keeper = %s\nkeeper_hold_ms = 30 s\n%s\n%s",
                   daemon->folder, (unsigned long long)setup->disk_bytes,
                   setup->keeper ? "process" : "no", setup->durable == NULL ? "" : setup->durable,
                   setup->rest == NULL ? "" : setup->rest);
    const struct daemon_setup plain = {
        .device_bytes = setup->device_bytes, .host_bytes = setup->host_bytes, .rest = rest};
    daemon_configure(daemon, &plain, durable->config);
    durable->disk_bytes = setup->disk_bytes;
}

/* Its process, not yet waited for. */
static inline void durable_spawn(struct durable_daemon *durable)
{
    (void)fflush(stdout);
    durable->daemon.pid = fork();
    CHECK(durable->daemon.pid >= 0, "fork: %s", strerror(errno));
    if (durable->daemon.pid == 0) {
        (void)alarm(0);
        daemon_exec(durable->config);
    }
}

/* Answers how long it took, in microseconds. */
static inline uint64_t durable_start(struct durable_daemon *durable)
{
    uint64_t begun_us = now_us();
    durable_spawn(durable);
    for (int i = 0; !daemon_answers(&durable->daemon); i++) {
        CHECK(waitpid(durable->daemon.pid, NULL, WNOHANG) == 0, "kvkeepd did not start again");
        CHECK(i < 30000, "kvkeepd does not answer after 30 s");
        pause_us(1000);
    }
    return now_us() - begun_us;
}

static inline void durable_kill(struct durable_daemon *durable)
{
    int status = 0;
    CHECK(kill(durable->daemon.pid, SIGKILL) == 0, "the daemon is gone");
    CHECK(waitpid(durable->daemon.pid, &status, 0) == durable->daemon.pid && WIFSIGNALED(status) &&
              WTERMSIG(status) == SIGKILL,
          "the daemon ended by itself, status %x", (unsigned)status);
}

/* ---- what it leaves on the disk ---- */

/* What a file system may need for a file beside its bytes: the tree of its extents. */
#define FILE_TREE_BYTES_MAX UINT64_C(16384)

static uint64_t durable_walked_bytes;

static inline int durable_walk(const char *path, const struct stat *status, int kind,
                               struct FTW *place)
{
    if (kind == FTW_F && strncmp(path + place->base, "blocks-", 7) == 0) {
        uint64_t bytes = (uint64_t)status->st_blocks * 512;
        uint64_t tree = bytes < FILE_TREE_BYTES_MAX ? bytes : FILE_TREE_BYTES_MAX;
        durable_walked_bytes += bytes - tree;
    }
    return 0;
}

/* Bytes really allocated for blocks, at least. */
static inline uint64_t durable_disk_use(const struct durable_daemon *durable)
{
    durable_walked_bytes = 0;
    CHECK(nftw(durable->daemon.folder, durable_walk, 16, FTW_PHYS) == 0, "cannot walk %s",
          durable->daemon.folder);
    return durable_walked_bytes;
}

/* Is there a process whose command line names the folder, such as a keeper? */
static inline pid_t durable_process_left(const struct durable_daemon *durable)
{
    DIR *folder = opendir("/proc");
    pid_t found = 0;
    CHECK(folder != NULL, "no /proc");
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        char path[300];
        char line[1024];
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        if (pid <= 0 || pid == getpid()) {
            continue;
        }
        (void)snprintf(path, sizeof(path), "/proc/%d/cmdline", (int)pid);
        FILE *file = fopen(path, "r");
        size_t size = file == NULL ? 0 : fread(line, 1, sizeof(line) - 1, file);
        if (file != NULL) {
            (void)fclose(file);
        }
        for (size_t i = 0; i + strlen(durable->daemon.folder) <= size; i++) {
            if (memcmp(line + i, durable->daemon.folder, strlen(durable->daemon.folder)) == 0) {
                found = pid;
            }
        }
    }
    (void)closedir(folder);
    return found;
}

/* Free what is kept for a next one, by kvkeepd --forget. */
static inline void durable_forget(const struct durable_daemon *durable)
{
    int status = 0;
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        char program[512];
        daemon_program(program, sizeof(program));
        (void)execl(program, "kvkeepd", "--config", durable->config, "--forget", (char *)NULL);
        _exit(127);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "kvkeepd --forget failed, status %x", (unsigned)status);
}

/* SIGTERM, then nothing of it may be left: no keeper, no memory. */
static inline void durable_end(struct durable_daemon *durable)
{
    int status = 0;
    CHECK(kill(durable->daemon.pid, SIGTERM) == 0, "the daemon is gone");
    for (int i = 0; waitpid(durable->daemon.pid, &status, WNOHANG) == 0; i++) {
        CHECK(i < 3000, "the daemon does not end within 30 s");
        pause_us(10000);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the daemon ended with status %x",
          (unsigned)status);
    durable_forget(durable);
    for (int i = 0; durable_process_left(durable) != 0; i++) {
        CHECK(i < 500, "process %d is left of it", (int)durable_process_left(durable));
        pause_us(10000);
    }
    folder_remove(durable->daemon.folder);
    daemon_log_path[0] = '\0';
}

/* ---- the laws, asked of the daemon itself ---- */

/* A task of an agent: TestControl.check_laws; a breach ends the daemon, and so this call. */
static inline void observe_laws(void *shared)
{
    const struct look *look = shared;
    Kvkeep__V1__TestControlRequest request = KVKEEP__V1__TEST_CONTROL_REQUEST__INIT;
    Kvkeep__V1__TestControlResponse *response = NULL;
    if (self.client == NULL) {
        worker_connect(&(struct worker_options){.target = look->target, .timeout_ms = 30000});
    }
    request.check_laws = true;
    CHECK_OK(worker_call(ADMIN_METHOD("TestControl"), &request.base,
                         &kvkeep__v1__test_control_response__descriptor, &response));
    message_free(response);
}

#endif
