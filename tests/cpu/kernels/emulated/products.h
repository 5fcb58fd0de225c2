// Stands in for what gemm.h, gemm/codes.h and gemm/wide_memory.h have of instructions, for gemm_wide.cu and lora.cu. What
// gemm.h has without any (sizes, SwiGLU, tensor maps of w) is copied behind it.
#pragma once
#include "emulated_gemm.h"

enum { cudaFuncAttributePreferredSharedMemoryCarveout = 9, cudaSharedmemCarveoutMaxShared = 100 };
inline void __stcg(float4* to, float4 x) { *to = x; }
inline int atomicAdd(uint32_t* to, uint32_t x) { return std::atomic_ref(*to).fetch_add(x); }

namespace quire {
inline uint4 load16(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) std::abort();
    uint4 x;
    std::memcpy(&x, from, 16);
    return x;
}
inline float rounded(float x) { return widen(Element(x)); }
inline void store_there(uint32_t, float4) { std::abort(); }
inline void arrive_there(uint32_t) { std::abort(); }
inline void wait_cluster(uint32_t, uint32_t) { std::abort(); }
constexpr float RAISED = QUIRE_BF16 ? 128.f : 64.f;
inline uint32_t raised(uint32_t word, int i) {
    uint32_t y = 0;
    for (int half = 0; half < 2; ++half) {
        const uint32_t code = word >> (16 * half + 4 * i) & 15;
        y |= (QUIRE_BF16 ? 0x4300 | code : 0x5400 | code << 4) << 16 * half;
    }
    return y;
}
inline uint32_t load_acquire(const uint32_t* from) { emulated::pass(); return std::atomic_ref(*const_cast<uint32_t*>(from)).load(); }
}  // namespace quire
