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
struct kvk_credential_section {
    struct kvk_credential_config credential; /* first: fields lie in it */
    const struct kvk_config_file *file;      /* borrowed: where its tenants are looked up */
};

/* What a file is read into. */
struct kvk_config_file {
    struct kvk_config config;                   /* first: sections lie in it */
    struct kvk_credential_section *credentials; /* [KVK_CREDENTIAL_COUNT_MAX] once there is one */
    uint32_t credential_count;
};

extern const struct kvk_option_table kvk_config_table;

/* config_tenants.c: [tenant NAME] and [credential NAME] */
#define KVK_CONFIG_TENANT_FIELD_COUNT 15
#define KVK_CONFIG_CREDENTIAL_FIELD_COUNT 5
extern const struct kvk_option_field kvk_config_tenant_fields[KVK_CONFIG_TENANT_FIELD_COUNT];
extern const struct kvk_option_field
    kvk_config_credential_fields[KVK_CONFIG_CREDENTIAL_FIELD_COUNT];
enum kvk_status kvk_config_open_tenant(void *target, const char *label, void **record,
                                       struct kvk_error *error);
enum kvk_status kvk_config_open_credential(void *target, const char *label, void **record,
                                           struct kvk_error *error);

/* config_remote.c: [remote] */
#define KVK_CONFIG_REMOTE_FIELD_COUNT 30
extern const struct kvk_option_field kvk_config_remote_fields[KVK_CONFIG_REMOTE_FIELD_COUNT];
enum kvk_status kvk_config_remote_check(const struct kvk_config *config, struct kvk_error *error);

#endif
