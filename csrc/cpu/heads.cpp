// Products of each head by itself, and functions of elements, for rows that are alone.
//
// Invariant: an element is summed in one order that depends on the matrix alone; so rows are computed several at once,
// and the bits of none say with which.
#include <cmath>

#include "functions.h"
#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int ROWS = 4, VECTORS = 4;

template <class T> struct Head {
    const T *x, *matrix;  // of the first row
    T* out;
    const QuireHeads& all;
};

// R rows, x float32 [R, k], times N vectors of columns of a matrix [k, m]; a lone vector has `live` lanes.
template <class T, int R, int N> void columns(const Head<T>& h, const float* x, int64_t at, int live) {
    const int lanes = N == 1 ? live : W;
    vf sum[R][N] = {};
    for (int64_t i = 0; i < h.all.k; i++)
        for (int j = 0; j < N; j++) {
            const vf weight = get_lanes(h.matrix + i * h.all.matrix_row + at + j * W, lanes);
            for (int r = 0; r < R; r++) sum[r][j] = fma(set1(x[r * h.all.k + i]), weight, sum[r][j]);
        }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < N; j++) put_lanes(h.out + r * h.all.out_row + at + j * W, sum[r][j], lanes);
}

// R rows times row `at` of a matrix [m, k].
template <class T, int R> void dots(const Head<T>& h, int64_t at) {
    vf sum[R] = {};
    each_vector(h.all.k, [&](int64_t i, int n) {
        const vf weight = get_lanes(h.matrix + at * h.all.matrix_row + i, n);
        for (int r = 0; r < R; r++) sum[r] = fma(get_lanes(h.x + r * h.all.x_row + i, n), weight, sum[r]);
    });
    for (int r = 0; r < R; r++) {
        T one[W];
        store(one, set1(hsum(sum[r])));
        h.out[r * h.all.out_row + at] = one[0];
    }
}

template <class T, int R> void rows(const Head<T>& h) {
    const int64_t m = h.all.m;
    if (h.all.transposed) {
        for (int64_t at = 0; at < m; at++) dots<T, R>(h, at);
        return;
    }
    const int64_t k = h.all.k;
    const Scratch scratch({R * k * (int64_t)sizeof(float)});
    float* x = (float*)scratch.piece(0);
    for (int r = 0; r < R; r++)
        each_vector(k, [&](int64_t i, int n) { put_lanes(x + r * k + i, get_lanes(h.x + r * h.all.x_row + i, n), n); });
    int64_t at = 0;
    for (; at + VECTORS * W <= m; at += VECTORS * W) columns<T, R, VECTORS>(h, x, at, W);
    for (; at < m; at += W) columns<T, R, 1>(h, x, at, at + W <= m ? W : (int)(m - at));
}

QUIRE_INLINE vf apply(int function, vf x) {
    if (function == QUIRE_SIGMOID_OF) return quire_sigmoid(x);
    if (function == QUIRE_EXP_OF) return quire_exp(x);
    if (function == QUIRE_SILU_OF) return x * quire_sigmoid(x);
    if (function == QUIRE_GELU_TANH_OF) return x * quire_sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    // log(1 + e^x), as log1p keeps what is small; x itself where it is large
    return each_lane(x, [](float a) { return a > 20.f ? a : std::log1p(std::exp(a)); });
}

}  // namespace
}  // namespace quire

using namespace quire;

void quire_heads(const QuireHeads* args) {
    const QuireHeads& a = *args;
    const int64_t n_blocks = (a.n + ROWS - 1) / ROWS, n_items = n_blocks * a.n_heads;
    by_dtype(a.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(n_items, rows_a_chunk(ROWS * a.k * a.m), a.n_threads, [&](int64_t i) {
            const int64_t head = i / n_blocks, row = i % n_blocks * ROWS;
            const Head<T> h{
                (const T*)a.x + row * a.x_row + head * a.x_head, (const T*)a.matrices + head * a.matrix_head,
                (T*)a.out + row * a.out_row + head * a.out_head, a};
            const int64_t left = a.n - row;
            if (left >= ROWS) rows<T, ROWS>(h);
            else if (left == 3) rows<T, 3>(h);
            else if (left == 2) rows<T, 2>(h);
            else rows<T, 1>(h);
        });
    });
}

void quire_apply(int dtype, int function, const void* x, int64_t x_row, void* out, int64_t n, int64_t f, int n_threads) {
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(n, rows_a_chunk(f), n_threads, [&](int64_t i) {
            each_vector(f, [&](int64_t j, int live) {
                put_lanes((T*)out + i * f + j, apply(function, get_lanes((const T*)x + i * x_row + j, live)), live);
            });
        });
    });
}
