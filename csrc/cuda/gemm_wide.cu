// Products of many rows with a large matrix: y = f(x w^T), x [m, K], w [N, K] as nn.Linear stores it.
//
// As in gemm.cu rows of w are the 64-row operand of wgmma and the tokens its columns, up to 256: so as many tokens as
// there are share one reading of w. A tile is 128 rows of w by TOKENS tokens; two warpgroups multiply its halves, one
// warp keeps a ring of shared memory filled (TMA), w before the previous grid has ended, as weights never change.
// QUIRE_SPLIT blocks share a tile, each with a slice of K: they hand their sums over through global memory (clusters of
// four do not fill an H200), added in the order of the slices, each block for a part of the tokens. So results do not
// depend on timing. Two launches of one build with a split must not run at the same time: they count in the same place.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (32, 64, 96, 128, 192, 256), QUIRE_ROWS (of w in a tile: 128; 192 with QUIRE_FP8 2,
// where tokens are the 64-row operand), QUIRE_SPLIT, QUIRE_RESIDUAL (results are added to y), QUIRE_SILU, QUIRE_BIAS,
// QUIRE_WIDE (results are stored as fp32), QUIRE_FP8 (gemm.h), QUIRE_NIBBLES = 2, QUIRE_ZEROS, QUIRE_CHUNK_GROUPS
// (1, 2, 4; gemm.h), QUIRE_RANK (adapters of that rank are added, gemm/wide_adapters.h), QUIRE_SENT_TO (results go to so many ranks, gemm/wide_sent.h).
#include "gemm/wide_scaled.h"
#include "gemm/wide_shape.h"
#include "shared_memory.h"

namespace quire {

struct Place {  // of a tile
    int row, token;  // first of y
};

struct WideBlock {
    const QuireWideArgs& a;
    uint32_t base;
    int slice, team, n_row_tiles, n_tiles, first_unit, n_units, n_all_units, n_passes, n_items;
    AdapterUnits adapters;

    __device__ WideBlock(const QuireWideArgs& args, char* shared)
        : a(args), base(shared_address(shared)), adapters(args, reinterpret_cast<int*>(shared + PLACES_AT)) {
        const int units = a.k / CHUNK;
        slice = blockIdx.x % SPLIT, team = blockIdx.x / SPLIT;
        n_row_tiles = (n_out() + TILE_ROWS - 1) / TILE_ROWS;
        n_tiles = n_row_tiles * n_token_tiles();
        first_unit = units * slice / SPLIT;
        n_units = units * (slice + 1) / SPLIT - first_unit;
        n_passes = (n_tiles - team + a.n_teams - 1) / a.n_teams;
        n_all_units = n_units + adapters.n_units();
        n_items = n_passes * n_all_units;
    }
    __device__ int n_out() const { return QUIRE_SILU ? a.n / 2 : a.n; }
    __device__ int n_token_tiles() const { return (a.m + TOKENS - 1) / TOKENS; }
    __device__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ uint32_t scales(int i) const { return base + SCALES_AT + i * SCALE_BYTES; }
    __device__ uint32_t full(int i) const { return base + BARRIERS_AT + i * 8; }
    __device__ uint32_t empty(int i) const { return base + BARRIERS_AT + (N_STAGES + i) * 8; }

    // Neighbours in time share rows of w; `n_together` tiles of tokens stay in L2 while all of w passes.
    __device__ Place place(int pass) const {
        const int tile = team + pass * a.n_teams, band = tile / (a.n_together * n_row_tiles);
        const int first = band * a.n_together, n = min(a.n_together, n_token_tiles() - first);
        const int i = tile - first * n_row_tiles;
        return {i / n * TILE_ROWS, (first + i % n) * TOKENS};
    }

    __device__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < N_STAGES; i++) {
                barrier_init(full(i), 1 + (SCALERS > 0));
                barrier_init(empty(i), WORKERS / 32);
            }
            barrier_init_fence();
        }
        __syncthreads();
    }

    // ---- the warp that loads ----

    __device__ void load_w(const Maps& maps, Place at, int unit, int i) const {
        const uint64_t hint = a.m <= TOKENS ? L2_EVICT_FIRST : L2_EVICT_NORMAL;
        const int column = (first_unit + unit) * BOX_COLUMNS;
        barrier_expect(full(i), STAGE_BYTES + (SCALERS ? 0 : SCALE_BYTES));
        if (QUIRE_RANK && unit >= n_units) return adapters.load_b(maps, stage(i), full(i), at.row, unit - n_units);
        if (QUIRE_SILU) {
            load_box(stage(i) + W_AT, &maps.w, full(i), hint, column, 0, 0, at.row / 8);
        } else {
            load_box(stage(i) + W_AT, &maps.w, full(i), hint, column, at.row);
        }
#if QUIRE_NIBBLES
        load_scales(scales(i), &maps.scales, full(i), hint, at.row, first_unit + unit, a.k, a.group);
#endif
    }
    __device__ void load_x(const Maps& maps, Place at, int unit, int i) const {
        const uint32_t to = stage(i) + X_AT;
        if (QUIRE_RANK && unit >= n_units) return adapters.load_inner(maps, to, full(i), at.row, at.token, unit - n_units);
#if QUIRE_NIBBLES
        load_box(to, &maps.x, full(i), L2_EVICT_LAST, 0, at.token, (first_unit + unit) * X_CHUNKS);
#else
        load_box(to, &maps.x, full(i), L2_EVICT_LAST, (first_unit + unit) * CHUNK, at.token);
#endif
    }
    __device__ void feed(const Maps& maps) const {
        const int n = n_items, n_first = min(n, N_STAGES), n_pass = n_all_units;
        for (int i = 0; i < n_first; i++) load_w(maps, place(i / n_pass), i % n_pass, i);
        wait_for_previous_grid();
        for (int i = 0; i < n_first; i++) load_x(maps, place(i / n_pass), i % n_pass, i);
        int pass = n_first / n_pass, unit = n_first % n_pass, at_stage = 0, turn = 0;
        Place at = place(pass);
        for (int i = n_first; i < n; i++) {
            await(empty(at_stage), turn & 1);
            load_w(maps, at, unit, at_stage);
            load_x(maps, at, unit, at_stage);
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
            if (++unit == n_pass) unit = 0, at = place(++pass);
        }
    }

    // ---- the warpgroups that multiply ----

    __device__ int group() const { return threadIdx.x / GROUP; }
    __device__ void release(int i) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty(i));
    }
    __device__ void multiply(float (&d)[COLUMNS / 2], int pass) const {
        const int first = pass * n_all_units;
        int at_stage = first % N_STAGES, turn = first / N_STAGES, before = at_stage;
        for (int unit = 0; unit < n_units; unit++) {
            await(full(at_stage), turn & 1);
            const Operand w = rows_operand(stage(at_stage) + uniform(group()) * 8192);
            const Operand x = rows_operand(stage(at_stage) + W_BYTES);
            products_begin();
#pragma unroll
            for (int i = 0; i < 4; i++) Product<COLUMNS>::rows(d, w.further(32 * i), x.further(32 * i), unit + i > 0);
            products_commit();
            products_wait<1>();
            if (unit > 0) release(before);
            before = at_stage;
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
        }
        products_wait<0>();
        pin(d);
        release(before);
    }

#if QUIRE_RANK
    // What adapters add, by sums of their own: of a slice each has all, so that none depends on where an adapter is.
    __device__ void multiply_adapters(float (&d)[1 + QUIRE_SILU][TOKENS / 2], int pass) const {
        const int first = pass * n_all_units + n_units;
        int at_stage = first % N_STAGES, turn = first / N_STAGES, before = -1;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) d[0][i] = d[QUIRE_SILU][i] = 0.0f;
        for (int chunk = 0; chunk < adapters.n_chunks; chunk++) {
#pragma unroll
            for (int part = 0; part <= QUIRE_SILU; part++) {
                await(full(at_stage), turn & 1);
                products_begin();
                AdapterUnits::multiply(d[part], stage(at_stage), uniform(group()), stage(at_stage) + W_BYTES);
                products_commit();
                products_wait<1>();
                if (before >= 0) release(before);
                before = at_stage;
                if (++at_stage == N_STAGES) at_stage = 0, turn++;
            }
        }
        products_wait<0>();
        pin(d[0]), pin(d[QUIRE_SILU]);
        if (before >= 0) release(before);
    }
    __device__ void add_adapters(float (&d)[COLUMNS / 2], const float (&added)[1 + QUIRE_SILU][TOKENS / 2]) const {
#pragma unroll
        for (int i = 0; i < OWN_QUADS * 4; i++) {
#pragma unroll
            for (int owner = 0; owner < SPLIT; owner++) {
                const float own = added[i % 4 < 2 ? 0 : QUIRE_SILU][owner * OWN_QUADS * 4 + i];
                d[i] += owner == slice ? own : 0.0f;
            }
        }
    }
#endif

#if QUIRE_NIBBLES
    // Codes of 64 columns become elements in registers while the 64 before are multiplied.
    __device__ void multiply_codes(float (&d)[COLUMNS / 2], int pass) const {
        const int first = pass * n_units;
        int at_stage = first % N_STAGES, turn = first / N_STAGES, before = at_stage;
        uint32_t left[2][4][4];
        await(full(at_stage), turn & 1);
        make_elements(left[0], stage(at_stage), scales(at_stage), 0);
        for (int unit = 0; unit < n_units; unit++) {
#pragma unroll
            for (int c = 0; c < X_CHUNKS; c++) {
                const Operand x = rows_operand(stage(at_stage) + W_BYTES + c * X_PART);
                products_begin();
#pragma unroll
                for (int s = 0; s < 4; s++) Product<COLUMNS>::rows_of(d, left[c][s], x.further(32 * s), unit + c + s > 0);
                products_commit();
                products_wait<1>();  // those before have read the other elements
                if (c == 0 && unit > 0) release(before);
                if (c == 0) {
                    make_elements(left[1], stage(at_stage), scales(at_stage), 1);
                } else if (unit + 1 < n_units) {
                    before = at_stage;
                    if (++at_stage == N_STAGES) at_stage = 0, turn++;
                    await(full(at_stage), turn & 1);
                    make_elements(left[0], stage(at_stage), scales(at_stage), 0);
                }
            }
        }
        products_wait<0>();
        pin(d);
        release(at_stage);
    }
#endif

    // The block of slice s finishes the s-th part of the tokens: [team][owner][slice][quad][thread] in global memory.
    __device__ float4* sums_at(int owner, int from) const {
        return static_cast<float4*>(a.sums) + ((team * SPLIT + owner) * SPLIT + from) * OWN_QUADS * WORKERS + threadIdx.x;
    }
    __device__ void hand_over() const {  // and wait until the other slices have
        uint32_t* counter = n_handed_over + team;
        __threadfence();
        named_sync(WORKERS_BARRIER, WORKERS);
        if (threadIdx.x == 0) {
            const uint32_t before = atomicAdd(counter, 1), end = before - before % SPLIT + SPLIT;
            const long long start = clock64();
            while (int(load_acquire(counter) - end) < 0) {
                if (clock64() - start > 4000000000ll) asm volatile("st.global.u32 [%0], %1;" ::"l"(0ull), "r"(0));
            }
        }
        named_sync(WORKERS_BARRIER, WORKERS);
    }
    // d becomes the whole sums of this block's part of the tokens, which come first.
    __device__ void exchange(float (&d)[COLUMNS / 2], Place at) const {
        float4 own[OWN_QUADS];
#pragma unroll
        for (int owner = 0; owner < SPLIT; owner++) {
            if (at.token + owner * OWN_QUADS * 8 >= a.m) break;
#pragma unroll
            for (int v = 0; v < OWN_QUADS; v++) {
                const float* q = &d[4 * (owner * OWN_QUADS + v)];
                const float4 quad = make_float4(q[0], q[1], q[2], q[3]);
                if (owner == slice) {
                    own[v] = quad;
                } else {
                    __stcg(sums_at(owner, slice) + v * WORKERS, quad);
                }
            }
        }
        hand_over();
        if (at.token + slice * OWN_QUADS * 8 >= a.m) return;
#pragma unroll
        for (int from = 0; from < SPLIT; from++) {
#pragma unroll
            for (int v = 0; v < OWN_QUADS; v++) {
                const float4 q = from == slice ? own[v] : __ldcg(sums_at(slice, from) + v * WORKERS);
                float* sum = &d[4 * v];
                sum[0] = from ? sum[0] + q.x : q.x, sum[1] = from ? sum[1] + q.y : q.y;
                sum[2] = from ? sum[2] + q.z : q.z, sum[3] = from ? sum[3] + q.w : q.w;
            }
        }
    }

    // ---- results: through shared memory, where a token's rows of y come to lie side by side ----

    __device__ uint32_t out_at(int buffer) const { return base + OUT_AT + (group() * N_OUT + buffer) * OUT_BYTES; }
    __device__ static uint32_t out_cell(uint32_t out, int token, int cell) {  // swizzled as the tensor map has it
        return out + (token * CELLS + (CELLS == 8 ? cell ^ (token & 7) : cell ^ (token >> 1 & 3))) * 16;
    }
    __device__ float bias_of(int w_row) const {
        return QUIRE_BIAS && w_row < a.n ? widen(static_cast<const Element*>(a.bias)[w_row]) : 0.0f;
    }
    // Of w, whose sums a thread has: the upper one, also of y, for a product that begins at `row` of y.
    __device__ static int upper_row(int row) {
        return row + threadIdx.x % GROUP / 32 * (QUIRE_SILU ? 8 : 16) + (threadIdx.x & 31) / 4;
    }
    __device__ int lower_row(int upper) const { return QUIRE_SILU ? a.n / 2 + upper : upper + 8; }
    __device__ float row_scale(int w_row) const {
        return QUIRE_FP8 == 1 ? __ldg(a.w_scale + min(w_row, a.n - 1) * a.w_scale_step) : 1.0f;
    }
    __device__ float token_scale(int token) const {
        return QUIRE_FP8 == 1 ? load_float(a.x_scale + min(token, a.m - 1) * a.x_scale_step) : 1.0f;
    }
    __device__ void stage_round(const float* d, uint32_t out, int row, int first_token) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32;
        const int high_row = upper_row(row), low_row = lower_row(high_row);
        const float upper = bias_of(high_row), lower = bias_of(low_row);
        const float by_upper = row_scale(high_row), by_lower = row_scale(low_row);
#pragma unroll
        for (int v = 0; v < ROUND_QUADS; v++) {
            const int own = first_token + v * 8 + lane % 4 * 2;
            const float even = token_scale(own), odd = token_scale(own + 1);
            const float x = d[4 * v] * even * by_upper + upper, y = d[4 * v + 1] * odd * by_upper + upper;
            const float z = d[4 * v + 2] * even * by_lower + lower, w = d[4 * v + 3] * odd * by_lower + lower;
            const int token = v * 8 + (lane & 7);
            if (QUIRE_SILU) {
                store_transposed(out_cell(out, token, warp), silu_product(pack(x, y), pack(z, w)));
            } else {
                store_transposed(out_cell(out, token, warp * 2 + (lane >> 3 & 1)), pack(x, y), pack(z, w));
            }
        }
    }
    // Of tokens that a thread has two of: cells of theirs in two, SiLU four quads.
    __device__ void stage_turned(const float* d, uint32_t out, int row) const {
        const int lane = threadIdx.x & 31, token = threadIdx.x % GROUP / 32 * 16 + (lane & 15);
#pragma unroll
        for (int cell = 0; cell < CELLS; cell += 2) {
            uint32_t y[2][2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float* sums = d + (cell + c) * (QUIRE_SILU ? 8 : 4);
                const int w_row = row + (cell + c) * 8 + lane % 4 * 2;
                const float even = bias_of(w_row), odd = bias_of(w_row + 1);
#pragma unroll
                for (int half = 0; half < 2; half++) y[c][half] = pack(sums[2 * half] + even, sums[2 * half + 1] + odd);
                if (QUIRE_SILU) {
                    const float up = bias_of(a.n / 2 + w_row), next = bias_of(a.n / 2 + w_row + 1);
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        y[c][half] = silu_product(y[c][half], pack(sums[4 + 2 * half] + up, sums[5 + 2 * half] + next));
                }
            }
            store_matrices(out_cell(out, token, cell + lane / 16), y[0][0], y[0][1], y[1][0], y[1][1]);
        }
    }
    __device__ void store_round(const CUtensorMap* map, uint32_t out, int row, int token, int parity) const {
        const int thread = threadIdx.x % GROUP;
#if QUIRE_SENT_TO
        if (thread == 0) send_round(map, a.sent, out, ROUND_QUADS, row, token, a.m, parity);  // rows beyond n are cut
#elif QUIRE_WIDE
        for (int i = thread; i < ROUND_CELLS; i += GROUP) {
            const int y_row = row + i % CELLS * 8, y_token = token + i / CELLS;
            if (y_row >= n_out() || y_token >= a.m) continue;
            const uint4 y = read16(out_cell(out, i / CELLS, i % CELLS));
            float4* to = reinterpret_cast<float4*>(static_cast<float*>(a.y) + y_token * a.y_row + y_row);
            to[0] = make_float4(low(y.x), high(y.x), low(y.y), high(y.y));
            to[1] = make_float4(low(y.z), high(y.z), low(y.w), high(y.w));
        }
        named_sync(1 + group(), GROUP);
#else
        if (thread == 0) store_box(map, out, row, token);
#endif
    }
    __device__ void store(const CUtensorMap* map, const float (&d)[COLUMNS / 2], Place at, int parity) const {
        constexpr int N_ROUNDS = OWN_QUADS / ROUND_QUADS;
        const int barrier = 1 + group();
#pragma unroll
        for (int i = 0; i < N_ROUNDS; i++) {
            const int first = i * ROUND_QUADS, row = at.row + (TURNED ? i : group()) * OUT_ROWS;
            const int token = at.token + (TURNED ? group() * 64 : first * 8);
            const uint32_t out = out_at(i % N_OUT);
            if (!QUIRE_WIDE && threadIdx.x % GROUP == 0) stores_have_read<N_OUT - 1>();
            named_sync(barrier, GROUP);
            TURNED ? stage_turned(&d[4 * first], out, row) : stage_round(&d[4 * first], out, row, token);
            async_fence();
            named_sync(barrier, GROUP);
            store_round(map, out, row, token, parity);
        }
    }
    __device__ void work(const CUtensorMap* y_map) const {
        wait_for_previous_grid();
        const int n = n_passes, parity = begin_sending<WORKERS_BARRIER, WORKERS>(a);
        for (int pass = 0; pass < n; pass++) {
            float d[COLUMNS / 2];
            Place at = place(pass);
#if QUIRE_NIBBLES
            multiply_codes(d, pass);
#elif QUIRE_FP8
            multiply_scaled(*this, d, pass, at.row);
#else
            multiply(d, pass);
#endif
#if QUIRE_RANK
            float added[1 + QUIRE_SILU][TOKENS / 2];
            multiply_adapters(added, pass);
            if (SPLIT > 1) exchange(d, at);
            add_adapters(d, added);
#else
            if (SPLIT > 1) exchange(d, at);
#endif
            at.token += slice * OWN_QUADS * 8;
            store(y_map, d, at, parity);
        }
        if (!QUIRE_WIDE && threadIdx.x % GROUP == 0) QUIRE_SENT_TO ? stores_have_read<0>() : stores_wait();
    }
};

__global__ void __launch_bounds__(MOST_THREADS, 1) gemm_wide(const __grid_constant__ Maps maps,
                                                        const __grid_constant__ QuireWideArgs args) {
    extern __shared__ __align__(1024) char shared[];
    const WideBlock block(args, shared);
    if (threadIdx.x == WORKERS) prefetch_map(&maps.w), prefetch_map(&maps.x);
    block.init();
    if (!QUIRE_SENT_TO) let_next_grid_start();
    if (threadIdx.x < WORKERS) {
        registers_up<QUIRE_RANK ? 168 : 232>();
        block.work(results_of(maps));
    } else {
        registers_down<40>();
        if (threadIdx.x == WORKERS) block.feed(maps);
#if QUIRE_FP8 == 2
        if (threadIdx.x >= WORKERS + 32) make_scales(block);
#endif
    }
}

int launch(const QuireWideArgs& a, cudaStream_t stream) {
    Maps maps = {};
    cudaError_t error = encode_weights(&maps.w, a.w, a.n, a.k, QUIRE_SILU, ROWS);
#if QUIRE_NIBBLES
    if (error == cudaSuccess) error = encode_scales(&maps.scales, a.w_scale, a.n, a.k, a.group, QUIRE_SILU, ROWS);
#endif
    if (error != cudaSuccess) return error;
    error = encode_tokens(&maps.x, a.x, a.m, a.k, a.x_row, TOKENS);
    if (error != cudaSuccess) return error;
#if QUIRE_SENT_TO
    error = encode_sent(maps.sent, a.sent, a.m, a.n);
#elif !QUIRE_WIDE
    error = encode_results(&maps.y, a.y, QUIRE_SILU ? a.n / 2 : a.n, a.m, a.y_row, OUT_ROWS, ROUND_QUADS * 8);
#endif
    if (error != cudaSuccess) return error;
    error = encode_adapters(&maps, a);
    if (error != cudaSuccess) return error;
    error = allow_shared_memory<gemm_wide>(END);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.n_teams * SPLIT);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = END;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, gemm_wide, maps, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_gemm_wide(const QuireWideArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
