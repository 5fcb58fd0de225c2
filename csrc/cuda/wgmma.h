// Matrix products of a warpgroup (wgmma, sm_90a): 64 rows x N columns x 16, fp32 sums in registers.
//
// Operands in shared memory are tiles of 64 x 16-bit columns (rows of 128 bytes, 128-byte swizzle, see hopper.h) which
// start at a multiple of 1,024 bytes. A thread of warp w, lane t holds the sums of rows 16 w + t / 4 and 8 below it:
// d[4 j + 0, 1] are columns 8 j + 2 (t % 4) + 0, 1 of the upper row and d[4 j + 2, 3] those of the lower one.
// Registers of a product must not be touched between its issue and the wait.
#pragma once
#include "hopper.h"

namespace quire {

// barrier_wait for kernels that give registers from one warpgroup to another: a trap instruction makes ptxas 13.0 plan
// with the registers at entry (C7512, products serialised), so a wait of about two seconds ends in a fault instead.
__device__ __forceinline__ void await(uint32_t barrier, uint32_t parity) {
    if (barrier_try(barrier, parity)) return;
    const long long start = clock64();
    while (!barrier_try(barrier, parity)) {
        if (clock64() - start > 4000000000ll) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(0) : "memory");
    }
}

// ---- descriptors of operands in shared memory ----------------------------------------------------------------------

struct Operand {  // only the low word depends on the address: further parts of an operand cost one addition
    uint32_t low, high;
    __device__ __forceinline__ uint64_t bits() const { return uint64_t(high) << 32 | low; }
    __device__ __forceinline__ Operand further(uint32_t n_bytes) const { return {low + (n_bytes >> 4), high}; }
};
constexpr uint32_t SWIZZLE_128 = 1u << 30;
// Bits 4 .. 17 of an address: above them an address has the rank of its block in the cluster.
__device__ __forceinline__ uint32_t start_bits(uint32_t address) { return address >> 4 & 0x3fff; }

// Rows are the operand's outer dimension, the 16 of the product lie along a row (q and k): a group of 8 rows every
// `group_bytes`. 16 columns further is 32 bytes further, until the row of 128 bytes ends.
__device__ __forceinline__ Operand rows_operand(uint32_t address, uint32_t group_bytes = 1024) {
    return {start_bits(address) | 1u << 16, (group_bytes >> 4) | SWIZZLE_128};
}
// The same of rows of 32, 64 or 128 bytes, each with the swizzle of as many.
template <int ROW_BYTES> __device__ __forceinline__ Operand short_rows_operand(uint32_t address) {
    return {start_bits(address) | 1u << 16, (8 * ROW_BYTES >> 4) | (ROW_BYTES == 32 ? 3u : ROW_BYTES == 64 ? 2u : 1u) << 30};
}
// Rows are the 16 of the product, two groups of 8 that are `group_bytes` apart; the outer dimension lies along a row
// (v), the next 64 columns `tile_bytes` further.
__device__ __forceinline__ Operand columns_operand(uint32_t address, uint32_t tile_bytes, uint32_t group_bytes = 1024) {
    return {start_bits(address) | (tile_bytes >> 4) << 16, (group_bytes >> 4) | SWIZZLE_128};
}

// ---- issue and wait ------------------------------------------------------------------------------------------------

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void products_wait() {  // until at most N committed groups run
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The compiler must not move reads or writes of these registers over this point.
template <int N> __device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// ptxas moves a wait up over arithmetic that could run under the products. This stays behind the computation of
// `value`, which is never negative, and a wait stays behind this.
__device__ __forceinline__ void keep_before_wait(float value, uint32_t any_shared_address) {
    asm volatile("{\n .reg .pred p;\n setp.lt.f32 p, %0, 0f00000000;\n @p st.shared.f32 [%1], %0;\n}" ::"f"(value),
                 "r"(any_shared_address)
                 : "memory");
}

// ---- products ------------------------------------------------------------------------------------------------------

// Product<N>::rows:    d (+)= a b^T, both in shared memory (rows_operand).
// Product<N>::rows_of: the same, a in registers.
// Product<N>::columns: d += a b, a in registers (pairs of columns, as in the fragments of mma.m16n8k16), b in shared
// memory (columns_operand).
// Product<N>::columns_shared: the same, a in shared memory (rows_operand).
// Product<N>::turned:  d += a b^T, both in shared memory, a along its outer dimension (columns_operand).
template <int N> struct Product;

#if defined(QUIRE_BF16) && QUIRE_BF16
#define QUIRE_TYPES "k16.f32.bf16.bf16 "
#else
#define QUIRE_TYPES "k16.f32.f16.f16 "
#endif
#if defined(QUIRE_FP8) && QUIRE_FP8  // rows of bytes: 32 columns
#define QUIRE_ROW_TYPES "k32.f32.e4m3.e4m3 "
#define QUIRE_ROW_ORDER
#else
#define QUIRE_ROW_TYPES QUIRE_TYPES
#define QUIRE_ROW_ORDER ", 0, 0"
#endif
#define QUIRE_TEN(t) \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define QUIRE_SUMS_30 QUIRE_TEN() QUIRE_TEN(1) QUIRE_TEN(2)
#define QUIRE_SUMS_60 QUIRE_SUMS_30 QUIRE_TEN(3) QUIRE_TEN(4) QUIRE_TEN(5)
#define QUIRE_SUMS_90 QUIRE_SUMS_60 QUIRE_TEN(6) QUIRE_TEN(7) QUIRE_TEN(8)
#define QUIRE_SUMS_120 QUIRE_SUMS_90 QUIRE_TEN(9) QUIRE_TEN(10) QUIRE_TEN(11)
#define QUIRE_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QUIRE_OUT8(i)                                                                                          \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define QUIRE_OUT16(i) QUIRE_OUT8(i), QUIRE_OUT8(i + 8)
#define QUIRE_OUT32(i) QUIRE_OUT16(i), QUIRE_OUT16(i + 16)
#define QUIRE_OUT64(i) QUIRE_OUT32(i), QUIRE_OUT32(i + 32)

// SUMS: the N / 2 sums in assembly; A .. F: the numbers of the six operands after them.
#define QUIRE_PRODUCT(N, SUMS, OUT, A, B, C, D, E, F)                                                            \
    template <> struct Product<N> {                                                                              \
        static __device__ __forceinline__ void rows(float (&d)[N / 2], Operand a, Operand b, int accumulate) {   \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #C ", 0;\n"                                      \
                         " wgmma.mma_async.sync.aligned.m64n" #N QUIRE_ROW_TYPES "{" SUMS "}, %" #A ", %" #B     \
                         ", p, 1, 1" QUIRE_ROW_ORDER ";\n}"                                                      \
                         : OUT                                                                                   \
                         : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));                                             \
        }                                                                                                        \
        static __device__ __forceinline__ void rows_of(float (&d)[N / 2], const uint32_t (&a)[4], Operand b,      \
                                                       int accumulate) {                                         \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #F ", 0;\n"                                      \
                         " wgmma.mma_async.sync.aligned.m64n" #N QUIRE_TYPES "{" SUMS "}, {%" #A ", %" #B        \
                         ", %" #C ", %" #D "}, %" #E ", p, 1, 1, 0;\n}"                                          \
                         : OUT                                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(accumulate));         \
        }                                                                                                        \
        static __device__ __forceinline__ void turned(float (&d)[N / 2], Operand a, Operand b, int accumulate) { \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #C ", 0;\n"                                      \
                         " wgmma.mma_async.sync.aligned.m64n" #N QUIRE_TYPES "{" SUMS "}, %" #A ", %" #B         \
                         ", p, 1, 1, 1, 0;\n}"                                                                   \
                         : OUT                                                                                   \
                         : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));                                       \
        }                                                                                                        \
        static __device__ __forceinline__ void columns_shared(float (&d)[N / 2], Operand a, Operand b,           \
                                                              int accumulate) {                                  \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #C ", 0;\n"                                      \
                         " wgmma.mma_async.sync.aligned.m64n" #N QUIRE_TYPES "{" SUMS "}, %" #A ", %" #B         \
                         ", p, 1, 1, 0, 1;\n}"                                                                   \
                         : OUT                                                                                   \
                         : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));                                       \
        }                                                                                                        \
        static __device__ __forceinline__ void columns(float (&d)[N / 2], const uint32_t* a, Operand b,          \
                                                       int accumulate) {                                         \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #F ", 0;\n"                                      \
                         " wgmma.mma_async.sync.aligned.m64n" #N QUIRE_TYPES "{" SUMS "}, {%" #A ", %" #B        \
                         ", %" #C ", %" #D "}, %" #E ", p, 1, 1, 1;\n}"                                          \
                         : OUT                                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "r"(accumulate));         \
        }                                                                                                        \
    };

#define QUIRE_OUT_36 QUIRE_OUT32(0), QUIRE_OUT4(32)
#define QUIRE_OUT_40 QUIRE_OUT32(0), QUIRE_OUT8(32)
#define QUIRE_OUT_44 QUIRE_OUT_40, QUIRE_OUT4(40)
#define QUIRE_OUT_48 QUIRE_OUT32(0), QUIRE_OUT16(32)
#define QUIRE_OUT_52 QUIRE_OUT_48, QUIRE_OUT4(48)
#define QUIRE_OUT_56 QUIRE_OUT_48, QUIRE_OUT8(48)
#define QUIRE_OUT_60 QUIRE_OUT_56, QUIRE_OUT4(56)
#define QUIRE_OUT_68 QUIRE_OUT64(0), QUIRE_OUT4(64)
#define QUIRE_OUT_72 QUIRE_OUT64(0), QUIRE_OUT8(64)
#define QUIRE_OUT_76 QUIRE_OUT_72, QUIRE_OUT4(72)
#define QUIRE_OUT_80 QUIRE_OUT64(0), QUIRE_OUT16(64)
#define QUIRE_OUT_96 QUIRE_OUT64(0), QUIRE_OUT32(64)
#define QUIRE_OUT_128 QUIRE_OUT64(0), QUIRE_OUT64(64)
QUIRE_PRODUCT(16, "%0, %1, %2, %3, %4, %5, %6, %7", QUIRE_OUT8(0), 8, 9, 10, 11, 12, 13)
QUIRE_PRODUCT(32, QUIRE_TEN() "%10, %11, %12, %13, %14, %15", QUIRE_OUT16(0), 16, 17, 18, 19, 20, 21)
QUIRE_PRODUCT(64, QUIRE_SUMS_30 "%30, %31", QUIRE_OUT32(0), 32, 33, 34, 35, 36, 37)
QUIRE_PRODUCT(72, QUIRE_SUMS_30 "%30, %31, %32, %33, %34, %35", QUIRE_OUT_36, 36, 37, 38, 39, 40, 41)
QUIRE_PRODUCT(80, QUIRE_SUMS_30 "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39", QUIRE_OUT_40, 40, 41, 42, 43, 44,
              45)
QUIRE_PRODUCT(88, QUIRE_SUMS_30 QUIRE_TEN(3) "%40, %41, %42, %43", QUIRE_OUT_44, 44, 45, 46, 47, 48, 49)
QUIRE_PRODUCT(96, QUIRE_SUMS_30 QUIRE_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47", QUIRE_OUT_48, 48, 49, 50, 51,
              52, 53)
QUIRE_PRODUCT(104, QUIRE_SUMS_30 QUIRE_TEN(3) QUIRE_TEN(4) "%50, %51", QUIRE_OUT_52, 52, 53, 54, 55, 56, 57)
QUIRE_PRODUCT(112, QUIRE_SUMS_30 QUIRE_TEN(3) QUIRE_TEN(4) "%50, %51, %52, %53, %54, %55",
              QUIRE_OUT_56, 56, 57, 58, 59, 60, 61)
QUIRE_PRODUCT(120, QUIRE_SUMS_30 QUIRE_TEN(3) QUIRE_TEN(4) "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59",
              QUIRE_OUT_60, 60, 61, 62, 63, 64, 65)
QUIRE_PRODUCT(128, QUIRE_SUMS_60 "%60, %61, %62, %63", QUIRE_OUT64(0), 64, 65, 66, 67, 68, 69)
QUIRE_PRODUCT(136, QUIRE_SUMS_60 "%60, %61, %62, %63, %64, %65, %66, %67", QUIRE_OUT_68, 68, 69, 70, 71, 72, 73)
QUIRE_PRODUCT(144, QUIRE_SUMS_60 QUIRE_TEN(6) "%70, %71", QUIRE_OUT_72, 72, 73, 74, 75, 76, 77)
QUIRE_PRODUCT(152, QUIRE_SUMS_60 QUIRE_TEN(6) "%70, %71, %72, %73, %74, %75", QUIRE_OUT_76, 76, 77, 78, 79, 80, 81)
QUIRE_PRODUCT(160, QUIRE_SUMS_60 QUIRE_TEN(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79",
              QUIRE_OUT_80, 80, 81, 82, 83, 84, 85)
QUIRE_PRODUCT(192, QUIRE_SUMS_90 "%90, %91, %92, %93, %94, %95", QUIRE_OUT_96, 96, 97, 98, 99, 100, 101)
QUIRE_PRODUCT(256, QUIRE_SUMS_120 "%120, %121, %122, %123, %124, %125, %126, %127", QUIRE_OUT_128, 128, 129, 130, 131,
              132, 133)

#undef QUIRE_PRODUCT
#undef QUIRE_TYPES
#undef QUIRE_ROW_TYPES
#undef QUIRE_ROW_ORDER
#undef QUIRE_TEN
#undef QUIRE_SUMS_30
#undef QUIRE_SUMS_60
#undef QUIRE_SUMS_90
#undef QUIRE_SUMS_120
#undef QUIRE_OUT4
#undef QUIRE_OUT8
#undef QUIRE_OUT16
#undef QUIRE_OUT32
#undef QUIRE_OUT64
#undef QUIRE_OUT_36
#undef QUIRE_OUT_40
#undef QUIRE_OUT_44
#undef QUIRE_OUT_48
#undef QUIRE_OUT_52
#undef QUIRE_OUT_56
#undef QUIRE_OUT_60
#undef QUIRE_OUT_68
#undef QUIRE_OUT_72
#undef QUIRE_OUT_76
#undef QUIRE_OUT_80
#undef QUIRE_OUT_96
#undef QUIRE_OUT_128

}  // namespace quire
