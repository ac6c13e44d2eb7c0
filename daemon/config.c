#include "daemon/config.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/options.h"
#include "daemon/config_table.h"
#include "daemon/quota.h"
#include "index/shards.h"

/* ---- Life ---- */

static void settle(struct kvk_config *config)
{
    if (config->unix_path[0] == '\0') {
        kvk_socket_path_daemon(config->unix_path);
    }
}

void kvk_config_init(struct kvk_config *config)
{
    *config = (struct kvk_config){.test_hooks = false};
    kvk_options_init(&kvk_config_table, config);
    settle(config);
}

void kvk_config_finish(struct kvk_config *config)
{
    if (config->credentials != NULL) {
        kvk_secret_wipe(config->credentials,
                        config->credential_count * sizeof(config->credentials[0]));
    }
    free(config->tenants);
    free(config->credentials);
    *config = (struct kvk_config){.test_hooks = false};
}

void kvk_config_forget_tokens(struct kvk_config *config)
{
    for (uint32_t i = 0; i < config->credential_count; i++) {
        kvk_secret_wipe(config->credentials[i].token, sizeof(config->credentials[i].token));
    }
}

/* What the file said about credentials, as the configuration keeps it. */
static enum kvk_status keep_credentials(struct kvk_config_file *file, struct kvk_error *error)
{
    struct kvk_config *config = &file->config;

    if (file->credential_count == 0) {
        return KVK_OK;
    }
    config->credentials = calloc(file->credential_count, sizeof(config->credentials[0]));
    if (config->credentials == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "config", "no memory");
    }
    for (uint32_t i = 0; i < file->credential_count; i++) {
        config->credentials[i] = file->credentials[i].credential;
    }
    config->credential_count = file->credential_count;
    return KVK_OK;
}

enum kvk_status kvk_config_load(struct kvk_config *config, const char *path,
                                struct kvk_error *error)
{
    /* Tables of a file replace those of before, whole; a failure leaves the target as it was. */
    struct kvk_config_file file = {.config = *config};
    file.config.tenants = NULL;
    file.config.tenant_count = 0;
    file.config.credentials = NULL;
    file.config.credential_count = 0;

    enum kvk_status status = kvk_options_load(&kvk_config_table, &file, path, error);
    if (status == KVK_OK) {
        settle(&file.config);
        status = keep_credentials(&file, error);
    }
    if (status == KVK_OK) {
        struct kvk_error inner = {.status = KVK_OK};
        status = kvk_config_check(&file.config, &inner);
        if (status != KVK_OK) {
            status = kvk_fail_limit(error, status, inner.cause, inner.field, inner.value,
                                    inner.limit, "%s: %s", path, inner.text);
        }
    }
    if (file.credentials != NULL) {
        kvk_secret_wipe(file.credentials, KVK_CREDENTIAL_COUNT_MAX * sizeof(file.credentials[0]));
        free(file.credentials);
    }
    if (status != KVK_OK) {
        kvk_config_finish(&file.config);
        return status;
    }
    kvk_config_finish(config);
    *config = file.config;
    return KVK_OK;
}

void kvk_config_print_default(void)
{
    kvk_options_print(&kvk_config_table, stdout);
}

void kvk_config_print_manual(FILE *file)
{
    (void)fputs("# Configuration\n"
                "\n"
                "`kvkeepd --config FILE` reads this file; without one it runs on the defaults "
                "below. `kvkeepd --config FILE --check-config`\n"
                "says whether a file is right, and what it names that is not on this machine, and "
                "exits. This page is printed from the table that reads the file.\n"
                "\n"
                "Sizes take a unit (`B`, `KiB`, `MiB`, `GiB`, `TiB`), durations too (`ms`, `s`, "
                "`min`, `h`); only 0 needs none.\n"
                "A comment begins with `#` or `;`; quotes keep blanks, `#` and `;`. A file that "
                "is wrong is refused with its name, line,\n"
                "section and field, and the limit.\n"
                "\n"
                "```ini\n"
                "[tiers]\n"
                "device_bytes = 8 GiB\n"
                "host_bytes = 64 GiB\n"
                "\n"
                "[tenant research]\n"
                "[tenant production]\n"
                "\n"
                "[credential engine-0]      # an engine that serves both\n"
                "token = 8d0f0c6e2b7a4a559f\n"
                "tenants = production, research\n"
                "\n"
                "[credential operator]\n"
                "uids = 1000\n"
                "tenants = production\n"
                "admin = yes\n"
                "```\n"
                "\n",
                file);
    kvk_options_print_markdown(&kvk_config_table, file);
}

/* ---- What single fields cannot show ---- */

static enum kvk_status refuse(struct kvk_error *error, const char *field, const char *reason)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %s", field, reason);
}

static enum kvk_status refuse_credential(struct kvk_error *error,
                                         const struct kvk_credential_config *credential,
                                         const char *name, const char *reason)
{
    char field[KVK_ERROR_FIELD_SIZE];

    (void)snprintf(field, sizeof(field), "credential %.36s.%s", credential->name, name);
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %s", field, reason);
}

static bool share_uid(const struct kvk_credential_config *a, const struct kvk_credential_config *b)
{
    for (uint32_t i = 0; i < a->uid_count; i++) {
        for (uint32_t j = 0; j < b->uid_count; j++) {
            if (a->uids[i] == b->uids[j]) {
                return true;
            }
        }
    }
    return false;
}

static enum kvk_status credential_check(const struct kvk_config *config, uint32_t index,
                                        struct kvk_error *error)
{
    KVK_ASSERT(config->credentials != NULL);
    const struct kvk_credential_config *credential = &config->credentials[index];
    size_t token_size = strlen(credential->token);

    if (token_size == 0 && credential->uid_count == 0 && credential->certificate[0] == '\0') {
        return refuse_credential(error, credential, "token",
                                 "a credential needs a token, a certificate or uids");
    }
    if (credential->certificate[0] != '\0' &&
        config->tls_client_certificates == KVK_CLIENT_CERTIFICATES_NO) {
        return refuse_credential(error, credential, "certificate",
                                 "nobody could show it: tls.client_certificates is no");
    }
    if (token_size > 0 && token_size < KVK_TOKEN_TEXT_SIZE_MIN) {
        return refuse_credential(error, credential, "token", "must have at least 16 bytes");
    }
    if (credential->tenant_count == 0 && !credential->admin) {
        return refuse_credential(error, credential, "tenants",
                                 "it may act for no tenant and is no admin");
    }
    for (uint32_t i = 0; i < credential->tenant_count; i++) {
        if (credential->tenants[i] >= config->tenant_count) {
            return refuse_credential(error, credential, "tenants", "no such tenant");
        }
    }
    for (uint32_t i = 0; i < index; i++) {
        const struct kvk_credential_config *other = &config->credentials[i];
        if (token_size > 0 && strcmp(other->token, credential->token) == 0) {
            return refuse_credential(error, credential, "token",
                                     "another credential has the same token");
        }
        if (credential->certificate[0] != '\0' &&
            strcmp(other->certificate, credential->certificate) == 0) {
            return refuse_credential(error, credential, "certificate",
                                     "another credential has the same certificate");
        }
        if (share_uid(other, credential)) {
            return refuse_credential(error, credential, "uids",
                                     "another credential has one of these uids");
        }
    }
    return KVK_OK;
}

static enum kvk_status tenants_check(const struct kvk_config *config, struct kvk_error *error)
{
    /* With a catalogue there may be more of both than the file knows. */
    bool alone = config->durable_folder[0] == '\0';
    if (config->tenant_count == 0 && config->credential_count > 0 && alone) {
        return refuse(error, "tenant", "credentials are there, but no [tenant NAME]");
    }
    if (config->tenant_count > 0 && config->credential_count == 0 && alone) {
        return refuse(error, "credential",
                      "tenants are there, but no [credential NAME]: nobody could call");
    }
    for (uint32_t i = 0; i < config->credential_count; i++) {
        enum kvk_status status = credential_check(config, i, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* Certificates and what they need; the files themselves are read by the server. */
static enum kvk_status tls_check(const struct kvk_config *config, struct kvk_error *error)
{
    bool certificate = config->tls_certificate[0] != '\0';
    bool key = config->tls_key[0] != '\0';
    bool asks = config->tls_client_certificates != KVK_CLIENT_CERTIFICATES_NO;
    if (certificate != key) {
        return refuse(error, certificate ? "tls.key" : "tls.certificate",
                      "a certificate and its key come together");
    }
    if (asks && !certificate) {
        return refuse(error, "tls.certificate",
                      "clients can show certificates only where the daemon has one");
    }
    if (asks && config->tls_client_ca[0] == '\0') {
        return refuse(error, "tls.client_ca", "says which clients' certificates are valid");
    }
    if (!asks && config->tls_client_ca[0] != '\0') {
        return refuse(error, "tls.client_certificates",
                      "a client_ca is there, but clients are not asked for certificates");
    }
    if (certificate && config->tcp_address[0] == '\0') {
        return refuse(error, "server.tcp_address", "a certificate is there, but no address");
    }
    return KVK_OK;
}

static bool is_loopback(const char *address)
{
    return strncmp(address, "127.", 4) == 0 || strncmp(address, "[::1]:", 6) == 0 ||
           strncmp(address, "localhost:", 10) == 0;
}

static enum kvk_status tcp_check(const struct kvk_config *config, struct kvk_error *error)
{
    if (config->tcp_address[0] == '\0') {
        return KVK_OK;
    }
    bool has_proof = config->durable_folder[0] != '\0'; /* the catalogue's */
    for (uint32_t i = 0; i < config->credential_count; i++) {
        has_proof = has_proof || config->credentials[i].token[0] != '\0' ||
                    config->credentials[i].certificate[0] != '\0';
    }
    if (config->credential_count == 0 && !config->tcp_insecure && !has_proof) {
        return refuse(error, "server.tcp_address",
                      "TCP without credentials lets anybody in: add [credential NAME], or say "
                      "insecure = yes");
    }
    if (config->credential_count > 0 && !has_proof) {
        return refuse(error, "server.tcp_address",
                      "no credential has a token or a certificate, so that nobody could call over "
                      "TCP");
    }
    bool open_to_all = config->tcp_insecure && config->credential_count == 0;
    if (has_proof && !open_to_all && config->tls_certificate[0] == '\0' &&
        !config->tokens_in_clear && !is_loopback(config->tcp_address)) {
        return refuse(error, "server.tcp_address",
                      "tokens would travel in clear: add [tls], or say tokens_in_clear = yes");
    }
    return KVK_OK;
}

static enum kvk_status server_check(const struct kvk_config *config, struct kvk_error *error)
{
    if (strlen(config->unix_path) + KVK_SOCKET_SUFFIX_SIZE >= KVK_PATH_SIZE) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "server.unix_path",
                              strlen(config->unix_path), KVK_PATH_SIZE - 1 - KVK_SOCKET_SUFFIX_SIZE,
                              "server.unix_path: must be at most %d bytes",
                              KVK_PATH_SIZE - 1 - KVK_SOCKET_SUFFIX_SIZE);
    }
    if (strcmp(config->unix_path, config->side_path) == 0) {
        return refuse(error, "server.side_path", "must differ from unix_path");
    }
    enum kvk_status status = tls_check(config, error);
    return status == KVK_OK ? tcp_check(config, error) : status;
}

/* Each tenant's own, and all their guarantees together. */
static enum kvk_status quotas_check(const struct kvk_config *config, struct kvk_error *error)
{
    const uint64_t pool_bytes[KVK_TIER_COUNT] = {config->device_bytes, config->host_bytes,
                                                 config->disk_bytes};
    uint64_t guaranteed_bytes[KVK_TIER_COUNT] = {0};
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        struct kvk_tenant_quota quota = config->tenants[i].quota;
        struct kvk_error inner;
        quota.over_quota = (uint8_t)config->tenants[i].over_quota;
        enum kvk_status status = kvk_quota_check(&quota, pool_bytes, guaranteed_bytes, &inner);
        if (status != KVK_OK) {
            char field[KVK_ERROR_FIELD_SIZE];
            (void)snprintf(field, sizeof(field), "tenant %.24s.%.30s", config->tenants[i].name,
                           inner.field);
            return kvk_fail_limit(error, status, inner.cause, field, inner.value, inner.limit,
                                  "tenant %.40s: %s", config->tenants[i].name, inner.text);
        }
        for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
            guaranteed_bytes[tier] += quota.guaranteed_bytes[tier];
        }
    }
    return KVK_OK;
}

enum kvk_status kvk_config_check(const struct kvk_config *config, struct kvk_error *error)
{
    enum kvk_status status = server_check(config, error);
    if (status != KVK_OK) {
        return status;
    }
    if (config->disk_bytes > 0 && config->durable_folder[0] == '\0') {
        return refuse(error, "durable.disk_bytes",
                      "disk_bytes is given, but no durable.folder to keep blocks in");
    }
    if (config->device_bytes == 0 && config->host_bytes == 0) {
        return refuse(
            error, "tiers.device_bytes",
            "device_bytes and host_bytes are both 0: there would be no memory for blocks");
    }
    if (config->instances > config->sessions) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "limits.sessions",
                              config->sessions, config->instances,
                              "limits.sessions: %u is less than limits.instances (%u), and every "
                              "instance has a session",
                              config->sessions, config->instances);
    }
    if (config->mrc_samples > 0 && config->mrc_samples < KVK_SHARDS_SAMPLES_MIN) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "limits.mrc_samples",
                              config->mrc_samples, KVK_SHARDS_SAMPLES_MIN,
                              "limits.mrc_samples: %u is too few to tell anything: 0, or at least "
                              "%u",
                              config->mrc_samples, KVK_SHARDS_SAMPLES_MIN);
    }
    status = kvk_config_remote_check(config, error);
    if (status != KVK_OK) {
        return status;
    }
    status = quotas_check(config, error);
    return status == KVK_OK ? tenants_check(config, error) : status;
}
