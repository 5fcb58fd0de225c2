// Host: what a kernel may have of shared memory. Behind what declares the runtime.
#pragma once

namespace quire {
namespace {

// Raises ATTRIBUTE of KERNEL to `value`; asked of the runtime once for each device, whose own attribute it is.
template <auto KERNEL, auto ATTRIBUTE> cudaError_t raise_attribute(int value) {
    constexpr int MOST_DEVICES = 64;
    static int raised[MOST_DEVICES] = {};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess || (device < MOST_DEVICES && value <= raised[device])) return error;
    error = cudaFuncSetAttribute(KERNEL, ATTRIBUTE, value);
    if (error == cudaSuccess && device < MOST_DEVICES) raised[device] = value;
    return error;
}

// Lets KERNEL have n_bytes.
template <auto KERNEL> cudaError_t allow_shared_memory(int n_bytes) {
    return raise_attribute<KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize>(n_bytes);
}

}  // namespace
}  // namespace quire
