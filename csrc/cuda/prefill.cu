// Attention of large lines (prefill, shared prefixes) on Hopper: wgmma, TMA, specialised warps; the design of
// FlashAttention-3 (Shah et al., 2024): two warpgroups of 64 rows take turns at the tensor cores (`turn`), and within a
// warpgroup the softmax of one block of keys runs under the product of the probabilities of the block before.
//
// Macros: QUIRE_HEAD_DIM (64, 96, 128, 192, 256), QUIRE_BF16 (1, or 0: fp16), QUIRE_LAYOUT (0 paged, 1 ragged,
// 2 block-sparse); Variant and Site come from the variant's header (see plain_variant.h).
//
// One block per multiprocessor takes (line, KV head) items from a queue (QuireAttnArgs::ticket; below 2^24 items). Its
// warps: 0 takes the items, 1 loads keys, 2 loads values, 3 and 0 load q, the last eight compute. Lines are sorted by
// falling cost, so the first empty line ends the queue. Blocks of keys run from the last to the first.
//
// Boxes of the copy engine cost time each, so one box brings all of a page's rows of a block (JOINED): blocks lie in
// shared memory as [8 rows][chunk of 64 elements][row of 128 bytes]. Ragged keys do not start at multiples of 8 and
// dimension 96 does not end with a chunk: there a box is one chunk, and blocks lie as [chunk][row].
#include "attention.h"
#include "hopper.h"
#include "wgmma.h"

#include <type_traits>

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
constexpr uint64_t L2_EVICT_NORMAL = 0x1000000000000000ull;         // "evict last" costs 6 % here
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

// ---- producer ------------------------------------------------------------------------------------------------------

// The order of items: `n_heads` KV heads at a time, lines in their order, so that the keys and values of the blocks at
// work stay in the second-level cache.
struct Order {
    int n_lines, n_heads;
    __device__ int line_of(int item) const { return item / n_heads % n_lines; }
    __device__ int head_of(int item) const { return item / (n_heads * n_lines) * n_heads + item % n_heads; }
};
__device__ __forceinline__ Order choose_order(const QuireAttnArgs& args) {
    Order order = {args.n_large, args.n_kv_heads};
    if (args.n_large * args.n_kv_heads < 4 * gridDim.x) return order;  // all at work at once, or nearly
    const QuireTile& first = args.large_lines[0];
    const int64_t head_bytes = int64_t(first.end - first.begin) * DIM * 4;
    while (order.n_heads % 2 == 0 && order.n_heads * head_bytes > L2_SHARE) order.n_heads /= 2;
    if (order.n_heads < args.n_kv_heads) {  // the heads' turns must end at the last real line
        int low = 0;
        while (low < order.n_lines) {
            const int middle = (low + order.n_lines) / 2;
            if (args.large_lines[middle].n_tokens > 0) low = middle + 1;
            else order.n_lines = middle;
        }
        order.n_lines = max(low, 1);
    }
    return order;
}

// Reads the line of an item; whole warp.
__device__ __forceinline__ Work read_work(const QuireAttnArgs& args, const Order& order, int item, int box_rows) {
    Work work;
    work.n_tokens = 0;
    if (item >= order.n_lines * args.n_kv_heads) return work;
    const QuireTile line = args.large_lines[order.line_of(item)];
    work.row = line.row, work.n_tokens = line.n_tokens, work.position = line.position, work.gathered = line.gathered;
    work.partial = line.partial, work.kv_head = order.head_of(item);
    work.kv_at = line.kv_at, work.blocks_at = line.blocks_at;
    work.first_pos = line.position, work.last_pos = line.position + line.n_tokens - 1;
    if (line.gathered) {
        int low = INT32_MAX, high = INT32_MIN;
        for (int i = threadIdx.x % 32; i < line.n_tokens; i += 32) {
            const int position = args.rows[2 * (line.row + i) + 1];
            low = min(low, position), high = max(high, position);
        }
        work.first_pos = __reduce_min_sync(0xffffffffu, low);
        work.last_pos = __reduce_max_sync(0xffffffffu, high);
    }
    work.begin = line.begin, work.end = line.end;
    if (Variant::causal && LAYOUT != SPARSE) work.end = min(work.end, work.last_pos + 1);
    work.start = line.begin - line.begin % box_rows;
    work.low = Variant::window ? work.first_pos - args.window + 1 : work.begin;
    const int n_blocks = work.end > work.begin ? (work.end - work.start + N_KEYS - 1) / N_KEYS : 0;
    work.last_block = n_blocks - 1;
    work.n_lead = 0;
    int tail_from = 0;
    if (Variant::window && LAYOUT != SPARSE) {
        const int first = min(args.n_first, work.end) - work.start;
        work.n_lead = first > 0 ? (first + N_KEYS - 1) / N_KEYS : 0;
        tail_from = min(max((work.low - work.start) / N_KEYS, work.n_lead), n_blocks);
    }
    work.n_tail = n_blocks - tail_from;
    if (work.n_tail + work.n_lead == 0) work.n_tail = 1, work.last_block = 0;  // nothing to see: one block, all hidden
    if (LAYOUT != SPARSE) {
        const int clear_to = Variant::causal ? min(work.end, work.first_pos + 1) : work.end;
        work.front = (work.start + N_KEYS * work.last_block + 2 * N_KEYS - 1 - clear_to) / N_KEYS;
        work.back = work.n_tail + work.n_lead - (work.start < work.begin);
        if (Variant::window) {
            const int hidden_to = work.last_pos - args.window - work.start;  // the last row does not see this key
            work.back = min(work.back, work.n_tail);
            if (hidden_to >= 0) work.back = min(work.back, work.last_block - hidden_to / N_KEYS);
        }
        if (Variant::has_mask || work.front > work.n_tail) work.front = INT32_MAX;
    }
    return work;
}

struct Spot {  // of a box: the page (ragged: 0) and the row in it
    int page, token;
};
__device__ __forceinline__ Spot find_key(const QuireAttnArgs& args, const Work& work, int key) {
    if (LAYOUT == RAGGED || key >= work.end) return {0, work.kv_at + key};
    const int entry = key / args.page_size;
    const int logical = LAYOUT == SPARSE ? __ldg(args.blocks + work.blocks_at + entry) : entry;
    return {__ldg(args.pages + work.kv_at + logical), key - entry * args.page_size};
}

// One block of keys or values, by a warp; `mine`: this lane has a box.
__device__ __forceinline__ void load_block(uint8_t* to, uint64_t* full, const CUtensorMap* map, int heads_of_page,
                                           int kv_head, bool mine, Spot spot, int box_rows) {
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = shared_address(full);
    const int n_boxes = __popc(__ballot_sync(0xffffffffu, mine));
    if (lane == 0) barrier_expect(barrier, n_boxes * box_rows * N_CHUNKS * ROW_BYTES);
    __syncwarp();
    if (!mine) return;
    const uint32_t address = shared_address(to) + lane * box_rows * (GROUP_BYTES / 8);
    if constexpr (JOINED) {
        load_box(address, map, barrier, L2_EVICT_NORMAL, 0, 0, 0, spot.token / 8, spot.page * heads_of_page + kv_head);
    } else {
        for (int chunk = 0; chunk < N_CHUNKS; chunk++)
            load_box(address + chunk * CHUNK_BYTES, map, barrier, L2_EVICT_NORMAL, chunk * 64, spot.token, kv_head,
                     spot.page);
    }
}

// Loads the keys (or values) of each item; one warp, lane t rows of box t.
template <int N_STAGES, bool KEYS>
__device__ __forceinline__ void load_blocks(const QuireAttnArgs& args, const CUtensorMap* map, int heads_of_page,
                                            uint8_t (&buffers)[N_STAGES][KEYS_BYTES], uint64_t* full, uint64_t* empty,
                                            int box_rows, Shared& shared) {
    const int lane = threadIdx.x % 32, my_row = lane * box_rows;
    Ring ring;
    if (lane == 0) prefetch_map(map);
    for (Ring item;; item.advance<N_ITEMS>()) {
        await(shared_address(&shared.work_full[item.index]), item.parity);
        const Work& work = shared.work[item.index];
        if (work.n_tokens == 0) return;
        const int n_blocks = work.n_blocks(), kv_head = work.kv_head;
        int key = work.key_of(0) + my_row;
        Spot spot = find_key(args, work, key);
        for (int i = 0; i < n_blocks; i++) {
            if (KEYS && i == max(n_blocks - 2, 0) && lane == 0)
                barrier_arrive(shared_address(&shared.work_ends[item.index]));
            const Spot now = spot;
            const bool mine = my_row < N_KEYS && key < work.end;
            if (i + 1 < n_blocks) {  // fetched while the block waits for its buffer
                key = work.key_of(i + 1) + my_row;
                spot = find_key(args, work, key);
            }
            await(shared_address(empty + ring.index), ring.parity ^ 1);
            load_block(buffers[ring.index], full + ring.index, map, heads_of_page, kv_head, mine, now, box_rows);
            ring.advance<N_STAGES>();
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.work_empty[item.index]));
    }
}

// Loads q of items, N_LOADERS threads; rows beyond an item's are zero. A thread keeps its column of 16-byte cells and
// walks down the rows. Few warps do this one after the other: every instruction of the loop counts.
struct QueryLoader {
    static constexpr uint32_t CELLS = N_CHUNKS * 8, STEP = N_LOADERS / CELLS;  // rows that are covered at once
    const QuireAttnArgs& args;
    Shared& shared;
    uint32_t group, first_row, cell;
    Ring slot;

    __device__ __forceinline__ QueryLoader(const QuireAttnArgs& args, Shared& shared, uint32_t thread)
        : args(args), shared(shared), group(args.n_q_heads / args.n_kv_heads), first_row(thread / CELLS),
          cell(thread % CELLS) {}

    __device__ __forceinline__ void load(const Work& work) {
        await(shared_address(&shared.q_empty[slot.index]), slot.parity ^ 1);
        const uint32_t n_rows = work.n_tokens * group;
        if (n_rows > 0) {
            copy_rows(work, n_rows);
            asm volatile("cp.async.wait_all;" ::: "memory");
            async_fence();
        }
        barrier_arrive(shared_address(&shared.q_full[slot.index]));
        slot.advance<N_SLOTS>();
    }

    __device__ __forceinline__ void copy_rows(const Work& work, uint32_t n_rows) {
        const int64_t head_bytes = args.q_head * 2, token_bytes = args.q_row * 2;
        const char* column = static_cast<const char*>(args.q) + int64_t(work.kv_head) * group * head_bytes + cell * 16;
        const uint32_t to = shared_address(shared.q[slot.index]) + cell / 8 * N_ROWS * ROW_BYTES;
        const auto copy_to = [&](uint32_t row, const char* from) {
            copy_16_bytes(to + row * ROW_BYTES + ((cell ^ row) & 7) * 16, from, cell * 8 < DIM && row < n_rows);
        };
        if (work.gathered) {
            const int* line_rows = args.rows + 2 * work.row;
#pragma unroll 2
            for (uint32_t row = first_row; row < N_ROWS; row += STEP) {
                const uint32_t token = row < n_rows ? row / group : 0, head = row < n_rows ? row % group : 0;
                copy_to(row, column + __ldg(line_rows + 2 * token) * token_bytes + head * head_bytes);
            }
        } else {
            const int64_t step_bytes = STEP / group * token_bytes + STEP % group * head_bytes;
            const int64_t wrap_bytes = token_bytes - int64_t(group) * head_bytes;  // behind the last head
            const char* from = column + (work.row + first_row / group) * token_bytes + first_row % group * head_bytes;
            uint32_t head = first_row % group;
#pragma unroll 4
            for (uint32_t row = first_row; row < N_ROWS; row += STEP) {
                copy_to(row, from);
                head += STEP % group, from += step_bytes;
                if (head >= group) head -= group, from += wrap_bytes;
            }
        }
    }
};

// Takes items from the queue, publishes them and loads its share of q; one warp.
__device__ __forceinline__ void take_items(const QuireAttnArgs& args, int box_rows, Shared& shared) {
    const int lane = threadIdx.x % 32;
    auto* counter = reinterpret_cast<uint32_t*>(args.ticket);
    const Order order = choose_order(args);
    QueryLoader queries(args, shared, lane);
    int item = blockIdx.x;
    for (Ring ring;; ring.advance<N_ITEMS>()) {
        const Work work = read_work(args, order, item, box_rows);
        await(shared_address(&shared.work_empty[ring.index]), ring.parity ^ 1);
        if (lane == 0) {
            shared.work[ring.index] = work;
            barrier_arrive(shared_address(&shared.work_full[ring.index]));
        }
        __syncwarp();
        queries.load(shared.work[ring.index]);
        if (work.n_tokens == 0) break;
        await(shared_address(&shared.work_ends[ring.index]), ring.parity);  // not earlier: the rest is for idle blocks
        uint32_t ticket = 0;
        if (lane == 0) ticket = atomicAdd(counter, 1u) & 0xFFFFFFu;
        item = gridDim.x + uniform(ticket);
    }
    // The upper byte of the ticket counts blocks that are done: the last one leaves 0 behind.
    if (lane == 0) {
        const uint32_t done = atomicAdd(counter, 1u << 24) >> 24;
        if (done + 1 == gridDim.x) *args.ticket = 0;
    }
}

__device__ __forceinline__ void load_queries(const QuireAttnArgs& args, Shared& shared) {
    QueryLoader queries(args, shared, 32 + threadIdx.x % 32);
    for (Ring item;; item.advance<N_ITEMS>()) {
        await(shared_address(&shared.work_full[item.index]), item.parity);
        const Work& work = shared.work[item.index];
        const bool last = work.n_tokens == 0;
        queries.load(work);
        if (last) return;
    }
}

// ---- consumers -----------------------------------------------------------------------------------------------------

struct Rows {  // the two rows of a thread
    int packed[2], q_row[2], q_pos[2], q_head[2];
    bool real[2];
};

__device__ __forceinline__ Rows read_rows(const QuireAttnArgs& args, const Work& work, int first_row) {
    const int group = args.n_q_heads / args.n_kv_heads;
    Rows rows;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int packed = first_row + 8 * i;
        rows.packed[i] = packed;
        rows.real[i] = packed < work.n_tokens * group;
        const int token = rows.real[i] ? packed / group : 0;  // hooks see valid rows only
        rows.q_row[i] = work.row + token, rows.q_pos[i] = work.position + token;
        if (work.gathered) {
            rows.q_row[i] = args.rows[2 * (work.row + token)], rows.q_pos[i] = args.rows[2 * (work.row + token) + 1];
        }
        rows.q_head[i] = work.kv_head * group + (rows.real[i] ? packed - token * group : 0);
    }
    return rows;
}

// Whether some row of the tile does not see some key of block i.
__device__ __forceinline__ bool at_edge(const QuireAttnArgs& args, const Work& work, int i) {
    if constexpr (LAYOUT != SPARSE) return i < work.front || i >= work.back;
    const int key = work.key_of(i);
    if (Variant::has_mask || key < work.begin || key + N_KEYS > work.end) return true;
    if (Variant::causal && position_of(work, key + N_KEYS - 1, args) > work.first_pos) return true;
    return Variant::window && position_of(work, key, args) <= work.last_pos - args.window &&
           position_of(work, key + N_KEYS - 1, args) >= args.n_first;
}

// Applies the hooks and hides keys. s: q.k; afterwards q.k or, if there is a hook, what it says: logits or weights.
template <bool EDGE>
__device__ __forceinline__ void weigh(float (&s)[N_KEYS / 2], const QuireAttnArgs& args, const Work& work,
                                      const Rows& rows, int first_key) {
    if (!EDGE && !Variant::has_logits) return;
    constexpr float HIDDEN = Variant::softmax ? MINUS_INF : 0.0f;
    const int column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < N_KEYS / 8; j++) {
        const int key = first_key + 8 * j;
        const int pos = LAYOUT != SPARSE || key < work.end ? position_of(work, key, args) : key;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = e / 2, offset = column + e % 2;
            bool visible = true;
            if constexpr (EDGE) {
                visible = key + offset >= work.begin && key + offset < work.end;
                if (Variant::causal) visible &= pos + offset <= rows.q_pos[row];
                if (Variant::window)
                    visible &= pos + offset > rows.q_pos[row] - args.window || pos + offset < args.n_first;
            }
            float& x = s[4 * j + e];
            if (Variant::has_logits || Variant::has_mask) {
                const Site site = {rows.q_row[row], rows.q_pos[row], pos + offset, rows.q_head[row], work.kv_head, 0};
                if (Variant::has_mask && visible) visible = Variant::mask(site, args);
                if (Variant::has_logits && visible)
                    x = Variant::logits(x * args.scale, site, args);
            }
            if (!visible) x = HIDDEN;
        }
    }
}

struct Softmax {  // running maximum and sum of a thread's two rows; the sum is over the thread's own columns
    float max[2], sum[2], factor[2];

    __device__ __forceinline__ void start() { max[0] = max[1] = MINUS_INF, sum[0] = sum[1] = 0.0f; }

    // s becomes weights relative to `max`; `factor` is what older results must be multiplied by. The maximum follows
    // only when it has grown by more than 2^8, so that older results are rarely touched (FlashAttention-4).
    __device__ __forceinline__ void step(float (&s)[N_KEYS / 2], float scale) {
        if constexpr (Variant::softmax) {
            float high[4] = {s[0], s[1], s[2], s[3]};  // independent chains: one warp alone must fill the pipelines
#pragma unroll
            for (int i = 4; i < N_KEYS / 2; i++) high[i % 4] = fmaxf(high[i % 4], s[i]);
            float reference[2], total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float now = fmaxf(high[2 * row], high[2 * row + 1]);
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
                now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
                const bool follow = (now - max[row]) * scale > 8.0f || max[row] == MINUS_INF;
                const float next = follow ? now : max[row];
                reference[row] = next == MINUS_INF ? 0.0f : next * scale;
                factor[row] = follow ? exp2_fast(max[row] * scale - reference[row]) : 1.0f;
                max[row] = next;
            }
#pragma unroll
            for (int i = 0; i < N_KEYS / 2; i++) {
                s[i] = exp2_fast(s[i] * scale - reference[i / 2 % 2]);
                total[i % 4] += s[i];
            }
            sum[0] = sum[0] * factor[0] + (total[0] + total[1]);
            sum[1] = sum[1] * factor[1] + (total[2] + total[3]);
        } else {
#pragma unroll
            for (int i = 0; i < N_KEYS / 2; i++) sum[0] += fabsf(s[i]);  // for keep_before_wait
        }
    }
    __device__ __forceinline__ void rescale(float (&o)[DIM / 2]) const {
        if constexpr (Variant::softmax) {
            if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
            for (int i = 0; i < DIM / 2; i++) o[i] *= factor[i / 2 % 2];
        }
    }
};

__device__ __forceinline__ void to_elements(uint32_t (&p)[N_KEYS / 4], const float (&s)[N_KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < N_KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void start_logits(float (&s)[N_KEYS / 2], Operand q, const uint8_t* keys) {
    const Operand k = rows_operand(uniform(shared_address(keys)), GROUP_BYTES);
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
        Product<N_KEYS>::rows(s, q.further(i / 4 * N_ROWS * ROW_BYTES + i % 4 * 32),
                              k.further(i / 4 * CHUNK_BYTES + i % 4 * 32), i > 0);
    products_commit();
}
__device__ __forceinline__ void start_output(float (&o)[DIM / 2], const uint32_t (&p)[N_KEYS / 4],
                                             const uint8_t* values) {
    const Operand v = columns_operand(uniform(shared_address(values)), CHUNK_BYTES, GROUP_BYTES);
#pragma unroll
    for (int i = 0; i < N_KEYS / 16; i++) Product<DIM>::columns(o, p + 4 * i, v.further(i * 2 * GROUP_BYTES), 1);
    products_commit();
}

// Zeroes the values that no row may read (0 * NaN is NaN). Both warpgroups do it: each waits for its own threads only.
__device__ __forceinline__ void clear_hidden_values(const QuireAttnArgs& args, const Work& work, int first_key,
                                                    uint8_t* values, uint64_t* full, uint32_t parity, int warpgroup) {
    const bool gap = Variant::window && LAYOUT != SPARSE && first_key < work.low && first_key + N_KEYS > args.n_first;
    if (!gap && first_key >= work.begin && first_key + N_KEYS <= work.end) return;
    await(shared_address(full), parity);
    const auto clear = [&](int from, int to) {
        constexpr int CELLS = N_CHUNKS * 8;
        from = max(from - first_key, 0), to = min(to - first_key, N_KEYS);
        for (int i = from * CELLS + threadIdx.x % 128; i < to * CELLS; i += 128) {
            const int row = i / CELLS, cell = i % CELLS;
            const int at = row / 8 * GROUP_BYTES + cell / 8 * CHUNK_BYTES + row % 8 * ROW_BYTES;
            *reinterpret_cast<uint4*>(values + at + cell % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
    };
    clear(first_key, work.begin);
    clear(work.end, first_key + N_KEYS);
    if (gap) clear(args.n_first, work.low);
    async_fence();
    named_sync(BARRIER_VALUES + warpgroup, 128);
}

// Four lanes that share a row hold two columns of each of four groups of eight; afterwards lane t holds group t.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const auto swap = [](uint32_t& a, uint32_t& b, bool high, int distance) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? a : b, distance);
        if (high) a = got;
        else b = got;
    };
    swap(x[0], x[1], odd, 1), swap(x[2], x[3], odd, 1);
    swap(x[0], x[2], upper, 2), swap(x[1], x[3], upper, 2);
}

__device__ __forceinline__ void write_results(float (&o)[DIM / 2], Softmax& softmax, float scale,
                                              const QuireAttnArgs& args, const Work& work, const Rows& rows) {
    const int group = args.n_q_heads / args.n_kv_heads, quad = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        float inverse = 1.0f, lse = MINUS_INF;  // lse: base 2
        if (Variant::softmax) {
            float sum = softmax.sum[row];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            inverse = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;
            if (sum > 0.0f) lse = softmax.max[row] * scale + log2_fast(sum);
        }
        if (work.partial >= 0) {
            const int at = work.partial + work.kv_head * work.n_tokens * group + rows.packed[row];
            if (!rows.real[row]) continue;
            if (quad == 0 && Variant::softmax) args.partial_lse[at] = lse;
            float* out = args.partial_out + int64_t(at) * DIM + 2 * quad;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++)
                *reinterpret_cast<float2*>(out + 8 * i) =
                    make_float2(o[4 * i + 2 * row] * inverse, o[4 * i + 2 * row + 1] * inverse);
            continue;
        }
        const int64_t at = int64_t(rows.q_row[row]) * args.n_q_heads + rows.q_head[row];
        if (Variant::softmax && args.lse != nullptr && rows.real[row] && quad == 0) args.lse[at] = lse * LN2;
        Element* out = static_cast<Element*>(args.out) + at * DIM + 8 * quad;
#pragma unroll
        for (int i = 0; i < DIM / 32; i++) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float a = o[16 * i + 4 * j + 2 * row] * inverse, b = o[16 * i + 4 * j + 2 * row + 1] * inverse;
                if constexpr (Variant::has_output) {
                    Site site = {rows.q_row[row], rows.q_pos[row], 0, rows.q_head[row], work.kv_head,
                                 32 * i + 8 * j + 2 * quad};
                    a = Variant::output(a, site, lse * LN2, args);
                    site.dim++;
                    b = Variant::output(b, site, lse * LN2, args);
                }
                x[j] = pack(a, b);
            }
            transpose_quad(x);
            if (rows.real[row]) *reinterpret_cast<uint4*>(out + 32 * i) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

__device__ __forceinline__ void consume(const QuireAttnArgs& args, int warpgroup, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int first_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float scale = Variant::has_logits ? LOG2E : args.scale * LOG2E;
    const auto release = [&](uint64_t* barrier) {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(barrier));
    };
    float s[N_KEYS / 2];
    uint32_t p[N_KEYS / 4];
    float o[DIM / 2];
    Softmax softmax;
    const Work* current;  // with two items in flight it is copied; else it stays valid until its end
    Operand q;
    Ring item, slot, k, v;
    const auto next_work = [&] {
        await(shared_address(&shared.q_full[slot.index]), slot.parity);
        current = &shared.work[item.index];
        q = rows_operand(uniform(shared_address(shared.q[slot.index])) + warpgroup * 64 * ROW_BYTES);
        if (current->n_tokens > 0) await(shared_address(&shared.k_full[k.index]), k.parity);
    };
    next_work();
    if (current->n_tokens == 0) return;
    if (warpgroup == 1) named_arrive(BARRIER_TURN, 256);  // warpgroup 0 has the first turn
    products_begin();
    start_logits(s, q, shared.k[k.index]);
    while (true) {  // the logits of the item's first block are on their way
        std::conditional_t<(N_SLOTS > 1), const Work, const Work&> now = *current;
        const auto release_work = [&] {
            release(&shared.work_empty[item.index]);
            item.advance<N_ITEMS>();
        };
        if constexpr (N_SLOTS > 1) release_work();
        const Rows rows = read_rows(args, now, first_row);
        const int n_blocks = now.n_blocks();
        const auto clear_values = [&](int i) {
            clear_hidden_values(args, now, now.key_of(i), shared.v[v.index], &shared.v_full[v.index], v.parity,
                                warpgroup);
        };
        // Logits of block i and output of the block before. The softmax stands between the two waits without a branch:
        // at a branch ptxas would move the second wait up.
        const auto next_block = [&](int i, auto edge) {
            await(shared_address(&shared.k_full[k.index]), k.parity);
            if (LAYOUT == SPARSE || at_edge(args, now, i - 1)) clear_values(i - 1);
            named_sync(BARRIER_TURN + warpgroup, 256);
            pin(s), pin(o);
            products_begin();
            start_logits(s, q, shared.k[k.index]);
            await(shared_address(&shared.v_full[v.index]), v.parity);
            products_begin();
            start_output(o, p, shared.v[v.index]);
            named_arrive(BARRIER_TURN + 1 - warpgroup, 256);
            products_wait<1>();
            pin(s);
            release(&shared.k_empty[k.index]);
            k.advance<K_STAGES>();
            weigh<decltype(edge)::value>(s, args, now, rows, now.key_of(i));
            softmax.step(s, scale);
            pin(s);
            keep_before_wait(softmax.sum[0] + softmax.sum[1], shared_address(&shared));
            products_wait<0>();
            pin(o), pin(s);
            release(&shared.v_empty[v.index]);
            v.advance<V_STAGES>();
            to_elements(p, s);
            softmax.rescale(o);
        };
        products_wait<0>();
        pin(s);
        release(&shared.k_empty[k.index]);
        k.advance<K_STAGES>();
        if (at_edge(args, now, 0)) weigh<true>(s, args, now, rows, now.key_of(0));
        else weigh<false>(s, args, now, rows, now.key_of(0));
        softmax.start();
        softmax.step(s, scale);
        to_elements(p, s);
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) o[i] = 0.0f;
        for (int i = 1; i < n_blocks; i++) {
            if (at_edge(args, now, i)) next_block(i, std::true_type());
            else next_block(i, std::false_type());
        }
        release(&shared.q_empty[slot.index]);
        slot.advance<N_SLOTS>();
        clear_values(n_blocks - 1);
        await(shared_address(&shared.v_full[v.index]), v.parity);
        // With q of two items in flight the first logits of the next item run under the results of this one; after the
        // last item they are computed from what lies there, for nobody.
        if constexpr (N_SLOTS > 1) next_work();
        pin(o);
        products_begin();
        start_output(o, p, shared.v[v.index]);
        if constexpr (N_SLOTS > 1) {
            start_logits(s, q, shared.k[k.index]);
            products_wait<1>();
        } else {
            products_wait<0>();
        }
        pin(o);
        release(&shared.v_empty[v.index]);
        v.advance<V_STAGES>();
        write_results(o, softmax, scale, args, now, rows);
        if constexpr (N_SLOTS == 1) {
            release_work();
            next_work();
            products_begin();
            start_logits(s, q, shared.k[k.index]);
        }
        if (current->n_tokens == 0) break;
    }
    products_wait<0>();
}

__global__ void __launch_bounds__(N_THREADS, 1)
    attention_large(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ CUtensorMap k_map,
                    const __grid_constant__ CUtensorMap v_map, int box_rows) {
    extern __shared__ uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    if (threadIdx.x == 0) {
        constexpr int N_WARPS = 4 * N_CONSUMERS;
        const auto init = [](uint64_t& barrier, int n_arrivals) { barrier_init(shared_address(&barrier), n_arrivals); };
        for (int i = 0; i < K_STAGES; i++) init(shared.k_full[i], 1), init(shared.k_empty[i], N_WARPS);
        for (int i = 0; i < V_STAGES; i++) init(shared.v_full[i], 1), init(shared.v_empty[i], N_WARPS);
        for (int i = 0; i < N_ITEMS; i++) {
            init(shared.work_full[i], 1), init(shared.work_ends[i], 1);
            init(shared.work_empty[i], N_WARPS + 2);  // and the two warps that load keys and values
        }
        for (int i = 0; i < N_SLOTS; i++) init(shared.q_full[i], N_LOADERS), init(shared.q_empty[i], N_WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_down<40>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) take_items(args, box_rows, shared);
        else if (warp == 1)
            load_blocks<K_STAGES, true>(args, &k_map, args.k_page / args.k_head, shared.k, shared.k_full,
                                        shared.k_empty, box_rows, shared);
        else if (warp == 2)
            load_blocks<V_STAGES, false>(args, &v_map, args.v_page / args.v_head, shared.v, shared.v_full,
                                         shared.v_empty, box_rows, shared);
        else load_queries(args, shared);
    } else {
        registers_up<232>();
        consume(args, warpgroup - 1, shared);
    }
    wait_for_previous_grid();  // who waits for this grid waits for the small lines, too
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Rows of a box: they lie in one page, and boxes tile the block.
int rows_of_box(int page_size) {
    int a = page_size, b = N_KEYS;
    while (b != 0) {
        const int rest = a % b;
        a = b, b = rest;
    }
    return a;
}

cudaError_t make_map(CUtensorMap* map, const QuireAttnArgs& args, const void* base, int64_t page, int64_t head,
                     int64_t token, int box_rows) {
    const uint64_t n_heads = args.n_kv_heads, n_pages = args.n_pages, head_bytes = head * 2, token_bytes = token * 2;
    if (JOINED) {  // 8 rows of a chunk, chunks, groups of 8 rows, (page, head)
        if (head <= 0 || page % head != 0) return cudaErrorInvalidValue;
        const uint64_t sizes[5] = {64, 8, N_CHUNKS, uint64_t(args.page_size / 8), n_pages * (page / head)};
        const uint64_t strides[4] = {token_bytes, ROW_BYTES, 8 * token_bytes, head_bytes};
        const uint32_t box[5] = {64, 8, N_CHUNKS, uint32_t(box_rows / 8), 1};
        return encode_map(map, base, 5, sizes, strides, box);
    }
    const bool ragged = LAYOUT == RAGGED;
    const uint64_t sizes[4] = {DIM, ragged ? n_pages : args.page_size, n_heads, ragged ? 1 : n_pages};
    const uint64_t strides[3] = {token_bytes, head_bytes, ragged ? head_bytes : page * 2};
    const uint32_t box[4] = {64, uint32_t(box_rows), 1, 1};
    return encode_map(map, base, 4, sizes, strides, box);
}

cudaError_t launch(const QuireAttnArgs& args, cudaStream_t stream) {
    if (args.head_dim != DIM || args.n_q_heads % args.n_kv_heads != 0) return cudaErrorInvalidValue;
    if (args.n_q_heads / args.n_kv_heads > N_ROWS) return cudaErrorInvalidValue;
    if (LAYOUT != RAGGED && (args.page_size <= 0 || args.page_size % 8 != 0)) return cudaErrorInvalidValue;
    if (!Variant::has_logits && !(args.scale > 0.0f)) return cudaErrorInvalidValue;  // maxima are taken of q.k
    if (args.q_row % 8 != 0 || args.q_head % 8 != 0) return cudaErrorInvalidValue;
    if (int64_t(args.n_large) * args.n_kv_heads >= 1 << 24) return cudaErrorInvalidValue;
    if (args.n_large == 0) return cudaSuccess;
    const int box_rows = LAYOUT == RAGGED ? N_KEYS : rows_of_box(args.page_size);
    CUtensorMap k_map, v_map;
    cudaError_t error = make_map(&k_map, args, args.k, args.k_page, args.k_head, args.k_token, box_rows);
    if (error != cudaSuccess) return error;
    error = make_map(&v_map, args, args.v, args.v_page, args.v_head, args.v_token, box_rows);
    if (error != cudaSuccess) return error;
    int device, n_sm;
    if ((error = cudaGetDevice(&device)) != cudaSuccess) return error;
    if ((error = cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess) return error;
    constexpr int SHARED_BYTES = sizeof(Shared) + 1024;
    error = cudaFuncSetAttribute(attention_large, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (error != cudaSuccess) return error;
    const int n_items = args.n_large * args.n_kv_heads;
    // Behind small lines it starts where they are done, on what was there before them: their kernel waited for that.
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(n_items < n_sm ? n_items : n_sm);
    config.blockDim = dim3(N_THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = args.small_lines != nullptr;
    return cudaLaunchKernelEx(&config, attention_large, args, k_map, v_map, box_rows);
}

}  // namespace quire

extern "C" int quire_attention_large(const QuireAttnArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
