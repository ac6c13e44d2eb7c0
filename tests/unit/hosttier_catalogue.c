/* The catalogue: every function, reopening, the queue, folders and versions. */
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "tests/catalogue_house.h"

/* ---- Tenants ---- */

struct tenant_list {
    struct kvk_tenant_record records[8];
    uint32_t count;
};

static void keep_tenant(void *context, const struct kvk_tenant_record *record)
{
    struct tenant_list *list = context;
    cr_assert_lt(list->count, 8);
    list->records[list->count++] = *record;
}

static struct tenant_list tenants(struct shelf *shelf)
{
    struct tenant_list list = {.count = 0};
    cr_assert_eq(kvk_catalogue_tenants(shelf->catalogue, keep_tenant, &list, &shelf->error),
                 KVK_OK);
    return list;
}

Test(catalogue, tenants_come_back_as_they_were)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    struct kvk_tenant_record one = example_tenant("one");
    struct kvk_tenant_record other = example_tenant("a@b \xc3\x85");
    other.mode = KVK_TENANT_ON;
    other.may_publish = false;
    other.forgetting = false;
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &one, &shelf.error), KVK_OK);
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &other, &shelf.error), KVK_OK);
    cr_assert_neq(one.id, 0);
    cr_assert_neq(one.id, other.id);
    shelf_reopen(&shelf);
    struct tenant_list list = tenants(&shelf);
    cr_assert_eq(list.count, 2);
    cr_assert_eq(memcmp(&list.records[0], &other, sizeof(other)), 0,
                 "every field, by name's order");
    cr_assert_eq(memcmp(&list.records[1], &one, sizeof(one)), 0);
    one.quota.leases = 99;
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &one, &shelf.error), KVK_OK);
    list = tenants(&shelf);
    cr_assert_eq(list.count, 2, "the same name is the same tenant");
    cr_assert_eq(list.records[1].quota.leases, 99);
    cr_assert_eq(shelf_stats(&shelf).tenants, 2);
    shelf_finish(&shelf);
}

Test(catalogue, an_id_is_never_given_twice)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    struct kvk_tenant_record first = example_tenant("first");
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &first, &shelf.error), KVK_OK);
    struct kvk_tenant_record chosen = example_tenant("chosen");
    chosen.id = 1000;
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &chosen, &shelf.error), KVK_OK);
    cr_assert_eq(kvk_catalogue_remove_tenant(shelf.catalogue, 1000, &shelf.error), KVK_OK);
    cr_assert_eq(kvk_catalogue_remove_tenant(shelf.catalogue, 1000, &shelf.error), KVK_NOT_FOUND);
    shelf_reopen(&shelf);
    struct kvk_tenant_record next = example_tenant("next");
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &next, &shelf.error), KVK_OK);
    cr_assert_gt(next.id, 1000);
    next = example_tenant("thief");
    next.id = first.id;
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &next, &shelf.error), KVK_EXISTS);
    next = example_tenant("first");
    next.id = 5000;
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &next, &shelf.error), KVK_EXISTS);
    cr_assert_eq(next.id, 5000, "a call that fails changes nothing");
    cr_assert_eq(tenants(&shelf).count, 2);
    shelf_finish(&shelf);
}

/* Names are values: whatever they look like, they are apart, and none is a path. */
Test(catalogue, odd_names_are_apart_or_refused)
{
    static const char *const names[] = {"o/m/n",    "o/m-SEP-n",    "../kvkeep-astray", "a@b",
                                        "\xc3\x85", "\xe2\x84\xab", "A\xcc\x8a"};
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    for (size_t i = 0; i < 7; i++) {
        struct kvk_tenant_record record = example_tenant(names[i]);
        record.created_s = i;
        cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &record, &shelf.error), KVK_OK);
        cr_assert_eq(
            kvk_catalogue_put_value(shelf.catalogue, names[i], &i, sizeof(i), &shelf.error),
            KVK_OK);
    }
    shelf_reopen(&shelf);
    struct tenant_list list = tenants(&shelf);
    cr_assert_eq(list.count, 7);
    for (uint32_t i = 0; i < list.count; i++) {
        size_t value;
        size_t size = sizeof(value);
        cr_assert_str_eq(list.records[i].name, names[list.records[i].created_s]);
        cr_assert_eq(kvk_catalogue_get_value(shelf.catalogue, list.records[i].name, &value, &size,
                                             &shelf.error),
                     KVK_OK);
        cr_assert_eq(value, list.records[i].created_s);
    }
    cr_assert_neq(access("/tmp/kvkeep-astray", F_OK), 0);

    struct kvk_tenant_record bad = example_tenant("");
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &bad, &shelf.error), KVK_INVALID);
    bad = example_tenant("\xff\xfe");
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &bad, &shelf.error), KVK_INVALID);
    memset(bad.name, 'n', sizeof(bad.name));
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &bad, &shelf.error), KVK_INVALID,
                 "256 bytes and no end");
    char *large = malloc(40 << 10);
    memset(large, 'n', (40 << 10) - 1);
    large[(40 << 10) - 1] = '\0';
    cr_assert_eq(kvk_catalogue_put_value(shelf.catalogue, large, "", 0, &shelf.error), KVK_INVALID);
    cr_assert_eq(kvk_catalogue_remove_credential(shelf.catalogue, large, &shelf.error),
                 KVK_INVALID);
    free(large);
    shelf_finish(&shelf);
}

/* ---- Credentials and values ---- */

static void keep_credential(void *context, const struct kvk_credential_record *record)
{
    struct kvk_credential_record *kept = context;
    *kept = *record;
}

Test(catalogue, credentials_come_back_and_go)
{
    struct shelf shelf;
    struct kvk_credential_record kept = {.tenant_count = 0};
    shelf_init(&shelf);
    shelf_open(&shelf);
    const struct kvk_credential_record record = example_credential("engine");
    cr_assert_eq(kvk_catalogue_put_credential(shelf.catalogue, &record, &shelf.error), KVK_OK);
    shelf_reopen(&shelf);
    cr_assert_eq(kvk_catalogue_credentials(shelf.catalogue, keep_credential, &kept, &shelf.error),
                 KVK_OK);
    cr_assert_eq(memcmp(&kept, &record, sizeof(kept)), 0);
    struct kvk_credential_record bad = record;
    bad.token_count = KVK_CREDENTIAL_TOKENS_MAX + 1;
    cr_assert_eq(kvk_catalogue_put_credential(shelf.catalogue, &bad, &shelf.error), KVK_INVALID);
    cr_assert_eq(kvk_catalogue_remove_credential(shelf.catalogue, "engine", &shelf.error), KVK_OK);
    cr_assert_eq(kvk_catalogue_remove_credential(shelf.catalogue, "engine", &shelf.error),
                 KVK_NOT_FOUND);
    shelf_reopen(&shelf);
    cr_assert_eq(shelf_stats(&shelf).credentials, 0);
    shelf_finish(&shelf);
}

Test(catalogue, values_by_name)
{
    struct shelf shelf;
    char room[16];
    size_t size = sizeof(room);
    shelf_init(&shelf);
    shelf_open(&shelf);
    cr_assert_eq(kvk_catalogue_get_value(shelf.catalogue, "none", room, &size, &shelf.error),
                 KVK_NOT_FOUND);
    cr_assert_eq(kvk_catalogue_put_value(shelf.catalogue, "v", "0123456789", 10, &shelf.error),
                 KVK_OK);
    cr_assert_eq(kvk_catalogue_put_value(shelf.catalogue, "empty", NULL, 0, &shelf.error), KVK_OK);
    shelf_reopen(&shelf);
    cr_assert_eq(kvk_catalogue_get_value(shelf.catalogue, "v", room, &size, &shelf.error), KVK_OK);
    cr_assert_eq(size, 10);
    cr_assert_eq(memcmp(room, "0123456789", 10), 0);
    size = 9;
    cr_assert_eq(kvk_catalogue_get_value(shelf.catalogue, "v", room, &size, &shelf.error),
                 KVK_INVALID);
    cr_assert_eq(shelf.error.value, 10);
    size = 0;
    cr_assert_eq(kvk_catalogue_get_value(shelf.catalogue, "empty", room, &size, &shelf.error),
                 KVK_OK);
    cr_assert_eq(
        kvk_catalogue_put_value(shelf.catalogue, "v", room, KVK_RECORD_VALUE_MAX + 1, &shelf.error),
        KVK_INVALID);
    shelf_finish(&shelf);
}

/* ---- Spaces ---- */

struct space_list {
    uint64_t ids[64];
    uint64_t generations[64];
    uint8_t modes[64];
    uint32_t count;
    bool wrong;
};

static void keep_space(void *context, const struct kvk_space_record *record)
{
    struct space_list *list = context;
    const struct kvk_space_record example = example_space(record->id, record->tenant_id);
    list->wrong = list->wrong || record->identity_size != example.identity_size ||
                  record->shape_size != example.shape_size ||
                  memcmp(record->identity, example.identity, example.identity_size) != 0 ||
                  memcmp(record->shape, example.shape, example.shape_size) != 0;
    list->ids[list->count] = record->id;
    list->modes[list->count] = record->mode;
    list->generations[list->count++] = record->generation;
}

static struct space_list spaces(struct shelf *shelf)
{
    struct space_list list = {.count = 0};
    cr_assert_eq(kvk_catalogue_spaces(shelf->catalogue, keep_space, &list, &shelf->error), KVK_OK);
    cr_assert_not(list.wrong);
    return list;
}

Test(catalogue, generations_only_rise_and_all_together)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 9);
    shelf_put_space(&shelf, 2, 9);
    const struct kvk_space_generation raised[] = {{1, 8}, {2, 20}, {777, 5}};
    cr_assert_eq(kvk_catalogue_set_generations(shelf.catalogue, raised, 3, &shelf.error), KVK_OK,
                 "a space without a record is passed over");
    shelf_reopen(&shelf);
    struct space_list list = spaces(&shelf);
    cr_assert_eq(list.count, 2);
    cr_assert_eq(list.generations[0], 8);
    cr_assert_eq(list.generations[1], 20);
    const struct kvk_space_generation late = {2, 19};
    cr_assert_eq(kvk_catalogue_set_generations(shelf.catalogue, &late, 1, &shelf.error), KVK_OK);
    shelf_put_space(&shelf, 2, 9); /* with 7 */
    shelf_reopen(&shelf);
    cr_assert_eq(spaces(&shelf).generations[1], 20, "it never goes back");
    cr_assert_eq(kvk_catalogue_set_generations(shelf.catalogue, NULL, 0, &shelf.error), KVK_OK);
    struct kvk_space_record bad = example_space(0, 9);
    cr_assert_eq(kvk_catalogue_put_space(shelf.catalogue, &bad, &shelf.error), KVK_INVALID);
    shelf_finish(&shelf);
}

Test(catalogue, a_space_takes_its_blocks_along)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    struct kvk_tenant_record tenant = example_tenant("t");
    cr_assert_eq(kvk_catalogue_put_tenant(shelf.catalogue, &tenant, &shelf.error), KVK_OK);
    for (uint64_t space = 1; space <= 3; space++) {
        shelf_put_space(&shelf, space, space == 3 ? tenant.id + 1 : tenant.id);
        for (uint32_t slot = 0; slot < 5000; slot++) {
            shelf_put_block(&shelf, space, slot % 2, slot, 1, NULL);
        }
    }
    /* Still queued when the space goes. */
    cr_assert_eq(kvk_catalogue_remove_space(shelf.catalogue, 1, &shelf.error), KVK_OK, "%s",
                 shelf.error.text);
    cr_assert_eq(kvk_catalogue_remove_space(shelf.catalogue, 1, &shelf.error), KVK_NOT_FOUND);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 1), 0);
    cr_assert_eq(shelf_count_blocks(&shelf, 2, 1), 5000);
    cr_assert_eq(kvk_catalogue_remove_tenant(shelf.catalogue, tenant.id, &shelf.error), KVK_OK);
    shelf_reopen(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 2, 1), 0);
    cr_assert_eq(shelf_count_blocks(&shelf, 3, 1), 5000, "another tenant's");
    cr_assert_eq(spaces(&shelf).count, 1);
    cr_assert_eq(tenants(&shelf).count, 0);
    cr_assert_eq(shelf_stats(&shelf).blocks, 5000);
    shelf_finish(&shelf);
}

Test(catalogue, blocks_of_no_space_are_swept_at_opening)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 5, 1);
    shelf_put_space(&shelf, UINT64_MAX, 1);
    const uint64_t with_blocks[] = {1, 4, 5, 6, UINT64_MAX - 1, UINT64_MAX};
    for (size_t i = 0; i < 6; i++) {
        for (uint32_t slot = 0; slot < 4200; slot++) {
            shelf_put_block(&shelf, with_blocks[i], 0, slot, 1, NULL);
        }
    }
    shelf_flush(&shelf);
    cr_assert_eq(shelf_stats(&shelf).blocks, 6 * 4200);
    shelf_reopen(&shelf);
    cr_assert_eq(shelf_stats(&shelf).blocks, 2 * 4200);
    cr_assert_eq(shelf_count_blocks(&shelf, 5, 1), 4200);
    cr_assert_eq(shelf_count_blocks(&shelf, UINT64_MAX, 1), 4200);
    shelf_finish(&shelf);
}

/* ---- Blocks ---- */

static bool stop_at_three(void *context, const struct kvk_disk_block_record *record)
{
    uint32_t *count = context;
    (void)record;
    return ++*count < 3;
}

Test(catalogue, blocks_come_back_in_order)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    for (uint32_t i = 0; i < 3000; i++) {
        shelf_put_block(&shelf, 1, i % 3, (i * 7919) % 3000, 4, NULL);
    }
    shelf_reopen(&shelf);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 4), 3000);
    uint32_t count = 0;
    cr_assert_eq(kvk_catalogue_blocks(shelf.catalogue, 1, stop_at_three, &count, &shelf.error),
                 KVK_OK);
    cr_assert_eq(count, 3);
    cr_assert_eq(shelf_stats(&shelf).damaged_records, 0);
    struct block_example example;
    example_block(&example, 1, 0, 0, 1);
    example.record.shard_count = 0;
    cr_assert_eq(kvk_catalogue_block_put(shelf.catalogue, &example.record, NULL), KVK_INVALID);
    shelf_finish(&shelf);
}

/* Random puts and removals against an array; every so often the catalogue is opened again. */
Test(catalogue, the_queue_does_what_an_array_does)
{
    enum { SLOTS = 256 };
    struct shelf shelf;
    struct kvk_random random;
    uint64_t seeds[SLOTS] = {0}; /* 0: not there */
    uint64_t last = 0;
    shelf_init(&shelf);
    shelf.options.queue_max = 64;
    kvk_random_init(&random, 31);
    for (int threads = 0; threads < 2; threads++) {
        shelf.options.threads = threads != 0;
        shelf_open(&shelf);
        if (threads == 0) {
            shelf_put_space(&shelf, 1, 1);
        }
        last = 0;
        for (int i = 0; i < 20000; i++) {
            uint32_t slot = (uint32_t)kvk_random_below(&random, SLOTS);
            bool removal = kvk_random_chance(&random, 0.3);
            struct block_example example;
            uint64_t ticket = 0;
            example_block(&example, 1, 0, slot, (uint64_t)i + 1);
            enum kvk_status status =
                removal ? kvk_catalogue_block_remove(shelf.catalogue, 1, 0, slot, &ticket)
                        : kvk_catalogue_block_put(shelf.catalogue, &example.record, &ticket);
            if (status == KVK_OK) {
                seeds[slot] = removal ? 0 : (uint64_t)i + 1;
                cr_assert_eq(ticket, last + 1);
                last = ticket;
            } else {
                cr_assert_eq(status, KVK_EXHAUSTED, "the queue is full");
                shelf_flush(&shelf);
                cr_assert_eq(kvk_catalogue_committed(shelf.catalogue), last);
            }
            cr_assert_leq(shelf_stats(&shelf).queued, 64);
            if (i % 4000 == 3999) {
                struct block_count count = {.seeds = seeds};
                uint64_t expected = 0;
                for (int k = 0; k < SLOTS; k++) {
                    expected += seeds[k] != 0;
                }
                shelf_reopen(&shelf);
                last = 0;
                cr_assert_eq(
                    kvk_catalogue_blocks(shelf.catalogue, 1, count_block, &count, &shelf.error),
                    KVK_OK);
                cr_assert_not(count.wrong);
                cr_assert_eq(count.count, expected);
            }
        }
        shelf_close(&shelf);
    }
    shelf_finish(&shelf);
}

static void count_call(void *context)
{
    atomic_fetch_add((_Atomic uint32_t *)context, 1);
}

Test(catalogue, the_writer_commits_by_itself_and_tells)
{
    struct shelf shelf;
    _Atomic uint32_t told = 0;
    uint64_t ticket;
    shelf_init(&shelf);
    shelf.options.threads = true;
    shelf.options.commit_ms_max = 20;
    shelf_open(&shelf);
    kvk_catalogue_listen(shelf.catalogue, count_call, &told);
    shelf_put_space(&shelf, 1, 1);
    shelf_put_block(&shelf, 1, 0, 1, 1, &ticket);
    shelf_put_block(&shelf, 1, 0, 1, 2, &ticket);
    for (int i = 0; i < PATIENCE_MS / 10 && kvk_catalogue_committed(shelf.catalogue) < ticket;
         i++) {
        const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
        (void)nanosleep(&pause, NULL);
    }
    cr_assert_eq(kvk_catalogue_committed(shelf.catalogue), ticket);
    struct kvk_catalogue_stats stats = shelf_stats(&shelf);
    cr_assert_geq(stats.commits, 1);
    cr_assert_eq(stats.queued, 0);
    cr_assert_eq(stats.blocks, 1);
    cr_assert_gt(stats.commit_ns, 0);
    shelf_flush(&shelf);
    cr_assert_geq(atomic_load(&told), 1);
    cr_assert_eq(shelf_count_blocks(&shelf, 1, 2), 1, "the last one wins");
    shelf_finish(&shelf);
}

/* ---- Folders and versions ---- */

Test(catalogue, the_folder_is_ours_alone)
{
    struct shelf shelf;
    struct stat found;
    char path[128];
    struct kvk_catalogue *second = NULL;
    shelf_init(&shelf);
    cr_assert_eq(rmdir(shelf.folder), 0);
    shelf_open(&shelf);
    cr_assert_eq(stat(shelf.folder, &found), 0);
    cr_assert_eq(found.st_mode & 07777, 0700);
    (void)snprintf(path, sizeof(path), "%s/catalogue/data.mdb", shelf.folder);
    cr_assert_eq(stat(path, &found), 0);
    cr_assert_eq(found.st_mode & 07777, 0600);
    pid_t child = fork(); /* flock() knows no processes, but descriptors */
    if (child == 0) {
        enum kvk_status status = kvk_catalogue_open(&shelf.options, &second, &shelf.error);
        _exit(status == KVK_UNAVAILABLE ? 0 : 1);
    }
    int result;
    cr_assert_eq(waitpid(child, &result, 0), child);
    cr_assert(WIFEXITED(result) && WEXITSTATUS(result) == 0);
    cr_assert_eq(kvk_catalogue_open(&shelf.options, &second, &shelf.error), KVK_UNAVAILABLE);
    cr_assert_str_eq(shelf.error.field, "durable.folder");
    shelf_close(&shelf);
    shelf_open(&shelf);
    shelf_finish(&shelf);
}

static enum kvk_status try_folder(struct shelf *shelf, const char *folder)
{
    struct kvk_catalogue *catalogue = NULL;
    struct kvk_catalogue_options options = shelf->options;
    options.folder = folder;
    memset(&shelf->error, 0, sizeof(shelf->error));
    return kvk_catalogue_open(&options, &catalogue, &shelf->error);
}

Test(catalogue, folders_that_do_not_do_are_named)
{
    struct shelf shelf;
    char path[128];
    shelf_init(&shelf);
    (void)snprintf(path, sizeof(path), "%s/none/below", shelf.folder);
    cr_assert_eq(try_folder(&shelf, path), KVK_INVALID);
    cr_assert_not_null(strstr(shelf.error.text, "durable.folder: cannot be made: No such file"),
                       "%s", shelf.error.text);
    (void)snprintf(path, sizeof(path), "%s/file", shelf.folder);
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    cr_assert_eq(fclose(file), 0);
    cr_assert_eq(try_folder(&shelf, path), KVK_INVALID);
    cr_assert_not_null(strstr(shelf.error.text, "not a folder"));
    cr_assert_eq(chmod(shelf.folder, 0777), 0);
    cr_assert_eq(try_folder(&shelf, shelf.folder), KVK_INVALID);
    cr_assert_not_null(strstr(shelf.error.text, "chmod 700"));
    cr_assert_eq(chmod(shelf.folder, 0700), 0);
    cr_assert_eq(try_folder(&shelf, ""), KVK_INVALID);
    char long_path[5000];
    memset(long_path, 'x', sizeof(long_path) - 1);
    long_path[sizeof(long_path) - 1] = '\0';
    cr_assert_eq(try_folder(&shelf, long_path), KVK_INVALID);
    shelf_finish(&shelf);
}

Test(catalogue, a_file_that_is_no_catalogue_is_refused_in_words)
{
    struct shelf shelf;
    char path[128];
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_close(&shelf);
    (void)snprintf(path, sizeof(path), "%s/catalogue/data.mdb", shelf.folder);
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    for (int i = 0; i < 3000; i++) {
        (void)fputs("not a catalogue ", file);
    }
    cr_assert_eq(fclose(file), 0);
    cr_assert_eq(kvk_catalogue_open(&shelf.options, &shelf.catalogue, &shelf.error), KVK_DATA_LOSS,
                 "%s", shelf.error.text);
    cr_assert_not_null(strstr(shelf.error.text, "move the folder away"), "%s", shelf.error.text);
    shelf_finish(&shelf);
}

static enum kvk_status open_as(struct shelf *shelf, uint32_t format,
                               const struct kvk_catalogue_migration *steps, uint32_t count)
{
    return kvk_catalogue_open_format(&shelf->options, format, steps, count, &shelf->catalogue,
                                     &shelf->error);
}

Test(catalogue, a_newer_format_is_refused_and_left_alone)
{
    struct shelf shelf;
    shelf_init(&shelf);
    cr_assert_eq(open_as(&shelf, KVK_CATALOGUE_FORMAT + 1, NULL, 0), KVK_OK);
    shelf_close(&shelf);
    cr_assert_eq(kvk_catalogue_open(&shelf.options, &shelf.catalogue, &shelf.error),
                 KVK_PRECONDITION);
    cr_assert_not_null(strstr(shelf.error.text, "written by a newer kvkeep"), "%s",
                       shelf.error.text);
    cr_assert_eq(shelf.error.value, KVK_CATALOGUE_FORMAT + 1);
    shelf.catalogue = NULL;
    cr_assert_eq(open_as(&shelf, KVK_CATALOGUE_FORMAT + 1, NULL, 0), KVK_OK);
    shelf_finish(&shelf);
}

/* A step that changes something, so that it shows how often it ran. */
static enum kvk_status step_append(struct kvk_catalogue_transaction *transaction,
                                   struct kvk_error *error, char letter)
{
    struct kvk_record_key key;
    struct kvk_record_bytes bytes;
    char text[2] = {letter, '\0'};
    cr_assert(kvk_record_key_name(text, &key));
    cr_assert_eq(kvk_record_write_value(&key, text, 1, &bytes), KVK_OK);
    enum kvk_status status =
        kvk_catalogue_put(transaction, KVK_CATALOGUE_VALUES, &key, &bytes, error);
    free(bytes.data);
    return status;
}

static enum kvk_status step_one(struct kvk_catalogue_transaction *transaction,
                                struct kvk_error *error)
{
    return step_append(transaction, error, 'a');
}

static bool second_step_fails;

static enum kvk_status step_two(struct kvk_catalogue_transaction *transaction,
                                struct kvk_error *error)
{
    enum kvk_status status = step_append(transaction, error, 'b');
    return second_step_fails
               ? kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_NONE, "", "the step does not know how")
               : status;
}

static bool has_value(struct shelf *shelf, const char *name)
{
    char room[4];
    size_t size = sizeof(room);
    return kvk_catalogue_get_value(shelf->catalogue, name, room, &size, &shelf->error) == KVK_OK;
}

Test(catalogue, an_older_format_is_migrated_step_by_step)
{
    const struct kvk_catalogue_migration steps[] = {{KVK_CATALOGUE_FORMAT, step_one},
                                                    {KVK_CATALOGUE_FORMAT + 1, step_two}};
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    shelf_close(&shelf);
    cr_assert_eq(open_as(&shelf, KVK_CATALOGUE_FORMAT + 2, steps, 1), KVK_PRECONDITION,
                 "a step is missing");
    second_step_fails = true;
    cr_assert_eq(open_as(&shelf, KVK_CATALOGUE_FORMAT + 2, steps, 2), KVK_DATA_LOSS);
    shelf.catalogue = NULL;
    cr_assert_eq(open_as(&shelf, KVK_CATALOGUE_FORMAT + 1, NULL, 0), KVK_OK,
                 "the first step is done, the second is not");
    cr_assert(has_value(&shelf, "a"));
    cr_assert_not(has_value(&shelf, "b"));
    shelf_close(&shelf);
    second_step_fails = false;
    cr_assert_eq(open_as(&shelf, KVK_CATALOGUE_FORMAT + 2, steps, 2), KVK_OK);
    cr_assert(has_value(&shelf, "b"));
    cr_assert_eq(spaces(&shelf).count, 1);
    shelf_finish(&shelf);
}

/* The record of space 1 as format 1 had it, without a mode: bytes that were written by it. */
static const uint8_t space_of_format_1[] = {
    0x04, 0x00, 0x01, 0x00, 0x35, 0x00, 0x00, 0x00, 0xac, 0xa1, 0x96, 0x6d, 0xb7, 0x23,
    0xc6, 0xcd, 0x09, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x11, 0x00, 0x00, 0x00,
    0x04, 0x00, 0x00, 0x00, 0x6f, 0x2f, 0x6d, 0x2f, 0x6e, 0x00, 0x77, 0x69, 0x74, 0x68,
    0x20, 0x61, 0x20, 0x4e, 0x55, 0x4c, 0x00, 0x01, 0x02, 0x03, 0x00};

/* Put under the id: under another than 1 it is damaged. */
static void put_old_space(struct shelf *shelf, uint64_t id)
{
    struct kvk_catalogue_transaction transaction;
    struct kvk_record_key key;
    uint8_t copy[sizeof(space_of_format_1)];
    memcpy(copy, space_of_format_1, sizeof(copy));
    const struct kvk_record_bytes bytes = {.data = copy, .size = sizeof(copy)};
    kvk_record_key_id(id, &key);
    cr_assert_eq(kvk_catalogue_write_begin(shelf->catalogue, &transaction, &shelf->error), KVK_OK);
    cr_assert_eq(kvk_catalogue_put(&transaction, KVK_CATALOGUE_SPACES, &key, &bytes, &shelf->error),
                 KVK_OK);
    cr_assert_eq(kvk_catalogue_write_commit(&transaction, &shelf->error), KVK_OK);
}

Test(catalogue, spaces_of_the_first_format_are_migrated)
{
    struct shelf shelf;
    shelf_init(&shelf);
    cr_assert_eq(open_as(&shelf, 1, NULL, 0), KVK_OK);
    for (uint64_t id = 1; id <= 3; id++) {
        shelf_put_space(&shelf, id, 9); /* for its generation */
    }
    put_old_space(&shelf, 1);
    put_old_space(&shelf, 2);
    put_old_space(&shelf, 3);
    cr_assert_eq(spaces(&shelf).count, 0, "an old record is never misread");
    shelf_reopen(&shelf);
    struct space_list list = spaces(&shelf);
    cr_assert_eq(list.count, 1, "damaged ones stay damaged");
    cr_assert_eq(list.ids[0], 1);
    cr_assert_eq(list.generations[0], 7);
    cr_assert_eq(list.modes[0], KVK_TENANT_ON);
    shelf_close(&shelf);
    cr_assert_eq(open_as(&shelf, 1, NULL, 0), KVK_PRECONDITION, "and an older kvkeep is refused");
    shelf.catalogue = NULL;
    shelf_finish(&shelf);
}

Test(catalogue, a_space_keeps_its_mode)
{
    struct shelf shelf;
    shelf_init(&shelf);
    shelf_open(&shelf);
    struct kvk_space_record record = example_space(1, 9);
    for (uint8_t mode = KVK_TENANT_ON; mode <= KVK_TENANT_OFF; mode++) {
        record.mode = mode;
        cr_assert_eq(kvk_catalogue_put_space(shelf.catalogue, &record, &shelf.error), KVK_OK);
        shelf_reopen(&shelf);
        cr_assert_eq(spaces(&shelf).modes[0], mode);
    }
    record.mode = KVK_TENANT_OFF + 1;
    cr_assert_eq(kvk_catalogue_put_space(shelf.catalogue, &record, &shelf.error), KVK_INVALID);
    shelf_finish(&shelf);
}

/* ---- Killed at any moment ---- */

struct acknowledged {
    _Atomic uint64_t committed; /* tickets that were said to be durable */
    _Atomic uint64_t queued;
    _Atomic uint64_t generation;
};

#define CRASH_SLOTS 512

/* Ticket t of a round is an operation that follows from (round, t) alone. */
static void crash_operation(uint64_t round, uint64_t ticket, uint32_t *slot, bool *removal)
{
    struct kvk_random random;
    kvk_random_init(&random, round << 32 | ticket);
    *slot = (uint32_t)kvk_random_below(&random, CRASH_SLOTS);
    *removal = kvk_random_chance(&random, 0.3);
}

static void crash_note(void *context)
{
    (void)context;
}

_Noreturn static void crash_child(struct shelf *shelf, uint64_t round, struct acknowledged *shared)
{
    shelf->options.threads = true;
    if (kvk_catalogue_open(&shelf->options, &shelf->catalogue, &shelf->error) != KVK_OK) {
        _exit(2);
    }
    kvk_catalogue_listen(shelf->catalogue, crash_note, NULL);
    for (uint64_t ticket = 1;; ticket++) {
        uint32_t slot;
        bool removal;
        struct block_example example;
        enum kvk_status status;
        crash_operation(round, ticket, &slot, &removal);
        example_block(&example, 1, 0, slot, round << 32 | ticket);
        atomic_store(&shared->queued, ticket);
        do {
            status = removal ? kvk_catalogue_block_remove(shelf->catalogue, 1, 0, slot, NULL)
                             : kvk_catalogue_block_put(shelf->catalogue, &example.record, NULL);
            atomic_store(&shared->committed, kvk_catalogue_committed(shelf->catalogue));
        } while (status == KVK_EXHAUSTED);
        if (status != KVK_OK) {
            _exit(3);
        }
        if (ticket % 1000 == 0) {
            const struct kvk_space_generation next = {1, round << 32 | ticket};
            if (kvk_catalogue_set_generations(shelf->catalogue, &next, 1, &shelf->error) !=
                KVK_OK) {
                _exit(4);
            }
            atomic_store(&shared->generation, next.generation);
        }
    }
}

struct crash_check {
    uint64_t seen[CRASH_SLOTS]; /* seed of the record that is there; 0: none */
    uint64_t round, queued;
    const uint64_t *before;
    bool wrong;
};

static bool crash_find(void *context, const struct kvk_disk_block_record *record)
{
    struct crash_check *check = context;
    struct block_example example;
    /* Which operation wrote it? One of this round, or what was there before. */
    for (uint64_t ticket = check->queued; ticket > 0; ticket--) {
        uint32_t slot;
        bool removal;
        crash_operation(check->round, ticket, &slot, &removal);
        if (slot != record->slot || removal) {
            continue;
        }
        example_block(&example, 1, 0, slot, check->round << 32 | ticket);
        if (same_block(&example.record, record)) {
            check->seen[slot] = check->round << 32 | ticket;
            return true;
        }
    }
    example_block(&example, 1, 0, record->slot, check->before[record->slot]);
    if (check->before[record->slot] == 0 || !same_block(&example.record, record)) {
        check->wrong = true;
    }
    check->seen[record->slot] = check->before[record->slot];
    return true;
}

/* The state of each slot is the one after some ticket, no earlier than what was acknowledged. */
static void crash_verify(struct shelf *shelf, uint64_t round, const struct acknowledged *shared,
                         uint64_t before[CRASH_SLOTS])
{
    static struct crash_check check;
    uint64_t allowed_from[CRASH_SLOTS]; /* seed after the last acknowledged operation */
    uint64_t committed = atomic_load(&shared->committed);
    memset(&check, 0, sizeof(check));
    check.round = round;
    check.queued = atomic_load(&shared->queued);
    check.before = before;
    cr_assert_eq(kvk_catalogue_blocks(shelf->catalogue, 1, crash_find, &check, &shelf->error),
                 KVK_OK);
    cr_assert_not(check.wrong, "round %llu", (unsigned long long)round);
    memcpy(allowed_from, before, sizeof(allowed_from));
    bool matched[CRASH_SLOTS];
    for (uint32_t slot = 0; slot < CRASH_SLOTS; slot++) {
        matched[slot] = committed == 0 && check.seen[slot] == before[slot];
    }
    for (uint64_t ticket = 1; ticket <= check.queued; ticket++) {
        uint32_t slot;
        bool removal;
        crash_operation(round, ticket, &slot, &removal);
        uint64_t after = removal ? 0 : round << 32 | ticket;
        if (ticket <= committed) {
            allowed_from[slot] = after;
        } else {
            matched[slot] = matched[slot] || check.seen[slot] == after;
        }
    }
    for (uint32_t slot = 0; slot < CRASH_SLOTS; slot++) {
        cr_assert(matched[slot] || check.seen[slot] == allowed_from[slot],
                  "round %llu slot %u: %llx, acknowledged %llx", (unsigned long long)round, slot,
                  (unsigned long long)check.seen[slot], (unsigned long long)allowed_from[slot]);
    }
    memcpy(before, check.seen, sizeof(check.seen));
}

Test(catalogue, what_was_acknowledged_survives_a_kill, .timeout = 120)
{
    struct shelf shelf;
    struct kvk_random random;
    uint64_t before[CRASH_SLOTS] = {0};
    uint64_t acknowledged = 0;
    struct acknowledged *shared =
        mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(shared, MAP_FAILED);
    shelf_init(&shelf);
    shelf.options.queue_max = 128;
    shelf.options.map_bytes = UINT64_C(4) << 20; /* so that a batch is committed in parts */
    shelf_open(&shelf);
    shelf_put_space(&shelf, 1, 1);
    shelf_close(&shelf);
    kvk_random_init(&random, 77);
    for (uint64_t round = 1; round <= 20; round++) {
        memset(shared, 0, sizeof(*shared));
        pid_t child = fork();
        if (child == 0) {
            crash_child(&shelf, round, shared);
        }
        cr_assert_gt(child, 0);
        const struct timespec pause = {.tv_nsec =
                                           (long)kvk_random_below(&random, 120 * 1000 * 1000)};
        (void)nanosleep(&pause, NULL);
        cr_assert_eq(kill(child, SIGKILL), 0);
        int result;
        cr_assert_eq(waitpid(child, &result, 0), child);
        cr_assert(WIFSIGNALED(result), "round %llu exit %d", (unsigned long long)round,
                  WEXITSTATUS(result));
        shelf.options.threads = false;
        shelf_open(&shelf);
        cr_assert_eq(shelf_stats(&shelf).damaged_records, 0);
        crash_verify(&shelf, round, shared, before);
        struct space_list list = spaces(&shelf);
        cr_assert_eq(list.count, 1);
        cr_assert_geq(list.generations[0], atomic_load(&shared->generation));
        acknowledged += atomic_load(&shared->committed);
        shelf_close(&shelf);
    }
    cr_assert_gt(acknowledged, 20, "the writer must have got somewhere: %llu",
                 (unsigned long long)acknowledged);
    (void)munmap(shared, sizeof(*shared));
    shelf_finish(&shelf);
}
