/*
 * Public prefixes: what publishing one costs, and what finding one costs beside finding one's own,
 * in the same engine and the same run.
 *
 * One tenant publishes prefixes of `--tokens` tokens, until there are as many as the configuration
 * allows; another looks up prompts that begin with one of them, and prompts of the same length that
 * it has cached itself. Rounds of the two take turns. A look-up that asks for public prefixes is
 * compared with each of them, one by one: so it is also asked what a miss costs that is compared
 * with all.
 *
 *     bench_public [--json] [--tokens N] [--prefixes N] [--rounds N]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "bench/report.h"
#include "daemon/cache_internal.h"
#include "daemon/public.h"
#include "tests/engine_bare.h"

#define BLOCK_TOKENS 16
#define LOOKS 200 /* of one round */
#define ROUNDS_MAX 401

static struct kvk_config config;
static struct kvk_tenants *tenants;
static struct kvk_cache *cache;
static struct kvk_caller callers[2];
static uint64_t spaces[2], sessions[2];
static struct kvk_error error;

static void expect(enum kvk_status status, const char *what)
{
    if (status != KVK_OK) {
        (void)fprintf(stderr, "bench_public: %s: %s\n", what, error.text);
        exit(1);
    }
}

static uint64_t option(int argc, char **argv, const char *name, uint64_t standard)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return strtoull(argv[i + 1], NULL, 10);
        }
    }
    return standard;
}

/* ---- An engine with two tenants ---- */

static void tenants_make(void)
{
    config.tenants = calloc(2, sizeof(*config.tenants));
    config.credentials = calloc(2, sizeof(*config.credentials));
    if (config.tenants == NULL || config.credentials == NULL) {
        exit(1);
    }
    config.tenant_count = config.credential_count = 2;
    for (uint32_t i = 0; i < 2; i++) {
        (void)snprintf(config.tenants[i].name, KVK_NAME_SIZE, "tenant-%u", i);
        (void)snprintf(config.credentials[i].name, KVK_NAME_SIZE, "credential-%u", i);
        (void)snprintf(config.credentials[i].token, KVK_NAME_SIZE, "secret-of-tenant-%u", i);
        config.credentials[i].tenants[0] = i;
        config.credentials[i].tenant_count = 1;
        config.tenants[i].may_publish = true;
    }
}

static void engine_start(uint64_t host_bytes)
{
    kvk_config_init(&config);
    tenants_make();
    config.device_bytes = 0;
    config.host_bytes = host_bytes;
    config.keeper = KVK_CONFIG_KEEPER_NO;
    config.tenant_percent = 100;
    kvk_log_set_level(KVK_LOG_ERROR);
    expect(kvk_tenants_create(&config, &tenants, &error), "tenants");
    const struct kvk_cache_options cache_options = {
        .config = &config, .tenants = tenants, .host_device = bare_device(), .threads = true};
    expect(kvk_cache_create(&cache_options, &cache, &error), "cache");
}

static void tenant_begin(uint32_t who)
{
    char token[32];
    const struct kvk_credential *credential = NULL;
    struct kvk_geometry geometry = bare_geometry(2, 2, 64, BLOCK_TOKENS);
    geometry.format_k = geometry.format_v = KVK_FORMAT_BF16;
    (void)snprintf(token, sizeof(token), "secret-of-tenant-%u", who);
    expect(kvk_tenants_authenticate(tenants, (const uint8_t *)token, strlen(token), false, 0,
                                    &credential, &error),
           "token");
    callers[who] = bare_caller(credential);
    spaces[who] = bare_space(cache, &callers[who], "model", &geometry).space_id;
    sessions[who] = bare_session(cache, &callers[who]);
}

/* ---- Words ---- */

static void prompt_fill(uint32_t *tokens, uint64_t count, uint32_t name)
{
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = name * 100003 + (uint32_t)i;
    }
}

static void prompt_cache(uint32_t who, const uint32_t *tokens, uint64_t count)
{
    bare_compute(cache, &callers[who], sessions[who], spaces[who], tokens, count);
}

/* Microseconds of one look-up, over a round. */
static double look(const uint32_t *tokens, uint64_t count, bool use_public, uint64_t expected)
{
    const struct kvk_lookup_request request = {
        .space_id = spaces[1],
        .prompt = {.tokens = tokens, .token_count = count, .use_public = use_public}};
    struct kvk_lookup_reply reply;
    double begun = kvk_report_seconds();
    for (uint32_t i = 0; i < LOOKS; i++) {
        expect(kvk_lookup(cache, &callers[1], &request, &reply, &error), "look-up");
        if (reply.cached_tokens != expected) {
            (void)fprintf(stderr, "bench_public: %llu tokens found\n",
                          (unsigned long long)reply.cached_tokens);
            exit(1);
        }
    }
    return (kvk_report_seconds() - begun) * 1e6 / LOOKS;
}

static double publish(uint32_t *tokens, uint64_t count, uint32_t name)
{
    struct kvk_publish_reply reply;
    const struct kvk_publish_request request = {.space_id = spaces[0],
                                                .prompt = {.tokens = tokens, .token_count = count}};
    prompt_fill(tokens, count, name);
    prompt_cache(0, tokens, count);
    double begun = kvk_report_seconds();
    expect(kvk_public_publish(cache, &callers[0], &request, &reply, &error), "publish");
    return (kvk_report_seconds() - begun) * 1e3;
}

/* Own, public and missed prompts in turn. */
static void measure(struct kvk_report *report, const char *const names[3], uint32_t rounds,
                    uint64_t count, uint32_t *tokens[3])
{
    static double own[ROUNDS_MAX], shared[ROUNDS_MAX], missed[ROUNDS_MAX], plain[ROUNDS_MAX];
    for (uint32_t i = 0; i < rounds; i++) {
        own[i] = look(tokens[0], count, false, count);
        shared[i] = look(tokens[1], count, true, count);
        plain[i] = look(tokens[2], count, false, 0);
        missed[i] = look(tokens[2], count, true, 0);
    }
    double own_us = kvk_report_median(own, rounds);
    kvk_report_value(report, names[0], own_us, "us");
    kvk_report_ratio(report, names[1], kvk_report_median(shared, rounds), "us", own_us);
    kvk_report_ratio(report, names[2], kvk_report_median(missed, rounds), "us",
                     kvk_report_median(plain, rounds));
}

int main(int argc, char **argv)
{
    static const char *const with_one[] = {"own hit", "public hit, one public prefix",
                                           "miss, one public prefix"};
    static const char *const with_all[] = {"own hit again", "public hit, all public prefixes",
                                           "miss, all public prefixes"};
    struct kvk_report report;
    kvk_report_init(&report, "public");
    for (int i = 1; i < argc; i++) {
        (void)kvk_report_option(&report, argv[i]);
    }
    uint64_t count = option(argc, argv, "--tokens", 4096) / BLOCK_TOKENS * BLOCK_TOKENS;
    uint32_t prefixes = (uint32_t)option(argc, argv, "--prefixes", 64);
    uint32_t rounds = (uint32_t)option(argc, argv, "--rounds", 51);
    rounds = rounds > ROUNDS_MAX ? ROUNDS_MAX : rounds;
    uint64_t prefix_bytes = count * 2 * 2 * 2 * 64 * 2;
    uint32_t *tokens[3];
    for (uint32_t i = 0; i < 3; i++) {
        tokens[i] = calloc(count + 1, sizeof(uint32_t));
        if (count == 0 || prefixes < 2 || tokens[i] == NULL) {
            return 2;
        }
    }
    engine_start((prefixes * 2 + 4) * prefix_bytes * 2);
    config.public_prefixes = prefixes;
    tenant_begin(0);
    tenant_begin(1);
    prompt_fill(tokens[0], count, 1000000);
    prompt_cache(1, tokens[0], count);
    prompt_fill(tokens[2], count, 2000000);
    double first_ms = publish(tokens[1], count, 1);
    kvk_report_value(&report, "publish", first_ms, "ms");
    kvk_report_value(&report, "publish, of its bytes", (double)prefix_bytes / first_ms / 1e6,
                     "GB/s");
    measure(&report, with_one, rounds, count, tokens);
    for (uint32_t i = 2; i <= prefixes; i++) {
        (void)publish(tokens[1], count, i);
    }
    prompt_fill(tokens[1], count, 1); /* the oldest: compared last */
    measure(&report, with_all, rounds, count, tokens);
    kvk_cache_destroy(cache);
    kvk_tenants_destroy(tenants);
    kvk_config_finish(&config);
    return kvk_report_print(&report);
}
