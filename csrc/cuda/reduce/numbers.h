// The types of sums, as words of 4 bytes: to float32 and back, rounded to nearest.
#pragma once
#include "../hopper.h"

namespace quire {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

template <class T> struct Numbers;
template <> struct Numbers<float> {
    static constexpr int OF_WORD = 1;
    static __device__ __forceinline__ void widen(float* to, uint32_t word) { to[0] = __uint_as_float(word); }
    static __device__ __forceinline__ uint32_t narrow(const float* x) { return __float_as_uint(x[0]); }
};
template <> struct Numbers<BFloat16> {
    static constexpr int OF_WORD = 2;
    static __device__ __forceinline__ void widen(float* to, uint32_t word) {
        to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ uint32_t narrow(const float* x) {
        uint32_t word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
        return word;
    }
};
template <> struct Numbers<Float16> {
    static constexpr int OF_WORD = 2;
    static __device__ __forceinline__ void widen(float* to, uint32_t word) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
        to[0] = pair.x, to[1] = pair.y;
    }
    static __device__ __forceinline__ uint32_t narrow(const float* x) {
        uint32_t word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x[1]), "f"(x[0]));
        return word;
    }
};

}  // namespace quire
