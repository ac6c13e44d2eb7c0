/*
 * Spaces and generations that outlive the daemon: restarts, crashes (the folder as it was at some
 * moment), damaged and foreign records, a catalogue that cannot be written.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "base/bytes.h"
#include "daemon/persist.h"
#include "daemon/report.h"
#include "daemon/space_internal.h"
#include "hosttier/catalogue.h"
#include "tests/engine_store.h"
#include "tests/folder.h"

/* ---- A disk that can be switched off under the catalogue ---- */

static _Atomic int disk_error; /* errno of every sync; 0: works */
static _Atomic uint64_t syncs;

int fdatasync(int fd);

int fdatasync(int fd)
{
    atomic_fetch_add(&syncs, 1);
    if (atomic_load(&disk_error) != 0) {
        errno = atomic_load(&disk_error);
        return -1;
    }
    return (int)syscall(SYS_fdatasync, fd);
}

/* ---- A house on a folder ---- */

struct place {
    char folder[64];
    struct house house;
};

static void place_init(struct place *place)
{
    (void)snprintf(place->folder, sizeof(place->folder), "/tmp/kvkeep-persist-XXXXXX");
    cr_assert_not_null(mkdtemp(place->folder));
}

static void place_start(struct place *place)
{
    const struct house_options options = {.device_bytes = 64 << 10, .host_bytes = 64 << 10};
    house_init(&place->house);
    (void)snprintf(place->house.config.durable_folder, sizeof(place->house.config.durable_folder),
                   "%s", place->folder);
    place->house.config.catalogue_bytes = UINT64_C(64) << 20;
    house_start(&place->house, &options);
}

static void place_restart(struct place *place)
{
    house_stop(&place->house);
    place_start(place);
}

static void place_finish(struct place *place)
{
    house_stop(&place->house);
    folder_remove(place->folder);
}

/* What a daemon that is killed now leaves: another house begins with it. */
static void place_crash(struct place *place, struct place *after)
{
    char command[256];
    place_init(after);
    (void)snprintf(command, sizeof(command), "cp -r %s/. %s/", place->folder, after->folder);
    cr_assert_eq(system(command), 0);
    place_start(after);
}

static struct kvk_space *only_space(struct place *place)
{
    cr_assert_eq(place->house.cache->space_count, 1);
    return place->house.cache->spaces;
}

static enum kvk_status invalidate(struct place *place, const struct kvk_invalidate_request *request,
                                  struct kvk_invalidate_reply *reply)
{
    return kvk_invalidate(place->house.cache, &place->house.caller, request, reply,
                          &place->house.error);
}

static void request_fill(struct kvk_space_request *request, const char *model)
{
    memset(request, 0, sizeof(*request));
    request->block_tokens = 4;
    request->group_count = 2;
    request->groups[0] = house_geometry();
    request->groups[1] = house_geometry();
    request->groups[1].window = 8;
    request->groups[1].sinks = 4;
    request->flops_per_token = 1e9;
    request->flops_per_token_position = 12.5;
    request->flops_per_second = 1e15;
    request->lookup_min_tokens = 17;
    for (int i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        request->identity.parts[i] = house_view("part");
    }
    request->identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
    request->identity.extra_count = 1;
    request->identity.extra[0].name = house_view("name");
    request->identity.extra[0].value = house_view("value");
}

static struct kvk_space_reply open_one(struct place *place, const struct kvk_space_request *request)
{
    struct kvk_space_reply reply;
    cr_assert_eq(kvk_space_open(place->house.cache, &place->house.caller, request, &reply,
                                &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    return reply;
}

static void keep_figure(void *context, const char *name, double value)
{
    struct {
        const char *name;
        double value;
    } *wanted = context;
    if (strcmp(name, wanted->name) == 0) {
        wanted->value = value;
    }
}

/* A counter or gauge as operators see it; NAN: it is not there. */
static double figure(struct place *place, const char *name)
{
    struct {
        const char *name;
        double value;
    } wanted = {.name = name, .value = NAN};
    kvk_report_stats(place->house.cache, keep_figure, &wanted);
    return wanted.value;
}

/* ---- Restarts ---- */

Test(persist, a_space_comes_back_under_its_id)
{
    struct place place;
    struct kvk_space_request request;
    place_init(&place);
    place_start(&place);
    request_fill(&request, "m");
    struct kvk_space_reply reply = open_one(&place, &request);
    cr_assert(reply.created);
    uint8_t identity[1024];
    size_t identity_size = only_space(&place)->identity_size;
    memcpy(identity, only_space(&place)->identity, identity_size);
    for (int restart = 0; restart < 3; restart++) {
        place_restart(&place);
        const struct kvk_space *space = only_space(&place);
        cr_assert_eq(space->id, reply.space_id);
        cr_assert_eq(space->generation, 1);
        cr_assert_str_eq(space->tenant->name, "default");
        cr_assert_eq(space->identity_size, identity_size);
        cr_assert_eq(memcmp(space->identity, identity, identity_size), 0);
        cr_assert_eq(kvk_load_le64(space->identity + identity_size), 1);
        cr_assert_eq(space->group_count, 2);
        for (uint32_t i = 0; i < 2; i++) {
            cr_assert(kvk_geometry_equal(&space->groups[i]->geometry, &request.groups[i]));
        }
        cr_assert_eq(space->flops_per_token, request.flops_per_token);
        cr_assert_eq(space->flops_per_token_position, request.flops_per_token_position);
        cr_assert_eq(space->flops_per_second, request.flops_per_second);
        cr_assert_eq(space->lookup_min_tokens, 17);
        cr_assert_eq(place.house.cache->stats.spaces_restored, 1);
        struct kvk_space_reply again = open_one(&place, &request);
        cr_assert_eq(again.space_id, reply.space_id);
        cr_assert_not(again.created);
    }
    request.groups[0].layers++;
    cr_assert_eq(kvk_space_open(place.house.cache, &place.house.caller, &request, &reply,
                                &place.house.error),
                 KVK_EXISTS, "another geometry under the same identity, also after a restart");
    place_finish(&place);
}

/* A5: what differs in one part is another space, before and after. */
Test(persist, a5_identities_stay_apart_after_a_restart)
{
    struct place place;
    struct kvk_space_request request;
    uint64_t ids[KVK_IDENTITY_PART_COUNT + 1];
    place_init(&place);
    place_start(&place);
    for (int i = 0; i <= KVK_IDENTITY_PART_COUNT; i++) {
        request_fill(&request, "m");
        if (i < KVK_IDENTITY_PART_COUNT) {
            request.identity.parts[i] = house_view("other");
        }
        ids[i] = open_one(&place, &request).space_id;
    }
    place_restart(&place);
    cr_assert_eq(place.house.cache->space_count, KVK_IDENTITY_PART_COUNT + 1);
    for (int i = 0; i <= KVK_IDENTITY_PART_COUNT; i++) {
        request_fill(&request, "m");
        if (i < KVK_IDENTITY_PART_COUNT) {
            request.identity.parts[i] = house_view("other");
        }
        struct kvk_space_reply reply = open_one(&place, &request);
        cr_assert_eq(reply.space_id, ids[i]);
        cr_assert_not(reply.created);
    }
    request_fill(&request, "m");
    request.groups[0].format_k = KVK_FORMAT_BF16;
    request.groups[0].format_v = KVK_FORMAT_BF16;
    struct kvk_space_reply reply;
    cr_assert_eq(kvk_space_open(place.house.cache, &place.house.caller, &request, &reply,
                                &place.house.error),
                 KVK_EXISTS, "16-bit types are not read as others");
    place_finish(&place);
}

/* A7: names that look like others, or like paths. */
Test(persist, a7_odd_names_come_back_as_they_were)
{
    static const char *const models[] = {"o/m/n", "o/m-SEP-n", "../x",         "a@b",
                                         "c",     "\xc3\x85",  "\xe2\x84\xab", "A\xcc\x8a"};
    enum { COUNT = sizeof(models) / sizeof(models[0]) };
    struct place place;
    struct kvk_space_request request;
    uint64_t ids[COUNT];
    place_init(&place);
    place_start(&place);
    for (int i = 0; i < COUNT; i++) {
        request_fill(&request, models[i]);
        ids[i] = open_one(&place, &request).space_id;
    }
    struct kvk_space_reply reply;
    request_fill(&request, "m");
    request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){.data = (const uint8_t *)"m\0n", .size = 3};
    cr_assert_eq(kvk_space_open(place.house.cache, &place.house.caller, &request, &reply,
                                &place.house.error),
                 KVK_INVALID, "an embedded NUL");
    char *large = malloc(40 << 10);
    memset(large, 'n', 40 << 10);
    request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){.data = (const uint8_t *)large, .size = 40 << 10};
    cr_assert_eq(kvk_space_open(place.house.cache, &place.house.caller, &request, &reply,
                                &place.house.error),
                 KVK_INVALID, "40 KB");
    free(large);
    place_restart(&place);
    cr_assert_eq(place.house.cache->space_count, COUNT);
    for (int i = 0; i < COUNT; i++) {
        request_fill(&request, models[i]);
        cr_assert_eq(open_one(&place, &request).space_id, ids[i]);
    }
    place_finish(&place);
}

/* ---- Invalidations ---- */

Test(persist, an_invalidation_is_durable_when_it_returns)
{
    struct place place;
    struct place after;
    struct kvk_invalidate_reply reply;
    place_init(&place);
    place_start(&place);
    uint64_t id = house_space(&place.house, "m");
    const struct kvk_invalidate_request request = {.space_id = id};
    for (uint64_t i = 2; i < 6; i++) {
        uint64_t before = atomic_load(&syncs);
        cr_assert_eq(invalidate(&place, &request, &reply), KVK_OK, "%s", place.house.error.text);
        cr_assert_gt(atomic_load(&syncs), before);
        cr_assert_eq(reply.spaces, 1);
        place_crash(&place, &after);
        cr_assert_eq(only_space(&after)->id, id);
        cr_assert_eq(only_space(&after)->generation, i);
        place_finish(&after);
    }
    place_restart(&place);
    cr_assert_eq(only_space(&place)->generation, 5);
    place_finish(&place);
}

Test(persist, an_invalidation_that_cannot_be_durable_changes_nothing)
{
    struct place place;
    struct kvk_invalidate_reply reply;
    uint32_t tokens[8];
    place_init(&place);
    place_start(&place);
    uint64_t id = house_space(&place.house, "m");
    uint64_t session = house_session(&place.house);
    house_tokens(tokens, 8, 1);
    struct kvk_sequence_reply sequence = house_open(&place.house, session, id, tokens, 8);
    house_seal(&place.house, session, sequence.sequence_id, 8);
    house_close(&place.house, session, sequence.sequence_id);
    cr_assert_eq(house_cached(&place.house, id, tokens, 8), 8);

    atomic_store(&disk_error, EIO);
    const struct kvk_invalidate_request request = {.model = house_view("m")};
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_UNAVAILABLE);
    cr_assert_eq(only_space(&place)->generation, 1);
    cr_assert_eq(house_cached(&place.house, id, tokens, 8), 8, "all or nothing");
    cr_assert_eq(place.house.cache->stats.space_record_failures, 1);
    atomic_store(&disk_error, 0);
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_OK, "%s", place.house.error.text);
    cr_assert_eq(reply.blocks[KVK_TIER_DEVICE], 2);
    cr_assert_eq(house_cached(&place.house, id, tokens, 8), 0);
    place_restart(&place);
    cr_assert_geq(only_space(&place)->generation, 2);
    place_finish(&place);
}

/* Every name of an identity can be named, and only what matches goes. */
Test(persist, every_part_can_be_invalidated_by_name)
{
    struct place place;
    struct kvk_space_request space_request;
    struct kvk_invalidate_reply reply;
    place_init(&place);
    place_start(&place);
    request_fill(&space_request, "m");
    struct kvk_space_reply one = open_one(&place, &space_request);
    for (int i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        space_request.identity.parts[i] = house_view("else");
    }
    struct kvk_space_reply other = open_one(&place, &space_request);
    const struct kvk_view part = house_view("part");
    const struct kvk_invalidate_request requests[] = {
        {.model = house_view("m")},
        {.revision = part},
        {.adapter_name = part},
        {.adapter_id = part},
        {.adapter_version = part},
        {.position_encoding = part},
        {.kv_format = part},
        {.mask_rule = part},
        {.model = house_view("m"), .revision = part, .mask_rule = part, .kv_format = part},
    };
    uint64_t expected = 1;
    for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
        cr_assert_eq(invalidate(&place, &requests[i], &reply), KVK_OK);
        cr_assert_eq(reply.spaces, 1, "request %zu", i);
        expected++;
    }
    const struct kvk_invalidate_request nothing = {.model = house_view("m"),
                                                   .mask_rule = house_view("else")};
    cr_assert_eq(invalidate(&place, &nothing, &reply), KVK_OK);
    cr_assert_eq(reply.spaces, 0, "all names must match");
    place_restart(&place);
    for (const struct kvk_space *space = place.house.cache->spaces; space != NULL;
         space = space->next) {
        cr_assert_eq(space->generation, space->id == one.space_id ? expected : 1);
        cr_assert(space->id == one.space_id || space->id == other.space_id);
    }
    place_finish(&place);
}

static void seal_prompt(struct place *place, uint64_t session, uint64_t space, const char *salt,
                        const uint32_t *tokens)
{
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    const struct kvk_open_request request = {
        .session_id = session,
        .space_id = space,
        .prompt = {.tokens = tokens,
                   .token_count = 8,
                   .salt = (const uint8_t *)salt,
                   .salt_size = strlen(salt)},
        .tier = -1,
    };
    cr_assert_eq(kvk_sequence_open(place->house.cache, &place->house.caller, &request, &reply,
                                   &tables, &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    kvk_tables_finish(&tables);
    house_seal(&place->house, session, reply.sequence_id, 8);
    house_close(&place->house, session, reply.sequence_id);
}

static uint64_t salted_hit(struct place *place, uint64_t space, const char *salt,
                           const uint32_t *tokens)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {.space_id = space,
                                               .prompt = {.tokens = tokens,
                                                          .token_count = 8,
                                                          .salt = (const uint8_t *)salt,
                                                          .salt_size = strlen(salt)}};
    cr_assert_eq(
        kvk_lookup(place->house.cache, &place->house.caller, &request, &reply, &place->house.error),
        KVK_OK);
    return reply.cached_tokens;
}

/* A salt without a space is that salt in every space that the names match. */
Test(persist, a_salt_goes_from_all_spaces)
{
    struct place place;
    struct kvk_invalidate_reply reply;
    uint32_t tokens[8];
    place_init(&place);
    place_start(&place);
    uint64_t spaces[2] = {house_space(&place.house, "m"), house_space(&place.house, "n")};
    uint64_t session = house_session(&place.house);
    house_tokens(tokens, 8, 1);
    for (int i = 0; i < 2; i++) {
        seal_prompt(&place, session, spaces[i], "user", tokens);
        seal_prompt(&place, session, spaces[i], "other", tokens);
    }
    struct kvk_invalidate_request request = {
        .model = house_view("n"), .by_salt = true, .salt = house_view("user")};
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_OK, "%s", place.house.error.text);
    cr_assert_eq(reply.blocks[KVK_TIER_DEVICE], 2);
    cr_assert_eq(salted_hit(&place, spaces[0], "user", tokens), 8);
    cr_assert_eq(salted_hit(&place, spaces[1], "user", tokens), 0);
    request.model = (struct kvk_view){.size = 0};
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_OK);
    cr_assert_eq(reply.spaces, 2);
    cr_assert_eq(reply.blocks[KVK_TIER_DEVICE], 2);
    cr_assert_eq(salted_hit(&place, spaces[0], "user", tokens), 0);
    cr_assert_eq(salted_hit(&place, spaces[0], "other", tokens), 8);
    cr_assert_eq(salted_hit(&place, spaces[1], "other", tokens), 8);
    const struct kvk_prompt prefix = {.tokens = tokens, .token_count = 4};
    const struct kvk_invalidate_request nowhere = {.prefix = &prefix};
    cr_assert_eq(invalidate(&place, &nowhere, &reply), KVK_INVALID);
    cr_assert_str_eq(place.house.error.field, "space_id");
    place_finish(&place);
}

/* A part's removals must be durable too: a catalogue that cannot be written is told. */
Test(persist, a_part_says_when_it_is_not_durable)
{
    struct place place;
    struct kvk_invalidate_reply reply;
    uint64_t ticket;
    place_init(&place);
    place_start(&place);
    uint64_t id = house_space(&place.house, "m");
    const uint32_t tokens[4] = {1, 2, 3, 4};
    const uint64_t checksum = 5;
    const struct kvk_disk_block_record record = {.space_id = id,
                                                 .tokens = tokens,
                                                 .token_count = 4,
                                                 .checksums = &checksum,
                                                 .shard_count = 1};
    struct kvk_catalogue *catalogue = place.house.durable.catalogue;
    cr_assert_eq(kvk_catalogue_block_put(catalogue, &record, NULL), KVK_OK);
    cr_assert_eq(kvk_catalogue_flush(catalogue, &place.house.error), KVK_OK);
    atomic_store(&disk_error, EIO);
    cr_assert_eq(kvk_catalogue_block_remove(catalogue, id, 0, 0, &ticket), KVK_OK);
    const struct kvk_invalidate_request request = {
        .space_id = id, .by_salt = true, .salt = house_view("user")};
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_UNAVAILABLE);
    cr_assert_not_null(strstr(place.house.error.text, "call again"), "%s", place.house.error.text);
    cr_assert_gt(place.house.error.retry_after_ms, 0);
    atomic_store(&disk_error, 0);
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_OK);
    cr_assert_geq(kvk_catalogue_committed(catalogue), ticket);
    place_finish(&place);
}

/* ---- Recording ---- */

Test(persist, a_space_that_is_not_recorded_serves_and_is_recorded_later)
{
    struct place place;
    struct place after;
    struct kvk_invalidate_reply reply;
    place_init(&place);
    place_start(&place);
    atomic_store(&disk_error, ENOSPC);
    uint64_t id = house_space(&place.house, "m");
    cr_assert_not(only_space(&place)->recorded);
    cr_assert_geq(place.house.cache->stats.space_record_failures, 1);
    const struct kvk_invalidate_request request = {.space_id = id};
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_OK, "%s", place.house.error.text);
    cr_assert_eq(only_space(&place)->generation, 2);
    atomic_store(&disk_error, 0);
    place_crash(&place, &after);
    cr_assert_eq(after.house.cache->space_count, 0, "nothing of it could come back");
    place_finish(&after);
    kvk_cache_maintain(place.house.cache);
    cr_assert(only_space(&place)->recorded);
    place_crash(&place, &after);
    cr_assert_eq(only_space(&after)->id, id);
    cr_assert_eq(only_space(&after)->generation, only_space(&place)->generation);
    place_finish(&after);
    place_finish(&place);
}

Test(persist, a_reclaimed_space_is_removed)
{
    struct place place;
    place_init(&place);
    place_start(&place);
    place.house.config.spaces = 4;
    char model[16];
    for (int i = 0; i < 20; i++) {
        (void)snprintf(model, sizeof(model), "m%d", i);
        (void)house_space(&place.house, model);
    }
    cr_assert_eq(place.house.cache->space_count, 4);
    struct kvk_catalogue_stats stats;
    kvk_catalogue_stats(place.house.durable.catalogue, &stats);
    cr_assert_eq(stats.spaces, 4);
    place_restart(&place);
    cr_assert_eq(place.house.cache->space_count, 4);
    place_finish(&place);
}

/* ---- Modes ---- */

static enum kvk_status switch_space(struct place *place, uint64_t id, enum kvk_tenant_mode mode)
{
    return kvk_space_set_mode(place->house.cache, id, mode, &place->house.error);
}

Test(persist, a_switched_space_stays_switched)
{
    struct place place;
    struct place after;
    place_init(&place);
    place_start(&place);
    uint64_t id = house_space(&place.house, "m");
    cr_assert_eq(switch_space(&place, id, KVK_TENANT_OFF), KVK_OK);
    place_crash(&place, &after);
    cr_assert_eq(only_space(&after)->mode, KVK_TENANT_OFF, "it was durable when it was answered");
    cr_assert_eq(kvk_space_check(only_space(&after), NULL), KVK_PERMISSION);
    place_finish(&after);
    cr_assert_eq(switch_space(&place, id, KVK_TENANT_SHADOW), KVK_OK);
    place_restart(&place);
    cr_assert_eq(only_space(&place)->mode, KVK_TENANT_SHADOW);
    struct kvk_space_report *rows;
    uint32_t count;
    const struct kvk_view all = {.size = 0};
    cr_assert_eq(kvk_report_spaces(place.house.cache, &place.house.caller, all, &rows, &count,
                                   &place.house.error),
                 KVK_OK);
    cr_assert_eq(count, 1);
    cr_assert_eq(rows[0].mode, KVK_TENANT_SHADOW);
    kvk_report_spaces_free(rows, count);
    const struct kvk_invalidate_request request = {.space_id = id};
    struct kvk_invalidate_reply reply;
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_OK);
    place_restart(&place);
    cr_assert_eq(only_space(&place)->mode, KVK_TENANT_SHADOW, "an invalidation leaves it");
    cr_assert_eq(switch_space(&place, id, KVK_TENANT_ON), KVK_OK);
    place_restart(&place);
    cr_assert_eq(only_space(&place)->mode, KVK_TENANT_ON);
    place_finish(&place);
}

Test(persist, a_switch_that_cannot_be_recorded_changes_nothing)
{
    struct place place;
    place_init(&place);
    place_start(&place);
    uint64_t id = house_space(&place.house, "m");
    atomic_store(&disk_error, EIO);
    cr_assert_neq(switch_space(&place, id, KVK_TENANT_OFF), KVK_OK);
    atomic_store(&disk_error, 0);
    cr_assert_eq(only_space(&place)->mode, KVK_TENANT_ON);
    place_restart(&place);
    cr_assert_eq(only_space(&place)->mode, KVK_TENANT_ON);
    cr_assert_eq(switch_space(&place, id, KVK_TENANT_OFF), KVK_OK);
    place_finish(&place);
}

Test(persist, a_space_that_was_recorded_late_has_its_mode)
{
    struct place place;
    struct place after;
    place_init(&place);
    place_start(&place);
    atomic_store(&disk_error, ENOSPC);
    uint64_t id = house_space(&place.house, "m");
    cr_assert_not(only_space(&place)->recorded);
    atomic_store(&disk_error, 0);
    cr_assert_eq(switch_space(&place, id, KVK_TENANT_OFF), KVK_OK);
    cr_assert(only_space(&place)->recorded);
    place_crash(&place, &after);
    cr_assert_eq(only_space(&after)->mode, KVK_TENANT_OFF);
    place_finish(&after);
    place_finish(&place);
}

Test(persist, a_switched_space_is_not_reclaimed)
{
    struct place place;
    char model[16];
    place_init(&place);
    place_start(&place);
    place.house.config.spaces = 4;
    uint64_t id = 0;
    for (int i = 0; i < 20; i++) {
        if (i == 3) { /* the last that is made without reclaiming one, whichever goes first */
            id = house_space(&place.house, "m");
            cr_assert_eq(switch_space(&place, id, KVK_TENANT_OFF), KVK_OK);
        }
        (void)snprintf(model, sizeof(model), "m%d", i);
        (void)house_space(&place.house, model);
    }
    cr_assert_eq(place.house.cache->space_count, 4);
    cr_assert_eq(house_space(&place.house, "m"), id, "else it would be on when opened again");
    place_finish(&place);
}

/* ---- Records that do not fit ---- */

static uint32_t record_count(struct place *place)
{
    struct kvk_catalogue_stats stats;
    kvk_catalogue_stats(place->house.durable.catalogue, &stats);
    return (uint32_t)stats.spaces;
}

static void put_record(struct place *place, const struct kvk_space_record *record)
{
    cr_assert_eq(
        kvk_catalogue_put_space(place->house.durable.catalogue, record, &place->house.error),
        KVK_OK, "%s", place->house.error.text);
}

Test(persist, foreign_records_are_left_out)
{
    struct place place;
    struct kvk_space_request request;
    uint8_t shape[KVK_SHAPE_SIZE_MAX];
    place_init(&place);
    place_start(&place);
    request_fill(&request, "m");
    (void)open_one(&place, &request);
    const struct kvk_space *space = only_space(&place);
    struct kvk_space_record record = {.id = 1,
                                      .tenant_id = space->tenant->id + 100,
                                      .generation = 1,
                                      .identity = space->identity,
                                      .identity_size = space->identity_size,
                                      .shape = shape,
                                      .shape_size = kvk_shape_encode(space, shape)};
    put_record(&place, &record); /* whose tenant is gone */
    record.id = 2;
    record.tenant_id = space->tenant->id;
    put_record(&place, &record); /* the same identity again */
    record.id = 3;
    record.identity_size--;
    put_record(&place, &record); /* no identity */
    record.id = 4;
    record.identity_size++;
    record.shape_size--;
    put_record(&place, &record); /* no shape */
    uint64_t id = space->id;
    place_restart(&place);
    /* Ids are random, so either of the two with one identity may come first. */
    cr_assert(only_space(&place)->id == id || only_space(&place)->id == 2);
    cr_assert_eq(place.house.cache->stats.space_records_refused, 4);
    cr_assert_eq(record_count(&place), 3, "what nobody wants any more is removed, the rest stays");
    place_finish(&place);
}

Test(persist, a_configuration_that_is_too_small_leaves_records_alone)
{
    struct place place;
    char model[16];
    place_init(&place);
    place_start(&place);
    for (int i = 0; i < 6; i++) {
        (void)snprintf(model, sizeof(model), "m%d", i);
        (void)house_space(&place.house, model);
    }
    house_stop(&place.house);
    const struct house_options options = {.device_bytes = 64 << 10};
    house_init(&place.house);
    place.house.config.spaces = 4;
    (void)snprintf(place.house.config.durable_folder, sizeof(place.house.config.durable_folder),
                   "%s", place.folder);
    house_start(&place.house, &options);
    cr_assert_eq(place.house.cache->space_count, 4);
    cr_assert_eq(place.house.cache->stats.space_records_refused, 2);
    place_restart(&place);
    cr_assert_eq(place.house.cache->space_count, 6);
    place_finish(&place);
}

/* ---- What operators see ---- */

Test(persist, every_figure_moves)
{
    struct place place;
    struct kvk_invalidate_reply reply;
    place_init(&place);
    place_start(&place);
    cr_assert_eq(figure(&place, "kvkeep_spaces_restored_total"), 0);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_spaces"), 0);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_failing"), 0);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_limit_bytes"), 48 << 20);
    uint64_t id = house_space(&place.house, "m");
    cr_assert_eq(figure(&place, "kvkeep_catalogue_spaces"), 1);
    double used = figure(&place, "kvkeep_catalogue_used_bytes");
    cr_assert_gt(used, 0);
    const uint32_t tokens[4] = {1, 2, 3, 4};
    const uint64_t checksum = 5;
    struct kvk_disk_block_record record = {.space_id = id,
                                           .group = 9,
                                           .tokens = tokens,
                                           .token_count = 4,
                                           .checksums = &checksum,
                                           .shard_count = 1};
    struct kvk_catalogue *catalogue = place.house.durable.catalogue;
    for (record.slot = 0; record.slot < 100; record.slot++) {
        cr_assert_eq(kvk_catalogue_block_put(catalogue, &record, NULL), KVK_OK);
    }
    cr_assert_eq(kvk_catalogue_flush(catalogue, &place.house.error), KVK_OK);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_blocks"), 100);
    cr_assert_geq(figure(&place, "kvkeep_catalogue_commits_total"), 1);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_operations_total"), 100);
    cr_assert_gt(figure(&place, "kvkeep_catalogue_commit_seconds"), 0);
    cr_assert_gt(figure(&place, "kvkeep_catalogue_used_bytes"), used);

    atomic_store(&disk_error, EIO);
    const struct kvk_invalidate_request request = {.space_id = id};
    cr_assert_eq(invalidate(&place, &request, &reply), KVK_UNAVAILABLE);
    cr_assert_eq(figure(&place, "kvkeep_space_record_failures_total"), 1);
    cr_assert_eq(kvk_catalogue_block_remove(catalogue, id, 9, 0, NULL), KVK_OK);
    cr_assert_neq(kvk_catalogue_flush(catalogue, &place.house.error), KVK_OK);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_failing"), 1);
    cr_assert_geq(figure(&place, "kvkeep_catalogue_commit_failures_total"), 1);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_queued"), 1);
    atomic_store(&disk_error, 0);

    const struct kvk_space_record foreign = {.id = 7,
                                             .tenant_id = 1000,
                                             .generation = 1,
                                             .identity = (const uint8_t *)"x",
                                             .identity_size = 1};
    put_record(&place, &foreign);
    place_restart(&place);
    cr_assert_eq(figure(&place, "kvkeep_spaces_restored_total"), 1);
    cr_assert_eq(figure(&place, "kvkeep_space_records_refused_total"), 1);
    cr_assert_eq(figure(&place, "kvkeep_catalogue_damaged_records_total"), 0);
    place_finish(&place);
}

/* ---- Shapes and identities as bytes ---- */

Test(persist, shapes_are_checked)
{
    struct place place;
    struct kvk_space_request request;
    struct kvk_space_request back;
    uint8_t shape[KVK_SHAPE_SIZE_MAX];
    place_init(&place);
    place_start(&place);
    request_fill(&request, "m");
    (void)open_one(&place, &request);
    size_t size = kvk_shape_encode(only_space(&place), shape);
    cr_assert(kvk_shape_decode(shape, size, &back));
    cr_assert_eq(back.group_count, 2);
    for (size_t i = 0; i < size; i++) {
        cr_assert_not(kvk_shape_decode(shape, i, &back), "cut to %zu", i);
    }
    cr_assert_not(kvk_shape_decode(shape, size + 1, &back));
    for (size_t i = 0; i < size; i++) {
        for (int bit = 0; bit < 8; bit++) {
            shape[i] ^= (uint8_t)(1 << bit);
            /* Read or not, it is a request like any other, and is checked as such. */
            if (kvk_shape_decode(shape, size, &back)) {
                cr_assert_leq(back.group_count, KVK_GROUP_COUNT_MAX);
            }
            shape[i] ^= (uint8_t)(1 << bit);
        }
    }
    shape[0]++;
    cr_assert_not(kvk_shape_decode(shape, size, &back), "a newer version");
    place_finish(&place);
}

Test(persist, only_canonical_identities_are_taken)
{
    struct kvk_space_request request;
    uint8_t *bytes;
    size_t size;
    request_fill(&request, "model");
    request.identity.extra_count = 2;
    request.identity.extra[1].name = house_view("another");
    request.identity.extra[1].value = house_view("");
    cr_assert_eq(kvk_identity_encode(&request.identity, 8, &bytes, &size, NULL), KVK_OK);
    cr_assert(kvk_identity_is_canonical(bytes, size));
    uint32_t shorter = 0;
    for (size_t i = 0; i < size; i++) {
        shorter += kvk_identity_is_canonical(bytes, i);
    }
    cr_assert_eq(shorter, 2, "without its last pair, and without both");
    cr_assert_not(kvk_identity_is_canonical(bytes, size + 1));
    /* The same pairs in another order: whole, but not what encoding gives. */
    size_t pairs = 0;
    uint32_t tag;
    struct kvk_view part;
    for (int i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        cr_assert(kvk_identity_next(bytes, size, &pairs, &tag, &part));
    }
    size_t second = pairs;
    cr_assert(kvk_identity_next(bytes, size, &second, &tag, &part));
    cr_assert(kvk_identity_next(bytes, size, &second, &tag, &part));
    uint8_t *swapped = malloc(size);
    memcpy(swapped, bytes, pairs);
    memcpy(swapped + pairs, bytes + second, size - second);
    memcpy(swapped + pairs + size - second, bytes + pairs, second - pairs);
    cr_assert_not(kvk_identity_is_canonical(swapped, size));
    free(swapped);

    struct kvk_random random;
    kvk_random_init(&random, 5);
    for (int i = 0; i < 20000; i++) {
        uint8_t *copy = malloc(size);
        memcpy(copy, bytes, size);
        size_t offset = 0;
        copy[kvk_random_below(&random, size)] ^= (uint8_t)kvk_random_between(&random, 1, 255);
        if (kvk_identity_is_canonical(copy, size)) { /* then it can be walked */
            while (kvk_identity_next(copy, size, &offset, &tag, &part)) {
            }
        }
        free(copy);
    }
    free(bytes);
}
