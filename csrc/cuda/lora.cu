// Rows through the first matrices of their adapters: inner = A x, for the product that adds B inner (gemm_wide.cu).
//
// A tile of up to 16 rows of one adapter goes to clusters of QUIRE_CLUSTER blocks, one for each 16 ranks of each part of
// the matrix; a block has a slice of the columns, its warps take 32 of them in turn. A and x go from memory to the
// operands of mma.m16n8k16 (ranks are its 16, rows its 8) by 16 bytes: a thread has 8 columns side by side, and which of
// the instruction's 16 they are is free, as long as they are the same of both. A is asked for before the previous grid
// has ended. Sums are added in the order of the warps, then of the blocks: a row's bits do not depend on the others.
//
// Results are rounded to elements: a line of each part and row, in which the adapters that the step has stand side by
// side, `most` columns each; a row has zeros in the columns of the others, so that one product adds what each row has.
//
// Macros: QUIRE_BF16, QUIRE_CLUSTER, QUIRE_UNITS (of 32 columns, that a warp asks for at once).
#include "adapters.h"
#include "gemm.h"
#include "shared_memory.h"

struct QuireShrinkArgs {  // ShrinkArgs in quire/kernels/lora/hopper.py
    const void* x;
    const void* a;         // [place][part * most + rank][k]
    const int32_t* ranks;  // of a place and part at [place * ranks_step + part]
    const int32_t* order;
    const int32_t* tiles;
    void* inner;                     // [part][row][width]
    int64_t x_row, a_place, n_rows;  // elements
    int32_t k, most, n_parts, n_tiles, width, ranks_step;
};

namespace quire {

constexpr int CLUSTER = QUIRE_CLUSTER, UNITS = QUIRE_UNITS;
constexpr int WARPS = 8, THREADS = 32 * WARPS, RANKS = 16, ROWS = 16, COLUMNS = 32;
static_assert(RANKS * ROWS == THREADS);

struct Sums {
    float warps[WARPS][RANKS][ROWS], blocks[CLUSTER][THREADS];
};

struct ShrinkBlock {
    const QuireShrinkArgs& a;
    int slice, part, first_rank, place, first, count, index, n_ranks;

    __device__ ShrinkBlock(const QuireShrinkArgs& args) : a(args) {
        const int tile = blockIdx.z, n_blocks = (a.most + RANKS - 1) / RANKS;
        slice = blockIdx.x, part = blockIdx.y / n_blocks, first_rank = blockIdx.y % n_blocks * RANKS;
        place = place_of(a.tiles, a.n_tiles, tile);
        first = load_here(a.tiles + 3 * tile + 1), count = load_here(a.tiles + 3 * tile + 2);
        index = count_places(a.tiles, tile + 1, [](int, int) {}) - 1;
        n_ranks = place < 0 ? 0 : max(0, min(RANKS, load_here(a.ranks + place * a.ranks_step + part) - first_rank));
    }
    __device__ int row_of(int i) const { return load_here(a.order + first + i); }
    __device__ Element* line(int row) const {
        return static_cast<Element*>(a.inner) + (part * a.n_rows + row) * int64_t(a.width);
    }
    // Columns of the other adapters, by one of the blocks of a row.
    __device__ void clear() const {
        const int own = place < 0 ? -1 : index, cells = a.width / 8, own_cells = a.most / 8;
        for (int i = threadIdx.x; i < count * cells; i += THREADS) {
            const int cell = i % cells;
            if (cell / own_cells != own)
                *reinterpret_cast<uint4*>(line(row_of(i / cells)) + cell * 8) = make_uint4(0, 0, 0, 0);
        }
    }
    // Units of this warp: [0, n_units) → of the matrix.
    __device__ int first_unit() const { return a.k / COLUMNS * slice / CLUSTER; }
    __device__ int end_unit() const { return a.k / COLUMNS * (slice + 1) / CLUSTER; }
    __device__ void load_a(uint4 (&upper)[UNITS], uint4 (&lower)[UNITS], int unit) const {
        const int lane = threadIdx.x & 31, rank = lane / 4, end = end_unit();
        const Element* from = static_cast<const Element*>(a.a) + place * a.a_place + lane % 4 * 8 +
                              int64_t(part * a.most + first_rank + rank) * a.k;
#pragma unroll
        for (int i = 0; i < UNITS; i++, unit += WARPS) {
            upper[i] = lower[i] = make_uint4(0, 0, 0, 0);
            if (unit < end && rank < n_ranks) upper[i] = load16(from + unit * COLUMNS);
            if (unit < end && rank + 8 < n_ranks) lower[i] = load16(from + int64_t(8) * a.k + unit * COLUMNS);
        }
    }
    // Of x, for this thread: row `i` of the tile, or nothing.
    __device__ const Element* row_at(int i) const {
        return i < count ? static_cast<const Element*>(a.x) + row_of(i) * a.x_row + (threadIdx.x & 3) * 8 : nullptr;
    }
    __device__ void add(float (&d)[4], const uint4 (&upper)[UNITS], const uint4 (&lower)[UNITS], const Element* from,
                        int unit) const {
        const int end = end_unit();
        uint4 x[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int at = unit + u * WARPS;
            x[u] = make_uint4(0, 0, 0, 0);
            if (at < end && from != nullptr) x[u] = load16(from + at * COLUMNS);
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            multiply_add(d, {upper[u].x, lower[u].x, upper[u].y, lower[u].y}, x[u].x, x[u].y);
            multiply_add(d, {upper[u].z, lower[u].z, upper[u].w, lower[u].w}, x[u].z, x[u].w);
        }
    }
    __device__ void run(Sums& sums) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, end = end_unit();
        int unit = first_unit() + warp;
        uint4 upper[UNITS], lower[UNITS];
        const Element* const rows[2] = {row_at(lane / 4), row_at(8 + lane / 4)};
        load_a(upper, lower, unit);
        wait_for_previous_grid();
        if (slice == CLUSTER - 1 && first_rank == 0) clear();
        if (place < 0) return;  // all blocks of the cluster
        float d[2][4] = {};
        for (; unit < end; unit += UNITS * WARPS) {
            add(d[0], upper, lower, rows[0], unit);
            if (count > 8) add(d[1], upper, lower, rows[1], unit);
            load_a(upper, lower, unit + UNITS * WARPS);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums.warps[warp][lane / 4 + i / 2 * 8][half * 8 + lane % 4 * 2 + i % 2] = d[half][i];
        }
        __syncthreads();
        const int rank = threadIdx.x % RANKS, row = threadIdx.x / RANKS;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums.warps[w][rank][row];
        sum = gathered(sums, sum);
        if (slice == 0 && row < count && first_rank + rank < a.most)
            line(row_of(row))[index * a.most + first_rank + rank] = Element(sum);
    }
    // In the first block of the cluster, of the sums of all.
    __device__ float gathered(Sums& sums, float sum) const {
#if QUIRE_CLUSTER > 1
        cluster_wait();  // all of them have begun
        const uint32_t there = shared_address(&sums.blocks[slice][threadIdx.x]);
        store_there(address_in(there, 0), sum);
        cluster_arrive();
        cluster_wait();
        if (slice > 0) return 0.0f;
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CLUSTER; i++) sum += sums.blocks[i][threadIdx.x];
#endif
        return sum;
    }
};

__global__ void __launch_bounds__(THREADS) shrink(const __grid_constant__ QuireShrinkArgs args) {
    __shared__ Sums sums;
#if QUIRE_CLUSTER > 1
    cluster_arrive();
#endif
    let_next_grid_start();
    ShrinkBlock(args).run(sums);
}

int launch(const QuireShrinkArgs& a, cudaStream_t stream) {
    // A multiprocessor is divided into shared memory and L1 anew only when it is empty: as the product behind this wants it.
    const cudaError_t error =
        raise_attribute<shrink, cudaFuncAttributePreferredSharedMemoryCarveout>(cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = CLUSTER;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER, a.n_parts * ((a.most + RANKS - 1) / RANKS), a.n_tiles);
    config.blockDim = dim3(THREADS);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = CLUSTER > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, shrink, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_shrink(const QuireShrinkArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
