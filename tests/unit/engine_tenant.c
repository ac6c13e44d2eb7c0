/* Who calls, and for whom. */
#include "daemon/tenant.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TOKEN_A "token-of-engine-a"
#define TOKEN_B "token-of-engine-b"

static struct kvk_error error;

/* Tenants a, b, c; an engine for a and b by token, one for b by token and uid, an operator. */
static void table_config(struct kvk_config *config)
{
    kvk_config_init(config);
    config->tenants = calloc(3, sizeof(config->tenants[0]));
    config->credentials = calloc(3, sizeof(config->credentials[0]));
    config->tenant_count = 3;
    config->credential_count = 3;
    strcpy(config->tenants[0].name, "a");
    strcpy(config->tenants[1].name, "b");
    strcpy(config->tenants[2].name, "c");
    config->credentials[0] = (struct kvk_credential_config){
        .name = "one", .token = TOKEN_A, .tenants = {1, 0}, .tenant_count = 2};
    config->credentials[1] = (struct kvk_credential_config){.name = "two",
                                                            .token = TOKEN_B,
                                                            .uids = {77, 78},
                                                            .uid_count = 2,
                                                            .tenants = {1},
                                                            .tenant_count = 1};
    config->credentials[2] = (struct kvk_credential_config){
        .name = "operator", .uids = {5}, .uid_count = 1, .admin = true};
}

static const char *who(struct kvk_tenants *tenants, const char *token, bool local, uint32_t uid)
{
    const struct kvk_credential *credential = NULL;
    enum kvk_status status =
        kvk_tenants_authenticate(tenants, (const uint8_t *)token, token != NULL ? strlen(token) : 0,
                                 local, uid, &credential, &error);
    if (status != KVK_OK) {
        cr_expect_eq(status, KVK_UNAUTHENTICATED);
        return "nobody";
    }
    return credential->name;
}

Test(engine_tenant, without_a_table)
{
    struct kvk_config config;
    struct kvk_tenants *tenants = NULL;
    uint32_t own = (uint32_t)geteuid();

    kvk_config_init(&config);
    cr_assert_eq(kvk_tenants_create(&config, &tenants, &error), KVK_OK);
    cr_expect_eq(kvk_tenants_count(tenants), 1);
    cr_expect_str_eq(kvk_tenants_get(tenants, 0)->name, "default");
    cr_expect_str_eq(who(tenants, NULL, true, own), "default");
    cr_expect_str_eq(who(tenants, NULL, true, own + 1), "nobody");
    cr_expect_str_eq(who(tenants, NULL, false, own), "nobody");
    cr_expect_str_eq(who(tenants, "", true, own), "nobody");
    cr_expect_str_eq(who(tenants, "any token at all", true, own), "nobody");
    const struct kvk_credential *credential = NULL;
    cr_assert_eq(kvk_tenants_authenticate(tenants, NULL, 0, true, own, &credential, &error),
                 KVK_OK);
    cr_expect(credential->admin);
    kvk_tenants_destroy(tenants);

    config.tcp_insecure = true;
    cr_assert_eq(kvk_tenants_create(&config, &tenants, &error), KVK_OK);
    cr_expect_str_eq(who(tenants, NULL, false, 0), "anonymous");
    cr_assert_eq(kvk_tenants_authenticate(tenants, NULL, 0, false, 0, &credential, &error), KVK_OK);
    cr_expect_not(credential->admin);
    cr_expect(kvk_credential_allows(credential, kvk_tenants_get(tenants, 0)));
    cr_expect_str_eq(who(tenants, NULL, true, own + 1), "nobody");
    kvk_tenants_destroy(tenants);
    kvk_config_finish(&config);
    kvk_tenants_destroy(NULL);
}

Test(engine_tenant, tokens_and_uids)
{
    struct kvk_config config;
    struct kvk_tenants *tenants = NULL;

    table_config(&config);
    config.tcp_insecure = true; /* means nothing where there are credentials */
    cr_assert_eq(kvk_tenants_create(&config, &tenants, &error), KVK_OK, "%s", error.text);
    cr_expect_str_eq(who(tenants, TOKEN_A, false, 0), "one");
    cr_expect_str_eq(who(tenants, TOKEN_A, true, 77), "one");
    cr_expect_str_eq(who(tenants, TOKEN_B, false, 0), "two");
    cr_expect_str_eq(who(tenants, NULL, true, 78), "two");
    cr_expect_str_eq(who(tenants, NULL, true, 5), "operator");
    cr_expect_str_eq(who(tenants, NULL, true, 0), "nobody");
    cr_expect_str_eq(who(tenants, NULL, false, 77), "nobody");
    /* A wrong token is refused even where the uid would do; so is a part of a right one. */
    cr_expect_str_eq(who(tenants, "token-of-engine-c", true, 77), "nobody");
    cr_expect_str_eq(who(tenants, "token-of-engine-", true, 77), "nobody");
    cr_expect_str_eq(who(tenants, TOKEN_A "x", true, 77), "nobody");
    cr_expect_str_eq(who(tenants, "", true, 77), "nobody");
    cr_expect_null(strstr(error.text, "token-of"), "%s", error.text);
    kvk_tenants_destroy(tenants);
    kvk_config_finish(&config);
}

static enum kvk_status tenant_named(const struct kvk_credential *credential, const char *name,
                                    const char *expected)
{
    const struct kvk_tenant *tenant = NULL;
    enum kvk_status status =
        kvk_credential_tenant(credential, (const uint8_t *)name, strlen(name), &tenant, &error);
    if (status == KVK_OK) {
        cr_expect_str_eq(tenant->name, expected);
    }
    return status;
}

Test(engine_tenant, acts_for_its_own_alone)
{
    struct kvk_config config;
    struct kvk_tenants *tenants = NULL;
    const struct kvk_credential *one = NULL;
    const struct kvk_credential *administrator = NULL;

    table_config(&config);
    cr_assert_eq(kvk_tenants_create(&config, &tenants, &error), KVK_OK);
    cr_assert_eq(kvk_tenants_authenticate(tenants, (const uint8_t *)TOKEN_A, strlen(TOKEN_A), false,
                                          0, &one, &error),
                 KVK_OK);
    cr_assert_eq(kvk_tenants_authenticate(tenants, NULL, 0, true, 5, &administrator, &error),
                 KVK_OK);

    cr_expect_eq(tenant_named(one, "", "b"), KVK_OK);
    cr_expect_eq(tenant_named(one, "a", "a"), KVK_OK);
    cr_expect_eq(tenant_named(one, "\xff", ""), KVK_INVALID);
    cr_expect_str_eq(error.field, "tenant");

    /* One answer, whether there is such a tenant or not. */
    cr_expect_eq(tenant_named(one, "c", ""), KVK_PERMISSION);
    struct kvk_error first = error;
    cr_expect_eq(tenant_named(one, "zzz", ""), KVK_PERMISSION);
    cr_expect_eq(memcmp(&first, &error, sizeof(error)), 0);

    cr_expect(kvk_credential_allows(one, kvk_tenants_get(tenants, 0)));
    cr_expect_not(kvk_credential_allows(one, kvk_tenants_get(tenants, 2)));
    cr_expect_eq(tenant_named(administrator, "", ""), KVK_PERMISSION);
    cr_expect_eq(tenant_named(administrator, "a", ""), KVK_PERMISSION);
    kvk_tenants_destroy(tenants);
    kvk_config_finish(&config);
}

/* Each tenant hashes with a secret of its own. */
Test(engine_tenant, secrets_differ)
{
    struct kvk_config config;
    struct kvk_tenants *tenants = NULL;
    const uint32_t tokens[4] = {1, 2, 3, 4};
    const struct kvk_key root = {0, 0};

    table_config(&config);
    cr_assert_eq(kvk_tenants_create(&config, &tenants, &error), KVK_OK);
    struct kvk_key keys[3];
    for (uint32_t i = 0; i < 3; i++) {
        keys[i] = kvk_key_block(&kvk_tenants_get(tenants, i)->hasher, root, tokens, 4, NULL, 0);
    }
    cr_expect_not(kvk_key_equal(keys[0], keys[1]));
    cr_expect_not(kvk_key_equal(keys[1], keys[2]));
    struct kvk_key a =
        kvk_key_block(&kvk_tenants_get(tenants, 0)->hasher_constant, root, tokens, 4, NULL, 0);
    struct kvk_key b =
        kvk_key_block(&kvk_tenants_get(tenants, 0)->hasher_constant, root, tokens, 3, NULL, 0);
    cr_expect(kvk_key_equal(a, b));
    kvk_tenants_destroy(tenants);
    kvk_config_finish(&config);
}

/* What the files would not say, code may: it is checked all the same. */
Test(engine_tenant, a_wrong_table_is_refused)
{
    struct kvk_config config;
    struct kvk_tenants *tenants = NULL;

    table_config(&config);
    strcpy(config.credentials[0].token, "short");
    cr_expect_eq(kvk_tenants_create(&config, &tenants, &error), KVK_INVALID);
    strcpy(config.credentials[0].token, TOKEN_B);
    cr_expect_eq(kvk_tenants_create(&config, &tenants, &error), KVK_INVALID);
    strcpy(config.credentials[0].token, TOKEN_A);
    config.credentials[1].uids[0] = 5;
    config.credentials[1].tenants[0] = 3;
    cr_expect_eq(kvk_tenants_create(&config, &tenants, &error), KVK_INVALID);
    cr_expect_null(tenants);
    kvk_config_finish(&config);
}
