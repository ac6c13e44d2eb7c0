/*
 * Calls that only read, asked and answered as JSON: for the web page. The same handlers as over
 * gRPC, so that a page shows what kvkeepctl shows.
 *
 * In JSON every field of an answer is there, also where it is zero. Ids are texts, since JavaScript
 * cannot count to 2^64; bytes are texts where they are UTF-8, else hexadecimal digits; enum values
 * are their names in lower case, without what all names of the enum begin with.
 */
#ifndef KVK_DAEMON_RPC_JSON_H
#define KVK_DAEMON_RPC_JSON_H

#include "daemon/rpc.h"

/* Is there such a method, and may it be asked this way? */
bool kvk_rpc_json_allows(const char *method);

/*
 * Ask on behalf of `credential`. `text` is the caller's to free(). Request fields that JSON may
 * give: texts, numbers and truth values; an unknown one is KVK_INVALID, naming it. May block.
 */
KVK_CHECKED enum kvk_status kvk_rpc_json_call(struct kvk_rpc *rpc, const char *method,
                                              const char *request, size_t request_size,
                                              const struct kvk_credential *credential, char **text,
                                              struct kvk_error *error);

struct sockaddr;

/* Whose token is it? Failed attempts count against the address, as those over gRPC do; NULL:
 * against none. KVK_UNAUTHENTICATED, KVK_EXHAUSTED: too many from there. */
KVK_CHECKED enum kvk_status kvk_rpc_json_identify(struct kvk_rpc *rpc, const uint8_t *token,
                                                  size_t token_size, const struct sockaddr *address,
                                                  const struct kvk_credential **credential,
                                                  struct kvk_error *error);

#endif
