/* Admin.Drain: the planned end. */
#include <signal.h>
#include <unistd.h>

#include "base/log.h"
#include "daemon/rpc_private.h"
#include "daemon/warm.h"

KVK_RPC_HANDLER(kvk_rpc_drain)
{
    struct kvk_drain_reply reply;
    (void)message;
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = kvk_drain(run->rpc->cache, &run->caller, &reply, error);
    }
    if (status != KVK_WOULD_BLOCK) {
        kvk_rpc_audit(run, "", "", status, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__DrainResponse response = KVKEEP__V1__DRAIN_RESPONSE__INIT;
    response.kept = reply.kept;
    response.kept_blocks = reply.kept_blocks;
    response.disk_blocks = reply.disk_blocks;
    response.demoted_blocks = reply.demoted_blocks;
    response.flushed_blocks = reply.flushed_blocks;
    response.unflushed_blocks = reply.unflushed_blocks;
    status = kvk_rpc_reply(run, &response.base, error);
    if (status == KVK_OK) {
        /* The main thread waits for it, and lets this call's answer out first. */
        kvk_log(KVK_LOG_INFO, "drain_asked",
                "text=\"by an admin\" flushed_blocks=%llu unflushed_blocks=%llu",
                (unsigned long long)reply.flushed_blocks,
                (unsigned long long)reply.unflushed_blocks);
        (void)kill(getpid(), SIGTERM);
    }
    return status;
}
