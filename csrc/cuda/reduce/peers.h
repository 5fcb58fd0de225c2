// Memory that the ranks of one host write into one another over NVLink or PCIe, and how they wait for it.
//
// Each rank owns one block of memory, which all the others have mapped (CUDA IPC). In it:
//
//   turn      how many calls this rank has made, counted by the device: replays of graphs need no host
//   parts     [parity][from][..]: what others have for this rank to sum, in one shot
//   whole     [parity][..]: sums, as their owners have made them
//   sent      [parity][from][..]: parts of two shots, and whatever products send themselves (gemm/wide_sent.h), with
//             a count of their own for the parity
//
// A cell that has not come has all bits set, which no sent word has: it is data and flag in one, so that a sum needs
// neither fences nor barriers, and each cell goes on as soon as it has come. Who has read a cell empties it.
//
// Two parities suffice. A rank begins call e + 2 when its call e + 1 has ended, for which it heard from every rank in
// its call e + 1 (in two shots by way of a row's owner), which that rank began when its call e, and with it all
// emptying of this parity, had ended.
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
    int64_t parts_at, part_cells, whole_at, whole_cells, sent_at, sent_cells;  // _at: bytes from base
    int32_t rank, size;
};

namespace quire {

constexpr int64_t CELL_BYTES = 16;
constexpr int64_t CONTROL_BYTES = 1024;  // before all cells
constexpr int64_t TURN_WORD = 0, TICKET_WORD = 1, GIVEN_UP_WORD = 2, SENT_WORD = 3;  // of 4 bytes, from base

// ---- calls ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t* control(const QuirePeers& peers) {
    return reinterpret_cast<uint32_t*>(peers.base[peers.rank]);
}
// The number of this call. To be read by all threads that need it before their block's `take_turn`.
__device__ __forceinline__ uint32_t number_of_call(const QuirePeers& peers) {
    return load_relaxed(control(peers) + TURN_WORD) + 1;
}
// By one thread of each block, once: the last block counts the call, and whether its parts are in `sent`.
__device__ __forceinline__ void take_turn(const QuirePeers& peers, uint32_t call, bool is_of_sent) {
    uint32_t* words = control(peers);
    if (atomicAdd(words + TICKET_WORD, 1u) != gridDim.x - 1) return;
    store_relaxed(words + TICKET_WORD, 0);
    store_relaxed(words + TURN_WORD, call);
    if (is_of_sent) store_relaxed(words + SENT_WORD, load_relaxed(words + SENT_WORD) + 1);
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

// ---- cells ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int4* part_of(const QuirePeers& peers, int at, uint32_t call, int from, int64_t cell) {
    const int64_t index = ((call & 1) * peers.size + from) * peers.part_cells + cell;
    return reinterpret_cast<int4*>(peers.base[at] + peers.parts_at) + index;
}
__device__ __forceinline__ int4* whole_of(const QuirePeers& peers, int at, uint32_t call, int64_t cell) {
    return reinterpret_cast<int4*>(peers.base[at] + peers.whole_at) + (call & 1) * peers.whole_cells + cell;
}

// Of sums in two shots and of those whose terms products send. As the number of a call: before `take_turn`.
__device__ __forceinline__ uint32_t sent_parity(const QuirePeers& peers) {
    return load_relaxed(control(peers) + SENT_WORD) & 1;
}
__device__ __forceinline__ int4* sent_of(const QuirePeers& peers, int at, uint32_t parity, int from, int64_t cell) {
    const int64_t index = (int64_t(parity) * peers.size + from) * peers.sent_cells + cell;
    return reinterpret_cast<int4*>(peers.base[at] + peers.sent_at) + index;
}

constexpr int EMPTY = -1;

__device__ __forceinline__ int4 no_cell() { return make_int4(EMPTY, EMPTY, EMPTY, EMPTY); }
__device__ __forceinline__ bool has_come(const int4& x) {  // all of it
    return x.x != EMPTY && x.y != EMPTY && x.z != EMPTY && x.w != EMPTY;
}
// What is sent for x: in each type an empty word is NaNs alone, and so is what stands for it.
__device__ __forceinline__ int4 sendable(int4 x) {
    constexpr int OTHER_NAN = 0x7fffffff;
    if (x.x == EMPTY) x.x = OTHER_NAN;
    if (x.y == EMPTY) x.y = OTHER_NAN;
    if (x.z == EMPTY) x.z = OTHER_NAN;
    if (x.w == EMPTY) x.w = OTHER_NAN;
    return x;
}
// Waits for a cell of each of N ranks, from the first one on, that `cells` has none of yet, and empties their places.
// False: given up.
template <int N>
__device__ __forceinline__ bool receive(const QuirePeers& peers, int64_t timeout_ns, uint32_t call,
                                        int4* const (&from)[N], int4 (&cells)[N], int first = 0) {
    Patience patience;
    while (true) {
        bool is_wanted[N];
        int missing = -1;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            is_wanted[i] = !has_come(cells[i]);
            if (is_wanted[i]) cells[i] = load_cell(from[i]);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (!has_come(cells[i])) {
                missing = i;
            } else if (is_wanted[i]) {
                store_cell(from[i], no_cell());
            }
        }
        if (missing < 0) return true;
        if (patience.ends(peers, timeout_ns, first + missing, call)) return false;
    }
}

}  // namespace quire
