// What the keys of a piece do to one another in the gated delta rule: `solve_pieces` of quire/kernels/state/triton/delta.py
// says the same in Triton. Hopper; QUIRE_BF16 0 or 1; keys of 128, pieces of 64 rows.
//
// A block has a piece and a key head: its products of keys and of queries with keys serve all value heads. A warp has 16
// rows, columns up to its own. The inverse of the triangle 1 + L goes by blocks of 16: those on the diagonal by
// substitution, a column a lane; then, as X = (1 + L)^-1 has X_ij = -X_ii sum_k L_ik X_kj, k from j to i - 1, warp after
// warp. Factors there are two numbers of 16 bits, of which the second is what the first leaves.
#include "cells.h"
#include "launch.h"

struct QuireSolveArgs {        // _SolveArgs in quire/kernels/state/hopper.py
    const void *q, *k, *a, *b;
    const float *a_log, *dt_bias;
    void *solved, *seen;       // [n_pieces, heads, 64, 64]
    float* scales;             // [n_pieces, heads, 4, 64]
    const int32_t* row_ptr;
    int64_t q_row, k_row, a_row, b_row;  // strides in elements
    int32_t n_pieces, key_heads, per_key;
    float scale;
};

namespace quire {
namespace {

constexpr int D = 128, L = 64, WARPS = 4, THREADS = 32 * WARPS, SIDE = 16, PAIR = 2;  // PAIR: value heads at once
constexpr int ROW_BYTES = 2 * D + 16, X_BYTES = 2 * L + 16;  // of shared memory: matrices of 8 rows meet no bank twice
constexpr int TILES = L / 8;
constexpr float EPS = 1e-6f;

struct Shared {
    union {
        struct {
            char keys[L * ROW_BYTES], queries[L * ROW_BYTES];
        } rows;
        char inverse[PAIR][2][L * X_BYTES];  // high and low parts of X
    };
    float diagonal[PAIR][WARPS][SIDE][SIDE + 4];
    float total[PAIR][L], beta[PAIR][L], of_key[L], of_query[L];
};

struct Parts {  // of two numbers
    uint32_t high, low;
};
__device__ __forceinline__ Parts parts_of(float x, float y) {
    const uint32_t high = pack(x, y);
    const float2 near = widen(high);
    return {high, pack(x - near.x, y - near.y)};
}
struct Left {  // of a product [16 x 16] [16 x 16]
    uint32_t high[4], low[4];
};
__device__ __forceinline__ void set(Left& left, int i, float x, float y) {
    const Parts parts = parts_of(x, y);
    left.high[i] = parts.high, left.low[i] = parts.low;
}
__device__ __forceinline__ void multiply_parts(float (&d)[4], const Left& a, const uint32_t (&high)[2],
                                               const uint32_t (&low)[2]) {
    multiply_add(d, a.high, high[0], high[1]);
    multiply_add(d, a.high, low[0], low[1]);
    multiply_add(d, a.low, high[0], high[1]);
}

// Logarithms of what a state keeps up to each row, and weights, of one value head; two rows a lane.
__device__ __forceinline__ void gates(const QuireSolveArgs& args, int first, int n_rows, int head, int lane, float* total,
                                      float* beta) {
    const float rate = -__expf(args.a_log[head]), bias = args.dt_bias[head];
    float x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 2 * lane + i;
        float step = 0.f, weight = 0.f;
        if (row < n_rows) {
            const uint16_t a = static_cast<const uint16_t*>(args.a)[(first + row) * args.a_row + head];
            const uint16_t b = static_cast<const uint16_t*>(args.b)[(first + row) * args.b_row + head];
            const float z = widen(a).x + bias;
            step = z > 20.f ? z : log1pf(__expf(z));
            weight = __fdividef(1.f, 1.f + __expf(-widen(b).x));
        }
        x[i] = step * rate, beta[row] = weight;
    }
    float sum = x[0] + x[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float more = __int_as_float(__shfl_up_sync(~0u, __float_as_int(sum), step));
        if (lane >= step) sum += more;
    }
    total[2 * lane] = sum - x[1], total[2 * lane + 1] = sum;
}

__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float squares(uint32_t pair) {
    const float2 x = widen(pair);
    return x.x * x.x + x.y * x.y;
}

// Row `row` of the piece's products of keys, and of queries with keys, up to the warp's own columns; 1 / lengths.
__device__ __forceinline__ void multiply(Shared& shared, const QuireSolveArgs& args, int warp, int lane,
                                         float (&alike)[TILES][4], float (&asked)[TILES][4]) {
    const uint32_t keys = shared_address(shared.rows.keys), queries = shared_address(shared.rows.queries);
    const uint32_t own = (warp * SIDE + lane % 16) * ROW_BYTES + lane / 16 * 16;
    const uint32_t other = (lane / 16 * 8 + lane % 8) * ROW_BYTES + lane / 8 % 2 * 16;
    float of_keys[2] = {}, of_queries[2] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint32_t key[4], query[4];
        load_matrices(key, keys + own + k * 32);
        load_matrices(query, queries + own + k * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) of_keys[i % 2] += squares(key[i]), of_queries[i % 2] += squares(query[i]);
#pragma unroll
        for (int block = 0; block < WARPS; ++block) {
            if (block <= warp) {
                uint32_t columns[4];
                load_matrices(columns, keys + block * SIDE * ROW_BYTES + other + k * 32);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    multiply_add(alike[2 * block + i], key, columns[2 * i], columns[2 * i + 1]);
                    multiply_add(asked[2 * block + i], query, columns[2 * i], columns[2 * i + 1]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float key = rsqrtf(sum_of_four(of_keys[i]) + EPS), query = rsqrtf(sum_of_four(of_queries[i]) + EPS);
        const int row = warp * SIDE + lane / 4 + 8 * i;
        if (lane % 4 == 0) shared.of_key[row] = key, shared.of_query[row] = query * args.scale;
    }
}

// The warp's rows of `seen`, to memory; of L, on the diagonal to shared memory, left of it in `lower`, negative.
__device__ __forceinline__ void weigh(Shared& shared, int h, uint32_t* seen, int warp, int lane,
                                      const float (&alike)[TILES][4], const float (&asked)[TILES][4],
                                      Parts (&lower)[TILES - 2][2]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp * SIDE + lane / 4 + 8 * half, column = tile * 8 + lane % 4 * 2;
            float x[2] = {}, y[2] = {};
            if (tile <= 2 * warp + 1) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int other = column + i;
                    const float falls = other <= row ? __expf(shared.total[h][row] - shared.total[h][other]) : 0.f;
                    const float weight = falls * shared.of_key[other];
                    x[i] = other < row ? alike[tile][2 * half + i] * weight * shared.beta[h][row] * shared.of_key[row] : 0.f;
                    y[i] = asked[tile][2 * half + i] * weight * shared.of_query[row];
                }
            }
            seen[(row * L + column) / 2] = pack(y[0], y[1]);
            if (tile < 2 * warp) {
                if (tile < TILES - 2) lower[tile][half] = parts_of(-x[0], -x[1]);
            } else if (tile <= 2 * warp + 1) {
                float* to = &shared.diagonal[h][warp][lane / 4 + 8 * half][(tile - 2 * warp) * 8 + lane % 4 * 2];
                to[0] = x[0], to[1] = x[1];
            }
        }
    }
}

// Columns of (1 + L)^-1 of the warp's block on the diagonal: a lane has one, 16 lanes a head. In place.
__device__ __forceinline__ void substitute(Shared& shared, int warp, int lane) {
    float(&block)[SIDE][SIDE + 4] = shared.diagonal[lane / 16][warp];
    float x[SIDE];
    const int column = lane % 16;
#pragma unroll
    for (int row = 0; row < SIDE; ++row) {
        x[row] = row == column ? 1.f : 0.f;
#pragma unroll
        for (int k = 0; k < row; ++k) x[row] -= block[row][k] * x[k];
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < SIDE; ++row) block[row][column] = x[row];
    __syncwarp();
}

// Blocks X_warp,j left of the diagonal once those above are known; all of them times weights to memory.
struct Inverse {
    Left factors[WARPS - 1];  // -X_ii L_ik

    __device__ __forceinline__ void prepare(Shared& shared, int h, int warp, int lane, const Parts (&lower)[TILES - 2][2]) {
        const float(&block)[SIDE][SIDE + 4] = shared.diagonal[h][warp];
        Left own;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* from = &block[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
            set(own, i, from[0], from[1]);
            keep(shared, h, warp * SIDE + lane / 4 + i % 2 * 8, warp * SIDE + lane % 4 * 2 + i / 2 * 8, from[0], from[1]);
        }
#pragma unroll
        for (int k = 0; k < WARPS - 1; ++k) {
            if (k < warp) {
                float sums[2][4] = {};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const Parts(&both)[2] = lower[2 * k + i];
                    const uint32_t high[] = {transpose_matrix(both[0].high), transpose_matrix(both[1].high)};
                    const uint32_t low[] = {transpose_matrix(both[0].low), transpose_matrix(both[1].low)};
                    multiply_parts(sums[i], own, high, low);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) set(factors[k], i, sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
            }
        }
    }
    __device__ static __forceinline__ void keep(Shared& shared, int h, int row, int column, float x, float y) {
        const Parts parts = parts_of(x, y);
        *reinterpret_cast<uint32_t*>(shared.inverse[h][0] + row * X_BYTES + column * 2) = parts.high;
        *reinterpret_cast<uint32_t*>(shared.inverse[h][1] + row * X_BYTES + column * 2) = parts.low;
    }
    __device__ __forceinline__ void finish(Shared& shared, int h, int warp, int lane) const {
        const uint32_t high_at = shared_address(shared.inverse[h][0]), low_at = shared_address(shared.inverse[h][1]);
#pragma unroll
        for (int j = 0; j < WARPS - 1; ++j) {
            float sums[2][4] = {};
            if (j >= warp) continue;
#pragma unroll
            for (int k = 0; k < WARPS - 1; ++k) {
                if (k >= j && k < warp) {
                    const uint32_t at = (k * SIDE + lane % 16) * X_BYTES + j * SIDE * 2 + lane / 16 * 16;
                    uint32_t high[4], low[4];
                    load_matrices_transposed(high, high_at + at);
                    load_matrices_transposed(low, low_at + at);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint32_t high_pair[] = {high[2 * i], high[2 * i + 1]};
                        const uint32_t low_pair[] = {low[2 * i], low[2 * i + 1]};
                        multiply_parts(sums[i], factors[k], high_pair, low_pair);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = warp * SIDE + lane / 4 + i % 2 * 8, column = j * SIDE + lane % 4 * 2 + i / 2 * 8;
                keep(shared, h, row, column, sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
            }
        }
    }
};

__global__ void __launch_bounds__(THREADS, 3) solve_kernel(const __grid_constant__ QuireSolveArgs args) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    let_next_grid_start();
    wait_for_previous_grid();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key_head = blockIdx.x, heads = args.key_heads * args.per_key;
    const int64_t piece = blockIdx.y;
    const int first = load_here(args.row_ptr + piece), n_rows = load_here(args.row_ptr + piece + 1) - first;
#pragma unroll
    for (int i = 0; i < 2 * L * D / WIDTH / THREADS; ++i) {
        const int cell = i * THREADS + threadIdx.x, row = cell / (D / WIDTH) % L, at = cell % (D / WIDTH);
        const bool is_query = cell >= L * D / WIDTH, is_row = row < n_rows;
        const int64_t from = (first + (is_row ? row : 0)) * (is_query ? args.q_row : args.k_row) + key_head * D + at * WIDTH;
        const Element* base = static_cast<const Element*>(is_query ? args.q : args.k);
        char* to = is_query ? shared.rows.queries : shared.rows.keys;
        copy_16_bytes(shared_address(to + row * ROW_BYTES + at * 16), base + from, is_row);
    }
    float alike[TILES][4] = {}, asked[TILES][4] = {};
    for (int pair = 0; pair < args.per_key; pair += PAIR) {
        if (warp < PAIR && pair + warp < args.per_key)
            gates(args, first, n_rows, key_head * args.per_key + pair + warp, lane, shared.total[warp], shared.beta[warp]);
        if (pair == 0) {
            copies_wait();
            __syncthreads();
            multiply(shared, args, warp, lane, alike, asked);
        }
        __syncthreads();
        const int n = min(PAIR, args.per_key - pair);
        const int64_t tile = piece * heads + key_head * args.per_key + pair;
        Parts lower[PAIR][TILES - 2][2];
#pragma unroll
        for (int h = 0; h < PAIR; ++h) {
            if (h >= n) continue;
            uint32_t* seen = reinterpret_cast<uint32_t*>(static_cast<Element*>(args.seen) + (tile + h) * L * L);
            weigh(shared, h, seen, warp, lane, alike, asked, lower[h]);
            if (threadIdx.x < L) {
                const int row = threadIdx.x;
                float* scales = args.scales + (tile + h) * 4 * L;
                const float total = shared.total[h][row], last = shared.total[h][L - 1];
                scales[row] = shared.of_key[row] * __expf(total);
                scales[L + row] = shared.of_query[row] * __expf(total);
                scales[2 * L + row] = shared.of_key[row] * __expf(last - total);
                if (row == 0) scales[3 * L] = __expf(last);
            }
        }
        __syncwarp();
        substitute(shared, warp, lane);
        Inverse inverse[PAIR];
#pragma unroll
        for (int h = 0; h < PAIR; ++h) {
            if (h < n) inverse[h].prepare(shared, h, warp, lane, lower[h]);
        }
        for (int turn = 1; turn < WARPS; ++turn) {
            __syncthreads();
#pragma unroll
            for (int h = 0; h < PAIR; ++h) {
                if (turn == warp && h < n) inverse[h].finish(shared, h, warp, lane);
            }
        }
        __syncwarp();
#pragma unroll
        for (int h = 0; h < PAIR; ++h) {
            if (h >= n) continue;
            uint32_t* solved = reinterpret_cast<uint32_t*>(static_cast<Element*>(args.solved) + (tile + h) * L * L);
#pragma unroll
            for (int i = 0; i < SIDE; ++i) {  // a row a warp's turn, two columns a lane
                const int row = warp * SIDE + i, column = 2 * lane;
                float2 x = make_float2(0.f, 0.f);
                if (column / SIDE <= warp) {
                    const int at = row * X_BYTES + column * 2;
                    const float2 high = widen(*reinterpret_cast<const uint32_t*>(shared.inverse[h][0] + at));
                    const float2 low = widen(*reinterpret_cast<const uint32_t*>(shared.inverse[h][1] + at));
                    x = make_float2(high.x + low.x, high.y + low.y);
                }
                solved[row * L / 2 + lane] = pack(x.x * shared.beta[h][column], x.y * shared.beta[h][column + 1]);
            }
        }
        __syncthreads();
    }
}

}  // namespace
}  // namespace quire

extern "C" int quire_solve(const QuireSolveArgs* args, void* stream) {
    using namespace quire;
    if (args->n_pieces > 65535) return cudaErrorInvalidValue;
    const dim3 grid(args->key_heads, args->n_pieces);
    return launch(solve_kernel, grid, THREADS, sizeof(Shared), stream, *args);
}
