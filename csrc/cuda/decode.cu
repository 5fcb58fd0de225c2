// Attention of small lines (decode: few packed rows against many keys), bound by memory. Hopper, sm_90a.
//
// One block per worker. A producer warp reads the page table ahead of time and keeps a ring of stages full by tensor
// copies, across the borders of lines; consumer warps share a stage by keys (and by rows beyond 16). Each computes
// S^T = K Q^T and O^T += V^T P^T with keys in the long side of the matrix instruction, so that few rows waste little,
// under its own running maximum, which moves only when a score passes it by 2^8. At the end of a line the consumers
// leave their sums in shared memory and go on; writer warps add them in a fixed order and bring q of the next line
// meanwhile, so that a line of few keys costs little beyond its keys. A second kernel contracts the parts of lines that
// were split.
//
// Compiled for one variant (see plain_variant.h), with QUIRE_HEAD_DIM 64, 96, 128, 192 or 256, QUIRE_BF16 0 or 1,
// QUIRE_ROWS 8, 16, 32 or 64 (most packed rows of a line) and QUIRE_LAYOUT 0 paged, 1 ragged, 2 block-sparse.
// Page sizes are multiples of 8. QUIRE_KEYS, QUIRE_WARPS, QUIRE_WARP_ROWS,
// QUIRE_STAGES and QUIRE_WRITERS override the usual sizes.
//
// Both kernels may start before the previous kernel of the stream has ended, and wait for it (programmatic dependent
// launch). The merge kernel reads `merges` and `parts` before it waits: a kernel launched between the two must wait for
// its own predecessor before it lets the next start.
#include "attention.h"
#include "hopper.h"

#include <algorithm>
#include <numeric>

namespace quire {
namespace {

enum Layout { PAGED = 0, RAGGED = 1, SPARSE = 2 };

constexpr Layout LAYOUT = static_cast<Layout>(QUIRE_LAYOUT);
constexpr int DIM = QUIRE_HEAD_DIM, ROWS = QUIRE_ROWS;
// Hooks on every logit take longer than the copies: more warps share them, and a longer stage.
constexpr bool HOOKED = (Variant::has_logits || Variant::has_mask) && ROWS <= 16 && DIM <= 128;
#ifndef QUIRE_KEYS
#define QUIRE_KEYS (HOOKED ? 128 : DIM > 192 && ROWS > 8 ? 32 : 64)
#endif
#ifndef QUIRE_WARPS
#define QUIRE_WARPS (HOOKED || ROWS > 16 ? 8 : 4)
#endif
#ifndef QUIRE_WARP_ROWS
#define QUIRE_WARP_ROWS (ROWS < 16 || DIM > 192 || (DIM > 128 && ROWS > 16) ? 8 : 16)
#endif
#ifndef QUIRE_WRITERS
#define QUIRE_WRITERS 2
#endif
constexpr int KEYS = QUIRE_KEYS;                  // of a stage
constexpr int WARPS = QUIRE_WARPS;                // consumers
constexpr int WRITERS = QUIRE_WRITERS;            // warps that load q and write results
constexpr int WARP_ROWS = QUIRE_WARP_ROWS;        // packed rows of a consumer
constexpr int ROW_WARPS = ROWS / WARP_ROWS;       // consumers side by side in rows ..
constexpr int KEY_WARPS = WARPS / ROW_WARPS;      // .. and in keys
constexpr int KEY_TILES = KEYS / 16 / KEY_WARPS;  // of 16 keys, of a consumer in a stage
constexpr int ROW_TILES = WARP_ROWS / 8;
constexpr int DIM_TILES = DIM / 16;
// In shared memory a key is chunks of 64 elements, 128 bytes, and the chunks of a box lie one after the other. Heads of
// 96 would waste half of their second chunk and much bandwidth: where the tokens of a page are contiguous they are
// copied as they are, two tokens in three chunks (`packed`).
constexpr int CHUNKS = (DIM + 63) / 64;
constexpr bool MAY_PACK = DIM == 96 && LAYOUT != RAGGED;
static_assert(ROW_WARPS * WARP_ROWS == ROWS && KEY_WARPS * ROW_WARPS == WARPS, "warps do not cover the rows");
static_assert(KEY_TILES * KEY_WARPS * 16 == KEYS && DIM % 32 == 0, "warps do not cover the keys");

constexpr int HALF_BYTES = KEYS * CHUNKS * 128;   // keys, or values, of a stage
constexpr int STAGE_BYTES = 2 * HALF_BYTES;
constexpr int MAX_BOXES = KEYS / 8;               // copies of a half
constexpr int QUERIES = ROWS <= 16 ? 2 : 1;       // q of lines in flight
constexpr int Q_ROW_BYTES = DIM * 2 + 16;         // in shared memory: rows begin in different banks
constexpr int Q_BYTES = ROWS * Q_ROW_BYTES;
// Results of lines on their way to the writers. A line's sums pass in rounds of ROUND_DIM dimensions, which keeps their
// meeting place small.
constexpr int RESULTS = 2;
// The consumers write a worker's last line themselves: 0.3 us sooner. With more rows this costs 8 % of short lines.
constexpr bool FINISH = ROWS < 16;
constexpr int ROUNDS_WANTED = (KEY_WARPS * ROWS * DIM + 4095) / 4096;
constexpr int ROUNDS = ROUNDS_WANTED < 2 ? 1 : (ROUNDS_WANTED == 2 || DIM_TILES % 4 ? 2 : 4);
constexpr int ROUND_DIM = DIM / ROUNDS;
constexpr int SUM_STRIDE = ROUND_DIM + (ROUND_DIM % 16 == 0 ? 4 : 12);  // 4 mod 16: no bank conflicts
static_assert(SUM_STRIDE % 16 == 4 && DIM_TILES % ROUNDS == 0, "uneven rounds");

constexpr int SUMS = KEY_WARPS * ROWS * SUM_STRIDE, STATES = KEY_WARPS * ROWS;  // of a result
constexpr int RESULT_BYTES = SUMS * 4 + STATES * 8;
constexpr int LINE_BARRIERS = 2 * RESULTS + 2;    // besides those of the stages
constexpr int FIXED_BYTES = RESULTS * RESULT_BYTES + QUERIES * Q_BYTES + LINE_BARRIERS * 8;
// Less the alignment of the ring, and room for a block of the merge kernel, which waits beside this one for its end.
constexpr int SHARED_LIMIT = 232448 - 1024 - 13312;
constexpr int STAGES_FIT = (SHARED_LIMIT - FIXED_BYTES) / (STAGE_BYTES + 16 + 4 * MAX_BOXES);
constexpr int STAGES_ENOUGH = (128 * 1024 + STAGE_BYTES - 1) / STAGE_BYTES;
#ifndef QUIRE_STAGES
#define QUIRE_STAGES (STAGES_FIT < STAGES_ENOUGH ? STAGES_FIT : STAGES_ENOUGH)
#endif
constexpr int STAGES = QUIRE_STAGES;
constexpr int SHARED_BYTES = 1024 + STAGES * (STAGE_BYTES + 16 + 4 * MAX_BOXES) + FIXED_BYTES;
static_assert(STAGES >= 2 && STAGES <= STAGES_FIT, "the ring does not fit");

constexpr bool STARTS_EARLY = LAYOUT == PAGED && Variant::causal;  // knows which keys are settled
constexpr float FLOOR = -1e30f;      // running maximum before the first key
constexpr float SLACK = 8.f;         // the maximum moves when a score passes it by this much (base 2)

struct BoxShape {  // of one copy: keys of a page, or of the ragged rows
    int rows;  // a power of two
    bool packed;
    __device__ __forceinline__ int bytes() const { return rows * (MAY_PACK && packed ? DIM * 2 : CHUNKS * 128); }
};

struct Shared {
    uint32_t ring, filled, drained;  // stages; barriers, 8 bytes for each stage
    uint32_t queries, q_filled;      // [QUERIES][ROWS][Q_ROW_BYTES]; its barriers
    uint32_t written, read;          // barriers of results
    float* sums;                     // [RESULTS][KEY_WARPS][ROWS][SUM_STRIDE]
    float2* states;                  // [RESULTS][KEY_WARPS][ROWS] (maximum, sum of weights)
    int* box_positions;              // [STAGES][MAX_BOXES]; block-sparse: position of a box's first key
};

__device__ __forceinline__ Shared shared_layout() {
    extern __shared__ char raw[];
    char* ring = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    char* queries = ring + STAGES * STAGE_BYTES;
    char* sums = queries + QUERIES * Q_BYTES;
    char* states = sums + RESULTS * SUMS * 4;
    char* barriers = states + RESULTS * STATES * 8;
    const uint32_t of_stages = shared_address(barriers), of_lines = of_stages + STAGES * 16;
    return {shared_address(ring),
            of_stages,
            of_stages + STAGES * 8,
            shared_address(queries),
            of_lines + RESULTS * 16,
            of_lines,
            of_lines + RESULTS * 8,
            reinterpret_cast<float*>(sums),
            reinterpret_cast<float2*>(states),
            reinterpret_cast<int*>(barriers + STAGES * 16 + LINE_BARRIERS * 8)};
}

template <int N>
struct Slot {  // a place in a ring of N, and the parity of its current use
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++at == N) at = 0, parity ^= 1;
    }
};

// ---- lines ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ QuireTile load_tile(const QuireTile* tiles, int index) {
    union {
        int4 words[3];
        QuireTile tile;
    } both;
    const int4* from = reinterpret_cast<const int4*>(tiles + index);
    for (int i = 0; i < 3; ++i) both.words[i] = load_here(from + i);  // __ldg would move to where a field is used
    return both.tile;
}

// A tile and the blocks of KEYS keys that it reads: those that a window hides from every row are left out.
struct Line {
    QuireTile tile;
    int begin, end;          // keys that some row may see ..
    int gap_begin, gap_end;  // .. without these
    int head_start, n_head;  // first key of the blocks before the gap, and their number
    int tail_start, n_blocks;

    __device__ __forceinline__ int block_start(int i) const {
        return Variant::window && i < n_head ? head_start + i * KEYS : tail_start + (i - n_head) * KEYS;
    }
    __device__ __forceinline__ bool holds(int key) const {
        return key >= begin && key < end && (!Variant::window || key < gap_begin || key >= gap_end);
    }
    __device__ __forceinline__ bool holds_block(int start) const {
        return start >= begin && start + KEYS <= end &&
               (!Variant::window || start + KEYS <= gap_begin || start >= gap_end);
    }
};

__device__ __forceinline__ Line make_line(const QuireTile& tile, const QuireAttnArgs& args, const BoxShape& shape) {
    const auto down = [&](int key) { return LAYOUT == RAGGED ? key : key & ~(shape.rows - 1); };
    Line line{tile, tile.begin, tile.end, tile.begin, tile.begin, 0, 0, 0, 0};
    const bool consecutive = LAYOUT != SPARSE && !tile.gathered;  // positions are known without reading them
    if (Variant::causal && consecutive) line.end = min(line.end, tile.position + tile.n_tokens);
    if (Variant::window && consecutive && args.window > 0) {
        line.gap_begin = max(line.begin, min(args.n_first, line.end));
        line.gap_end = max(line.gap_begin, min(line.end, tile.position - args.window + 1));
    }
    line.head_start = down(line.begin);
    line.tail_start = down(line.gap_end);
    if (tile.n_tokens == 0 || line.end <= line.begin) return line;
    if (line.gap_begin > line.begin) line.n_head = (line.gap_begin - line.head_start + KEYS - 1) / KEYS;
    if (line.n_head > 0 && line.head_start + line.n_head * KEYS >= line.tail_start) {
        line.n_head = 0;
        line.tail_start = line.head_start;
    }
    line.n_blocks = line.n_head;
    if (line.end > line.gap_end || line.tail_start < line.gap_begin)
        line.n_blocks += (line.end - line.tail_start + KEYS - 1) / KEYS;
    return line;
}

struct Row {
    int q_row, q_pos, q_head;
};

// A token beyond the last one stands for it: hooks are asked about real rows only.
__device__ __forceinline__ Row find_row(const QuireTile& tile, int token, int head, int group,
                                        const QuireAttnArgs& args) {
    token = min(token, tile.n_tokens - 1);
    const int q_head = tile.kv_head * group + head;
    if (!tile.gathered) return {tile.row + token, tile.position + token, q_head};
    const int2 found = __ldg(reinterpret_cast<const int2*>(args.rows) + tile.row + token);
    return {found.x, found.y, q_head};
}

// ---- producer ------------------------------------------------------------------------------------------------------

struct Box {  // where a copy begins
    int page, row, position;
};

__device__ __forceinline__ Box find_box(const Line& line, int key, const QuireAttnArgs& args) {
    if (LAYOUT == RAGGED) return {0, line.tile.kv_at + key, key};
    int page = key / args.page_size;
    const int row = key - page * args.page_size;
    if (LAYOUT == SPARSE) page = __ldg(args.blocks + line.tile.blocks_at + page);
    return {__ldg(args.pages + line.tile.kv_at + page), row, page * args.page_size + row};
}

__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t to, uint32_t barrier, const Box& box,
                                         int kv_head, const BoxShape& shape) {
    if (MAY_PACK && shape.packed)
        return load_box(to, &map, barrier, L2_EVICT_FIRST, 0, 0, box.row / 2, kv_head, box.page);
    for (int column = 0; column < (DIM % 64 ? CHUNKS : 1); ++column) {
        const uint32_t at = to + column * shape.rows * 128;
        if (LAYOUT == RAGGED)
            load_box(at, &map, barrier, L2_EVICT_FIRST, column * 64, box.row, 0, kv_head);
        else
            load_box(at, &map, barrier, L2_EVICT_FIRST, column * 64, box.row, 0, kv_head, box.page);
    }
}

// Lanes hold the places of 32 boxes, those of the blocks that come next; the 32 after them are looked up meanwhile.
// Settled keys are copied while the previous grid still runs: it may write those of this step's tokens.
__device__ __forceinline__ void produce(const QuireAttnArgs& args, const CUtensorMap& k_map, const CUtensorMap& v_map,
                                        const Shared& shared, int first, int last, const BoxShape& shape) {
    QuireTile coming = load_tile(args.small_lines, first);
    const int lane = threadIdx.x % 32, n_boxes = KEYS / shape.rows, n_ahead = 32 / n_boxes;
    const int box_bytes = shape.bytes(), of_block = lane % n_boxes;
    const bool is_value = lane >= n_boxes;
    const uint32_t offset = is_value * HALF_BYTES + of_block * box_bytes;
    Slot<STAGES> slot;
    Line line{};
    int index = first - 1, block = 0;
    Box box{};
    bool live = false, waited = !STARTS_EARLY || !args.settled;
    while (true) {
        Line next_line = line;
        int next_index = index, next_block = block + n_ahead;
        while (next_block >= next_line.n_blocks && ++next_index < last) {
            next_line = make_line(coming, args, shape);
            next_block = 0;
            if (next_index + 1 < last) coming = load_tile(args.small_lines, next_index + 1);
        }
        Box next_box{};
        if (next_index < last) {
            const int of_line = next_block + lane / n_boxes;
            const int key = next_line.block_start(of_line) + of_block * shape.rows;
            if (of_line < next_line.n_blocks && key < next_line.end) next_box = find_box(next_line, key, args);
        }
        for (int i = block; live && i < min(block + n_ahead, line.n_blocks); ++i) {
            const int held_by = (i - block) * n_boxes + of_block;
            const Box chosen{__shfl_sync(~0u, box.page, held_by), __shfl_sync(~0u, box.row, held_by),
                             LAYOUT == SPARSE ? __shfl_sync(~0u, box.position, held_by) : 0};
            const int n_copied = min(n_boxes, (line.end - line.block_start(i) + shape.rows - 1) / shape.rows);
            const uint32_t filled = shared.filled + slot.at * 8;
            if (!waited && (line.tile.gathered || line.block_start(i) + KEYS > line.tile.position)) {
                wait_for_previous_grid();
                waited = true;
            }
            barrier_wait(shared.drained + slot.at * 8, slot.parity ^ 1);
            if (LAYOUT == SPARSE && lane < n_boxes)
                shared.box_positions[slot.at * MAX_BOXES + lane] = chosen.position;
            __syncwarp();
            if (lane == 0) barrier_expect(filled, 2 * n_copied * box_bytes);
            __syncwarp();
            if (lane < 2 * n_boxes && of_block < n_copied)
                copy_box(is_value ? v_map : k_map, shared.ring + slot.at * STAGE_BYTES + offset, filled, chosen,
                         line.tile.kv_head, shape);
            slot.advance();
        }
        if (next_index >= last) return;
        line = next_line, index = next_index, block = next_block, box = next_box, live = true;
    }
}

// ---- results -------------------------------------------------------------------------------------------------------

struct Weights {  // of the key warps' sums, normalised; base-2 lse
    float of[KEY_WARPS], lse;
};

__device__ __forceinline__ Weights contract_states(const float2* states) {  // of one row
    Weights weights;
    if (!Variant::softmax) {
        for (int w = 0; w < KEY_WARPS; ++w) weights.of[w] = 1.f;
        weights.lse = 0.f;
        return weights;
    }
    float top = FLOOR, total = 0.f;
    for (int w = 0; w < KEY_WARPS; ++w) top = fmaxf(top, states[w * ROWS].x);
    for (int w = 0; w < KEY_WARPS; ++w) {
        weights.of[w] = exp2_fast(states[w * ROWS].x - top);
        total += weights.of[w] * states[w * ROWS].y;
    }
    for (int w = 0; w < KEY_WARPS; ++w) weights.of[w] *= total > 0.f ? 1.f / total : 0.f;
    weights.lse = total > 0.f ? top + log2f(total) : -INFINITY;
    return weights;
}

// Four dimensions of one row of the result, and its lse (base 2) beside the first.
__device__ __forceinline__ void write_out(float4 o, float lse, const Site& first, const QuireAttnArgs& args) {
    const float natural = lse * LN2;
    float values[4] = {o.x, o.y, o.z, o.w};
    if (Variant::has_output) {
        for (int i = 0; i < 4; ++i) {
            Site site = first;
            site.dim += i;
            values[i] = Variant::output(values[i], site, natural, args);
        }
    }
    const int64_t row = static_cast<int64_t>(first.q_row) * args.n_q_heads + first.q_head;
    *reinterpret_cast<uint2*>(static_cast<Element*>(args.out) + row * DIM + first.dim) =
        make_uint2(pack(values[0], values[1]), pack(values[2], values[3]));
    if (Variant::softmax && first.dim == 0 && args.lse != nullptr) args.lse[row] = natural;
}

// By N_THREADS threads, of which this is number `thread`.
template <int N_THREADS>
__device__ __forceinline__ void write_round(int thread, const float* sums, const float2* states, const QuireTile& tile,
                                            int round, int group, const QuireAttnArgs& args) {
    constexpr int ROUND_CELLS = ROUND_DIM / 4;
    const int n_cells = tile.n_tokens * group * ROUND_CELLS;
    for (int cell = thread; cell < n_cells; cell += N_THREADS) {
        const int row = cell / ROUND_CELLS, dim = cell % ROUND_CELLS * 4;
        const Weights weights = contract_states(states + row);
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int w = 0; w < KEY_WARPS; ++w) {
            const float4 x = *reinterpret_cast<const float4*>(sums + (w * ROWS + row) * SUM_STRIDE + dim);
            o.x += weights.of[w] * x.x, o.y += weights.of[w] * x.y;
            o.z += weights.of[w] * x.z, o.w += weights.of[w] * x.w;
        }
        const int from = round * ROUND_DIM + dim;
        if (tile.partial >= 0) {
            const int64_t to = tile.partial + row;
            *reinterpret_cast<float4*>(args.partial_out + to * DIM + from) = o;
            if (from == 0) args.partial_lse[to] = weights.lse;
        } else {
            const Row found = find_row(tile, row / group, row % group, group, args);
            write_out(o, weights.lse, {found.q_row, found.q_pos, 0, found.q_head, tile.kv_head, from}, args);
        }
    }
}

// ---- consumers -----------------------------------------------------------------------------------------------------

struct Consumer {
    int lane, key_at, row_at;                // first key in a stage, first packed row of this warp
    uint32_t k_from[KEY_TILES], v_from[KEY_TILES], chunk_bytes;  // of this lane's matrix rows in a stage
    uint32_t q[DIM_TILES][ROW_TILES][2];     // Q^T
    float o[DIM_TILES][ROW_TILES][4];        // O^T: dimension lane / 4 (+ 8), row 2 (lane % 4) (+ 1)
    float top[ROW_TILES][2], sum[ROW_TILES][2];  // maximum (base 2); this lane's share of the sum of weights
    int tokens[ROW_TILES][2], heads[ROW_TILES][2];  // of a line, of a group
    Row rows[ROW_TILES][2];
    int first_position, last_position;
    int n_tiles;                             // of 8 packed rows that the line has here

    __device__ __forceinline__ void place(const BoxShape& shape, int group);
    __device__ __forceinline__ uint32_t cell(uint32_t from, int d) const;
    __device__ __forceinline__ void start_line(const QuireTile& tile, uint32_t queries, int group,
                                               const QuireAttnArgs& args);
    __device__ __forceinline__ void stage(const Line& line, int start, const Slot<STAGES>& slot, const Shared& shared,
                                          const BoxShape& shape, const QuireAttnArgs& args);
    __device__ __forceinline__ void add_lanes();
    template <int TILES>
    __device__ __forceinline__ void block(const Line& line, int start, uint32_t stage, const int* positions,
                                          const BoxShape& shape, bool whole, const QuireAttnArgs& args) {
        if (whole)
            block_of<false, TILES>(line, start, stage, positions, shape, args);
        else
            block_of<true, TILES>(line, start, stage, positions, shape, args);
    }
    template <bool EDGE, int TILES>
    __device__ __forceinline__ void block_of(const Line& line, int start, uint32_t stage, const int* positions,
                                             const BoxShape& shape, const QuireAttnArgs& args);
    template <int TILES>
    __device__ __forceinline__ void raise_tops(const float (&s)[KEY_TILES][TILES][4]);
    __device__ __forceinline__ void share_round(float* sums, float2* states, int round) const;
};

__device__ __forceinline__ void Consumer::place(const BoxShape& shape, int group) {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    key_at = warp / ROW_WARPS * KEY_TILES * 16;
    row_at = warp % ROW_WARPS * WARP_ROWS;
    for (int r = 0; r < ROW_TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            const int row = row_at + r * 8 + lane % 4 * 2 + c;
            tokens[r][c] = row / group, heads[r][c] = row % group;
        }
    }
    const bool packed = MAY_PACK && shape.packed;
    chunk_bytes = packed ? 128 : shape.rows * 128;
    const auto row_offset = [&](int key) {
        return packed ? key * DIM * 2 : key / shape.rows * (CHUNKS * chunk_bytes) + key % shape.rows * 128;
    };
    for (int i = 0; i < KEY_TILES; ++i) {
        k_from[i] = row_offset(key_at + i * 16 + lane % 16) + lane / 16 * 16;
        v_from[i] = row_offset(key_at + i * 16 + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 16 + HALF_BYTES;
        if (!MAY_PACK) k_from[i] ^= lane % 8 * 16, v_from[i] ^= lane % 8 * 16;
    }
}

// The address of this lane's matrix row for dimensions 16 d .. 16 d + 15, swizzled.
__device__ __forceinline__ uint32_t Consumer::cell(uint32_t from, int d) const {
    const uint32_t chunk = from + d / 4 * chunk_bytes;
    if (!MAY_PACK) return chunk ^ (d % 4 * 32);  // `from` holds the swizzle already: a key lies on one row
    const uint32_t plain = chunk + d % 4 * 32;
    return plain ^ (plain / 8 & 0x70);
}

__device__ __forceinline__ void Consumer::start_line(const QuireTile& tile, uint32_t queries, int group,
                                                     const QuireAttnArgs& args) {
    n_tiles = min(max((tile.n_tokens * group - row_at + 7) / 8, 0), ROW_TILES);
    const uint32_t from = queries + (row_at + lane % 8) * Q_ROW_BYTES + lane / 8 * 16;
    for (int r = 0; r < ROW_TILES; ++r) {
        if (r >= n_tiles) continue;
        for (int d = 0; d < DIM_TILES; d += 2) {
            uint32_t found[4];
            load_matrices(found, from + r * 8 * Q_ROW_BYTES + d * 32);
            for (int i = 0; i < 4; ++i) q[d + i / 2][r][i % 2] = found[i];
        }
    }
    first_position = tile.position, last_position = tile.position + tile.n_tokens - 1;
    if (tile.gathered) first_position = 0x7fffffff, last_position = 0;
    for (int r = 0; r < ROW_TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            rows[r][c] = find_row(tile, tokens[r][c], heads[r][c], group, args);
            first_position = min(first_position, rows[r][c].q_pos);
            last_position = max(last_position, rows[r][c].q_pos);
            top[r][c] = Variant::softmax ? FLOOR : 0.f;
            sum[r][c] = 0.f;
        }
        for (int d = 0; d < DIM_TILES; ++d)
            for (int e = 0; e < 4; ++e) o[d][r][e] = 0.f;
    }
    if (tile.gathered) {
        first_position = __reduce_min_sync(~0u, first_position);
        last_position = __reduce_max_sync(~0u, last_position);
    }
}

// Adds what the stage holds to the sums, and gives the stage back.
__device__ __forceinline__ void Consumer::stage(const Line& line, int start, const Slot<STAGES>& slot,
                                                const Shared& shared, const BoxShape& shape,
                                                const QuireAttnArgs& args) {
    const uint32_t from = shared.ring + slot.at * STAGE_BYTES;
    const int* positions = shared.box_positions + slot.at * MAX_BOXES;
    bool whole = !Variant::has_mask && line.holds_block(start);
    barrier_wait(shared.filled + slot.at * 8, slot.parity);
    if (start + key_at < line.end) {  // else nothing was loaded for this warp
        int low = start, high = start + KEYS - 1;
        if (LAYOUT == SPARSE) low = positions[0], high = positions[KEYS / shape.rows - 1] + shape.rows - 1;
        if (Variant::causal) whole = whole && high <= first_position;
        if (Variant::window && args.window > 0)
            whole = whole && (low > last_position - args.window || high < args.n_first);
        if (n_tiles == 1) block<1>(line, start, from, positions, shape, whole, args);
        if (ROW_TILES > 1 && n_tiles == 2) block<ROW_TILES>(line, start, from, positions, shape, whole, args);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.drained + slot.at * 8);
}

// The sums of weights of all lanes.
__device__ __forceinline__ void Consumer::add_lanes() {
    for (int r = 0; r < ROW_TILES; ++r)
        for (int c = 0; c < 2; ++c)
            for (int step = 4; step < 32; step *= 2) sum[r][c] += __shfl_xor_sync(~0u, sum[r][c], step);
}

// Moves maxima that a score passes by too much, and what was summed under them.
template <int TILES>
__device__ __forceinline__ void Consumer::raise_tops(const float (&s)[KEY_TILES][TILES][4]) {
    bool passed = false;
    float high[TILES][2];
    for (int r = 0; r < TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            high[r][c] = s[0][r][c];
            for (int i = 0; i < 2 * KEY_TILES; ++i) high[r][c] = fmaxf(high[r][c], s[i / 2][r][i % 2 * 2 + c]);
            passed |= high[r][c] > top[r][c] + SLACK;
        }
    }
    if (!__any_sync(~0u, passed)) return;
    for (int r = 0; r < TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            float found = fmaxf(high[r][c], top[r][c]);
            for (int step = 4; step < 32; step *= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, step));
            const float factor = exp2_fast(top[r][c] - found);
            top[r][c] = found;
            sum[r][c] *= factor;
            for (int d = 0; d < DIM_TILES; ++d) o[d][r][c] *= factor, o[d][r][c + 2] *= factor;
        }
    }
}

// One stage. EDGE: some keys are hidden from some rows; TILES: of 8 packed rows, beyond them the line has none.
template <bool EDGE, int TILES>
__device__ __forceinline__ void Consumer::block_of(const Line& line, int start, uint32_t stage, const int* positions,
                                                   const BoxShape& shape, const QuireAttnArgs& args) {
    float s[KEY_TILES][TILES][4] = {};
    for (int i = 0; i < KEY_TILES; ++i) {
        float odd[TILES][4] = {};  // two chains of sums are shorter than one
        for (int d = 0; d < DIM_TILES; ++d) {
            uint32_t k[4];
            load_matrices(k, cell(stage + k_from[i], d));
            for (int r = 0; r < TILES; ++r) multiply_add(d % 2 ? odd[r] : s[i][r], k, q[d][r][0], q[d][r][1]);
        }
        for (int r = 0; r < TILES; ++r)
            for (int e = 0; e < 4; ++e) s[i][r][e] += odd[r][e];
    }
    const float scale = Variant::has_logits || !Variant::softmax ? args.scale : args.scale * LOG2E;
    for (int i = 0; i < KEY_TILES; ++i) {
        for (int h = 0; h < 2; ++h) {
            const int in_block = key_at + i * 16 + h * 8 + lane / 4, key = start + in_block;
            int k_pos = key;
            if (LAYOUT == SPARSE && (EDGE || Variant::has_logits))
                k_pos = positions[in_block / shape.rows] + in_block % shape.rows;
            for (int r = 0; r < TILES; ++r) {
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][r][h * 2 + c];
                    const Row& row = rows[r][c];
                    const Site site{row.q_row, row.q_pos, k_pos, row.q_head, line.tile.kv_head, 0};
                    bool seen = true;  // hooks are asked about keys that exist only
                    if (EDGE) {
                        seen = line.holds(key) && (!Variant::causal || k_pos <= row.q_pos);
                        if (Variant::window && args.window > 0)
                            seen = seen && (k_pos > row.q_pos - args.window || k_pos < args.n_first);
                        if (Variant::has_mask) seen = seen && Variant::mask(site, args);
                    }
                    x *= scale;
                    if (Variant::has_logits && seen)
                        x = Variant::logits(x, site, args) * (Variant::softmax ? LOG2E : 1.f);
                    if (EDGE && !seen) x = Variant::softmax ? -INFINITY : 0.f;
                }
            }
        }
    }
    if (Variant::softmax) raise_tops<TILES>(s);
    for (int i = 0; i < KEY_TILES; ++i) {
        uint32_t p[TILES][2];
        for (int r = 0; r < TILES; ++r) {
            float* x = s[i][r];
            if (Variant::softmax) {
                for (int e = 0; e < 4; ++e) x[e] = exp2_fast(x[e] - top[r][e % 2]);
                sum[r][0] += x[0] + x[2], sum[r][1] += x[1] + x[3];
            }
            for (int h = 0; h < 2; ++h) p[r][h] = transpose_matrix(pack(x[h * 2], x[h * 2 + 1]));
        }
        uint32_t kept[2];  // of values of keys that the line does not hold nothing is kept: they may be NaN
        if (EDGE) {
            for (int h = 0; h < 2; ++h) {
                const int key = start + key_at + i * 16 + h * 8 + lane % 4 * 2;
                kept[h] = (line.holds(key) ? 0x0000ffffu : 0u) | (line.holds(key + 1) ? 0xffff0000u : 0u);
            }
        }
        for (int d = 0; d < DIM_TILES; ++d) {
            uint32_t v[4];
            load_matrices_transposed(v, cell(stage + v_from[i], d));
            if (EDGE)
                for (int e = 0; e < 4; ++e) v[e] &= kept[e / 2];
            for (int r = 0; r < TILES; ++r) multiply_add(o[d][r], v, p[r][0], p[r][1]);
        }
    }
}

// One round of the warp's results, as one of the KEY_WARPS that have results of these rows; its sums are whole already.
__device__ __forceinline__ void Consumer::share_round(float* sums, float2* states, int round) const {
    const int key_warp = threadIdx.x / 32 / ROW_WARPS;
    float* to = sums + key_warp * ROWS * SUM_STRIDE;
    for (int r = 0; r < ROW_TILES; ++r) {
        if (r >= n_tiles) continue;
        for (int c = 0; c < 2; ++c) {
            const int row = row_at + r * 8 + lane % 4 * 2 + c;
            if (lane < 4) states[key_warp * ROWS + row] = make_float2(top[r][c], sum[r][c]);
        }
        for (int i = 0; i < DIM_TILES / ROUNDS; ++i) {
            for (int e = 0; e < 4; ++e) {
                const int row = row_at + r * 8 + lane % 4 * 2 + e % 2;
                to[row * SUM_STRIDE + i * 16 + e / 2 * 8 + lane / 4] = o[round * (DIM_TILES / ROUNDS) + i][r][e];
            }
        }
    }
}

__device__ __forceinline__ void consume(const QuireAttnArgs& args, const Shared& shared, int first, int last,
                                        const BoxShape& shape) {
    QuireTile coming = load_tile(args.small_lines, first);
    const int group = args.n_q_heads / args.n_kv_heads;
    Consumer warp;
    warp.place(shape, group);
    Slot<STAGES> slot;
    Slot<QUERIES> query;
    Slot<RESULTS> result;
    for (int index = first; index < last; ++index) {
        const Line line = make_line(coming, args, shape);
        if (index + 1 < last) coming = load_tile(args.small_lines, index + 1);
        if (line.tile.n_tokens == 0) continue;
        barrier_wait(shared.q_filled + query.at * 8, query.parity);
        warp.start_line(line.tile, shared.queries + query.at * Q_BYTES, group, args);
        query.advance();
        for (int i = 0; i < line.n_blocks; ++i, slot.advance())
            warp.stage(line, line.block_start(i), slot, shared, shape, args);
        warp.add_lanes();
        const bool finish = FINISH && index + 1 == last;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round, result.advance()) {
            float* sums = shared.sums + result.at * SUMS;
            float2* states = shared.states + result.at * STATES;
            if (!finish || round < RESULTS) barrier_wait(shared.read + result.at * 8, result.parity ^ 1);
            warp.share_round(sums, states, round);
            if (finish) {
                named_sync(1, WARPS * 32);
                write_round<WARPS * 32>(threadIdx.x, sums, states, line.tile, round, group, args);
            } else {
                __syncwarp();
                if (warp.lane == 0) barrier_arrive(shared.written + result.at * 8);
            }
        }
    }
}

// ---- writers -------------------------------------------------------------------------------------------------------

// Rows up to the next multiple of 8 are zero: what they would weigh moves the maxima of the others.
__device__ __forceinline__ void load_queries(const QuireTile& tile, uint32_t queries, uint32_t barrier, int group,
                                             const QuireAttnArgs& args) {
    constexpr int Q_CELLS = DIM / 8;
    const int n_rows = tile.n_tokens * group;
    for (int cell = threadIdx.x - WARPS * 32; cell < (n_rows + 7) / 8 * 8 * Q_CELLS; cell += WRITERS * 32) {
        const int row = cell / Q_CELLS, of_row = cell % Q_CELLS;
        const Row found = find_row(tile, row / group, row % group, group, args);
        const int64_t at = found.q_row * args.q_row + found.q_head * args.q_head;
        const Element* from = static_cast<const Element*>(args.q) + at;
        copy_16_bytes(queries + row * Q_ROW_BYTES + of_row * 16, from + of_row * 8, row < n_rows);
    }
    barrier_arrive_after_copies(barrier);
}

// q of a line is loaded once the results of the line that had its place are there: its consumers have read it then.
__device__ __forceinline__ void write(const QuireAttnArgs& args, const Shared& shared, int first, int last) {
    const int group = args.n_q_heads / args.n_kv_heads;
    Slot<QUERIES> query;
    Slot<RESULTS> result;
    QuireTile next{};
    int index = first - 1;  // of `next`
    const auto find_next = [&] {  // lines without rows have no q and no results
        for (next.n_tokens = 0; next.n_tokens == 0 && ++index < last;) next = load_tile(args.small_lines, index);
    };
    const auto load_next = [&] {
        if (next.n_tokens == 0) return;
        load_queries(next, shared.queries + query.at * Q_BYTES, shared.q_filled + query.at * 8, group, args);
        query.advance();
    };
    find_next();
    load_next();
    while (next.n_tokens > 0 && !(FINISH && index + 1 == last)) {
        const QuireTile tile = next;
        find_next();
        if (QUERIES > 1) load_next();
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            barrier_wait(shared.written + result.at * 8, result.parity);
            write_round<WRITERS * 32>(threadIdx.x - WARPS * 32, shared.sums + result.at * SUMS,
                                      shared.states + result.at * STATES, tile, round, group, args);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(shared.read + result.at * 8);
            result.advance();
        }
        if (QUERIES == 1) load_next();
    }
}

constexpr int BLOCK_THREADS = (WARPS + WRITERS + 1) * 32;  // consumers, writers, the producer

__global__ void __launch_bounds__(BLOCK_THREADS, 1)
    small_lines_kernel(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ CUtensorMap k_map,
                       const __grid_constant__ CUtensorMap v_map, const __grid_constant__ BoxShape shape) {
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
    const int first = load_here(args.queue + blockIdx.x), last = load_here(args.queue + blockIdx.x + 1);
    if (first >= last) return;
    if (warp < WARPS)
        consume(args, shared, first, last, shape);
    else if (warp < WARPS + WRITERS)
        write(args, shared, first, last);
    else
        produce(args, k_map, v_map, shared, first, last, shape);
}

// ---- contraction of parts ------------------------------------------------------------------------------------------

constexpr int CELLS = DIM / 4;      // of a row: four dimensions each
constexpr int MERGE_THREADS = 512;
constexpr int FEW_MERGES = 4;       // of a multiprocessor: up to as many, each has a block
constexpr int CELL_THREADS = 256, CELL_BLOCKS = 5;  // of a multiprocessor
constexpr int FLIGHT = 5, CELL_FLIGHT = 3;  // parts loaded together, by merge_kernel and by merge_cells_kernel

struct Sum {  // of weighted parts, relative to 2^top
    float4 o;
    float top, total;
    __device__ __forceinline__ void lift(float high) {
        if (!Variant::softmax) return;
        const float factor = exp2_fast(top - high);
        top = high, total *= factor;
        o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor;
    }
    __device__ __forceinline__ void add(const float4& x, float weight, float of_total) {
        total += weight * of_total;
        o.x += weight * x.x, o.y += weight * x.y, o.z += weight * x.z, o.w += weight * x.w;
    }
};

// Parts first, first + step .. of one cell; `found` holds the rows of the first FLIGHT of them, -1 beyond the last.
template <int FLIGHT, class Load>
__device__ __forceinline__ Sum sum_parts(const QuireMerge& merge, int (&found)[FLIGHT], const Load& load_parts,
                                         int first, int step, int head, int dim, const QuireAttnArgs& args) {
    Sum sum{make_float4(0.f, 0.f, 0.f, 0.f), FLOOR, 0.f};
    for (int from = first; from < merge.n_parts; from += FLIGHT * step) {
        if (from > first) load_parts(found, from);
        float lse[FLIGHT], high = sum.top;
        float4 x[FLIGHT];
        for (int i = 0; i < FLIGHT; ++i) {
            const int64_t row = found[i] + head;
            lse[i] = found[i] < 0 ? -INFINITY : Variant::softmax ? args.partial_lse[row] : 0.f;
            x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (found[i] >= 0) x[i] = *reinterpret_cast<const float4*>(args.partial_out + row * DIM + dim);
        }
        for (int i = 0; i < FLIGHT; ++i) high = fmaxf(high, lse[i]);
        sum.lift(high);
        for (int i = 0; i < FLIGHT; ++i) sum.add(x[i], Variant::softmax ? exp2_fast(lse[i] - high) : 1.f, 1.f);
    }
    return sum;
}

__device__ __forceinline__ QuireMerge load_merge(int index, const QuireAttnArgs& args) {
    if (index >= args.n_merges) return {0, 0, 0, 0};
    const int4 words = load_here(reinterpret_cast<const int4*>(args.merges) + index);
    return {words.x, words.y, words.z, words.w};
}

__device__ __forceinline__ void write_merged(const Sum& sum, const QuireMerge& merge, int group, int head, int dim,
                                             const QuireAttnArgs& args) {
    const float scale = !Variant::softmax ? 1.f : sum.total > 0.f ? 1.f / sum.total : 0.f;
    const float4 o = make_float4(sum.o.x * scale, sum.o.y * scale, sum.o.z * scale, sum.o.w * scale);
    const float lse = sum.total > 0.f ? sum.top + log2f(sum.total) : -INFINITY;
    write_out(o, lse, {merge.row, -1, 0, merge.kv_head * group + head, merge.kv_head, dim}, args);
}

// Few merges: a block for each row and KV head. Threads beyond its cells share the parts: slice s takes parts s,
// s + n_slices .., and the slices are added in order. Both kernels read the plan before the grid that writes the parts
// has ended.
__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const __grid_constant__ QuireAttnArgs args) {
    __shared__ float4 slice_sums[MERGE_THREADS];
    __shared__ float2 slice_states[MERGE_THREADS];
    const QuireMerge merge = load_merge(blockIdx.x, args);
    const int group = args.n_q_heads / args.n_kv_heads, n_cells = group * CELLS;
    const int width = min(n_cells, MERGE_THREADS), n_slices = MERGE_THREADS / width;
    const int slice = threadIdx.x / width;
    const auto load_parts = [&](int (&found)[FLIGHT], int from) {
        for (int i = 0; i < FLIGHT; ++i) {
            const int part = from + i * n_slices;
            found[i] = slice < n_slices && part < merge.n_parts ? load_here(args.parts + merge.parts_at + part) : -1;
        }
    };
    int found[FLIGHT];
    load_parts(found, slice);
    let_next_grid_start();  // a product reads its weights while the last lines are still computed
    wait_for_previous_grid();
    for (int base = 0; merge.n_parts > 0 && base < n_cells; base += width) {
        if (base > 0) load_parts(found, slice);
        const int cell = min(base + static_cast<int>(threadIdx.x) % width, n_cells - 1);
        const int head = cell / CELLS, dim = cell % CELLS * 4;
        Sum sum = sum_parts(merge, found, load_parts, slice, n_slices, head, dim, args);
        slice_sums[threadIdx.x] = sum.o;
        slice_states[threadIdx.x] = make_float2(sum.top, sum.total);
        __syncthreads();
        for (int other = 1; slice == 0 && other < min(n_slices, merge.n_parts); ++other) {
            const float2 state = slice_states[other * width + threadIdx.x];
            Sum more{slice_sums[other * width + threadIdx.x], state.x, state.y};
            const float high = fmaxf(sum.top, more.top);
            sum.lift(high);
            more.lift(high);
            sum.add(more.o, 1.f, more.total);
        }
        if (slice == 0) write_merged(sum, merge, group, head, dim, args);
        __syncthreads();
    }
}

// Many merges: a thread for each cell, which finds the plan of its next two merges meanwhile. Those without parts come
// last.
__global__ void __launch_bounds__(CELL_THREADS, CELL_BLOCKS)
    merge_cells_kernel(const __grid_constant__ QuireAttnArgs args) {
    const uint32_t group = args.n_q_heads / args.n_kv_heads, n_cells = group * CELLS;
    uint32_t at = blockIdx.x * CELL_THREADS + threadIdx.x;
    const uint32_t step = gridDim.x * CELL_THREADS;
    QuireMerge merge = load_merge(at / n_cells, args), next = load_merge((at + step) / n_cells, args);
    const auto load_parts = [&](int (&found)[CELL_FLIGHT], const QuireMerge& of, int from) {
        for (int i = 0; i < CELL_FLIGHT; ++i)
            found[i] = from + i < of.n_parts ? load_here(args.parts + of.parts_at + from + i) : -1;
    };
    int found[CELL_FLIGHT];
    load_parts(found, merge, 0);
    let_next_grid_start();
    wait_for_previous_grid();
    while (merge.n_parts > 0) {
        int next_found[CELL_FLIGHT];
        load_parts(next_found, next, 0);
        const QuireMerge third = load_merge((at + 2 * step) / n_cells, args);
        const uint32_t cell = at % n_cells, head = cell / CELLS, dim = cell % CELLS * 4;
        const auto load_more = [&](int (&to)[CELL_FLIGHT], int from) { load_parts(to, merge, from); };
        const Sum sum = sum_parts(merge, found, load_more, 0, 1, head, dim, args);
        write_merged(sum, merge, group, head, dim, args);
        at += step, merge = next, next = third;
        for (int i = 0; i < CELL_FLIGHT; ++i) found[i] = next_found[i];
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

bool fits(const QuireAttnArgs& args) {
    return args.head_dim == DIM && args.n_kv_heads > 0 && args.n_q_heads % args.n_kv_heads == 0;
}

cudaError_t encode_side(CUtensorMap* map, const void* base, int64_t page, int64_t head, int64_t token,
                        const QuireAttnArgs& args, const BoxShape& shape) {
    const uint64_t n_heads = args.n_kv_heads, n_pages = args.n_pages, bytes = sizeof(Element);
    const uint64_t n_rows = LAYOUT == RAGGED ? args.n_pages : args.page_size;
    const uint32_t n_box_rows = shape.rows;
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

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int n_blocks, int n_threads, int shared_bytes, void* stream,
                   Arguments... arguments) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(n_blocks);
    config.blockDim = dim3(n_threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

cudaError_t allow_shared_memory() {  // once for each device
    static bool allowed[64] = {};
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess || (device < 64 && allowed[device])) return error;
    error = cudaFuncSetAttribute(small_lines_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (error == cudaSuccess && device < 64) allowed[device] = true;
    return error;
}

}  // namespace
}  // namespace quire

extern "C" int quire_attention_small(const QuireAttnArgs* args, void* stream) {
    using namespace quire;
    if (!fits(*args) || args->n_workers < 0) return cudaErrorInvalidValue;
    if (LAYOUT != RAGGED && (args->page_size < 8 || args->page_size % 8 != 0)) return cudaErrorInvalidValue;
    if (args->n_workers == 0) return cudaSuccess;
    const BoxShape shape{LAYOUT == RAGGED ? KEYS : std::gcd(args->page_size, KEYS),
                         MAY_PACK && args->k_token == DIM && args->v_token == DIM};
    CUtensorMap k_map, v_map;
    cudaError_t error = encode_side(&k_map, args->k, args->k_page, args->k_head, args->k_token, *args, shape);
    if (error == cudaSuccess)
        error = encode_side(&v_map, args->v, args->v_page, args->v_head, args->v_token, *args, shape);
    if (error == cudaSuccess) error = allow_shared_memory();
    if (error != cudaSuccess) return error;
    return launch(small_lines_kernel, args->n_workers, BLOCK_THREADS, SHARED_BYTES, stream, *args, k_map, v_map, shape);
}

extern "C" int quire_attention_merge(const QuireAttnArgs* args, void* stream) {
    using namespace quire;
    if (!fits(*args) || args->n_merges < 0) return cudaErrorInvalidValue;
    if (args->n_merges == 0) return cudaSuccess;
    if (args->n_merges <= FEW_MERGES * args->n_workers)
        return launch(merge_kernel, args->n_merges, MERGE_THREADS, 0, stream, *args);
    return launch(merge_cells_kernel, CELL_BLOCKS * args->n_workers, CELL_THREADS, 0, stream, *args);
}
