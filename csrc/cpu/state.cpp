// Recurrent mixers token after token: convolutions, the scan of Mamba-2, the gated delta rule, and the gated norm.
//
// Invariant: a row is computed from its line and its own inputs in one order, so its bits depend neither on the other
// rows nor on where a step, a piece or a snapshot cuts its sequence.
#include <cmath>

#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int BLOCK = 4;  // vectors of a state that stay in registers, or sums side by side

QUIRE_INLINE vf silu(vf x) { return x / (exp2(x * -1.4426950408889634f) + 1.f); }

// The rows of a span, and calls keep(line) behind each piece whose state is kept.
struct Rows {
    const QuireStateSpans& all;
    int64_t span;

    int64_t first() const { return all.piece_ptr == nullptr ? span : all.row_ptr[all.piece_ptr[span]]; }
    int64_t end() const { return all.piece_ptr == nullptr ? span + 1 : all.row_ptr[all.piece_ptr[span + 1]]; }

    template <class Row, class Keep> void each(const Row& row, const Keep& keep) const {
        if (all.piece_ptr == nullptr) return row(span);
        for (int64_t piece = all.piece_ptr[span]; piece < all.piece_ptr[span + 1]; piece++) {
            for (int64_t i = all.row_ptr[piece]; i < all.row_ptr[piece + 1]; i++) row(i);
            if (all.keep[piece] >= 0) keep((int64_t)all.keep[piece], (int64_t)all.row_ptr[piece + 1]);
        }
    }
};

// A span's columns `at` .. at + n - 1, at most a vector.
template <class T> void convolve_lanes(const QuireConvolve& c, int64_t span, int64_t at, int n) {
    const Rows rows{*c.spans, span};
    const int64_t first = rows.first(), end = rows.end(), line_size = (c.k - 1) * c.n_columns;
    const bool fresh = c.spans->fresh[span] != 0;
    T* line = (T*)c.state + c.spans->lines[span] * line_size + at;
    const auto seen = [&](int64_t row) {  // the input at a row of the step, or the line's where it is before the first
        if (row >= first) return get_lanes((const T*)c.x + row * c.x_row + at, n);
        return fresh ? vf{} : get_lanes(line + (c.k - 1 + row - first) * c.n_columns, n);
    };
    const auto leave = [&](T* to, int64_t behind) {  // the oldest first: each is read before it is written
        for (int64_t j = 0; j < c.k - 1; j++) put_lanes(to + j * c.n_columns, seen(behind - (c.k - 1) + j), n);
    };
    rows.each(
        [&](int64_t row) {
            vf y = vf{};
            for (int64_t j = 0; j < c.k; j++)
                y = fma(get_lanes(c.taps + j * c.n_columns + at, n), seen(row - (c.k - 1) + j), y);
            if (c.bias != nullptr) y += get_lanes(c.bias + at, n);
            put_lanes((T*)c.out + row * c.n_columns + at, c.silu ? silu(y) : y, n);
        },
        [&](int64_t kept, int64_t behind) { leave((T*)c.state + kept * line_size + at, behind); });
    leave(line, end);
}

// Where a head's state lies, begun: zeros where its span is fresh.
float* begin(const QuireStateSpans& spans, int64_t span, float* state, int64_t n_heads, int64_t head, int64_t size) {
    float* own = state + (spans.lines[span] * n_heads + head) * size;
    if (spans.fresh[span]) memset(own, 0, size * sizeof(float));
    return own;
}

template <class T> void widen_row(const T* x, float* out, int64_t n) {
    each_vector(n, [&](int64_t i, int live) { put_lanes(out + i, get_lanes(x + i, live), live); });
}

template <class T> void scan_ssm_head(const QuireScanSsm& a, int64_t span, int64_t head) {
    const int64_t size = a.p * a.s, group = head / (a.n_heads / a.n_groups), bytes = a.s * (int64_t)sizeof(float);
    const Scratch scratch({bytes, bytes});
    float *b = (float*)scratch.piece(0), *c = (float*)scratch.piece(1);
    float* own = begin(*a.spans, span, a.state, a.n_heads, head, size);
    const Rows rows{*a.spans, span};
    rows.each(
        [&](int64_t row) {
            widen_row((const T*)a.b + row * a.b_row + group * a.s, b, a.s);
            widen_row((const T*)a.c + row * a.c_row + group * a.s, c, a.s);
            const T* x = (const T*)a.x + row * a.x_row + head * a.p;
            const float step = a.steps[row * a.n_heads + head];
            const vf decay = set1(a.decays[row * a.n_heads + head]), skip = set1(a.skip[head]);
            T* out = (T*)a.out + (row * a.n_heads + head) * a.p;
            each_vector(a.p, [&](int64_t first, int live) {
                const vf value = get_lanes(x + first, live);
                float y[W] = {};
                for (int i = 0; i < live; i++) {
                    float* h = own + (first + i) * a.s;
                    const vf moved = set1(value[i] * step);
                    vf sum = vf{};
                    each_vector(a.s, [&](int64_t j, int n) {
                        const vf next = fma(moved, get_lanes(b + j, n), get_lanes(h + j, n) * decay);
                        put_lanes(h + j, next, n);
                        sum = fma(next, get_lanes(c + j, n), sum);
                    });
                    y[i] = hsum(sum);
                }
                put_lanes(out + first, fma(skip, value, load(y)), live);
            });
        },
        [&](int64_t kept, int64_t) { memcpy(a.state + (kept * a.n_heads + head) * size, own, size * sizeof(float)); });
}

// A row of d numbers over its length, times a factor.
template <class T> void unit_row(const T* x, float* out, int64_t d, float eps, float factor) {
    vf squares = vf{};
    each_vector(d, [&](int64_t i, int n) {
        const vf v = get_lanes(x + i, n);
        squares = fma(v, v, squares);
    });
    const vf scale = set1(factor / __builtin_sqrtf(hsum(squares) + eps));
    each_vector(d, [&](int64_t i, int n) { put_lanes(out + i, get_lanes(x + i, n) * scale, n); });
}

// N vectors of a head's values, from number `first` on; a lone one has `live` lanes.
template <class T, int N> void delta_values(
    const QuireScanDelta& a, float* own, const float* q, const float* k, int64_t row, int64_t head, int64_t first,
    int live) {
    const int64_t at = row * a.n_heads + head;
    const T* v = (const T*)a.v + row * a.v_row + head * a.e + first;
    const int lanes = N == 1 ? live : W;
    const vf decay = set1(a.decays[at]), beta = set1(a.betas[at]);
    vf known[N], error[N], y[N];
    for (int j = 0; j < N; j++) known[j] = y[j] = vf{};
    for (int64_t i = 0; i < a.d; i++)
        for (int j = 0; j < N; j++)
            known[j] = fma(set1(k[i]), get_lanes(own + i * a.e + first + j * W, lanes), known[j]);
    for (int j = 0; j < N; j++) error[j] = (get_lanes(v + j * W, lanes) - known[j] * decay) * beta;
    for (int64_t i = 0; i < a.d; i++)
        for (int j = 0; j < N; j++) {
            float* s = own + i * a.e + first + j * W;
            const vf next = fma(set1(k[i]), error[j], get_lanes(s, lanes) * decay);
            put_lanes(s, next, lanes);
            y[j] = fma(set1(q[i]), next, y[j]);
        }
    T* out = (T*)a.out + at * a.e + first;
    for (int j = 0; j < N; j++) put_lanes(out + j * W, y[j], lanes);
}

template <class T> void scan_delta_head(const QuireScanDelta& a, int64_t span, int64_t head) {
    const int64_t size = a.d * a.e, key_head = head / (a.n_heads / a.n_key_heads), bytes = a.d * (int64_t)sizeof(float);
    const Scratch scratch({bytes, bytes});
    float *q = (float*)scratch.piece(0), *k = (float*)scratch.piece(1);
    float* own = begin(*a.spans, span, a.state, a.n_heads, head, size);
    const Rows rows{*a.spans, span};
    rows.each(
        [&](int64_t row) {
            unit_row((const T*)a.q + row * a.q_row + key_head * a.d, q, a.d, a.eps, a.scale);
            unit_row((const T*)a.k + row * a.k_row + key_head * a.d, k, a.d, a.eps, 1.f);
            int64_t at = 0;
            for (; at + BLOCK * W <= a.e; at += BLOCK * W) delta_values<T, BLOCK>(a, own, q, k, row, head, at, W);
            for (; at < a.e; at += W)
                delta_values<T, 1>(a, own, q, k, row, head, at, at + W <= a.e ? W : (int)(a.e - at));
        },
        [&](int64_t kept, int64_t) { memcpy(a.state + (kept * a.n_heads + head) * size, own, size * sizeof(float)); });
}

template <class T> void norm_gated_part(const QuireNormGated& a, int64_t row, int64_t first) {
    const T *y = (const T*)a.y + row * a.y_row + first, *gate = (const T*)a.gate + row * a.gate_row + first;
    const auto value = [&](int64_t i, int n) {
        const vf x = get_lanes(y + i, n);
        return a.gate_first ? x * silu(get_lanes(gate + i, n)) : x;
    };
    vf squares = vf{};
    each_vector(a.size, [&](int64_t i, int n) {
        const vf x = value(i, n);
        squares = fma(x, x, squares);
    });
    const vf factor = set1(1.f / __builtin_sqrtf(hsum(squares) / (float)a.size + a.eps));
    const float* weight = a.weight + first % a.n_weights;
    each_vector(a.size, [&](int64_t i, int n) {
        const vf scaled = value(i, n) * factor * get_lanes(weight + i, n);
        put_lanes((T*)a.out + row * a.n_columns + first + i,
                  a.gate_first ? scaled : scaled * silu(get_lanes(gate + i, n)), n);
    });
}

// About as many elements of work as are worth a thread, of items of so many.
int64_t items_a_chunk(const QuireStateSpans& spans, int64_t n_items, int64_t an_item) {
    const int64_t n_rows = spans.piece_ptr == nullptr ? spans.n_spans : spans.row_ptr[spans.piece_ptr[spans.n_spans]];
    return rows_a_chunk(n_rows * an_item / (n_items > 0 ? n_items : 1));
}

}  // namespace
}  // namespace quire

using namespace quire;

void quire_convolve(const QuireConvolve* args) {
    const QuireConvolve& a = *args;
    const int64_t n_blocks = (a.n_columns + W - 1) / W, n_items = a.spans->n_spans * n_blocks;
    by_dtype(a.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t chunk = items_a_chunk(*a.spans, n_items, n_blocks * W * a.k);
        parallel_for(n_items, chunk, a.n_threads, [&](int64_t i) {
            const int64_t at = i % n_blocks * W, left = a.n_columns - at;
            convolve_lanes<T>(a, i / n_blocks, at, left < W ? (int)left : W);
        });
    });
}

void quire_scan_ssm(const QuireScanSsm* args) {
    const QuireScanSsm& a = *args;
    const int64_t n_items = a.spans->n_spans * a.n_heads;
    by_dtype(a.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t chunk = items_a_chunk(*a.spans, n_items, a.n_heads * a.p * a.s);
        parallel_for(n_items, chunk, a.n_threads, [&](int64_t i) { scan_ssm_head<T>(a, i / a.n_heads, i % a.n_heads); });
    });
}

void quire_scan_delta(const QuireScanDelta* args) {
    const QuireScanDelta& a = *args;
    const int64_t n_items = a.spans->n_spans * a.n_heads;
    by_dtype(a.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t chunk = items_a_chunk(*a.spans, n_items, a.n_heads * a.d * a.e);
        parallel_for(n_items, chunk, a.n_threads, [&](int64_t i) {
            scan_delta_head<T>(a, i / a.n_heads, i % a.n_heads);
        });
    });
}

void quire_norm_gated(const QuireNormGated* args) {
    const QuireNormGated& a = *args;
    const int64_t n_parts = a.n_columns / a.size;
    by_dtype(a.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(a.n * n_parts, rows_a_chunk(a.size), a.n_threads, [&](int64_t i) {
            norm_gated_part<T>(a, i / n_parts, i % n_parts * a.size);
        });
    });
}
