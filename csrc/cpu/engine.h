// How a tile multiplies: two engines with one interface.
//
// WideEngine<T> converts to float32 and multiplies with fma. Bf16Engine multiplies pairs of bf16 with vdpbf16ps where
// the instruction set has it. Both lay a block of B keys out as panels: keys transposed (lanes are keys), values as
// rows (lanes are dimensions). Each score is one chain over d in one lane, each output one chain over keys in one lane:
// the same chain whatever the number of rows. Keys beyond the valid ones are zeros in the panels.
#pragma once
#include <cstdlib>

#include "simd.h"

namespace quire {

#if QUIRE_AVX512
constexpr int KEYS = 64, COLUMNS = 4, ROWS = 6;  // COLUMNS vectors x ROWS rows of accumulators stay in registers
#elif QUIRE_AVX2
constexpr int KEYS = 32, COLUMNS = 2, ROWS = 6;
#else
constexpr int KEYS = 32, COLUMNS = 2, ROWS = 4;
#endif

QUIRE_INLINE int padded(int d) { return (d + W - 1) / W * W; }

template <class P> QUIRE_INLINE void prefetch(const P* p, int n) {
    for (int i = 0; i * 64 < n * (int)sizeof(P); i++) __builtin_prefetch((const char*)p + i * 64, 0, 3);
}

// Calls f with integral constants <R, C> for r in 1 .. ROWS and c in 1 .. COLUMNS.
template <int N> struct Int { static constexpr int value = N; };

template <int MOST, class F> QUIRE_INLINE void by_count(int n, const F& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return by_count<MOST - 1>(n, f);
    }
    f(Int<MOST>{});
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

template <class Element> struct WideEngine {
    using T = Element;
    using Query = float;
    using Weight = float;
    static constexpr int B = KEYS, R = ROWS;
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

    static void pack_query(const T* from, float* query, int r, int d) {
        float* to = query + r * padded(d);
        for (int i = 0; i < d; i += W) store(to + i, i + W <= d ? load(from + i) : load_some(from + i, d - i));
    }

    static void pack(
        const Panels& p, const T* const* keys, const T* const* values, int n, const T* const* next_keys,
        const T* const* next_values, int n_next, int d) {
        const int wide = padded(d);
        for (int j = 0; j < B; j += W)
            for (int i = 0; i < d; i += W) {
                vf rows[W];
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) {
                    if (j + r >= n) rows[r] = vf{};
                    else rows[r] = i + W <= d ? load(keys[j + r] + i) : load_some(keys[j + r] + i, d - i);
                }
                transpose(rows);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) store(p.k + (i + r) * B + j, rows[r]);
                if (i == 0)
                    for (int r = j; r < j + W && r < n_next; r++) prefetch(next_keys[r], d);
            }
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < d; i += W)
                store(p.v + j * wide + i, i + W <= d ? load(values[j] + i) : load_some(values[j] + i, d - i));
            if (j < n_next) prefetch(next_values[j], d);
        }
    }

    static void scores(int n_rows, const float* query, int row, const Panels& p, int d, float* s) {
        const float* q = query + (int64_t)row * padded(d);
        const int stride = padded(d);
        for (int j = 0; j < B; j += COLUMNS * W)
            by_count<R>(n_rows, [&](auto rows) {
                constexpr int N = decltype(rows)::value;
                vf acc[N][COLUMNS] = {};
                chain<N, COLUMNS>(
                    acc, d, [&](int t, int i) { return set1(q[i * stride + t]); },
                    [&](int t, int c) { return load(p.k + t * B + j + c * W); },
                    [](vf sum, vf a, vf b) { return fma(a, b, sum); });
#pragma GCC unroll 8
                for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                    for (int c = 0; c < COLUMNS; c++) store(s + i * B + j + c * W, acc[i][c]);
            });
    }

    static void accumulate(
        int n_rows, const float* s, const float* rescale, const Panels& p, int n_keys, int lanes_d, float* acc) {
        for (int i0 = 0; i0 < lanes_d; i0 += COLUMNS * W) {
            const int left = (lanes_d - i0) / W;
            by_count<R>(n_rows, [&](auto rows) {
                by_count<COLUMNS>(left < COLUMNS ? left : COLUMNS, [&](auto columns) {
                    constexpr int N = decltype(rows)::value, C = decltype(columns)::value;
                    vf o[N][C];
#pragma GCC unroll 8
                    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) o[i][c] = load(acc + i * lanes_d + i0 + c * W) * rescale[i];
                    chain<N, C>(
                        o, n_keys, [&](int t, int i) { return set1(s[i * B + t]); },
                        [&](int t, int c) { return load(p.v + t * lanes_d + i0 + c * W); },
                        [](vf sum, vf a, vf b) { return fma(a, b, sum); });
#pragma GCC unroll 8
                    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) store(acc + i * lanes_d + i0 + c * W, o[i][c]);
                });
            });
        }
    }
};

}  // namespace quire

#include "engine_bf16.h"
