/*
 * Whole configuration files of any bytes: what is taken must pass its own check, and what is
 * refused must leave the configuration as it was and say in words where and why.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "daemon/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    struct kvk_config config;
    struct kvk_error error;
    if (fd < 0) {
        fd = memfd_create("fuzz", MFD_CLOEXEC);
        KVK_ASSERT(fd >= 0);
        (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    }
    int cut = ftruncate(fd, 0);
    ssize_t written = pwrite(fd, data, size, 0);
    KVK_ASSERT(cut == 0 && written == (ssize_t)size);

    kvk_config_init(&config);
    struct kvk_config before = config;
    memset(&error, 0, sizeof(error));
    if (kvk_config_load(&config, path, &error) == KVK_OK) {
        enum kvk_status status = kvk_config_check(&config, &error);
        KVK_ASSERT(status == KVK_OK);
        KVK_ASSERT(config.tenant_count <= KVK_TENANT_COUNT_MAX);
        KVK_ASSERT(config.credential_count <= KVK_CREDENTIAL_COUNT_MAX);
        KVK_ASSERT(config.device_bytes > 0 || config.host_bytes > 0);
    } else {
        KVK_ASSERT(error.status != KVK_OK && error.text[0] != '\0');
        KVK_ASSERT(memchr(error.text, '\0', sizeof(error.text)) != NULL);
        KVK_ASSERT(config.device_bytes == before.device_bytes && config.tenants == before.tenants &&
                   config.credentials == before.credentials);
    }
    kvk_config_finish(&config);
    return 0;
}
