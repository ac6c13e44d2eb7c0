/*
 * Any bytes to every method, through the handlers, against a real engine: sessions, sequences and
 * leases are open, so that ids hit, and the engine's own ids count from one here, so that small
 * numbers name something. After every input the laws are checked, all streams end, and nothing may
 * be left that somebody holds.
 *
 * An input is a list of steps: one byte says what, two how many bytes of message follow.
 */
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/cache_internal.h"
#include "daemon/rpc_private.h"
#include "tests/engine_bare.h"
#include "tests/fuzz_server.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STREAMS_MAX 8
#define STEPS_MAX 64

/* Steps that are no method. */
enum {
    STEP_TOKEN = 0xe0, /* who calls from now on: the next byte */
    STEP_CLOCK,        /* time passes, and a round of maintenance */
    STEP_PEER,
    STEP_MESSAGE = 0xf0,    /* + stream */
    STEP_HALF_CLOSE = 0xf8, /* + stream: even half-closes, odd cancels */
};

static const char configuration[] = "[server]\nmessage_bytes = 1 MiB\n"
                                    "[tiers]\ndevice_bytes = 128 KiB\nhost_bytes = 128 KiB\n"
                                    "huge_pages = no\nattend_threads = 1\n"
                                    "[cache]\npolicy = lru\n"
                                    "[limits]\nspaces = 8\nblocks = 4096\nroots = 64\n"
                                    "sequences = 32\nleases = 32\ninstances = 4\nsessions = 8\n"
                                    "transfers = 16\ntokens = 4096\nspans = 16\nforks = 8\n"
                                    "scratch_bytes = 64 KiB\nattend_queries = 64\n"
                                    "[tenant a]\n[tenant b]\n"
                                    "[credential a]\ntoken = aaaaaaaaaaaaaaaa\ntenants = a\n"
                                    "admin = yes\n"
                                    "[credential b]\ntoken = bbbbbbbbbbbbbbbb\ntenants = b\n";
static const char *const tokens[] = {"aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc",
                                     NULL};

struct house {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_clock_manual clock;
    struct kvk_cache *cache;
    struct kvk_rpc *rpc;
    const struct kvk_method *methods;
    uint32_t method_count;
    const char *token;
    enum kvk_peer_kind peer;
    struct kvk_call streams[STREAMS_MAX]; /* method NULL: free */
};
static struct house house;

/*
 * In place of the real one, at link time: the same numbers for the same input. What is as long as
 * an id is small, so that a message can name a session; longer ones are as if from a pattern.
 */
void __wrap_kvk_random_secret(void *target, size_t size);
static uint8_t secrets;

void __wrap_kvk_random_secret(void *target, size_t size)
{
    secrets++;
    memset(target, size == sizeof(uint64_t) ? 0 : secrets, size);
    *(uint8_t *)target = secrets;
}

static void configure(void)
{
    struct kvk_error error;
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    KVK_ASSERT(fd >= 0);
    ssize_t written = write(fd, configuration, sizeof(configuration) - 1);
    KVK_ASSERT(written == (ssize_t)sizeof(configuration) - 1);
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    kvk_config_init(&house.config);
    enum kvk_status status = kvk_config_load(&house.config, path, &error);
    KVK_ASSERT(status == KVK_OK);
    (void)close(fd);
}

static void house_begin(void)
{
    struct kvk_error error;
    memset(&house, 0, sizeof(house));
    secrets = 0;
    (void)signal(SIGTERM, SIG_IGN); /* by which Drain ends its daemon: here it is the fuzzer */
    kvk_log_set_level(KVK_LOG_ERROR);
    configure();
    kvk_clock_manual_init(&house.clock, 1000 * KVK_NS_PER_SECOND);
    enum kvk_status status = kvk_tenants_create(&house.config, &house.tenants, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_cache_options cache = {.config = &house.config,
                                            .tenants = house.tenants,
                                            .clock = &house.clock.clock,
                                            .device = bare_device(),
                                            .host_device = bare_device()};
    const struct kvk_device_info info = {.name = "cpu"};
    status = kvk_cache_create(&cache, &house.cache, &error);
    KVK_ASSERT(status == KVK_OK);
    house.cache->next_id = 0; /* so that ids are small numbers */
    const struct kvk_rpc_options rpc = {.config = &house.config,
                                        .tenants = house.tenants,
                                        .clock = &house.clock.clock,
                                        .side_path = "/side"};
    status = kvk_rpc_create(&rpc, &house.rpc, &error);
    KVK_ASSERT(status == KVK_OK);
    kvk_rpc_attach(house.rpc, house.cache, NULL, &info);
    house.methods = kvk_rpc_methods(house.rpc, &house.method_count);
    house.token = tokens[0];
    house.peer = KVK_PEER_TCP; /* no process to wait for when a session is lost */
}

static struct kvk_call call_make(const struct kvk_method *method)
{
    bool local = house.peer == KVK_PEER_UNIX;
    return (struct kvk_call){.method = method,
                             .token = house.token,
                             .peer = {.kind = house.peer,
                                      .connection_id = 1,
                                      .uid = local ? (uint32_t)geteuid() : UINT32_MAX,
                                      .pid = local ? (int32_t)getpid() : 0,
                                      .pidfd = -1}};
}

static void turn_all(void)
{
    for (int i = 0; i < STREAMS_MAX; i++) {
        struct kvk_call *stream = &house.streams[i];
        if (stream->method != NULL) {
            fake_server_turn(stream);
            if (stream->ended) {
                fake_server_finish(stream);
            }
        }
    }
}

/* The answer stays in call->last until fake_server_finish(). */
static struct kvk_call call_unary(const struct kvk_method *method, struct kvk_bytes message)
{
    struct kvk_call call = call_make(method);
    call.message = message;
    fake_server_begin(&call);
    return call;
}

static void open_stream(const struct kvk_method *method, struct kvk_bytes message)
{
    int place = 0;
    while (place < STREAMS_MAX && house.streams[place].method != NULL) {
        place++;
    }
    if (place == STREAMS_MAX) {
        return;
    }
    struct kvk_call *call = &house.streams[place];
    *call = call_make(method);
    call->message = message;
    fake_server_begin(call);
    if (!call->ended && method->kind != KVK_METHOD_SERVER_STREAM) {
        fake_server_message(call, message);
    }
}

static void step_method(const struct kvk_method *method, struct kvk_bytes message)
{
    if (method->kind != KVK_METHOD_UNARY) {
        open_stream(method, message);
        return;
    }
    struct kvk_call call = call_unary(method, message);
    KVK_ASSERT(call.ended);
    fake_server_finish(&call);
}

/* ---- what is there before the input comes: a space, a session, a sealed sequence, a lease ---- */

static const struct kvk_method *method_of(const char *path)
{
    for (uint32_t i = 0; i < house.method_count; i++) {
        if (strcmp(house.methods[i].path, path) == 0) {
            return &house.methods[i];
        }
    }
    KVK_UNREACHABLE();
}

static void ask(const char *path, const ProtobufCMessage *request)
{
    size_t size = protobuf_c_message_get_packed_size(request);
    uint8_t *bytes = malloc(size + 1);
    KVK_ASSERT(bytes != NULL);
    (void)protobuf_c_message_pack(request, bytes);
    const struct kvk_method *method = method_of(path);
    const struct kvk_bytes message = {.data = bytes, .size_bytes = size};
    if (method->kind == KVK_METHOD_UNARY) {
        struct kvk_call call = call_unary(method, message);
        KVK_ASSERT(call.status == KVK_OK);
        fake_server_finish(&call);
    } else {
        open_stream(method, message);
        KVK_ASSERT(house.streams[0].method != NULL && !house.streams[0].ended);
    }
    free(bytes);
}

static void furnish(void)
{
    static uint32_t prompt_tokens[10] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    Kvkeep__V1__Identity identity = KVKEEP__V1__IDENTITY__INIT;
    identity.model = kvk_rpc_text("m");
    Kvkeep__V1__LayerGroup group = KVKEEP__V1__LAYER_GROUP__INIT;
    Kvkeep__V1__LayerGroup *groups[] = {&group};
    group.layers = 1;
    group.kv_heads = 1;
    group.head_size_k = 8;
    group.head_size_v = 8;
    group.format_k = KVKEEP__V1__FORMAT__FORMAT_FP32;
    group.format_v = KVKEEP__V1__FORMAT__FORMAT_FP32;
    group.layout = KVKEEP__V1__LAYOUT__LAYOUT_HEADS_FIRST;
    group.attention = KVKEEP__V1__ATTENTION__ATTENTION_SELF;
    Kvkeep__V1__OpenSpaceRequest space = KVKEEP__V1__OPEN_SPACE_REQUEST__INIT;
    space.identity = &identity;
    space.block_tokens = 4;
    space.n_groups = 1;
    space.groups = groups;
    ask("/kvkeep.v1.Kvkeep/OpenSpace", &space.base);
    uint64_t space_id = house.cache->spaces->id;

    Kvkeep__V1__SessionHello hello = KVKEEP__V1__SESSION_HELLO__INIT;
    Kvkeep__V1__SessionRequest session = KVKEEP__V1__SESSION_REQUEST__INIT;
    session.hello = &hello;
    ask("/kvkeep.v1.Kvkeep/Session", &session.base);
    struct kvk_instance *instance = house.cache->instances;
    KVK_ASSERT(instance != NULL);
    uint64_t session_id = instance->sessions->id;

    Kvkeep__V1__Prompt prompt = KVKEEP__V1__PROMPT__INIT;
    prompt.tokens = kvk_rpc_bytes(prompt_tokens, sizeof(prompt_tokens));
    Kvkeep__V1__OpenSequenceRequest open = KVKEEP__V1__OPEN_SEQUENCE_REQUEST__INIT;
    open.session_id = session_id;
    open.space_id = space_id;
    open.prompt = &prompt;
    ask("/kvkeep.v1.Kvkeep/OpenSequence", &open.base);
    Kvkeep__V1__SealRequest seal = KVKEEP__V1__SEAL_REQUEST__INIT;
    seal.session_id = session_id;
    seal.sequence_id = instance->sequences->id;
    seal.expected_length = 10;
    seal.length = 10;
    ask("/kvkeep.v1.Kvkeep/Seal", &seal.base);
    Kvkeep__V1__PinRequest pin = KVKEEP__V1__PIN_REQUEST__INIT;
    pin.session_id = session_id;
    pin.space_id = space_id;
    pin.prompt = &prompt;
    pin.ttl_ms = 10000;
    ask("/kvkeep.v1.Kvkeep/Pin", &pin.base);
}

/* ---- the end ---- */

static void house_end(void)
{
    for (int i = 0; i < STREAMS_MAX; i++) {
        if (house.streams[i].method != NULL) {
            fake_server_finish(&house.streams[i]);
        }
    }
    kvk_clock_manual_set(&house.clock, kvk_clock_now(&house.clock.clock) + KVK_NS_PER_SECOND);
    kvk_cache_maintain(house.cache);
    kvk_cache_check(house.cache);
    KVK_ASSERT(house.cache->sequence_table.count == 0 && house.cache->lease_table.count == 0);
    kvk_rpc_detach(house.rpc);
    kvk_rpc_destroy(house.rpc);
    kvk_cache_destroy(house.cache);
    kvk_tenants_destroy(house.tenants);
    kvk_config_finish(&house.config);
}

/* ---- the input ---- */

static void step(uint8_t what, struct kvk_bytes message)
{
    uint8_t first = message.size_bytes > 0 ? message.data[0] : 0;
    if (what >= STEP_MESSAGE) {
        struct kvk_call *stream = &house.streams[what & 7];
        if (stream->method == NULL) {
            return;
        }
        if (what < STEP_HALF_CLOSE) {
            fake_server_message(stream, message);
        } else if (first % 2 == 0) {
            fake_server_half_close(stream);
        } else {
            fake_server_finish(stream);
        }
        return;
    }
    switch (what) {
    case STEP_TOKEN:
        house.token = tokens[first % 4];
        return;
    case STEP_CLOCK:
        kvk_clock_manual_set(&house.clock, kvk_clock_now(&house.clock.clock) +
                                               ((uint64_t)first + 1) * KVK_NS_PER_SECOND / 8);
        kvk_cache_maintain(house.cache);
        return;
    case STEP_PEER:
        house.peer = first % 2 == 0 ? KVK_PEER_TCP : KVK_PEER_UNIX;
        return;
    default:
        step_method(&house.methods[what % house.method_count], message);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    house_begin();
    furnish();
    for (int steps = 0; steps < STEPS_MAX && size >= 3; steps++) {
        uint8_t what = data[0];
        size_t message_size = (size_t)data[1] | (size_t)data[2] << 8;
        data += 3;
        size -= 3;
        message_size = message_size < size ? message_size : size;
        /* A copy of its own size, so that reading past its end is seen. */
        uint8_t *message = malloc(message_size + (message_size == 0));
        KVK_ASSERT(message != NULL);
        memcpy(message, data, message_size);
        step(what, (struct kvk_bytes){.data = message, .size_bytes = message_size});
        turn_all();
        free(message);
        data += message_size;
        size -= message_size;
    }
    house_end();
    return 0;
}
