// One block of moe_few.cu: sizes, what its shared memory holds, and the tiles of pairs that all blocks find the same.
#pragma once
#include "moe/codes.h"

struct QuireMoeFewArgs {  // _FewArgs in quire/kernels/moe/hopper.py
    const void* x;
    const void* up;
    const void* down;
    const void* up_scales;  // QUIRE_CODES: see CodedMatrices in quire/kernels/moe/coded.py
    const void* down_scales;
    const void* up_bias;    // [n_experts, 2 inner]; null: 0
    const void* down_bias;  // [n_experts, hidden]; null: 0
    const int32_t* expert_ids;  // of the pairs; others than 0 .. n_experts are left out
    const float* weights;       // of the pairs; QUIRE_LONE only
    const void* residual;       // QUIRE_LONE: added to the sum; null: 0
    void* h;                    // [n_pairs, inner]
    void* y;                    // [n_pairs, hidden]; QUIRE_LONE: [hidden]
    const void* shared_up;      // n_shared: [2 n_shared inner, hidden], all gate rows first
    const void* shared_down;    // n_shared: [hidden, n_shared inner]
    int64_t x_row;              // elements
    float slope, offset, limit;  // h = (u + offset) g sigmoid(slope g); limit > 0: g, u are cut to it before
    int32_t n_pairs, n_chosen, n_experts, hidden, inner, n_stages, n_blocks;
    int32_t n_scales;  // QUIRE_CODES: items whose scales there is room for
    int32_t n_shared;  // last experts, and last pairs of each token: weight 1, not in expert_ids nor weights, up nor down
};

namespace quire {

constexpr int WIDTH = QUIRE_CODES >= 3 ? 256 : QUIRE_CODES ? 128 : 64;  // columns of w in 128 bytes
constexpr int TOKENS = QUIRE_TOKENS, EIGHTS = TOKENS / 8;
constexpr int WARPS = 8, WORKERS = WARPS * 32, THREADS = WORKERS + 32;
constexpr int MAX_PAIRS = 4096, RUNS = MAX_PAIRS / WORKERS;  // pairs that are sorted, and most that a thread has of them

template <bool FIRST> struct Kind {  // of the two products
    static constexpr bool IS_UP = FIRST, IN_PARTS = QUIRE_LONE && !IS_UP;  // parts: the experts that are summed
    static constexpr int CHUNKS = IS_UP ? QUIRE_UP_CHUNKS : QUIRE_DOWN_CHUNKS;  // of 128 bytes, in a stage
    static constexpr int COLUMNS = CHUNKS * WIDTH;                              // of a stage
    static constexpr int BLOCKS = IS_UP ? QUIRE_UP_BLOCKS : QUIRE_DOWN_BLOCKS;  // of 16 rows of w, in an item
    static constexpr int COLUMN_WARPS = QUIRE_CODES && COLUMNS < WARPS * 64 ? COLUMNS / 64 : WARPS;  // that share columns;
    static constexpr int PASSES = QUIRE_CODES && !IN_PARTS ? COLUMNS / 64 / COLUMN_WARPS : 1;  // of 64 columns of a warp
    static constexpr int ROW_GROUPS = WARPS / COLUMN_WARPS, OWN_BLOCKS = BLOCKS / ROW_GROUPS;  // others have other rows
    static constexpr int CHUNK_BYTES = BLOCKS * 16 * 128, BYTES = CHUNKS * CHUNK_BYTES;
    static constexpr int STEPS = CHUNKS * 4 / WARPS;  // of 16 columns, of a warp in a stage
    static constexpr int BLOCK_ROWS = IS_UP ? 8 : 16, OUT_ROWS = BLOCKS * BLOCK_ROWS;
    static constexpr int QUADS = OWN_BLOCKS * EIGHTS, ALL_QUADS = BLOCKS * EIGHTS;  // sums of a thread come in fours
    static_assert(ROW_GROUPS * COLUMN_WARPS == WARPS && OWN_BLOCKS * ROW_GROUPS == BLOCKS);
    static_assert(QUIRE_CODES || CHUNKS * 4 % WARPS == 0);
};
using Up = Kind<true>;
using Down = Kind<false>;

constexpr int STAGE_BYTES = Up::BYTES > Down::BYTES ? Up::BYTES : Down::BYTES;
constexpr int SUMS_BYTES = WARPS * (Down::QUADS > Up::QUADS ? Down::QUADS : Up::QUADS) * 32 * 16;  // two in turn
constexpr int MAX_STAGES = 32, MAX_SCALES = 4, WORKERS_BARRIER = 1, LIST_BARRIER = 2;

#if QUIRE_CODES
// Scales of consecutive rows of one matrix, as they are copied: they lie side by side, from a multiple of 16 bytes on.
constexpr bool IN_BLOCKS = QUIRE_CODES <= 2 && QUIRE_GROUP;
__host__ __device__ inline int scales_row_bytes(int columns) {  // in memory; in blocks: of all rows of a block
    constexpr int WIDE = QUIRE_GROUP ? QUIRE_GROUP : 1;
    return (QUIRE_GROUP ? (columns + WIDE - 1) / WIDE : 1) * (!IN_WORDS ? 4 : IS_FP4 ? 1 : 2 * (1 + QUIRE_ZEROS));
}
__host__ __device__ inline int scales_step(int columns) {  // from row to row in shared memory: in different banks
    const int n_bytes = scales_row_bytes(columns);
    return IN_BLOCKS ? 0 : n_bytes % 16 ? n_bytes : n_bytes + 16;
}
__host__ __device__ inline int scales_part_bytes(int n_rows, int columns) {
    return IN_BLOCKS ? (scales_row_bytes(columns) + 15) / 16 * 16 : n_rows * scales_step(columns);
}
#endif

struct Tile {  // of pairs of one expert: those of slots first .. first + n
    int expert, first, n;
};

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
#if QUIRE_CODES
    uint64_t scales_full[MAX_SCALES], scales_empty[MAX_SCALES];
#endif
};

// Where things lie in shared memory. Bytes from a base that is a multiple of 1,024.
struct Layout {
    int x, sums, x_scales, scales, scales_bytes, barriers, starts, counts, tiles, pairs, end;
    static __host__ __device__ int row_bytes(int columns) { return columns * 2 + 16; }  // rows in different banks
    template <class K> static __host__ __device__ int part_bytes(int columns) {
#if QUIRE_CODES
        return scales_part_bytes(K::OUT_ROWS, columns);
#else
        return 0;
#endif
    }
    // e4m3: scales of the rows of x or h, of each group of columns; see FewCodes.
    static __host__ __device__ int n_groups(int columns) { return QUIRE_GROUP ? (columns + 127) / 128 : 1; }
    static __host__ __device__ int x_scales_bytes(const QuireMoeFewArgs& a) {
        const int of_x = n_groups(a.hidden) * TOKENS, of_h = n_groups(a.inner) * (QUIRE_LONE ? a.n_pairs : TOKENS);
        return QUIRE_CODES == 1 ? ((of_x > of_h ? of_x : of_h) * 4 + 15) / 16 * 16 : 0;
    }
    __host__ __device__ explicit Layout(const QuireMoeFewArgs& a) {
        const int x_row = row_bytes(a.hidden), h_row = row_bytes(QUIRE_LONE ? a.n_pairs * a.inner : a.inner);
        const int most = a.n_experts + a.n_pairs / TOKENS;
        const int n_tiles = QUIRE_LONE || a.n_pairs < most ? a.n_pairs : most;
        x = a.n_stages * STAGE_BYTES;
        sums = x + (QUIRE_LONE ? 1 : TOKENS) * (x_row > h_row ? x_row : h_row);
        x_scales = sums + 2 * SUMS_BYTES;
        scales = x_scales + x_scales_bytes(a);
        const int up_scales = 2 * part_bytes<Up>(a.hidden), down_scales = part_bytes<Down>(a.inner) * (QUIRE_LONE ? a.n_pairs : 1);
        scales_bytes = up_scales > down_scales ? up_scales : down_scales;  // of an item
        barriers = scales + a.n_scales * scales_bytes;
        starts = barriers + int(sizeof(Barriers));
        counts = starts + (a.n_experts + 1) * 4;
        tiles = counts + (QUIRE_LONE ? 0 : WARPS * a.n_experts * 4);
        pairs = tiles + n_tiles * int(sizeof(Tile));
        end = pairs + a.n_pairs * 4;
    }
};

struct Ring {  // where a warp stands in it
    int stage = 0, turn = 0;
    __device__ void advance(int n_stages, int by = 1) {  // n_stages: a multiple of `by`
        stage += by;
        if (stage >= n_stages) stage -= n_stages, turn++;
    }
};
struct Place {  // of an item: of which tile of pairs, and which rows. It counts: a division takes the loading thread long
    int n_row_tiles, tile, row_tile;
    __device__ Place(int item, int n) : n_row_tiles(n), tile(item / n), row_tile(item % n) {}
    __device__ void advance() {
        if (++row_tile == n_row_tiles) row_tile = 0, tile++;
    }
};

struct FewLists {
    const QuireMoeFewArgs& a;
    const Layout at;
    char* memory;
    uint32_t base;

    __device__ FewLists(const QuireMoeFewArgs& args, char* shared)
        : a(args), at(args), memory(shared), base(shared_address(shared)) {}
    __device__ int* starts() const { return reinterpret_cast<int*>(memory + at.starts); }
    __device__ int* counts(int warp) const { return reinterpret_cast<int*>(memory + at.counts) + warp * a.n_experts; }
    __device__ int& n_tiles() const { return starts()[a.n_experts]; }
    __device__ Tile* tiles() const { return reinterpret_cast<Tile*>(memory + at.tiles); }
    __device__ int* pairs() const { return reinterpret_cast<int*>(memory + at.pairs); }
    __device__ uint32_t full(int stage) const { return base + at.barriers + stage * 8; }
    __device__ uint32_t empty(int stage) const { return base + at.barriers + (MAX_STAGES + stage) * 8; }
    __device__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }

    template <class K> __device__ int columns() const { return K::IS_UP ? a.hidden : a.inner; }
    template <class K> __device__ int rows() const { return K::IS_UP ? a.inner : a.hidden; }
    template <class K> __device__ int n_units() const { return (columns<K>() + K::COLUMNS - 1) / K::COLUMNS; }
    template <class K> __device__ int n_row_tiles() const { return rows<K>() / K::OUT_ROWS; }
    // A block's items, in turn. What all tokens have are the first tiles, one each: its share of theirs, which are known
    // before any routing, then its share of the others.
    struct Run {
        Place place;  // of the next item
        int n;        // items
#if QUIRE_SHARED
        int n_shared;
        Place others;  // of the first other item
        __device__ void begin(int turn) {
            if (turn == n_shared) place = others;
        }
#else
        __device__ void begin(int turn) {}
#endif
    };
    __device__ int share(unsigned n, int block) const { return n * block / unsigned(a.n_blocks); }
    template <class K> __device__ int n_items() const { return (K::IN_PARTS ? 1 : n_tiles()) * n_row_tiles<K>(); }
#if QUIRE_SHARED
    template <class K> __device__ int n_shared_items() const { return K::IN_PARTS ? 0 : a.n_shared * n_row_tiles<K>(); }
    template <class K> __device__ Run run_of_shared() const {
        const int n = n_shared_items<K>(), first = share(n, blockIdx.x), own = share(n, blockIdx.x + 1) - first;
        return {Place(first, n_row_tiles<K>()), own, own, Place(0, 1)};
    }
    template <class K> __device__ Run run() const {
        const int n_shared = n_shared_items<K>(), n = n_items<K>();
        Run run = run_of_shared<K>();
        int first = share(n, blockIdx.x), end = share(n, blockIdx.x + 1);
        if (n - n_shared >= 2 * a.n_blocks) {  // both shares are even together
            const int before = share(n_shared, blockIdx.x);
            first += n_shared - before, end += n_shared - before - run.n_shared;
        } else {  // of so few others that might go backwards
            first = n_shared + share(n - n_shared, blockIdx.x), end = n_shared + share(n - n_shared, blockIdx.x + 1);
        }
        run.others = Place(first, n_row_tiles<K>()), run.n += end - first;
        return run;
    }
#else
    template <class K> __device__ Run run() const {
        const int first = share(n_items<K>(), blockIdx.x);
        return {Place(first, n_row_tiles<K>()), share(n_items<K>(), blockIdx.x + 1) - first};
    }
#endif

    // ---- which pairs belong together ----

    // Volatile: read where it stands, and from the L2 cache, which all grids share.
    __device__ int expert_of(int pair) const {
        if (pair >= a.n_pairs) return -1;
        if (QUIRE_SHARED) {
            const int token = pair / a.n_chosen, place = pair % a.n_chosen, n_routed = a.n_chosen - a.n_shared;
            if (place >= n_routed) return a.n_experts - a.n_chosen + place;
            pair = token * n_routed + place;
        }
        const int expert = static_cast<const volatile int32_t*>(a.expert_ids)[pair];
        return expert < a.n_experts - a.n_shared ? expert : -1;
    }
    // The pair of a lane, all of what all tokens have first.
    __device__ int short_pair(int lane) const {
        if (!QUIRE_SHARED) return lane;
        const int n = a.n_pairs / a.n_chosen, n_routed = a.n_chosen - a.n_shared, routed = lane - n * a.n_shared;
        return routed < 0 ? lane % n * a.n_chosen + n_routed + lane / n : routed / n_routed * a.n_chosen + routed % n_routed;
    }
    // One warp lists what fits it: at most 32 pairs, of so few tokens that an expert's are one tile.
    __device__ bool is_short() const { return a.n_pairs <= 32 && a.n_pairs / a.n_chosen <= TOKENS; }
    __device__ void list_short() const {
        const int lane = threadIdx.x % 32, pair = lane < a.n_pairs ? short_pair(lane) : lane, own = expert_of(pair);
        const unsigned same = __match_any_sync(~0u, own), before = (1u << lane) - 1;
        const bool is_first = own >= 0 && (same & before) == 0;
        const unsigned firsts = __ballot_sync(~0u, is_first);
        int slots = is_first ? __popc(same) : 0;
        for (int step = 1; step < 32; step *= 2) {
            const int more = __shfl_up_sync(~0u, slots, step);
            if (lane >= step) slots += more;
        }
        const int start = __shfl_sync(~0u, slots, __ffs(same) - 1) - __popc(same);
        if (is_first) tiles()[__popc(firsts & before)] = {own, start, __popc(same)};
        if (own >= 0) pairs()[start + __popc(same & before)] = pair;
        if (lane == 0) n_tiles() = __popc(firsts);
        __syncwarp();
    }
    // Each warp that multiplies takes a run of pairs, 32 at a time, asked for all at once: pairs of an expert keep their
    // order, so that all blocks have the same tiles. `place` false: counts them; true: counts are where the warp's next
    // pair of the expert goes.
    __device__ int run_of(int warp) const { return (a.n_pairs + 31) / 32 * warp / WARPS; }
    __device__ void read(int (&experts)[RUNS]) const {
        const int first = run_of(threadIdx.x / 32), end = run_of(threadIdx.x / 32 + 1);
#pragma unroll
        for (int i = 0; i < RUNS; i++) experts[i] = first + i < end ? expert_of((first + i) * 32 + threadIdx.x % 32) : -1;
    }
    __device__ void walk(const int (&experts)[RUNS], bool place) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = run_of(warp), n = run_of(warp + 1) - first;
#pragma unroll
        for (int i = 0; i < RUNS; i++) {
            if (i >= n) break;
            const unsigned same = __match_any_sync(~0u, experts[i]), before = same & ((1u << lane) - 1);
            const bool is_real = experts[i] >= 0;
            int* count = counts(warp) + (is_real ? experts[i] : 0);
            const int start = *count;
            if (place && is_real) pairs()[starts()[experts[i]] + start + __popc(before)] = (first + i) * 32 + lane;
            __syncwarp();
            if (is_real && before == 0) *count = start + __popc(same);
            __syncwarp();
        }
    }
    // The warp that loads goes on as soon as it has listed the tiles, while the others place pairs.
    __device__ void sort() const {
        const bool loads = threadIdx.x >= WORKERS;
        int experts[RUNS];
        if (!loads) read(experts);
        for (int i = threadIdx.x; i < WARPS * a.n_experts; i += THREADS) counts(0)[i] = 0;
        __syncthreads();
        if (!loads) walk(experts, false);
        __syncthreads();
        for (int expert = threadIdx.x; expert < a.n_experts; expert += THREADS) {
            int sum = 0;
#pragma unroll
            for (int from = 0; from < WARPS; from++) {
                const int own = counts(from)[expert];
                counts(from)[expert] = sum;
                sum += own;
            }
            starts()[expert] = sum;
        }
        __syncthreads();
        if (loads) {
            list_tiles();
            __syncwarp();
            named_arrive(LIST_BARRIER, THREADS);
        } else {
            named_sync(LIST_BARRIER, THREADS);
            walk(experts, true);
            named_sync(WORKERS_BARRIER, WORKERS);
        }
    }
    __device__ void list_tiles() const {  // by one warp: numbers of pairs become starts
        const int lane = threadIdx.x % 32;
        int n_slots = 0, n_listed = 0;
        for (int first = 0; first < a.n_experts; first += 32) {
            const bool is_real = first + lane < a.n_experts;
            const int expert = (first + lane + a.n_experts - a.n_shared) % a.n_experts, n = is_real ? starts()[expert] : 0;
            const int own = (n + TOKENS - 1) / TOKENS;
            int both = n << 16 | own;  // at most 4,096 pairs
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(~0u, both, step);
                if (lane >= step) both += more;
            }
            const int start = n_slots + (both >> 16) - n, place = n_listed + (both & 0xffff) - own;
            if (is_real) starts()[expert] = start;
            for (int i = 0; i < own; i++)
                tiles()[place + i] = {expert, start + i * TOKENS, min(TOKENS, n - i * TOKENS)};
            const int all = __shfl_sync(~0u, both, 31);
            n_slots += all >> 16, n_listed += all & 0xffff;
        }
        if (lane == 0) n_tiles() = n_listed;
    }
};

}  // namespace quire
