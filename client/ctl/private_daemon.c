#include "client/ctl/private_daemon.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define START_TRIES 500 /* of 20 ms */
#define STOP_TRIES 1000

static void pause_ms(long ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&time, NULL);
}

static void program_path(char *path, size_t size)
{
    const char *named = getenv("KVKEEPD");
    if (named != NULL) {
        (void)snprintf(path, size, "%s", named);
        return;
    }
    ssize_t length = readlink("/proc/self/exe", path, size - 1);
    path[length < 0 ? 0 : length] = '\0';
    char *slash = strrchr(path, '/');
    size_t keep = slash == NULL ? 0 : (size_t)(slash - path) + 1;
    (void)snprintf(path + keep, size - keep, "kvkeepd");
}

static bool config_write(const struct ctl_private_daemon *daemon,
                         const struct ctl_private_daemon_options *options, const char *path)
{
    bool lists = strcmp(options->policy, "rp-lists") == 0;
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        return false;
    }
    (void)fprintf(file,
                  "[server]\nunix_path = %s/kvkeep.sock\n"
                  "[tiers]\ndevice_bytes = %llu B\nhost_bytes = %llu B\n"
                  "[cache]\npolicy = %s\ncost_lists = %s\n",
                  daemon->folder, (unsigned long long)options->device_bytes,
                  (unsigned long long)options->host_bytes, lists ? "rp-cost" : options->policy,
                  lists ? "yes" : "no");
    if (options->tokens_max > 0) {
        (void)fprintf(file, "[limits]\ntokens = %llu\n", (unsigned long long)options->tokens_max);
    }
    return fclose(file) == 0;
}

static bool answers(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool connected = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return connected;
}

enum kvk_status ctl_private_daemon_start(struct ctl_private_daemon *daemon,
                                         const struct ctl_private_daemon_options *options,
                                         struct kvk_error *error)
{
    (void)snprintf(daemon->folder, sizeof daemon->folder, "/tmp/kvkeep-private.XXXXXX");
    daemon->pid = 0;
    if (mkdtemp(daemon->folder) == NULL) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "", "cannot make a folder: %s",
                        strerror(errno));
    }
    char config[128];
    char socket_path[96];
    char program[512];
    (void)snprintf(config, sizeof config, "%s/kvkeepd.conf", daemon->folder);
    (void)snprintf(socket_path, sizeof socket_path, "%s/kvkeep.sock", daemon->folder);
    (void)snprintf(daemon->target, sizeof daemon->target, "unix:%s", socket_path);
    program_path(program, sizeof program);
    if (!config_write(daemon, options, config)) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "", "cannot write %s", config);
    }
    daemon->pid = fork();
    if (daemon->pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
        execl(program, "kvkeepd", "--config", config, "--test-hooks", "--log", "warning",
              (char *)NULL);
        (void)fprintf(stderr, "cannot start %s: %s\n", program, strerror(errno));
        _exit(127);
    }
    for (int i = 0; i < START_TRIES; i++) {
        if (answers(socket_path)) {
            return KVK_OK;
        }
        if (daemon->pid < 0 || waitpid(daemon->pid, NULL, WNOHANG) == daemon->pid) {
            daemon->pid = 0;
            break;
        }
        pause_ms(20);
    }
    ctl_private_daemon_stop(daemon);
    return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "", "%s did not start", program);
}

void ctl_private_daemon_stop(struct ctl_private_daemon *daemon)
{
    if (daemon->pid > 0) {
        (void)kill(daemon->pid, SIGTERM);
        for (int i = 0; i < STOP_TRIES && waitpid(daemon->pid, NULL, WNOHANG) == 0; i++) {
            pause_ms(10);
            if (i == STOP_TRIES - 1) {
                (void)kill(daemon->pid, SIGKILL);
                (void)waitpid(daemon->pid, NULL, 0);
            }
        }
        daemon->pid = 0;
    }
    static const char *const files[] = {"kvkeepd.conf", "kvkeep.sock", "kvkeep.sock.side",
                                        "kvkeep.sock.lock"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[128];
        (void)snprintf(path, sizeof path, "%s/%s", daemon->folder, files[i]);
        (void)unlink(path);
    }
    (void)rmdir(daemon->folder);
}
