// Memory that several GPUs see: its loads and stores, and how its owner shares it (CUDA IPC). No multicast.
#pragma once
#include "../hopper.h"

namespace quire {

__device__ __forceinline__ void store_cell(int4* to, const int4& x) {
    asm volatile("st.relaxed.sys.global.v4.s32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}
// From the L2 cache: another GPU may have written it since this multiprocessor last read it.
__device__ __forceinline__ int4 load_cell(const int4* from) {
    int4 x;
    asm volatile("ld.relaxed.sys.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ void store_relaxed(uint32_t* to, uint32_t x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t x;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
    return x;
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Memory of one rank, the first `n_zero` bytes zero and all bits set in the rest, and two words in the host's that the
// GPU writes, zero; handle: 64 bytes for the others.
inline cudaError_t take_shared(int64_t n_bytes, int64_t n_zero, void** base, int64_t** words, void* handle) {
    cudaError_t error = cudaMalloc(base, n_bytes);
    if (error == cudaSuccess) error = cudaMemset(*base, 0, n_zero);
    if (error == cudaSuccess) error = cudaMemset(static_cast<char*>(*base) + n_zero, 0xff, n_bytes - n_zero);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaHostAlloc(words, 2 * sizeof(int64_t), cudaHostAllocMapped);
    if (error == cudaSuccess) (*words)[0] = (*words)[1] = 0;
    if (error == cudaSuccess) error = cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), *base);
    cudaGetLastError();  // what is launched next would raise it
    return error;
}
// The memory of another rank, seen from here.
inline cudaError_t map_shared(const void* handle, void** base) {
    const cudaIpcMemHandle_t copy = *static_cast<const cudaIpcMemHandle_t*>(handle);
    const cudaError_t error = cudaIpcOpenMemHandle(base, copy, cudaIpcMemLazyEnablePeerAccess);
    cudaGetLastError();
    return error;
}
// Whatever else runs on the device: in a stream of its own, by a copy, for which no multiprocessor has to be free.
inline cudaError_t write_word(uint32_t* word, uint32_t value) {
    cudaStream_t stream;
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) {
        error = cudaMemcpyAsync(word, &value, sizeof(value), cudaMemcpyHostToDevice, stream);
        cudaStreamDestroy(stream);  // ends with the copy
    }
    cudaGetLastError();
    return error;
}
inline void leave_mapped(void* base) {
    cudaIpcCloseMemHandle(base);
    cudaGetLastError();
}
inline void leave_own(void* base, int64_t* words) {
    cudaFree(base);
    cudaFreeHost(words);
    cudaGetLastError();
}

}  // namespace quire
