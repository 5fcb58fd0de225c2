// Host: what a kernel may have of shared memory. Behind what declares the runtime.
#pragma once

namespace quire {
namespace {

// Lets KERNEL have n_bytes; asked of the runtime once for each device, whose own attribute it is.
template <auto KERNEL> cudaError_t allow_shared_memory(int n_bytes) {
    constexpr int MOST_DEVICES = 64;
    static int allowed[MOST_DEVICES] = {};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess || (device < MOST_DEVICES && n_bytes <= allowed[device])) return error;
    error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);
    if (error == cudaSuccess && device < MOST_DEVICES) allowed[device] = n_bytes;
    return error;
}

}  // namespace
}  // namespace quire
