/*
 * TestControl: what tests may turn, where kvkeepd runs with --test-hooks.
 */
#include "daemon/rpc_private.h"

#define COPY_DELAY_US_MAX 10000000

KVK_RPC_HANDLER(kvk_rpc_test_control)
{
    const Kvkeep__V1__TestControlRequest *asked = (const Kvkeep__V1__TestControlRequest *)message;
    if (!run->rpc->config->test_hooks) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "the daemon runs without --test-hooks");
    }
    if (!run->caller.credential->admin) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "",
                        "the credential has no admin rights");
    }
    if (asked->copy_delay_us > COPY_DELAY_US_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "copy_delay_us",
                              asked->copy_delay_us, COPY_DELAY_US_MAX,
                              "copy_delay_us must be at most %d", COPY_DELAY_US_MAX);
    }
    const struct kvk_test_control control = {.policy_time_ns = asked->policy_time_ns,
                                             .set_copy_delay = asked->set_copy_delay,
                                             .copy_delay_us = (uint32_t)asked->copy_delay_us,
                                             .constant_hash = asked->constant_hash,
                                             .fail_next_copy = asked->fail_next_copy};
    enum kvk_status status = kvk_cache_test_control(run->rpc->cache, &control, error);
    if (status == KVK_OK && asked->check_laws) {
        kvk_cache_check(run->rpc->cache);
    }
    Kvkeep__V1__TestControlResponse response = KVKEEP__V1__TEST_CONTROL_RESPONSE__INIT;
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}
