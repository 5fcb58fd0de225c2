// The host's side that both kernels of latent attention have: what they take, maps of lines, and sums of parts.
#pragma once
#include "decode/merge.h"
#include "shared_memory.h"

#include <numeric>

namespace quire {
namespace {

// Of a merge of FEW_HEADS, on average: threads share them. Merges of more heads are as many threads as so many of fewer.
constexpr int MANY_PARTS = 8, FEW_HEADS = 16;

bool fits(const QuireAttnArgs& args) {
    return args.head_dim == DIM && args.n_kv_heads == 1 && args.n_q_heads > 0 && args.page_size >= 8 &&
           args.page_size % 8 == 0;
}

int box_rows_of(const QuireAttnArgs& args) { return std::gcd(args.page_size, KEYS); }

// A map of lines whose boxes have some chunks of 64 columns.
cudaError_t encode_lines(CUtensorMap* map, const QuireAttnArgs& args, uint32_t n_chunks) {
    const uint64_t sizes[5] = {64, 8, CHUNKS, static_cast<uint64_t>(args.page_size / 8),
                               static_cast<uint64_t>(args.n_pages)};
    const uint64_t bytes = sizeof(Element);
    const uint64_t strides[4] = {args.k_token * bytes, 128, args.k_token * 8 * bytes, args.k_page * bytes};
    const uint32_t box[5] = {64, 8, n_chunks, static_cast<uint32_t>(box_rows_of(args) / 8), 1};
    return encode_map(map, args.k, 5, sizes, strides, box);
}

}  // namespace
}  // namespace quire

extern "C" int quire_latent_merge(const QuireAttnArgs* args, void* stream) {
    using namespace quire;
    if (!fits(*args) || args->n_merges < 0) return cudaErrorInvalidValue;
    if (args->n_merges == 0) return cudaSuccess;
    if (!args->one_merge && args->n_merges * args->n_q_heads * MANY_PARTS <= args->n_ctas * FEW_HEADS)
        return launch(merge_kernel, dim3(args->n_merges, args->n_q_heads * CELLS / MERGE_WIDTH), MERGE_THREADS, 0, stream,
                      *args);
    return launch(merge_cells_kernel, CELL_BLOCKS * args->n_ctas, CELL_THREADS, 0, stream, *args);
}
