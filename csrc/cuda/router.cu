// The experts of a few rows in one launch: scores of each row against every expert, in float32, then the choice, as
// `route` in quire/kernels/moe/op.py describes it. Hopper; QUIRE_BF16 0 or 1; QUIRE_WIDE: 1 if w is float32.
//
// A cluster of blocks has some rows; each warp multiplies them by one or two experts at a time and stores their logits in the
// memory of the last block, whose warps then choose, one for a row. Weights are asked for before the wait for the
// previous grid, which writes x. A row's sums and its choice depend on nothing but the row, whatever the batch.
#include "gemm.h"

struct QuireRouterArgs {  // _Args in quire/kernels/moe/hopper_router.py
    const void* x;
    const void* w;            // [n_experts, hidden], contiguous
    const void* bias;         // [n_experts], in w's type; null: there is none
    const float* correction;  // null: there is none
    unsigned long long* load;  // null: nothing is counted
    int32_t* expert_ids;      // [n, n_chosen]
    float* weights;           // likewise
    int64_t x_row;            // elements
    int32_t n, hidden, n_experts, n_chosen, n_groups, n_chosen_groups, n_group_best;
    int32_t scores;           // 0: softmax, 1: sigmoid, 2: the experts in turn, whatever the scores
    int32_t renormalise;
    float scale;
};

namespace quire {
namespace {

#if QUIRE_WIDE
using Weight = float;
#else
using Weight = Element;
#endif
constexpr int WARPS = 8, THREADS = WARPS * 32, CLUSTER = 8;
constexpr int COLUMNS = 2048;                    // of x and w at a time
constexpr int CELL = 8;                          // elements of x in 16 bytes
constexpr int WIDTH = 16 / sizeof(Weight);       // of w
constexpr int STEPS = COLUMNS / (32 * WIDTH);    // loads of a lane for them
constexpr int FEW_ROWS = 4, MORE_ROWS = 8;       // of a cluster
constexpr int MAX_ROWS_OF_FEW = 64;
constexpr float LARGEST = 3.4028234663852886e38f, TINY = 1.1754943508222875e-38f, ENDLESS = INFINITY;
constexpr int TAKEN = INT32_MIN;                 // key below all others

// ---- scores --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_weights(int4 (&w)[STEPS], const QuireRouterArgs& a, int expert, int first) {
    const Weight* from = static_cast<const Weight*>(a.w) + int64_t(expert) * a.hidden;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int column = first + (i * 32 + threadIdx.x % 32) * WIDTH;
        w[i] = make_int4(0, 0, 0, 0);
        if (expert < a.n_experts && column < a.hidden) w[i] = load_here(reinterpret_cast<const int4*>(from + column));
    }
}

__device__ __forceinline__ void load_rows(int4* rows, const QuireRouterArgs& a, int first_row, int n_rows, int first) {
    for (int i = threadIdx.x; i < n_rows * (COLUMNS / CELL); i += THREADS) {
        const int row = i / (COLUMNS / CELL), column = first + i % (COLUMNS / CELL) * CELL;
        const Element* from = static_cast<const Element*>(a.x) + (first_row + row) * a.x_row + column;
        rows[i] = column < a.hidden ? load_here(reinterpret_cast<const int4*>(from)) : make_int4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ float add_product(float sum, const int4& w, const int* x) {
    const int words[] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) {
#if QUIRE_WIDE
        sum += __int_as_float(words[2 * i]) * low(x[i]);
        sum += __int_as_float(words[2 * i + 1]) * high(x[i]);
#else
        sum += low(words[i]) * low(x[i]);
        sum += high(words[i]) * high(x[i]);
#endif
    }
    return sum;
}

template <int EXPERTS, int ROWS>
__device__ __forceinline__ void add_products(float (&sums)[EXPERTS][ROWS], const int4 (&w)[EXPERTS][STEPS],
                                             const int4* rows, int n_rows) {
    const int* words = reinterpret_cast<const int*>(rows) + threadIdx.x % 32 * (WIDTH / 2);
    const auto add = [&](int row, int i) {
        int x[WIDTH / 2];
#pragma unroll
        for (int j = 0; j < WIDTH / 2; ++j) x[j] = words[row * (COLUMNS / 2) + i * 32 * (WIDTH / 2) + j];
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) sums[e][row] = add_product(sums[e][row], w[e][i], x);
    };
    if constexpr (EXPERTS == 1) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (row >= n_rows) break;
#pragma unroll
            for (int i = 0; i < STEPS; ++i) add(row, i);
        }
    } else {  // w of two experts has no room as float32: it is widened for all rows in turn
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (row >= n_rows) break;
                add(row, i);
            }
        }
    }
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// ---- the choice, by one warp: lane l has the experts l, l + 32, .. --------------------------------------------------

// In the order of numbers; of NaN those without a sign are the largest.
__device__ __forceinline__ int key_of(float x) {
    const int bits = __float_as_int(x + 0.f);  // -0 is 0
    return bits < 0 ? bits ^ INT32_MAX : bits;
}
__device__ __forceinline__ float number_of(int key) { return __int_as_float(key < 0 ? key ^ INT32_MAX : key); }

template <int CELLS> __device__ __forceinline__ int largest_of(const int (&keys)[CELLS]) {
    int most = TAKEN;
#pragma unroll
    for (int i = 0; i < CELLS; ++i) most = max(most, keys[i]);
    return __reduce_max_sync(~0u, most);
}
template <int CELLS> __device__ __forceinline__ int first_with(const int (&keys)[CELLS], int key) {
    int at = INT32_MAX;
#pragma unroll
    for (int i = CELLS - 1; i >= 0; --i)
        if (keys[i] == key) at = threadIdx.x % 32 + 32 * i;
    return __reduce_min_sync(~0u, at);
}

// The keys of experts outside the best groups become those of -infinity.
template <int CELLS> __device__ __forceinline__ void keep_best_groups(int (&keys)[CELLS], const QuireRouterArgs& a) {
    const int lane = threadIdx.x % 32, size = a.n_experts / a.n_groups;
    int of_group[1] = {TAKEN};  // lane g has that of group g
    for (int group = 0; group < a.n_groups; ++group) {
        int own[CELLS];
#pragma unroll
        for (int i = 0; i < CELLS; ++i) own[i] = (lane + 32 * i) / size == group ? keys[i] : TAKEN;
        float value = 0.f;
        for (int j = 0; j < a.n_group_best; ++j) {
            const int most = largest_of(own), at = first_with(own, most);
            value += number_of(most);
#pragma unroll
            for (int i = 0; i < CELLS; ++i)
                if (lane + 32 * i == at) own[i] = TAKEN;
        }
        if (lane == group) of_group[0] = key_of(value);
    }
    uint32_t chosen = 0;
    for (int j = 0; j < a.n_chosen_groups; ++j) {
        const int best = first_with(of_group, largest_of(of_group));
        chosen |= 1u << best;
        if (lane == best) of_group[0] = TAKEN;
    }
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        const int expert = lane + 32 * i;
        if (expert < a.n_experts && !(chosen >> expert / size & 1)) keys[i] = key_of(-ENDLESS);
    }
}

template <int CELLS>
__device__ __forceinline__ void scores_of(float (&scores)[CELLS], const float* logits, const QuireRouterArgs& a) {
    const int lane = threadIdx.x % 32;
    int keys[CELLS];
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        const int expert = lane + 32 * i;
        float x = expert < a.n_experts ? logits[expert] : -ENDLESS;
        if (expert < a.n_experts) x = x == x ? fminf(fmaxf(x, -LARGEST), LARGEST) : -LARGEST;
        scores[i] = x, keys[i] = key_of(x);
    }
    if (a.scores == 1) {
#pragma unroll
        for (int i = 0; i < CELLS; ++i) scores[i] = 1.f / (1.f + expf(-scores[i]));
        return;
    }
    const float most = number_of(largest_of(keys));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < CELLS; ++i) sum += scores[i] = expf(scores[i] - most);
    sum = sum_of_warp(sum);
#pragma unroll
    for (int i = 0; i < CELLS; ++i) scores[i] = scores[i] / sum;
}

template <int CELLS> __device__ void choose(const QuireRouterArgs& a, int row, const float* logits) {
    const int lane = threadIdx.x % 32;
    float scores[CELLS];
    int keys[CELLS];
    scores_of(scores, logits, a);
#pragma unroll
    for (int i = 0; i < CELLS; ++i) {
        const int expert = lane + 32 * i;
        const float added = a.correction && expert < a.n_experts ? a.correction[expert] : 0.f;
        keys[i] = expert < a.n_experts ? key_of(scores[i] + added) : TAKEN;
    }
    if (a.n_chosen_groups < a.n_groups) keep_best_groups(keys, a);
    int own = 0;  // lane j has what was chosen as number j
    float weight = 0.f;
    for (int j = 0; j < a.n_chosen; ++j) {
        int best = first_with(keys, largest_of(keys));
        float found = 0.f;
#pragma unroll
        for (int i = 0; i < CELLS; ++i)
            if (lane + 32 * i == best) found = scores[i], keys[i] = TAKEN;
        found = sum_of_warp(found);
        if (a.scores == 2) best = (int64_t(row) * a.n_chosen + j) % a.n_experts, found = 1.f / a.n_chosen;
        if (lane == j) own = best, weight = found;
    }
    if (a.renormalise) weight = weight / (sum_of_warp(weight) + TINY);
    const int64_t first = int64_t(row) * a.n_chosen;
    if (lane < a.n_chosen) {
        a.expert_ids[first + lane] = own, a.weights[first + lane] = weight * a.scale;
        if (a.load) atomicAdd(a.load + own, 1ull);
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bias_of(const QuireRouterArgs& a, int expert) {
    if (!a.bias) return 0.f;
#if QUIRE_WIDE
    return static_cast<const float*>(a.bias)[expert];
#else
    return widen(static_cast<const Element*>(a.bias)[expert]);
#endif
}

// Experts that a warp multiplies a row by at a time: two read x once, and no warp has to begin anew for a second one.
template <int CELLS> constexpr int AT_ONCE = QUIRE_WIDE || CELLS <= 2 ? 1 : 2;

template <int ROWS, int CELLS>
__global__ void __launch_bounds__(THREADS, 2) router_kernel(const __grid_constant__ QuireRouterArgs a, int n_ranks) {
    constexpr int EXPERTS = AT_ONCE<CELLS>, OF_BLOCK = WARPS * EXPERTS;
    __shared__ int4 rows[ROWS * (COLUMNS / CELL)];
    __shared__ float logits[ROWS * CELLS * 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % n_ranks, first_row = blockIdx.x / n_ranks * ROWS, n_rows = min(ROWS, a.n - first_row);
    int4 w[EXPERTS][STEPS];
    const auto load = [&](int first, int column) {
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) load_weights(w[e], a, first + warp * EXPERTS + e, column);
    };
    cluster_arrive();
    let_next_grid_start();
    load(rank * OF_BLOCK, 0);
    cluster_wait();  // all blocks have started: their memory can be written
    wait_for_previous_grid();
    for (int first = rank * OF_BLOCK; first < a.n_experts; first += n_ranks * OF_BLOCK) {
        const bool is_first = first == rank * OF_BLOCK;
        float sums[EXPERTS][ROWS] = {};
        for (int column = 0; column < a.hidden; column += COLUMNS) {
            if (column || !is_first) load(first, column);
            if (is_first || a.hidden > COLUMNS) {
                __syncthreads();
                load_rows(rows, a, first_row, n_rows, column);
                __syncthreads();
            }
            add_products(sums, w, rows, n_rows);
        }
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) {
            const int expert = first + warp * EXPERTS + e;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float sum = sum_of_warp(sums[e][row]);
                if (lane == 0 && row < n_rows && expert < a.n_experts) {
                    const uint32_t here = shared_address(logits + row * CELLS * 32 + expert);
                    store_there(address_in(here, n_ranks - 1), sum + bias_of(a, expert));
                }
            }
        }
    }
    cluster_arrive();
    cluster_wait();
    if (rank == n_ranks - 1 && warp < n_rows) choose<CELLS>(a, first_row + warp, logits + warp * CELLS * 32);
}

template <int ROWS, int CELLS> int launch(const QuireRouterArgs& a, void* stream) {
    constexpr int OF_BLOCK = WARPS * AT_ONCE<CELLS>;
    const int n_ranks = min(CLUSTER, (a.n_experts + OF_BLOCK - 1) / OF_BLOCK);
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = n_ranks;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((a.n + ROWS - 1) / ROWS * n_ranks);
    config.blockDim = dim3(THREADS);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, router_kernel<ROWS, CELLS>, a, n_ranks);
}

template <int CELLS> int launch_rows(const QuireRouterArgs& a, void* stream) {
    if constexpr (CELLS <= 8)
        if (a.n > MAX_ROWS_OF_FEW) return launch<MORE_ROWS, CELLS>(a, stream);
    return launch<FEW_ROWS, CELLS>(a, stream);
}

}  // namespace
}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_router(const QuireRouterArgs* args, void* stream) {
    using namespace quire;
    if (args->n_experts > 512 || args->n_chosen > 32 || args->n_groups > 32 || args->hidden % CELL)
        return cudaErrorInvalidValue;
    if (args->n_experts <= 64) return launch_rows<2>(*args, stream);
    if (args->n_experts <= 128) return launch_rows<4>(*args, stream);
    if (args->n_experts <= 256) return launch_rows<8>(*args, stream);
    return launch_rows<16>(*args, stream);
}
