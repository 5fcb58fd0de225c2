// Products of few rows with a large matrix: y = f(x w^T), x [m, K] with m <= 64, w [N, K] as nn.Linear stores it.
//
// Reading w once at the speed of memory is all that counts. A tile of rows of w is the 64-row operand of wgmma and the
// tokens are its columns. A cluster of up to 8 blocks shares the tiles: each block multiplies its slice of K, then hands
// its sums to the blocks that own the rows (through distributed shared memory), which add them in the order of the ranks.
// So results do not depend on timing, and nothing is left in global memory between launches.
//
// In a block one warp keeps a ring of shared memory filled with w (TMA); it starts before the previous grid has ended, as
// weights never change. Warpgroups multiply: either all of them share a tile, or (QUIRE_TURNS) they take tiles in turn, so
// that one multiplies while another finishes. x is either held for the whole slice (QUIRE_RESIDENT: read once, normed
// there if asked) or travels through the ring beside w.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (8, 16, 32, 64), QUIRE_CLUSTER (1, 2, 4, 8 blocks), QUIRE_GROUPS (warpgroups),
// QUIRE_TURNS, QUIRE_RESIDENT, QUIRE_NORM (needs QUIRE_RESIDENT), QUIRE_RESIDUAL, QUIRE_SILU, QUIRE_BIAS, QUIRE_WIDE
// (results are stored as fp32).
#include "gemm.h"

struct QuireGemmArgs {  // _Args in quire/kernels/gemm/hopper.py
    const void* x;
    const void* w;
    const void* norm_weight;
    const void* bias;
    const void* residual;
    void* y;
    int64_t x_row, residual_row, y_row;  // elements
    int32_t m, n, k;                     // n: rows of w
    int32_t n_clusters, n_stages, n_ahead, dependent;
    int32_t token_bits;                  // m <= 2 ^ token_bits <= QUIRE_TOKENS
    float eps;
};

namespace quire {

constexpr int TOKENS = QUIRE_TOKENS;
constexpr int CLUSTER = QUIRE_CLUSTER;
constexpr int WORKERS = 128 * QUIRE_GROUPS;          // threads that multiply
constexpr int THREADS = WORKERS + 32;
constexpr int TEAMS = QUIRE_TURNS ? QUIRE_GROUPS : 1;
constexpr int TEAM = WORKERS / TEAMS;                // threads that share a tile
constexpr int ROWS = TEAM / 2;                       // of w in a tile
constexpr int OUT_ROWS = QUIRE_SILU ? ROWS / 2 : ROWS;  // of y in a tile; SiLU: 8 rows of gate, then their 8 rows of up
constexpr int SHARE = TEAM / CLUSTER;                // threads of a team whose sums one block finishes
constexpr int QUADS = TOKENS / 8;                    // sums of a thread come in fours: 2 rows (8 apart) x 2 tokens
constexpr int SENDERS = SHARE < 32 ? 1 : SHARE / 32; // warps of a team that hand over to one block
constexpr int CHUNKS = ROWS == 64 ? 2 : 1;           // of a stage
constexpr int W_BYTES = ROWS * 128, X_BYTES = TOKENS * 128;  // of a chunk
constexpr int STAGE_BYTES = CHUNKS * (W_BYTES + (QUIRE_RESIDENT ? 0 : X_BYTES));
constexpr int SUMS_BYTES = CLUSTER == 1 ? 0 : TEAM * QUADS * 16;  // of one exchange
constexpr int MAX_STAGES = 32, UNROLL = 8;
constexpr int WORKERS_BARRIER = 1;

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], sums[TEAMS], read[TEAMS], order[TEAMS], squares;
};

// Where things lie in shared memory. Bytes from a base that is a multiple of 1,024.
struct Layout {
    int x, sums, norm_weight, parts, squares, barriers, end;
    __host__ __device__ Layout(const QuireGemmArgs& a) {
        const int units = (a.k / CHUNK + CHUNKS - 1) / CHUNKS;
        const int slice = (units + CLUSTER - 1) / CLUSTER * CHUNKS;  // chunks of the largest slice
        x = a.n_stages * STAGE_BYTES;
        sums = x + (QUIRE_RESIDENT ? slice * X_BYTES : 0);
        norm_weight = sums + TEAMS * SUMS_BYTES;
        parts = norm_weight + (QUIRE_NORM ? slice * 128 : 0);
        squares = parts + (QUIRE_NORM ? slice * TOKENS * 4 : 0);
        barriers = squares + (QUIRE_NORM ? (CLUSTER + 1) * TOKENS * 4 : 0);
        end = barriers + int(sizeof(Barriers));
    }
};

__host__ __device__ inline int tiles_of(int n) { return ((QUIRE_SILU ? n / 2 : n) + OUT_ROWS - 1) / OUT_ROWS; }

// ---- arithmetic ------------------------------------------------------------------------------------------------------

#if QUIRE_BF16
#define QUIRE_TYPES "k16.f32.bf16.bf16 "
#else
#define QUIRE_TYPES "k16.f32.f16.f16 "
#endif
#define QUIRE_SUM4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

// d (+)= a b^T: 64 rows of w, TOKENS rows of x, 16 columns.
__device__ __forceinline__ void product(float (&d)[TOKENS / 2], Operand a, Operand b, int accumulate) {
#if QUIRE_TOKENS == 8
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n wgmma.mma_async.sync.aligned.m64n8" QUIRE_TYPES
                 "{%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
                 : QUIRE_SUM4(0)
                 : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));
#elif QUIRE_TOKENS == 16
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %10, 0;\n wgmma.mma_async.sync.aligned.m64n16" QUIRE_TYPES
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;\n}"
                 : QUIRE_SUM4(0), QUIRE_SUM4(4)
                 : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));
#elif QUIRE_TOKENS == 32
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n wgmma.mma_async.sync.aligned.m64n32" QUIRE_TYPES
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
                 : QUIRE_SUM4(0), QUIRE_SUM4(4), QUIRE_SUM4(8), QUIRE_SUM4(12)
                 : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));
#else
    Product<TOKENS>::rows(d, a, b, accumulate);
#endif
}

__device__ __forceinline__ float square_sum(uint32_t pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
__device__ __forceinline__ uint32_t normed(uint32_t pair, float scale, uint32_t weight) {
    return pack(rounded(low(pair) * scale) * low(weight), rounded(high(pair) * scale) * high(weight));
}

__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int c0, int c1) {  // into L2
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3)
                 : "memory");
}

// ---- one block -------------------------------------------------------------------------------------------------------

struct Block {
    const QuireGemmArgs& a;
    char* memory;
    uint32_t base;
    Layout at;
    int rank, cluster, n_passes, first_chunk, n_chunks, n_units;

    __device__ Block(const QuireGemmArgs& args, char* shared)
        : a(args), memory(shared), base(shared_address(shared)), at(args) {
        rank = blockIdx.x % CLUSTER;
        cluster = blockIdx.x / CLUSTER;
        n_passes = (tiles_of(a.n) - cluster + a.n_clusters - 1) / a.n_clusters;
        const int all = a.k / CHUNK, units = (all + CHUNKS - 1) / CHUNKS;
        const int first = units * rank / CLUSTER, end = units * (rank + 1) / CLUSTER;
        first_chunk = first * CHUNKS;
        n_units = end - first;
        n_chunks = min(all, end * CHUNKS) - first_chunk;
    }
    __device__ Barriers* barriers() const { return reinterpret_cast<Barriers*>(memory + at.barriers); }
    __device__ uint32_t full(int stage) const { return shared_address(&barriers()->full[stage]); }
    __device__ uint32_t empty(int stage) const { return shared_address(&barriers()->empty[stage]); }
    __device__ uint32_t order(int team) const { return shared_address(&barriers()->order[team]); }
    __device__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ int chunks_of(int unit) const { return min(CHUNKS, n_chunks - unit * CHUNKS); }
    __device__ int first_row(int pass) const { return (cluster + pass * a.n_clusters) * OUT_ROWS; }

    __device__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < a.n_stages; i++) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), TEAM / 32);
            }
            for (int i = 0; i < TEAMS; i++) {
                barrier_init(shared_address(&barriers()->sums[i]), CLUSTER * SENDERS);
                barrier_init(shared_address(&barriers()->read[i]), CLUSTER * TEAM / 32);
                barrier_init(order(i), TEAM / 32);
            }
            barrier_init(shared_address(&barriers()->squares), CLUSTER);
            barrier_init_fence();
        }
        __syncthreads();
        if (CLUSTER > 1) cluster_arrive();  // other blocks may reach our barriers once they have waited for this
    }

    // ---- the warp that loads ----

    __device__ void load_w(const CUtensorMap* map, int item, int stage_index) const {
        const int unit = item % n_units, row = first_row(item / n_units);
        for (int c = 0; c < chunks_of(unit); c++) {
            const int column = (first_chunk + unit * CHUNKS + c) * CHUNK;
            const uint32_t to = stage(stage_index) + c * W_BYTES;
            if (QUIRE_SILU) {
                load_box(to, map, full(stage_index), L2_EVICT_FIRST, column, 0, 0, row / 8);
            } else {
                load_box(to, map, full(stage_index), L2_EVICT_FIRST, column, row);
            }
        }
    }
    __device__ void prefetch_w(const CUtensorMap* map, int item) const {
        const int unit = item % n_units, row = first_row(item / n_units);
        for (int c = 0; c < chunks_of(unit); c++) {
            const int column = (first_chunk + unit * CHUNKS + c) * CHUNK;
            if (QUIRE_SILU) {
                prefetch_box(map, column, 0, 0, row / 8);
            } else {
                prefetch_box(map, column, row);
            }
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

    // ---- x in shared memory: cells of 16 bytes, walked through by thread: 8 cells, then the tokens, then the chunks ----

    __device__ uint32_t x_cell(int token, int chunk, int cell) const {
        return base + at.x + chunk * X_BYTES + token * 128 + ((cell ^ (token & 7)) << 4);
    }
    __device__ int walk_token(int i) const { return i >> 3 & ((1 << a.token_bits) - 1); }
    __device__ int walk_chunk(int i) const { return i >> 3 >> a.token_bits; }
    __device__ int walk_end() const { return n_chunks << a.token_bits << 3; }

    // What does not depend on the previous grid.
    __device__ void prepare_x() const {
        for (int i = threadIdx.x; i < TOKENS * n_chunks * 8; i += WORKERS) {
            const int token = i / 8 % TOKENS;
            if (token >= a.m) write16(x_cell(token, i / 8 / TOKENS, i % 8), make_uint4(0, 0, 0, 0));
        }
        if (QUIRE_NORM) {
            const Element* weight = static_cast<const Element*>(a.norm_weight) + first_chunk * CHUNK;
            for (int i = threadIdx.x; i < n_chunks * 8; i += WORKERS)
                write16(base + at.norm_weight + i * 16, load16(weight + i * 8));
        }
    }
    __device__ void stage_x() const {
        const Element* x = static_cast<const Element*>(a.x) + first_chunk * CHUNK + threadIdx.x % 8 * 8;
        float* parts = reinterpret_cast<float*>(memory + at.parts);
        for (int i = threadIdx.x; i - int(threadIdx.x & 31) < walk_end(); i += UNROLL * WORKERS) {
            uint4 cells[UNROLL];
#pragma unroll
            for (int j = 0; j < UNROLL; j++) {
                const int k = i + j * WORKERS, token = walk_token(k);
                cells[j] = make_uint4(0, 0, 0, 0);
                if (k < walk_end() && token < a.m) cells[j] = load16(x + token * a.x_row + walk_chunk(k) * CHUNK);
            }
#pragma unroll
            for (int j = 0; j < UNROLL; j++) {
                const int k = i + j * WORKERS, token = walk_token(k), chunk = walk_chunk(k);
                const bool live = k < walk_end() && token < a.m;
                if (live) write16(x_cell(token, chunk, k % 8), cells[j]);
                if (QUIRE_NORM) {
                    float sum = square_sum(cells[j].x) + square_sum(cells[j].y) + square_sum(cells[j].z) +
                                square_sum(cells[j].w);
                    for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
                    if (k % 8 == 0 && live) parts[token * n_chunks + chunk] = sum;
                }
            }
        }
    }
    // Every block of the cluster needs the squares of whole rows: sums of slices are handed to all.
    __device__ void norm_x() const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
        const float* parts = reinterpret_cast<const float*>(memory + at.parts);
        float* squares = reinterpret_cast<float*>(memory + at.squares);
        float* scales = squares + CLUSTER * TOKENS;
        const uint32_t barrier = shared_address(&barriers()->squares);
        named_sync(WORKERS_BARRIER, WORKERS);
        for (int token = warp; token < a.m; token += WORKERS / 32) {
            float sum = 0.0f;
            for (int i = lane; i < n_chunks; i += 32) sum += parts[token * n_chunks + i];
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (CLUSTER == 1 && lane == 0) squares[token] = sum;
            if (CLUSTER > 1 && lane < CLUSTER)
                store_there(address_in(base + at.squares + (rank * TOKENS + token) * 4, lane), sum);
        }
        named_sync(WORKERS_BARRIER, WORKERS);
        if (CLUSTER > 1) {
            if (threadIdx.x < CLUSTER) arrive_there(address_in(barrier, threadIdx.x));
            wait_cluster(barrier, 0);
        }
        if (threadIdx.x < a.m) {
            float sum = 0.0f;
            for (int r = 0; r < CLUSTER; r++) sum += squares[r * TOKENS + threadIdx.x];
            scales[threadIdx.x] = 1.0f / sqrtf(sum / float(a.k) + a.eps);
        }
        named_sync(WORKERS_BARRIER, WORKERS);
        for (int i = threadIdx.x; i < walk_end(); i += WORKERS) {
            const int token = walk_token(i), chunk = walk_chunk(i), cell = i % 8;
            if (token >= a.m) continue;
            const float scale = scales[token];
            const uint4 v = read16(x_cell(token, chunk, cell));
            const uint4 g = read16(base + at.norm_weight + (chunk * 8 + cell) * 16);
            write16(x_cell(token, chunk, cell), make_uint4(normed(v.x, scale, g.x), normed(v.y, scale, g.y),
                                                           normed(v.z, scale, g.z), normed(v.w, scale, g.w)));
        }
    }

    // ---- the warpgroups that multiply ----

    __device__ void multiply(float (&d)[TOKENS / 2], int unit, int stage_index) const {
        const uint32_t w = stage(stage_index) + threadIdx.x % TEAM / 128 * 64 * 128;
        const uint32_t x = QUIRE_RESIDENT ? base + at.x + unit * CHUNKS * X_BYTES : stage(stage_index) + CHUNKS * W_BYTES;
        const int n = chunks_of(unit);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (c >= n) break;
            const Operand left = rows_operand(w + c * W_BYTES), right = rows_operand(x + c * X_BYTES);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) product(d, left.further(32 * i), right.further(32 * i), unit + c + i > 0);
            products_commit();
        }
    }
    __device__ void multiply_pass(float (&d)[TOKENS / 2], int pass) const {
        const int lane = threadIdx.x & 31, first = pass * n_units, team = threadIdx.x / TEAM;
        // In turn: the parity of a stage tells only its last filling from the one before.
        if (TEAMS > 1 && pass > 0) barrier_wait(order(team), (pass - 1) / TEAMS & 1);
        int at_stage = first % a.n_stages, turn = first / a.n_stages, before = at_stage;
        for (int unit = 0; unit < n_units; unit++) {
            barrier_wait(full(at_stage), turn & 1);
            multiply(d, unit, at_stage);
            products_wait<CHUNKS>();  // of the unit before, which was whole
            if (unit > 0 && unit + 1 < n_units && lane == 0) barrier_arrive(empty(before));
            if (unit + 1 < n_units) before = at_stage;
            if (++at_stage == a.n_stages) at_stage = 0, turn++;
        }
        products_wait<0>();
        quire::pin(d);
        if (lane == 0) {
            const int last = (first + n_units - 1) % a.n_stages;
            if (last != before) barrier_arrive(empty(before));
            barrier_arrive(empty(last));
            if (TEAMS > 1) barrier_arrive(order((team + 1) % TEAMS));
        }
    }

    // ---- results: quad `v` of thread `t` of a team is rows row_of(t) and 8 below, tokens token_of(t, v) and the next ----

    __device__ int row_of(int t) const { return (QUIRE_SILU ? t / 32 * 8 : t / 32 * 16) + t % 32 / 4; }  // of y, in a tile
    __device__ int token_of(int t, int v) const { return v * 8 + t % 4 * 2; }
    __device__ int n_out() const { return QUIRE_SILU ? a.n / 2 : a.n; }

    // Loaded before the product and not touched until after it: a conversion would wait for the load.
    struct Added {
        uint32_t bits[4];  // of a quad of the residual
        __device__ float at(int i) const { return QUIRE_RESIDUAL ? low(bits[i]) : 0.0f; }
    };
    __device__ uint32_t residual_bits(int row, int token) const {
        uint16_t x = 0;
        if (row < n_out() && token < a.m) {
            const Element* from = static_cast<const Element*>(a.residual) + token * a.residual_row + row;
            asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
        }
        return x;
    }
    __device__ Added residual_quad(int row, int token) const {
        Added added = {};
        if (!QUIRE_RESIDUAL) return added;
#pragma unroll
        for (int i = 0; i < (QUIRE_SILU ? 2 : 4); i++) added.bits[i] = residual_bits(row + i / 2 * 8, token + i % 2);
        return added;
    }
    template <int N> static __device__ void pin(Added (&added)[N]) {
#pragma unroll
        for (int i = 0; i < N * 4; i++) asm volatile("" : "+r"(added[i / 4].bits[i % 4])::"memory");
    }
    __device__ float biased(float sum, int w_row) const {
        return rounded(QUIRE_BIAS && w_row < a.n ? sum + widen(static_cast<const Element*>(a.bias)[w_row]) : sum);
    }
    // sum, up: sums of one element of y; up only for SiLU. Rounded where separate torch operations would round.
    __device__ void store(float sum, float up, float added, int row, int token) const {
        if (row >= n_out() || token >= a.m) return;
        float y = biased(sum, row);
        if (QUIRE_SILU) y = rounded(rounded(silu(y)) * biased(up, a.n / 2 + row));
        if (QUIRE_RESIDUAL) y = rounded(y + added);
#if QUIRE_WIDE
        static_cast<float*>(a.y)[token * a.y_row + row] = y;
#else
        static_cast<Element*>(a.y)[token * a.y_row + row] = Element(y);
#endif
    }
    __device__ void store_quad(float4 sums, const Added& added, int row, int token) const {
        store(sums.x, sums.z, added.at(0), row, token);
        store(sums.y, sums.w, added.at(1), row, token + 1);
        if (QUIRE_SILU) return;
        store(sums.z, 0.0f, added.at(2), row + 8, token);
        store(sums.w, 0.0f, added.at(3), row + 8, token + 1);
    }
    static __device__ float4 quad(const float (&d)[TOKENS / 2], int v) {
        return make_float4(d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3]);
    }

#if QUIRE_CLUSTER == 1
    __device__ void pass(int index) const {
        const int t = threadIdx.x % TEAM, row = first_row(index) + row_of(t);
        float d[TOKENS / 2];
        Added added[QUADS];
#pragma unroll
        for (int v = 0; v < QUADS; v++) added[v] = residual_quad(row, token_of(t, v));
        multiply_pass(d, index);
        if (QUIRE_RESIDUAL) pin(added);
#pragma unroll
        for (int v = 0; v < QUADS; v++) store_quad(quad(d, v), added[v], row, token_of(t, v));
    }
#else
    // The block of rank r finishes what threads r * SHARE .. of every block's team have summed: [source][v][thread].
    __device__ uint32_t sums_at(int team, int source, int v, int slot) const {
        return base + at.sums + team * SUMS_BYTES + ((source * QUADS + v) * SHARE + slot) * 16;
    }
    __device__ void hand_over(const float (&d)[TOKENS / 2], int team) const {
        const int t = threadIdx.x % TEAM, owner = t / SHARE;
        const uint32_t there = address_in(sums_at(team, rank, 0, t % SHARE), owner);
#pragma unroll
        for (int v = 0; v < QUADS; v++) {
            if (v * 8 < a.m) store_there(there + v * SHARE * 16, quad(d, v));
        }
        __syncwarp();
        if (t % 32 % SHARE == 0) arrive_there(address_in(shared_address(&barriers()->sums[team]), owner));
    }
    __device__ float4 total(int team, int v, int slot) const {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int source = 0; source < CLUSTER; source++) {
            const uint4 x = read16(sums_at(team, source, v, slot));
            sum.x += __uint_as_float(x.x), sum.y += __uint_as_float(x.y);
            sum.z += __uint_as_float(x.z), sum.w += __uint_as_float(x.w);
        }
        return sum;
    }
    __device__ void pass(int index) const {
        constexpr int N = (QUADS + CLUSTER - 1) / CLUSTER;  // quads that a thread finishes
        const int team = threadIdx.x / TEAM, t = threadIdx.x % TEAM, turn = index / TEAMS;
        const int slot = t % SHARE, source = rank * SHARE + slot, row = first_row(index) + row_of(source);
        const uint32_t ready = shared_address(&barriers()->sums[team]), read = shared_address(&barriers()->read[team]);
        float d[TOKENS / 2];
        Added added[N];
#pragma unroll
        for (int i = 0; i < N; i++) added[i] = residual_quad(row, token_of(source, t / SHARE + i * CLUSTER));
        multiply_pass(d, index);
        if (QUIRE_RESIDUAL) pin(added);
        if (turn > 0) wait_cluster(read, (turn - 1) & 1);
        hand_over(d, team);
        wait_cluster(ready, turn & 1);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int v = t / SHARE + i * CLUSTER;
            if (v * 8 < a.m) store_quad(total(team, v, slot), added[i], row, token_of(source, v));
        }
        if (index + TEAMS >= n_passes) return;  // nobody hands anything over any more
        __syncwarp();
        if (t % 32 < CLUSTER) arrive_there(address_in(read, t % 32));
    }
#endif

    __device__ void work() const {
        if (QUIRE_RESIDENT) prepare_x();
        wait_for_previous_grid();
        if (QUIRE_RESIDENT) stage_x();
        if (CLUSTER > 1) cluster_wait();
        if (QUIRE_NORM) norm_x();
        if (QUIRE_RESIDENT) {
            async_fence();
            named_sync(WORKERS_BARRIER, WORKERS);
        }
        for (int index = uniform(threadIdx.x / TEAM); index < n_passes; index += TEAMS) pass(index);
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
        if (CLUSTER > 1) cluster_wait();
    }
}

int launch(const QuireGemmArgs& a, cudaStream_t stream) {
    CUtensorMap w_map, x_map = {};
    cudaError_t error = encode_weights(&w_map, a.w, a.n, a.k, QUIRE_SILU, ROWS);
    if (error == cudaSuccess && !QUIRE_RESIDENT) {
        const uint64_t x_sizes[] = {uint64_t(a.k), uint64_t(a.m)}, x_strides[] = {uint64_t(a.x_row) * 2};
        const uint32_t x_box[] = {CHUNK, TOKENS};
        error = encode_map(&x_map, a.x, 2, x_sizes, x_strides, x_box);
    }
    if (error != cudaSuccess) return error;
    static int allowed = 0;
    const int n_bytes = Layout(a).end;
    if (n_bytes > allowed) {
        error = cudaFuncSetAttribute(gemm, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);
        if (error != cudaSuccess) return error;
        allowed = n_bytes;
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.n_clusters * CLUSTER);
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
