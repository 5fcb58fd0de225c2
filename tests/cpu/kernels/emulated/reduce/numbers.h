// Stands in for csrc/cuda/reduce/numbers.h where there is no GPU.
#pragma once
#include "../hopper.h"

namespace quire {

struct BFloat16 {};
struct Float16 {};

inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline uint16_t rounded_bf16(float x) {
    const uint32_t bits = same_bits<uint32_t>(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <class T> struct Numbers;
template <> struct Numbers<float> {
    static constexpr int OF_WORD = 1;
    static void widen(float* to, uint32_t word) { to[0] = __uint_as_float(word); }
    static uint32_t narrow(const float* x) { return __float_as_uint(x[0]); }
};
template <> struct Numbers<BFloat16> {
    static constexpr int OF_WORD = 2;
    static void widen(float* to, uint32_t word) {
        to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000u);
    }
    static uint32_t narrow(const float* x) { return rounded_bf16(x[0]) | uint32_t(rounded_bf16(x[1])) << 16; }
};
template <> struct Numbers<Float16> {
    static constexpr int OF_WORD = 2;
    static void widen(float* to, uint32_t word) {
        const float2 pair = __half22float2(same_bits<__half2>(word));
        to[0] = pair.x, to[1] = pair.y;
    }
    static uint32_t narrow(const float* x) {
        return same_bits<uint32_t>(__half2{static_cast<_Float16>(x[0]), static_cast<_Float16>(x[1])});
    }
};

}  // namespace quire
