// Products of few rows with codes of 4 bits: made to numbers in registers and multiplied by the warp (mma.m16n8k16, rows
// of w are the 16). Numbers are left as much too large as masks make them: what that adds to a sum is a multiple of the
// sum of x, which is known, and is taken away with the zero point, once in a group of columns. Both are at most 144 times the
// sum of |x| over 128 columns: in bf16 they overflow beyond 2.3e36 of that.
//
// A warpgroup takes every QUIRE_GROUPS-th chunk, each of its warps 32 rows by 128 columns: two blocks of 16 rows share
// what is read of x. When a tile is done, all hand their sums to the warpgroup whose turn it is to finish, and go on.
// Or (QUIRE_TURNS) these are the chunks of a tile of its own, and no warpgroup waits for another.
#pragma once
#include "gemm/block.h"
#include "gemm/codes.h"

namespace quire {

__device__ __forceinline__ float read_element(uint32_t address) { return low(read_two_bytes(address)); }

struct Scaling {  // of four rows, 8 apart
    float scale[4], point[4];
};
// line: of the scales of a chunk, or of a stage.
__device__ __forceinline__ Scaling read_scaling(uint32_t line) {
    Scaling s;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s.scale[i] = read_element(line + i * 16);
        s.point[i] = RAISED + (QUIRE_ZEROS ? read_element(line + ROWS * 2 + i * 16) : 8.0f);
    }
    return s;
}

__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }  // in its register

// Where a thread reads in stage 0 and of chunk 0: codes of each 64 columns, scales, x of each 32 columns, its sums. Found
// once: left to itself ptxas does it again for each chunk.
__device__ inline GemmBlock::Places GemmBlock::places() const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3, half = warp / 2, eighth = row_in_eight(lane);
    const int row = warp % 2 * 32 + eighth, last = (1 << a.token_bits) - 1;
    const uint32_t codes = stage(0) + row * 128 + lane % 2 * 8, cell = half * 4 + lane % 4 / 2;
    Places found = {{codes + (cell ^ eighth) * 16, codes + ((cell + 2) ^ eighth) * 16},
                    {x_cell(lane % 8 & last, half * 2, lane / 8), x_cell(lane % 8 & last, half * 2, 4 + lane / 8)},
                    x_sum(lane % 4 * 2 & last, half * (128 / ADDED_COLUMNS)),
                    scales(0) + (QUIRE_CHUNK_GROUPS == 1 ? 0 : half * PARTS * (1 + QUIRE_ZEROS) * ROWS * 2) + row * 2,
                    uint32_t(x_part(a)), uint32_t(x_sums_row(a)) * 4};
    keep(found.codes[0]), keep(found.codes[1]), keep(found.x[0]), keep(found.x[1]), keep(found.x_sums), keep(found.scales);
    return found;
}

// One chunk: of each block of 16 rows a thread has one and the one 8 below, 16 codes side by side of each 64.
__device__ inline void GemmBlock::multiply_codes(float (&d)[2][TOKENS / 2], const Places& from, int unit,
                                                 int stage_index) {
    constexpr int STEPS = 8 / PARTS, SUMS = 128 / PARTS / ADDED_COLUMNS;  // of 16 columns, and of x, of a part
    const uint32_t line = from.scales + stage_index * SCALE_BYTES;
    const uint32_t x_sums = from.x_sums + unit * (CHUNK / ADDED_COLUMNS) * from.x_sums_row;
    uint2 words[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) words[i / 4][i % 4] = read_pair(from.codes[i / 4] + stage_index * W_BYTES + i % 4 * 8 * 128);
    float part[2][TOKENS / 2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t x[QUADS][2][4];
#pragma unroll
        for (int v = 0; v < QUADS; v++) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                load_matrices(x[v][i], from.x[i] + (unit * X_CHUNKS + j) * from.x_part + v * 8 * 128);
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int step = j * 4 + s, nibble = s % 2 * 2, index = step / STEPS;
#pragma unroll
            for (int block = 0; block < 2; block++) {
                const uint2 upper = words[j][block * 2], lower = words[j][block * 2 + 1];
                const uint32_t above = s < 2 ? upper.x : upper.y, under = s < 2 ? lower.x : lower.y;
                const uint32_t left[4] = {raised(above, nibble), raised(under, nibble), raised(above, nibble + 1),
                                          raised(under, nibble + 1)};
#pragma unroll
                for (int v = 0; v < QUADS; v++) {
                    float(&sums)[4] = reinterpret_cast<float(&)[4]>(part[block][4 * v]);
                    if (step % STEPS == 0) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
                    multiply_add(sums, left, x[v][s / 2][s % 2 * 2], x[v][s / 2][s % 2 * 2 + 1]);
                }
            }
            if (step % STEPS < STEPS - 1) continue;
            const Scaling by = read_scaling(line + index * (1 + QUIRE_ZEROS) * ROWS * 2);
#pragma unroll
            for (int v = 0; v < QUADS; v++) {
                float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < SUMS; i++) {
                    const float2 more = read8(x_sums + (index * SUMS + i) * from.x_sums_row + v * 32);
                    sum.x += more.x, sum.y += more.y;
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float less = part[i / 4][4 * v + i % 4] - by.point[i / 2] * (i % 2 ? sum.y : sum.x);
                    d[i / 4][4 * v + i % 4] += by.scale[i / 2] * less;
                }
            }
        }
    }
}

// The sums of all warps come to the warpgroup that finishes, each of whose warps adds those of 16 rows in the order of
// the columns' places: [source][16 rows][quad][lane] in shared memory.
__device__ inline void GemmBlock::gather(float (&d)[TOKENS / 2], const float (&own)[2][TOKENS / 2], int pass) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 & 3, source = threadIdx.x / 128 * 2 + warp / 2;
    const int first_source = OWN_TILES ? threadIdx.x / 128 * 2 : 0, n_sources = OWN_TILES ? 2 : SOURCES;
    const uint32_t parts = base + at.group_parts + lane * 16;
    if (!OWN_TILES && pass > 0) barrier_wait(taken(), (pass - 1) & 1);
#pragma unroll
    for (int i = 0; i < 2 * QUADS; i++) {
        const float* q = &own[i / QUADS][i % QUADS * 4];
        write16(parts + ((source * 4 + warp % 2 * 2 + i / QUADS) * QUADS + i % QUADS) * 512,
                make_uint4(__float_as_uint(q[0]), __float_as_uint(q[1]), __float_as_uint(q[2]), __float_as_uint(q[3])));
    }
    if (OWN_TILES) {
        named_sync(TEAM_BARRIER + threadIdx.x / 128, 128);
    } else {
        __syncwarp();
        if (lane == 0) barrier_arrive(handed());
        if (!finishes(pass)) return;
        barrier_wait(handed(), pass & 1);
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < n_sources * QUADS; i++) {
        const int v = i % QUADS;
        const uint4 x = read16(parts + (((first_source + i / QUADS) * 4 + warp) * QUADS + v) * 512);
        d[4 * v] += __uint_as_float(x.x), d[4 * v + 1] += __uint_as_float(x.y);
        d[4 * v + 2] += __uint_as_float(x.z), d[4 * v + 3] += __uint_as_float(x.w);
    }
    if (OWN_TILES) {
        named_sync(TEAM_BARRIER + threadIdx.x / 128, 128);
    } else {
        __syncwarp();
        if (lane == 0) barrier_arrive(taken());
    }
}

__device__ inline void GemmBlock::multiply_nibbles(float (&d)[TOKENS / 2], int pass) const {
    const int lane = threadIdx.x & 31, first = pass * n_units;
    const Places from = places();
    float own[2][TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS; i++) own[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0.0f;
    const int team = uniform(threadIdx.x / 128);
    int unit = OWN_TILES ? 0 : (team + QUIRE_GROUPS - first % QUIRE_GROUPS) % QUIRE_GROUPS;
    const int item = OWN_TILES ? pass / QUIRE_GROUPS * QUIRE_GROUPS * n_units + team : first + unit;
    int at_stage = item % a.n_stages, turn = item / a.n_stages;
    for (; unit < n_units; unit += OWN_TILES ? 1 : QUIRE_GROUPS) {
        barrier_wait(full(at_stage), turn & 1);
        multiply_codes(own, from, unit, at_stage);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(at_stage));
        at_stage += QUIRE_GROUPS;
        if (at_stage >= a.n_stages) at_stage -= a.n_stages, turn++;  // a multiple of the groups
    }
    gather(d, own, pass);
}

}  // namespace quire
