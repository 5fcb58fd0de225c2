// Stands in for csrc/cuda/hopper.h and wgmma.h where there is no GPU: shared memory with its swizzle, barriers, tensor
// copies, matrix stores and matrix products, on fibers of the host. Copies and products happen when they are issued.
#pragma once
#include "hopper.h"

#include <map>

struct float4 {
    float x, y, z, w;
};
struct int2 {
    int x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> T __ldg(const T* x) { return *x; }

namespace emulated {
constexpr uint32_t MEMORY_BYTES = 1 << 18;
alignas(1024) static char memories[MOST_CTAS][MEMORY_BYTES];  // of this library, near whatever else is shared in it
struct Memory {  // of this block
    operator char*() const { return memories[cta]; }
};
inline Memory memory;
// Addresses in the cluster's memory are those of a block's own and the number of a block, counted from 1.
inline uint32_t address_in(uint32_t address, int cta) { return address + (cta + 1) * MEMORY_BYTES; }
inline uint32_t in_cluster(uint32_t address) { return address < MEMORY_BYTES ? address_in(address, cta) : address; }
inline Waiting changed;
struct Phase {
    int arrivals = 0, pending = 0, n_bytes = 0;
    uint32_t parity = 0;
    void step() {
        if (pending || n_bytes) return;
        pending = arrivals, parity ^= 1;
        changed.notify_all();
    }
};
inline std::map<uint32_t, Phase> phases;
inline Phase& phase_of(uint32_t barrier) { return phases.at(in_cluster(barrier)); }
inline std::map<std::pair<int, int>, std::unique_ptr<Barrier>> named;
inline uint32_t words[1024];
inline uint32_t operands[1024][6];

// What `read` makes of the words that the lanes of this warp give.
template <class Read> auto exchange(uint32_t given, const Read& read) {
    Barrier& warp = *warps[thread() / 32];
    words[thread()] = given;
    warp.arrive_and_wait();
    const auto found = read(words + thread() / 32 * 32);
    warp.arrive_and_wait();
    return found;
}
inline uint32_t swizzled(uint32_t at, int kind = 0) { return at ^ (at >> 3 & (kind == 0 ? 0x70 : kind == 1 ? 0x30 : kind == 3 ? 0x10 : 0)); }
}  // namespace emulated

inline int __shfl_sync(unsigned, int x, int lane) {
    return emulated::exchange(x, [&](const uint32_t* words) { return int(words[lane]); });
}
inline bool __any_sync(unsigned, bool x) {
    return emulated::exchange(x, [](const uint32_t* words) { return std::any_of(words, words + 32, [](int w) { return w; }); });
}
inline void __syncwarp() { emulated::warps[emulated::thread() / 32]->arrive_and_wait(); }

struct CUtensorMap {
    const char* base;
    uint64_t sizes[5], strides[4];
    uint32_t box[5];
    int item_bytes, swizzle;
};
enum { CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE };
enum { CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B };
using CUtensorMapSwizzle = int;

namespace quire {
constexpr float LN2 = 0.6931471805599453f;
constexpr uint64_t L2_EVICT_FIRST = 1, L2_EVICT_NORMAL = 0, L2_EVICT_LAST = 2;

inline uint32_t shared_address(const void* x) {
    const ptrdiff_t at = static_cast<const char*>(x) - emulated::memory;
    if (at != int32_t(at)) std::abort();  // it is of another library
    return at;
}
inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
inline emulated::Barrier& named_barrier(int barrier, int n_threads) {
    auto& place = emulated::named[{barrier + 16 * emulated::cta, n_threads}];
    if (!place) place = std::make_unique<emulated::Barrier>(n_threads);
    return *place;
}
inline void named_sync(int barrier, int n_threads) { named_barrier(barrier, n_threads).arrive_and_wait(); }
inline void named_arrive(int barrier, int n_threads) { named_barrier(barrier, n_threads).arrive(); }
template <int N> void registers_up() {}
template <int N> void registers_down() {}
inline void async_fence() {}
inline void barrier_init_fence() {}
inline void prefetch_map(const CUtensorMap*) {}

inline void barrier_init(uint32_t barrier, int n) {
    emulated::phases[emulated::in_cluster(barrier)] = {n, n, 0, 0};
}
inline void barrier_arrive(uint32_t barrier) {
    emulated::Phase& phase = emulated::phase_of(barrier);
    --phase.pending, phase.step();
}
inline void barrier_expect(uint32_t barrier, uint32_t n_bytes) {
    emulated::Phase& phase = emulated::phase_of(barrier);
    --phase.pending, phase.n_bytes += n_bytes, phase.step();
}
inline bool barrier_try(uint32_t barrier, uint32_t parity) {
    if (emulated::phase_of(barrier).parity != parity) return true;
    emulated::pass();
    return false;
}
inline void await(uint32_t barrier, uint32_t parity) {
    while (emulated::phase_of(barrier).parity == parity) emulated::changed.wait();
}

inline cudaError_t encode_map(CUtensorMap* map, const void* base, int rank, const uint64_t* sizes, const uint64_t* strides,
                              const uint32_t* box, int = 0, int swizzle = 0, bool bytes = false) {
    map->base = static_cast<const char*>(base), map->item_bytes = bytes ? 1 : 2, map->swizzle = swizzle;
    std::fill(map->sizes, map->sizes + 5, 1), std::fill(map->strides, map->strides + 4, 0), std::fill(map->box, map->box + 5, 1);
    std::copy(sizes, sizes + rank, map->sizes), std::copy(strides, strides + rank - 1, map->strides);
    std::copy(box, box + rank, map->box);
    return 0;
}
inline void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t, int c0, int c1, int c2, int c3,
                     int c4) {
    const int at[5] = {c0, c1, c2, c3, c4}, size = map->item_bytes;
    if (c0 * size % 16) std::abort();  // the copy engine takes no other: CUDA error 715
    const uint32_t* box = map->box;
    const uint32_t n = box[0] * box[1] * box[2] * box[3] * box[4];
    for (uint32_t i = 0; i < n; ++i) {
        uint32_t rest = i;
        uint16_t x = 0;
        const char* from = map->base;
        bool inside = true;
        for (int d = 0; d < 5; ++d) {
            const uint64_t place = at[d] + rest % box[d];
            rest /= box[d], inside &= place < map->sizes[d];
            from += place * (d ? map->strides[d - 1] : size);
        }
        if (inside) std::memcpy(&x, from, size);
        std::memcpy(emulated::memory + emulated::swizzled(to + size * i, map->swizzle), &x, size);
    }
    emulated::Phase& phase = emulated::phase_of(barrier);
    phase.n_bytes -= size * n, phase.step();
}
inline void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, int c0, int c1, int c2, int c3) {
    load_box(to, map, barrier, hint, c0, c1, c2, c3, 0);
}

inline void copy_16_bytes(uint32_t to, const void* from, bool real) {
    if (reinterpret_cast<uintptr_t>(from) % 16 || to % 16) std::abort();
    std::memset(emulated::memory + to, 0, 16);
    if (real) std::memcpy(emulated::memory + to, from, 16);
}
inline void copy_16_bytes_hinted(uint32_t to, const void* from, uint64_t) { copy_16_bytes(to, from, true); }
inline void clear_16_bytes(uint32_t to) { std::memset(emulated::memory + to, 0, 16); }
inline void copy_4_bytes(uint32_t to, const void* from) {
    if (to % 4 || reinterpret_cast<uintptr_t>(from) % 4) std::abort();
    std::memcpy(emulated::memory + to, from, 4);
}
inline void copies_wait() {}
inline uint4 load_16_bytes(uint32_t from) {
    uint4 x;
    std::memcpy(&x, emulated::memory + from, 16);
    return x;
}
inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t given[4] = {a, b, c, d};
    const int lane = threadIdx.x % 32;
    emulated::exchange(address, [&](const uint32_t* addresses) {
        for (int i = 0; i < 4; ++i) {  // elements (row lane / 4, columns 2 (lane % 4) and the next) of matrix i
            const uint32_t to = addresses[i * 8 + lane / 4];
            if (to % 16) std::abort();
            std::memcpy(emulated::memory + to + lane % 4 * 4, &given[i], 4);
        }
        return 0;
    });
}
inline void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t given[4] = {a, b, c, d};
    const int lane = threadIdx.x % 32;
    emulated::exchange(address, [&](const uint32_t* addresses) {
        for (int i = 0; i < 8; ++i) {  // element (row lane / 4, column 2 (lane % 4) + i % 2) of matrix i / 2
            const uint16_t x = given[i / 2] >> 16 * (i % 2);
            const uint32_t to = addresses[i / 2 * 8 + lane % 4 * 2 + i % 2];
            if (to % 16) std::abort();
            std::memcpy(emulated::memory + to + lane / 4 * 2, &x, 2);
        }
        return 0;
    });
}

#ifndef QUIRE_FP8
#define QUIRE_FP8 0
#endif
constexpr int OPERAND_BYTES = QUIRE_FP8 ? 1 : 2, STEP = 32 / OPERAND_BYTES;  // columns of a product

inline float e4m3(uint32_t code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    float x = exponent ? std::ldexp(1.f + fraction / 8.f, exponent - 7) : std::ldexp(fraction / 8.f, -6);
    if ((code & 0x7f) == 0x7f) x = NAN;
    return code & 0x80 ? -x : x;
}
inline float widened(uint32_t at, int swizzle = 0) {
    if (QUIRE_FP8) {
        static const std::vector<float> numbers = [] {
            std::vector<float> made;
            for (int code = 0; code < 256; ++code) made.push_back(e4m3(code));
            return made;
        }();
        return numbers[uint8_t(emulated::memory[emulated::swizzled(at, swizzle)])];
    }
    uint16_t bits;
    std::memcpy(&bits, emulated::memory + emulated::swizzled(at, swizzle), 2);
#if QUIRE_BF16
    return same_bits<float>(uint32_t(bits) << 16);
#else
    return same_bits<_Float16>(bits);
#endif
}
template <bool HALVES> float one_of(uint32_t pair, int i) {
    const uint16_t bits = pair >> 16 * i;
    return HALVES ? float(same_bits<_Float16>(bits)) : same_bits<float>(uint32_t(bits) << 16);
}
struct Operand {
    uint32_t start, outer_bytes, group_bytes;
    bool is_turned;
    int row_bytes = 128, swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    Operand further(uint32_t n_bytes) const {
        Operand found = *this;
        found.start += n_bytes;
        return found;
    }
    float at(int outer, int inner) const {
        if (is_turned)
            return widened(start + outer / 64 * outer_bytes + inner / 8 * group_bytes + inner % 8 * 128 + outer % 64 * 2);
        return widened(start + outer / 8 * group_bytes + outer % 8 * row_bytes + inner * OPERAND_BYTES, swizzle);
    }
};
inline Operand rows_operand(uint32_t address, uint32_t group_bytes = 1024) { return {address, 0, group_bytes, false}; }
template <int ROW_BYTES> Operand short_rows_operand(uint32_t address) {
    const int swizzle = ROW_BYTES == 32   ? CU_TENSOR_MAP_SWIZZLE_32B
                        : ROW_BYTES == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                          : CU_TENSOR_MAP_SWIZZLE_128B;
    return {address, 0, 8 * ROW_BYTES, false, ROW_BYTES, swizzle};
}
inline Operand columns_operand(uint32_t address, uint32_t tile_bytes, uint32_t group_bytes = 1024) {
    return {address, tile_bytes, group_bytes, true};
}
inline void products_begin() {}
inline void products_commit() {}
template <int N> void products_wait() { __syncwarp(); }  // a warp comes to it together
template <int N> void pin(float (&)[N]) {}

template <int N> struct Product {
    static void multiply(float (&d)[N / 2], Operand a, Operand b, int accumulate) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        for (int i = 0; i < N / 2; ++i) {
            const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = accumulate ? d[i] : 0.f;
            for (int k = 0; k < STEP; ++k) sum += a.at(row, k) * b.at(column, k);
            d[i] = sum;
        }
    }
    static void rows_of(float (&d)[N / 2], const uint32_t (&a)[4], Operand b, int accumulate) {
        if (b.is_turned) std::abort();
        multiply_registers(d, a, b, accumulate);
    }
    static void columns(float (&d)[N / 2], const uint32_t* a, Operand b, int accumulate) {
        if (!b.is_turned) std::abort();
        multiply_registers(d, a, b, accumulate);
    }
    static void multiply_registers(float (&d)[N / 2], const uint32_t* a, Operand b, int accumulate) {
        uint32_t* mine = emulated::operands[emulated::thread()];
        std::copy(a, a + 4, mine);
        emulated::exchange(0, [&](const uint32_t*) {
            const int lane = threadIdx.x % 32;
            const auto* lanes = emulated::operands + emulated::thread() / 32 * 32;
            for (int i = 0; i < N / 2; ++i) {
                const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                float sum = accumulate ? d[i] : 0.f;
                for (int k = 0; k < 16; ++k)
                    sum += one_of<!QUIRE_BF16>(lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * b.at(column, k);
                d[i] = sum;
            }
            return 0;
        });
    }
    static void rows(float (&d)[N / 2], Operand a, Operand b, int accumulate) {
        if (a.is_turned || b.is_turned) std::abort();
        multiply(d, a, b, accumulate);
    }
    static void columns_shared(float (&d)[N / 2], Operand a, Operand b, int accumulate) {
        if (a.is_turned || !b.is_turned) std::abort();
        multiply(d, a, b, accumulate);
    }
    static void turned(float (&d)[N / 2], Operand a, Operand b, int accumulate) {
        if (!a.is_turned || b.is_turned) std::abort();
        multiply(d, a, b, accumulate);
    }
};
}  // namespace quire

inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return 0; }
