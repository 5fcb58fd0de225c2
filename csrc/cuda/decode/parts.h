// Sums of the parts of lines that were split: decode/merge.h, latent/values.h.
#pragma once
#include "decode/out.h"

namespace quire {
namespace {

constexpr int FLIGHT = 5;  // parts loaded together

struct Sum {  // of weighted parts, relative to 2^top
    float4 o;
    float top, total;
    __device__ __forceinline__ void lift(float high) {
        if (!Variant::softmax) return;
        const float factor = exp2_fast(top - high);
        top = high, total *= factor;
        o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor;
    }
    __device__ __forceinline__ void add(const float4& x, float weight, float of_total) {
        total += weight * of_total;
        o.x += weight * x.x, o.y += weight * x.y, o.z += weight * x.z, o.w += weight * x.w;
    }
    __device__ __forceinline__ void add(Sum more) {
        const float high = fmaxf(top, more.top);
        lift(high);
        more.lift(high);
        add(more.o, 1.f, more.total);
    }
    __device__ __forceinline__ float4 result() const {
        const float scale = !Variant::softmax ? 1.f : total > 0.f ? 1.f / total : 0.f;
        return make_float4(o.x * scale, o.y * scale, o.z * scale, o.w * scale);
    }
};

// Parts first, first + step .. of one cell; `found` holds the rows of the first FLIGHT of them, -1 beyond the last.
template <int FLIGHT, class Load>
__device__ __forceinline__ Sum sum_parts(const QuireMerge& merge, int (&found)[FLIGHT], const Load& load_parts,
                                         int first, int step, int head, int dim, const QuireAttnArgs& args) {
    Sum sum{make_float4(0.f, 0.f, 0.f, 0.f), FLOOR, 0.f};
    for (int from = first; from < merge.n_parts; from += FLIGHT * step) {
        if (from > first) load_parts(found, from);
        float lse[FLIGHT], high = sum.top;
        float4 x[FLIGHT];
        for (int i = 0; i < FLIGHT; ++i) {
            const int64_t row = found[i] + head;
            lse[i] = found[i] < 0 ? -INFINITY : Variant::softmax ? args.partial_lse[row] : 0.f;
            x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (found[i] >= 0) x[i] = *reinterpret_cast<const float4*>(args.partial_out + row * OUT_DIM + dim);
        }
        for (int i = 0; i < FLIGHT; ++i) high = fmaxf(high, lse[i]);
        sum.lift(high);
        for (int i = 0; i < FLIGHT; ++i) sum.add(x[i], Variant::softmax ? exp2_fast(lse[i] - high) : 1.f, 1.f);
    }
    return sum;
}

__device__ __forceinline__ QuireMerge load_merge(int index, const QuireAttnArgs& args) {
    if (index >= args.n_merges) return {0, 0, 0, 0};
    const int4 words = load_here(reinterpret_cast<const int4*>(args.merges) + index);
    return {words.x, words.y, words.z, words.w};
}

}  // namespace
}  // namespace quire
