// Int8Engine: queries and weights rounded to 16 bits, times keys and values of 8 bits, summed as integers. AVX-512
// only; elsewhere, and for float32, WideEngine<q8> takes such entries.
//
// A query has one scale a row (largest magnitude / 32767), the weights of a row one a block of keys, so what is lost is
// far below the rounding of the entries. Sums are exact (512 * 127 * 32767 < 2^31): no order of additions can change a
// bit, so few rows are summed across lanes, without a transpose, and many rows through panels.
// Panels hold pairs of 16 bits: keys as [d / 2, B], values as [B / 2, d], as in Bf16Engine.
#pragma once
#include "engine.h"

namespace quire {

#if QUIRE_AVX512

struct Int8Engine : VectorEngine {
    using T = q8;
    using Query = int16_t;
    using Weight = int16_t;
    static constexpr int B = KEYS, R = ROWS;
    static constexpr int WEIGHTS = B + 2;  // a row: B weights and their step, a float
    static constexpr float MOST = 32767.f, LEAST = 1e-30f;  // largest magnitudes below LEAST count as zeros
    struct Panels {
        uint32_t *k, *v;  // k: [pairs of dimensions, B], v: [B / 2, padded d]
    };

    static int pairs(int d) { return ((d + 1) / 2 + W - 1) / W * W; }
    static int query_size(int d) { return 2 * pairs(d) + 2; }  // numbers, then their step
    static size_t panel_bytes(int d) { return sizeof(uint32_t) * (B * pairs(d) + B / 2 * padded(d)); }
    static size_t query_bytes(int d) { return sizeof(Query) * query_size(d); }
    static Panels panels(char* at, int d) { return {(uint32_t*)at, (uint32_t*)at + B * pairs(d)}; }

    // What a number is multiplied with to become an integer; *step undoes that. most: bits of the largest magnitude.
    static float factor_of(int32_t most, float* step) {
        float value;
        memcpy(&value, &most, 4);
        *step = most >= 0x7f800000 ? __builtin_nanf("") : value >= LEAST ? value / MOST : 0.f;
        return *step > 0.f ? MOST / value : 0.f;
    }

    QUIRE_INLINE vi magnitude(vf x) { return (vi)x & 0x7fffffff; }  // bits have the order of magnitudes, NaN on top

    QUIRE_INLINE void put_rounded(int16_t* to, vf x, float factor) {
        const __m512i rounded = _mm512_cvtps_epi32(factor == 0.f ? (__m512)vf{} : (__m512)(x * factor));
        store_bits(to, _mm512_cvtepi32_epi16(rounded));
    }

    // Store N vectors of weights times the values' scales.
    template <int N> static void put_weights(Weight* to, const vf (&w)[N], const float* scales) {
        vf scaled[N];
        vi most = vi{};
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
            scaled[i] = w[i] * load(scales + i * W);
            const vi bits = magnitude(scaled[i]);
            most = bits > most ? bits : most;
        }
        float step;
        const float factor = factor_of(_mm512_reduce_max_epi32((__m512i)most), &step);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) put_rounded(to + i * W, scaled[i], factor);
        memcpy(to + B, &step, sizeof step);
    }

    template <class Q> static void pack_query(const Q* from, Query* query, int r, int d) {
        Query* to = query + (int64_t)r * query_size(d);
        const auto get = [&](int i) { return i + W <= d ? load(from + i) : load_some(from + i, d - i); };
        vi most = vi{};
        for (int i = 0; i < d; i += W) {
            const vi bits = magnitude(get(i));
            most = bits > most ? bits : most;
        }
        float step;
        const float factor = factor_of(_mm512_reduce_max_epi32((__m512i)most), &step);
        memset(to, 0, query_bytes(d));
        for (int i = 0; i < d; i += W) put_rounded(to + i, get(i), factor);
        memcpy(to + 2 * pairs(d), &step, sizeof step);
    }

    static float step_of(const int16_t* p) {
        float step;
        memcpy(&step, p, sizeof step);
        return step;
    }

    // 2 W integers at p as 16 bits, of which n > 0 exist.
    QUIRE_INLINE __m512i load_words(const T* p, int n) {
        if (n >= 2 * W) return _mm512_cvtepi8_epi16(load_bits<__m256i>(p));
        return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((1u << n) - 1, p));
    }

    // W dimensions of two keys: lane l has (even[l], odd[l]); `live` of them exist.
    QUIRE_INLINE vu value_pair(const T* even, const T* odd, int live) {
        const __mmask16 mask = live >= W ? 0xffff : (1u << live) - 1;
        const __m128i a = _mm_maskz_loadu_epi8(mask, even), b = _mm_maskz_loadu_epi8(mask, odd);
        const __m256i low = _mm256_castsi128_si256(_mm_unpacklo_epi8(a, b));
        return (vu)_mm512_cvtepi8_epi16(_mm256_inserti128_si256(low, _mm_unpackhi_epi8(a, b), 1));
    }

    static void pack(const Panels& p, const KeyBlock<T>& block, const KeyBlock<T>& next, int d) {
        for (int j = 0; j < B; j += W)
            for (int i = 0; i < d; i += 2 * W) {
                vf rows[W];
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) rows[r] = (vf)load_words(block.keys[j + r] + i, d - i);
                transpose(rows);
                prefetch(next, j, i);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) store_bits(p.k + (i / 2 + r) * B + j, rows[r]);
            }
        for (int t = 0; t < steps(block.n); t++)
            for (int i = 0; i < d; i += W)
                store_bits(
                    p.v + t * padded(d) + i, value_pair(block.values[2 * t] + i, block.values[2 * t + 1] + i, d - i));
    }

    static void scores(int n_rows, const Query* query, int row, const Panels& p, int n_keys, int d, float* s) {
        const int stride = query_size(d);
        const Query* q = query + (int64_t)row * stride;
        by_rows_and_columns(n_rows, n_keys, [&](auto rows, auto columns) {
            constexpr int N = decltype(rows)::value, C = decltype(columns)::value;
            vi acc[N][C] = {};
            chain<N, C>(
                acc, (d + 1) / 2, [&](int t, int i) { return pair(q + i * stride, t); },
                [&](int t, int c) { return load_bits<vu>(p.k + t * B + c * W); }, multiply_add);
#pragma GCC unroll 8
            for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                for (int c = 0; c < C; c++)
                    store(s + i * B + c * W, to_float(acc[i][c]) * step_of(q + i * stride + 2 * pairs(d)));
        });
    }

    // The same scores for few rows, without panels: a sum across lanes for each row and key.
    static void scores_of_few(
        int n_rows, const Query* q, const KeyBlock<T>& block, const KeyBlock<T>& next, int d, float* s) {
        const int stride = query_size(d);
        by_count<R>(n_rows, [&](auto rows) {
            constexpr int N = decltype(rows)::value;
            for (int j = 0; j < B; j += W) {
                vi quads[N][4] = {};
                for (int g = 0; g < 4 && j + 4 * g < block.n; g++) {
                    const T* const* keys = block.keys + j + 4 * g;
                    vi acc[N][4] = {};
                    for (int i = 0; i < d; i += 2 * W) {
                        vu words[4];
#pragma GCC unroll 4
                        for (int c = 0; c < 4; c++) words[c] = (vu)load_words(keys[c] + i, d - i);
#pragma GCC unroll 8
                        for (int r = 0; r < N; r++) {
                            const vu left = load_bits<vu>(q + r * stride + i);
#pragma GCC unroll 4
                            for (int c = 0; c < 4; c++) acc[r][c] = multiply_add(acc[r][c], left, words[c]);
                        }
                        if (i % 64 == 0) prefetch_four(next, j + 4 * g, i);
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < N; r++) quads[r][g] = sums_in_quarters(acc[r]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < N; r++)
                    store(s + r * B + j, to_float(sums_of_quarters(quads[r])) * step_of(q + r * stride + 2 * pairs(d)));
            }
        });
    }

    QUIRE_INLINE void prefetch_four(const KeyBlock<T>& block, int j, int i) {
#pragma GCC unroll 4
        for (int r = j; r < j + 4; r++) {
            __builtin_prefetch(block.keys[r] + i, 0, 2);
            __builtin_prefetch(block.values[r] + i, 0, 2);
        }
    }

    // Each quarter (128 bits): sums over that quarter of the four vectors, in their order.
    QUIRE_INLINE vi sums_in_quarters(const vi (&x)[4]) {
        const auto halves = [](vi a, vi b) {
            const __m512i low = _mm512_unpacklo_epi32((__m512i)a, (__m512i)b);
            return (vi)low + (vi)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b);
        };
        const __m512i a = (__m512i)halves(x[0], x[1]), b = (__m512i)halves(x[2], x[3]);
        return (vi)_mm512_unpacklo_epi64(a, b) + (vi)_mm512_unpackhi_epi64(a, b);
    }

    // Quarter q: the sum of the quarters of vector q.
    QUIRE_INLINE vi sums_of_quarters(const vi (&x)[4]) {
        const auto halves = [](vi a, vi b) {
            const __m512i even = _mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88);
            return (vi)even + (vi)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd);
        };
        return halves(halves(x[0], x[1]), halves(x[2], x[3]));
    }

    static void accumulate(
        int n_rows, const Weight* w, const float* rescale, const Panels& p, int n_keys, int lanes_d, float* acc) {
        sum_values(n_rows, w, rescale, n_keys, lanes_d, acc, [&](int t, int i) {
            return load_bits<vu>(p.v + t * lanes_d + i);
        });
    }

    // The same for few rows, without panels; d is a multiple of W.
    static void accumulate_few(
        int n_rows, const Weight* w, const float* rescale, const T* const* values, int n_keys, int d, float* acc) {
        sum_values(n_rows, w, rescale, n_keys, d, acc, [&](int t, int i) {
            return value_pair(values[2 * t] + i, values[2 * t + 1] + i, W);
        });
    }

    // acc[r, :] = acc[r, :] * rescale[r] + step[r] * sum over keys of w[r, key] * value(pair of keys, dimension).
    template <class Value>
    QUIRE_INLINE void sum_values(
        int n_rows, const Weight* w, const float* rescale, int n_keys, int lanes_d, float* acc, const Value& value) {
        for (int i0 = 0; i0 < lanes_d; i0 += COLUMNS * W) {
            const int left = (lanes_d - i0) / W;
            by_count<R>(n_rows, [&](auto rows) {
                by_count<COLUMNS>(left < COLUMNS ? left : COLUMNS, [&](auto columns) {
                    constexpr int N = decltype(rows)::value, C = decltype(columns)::value;
                    vi sums[N][C] = {};
                    chain<N, C>(
                        sums, steps(n_keys), [&](int t, int i) { return pair(w + i * WEIGHTS, t); },
                        [&](int t, int c) { return value(t, i0 + c * W); }, multiply_add);
#pragma GCC unroll 8
                    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
                        for (int c = 0; c < C; c++) {
                            float* to = acc + i * lanes_d + i0 + c * W;
                            const vf step = set1(step_of(w + i * WEIGHTS + B));
                            store(to, fma(to_float(sums[i][c]), step, load(to) * rescale[i]));
                        }
                });
            });
        }
    }

    QUIRE_INLINE vf to_float(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }
    static vu pair(const int16_t* w, int t) { return vu{} + load_bits<uint32_t>(w + 2 * t); }  // to all lanes
    static int steps(int n_keys) { return (n_keys + 1) / 2; }
    static vi multiply_add(vi sum, vu a, vu b) {
#if defined(__AVX512VNNI__)
        return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
        return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
    }
};

template <class S> using CellEngine = std::conditional_t<sizeof(S) == 2, Int8Engine, WideEngine<q8>>;

#else

template <class S> using CellEngine = WideEngine<q8>;

#endif

}  // namespace quire
