// Host: launches that may start before the previous kernel of the stream has ended (programmatic dependent launch).
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace quire {
namespace {

// A multiprocessor is divided into shared memory and L1 anew only when it is empty. Kernels between those with much shared
// memory have it divided as those do, or the one behind could not start before they have ended.
inline cudaError_t divide_as_others(const void* kernel) {
    static std::vector<std::pair<int, const void*>> divided;  // on which device
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    const std::pair<int, const void*> one(device, kernel);
    if (error != cudaSuccess || std::find(divided.begin(), divided.end(), one) != divided.end()) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error == cudaSuccess) divided.push_back(one);
    return error;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int n_threads, int shared_bytes, void* stream,
                   Arguments... arguments) {
    const cudaError_t error = divide_as_others(reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(n_threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace
}  // namespace quire
