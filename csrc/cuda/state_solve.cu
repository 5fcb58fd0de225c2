// What the keys of a piece do to one another in the gated delta rule: `solve_pieces` of
// quire/kernels/state/triton/delta.py says the same in Triton. Hopper; QUIRE_BF16 0 or 1; keys of 128, pieces of 64
// rows.
//
// A block has a piece and two value heads of one key head, which share products of keys, and of queries, with keys. A
// warp has 16 rows, columns up to its own. The inverse of the triangle 1 + L goes by blocks of 16: those on the
// diagonal by substitution, a column a lane; then, as X = (1 + L)^-1 has X_ij = -X_ii sum_k L_ik X_kj, k from j to
// i - 1, warp after warp. Factors there are two numbers of 16 bits, of which the second is what the first leaves. L
// lies where X will be.
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

constexpr int D = 128, L = 64, WARPS = 4, THREADS = 32 * WARPS, SIDE = 16, PAIR = 2;  // PAIR: value heads of a block
constexpr int ROW_BYTES = 2 * D + 16, X_BYTES = 2 * L + 16;  // of shared memory: matrices of 8 rows meet no bank twice
constexpr int TILES = L / 8;
constexpr float EPS = 1e-6f;

struct Shared {
    union {
        struct {
            char keys[L * ROW_BYTES], queries[L * ROW_BYTES];
        } rows;
        char inverse[PAIR][2][L * X_BYTES];  // high and low parts of -L, then of X
    };
    float diagonal[PAIR][WARPS][SIDE][SIDE + 4];
    float total[PAIR][L], beta[PAIR][L], of_key[L], of_query[L];  // total: times log2(e)
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
// Logarithms of what a state keeps up to each row, and weights, of one value head; two rows a lane.
__device__ __forceinline__ void gates(const QuireSolveArgs& args, int first, int n_rows, int head, int lane,
                                      float* total, float* beta) {
    const float rate = -LOG2E * __expf(args.a_log[head]), bias = args.dt_bias[head];
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

// Products of the warp's rows of keys, and of queries, with keys, up to its own columns. Then 1 / lengths of both, from
// the diagonals of products with themselves.
__device__ __forceinline__ void multiply(Shared& shared, float scale, int warp, int lane, float (&alike)[TILES][4],
                                         float (&asked)[TILES][4]) {
    const uint32_t keys = shared_address(shared.rows.keys), queries = shared_address(shared.rows.queries);
    const uint32_t own = (warp * SIDE + lane % 16) * ROW_BYTES + lane / 16 * 16;
    const uint32_t other = (lane / 16 * 8 + lane % 8) * ROW_BYTES + lane / 8 % 2 * 16;
    float squares[2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint32_t key[4], query[4], columns[4];
        load_matrices(key, keys + own + k * 32);
        load_matrices(query, queries + own + k * 32);
#pragma unroll
        for (int block = 0; block < WARPS; ++block) {
            if (block <= warp) {
                load_matrices(columns, keys + block * SIDE * ROW_BYTES + other + k * 32);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    multiply_add(alike[2 * block + i], key, columns[2 * i], columns[2 * i + 1]);
                    multiply_add(asked[2 * block + i], query, columns[2 * i], columns[2 * i + 1]);
                }
            }
        }
        load_matrices(columns, queries + warp * SIDE * ROW_BYTES + other + k * 32);
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_add(squares[i], query, columns[2 * i], columns[2 * i + 1]);
    }
#pragma unroll
    for (int block = 0; block < WARPS; ++block) {
        if (block != warp) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the lane whose columns are those of its rows
            if (lane % 4 != lane / 8) continue;
            const int row = warp * SIDE + lane / 4 + 8 * half, i = 2 * half;
            const bool odd = lane / 4 % 2;
            const float key = odd ? alike[2 * block + half][i + 1] : alike[2 * block + half][i];
            const float query = odd ? squares[half][i + 1] : squares[half][i];
            shared.of_key[row] = rsqrtf(key + EPS), shared.of_query[row] = rsqrtf(query + EPS) * scale;
        }
    }
}

// Both of unit rows; queries scaled.
__device__ __forceinline__ void normalise(const Shared& shared, int warp, int lane, float (&alike)[TILES][4],
                                          float (&asked)[TILES][4]) {
    const int row = warp * SIDE + lane / 4;
    const float keys[] = {shared.of_key[row], shared.of_key[row + 8]};
    const float queries[] = {shared.of_query[row], shared.of_query[row + 8]};
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        if (tile > 2 * warp + 1) continue;
        const float2 others = *reinterpret_cast<const float2*>(&shared.of_key[tile * 8 + lane % 4 * 2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = i % 2 ? others.y : others.x;
            alike[tile][i] *= keys[i / 2] * other, asked[tile][i] *= queries[i / 2] * other;
        }
    }
}

__device__ __forceinline__ void keep(Shared& shared, int h, int row, int column, float x, float y) {
    const Parts parts = parts_of(x, y);
    *reinterpret_cast<uint32_t*>(shared.inverse[h][0] + row * X_BYTES + column * 2) = parts.high;
    *reinterpret_cast<uint32_t*>(shared.inverse[h][1] + row * X_BYTES + column * 2) = parts.low;
}

// The warp's rows of `seen`, to memory; of L, on the diagonal, and of -L left of it.
__device__ __forceinline__ void weigh(Shared& shared, int h, uint32_t* seen, int warp, int lane,
                                      const float (&alike)[TILES][4], const float (&asked)[TILES][4]) {
    const int row = warp * SIDE + lane / 4;
    const float totals[] = {shared.total[h][row], shared.total[h][row + 8]};
    const float weights[] = {shared.beta[h][row], shared.beta[h][row + 8]};
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int column = tile * 8 + lane % 4 * 2;
        float x[4] = {}, y[4] = {};
        if (tile <= 2 * warp + 1) {
            const float2 others = *reinterpret_cast<const float2*>(&shared.total[h][column]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int before = row + i / 2 * 8 - column - i % 2;  // rows between
                const float falls = exp2_fast(fminf(totals[i / 2] - (i % 2 ? others.y : others.x), 0.f));
                x[i] = before > 0 ? alike[tile][i] * falls * weights[i / 2] : 0.f;
                y[i] = before >= 0 ? asked[tile][i] * falls : 0.f;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = row + 8 * half;
            seen[(at * L + column) / 2] = pack(y[2 * half], y[2 * half + 1]);
            if (tile < 2 * warp) {
                keep(shared, h, at, column, -x[2 * half], -x[2 * half + 1]);
            } else if (tile <= 2 * warp + 1) {
                float* to = &shared.diagonal[h][warp][lane / 4 + 8 * half][(tile - 2 * warp) * 8 + lane % 4 * 2];
                *reinterpret_cast<float2*>(to) = make_float2(x[2 * half], x[2 * half + 1]);
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

// A block [16 x 16] of -L, or of X, as the right side of a product.
struct Right {
    uint32_t high[4], low[4];

    __device__ __forceinline__ void load(const Shared& shared, int h, int row_block, int column_block, int lane) {
        const int at = (row_block * SIDE + lane % 16) * X_BYTES + column_block * SIDE * 2 + lane / 16 * 16;
        load_matrices_transposed(high, shared_address(shared.inverse[h][0]) + at);
        load_matrices_transposed(low, shared_address(shared.inverse[h][1]) + at);
    }
};
__device__ __forceinline__ void multiply_parts(float (&sums)[2][4], const Left& a, const Right& b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        multiply_add(sums[i], a.high, b.high[2 * i], b.high[2 * i + 1]);
        multiply_add(sums[i], a.high, b.low[2 * i], b.low[2 * i + 1]);
        multiply_add(sums[i], a.low, b.high[2 * i], b.high[2 * i + 1]);
    }
}

// Blocks X_warp,j: the one on the diagonal, then those left of it once those above are known.
struct Inverse {
    Left factors[WARPS - 1];  // -X_ii L_ik

    __device__ __forceinline__ void prepare(Shared& shared, int h, int warp, int lane) {
        const float(&block)[SIDE][SIDE + 4] = shared.diagonal[h][warp];
        Left own;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
            const float2 x = *reinterpret_cast<const float2*>(&block[row][column]);
            set(own, i, x.x, x.y);
            keep(shared, h, warp * SIDE + row, warp * SIDE + column, x.x, x.y);
        }
#pragma unroll
        for (int k = 0; k < WARPS - 1; ++k) {
            if (k >= warp) continue;
            float sums[2][4] = {};
            Right right;
            right.load(shared, h, warp, k, lane);
            multiply_parts(sums, own, right);
#pragma unroll
            for (int i = 0; i < 4; ++i) set(factors[k], i, sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
        }
    }
    __device__ __forceinline__ void finish(Shared& shared, int h, int warp, int lane) const {
#pragma unroll
        for (int j = 0; j < WARPS - 1; ++j) {
            if (j >= warp) continue;
            float sums[2][4] = {};
#pragma unroll
            for (int k = j; k < WARPS - 1; ++k) {
                if (k >= warp) continue;
                Right right;
                right.load(shared, h, k, j, lane);
                multiply_parts(sums, factors[k], right);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = warp * SIDE + lane / 4 + i % 2 * 8, column = j * SIDE + lane % 4 * 2 + i / 2 * 8;
                keep(shared, h, row, column, sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
            }
        }
    }
};

__global__ void __launch_bounds__(THREADS, 4) solve_kernel(const __grid_constant__ QuireSolveArgs args) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    let_next_grid_start();
    wait_for_previous_grid();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n_pairs = (args.per_key + PAIR - 1) / PAIR, key_head = blockIdx.x / n_pairs;
    const int pair = blockIdx.x % n_pairs * PAIR, n = min(PAIR, args.per_key - pair);
    const int head = key_head * args.per_key + pair, heads = args.key_heads * args.per_key;
    const int64_t piece = blockIdx.y;
    const int first = load_here(args.row_ptr + piece), n_rows = load_here(args.row_ptr + piece + 1) - first;
#pragma unroll
    for (int i = 0; i < 2 * L * D / WIDTH / THREADS; ++i) {
        const int cell = i * THREADS + threadIdx.x, row = cell / (D / WIDTH) % L, at = cell % (D / WIDTH);
        const bool is_query = cell >= L * D / WIDTH, is_row = row < n_rows;
        const int64_t row_at = (first + (is_row ? row : 0)) * (is_query ? args.q_row : args.k_row);
        const Element* base = static_cast<const Element*>(is_query ? args.q : args.k);
        char* to = is_query ? shared.rows.queries : shared.rows.keys;
        const Element* from = base + row_at + key_head * D + at * WIDTH;
        copy_16_bytes(shared_address(to + row * ROW_BYTES + at * 16), from, is_row);
    }
    if (warp < n) gates(args, first, n_rows, head + warp, lane, shared.total[warp], shared.beta[warp]);
    float alike[TILES][4] = {}, asked[TILES][4] = {};
    copies_wait();
    __syncthreads();
    multiply(shared, args.scale, warp, lane, alike, asked);
    __syncthreads();
    normalise(shared, warp, lane, alike, asked);
    const int64_t tile = piece * heads + head;
    for (int h = 0; h < n; ++h) {
        uint32_t* seen = reinterpret_cast<uint32_t*>(static_cast<Element*>(args.seen) + (tile + h) * L * L);
        weigh(shared, h, seen, warp, lane, alike, asked);
    }
    for (int i = threadIdx.x; i < n * L; i += THREADS) {
        const int h = i / L, row = i % L;
        float* scales = args.scales + (tile + h) * 4 * L;
        const float total = shared.total[h][row], last = shared.total[h][L - 1];
        scales[row] = shared.of_key[row] * exp2_fast(total);
        scales[L + row] = shared.of_query[row] * exp2_fast(total);
        scales[2 * L + row] = shared.of_key[row] * exp2_fast(last - total);
        if (row == 0) scales[3 * L] = exp2_fast(last);
    }
    __syncwarp();
    substitute(shared, warp, lane);
    Inverse inverse[PAIR];
#pragma unroll
    for (int h = 0; h < PAIR; ++h) {
        if (h < n) inverse[h].prepare(shared, h, warp, lane);
    }
    for (int turn = 1; turn < WARPS; ++turn) {
        __syncthreads();
#pragma unroll
        for (int h = 0; h < PAIR; ++h) {
            if (turn == warp && h < n) inverse[h].finish(shared, h, warp, lane);
        }
    }
    __syncwarp();
    for (int h = 0; h < n; ++h) {
        uint32_t* solved = reinterpret_cast<uint32_t*>(static_cast<Element*>(args.solved) + (tile + h) * L * L);
        const float2 weights = *reinterpret_cast<const float2*>(&shared.beta[h][2 * lane]);
#pragma unroll 4
        for (int row = warp * SIDE; row < (warp + 1) * SIDE; ++row) {  // two columns a lane
            const char* from = shared.inverse[h][0] + row * X_BYTES + lane * 4;
            float2 x = make_float2(0.f, 0.f);
            if (2 * lane / SIDE <= warp) {
                const float2 high = widen(*reinterpret_cast<const uint32_t*>(from));
                const float2 low = widen(*reinterpret_cast<const uint32_t*>(from + L * X_BYTES));
                x = make_float2((high.x + low.x) * weights.x, (high.y + low.y) * weights.y);
            }
            solved[row * L / 2 + lane] = pack(x.x, x.y);
        }
    }
}

}  // namespace
}  // namespace quire

extern "C" int quire_solve(const QuireSolveArgs* args, void* stream) {
    using namespace quire;
    if (args->n_pieces > 65535) return cudaErrorInvalidValue;
    const dim3 grid(args->key_heads * ((args->per_key + PAIR - 1) / PAIR), args->n_pieces);
    return launch(solve_kernel, grid, THREADS, sizeof(Shared), stream, *args);
}
