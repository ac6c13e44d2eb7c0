/*
 * What a power cut could have left of a recorded folder (record.h): everything that was durable at
 * a point of the record, and of what came after the last sync any part: nothing, all, some
 * operations, some sectors of them, or all up to somewhere in the middle of one.
 *
 * Names are as strict: a file that was made is there for sure only once its folder was synced;
 * what came after is there up to a random one of these changes.
 */
#ifndef KVK_TESTS_POWER_IMAGE_H
#define KVK_TESTS_POWER_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/random.h"
#include "tests/power/record.h"

#define IMAGE_SECTOR_BYTES 512U /* written whole or not at all; so LMDB's root page is too */

enum image_mode {
    IMAGE_NOTHING = 0, /* of what was not synced */
    IMAGE_ALL,
    IMAGE_SOME,    /* operations */
    IMAGE_SECTORS, /* of every write */
    IMAGE_PREFIX,  /* in order, up to the middle of one */
};
#define IMAGE_MODE_COUNT 5

struct image_log {
    const uint8_t *bytes; /* mapped, read only */
    size_t size;
    const struct record **records; /* [record_count], ours */
    uint64_t *ends;                /* [record_count] where each ends in the file; ours */
    size_t record_count;
};

/* Aborts on a record that makes no sense. */
void image_log_open(struct image_log *log, const char *path);
void image_log_close(struct image_log *log);

struct image_facts {
    uint64_t durable_writes;
    uint64_t open_writes; /* not synced when the power went */
    uint64_t kept_writes; /* of them, in part or whole */
    uint64_t files;
};

/* Build the folder as it may be after `record_count` records; `folder` is made. */
void image_build(const struct image_log *log, size_t record_count, enum image_mode mode,
                 struct kvk_random *random, const char *folder, struct image_facts *facts);

#endif
