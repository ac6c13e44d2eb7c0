/*
 * kvkeepctl why --space … --tokens …: why did this prompt miss? The prompt comes from the command
 * line or a file, is sent to the daemon, and is never shown again.
 */
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define FILE_BYTES_MAX ((size_t)512 << 20)

/* ---- The prompt ---- */

struct prompt {
    uint8_t *tokens; /* [count] little-endian u32, ours */
    size_t count;
    size_t capacity;
};

static bool token_add(struct prompt *prompt, unsigned long long token)
{
    if (token > UINT32_MAX) {
        return false;
    }
    if (prompt->count == prompt->capacity) {
        size_t wider = prompt->capacity == 0 ? 4096 : 2 * prompt->capacity;
        void *moved = realloc(prompt->tokens, wider * sizeof(uint32_t));
        if (moved == NULL) {
            return false;
        }
        prompt->tokens = moved;
        prompt->capacity = wider;
    }
    kvk_store_le32(prompt->tokens + sizeof(uint32_t) * prompt->count++, (uint32_t)token);
    return true;
}

/* Numbers with anything like commas, brackets and blanks between; false: something else is there.
 */
static bool text_parse(struct prompt *prompt, const char *text, size_t size)
{
    const char *end = text + size;
    for (const char *at = text; at < end;) {
        if (isspace((unsigned char)*at) || strchr(",;[]", *at) != NULL) {
            at++;
            continue;
        }
        unsigned long long token = 0;
        const char *begin = at;
        for (; at < end && *at >= '0' && *at <= '9' && at - begin < 11; at++) {
            token = 10 * token + (unsigned long long)(*at - '0');
        }
        if (at == begin || !token_add(prompt, token)) {
            return false;
        }
    }
    return true;
}

/* As they would lie in memory: nothing of a text. */
static bool words_parse(struct prompt *prompt, const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i + sizeof(uint32_t) <= size; i += sizeof(uint32_t)) {
        if (!token_add(prompt, kvk_load_le32(bytes + i))) {
            return false;
        }
    }
    return size % sizeof(uint32_t) == 0;
}

static char *file_read(const char *path, size_t *size)
{
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
    char *bytes = NULL;
    size_t capacity = 0;
    *size = 0;
    while (file != NULL && !feof(file) && !ferror(file)) {
        if (*size == capacity) {
            capacity = capacity == 0 ? 65536 : 2 * capacity;
            char *moved = capacity > FILE_BYTES_MAX ? NULL : realloc(bytes, capacity);
            if (moved == NULL) {
                errno = EFBIG;
                break;
            }
            bytes = moved;
        }
        *size += fread(bytes + *size, 1, capacity - *size, file);
    }
    bool whole = file != NULL && feof(file) && !ferror(file);
    if (file != NULL && file != stdin) {
        (void)fclose(file);
    }
    if (!whole) {
        free(bytes);
        return NULL;
    }
    return bytes;
}

static bool file_parse(struct prompt *prompt, const char *path)
{
    size_t size;
    char *bytes = file_read(path, &size);
    if (bytes == NULL) {
        (void)fprintf(stderr, "kvkeepctl why: %s: %s\n", path, strerror(errno));
        return false;
    }
    bool right = text_parse(prompt, bytes, size);
    if (!right) {
        prompt->count = 0;
        right = words_parse(prompt, (const uint8_t *)bytes, size);
    }
    free(bytes);
    if (!right) {
        (void)fprintf(stderr, "kvkeepctl why: %s: neither numbers as text nor 32-bit words\n",
                      path);
    }
    return right;
}

static ProtobufCBinaryData data_of(const char *text)
{
    return (ProtobufCBinaryData){.data = (uint8_t *)(uintptr_t)text,
                                 .len = text == NULL ? 0 : strlen(text)};
}

/* ---- The answer ---- */

static const char *tier_name(Kvkeep__V1__Tier tier)
{
    return tier == KVKEEP__V1__TIER__TIER_DEVICE ? "device"
           : tier == KVKEEP__V1__TIER__TIER_HOST ? "host"
                                                 : "disk";
}

static json_t *answer_json(const Kvkeep__V1__ExplainMissResponse *response)
{
    json_t *object = json_pack(
        "{s:o, s:o, s:I, s:I, s:I, s:i, s:I, s:I, s:I, s:i}", "verdict",
        ctl_json_text(response->verdict), "sentence", ctl_json_text(response->sentence),
        "cached_tokens", (json_int_t)response->cached_tokens, "prompt_blocks",
        (json_int_t)response->prompt_blocks, "missing_block", (json_int_t)response->missing_block,
        "group", (int)response->group, "missing_looked", (json_int_t)response->missing_looked,
        "missing_gone", (json_int_t)response->missing_gone, "journal_reach_ms",
        (json_int_t)response->journal_reach_ms, "block_tokens", (int)response->block_tokens);
    json_object_set_new(object, "partial_tokens",
                        json_integer((json_int_t)response->partial_tokens));
    if (response->reason.len > 0) {
        json_object_set_new(
            object, "gone",
            json_pack("{s:o, s:I, s:s, s:I, s:I, s:f, s:o, s:b, s:o, s:b}", "reason",
                      ctl_json_text(response->reason), "age_ms", (json_int_t)response->gone_age_ms,
                      "tier", tier_name(response->gone_tier), "idle_ms",
                      (json_int_t)response->gone_idle_ms, "uses", (json_int_t)response->gone_uses,
                      "score", response->gone_score, "for_tenant",
                      ctl_json_text(response->gone_for_tenant), "for_other_tenant",
                      (int)response->gone_for_other, "for_space_id",
                      json_sprintf("%llu", (unsigned long long)response->gone_for_space_id),
                      "with_space", (int)response->gone_before));
    }
    return object;
}

static void answer_print(const Kvkeep__V1__ExplainMissResponse *response)
{
    static const char *const titles[] = {"-verdict", "cached", "blocks", "missing", "-reason",
                                         "-tier",    "gone",   "idle",   "uses"};
    /* A sentence may be longer than the ring of texts. */
    (void)printf("%.*s\n\n", (int)response->sentence.len, (const char *)response->sentence.data);
    struct ctl_table table;
    ctl_table_init(&table, 9, titles);
    bool gone = response->reason.len > 0;
    ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", ctl_text(response->verdict),
                  ctl_count(response->cached_tokens), ctl_count(response->prompt_blocks),
                  ctl_count(response->missing_block), gone ? ctl_text(response->reason) : "",
                  gone ? tier_name(response->gone_tier) : "",
                  gone ? ctl_duration_ms(response->gone_age_ms) : "",
                  gone ? ctl_duration_ms(response->gone_idle_ms) : "",
                  gone ? ctl_count(response->gone_uses) : "");
    ctl_table_print(&table);
}

static int ask(const struct ctl_options *options, Kvkeep__V1__ExplainMissRequest *request)
{
    int code;
    Kvkeep__V1__ExplainMissResponse *response =
        ctl_admin_call(options, "/kvkeep.v1.Admin/ExplainMiss", &request->base,
                       &kvkeep__v1__explain_miss_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(answer_json(response));
    } else {
        answer_print(response);
    }
    kvkeep__v1__explain_miss_response__free_unpacked(response, NULL);
    return CTL_OK;
}

/* ---- The command ---- */

bool ctl_why_is_miss(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--tokens", 8) == 0 || strncmp(argv[i], "--prompt-file", 13) == 0 ||
            strncmp(argv[i], "--space", 7) == 0) {
            return true;
        }
    }
    return false;
}

int ctl_why_miss(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option names[] = {{"space", required_argument, NULL, 's'},
                                          {"tokens", required_argument, NULL, 't'},
                                          {"prompt-file", required_argument, NULL, 'f'},
                                          {"salt", required_argument, NULL, 'S'},
                                          {"tenant", required_argument, NULL, 'T'},
                                          {"leave-last", no_argument, NULL, 'l'},
                                          {NULL, 0, NULL, 0}};
    static const struct ctl_command command = {
        .name = "why",
        .usage = "  --space ID|MODEL and one of --tokens T,T,… and --prompt-file "
                 "FILE; --salt TEXT, --tenant NAME, --leave-last\n"};
    struct prompt prompt = {.tokens = NULL};
    Kvkeep__V1__Prompt message = KVKEEP__V1__PROMPT__INIT;
    Kvkeep__V1__ExplainMissRequest request = KVKEEP__V1__EXPLAIN_MISS_REQUEST__INIT;
    const char *space = NULL;
    const char *tenant = NULL;
    uint32_t prompts = 0;
    bool right = true;
    int option;
    while (right && (option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 's':
            space = optarg;
            break;
        case 't':
            right = text_parse(&prompt, optarg, strlen(optarg));
            prompts++;
            break;
        case 'f':
            if (!file_parse(&prompt, optarg)) {
                free(prompt.tokens);
                return CTL_FAILED;
            }
            prompts++;
            break;
        case 'S':
            message.salt = data_of(optarg);
            break;
        case 'T':
            tenant = optarg;
            break;
        case 'l':
            request.leave_last = true;
            break;
        default:
            right = false;
            break;
        }
    }
    if (!right || optind != argc || space == NULL || prompts != 1) {
        free(prompt.tokens);
        return ctl_usage(&command, "a space and one prompt of numbers");
    }
    int code;
    request.space_id = ctl_space_find(options, "why", space, tenant, &code);
    if (code == CTL_OK) {
        message.tokens =
            (ProtobufCBinaryData){.data = prompt.tokens, .len = prompt.count * sizeof(uint32_t)};
        request.prompt = &message;
        code = ask(options, &request);
    }
    free(prompt.tokens);
    return code;
}
