/* kvkeepctl fleet: the daemons that share this one's store, by their own words. */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

/* A node that has missed a turn is late; with three it is not listed any more. */
#define LATE_S 15

static const char *const tier_names[] = {"?", "device", "host", "disk"};

static const char *tier_name(Kvkeep__V1__Tier tier)
{
    size_t index = (size_t)tier;
    return index < sizeof(tier_names) / sizeof(tier_names[0]) ? tier_names[index] : tier_names[0];
}

/* Of a node, in a word. */
static const char *health_of(const Kvkeep__V1__FleetNode *node)
{
    if (node->draining) {
        return "draining";
    }
    if (node->age_s > LATE_S) {
        return "late";
    }
    if (node->store_state.len == 4 && memcmp(node->store_state.data, "good", 4) == 0) {
        return "well";
    }
    return "store not whole";
}

static json_t *tiers_json(const Kvkeep__V1__FleetNode *node)
{
    json_t *list = json_array();
    for (size_t i = 0; i < node->n_tiers; i++) {
        const Kvkeep__V1__FleetTier *tier = node->tiers[i];
        json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:I}", "tier", tier_name(tier->tier),
                                              "used_bytes", (json_int_t)tier->used_bytes,
                                              "limit_bytes", (json_int_t)tier->limit_bytes,
                                              "block_uses", (json_int_t)tier->block_uses));
    }
    return list;
}

static json_t *node_json(const Kvkeep__V1__FleetNode *node)
{
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"age_s", node->age_s},
        {"up_s", node->up_s},
        {"fetched_blocks", node->fetched_blocks},
        {"fetched_bytes", node->fetched_bytes},
        {"sent_bytes", node->sent_bytes},
        {"lookups", node->lookups},
        {"lookup_tokens", node->lookup_tokens},
        {"hit_tokens", node->hit_tokens},
        {"spaces", node->spaces},
    };
    json_t *object = json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:s, s:b, s:b, s:o}", "name", ctl_json_text(node->name),
        "address", ctl_json_text(node->address), "events", ctl_json_text(node->events), "version",
        ctl_json_text(node->version), "store_state", ctl_json_text(node->store_state), "health",
        health_of(node), "draining", node->draining, "self", node->self, "tiers", tiers_json(node));
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        json_object_set_new(object, numbers[i].name, json_integer((json_int_t)numbers[i].value));
    }
    return object;
}

/* "87 %"; of nothing "-". */
static const char *share(uint64_t part, uint64_t whole, char text[16])
{
    if (whole == 0) {
        return "-";
    }
    (void)snprintf(text, 16, "%.0f %%", 100.0 * (double)part / (double)whole);
    return text;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void nodes_print(const Kvkeep__V1__GetFleetResponse *fleet)
{
    static const char *const titles[] = {"-node",   "-health", "-address",    "up",     "spaces",
                                         "prompts", "hit",     "from device", "host",   "disk",
                                         "store",   "held",    "sent",        "fetched"};
    struct ctl_table table;
    ctl_table_init(&table, 14, titles);
    for (size_t i = 0; i < fleet->n_nodes; i++) {
        const Kvkeep__V1__FleetNode *node = fleet->nodes[i];
        uint64_t held = 0;
        uint64_t of_tier[4] = {0};
        char texts[5][16];
        char up[32];
        for (size_t k = 0; k < node->n_tiers; k++) {
            held += node->tiers[k]->used_bytes;
            of_tier[(size_t)node->tiers[k]->tier % 4] = node->tiers[k]->block_uses;
        }
        /* What was brought from below was used in memory, mostly the host's: it counts once. */
        uint64_t uses = of_tier[1] + of_tier[2];
        uint64_t fetched = least(node->fetched_blocks, of_tier[2]);
        uint64_t restored = least(of_tier[3], of_tier[2] - fetched);
        (void)snprintf(up, sizeof(up), "%" PRIu64 ":%02u h", node->up_s / 3600,
                       (unsigned)(node->up_s / 60 % 60));
        ctl_table_row(&table, "%s%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s",
                      ctl_text(node->name), node->self ? " *" : "", health_of(node),
                      node->address.len == 0 ? "-" : ctl_text(node->address), up,
                      ctl_count(node->spaces), ctl_count(node->lookups),
                      share(node->hit_tokens, node->lookup_tokens, texts[0]),
                      share(of_tier[1], uses, texts[1]),
                      share(of_tier[2] - fetched - restored, uses, texts[2]),
                      share(restored, uses, texts[3]), share(fetched, uses, texts[4]),
                      ctl_bytes(held), ctl_bytes(node->sent_bytes), ctl_bytes(node->fetched_bytes));
    }
    ctl_table_print(&table);
    (void)printf("%zu nodes; * answered%s\n", fleet->n_nodes,
                 fleet->incomplete ? "; a part of the store does not answer: some may be missing"
                                   : "");
}

int ctl_fleet(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option known[] = {{NULL, 0, NULL, 0}};
    const struct ctl_command command = {.name = "fleet", .usage = ""};
    Kvkeep__V1__GetFleetRequest request = KVKEEP__V1__GET_FLEET_REQUEST__INIT;
    int code;
    if (getopt_long(argc, argv, "", known, NULL) != -1) {
        return ctl_usage(&command, NULL);
    }
    if (optind < argc) {
        return ctl_usage_told(&command, "it takes no arguments");
    }
    Kvkeep__V1__GetFleetResponse *fleet =
        ctl_admin_call(options, "/kvkeep.v1.Admin/GetFleet", &request.base,
                       &kvkeep__v1__get_fleet_response__descriptor, &code);
    if (fleet == NULL) {
        return code;
    }
    if (options->json) {
        json_t *nodes = json_array();
        for (size_t i = 0; i < fleet->n_nodes; i++) {
            json_array_append_new(nodes, node_json(fleet->nodes[i]));
        }
        ctl_json_print(json_pack("{s:o, s:b, s:I}", "nodes", nodes, "incomplete", fleet->incomplete,
                                 "nodes_max", (json_int_t)fleet->nodes_max));
    } else {
        nodes_print(fleet);
    }
    kvkeep__v1__get_fleet_response__free_unpacked(fleet, NULL);
    return CTL_OK;
}
