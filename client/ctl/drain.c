/*
 * kvkeepctl drain: a planned restart. The daemon takes no new sequences, writes what must be
 * written and ends; the next one starts warm with what was kept.
 */
#include <getopt.h>
#include <stdio.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

/* The daemon bounds what it does by its own configuration, the longest of which this is. */
#define WAIT_MS (3600U * 1000 + 10000)

int ctl_drain(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option names[] = {{NULL, 0, NULL, 0}};
    static const struct ctl_command command = {
        .name = "drain",
        .usage = "  Ends the daemon; start the next one on the same folder. Needs admin rights.\n"
                 "  What waits to be written to disk is written first, for durable.drain_flush_ms\n"
                 "  at most; how many blocks were not is said.\n"};
    if (getopt_long(argc, argv, "", names, NULL) != -1 || optind != argc) {
        return ctl_usage(&command, "no arguments");
    }
    int code = CTL_OK;
    Kvkeep__V1__DrainRequest request = KVKEEP__V1__DRAIN_REQUEST__INIT;
    Kvkeep__V1__DrainResponse *response =
        ctl_admin_call_within(options, "/kvkeep.v1.Admin/Drain", &request.base,
                              &kvkeep__v1__drain_response__descriptor, WAIT_MS, &code);
    if (response == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(json_pack("{s:b, s:I, s:I, s:I, s:I, s:I}", "kept", response->kept,
                                 "kept_blocks", (json_int_t)response->kept_blocks, "disk_blocks",
                                 (json_int_t)response->disk_blocks, "demoted_blocks",
                                 (json_int_t)response->demoted_blocks, "flushed_blocks",
                                 (json_int_t)response->flushed_blocks, "unflushed_blocks",
                                 (json_int_t)response->unflushed_blocks));
    } else {
        (void)printf("draining: %s blocks in memory %s, ", ctl_count(response->kept_blocks),
                     response->kept ? "stay for the next daemon"
                                    : "go with the daemon, for it has no keeper");
        (void)printf("%s are on disk\n", ctl_count(response->disk_blocks));
        if (response->unflushed_blocks > 0) {
            (void)printf(
                "%s blocks were not written to disk in time; durable.drain_flush_ms bounds "
                "it\n",
                ctl_count(response->unflushed_blocks));
        }
    }
    kvkeep__v1__drain_response__free_unpacked(response, NULL);
    return code;
}
