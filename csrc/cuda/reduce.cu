// Sums over the ranks of one host, of messages up to 64 MiB; longer ones take several launches. In place, or added to
// the residual stream, whose RMS norm may be wanted at once. Hopper; QUIRE_RANKS ranks; types in `quire_reduce`.
//
//   one shot   every rank sends all it has to all others, and sums everything. One hop; (n - 1) times the bytes
//   two shots  a rank sums the rows that it owns and sends the sums to all. Two hops; 2 (n - 1) / n times the bytes
//
// The first hop may have been made by the product whose terms these are (gemm/wide_sent.h): then all are in `sent`.
//
// Sums are float32 in the order of ranks, rounded once: the same bits on every rank, and whichever way they went. The
// stream is rounded again, as the separate operations do.
//
// A grid works on rows of cells of 16 bytes. A row without a norm is any part of the message; with one, it is a row of
// the matrix, cut among the blocks of a cluster. A thread has one cell of each row of its block. Of two shots these are
// rounds of N rows: all of a thread, which keeps much on its way, or, of short messages, each of a group of threads of
// its own. One thread makes the norms of N rows one after another, which takes 4 us longer.
#include "reduce/numbers.h"
#include "reduce/peers.h"
#include "reduce/row_sums.h"

struct QuireReduceArgs {       // _Args in quire/kernels/reduce/hopper.py
    void* x;                   // contiguous, as all below; takes the sum where there is no residual; not read if sent
    void* residual;            // null: there is none
    const void* weight;        // null: no norm
    void* normed;
    int64_t n_cells, timeout_ns;
    int32_t row_cells, h;
    float eps;
    int32_t dtype;             // 0: bfloat16, 1: float16, 2: float32
    int32_t two_shots;
    int32_t sent;              // all terms are
};

namespace quire {
namespace {

constexpr int N = QUIRE_RANKS;
static_assert(N >= 2 && N <= QUIRE_MAX_RANKS, "as many ranks as peers.h has room for");
constexpr int MAX_THREADS = N == 2 ? 1024 : 512;  // of a block: each needs registers for a cell of every rank
constexpr int MAX_SHORT_THREADS = N <= 4 ? 1024 : 512;  // where each has a row of a round
constexpr int MOST_SHORT_ROUNDS = 8;                    // of a block, and there
constexpr int MAX_CLUSTER = 8;
constexpr int MAX_WARPS = MAX_CLUSTER * MAX_THREADS / 32;  // of a row
constexpr int MIN_PLAIN_THREADS = 128, MAX_PLAIN_THREADS = 512;
constexpr int MIN_THREADS = 64;  // of a block with a part of a row
constexpr int SENT_SIDE = 3;     // log2 of the rows side by side that have one owner, as products send them

struct Call {
    QuireReduceArgs args;
    int32_t n_rows, n_rounds, n_slices;  // n_rounds: of N rows in two shots; n_slices: blocks of a row, a cluster
    int32_t n_groups;                    // of threads of a block, blockDim.y: N or 1 have the rows of a round
    float per_element;                   // 1 / h

    // Two shots: the row of a round that a rank owns.
    template <bool IS_SENT> __device__ __forceinline__ int row(int round, int owner) const {
        constexpr int side = IS_SENT ? SENT_SIDE : 0;
        return (((round >> side) * N + owner) << side) + (round & ((1 << side) - 1));
    }
};

// ---- numbers -------------------------------------------------------------------------------------------------------

template <class T> struct Wide {  // a cell in float32
    static constexpr int OF_WORD = Numbers<T>::OF_WORD, WIDTH = 4 * OF_WORD;
    float x[WIDTH];

    __device__ __forceinline__ void operator=(const int4& cell) {
        const int words[] = {cell.x, cell.y, cell.z, cell.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) Numbers<T>::widen(x + i * OF_WORD, static_cast<uint32_t>(words[i]));
    }
    __device__ __forceinline__ void operator+=(const int4& cell) {
        Wide more;
        more = cell;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x[i] += more.x[i];
    }
    __device__ __forceinline__ int4 narrow() const {
        return make_int4(Numbers<T>::narrow(x), Numbers<T>::narrow(x + OF_WORD), Numbers<T>::narrow(x + 2 * OF_WORD),
                         Numbers<T>::narrow(x + 3 * OF_WORD));
    }
};

// In the order of ranks.
template <class T> __device__ __forceinline__ int4 sum_of(const int4 (&cells)[N]) {
    Wide<T> sum;
    sum = cells[0];
#pragma unroll
    for (int i = 1; i < N; ++i) sum += cells[i];
    return sum.narrow();
}

// ---- what becomes of a sum -----------------------------------------------------------------------------------------

__device__ __forceinline__ const int4* cell_at(const void* base, int64_t cell) {
    return static_cast<const int4*>(base) + cell;
}

// The place of a thread in every row of its block, or of its group.
struct Place {
    int column, first, step;   // rows, or rounds of N rows, of this block: every `step`-th from `first` on
    bool is_live;              // there is such a column

    __device__ __forceinline__ explicit Place(const Call& call)
        : column(blockIdx.x % call.n_slices * blockDim.x + threadIdx.x), first(blockIdx.x / call.n_slices),
          step(gridDim.x / call.n_slices), is_live(column < call.args.row_cells) {}
    __device__ __forceinline__ int64_t cell(const Call& call, int row) const {
        return static_cast<int64_t>(row) * call.args.row_cells + column;
    }
    // There is a cell of that row here; the last row of a message without norm may be short.
    __device__ __forceinline__ bool has(const Call& call, int row) const {
        return is_live && row < call.n_rows && cell(call, row) < call.args.n_cells;
    }
};

// What the sum is added to; not from an L1 cache where no grid was waited for.
template <bool IS_SENT> __device__ __forceinline__ int4 load_stream(const Call& call, int64_t cell) {
    const int4* from = cell_at(call.args.residual, cell);
    return IS_SENT ? load_cell(from) : load_here(from);
}

// Stores the sum, or the stream with the sum added. `before`: the stream's cell. Returns what is stored.
template <class T>
__device__ __forceinline__ int4 put(const Call& call, int64_t cell, const int4& sum, const int4& before) {
    int4 stored = sum;
    if (call.args.residual) {
        Wide<T> x;
        x = before;
        x += sum;
        stored = x.narrow();
    }
    int4* to = static_cast<int4*>(call.args.residual ? call.args.residual : call.args.x);
    to[cell] = stored;
    return stored;
}

template <class T> __device__ __forceinline__ float square_sum(const int4& cell) {
    Wide<T> x;
    x = cell;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < Wide<T>::WIDTH; ++i) sum += x.x[i] * x.x[i];
    return sum;
}

// x times the norm's factor, rounded, times its weight.
template <class T>
__device__ __forceinline__ void put_normed(const Call& call, int64_t cell, const int4& stored, float square_sum,
                                           const int4& weight) {
    const float factor = rsqrtf(square_sum * call.per_element + call.args.eps);
    Wide<T> x, weights;
    x = stored;
    weights = weight;
#pragma unroll
    for (int i = 0; i < Wide<T>::WIDTH; ++i) x.x[i] *= factor;
    x = x.narrow();
#pragma unroll
    for (int i = 0; i < Wide<T>::WIDTH; ++i) x.x[i] *= weights.x[i];
    static_cast<int4*>(call.args.normed)[cell] = x.narrow();
}

// Where the cells of other ranks come for this one to sum.
struct Parts {
    int4* first;   // of rank 0
    int64_t step;  // cells to the next rank's

    __device__ __forceinline__ void receive_from(int4* (&from)[N], int64_t cell) const {
#pragma unroll
        for (int i = 0; i < N; ++i) from[i] = first + i * step + cell;
    }
};

// part: the cell among parts; cell: that of x, which this rank has itself unless all are sent. False: given up.
template <bool IS_SENT>
__device__ __forceinline__ bool receive_parts(const QuirePeers& peers, const Call& call, uint32_t number,
                                              const Parts& parts, int64_t part, int64_t cell, int4 (&cells)[N]) {
    int4 own = no_cell(), *from[N];
    if constexpr (!IS_SENT) own = sendable(load_here(cell_at(call.args.x, cell)));
    parts.receive_from(from, part);
#pragma unroll
    for (int i = 0; i < N; ++i) cells[i] = i == peers.rank ? own : no_cell();
    return receive<N>(peers, call.args.timeout_ns, number, from, cells);
}

// What is before the first wait in both kernels: only constants are read.
//
// Sums of what products have sent do not wait for the product, but for each term: when its blocks let this grid start
// they have waited for all before it, and read which call it is. These sums wait at their end, for those behind them.
template <bool NORM, bool IS_SENT, int ALL>
__device__ __forceinline__ int4 begin(const Call& call, const Place& place, OfWarps<ALL, MAX_WARPS>& of_warps) {
    let_next_grid_start();
    int4 weight = make_int4(0, 0, 0, 0);
    if (NORM && place.is_live) weight = load_here(cell_at(call.args.weight, place.column));
    if (NORM && call.n_slices > 1) {  // all its blocks are there: their memory may be written
        if (is_first_thread()) of_warps.init();
        cluster_arrive_relaxed();
        cluster_wait();
    }
    if (!IS_SENT) wait_for_previous_grid();
    return weight;
}

// Behind all that a block's threads read of counts.
__device__ __forceinline__ void count_call(const QuirePeers& peers, uint32_t number, bool is_of_sent) {
    __syncthreads();
    if (is_first_thread()) take_turn(peers, number, is_of_sent);
}

// ---- one shot ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void send_row(const QuirePeers& peers, const Call& call, const Place& place,
                                         uint32_t number, int row, bool is_void) {
    if (!place.has(call, row)) return;
    const int64_t cell = place.cell(call, row);
    const int4 own = sendable(load_here(cell_at(call.args.x, cell)));  // on its way before `is_void` is known
    if (is_void) return;
#pragma unroll
    for (int i = 1; i < N; ++i) store_cell(part_of(peers, (peers.rank + i) % N, number, peers.rank, cell), own);
}

template <class T, bool NORM, bool IS_SENT>
__global__ void __launch_bounds__(MAX_THREADS)
    one_shot_kernel(const __grid_constant__ QuirePeers peers, const __grid_constant__ Call call) {
    __shared__ OfWarps<1, MAX_WARPS> of_warps;
    const Place place(call);
    const int4 weight = begin<NORM, IS_SENT>(call, place, of_warps);
    const uint32_t number = number_of_call(peers);
    Parts parts{part_of(peers, peers.rank, number, 0, 0), peers.part_cells};
    if constexpr (IS_SENT) {
        parts = {sent_of(peers, peers.rank, sent_parity(peers), 0, 0), peers.sent_cells};
    } else {
        const bool is_void = has_given_up(peers);
        for (int row = place.first; row < call.n_rows; row += place.step)
            send_row(peers, call, place, number, row, is_void);
    }
    count_call(peers, number, IS_SENT);
    int index = 0;
    for (int row = place.first; row < call.n_rows; row += place.step, ++index) {
        const int64_t cell = place.cell(call, row);
        const bool is_live = place.has(call, row);
        int4 stored = make_int4(0, 0, 0, 0);
        if (is_live) {
            int4 before = stored, cells[N];
            if (call.args.residual) before = load_stream<IS_SENT>(call, cell);
            receive_parts<IS_SENT>(peers, call, number, parts, cell, cell, cells);
            stored = put<T>(call, cell, sum_of<T>(cells), before);
        }
        if constexpr (NORM) {
            float sums[] = {square_sum<T>(stored)};
            sum_rows(sums, of_warps, call.n_slices, index);
            if (is_live) put_normed<T>(call, cell, stored, sums[0], weight);
        }
    }
    if (IS_SENT) wait_for_previous_grid();
}

// ---- two shots: row r is summed by rank r % N, as row r / N of its parts; if sent, the same of eight rows -----------

// Which of a round's rows is the i-th of a thread, which has ROWS of them: N, or one.
template <int ROWS> __device__ __forceinline__ int nth(int i) { return ROWS == 1 ? threadIdx.y : i; }

// Parts of a round to their owners.
template <int ROWS>
__device__ __forceinline__ void send_parts(const QuirePeers& peers, const Call& call, const Place& place,
                                           uint32_t parity, int round, bool is_void) {
    const int64_t part = place.cell(call, round);
    int4 cells[ROWS];
    bool is_sent[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int owner = (peers.rank + nth<ROWS>(i)) % N, row = call.row<false>(round, owner);
        is_sent[i] = nth<ROWS>(i) > 0 && place.has(call, row);  // the first is its own
        if (is_sent[i]) cells[i] = load_here(cell_at(call.args.x, place.cell(call, row)));
    }
    if (is_void) return;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int owner = (peers.rank + nth<ROWS>(i)) % N;
        if (is_sent[i]) store_cell(sent_of(peers, owner, parity, peers.rank, part), sendable(cells[i]));
    }
}

// The sum of the row that this rank owns, to all.
template <class T, bool IS_SENT, int ROWS>
__device__ __forceinline__ void send_sum(const QuirePeers& peers, const Call& call, const Place& place,
                                         const Parts& parts, uint32_t number, int round) {
    const int row = call.row<IS_SENT>(round, peers.rank);
    if ((ROWS == 1 && threadIdx.y > 0) || !place.has(call, row)) return;  // by those who have sent nothing
    const int64_t cell = place.cell(call, row);
    int4 cells[N];
    if (!receive_parts<IS_SENT>(peers, call, number, parts, place.cell(call, round), cell, cells)) return;
    const int4 sum = sendable(sum_of<T>(cells));
#pragma unroll
    for (int i = 1; i <= N; ++i) store_cell(whole_of(peers, (peers.rank + i) % N, number, cell), sum);
}

// What becomes of the sums of a round.
template <class T, bool NORM, bool IS_SENT, int ROWS>
__device__ __forceinline__ void finish(const QuirePeers& peers, const Call& call, const Place& place, uint32_t number,
                                       int round, int index, const int4& weight, OfWarps<N, MAX_WARPS>& of_warps) {
    const int4 none = make_int4(0, 0, 0, 0);
    int4 before[ROWS], stored[ROWS], *from[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = call.row<IS_SENT>(round, nth<ROWS>(i));
        const int64_t cell = place.cell(call, row);
        const bool is_live = place.has(call, row);
        from[i] = whole_of(peers, peers.rank, number, cell);
        stored[i] = is_live ? no_cell() : none;
        before[i] = none;
        if (is_live && call.args.residual) before[i] = load_stream<IS_SENT>(call, cell);
    }
    // Longer: who lacks a part is to say so first.
    receive<ROWS>(peers, 2 * call.args.timeout_ns, number, from, stored, nth<ROWS>(0));
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = call.row<IS_SENT>(round, nth<ROWS>(i));
        if (place.has(call, row)) stored[i] = put<T>(call, place.cell(call, row), stored[i], before[i]);
    }
    if constexpr (NORM) {
        float sums[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sums[i] = square_sum<T>(stored[i]);
        sum_rows(sums, of_warps, call.n_slices, index);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = call.row<IS_SENT>(round, nth<ROWS>(i));
            if (place.has(call, row)) put_normed<T>(call, place.cell(call, row), stored[i], sums[i], weight);
        }
    }
}

// A round's parts are on their way while the one before is summed, and its sums while the one before that is finished.
template <class T, bool NORM, bool IS_SENT, int ROWS>
__global__ void __launch_bounds__(ROWS == 1 ? MAX_SHORT_THREADS : MAX_THREADS)
    two_shots_kernel(const __grid_constant__ QuirePeers peers, const __grid_constant__ Call call) {
    __shared__ OfWarps<N, MAX_WARPS> of_warps;
    const Place place(call);
    const int4 weight = begin<NORM, IS_SENT>(call, place, of_warps);
    const uint32_t number = number_of_call(peers);
    const bool is_void = has_given_up(peers);
    const uint32_t parity = sent_parity(peers);
    const Parts parts{sent_of(peers, peers.rank, parity, 0, 0), peers.sent_cells};
    count_call(peers, number, true);
    constexpr int lag = IS_SENT ? 0 : 1;
    const int step = place.step;
    for (int index = -lag - 1, round = place.first + index * step; round < call.n_rounds; ++index, round += step) {
        const int summed = round + step, parted = summed + lag * step;
        if (!IS_SENT && parted < call.n_rounds) send_parts<ROWS>(peers, call, place, parity, parted, is_void);
        if (index >= -1 && summed < call.n_rounds)
            send_sum<T, IS_SENT, ROWS>(peers, call, place, parts, number, summed);
        if (index < 0) continue;
        if (ROWS == 1) __syncthreads();  // who lacks a part has said so
        finish<T, NORM, IS_SENT, ROWS>(peers, call, place, number, round, index, weight, of_warps);
    }
    if (IS_SENT) wait_for_previous_grid();
}

// ---- host ----------------------------------------------------------------------------------------------------------

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Blocks of a row: as many as keep the GPU busy, whole warps each; 0: the row is too long.
int slices_of(int row_cells, int n_units, int max_threads) {
    int most = 0;
    for (int n = 1; n <= MAX_CLUSTER; n *= 2) {
        const int n_threads = ceil_div(row_cells, n);
        if (n_threads > max_threads) continue;
        const bool fits = n_threads >= MIN_THREADS && row_cells % (32 * n) == 0 && n_units * n <= QUIRE_MAX_BLOCKS;
        if (most == 0 || fits) most = n;
    }
    return most;
}

// Cells of a row of a message without norm: as few as let one round of blocks take all, for all are to send at once.
int plain_cells(const QuireReduceArgs& args) {
    const int64_t n_blocks = static_cast<int64_t>(QUIRE_MAX_BLOCKS) * (args.two_shots ? N : 1);
    int n = MIN_PLAIN_THREADS;
    while (n < MAX_PLAIN_THREADS && args.n_cells > n * n_blocks) n *= 2;
    return n;
}

// Rows and slices of a call, and who has the rows of a round: where a block has few rounds, a group each.
// False: a row is too long.
bool divide(Call& call) {
    QuireReduceArgs& args = call.args;
    const bool is_of_rows = args.weight || args.sent;  // else of any parts
    if (!is_of_rows) args.row_cells = plain_cells(args);
    call.n_rows = ceil_div(args.n_cells, args.row_cells);
    const int side = args.sent ? 1 << SENT_SIDE : 1;
    call.n_rounds = ceil_div(call.n_rows, N * side) * side;
    const int n_units = args.two_shots ? call.n_rounds : call.n_rows;
    const auto cut = [&](int max_threads) {
        const bool fits = args.row_cells <= max_threads;
        return is_of_rows ? slices_of(args.row_cells, n_units, max_threads) : fits ? 1 : 0;
    };
    const int n_short = args.two_shots ? cut(MAX_SHORT_THREADS / N / 32 * 32) : 0;
    const bool is_short = n_short > 0 && n_units * n_short <= MOST_SHORT_ROUNDS * QUIRE_MAX_BLOCKS;
    call.n_groups = is_short ? N : 1;
    call.n_slices = is_short ? n_short : cut(MAX_THREADS);
    return call.n_slices > 0;
}

template <class T, bool NORM, bool IS_SENT> auto kernel_of(const Call& call) {
    if (!call.args.two_shots) return one_shot_kernel<T, NORM, IS_SENT>;
    return call.n_groups == 1 ? two_shots_kernel<T, NORM, IS_SENT, N> : two_shots_kernel<T, NORM, IS_SENT, 1>;
}
template <class T, bool NORM> auto kernel_of(const Call& call) {
    return call.args.sent ? kernel_of<T, NORM, true>(call) : kernel_of<T, NORM, false>(call);
}

template <class T> cudaError_t run(const QuirePeers& peers, const Call& call, void* stream) {
    const bool is_normed = call.args.weight != nullptr;
    const int n_units = call.args.two_shots ? call.n_rounds : call.n_rows;
    const bool has_room = !call.args.two_shots || call.args.n_cells <= peers.whole_cells;
    const int64_t room = call.args.sent || call.args.two_shots ? peers.sent_cells : peers.part_cells;
    if (static_cast<int64_t>(n_units) * call.args.row_cells > room || !has_room) return cudaErrorInvalidValue;
    const auto kernel = is_normed ? kernel_of<T, true>(call) : kernel_of<T, false>(call);
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = call.n_slices;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    const int most_units = QUIRE_MAX_BLOCKS / call.n_slices;
    config.gridDim = dim3((n_units < most_units ? n_units : most_units) * call.n_slices);
    config.blockDim = dim3(ceil_div(ceil_div(call.args.row_cells, call.n_slices), 32) * 32, call.n_groups);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = is_normed && call.n_slices > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, peers, call);
}

}  // namespace
}  // namespace quire

extern "C" int quire_peers_take(int64_t n_bytes, void** base, int64_t** fault, void* handle) {
    return quire::take_shared(n_bytes, quire::CONTROL_BYTES, base, fault, handle);
}
extern "C" int quire_peers_map(const void* handle, void** base) { return quire::map_shared(handle, base); }

// Beside kernels that wait: neither they nor later ones wait again. Results are void then.
extern "C" int quire_peers_give_up(const QuirePeers* peers) {
    return quire::write_word(reinterpret_cast<uint32_t*>(peers->base[peers->rank]) + quire::GIVEN_UP_WORD, 1);
}

// What `map` gave; null is nothing.
extern "C" void quire_peers_unmap(QuirePeers* peers) {
    for (int i = 0; i < peers->size; ++i) {
        if (i == peers->rank || !peers->base[i]) continue;
        quire::leave_mapped(peers->base[i]);
        peers->base[i] = nullptr;
    }
}
// And what `take` gave.
extern "C" void quire_peers_leave(QuirePeers* peers) {
    quire_peers_unmap(peers);
    quire::leave_own(peers->base[peers->rank], peers->fault);
}

extern "C" int quire_reduce(const QuirePeers* peers, const QuireReduceArgs* args, void* stream) {
    using namespace quire;
    if (peers->size != N || args->n_cells <= 0) return cudaErrorInvalidValue;
    const bool is_of_rows = args->weight || args->sent;
    if (is_of_rows && (args->row_cells <= 0 || args->n_cells % args->row_cells)) return cudaErrorInvalidValue;
    Call call{*args, 0, 0, 1, 1, 1.f / args->h};
    if (!divide(call)) return cudaErrorInvalidValue;
    if (args->dtype == 0) return run<BFloat16>(*peers, call, stream);
    return args->dtype == 1 ? run<Float16>(*peers, call, stream) : run<float>(*peers, call, stream);
}
