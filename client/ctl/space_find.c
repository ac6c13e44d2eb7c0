/* Which space an operator means. */
#include <stdlib.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

static bool is_number(const char *text)
{
    return text[0] != '\0' && strspn(text, "0123456789") == strlen(text);
}

uint64_t ctl_space_find(const struct ctl_options *options, const char *command, const char *name,
                        const char *tenant, int *code)
{
    *code = CTL_OK;
    if (is_number(name)) {
        return strtoull(name, NULL, 10);
    }
    Kvkeep__V1__ListSpacesRequest request = KVKEEP__V1__LIST_SPACES_REQUEST__INIT;
    request.tenant.data = (uint8_t *)(uintptr_t)tenant;
    request.tenant.len = tenant == NULL ? 0 : strlen(tenant);
    Kvkeep__V1__ListSpacesResponse *response =
        ctl_admin_call(options, "/kvkeep.v1.Admin/ListSpaces", &request.base,
                       &kvkeep__v1__list_spaces_response__descriptor, code);
    if (response == NULL) {
        return 0;
    }
    uint64_t id = 0;
    uint32_t found = 0;
    for (size_t i = 0; i < response->n_spaces; i++) {
        const Kvkeep__V1__SpaceInfo *space = response->spaces[i];
        if (space->identity != NULL && space->identity->model.len == strlen(name) &&
            memcmp(space->identity->model.data, name, strlen(name)) == 0) {
            id = space->space_id;
            found++;
        }
    }
    kvkeep__v1__list_spaces_response__free_unpacked(response, NULL);
    if (found != 1) {
        (void)fprintf(stderr, "kvkeepctl %s: %u spaces have model %s: %s\n", command, found, name,
                      found == 0 ? "see kvkeepctl spaces" : "say --tenant, or the space's number");
        *code = CTL_FAILED;
        return 0;
    }
    return id;
}
