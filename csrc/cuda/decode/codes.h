// Keys and values of the kernel of small lines as fragments of the matrix instruction: read from shared memory, and
// widened in registers where pages hold e4m3 (CODED). See consumer.h.
//
// A number in e4m3 is one in fp16 exactly, and the conversion is an instruction, so codes are multiplied in fp16,
// whatever q is: q is converted once a line, weights are rounded to fp16's 11 bits instead of bf16's 8. A q beyond
// 65,504, which fp16 does not reach, is cut off there.
//
// One load of 16 x 32 bytes gives the fragments of two tiles of 16 dimensions. Rows of 8 x 8 cells of 16 bits hold two
// codes a cell, so a lane gets neighbours that the instruction would give to others. A sum over dimensions may be taken
// in any order, so of K dimensions 4 t, 4 t + 1 stand at the instruction's places 2 t, 2 t + 1, and 4 t + 2, 4 t + 3
// at 2 t + 8, 2 t + 9 (t = lane % 4); q is read in the same order. Of V dimension 2 g stands at row g of the
// instruction and 2 g + 1 at row g + 8 (g = lane / 4): `dim_of` says where a sum belongs.
#pragma once
#include "decode/lines.h"

namespace quire {
namespace {

constexpr int TILES_READ = CODED ? 2 : 1;  // of 16 dimensions, by one load
using Fragment = uint32_t[4];

// Two elements of q as fp16.
__device__ __forceinline__ uint32_t halves_of_elements(uint32_t pair) {
#if QUIRE_BF16
    return pack_halves(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#else
    return pair;
#endif
}

// Weights of two keys, as the product with values takes them.
__device__ __forceinline__ uint32_t pack_weights(float low, float high) {
    return CODED ? pack_halves(low, high) : pack(low, high);
}

__device__ __forceinline__ void multiply_add_fragment(float (&d)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
    if (CODED) multiply_add_halves(d, a, b0, b1);
    else multiply_add(d, a, b0, b1);
}

__device__ __forceinline__ void load_keys(Fragment (&to)[TILES_READ], uint32_t address) {
    if constexpr (CODED) {
        Fragment codes;  // keys 0 .. 7 and 8 .. 15 of 16 dimensions, then of the next 16
        load_matrices(codes, address);
        for (int i = 0; i < 2; ++i) {
            for (int h = 0; h < 2; ++h) {
                to[i][h] = halves_of_low(codes[2 * i + h]);
                to[i][2 + h] = halves_of_high(codes[2 * i + h]);
            }
        }
    } else {
        load_matrices(to[0], address);
    }
}

__device__ __forceinline__ void load_values(Fragment (&to)[TILES_READ], uint32_t address) {
    if constexpr (CODED) {
        Fragment codes;
        load_matrices_transposed(codes, address);
        for (int i = 0; i < 2; ++i) {
            for (int h = 0; h < 2; ++h) {  // bytes: key 2 t of dimensions 2 g, 2 g + 1, then key 2 t + 1 of both
                const uint32_t by_dim = __byte_perm(codes[2 * i + h], 0, 0x3120);
                to[i][2 * h] = halves_of_low(by_dim);
                to[i][2 * h + 1] = halves_of_high(by_dim);
            }
        }
    } else {
        load_matrices_transposed(to[0], address);
    }
}

// Where sum e of a fragment of O^T belongs in its tile of 16 dimensions.
__device__ __forceinline__ int dim_of(int lane, int e) { return CODED ? lane / 4 * 2 + e / 2 : e / 2 * 8 + lane / 4; }

}  // namespace
}  // namespace quire
