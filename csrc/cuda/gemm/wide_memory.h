// What gemm_wide.cu asks of memory: boxes of results on their way out, numbers that blocks hand over.
#pragma once
#include "gemm.h"

namespace quire {

__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Adds in memory: rounded to nearest, and each element is reached once.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t from, int c0, int c1) {
#if QUIRE_RESIDUAL
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1)
                 : "memory");
#else
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1)
                 : "memory");
#endif
    stores_commit();
}
template <int N> __device__ __forceinline__ void stores_have_read() {  // until at most N stores still read
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
}
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

}  // namespace quire
