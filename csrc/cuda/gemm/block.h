// One block of a product of few rows: sizes, what its shared memory holds, and which part of w and x is its own.
#pragma once
#include "gemm.h"

struct QuireGemmArgs {  // _Args in quire/kernels/gemm/hopper.py
    const void* x;
    const void* w;
    const void* norm_weight;
    const void* bias;
    const void* residual;
    void* y;
    const float* x_scale;  // e4m3: of row t at [t x_scale_step]; of blocks: of chunk c and row t at [c x_scale_step + t]
    const float* w_scale;  // of row r at [r w_scale_step]; of blocks: [ceil(n / 128)][k / 128]
    int64_t x_row, residual_row, y_row;  // elements
    int32_t m, n, k;                     // n: rows of w
    int32_t n_clusters, n_stages, n_ahead, dependent;
    int32_t token_bits;                  // m <= 2 ^ token_bits <= QUIRE_TOKENS
    int32_t x_scale_step, w_scale_step;
    int32_t group;                       // nibbles: columns with one scale; w_scale: [k / group][n] elements, with zero
                                         // points [k / group][scale, zero][n]
    float eps;
};

namespace quire {

constexpr int TOKENS = QUIRE_TOKENS;
constexpr int CLUSTER = QUIRE_CLUSTER;
constexpr bool OWN_ROWS = QUIRE_NIBBLES && QUIRE_TURNS;  // of a tile, for each team of two warps
constexpr int WORKERS = (OWN_ROWS ? 64 : 128) * QUIRE_GROUPS;  // threads that multiply
constexpr int THREADS = WORKERS + 32;
constexpr int TEAMS = QUIRE_TURNS || QUIRE_NIBBLES ? QUIRE_GROUPS : 1;  // that take tiles in turn, or finish them in turn
constexpr int TEAM = WORKERS / TEAMS;                // threads that share a tile; nibbles: that finish it
constexpr int ROWS = OWN_ROWS ? WORKERS / 2 : QUIRE_PAIRED ? 32 : TEAM / 2;  // of w in a tile
constexpr int OUT_ROWS = QUIRE_SILU ? ROWS / 2 : ROWS;  // of y in a tile; SiLU: 8 rows of gate, then their 8 rows of up
constexpr int SHARE = TEAM / CLUSTER;                // threads of a team whose sums one block finishes
constexpr int QUADS = TOKENS / 8;                    // sums of a thread come in fours: 2 rows (8 apart) x 2 tokens
constexpr int OWN_QUADS = (QUADS + CLUSTER - 1) / CLUSTER;  // that a thread finishes
constexpr int SENDERS = SHARE < 32 ? 1 : SHARE / 32; // warps of a team that hand over to one block
constexpr int CHUNKS = QUIRE_PAIRED || (ROWS == 64 && !QUIRE_NIBBLES) ? 2 : 1;  // of a stage
constexpr int X_CHUNKS = QUIRE_NIBBLES ? 4 : 1;      // rows of 128 bytes of x that a chunk has
constexpr int W_BYTES = ROWS * 128, X_PART = TOKENS * 128, X_BYTES = X_CHUNKS * X_PART;  // of a chunk
constexpr int SCALE_LINES = QUIRE_CHUNK_GROUPS * (1 + QUIRE_ZEROS);  // of a chunk
constexpr int SCALE_BYTES = QUIRE_NIBBLES ? CHUNKS * SCALE_LINES * ROWS * 2 : 0;  // of a stage
constexpr int SCALE_STEP = (SCALE_BYTES + 127) / 128 * 128;                       // the copy engine needs such addresses
// Nibbles: warps of a team that are side by side in a stage, 128 columns each; sums of a row that the warps of a block
// have; what they hand to those that finish; blocks of 16 rows that a team finishes.
constexpr int BESIDE = 2 * CHUNKS, SOURCES = OWN_ROWS ? BESIDE : BESIDE * QUIRE_GROUPS;
constexpr int PARTS_BYTES = QUIRE_NIBBLES ? SOURCES * ROWS * TOKENS * 4 : 0;
constexpr int BLOCKS = (OWN_ROWS ? 32 : ROWS) / 16;
constexpr int PARTS = QUIRE_CHUNK_GROUPS > 2 ? QUIRE_CHUNK_GROUPS / 2 : 1;    // of a warp's 128 columns: with a scale each
constexpr int STAGE_BYTES = CHUNKS * (W_BYTES + (QUIRE_RESIDENT ? 0 : X_BYTES));
constexpr int SUMS_BYTES = CLUSTER == 1 ? 0 : TEAM * QUADS * 16;  // of one exchange
constexpr int MAX_STAGES = 32, UNROLL = 8;
constexpr int EARLY_STAGES = 65536 / (CHUNKS * W_BYTES);  // nibbles: asked for before x, which comes behind them
constexpr int WORKERS_BARRIER = 1, TEAM_BARRIER = 2;  // and one for each further team
constexpr bool EARLY_SCALES = TOKENS <= 16;

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES], sums[TEAMS], read[TEAMS], order[TEAMS], squares, handed, taken;
};

struct Rounds {  // gemm/rounding.h
    float of_warps[2][WORKERS / 32], x_scales[TOKENS];
};
constexpr bool STAGED_NORM = QUIRE_NORM && !QUIRE_ROUNDS;

// Where things lie in shared memory. Bytes from a base that is a multiple of 1,024.
struct Layout {
    int x, scales, group_parts, sums, norm_weight, parts, squares, barriers, rounds, end;
    __host__ __device__ Layout(const QuireGemmArgs& a) {
        const int units = (a.k / CHUNK + CHUNKS - 1) / CHUNKS;
        const int slice = (units + CLUSTER - 1) / CLUSTER * CHUNKS;  // chunks of the largest slice
        const int ring = a.n_stages * STAGE_BYTES;
        x = QUIRE_RESIDENT ? ring : CHUNKS * W_BYTES;  // else in the first stage
        scales = ring + (QUIRE_RESIDENT ? slice * X_BYTES : 0);
        group_parts = scales + a.n_stages * SCALE_STEP;
        sums = group_parts + PARTS_BYTES;
        norm_weight = sums + TEAMS * SUMS_BYTES;
        parts = norm_weight + (STAGED_NORM ? slice * 128 : 0);
        squares = parts + (STAGED_NORM ? slice * TOKENS * 4 : 0);
        barriers = squares + (STAGED_NORM ? (CLUSTER + 1) * TOKENS * 4 : 0);
        rounds = barriers + int(sizeof(Barriers));
        end = rounds + (QUIRE_ROUNDS ? int(sizeof(Rounds)) : 0);
    }
};

__host__ __device__ inline int tiles_of(int n) { return ((QUIRE_SILU ? n / 2 : n) + OUT_ROWS - 1) / OUT_ROWS; }

struct GemmBlock {
    const QuireGemmArgs& a;
    char* memory;
    uint32_t base;
    Layout at;
    int rank, cluster, n_passes, first_chunk, n_chunks, n_units;

    __device__ GemmBlock(const QuireGemmArgs& args, char* shared)
        : a(args), memory(shared), base(shared_address(shared)), at(args) {
        rank = blockIdx.x % CLUSTER;
        cluster = blockIdx.x / CLUSTER;
        n_passes = (tiles_of(a.n) - cluster + a.n_clusters - 1) / a.n_clusters;
        const int all = a.k / CHUNK, units = (all + CHUNKS - 1) / CHUNKS;
        const int first = units * rank / CLUSTER, end = units * (rank + 1) / CLUSTER;
        first_chunk = first * CHUNKS;
        n_units = end - first;
        n_chunks = min(all, end * CHUNKS) - first_chunk;
    }
    __device__ Barriers* barriers() const { return reinterpret_cast<Barriers*>(memory + at.barriers); }
    __device__ Rounds* rounds() const { return reinterpret_cast<Rounds*>(memory + at.rounds); }
    __device__ uint32_t full(int stage) const { return shared_address(&barriers()->full[stage]); }
    __device__ uint32_t empty(int stage) const { return shared_address(&barriers()->empty[stage]); }
    __device__ uint32_t order(int team) const { return shared_address(&barriers()->order[team]); }
    __device__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ uint32_t scales(int i) const { return base + at.scales + i * SCALE_STEP; }
    __device__ int chunks_of(int unit) const { return CHUNKS == 1 ? 1 : min(CHUNKS, n_chunks - unit * CHUNKS); }
    // Of a pair the second, where it is not there, is loaded as zeros.
    __device__ int loaded_chunks(int unit) const { return QUIRE_PAIRED ? CHUNKS : chunks_of(unit); }
    __device__ int first_row(int pass) const { return (cluster + pass * a.n_clusters) * OUT_ROWS; }
    __device__ void init() const;

    // The warp that loads (producer.h). An item is a unit of chunks of the tile whose first row of y is `row`.
    struct Item {
        int unit, row;
    };
    __device__ void advance(Item& item) const;
    __device__ void load_w(const CUtensorMap* map, Item item, int stage_index) const;
    __device__ void prefetch_w(const CUtensorMap* map, Item item) const;
    __device__ void load_x(const CUtensorMap* map, Item item, int stage_index) const;
    __device__ void load_scales(const CUtensorMap* map, Item item, int stage_index) const;
    __device__ void expect(Item item, int stage_index) const;
    __device__ void feed(const CUtensorMap* w_map, const CUtensorMap* x_map, const CUtensorMap* scales_map) const;

    // x in shared memory (input.h): cells of 16 bytes, walked through by thread: 8 cells, then the tokens, then the
    // chunks.
    __device__ uint32_t x_cell(int token, int chunk, int cell) const {
        return base + at.x + chunk * X_PART + token * 128 + ((cell ^ (token & 7)) << 4);
    }
    __device__ int walk_token(int i) const { return i >> 3 & ((1 << a.token_bits) - 1); }
    __device__ int walk_chunk(int i) const { return i >> 3 >> a.token_bits; }
    __device__ int walk_end() const { return n_chunks << a.token_bits << 3; }
    __device__ void prepare_x() const;
    __device__ void stage_x() const;
    __device__ void norm_x() const;
    __device__ void round_x() const;
    template <class Join> __device__ float joined(float x, int buffer, Join join) const;

    // Results (results.h): quad `v` of thread `t` of a team is rows row_of(t) and 8 below, tokens token_of(t, v) and
    // the next. Rows are of y, in a tile.
    __device__ int row_of(int t) const { return (QUIRE_SILU ? t / 32 * 8 : t / 32 * 16) + row_in_eight(t % 32); }
    // Nibbles: the rows of lanes that read at the same time lie in different banks.
    static __device__ int row_in_eight(int lane) { return QUIRE_NIBBLES ? lane / 4 % 4 * 2 + lane / 16 : lane / 4; }
    __device__ int token_of(int t, int v) const { return v * 8 + t % 4 * 2; }
    __device__ int n_out() const { return QUIRE_SILU ? a.n / 2 : a.n; }
    struct Added {  // loaded before the product and not touched until after it: a conversion would wait for the load
        uint32_t bits[4];  // of a quad of the residual
        __device__ float at(int i) const { return QUIRE_RESIDUAL ? low(bits[i]) : 0.0f; }
    };
    __device__ uint32_t residual_bits(int row, int token) const;
    __device__ Added residual_quad(int row, int token) const;
    template <int N> static __device__ void pin(Added (&added)[N]);
    __device__ float biased(float sum, int w_row) const;
    __device__ void store(float sum, float up, float added, int row, int token) const;
    __device__ void store_quad(float4 sums, const Added& added, int row, int token) const;
    static __device__ float4 quad(const float (&d)[TOKENS / 2], int v);
#if QUIRE_CLUSTER > 1
    __device__ uint32_t sums_at(int team, int source, int v, int slot) const;
    __device__ void hand_over(const float (&d)[TOKENS / 2], int team) const;
    __device__ float4 total(int team, int v, int slot) const;
    __device__ void load_added(Added (&added)[OWN_QUADS], int index) const;
    __device__ void hand(const float (&d)[TOKENS / 2], int index) const;
    __device__ void finish(const Added (&added)[OWN_QUADS], int index) const;
#endif

    // The warpgroups that multiply (consumer.h).
    __device__ void multiply(float (&d)[TOKENS / 2], int unit, int stage_index) const;
    __device__ void multiply_pass(float (&d)[TOKENS / 2], int pass) const;
    __device__ void multiply_tile(float (&d)[TOKENS / 2], int pass) const;
    __device__ void multiply_scaled(float (&d)[TOKENS / 2], int pass) const;
    struct Scales {  // of a thread's sums: its two rows of w, and each of its tokens
        float upper, lower, x[2 * QUADS];
    };
    __device__ Scales scales_of(int chunk, int row) const;
    __device__ void load_scales_of(Scales (&to)[CHUNKS], int unit, int row) const;
    static __device__ void add_scaled(float (&d)[TOKENS / 2], const float (&part)[TOKENS / 2], const Scales& s);
    __device__ float scaled(float sum, int w_row, int token) const;
    __device__ void multiply_nibbles(float (&d)[TOKENS / 2], int pass) const;
    struct Places {
        uint32_t codes[2], x[2], scales;
    };
    __device__ Places places() const;
    static __device__ void multiply_codes(float (&d)[2][TOKENS / 2], const Places& from, int stage_index);
    __device__ void gather(float (&d)[TOKENS / 2], const float (&own)[2][TOKENS / 2], int pass) const;
    // Nibbles: warpgroups finish tiles in turn.
    __device__ bool finishes(int pass) const {
        return !QUIRE_NIBBLES || OWN_ROWS || uniform(threadIdx.x / TEAM) == pass % QUIRE_GROUPS;
    }
    __device__ uint32_t handed() const { return shared_address(&barriers()->handed); }
    __device__ uint32_t taken() const { return shared_address(&barriers()->taken); }
    __device__ void pass(int index) const;
    __device__ void work() const;
};

__device__ inline void GemmBlock::init() const {
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.n_stages; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), (OWN_ROWS ? WORKERS : TEAM) / 32);
        }
        for (int i = 0; i < TEAMS; i++) {
            barrier_init(shared_address(&barriers()->sums[i]), CLUSTER * SENDERS);
            barrier_init(shared_address(&barriers()->read[i]), CLUSTER * TEAM / 32);
            barrier_init(order(i), TEAM / 32);
        }
        barrier_init(shared_address(&barriers()->squares), CLUSTER);
        barrier_init(handed(), WORKERS / 32);
        barrier_init(taken(), TEAM / 32);
        barrier_init_fence();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();  // other blocks may reach our barriers once they have waited for this
}

}  // namespace quire
