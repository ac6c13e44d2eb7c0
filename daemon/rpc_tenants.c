/*
 * Tenants and credentials, for administrators. Every call that changes something is noted in the
 * audit log before it is answered, refused ones too; tokens go into the answer and nowhere else.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/unicode.h"
#include "daemon/forget.h"
#include "daemon/quota.h"
#include "daemon/rpc_private.h"
#include "daemon/tenant_admin.h"

#define DETAILS_SIZE 512
#define WARNING_SIZE 256

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
}

static enum kvk_status take_name(const ProtobufCBinaryData *bytes, const char *field,
                                 char name[KVK_NAME_SIZE], struct kvk_error *error)
{
    name[0] = '\0';
    return kvk_name_normalise(bytes->data, bytes->len, field, name, KVK_NAME_SIZE, error);
}

/* ---- Modes and quotas ---- */

static enum kvk_status take_mode(Kvkeep__V1__Mode mode, bool *set, enum kvk_tenant_mode *result,
                                 struct kvk_error *error)
{
    *set = mode != KVKEEP__V1__MODE__MODE_UNSPECIFIED;
    switch ((int)mode) {
    case KVKEEP__V1__MODE__MODE_UNSPECIFIED:
    case KVKEEP__V1__MODE__MODE_ON:
        *result = KVK_TENANT_ON;
        return KVK_OK;
    case KVKEEP__V1__MODE__MODE_SHADOW:
        *result = KVK_TENANT_SHADOW;
        return KVK_OK;
    case KVKEEP__V1__MODE__MODE_OFF:
        *result = KVK_TENANT_OFF;
        return KVK_OK;
    default:
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "mode", "mode is none of the API's");
    }
}

Kvkeep__V1__Mode kvk_rpc_give_mode(enum kvk_tenant_mode mode)
{
    switch (mode) {
    case KVK_TENANT_ON:
        return KVKEEP__V1__MODE__MODE_ON;
    case KVK_TENANT_SHADOW:
        return KVKEEP__V1__MODE__MODE_SHADOW;
    case KVK_TENANT_OFF:
        return KVKEEP__V1__MODE__MODE_OFF;
    }
    KVK_UNREACHABLE();
}

static const char *mode_name(enum kvk_tenant_mode mode)
{
    static const char *const names[] = {"on", "shadow", "off"};
    return names[mode];
}

static enum kvk_status take_count(uint64_t value, const char *field, uint32_t *count,
                                  struct kvk_error *error)
{
    if (value > UINT32_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, UINT32_MAX,
                              "%s must be at most %u", field, UINT32_MAX);
    }
    *count = (uint32_t)value;
    return KVK_OK;
}

static enum kvk_status take_quota(const Kvkeep__V1__TenantQuota *message,
                                  struct kvk_tenant_quota *quota, struct kvk_error *error)
{
    *quota = (struct kvk_tenant_quota){
        .guaranteed_bytes = {[KVK_TIER_DEVICE] = message->device_guaranteed_bytes,
                             [KVK_TIER_HOST] = message->host_guaranteed_bytes,
                             [KVK_TIER_DISK] = message->disk_guaranteed_bytes},
        .limit_bytes = {[KVK_TIER_DEVICE] = message->device_limit_bytes,
                        [KVK_TIER_HOST] = message->host_limit_bytes,
                        [KVK_TIER_DISK] = message->disk_limit_bytes},
        .over_quota = message->refuse_over_quota ? KVK_OVER_QUOTA_REFUSE : KVK_OVER_QUOTA_EVICT,
        .idle_ms = message->idle_ms,
        .metadata_limit_bytes = message->metadata_limit_bytes};
    enum kvk_status status =
        take_count(message->sequences, "quota.sequences", &quota->sequences, error);
    if (status == KVK_OK) {
        status = take_count(message->leases, "quota.leases", &quota->leases, error);
    }
    if (status == KVK_OK) {
        status = take_count(message->requests_per_second, "quota.requests_per_second",
                            &quota->requests_per_second, error);
    }
    if (status == KVK_OK) {
        status =
            take_count(message->request_burst, "quota.request_burst", &quota->request_burst, error);
    }
    if (status == KVK_OK && quota->idle_ms > UINT64_MAX / 1000000) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "quota.idle_ms",
                          "quota.idle_ms is more than a clock counts");
    }
    return status;
}

static void give_quota(const struct kvk_tenant_quota *quota, Kvkeep__V1__TenantQuota *message)
{
    kvkeep__v1__tenant_quota__init(message);
    message->device_guaranteed_bytes = quota->guaranteed_bytes[KVK_TIER_DEVICE];
    message->host_guaranteed_bytes = quota->guaranteed_bytes[KVK_TIER_HOST];
    message->disk_guaranteed_bytes = quota->guaranteed_bytes[KVK_TIER_DISK];
    message->device_limit_bytes = quota->limit_bytes[KVK_TIER_DEVICE];
    message->host_limit_bytes = quota->limit_bytes[KVK_TIER_HOST];
    message->disk_limit_bytes = quota->limit_bytes[KVK_TIER_DISK];
    message->sequences = quota->sequences;
    message->leases = quota->leases;
    message->requests_per_second = quota->requests_per_second;
    message->request_burst = quota->request_burst;
    message->refuse_over_quota = quota->over_quota == KVK_OVER_QUOTA_REFUSE;
    message->idle_ms = quota->idle_ms;
    message->metadata_limit_bytes = quota->metadata_limit_bytes;
}

/* What changes, for the audit log. */
static void change_text(const struct kvk_tenant_change *change, char text[DETAILS_SIZE])
{
    size_t used = 0;
    text[0] = '\0';
    if (change->set_mode) {
        used += (size_t)snprintf(text, DETAILS_SIZE, "mode=%s ", mode_name(change->mode));
    }
    if (change->set_may_publish) {
        used += (size_t)snprintf(text + used, DETAILS_SIZE - used, "may_publish=%s ",
                                 change->may_publish ? "yes" : "no");
    }
    if (change->set_quota) {
        const struct kvk_tenant_quota *quota = &change->quota;
        (void)snprintf(
            text + used, DETAILS_SIZE - used,
            "guaranteed_bytes=%llu,%llu,%llu limit_bytes=%llu,%llu,%llu sequences=%u leases=%u "
            "requests_per_second=%u request_burst=%u over_quota=%s idle_ms=%llu "
            "metadata_limit_bytes=%llu",
            (unsigned long long)quota->guaranteed_bytes[0],
            (unsigned long long)quota->guaranteed_bytes[1],
            (unsigned long long)quota->guaranteed_bytes[2],
            (unsigned long long)quota->limit_bytes[0], (unsigned long long)quota->limit_bytes[1],
            (unsigned long long)quota->limit_bytes[2], quota->sequences, quota->leases,
            quota->requests_per_second, quota->request_burst,
            quota->over_quota == KVK_OVER_QUOTA_REFUSE ? "refuse" : "evict",
            (unsigned long long)quota->idle_ms, (unsigned long long)quota->metadata_limit_bytes);
    }
}

/* ---- CreateTenant ---- */

/* Made, and then its quota turns out impossible: as if it had never been. */
static void tenant_undo(struct kvk_rpc *rpc, const char *name)
{
    const struct kvk_tenant *tenant = NULL;
    uint32_t credentials = 0;
    if (kvk_tenants_retire(rpc->tenants, name, &tenant, &credentials, NULL) == KVK_OK) {
        (void)!kvk_tenants_remove(rpc->tenants, tenant, NULL);
    }
}

static enum kvk_status create_tenant(struct kvk_rpc *rpc, const char *name,
                                     const struct kvk_tenant_change *properties,
                                     Kvkeep__V1__CreateTenantResponse *response,
                                     struct kvk_error *error)
{
    const struct kvk_tenant *tenant = NULL;
    bool created = false;
    enum kvk_status status =
        kvk_tenants_add(rpc->tenants, name, properties, &tenant, &created, error);
    if (status != KVK_OK) {
        return status;
    }
    if (created) {
        status = kvk_quota_sync(rpc->cache, tenant, error);
        if (status != KVK_OK) {
            tenant_undo(rpc, name);
            return status;
        }
    }
    response->tenant_id = tenant->id;
    response->name = kvk_rpc_text(tenant->name);
    response->created = created;
    return KVK_OK;
}

static enum kvk_status create_tenant_read(const Kvkeep__V1__CreateTenantRequest *request,
                                          char name[KVK_NAME_SIZE],
                                          struct kvk_tenant_change *properties,
                                          struct kvk_error *error)
{
    *properties = (struct kvk_tenant_change){.set_may_publish = request->may_publish,
                                             .may_publish = request->may_publish};
    enum kvk_status status = take_name(&request->name, "name", name, error);
    if (status == KVK_OK) {
        status = take_mode(request->mode, &properties->set_mode, &properties->mode, error);
    }
    if (status == KVK_OK && request->quota != NULL) {
        properties->set_quota = true;
        status = take_quota(request->quota, &properties->quota, error);
    }
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_create_tenant)
{
    const Kvkeep__V1__CreateTenantRequest *request =
        (const Kvkeep__V1__CreateTenantRequest *)(const void *)message;
    Kvkeep__V1__CreateTenantResponse response = KVKEEP__V1__CREATE_TENANT_RESPONSE__INIT;
    struct kvk_tenant_change properties = {.set_quota = false};
    char name[KVK_NAME_SIZE] = "";
    char details[DETAILS_SIZE];
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = create_tenant_read(request, name, &properties, error);
    }
    if (status == KVK_OK) {
        status = create_tenant(run->rpc, name, &properties, &response, error);
    }
    change_text(&properties, details);
    kvk_rpc_audit(run, name, details, status, error);
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

/* ---- ListTenants ---- */

static void tenant_row(const struct kvk_tenant *tenant, Kvkeep__V1__TenantRow *row,
                       Kvkeep__V1__TenantQuota *quota)
{
    struct kvk_tenant_quota now;
    kvk_tenant_quota(tenant, &now);
    give_quota(&now, quota);
    kvkeep__v1__tenant_row__init(row);
    row->tenant_id = tenant->id;
    row->name = kvk_rpc_text(tenant->name);
    row->configured = tenant->configured;
    row->deleting = kvk_tenant_is_leaving(tenant);
    row->created_s = tenant->created_s;
    row->quota = quota;
    row->mode = kvk_rpc_give_mode(kvk_tenant_mode(tenant));
    row->may_publish = kvk_tenant_may_publish(tenant);
}

/* An admin sees all; another credential those that it acts for. */
KVK_RPC_HANDLER(kvk_rpc_list_tenants)
{
    (void)message;
    const struct kvk_credential *credential = run->caller.credential;
    struct kvk_rpc_arena *arena = &run->memory->arena;
    uint32_t count = kvk_tenants_count(run->rpc->tenants);
    Kvkeep__V1__TenantRow *rows = kvk_rpc_arena_take_extra(arena, (count + 1) * sizeof(*rows));
    Kvkeep__V1__TenantRow **pointers =
        kvk_rpc_arena_take_extra(arena, (count + 1) * sizeof(*pointers));
    Kvkeep__V1__TenantQuota *quotas =
        kvk_rpc_arena_take_extra(arena, (count + 1) * sizeof(*quotas));
    if (rows == NULL || pointers == NULL || quotas == NULL) {
        return no_memory(error);
    }
    Kvkeep__V1__ListTenantsResponse response = KVKEEP__V1__LIST_TENANTS_RESPONSE__INIT;
    response.tenants = pointers;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_tenant *tenant = kvk_tenants_get(run->rpc->tenants, i);
        if (tenant != NULL && (credential->admin || kvk_credential_allows(credential, tenant))) {
            size_t at = response.n_tenants++;
            tenant_row(tenant, &rows[at], &quotas[at]);
            pointers[at] = &rows[at];
        }
    }
    return kvk_rpc_reply(run, &response.base, error);
}

/* ---- ChangeTenant ---- */

/* `warning` of WARNING_SIZE: what of the new quota cannot be meant so; "": nothing. */
static enum kvk_status change_tenant(struct kvk_rpc *rpc, const char *name,
                                     const struct kvk_tenant_change *change, char *warning,
                                     struct kvk_error *error)
{
    warning[0] = '\0';
    const struct kvk_tenant *tenant = kvk_tenants_find_name(rpc->tenants, name, strlen(name));
    struct kvk_tenant_change back = {.set_quota = true};
    if (tenant != NULL) {
        kvk_tenant_quota(tenant, &back.quota);
    }
    enum kvk_status status = kvk_tenants_change(rpc->tenants, name, change, error);
    if (status != KVK_OK || !change->set_quota) {
        return status;
    }
    KVK_ASSERT(tenant != NULL);
    status = kvk_quota_sync(rpc->cache, tenant, error);
    if (status != KVK_OK) { /* impossible beside those of others: as it was */
        (void)!kvk_tenants_change(rpc->tenants, name, &back, NULL);
        (void)!kvk_quota_sync(rpc->cache, tenant, NULL);
    } else {
        kvk_quota_short_text(rpc->cache, tenant, warning, WARNING_SIZE);
    }
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_change_tenant)
{
    const Kvkeep__V1__ChangeTenantRequest *request =
        (const Kvkeep__V1__ChangeTenantRequest *)(const void *)message;
    Kvkeep__V1__ChangeTenantResponse response = KVKEEP__V1__CHANGE_TENANT_RESPONSE__INIT;
    struct kvk_tenant_change change = {.set_may_publish = request->set_may_publish,
                                       .may_publish = request->may_publish};
    char name[KVK_NAME_SIZE] = "";
    char details[DETAILS_SIZE];
    char warning[WARNING_SIZE] = "";
    char *warnings[] = {warning};
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = take_name(&request->name, "name", name, error);
    }
    if (status == KVK_OK) {
        status = take_mode(request->mode, &change.set_mode, &change.mode, error);
    }
    if (status == KVK_OK && request->quota != NULL) {
        change.set_quota = true;
        status = take_quota(request->quota, &change.quota, error);
    }
    if (status == KVK_OK) {
        status = change_tenant(run->rpc, name, &change, warning, error);
    }
    change_text(&change, details);
    kvk_rpc_audit(run, name, details, status, error);
    response.n_warnings = warning[0] != '\0' ? 1 : 0;
    response.warnings = warnings;
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

/* ---- DeleteTenant ---- */

static enum kvk_status delete_tenant(struct kvk_rpc_run *run, const char *name,
                                     uint32_t *credentials, struct kvk_forget_counts *counts,
                                     struct kvk_error *error)
{
    struct kvk_rpc *rpc = run->rpc;
    const struct kvk_tenant *tenant = NULL;
    enum kvk_status status = kvk_tenants_retire(rpc->tenants, name, &tenant, credentials, error);
    if (status == KVK_OK) {
        status = kvk_tenant_forget(rpc->cache, &run->caller, tenant, counts, error);
    }
    return status == KVK_OK ? kvk_tenants_remove(rpc->tenants, tenant, error) : status;
}

KVK_RPC_HANDLER(kvk_rpc_delete_tenant)
{
    const Kvkeep__V1__DeleteTenantRequest *request =
        (const Kvkeep__V1__DeleteTenantRequest *)(const void *)message;
    Kvkeep__V1__DeleteTenantResponse response = KVKEEP__V1__DELETE_TENANT_RESPONSE__INIT;
    struct kvk_forget_counts counts = {.instances = 0};
    uint32_t credentials = 0;
    char name[KVK_NAME_SIZE] = "";
    char details[DETAILS_SIZE];
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = take_name(&request->name, "name", name, error);
    }
    if (status == KVK_OK) {
        status = delete_tenant(run, name, &credentials, &counts, error);
    }
    (void)snprintf(details, sizeof(details),
                   "credentials=%u instances=%llu sequences=%llu leases=%llu spaces=%llu "
                   "bytes=%llu,%llu,%llu",
                   credentials, (unsigned long long)counts.instances,
                   (unsigned long long)counts.sequences, (unsigned long long)counts.leases,
                   (unsigned long long)counts.spaces,
                   (unsigned long long)counts.bytes[KVK_TIER_DEVICE],
                   (unsigned long long)counts.bytes[KVK_TIER_HOST],
                   (unsigned long long)counts.bytes[KVK_TIER_DISK]);
    kvk_rpc_audit(run, name, details, status, error);
    response.credentials = credentials;
    response.instances = counts.instances;
    response.sequences = counts.sequences;
    response.leases = counts.leases;
    response.spaces = counts.spaces;
    response.device_blocks = counts.blocks[KVK_TIER_DEVICE];
    response.host_blocks = counts.blocks[KVK_TIER_HOST];
    response.disk_blocks = counts.blocks[KVK_TIER_DISK];
    response.device_bytes = counts.bytes[KVK_TIER_DEVICE];
    response.host_bytes = counts.bytes[KVK_TIER_HOST];
    response.disk_bytes = counts.bytes[KVK_TIER_DISK];
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

/* ---- CreateCredential ---- */

/* What the request says, with the memory of its names. */
struct credential_names {
    char name[KVK_NAME_SIZE];
    char certificate[KVK_NAME_SIZE];
    char tenants[KVK_CREDENTIAL_TENANTS_MAX][KVK_NAME_SIZE];
};

static enum kvk_status take_uids(const Kvkeep__V1__CreateCredentialRequest *message,
                                 struct kvk_credential_request *request, struct kvk_error *error)
{
    size_t room = sizeof(request->uids) / sizeof(request->uids[0]);
    if (message->n_uids > room) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "uids", message->n_uids, room,
                              "uids has more than %zu", room);
    }
    for (size_t i = 0; i < message->n_uids; i++) {
        if (message->uids[i] >= UINT32_MAX) { /* which means nobody in particular */
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "uids", message->uids[i],
                                  UINT32_MAX - 1, "uids[%zu] is no uid", i);
        }
        request->uids[request->uid_count++] = (uint32_t)message->uids[i];
    }
    return KVK_OK;
}

static enum kvk_status take_certificate(const ProtobufCBinaryData *bytes, char *certificate,
                                        struct kvk_error *error)
{
    struct kvk_view view = {.size = 0};
    enum kvk_status status =
        kvk_rpc_check_name(bytes, 0, KVK_NAME_SIZE - 1, "certificate", &view, error);
    if (status == KVK_OK && view.size > 0) {
        memcpy(certificate, view.data, view.size); /* compared as bytes; the rest is zero */
    }
    return status;
}

static enum kvk_status create_credential_read(const Kvkeep__V1__CreateCredentialRequest *message,
                                              struct credential_names *names,
                                              struct kvk_credential_request *request,
                                              struct kvk_error *error)
{
    *request = (struct kvk_credential_request){.name = names->name,
                                               .admin = message->admin,
                                               .token = message->token,
                                               .certificate = names->certificate};
    enum kvk_status status = take_name(&message->name, "name", names->name, error);
    if (status == KVK_OK) {
        status = take_certificate(&message->certificate, names->certificate, error);
    }
    if (status == KVK_OK) {
        status = take_uids(message, request, error);
    }
    for (size_t i = 0; i < message->n_tenants && status == KVK_OK; i++) {
        KVK_ASSERT(i < KVK_CREDENTIAL_TENANTS_MAX); /* by the walk over the message */
        status = take_name(&message->tenants[i], "tenants", names->tenants[i], error);
        request->tenants[request->tenant_count++] = names->tenants[i];
    }
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_create_credential)
{
    Kvkeep__V1__CreateCredentialResponse response = KVKEEP__V1__CREATE_CREDENTIAL_RESPONSE__INIT;
    char token[KVK_TOKEN_TEXT_SIZE] = "";
    char details[DETAILS_SIZE] = "";
    struct kvk_credential_request request = {.name = ""};
    struct credential_names *names = kvk_rpc_arena_take_extra(&run->memory->arena, sizeof(*names));
    if (names == NULL) {
        return no_memory(error);
    }
    memset(names, 0, sizeof(*names));
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = create_credential_read(
            (const Kvkeep__V1__CreateCredentialRequest *)(const void *)message, names, &request,
            error);
    }
    if (status == KVK_OK) {
        status = kvk_credentials_add(run->rpc->tenants, &request, token, error);
        (void)snprintf(details, sizeof(details),
                       "tenants=%u first=%s admin=%s token=%s certificate=%s uids=%u",
                       request.tenant_count, request.tenant_count > 0 ? names->tenants[0] : "",
                       request.admin ? "yes" : "no", request.token ? "yes" : "no",
                       request.certificate[0] != '\0' ? "yes" : "no", request.uid_count);
    }
    kvk_rpc_audit(run, names->name, details, status, error);
    if (status == KVK_OK) {
        response.token = kvk_rpc_text(token);
        status = kvk_rpc_reply(run, &response.base, error);
    }
    kvk_secret_wipe(token, sizeof(token));
    return status;
}

/* ---- ListCredentials ---- */

/* One row's memory. */
struct credential_row {
    Kvkeep__V1__CredentialRow row;
    ProtobufCBinaryData tenants[KVK_CREDENTIAL_TENANTS_MAX];
    uint64_t uids[16];
    Kvkeep__V1__CredentialToken tokens[KVK_CREDENTIAL_TOKENS_MAX];
    Kvkeep__V1__CredentialToken *token_pointers[KVK_CREDENTIAL_TOKENS_MAX];
};

static void credential_row(const struct kvk_credential_report *report, struct credential_row *made)
{
    Kvkeep__V1__CredentialRow *row = &made->row;
    kvkeep__v1__credential_row__init(row);
    row->name = kvk_rpc_text(report->name);
    row->admin = report->admin;
    row->configured = report->configured;
    row->certificate = kvk_rpc_text(report->certificate);
    row->n_tenants = report->tenant_count;
    row->tenants = made->tenants;
    for (uint32_t i = 0; i < report->tenant_count; i++) {
        made->tenants[i] = kvk_rpc_text(report->tenants[i]->name);
    }
    row->n_uids = report->uid_count;
    row->uids = made->uids;
    for (uint32_t i = 0; i < report->uid_count; i++) {
        made->uids[i] = report->uids[i];
    }
    row->n_tokens = report->token_count;
    row->tokens = made->token_pointers;
    for (uint32_t i = 0; i < report->token_count; i++) {
        kvkeep__v1__credential_token__init(&made->tokens[i]);
        made->tokens[i].created_s = report->tokens[i].created_s;
        made->tokens[i].expires_s = report->tokens[i].expires_s;
        made->token_pointers[i] = &made->tokens[i];
    }
}

KVK_RPC_HANDLER(kvk_rpc_list_credentials)
{
    (void)message;
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct kvk_credential_report *reports = NULL;
    uint32_t count = 0;
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = kvk_credentials_list(run->rpc->tenants, &reports, &count, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    struct credential_row *rows =
        kvk_rpc_arena_take_extra(arena, ((size_t)count + 1) * sizeof(*rows));
    Kvkeep__V1__CredentialRow **pointers =
        kvk_rpc_arena_take_extra(arena, ((size_t)count + 1) * sizeof(Kvkeep__V1__CredentialRow *));
    if (rows == NULL || pointers == NULL) {
        free(reports);
        return no_memory(error);
    }
    for (uint32_t i = 0; i < count; i++) {
        credential_row(&reports[i], &rows[i]);
        pointers[i] = &rows[i].row;
    }
    Kvkeep__V1__ListCredentialsResponse response = KVKEEP__V1__LIST_CREDENTIALS_RESPONSE__INIT;
    response.n_credentials = count;
    response.credentials = pointers;
    status = kvk_rpc_reply(run, &response.base, error);
    free(reports);
    return status;
}

/* ---- Tokens ---- */

KVK_RPC_HANDLER(kvk_rpc_rotate_token)
{
    const Kvkeep__V1__RotateTokenRequest *request =
        (const Kvkeep__V1__RotateTokenRequest *)(const void *)message;
    Kvkeep__V1__RotateTokenResponse response = KVKEEP__V1__ROTATE_TOKEN_RESPONSE__INIT;
    char token[KVK_TOKEN_TEXT_SIZE] = "";
    char name[KVK_NAME_SIZE] = "";
    char details[DETAILS_SIZE];
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = take_name(&request->name, "name", name, error);
    }
    if (status == KVK_OK) {
        status = kvk_credentials_rotate(run->rpc->tenants, name, request->overlap_s, token, error);
    }
    (void)snprintf(details, sizeof(details), "overlap_s=%llu",
                   (unsigned long long)request->overlap_s);
    kvk_rpc_audit(run, name, details, status, error);
    if (status == KVK_OK) {
        response.token = kvk_rpc_text(token);
        status = kvk_rpc_reply(run, &response.base, error);
    }
    kvk_secret_wipe(token, sizeof(token));
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_revoke_tokens)
{
    const Kvkeep__V1__RevokeTokensRequest *request =
        (const Kvkeep__V1__RevokeTokensRequest *)(const void *)message;
    Kvkeep__V1__RevokeTokensResponse response = KVKEEP__V1__REVOKE_TOKENS_RESPONSE__INIT;
    char name[KVK_NAME_SIZE] = "";
    char details[DETAILS_SIZE];
    uint32_t count = 0;
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = take_name(&request->name, "name", name, error);
    }
    if (status == KVK_OK) {
        status = kvk_credentials_revoke(run->rpc->tenants, name, &count, error);
    }
    (void)snprintf(details, sizeof(details), "tokens=%u", count);
    kvk_rpc_audit(run, name, details, status, error);
    response.tokens = count;
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

KVK_RPC_HANDLER(kvk_rpc_delete_credential)
{
    const Kvkeep__V1__DeleteCredentialRequest *request =
        (const Kvkeep__V1__DeleteCredentialRequest *)(const void *)message;
    Kvkeep__V1__DeleteCredentialResponse response = KVKEEP__V1__DELETE_CREDENTIAL_RESPONSE__INIT;
    char name[KVK_NAME_SIZE] = "";
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = take_name(&request->name, "name", name, error);
    }
    if (status == KVK_OK) {
        status = kvk_credentials_delete(run->rpc->tenants, name, error);
    }
    kvk_rpc_audit(run, name, "", status, error);
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

/* ---- Spaces ---- */

KVK_RPC_HANDLER(kvk_rpc_set_space_mode)
{
    const Kvkeep__V1__SetSpaceModeRequest *request =
        (const Kvkeep__V1__SetSpaceModeRequest *)(const void *)message;
    Kvkeep__V1__SetSpaceModeResponse response = KVKEEP__V1__SET_SPACE_MODE_RESPONSE__INIT;
    enum kvk_tenant_mode mode = KVK_TENANT_ON;
    bool set = false;
    char object[32];
    char details[DETAILS_SIZE];
    (void)snprintf(object, sizeof(object), "%llu", (unsigned long long)request->space_id);
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(request->space_id, "space_id", error);
    }
    if (status == KVK_OK) {
        status = take_mode(request->mode, &set, &mode, error);
    }
    if (status == KVK_OK && !set) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "mode", "mode is required");
    }
    if (status == KVK_OK) {
        status = kvk_space_set_mode(run->rpc->cache, request->space_id, mode, error);
    }
    (void)snprintf(details, sizeof(details), "mode=%s", mode_name(mode));
    kvk_rpc_audit(run, object, details, status, error);
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}
