// Adapters: two small products of each row's own, added to what a product has made (Hu et al. 2021, section 4.1).
//
// Sums are in float32, rounded once, into y. Invariant: a row's result depends on that row and its adapter alone, bit for
// bit, whatever the other rows, their number and the threads: rows are taken together only to read a matrix once.
#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int TOGETHER = 2;  // neighbours with one adapter
constexpr int AT_ONCE = 4;   // sums that do not wait for one another
constexpr int64_t BLOCK = 8; // rows that a thread takes, of many

// inner [N, n_lines] = x A^T for N rows.
template <class T, int N, int L>
QUIRE_INLINE void dot_lines(const T* const* x, const T* a, int64_t k, float* inner, int64_t n_lines, int64_t line) {
    vf sums[N][L] = {};
    const T* lines = a + line * k;
    each_vector(k, [&](int64_t i, int n) {
        vf given[N];
        UNROLL for (int r = 0; r < N; r++) given[r] = get_lanes(x[r] + i, n);
        UNROLL for (int j = 0; j < L; j++) {
            const vf w = get_lanes(lines + j * k + i, n);
            UNROLL for (int r = 0; r < N; r++) sums[r][j] = fma(given[r], w, sums[r][j]);
        }
    });
    for (int r = 0; r < N; r++)
        for (int j = 0; j < L; j++) inner[r * n_lines + line + j] = hsum(sums[r][j]);
}

template <class T, int N> void shrink(const T* const* x, const T* a, int64_t k, int64_t n_lines, float* inner) {
    int64_t line = 0;
    for (; line + AT_ONCE <= n_lines; line += AT_ONCE) dot_lines<T, N, AT_ONCE>(x, a, k, inner, n_lines, line);
    for (; line < n_lines; line++) dot_lines<T, N, 1>(x, a, k, inner, n_lines, line);
}

// y [N, n] += inner B^T of one part, b [rank, n]. C vectors of n_live lanes from `column` on.
template <class T, int N, int C>
QUIRE_INLINE void add_columns(
    const QuireAdapterPart& part, const float* inner, int64_t n_lines, T* const* y, int64_t column, int n_live) {
    vf sums[N][C] = {};
    for (int64_t rank = 0; rank < part.rank; rank++) {
        const T* b = (const T*)part.b + rank * part.n + column;
        UNROLL for (int j = 0; j < C; j++) {
            const vf w = get_lanes(b + j * W, n_live);
            UNROLL for (int r = 0; r < N; r++)
                sums[r][j] = fma(set1(inner[r * n_lines + part.first + rank]), w, sums[r][j]);
        }
    }
    for (int r = 0; r < N; r++)
        for (int j = 0; j < C; j++) {
            T* const at = y[r] + part.start + column + j * W;
            put_lanes(at, get_lanes(at, n_live) + sums[r][j], n_live);
        }
}

template <class T, int N>
void expand(const QuireAdapterPart& part, const float* inner, int64_t n_lines, T* const* y) {
    int64_t column = 0;
    for (; column + AT_ONCE * W <= part.n; column += AT_ONCE * W)
        add_columns<T, N, AT_ONCE>(part, inner, n_lines, y, column, W);
    for (; column + W <= part.n; column += W) add_columns<T, N, 1>(part, inner, n_lines, y, column, W);
    if (column < part.n) add_columns<T, N, 1>(part, inner, n_lines, y, column, (int)(part.n - column));
}

// N rows from `row` on, which have this adapter.
template <class T, int N> void add_rows(const QuireLora& a, const QuireAdapter& adapter, int64_t row) {
    const int64_t normed_bytes = a.norm != nullptr ? N * a.k * (int64_t)sizeof(T) : 0;
    const Scratch own({N * adapter.n_lines * (int64_t)sizeof(float), normed_bytes});
    float* inner = (float*)own.piece(0);
    T* y[N];
    const T* x[N];
    for (int r = 0; r < N; r++) {
        y[r] = (T*)a.y + (row + r) * a.y_row, x[r] = (const T*)a.x + (row + r) * a.x_row;
        if (a.norm == nullptr) continue;
        T* normed = (T*)own.piece(1) + r * a.k;
        norm_row<T>(x[r], nullptr, nullptr, (const T*)a.norm, normed, a.k, a.eps);
        x[r] = normed;
    }
    shrink<T, N>(x, (const T*)adapter.a, a.k, adapter.n_lines, inner);
    for (int64_t i = 0; i < adapter.n_parts; i++) expand<T, N>(adapter.parts[i], inner, adapter.n_lines, y);
}

// Of the row's adapter, or null.
const QuireAdapter* adapter_of(const QuireLora& a, int64_t row) {
    return a.places[row] < 0 ? nullptr : a.adapters[a.places[row]];
}

template <class T> void run_lora(const QuireLora& a) {
    int64_t cost = 0;  // of a row
    for (int64_t row = 0; row < a.m && cost == 0; row++)
        if (const QuireAdapter* one = adapter_of(a, row)) cost = one->n_lines * (a.k + a.n / one->n_parts);
    if (cost == 0) return;
    const int64_t block = a.m < BLOCK * a.n_threads ? 1 : BLOCK;
    parallel_for((a.m + block - 1) / block, rows_a_chunk(cost * block / 8), a.n_threads, [&](int64_t b) {
        const int64_t end = (b + 1) * block < a.m ? (b + 1) * block : a.m;
        for (int64_t row = b * block; row < end;) {
            const QuireAdapter* adapter = adapter_of(a, row);
            const bool pair = row + 1 < end && a.places[row + 1] == a.places[row];
            if (adapter != nullptr && pair) add_rows<T, TOGETHER>(a, *adapter, row);
            else if (adapter != nullptr) add_rows<T, 1>(a, *adapter, row);
            row += pair ? TOGETHER : 1;
        }
    });
}

}  // namespace
}  // namespace quire

void quire_lora(const QuireLora* args) {
    using namespace quire;
    by_dtype(args->dtype, [&](auto* type) { run_lora<std::remove_pointer_t<decltype(type)>>(*args); });
}
