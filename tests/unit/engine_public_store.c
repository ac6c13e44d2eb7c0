/*
 * Public prefixes outlive the daemon: byte for byte, whatever has become of the blocks that they
 * were copied from; and never what was withdrawn, invalidated, damaged, or of a tenant that is
 * gone.
 */
#include "daemon/public_store.h"

#include <dirent.h>
#include <fcntl.h>

#include "tests/engine_public.h"
#include "tests/folder.h"

#define TOKENS 32 /* 8 blocks */

static char folder[64];
static uint32_t tokens[TOKENS];

static void begin(void)
{
    (void)snprintf(folder, sizeof(folder), "/tmp/kvk-public-store.XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    house_tokens(tokens, TOKENS, 1000);
}

static void end(void)
{
    folder_remove(folder);
}

/* A daemon on the folder; what is kept of memory is nothing: no keeper. */
static void daemon_start(struct party *party, uint64_t host_blocks)
{
    party_init(party, 3);
    party->house.config.tenants[PUBLISHER].may_publish = true;
    (void)snprintf(party->house.config.durable_folder, sizeof(party->house.config.durable_folder),
                   "%s/data", folder);
    party_start(party, 0, host_blocks);
    kvk_cache_check(party->house.cache);
}

static uint32_t files(char name[32])
{
    char path[128];
    uint32_t count = 0;
    (void)snprintf(path, sizeof(path), "%s/data/public", folder);
    DIR *entries = opendir(path);
    const struct dirent *entry;
    while (entries != NULL && (entry = readdir(entries)) != NULL) {
        if (entry->d_name[0] != '.') {
            (void)snprintf(name, 32, "%.31s", entry->d_name);
            count++;
        }
    }
    if (entries != NULL) {
        (void)closedir(entries);
    }
    return count;
}

static uint64_t found(struct party *party)
{
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = TOKENS, .use_public = true};
    return look_with(party, READER, &prompt).cached_tokens;
}

static void expect_bytes(struct party *party)
{
    struct kvk_sequence_reply opened = open_with(party, READER, tokens, TOKENS, true, NULL);
    cr_assert_eq(opened.cached_tokens, TOKENS);
    for (uint32_t i = 0; i < TOKENS / 4; i++) {
        const uint8_t *bytes = block_bytes(party, opened.sequence_id, i);
        for (uint32_t j = 0; j < BLOCK; j++) {
            cr_assert_eq(bytes[j], byte_of(PUBLISHER, i), "block %u byte %u", i, j);
        }
    }
    house_close(&party->house, party->sessions[READER], opened.sequence_id);
}

static uint64_t publish_one(struct party *party)
{
    cache_prompt(party, PUBLISHER, tokens, TOKENS);
    struct kvk_publish_reply reply = publish(party, PUBLISHER, tokens, TOKENS);
    cr_assert(reply.created && reply.durable);
    return reply.public_id;
}

static double stat_value;
static const char *stat_wanted;

static void stat_find(void *context, const char *name, double value)
{
    (void)context;
    stat_value = strcmp(name, stat_wanted) == 0 ? value : stat_value;
}

static double stat_of(struct party *party, const char *name)
{
    stat_wanted = name;
    stat_value = -1;
    kvk_report_stats(party->house.cache, stat_find, NULL);
    return stat_value;
}

Test(public_store, it_is_public_again_with_its_bytes, .init = begin, .fini = end)
{
    struct party party;
    char name[32];
    daemon_start(&party, 64);
    uint64_t id = publish_one(&party);
    cr_assert_eq(files(name), 1);
    party_stop(&party);
    for (int round = 0; round < 3; round++) {
        daemon_start(&party, 64);
        struct kvk_public_row *rows = NULL;
        struct kvk_public_totals totals;
        uint32_t count = 0;
        cr_assert_eq(found(&party), TOKENS);
        expect_bytes(&party);
        cr_expect_eq(stat_of(&party, "kvkeep_public_restored_total"), 1);
        party_be(&party, PUBLISHER);
        cr_assert_eq(kvk_public_list(party.house.cache, &party.house.caller, &rows, &count, &totals,
                                     &party.house.error),
                     KVK_OK);
        cr_assert_eq(count, 1);
        cr_expect_eq(rows[0].public_id, id, "under its old number");
        cr_expect(rows[0].durable);
        cr_expect_eq(rows[0].tenant, party_tenant(&party, PUBLISHER));
        cr_expect_eq(party_blocks(&party, PUBLISHER, HOST), 8,
                     "the publisher pays, and for nothing "
                     "else that is there");
        free(rows);
        kvk_cache_check(party.house.cache);
        party_stop(&party);
    }
}

Test(public_store, what_was_withdrawn_stays_so, .init = begin, .fini = end)
{
    struct party party;
    struct kvk_withdraw_reply withdrawn;
    char name[32];
    daemon_start(&party, 64);
    uint64_t id = publish_one(&party);
    cr_assert_eq(withdraw(&party, PUBLISHER, id, &withdrawn), KVK_OK);
    cr_expect_eq(files(name), 0);
    party_stop(&party);
    daemon_start(&party, 64);
    cr_expect_eq(found(&party), 0);
    party_stop(&party);
}

static void invalidated(bool prefix)
{
    struct party party;
    struct kvk_invalidate_reply reply;
    char name[32];
    daemon_start(&party, 64);
    (void)publish_one(&party);
    const struct kvk_prompt part = {.tokens = tokens, .token_count = 8};
    const struct kvk_invalidate_request request = {.space_id = party.spaces[PUBLISHER],
                                                   .prefix = prefix ? &part : NULL};
    party_be(&party, PUBLISHER);
    cr_assert_eq(kvk_invalidate(party.house.cache, &party.house.caller, &request, &reply,
                                &party.house.error),
                 KVK_OK, "%s", party.house.error.text);
    cr_expect_eq(found(&party), 0);
    if (prefix) {
        cr_expect_eq(files(name), 0, "durable when it is answered");
    }
    party_stop(&party);
    daemon_start(&party, 64);
    cr_expect_eq(found(&party), 0);
    cr_expect_eq(files(name), 0);
    party_stop(&party);
}

Test(public_store, an_invalidation_reaches_it, .init = begin, .fini = end)
{
    invalidated(false);
    end();
    begin();
    invalidated(true);
}

/* Each byte of the file in turn is another: never public with wrong tokens or bytes. */
Test(public_store, a_damaged_file_is_no_prefix, .init = begin, .fini = end)
{
    struct party party;
    char name[32];
    char path[192];
    daemon_start(&party, 64);
    (void)publish_one(&party);
    party_stop(&party);
    cr_assert_eq(files(name), 1);
    (void)snprintf(path, sizeof(path), "%s/data/public/%s", folder, name);
    static uint8_t whole[64 * 1024];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = read(fd, whole, sizeof(whole));
    (void)close(fd);
    cr_assert_gt(size, 8 * (ssize_t)BLOCK);
    struct kvk_random random;
    kvk_random_init(&random, 5);
    for (uint32_t round = 0; round < 40; round++) {
        size_t at = round < 20 ? round * 23 : kvk_random_below(&random, (uint64_t)size);
        size_t length = round % 5 == 4 ? at : (size_t)size; /* or it ends there */
        whole[at] ^= 0x20;
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        cr_assert_eq(write(fd, whole, length), (ssize_t)length);
        (void)close(fd);
        whole[at] ^= 0x20;
        daemon_start(&party, 64);
        cr_expect_eq(found(&party), 0, "byte %zu", at);
        cr_expect_eq(files(name), 0, "what is damaged goes");
        party_stop(&party);
    }
}

/* With too little room it waits in its file; with enough it is back. */
Test(public_store, no_room_is_no_end, .init = begin, .fini = end)
{
    struct party party;
    char name[32];
    daemon_start(&party, 64);
    (void)publish_one(&party);
    party_stop(&party);
    daemon_start(&party, 4);
    cr_expect_eq(found(&party), 0);
    cr_expect_eq(files(name), 1);
    party_stop(&party);
    daemon_start(&party, 64);
    expect_bytes(&party);
    party_stop(&party);
}

/* Its file cannot be written: public all the same, and that it is not durable is told. */
Test(public_store, without_a_file_it_ends_with_the_daemon, .init = begin, .fini = end)
{
    struct party party;
    char name[32];
    char path[128];
    daemon_start(&party, 64);
    (void)snprintf(path, sizeof(path), "%s/data/public", folder);
    cr_assert_eq(rmdir(path), 0);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600); /* a file where the folder was */
    (void)close(fd);
    cache_prompt(&party, PUBLISHER, tokens, TOKENS);
    struct kvk_publish_reply reply = publish(&party, PUBLISHER, tokens, TOKENS);
    cr_expect(reply.created && !reply.durable);
    cr_expect_eq(stat_of(&party, "kvkeep_public_store_failures_total"), 1);
    cr_expect_eq(found(&party), TOKENS);
    party_stop(&party);
    (void)unlink(path);
    daemon_start(&party, 64);
    cr_expect_eq(found(&party), 0);
    cr_expect_eq(files(name), 0);
    party_stop(&party);
}
