// Products of few rows with a large matrix: y = f(x w^T), x [m, K] with m <= 64, w [N, K] as nn.Linear stores it.
//
// Reading w once at the speed of memory is all that counts. A tile of rows of w is the 64-row operand of wgmma and the
// tokens are its columns. A cluster of up to 8 blocks shares the tiles: each block multiplies its slice of K, then hands
// its sums to the blocks that own the rows (through distributed shared memory), which add them in the order of the ranks.
// So results do not depend on timing, and nothing is left in global memory between launches.
//
// In a block one warp keeps a ring of shared memory filled with w (TMA); it starts before the previous grid has ended, as
// weights never change. One warpgroup for each 64 rows of a tile multiplies. x is either held for the whole slice
// (QUIRE_RESIDENT: read once, normed there if asked) or travels through the ring beside w.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (8, 16, 32, 64), QUIRE_GROUPS (warpgroups), QUIRE_RESIDENT, QUIRE_NORM (needs
// QUIRE_RESIDENT), QUIRE_RESIDUAL, QUIRE_SILU, QUIRE_BIAS, QUIRE_WIDE (results stored as fp32).
#include "wgmma.h"

struct QuireGemmArgs {  // _Args in quire/kernels/gemm/hopper.py
    const void* x;
    const void* w;
    const void* norm_weight;
    const void* bias;
    const void* residual;
    void* y;
    int64_t x_row, residual_row, y_row;  // elements
    int32_t m, n, k;                     // n: rows of w
    int32_t cluster, n_clusters, n_stages, n_ahead, dependent;
    float eps;
};

namespace quire {

constexpr int TOKENS = QUIRE_TOKENS;
constexpr int GROUPS = QUIRE_GROUPS;
constexpr int ROWS = 64 * GROUPS;                    // of w in a tile
constexpr int HALF = QUIRE_SILU ? ROWS / 2 : ROWS;   // rows of y in a tile; SiLU: gate rows first, then as many up rows
constexpr int WORKERS = 128 * GROUPS;                // threads that multiply
constexpr int THREADS = WORKERS + 32;
constexpr int CHUNK = 64;                            // columns: a row of 128 bytes
constexpr int CHUNKS = GROUPS == 1 ? 2 : 1;          // of a stage
constexpr int W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128;  // of a chunk
constexpr int STAGE_BYTES = CHUNKS * (W_BYTES + (QUIRE_RESIDENT ? 0 : X_BYTES));
constexpr int SUMS_ROW = TOKENS + 2;                 // floats
constexpr int SUMS = ROWS * SUMS_ROW;                // floats of one exchange, whatever the size of the cluster
constexpr int MAX_CLUSTER = 8, MAX_STAGES = 32, UNROLL = 8;
constexpr int WORKERS_BARRIER = 1;

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], sums[2], squares;
};

// Where things lie in shared memory. Bytes from a base that is a multiple of 1,024.
struct Layout {
    int x, sums, norm_weight, parts, squares, barriers, end;
    __host__ __device__ Layout(const QuireGemmArgs& a, int n_passes) {
        const int units = (a.k / CHUNK + CHUNKS - 1) / CHUNKS;
        const int slice = (units + a.cluster - 1) / a.cluster * CHUNKS;  // chunks of the largest slice
        x = a.n_stages * STAGE_BYTES;
        sums = x + (QUIRE_RESIDENT ? slice * X_BYTES : 0);
        norm_weight = sums + (n_passes > 1 ? 2 : 1) * SUMS * 4;
        parts = norm_weight + (QUIRE_NORM ? slice * 128 : 0);
        squares = parts + (QUIRE_NORM ? slice * TOKENS * 4 : 0);
        barriers = squares + (QUIRE_NORM ? MAX_CLUSTER * TOKENS * 4 : 0);
        end = barriers + int(sizeof(Barriers));
    }
};

__host__ __device__ inline int tiles_of(int n) { return ((QUIRE_SILU ? n / 2 : n) + HALF - 1) / HALF; }

// ---- clusters --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void store_there(uint32_t address, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_there(uint32_t address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void arrive_there(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool try_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
__device__ __forceinline__ void wait_cluster(uint32_t barrier, uint32_t parity) {  // what other blocks have stored, too
    const long long start = clock64();
    while (!try_cluster(barrier, parity)) {
        if (clock64() - start > 4000000000ll) __trap();
    }
}

// ---- arithmetic ------------------------------------------------------------------------------------------------------

#if QUIRE_BF16
#define QUIRE_TYPES "k16.f32.bf16.bf16 "
#else
#define QUIRE_TYPES "k16.f32.f16.f16 "
#endif
#define QUIRE_SUM4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

// d += a b^T: 64 rows of w, TOKENS rows of x, 16 columns.
__device__ __forceinline__ void product(float (&d)[TOKENS / 2], Operand a, Operand b) {
#if QUIRE_TOKENS == 8
    asm volatile("wgmma.mma_async.sync.aligned.m64n8" QUIRE_TYPES "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : QUIRE_SUM4(0)
                 : "l"(a.bits()), "l"(b.bits()));
#elif QUIRE_TOKENS == 16
    asm volatile("wgmma.mma_async.sync.aligned.m64n16" QUIRE_TYPES
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
                 : QUIRE_SUM4(0), QUIRE_SUM4(4)
                 : "l"(a.bits()), "l"(b.bits()));
#elif QUIRE_TOKENS == 32
    asm volatile("wgmma.mma_async.sync.aligned.m64n32" QUIRE_TYPES
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
                 : QUIRE_SUM4(0), QUIRE_SUM4(4), QUIRE_SUM4(8), QUIRE_SUM4(12)
                 : "l"(a.bits()), "l"(b.bits()));
#else
    Product<TOKENS>::rows(d, a, b, 1);
#endif
}

__device__ __forceinline__ float widen(Element x) { return float(x); }
__device__ __forceinline__ float rounded(float x) { return float(Element(x)); }
__device__ __forceinline__ float low(uint32_t pair) { return widen(reinterpret_cast<const Element*>(&pair)[0]); }
__device__ __forceinline__ float high(uint32_t pair) { return widen(reinterpret_cast<const Element*>(&pair)[1]); }

__device__ __forceinline__ uint4 load16(const void* from) {  // not moved over the wait for the previous grid
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint4 read16(uint32_t address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ void write16(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ float square_sum(uint32_t pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
__device__ __forceinline__ uint32_t normed(uint32_t pair, float scale, uint32_t weight) {
    return pack(rounded(low(pair) * scale) * low(weight), rounded(high(pair) * scale) * high(weight));
}

__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int c0, int c1) {  // into L2
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1) : "memory");
}

// ---- one block -------------------------------------------------------------------------------------------------------

struct Block {
    const QuireGemmArgs& a;
    char* memory;
    uint32_t base;
    Layout at;
    int rank, cluster, n_passes, first_chunk, n_chunks, n_units;

    __device__ Block(const QuireGemmArgs& args, char* shared)
        : a(args), memory(shared), base(shared_address(shared)), at(args, passes_of(args)) {
        rank = cluster_rank();
        cluster = blockIdx.x / a.cluster;
        n_passes = (tiles_of(a.n) - cluster + a.n_clusters - 1) / a.n_clusters;
        const int all = a.k / CHUNK, units = (all + CHUNKS - 1) / CHUNKS;
        const int first = units * rank / a.cluster, end = units * (rank + 1) / a.cluster;
        first_chunk = first * CHUNKS;
        n_units = end - first;
        n_chunks = min(all, end * CHUNKS) - first_chunk;
    }
    static __host__ __device__ int passes_of(const QuireGemmArgs& a) {
        return (tiles_of(a.n) + a.n_clusters - 1) / a.n_clusters;
    }
    __device__ Barriers* barriers() const { return reinterpret_cast<Barriers*>(memory + at.barriers); }
    __device__ uint32_t full(int stage) const { return shared_address(&barriers()->full[stage]); }
    __device__ uint32_t empty(int stage) const { return shared_address(&barriers()->empty[stage]); }
    __device__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ int chunks_of(int unit) const { return min(CHUNKS, n_chunks - unit * CHUNKS); }
    __device__ int tile(int pass) const { return cluster + pass * a.n_clusters; }

    __device__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < a.n_stages; i++) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), GROUPS * 4);
            }
            for (int i = 0; i < 2; i++) barrier_init(shared_address(&barriers()->sums[i]), a.cluster * GROUPS * 4);
            barrier_init(shared_address(&barriers()->squares), a.cluster);
            barrier_init_fence();
        }
        __syncthreads();
        cluster_arrive();  // other blocks may reach our barriers once they have waited for this
    }

    // ---- the warp that loads ----

    __device__ void load_w(const CUtensorMap* map, int item, int stage_index) const {
        const int unit = item % n_units, row = tile(item / n_units) * HALF;
        for (int c = 0; c < chunks_of(unit); c++) {
            const int column = (first_chunk + unit * CHUNKS + c) * CHUNK;
            const uint32_t to = stage(stage_index) + c * W_BYTES;
            load_box(to, map, full(stage_index), L2_EVICT_FIRST, column, row);
            if (QUIRE_SILU) load_box(to + W_BYTES / 2, map, full(stage_index), L2_EVICT_FIRST, column, a.n / 2 + row);
        }
    }
    __device__ void prefetch_w(const CUtensorMap* map, int item) const {
        const int unit = item % n_units, row = tile(item / n_units) * HALF;
        for (int c = 0; c < chunks_of(unit); c++) {
            const int column = (first_chunk + unit * CHUNKS + c) * CHUNK;
            prefetch_box(map, column, row);
            if (QUIRE_SILU) prefetch_box(map, column, a.n / 2 + row);
        }
    }
    __device__ void load_x(const CUtensorMap* map, int item, int stage_index) const {
        const int unit = item % n_units;
        for (int c = 0; c < chunks_of(unit); c++)
            load_box(stage(stage_index) + CHUNKS * W_BYTES + c * X_BYTES, map, full(stage_index), L2_EVICT_LAST,
                     (first_chunk + unit * CHUNKS + c) * CHUNK, 0);
    }
    __device__ void expect(int item, int stage_index) const {
        const int n_bytes = W_BYTES + (QUIRE_RESIDENT ? 0 : X_BYTES);
        barrier_expect(full(stage_index), chunks_of(item % n_units) * n_bytes);
    }
    __device__ void feed(const CUtensorMap* w_map, const CUtensorMap* x_map) const {
        const int n_items = n_passes * n_units, n_first = min(n_items, a.n_stages);
        for (int i = 0; i < n_first; i++) {
            expect(i, i);
            load_w(w_map, i, i);
        }
        for (int i = n_first; i < min(n_items, n_first + a.n_ahead); i++) prefetch_w(w_map, i);
        if (!QUIRE_RESIDENT) {
            wait_for_previous_grid();
            for (int i = 0; i < n_first; i++) load_x(x_map, i, i);
        }
        for (int i = n_first, at_stage = 0, turn = 0; i < n_items; i++) {
            barrier_wait(empty(at_stage), turn & 1);
            expect(i, at_stage);
            load_w(w_map, i, at_stage);
            if (!QUIRE_RESIDENT) load_x(x_map, i, at_stage);
            if (++at_stage == a.n_stages) at_stage = 0, turn++;
        }
    }

    // ---- x in shared memory ----

    __device__ uint32_t x_cell(int token, int chunk, int cell) const {
        return base + at.x + chunk * X_BYTES + token * 128 + ((cell ^ (token & 7)) << 4);
    }
    __device__ const Element* x_source(int token, int chunk, int cell) const {
        return static_cast<const Element*>(a.x) + token * a.x_row + (first_chunk + chunk) * CHUNK + cell * 8;
    }
    // What does not depend on the previous grid.
    __device__ void prepare_x() const {
        for (int i = threadIdx.x; i < (TOKENS - a.m) * n_chunks * 8; i += WORKERS)
            write16(x_cell(a.m + i / (n_chunks * 8), i / 8 % n_chunks, i % 8), make_uint4(0, 0, 0, 0));
#if QUIRE_NORM
        const Element* weight = static_cast<const Element*>(a.norm_weight) + first_chunk * CHUNK;
        for (int i = threadIdx.x; i < n_chunks * 8; i += WORKERS) {
            write16(base + at.norm_weight + i * 16, load16(weight + i * 8));
        }
#endif
    }
    __device__ void stage_x() const {
        const int per_token = n_chunks * 8, total = a.m * per_token;
        float* parts = reinterpret_cast<float*>(memory + at.parts);
        for (int i = threadIdx.x; i - int(threadIdx.x & 31) < total; i += UNROLL * WORKERS) {
            uint4 cells[UNROLL];
#pragma unroll
            for (int j = 0; j < UNROLL; j++) {
                const int k = i + j * WORKERS;
                if (k < total) cells[j] = load16(x_source(k / per_token, k / 8 % n_chunks, k % 8));
            }
#pragma unroll
            for (int j = 0; j < UNROLL; j++) {
                const int k = i + j * WORKERS;
                if (k - int(threadIdx.x & 31) >= total) break;
                const int token = k / per_token, chunk = k / 8 % n_chunks;
                if (k < total) write16(x_cell(token, chunk, k % 8), cells[j]);
#if QUIRE_NORM
                float sum = k < total ? square_sum(cells[j].x) + square_sum(cells[j].y) + square_sum(cells[j].z) +
                                            square_sum(cells[j].w)
                                      : 0.0f;
                for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
                if (k % 8 == 0 && k < total) parts[token * n_chunks + chunk] = sum;
#endif
            }
        }
    }
    // Every block of the cluster needs the squares of whole rows: sums of slices are handed to all.
    __device__ void norm_x() const {
        const float* parts = reinterpret_cast<const float*>(memory + at.parts);
        const float* squares = reinterpret_cast<const float*>(memory + at.squares);
        const uint32_t barrier = shared_address(&barriers()->squares);
        named_sync(WORKERS_BARRIER, WORKERS);
        if (threadIdx.x < 32) {
            for (int token = threadIdx.x; token < a.m; token += 32) {
                float sum = 0.0f;
                for (int i = 0; i < n_chunks; i++) sum += parts[token * n_chunks + i];
                for (int r = 0; r < a.cluster; r++)
                    store_there(address_in(base + at.squares + (rank * TOKENS + token) * 4, r), sum);
            }
            __syncwarp();
            if (threadIdx.x < a.cluster) arrive_there(address_in(barrier, threadIdx.x));
        }
        wait_cluster(barrier, 0);
        const int per_token = n_chunks * 8;
        for (int k = threadIdx.x; k < a.m * per_token; k += WORKERS) {
            const int token = k / per_token, chunk = k / 8 % n_chunks, cell = k % 8;
            float sum = 0.0f;
            for (int r = 0; r < a.cluster; r++) sum += squares[r * TOKENS + token];
            const float scale = 1.0f / sqrtf(sum / float(a.k) + a.eps);
            const uint4 v = read16(x_cell(token, chunk, cell));
            const uint4 g = read16(base + at.norm_weight + (chunk * 8 + cell) * 16);
            write16(x_cell(token, chunk, cell), make_uint4(normed(v.x, scale, g.x), normed(v.y, scale, g.y),
                                                           normed(v.z, scale, g.z), normed(v.w, scale, g.w)));
        }
    }

    // ---- the warpgroups that multiply ----

    __device__ void multiply(float (&d)[TOKENS / 2], int group, int unit, int stage_index) const {
        const uint32_t w = stage(stage_index) + group * 64 * 128;
        const uint32_t x = QUIRE_RESIDENT ? base + at.x + unit * CHUNKS * X_BYTES : stage(stage_index) + CHUNKS * W_BYTES;
        const int n = chunks_of(unit);
        products_begin();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (c < n) {
                const Operand left = rows_operand(w + c * W_BYTES), right = rows_operand(x + c * X_BYTES);
#pragma unroll
                for (int i = 0; i < 4; i++) product(d, left.further(32 * i), right.further(32 * i));
            }
        }
        products_commit();
        products_wait<0>();
        pin(d);
    }

    // Hands sums to the blocks that own their rows: each owns `own` rows of y in a tile (SiLU: of gate and of up).
    __device__ void hand_over(const float (&d)[TOKENS / 2], int pass) const {
        const int own = HALF / a.cluster, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        const uint32_t sums = base + at.sums + (pass & 1) * SUMS * 4 + rank * (ROWS / a.cluster) * SUMS_ROW * 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = warp * 16 + lane / 4 + 8 * h;
            const int local = row / HALF * own + row % HALF % own;
            const uint32_t there = address_in(sums + (local * SUMS_ROW + lane % 4 * 2) * 4, row % HALF / own);
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
                if (8 * j < a.m) store_there(there + j * 32, d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
            }
        }
        __syncwarp();
        if (lane < a.cluster) arrive_there(address_in(shared_address(&barriers()->sums[pass & 1]), lane));
    }
    __device__ float total(const float* sums, int local, int token) const {
        float sum = 0.0f;
        for (int r = 0; r < a.cluster; r++) sum += sums[(r * (ROWS / a.cluster) + local) * SUMS_ROW + token];
        return sum;
    }
    __device__ float extra(int row, int token) const {  // bias or residual at an element of y
#if QUIRE_RESIDUAL
        return widen(static_cast<const Element*>(a.residual)[token * a.residual_row + row]);
#else
        return 0.0f;
#endif
    }
    __device__ float product_at(const float* sums, int local, int token, int w_row) const {  // rounded as torch does
        float sum = total(sums, local, token);
#if QUIRE_BIAS
        sum += widen(static_cast<const Element*>(a.bias)[w_row]);
#endif
        return rounded(sum);
    }
    __device__ void finish(int pass) const {
        const int own = HALF / a.cluster, first_row = tile(pass) * HALF + rank * own;
        const int n_rows = min(own, (QUIRE_SILU ? a.n / 2 : a.n) - first_row);
        const float* sums = reinterpret_cast<const float*>(memory + at.sums) + (pass & 1) * SUMS;
        int i = threadIdx.x;  // rows change fastest
        float added = i < own * a.m && i % own < n_rows ? extra(first_row + i % own, i / own) : 0.0f;
        wait_cluster(shared_address(&barriers()->sums[pass & 1]), pass / 2 & 1);
        for (; i < own * a.m; i += WORKERS) {
            const int local = i % own, token = i / own, row = first_row + local;
            if (local >= n_rows) continue;
            if (i >= WORKERS) added = extra(row, token);
            float y = product_at(sums, local, token, row);
#if QUIRE_SILU
            const float up = product_at(sums, own + local, token, a.n / 2 + row);
            y = rounded(rounded(y / (1.0f + __expf(-y))) * up);
#endif
#if QUIRE_RESIDUAL
            y = rounded(y + added);
#endif
#if QUIRE_WIDE
            static_cast<float*>(a.y)[token * a.y_row + row] = y;
#else
            static_cast<Element*>(a.y)[token * a.y_row + row] = Element(y);
#endif
        }
    }
    __device__ void work() const {
#if QUIRE_RESIDENT
        prepare_x();
        wait_for_previous_grid();
        stage_x();
#if QUIRE_NORM
        cluster_wait();
        norm_x();
#endif
        async_fence();
        named_sync(WORKERS_BARRIER, WORKERS);
#else
        wait_for_previous_grid();
#endif
        if (!QUIRE_NORM) cluster_wait();
        const int group = threadIdx.x / 128, lane = threadIdx.x & 31;
        int at_stage = 0, turn = 0;
        for (int pass = 0; pass < n_passes; pass++) {
            float d[TOKENS / 2] = {};
            for (int unit = 0; unit < n_units; unit++) {
                barrier_wait(full(at_stage), turn & 1);
                multiply(d, group, unit, at_stage);
                if (lane == 0) barrier_arrive(empty(at_stage));
                if (++at_stage == a.n_stages) at_stage = 0, turn++;
            }
            hand_over(d, pass);
            finish(pass);
        }
    }
};

__global__ void __launch_bounds__(THREADS) gemm(const __grid_constant__ CUtensorMap w_map,
                                                const __grid_constant__ CUtensorMap x_map,
                                                const __grid_constant__ QuireGemmArgs args) {
    extern __shared__ __align__(1024) char shared[];
    const Block block(args, shared);
    if (threadIdx.x == WORKERS) prefetch_map(&w_map);
    block.init();
    let_next_grid_start();
    if (threadIdx.x < WORKERS) {
        block.work();
    } else {
        if (threadIdx.x == WORKERS) block.feed(&w_map, &x_map);
        cluster_wait();
    }
}

int launch(const QuireGemmArgs& a, cudaStream_t stream) {
    CUtensorMap w_map, x_map = {};
    const uint64_t w_sizes[] = {uint64_t(a.k), uint64_t(a.n)}, w_strides[] = {uint64_t(a.k) * 2};
    const uint32_t w_box[] = {CHUNK, uint32_t(HALF)};
    cudaError_t error = encode_map(&w_map, a.w, 2, w_sizes, w_strides, w_box);
    if (error == cudaSuccess && !QUIRE_RESIDENT) {
        const uint64_t x_sizes[] = {uint64_t(a.k), uint64_t(a.m)}, x_strides[] = {uint64_t(a.x_row) * 2};
        const uint32_t x_box[] = {CHUNK, TOKENS};
        error = encode_map(&x_map, a.x, 2, x_sizes, x_strides, x_box);
    }
    if (error != cudaSuccess) return error;
    static int allowed = 0;
    const int n_bytes = Layout(a, Block::passes_of(a)).end;
    if (n_bytes > allowed) {
        error = cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);
        if (error != cudaSuccess) return error;
        allowed = n_bytes;
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = a.cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.n_clusters * a.cluster);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = n_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = a.dependent ? 2 : 1;
    return cudaLaunchKernelEx(&config, gemm, w_map, x_map, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_gemm(const QuireGemmArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
