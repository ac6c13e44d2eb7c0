/* The server's life: its socket and lock, what it refuses at start, drain, health, reflection. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "google/protobuf/descriptor.pb-c.h"
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "tests/grpc_client.h"
#include "tests/server_fixture.h"

static struct fixture fixture;
static struct client client;

static void begin(void)
{
    fixture_init(&fixture, "life");
}

static void end(void)
{
    if (fixture.server != NULL) {
        fixture_finish(&fixture);
    }
}

TestSuite(server_life, .init = begin, .fini = end, .timeout = 60);

static enum kvk_status try_create(const struct kvk_server_options *options, struct kvk_error *error)
{
    struct kvk_server *server = NULL;
    enum kvk_status status = kvk_server_create(options, NULL, 0, &server, error);
    kvk_server_destroy(server);
    return status;
}

/* ---- sockets ---- */

Test(server_life, socket_has_its_mode_whatever_the_umask)
{
    (void)umask(077);
    fixture.options.unix_mode = 0660;
    fixture_start(&fixture);
    struct stat info;
    cr_assert_eq(stat(fixture.path, &info), 0);
    cr_expect(S_ISSOCK(info.st_mode));
    cr_expect_eq(info.st_mode & 07777, 0660);
    fixture_finish(&fixture);
    cr_expect_neq(stat(fixture.path, &info), 0, "the socket file goes with the server");

    fixture_init(&fixture, "life");
    (void)umask(0);
    fixture_start(&fixture);
    cr_assert_eq(stat(fixture.path, &info), 0);
    cr_expect_eq(info.st_mode & 07777, 0600);
}

Test(server_life, second_daemon_is_refused_and_changes_nothing)
{
    fixture_start(&fixture);
    struct kvk_error error;
    cr_expect_eq(try_create(&fixture.options, &error), KVK_UNAVAILABLE);
    char pid[32];
    (void)snprintf(pid, sizeof(pid), "(pid %d)", (int)getpid());
    cr_expect_not_null(strstr(error.text, pid), "%s", error.text);
    cr_expect_str_eq(error.field, "unix_path");

    client_open(&client, fixture.target);
    struct client_result result;
    client_unary(&client, "/t/Echo", "x", 1, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK, "the first one still serves");
    client_result_free(&result);
    client_close(&client);
}

Test(server_life, stale_socket_is_replaced_other_files_are_not)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, fixture.path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    cr_assert_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    (void)close(fd);
    struct kvk_error error;
    cr_expect_eq(try_create(&fixture.options, &error), KVK_OK, "%s", error.text);

    fd = open(fixture.path, O_CREAT | O_WRONLY, 0600);
    cr_assert_geq(fd, 0);
    (void)close(fd);
    cr_expect_eq(try_create(&fixture.options, &error), KVK_INVALID);
    cr_expect_eq(access(fixture.path, F_OK), 0);
    (void)unlink(fixture.path);
}

static void expect_refused(const char *field, enum kvk_status expected)
{
    struct kvk_error error;
    enum kvk_status status = try_create(&fixture.options, &error);
    cr_expect_eq(status, expected, "%s: %s", field, kvk_status_name(status));
    cr_expect_str_eq(error.field, field, "%s: %s", error.field, error.text);
}

Test(server_life, bad_options_name_their_field)
{
    char long_path[300];
    memset(long_path, 'a', sizeof(long_path));
    long_path[0] = '/';
    long_path[sizeof(long_path) - 1] = '\0';
    fixture.options.unix_path = long_path;
    expect_refused("unix_path", KVK_INVALID);
    fixture.options.unix_path = "/no/such/folder/socket";
    expect_refused("unix_path", KVK_UNAVAILABLE);
    fixture.options.unix_path = NULL;
    expect_refused("unix_path", KVK_INVALID);

    fixture.options.tcp_addresses[0] = "127.0.0.1:0";
    fixture.options.tcp_address_count = 1;
    expect_refused("tcp_addresses", KVK_INVALID); /* not insecure on purpose */
    fixture.options.tcp_insecure = true;
    const char *bad[] = {"", ":", "127.0.0.1", "127.0.0.1:", ":80", "::1:80", "[::1]", "[::1:80"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        fixture.options.tcp_addresses[0] = bad[i];
        expect_refused("tcp_addresses", KVK_INVALID);
    }
    fixture.options.tcp_addresses[0] = "127.0.0.1:0";
    fixture.options.bulk_threads = 0;
    expect_refused("bulk_threads", KVK_INVALID);
    fixture.options.bulk_threads = 1;
    fixture.options.message_bytes_max = UINT64_MAX;
    expect_refused("message_bytes_max", KVK_INVALID);
}

Test(server_life, tcp_serves_when_insecure_on_purpose)
{
    fixture.options.unix_path = NULL;
    fixture.options.tcp_addresses[0] = "127.0.0.1:0";
    fixture.options.tcp_address_count = 1;
    fixture.options.tcp_insecure = true;
    fixture_start(&fixture);
    uint16_t port = kvk_server_tcp_port(fixture.server, 0);
    cr_assert_gt(port, 0);
    char target[64];
    (void)snprintf(target, sizeof(target), "127.0.0.1:%u", port);
    client_open(&client, target);
    struct client_result result;
    client_unary(&client, "/t/Echo", "x", 1, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK, "%s", result.text);
    client_result_free(&result);
    cr_expect_eq(atomic_load(&fixture.counts.last_uid), UINT32_MAX);
    client_close(&client);
    cr_expect(fixture_wait(&fixture.counts.connections_closed, 1));

    struct kvk_server_options second = fixture.options;
    second.tcp_addresses[0] = target;
    struct kvk_error error;
    cr_expect_eq(try_create(&second, &error), KVK_UNAVAILABLE, "the port is not shared");
}

Test(server_life, connections_are_bounded)
{
    fixture.options.connections_max = 2;
    fixture_start(&fixture);
    struct client clients[3];
    struct client_result result;
    for (int i = 0; i < 3; i++) {
        client_open(&clients[i], fixture.target);
        client_unary(&clients[i], "/t/Echo", "x", 1, NULL, 2000, &result);
        cr_expect_eq(result.code, i < 2 ? GRPC_STATUS_OK : GRPC_STATUS_UNAVAILABLE, "%d: %d", i,
                     result.code);
        client_result_free(&result);
    }
    struct kvk_server_stats stats;
    kvk_server_stats(fixture.server, &stats);
    cr_expect_geq(stats.connections_refused, 1);
    for (int i = 0; i < 3; i++) {
        client_close(&clients[i]);
    }
}

/* A peer that is killed is seen at once, though it had no call. */
Test(server_life, death_of_a_peer_is_seen)
{
    int ready[2];
    cr_assert_eq(pipe(ready), 0);
    pid_t child = fork(); /* before gRPC starts */
    if (child == 0) {
        char path[64];
        ssize_t size = read(ready[0], path, sizeof(path));
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        memcpy(address.sun_path, path, (size_t)size);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        (void)!connect(fd, (struct sockaddr *)&address, sizeof(address));
        (void)pause();
        _exit(0);
    }
    fixture_start(&fixture);
    cr_assert_gt(write(ready[1], fixture.path, strlen(fixture.path) + 1), 0);
    cr_assert(fixture_wait_live(&fixture, 0, 1));
    (void)kill(child, SIGKILL);
    cr_expect(fixture_wait(&fixture.counts.connections_closed, 1));
    (void)waitpid(child, NULL, 0);
}

/* ---- drain ---- */

static void *drain(void *argument)
{
    kvk_server_drain(argument);
    return NULL;
}

Test(server_life, drain_lets_calls_end_within_the_grace)
{
    fixture_start(&fixture);
    client_open(&client, fixture.target);
    struct client_stream late;
    cr_assert(client_stream_open(&late, &client, "/t/Late", 30000));
    cr_assert(client_stream_send(&late, "hello", 5));
    cr_assert(client_stream_half_close(&late));
    cr_assert(fixture_wait_late(&fixture, 1));

    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, drain, fixture.server), 0);
    cr_assert(fixture_wait(&fixture.counts.drains, 1));
    usleep(100000);
    struct client other;
    struct client_result result;
    client_open(&other, fixture.target);
    client_unary(&other, "/t/Echo", "x", 1, NULL, 500, &result);
    cr_expect_neq(result.code, GRPC_STATUS_OK, "nobody new is let in");
    client_result_free(&result);
    client_close(&other);

    fixture_answer_late(&fixture);
    uint8_t *bytes;
    size_t size;
    cr_expect(client_stream_receive(&late, &bytes, &size));
    cr_expect_eq(size, 5);
    free(bytes);
    client_stream_end(&late, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK, "%d %s", result.code, result.text);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_expect_eq(atomic_load(&fixture.counts.cancels), 0);
    client_close(&client);
}

Test(server_life, drain_cancels_what_outlasts_the_grace)
{
    fixture.options.drain_grace_ms = 100;
    fixture_start(&fixture);
    client_open(&client, fixture.target);
    struct client_stream pipe_stream;
    struct client_stream late;
    cr_assert(client_stream_open(&pipe_stream, &client, "/t/PipeBulk", 30000));
    cr_assert(client_stream_open(&late, &client, "/t/Late", 30000));
    cr_assert(client_stream_send(&late, "x", 1));
    cr_assert(client_stream_half_close(&late));
    cr_assert(fixture_wait_late(&fixture, 1));
    cr_assert(fixture_wait_live(&fixture, 2, 1));

    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, drain, fixture.server), 0);
    cr_expect(fixture_wait(&fixture.counts.cancels, 2), "both handlers are told");
    struct kvk_server_stats stats;
    usleep(100000);
    kvk_server_stats(fixture.server, &stats);
    cr_expect_eq(stats.live_calls, 1, "the drain waits for the handler that has not ended");
    fixture_answer_late(&fixture);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    struct client_result result;
    client_stream_end(&pipe_stream, &result);
    cr_expect_neq(result.code, GRPC_STATUS_OK);
    client_stream_end(&late, &result);
    cr_expect_neq(result.code, GRPC_STATUS_OK);
    client_close(&client);
}

/* ---- health ---- */

static size_t pack_health(const char *service, uint8_t *buffer)
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)(uintptr_t)service;
    return grpc__health__v1__health_check_request__pack(&request, buffer);
}

static int unpack_health(const uint8_t *bytes, size_t size)
{
    Grpc__Health__V1__HealthCheckResponse *response =
        grpc__health__v1__health_check_response__unpack(NULL, size, bytes);
    cr_assert_not_null(response);
    int status = (int)response->status;
    grpc__health__v1__health_check_response__free_unpacked(response, NULL);
    return status;
}

/* The serving status, or minus the gRPC code. */
static int check(const char *service)
{
    uint8_t request[256];
    struct client_result result;
    client_unary(&client, "/grpc.health.v1.Health/Check", request, pack_health(service, request),
                 NULL, 10000, &result);
    int status =
        result.code == 0 ? unpack_health(result.response, result.response_bytes) : -result.code;
    client_result_free(&result);
    return status;
}

Test(server_life, health_check_per_service)
{
    fixture_start(&fixture);
    client_open(&client, fixture.target);
    cr_expect_eq(check(""), 1);
    cr_expect_eq(check("t"), 1);
    cr_expect_eq(check("none"), -GRPC_STATUS_NOT_FOUND);
    kvk_server_set_serving(fixture.server, "t", false);
    cr_expect_eq(check("t"), 2);
    cr_expect_eq(check(""), 1);
    client_close(&client);
}

static int watch_next(struct client_stream *stream)
{
    uint8_t *bytes;
    size_t size;
    if (!client_stream_receive(stream, &bytes, &size)) {
        return -1;
    }
    int status = unpack_health(bytes, size);
    free(bytes);
    return status;
}

static void watch_open(struct client_stream *stream, const char *service)
{
    uint8_t request[256];
    cr_assert(client_stream_open(stream, &client, "/grpc.health.v1.Health/Watch", 30000));
    cr_assert(client_stream_send(stream, request, pack_health(service, request)));
    cr_assert(client_stream_half_close(stream));
}

Test(server_life, health_watch_follows_and_ends_with_the_drain)
{
    fixture_start(&fixture);
    client_open(&client, fixture.target);
    struct client_stream known;
    struct client_stream unknown;
    watch_open(&known, "t");
    watch_open(&unknown, "later");
    cr_expect_eq(watch_next(&known), 1);
    cr_expect_eq(watch_next(&unknown), 3);
    kvk_server_set_serving(fixture.server, "later", true);
    cr_expect_eq(watch_next(&unknown), 1);
    kvk_server_set_serving(fixture.server, "t", false);
    cr_expect_eq(watch_next(&known), 2);
    client_stream_cancel(&unknown);
    struct client_result result;
    client_stream_end(&unknown, &result);
    kvk_server_set_serving(fixture.server, "t", true);
    cr_expect_eq(watch_next(&known), 1);

    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, drain, fixture.server), 0);
    cr_expect_eq(watch_next(&known), 2);
    cr_expect_eq(watch_next(&known), -1);
    client_stream_end(&known, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    client_close(&client);
}

Test(server_life, health_watchers_are_bounded)
{
    fixture_start(&fixture);
    client_open(&client, fixture.target);
    struct client_stream streams[65];
    for (int i = 0; i < 65; i++) {
        watch_open(&streams[i], "t");
        if (i < 64) {
            cr_assert_eq(watch_next(&streams[i]), 1);
        }
    }
    struct client_result result;
    client_stream_end(&streams[64], &result);
    cr_expect_eq(result.code, GRPC_STATUS_RESOURCE_EXHAUSTED);
    for (int i = 0; i < 64; i++) {
        client_stream_cancel(&streams[i]);
        client_stream_end(&streams[i], &result);
    }
    cr_expect(fixture_wait_live(&fixture, 0, 1));
    watch_open(&streams[0], "t");
    cr_expect_eq(watch_next(&streams[0]), 1);
    client_stream_cancel(&streams[0]);
    client_stream_end(&streams[0], &result);
    client_close(&client);
}

/* ---- reflection ---- */

static Grpc__Reflection__V1__ServerReflectionResponse *
ask(struct client_stream *stream, Grpc__Reflection__V1__ServerReflectionRequest *request)
{
    uint8_t buffer[512];
    size_t size = grpc__reflection__v1__server_reflection_request__pack(request, buffer);
    cr_assert(client_stream_send(stream, buffer, size));
    uint8_t *bytes;
    cr_assert(client_stream_receive(stream, &bytes, &size));
    Grpc__Reflection__V1__ServerReflectionResponse *response =
        grpc__reflection__v1__server_reflection_response__unpack(NULL, size, bytes);
    free(bytes);
    cr_assert_not_null(response);
    return response;
}

static bool lists_service(const Grpc__Reflection__V1__ServerReflectionResponse *response,
                          const char *name)
{
    const Grpc__Reflection__V1__ListServiceResponse *list = response->list_services_response;
    for (size_t i = 0; i < list->n_service; i++) {
        if (strcmp(list->service[i]->name, name) == 0) {
            return true;
        }
    }
    return false;
}

static void ask_symbol(struct client_stream *stream, const char *symbol, const char *file,
                       size_t imports)
{
    Grpc__Reflection__V1__ServerReflectionRequest request =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL;
    request.file_containing_symbol = (char *)(uintptr_t)symbol;
    Grpc__Reflection__V1__ServerReflectionResponse *response = ask(stream, &request);
    if (file == NULL) {
        cr_expect_eq(
            response->message_response_case,
            GRPC__REFLECTION__V1__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE);
        cr_expect_eq(response->error_response->error_code, GRPC_STATUS_NOT_FOUND);
    } else {
        Grpc__Reflection__V1__FileDescriptorResponse *files = response->file_descriptor_response;
        cr_assert_not_null(files, "%s", symbol);
        cr_expect_eq(files->n_file_descriptor_proto, 1 + imports);
        Google__Protobuf__FileDescriptorProto *descriptor =
            google__protobuf__file_descriptor_proto__unpack(
                NULL, files->file_descriptor_proto[0].len, files->file_descriptor_proto[0].data);
        cr_assert_not_null(descriptor);
        cr_expect_str_eq(descriptor->name, file);
        google__protobuf__file_descriptor_proto__free_unpacked(descriptor, NULL);
    }
    grpc__reflection__v1__server_reflection_response__free_unpacked(response, NULL);
}

static void reflect(const char *path)
{
    struct client_stream stream;
    cr_assert(client_stream_open(&stream, &client, path, 30000));
    Grpc__Reflection__V1__ServerReflectionRequest request =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__INIT;
    request.message_request_case =
        GRPC__REFLECTION__V1__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES;
    request.list_services = (char *)(uintptr_t) "";
    Grpc__Reflection__V1__ServerReflectionResponse *response = ask(&stream, &request);
    cr_assert_not_null(response->list_services_response);
    cr_expect(lists_service(response, "kvkeep.v1.Kvkeep"));
    cr_expect(lists_service(response, "grpc.health.v1.Health"));
    cr_expect(lists_service(response, "grpc.reflection.v1.ServerReflection"));
    grpc__reflection__v1__server_reflection_response__free_unpacked(response, NULL);

    ask_symbol(&stream, "kvkeep.v1.Kvkeep.Lookup", "kvkeep/v1/kvkeep.proto", 0);
    ask_symbol(&stream, "google.rpc.Status.details", "google/rpc/status.proto", 1);
    ask_symbol(&stream, "kvkeep.v1.NoSuch", NULL, 0);
    cr_assert(client_stream_half_close(&stream));
    struct client_result result;
    client_stream_end(&stream, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
}

Test(server_life, reflection_answers_in_both_versions)
{
    fixture_start(&fixture);
    client_open(&client, fixture.target);
    reflect("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo");
    reflect("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo");
    client_close(&client);
}
