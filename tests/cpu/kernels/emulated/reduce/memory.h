// Stands in for csrc/cuda/reduce/memory.h where there is no GPU: memory of ranks that are processes of one parent.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "../hopper.h"

template <class T> std::atomic_ref<T> atomic(const T* at) { return std::atomic_ref<T>(*const_cast<T*>(at)); }
inline int emulated_late_us = 0;
extern "C" void emulated_late(int us) { emulated_late_us = us; }
inline uint32_t atomicAdd(uint32_t* at, uint32_t x) {  // one thread of a block counts its call before it reads
    if (emulated_late_us) std::this_thread::sleep_for(std::chrono::microseconds(emulated_late_us));
    return atomic(at).fetch_add(x);
}
inline uint32_t atomicExch(uint32_t* at, uint32_t x) { return atomic(at).exchange(x); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

namespace quire {

inline void store_cell(int4* to, const int4& x) {  // a reader may find some of it
    if (reinterpret_cast<uintptr_t>(to) % 16) std::abort();
    atomic(&to->w).store(x.w, std::memory_order_relaxed);
    atomic(&to->x).store(x.x, std::memory_order_relaxed);
    emulated::pass();
    atomic(&to->z).store(x.z, std::memory_order_relaxed);
    atomic(&to->y).store(x.y, std::memory_order_relaxed);
}
inline int4 load_cell(const int4* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16) std::abort();
    emulated::pass();
    const auto word = [](const int* at) { return atomic(at).load(std::memory_order_relaxed); };
    return {word(&from->x), word(&from->y), word(&from->z), word(&from->w)};
}
inline int write_word(uint32_t* word, uint32_t value) {  // by the host
    atomic(word).store(value);
    return 0;
}
// Each word once, as a GPU stores it: what memcpy stores twice would fill a cell again that its reader has emptied.
extern "C" void emulated_send(int32_t* to, const int32_t* from, int64_t n_words) {
    for (int64_t i = 0; i < n_words; ++i) atomic(to + i).store(from[i], std::memory_order_relaxed);
}
inline uint32_t load_relaxed(const uint32_t* from) { return atomic(from).load(std::memory_order_relaxed); }
inline void store_relaxed(uint32_t* to, uint32_t x) { atomic(to).store(x, std::memory_order_relaxed); }
inline uint64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void* shared(size_t n_bytes) {
    return mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}
inline cudaError_t take_shared(int64_t n_bytes, int64_t n_zero, void** base, int64_t** words, void* handle) {
    *base = shared(n_bytes), *words = static_cast<int64_t*>(shared(16));
    std::memset(static_cast<char*>(*base) + n_zero, 0xff, n_bytes - n_zero);
    std::memcpy(handle, base, sizeof *base);
    return cudaSuccess;
}
inline cudaError_t map_shared(const void* handle, void** base) {
    std::memcpy(base, handle, sizeof *base);
    return cudaSuccess;
}
inline void leave_mapped(void*) {}
inline void leave_own(void*, int64_t*) {}

}  // namespace quire
