// Hopper primitives shared by the attention kernels: barriers in shared memory, the bulk tensor copy engine (TMA),
// matrix fragments, and the host side of tensor maps. Nothing here knows about attention.
//
// Addresses in shared memory are 32-bit (see `shared_address`). Every wait is bounded: a barrier that is not reached
// within about two seconds traps, so that a mistake ends as a CUDA error and not as a hung device.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace quire {

#if defined(QUIRE_BF16) && QUIRE_BF16
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr uint64_t L2_EVICT_FIRST = 0x12F0000000000000ull;  // cache hints of bulk copies
constexpr uint64_t L2_EVICT_NORMAL = 0x1000000000000000ull;
constexpr uint64_t L2_EVICT_LAST = 0x14F0000000000000ull;

// ---- addresses, warps, barriers of threads -------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

__device__ __forceinline__ void named_sync(int barrier, int n_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(n_threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier, int n_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(n_threads) : "memory");
}

template <int N> __device__ __forceinline__ void registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {  // makes inits visible to the copy engine
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Shared memory written by ordinary stores, read next by wgmma or the copy engine.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t n_bytes) {  // arrives, too
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes) : "memory");
}
__device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
// Waits until the phase of this parity has ended (a fresh barrier: the phase of parity 1 has).
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    if (barrier_try(barrier, parity)) return;
    const long long start = clock64();
    while (!barrier_try(barrier, parity)) {
        if (clock64() - start > 4000000000ll) __trap();
    }
}

// ---- bulk tensor copies --------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int c0,
                                         int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to), "l"(map), "r"(barrier), "l"(hint), "r"(c0), "r"(c1)
        : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int c0,
                                         int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to), "l"(map), "r"(barrier), "l"(hint), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int c0,
                                         int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to), "l"(map), "r"(barrier), "l"(hint), "r"(c0), "r"(c1),
        "r"(c2), "r"(c3)
        : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int c0,
                                         int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to), "l"(map), "r"(barrier), "l"(hint), "r"(c0), "r"(c1),
        "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
// To the same place in each CTA of the cluster that `ctas` has a bit for, whose barrier there counts the bytes.
__device__ __forceinline__ void load_box_for_all(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint,
                                                 uint16_t ctas, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %9, %3;" ::"r"(to), "l"(map), "r"(barrier), "l"(hint), "r"(c0),
        "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ctas)
        : "memory");
}

__device__ __forceinline__ void prefetch_bytes(const void* from, uint32_t n_bytes) {  // into L2; multiples of 16
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n_bytes) : "memory");
}

// ---- copies of 16 bytes --------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, bool real) {  // zeros unless real
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_16_bytes_hinted(uint32_t to, const void* from, uint64_t hint) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(hint) : "memory");
}
__device__ __forceinline__ void copy_4_bytes(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ uint4 load_16_bytes(uint32_t address) {  // of shared memory
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_8_bytes(uint32_t address) {  // of shared memory
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void clear_16_bytes(uint32_t address) {  // of shared memory
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
// Counts as this thread's arrival once its copies of 16 bytes are there.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- programmatic dependent launch ---------------------------------------------------------------------------------

__device__ __forceinline__ void wait_for_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Loads that stay where the program has them: the compiler moves __ldg across the two waits above.
__device__ __forceinline__ int load_here(const int* from) {
    int x;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ int4 load_here(const int4* from) {
    int4 x;
    asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// What nobody reads again soon: the first to leave the L2 cache.
__device__ __forceinline__ int4 load_once(const int4* from) {
    int4 x;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.s32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from), "l"(L2_EVICT_FIRST)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_once(int4* to, int4 x) {
    asm volatile("st.global.L2::cache_hint.v4.s32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w), "l"(L2_EVICT_FIRST)
                 : "memory");
}

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* from) {  // what all blocks see
    unsigned long long x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}

// ---- matrix fragments of one warp ----------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_two_matrices(uint32_t& a, uint32_t& b, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                                          uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// d[16 x 8] += a[16 x 16] b[16 x 8], fp32 sums, of fp16 whatever an element is.
__device__ __forceinline__ void multiply_add_halves(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
                 " {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of elements.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(QUIRE_BF16) && QUIRE_BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
                 " {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    multiply_add_halves(d, a, b0, b1);
#endif
}

// ---- numbers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t pack(float low, float high) {  // two elements, rounded to nearest
    uint32_t y;
#if defined(QUIRE_BF16) && QUIRE_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
    return y;
}

// Two codes of e4m3, in the low half of x, as fp16.
__device__ __forceinline__ uint32_t halves_of_low(uint32_t x) {
    uint32_t y;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, low;\n}" : "=r"(y) : "r"(x));
    return y;
}
// In the high half.
__device__ __forceinline__ uint32_t halves_of_high(uint32_t x) {
    uint32_t y;
    asm("{\n .reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, high;\n}" : "=r"(y) : "r"(x));
    return y;
}
// Two numbers as fp16, cut off at its largest; NaN stays.
__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    uint32_t y;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
// ---- host: tensor maps ---------------------------------------------------------------------------------------------

// A map over `rank` dimensions, innermost first (contiguous); strides of dimensions 1 .. in bytes, multiples of 16.
// Boxes whose row is 128 bytes land in shared memory with the 128-byte swizzle: 16-byte cell c of 128-byte row r is
// found at cell c ^ (r % 8), rows counted from an address that is a multiple of 1,024. Cells outside are zero.
// Of `bytes`, else of elements. L2 reads 128 bytes at a time unless told: with 256 a stream of small boxes loses 8 % of an H200's bandwidth.
inline cudaError_t encode_map(CUtensorMap* map, const void* base, int rank, const uint64_t* sizes,
                              const uint64_t* stride_bytes, const uint32_t* box,
                              CUtensorMapL2promotion unit = CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B, bool bytes = false) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
    if (encode == nullptr) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult query;
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &query);
        if (error != cudaSuccess) return error;
        if (query != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
    }
#if defined(QUIRE_BF16) && QUIRE_BF16
    constexpr CUtensorMapDataType element = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
#else
    constexpr CUtensorMapDataType element = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
#endif
    const CUtensorMapDataType type = bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : element;
    const uint32_t steps[5] = {1, 1, 1, 1, 1};
    const CUresult result =
        encode(map, type, rank, const_cast<void*>(base), reinterpret_cast<const cuuint64_t*>(sizes),
               reinterpret_cast<const cuuint64_t*>(stride_bytes), box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle, unit, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// x / y, correctly rounded where it is finite, with the inverse of y, which is, too (P. W. Markstein, IBM J. Res. Dev.
// 34.1, 1990): three instructions.
__device__ __forceinline__ float quotient(float x, float y, float inverse) {
    const float nearly = x * inverse;
    return __fmaf_rn(__fmaf_rn(-nearly, y, x), inverse, nearly);
}

// Two numbers in e4m3, the first in the low byte; cut off at the largest.
__device__ __forceinline__ uint32_t codes_of(float low, float high) {
    uint16_t y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    return y;
}

}  // namespace quire
