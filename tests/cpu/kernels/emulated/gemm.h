// Stands in for csrc/cuda/gemm.h and gemm/codes.h where there is no GPU, and for what else moe_few.cu, moe_wide.cu and router.cu
// need of CUDA.
//
// One block runs at a time: kernels whose blocks wait for one another are launched with one, or the last of a cluster
// reads what the others have stored. Shared variables of a kernel are those of all its blocks.
#pragma once
#include "fragments.h"

#include <atomic>

#define __host__
#define __align__(n)
inline int atomicAdd(unsigned long long* to, unsigned long long x) { return std::atomic_ref(*to).fetch_add(x); }
inline void __threadfence() {}
inline long long clock64() { return 0; }
inline void __trap() { std::abort(); }
template <class T> T __ldcg(const T* x) { return *x; }
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline unsigned __ballot_sync(unsigned, bool x) {
    return emulated::exchange(x, [](const uint32_t* words) {
        unsigned found = 0;
        for (int i = 0; i < 32; ++i) found |= unsigned(words[i] != 0) << i;
        return found;
    });
}
inline unsigned __match_any_sync(unsigned, int x) {
    return emulated::exchange(x, [&](const uint32_t* words) {
        unsigned found = 0;
        for (int i = 0; i < 32; ++i) found |= unsigned(int(words[i]) == x) << i;
        return found;
    });
}

namespace quire {
constexpr int CHUNK = QUIRE_FP8 ? 128 : 64, SCALE_BLOCK = 128;
constexpr int L2_BY_128 = CU_TENSOR_MAP_L2_PROMOTION_L2_128B, SWIZZLED = CU_TENSOR_MAP_SWIZZLE_128B;

inline float low(uint32_t pair) { return one_of<!QUIRE_BF16>(pair, 0); }
inline float high(uint32_t pair) { return one_of<!QUIRE_BF16>(pair, 1); }
inline float widen(Element x) { return low(x.bits); }
inline void cluster_arrive() {}
inline void cluster_wait() { __syncthreads(); }
inline uint32_t address_in(uint32_t address, int) { return address; }
inline void store_there(uint32_t address, float x) { std::memcpy(emulated::memory + int32_t(address), &x, 4); }
inline void store_there(uint32_t address, float2 x) { std::memcpy(emulated::memory + int32_t(address), &x, 8); }
inline uint4 read16(uint32_t from) { return load_16_bytes(from); }
inline uint2 read_pair(uint32_t from) { return load_8_bytes(from); }
inline float2 read8(uint32_t from) {
    const uint2 pair = load_8_bytes(from);
    return {__uint_as_float(pair.x), __uint_as_float(pair.y)};
}
inline void write8(uint32_t to, uint2 x) { std::memcpy(emulated::memory + to, &x, 8); }
inline void write4(uint32_t to, float x) { std::memcpy(emulated::memory + to, &x, 4); }
inline float load_float(const float* from) { return *from; }
inline uint32_t read_word(uint32_t from) {
    uint32_t x;
    if (from % 4) std::abort();
    std::memcpy(&x, emulated::memory + from, 4);
    return x;
}
inline float read_float(uint32_t from) { return __uint_as_float(read_word(from)); }
inline uint32_t read_two_bytes(uint32_t from) {
    uint16_t x;
    if (from % 2) std::abort();
    std::memcpy(&x, emulated::memory + from, 2);
    return x;
}
inline void write16(uint32_t to, uint4 x) { std::memcpy(emulated::memory + to, &x, 16); }
inline void load_two_matrices(uint32_t& a, uint32_t& b, uint32_t address) {
    emulated::exchange(address, [&](const uint32_t* rows) {
        std::memcpy(&a, emulated::memory + rows[threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4, 4);
        std::memcpy(&b, emulated::memory + rows[8 + threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4, 4);
        return 0;
    });
}
inline unsigned long long load_acquire(const unsigned long long* from) { emulated::pass(); return std::atomic_ref(*const_cast<unsigned long long*>(from)).load(); }
inline void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int c0, int c1, int c2) {
    load_box(to, map, barrier, hint, c0, c1, c2, 0, 0);
}
inline void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int c0, int c1) {
    load_box(to, map, barrier, hint, c0, c1, 0, 0, 0);
}

inline void store_box(const CUtensorMap* map, uint32_t from, int c0, int c1) {
    if (c0 * 2 % 16) std::abort();
    for (uint32_t i = 0; i < map->box[0] * map->box[1]; ++i) {
        const uint64_t column = c0 + i % map->box[0], row = c1 + i / map->box[0];
        if (column >= map->sizes[0] || row >= map->sizes[1]) continue;
        char* to = const_cast<char*>(map->base) + row * map->strides[0] + column * 2;
        uint16_t bits;
        std::memcpy(&bits, emulated::memory + emulated::swizzled(from + 2 * i, map->swizzle), 2);
#if QUIRE_RESIDUAL
        bits = narrowed(low(bits) + low(*reinterpret_cast<uint16_t*>(to)));
#endif
        std::memcpy(to, &bits, 2);
    }
}
inline void stores_commit() {}
template <int N> void stores_have_read() {}
inline void stores_wait() {}
inline void store_transposed(uint32_t address, uint32_t a, uint32_t b, int n_matrices = 2) {
    const uint32_t given[2] = {a, b};
    const int lane = threadIdx.x % 32;
    emulated::exchange(address, [&](const uint32_t* addresses) {
        for (int i = 0; i < 2 * n_matrices; ++i) {
            const uint16_t x = given[i / 2] >> 16 * (i % 2);
            const uint32_t to = addresses[i / 2 * 8 + lane % 4 * 2 + i % 2];
            if (to % 16) std::abort();
            std::memcpy(emulated::memory + to + lane / 4 * 2, &x, 2);
        }
        return 0;
    });
}
inline void store_transposed(uint32_t address, uint32_t a) { store_transposed(address, a, 0, 1); }

inline uint32_t numbers(uint32_t word, uint32_t point) {
    constexpr float RAISED = QUIRE_BF16 ? 128.f : 1024.f;
    return pack(RAISED + (word & 15) - low(point), RAISED + (word >> 16 & 15) - high(point));
}
inline uint32_t raised_point(float point) { return pack(point + (QUIRE_BF16 ? 128.f : 1024.f), point + (QUIRE_BF16 ? 128.f : 1024.f)); }
inline uint32_t times(uint32_t x, uint32_t y) { return pack(low(x) * low(y), high(x) * high(y)); }
}  // namespace quire
