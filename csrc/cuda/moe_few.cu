// A mixture of experts for few tokens, both products in one launch: for each pair p of a token t and an expert e that it
// chose, h[p] = silu(gate_e x[t]) * up_e x[t] and y[p] = down_e h[p]. up [experts, 2 inner, hidden] (gate rows first),
// down [experts, hidden, inner], as nn.Linear stores each.
//
// Reading the weights of each chosen expert once at the speed of memory is all that counts. Every block sorts the pairs
// by expert for itself, the same way, so nothing waits for another launch. An item is 8 rows of gate and their 8 of up,
// or 32 of down, of one expert for up to TOKENS of its pairs; blocks take equal runs of items, first of the one product,
// then of the other. One warp keeps a ring of shared memory filled with weights (TMA), without a pause between the
// products: there the others wait for h of all blocks, which count themselves in global memory. They multiply, each a
// part of the columns of a stage (mma.m16n8k16, rows of weights are the 16), then add their sums in the order of the
// warps: results depend on no timing. x, or h, of the pairs of a tile stays in shared memory.
//
// QUIRE_LONE: there is one token, and y is the sum over its pairs: the second product's items are 16 rows of each chosen
// expert, and h is weighted.
//
// All blocks must run at the same time, one on each multiprocessor: two such launches at once may wait for each other.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (8, 16), QUIRE_UP_CHUNKS, QUIRE_DOWN_CHUNKS (of 64 columns, in a stage), QUIRE_LONE.
#include "gemm.h"

struct QuireMoeFewArgs {  // _FewArgs in quire/kernels/moe/hopper.py
    const void* x;
    const void* up;
    const void* down;
    const int32_t* expert_ids;  // of the pairs; others than 0 .. n_experts are left out
    const float* weights;       // of the pairs; QUIRE_LONE only
    const void* residual;       // QUIRE_LONE: added to the sum; null: 0
    void* h;                    // [n_pairs, inner]
    void* y;                    // [n_pairs, hidden]; QUIRE_LONE: [hidden]
    int64_t x_row;              // elements
    int32_t n_pairs, n_chosen, n_experts, hidden, inner, n_stages, n_blocks;
};

namespace quire {

constexpr int TOKENS = QUIRE_TOKENS, EIGHTS = TOKENS / 8;
constexpr int WARPS = 8, WORKERS = WARPS * 32, THREADS = WORKERS + 32, SORTERS = THREADS / 32;

template <bool FIRST> struct Kind {  // of the two products
    static constexpr bool IS_UP = FIRST, IN_PARTS = QUIRE_LONE && !IS_UP;  // parts: the experts that are summed
    static constexpr int CHUNKS = IS_UP ? QUIRE_UP_CHUNKS : QUIRE_DOWN_CHUNKS;  // in a stage
    static constexpr int BLOCKS = IS_UP || QUIRE_LONE ? 1 : 2;                  // of 16 rows of w in an item
    static constexpr int CHUNK_BYTES = BLOCKS * 16 * 128, BYTES = CHUNKS * CHUNK_BYTES;
    static constexpr int STEPS = CHUNKS * 4 / WARPS;  // of 16 columns, of a warp in a stage
    static constexpr int OUT_ROWS = IS_UP ? 8 : BLOCKS * 16;
    static constexpr int QUADS = BLOCKS * EIGHTS;     // sums of a thread come in fours
    static_assert(CHUNKS * 4 % WARPS == 0);
};
using Up = Kind<true>;
using Down = Kind<false>;

constexpr int STAGE_BYTES = Up::BYTES > Down::BYTES ? Up::BYTES : Down::BYTES;
constexpr int SUMS_BYTES = WARPS * (Down::QUADS > Up::QUADS ? Down::QUADS : Up::QUADS) * 32 * 16;  // two in turn
constexpr int MAX_STAGES = 32, WORKERS_BARRIER = 1, LIST_BARRIER = 2;

struct Tile {  // of pairs of one expert: those of slots first .. first + n
    int expert, first, n;
};

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

// Where things lie in shared memory. Bytes from a base that is a multiple of 1,024.
struct Layout {
    int x, sums, barriers, starts, counts, tiles, pairs, end;
    static __host__ __device__ int row_bytes(int columns) { return columns * 2 + 16; }  // rows in different banks
    __host__ __device__ explicit Layout(const QuireMoeFewArgs& a) {
        const int x_row = row_bytes(a.hidden), h_row = row_bytes(QUIRE_LONE ? a.n_pairs * a.inner : a.inner);
        const int most = a.n_experts + a.n_pairs / TOKENS;
        const int n_tiles = QUIRE_LONE || a.n_pairs < most ? a.n_pairs : most;
        x = a.n_stages * STAGE_BYTES;
        sums = x + (QUIRE_LONE ? 1 : TOKENS) * (x_row > h_row ? x_row : h_row);
        barriers = sums + 2 * SUMS_BYTES;
        starts = barriers + int(sizeof(Barriers));
        counts = starts + (a.n_experts + 1) * 4;
        tiles = counts + (QUIRE_LONE ? 0 : SORTERS * a.n_experts * 4);
        pairs = tiles + n_tiles * int(sizeof(Tile));
        end = pairs + a.n_pairs * 4;
    }
};

// How often blocks have finished the first product: n_blocks times in a launch, so never reset.
__device__ unsigned long long n_finished;

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* from) {
    unsigned long long x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ void load_two_matrices(uint32_t& a, uint32_t& b, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}

struct Ring {  // where a warp stands in it
    int stage = 0, turn = 0;
    __device__ void advance(int n_stages) {
        if (++stage == n_stages) stage = 0, turn++;
    }
};

struct FewBlock {
    const QuireMoeFewArgs& a;
    const Layout at;
    char* memory;
    uint32_t base;

    __device__ FewBlock(const QuireMoeFewArgs& args, char* shared)
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
    template <class K> __device__ int n_units() const { return (columns<K>() / CHUNK + K::CHUNKS - 1) / K::CHUNKS; }
    template <class K> __device__ int n_parts() const { return K::IN_PARTS ? n_tiles() : 1; }
    template <class K> __device__ int n_row_tiles() const { return rows<K>() / K::OUT_ROWS; }
    template <class K> __device__ int first_item(int block) const {
        return int(int64_t(K::IN_PARTS ? 1 : n_tiles()) * n_row_tiles<K>() * block / a.n_blocks);
    }

    __device__ void init() const {
        for (int i = 0; i < a.n_stages; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), WARPS);
        }
        barrier_init_fence();
    }

    // ---- which pairs belong together ----

    // Volatile: read where it stands, and from the L2 cache, which all grids share.
    __device__ int expert_of(int pair) const {
        const int expert = pair < a.n_pairs ? static_cast<const volatile int32_t*>(a.expert_ids)[pair] : -1;
        return expert < a.n_experts ? expert : -1;
    }
    // One warp: each pair of the lone token is a tile, and a part of the second product.
    __device__ void list_lone() const {
        const int lane = threadIdx.x % 32, own = expert_of(lane);
        const unsigned all = __ballot_sync(~0u, own >= 0), before = all & ((1u << lane) - 1);
        if (own >= 0) {
            tiles()[__popc(before)] = {own, __popc(before), 1};
            pairs()[__popc(before)] = lane;
        }
        if (lane == 0) n_tiles() = __popc(all);
        __syncwarp();
    }
    // Each warp takes a run of pairs, 32 at a time: pairs of an expert keep their order, so that all blocks have the same
    // tiles. `place` false: counts them; true: counts are where the warp's next pair of the expert goes.
    __device__ void walk(int first_experts, bool place) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = (a.n_pairs + 31) / 32;
        const int first = n * warp / SORTERS, end = n * (warp + 1) / SORTERS;
        for (int i = first; i < end; i++) {
            const int expert = i == first ? first_experts : expert_of(i * 32 + lane);
            const unsigned same = __match_any_sync(~0u, expert), before = same & ((1u << lane) - 1);
            if (expert >= 0) {
                int* count = counts(warp) + expert;
                const int start = *count;
                if (place) pairs()[starts()[expert] + start + __popc(before)] = i * 32 + lane;
                __syncwarp(same);
                if (before == 0) *count = start + __popc(same);
            }
            __syncwarp();
        }
    }
    __device__ void sort() const {
        const int warp = threadIdx.x / 32, n = (a.n_pairs + 31) / 32;
        const int first_experts = expert_of((n * warp / SORTERS) * 32 + threadIdx.x % 32);
        for (int i = threadIdx.x; i < SORTERS * a.n_experts; i += THREADS) counts(0)[i] = 0;
        __syncthreads();
        walk(first_experts, false);
        __syncthreads();
        for (int expert = threadIdx.x; expert < a.n_experts; expert += THREADS) {
            int sum = 0;
#pragma unroll
            for (int from = 0; from < SORTERS; from++) {
                const int own = counts(from)[expert];
                counts(from)[expert] = sum;
                sum += own;
            }
            starts()[expert] = sum;
        }
        __syncthreads();
        if (threadIdx.x < 32) list_tiles();
        __syncthreads();
        walk(first_experts, true);
        __syncthreads();
    }
    __device__ void list_tiles() const {  // numbers of pairs become starts
        const int lane = threadIdx.x;
        int n_slots = 0, n_listed = 0;
        for (int first = 0; first < a.n_experts; first += 32) {
            const int expert = first + lane, n = expert < a.n_experts ? starts()[expert] : 0;
            const int own = (n + TOKENS - 1) / TOKENS;
            int both = n << 16 | own;  // at most 4,096 pairs
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(~0u, both, step);
                if (lane >= step) both += more;
            }
            const int start = n_slots + (both >> 16) - n, place = n_listed + (both & 0xffff) - own;
            if (expert < a.n_experts) starts()[expert] = start;
            for (int i = 0; i < own; i++)
                tiles()[place + i] = {expert, start + i * TOKENS, min(TOKENS, n - i * TOKENS)};
            const int all = __shfl_sync(~0u, both, 31);
            n_slots += all >> 16, n_listed += all & 0xffff;
        }
        if (lane == 0) n_tiles() = n_listed;
    }

    // ---- the warp that loads ----

    template <class K> __device__ void feed(const CUtensorMap* map, Ring& ring) const {
        const int end = first_item<K>(blockIdx.x + 1), n = n_units<K>();
        for (int item = first_item<K>(blockIdx.x); item < end; item++) {
            const int row = item % n_row_tiles<K>() * K::OUT_ROWS;
            for (int part = 0; part < n_parts<K>(); part++) {
                const int expert = tiles()[K::IN_PARTS ? part : item / n_row_tiles<K>()].expert;
                for (int unit = 0; unit < n; unit++) {
                    const uint32_t barrier = full(ring.stage), to = stage(ring.stage);
                    if (ring.turn > 0) barrier_wait(empty(ring.stage), (ring.turn - 1) & 1);
                    barrier_expect(barrier, K::BYTES);
                    if (K::IS_UP) {
                        load_box(to, map, barrier, L2_EVICT_FIRST, 0, row, 2 * expert, unit * K::CHUNKS);
                    } else {
                        load_box(to, map, barrier, L2_EVICT_FIRST, 0, expert * a.hidden + row, unit * K::CHUNKS);
                    }
                    ring.advance(a.n_stages);
                }
            }
        }
    }

    // ---- the warps that multiply ----

    template <class K> __device__ void stage_rows(const Tile& tile) const {
        const int n_cells = columns<K>() / 8, n_rows = K::IN_PARTS ? n_tiles() : tile.n;
        const int row_bytes = K::IN_PARTS ? a.inner * 2 : Layout::row_bytes(columns<K>());
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int warps_a_row = n_rows > 4 ? 1 : n_rows > 2 ? 2 : n_rows > 1 ? 4 : 8;
        for (int i = warp / warps_a_row; i < n_rows; i += WARPS / warps_a_row) {
            const int64_t pair = pairs()[tile.first + i];
            const Element* from = K::IS_UP ? static_cast<const Element*>(a.x) + pair / a.n_chosen * a.x_row
                                             : static_cast<const Element*>(a.h) + pair * a.inner;
#pragma unroll 4
            for (int c = warp % warps_a_row * 32 + lane; c < n_cells; c += warps_a_row * 32)
                copy_16_bytes(base + at.x + i * row_bytes + c * 16, from + c * 8, true);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        named_sync(WORKERS_BARRIER, WORKERS);
    }

    // x_at: where the lane's row of the fragments of x starts (of 16 pairs: lanes 16 .. have the last eight).
    template <class K>
    __device__ void multiply(float (&d)[K::QUADS][4], uint32_t w, uint32_t x_at, int unit, int part) const {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * K::STEPS;
        const int row = lane % 16, cell = lane / 16, k = columns<K>();
#pragma unroll
        for (int i = 0; i < K::STEPS; i++) {
            const int step = first + i, chunk = step / 4, column = (unit * K::CHUNKS + chunk) * CHUNK + step % 4 * 16;
            if (column >= k) break;
            const uint32_t from = x_at + (part * k + column) * 2;
            uint32_t left[4], right[4];
            if (EIGHTS == 2) {
                load_matrices(right, from);
            } else {
                load_two_matrices(right[0], right[1], from);
            }
#pragma unroll
            for (int b = 0; b < K::BLOCKS; b++) {
                load_matrices(left, w + chunk * K::CHUNK_BYTES + b * 2048 + row * 128 +
                                        (((step % 4 * 2 + cell) ^ (row & 7)) << 4));
#pragma unroll
                for (int v = 0; v < EIGHTS; v++)
                    multiply_add(d[b * EIGHTS + v], left, right[2 * v], right[2 * v + 1]);
            }
        }
    }

    __device__ float weight_of(const Tile& tile, int i) const {
        return QUIRE_LONE ? __ldcg(a.weights + pairs()[tile.first + min(i, tile.n - 1)]) : 1.0f;
    }
    template <class K> __device__ void store_pairs(float4 sum, const Tile& tile, int eight, int row) const {
        const int lane = threadIdx.x % 32, i = eight * 8 + lane / 4;  // once transposed
        Element* to = static_cast<Element*>(K::IS_UP ? a.h : a.y);
        uint32_t upper = pack(sum.x, sum.y), lower = 0;
        if (K::IS_UP) {
            const int token = eight * 8 + lane % 4 * 2;
            const float one = silu(sum.x) * sum.z * weight_of(tile, token);
            upper = pack(one, silu(sum.y) * sum.w * weight_of(tile, token + 1));
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
            const float added = residual == nullptr ? 0.0f : widen(residual[to]);
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
        const int quad = (warp + turn * K::QUADS) % WARPS;  // finished by this warp
        if (quad >= K::QUADS || quad % EIGHTS * 8 >= tile.n) return;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int from = 0; from < WARPS; from++) {
            const uint4 q = read16(sums + (from * K::QUADS + quad) * 512);
            sum.x += __uint_as_float(q.x), sum.y += __uint_as_float(q.y);
            sum.z += __uint_as_float(q.z), sum.w += __uint_as_float(q.w);
        }
        if (K::IN_PARTS) {
            store_lone(sum, row);
        } else {
            store_pairs<K>(sum, tile, quad % EIGHTS, row + quad / EIGHTS * 16);
        }
    }

    template <class K> __device__ void work(Ring& ring) const {
        const int lane = threadIdx.x % 32, first = first_item<K>(blockIdx.x), end = first_item<K>(blockIdx.x + 1);
        const int n = n_units<K>();
        int before = -1;
        uint32_t x_at = 0;
        Tile tile;
        for (int item = first; item < end; item++) {
            const int index = item / n_row_tiles<K>();
            if (index != before) {
                if (before >= 0) named_sync(WORKERS_BARRIER, WORKERS);  // everybody has read x
                before = index;
                tile = K::IN_PARTS ? Tile{0, 0, 1} : tiles()[index];
                stage_rows<K>(tile);
                const int row = min((EIGHTS == 2 ? lane / 16 * 8 : 0) + lane % 8, tile.n - 1);
                x_at = base + at.x + row * Layout::row_bytes(columns<K>()) + lane / 8 % 2 * 16;
            }
            float d[K::QUADS][4] = {};
            for (int part = 0; part < n_parts<K>(); part++) {
                for (int unit = 0; unit < n; unit++) {
                    barrier_wait(full(ring.stage), ring.turn & 1);
                    multiply<K>(d, stage(ring.stage), x_at, unit, part);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(empty(ring.stage));
                    ring.advance(a.n_stages);
                }
            }
            finish<K>(d, tile, item % n_row_tiles<K>() * K::OUT_ROWS, item - first);
        }
    }

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

__global__ void __launch_bounds__(THREADS, 1) moe_few(const __grid_constant__ CUtensorMap up_map,
                                                      const __grid_constant__ CUtensorMap down_map,
                                                      const __grid_constant__ QuireMoeFewArgs args) {
    extern __shared__ __align__(1024) char shared[];
    const FewBlock block(args, shared);
    const bool loads = threadIdx.x >= WORKERS;
    if (threadIdx.x == WORKERS) {
        prefetch_map(&up_map), prefetch_map(&down_map);
        block.init();
    }
    wait_for_previous_grid();
    let_next_grid_start();  // which may read the expert ids at once
    if (!QUIRE_LONE) {
        block.sort();
    } else if (loads) {
        block.list_lone();
        named_arrive(LIST_BARRIER, THREADS);
    } else {
        named_sync(LIST_BARRIER, THREADS);
    }
    Ring ring;
    if (!loads) {
        block.work<Up>(ring);
        block.wait_for_all_blocks();
        block.work<Down>(ring);
    } else if (threadIdx.x == WORKERS) {
        block.feed<Up>(&up_map, ring);
        block.feed<Down>(&down_map, ring);
    }
}

inline cudaError_t encode_up(CUtensorMap* map, const QuireMoeFewArgs& a) {
    const uint64_t row = uint64_t(a.hidden) * 2, inner = a.inner, n_experts = a.n_experts;
    const uint64_t sizes[] = {CHUNK, inner, 2 * n_experts, uint64_t(a.hidden / CHUNK)};
    const uint64_t strides[] = {row, inner * row, CHUNK * 2};
    const uint32_t box[] = {CHUNK, 8, 2, Up::CHUNKS};
    return encode_map(map, a.up, 4, sizes, strides, box);
}
inline cudaError_t encode_down(CUtensorMap* map, const QuireMoeFewArgs& a) {
    const uint64_t sizes[] = {CHUNK, uint64_t(a.n_experts) * a.hidden, uint64_t(a.inner / CHUNK)};
    const uint64_t strides[] = {uint64_t(a.inner) * 2, CHUNK * 2};
    const uint32_t box[] = {CHUNK, Down::BLOCKS * 16, Down::CHUNKS};
    return encode_map(map, a.down, 3, sizes, strides, box);
}

int launch(const QuireMoeFewArgs& a, cudaStream_t stream) {
    CUtensorMap up_map, down_map;
    cudaError_t error = encode_up(&up_map, a);
    if (error == cudaSuccess) error = encode_down(&down_map, a);
    if (error != cudaSuccess) return error;
    static int allowed = 0;
    const int n_bytes = Layout(a).end;
    if (n_bytes > allowed) {
        error = cudaFuncSetAttribute(moe_few, cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);
        if (error != cudaSuccess) return error;
        allowed = n_bytes;
    }
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
    return cudaLaunchKernelEx(&config, moe_few, up_map, down_map, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_moe_few(const QuireMoeFewArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
