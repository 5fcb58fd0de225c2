// Sizes of the kernel of large lines, and what its warps share: items of work, tiles and barriers. See prefill.cu.
#pragma once
#include "attention.h"
#include "hopper.h"
#include "wgmma.h"

namespace quire {

constexpr int RAGGED = 1, SPARSE = 2;  // 0: paged
constexpr int LAYOUT = QUIRE_LAYOUT;
constexpr int DIM = QUIRE_HEAD_DIM;
constexpr int N_ROWS = 128;                                         // packed rows of a tile
constexpr int N_KEYS = DIM <= 128 ? 128 : DIM == 192 ? 96 : 80;     // keys of a block: what the registers hold
constexpr int ROW_BYTES = 128;                                      // of a swizzled tile: a chunk of 64 elements
constexpr int N_CHUNKS = (DIM + 63) / 64;
constexpr bool JOINED = LAYOUT != RAGGED && DIM % 64 == 0;
constexpr int CHUNK_BYTES = (JOINED ? 8 : N_KEYS) * ROW_BYTES;      // from one chunk of keys or values to the next
constexpr int GROUP_BYTES = (JOINED ? N_CHUNKS : 1) * 8 * ROW_BYTES;  // from 8 rows of keys or values to the next 8
constexpr int K_STAGES = 2;                                         // blocks of keys in flight
constexpr int V_STAGES = DIM <= 128 ? 3 : 2;                        // of values: they are released later than keys
constexpr int N_SLOTS = DIM <= 128 ? 2 : 1;                         // q of items in flight
constexpr int N_ITEMS = 2;                                          // items in flight
constexpr int Q_BYTES = N_CHUNKS * N_ROWS * ROW_BYTES;
constexpr int KEYS_BYTES = N_CHUNKS * N_KEYS * ROW_BYTES;
constexpr int N_CONSUMERS = 2;                                      // warpgroups
constexpr int N_THREADS = 128 * (1 + N_CONSUMERS);
constexpr int N_LOADERS = 64;                                       // threads that load q
constexpr int BARRIER_TURN = 1, BARRIER_VALUES = BARRIER_TURN + N_CONSUMERS;  // named; one for each warpgroup
constexpr int64_t L2_SHARE = 24 << 20;                              // bytes of keys and values at work
constexpr float MINUS_INF = -__builtin_inff();

// An item: a line for one KV head, with what both the producer and the consumers must know of it.
struct Work {
    int row, n_tokens, position, gathered, partial, kv_head, kv_at, blocks_at;  // n_tokens 0: the queue has ended
    int begin, end;                 // keys
    int start;                      // begin, rounded down to a box of the copy engine
    int first_pos, last_pos;        // lowest and highest position of a row
    int low;                        // lowest key that the window of some row reaches
    int n_tail, last_block, n_lead; // blocks to do: n_tail from last_block downwards, then n_lead down to block 0
    int front, back;                // of these, all rows see all keys of front .. back - 1; not set if sparse

    __device__ int n_blocks() const { return n_tail + n_lead; }
    __device__ int key_of(int i) const {
        return start + N_KEYS * (i < n_tail ? last_block - i : n_tail + n_lead - 1 - i);
    }
};

struct alignas(1024) Shared {
    uint8_t q[N_SLOTS][Q_BYTES];
    uint8_t k[K_STAGES][KEYS_BYTES];
    uint8_t v[V_STAGES][KEYS_BYTES];
    Work work[N_ITEMS];
    uint64_t k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
    uint64_t work_full[N_ITEMS], work_empty[N_ITEMS], work_ends[N_ITEMS], q_full[N_SLOTS], q_empty[N_SLOTS];
};

struct Ring {  // position in a ring of N buffers
    int index = 0;
    uint32_t parity = 0;
    template <int N> __device__ __forceinline__ void advance() {
        if (++index == N) index = 0, parity ^= 1;
    }
};

__device__ __forceinline__ int position_of(const Work& work, int key, const QuireAttnArgs& args) {
    if constexpr (LAYOUT != SPARSE) return key;
    const int entry = key / args.page_size;
    return __ldg(args.blocks + work.blocks_at + entry) * args.page_size + key - entry * args.page_size;
}

}  // namespace quire
