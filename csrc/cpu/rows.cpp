// Row operations on whole arrays: norm, rotary embedding, gated activation, page writes.
#include "rows.h"

#include "quire_cpu.h"
#include "store.h"
#include "threads.h"

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
    int dtype, int int8_keys, const void* k, int64_t k_row, int64_t k_head, const void* v, int64_t v_row,
    int64_t v_head, void* k_pages, void* v_pages, const int64_t* cache_locs, int64_t n, int n_kv_heads, int page_size,
    int head_dim, int n_threads) {
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const EntryWriter<T> writer{head_dim, int8_keys != 0};
        parallel_for(n, rows_a_chunk((int64_t)n_kv_heads * head_dim), n_threads, [&](int64_t i) {
            const int64_t page = cache_locs[i] / page_size, offset = cache_locs[i] % page_size;
            for (int64_t h = 0; h < n_kv_heads; h++) {
                const int64_t entry = ((page * n_kv_heads + h) * page_size + offset) * writer.bytes();
                writer.write((const T*)k + i * k_row + h * k_head, (char*)k_pages + entry);
                writer.write((const T*)v + i * v_row + h * v_head, (char*)v_pages + entry);
            }
        });
    });
}
