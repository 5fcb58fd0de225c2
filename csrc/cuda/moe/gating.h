// Between the two products of an expert, and the biases of both: the same for few rows and for many.
#pragma once
#include "gemm.h"

namespace quire {

struct Gating {  // (u + offset) g sigmoid(slope g); limit > 0: g is cut to at most it before, u to [-limit, limit]
    float slope, offset, limit;

    __device__ float operator()(float gate, float up) const {
        if (limit > 0) gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
        return __fdividef(gate, 1.0f + __expf(-slope * gate)) * (up + offset);
    }
};
// biases: of n numbers an expert; null: 0.
__device__ inline float bias_of(const void* biases, int n, int expert, int row) {
    return biases == nullptr ? 0.0f : widen(static_cast<const Element*>(biases)[int64_t(expert) * n + row]);
}

}  // namespace quire
