/*
 * The table of all fields of the configuration, and what reading a file needs beside them. For
 * config.c alone.
 */
#ifndef KVK_DAEMON_CONFIG_TABLE_H
#define KVK_DAEMON_CONFIG_TABLE_H

#include "base/options.h"
#include "daemon/config.h"

struct kvk_config_file;

/* The record of [credential NAME] while a file is read. */
struct kvk_credential_record {
    struct kvk_credential_config credential; /* first: fields lie in it */
    const struct kvk_config_file *file;      /* borrowed: where its tenants are looked up */
};

/* What a file is read into. */
struct kvk_config_file {
    struct kvk_config config;                  /* first: sections lie in it */
    struct kvk_credential_record *credentials; /* [KVK_CREDENTIAL_COUNT_MAX] once there is one */
    uint32_t credential_count;
};

extern const struct kvk_option_table kvk_config_table;

#endif
