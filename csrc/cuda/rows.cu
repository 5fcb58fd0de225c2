// What stands between products and attention in a decoder layer, a row at a time: RMS norm, q and k into shape and K
// and V into pages, SwiGLU's activation, and codes of e4m3 for the next product. Hopper; QUIRE_BF16 0 or 1.
//
// In a decode step each takes little longer than a launch, so it may start before the previous grid has ended and lets
// the next start at once (programmatic dependent launch). Before it waits for the previous grid it reads nothing but
// constants: weights of norms and the rotary table. The next grid may run beside this one, so every thread waits here:
// who waits for this grid has then waited for all before it.
//
// A thread moves 16 bytes at a time. Results of a row depend on nothing but the row.
#include "cells.h"

struct QuireNormArgs {         // _Args in quire/kernels/norm/hopper.py
    const void* x;
    void* residual;            // null: there is none
    const void* weight;
    void* out;                 // contiguous
    int64_t x_row, x_head, residual_row;  // strides, here and below in elements
    int32_t n_rows, n_heads, h;
    float eps;
};

struct QuireRotateArgs {       // _Args in quire/kernels/qkv/hopper.py
    const void* qkv;
    const void *q_norm, *k_norm;          // null: there is none
    const void* positions;     // int32, or int64 if wide_positions
    const float* cos_sin;      // [n_positions, 2 half]
    const int64_t* cache_locs;
    void *q, *k_pages, *v_pages;
    int64_t qkv_row;
    int32_t n_rows, n_q_heads, n_kv_heads, d, half, page_size, n_positions, wide_positions;
    int32_t coded;             // 1: pages hold e4m3, a number times the inverse of its scale
    float eps, k_inverse, v_inverse;
};

struct QuireSiluMulArgs {      // _Args in quire/kernels/act/hopper.py
    const void* x;
    void* out;                 // contiguous
    int64_t x_row;
    int32_t n_rows, f;
};

struct QuireRoundArgs {        // _Args in quire/kernels/w8a8/rounding.py
    const void* x;
    void* codes;
    float* scales;             // of row t at [t]; of blocks: of group g and row t at [g scales_row + t]; given: [0]
    const void* norm_weight;   // null: rows are rounded as they are
    int64_t x_row, codes_row;
    int32_t n_rows, k, scales_row, blocks, given;
    float eps;
};

namespace quire {
namespace {

constexpr int THREADS = 128;   // of a block, but for the norm
constexpr int MAX_WARPS = 8;   // of a block of the norm
constexpr int MAX_CELLS = 8;   // of a row of the norm that a thread holds
constexpr int MAX_GUESSED_ROWS = 512;

// Blocks are (group of a row, row), rows beyond the limit of a grid's second dimension in the third.
constexpr int MAX_GRID_ROWS = 65535;
__device__ __forceinline__ int64_t row_of_block() { return blockIdx.z * int64_t(MAX_GRID_ROWS) + blockIdx.y; }

// ---- norm: one block a row, cells of a thread a block apart --------------------------------------------------------

// sum: of a thread's squares; of_warps: room for those of MAX_WARPS.
__device__ __forceinline__ float factor_of(float sum, float* of_warps, float per_element, float eps) {
    const int n_warps = blockDim.x / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    if (threadIdx.x >= n_warps && threadIdx.x < MAX_WARPS) of_warps[threadIdx.x] = 0.f;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_WARPS; i += 2) sum += of_warps[i] + of_warps[i + 1];
    return rsqrtf(sum * per_element + eps);
}

template <int CELLS>
__global__ void __launch_bounds__(MAX_WARPS * 32, CELLS == 2 ? 5 : 1)
    norm_kernel(const __grid_constant__ QuireNormArgs args, float per_element) {
    __shared__ float of_warps[MAX_WARPS];
    const int64_t row = row_of_block(), head = blockIdx.x;
    Cell weights[CELLS], cells[CELLS], added[CELLS];
    int at[CELLS];
    let_next_grid_start();
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        at[i] = (threadIdx.x + i * blockDim.x) * WIDTH;
        weights[i] = load_cell(args.weight, at[i], at[i] < args.h);
    }
    wait_for_previous_grid();
    if (row >= args.n_rows) return;
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        cells[i] = load_cell(args.x, row * args.x_row + head * args.x_head + at[i], at[i] < args.h);
        if (args.residual) added[i] = load_cell(args.residual, row * args.residual_row + at[i], at[i] < args.h);
    }
    float x[WIDTH], sum = 0.f;
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        widen(x, cells[i]);
        if (args.residual) {
            float more[WIDTH];
            widen(more, added[i]);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) x[e] += more[e];
            cells[i] = narrow(x);
            widen(x, cells[i]);
            if (at[i] < args.h) store_cell(args.residual, row * args.residual_row + at[i], cells[i]);
        }
        sum += square_sum(x);
    }
    const float factor = factor_of(sum, of_warps, per_element, args.eps);
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        widen(x, cells[i]);
        scale(x, factor, weights[i]);
        if (at[i] < args.h) store_cell(args.out, (row * args.n_heads + head) * args.h + at[i], narrow(x));
    }
}

// ---- q, k and v: 2 ^ lane_bits threads a head, two cells a thread --------------------------------------------------
//
//   dimensions of a head   0 .. half             half .. 2 half             2 half .. d
//   cells of a thread      first of thread i     second of thread i         both of thread half / 8 + j

__global__ void __launch_bounds__(THREADS)
    rotate_and_store_kernel(const __grid_constant__ QuireRotateArgs args, int lane_bits, float per_element) {
    let_next_grid_start();
    const int n_heads = args.n_q_heads + 2 * args.n_kv_heads;
    const int64_t row = row_of_block();
    const int head = (blockIdx.x * THREADS + threadIdx.x) >> lane_bits, lane = threadIdx.x & ((1 << lane_bits) - 1);
    const bool is_live = row < args.n_rows && head < n_heads;
    const bool is_q = head < args.n_q_heads, is_v = head >= args.n_q_heads + args.n_kv_heads;
    const bool paired = lane * WIDTH < args.half, turned = is_live && paired && !is_v;
    const int first = paired ? lane * WIDTH : 2 * args.half + (2 * lane - args.half / WIDTH * 2) * WIDTH;
    const int second = paired ? first + args.half : first + WIDTH;
    const bool has_first = is_live && first < args.d, has_second = is_live && second < args.d;

    const void* norm = is_q ? args.q_norm : is_v ? nullptr : args.k_norm;
    const Cell first_weight = load_cell(norm, first, norm && has_first);
    const Cell second_weight = load_cell(norm, second, norm && has_second);
    // An earlier grid may still write positions: what is found now is a guess, which spares a few rows a wait for the
    // table behind the wait for the position. Many rows have other blocks to hide it.
    int64_t guess = -1;
    Turn turn{};
    if (turned && args.n_rows <= MAX_GUESSED_ROWS) {
        guess = min(max(load_position(args.positions, args.wide_positions, row), int64_t(0)), int64_t(args.n_positions - 1));
        load_turn(turn, args.cos_sin, args.half, guess, first);
    }
    wait_for_previous_grid();

    const int64_t from = row * args.qkv_row + static_cast<int64_t>(head) * args.d;
    const Cell first_cell = load_cell(args.qkv, from + first, has_first);
    const Cell second_cell = load_cell(args.qkv, from + second, has_second);
    const uint32_t cache_loc = is_live ? static_cast<const volatile int64_t*>(args.cache_locs)[row] : 0;
    if (turned) {
        const int64_t position = load_position(args.positions, args.wide_positions, row);
        if (position != guess) load_turn(turn, args.cos_sin, args.half, position, first);
    }
    const uint32_t page = cache_loc / args.page_size, offset = cache_loc - page * args.page_size;

    float a[WIDTH], b[WIDTH];
    widen(a, first_cell);
    widen(b, second_cell);
    if (args.q_norm || args.k_norm) {
        float sum = square_sum(a) + square_sum(b);
#pragma unroll 1
        for (int bit = 0; bit < lane_bits; ++bit) sum += __shfl_xor_sync(~0u, sum, 1 << bit);
        if (norm) {
            const float factor = rsqrtf(sum * per_element + args.eps);
            scale(a, factor, first_weight);
            scale(b, factor, second_weight);
            round_all(a), round_all(b);
        }
    }
    if (turned) rotate(a, b, turn);

    void* to = is_q ? args.q : is_v ? args.v_pages : args.k_pages;
    int64_t at = (row * args.n_q_heads + head) * args.d;
    if (!is_q) {
        const int kv_head = head - args.n_q_heads - (is_v ? args.n_kv_heads : 0);
        at = ((static_cast<int64_t>(page) * args.n_kv_heads + kv_head) * args.page_size + offset) * args.d;
    }
    if (args.coded && !is_q) {
        const float factor = is_v ? args.v_inverse : args.k_inverse;
        round_all(a), round_all(b);
        if (has_first) store_codes(to, at + first, a, factor);
        if (has_second) store_codes(to, at + second, b, factor);
        return;
    }
    if (has_first) store_cell(to, at + first, narrow(a));
    if (has_second) store_cell(to, at + second, narrow(b));
}

// ---- activation ----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(THREADS) silu_mul_kernel(const __grid_constant__ QuireSiluMulArgs args) {
    let_next_grid_start();
    const int64_t row = row_of_block();
    const int at = (blockIdx.x * THREADS + threadIdx.x) * WIDTH;
    wait_for_previous_grid();
    if (row >= args.n_rows || at >= args.f) return;
    const Cell gate_cell = load_cell(args.x, row * args.x_row + at, true);
    const Cell up_cell = load_cell(args.x, row * args.x_row + args.f + at, true);
    float gate[WIDTH], up[WIDTH];
    widen(gate, gate_cell);
    widen(up, up_cell);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) gate[i] = __fdividef(gate[i], 1.f + __expf(-gate[i]));
    round_all(gate);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) up[i] *= gate[i];
    store_cell(args.out, row * args.f + at, narrow(up));
}

// ---- codes of e4m3, divided by the scale of a row or of 128 columns of it (16 threads) ------------------------------

constexpr float LARGEST_CODE = 448.f, LEAST = 1e-10f;  // quire/kernels/e4m3.py, w8a8/reference.py

template <int CELLS, bool BLOCKS, bool NORM>
__global__ void __launch_bounds__(MAX_WARPS * 32) round_kernel(const __grid_constant__ QuireRoundArgs args, float per_element) {
    __shared__ float of_warps[2][MAX_WARPS];
    constexpr int SCALES = BLOCKS ? CELLS : 1;
    const int64_t row = row_of_block();
    const int lane = threadIdx.x % 32, n_threads = blockDim.x, first = blockIdx.x * n_threads + threadIdx.x;
    Cell weights[CELLS], cells[CELLS];
    float x[WIDTH], largest[SCALES], scales[SCALES];
    int at[CELLS];
    let_next_grid_start();
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        at[i] = (first + i * n_threads) * WIDTH;
        if (NORM) weights[i] = load_cell(args.norm_weight, at[i], at[i] < args.k);
    }
    wait_for_previous_grid();
    if (row >= args.n_rows) return;
#pragma unroll
    for (int i = 0; i < CELLS; ++i) cells[i] = load_cell(args.x, row * args.x_row + at[i], at[i] < args.k);
    if (NORM) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < CELLS; ++i) {
            widen(x, cells[i]);
            sum += square_sum(x);
        }
        const float factor = factor_of(sum, of_warps[1], per_element, args.eps);
#pragma unroll
        for (int i = 0; i < CELLS; ++i) {
            widen(x, cells[i]);
            quire::scale(x, factor, weights[i]);
            cells[i] = narrow(x);
        }
    }
#pragma unroll
    for (int i = 0; i < SCALES; ++i) largest[i] = LEAST;
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        float& most = largest[BLOCKS ? i : 0];
        widen(x, cells[i]);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) most = fmaxf(most, fabsf(x[e]));
    }
#pragma unroll
    for (int i = 0; i < SCALES; ++i) {
#pragma unroll
        for (int step = BLOCKS ? 8 : 16; step > 0; step /= 2)
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], step));
    }
    if (BLOCKS) {
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            scales[i] = __fdiv_rn(largest[i], LARGEST_CODE);
            const int64_t group = at[i] / (16 * WIDTH);
            if (first % 16 == 0 && at[i] < args.k) args.scales[group * args.scales_row + row] = scales[i];
        }
    } else if (args.given) {
        scales[0] = __int_as_float(load_here(reinterpret_cast<const int*>(args.scales)));
    } else {
        if (lane == 0) of_warps[0][threadIdx.x / 32] = largest[0];
        __syncthreads();
        for (int i = 0; i < n_threads / 32; ++i) largest[0] = fmaxf(largest[0], of_warps[0][i]);
        scales[0] = __fdiv_rn(largest[0], LARGEST_CODE);
        if (threadIdx.x == 0) args.scales[row] = scales[0];
    }
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        if (at[i] >= args.k) break;
        widen(x, cells[i]);
        const float scale = scales[BLOCKS ? i : 0], inverse = __frcp_rn(scale);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) x[e] = args.given ? __fdiv_rn(x[e], scale) : quotient(x[e], scale, inverse);
        const uint2 codes = make_uint2(codes_of(x[0], x[1]) | codes_of(x[2], x[3]) << 16,
                                       codes_of(x[4], x[5]) | codes_of(x[6], x[7]) << 16);
        *reinterpret_cast<uint2*>(static_cast<char*>(args.codes) + row * args.codes_row + at[i]) = codes;
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int n_groups, int n_rows, int n_threads, void* stream,
                   const Arguments&... arguments) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(n_groups, n_rows < MAX_GRID_ROWS ? n_rows : MAX_GRID_ROWS, ceil_div(n_rows, MAX_GRID_ROWS));
    config.blockDim = dim3(n_threads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <bool BLOCKS, bool NORM> cudaError_t round_whole_rows(const QuireRoundArgs& args, void* stream) {
    const int n_cells = args.k / WIDTH, of_thread = ceil_div(n_cells, MAX_WARPS * 32);
    if (of_thread > MAX_CELLS) return cudaErrorInvalidValue;
    const auto run = [&](void (*kernel)(QuireRoundArgs, float), int cells) {
        const int n_threads = ceil_div(ceil_div(n_cells, cells), 32) * 32;
        return launch(kernel, 1, args.n_rows, n_threads, stream, args, 1.f / args.k);
    };
    if (of_thread == 1) return run(round_kernel<1, BLOCKS, NORM>, 1);
    if (of_thread == 2) return run(round_kernel<2, BLOCKS, NORM>, 2);
    return of_thread <= 4 ? run(round_kernel<4, BLOCKS, NORM>, 4) : run(round_kernel<8, BLOCKS, NORM>, 8);
}

}  // namespace
}  // namespace quire

extern "C" int quire_norm(const QuireNormArgs* args, void* stream) {
    using namespace quire;
    const int n_cells = args->h / WIDTH, of_thread = ceil_div(n_cells, MAX_WARPS * 32);
    if (args->h % WIDTH || args->h <= 0 || of_thread > MAX_CELLS) return cudaErrorInvalidValue;
    const auto run = [&](void (*kernel)(QuireNormArgs, float), int cells) {
        const int n_threads = ceil_div(ceil_div(n_cells, cells), 32) * 32;
        return launch(kernel, args->n_heads, args->n_rows, n_threads, stream, *args, 1.f / args->h);
    };
    if (of_thread == 1) return run(norm_kernel<1>, 1);
    if (of_thread == 2) return run(norm_kernel<2>, 2);
    return of_thread <= 4 ? run(norm_kernel<4>, 4) : run(norm_kernel<8>, 8);
}

extern "C" int quire_rotate_and_store(const QuireRotateArgs* args, void* stream) {
    using namespace quire;
    const int rest = args->d - 2 * args->half;
    if (args->d % WIDTH || args->half % WIDTH || rest < 0 || args->n_positions < 1) return cudaErrorInvalidValue;
    int lane_bits = 0;
    while (WIDTH << lane_bits < args->half + ceil_div(rest, 2 * WIDTH) * WIDTH) ++lane_bits;
    if (lane_bits > 5) return cudaErrorInvalidValue;
    const int n_groups = ceil_div((args->n_q_heads + 2 * args->n_kv_heads) << lane_bits, THREADS);
    return launch(rotate_and_store_kernel, n_groups, args->n_rows, THREADS, stream, *args, lane_bits, 1.f / args->d);
}

extern "C" int quire_silu_mul(const QuireSiluMulArgs* args, void* stream) {
    using namespace quire;
    if (args->f % WIDTH) return cudaErrorInvalidValue;
    const int n_groups = ceil_div(args->f, WIDTH * THREADS);
    return launch(silu_mul_kernel, n_groups, args->n_rows, THREADS, stream, *args);
}

extern "C" int quire_round(const QuireRoundArgs* args, void* stream) {
    using namespace quire;
    if (args->k % (16 * WIDTH) || args->k <= 0) return cudaErrorInvalidValue;
    if (!args->blocks) return args->norm_weight ? round_whole_rows<false, true>(*args, stream) : round_whole_rows<false, false>(*args, stream);
    if (args->norm_weight) return round_whole_rows<true, true>(*args, stream);
    return launch(round_kernel<1, true, false>, ceil_div(args->k / WIDTH, THREADS), args->n_rows, THREADS, stream, *args, 0.f);
}
