// Products of weights that lie in lines: 8 bits, bfloat16, float16 and float32.
//
// A format says what a line holds and how it is multiplied. Invariant: an output is one chain of sums in one lane, in
// the order of k, so it is the same for any number of rows and threads.
#pragma once
#include "dot.h"
#include "tiles.h"

namespace quire {

// Integers plus 128, times quantised activations: [k / 4][TILE][4].
struct ByteLines {
    using Sum = vi;
    static constexpr int K = 4, LANE_BYTES = 4, X_BYTES = 4;
    static Sum start(const Activations& x, int64_t row) { return set1i(x.starts[row]); }
    QUIRE_INLINE vi weights(const uint8_t* at) { return load_bits<vi>(at); }
    QUIRE_INLINE vi activations(const char* x) { return repeat((const int8_t*)x); }
    QUIRE_INLINE vi multiply(vi sum, vi w, vi x) { return dot_bytes(sum, w, x); }
};

// Pairs: [k / 2][TILE][2].
struct Bf16Lines {
    using Element = bf16;
    using Sum = vf;
    static constexpr int K = 2, LANE_BYTES = 4;
    static Sum start(const Activations&, int64_t) { return vf{}; }
    QUIRE_INLINE vi weights(const uint8_t* at) { return load_bits<vi>(at); }
#if QUIRE_AVX512 && defined(__AVX512BF16__)
    using Stored = bf16;  // activations
    static constexpr int X_BYTES = 4;
    QUIRE_INLINE vi activations(const char* x) { return repeat((const int8_t*)x); }
    QUIRE_INLINE vf multiply(vf sum, vi w, vi x) {
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
    }
#else
    using Stored = float;
    static constexpr int X_BYTES = 8;
    struct Pair { vf even, odd; };
    QUIRE_INLINE Pair activations(const char* x) {
        float pair[2];
        memcpy(pair, x, sizeof pair);
        return {set1(pair[0]), set1(pair[1])};
    }
    QUIRE_INLINE vf multiply(vf sum, vi w, Pair x) {
        return fma((vf)(w & (int32_t)0xffff0000), x.odd, fma((vf)(w << 16), x.even, sum));
    }
#endif
};

// One k a line: [k][TILE].
template <class T> struct WideLines {
    using Element = T;
    using Sum = vf;
    using Stored = float;
    static constexpr int K = 1, LANE_BYTES = sizeof(T), X_BYTES = 4;
    static Sum start(const Activations&, int64_t) { return vf{}; }
    QUIRE_INLINE vf weights(const uint8_t* at) { return load((const T*)at); }
    QUIRE_INLINE vf activations(const char* x) {
        float value;
        memcpy(&value, x, 4);
        return set1(value);
    }
    QUIRE_INLINE vf multiply(vf sum, vf w, vf x) { return fma(w, x, sum); }
};

// One row of activations as a float format reads it; `count` values, zeros up to the stride.
template <class Format, class T> void pack_floats(const T* x, int64_t count, char* to, int64_t stride) {
    using Stored = typename Format::Stored;
    if constexpr (std::is_same_v<T, Stored>) {
        memcpy(to, x, count * sizeof(T));
    } else {
        for (int64_t i = 0; i < count; i += W) {
            const int n = count - i < W ? (int)(count - i) : W;
            const vf v = n == W ? load(x + i) : load_some(x + i, n);
            if (n == W) store((Stored*)to + i, v);
            else store_some((Stored*)to + i, v, n);
        }
    }
    memset(to + count * sizeof(Stored), 0, stride - count * sizeof(Stored));
}

// sums[r][c] += weight c times row `first` + r over n_lines lines, whose activations begin at `from`; the first block
// of a tile starts the sums. Prefetches from `hint` on.
template <class Format, int R, class Ask>
void lines_block(
    const uint8_t* w, int64_t n_lines, const Activations& x, int64_t first, bool fresh, const char* from, char* sums,
    const uint8_t* hint) {
    using Sum = typename Format::Sum;
    constexpr int LINE = TILE * Format::LANE_BYTES, SHARE = Ask::COUNT * LINE / 256, HINTS = SHARE > 0 ? SHARE : 1;
    for (int c = 0; c < TILE; c += VECTORS * W) {
        Sum acc[R][VECTORS];
        if (fresh) {
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = Format::start(x, first + r);
        } else {
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = load_bits<Sum>(sums + (r * TILE + c + v * W) * 4);
        }
        const uint8_t* at = w + c * Format::LANE_BYTES;
        const char* values = from;
        for (int64_t line = 0; line < n_lines; line++, at += LINE, values += R * Format::X_BYTES, hint += HINTS * 64) {
            decltype(Format::weights(at)) weights[VECTORS];
            UNROLL for (int p = 0; p < HINTS; p++) __builtin_prefetch(hint + p * 64, 0, 2);
            UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = Format::weights(at + v * W * Format::LANE_BYTES);
            UNROLL for (int r = 0; r < R; r++) {
                const auto value = Format::activations(values + r * Format::X_BYTES);
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = Format::multiply(acc[r][v], weights[v], value);
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) store_bits(sums + (r * TILE + c + v * W) * 4, acc[r][v]);
    }
}

// sums [n_rows, TILE] of a tile, for the rows from `first` on. next: the tile that will follow.
template <class Format>
void lines_sums(
    const uint8_t* w, int64_t n_lines, const Activations& x, int64_t first, int64_t n_rows, char* sums,
    const uint8_t* next) {
    constexpr int LINE = TILE * Format::LANE_BYTES;
    const int64_t step = lines_at_once(n_rows, n_lines, LINE);
    for (int64_t line = 0; line < n_lines; line += step) {
        const bool last = line + step >= n_lines;
        const int64_t count = last ? n_lines - line : step;
        const uint8_t *block = w + line * LINE, *after = last ? next : block + count * LINE;
        row_blocks(n_rows, [&](int64_t row, auto n, int64_t b) {
            const char* values = x.data + (first + row) * x.stride + line * n * Format::X_BYTES;
            with_prefetch(n_rows, b, block, count * LINE, after, [&](auto ask, const uint8_t* hint) {
                lines_block<Format, n, decltype(ask)>(
                    block, count, x, first + row, line == 0, values, sums + row * TILE * 4, hint);
            });
        });
    }
}

}  // namespace quire
