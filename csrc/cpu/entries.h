// An entry: the keys, or the values, of one token and head as a page holds them. Of a floating type they are head_dim
// numbers; of 8 bits head_dim integers and then their float32 scale, at any alignment: number = integer * scale.
// Python's side: quire/kernels/kvstore/entry.py.
#pragma once
#include "simd.h"

namespace quire {

struct q8 { int8_t integer; };

constexpr int SCALE_BYTES = 4;

// W integers as floats, exactly; the scale is still to be applied.
QUIRE_INLINE vf load(const q8* p) {
#if QUIRE_AVX512
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif QUIRE_AVX2
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    typedef int8_t bytes __attribute__((vector_size(W)));
    return __builtin_convertvector(load_bits<bytes>(p), vf);
#endif
}

QUIRE_INLINE float scale_of(const q8* entry, int d) {
    float scale;
    memcpy(&scale, entry + d, SCALE_BYTES);
    return scale;
}

}  // namespace quire
