// Adapters: two small products of each row's own, added to what a product has made (Hu et al. 2021, section 4.1).
//
// Rows are taken adapter by adapter, two at once where there are two, so that each matrix is read from end to end, and
// asked for ahead: a step's adapters do not stay in the caches. Sums are in float32, rounded once, into y.
// Invariant: a row's result depends on that row and its adapter alone, bit for bit, whatever the other rows, their number
// and the threads.
#include <cstring>

#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int LINES = 16, OUTPUTS = 64;  // of a tile of A, and of B: quire/kernels/lora/places.py
constexpr int TOGETHER = 2;              // rows of one adapter
constexpr int CHAINS = 4;                // sums of one line that do not wait for one another
constexpr int64_t BLOCK = 8;             // rows that a thread takes, of many
constexpr int64_t AHEAD = 4096;          // bytes from what is read to what is asked for

// Ask for the bytes that lie AHEAD of these; behind an adapter's end nobody minds.
QUIRE_INLINE void ask_ahead(const void* at, int64_t n_bytes) {
    for (int64_t i = 0; i < n_bytes; i += 64) __builtin_prefetch((const char*)at + AHEAD + i, 0, 2);
}

// inner [N, LINES] = x times a tile of A, [k, LINES].
template <class T, int N> QUIRE_INLINE void shrink_tile(const float* const* x, const T* a, int64_t k, float* const* inner) {
    constexpr int V = LINES / W;
    vf sums[CHAINS][N][V] = {};
    const auto step = [&](int64_t i, int chain) {
        UNROLL for (int v = 0; v < V; v++) {
            const vf w = load(a + i * LINES + v * W);
            UNROLL for (int r = 0; r < N; r++) sums[chain][r][v] = fma(set1(x[r][i]), w, sums[chain][r][v]);
        }
    };
    int64_t i = 0;
    for (; i + CHAINS <= k; i += CHAINS) {
        ask_ahead(a + i * LINES, CHAINS * LINES * (int64_t)sizeof(T));
        UNROLL for (int chain = 0; chain < CHAINS; chain++) step(i + chain, chain);
    }
    for (; i < k; i++) step(i, 0);
    UNROLL for (int r = 0; r < N; r++)
        UNROLL for (int v = 0; v < V; v++)
            store(inner[r] + v * W, (sums[0][r][v] + sums[1][r][v]) + (sums[2][r][v] + sums[3][r][v]));
}

// y [N, n] += inner times a tile of B, [rank, OUTPUTS], of which n outputs exist.
template <class T, int N>
QUIRE_INLINE void expand_tile(const float* const* inner, const T* b, int64_t rank, int64_t n, T* const* y) {
    constexpr int V = OUTPUTS / W;
    vf sums[N][V] = {};
    for (int64_t i = 0; i < rank; i++) {
        ask_ahead(b + i * OUTPUTS, OUTPUTS * (int64_t)sizeof(T));
        UNROLL for (int v = 0; v < V; v++) {
            const vf w = load(b + i * OUTPUTS + v * W);
            UNROLL for (int r = 0; r < N; r++) sums[r][v] = fma(set1(inner[r][i]), w, sums[r][v]);
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < V && v * W < n; v++) {
            const int live = n - v * W < W ? (int)(n - v * W) : W;
            T* const at = y[r] + v * W;
            put_lanes(at, get_lanes(at, live) + sums[r][v], live);
        }
}

// The row as floats, normed if it is to be.
template <class T> void prepare(const QuireLora& a, int64_t row, T* normed, float* to) {
    const T* x = (const T*)a.x + row * a.x_row;
    if (a.norm != nullptr) {
        norm_row<T>(x, nullptr, nullptr, (const T*)a.norm, normed, a.k, a.eps);
        x = normed;
    }
    each_vector(a.k, [&](int64_t i, int n) { put_lanes(to + i, get_lanes(x + i, n), n); });
}

// N rows that have this adapter.
template <class T, int N> void add_rows(const QuireLora& a, const QuireAdapter& adapter, const int32_t* rows) {
    const int64_t n_tiles = (adapter.n_lines + LINES - 1) / LINES, float_bytes = sizeof(float);
    const Scratch own({N * a.k * float_bytes, N * n_tiles * LINES * float_bytes, a.k * (int64_t)sizeof(T)});
    float *x[N], *inner[N];
    for (int r = 0; r < N; r++) {
        x[r] = (float*)own.piece(0) + r * a.k, inner[r] = (float*)own.piece(1) + r * n_tiles * LINES;
        prepare<T>(a, rows[r], (T*)own.piece(2), x[r]);
    }
    for (int64_t tile = 0; tile < n_tiles; tile++) {
        float* to[N];
        for (int r = 0; r < N; r++) to[r] = inner[r] + tile * LINES;
        shrink_tile<T, N>(x, (const T*)adapter.a + tile * a.k * LINES, a.k, to);
    }
    for (int64_t i = 0; i < adapter.n_parts; i++) {
        const QuireAdapterPart& part = adapter.parts[i];
        float* from[N];
        for (int r = 0; r < N; r++) from[r] = inner[r] + part.first;
        for (int64_t c = 0; c < part.n; c += OUTPUTS) {
            T* y[N];
            for (int r = 0; r < N; r++) y[r] = (T*)a.y + rows[r] * a.y_row + part.start + c;
            const int64_t n = part.n - c < OUTPUTS ? part.n - c : OUTPUTS;
            expand_tile<T, N>(from, (const T*)part.b + c * part.rank, part.rank, n, y);
        }
    }
}

// The rows that have an adapter, those of one together. ends: [n_places], behind the last of each. Returns their number.
int64_t sort(const QuireLora& a, int32_t* rows, int64_t* ends) {
    memset(ends, 0, a.n_places * sizeof(int64_t));
    const auto is_in = [&](int64_t row) { return a.places[row] >= 0 && a.adapters[a.places[row]] != nullptr; };
    for (int64_t row = 0; row < a.m; row++)
        if (is_in(row)) ends[a.places[row]]++;
    int64_t n = 0;
    for (int64_t place = 0; place < a.n_places; place++) {
        const int64_t own = ends[place];
        ends[place] = n, n += own;
    }
    for (int64_t row = 0; row < a.m; row++)
        if (is_in(row)) rows[ends[a.places[row]]++] = (int32_t)row;
    return n;
}

template <class T> void run_lora(const QuireLora& a) {
    const Scratch scratch({a.m * (int64_t)sizeof(int32_t), a.n_places * (int64_t)sizeof(int64_t)}, Use::LOOP);
    int32_t* const rows = (int32_t*)scratch.piece(0);
    const int64_t n = sort(a, rows, (int64_t*)scratch.piece(1));
    if (n == 0) return;
    const int64_t block = n <= TOGETHER * a.n_threads ? 1 : n < BLOCK * a.n_threads ? TOGETHER : BLOCK;
    const int64_t cost = (a.k + a.n) * a.adapters[a.places[rows[0]]]->n_lines / 16;  // of a row, as rows_a_chunk has it
    parallel_for((n + block - 1) / block, rows_a_chunk(cost * block), a.n_threads, [&](int64_t b) {
        const int64_t end = (b + 1) * block < n ? (b + 1) * block : n;
        for (int64_t i = b * block; i < end;) {
            const int32_t place = a.places[rows[i]];
            const bool pair = i + 1 < end && a.places[rows[i + 1]] == place;
            const int64_t next = i + (pair ? TOGETHER : 1);
            if (next < end && a.places[rows[next]] != place)  // its beginning
                ask_ahead((const char*)a.adapters[a.places[rows[next]]]->a - AHEAD, AHEAD);
            if (pair) add_rows<T, TOGETHER>(a, *a.adapters[place], rows + i);
            else add_rows<T, 1>(a, *a.adapters[place], rows + i);
            i = next;
        }
    });
}

}  // namespace
}  // namespace quire

void quire_lora(const QuireLora* args) {
    using namespace quire;
    by_dtype(args->dtype, [&](auto* type) { run_lora<std::remove_pointer_t<decltype(type)>>(*args); });
}
