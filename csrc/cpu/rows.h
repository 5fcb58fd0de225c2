// Arithmetic of one row: norm, rotary embedding, gated activation. Used alone (rows.cpp) and around products.
//
// Invariant: a row is computed alone, in one order, whoever asks; so a fused step has the bits of separate ones.
#pragma once
#include "simd.h"

namespace quire {

// Calls f(vector index, number of live lanes) over h elements.
template <class F> QUIRE_INLINE void each_vector(int64_t h, const F& f) {
    int64_t i = 0;
    for (; i + W <= h; i += W) f(i, W);
    if (i < h) f(i, (int)(h - i));
}

template <class T> QUIRE_INLINE vf get_lanes(const T* p, int n) { return n == W ? load(p) : load_some(p, n); }

template <class T> QUIRE_INLINE void put_lanes(T* p, vf v, int n) {
    if (n == W) store(p, v);
    else store_some(p, v, n);
}

// What comes back from storing v as T.
template <class T> QUIRE_INLINE vf rounded(vf v) {
    if constexpr (std::is_same_v<T, float>) return v;
    else if constexpr (std::is_same_v<T, bf16>) return (vf)(bf16_bits(v) << 16);
    else {
        T lane[W];
        store(lane, v);
        return load(lane);
    }
}

// out = norm(x) * weight over h elements; residual may be null, else total = x + residual is stored and normalised.
template <class T>
void norm_row(const T* x, const T* residual, T* total, const T* weight, T* out, int64_t h, float eps) {
    vf squares = vf{};
    each_vector(h, [&](int64_t i, int n) {
        vf v = get_lanes(x + i, n);
        if (residual != nullptr) {
            v = rounded<T>(v + get_lanes(residual + i, n));
            put_lanes(total + i, v, n);
        }
        squares = fma(v, v, squares);
    });
    const T* source = residual != nullptr ? total : x;
    const float mean = hsum(squares) / (float)h;
    const vf factor = set1(1.f / __builtin_sqrtf(mean + eps));
    each_vector(h, [&](int64_t i, int n) {
        put_lanes(out + i, rounded<T>(get_lanes(source + i, n) * factor) * get_lanes(weight + i, n), n);
    });
}

template <class T> void rope_head(T* x, const float* cos, const float* sin, int64_t half) {
    each_vector(half, [&](int64_t i, int n) {
        const vf a = get_lanes(x + i, n), b = get_lanes(x + half + i, n);
        const vf c = get_lanes(cos + i, n), s = get_lanes(sin + i, n);
        put_lanes(x + i, fma(a, c, -(b * s)), n);
        put_lanes(x + half + i, fma(b, c, a * s), n);
    });
}

template <class T> QUIRE_INLINE vf silu_mul(vf gate, vf up) {
    return rounded<T>(gate / (exp2(gate * -1.4426950408889634f) + 1.f)) * up;
}

template <class T> void silu_row(const T* x, T* out, int64_t f) {
    each_vector(f, [&](int64_t i, int n) {
        put_lanes(out + i, silu_mul<T>(get_lanes(x + i, n), get_lanes(x + f + i, n)), n);
    });
}

// Work of some 20 microseconds; less is not worth waking a thread, least of all on a busy machine.
constexpr int64_t ELEMENTS_A_CHUNK = 32768;

inline int64_t rows_a_chunk(int64_t row_elements) {
    const int64_t rows = ELEMENTS_A_CHUNK / (row_elements > 0 ? row_elements : 1);
    return rows > 0 ? rows : 1;
}

// Calls f with a null pointer of the element type.
template <class F> void by_dtype(int dtype, const F& f) {
    if (dtype == 0) f((float*)nullptr);
    else if (dtype == 1) f((bf16*)nullptr);
    else f((f16*)nullptr);
}

}  // namespace quire
