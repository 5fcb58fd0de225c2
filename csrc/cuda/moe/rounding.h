// Rows of x in e4m3, sixteen bytes of elements at a time: what quire/kernels/w8a8/reference.py makes of them, code for code.
#pragma once
#include "gemm.h"

namespace quire {

constexpr float LARGEST_CODE = 448.0f, LEAST_LARGEST = 1e-10f;
constexpr int CELL = 8, GROUP_CELLS = 16;  // elements of a cell; cells of 128 columns, which share a scale

struct Eight {
    float x[CELL];

    __device__ __forceinline__ explicit Eight(const int4& cell) {
        const uint32_t words[] = {uint32_t(cell.x), uint32_t(cell.y), uint32_t(cell.z), uint32_t(cell.w)};
#pragma unroll
        for (int i = 0; i < CELL; i += 2) x[i] = low(words[i / 2]), x[i + 1] = high(words[i / 2]);
    }
    __device__ __forceinline__ float largest() const {
        float found = 0.0f;
#pragma unroll
        for (int i = 0; i < CELL; i++) found = fmaxf(found, fabsf(x[i]));
        return found;
    }
    __device__ __forceinline__ uint2 codes(float scale) const {
        uint32_t pairs[CELL / 2];
#pragma unroll
        for (int i = 0; i < CELL; i += 2) pairs[i / 2] = codes_of(__fdiv_rn(x[i], scale), __fdiv_rn(x[i + 1], scale));
        return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    }
};
template <int LANES> __device__ __forceinline__ float largest_of_lanes(float x) {  // neighbours; all of a warp call it
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ float scale_of(float largest) { return __fdiv_rn(fmaxf(largest, LEAST_LARGEST), LARGEST_CODE); }

// The numbers of codes, which elements are exactly.
__device__ __forceinline__ uint32_t elements_of(uint32_t halves) {
    const float2 two = __half22float2(reinterpret_cast<const __half2&>(halves));
    return pack(two.x, two.y);
}
__device__ __forceinline__ uint4 elements_of(const uint2& codes) {
    uint4 found;
    found.x = elements_of(halves_of_low(codes.x)), found.y = elements_of(halves_of_high(codes.x));
    found.z = elements_of(halves_of_low(codes.y)), found.w = elements_of(halves_of_high(codes.y));
    return found;
}

// ---- cells of a row, `step` apart, by one warp ---------------------------------------------------------------------

constexpr int AT_ONCE = 4;  // loads on their way

__device__ __forceinline__ void load_cells(int4 (&cells)[AT_ONCE], const int4* from, int first, int step, int n_cells) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        cells[i] = first + i * step < n_cells ? load_here(from + first + i * step) : make_int4(0, 0, 0, 0);
}
__device__ __forceinline__ float largest_of_row(const int4* from, int n_cells) {
    int4 cells[AT_ONCE];
    float found = 0.0f;
    for (int first = threadIdx.x % 32; first < n_cells; first += 32 * AT_ONCE) {
        load_cells(cells, from, first, 32, n_cells);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) found = fmaxf(found, Eight(cells[i]).largest());
    }
    return largest_of_lanes<32>(found);
}
// A row into shared memory, its codes as elements, and its scales times a factor, `scales_step` bytes apart: n_warps warps
// have 32 cells in turn, this is the warp-th. IN_BLOCKS: 128 columns share a scale; else the row does, and each warp looks
// at all of it.
template <bool IN_BLOCKS>
__device__ __forceinline__ void keep_rounded(uint32_t to, uint32_t scales, int scales_step, float factor, const Element* row,
                                             int n_cells, int warp, int n_warps) {
    const int4* from = reinterpret_cast<const int4*>(row);
    const int lane = threadIdx.x % 32, step = 32 * n_warps;
    const float of_row = IN_BLOCKS ? 0.0f : largest_of_row(from, n_cells);
    int4 cells[AT_ONCE];
    for (int first = warp * 32 + lane; first < n_cells + lane; first += step * AT_ONCE) {
        load_cells(cells, from, first, step, n_cells);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * step;
            if (at >= n_cells + lane) break;
            const Eight eight(cells[i]);
            const float scale = scale_of(IN_BLOCKS ? largest_of_lanes<GROUP_CELLS>(eight.largest()) : of_row);
            if (at < n_cells) write16(to + at * 16, elements_of(eight.codes(scale)));
            if (at < n_cells && at % GROUP_CELLS == 0 && (IN_BLOCKS || at == 0))
                write4(scales + at / GROUP_CELLS * scales_step, scale * factor);
        }
    }
}

}  // namespace quire
