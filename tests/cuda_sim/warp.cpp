/* Shuffles and matrix instructions by the layouts that PTX's manual gives, and 16-bit floats. */
#include "tests/cuda_sim/warp.hpp"

#include <math.h>
#include <string.h>

#define LANES 32

namespace kvk_sim
{

float fp16_widen(uint16_t bits)
{
    uint32_t exponent = (bits >> 10) & 0x1f;
    uint32_t fraction = bits & 0x3ff;
    float value;

    if (exponent == 0x1f) {
        value = fraction != 0 ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = ldexpf((float)fraction, -24);
    } else {
        value = ldexpf((float)(fraction | 0x400), (int)exponent - 25);
    }
    return (bits & 0x8000) != 0 ? -value : value;
}

/* To the nearest, ties to even, as the FPU rounds a whole number. */
uint16_t fp16_narrow(float value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    float size = fabsf(value);
    int exponent = 0;

    if (size == 0) {
        return sign;
    }
    if (isnan(value)) {
        return 0x7fff;
    }
    if (size >= 65520) {
        return (uint16_t)(sign | 0x7c00);
    }
    (void)frexpf(size, &exponent);                         /* size = [0.5, 1) x 2^exponent */
    int place = exponent - 11 > -24 ? exponent - 11 : -24; /* of the last bit kept */
    uint32_t whole = (uint32_t)nearbyintf(ldexpf(size, -place));
    /* A fraction with its leading bit carries into the exponent, as it should. */
    return (uint16_t)(sign | (place == -24 ? whole : whole + ((uint32_t)(place + 24) << 10)));
}

static void shuffle_xor(const lane_in *in, lane_out *out)
{
    for (uint32_t lane = 0; lane < LANES; lane++) {
        out[lane].d[0] = in[(lane ^ in[lane].mask) % LANES].d[0];
    }
}

/* Lane l holds of each matrix row l / 4, columns 2 (l % 4) and the next; transposed, those of the
 * matrix turned over. */
static void load_matrices(const lane_in *in, lane_out *out, bool transposed)
{
    for (uint32_t matrix = 0; matrix < 4; matrix++) {
        uint16_t values[8][8];
        for (uint32_t row = 0; row < 8; row++) {
            memcpy(values[row], in[matrix * 8 + row].address, sizeof(values[row]));
        }
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint32_t row = lane / 4;
            uint32_t column = lane % 4 * 2;
            uint32_t low = transposed ? values[column][row] : values[row][column];
            uint32_t high = transposed ? values[column + 1][row] : values[row][column + 1];
            out[lane].words[matrix] = low | high << 16;
        }
    }
}

static float widen(enum warp_work work, uint32_t word, uint32_t half)
{
    uint16_t bits = (uint16_t)(word >> (16 * half));
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    if (work == WARP_MULTIPLY_FP16) {
        return fp16_widen(bits);
    }
    memcpy(&value, &wide, sizeof(value));
    return value;
}

/* m16n8k16: d += a x b. Products are exact in fp32; their sum is rounded as it goes. */
static void multiply(enum warp_work work, const lane_in *in, lane_out *out)
{
    float a[16][16];
    float b[16][8];

    for (uint32_t lane = 0; lane < LANES; lane++) {
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t column = lane % 4 * 2 + half;
            for (uint32_t i = 0; i < 4; i++) {
                a[lane / 4 + i % 2 * 8][column + i / 2 * 8] = widen(work, in[lane].a[i], half);
            }
            for (uint32_t i = 0; i < 2; i++) {
                b[column + i * 8][lane / 4] = widen(work, in[lane].b[i], half);
            }
        }
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t row = lane / 4 + i / 2 * 8;
            uint32_t column = lane % 4 * 2 + i % 2;
            float sum = in[lane].d[i];
            for (uint32_t k = 0; k < 16; k++) {
                sum += a[row][k] * b[k][column];
            }
            out[lane].d[i] = sum;
        }
    }
}

void warp_compute(enum warp_work work, const lane_in *in, lane_out *out)
{
    switch (work) {
    case WARP_SHUFFLE_XOR:
        shuffle_xor(in, out);
        return;
    case WARP_LOAD_MATRICES:
        load_matrices(in, out, false);
        return;
    case WARP_LOAD_MATRICES_TRANSPOSED:
        load_matrices(in, out, true);
        return;
    case WARP_MULTIPLY_BF16:
    case WARP_MULTIPLY_FP16:
        multiply(work, in, out);
        return;
    }
}

} // namespace kvk_sim
