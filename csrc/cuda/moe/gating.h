// Between the two products of an expert, and the biases of both: the same for few rows and for many.
#pragma once
#include "gemm.h"

namespace quire {

struct Gating {  // (u + offset) g sigmoid(slope g); limit > 0: g is cut to at most it before, u to [-limit, limit]
    float slope, offset, limit;

    __device__ void cut(float& gate, float& up) const {
        gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
    }
    __device__ float of(float gate, float up) const {  // of what has been cut, in seven instructions
        return gate * inverse_fast(1.0f + exp2_fast(-LOG2E * slope * gate)) * (up + offset);
    }
    __device__ float operator()(float gate, float up) const {
        if (limit > 0) cut(gate, up);
        return of(gate, up);
    }
};
// biases: of n numbers an expert; null: 0.
__device__ inline float bias_of(const void* biases, int n, int expert, int row) {
    return biases == nullptr ? 0.0f : widen(static_cast<const Element*>(biases)[int64_t(expert) * n + row]);
}

}  // namespace quire
