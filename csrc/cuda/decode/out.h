// Rows of the result, as the kernels of small lines and of merges write them.
#pragma once
#include "attention.h"
#include "hopper.h"

namespace quire {
namespace {

#ifndef QUIRE_OUT_DIM
#define QUIRE_OUT_DIM QUIRE_HEAD_DIM
#endif
constexpr int OUT_DIM = QUIRE_OUT_DIM;
constexpr float FLOOR = -1e30f;  // running maximum before the first key

// Four dimensions of one row of the result, and its lse (base 2) beside the first.
__device__ __forceinline__ void write_out(float4 o, float lse, const Site& first, const QuireAttnArgs& args) {
    const float natural = lse * LN2;
    float values[4] = {o.x, o.y, o.z, o.w};
    if (Variant::has_output) {
        for (int i = 0; i < 4; ++i) {
            Site site = first;
            site.dim += i;
            values[i] = Variant::output(values[i], site, natural, args);
        }
    }
    const int64_t row = static_cast<int64_t>(first.q_row) * args.n_q_heads + first.q_head;
    *reinterpret_cast<uint2*>(static_cast<Element*>(args.out) + row * OUT_DIM + first.dim) =
        make_uint2(pack(values[0], values[1]), pack(values[2], values[3]));
    if (Variant::softmax && first.dim == 0 && args.lse != nullptr) args.lse[row] = natural;
}

}  // namespace
}  // namespace quire
