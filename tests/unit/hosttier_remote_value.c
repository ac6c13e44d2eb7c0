/*
 * Values of the remote store: what was stored comes back, by no other key, tenant, parent, shape,
 * format or generation, and no change of any bit gives bytes. Names tell nothing of what they name.
 */
#include "hosttier/remote_value.h"

#include <criterion/criterion.h>
#include <string.h>

#include "base/bytes.h"
#include "base/copy.h"
#include "base/random.h"
#include "hosttier/remote_value_internal.h"

#define BLOCK_BYTES 1000U
#define VALUE_BYTES (BLOCK_BYTES + KVK_REMOTE_HEADER_SIZE)

static const uint8_t secret[KVK_REMOTE_SECRET_SIZE] = {1, 2, 3};
static const uint8_t other_secret[KVK_REMOTE_SECRET_SIZE] = {1, 2, 4};
static const uint8_t space_digest[KVK_REMOTE_KEY_SIZE] = {5};
static const uint8_t shape_digest[KVK_REMOTE_KEY_SIZE] = {6};
static const uint8_t other_digest[KVK_REMOTE_KEY_SIZE] = {7};

static const struct kvk_remote_space_options usual = {
    .secret = secret,
    .space = space_digest,
    .shape = shape_digest,
    .group = 1,
    .format = 2,
    .generation = 3,
    .block_bytes = BLOCK_BYTES,
};

static const struct kvk_remote_id id = {{10, 11}, {12, 13}};

static struct kvk_random cuts = {{1, 2, 3, 4}};

/* A value comes as the network likes: some of it elsewhere, some right into its place. */
static enum kvk_remote_result value_read(const struct kvk_remote_want *want,
                                         struct kvk_remote_crypt *crypt, const uint8_t *value,
                                         size_t size, const struct kvk_remote_piece *pieces,
                                         uint32_t count)
{
    static struct kvk_remote_arrival arrival;
    if (size == 0) {
        return KVK_REMOTE_NOT_OURS; /* whoever reads the network calls it absent */
    }
    kvk_remote_arrival_begin(&arrival, want, crypt, pieces, count, size);
    size_t step_max = (size_t)kvk_random_between(&cuts, 1, size);
    for (size_t at = 0; at < size;) {
        size_t step = (size_t)kvk_random_between(&cuts, 1, step_max);
        struct iovec rooms[3];
        uint32_t room_count = kvk_remote_arrival_rooms(&arrival, step, rooms, 3);
        size_t placed = 0;
        if (room_count > 0 && kvk_random_chance(&cuts, 0.5)) {
            for (uint32_t i = 0; i < room_count; i++) {
                memcpy(rooms[i].iov_base, value + at + placed, rooms[i].iov_len);
                placed += rooms[i].iov_len;
            }
            cr_assert_leq(placed, step);
            kvk_remote_arrival_came(&arrival, placed);
        }
        if (placed == 0) {
            /* What follows it is not its own. */
            placed = kvk_remote_arrival_take(&arrival, value + at, step);
            cr_assert_eq(placed, step < size - at ? step : size - at);
        }
        at += placed;
        cr_assert_eq(kvk_remote_arrival_whole(&arrival), at == size);
    }
    return kvk_remote_arrival_end(&arrival);
}

/* One side of the exchange: a space and what it wants of it. */
struct side {
    struct kvk_remote_crypt *crypt;
    struct kvk_remote_space space;
    struct kvk_remote_id id;
    struct kvk_remote_want want;
};

static void side_init(struct side *side, const struct kvk_remote_space_options *options,
                      const struct kvk_remote_id *of, uint32_t part)
{
    struct kvk_error error;
    cr_assert_eq(kvk_remote_crypt_create(&side->crypt, &error), KVK_OK, "%s", error.text);
    cr_assert_eq(kvk_remote_space_init(&side->space, options, &error), KVK_OK, "%s", error.text);
    side->id = *of;
    kvk_remote_want_init(&side->want, side->crypt, &side->space, &side->id, part);
}

static void side_finish(struct side *side)
{
    kvk_remote_space_finish(&side->space);
    kvk_remote_crypt_destroy(side->crypt);
}

static void write_usual(const struct kvk_remote_space_options *options, uint8_t *bytes,
                        uint8_t *value)
{
    struct side writer;
    side_init(&writer, options, &id, 0);
    struct kvk_remote_piece piece = {bytes, BLOCK_BYTES};
    kvk_remote_value_seal(&writer.want, writer.crypt, &piece, 1, value,
                          value + KVK_REMOTE_HEADER_SIZE);
    side_finish(&writer);
}

static enum kvk_remote_result read_as(const struct kvk_remote_space_options *options,
                                      const struct kvk_remote_id *of, const uint8_t *value,
                                      size_t size, uint8_t *bytes)
{
    struct side reader;
    side_init(&reader, options, of, 0);
    struct kvk_remote_piece piece = {bytes, BLOCK_BYTES};
    enum kvk_remote_result result = value_read(&reader.want, reader.crypt, value, size, &piece, 1);
    side_finish(&reader);
    return result;
}

static void fill(uint8_t *bytes, size_t size, uint64_t seed)
{
    struct kvk_random random;
    kvk_random_init(&random, seed);
    kvk_random_fill(&random, bytes, size);
}

Test(remote_value, comes_back_and_is_sealed_anew_each_time)
{
    for (int encrypt = 0; encrypt < 2; encrypt++) {
        struct kvk_remote_space_options options = usual;
        options.encrypt = encrypt != 0;
        uint8_t bytes[BLOCK_BYTES];
        uint8_t back[BLOCK_BYTES] = {0};
        uint8_t value[VALUE_BYTES];
        uint8_t again[VALUE_BYTES];
        fill(bytes, sizeof(bytes), 1);
        write_usual(&options, bytes, value);
        write_usual(&options, bytes, again);
        cr_assert_neq(memcmp(value, again, KVK_REMOTE_HEADER_SIZE), 0, "a nonce was used twice");
        bool readable = memmem(value, sizeof(value), bytes, 64) != NULL;
        cr_assert_eq(readable, encrypt == 0);
        cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_HIT);
        cr_assert_arr_eq(back, bytes, sizeof(bytes));
    }
}

Test(remote_value, every_difference_is_a_miss_of_its_own_kind)
{
    uint8_t bytes[BLOCK_BYTES];
    uint8_t back[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
    fill(bytes, sizeof(bytes), 2);
    write_usual(&usual, bytes, value);

    struct kvk_remote_space_options options = usual;
    options.generation = 4;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_GENERATION);
    options.generation = 2;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_GENERATION);
    options = usual;
    options.format = 3;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_FORMAT);
    options = usual;
    options.encrypt = true;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_FORMAT);
    options = usual;
    options.shape = other_digest;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_SHAPE);
    options = usual;
    options.space = other_digest;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_OTHER_KEY);
    options = usual;
    options.group = 2;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_OTHER_KEY);
    options = usual;
    options.secret = other_secret;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_OTHER_KEY);
    options = usual;
    options.block_bytes = BLOCK_BYTES - 1;
    cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_PART);

    struct kvk_remote_id changed = id;
    changed.key[15] ^= 1;
    cr_assert_eq(read_as(&usual, &changed, value, sizeof(value), back), KVK_REMOTE_OTHER_KEY);
    changed = id;
    changed.parent[0] ^= 1;
    cr_assert_eq(read_as(&usual, &changed, value, sizeof(value), back), KVK_REMOTE_PARENT);
    cr_assert_eq(read_as(&usual, &id, value, sizeof(value), back), KVK_REMOTE_HIT);
}

/* Somebody who knows the form, and reads all, makes a value that agrees in all but the seal. */
static void forge(uint8_t *value, size_t size)
{
    struct kvk_remote_space_options options = usual;
    struct side mine;
    side_init(&mine, &options, &id, 0);
    memset(mine.space.seal_key, 0x55, sizeof(mine.space.seal_key));
    uint8_t payload[BLOCK_BYTES];
    cr_assert_eq(size, VALUE_BYTES);
    memset(payload, 0x66, sizeof(payload));
    struct kvk_remote_piece piece = {payload, BLOCK_BYTES};
    kvk_remote_value_seal(&mine.want, mine.crypt, &piece, 1, value, value + KVK_REMOTE_HEADER_SIZE);
    side_finish(&mine);
}

Test(remote_value, a_forged_value_is_foreign)
{
    uint8_t back[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
    forge(value, sizeof(value));
    cr_assert_eq(read_as(&usual, &id, value, sizeof(value), back), KVK_REMOTE_FOREIGN);
}

/* Whoever knows the form can make the checksum agree, but not the mark: not of a nonce, nor of a
 * generation that is the right one now. Neither is such a header believed when it comes alone, nor
 * is anything behind it put into memory. */
Test(remote_value, a_changed_header_is_damaged_or_foreign_also_alone)
{
    struct side reader;
    uint8_t bytes[BLOCK_BYTES];
    uint8_t back[BLOCK_BYTES];
    uint8_t before[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
    struct kvk_remote_piece piece = {back, BLOCK_BYTES};
    fill(bytes, sizeof(bytes), 10);
    fill(back, sizeof(back), 11);
    memcpy(before, back, sizeof(back));
    write_usual(&usual, bytes, value);
    side_init(&reader, &usual, &id, 0);
    cr_assert_eq(kvk_remote_header_check(&reader.want, reader.crypt, value, KVK_REMOTE_HEADER_SIZE),
                 KVK_REMOTE_HIT);
    for (size_t bit = (size_t)KVK_REMOTE_AT_FLAGS * 8; bit < KVK_REMOTE_AT_TAG * 8; bit++) {
        uint8_t changed[VALUE_BYTES];
        memcpy(changed, value, sizeof(changed));
        changed[bit / 8] ^= (uint8_t)(1U << bit % 8);
        cr_assert_eq(
            kvk_remote_header_check(&reader.want, reader.crypt, changed, KVK_REMOTE_HEADER_SIZE),
            KVK_REMOTE_DAMAGED);
        kvk_store_le64(changed + KVK_REMOTE_AT_CHECKSUM,
                       kvk_checksum(changed, KVK_REMOTE_AT_CHECKSUM));
        enum kvk_remote_result alone =
            kvk_remote_header_check(&reader.want, reader.crypt, changed, KVK_REMOTE_HEADER_SIZE);
        size_t at = bit / 8;
        bool free = (at >= KVK_REMOTE_AT_ZERO && at < KVK_REMOTE_AT_SHAPE) ||
                    (at >= KVK_REMOTE_AT_NONCE && at < KVK_REMOTE_AT_CHECKSUM);
        bool restored = at >= KVK_REMOTE_AT_CHECKSUM; /* by the right checksum */
        cr_assert_eq(alone == KVK_REMOTE_HIT, restored, "bit %zu", bit);
        cr_assert_eq(alone == KVK_REMOTE_FOREIGN, free, "bit %zu", bit);
        if (free) {
            cr_assert_eq(
                value_read(&reader.want, reader.crypt, changed, sizeof(changed), &piece, 1),
                KVK_REMOTE_FOREIGN);
            cr_assert_arr_eq(back, before, sizeof(back));
        }
    }
    struct kvk_remote_space_options options = usual;
    options.generation = 2;
    write_usual(&options, bytes, value);
    kvk_store_le64(value + KVK_REMOTE_AT_GENERATION, usual.generation);
    kvk_store_le64(value + KVK_REMOTE_AT_CHECKSUM, kvk_checksum(value, KVK_REMOTE_AT_CHECKSUM));
    cr_assert_eq(kvk_remote_header_check(&reader.want, reader.crypt, value, KVK_REMOTE_HEADER_SIZE),
                 KVK_REMOTE_FOREIGN);
    kvk_store_le16(value + KVK_REMOTE_AT_VERSION, 2); /* as earlier daemons wrote */
    cr_assert_eq(kvk_remote_header_check(&reader.want, reader.crypt, value, KVK_REMOTE_HEADER_SIZE),
                 KVK_REMOTE_VERSION);
    side_finish(&reader);
}

Test(remote_value, half_written_is_a_miss_at_any_length)
{
    uint8_t bytes[BLOCK_BYTES];
    uint8_t back[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES + 1] = {0};
    fill(bytes, sizeof(bytes), 3);
    write_usual(&usual, bytes, value);
    for (size_t size = 0; size <= VALUE_BYTES + 1; size++) {
        enum kvk_remote_result result = read_as(&usual, &id, value, size, back);
        enum kvk_remote_result right = size < 6              ? KVK_REMOTE_NOT_OURS
                                       : size == VALUE_BYTES ? KVK_REMOTE_HIT
                                                             : KVK_REMOTE_TRUNCATED;
        cr_assert_eq(result, right, "%zu bytes: %s", size, kvk_remote_result_name(result));
    }
    /* The right length, but the rest never came. */
    memset(value + VALUE_BYTES / 2, 0, VALUE_BYTES / 2);
    cr_assert_eq(read_as(&usual, &id, value, VALUE_BYTES, back), KVK_REMOTE_DAMAGED);
}

/* Sealed where it lies, it is the same value. */
Test(remote_value, a_payload_may_be_sent_from_where_it_lies)
{
    uint8_t bytes[BLOCK_BYTES];
    uint8_t back[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
    struct side writer;
    fill(bytes, sizeof(bytes), 6);
    side_init(&writer, &usual, &id, 0);
    struct kvk_remote_piece pieces[] = {{bytes, 333}, {bytes + 333, BLOCK_BYTES - 333}};
    kvk_remote_value_seal(&writer.want, writer.crypt, pieces, 2, value, NULL);
    memcpy(value + KVK_REMOTE_HEADER_SIZE, bytes, sizeof(bytes));
    side_finish(&writer);
    cr_assert_eq(read_as(&usual, &id, value, sizeof(value), back), KVK_REMOTE_HIT);
    cr_assert_arr_eq(back, bytes, sizeof(bytes));
    bytes[BLOCK_BYTES / 2] ^= 1; /* it changed before it was sent */
    memcpy(value + KVK_REMOTE_HEADER_SIZE, bytes, sizeof(bytes));
    cr_assert_eq(read_as(&usual, &id, value, sizeof(value), back), KVK_REMOTE_DAMAGED);
}

/* Encrypted or not, of any size: a changed bit is found, and a tag of another value is no better.
 */
Test(remote_value, only_the_right_seal_is_believed)
{
    struct side sides[2];
    static uint8_t bytes[70000];
    static uint8_t back[70000];
    static uint8_t value[70000 + KVK_REMOTE_HEADER_SIZE];
    for (int round = 0; round < 600; round++) {
        struct kvk_remote_space_options options = usual;
        options.block_bytes = kvk_random_between(&cuts, 1, round % 2 == 0 ? sizeof(bytes) : 700);
        options.encrypt = round % 4 >= 2;
        size_t size = (size_t)options.block_bytes;
        fill(bytes, size, (uint64_t)round);
        for (int i = 0; i < 2; i++) {
            side_init(&sides[i], &options, &id, 0);
        }
        struct kvk_remote_piece from = {bytes, size};
        struct kvk_remote_piece to = {back, size};
        kvk_remote_value_seal(&sides[0].want, sides[0].crypt, &from, 1, value,
                              value + KVK_REMOTE_HEADER_SIZE);
        size += KVK_REMOTE_HEADER_SIZE;
        cr_assert_eq(value_read(&sides[1].want, sides[1].crypt, value, size, &to, 1),
                     KVK_REMOTE_HIT);
        cr_assert_arr_eq(back, bytes, options.block_bytes);
        size_t bit =
            KVK_REMOTE_HEADER_SIZE * 8 + (size_t)kvk_random_below(&cuts, options.block_bytes * 8);
        value[bit / 8] ^= (uint8_t)(1U << bit % 8);
        cr_assert_eq(value_read(&sides[1].want, sides[1].crypt, value, size, &to, 1),
                     KVK_REMOTE_DAMAGED);
        static uint8_t again[sizeof(value)];
        kvk_remote_value_seal(&sides[0].want, sides[0].crypt, &from, 1, again,
                              again + KVK_REMOTE_HEADER_SIZE);
        value[bit / 8] ^= (uint8_t)(1U << bit % 8);
        memcpy(value + KVK_REMOTE_AT_TAG, again + KVK_REMOTE_AT_TAG, KVK_REMOTE_TAG_SIZE);
        cr_assert_eq(value_read(&sides[1].want, sides[1].crypt, value, size, &to, 1),
                     KVK_REMOTE_DAMAGED);
        for (int i = 0; i < 2; i++) {
            side_finish(&sides[i]);
        }
    }
}

Test(remote_value, what_is_not_wanted_touches_no_memory)
{
    uint8_t bytes[BLOCK_BYTES];
    uint8_t back[BLOCK_BYTES];
    uint8_t before[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
    struct kvk_remote_space_options options = usual;
    fill(bytes, sizeof(bytes), 7);
    fill(back, sizeof(back), 8);
    memcpy(before, back, sizeof(back));
    write_usual(&usual, bytes, value);
    options.generation = 4;
    for (int i = 0; i < 50; i++) {
        cr_assert_eq(read_as(&options, &id, value, sizeof(value), back), KVK_REMOTE_GENERATION);
        cr_assert_eq(read_as(&usual, &id, value, sizeof(value) - 1, back), KVK_REMOTE_TRUNCATED);
        cr_assert_arr_eq(back, before, sizeof(back));
    }
}

Test(remote_value, an_abandoned_value_touches_no_memory)
{
    static struct kvk_remote_arrival arrival;
    uint8_t bytes[BLOCK_BYTES];
    uint8_t back[BLOCK_BYTES];
    uint8_t before[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
    struct iovec room;
    fill(bytes, sizeof(bytes), 9);
    write_usual(&usual, bytes, value);
    for (size_t at = 0; at <= VALUE_BYTES; at += at < 200 ? 1 : 97) {
        struct side reader;
        struct kvk_remote_piece piece = {back, BLOCK_BYTES};
        side_init(&reader, &usual, &id, 0);
        kvk_remote_arrival_begin(&arrival, &reader.want, reader.crypt, &piece, 1, sizeof(value));
        cr_assert_eq(kvk_remote_arrival_take(&arrival, value, at), at);
        kvk_remote_arrival_abandon(&arrival);
        fill(back, sizeof(back), at);
        memcpy(before, back, sizeof(back));
        memset(&reader.want, 0xff, sizeof(reader.want));
        cr_assert_eq(kvk_remote_arrival_rooms(&arrival, BLOCK_BYTES, &room, 1), 0);
        cr_assert_eq(kvk_remote_arrival_take(&arrival, value + at, VALUE_BYTES), VALUE_BYTES - at);
        cr_assert_eq(kvk_remote_arrival_end(&arrival), KVK_REMOTE_DEADLINE);
        cr_assert_arr_eq(back, before, sizeof(back));
        side_finish(&reader);
    }
}

Test(remote_value, any_flipped_bit_is_a_miss)
{
    for (int encrypt = 0; encrypt < 2; encrypt++) {
        struct kvk_remote_space_options options = usual;
        options.encrypt = encrypt != 0;
        uint8_t bytes[BLOCK_BYTES];
        uint8_t back[BLOCK_BYTES];
        uint8_t value[VALUE_BYTES];
        fill(bytes, sizeof(bytes), 4);
        write_usual(&options, bytes, value);
        for (size_t bit = 0; bit < sizeof(value) * 8; bit += bit < 2000 ? 1 : 37) {
            value[bit / 8] ^= (uint8_t)(1U << bit % 8);
            enum kvk_remote_result result = read_as(&options, &id, value, sizeof(value), back);
            enum kvk_remote_result right = KVK_REMOTE_DAMAGED;
            if (bit / 8 < 4) {
                right = KVK_REMOTE_NOT_OURS;
            } else if (bit / 8 < 6) {
                right = KVK_REMOTE_VERSION;
            } else if (bit / 8 >= 8 && bit / 8 < 12) {
                right = KVK_REMOTE_TRUNCATED;
            }
            cr_assert_eq(result, right, "bit %zu: %s", bit, kvk_remote_result_name(result));
            value[bit / 8] ^= (uint8_t)(1U << bit % 8);
        }
    }
}

Test(remote_value, parts_and_pieces_cut_a_block_anywhere)
{
    struct kvk_random random;
    kvk_random_init(&random, 5);
    static uint8_t bytes[3 * KVK_REMOTE_VALUE_MAX];
    static uint8_t back[3 * KVK_REMOTE_VALUE_MAX];
    static uint8_t value[KVK_REMOTE_VALUE_MAX];
    const uint64_t sizes[] = {1,
                              KVK_REMOTE_PAYLOAD_MAX - 1,
                              KVK_REMOTE_PAYLOAD_MAX,
                              KVK_REMOTE_PAYLOAD_MAX + 1,
                              2 * (uint64_t)KVK_REMOTE_PAYLOAD_MAX + 1,
                              sizeof(bytes)};
    const uint32_t parts[] = {1, 1, 1, 2, 3, 4};
    kvk_random_fill(&random, bytes, sizeof(bytes));
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct kvk_remote_space_options options = usual;
        options.block_bytes = sizes[i];
        options.encrypt = i % 2 != 0;
        struct side side;
        side_init(&side, &options, &id, 0);
        cr_assert_eq(side.space.part_count, parts[i]);
        /* Three pieces to write from, three others to read into, some empty. */
        uint64_t a = kvk_random_below(&random, sizes[i] + 1);
        uint64_t b = kvk_random_below(&random, sizes[i] + 1);
        struct kvk_remote_piece from[] = {{bytes, a}, {bytes, 0}, {bytes + a, sizes[i] - a}};
        struct kvk_remote_piece to[] = {{back, 0}, {back, b}, {back + b, sizes[i] - b}};
        memset(back, 0, sizeof(back));
        uint64_t sum = 0;
        for (uint32_t part = 0; part < side.space.part_count; part++) {
            kvk_remote_want_init(&side.want, side.crypt, &side.space, &id, part);
            uint32_t size = kvk_remote_payload_bytes(&side.space, part);
            cr_assert(size > 0 && size <= KVK_REMOTE_PAYLOAD_MAX);
            sum += size;
            kvk_remote_value_seal(&side.want, side.crypt, from, 3, value,
                                  value + KVK_REMOTE_HEADER_SIZE);
            cr_assert_eq(
                value_read(&side.want, side.crypt, value, size + KVK_REMOTE_HEADER_SIZE, to, 3),
                KVK_REMOTE_HIT);
        }
        cr_assert_eq(sum, sizes[i]);
        cr_assert_arr_eq(back, bytes, sizes[i]);
        side_finish(&side);
    }
}

Test(remote_value, parts_do_not_stand_for_one_another)
{
    struct kvk_remote_space_options options = usual;
    options.block_bytes = 2 * (uint64_t)KVK_REMOTE_PAYLOAD_MAX; /* two parts of one size */
    static uint8_t bytes[2 * KVK_REMOTE_VALUE_MAX];
    static uint8_t value[KVK_REMOTE_VALUE_MAX];
    struct side first;
    struct side second;
    side_init(&first, &options, &id, 0);
    side_init(&second, &options, &id, 1);
    cr_assert_neq(memcmp(first.want.hash, second.want.hash, KVK_REMOTE_KEY_SIZE), 0);
    struct kvk_remote_piece piece = {bytes, options.block_bytes};
    kvk_remote_value_seal(&first.want, first.crypt, &piece, 1, value,
                          value + KVK_REMOTE_HEADER_SIZE);
    cr_assert_eq(value_read(&second.want, second.crypt, value, sizeof(value), &piece, 1),
                 KVK_REMOTE_OTHER_KEY);
    side_finish(&first);
    side_finish(&second);
}

Test(remote_value, names_tell_nothing_of_tenant_or_parent)
{
    struct kvk_remote_space_options options = usual;
    struct kvk_remote_id sibling = id;
    struct side a;
    struct side b;
    struct side c;
    sibling.key[3] ^= 1; /* another block below the same parent */
    side_init(&a, &usual, &id, 0);
    side_init(&b, &usual, &sibling, 0);
    options.secret = other_secret; /* the same block of another tenant */
    side_init(&c, &options, &id, 0);
    cr_assert_neq(memcmp(a.want.hash, c.want.hash, KVK_REMOTE_KEY_SIZE), 0);
    cr_assert_neq(memcmp(a.want.key_check, c.want.key_check, KVK_REMOTE_KEY_SIZE), 0);
    cr_assert_neq(memcmp(a.space.shape_check, c.space.shape_check, KVK_REMOTE_KEY_SIZE), 0);
    cr_assert_neq(memcmp(a.want.parent_check, b.want.parent_check, KVK_REMOTE_KEY_SIZE), 0);
    cr_assert_neq(memcmp(a.want.hash, id.key, KVK_REMOTE_KEY_SIZE), 0);
    /* But they are the same in every process, and after an invalidation: no garbage stays. */
    options = usual;
    options.generation = 9;
    side_finish(&c);
    side_init(&c, &options, &id, 0);
    cr_assert_eq(memcmp(a.want.hash, c.want.hash, KVK_REMOTE_KEY_SIZE), 0);
    char text[2 * KVK_REMOTE_KEY_SIZE + 1];
    kvk_hex_write(a.want.hash, KVK_REMOTE_KEY_SIZE, text);
    cr_assert_str_eq(text, "c66b368b712176b5820bbba388ce41fd");
    side_finish(&a);
    side_finish(&b);
    side_finish(&c);
}

/* A thread serves many tenants in turn: what it keeps of one's key is not used for another. */
Test(remote_value, one_thread_serves_many_tenants)
{
    struct kvk_remote_space_options options = usual;
    struct side sides[2];
    uint8_t bytes[BLOCK_BYTES];
    uint8_t back[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
    struct kvk_remote_piece piece = {bytes, BLOCK_BYTES};
    side_init(&sides[0], &usual, &id, 0);
    options.secret = other_secret;
    side_init(&sides[1], &options, &id, 0);
    fill(bytes, sizeof(bytes), 12);
    for (int i = 0; i < 6; i++) {
        const struct side *side = &sides[i % 2];
        struct kvk_remote_want want;
        kvk_remote_want_init(&want, sides[0].crypt, &side->space, &id, 0);
        cr_assert_arr_eq(want.hash, side->want.hash, KVK_REMOTE_KEY_SIZE);
        cr_assert_arr_eq(want.key_check, side->want.key_check, KVK_REMOTE_KEY_SIZE);
        kvk_remote_value_seal(&want, sides[0].crypt, &piece, 1, value,
                              value + KVK_REMOTE_HEADER_SIZE);
        cr_assert_eq(read_as(i % 2 == 0 ? &usual : &options, &id, value, sizeof(value), back),
                     KVK_REMOTE_HIT);
        cr_assert_arr_eq(back, bytes, sizeof(bytes));
    }
    side_finish(&sides[0]);
    side_finish(&sides[1]);
}

Test(remote_value, a_block_of_no_bytes_or_too_many_is_refused)
{
    struct kvk_remote_space_options options = usual;
    struct kvk_remote_space space;
    struct kvk_error error;
    options.block_bytes = 0;
    cr_assert_eq(kvk_remote_space_init(&space, &options, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "block_bytes");
    options.block_bytes = (uint64_t)KVK_REMOTE_PAYLOAD_MAX * KVK_REMOTE_PARTS_MAX;
    cr_assert_eq(kvk_remote_space_init(&space, &options, &error), KVK_OK);
    cr_assert_eq(space.part_count, KVK_REMOTE_PARTS_MAX);
    options.block_bytes++;
    cr_assert_eq(kvk_remote_space_init(&space, &options, &error), KVK_INVALID);
    cr_assert_eq(error.limit, options.block_bytes - 1);
}
