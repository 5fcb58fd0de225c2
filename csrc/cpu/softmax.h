// From the scores of a row to its weights, block by block: an online softmax, or what a variant has in its place.
//
// The scales of keys and values of 8 bits are applied here, to scores and to weights.
#pragma once
#include "engine.h"
#include "functions.h"
#include "quire_cpu.h"

namespace quire {

constexpr float LOG2E = 1.4426950408889634f, NEG_INF = -__builtin_inff();

// One row's state: running maximum, running sum of each lane; the keys it may see are lowest .. end - 1 of its list,
// and the first few below `end`.
struct Row {
    float max;
    vf sum;
    int32_t lowest, end;
    Site site;
};

template <class T> constexpr bool has_scales = std::is_same_v<T, q8>;

// The scales of the keys and values of a block, where they have some.
template <class E> struct Scales {
    static constexpr bool SOME = has_scales<typename E::T>;
    alignas(64) float keys[SOME ? E::B : 1], values[SOME ? E::B : 1];

    Scales(const KeyBlock<typename E::T>& block, int d) {
        if constexpr (SOME)
            for (int j = 0; j < E::B; j++) {
                keys[j] = scale_of(block.keys[j], d);
                values[j] = scale_of(block.values[j], d);
            }
    }

    inline __attribute__((always_inline)) vf of_score(vf score, int j) const {
        if constexpr (SOME) return score * load(keys + j);
        else return score;
    }

    // Store weights as the second product reads them; returns the sum of what was stored, but for the values' scales.
    template <int N> inline __attribute__((always_inline)) vf put(typename E::Weight* weights, const vf (&v)[N]) const {
        vf sum = vf{};
        if constexpr (SOME) E::put_weights(weights, v, values);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) {
            if constexpr (SOME) sum = sum + v[i];
            else sum = sum + E::put(weights + i * W, v[i]);
        }
        return sum;
    }
};

// Turn the scores of one row in the block of keys `first` .. first + B - 1 into weights, whose lanes' sums are `sum`,
// update the row's maximum, return the power of 2 that rescales what was accumulated before. Weights of a softmax are
// 2^(score - max), 0 where hidden.
template <class E, class V>
QUIRE_INLINE float weigh(
    const QuireAttnArgs& a, const float* s, typename E::Weight* weights, Row& row, int32_t first, int32_t n_first,
    const int32_t* positions, const Scales<E>& scales, vf& sum) {
    constexpr int B = E::B, N = B / W;
    vf v[N], top = set1(NEG_INF);
    const float factor = V::softmax && !V::has_logits ? a.scale * LOG2E : a.scale;
    const bool all_seen = first + B <= row.end && (first >= row.lowest || first + B <= n_first);
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
        v[i] = scales.of_score(load(s + i * W), i * W) * factor;
        if constexpr (V::has_logits) {
            v[i] = V::logits(v[i], row.site, load_bits<vi>(positions + i * W), a);
            if constexpr (V::softmax) v[i] = v[i] * LOG2E;
        }
        const vf hidden = set1(V::softmax ? NEG_INF : 0.f);
        if (!all_seen) {
            const vi key = lane + (i * W);  // index in the block
            const vi seen = (key < row.end - first) & ((key >= row.lowest - first) | (key < n_first - first));
            v[i] = seen ? v[i] : hidden;
        }
        if constexpr (V::has_mask) {
            const vi seen = V::mask(row.site, load_bits<vi>(positions + i * W), a);
            v[i] = seen ? v[i] : hidden;
        }
        if constexpr (V::softmax) top = vmax(top, v[i]);
    }
    if constexpr (V::softmax) {
        const float before = row.max, peak = hmax(top), now = peak > before ? peak : before;
        const float base = now == NEG_INF ? 0.f : now;  // nothing seen yet: every exponent below is -inf, not NaN
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) v[i] = exp2(v[i] - base);
        sum = scales.put(weights, v);
        row.max = now;
        return before - base;
    } else {
        sum = scales.put(weights, v);
        return 0.f;
    }
}

}  // namespace quire
