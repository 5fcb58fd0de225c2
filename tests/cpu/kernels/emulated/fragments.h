// Stands in for the part of csrc/cuda/hopper.h that wgmma.h beside it has not: fragments of one warp and the matrix
// instruction on them, conversions of e4m3, and what else decode.cu needs.
#pragma once
#include <numeric>
#include "wgmma.h"

inline uint32_t __byte_perm(uint32_t x, uint32_t, uint32_t order) {
    uint32_t y = 0;
    for (int i = 0; i < 4; ++i) y |= (x >> 8 * (order >> 4 * i & 3) & 0xff) << 8 * i;
    return y;
}
inline int __reduce_min_sync(unsigned, int x) {
    return emulated::exchange(x, [](const uint32_t* words) { return *std::min_element((const int*)words, (const int*)words + 32); });
}
inline int __reduce_max_sync(unsigned, int x) {
    return emulated::exchange(x, [](const uint32_t* words) { return *std::max_element((const int*)words, (const int*)words + 32); });
}
inline int __reduce_add_sync(unsigned, int x) {
    return emulated::exchange(x, [](const uint32_t* words) { return std::accumulate(words, words + 32, 0u); });
}
using std::log2f;

namespace quire {
inline void barrier_wait(uint32_t barrier, uint32_t parity) { await(barrier, parity); }
inline void barrier_arrive_after_copies(uint32_t barrier) { barrier_arrive(barrier); }
inline uint2 load_8_bytes(uint32_t from) {
    uint2 x;
    if (from % 8) std::abort();
    std::memcpy(&x, emulated::memory + from, 8);
    return x;
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    emulated::exchange(address, [&](const uint32_t* rows) {
        for (int i = 0; i < 4; ++i) {
            const uint32_t row = rows[i * 8 + threadIdx.x % 32 / 4];
            if (row % 16) std::abort();
            std::memcpy(&r[i], emulated::memory + row + threadIdx.x % 4 * 4, 4);
        }
        return 0;
    });
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    emulated::exchange(address, [&](const uint32_t* rows) {
        for (int i = 0; i < 8; ++i) {
            const uint32_t row = rows[i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2];
            if (row % 16) std::abort();
            std::memcpy((char*)&r[i / 2] + i % 2 * 2, emulated::memory + row + threadIdx.x % 32 / 4 * 2, 2);
        }
        return 0;
    });
}
inline uint32_t transpose_matrix(uint32_t x) {  // lane: row lane / 4, columns 2 (lane % 4) and the next
    return emulated::exchange(x, [](const uint32_t* words) {
        uint32_t y = 0;
        for (int i = 0; i < 2; ++i) {
            const int row = threadIdx.x % 4 * 2 + i, column = threadIdx.x % 32 / 4;
            y |= (words[row * 4 + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * i;
        }
        return y;
    });
}

template <bool HALVES>
void multiply_add_any(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t* mine = emulated::operands[emulated::thread()];
    std::copy(a, a + 4, mine), mine[4] = b0, mine[5] = b1;
    emulated::exchange(0, [&](const uint32_t*) {
        const auto* lanes = emulated::operands + emulated::thread() / 32 * 32;
        for (int e = 0; e < 4; ++e) {
            const int row = threadIdx.x % 32 / 4 + e / 2 * 8, column = threadIdx.x % 4 * 2 + e % 2;
            for (int k = 0; k < 16; ++k) {
                const uint32_t of_a = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
                const uint32_t of_b = lanes[column * 4 + k % 8 / 2][4 + k / 8];
                d[e] += one_of<HALVES>(of_a, k % 2) * one_of<HALVES>(of_b, k % 2);
            }
        }
        return 0;
    });
}
inline void multiply_add_halves(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add_any<true>(d, a, b0, b1);
}
inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add_any<!QUIRE_BF16>(d, a, b0, b1);
}

inline uint32_t half_of_code(uint32_t code) {
    return same_bits<uint16_t>(static_cast<_Float16>(e4m3(code)));
}
inline uint32_t halves_of_low(uint32_t x) { return half_of_code(x & 0xff) | half_of_code(x >> 8 & 0xff) << 16; }
inline uint32_t halves_of_high(uint32_t x) { return halves_of_low(x >> 16); }
inline uint32_t pack_halves(float low, float high) {
    const auto half = [](float x) { return same_bits<uint16_t>(static_cast<_Float16>(std::isnan(x) ? x : std::clamp(x, -65504.f, 65504.f))); };
    return half(low) | uint32_t(half(high)) << 16;
}
}  // namespace quire
