/* Public prefixes: published and withdrawn. Finding them is part of every look-up that asks. */
#include "client/internal.h"

enum kvk_status kvkeep_publish(struct kvkeep_client *client, const struct kvkeep_space *space,
                               const struct kvkeep_prompt *prompt,
                               struct kvkeep_publication *publication, struct kvk_error *error)
{
    struct kvkeep_prompt_message message;
    enum kvk_status status = kvkeep_prompt_make(prompt, &message, error);
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__PublishPrefixRequest request = KVKEEP__V1__PUBLISH_PREFIX_REQUEST__INIT;
    request.space_id = space->id;
    request.prompt = &message.message;
    message.message.use_public = false; /* it is of look-ups */
    Kvkeep__V1__PublishPrefixResponse *response = NULL;
    status = kvkeep_client_call(client, KVKEEP_METHOD("PublishPrefix"), &request.base,
                                &kvkeep__v1__publish_prefix_response__descriptor, &response, error);
    kvkeep_prompt_drop(&message);
    if (status != KVK_OK) {
        return status;
    }
    *publication = (struct kvkeep_publication){
        .id = response->public_id,
        .space_id = response->space_id,
        .tokens = response->tokens,
        .blocks = response->blocks,
        .bytes = response->bytes,
        .created = response->created,
    };
    kvkeep__v1__publish_prefix_response__free_unpacked(response, NULL);
    return KVK_OK;
}

enum kvk_status kvkeep_unpublish(struct kvkeep_client *client, uint64_t public_id,
                                 uint64_t *held_blocks, struct kvk_error *error)
{
    Kvkeep__V1__UnpublishPrefixRequest request = KVKEEP__V1__UNPUBLISH_PREFIX_REQUEST__INIT;
    request.public_id = public_id;
    Kvkeep__V1__UnpublishPrefixResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(client, KVKEEP_METHOD("UnpublishPrefix"), &request.base,
                           &kvkeep__v1__unpublish_prefix_response__descriptor, &response, error);
    if (status != KVK_OK) {
        return status;
    }
    if (held_blocks != NULL) {
        *held_blocks = response->held_blocks;
    }
    kvkeep__v1__unpublish_prefix_response__free_unpacked(response, NULL);
    return KVK_OK;
}
