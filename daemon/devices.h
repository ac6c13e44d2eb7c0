/*
 * The devices that the configuration asks for: what the tiers' memory lies on.
 *
 * One binary serves every machine: where GPUs are asked for and cannot be used, it says so and the
 * device tier lies in the machine's memory, unless they are required.
 */
#ifndef KVK_DAEMON_DEVICES_H
#define KVK_DAEMON_DEVICES_H

#include "daemon/config.h"
#include "gpu/device.h"

/* Tiers of more memory than the machine has are refused, unless the configuration allows it
 * (KVK_INVALID names the field and the limit). Each the caller's to close, also after an error,
 * `host` first; NULL: there is no such tier. With GPUs there is always one of the host, for what
 * workers map beside the tiers. */
KVK_CHECKED enum kvk_status kvk_devices_open(const struct kvk_config *config,
                                             struct kvk_device **device, struct kvk_device **host,
                                             struct kvk_error *error);

/* The first of these checks alone: would the tiers fit into this machine's memory? A device tier
 * that is to lie on GPUs is taken to lie there. */
KVK_CHECKED enum kvk_status kvk_devices_check_memory(const struct kvk_config *config,
                                                     struct kvk_error *error);

#endif
