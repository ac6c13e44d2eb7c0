/*
 * Any bytes under a name of the remote store: a value is a hit only if it is the very one that was
 * stored. An input is a value, or, after a first byte that is odd, changes to the right one:
 * offset (2 bytes) and byte.
 */
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "hosttier/remote_value_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define BLOCK_BYTES 256U
#define VALUE_BYTES (BLOCK_BYTES + KVK_REMOTE_HEADER_SIZE)

static struct {
    struct kvk_remote_crypt *crypt;
    struct kvk_remote_space space;
    struct kvk_remote_id id;
    struct kvk_remote_want want;
    uint8_t bytes[BLOCK_BYTES];
    uint8_t value[VALUE_BYTES];
} house;

static void house_init(void)
{
    static const uint8_t digest[KVK_REMOTE_SECRET_SIZE] = {1};
    struct kvk_remote_space_options options = {
        .secret = digest,
        .space = digest,
        .shape = digest,
        .block_bytes = BLOCK_BYTES,
    };
    struct kvk_remote_piece piece = {house.bytes, BLOCK_BYTES};
    KVK_ASSERT(kvk_remote_crypt_create(&house.crypt, NULL) == KVK_OK);
    KVK_ASSERT(kvk_remote_space_init(&house.space, &options, NULL) == KVK_OK);
    memset(house.bytes, 0x5a, sizeof(house.bytes));
    kvk_remote_want_init(&house.want, house.crypt, &house.space, &house.id, 0);
    kvk_remote_value_seal(&house.want, house.crypt, &piece, 1, house.value,
                          house.value + KVK_REMOTE_HEADER_SIZE);
}

/* It comes in pieces, whose sizes are its own bytes. */
static enum kvk_remote_result value_read(const uint8_t *value, size_t size,
                                         const struct kvk_remote_piece *piece)
{
    static struct kvk_remote_arrival arrival;
    struct iovec room;
    if (size == 0) {
        return KVK_REMOTE_ABSENT;
    }
    kvk_remote_arrival_begin(&arrival, &house.want, house.crypt, piece, 1, size);
    for (size_t at = 0; at < size;) {
        size_t step = value[at] % 64 + 1U;
        step = step < size - at ? step : size - at;
        if (step % 2 != 0 && kvk_remote_arrival_rooms(&arrival, step, &room, 1) == 1) {
            memcpy(room.iov_base, value + at, room.iov_len);
            kvk_remote_arrival_came(&arrival, room.iov_len);
            at += room.iov_len;
        } else {
            at += kvk_remote_arrival_take(&arrival, value + at, step);
        }
    }
    KVK_ASSERT(kvk_remote_arrival_whole(&arrival));
    return kvk_remote_arrival_end(&arrival);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (house.crypt == NULL) {
        house_init();
    }
    uint8_t changed[VALUE_BYTES];
    uint8_t back[BLOCK_BYTES];
    const uint8_t *value = data;
    size_t value_size = size;
    if (size > 0 && data[0] % 2 != 0) {
        memcpy(changed, house.value, sizeof(changed));
        for (size_t at = 1; at + 3 <= size; at += 3) {
            changed[kvk_load_le16(data + at) % VALUE_BYTES] = data[at + 2];
        }
        value = changed;
        value_size = sizeof(changed);
    }
    struct kvk_remote_piece piece = {back, BLOCK_BYTES};
    enum kvk_remote_result result = value_read(value, value_size, &piece);
    bool same = value_size == VALUE_BYTES && memcmp(value, house.value, VALUE_BYTES) == 0;
    KVK_ASSERT((result == KVK_REMOTE_HIT) == same);
    KVK_ASSERT(!same || memcmp(back, house.bytes, BLOCK_BYTES) == 0);
    /* A header that came alone is proven, all of it but the tag. */
    bool known =
        value_size >= KVK_REMOTE_HEADER_SIZE && memcmp(value, house.value, KVK_REMOTE_AT_TAG) == 0;
    KVK_ASSERT((kvk_remote_header_check(&house.want, house.crypt, value, value_size) ==
                KVK_REMOTE_HIT) == known);
    return 0;
}
