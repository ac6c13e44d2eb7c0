/*
 * Eight processes as tensor-parallel ranks of one instance: each writes and reads its own shard,
 * byte for byte, and a hit is a hit for all of them.
 *
 * Case I1 of the field (ranks that found different hit lengths), a rank killed in mid-save, which
 * leaves no visible half block, one that takes its place, and a latent cache, stored once for all.
 *
 *     test_stress_daemon_ranks [--rounds N]
 */
#include "tests/daemon_look.h"

#define MIB (UINT64_C(1) << 20)

enum { RANKS = 8, VICTIM = 5, SAVE_TOKENS = 160 };

struct rank_order {
    uint32_t rank;
    uint64_t first, end; /* tokens to write, or to verify */
    uint64_t seal;       /* then seal up to here; 0: do not */
    uint64_t hit;        /* answered by looks_up() */
    uint64_t length;     /* answered by refreshes() */
    uint32_t slots[64];  /* answered by pins() */
    uint64_t pinned;
    const char *hash_seed;
};

struct shared {
    char target[96];
    uint8_t token[16]; /* of the instance */
    uint64_t sequence_id;
    uint32_t first_token;
    uint64_t prompt_tokens;
    uint32_t tensor_shards;
    bool latent;
    char model[32];
    uint64_t latent_block_bytes;
    _Atomic uint64_t steps;
    _Atomic uint32_t rank_notices[RANKS]; /* [receiver]: times that it was told of a rank's end */
    _Atomic uint64_t told_rank;
    struct rank_order orders[2 * RANKS];
    struct look look;
};
static struct shared *shared;
static struct agent observer = {.name = "observer"};
static struct agent ranks[2 * RANKS];
static struct prompt prompt;            /* each process's own */
static struct kvkeep_sequence sequence; /* as this process sees it */

/* ---- tasks of the ranks ---- */

static void on_notice(void *context, enum kvkeep_notice notice, uint64_t value)
{
    (void)context;
    if (notice == KVKEEP_NOTICE_RANK_ENDED) {
        atomic_store(&shared->told_rank, value);
        atomic_fetch_add(&shared->rank_notices[self.rank], 1);
    }
}

static void joins(void *told)
{
    const struct rank_order *order = told;
    bool leads = order->rank == 0;
    if (order->hash_seed != NULL) {
        CHECK(setenv("PYTHONHASHSEED", order->hash_seed, 1) == 0, "setenv");
        CHECK(setenv("MALLOC_PERTURB_", order->hash_seed, 1) == 0, "setenv");
    }
    worker_open(&(struct worker_options){.target = shared->target,
                                         .tenant = "default",
                                         .model = shared->model,
                                         .name = "engine",
                                         .instance_token = leads ? NULL : shared->token,
                                         .tensor_shards = shared->tensor_shards,
                                         .rank = order->rank,
                                         .latent = shared->latent,
                                         .on_notice = on_notice});
    if (leads) {
        memcpy(shared->token, kvkeep_session_token(self.session), sizeof(shared->token));
    }
}

static void opens_sequence(void *told)
{
    (void)told;
    prompt_set(&prompt, shared->first_token, shared->prompt_tokens);
    worker_open_sequence(&prompt, NULL, &sequence);
    shared->sequence_id = sequence.id;
}

/* The sequence that the leader opened, through this rank's own session. */
static void refresh(void)
{
    prompt_set(&prompt, shared->first_token, shared->prompt_tokens);
    sequence.id = shared->sequence_id;
    sequence.space = &self.space;
    CHECK_OK(kvkeep_sequence_refresh(self.session, &sequence, &self.error));
}

static void refreshes(void *told)
{
    struct rank_order *order = told;
    refresh();
    order->length = sequence.length;
    CHECK(sequence.sealed_tokens == sequence.length, "%llu of %llu are sealed",
          (unsigned long long)sequence.sealed_tokens, (unsigned long long)sequence.length);
}

static void writes(void *told)
{
    const struct rank_order *order = told;
    refresh();
    worker_write(&sequence, &prompt, order->first, order->end);
    if (order->seal > 0) {
        worker_seal(&sequence, order->seal);
    }
}

static void verifies(void *told)
{
    const struct rank_order *order = told;
    refresh();
    worker_verify(&sequence, &prompt, order->first, order->end);
    worker_verify_stream(&sequence, NULL, &prompt, order->end);
}

static void looks_up(void *told)
{
    struct rank_order *order = told;
    prompt_set(&prompt, shared->first_token, shared->prompt_tokens);
    order->hit = worker_hit(&prompt);
}

static void pins(void *told)
{
    struct rank_order *order = told;
    struct kvkeep_lease lease;
    prompt_set(&prompt, shared->first_token, shared->prompt_tokens);
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 60000, true, &lease, &self.error));
    order->pinned = lease.cached_tokens;
    CHECK(lease.groups[0].count <= 64, "too many blocks");
    memcpy(order->slots, lease.groups[0].slots, lease.groups[0].count * sizeof(uint32_t));
    worker_verify_stream(NULL, &lease, &prompt, lease.cached_tokens);
    CHECK_OK(kvkeep_release(self.session, &lease, &self.error));
}

static void closes_sequence(void *told)
{
    (void)told;
    worker_close_sequence(&sequence);
}

/* Save block by block, until killed. */
static void saves(void *told)
{
    const struct rank_order *order = told;
    refresh();
    for (uint64_t at = order->first; at < order->end; at += BLOCK_TOKENS) {
        worker_write(&sequence, &prompt, at, at + 2);
        atomic_fetch_add(&shared->steps, 1);
        pause_us(500); /* as long as a model's layer takes */
        worker_write(&sequence, &prompt, at + 2, at + BLOCK_TOKENS);
        worker_seal(&sequence, at + BLOCK_TOKENS);
    }
    for (;;) {
        (void)pause();
    }
}

static void counts_latent_bytes(void *told)
{
    (void)told;
    Kvkeep__V1__GetOccupancyRequest request = KVKEEP__V1__GET_OCCUPANCY_REQUEST__INIT;
    Kvkeep__V1__GetOccupancyResponse *response = NULL;
    CHECK_OK(worker_call(ADMIN_METHOD("GetOccupancy"), &request.base,
                         &kvkeep__v1__get_occupancy_response__descriptor, &response));
    for (size_t i = 0; i < response->n_rows; i++) {
        const Kvkeep__V1__OccupancyRow *row = response->rows[i];
        if (row->space_id == self.space.id) {
            CHECK(row->device_bytes == row->device_blocks * row->block_bytes, "%llu bytes",
                  (unsigned long long)row->device_bytes);
            shared->latent_block_bytes = row->block_bytes;
        }
    }
    message_free(response);
}

/* ---- the master ---- */

static void ranks_start(uint32_t first, uint32_t count, const char *model, bool latent)
{
    shared->tensor_shards = count;
    shared->latent = latent;
    (void)snprintf(shared->model, sizeof(shared->model), "%s", model);
    for (uint32_t i = 0; i < count; i++) {
        shared->orders[first + i] = (struct rank_order){.rank = i};
        agent_start(&ranks[first + i], "rank", worker_close);
        agent_do(&ranks[first + i], joins, &shared->orders[first + i]); /* the leader first */
    }
}

static void ranks_finish(uint32_t first, uint32_t count)
{
    for (uint32_t i = count; i > 0; i--) {
        agent_finish(&ranks[first + i - 1]);
    }
}

/* All at once. */
static void ranks_do(uint32_t first, uint32_t count, agent_task task)
{
    for (uint32_t i = first; i < first + count; i++) {
        agent_begin(&ranks[i], task, &shared->orders[i]);
    }
    for (uint32_t i = first; i < first + count; i++) {
        agent_end(&ranks[i]);
    }
}

static void order_range(uint32_t first, uint32_t count, uint64_t begin, uint64_t end, uint64_t seal)
{
    for (uint32_t i = first; i < first + count; i++) {
        shared->orders[i].first = begin;
        shared->orders[i].end = end;
        shared->orders[i].seal = seal;
    }
}

static void sequence_begin(struct agent *leader, uint64_t tokens)
{
    shared->first_token += TOKENS_MAX;
    shared->prompt_tokens = tokens;
    agent_do(leader, opens_sequence, NULL);
}

static void expect_hit(uint32_t first, uint32_t count, uint64_t hit)
{
    ranks_do(first, count, looks_up);
    for (uint32_t i = first; i < first + count; i++) {
        CHECK(shared->orders[i].hit == hit, "rank %u hits %llu tokens, not %llu",
              shared->orders[i].rank, (unsigned long long)shared->orders[i].hit,
              (unsigned long long)hit);
    }
}

static void eight_ranks(void)
{
    phase("eight ranks write their shards at once");
    ranks_start(0, RANKS, "model", false);
    sequence_begin(&ranks[0], 26); /* six blocks and a tail */
    order_range(0, RANKS, 0, 26, 26);
    for (uint32_t i = 1; i < RANKS; i++) {
        agent_begin(&ranks[i], writes, &shared->orders[i]);
    }
    for (uint32_t i = 1; i < RANKS; i++) {
        agent_end(&ranks[i]);
    }
    expect_hit(0, RANKS, 0); /* the shard of rank 0 is missing */
    agent_do(&ranks[0], writes, &shared->orders[0]);
    expect_hit(0, RANKS, 24);
    ranks_do(0, RANKS, verifies);

    phase("eight ranks of another engine hit them");
    uint8_t token[16];
    memcpy(token, shared->token, sizeof(token));
    ranks_start(RANKS, RANKS, "model", false);
    memcpy(shared->token, token, sizeof(token)); /* who joins later joins the first */
    agent_do(&ranks[RANKS], opens_sequence, NULL);
    order_range(RANKS, RANKS, 0, 24, 0);
    ranks_do(RANKS, RANKS, verifies);
    agent_do(&ranks[RANKS], closes_sequence, NULL);
    agent_do(&ranks[0], closes_sequence, NULL);
    ranks_finish(RANKS, RANKS);
}

/* ---- a rank is killed in mid-save ---- */

static void wait_for_step(const struct agent *agent, uint64_t steps)
{
    uint64_t until_ms = now_ms() + 30000;
    while (atomic_load(&shared->steps) < steps) {
        int status = 0;
        CHECK(waitpid(agent->pid, &status, WNOHANG) == 0, "%s failed", agent->name);
        CHECK(now_ms() < until_ms, "%s does not get on", agent->name);
        pause_us(50);
    }
}

static void expect_notices(uint32_t round)
{
    uint64_t until_ms = now_ms() + PATIENCE_MS / 4;
    for (uint32_t i = 0; i < RANKS; i++) {
        while (i != VICTIM && atomic_load(&shared->rank_notices[i]) < round) {
            CHECK(now_ms() < until_ms, "rank %u was not told of the other's end", i);
            pause_us(1000);
        }
    }
    CHECK(atomic_load(&shared->told_rank) == VICTIM, "told of another rank's end");
}

/* Cut back to what all have sealed, and nothing else of the sequence is left: within a second. */
static uint64_t expect_cut(uint64_t since_us)
{
    struct look *look = &shared->look;
    for (;;) {
        uint64_t asked_us = now_us();
        agent_do(&observer, observe, look);
        if (look->sessions == RANKS - 1 && look->reserved == 0 && look->active == 0 &&
            look->tiers[1].quarantine == 0) {
            return asked_us > since_us ? asked_us - since_us : 0;
        }
        if (asked_us - since_us > promised_ms(1000) * 1000) {
            look_print(look);
            CHECK(false, "not cut back within a second");
        }
        pause_us(2000);
    }
}

/* Answers how many tokens all ranks had sealed. */
static uint64_t killed_in_mid_save(struct kvk_random *random, uint64_t *longest_us)
{
    sequence_begin(&ranks[0], SAVE_TOKENS);
    order_range(0, RANKS, 0, SAVE_TOKENS, SAVE_TOKENS);
    atomic_store(&shared->steps, 0);
    agent_begin(&ranks[VICTIM], saves, &shared->orders[VICTIM]);
    for (uint32_t i = 0; i < RANKS; i++) {
        if (i != VICTIM) {
            agent_do(&ranks[i], writes, &shared->orders[i]);
            if (i == 0) {
                wait_for_step(&ranks[VICTIM], 2);
            }
        }
    }
    wait_for_step(&ranks[VICTIM], 1 + kvk_random_below(random, SAVE_TOKENS / BLOCK_TOKENS));
    agent_kill(&ranks[VICTIM]);
    uint64_t took_us = expect_cut(now_us());
    *longest_us = took_us > *longest_us ? took_us : *longest_us;
    agent_do(&ranks[0], refreshes, &shared->orders[0]);
    return shared->orders[0].length;
}

static void mid_save(uint64_t rounds)
{
    struct kvk_random random;
    uint64_t longest_us = 0;
    kvk_random_init(&random, 5);
    phase("a rank is killed in mid-save, another takes its place");
    for (uint32_t round = 1; round <= rounds; round++) {
        uint64_t sealed = killed_in_mid_save(&random, &longest_us);
        expect_notices(round);
        CHECK(sealed % BLOCK_TOKENS == 0 && sealed <= SAVE_TOKENS, "%llu tokens are left",
              (unsigned long long)sealed);
        agent_start(&ranks[VICTIM], "rank", worker_close);
        agent_do(&ranks[VICTIM], joins, &shared->orders[VICTIM]);
        expect_hit(0, RANKS, sealed);
        if (sealed > 0) {
            order_range(0, RANKS, 0, sealed, 0);
            ranks_do(0, RANKS, verifies);
        }
        agent_do(&ranks[0], closes_sequence, NULL);

        /* The same prompt again, with all ranks: what was cut off is written anew. */
        agent_do(&ranks[0], opens_sequence, NULL);
        order_range(0, RANKS, sealed, SAVE_TOKENS, SAVE_TOKENS);
        ranks_do(0, RANKS, writes);
        expect_hit(0, RANKS, SAVE_TOKENS);
        order_range(0, RANKS, 0, SAVE_TOKENS, 0);
        ranks_do(0, RANKS, verifies);
        agent_do(&ranks[0], closes_sequence, NULL);
    }
    ranks_finish(0, RANKS);
    (void)printf("            %llu times; cut back after at most %.1f ms\n",
                 (unsigned long long)rounds, (double)longest_us / 1000);
    (void)expect_free(&observer, &shared->look, false, now_us());
}

/* ---- I1 ---- */

static void case_i1(void)
{
    phase("I1: six blocks of one shard, four of the other");
    shared->tensor_shards = 2;
    shared->latent = false;
    (void)snprintf(shared->model, sizeof(shared->model), "two ranks");
    for (uint32_t i = 0; i < 2; i++) {
        shared->orders[i] = (struct rank_order){.rank = i, .hash_seed = i == 0 ? "1" : "4242"};
        agent_start(&ranks[i], "rank", worker_close);
        agent_do(&ranks[i], joins, &shared->orders[i]);
    }
    sequence_begin(&ranks[0], 24);
    order_range(0, 1, 0, 24, 24);
    order_range(1, 1, 0, 16, 16);
    ranks_do(0, 2, writes);
    expect_hit(0, 2, 16);
    ranks_do(0, 2, pins);
    CHECK(shared->orders[0].pinned == 16 && shared->orders[1].pinned == 16, "pinned %llu and %llu",
          (unsigned long long)shared->orders[0].pinned,
          (unsigned long long)shared->orders[1].pinned);
    CHECK(memcmp(shared->orders[0].slots, shared->orders[1].slots, 4 * sizeof(uint32_t)) == 0,
          "the two find other blocks");
    ranks_finish(0, 2);
    (void)expect_free(&observer, &shared->look, false, now_us());
}

/* ---- latent ---- */

static void latent_once(void)
{
    phase("a latent cache, stored once for eight ranks");
    ranks_start(0, RANKS, "latent", true);
    sequence_begin(&ranks[0], 26);
    order_range(1, RANKS - 1, 0, 0, 26); /* nothing to write: it is the leader's */
    ranks_do(1, RANKS - 1, writes);
    expect_hit(0, RANKS, 0);
    order_range(0, 1, 0, 26, 26);
    agent_do(&ranks[0], writes, &shared->orders[0]);
    expect_hit(0, RANKS, 24);
    order_range(0, RANKS, 0, 26, 0);
    ranks_do(0, RANKS, verifies);
    agent_do(&ranks[0], counts_latent_bytes, NULL);
    CHECK(shared->latent_block_bytes == LATENT_BYTES, "a block has %llu bytes, not %d",
          (unsigned long long)shared->latent_block_bytes, LATENT_BYTES);
    ranks_finish(0, RANKS);
    (void)expect_free(&observer, &shared->look, false, now_us());
}

int main(int argc, char **argv)
{
    struct daemon daemon;
    uint64_t rounds = option_number(argc, argv, "--rounds", 6);
    test_begin((unsigned)(180 + 5 * rounds));
    shared = shared_alloc(sizeof(*shared));
    const struct daemon_setup setup = {.device_bytes = 32 * MIB, .host_bytes = 32 * MIB};
    daemon_start(&daemon, &setup);
    memcpy(shared->target, daemon.target, sizeof(shared->target));
    memcpy(shared->look.target, daemon.target, sizeof(shared->look.target));
    agent_start(&observer, "observer", worker_close);

    eight_ranks();
    mid_save(rounds);
    case_i1();
    latent_once();

    agent_finish(&observer);
    daemon_stop(&daemon);
    phase("passed");
    return 0;
}
