/* Calls of every kind against a real server on a unix socket, by a client on gRPC's C core. */
#include <criterion/criterion.h>

#include "tests/grpc_client.h"
#include "tests/server_fixture.h"

static struct fixture fixture;
static struct client client;

static void begin(void)
{
    fixture_init(&fixture, "calls");
    fixture.options.message_bytes_max = 4u << 20;
    fixture_start(&fixture);
    client_open(&client, fixture.target);
}

static void end(void)
{
    client_close(&client);
    fixture_finish(&fixture);
}

TestSuite(server_calls, .init = begin, .fini = end, .timeout = 60);

static void expect_echo(const char *path, size_t size)
{
    uint8_t *request = malloc(size + 1);
    for (size_t i = 0; i < size; i++) {
        request[i] = (uint8_t)(i * 31 + 7);
    }
    struct client_result result;
    client_unary(&client, path, request, size, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK, "%s: %s", path, result.text);
    cr_assert_eq(result.response_bytes, size);
    cr_expect_eq(memcmp(result.response, request, size), 0);
    client_result_free(&result);
    free(request);
}

Test(server_calls, unary_echoes_any_size)
{
    const size_t sizes[] = {0, 1, 23, 24, 300, 70000, 3u << 20};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        expect_echo("/t/Echo", sizes[i]);
    }
    cr_expect_not(atomic_load(&fixture.counts.on_bulk_thread));
}

Test(server_calls, bulk_and_deferred_run_on_bulk_threads)
{
    for (int i = 0; i < 100; i++) {
        expect_echo("/t/EchoBulk", 100);
        cr_expect(atomic_load(&fixture.counts.on_bulk_thread));
        expect_echo("/t/Defer", 100);
    }
    cr_expect(fixture_wait_live(&fixture, 0, 1));
}

Test(server_calls, peer_is_known)
{
    expect_echo("/t/Echo", 5);
    cr_expect_eq(atomic_load(&fixture.counts.last_uid), getuid());
    cr_expect_eq(atomic_load(&fixture.counts.last_pid), (unsigned)getpid());
    unsigned first = atomic_load(&fixture.counts.last_connection_id);
    cr_expect_gt(first, 0);

    struct client other;
    client_open(&other, fixture.target);
    struct client_result result;
    client_unary(&other, "/t/Echo", "x", 1, NULL, 10000, &result);
    client_result_free(&result);
    cr_expect_neq(atomic_load(&fixture.counts.last_connection_id), first);
    unsigned second = atomic_load(&fixture.counts.last_connection_id);
    client_close(&other);
    cr_assert(fixture_wait(&fixture.counts.connections_closed, 1));
    cr_expect_eq(atomic_load(&fixture.counts.closed_connection_id), second);
}

Test(server_calls, unknown_method_is_unimplemented_at_once)
{
    for (int i = 0; i < 50; i++) {
        struct client_result result;
        client_unary(&client, "/t/NoSuch", "x", 1, NULL, 20000, &result); /* not by its deadline */
        cr_assert_eq(result.code, GRPC_STATUS_UNIMPLEMENTED, "%d %s", result.code, result.text);
    }
    struct kvk_server_stats stats;
    kvk_server_stats(fixture.server, &stats);
    cr_expect_eq(stats.calls_unknown, 50);
    cr_expect_eq(stats.calls, 0);
}

Test(server_calls, failure_carries_status_text_and_details)
{
    struct client_result result;
    client_unary(&client, "/t/Fail", "x", 1, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_FAILED_PRECONDITION);
    cr_expect_str_eq(result.text, "the sequence is swapped out");
    const char expected[] = "code=9 cause=swapped_out field=sequence_id";
    cr_assert_eq(result.details_bytes, sizeof(expected) - 1, "%.*s", (int)result.details_bytes,
                 (char *)result.details);
    cr_expect_eq(memcmp(result.details, expected, sizeof(expected) - 1), 0);
    cr_expect_null(result.response);
}

Test(server_calls, bearer_token_is_read)
{
    struct client_result result;
    client_unary(&client, "/t/Token", "", 0, "secret-token", 10000, &result);
    cr_assert_eq(result.response_bytes, 12);
    cr_expect_eq(memcmp(result.response, "secret-token", 12), 0);
    client_result_free(&result);
    client_unary(&client, "/t/Token", "", 0, NULL, 10000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_UNAUTHENTICATED);
}

Test(server_calls, deadline_reaches_client_and_handler)
{
    struct client_result result;
    client_unary(&client, "/t/Late", "x", 1, NULL, 100, &result);
    cr_expect_eq(result.code, GRPC_STATUS_DEADLINE_EXCEEDED);
    cr_expect(fixture_wait(&fixture.counts.cancels, 1), "the handler is told");
    cr_expect_eq(atomic_load(&fixture.counts.dones), 0);
    fixture_answer_late(&fixture);
    cr_expect(fixture_wait(&fixture.counts.dones, 1));
    cr_expect(fixture_wait_live(&fixture, 0, 1));
    struct kvk_server_stats stats;
    kvk_server_stats(fixture.server, &stats);
    cr_expect_eq(stats.calls_cancelled, 1);
}

static void *answer_soon(void *argument)
{
    struct fixture *of = argument;
    (void)fixture_wait_late(of, 1);
    usleep(20000);
    fixture_answer_late(of);
    return NULL;
}

Test(server_calls, another_thread_may_answer_later)
{
    for (int i = 0; i < 5; i++) {
        pthread_t thread;
        cr_assert_eq(pthread_create(&thread, NULL, answer_soon, &fixture), 0);
        expect_echo("/t/Late", 64);
        cr_assert_eq(pthread_join(thread, NULL), 0);
    }
    cr_expect(fixture_wait(&fixture.counts.dones, 5));
    cr_expect_eq(atomic_load(&fixture.counts.cancels), 0);
}

Test(server_calls, too_large_a_message_is_refused)
{
    size_t size = (4u << 20) + 1;
    uint8_t *request = calloc(1, size);
    struct client_result result;
    client_unary(&client, "/t/Echo", request, size, NULL, 20000, &result);
    cr_expect_eq(result.code, GRPC_STATUS_RESOURCE_EXHAUSTED, "%d %s", result.code, result.text);
    client_result_free(&result);
    free(request);
    expect_echo("/t/Echo", 4u << 20);
    cr_expect(fixture_wait_live(&fixture, 0, 1));
}

Test(server_calls, over_a_method_limit_refused_at_once)
{
    struct client_stream calls[5];
    for (int i = 0; i < 5; i++) {
        cr_assert(client_stream_open(&calls[i], &client, "/t/Late", 20000));
        cr_assert(client_stream_send(&calls[i], "x", 1));
        cr_assert(client_stream_half_close(&calls[i]));
        if (i < 4) {
            cr_assert(fixture_wait_late(&fixture, (unsigned)i + 1));
        }
    }
    struct client_result result;
    client_stream_end(&calls[4], &result);
    cr_expect_eq(result.code, GRPC_STATUS_RESOURCE_EXHAUSTED, "%d %s", result.code, result.text);
    cr_expect_not_null(strstr((char *)result.details, "cause=queue_full"));
    expect_echo("/t/Echo", 10);
    fixture_answer_late(&fixture);
    for (int i = 0; i < 4; i++) {
        uint8_t *bytes;
        size_t size;
        cr_expect(client_stream_receive(&calls[i], &bytes, &size));
        free(bytes);
        client_stream_end(&calls[i], &result);
        cr_expect_eq(result.code, GRPC_STATUS_OK);
    }
    struct kvk_server_stats stats;
    kvk_server_stats(fixture.server, &stats);
    cr_expect_eq(stats.calls_refused, 1);
}
