// Results of a product of many rows, each rank's term of a sum, that go to the ranks that sum them (reduce.cu) instead of
// into memory of this one: their way over the links is hidden behind the product.
//
// A box of 8 tokens goes to the rank that owns them, box i to rank i % QUIRE_SENT_TO; or to all. In the memory of each
// rank there is a place for what this one sends it, in two parities, in which all bits are set: what comes is data and
// flag in one (reduce/peers.h). No number has all its bits set, as rounding gives one kind of NaN.
//
// Invariant: the sum is the next call that ranks make, so that this rank's count of sums says the parity.
#pragma once
#include "gemm.h"

#ifndef QUIRE_SENT_TO
#define QUIRE_SENT_TO 0
#endif

#if QUIRE_SENT_TO
struct QuireWideSent {        // SentArgs in quire/kernels/gemm/hopper_product.py
    void* to[QUIRE_SENT_TO];  // in the memory of each rank, of the first parity
    const uint32_t* control;  // of this rank's (reduce/peers.h)
    int64_t parity_bytes;
    int32_t to_all;
};

namespace quire {

static_assert(!QUIRE_SILU && !QUIRE_WIDE && !QUIRE_RESIDUAL);
constexpr int SENT_TOKENS = 8;  // of a box
constexpr int SENT_GIVEN_UP_WORD = 2, SENT_COUNT_WORD = 3;  // as in reduce/peers.h

__device__ __forceinline__ uint32_t load_word(const uint32_t* from) {
    uint32_t x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
// The parity of this product, or -1 where this rank has given up and sends no more.
//
// The sum, which is the next grid, waits for each box in place of this grid. It counts when it starts, which is when all
// THREADS that multiply know the parity; all before this grid has ended then.
template <int BARRIER, int THREADS, class Args> __device__ __forceinline__ int begin_sending(const Args& a) {
    const uint32_t* control = a.sent.control;
    const int parity = load_word(control + SENT_GIVEN_UP_WORD) ? -1 : int(load_word(control + SENT_COUNT_WORD) & 1);
    const int known = uniform(parity);
    named_sync(BARRIER, THREADS);
    let_next_grid_start();
    return known;
}
template <class Maps> __device__ __forceinline__ const CUtensorMap* results_of(const Maps& maps) { return maps.sent; }
__device__ __forceinline__ void send_box(const CUtensorMap* map, uint32_t from, int column, int token, int parity) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(from), "r"(column), "r"(token), "r"(parity)
                 : "memory");
}
// By one thread: a round of tokens, in boxes, which lie behind one another from `out` on.
__device__ __forceinline__ void send_round(const CUtensorMap* maps, const QuireWideSent& a, uint32_t out, int n_boxes,
                                           int column, int token, int m, int parity) {
    for (int box = 0; box < n_boxes && token < m && parity >= 0; box++, token += SENT_TOKENS, out += SENT_TOKENS * 128) {
        const int i = token / SENT_TOKENS, owner = i % QUIRE_SENT_TO;
        if (!a.to_all) {
            send_box(maps + owner, out, column, i / QUIRE_SENT_TO * SENT_TOKENS, parity);
            continue;
        }
#pragma unroll
        for (int rank = 0; rank < QUIRE_SENT_TO; rank++) send_box(maps + rank, out, column, token, parity);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Tokens beyond those that a rank gets are not written: what nobody reads, nobody empties.
inline cudaError_t encode_sent(CUtensorMap* maps, const QuireWideSent& a, int m, int n) {
    for (int rank = 0; rank < QUIRE_SENT_TO; rank++) {
        const int turn = SENT_TOKENS * QUIRE_SENT_TO, rest = m % turn - SENT_TOKENS * rank;
        const int own = m / turn * SENT_TOKENS + (rest < 0 ? 0 : rest < SENT_TOKENS ? rest : SENT_TOKENS);
        const int n_tokens = a.to_all ? m : own;
        const uint64_t sizes[] = {uint64_t(n), uint64_t(n_tokens > 0 ? n_tokens : 1), 2};
        const uint64_t strides[] = {uint64_t(n) * 2, uint64_t(a.parity_bytes)};
        const uint32_t box[] = {64, SENT_TOKENS, 1};
        const cudaError_t error = encode_map(maps + rank, a.to[rank], 3, sizes, strides, box,
                                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_SWIZZLE_128B);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace quire
#else
namespace quire {

template <int, int, class Args> __device__ __forceinline__ int begin_sending(const Args&) { return 0; }
template <class Maps> __device__ __forceinline__ const CUtensorMap* results_of(const Maps& maps) { return &maps.y; }

}  // namespace quire
#endif
