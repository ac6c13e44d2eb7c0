/*
 * invalidate: what was named is found no more, in no tier, durably. It asks for at least one name,
 * so that a typing error does not empty a cache; --all says that all is meant.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define TOKENS_MAX 4096 /* of --prefix: what fits on a command line */

static const char usage[] =
    "  --tenant NAME             whose; without it the credential's own\n"
    "  --space ID                one space, as `spaces` lists them\n"
    "  --model NAME              these names match in full; those that are not given match all\n"
    "  --revision NAME\n"
    "  --adapter NAME\n"
    "  --adapter-id NAME\n"
    "  --adapter-version NAME\n"
    "  --position-encoding NAME\n"
    "  --kv-format TEXT\n"
    "  --mask-rule NAME\n"
    "  --salt TEXT               only what was cached under this salt\n"
    "  --prefix TOKEN,TOKEN…     only what begins with these whole blocks; needs --space; its\n"
    "                            --salt, if it has one\n"
    "  --all                     everything of the tenant\n";

struct asked {
    Kvkeep__V1__InvalidateRequest request;
    Kvkeep__V1__Prompt prefix;
    uint8_t tokens[TOKENS_MAX * sizeof(uint32_t)];
    bool salted;
    bool has_prefix;
    bool all;
};

static ProtobufCBinaryData data_of(const char *text)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)text, .len = strlen(text)};
}

static bool parse_space(const char *text, uint64_t *id)
{
    char *end;
    *id = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0' && *id != 0;
}

static bool parse_tokens(struct asked *asked, const char *text)
{
    size_t count = 0;
    for (const char *at = text; *at != '\0'; count++) {
        char *end;
        unsigned long long token = strtoull(at, &end, 10);
        if (*at < '0' || *at > '9' || token > UINT32_MAX || count == TOKENS_MAX ||
            (*end != ',' && *end != '\0')) {
            return false;
        }
        kvk_store_le32(asked->tokens + count * sizeof(uint32_t), (uint32_t)token);
        at = *end == ',' ? end + 1 : end;
    }
    asked->prefix.tokens =
        (ProtobufCBinaryData){.data = asked->tokens, .len = count * sizeof(uint32_t)};
    asked->has_prefix = true;
    return count > 0;
}

/* NULL: right; else what is wrong. */
static const char *parse(struct asked *asked, int argc, char **argv)
{
    static const struct option names[] = {
        {"tenant", required_argument, NULL, 't'},
        {"space", required_argument, NULL, 's'},
        {"model", required_argument, NULL, 'm'},
        {"revision", required_argument, NULL, 'r'},
        {"adapter", required_argument, NULL, 'a'},
        {"adapter-id", required_argument, NULL, 'i'},
        {"adapter-version", required_argument, NULL, 'v'},
        {"position-encoding", required_argument, NULL, 'e'},
        {"kv-format", required_argument, NULL, 'f'},
        {"mask-rule", required_argument, NULL, 'k'},
        {"salt", required_argument, NULL, 'S'},
        {"prefix", required_argument, NULL, 'p'},
        {"all", no_argument, NULL, 'A'},
        {NULL, 0, NULL, 0},
    };
    Kvkeep__V1__InvalidateRequest *request = &asked->request;
    const struct {
        int option;
        ProtobufCBinaryData *field;
    } fields[] = {
        {'m', &request->model},           {'r', &request->revision},
        {'a', &request->adapter_name},    {'i', &request->adapter_id},
        {'v', &request->adapter_version}, {'e', &request->position_encoding},
        {'f', &request->kv_format},       {'k', &request->mask_rule},
    };
    bool named = false;
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        bool known = false;
        for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
            if (fields[i].option == option) {
                *fields[i].field = data_of(optarg);
                known = true;
            }
        }
        named = named || known || option == 's' || option == 'S';
        if (option == 't') {
            request->tenant = data_of(optarg);
        } else if (option == 's' && !parse_space(optarg, &request->space_id)) {
            return "--space wants the number of a space";
        } else if (option == 'S') {
            request->salt = data_of(optarg);
            asked->salted = true;
        } else if (option == 'p' && !parse_tokens(asked, optarg)) {
            return "--prefix wants tokens, numbers with commas between";
        } else if (option == 'A') {
            asked->all = true;
        } else if (option == '?') {
            return "";
        }
    }
    if (optind != argc) {
        return "it takes options only";
    }
    if (asked->has_prefix && request->space_id == 0) {
        return "--prefix needs --space";
    }
    if (named == asked->all) {
        return named ? "--all goes with --tenant alone" : "name what is meant, or say --all";
    }
    return NULL;
}

static void print(const struct ctl_options *options, const Kvkeep__V1__InvalidateResponse *response)
{
    if (options->json) {
        ctl_json_print(json_pack(
            "{s:I, s:I, s:I, s:I, s:I, s:I}", "spaces", (json_int_t)response->spaces,
            "device_blocks", (json_int_t)response->device_blocks, "host_blocks",
            (json_int_t)response->host_blocks, "disk_blocks", (json_int_t)response->disk_blocks,
            "held_blocks", (json_int_t)response->held_blocks, "store_pending_spaces",
            (json_int_t)response->store_pending_spaces));
        return;
    }
    (void)printf("%s spaces: gone are %s blocks of the device, %s of the host, %s of the disk",
                 ctl_count(response->spaces), ctl_count(response->device_blocks),
                 ctl_count(response->host_blocks), ctl_count(response->disk_blocks));
    if (response->held_blocks > 0) {
        (void)printf("; readers still hold %s", ctl_count(response->held_blocks));
    }
    if (response->store_pending_spaces > 0) {
        (void)printf("; the remote store was not reached for %s of them yet",
                     ctl_count(response->store_pending_spaces));
    }
    (void)printf("\n");
}

int ctl_invalidate(const struct ctl_options *options, int argc, char **argv)
{
    static struct asked asked;
    const struct ctl_command command = {.name = argv[0], .usage = usage};
    int code;
    asked = (struct asked){.request = KVKEEP__V1__INVALIDATE_REQUEST__INIT,
                           .prefix = KVKEEP__V1__PROMPT__INIT};
    const char *complaint = parse(&asked, argc, argv);
    if (complaint != NULL) {
        return ctl_usage_told(&command, complaint[0] != '\0' ? complaint : NULL);
    }
    if (asked.has_prefix) {
        asked.prefix.salt = asked.request.salt;
        asked.request.salt = (ProtobufCBinaryData){.len = 0};
        asked.request.prefix = &asked.prefix;
    } else {
        asked.request.by_salt = asked.salted;
    }
    Kvkeep__V1__InvalidateResponse *response =
        ctl_admin_call(options, "/kvkeep.v1.Kvkeep/Invalidate", &asked.request.base,
                       &kvkeep__v1__invalidate_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    print(options, response);
    kvkeep__v1__invalidate_response__free_unpacked(response, NULL);
    return CTL_OK;
}
