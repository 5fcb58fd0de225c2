// Latent attention: one KV head, whose value is the first 512 of the key's 576 numbers. Hopper, sm_90a.
//
// A CTA a multiprocessor: a producer warp keeps two stages of 64 keys full by tensor copies, across the borders of lines;
// warpgroups read each stage once from memory and twice from shared memory: S^T = K Q^T and O^T += V^T P^T. Keys and
// dimensions are in the long side of the matrix instruction, so that 16 rows waste nothing. Weights pass through shared
// memory, under a maximum of each row that moves only when a logit passes it by 2^8. With 64 rows two warpgroups share
// the logits by rows and the sums by dimensions. Small lines: a persistent grid over the queue. Large lines: a CTA for
// each 64 packed rows of a line, side by side, so that the second one finds the keys in the L2 cache. A second kernel
// contracts the parts of lines that were split.
//
// Compiled with QUIRE_BF16 0 or 1 and QUIRE_ROWS 16, 32 or 64 (packed rows of a tile), for the plain variant. Page sizes
// are multiples of 8. All kernels may start before the previous kernel of the stream has ended, and wait for it
// (programmatic dependent launch); the merge reads its plan before it waits, see decode.cu.
#define QUIRE_OUT_DIM 512
#define QUIRE_MERGE_WIDTH 32
#include "decode/merge.h"
#include "latent/consumer.h"
#include "latent/producer.h"
#include "shared_memory.h"

#include <numeric>

namespace quire {
namespace {

constexpr int MANY_PARTS = 8;  // of a merge, on average: threads share them

__global__ void __launch_bounds__(THREADS, 1)
    latent_kernel(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ CUtensorMap map, int box_rows,
                  bool is_large) {
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
    const int halves = 128 / ROWS, cta = blockIdx.x;
    Share share{args.large_lines, cta / halves, cta / halves + 1, cta % halves * ROWS};
    if (!is_large) share = {args.small_lines, load_here(args.queue + cta), load_here(args.queue + cta + 1), 0};
    if (threadIdx.x < CONSUMERS) {
        if constexpr (SHIFTS_REGISTERS) registers_up<CONSUMER_REGISTERS>();
        consume(args, shared, share, box_rows);
    } else {
        if constexpr (SHIFTS_REGISTERS) registers_down<PRODUCER_REGISTERS>();
        // Both CTAs of a large line read its keys, nobody reads those of a small line again.
        if (threadIdx.x < CONSUMERS + 32)
            produce(args, map, shared, share, box_rows, is_large ? L2_EVICT_NORMAL : L2_EVICT_FIRST);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

bool fits(const QuireAttnArgs& args) {
    return args.head_dim == DIM && args.n_kv_heads == 1 && args.n_q_heads > 0 && args.page_size >= 8 &&
           args.page_size % 8 == 0;
}

int attend(const QuireAttnArgs& args, int n_blocks, bool is_large, void* stream) {
    if (!fits(args) || n_blocks < 0) return cudaErrorInvalidValue;
    if (n_blocks == 0) return cudaSuccess;
    const uint32_t box_rows = std::gcd(args.page_size, KEYS);
    const uint64_t sizes[5] = {64, 8, CHUNKS, static_cast<uint64_t>(args.page_size / 8),
                               static_cast<uint64_t>(args.n_pages)};
    const uint64_t bytes = sizeof(Element);
    const uint64_t strides[4] = {args.k_token * bytes, 128, args.k_token * 8 * bytes, args.k_page * bytes};
    const uint32_t box[5] = {64, 8, CHUNKS, box_rows / 8, 1};
    CUtensorMap map;
    cudaError_t error = encode_map(&map, args.k, 5, sizes, strides, box);
    if (error == cudaSuccess) error = allow_shared_memory<latent_kernel>(SHARED_BYTES);
    if (error != cudaSuccess) return error;
    return launch(latent_kernel, n_blocks, THREADS, SHARED_BYTES, stream, args, map, static_cast<int>(box_rows),
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

extern "C" int quire_latent_merge(const QuireAttnArgs* args, void* stream) {
    using namespace quire;
    if (!fits(*args) || args->n_merges < 0) return cudaErrorInvalidValue;
    if (args->n_merges == 0) return cudaSuccess;
    if (!args->one_merge && args->n_merges * MANY_PARTS <= args->n_ctas)
        return launch(merge_kernel, dim3(args->n_merges, args->n_q_heads * CELLS / MERGE_WIDTH), MERGE_THREADS, 0, stream,
                      *args);
    return launch(merge_cells_kernel, CELL_BLOCKS * args->n_ctas, CELL_THREADS, 0, stream, *args);
}
