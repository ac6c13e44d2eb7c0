/*
 * Bytes that lie in the catalogue: every decoder on bytes of any content, under any key. What a
 * decoder believes must give the same record when it is written again, byte for byte.
 *
 * Input: u8 kind, u8 key size, key, record. So that the fuzzer gets past the checksum, the first
 * bit of the kind asks for it to be made right.
 */
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "hosttier/catalogue_records.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MEND 0x80

/* As catalogue_records.c takes it: of the record behind its header, seeded with key and header. */
static void mend(const uint8_t *key, size_t key_size, uint8_t *record, size_t size)
{
    uint8_t head[8 + KVK_RECORD_KEY_MAX];
    kvk_store_le32(record + 4, (uint32_t)size);
    memcpy(head, record, 8);
    memcpy(head + 8, key, key_size);
    uint64_t seed = XXH3_64bits(head, 8 + key_size);
    kvk_store_le64(record + 8, XXH3_64bits_withSeed(record + KVK_RECORD_HEADER_SIZE,
                                                    size - KVK_RECORD_HEADER_SIZE, seed));
}

static void compare(enum kvk_status status, struct kvk_record_bytes *bytes, const uint8_t *record,
                    size_t size)
{
    KVK_ASSERT(status == KVK_OK);
    KVK_ASSERT(bytes->size == size);
    KVK_ASSERT(memcmp(bytes->data, record, size) == 0);
    free(bytes->data);
}

static void read_block(const struct kvk_record_key *key, const uint8_t *record, size_t size)
{
    static struct kvk_record_scratch scratch;
    struct kvk_record_bytes bytes;
    struct kvk_disk_block_record block;
    if (kvk_record_read_block(key->bytes, key->size, record, size, &scratch, &block)) {
        compare(kvk_record_write_block(key, &block, &bytes), &bytes, record, size);
    }
}

static void read_named(enum kvk_record_kind kind, const struct kvk_record_key *key,
                       const uint8_t *record, size_t size)
{
    struct kvk_record_bytes bytes;
    struct kvk_tenant_record tenant;
    struct kvk_credential_record credential;
    if (kind == KVK_RECORD_TENANT &&
        kvk_record_read_tenant(key->bytes, key->size, record, size, &tenant)) {
        KVK_ASSERT(strnlen(tenant.name, sizeof(tenant.name)) == key->size);
        compare(kvk_record_write_tenant(key, &tenant, &bytes), &bytes, record, size);
    }
    /* A subject with a NUL in it is not taken, so the subject's size is that of its text. */
    if (kind == KVK_RECORD_CREDENTIAL &&
        kvk_record_read_credential(key->bytes, key->size, record, size, &credential)) {
        compare(kvk_record_write_credential(key, &credential, &bytes), &bytes, record, size);
    }
}

static void read_any(enum kvk_record_kind kind, const struct kvk_record_key *key,
                     const uint8_t *record, size_t size)
{
    struct kvk_record_bytes bytes;
    struct kvk_space_record space;
    const void *value;
    size_t value_size;
    uint64_t number;
    uint32_t format;
    switch (kind) {
    case KVK_RECORD_VERSION_MARK:
        if (kvk_record_read_mark(key->bytes, key->size, record, size, &format)) {
            compare(kvk_record_write_mark(key, format, &bytes), &bytes, record, size);
        }
        break;
    case KVK_RECORD_TENANT:
    case KVK_RECORD_CREDENTIAL:
        read_named(kind, key, record, size);
        break;
    case KVK_RECORD_SPACE:
        if (kvk_record_read_space(key->bytes, key->size, record, size, &space)) {
            compare(kvk_record_write_space(key, &space, &bytes), &bytes, record, size);
        }
        if (kvk_record_read_space_1(key->bytes, key->size, record, size, &space)) {
            KVK_ASSERT(kvk_record_write_space(key, &space, &bytes) == KVK_OK);
            KVK_ASSERT(
                kvk_record_read_space(key->bytes, key->size, bytes.data, bytes.size, &space));
            free(bytes.data);
        }
        break;
    case KVK_RECORD_BLOCK:
        read_block(key, record, size);
        break;
    case KVK_RECORD_VALUE:
        if (kvk_record_read_value(key->bytes, key->size, record, size, &value, &value_size)) {
            compare(kvk_record_write_value(key, value, value_size, &bytes), &bytes, record, size);
        }
        break;
    case KVK_RECORD_GENERATION:
    case KVK_RECORD_COUNTER:
        if (kvk_record_read_number(kind, key->bytes, key->size, record, size, &number)) {
            compare(kvk_record_write_number(kind, key, number, &bytes), &bytes, record, size);
        }
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvk_record_key key;
    if (size < 3) {
        return 0;
    }
    key.size = data[1];
    if (key.size == 0 || size - 2 < key.size) {
        return 0;
    }
    enum kvk_record_kind kind = (enum kvk_record_kind)(1 + (data[0] & 7));
    memcpy(key.bytes, data + 2, key.size);
    size_t record_size = size - 2 - key.size;
    if (record_size == 0) {
        return 0;
    }
    uint8_t *record = malloc(record_size); /* of its own: reading past it is seen */
    memcpy(record, data + 2 + key.size, record_size);
    if ((data[0] & MEND) != 0 && record_size >= KVK_RECORD_HEADER_SIZE) {
        record[0] = (uint8_t)kind;
        mend(key.bytes, key.size, record, record_size);
    }
    read_any(kind, &key, record, record_size);
    free(record);
    return 0;
}
