/*
 * Tenants are deleted and made again, in the same place of every table, while calls go on with what
 * they were given before: sessions, spaces, sequences, the rate of requests. Nothing of a tenant
 * that is gone is hung from the next one, and when all have gone all is free.
 *
 *     test_stress_engine_deletes [ROUNDS]
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/cache_internal.h"
#include "daemon/forget.h"
#include "daemon/quota.h"
#include "daemon/tenant_admin.h"
#include "tests/engine_bare.h"
#include "tests/folder.h"

#define CALLERS 3
#define TENANTS 3

struct rig {
    char folder[64];
    struct kvk_config config;
    struct kvk_catalogue *catalogue;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    _Atomic(const struct kvk_credential *) credentials[TENANTS]; /* perhaps of one that is gone */
    _Atomic bool stop;
    _Atomic uint64_t served;
    _Atomic uint64_t refused;
};

static void pause_us(uint64_t us)
{
    const struct timespec time = {.tv_nsec = (long)us * 1000};
    (void)nanosleep(&time, NULL);
}

/* ---- Callers ---- */

static struct kvk_caller caller_of(const struct kvk_credential *credential)
{
    return (struct kvk_caller){
        .credential = credential, .call = "Stress", .may_block = true, .deadline_ns = UINT64_MAX};
}

static enum kvk_status space_open(struct rig *rig, const struct kvk_caller *caller,
                                  struct kvk_random *random, uint64_t *space_id)
{
    static const char *const models[] = {"a", "b"};
    const char *model = models[kvk_random_below(random, 2)];
    const struct kvk_geometry geometry = bare_geometry(2, 1, 8, 4);
    const struct kvk_space_request request = bare_space_request(model, &geometry);
    struct kvk_space_reply reply;
    struct kvk_error error;
    enum kvk_status status = kvk_space_open(rig->cache, caller, &request, &reply, &error);
    *space_id = status == KVK_OK ? reply.space_id : 0;
    return status;
}

/* One life of an engine, as far as it is let in. */
static void engine_run(struct rig *rig, const struct kvk_credential *credential,
                       struct kvk_random *random, struct kvk_tables *tables)
{
    const struct kvk_caller caller = caller_of(credential);
    const struct kvk_hello hello = {.pidfd = -1};
    const uint32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, (uint32_t)kvk_random_below(random, 4)};
    struct kvk_welcome welcome;
    struct kvk_error error;
    uint64_t space_id = 0;
    (void)!kvk_rate_take(rig->cache, credential->tenants[0], &error);
    if (kvk_session_begin(rig->cache, &caller, &hello, &welcome, &error) != KVK_OK) {
        rig->refused++;
        return;
    }
    if (space_open(rig, &caller, random, &space_id) == KVK_OK) {
        const struct kvk_open_request request = {.session_id = welcome.session_id,
                                                 .space_id = space_id,
                                                 .prompt = {.tokens = tokens, .token_count = 8}};
        struct kvk_sequence_reply reply;
        if (kvk_sequence_open(rig->cache, &caller, &request, &reply, tables, &error) == KVK_OK) {
            rig->served++;
        }
    }
    kvk_session_end(rig->cache, welcome.session_id);
}

static void *call_run(void *argument)
{
    struct rig *rig = argument;
    struct kvk_random random;
    struct kvk_tables tables = {.part_count = 0};
    uint64_t seed = 0;
    kvk_random_secret(&seed, sizeof(seed));
    kvk_random_init(&random, seed);
    while (!rig->stop) {
        const struct kvk_credential *credential =
            rig->credentials[kvk_random_below(&random, TENANTS)];
        if (credential != NULL) {
            engine_run(rig, credential, &random, &tables);
        }
    }
    kvk_tables_finish(&tables);
    return NULL;
}

/* ---- The administrator ---- */

static void tenant_begin(struct rig *rig, uint32_t slot, uint32_t number)
{
    char name[32];
    char token[KVK_TOKEN_TEXT_SIZE];
    const struct kvk_tenant *tenant = NULL;
    const struct kvk_credential *credential = NULL;
    struct kvk_error error;
    bool created = false;
    const struct kvk_tenant_change properties = {
        .set_quota = true, .quota = {.sequences = 64 + number, .requests_per_second = 1000000}};
    (void)snprintf(name, sizeof(name), "tenant-%u", slot);
    bare_must(kvk_tenants_add(rig->tenants, name, &properties, &tenant, &created, &error), &error);
    bare_must(kvk_quota_sync(rig->cache, tenant, &error), &error);
    const struct kvk_credential_request request = {
        .name = name, .tenants = {name}, .tenant_count = 1, .token = true, .certificate = ""};
    bare_must(kvk_credentials_add(rig->tenants, &request, token, &error), &error);
    bare_must(kvk_tenants_authenticate(rig->tenants, (const uint8_t *)token, strlen(token), false,
                                       0, &credential, &error),
              &error);
    rig->credentials[slot] = credential;
}

static void tenant_end(struct rig *rig, uint32_t slot)
{
    const struct kvk_credential administrator = {.name = "administrator", .admin = true};
    const struct kvk_caller caller = caller_of(&administrator);
    const struct kvk_tenant *tenant = NULL;
    struct kvk_forget_counts counts;
    struct kvk_tenant_quota quota;
    struct kvk_error error;
    char name[32];
    uint32_t dropped = 0;
    (void)snprintf(name, sizeof(name), "tenant-%u", slot);
    bare_must(kvk_tenants_retire(rig->tenants, name, &tenant, &dropped, &error), &error);
    /* The quota is this tenant's, whatever calls of the one before in its place did. */
    kvk_quota_get(rig->cache, tenant, &quota);
    KVK_ASSERT(quota.requests_per_second == 1000000);
    struct kvk_tenant_quota own;
    kvk_tenant_quota(tenant, &own);
    KVK_ASSERT(quota.sequences == own.sequences);
    enum kvk_status status = KVK_UNAVAILABLE;
    for (int i = 0; i < 1000 && status == KVK_UNAVAILABLE; i++) {
        status = kvk_tenant_forget(rig->cache, &caller, tenant, &counts, &error);
    }
    bare_must(status, &error);
    bare_must(kvk_tenants_remove(rig->tenants, tenant, &error), &error);
}

/* ---- The whole ---- */

static void rig_open(struct rig *rig)
{
    struct kvk_error error;
    (void)snprintf(rig->folder, sizeof(rig->folder), "/tmp/kvk-deletes-XXXXXX");
    KVK_ASSERT(mkdtemp(rig->folder) != NULL);
    kvk_log_set_level(KVK_LOG_ERROR);
    kvk_config_init(&rig->config);
    rig->config.device_bytes = 1 << 20;
    rig->config.host_bytes = 1 << 20;
    rig->config.blocks = 65536;
    rig->config.tokens = 4096;
    rig->config.sequences = 1024;
    const struct kvk_catalogue_options options = {.folder = rig->folder,
                                                  .map_bytes = UINT64_C(64) << 20};
    bare_must(kvk_catalogue_open(&options, &rig->catalogue, &error), &error);
    const struct kvk_tenants_options tenants_options = {.config = &rig->config,
                                                        .catalogue = rig->catalogue};
    bare_must(kvk_tenants_open(&tenants_options, &rig->tenants, &error), &error);
    const struct kvk_cache_options cache_options = {.config = &rig->config,
                                                    .tenants = rig->tenants,
                                                    .device = bare_device(),
                                                    .host_device = bare_device(),
                                                    .catalogue = rig->catalogue,
                                                    .threads = true};
    bare_must(kvk_cache_create(&cache_options, &rig->cache, &error), &error);
}

static void rig_close(struct rig *rig)
{
    kvk_cache_check(rig->cache);
    KVK_ASSERT(rig->cache->space_count == 0);
    for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
        KVK_ASSERT(rig->cache->tiers[tier].used_bytes == 0);
    }
    kvk_cache_destroy(rig->cache);
    kvk_tenants_destroy(rig->tenants);
    kvk_catalogue_close(rig->catalogue);
    kvk_config_finish(&rig->config);
    folder_remove(rig->folder);
}

int main(int argc, char **argv)
{
    static struct rig rig;
    pthread_t callers[CALLERS];
    struct kvk_random random;
    uint32_t rounds = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 150;
    kvk_random_init(&random, 5);
    rig_open(&rig);
    for (uint32_t slot = 0; slot < TENANTS; slot++) {
        tenant_begin(&rig, slot, 0);
    }
    for (int i = 0; i < CALLERS; i++) {
        int result = pthread_create(&callers[i], NULL, call_run, &rig);
        KVK_ASSERT(result == 0);
    }
    for (uint32_t i = 1; i <= rounds; i++) {
        uint32_t slot = (uint32_t)kvk_random_below(&random, TENANTS);
        pause_us(kvk_random_below(&random, 3000));
        tenant_end(&rig, slot);
        tenant_begin(&rig, slot, i);
    }
    rig.stop = true;
    for (int i = 0; i < CALLERS; i++) {
        (void)pthread_join(callers[i], NULL);
    }
    for (uint32_t slot = 0; slot < TENANTS; slot++) {
        tenant_end(&rig, slot);
    }
    (void)printf("%u deleted, %llu engines served, %llu refused\n", rounds,
                 (unsigned long long)rig.served, (unsigned long long)rig.refused);
    KVK_ASSERT(rig.served > 0);
    rig_close(&rig);
    return 0;
}
