// Blocks of a cluster: how they meet, and how one reaches the shared memory of another.
//
// What a thread releases to its cluster waits until all that it has stored in memory is there, over NVLink too. What is
// sent (`send_there`) counts at the barrier of who reads it, and needs no release.
#pragma once
#include "hopper.h"

namespace quire {

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// Makes nothing visible but barriers that were made before a `barrier_init_fence`.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void store_there(uint32_t address, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
}
__device__ __forceinline__ void store_there(uint32_t address, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void store_there(uint32_t address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void send_there(uint32_t address, float x, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(x),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void arrive_there(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Says nothing of what this thread has stored: a release to the cluster is a fence of the whole GPU's memory.
__device__ __forceinline__ void arrive_there_plainly(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool try_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ void wait_cluster(uint32_t barrier, uint32_t parity) {  // what other blocks have stored, too
    const long long start = clock64();
    while (!try_cluster(barrier, parity)) {
        if (clock64() - start > 4000000000ll) __trap();
    }
}

}  // namespace quire
