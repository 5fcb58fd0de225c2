// What expressions of a variant are made of on the CPU (quire/kernels/attention/variant/lowering.py, target C).
//
// A value is a scalar or W lanes of it: float or vf, int32_t or vi, bool or vi of 0 and -1. Each function takes any mix
// and gives lanes if one argument has lanes. Invariant: a lane's result depends on that lane alone.
#pragma once
#include <cmath>  // INFINITY and NAN in constants as well
#include <type_traits>

#include "quire_cpu.h"
#include "simd.h"

namespace quire {

QUIRE_INLINE vf lanes(vf x) { return x; }
QUIRE_INLINE vi lanes(vi x) { return x; }
QUIRE_INLINE vf lanes(float x) { return set1(x); }
QUIRE_INLINE vi lanes(int32_t x) { return set1i(x); }
QUIRE_INLINE vi lanes(bool x) { return set1i(-(int32_t)x); }

template <class... X> constexpr bool are_scalars = (std::is_arithmetic_v<X> && ...);

template <class F> QUIRE_INLINE vf each_lane(vf x, const F& f) {
    for (int i = 0; i < W; i++) x[i] = f(x[i]);
    return x;
}

QUIRE_INLINE float quire_exp(float x) { return std::exp(x); }
QUIRE_INLINE float quire_log(float x) { return std::log(x); }
QUIRE_INLINE float quire_tanh(float x) { return std::tanh(x); }
QUIRE_INLINE float quire_sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }
QUIRE_INLINE float quire_sqrt(float x) { return std::sqrt(x); }
QUIRE_INLINE float quire_sin(float x) { return std::sin(x); }
QUIRE_INLINE float quire_cos(float x) { return std::cos(x); }

QUIRE_INLINE vf quire_exp(vf x) { return exp2(x * 1.4426950408889634f); }
QUIRE_INLINE vf quire_tanh(vf x) { return tanh(x); }
QUIRE_INLINE vf quire_sigmoid(vf x) { return 1.f / (1.f + quire_exp(-x)); }
QUIRE_INLINE vf quire_log(vf x) { return each_lane(x, [](float a) { return std::log(a); }); }
QUIRE_INLINE vf quire_sqrt(vf x) { return each_lane(x, [](float a) { return std::sqrt(a); }); }
QUIRE_INLINE vf quire_sin(vf x) { return each_lane(x, [](float a) { return std::sin(a); }); }
QUIRE_INLINE vf quire_cos(vf x) { return each_lane(x, [](float a) { return std::cos(a); }); }

QUIRE_INLINE float quire_float(int32_t x) { return (float)x; }
QUIRE_INLINE vf quire_float(vi x) { return __builtin_convertvector(x, vf); }

QUIRE_INLINE bool quire_not(bool a) { return !a; }
QUIRE_INLINE vi quire_not(vi a) { return ~a; }

template <class A, class B> QUIRE_INLINE auto quire_and(A a, B b) {
    if constexpr (are_scalars<A, B>) return a && b;
    else return lanes(a) & lanes(b);
}

template <class A, class B> QUIRE_INLINE auto quire_or(A a, B b) {
    if constexpr (are_scalars<A, B>) return a || b;
    else return lanes(a) | lanes(b);
}

template <class C, class A, class B> QUIRE_INLINE auto quire_where(C condition, A a, B b) {
    if constexpr (are_scalars<C, A, B>) return condition ? a : b;
    else return lanes(condition) ? lanes(a) : lanes(b);
}

template <class A, class B> QUIRE_INLINE auto quire_minimum(A a, B b) { return quire_where(b < a, b, a); }
template <class A, class B> QUIRE_INLINE auto quire_maximum(A a, B b) { return quire_where(b > a, b, a); }

template <class A, class B> QUIRE_INLINE auto quire_div(A a, B b) { return a / b; }

// a / b of integers that are not negative. Vectors have no such instruction: two steps of float division and one
// correction give every quotient below 2^31 - 2^7.
QUIRE_INLINE int32_t quire_floordiv(int32_t a, int32_t b) { return a / b; }
QUIRE_INLINE vi quire_floordiv(vi a, vi b) {
    const vf divisor = quire_float(b);
    vi quotient = __builtin_convertvector(quire_float(a) / divisor, vi);
    const vi rest = a - quotient * b, more = __builtin_convertvector(quire_float(rest) / divisor, vi);
    const vi left = rest - more * b;
    return quotient + more - (left >= b) + (left < 0);
}
QUIRE_INLINE vi quire_floordiv(vi a, int32_t b) { return quire_floordiv(a, lanes(b)); }
QUIRE_INLINE vi quire_floordiv(int32_t a, vi b) { return quire_floordiv(lanes(a), b); }

QUIRE_INLINE int32_t quire_mod(int32_t a, int32_t b) { return a % b; }
template <class A, class B> QUIRE_INLINE vi quire_mod(A a, B b) { return a - quire_floordiv(a, b) * b; }

QUIRE_INLINE float quire_load(const float* p, int32_t i) { return p[i]; }
QUIRE_INLINE int32_t quire_load(const int32_t* p, int32_t i) { return p[i]; }
QUIRE_INLINE int32_t quire_load(const uint8_t* p, int32_t i) { return p[i]; }
QUIRE_INLINE bool quire_load(const bool* p, int32_t i) { return p[i]; }

// Lanes mostly read consecutive elements (keys of a block, elements of a head): then one load does.
QUIRE_INLINE bool consecutive(vi i) {
    vi lane;
    for (int l = 0; l < W; l++) lane[l] = l;
    const vi differing = (i - i[0]) != lane;
#if QUIRE_AVX512
    return _mm512_test_epi32_mask((__m512i)differing, (__m512i)differing) == 0;
#elif QUIRE_AVX2
    return _mm256_testz_si256((__m256i)differing, (__m256i)differing);
#else
    return (differing[0] | differing[1] | differing[2] | differing[3]) == 0;
#endif
}

template <class T> QUIRE_INLINE auto quire_load(const T* p, vi i) {
    using Lanes = std::conditional_t<std::is_same_v<T, float>, vf, vi>;
    typedef T Elements __attribute__((vector_size(W * sizeof(T))));
    Lanes found;
    if (consecutive(i)) {
        if constexpr (sizeof(T) == 4) found = load_bits<Lanes>(p + i[0]);
        else found = __builtin_convertvector(load_bits<Elements>(p + i[0]), Lanes);
    } else {
        for (int l = 0; l < W; l++) found[l] = p[i[l]];
    }
    return found;
}

QUIRE_INLINE vi quire_load(const bool* p, vi i) { return -quire_load((const uint8_t*)p, i); }

// Where a hook is, as far as it is the same in all lanes. k_pos: of key and value transforms; lse: of the output's.
struct Site {
    int32_t q_row, q_pos, q_head, kv_head, k_pos;
    float lse;
};

}  // namespace quire
