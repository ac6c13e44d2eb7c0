/*
 * A worker scribbles over what it has sealed, in the memory that it has mapped: nobody reads it,
 * and still the scrub finds it, gives it up, and says so to the operator.
 */
#include "tests/daemon_worker.h"

#define BLOCKS 16
#define WAIT_MS_MAX 20000

struct told {
    char target[96];
    double damaged, checked;
};

static double stat_of(const char *name)
{
    Kvkeep__V1__GetStatsRequest request = KVKEEP__V1__GET_STATS_REQUEST__INIT;
    Kvkeep__V1__GetStatsResponse *response = NULL;
    double value = -1;
    CHECK_OK(worker_call("/kvkeep.v1.Admin/GetStats", &request.base,
                         &kvkeep__v1__get_stats_response__descriptor, &response));
    for (size_t i = 0; i < response->n_stats; i++) {
        const ProtobufCBinaryData *at = &response->stats[i]->name;
        if (at->len == strlen(name) && memcmp(at->data, name, at->len) == 0) {
            value = response->stats[i]->value;
        }
    }
    message_free(response);
    CHECK(value >= 0, "there is no %s", name);
    return value;
}

static void scribble_task(void *shared)
{
    struct told *told = shared;
    const struct worker_options options = {
        .target = told->target, .model = "scribbled", .name = "scribbler"};
    const struct kvkeep_open_options open = {.growth_tokens = 0};
    struct kvkeep_sequence sequence;
    struct prompt *prompt = malloc(sizeof(*prompt));
    CHECK(prompt != NULL, "no memory");
    worker_open(&options);
    prompt_set(prompt, 1, BLOCKS * BLOCK_TOKENS);
    worker_fill(prompt, &open, &sequence);
    uint8_t *block = worker_block(&sequence.groups[0], BLOCKS / 2);
    worker_close_sequence(&sequence);
    CHECK(worker_hit(prompt) == prompt->count, "it is not cached");
    block[77] ^= 4;
    uint64_t until_ms = now_ms() + WAIT_MS_MAX;
    while (stat_of("kvkeep_scrub_damaged_total{tier=\"host\"}") == 0) {
        CHECK(now_ms() < until_ms, "it is not found");
        pause_us(20000);
    }
    uint64_t hit = worker_hit(prompt);
    CHECK(hit == BLOCKS / 2 * BLOCK_TOKENS, "a hit of %u tokens", (unsigned)hit);
    told->damaged = stat_of("kvkeep_scrub_damaged_total{tier=\"host\"}");
    told->checked = stat_of("kvkeep_scrub_blocks_total{tier=\"host\"}");
    CHECK(stat_of("kvkeep_scrub_passes_total") > 0, "no full pass");
    worker_close();
    free(prompt);
}

/* What `kvkeepctl status` says of it. */
static void status_check(const struct told *told)
{
    char program[512];
    char command[1024];
    char line[1024];
    bool said = false;
    daemon_program(program, sizeof(program));
    char *slash = strrchr(program, '/');
    CHECK(slash != NULL, "no folder in %s", program);
    *slash = '\0';
    (void)snprintf(command, sizeof(command), "%s/kvkeepctl --connect %s status", program,
                   told->target);
    FILE *output = popen(command, "r");
    CHECK(output != NULL, "cannot run %s", command);
    while (fgets(line, sizeof(line), output) != NULL) {
        said = said || (strncmp(line, "scrub: ", 7) == 0 && strstr(line, " 1 damaged") != NULL &&
                        strstr(line, "the last full pass began") != NULL);
    }
    CHECK(pclose(output) == 0, "%s failed", command);
    CHECK(said, "kvkeepctl status does not say what the scrub found");
}

int main(void)
{
    struct daemon daemon;
    const struct daemon_setup setup = {.host_bytes = 64 * BLOCK_BYTES,
                                       .rest = "[durable]\nscrub_interval_ms = 100 ms\n"};
    struct agent agent;
    test_begin(120);
    struct told *told = shared_alloc(sizeof(*told));
    agent_start(&agent, "scribbler", NULL);
    phase("a daemon that scrubs");
    daemon_start(&daemon, &setup);
    (void)snprintf(told->target, sizeof(told->target), "%s", daemon.target);
    phase("a worker scribbles");
    agent_do(&agent, scribble_task, told);
    CHECK(told->damaged == 1, "%g damaged", told->damaged);
    CHECK(told->checked >= 1, "%g checked", told->checked);
    phase("the operator is told");
    status_check(told);
    agent_finish(&agent);
    daemon_check_alive(&daemon);
    daemon_stop(&daemon);
    return 0;
}
