/*
 * A house with two tenants, a and b, and an admin who acts for neither: who is told what.
 */
#ifndef KVK_TESTS_ENGINE_TRIO_H
#define KVK_TESTS_ENGINE_TRIO_H

#include "tests/engine_house.h"

#define A_TOKEN "credential-of-a-0"
#define B_TOKEN "credential-of-b-0"
#define ADMIN_TOKEN "credential-of-admin"

static const struct kvk_view everybody __attribute__((unused)) = {.size = 0};

/* Tenants a and b, and an admin who acts for neither. */
struct trio {
    struct house house;
    struct kvk_caller a;
    struct kvk_caller b;
    struct kvk_caller admin;
};

static inline void trio_start(struct trio *trio, const struct house_options *options)
{
    struct kvk_config *config = &trio->house.config;

    house_init(&trio->house);
    config->tenants = calloc(2, sizeof(config->tenants[0]));
    config->credentials = calloc(3, sizeof(config->credentials[0]));
    config->tenant_count = 2;
    config->credential_count = 3;
    strcpy(config->tenants[0].name, "a");
    strcpy(config->tenants[1].name, "b");
    config->credentials[0] = (struct kvk_credential_config){
        .name = "a", .token = A_TOKEN, .tenants = {0}, .tenant_count = 1};
    config->credentials[1] = (struct kvk_credential_config){
        .name = "b", .token = B_TOKEN, .tenants = {1}, .tenant_count = 1};
    config->credentials[2] =
        (struct kvk_credential_config){.name = "admin", .token = ADMIN_TOKEN, .admin = true};
    house_start(&trio->house, options);
    trio->a = house_caller_of(&trio->house, A_TOKEN);
    trio->b = house_caller_of(&trio->house, B_TOKEN);
    trio->admin = house_caller_of(&trio->house, ADMIN_TOKEN);
    trio->house.caller = trio->a;
}

#endif
