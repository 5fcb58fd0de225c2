// Row operations: norm, rotary embedding, gated activation, page writes. Each row is computed alone, by one thread.
#include "quire_cpu.h"
#include "simd.h"
#include "threads.h"

namespace quire {

// Work of some 20 microseconds; less is not worth waking a thread, least of all on a busy machine.
constexpr int64_t ELEMENTS_A_CHUNK = 32768;

static int64_t rows_a_chunk(int64_t row_elements) {
    const int64_t rows = ELEMENTS_A_CHUNK / (row_elements > 0 ? row_elements : 1);
    return rows > 0 ? rows : 1;
}

// Calls f(vector index, number of live lanes) over h elements.
template <class F> QUIRE_INLINE void lanes(int64_t h, const F& f) {
    int64_t i = 0;
    for (; i + W <= h; i += W) f(i, W);
    if (i < h) f(i, (int)(h - i));
}

template <class T> QUIRE_INLINE vf get(const T* p, int n) { return n == W ? load(p) : load_some(p, n); }

template <class T> QUIRE_INLINE void put(T* p, vf v, int n) {
    if (n == W) store(p, v);
    else store_some(p, v, n);
}

template <class T> QUIRE_INLINE vf rounded(vf v) {
    T lane[W];
    store(lane, v);
    return load(lane);
}

template <class T>
static void norm_row(const T* x, const T* residual, T* total, const T* weight, T* out, int64_t h, float eps) {
    vf squares = vf{};
    lanes(h, [&](int64_t i, int n) {
        vf v = get(x + i, n);
        if (residual != nullptr) {
            v = rounded<T>(v + get(residual + i, n));
            put(total + i, v, n);
        }
        squares = fma(v, v, squares);
    });
    const T* source = residual != nullptr ? total : x;
    const float mean = hsum(squares) / (float)h;
    const vf factor = set1(1.f / __builtin_sqrtf(mean + eps));
    lanes(h, [&](int64_t i, int n) {
        put(out + i, rounded<T>(get(source + i, n) * factor) * get(weight + i, n), n);
    });
}

template <class T>
static void rope_head(T* x, const float* cos, const float* sin, int64_t half) {
    lanes(half, [&](int64_t i, int n) {
        const vf a = get(x + i, n), b = get(x + half + i, n), c = get(cos + i, n), s = get(sin + i, n);
        put(x + i, fma(a, c, -(b * s)), n);
        put(x + half + i, fma(b, c, a * s), n);
    });
}

template <class T> static void silu_row(const T* x, T* out, int64_t f) {
    lanes(f, [&](int64_t i, int n) {
        const vf gate = get(x + i, n), up = get(x + f + i, n);
        const vf silu = gate / (exp2(gate * -1.4426950408889634f) + 1.f);
        put(out + i, rounded<T>(silu) * up, n);
    });
}

// Calls f with a null pointer of the element type.
template <class F> static void by_dtype(int dtype, const F& f) {
    if (dtype == 0) f((float*)nullptr);
    else if (dtype == 1) f((bf16*)nullptr);
    else f((f16*)nullptr);
}

}  // namespace quire

using namespace quire;

void quire_rms_norm(
    int dtype, const void* x, int64_t x_row, int64_t x_head, const void* residual, int64_t residual_row, void* total,
    const void* weight, void* out, int64_t n, int64_t n_heads, int64_t h, float eps, int n_threads) {
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(n * n_heads, rows_a_chunk(h), n_threads, [&](int64_t i) {
            const int64_t row = i / n_heads, head = i % n_heads;
            const T* added = residual == nullptr ? nullptr : (const T*)residual + row * residual_row;
            T* sum = residual == nullptr ? nullptr : (T*)total + row * residual_row;
            norm_row((const T*)x + row * x_row + head * x_head, added, sum, (const T*)weight, (T*)out + i * h, h, eps);
        });
    });
}

void quire_rope(
    int dtype, void* q, int64_t q_row, int64_t q_head, int n_q_heads, void* k, int64_t k_row, int64_t k_head,
    int n_kv_heads, int64_t n, const void* positions, int wide, const float* cos_sin, int rotary, int n_threads) {
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(n, rows_a_chunk((int64_t)(n_q_heads + n_kv_heads) * rotary), n_threads, [&](int64_t i) {
            const int64_t position = wide ? ((const int64_t*)positions)[i] : ((const int32_t*)positions)[i];
            const float* cos = cos_sin + position * rotary;
            const int64_t half = rotary / 2;
            for (int h = 0; h < n_q_heads; h++) rope_head((T*)q + i * q_row + h * q_head, cos, cos + half, half);
            for (int h = 0; h < n_kv_heads; h++) rope_head((T*)k + i * k_row + h * k_head, cos, cos + half, half);
        });
    });
}

void quire_silu_mul(int dtype, const void* x, int64_t x_row, void* out, int64_t n, int64_t f, int n_threads) {
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(n, rows_a_chunk(f), n_threads, [&](int64_t i) {
            silu_row((const T*)x + i * x_row, (T*)out + i * f, f);
        });
    });
}

void quire_store_kv(
    int element_bytes, const void* k, int64_t k_row, int64_t k_head, const void* v, int64_t v_row, int64_t v_head,
    void* k_pages, void* v_pages, const int64_t* cells, int64_t n, int n_kv_heads, int page_size, int head_dim,
    int n_threads) {
    const size_t bytes = (size_t)head_dim * element_bytes;
    parallel_for(n, rows_a_chunk((int64_t)n_kv_heads * head_dim), n_threads, [&](int64_t i) {
        const int64_t page = cells[i] / page_size, offset = cells[i] % page_size;
        for (int64_t h = 0; h < n_kv_heads; h++) {
            const size_t cell = (size_t)((page * n_kv_heads + h) * page_size + offset) * bytes;
            memcpy((char*)k_pages + cell, (const char*)k + (i * k_row + h * k_head) * element_bytes, bytes);
            memcpy((char*)v_pages + cell, (const char*)v + (i * v_row + h * v_head) * element_bytes, bytes);
        }
    });
}
