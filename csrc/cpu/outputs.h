// What becomes of the products of a tile: scales, bias, rounding to the type of the activations, and what `then` says.
#pragma once
#include "dot.h"
#include "quire_cpu.h"
#include "rows.h"
#include "tiles.h"

namespace quire {

// Products of a tile as floats. sums [n_rows, TILE] are floats, or 32-bit integers that have scales.
template <bool INTEGERS> struct Products {
    const float *sums, *channel_scales, *row_scales;

    inline __attribute__((always_inline)) vf at(int64_t row, int64_t c) const {
        const float* p = sums + row * TILE + c;
        if constexpr (INTEGERS) return to_float(load_bits<vi>(p)) * load(channel_scales + c) * row_scales[row];
        else return load(p);
    }
};

// Where the outputs of a tile go: n_rows rows, out_row elements apart, of which `live` channels exist.
template <class T> struct Outputs {
    void* out;  // T, or float for WIDEN: the first row and channel
    int64_t n_rows, out_row, live;
    const T *bias, *up_bias;  // of the first channel, or null
};

// Product plus bias, rounded to T.
template <class T, class P>
QUIRE_INLINE vf rounded_product(const P& products, const T* bias, int64_t row, int64_t c, int n) {
    vf y = products.at(row, c);
    if (bias != nullptr) y += get_lanes(bias + c, n);
    return rounded<T>(y);
}

// f(row, first channel, number of live lanes) for all outputs. Whole tiles are a case of their own, without tails.
template <class F> QUIRE_INLINE void each_output(int64_t n_rows, int64_t live, const F& f) {
    if (live == TILE) {
        for (int64_t r = 0; r < n_rows; r++)
            UNROLL for (int c = 0; c < TILE; c += W) f(r, c, W);
    } else {
        for (int64_t r = 0; r < n_rows; r++) each_vector(live, [&](int64_t c, int n) { f(r, c, n); });
    }
}

// ups: the other half of a gated pair, read for SILU_MUL only.
template <class T, class P> void put_outputs(const Outputs<T>& to, int then, const P& products, const P& ups) {
    T* const out = (T*)to.out;
    const auto product = [&](int64_t r, int64_t c, int n) { return rounded_product(products, to.bias, r, c, n); };
    const auto each = [&](const auto& f) { each_output(to.n_rows, to.live, f); };
    switch (then) {
        case QUIRE_ADD:
            return each([&](int64_t r, int64_t c, int n) {
                T* at = out + r * to.out_row + c;
                put_lanes(at, get_lanes(at, n) + product(r, c, n), n);
            });
        case QUIRE_SILU_MUL:
            return each([&](int64_t r, int64_t c, int n) {
                const vf up = rounded_product(ups, to.up_bias, r, c, n);
                put_lanes(out + r * to.out_row + c, silu_mul<T>(product(r, c, n), up), n);
            });
        case QUIRE_WIDEN:
            return each([&](int64_t r, int64_t c, int n) {
                put_lanes((float*)to.out + r * to.out_row + c, product(r, c, n), n);
            });
        default:
            return each([&](int64_t r, int64_t c, int n) { put_lanes(out + r * to.out_row + c, product(r, c, n), n); });
    }
}

}  // namespace quire
