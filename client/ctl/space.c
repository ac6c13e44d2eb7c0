/*
 * kvkeepctl space mode: switch one space off, into shadow mode, or on again.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

static const char usage[] =
    "  space mode ID on|shadow|off    ID as `spaces` lists them. off: every call for the space is\n"
    "                                 refused, its blocks stay; shadow: look-ups miss, and what "
    "is\n"
    "                                 sealed is found by nobody, then or later. The stricter of "
    "it\n"
    "                                 and the tenant's mode holds\n";

static int wrong(const char *complaint)
{
    const struct ctl_command command = {.name = "space", .usage = usage};
    return ctl_usage(&command, complaint);
}

static bool parse_mode(const char *text, Kvkeep__V1__Mode *mode)
{
    static const Kvkeep__V1__Mode modes[] = {
        KVKEEP__V1__MODE__MODE_ON, KVKEEP__V1__MODE__MODE_SHADOW, KVKEEP__V1__MODE__MODE_OFF};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        if (strcmp(text, ctl_mode_name(modes[i])) == 0) {
            *mode = modes[i];
            return true;
        }
    }
    return false;
}

static int mode_set(const struct ctl_options *options, uint64_t space_id, Kvkeep__V1__Mode mode)
{
    Kvkeep__V1__SetSpaceModeRequest request = KVKEEP__V1__SET_SPACE_MODE_REQUEST__INIT;
    int code = CTL_OK;
    request.space_id = space_id;
    request.mode = mode;
    Kvkeep__V1__SetSpaceModeResponse *answer =
        ctl_admin_call(options, "/kvkeep.v1.Admin/SetSpaceMode", &request.base,
                       &kvkeep__v1__set_space_mode_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(
            json_pack("{s:I, s:s}", "space_id", (json_int_t)space_id, "mode", ctl_mode_name(mode)));
    } else {
        (void)printf("space %llu: %s\n", (unsigned long long)space_id, ctl_mode_name(mode));
    }
    kvkeep__v1__set_space_mode_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

int ctl_space(const struct ctl_options *options, int argc, char **argv)
{
    Kvkeep__V1__Mode mode;
    uint64_t space_id;
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        return wrong(NULL);
    }
    if (argc != 4 || strcmp(argv[1], "mode") != 0) {
        return wrong("mode, the number of a space, and on, shadow or off");
    }
    if (!ctl_parse_count(argv[2], &space_id) || space_id == 0) {
        return wrong("the number of a space, as `spaces` lists them");
    }
    if (!parse_mode(argv[3], &mode)) {
        return wrong("on, shadow or off");
    }
    return mode_set(options, space_id, mode);
}
