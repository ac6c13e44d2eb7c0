/*
 * Workers that come, crash and come again, 2,000 times: the daemon's memory and descriptors do not
 * grow, and nothing of them is left.
 *
 * Some ask one question and go, some crash with sequences, mappings, leases and tickets, some end
 * in order, some join an instance as a rank and crash, some reconnect within one process.
 *
 *     test_stress_daemon_churn [--clients N]
 */
#include "tests/daemon_look.h"

#define MIB (UINT64_C(1) << 20)

/* What the second half of the clients may add; in the first half the daemon's tables and heap find
 * their size. With 2,000 clients a leak of 1.5 KiB each breaks it, with 20,000 one of 150 bytes. A
 * sanitizer's own books grow with what was allocated. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define GROWTH_BYTES_MAX (24 * MIB)
#else
#define GROWTH_BYTES_MAX (3 * MIB / 2)
#endif

enum { WAYS = 6, AT_ONCE = 4 };

struct shared {
    char target[96];
    uint64_t clients; /* begun so far */
    _Atomic uint64_t served;
    struct look look;
};
static struct shared *shared;
static struct agent observer = {.name = "observer"};
static struct prompt prompt;

/* ---- clients ---- */

static void client_open(void)
{
    worker_open(&(struct worker_options){
        .target = shared->target, .tenant = "default", .model = "model", .name = "client"});
    prompt_set(&prompt, 1000 * (uint32_t)(shared->clients % 7), 40);
}

static void asks_and_goes(void)
{
    struct kvkeep_server_info info;
    worker_connect(&(struct worker_options){.target = shared->target});
    CHECK_OK(kvkeep_server_info(self.client, &info, &self.error));
}

static void crashes_while_writing(void)
{
    struct kvkeep_sequence sequence;
    client_open();
    prompt_add(&prompt, (uint32_t)shared->clients);
    worker_open_sequence(&prompt, NULL, &sequence);
    worker_write(&sequence, &prompt, sequence.grant_first, prompt.count);
}

static void crashes_with_much(void)
{
    struct kvkeep_sequence sequence;
    struct kvkeep_sequence forks[2];
    struct kvkeep_lease lease;
    struct kvkeep_map scratch;
    client_open();
    worker_fill(&prompt, NULL, &sequence);
    CHECK_OK(kvkeep_fork(self.session, &sequence, 2, forks, &self.error));
    CHECK_OK(kvkeep_append(self.session, &forks[0], prompt.tokens, 5, true, &self.error));
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 60000, true, &lease, &self.error));
    CHECK_OK(kvkeep_map_scratch(self.session, 100000, &scratch, &self.error));
    memset(scratch.address, 1, 100000);
    CHECK_OK(kvkeep_swap_out(self.session, &forks[1], NULL, &self.error));
}

static void ends_in_order(void)
{
    struct kvkeep_sequence sequence;
    client_open();
    worker_fill(&prompt, NULL, &sequence);
    worker_verify_stream(&sequence, NULL, &prompt, prompt.count);
    worker_close_sequence(&sequence);
    worker_close();
}

static void reconnects(void)
{
    for (int i = 0; i < 3; i++) {
        struct kvkeep_sequence sequence;
        client_open();
        worker_open_sequence(&prompt, NULL, &sequence);
        worker_close();
    }
    client_open();
}

/* The opener and a rank of one instance, in one process; both crash. */
static void crashes_as_ranks(void)
{
    struct kvkeep_session *joined = NULL;
    client_open();
    const struct kvkeep_session_options options = {
        .instance_token = kvkeep_session_token(self.session), .rank = 1, .name = "rank"};
    CHECK_OK(kvkeep_session_open(self.client, &options, &joined, &self.error));
}

static void client_live(uint64_t number)
{
    static void (*const ways[WAYS])(void) = {asks_and_goes,     crashes_while_writing,
                                             crashes_with_much, ends_in_order,
                                             reconnects,        crashes_as_ranks};
    ways[number % WAYS]();
    atomic_fetch_add(&shared->served, 1);
    if (number % WAYS != 3) {
        (void)raise(SIGKILL);
    }
    exit(0);
}

/* ---- the master ---- */

static pid_t client_start(void)
{
    uint64_t number = shared->clients;
    (void)fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0, "fork: %s", strerror(errno));
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        agent_sockets_close();
        process_name = "client";
        client_live(number);
    }
    shared->clients++;
    return pid;
}

static void churn(uint64_t count)
{
    uint64_t live = 0;
    uint64_t begun = 0;
    uint64_t served = atomic_load(&shared->served) + count;
    while (begun < count || live > 0) {
        if (begun < count && live < AT_ONCE) {
            (void)client_start();
            begun++;
            live++;
            continue;
        }
        int status = 0;
        CHECK(waitpid(-1, &status, 0) > 0, "waitpid: %s", strerror(errno));
        CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0,
              "a client, the observer or the daemon ended with status %x", (unsigned)status);
        live--;
    }
    CHECK(atomic_load(&shared->served) == served, "a client did not do what it should");
}

struct size {
    uint64_t bytes;
    uint32_t descriptors;
};

/* When all of the clients are gone, and gRPC has put away what it had of them: the least that is
 * seen within three seconds. */
static struct size settle(const struct daemon *daemon)
{
    struct size size = {.bytes = UINT64_MAX, .descriptors = UINT32_MAX};
    uint64_t until_ms = now_ms() + 3000;
    (void)expect_free(&observer, &shared->look, false, now_us());
    while (now_ms() < until_ms) {
        uint64_t bytes = process_anonymous_bytes(daemon->pid);
        uint32_t descriptors = process_descriptors(daemon->pid);
        size.bytes = bytes < size.bytes ? bytes : size.bytes;
        size.descriptors = descriptors < size.descriptors ? descriptors : size.descriptors;
        pause_us(50000);
    }
    return size;
}

int main(int argc, char **argv)
{
    struct daemon daemon;
    uint64_t clients = option_number(argc, argv, "--clients", 2000);
    test_begin((unsigned)(120 + clients / 5));
    shared = shared_alloc(sizeof(*shared));
    /* One heap without huge pages, so that what is seen is what was allocated. */
    CHECK(setenv("MALLOC_ARENA_MAX", "1", 1) == 0, "setenv");
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0, "prctl: %s", strerror(errno));
    /* Tables are as large as their limits and of zero pages: with small limits all of their pages
     * are in use after a few clients, and what grows after that was lost. */
    const struct daemon_setup setup = {.device_bytes = 8 * MIB,
                                       .host_bytes = 8 * MIB,
                                       .rest = "[cache]\npolicy = lru\n"
                                               "[limits]\nsequences = 256\nleases = 256\n"
                                               "transfers = 256\ninstances = 64\n"
                                               "sessions = 128\nroots = 256\nspaces = 16\n"};
    daemon_start(&daemon, &setup);
    memcpy(shared->target, daemon.target, sizeof(shared->target));
    memcpy(shared->look.target, daemon.target, sizeof(shared->look.target));
    agent_start(&observer, "observer", worker_close);

    phase("clients come and crash: warm-up");
    churn(clients / 2);
    struct size before = settle(&daemon);
    for (int i = 1; i <= 2; i++) {
        phase("clients come and crash");
        churn(clients / 4);
        struct size now = settle(&daemon);
        (void)printf("            %llu clients: %u descriptors, %llu KiB\n",
                     (unsigned long long)shared->clients, now.descriptors,
                     (unsigned long long)now.bytes >> 10);
        CHECK(now.descriptors <= before.descriptors, "descriptors grew from %u to %u",
              before.descriptors, now.descriptors);
        CHECK(now.bytes < before.bytes + GROWTH_BYTES_MAX, "memory grew from %llu to %llu KiB",
              (unsigned long long)before.bytes >> 10, (unsigned long long)now.bytes >> 10);
    }
    (void)printf("            after the warm-up: %u descriptors, %llu KiB\n", before.descriptors,
                 (unsigned long long)before.bytes >> 10);
    agent_finish(&observer);
    daemon_stop(&daemon);
    phase("passed");
    return 0;
}
