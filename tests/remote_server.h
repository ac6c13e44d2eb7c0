/*
 * A real Redis server of a program's own, in a folder and on a port that nobody else has, with a
 * key file for daemons that share it. It ends with the thread that started it. For tests of every
 * kind and for benchmarks: what goes wrong here ends the program.
 */
#ifndef KVK_TESTS_REMOTE_SERVER_H
#define KVK_TESTS_REMOTE_SERVER_H

#include <arpa/inet.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/random.h"
#include "base/status.h"
#include "tests/folder.h"

#define REMOTE_SERVER_WAIT_MS 20000

struct remote_server {
    char folder[64];
    unsigned port;    /* the next one is free, too */
    const char *more; /* options of its command line, borrowed; NULL: none */
    pid_t pid;        /* 0: it does not run */
};

/* A command of the shell, of the tests' own making; its exit code. */
static inline int KVK_PRINTF(1, 2) remote_command(const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    int code = system(text); /* NOLINT(cert-env33-c) */
    return WIFEXITED(code) ? WEXITSTATUS(code) : 1;
}

/* False, in words: not here. */
static inline bool remote_is_installed(void)
{
    bool installed = remote_command("command -v redis-server >/dev/null && "
                                    "command -v redis-cli >/dev/null") == 0;
    if (!installed) {
        (void)fprintf(stderr, "skipped: redis-server is not installed (deploy/packages.sh "
                              "--test)\n");
    }
    return installed;
}

static inline struct sockaddr_in remote_address(unsigned port)
{
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static inline bool remote_answers(const struct remote_server *server)
{
    struct sockaddr_in address = remote_address(server->port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool connected = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0;
    if (fd >= 0) {
        (void)close(fd);
    }
    return connected;
}

static inline bool remote_port_is_free(unsigned port)
{
    struct sockaddr_in address = remote_address(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_free = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0;
    if (fd >= 0) {
        (void)close(fd);
    }
    return is_free;
}

/* A port that nobody has, as the one after it, below those that the kernel gives to connections. */
static inline unsigned remote_port(void)
{
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid() * 1000003 + (uint64_t)time(NULL));
    for (int i = 0; i < 1000; i++) {
        unsigned port = (unsigned)kvk_random_between(&random, 20000, 32000);
        if (remote_port_is_free(port) && remote_port_is_free(port + 1)) {
            return port;
        }
    }
    KVK_UNREACHABLE();
}

/* ---- Its life ---- */

/* Empty, on the server's port. */
static inline void remote_server_run(struct remote_server *server)
{
    char text[512];
    (void)snprintf(text, sizeof(text),
                   "cd %s && exec redis-server --port %u --bind 127.0.0.1 --save '' --logfile log "
                   "%s",
                   server->folder, server->port, server->more != NULL ? server->more : "");
    pid_t parent = getpid();
    server->pid = fork();
    KVK_ASSERT(server->pid >= 0);
    if (server->pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) {
            (void)execl("/bin/sh", "sh", "-c", text, (char *)NULL);
        }
        _exit(127);
    }
    for (int i = 0; i < REMOTE_SERVER_WAIT_MS / 5 && !remote_answers(server); i++) {
        (void)usleep(5000);
    }
    KVK_ASSERT(remote_answers(server));
}

static inline void remote_server_kill(struct remote_server *server)
{
    if (server->pid > 0) {
        (void)kill(server->pid, SIGKILL);
        (void)waitpid(server->pid, NULL, 0);
        server->pid = 0;
    }
}

/* The folder, with the key in it, and a port: everything but the server. */
static inline void remote_server_init(struct remote_server *server)
{
    static const char key[] = "00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210\n";
    char path[96];
    *server = (struct remote_server){.port = remote_port()};
    (void)snprintf(server->folder, sizeof(server->folder), "/tmp/kvkeep-remote.XXXXXX");
    char *made = mkdtemp(server->folder);
    KVK_ASSERT(made != NULL);
    (void)snprintf(path, sizeof(path), "%s/key", server->folder);
    FILE *file = fopen(path, "w");
    KVK_ASSERT(file != NULL);
    bool written = fchmod(fileno(file), 0600) == 0 && fputs(key, file) >= 0;
    written = fclose(file) == 0 && written;
    KVK_ASSERT(written);
}

static inline void remote_server_start(struct remote_server *server)
{
    remote_server_init(server);
    remote_server_run(server);
}

static inline void remote_server_stop(struct remote_server *server)
{
    remote_server_kill(server);
    folder_remove(server->folder);
}

/* Words for redis-cli; its first line of output, "" where there is none. */
static inline void KVK_PRINTF(3, 4)
    remote_ask(const struct remote_server *server, char answer[256], const char *format, ...)
{
    char words[1024];
    char text[1280];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(words, sizeof(words), format, arguments);
    va_end(arguments);
    (void)snprintf(text, sizeof(text), "redis-cli -p %u %s", server->port, words);
    answer[0] = '\0';
    FILE *pipe = popen(text, "r"); /* NOLINT(cert-env33-c) */
    KVK_ASSERT(pipe != NULL);
    if (fgets(answer, 256, pipe) == NULL) {
        answer[0] = '\0';
    }
    (void)pclose(pipe);
    answer[strcspn(answer, "\n")] = '\0';
}

#endif
