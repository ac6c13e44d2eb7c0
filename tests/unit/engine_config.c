/* The configuration: defaults, limits, what a wrong file is told, and the manual's page. */
#include "daemon/config.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static enum kvk_status load(struct kvk_config *config, const char *text, struct kvk_error *error)
{
    char path[] = "/tmp/kvkeep-config-XXXXXX";
    int fd = mkstemp(path);
    cr_assert(fd >= 0);
    cr_assert_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    (void)close(fd);
    kvk_config_init(config);
    enum kvk_status status = kvk_config_load(config, path, error);
    (void)unlink(path);
    return status;
}

/* The file is refused, and the sentence has all of these words. */
static void refused(const char *text, const char *place, const char *reason)
{
    struct kvk_config config;
    struct kvk_error error = {.status = KVK_OK};

    cr_expect_eq(load(&config, text, &error), KVK_INVALID, "accepted: %s", text);
    cr_expect(strstr(error.text, place) != NULL, "\"%s\" lacks \"%s\"", error.text, place);
    cr_expect(strstr(error.text, reason) != NULL, "\"%s\" lacks \"%s\"", error.text, reason);
    cr_expect(strstr(error.text, "/tmp/kvkeep-config-") != NULL, "no file: %s", error.text);
    kvk_config_finish(&config);
}

Test(engine_config, defaults_are_right)
{
    struct kvk_config config;
    struct kvk_error error;

    kvk_config_init(&config);
    cr_expect_eq(kvk_config_check(&config, &error), KVK_OK, "%s", error.text);
    cr_expect_eq(config.device_bytes, UINT64_C(1) << 30);
    cr_expect_eq(config.host_bytes, UINT64_C(4) << 30);
    cr_expect_eq(config.policy, KVK_EVICT_RP_COST);
    cr_expect_eq(config.unix_mode, 0600);
    cr_expect_eq(config.lease_ms, 600000);
    cr_expect(strstr(config.unix_path, "/kvkeep.sock") != NULL);
    kvk_config_finish(&config);
}

Test(engine_config, socket_is_in_the_runtime_folder)
{
    struct kvk_config config;
    char folder[] = "/tmp/kvkeep-run-XXXXXX";

    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(setenv("XDG_RUNTIME_DIR", folder, 1), 0);
    kvk_config_init(&config);
    cr_expect_eq(strncmp(config.unix_path, folder, strlen(folder)), 0);
    cr_expect_str_eq(config.unix_path + strlen(folder), "/kvkeep.sock");
    kvk_config_finish(&config);

    /* Not a folder, and not absolute: passed over. */
    cr_assert_eq(rmdir(folder), 0);
    kvk_config_init(&config);
    cr_expect_neq(strncmp(config.unix_path, folder, strlen(folder)), 0);
    kvk_config_finish(&config);
    cr_assert_eq(setenv("XDG_RUNTIME_DIR", "here", 1), 0);
    kvk_config_init(&config);
    cr_expect_eq(config.unix_path[0], '/');
    kvk_config_finish(&config);
}

Test(engine_config, a_file_goes_over_the_defaults)
{
    struct kvk_config config;
    struct kvk_error error;

    cr_assert_eq(load(&config,
                      "[server]\nunix_path = /tmp/x.sock\nunix_mode = 0660\n"
                      "tcp_address = 127.0.0.1:0\n"
                      "[tiers]\ndevice_bytes = 0\nhost_bytes = 64 MiB\nhuge_pages = no\n"
                      "[cache]\npolicy = lru\n"
                      "[limits]\nlease_ms = 2 min\nsequences = 7\n"
                      "[tenant a]\n[tenant b b]\n"
                      "[credential one]\ntoken = 0123456789abcdef\ntenants = b b, a\n"
                      "[credential two]\nuids = 0, 1000\ntenants = a\nadmin = yes\n",
                      &error),
                 KVK_OK, "%s", error.text);
    cr_expect_str_eq(config.unix_path, "/tmp/x.sock");
    cr_expect_eq(config.unix_mode, 0660);
    cr_expect_eq(config.device_bytes, 0);
    cr_expect_eq(config.host_bytes, UINT64_C(64) << 20);
    cr_expect_not(config.huge_pages);
    cr_expect_eq(config.policy, KVK_EVICT_LRU);
    cr_expect_eq(config.lease_ms, 120000);
    cr_expect_eq(config.sequences, 7);
    cr_expect_eq(config.leases, 65536);
    cr_assert_eq(config.tenant_count, 2);
    cr_expect_str_eq(config.tenants[1].name, "b b");
    cr_assert_eq(config.credential_count, 2);
    cr_expect_str_eq(config.credentials[0].token, "0123456789abcdef");
    cr_expect_eq(config.credentials[0].tenant_count, 2);
    cr_expect_eq(config.credentials[0].tenants[0], 1);
    cr_expect_eq(config.credentials[0].tenants[1], 0);
    cr_expect_eq(config.credentials[1].uid_count, 2);
    cr_expect_eq(config.credentials[1].uids[1], 1000);
    cr_expect(config.credentials[1].admin);
    kvk_config_finish(&config);
}

/* Case L1: sizes that cannot be are told where they stand and what would do. */
Test(engine_config, l1_wrong_values)
{
    refused("[tiers]\ndevice_bytes = -1\n", ":2: tiers.device_bytes", "negative");
    refused("[tiers]\n\nhost_bytes = NaN\n", ":3: tiers.host_bytes", "whole number");
    refused("[tiers]\nhost_bytes = 12\n", ":2: tiers.host_bytes", "unit");
    refused("[tiers]\ndevice_bytes = 0\nhost_bytes = 0\n", "tiers.device_bytes", "both 0");
    refused("[tiers]\ndevice_free_percent = 51\n", ":2: tiers.device_free_percent", "0 to 50");
    refused("[tiers]\ncopy_threads = 0\n", ":2: tiers.copy_threads", "1 to 64");
    refused("[cache]\npolicy = fifo\n", ":2: cache.policy", "lru or rp-cost");
    refused("[limits]\nsequences = 0\n", ":2: limits.sequences", "1 to 16777216");
    refused("[limits]\nlease_ms = 10\n", ":2: limits.lease_ms", "unit");
    refused("[limits]\nsessions = 8\ninstances = 9\n", "limits.sessions", "instance");
    refused("[limits]\nseats = 8\n", ":2: limits.seats", "no such field");
    refused("[server]\nunix_mode = 0999\n", ":2: server.unix_mode", "");
}

Test(engine_config, sockets)
{
    char text[256];
    char path[128];

    memset(path, 'p', sizeof(path));
    path[103] = '\0';
    (void)snprintf(text, sizeof(text), "[server]\nunix_path = /%s\n", path + 1);
    refused(text, ":2: server.unix_path", "0 to 102 bytes");
    refused("[server]\nunix_path = /tmp/a\nside_path = /tmp/a\n", "server.side_path", "differ");
    refused("[server]\ntcp_address = 0.0.0.0:1\n", "server.tcp_address", "insecure = yes");
    refused("[server]\ntcp_address = 0.0.0.0:1\n[tenant a]\n[credential c]\nuids = 1\n"
            "tenants = a\n",
            "server.tcp_address", "no credential has a token");

    struct kvk_config config;
    struct kvk_error error;
    cr_expect_eq(load(&config, "[server]\ntcp_address = 0.0.0.0:1\ninsecure = yes\n", &error),
                 KVK_OK, "%s", error.text);
    kvk_config_finish(&config);
}

Test(engine_config, tenants_and_credentials)
{
    const char *c = ":3: credential c";

    refused("[tenant a]\n", "credential", "nobody could call");
    refused("[credential c]\nuids = 1\nadmin = yes\n", "tenant", "no [tenant NAME]");
    refused("[tenant a]\n[credential c]\ntoken = short-secret\ntenants = a\n", c, "16 to 255");
    refused("[tenant a]\n[credential c]\ntoken = 0123456789 abcdef\ntenants = a\n", c, "ASCII");
    refused("[tenant a]\n[credential c]\ntenants = b\n", c, "[tenant b]");
    refused("[tenant a]\n[credential c]\ntenants = a, a\n", c, "twice");
    refused("[tenant a]\n[credential c]\ntenants = a\n", "credential c.token",
            "a certificate or uids");
    refused("[tenant a]\n[credential c]\nuids = 1\n", "credential c.tenants", "no tenant");
    refused("[tenant a]\n[credential c]\nuids = 4294967295\n", c, "uids");
    refused("[tenant a]\n[credential c]\nuids = 1x\n", c, "uids");
    refused("[tenant a]\n[credential c]\nuids = 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17\n", c,
            "more than 16");
    refused("[tenant a]\n[tenant a]\n", ":2: tenant a", "twice");
    refused("[tenant a,b]\n", ":1: tenant a,b", "commas");
    refused("[tenant a\x01]\n", ":1: ", "cannot be seen");
    refused("[tenant \xff]\n", ":1: ", "UTF-8");
    refused("[tenant a]\nname = b\n", ":2: tenant a.name", "no such field");
    refused("[tenant a]\n[credential c]\nuids = 1\ntenants = a\n[credential d]\nuids = 2,1\n"
            "tenants = a\n",
            "credential d.uids", "another credential");
    refused("[tenant a]\n[credential c]\ntoken = 0123456789abcdef\ntenants = a\n[credential d]\n"
            "token = 0123456789abcdef\ntenants = a\n",
            "credential d.token", "another credential");
}

/* Case A7: names that look alike are one name, and a name is no path. */
Test(engine_config, a7_names_have_one_spelling)
{
    struct kvk_config config;
    struct kvk_error error;

    cr_assert_eq(load(&config,
                      "[tenant A\xcc\x8a]\n[tenant ../x]\n"
                      "[credential c]\nuids = 1\ntenants = \xe2\x84\xab\n",
                      &error),
                 KVK_OK, "%s", error.text);
    cr_expect_eq(config.tenant_count, 2);
    cr_expect_str_eq(config.tenants[0].name, "\xc3\x85");
    cr_expect_str_eq(config.tenants[1].name, "../x");
    cr_expect_eq(config.credentials[0].tenants[0], 0);
    kvk_config_finish(&config);
    refused("[tenant \xc3\x85]\n[tenant \xe2\x84\xab]\n", ":2: tenant ", "two spellings");
    refused("[tenant a]\n[credential \xc3\x85]\nuids = 1\ntenants = a\n[credential A\xcc\x8a]\n",
            ":5: credential ", "two spellings");
    refused("[tenant a\xe2\x80\x8b]\n", ":1: ", "cannot be seen");
}

Test(engine_config, quotas_of_a_tenant)
{
    struct kvk_config config;
    struct kvk_error error;

    cr_assert_eq(load(&config,
                      "[tenant a]\ndevice_limit_bytes = 1 GiB\nhost_guaranteed_bytes = 2 GiB\n"
                      "disk_limit_bytes = 3 GiB\nsequences = 4\nleases = 5\n"
                      "requests_per_second = 6\nrequest_burst = 7\nover_quota = refuse\n"
                      "idle_ms = 8 s\nmode = shadow\nmay_publish = yes\n[tenant b]\n"
                      "[credential c]\nuids = 1\ntenants = a\n",
                      &error),
                 KVK_OK, "%s", error.text);
    const struct kvk_tenant_config *a = &config.tenants[0];
    cr_expect_eq(a->quota.limit_bytes[0], UINT64_C(1) << 30);
    cr_expect_eq(a->quota.guaranteed_bytes[0], 0);
    cr_expect_eq(a->quota.guaranteed_bytes[1], UINT64_C(2) << 30);
    cr_expect_eq(a->quota.limit_bytes[2], UINT64_C(3) << 30);
    cr_expect_eq(a->quota.sequences, 4);
    cr_expect_eq(a->quota.leases, 5);
    cr_expect_eq(a->quota.requests_per_second, 6);
    cr_expect_eq(a->quota.request_burst, 7);
    cr_expect_eq(a->over_quota, 1);
    cr_expect_eq(a->quota.idle_ms, 8000);
    cr_expect_eq(a->mode, KVK_TENANT_SHADOW);
    cr_expect(a->may_publish);
    cr_expect_eq(config.tenants[1].mode, KVK_TENANT_ON);
    cr_expect_eq(config.tenants[1].quota.limit_bytes[0], 0);
    kvk_config_finish(&config);
    refused("[tenant a]\nmode = dark\n", ":2: tenant a.mode", "on, shadow or off");
}

#define TCP "[server]\ntcp_address = 10.0.0.1:1\n"
#define ONE "[tenant a]\n[credential c]\ntoken = 0123456789abcdef\ntenants = a\n"

/* Tokens do not travel in clear unless somebody said so, and certificates come whole. */
Test(engine_config, tls)
{
    struct kvk_config config;
    struct kvk_error error;

    refused(TCP ONE, "server.tcp_address", "tokens_in_clear");
    refused(TCP "[tls]\ncertificate = /c\n" ONE, "tls.key", "together");
    refused(TCP "[tls]\nkey = /k\n" ONE, "tls.certificate", "together");
    refused(TCP "[tls]\nclient_certificates = require\n" ONE, "tls.certificate", "daemon has one");
    refused(TCP "[tls]\ncertificate = /c\nkey = /k\nclient_certificates = request\n" ONE,
            "tls.client_ca", "valid");
    refused(TCP "[tls]\ncertificate = /c\nkey = /k\nclient_ca = /a\n" ONE,
            "tls.client_certificates", "not asked");
    refused("[tls]\ncertificate = /c\nkey = /k\n" ONE, "server.tcp_address", "no address");
    refused(ONE "[credential d]\ncertificate = engine\ntenants = a\n", "credential d.certificate",
            "client_certificates is no");
    const char *fine[] = {
        TCP "tokens_in_clear = yes\n" ONE,
        "[server]\ntcp_address = 127.0.0.1:1\n" ONE,
        "[server]\ntcp_address = [::1]:1\n" ONE,
        TCP "[tls]\ncertificate = /c\nkey = /k\n" ONE,
        TCP "[tls]\ncertificate = /c\nkey = /k\nclient_ca = /a\nclient_certificates = require\n"
            "[tenant a]\n[credential d]\ncertificate = engine\ntenants = a\n",
        TCP "[tls]\ncertificate = /c\nkey = /k\n[durable]\nfolder = /d\n",
        "[durable]\nfolder = /d\n[credential c]\nuids = 1\nadmin = yes\n",
    };
    for (size_t i = 0; i < sizeof(fine) / sizeof(fine[0]); i++) {
        cr_expect_eq(load(&config, fine[i], &error), KVK_OK, "%zu: %s", i, error.text);
        kvk_config_finish(&config);
    }
    refused(TCP "[tls]\ncertificate = /c\nkey = /k\nclient_ca = /a\nclient_certificates = require\n"
                "[tenant a]\n[credential c]\ncertificate = e\ntenants = a\n"
                "[credential d]\ncertificate = e\ntenants = a\n",
            "credential d.certificate", "same certificate");
}

Test(engine_config, a_secret_is_not_shown)
{
    struct kvk_config config;
    struct kvk_error error;

    cr_expect_eq(load(&config, "[tenant a]\n[credential c]\ntoken = hunter2hunter2\n", &error),
                 KVK_INVALID);
    cr_expect_null(strstr(error.text, "hunter2"), "%s", error.text);
    kvk_config_finish(&config);
}

/* A file that fails leaves what was there, its tenants too. */
Test(engine_config, failure_changes_nothing)
{
    struct kvk_config config;
    struct kvk_error error;

    cr_assert_eq(load(&config, "[tenant a]\n[credential c]\nuids = 1\ntenants = a\n", &error),
                 KVK_OK);
    cr_expect_eq(kvk_config_load(&config, "/nonexistent/file", &error), KVK_INVALID);
    cr_expect(strstr(error.text, "/nonexistent/file") != NULL);
    cr_expect_eq(config.tenant_count, 1);
    cr_expect_str_eq(config.tenants[0].name, "a");
    cr_expect_eq(config.credential_count, 1);
    kvk_config_finish(&config);
}

/* docs/configuration.md is what the table says. KVKEEP_UPDATE_DOCS=1 in the environment writes it
 * anew. */
Test(engine_config, manual_is_current)
{
    char path[4096];
    char *printed = NULL;
    size_t printed_size = 0;

    (void)snprintf(path, sizeof(path), "%s", __FILE__);
    char *end = strstr(path, "tests/unit/");
    cr_assert_not_null(end);
    (void)snprintf(end, sizeof(path) - (size_t)(end - path), "docs/configuration.md");
    FILE *memory = open_memstream(&printed, &printed_size);
    cr_assert_not_null(memory);
    kvk_config_print_manual(memory);
    cr_assert_eq(fclose(memory), 0);

    if (getenv("KVKEEP_UPDATE_DOCS") != NULL) {
        FILE *target = fopen(path, "w");
        cr_assert_not_null(target);
        cr_assert_eq(fwrite(printed, 1, printed_size, target), printed_size);
        cr_assert_eq(fclose(target), 0);
    }
    FILE *file = fopen(path, "r");
    cr_assert_not_null(file, "%s is missing", path);
    char *there = calloc(1, printed_size + 2);
    size_t size = fread(there, 1, printed_size + 1, file);
    (void)fclose(file);
    cr_expect_eq(size, printed_size, "docs/configuration.md is not what the table says");
    cr_expect_str_eq(there, printed, "docs/configuration.md is not what the table says");
    free(there);
    free(printed);
}
