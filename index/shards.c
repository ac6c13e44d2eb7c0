#include "index/shards.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

#define STEPS_PER_OCTAVE KVK_SHARDS_STEPS_PER_OCTAVE
#define BUCKETS KVK_SHARDS_BUCKETS
#define CLASSES KVK_SHARDS_CLASSES
#define KINDS KVK_SHARDS_ASKED
#define NONE UINT32_MAX
#define THRESHOLD_MIN (KVK_SHARDS_HASH_END >> 14)

struct sample {
    struct kvk_key key;
    uint64_t bytes;
    uint32_t hash;
    uint32_t place; /* in the order of use: the later, the higher */
    uint32_t heap;  /* index in the heap */
};

struct kvk_shards {
    uint32_t sample_max;
    uint32_t sample_count;
    uint32_t threshold;
    double rate_max;
    struct sample *samples; /* [sample_max + 1], those in use first; ours, as all here */
    uint32_t *heap;         /* [sample_max + 1] of samples, the highest hash first */
    uint32_t *table;        /* [table_count] sample, by key; NONE: free. Linear probing */
    uint32_t table_count;   /* a power of two */
    uint32_t *owners;       /* [place_count] sample that was used last at this place; NONE */
    uint64_t *sums;         /* [place_count + 1] Fenwick tree over the places: bytes */
    uint32_t place_count;
    uint32_t place_next;
    uint64_t sampled_bytes; /* of all samples */
    uint64_t followed;
    struct kvk_shards_counts counts;
};

/* ---- Memory ---- */

enum kvk_status kvk_shards_create(uint32_t sample_count, double rate_max,
                                  struct kvk_shards **shards)
{
    KVK_ASSERT(sample_count >= KVK_SHARDS_SAMPLES_MIN && sample_count <= UINT32_C(1) << 24);
    KVK_ASSERT(rate_max > 0 && rate_max <= 1);
    struct kvk_shards *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return KVK_EXHAUSTED;
    }
    made->sample_max = sample_count;
    made->threshold = KVK_SHARDS_HASH_END;
    made->rate_max = rate_max;
    made->counts.shortest_bytes = UINT64_MAX;
    made->place_count = 2 * (sample_count + 1);
    made->table_count = 2;
    while (made->table_count < 2 * (sample_count + 1)) {
        made->table_count *= 2;
    }
    made->samples = calloc(sample_count + 1, sizeof(*made->samples));
    made->heap = calloc(sample_count + 1, sizeof(*made->heap));
    made->table = malloc(made->table_count * sizeof(*made->table));
    made->owners = malloc(made->place_count * sizeof(*made->owners));
    made->sums = calloc(made->place_count + 1, sizeof(*made->sums));
    if (made->samples == NULL || made->heap == NULL || made->table == NULL ||
        made->owners == NULL || made->sums == NULL) {
        kvk_shards_destroy(made);
        return KVK_EXHAUSTED;
    }
    memset(made->table, 0xff, made->table_count * sizeof(*made->table));
    memset(made->owners, 0xff, made->place_count * sizeof(*made->owners));
    *shards = made;
    return KVK_OK;
}

void kvk_shards_destroy(struct kvk_shards *shards)
{
    if (shards == NULL) {
        return;
    }
    free(shards->samples);
    free(shards->heap);
    free(shards->table);
    free(shards->owners);
    free(shards->sums);
    free(shards);
}

uint64_t kvk_shards_bytes(const struct kvk_shards *shards)
{
    uint64_t samples = (uint64_t)shards->sample_max + 1;
    return sizeof(*shards) + samples * (sizeof(*shards->samples) + sizeof(*shards->heap)) +
           shards->table_count * sizeof(*shards->table) +
           shards->place_count * (sizeof(*shards->owners) + sizeof(*shards->sums));
}

uint32_t kvk_shards_threshold(const struct kvk_shards *shards)
{
    return shards->threshold;
}

static double rate_of(const struct kvk_shards *shards)
{
    return shards->rate_max * (double)shards->threshold / (double)KVK_SHARDS_HASH_END;
}

/* ---- The table of keys ---- */

static uint32_t slot_of(const struct kvk_shards *shards, struct kvk_key key)
{
    return (uint32_t)(key.low >> 7) & (shards->table_count - 1);
}

/* The slot of the key, or the free one where it would go. */
static uint32_t table_find(const struct kvk_shards *shards, struct kvk_key key)
{
    uint32_t slot = slot_of(shards, key);
    while (shards->table[slot] != NONE &&
           !kvk_key_equal(shards->samples[shards->table[slot]].key, key)) {
        slot = (slot + 1) & (shards->table_count - 1);
    }
    return slot;
}

/* Take it out, and let those behind it move up. */
static void table_remove(struct kvk_shards *shards, struct kvk_key key)
{
    uint32_t mask = shards->table_count - 1;
    uint32_t hole = table_find(shards, key);
    KVK_ASSERT(shards->table[hole] != NONE);
    uint32_t slot = hole;
    for (;;) {
        shards->table[hole] = NONE;
        uint32_t moved;
        do {
            slot = (slot + 1) & mask;
            moved = shards->table[slot];
            if (moved == NONE) {
                return;
            }
            /* It may move to the hole unless its own place lies behind that. */
        } while (((slot - slot_of(shards, shards->samples[moved].key)) & mask) <
                 ((slot - hole) & mask));
        shards->table[hole] = moved;
        hole = slot;
    }
}

/* ---- The heap of hashes ---- */

static void heap_put(struct kvk_shards *shards, uint32_t at, uint32_t sample)
{
    shards->heap[at] = sample;
    shards->samples[sample].heap = at;
}

static void heap_up(struct kvk_shards *shards, uint32_t at, uint32_t sample)
{
    while (at > 0 &&
           shards->samples[shards->heap[(at - 1) / 2]].hash < shards->samples[sample].hash) {
        heap_put(shards, at, shards->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_put(shards, at, sample);
}

static void heap_down(struct kvk_shards *shards, uint32_t at, uint32_t sample, uint32_t count)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child + 1 < count && shards->samples[shards->heap[child + 1]].hash >
                                     shards->samples[shards->heap[child]].hash) {
            child++;
        }
        if (child >= count ||
            shards->samples[shards->heap[child]].hash <= shards->samples[sample].hash) {
            break;
        }
        heap_put(shards, at, shards->heap[child]);
        at = child;
    }
    heap_put(shards, at, sample);
}

/* ---- The order of use ---- */

static void sums_add(struct kvk_shards *shards, uint32_t place, uint64_t bytes)
{
    for (uint32_t i = place + 1; i <= shards->place_count; i += i & (0 - i)) {
        shards->sums[i] += bytes; /* modulo 2^64: adding what was negated takes away */
    }
}

/* Bytes at places up to this one, itself included. */
static uint64_t sums_up_to(const struct kvk_shards *shards, uint32_t place)
{
    uint64_t sum = 0;
    for (uint32_t i = place + 1; i > 0; i -= i & (0 - i)) {
        sum += shards->sums[i];
    }
    return sum;
}

/* Places close up, in the same order. */
static void places_renumber(struct kvk_shards *shards)
{
    uint32_t next = 0;
    for (uint32_t place = 0; place < shards->place_next; place++) {
        uint32_t sample = shards->owners[place];
        if (sample != NONE) {
            shards->owners[place] = NONE;
            shards->owners[next] = sample;
            shards->samples[sample].place = next;
            next++;
        }
    }
    shards->place_next = next;
    memset(shards->sums, 0, (shards->place_count + 1) * sizeof(*shards->sums));
    for (uint32_t i = 1; i <= shards->place_count; i++) {
        uint32_t owner = shards->owners[i - 1];
        uint32_t above = i + (i & (0 - i));
        shards->sums[i] += owner == NONE ? 0 : shards->samples[owner].bytes;
        if (above <= shards->place_count) {
            shards->sums[above] += shards->sums[i];
        }
    }
}

static void place_leave(struct kvk_shards *shards, const struct sample *sample)
{
    shards->owners[sample->place] = NONE;
    sums_add(shards, sample->place, 0 - sample->bytes);
}

static void place_take(struct kvk_shards *shards, uint32_t index)
{
    if (shards->place_next == shards->place_count) {
        places_renumber(shards);
    }
    struct sample *sample = &shards->samples[index];
    sample->place = shards->place_next++;
    shards->owners[sample->place] = index;
    sums_add(shards, sample->place, sample->bytes);
}

/* ---- Samples ---- */

static void sample_remove(struct kvk_shards *shards, uint32_t index)
{
    struct sample *sample = &shards->samples[index];
    uint32_t last = shards->sample_count - 1;
    uint32_t at = sample->heap;
    place_leave(shards, sample);
    table_remove(shards, sample->key);
    shards->sampled_bytes -= sample->bytes;
    uint32_t moved = shards->heap[last];
    if (moved != index) {
        heap_up(shards, at, moved);
        heap_down(shards, shards->samples[moved].heap, moved, last);
    }
    if (index != last) { /* samples stay without gaps: the last one moves here */
        shards->table[table_find(shards, shards->samples[last].key)] = index;
        *sample = shards->samples[last];
        shards->heap[sample->heap] = index;
        shards->owners[sample->place] = index;
    }
    shards->sample_count--;
}

static void threshold_set(struct kvk_shards *shards, uint32_t threshold)
{
    shards->threshold = threshold;
    while (shards->sample_count > 0 && shards->samples[shards->heap[0]].hash >= shards->threshold) {
        sample_remove(shards, shards->heap[0]);
    }
}

static void sample_add(struct kvk_shards *shards, struct kvk_key key, uint32_t hash, uint64_t bytes)
{
    uint32_t index = shards->sample_count++;
    shards->samples[index] = (struct sample){.key = key, .bytes = bytes, .hash = hash};
    shards->table[table_find(shards, key)] = index;
    shards->sampled_bytes += bytes;
    heap_up(shards, index, index);
    place_take(shards, index);
    /* At the least threshold the hashes are too few to tell apart: there the oldest would have to
     * go; no more than 2^10 hashes can be below it, and more things than that share them only. */
    if (shards->sample_count > shards->sample_max) {
        threshold_set(shards, shards->samples[shards->heap[0]].hash);
    }
}

/* ---- Distances ---- */

/* The highest bit and the four below it. */
static uint32_t bucket_of(uint64_t distance)
{
    uint32_t octave = 63 - (uint32_t)__builtin_clzll(distance | 1);
    uint64_t rest = octave >= 4 ? distance >> (octave - 4) : distance << (4 - octave);
    return octave * STEPS_PER_OCTAVE + (uint32_t)(rest & (STEPS_PER_OCTAVE - 1));
}

static double bucket_begin(uint32_t bucket)
{
    return ldexp(1.0 + (double)(bucket % STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE,
                 (int)(bucket / STEPS_PER_OCTAVE));
}

static uint32_t class_of(struct kvk_key key)
{
    return (uint32_t)key.high % CLASSES;
}

static void distance_count(struct kvk_shards *shards, const struct sample *sample,
                           enum kvk_shards_kind kind, double rate)
{
    struct kvk_shards_counts *counts = &shards->counts;
    uint64_t later = shards->sampled_bytes - sums_up_to(shards, sample->place);
    double wide = (double)later / rate + (double)sample->bytes;
    uint64_t distance = wide < 0x1p62 ? (uint64_t)wide : UINT64_C(1) << 62;
    counts->hits[kind][class_of(sample->key)][bucket_of(distance)] += (float)(1 / rate);
    counts->longest_bytes = distance > counts->longest_bytes ? distance : counts->longest_bytes;
    counts->shortest_bytes = distance < counts->shortest_bytes ? distance : counts->shortest_bytes;
}

void kvk_shards_refer(struct kvk_shards *shards, struct kvk_key key, uint32_t hash, uint64_t bytes,
                      enum kvk_shards_kind kind)
{
    KVK_ASSERT(hash < KVK_SHARDS_HASH_END);
    if (hash >= shards->threshold) {
        return; /* it came down since the caller asked */
    }
    double rate = rate_of(shards);
    uint32_t index = shards->table[table_find(shards, key)];
    shards->followed++;
    if (kind != KVK_SHARDS_PUT) {
        shards->counts.estimated[kind][class_of(key)] += 1 / rate;
    }
    if (index == NONE) {
        sample_add(shards, key, hash, bytes);
        return;
    }
    if (kind != KVK_SHARDS_PUT) {
        distance_count(shards, &shards->samples[index], kind, rate);
    }
    place_leave(shards, &shards->samples[index]);
    place_take(shards, index);
}

void kvk_shards_count(struct kvk_shards *shards, enum kvk_shards_kind kind, uint64_t references)
{
    KVK_ASSERT(kind != KVK_SHARDS_PUT);
    shards->counts.references[kind] += (double)references;
}

void kvk_shards_halve(struct kvk_shards *shards)
{
    if (shards->threshold / 2 >= THRESHOLD_MIN) {
        threshold_set(shards, shards->threshold / 2);
    }
}

void kvk_shards_age(struct kvk_shards *shards, double factor)
{
    KVK_ASSERT(factor >= 0 && factor <= 1);
    struct kvk_shards_counts *counts = &shards->counts;
    for (int kind = 0; kind < KINDS; kind++) {
        for (uint32_t c = 0; c < CLASSES; c++) {
            counts->estimated[kind][c] *= factor;
            for (uint32_t i = 0; i < BUCKETS; i++) {
                counts->hits[kind][c][i] *= (float)factor;
            }
        }
        counts->references[kind] *= factor;
    }
}

/* ---- Answers ---- */

const struct kvk_shards_counts *kvk_shards_counts(const struct kvk_shards *shards)
{
    return &shards->counts;
}

static double hits_at(const float found[BUCKETS], uint64_t size_bytes)
{
    uint32_t end = size_bytes == UINT64_MAX ? BUCKETS : bucket_of(size_bytes);
    double hits = 0;
    for (uint32_t i = 0; i < end; i++) {
        hits += (double)found[i];
    }
    if (end < BUCKETS) { /* the part of its own bucket that lies below */
        double begin = bucket_begin(end);
        double width = bucket_begin(end + 1) - begin;
        hits += (double)found[end] * ((double)size_bytes - begin) / width;
    }
    return hits;
}

/* Hits at one size, and what the followed references stand for. */
struct sums {
    double hits[KINDS];
    double estimated[KINDS];
};

static double ratio_of(const struct kvk_shards_counts *counts, const struct sums *sums,
                       double weight, bool is_reached)
{
    double known = sums->hits[KVK_SHARDS_KNOWN] * weight;
    double fresh = sums->hits[KVK_SHARDS_NEW];
    if (is_reached) {
        known += counts->references[KVK_SHARDS_KNOWN] - sums->estimated[KVK_SHARDS_KNOWN] * weight;
    }
    double scale = sums->estimated[KVK_SHARDS_NEW] > 0
                       ? counts->references[KVK_SHARDS_NEW] / sums->estimated[KVK_SHARDS_NEW]
                       : 0;
    double references = counts->references[KVK_SHARDS_KNOWN] + counts->references[KVK_SHARDS_NEW];
    double ratio = (known + fresh * scale) / references;
    return ratio < 0 ? 0 : ratio > 1 ? 1 : ratio;
}

/* The error by a jackknife: how far the answer moves where one class is left out. */
struct kvk_shards_ratio kvk_shards_ratio(const struct kvk_shards_counts *counts,
                                         uint64_t size_bytes)
{
    struct sums all = {.hits = {0}};
    struct sums classes[CLASSES];
    for (uint32_t c = 0; c < CLASSES; c++) {
        for (int kind = 0; kind < KINDS; kind++) {
            double hits = size_bytes == 0 ? 0 : hits_at(counts->hits[kind][c], size_bytes);
            classes[c].hits[kind] = hits;
            classes[c].estimated[kind] = counts->estimated[kind][c];
            all.hits[kind] += hits;
            all.estimated[kind] += counts->estimated[kind][c];
        }
    }
    if (size_bytes == 0) {
        return (struct kvk_shards_ratio){.hits = 0};
    }
    if (all.estimated[KVK_SHARDS_KNOWN] + all.estimated[KVK_SHARDS_NEW] <= 0 ||
        counts->references[KVK_SHARDS_KNOWN] + counts->references[KVK_SHARDS_NEW] <= 0) {
        return (struct kvk_shards_ratio){.hits = 0, .error = 1};
    }
    bool is_reached = counts->shortest_bytes != UINT64_MAX && size_bytes >= counts->shortest_bytes;
    double left_out[CLASSES];
    double mean = 0;
    double spread = 0;
    for (uint32_t c = 0; c < CLASSES; c++) {
        struct sums rest = all;
        for (int kind = 0; kind < KINDS; kind++) {
            rest.hits[kind] -= classes[c].hits[kind];
            rest.estimated[kind] -= classes[c].estimated[kind];
        }
        left_out[c] = ratio_of(counts, &rest, (double)CLASSES / (CLASSES - 1), is_reached);
        mean += left_out[c] / CLASSES;
    }
    for (uint32_t c = 0; c < CLASSES; c++) {
        spread += (left_out[c] - mean) * (left_out[c] - mean);
    }
    return (struct kvk_shards_ratio){
        .hits = ratio_of(counts, &all, 1, is_reached),
        .error = sqrt(spread * (CLASSES - 1) / CLASSES),
    };
}

void kvk_shards_stats(const struct kvk_shards *shards, struct kvk_shards_stats *stats)
{
    double rate = rate_of(shards);
    *stats = (struct kvk_shards_stats){
        .rate = rate,
        .samples = shards->sample_count,
        .followed = shards->followed,
        .distinct_bytes = (uint64_t)((double)shards->sampled_bytes / rate),
    };
}
