/*
 * Workers killed in the middle of anything: all that they held is free within a second, and the
 * bytes of others are right everywhere.
 *
 * Cases C3 (begin a restore, cancel it or kill the client) and C4 (a writer dies half-way, another
 * writes the same tokens) of the field are among them.
 *
 *     test_stress_daemon_crash [--rounds N] [--restores N] [--writers N]
 */
#include "tests/daemon_look.h"

#define MIB (UINT64_C(1) << 20)

static const char tenants[] = "[tenant victim]\n[tenant neighbour]\n"
                              "[credential all]\nuids = %u\ntenants = victim, neighbour\n"
                              "admin = yes\n";

struct shared {
    char target[96];
    _Atomic bool stop;      /* to the bystanders */
    _Atomic uint64_t steps; /* of the victim, since it is in the middle of its task */
    _Atomic uint64_t rounds[2], verified_bytes[2]; /* of the bystanders */
    uint32_t token;                                /* a first token that no prompt had before */
    uint64_t restores, cancelled_restores;
    uint64_t dead_session, dead_sequence, dead_length;
    uint64_t sealed_before;
    struct look look;
};
static struct shared *shared;
static struct agent observer = {.name = "observer"};
static struct prompt prompt; /* each process's own */

static uint32_t fresh_tokens(void)
{
    shared->token += TOKENS_MAX;
    return shared->token;
}

/* ---- bystanders: they share, swap, and verify every byte ---- */

static void bystander_swap(struct kvkeep_sequence *sequence)
{
    enum kvk_status status = kvkeep_swap_out(self.session, sequence, NULL, &self.error);
    if (status == KVK_EXHAUSTED) {
        return;
    }
    CHECK_OK(status);
    worker_verify_stream(sequence, NULL, &prompt, prompt.count);
    uint64_t until_ms = now_ms() + 20000;
    while ((status = kvkeep_swap_in(self.session, sequence, NULL, &self.error)) == KVK_EXHAUSTED &&
           now_ms() < until_ms) {
        pause_us(1000);
    }
    CHECK_OK(status);
}

static void bystander_round(struct kvk_random *random, uint32_t first_token, uint64_t *bytes)
{
    struct kvkeep_sequence sequence;
    uint64_t common = 4 * kvk_random_below(random, 12);
    prompt_set(&prompt, first_token + 1000 * (uint32_t)kvk_random_below(random, 6), common);
    for (uint64_t i = kvk_random_between(random, 1, 60); i > 0; i--) {
        prompt_add(&prompt, (uint32_t)kvk_random_below(random, 3));
    }
    worker_open_sequence(&prompt, NULL, &sequence);
    worker_verify(&sequence, &prompt, 0, sequence.cached_tokens);
    worker_write(&sequence, &prompt, sequence.grant_first, prompt.count);
    worker_seal(&sequence, prompt.count);
    if (kvk_random_chance(random, 0.3)) {
        bystander_swap(&sequence);
    }
    worker_verify(&sequence, &prompt, 0, prompt.count);
    *bytes += (sequence.cached_tokens + prompt.count) * (BLOCK_BYTES / BLOCK_TOKENS);
    worker_close_sequence(&sequence);
}

static void bystander(uint32_t number, const char *tenant, const char *name)
{
    struct kvk_random random;
    kvk_random_init(&random, number + 1);
    if (self.client == NULL) {
        worker_open(&(struct worker_options){
            .target = shared->target, .tenant = tenant, .model = "model", .name = name});
    }
    while (!atomic_load(&shared->stop)) {
        uint64_t bytes = 0;
        bystander_round(&random, 4000000000u, &bytes);
        atomic_fetch_add(&shared->rounds[number], 1);
        atomic_fetch_add(&shared->verified_bytes[number], bytes);
    }
}

static void neighbour(void *unused)
{
    (void)unused;
    bystander(0, "neighbour", "keep-neighbour");
}

static void sibling(void *unused)
{
    (void)unused;
    bystander(1, "victim", "keep-sibling");
}

static void bystander_stop(struct agent *agent, uint32_t number)
{
    atomic_store(&shared->stop, true);
    agent_end(agent);
    agent_finish(agent);
    atomic_store(&shared->stop, false);
    (void)printf("            %s: %llu rounds, %llu MiB verified\n", agent->name,
                 (unsigned long long)atomic_load(&shared->rounds[number]),
                 (unsigned long long)(atomic_load(&shared->verified_bytes[number]) >> 20));
    CHECK(atomic_load(&shared->rounds[number]) > 0, "the bystander did nothing");
}

/* ---- victims: each goes on until it is killed ---- */

static void victim_open(void)
{
    worker_open(&(struct worker_options){
        .target = shared->target, .tenant = "victim", .model = "model", .name = "victim"});
    prompt_set(&prompt, fresh_tokens(), 256);
}

static void step(void)
{
    atomic_fetch_add(&shared->steps, 1);
}

static void victim_writes_mapped(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    victim_open();
    worker_open_sequence(&prompt, NULL, &sequence);
    for (;;) {
        worker_write(&sequence, &prompt, 0, prompt.count);
        step();
    }
}

static void victim_writes_stream(void *unused)
{
    (void)unused;
    enum { BLOCKS = 512 };
    static uint8_t bytes[BLOCKS * BLOCK_BYTES];
    static struct kvkeep_piece pieces[BLOCKS];
    struct kvkeep_sequence sequence;
    victim_open();
    prompt_set(&prompt, fresh_tokens(), BLOCKS * BLOCK_TOKENS);
    worker_open_sequence(&prompt, NULL, &sequence);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        pieces[i] = (struct kvkeep_piece){
            .block = i, .data = bytes + i * BLOCK_BYTES, .size_bytes = BLOCK_BYTES};
    }
    for (;;) {
        step();
        CHECK_OK(kvkeep_write(self.session, &sequence, pieces, BLOCKS, &self.error));
    }
}

static void victim_reads_stream(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    victim_open();
    prompt_set(&prompt, fresh_tokens(), 4096);
    worker_fill(&prompt, NULL, &sequence);
    for (;;) {
        step();
        worker_verify_stream(&sequence, NULL, &prompt, prompt.count);
    }
}

static void victim_swaps(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    victim_open();
    prompt_set(&prompt, fresh_tokens(), 257); /* 64 blocks and a tail */
    worker_fill(&prompt, NULL, &sequence);
    for (;;) {
        step();
        CHECK_OK(kvkeep_swap_out(self.session, &sequence, NULL, &self.error));
        CHECK_OK(kvkeep_swap_in(self.session, &sequence, NULL, &self.error));
        worker_verify(&sequence, &prompt, 0, prompt.count);
    }
}

static void victim_attends(void *unused)
{
    (void)unused;
    enum { QUERIES = 16, HEADS = 4 };
    static uint16_t queries[QUERIES * HEADS * HEAD_SIZE]; /* bf16 zeros */
    static float output[QUERIES * HEADS * HEAD_SIZE];
    static float lse[QUERIES * HEADS];
    struct kvkeep_sequence sequence;
    victim_open();
    prompt_set(&prompt, fresh_tokens(), 16384);
    worker_fill(&prompt, NULL, &sequence);
    const struct kvkeep_attend attend = {.query_heads = HEADS,
                                         .head_size_k = HEAD_SIZE,
                                         .head_size_v = HEAD_SIZE,
                                         .format = KVK_FORMAT_BF16,
                                         .scale = 0.1f,
                                         .causal = true};
    for (;;) {
        struct kvkeep_attend_item item = {.sequence = &sequence,
                                          .position = prompt.count - QUERIES,
                                          .query_count = QUERIES,
                                          .queries = queries,
                                          .output = output,
                                          .lse = lse};
        step();
        CHECK_OK(kvkeep_attend(self.session, &attend, &item, 1, &self.error));
    }
}

/* The device is full of what nobody holds; to open the next it must be moved first. */
static void victim_waits_for_room(void *unused)
{
    (void)unused;
    victim_open();
    for (uint64_t i = 0;; i++) {
        struct kvkeep_sequence sequence;
        prompt_set(&prompt, fresh_tokens(), 8192);
        if (i >= 4) {
            step();
        }
        worker_open_sequence(&prompt, NULL, &sequence);
        worker_seal(&sequence, prompt.count);
        worker_close_sequence(&sequence);
    }
}

/* The raw call: libkvkeep has none for tickets. */
static void transfer_begin(uint64_t sequence_id, uint64_t lease_id, bool write)
{
    Kvkeep__V1__BeginTransferRequest request = KVKEEP__V1__BEGIN_TRANSFER_REQUEST__INIT;
    Kvkeep__V1__BeginTransferResponse *response = NULL;
    request.session_id = kvkeep_session_id(self.session);
    request.sequence_id = sequence_id;
    request.lease_id = lease_id;
    request.write = write;
    request.block_count = 2;
    CHECK_OK(worker_call(KVKEEP_METHOD("BeginTransfer"), &request.base,
                         &kvkeep__v1__begin_transfer_response__descriptor, &response));
    message_free(response);
}

static void victim_holds(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    struct kvkeep_sequence forks[3];
    struct kvkeep_sequence granted;
    struct kvkeep_sequence swapped;
    struct kvkeep_lease leases[3];
    victim_open();
    prompt_set(&prompt, fresh_tokens(), 254); /* a tail of 2 for the forks to share */
    worker_fill(&prompt, &(struct kvkeep_open_options){.growth_tokens = 500}, &sequence);
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(kvkeep_fork(self.session, &sequence, 3, forks, &self.error));
    CHECK_OK(kvkeep_append(self.session, &forks[0], prompt.tokens, 9, true, &self.error));
    CHECK_OK(kvkeep_append(self.session, &forks[1], prompt.tokens, 1, false, &self.error));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(
            kvkeep_pin(self.session, &self.space, &view, 60000, i == 1, &leases[i], &self.error));
    }
    transfer_begin(sequence.id, 0, false);
    transfer_begin(0, leases[0].id, false);
    transfer_begin(0, leases[1].id, false);
    prompt_set(&prompt, fresh_tokens(), 30);
    worker_open_sequence(&prompt, NULL, &granted);
    transfer_begin(granted.id, 0, true);
    prompt_set(&prompt, fresh_tokens(), 33);
    worker_fill(&prompt, NULL, &swapped);
    CHECK_OK(kvkeep_swap_out(self.session, &swapped, NULL, &self.error));
    step();
    for (;;) {
        (void)pause();
    }
}

static void victim_comes_and_goes(void *unused)
{
    (void)unused;
    victim_open();
    step();
    for (;;) {
        struct kvkeep_sequence sequence;
        prompt_set(&prompt, fresh_tokens(), 40);
        worker_open_sequence(&prompt, NULL, &sequence);
        worker_write(&sequence, &prompt, 0, 20);
        kvkeep_unmap(&self.maps[KVKEEP_TIER_DEVICE]);
        kvkeep_session_close(self.session);
        worker_open_session(&(struct worker_options){.tenant = "victim", .name = "victim"});
    }
}

/* ---- killing them ---- */

static void wait_for_steps(const struct agent *agent)
{
    uint64_t until_ms = now_ms() + 60000;
    while (atomic_load(&shared->steps) == 0) {
        int status = 0;
        CHECK(waitpid(agent->pid, &status, WNOHANG) == 0, "%s failed", agent->name);
        CHECK(now_ms() < until_ms, "%s does not get to the middle of its task", agent->name);
        pause_us(200);
    }
}

/* Begin the task, kill its process some time in its middle; answers when. */
static uint64_t kill_in_the_middle(const char *name, agent_task task, uint64_t after_us)
{
    struct agent agent = {.name = name};
    atomic_store(&shared->steps, 0);
    agent_start(&agent, name, NULL);
    agent_begin(&agent, task, NULL);
    wait_for_steps(&agent);
    pause_us(after_us);
    agent_kill(&agent);
    return now_us();
}

struct crash {
    const char *name;
    agent_task task;
    uint64_t copy_delay_us;
    uint64_t within_us; /* the kill comes at a random time within it */
};

static const struct crash crashes[] = {
    {"killed while writing mapped memory", victim_writes_mapped, 0, 5000},
    {"killed in WriteBlocks", victim_writes_stream, 0, 20000},
    {"killed in ReadBlocks", victim_reads_stream, 0, 20000},
    {"killed in SwapOut and SwapIn", victim_swaps, 1000, 200000},
    {"killed in Attend", victim_attends, 0, 100000},
    {"killed in OpenSequence, waiting for room", victim_waits_for_room, 200, 300000},
    {"killed with leases, transfers, forks, drafts", victim_holds, 0, 1000},
    {"killed between sessions", victim_comes_and_goes, 0, 50000},
};

static void crash_all(uint64_t rounds)
{
    struct kvk_random random;
    kvk_random_init(&random, 7);
    for (size_t i = 0; i < sizeof(crashes) / sizeof(crashes[0]); i++) {
        const struct crash *crash = &crashes[i];
        uint64_t longest_us = 0;
        phase(crash->name);
        copies_take(&observer, &shared->look, crash->copy_delay_us);
        for (uint64_t round = 0; round < rounds; round++) {
            uint64_t killed_us = kill_in_the_middle(crash->name, crash->task,
                                                    kvk_random_below(&random, crash->within_us));
            uint64_t took_us = expect_free(&observer, &shared->look, false, killed_us);
            longest_us = took_us > longest_us ? took_us : longest_us;
        }
        (void)printf("            %llu times; free after at most %.1f ms\n",
                     (unsigned long long)rounds, (double)longest_us / 1000);
    }
    copies_take(&observer, &shared->look, 0);
}

/* ---- C4: a writer dies half-way ---- */

static void writer_dies(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    victim_open();
    prompt_set(&prompt, shared->token, 32);
    worker_open_sequence(&prompt, NULL, &sequence);
    worker_write(&sequence, &prompt, 0, 16);
    if (shared->sealed_before > 0) {
        worker_seal(&sequence, shared->sealed_before);
        worker_write(&sequence, &prompt, sequence.grant_first, 18);
    }
    shared->dead_session = kvkeep_session_id(self.session);
    shared->dead_sequence = sequence.id;
    shared->dead_length = sequence.length;
    step();
    for (;;) {
        (void)pause();
    }
}

static enum kvk_status late_seal(uint64_t session_id)
{
    Kvkeep__V1__SealRequest request = KVKEEP__V1__SEAL_REQUEST__INIT;
    Kvkeep__V1__SealResponse *response = NULL;
    request.session_id = session_id;
    request.sequence_id = shared->dead_sequence;
    request.expected_length = shared->dead_length;
    request.length = shared->dead_length;
    enum kvk_status status = worker_call(KVKEEP_METHOD("Seal"), &request.base,
                                         &kvkeep__v1__seal_response__descriptor, &response);
    if (status == KVK_OK) {
        message_free(response);
    }
    return status;
}

static void successor_opens(void *unused)
{
    (void)unused;
    worker_open(&(struct worker_options){
        .target = shared->target, .tenant = "victim", .model = "model", .name = "keep-successor"});
}

/* At once: no waiting until the daemon has seen the other's end. */
static void successor_writes(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    prompt_set(&prompt, shared->token, 32);
    CHECK_OK(worker_try_open(&prompt, NULL, &sequence));
    CHECK(sequence.cached_tokens == shared->sealed_before, "%llu tokens were cached",
          (unsigned long long)sequence.cached_tokens);
    worker_write(&sequence, &prompt, sequence.grant_first, 32);
    worker_seal(&sequence, 32);
    worker_verify(&sequence, &prompt, 0, 32);
    worker_close_sequence(&sequence);
    CHECK(worker_hit(&prompt) == 32, "what was sealed is not found");
}

static void successor_replays(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    enum kvk_status status = late_seal(shared->dead_session);
    CHECK(status == KVK_NOT_FOUND && self.error.cause == KVK_CAUSE_SESSION_ENDED,
          "a dead one's seal: %s, cause %s", kvk_status_name(status),
          kvk_cause_name(self.error.cause));
    status = late_seal(kvkeep_session_id(self.session));
    CHECK(status == KVK_NOT_FOUND, "a dead one's seal by another session: %s",
          kvk_status_name(status));
    prompt_set(&prompt, shared->token, 32);
    CHECK_OK(worker_try_open(&prompt, NULL, &sequence));
    CHECK(sequence.cached_tokens == 32, "%llu tokens are cached",
          (unsigned long long)sequence.cached_tokens);
    worker_verify(&sequence, &prompt, 0, 32);
    worker_close_sequence(&sequence);
}

static void case_c4(uint64_t rounds)
{
    struct agent successor = {.name = "successor"};
    uint64_t longest_us = 0;
    phase("C4: a writer dies half-way, another writes the same tokens");
    agent_start(&successor, "successor", worker_close);
    agent_do(&successor, successor_opens, NULL);
    for (uint64_t round = 0; round < rounds; round++) {
        shared->sealed_before = round % 2 == 0 ? 0 : 12;
        uint64_t killed_us = kill_in_the_middle("writer", writer_dies, 0);
        agent_do(&successor, successor_writes, NULL);
        uint64_t took_us = expect_free(&observer, &shared->look, false, killed_us);
        longest_us = took_us > longest_us ? took_us : longest_us;
        agent_do(&successor, successor_replays, NULL);
    }
    agent_finish(&successor);
    (void)printf("            %llu times; free after at most %.1f ms\n", (unsigned long long)rounds,
                 (double)longest_us / 1000);
}

/* ---- C3: a restore that is cancelled, or whose client is killed ---- */

enum { RESTORE_TOKENS = 61 }; /* 15 blocks and a tail */

/* Begin the call and cancel it: a unary call is a stream of one message. */
static void swap_in_cancelled(const struct kvkeep_sequence *sequence, uint64_t after_us)
{
    struct kvkeep_stream *stream = NULL;
    Kvkeep__V1__SwapInRequest request = KVKEEP__V1__SWAP_IN_REQUEST__INIT;
    request.session_id = kvkeep_session_id(self.session);
    request.sequence_id = sequence->id;
    CHECK_OK(
        kvkeep_stream_open(self.client->calls, KVKEEP_METHOD("SwapIn"), 0, &stream, &self.error));
    CHECK(kvkeep_stream_send(stream, &request.base) && kvkeep_stream_half_close(stream),
          "SwapIn could not be begun");
    pause_us(after_us);
    kvkeep_stream_cancel(stream);
    enum kvk_status status = kvkeep_stream_finish(stream, &self.error);
    CHECK(status == KVK_CANCELLED || status == KVK_OK || status == KVK_EXHAUSTED, "SwapIn: %s",
          kvk_status_name(status));
    shared->cancelled_restores += status == KVK_CANCELLED ? 1 : 0;
}

static void swap_until(enum kvk_status (*swap)(struct kvkeep_session *, struct kvkeep_sequence *,
                                               struct kvkeep_swap *, struct kvk_error *),
                       struct kvkeep_sequence *sequence)
{
    uint64_t until_ms = now_ms() + 20000;
    enum kvk_status status;
    while ((status = swap(self.session, sequence, NULL, &self.error)) == KVK_EXHAUSTED &&
           now_ms() < until_ms) {
        pause_us(500);
    }
    CHECK_OK(status);
}

static void restores_cancelled(void *unused)
{
    (void)unused;
    struct kvk_random random;
    struct kvkeep_sequence sequence;
    kvk_random_init(&random, 3);
    victim_open();
    prompt_set(&prompt, fresh_tokens(), RESTORE_TOKENS);
    worker_fill(&prompt, NULL, &sequence);
    for (uint64_t round = 0; round < shared->restores; round++) {
        swap_until(kvkeep_swap_out, &sequence);
        swap_in_cancelled(&sequence, kvk_random_below(&random, 12000));
        swap_until(kvkeep_swap_in, &sequence);
        worker_verify(&sequence, &prompt, 0, prompt.count);
    }
    worker_close_sequence(&sequence);
    worker_close();
}

static void restore_to_be_killed(void *unused)
{
    (void)unused;
    struct kvkeep_sequence sequence;
    victim_open();
    prompt_set(&prompt, fresh_tokens(), RESTORE_TOKENS);
    worker_fill(&prompt, NULL, &sequence);
    swap_until(kvkeep_swap_out, &sequence);
    step();
    for (;;) {
        swap_until(kvkeep_swap_in, &sequence);
        swap_until(kvkeep_swap_out, &sequence);
    }
}

static void expect_all_free(const char *const *names, uint32_t count)
{
    uint64_t until_ms = now_ms() + promised_ms(5000);
    struct look *look = &shared->look;
    for (uint32_t i = 0; i < count; i++) {
        (void)snprintf(look->tenant, sizeof(look->tenant), "%s", names[i]);
        (void)expect_free(&observer, look, false, now_us());
        agent_do(&observer, forget_tenant, look);
    }
    look->tenant[0] = '\0';
    do {
        CHECK(now_ms() < until_ms, "what nobody holds any more is not freed");
        agent_do(&observer, observe, look);
    } while (look->tiers[1].used != 0 || look->tiers[2].used != 0);
    for (int i = 1; i < 3; i++) {
        const struct tier_look *tier = &look->tiers[i];
        CHECK(tier->free == tier->limit && tier->quarantine == 0 && tier->growth == 0,
              "tier %d is not all free", i);
    }
}

static void case_c3(uint64_t restores)
{
    struct agent writers[2] = {{.name = "neighbour"}, {.name = "sibling"}};
    struct agent canceller = {.name = "canceller"};
    struct kvk_random random;
    uint64_t longest_us = 0;
    kvk_random_init(&random, 9);
    phase("C3: restores cancelled, while others write");
    copies_take(&observer, &shared->look, 500);
    agent_start(&writers[0], "neighbour", worker_close);
    agent_start(&writers[1], "sibling", worker_close);
    agent_begin(&writers[0], neighbour, NULL);
    agent_begin(&writers[1], sibling, NULL);
    shared->restores = restores / 2;
    agent_start(&canceller, "canceller", NULL);
    agent_do(&canceller, restores_cancelled, NULL);
    agent_finish(&canceller);
    (void)printf("            %llu begun, %llu of them cancelled\n",
                 (unsigned long long)shared->restores,
                 (unsigned long long)shared->cancelled_restores);
    CHECK(shared->cancelled_restores > 0, "no restore was cancelled");

    phase("C3: clients killed in restores, while others write");
    for (uint64_t round = 0; round < restores - restores / 2; round++) {
        uint64_t killed_us =
            kill_in_the_middle("restorer", restore_to_be_killed, kvk_random_below(&random, 12000));
        uint64_t took_us = expect_free(&observer, &shared->look, true, killed_us);
        longest_us = took_us > longest_us ? took_us : longest_us;
    }
    (void)printf("            free after at most %.1f ms\n", (double)longest_us / 1000);
    bystander_stop(&writers[0], 0);
    bystander_stop(&writers[1], 1);
    copies_take(&observer, &shared->look, 0);
}

/* ---- all of it ---- */

static void begin(struct daemon *daemon, uint64_t device_bytes, uint64_t host_bytes)
{
    char rest[256];
    (void)snprintf(rest, sizeof(rest), tenants, (unsigned)getuid());
    const struct daemon_setup setup = {
        .device_bytes = device_bytes, .host_bytes = host_bytes, .rest = rest};
    daemon_start(daemon, &setup);
    memcpy(shared->target, daemon->target, sizeof(shared->target));
    shared->look = (struct look){.tenant = "victim"};
    memcpy(shared->look.target, daemon->target, sizeof(shared->look.target));
    agent_start(&observer, "observer", worker_close);
}

static void end(struct daemon *daemon)
{
    static const char *const names[] = {"victim", "neighbour"};
    phase("all is free at the end");
    expect_all_free(names, 2);
    agent_finish(&observer);
    daemon_stop(daemon);
}

int main(int argc, char **argv)
{
    struct daemon daemon;
    uint64_t rounds = option_number(argc, argv, "--rounds", 4);
    uint64_t restores = option_number(argc, argv, "--restores", 60);
    uint64_t writers = option_number(argc, argv, "--writers", 10);
    test_begin((unsigned)(240 + 8 * rounds * 8 + restores + writers));
    shared = shared_alloc(sizeof(*shared));

    struct agent bystander_agent = {.name = "neighbour"};
    begin(&daemon, 32 * MIB, 32 * MIB);
    agent_start(&bystander_agent, "neighbour", worker_close);
    agent_begin(&bystander_agent, neighbour, NULL);
    crash_all(rounds);
    case_c4(writers);
    bystander_stop(&bystander_agent, 0);
    end(&daemon);

    begin(&daemon, 1 * MIB, 2 * MIB);
    case_c3(restores);
    end(&daemon);
    phase("passed");
    return 0;
}
