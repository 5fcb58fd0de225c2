// Bf16Engine: products of bf16 pairs summed in float32 by vdpbf16ps. Elsewhere it is WideEngine<bf16>.
//
// Panels hold pairs in 32 bits: keys as [d / 2, B] (two dimensions of one key), values as [B / 2, d] (one dimension of
// two keys). Probabilities are rounded to bf16 for the second product, and the row's sum is that of the rounded ones.
#pragma once
#include "engine.h"

namespace quire {

#if QUIRE_AVX512 && defined(__AVX512BF16__)

struct Bf16Engine : VectorEngine {
    using T = bf16;
    using Query = bf16;
    using Weight = bf16;
    static constexpr int B = KEYS, R = ROWS, WEIGHTS = B;
    struct Panels {
        uint32_t *k, *v;  // k: [pairs of dimensions, B], v: [B / 2, padded d]
    };

    static int pairs(int d) { return ((d + 1) / 2 + W - 1) / W * W; }
    static size_t panel_bytes(int d) { return sizeof(uint32_t) * (B * pairs(d) + B / 2 * padded(d)); }
    static size_t query_bytes(int d) { return sizeof(uint32_t) * pairs(d); }
    static Panels panels(char* at, int d) { return {(uint32_t*)at, (uint32_t*)at + B * pairs(d)}; }

    static vf put(Weight* to, vf v) {
        const __m256i bits = (__m256i)_mm512_cvtneps_pbh((__m512)v);
        store_bits(to, bits);
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
    }

    static void pack_query(const T* from, bf16* query, int r, int d) {
        bf16* to = query + (int64_t)r * 2 * pairs(d);
        for (int i = 0; i < d; i += 2 * W) store_bits(to + i, load_pairs(from + i, d - i));
    }

    // 2 W elements at p, of which n > 0 exist.
    static vf load_pairs(const T* p, int n) {
        if (n >= 2 * W) return load_bits<vf>(p);
        T lane[2 * W];
        memset(lane, 0, sizeof lane);
        memcpy(lane, p, 2 * n);
        return load_bits<vf>(lane);
    }

    // Dimensions i .. i + 2 W - 1 of W keys as W vectors of pairs, lanes are keys.
    QUIRE_INLINE void load_transposed(vf (&to)[W], const T* const* keys, int i, int d) {
        if (d - i >= 2 * W) {
#pragma GCC unroll 16
            for (int r = 0; r < W; r++) to[r] = load_bits<vf>(keys[r] + i);
        } else {
            for (int r = 0; r < W; r++) to[r] = load_pairs(keys[r] + i, d - i);
        }
        transpose(to);
    }

    // W dimensions of two keys: lane l has (even[l], odd[l]).
    QUIRE_INLINE vu value_pair(const T* even, const T* odd) {
        const __m512i both = _mm512_inserti64x4(
            _mm512_castsi256_si512(load_bits<__m256i>(even)), load_bits<__m256i>(odd), 1);
        const __m512i order = _mm512_set_epi16(
            31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
            23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return (vu)_mm512_permutexvar_epi16(order, both);
    }

    // The same where only `live` dimensions exist.
    static vu value_pair(const T* even, const T* odd, int live) {
        return live >= W ? value_pair(even, odd)
                         : ((vu)load_some(even, live) >> 16) | (vu)load_some(odd, live);
    }

    static void pack(const Panels& p, const KeyBlock<T>& block, const KeyBlock<T>& next, int d) {
        for (int j = 0; j < B; j += W)
            for (int i = 0; i < d; i += 2 * W) {
                vf rows[W];
                load_transposed(rows, block.keys + j, i, d);
                prefetch(next, j, i);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) store_bits(p.k + (i / 2 + r) * B + j, rows[r]);
            }
        for (int t = 0; t < steps(block.n); t++)
            for (int i = 0; i < d; i += W)
                store_bits(
                    p.v + t * padded(d) + i, value_pair(block.values[2 * t] + i, block.values[2 * t + 1] + i, d - i));
    }

    static void scores(int n_rows, const bf16* query, int row, const Panels& p, int n_keys, int d, float* s) {
        const int stride = 2 * pairs(d);
        const bf16* q = query + (int64_t)row * stride;
        by_rows_and_columns(n_rows, n_keys, [&](auto rows, auto columns) {
            constexpr int N = decltype(rows)::value, C = decltype(columns)::value;
            vf acc[N][C] = {};
            chain<N, C>(
                acc, (d + 1) / 2, [&](int t, int i) { return weight(q + i * stride, t); },
                [&](int t, int c) { return load_bits<vu>(p.k + t * B + c * W); }, multiply_add);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) store(s + i * B + c * W, acc[i][c]);
        });
    }

    // The same scores for few rows, without panels: a block of keys is transposed in registers.
    static void scores_of_few(
        int n_rows, const bf16* q, const KeyBlock<T>& block, const KeyBlock<T>& next, int d, float* s) {
        const int stride = 2 * pairs(d);
        by_count<R>(n_rows, [&](auto rows) {
            constexpr int N = decltype(rows)::value;
            for (int j = 0; j < B; j += W) {
                vf acc[N] = {};
                for (int i = 0; i < d && j < block.n; i += 2 * W) {
                    vf right[W];
                    load_transposed(right, block.keys + j, i, d);
                    prefetch(next, j, i);
#pragma GCC unroll 16
                    for (int t = 0; t < W; t++)
#pragma GCC unroll 8
                        for (int r = 0; r < N; r++)
                            acc[r] = multiply_add(acc[r], weight(q + r * stride, i / 2 + t), (vu)right[t]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < N; r++) store(s + r * B + j, acc[r]);
            }
        });
    }

    static void accumulate(
        int n_rows, const bf16* w, const float* rescale, const Panels& p, int n_keys, int lanes_d, float* acc) {
        combine<Bf16Engine>(n_rows, w, rescale, n_keys, lanes_d, acc, [&](int t, int i) {
            return load_bits<vu>(p.v + t * lanes_d + i);
        });
    }

    // The same for few rows, without panels; d is a multiple of W.
    static void accumulate_few(
        int n_rows, const bf16* w, const float* rescale, const T* const* values, int n_keys, int d, float* acc) {
        combine<Bf16Engine>(n_rows, w, rescale, n_keys, d, acc, [&](int t, int i) {
            return value_pair(values[2 * t] + i, values[2 * t + 1] + i);
        });
    }

    static vu weight(const bf16* w, int t) { return vu{} + load_bits<uint32_t>(w + 2 * t); }  // a pair to all lanes
    static int steps(int n_keys) { return (n_keys + 1) / 2; }
    static vf multiply_add(vf sum, vu a, vu b) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};

#else

using Bf16Engine = WideEngine<bf16>;

#endif

}  // namespace quire
