/* The learner of reuse ages. */
#include "index/learn.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

#define CLASS_COUNT KVK_EVICT_CLASS_COUNT
#define AGE_COUNT KVK_LEARN_AGE_COUNT

/* Bucket 0 is below half a second; from there 2.5 buckets for each doubling, to 52 hours. */
#define AGE_FIRST_S 0.5
#define AGES_PER_DOUBLING 2.5

/* Of the counts, what a step of decay leaves: half after 1,386 steps, 3.9 hours at 10 s each. */
#define DECAY 0.9995

/* Each class is taken to have seen, besides its own, this share of the capacity's blocks behave as
 * all classes together do. It carries a class over its first minutes and fades beside real counts.
 */
#define PRIOR_WEIGHT 0.05

/* No age is taken to be passed by fewer than this share of a class: what few survivors do at great
 * ages is noise. */
#define SURVIVORS_MIN 0.005

/* The last bucket has no end; it counts as this much longer than where it begins. */
#define LAST_AGE_STRETCH 0.3

/* Before anything is known, and where all is equal, the older goes first. */
#define DENSITY_UNKNOWN 1e-3
#define DENSITY_LEAST 1e-9

void kvk_learn_init(struct kvk_learn *learn)
{
    memset(learn, 0, sizeof(*learn));
    for (int age = 1; age <= AGE_COUNT; age++) {
        learn->age_edge[age] = AGE_FIRST_S * pow(2, (age - 1) / AGES_PER_DOUBLING);
    }
    for (int k = 0; k < CLASS_COUNT; k++) {
        for (int age = 0; age < AGE_COUNT; age++) {
            learn->density[k][age] = DENSITY_UNKNOWN / (1 + learn->age_edge[age]);
        }
    }
}

/* 1 + 2.5 log2(2 age), but by comparing: the power of two that the age begins with names a bucket
 * at most two below its own. It is asked for every candidate of every eviction. */
static uint32_t age_bucket(const struct kvk_learn *learn, double age_s)
{
    if (age_s < AGE_FIRST_S) {
        return 0;
    }
    int doublings = ilogb(age_s / AGE_FIRST_S);
    double at_least = 1 + floor(AGES_PER_DOUBLING * doublings);
    uint32_t bucket = at_least < AGE_COUNT - 1 ? (uint32_t)at_least : AGE_COUNT - 1;
    while (bucket < AGE_COUNT - 1 && age_s >= learn->age_edge[bucket + 1]) {
        bucket++;
    }
    return bucket;
}

void kvk_learn_enter(struct kvk_learn *learn, uint32_t class_index)
{
    KVK_ASSERT(class_index < CLASS_COUNT);
    learn->entered[class_index] += 1;
}

void kvk_learn_reuse(struct kvk_learn *learn, uint32_t class_index, double age_s)
{
    KVK_ASSERT(class_index < CLASS_COUNT);
    learn->reused[class_index][age_bucket(learn, age_s)] += 1;
}

double kvk_learn_density(const struct kvk_learn *learn, uint32_t class_index, double age_s)
{
    KVK_ASSERT(class_index < CLASS_COUNT);
    return learn->density[class_index][age_bucket(learn, age_s)];
}

/* Seconds that a block spends in a bucket of age. */
static double age_width_s(const struct kvk_learn *learn, int age)
{
    const double *edge = learn->age_edge;
    return age < AGE_COUNT - 1 ? edge[age + 1] - edge[age] : edge[age] * LAST_AGE_STRETCH;
}

/* One class: from how many entered and came back at each age, the density at each age. */
static void class_refresh(const struct kvk_learn *learn, double entered, const double *reused,
                          double *density)
{
    double survivors[AGE_COUNT + 1]; /* that reach the age without having come back */
    double gone = 0;
    for (int age = 0; age <= AGE_COUNT; age++) {
        survivors[age] = fmax(entered - gone, SURVIVORS_MIN * entered);
        gone += age < AGE_COUNT ? reused[age] : 0;
    }
    double best = 0;
    for (int age = AGE_COUNT - 1; age >= 0; age--) {
        double residence_s = age_width_s(learn, age) * (survivors[age] + survivors[age + 1]) / 2;
        best = fmax(best, reused[age] / residence_s);
        density[age] = best + DENSITY_LEAST / (1 + learn->age_edge[age]);
    }
}

void kvk_learn_refresh(struct kvk_learn *learn, uint32_t block_count)
{
    double entered_all = 0;
    double reused_all[AGE_COUNT] = {0};
    for (int k = 0; k < CLASS_COUNT; k++) {
        entered_all += learn->entered[k];
        for (int age = 0; age < AGE_COUNT; age++) {
            reused_all[age] += learn->reused[k][age];
        }
    }
    if (entered_all < 1) {
        return;
    }
    double prior = PRIOR_WEIGHT * block_count;
    for (int k = 0; k < CLASS_COUNT; k++) {
        if (learn->entered[k] <= 0) {
            continue;
        }
        double reused[AGE_COUNT];
        for (int age = 0; age < AGE_COUNT; age++) {
            reused[age] = learn->reused[k][age] + prior * reused_all[age] / entered_all;
        }
        class_refresh(learn, learn->entered[k] + prior, reused, learn->density[k]);
        learn->entered[k] *= DECAY;
        for (int age = 0; age < AGE_COUNT; age++) {
            learn->reused[k][age] *= DECAY;
        }
    }
}
