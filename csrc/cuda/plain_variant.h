// The plain variant (softmax(scale * q.k), causal), and the form that a generated variant header has: it is included
// after attention.h and before a kernel, by `nvcc -include`.
#pragma once
#include "attention.h"

struct Site {  // of one logit: the row of q, true positions in the sequence, heads; `dim` in `output` only
    int q_row, q_pos, k_pos, q_head, kv_head, dim;
};

struct Variant {
    static constexpr bool softmax = true;  // false: `logits` gives the weight itself, hidden keys weigh 0
    static constexpr bool causal = true, window = false;
    static constexpr bool has_logits = false, has_mask = false, has_output = false;
    // s = scale * q.k in natural units; called only if has_logits.
    static __device__ float logits(float s, const Site&, const QuireAttnArgs&) { return s; }
    static __device__ bool mask(const Site&, const QuireAttnArgs&) { return true; }
    // lse: natural logarithm, -inf for a row that sees nothing. site.q_pos is -1 where parts were merged, k_pos is 0.
    static __device__ float output(float o, const Site&, float, const QuireAttnArgs&) { return o; }
};
