/*
 * kvkeepd: options, the order in which the house is built up and taken down, and signals.
 *
 * The server is made before the pools: it takes the lock on the socket, so that a second daemon is
 * refused before it allocates anything. It accepts nobody until all else stands.
 */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/notify.h"
#include "base/options.h"
#include "daemon/audit.h"
#include "daemon/cache.h"
#include "daemon/config.h"
#include "daemon/config_machine.h"
#include "daemon/devices.h"
#include "daemon/durable.h"
#include "daemon/harden.h"
#include "daemon/http.h"
#include "daemon/publish.h"
#include "daemon/rpc.h"
#include "daemon/server.h"
#include "daemon/server_watchdog.h"
#include "daemon/session.h"
#include "daemon/side_socket.h"
#include "daemon/tenant.h"
#include "hosttier/keeper.h"

#define EXIT_USAGE 2

static const char usage[] =
    "usage: kvkeepd [OPTION...]\n"
    "Keeps the KV cache of language models outside the inference workers.\n"
    "\n"
    "  --config FILE     read FILE; without it the defaults of --print-config\n"
    "  --check-config    say whether the configuration is right, and what it names that is not on\n"
    "                    this machine, and exit\n"
    "  --print-config    print a commented file with all defaults, and exit\n"
    "  --print-manual    print the configuration's page of the manual, and exit\n"
    "\n"
    "These go before what the file says:\n"
    "  --socket PATH     the unix socket; PATH.side beside it passes memory\n"
    "  --device SIZE     budget of the device tier, such as \"8 GiB\"; 0: none\n"
    "  --host SIZE       budget of the host tier; 0: none\n"
    "  --policy NAME     eviction: lru or rp-cost\n"
    "\n"
    "  --forget          free the memory that is kept for the next daemon, and exit\n"
    "  --log LEVEL       debug, info, warning or error; info without it\n"
    "  --test-hooks      serve Admin.TestControl. Never in production\n"
    "  --version, --help\n"
    "\n"
    "Signals: SIGTERM and SIGINT end the daemon after the calls under way; SIGHUP reads the\n"
    "certificates again. When it serves, it "
    "says\n"
    "\"ready socket=PATH\" on standard error, and READY=1 to systemd.\n"
    "Exit: 0 after a signal, 1 on a failure, 2 on wrong options or a wrong configuration.\n";

/* ---- options ---- */

struct arguments {
    const char *config_path;
    const char *socket;
    const char *device;
    const char *host;
    const char *policy;
    const char *keeper; /* this process is to be the keeper, on that socket */
    uint64_t keeper_hold_ms;
    bool forget;
    bool check_config;
    bool test_hooks;
};

enum {
    OPTION_CONFIG = 256,
    OPTION_CHECK_CONFIG,
    OPTION_PRINT_CONFIG,
    OPTION_PRINT_MANUAL,
    OPTION_SOCKET,
    OPTION_DEVICE,
    OPTION_HOST,
    OPTION_POLICY,
    OPTION_LOG,
    OPTION_TEST_HOOKS,
    OPTION_KEEPER,
    OPTION_KEEPER_HOLD_MS,
    OPTION_FORGET,
    OPTION_VERSION,
    OPTION_HELP,
};

static const struct option long_options[] = {
    {"config", required_argument, NULL, OPTION_CONFIG},
    {"check-config", no_argument, NULL, OPTION_CHECK_CONFIG},
    {"print-config", no_argument, NULL, OPTION_PRINT_CONFIG},
    {"print-manual", no_argument, NULL, OPTION_PRINT_MANUAL},
    {"socket", required_argument, NULL, OPTION_SOCKET},
    {"device", required_argument, NULL, OPTION_DEVICE},
    {"host", required_argument, NULL, OPTION_HOST},
    {"policy", required_argument, NULL, OPTION_POLICY},
    {"log", required_argument, NULL, OPTION_LOG},
    {"test-hooks", no_argument, NULL, OPTION_TEST_HOOKS},
    {"forget", no_argument, NULL, OPTION_FORGET},
    /* Hidden: how the daemon starts its keeper. */
    {"keeper", required_argument, NULL, OPTION_KEEPER},
    {"keeper-hold-ms", required_argument, NULL, OPTION_KEEPER_HOLD_MS},
    {"version", no_argument, NULL, OPTION_VERSION},
    {"help", no_argument, NULL, OPTION_HELP},
    {NULL, 0, NULL, 0},
};

static void set_log_level(const char *name)
{
    enum kvk_log_level level;
    if (!kvk_log_level_from_name(name, &level)) {
        (void)fprintf(stderr, "kvkeepd: --log must be debug, info, warning or error\n");
        exit(EXIT_USAGE);
    }
    kvk_log_set_level(level);
}

static void read_arguments(int argc, char **argv, struct arguments *arguments)
{
    for (;;) {
        switch (getopt_long(argc, argv, "", long_options, NULL)) {
        case OPTION_CONFIG:
            arguments->config_path = optarg;
            break;
        case OPTION_CHECK_CONFIG:
            arguments->check_config = true;
            break;
        case OPTION_PRINT_CONFIG:
            kvk_config_print_default();
            exit(EXIT_SUCCESS);
        case OPTION_PRINT_MANUAL:
            kvk_config_print_manual(stdout);
            exit(EXIT_SUCCESS);
        case OPTION_SOCKET:
            arguments->socket = optarg;
            break;
        case OPTION_DEVICE:
            arguments->device = optarg;
            break;
        case OPTION_HOST:
            arguments->host = optarg;
            break;
        case OPTION_POLICY:
            arguments->policy = optarg;
            break;
        case OPTION_LOG:
            set_log_level(optarg);
            break;
        case OPTION_TEST_HOOKS:
            arguments->test_hooks = true;
            break;
        case OPTION_FORGET:
            arguments->forget = true;
            break;
        case OPTION_KEEPER:
            arguments->keeper = optarg;
            break;
        case OPTION_KEEPER_HOLD_MS:
            arguments->keeper_hold_ms = strtoull(optarg, NULL, 10);
            break;
        case OPTION_VERSION:
            (void)printf("kvkeepd %s\n", KVK_VERSION);
            exit(EXIT_SUCCESS);
        case OPTION_HELP:
            (void)fputs(usage, stdout);
            exit(EXIT_SUCCESS);
        case -1:
            if (optind != argc) {
                (void)fprintf(stderr, "kvkeepd: what is \"%s\"? See --help\n", argv[optind]);
                exit(EXIT_USAGE);
            }
            return;
        default:
            (void)fputs("See kvkeepd --help\n", stderr);
            exit(EXIT_USAGE);
        }
    }
}

/* ---- configuration ---- */

/* An option's text into its field, as a file would say it. */
static bool override(struct kvk_config *config, const struct kvk_option_field *field,
                     const char *text)
{
    char reason[128];
    if (text == NULL || kvk_options_read_value(field, config, text, reason, sizeof(reason))) {
        return true;
    }
    (void)fprintf(stderr, "kvkeepd: --%s: %s\n", field->name, reason);
    return false;
}

static bool override_all(struct kvk_config *config, const struct arguments *arguments)
{
    static const char *const policies[] = {"lru", "rp-cost", NULL};
    const struct kvk_option_field socket = {.name = "socket",
                                            .kind = KVK_OPTION_TEXT,
                                            KVK_OPTION_AT(struct kvk_config, unix_path),
                                            .minimum = 1,
                                            .maximum = KVK_PATH_SIZE - 1 - KVK_SOCKET_SUFFIX_SIZE};
    const struct kvk_option_field device = {
        .name = "device", .kind = KVK_OPTION_SIZE, KVK_OPTION_AT(struct kvk_config, device_bytes)};
    const struct kvk_option_field host = {
        .name = "host", .kind = KVK_OPTION_SIZE, KVK_OPTION_AT(struct kvk_config, host_bytes)};
    const struct kvk_option_field policy = {.name = "policy",
                                            .kind = KVK_OPTION_CHOICE,
                                            KVK_OPTION_AT(struct kvk_config, policy),
                                            .choices = policies};
    config->test_hooks = arguments->test_hooks;
    return override(config, &socket, arguments->socket) &&
           override(config, &device, arguments->device) &&
           override(config, &host, arguments->host) && override(config, &policy, arguments->policy);
}

/* False: told on standard error. */
static bool configure(struct kvk_config *config, const struct arguments *arguments)
{
    struct kvk_error error;
    kvk_config_init(config);
    if (arguments->config_path != NULL &&
        kvk_config_load(config, arguments->config_path, &error) != KVK_OK) {
        (void)fprintf(stderr, "kvkeepd: %s\n", error.text);
        return false;
    }
    if (!override_all(config, arguments)) {
        return false;
    }
    if (config->side_path[0] == '\0') {
        int size =
            snprintf(config->side_path, sizeof(config->side_path), "%s.side", config->unix_path);
        if (size < 0 || (size_t)size >= sizeof(config->side_path)) {
            (void)fprintf(stderr, "kvkeepd: the path of the socket is too long\n");
            return false;
        }
    }
    if (kvk_config_check(config, &error) != KVK_OK ||
        (config->http_address[0] != '\0' &&
         kvk_http_check(config->http_address, (enum kvk_http_open)config->http_open, &error) !=
             KVK_OK) ||
        kvk_publish_check(config, &error) != KVK_OK) {
        (void)fprintf(stderr, "kvkeepd: %s\n", error.text);
        return false;
    }
    return true;
}

/* ---- the house ---- */

struct house {
    struct kvk_config *config; /* borrowed */
    struct kvk_durable durable;
    struct kvk_tenants *tenants;
    struct kvk_audit *audit;
    struct kvk_rpc *rpc;
    struct kvk_server *server;
    struct kvk_device *device; /* until the cache has it */
    struct kvk_device *host_device;
    struct kvk_device_info device_info;
    struct kvk_cache *cache;
    struct kvk_side_socket *side;
    struct kvk_watchdog *watchdog;
    struct kvk_http *http;
    struct kvk_publisher *publisher;
};

static enum kvk_status build_server(struct house *house, struct kvk_error *error)
{
    const struct kvk_config *config = house->config;
    struct kvk_server_options options;
    kvk_server_options_init(&options);
    options.unix_path = config->unix_path;
    options.unix_mode = config->unix_mode;
    if (config->tcp_address[0] != '\0') {
        options.tcp_addresses[0] = config->tcp_address;
        options.tcp_address_count = 1;
        options.tcp_insecure = true; /* the configuration's check has allowed what it says */
        options.tls = (struct kvk_tls_options){
            .certificate = config->tls_certificate,
            .key = config->tls_key,
            .client_ca = config->tls_client_ca,
            .client_certificates = (enum kvk_tls_clients)config->tls_client_certificates};
    }
    options.message_bytes_max = config->message_bytes;
    options.keepalive_time_ms = (uint32_t)config->keepalive_ms;
    options.keepalive_timeout_ms = (uint32_t)config->keepalive_timeout_ms;
    options.connections_max = config->connections;
    options.live_calls_max = config->live_calls;
    options.bulk_threads = config->bulk_threads;
    options.owner_calls_max = config->tenant_calls;
    options.owner_threads_max = config->tenant_bulk_threads;
    options.owner_share_percent = config->tenant_share_percent;
    options.spin_us = config->spin_us;
    options.drain_grace_ms = (uint32_t)config->drain_ms;
    kvk_rpc_set_callbacks(house->rpc, &options);
    uint32_t method_count;
    const struct kvk_method *methods = kvk_rpc_methods(house->rpc, &method_count);
    enum kvk_status status =
        kvk_server_create(&options, methods, method_count, &house->server, error);
    if (status == KVK_OK) {
        kvk_server_set_serving(house->server, "kvkeep.v1.Kvkeep", true);
        kvk_server_set_serving(house->server, "kvkeep.v1.Admin", true);
    }
    return status;
}

static enum kvk_status build_cache(struct house *house, struct kvk_error *error)
{
    const struct kvk_config *config = house->config;
    enum kvk_status status = kvk_devices_open(config, &house->device, &house->host_device, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_device *any = house->device != NULL ? house->device : house->host_device;
    any->ops->info(any, &house->device_info);
    const struct kvk_cache_options cache_options = {.config = config,
                                                    .tenants = house->tenants,
                                                    .device = house->device,
                                                    .host_device = house->host_device,
                                                    .catalogue = house->durable.catalogue,
                                                    .disk = house->durable.disk,
                                                    .keeper = house->durable.keeper,
                                                    .threads = true};
    house->device = NULL; /* the cache's, made or not */
    house->host_device = NULL;
    status = kvk_cache_create(&cache_options, &house->cache, error);
    return status == KVK_OK ? kvk_durable_start(house->cache, error) : status;
}

/* A kernel without filters is no reason not to serve. */
static void refuse_calls(const struct kvk_config *config)
{
    struct kvk_error error;
    if (config->seccomp && kvk_harden_calls(&error) != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "no_call_filter", "text=\"%s\"", error.text);
    }
}

static enum kvk_status build(struct house *house, struct kvk_error *error)
{
    const struct kvk_config *config = house->config;
    enum kvk_status status = kvk_durable_open(config, &house->durable, error);
    if (status == KVK_OK) {
        const struct kvk_tenants_options options = {.config = config,
                                                    .catalogue = house->durable.catalogue};
        status = kvk_tenants_open(&options, &house->tenants, error);
        kvk_config_forget_tokens(house->config);
    }
    if (status == KVK_OK) {
        status = kvk_audit_open(config->durable_folder, KVK_AUDIT_BYTES_MAX, &house->audit, error);
    }
    if (status == KVK_OK) {
        const struct kvk_rpc_options options = {.config = config,
                                                .tenants = house->tenants,
                                                .audit = house->audit,
                                                .side_path = config->side_path};
        status = kvk_rpc_create(&options, &house->rpc, error);
    }
    if (status == KVK_OK) {
        status = build_server(house, error);
    }
    if (status == KVK_OK) {
        status = build_cache(house, error);
    }
    if (status == KVK_OK) {
        kvk_rpc_attach(house->rpc, house->cache, house->server, &house->device_info);
        status = kvk_side_socket_create(house->cache, config->side_path, config->unix_mode,
                                        config->connections, &house->side, error);
    }
    if (status == KVK_OK) {
        status = kvk_publisher_create(house->cache, config, &house->publisher, error);
        kvk_rpc_set_publisher(house->rpc, house->publisher);
    }
    if (status == KVK_OK) {
        refuse_calls(config); /* before anybody is served */
        status = kvk_server_start(house->server, error);
    }
    if (status == KVK_OK) {
        status = kvk_watchdog_create(house->server, house->cache, &house->watchdog, error);
    }
    if (status == KVK_OK && config->http_address[0] != '\0') {
        const struct kvk_http_options options = {.address = config->http_address,
                                                 .open = (enum kvk_http_open)config->http_open,
                                                 .rpc = house->rpc,
                                                 .cache = house->cache};
        status = kvk_http_create(&options, &house->http, error);
    }
    return status;
}

static void device_close(struct kvk_device *device)
{
    if (device != NULL) {
        device->ops->close(device);
    }
}

/* From the roof down; whatever stands. */
static void take_down(struct house *house)
{
    kvk_http_destroy(house->http);
    kvk_watchdog_destroy(house->watchdog);
    kvk_server_destroy(house->server);
    kvk_rpc_destroy(house->rpc);
    kvk_publisher_destroy(house->publisher);
    kvk_side_socket_destroy(house->side);
    kvk_durable_stop(house->cache);
    kvk_cache_destroy(house->cache);
    device_close(house->device);
    device_close(house->host_device);
    kvk_audit_close(house->audit);
    kvk_tenants_destroy(house->tenants);
    kvk_durable_close(&house->durable);
    kvk_config_finish(house->config);
}

/* ---- process ---- */

/* One line for whoever waits for the daemon, whatever the log's level. */
static void say_ready(const struct house *house)
{
    const struct kvk_config *config = house->config;
    if (config->tcp_address[0] != '\0' && config->credential_count == 0 && config->tcp_insecure) {
        kvk_log(KVK_LOG_WARNING, "insecure_tcp",
                "text=\"whoever reaches the port acts for the tenant default\"");
    }
    if (config->test_hooks) {
        kvk_log(KVK_LOG_WARNING, "test_hooks", "text=\"for tests, never in production\"");
    }
    char ports[64] = "";
    size_t size = 0;
    if (config->tcp_address[0] != '\0') {
        size = (size_t)snprintf(ports, sizeof(ports), " tcp_port=%u",
                                kvk_server_tcp_port(house->server, 0));
    }
    if (house->http != NULL) {
        (void)snprintf(ports + size, sizeof(ports) - size, " http_port=%u",
                       kvk_http_port(house->http));
    }
    (void)fprintf(stderr, "ready socket=%s%s\n", config->unix_path, ports);
    kvk_notify("READY=1");
}

static void wait_for_end(struct kvk_server *server, const sigset_t *signals)
{
    for (;;) {
        int signal_number = 0;
        if (sigwait(signals, &signal_number) != 0) {
            continue;
        }
        if (signal_number != SIGHUP) {
            kvk_log(KVK_LOG_INFO, "draining", "signal=%d", signal_number);
            return;
        }
        struct kvk_error error;
        if (kvk_server_reload(server, &error) == KVK_OK) {
            kvk_log(KVK_LOG_INFO, "reloaded",
                    "text=\"certificates; restart to read the configuration\"");
        } else {
            kvk_log(KVK_LOG_ERROR, "reload_failed", "reason=\"%s\"", error.text);
        }
    }
}

static int serve(struct kvk_config *config, const sigset_t *signals)
{
    struct house house = {.config = config};
    struct kvk_error error;
    int result = EXIT_SUCCESS;
    if (build(&house, &error) == KVK_OK) {
        say_ready(&house);
        wait_for_end(house.server, signals);
        kvk_notify("STOPPING=1\nSTATUS=ending");
        kvk_http_destroy(house.http); /* its calls would need the rpc */
        house.http = NULL;
        kvk_watchdog_destroy(house.watchdog);
        house.watchdog = NULL;
        kvk_server_drain(house.server);
        kvk_rpc_detach(house.rpc);
    } else {
        (void)fprintf(stderr, "kvkeepd: %s\n", error.text);
        result = EXIT_FAILURE; /* the next time the machine may have what it lacks */
    }
    take_down(&house);
    kvk_log(KVK_LOG_INFO, "ended", "result=%d", result);
    return result;
}

static int forget(struct kvk_config *config)
{
    struct kvk_error error;
    enum kvk_status status = kvk_durable_forget(config, &error);
    if (status == KVK_OK) {
        (void)printf("nothing is kept any more\n");
    } else {
        (void)fprintf(stderr, "kvkeepd: %s\n", error.text);
    }
    kvk_config_finish(config);
    return status == KVK_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    struct arguments arguments = {.config_path = NULL};
    struct kvk_config config;
    read_arguments(argc, argv, &arguments);
    if (arguments.keeper != NULL) {
        struct kvk_error error;
        if (kvk_harden_privileges("", "", false, &error) != KVK_OK) {
            kvk_log(KVK_LOG_WARNING, "keeper_privileges_kept", "text=\"%s\"", error.text);
        }
        return kvk_keeper_main(arguments.keeper, arguments.keeper_hold_ms);
    }
    kvk_harden_begin();
    bool configured = configure(&config, &arguments);
    if (!configured || arguments.check_config) {
        if (configured) {
            (void)printf("the configuration is right\n");
            (void)kvk_config_machine_print(&config, stdout);
        }
        kvk_config_finish(&config);
        return configured ? EXIT_SUCCESS : EXIT_USAGE;
    }

    struct kvk_error error;
    if (kvk_harden_privileges(config.user, config.group, config.core_dumps, &error) != KVK_OK) {
        (void)fprintf(stderr, "kvkeepd: %s\n", error.text);
        kvk_config_finish(&config);
        return EXIT_USAGE;
    }
    if (arguments.forget) {
        return forget(&config);
    }
    (void)kvk_notify_open(); /* while the manager's folder can be reached */

    /* Before any thread is there: all inherit it, and this one takes the signals by sigwait(). */
    sigset_t signals;
    (void)sigemptyset(&signals);
    (void)sigaddset(&signals, SIGTERM);
    (void)sigaddset(&signals, SIGINT);
    (void)sigaddset(&signals, SIGHUP);
    (void)pthread_sigmask(SIG_BLOCK, &signals, NULL);
    (void)signal(SIGPIPE, SIG_IGN);
    return serve(&config, &signals);
}
