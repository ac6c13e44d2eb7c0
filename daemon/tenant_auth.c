/*
 * Who is it? Recognising callers by tokens, certificates and uids.
 *
 * Readers look into an immutable snapshot. Tokens are found by their SHA-256 digest in buckets of a
 * fixed width; which bucket says a keyed hash with a key of this snapshot's own, so that time tells
 * nothing about which digests there are; and every place of a bucket is compared, in constant time,
 * whether it is taken or not.
 */
#include <stdlib.h>
#include <string.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/random.h"
#include "daemon/tenant_internal.h"
#include "index/key.h"

#define BUCKET_WIDTH 8
#define MAKE_TRIES 64

struct known_token {
    uint8_t digest[KVK_TOKEN_DIGEST_SIZE];
    uint64_t expires_ns;
    const struct kvk_credential_entry *entry; /* NULL: nobody's, and the digest is 0 */
};

struct known_uid {
    uint32_t uid;
    const struct kvk_credential_entry *entry;
};

struct known_subject {
    const char *subject; /* the entry's record's */
    const struct kvk_credential_entry *entry;
};

struct kvk_auth_snapshot {
    uint64_t key;               /* of the hash that chooses the bucket */
    uint32_t bucket_mask;       /* buckets - 1, a power of two less one */
    struct known_token *tokens; /* [buckets][BUCKET_WIDTH], ours */
    struct known_uid *uids;     /* [uid_count], sorted; ours */
    uint32_t uid_count;
    struct known_subject *subjects; /* [subject_count], sorted; ours */
    uint32_t subject_count;
    const struct kvk_credential_entry *anonymous; /* NULL: none */
};

/* ---- Digests ---- */

static pthread_once_t digest_once = PTHREAD_ONCE_INIT;
static pthread_key_t digest_key;
static EVP_MD *digest_kind;

static void digest_free(void *context)
{
    EVP_MD_CTX_free(context);
}

static void digest_prepare(void)
{
    int result = pthread_key_create(&digest_key, digest_free);
    KVK_ASSERT(result == 0);
    digest_kind = EVP_MD_fetch(NULL, "SHA256", NULL); /* as long as the process */
}

/* This thread's, so that a call allocates nothing. */
static EVP_MD_CTX *digest_context(void)
{
    (void)pthread_once(&digest_once, digest_prepare);
    EVP_MD_CTX *context = pthread_getspecific(digest_key);
    if (context == NULL) {
        context = EVP_MD_CTX_new();
        if (context == NULL || pthread_setspecific(digest_key, context) != 0) {
            EVP_MD_CTX_free(context);
            return NULL;
        }
    }
    return context;
}

bool kvk_token_digest(const uint8_t *token, size_t token_size,
                      uint8_t digest[KVK_TOKEN_DIGEST_SIZE])
{
    unsigned size = 0;
    EVP_MD_CTX *context = digest_context();
    return context != NULL && digest_kind != NULL &&
           EVP_DigestInit_ex(context, digest_kind, NULL) == 1 &&
           EVP_DigestUpdate(context, token, token_size) == 1 &&
           EVP_DigestFinal_ex(context, digest, &size) == 1 && size == KVK_TOKEN_DIGEST_SIZE;
}

/* ---- Snapshots ---- */

static uint32_t bucket_of(const struct kvk_auth_snapshot *snapshot,
                          const uint8_t digest[KVK_TOKEN_DIGEST_SIZE])
{
    /* The digest is as good as random; the key only has to be unknown. */
    uint64_t mixed = (kvk_load_le64(digest) ^ snapshot->key) * UINT64_C(0x9e3779b97f4a7c15);
    mixed ^= (kvk_load_le64(digest + 8) + snapshot->key) * UINT64_C(0xd6e8feb86659fd93);
    return (uint32_t)(mixed >> 32) & snapshot->bucket_mask;
}

/* False: its bucket is full. */
static bool token_add(struct kvk_auth_snapshot *snapshot, const struct kvk_credential_entry *entry,
                      uint32_t which)
{
    const uint8_t *digest = entry->record.tokens[which].digest;
    struct known_token *bucket =
        &snapshot->tokens[(size_t)bucket_of(snapshot, digest) * BUCKET_WIDTH];
    for (uint32_t i = 0; i < BUCKET_WIDTH; i++) {
        if (bucket[i].entry == NULL) {
            memcpy(bucket[i].digest, digest, KVK_TOKEN_DIGEST_SIZE);
            bucket[i].expires_ns = entry->expires_ns[which];
            bucket[i].entry = entry;
            return true;
        }
    }
    return false;
}

/* False: some bucket was full; another key may do. */
static bool tokens_fill(struct kvk_auth_snapshot *snapshot,
                        struct kvk_credential_entry *const *credentials, uint32_t count)
{
    size_t places = ((size_t)snapshot->bucket_mask + 1) * BUCKET_WIDTH;
    memset(snapshot->tokens, 0, places * sizeof(snapshot->tokens[0]));
    kvk_random_secret(&snapshot->key, sizeof(snapshot->key));
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t t = 0; t < credentials[i]->record.token_count; t++) {
            if (!token_add(snapshot, credentials[i], t)) {
                return false;
            }
        }
    }
    return true;
}

static int uid_compare(const void *a, const void *b)
{
    const struct known_uid *left = a;
    const struct known_uid *right = b;
    return left->uid < right->uid ? -1 : left->uid > right->uid;
}

static int subject_compare(const void *a, const void *b)
{
    const struct known_subject *left = a;
    const struct known_subject *right = b;
    return strcmp(left->subject, right->subject);
}

static void names_fill(struct kvk_auth_snapshot *snapshot,
                       struct kvk_credential_entry *const *credentials, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_credential_entry *entry = credentials[i];
        for (uint32_t u = 0; u < entry->record.uid_count; u++) {
            snapshot->uids[snapshot->uid_count++] =
                (struct known_uid){.uid = entry->record.uids[u], .entry = entry};
        }
        if (entry->record.certificate_subject[0] != '\0') {
            snapshot->subjects[snapshot->subject_count++] = (struct known_subject){
                .subject = entry->record.certificate_subject, .entry = entry};
        }
        if (entry->anonymous) {
            snapshot->anonymous = entry;
        }
    }
    qsort(snapshot->uids, snapshot->uid_count, sizeof(snapshot->uids[0]), uid_compare);
    qsort(snapshot->subjects, snapshot->subject_count, sizeof(snapshot->subjects[0]),
          subject_compare);
}

struct kvk_auth_snapshot *kvk_auth_snapshot_make(struct kvk_credential_entry *const *credentials,
                                                 uint32_t count)
{
    size_t token_count = 0;
    size_t uid_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        token_count += credentials[i]->record.token_count;
        uid_count += credentials[i]->record.uid_count;
    }
    uint32_t buckets = 4; /* one token a bucket, so that hardly any fills */
    while (buckets < token_count) {
        buckets *= 2;
    }
    struct kvk_auth_snapshot *snapshot = calloc(1, sizeof(*snapshot));
    if (snapshot == NULL) {
        return NULL;
    }
    snapshot->bucket_mask = buckets - 1;
    snapshot->tokens = calloc((size_t)buckets * BUCKET_WIDTH, sizeof(snapshot->tokens[0]));
    snapshot->uids = calloc(uid_count + 1, sizeof(snapshot->uids[0]));
    snapshot->subjects = calloc((size_t)count + 1, sizeof(snapshot->subjects[0]));
    bool made = snapshot->tokens != NULL && snapshot->uids != NULL && snapshot->subjects != NULL;
    bool filled = false;
    for (int i = 0; made && !filled && i < MAKE_TRIES; i++) {
        filled = tokens_fill(snapshot, credentials, count);
    }
    if (!filled) {
        KVK_ASSERT(!made); /* 64 keys in a row: one in 10^140 */
        kvk_auth_snapshot_free(snapshot);
        return NULL;
    }
    names_fill(snapshot, credentials, count);
    return snapshot;
}

void kvk_auth_snapshot_free(struct kvk_auth_snapshot *snapshot)
{
    if (snapshot == NULL) {
        return;
    }
    free(snapshot->tokens);
    free(snapshot->uids);
    free(snapshot->subjects);
    free(snapshot);
}

void kvk_auth_snapshot_install(struct kvk_tenants *tenants, struct kvk_auth_snapshot *snapshot)
{
    KVK_ASSERT(snapshot != NULL);
    (void)pthread_rwlock_wrlock(&tenants->snapshot_lock);
    struct kvk_auth_snapshot *before = tenants->snapshot;
    tenants->snapshot = snapshot;
    (void)pthread_rwlock_unlock(&tenants->snapshot_lock);
    kvk_auth_snapshot_free(before); /* nobody reads it any more: readers hold the lock */
}

/* ---- Recognising ---- */

/* All places of the bucket are compared, whichever matches. */
static const struct kvk_credential_entry *find_token(const struct kvk_auth_snapshot *snapshot,
                                                     const uint8_t *digest, uint64_t now_ns)
{
    const struct known_token *bucket =
        &snapshot->tokens[(size_t)bucket_of(snapshot, digest) * BUCKET_WIDTH];
    uint32_t found = UINT32_MAX;
    for (uint32_t i = 0; i < BUCKET_WIDTH; i++) {
        uint32_t equal = CRYPTO_memcmp(digest, bucket[i].digest, KVK_TOKEN_DIGEST_SIZE) == 0;
        uint32_t lives = (bucket[i].expires_ns > now_ns) & (bucket[i].entry != NULL);
        uint32_t mask = 0u - (equal & lives);
        found = (found & ~mask) | (i & mask);
    }
    return found == UINT32_MAX ? NULL : bucket[found].entry;
}

static const struct kvk_credential_entry *find_uid(const struct kvk_auth_snapshot *snapshot,
                                                   uint32_t uid)
{
    const struct known_uid wanted = {.uid = uid};
    const struct known_uid *found =
        bsearch(&wanted, snapshot->uids, snapshot->uid_count, sizeof(wanted), uid_compare);
    return found == NULL ? NULL : found->entry;
}

/* The first name of the certificate that is anybody's. */
static const struct kvk_credential_entry *find_subject(const struct kvk_auth_snapshot *snapshot,
                                                       const struct kvk_proof *proof)
{
    for (uint32_t i = 0; i < proof->subject_count; i++) {
        const struct known_subject wanted = {.subject = proof->subjects[i]};
        const struct known_subject *found = bsearch(
            &wanted, snapshot->subjects, snapshot->subject_count, sizeof(wanted), subject_compare);
        if (found != NULL) {
            return found->entry;
        }
    }
    return NULL;
}

static enum kvk_status refuse(const struct kvk_proof *proof, struct kvk_error *error)
{
    if (proof->token != NULL) {
        return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                        "the token is not known");
    }
    if (proof->local) {
        return kvk_fail_limit(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                              proof->uid, 0, "no token was sent, and no credential has uid %u",
                              proof->uid);
    }
    return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                    proof->subject_count > 0
                        ? "no token was sent, and no credential has a name of the certificate"
                        : "no token was sent");
}

enum kvk_status kvk_tenants_identify(struct kvk_tenants *tenants, const struct kvk_proof *proof,
                                     const struct kvk_credential **credential, bool *guessable,
                                     struct kvk_error *error)
{
    uint8_t digest[KVK_TOKEN_DIGEST_SIZE];
    const struct kvk_credential_entry *found = NULL;
    uint64_t now_ns = kvk_clock_now(tenants->clock);

    KVK_ASSERT(proof->subject_count <= KVK_SUBJECTS_MAX);
    if (proof->token != NULL && !kvk_token_digest(proof->token, proof->token_size, digest)) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a digest");
    }
    (void)pthread_rwlock_rdlock(&tenants->snapshot_lock);
    const struct kvk_auth_snapshot *snapshot = tenants->snapshot;
    if (proof->token != NULL) {
        found = find_token(snapshot, digest, now_ns);
    } else {
        found = find_subject(snapshot, proof);
        if (found == NULL && proof->local) {
            found = find_uid(snapshot, proof->uid);
        } else if (found == NULL) {
            found = snapshot->anonymous;
        }
    }
    (void)pthread_rwlock_unlock(&tenants->snapshot_lock);
    if (found == NULL) {
        atomic_fetch_add_explicit(&tenants->identify_failures, 1, memory_order_relaxed);
        return refuse(proof, error);
    }
    atomic_fetch_add_explicit(&tenants->identified, 1, memory_order_relaxed);
    *credential = &found->credential; /* stays in memory, also if it is deleted now */
    if (guessable != NULL) {
        *guessable = proof->token != NULL && found->configured;
    }
    return KVK_OK;
}

enum kvk_status kvk_tenants_authenticate(struct kvk_tenants *tenants, const uint8_t *token,
                                         size_t token_size, bool local, uint32_t uid,
                                         const struct kvk_credential **credential,
                                         struct kvk_error *error)
{
    const struct kvk_proof proof = {
        .token = token, .token_size = token_size, .local = local, .uid = uid};
    return kvk_tenants_identify(tenants, &proof, credential, NULL, error);
}
