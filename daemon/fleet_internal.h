/*
 * What the files of the fleet share.
 */
#ifndef KVK_DAEMON_FLEET_INTERNAL_H
#define KVK_DAEMON_FLEET_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/fleet.h"

/* The secret of what is no tenant's: records of generations and of nodes. */
void kvk_fleet_record_secret(const uint8_t key[KVK_FLEET_KEY_SIZE],
                             uint8_t secret[KVK_REMOTE_SECRET_SIZE]);

void kvk_fleet_hmac(const uint8_t key[32], const void *message, size_t size, uint8_t hash[32]);

#endif
