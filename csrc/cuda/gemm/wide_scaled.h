// Products of many rows in e4m3: sums leave the tensor cores, which keep few digits of them, after each chunk, scaled where
// weights have blocks.
//
// What a thread multiplies its sums by then differs from token to token. Where tokens are the columns of a product it reads
// a scale for every second sum: 48 of a tile of 192 tokens, 6 KB a warp, so that all warps keep shared memory busy for half
// the time of the products. Turned, tokens are the rows: a thread has two, with one scale each for 64 columns.
#pragma once
#include "gemm/wide_shape.h"

namespace quire {

#if QUIRE_FP8
// Where a thread reads scales in those of a stage; lower: those of its lower row are so much further, in SiLU that of w.
struct ScalesOf {
    uint32_t from, lower;
    template <class Block> __device__ ScalesOf(const Block& block, int row) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32, first = block.lower_row(row);
        const int low = block.lower_row(block.upper_row(row + block.group() * OUT_ROWS));
        from = TURNED ? (block.group() * 64 + warp * 16 + lane / 4) * 4 : lane % 4 * 16;
        lower = TURNED ? 32 : QUIRE_SILU ? (TOKENS + 1 + low / SCALE_BLOCK - first / SCALE_BLOCK) * 4 : 0;
    }
};

// Adds part p, of the chunk whose scales begin at `scales`.
__device__ __forceinline__ void add_part(float (&d)[COLUMNS / 2], float (&part)[PART_QUADS * 4], uint32_t scales, ScalesOf of,
                                         int p) {
    pin(part);
#if QUIRE_FP8 == 2
    const float gate = PAIRED_SCALES ? read_float(scales + TOKENS * 4) : 1.0f;
    const float up = PAIRED_SCALES ? read_float(scales + of.lower) : 1.0f;
#endif
#pragma unroll
    for (int v = 0; v < PART_QUADS; v += 2) {
        const int at = p * PART_QUADS + v;
        float *sum = &d[4 * at], *own = &part[4 * v];
#if QUIRE_FP8 == 1
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += own[i];
#else
        if (TURNED) {  // of 64 columns; SiLU: then of their 32 of up, every second quad
            const uint32_t set = scales + of.from + at / 8 * (1 + QUIRE_SILU) * TOKENS * 4;
            const float upper = read_float(set), lower = read_float(set + of.lower);
            const float next = QUIRE_SILU ? read_float(set + TOKENS * 4) : upper;
            const float below = QUIRE_SILU ? read_float(set + TOKENS * 4 + of.lower) : lower;
            sum[0] += own[0] * upper, sum[1] += own[1] * upper, sum[2] += own[2] * lower, sum[3] += own[3] * lower;
            sum[4] += own[4] * next, sum[5] += own[5] * next, sum[6] += own[6] * below, sum[7] += own[7] * below;
        } else {
            const uint4 bits = read16(scales + of.from + at * 32);
            const float s[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += own[i] * (s[i / 4 * 2 + i % 2] * (i % 4 < 2 ? gate : up));
        }
#endif
    }
}

__device__ __forceinline__ void multiply_part(float (&part)[PART_QUADS * 4], uint32_t stage, int group, int p) {
    const Operand left = rows_operand(stage + group * 8192), right = rows_operand(stage + COLUMNS_AT + p * PART_QUADS * 1024);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) Product<PART_QUADS * 8>::rows(part, left.further(32 * k), right.further(32 * k), k > 0);
    products_commit();
}

struct Turn {  // of the ring
    int stage, n;
    __device__ void next() {
        if (++stage == N_STAGES) stage = 0, n++;
    }
};

// N_CHUNKS chunks: while a part is added the next one is multiplied, or the other warpgroup's.
template <int N_CHUNKS, class Block>
__device__ __forceinline__ void multiply_chunks(const Block& block, float (&d)[COLUMNS / 2], Turn& at, int own_group, ScalesOf of) {
    constexpr int N = N_CHUNKS * PARTS;
    float part[IN_FLIGHT][PART_QUADS * 4];
    int stages[N_CHUNKS];
#pragma unroll
    for (int i = 0; i < N_CHUNKS; i++, at.next()) {
        stages[i] = at.stage;
        await(block.full(at.stage), at.n & 1);
    }
    const int group = KEEPS_GROUP ? own_group : uniform(block.group());
    multiply_part(part[0], block.stage(stages[0]), group, 0);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int now = stages[i / PARTS], p = i % PARTS, next = i + 1;
        if (next < N) {
            multiply_part(part[next % IN_FLIGHT], block.stage(stages[next / PARTS]), group, next % PARTS);
            products_wait<1>();
        } else {
            products_wait<0>();
        }
        if (QUIRE_FP8 == 1 && p + 1 == PARTS) block.release(now);
        add_part(d, part[i % IN_FLIGHT], block.scales(now), of, p);
        if (QUIRE_FP8 == 2 && p + 1 == PARTS) __syncwarp(), block.release(now);  // all have read the scales
    }
}

template <class Block>
__device__ __forceinline__ void multiply_scaled(const Block& block, float (&d)[COLUMNS / 2], int pass, int row) {
    const int first = pass * block.n_units, group = KEEPS_GROUP ? uniform(block.group()) : 0;
    const ScalesOf of(block, row);
    Turn at = {first % N_STAGES, first / N_STAGES};
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) d[i] = 0.0f;
    int unit = 0;
    for (; unit + RUN <= block.n_units; unit += RUN) multiply_chunks<RUN>(block, d, at, group, of);
    if (RUN > 1 && unit < block.n_units) multiply_chunks<1>(block, d, at, group, of);
}
#endif

#if QUIRE_FP8 == 2
// Warps beside the loading one: scales of tokens, but with SiLU times those of rows of w, in the order in which threads
// read them. SiLU, not turned: behind them those of w, of gate and of the two blocks that rows of up may lie in.
template <class Block> __device__ __forceinline__ void make_scales(const Block& block) {
    const auto& a = block.a;
    const int lane = threadIdx.x & 31, last_block = (a.n - 1) / SCALE_BLOCK, n_of_rows = a.k / SCALE_BLOCK;
    const int paired = lane / 16 * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2;
    wait_for_previous_grid();
    int pass = 0, unit = threadIdx.x / 32 - WORKERS / 32 - 1;
    for (int i = unit; i < block.n_items; i += SCALERS, unit += SCALERS) {
        while (unit >= block.n_units) unit -= block.n_units, pass++;
        const int stage = i % N_STAGES, turn = i / N_STAGES, chunk = block.first_unit + unit;
        const auto at = block.place(pass);
        float x[TOKENS / 32], w[W_SCALES];
#pragma unroll
        for (int j = 0; j < TOKENS / 32; j++)
            x[j] = load_float(a.x_scale + int64_t(chunk) * a.x_scale_step + at.token + 32 * j + lane);
#pragma unroll
        for (int i = 0; i < W_SCALES; i++) {
            const bool up = QUIRE_SILU && (TURNED ? i % 2 : i > 0);
            const int row = at.row + (up ? a.n / 2 : 0) + (TURNED ? i / (1 + QUIRE_SILU) * OUT_ROWS : 0);
            w[i] = __ldg(a.w_scale + min(row / SCALE_BLOCK + (!TURNED && i == 2), last_block) * n_of_rows + chunk);
        }
        if (turn) await(block.empty(stage), (turn - 1) & 1);
        const uint32_t to = block.scales(stage) + (TURNED ? lane : paired) * 4;
#pragma unroll
        for (int set = 0; set < SCALE_SETS; set++) {
#pragma unroll
            for (int j = 0; j < TOKENS / 32; j++)
                write4(to + (set * TOKENS + 32 * j) * 4, PAIRED_SCALES ? x[j] : x[j] * w[set]);
        }
        if (PAIRED_SCALES && lane < W_SCALES)
            write4(block.scales(stage) + (TOKENS + lane) * 4, lane == 0 ? w[0] : lane == 1 ? w[W_SCALES > 1] : w[W_SCALES - 1]);
        __syncwarp();
        if (lane == 0) barrier_arrive(block.full(stage));
    }
}
#endif

}  // namespace quire
