/* What subscribers missed: requests at the ROUTER socket, see publish.h. */
#include "daemon/publish_internal.h"

#include <zmq.h>

#define REPLAY_FRAMES_MAX 4

static bool replay_send(struct kvk_publisher *publisher, zmq_msg_t *identity, uint64_t number,
                        const void *data, size_t size)
{
    zmq_msg_t copy;
    uint8_t bytes[8];
    kvk_publish_number_write(bytes, number);
    if (zmq_msg_init(&copy) != 0 || zmq_msg_copy(&copy, identity) != 0) {
        return false;
    }
    if (zmq_msg_send(&copy, publisher->replay, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
        (void)zmq_msg_close(&copy);
        return false; /* it does not read, or is gone */
    }
    return zmq_send(publisher->replay, "", 0, ZMQ_SNDMORE) >= 0 &&
           zmq_send(publisher->replay, bytes, sizeof(bytes), ZMQ_SNDMORE) >= 0 &&
           zmq_send(publisher->replay, data, size, 0) >= 0;
}

static void replay_answer(struct kvk_publisher *publisher, zmq_msg_t *identity, uint64_t first,
                          struct kvk_publish_topic *topic)
{
    bool sent = true;
    if (topic != NULL) {
        /* Its first message clears, so from there on nothing before it is missed. */
        uint64_t kept = topic->first == NULL ? topic->next_number : topic->first->number;
        topic->restart_wanted |=
            (first < kept && kept != topic->first_number) || first > topic->next_number;
        for (const struct kvk_publish_message *at = topic->first; at != NULL && sent;
             at = at->next_of_topic) {
            if (at->number >= first) {
                sent = replay_send(publisher, identity, at->number, at->data, at->size);
            }
        }
    }
    if (sent) {
        (void)replay_send(publisher, identity, UINT64_MAX, "", 0);
    }
    atomic_fetch_add(&publisher->replays, 1);
}

/* One request, whatever it is: [identity, empty, number] or [identity, empty, number, topic]. */
void kvk_publish_replay_serve(struct kvk_publisher *publisher)
{
    zmq_msg_t frames[REPLAY_FRAMES_MAX];
    uint32_t count = 0;
    uint32_t received = 0;
    bool more = true;
    while (more) {
        zmq_msg_t frame;
        (void)zmq_msg_init(&frame);
        if (zmq_msg_recv(&frame, publisher->replay, ZMQ_DONTWAIT) < 0) {
            (void)zmq_msg_close(&frame);
            break;
        }
        more = zmq_msg_more(&frame) != 0;
        received++;
        if (count < REPLAY_FRAMES_MAX) {
            frames[count++] = frame;
        } else {
            (void)zmq_msg_close(&frame);
        }
    }
    bool well_formed = (received == 3 || received == 4) && zmq_msg_size(&frames[1]) == 0 &&
                       zmq_msg_size(&frames[2]) == 8;
    if (well_formed) {
        const uint8_t *bytes = zmq_msg_data(&frames[2]);
        uint64_t first = 0;
        for (int i = 0; i < 8; i++) {
            first = first << 8 | bytes[i];
        }
        struct kvk_publish_topic *topic = publisher->topics;
        if (received == 4) {
            topic = kvk_publish_topic_find(publisher, zmq_msg_data(&frames[3]),
                                           zmq_msg_size(&frames[3]));
        } else if (topic != NULL && topic->next != NULL) {
            topic = NULL; /* which of them? */
        }
        replay_answer(publisher, &frames[0], first, topic);
    }
    for (uint32_t i = 0; i < count; i++) {
        (void)zmq_msg_close(&frames[i]);
    }
}
