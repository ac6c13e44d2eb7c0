#include "hosttier/catalogue_records.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/assert.h"
#include "base/bytes.h"

/* ---- Layouts: bytes, so that neither padding nor the machine's order gets in ---- */

struct stored_header {
    uint8_t kind;
    uint8_t zero;
    uint8_t version[2];
    uint8_t size[4];     /* of the whole record */
    uint8_t checksum[8]; /* of what follows, seeded with key, kind, version and size */
};
_Static_assert(sizeof(struct stored_header) == KVK_RECORD_HEADER_SIZE, "stored");

struct stored_mark {
    struct stored_header header;
    uint8_t format[4];
    uint8_t zero[4];
};
_Static_assert(sizeof(struct stored_mark) == 24, "stored");

struct stored_tenant {
    struct stored_header header;
    uint8_t id[8];
    uint8_t secret[32];
    uint8_t created_s[8];
    uint8_t guaranteed_bytes[KVK_CATALOGUE_TIERS][8];
    uint8_t limit_bytes[KVK_CATALOGUE_TIERS][8];
    uint8_t sequences[4];
    uint8_t leases[4];
    uint8_t requests_per_second[4];
    uint8_t request_burst[4];
    uint8_t idle_ms[8];
    uint8_t over_quota;
    uint8_t mode;
    uint8_t may_publish;
    uint8_t forgetting;
    uint8_t metadata_limit[4]; /* in units; zero before there was one: the daemon's own */
    /* the name is the key */
};
_Static_assert(sizeof(struct stored_tenant) == 160, "stored");

struct stored_token {
    uint8_t digest[32];
    uint8_t created_s[8];
    uint8_t expires_s[8];
};
_Static_assert(sizeof(struct stored_token) == 48, "stored");

struct stored_credential {
    struct stored_header header;
    uint8_t admin;
    uint8_t tenant_count;
    uint8_t token_count;
    uint8_t uid_count;
    uint8_t subject_size[2];
    uint8_t zero[2];
    /* tenant ids [8], tokens, uids [4], subject; the name is the key */
};
_Static_assert(sizeof(struct stored_credential) == 24, "stored");

struct stored_space_1 {
    struct stored_header header;
    uint8_t tenant_id[8];
    uint8_t identity_size[4];
    uint8_t shape_size[4];
    /* identity, shape; the id is the key */
};
_Static_assert(sizeof(struct stored_space_1) == 32, "stored");

struct stored_space {
    struct stored_space_1 space;
    uint8_t mode;
    uint8_t zero[7];
    /* identity, shape; the id is the key */
};
_Static_assert(sizeof(struct stored_space) == 40, "stored");

struct stored_number {
    struct stored_header header;
    uint8_t number[8];
};
_Static_assert(sizeof(struct stored_number) == 24, "stored");

struct stored_block {
    struct stored_header header;
    uint8_t generation[8];
    uint8_t key[16];
    uint8_t parent[16];
    uint8_t used_s[8];
    uint8_t position[4];
    uint8_t use_count[4];
    uint8_t cost[4]; /* IEEE 754 */
    uint8_t extra_size[4];
    uint8_t token_count[2];
    uint8_t salt_size[2];
    uint8_t shard_count[2];
    uint8_t zero[2];
    /* checksums [8], tokens [4], extra, salt; space, group and slot are the key */
};
_Static_assert(sizeof(struct stored_block) == 88, "stored");

/* ---- Keys ---- */

static void store_be32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        at[i] = (uint8_t)(value >> (24 - 8 * i));
    }
}

static uint32_t load_be32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void store_be64(uint8_t *at, uint64_t value)
{
    store_be32(at, (uint32_t)(value >> 32));
    store_be32(at + 4, (uint32_t)value);
}

static uint64_t load_be64(const uint8_t *at)
{
    return (uint64_t)load_be32(at) << 32 | load_be32(at + 4);
}

void kvk_record_key_id(uint64_t id, struct kvk_record_key *key)
{
    store_be64(key->bytes, id);
    key->size = KVK_RECORD_ID_KEY_SIZE;
}

void kvk_record_key_block(uint64_t space_id, uint32_t group, uint32_t slot,
                          struct kvk_record_key *key)
{
    store_be64(key->bytes, space_id);
    store_be32(key->bytes + 8, group);
    store_be32(key->bytes + 12, slot);
    key->size = KVK_RECORD_BLOCK_KEY_SIZE;
}

bool kvk_record_key_name(const char *name, struct kvk_record_key *key)
{
    size_t size = strnlen(name, KVK_RECORD_KEY_MAX + 1);
    if (size == 0 || size > KVK_RECORD_KEY_MAX || !kvk_utf8_ok(name, size)) {
        return false;
    }
    memcpy(key->bytes, name, size);
    key->bytes[size] = '\0';
    key->size = (uint32_t)size;
    return true;
}

void kvk_record_key_block_read(const uint8_t key[KVK_RECORD_BLOCK_KEY_SIZE], uint64_t *space_id,
                               uint32_t *group, uint32_t *slot)
{
    *space_id = load_be64(key);
    *group = load_be32(key + 8);
    *slot = load_be32(key + 12);
}

/* ---- Headers ---- */

static uint64_t record_checksum(const void *key, size_t key_size, const uint8_t *record,
                                size_t size)
{
    uint8_t head[KVK_RECORD_KEY_MAX + 8];
    memcpy(head, record, 8); /* kind, version, size */
    memcpy(head + 8, key, key_size);
    uint64_t seed = XXH3_64bits(head, 8 + key_size);
    return XXH3_64bits_withSeed(record + KVK_RECORD_HEADER_SIZE, size - KVK_RECORD_HEADER_SIZE,
                                seed);
}

/* A zeroed record of `size` bytes; its fields and then record_seal() follow. */
static enum kvk_status record_alloc(size_t size, struct kvk_record_bytes *bytes)
{
    bytes->data = calloc(1, size);
    bytes->size = size;
    return bytes->data == NULL ? KVK_EXHAUSTED : KVK_OK;
}

static uint16_t version_of(enum kvk_record_kind kind)
{
    return kind == KVK_RECORD_SPACE ? KVK_RECORD_SPACE_VERSION : KVK_RECORD_VERSION;
}

static void record_seal(enum kvk_record_kind kind, const struct kvk_record_key *key,
                        struct kvk_record_bytes *bytes)
{
    struct stored_header *header = (struct stored_header *)(void *)bytes->data;
    header->kind = (uint8_t)kind;
    kvk_store_le16(header->version, version_of(kind));
    kvk_store_le32(header->size, (uint32_t)bytes->size);
    kvk_store_le64(header->checksum,
                   record_checksum(key->bytes, key->size, bytes->data, bytes->size));
}

/* Is it whole, and of this kind and version and at least this size? */
static bool record_has_version(enum kvk_record_kind kind, uint16_t version, const void *key,
                               size_t key_size, const void *data, size_t size, size_t size_min)
{
    const struct stored_header *header = data;
    return key_size > 0 && key_size <= KVK_RECORD_KEY_MAX && size >= size_min &&
           size <= UINT32_MAX && header->kind == (uint8_t)kind && header->zero == 0 &&
           kvk_load_le16(header->version) == version && kvk_load_le32(header->size) == size &&
           kvk_load_le64(header->checksum) == record_checksum(key, key_size, data, size);
}

static bool record_is_whole(enum kvk_record_kind kind, const void *key, size_t key_size,
                            const void *data, size_t size, size_t size_min)
{
    return record_has_version(kind, version_of(kind), key, key_size, data, size, size_min);
}

static bool is_zero(const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != 0) {
            return false;
        }
    }
    return true;
}

/* A key as the name that it is; false: it cannot be one. */
static bool name_of_key(const void *key, size_t key_size, char name[KVK_CATALOGUE_NAME_SIZE])
{
    if (key_size == 0 || key_size >= KVK_CATALOGUE_NAME_SIZE || !kvk_utf8_ok(key, key_size)) {
        return false;
    }
    memcpy(name, key, key_size);
    name[key_size] = '\0';
    return true;
}

/* ---- The mark: which format the whole catalogue has ---- */

enum kvk_status kvk_record_write_mark(const struct kvk_record_key *key, uint32_t format,
                                      struct kvk_record_bytes *bytes)
{
    enum kvk_status status = record_alloc(sizeof(struct stored_mark), bytes);
    if (status != KVK_OK) {
        return status;
    }
    struct stored_mark *stored = (struct stored_mark *)(void *)bytes->data;
    kvk_store_le32(stored->format, format);
    record_seal(KVK_RECORD_VERSION_MARK, key, bytes);
    return KVK_OK;
}

bool kvk_record_read_mark(const void *key, size_t key_size, const void *data, size_t size,
                          uint32_t *format)
{
    const struct stored_mark *stored = data;
    if (!record_is_whole(KVK_RECORD_VERSION_MARK, key, key_size, data, size, sizeof(*stored)) ||
        size != sizeof(*stored)) {
        return false;
    }
    *format = kvk_load_le32(stored->format);
    return *format > 0 && is_zero(stored->zero, sizeof(stored->zero));
}

/* ---- Tenants ---- */

enum kvk_status kvk_record_write_tenant(const struct kvk_record_key *key,
                                        const struct kvk_tenant_record *record,
                                        struct kvk_record_bytes *bytes)
{
    const struct kvk_tenant_quota *quota = &record->quota;
    if (record->id == 0 || record->mode > KVK_TENANT_OFF || quota->over_quota > 1 ||
        quota->metadata_limit_bytes % KVK_METADATA_UNIT != 0 ||
        quota->metadata_limit_bytes / KVK_METADATA_UNIT > UINT32_MAX) {
        return KVK_INVALID;
    }
    enum kvk_status status = record_alloc(sizeof(struct stored_tenant), bytes);
    if (status != KVK_OK) {
        return status;
    }
    struct stored_tenant *stored = (struct stored_tenant *)(void *)bytes->data;
    kvk_store_le64(stored->id, record->id);
    memcpy(stored->secret, record->secret, sizeof(stored->secret));
    kvk_store_le64(stored->created_s, record->created_s);
    for (int i = 0; i < KVK_CATALOGUE_TIERS; i++) {
        kvk_store_le64(stored->guaranteed_bytes[i], quota->guaranteed_bytes[i]);
        kvk_store_le64(stored->limit_bytes[i], quota->limit_bytes[i]);
    }
    kvk_store_le32(stored->sequences, quota->sequences);
    kvk_store_le32(stored->leases, quota->leases);
    kvk_store_le32(stored->requests_per_second, quota->requests_per_second);
    kvk_store_le32(stored->request_burst, quota->request_burst);
    kvk_store_le64(stored->idle_ms, quota->idle_ms);
    kvk_store_le32(stored->metadata_limit,
                   (uint32_t)(quota->metadata_limit_bytes / KVK_METADATA_UNIT));
    stored->over_quota = quota->over_quota;
    stored->mode = record->mode;
    stored->may_publish = record->may_publish ? 1 : 0;
    stored->forgetting = record->forgetting ? 1 : 0;
    record_seal(KVK_RECORD_TENANT, key, bytes);
    return KVK_OK;
}

bool kvk_record_read_tenant(const void *key, size_t key_size, const void *data, size_t size,
                            struct kvk_tenant_record *record)
{
    const struct stored_tenant *stored = data;
    *record = (struct kvk_tenant_record){.id = 0};
    if (!record_is_whole(KVK_RECORD_TENANT, key, key_size, data, size, sizeof(*stored)) ||
        size != sizeof(*stored) || !name_of_key(key, key_size, record->name) ||
        stored->mode > KVK_TENANT_OFF || stored->over_quota > 1 || stored->may_publish > 1 ||
        stored->forgetting > 1) {
        return false;
    }
    struct kvk_tenant_quota *quota = &record->quota;
    record->id = kvk_load_le64(stored->id);
    memcpy(record->secret, stored->secret, sizeof(record->secret));
    record->created_s = kvk_load_le64(stored->created_s);
    for (int i = 0; i < KVK_CATALOGUE_TIERS; i++) {
        quota->guaranteed_bytes[i] = kvk_load_le64(stored->guaranteed_bytes[i]);
        quota->limit_bytes[i] = kvk_load_le64(stored->limit_bytes[i]);
    }
    quota->sequences = kvk_load_le32(stored->sequences);
    quota->leases = kvk_load_le32(stored->leases);
    quota->requests_per_second = kvk_load_le32(stored->requests_per_second);
    quota->request_burst = kvk_load_le32(stored->request_burst);
    quota->idle_ms = kvk_load_le64(stored->idle_ms);
    quota->metadata_limit_bytes = kvk_load_le32(stored->metadata_limit) * KVK_METADATA_UNIT;
    quota->over_quota = stored->over_quota;
    record->mode = stored->mode;
    record->may_publish = stored->may_publish != 0;
    record->forgetting = stored->forgetting != 0;
    return record->id != 0;
}

/* ---- Credentials ---- */

_Static_assert(KVK_CREDENTIAL_TENANTS_MAX <= UINT8_MAX, "stored in a byte");

#define UID_COUNT_MAX                                                                              \
    (sizeof(((struct kvk_credential_record *)0)->uids) /                                           \
     sizeof(((struct kvk_credential_record *)0)->uids[0]))

static size_t credential_size(size_t tenants, size_t tokens, size_t uids, size_t subject)
{
    return sizeof(struct stored_credential) + 8 * tenants + sizeof(struct stored_token) * tokens +
           4 * uids + subject;
}

enum kvk_status kvk_record_write_credential(const struct kvk_record_key *key,
                                            const struct kvk_credential_record *record,
                                            struct kvk_record_bytes *bytes)
{
    size_t subject = strnlen(record->certificate_subject, KVK_CATALOGUE_NAME_SIZE);
    if (record->tenant_count > KVK_CREDENTIAL_TENANTS_MAX ||
        record->token_count > KVK_CREDENTIAL_TOKENS_MAX || record->uid_count > UID_COUNT_MAX ||
        subject == KVK_CATALOGUE_NAME_SIZE ||
        (subject > 0 && !kvk_utf8_ok(record->certificate_subject, subject))) {
        return KVK_INVALID;
    }
    enum kvk_status status = record_alloc(
        credential_size(record->tenant_count, record->token_count, record->uid_count, subject),
        bytes);
    if (status != KVK_OK) {
        return status;
    }
    struct stored_credential *stored = (struct stored_credential *)(void *)bytes->data;
    stored->admin = record->admin ? 1 : 0;
    stored->tenant_count = (uint8_t)record->tenant_count;
    stored->token_count = (uint8_t)record->token_count;
    stored->uid_count = (uint8_t)record->uid_count;
    kvk_store_le16(stored->subject_size, (uint16_t)subject);
    uint8_t *at = bytes->data + sizeof(*stored);
    for (uint32_t i = 0; i < record->tenant_count; i++, at += 8) {
        kvk_store_le64(at, record->tenant_ids[i]);
    }
    for (uint32_t i = 0; i < record->token_count; i++, at += sizeof(struct stored_token)) {
        struct stored_token *token = (struct stored_token *)(void *)at;
        memcpy(token->digest, record->tokens[i].digest, sizeof(token->digest));
        kvk_store_le64(token->created_s, record->tokens[i].created_s);
        kvk_store_le64(token->expires_s, record->tokens[i].expires_s);
    }
    for (uint32_t i = 0; i < record->uid_count; i++, at += 4) {
        kvk_store_le32(at, record->uids[i]);
    }
    memcpy(at, record->certificate_subject, subject);
    KVK_ASSERT(at + subject == bytes->data + bytes->size);
    record_seal(KVK_RECORD_CREDENTIAL, key, bytes);
    return KVK_OK;
}

bool kvk_record_read_credential(const void *key, size_t key_size, const void *data, size_t size,
                                struct kvk_credential_record *record)
{
    const struct stored_credential *stored = data;
    *record = (struct kvk_credential_record){.tenant_count = 0};
    if (!record_is_whole(KVK_RECORD_CREDENTIAL, key, key_size, data, size, sizeof(*stored)) ||
        !name_of_key(key, key_size, record->name) || stored->admin > 1 ||
        stored->tenant_count > KVK_CREDENTIAL_TENANTS_MAX ||
        stored->token_count > KVK_CREDENTIAL_TOKENS_MAX || stored->uid_count > UID_COUNT_MAX ||
        !is_zero(stored->zero, sizeof(stored->zero))) {
        return false;
    }
    size_t subject = kvk_load_le16(stored->subject_size);
    if (subject >= KVK_CATALOGUE_NAME_SIZE ||
        size != credential_size(stored->tenant_count, stored->token_count, stored->uid_count,
                                subject)) {
        return false;
    }
    record->admin = stored->admin != 0;
    record->tenant_count = stored->tenant_count;
    record->token_count = stored->token_count;
    record->uid_count = stored->uid_count;
    const uint8_t *at = (const uint8_t *)data + sizeof(*stored);
    for (uint32_t i = 0; i < record->tenant_count; i++, at += 8) {
        record->tenant_ids[i] = kvk_load_le64(at);
    }
    for (uint32_t i = 0; i < record->token_count; i++, at += sizeof(struct stored_token)) {
        const struct stored_token *token = (const struct stored_token *)(const void *)at;
        memcpy(record->tokens[i].digest, token->digest, sizeof(token->digest));
        record->tokens[i].created_s = kvk_load_le64(token->created_s);
        record->tokens[i].expires_s = kvk_load_le64(token->expires_s);
    }
    for (uint32_t i = 0; i < record->uid_count; i++, at += 4) {
        record->uids[i] = kvk_load_le32(at);
    }
    memcpy(record->certificate_subject, at, subject);
    return subject == 0 || kvk_utf8_ok(at, subject);
}

/* ---- Spaces ---- */

enum kvk_status kvk_record_write_space(const struct kvk_record_key *key,
                                       const struct kvk_space_record *record,
                                       struct kvk_record_bytes *bytes)
{
    if (record->tenant_id == 0 || record->identity_size == 0 ||
        record->identity_size > KVK_RECORD_IDENTITY_MAX ||
        record->shape_size > KVK_RECORD_SHAPE_MAX || record->mode > KVK_TENANT_OFF) {
        return KVK_INVALID;
    }
    enum kvk_status status = record_alloc(
        sizeof(struct stored_space) + record->identity_size + record->shape_size, bytes);
    if (status != KVK_OK) {
        return status;
    }
    struct stored_space *stored = (struct stored_space *)(void *)bytes->data;
    kvk_store_le64(stored->space.tenant_id, record->tenant_id);
    kvk_store_le32(stored->space.identity_size, (uint32_t)record->identity_size);
    kvk_store_le32(stored->space.shape_size, (uint32_t)record->shape_size);
    stored->mode = record->mode;
    uint8_t *at = bytes->data + sizeof(*stored);
    memcpy(at, record->identity, record->identity_size);
    if (record->shape_size > 0) {
        memcpy(at + record->identity_size, record->shape, record->shape_size);
    }
    record_seal(KVK_RECORD_SPACE, key, bytes);
    return KVK_OK;
}

/* What both versions have in common; identity and shape begin `head_size` into the record. */
static bool space_take(const void *key, const void *data, size_t size, size_t head_size,
                       struct kvk_space_record *record)
{
    const struct stored_space_1 *stored = data;
    *record = (struct kvk_space_record){
        .id = load_be64(key),
        .tenant_id = kvk_load_le64(stored->tenant_id),
        .identity = (const uint8_t *)data + head_size,
        .identity_size = kvk_load_le32(stored->identity_size),
        .shape_size = kvk_load_le32(stored->shape_size),
        .mode = KVK_TENANT_ON,
    };
    if (record->id == 0 || record->tenant_id == 0 || record->identity_size == 0 ||
        record->identity_size > KVK_RECORD_IDENTITY_MAX ||
        record->shape_size > KVK_RECORD_SHAPE_MAX ||
        size != head_size + record->identity_size + record->shape_size) {
        return false;
    }
    record->shape = record->identity + record->identity_size;
    return true;
}

bool kvk_record_read_space(const void *key, size_t key_size, const void *data, size_t size,
                           struct kvk_space_record *record)
{
    const struct stored_space *stored = data;
    if (!record_is_whole(KVK_RECORD_SPACE, key, key_size, data, size, sizeof(*stored)) ||
        key_size != KVK_RECORD_ID_KEY_SIZE ||
        !space_take(key, data, size, sizeof(*stored), record)) {
        return false;
    }
    record->mode = stored->mode;
    return record->mode <= KVK_TENANT_OFF && is_zero(stored->zero, sizeof(stored->zero));
}

bool kvk_record_read_space_1(const void *key, size_t key_size, const void *data, size_t size,
                             struct kvk_space_record *record)
{
    const size_t head_size = sizeof(struct stored_space_1);
    return record_has_version(KVK_RECORD_SPACE, 1, key, key_size, data, size, head_size) &&
           key_size == KVK_RECORD_ID_KEY_SIZE && space_take(key, data, size, head_size, record);
}

/* ---- Numbers ---- */

enum kvk_status kvk_record_write_number(enum kvk_record_kind kind, const struct kvk_record_key *key,
                                        uint64_t number, struct kvk_record_bytes *bytes)
{
    KVK_ASSERT(kind == KVK_RECORD_GENERATION || kind == KVK_RECORD_COUNTER);
    enum kvk_status status = record_alloc(sizeof(struct stored_number), bytes);
    if (status != KVK_OK) {
        return status;
    }
    struct stored_number *stored = (struct stored_number *)(void *)bytes->data;
    kvk_store_le64(stored->number, number);
    record_seal(kind, key, bytes);
    return KVK_OK;
}

bool kvk_record_read_number(enum kvk_record_kind kind, const void *key, size_t key_size,
                            const void *data, size_t size, uint64_t *number)
{
    const struct stored_number *stored = data;
    if (!record_is_whole(kind, key, key_size, data, size, sizeof(*stored)) ||
        size != sizeof(*stored)) {
        return false;
    }
    *number = kvk_load_le64(stored->number);
    return true;
}

/* ---- Blocks ---- */

static size_t block_size(size_t shards, size_t tokens, size_t extra, size_t salt)
{
    return sizeof(struct stored_block) + 8 * shards + 4 * tokens + extra + salt;
}

static bool block_is_sound(const struct kvk_disk_block_record *record)
{
    return record->shard_count > 0 && record->shard_count <= KVK_CATALOGUE_SHARDS_MAX &&
           record->token_count > 0 && record->token_count <= KVK_RECORD_TOKENS_MAX &&
           record->extra_size <= KVK_RECORD_EXTRA_MAX && record->salt_size <= KVK_RECORD_SALT_MAX &&
           (record->salt_size == 0 || record->position == 0) && isfinite(record->cost) &&
           record->cost >= 0 && record->space_id != 0;
}

enum kvk_status kvk_record_write_block(const struct kvk_record_key *key,
                                       const struct kvk_disk_block_record *record,
                                       struct kvk_record_bytes *bytes)
{
    if (!block_is_sound(record)) {
        return KVK_INVALID;
    }
    enum kvk_status status = record_alloc(
        block_size(record->shard_count, record->token_count, record->extra_size, record->salt_size),
        bytes);
    if (status != KVK_OK) {
        return status;
    }
    struct stored_block *stored = (struct stored_block *)(void *)bytes->data;
    uint32_t cost;
    _Static_assert(sizeof(cost) == sizeof(record->cost), "a float has 4 bytes");
    memcpy(&cost, &record->cost, sizeof(cost));
    kvk_store_le64(stored->generation, record->generation);
    memcpy(stored->key, record->key.bytes, sizeof(stored->key));
    memcpy(stored->parent, record->parent.bytes, sizeof(stored->parent));
    kvk_store_le64(stored->used_s, record->used_s);
    kvk_store_le32(stored->position, record->position);
    kvk_store_le32(stored->use_count, record->use_count);
    kvk_store_le32(stored->cost, cost);
    kvk_store_le32(stored->extra_size, (uint32_t)record->extra_size);
    kvk_store_le16(stored->token_count, (uint16_t)record->token_count);
    kvk_store_le16(stored->salt_size, (uint16_t)record->salt_size);
    kvk_store_le16(stored->shard_count, (uint16_t)record->shard_count);
    uint8_t *at = bytes->data + sizeof(*stored);
    for (uint32_t i = 0; i < record->shard_count; i++, at += 8) {
        kvk_store_le64(at, record->checksums[i]);
    }
    for (uint32_t i = 0; i < record->token_count; i++, at += 4) {
        kvk_store_le32(at, record->tokens[i]);
    }
    if (record->extra_size > 0) {
        memcpy(at, record->extra, record->extra_size);
    }
    if (record->salt_size > 0) {
        memcpy(at + record->extra_size, record->salt, record->salt_size);
    }
    record_seal(KVK_RECORD_BLOCK, key, bytes);
    return KVK_OK;
}

bool kvk_record_read_block(const void *key, size_t key_size, const void *data, size_t size,
                           struct kvk_record_scratch *scratch, struct kvk_disk_block_record *record)
{
    const struct stored_block *stored = data;
    if (!record_is_whole(KVK_RECORD_BLOCK, key, key_size, data, size, sizeof(*stored)) ||
        key_size != KVK_RECORD_BLOCK_KEY_SIZE) {
        return false;
    }
    uint32_t cost = kvk_load_le32(stored->cost);
    *record = (struct kvk_disk_block_record){
        .generation = kvk_load_le64(stored->generation),
        .position = kvk_load_le32(stored->position),
        .use_count = kvk_load_le32(stored->use_count),
        .used_s = kvk_load_le64(stored->used_s),
        .tokens = scratch->tokens,
        .token_count = kvk_load_le16(stored->token_count),
        .extra_size = kvk_load_le32(stored->extra_size),
        .salt_size = kvk_load_le16(stored->salt_size),
        .checksums = scratch->checksums,
        .shard_count = kvk_load_le16(stored->shard_count),
    };
    memcpy(&record->cost, &cost, sizeof(cost));
    memcpy(record->key.bytes, stored->key, sizeof(stored->key));
    memcpy(record->parent.bytes, stored->parent, sizeof(stored->parent));
    kvk_record_key_block_read(key, &record->space_id, &record->group, &record->slot);
    if (!block_is_sound(record) || !is_zero(stored->zero, sizeof(stored->zero)) ||
        size != block_size(record->shard_count, record->token_count, record->extra_size,
                           record->salt_size)) {
        return false;
    }
    const uint8_t *at = (const uint8_t *)data + sizeof(*stored);
    for (uint32_t i = 0; i < record->shard_count; i++, at += 8) {
        scratch->checksums[i] = kvk_load_le64(at);
    }
    for (uint32_t i = 0; i < record->token_count; i++, at += 4) {
        scratch->tokens[i] = kvk_load_le32(at);
    }
    record->extra = at;
    record->salt = at + record->extra_size;
    return true;
}

/* ---- Values ---- */

enum kvk_status kvk_record_write_value(const struct kvk_record_key *key, const void *value,
                                       size_t size, struct kvk_record_bytes *bytes)
{
    if (size > KVK_RECORD_VALUE_MAX) {
        return KVK_INVALID;
    }
    enum kvk_status status = record_alloc(KVK_RECORD_HEADER_SIZE + size, bytes);
    if (status != KVK_OK) {
        return status;
    }
    if (size > 0) {
        memcpy(bytes->data + KVK_RECORD_HEADER_SIZE, value, size);
    }
    record_seal(KVK_RECORD_VALUE, key, bytes);
    return KVK_OK;
}

bool kvk_record_read_value(const void *key, size_t key_size, const void *data, size_t size,
                           const void **value, size_t *value_size)
{
    if (!record_is_whole(KVK_RECORD_VALUE, key, key_size, data, size, KVK_RECORD_HEADER_SIZE) ||
        size > KVK_RECORD_HEADER_SIZE + KVK_RECORD_VALUE_MAX) {
        return false;
    }
    *value = (const uint8_t *)data + KVK_RECORD_HEADER_SIZE;
    *value_size = size - KVK_RECORD_HEADER_SIZE;
    return true;
}
