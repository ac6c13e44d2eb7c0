/*
 * What the recording library writes down, and the builder of images reads: one record after
 * another, each followed by size_bytes or payload bytes as its operation says.
 *
 * A write is begun with its bytes and ended; a sync is begun and ended. So what is durable at a
 * point of the record is known: writes of the file that ended before a sync began that has ended.
 */
#ifndef KVK_TESTS_POWER_RECORD_H
#define KVK_TESTS_POWER_RECORD_H

#include <stdint.h>

#define RECORD_MAGIC 0x5245434fU
#define RECORD_NAME_SIZE 256

enum record_operation {
    RECORD_CREATE = 1,  /* payload: name. A file, by its number from here on */
    RECORD_MKDIR,       /* payload: name */
    RECORD_UNLINK,      /* payload: name */
    RECORD_RENAME,      /* payload: old name, NUL, new name */
    RECORD_WRITE_BEGIN, /* payload: the bytes, size_bytes of them, at offset */
    RECORD_WRITE_END,   /* size_bytes: so many were written */
    RECORD_ALLOCATE,    /* [offset, offset + size_bytes) is there, zeros where it was not */
    RECORD_PUNCH,       /* [offset, offset + size_bytes) is zeros */
    RECORD_TRUNCATE,    /* to size_bytes */
    RECORD_SYNC_BEGIN,  /* of the file's bytes and size */
    RECORD_SYNC_END,
    RECORD_FOLDER_SYNC_BEGIN, /* payload: name of the folder, "" for the top */
    RECORD_FOLDER_SYNC_END,
};

#define RECORD_FLAG_SYNCED 1U /* of a write: durable when it ends (O_DSYNC) */

struct record {
    uint32_t magic;
    uint8_t operation;
    uint8_t flags;
    uint16_t reserved;
    uint32_t file;   /* 0: none */
    uint32_t number; /* of a begin and its end */
    uint64_t offset;
    uint64_t size_bytes;
    uint64_t payload_bytes;
};
_Static_assert(sizeof(struct record) == 40, "no padding in what is stored");

#endif
