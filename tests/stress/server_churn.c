/*
 * Thousands of connects, crashes and reconnects: a server in a process of its own must show no
 * growth in descriptors or memory, no call left over, and no orderly end where there was a loss.
 *
 * Clients are raw sockets that come and go with and without bytes, and processes with a real
 * channel that are killed in the middle of streams and calls.
 */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/grpc_client.h"
#include "tests/server_fixture.h"

/* Freed memory that a sanitizer keeps would look like growth. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "quarantine_size_mb=1:malloc_context_size=2";
}

#define RAW_CONNECTS 1700
#define KILLED_CLIENTS 300
#define WARM_UP 10 /* percent of either */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define GROWTH_BYTES_MAX (32u << 20) /* shadow and history grow with what was ever touched */
#else
#define GROWTH_BYTES_MAX (8u << 20)
#endif

struct report {
    uint32_t descriptors, live_calls, live_connections, half_closes, cancels, dones;
    uint64_t resident_bytes, connections, connections_closed;
};

static void expect(bool condition, const char *what)
{
    if (!condition) {
        (void)fprintf(stderr, "server_churn: %s\n", what);
        exit(1);
    }
}

/* ---- the server's process ---- */

static uint32_t count_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    KVK_ASSERT(folder != NULL);
    uint32_t count = 0;
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count - 3; /* ".", ".." and the folder itself */
}

static uint64_t resident_bytes(void)
{
    unsigned long pages = 0;
    unsigned long resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    KVK_ASSERT(file != NULL);
    KVK_ASSERT(fscanf(file, "%lu %lu", &pages, &resident) == 2);
    (void)fclose(file);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void fill_report(struct fixture *fixture, struct report *report)
{
    (void)fixture_wait_live(fixture, 0, 0);
    struct kvk_server_stats stats;
    kvk_server_stats(fixture->server, &stats);
    report->live_calls = stats.live_calls;
    report->live_connections = stats.live_connections;
    report->connections = stats.connections;
    report->connections_closed = atomic_load(&fixture->counts.connections_closed);
    report->half_closes = atomic_load(&fixture->counts.half_closes);
    report->cancels = atomic_load(&fixture->counts.cancels);
    report->dones = atomic_load(&fixture->counts.dones);
    report->resident_bytes = resident_bytes();
    report->descriptors = count_descriptors();
}

/* Answers each byte of `asks` with a report, until it is closed. */
static void serve(struct fixture *fixture, int asks, int answers)
{
    fixture_start(fixture);
    char ask;
    KVK_ASSERT(write(answers, "r", 1) == 1);
    while (read(asks, &ask, 1) == 1) {
        struct report report = {0};
        fixture_answer_late(fixture);
        fill_report(fixture, &report);
        KVK_ASSERT(write(answers, &report, sizeof(report)) == (ssize_t)sizeof(report));
    }
    fixture_finish(fixture);
    exit(0);
}

/* ---- clients ---- */

/* Connect, perhaps say something, and go. */
static void raw_connect(const char *path, unsigned number)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    while (connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        expect(errno == EAGAIN || errno == EINTR, "connect failed");
        usleep(1000);
    }
    switch (number % 4) {
    case 0:
        break;
    case 1:
        (void)!send(fd, "garbage", 7, MSG_NOSIGNAL);
        break;
    case 2:
        (void)!send(fd, preface, sizeof(preface) - 1, MSG_NOSIGNAL);
        break;
    default:
        (void)!send(fd, preface, sizeof(preface) - 1, MSG_NOSIGNAL);
        (void)!recv(fd, (char[64]){0}, 64, 0);
        break;
    }
    (void)close(fd);
}

/* One call of some kind that does not end; writes to `ready` when it is well under way. */
static _Noreturn void client_in_the_middle(const char *target, unsigned number, int ready)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    static const char *const paths[] = {"/t/Upload", "/t/Download", "/t/PipeBulk", "/t/Pipe",
                                        "/t/Late"};
    struct client client;
    struct client_stream stream;
    static uint8_t data[300000];
    client_open(&client, target);
    const char *path = paths[number % 5];
    bool ok = client_stream_open(&stream, &client, path, -1);
    uint32_t request[2] = {1u << 20, 100000};
    bool request_only = number % 5 == 1 || number % 5 == 4;
    ok = ok && client_stream_send(&stream, request, sizeof(request));
    if (request_only) {
        ok = ok && client_stream_half_close(&stream);
    } else {
        for (unsigned i = 0; i < number % 7; i++) {
            ok = ok && client_stream_send(&stream, data, sizeof(data));
        }
    }
    KVK_ASSERT(write(ready, ok ? "k" : "f", 1) == 1);
    for (;;) {
        (void)pause();
    }
}

static void killed_client(const char *target, unsigned number)
{
    int ready[2];
    expect(pipe(ready) == 0, "pipe failed");
    pid_t child = fork();
    expect(child >= 0, "fork failed");
    if (child == 0) {
        client_in_the_middle(target, number, ready[1]);
    }
    char state = '?';
    (void)close(ready[1]);
    expect(read(ready[0], &state, 1) == 1 && state == 'k', "a client could not begin its call");
    (void)close(ready[0]);
    (void)kill(child, SIGKILL);
    (void)waitpid(child, NULL, 0);
}

static void churn(const struct fixture *fixture, unsigned raw_count, unsigned killed_count)
{
    for (unsigned i = 0; i < raw_count; i++) {
        raw_connect(fixture->path, i);
    }
    for (unsigned i = 0; i < killed_count; i++) {
        killed_client(fixture->target, i);
    }
}

static struct report ask_report(int asks, int answers)
{
    struct report report;
    expect(write(asks, "?", 1) == 1, "the server is gone");
    expect(read(answers, &report, sizeof(report)) == (ssize_t)sizeof(report), "the server is gone");
    return report;
}

static void expect_nothing_left(const struct report *report, unsigned connections)
{
    expect(report->live_calls == 0, "calls are left over");
    expect(report->live_connections == 0, "connections are left over");
    expect(report->connections >= connections, "connections were not accepted");
    expect(report->connections == report->connections_closed, "a close was not told, or twice");
    expect(report->half_closes == 0, "a lost client was taken for one that ended in order");
    expect(report->cancels == report->dones, "a stream was not ended once");
}

int main(void)
{
    int asks[2];
    int answers[2];
    struct fixture fixture;
    fixture_init(&fixture, "churn");
    fixture.options.connections_max = 64; /* reached where closes are not seen */
    expect(pipe(asks) == 0 && pipe(answers) == 0, "pipe failed");
    pid_t server = fork();
    expect(server >= 0, "fork failed");
    if (server == 0) {
        (void)close(asks[1]);
        (void)close(answers[0]);
        serve(&fixture, asks[0], answers[1]);
    }
    (void)close(asks[0]);
    (void)close(answers[1]);
    char ready;
    expect(read(answers[0], &ready, 1) == 1, "the server does not start");

    unsigned warm_raw = RAW_CONNECTS * WARM_UP / 100;
    unsigned warm_killed = KILLED_CLIENTS * WARM_UP / 100;
    churn(&fixture, warm_raw, warm_killed);
    struct report before = ask_report(asks[1], answers[0]);
    expect_nothing_left(&before, (warm_raw + warm_killed) / 2);

    churn(&fixture, RAW_CONNECTS - warm_raw, KILLED_CLIENTS - warm_killed);
    struct report after = ask_report(asks[1], answers[0]);
    expect_nothing_left(&after, (RAW_CONNECTS + KILLED_CLIENTS) / 2);
    (void)printf("descriptors %u -> %u, resident %llu -> %llu KiB, connections %llu, "
                 "cancelled %u\n",
                 before.descriptors, after.descriptors,
                 (unsigned long long)before.resident_bytes >> 10,
                 (unsigned long long)after.resident_bytes >> 10,
                 (unsigned long long)after.connections, after.cancels);
    expect(after.descriptors == before.descriptors, "descriptors leak");
    expect(after.resident_bytes < before.resident_bytes + GROWTH_BYTES_MAX, "memory grows");

    (void)close(asks[1]);
    int status = 0;
    expect(waitpid(server, &status, 0) == server && WIFEXITED(status) && WEXITSTATUS(status) == 0,
           "the server did not end well");
    free(fixture.data);
    return 0;
}
