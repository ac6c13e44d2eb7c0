/*
 * Records of the catalogue as bytes: every stored value begins with one header, which says what it
 * is, in which version and how long, and carries a checksum over the rest and the key. So a value
 * that was damaged, cut, or lies under another record's key is known as such before any of its
 * fields is used.
 *
 * All numbers are little-endian, at no alignment; keys of several numbers are big-endian, so that
 * LMDB's order of bytes is the order of numbers. Layouts are arrays of bytes with sizes that are
 * checked when compiling. Bytes of any content may be given to the decoders.
 *
 * Private to hosttier/catalogue*.c and their tests. Pure: no I/O, no locks.
 */
#ifndef KVK_HOSTTIER_CATALOGUE_RECORDS_H
#define KVK_HOSTTIER_CATALOGUE_RECORDS_H

#include "hosttier/catalogue.h"

/* As written now: of spaces, which had no mode in version 1, and of all other kinds. */
#define KVK_RECORD_SPACE_VERSION 2
#define KVK_RECORD_VERSION 1

/* Never renumber. */
enum kvk_record_kind {
    KVK_RECORD_VERSION_MARK = 1,
    KVK_RECORD_TENANT = 2,
    KVK_RECORD_CREDENTIAL = 3,
    KVK_RECORD_SPACE = 4,
    KVK_RECORD_GENERATION = 5,
    KVK_RECORD_BLOCK = 6,
    KVK_RECORD_VALUE = 7,
    KVK_RECORD_COUNTER = 8,
};

/* What a record may hold at most; beyond is refused when written, and damage when read. */
#define KVK_RECORD_IDENTITY_MAX (1U << 20)
#define KVK_RECORD_SHAPE_MAX (1U << 16)
#define KVK_RECORD_TOKENS_MAX 4096U
#define KVK_RECORD_EXTRA_MAX (1U << 20)
#define KVK_RECORD_SALT_MAX 4096U
#define KVK_RECORD_VALUE_MAX (1U << 20)

#define KVK_RECORD_HEADER_SIZE 16
#define KVK_RECORD_ID_KEY_SIZE 8
#define KVK_RECORD_BLOCK_KEY_SIZE 16
#define KVK_RECORD_KEY_MAX 255 /* a name without its NUL */

/* A key, as LMDB orders it. */
struct kvk_record_key {
    uint8_t bytes[KVK_RECORD_KEY_MAX + 1];
    uint32_t size;
};

void kvk_record_key_id(uint64_t id, struct kvk_record_key *key);
void kvk_record_key_block(uint64_t space_id, uint32_t group, uint32_t slot,
                          struct kvk_record_key *key);
/* A name, 1 to 255 bytes of UTF-8; false: it is none. */
KVK_CHECKED bool kvk_record_key_name(const char *name, struct kvk_record_key *key);
void kvk_record_key_block_read(const uint8_t key[KVK_RECORD_BLOCK_KEY_SIZE], uint64_t *space_id,
                               uint32_t *group, uint32_t *slot);

/* Write a record: malloc'ed, the caller's. KVK_INVALID: a field is past its limit, named by
 * `field`. KVK_EXHAUSTED: no memory. `record` NULL: only check. */
struct kvk_record_bytes {
    uint8_t *data;
    size_t size;
};
KVK_CHECKED enum kvk_status kvk_record_write_mark(const struct kvk_record_key *key, uint32_t format,
                                                  struct kvk_record_bytes *bytes);
KVK_CHECKED enum kvk_status kvk_record_write_tenant(const struct kvk_record_key *key,
                                                    const struct kvk_tenant_record *record,
                                                    struct kvk_record_bytes *bytes);
KVK_CHECKED enum kvk_status kvk_record_write_credential(const struct kvk_record_key *key,
                                                        const struct kvk_credential_record *record,
                                                        struct kvk_record_bytes *bytes);
KVK_CHECKED enum kvk_status kvk_record_write_space(const struct kvk_record_key *key,
                                                   const struct kvk_space_record *record,
                                                   struct kvk_record_bytes *bytes);
/* A generation or a counter: one number. */
KVK_CHECKED enum kvk_status kvk_record_write_number(enum kvk_record_kind kind,
                                                    const struct kvk_record_key *key,
                                                    uint64_t number,
                                                    struct kvk_record_bytes *bytes);
KVK_CHECKED enum kvk_status kvk_record_write_block(const struct kvk_record_key *key,
                                                   const struct kvk_disk_block_record *record,
                                                   struct kvk_record_bytes *bytes);
KVK_CHECKED enum kvk_status kvk_record_write_value(const struct kvk_record_key *key,
                                                   const void *value, size_t size,
                                                   struct kvk_record_bytes *bytes);

/* Read a record. False: damaged, or not of this kind and version; nothing of it is to be believed.
 * Byte strings of the result point into `data`. */
KVK_CHECKED bool kvk_record_read_mark(const void *key, size_t key_size, const void *data,
                                      size_t size, uint32_t *format);
KVK_CHECKED bool kvk_record_read_tenant(const void *key, size_t key_size, const void *data,
                                        size_t size, struct kvk_tenant_record *record);
KVK_CHECKED bool kvk_record_read_credential(const void *key, size_t key_size, const void *data,
                                            size_t size, struct kvk_credential_record *record);
/* Without the generation, which has a record of its own. */
KVK_CHECKED bool kvk_record_read_space(const void *key, size_t key_size, const void *data,
                                       size_t size, struct kvk_space_record *record);
/* As format 1 of the catalogue had it: its mode is "on". For migration alone. */
KVK_CHECKED bool kvk_record_read_space_1(const void *key, size_t key_size, const void *data,
                                         size_t size, struct kvk_space_record *record);
KVK_CHECKED bool kvk_record_read_number(enum kvk_record_kind kind, const void *key, size_t key_size,
                                        const void *data, size_t size, uint64_t *number);

/* Arrays that a block record points into: stored numbers are not aligned. */
struct kvk_record_scratch {
    uint64_t checksums[KVK_CATALOGUE_SHARDS_MAX];
    uint32_t tokens[KVK_RECORD_TOKENS_MAX];
};
KVK_CHECKED bool kvk_record_read_block(const void *key, size_t key_size, const void *data,
                                       size_t size, struct kvk_record_scratch *scratch,
                                       struct kvk_disk_block_record *record);
KVK_CHECKED bool kvk_record_read_value(const void *key, size_t key_size, const void *data,
                                       size_t size, const void **value, size_t *value_size);

#endif
