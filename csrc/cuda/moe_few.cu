// A mixture of experts for few tokens, both products in one launch: for each pair p of a token t and an expert e that it
// chose, h[p] = silu(gate_e x[t]) * up_e x[t], or as QuireMoeFewArgs says, and y[p] = down_e h[p]. up [experts, 2 inner, hidden] (gate rows first),
// down [experts, hidden, inner], as nn.Linear stores each.
//
// Reading the weights of each chosen expert once at the speed of memory is all that counts. Every block sorts the pairs
// by expert for itself, the same way, so nothing waits for another launch. An item is 8 rows of gate and their 8 of up,
// or 32 of down (in codes two or four times as many), of one expert for up to TOKENS of its pairs; blocks take equal
// runs of items, first of the one product, then of the other. One warp keeps a ring of shared memory filled with weights (TMA), without a pause between the
// products: there the others wait for h of all blocks, which count themselves in global memory. They multiply, each a
// part of the columns of a stage (mma.m16n8k16, rows of weights are the 16), then add their sums in the order of the
// warps: results depend on no timing. x, or h, of the pairs of a tile stays in shared memory.
//
// What every token goes through beside its experts may be read as n_shared more of them: of each a part of the inner vector.
//
// QUIRE_LONE: there is one token, and y is the sum over its pairs: the second product's items are 16 rows of each chosen
// expert, and h is weighted, or its scales are.
//
// All blocks must run at the same time, one on each multiprocessor: two such launches at once may wait for each other.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (8, 16; 24 where w is floating), QUIRE_UP_CHUNKS, QUIRE_DOWN_CHUNKS (of 128 bytes of
// a row of w, in a stage), QUIRE_UP_BLOCKS, QUIRE_DOWN_BLOCKS (of 16 rows of w, in an item), QUIRE_LONE, QUIRE_SHARED
// (n_shared > 0), and those of moe/codes.h, where w is in codes; e4m3 multiplies rows in e4m3 (moe/rounding.h).
#include "moe/few_codes.h"
#include "moe/few_maps.h"
#include "moe/gating.h"
#include "moe/rounding.h"
#include "shared_memory.h"

namespace quire {

// How often blocks have finished the first product: n_blocks times in a launch, so never reset.
__device__ unsigned long long n_finished;

struct FewBlock : FewCodes {
    using FewCodes::FewCodes;

    __device__ void init() const {
        for (int i = 0; i < a.n_stages; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), WARPS);
        }
#if QUIRE_CODES
        init_scales();
#endif
        barrier_init_fence();
    }

    // ---- the warp that loads ----

    template <class K> __device__ void load(const CUtensorMap* maps, int slot, int expert, int row, int unit) const {
        const CUtensorMap* map = maps;
        barrier_expect(full(slot), K::BYTES);
#if QUIRE_CODES
        for (int i = 0; i < K::CHUNKS; i++) {
            const uint32_t to = stage(slot) + i * K::CHUNK_BYTES;
            const int column = (unit * K::CHUNKS + i) * 128;  // in bytes
            if (K::IS_UP) {
                load_box(to, map, full(slot), L2_EVICT_FIRST, column, row, 2 * expert);
            } else {
                load_box(to, map, full(slot), L2_EVICT_FIRST, column, expert * a.hidden + row);
            }
        }
#else
        const int shared = expert - (a.n_experts - a.n_shared);
        if (QUIRE_SHARED && shared >= 0) {
            map = maps + 1;
            if (K::IS_UP) {
                load_box(stage(slot), map, full(slot), L2_EVICT_FIRST, 0, shared * a.inner + row, 0, unit * K::CHUNKS);
            } else {
                load_box(stage(slot), map, full(slot), L2_EVICT_FIRST, 0, row, unit * K::CHUNKS, shared);
            }
        } else if (K::IS_UP) {
            load_box(stage(slot), map, full(slot), L2_EVICT_FIRST, 0, row, 2 * expert, unit * K::CHUNKS);
        } else {
            load_box(stage(slot), map, full(slot), L2_EVICT_FIRST, 0, expert * a.hidden + row, unit * K::CHUNKS);
        }
#endif
    }
#if QUIRE_SHARED
    // The first stages, as far as they are of what all tokens have: before it is known what else there is.
    __device__ int feed_ahead(const CUtensorMap* maps) const {
        Place place = run_of_shared<Up>().place;
        const int n = n_units<Up>(), n_loaded = min(a.n_stages, run_of_shared<Up>().n_shared * n);
#pragma unroll 1
        for (int i = 0, unit = 0; i < n_loaded; i++) {
            load<Up>(maps, i, a.n_experts - a.n_shared + place.tile, place.row_tile * Up::OUT_ROWS, unit);
            if (++unit == n) unit = 0, place.advance();
        }
        return n_loaded;
    }
#endif
    // n_loaded: stages that were filled ahead.
    template <class K>
    __device__ void feed(const CUtensorMap* maps, Ring& ring, Ring& scales_ring, int n_loaded = 0) const {
        Run run = this->template run<K>();
        const int n = n_units<K>();
        for (int turn = 0; turn < run.n; turn++, run.place.advance()) {
            run.begin(turn);
            const int row = run.place.row_tile * K::OUT_ROWS, expert = tiles()[run.place.tile].expert;
#if QUIRE_CODES
            copy_scales<K>(run.place.tile, row, scales_ring);
            if (threadIdx.x != WORKERS) continue;
#endif
            for (int unit = 0; unit < n; unit++) {
                if (ring.turn > 0) barrier_wait(empty(ring.stage), (ring.turn - 1) & 1);
                if (!QUIRE_SHARED || n_loaded-- <= 0) load<K>(maps, ring.stage, expert, row, unit);
                ring.advance(a.n_stages);
            }
        }
    }
    // QUIRE_LONE, second product: warps take units in turn, and each has stages of its own, where nobody waits for
    // another: of every WARPS stages one. They follow the filling of all stages that came before: `ring`.
    __device__ int n_part_stages() const { return a.n_stages / WARPS * WARPS; }
    __device__ static int fillings_before(const Ring& ring, const Ring& parts) {
        return ring.turn + (parts.stage < ring.stage) + parts.turn;
    }
    __device__ void feed_parts(const CUtensorMap* maps, const Ring& ring, Ring& scales_ring) const {
        Run run = this->template run<Down>();
        const int n = n_units<Down>();
        Ring parts;
        for (int turn = 0; turn < run.n; turn++, run.place.advance()) {
            run.begin(turn);
            const int item = run.place.row_tile;
#if QUIRE_CODES
            copy_scales<Down>(0, item * Down::OUT_ROWS, scales_ring);
            if (threadIdx.x != WORKERS) continue;
#endif
            for (int part = 0; part < n_tiles(); part++) {
                for (int unit = 0; unit < n; unit++, parts.advance(n_part_stages())) {
                    const int fillings = fillings_before(ring, parts);
                    if (fillings > 0) barrier_wait(empty(parts.stage), (fillings - 1) & 1);
                    load<Down>(maps, parts.stage, tiles()[part].expert, item * Down::OUT_ROWS, unit);
                }
            }
        }
    }

    // ---- the warps that multiply ----

    template <class K> __device__ void stage_rows(const Tile& tile) const {
        const int n_cells = columns<K>() / 8, n_rows = K::IN_PARTS ? n_tiles() : tile.n;
        const int row_bytes = K::IN_PARTS ? a.inner * 2 : Layout::row_bytes(columns<K>());
        const int warp = threadIdx.x / 32;
        const int warps_a_row = n_rows > 4 ? 1 : n_rows > 2 ? 2 : n_rows > 1 ? 4 : 8;
        for (int i = warp / warps_a_row; i < n_rows; i += WARPS / warps_a_row) {
            const int64_t pair = pairs()[tile.first + i];
            const Element* from = K::IS_UP ? static_cast<const Element*>(a.x) + pair / a.n_chosen * a.x_row
                                             : static_cast<const Element*>(a.h) + pair * a.inner;
#if QUIRE_CODES == 1
            keep_rounded<IN_BLOCKS>(base + at.x + i * row_bytes, x_scales_of<K>(i), X_SCALES_STEP<K>,
                                    K::IN_PARTS ? __ldcg(a.weights + pair) : 1.0f, from, n_cells, warp % warps_a_row,
                                    warps_a_row);
#else
#pragma unroll 4
            for (int c = warp % warps_a_row * 32 + threadIdx.x % 32; c < n_cells; c += warps_a_row * 32)
                copy_16_bytes(base + at.x + i * row_bytes + c * 16, from + c * 8, true);
#endif
        }
        copies_wait();
        named_sync(WORKERS_BARRIER, WORKERS);
    }

#if !QUIRE_CODES
    // Where the lane's row of the fragments of x starts: of pairs 0 .. 15 (lanes 16 .. have the last eight), and 16 .. 23.
    static constexpr int SIXTEENS = (EIGHTS + 1) / 2;
    template <class K> __device__ void find_x(uint32_t (&at_row)[SIXTEENS], const Tile& tile) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int v = 0; v < SIXTEENS; v++) {
            const int row = v * 16 + (2 * v + 1 < EIGHTS ? lane / 16 * 8 : 0) + lane % 8;
            at_row[v] = base + at.x + min(row, tile.n - 1) * Layout::row_bytes(columns<K>()) + lane / 8 % 2 * 16;
        }
    }
    template <class K>
    __device__ void multiply(float (&d)[K::QUADS][4], uint32_t w, const uint32_t (&x_at)[SIXTEENS], int unit) const {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * K::STEPS;
        const int row = lane % 16, cell = lane / 16, k = columns<K>();
#pragma unroll
        for (int i = 0; i < K::STEPS; i++) {
            const int step = first + i, chunk = step / 4, column = unit * K::COLUMNS + chunk * WIDTH + step % 4 * 16;
            if (column >= k) break;
            uint32_t left[4], right[SIXTEENS][4];
#pragma unroll
            for (int v = 0; v < SIXTEENS; v++) {
                if (2 * v + 1 < EIGHTS) {
                    load_matrices(right[v], x_at[v] + column * 2);
                } else {
                    load_two_matrices(right[v][0], right[v][1], x_at[v] + column * 2);
                }
            }
#pragma unroll
            for (int b = 0; b < K::BLOCKS; b++) {
                load_matrices(left, w + chunk * K::CHUNK_BYTES + b * 2048 + row * 128 +
                                        (((step % 4 * 2 + cell) ^ (row & 7)) << 4));
#pragma unroll
                for (int v = 0; v < EIGHTS; v++)
                    multiply_add(d[b * EIGHTS + v], left, right[v / 2][v % 2 * 2], right[v / 2][v % 2 * 2 + 1]);
            }
        }
    }

    // A whole stage of one part by one warp.
    __device__ void multiply_part(float (&d)[2][4], uint32_t w, uint32_t x_at, int unit, int part) const {
        const int lane = threadIdx.x % 32, row = lane % 16, cell = lane / 16;
        const int n = min(Down::CHUNKS, a.inner / WIDTH - unit * Down::CHUNKS);
        const uint32_t from = x_at + (part * a.inner + unit * Down::COLUMNS) * 2;
#pragma unroll 2
        for (int chunk = 0; chunk < n; chunk++) {
#pragma unroll
            for (int step = 0; step < 4; step++) {
                uint32_t left[4], right[2];
                load_two_matrices(right[0], right[1], from + chunk * 128 + step * 32);
                load_matrices(left, w + chunk * 2048 + row * 128 + (((step * 2 + cell) ^ (row & 7)) << 4));
                multiply_add(d[step % 2], left, right[0], right[1]);
            }
        }
    }
#endif

    __device__ float weight_of(const Tile& tile, int i) const {
        if (!QUIRE_LONE) return 1.0f;
        const int pair = pairs()[tile.first + min(i, tile.n - 1)];
        return !QUIRE_SHARED || pair < a.n_chosen - a.n_shared ? __ldcg(a.weights + pair) : 1.0f;
    }
    __device__ float weight_of_h(const Tile& tile, int i) const {  // of e4m3 it is a part of the scales
        return QUIRE_CODES == 1 ? 1.0f : weight_of(tile, i);
    }
    template <class K> __device__ void store_pairs(float4 sum, const Tile& tile, int eight, int row) const {
        const int lane = threadIdx.x % 32, i = eight * 8 + lane / 4;  // once transposed
        Element* to = static_cast<Element*>(K::IS_UP ? a.h : a.y);
        const void* biases = K::IS_UP ? a.up_bias : a.down_bias;
        const int n_rows = K::IS_UP ? 2 * a.inner : a.hidden, own = row + lane / 4;
        const float bias = bias_of(biases, n_rows, tile.expert, own);
        const float below = bias_of(biases, n_rows, tile.expert, own + (K::IS_UP ? a.inner : 8));
        sum.x += bias, sum.y += bias, sum.z += below, sum.w += below;
        uint32_t upper = pack(sum.x, sum.y), lower = 0;
        if (K::IS_UP) {
            const int token = eight * 8 + lane % 4 * 2;
            const float one = Gating{a.slope, a.offset, a.limit}(sum.x, sum.z) * weight_of_h(tile, token);
            upper = pack(one, Gating{a.slope, a.offset, a.limit}(sum.y, sum.w) * weight_of_h(tile, token + 1));
        } else {
            lower = transpose_matrix(pack(sum.z, sum.w));
        }
        upper = transpose_matrix(upper);
        if (i >= tile.n) return;
        to += int64_t(pairs()[tile.first + i]) * rows<K>() + row + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(to) = upper;
        if (!K::IS_UP) *reinterpret_cast<uint32_t*>(to + 8) = lower;
    }
    __device__ void store_lone(float4 sum, int row) const {
        const int lane = threadIdx.x % 32;
        if (lane % 4) return;
        const Element* residual = static_cast<const Element*>(a.residual);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int to = row + lane / 4 + i * 8;
            float added = residual == nullptr ? 0.0f : widen(residual[to]);
            for (int part = 0; a.down_bias != nullptr && part < n_tiles(); part++)  // as h is weighted
                added += weight_of(tiles()[part], 0) * bias_of(a.down_bias, a.hidden, tiles()[part].expert, to);
            static_cast<Element*>(a.y)[to] = Element((i ? sum.z : sum.x) + added);
        }
    }
    template <class K> __device__ void finish(const float (&d)[K::QUADS][4], const Tile& tile, int row, int turn) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const uint32_t sums = base + at.sums + (turn & 1) * SUMS_BYTES + lane * 16;
#pragma unroll
        for (int v = 0; v < K::QUADS; v++) {
            const uint4 bits = make_uint4(__float_as_uint(d[v][0]), __float_as_uint(d[v][1]), __float_as_uint(d[v][2]),
                                          __float_as_uint(d[v][3]));
            write16(sums + (warp * K::QUADS + v) * 512, bits);
        }
        named_sync(WORKERS_BARRIER, WORKERS);
        const int quad = (warp + turn * K::ALL_QUADS) % WARPS;  // finished by this warp
        const int source = K::ROW_GROUPS > 1 ? quad / K::QUADS * (K::COLUMN_WARPS - 1) * K::QUADS + quad : quad;
        if (quad >= K::ALL_QUADS || quad % EIGHTS * 8 >= tile.n) return;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int from = 0; from < K::COLUMN_WARPS; from++) {
            const uint4 q = read16(sums + (from * K::QUADS + source) * 512);
            sum.x += __uint_as_float(q.x), sum.y += __uint_as_float(q.y);
            sum.z += __uint_as_float(q.z), sum.w += __uint_as_float(q.w);
        }
        if (K::IN_PARTS) {
            store_lone(sum, row);
        } else {
            store_pairs<K>(sum, tile, quad % EIGHTS, row + quad / EIGHTS * (QUIRE_CODES ? K::BLOCK_ROWS : 16));
        }
    }

    template <class K> __device__ void work(Ring& ring, Ring& scales_ring) const {
        Run run = this->template run<K>();
        const int lane = threadIdx.x % 32, n = n_units<K>();
        int before = -1;
#if QUIRE_CODES
        uint32_t x_at[EIGHTS];
#else
        uint32_t x_at[SIXTEENS];
#endif
        Tile tile;
        for (int turn = 0; turn < run.n; turn++, run.place.advance()) {
            run.begin(turn);
            if (run.place.tile != before) {
                if (before >= 0) named_sync(WORKERS_BARRIER, WORKERS);  // everybody has read x
                before = run.place.tile;
                tile = tiles()[run.place.tile];
                stage_rows<K>(tile);
#if QUIRE_CODES
                find_x(x_at, tile, Layout::row_bytes(columns<K>()));
#else
                find_x<K>(x_at, tile);
#endif
            }
            float d[K::QUADS][4] = {};
#if QUIRE_CODES
            wait_for_scales(scales_ring);
#endif
            for (int unit = 0; unit < n; unit++) {
                barrier_wait(full(ring.stage), ring.turn & 1);
#if QUIRE_CODES
                multiply<K>(d, stage(ring.stage), x_at, unit, scales_of(scales_ring));
#else
                multiply<K>(d, stage(ring.stage), x_at, unit);
#endif
                __syncwarp();
                if (lane == 0) barrier_arrive(empty(ring.stage));
                ring.advance(a.n_stages);
            }
#if QUIRE_CODES
            leave_scales(scales_ring);
#endif
            finish<K>(d, tile, run.place.row_tile * K::OUT_ROWS, turn);
        }
    }

#if QUIRE_LONE
    __device__ void work_parts(const Ring& ring, Ring& scales_ring) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = n_units<Down>();
        Run run = this->template run<Down>();
        const Tile tile{0, 0, 1};
        if (run.n == 0) return;
        stage_rows<Down>(tile);
#if QUIRE_CODES
        uint32_t x_at[EIGHTS];
        find_x(x_at, tile, 0);
#else
        const uint32_t x_at = base + at.x + lane / 8 % 2 * 16;
#endif
        Ring parts{warp, 0};
        int part = 0, unit = warp;  // a warp's next, counted on from item to item
        for (int turn = 0; turn < run.n; turn++, part -= n_tiles(), run.place.advance()) {
            run.begin(turn);
            float d[2][4] = {};
#if QUIRE_CODES
            wait_for_scales(scales_ring);
#endif
            for (;; unit += WARPS, parts.advance(n_part_stages(), WARPS)) {
                for (; unit >= n; unit -= n) part++;
                if (part >= n_tiles()) break;
                barrier_wait(full(parts.stage), fillings_before(ring, parts) & 1);
#if QUIRE_CODES
                multiply_part(d, stage(parts.stage), x_at[0], unit, part, scales_of(scales_ring));
#else
                multiply_part(d, stage(parts.stage), x_at, unit, part);
#endif
                __syncwarp();
                if (lane < WARPS) barrier_arrive(empty(parts.stage));
            }
            const float sums[1][4] = {{d[0][0] + d[1][0], d[0][1] + d[1][1], d[0][2] + d[1][2], d[0][3] + d[1][3]}};
#if QUIRE_CODES
            leave_scales(scales_ring);
#endif
            finish<Down>(sums, tile, run.place.row_tile * Down::OUT_ROWS, turn);
        }
    }
#endif

    __device__ void wait_for_all_blocks() const {
        named_sync(WORKERS_BARRIER, WORKERS);
        if (threadIdx.x == 0) {
            __threadfence();
            const unsigned long long before = atomicAdd(&n_finished, 1ull), end = (before / a.n_blocks + 1) * a.n_blocks;
            const long long start = clock64();
            while (load_acquire(&n_finished) < end) {
                if (clock64() - start > 4000000000ll) __trap();
            }
        }
        named_sync(WORKERS_BARRIER, WORKERS);
    }
};

__global__ void __launch_bounds__(THREADS, 1) moe_few(const __grid_constant__ Maps maps,
                                                      const __grid_constant__ QuireMoeFewArgs args) {
    extern __shared__ __align__(1024) char shared[];
    const FewBlock block(args, shared);
    const bool loads = threadIdx.x >= WORKERS;
    int n_loaded = 0;
    if (threadIdx.x == WORKERS) {
        for (int i = 0; i < 1 + QUIRE_SHARED; i++) prefetch_map(maps.up + i), prefetch_map(maps.down + i);
        block.init();
#if QUIRE_SHARED
        n_loaded = block.feed_ahead(maps.up);
#endif
    }
    wait_for_previous_grid();
    let_next_grid_start();  // which may read the expert ids at once
    if (!QUIRE_LONE && !block.is_short()) {
        block.sort();
    } else if (loads) {
        block.list_short();
        named_arrive(LIST_BARRIER, THREADS);
    } else {
        named_sync(LIST_BARRIER, THREADS);
    }
    Ring ring, scales_ring;  // of items
    if (!loads) {
        block.work<Up>(ring, scales_ring);
        block.wait_for_all_blocks();
#if QUIRE_LONE
        block.work_parts(ring, scales_ring);
#else
        block.work<Down>(ring, scales_ring);
#endif
    } else if (QUIRE_CODES || threadIdx.x == WORKERS) {
        block.feed<Up>(maps.up, ring, scales_ring, n_loaded);
#if QUIRE_LONE
        block.feed_parts(maps.down, ring, scales_ring);
#else
        block.feed<Down>(maps.down, ring, scales_ring);
#endif
    }
}

int launch(const QuireMoeFewArgs& a, cudaStream_t stream) {
    Maps maps = {};
    cudaError_t error = encode_up(maps.up, a);
    if (error == cudaSuccess) error = encode_down(maps.down, a);
    if (QUIRE_SHARED != (a.n_shared > 0)) return cudaErrorInvalidValue;
#if QUIRE_SHARED
    if (error == cudaSuccess) error = encode_shared(maps.up + 1, maps.down + 1, a);
#endif
    if (error != cudaSuccess) return error;
    const int n_bytes = Layout(a).end;
    error = allow_shared_memory<moe_few>(n_bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.n_blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = n_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, moe_few, maps, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_moe_few(const QuireMoeFewArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
