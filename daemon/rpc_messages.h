/* The generated messages: included by rpc files and their tests alone. */
#ifndef KVK_DAEMON_RPC_MESSAGES_H
#define KVK_DAEMON_RPC_MESSAGES_H

#include "google/rpc/status.pb-c.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#endif
