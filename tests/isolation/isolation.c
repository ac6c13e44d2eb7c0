/*
 * What one tenant can learn of another: nothing that it could not have guessed. Case A6, and with
 * KVKEEP_TEST_DURABLE that with a catalogue and a keeper.
 *
 * Every call that takes an id, a name or a token is made by tenant B with what is tenant A's, and
 * with what never was: both must be refused with the same status, cause, field and words (numbers
 * apart). Then time: B's look-ups and pins of prompts that A has sealed against those of prompts
 * that nobody has, as the area under the ROC curve: 0.5 is what tossing a coin would get. The two
 * are asked for in turn, again and again, and the quickest of each counts, since what disturbs only
 * ever adds.
 *
 * The same of A's own shows what the measure can see. A miss ends at the first block; a hit follows
 * the whole chain, and a pin takes every block of it besides: the prompts are long enough for that
 * to show. Time is reported and no verdict; only with --refuse-blind 1, for a calm machine, is a
 * measure that does not see its own hits refused.
 *
 *     test_isolation_isolation [--tries N] [--tokens N] [--looks N] [--refuse-blind 1]
 */
#include "tests/daemon_look.h"

#define MIB (UINT64_C(1) << 20)
#define TRIES_MAX 20000
#define TRIES_STEP 20 /* of one task */
#define LOOKS_MAX 1000
#define OWN_AUC_MIN 0.7 /* of a tenant's own hits against its own misses */

static const char *const tokens[] = {"aaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbb"};
static struct worker tenants[2]; /* A and B; `self` is who speaks now */
static struct prompt prompt, other_prompt;

struct shared {
    char target[96];
    char side_path[108];
    uint64_t tries;
    uint64_t tokens; /* of a prompt whose look-up is timed */
    uint64_t looks;  /* at each of two that are compared; the quickest counts */
    uint64_t tried;
    uint64_t held_id; /* a sequence of A's */
    uint32_t probes, differing;
    double lookup_auc, pin_auc, refusal_auc, own_lookup_auc, own_pin_auc;
};
static struct shared *shared;

static void speak_as(uint32_t who)
{
    self = tenants[who];
}

static void begin_as(uint32_t who, const char *tenant)
{
    struct kvkeep_options options = {
        .target = shared->target, .token = tokens[who], .timeout_ms = 20000};
    const struct worker_options worker = {.tenant = tenant, .model = "model", .name = tenant};
    self = (struct worker){0};
    CHECK_OK(kvkeep_connect(&options, &self.client, &self.error));
    worker_open_space(&worker);
    worker_open_session(&worker);
    tenants[who] = self;
}

/* ---- probes: one call each, with the ids that it is given ---- */

struct things {
    uint64_t space, session, sequence, lease, ticket;
    const char *tenant;
    uint8_t token[16];
};

struct answer {
    enum kvk_status status;
    struct kvk_error error;
};

static struct answer ask(const char *method, const ProtobufCMessage *request,
                         const ProtobufCMessageDescriptor *type)
{
    struct answer answer = {.status = KVK_OK};
    void *response = NULL;
    answer.status =
        kvkeep_client_call(self.client, method, request, type, &response, &answer.error);
    if (answer.status == KVK_OK) {
        message_free(response);
    }
    return answer;
}

#define PROBE(function, Type, TYPE, type, method, ...)                                             \
    static struct answer function(const struct things *of, uint64_t own)                           \
    {                                                                                              \
        Kvkeep__V1__##Type##Request request = KVKEEP__V1__##TYPE##_REQUEST__INIT;                  \
        (void)of;                                                                                  \
        (void)own;                                                                                 \
        __VA_ARGS__;                                                                               \
        return ask(method, &request.base, &kvkeep__v1__##type##_response__descriptor);             \
    }
#define WORKER_PROBE(function, Type, TYPE, type, ...)                                              \
    PROBE(function, Type, TYPE, type, KVKEEP_METHOD(#Type), __VA_ARGS__)
#define ADMIN_PROBE(function, Type, TYPE, type, ...)                                               \
    PROBE(function, Type, TYPE, type, ADMIN_METHOD(#Type), __VA_ARGS__)

/* clang-format off */
WORKER_PROBE(lookup, Lookup, LOOKUP, lookup, request.space_id = of->space)
WORKER_PROBE(touch, Touch, TOUCH, touch, request.space_id = of->space)
WORKER_PROBE(pin, Pin, PIN, pin, request.session_id = own; request.space_id = of->space; request.ttl_ms = 1000)
WORKER_PROBE(renew, Renew, RENEW, renew, request.session_id = own; request.lease_id = of->lease; request.ttl_ms = 1000)
WORKER_PROBE(release, Release, RELEASE, release, uint64_t ids[1] = {of->lease}; request.session_id = own; request.n_lease_ids = 1; request.lease_ids = ids)
WORKER_PROBE(transfer_sequence, BeginTransfer, BEGIN_TRANSFER, begin_transfer, request.session_id = own; request.sequence_id = of->sequence; request.block_count = 1)
WORKER_PROBE(transfer_lease, BeginTransfer, BEGIN_TRANSFER, begin_transfer, request.session_id = own; request.lease_id = of->lease; request.block_count = 1)
WORKER_PROBE(end_transfer, EndTransfer, END_TRANSFER, end_transfer, request.session_id = own; request.ticket = of->ticket)
PROBE(open_sequence, OpenSequence, OPEN_SEQUENCE, sequence, KVKEEP_METHOD("OpenSequence"), request.session_id = own; request.space_id = of->space)
PROBE(open_in_session, OpenSequence, OPEN_SEQUENCE, sequence, KVKEEP_METHOD("OpenSequence"), request.session_id = of->session; request.space_id = of->space)
PROBE(get_sequence, GetSequence, GET_SEQUENCE, sequence, KVKEEP_METHOD("GetSequence"), request.session_id = own; request.sequence_id = of->sequence)
PROBE(get_in_session, GetSequence, GET_SEQUENCE, sequence, KVKEEP_METHOD("GetSequence"), request.session_id = of->session; request.sequence_id = of->sequence)
PROBE(append, Append, APPEND, sequence, KVKEEP_METHOD("Append"), static uint8_t token[4] = {1}; request.session_id = own; request.sequence_id = of->sequence; request.expected_length = 16; request.tokens.data = token; request.tokens.len = 4)
WORKER_PROBE(seal, Seal, SEAL, seal, request.session_id = own; request.sequence_id = of->sequence; request.expected_length = 16; request.length = 16)
PROBE(commit, Commit, COMMIT, sequence, KVKEEP_METHOD("Commit"), request.session_id = own; request.sequence_id = of->sequence; request.expected_length = 16)
PROBE(truncate_it, Truncate, TRUNCATE, sequence, KVKEEP_METHOD("Truncate"), request.session_id = own; request.sequence_id = of->sequence; request.expected_length = 16)
WORKER_PROBE(fork_it, Fork, FORK, fork, request.session_id = own; request.sequence_id = of->sequence; request.expected_length = 16; request.count = 1)
PROBE(swap_out, SwapOut, SWAP_OUT, swap, KVKEEP_METHOD("SwapOut"), request.session_id = own; request.sequence_id = of->sequence)
PROBE(swap_in, SwapIn, SWAP_IN, swap, KVKEEP_METHOD("SwapIn"), request.session_id = own; request.sequence_id = of->sequence)
WORKER_PROBE(close_it, Close, CLOSE, close, uint64_t ids[1] = {of->sequence}; request.session_id = own; request.n_sequence_ids = 1; request.sequence_ids = ids)
WORKER_PROBE(close_in_session, Close, CLOSE, close, uint64_t ids[1] = {of->sequence}; request.session_id = of->session; request.n_sequence_ids = 1; request.sequence_ids = ids)
WORKER_PROBE(map_space, MapMemory, MAP_MEMORY, map_memory, request.session_id = own; request.kind = 1; request.space_id = of->space; request.tier = 1)
WORKER_PROBE(map_in_session, MapMemory, MAP_MEMORY, map_memory, request.session_id = of->session; request.kind = 2; request.size_bytes = 4096)
WORKER_PROBE(invalidate, Invalidate, INVALIDATE, invalidate, request.space_id = of->space)
WORKER_PROBE(invalidate_tenant, Invalidate, INVALIDATE, invalidate, request.tenant = kvkeep_text(of->tenant))
ADMIN_PROBE(occupancy, GetOccupancy, GET_OCCUPANCY, get_occupancy, request.tenant = kvkeep_text(of->tenant))
ADMIN_PROBE(list_spaces, ListSpaces, LIST_SPACES, list_spaces, request.tenant = kvkeep_text(of->tenant))
ADMIN_PROBE(list_sequences, ListSequences, LIST_SEQUENCES, list_sequences, request.tenant = kvkeep_text(of->tenant))
ADMIN_PROBE(list_leases, ListLeases, LIST_LEASES, list_leases, request.tenant = kvkeep_text(of->tenant))
ADMIN_PROBE(list_instances, ListInstances, LIST_INSTANCES, list_instances, request.tenant = kvkeep_text(of->tenant))
ADMIN_PROBE(why, Why, WHY, why, request.tenant = kvkeep_text(of->tenant))
ADMIN_PROBE(get_block, GetBlock, GET_BLOCK, get_block, request.space_id = of->space)
/* clang-format on */

static struct answer attend(const struct things *of, uint64_t own)
{
    static uint8_t queries[HEAD_SIZE * 4];
    Kvkeep__V1__Operand operand = KVKEEP__V1__OPERAND__INIT;
    Kvkeep__V1__AttendItem item = KVKEEP__V1__ATTEND_ITEM__INIT;
    Kvkeep__V1__AttendItem *items[] = {&item};
    Kvkeep__V1__AttendRequest request = KVKEEP__V1__ATTEND_REQUEST__INIT;
    operand.data.data = queries;
    operand.data.len = sizeof(queries);
    item.sequence_id = of->sequence;
    item.query_count = 1;
    item.queries = &operand;
    request.session_id = own;
    request.query_heads = 1;
    request.format = KVKEEP__V1__FORMAT__FORMAT_FP32;
    request.scale = 1;
    request.n_items = 1;
    request.items = items;
    return ask(KVKEEP_METHOD("Attend"), &request.base, &kvkeep__v1__attend_response__descriptor);
}

static struct answer open_space(const struct things *of, uint64_t own)
{
    Kvkeep__V1__Identity identity = KVKEEP__V1__IDENTITY__INIT;
    Kvkeep__V1__LayerGroup group = KVKEEP__V1__LAYER_GROUP__INIT;
    Kvkeep__V1__LayerGroup *groups[] = {&group};
    Kvkeep__V1__OpenSpaceRequest request = KVKEEP__V1__OPEN_SPACE_REQUEST__INIT;
    (void)own;
    identity.model = kvkeep_text("model");
    group.layers = group.kv_heads = 1;
    group.head_size_k = group.head_size_v = 8;
    group.format_k = group.format_v = KVKEEP__V1__FORMAT__FORMAT_FP32;
    group.layout = KVKEEP__V1__LAYOUT__LAYOUT_HEADS_FIRST;
    group.attention = KVKEEP__V1__ATTENTION__ATTENTION_SELF;
    request.tenant = kvkeep_text(of->tenant);
    request.identity = &identity;
    request.block_tokens = 4;
    request.n_groups = 1;
    request.groups = groups;
    return ask(KVKEEP_METHOD("OpenSpace"), &request.base,
               &kvkeep__v1__open_space_response__descriptor);
}

/* Session, as A's tenant and as a rank of A's instance. */
static struct answer join(const struct kvkeep_session_options *options)
{
    struct answer answer;
    struct kvkeep_session *session = NULL;
    answer.status = kvkeep_session_open(self.client, options, &session, &answer.error);
    if (answer.status == KVK_OK) {
        kvkeep_session_close(session);
    }
    return answer;
}

static struct answer session_of_tenant(const struct things *of, uint64_t own)
{
    (void)own;
    return join(&(struct kvkeep_session_options){.tenant = of->tenant});
}

static struct answer session_of_instance(const struct things *of, uint64_t own)
{
    (void)own;
    return join(&(struct kvkeep_session_options){.instance_token = of->token, .rank = 1});
}

static struct answer read_blocks(const struct things *of, uint64_t own)
{
    struct answer answer;
    static uint8_t bytes[4 * BLOCK_BYTES];
    struct kvkeep_sequence sequence = {.id = of->sequence, .space = &self.space, .length = 16};
    (void)own;
    answer.status =
        kvkeep_read(self.session, &sequence, NULL, 0, 0, 0, 4, bytes, sizeof(bytes), &answer.error);
    return answer;
}

static struct answer write_blocks(const struct things *of, uint64_t own)
{
    struct answer answer;
    static uint8_t bytes[BLOCK_BYTES];
    struct kvkeep_sequence sequence = {.id = of->sequence, .space = &self.space, .length = 16};
    const struct kvkeep_piece piece = {.data = bytes, .size_bytes = sizeof(bytes)};
    (void)own;
    answer.status = kvkeep_write(self.session, &sequence, &piece, 1, &answer.error);
    return answer;
}

/* The side socket: one byte tells all, or the connection's end. */
static struct answer side_socket(const struct things *of, uint64_t own)
{
    struct answer answer = {.status = KVK_OK};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    uint8_t byte = 0xff;
    (void)own;
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%.107s", shared->side_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0,
          "no side socket");
    CHECK(send(fd, of->token, 16, MSG_NOSIGNAL) == 16, "send");
    ssize_t got = recv(fd, &byte, 1, 0);
    CHECK(got != 1 || byte != 0, "a stranger's token was taken");
    (void)snprintf(answer.error.text, sizeof(answer.error.text), "%d bytes, %u", (int)got, byte);
    answer.status = KVK_PERMISSION;
    (void)close(fd);
    return answer;
}

static const struct {
    const char *name;
    struct answer (*run)(const struct things *of, uint64_t own);
} probes[] = {
    {"Lookup", lookup},
    {"Touch", touch},
    {"Pin", pin},
    {"Renew", renew},
    {"Release", release},
    {"BeginTransfer of a sequence", transfer_sequence},
    {"BeginTransfer of a lease", transfer_lease},
    {"EndTransfer", end_transfer},
    {"OpenSequence", open_sequence},
    {"OpenSequence in its session", open_in_session},
    {"GetSequence", get_sequence},
    {"GetSequence in its session", get_in_session},
    {"Append", append},
    {"Seal", seal},
    {"Commit", commit},
    {"Truncate", truncate_it},
    {"Fork", fork_it},
    {"SwapOut", swap_out},
    {"SwapIn", swap_in},
    {"Close", close_it},
    {"Close in its session", close_in_session},
    {"MapMemory", map_space},
    {"MapMemory in its session", map_in_session},
    {"Attend", attend},
    {"Invalidate", invalidate},
    {"Invalidate by tenant", invalidate_tenant},
    {"OpenSpace", open_space},
    {"Session of its tenant", session_of_tenant},
    {"Session of its instance", session_of_instance},
    {"ReadBlocks", read_blocks},
    {"WriteBlocks", write_blocks},
    {"side socket", side_socket},
    {"GetOccupancy", occupancy},
    {"ListSpaces", list_spaces},
    {"ListSequences", list_sequences},
    {"ListLeases", list_leases},
    {"ListInstances", list_instances},
    {"Why", why},
    {"GetBlock", get_block},
};
#define PROBE_COUNT (sizeof(probes) / sizeof(probes[0]))

/* ---- alike in kind ---- */

/* Numbers apart: an id that was asked for may be said back. */
static void blank_numbers(char *text)
{
    char *out = text;
    for (const char *at = text; *at != '\0'; at++) {
        if (*at >= '0' && *at <= '9') {
            if (out == text || out[-1] != '#') {
                *out++ = '#';
            }
        } else {
            *out++ = *at;
        }
    }
    *out = '\0';
}

static bool alike(struct answer *one, struct answer *other)
{
    blank_numbers(one->error.text);
    blank_numbers(other->error.text);
    return one->status == other->status && one->error.cause == other->error.cause &&
           one->error.retry_after_ms == other->error.retry_after_ms &&
           (one->error.limit == 0) == (other->error.limit == 0) &&
           strcmp(one->error.field, other->error.field) == 0 &&
           strcmp(one->error.text, other->error.text) == 0;
}

static void probe_all(const struct things *of_a, const struct things *of_nobody)
{
    uint64_t own = kvkeep_session_id(self.session);
    for (size_t i = 0; i < PROBE_COUNT; i++) {
        struct answer other = probes[i].run(of_a, own);
        struct answer none = probes[i].run(of_nobody, own);
        shared->probes++;
        CHECK(other.status != KVK_OK, "%s of another tenant went through", probes[i].name);
        CHECK(none.status != KVK_OK, "%s of what never was went through", probes[i].name);
        if (!alike(&other, &none)) {
            shared->differing++;
            (void)printf("            DIFFERS %s: another's \"%s\" (%s, %s), nobody's \"%s\" (%s, "
                         "%s)\n",
                         probes[i].name, other.error.text, kvk_status_name(other.status),
                         kvk_cause_name(other.error.cause), none.error.text,
                         kvk_status_name(none.status), kvk_cause_name(none.error.cause));
        }
    }
}

static uint64_t begin_transfer(uint64_t lease)
{
    Kvkeep__V1__BeginTransferRequest request = KVKEEP__V1__BEGIN_TRANSFER_REQUEST__INIT;
    Kvkeep__V1__BeginTransferResponse *response = NULL;
    request.session_id = kvkeep_session_id(self.session);
    request.lease_id = lease;
    request.block_count = 1;
    CHECK_OK(worker_call(KVKEEP_METHOD("BeginTransfer"), &request.base,
                         &kvkeep__v1__begin_transfer_response__descriptor, &response));
    uint64_t ticket = response->ticket;
    message_free(response);
    return ticket;
}

/* A token that is good for A's session: it waits on the side socket for A alone. */
static void kind(void)
{
    struct kvkeep_sequence sequence;
    struct kvkeep_lease lease;
    struct kvkeep_map map = {.address = NULL};
    speak_as(0);
    prompt_set(&prompt, 1, 16);
    worker_open_sequence(&prompt, NULL, &sequence);
    worker_seal(&sequence, 16);
    struct kvkeep_prompt view = prompt_view(&prompt);
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 60000, false, &lease, &self.error));
    CHECK_OK(kvkeep_map_slots(self.session, &self.space, 0, 0, KVKEEP_TIER_DEVICE, false, &map,
                              &self.error));
    struct things of_a = {.space = self.space.id,
                          .session = kvkeep_session_id(self.session),
                          .sequence = sequence.id,
                          .lease = lease.id,
                          .ticket = begin_transfer(lease.id),
                          .tenant = "a"};
    memcpy(of_a.token, kvkeep_session_token(self.session), sizeof(of_a.token));
    tenants[0] = self;
    const struct things of_nobody = {.space = of_a.space ^ UINT64_C(0x5a5a000000),
                                     .session = of_a.session ^ UINT64_C(0x5a5a000000),
                                     .sequence = of_a.sequence ^ UINT64_C(0x5a5a000000),
                                     .lease = of_a.lease ^ UINT64_C(0x5a5a000000),
                                     .ticket = of_a.ticket ^ UINT64_C(0x5a5a000000),
                                     .tenant = "nobody",
                                     .token = {1, 2, 3}};
    speak_as(1);
    probe_all(&of_a, &of_nobody);
    tenants[1] = self;

    /* Nothing of A's has changed. */
    speak_as(0);
    CHECK(worker_hit(&prompt) == 16, "A's blocks are gone");
    CHECK_OK(kvkeep_sequence_refresh(self.session, &sequence, &self.error));
    CHECK(sequence.length == 16, "A's sequence has %llu tokens",
          (unsigned long long)sequence.length);
    CHECK_OK(kvkeep_renew(self.session, &lease, 60000, &self.error));
    tenants[0] = self;
}

/* ---- alike in time ---- */

static uint64_t now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int compare_times(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;
    return *x < *y ? -1 : *x > *y;
}

/* The chance that one of the first takes longer than one of the second; ties count half. */
static double area(uint64_t *first, uint64_t *second, uint64_t count)
{
    qsort(first, count, sizeof(first[0]), compare_times);
    qsort(second, count, sizeof(second[0]), compare_times);
    double sum = 0;
    uint64_t below = 0;
    uint64_t upto = 0;
    for (uint64_t i = 0; i < count; i++) {
        while (below < count && second[below] < first[i]) {
            below++;
        }
        upto = upto < below ? below : upto;
        while (upto < count && second[upto] <= first[i]) {
            upto++;
        }
        sum += (double)below + (double)(upto - below) / 2;
    }
    double found = sum / ((double)count * (double)count);
    return found < 0.5 ? 1 - found : found; /* either way would tell them apart */
}

/* What is asked about: a prompt, or a sequence; and what the answer must be. */
struct question {
    const struct prompt *prompt;
    uint64_t cached_tokens;
    uint64_t sequence_id;
};

static uint64_t time_lookup(const struct question *question)
{
    struct kvkeep_prompt view = prompt_view(question->prompt);
    struct kvkeep_lookup found;
    uint64_t begun = now_ns();
    CHECK_OK(kvkeep_lookup(self.client, &self.space, &view, false, &found, &self.error));
    uint64_t took = now_ns() - begun;
    CHECK(found.cached_tokens == question->cached_tokens, "%llu tokens found, not %llu",
          (unsigned long long)found.cached_tokens, (unsigned long long)question->cached_tokens);
    return took;
}

static uint64_t time_pin(const struct question *question)
{
    struct kvkeep_prompt view = prompt_view(question->prompt);
    struct kvkeep_lease lease;
    uint64_t begun = now_ns();
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 60000, false, &lease, &self.error));
    uint64_t took = now_ns() - begun;
    CHECK(lease.cached_tokens == question->cached_tokens, "%llu tokens pinned, not %llu",
          (unsigned long long)lease.cached_tokens, (unsigned long long)question->cached_tokens);
    if (lease.id != 0) {
        CHECK_OK(kvkeep_release(self.session, &lease, &self.error));
    }
    return took;
}

static uint64_t time_refusal(const struct question *question)
{
    const struct things of = {.sequence = question->sequence_id};
    uint64_t begun = now_ns();
    struct answer answer = get_sequence(&of, kvkeep_session_id(self.session));
    uint64_t took = now_ns() - begun;
    CHECK(answer.status != KVK_OK, "another's sequence was given");
    return took;
}

/* Two questions in turn, whichever first, as who wants to tell them apart would ask; the quickest
 * answer to each. */
static void time_both(uint64_t (*time_one)(const struct question *question),
                      const struct question *one, const struct question *other, uint64_t *one_ns,
                      uint64_t *other_ns)
{
    static struct kvk_random random;
    static bool begun;
    if (!begun) {
        kvk_random_init(&random, 1);
        begun = true;
    }
    *one_ns = *other_ns = UINT64_MAX;
    (void)time_one(other); /* a connection that has just slept tells nothing */
    (void)time_one(one);
    for (uint64_t i = 0; i < shared->looks; i++) {
        bool first = kvk_random_chance(&random, 0.5);
        uint64_t before = time_one(first ? one : other);
        uint64_t behind = time_one(first ? other : one);
        uint64_t took = first ? before : behind;
        uint64_t other_took = first ? behind : before;
        *one_ns = took < *one_ns ? took : *one_ns;
        *other_ns = other_took < *other_ns ? other_took : *other_ns;
    }
}

static void seal_prompt(uint32_t first_token)
{
    struct kvkeep_sequence sequence;
    prompt_set(&prompt, first_token, shared->tokens);
    worker_open_sequence(&prompt, NULL, &sequence);
    worker_seal(&sequence, shared->tokens);
    worker_close_sequence(&sequence);
}

struct times {
    uint64_t sealed[TRIES_MAX], never[TRIES_MAX];
};

static double times_area(struct times *times)
{
    return area(times->sealed, times->never, shared->tries);
}

static struct times lookups, pins, refusals, own_lookups, own_pins;

/* Each try has a fresh prompt that A seals and one that nobody has. */
static void try_one(uint64_t i, const struct question *of_held, const struct question *of_nothing)
{
    struct question sealed = {.prompt = &prompt};
    const struct question never = {.prompt = &other_prompt};
    speak_as(0);
    seal_prompt(1000000 + (uint32_t)i * 2);
    prompt_set(&other_prompt, 1000001 + (uint32_t)i * 2, shared->tokens);
    speak_as(1);
    time_both(time_lookup, &sealed, &never, &lookups.sealed[i], &lookups.never[i]);
    time_both(time_pin, &sealed, &never, &pins.sealed[i], &pins.never[i]);
    time_both(time_refusal, of_held, of_nothing, &refusals.sealed[i], &refusals.never[i]);
    speak_as(0);
    sealed.cached_tokens = shared->tokens;
    time_both(time_lookup, &sealed, &never, &own_lookups.sealed[i], &own_lookups.never[i]);
    time_both(time_pin, &sealed, &never, &own_pins.sealed[i], &own_pins.never[i]);
}

/* As many as one task has time for. */
static void try_some(void *unused)
{
    (void)unused;
    const struct question of_held = {.sequence_id = shared->held_id};
    const struct question of_nothing = {.sequence_id = shared->held_id ^ UINT64_C(0x77000000)};
    uint64_t end = shared->tried + TRIES_STEP;
    end = end < shared->tries ? end : shared->tries;
    for (; shared->tried < end; shared->tried++) {
        try_one(shared->tried, &of_held, &of_nothing);
    }
}

/* ---- all of it ---- */

static void begin(void *unused)
{
    struct kvkeep_sequence held;
    (void)unused;
    begin_as(0, "a");
    begin_as(1, "b");
    kind();
    speak_as(0);
    prompt_set(&prompt, 4000000000u, 16);
    worker_open_sequence(&prompt, NULL, &held);
    worker_seal(&held, 16);
    shared->held_id = held.id;
}

static void end(void *unused)
{
    (void)unused;
    shared->lookup_auc = times_area(&lookups);
    shared->pin_auc = times_area(&pins);
    shared->refusal_auc = times_area(&refusals);
    shared->own_lookup_auc = times_area(&own_lookups);
    shared->own_pin_auc = times_area(&own_pins);
    for (uint32_t who = 0; who < 2; who++) {
        speak_as(who);
        worker_close();
    }
}

static void report(void)
{
    (void)printf("{\"probes\": %u, \"differing\": %u, \"tries\": %llu, \"tokens\": %llu, "
                 "\"looks\": %llu, \"lookup_auc\": %.3f, \"pin_auc\": %.3f, "
                 "\"refusal_auc\": %.3f, \"own_lookup_auc\": %.3f, \"own_pin_auc\": %.3f, "
                 "\"aim\": 0.55}\n",
                 shared->probes, shared->differing, (unsigned long long)shared->tries,
                 (unsigned long long)shared->tokens, (unsigned long long)shared->looks,
                 shared->lookup_auc, shared->pin_auc, shared->refusal_auc, shared->own_lookup_auc,
                 shared->own_pin_auc);
}

int main(int argc, char **argv)
{
    static const char rest[] = "[tenant a]\n[tenant b]\n"
                               "[credential a]\ntoken = aaaaaaaaaaaaaaaaaaaa\ntenants = a\n"
                               "[credential b]\ntoken = bbbbbbbbbbbbbbbbbbbb\ntenants = b\n";
    struct daemon daemon;
    struct agent agent = {.name = "tenants"};
    const struct daemon_setup setup = {
        .device_bytes = 96 * MIB, .host_bytes = 32 * MIB, .rest = rest};
    shared = shared_alloc(sizeof(*shared));
    shared->tries = option_number(argc, argv, "--tries", 50);
    shared->tokens = option_number(argc, argv, "--tokens", 49152);
    shared->looks = option_number(argc, argv, "--looks", 9);
    bool refuse_blind = option_number(argc, argv, "--refuse-blind", 0) != 0;
    test_begin(300 + (unsigned)shared->tries * 2);
    CHECK(shared->tokens >= BLOCK_TOKENS && shared->tokens < TOKENS_MAX &&
              shared->tokens % BLOCK_TOKENS == 0,
          "--tokens is a multiple of %d under %d", BLOCK_TOKENS, TOKENS_MAX);
    CHECK(shared->tries > 0 && shared->tries <= TRIES_MAX, "--tries is 1 to %d", TRIES_MAX);
    CHECK(shared->looks > 0 && shared->looks <= LOOKS_MAX, "--looks is 1 to %d", LOOKS_MAX);
    daemon_start(&daemon, &setup);
    memcpy(shared->target, daemon.target, sizeof(shared->target));
    (void)snprintf(shared->side_path, sizeof(shared->side_path), "%s/kvkeep.sock.side",
                   daemon.folder);
    agent_start(&agent, "tenants", NULL);
    phase("another tenant's things, and what never was");
    agent_do(&agent, begin, NULL);
    phase("how long that takes");
    while (shared->tried < shared->tries) {
        agent_do(&agent, try_some, NULL);
    }
    agent_do(&agent, end, NULL);
    agent_finish(&agent);
    daemon_stop(&daemon);
    report();
    double own_auc =
        shared->own_lookup_auc < shared->own_pin_auc ? shared->own_lookup_auc : shared->own_pin_auc;
    CHECK(!refuse_blind || own_auc > OWN_AUC_MIN, "the measure does not see its own hits: %.3f",
          own_auc);
    CHECK(shared->differing == 0, "%u of %u refusals tell another's from nobody's",
          shared->differing, shared->probes);
    phase("passed");
    return 0;
}
