/*
 * The disk tier of a real daemon.
 *
 * Case G1: a hundred blocks on disk, `kill -9`, restart, and all of them again with every byte;
 * what the disk takes stays that of one copy. Case C3, as far as the disk goes: clients that are
 * killed while their prefix is brought back, and nothing of theirs stays. Look-ups that read ahead.
 * A daemon, and a worker, that are stopped for seconds under load: nobody's lease ends by that.
 *
 *     test_stress_daemon_disk [--rounds N] [--restores N]
 */
#include <ftw.h>

#include "tests/daemon_look.h"
#include "tests/folder.h"

#define PROMPTS 20
#define PROMPT_BLOCKS 5
#define BLOCKS (PROMPTS * PROMPT_BLOCKS)
#define STOP_MS 4000 /* that a process is stopped */
#define STOP_LEASE_MS 2000
#define SLOT_BYTES ((BLOCK_BYTES + UINT64_C(4095)) / 4096 * 4096)

struct shared {
    struct look look;
    char target[96];
    uint64_t cached;      /* tokens, of all prompts of a round */
    uint64_t disk_blocks; /* as the daemon counts them */
    uint64_t straight;    /* blocks that were written from where they lay */
    uint64_t limit_bytes;
    _Atomic uint64_t steps; /* of a client that is about to be killed */
    _Atomic bool leased;    /* a lease is held, and short */
    _Atomic bool goes_on;   /* the daemon has been stopped, and goes on */
};
static struct shared *shared;
static struct prompt prompt; /* each process's own */

/* ---- What clients do ---- */

static void client_open(void)
{
    if (self.client == NULL) {
        worker_open(
            &(struct worker_options){.target = shared->target, .model = "model", .name = "client"});
    }
}

static void client_finish(void)
{
    worker_close();
}

static void prompt_choose(uint32_t number)
{
    prompt_set(&prompt, 1000 * (number + 1), PROMPT_BLOCKS * BLOCK_TOKENS);
}

/* Open every prompt, write what is not cached, and look at every byte. */
static void replay(void *unused)
{
    (void)unused;
    client_open();
    shared->cached = 0;
    for (uint32_t i = 0; i < PROMPTS; i++) {
        struct kvkeep_sequence sequence;
        prompt_choose(i);
        worker_open_sequence(&prompt, NULL, &sequence);
        shared->cached += sequence.cached_tokens;
        worker_write(&sequence, &prompt, sequence.grant_first, prompt.count);
        worker_seal(&sequence, prompt.count);
        worker_verify(&sequence, &prompt, 0, prompt.count);
        bool fresh = sequence.cached_tokens < prompt.count;
        worker_close_sequence(&sequence);
        if (fresh) {
            pause_us(100000); /* nobody waits for the disk: what it is to have, it needs time for */
        }
    }
}

/* The same for ever, to be killed in the middle of it. */
static void restore_on(void *unused)
{
    (void)unused;
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid());
    client_open();
    for (;;) {
        struct kvkeep_sequence sequence;
        prompt_choose((uint32_t)kvk_random_below(&random, PROMPTS));
        worker_open_sequence(&prompt, NULL, &sequence);
        worker_verify(&sequence, &prompt, 0, sequence.cached_tokens);
        atomic_fetch_add(&shared->steps, 1);
        worker_close_sequence(&sequence);
    }
}

/* What is on disk alone comes to memory because somebody looked it up, and nobody opened it. */
static void look_ahead(void *unused)
{
    struct kvkeep_lookup found = {.cached_tokens = 0};
    (void)unused;
    client_open();
    prompt_choose(0);
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(kvkeep_lookup(self.client, &self.space, &view, false, &found, &self.error));
    CHECK(found.disk_tokens == prompt.count && found.cached_tokens == prompt.count,
          "%llu of %llu tokens are on disk alone", (unsigned long long)found.disk_tokens,
          (unsigned long long)prompt.count);
    CHECK(found.restore_ns > 0, "no estimate");
    pause_us(200000);
    CHECK_OK(kvkeep_lookup(self.client, &self.space, &view, false, &found, &self.error));
    CHECK(found.disk_tokens == prompt.count, "a plain look-up brings nothing back");
    CHECK_OK(kvkeep_lookup_ahead(self.client, &self.space, &view, false, &found, &self.error));
    for (int i = 0; found.disk_tokens > 0; i++) {
        CHECK(i < 1000, "%llu tokens stay on disk alone", (unsigned long long)found.disk_tokens);
        pause_us(20000);
        CHECK_OK(kvkeep_lookup(self.client, &self.space, &view, false, &found, &self.error));
    }
    CHECK(found.host_tokens == prompt.count, "they are in memory");
}

/* A lease that would end long before the daemon goes on, if its silence counted. */
static void lease_over_a_stop(void *unused)
{
    struct kvkeep_sequence sequence;
    struct kvkeep_lease lease;
    (void)unused;
    client_open();
    prompt_choose(1);
    worker_open_sequence(&prompt, NULL, &sequence);
    worker_close_sequence(&sequence);
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(
        kvkeep_pin(self.session, &self.space, &view, STOP_LEASE_MS, false, &lease, &self.error));
    CHECK(lease.cached_tokens == prompt.count, "pinned %llu tokens",
          (unsigned long long)lease.cached_tokens);
    atomic_store(&shared->leased, true);
    while (!atomic_load(&shared->goes_on)) {
        pause_us(1000);
    }
    CHECK_OK(kvkeep_renew(self.session, &lease, STOP_LEASE_MS, &self.error));
    CHECK_OK(kvkeep_release(self.session, &lease, &self.error));
}

static void look_disk(void *unused)
{
    Kvkeep__V1__GetOccupancyRequest request = KVKEEP__V1__GET_OCCUPANCY_REQUEST__INIT;
    Kvkeep__V1__GetOccupancyResponse *response = NULL;
    (void)unused;
    if (self.client == NULL) {
        worker_connect(&(struct worker_options){.target = shared->target, .timeout_ms = 10000});
    }
    CHECK_OK(worker_call(ADMIN_METHOD("GetOccupancy"), &request.base,
                         &kvkeep__v1__get_occupancy_response__descriptor, &response));
    shared->disk_blocks = 0;
    for (size_t i = 0; i < response->n_rows; i++) {
        shared->disk_blocks += response->rows[i]->disk_blocks;
    }
    for (size_t i = 0; i < response->n_tiers; i++) {
        if (response->tiers[i]->tier == KVKEEP__V1__TIER__TIER_DISK) {
            shared->limit_bytes = response->tiers[i]->limit_bytes;
        }
    }
    CHECK(response->disk != NULL, "the daemon has no disk tier");
    message_free(response);
}

static void look_straight(void *unused)
{
    Kvkeep__V1__GetStatsRequest request = KVKEEP__V1__GET_STATS_REQUEST__INIT;
    Kvkeep__V1__GetStatsResponse *response = NULL;
    const char *name = "kvkeep_disk_straight_blocks_total";
    (void)unused;
    worker_connect(&(struct worker_options){.target = shared->target, .timeout_ms = 10000});
    CHECK_OK(worker_call(ADMIN_METHOD("GetStats"), &request.base,
                         &kvkeep__v1__get_stats_response__descriptor, &response));
    shared->straight = 0;
    for (size_t i = 0; i < response->n_stats; i++) {
        const Kvkeep__V1__Stat *stat = response->stats[i];
        bool is_it =
            stat->name.len == strlen(name) && memcmp(stat->name.data, name, stat->name.len) == 0;
        shared->straight += is_it ? (uint64_t)stat->value : 0;
    }
    message_free(response);
}

/* ---- What the master does ---- */

static void do_once(agent_task task, void (*finish)(void))
{
    struct agent agent;
    agent_start(&agent, "client", finish);
    agent_do(&agent, task, shared);
    agent_finish(&agent);
}

static void wait_for_disk(uint64_t blocks)
{
    uint64_t until_ms = now_ms() + 20000;
    do {
        do_once(look_disk, NULL);
        if (shared->disk_blocks == blocks) {
            return;
        }
        pause_us(20000);
    } while (now_ms() < until_ms);
    CHECK(false, "%llu blocks are on disk, not %llu", (unsigned long long)shared->disk_blocks,
          (unsigned long long)blocks);
}

static uint64_t folder_sum;

static int add_size(const char *path, const struct stat *stat, int kind, struct FTW *walk)
{
    (void)kind;
    (void)walk;
    folder_sum += strstr(path, "/blocks/blocks-") != NULL ? (uint64_t)stat->st_blocks * 512 : 0;
    return 0;
}

static char where[64]; /* the durable folder */

static void check_folder(void)
{
    folder_sum = 0;
    (void)nftw(where, add_size, 16, FTW_PHYS);
    CHECK(folder_sum <= BLOCKS * SLOT_BYTES * 11 / 10, "the blocks take %llu bytes on disk",
          (unsigned long long)folder_sum);
}

static void daemon_kill(struct daemon *daemon)
{
    int status;
    CHECK(kill(daemon->pid, SIGKILL) == 0, "the daemon is gone");
    CHECK(waitpid(daemon->pid, &status, 0) == daemon->pid, "waitpid");
}

static void daemon_again(struct daemon *daemon)
{
    char config[96];
    (void)snprintf(config, sizeof(config), "%s/kvkeepd.conf", daemon->folder);
    (void)fflush(stdout);
    daemon->pid = fork();
    CHECK(daemon->pid >= 0, "fork: %s", strerror(errno));
    if (daemon->pid == 0) {
        daemon_exec(config);
    }
    for (int i = 0; !daemon_answers(daemon); i++) {
        CHECK(waitpid(daemon->pid, NULL, WNOHANG) == 0, "kvkeepd did not start again");
        CHECK(i < 1000, "kvkeepd does not answer after 20 s");
        pause_us(20000);
    }
}

static void blocks_survive(struct daemon *daemon, uint64_t rounds)
{
    const uint64_t tokens = (uint64_t)BLOCKS * BLOCK_TOKENS;
    phase("G1: a hundred blocks, kill -9, restart, every byte again");
    for (uint64_t round = 0; round < rounds; round++) {
        do_once(replay, client_finish);
        CHECK(shared->cached == (round == 0 ? 0 : tokens), "round %llu: %llu of %llu tokens",
              (unsigned long long)round, (unsigned long long)shared->cached,
              (unsigned long long)tokens);
        wait_for_disk(BLOCKS);
        do_once(look_straight, NULL);
        CHECK(round > 0 || shared->straight > 0, "every block was copied before it was written");
        check_folder();
        /* What is queued is committed within 50 ms or so. */
        pause_us(200000);
        daemon_kill(daemon);
        daemon_again(daemon);
        do_once(look_disk, NULL);
        CHECK(shared->disk_blocks == BLOCKS, "round %llu: %llu blocks came back",
              (unsigned long long)round, (unsigned long long)shared->disk_blocks);
        CHECK(shared->limit_bytes == 2 * BLOCKS * SLOT_BYTES, "capacity as configured");
    }
}

static void clients_die(uint64_t restores)
{
    struct kvk_random random;
    struct agent observer;
    phase("C3: clients killed while blocks are read from disk");
    kvk_random_init(&random, 3);
    agent_start(&observer, "observer", NULL);
    for (uint64_t i = 0; i < restores; i++) {
        struct agent victim;
        atomic_store(&shared->steps, 0);
        agent_start(&victim, "victim", NULL);
        agent_begin(&victim, restore_on, shared);
        for (int j = 0; atomic_load(&shared->steps) == 0; j++) {
            CHECK(j < 20000, "the victim does nothing");
            pause_us(1000);
        }
        pause_us(kvk_random_below(&random, 20000));
        agent_kill(&victim);
        (void)expect_free(&observer, &shared->look, false, now_us());
    }
    agent_finish(&observer);
}

static uint64_t load_goes_on(uint64_t before)
{
    for (int i = 0; atomic_load(&shared->steps) <= before + 20; i++) {
        CHECK(i < 20000, "the others do not go on");
        pause_us(1000);
    }
    return atomic_load(&shared->steps);
}

/* The daemon is stopped in the middle of restores, and then a worker is. */
static void stopped_for_seconds(struct daemon *daemon)
{
    struct agent loads[2], leaser, observer;
    phase("a daemon that is stopped for seconds expires nobody");
    atomic_store(&shared->steps, 0);
    agent_start(&leaser, "leaser", client_finish);
    agent_start(&loads[0], "load", NULL);
    agent_start(&loads[1], "load", NULL);
    agent_begin(&leaser, lease_over_a_stop, shared);
    agent_begin(&loads[0], restore_on, shared);
    agent_begin(&loads[1], restore_on, shared);
    uint64_t steps = load_goes_on(0);
    while (!atomic_load(&shared->leased)) {
        pause_us(1000);
    }
    CHECK(kill(daemon->pid, SIGSTOP) == 0, "SIGSTOP");
    pause_us(STOP_MS * UINT64_C(1000));
    CHECK(kill(daemon->pid, SIGCONT) == 0, "SIGCONT");
    atomic_store(&shared->goes_on, true);
    agent_end(&leaser);
    agent_finish(&leaser);
    steps = load_goes_on(steps);

    phase("a worker that is stopped for seconds holds up nobody");
    CHECK(kill(loads[0].pid, SIGSTOP) == 0, "SIGSTOP");
    uint64_t until_ms = now_ms() + STOP_MS / 2;
    while (now_ms() < until_ms) {
        steps = load_goes_on(steps);
    }
    CHECK(kill(loads[0].pid, SIGCONT) == 0, "SIGCONT");
    (void)load_goes_on(steps);
    agent_kill(&loads[0]);
    agent_kill(&loads[1]);
    agent_start(&observer, "observer", NULL);
    (void)expect_free(&observer, &shared->look, false, now_us());
    agent_finish(&observer);
}

int main(int argc, char **argv)
{
    uint64_t rounds = option_number(argc, argv, "--rounds", 5);
    uint64_t restores = option_number(argc, argv, "--restores", 10);
    static struct daemon daemon;
    char rest[512];
    test_begin(600);
    shared = shared_alloc(sizeof(*shared));
    (void)snprintf(where, sizeof(where), "/tmp/kvkeep-stress-disk-%d", (int)getpid());
    (void)snprintf(rest, sizeof(rest),
                   "[durable]\nfolder = %s\nkeeper = no\ndisk_bytes = %llu B\n"
                   "disk_admit_uses = 1\ncatalogue_bytes = 256 MiB\n",
                   where, (unsigned long long)(2 * BLOCKS * SLOT_BYTES));
    daemon_start(&daemon, &(struct daemon_setup){.host_bytes = 40 * BLOCK_BYTES, .rest = rest});
    (void)snprintf(shared->target, sizeof(shared->target), "%s", daemon.target);
    (void)snprintf(shared->look.target, sizeof(shared->look.target), "%s", daemon.target);
    blocks_survive(&daemon, rounds);
    do_once(look_ahead, client_finish);
    clients_die(restores);
    stopped_for_seconds(&daemon);
    do_once(replay, client_finish);
    CHECK(shared->cached == (uint64_t)BLOCKS * BLOCK_TOKENS, "all of it is still there");
    daemon_stop(&daemon);
    folder_remove(where);
    (void)printf("ok\n");
    return 0;
}
