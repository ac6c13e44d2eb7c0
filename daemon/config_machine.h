/*
 * What this machine lacks for a configuration that is right in itself: memory, files, folders.
 *
 * `--check-config` is also asked on other machines than the one that is to serve (in a pipeline, as
 * another user), so what is found here is said beside the answer and does not change it. A start
 * makes the same checks, and more, one after the other; this says all at once.
 */
#ifndef KVK_DAEMON_CONFIG_MACHINE_H
#define KVK_DAEMON_CONFIG_MACHINE_H

#include <stdint.h>
#include <stdio.h>

#include "daemon/config.h"

/* A line for each thing that would keep the daemon from starting here; how many there were. Looks
 * only: nothing is made or opened. */
uint32_t kvk_config_machine_print(const struct kvk_config *config, FILE *file);

#endif
