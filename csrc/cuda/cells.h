// What a thread of a row kernel does with 16 bytes of a row: rows.cu, latent_rows.cu.
#pragma once
#include "hopper.h"

namespace quire {
namespace {

constexpr int WIDTH = 8;  // elements in 16 bytes

struct Cell {
    int4 bits;
};

__device__ __forceinline__ Cell load_cell(const void* base, int64_t element, bool live) {
    Cell cell{make_int4(0, 0, 0, 0)};
    if (live) cell.bits = load_here(reinterpret_cast<const int4*>(static_cast<const Element*>(base) + element));
    return cell;
}
__device__ __forceinline__ void store_cell(void* base, int64_t element, const Cell& cell) {
    *reinterpret_cast<int4*>(static_cast<Element*>(base) + element) = cell.bits;
}
__device__ __forceinline__ float2 widen(uint32_t pair) {
#if QUIRE_BF16
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#else
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
#endif
}
__device__ __forceinline__ void widen(float (&to)[WIDTH], const Cell& cell) {
    const int words[] = {cell.bits.x, cell.bits.y, cell.bits.z, cell.bits.w};
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {
        const float2 pair = widen(static_cast<uint32_t>(words[i / 2]));
        to[i] = pair.x, to[i + 1] = pair.y;
    }
}
__device__ __forceinline__ Cell narrow(const float (&x)[WIDTH]) {
    return {make_int4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]))};
}
// As e4m3, cut off at its largest number.
__device__ __forceinline__ void store_codes(void* base, int64_t element, const float (&x)[WIDTH], float factor) {
    *reinterpret_cast<uint2*>(static_cast<char*>(base) + element) =
        make_uint2(codes_of(x[0] * factor, x[1] * factor) | codes_of(x[2] * factor, x[3] * factor) << 16,
                   codes_of(x[4] * factor, x[5] * factor) | codes_of(x[6] * factor, x[7] * factor) << 16);
}
__device__ __forceinline__ void round_all(float (&x)[WIDTH]) { widen(x, narrow(x)); }

__device__ __forceinline__ float square_sum(const float (&x)[WIDTH]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) sum += x[i] * x[i] + x[i + 1] * x[i + 1];
    return sum;
}
// x times the norm's factor, rounded, times its weight.
__device__ __forceinline__ void scale(float (&x)[WIDTH], float factor, const Cell& weight) {
    float weights[WIDTH];
    widen(weights, weight);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x[i] *= factor;
    round_all(x);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x[i] *= weights[i];
}

// ---- rotation ------------------------------------------------------------------------------------------------------

struct Turn {  // cosines and sines of a thread's pairs
    float cos[WIDTH], sin[WIDTH];
};

__device__ __forceinline__ void load_floats(float (&to)[WIDTH], const float* from) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 4) {
        const int4 bits = load_here(reinterpret_cast<const int4*>(from + i));
        to[i] = __int_as_float(bits.x), to[i + 1] = __int_as_float(bits.y);
        to[i + 2] = __int_as_float(bits.z), to[i + 3] = __int_as_float(bits.w);
    }
}
__device__ __forceinline__ void load_turn(Turn& turn, const float* cos_sin, int half, int64_t position, int first) {
    const float* from = cos_sin + position * 2 * half + first;
    load_floats(turn.cos, from);
    load_floats(turn.sin, from + half);
}
// Volatile: read where it stands, and from the L2 cache, which all grids share. int32, or int64 if wide.
__device__ __forceinline__ int64_t load_position(const void* positions, bool wide, int64_t row) {
    if (wide) return static_cast<const volatile int64_t*>(positions)[row];
    return static_cast<const volatile int32_t*>(positions)[row];
}
__device__ __forceinline__ void rotate(float (&a)[WIDTH], float (&b)[WIDTH], const Turn& turn) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {  // products are rounded before they are added, as torch does
        const float x = __fsub_rn(__fmul_rn(a[i], turn.cos[i]), __fmul_rn(b[i], turn.sin[i]));
        b[i] = __fadd_rn(__fmul_rn(b[i], turn.cos[i]), __fmul_rn(a[i], turn.sin[i]));
        a[i] = x;
    }
}

}  // namespace
}  // namespace quire
