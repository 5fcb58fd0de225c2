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

struct Pair {
    uint64_t low, high;
};

inline void store_pair(void* to, const Pair& x) {
    uint64_t* words = static_cast<uint64_t*>(to);
    if (reinterpret_cast<uintptr_t>(to) % 16) std::abort();
    atomic(words).store(x.low, std::memory_order_relaxed);
    std::this_thread::yield();  // a reader may find half of it
    atomic(words + 1).store(x.high, std::memory_order_relaxed);
}
inline Pair load_pair(const void* from) {
    const uint64_t* words = static_cast<const uint64_t*>(from);
    if (reinterpret_cast<uintptr_t>(from) % 16) std::abort();
    std::this_thread::yield();
    return {atomic(words).load(std::memory_order_relaxed), atomic(words + 1).load(std::memory_order_relaxed)};
}
inline int write_word(uint32_t* word, uint32_t value) {  // by the host
    atomic(word).store(value);
    return 0;
}
inline void store_release(uint32_t* to, uint32_t x) { atomic(to).store(x, std::memory_order_release); }
inline uint32_t load_acquire(const uint32_t* from) {
    std::this_thread::yield();
    return atomic(from).load(std::memory_order_acquire);
}
inline uint32_t load_relaxed(const uint32_t* from) { return atomic(from).load(std::memory_order_relaxed); }
inline void store_relaxed(uint32_t* to, uint32_t x) { atomic(to).store(x, std::memory_order_relaxed); }
inline int4 load_arrived(const int4* from) { return load_here(from); }
inline uint64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void* shared(size_t n_bytes) {
    return mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}
inline cudaError_t take_shared(int64_t n_bytes, void** base, int64_t** words, void* handle) {
    *base = shared(n_bytes), *words = static_cast<int64_t*>(shared(16));
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
