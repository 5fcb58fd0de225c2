// One product of a mixture of experts of many rows: y[s] = f(x[s] w[e]^T) for the rows s of each expert e, which lie
// together (moe_rows.cu). x [slots, K], or [tokens, K] in the first product; w [experts, N, K] as nn.Linear stores each.
//
// As in gemm_wide.cu rows of w are the 64-row operand of wgmma and the tokens its columns. A tile is 256 rows of w by
// up to TOKENS rows of x of one expert, from a list made on the device. Two warpgroups multiply its halves
// (moe/wide_products.h, moe/wide_results.h); a third keeps a ring of shared memory filled (moe/wide_loads.h): all by the
// copy engine (TMA), but that it gathers the tokens' rows in the first product, which need not be copied into the order of
// experts before. Blocks take tiles in turn, all rows of w for a tile of x first, so that tiles that run together share
// what they read. A tile with fewer rows uses a narrower instruction; what it meets beyond them, rows of the next expert
// or of an earlier tile, is multiplied, too, and not stored.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (64, 128, 160), QUIRE_SILU (the first product: gate rows of w above up rows), and those
// of moe/codes.h, where w is in codes: these are made to numbers in registers. Or QUIRE_FP8 (gemm.h): w and x are e4m3 with
// scales (moe_round.cu), in the order of experts, and y is as without. Codes and QUIRE_FP8 have no registers for 160.
#include "moe/wide_loads.h"
#include "moe/wide_results.h"
#include "shared_memory.h"

namespace quire {

__global__ void __launch_bounds__(THREADS, 1) moe_wide(const __grid_constant__ CUtensorMap w_map,
                                                       const __grid_constant__ CUtensorMap x_map,
                                                       const __grid_constant__ CUtensorMap y_map,
                                                       const __grid_constant__ CUtensorMap scale_map,
                                                       const __grid_constant__ QuireMoeWideArgs args) {
    extern __shared__ __align__(1024) char shared[];
    MoeResults worker(args, shared);
    MoeLoads loader(args, shared);
    if (threadIdx.x == WORKERS) prefetch_map(GATHERS ? &w_map : &x_map), prefetch_map(&w_map);
    loader.init();
    // The list of tiles is made before the first product, which lets the second start when it is there.
    if (QUIRE_SILU) wait_for_previous_grid();
    let_next_grid_start();
    worker.count(), loader.count();
    if (threadIdx.x < WORKERS) {
        registers_up<MULTIPLYING>();
        worker.work(&y_map);
    } else {
        registers_down<LOADING>();
        if (GATHERS) {
            loader.gather(&w_map);
        } else if (threadIdx.x == WORKERS) {
            loader.feed(&w_map, &x_map, &scale_map);
        }
    }
}

inline cudaError_t encode_experts(CUtensorMap* map, const QuireMoeWideArgs& a) {
    const uint64_t k = a.k, row = k * W_ROW_BYTES / CHUNK, n = a.n_rows, n_experts = a.n_experts;
    const uint64_t width = QUIRE_CODES ? row : k;
    constexpr bool IN_BYTES = QUIRE_CODES != 0 || QUIRE_FP8 != 0;
    const uint64_t sizes[] = {width, n, n_experts}, strides[] = {row, n * row};
    const uint32_t box[] = {W_STEP, ROWS, 1};
    const uint64_t pair_sizes[] = {width, 8, 2, n / 8, n_experts}, pair_strides[] = {row, n * row, 8 * row, 2 * n * row};
    const uint32_t pair_box[] = {W_STEP, 8, 2, ROWS / 16, 1};
    constexpr CUtensorMapSwizzle SWIZZLE = W_ROW_BYTES == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                           : W_ROW_BYTES == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                               : CU_TENSOR_MAP_SWIZZLE_NONE;
    return QUIRE_SILU ? encode_map(map, a.w, 5, pair_sizes, pair_strides, pair_box, L2_BY_128, SWIZZLE, IN_BYTES)
                      : encode_map(map, a.w, 3, sizes, strides, box, L2_BY_128, SWIZZLE, IN_BYTES);
}

int launch(const QuireMoeWideArgs& a, cudaStream_t stream) {
    CUtensorMap w_map, y_map, x_map = {}, scale_map = {};
    cudaError_t error = encode_experts(&w_map, a);
    if (error != cudaSuccess) return error;
    const uint64_t x_sizes[] = {uint64_t(a.k), uint64_t(a.n_slots)}, x_strides[] = {uint64_t(a.k) * OPERAND_BYTES};
    const uint32_t x_box[] = {CHUNK, BOX_TOKENS};
    if (!GATHERS) error = encode_map(&x_map, a.x, 2, x_sizes, x_strides, x_box, L2_BY_128, SWIZZLED, QUIRE_FP8 != 0);
    if (error != cudaSuccess) return error;
    if (QUIRE_FP8 == 2) {
        const uint64_t sizes[] = {uint64_t(a.n_slots) * 4, (uint64_t(a.k) + 127) / 128}, strides[] = {uint64_t(a.x_scales_row) * 4};
        const uint32_t box[] = {BOX_TOKENS * 4, 1};
        error = encode_map(&scale_map, a.x_scales, 2, sizes, strides, box, L2_BY_128, CU_TENSOR_MAP_SWIZZLE_NONE, true);
        if (error != cudaSuccess) return error;
    }
    const uint64_t y_sizes[] = {uint64_t(a.n_rows), uint64_t(a.n_slots)}, y_strides[] = {uint64_t(a.n_rows) * 2};
    const uint32_t y_box[] = {OUT_ROWS, ROUND_TOKENS};
    error = encode_map(&y_map, a.y, 2, y_sizes, y_strides, y_box, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                       QUIRE_SILU ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
    if (error != cudaSuccess) return error;
    error = allow_shared_memory<moe_wide>(END);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.n_blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = END;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, moe_wide, w_map, x_map, y_map, scale_map, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_moe_wide(const QuireMoeWideArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
