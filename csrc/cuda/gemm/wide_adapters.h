// Adapters in a product of many rows: chunks of columns behind those of w. Their rows are those of the second matrices B
// of 64 / QUIRE_RANK adapters, their tokens inner = A x, what the first make of x, with zeros where a token has another
// adapter. So a token's sum gets what its own adapter adds and zeros, and one without keeps its bits.
//
// The three warps beside the one that loads make inner meanwhile, those of all blocks a column of it each in turn; a block
// asks for its chunks when all have: the blocks must be on the GPU together. Such chunks come last, so nobody waits long.
// Two launches of one build must not run at the same time: they count in the same place.
//
// A chunk of several parts (q, k, v) is of that of the tile's rows; gate and up, which a tile has both, get one each.
#pragma once
#include "adapters.h"
#include "gemm.h"
#include "wide_memory.h"

#ifndef QUIRE_RANK
#define QUIRE_RANK 0
#endif

struct QuireWideAdapters {  // AdaptedArgs in quire/kernels/lora/hopper.py
    const void* a;             // [place][part * QUIRE_RANK + rank][k]
    const void* b;             // [place][n][QUIRE_RANK]
    void* inner;               // [part][m][width], elements; the step's adapters side by side, QUIRE_RANK columns each
    const int32_t* ranks;      // of a place and part at [place * ranks_step + part]
    const int32_t* order;      // of the step's rows
    const int32_t* tiles;
    int64_t a_place, b_place;  // elements
    int32_t n_places, n_tiles, n_parts, width, ranks_step;
    int32_t part_ends[4];      // rows of w; multiples of a tile's, but with SiLU
};

namespace quire {

struct Maps {
    CUtensorMap w, x, y;
#if QUIRE_RANK
    CUtensorMap b, inner;
#endif
};

#if QUIRE_RANK
constexpr int TILE_PLACES = CHUNK / QUIRE_RANK;            // adapters of a chunk
constexpr int B_ROW = QUIRE_RANK * 2, B_BYTES = 128 * B_ROW;  // of one of them in a stage
constexpr int MAX_PLACES = 64, MAX_BLOCKS = 1024, SHRINKERS = 3, SHRINKERS_BARRIER = 4;
constexpr int SHRINK_ROWS = 4, SHRINK_CELLS = 2;  // of x, and 16 bytes of each, that a lane asks for at once
static_assert((QUIRE_RANK == 16 || QUIRE_RANK == 32 || QUIRE_RANK == 64) && QUIRE_TOKENS == 64 && !IN_BYTES);

// How often blocks have made their columns, for each size of a grid: as often as it has blocks in a launch, so never reset.
__device__ uint32_t n_shrunk[MAX_BLOCKS];

struct AdaptersShared {
    uint64_t shrunk;  // barrier: this block has counted its columns,
    uint32_t end;     // and all have at this number
    int places[MAX_PLACES], first_tiles[MAX_PLACES];
};
constexpr int ADAPTERS_BYTES = sizeof(AdaptersShared);

struct AdapterUnits {
    const QuireWideAdapters& a;
    AdaptersShared& shared;
    int n_places, n_chunks;
    mutable bool has_inner = false;

    template <class Args> __device__ AdapterUnits(const Args& args, char* at)
        : a(args.adapters), shared(*reinterpret_cast<AdaptersShared*>(at)) {
        n_places = count_places(a.tiles, a.n_tiles, [&](int i, int place, int tile) {
            if (threadIdx.x < 32 && i < MAX_PLACES) shared.places[i] = place, shared.first_tiles[i] = tile;
        });
        n_chunks = (n_places + TILE_PLACES - 1) / TILE_PLACES;
    }
    __device__ void init() const { barrier_init(shared_address(&shared.shrunk), 1); }
    __device__ int n_units() const { return n_chunks * (1 + QUIRE_SILU); }
    // row: of y. What a last chunk has too many is B of one again, times zeros.
    __device__ void load_b(const Maps& maps, uint32_t to, uint32_t barrier, int row, int unit) const {
        const int first = unit / (1 + QUIRE_SILU) * TILE_PLACES;
#pragma unroll
        for (int i = 0; i < TILE_PLACES; i++) {
            const int place = shared.places[min(first + i, n_places - 1)];
            if (QUIRE_SILU) {
                load_box(to + i * B_BYTES, &maps.b, barrier, L2_EVICT_NORMAL, 0, 0, 0, row / 8, place);
            } else {
                load_box(to + i * B_BYTES, &maps.b, barrier, L2_EVICT_NORMAL, 0, row, place);
            }
        }
    }
    __device__ void load_inner(const Maps& maps, uint32_t to, uint32_t barrier, int row, int token, int unit) const {
        if (!has_inner) await_inner();
        int part = 0;
        if (QUIRE_SILU) {
            part = unit % 2;
        } else {
            while (part + 1 < a.n_parts && row >= a.part_ends[part]) part++;
        }
        load_box(to, &maps.inner, barrier, L2_EVICT_LAST, unit / (1 + QUIRE_SILU) * CHUNK, token, part);
    }
    __device__ void await_inner() const {
        await(shared_address(&shared.shrunk), 0);
        const long long start = clock64();
        while (int(load_acquire(n_shrunk + gridDim.x) - shared.end) < 0) {
            if (clock64() - start > 4000000000ll) __trap();
        }
        all_async_fence();
        has_inner = true;
    }

    // ---- inner, by the warps beside the one that loads ----

    template <class Args> __device__ void shrink(const Args& args) const {
        const int warp = threadIdx.x % 128 / 32 - 1, n = a.n_parts * a.width, step = SHRINKERS * gridDim.x;
        const int first = warp * gridDim.x + blockIdx.x;
        for (int i = first; i < n; i += step) ask_for_line(args.k, i);
        wait_for_previous_grid();
        for (int i = first; i < n; i += step) make_column(args, i);
        all_async_fence();
        __threadfence();
        named_sync(SHRINKERS_BARRIER, 32 * SHRINKERS);
        if (warp > 0 || (threadIdx.x & 31) > 0) return;
        const uint32_t before = atomicAdd(n_shrunk + gridDim.x, 1);
        shared.end = before - before % gridDim.x + gridDim.x;
        barrier_arrive(shared_address(&shared.shrunk));
    }
    // Of A, for a column of inner; nothing where that is zeros.
    __device__ const Element* line_of(int k, int column) const {
        const int part = column / a.width, index = column % a.width / QUIRE_RANK, rank = column % QUIRE_RANK;
        if (index >= n_places) return nullptr;
        const int place = shared.places[index];
        if (rank >= load_here(a.ranks + place * a.ranks_step + part)) return nullptr;
        return static_cast<const Element*>(a.a) + place * a.a_place + int64_t(part * QUIRE_RANK + rank) * k;
    }
    __device__ void ask_for_line(int k, int column) const {
        const Element* line = line_of(k, column);
        if (line == nullptr) return;
        for (int i = (threadIdx.x & 31) * 64; i < k; i += 32 * 64) ask_for(line + i);
    }
    template <class Args> __device__ void make_column(const Args& args, int column) const {
        const int part = column / a.width, index = column % a.width / QUIRE_RANK;
        Element* const to = static_cast<Element*>(a.inner) + int64_t(part) * args.m * a.width + column % a.width;
        for (int row = threadIdx.x & 31; row < args.m; row += 32) to[row * a.width] = Element(0.0f);
        __syncwarp();
        const Element* line = line_of(args.k, column);
        if (line == nullptr) return;
        const int place = shared.places[index];
        for (int tile = shared.first_tiles[index]; place_of(a.tiles, a.n_tiles, tile) == place; tile++) {
            const int first = load_here(a.tiles + 3 * tile + 1), count = load_here(a.tiles + 3 * tile + 2);
            for (int i = 0; i < count; i += SHRINK_ROWS)
                make_rows(args, line, a.order + first + i, min(SHRINK_ROWS, count - i), to);
        }
    }
    template <class Args> __device__ void make_rows(const Args& args, const Element* line, const int32_t* order, int n,
                                                    Element* to) const {
        const int lane = threadIdx.x & 31, n_cells = args.k / 8;
        const Element* x[SHRINK_ROWS];
        float sums[SHRINK_ROWS] = {};
#pragma unroll
        for (int r = 0; r < SHRINK_ROWS; r++)
            x[r] = static_cast<const Element*>(args.x) + load_here(order + min(r, n - 1)) * args.x_row;
        for (int cell = lane; cell < n_cells; cell += 32 * SHRINK_CELLS) {
            uint4 left[SHRINK_CELLS], right[SHRINK_CELLS][SHRINK_ROWS];
#pragma unroll
            for (int i = 0; i < SHRINK_CELLS; i++) {
                const bool is_there = cell + i * 32 < n_cells;
                const int at = is_there ? (cell + i * 32) * 8 : 0;
                left[i] = is_there ? load16(line + at) : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int r = 0; r < SHRINK_ROWS; r++) right[i][r] = load16(x[r] + at);
            }
#pragma unroll
            for (int i = 0; i < SHRINK_CELLS; i++) {
#pragma unroll
                for (int r = 0; r < SHRINK_ROWS; r++) add_products(sums[r], left[i], right[i][r]);
            }
        }
#pragma unroll
        for (int r = 0; r < SHRINK_ROWS; r++) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], step);
            if (lane == r && r < n) to[load_here(order + r) * a.width] = Element(sums[r]);
        }
    }
    static __device__ __forceinline__ void add_products(float& sum, uint4 x, uint4 y) {
        sum = fmaf(high(x.x), high(y.x), fmaf(low(x.x), low(y.x), sum));
        sum = fmaf(high(x.y), high(y.y), fmaf(low(x.y), low(y.y), sum));
        sum = fmaf(high(x.z), high(y.z), fmaf(low(x.z), low(y.z), sum));
        sum = fmaf(high(x.w), high(y.w), fmaf(low(x.w), low(y.w), sum));
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
constexpr int ADAPTERS_BYTES = 0;

struct AdapterUnits {  // none
    template <class Args> __device__ AdapterUnits(const Args&, char*) {}
    __device__ void init() const {}
    template <class Args> __device__ void shrink(const Args&) const {}
    __device__ int n_units() const { return 0; }
    __device__ void load_b(const Maps&, uint32_t, uint32_t, int, int) const {}
    __device__ void load_inner(const Maps&, uint32_t, uint32_t, int, int, int) const {}
};
template <class Args> cudaError_t encode_adapters(Maps*, const Args&) { return cudaSuccess; }
#endif

}  // namespace quire
