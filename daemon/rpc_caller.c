/*
 * Who calls, before anything of the call is looked at: what was shown, whether it is known, and
 * whether its source may still try.
 */
#include "base/clock.h"
#include "daemon/rpc_private.h"

_Static_assert(KVK_CERTIFICATE_NAMES_MAX <= KVK_SUBJECTS_MAX, "all names are looked up");

/* Whom a failure counts against. */
static struct kvk_auth_source source_of(struct kvk_call *call)
{
    const struct kvk_peer *peer = kvk_call_peer(call);
    uint8_t address[16] = {0};
    if (peer->kind == KVK_PEER_UNIX) {
        return kvk_auth_source_uid(peer->uid);
    }
    uint32_t size_bytes = kvk_call_peer_address(call, address);
    return kvk_auth_source_address(address, size_bytes);
}

static enum kvk_status identify(struct kvk_rpc *rpc, struct kvk_call *call,
                                const struct kvk_credential **credential, bool *guessable,
                                struct kvk_error *error)
{
    const struct kvk_peer *peer = kvk_call_peer(call);
    struct kvk_bytes token = {.data = NULL, .size_bytes = 0};
    struct kvk_bytes header;
    if (!kvk_call_bearer_token(call, &token) && kvk_call_metadata(call, "authorization", &header)) {
        return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                        "the authorization metadata is not \"Bearer TOKEN\", or too long");
    }
    struct kvk_proof proof = {.token = token.data,
                              .token_size = token.size_bytes,
                              .local = peer->kind == KVK_PEER_UNIX,
                              .uid = peer->uid};
    struct kvk_certificate_names names = {.count = 0};
    if (token.data == NULL && peer->kind == KVK_PEER_TLS) {
        kvk_call_certificate_names(call, &names);
        for (uint32_t i = 0; i < names.count; i++) {
            proof.subjects[i] = names.names[i];
        }
        proof.subject_count = names.count;
    }
    enum kvk_status status =
        kvk_tenants_identify(rpc->tenants, &proof, credential, guessable, error);
    kvk_certificate_names_finish(&names);
    return status;
}

enum kvk_status kvk_rpc_authenticate(struct kvk_rpc *rpc, struct kvk_call *call,
                                     const struct kvk_credential **credential,
                                     struct kvk_error *error)
{
    bool guessable = false;
    enum kvk_status status = identify(rpc, call, credential, &guessable, error);
    uint64_t now_ns = kvk_clock_now(rpc->clock);
    if (status == KVK_UNAUTHENTICATED) {
        const struct kvk_auth_source source = source_of(call);
        enum kvk_status limited = kvk_auth_limit_fail(&rpc->auth_limit, &source, now_ns, error);
        return limited == KVK_OK ? status : limited;
    }
    if (status == KVK_OK && guessable && kvk_auth_limit_is_engaged(&rpc->auth_limit, now_ns)) {
        const struct kvk_auth_source source = source_of(call);
        status = kvk_auth_limit_check(&rpc->auth_limit, &source, now_ns, error);
    }
    return status;
}

enum kvk_status kvk_rpc_require_admin(const struct kvk_rpc_run *run, struct kvk_error *error)
{
    if (!run->caller.credential->admin) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "",
                        "the credential has no admin rights");
    }
    return KVK_OK;
}

void kvk_rpc_audit(struct kvk_rpc_run *run, const char *object, const char *details,
                   enum kvk_status status, const struct kvk_error *error)
{
    char peer[KVK_PEER_TEXT_SIZE];
    if (run->rpc->audit == NULL) {
        return;
    }
    kvk_call_peer_text(run->call, peer);
    const struct kvk_audit_entry entry = {.who = run->caller.credential->name,
                                          .peer = peer,
                                          .call = run->caller.call,
                                          .object = object,
                                          .details = details,
                                          .result = status,
                                          .reason = status == KVK_OK ? "" : error->text};
    kvk_audit_write(run->rpc->audit, &entry);
}
