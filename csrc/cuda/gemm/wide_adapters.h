// Adapters in a product of many rows: chunks of columns behind those of w. Their rows are those of the second matrices B
// of 64 / QUIRE_RANK adapters, their tokens what the first made of x (lora.cu), with zeros where a token has another
// adapter. So a token's sum gets what its own adapter adds and zeros, and one without keeps its bits.
//
// Registers and shared memory are left for a block of lora.cu, so that w is on its way while that runs: with adapters a
// thread gets as many registers as one of 512 would, and the ring is shorter.
//
// A chunk of several parts (q, k, v) is of that of the tile's rows; gate and up, which a tile has both, get one each.
#pragma once
#include "adapters.h"
#include "wide_sent.h"

#ifndef QUIRE_RANK
#define QUIRE_RANK 0
#endif

struct QuireWideAdapters {  // AdaptedArgs in quire/kernels/lora/hopper.py
    const void* b;          // [place][n][QUIRE_RANK]
    const void* inner;      // [part][m][width], as lora.cu writes it
    const int32_t* tiles;   // of the step's rows
    int64_t b_place;        // elements
    int32_t n_places, n_tiles, n_parts, width;
    int32_t part_ends[4];   // rows of w; multiples of a tile's, but with SiLU
};

namespace quire {

struct Maps {
    CUtensorMap w, x, y;
#if QUIRE_NIBBLES
    CUtensorMap scales;
#endif
#if QUIRE_RANK
    CUtensorMap b, inner;
#endif
#if QUIRE_SENT_TO
    CUtensorMap sent[QUIRE_SENT_TO];
#endif
};

#if QUIRE_RANK
constexpr int TILE_PLACES = CHUNK / QUIRE_RANK;            // adapters of a chunk
constexpr int B_ROW = QUIRE_RANK * 2, B_BYTES = 128 * B_ROW;  // of one of them in a stage
constexpr int MAX_PLACES = 64, PLACES_BYTES = MAX_PLACES * 4, BESIDE_BYTES = 17 << 10;
static_assert((QUIRE_RANK == 16 || QUIRE_RANK == 32 || QUIRE_RANK == 64) && QUIRE_TOKENS == 64 && !IN_BYTES);

struct AdapterUnits {
    const QuireWideAdapters& a;
    const int* places;  // in shared memory
    int n_places, n_chunks;

    template <class Args> __device__ AdapterUnits(const Args& args, int* listed) : a(args.adapters), places(listed) {
        n_places = count_places(a.tiles, a.n_tiles, [&](int i, int place) {
            if (threadIdx.x < 32 && i < MAX_PLACES) listed[i] = place;
        });
        n_chunks = (n_places + TILE_PLACES - 1) / TILE_PLACES;
    }
    __device__ int n_units() const { return n_chunks * (1 + QUIRE_SILU); }
    // row: of y. What a last chunk has too many is B of one again, times zeros.
    __device__ void load_b(const Maps& maps, uint32_t to, uint32_t barrier, int row, int unit) const {
        const int first = unit / (1 + QUIRE_SILU) * TILE_PLACES;
#pragma unroll
        for (int i = 0; i < TILE_PLACES; i++) {
            const int place = places[min(first + i, n_places - 1)];
            if (QUIRE_SILU) {
                load_box(to + i * B_BYTES, &maps.b, barrier, L2_EVICT_NORMAL, 0, 0, 0, row / 8, place);
            } else {
                load_box(to + i * B_BYTES, &maps.b, barrier, L2_EVICT_NORMAL, 0, row, place);
            }
        }
    }
    __device__ void load_inner(const Maps& maps, uint32_t to, uint32_t barrier, int row, int token, int unit) const {
        int part = 0;
        if (QUIRE_SILU) {
            part = unit % 2;
        } else {
            while (part + 1 < a.n_parts && row >= a.part_ends[part]) part++;
        }
        load_box(to, &maps.inner, barrier, L2_EVICT_LAST, unit / (1 + QUIRE_SILU) * CHUNK, token, part);
    }
    // d += one chunk, of 64 rows: the `group`-th half of those of a stage.
    static __device__ __forceinline__ void multiply(float (&d)[QUIRE_TOKENS / 2], uint32_t b, int group, uint32_t inner) {
        const Operand right = rows_operand(inner);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = i * 16 % QUIRE_RANK;
            const Operand left = short_rows_operand<B_ROW>(b + i * 16 / QUIRE_RANK * B_BYTES + group * (B_BYTES / 2));
            Product<QUIRE_TOKENS>::rows(d, left.further(column * 2), right.further(32 * i), 1);
        }
    }
};

// Of w [n, k] rows as `encode_weights` takes them, but of each place.
template <class Args> cudaError_t encode_adapters(Maps* maps, const Args& args) {
    const QuireWideAdapters& a = args.adapters;
    constexpr CUtensorMapSwizzle SWIZZLE = QUIRE_RANK == 16   ? CU_TENSOR_MAP_SWIZZLE_32B
                                           : QUIRE_RANK == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                              : CU_TENSOR_MAP_SWIZZLE_128B;
    const uint64_t n = args.n, n_places = a.n_places, place = a.b_place * 2;
    const uint64_t sizes[] = {QUIRE_RANK, n, n_places}, strides[] = {B_ROW, place};
    const uint64_t pair_sizes[] = {QUIRE_RANK, 8, 2, n / 16, n_places}, pair_strides[] = {B_ROW, n / 2 * B_ROW, 8 * B_ROW, place};
    const uint32_t box[] = {QUIRE_RANK, 128, 1}, pair_box[] = {QUIRE_RANK, 8, 2, 8, 1};
    const cudaError_t error = QUIRE_SILU ? encode_map(&maps->b, a.b, 5, pair_sizes, pair_strides, pair_box, L2_BY_128, SWIZZLE)
                                         : encode_map(&maps->b, a.b, 3, sizes, strides, box, L2_BY_128, SWIZZLE);
    if (error != cudaSuccess) return error;
    const uint64_t width = a.width, m = args.m, n_parts = a.n_parts;
    const uint64_t inner_sizes[] = {width, m, n_parts}, inner_strides[] = {width * 2, m * width * 2};
    const uint32_t inner_box[] = {CHUNK, QUIRE_TOKENS, 1};
    return encode_map(&maps->inner, a.inner, 3, inner_sizes, inner_strides, inner_box, L2_BY_128, SWIZZLED);
}
#else
constexpr int PLACES_BYTES = 0, BESIDE_BYTES = 0;

struct AdapterUnits {  // none
    template <class Args> __device__ AdapterUnits(const Args&, int*) {}
    __device__ int n_units() const { return 0; }
    __device__ void load_b(const Maps&, uint32_t, uint32_t, int, int) const {}
    __device__ void load_inner(const Maps&, uint32_t, uint32_t, int, int, int) const {}
};
template <class Args> cudaError_t encode_adapters(Maps*, const Args&) { return cudaSuccess; }
#endif

}  // namespace quire
