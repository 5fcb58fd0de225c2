// Latent attention: one KV head, whose value is the first 512 of the key's 576 numbers. Hopper, sm_90a. Small lines of up
// to 32 packed rows; more: latent_wide.cu.
//
// A CTA a multiprocessor, a persistent grid over the queue: a producer warp keeps two stages of 64 keys full by tensor
// copies, across the borders of lines; a warpgroup reads each stage once from memory and twice from shared memory:
// S^T = K Q^T and O^T += V^T P^T. Keys and dimensions are in the long side of the matrix instruction, so that 16 rows
// waste nothing. Weights pass through shared memory, under a maximum of each row that moves only when a logit passes it
// by 2^8. A second kernel contracts the parts of lines that were split.
//
// Compiled with QUIRE_BF16 0 or 1 and QUIRE_ROWS 16 or 32 (packed rows of a tile), for the plain variant. Page sizes are
// multiples of 8. All kernels may start before the previous kernel of the stream has ended, and wait for it
// (programmatic dependent launch); the merge reads its plan before it waits, see decode.cu.
#define QUIRE_OUT_DIM 512
#define QUIRE_MERGE_WIDTH 32
#include "latent/consumer.h"
#include "latent/producer.h"
#include "latent/host.h"

namespace quire {
namespace {

__device__ __forceinline__ void produce(const QuireAttnArgs& args, const CUtensorMap& map, const Shared& shared,
                                        const Share& share, int box_rows) {
    const int lane = threadIdx.x % 32, box_bytes = box_rows / 8 * EIGHT_BYTES;
    Stage stage;
    for_all_blocks<0>(args, share, box_rows, [&](int, const Boxes& boxes, const Boxes&) {
        const uint32_t filled = shared.filled + stage.at * 8;
        await(shared.drained + stage.at * 8, stage.parity ^ 1);
        if (lane == 0) barrier_expect(filled, boxes.n * box_bytes);
        __syncwarp();
        if (lane < boxes.n)  // nobody reads these keys again
            load_box(shared.ring + stage.at * STAGE_BYTES + lane * box_bytes, &map, filled, L2_EVICT_FIRST, 0, 0, 0,
                     boxes.eight, boxes.page);
        __syncwarp();
        stage.advance();
    });
}

__global__ void __launch_bounds__(THREADS, 1)
    latent_kernel(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ CUtensorMap map, int box_rows) {
    const Shared shared = shared_layout();
    if (threadIdx.x == 0) {
        prefetch_map(&map);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.filled + i * 8, 1);
            barrier_init(shared.drained + i * 8, CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_grid();
    let_next_grid_start();
    const int* queue = args.queue + blockIdx.x;
    const Share share{args.small_lines, load_here(queue), load_here(queue + 1), 0};
    if (threadIdx.x < CONSUMERS) {
        consume(args, shared, share, box_rows);
    } else {
        produce(args, map, shared, share, box_rows);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

int attend(const QuireAttnArgs& args, void* stream) {
    if (!fits(args) || args.n_ctas < 0) return cudaErrorInvalidValue;
    if (args.n_ctas == 0) return cudaSuccess;
    CUtensorMap map;
    cudaError_t error = encode_lines(&map, args, CHUNKS);
    if (error == cudaSuccess) error = allow_shared_memory<latent_kernel>(SHARED_BYTES);
    if (error != cudaSuccess) return error;
    return launch(latent_kernel, args.n_ctas, THREADS, SHARED_BYTES, stream, args, map, box_rows_of(args));
}
}  // namespace
}  // namespace quire

extern "C" int quire_latent_small(const QuireAttnArgs* args, void* stream) { return quire::attend(*args, stream); }
