// Attention of small lines (decode: few packed rows against many keys), bound by memory. Hopper, sm_90a.
//
// A persistent grid, one CTA a multiprocessor. A producer warp reads the page table ahead of time and keeps a ring of
// stages full by tensor copies, across the borders of lines; consumer warps share a stage by keys (and by rows beyond
// 16). Each computes S^T = K Q^T and O^T += V^T P^T with keys in the long side of the matrix instruction, so that few
// rows waste little, under its own running maximum, which moves only when a score passes it by 2^8. At the end of a
// line the consumers leave their sums in shared memory and go on; writer warps add them in a fixed order and bring q of
// the next line meanwhile, so that a line of few keys costs little beyond its keys. A second kernel contracts the parts
// of lines that were split.
//
// Compiled for one variant (see plain_variant.h), with QUIRE_HEAD_DIM 64, 96, 128, 192 or 256, QUIRE_BF16 0 or 1,
// QUIRE_ROWS 8, 16, 32 or 64 (most packed rows of a line), QUIRE_LAYOUT 0 paged, 1 ragged, 2 block-sparse, and
// QUIRE_CODED 0, or 1: pages hold e4m3 (see decode/codes.h). Page sizes are multiples of 8.
//
// Both kernels may start before the previous kernel of the stream has ended, and wait for it (programmatic dependent
// launch). What they read of the plan before they wait, `queue`, `merges` and `parts`, has to be there before that kernel
// starts. Blocks without a line leave at once, but for the first, so that who waits for this grid has waited for the one
// before it: the product behind attention then has room to read its weights.
#include "decode/consumer.h"
#include "decode/merge.h"
#include "decode/producer.h"
#include "decode/writer.h"
#include "shared_memory.h"

#include <numeric>

namespace quire {
namespace {

constexpr int FEW_MERGES = 4;  // of a multiprocessor: up to as many, each has a block
constexpr int BLOCK_THREADS = (WARPS + WRITERS + 1) * 32;  // consumers, writers, the producer

__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    small_lines_kernel(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map, const __grid_constant__ BoxShape shape) {
    if (args.n_large == 0) let_next_grid_start();  // large lines are read without a wait, see prefill.cu
    const int first = load_here(args.queue + blockIdx.x), last = load_here(args.queue + blockIdx.x + 1);
    if (first >= last && blockIdx.x > 0) return;
    const Shared shared = shared_layout();
    const int warp = uniform(threadIdx.x / 32);
    if (threadIdx.x == 0) {
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.filled + i * 8, 1);
            barrier_init(shared.drained + i * 8, WARPS);
        }
        for (int i = 0; i < QUERIES; ++i) barrier_init(shared.q_filled + i * 8, WRITERS * 32);
        for (int i = 0; i < RESULTS; ++i) {
            barrier_init(shared.written + i * 8, WARPS);
            barrier_init(shared.read + i * 8, WRITERS);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (!(STARTS_EARLY && args.settled) || warp < WARPS + WRITERS) {
        wait_for_previous_grid();
        let_next_grid_start();
    }
    if (first >= last) return;
    if (warp < WARPS)
        consume(args, shared, first, last, shape);
    else if (warp < WARPS + WRITERS)
        write(args, shared, first, last);
    else
        produce(args, k_map, v_map, shared, first, last, shape);
}

// ---- host ----------------------------------------------------------------------------------------------------------

bool fits(const QuireAttnArgs& args) {
    return args.head_dim == DIM && args.n_kv_heads > 0 && args.n_q_heads % args.n_kv_heads == 0;
}

cudaError_t encode_side(CUtensorMap* map, const void* base, int64_t page, int64_t head, int64_t token,
                        const QuireAttnArgs& args, const BoxShape& shape) {
    const uint64_t n_heads = args.n_kv_heads, n_pages = args.n_pages, bytes = NUMBER_BYTES;
    const uint64_t n_rows = LAYOUT == RAGGED ? args.n_pages : args.page_size;
    const uint32_t n_box_rows = shape.rows;
    if (CODED) {  // the bytes of a page of a head, in rows of 128
        const uint64_t sizes[5] = {128, n_rows * DIM / 128, n_heads, n_pages, 1};
        const uint64_t strides[4] = {128, uint64_t(head), uint64_t(page), uint64_t(page)};
        const uint32_t box[5] = {128, n_box_rows * DIM / 128, 1, 1, 1};
        return encode_map(map, base, 4, sizes, strides, box, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                          CU_TENSOR_MAP_SWIZZLE_128B, true);
    }
    if (shape.packed) {  // pairs of tokens
        const uint64_t sizes[5] = {64, 3, n_rows / 2, n_heads, n_pages};
        const uint64_t strides[4] = {128, 2 * DIM * bytes, head * bytes, page * bytes};
        const uint32_t box[5] = {64, 3, n_box_rows / 2, 1, 1};
        return encode_map(map, base, 5, sizes, strides, box);
    }
    constexpr bool even = DIM % 64 == 0;  // else chunk by chunk: columns beyond the row are filled with zeros
    const uint64_t sizes[5] = {even ? 64 : DIM, n_rows, even ? CHUNKS : 1, n_heads, n_pages};
    const uint64_t strides[4] = {token * bytes, 128, head * bytes, page * bytes};
    const uint32_t box[5] = {64, n_box_rows, even ? CHUNKS : 1, 1, 1};
    return encode_map(map, base, LAYOUT == RAGGED ? 4 : 5, sizes, strides, box);
}

}  // namespace
}  // namespace quire

extern "C" int quire_attention_small(const QuireAttnArgs* args, void* stream) {
    using namespace quire;
    if (!fits(*args) || args->n_ctas < 0) return cudaErrorInvalidValue;
    if (LAYOUT != RAGGED && (args->page_size < 8 || args->page_size % 8 != 0)) return cudaErrorInvalidValue;
    if (args->n_ctas == 0) return cudaSuccess;
    if (CODED && (args->k_token != DIM || args->v_token != DIM)) return cudaErrorInvalidValue;
    const BoxShape shape{LAYOUT == RAGGED ? KEYS : std::gcd(args->page_size, KEYS),
                         MAY_PACK && args->k_token == DIM && args->v_token == DIM};
    CUtensorMap k_map, v_map;
    cudaError_t error = encode_side(&k_map, args->k, args->k_page, args->k_head, args->k_token, *args, shape);
    if (error == cudaSuccess)
        error = encode_side(&v_map, args->v, args->v_page, args->v_head, args->v_token, *args, shape);
    if (error == cudaSuccess) error = allow_shared_memory<small_lines_kernel>(SHARED_BYTES);
    if (error != cudaSuccess) return error;
    return launch(small_lines_kernel, args->n_ctas, BLOCK_THREADS, SHARED_BYTES, stream, *args, k_map, v_map, shape);
}

extern "C" int quire_attention_merge(const QuireAttnArgs* args, void* stream) {
    using namespace quire;
    if (!fits(*args) || args->n_merges < 0) return cudaErrorInvalidValue;
    if (args->n_merges == 0) return cudaSuccess;
    if (!args->one_merge && args->n_merges <= FEW_MERGES * args->n_ctas)
        return launch(merge_kernel, args->n_merges, MERGE_THREADS, 0, stream, *args);
    return launch(merge_cells_kernel, CELL_BLOCKS * args->n_ctas, CELL_THREADS, 0, stream, *args);
}
