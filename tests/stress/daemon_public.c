/*
 * Public prefixes through libkvkeep, in two processes of two tenants: one publishes what it has
 * cached, the other finds it, maps it read-only, reads the publisher's very bytes there, goes on
 * behind it, and keeps what it holds when the prefix is withdrawn.
 *
 *     test_stress_daemon_public
 */
#include "tests/daemon_worker.h"

enum {
    PUBLIC_BLOCKS = 4,
    PUBLIC_TOKENS = PUBLIC_BLOCKS * BLOCK_TOKENS,
    OWN_TOKENS = BLOCK_TOKENS,
};

struct told {
    char target[96];
    uint64_t public_id, space_id;
    uint64_t held_blocks;
};

static struct prompt prompt;
/* The reader's, kept from task to task. */
static struct kvkeep_sequence sequence;
static struct kvkeep_map map;

static struct kvkeep_prompt asking(uint64_t tokens, bool use_public)
{
    struct kvkeep_prompt view = prompt_view(&prompt);
    view.token_count = tokens;
    view.use_public = use_public;
    return view;
}

static uint64_t look(bool use_public)
{
    const struct kvkeep_prompt view = asking(PUBLIC_TOKENS, use_public);
    struct kvkeep_lookup result;
    CHECK_OK(kvkeep_lookup(self.client, &self.space, &view, false, &result, &self.error));
    return result.cached_tokens;
}

/* ---- the publisher ---- */

static void publish_task(void *context)
{
    struct told *told = context;
    struct kvkeep_publication publication;
    worker_open(&(struct worker_options){
        .target = told->target, .tenant = "a", .model = "model", .name = "publisher"});
    prompt_set(&prompt, 1, PUBLIC_TOKENS);
    const struct kvkeep_prompt view = asking(PUBLIC_TOKENS, true);
    enum kvk_status status =
        kvkeep_publish(self.client, &self.space, &view, &publication, &self.error);
    CHECK(status == KVK_NOT_FOUND, "it is not cached yet: %s", self.error.text);
    worker_fill(&prompt, NULL, &sequence);
    worker_close_sequence(&sequence);
    CHECK_OK(kvkeep_publish(self.client, &self.space, &view, &publication, &self.error));
    CHECK(publication.created && publication.tokens == PUBLIC_TOKENS &&
              publication.blocks == PUBLIC_BLOCKS &&
              publication.bytes == PUBLIC_BLOCKS * BLOCK_BYTES,
          "%llu tokens", (unsigned long long)publication.tokens);
    told->public_id = publication.id;
    told->space_id = publication.space_id;
    CHECK_OK(kvkeep_publish(self.client, &self.space, &view, &publication, &self.error));
    CHECK(!publication.created && publication.id == told->public_id, "published twice");
}

static void unpublish_task(void *context)
{
    struct told *told = context;
    CHECK_OK(kvkeep_unpublish(self.client, told->public_id, &told->held_blocks, &self.error));
    enum kvk_status status = kvkeep_unpublish(self.client, told->public_id, NULL, &self.error);
    CHECK(status == KVK_NOT_FOUND, "withdrawn twice: %s", self.error.text);
    worker_close();
}

/* ---- the reader ---- */

static void public_bytes_check(const struct kvkeep_table *table, uint64_t space_id)
{
    for (uint64_t block = 0; block < PUBLIC_BLOCKS; block++) {
        uint8_t *bytes = map.address + table->slots[block] * map.slot_stride;
        CHECK(table->spaces[block] == space_id && table->tiers[block] == KVKEEP_TIER_HOST,
              "block %llu lies in space %llu", (unsigned long long)block,
              (unsigned long long)table->spaces[block]);
        CHECK(map.generations[table->slots[block]] == table->generations[block],
              "the slot of block %llu was another's", (unsigned long long)block);
        bytes_check(bytes, &prompt, block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS, 0,
                    "in a public slot");
    }
}

static void go_on(uint64_t space_id)
{
    const struct kvkeep_prompt view = asking(PUBLIC_TOKENS + OWN_TOKENS, true);
    CHECK_OK(kvkeep_sequence_open(self.session, &self.space, &view, NULL, &sequence, &self.error));
    CHECK(sequence.cached_tokens == PUBLIC_TOKENS, "%llu cached",
          (unsigned long long)sequence.cached_tokens);
    public_bytes_check(&sequence.groups[0], space_id);
    CHECK(sequence.groups[0].spaces[PUBLIC_BLOCKS] == 0, "its own block is in another's space");
    worker_write(&sequence, &prompt, PUBLIC_TOKENS, PUBLIC_TOKENS + OWN_TOKENS);
    worker_seal(&sequence, PUBLIC_TOKENS + OWN_TOKENS);
}

static void lease(uint64_t space_id)
{
    struct kvkeep_lease lease;
    const struct kvkeep_prompt view = asking(PUBLIC_TOKENS, true);
    CHECK_OK(kvkeep_pin(self.session, &self.space, &view, 5000, true, &lease, &self.error));
    CHECK(lease.cached_tokens == PUBLIC_TOKENS, "%llu leased",
          (unsigned long long)lease.cached_tokens);
    public_bytes_check(&lease.groups[0], space_id);
    CHECK_OK(kvkeep_release(self.session, &lease, &self.error));
}

static void read_task(void *context)
{
    const struct told *told = context;
    struct kvkeep_map refused;
    struct kvkeep_publication publication;
    worker_open(&(struct worker_options){
        .target = told->target, .tenant = "b", .model = "model", .name = "reader"});
    self.seed = seed_of("a", "model"); /* whose bytes are to be found */
    prompt_set(&prompt, 1, PUBLIC_TOKENS + OWN_TOKENS);
    CHECK(look(false) == 0, "found without asking for what is public");
    CHECK(look(true) == PUBLIC_TOKENS, "not found");
    const struct kvkeep_space public_space = {.id = told->space_id};
    enum kvk_status status = kvkeep_map_slots(self.session, &public_space, 0, 0, KVKEEP_TIER_HOST,
                                              false, &refused, &self.error);
    CHECK(status != KVK_OK, "mapped to be written");
    const struct kvkeep_prompt view = asking(PUBLIC_TOKENS, false);
    status = kvkeep_publish(self.client, &self.space, &view, &publication, &self.error);
    CHECK(status == KVK_PERMISSION, "published without the right: %s", self.error.text);
    CHECK_OK(kvkeep_map_public(self.session, told->space_id, 0, 0, &map, &self.error));
    CHECK(map.read_only, "a public mapping may be written");
    go_on(told->space_id);
    lease(told->space_id);
}

/* After it was withdrawn. */
static void let_go_task(void *context)
{
    const struct told *told = context;
    CHECK(look(true) == 0 && look(false) == 0, "found after it was withdrawn");
    public_bytes_check(&sequence.groups[0], told->space_id);
    worker_close_sequence(&sequence);
    kvkeep_unmap(&map);
    enum kvk_status status =
        kvkeep_map_public(self.session, told->space_id, 0, 0, &map, &self.error);
    CHECK(status == KVK_NOT_FOUND, "mapped after all was over");
    worker_close();
}

int main(void)
{
    struct daemon daemon;
    char rest[256];
    struct agent publisher;
    struct agent reader;
    (void)snprintf(rest, sizeof(rest),
                   "[tenant a]\nmay_publish = yes\n[tenant b]\n"
                   "[credential a]\nuids = %u\ntenants = a, b\n",
                   (unsigned)getuid());
    const struct daemon_setup setup = {.host_bytes = 64 * BLOCK_BYTES, .rest = rest};
    test_begin(120);
    struct told *told = shared_alloc(sizeof(*told));
    agent_start(&publisher, "publisher", NULL);
    agent_start(&reader, "reader", NULL);
    daemon_start(&daemon, &setup);
    (void)snprintf(told->target, sizeof(told->target), "%s", daemon.target);
    phase("a prefix is published");
    agent_do(&publisher, publish_task, told);
    phase("another tenant finds it");
    agent_do(&reader, read_task, told);
    phase("it is withdrawn while it is read");
    agent_do(&publisher, unpublish_task, told);
    CHECK(told->held_blocks == PUBLIC_BLOCKS, "%llu held", (unsigned long long)told->held_blocks);
    phase("the reader lets go");
    agent_do(&reader, let_go_task, told);
    agent_finish(&publisher);
    agent_finish(&reader);
    daemon_check_alive(&daemon);
    daemon_stop(&daemon);
    return 0;
}
