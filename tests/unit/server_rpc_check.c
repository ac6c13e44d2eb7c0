/*
 * The edge: what comes from outside is refused with its field's name, or taken as it is. Messages
 * are bounded before they are unpacked.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "daemon/rpc_private.h"

#define TOKENS_MAX 1000
#define SPANS_MAX 40

static struct kvk_config config;
static struct kvk_rpc rpc;

/* A call as the checks see it; every test begins with one. */
static struct kvk_rpc_run begin(void)
{
    config.tokens = TOKENS_MAX;
    config.spans = SPANS_MAX;
    config.salt_bytes = 8;
    config.leases = 100;
    config.sequences = 100;
    config.attend_queries = 50;
    config.message_bytes = 64 << 20;
    rpc.config = &config;
    struct kvk_rpc_run run = {.rpc = &rpc, .memory = kvk_rpc_memory_begin()};
    cr_assert(run.memory != NULL);
    return run;
}

static ProtobufCBinaryData bytes_of(const void *data, size_t size)
{
    return kvk_rpc_bytes(data, size);
}

static void expect_field(enum kvk_status status, const struct kvk_error *error, const char *field)
{
    cr_assert(status == KVK_INVALID, "%s was taken", field);
    cr_assert(error->cause == KVK_CAUSE_FIELD);
    cr_assert(strcmp(error->field, field) == 0);
    cr_assert(strlen(error->text) > 0);
}

/* ---- numbers, ids, enums, names ---- */

Test(rpc_check, numbers_are_finite)
{
    struct kvk_error error;
    const double bad[] = {NAN, INFINITY, -INFINITY, -1.0, -1e-300};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        expect_field(kvk_rpc_check_number(bad[i], false, "scale", &error), &error, "scale");
    }
    expect_field(kvk_rpc_check_number(0.0, true, "scale", &error), &error, "scale");
    expect_field(kvk_rpc_check_number((double)-0.0f, true, "scale", &error), &error, "scale");
    cr_assert(kvk_rpc_check_number(0.0, false, "scale", &error) == KVK_OK);
    cr_assert(kvk_rpc_check_number(1e-300, true, "scale", &error) == KVK_OK);
    cr_assert(kvk_rpc_check_number(1e300, true, "scale", &error) == KVK_OK);
}

Test(rpc_check, ranges_do_not_wrap)
{
    struct kvk_error error;
    expect_field(kvk_rpc_check_range(1, 0, "count", &error), &error, "count");
    expect_field(kvk_rpc_check_range(UINT64_MAX, 1, "count", &error), &error, "count");
    expect_field(kvk_rpc_check_range(2, UINT64_MAX - 1, "count", &error), &error, "count");
    cr_assert(kvk_rpc_check_range(1, UINT64_MAX - 1, "count", &error) == KVK_OK);
    expect_field(kvk_rpc_check_count(0, 5, "count", &error), &error, "count");
    expect_field(kvk_rpc_check_count(6, 5, "count", &error), &error, "count");
    cr_assert(error.value == 6 && error.limit == 5);
    cr_assert(kvk_rpc_check_count(5, 5, "count", &error) == KVK_OK);
}

Test(rpc_check, one_of_two)
{
    struct kvk_error error;
    expect_field(kvk_rpc_check_one_of(0, 0, "", &error), &error, "sequence_id");
    expect_field(kvk_rpc_check_one_of(1, 1, "items[3]", &error), &error, "items[3].sequence_id");
    cr_assert(kvk_rpc_check_one_of(1, 0, "", &error) == KVK_OK);
    cr_assert(kvk_rpc_check_one_of(0, 1, "", &error) == KVK_OK);
}

/* Against a plain search for zeros and pairs. */
Test(rpc_check, lists_of_ids)
{
    struct kvk_random random;
    struct kvk_error error;
    uint64_t ids[12];
    unsigned taken = 0;
    kvk_random_init(&random, 1);
    for (int round = 0; round < 20000; round++) {
        struct kvk_rpc_run run = begin();
        size_t count = kvk_random_below(&random, 13);
        bool right = count > 0;
        for (size_t i = 0; i < count; i++) {
            ids[i] = kvk_random_below(&random, 60) * UINT64_C(0x0400000000000001);
            right = right && ids[i] != 0;
            for (size_t j = 0; j < i; j++) {
                right = right && ids[i] != ids[j];
            }
        }
        enum kvk_status status = kvk_rpc_check_ids(&run, ids, count, "lease_ids", &error);
        if (right) {
            cr_assert(status == KVK_OK);
            taken++;
        } else {
            expect_field(status, &error, "lease_ids");
        }
    }
    cr_assert(taken > 1000 && taken < 19000);
}

Test(rpc_check, unknown_enum_values)
{
    struct kvk_error error;
    enum kvk_format format;
    enum kvk_layout layout;
    enum kvk_attention attention;
    int tier;
    for (int value = -3; value < 8; value++) {
        enum kvk_status status =
            kvk_rpc_check_format((Kvkeep__V1__Format)value, false, "f", &format, &error);
        cr_assert((status == KVK_OK) == (value >= 1 && value <= 6));
        status = kvk_rpc_check_format((Kvkeep__V1__Format)value, true, "f", &format, &error);
        cr_assert((status == KVK_OK) == (value >= 0 && value <= 6));
        status = kvk_rpc_check_layout((Kvkeep__V1__Layout)value, "f", &layout, &error);
        cr_assert((status == KVK_OK) == (value >= 1 && value <= 3));
        status = kvk_rpc_check_attention((Kvkeep__V1__Attention)value, "f", &attention, &error);
        cr_assert((status == KVK_OK) == (value >= 1 && value <= 2));
        status = kvk_rpc_check_tier((Kvkeep__V1__Tier)value, "f", &tier, &error);
        cr_assert((status == KVK_OK) == (value >= 0 && value <= 2));
        cr_assert(status != KVK_OK || tier == value - 1);
        if (status != KVK_OK) {
            expect_field(status, &error, "f");
        }
    }
}

Test(rpc_check, names_are_utf8)
{
    struct kvk_error error;
    struct kvk_view view;
    char many[300];
    memset(many, 'x', sizeof(many));
    const struct {
        const char *text;
        size_t size;
        bool right;
    } cases[] = {
        {"model", 5, true},    {"", 0, false},         {"a\0b", 3, false},
        {"\xff", 1, false},    {"\xc0\x80", 2, false}, {"\xed\xa0\x80", 3, false},
        {"\xc3\x85", 2, true}, {"\xc3", 1, false},     {many, 255, true},
        {many, 256, false},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ProtobufCBinaryData bytes = bytes_of(cases[i].text, cases[i].size);
        enum kvk_status status = kvk_rpc_check_name(&bytes, 1, 255, "name", &view, &error);
        if (cases[i].right) {
            cr_assert(status == KVK_OK, "case %zu", i);
            cr_assert(view.size == cases[i].size);
        } else {
            expect_field(status, &error, "name");
        }
    }
}

Test(rpc_check, request_ids)
{
    struct kvk_error error;
    struct kvk_request_id id;
    uint8_t data[65] = {7};
    ProtobufCBinaryData bytes = bytes_of(data, 64);
    cr_assert(kvk_rpc_check_request_id(&bytes, &id, &error) == KVK_OK);
    cr_assert(id.size == 64 && id.bytes[0] == 7);
    bytes.len = 65;
    expect_field(kvk_rpc_check_request_id(&bytes, &id, &error), &error, "request_id");
    bytes = bytes_of(NULL, 0);
    cr_assert(kvk_rpc_check_request_id(&bytes, &id, &error) == KVK_OK);
    cr_assert(id.size == 0);
}

/* ---- prompts ---- */

Test(rpc_check, tokens_are_whole_and_bounded)
{
    struct kvk_rpc_run run = begin();
    struct kvk_error error;
    const uint32_t *tokens;
    uint64_t count;
    static _Alignas(8) uint8_t data[4 * (TOKENS_MAX + 1) + 1];
    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)(i * 7);
    }
    for (size_t size = 1; size < 4; size++) {
        ProtobufCBinaryData bytes = bytes_of(data, 8 + size);
        expect_field(kvk_rpc_check_tokens(&run, &bytes, "tokens", &tokens, &count, &error), &error,
                     "tokens");
    }
    ProtobufCBinaryData bytes = bytes_of(data, 4 * (TOKENS_MAX + 1));
    expect_field(kvk_rpc_check_tokens(&run, &bytes, "tokens", &tokens, &count, &error), &error,
                 "tokens");
    cr_assert(error.value == TOKENS_MAX + 1 && error.limit == TOKENS_MAX);

    bytes.len = 4 * TOKENS_MAX; /* aligned: used where it lies */
    cr_assert(kvk_rpc_check_tokens(&run, &bytes, "t", &tokens, &count, &error) == KVK_OK);
    cr_assert((const void *)tokens == (const void *)data && count == TOKENS_MAX);

    bytes.data = data + 1; /* not aligned: copied */
    cr_assert(kvk_rpc_check_tokens(&run, &bytes, "t", &tokens, &count, &error) == KVK_OK);
    cr_assert((uintptr_t)tokens % _Alignof(uint32_t) == 0);
    cr_assert(memcmp(tokens, data + 1, bytes.len) == 0);

    bytes = bytes_of(NULL, 0);
    cr_assert(kvk_rpc_check_tokens(&run, &bytes, "t", &tokens, &count, &error) == KVK_OK);
    cr_assert(count == 0);
}

Test(rpc_check, prompts)
{
    struct kvk_rpc_run run = begin();
    struct kvk_error error;
    struct kvk_prompt prompt;
    uint32_t tokens[4] = {1, 2, 3, 4};
    Kvkeep__V1__Prompt message = KVKEEP__V1__PROMPT__INIT;
    cr_assert(kvk_rpc_check_prompt(&run, NULL, "prompt", &prompt, &error) == KVK_OK);
    cr_assert(prompt.token_count == 0);

    message.tokens = bytes_of(tokens, 15);
    expect_field(kvk_rpc_check_prompt(&run, &message, "prompt", &prompt, &error), &error,
                 "prompt.tokens");
    message.tokens.len = 16;
    message.salt = bytes_of("nine byte", 9);
    expect_field(kvk_rpc_check_prompt(&run, &message, "prompt", &prompt, &error), &error,
                 "prompt.salt");
    message.salt.len = 8;
    cr_assert(kvk_rpc_check_prompt(&run, &message, "prompt", &prompt, &error) == KVK_OK);
    cr_assert(prompt.token_count == 4 && prompt.salt_size == 8);
}

struct span_list {
    Kvkeep__V1__ContentSpan spans[8];
    Kvkeep__V1__ContentSpan *pointers[8];
};

static void spans_init(struct span_list *list)
{
    static const uint8_t digest[65];
    for (size_t i = 0; i < 8; i++) {
        kvkeep__v1__content_span__init(&list->spans[i]);
        list->spans[i].count = 1;
        list->spans[i].digest = bytes_of(digest, 32);
        list->pointers[i] = &list->spans[i];
    }
}

Test(rpc_check, spans_name_what_is_wrong)
{
    struct kvk_rpc_run run = begin();
    struct kvk_error error;
    const struct kvk_content_span *result;
    const struct {
        uint64_t first, count;
        size_t digest_size;
        const char *field;
    } cases[] = {
        {20, 1, 0, "spans[1].digest"},          {20, 1, 65, "spans[1].digest"},
        {20, 0, 32, "spans[1].count"},          {20, 11, 32, "spans[1].count"},
        {20, UINT64_MAX, 32, "spans[1].count"}, {UINT64_MAX, 1, 32, "spans[1].count"},
        {14, 1, 32, "spans[1].first"},          {9, 1, 32, "spans[1].first"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct span_list list;
        spans_init(&list);
        list.spans[0].first = 10;
        list.spans[0].count = 5;
        list.spans[1].first = cases[i].first;
        list.spans[1].count = cases[i].count;
        list.spans[1].digest.len = cases[i].digest_size;
        expect_field(kvk_rpc_check_spans(&run, 2, list.pointers, 10, 20, "spans", &result, &error),
                     &error, cases[i].field);
    }
}

/* Against marking every token: no token twice, none outside, in order. */
Test(rpc_check, random_spans_against_marks)
{
    struct kvk_random random;
    struct kvk_error error;
    unsigned taken = 0;
    kvk_random_init(&random, 2);
    for (int round = 0; round < 20000; round++) {
        struct kvk_rpc_run run = begin();
        struct span_list list;
        const struct kvk_content_span *result = NULL;
        bool marks[40] = {false};
        uint64_t last = 0;
        spans_init(&list);
        size_t count = 1 + kvk_random_below(&random, 4);
        uint64_t first = kvk_random_below(&random, 8);
        uint64_t token_count = 8 + kvk_random_below(&random, 16);
        bool right = true;
        uint64_t at = first;
        for (size_t i = 0; i < count; i++) {
            Kvkeep__V1__ContentSpan *span = &list.spans[i];
            span->first = at + kvk_random_below(&random, 4) - (kvk_random_below(&random, 8) == 0);
            span->count = kvk_random_below(&random, 5);
            at = span->first + span->count;
            right = right && span->count > 0 && span->first >= last && span->first < 30;
            for (uint64_t j = span->first; right && j < span->first + span->count; j++) {
                right = j >= first && j < first + token_count && !marks[j];
                marks[j] = true;
            }
            last = span->first;
        }
        enum kvk_status status = kvk_rpc_check_spans(&run, count, list.pointers, first, token_count,
                                                     "spans", &result, &error);
        cr_assert(status == (right ? KVK_OK : KVK_INVALID));
        taken += right;
        for (size_t i = 0; right && i < count; i++) {
            cr_assert(result[i].first == list.spans[i].first &&
                      result[i].count == list.spans[i].count && result[i].digest_size == 32);
        }
    }
    cr_assert(taken > 2000 && taken < 18000, "%u of 20000 were right", taken);
}

/* ---- spaces ---- */

struct space_message {
    Kvkeep__V1__OpenSpaceRequest request;
    Kvkeep__V1__Identity identity;
    Kvkeep__V1__PrefillCost cost;
    Kvkeep__V1__LayerGroup groups[9];
    Kvkeep__V1__LayerGroup *pointers[9];
};

static void space_init(struct space_message *message)
{
    kvkeep__v1__open_space_request__init(&message->request);
    kvkeep__v1__identity__init(&message->identity);
    kvkeep__v1__prefill_cost__init(&message->cost);
    message->identity.model = bytes_of("m", 1);
    message->request.identity = &message->identity;
    message->request.prefill_cost = &message->cost;
    message->request.block_tokens = 16;
    for (size_t i = 0; i < 9; i++) {
        Kvkeep__V1__LayerGroup *group = &message->groups[i];
        kvkeep__v1__layer_group__init(group);
        group->layers = 2;
        group->kv_heads = 2;
        group->head_size_k = 8;
        group->head_size_v = 8;
        group->format_k = KVKEEP__V1__FORMAT__FORMAT_BF16;
        group->format_v = KVKEEP__V1__FORMAT__FORMAT_BF16;
        group->layout = KVKEEP__V1__LAYOUT__LAYOUT_HEADS_FIRST;
        group->attention = KVKEEP__V1__ATTENTION__ATTENTION_SELF;
        message->pointers[i] = group;
    }
    message->request.n_groups = 2;
    message->request.groups = message->pointers;
}

static void break_block_zero(struct space_message *message)
{
    message->request.block_tokens = 0;
}
static void break_block_huge(struct space_message *message)
{
    message->request.block_tokens = UINT32_MAX;
}
static void break_no_groups(struct space_message *message)
{
    message->request.n_groups = 0;
}
static void break_nine_groups(struct space_message *message)
{
    message->request.n_groups = 9;
}
static void break_identity(struct space_message *message)
{
    message->request.identity = NULL;
}
static void break_tenant(struct space_message *message)
{
    message->request.tenant = bytes_of("\xff", 1);
}
static void break_shards(struct space_message *message)
{
    message->request.tensor_shards = UINT32_MAX;
    message->request.pipeline_shards = UINT32_MAX;
}
static void break_shard_product(struct space_message *message)
{
    message->request.tensor_shards = 64;
    message->request.pipeline_shards = 2;
}
static void break_format(struct space_message *message)
{
    message->groups[1].format_k = (Kvkeep__V1__Format)99;
}
static void break_layout(struct space_message *message)
{
    message->groups[1].layout = KVKEEP__V1__LAYOUT__LAYOUT_UNSPECIFIED;
}
static void break_attention(struct space_message *message)
{
    message->groups[0].attention = (Kvkeep__V1__Attention)-1;
}
static void break_heads(struct space_message *message)
{
    message->groups[1].kv_heads = 0;
}
static void break_sinks(struct space_message *message)
{
    message->groups[0].sinks = 4;
}
static void break_cost(struct space_message *message)
{
    message->cost.flops_per_token_position = NAN;
}
static void break_speed(struct space_message *message)
{
    message->cost.flops_per_second = -1;
}

Test(rpc_check, spaces_name_what_is_wrong)
{
    const struct {
        void (*spoil)(struct space_message *message);
        const char *field;
    } cases[] = {
        {break_block_zero, "block_tokens"},
        {break_block_huge, "block_tokens"},
        {break_no_groups, "groups"},
        {break_nine_groups, "groups"},
        {break_identity, "identity"},
        {break_tenant, "tenant"},
        {break_shards, "tensor_shards"},
        {break_shard_product, "pipeline_shards"},
        {break_format, "groups[1].format_k"},
        {break_layout, "groups[1].layout"},
        {break_attention, "groups[0].attention"},
        {break_heads, "groups[1].kv_heads"},
        {break_sinks, "groups[0].sinks"},
        {break_cost, "prefill_cost.flops_per_token_position"},
        {break_speed, "prefill_cost.flops_per_second"},
    };
    struct kvk_error error;
    struct kvk_space_request *request = malloc(sizeof(*request));
    struct space_message message;
    space_init(&message);
    cr_assert(kvk_rpc_check_space(&message.request, request, &error) == KVK_OK);
    cr_assert(request->group_count == 2 && request->groups[1].tensor_shards == 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        space_init(&message);
        cases[i].spoil(&message);
        expect_field(kvk_rpc_check_space(&message.request, request, &error), &error,
                     cases[i].field);
    }
    free(request);
}

/* ---- messages ---- */

static struct kvk_bytes pack(const ProtobufCMessage *message, uint8_t *buffer, size_t capacity)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    cr_assert(size <= capacity);
    (void)protobuf_c_message_pack(message, buffer);
    return (struct kvk_bytes){.data = buffer, .size_bytes = size};
}

/* The same as protobuf-c with malloc gives, field by field: packing shows. */
Test(rpc_wire, unpacks_what_was_packed)
{
    struct kvk_random random;
    struct kvk_error error;
    uint32_t tokens[64];
    uint8_t buffer[2048];
    uint8_t again[2048];
    kvk_random_init(&random, 3);
    for (int round = 0; round < 2000; round++) {
        struct kvk_rpc_run run = begin();
        struct span_list list;
        spans_init(&list);
        kvk_random_fill(&random, tokens, sizeof(tokens));
        Kvkeep__V1__Prompt prompt = KVKEEP__V1__PROMPT__INIT;
        prompt.tokens = bytes_of(tokens, kvk_random_below(&random, 65) * 4);
        prompt.salt = bytes_of(tokens, kvk_random_below(&random, 9));
        prompt.n_spans = kvk_random_below(&random, 8);
        prompt.spans = list.pointers;
        for (size_t i = 0; i < prompt.n_spans; i++) {
            list.spans[i].first = kvk_random_next(&random) >> kvk_random_below(&random, 64);
        }
        Kvkeep__V1__LookupRequest request = KVKEEP__V1__LOOKUP_REQUEST__INIT;
        request.space_id = kvk_random_next(&random) >> kvk_random_below(&random, 64);
        request.prompt = kvk_random_chance(&random, 0.9) ? &prompt : NULL;
        request.leave_last = kvk_random_chance(&random, 0.5);
        struct kvk_bytes bytes = pack(&request.base, buffer, sizeof(buffer));
        ProtobufCMessage *message;
        cr_assert(kvk_wire_unpack(&config, &run.memory->arena,
                                  &kvkeep__v1__lookup_request__descriptor, bytes, &message,
                                  &error) == KVK_OK);
        struct kvk_bytes copy = pack(message, again, sizeof(again));
        cr_assert(copy.size_bytes == bytes.size_bytes);
        cr_assert(memcmp(copy.data, bytes.data, bytes.size_bytes) == 0);
    }
}

static void put_tag(uint8_t **at, uint32_t id, enum kvk_wire_type type)
{
    *at = kvk_wire_write_tag(*at, id, type);
}

/* Two bytes on the wire for each element, and none of the memory that it would become. */
Test(rpc_wire, hostile_repetition_is_refused_before_it_is_unpacked)
{
    struct kvk_rpc_run run = begin();
    struct kvk_error error;
    ProtobufCMessage *message;
    const size_t count = 2 << 20;
    uint8_t *buffer = malloc(count * 2 + 16);
    uint8_t *at = buffer;
    put_tag(&at, 2, KVK_WIRE_BYTES); /* LookupRequest.prompt */
    at = kvk_wire_write_varint(at, count * 2);
    for (size_t i = 0; i < count; i++) {
        *at++ = 3 << 3 | KVK_WIRE_BYTES; /* Prompt.spans, empty */
        *at++ = 0;
    }
    struct kvk_bytes bytes = {.data = buffer, .size_bytes = (size_t)(at - buffer)};
    expect_field(kvk_wire_unpack(&config, &run.memory->arena,
                                 &kvkeep__v1__lookup_request__descriptor, bytes, &message, &error),
                 &error, "prompt.spans");
    cr_assert(error.value == SPANS_MAX + 1 && error.limit == SPANS_MAX);
    cr_assert(run.memory->arena.taken_bytes == 0);

    /* Fields that nobody knows: a few may come from a newer client, not millions. */
    at = buffer;
    for (size_t i = 0; i < count / 2; i++) {
        put_tag(&at, 1000, KVK_WIRE_VARINT);
        *at++ = 1;
        if (i + 1 == 100) {
            bytes.size_bytes = (size_t)(at - buffer);
            cr_assert(kvk_wire_unpack(&config, &run.memory->arena,
                                      &kvkeep__v1__lookup_request__descriptor, bytes, &message,
                                      &error) == KVK_OK);
        }
    }
    run = begin();
    bytes.size_bytes = (size_t)(at - buffer);
    expect_field(kvk_wire_unpack(&config, &run.memory->arena,
                                 &kvkeep__v1__lookup_request__descriptor, bytes, &message, &error),
                 &error, "");
    cr_assert(run.memory->arena.taken_bytes == 0);
    free(buffer);
}

/* Packed ids: one byte each on the wire. */
Test(rpc_wire, packed_ids_are_counted)
{
    struct kvk_rpc_run run = begin();
    struct kvk_error error;
    ProtobufCMessage *message;
    uint8_t buffer[256];
    for (size_t count = 99; count <= 102; count++) {
        uint8_t *at = buffer;
        put_tag(&at, 2, KVK_WIRE_BYTES);
        at = kvk_wire_write_varint(at, count);
        for (size_t i = 0; i < count; i++) {
            *at++ = (uint8_t)(i + 1);
        }
        struct kvk_bytes bytes = {.data = buffer, .size_bytes = (size_t)(at - buffer)};
        enum kvk_status status =
            kvk_wire_unpack(&config, &run.memory->arena, &kvkeep__v1__release_request__descriptor,
                            bytes, &message, &error);
        if (count <= 100) {
            cr_assert(status == KVK_OK);
            cr_assert(((Kvkeep__V1__ReleaseRequest *)message)->n_lease_ids == count);
        } else {
            expect_field(status, &error, "lease_ids");
        }
    }
}

/* Every request of the API: any repeated field has a limit, and an empty message is one. */
Test(rpc_wire, every_request_can_be_walked)
{
    const ProtobufCMessageDescriptor *const requests[] = {
        &kvkeep__v1__lookup_request__descriptor,
        &kvkeep__v1__append_request__descriptor,
        &kvkeep__v1__attend_request__descriptor,
        &kvkeep__v1__close_request__descriptor,
        &kvkeep__v1__release_request__descriptor,
        &kvkeep__v1__open_space_request__descriptor,
        &kvkeep__v1__open_sequence_request__descriptor,
        &kvkeep__v1__pin_request__descriptor,
        &kvkeep__v1__invalidate_request__descriptor,
        &kvkeep__v1__get_block_request__descriptor,
        &kvkeep__v1__session_request__descriptor,
        &kvkeep__v1__touch_request__descriptor,
        &kvkeep__v1__create_tenant_request__descriptor,
        &kvkeep__v1__change_tenant_request__descriptor,
        &kvkeep__v1__create_credential_request__descriptor,
    };
    struct kvk_error error;
    uint8_t buffer[8];
    (void)begin();
    for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
        struct kvk_bytes bytes = {.data = NULL, .size_bytes = 0};
        cr_assert(kvk_wire_check(&config, requests[i], bytes, &error) == KVK_OK);
        for (unsigned j = 0; j < requests[i]->n_fields; j++) {
            uint8_t *at = buffer;
            put_tag(&at, requests[i]->fields[j].id, KVK_WIRE_BYTES);
            *at++ = 0;
            bytes = (struct kvk_bytes){.data = buffer, .size_bytes = (size_t)(at - buffer)};
            cr_assert(kvk_wire_check(&config, requests[i], bytes, &error) == KVK_OK);
        }
    }
}

Test(rpc_wire, damaged_messages_are_refused)
{
    struct kvk_rpc_run run = begin();
    struct kvk_error error;
    ProtobufCMessage *message;
    uint32_t tokens[4] = {1, 2, 3, 4};
    uint8_t buffer[64];
    Kvkeep__V1__Prompt prompt = KVKEEP__V1__PROMPT__INIT;
    prompt.tokens = bytes_of(tokens, sizeof(tokens));
    Kvkeep__V1__LookupRequest request = KVKEEP__V1__LOOKUP_REQUEST__INIT;
    request.space_id = UINT64_MAX;
    request.prompt = &prompt;
    struct kvk_bytes whole = pack(&request.base, buffer, sizeof(buffer));
    unsigned refused = 0;
    for (size_t size = 0; size < whole.size_bytes; size++) {
        struct kvk_bytes bytes = {.data = buffer, .size_bytes = size};
        refused +=
            kvk_wire_unpack(&config, &run.memory->arena, &kvkeep__v1__lookup_request__descriptor,
                            bytes, &message, &error) == KVK_INVALID;
    }
    cr_assert(refused == (uint32_t)whole.size_bytes - 2); /* 0 and 11 bytes end between */

    const struct {
        const char *data;
        size_t size;
    } bad[] = {
        {"\x0b", 1},                                              /* a group */
        {"\x00\x01", 2},                                          /* field 0 */
        {"\x0a\xff\xff\xff\xff\x0f", 6},                          /* longer than the message */
        {"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 11},     /* longer than memory */
        {"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", 11},     /* past 64 bits */
        {"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00", 12}, /* an endless varint */
        {"\x09\x01\x02\x03", 4},                                  /* half a fixed64 */
        {"\x0d\x01", 2},                                          /* half a fixed32 */
        {"\x0f\x01", 2},                                          /* no such type */
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct kvk_bytes bytes = {.data = (const uint8_t *)bad[i].data, .size_bytes = bad[i].size};
        cr_assert(kvk_wire_unpack(&config, &run.memory->arena,
                                  &kvkeep__v1__lookup_request__descriptor, bytes, &message,
                                  &error) == KVK_INVALID,
                  "case %zu", i);
    }
}

/* The reader that copies nothing against protobuf-c, fields in order, repeated and unknown. */
Test(rpc_wire, pieces_are_read_in_place)
{
    struct kvk_random random;
    struct kvk_error error;
    uint8_t data[64];
    uint8_t buffer[512];
    kvk_random_init(&random, 4);
    kvk_random_fill(&random, data, sizeof(data));
    for (int round = 0; round < 5000; round++) {
        Kvkeep__V1__BlockPiece message = KVKEEP__V1__BLOCK_PIECE__INIT;
        message.group = (uint32_t)kvk_random_below(&random, 9);
        message.rank = (uint32_t)(kvk_random_next(&random) >> kvk_random_between(&random, 32, 63));
        message.block = kvk_random_next(&random) >> kvk_random_below(&random, 64);
        message.offset = kvk_random_next(&random) >> kvk_random_between(&random, 1, 63);
        message.data = bytes_of(data, kvk_random_below(&random, sizeof(data) + 1));
        message.checksum = kvk_random_next(&random);
        struct kvk_bytes bytes = pack(&message.base, buffer, sizeof(buffer) / 2);
        uint8_t *at = buffer + bytes.size_bytes;
        if (kvk_random_chance(&random, 0.3)) { /* the last one counts */
            put_tag(&at, 3, KVK_WIRE_VARINT);
            message.block = kvk_random_below(&random, 1000);
            at = kvk_wire_write_varint(at, message.block);
        }
        if (kvk_random_chance(&random, 0.3)) { /* of a newer client */
            put_tag(&at, 900, KVK_WIRE_BYTES);
            *at++ = 0;
        }
        bytes.size_bytes = (size_t)(at - buffer);
        struct kvk_write_piece piece;
        enum kvk_status status = kvk_rpc_read_piece(bytes, &piece, &error);
        if (message.data.len == 0) {
            expect_field(status, &error, "pieces.data");
            continue;
        }
        cr_assert(status == KVK_OK);
        cr_assert(piece.group == message.group && piece.rank == message.rank);
        cr_assert(piece.block == message.block && piece.offset == message.offset);
        cr_assert(piece.checksum == message.checksum && piece.size_bytes == message.data.len);
        cr_assert(memcmp(piece.data, data, message.data.len) == 0);
        cr_assert(piece.data > buffer && piece.data < buffer + sizeof(buffer));
    }
    Kvkeep__V1__BlockPiece message = KVKEEP__V1__BLOCK_PIECE__INIT;
    struct kvk_write_piece piece;
    message.data = bytes_of(data, 8);
    message.offset = UINT64_MAX - 6;
    expect_field(kvk_rpc_read_piece(pack(&message.base, buffer, sizeof(buffer)), &piece, &error),
                 &error, "pieces.offset");
    const uint8_t wrong_type[] = {5 << 3 | KVK_WIRE_VARINT, 1};
    struct kvk_bytes bytes = {.data = wrong_type, .size_bytes = sizeof(wrong_type)};
    expect_field(kvk_rpc_read_piece(bytes, &piece, &error), &error, "pieces");
}

/* ---- memory ---- */

Test(rpc_wire, arena_is_aligned_bounded_and_kept)
{
    struct kvk_rpc_arena arena = {.base = NULL};
    kvk_rpc_arena_reset(&arena);
    arena.limit_bytes = 300000;
    uint8_t *last_end = NULL;
    for (size_t size = 0; size < 700; size += 7) {
        uint8_t *piece = kvk_rpc_arena_take(&arena, size);
        cr_assert(piece != NULL);
        cr_assert((uintptr_t)piece % (size >= 64 ? 64 : 16) == 0);
        memset(piece, 1, size);
        last_end = piece + size;
    }
    (void)last_end;
    cr_assert(kvk_rpc_arena_take(&arena, 300000) == NULL); /* the limit is for all pieces */
    cr_assert(kvk_rpc_arena_take(&arena, SIZE_MAX) == NULL);
    cr_assert(kvk_rpc_arena_take_extra(&arena, 300000) != NULL);

    /* A call as large as the one before needs no memory beyond what is kept. */
    kvk_rpc_arena_reset(&arena);
    cr_assert(arena.capacity >= 300000);
    arena.limit_bytes = 400000;
    cr_assert(kvk_rpc_arena_take(&arena, 330000) != NULL);
    cr_assert(arena.chunks == NULL);

    /* A huge one is given back. */
    cr_assert((kvk_rpc_arena_take_extra(&arena, 64 << 20)) != NULL);
    kvk_rpc_arena_reset(&arena);
    cr_assert(arena.capacity <= 1 << 20);
    cr_assert(arena.chunks == NULL);
    kvk_rpc_arena_finish(&arena);
}

/* ---- errors ---- */

Test(rpc_error, details_carry_the_cause)
{
    struct kvk_error error;
    enum kvk_status status = kvk_fail_limit(&error, KVK_EXHAUSTED, KVK_CAUSE_POOL_LEASED, "tier", 7,
                                            5, "leases hold %d blocks", 7);
    kvk_error_retry(&error, 250);
    uint8_t buffer[KVK_SERVER_DETAILS_MAX];
    size_t size =
        kvk_rpc_error_details(&error, kvk_status_rpc_code(status), buffer, sizeof(buffer));
    Google__Rpc__Status *outer = google__rpc__status__unpack(NULL, size, buffer);
    cr_assert(outer != NULL);
    cr_assert(outer->code == 8 && strcmp(outer->message, "leases hold 7 blocks") == 0);
    cr_assert(outer->n_details == 1);
    cr_assert(strcmp(outer->details[0]->type_url, "type.googleapis.com/kvkeep.v1.ErrorDetail") ==
              0);
    Kvkeep__V1__ErrorDetail *detail = kvkeep__v1__error_detail__unpack(
        NULL, outer->details[0]->value.len, outer->details[0]->value.data);
    cr_assert(detail != NULL);
    cr_assert(detail->cause == KVKEEP__V1__CAUSE__CAUSE_POOL_LEASED);
    cr_assert(detail->value == 7 && detail->limit == 5);
    cr_assert(detail->retry_after_ms == 250);
    cr_assert(memcmp(detail->field.data, "tier", detail->field.len) == 0);
    kvkeep__v1__error_detail__free_unpacked(detail, NULL);
    google__rpc__status__free_unpacked(outer, NULL);
    cr_assert(kvk_rpc_error_details(&error, 8, buffer, 20) == 0); /* no room: none */
}

Test(rpc_error, the_longest_error_fits)
{
    struct kvk_error error = {.status = KVK_INVALID,
                              .cause = KVK_CAUSE_BUSY,
                              .value = UINT64_MAX,
                              .limit = UINT64_MAX,
                              .retry_after_ms = UINT64_MAX};
    memset(error.field, 'f', sizeof(error.field) - 1);
    memset(error.text, 't', sizeof(error.text) - 1);
    uint8_t buffer[KVK_SERVER_DETAILS_MAX];
    cr_assert(kvk_rpc_error_details(&error, 3, buffer, sizeof(buffer)) > 0);
}
