// Activations rounded to 8 bits: x = integer * scale, one scale a row or one for each group of a row.
#pragma once
#include <cmath>

#include "dot.h"
#include "tiles.h"

namespace quire {

constexpr float SMALLEST = 1e-30f;  // activations below it count as zeros: 127 / x must be finite

// Quantises count values; returns the sum of q. A span with an infinity or a NaN gets the scale NaN.
template <class T> int32_t quantise(const T* x, int64_t count, int8_t* q, float* scale) {
    const auto get = [&](int64_t i) { return i + W <= count ? load(x + i) : load_some(x + i, (int)(count - i)); };
    vi magnitudes = vi{};  // bits have the order of magnitudes, with NaN above infinity
    for (int64_t i = 0; i < count; i += W) {
        const vi bits = (vi)get(i) & 0x7fffffff;
        magnitudes = bits > magnitudes ? bits : magnitudes;
    }
    const int32_t bits = hmax(magnitudes);
    float most;
    memcpy(&most, &bits, 4);
    const bool finite = bits < 0x7f800000, live = finite && most >= SMALLEST;
    *scale = !finite ? NAN : live ? most / 127.f : 0.f;
    if (!live) {
        memset(q, 0, count);
        return 0;
    }
    const vf factor = set1(127.f / most), magic = set1(12582912.f);  // 1.5 * 2^23: rounds to even in the low bits
    vi sum = vi{};
    for (int64_t i = 0; i < count; i += W) {
        const vi rounded = (vi)(get(i) * factor + magic) - (vi)magic;
        sum += rounded;
        if (i + W <= count) store_bytes(q + i, rounded);
        else
            for (int j = 0; j < count - i; j++) q[i + j] = (int8_t)rounded[j];
    }
    return hsum(sum);
}

// One row of k values to q, zeros up to its `size`; scales and starts go where they belong.
// unit: a factor of all weights, which goes into the scales.
template <class T>
void quantise_row(
    const T* x, int64_t k, int64_t group, float unit, const Activations& to, int64_t row, int8_t* q, int64_t size) {
    for (int64_t g = 0; g < to.n_groups; g++) {
        const int64_t first = g * group, count = first + group < k ? group : k - first, at = g * to.m + row;
        to.starts[at] = -BYTE_ZERO * quantise(x + first, count, q + first, to.scales + at);
        to.scales[at] *= unit;
    }
    memset(q + k, 0, size - k);
}

}  // namespace quire
