// Host: how moe_few.cu reads its matrices, as boxes of the copy engine.
#pragma once
#include "moe/few_lists.h"

namespace quire {

struct Maps {  // of each product: of the experts, and of what all tokens share
    CUtensorMap up[2], down[2];
};

#if QUIRE_CODES
inline cudaError_t encode_codes(CUtensorMap* map, const void* codes, int k, int rank, const uint64_t* rows, const uint32_t* box) {
    const uint64_t row = uint64_t(k) * 128 / WIDTH, sizes[] = {row, rows[0], rank > 2 ? rows[1] : 1};
    const uint64_t strides[] = {row, rows[0] * row};
    return encode_map(map, codes, rank, sizes, strides, box, L2_BY_128, SWIZZLED, true);
}
inline cudaError_t encode_up(CUtensorMap* map, const QuireMoeFewArgs& a) {
    const uint64_t rows[] = {uint64_t(a.inner), 2 * uint64_t(a.n_experts)};
    const uint32_t box[] = {128, Up::OUT_ROWS, 2};
    return encode_codes(map, a.up, a.hidden, 3, rows, box);
}
inline cudaError_t encode_down(CUtensorMap* map, const QuireMoeFewArgs& a) {
    const uint64_t rows[] = {uint64_t(a.n_experts) * a.hidden};
    const uint32_t box[] = {128, Down::BLOCKS * 16};
    return encode_codes(map, a.down, a.inner, 2, rows, box);
}
#else
inline cudaError_t encode_up(CUtensorMap* map, const void* up, uint64_t inner, uint64_t n_experts, int hidden) {
    const uint64_t row = uint64_t(hidden) * 2;
    const uint64_t sizes[] = {CHUNK, inner, 2 * n_experts, uint64_t(hidden / CHUNK)};
    const uint64_t strides[] = {row, inner * row, CHUNK * 2};
    const uint32_t box[] = {CHUNK, 8, 2, Up::CHUNKS};
    return encode_map(map, up, 4, sizes, strides, box);
}
inline cudaError_t encode_up(CUtensorMap* map, const QuireMoeFewArgs& a) {
    return encode_up(map, a.up, a.inner, a.n_experts - a.n_shared, a.hidden);
}
// One expert of n_shared times the inner rows, and its columns in n_shared parts: beyond each there are zeros.
inline cudaError_t encode_shared(CUtensorMap* up_map, CUtensorMap* down_map, const QuireMoeFewArgs& a) {
    const uint64_t inner = a.inner, n_shared = a.n_shared;
    const cudaError_t error = encode_up(up_map, a.shared_up, n_shared * inner, 1, a.hidden);
    if (error != cudaSuccess) return error;
    const uint64_t sizes[] = {CHUNK, uint64_t(a.hidden), inner / CHUNK, n_shared};
    const uint64_t strides[] = {n_shared * inner * 2, CHUNK * 2, inner * 2};
    const uint32_t box[] = {CHUNK, Down::BLOCKS * 16, Down::CHUNKS, 1};
    return encode_map(down_map, a.shared_down, 4, sizes, strides, box);
}
inline cudaError_t encode_down(CUtensorMap* map, const QuireMoeFewArgs& a) {
    const uint64_t sizes[] = {CHUNK, uint64_t(a.n_experts - a.n_shared) * a.hidden, uint64_t(a.inner / CHUNK)};
    const uint64_t strides[] = {uint64_t(a.inner) * 2, CHUNK * 2};
    const uint32_t box[] = {CHUNK, Down::BLOCKS * 16, Down::CHUNKS};
    return encode_map(map, a.down, 3, sizes, strides, box);
}
#endif

}  // namespace quire
