/* Admin.GetFleet: who shares the store. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/fleet_view.h"
#include "daemon/report_remote.h"
#include "daemon/rpc_private.h"

struct node_row {
    Kvkeep__V1__FleetNode node;
    Kvkeep__V1__FleetTier tiers[KVK_FLEET_TIERS];
    Kvkeep__V1__FleetTier *tier_pointers[KVK_FLEET_TIERS];
};

static ProtobufCBinaryData bytes_of(const void *bytes, size_t size)
{
    return (ProtobufCBinaryData){.len = size, .data = (uint8_t *)(uintptr_t)bytes};
}

static uint64_t seconds_since(uint64_t now_s, uint64_t then_s)
{
    return now_s > then_s ? now_s - then_s : 0; /* two clocks */
}

static void fill_node(struct node_row *row, const struct kvk_fleet_node *node,
                      const struct kvk_fleet_view *view)
{
    Kvkeep__V1__FleetNode *to = &row->node;
    kvkeep__v1__fleet_node__init(to);
    to->id = bytes_of(node->id, sizeof(node->id));
    to->name = kvk_rpc_text(node->name);
    to->address = kvk_rpc_text(node->address);
    to->events = kvk_rpc_text(node->events);
    to->version = kvk_rpc_text(node->version);
    to->age_s = seconds_since(view->now_s, node->at_s);
    to->up_s = seconds_since(node->at_s, node->started_s);
    for (int i = 0; i < KVK_FLEET_TIERS; i++) {
        Kvkeep__V1__FleetTier *tier = &row->tiers[i];
        kvkeep__v1__fleet_tier__init(tier);
        tier->tier = (Kvkeep__V1__Tier)(i + 1);
        tier->used_bytes = node->used_bytes[i];
        tier->limit_bytes = node->limit_bytes[i];
        tier->block_uses = node->uses[i];
        row->tier_pointers[i] = tier;
    }
    to->n_tiers = KVK_FLEET_TIERS;
    to->tiers = row->tier_pointers;
    to->fetched_blocks = node->fetched_blocks;
    to->fetched_bytes = node->fetched_bytes;
    to->sent_bytes = node->sent_bytes;
    to->lookups = node->lookups;
    to->lookup_tokens = node->lookup_tokens;
    to->hit_tokens = node->hit_tokens;
    to->spaces = node->spaces;
    to->store_state = kvk_rpc_text(kvk_remote_state_name((enum kvk_remote_state)node->store_state));
    to->draining = node->draining;
    to->self = memcmp(node->id, view->self, sizeof(view->self)) == 0;
}

static enum kvk_status reply_fleet(struct kvk_rpc_run *run, const struct kvk_fleet_view *view,
                                   struct kvk_error *error)
{
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct node_row *rows = kvk_rpc_arena_take_extra(arena, (view->count + 1U) * sizeof(*rows));
    Kvkeep__V1__FleetNode **pointers =
        kvk_rpc_arena_take_extra(arena, (view->count + 1U) * sizeof(*pointers));
    if (rows == NULL || pointers == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    for (uint32_t i = 0; i < view->count; i++) {
        fill_node(&rows[i], &view->nodes[i], view);
        pointers[i] = &rows[i].node;
    }
    Kvkeep__V1__GetFleetResponse response = KVKEEP__V1__GET_FLEET_RESPONSE__INIT;
    response.n_nodes = view->count;
    response.nodes = pointers;
    response.incomplete = view->incomplete;
    response.nodes_max = KVK_FLEET_PLACES;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_get_fleet)
{
    struct kvk_fleet_view view;
    (void)message;
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status == KVK_OK) {
        status = kvk_fleet_view(run->rpc->cache, &run->caller, &view, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    status = reply_fleet(run, &view, error);
    free(view.nodes);
    return status;
}
