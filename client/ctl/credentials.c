/*
 * kvkeepctl credential create|list|rotate|revoke|delete: who may call, and for whom. A token is
 * printed once, when it is made: nobody can show it again.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define ADMIN(name) "/kvkeep.v1.Admin/" name
#define TENANTS_MAX 200 /* as the daemon takes */
#define UIDS_MAX 16

static const char usage[] =
    "  credential create NAME [OPTION…]   make one; its token is shown once\n"
    "  credential list                    all, with the age of their tokens\n"
    "  credential rotate NAME [--overlap SECONDS]\n"
    "                                     a new token; the old ones end after the overlap (0)\n"
    "  credential revoke NAME             end all its tokens now\n"
    "  credential delete NAME\n"
    "\n"
    "OPTION:\n"
    "  --tenant NAME        may act for this tenant; may be repeated, the first is the default\n"
    "  --admin              may administer; without --tenant it reads no tenant's data\n"
    "  --certificate NAME   known by this name in a client's certificate\n"
    "  --uid N              known by this uid on the unix socket; may be repeated\n"
    "  --no-token           make no token (with --certificate or --uid)\n";

static int wrong(const char *complaint)
{
    const struct ctl_command command = {.name = "credential", .usage = usage};
    return ctl_usage(&command, complaint);
}

static ProtobufCBinaryData text(const char *value)
{
    ProtobufCBinaryData data = {.data = (uint8_t *)(uintptr_t)value, .len = strlen(value)};
    return data;
}

/* The token alone on standard output, for a script to take. */
static void token_print(const struct ctl_options *options, const char *name,
                        ProtobufCBinaryData token)
{
    if (options->json) {
        ctl_json_print(json_pack("{s:s, s:o}", "name", name, "token", ctl_json_text(token)));
    } else if (token.len > 0) {
        (void)fprintf(stderr, "the token of %s; it is shown this once:\n", name);
        (void)printf("%s\n", ctl_text(token));
    } else {
        (void)printf("%s created, without a token\n", name);
    }
}

/* ---- create ---- */

struct wanted {
    ProtobufCBinaryData tenants[TENANTS_MAX];
    uint64_t uids[UIDS_MAX];
    Kvkeep__V1__CreateCredentialRequest request;
};

/* NULL: taken; else what it must be. */
static const char *option_take(struct wanted *wanted, int option)
{
    Kvkeep__V1__CreateCredentialRequest *request = &wanted->request;
    switch (option) {
    case 't':
        if (request->n_tenants == TENANTS_MAX) {
            return "one of the first 200: no more are taken";
        }
        wanted->tenants[request->n_tenants++] = text(optarg);
        return NULL;
    case 'a':
        request->admin = true;
        return NULL;
    case 'c':
        request->certificate = text(optarg);
        return NULL;
    case 'u':
        if (request->n_uids == UIDS_MAX) {
            return "one of the first 16: no more are taken";
        }
        return ctl_parse_count(optarg, &wanted->uids[request->n_uids++])
                   ? NULL
                   : "the number of a user, as `id -u NAME` says it";
    default:
        request->token = false;
        return NULL;
    }
}

static int credential_create(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option names[] = {
        {"tenant", required_argument, NULL, 't'},      {"admin", no_argument, NULL, 'a'},
        {"certificate", required_argument, NULL, 'c'}, {"uid", required_argument, NULL, 'u'},
        {"no-token", no_argument, NULL, 'n'},          {NULL, 0, NULL, 0}};
    struct wanted wanted;
    if (argc < 2 || argv[1][0] == '-') {
        return wrong("a name");
    }
    kvkeep__v1__create_credential_request__init(&wanted.request);
    wanted.request.name = text(argv[1]);
    wanted.request.tenants = wanted.tenants;
    wanted.request.uids = wanted.uids;
    wanted.request.token = true;
    int option = 0;
    int at = 0;
    optind = 1;
    while ((option = getopt_long(argc - 1, argv + 1, "", names, &at)) != -1) {
        const char *meant = option == '?' ? NULL : option_take(&wanted, option);
        if (option == '?') {
            return wrong("a name and options");
        }
        if (meant != NULL) {
            return ctl_option_wrong("credential", names[at].name, optarg, meant);
        }
    }
    if (optind != argc - 1) {
        return wrong("one name");
    }
    int code = CTL_OK;
    Kvkeep__V1__CreateCredentialResponse *answer =
        ctl_admin_call(options, ADMIN("CreateCredential"), &wanted.request.base,
                       &kvkeep__v1__create_credential_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    token_print(options, argv[1], answer->token);
    kvkeep__v1__create_credential_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

/* ---- list ---- */

static const char *age_text(uint64_t created_s)
{
    time_t now = time(NULL);
    if (created_s == 0 || now < (time_t)created_s) {
        return "?";
    }
    return ctl_duration_ms(((uint64_t)now - created_s) * 1000);
}

/* "2.0 h old", "2.0 h old, 30.0 s left; …" */
static void tokens_text(const Kvkeep__V1__CredentialRow *row, char *out, size_t out_size)
{
    size_t used = 0;
    time_t now = time(NULL);
    (void)snprintf(out, out_size, "-");
    for (size_t i = 0; i < row->n_tokens && used < out_size; i++) {
        const Kvkeep__V1__CredentialToken *token = row->tokens[i];
        char left[64] = "";
        if (token->expires_s > (uint64_t)now) {
            (void)snprintf(left, sizeof left, ", %s left",
                           ctl_duration_ms((token->expires_s - (uint64_t)now) * 1000));
        }
        int size = row->configured ? snprintf(out + used, out_size - used, "of the file")
                                   : snprintf(out + used, out_size - used, "%s%s old%s",
                                              i > 0 ? "; " : "", age_text(token->created_s), left);
        used += size < 0 ? 0 : (size_t)size;
    }
}

static void names_text(const Kvkeep__V1__CredentialRow *row, char *out, size_t out_size)
{
    size_t used = 0;
    (void)snprintf(out, out_size, "-");
    for (size_t i = 0; i < row->n_tenants && used < out_size; i++) {
        int size = snprintf(out + used, out_size - used, "%s%s", i > 0 ? ", " : "",
                            ctl_text(row->tenants[i]));
        used += size < 0 ? 0 : (size_t)size;
    }
}

static json_t *credential_json(const Kvkeep__V1__CredentialRow *row)
{
    json_t *tenants = json_array();
    json_t *uids = json_array();
    json_t *tokens = json_array();
    for (size_t i = 0; i < row->n_tenants; i++) {
        json_array_append_new(tenants, ctl_json_text(row->tenants[i]));
    }
    for (size_t i = 0; i < row->n_uids; i++) {
        json_array_append_new(uids, json_integer((json_int_t)row->uids[i]));
    }
    for (size_t i = 0; i < row->n_tokens; i++) {
        json_array_append_new(tokens, json_pack("{s:I, s:I}", "created_s",
                                                (json_int_t)row->tokens[i]->created_s, "expires_s",
                                                (json_int_t)row->tokens[i]->expires_s));
    }
    return json_pack("{s:o, s:o, s:b, s:b, s:o, s:o, s:o}", "name", ctl_json_text(row->name),
                     "tenants", tenants, "admin", row->admin, "configured", row->configured,
                     "certificate", ctl_json_text(row->certificate), "uids", uids, "tokens",
                     tokens);
}

static int credential_list(const struct ctl_options *options, int argc)
{
    Kvkeep__V1__ListCredentialsRequest request = KVKEEP__V1__LIST_CREDENTIALS_REQUEST__INIT;
    int code = CTL_OK;
    if (argc != 1) {
        return wrong("no more arguments");
    }
    Kvkeep__V1__ListCredentialsResponse *answer =
        ctl_admin_call(options, ADMIN("ListCredentials"), &request.base,
                       &kvkeep__v1__list_credentials_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    static const char *const titles[] = {"-credential",  "-tenants", "-admin",  "-tokens",
                                         "-certificate", "uids",     "-kept in"};
    struct ctl_table table;
    ctl_table_init(&table, 7, titles);
    json_t *list = json_array();
    for (size_t i = 0; i < answer->n_credentials; i++) {
        const Kvkeep__V1__CredentialRow *row = answer->credentials[i];
        char tenants[512];
        char tokens[512];
        names_text(row, tenants, sizeof tenants);
        tokens_text(row, tokens, sizeof tokens);
        ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%zu\t%s", ctl_text(row->name), tenants,
                      row->admin ? "yes" : "no", tokens,
                      row->certificate.len > 0 ? ctl_text(row->certificate) : "-", row->n_uids,
                      row->configured ? "file" : "catalogue");
        json_array_append_new(list, credential_json(row));
    }
    ctl_list_print(options, &table, list, false);
    kvkeep__v1__list_credentials_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

/* ---- rotate, revoke, delete ---- */

static int credential_rotate(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option names[] = {{"overlap", required_argument, NULL, 'o'},
                                          {NULL, 0, NULL, 0}};
    Kvkeep__V1__RotateTokenRequest request = KVKEEP__V1__ROTATE_TOKEN_REQUEST__INIT;
    if (argc < 2) {
        return wrong("a name");
    }
    int option = 0;
    optind = 1;
    while ((option = getopt_long(argc - 1, argv + 1, "", names, NULL)) != -1) {
        if (option != 'o' || !ctl_parse_count(optarg, &request.overlap_s)) {
            return wrong("seconds behind --overlap");
        }
    }
    if (optind != argc - 1) {
        return wrong("one name");
    }
    request.name = text(argv[1]);
    int code = CTL_OK;
    Kvkeep__V1__RotateTokenResponse *answer =
        ctl_admin_call(options, ADMIN("RotateToken"), &request.base,
                       &kvkeep__v1__rotate_token_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    token_print(options, argv[1], answer->token);
    kvkeep__v1__rotate_token_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

static int credential_revoke(const struct ctl_options *options, int argc, char **argv)
{
    Kvkeep__V1__RevokeTokensRequest request = KVKEEP__V1__REVOKE_TOKENS_REQUEST__INIT;
    if (argc != 2) {
        return wrong("one name");
    }
    request.name = text(argv[1]);
    int code = CTL_OK;
    Kvkeep__V1__RevokeTokensResponse *answer =
        ctl_admin_call(options, ADMIN("RevokeTokens"), &request.base,
                       &kvkeep__v1__revoke_tokens_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(
            json_pack("{s:s, s:I}", "revoked", argv[1], "tokens", (json_int_t)answer->tokens));
    } else {
        (void)printf("%s: %s tokens ended\n", argv[1], ctl_count(answer->tokens));
    }
    kvkeep__v1__revoke_tokens_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

static int credential_delete(const struct ctl_options *options, int argc, char **argv)
{
    Kvkeep__V1__DeleteCredentialRequest request = KVKEEP__V1__DELETE_CREDENTIAL_REQUEST__INIT;
    if (argc != 2) {
        return wrong("one name");
    }
    request.name = text(argv[1]);
    int code = CTL_OK;
    Kvkeep__V1__DeleteCredentialResponse *answer =
        ctl_admin_call(options, ADMIN("DeleteCredential"), &request.base,
                       &kvkeep__v1__delete_credential_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(json_pack("{s:s}", "deleted", argv[1]));
    } else {
        (void)printf("%s deleted\n", argv[1]);
    }
    kvkeep__v1__delete_credential_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

int ctl_credential(const struct ctl_options *options, int argc, char **argv)
{
    static const char *const complaint = "create, list, rotate, revoke or delete";
    if (argc < 2) {
        return wrong(complaint);
    }
    if (strcmp(argv[1], "create") == 0) {
        return credential_create(options, argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "list") == 0) {
        return credential_list(options, argc - 1);
    }
    if (strcmp(argv[1], "rotate") == 0) {
        return credential_rotate(options, argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "revoke") == 0) {
        return credential_revoke(options, argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "delete") == 0) {
        return credential_delete(options, argc - 1, argv + 1);
    }
    return wrong(complaint);
}
