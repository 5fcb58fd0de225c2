// One product of a mixture of experts of many rows: y[s] = f(x[s] w[e]^T) for the rows s of each expert e, which lie
// together (moe_rows.cu). x [slots, K], w [experts, N, K] as nn.Linear stores each.
//
// As in gemm_wide.cu rows of w are the 64-row operand of wgmma and the tokens its columns. A tile is 256 rows of w by
// up to TOKENS rows of x of one expert, from a list made on the device; two warpgroups multiply its halves, one warp
// keeps a ring of shared memory filled (TMA). Blocks take tiles in turn, all rows of w for a tile of x first, so that
// tiles that run together share what they read. A tile with fewer rows uses a narrower instruction; what it meets beyond
// them, rows of the next expert or of an earlier tile, is multiplied, too, and not stored.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (64, 128), QUIRE_SILU (the first product: gate rows of w above up rows), and those of
// moe/codes.h, where w is in codes: these are made to numbers in registers. Or QUIRE_FP8 (gemm.h): w and x are e4m3 with
// scales (moe_round.cu), and y is as without.
#include "moe/gating.h"
#include "moe/wide_codes.h"
#include "shared_memory.h"

struct QuireMoeWideArgs {  // _WideArgs in quire/kernels/moe/hopper.py
    const void* x;
    const void* w;
    const void* scales;  // QUIRE_CODES, QUIRE_FP8: see CodedMatrices in quire/kernels/moe/coded.py
    const float* x_scales;  // QUIRE_FP8: see QuireMoeRoundArgs
    const void* bias;    // [experts, rows of w]; null: 0
    const int4* tiles;  // (expert, first slot, slots, 0)
    const int32_t* n_tiles;
    void* y;            // [n_slots, n_rows]
    float slope, offset, limit;  // QUIRE_SILU: see QuireMoeFewArgs
    int32_t n_slots, n_experts, n_rows, k;  // n_rows: of y for an expert; SiLU: w has twice as many
    int32_t n_blocks;
    int32_t x_scales_row;
};

namespace quire {

constexpr int TOKENS = QUIRE_TOKENS, BOX_TOKENS = 32;
constexpr int GROUP = 128, WORKERS = 2 * GROUP, THREADS = WORKERS + GROUP;
constexpr int ROWS = 256, HALVES = 2;                           // of w in a tile; products of a warpgroup
constexpr int OUT_ROWS = QUIRE_SILU ? 32 : 64;                  // of y in a product; SiLU: 8 of gate, then 8 of up
constexpr int TILE_ROWS = 4 * OUT_ROWS;                         // of y
constexpr int W_BYTES = ROWS * W_ROW_BYTES, X_BYTES = TOKENS * 128, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int W_STEP = QUIRE_CODES ? W_ROW_BYTES : CHUNK;        // of 64 columns, as the copy engine counts
constexpr int ROUND_TOKENS = 64;                                // whose results pass through shared memory at a time
constexpr int CELLS = OUT_ROWS / 8;                             // of 16 bytes, of a token in a product
constexpr int OUT_BYTES = ROUND_TOKENS * CELLS * 16;
constexpr int N_OUT = 2;                                        // buffers of a warpgroup for results on their way out
constexpr int SCALE_BYTES = QUIRE_FP8 == 2 ? TOKENS * 4 : 0;    // of x, for a stage
constexpr int RING_BYTES = 232448 - 1024;
constexpr int N_STAGES = (RING_BYTES - 2 * N_OUT * OUT_BYTES) / (STAGE_BYTES + SCALE_BYTES);
constexpr int OUT_AT = N_STAGES * STAGE_BYTES, SCALES_AT = OUT_AT + 2 * N_OUT * OUT_BYTES;
constexpr int BARRIERS_AT = SCALES_AT + N_STAGES * SCALE_BYTES;
constexpr int END = BARRIERS_AT + 2 * N_STAGES * 8;
static_assert(N_STAGES >= 3 && !(QUIRE_FP8 && QUIRE_CODES));

__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1)
                 : "memory");
}
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void stores_have_read() {  // until at most N stores still read
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(a) : "memory");
}
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}

struct Place {  // of a tile
    int expert, slot, n, row;  // first of x, how many; first of y
};

struct MoeBlock {
    const QuireMoeWideArgs& a;
    uint32_t base;
    int n_row_tiles, n_items, n_units;

    __device__ MoeBlock(const QuireMoeWideArgs& args, char* shared) : a(args), base(shared_address(shared)) {
        n_row_tiles = (a.n_rows + TILE_ROWS - 1) / TILE_ROWS;
        n_units = (a.k + (QUIRE_FP8 ? CHUNK - 1 : 0)) / CHUNK;
    }
    __device__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ uint32_t scales(int i) const { return base + SCALES_AT + i * SCALE_BYTES; }
    __device__ uint32_t full(int i) const { return base + BARRIERS_AT + i * 8; }
    __device__ uint32_t empty(int i) const { return base + BARRIERS_AT + (N_STAGES + i) * 8; }
    __device__ int item(int pass) const { return blockIdx.x + pass * a.n_blocks; }
    // From the L2 cache, which all grids share. Beyond the last there is nothing.
    __device__ Place place(int item) const {
        if (item >= n_items) return {0, 0, 0, 0};
        const volatile int* tile = reinterpret_cast<const volatile int*>(a.tiles + item / n_row_tiles);
        return {tile[0], tile[1], tile[2], item % n_row_tiles * TILE_ROWS};
    }
    __device__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < N_STAGES; i++) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), WORKERS / 32);
            }
            barrier_init_fence();
        }
        __syncthreads();
    }
    __device__ void count() { n_items = *const_cast<const volatile int*>(a.n_tiles) * n_row_tiles; }

    // ---- the warp that loads ----

    __device__ static int n_loaded(const Place& at) { return (at.n + BOX_TOKENS - 1) / BOX_TOKENS * BOX_TOKENS; }
    __device__ void load_w(const CUtensorMap* map, const Place& at, int unit, int i) const {
        const uint64_t hint = 2 * a.n_slots <= a.n_experts * TOKENS ? L2_EVICT_FIRST : L2_EVICT_NORMAL;
        barrier_expect(full(i), W_BYTES + n_loaded(at) * (QUIRE_FP8 == 2 ? 128 + 4 : 128));
        if (QUIRE_SILU) {
            load_box(stage(i), map, full(i), hint, unit * W_STEP, 0, 0, at.row / 8, at.expert);
        } else {
            load_box(stage(i), map, full(i), hint, unit * W_STEP, at.row, at.expert);
        }
    }
    __device__ void load_x(const CUtensorMap* map, const CUtensorMap* scale_map, const Place& at, int unit, int i) const {
        for (int first = 0; first < at.n; first += BOX_TOKENS) {
            load_box(stage(i) + W_BYTES + first * 128, map, full(i), L2_EVICT_NORMAL, unit * CHUNK, at.slot + first);
            if (QUIRE_FP8 == 2)
                load_box(scales(i) + first * 4, scale_map, full(i), L2_EVICT_NORMAL, (at.slot + first) * 4, unit);
        }
    }
    __device__ void feed(const CUtensorMap* w_map, const CUtensorMap* x_map, const CUtensorMap* scale_map) const {
        Place at = place(item(0)), next = place(item(1));
        const int n_first = at.n ? min(n_units, N_STAGES) : 0;
        if (!QUIRE_SILU) {
            for (int i = 0; i < n_first; i++) load_w(w_map, at, i, i);
            wait_for_previous_grid();
            for (int i = 0; i < n_first; i++) load_x(x_map, scale_map, at, i, i);
        }
        int unit = QUIRE_SILU ? 0 : n_first, at_stage = unit % N_STAGES, turn = unit / N_STAGES;
        for (int pass = 0; at.n > 0; pass++) {
            for (; unit < n_units; unit++) {
                if (turn > 0) await(empty(at_stage), (turn - 1) & 1);
                load_w(w_map, at, unit, at_stage);
                load_x(x_map, scale_map, at, unit, at_stage);
                if (++at_stage == N_STAGES) at_stage = 0, turn++;
            }
            unit = 0;
            at = next;
            next = place(item(pass + 2));
        }
    }

    // ---- the warpgroups that multiply ----

    __device__ int group() const { return threadIdx.x / GROUP; }
    __device__ void release(int i) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty(i));
    }
    // Rows of an expert's matrix that a thread has in a product of 64: of gate and of up, or eight apart.
    __device__ int upper_row(const Place& at, int half) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32;
        return at.row + (group() * HALVES + half) * OUT_ROWS + warp * (OUT_ROWS / 4) + lane / 4;
    }
    __device__ int lower_row(int upper) const { return QUIRE_SILU ? a.n_rows + upper : upper + 8; }
    __device__ int n_matrix_rows() const { return QUIRE_SILU ? 2 * a.n_rows : a.n_rows; }
#if QUIRE_CODES
    __device__ void find_scales(RowScales (&found)[HALVES][2], const Place& at, int unit) const {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int upper = min(upper_row(at, half), a.n_rows - 1), lower = min(lower_row(upper), n_matrix_rows() - 1);
            found[half][0] = scales_at(a.scales, at.expert, upper, unit * CHUNK, n_matrix_rows(), a.k);
            found[half][1] = scales_at(a.scales, at.expert, lower, unit * CHUNK, n_matrix_rows(), a.k);
        }
    }
    template <int N> __device__ void multiply(float (&d)[HALVES][TOKENS / 2], int first, const Place& at) const {
        int at_stage = first % N_STAGES, turn = first / N_STAGES;
        RowScales next[HALVES][2];
        find_scales(next, at, 0);
        for (int unit = 0; unit < n_units; unit++) {
            RowScales now[HALVES][2];
#pragma unroll
            for (int half = 0; half < HALVES; half++) now[half][0] = next[half][0], now[half][1] = next[half][1];
            find_scales(next, at, min(unit + 1, n_units - 1));  // they come from far
            await(full(at_stage), turn & 1);
            const Operand x = rows_operand(stage(at_stage) + W_BYTES);
            uint32_t left[HALVES][4][4];
#pragma unroll
            for (int half = 0; half < HALVES; half++) {  // numbers of the second are made while the first multiplies
                const uint32_t w = stage(at_stage) + (group() * HALVES + half) * 64 * W_ROW_BYTES;
                read_fragments(left[half], w, now[half][0], now[half][1]);
                products_begin();
                float(&sums)[N / 2] = reinterpret_cast<float(&)[N / 2]>(d[half]);
#pragma unroll
                for (int s = 0; s < 4; s++) Product<N>::rows_of(sums, left[half][s], x.further(32 * s), unit + s > 0);
                products_commit();
            }
            products_wait<0>();
            pin(d[0]), pin(d[1]);
            __syncwarp();  // all have read their codes
            release(at_stage);
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
        }
    }
#elif QUIRE_FP8
    // Sums leave the tensor cores, which keep few digits of them, after each chunk; scaled where scales are of blocks. While
    // one warpgroup adds, the other multiplies.
    __device__ float w_scale(int i) const { return __ldg(static_cast<const float*>(a.scales) + i); }
    __device__ int first_scale(const Place& at, int row) const {  // of a row of w
        constexpr int SIDE = QUIRE_FP8 == 2 ? SCALE_BLOCK : 1;
        const int n_down = (n_matrix_rows() + SIDE - 1) / SIDE, n_right = QUIRE_FP8 == 2 ? n_units : 1;
        return (at.expert * n_down + min(row, n_matrix_rows() - 1) / SIDE) * n_right;
    }
    template <int N> __device__ void multiply(float (&d)[HALVES][TOKENS / 2], int first, const Place& at) const {
        int at_stage = first % N_STAGES, turn = first / N_STAGES;
        // In a tile of this warpgroup all rows of gate are of one block, and those that are not of pairs.
        const int upper_at = first_scale(at, upper_row(at, 0));
        int lower_at[HALVES];
        float part[N / 2];
#pragma unroll
        for (int half = 0; half < HALVES; half++) lower_at[half] = first_scale(at, lower_row(upper_row(at, half)));
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int i = 0; i < N / 2; i++) d[half][i] = 0.0f;
        for (int unit = 0; unit < n_units; unit++) {
            float lower[HALVES];  // they come from far
            const float upper = QUIRE_FP8 == 2 ? w_scale(upper_at + unit) : 1.0f;
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                lower[half] = QUIRE_FP8 == 2 && QUIRE_SILU ? w_scale(lower_at[half] + unit) : upper;
            await(full(at_stage), turn & 1);
            const Operand x = rows_operand(stage(at_stage) + W_BYTES);
            const uint32_t from = scales(at_stage) + threadIdx.x % 4 * 8;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const Operand w = rows_operand(stage(at_stage) + (uniform(group()) * HALVES + half) * 8192);
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) Product<N>::rows(part, w.further(32 * i), x.further(32 * i), i > 0);
                products_commit();
                products_wait<0>();
                pin(part);
                if (QUIRE_FP8 == 1 && half + 1 == HALVES) release(at_stage);
#pragma unroll
                for (int v = 0; v < N / 8; v++) {
                    const float2 s = QUIRE_FP8 == 2 ? read8(from + v * 32) : make_float2(1.0f, 1.0f);
                    float* sum = &d[half][4 * v];
                    sum[0] += part[4 * v] * (s.x * upper), sum[1] += part[4 * v + 1] * (s.y * upper);
                    sum[2] += part[4 * v + 2] * (s.x * lower[half]), sum[3] += part[4 * v + 3] * (s.y * lower[half]);
                }
            }
            if (QUIRE_FP8 == 2) {
                __syncwarp();  // all have read the scales
                release(at_stage);
            }
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
        }
        if (QUIRE_FP8 == 1) scale_rows<N>(d, at);
    }
    // A scale of each row of w and of x.
    template <int N> __device__ void scale_rows(float (&d)[HALVES][TOKENS / 2], const Place& at) const {
        float upper[HALVES], lower[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int row = upper_row(at, half);
            upper[half] = w_scale(first_scale(at, row)), lower[half] = w_scale(first_scale(at, lower_row(row)));
        }
#pragma unroll
        for (int v = 0; v < N / 8; v++) {
            const int slot = at.slot + v * 8 + threadIdx.x % 4 * 2;
            const float even = load_float(a.x_scales + min(slot, a.n_slots - 1));
            const float odd = load_float(a.x_scales + min(slot + 1, a.n_slots - 1));
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float* sum = &d[half][4 * v];
                sum[0] *= even * upper[half], sum[1] *= odd * upper[half];
                sum[2] *= even * lower[half], sum[3] *= odd * lower[half];
            }
        }
    }
#else
    template <int N> __device__ void multiply(float (&d)[HALVES][TOKENS / 2], int first, const Place&) const {
        int at_stage = first % N_STAGES, turn = first / N_STAGES, before = at_stage;
        for (int unit = 0; unit < n_units; unit++) {
            await(full(at_stage), turn & 1);
            const Operand x = rows_operand(stage(at_stage) + W_BYTES);
            products_begin();
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const Operand w = rows_operand(stage(at_stage) + (uniform(group()) * HALVES + half) * 8192);
                float(&sums)[N / 2] = reinterpret_cast<float(&)[N / 2]>(d[half]);
#pragma unroll
                for (int i = 0; i < 4; i++) Product<N>::rows(sums, w.further(32 * i), x.further(32 * i), unit + i > 0);
            }
            products_commit();
            products_wait<1>();
            if (unit > 0) release(before);
            before = at_stage;
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
        }
        products_wait<0>();
        pin(d[0]), pin(d[1]);
        release(before);
    }
#endif

    // ---- results: through shared memory, where a slot's rows of y come to lie side by side ----

    __device__ uint32_t out_at(int buffer) const { return base + OUT_AT + (group() * N_OUT + buffer) * OUT_BYTES; }
    __device__ static uint32_t out_cell(uint32_t out, int token, int cell) {  // swizzled as the tensor map has it
        return out + (token * CELLS + (CELLS == 8 ? cell ^ (token & 7) : cell ^ (token >> 1 & 3))) * 16;
    }
    __device__ void stage_round(const float* d, uint32_t out, float above, float below) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32;
        const Gating gate{a.slope, a.offset, a.limit};
#pragma unroll
        for (int v = 0; v < ROUND_TOKENS / 8; v++) {
            const float x = d[4 * v] + above, y = d[4 * v + 1] + above, z = d[4 * v + 2] + below, w = d[4 * v + 3] + below;
            const int token = v * 8 + (lane & 7);
            if (QUIRE_SILU) {
                store_transposed(out_cell(out, token, warp), pack(gate(x, z), gate(y, w)));
            } else {
                store_transposed(out_cell(out, token, warp * 2 + (lane >> 3 & 1)), pack(x, y), pack(z, w));
            }
        }
    }
    // A whole round by the copy engine; the last of an expert by threads, as what follows is another expert's.
    __device__ void store_round(const CUtensorMap* map, uint32_t out, int row, int slot, int n) const {
        const int thread = threadIdx.x % GROUP;
        if (n >= ROUND_TOKENS) {
            if (thread == 0) store_box(map, out, row, slot);
        } else {
            for (int i = thread; i < n * CELLS; i += GROUP) {
                const int to_row = row + i % CELLS * 8;
                if (to_row >= a.n_rows) continue;
                Element* to = static_cast<Element*>(a.y) + int64_t(slot + i / CELLS) * a.n_rows + to_row;
                *reinterpret_cast<uint4*>(to) = read16(out_cell(out, i / CELLS, i % CELLS));
            }
            named_sync(1 + group(), GROUP);
        }
        if (thread == 0) stores_commit();
    }
    // n_rounds: of this warpgroup so far; buffers take turns.
    __device__ void store(const CUtensorMap* map, const float (&d)[HALVES][TOKENS / 2], const Place& at, int& n_rounds) const {
        constexpr int N_ROUNDS = TOKENS / ROUND_TOKENS;
        const int barrier = 1 + group();
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int row = at.row + (group() * HALVES + half) * OUT_ROWS, own = upper_row(at, half);
            const int n = n_matrix_rows(), last = n - 1;  // rows beyond are not stored
            const float above = bias_of(a.bias, n, at.expert, min(own, last));
            const float below = bias_of(a.bias, n, at.expert, min(lower_row(own), last));
#pragma unroll
            for (int i = 0; i < N_ROUNDS; i++) {
                const int first = i * ROUND_TOKENS;
                if (first >= at.n || row >= a.n_rows) continue;
                const uint32_t out = out_at(n_rounds++ % N_OUT);
                if (threadIdx.x % GROUP == 0) stores_have_read<N_OUT - 1>();
                named_sync(barrier, GROUP);
                stage_round(&d[half][first / 2], out, above, below);
                async_fence();
                named_sync(barrier, GROUP);
                store_round(map, out, row, at.slot + first, at.n - first);
            }
        }
    }
    __device__ void work(const CUtensorMap* y_map) const {
        if (!QUIRE_SILU) wait_for_previous_grid();
        int n_rounds = 0;
        Place at = place(item(0));
        for (int pass = 0; at.n > 0; pass++) {
            const Place next = place(item(pass + 1));
            float d[HALVES][TOKENS / 2];
            if (TOKENS > 64 && at.n <= 64) {
                multiply<64>(d, pass * n_units, at);
            } else if (TOKENS > 96 && at.n <= 96) {
                multiply<96>(d, pass * n_units, at);
            } else {
                multiply<TOKENS>(d, pass * n_units, at);
            }
            store(y_map, d, at, n_rounds);
            at = next;
        }
        if (threadIdx.x % GROUP == 0) stores_wait();
    }
};

__global__ void __launch_bounds__(THREADS, 1) moe_wide(const __grid_constant__ CUtensorMap w_map,
                                                       const __grid_constant__ CUtensorMap x_map,
                                                       const __grid_constant__ CUtensorMap y_map,
                                                       const __grid_constant__ CUtensorMap scale_map,
                                                       const __grid_constant__ QuireMoeWideArgs args) {
    extern __shared__ __align__(1024) char shared[];
    MoeBlock block(args, shared);
    if (threadIdx.x == WORKERS) prefetch_map(&w_map), prefetch_map(&x_map);
    block.init();
    // The list of tiles is made before the first product, which lets the second start when it is there.
    if (QUIRE_SILU) wait_for_previous_grid();
    let_next_grid_start();
    block.count();
    if (threadIdx.x < WORKERS) {
        registers_up<232>();
        block.work(&y_map);
    } else {
        registers_down<40>();
        if (threadIdx.x == WORKERS) block.feed(&w_map, &x_map, &scale_map);
    }
}

inline cudaError_t encode_experts(CUtensorMap* map, const QuireMoeWideArgs& a) {
    const uint64_t k = a.k, row = k * W_ROW_BYTES / CHUNK, n = a.n_rows, n_experts = a.n_experts;
    const uint64_t width = QUIRE_CODES ? row : k;
    constexpr bool IN_BYTES = QUIRE_CODES != 0 || QUIRE_FP8 != 0;
    const uint64_t sizes[] = {width, n, n_experts}, strides[] = {row, n * row};
    const uint32_t box[] = {W_STEP, ROWS, 1};
    const uint64_t pair_sizes[] = {width, 8, 2, n / 8, n_experts}, pair_strides[] = {row, n * row, 8 * row, 2 * n * row};
    const uint32_t pair_box[] = {W_STEP, 8, 2, ROWS / 16, 1};
    constexpr CUtensorMapSwizzle SWIZZLE = W_ROW_BYTES == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                           : W_ROW_BYTES == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                               : CU_TENSOR_MAP_SWIZZLE_NONE;
    return QUIRE_SILU ? encode_map(map, a.w, 5, pair_sizes, pair_strides, pair_box, L2_BY_128, SWIZZLE, IN_BYTES)
                      : encode_map(map, a.w, 3, sizes, strides, box, L2_BY_128, SWIZZLE, IN_BYTES);
}

int launch(const QuireMoeWideArgs& a, cudaStream_t stream) {
    CUtensorMap w_map, x_map, y_map, scale_map = {};
    cudaError_t error = encode_experts(&w_map, a);
    if (error != cudaSuccess) return error;
    const uint64_t x_sizes[] = {uint64_t(a.k), uint64_t(a.n_slots)}, x_strides[] = {uint64_t(a.k) * OPERAND_BYTES};
    const uint32_t x_box[] = {CHUNK, BOX_TOKENS};
    error = encode_map(&x_map, a.x, 2, x_sizes, x_strides, x_box, L2_BY_128, SWIZZLED, QUIRE_FP8 != 0);
    if (error != cudaSuccess) return error;
    if (QUIRE_FP8 == 2) {
        const uint64_t sizes[] = {uint64_t(a.n_slots) * 4, (uint64_t(a.k) + 127) / 128}, strides[] = {uint64_t(a.x_scales_row) * 4};
        const uint32_t box[] = {BOX_TOKENS * 4, 1};
        error = encode_map(&scale_map, a.x_scales, 2, sizes, strides, box, L2_BY_128, CU_TENSOR_MAP_SWIZZLE_NONE, true);
        if (error != cudaSuccess) return error;
    }
    const uint64_t y_sizes[] = {uint64_t(a.n_rows), uint64_t(a.n_slots)}, y_strides[] = {uint64_t(a.n_rows) * 2};
    const uint32_t y_box[] = {OUT_ROWS, ROUND_TOKENS};
    error = encode_map(&y_map, a.y, 2, y_sizes, y_strides, y_box, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                       QUIRE_SILU ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
    if (error != cudaSuccess) return error;
    error = allow_shared_memory<moe_wide>(END);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.n_blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = END;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, moe_wide, w_map, x_map, y_map, scale_map, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_moe_wide(const QuireMoeWideArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
