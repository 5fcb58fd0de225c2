// What both matrix products share (gemm.cu: few rows, gemm_wide.cu: many): numbers, access by 16 bytes.
#pragma once
#include "cluster.h"
#include "wgmma.h"

namespace quire {

// What is multiplied: elements as y has them, or e4m3 with scales (QUIRE_FP8: 1 of rows of w and of x, 2 of blocks of
// 128 x 128 of w and of 128 columns of a row of x).
#ifndef QUIRE_FP8
#define QUIRE_FP8 0
#endif

// Or w is codes of 4 bits in groups of columns with a scale (QUIRE_NIBBLES: 1 for few rows, 2 for many; QUIRE_ZEROS: and
// a zero point; QUIRE_CHUNK_GROUPS: groups that a chunk has; QUIRE_PAIRED: a stage has two chunks), x elements.
#ifndef QUIRE_NIBBLES
#define QUIRE_NIBBLES 0
#define QUIRE_CHUNK_GROUPS 1
#endif
#ifndef QUIRE_PAIRED
#define QUIRE_PAIRED 0
#endif
#ifndef QUIRE_ZEROS
#define QUIRE_ZEROS 0
#endif
// Or x is elements that each block rounds to e4m3 (QUIRE_ROUNDS: cells of 16 bytes that a thread holds; gemm/rounding.h).
#ifndef QUIRE_ROUNDS
#define QUIRE_ROUNDS 0
#endif
constexpr bool IN_BYTES = QUIRE_FP8 || QUIRE_NIBBLES;       // what w is to the copy engine
constexpr int ROW_BYTES = QUIRE_NIBBLES == 2 ? 64 : 128;    // of a chunk of w
constexpr int CHUNK = QUIRE_NIBBLES ? 2 * ROW_BYTES : QUIRE_FP8 ? 128 : 64;  // columns
constexpr int BOX_COLUMNS = IN_BYTES ? ROW_BYTES : 64;      // the same, as the copy engine counts
constexpr int OPERAND_BYTES = QUIRE_FP8 ? 1 : 2;            // of x
constexpr int SCALE_BLOCK = 128;                            // a chunk of e4m3

// ---- numbers and access by 16 bytes ----------------------------------------------------------------------------------

__device__ __forceinline__ float widen(Element x) { return float(x); }
__device__ __forceinline__ float rounded(float x) { return float(Element(x)); }
__device__ __forceinline__ float low(uint32_t pair) { return widen(reinterpret_cast<const Element*>(&pair)[0]); }
__device__ __forceinline__ float high(uint32_t pair) { return widen(reinterpret_cast<const Element*>(&pair)[1]); }

// SwiGLU of pairs, rounded as separate operations would. In a tile of 256 tokens this takes as long as four chunks of
// the product, so division is approximate (2 units of fp32).
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
__device__ __forceinline__ uint32_t silu_product(uint32_t gate, uint32_t up) {
    const uint32_t y = pack(silu(low(gate)), silu(high(gate)));
    return pack(low(y) * low(up), high(y) * high(up));
}

__device__ __forceinline__ uint4 load16(const void* from) {  // not moved over the wait for the previous grid
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint4 read16(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ float2 read8(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ float read_float(uint32_t address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void write16(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ void write8(uint32_t address, uint2 x) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
__device__ __forceinline__ void write4(uint32_t address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Loads that stay behind the wait for the previous grid.
__device__ __forceinline__ float load_float(const float* from) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
}

// ---- tensor maps -----------------------------------------------------------------------------------------------------

constexpr CUtensorMapL2promotion L2_BY_128 = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
constexpr CUtensorMapSwizzle SWIZZLED = CU_TENSOR_MAP_SWIZZLE_128B;
constexpr CUtensorMapSwizzle W_SWIZZLE = ROW_BYTES == 128 ? SWIZZLED : CU_TENSOR_MAP_SWIZZLE_64B;

// Boxes of n_rows rows of w [n, k] and CHUNK columns, of a pair twice as many; for SiLU 8 rows of gate and the same 8 of
// up in turn.
inline cudaError_t encode_weights(CUtensorMap* map, const void* w, uint64_t n, uint64_t k, bool silu, uint32_t n_rows) {
    const uint64_t row = k * ROW_BYTES / CHUNK, width = IN_BYTES ? row : k;
    const uint64_t sizes[] = {width, n}, strides[] = {row};
    const uint32_t box[] = {BOX_COLUMNS, n_rows};
    const uint64_t pair_sizes[] = {width, 8, 2, n / 16}, pair_strides[] = {row, n / 2 * row, 8 * row};
    const uint32_t pair_box[] = {BOX_COLUMNS, 8, 2, n_rows / 16};
    if (QUIRE_PAIRED) {
        const uint64_t both_sizes[] = {ROW_BYTES, n, k / CHUNK}, both_strides[] = {row, ROW_BYTES};
        const uint64_t silu_sizes[] = {ROW_BYTES, 8, 2, n / 16, k / CHUNK};
        const uint64_t silu_strides[] = {row, n / 2 * row, 8 * row, ROW_BYTES};
        const uint32_t both_box[] = {ROW_BYTES, n_rows, 2}, silu_box[] = {ROW_BYTES, 8, 2, n_rows / 16, 2};
        return silu ? encode_map(map, w, 5, silu_sizes, silu_strides, silu_box, L2_BY_128, W_SWIZZLE, true)
                    : encode_map(map, w, 3, both_sizes, both_strides, both_box, L2_BY_128, W_SWIZZLE, true);
    }
    return silu ? encode_map(map, w, 4, pair_sizes, pair_strides, pair_box, L2_BY_128, W_SWIZZLE, IN_BYTES)
                : encode_map(map, w, 2, sizes, strides, box, L2_BY_128, W_SWIZZLE, IN_BYTES);
}

// Boxes of n_rows rows of x [m, k] and a chunk of columns: rows of 128 bytes, of codes several beside one another.
inline cudaError_t encode_tokens(CUtensorMap* map, const void* x, uint64_t m, uint64_t k, uint64_t x_row, uint32_t n_rows) {
    const uint64_t sizes[] = {k, m}, strides[] = {x_row * OPERAND_BYTES};
    const uint32_t box[] = {CHUNK, n_rows}, parts_box[] = {64, n_rows, CHUNK / 64};
    const uint64_t parts_sizes[] = {64, m, k / 64}, parts_strides[] = {x_row * 2, 128};
    return QUIRE_NIBBLES ? encode_map(map, x, 3, parts_sizes, parts_strides, parts_box)
                         : encode_map(map, x, 2, sizes, strides, box, L2_BY_128, SWIZZLED, QUIRE_FP8);
}

// Boxes of results of many rows: n_rows of y by n_tokens, as they lie in shared memory.
inline cudaError_t encode_results(CUtensorMap* map, const void* y, int n, int m, int64_t y_row, uint32_t n_rows,
                                  uint32_t n_tokens) {
    const uint64_t sizes[] = {uint64_t(n), uint64_t(m)}, strides[] = {uint64_t(y_row) * 2};
    const uint32_t box[] = {n_rows, n_tokens};
    return encode_map(map, y, 2, sizes, strides, box, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                      n_rows == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
}

// Boxes of the scales of those rows and of a chunk, and of the zero points between their lines.
inline cudaError_t encode_scales(CUtensorMap* map, const void* scales, uint64_t n, int k, int group, bool silu, uint32_t n_rows) {
    const uint64_t n_lines = uint64_t((k + group - 1) / group) * (1 + QUIRE_ZEROS);
    const uint32_t n_boxed = QUIRE_CHUNK_GROUPS * (1 + QUIRE_ZEROS) * (1 + QUIRE_PAIRED);
    const uint64_t sizes[] = {n, n_lines}, strides[] = {n * 2}, pair_sizes[] = {8, 2, n / 16, n_lines};
    const uint64_t pair_strides[] = {n, 16, n * 2};
    const uint32_t box[] = {n_rows, n_boxed}, pair_box[] = {8, 2, n_rows / 16, n_boxed};
    return silu ? encode_map(map, scales, 4, pair_sizes, pair_strides, pair_box, L2_BY_128, CU_TENSOR_MAP_SWIZZLE_NONE)
                : encode_map(map, scales, 2, sizes, strides, box, L2_BY_128, CU_TENSOR_MAP_SWIZZLE_NONE);
}
// row: of y. Divides only where chunks are parts of groups.
__device__ __forceinline__ void load_scales(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int row,
                                            int chunk, int k, int group) {
    const int of_chunk = group >= k ? 0 : group > CHUNK ? chunk * CHUNK / group : chunk * QUIRE_CHUNK_GROUPS;
    const int line = of_chunk * (1 + QUIRE_ZEROS);
#if QUIRE_SILU
    load_box(to, map, barrier, hint, 0, 0, row / 8, line);
#else
    load_box(to, map, barrier, hint, row, line);
#endif
}

}  // namespace quire
