/* Attention: which kernel runs a launch, and the merge of partial results. */
#include "gpu/kernels/attend_compact.cuh"
#include "gpu/kernels/attend_matrix.cuh"
#include "gpu/kernels/attend_plain.cuh"

#define MERGE_THREADS 128
/* What a block may have on a GPU of compute capability 8.0: the matrix kernels are made for it.
 * Later ones have more (9.0, 10.0) or less (8.6, 8.9, 12.0). */
#define SM_80_SHARED_BYTES (163 * 1024)

/*
 * A row from the slots that hold its parts. A part that saw nothing is left out, since what it
 * wrote says nothing.
 */
__global__ void __launch_bounds__(MERGE_THREADS) merge_slots(kvk_cuda_attend attend)
{
    const kvk_cuda_merge merge = attend.merges[blockIdx.x];
    const uint32_t *sources = attend.sources + merge.first_source;
    uint32_t query_head = kvk_query_head(attend, blockIdx.y, merge.head);
    uint64_t target = kvk_output_row(attend, merge.query, query_head);
    float max = -kvk_infinity();
    float sum = 0;

    for (uint32_t i = 0; i < merge.source_count; i++) {
        max = fmaxf(max, attend.slot_max[(uint64_t)sources[i] * attend.kv_heads + blockIdx.y]);
    }
    float top = max == -kvk_infinity() ? 0 : max;
    for (uint32_t i = 0; i < merge.source_count; i++) {
        uint64_t slot = (uint64_t)sources[i] * attend.kv_heads + blockIdx.y;
        sum += attend.slot_sum[slot] * kvk_exp(attend.slot_max[slot] - top);
    }
    kvk_row_end end =
        kvk_row_finish(max, sum, kvk_row_sink(attend, query_head, merge.partial != 0));
    for (uint32_t i = threadIdx.x; i < attend.head_size_v; i += MERGE_THREADS) {
        float value = 0;
        for (uint32_t j = 0; j < merge.source_count; j++) {
            uint64_t slot = (uint64_t)sources[j] * attend.kv_heads + blockIdx.y;
            float weight = kvk_exp(attend.slot_max[slot] - top);
            if (weight != 0) {
                value += weight * attend.slot_output[slot * attend.head_size_v + i];
            }
        }
        attend.output[target * attend.head_size_v + i] = value * end.factor;
    }
    if (threadIdx.x == 0) {
        attend.lse[target] = end.lse;
    }
}

/* ---- Variants of the matrix kernel ------------------------------------------------------------
 */

typedef int attend_launch(const kvk_cuda_attend &attend, void *stream);

/* Kernels that are made for few rows, as in decoding, and for many, as in a chunk of a prompt. */
struct matrix_variant {
    uint32_t head_size_k;
    uint32_t head_size_v;
    bool latent;
    uint32_t rows_max;
    attend_launch *few_bf16;
    attend_launch *many_bf16;
    attend_launch *few_fp16;
    attend_launch *many_fp16;
    attend_launch *few_compact; /* NULL: there is none */
    attend_launch *many_compact;
    uint32_t few_shared_bytes;
    uint32_t many_shared_bytes;
    uint32_t few_compact_shared_bytes;
    uint32_t many_compact_shared_bytes;
};

template <int kHeadSizeK, int kHeadSizeV, bool kLatent, int kRowTiles, int kTileTokens, int kStages>
static constexpr uint32_t matrix_shared_bytes(void)
{
    return (uint32_t)sizeof(kvk_matrix_shape<kvk_bf16, kHeadSizeK, kHeadSizeV, kLatent, kRowTiles,
                                             kTileTokens, kStages>);
}

template <int kHeadSizeK, int kHeadSizeV, int kRowTiles, int kStages>
static constexpr uint32_t compact_shared_bytes(void)
{
    return (uint32_t)sizeof(kvk_compact_shape<kHeadSizeK, kHeadSizeV, kRowTiles, kStages>);
}

template <typename Format, int kHeadSizeK, int kHeadSizeV, bool kLatent, int kRowTiles,
          int kTileTokens, int kStages>
static int matrix_launch(const kvk_cuda_attend &attend, void *stream)
{
    constexpr uint32_t kSharedBytes =
        matrix_shared_bytes<kHeadSizeK, kHeadSizeV, kLatent, kRowTiles, kTileTokens, kStages>();

    static_assert(kSharedBytes <= SM_80_SHARED_BYTES, "as the variants are made for");
    return kvk_launch(
        kvk_attend_matrix<Format, kHeadSizeK, kHeadSizeV, kLatent, kRowTiles, kTileTokens, kStages>,
        dim3(attend.unit_count, attend.kv_heads), KVK_MATRIX_THREADS, kSharedBytes, kSharedBytes,
        stream, attend);
}

template <int kHeadSizeK, int kHeadSizeV, int kRowTiles, int kStages>
static int compact_launch(const kvk_cuda_attend &attend, void *stream)
{
    constexpr uint32_t kSharedBytes =
        compact_shared_bytes<kHeadSizeK, kHeadSizeV, kRowTiles, kStages>();

    static_assert(kSharedBytes <= SM_80_SHARED_BYTES, "as the variants are made for");
    return kvk_launch(kvk_attend_compact<kHeadSizeK, kHeadSizeV, kRowTiles, kStages>,
                      dim3(attend.unit_count, attend.kv_heads), KVK_MATRIX_THREADS, kSharedBytes,
                      kSharedBytes, stream, attend);
}

/* A tile and its stages fill the shared memory of sm_80, where one block has room at a time. Of few
 * rows two have on sm_90, but for head sizes 96, 128 and 256 (256 alone, where compact): there one
 * block has the multiprocessor, with two or three tiles under way. */
template <int kHeadSizeK, int kHeadSizeV, int kRowTiles, int kTileTokens, int kStages>
static constexpr matrix_variant matrix_variant_of(void)
{
    return {kHeadSizeK,
            kHeadSizeV,
            false,
            16 * kRowTiles,
            matrix_launch<kvk_bf16, kHeadSizeK, kHeadSizeV, false, 1, kTileTokens, kStages>,
            matrix_launch<kvk_bf16, kHeadSizeK, kHeadSizeV, false, kRowTiles, kTileTokens, kStages>,
            matrix_launch<kvk_fp16, kHeadSizeK, kHeadSizeV, false, 1, kTileTokens, kStages>,
            matrix_launch<kvk_fp16, kHeadSizeK, kHeadSizeV, false, kRowTiles, kTileTokens, kStages>,
            compact_launch<kHeadSizeK, kHeadSizeV, 1, 3>,
            compact_launch<kHeadSizeK, kHeadSizeV, kRowTiles, 3>,
            matrix_shared_bytes<kHeadSizeK, kHeadSizeV, false, 1, kTileTokens, kStages>(),
            matrix_shared_bytes<kHeadSizeK, kHeadSizeV, false, kRowTiles, kTileTokens, kStages>(),
            compact_shared_bytes<kHeadSizeK, kHeadSizeV, 1, 3>(),
            compact_shared_bytes<kHeadSizeK, kHeadSizeV, kRowTiles, 3>()};
}

/* Latent K is too long to lie in shared memory in two parts: where compact, it is the plain
 * kernel's. */
template <int kHeadSizeK, int kHeadSizeV, int kRowTiles, int kTileTokens, int kStages>
static constexpr matrix_variant latent_variant_of(void)
{
    return {kHeadSizeK,
            kHeadSizeV,
            true,
            16 * kRowTiles,
            matrix_launch<kvk_bf16, kHeadSizeK, kHeadSizeV, true, 1, kTileTokens, kStages>,
            matrix_launch<kvk_bf16, kHeadSizeK, kHeadSizeV, true, kRowTiles, kTileTokens, kStages>,
            matrix_launch<kvk_fp16, kHeadSizeK, kHeadSizeV, true, 1, kTileTokens, kStages>,
            matrix_launch<kvk_fp16, kHeadSizeK, kHeadSizeV, true, kRowTiles, kTileTokens, kStages>,
            nullptr,
            nullptr,
            matrix_shared_bytes<kHeadSizeK, kHeadSizeV, true, 1, kTileTokens, kStages>(),
            matrix_shared_bytes<kHeadSizeK, kHeadSizeV, true, kRowTiles, kTileTokens, kStages>(),
            0,
            0};
}

static const matrix_variant matrix_variants[] = {
    matrix_variant_of<64, 64, 4, 64, 4>(),   matrix_variant_of<96, 96, 4, 64, 4>(),
    matrix_variant_of<128, 128, 4, 64, 3>(), matrix_variant_of<192, 128, 2, 32, 4>(),
    matrix_variant_of<256, 256, 2, 32, 3>(), latent_variant_of<576, 512, 2, 32, 3>(),
};

static const matrix_variant *matrix_variant_find(uint32_t head_size_k, uint32_t head_size_v,
                                                 bool latent)
{
    for (const matrix_variant &variant : matrix_variants) {
        if (variant.head_size_k == head_size_k && variant.head_size_v == head_size_v &&
            variant.latent == latent) {
            return &variant;
        }
    }
    return nullptr;
}

static bool is_compact(uint32_t format)
{
    return format == KVK_FORMAT_FP8_E4M3 || format == KVK_FORMAT_INT8_CHANNEL ||
           format == KVK_FORMAT_INT8_32;
}

/* Rows of a unit for which a kernel has room. */
static uint32_t rows_that_fit(const matrix_variant &variant, uint32_t few_bytes,
                              uint32_t many_bytes, uint32_t shared_bytes)
{
    if (many_bytes <= shared_bytes) {
        return variant.rows_max;
    }
    return few_bytes <= shared_bytes ? KVK_CUDA_FEW_ROWS : 0;
}

extern "C" uint32_t kvk_cuda_matrix_rows(enum kvk_format format_q, enum kvk_format format_k,
                                         enum kvk_format format_v, uint32_t head_size_k,
                                         uint32_t head_size_v, bool latent, uint32_t shared_bytes)
{
    const matrix_variant *variant = matrix_variant_find(head_size_k, head_size_v, latent);
    bool narrow = format_k == KVK_FORMAT_BF16 || format_k == KVK_FORMAT_FP16;

    if (variant == nullptr || (!latent && format_v != format_k)) {
        return 0;
    }
    if (is_compact(format_k)) {
        /* Rows are copied by words at least: int8_32 has some that are not so aligned. */
        bool whole =
            format_k != KVK_FORMAT_INT8_32 || (head_size_k % 64 == 0 && head_size_v % 64 == 0);
        return whole && variant->few_compact != nullptr
                   ? rows_that_fit(*variant, variant->few_compact_shared_bytes,
                                   variant->many_compact_shared_bytes, shared_bytes)
                   : 0;
    }
    return narrow && format_q == format_k ? rows_that_fit(*variant, variant->few_shared_bytes,
                                                          variant->many_shared_bytes, shared_bytes)
                                          : 0;
}

/* NULL: there is no such kernel. */
static attend_launch *matrix_launch_find(const kvk_cuda_attend &attend)
{
    uint32_t rows_max =
        kvk_cuda_matrix_rows((enum kvk_format)attend.format_q, (enum kvk_format)attend.format_k,
                             (enum kvk_format)attend.format_v, attend.head_size_k,
                             attend.head_size_v, attend.latent != 0, UINT32_MAX);

    if (attend.unit_rows > rows_max) {
        return nullptr;
    }
    const matrix_variant *variant =
        matrix_variant_find(attend.head_size_k, attend.head_size_v, attend.latent != 0);
    if (is_compact(attend.format_k)) {
        return attend.unit_rows > KVK_CUDA_FEW_ROWS ? variant->many_compact : variant->few_compact;
    }
    if (attend.format_k == KVK_FORMAT_BF16) {
        return attend.unit_rows > KVK_CUDA_FEW_ROWS ? variant->many_bf16 : variant->few_bf16;
    }
    return attend.unit_rows > KVK_CUDA_FEW_ROWS ? variant->many_fp16 : variant->few_fp16;
}

static int plain_launch(const kvk_cuda_attend &attend, void *stream)
{
    uint32_t values = attend.unit_rows * (attend.head_size_k + attend.head_size_v);

    return kvk_launch(kvk_attend_plain, dim3(attend.unit_count, attend.kv_heads), KVK_PLAIN_THREADS,
                      kvk_plain_shared_bytes(attend.unit_rows, values), KVK_PLAIN_SHARED_BYTES_MAX,
                      stream, attend);
}

extern "C" int kvk_cuda_attend_launch(const struct kvk_cuda_attend *attend, void *stream)
{
    attend_launch *launch = plain_launch;
    int error = 0;

    if (attend->kernel == KVK_CUDA_KERNEL_MATRIX) {
        launch = matrix_launch_find(*attend);
    } else if (attend->unit_rows > KVK_CUDA_PLAIN_ROWS_MAX ||
               (uint64_t)attend->unit_rows * (attend->head_size_k + attend->head_size_v) >
                   KVK_CUDA_PLAIN_VALUES_MAX) {
        launch = nullptr;
    }
    if (launch == nullptr) {
        return 1; /* cudaErrorInvalidValue */
    }
    if (attend->unit_count > 0) {
        error = launch(*attend, stream);
    }
    if (error == 0 && attend->merge_count > 0) {
        error = kvk_launch(merge_slots, dim3(attend->merge_count, attend->kv_heads), MERGE_THREADS,
                           0, 0, stream, *attend);
    }
    return error;
}
