/*
 * TLS on the TCP address, by gRPC's own credentials: reading certificates, handing them to new
 * handshakes, and what a client's certificate says of it.
 *
 * The files are read and checked here, at the start and on every reload, so that what is wrong is
 * told with the field's name and never reaches a handshake; a reload that fails leaves what was
 * there. gRPC asks for the configuration at each handshake: connections that are open keep theirs.
 */
#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "daemon/server_private.h"

#define FILE_BYTES_MAX (1 << 20)
#define EXPIRES_SOON_S (14 * 86400)

/* What the files said, at one time. */
struct pem {
    atomic_uint references;
    char *certificate; /* ours, as the next; with a final NUL */
    char *key;
    char *client_ca; /* NULL: none */
};

struct kvk_tls {
    struct kvk_tls_options options; /* borrowed paths */
    struct kvk_lock lock;
    struct pem *pem;  /* lock; one reference, ours */
    bool handed_over; /* lock: gRPC has it already */
};

static enum kvk_status refuse(const char *field, const char *path, const char *reason,
                              struct kvk_error *error)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %.120s: %s", field, path,
                    reason);
}

/* ---- Files ---- */

static void secret_free(char *text)
{
    if (text != NULL) {
        kvk_secret_wipe(text, strlen(text));
        free(text);
    }
}

static void pem_release(struct pem *pem)
{
    if (pem != NULL && atomic_fetch_sub(&pem->references, 1) == 1) {
        secret_free(pem->key);
        free(pem->certificate);
        free(pem->client_ca);
        free(pem);
    }
}

/* The whole file, with a NUL behind it. */
static enum kvk_status file_read(const char *field, const char *path, char **text,
                                 struct kvk_error *error)
{
    struct stat state;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return refuse(field, path, strerror(errno), error);
    }
    const char *reason = NULL;
    if (fstat(fd, &state) != 0 || !S_ISREG(state.st_mode)) {
        reason = "is no file";
    } else if (state.st_size == 0 || state.st_size > FILE_BYTES_MAX) {
        reason = "is empty, or larger than 1 MiB";
    }
    char *made = reason == NULL ? calloc(1, (size_t)state.st_size + 1) : NULL;
    if (reason == NULL && made == NULL) {
        reason = "no memory to read it";
    }
    size_t size = 0;
    while (reason == NULL && size < (size_t)state.st_size) {
        ssize_t got = read(fd, made + size, (size_t)state.st_size - size);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            reason = "cannot be read";
            break;
        }
        size += (size_t)got;
    }
    (void)close(fd);
    if (reason != NULL) {
        secret_free(made);
        return refuse(field, path, reason, error);
    }
    *text = made;
    return KVK_OK;
}

/* ---- What they say ---- */

/* The first certificate in it, or NULL. */
static X509 *first_certificate(const char *text)
{
    BIO *bio = BIO_new_mem_buf(text, -1);
    X509 *certificate = bio != NULL ? PEM_read_bio_X509(bio, NULL, NULL, NULL) : NULL;
    BIO_free(bio);
    ERR_clear_error();
    return certificate;
}

/* A key with a pass phrase is refused rather than asked for on a terminal. */
static int no_pass_phrase(char *buffer, int size, int writing, void *context)
{
    (void)buffer;
    (void)size;
    (void)writing;
    (void)context;
    return -1;
}

static EVP_PKEY *private_key(const char *text)
{
    BIO *bio = BIO_new_mem_buf(text, -1);
    EVP_PKEY *key = bio != NULL ? PEM_read_bio_PrivateKey(bio, NULL, no_pass_phrase, NULL) : NULL;
    BIO_free(bio);
    ERR_clear_error();
    return key;
}

static void expiry_tell(const X509 *certificate)
{
    int days = 0;
    int seconds = 0;
    if (ASN1_TIME_diff(&days, &seconds, NULL, X509_get0_notAfter(certificate)) == 1 &&
        (int64_t)days * 86400 + seconds < EXPIRES_SOON_S) {
        kvk_log(KVK_LOG_WARNING, "certificate_expires", "days=%d", days);
    }
}

static enum kvk_status pem_check(const struct kvk_tls_options *options, const struct pem *pem,
                                 struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    X509 *certificate = first_certificate(pem->certificate);
    EVP_PKEY *key = private_key(pem->key);
    X509 *client_ca = pem->client_ca != NULL ? first_certificate(pem->client_ca) : NULL;
    if (certificate == NULL) {
        status = refuse("tls.certificate", options->certificate, "has no PEM certificate", error);
    } else if (key == NULL) {
        status = refuse("tls.key", options->key, "has no PEM key without a pass phrase", error);
    } else if (X509_check_private_key(certificate, key) != 1) {
        status = refuse("tls.key", options->key, "is not the key of tls.certificate", error);
    } else if (pem->client_ca != NULL && client_ca == NULL) {
        status = refuse("tls.client_ca", options->client_ca, "has no PEM certificate", error);
    } else {
        expiry_tell(certificate);
    }
    ERR_clear_error();
    X509_free(certificate);
    X509_free(client_ca);
    EVP_PKEY_free(key);
    return status;
}

static enum kvk_status pem_read(const struct kvk_tls_options *options, struct pem **pem,
                                struct kvk_error *error)
{
    struct pem *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for certificates");
    }
    atomic_init(&made->references, 1);
    enum kvk_status status =
        file_read("tls.certificate", options->certificate, &made->certificate, error);
    if (status == KVK_OK) {
        status = file_read("tls.key", options->key, &made->key, error);
    }
    if (status == KVK_OK && options->client_certificates != KVK_TLS_CLIENTS_NO) {
        status = file_read("tls.client_ca", options->client_ca, &made->client_ca, error);
    }
    if (status == KVK_OK) {
        status = pem_check(options, made, error);
    }
    if (status != KVK_OK) {
        pem_release(made);
        return status;
    }
    *pem = made;
    return KVK_OK;
}

/* ---- Life ---- */

enum kvk_status kvk_tls_create(const struct kvk_tls_options *options, struct kvk_tls **tls,
                               struct kvk_error *error)
{
    struct pem *pem = NULL;
    enum kvk_status status = pem_read(options, &pem, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_tls *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        pem_release(pem);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for certificates");
    }
    made->options = *options;
    made->pem = pem;
    kvk_lock_init(&made->lock);
    *tls = made;
    return KVK_OK;
}

void kvk_tls_destroy(struct kvk_tls *tls)
{
    if (tls == NULL) {
        return;
    }
    pem_release(tls->pem);
    kvk_lock_finish(&tls->lock);
    free(tls);
}

enum kvk_status kvk_tls_reload(struct kvk_tls *tls, struct kvk_error *error)
{
    struct pem *pem = NULL;
    enum kvk_status status = pem_read(&tls->options, &pem, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&tls->lock);
    struct pem *before = tls->pem;
    tls->pem = pem;
    tls->handed_over = false;
    kvk_unlock(&tls->lock);
    pem_release(before);
    return KVK_OK;
}

/* gRPC asks, at each handshake. */
static grpc_ssl_certificate_config_reload_status
config_fetch(void *user_data, grpc_ssl_server_certificate_config **config)
{
    struct kvk_tls *tls = user_data;
    kvk_lock(&tls->lock);
    struct pem *pem = tls->handed_over ? NULL : tls->pem;
    tls->handed_over = true;
    if (pem != NULL) {
        atomic_fetch_add(&pem->references, 1);
    }
    kvk_unlock(&tls->lock);
    if (pem == NULL) {
        return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    }
    const grpc_ssl_pem_key_cert_pair pair = {.private_key = pem->key,
                                             .cert_chain = pem->certificate};
    /* Roots are insisted on, also where no client is asked for a certificate: then any will do. */
    const char *roots = pem->client_ca != NULL ? pem->client_ca : pem->certificate;
    *config = grpc_ssl_server_certificate_config_create(roots, &pair, 1);
    pem_release(pem);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

static grpc_ssl_client_certificate_request_type request_type(enum kvk_tls_clients clients)
{
    switch (clients) {
    case KVK_TLS_CLIENTS_NO:
        return GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
    case KVK_TLS_CLIENTS_REQUEST:
        return GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY;
    case KVK_TLS_CLIENTS_REQUIRE:
        return GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
    }
    KVK_UNREACHABLE();
}

enum kvk_status kvk_tls_listen(struct kvk_server *server, struct kvk_error *error)
{
    const struct kvk_server_options *options = &server->options;
    for (uint32_t i = 0; i < options->tcp_address_count; i++) {
        /* Each address has credentials of its own, and each asks once for the same files. */
        KVK_ASSERT(options->tcp_address_count == 1);
        grpc_ssl_server_credentials_options *made =
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                request_type(server->tls->options.client_certificates), config_fetch, server->tls);
        grpc_server_credentials *credentials =
            grpc_ssl_server_credentials_create_with_options(made);
        int port =
            credentials != NULL
                ? grpc_server_add_http2_port(server->grpc, options->tcp_addresses[i], credentials)
                : 0;
        grpc_server_credentials_release(credentials);
        if (port <= 0) {
            return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "tcp_addresses",
                            "cannot listen on %.64s", options->tcp_addresses[i]);
        }
        server->tls_port = (uint16_t)port;
    }
    return KVK_OK;
}

/* ---- What a client's certificate says ---- */

static void names_add(struct kvk_certificate_names *names, const grpc_auth_context *context,
                      const char *property)
{
    grpc_auth_property_iterator at = grpc_auth_context_find_properties_by_name(context, property);
    const grpc_auth_property *found = NULL;
    while ((found = grpc_auth_property_iterator_next(&at)) != NULL) {
        /* A name with a NUL inside would be read as another, shorter one. */
        bool whole =
            found->value != NULL && memchr(found->value, '\0', found->value_length) == NULL;
        if (whole && found->value_length > 0 && names->count < KVK_CERTIFICATE_NAMES_MAX) {
            names->names[names->count++] = found->value;
        }
    }
}

void kvk_call_certificate_names(struct kvk_call *call, struct kvk_certificate_names *names)
{
    *names = (struct kvk_certificate_names){.count = 0};
    if (kvk_call_peer(call)->kind != KVK_PEER_TLS) {
        return;
    }
    grpc_auth_context *context = grpc_call_auth_context(call->call);
    if (context == NULL) {
        return;
    }
    names->context = context;
    if (grpc_auth_context_peer_is_authenticated(context) != 0) {
        names_add(names, context, GRPC_X509_SAN_PROPERTY_NAME);
        names_add(names, context, GRPC_X509_CN_PROPERTY_NAME);
    }
}

void kvk_certificate_names_finish(struct kvk_certificate_names *names)
{
    if (names->context != NULL) {
        grpc_auth_context_release(names->context);
        names->context = NULL;
    }
}
