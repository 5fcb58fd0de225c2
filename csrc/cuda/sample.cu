// Rows of logits that may keep thousands of them: what lies above a guess of the smallest kept one is weighed, what
// lies near it is listed (quire/kernels/sample/wide.py says the same in Triton). A block has a span of a row.
//
// The order of the list depends on which block comes first; whoever reads it must not depend on it.
#include "hopper.h"
#include "launch.h"

struct QuireCollectArgs {      // _CollectArgs in quire/kernels/sample/hopper.py
    const void* logits;
    const double* slopes;      // of rows: 1 / temperature
    const int32_t* kinds;      // of rows: 0 has its token already
    const float* marks;        // [n_rows, 4]: largest logit, floor of all that may be kept, the guess from .. to
    float* sums;               // [n_rows, 2, n_spans]: weight (COUNT: number) above the guess, weight above the floor
    int32_t* n_listed;         // of rows, 0 before
    float* values;             // [n_rows, room]: the list
    int32_t* columns;          // [n_rows, room]: where they stand
    float* groups;             // of groups of a row at [row * groups_row]: weight above the guess
    int64_t* more;             // [n_rows, more_row]: becomes 0
    int64_t row, groups_row, more_row;  // strides in elements
    int32_t n_rows, width, n_spans, room, bytes;  // bytes: of a logit; 2 is QUIRE_BF16's type
    float least_slope;
};

namespace quire {
namespace {

constexpr int THREADS = 128, WARPS = THREADS / 32, SPAN = 4096, GROUP = 128, OF_THREAD = SPAN / THREADS;
constexpr int WIDTH = 8, TURNS = OF_THREAD / WIDTH, LANES = GROUP / WIDTH;  // of any type, so that sums are the same
constexpr int COUNT = 2;       // quire/kernels/sample/wide.py
constexpr float LOWEST = -3.402823466e38f;  // all but minus infinity

__device__ __forceinline__ float widen(uint32_t word, int half) {
#if QUIRE_BF16
    return __uint_as_float(half ? word & 0xffff0000u : word << 16);
#else
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word));
    return half ? both.y : both.x;
#endif
}

// WIDTH logits side by side.
template <int BYTES> struct Cell {
    static constexpr int LOADS = WIDTH * BYTES / 16, WORDS = 4 * LOADS;
    int words[WORDS];
    __device__ __forceinline__ float at(int i) const {
        if constexpr (BYTES == 4) return __int_as_float(words[i]);
        return widen(static_cast<uint32_t>(words[i / 2]), i % 2);
    }
    // Rows begin at multiples of 16 bytes, so what lies beyond width in a load belongs to nobody else.
    __device__ __forceinline__ void load(const char* from, int n) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            int4 bits = make_int4(0, 0, 0, 0);
            if (i * (16 / BYTES) < n) bits = load_here(reinterpret_cast<const int4*>(from) + i);
            words[4 * i] = bits.x, words[4 * i + 1] = bits.y, words[4 * i + 2] = bits.z, words[4 * i + 3] = bits.w;
        }
        if (n < WIDTH) cut(n);
    }
    // The first n stay, the others become minus infinity.
    __device__ __forceinline__ void cut(int n) {
        constexpr int PER_WORD = WIDTH / WORDS;
        constexpr uint32_t LOWEST_BITS = BYTES == 4 ? 0xff800000u : QUIRE_BF16 ? 0xff80ff80u : 0xfc00fc00u;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int n_here = n - i * PER_WORD;
            const uint32_t stays = n_here >= PER_WORD ? ~0u : n_here <= 0 ? 0u : 0xffffu;
            words[i] = int((uint32_t(words[i]) & stays) | (LOWEST_BITS & ~stays));
        }
    }
};

template <int N> __device__ __forceinline__ float sum_of_lanes(float x) {  // of N neighbouring ones, in each
#pragma unroll
    for (int step = N / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// A warp has OF_THREAD cells side by side in each turn; bit i of a thread's mask is its logit i.
template <int BYTES> __global__ void __launch_bounds__(THREADS, BYTES == 4 ? 8 : 10)
collect_kernel(const __grid_constant__ QuireCollectArgs args) {
    __shared__ float above_of_warps[WARPS], whole_of_warps[WARPS];
    __shared__ int n_of_warps[WARPS + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t row = blockIdx.y;
    wait_for_previous_grid();
    let_next_grid_start();
    const int kind = args.kinds[row];
    if (kind == 0) return;
    const float* marks = args.marks + row * 4;
    const float base = marks[0], floor = marks[1], lower = fmaxf(marks[2], LOWEST), upper = fmaxf(marks[3], LOWEST);
    const float slope = fmaxf(static_cast<float>(args.slopes[row]), args.least_slope) * LOG2E;
    const char* start = static_cast<const char*>(args.logits) + row * args.row * BYTES;
    const int first = blockIdx.x * SPAN + warp * (SPAN / WARPS) + lane * WIDTH;
    Cell<BYTES> cells[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int column = first + i * 32 * WIDTH;
        cells[i].load(start + int64_t(column) * BYTES, args.width - column);
    }
    uint32_t listed = 0;
    float above = 0.f, whole = 0.f;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int column = first + i * 32 * WIDTH;
        float certain = 0.f;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            const float x = cells[i].at(e), weight = x >= floor ? exp2_fast((x - base) * slope) : 0.f;
            whole += weight;
            if (x >= upper) {
                certain += weight;
            } else if (x >= lower) {
                listed |= 1u << (i * WIDTH + e);
            }
        }
        above += certain;
        certain = sum_of_lanes<LANES>(certain);
        if (lane % LANES == 0 && column < args.width) {
            args.groups[row * args.groups_row + column / GROUP] = certain;
            args.more[row * args.more_row + column / GROUP] = 0;
        }
    }
    if (kind == COUNT) {
        above = 0.f;
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) above += cells[i / WIDTH].at(i % WIDTH) >= upper ? 1.f : 0.f;
    }
    above = sum_of_lanes<32>(above), whole = sum_of_lanes<32>(whole);
    const int n = __popc(listed);
    int n_before = n;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int more = __shfl_up_sync(~0u, n_before, step);
        if (lane >= step) n_before += more;
    }
    if (lane == 31) above_of_warps[warp] = above, whole_of_warps[warp] = whole, n_of_warps[warp] = n_before;
    n_before -= n;
    __syncthreads();
    if (threadIdx.x == 0) {
        int n_of_block = 0;
        above = whole = 0.f;
        for (int i = 0; i < WARPS; ++i) {
            above += above_of_warps[i], whole += whole_of_warps[i];
            n_of_block += n_of_warps[i];
        }
        float* sums = args.sums + row * 2 * args.n_spans + blockIdx.x;
        sums[0] = above, sums[args.n_spans] = whole;
        n_of_warps[WARPS] = n_of_block ? atomicAdd(args.n_listed + row, n_of_block) : 0;
    }
    __syncthreads();
    int place = n_of_warps[WARPS] + n_before;
    for (int i = 0; i < warp; ++i) place += n_of_warps[i];
    for (; listed; listed &= listed - 1, ++place) {
        const int i = __ffs(listed) - 1, column = first + i / WIDTH * 32 * WIDTH + i % WIDTH;
        const char* at = start + int64_t(column) * BYTES;
        float x;
        if constexpr (BYTES == 4) x = *reinterpret_cast<const float*>(at);
        else x = widen(*reinterpret_cast<const uint16_t*>(at), 0);
        if (place < args.room) args.values[row * args.room + place] = x, args.columns[row * args.room + place] = column;
    }
}

}  // namespace
}  // namespace quire

extern "C" int quire_collect(const QuireCollectArgs* args, void* stream) {
    using namespace quire;
    if (args->row * args->bytes % 16 || args->n_spans != (args->width + SPAN - 1) / SPAN) return cudaErrorInvalidValue;
    const dim3 grid(args->n_spans, args->n_rows);
    if (args->bytes == 4) return launch(collect_kernel<4>, grid, THREADS, 0, stream, *args);
    return launch(collect_kernel<2>, grid, THREADS, 0, stream, *args);
}
