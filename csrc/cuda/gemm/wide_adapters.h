// Adapters in a product of many rows: chunks of columns behind those of w. Their rows are those of the second matrices B
// of 64 / QUIRE_RANK adapters, their tokens inner = A x (wide_shrink.h), with zeros where a token has another adapter. So
// a token's sum gets what its own adapter adds and zeros, and one without keeps its bits.
//
// A block adds them to the sums of the tokens that it finishes: behind the exchange where K is split, whose way hides theirs,
// else behind three quarters of w. So no bit depends on where an adapter is.
// A chunk of several parts (q, k, v) is of that of the tile's rows; gate and up, which a tile has both, get one each.
#pragma once
#include "gemm.h"
#include "wide_memory.h"

#ifndef QUIRE_RANK
#define QUIRE_RANK 0
#endif
#if QUIRE_RANK
#include "wide_shrink.h"
#endif

struct QuireWideAdapters {  // AdaptedArgs in quire/kernels/gemm/hopper_product.py
    const void* a;             // [place][part * QUIRE_RANK + rank][k]
    const void* b;             // [place][n][QUIRE_RANK]
    void* inner;               // [part][m][width], elements; the step's adapters side by side, QUIRE_RANK columns each
    const int32_t* ranks;      // of a place and part at [place * ranks_step + part]
    const int32_t* order;      // of the step's rows
    const int32_t* tiles;
    int64_t a_place, b_place;  // elements
    int32_t n_tiles, n_parts, width, ranks_step;
    int32_t part_ends[4];      // rows of w; multiples of a tile's, but with SiLU
};

namespace quire {

struct Maps {
    CUtensorMap w, x, y;
#if QUIRE_RANK
    CUtensorMap inner;
#endif
};

#if QUIRE_RANK
constexpr int TILE_PLACES = CHUNK / QUIRE_RANK;            // adapters of a chunk
constexpr int B_ROW = QUIRE_RANK * 2, B_BYTES = 128 * B_ROW;  // of one of them in a stage
constexpr int ADAPTERS_BYTES = sizeof(ShrinkShared);
static_assert((QUIRE_RANK == 16 || QUIRE_RANK == 32 || QUIRE_RANK == 64) && QUIRE_TOKENS == 64 && !IN_BYTES);

struct AdapterUnits {
    const QuireWideAdapters& a;
    ShrinkShared& shared;
    int n_places = 0, n_chunks = 0;
    bool has_inner = false;

    template <class Args> __device__ AdapterUnits(const Args& args, char* at)
        : a(args.adapters), shared(*reinterpret_cast<ShrinkShared*>(at)) {}
    __device__ void init() const { init_shrink(shared); }
    template <class Args> __device__ void shrink(const Args& args) const { Shrinker<Args>(args, shared).run(); }
    __device__ void count() {
        await(shared_address(&shared.listed), 0);
        n_places = shared.n_places, n_chunks = (n_places + TILE_PLACES - 1) / TILE_PLACES;
    }
    __device__ int n_units() const { return n_chunks * (1 + QUIRE_SILU); }
    // With SiLU a tile's B is gate's rows, then up's. Both come with gate's input, and up's comes alone. What a last chunk
    // has too many is B of one again, times zeros. row: of y; n: rows of w; n_beside: bytes that the barrier waits for, too.
    __device__ void load_b(uint32_t to, uint32_t barrier, int n, int row, int unit, uint32_t n_beside) const {
        if (QUIRE_SILU && unit % 2) return barrier_expect(barrier, n_beside);
        const int first = unit / (1 + QUIRE_SILU) * TILE_PLACES;
        const uint32_t n_bytes = (QUIRE_SILU ? min(64, n / 2 - row) : min(128, n - row)) * B_ROW;
        barrier_expect(barrier, TILE_PLACES * (1 + QUIRE_SILU) * n_bytes + n_beside);
#pragma unroll
        for (int i = 0; i < TILE_PLACES; i++) {
            const int place = shared.places[min(first + i, n_places - 1)];
            const Element* from = static_cast<const Element*>(a.b) + place * a.b_place + int64_t(row) * QUIRE_RANK;
            load_bytes(to + i * B_BYTES, from, n_bytes, barrier);
            if (QUIRE_SILU) load_bytes(to + i * B_BYTES + B_BYTES / 2, from + int64_t(n / 2) * QUIRE_RANK, n_bytes, barrier);
        }
    }
    // The i-th 16 columns of a chunk of B as the left operand of a product, of 64 rows, a warpgroup's half.
    static __device__ void read_b(uint32_t (&rows)[4], uint32_t b, int i) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, is_low = lane / 8 & 1;
        const int row = QUIRE_SILU ? is_low * 64 + warp * 8 + lane % 8 : warp * 16 + is_low * 8 + lane % 8;
        load_matrices(rows, b + i * 16 / QUIRE_RANK * B_BYTES + row * B_ROW + i * 16 % QUIRE_RANK * 2 + lane / 16 * 16);
    }
    __device__ void load_inner(const Maps& maps, uint32_t to, uint32_t barrier, int row, int token, int unit) {
        if (!has_inner) await_inner(shared), has_inner = true;
        int part = 0;
        if (QUIRE_SILU) {
            part = unit % 2;
        } else {
            while (part + 1 < a.n_parts && row >= a.part_ends[part]) part++;
        }
        load_box(to, &maps.inner, barrier, L2_EVICT_LAST, unit / (1 + QUIRE_SILU) * CHUNK, token, part);
    }
    // Adds to the first N sums, those of this block's tokens, the chunks of a tile, which begin at `item`. Gate's rows are
    // the upper ones of a warp and up's the lower: they have inputs of their own, in two stages.
    template <int N, int N_STAGES, class Block>
    __device__ void add(const Block& block, float (&sums)[QUIRE_TOKENS / 2], int item) const {
        float d[N];
#pragma unroll
        for (int i = 0; i < N; i++) d[i] = sums[i];
        for (int chunk = 0; chunk < n_chunks; chunk++) {
            const int b_stage = item % N_STAGES;
            uint32_t left[4][4];
            await(block.full(b_stage), item / N_STAGES & 1);
#pragma unroll
            for (int i = 0; i < 4; i++) read_b(left[i], block.stage(b_stage), i);
#pragma unroll
            for (int part = 0; part <= QUIRE_SILU; part++, item++) {
                if (part > 0) await(block.full(item % N_STAGES), item / N_STAGES & 1);
                const Operand inner = rows_operand(block.stage(item % N_STAGES) + TILE_PLACES * B_BYTES);
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const bool upper = !QUIRE_SILU || part == 0, lower = !QUIRE_SILU || part == 1;
                    const uint32_t own[4] = {upper ? left[i][0] : 0, lower ? left[i][1] : 0, upper ? left[i][2] : 0,
                                             lower ? left[i][3] : 0};
                    Product<2 * N>::rows_of(d, own, inner.further(32 * i), 1);
                }
                products_commit();
            }
            products_wait<0>();
            pin(d);
            block.release(b_stage);
            if (QUIRE_SILU) block.release((b_stage + 1) % N_STAGES);
        }
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = d[i];
    }
};

template <class Args> cudaError_t encode_adapters(Maps* maps, const Args& args) {
    const QuireWideAdapters& a = args.adapters;
    const uint64_t width = a.width, m = args.m, n_parts = a.n_parts;
    const uint64_t inner_sizes[] = {width, m, n_parts}, inner_strides[] = {width * 2, m * width * 2};
    const uint32_t inner_box[] = {CHUNK, QUIRE_TOKENS / QUIRE_SPLIT, 1};
    return encode_map(&maps->inner, a.inner, 3, inner_sizes, inner_strides, inner_box, L2_BY_128, SWIZZLED);
}
#else
constexpr int ADAPTERS_BYTES = 0;

struct AdapterUnits {  // none
    template <class Args> __device__ AdapterUnits(const Args&, char*) {}
    __device__ void init() const {}
    template <class Args> __device__ void shrink(const Args&) const {}
    __device__ void count() {}
    __device__ int n_units() const { return 0; }
    __device__ void load_b(uint32_t, uint32_t, int, int, int, uint32_t) const {}
    __device__ void load_inner(const Maps&, uint32_t, uint32_t, int, int, int) const {}
    template <int N, int N_STAGES, class Block> __device__ void add(const Block&, float (&)[QUIRE_TOKENS / 2], int) const {}
};
template <class Args> cudaError_t encode_adapters(Maps*, const Args&) { return cudaSuccess; }
#endif

}  // namespace quire
