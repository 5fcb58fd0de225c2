// What stands around the products of a mixture of experts: pairs of a token and an expert sorted by expert, the token of
// each place in that order, and the weighted sums of the results. Rows of an expert are cut into as few tiles as there
// can be, about evenly: a small last one would read all of w for little.
//
// Only sizes are known on the host, so buffers have room for any routing, and a captured graph stays valid. Which place
// a pair has among those of its expert depends on timing; no result does, as each pair is computed for itself. Two
// launches must not sort at the same time: they count in the same place.
#include "moe/slots.h"

#include "launch.h"

struct QuireMoeSortArgs {  // _SortArgs in quire/kernels/moe/hopper.py
    const int32_t* expert_ids;  // of the pairs; others than 0 .. n_experts are left out
    int32_t* ranks;             // of the pairs, among those of their expert
    int32_t* starts;            // of the experts: their first slot
    int4* tiles;                // (expert, first slot, slots, 0)
    int32_t* n_tiles;
    int32_t n_pairs, n_experts, tile_slots, start_step;  // slots of a tile, at most; starts are multiples of start_step
};

struct QuireMoePlaceArgs {  // _PlaceArgs in quire/kernels/moe/hopper.py
    const int32_t* expert_ids;
    const int32_t* starts;
    int32_t* slots;   // of the pairs; holds ranks, then slots
    int32_t* tokens;  // of the slots
    int32_t n_tokens, n_chosen, n_experts;
};

struct QuireMoeSumArgs {  // _SumArgs in quire/kernels/moe/hopper.py
    const void* x;              // [n_pairs, h]
    const int32_t* expert_ids;
    const float* weights;       // of the pairs
    const int32_t* slots;       // of the pairs: their rows of x; null: each its own
    const void* residual;       // null: 0
    void* y;
    int64_t residual_row, y_row;
    int32_t n_tokens, n_chosen, n_experts, h;
    int32_t n_shared;  // last pairs of each token: weight 1, not in expert_ids nor weights
};

namespace quire {
namespace {

constexpr int WIDTH = 8, THREADS = 128, SORT_THREADS = 512, SORT_PAIRS = 4, MAX_EXPERTS = 1024;

// Pairs of each expert so far, and blocks that have counted theirs; the last block of a launch leaves zeros.
__device__ int n_of_expert[MAX_EXPERTS], n_blocks_done;

__device__ void list_tiles(const QuireMoeSortArgs& args, const int* counts) {  // one warp
    const int lane = threadIdx.x, step_slots = args.tile_slots;
    int n_slots = 0, n_tiles = 0;
    for (int first = 0; first < args.n_experts; first += 32) {
        const int expert = first + lane, n = expert < args.n_experts ? counts[expert] : 0;
        const int own = (n + step_slots - 1) / step_slots;
        const int room = (n + args.start_step - 1) / args.start_step * args.start_step;
        int slots = room, tiles = own;
        for (int step = 1; step < 32; step *= 2) {
            const int more_slots = __shfl_up_sync(~0u, slots, step), more = __shfl_up_sync(~0u, tiles, step);
            if (lane >= step) slots += more_slots, tiles += more;
        }
        const int start = n_slots + slots - room, at = n_tiles + tiles - own;
        if (expert < args.n_experts) args.starts[expert] = start;
        const int each = own > 0 ? (n + 8 * own - 1) / (8 * own) * 8 : 0;
        for (int i = 0; i < own; i++) args.tiles[at + i] = make_int4(expert, start + i * each, min(each, n - i * each), 0);
        n_slots += __shfl_sync(~0u, slots, 31), n_tiles += __shfl_sync(~0u, tiles, 31);
    }
    if (lane == 0) *args.n_tiles = n_tiles;
}

__global__ void __launch_bounds__(SORT_THREADS) sort_kernel(const __grid_constant__ QuireMoeSortArgs args) {
    __shared__ int counts[MAX_EXPERTS];
    __shared__ bool is_last;
    int experts[SORT_PAIRS], ranks[SORT_PAIRS];
    const int first = blockIdx.x * SORT_PAIRS * SORT_THREADS + threadIdx.x;
    for (int i = threadIdx.x; i < args.n_experts; i += SORT_THREADS) counts[i] = 0;
    wait_for_previous_grid();
    let_next_grid_start();
#pragma unroll
    for (int i = 0; i < SORT_PAIRS; i++) {
        const int pair = first + i * SORT_THREADS, expert = pair < args.n_pairs ? load_shared(args.expert_ids + pair) : -1;
        experts[i] = expert < args.n_experts ? expert : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SORT_PAIRS; i++) ranks[i] = experts[i] >= 0 ? atomicAdd(&counts[experts[i]], 1) : 0;
    __syncthreads();
    for (int i = threadIdx.x; i < args.n_experts; i += SORT_THREADS) {
        if (counts[i] > 0) counts[i] = atomicAdd(&n_of_expert[i], counts[i]);
    }
    __threadfence();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SORT_PAIRS; i++)
        if (experts[i] >= 0) args.ranks[first + i * SORT_THREADS] = counts[experts[i]] + ranks[i];
    if (threadIdx.x == 0) is_last = atomicAdd(&n_blocks_done, 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < args.n_experts; i += SORT_THREADS) {
        counts[i] = load_shared(&n_of_expert[i]);
        n_of_expert[i] = 0;
    }
    if (threadIdx.x == 0) n_blocks_done = 0;
    __syncthreads();
    if (threadIdx.x < 32) list_tiles(args, counts);
}

// One thread a pair.
__global__ void __launch_bounds__(SORT_THREADS) place_kernel(const __grid_constant__ QuireMoePlaceArgs args) {
    const int pair = blockIdx.x * SORT_THREADS + threadIdx.x;
    wait_for_previous_grid();
    let_next_grid_start();
    if (pair >= args.n_tokens * args.n_chosen) return;
    const int slot = find_slot(args.expert_ids, args.starts, args.slots, pair, args.n_experts);
    if (slot >= 0) args.tokens[slot] = pair / args.n_chosen;
}

__device__ __forceinline__ void widen_cell(float (&to)[WIDTH], const int4& cell) {
    const int words[] = {cell.x, cell.y, cell.z, cell.w};
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) to[i] = low(words[i / 2]), to[i + 1] = high(words[i / 2]);
}

// One block a token and THREADS cells; experts in the order in which they were chosen. The grid before this one started
// when ids, weights and slots were there.
__global__ void __launch_bounds__(THREADS) sum_kernel(const __grid_constant__ QuireMoeSumArgs args) {
    __shared__ int rows[MAX_CHOSEN];
    __shared__ float factors[MAX_CHOSEN];
    const int token = blockIdx.x, n_cells = args.h / WIDTH, at = blockIdx.y * THREADS + threadIdx.x;
    let_next_grid_start();
    if (threadIdx.x < args.n_chosen) {
        const int pair = token * args.n_chosen + threadIdx.x, n_routed = args.n_chosen - args.n_shared;
        const bool is_shared = threadIdx.x >= n_routed;
        const int given = token * n_routed + threadIdx.x, expert = is_shared ? 0 : load_shared(args.expert_ids + given);
        const bool is_real = expert >= 0 && expert < args.n_experts;
        rows[threadIdx.x] = !is_real ? -1 : args.slots ? load_shared(args.slots + pair) : pair;
        factors[threadIdx.x] = is_shared ? 1.f : load_shared(args.weights + given);
    }
    __syncthreads();
    wait_for_previous_grid();
    if (at >= n_cells) return;
    float sum[WIDTH] = {}, x[WIDTH];
    if (args.residual) {
        const Element* from = static_cast<const Element*>(args.residual) + token * args.residual_row;
        widen_cell(sum, load_here(reinterpret_cast<const int4*>(from) + at));
    }
#pragma unroll 8
    for (int j = 0; j < args.n_chosen; j++) {
        if (rows[j] < 0) continue;
        widen_cell(x, load_here(static_cast<const int4*>(args.x) + int64_t(rows[j]) * n_cells + at));
#pragma unroll
        for (int i = 0; i < WIDTH; i++) sum[i] += factors[j] * x[i];
    }
    int4* to = reinterpret_cast<int4*>(static_cast<Element*>(args.y) + token * args.y_row) + at;
    *to = make_int4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}

}  // namespace
}  // namespace quire

extern "C" int quire_moe_sort(const QuireMoeSortArgs* args, void* stream) {
    using namespace quire;
    if (args->n_experts > MAX_EXPERTS) return cudaErrorInvalidValue;
    const int n_blocks = (args->n_pairs + SORT_THREADS * SORT_PAIRS - 1) / (SORT_THREADS * SORT_PAIRS);
    return launch(sort_kernel, dim3(n_blocks), SORT_THREADS, 0, stream, *args);
}

extern "C" int quire_moe_place(const QuireMoePlaceArgs* args, void* stream) {
    using namespace quire;
    const int n_blocks = (args->n_tokens * args->n_chosen + SORT_THREADS - 1) / SORT_THREADS;
    return launch(place_kernel, dim3(n_blocks), SORT_THREADS, 0, stream, *args);
}

extern "C" int quire_moe_sum(const QuireMoeSumArgs* args, void* stream) {
    using namespace quire;
    if (args->n_chosen > MAX_CHOSEN || args->h % WIDTH) return cudaErrorInvalidValue;
    const int n_groups = (args->h / WIDTH + THREADS - 1) / THREADS;
    return launch(sum_kernel, dim3(args->n_tokens, n_groups), THREADS, 0, stream, *args);
}
