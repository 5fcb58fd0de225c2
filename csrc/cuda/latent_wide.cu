// Latent attention with 33 to 64 packed rows of a tile: many heads, drafts of fewer, prompts. Hopper, sm_90a. See
// latent.cu, whose lines, queue, maxima and merge these are.
//
// A CTA has 64 rows, whose result (64 x 512 sums) two warpgroups hold, 256 dimensions each. Blocks of 64 keys are theirs
// in turn: a team multiplies its own block with the queries, makes weights, and puts them in shared memory; both teams
// multiply them with their dimensions of the values. Team 1 is half a round behind, so that the products of one run
// while the other makes weights (the schedule that FlashMLA's authors published in April 2025 and call seesaw). There is
// no room for a third block, so parts of one are copied and given back apart.
//
// Per block the products of 64 rows take 1,152 + 1,024 cycles, and 72 KiB of keys are copied. Small lines: a persistent
// grid over the queue. Large lines: a CTA for each 64 packed rows of a line, side by side, so that the second one finds
// the keys in the L2 cache; where both see the same keys (a token of more than 64 heads) they are a cluster, and each
// copies half of them for both.
#define QUIRE_OUT_DIM 512
#define QUIRE_MERGE_WIDTH 32
#include "latent/wide_consumer.h"
#include "latent/producer.h"
#include "latent/host.h"

namespace quire {
namespace {

struct Maps {
    CUtensorMap parts, lasts;  // of boxes with the columns of a part, and of the last part
};

constexpr int AHEAD = 2;  // blocks that a cluster has the L2 cache ask for, before their copies

// A warp for each part. Both CTAs of a cluster (`n_sharing` 2) read the same keys: each copies every other part to both.
__device__ __forceinline__ void produce(const QuireAttnArgs& args, const Maps& maps, const Shared& shared,
                                        const Share& share, int box_rows, int n_sharing, uint64_t hint) {
    const int lane = threadIdx.x % 32, part = uniform((threadIdx.x - CONSUMERS) / 32);
    const bool copies = n_sharing == 1 || part % 2 == blockIdx.x % 2;
    const CUtensorMap* map = part == LAST ? &maps.lasts : &maps.parts;
    const int box_bytes = box_rows / 8 * eight_of(part), chunk = part * PART_CHUNKS;
    uint32_t parities = 0;  // bit i: of the current use of stage i
    for_all_blocks<AHEAD>(args, share, box_rows, [&](int block, const Boxes& boxes, const Boxes& later) {
        const int stage = block % STAGES;
        const uint32_t filled = shared.filled_of(stage, part);
        const uint32_t to = shared.stage(stage) + part * PART_BYTES + lane * box_bytes;
        await(shared.drained_of(stage, part), parities >> stage & 1 ^ 1);
        parities ^= 1 << stage;
        if (lane == 0) barrier_expect(filled, boxes.n * box_bytes);
        __syncwarp();
        if (copies && lane < boxes.n) {
            if (n_sharing == 1) {
                load_box(to, map, filled, hint, 0, 0, chunk, boxes.eight, boxes.page);
            } else {
                load_box_for_all(to, map, filled, hint, 3, 0, 0, chunk, boxes.eight, boxes.page);
            }
        }
        __syncwarp();
        // Alone a CTA has memory's whole rate without it, and loses by it.
        if (part == 0 && args.k_token == DIM && lane < later.n && n_sharing == 2 && (block + blockIdx.x) % 2 == 0) {
            const int64_t at = later.page * args.k_page + later.eight * 8 * args.k_token;
            prefetch_bytes(static_cast<const Element*>(args.k) + at, box_rows * DIM * sizeof(Element));
        }
        __syncwarp();
    });
}

__global__ void __launch_bounds__(THREADS, 1)
    latent_wide_kernel(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ Maps maps, int box_rows,
                       bool is_large, int n_sharing) {
    const Shared shared = shared_layout();
    if (threadIdx.x == 0) {
        prefetch_map(&maps.parts);
        prefetch_map(&maps.lasts);
        for (int i = 0; i < N_BARRIERS; ++i) {
            barrier_init(shared.filled + i * 8, 1);
            const int n_threads = i % PARTS == LAST ? CONSUMERS : TEAM_THREADS;  // that say when they are done
            barrier_init(shared.drained + i * 8, n_threads / 32 * n_sharing);
        }
        barrier_init_fence();
    }
    cluster_arrive();
    cluster_wait();
    wait_for_previous_grid();
    let_next_grid_start();
    constexpr int OF_LINE = 128 / ROWS;
    const int cta = blockIdx.x;
    Share share{args.large_lines, cta / OF_LINE, cta / OF_LINE + 1, cta % OF_LINE * ROWS};
    if (!is_large) share = {args.small_lines, load_here(args.queue + cta), load_here(args.queue + cta + 1), 0};
    if (threadIdx.x < CONSUMERS) {
        registers_up<CONSUMER_REGISTERS>();
        consume(args, shared, share, box_rows, n_sharing);
    } else {
        registers_down<PRODUCER_REGISTERS>();
        // Both CTAs of a large line read its keys, unless they share their copies.
        const uint64_t hint = is_large && n_sharing == 1 ? L2_EVICT_NORMAL : L2_EVICT_FIRST;
        produce(args, maps, shared, share, box_rows, n_sharing, hint);
    }
    cluster_arrive();  // none ends while the other one may copy to it, or say that a half is done
    cluster_wait();
}

// ---- host ----------------------------------------------------------------------------------------------------------

int attend(const QuireAttnArgs& args, int n_blocks, bool is_large, void* stream) {
    if (!fits(args) || n_blocks < 0) return cudaErrorInvalidValue;
    if (n_blocks == 0) return cudaSuccess;
    Maps maps;
    cudaError_t error = encode_lines(&maps.parts, args, PART_CHUNKS);
    if (error == cudaSuccess) error = encode_lines(&maps.lasts, args, LAST_CHUNKS);
    if (error == cudaSuccess) error = allow_shared_memory<latent_wide_kernel>(SHARED_BYTES);
    if (error != cudaSuccess) return error;
    // With more heads than rows a line is one token, so that its two CTAs see the same keys.
    const int n_sharing = is_large && args.n_q_heads > ROWS ? 2 : 1;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = n_sharing;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(n_blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, latent_wide_kernel, args, maps, box_rows_of(args), is_large, n_sharing);
}
}  // namespace
}  // namespace quire

extern "C" int quire_latent_small(const QuireAttnArgs* args, void* stream) {
    return quire::attend(*args, args->n_ctas, false, stream);
}

extern "C" int quire_latent_large(const QuireAttnArgs* args, void* stream) {
    return quire::attend(*args, args->n_large * (128 / quire::ROWS), true, stream);
}
