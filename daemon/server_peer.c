/*
 * Who is at the other end of a call.
 */
#include <arpa/inet.h>
#include <grpc/support/alloc.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/server_private.h"

/* gRPC names a connection that our accept thread took by its descriptor, and one of its own by its
 * address. */
struct kvk_connection *kvk_call_find_connection(struct kvk_call *call)
{
    char *peer = grpc_call_get_peer(call->call);
    struct kvk_connection *connection = NULL;
    if (strncmp(peer, "fd:", 3) == 0) {
        connection = kvk_connection_find(&call->server->connections, atoi(peer + 3));
    } else if (call->server->tls_peer != NULL) {
        connection = call->server->tls_peer;
        atomic_fetch_add(&connection->references, 1);
    }
    gpr_free(peer);
    return connection;
}

void kvk_peer_address(struct kvk_peer *peer, int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address;
    socklen_t size = sizeof(address);
    memset(&address, 0, sizeof(address));
    if (getpeername(fd, &address.any, &size) != 0) {
        return;
    }
    if (address.any.sa_family == AF_INET) {
        peer->address_size = 4;
        memcpy(peer->address, &address.v4.sin_addr, 4);
        peer->port = ntohs(address.v4.sin_port);
    } else if (address.any.sa_family == AF_INET6) {
        peer->address_size = 16;
        memcpy(peer->address, &address.v6.sin6_addr, 16);
        peer->port = ntohs(address.v6.sin6_port);
    }
}

/* "ipv4:10.0.0.1:4711", "ipv6:[::1]:4711", the brackets perhaps as %5B and %5D, a scope behind the
 * address. */
static uint32_t address_read(const char *text, uint8_t address[16])
{
    char host[INET6_ADDRSTRLEN] = "";
    if (strncmp(text, "ipv4:", 5) == 0) {
        size_t size = strcspn(text + 5, ":");
        (void)snprintf(host, sizeof(host), "%.*s", (int)size, text + 5);
        return inet_pton(AF_INET, host, address) == 1 ? 4 : 0;
    }
    if (strncmp(text, "ipv6:", 5) == 0) {
        text += 5;
        text += strncmp(text, "%5B", 3) == 0 ? 3 : (size_t)(text[0] == '[');
        size_t size = strcspn(text, "]%");
        (void)snprintf(host, sizeof(host), "%.*s", (int)size, text);
        return inet_pton(AF_INET6, host, address) == 1 ? 16 : 0;
    }
    return 0;
}

uint32_t kvk_call_peer_address(struct kvk_call *call, uint8_t address[16])
{
    const struct kvk_peer *known = kvk_call_peer(call);
    if (known->kind != KVK_PEER_TLS) {
        memcpy(address, known->address, sizeof(known->address));
        return known->address_size;
    }
    char *peer = grpc_call_get_peer(call->call);
    uint32_t size_bytes = address_read(peer, address);
    gpr_free(peer);
    return size_bytes;
}

void kvk_call_peer_text(struct kvk_call *call, char text[KVK_PEER_TEXT_SIZE])
{
    const struct kvk_peer *known = kvk_call_peer(call);
    char host[INET6_ADDRSTRLEN] = "";
    switch (known->kind) {
    case KVK_PEER_UNIX:
        (void)snprintf(text, KVK_PEER_TEXT_SIZE, "unix:uid=%u,pid=%d", known->uid, known->pid);
        return;
    case KVK_PEER_TCP:
        if (known->address_size > 0) {
            bool v4 = known->address_size == 4;
            (void)inet_ntop(v4 ? AF_INET : AF_INET6, known->address, host, sizeof(host));
            (void)snprintf(text, KVK_PEER_TEXT_SIZE, v4 ? "ipv4:%s:%u" : "ipv6:[%s]:%u", host,
                           known->port);
            return;
        }
        (void)snprintf(text, KVK_PEER_TEXT_SIZE, "tcp");
        return;
    case KVK_PEER_TLS: {
        char *peer = grpc_call_get_peer(call->call);
        (void)snprintf(text, KVK_PEER_TEXT_SIZE, "tls:%s", peer);
        gpr_free(peer);
        return;
    }
    }
}
