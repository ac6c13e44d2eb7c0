/*
 * A real kvkeepd and real client processes, for tests that kill them in the middle of things.
 *
 * The test's own process is the master. It starts the daemon and the agents and never uses gRPC, so
 * that it may fork at any time. An agent is a forked child that runs one task after another, as the
 * master tells it; what a task is told and what it answers lies in memory that all of them share
 * (shared_alloc() before the agents start). Agents may be killed in the middle of a task. All of
 * them end with the master, and the master ends, failed, when the test's time is over.
 */
#ifndef KVK_TESTS_DAEMON_PROCESS_H
#define KVK_TESTS_DAEMON_PROCESS_H

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/folder.h"
#include "tests/patience.h"

#define AGENT_TASK_MS 120000 /* the longest that one task may take */

static const char *process_name = "master";
static const char *process_phase = "start";
static char daemon_log_path[96];

/* ---- verdicts ---- */

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__);                             \
        }                                                                                          \
    } while (0)

static inline void print_daemon_log(void)
{
    char line[1024];
    FILE *file = daemon_log_path[0] == '\0' ? NULL : fopen(daemon_log_path, "r");
    if (file == NULL) {
        return;
    }
    (void)fprintf(stderr, "---- the daemon's log\n");
    for (int i = 0; i < 400 && fgets(line, sizeof(line), file) != NULL; i++) {
        (void)fputs(line, stderr);
    }
    (void)fclose(file);
}

__attribute__((format(printf, 4, 5))) static inline _Noreturn void
check_failed(const char *file, int line, const char *condition, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    (void)fflush(stdout);
    (void)fprintf(stderr, "FAILED %s:%d in %s, phase \"%s\": %s: %s\n", file, line, process_name,
                  process_phase, condition, text);
    if (strcmp(process_name, "master") == 0) {
        print_daemon_log();
    }
    (void)fflush(stderr);
    _exit(1); /* children are killed with this process */
}

/* ---- time ---- */

static inline uint64_t now_us(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static inline uint64_t now_ms(void)
{
    return now_us() / 1000;
}

static inline void pause_us(uint64_t microseconds)
{
    struct timespec time = {.tv_sec = (time_t)(microseconds / 1000000),
                            .tv_nsec = (long)(microseconds % 1000000 * 1000)};
    while (nanosleep(&time, &time) != 0) {
    }
}

static inline void phase(const char *name)
{
    static uint64_t begun_ms;
    uint64_t now = now_ms();
    begun_ms = begun_ms == 0 ? now : begun_ms;
    process_phase = name;
    (void)printf("[%6.2f s] %s\n", (double)(now - begun_ms) / 1000, name);
    (void)fflush(stdout);
}

static inline void time_is_over(int signal_number)
{
    (void)signal_number;
    static const char text[] = "FAILED: the test's time is over, in phase: ";
    (void)!write(STDERR_FILENO, text, sizeof(text) - 1);
    (void)!write(STDERR_FILENO, process_phase, strlen(process_phase));
    (void)!write(STDERR_FILENO, "\n", 1);
    _exit(1);
}

static inline void test_begin(unsigned seconds_max)
{
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGALRM, time_is_over);
    (void)alarm(seconds_max);
}

/* Zeroed memory that all processes forked later share. Lives as long as they. */
static inline void *shared_alloc(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED, "no memory: %s", strerror(errno));
    return memory;
}

/* ---- the daemon ---- */

struct daemon {
    char folder[64];
    char target[96]; /* "unix:…" */
    pid_t pid;
};

struct daemon_setup {
    uint64_t device_bytes;
    uint64_t host_bytes;
    const char *server; /* more lines of [server]; NULL: none */
    const char *rest;   /* more sections; NULL: none */
};

/* KVKEEPD, or kvkeepd beside this program. */
static inline void daemon_program(char *path, size_t size)
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

static inline void daemon_configure(const struct daemon *daemon, const struct daemon_setup *setup,
                                    const char *path)
{
    FILE *file = fopen(path, "w");
    CHECK(file != NULL, "cannot write %s: %s", path, strerror(errno));
    (void)fprintf(file,
                  "[server]\nunix_path = %s/kvkeep.sock\n%s\n"
                  "[tiers]\ndevice_bytes = %llu B\nhost_bytes = %llu B\n%s\n",
                  daemon->folder, setup->server == NULL ? "" : setup->server,
                  (unsigned long long)setup->device_bytes, (unsigned long long)setup->host_bytes,
                  setup->rest == NULL ? "" : setup->rest);
    /* Everything again with what outlives the daemon: ctest runs the cases both ways. */
    if (getenv("KVKEEP_TEST_DURABLE") != NULL &&
        (setup->rest == NULL || strstr(setup->rest, "[durable]") == NULL)) {
        (void)fprintf(file, "[durable]\nfolder = %s/data\nkeeper = process\nkeeper_hold_ms = 1 s\n",
                      daemon->folder);
    }
    CHECK(fclose(file) == 0, "cannot write %s", path);
}

static inline bool daemon_answers(const struct daemon *daemon)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/kvkeep.sock", daemon->folder);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool connected = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0;
    if (fd >= 0) {
        (void)close(fd);
    }
    return connected;
}

/* In the child: kvkeepd with its words in a file, which is shown when the test fails. */
static inline _Noreturn void daemon_exec(const char *config)
{
    char program[512];
    daemon_program(program, sizeof(program));
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    FILE *log = freopen(daemon_log_path, "a", stderr);
    /* Freed memory that a sanitizer keeps would look like growth. */
    (void)setenv("ASAN_OPTIONS", "quarantine_size_mb=1:malloc_context_size=8", 0);
    if (log != NULL) {
        (void)execl(program, "kvkeepd", "--config", config, "--test-hooks", "--log", "warning",
                    (char *)NULL);
        (void)fprintf(stderr, "cannot start %s: %s\n", program, strerror(errno));
    }
    _exit(127);
}

/* A folder of its own, and what lies in it. */
static inline void daemon_place(struct daemon *daemon, char *config, size_t config_size)
{
    (void)snprintf(daemon->folder, sizeof(daemon->folder), "/tmp/kvkeep-test.XXXXXX");
    CHECK(mkdtemp(daemon->folder) != NULL, "no folder: %s", strerror(errno));
    (void)snprintf(config, config_size, "%s/kvkeepd.conf", daemon->folder);
    (void)snprintf(daemon->target, sizeof(daemon->target), "unix:%s/kvkeep.sock", daemon->folder);
    (void)snprintf(daemon_log_path, sizeof(daemon_log_path), "%s/log", daemon->folder);
}

/* Its process; whether it comes up is another question. */
static inline void daemon_begin(struct daemon *daemon, const struct daemon_setup *setup)
{
    char config[96];
    daemon_place(daemon, config, sizeof(config));
    daemon_configure(daemon, setup, config);
    (void)fflush(stdout);
    daemon->pid = fork();
    CHECK(daemon->pid >= 0, "fork: %s", strerror(errno));
    if (daemon->pid == 0) {
        daemon_exec(config);
    }
}

static inline void daemon_start(struct daemon *daemon, const struct daemon_setup *setup)
{
    daemon_begin(daemon, setup);
    for (int i = 0; !daemon_answers(daemon); i++) {
        CHECK(waitpid(daemon->pid, NULL, WNOHANG) == 0, "kvkeepd did not start");
        CHECK(i < 1000, "kvkeepd does not answer after 20 s");
        pause_us(20000);
    }
}

/* Removes what a daemon leaves, and the folder. */
static inline void daemon_clean(struct daemon *daemon)
{
    static const char *const files[] = {"kvkeepd.conf", "kvkeep.sock", "kvkeep.sock.side",
                                        "kvkeep.sock.lock", "log"};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        char path[96];
        (void)snprintf(path, sizeof(path), "%s/%s", daemon->folder, files[i]);
        (void)unlink(path);
    }
    char data[96];
    (void)snprintf(data, sizeof(data), "%s/data", daemon->folder);
    folder_remove(data); /* there, if it was durable */
    (void)rmdir(daemon->folder);
    daemon_log_path[0] = '\0';
}

/* SIGTERM; it must end well, which a sanitizer's report would forbid too. */
static inline void daemon_stop(struct daemon *daemon)
{
    int status = 0;
    CHECK(kill(daemon->pid, SIGTERM) == 0, "the daemon is gone");
    for (int i = 0; waitpid(daemon->pid, &status, WNOHANG) == 0; i++) {
        CHECK(i < 3000, "the daemon does not end within 30 s");
        pause_us(10000);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the daemon ended with status %x",
          (unsigned)status);
    daemon_clean(daemon);
}

static inline void daemon_check_alive(const struct daemon *daemon)
{
    int status = 0;
    CHECK(waitpid(daemon->pid, &status, WNOHANG) == 0, "the daemon died, status %x",
          (unsigned)status);
}

/* Resident memory that is the process's own: pools are files, and not counted. */
static inline uint64_t process_anonymous_bytes(pid_t pid)
{
    char path[64];
    char line[256];
    unsigned long long kilobytes = 0;
    (void)snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL, "cannot read %s", path);
    while (fgets(line, sizeof(line), file) != NULL &&
           sscanf(line, "RssAnon: %llu kB", &kilobytes) != 1) {
    }
    (void)fclose(file);
    CHECK(kilobytes > 0, "%s does not tell", path);
    return kilobytes << 10;
}

/* May this user look at a daemon's descriptors? It cannot be traced, so its folder in /proc is
 * root's. */
static inline bool sees_descriptors(void)
{
    return geteuid() == 0;
}

/* 0, said in words: this user may not count them. */
static inline uint32_t process_descriptors(pid_t pid)
{
    char path[64];
    uint32_t count = 0;
    static bool said;
    if (!sees_descriptors()) {
        if (!said) {
            (void)printf("            not root: the daemon's descriptors are not counted\n");
        }
        said = true;
        return 0;
    }
    (void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *folder = opendir(path);
    CHECK(folder != NULL, "cannot read %s", path);
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count - 2; /* "." and ".." */
}

/* ---- agents ---- */

typedef void (*agent_task)(void *shared);

struct agent {
    const char *name;
    pid_t pid; /* 0: none */
    int socket;
    bool busy;
};

struct agent_order {
    agent_task task;
    void *shared;
};

/* The master's ends, which no child must keep open: an end tells the agent to go. */
#define AGENTS_MAX 256
static int agent_sockets[AGENTS_MAX]; /* 0: none */

static inline void agent_socket_note(int socket, bool open)
{
    CHECK(socket > 0 && socket < AGENTS_MAX, "too many descriptors");
    agent_sockets[socket] = open ? socket : 0;
}

static inline void agent_sockets_close(void)
{
    for (int i = 0; i < AGENTS_MAX; i++) {
        if (agent_sockets[i] > 0) {
            (void)close(agent_sockets[i]);
        }
    }
}

/* In the child, until the master lets go of it. */
static inline _Noreturn void agent_serve(int socket, void (*finish)(void))
{
    struct agent_order order;
    ssize_t got;
    while ((got = recv(socket, &order, sizeof(order), 0)) == (ssize_t)sizeof(order)) {
        order.task(order.shared);
        CHECK(send(socket, "d", 1, MSG_NOSIGNAL) == 1, "the master is gone");
    }
    CHECK(got == 0, "the master's words cannot be read");
    if (finish != NULL) {
        finish();
    }
    exit(0);
}

/* `finish` runs when the master lets go; NULL: nothing. */
static inline void agent_start(struct agent *agent, const char *name, void (*finish)(void))
{
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0, "socketpair: %s",
          strerror(errno));
    (void)fflush(stdout);
    pid_t master = getpid();
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        CHECK(getppid() == master, "the master is gone");
        (void)alarm(0);
        (void)close(sockets[0]);
        agent_sockets_close();
        process_name = name;
        agent_serve(sockets[1], finish);
    }
    (void)close(sockets[1]);
    agent_socket_note(sockets[0], true);
    *agent = (struct agent){.name = name, .pid = pid, .socket = sockets[0]};
}

static inline void agent_begin(struct agent *agent, agent_task task, void *shared)
{
    struct agent_order order = {.task = task, .shared = shared};
    CHECK(!agent->busy, "%s has a task already", agent->name);
    CHECK(send(agent->socket, &order, sizeof(order), MSG_NOSIGNAL) == (ssize_t)sizeof(order),
          "%s is gone", agent->name);
    agent->busy = true;
}

static inline void agent_end(struct agent *agent)
{
    struct pollfd answer = {.fd = agent->socket, .events = POLLIN};
    char byte;
    int got;
    do {
        got = poll(&answer, 1, AGENT_TASK_MS);
    } while (got < 0 && errno == EINTR);
    CHECK(got == 1, "the task of %s does not end", agent->name);
    CHECK(recv(agent->socket, &byte, 1, 0) == 1, "%s failed", agent->name);
    agent->busy = false;
}

static inline void agent_do(struct agent *agent, agent_task task, void *shared)
{
    agent_begin(agent, task, shared);
    agent_end(agent);
}

/* As `kill -9`, in the middle of whatever it does. */
static inline void agent_kill(struct agent *agent)
{
    int status = 0;
    CHECK(kill(agent->pid, SIGKILL) == 0, "%s is gone", agent->name);
    CHECK(waitpid(agent->pid, &status, 0) == agent->pid && WIFSIGNALED(status) &&
              WTERMSIG(status) == SIGKILL,
          "%s failed before it was killed, status %x", agent->name, (unsigned)status);
    agent_socket_note(agent->socket, false);
    (void)close(agent->socket);
    *agent = (struct agent){.name = agent->name};
}

/* Let go of it, and expect a good end. */
static inline void agent_finish(struct agent *agent)
{
    int status = 0;
    CHECK(!agent->busy, "%s still has a task", agent->name);
    agent_socket_note(agent->socket, false);
    (void)close(agent->socket);
    for (int i = 0; waitpid(agent->pid, &status, WNOHANG) == 0; i++) {
        CHECK(i < 3000, "%s does not end within 30 s", agent->name);
        pause_us(i < 100 ? 1000 : 10000);
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s ended with status %x", agent->name,
          (unsigned)status);
    *agent = (struct agent){.name = agent->name};
}

/* A number behind an option, such as "--rounds 500"; or the default. */
static inline uint64_t option_number(int argc, char **argv, const char *name, uint64_t standard)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return strtoull(argv[i + 1], NULL, 10);
        }
    }
    return standard;
}

#endif
