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

constexpr int WARPS = 2, THREADS = WARPS * 32;  // of a block: a few hundred rows should reach all multiprocessors

// One warp a row. It has 32 cells at once, of two groups of columns; lane j knows the slot of the row's j-th expert.
template <bool IN_BLOCKS>
__global__ void __launch_bounds__(THREADS) round_kernel(const __grid_constant__ QuireMoeRoundArgs args) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, n_cells = args.h / CELL;
    const int4* from = reinterpret_cast<const int4*>(static_cast<const Element*>(args.x) + row * args.x_row);
    let_next_grid_start();
    wait_for_previous_grid();
    if (row >= args.n_tokens) return;
    int own = row;
    if (args.expert_ids != nullptr && lane < args.n_chosen)
        own = find_slot(args.expert_ids, args.starts, args.slots, row * args.n_chosen + lane, args.n_experts);
    const float of_row = IN_BLOCKS ? 0.0f : largest_of_row(from, n_cells);
    int4 cells[AT_ONCE];
    for (int first = lane; first < n_cells + lane; first += 32 * AT_ONCE) {
        load_cells(cells, from, first, 32, n_cells);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int at = first + i * 32;
            if (at >= n_cells + lane) break;
            const Eight eight(cells[i]);
            const float scale = scale_of(IN_BLOCKS ? largest_of_lanes<GROUP_CELLS>(eight.largest()) : of_row);
            const uint2 codes = eight.codes(scale);
            for (int j = 0; j < args.n_chosen; j++) {
                const int slot = __shfl_sync(~0u, own, j);
                if (slot < 0 || at >= n_cells) continue;
                *reinterpret_cast<uint2*>(static_cast<char*>(args.codes) + int64_t(slot) * args.h + at * CELL) = codes;
                if (at % GROUP_CELLS == 0 && (IN_BLOCKS || at == 0))
                    args.scales[int64_t(at / GROUP_CELLS) * args.scales_row + slot] = scale;
            }
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
    config.gridDim = dim3((args->n_tokens + WARPS - 1) / WARPS);
    config.blockDim = dim3(THREADS);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, args->in_blocks ? round_kernel<true> : round_kernel<false>, *args);
}
