#include "daemon/config_machine.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bytes.h"
#include "daemon/devices.h"
#include "daemon/fleet.h"

/* A file that is named, and has to be read. */
static uint32_t check_file(const char *field, const char *path, FILE *file)
{
    if (path[0] == '\0' || access(path, R_OK) == 0) {
        return 0;
    }
    (void)fprintf(file, "on this machine: %s: %s: %s\n", field, path, strerror(errno));
    return 1;
}

/* What is to be made has to have a folder that it can be made in. */
static uint32_t check_parent(const char *field, const char *path, FILE *file)
{
    char parent[KVK_FOLDER_SIZE];
    struct stat there;
    const char *slash = strrchr(path, '/');
    if (path[0] == '\0' || slash == NULL || stat(path, &there) == 0) {
        return 0;
    }
    size_t size = slash == path ? 1 : (size_t)(slash - path);
    if (size >= sizeof(parent)) {
        return 0;
    }
    memcpy(parent, path, size);
    parent[size] = '\0';
    if (stat(parent, &there) == 0 && S_ISDIR(there.st_mode)) {
        return 0;
    }
    (void)fprintf(file, "on this machine: %s: %s: there is no folder %s\n", field, path, parent);
    return 1;
}

/* The fleet's key: read as the daemon reads it, for one that others may read is refused. */
static uint32_t check_key(const char *path, FILE *file)
{
    struct kvk_error error;
    uint8_t key[KVK_FLEET_KEY_SIZE];
    enum kvk_status status = kvk_fleet_key_read(path, "remote.key_file", key, &error);
    kvk_secret_wipe(key, sizeof(key));
    if (status == KVK_OK) {
        return 0;
    }
    (void)fprintf(file, "on this machine: %s\n", error.text);
    return 1;
}

uint32_t kvk_config_machine_print(const struct kvk_config *config, FILE *file)
{
    struct kvk_error error;
    uint32_t count = 0;
    if (kvk_devices_check_memory(config, &error) != KVK_OK) {
        (void)fprintf(file, "on this machine: %s\n", error.text);
        count++;
    }
    count += check_parent("durable.folder", config->durable_folder, file);
    count += check_file("tls.certificate", config->tls_certificate, file);
    count += check_file("tls.key", config->tls_key, file);
    count += check_file("tls.client_ca", config->tls_client_ca, file);
    if (config->remote.seeds[0] != '\0') {
        count += check_key(config->remote.key_file, file);
        count += check_file("remote.password_file", config->remote.password_file, file);
        count += check_file("remote.tls_ca_file", config->remote.tls_ca_file, file);
        count += check_file("remote.tls_certificate", config->remote.tls_certificate, file);
        count += check_file("remote.tls_key", config->remote.tls_key, file);
    }
    return count;
}
