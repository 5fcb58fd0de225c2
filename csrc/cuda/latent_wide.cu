// Latent attention with 33 to 64 packed rows of a tile: many heads, drafts of fewer, prompts. Hopper, sm_90a. See
// latent.cu, whose lines, queue, maxima and merge these are.
//
// A CTA has 64 rows, whose result (64 x 512 sums) two warpgroups hold, 256 dimensions each. Blocks of 64 keys are theirs
// in turn: a team multiplies its own block with the queries, makes weights, and puts them in shared memory; both teams
// multiply them with their dimensions of the values. Team 1 is half a round behind, so that the products of one run
// while the other makes weights (the schedule that FlashMLA's authors published in April 2025 and call seesaw). Halves
// of a block are copied and given back apart, as there is no room for a third block.
//
// Per block the products of 64 rows take 1,152 + 1,024 cycles, and 72 KiB of keys are copied. Small lines: a persistent
// grid over the queue. Large lines: a CTA for each 64 packed rows of a line, side by side, so that the second one finds
// the keys in the L2 cache.
#define QUIRE_OUT_DIM 512
#define QUIRE_MERGE_WIDTH 32
#include "latent/wide_consumer.h"
#include "latent/producer.h"
#include "latent/host.h"

namespace quire {
namespace {

struct Maps {
    CUtensorMap halves[2];  // boxes of the left columns, and of the right ones
};

__device__ __forceinline__ void produce(const QuireAttnArgs& args, const Maps& maps, const Shared& shared,
                                        const Share& share, int box_rows, uint64_t hint) {
    const int lane = threadIdx.x % 32;
    uint32_t parities = 0;  // bit i: of the current use of stage i
    for_all_blocks(args, share, box_rows, [&](int block, int n_copied, int page, int eight) {
        const int stage = block % STAGES;
        const uint32_t parity = parities >> stage & 1;
        parities ^= 1 << stage;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int box_bytes = box_rows / 8 * (half == LEFT ? LEFT_EIGHT : RIGHT_EIGHT);
            const uint32_t filled = shared.filled_of(stage, half), to = shared.stage(stage) + half * LEFT_BYTES;
            await(shared.drained_of(stage, half), parity ^ 1);
            if (lane == 0) barrier_expect(filled, n_copied * box_bytes);
            __syncwarp();
            if (lane < n_copied)
                load_box(to + lane * box_bytes, &maps.halves[half], filled, hint, 0, 0, half * LEFT_CHUNKS, eight,
                         page);
            __syncwarp();
        }
    });
}

__global__ void __launch_bounds__(THREADS, 1)
    latent_wide_kernel(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ Maps maps, int box_rows,
                       bool is_large) {
    const Shared shared = shared_layout();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            for (int half = 0; half < 2; ++half) {
                prefetch_map(&maps.halves[half]);
                barrier_init(shared.filled_of(stage, half), 1);
                barrier_init(shared.drained_of(stage, half), (half == LEFT ? TEAM_THREADS : CONSUMERS) / 32);
            }
        }
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_grid();
    let_next_grid_start();
    constexpr int OF_LINE = 128 / ROWS;
    const int cta = blockIdx.x;
    Share share{args.large_lines, cta / OF_LINE, cta / OF_LINE + 1, cta % OF_LINE * ROWS};
    if (!is_large) share = {args.small_lines, load_here(args.queue + cta), load_here(args.queue + cta + 1), 0};
    if (threadIdx.x < CONSUMERS) {
        registers_up<CONSUMER_REGISTERS>();
        consume(args, shared, share, box_rows);
    } else {
        registers_down<PRODUCER_REGISTERS>();
        // Both CTAs of a large line read its keys, nobody reads those of a small line again.
        if (threadIdx.x < CONSUMERS + 32)
            produce(args, maps, shared, share, box_rows, is_large ? L2_EVICT_NORMAL : L2_EVICT_FIRST);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

int attend(const QuireAttnArgs& args, int n_blocks, bool is_large, void* stream) {
    if (!fits(args) || n_blocks < 0) return cudaErrorInvalidValue;
    if (n_blocks == 0) return cudaSuccess;
    Maps maps;
    cudaError_t error = encode_lines(&maps.halves[LEFT], args, LEFT_CHUNKS);
    if (error == cudaSuccess) error = encode_lines(&maps.halves[RIGHT], args, RIGHT_CHUNKS);
    if (error == cudaSuccess) error = allow_shared_memory<latent_wide_kernel>(SHARED_BYTES);
    if (error != cudaSuccess) return error;
    return launch(latent_wide_kernel, n_blocks, THREADS, SHARED_BYTES, stream, args, maps, box_rows_of(args),
                  is_large);
}
}  // namespace
}  // namespace quire

extern "C" int quire_latent_small(const QuireAttnArgs* args, void* stream) {
    return quire::attend(*args, args->n_ctas, false, stream);
}

extern "C" int quire_latent_large(const QuireAttnArgs* args, void* stream) {
    return quire::attend(*args, args->n_large * (128 / quire::ROWS), true, stream);
}
