// Rows around attention to lines: their sizes, tiles of them in shared memory, and products of a warp.
#pragma once
#include "cells.h"

namespace quire {
namespace {

constexpr int RANK = 512, ROPE = 64, LINE = RANK + ROPE, PLAIN = 128;
constexpr int BLOCK_ROWS = 64, THREADS = 128, WARPS = THREADS / 32;

// ---- a tile of rows in shared memory: 16-byte cell c of a row is found at cell c ^ (row % 8) ------------------------

template <int CELLS> __device__ __forceinline__ uint32_t place_of(uint32_t tile, int row, int cell) {
    return tile + row * (CELLS * 16) + (cell ^ row % 8) * 16;
}

// Rows at `from`, `stride` elements apart; zeros from n_real on.
template <int CELLS, int N_THREADS>
__device__ __forceinline__ void load_tile(uint32_t tile, const void* from, int64_t stride, int n_rows, int n_real) {
    for (int i = threadIdx.x; i < n_rows * CELLS; i += N_THREADS) {
        const int row = i / CELLS, cell = i % CELLS;
        const Element* at = static_cast<const Element*>(from) + min(row, n_real - 1) * stride + cell * WIDTH;
        copy_16_bytes(place_of<CELLS>(tile, row, cell), at, row < n_real);
    }
}

// The left side of a product: 16 rows from `row` on, 16 columns from cell 2 k on.
template <int CELLS> __device__ __forceinline__ void load_left(uint32_t (&a)[4], uint32_t tile, int row, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, place_of<CELLS>(tile, row + lane % 16, 2 * k + lane / 16));
}
// The right side: 16 columns of the result, from tile row `row` on, whose rows are columns of the result.
template <int CELLS> __device__ __forceinline__ void load_right(uint32_t (&b)[4], uint32_t tile, int row, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices(b, place_of<CELLS>(tile, row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// The same of a tile whose columns are those of the result, from cell `cell` on.
template <int CELLS> __device__ __forceinline__ void load_right_turned(uint32_t (&b)[4], uint32_t tile, int cell, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices_transposed(b, place_of<CELLS>(tile, 16 * k + lane % 16, cell + lane / 16));
}

__device__ __forceinline__ void store_pair(void* base, int64_t element, float first, float second) {
    *reinterpret_cast<uint32_t*>(static_cast<Element*>(base) + element) = pack(first, second);
}

}  // namespace
}  // namespace quire
