// How a tile multiplies: engines with one interface.
//
// WideEngine<T> converts what keys and values are stored as to float32 and multiplies with fma. Bf16Engine multiplies
// pairs of bf16 with vdpbf16ps where the instruction set has it, AmxEngine with tile registers, Int8Engine integers.
// They lay a block of B keys out as panels: keys transposed (lanes are keys), values as rows (lanes are dimensions).
// Tiles of few rows (decode) skip the panels. AmxEngine has a panel of values for every tile, and reads keys where they
// lie. Each score is one chain over d in one lane, each output one chain over keys in one lane (or sums of integers,
// which have no order): the same whatever the number of rows, with or without panels. The scales of entries (entries.h)
// are applied by the caller to scores, and to weights in put_weights.
// Pointers to keys and values beyond the valid ones lead to a row of zeros.
#pragma once
#include <cstdlib>

#include "entries.h"

namespace quire {

#if QUIRE_AVX512
constexpr int KEYS = 64, COLUMNS = 4, ROWS = 6;  // COLUMNS vectors x ROWS rows of accumulators stay in registers
#elif QUIRE_AVX2
constexpr int KEYS = 32, COLUMNS = 2, ROWS = 6;
#else
constexpr int KEYS = 32, COLUMNS = 2, ROWS = 4;
#endif

QUIRE_INLINE int padded(int d) { return (d + W - 1) / W * W; }  // dimensions, in whole vectors

// Addresses of the keys and values of one block; beyond the n valid ones they lead to zeros.
template <class T> struct KeyBlock {
    const T *keys[KEYS], *values[KEYS];
    int32_t positions[KEYS];  // for hooks; beyond the n valid ones that of the last
    int n;
};

// Ask for the cache line at dimension i of W keys and values from j on.
template <class T> QUIRE_INLINE void prefetch(const KeyBlock<T>& block, int j, int i) {
    if (i * sizeof(T) % 64 != 0) return;  // a step may be less than a cache line
#pragma GCC unroll 16
    for (int r = j; r < j + W; r++) {
        __builtin_prefetch(block.keys[r] + i, 0, 2);
        __builtin_prefetch(block.values[r] + i, 0, 2);
    }
}

template <int N> struct Int { static constexpr int value = N; };

// Calls f(Int<n>{}) for n in 1 .. MOST, so that loops over n unroll.
template <int MOST, class F> QUIRE_INLINE void by_count(int n, const F& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return by_count<MOST - 1>(n, f);
    }
    f(Int<MOST>{});
}

// Calls f(Int<number of rows>{}, Int<vectors that hold n_keys>{}).
template <class F> QUIRE_INLINE void by_rows_and_columns(int n_rows, int n_keys, const F& f) {
    by_count<ROWS>(n_rows, [&](auto rows) {
        by_count<COLUMNS>((n_keys + W - 1) / W, [&](auto columns) { f(rows, columns); });
    });
}

// acc[i][j] over `steps` chained multiply-adds: multiply(acc, a, b). a(step, i) is a broadcast, b(step, j) a vector.
template <int R, int C, class Vector, class Mul, class A, class Bf>
QUIRE_INLINE void chain(Vector (&acc)[R][C], int steps, const A& a, const Bf& b, const Mul& multiply) {
    for (int t = 0; t < steps; t++) {
        decltype(b(0, 0)) right[C];
#pragma GCC unroll 8
        for (int j = 0; j < C; j++) right[j] = b(t, j);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const auto left = a(t, i);
#pragma GCC unroll 8
            for (int j = 0; j < C; j++) acc[i][j] = multiply(acc[i][j], left, right[j]);
        }
    }
}

// acc[r, :] = acc[r, :] * rescale[r] + sum over keys of weights[r, key] * value(step, dimension), keys in order.
template <class E, class Value>
QUIRE_INLINE void combine(
    int n_rows, const typename E::Weight* weights, const float* rescale, int n_keys, int lanes_d, float* acc,
    const Value& value) {
    for (int i0 = 0; i0 < lanes_d; i0 += COLUMNS * W) {
        const int left = (lanes_d - i0) / W;
        by_count<E::R>(n_rows, [&](auto rows) {
            by_count<COLUMNS>(left < COLUMNS ? left : COLUMNS, [&](auto columns) {
                constexpr int N = decltype(rows)::value, C = decltype(columns)::value;
                vf o[N][C];
#pragma GCC unroll 8
                for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) o[i][c] = load(acc + i * lanes_d + i0 + c * W) * rescale[i];
                chain<N, C>(
                    o, E::steps(n_keys), [&](int t, int i) { return E::weight(weights + i * E::B, t); },
                    [&](int t, int c) { return value(t, i0 + c * W); }, E::multiply_add);
#pragma GCC unroll 8
                for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) store(acc + i * lanes_d + i0 + c * W, o[i][c]);
            });
        });
    }
}

struct VectorEngine {
    static constexpr bool PANELS_ONLY = false;  // no way of its own for few rows
    struct Session {};                          // lives as long as a tile of attention is at work
};

template <class Element> struct WideEngine : VectorEngine {
    using T = Element;
    using Query = float;
    using Weight = float;
    static constexpr int B = KEYS, R = ROWS, WEIGHTS = B;
    struct Panels {
        float *k, *v;  // k: [padded d, B], v: [B, padded d]
    };

    static size_t panel_bytes(int d) { return sizeof(float) * 2 * B * padded(d); }
    static size_t query_bytes(int d) { return sizeof(float) * padded(d); }
    static Panels panels(char* at, int d) { return {(float*)at, (float*)at + B * padded(d)}; }

    // Store probabilities as the second product reads them; returns what was stored.
    static vf put(Weight* to, vf v) {
        store(to, v);
        return v;
    }

    // The same for weights of values with scales.
    template <int N> static void put_weights(Weight* to, const vf (&w)[N], const float* scales) {
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) store(to + i * W, w[i] * load(scales + i * W));
    }

    template <class Q> static void pack_query(const Q* from, float* query, int r, int d) {
        float* to = query + r * padded(d);
        for (int i = 0; i < d; i += W) store(to + i, i + W <= d ? load(from + i) : load_some(from + i, d - i));
    }

    static void pack(const Panels& p, const KeyBlock<T>& block, const KeyBlock<T>& next, int d) {
        for (int j = 0; j < B; j += W)
            for (int i = 0; i < d; i += W) {
                vf rows[W];
                load_transposed(rows, block.keys + j, i, d);
                prefetch(next, j, i);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) store(p.k + (i + r) * B + j, rows[r]);
            }
        for (int j = 0; j < block.n; j++)
            for (int i = 0; i < d; i += W) store(p.v + j * padded(d) + i, values_at(block.values[j] + i, d - i));
    }

    // Scores of at least the first n_keys keys of a block.
    static void scores(int n_rows, const float* query, int row, const Panels& p, int n_keys, int d, float* s) {
        const float* q = query + (int64_t)row * padded(d);
        const int stride = padded(d);
        for (int j = 0; j < n_keys; j += COLUMNS * W)
            by_count<R>(n_rows, [&](auto rows) {
                constexpr int N = decltype(rows)::value;
                vf acc[N][COLUMNS] = {};
                chain<N, COLUMNS>(
                    acc, d, [&](int t, int i) { return set1(q[i * stride + t]); },
                    [&](int t, int c) { return load(p.k + t * B + j + c * W); }, multiply_add);
#pragma GCC unroll 8
                for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                    for (int c = 0; c < COLUMNS; c++) store(s + i * B + j + c * W, acc[i][c]);
            });
    }

    // The same scores for few rows, without panels: a block of keys is transposed in registers.
    static void scores_of_few(
        int n_rows, const float* q, const KeyBlock<T>& block, const KeyBlock<T>& next, int d, float* s) {
        const int stride = padded(d);
        by_count<R>(n_rows, [&](auto rows) {
            constexpr int N = decltype(rows)::value;
            for (int j = 0; j < B; j += W) {
                vf acc[N] = {};
                for (int i = 0; i < d && j < block.n; i += W) {
                    vf right[W];
                    load_transposed(right, block.keys + j, i, d);
                    prefetch(next, j, i);
#pragma GCC unroll 16
                    for (int t = 0; t < W; t++)
#pragma GCC unroll 8
                        for (int r = 0; r < N; r++) acc[r] = fma(set1(q[r * stride + i + t]), right[t], acc[r]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < N; r++) store(s + r * B + j, acc[r]);
            }
        });
    }

    // Dimensions i .. i + W - 1 of W keys, lanes are keys.
    QUIRE_INLINE void load_transposed(vf (&to)[W], const T* const* keys, int i, int d) {
        if (d - i >= W) {
#pragma GCC unroll 16
            for (int r = 0; r < W; r++) to[r] = load(keys[r] + i);
        } else {
            for (int r = 0; r < W; r++) to[r] = load_some(keys[r] + i, d - i);
        }
        transpose(to);
    }

    static vf values_at(const T* p, int live) { return live >= W ? load(p) : load_some(p, live); }

    static void accumulate(
        int n_rows, const float* w, const float* rescale, const Panels& p, int n_keys, int lanes_d, float* acc) {
        combine<WideEngine>(n_rows, w, rescale, n_keys, lanes_d, acc, [&](int t, int i) {
            return load(p.v + t * lanes_d + i);
        });
    }

    // The same for few rows, without panels; d is a multiple of W.
    static void accumulate_few(
        int n_rows, const float* w, const float* rescale, const T* const* values, int n_keys, int d, float* acc) {
        combine<WideEngine>(n_rows, w, rescale, n_keys, d, acc, [&](int t, int i) { return load(values[t] + i); });
    }

    static vf weight(const float* w, int t) { return set1(w[t]); }
    static int steps(int n_keys) { return n_keys; }
    static vf multiply_add(vf sum, vf a, vf b) { return fma(a, b, sum); }
};

}  // namespace quire

#include "engine_bf16.h"
#include "engine_int8.h"
#include "engine_amx.h"
