/*
 * publish, unpublish, public: prefixes that one tenant gives to all. publish names a space and the
 * tokens of a prefix that is cached there; unpublish the number that publish printed.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define TOKENS_MAX (UINT32_C(1) << 20) /* of --tokens or --file */
#define SERVICE(call) "/kvkeep.v1.Kvkeep/" call

static const char publish_usage[] =
    "  --space ID                the space where the prefix is cached, as `spaces` lists them\n"
    "  --tokens TOKEN,TOKEN…     the prefix; its whole blocks become public\n"
    "  --file FILE               the same from a file, numbers with commas or space between; -:\n"
    "                            standard input\n";

struct tokens {
    uint8_t *bytes; /* [count] little-endian; ours */
    size_t count;
    size_t size_bytes; /* of `bytes` */
};

static bool token_add(struct tokens *tokens, uint32_t token)
{
    if (tokens->count * sizeof(token) == tokens->size_bytes) {
        size_t size_bytes = tokens->size_bytes * 2 + 4096;
        uint8_t *grown = realloc(tokens->bytes, size_bytes);
        if (grown == NULL) {
            return false;
        }
        tokens->bytes = grown;
        tokens->size_bytes = size_bytes;
    }
    kvk_store_le32(tokens->bytes + tokens->count * sizeof(uint32_t), token);
    tokens->count++;
    return true;
}

static bool is_between(char c)
{
    return c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/* Numbers, with one or more of ", \n" between. False: something else, or too many. */
static bool tokens_parse(struct tokens *tokens, const char *text)
{
    while (*text != '\0') {
        char *end;
        if (is_between(*text)) {
            text++;
            continue;
        }
        unsigned long long token = strtoull(text, &end, 10);
        if (*text < '0' || *text > '9' || token > UINT32_MAX || tokens->count == TOKENS_MAX ||
            (*end != '\0' && !is_between(*end)) || !token_add(tokens, (uint32_t)token)) {
            return false;
        }
        text = end;
    }
    return tokens->count > 0;
}

/* All of a file as text, malloc'ed; NULL: it cannot be read, or is larger than any prefix. */
static char *file_read(const char *path)
{
    const size_t most = (size_t)TOKENS_MAX * 12;
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    char *text = file == NULL ? NULL : malloc(most + 1);
    size_t size = 0;
    bool complete = false;
    if (text != NULL) {
        size = fread(text, 1, most, file);
        text[size] = '\0';
        complete = ferror(file) == 0 && size < most && strlen(text) == size;
    }
    if (file != NULL && file != stdin) {
        (void)fclose(file);
    }
    if (!complete) {
        free(text);
        text = NULL;
    }
    return text;
}

static bool parse_id(const char *text, uint64_t *id)
{
    char *end;
    *id = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0' && *id != 0;
}

/* NULL: right; else what is wrong. */
static const char *publish_parse(int argc, char **argv, uint64_t *space_id, struct tokens *tokens)
{
    static const struct option names[] = {
        {"space", required_argument, NULL, 's'},
        {"tokens", required_argument, NULL, 't'},
        {"file", required_argument, NULL, 'f'},
        {NULL, 0, NULL, 0},
    };
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (option == 's' && !parse_id(optarg, space_id)) {
            return "--space wants the number of a space";
        }
        if (option == 't' && !tokens_parse(tokens, optarg)) {
            return "--tokens wants numbers with commas between";
        }
        if (option == 'f') {
            char *text = file_read(optarg);
            bool parsed = text != NULL && tokens_parse(tokens, text);
            free(text);
            if (!parsed) {
                return "--file wants a file of numbers with commas or space between";
            }
        }
        if (option == '?') {
            return "";
        }
    }
    if (optind != argc) {
        return "it takes options only";
    }
    return *space_id == 0 || tokens->count == 0 ? "name --space, and --tokens or --file" : NULL;
}

static int publish_run(const struct ctl_options *options, uint64_t space_id,
                       const struct tokens *tokens)
{
    Kvkeep__V1__PublishPrefixRequest request = KVKEEP__V1__PUBLISH_PREFIX_REQUEST__INIT;
    Kvkeep__V1__Prompt prompt = KVKEEP__V1__PROMPT__INIT;
    int code;
    prompt.tokens =
        (ProtobufCBinaryData){.data = tokens->bytes, .len = tokens->count * sizeof(uint32_t)};
    request.space_id = space_id;
    request.prompt = &prompt;
    Kvkeep__V1__PublishPrefixResponse *answer =
        ctl_admin_call(options, SERVICE("PublishPrefix"), &request.base,
                       &kvkeep__v1__publish_prefix_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(json_pack("{s:I, s:I, s:I, s:I, s:I, s:b}", "public_id",
                                 (json_int_t)answer->public_id, "space_id",
                                 (json_int_t)answer->space_id, "tokens", (json_int_t)answer->tokens,
                                 "blocks", (json_int_t)answer->blocks, "bytes",
                                 (json_int_t)answer->bytes, "created", answer->created));
    } else {
        (void)printf("%llu %s: %s tokens", (unsigned long long)answer->public_id,
                     answer->created ? "is public" : "was public", ctl_count(answer->tokens));
        (void)printf(" in %s blocks, %s\n", ctl_count(answer->blocks), ctl_bytes(answer->bytes));
    }
    kvkeep__v1__publish_prefix_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

int ctl_publish(const struct ctl_options *options, int argc, char **argv)
{
    const struct ctl_command command = {.name = argv[0], .usage = publish_usage};
    struct tokens tokens = {.bytes = NULL};
    uint64_t space_id = 0;
    const char *complaint = publish_parse(argc, argv, &space_id, &tokens);
    int code = complaint != NULL ? ctl_usage_told(&command, complaint[0] != '\0' ? complaint : NULL)
                                 : publish_run(options, space_id, &tokens);
    free(tokens.bytes);
    return code;
}

int ctl_unpublish(const struct ctl_options *options, int argc, char **argv)
{
    const struct ctl_command command = {
        .name = argv[0], .usage = "  PUBLIC_ID                 as publish and public print it\n"};
    Kvkeep__V1__UnpublishPrefixRequest request = KVKEEP__V1__UNPUBLISH_PREFIX_REQUEST__INIT;
    int code;
    if (argc != 2 || !parse_id(argv[1], &request.public_id)) {
        return ctl_usage_told(&command, "it takes the number of a public prefix");
    }
    Kvkeep__V1__UnpublishPrefixResponse *answer =
        ctl_admin_call(options, SERVICE("UnpublishPrefix"), &request.base,
                       &kvkeep__v1__unpublish_prefix_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(json_pack("{s:I, s:I}", "blocks", (json_int_t)answer->blocks, "held_blocks",
                                 (json_int_t)answer->held_blocks));
    } else {
        (void)printf("%s blocks are public no more", ctl_count(answer->blocks));
        (void)printf("; readers still hold %s\n", ctl_count(answer->held_blocks));
    }
    kvkeep__v1__unpublish_prefix_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

static json_t *row_json(const Kvkeep__V1__PublicPrefix *row)
{
    return json_pack("{s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:b}", "public_id",
                     (json_int_t)row->public_id, "tenant", ctl_json_text(row->tenant),
                     "source_space_id", (json_int_t)row->source_space_id, "space_id",
                     (json_int_t)row->space_id, "tokens", (json_int_t)row->tokens, "blocks",
                     (json_int_t)row->blocks, "bytes", (json_int_t)row->bytes, "published_s",
                     (json_int_t)row->published_s, "hits", (json_int_t)row->hits, "hit_tokens",
                     (json_int_t)row->hit_tokens, "visible", row->visible, "durable", row->durable);
}

static void list_print(const struct ctl_options *options,
                       const Kvkeep__V1__ListPublicPrefixesResponse *answer)
{
    if (options->json) {
        json_t *rows = json_array();
        for (size_t i = 0; i < answer->n_prefixes; i++) {
            (void)json_array_append_new(rows, row_json(answer->prefixes[i]));
        }
        ctl_json_print(json_pack("{s:o, s:I, s:I}", "prefixes", rows, "withdrawn_spaces",
                                 (json_int_t)answer->withdrawn_spaces, "withdrawn_bytes",
                                 (json_int_t)answer->withdrawn_bytes));
        return;
    }
    (void)printf("%-20s %-16s %-20s %12s %10s %10s %10s %s\n", "PUBLIC", "TENANT", "FROM SPACE",
                 "TOKENS", "BLOCKS", "BYTES", "HITS", "");
    for (size_t i = 0; i < answer->n_prefixes; i++) {
        const Kvkeep__V1__PublicPrefix *row = answer->prefixes[i];
        (void)printf("%-20llu %-16s %-20llu %12llu %10llu %10s %10llu %s\n",
                     (unsigned long long)row->public_id, ctl_text(row->tenant),
                     (unsigned long long)row->source_space_id, (unsigned long long)row->tokens,
                     (unsigned long long)row->blocks, ctl_bytes(row->bytes),
                     (unsigned long long)row->hits,
                     !row->visible  ? "switched off"
                     : row->durable ? ""
                                    : "until a restart");
    }
    if (answer->withdrawn_spaces > 0) {
        (void)printf("withdrawn, but held or mapped still: %llu, with %s\n",
                     (unsigned long long)answer->withdrawn_spaces,
                     ctl_bytes(answer->withdrawn_bytes));
    }
}

int ctl_public(const struct ctl_options *options, int argc, char **argv)
{
    const struct ctl_command command = {.name = argv[0], .usage = ""};
    Kvkeep__V1__ListPublicPrefixesRequest request = KVKEEP__V1__LIST_PUBLIC_PREFIXES_REQUEST__INIT;
    int code;
    if (argc != 1) {
        return ctl_usage_told(&command, "it takes no options");
    }
    Kvkeep__V1__ListPublicPrefixesResponse *answer =
        ctl_admin_call(options, SERVICE("ListPublicPrefixes"), &request.base,
                       &kvkeep__v1__list_public_prefixes_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    list_print(options, answer);
    kvkeep__v1__list_public_prefixes_response__free_unpacked(answer, NULL);
    return CTL_OK;
}
