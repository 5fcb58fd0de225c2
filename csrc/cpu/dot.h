// Products of bytes: each 32-bit lane takes four unsigned bytes of the weights and four signed bytes of the activations.
//
// Owns the instructions of each level. Invariant: the sums are exact; no step saturates for activations in -127..127.
#pragma once
#include "simd.h"

namespace quire {

#if defined(__AVX512VNNI__)

constexpr int BYTE_ZERO = 128;  // what dot_bytes leaves in each stored byte: the caller subtracts it

// acc + sum of w * x, w in 0..255.
QUIRE_INLINE vi dot_bytes(vi acc, vi w, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
}

#elif QUIRE_AVX512 || QUIRE_AVX2

constexpr int BYTE_ZERO = 0;

// acc + sum of (w - 128) * x, w in 1..255. Signs move to x: 255 * 127 * 2 would saturate, 127 * 127 * 2 does not.
QUIRE_INLINE vi dot_bytes(vi acc, vi w, vi x) {
    const vi w_signed = w ^ set1i((int32_t)0x80808080);
#if QUIRE_AVX512
    const __m512i a = _mm512_abs_epi8((__m512i)w_signed);
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)w_signed);
    const __m512i b = _mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
    return acc + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
#else
    const __m256i a = _mm256_abs_epi8((__m256i)w_signed), b = _mm256_sign_epi8((__m256i)x, (__m256i)w_signed);
    return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#endif
}

#else

constexpr int BYTE_ZERO = 128;
typedef int16_t vs __attribute__((vector_size(W * 4)));

// acc + sum of w * x, w in 0..255: a product fits 16 bits (255 * 127).
QUIRE_INLINE vi dot_bytes(vi acc, vi w, vi x) {
    const vs even = (vs)(w & 0x00ff00ff) * (((vs)x << 8) >> 8);
    const vs odd = (vs)(((vu)w >> 8) & 0x00ff00ffu) * ((vs)x >> 8);
    acc += (((vi)even << 16) >> 16) + ((vi)even >> 16);
    return acc + (((vi)odd << 16) >> 16) + ((vi)odd >> 16);
}

#endif

// Sixteen bytes to choose from.
#if QUIRE_AVX512
typedef vi Table;
QUIRE_INLINE Table table_of(const uint8_t* bytes) {
    return (vi)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes));
}
// Bytes of the table; each byte of `at` is in 0..15.
QUIRE_INLINE vi look_up(Table table, vi at) { return (vi)_mm512_shuffle_epi8((__m512i)table, (__m512i)at); }
#elif QUIRE_AVX2
typedef vi Table;
QUIRE_INLINE Table table_of(const uint8_t* bytes) {
    return (vi)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes));
}
QUIRE_INLINE vi look_up(Table table, vi at) { return (vi)_mm256_shuffle_epi8((__m256i)table, (__m256i)at); }
#elif defined(__aarch64__)
typedef uint8x16_t Table;
QUIRE_INLINE Table table_of(const uint8_t* bytes) { return vld1q_u8(bytes); }
QUIRE_INLINE vi look_up(Table table, vi at) { return (vi)vqtbl1q_u8(table, (uint8x16_t)at); }
#else
struct Table { uint8_t bytes[16]; };
QUIRE_INLINE Table table_of(const uint8_t* bytes) { return load_bits<Table>(bytes); }
QUIRE_INLINE vi look_up(Table table, vi at) {
    uint64_t in[sizeof(vi) / 8], out[sizeof(vi) / 8] = {};  // words: bytes stored apart would stall the load behind them
    store_bits(in, at);
    for (size_t i = 0; i < sizeof(vi); i++)
        out[i / 8] |= (uint64_t)table.bytes[in[i / 8] >> i % 8 * 8 & 255] << i % 8 * 8;
    return load_bits<vi>(out);
}
#endif

QUIRE_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// Four bytes in every lane.
QUIRE_INLINE vi repeat(const int8_t* p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return set1i(bits);
}

// The low byte of each lane.
QUIRE_INLINE void store_bytes(int8_t* p, vi v) {
#if QUIRE_AVX512
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < W; i++) p[i] = (int8_t)v[i];
#endif
}

QUIRE_INLINE int32_t hsum(vi v) {
#if QUIRE_AVX512
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = v[0];
    for (int i = 1; i < W; i++) sum += v[i];
    return sum;
#endif
}

QUIRE_INLINE int32_t hmax(vi v) {
#if QUIRE_AVX512
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t most = v[0];
    for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

}  // namespace quire
