/*
 * In place of disk_uring.c where this build has no liburing.
 */
#include "hosttier/disk_internal.h"

enum kvk_status kvk_disk_uring_start(struct kvk_disk *disk, struct kvk_error *error)
{
    (void)disk;
    return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "", "built without liburing");
}

void kvk_disk_uring_stop(struct kvk_disk *disk)
{
    (void)disk;
}
