// One vector of floats per instruction set. Everything above this file is written once.
//
// Owns: vf/vi (W lanes), loads and stores with conversion, fma, exp2, transpose.
// Invariant: each function is lane-wise with a fixed order of operations, so a lane's result never depends on the
// other lanes. Compile with -ffp-contract=off: a multiply and an add are fused only where fma() says so.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quire {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QUIRE_AVX512 1
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QUIRE_AVX2 1
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

#define QUIRE_INLINE static inline __attribute__((always_inline))

template <class V> QUIRE_INLINE V load_bits(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
template <class V> QUIRE_INLINE void store_bits(void* p, V v) { memcpy(p, &v, sizeof v); }

QUIRE_INLINE vf set1(float x) { return vf{} + x; }
QUIRE_INLINE vi set1i(int32_t x) { return vi{} + x; }

QUIRE_INLINE vf fma(vf a, vf b, vf c) {
#if QUIRE_AVX512
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif QUIRE_AVX2
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

QUIRE_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }  // b if either is NaN

// The largest lane; lanes that are NaN may be left out.
QUIRE_INLINE float hmax(vf v) {
#if QUIRE_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// Sum of the lanes as a balanced tree.
QUIRE_INLINE float hsum(vf v) {
#if QUIRE_AVX512
    const __m512 wide = (__m512)v;
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lane[W];
    store_bits(lane, v);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lane[i] += lane[i + n];
    return lane[0];
#endif
}

// 2^f for f in -0.5 .. 0.5. Coefficients: Cephes exp2f.
QUIRE_INLINE vf exp2_fraction(vf f) {
    vf y = set1(1.535336188319500e-4f);
    y = fma(y, f, set1(1.339887440266574e-3f));
    y = fma(y, f, set1(9.618437357674640e-3f));
    y = fma(y, f, set1(5.550332471162809e-2f));
    y = fma(y, f, set1(2.402264791363012e-1f));
    y = fma(y, f, set1(6.931472028550421e-1f));
    return fma(y, f, set1(1.f));
}

// 2^x, relative error below 2e-7; infinity from 127.5 on, NaN stays NaN. Below 2^-126, the smallest normal number, the
// result is 0 or right, as the instruction set has it.
QUIRE_INLINE vf exp2(vf x) {
#if QUIRE_AVX512  // an infinite x makes the fraction NaN, which scalef turns into 0 or infinity
    const __m512 whole = _mm512_roundscale_ps((__m512)x, 0);
    return (vf)_mm512_scalef_ps((__m512)exp2_fraction(x - (vf)whole), whole);
#else
    x = x < set1(-127.f) ? set1(-127.f) : x;
    x = x > set1(128.f) ? set1(128.f) : x;
    const vf magic = set1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const vf shifted = x + magic;
    const vi exponent = (vi)shifted - (vi)magic + 127;
    return exp2_fraction(x - (shifted - magic)) * (vf)(exponent << 23);
#endif
}

// tanh x, absolute error below 2e-7, relative error below 1e-6 near 0. Coefficients: Cephes tanhf.
QUIRE_INLINE vf tanh(vf x) {
    const vf a = (vf)((vi)x & 0x7fffffff), z = x * x;
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    const vf small = fma(p * z, x, x);
    const vf large = set1(1.f) - set1(2.f) / (exp2(a * 2.885390081777927f) + 1.f);
    const vf with_sign = (vf)((vi)large | ((vi)x & (int32_t)0x80000000));
    return a < set1(0.625f) ? small : with_sign;
}

// --- conversions -------------------------------------------------------------------------------------------------

QUIRE_INLINE vf load(const float* p) { return load_bits<vf>(p); }

QUIRE_INLINE vu widen(const uint16_t* p) {
#if QUIRE_AVX512
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif QUIRE_AVX2
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    return __builtin_convertvector(load_bits<vh>(p), vu);
#endif
}

QUIRE_INLINE vf load(const bf16* p) { return (vf)(widen(&p->bits) << 16); }

QUIRE_INLINE vf load(const f16* p) {
#if QUIRE_AVX512
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif QUIRE_AVX2
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    const vu h = widen(&p->bits), magnitude = (h & 0x7fffu) << 13;
    const vf scaled = (vf)magnitude * 0x1p112f;  // moves the exponent bias from 15 to 127; right for subnormals too
    const vu special = (vu)((h & 0x7c00u) == 0x7c00u);
    const vu bits = ((vu)scaled & ~special) | ((magnitude | 0x7f800000u) & special);
    return (vf)(bits | ((h & 0x8000u) << 16));
#endif
}

QUIRE_INLINE void store(float* p, vf v) { store_bits(p, v); }

#if QUIRE_AVX512 && defined(__AVX512BF16__)

// Round to nearest even; a NaN becomes a quiet NaN; magnitudes below the smallest normal number become 0.
QUIRE_INLINE vu bf16_bits(vf v) { return (vu)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)); }

QUIRE_INLINE void store(bf16* p, vf v) { store_bits(p, _mm512_cvtneps_pbh((__m512)v)); }

#else

// The same, but for magnitudes below the smallest normal number, which are rounded as well.
QUIRE_INLINE vu bf16_bits(vf v) {
    const vu u = (vu)v;
    const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const vu nan = (vu)(v != v);
    return (rounded & ~nan) | (((u >> 16) | 0x40u) & nan);
}

QUIRE_INLINE void store(bf16* p, vf v) {
#if QUIRE_AVX512
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)bf16_bits(v)));
#else
    store_bits(p, __builtin_convertvector(bf16_bits(v), vh));
#endif
}

#endif

// One float to float16 bits, round to nearest even (the portable path; x86 has an instruction).
QUIRE_INLINE uint16_t f16_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {                                    // subnormal: let the adder round
        float shifted;
        memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        memcpy(&u, &shifted, 4);
        return (uint16_t)(sign | (u - 0x3f000000u));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

QUIRE_INLINE void store(f16* p, vf v) {
#if QUIRE_AVX512
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif QUIRE_AVX2
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#else
    for (int i = 0; i < W; i++) p[i].bits = f16_bits(v[i]);
#endif
}

// The first n < W elements, zeros in the other lanes.
template <class T> QUIRE_INLINE vf load_some(const T* p, int n) {
    T lane[W];
    memset(lane, 0, sizeof lane);
    memcpy(lane, p, n * sizeof(T));
    return load(lane);
}

template <class T> QUIRE_INLINE void store_some(T* p, vf v, int n) {
    T lane[W];
    store(lane, v);
    memcpy(p, lane, n * sizeof(T));
}

// --- transpose a W x W block of 32-bit values --------------------------------------------------------------------

QUIRE_INLINE void transpose(vf (&r)[W]) {
#if QUIRE_AVX512
    __m512 t[16], u[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps((__m512)r[2 * i], (__m512)r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps((__m512)r[2 * i], (__m512)r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {  // u[4i + c]: column c of each 4 x 4 block of rows 4i .. 4i+3
            const __m512d a = (__m512d)t[4 * i + j], b = (__m512d)t[4 * i + 2 + j];
            u[4 * i + 2 * j] = (__m512)_mm512_unpacklo_pd(a, b);
            u[4 * i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(a, b);
        }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88), b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
        const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88);
        const __m512 e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
        r[c] = (vf)_mm512_shuffle_f32x4(a, d, 0x88);
        r[4 + c] = (vf)_mm512_shuffle_f32x4(b, e, 0x88);
        r[8 + c] = (vf)_mm512_shuffle_f32x4(a, d, 0xdd);
        r[12 + c] = (vf)_mm512_shuffle_f32x4(b, e, 0xdd);
    }
#elif QUIRE_AVX2
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps((__m256)r[2 * i], (__m256)r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps((__m256)r[2 * i], (__m256)r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            const __m256d a = (__m256d)t[4 * i + j], b = (__m256d)t[4 * i + 2 + j];
            u[4 * i + 2 * j] = (__m256)_mm256_unpacklo_pd(a, b);
            u[4 * i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(a, b);
        }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        r[c] = (vf)_mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
        r[4 + c] = (vf)_mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
    }
#else
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            const float x = r[i][j];
            r[i][j] = r[j][i];
            r[j][i] = x;
        }
#endif
}

}  // namespace quire
