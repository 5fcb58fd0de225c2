// The consumer warpgroups: multiply the tiles of a block, all of them one tile or (QUIRE_TURNS) tiles in turn.
#pragma once
#include "gemm/input.h"
#include "gemm/nibbles.h"
#include "gemm/results.h"
#include "gemm/rounding.h"

namespace quire {

#if QUIRE_FP8
#define QUIRE_TYPES "k32.f32.e4m3.e4m3 "
#define QUIRE_ORDER
#elif QUIRE_BF16
#define QUIRE_TYPES "k16.f32.bf16.bf16 "
#define QUIRE_ORDER ", 0, 0"
#else
#define QUIRE_TYPES "k16.f32.f16.f16 "
#define QUIRE_ORDER ", 0, 0"
#endif
#define QUIRE_SUM4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

// d (+)= a b^T: 64 rows of w, TOKENS rows of x, 32 bytes of columns.
__device__ __forceinline__ void product(float (&d)[TOKENS / 2], Operand a, Operand b, int accumulate) {
#if QUIRE_TOKENS == 8
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n wgmma.mma_async.sync.aligned.m64n8" QUIRE_TYPES
                 "{%0, %1, %2, %3}, %4, %5, p, 1, 1" QUIRE_ORDER ";\n}"
                 : QUIRE_SUM4(0)
                 : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));
#elif QUIRE_TOKENS == 16
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %10, 0;\n wgmma.mma_async.sync.aligned.m64n16" QUIRE_TYPES
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1" QUIRE_ORDER ";\n}"
                 : QUIRE_SUM4(0), QUIRE_SUM4(4)
                 : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));
#elif QUIRE_TOKENS == 32
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %18, 0;\n wgmma.mma_async.sync.aligned.m64n32" QUIRE_TYPES
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1" QUIRE_ORDER ";\n}"
                 : QUIRE_SUM4(0), QUIRE_SUM4(4), QUIRE_SUM4(8), QUIRE_SUM4(12)
                 : "l"(a.bits()), "l"(b.bits()), "r"(accumulate));
#else
    Product<TOKENS>::rows(d, a, b, accumulate);
#endif
}

__device__ inline void GemmBlock::multiply(float (&d)[TOKENS / 2], int unit, int stage_index) const {
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

// What sums of a chunk are multiplied by.
__device__ inline GemmBlock::Scales GemmBlock::scales_of(int chunk, int row) const {
    Scales s = {1.0f, 1.0f, {}};
    if (QUIRE_FP8 == 2) {
        const int blocks = a.k / SCALE_BLOCK, lower_row = QUIRE_SILU ? a.n / 2 + row : row + 8;
        const float* x_scale = a.x_scale + chunk * a.x_scale_step + token_of(threadIdx.x, 0);
        s.upper = load_float(a.w_scale + min(row, a.n - 1) / SCALE_BLOCK * blocks + chunk);
        s.lower = load_float(a.w_scale + min(lower_row, a.n - 1) / SCALE_BLOCK * blocks + chunk);
#pragma unroll
        for (int i = 0; i < 2 * QUADS; i++) s.x[i] = load_float(x_scale + i / 2 * 8 + i % 2);
    }
    return s;
}

__device__ inline void GemmBlock::load_scales_of(Scales (&to)[CHUNKS], int unit, int row) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        to[c] = scales_of(first_chunk + unit * CHUNKS + min(c, chunks_of(unit) - 1), row);
}

// Sums of e4m3 leave the tensor cores, which keep few digits of them, after each chunk.
__device__ inline void GemmBlock::add_scaled(float (&d)[TOKENS / 2], const float (&part)[TOKENS / 2], const Scales& s) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
        const float scale = QUIRE_FP8 == 2 ? s.x[i / 4 * 2 + i % 2] * (i % 4 < 2 ? s.upper : s.lower) : 1.0f;
        d[i] += part[i] * scale;
    }
}

__device__ inline void GemmBlock::multiply_scaled(float (&d)[TOKENS / 2], int pass) const {
    const int lane = threadIdx.x & 31, first = pass * n_units, team = threadIdx.x / TEAM;
    const int row = first_row(pass) + row_of(threadIdx.x % TEAM);
    int at_stage = first % a.n_stages, turn = first / a.n_stages;
    Scales later[CHUNKS];  // those of the next unit, as they come from far; for more tokens there are no registers
    if (EARLY_SCALES) load_scales_of(later, 0, row);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.0f;
    if (TEAMS > 1 && pass > 0) barrier_wait(order(team), (pass - 1) / TEAMS & 1);
    for (int unit = 0; unit < n_units; unit++) {
        const uint32_t w = stage(at_stage) + threadIdx.x % TEAM / 128 * 64 * 128;
        const uint32_t x = QUIRE_RESIDENT ? base + at.x + unit * CHUNKS * X_BYTES : stage(at_stage) + CHUNKS * W_BYTES;
        const int n = chunks_of(unit);
        float part[CHUNKS][TOKENS / 2];
        Scales scales[CHUNKS];
        if (EARLY_SCALES) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) scales[c] = later[c];
            load_scales_of(later, min(unit + 1, n_units - 1), row);
        } else {
            load_scales_of(scales, unit, row);
        }
        barrier_wait(full(at_stage), turn & 1);
        products_begin();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {  // of a last chunk that is not there something is multiplied, and not added
            const Operand left = rows_operand(w + c * W_BYTES), right = rows_operand(x + c * X_BYTES);
#pragma unroll
            for (int i = 0; i < 4; i++) product(part[c], left.further(32 * i), right.further(32 * i), i > 0);
        }
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) quire::pin(part[c]);
        if (lane == 0) barrier_arrive(empty(at_stage));
        if (unit + 1 == n_units && TEAMS > 1 && lane == 0) barrier_arrive(order((team + 1) % TEAMS));
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (c < n) add_scaled(d, part[c], scales[c]);
        }
        if (++at_stage == a.n_stages) at_stage = 0, turn++;
    }
}

__device__ inline void GemmBlock::multiply_pass(float (&d)[TOKENS / 2], int pass) const {
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

__device__ inline void GemmBlock::multiply_tile(float (&d)[TOKENS / 2], int pass) const {
    if (QUIRE_NIBBLES) {
        multiply_nibbles(d, pass);
    } else if (QUIRE_FP8) {
        multiply_scaled(d, pass);
    } else {
        multiply_pass(d, pass);
    }
}

#if QUIRE_CLUSTER == 1
__device__ inline void GemmBlock::pass(int index) const {
    const int t = OWN_ROWS ? threadIdx.x : threadIdx.x % TEAM, row = first_row(index) + row_of(t);
    float d[TOKENS / 2];
    Added added[QUADS] = {};
    if (finishes(index)) {
#pragma unroll
        for (int v = 0; v < QUADS; v++) added[v] = residual_quad(row, token_of(t, v));
    }
    multiply_tile(d, index);
    if (!finishes(index)) return;
    if (QUIRE_RESIDUAL) pin(added);
    if (QUIRE_PAIRED && t >= 32 * BLOCKS) return;
#pragma unroll
    for (int v = 0; v < QUADS; v++) store_quad(quad(d, v), added[v], row, token_of(t, v));
}
#else
// Of a tile a thread finishes OWN_QUADS quads of the thread `source` of all blocks' teams.
__device__ inline void GemmBlock::load_added(Added (&added)[OWN_QUADS], int index) const {
    const int t = threadIdx.x % TEAM, source = rank * SHARE + t % SHARE, row = first_row(index) + row_of(source);
#pragma unroll
    for (int i = 0; i < OWN_QUADS; i++) added[i] = residual_quad(row, token_of(source, t / SHARE + i * CLUSTER));
}

__device__ inline void GemmBlock::hand(const float (&d)[TOKENS / 2], int index) const {
    const int team = threadIdx.x / TEAM, turn = index / TEAMS;
    if (turn > 0) wait_cluster(shared_address(&barriers()->read[team]), (turn - 1) & 1);
    hand_over(d, team);
}

__device__ inline void GemmBlock::finish(const Added (&added)[OWN_QUADS], int index) const {
    const int team = threadIdx.x / TEAM, t = threadIdx.x % TEAM, slot = t % SHARE, source = rank * SHARE + slot;
    const int row = first_row(index) + row_of(source);
    wait_cluster(shared_address(&barriers()->sums[team]), index / TEAMS & 1);
#pragma unroll
    for (int i = 0; i < OWN_QUADS; i++) {
        const int v = t / SHARE + i * CLUSTER;
        if (v * 8 < a.m) store_quad(total(team, v, slot), added[i], row, token_of(source, v));
    }
    if (index + TEAMS >= n_passes) return;  // nobody hands anything over any more
    __syncwarp();
    if (t % 32 < CLUSTER) arrive_there(address_in(shared_address(&barriers()->read[team]), t % 32));
}

// Nibbles: a tile is finished after the team's part of the next one, while other blocks hand over theirs; so there is
// one pass more.
__device__ inline void GemmBlock::pass(int index) const {
    const int late = index - QUIRE_NIBBLES;
    const bool finishes_late = late >= 0 && finishes(late);
    float d[TOKENS / 2];
    Added added[OWN_QUADS] = {};
    if (finishes_late) load_added(added, late);
    if (index < n_passes) {
        multiply_tile(d, index);
        if (finishes(index)) hand(d, index);
    }
    if (!finishes_late) return;
    if (QUIRE_RESIDUAL) pin(added);
    finish(added, late);
}
#endif

__device__ inline void GemmBlock::work() const {
    if (QUIRE_RESIDENT) prepare_x();
#if QUIRE_ROUNDS
    round_x();
    if (CLUSTER > 1) cluster_wait();
#else
    wait_for_previous_grid();
    if (QUIRE_RESIDENT) stage_x();
    if (CLUSTER > 1) cluster_wait();
    if (QUIRE_NORM) norm_x();
#endif
    if (QUIRE_RESIDENT) {
        async_fence();
        named_sync(WORKERS_BARRIER, WORKERS);
    }
    constexpr int STEP = QUIRE_NIBBLES ? 1 : TEAMS;  // of nibbles all teams work at each tile
    const int end = n_passes + (QUIRE_NIBBLES && CLUSTER > 1);
    for (int index = STEP == 1 ? 0 : uniform(threadIdx.x / TEAM); index < end; index += STEP) pass(index);
}

}  // namespace quire
