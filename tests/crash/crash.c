/*
 * kvkeepd killed at any moment, under load, while it starts and while it restores, and started
 * again in the same folder: with a disk tier, a catalogue and a keeper that holds its memory.
 *
 * Several workers write, share, grow, fork, swap, read and close sequences whose every byte follows
 * from tenant, model and the tokens before it; one owns a space that it invalidates again and
 * again, and writes anew with other bytes. After every restart: each block that is found has its
 * bytes, in memory and from the disk; what was invalidated is not found; the daemon's own laws
 * hold; the disk has not passed its limit; a worker of before that still writes to the memory that
 * it was given harms nobody. Now and then everything is forgotten, and then everything must be
 * free. At the end nothing is left: no process, no memory.
 *
 *     test_crash_crash [--rounds N] [--seed N]
 */
#include "tests/daemon_load.h"
#include "tests/daemon_restart.h"

#define MIB (UINT64_C(1) << 20)

enum {
    WORKERS = 3,
    OWNED_DOCUMENTS = 10,
    FORGET_EVERY = 5, /* rounds */
    FILL_EVERY = 3,
    FILLERS = 24, /* documents: more than the device tier holds */
};

static const char *const tenants[] = {"red", "blue"};

struct shared {
    struct load load;
    _Atomic uint64_t invalidated;
    _Atomic uint64_t sent_epoch, answered_epoch; /* of the owned space */
    uint64_t round, seed;
    uint64_t checked_tokens, hit_tokens, documents_hit; /* by the verifier, this round */
    struct look look;
};
static struct shared *shared;
static uint32_t me; /* which worker */

/* ---- workers ---- */

static void works(void *number)
{
    struct kvk_random random;
    me = (uint32_t)(uintptr_t)number;
    kvk_random_init(&random, shared->seed + shared->round * 100 + me);
    open_worker(tenants[me % 2], me == 2 ? "other" : "model");
    for (;;) {
        uint32_t number_of = (uint32_t)kvk_random_below(&random, DOCUMENTS);
        document(number_of, kvk_random_between(&random, 1, DOCUMENT_TOKENS));
        one_life(&random);
    }
}

/* The owned space: what is written, is invalidated, and written anew with other bytes. */
static uint64_t owned_seed(uint64_t epoch)
{
    return seed_of("red", "owned") + epoch * UINT64_C(0x9e3779b97f4a7c15);
}

static enum kvk_status invalidate_own(void)
{
    Kvkeep__V1__InvalidateRequest request = KVKEEP__V1__INVALIDATE_REQUEST__INIT;
    Kvkeep__V1__InvalidateResponse *response = NULL;
    request.space_id = self.space.id;
    enum kvk_status status = worker_call(KVKEEP_METHOD("Invalidate"), &request.base,
                                         &kvkeep__v1__invalidate_response__descriptor, &response);
    if (status == KVK_OK) {
        message_free(response);
    }
    return status;
}

static void owns(void *unused)
{
    struct kvk_random random;
    (void)unused;
    kvk_random_init(&random, shared->seed + shared->round * 100 + 50);
    open_worker("red", "owned");
    for (;;) {
        self.seed = owned_seed(atomic_load(&shared->answered_epoch));
        for (uint64_t i = kvk_random_between(&random, 3, 30); i > 0; i--) {
            document((uint32_t)kvk_random_below(&random, OWNED_DOCUMENTS),
                     kvk_random_between(&random, 1, DOCUMENT_TOKENS));
            one_life(&random);
        }
        atomic_fetch_add(&shared->sent_epoch, 1);
        bool done = went_well(invalidate_own(), "Invalidate");
        CHECK(done, "an invalidation was refused for want of room");
        atomic_store(&shared->answered_epoch, atomic_load(&shared->sent_epoch));
        atomic_fetch_add(&shared->invalidated, 1);
    }
}

/* Holds a grant that is never sealed, and writes there whatever happens to the daemon. */
static void scribbles(void *unused)
{
    struct kvkeep_sequence sequence;
    (void)unused;
    open_worker("blue", "model");
    document(DOCUMENTS + 1, DOCUMENT_TOKENS);
    while (!went_well(worker_try_open(&prompt, NULL, &sequence), "OpenSequence")) {
    }
    while (!map_all(&sequence)) {
    }
    for (;;) {
        worker_write(&sequence, &prompt, sequence.grant_first, prompt.count);
        pause_us(50);
    }
}

/* ---- after a restart ---- */

/* The bytes of what is found of the document, through gRPC, from wherever it lies. */
static void verify_document(void)
{
    struct kvkeep_prompt view = prompt_view(&prompt);
    struct kvkeep_lease lease;
    shared->checked_tokens += prompt.count;
    enum kvk_status status =
        kvkeep_pin(self.session, &self.space, &view, 60000, false, &lease, &self.error);
    CHECK(status == KVK_OK, "Pin: %s", self.error.text);
    if (lease.id == 0) {
        return;
    }
    shared->hit_tokens += lease.cached_tokens;
    shared->documents_hit++;
    worker_verify_stream(NULL, &lease, &prompt, lease.cached_tokens);
    CHECK_OK(kvkeep_release(self.session, &lease, &self.error));
}

static void verifies_space(const char *tenant, const char *model)
{
    open_worker(tenant, model);
    for (uint32_t i = 0; i < DOCUMENTS; i++) {
        document(i, DOCUMENT_TOKENS);
        verify_document();
    }
    worker_close();
}

static void verifies_owned(void)
{
    uint64_t answered = atomic_load(&shared->answered_epoch);
    uint64_t sent = atomic_load(&shared->sent_epoch);
    open_worker("red", "owned");
    CHECK(sent == answered || sent == answered + 1, "epochs");
    /* Where the answer was lost the invalidation may have happened: then nothing is found, since
     * only the owner writes, and it writes with the next epoch when it has the answer. */
    self.seed = owned_seed(answered);
    for (uint32_t i = 0; i < OWNED_DOCUMENTS; i++) {
        document(i, DOCUMENT_TOKENS);
        verify_document();
    }
    atomic_store(&shared->answered_epoch, sent);
    if (sent != answered) {
        CHECK_OK(invalidate_own()); /* so that the next epoch begins clean, answered this time */
    }
    worker_close();
}

static void verifies(void *unused)
{
    (void)unused;
    shared->checked_tokens = shared->hit_tokens = shared->documents_hit = 0;
    verifies_owned();
    verifies_space("red", "model");
    verifies_space("blue", "model");
    verifies_space("red", "other");
    verifies_space("blue", "other");
}

/* Takes all the room there is, while the scribbler of before still writes: none of it may be his.
 */
static void fills(void *unused)
{
    (void)unused;
    for (uint32_t tenant = 0; tenant < 2; tenant++) {
        open_worker(tenants[tenant], "model");
        for (uint32_t i = 0; i < FILLERS; i++) {
            struct kvkeep_sequence sequence;
            document(DOCUMENTS + 4 + i * 4, DOCUMENT_TOKENS);
            worker_open_sequence(&prompt, NULL, &sequence);
            worker_write(&sequence, &prompt, sequence.grant_first, prompt.count);
            worker_seal(&sequence, prompt.count);
            pause_us(500);
            worker_verify(&sequence, &prompt, 0, prompt.count);
            worker_close_sequence(&sequence);
        }
        worker_close();
    }
}

static void forgets_all(void *unused)
{
    (void)unused;
    worker_connect(&(struct worker_options){.target = load->target, .timeout_ms = 20000});
    for (int i = 0; i < 2; i++) {
        worker_forget_all(tenants[i]);
    }
    kvkeep_disconnect(self.client);
    self = (struct worker){0};
}

/* ---- the master ---- */

static void with_agent(const char *name, agent_task task, void *argument)
{
    struct agent agent = {.name = name};
    agent_start(&agent, name, NULL);
    agent_do(&agent, task, argument);
    agent_finish(&agent);
}

static void expect_all_free(void)
{
    struct agent observer = {.name = "observer"};
    struct look *look = &shared->look;
    uint64_t until_ms = now_ms() + 10000;
    bool free_all = false;
    with_agent("forgetter", forgets_all, NULL);
    agent_start(&observer, "observer", worker_close);
    while (!free_all) {
        agent_do(&observer, observe, look);
        free_all = nothing_is_held(look) && no_block_is_held(look);
        for (int i = 1; i <= 3; i++) {
            free_all =
                free_all && look->tiers[i].used == 0 && look->tiers[i].free == look->tiers[i].limit;
        }
        if (!free_all && now_ms() > until_ms) {
            look_print(look);
            CHECK(false, "what was forgotten is not free after 10 s");
        }
        pause_us(2000);
    }
    agent_do(&observer, observe_laws, look);
    agent_finish(&observer);
}

static void check_disk(const struct durable_daemon *durable)
{
    uint64_t bytes = durable_disk_use(durable);
    CHECK(bytes <= durable->disk_bytes, "%llu bytes on disk, limit %llu", (unsigned long long)bytes,
          (unsigned long long)durable->disk_bytes);
}

static void end_agents(struct agent *agents, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        int status = 0;
        if (agents[i].pid == 0) {
            continue;
        }
        (void)kill(agents[i].pid, SIGKILL);
        CHECK(waitpid(agents[i].pid, &status, 0) == agents[i].pid, "%s is gone", agents[i].name);
        CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) ||
                  (WIFEXITED(status) && WEXITSTATUS(status) == 0),
              "%s failed, status %x", agents[i].name, (unsigned)status);
        agent_socket_note(agents[i].socket, false);
        (void)close(agents[i].socket);
        agents[i].pid = 0;
    }
}

/* Killed before it serves, some times; then it must still start. */
static void kill_in_the_start(struct durable_daemon *durable, struct kvk_random *random)
{
    for (uint64_t i = kvk_random_between(random, 1, 3); i > 0; i--) {
        durable_spawn(durable);
        pause_us(kvk_random_below(random, 150000));
        durable_kill(durable);
    }
}

static void one_round(struct durable_daemon *durable, struct kvk_random *random)
{
    static const char *const names[WORKERS] = {"worker 0", "worker 1", "worker 2"};
    struct agent agents[WORKERS + 2] = {{.name = "owner"}, {.name = "scribbler"}};
    atomic_store(&load->going, false);
    agent_start(&agents[0], "owner", NULL);
    agent_begin(&agents[0], owns, NULL);
    agent_start(&agents[1], "scribbler", NULL);
    agent_begin(&agents[1], scribbles, NULL);
    for (uint32_t i = 0; i < WORKERS; i++) {
        agent_start(&agents[2 + i], names[i], NULL);
        agent_begin(&agents[2 + i], works, (void *)(uintptr_t)i);
    }
    pause_us(100000 + kvk_random_below(random, 700000));
    check_disk(durable);
    atomic_store(&load->going, true);
    durable_kill(durable);
    uint64_t hit_before = atomic_load(&load->sealed);
    end_agents(agents, 1);
    end_agents(agents + 2, WORKERS);

    if (kvk_random_chance(random, 0.3)) {
        kill_in_the_start(durable, random);
    }
    uint64_t start_us = durable_start(durable);
    with_agent("verifier", verifies, NULL);
    if (shared->round % FILL_EVERY == 0) {
        with_agent("filler", fills, NULL);
    }
    end_agents(agents + 1, 1); /* it wrote until now */
    with_agent("laws", observe_laws, &shared->look);
    check_disk(durable);
    (void)printf("            round %llu: started in %.0f ms, %llu of %llu documents hit, %llu "
                 "tokens verified, %llu sequences sealed so far\n",
                 (unsigned long long)shared->round, (double)start_us / 1000,
                 (unsigned long long)shared->documents_hit, (unsigned long long)4 * DOCUMENTS + 10,
                 (unsigned long long)shared->hit_tokens, (unsigned long long)hit_before);
    (void)fflush(stdout);
}

int main(int argc, char **argv)
{
    static char rest[512];
    struct durable_daemon durable;
    struct kvk_random random;
    uint64_t rounds = option_number(argc, argv, "--rounds", 20);
    uint64_t seed = option_number(argc, argv, "--seed", now_us());
    test_begin((unsigned)(120 + rounds * 20));
    shared = shared_alloc(sizeof(*shared));
    load = &shared->load;
    shared->seed = seed;
    (void)printf("            %llu rounds, --seed %llu\n", (unsigned long long)rounds,
                 (unsigned long long)seed);
    kvk_random_init(&random, seed);
    (void)snprintf(rest, sizeof(rest),
                   "[process]\ncore_dumps = yes\n[tenant red]\n[tenant blue]\n"
                   "[credential all]\nuids = %u\ntenants = red, blue\nadmin = yes\n",
                   (unsigned)getuid());
    const struct durable_setup setup = {.device_bytes = 1 * MIB,
                                        .host_bytes = 2 * MIB,
                                        .disk_bytes = 8 * MIB,
                                        .keeper = true,
                                        .rest = rest};
    durable_configure(&durable, &setup);
    memcpy(load->target, durable.daemon.target, sizeof(load->target));
    memcpy(shared->look.target, durable.daemon.target, sizeof(shared->look.target));

    phase("killed under load and while it starts");
    (void)durable_start(&durable);
    uint64_t hit_documents = 0;
    for (shared->round = 1; shared->round <= rounds; shared->round++) {
        one_round(&durable, &random);
        hit_documents += shared->documents_hit;
        if (shared->round % FORGET_EVERY == 0) {
            expect_all_free();
        }
    }
    phase("all is free at the end");
    expect_all_free();
    durable_end(&durable);
    (void)printf("            %llu sequences, %llu sealed, %llu swapped, %llu invalidations, %llu "
                 "refusals\n",
                 (unsigned long long)atomic_load(&load->began),
                 (unsigned long long)atomic_load(&load->sealed),
                 (unsigned long long)atomic_load(&load->swapped),
                 (unsigned long long)atomic_load(&shared->invalidated),
                 (unsigned long long)atomic_load(&load->refused));
    CHECK(hit_documents > rounds, "hardly anything outlived the daemon: %llu hits",
          (unsigned long long)hit_documents);
    phase("passed");
    return 0;
}
