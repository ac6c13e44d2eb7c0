/*
 * kvkeepctl: kvkeepd for operators, from a terminal or a script.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/ctl.h"

static const struct ctl_command commands[] = {
    {"status", "the daemon, its tiers, and what is in them", "", ctl_status},
    {"tenants", "what each tenant occupies", "", ctl_tenants},
    {"tenant", "create, list, change, delete tenants", "", ctl_tenant},
    {"credential", "create, list, rotate, revoke, delete credentials", "", ctl_credential},
    {"spaces", "spaces, their geometry and hit rates", "", ctl_spaces},
    {"space", "switch one space on, off, or into shadow mode", "", ctl_space},
    {"sequences", "open sequences", "", ctl_sequences},
    {"leases", "leases by age and owner", "", ctl_leases},
    {"instances", "engines and their processes", "", ctl_instances},
    {"usage", "what each tenant has used and may use", "", ctl_usage_of_tenants},
    {"fleet", "the daemons that share this one's store", "", ctl_fleet},
    {"why", "why was a request refused, or a prompt missed, and what stands in the way", "",
     ctl_why},
    {"doctor", "what to look at: findings, their evidence, and what to do", "", ctl_doctor},
    {"mrc", "hit ratio against memory: what would twice as much bring", "", ctl_mrc},
    {"invalidate", "forget a model, an adapter, a space, a salt, a prefix", "", ctl_invalidate},
    {"publish", "put a cached prefix into the public scope", "", ctl_publish},
    {"unpublish", "take one out of it", "", ctl_unpublish},
    {"public", "prefixes in the public scope", "", ctl_public},
    {"audit", "who changed what: the audit log", "", ctl_audit},
    {"drain", "end the daemon so that the next one starts warm", "", ctl_drain},
    {"stats", "all counters", "", ctl_stats},
    {"top", "live: rates, occupancy, the busiest tenants", "", ctl_top},
    {"replay", "replay a trace of requests", "", ctl_replay},
    {"demo", "workers that share, fork, are preempted and crash; every byte verified", "",
     ctl_demo},
    {"bench", "measure look-ups and copies of a running daemon", "", ctl_bench},
    {"plan", "what a deployment can hold, from a model's config.json and a budget", "", ctl_plan},
};
#define COMMAND_COUNT (sizeof commands / sizeof commands[0])

static int help(FILE *file)
{
    (void)fprintf(
        file, "usage: kvkeepctl [--connect TARGET] [--token TOKEN] [--ca FILE] [--json] COMMAND "
              "…\n\n");
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        (void)fprintf(file, "  %-12s %s\n", commands[i].name, commands[i].summary);
    }
    (void)fprintf(
        file,
        "\nTARGET is unix:PATH or HOST:PORT; without it KVKEEP_TARGET, then the daemon's "
        "default socket.\nTOKEN is a bearer token; without it KVKEEP_TOKEN; the unix socket "
        "also knows the caller's uid.\n"
        "--ca FILE connects by TLS and checks the daemon's certificate against these roots; "
        "--cert FILE and\n--key FILE show one of ours; --server-name NAME is what the "
        "daemon's must be for. Without them\nKVKEEP_CA, KVKEEP_CERTIFICATE, KVKEEP_KEY, "
        "KVKEEP_SERVER_NAME.\n--json prints one JSON value instead of a table.\n"
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon there.\n"
        "kvkeepctl COMMAND --help tells a command's own options; --version, this program's.\n");
    return file == stdout ? CTL_OK : CTL_USAGE;
}

/* Where the value of a common option goes; NULL: it is none of them. */
static const char **common_place(struct ctl_options *options, struct kvkeep_tls *tls,
                                 const char *name)
{
    const struct {
        const char *name;
        const char **place;
    } common[] = {
        {"--connect", &options->target},
        {"--token", &options->token},
        {"--ca", &tls->ca},
        {"--cert", &tls->certificate},
        {"--key", &tls->key},
        {"--server-name", &tls->server_name},
    };
    for (size_t i = 0; i < sizeof common / sizeof common[0]; i++) {
        if (strcmp(common[i].name, name) == 0) {
            return common[i].place;
        }
    }
    return NULL;
}

/* Take what is common out of the arguments, wherever it stands; the rest keeps its order. */
static bool common_take(struct ctl_options *options, struct kvkeep_tls *tls, int *argc, char **argv,
                        bool *wants_help)
{
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        const char **place = common_place(options, tls, argv[i]);
        if (strcmp(argv[i], "--json") == 0) {
            options->json = true;
        } else if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            *wants_help = true;
        } else if (place != NULL) {
            if (i + 1 == *argc) {
                (void)fprintf(stderr, "kvkeepctl: %s wants a value\n", argv[i]);
                return false;
            }
            *place = argv[++i];
        } else {
            argv[kept++] = argv[i];
        }
    }
    *argc = kept;
    argv[kept] = NULL;
    options->connect_given = options->target != NULL;
    return true;
}

int main(int argc, char **argv)
{
    struct ctl_options options = {.target = NULL, .token = getenv("KVKEEP_TOKEN")};
    struct kvkeep_tls tls;
    bool wants_help = false;
    (void)kvkeep_default_tls(&tls);
    if (!common_take(&options, &tls, &argc, argv, &wants_help)) {
        return CTL_USAGE;
    }
    options.tls = tls.ca != NULL || tls.certificate != NULL ? &tls : NULL;
    if (options.target == NULL) {
        options.target = kvkeep_default_target();
    }
    if (argc < 2) {
        return help(wants_help ? stdout : stderr);
    }
    if (strcmp(argv[1], "--version") == 0) {
        (void)printf("kvkeepctl %s\n", KVK_VERSION);
        return CTL_OK;
    }
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(commands[i].name, argv[1]) == 0) {
            if (wants_help) {
                (void)printf("kvkeepctl %s: %s\n", commands[i].name, commands[i].summary);
                char asked[] = "--help";
                char *unknown[] = {argv[1], asked, NULL};
                opterr = 0;
                ctl_usage_is_asked_for();
                int code = commands[i].run(&options, 2, unknown);
                return code == CTL_USAGE ? CTL_OK : code;
            }
            return commands[i].run(&options, argc - 1, argv + 1);
        }
    }
    (void)fprintf(stderr, "kvkeepctl: no %s %s\n", argv[1][0] == '-' ? "option" : "command",
                  argv[1]);
    return help(stderr);
}
