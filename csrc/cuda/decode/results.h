// Results of a line: the sums of its key warps, contracted and written. By the writers; a CTA's last line by the
// consumers.
#pragma once
#include "decode/lines.h"

namespace quire {
namespace {

struct Weights {  // of the key warps' sums, normalised; base-2 lse
    float of[KEY_WARPS], lse;
};

__device__ __forceinline__ Weights contract_states(const float2* states) {  // of one row
    Weights weights;
    if (!Variant::softmax) {
        for (int w = 0; w < KEY_WARPS; ++w) weights.of[w] = 1.f;
        weights.lse = 0.f;
        return weights;
    }
    float top = FLOOR, total = 0.f;
    for (int w = 0; w < KEY_WARPS; ++w) top = fmaxf(top, states[w * ROWS].x);
    for (int w = 0; w < KEY_WARPS; ++w) {
        weights.of[w] = exp2_fast(states[w * ROWS].x - top);
        total += weights.of[w] * states[w * ROWS].y;
    }
    for (int w = 0; w < KEY_WARPS; ++w) weights.of[w] *= total > 0.f ? 1.f / total : 0.f;
    weights.lse = total > 0.f ? top + log2f(total) : -INFINITY;
    return weights;
}

// By N_THREADS threads, of which this is number `thread`.
template <int N_THREADS>
__device__ __forceinline__ void write_round(int thread, const float* sums, const float2* states, const QuireTile& tile,
                                            int round, int group, const QuireAttnArgs& args) {
    constexpr int ROUND_CELLS = ROUND_DIM / 4;
    const int n_cells = tile.n_tokens * group * ROUND_CELLS;
    for (int cell = thread; cell < n_cells; cell += N_THREADS) {
        const int row = cell / ROUND_CELLS, dim = cell % ROUND_CELLS * 4;
        const Weights weights = contract_states(states + row);
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int w = 0; w < KEY_WARPS; ++w) {
            const float4 x = *reinterpret_cast<const float4*>(sums + (w * ROWS + row) * SUM_STRIDE + dim);
            o.x += weights.of[w] * x.x, o.y += weights.of[w] * x.y;
            o.z += weights.of[w] * x.z, o.w += weights.of[w] * x.w;
        }
        const int from = round * ROUND_DIM + dim;
        if (tile.partial >= 0) {
            const int64_t to = tile.partial + row;
            *reinterpret_cast<float4*>(args.partial_out + to * DIM + from) = o;
            if (from == 0) args.partial_lse[to] = weights.lse;
        } else {
            const Row found = find_row(tile, row / group, row % group, group, args);
            write_out(o, weights.lse, {found.q_row, found.q_pos, 0, found.q_head, tile.kv_head, from}, args);
        }
    }
}

}  // namespace
}  // namespace quire
