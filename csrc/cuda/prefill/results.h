// Results of an item: normalised, and written as final rows or as a part.
#pragma once
#include "prefill/softmax.h"

namespace quire {

// Four lanes that share a row hold two columns of each of four groups of eight; afterwards lane t holds group t.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const auto swap = [](uint32_t& a, uint32_t& b, bool high, int distance) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? a : b, distance);
        if (high) a = got;
        else b = got;
    };
    swap(x[0], x[1], odd, 1), swap(x[2], x[3], odd, 1);
    swap(x[0], x[2], upper, 2), swap(x[1], x[3], upper, 2);
}

__device__ __forceinline__ void write_results(float (&o)[DIM / 2], Softmax& softmax, float scale,
                                              const QuireAttnArgs& args, const Work& work, const Rows& rows) {
    const int group = args.n_q_heads / args.n_kv_heads, quad = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float inverse = 1.0f, lse = MINUS_INF;  // lse: base 2
        if (Variant::softmax) {
            float sum = softmax.sum[row];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            inverse = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
            if (sum > 0.0f) lse = softmax.max[row] * scale + log2_fast(sum);
        }
        inverse *= args.v_scale;
        if (work.partial >= 0) {
            const int at = work.partial + work.kv_head * work.n_tokens * group + rows.packed[row];
            if (!rows.real[row]) continue;
            if (quad == 0 && Variant::softmax) args.partial_lse[at] = lse;
            float* out = args.partial_out + int64_t(at) * DIM + 2 * quad;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                *reinterpret_cast<float2*>(out + 8 * i) =
                    make_float2(o[4 * i + 2 * row] * inverse, o[4 * i + 2 * row + 1] * inverse);
            continue;
        }
        const int64_t at = int64_t(rows.q_row[row]) * args.n_q_heads + rows.q_head[row];
        if (Variant::softmax && args.lse != nullptr && rows.real[row] && quad == 0) args.lse[at] = lse * LN2;
        Element* out = static_cast<Element*>(args.out) + at * DIM + 8 * quad;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float a = o[16 * i + 4 * j + 2 * row] * inverse, b = o[16 * i + 4 * j + 2 * row + 1] * inverse;
                if constexpr (Variant::has_output) {
                    Site site = {rows.q_row[row], rows.q_pos[row], 0, rows.q_head[row], work.kv_head,
                                 32 * i + 8 * j + 2 * quad};
                    a = Variant::output(a, site, lse * LN2, args);
                    site.dim++;
                    b = Variant::output(b, site, lse * LN2, args);
                }
                x[j] = pack(a, b);
            }
            transpose_quad(x);
            if (rows.real[row]) *reinterpret_cast<uint4*>(out + 32 * i) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

}  // namespace quire
