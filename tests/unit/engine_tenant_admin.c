/* Tenants and credentials that are made while the daemon runs, and what of them lasts. */
#include "daemon/tenant_admin.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "tests/folder.h"

struct place {
    char folder[64];
    struct kvk_config config;
    struct kvk_catalogue *catalogue;
    struct kvk_clock_manual manual;
    struct kvk_tenants *tenants;
    struct kvk_error error;
};

static void place_open(struct place *place)
{
    const struct kvk_catalogue_options options = {.folder = place->folder,
                                                  .map_bytes = UINT64_C(64) << 20};
    cr_assert_eq(kvk_catalogue_open(&options, &place->catalogue, &place->error), KVK_OK, "%s",
                 place->error.text);
    const struct kvk_tenants_options tenants_options = {
        .config = &place->config, .catalogue = place->catalogue, .clock = &place->manual.clock};
    cr_assert_eq(kvk_tenants_open(&tenants_options, &place->tenants, &place->error), KVK_OK, "%s",
                 place->error.text);
}

static void place_close(struct place *place)
{
    kvk_tenants_destroy(place->tenants);
    kvk_catalogue_close(place->catalogue);
    place->tenants = NULL;
    place->catalogue = NULL;
}

static void place_init(struct place *place)
{
    memset(place, 0, sizeof(*place));
    kvk_log_set_level(KVK_LOG_ERROR);
    (void)snprintf(place->folder, sizeof(place->folder), "/tmp/kvk-tenant-XXXXXX");
    cr_assert_not_null(mkdtemp(place->folder));
    kvk_clock_manual_init(&place->manual, 1000 * KVK_NS_PER_SECOND);
    kvk_config_init(&place->config);
    place_open(place);
}

static void place_restart(struct place *place)
{
    place_close(place);
    place_open(place);
}

static void place_finish(struct place *place)
{
    place_close(place);
    kvk_config_finish(&place->config);
    folder_remove(place->folder);
}

static const struct kvk_tenant_change nothing = {.set_quota = false};

static const struct kvk_tenant *add(struct place *place, const char *name)
{
    const struct kvk_tenant *tenant = NULL;
    bool created = false;
    cr_assert_eq(kvk_tenants_add(place->tenants, name, &nothing, &tenant, &created, &place->error),
                 KVK_OK, "%s", place->error.text);
    return tenant;
}

static const struct kvk_tenant *named(struct place *place, const char *name)
{
    return kvk_tenants_find_name(place->tenants, name, strlen(name));
}

static void credential(struct place *place, const char *name, const char *tenant,
                       char token[KVK_TOKEN_TEXT_SIZE])
{
    const struct kvk_credential_request request = {
        .name = name, .tenants = {tenant}, .tenant_count = 1, .token = true, .certificate = ""};
    cr_assert_eq(kvk_credentials_add(place->tenants, &request, token, &place->error), KVK_OK, "%s",
                 place->error.text);
}

static const char *who(struct place *place, const char *token)
{
    const struct kvk_credential *found = NULL;
    enum kvk_status status = kvk_tenants_authenticate(
        place->tenants, (const uint8_t *)token, strlen(token), false, 0, &found, &place->error);
    return status == KVK_OK ? found->name : "nobody";
}

static struct kvk_key key_of(const struct kvk_tenant *tenant)
{
    const uint32_t tokens[4] = {1, 2, 3, 4};
    return kvk_key_block(&tenant->hasher, (struct kvk_key){0, 0}, tokens, 4, NULL, 0);
}

/* Ids and chain keys of tenants, of the file too, are the same after a restart. */
Test(engine_tenant_admin, ids_and_secrets_last)
{
    struct place place;
    place_init(&place);
    const struct kvk_tenant *fallback = named(&place, "default");
    const struct kvk_tenant *made = add(&place, "made");
    uint64_t ids[2] = {fallback->id, made->id};
    struct kvk_key keys[2] = {key_of(fallback), key_of(made)};
    uint64_t created_s = made->created_s;
    cr_expect_neq(ids[0], 0);
    cr_expect_neq(ids[0], ids[1]);
    cr_expect(fallback->configured);
    cr_expect_not(made->configured);
    cr_expect_not(kvk_key_equal(keys[0], keys[1]));
    place_restart(&place);
    fallback = named(&place, "default");
    made = named(&place, "made");
    cr_assert_not_null(made);
    cr_expect_eq(fallback->id, ids[0]);
    cr_expect_eq(made->id, ids[1]);
    cr_expect(kvk_key_equal(key_of(fallback), keys[0]));
    cr_expect(kvk_key_equal(key_of(made), keys[1]));
    cr_expect_eq(made->created_s, created_s);
    cr_expect_eq(kvk_tenants_find(place.tenants, ids[1]), made);
    cr_expect_null(kvk_tenants_find(place.tenants, ids[0] + ids[1] + 100));
    place_finish(&place);
}

Test(engine_tenant_admin, create_is_repeatable)
{
    struct place place;
    const struct kvk_tenant *first = NULL;
    const struct kvk_tenant *again = NULL;
    bool created = false;
    struct kvk_tenant_change properties = {
        .set_quota = true, .quota = {.sequences = 7, .limit_bytes = {1, 2, 3, 0}, .idle_ms = 9}};
    place_init(&place);
    cr_assert_eq(kvk_tenants_add(place.tenants, "a", &properties, &first, &created, &place.error),
                 KVK_OK);
    cr_expect(created);
    cr_expect_eq(kvk_tenants_add(place.tenants, "a", &properties, &again, &created, &place.error),
                 KVK_OK);
    cr_expect_not(created);
    cr_expect_eq(first, again);
    properties.quota.sequences = 8;
    cr_expect_eq(kvk_tenants_add(place.tenants, "a", &properties, &again, &created, &place.error),
                 KVK_EXISTS);
    cr_expect_eq(
        kvk_tenants_add(place.tenants, "default", &nothing, &again, &created, &place.error),
        KVK_EXISTS);
    place_finish(&place);
}

Test(engine_tenant_admin, changes_last)
{
    struct place place;
    struct kvk_tenant_quota quota;
    place_init(&place);
    const struct kvk_tenant *tenant = add(&place, "a");
    uint32_t version = kvk_tenant_quota_version(tenant);
    const struct kvk_tenant_change change = {.set_quota = true,
                                             .quota = {.guaranteed_bytes = {11, 0, 0, 0},
                                                       .limit_bytes = {0, 12, 0, 0},
                                                       .leases = 13,
                                                       .over_quota = 1},
                                             .set_may_publish = true,
                                             .may_publish = true};
    cr_expect_not(kvk_tenant_may_publish(tenant));
    cr_assert_eq(kvk_tenants_change(place.tenants, "a", &change, &place.error), KVK_OK);
    cr_expect_neq(kvk_tenant_quota_version(tenant), version);
    cr_expect(kvk_tenant_may_publish(tenant));
    const struct kvk_tenant_change off = {.set_mode = true, .mode = KVK_TENANT_OFF};
    cr_assert_eq(kvk_tenants_change(place.tenants, "a", &off, &place.error), KVK_OK);
    for (int i = 0; i < 2; i++) {
        tenant = named(&place, "a");
        kvk_tenant_quota(tenant, &quota);
        cr_expect_eq(quota.guaranteed_bytes[0], 11);
        cr_expect_eq(quota.limit_bytes[1], 12);
        cr_expect_eq(quota.leases, 13);
        cr_expect_eq(quota.over_quota, 1);
        cr_expect_eq(kvk_tenant_mode(tenant), KVK_TENANT_OFF);
        cr_expect(kvk_tenant_may_publish(tenant));
        cr_expect_eq(kvk_tenant_check(tenant, &place.error), KVK_PERMISSION);
        cr_expect_eq(place.error.cause, KVK_CAUSE_SWITCHED_OFF);
        place_restart(&place);
    }
    cr_expect_eq(kvk_tenants_change(place.tenants, "b", &change, &place.error), KVK_NOT_FOUND);
    /* The file's is the file's, but for the switch. */
    cr_expect_eq(kvk_tenants_change(place.tenants, "default", &change, &place.error),
                 KVK_PRECONDITION);
    cr_expect(strstr(place.error.text, "configuration file") != NULL);
    cr_expect_eq(kvk_tenants_change(place.tenants, "default", &off, &place.error), KVK_OK);
    cr_expect_eq(kvk_tenant_mode(named(&place, "default")), KVK_TENANT_OFF);
    place_restart(&place);
    cr_expect_eq(kvk_tenant_mode(named(&place, "default")), KVK_TENANT_ON);
    place_finish(&place);
}

/* A token is shown once, known by its digest alone, and known after a restart. */
Test(engine_tenant_admin, tokens)
{
    struct place place;
    char token[KVK_TOKEN_TEXT_SIZE];
    char other[KVK_TOKEN_TEXT_SIZE];
    place_init(&place);
    (void)add(&place, "a");
    credential(&place, "engine", "a", token);
    cr_expect_eq(strlen(token), 68u);
    cr_expect_eq(strncmp(token, "kvk_", 4), 0);
    credential(&place, "engine-2", "a", other);
    cr_expect_str_neq(token, other);
    cr_expect_str_eq(who(&place, token), "engine");
    token[67] = (char)(token[67] == '0' ? '1' : '0');
    cr_expect_str_eq(who(&place, token), "nobody");
    place_restart(&place);
    cr_expect_str_eq(who(&place, other), "engine-2");
    cr_expect_eq(kvk_credentials_delete(place.tenants, "engine-2", &place.error), KVK_OK);
    cr_expect_str_eq(who(&place, other), "nobody");
    cr_expect_eq(kvk_credentials_delete(place.tenants, "engine-2", &place.error), KVK_NOT_FOUND);
    place_restart(&place);
    cr_expect_str_eq(who(&place, other), "nobody");
    place_finish(&place);
}

Test(engine_tenant_admin, rotation_overlaps)
{
    struct place place;
    char tokens[6][KVK_TOKEN_TEXT_SIZE];
    place_init(&place);
    (void)add(&place, "a");
    credential(&place, "engine", "a", tokens[0]);
    cr_assert_eq(kvk_credentials_rotate(place.tenants, "engine", 60, tokens[1], &place.error),
                 KVK_OK);
    cr_expect_str_eq(who(&place, tokens[0]), "engine");
    cr_expect_str_eq(who(&place, tokens[1]), "engine");
    kvk_clock_manual_set(&place.manual, (1000 + 61) * KVK_NS_PER_SECOND);
    cr_expect_str_eq(who(&place, tokens[0]), "nobody");
    cr_expect_str_eq(who(&place, tokens[1]), "engine");
    /* At once. */
    cr_assert_eq(kvk_credentials_rotate(place.tenants, "engine", 0, tokens[2], &place.error),
                 KVK_OK);
    cr_expect_str_eq(who(&place, tokens[1]), "nobody");
    cr_expect_str_eq(who(&place, tokens[2]), "engine");
    /* At most four at a time. (The clock of the records has not moved.) */
    enum kvk_status status = KVK_OK;
    for (int i = 3; i < 6 && status == KVK_OK; i++) {
        status = kvk_credentials_rotate(place.tenants, "engine", 3600, tokens[i], &place.error);
    }
    cr_expect_eq(status, KVK_OK, "%s", place.error.text);
    char none[KVK_TOKEN_TEXT_SIZE];
    cr_expect_eq(kvk_credentials_rotate(place.tenants, "engine", 3600, none, &place.error),
                 KVK_EXHAUSTED);
    cr_expect_str_eq(none, "");
    for (int i = 2; i < 6; i++) {
        cr_expect_str_eq(who(&place, tokens[i]), "engine", "%d", i);
    }
    uint32_t revoked = 0;
    cr_expect_eq(kvk_credentials_revoke(place.tenants, "engine", &revoked, &place.error), KVK_OK);
    cr_expect_eq(revoked, 4);
    for (int i = 2; i < 6; i++) {
        cr_expect_str_eq(who(&place, tokens[i]), "nobody", "%d", i);
    }
    cr_expect_eq(kvk_credentials_rotate(place.tenants, "engine", UINT64_MAX, none, &place.error),
                 KVK_INVALID);
    cr_expect_eq(kvk_credentials_rotate(place.tenants, "engine", 0, none, &place.error), KVK_OK);
    cr_expect_str_eq(who(&place, none), "engine");
    place_finish(&place);
}

/* An engine of two tenants; one of them is deleted. */
Test(engine_tenant_admin, deletion)
{
    struct place place;
    char both[KVK_TOKEN_TEXT_SIZE];
    char only[KVK_TOKEN_TEXT_SIZE];
    const struct kvk_credential *engine = NULL;
    const struct kvk_tenant *tenant = NULL;
    uint32_t dropped = 0;
    place_init(&place);
    const struct kvk_tenant *a = add(&place, "a");
    const struct kvk_tenant *b = add(&place, "b");
    uint64_t id = a->id;
    uint32_t index = a->index;
    struct kvk_key key = key_of(a);
    const struct kvk_credential_request request = {
        .name = "both", .tenants = {"a", "b"}, .tenant_count = 2, .token = true, .certificate = ""};
    cr_assert_eq(kvk_credentials_add(place.tenants, &request, both, &place.error), KVK_OK);
    credential(&place, "only", "a", only);
    cr_assert_eq(kvk_tenants_authenticate(place.tenants, (const uint8_t *)both, strlen(both), false,
                                          0, &engine, &place.error),
                 KVK_OK);
    for (int i = 0; i < 2; i++) { /* may be repeated */
        uint32_t count = 0;
        cr_assert_eq(kvk_tenants_retire(place.tenants, "a", &tenant, &count, &place.error), KVK_OK);
        dropped += count;
    }
    cr_expect_eq(tenant, a);
    cr_expect_eq(dropped, 1);
    cr_expect_str_eq(who(&place, only), "nobody");
    cr_expect_str_eq(who(&place, both), "both");
    /* A call that goes on with what it was given begins nothing for it. */
    cr_expect_eq(kvk_credential_tenant(engine, (const uint8_t *)"a", 1, &tenant, &place.error),
                 KVK_PERMISSION);
    cr_expect(kvk_credential_allows(engine, b));
    bool created = false;
    cr_expect_eq(kvk_tenants_add(place.tenants, "a", &nothing, &tenant, &created, &place.error),
                 KVK_PRECONDITION);
    cr_assert_eq(kvk_tenants_remove(place.tenants, a, &place.error), KVK_OK);
    cr_assert_eq(kvk_tenants_remove(place.tenants, a, &place.error), KVK_OK);
    cr_expect_null(named(&place, "a"));
    cr_expect_null(kvk_tenants_get(place.tenants, index));
    /* The next of the name is another: id and keys are new, the place may be the same. */
    const struct kvk_tenant *next = add(&place, "a");
    cr_expect_eq(next->index, index);
    cr_expect_neq(next->id, id);
    cr_expect_not(kvk_key_equal(key_of(next), key));
    cr_expect_not(kvk_credential_allows(engine, next));
    cr_expect_eq(kvk_tenants_retire(place.tenants, "default", &tenant, &dropped, &place.error),
                 KVK_PRECONDITION);
    cr_expect_eq(kvk_tenants_retire(place.tenants, "c", &tenant, &dropped, &place.error),
                 KVK_NOT_FOUND);
    place_finish(&place);
}

/* The daemon dies between the two halves. */
Test(engine_tenant_admin, deletion_goes_on_after_a_crash)
{
    struct place place;
    const struct kvk_tenant *tenant = NULL;
    uint32_t dropped = 0;
    place_init(&place);
    uint64_t id = add(&place, "a")->id;
    cr_assert_eq(kvk_tenants_retire(place.tenants, "a", &tenant, &dropped, &place.error), KVK_OK);
    place_restart(&place);
    cr_expect_null(named(&place, "a"));
    cr_expect_null(kvk_tenants_find(place.tenants, id));
    cr_expect_neq(add(&place, "a")->id, id);
    place_finish(&place);
}

Test(engine_tenant_admin, wrong_credentials)
{
    struct place place;
    char token[KVK_TOKEN_TEXT_SIZE];
    place_init(&place);
    (void)add(&place, "a");
    const struct {
        struct kvk_credential_request request;
        enum kvk_status status;
        const char *field;
    } cases[] = {
        {{.name = "c", .tenants = {"a"}, .tenant_count = 1, .certificate = ""},
         KVK_INVALID,
         "token"},
        {{.name = "c", .token = true, .certificate = ""}, KVK_INVALID, "tenants"},
        {{.name = "c", .tenants = {"x"}, .tenant_count = 1, .token = true, .certificate = ""},
         KVK_NOT_FOUND,
         "tenants"},
        {{.name = "c", .tenants = {"a", "a"}, .tenant_count = 2, .token = true, .certificate = ""},
         KVK_INVALID,
         "tenants"},
        {{.name = "default", .tenants = {"a"}, .tenant_count = 1, .token = true, .certificate = ""},
         KVK_EXISTS,
         "name"},
        {{.name = "c",
          .admin = true,
          .certificate = "",
          .uids = {(uint32_t)geteuid()},
          .uid_count = 1},
         KVK_EXISTS,
         "uid"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        cr_expect_eq(kvk_credentials_add(place.tenants, &cases[i].request, token, &place.error),
                     cases[i].status, "%zu: %s", i, place.error.text);
        cr_expect_str_eq(place.error.field, cases[i].field, "%zu", i);
        cr_expect_str_eq(token, "");
    }
    const struct kvk_credential_request engine = {
        .name = "c", .tenants = {"a"}, .tenant_count = 1, .certificate = "engine"};
    struct kvk_credential_request other = engine;
    other.name = "d";
    cr_expect_eq(kvk_credentials_add(place.tenants, &engine, token, &place.error), KVK_OK);
    cr_expect_eq(kvk_credentials_add(place.tenants, &other, token, &place.error), KVK_EXISTS);
    cr_expect_str_eq(place.error.field, "certificate");
    cr_expect_eq(kvk_credentials_rotate(place.tenants, "default", 0, token, &place.error),
                 KVK_PRECONDITION);
    place_finish(&place);
}

/* By certificate: the first of its names that is somebody's; a token that is sent decides alone. */
Test(engine_tenant_admin, certificates)
{
    struct place place;
    char token[KVK_TOKEN_TEXT_SIZE];
    const struct kvk_credential *found = NULL;
    bool guessable = true;
    place_init(&place);
    (void)add(&place, "a");
    const struct kvk_credential_request engine = {
        .name = "c", .tenants = {"a"}, .tenant_count = 1, .certificate = "spiffe://x/engine"};
    cr_expect_eq(kvk_credentials_add(place.tenants, &engine, token, &place.error), KVK_OK);
    struct kvk_proof proof = {.subjects = {"other", "spiffe://x/engine"}, .subject_count = 2};
    cr_expect_eq(kvk_tenants_identify(place.tenants, &proof, &found, &guessable, &place.error),
                 KVK_OK);
    cr_expect_str_eq(found->name, "c");
    cr_expect_not(guessable);
    proof.subject_count = 1;
    cr_expect_eq(kvk_tenants_identify(place.tenants, &proof, &found, &guessable, &place.error),
                 KVK_UNAUTHENTICATED);
    proof.subject_count = 2;
    proof.token = (const uint8_t *)"kvk_nobodys";
    proof.token_size = 11;
    cr_expect_eq(kvk_tenants_identify(place.tenants, &proof, &found, &guessable, &place.error),
                 KVK_UNAUTHENTICATED);
    place_finish(&place);
}

Test(engine_tenant_admin, lists_show_no_secrets)
{
    struct place place;
    char token[KVK_TOKEN_TEXT_SIZE];
    struct kvk_credential_report *rows = NULL;
    uint32_t count = 0;
    place_init(&place);
    (void)add(&place, "a");
    credential(&place, "engine", "a", token);
    cr_assert_eq(kvk_credentials_list(place.tenants, &rows, &count, &place.error), KVK_OK);
    cr_assert_eq(count, 2);
    cr_expect(rows[0].configured && rows[0].admin && rows[0].uid_count == 1);
    cr_expect_str_eq(rows[1].name, "engine");
    cr_expect_eq(rows[1].token_count, 1);
    cr_expect_eq(rows[1].tokens[0].expires_s, 0);
    cr_expect_neq(rows[1].tokens[0].created_s, 0);
    cr_expect_str_eq(rows[1].tenants[0]->name, "a");
    free(rows);
    struct kvk_tenants_stats stats;
    kvk_tenants_stats(place.tenants, &stats);
    cr_expect_eq(stats.tenants, 2);
    cr_expect_eq(stats.credentials, 2);
    cr_expect_eq(stats.changes, 2);
    (void)who(&place, token);
    (void)who(&place, "nothing");
    kvk_tenants_stats(place.tenants, &stats);
    cr_expect_eq(stats.identified, 1);
    cr_expect_eq(stats.identify_failures, 1);
    place_finish(&place);
}

/* Without a catalogue nothing can be changed, and the answer says what to do. */
Test(engine_tenant_admin, without_a_catalogue)
{
    struct kvk_config config;
    struct kvk_tenants *tenants = NULL;
    struct kvk_error error;
    const struct kvk_tenant *tenant = NULL;
    char token[KVK_TOKEN_TEXT_SIZE];
    bool created = false;
    uint32_t count = 0;
    kvk_config_init(&config);
    cr_assert_eq(kvk_tenants_create(&config, &tenants, &error), KVK_OK);
    cr_expect_eq(kvk_tenants_add(tenants, "a", &nothing, &tenant, &created, &error),
                 KVK_PRECONDITION);
    cr_expect_str_eq(error.field, "durable.folder");
    cr_expect_eq(kvk_tenants_retire(tenants, "default", &tenant, &count, &error), KVK_PRECONDITION);
    cr_expect_eq(kvk_credentials_rotate(tenants, "default", 0, token, &error), KVK_PRECONDITION);
    cr_expect_str_eq(error.field, "durable.folder");
    kvk_tenants_destroy(tenants);
    kvk_config_finish(&config);
}

/* Random changes against a plain list: after each, every token says the same in both. */
#define MODEL_COUNT 12
Test(engine_tenant_admin, random_changes_against_a_list)
{
    struct place place;
    struct kvk_random random;
    struct {
        bool there;
        char token[KVK_TOKEN_TEXT_SIZE]; /* "": none */
        char old[KVK_TOKEN_TEXT_SIZE];   /* ended */
    } model[MODEL_COUNT];
    memset(model, 0, sizeof(model));
    kvk_random_init(&random, 20);
    place_init(&place);
    (void)add(&place, "a");
    for (int round = 0; round < 300; round++) {
        uint32_t i = (uint32_t)kvk_random_below(&random, MODEL_COUNT);
        uint64_t what = kvk_random_below(&random, 10);
        char name[16];
        (void)snprintf(name, sizeof(name), "c%u", i);
        memcpy(model[i].old, model[i].token, sizeof(model[i].old));
        if (what == 0) {
            place_restart(&place);
            memset(model[i].old, 0, sizeof(model[i].old));
        } else if (!model[i].there) {
            credential(&place, name, "a", model[i].token);
            model[i].there = true;
        } else if (what < 4) {
            cr_assert_eq(kvk_credentials_delete(place.tenants, name, &place.error), KVK_OK);
            model[i].there = false;
            model[i].token[0] = '\0';
        } else if (what < 6) {
            uint32_t count = 0;
            cr_assert_eq(kvk_credentials_revoke(place.tenants, name, &count, &place.error), KVK_OK);
            cr_expect_eq(count, model[i].token[0] != '\0');
            model[i].token[0] = '\0';
        } else {
            cr_assert_eq(
                kvk_credentials_rotate(place.tenants, name, 0, model[i].token, &place.error),
                KVK_OK);
        }
        for (int j = 0; j < MODEL_COUNT; j++) {
            (void)snprintf(name, sizeof(name), "c%d", j);
            if (model[j].token[0] != '\0') {
                cr_assert_str_eq(who(&place, model[j].token), name, "round %d", round);
            }
            if (model[j].old[0] != '\0' && strcmp(model[j].old, model[j].token) != 0) {
                cr_assert_str_eq(who(&place, model[j].old), "nobody", "round %d", round);
            }
        }
    }
    place_finish(&place);
}
