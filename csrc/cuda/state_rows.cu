// One row of many sequences through the gated delta rule: S = alpha S; S += beta k (v - S^T k)^T; y = S^T q, of unit
// keys and queries. Hopper; QUIRE_BF16 0 or 1; states float32, keys of 128.
//
// A block has 4 LANES columns of one head's state in registers: of each thread 8 rows, 4 columns.
//
//   row of the state    8 (thread / LANES) + i        column    4 (LANES blockIdx.x + thread % LANES) + j
//
// The state is read once: what the query sees is alpha S^T q + (k q) error, so all sums over rows are of what was there
// before, and meet in shared memory once. Keys and queries are multiplied as they come; sums are divided by their
// lengths. Wide blocks get more from memory where there are many.
//
// It may start before the previous grid has ended and lets the next start at once, as rows.cu says.
#include "cells.h"
#include "launch.h"

struct QuireDeltaRowsArgs {    // _RowsArgs in quire/kernels/state/hopper.py
    const void *q, *k, *v, *a, *b;
    const float *a_log, *dt_bias;
    float* state;              // [n_lines, heads, 128, e]
    void* out;                 // contiguous
    const int32_t *lines, *fresh;
    int64_t q_row, k_row, v_row, a_row, b_row;  // strides in elements
    int32_t n_rows, heads, e, per_key;
    int32_t lanes;             // 8 or 16
    float scale;
};

namespace quire {
namespace {

constexpr int D = 128, ROWS = WIDTH, OF_THREAD = 4;  // of the state; of it, and columns, of a thread
constexpr float EPS = 1e-6f;

struct Four {
    float x[OF_THREAD];
};
__device__ __forceinline__ Four load_four(const float* from) {
    const int4 bits = load_once(reinterpret_cast<const int4*>(from));
    return {{__int_as_float(bits.x), __int_as_float(bits.y), __int_as_float(bits.z), __int_as_float(bits.w)}};
}
__device__ __forceinline__ void store_four(float* to, const Four& from) {
    store_once(reinterpret_cast<int4*>(to), make_int4(__float_as_int(from.x[0]), __float_as_int(from.x[1]),
                                                      __float_as_int(from.x[2]), __float_as_int(from.x[3])));
}
__device__ __forceinline__ float element(const void* base, int64_t at) {
    return widen(static_cast<const uint16_t*>(base)[at]).x;
}

// What a block sums over the rows of the state.
constexpr int SUMS = 2 * OF_THREAD + 3;
struct Sums {
    float known[OF_THREAD], seen[OF_THREAD], keys, queries, both;
};

template <int LANES> struct Shape {
    static constexpr int THREADS = D / ROWS * LANES, WARPS = THREADS / 32, COLUMNS = LANES * OF_THREAD;
};

template <int LANES>
__global__ void __launch_bounds__(Shape<LANES>::THREADS, 7 * 128 / Shape<LANES>::THREADS)
    delta_rows_kernel(const __grid_constant__ QuireDeltaRowsArgs args) {
    constexpr int WARPS = Shape<LANES>::WARPS;
    __shared__ float of_warps[WARPS][LANES][SUMS + 1];
    let_next_grid_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
    const int64_t row = blockIdx.z;
    const int first = (threadIdx.x / LANES) * ROWS, column = (blockIdx.x * LANES + lane % LANES) * OF_THREAD;
    const float rate = args.a_log[head], bias = args.dt_bias[head];
    wait_for_previous_grid();
    const int line = load_here(args.lines + row), fresh = load_here(args.fresh + row);
    const int64_t of_key = head / args.per_key * D + first;
    const Cell key_cell = load_cell(args.k, row * args.k_row + of_key, true);
    const Cell query_cell = load_cell(args.q, row * args.q_row + of_key, true);
    const float a = element(args.a, row * args.a_row + head), b = element(args.b, row * args.b_row + head);
    const int64_t value_at = int64_t(head) * args.e + column;
    const Element* const of_row = static_cast<const Element*>(args.v) + row * args.v_row;
    const int* const of_values = reinterpret_cast<const int*>(of_row + value_at);
    const int low_values = load_here(of_values), high_values = load_here(of_values + 1);

    float* const own = args.state + (int64_t(line) * args.heads + head) * D * args.e + int64_t(first) * args.e + column;
    Four s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) s[i] = fresh ? Four{} : load_four(own + i * args.e);

    const float step = a + bias > 20.f ? a + bias : log1pf(__expf(a + bias));
    const float alpha = __expf(-__expf(rate) * step), beta = __fdividef(1.f, 1.f + __expf(-b));
    float keys[ROWS], queries[ROWS];
    widen(keys, key_cell), widen(queries, query_cell);
    Sums sums{};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < OF_THREAD; ++j) {
            sums.known[j] += s[i].x[j] * keys[i];
            sums.seen[j] += s[i].x[j] * queries[i];
        }
        sums.keys += keys[i] * keys[i], sums.queries += queries[i] * queries[i], sums.both += keys[i] * queries[i];
    }
    float(&flat)[SUMS] = reinterpret_cast<float(&)[SUMS]>(sums);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) flat[i] += __shfl_xor_sync(~0u, flat[i], step);
    }
    if (lane < LANES) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) of_warps[warp][lane][i] = flat[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        flat[i] = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) flat[i] += of_warps[w][lane % LANES][i];
    }

    const float of_key_length = rsqrtf(sums.keys + EPS), of_query_length = rsqrtf(sums.queries + EPS) * args.scale;
    const float2 low = widen(low_values), high = widen(high_values);
    const float values[] = {low.x, low.y, high.x, high.y};
    float y[OF_THREAD], errors[OF_THREAD];
#pragma unroll
    for (int j = 0; j < OF_THREAD; ++j) {
        errors[j] = (values[j] - alpha * of_key_length * sums.known[j]) * beta * of_key_length;
        y[j] = (alpha * sums.seen[j] + sums.both * errors[j]) * of_query_length;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < OF_THREAD; ++j) s[i].x[j] = alpha * s[i].x[j] + keys[i] * errors[j];
        store_four(own + i * args.e, s[i]);
    }
    if (threadIdx.x < LANES) {
        Element* const out = static_cast<Element*>(args.out) + row * args.heads * args.e + value_at;
        *reinterpret_cast<uint2*>(out) = make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
    }
}

template <int LANES> cudaError_t run(const QuireDeltaRowsArgs& args, void* stream) {
    if (args.e % Shape<LANES>::COLUMNS) return cudaErrorInvalidValue;
    const dim3 grid(args.e / Shape<LANES>::COLUMNS, args.heads, args.n_rows);
    return launch(delta_rows_kernel<LANES>, grid, Shape<LANES>::THREADS, 0, stream, args);
}

}  // namespace
}  // namespace quire

extern "C" int quire_delta_rows(const QuireDeltaRowsArgs* args, void* stream) {
    return args->lanes == 16 ? quire::run<16>(*args, stream) : quire::run<8>(*args, stream);
}
