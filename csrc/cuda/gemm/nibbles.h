// Products of few rows with codes of 4 bits: made to numbers in registers and multiplied by the warp (mma.m16n8k16, rows
// of w are the 16). Numbers are left as much too large as masks make them: what that adds to a sum is a multiple of the
// sum of x, a product with ones, and is taken away with the zero point, once in a group of columns. Both are at most 144
// times the sum of |x| over 128 columns: in bf16 they overflow beyond 2.3e36 of that.
//
// A warp takes 32 rows by 128 columns of a stage: two blocks of 16 rows share what is read of x. A warpgroup takes every
// QUIRE_GROUPS-th stage: 64 rows of one chunk, or (QUIRE_PAIRED) 32 rows of two. When a tile is done, all hand their sums
// to the warpgroup whose turn it is to finish, and go on. Or (QUIRE_TURNS) two warps take 32 rows of each stage, finish
// those, and wait for no others.
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

constexpr uint32_t ONES = QUIRE_BF16 ? 0x3F803F80u : 0x3C003C00u;
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }  // in its register

// Where a thread reads in stage 0 and of chunk 0: codes of each 64 columns, scales, x of each 32 columns, its sums. Found
// once: left to itself ptxas does it again for each chunk.
__device__ inline GemmBlock::Places GemmBlock::places() const {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x % TEAM) / 32, eighth = row_in_eight(lane);
    const int half = warp % 2, chunk = warp % BESIDE / 2;
    const int row = (OWN_ROWS ? threadIdx.x / TEAM : warp / BESIDE) * 32 + eighth, part = chunk * X_CHUNKS + half * 2;
    const uint32_t codes = stage(0) + chunk * W_BYTES + row * 128 + lane % 2 * 8, cell = half * 4 + lane % 4 / 2;
    const int line = chunk * SCALE_LINES + (QUIRE_CHUNK_GROUPS == 1 ? 0 : half * PARTS * (1 + QUIRE_ZEROS));
    Places found = {{codes + (cell ^ eighth) * 16, codes + ((cell + 2) ^ eighth) * 16},
                    {x_cell(lane % 8, part, lane / 8), x_cell(lane % 8, part, 4 + lane / 8)},
                    scales(0) + (line * ROWS + row) * 2};
    keep(found.codes[0]), keep(found.codes[1]), keep(found.x[0]), keep(found.x[1]), keep(found.scales);
    return found;
}

// One chunk: of each block of 16 rows a thread has one and the one 8 below, 16 codes side by side of each 64.
__device__ inline void GemmBlock::multiply_codes(float (&d)[2][TOKENS / 2], const Places& from, int stage_index) {
    constexpr int STEPS = 8 / PARTS;  // of 16 columns, of a part
    const uint32_t line = from.scales + stage_index * SCALE_STEP, stage = stage_index * STAGE_BYTES;
    uint2 words[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) words[i / 4][i % 4] = read_pair(from.codes[i / 4] + stage + i % 4 * 8 * 128);
    float part[2][TOKENS / 2], added[QUADS][4];  // added: sums of x, by ones, in all rows of a product
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t x[QUADS][2][4];
#pragma unroll
        for (int v = 0; v < QUADS; v++) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                load_matrices(x[v][i], from.x[i] + stage + j * X_PART + v * 8 * 128);
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
#pragma unroll
            for (int v = 0; v < QUADS; v++) {
                if (step % STEPS == 0) added[v][0] = added[v][1] = added[v][2] = added[v][3] = 0.0f;
                multiply_add(added[v], {ONES, ONES, ONES, ONES}, x[v][s / 2][s % 2 * 2], x[v][s / 2][s % 2 * 2 + 1]);
            }
            if (step % STEPS < STEPS - 1) continue;
            const Scaling by = read_scaling(line + index * (1 + QUIRE_ZEROS) * ROWS * 2);
#pragma unroll
            for (int v = 0; v < QUADS; v++) {
                for (int i = 0; i < 8; i++) {
                    const float less = part[i / 4][4 * v + i % 4] - by.point[i / 2] * added[v][i % 2];
                    d[i / 4][4 * v + i % 4] += by.scale[i / 2] * less;
                }
            }
        }
    }
}

// The sums of all warps come to the team that finishes, each of whose warps adds those of 16 rows in the order of the
// columns' places: [source][16 rows][quad][lane] in shared memory.
__device__ inline void GemmBlock::gather(float (&d)[TOKENS / 2], const float (&own)[2][TOKENS / 2], int pass) const {
    const int lane = threadIdx.x & 31, team = threadIdx.x / TEAM, warp = (threadIdx.x % TEAM) / 32;
    const int source = (OWN_ROWS ? 0 : team * BESIDE) + warp % BESIDE, first_block = warp / BESIDE * 2;
    const uint32_t parts = base + at.group_parts + (OWN_ROWS ? team * SOURCES * BLOCKS * QUADS * 512 : 0) + lane * 16;
    if (!OWN_ROWS && pass > 0) barrier_wait(taken(), (pass - 1) & 1);
#pragma unroll
    for (int i = 0; i < 2 * QUADS; i++) {
        const float* q = &own[i / QUADS][i % QUADS * 4];
        write16(parts + ((source * BLOCKS + first_block + i / QUADS) * QUADS + i % QUADS) * 512,
                make_uint4(__float_as_uint(q[0]), __float_as_uint(q[1]), __float_as_uint(q[2]), __float_as_uint(q[3])));
    }
    if (OWN_ROWS) {
        named_sync(TEAM_BARRIER + team, TEAM);
    } else {
        __syncwarp();
        if (lane == 0) barrier_arrive(handed());
        if (!finishes(pass)) return;
        barrier_wait(handed(), pass & 1);
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < SOURCES * QUADS; i++) {
        const int v = i % QUADS;
        const uint4 x = read16(parts + ((i / QUADS * BLOCKS + warp % BLOCKS) * QUADS + v) * 512);
        d[4 * v] += __uint_as_float(x.x), d[4 * v + 1] += __uint_as_float(x.y);
        d[4 * v + 2] += __uint_as_float(x.z), d[4 * v + 3] += __uint_as_float(x.w);
    }
    if (OWN_ROWS) {
        named_sync(TEAM_BARRIER + team, TEAM);
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
    const int team = uniform(threadIdx.x / TEAM);
    constexpr int STEP = OWN_ROWS ? 1 : QUIRE_GROUPS;
    int unit = OWN_ROWS ? 0 : (team + STEP - first % STEP) % STEP;
    int at_stage = (first + unit) % a.n_stages, turn = (first + unit) / a.n_stages;
    for (; unit < n_units; unit += STEP) {
        barrier_wait(full(at_stage), turn & 1);
        if (CHUNKS == 1 || threadIdx.x % 128 / 64 < chunks_of(unit)) multiply_codes(own, from, at_stage);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(at_stage));
        at_stage += STEP;
        if (at_stage >= a.n_stages) at_stage -= a.n_stages, turn++;  // a multiple of the step
    }
    gather(d, own, pass);
}

}  // namespace quire
