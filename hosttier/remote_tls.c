/*
 * TLS to the store's nodes: OpenSSL over the connection's own non-blocking socket. A node that
 * cannot prove its name is not talked to.
 */
#include "hosttier/remote_internal.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>

static bool given(const char *text)
{
    return text != NULL && text[0] != '\0';
}

static enum kvk_status refuse(struct kvk_error *error, const char *field, const char *path)
{
    char why[128];
    ERR_error_string_n(ERR_peek_last_error(), why, sizeof(why));
    ERR_clear_error();
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s %s cannot be used: %s", field,
                    path, why);
}

enum kvk_status kvk_remote_tls_create(const struct kvk_remote_options *options, SSL_CTX **context,
                                      struct kvk_error *error)
{
    SSL_CTX *made = SSL_CTX_new(TLS_client_method());
    enum kvk_status status = KVK_OK;
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "tls", "no memory for TLS");
    }
    SSL_CTX_set_verify(made, SSL_VERIFY_PEER, NULL);
    (void)SSL_CTX_set_min_proto_version(made, TLS1_2_VERSION);
    (void)SSL_CTX_set_mode(made, SSL_MODE_ENABLE_PARTIAL_WRITE |
                                     SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                     SSL_MODE_RELEASE_BUFFERS);
    if (given(options->tls_ca_file)) {
        if (SSL_CTX_load_verify_locations(made, options->tls_ca_file, NULL) != 1) {
            status = refuse(error, "tls_ca_file", options->tls_ca_file);
        }
    } else {
        (void)SSL_CTX_set_default_verify_paths(made);
    }
    if (status == KVK_OK && given(options->tls_certificate)) {
        if (SSL_CTX_use_certificate_chain_file(made, options->tls_certificate) != 1) {
            status = refuse(error, "tls_certificate", options->tls_certificate);
        } else if (!given(options->tls_key) ||
                   SSL_CTX_use_PrivateKey_file(made, options->tls_key, SSL_FILETYPE_PEM) != 1) {
            status = refuse(error, "tls_key", given(options->tls_key) ? options->tls_key : "");
        }
    }
    if (status != KVK_OK) {
        SSL_CTX_free(made);
        return status;
    }
    *context = made;
    return KVK_OK;
}

SSL *kvk_remote_tls_connect(struct kvk_remote *remote, const struct kvk_remote_address *address,
                            int fd)
{
    SSL *tls = SSL_new(remote->tls);
    if (tls == NULL) {
        return NULL;
    }
    const char *name = given(remote->options.tls_name) ? remote->options.tls_name : address->host;
    uint8_t number[sizeof(struct in6_addr)];
    bool numeric = inet_pton(AF_INET, name, number) == 1 || inet_pton(AF_INET6, name, number) == 1;
    int ok = numeric ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(tls), name)
                     : (SSL_set1_host(tls, name) == 1 && SSL_set_tlsext_host_name(tls, name) == 1);
    if (ok != 1 || SSL_set_fd(tls, fd) != 1) {
        SSL_free(tls);
        return NULL;
    }
    SSL_set_connect_state(tls);
    return tls;
}

int kvk_remote_tls_outcome(SSL *tls, int result, bool *want_write)
{
    int kind = SSL_get_error(tls, result);
    *want_write = kind == SSL_ERROR_WANT_WRITE;
    ERR_clear_error();
    if (result > 0) {
        return 1;
    }
    return kind == SSL_ERROR_WANT_READ || kind == SSL_ERROR_WANT_WRITE ? 0 : -1;
}
