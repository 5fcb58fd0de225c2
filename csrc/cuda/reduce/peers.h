// Memory that the ranks of one host write into one another over NVLink or PCIe, and how they wait for it.
//
// Each rank owns one block of memory, which all the others have mapped (CUDA IPC). In it:
//
//   turn      how many calls this rank has made, counted by the device: replays of graphs need no host
//   flags     [phase][from][block]: the number of the call whose data a block of another rank has written
//   words     [parity][from][cell]: cells with the call's number beside each 4 bytes ("LL"), for short messages
//   parts     [parity][from][..]: what others have for this rank to sum
//   whole     [parity][..]: all sums, as their owners have made them
//
// Two parities suffice. A rank begins call e + 2 when its call e + 1 has ended, for which it heard from every rank in
// its call e + 1, which that rank began when its call e, and with it all reading of this parity, had ended.
//
// Ranks only write to others and only read their own memory: a rank that waits loads no link. No multicast.
// Waiting is bounded: a rank that has waited too long writes down whom for, and neither it nor any later call waits
// again. Results are void then; the host sees it.
#pragma once
#include "../hopper.h"
#include "memory.h"

constexpr int QUIRE_MAX_RANKS = 8;
constexpr int QUIRE_MAX_BLOCKS = 128;

struct QuirePeers {            // _Peers in quire/kernels/reduce/hopper.py
    char* base[QUIRE_MAX_RANKS];
    int64_t* fault;            // in the host's memory: 1 + the rank that did not come, the call
    int64_t words_at, words_cells, parts_at, part_cells, whole_at, whole_cells;  // _at: bytes from base
    int32_t rank, size;
};

namespace quire {

constexpr int64_t CELL_BYTES = 16;
constexpr int64_t FLAGS_AT = 128;
constexpr int64_t TURN_WORD = 0, TICKET_WORD = 1, GIVEN_UP_WORD = 2;  // of 4 bytes, from base

// ---- calls ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t* control(const QuirePeers& peers) {
    return reinterpret_cast<uint32_t*>(peers.base[peers.rank]);
}
// The number of this call. To be read by all threads that need it before their block's `take_turn`.
__device__ __forceinline__ uint32_t number_of_call(const QuirePeers& peers) {
    return load_relaxed(control(peers) + TURN_WORD) + 1;
}
// By one thread of each block, once: the last block counts the call.
__device__ __forceinline__ void take_turn(const QuirePeers& peers, uint32_t call) {
    uint32_t* words = control(peers);
    if (atomicAdd(words + TICKET_WORD, 1u) != gridDim.x - 1) return;
    store_relaxed(words + TICKET_WORD, 0);
    store_relaxed(words + TURN_WORD, call);
}

// Whether this rank has waited in vain: what it computes from there on is void, and it sends no more of it, so that the
// others wait in vain, too, and say so.
__device__ __forceinline__ bool has_given_up(const QuirePeers& peers) {
    return load_relaxed(control(peers) + GIVEN_UP_WORD) != 0;
}

// A wait that may have to be given up.
struct Patience {
    uint64_t start_ns = 0;
    uint32_t n_looks = 0;

    // Whether to give up waiting for a rank; to be asked after each look in vain.
    __device__ __forceinline__ bool ends(const QuirePeers& peers, int64_t timeout_ns, int from, uint32_t call) {
        if (++n_looks % 256 != 0) return false;
        uint32_t* given_up = control(peers) + GIVEN_UP_WORD;
        if (load_relaxed(given_up) != 0) return true;
        const uint64_t now = now_ns();
        if (start_ns == 0) start_ns = now;
        if (now - start_ns < static_cast<uint64_t>(timeout_ns)) return false;
        if (atomicExch(given_up, 1u) == 0) {
            volatile int64_t* fault = peers.fault;
            fault[1] = call;
            __threadfence_system();
            fault[0] = 1 + from;
            __threadfence_system();
        }
        return true;
    }
};

// ---- flags of blocks -----------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t* flag_of(const QuirePeers& peers, int at, int phase, int from) {
    const int64_t index = (phase * QUIRE_MAX_RANKS + from) * QUIRE_MAX_BLOCKS + blockIdx.x;
    return reinterpret_cast<uint32_t*>(peers.base[at] + FLAGS_AT) + index;
}
// What all threads of this block have written to others can be read by the same block there, once it has waited. All
// threads of a block call it. N: number of ranks.
template <int N>
__device__ __forceinline__ void exchange_flags(const QuirePeers& peers, int64_t timeout_ns, int phase, uint32_t call) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < N && other != peers.rank) {
        __threadfence_system();
        if (!has_given_up(peers)) store_release(flag_of(peers, other, phase, peers.rank), call);
        const uint32_t* flag = flag_of(peers, peers.rank, phase, other);
        Patience patience;
        while (static_cast<int32_t>(load_acquire(flag) - call) < 0) {
            if (patience.ends(peers, timeout_ns, other, call)) break;
        }
    }
    __syncthreads();
}

// ---- addresses -----------------------------------------------------------------------------------------------------

// Pairs of a cell: 32 cells lie as 32 first halves and 32 second halves, so that a warp writes 512 bytes in a row.
__device__ __forceinline__ char* words_of(const QuirePeers& peers, int at, uint32_t call, int from, int64_t cell) {
    const int64_t line = ((call & 1) * peers.size + from) * peers.words_cells + cell / 32 * 32;
    return peers.base[at] + peers.words_at + (2 * line + cell % 32) * CELL_BYTES;
}
constexpr int64_t SECOND_HALF = 32 * CELL_BYTES;

__device__ __forceinline__ int4* part_of(const QuirePeers& peers, int at, uint32_t call, int from, int64_t cell) {
    const int64_t index = ((call & 1) * peers.size + from) * peers.part_cells + cell;
    return reinterpret_cast<int4*>(peers.base[at] + peers.parts_at) + index;
}
__device__ __forceinline__ int4* whole_of(const QuirePeers& peers, int at, uint32_t call, int64_t cell) {
    return reinterpret_cast<int4*>(peers.base[at] + peers.whole_at) + (call & 1) * peers.whole_cells + cell;
}

}  // namespace quire
