/*
 * By whom calls take turns: a new call's tenant, before it waits.
 *
 * A credential of one tenant says it without looking. Where an engine acts for several it is the
 * tenant of the session or space that the request names, so that the engine's tenants take turns
 * like any others; two numbers are read from the message for that, which stays as it came.
 */
#include "daemon/quota.h"
#include "daemon/rpc_private.h"

#define FIELDS_MAX 64 /* of a message, that are looked at */

static uint32_t field_number(const ProtobufCMessageDescriptor *descriptor, const char *name)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(descriptor, name);
    bool fits = field != NULL && field->type == PROTOBUF_C_TYPE_UINT64 &&
                field->label != PROTOBUF_C_LABEL_REPEATED;
    return fits ? field->id : 0;
}

void kvk_rpc_owner_bind(struct kvk_rpc_bound *bound)
{
    if (bound->method->request != NULL) {
        bound->session_field = field_number(bound->method->request, "session_id");
        bound->space_field = field_number(bound->method->request, "space_id");
    }
}

/* NULL: the message names nothing that tells. */
static const struct kvk_tenant *tenant_of_message(struct kvk_call *call,
                                                  const struct kvk_rpc_bound *bound,
                                                  const struct kvk_credential *credential)
{
    uint64_t session_id = 0;
    uint64_t space_id = 0;
    if (bound->session_field == 0 && bound->space_field == 0) {
        return NULL;
    }
    struct kvk_bytes bytes = kvk_call_message(call);
    struct kvk_wire_reader reader = {.at = bytes.data, .end = bytes.data + bytes.size_bytes};
    struct kvk_wire_field field;
    for (uint32_t i = 0; i < FIELDS_MAX && bytes.size_bytes > 0 && kvk_wire_next(&reader, &field);
         i++) {
        if (field.type == KVK_WIRE_VARINT && field.id == bound->session_field) {
            session_id = field.value;
        } else if (field.type == KVK_WIRE_VARINT && field.id == bound->space_field) {
            space_id = field.value;
        }
    }
    return kvk_rate_tenant(bound->rpc->cache, credential, session_id, space_id);
}

enum kvk_status kvk_rpc_call_owner(struct kvk_call *call, void *rpc_bound, uint32_t *owner,
                                   struct kvk_error *error)
{
    const struct kvk_rpc_bound *bound = rpc_bound;
    const struct kvk_credential *credential = NULL;
    enum kvk_status status = kvk_rpc_authenticate(bound->rpc, call, &credential, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_call_set_caller(call, credential);
    if (credential->tenant_count == 0) {
        *owner = KVK_TENANT_COUNT_MAX;
        return KVK_OK;
    }
    const struct kvk_tenant *tenant = NULL;
    if (credential->tenant_count > 1 && bound->method->kind == KVK_METHOD_UNARY) {
        tenant = tenant_of_message(call, bound, credential);
    }
    *owner = tenant != NULL ? tenant->index : credential->tenants[0]->index;
    return KVK_OK;
}
