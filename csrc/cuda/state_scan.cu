// The gated delta rule over the pieces of prompts, of what state_solve.cu left: `scan_pieces` of
// quire/kernels/state/triton/delta.py says the same in Triton. Hopper; QUIRE_BF16 0 or 1; keys of 128, pieces of 64
// rows.
//
// A block has a span, a head and 32 or 64 of its values: 16 for each warp of the chain. All is transposed: a warp has
// 16 values' columns of the state as sums of the matrix instruction, which are also how its left side lies. So the
// state never leaves registers:
//
//   known [16, rows] = S K^T        errors = v - known, scaled        wrote = errors T^T        S = S decay + wrote K
//
// Beside each a warp computes what comes out, y = S Q^T + wrote A^T, of copies of S and wrote; it may be a piece
// behind. Four warps fetch pieces ahead. Blocks of 64 use the chip better where they fill it, those of 32 are done
// sooner. Rows behind a piece's last are zeros in every operand.
#include "cells.h"
#include "launch.h"
#include "shared_memory.h"

struct QuireScanArgs {         // _ScanArgs in quire/kernels/state/hopper.py
    const void *q, *k, *v;
    const void *solved, *seen; // [n_pieces, heads, 64, 64]
    const float* scales;       // [n_pieces, heads, 4, 64]
    float* state;              // [n_lines, heads, 128, e]
    void* out;                 // contiguous
    const int32_t *lines, *fresh, *piece_ptr, *row_ptr, *keep;
    int64_t q_row, k_row, v_row;  // strides in elements
    int32_t n_spans, heads, e, per_key;
    int32_t chains;            // of a block: 2 or 4
};

namespace quire {
namespace {

constexpr int D = 128, L = 64, DIM_TILES = D / 8, ROW_TILES = L / 8, PRODUCERS = 128;
// Rows of shared memory: matrices of 8 of them meet no bank twice.
constexpr int KEY_BYTES = 2 * D + 16, PAIR_BYTES = 2 * L + 16, Y_BYTES = 2 * 16 + 16;
constexpr int IN_FLIGHT = 2;  // copies of S and wrote

template <int CHAINS> struct Shape {
    static constexpr int COLUMNS = 16 * CHAINS, VALUE_BYTES = 2 * COLUMNS + 16;
    static constexpr int STAGES = CHAINS == 2 ? 3 : 2, THREADS = 2 * CHAINS * 32 + PRODUCERS;
};

template <int CHAINS> struct Stage {
    char keys[L * KEY_BYTES], queries[L * KEY_BYTES], solved[L * PAIR_BYTES], seen[L * PAIR_BYTES];
    char values[L * Shape<CHAINS>::VALUE_BYTES];
    float scales[4][L];  // of known, of what queries see, of keys behind the piece; [3][0]: of the state
};
template <int CHAINS> struct Shared {
    static constexpr int STAGES = Shape<CHAINS>::STAGES;
    Stage<CHAINS> stages[STAGES];
    uint4 state[CHAINS][IN_FLIGHT][D / 16][32], wrote[CHAINS][IN_FLIGHT][L / 16][32];  // left sides, as lanes have them
    char y[CHAINS][L * Y_BYTES];
    uint64_t full[STAGES], empty[STAGES], given[CHAINS][IN_FLIGHT], taken[CHAINS][IN_FLIGHT];
};

struct Place {  // in a ring of N
    int at = 0;
    uint32_t parity = 0;
    template <int N> __device__ __forceinline__ void next() {
        if (++at == N) at = 0, parity ^= 1;
    }
};

// Sums of [16 x 16 n] as the left side of a product over their columns.
template <int TILES>
__device__ __forceinline__ void to_left(uint32_t (&left)[TILES / 2][4], const float (&sums)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i)
        left[i / 4][i % 4] = pack(sums[i / 4 * 2 + i % 4 / 2][i % 2 * 2], sums[i / 4 * 2 + i % 4 / 2][i % 2 * 2 + 1]);
}

// sums [16, L] += left [16, D] x^T of rows x [L, D].
__device__ __forceinline__ void multiply_rows(float (&sums)[ROW_TILES][4], const uint32_t (&left)[D / 16][4],
                                              uint32_t rows, int lane) {
    const uint32_t own = rows + (lane / 16 * 8 + lane % 8) * KEY_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
        for (int block = 0; block < L / 16; ++block) {
            uint32_t right[4];
            load_matrices(right, own + block * 16 * KEY_BYTES + k * 32);
            multiply_add(sums[2 * block], left[k], right[0], right[1]);
            multiply_add(sums[2 * block + 1], left[k], right[2], right[3]);
        }
    }
}
// sums [16, L] += left [16, L] x^T of a lower triangle x [L, L].
__device__ __forceinline__ void multiply_triangle(float (&sums)[ROW_TILES][4], const uint32_t (&left)[L / 16][4],
                                                  uint32_t rows, int lane) {
    const uint32_t own = rows + (lane / 16 * 8 + lane % 8) * PAIR_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < L / 16; ++k) {
#pragma unroll
        for (int block = k; block < L / 16; ++block) {
            uint32_t right[4];
            load_matrices(right, own + block * 16 * PAIR_BYTES + k * 32);
            multiply_add(sums[2 * block], left[k], right[0], right[1]);
            multiply_add(sums[2 * block + 1], left[k], right[2], right[3]);
        }
    }
}
// sums [16, D] += left [16, L] x of rows x [L, D].
__device__ __forceinline__ void multiply_columns(float (&sums)[DIM_TILES][4], const uint32_t (&left)[L / 16][4],
                                                 uint32_t rows, int lane) {
    const uint32_t own = rows + lane % 16 * KEY_BYTES + lane / 16 * 16;
#pragma unroll
    for (int k = 0; k < L / 16; ++k) {
#pragma unroll
        for (int block = 0; block < D / 16; ++block) {
            uint32_t right[4];
            load_matrices_transposed(right, own + k * 16 * KEY_BYTES + block * 32);
            multiply_add(sums[2 * block], left[k], right[0], right[1]);
            multiply_add(sums[2 * block + 1], left[k], right[2], right[3]);
        }
    }
}

template <int CHAINS> struct Block {
    static constexpr int STAGES = Shape<CHAINS>::STAGES, COLUMNS = Shape<CHAINS>::COLUMNS;
    static constexpr int VALUE_BYTES = Shape<CHAINS>::VALUE_BYTES;
    const QuireScanArgs& args;
    Shared<CHAINS>& shared;
    int head, first_piece, end_piece, column;  // column: first value of the block

    __device__ __forceinline__ uint32_t address(const void* x) const { return shared_address(x); }

    // Cells of `n` a row, of rows of memory `row_bytes` apart, to rows of shared memory.
    template <int N>
    __device__ __forceinline__ void fetch(char* to, int to_bytes, const void* base, int64_t at, int64_t row, int n_rows,
                                          int thread) const {
        const char* from = static_cast<const char*>(base) + at * 2;
#pragma unroll
        for (int i = 0; i < L * N / PRODUCERS; ++i) {
            const int cell = i * PRODUCERS + thread, r = cell / N, c = cell % N;
            const bool is_row = r < n_rows;
            copy_16_bytes(address(to + r * to_bytes + c * 16), from + (is_row ? r : 0) * row * 2 + c * 16, is_row);
        }
    }
    __device__ __forceinline__ void produce(int thread) const {
        Place turn;
        const int key_head = head / args.per_key;
        for (int piece = first_piece; piece < end_piece; ++piece) {
            Stage<CHAINS>& stage = shared.stages[turn.at];
            const int64_t first = load_here(args.row_ptr + piece), tile = int64_t(piece) * args.heads + head;
            const int n_rows = load_here(args.row_ptr + piece + 1) - int(first);
            barrier_wait(address(&shared.empty[turn.at]), turn.parity ^ 1);
            const int64_t key = first * args.k_row + key_head * D, query = first * args.q_row + key_head * D;
            const int64_t value = first * args.v_row + head * args.e + column;
            fetch<D / WIDTH>(stage.keys, KEY_BYTES, args.k, key, args.k_row, n_rows, thread);
            fetch<L / WIDTH>(stage.solved, PAIR_BYTES, args.solved, tile * L * L, L, L, thread);
            fetch<COLUMNS / WIDTH>(stage.values, VALUE_BYTES, args.v, value, args.v_row, n_rows, thread);
            if (thread < L)
                copy_16_bytes(address(&stage.scales[0][thread * 4]), args.scales + tile * 4 * L + thread * 4, true);
            fetch<D / WIDTH>(stage.queries, KEY_BYTES, args.q, query, args.q_row, n_rows, thread);
            fetch<L / WIDTH>(stage.seen, PAIR_BYTES, args.seen, tile * L * L, L, L, thread);
            barrier_arrive_after_copies(address(&shared.full[turn.at]));
            turn.template next<STAGES>();
        }
        copies_wait();
    }

    // Numbers of a tile of the state [128, e] in memory: rows 2 (lane % 4) + i % 2, columns lane / 4 + 8 (i / 2).
    __device__ __forceinline__ float* place(int64_t line, int chain, int lane) const {
        const int64_t own = (line * args.heads + head) * D + lane % 4 * 2;
        return args.state + own * args.e + column + chain * 16 + lane / 4;
    }
    __device__ __forceinline__ void load(int64_t line, bool is_fresh, int chain, int lane,
                                         float (&s)[DIM_TILES][4]) const {
        const float* from = place(line, chain, lane);
#pragma unroll
        for (int t = 0; t < DIM_TILES; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[t][i] = is_fresh ? 0.f : *(from + (t * 8 + i % 2) * args.e + i / 2 * 8);
        }
    }
    __device__ __forceinline__ void store(int64_t line, int chain, int lane, const float (&s)[DIM_TILES][4]) const {
        float* to = place(line, chain, lane);
#pragma unroll
        for (int t = 0; t < DIM_TILES; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[(t * 8 + i % 2) * args.e + i / 2 * 8] = s[t][i];
        }
    }
    __device__ __forceinline__ void chain(int chain, int lane, int line, bool is_fresh) const {
        float s[DIM_TILES][4];
        load(line, is_fresh, chain, lane, s);
        Place turn, copy;
        for (int piece = first_piece; piece < end_piece; ++piece) {
            const Stage<CHAINS>& stage = shared.stages[turn.at];
            const int kept = load_here(args.keep + piece);
            uint32_t left[D / 16][4];
            to_left(left, s);
            barrier_wait(address(&shared.taken[chain][copy.at]), copy.parity ^ 1);
#pragma unroll
            for (int k = 0; k < D / 16; ++k)
                shared.state[chain][copy.at][k][lane] = {left[k][0], left[k][1], left[k][2], left[k][3]};
            barrier_wait(address(&shared.full[turn.at]), turn.parity);
            float sums[ROW_TILES][4] = {};
            multiply_rows(sums, left, address(stage.keys), lane);
            const uint32_t values = address(stage.values) + lane % 8 * VALUE_BYTES + chain * 32 + lane / 8 % 2 * 16;
#pragma unroll
            for (int t = 0; t < ROW_TILES; t += 2) {
                uint32_t pairs[4];  // tiles t and t + 1, each of values 0 .. 8 and 8 .. 16
                load_matrices_transposed(pairs, values + (t + lane / 16) * 8 * VALUE_BYTES);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 scale = *reinterpret_cast<const float2*>(&stage.scales[0][(t + i) * 8 + lane % 4 * 2]);
                    const float2 low = widen(pairs[2 * i]), high = widen(pairs[2 * i + 1]);
                    float(&sum)[4] = sums[t + i];
                    sum[0] = low.x - sum[0] * scale.x, sum[1] = low.y - sum[1] * scale.y;
                    sum[2] = high.x - sum[2] * scale.x, sum[3] = high.y - sum[3] * scale.y;
                }
            }
            uint32_t rows[L / 16][4];
            to_left(rows, sums);
            float wrote[ROW_TILES][4] = {};
            multiply_triangle(wrote, rows, address(stage.solved), lane);
            to_left(rows, wrote);
#pragma unroll
            for (int k = 0; k < L / 16; ++k)
                shared.wrote[chain][copy.at][k][lane] = {rows[k][0], rows[k][1], rows[k][2], rows[k][3]};
            barrier_arrive(address(&shared.given[chain][copy.at]));
            const float decay = stage.scales[3][0];
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) {
                const float2 scale = *reinterpret_cast<const float2*>(&stage.scales[2][t * 8 + lane % 4 * 2]);
                wrote[t][0] *= scale.x, wrote[t][1] *= scale.y, wrote[t][2] *= scale.x, wrote[t][3] *= scale.y;
            }
            to_left(rows, wrote);
#pragma unroll
            for (int t = 0; t < DIM_TILES; ++t) {
#pragma unroll
                for (int i = 0; i < 4; ++i) s[t][i] *= decay;
            }
            multiply_columns(s, rows, address(stage.keys), lane);
            barrier_arrive(address(&shared.empty[turn.at]));
            if (kept >= 0) store(kept, chain, lane, s);
            turn.template next<STAGES>(), copy.template next<IN_FLIGHT>();
        }
        store(line, chain, lane, s);
    }

    __device__ __forceinline__ void answer(int chain, int lane) const {
        Place turn, copy;
        for (int piece = first_piece; piece < end_piece; ++piece) {
            const Stage<CHAINS>& stage = shared.stages[turn.at];
            const int64_t first = load_here(args.row_ptr + piece);
            const int n_rows = load_here(args.row_ptr + piece + 1) - int(first);
            uint32_t left[D / 16][4], rows[L / 16][4];
            barrier_wait(address(&shared.full[turn.at]), turn.parity);
            barrier_wait(address(&shared.given[chain][copy.at]), copy.parity);
#pragma unroll
            for (int k = 0; k < D / 16; ++k) take(left[k], shared.state[chain][copy.at][k][lane]);
#pragma unroll
            for (int k = 0; k < L / 16; ++k) take(rows[k], shared.wrote[chain][copy.at][k][lane]);
            barrier_arrive(address(&shared.taken[chain][copy.at]));
            float y[ROW_TILES][4] = {};
            multiply_rows(y, left, address(stage.queries), lane);
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) {
                const float2 scale = *reinterpret_cast<const float2*>(&stage.scales[1][t * 8 + lane % 4 * 2]);
                y[t][0] *= scale.x, y[t][1] *= scale.y, y[t][2] *= scale.x, y[t][3] *= scale.y;
            }
            multiply_triangle(y, rows, address(stage.seen), lane);
            barrier_arrive(address(&shared.empty[turn.at]));
            // Lanes of a matrix name its rows: tokens, of values 0 .. 8, then 8 .. 16, of tiles t and t + 1.
            const uint32_t to = address(shared.y[chain]) + (lane / 16 * 8 + lane % 8) * Y_BYTES + lane / 8 % 2 * 16;
#pragma unroll
            for (int t = 0; t < ROW_TILES; t += 2)
                store_matrices_transposed(to + t * 8 * Y_BYTES, pack(y[t][0], y[t][1]), pack(y[t][2], y[t][3]),
                                          pack(y[t + 1][0], y[t + 1][1]), pack(y[t + 1][2], y[t + 1][3]));
            __syncwarp();
            Element* const out = static_cast<Element*>(args.out) + head * args.e + column + chain * 16;
#pragma unroll
            for (int i = 0; i < L * 2 / 32; ++i) {
                const int row = i * 16 + lane / 2;
                const uint4 cell = load_16_bytes(address(shared.y[chain]) + row * Y_BYTES + lane % 2 * 16);
                if (row < n_rows)
                    *reinterpret_cast<uint4*>(out + (first + row) * args.heads * args.e + lane % 2 * WIDTH) = cell;
            }
            __syncwarp();
            turn.template next<STAGES>(), copy.template next<IN_FLIGHT>();
        }
    }
    __device__ static __forceinline__ void take(uint32_t (&to)[4], const uint4& from) {
        to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
    }
};

template <int CHAINS>
__global__ void __launch_bounds__(Shape<CHAINS>::THREADS, 1) scan_kernel(const __grid_constant__ QuireScanArgs args) {
    extern __shared__ __align__(1024) char memory[];
    Shared<CHAINS>& shared = *reinterpret_cast<Shared<CHAINS>*>(memory);
    constexpr int STAGES = Shape<CHAINS>::STAGES, COLUMNS = Shape<CHAINS>::COLUMNS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, span = blockIdx.y;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), PRODUCERS);
            barrier_init(shared_address(&shared.empty[i]), 2 * CHAINS * 32);
        }
        for (int i = 0; i < CHAINS * IN_FLIGHT; ++i) {
            barrier_init(shared_address(&shared.given[i / IN_FLIGHT][i % IN_FLIGHT]), 32);
            barrier_init(shared_address(&shared.taken[i / IN_FLIGHT][i % IN_FLIGHT]), 32);
        }
    }
    let_next_grid_start();
    wait_for_previous_grid();
    __syncthreads();
    const int n_blocks = args.e / COLUMNS;
    const Block<CHAINS> block{args, shared, int(blockIdx.x) / n_blocks, load_here(args.piece_ptr + span),
                              load_here(args.piece_ptr + span + 1), int(blockIdx.x) % n_blocks * COLUMNS};
    if (warp < CHAINS) {
        block.chain(warp, lane, load_here(args.lines + span), load_here(args.fresh + span) != 0);
    } else if (warp < 2 * CHAINS) {
        block.answer(warp - CHAINS, lane);
    } else {
        block.produce(threadIdx.x - 2 * CHAINS * 32);
    }
}

template <int CHAINS> cudaError_t scan(const QuireScanArgs& args, void* stream) {
    if (args.e % Shape<CHAINS>::COLUMNS) return cudaErrorInvalidValue;
    const cudaError_t allowed = allow_shared_memory<scan_kernel<CHAINS>>(sizeof(Shared<CHAINS>));
    if (allowed != cudaSuccess) return allowed;
    const dim3 grid(args.heads * (args.e / Shape<CHAINS>::COLUMNS), args.n_spans);
    return launch(scan_kernel<CHAINS>, grid, Shape<CHAINS>::THREADS, sizeof(Shared<CHAINS>), stream, args);
}

}  // namespace
}  // namespace quire

extern "C" int quire_scan(const QuireScanArgs* args, void* stream) {
    return args->chains == 4 ? quire::scan<4>(*args, stream) : quire::scan<2>(*args, stream);
}
