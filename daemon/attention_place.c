#include "daemon/attention_place.h"

#include "base/clock.h"

/* Below this a call's own overhead is most of what is measured. */
#define MEASURED_BYTES_MIN (UINT64_C(256) << 10)

static uint64_t time_of(uint64_t bytes, uint64_t rate)
{
    double ns = (double)bytes / (double)rate * (double)KVK_NS_PER_SECOND;

    return ns < 9e18 ? (uint64_t)ns : UINT64_C(9000000000000000000);
}

struct kvk_attention_choice kvk_attention_choose_place(const struct kvk_attention_load *load)
{
    struct kvk_attention_choice choice = {.place = KVK_ATTENTION_NO_CHOICE};

    if (!load->apart || load->host_bytes == 0) {
        return choice;
    }
    choice.place = KVK_ATTENTION_IN_PLACE;
    if (load->host_rate > 0) {
        uint32_t calls = load->host_calls > 0 ? load->host_calls : 1;
        choice.in_place_ns = time_of(load->host_bytes, load->host_rate) * calls;
    }
    if (load->link_rate > 0) {
        choice.bring_in_ns = time_of(load->copy_bytes, load->link_rate);
        if (load->device_rate > 0) {
            choice.bring_in_ns += time_of(load->host_bytes, load->device_rate);
        }
    }
    if (choice.in_place_ns > 0 && choice.bring_in_ns > 0 && load->copy_bytes <= load->room_bytes &&
        choice.bring_in_ns + choice.bring_in_ns / 4 < choice.in_place_ns) {
        choice.place = KVK_ATTENTION_BROUGHT_IN;
    }
    return choice;
}

uint64_t kvk_attention_rate_after(uint64_t rate, uint64_t bytes, uint64_t took_ns)
{
    if (bytes < MEASURED_BYTES_MIN || took_ns == 0) {
        return rate;
    }
    double now = (double)bytes / (double)took_ns * (double)KVK_NS_PER_SECOND;
    if (rate == 0) {
        return (uint64_t)now;
    }
    return (uint64_t)((double)rate * 0.75 + now * 0.25);
}
