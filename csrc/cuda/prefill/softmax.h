// What becomes of logits: the rows of a thread, which keys they see, the hooks, and the running softmax.
#pragma once
#include "prefill/shape.h"

namespace quire {

struct Rows {  // the two rows of a thread
    int packed[2], q_row[2], q_pos[2], q_head[2];
    bool real[2];
};

__device__ __forceinline__ Rows read_rows(const QuireAttnArgs& args, const Work& work, int first_row) {
    const int group = args.n_q_heads / args.n_kv_heads;
    Rows rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int packed = first_row + 8 * i;
        rows.packed[i] = packed;
        rows.real[i] = packed < work.n_tokens * group;
        const int token = rows.real[i] ? packed / group : 0;  // hooks see valid rows only
        rows.q_row[i] = work.row + token, rows.q_pos[i] = work.position + token;
        if (work.gathered) {
            rows.q_row[i] = args.rows[2 * (work.row + token)], rows.q_pos[i] = args.rows[2 * (work.row + token) + 1];
        }
        rows.q_head[i] = work.kv_head * group + (rows.real[i] ? packed - token * group : 0);
    }
    return rows;
}

// Whether some row of the tile does not see some key of block i.
__device__ __forceinline__ bool at_edge(const QuireAttnArgs& args, const Work& work, int i) {
    if constexpr (LAYOUT != SPARSE) return i < work.front || i >= work.back;
    const int key = work.key_of(i);
    if (Variant::has_mask || key < work.begin || key + N_KEYS > work.end) return true;
    if (Variant::causal && position_of(work, key + N_KEYS - 1, args) > work.first_pos) return true;
    return Variant::window && position_of(work, key, args) <= work.last_pos - args.window &&
           position_of(work, key + N_KEYS - 1, args) >= args.n_first;
}

// Applies the hooks and hides keys. s: q.k; afterwards q.k or, if there is a hook, what it says: logits or weights.
template <bool EDGE>
__device__ __forceinline__ void weigh(float (&s)[N_KEYS / 2], const QuireAttnArgs& args, const Work& work,
                                      const Rows& rows, int first_key) {
    if (!EDGE && !Variant::has_logits) return;
    constexpr float HIDDEN = Variant::softmax ? MINUS_INF : 0.0f;
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < N_KEYS / 8; j++) {
        const int key = first_key + 8 * j;
        const int pos = LAYOUT != SPARSE || key < work.end ? position_of(work, key, args) : key;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = e / 2, offset = column + e % 2;
            bool visible = true;
            if constexpr (EDGE) {
                visible = key + offset >= work.begin && key + offset < work.end;
                if (Variant::causal) visible &= pos + offset <= rows.q_pos[row];
                if (Variant::window)
                    visible &= pos + offset > rows.q_pos[row] - args.window || pos + offset < args.n_first;
            }
            float& x = s[4 * j + e];
            if (Variant::has_logits || Variant::has_mask) {
                const Site site = {rows.q_row[row], rows.q_pos[row], pos + offset, rows.q_head[row], work.kv_head, 0};
                if (Variant::has_mask && visible) visible = Variant::mask(site, args);
                if (Variant::has_logits && visible)
                    x = Variant::logits(x * args.scale, site, args);
            }
            if (!visible) x = HIDDEN;
        }
    }
}

struct Softmax {  // running maximum and sum of a thread's two rows; the sum is over the thread's own columns
    float max[2], sum[2], factor[2];

    __device__ __forceinline__ void start() { max[0] = max[1] = MINUS_INF, sum[0] = sum[1] = 0.0f; }

    // s becomes weights relative to `max`; `factor` is what older results must be multiplied by. The maximum follows
    // only when it has grown by more than 2^8, so that older results are rarely touched (FlashAttention-4).
    __device__ __forceinline__ void step(float (&s)[N_KEYS / 2], float scale) {
        if constexpr (Variant::softmax) {
            float high[4] = {s[0], s[1], s[2], s[3]};  // independent chains: one warp alone must fill the pipelines
#pragma unroll
            for (int i = 4; i < N_KEYS / 2; i++) high[i % 4] = fmaxf(high[i % 4], s[i]);
            float reference[2], total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float now = fmaxf(high[2 * row], high[2 * row + 1]);
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
                const bool follow = (now - max[row]) * scale > 8.0f || max[row] == MINUS_INF;
                const float next = follow ? now : max[row];
                reference[row] = next == MINUS_INF ? 0.0f : next * scale;
                factor[row] = follow ? exp2_fast(max[row] * scale - reference[row]) : 1.0f;
                max[row] = next;
            }
#pragma unroll
            for (int i = 0; i < N_KEYS / 2; i++) {
                s[i] = exp2_fast(s[i] * scale - reference[i / 2 % 2]);
                total[i % 4] += s[i];
            }
            sum[0] = sum[0] * factor[0] + (total[0] + total[1]);
            sum[1] = sum[1] * factor[1] + (total[2] + total[3]);
        } else {
#pragma unroll
            for (int i = 0; i < N_KEYS / 2; i++) sum[0] += fabsf(s[i]);  // for keep_before_wait
        }
    }
    __device__ __forceinline__ void rescale(float (&o)[DIM / 2]) const {
        if constexpr (Variant::softmax) {
            if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
            for (int i = 0; i < DIM / 2; i++) o[i] *= factor[i / 2 % 2];
        }
    }
};

}  // namespace quire
