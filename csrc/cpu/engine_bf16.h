// Bf16Engine: products of bf16 pairs summed in float32 by vdpbf16ps. Elsewhere it is WideEngine<bf16>.
//
// Panels hold pairs in 32 bits: keys as [d / 2, B] (two dimensions of one key), values as [B / 2, d] (one dimension of
// two keys). Probabilities are rounded to bf16 for the second product, and the row's sum is that of the rounded ones.
#pragma once
#include "engine.h"

namespace quire {

#if QUIRE_AVX512 && defined(__AVX512BF16__)

QUIRE_INLINE vf dot_pairs(vf sum, vu a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

QUIRE_INLINE vu broadcast_pair(const void* p) { return vu{} + load_bits<uint32_t>(p); }

struct Bf16Engine {
    using T = bf16;
    using Query = bf16;
    using Weight = bf16;
    static constexpr int B = KEYS, R = ROWS;
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
        memset(to, 0, 4 * pairs(d));
        memcpy(to, from, 2 * d);
    }

    // 2 W elements at p, of which n > 0 exist.
    static vf load_pairs(const T* p, int n) {
        if (n >= 2 * W) return load_bits<vf>(p);
        T lane[2 * W];
        memset(lane, 0, sizeof lane);
        memcpy(lane, p, 2 * n);
        return load_bits<vf>(lane);
    }

    static void pack_keys(const Panels& p, const T* const* keys, int n, const T* const* next, int n_next, int d) {
        for (int j = 0; j < B; j += W)
            for (int i = 0; i < d; i += 2 * W) {
                vf rows[W];
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) rows[r] = j + r < n ? load_pairs(keys[j + r] + i, d - i) : vf{};
                transpose(rows);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) store_bits(p.k + (i / 2 + r) * B + j, rows[r]);
                if (i == 0)
                    for (int r = j; r < j + W && r < n_next; r++) prefetch(next[r], d);
            }
    }

    static void pack_values(const Panels& p, const T* const* values, int n, const T* const* next, int n_next, int d) {
        const int wide = padded(d);
        for (int j = 0; j < n; j += 2) {
            for (int i = 0; i < d; i += W) {
                const int live = d - i < W ? d - i : W;
                const vu even = values_at(values[j] + i, live);
                const vu odd = j + 1 < n ? values_at(values[j + 1] + i, live) : vu{};
                store_bits(p.v + j / 2 * wide + i, even | (odd << 16));
            }
            for (int r = j; r < j + 2 && r < n_next; r++) prefetch(next[r], d);
        }
    }

    static vu values_at(const T* p, int live) {
        if (live == W) return widen(&p->bits);
        return (vu)load_some(p, live) >> 16;
    }

    static void pack(
        const Panels& p, const T* const* keys, const T* const* values, int n, const T* const* next_keys,
        const T* const* next_values, int n_next, int d) {
        pack_keys(p, keys, n, next_keys, n_next, d);
        pack_values(p, values, n, next_values, n_next, d);
    }

    static void scores(int n_rows, const bf16* query, int row, const Panels& p, int d, float* s) {
        const int stride = 2 * pairs(d);
        const bf16* q = query + (int64_t)row * stride;
        by_count<R>(n_rows, [&](auto rows) {
            constexpr int N = decltype(rows)::value;
            vf acc[N][COLUMNS] = {};
            chain<N, COLUMNS>(
                acc, (d + 1) / 2, [&](int t, int i) { return broadcast_pair(q + i * stride + 2 * t); },
                [&](int t, int c) { return load_bits<vu>(p.k + t * B + c * W); }, dot_pairs);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; c++) store(s + i * B + c * W, acc[i][c]);
        });
    }

    static void accumulate(
        int n_rows, const bf16* s, const float* rescale, const Panels& p, int n_keys, int lanes_d, float* acc) {
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
                        o, (n_keys + 1) / 2, [&](int t, int i) { return broadcast_pair(s + i * B + 2 * t); },
                        [&](int t, int c) { return load_bits<vu>(p.v + t * lanes_d + i0 + c * W); }, dot_pairs);
#pragma GCC unroll 8
                    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) store(acc + i * lanes_d + i0 + c * W, o[i][c]);
                });
            });
        }
    }
};

#else

using Bf16Engine = WideEngine<bf16>;

#endif

}  // namespace quire
