// Inner = A x of a step's adapters, by a warpgroup of the product that then adds B inner (wide_adapters.h), while w streams.
//
// Each block makes some columns of inner, 8 at a time, of up to 8 rows: no sum is cut among blocks. A is asked for in L2
// when the kernel begins, as memory has a long queue while w streams. A and x come through a ring of their own in shared
// memory, 256 columns at a time, A of the first before the previous grid has ended. A warp takes 32 columns in turn, by
// mma.m16n8k16 (ranks are half of its 16, rows its 8): a thread has 8 columns side by side, and which of the instruction's
// 16 they are is free, as long as they are the same of both. Sums are added in the order of the warps: a row's bits do not
// depend on the others. Rows of other adapters get zeros.
//
// Blocks count: whoever needs inner waits until all have theirs. They must be on the GPU together, and two launches of one
// build must not run at the same time.
#pragma once
#include "gemm.h"
#include "wide_memory.h"

namespace quire {

constexpr int SHRINK_COLUMNS = 256, SHRINK_SLOTS = 4, SHRINK_WARPS = 4, SHRINK_THREADS = 32 * SHRINK_WARPS;
constexpr int MAX_PLACES = 64, BLOCK_RANKS = 8, BLOCK_ROWS = 8, UNIT = 32, WARP_UNITS = SHRINK_COLUMNS / UNIT / SHRINK_WARPS;
constexpr int LINE_BYTES = SHRINK_COLUMNS * 2 + 64;  // neighbours lie in different banks
constexpr int SLOT_BYTES = (BLOCK_RANKS + BLOCK_ROWS) * LINE_BYTES;
constexpr int MAX_BLOCKS = 1024, SHRINK_BARRIER = 4;

// How often blocks have made their columns, for each size of a grid: as often as it has blocks in a launch, so never reset.
__device__ uint32_t n_shrunk[MAX_BLOCKS];

struct ShrinkShared {
    uint64_t full[SHRINK_SLOTS], listed, shrunk;  // listed: the step's adapters are below; shrunk: this block has counted its
    uint32_t end;                                 // columns, and all have at this number
    uint32_t begins[2];                           // of 32 tiles: where those of an adapter begin
    int n_places, places[MAX_PLACES], first[MAX_PLACES], count[MAX_PLACES];  // first, count: of rows in `order`
    int n_groups, group_index[MAX_PLACES + 8], group_row[MAX_PLACES + 8];    // of an adapter's rows: which, and the first
    int order[QUIRE_TOKENS], tile_places[QUIRE_TOKENS], tile_counts[QUIRE_TOKENS];
    float sums[SHRINK_WARPS][BLOCK_ROWS][BLOCK_RANKS];
    alignas(16) char slots[SHRINK_SLOTS][SLOT_BYTES];
};

// Columns of inner and the rows that a block makes at a time: n of order from `first` on, after `before` of the adapter's.
struct Columns {
    int part, rank, index, place, n_ranks, first, n, before;
    __device__ bool has_sums() const { return n_ranks > 0 && n > 0; }
};

template <class Args> struct Shrinker {
    const Args& args;
    ShrinkShared& shared;
    int n_items, n_steps, item_ahead, step_ahead = 0, n_asked = 0;  // ahead: what is to be asked for next
    Columns ahead = {};

    __device__ Shrinker(const Args& args, ShrinkShared& shared) : args(args), shared(shared) {}
    __device__ uint32_t full(int slot) const { return shared_address(&shared.full[slot]); }
    __device__ uint32_t line(int slot, int i) const { return shared_address(&shared.slots[slot][i * LINE_BYTES]); }
    __device__ static int thread() { return threadIdx.x % SHRINK_THREADS; }
    __device__ static int warp() { return thread() / 32; }
    __device__ static int lane() { return threadIdx.x & 31; }
    __device__ static void sync() { named_sync(SHRINK_BARRIER, SHRINK_THREADS); }

    // ---- the step's adapters: tiles of one stand together, and so do their rows ----

    // All that is read of the step is asked for at once.
    __device__ void list_places() {
        const auto& a = args.adapters;
        int place = -1, first = 0, count = 0;
        if (thread() < a.n_tiles) {
            place = load_here(a.tiles + 3 * thread()), first = load_here(a.tiles + 3 * thread() + 1);
            count = load_here(a.tiles + 3 * thread() + 2);
        }
        if (thread() < args.m) shared.order[thread()] = load_here(a.order + thread());
        if (count == 0) place = -1;
        if (thread() < QUIRE_TOKENS) shared.tile_places[thread()] = place, shared.tile_counts[thread()] = count;
        if (thread() < MAX_PLACES) shared.count[thread()] = 0;
        sync();
        const bool begins = place >= 0 && (thread() == 0 || shared.tile_places[thread() - 1] != place);
        const uint32_t found = __ballot_sync(0xffffffffu, begins);
        if (lane() == 0 && warp() < 2) shared.begins[warp()] = found;
        sync();
        if (begins) {
            const int i = __popc(found & ((1u << lane()) - 1)) + (warp() > 0 ? __popc(shared.begins[0]) : 0);
            for (int t = thread() + 1; t < QUIRE_TOKENS && shared.tile_places[t] == place; t++) count += shared.tile_counts[t];
            shared.places[i] = place, shared.first[i] = first, shared.count[i] = count;
        }
        shared.n_places = __popc(shared.begins[0]) + __popc(shared.begins[1]);
        shared.n_groups = 0;
        sync();
        if (thread() == 0) barrier_arrive(shared_address(&shared.listed));
    }
    __device__ int groups_of(int i) const { return max(1, (shared.count[i] + BLOCK_ROWS - 1) / BLOCK_ROWS); }
    // What a last chunk has too many is an adapter without rows.
    __device__ void list_groups() {
        const int n = (shared.n_places * QUIRE_RANK + CHUNK - 1) / CHUNK * (CHUNK / QUIRE_RANK), i = thread();
        if (i < n) {
            int at = 0;
            for (int before = 0; before < i; before++) at += groups_of(before);
            for (int row = 0; row < groups_of(i); row++)
                shared.group_index[at + row] = i, shared.group_row[at + row] = row * BLOCK_ROWS;
            if (i == n - 1) shared.n_groups = at + groups_of(i);
        }
        sync();
        n_items = args.adapters.n_parts * shared.n_groups * (QUIRE_RANK / BLOCK_RANKS);
        n_steps = (args.k + SHRINK_COLUMNS - 1) / SHRINK_COLUMNS, item_ahead = blockIdx.x;
    }
    __device__ Columns columns(int item) const {
        const auto& a = args.adapters;
        constexpr int BLOCKS = QUIRE_RANK / BLOCK_RANKS;
        const int group = item / BLOCKS % shared.n_groups;
        Columns c = {item / BLOCKS / shared.n_groups, item % BLOCKS * BLOCK_RANKS, shared.group_index[group], -1, 0, 0, 0, 0};
        if (c.index >= shared.n_places) return c;
        c.place = shared.places[c.index], c.before = shared.group_row[group];
        c.first = shared.first[c.index] + c.before, c.n = min(BLOCK_ROWS, shared.count[c.index] - c.before);
        c.n_ranks = max(0, min(BLOCK_RANKS, load_here(a.ranks + c.place * a.ranks_step + c.part) - c.rank));
        return c;
    }

    // ---- A and x into the ring ----

    __device__ int step_columns(int step) const { return min(SHRINK_COLUMNS, args.k - step * SHRINK_COLUMNS); }
    __device__ const Element* line_of_a(const Columns& c, int i) const {
        const auto& a = args.adapters;
        return static_cast<const Element*>(a.a) + c.place * a.a_place + int64_t(c.part * QUIRE_RANK + c.rank + i) * args.k;
    }
    __device__ bool more() {
        if (step_ahead > 0) return true;
        for (; item_ahead < n_items; item_ahead += gridDim.x) {
            ahead = columns(item_ahead);
            if (ahead.has_sums()) return true;
        }
        return false;
    }
    __device__ void advance() {
        n_asked++;
        if (++step_ahead == n_steps) step_ahead = 0, item_ahead += gridDim.x;
    }
    __device__ void copy_line(int slot, int i, const Element* from) const {  // of the next step
#pragma unroll
        for (int cell = lane(); cell < SHRINK_COLUMNS / 8; cell += 32) {
            if (cell * 8 >= step_columns(step_ahead)) break;
            copy_16_bytes(line(slot, i) + cell * 16, from + step_ahead * SHRINK_COLUMNS + cell * 8, true);
        }
    }
    __device__ void ask_for_a() const {
#pragma unroll
        for (int i = warp(); i < BLOCK_RANKS; i += SHRINK_WARPS) {
            if (i < ahead.n_ranks) copy_line(n_asked % SHRINK_SLOTS, i, line_of_a(ahead, i));
        }
    }
    __device__ void ask_for_x() const {
        const int slot = n_asked % SHRINK_SLOTS;
#pragma unroll
        for (int i = warp(); i < BLOCK_ROWS; i += SHRINK_WARPS) {
            const Element* x = static_cast<const Element*>(args.x);
            if (i < ahead.n) copy_line(slot, BLOCK_RANKS + i, x + shared.order[ahead.first + i] * args.x_row);
        }
        barrier_arrive_after_copies(full(slot));
    }
    __device__ void ask() {
        if (more()) ask_for_a(), ask_for_x(), advance();
    }
    __device__ void ask_first() {  // as many as the ring holds; x when it is there
        for (int item = blockIdx.x; item < n_items; item += gridDim.x) {
            const Columns c = columns(item);
            if (c.has_sums() && thread() < c.n_ranks) ask_in_l2(line_of_a(c, thread()), args.k * 2);
        }
        Shrinker again = *this;
        for (int i = 0; i < SHRINK_SLOTS && more(); i++) ask_for_a(), advance();
        wait_for_previous_grid();
        for (int i = 0; i < SHRINK_SLOTS && again.more(); i++) again.ask_for_x(), again.advance();
    }

    // ---- sums ----

    __device__ Element* result(const Columns& c, int row) const {
        const auto& a = args.adapters;
        return static_cast<Element*>(a.inner) + (int64_t(c.part) * args.m + row) * a.width + c.index * QUIRE_RANK + c.rank;
    }
    __device__ void clear(const Columns& c) const {  // for rows that have none of these, once
        if (c.before > 0) return;
        for (int row = thread(); row < args.m; row += SHRINK_THREADS) {
            bool has = false;
            for (int i = 0; c.has_sums() && i < shared.count[c.index]; i++) has |= shared.order[c.first + i] == row;
            if (!has) *reinterpret_cast<uint4*>(result(c, row)) = make_uint4(0, 0, 0, 0);
        }
    }
    __device__ void add(float (&d)[4], const Columns& c, int slot, int step) const {
        const int i = lane() / 4;
        const uint32_t at = lane() % 4 * 16 + warp() * (UNIT * 2);
#pragma unroll
        for (int u = 0; u < WARP_UNITS; u++) {
            if ((warp() + u * SHRINK_WARPS) * UNIT >= step_columns(step)) break;
            const uint32_t further = at + u * (SHRINK_WARPS * UNIT * 2);
            uint4 a = make_uint4(0, 0, 0, 0), x = a;
            if (i < c.n_ranks) a = read16(line(slot, i) + further);
            if (i < c.n) x = read16(line(slot, BLOCK_RANKS + i) + further);
            multiply_add(d, {a.x, 0, a.y, 0}, x.x, x.y);
            multiply_add(d, {a.z, 0, a.w, 0}, x.z, x.w);
        }
    }
    __device__ void make(const Columns& c, int& n_taken) {
        const int row = thread() / BLOCK_RANKS, rank = thread() % BLOCK_RANKS;
        float d[4] = {}, sum = 0.0f;
        for (int step = 0; step < n_steps; step++, n_taken++) {
            const int slot = n_taken % SHRINK_SLOTS;
            await(full(slot), n_taken / SHRINK_SLOTS & 1);
            add(d, c, slot, step);
            sync();  // all have read the slot
            ask();
        }
        shared.sums[warp()][lane() % 4 * 2][lane() / 4] = d[0], shared.sums[warp()][lane() % 4 * 2 + 1][lane() / 4] = d[1];
        sync();
#pragma unroll
        for (int w = 0; w < SHRINK_WARPS; w++) sum += row < c.n ? shared.sums[w][row][rank] : 0.0f;
        if (row < c.n) result(c, shared.order[c.first + row])[rank] = Element(sum);
        sync();
    }
    __device__ void run() {
        list_places();
        list_groups();
        ask_first();
        int n_taken = 0;
        for (int item = blockIdx.x; item < n_items; item += gridDim.x) {
            const Columns c = columns(item);
            clear(c);
            if (c.has_sums()) make(c, n_taken);
        }
        all_async_fence();
        __threadfence();
        sync();
        if (thread() > 0) return;
        const uint32_t before = atomicAdd(n_shrunk + gridDim.x, 1);
        shared.end = before - before % gridDim.x + gridDim.x;
        barrier_arrive(shared_address(&shared.shrunk));
    }
};

__device__ __forceinline__ void init_shrink(ShrinkShared& shared) {
    for (int i = 0; i < SHRINK_SLOTS; i++) barrier_init(shared_address(&shared.full[i]), SHRINK_THREADS);
    barrier_init(shared_address(&shared.listed), 1);
    barrier_init(shared_address(&shared.shrunk), 1);
}
// Until all blocks have their columns, by who then loads them.
__device__ __forceinline__ void await_inner(const ShrinkShared& shared) {
    await(shared_address(&shared.shrunk), 0);
    const long long start = clock64();
    while (int(load_acquire(n_shrunk + gridDim.x) - shared.end) < 0) {
        if (clock64() - start > 4000000000ll) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(0) : "memory");
    }
    all_async_fence();
}

}  // namespace quire
