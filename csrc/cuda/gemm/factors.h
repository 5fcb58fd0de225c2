// What codes of 4 bits in a product of many rows are multiplied by, and what is taken from them before.
#pragma once
#include "gemm/codes.h"

namespace quire {

struct Factors {  // of the two rows of w that a thread has: scales, and zero points raised as codes are
    uint32_t upper, lower, upper_point, lower_point;
};
struct Read {  // the same as they lie in memory: a conversion would wait for the load
    Element upper, lower, upper_point, lower_point;
};
__device__ __forceinline__ Factors factors(const Read& read) {
    const float upper = widen(read.upper), lower = widen(read.lower);
    const float upper_point = widen(read.upper_point), lower_point = widen(read.lower_point);
    return {pack(upper, upper), pack(lower, lower), raised_point(upper_point), raised_point(lower_point)};
}

}  // namespace quire
