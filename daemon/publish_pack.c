#include "daemon/publish_pack.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"

/* Fields of events, in the order in which arrays have them. Those at the end that say nothing may
 * be left out. */
#define STORED_FIELDS 11
#define REMOVED_FIELDS 3

static const char *const mediums[KVK_TIER_COUNT] = {"GPU", "CPU", "DISK"};

void kvk_publish_pack_init(struct kvk_publish_pack *pack, bool arrays)
{
    msgpack_sbuffer_init(&pack->buffer);
    pack->arrays = arrays;
}

void kvk_publish_pack_finish(struct kvk_publish_pack *pack)
{
    msgpack_sbuffer_destroy(&pack->buffer);
}

/* ---- Pieces: each returns 0, or -1 where there is no memory ---- */

static int put_text(msgpack_packer *packer, const char *text)
{
    size_t size = strlen(text);
    return msgpack_pack_str(packer, size) | msgpack_pack_str_body(packer, text, size);
}

static int put_key(msgpack_packer *packer, const struct kvk_key *key)
{
    return msgpack_pack_bin(packer, sizeof(*key)) |
           msgpack_pack_bin_body(packer, key, sizeof(*key));
}

static int put_tag(msgpack_packer *packer, bool arrays, const char *tag, size_t field_count)
{
    if (arrays) {
        return msgpack_pack_array(packer, field_count + 1) | put_text(packer, tag);
    }
    return msgpack_pack_map(packer, field_count + 1) | put_text(packer, "type") |
           put_text(packer, tag);
}

static int put_name(msgpack_packer *packer, bool arrays, const char *name)
{
    return arrays ? 0 : put_text(packer, name);
}

/* ---- Events ---- */

/* What of a block's identity its tokens do not say: an entry a block, nil for none. */
static int put_extra_keys(msgpack_packer *packer, const struct kvk_event *const *events,
                          uint32_t count)
{
    int failed = msgpack_pack_array(packer, count);
    for (uint32_t i = 0; i < count; i++) {
        size_t words = (events[i]->salted ? 1U : 0U) + (events[i]->content ? 1U : 0U);
        if (words == 0) {
            failed |= msgpack_pack_nil(packer);
            continue;
        }
        failed |= msgpack_pack_array(packer, words);
        failed |= events[i]->salted ? put_text(packer, "salted") : 0;
        failed |= events[i]->content ? put_text(packer, "content") : 0;
    }
    return failed;
}

/* One BlockStored: blocks of one chain, one after the other. */
static int put_stored(msgpack_packer *packer, bool arrays, const struct kvk_event *const *events,
                      uint32_t count, const struct kvk_event_space *names)
{
    const struct kvk_event *first = events[0];
    uint32_t window = names->windows[first->group];
    int failed = put_tag(packer, arrays, "BlockStored", STORED_FIELDS - (window == 0 ? 1U : 0U));
    failed |= put_name(packer, arrays, "block_hashes") | msgpack_pack_array(packer, count);
    for (uint32_t i = 0; i < count; i++) {
        failed |= put_key(packer, &events[i]->key);
    }
    failed |= put_name(packer, arrays, "parent_block_hash");
    failed |= first->position == 0 ? msgpack_pack_nil(packer) : put_key(packer, &first->parent);
    failed |= put_name(packer, arrays, "token_ids") |
              msgpack_pack_array(packer, (size_t)count * first->token_count);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t t = 0; t < events[i]->token_count; t++) {
            failed |= msgpack_pack_uint32(packer, events[i]->tokens[t]);
        }
    }
    failed |=
        put_name(packer, arrays, "block_size") | msgpack_pack_uint32(packer, names->block_tokens);
    failed |= put_name(packer, arrays, "lora_id") | msgpack_pack_nil(packer);
    failed |= put_name(packer, arrays, "medium") | put_text(packer, mediums[first->tier]);
    failed |= put_name(packer, arrays, "lora_name");
    failed |=
        names->adapter[0] == '\0' ? msgpack_pack_nil(packer) : put_text(packer, names->adapter);
    failed |= put_name(packer, arrays, "extra_keys") | put_extra_keys(packer, events, count);
    failed |= put_name(packer, arrays, "group_idx") | msgpack_pack_uint32(packer, first->group);
    failed |= put_name(packer, arrays, "kv_cache_spec_kind") |
              put_text(packer, window == 0 ? "full_attention" : "sliding_window");
    if (window != 0) {
        failed |= put_name(packer, arrays, "kv_cache_spec_sliding_window") |
                  msgpack_pack_uint32(packer, window);
    }
    return failed;
}

static int put_removed(msgpack_packer *packer, bool arrays, const struct kvk_event *const *events,
                       uint32_t count)
{
    int failed = put_tag(packer, arrays, "BlockRemoved", REMOVED_FIELDS);
    failed |= put_name(packer, arrays, "block_hashes") | msgpack_pack_array(packer, count);
    for (uint32_t i = 0; i < count; i++) {
        failed |= put_key(packer, &events[i]->key);
    }
    failed |= put_name(packer, arrays, "medium") | put_text(packer, mediums[events[0]->tier]);
    failed |= put_name(packer, arrays, "group_idx") | msgpack_pack_uint32(packer, events[0]->group);
    return failed;
}

/* Can `next` be told together with `last`, which comes right before it? */
static bool joins(const struct kvk_event *last, const struct kvk_event *next)
{
    return last->kind == next->kind && last->space_id == next->space_id &&
           last->group == next->group && last->tier == next->tier &&
           (next->kind == KVK_EVENT_REMOVED ||
            (next->position == last->position + 1 && kvk_key_equal(next->parent, last->key)));
}

static uint32_t run_length(const struct kvk_event *const *events, uint32_t count)
{
    uint32_t length = 1;
    while (length < count && joins(events[length - 1], events[length])) {
        length++;
    }
    return length;
}

bool kvk_publish_pack_batch(struct kvk_publish_pack *pack, double time_s, bool cleared,
                            const struct kvk_event *const *events,
                            const struct kvk_event_space *const *names, uint32_t count)
{
    uint32_t event_count = cleared ? 1 : 0;
    for (uint32_t i = 0; i < count; i += run_length(events + i, count - i)) {
        event_count++;
    }
    msgpack_packer packer;
    msgpack_sbuffer_clear(&pack->buffer);
    msgpack_packer_init(&packer, &pack->buffer, msgpack_sbuffer_write);
    int failed = msgpack_pack_array(&packer, 3) | msgpack_pack_double(&packer, time_s) |
                 msgpack_pack_array(&packer, event_count);
    if (cleared) {
        failed |= put_tag(&packer, pack->arrays, "AllBlocksCleared", 0);
    }
    for (uint32_t i = 0; i < count;) {
        uint32_t length = run_length(events + i, count - i);
        KVK_ASSERT(events[i]->kind != KVK_EVENT_CLEARED);
        failed |= events[i]->kind == KVK_EVENT_STORED
                      ? put_stored(&packer, pack->arrays, events + i, length, names[i])
                      : put_removed(&packer, pack->arrays, events + i, length);
        i += length;
    }
    failed |= msgpack_pack_nil(&packer);
    return failed == 0;
}
