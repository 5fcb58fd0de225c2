// Stands in for csrc/cuda/hopper.h where there is no GPU: what rows.cu, reduce.cu, sample.cu and state.cu there need of CUDA, on
// fibers of the host.
//
// Blocks run one after another, the threads of a block at once; those of a cluster, too, with EMULATED_CLUSTERS. At the wait for the previous grid the bytes given to
// `emulated_arrival` appear: until then a kernel sees what its predecessor has not written yet.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "fibers.h"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

using std::max, std::min;

struct int4 {
    int x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct float2 {
    float x, y;
};
struct __half2 {
    _Float16 x, y;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

template <class To, class From> To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }

namespace emulated {
// Of a cluster; the same in every build: variables of this kind are one for all libraries of a process.
constexpr int MOST_CTAS = 2;
#ifdef EMULATED_CLUSTERS
constexpr bool HAS_CLUSTERS = true;
#else
constexpr bool HAS_CLUSTERS = false;
#endif
inline std::unique_ptr<Barrier> blocks[MOST_CTAS];
inline std::vector<std::unique_ptr<Barrier>> warps;
inline float exchanged[1024];
inline unsigned thread() { return (cta * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }  // of the cluster
inline const void* arrival_from = nullptr;
inline void* arrival_to = nullptr;
inline size_t arrival_bytes = 0;
}  // namespace emulated

inline void __syncthreads() { emulated::blocks[emulated::cta]->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
    emulated::Barrier& warp = *emulated::warps[emulated::thread() / 32];
    emulated::exchanged[emulated::thread()] = x;
    warp.arrive_and_wait();
    const float found = emulated::exchanged[emulated::thread() ^ mask];
    warp.arrive_and_wait();
    return found;
}
inline int __shfl_up_sync(unsigned, int x, int step) {
    emulated::Barrier& warp = *emulated::warps[emulated::thread() / 32];
    emulated::exchanged[emulated::thread()] = same_bits<float>(x);
    warp.arrive_and_wait();
    const unsigned own = emulated::thread(), from = int(own % 32) < step ? own : own - step;
    const int found = same_bits<int>(emulated::exchanged[from]);
    warp.arrive_and_wait();
    return found;
}

namespace quire {
constexpr float LOG2E = 1.4426950408889634f;
inline float exp2_fast(float x) { return std::exp2(x); }
inline uint16_t narrowed(float x) {
#if QUIRE_BF16
    const uint32_t bits = same_bits<uint32_t>(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
    return same_bits<uint16_t>(static_cast<_Float16>(x));
#endif
}
struct Element {
    uint16_t bits;
    explicit Element(float x) : bits(narrowed(x)) {}
};
inline uint32_t pack(float low, float high) { return narrowed(low) | uint32_t(narrowed(high)) << 16; }
inline int load_here(const int* from) { return *from; }
inline int4 load_here(const int4* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) std::abort();
    return *from;
}
inline int4 load_once(const int4* from) { return load_here(from); }
inline void store_once(int4* to, int4 x) { *to = x; }
inline void let_next_grid_start() {}
inline void wait_for_previous_grid() {
    if (!emulated::arrival_bytes) return;
    __syncthreads();
    if (threadIdx.x == 0)
        std::memcpy(emulated::arrival_to, emulated::arrival_from, emulated::arrival_bytes);
    __syncthreads();
}
inline float quotient(float x, float y, float) { return x / y; }
inline uint32_t code_of(float x) {  // e4m3: units of 2^-9 below 2^-6, four bits of the number above
    const float size = std::min(std::fabs(x), 448.f);
    const int exponent = size < 0x1p-6f ? -6 : std::ilogb(size);
    const int units = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 16: the next exponent's first
    return (std::signbit(x) ? 0x80 : 0) | uint32_t((exponent + 6) * 8 + units);
}
inline uint32_t codes_of(float low, float high) { return code_of(low) | code_of(high) << 8; }
}  // namespace quire

extern "C" void emulated_arrival(const void* from, void* to, size_t n_bytes) {
    emulated::arrival_from = from, emulated::arrival_to = to, emulated::arrival_bytes = n_bytes;
}

using cudaError_t = int;
using cudaStream_t = void*;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
        dim3 clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    int numAttrs;
};

extern "C" {
inline size_t emulated_shared_bytes = 0;  // that the last launch asked for
}

template <class Kernel, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel, const Arguments&... arguments) {
    emulated_shared_bytes = config->dynamicSmemBytes;
    const int n_threads = config->blockDim.x * config->blockDim.y;
    const dim3 grid = config->gridDim;
    blockDim = config->blockDim, gridDim = grid;
    int n_ctas = 1;
    for (int i = 0; emulated::HAS_CLUSTERS && i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) n_ctas = config->attrs[i].val.clusterDim.x;
    if (n_ctas > emulated::MOST_CTAS || grid.x % n_ctas) return cudaErrorInvalidValue;
    for (int i = 0; i < n_ctas; ++i) emulated::blocks[i] = std::make_unique<emulated::Barrier>(n_threads);
    emulated::warps.clear();
    for (int i = 0; i < n_ctas * n_threads / 32; ++i) emulated::warps.push_back(std::make_unique<emulated::Barrier>(32));
    emulated::Barrier between(n_ctas * n_threads);
    std::vector<emulated::Fiber> threads(n_ctas * n_threads);
    for (int t = 0; t < n_ctas * n_threads; ++t) {
        threads[t].cta = t / n_threads;
        threads[t].thread = dim3(t % n_threads % blockDim.x, t % n_threads / blockDim.x, 0);
    }
    emulated::run(threads, [&] {
        for (unsigned i = emulated::cta; i < grid.x * grid.y * grid.z; i += n_ctas) {
            blockIdx = emulated::current->block = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
            kernel(arguments...);
            between.arrive_and_wait();
        }
    });
    return cudaSuccess;
}
