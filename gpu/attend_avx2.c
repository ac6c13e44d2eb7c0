/* Attention kernels for AVX2 with FMA and F16C. */
#include "gpu/attend_kernel.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"

#define LANES 8U

typedef __m256 lanes;
typedef __m256 lanes_mask;

static inline lanes lanes_set(float value)
{
    return _mm256_set1_ps(value);
}

static inline lanes lanes_load(const float *values)
{
    return _mm256_loadu_ps(values);
}

static inline void lanes_store(float *values, lanes x)
{
    _mm256_storeu_ps(values, x);
}

static inline lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline lanes lanes_max(lanes a, lanes b)
{
    return _mm256_max_ps(a, b);
}

static inline lanes_mask lanes_below(lanes a, lanes b)
{
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}

static inline lanes lanes_select(lanes_mask mask, lanes a, lanes b)
{
    return _mm256_blendv_ps(b, a, mask);
}

/* Powers from -126 to 127: the exponent's bits of 2^power. */
static inline lanes lanes_scale2(lanes x, lanes power)
{
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));

    return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

static inline lanes lanes_round(lanes x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline float lanes_sum(lanes x)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static inline float lanes_max_of(lanes x)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

static inline lanes lanes_index(void)
{
    return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
}

static inline __attribute__((always_inline)) lanes lanes_widen(enum kvk_format format,
                                                               const uint8_t *bytes)
{
    if (format == KVK_FORMAT_FP32) {
        return _mm256_loadu_ps((const float *)(const void *)bytes);
    }
    __m128i values = _mm_loadu_si128((const __m128i *)(const void *)bytes);
    if (format == KVK_FORMAT_FP16) {
        return _mm256_cvtph_ps(values);
    }
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}

/* No masked load of 16-bit values here: by way of the stack. */
static inline lanes lanes_widen_some(enum kvk_format format, const uint8_t *bytes, size_t count)
{
    uint8_t some[LANES * sizeof(float)] = {0};

    memcpy(some, bytes, count * (format == KVK_FORMAT_FP32 ? 4 : 2));
    return lanes_widen(format, some);
}

static inline __attribute__((always_inline)) lanes lanes_reduce(const lanes *x)
{
    lanes low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    lanes high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));

    return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}

#include "gpu/attend_lanes.inc"

/* F16C is older than AVX2, and no processor has one without the other; not every compiler can
 * ask for it. */
static bool avx2_available(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

const struct kvk_attend_kernel kvk_attend_avx2 = {
    .name = "avx2",
    .available = avx2_available,
    .packed_bytes = lanes_packed_bytes,
    .pack = lanes_pack,
    .score = lanes_score,
    .soften = lanes_soften,
    .weigh = lanes_weigh,
    .finish = lanes_finish,
};
