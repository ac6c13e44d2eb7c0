/* Streams of every kind: what comes, what goes, back-pressure, half-close, cancel and loss. */
#include <criterion/criterion.h>

#include "tests/grpc_client.h"
#include "tests/server_fixture.h"

static struct fixture fixture;
static struct client client;

static void begin(void)
{
    fixture_init(&fixture, "streams");
    fixture.options.send_queue_max = 4;
    fixture_start(&fixture);
    client_open(&client, fixture.target);
}

static void end(void)
{
    client_close(&client);
    fixture_finish(&fixture);
}

TestSuite(server_streams, .init = begin, .fini = end, .timeout = 60);

static void open_download(struct client_stream *stream, uint32_t count, uint32_t size)
{
    uint32_t request[2] = {count, size};
    cr_assert(client_stream_open(stream, &client, "/t/Download", 30000));
    cr_assert(client_stream_send(stream, request, sizeof(request)));
    cr_assert(client_stream_half_close(stream));
}

Test(server_streams, download_delivers_borrowed_bytes_in_order)
{
    const uint32_t count = 200;
    const uint32_t size = 100000;
    struct client_stream stream;
    open_download(&stream, count, size);
    for (uint32_t left = count; left > 0; left--) {
        uint8_t *bytes;
        size_t received;
        cr_assert(client_stream_receive(&stream, &bytes, &received));
        cr_assert_eq(received, size + 4);
        cr_assert_eq(memcmp(bytes, &left, 4), 0);
        cr_assert_eq(memcmp(bytes + 4, fixture.data, size), 0);
        free(bytes);
    }
    struct client_result result;
    client_stream_end(&stream, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    cr_expect(fixture_wait(&fixture.counts.dones, 1));
    cr_expect(fixture_wait_live(&fixture, 0, 1));
    cr_expect_eq(atomic_load(&fixture.counts.cancels), 0);
    /* Every borrow ends once, those that the full queue refused too. */
    cr_expect_eq(atomic_load(&fixture.counts.releases),
                 count + atomic_load(&fixture.counts.sends_refused));
    cr_expect_gt(atomic_load(&fixture.counts.sends_refused), 0, "the queue was never full");
}

/* A borrow of nothing ends as well. */
Test(server_streams, download_of_empty_data_releases_it)
{
    struct client_stream stream;
    open_download(&stream, 3, 0);
    for (uint32_t left = 3; left > 0; left--) {
        uint8_t *bytes;
        size_t received;
        cr_assert(client_stream_receive(&stream, &bytes, &received));
        cr_expect_eq(received, 4);
        free(bytes);
    }
    struct client_result result;
    client_stream_end(&stream, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    cr_expect(fixture_wait(&fixture.counts.dones, 1));
    cr_expect_eq(atomic_load(&fixture.counts.releases),
                 3 + atomic_load(&fixture.counts.sends_refused));
}

Test(server_streams, cancelled_download_releases_everything)
{
    struct client_stream stream;
    open_download(&stream, 1000, 500000);
    uint8_t *bytes;
    size_t received;
    cr_assert(client_stream_receive(&stream, &bytes, &received));
    free(bytes);
    client_stream_cancel(&stream);
    struct client_result result;
    client_stream_end(&stream, &result);
    cr_expect_eq(result.code, GRPC_STATUS_CANCELLED);
    cr_expect(fixture_wait(&fixture.counts.cancels, 1));
    cr_expect(fixture_wait(&fixture.counts.dones, 1));
    cr_expect(fixture_wait_live(&fixture, 0, 1));
    cr_expect_lt(atomic_load(&fixture.counts.releases), 1000);
}

Test(server_streams, upload_sums)
{
    uint8_t *data = calloc(1, 1u << 20);
    struct client_stream stream;
    cr_assert(client_stream_open(&stream, &client, "/t/Upload", 30000));
    for (int i = 0; i < 50; i++) {
        cr_assert(client_stream_send(&stream, data, 1u << 20));
    }
    cr_assert(client_stream_half_close(&stream));
    uint8_t *bytes;
    size_t size;
    cr_assert(client_stream_receive(&stream, &bytes, &size));
    uint64_t sum;
    cr_assert_eq(size, 8);
    memcpy(&sum, bytes, 8);
    cr_expect_eq(sum, 50u << 20);
    free(bytes);
    free(data);
    struct client_result result;
    client_stream_end(&stream, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    cr_expect_eq(atomic_load(&fixture.counts.half_closes), 1);
    cr_expect_eq(atomic_load(&fixture.counts.messages), 50);
}

/* A client that is lost in the middle has not finished: half-close must never be told. */
Test(server_streams, lost_upload_is_a_cancel_and_no_end)
{
    const unsigned rounds = 60;
    uint8_t *data = calloc(1, 100000);
    for (unsigned i = 0; i < rounds; i++) {
        struct client other;
        client_open(&other, fixture.target);
        struct client_stream stream;
        cr_assert(client_stream_open(&stream, &other, "/t/Upload", 30000));
        for (unsigned j = 0; j < i % 4; j++) {
            (void)client_stream_send(&stream, data, 100000);
        }
        struct client_result result;
        if (i % 2 == 0) {
            client_stream_cancel(&stream);
            client_stream_end(&stream, &result);
        } else {
            grpc_call_unref(stream.call); /* cancels as it goes, the connection after it */
        }
        client_close(&other);
    }
    free(data);
    cr_expect(fixture_wait_live(&fixture, 0, 0));
    cr_expect_eq(atomic_load(&fixture.counts.half_closes), 0);
    cr_expect_eq(atomic_load(&fixture.counts.cancels), atomic_load(&fixture.counts.dones));
}

static void expect_pipe(const char *path)
{
    struct client_stream stream;
    cr_assert(client_stream_open(&stream, &client, path, 30000));
    for (uint32_t i = 0; i < 500; i++) {
        uint8_t *bytes;
        size_t size;
        cr_assert(client_stream_send(&stream, &i, sizeof(i)));
        cr_assert(client_stream_receive(&stream, &bytes, &size));
        cr_assert_eq(size, sizeof(i));
        cr_assert_eq(memcmp(bytes, &i, size), 0);
        free(bytes);
    }
    cr_assert(client_stream_half_close(&stream));
    struct client_result result;
    client_stream_end(&stream, &result);
    cr_expect_eq(result.code, GRPC_STATUS_OK);
    cr_expect(fixture_wait_live(&fixture, 0, 1));
}

Test(server_streams, pipes_answer_each_message)
{
    expect_pipe("/t/Pipe");
    expect_pipe("/t/PipeBulk");
    cr_expect_eq(atomic_load(&fixture.counts.dones), 2);
    cr_expect_eq(atomic_load(&fixture.counts.half_closes), 2);
    cr_expect_eq(atomic_load(&fixture.counts.sends_refused), 0);
}

Test(server_streams, a_stream_can_fail)
{
    struct client_stream stream;
    cr_assert(client_stream_open(&stream, &client, "/t/PipeBulk", 30000));
    cr_assert(client_stream_send(&stream, "fail", 4));
    struct client_result result;
    client_stream_end(&stream, &result);
    cr_expect_eq(result.code, GRPC_STATUS_ABORTED);
    cr_expect_str_eq(result.text, "asked to");
    cr_expect(fixture_wait(&fixture.counts.dones, 1));
    cr_expect_eq(atomic_load(&fixture.counts.cancels), 0);
}
