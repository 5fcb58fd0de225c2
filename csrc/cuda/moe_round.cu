// Rows for the products of experts in e4m3 (moe_wide.cu): each is read once, rounded, and its codes and scales written for
// each expert of its token, in the order of the experts; or rounded where it stands, between the two products.
//
// Codes of a row depend on nothing but the row. A row that no expert has holds anything, and so do its codes.
#include "moe/rounding.h"
#include "moe/slots.h"

struct QuireMoeRoundArgs {  // _RoundArgs in quire/kernels/moe/hopper.py
    const void* x;
    const int32_t* expert_ids;  // of the pairs; null: rows stay where they are
    const int32_t* starts;
    int32_t* slots;  // holds ranks, then slots
    void* codes;     // [slots, h]
    float* scales;   // in blocks: [ceil(h / 128), scales_row], a slot's one below another; else [slots]
    int64_t x_row;   // elements
    int32_t n_tokens, n_chosen, n_experts, h, scales_row, in_blocks;
};

namespace quire {
namespace {

constexpr int THREADS = 128, WARPS = THREADS / 32;

// One block a row. A warp has 32 cells at once, of two groups of columns.
template <bool IN_BLOCKS>
__global__ void __launch_bounds__(THREADS) round_kernel(const __grid_constant__ QuireMoeRoundArgs args) {
    __shared__ int slots[MAX_CHOSEN];
    __shared__ float of_warps[WARPS];
    const int row = blockIdx.x, n_cells = args.h / CELL, lane = threadIdx.x % 32;
    const int4* from = reinterpret_cast<const int4*>(static_cast<const Element*>(args.x) + row * args.x_row);
    const int4 nothing = make_int4(0, 0, 0, 0);
    let_next_grid_start();
    wait_for_previous_grid();
    if (args.expert_ids == nullptr) {
        if (threadIdx.x == 0) slots[0] = row;
    } else if (threadIdx.x < args.n_chosen) {
        const int pair = row * args.n_chosen + threadIdx.x;
        slots[threadIdx.x] = find_slot(args.expert_ids, args.starts, args.slots, pair, args.n_experts);
    }
    float of_row = 0.0f;
    if (!IN_BLOCKS) {
        for (int i = threadIdx.x; i < n_cells; i += THREADS) of_row = fmaxf(of_row, Eight(load_here(from + i)).largest());
        of_row = largest_of_lanes<32>(of_row);
        if (lane == 0) of_warps[threadIdx.x / 32] = of_row;
    }
    __syncthreads();
    for (int i = 0; !IN_BLOCKS && i < WARPS; i++) of_row = fmaxf(of_row, of_warps[i]);
    for (int first = threadIdx.x / 32 * 32; first < n_cells; first += THREADS) {
        const int i = first + lane;
        const Eight eight(i < n_cells ? load_here(from + i) : nothing);
        const float scale = scale_of(IN_BLOCKS ? largest_of_lanes<GROUP_CELLS>(eight.largest()) : of_row);
        if (i >= n_cells) continue;
        const uint2 codes = eight.codes(scale);
        const bool has_scale = i % GROUP_CELLS == 0 && (IN_BLOCKS || i == 0);
        for (int j = 0; j < args.n_chosen; j++) {
            const int slot = slots[j];
            if (slot < 0) continue;
            *reinterpret_cast<uint2*>(static_cast<char*>(args.codes) + int64_t(slot) * args.h + i * CELL) = codes;
            if (has_scale) args.scales[int64_t(i / GROUP_CELLS) * args.scales_row + slot] = scale;
        }
    }
}

}  // namespace
}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_moe_round(const QuireMoeRoundArgs* args, void* stream) {
    using namespace quire;
    if (args->n_chosen > MAX_CHOSEN || args->h % CELL) return cudaErrorInvalidValue;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(args->n_tokens);
    config.blockDim = dim3(THREADS);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, args->in_blocks ? round_kernel<true> : round_kernel<false>, *args);
}
