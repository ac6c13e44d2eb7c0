/*
 * Values that arrive: put where they belong as they come, and proven by their seals.
 */
#include "hosttier/remote_value_internal.h"

#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"

void kvk_remote_arrival_begin(struct kvk_remote_arrival *arrival,
                              const struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                              const struct kvk_remote_piece *pieces, uint32_t piece_count,
                              size_t size)
{
    KVK_ASSERT(size > 0);
    arrival->want = want;
    arrival->crypt = crypt;
    if (want != NULL) {
        kvk_remote_place_init(&arrival->place, want, pieces, piece_count);
    }
    arrival->size = size;
    arrival->done = 0;
    arrival->framed = KVK_REMOTE_PENDING;
    arrival->wanted = KVK_REMOTE_PENDING;
}

void kvk_remote_arrival_abandon(struct kvk_remote_arrival *arrival)
{
    arrival->want = NULL;
    arrival->wanted = KVK_REMOTE_DEADLINE;
}

/* Is it as long as it says of itself? As far as can be told without any key. */
static enum kvk_remote_result header_frames(const uint8_t *header, size_t size)
{
    if (size < KVK_REMOTE_AT_FLAGS ||
        memcmp(header, kvk_remote_magic, sizeof(kvk_remote_magic)) != 0) {
        return KVK_REMOTE_NOT_OURS;
    }
    if (kvk_load_le16(header + KVK_REMOTE_AT_VERSION) != KVK_REMOTE_VERSION_NUMBER) {
        return KVK_REMOTE_VERSION;
    }
    if (size < KVK_REMOTE_HEADER_SIZE ||
        size - KVK_REMOTE_HEADER_SIZE != kvk_load_le32(header + KVK_REMOTE_AT_PAYLOAD)) {
        return KVK_REMOTE_TRUNCATED;
    }
    return KVK_REMOTE_HIT;
}

static size_t header_size(const struct kvk_remote_arrival *arrival)
{
    return arrival->size < KVK_REMOTE_HEADER_SIZE ? arrival->size : KVK_REMOTE_HEADER_SIZE;
}

/* The header is whole, or all that comes of it. */
static void header_came(struct kvk_remote_arrival *arrival)
{
    const uint8_t *header = arrival->header;
    arrival->framed = header_frames(header, arrival->size);
    if (arrival->framed != KVK_REMOTE_HIT || arrival->want == NULL) {
        return;
    }
    arrival->wanted =
        kvk_remote_header_check(arrival->want, arrival->crypt, header, KVK_REMOTE_HEADER_SIZE);
    if (arrival->wanted == KVK_REMOTE_HIT) {
        KVK_ASSERT(arrival->place.left == arrival->size - KVK_REMOTE_HEADER_SIZE);
        kvk_remote_seal_begin(arrival->crypt, arrival->want->space, header, false);
    }
}

static bool is_placed(const struct kvk_remote_arrival *arrival)
{
    return arrival->wanted == KVK_REMOTE_HIT && arrival->done >= KVK_REMOTE_HEADER_SIZE;
}

/* The payload's next bytes, which go to `memory`, or lie there already. */
static void payload_prove(struct kvk_remote_arrival *arrival, uint8_t *memory, const uint8_t *bytes,
                          size_t size)
{
    bool encrypt = arrival->want->space->encrypt;
    kvk_remote_seal_add(arrival->crypt, encrypt ? memory : NULL, bytes, size);
    if (!encrypt && memory != bytes) {
        memcpy(memory, bytes, size);
    }
}

static void payload_take(struct kvk_remote_arrival *arrival, const uint8_t *bytes, size_t size)
{
    if (arrival->framed != KVK_REMOTE_HIT || arrival->wanted != KVK_REMOTE_HIT) {
        return; /* it goes nowhere, also where its batch ended meanwhile */
    }
    while (size > 0) {
        uint8_t *memory = NULL;
        size_t run = 0;
        size_t chunk = size < KVK_REMOTE_CHUNK_SIZE ? size : KVK_REMOTE_CHUNK_SIZE;
        bool more = kvk_remote_place_next(&arrival->place, chunk, &memory, &run);
        KVK_ASSERT(more);
        payload_prove(arrival, memory, bytes, run);
        bytes += run;
        size -= run;
    }
}

size_t kvk_remote_arrival_take(struct kvk_remote_arrival *arrival, const uint8_t *bytes,
                               size_t size)
{
    size_t left = arrival->size - arrival->done;
    size_t taken = size < left ? size : left;
    size_t header_left =
        arrival->done < header_size(arrival) ? header_size(arrival) - arrival->done : 0;
    size_t of_header = taken < header_left ? taken : header_left;
    if (of_header > 0) {
        memcpy(arrival->header + arrival->done, bytes, of_header);
        arrival->done += of_header;
        if (of_header == header_left) {
            header_came(arrival);
        }
    }
    if (taken > of_header) {
        payload_take(arrival, bytes + of_header, taken - of_header);
        arrival->done += taken - of_header;
    }
    return taken;
}

uint32_t kvk_remote_arrival_rooms(const struct kvk_remote_arrival *arrival, size_t size_max,
                                  struct iovec *rooms, uint32_t room_max)
{
    struct kvk_remote_place place = arrival->place; /* a look ahead */
    uint32_t count = 0;
    uint8_t *memory = NULL;
    size_t size = 0;
    if (!is_placed(arrival)) {
        return 0;
    }
    while (count < room_max && size_max > 0 &&
           kvk_remote_place_next(&place, size_max, &memory, &size)) {
        rooms[count++] = (struct iovec){.iov_base = memory, .iov_len = size};
        size_max -= size;
    }
    return count;
}

void kvk_remote_arrival_came(struct kvk_remote_arrival *arrival, size_t size)
{
    KVK_ASSERT(is_placed(arrival) && size <= arrival->size - arrival->done);
    arrival->done += size;
    while (size > 0) {
        uint8_t *memory = NULL;
        size_t run = 0;
        size_t chunk = size < KVK_REMOTE_CHUNK_SIZE ? size : KVK_REMOTE_CHUNK_SIZE;
        bool more = kvk_remote_place_next(&arrival->place, chunk, &memory, &run);
        KVK_ASSERT(more);
        payload_prove(arrival, memory, memory, run);
        size -= run;
    }
}

enum kvk_remote_result kvk_remote_arrival_end(struct kvk_remote_arrival *arrival)
{
    KVK_ASSERT(kvk_remote_arrival_whole(arrival));
    if (arrival->want == NULL) {
        return KVK_REMOTE_DEADLINE;
    }
    if (arrival->framed != KVK_REMOTE_HIT) {
        return arrival->framed;
    }
    if (arrival->wanted != KVK_REMOTE_HIT) {
        return arrival->wanted;
    }
    return kvk_remote_seal_proves(arrival->crypt, arrival->header + KVK_REMOTE_AT_TAG)
               ? KVK_REMOTE_HIT
               : KVK_REMOTE_DAMAGED; /* its header is proven: it was right once */
}
