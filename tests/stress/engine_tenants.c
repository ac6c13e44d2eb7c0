/*
 * Callers are recognised while tenants and credentials come, change and go: every answer is one
 * that was right at some moment of the call, tokens that nobody touches are always known, those
 * that are over for good never are, and quotas are never seen half written.
 *
 * A plain program, for ThreadSanitizer. With an argument: rounds of the changer.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/tenant_admin.h"
#include "tests/engine_bare.h"
#include "tests/folder.h"

#define READERS 3
#define SLOTS 8

struct rig {
    char folder[64];
    struct kvk_config config;
    struct kvk_catalogue *catalogue;
    struct kvk_tenants *tenants;
    char fixed[KVK_TOKEN_TEXT_SIZE]; /* of a credential that nobody touches */
    char ended[KVK_TOKEN_TEXT_SIZE]; /* of one that is deleted before the readers begin */
    /* A token by slot, exchanged under a lock; the first byte 0: none now. */
    pthread_mutex_t mutex;
    char tokens[SLOTS][KVK_TOKEN_TEXT_SIZE];
    _Atomic bool stop;
    _Atomic uint64_t known;
    _Atomic uint64_t unknown;
};

/* NULL: nobody. */
static const struct kvk_credential *who(struct rig *rig, const char *token)
{
    const struct kvk_credential *found = NULL;
    enum kvk_status status = kvk_tenants_authenticate(rig->tenants, (const uint8_t *)token,
                                                      strlen(token), false, 0, &found, NULL);
    return status == KVK_OK ? found : NULL;
}

/* ---- Readers ---- */

/* The changer writes quotas whose fields all say the same. */
static void check_quota(const struct kvk_tenant *tenant)
{
    struct kvk_tenant_quota quota;
    kvk_tenant_quota(tenant, &quota);
    KVK_ASSERT(quota.sequences == quota.leases);
    KVK_ASSERT(quota.sequences == quota.limit_bytes[0]);
    KVK_ASSERT(quota.sequences == quota.guaranteed_bytes[2]);
}

static void check_credential(struct rig *rig, const struct kvk_credential *credential)
{
    const struct kvk_tenant *tenant = NULL;
    struct kvk_error error;
    KVK_ASSERT(strncmp(credential->name, "slot-", 5) == 0);
    enum kvk_status status = kvk_credential_tenant(credential, NULL, 0, &tenant, &error);
    KVK_ASSERT(status == KVK_OK || status == KVK_PERMISSION);
    for (uint32_t i = 0; i < credential->tenant_count; i++) {
        const struct kvk_tenant *own = credential->tenants[i];
        KVK_ASSERT(strncmp(own->name, "tenant-", 7) == 0);
        KVK_ASSERT(own->id != 0 && own->index < KVK_TENANT_COUNT_MAX);
        KVK_ASSERT(kvk_credential_allows(credential, own));
        check_quota(own);
        (void)kvk_tenants_find(rig->tenants, own->id);
    }
}

static void *read_run(void *argument)
{
    struct rig *rig = argument;
    struct kvk_random random;
    uint64_t seed = 0;
    kvk_random_secret(&seed, sizeof(seed));
    kvk_random_init(&random, seed);
    while (!rig->stop) {
        char token[KVK_TOKEN_TEXT_SIZE];
        uint32_t slot = (uint32_t)kvk_random_below(&random, SLOTS);
        (void)pthread_mutex_lock(&rig->mutex);
        memcpy(token, rig->tokens[slot], sizeof(token));
        (void)pthread_mutex_unlock(&rig->mutex);
        const struct kvk_credential *fixed = who(rig, rig->fixed);
        KVK_ASSERT(fixed != NULL && strcmp(fixed->name, "fixed") == 0);
        KVK_ASSERT(strcmp(fixed->tenants[0]->name, "default") == 0);
        KVK_ASSERT(who(rig, rig->ended) == NULL);
        const struct kvk_credential *found = token[0] != '\0' ? who(rig, token) : NULL;
        if (found != NULL) {
            check_credential(rig, found);
            rig->known++;
        } else {
            rig->unknown++;
        }
        uint32_t count = kvk_tenants_count(rig->tenants);
        for (uint32_t i = 0; i < count; i++) {
            const struct kvk_tenant *tenant = kvk_tenants_get(rig->tenants, i);
            KVK_ASSERT(tenant == NULL || tenant->index == i);
            if (tenant != NULL && !tenant->configured) {
                check_quota(tenant);
            }
        }
    }
    return NULL;
}

/* ---- The changer ---- */

static struct kvk_tenant_change quota_of(uint32_t number)
{
    return (struct kvk_tenant_change){.set_quota = true,
                                      .quota = {.sequences = number,
                                                .leases = number,
                                                .limit_bytes = {number, 0, 0, 0},
                                                .guaranteed_bytes = {0, 0, number, 0}}};
}

static void slot_set(struct rig *rig, uint32_t slot, const char *token)
{
    (void)pthread_mutex_lock(&rig->mutex);
    memset(rig->tokens[slot], 0, sizeof(rig->tokens[slot]));
    (void)snprintf(rig->tokens[slot], sizeof(rig->tokens[slot]), "%s", token);
    (void)pthread_mutex_unlock(&rig->mutex);
}

static void slot_begin(struct rig *rig, uint32_t slot)
{
    char tenant_name[32];
    char name[32];
    char token[KVK_TOKEN_TEXT_SIZE];
    const struct kvk_tenant *tenant = NULL;
    struct kvk_error error;
    bool created = false;
    (void)snprintf(tenant_name, sizeof(tenant_name), "tenant-%u", slot);
    (void)snprintf(name, sizeof(name), "slot-%u", slot);
    const struct kvk_tenant_change quota = quota_of(slot);
    bare_must(kvk_tenants_add(rig->tenants, tenant_name, &quota, &tenant, &created, &error),
              &error);
    const struct kvk_credential_request request = {.name = name,
                                                   .tenants = {tenant_name},
                                                   .tenant_count = 1,
                                                   .token = true,
                                                   .certificate = ""};
    bare_must(kvk_credentials_add(rig->tenants, &request, token, &error), &error);
    KVK_ASSERT(who(rig, token) != NULL);
    slot_set(rig, slot, token);
}

static void slot_end(struct rig *rig, uint32_t slot)
{
    char name[32];
    char token[KVK_TOKEN_TEXT_SIZE];
    const struct kvk_tenant *tenant = NULL;
    struct kvk_error error;
    uint32_t count = 0;
    (void)snprintf(name, sizeof(name), "tenant-%u", slot);
    memcpy(token, rig->tokens[slot], sizeof(token)); /* ours to write, so ours to read */
    bare_must(kvk_tenants_retire(rig->tenants, name, &tenant, &count, &error), &error);
    KVK_ASSERT(count == 1);
    KVK_ASSERT(who(rig, token) == NULL);
    slot_set(rig, slot, "");
    bare_must(kvk_tenants_remove(rig->tenants, tenant, &error), &error);
}

static void slot_change(struct rig *rig, uint32_t slot, struct kvk_random *random)
{
    char name[32];
    char token[KVK_TOKEN_TEXT_SIZE];
    char before[KVK_TOKEN_TEXT_SIZE];
    struct kvk_error error;
    struct kvk_credential_report *rows = NULL;
    uint32_t count = 0;
    switch (kvk_random_below(random, 3)) {
    case 0:
        (void)snprintf(name, sizeof(name), "slot-%u", slot);
        memcpy(before, rig->tokens[slot], sizeof(before));
        bare_must(kvk_credentials_rotate(rig->tenants, name, 0, token, &error), &error);
        KVK_ASSERT(who(rig, before) == NULL);
        KVK_ASSERT(who(rig, token) != NULL);
        slot_set(rig, slot, token);
        break;
    case 1: {
        const struct kvk_tenant_change change = quota_of((uint32_t)kvk_random_next(random));
        (void)snprintf(name, sizeof(name), "tenant-%u", slot);
        bare_must(kvk_tenants_change(rig->tenants, name, &change, &error), &error);
        break;
    }
    default:
        bare_must(kvk_credentials_list(rig->tenants, &rows, &count, &error), &error);
        KVK_ASSERT(count >= 2);
        free(rows);
        break;
    }
}

static void change_run(struct rig *rig, uint32_t rounds)
{
    struct kvk_random random;
    bool there[SLOTS] = {false};
    kvk_random_init(&random, 11);
    for (uint32_t i = 0; i < rounds; i++) {
        uint32_t slot = (uint32_t)kvk_random_below(&random, SLOTS);
        if (!there[slot]) {
            slot_begin(rig, slot);
            there[slot] = true;
        } else if (kvk_random_below(&random, 4) == 0) {
            slot_end(rig, slot);
            there[slot] = false;
        } else {
            slot_change(rig, slot, &random);
        }
    }
}

/* ---- The whole ---- */

static void rig_open(struct rig *rig)
{
    struct kvk_error error;
    (void)snprintf(rig->folder, sizeof(rig->folder), "/tmp/kvk-tenants-XXXXXX");
    KVK_ASSERT(mkdtemp(rig->folder) != NULL);
    kvk_log_set_level(KVK_LOG_ERROR);
    kvk_config_init(&rig->config);
    (void)pthread_mutex_init(&rig->mutex, NULL);
    const struct kvk_catalogue_options options = {.folder = rig->folder,
                                                  .map_bytes = UINT64_C(64) << 20};
    bare_must(kvk_catalogue_open(&options, &rig->catalogue, &error), &error);
    const struct kvk_tenants_options tenants_options = {.config = &rig->config,
                                                        .catalogue = rig->catalogue};
    bare_must(kvk_tenants_open(&tenants_options, &rig->tenants, &error), &error);
    struct kvk_credential_request request = {.name = "fixed",
                                             .tenants = {"default"},
                                             .tenant_count = 1,
                                             .token = true,
                                             .certificate = ""};
    bare_must(kvk_credentials_add(rig->tenants, &request, rig->fixed, &error), &error);
    request.name = "ended";
    bare_must(kvk_credentials_add(rig->tenants, &request, rig->ended, &error), &error);
    bare_must(kvk_credentials_delete(rig->tenants, "ended", &error), &error);
}

int main(int argc, char **argv)
{
    static struct rig rig;
    pthread_t readers[READERS];
    uint32_t rounds = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 400;
    rig_open(&rig);
    for (int i = 0; i < READERS; i++) {
        int result = pthread_create(&readers[i], NULL, read_run, &rig);
        KVK_ASSERT(result == 0);
    }
    change_run(&rig, rounds);
    rig.stop = true;
    for (int i = 0; i < READERS; i++) {
        (void)pthread_join(readers[i], NULL);
    }
    struct kvk_tenants_stats stats;
    kvk_tenants_stats(rig.tenants, &stats);
    (void)printf("%u changes, %llu calls known, %llu not, %llu identified in all\n", rounds,
                 (unsigned long long)rig.known, (unsigned long long)rig.unknown,
                 (unsigned long long)stats.identified);
    KVK_ASSERT(rig.known > 0);
    kvk_tenants_destroy(rig.tenants);
    kvk_catalogue_close(rig.catalogue);
    kvk_config_finish(&rig.config);
    (void)pthread_mutex_destroy(&rig.mutex);
    folder_remove(rig.folder);
    return 0;
}
