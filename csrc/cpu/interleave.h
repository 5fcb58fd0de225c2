// Rows of activations brought into the order in which a product reads them.
#pragma once
#include <cstdint>
#include <utility>

#include "simd.h"

namespace quire {

// to[i][r] = from[r][i]: units of N rows that lie `stride` bytes apart take turns.
template <class Unit, int N>
void interleave_slowly(const char* from, int64_t stride, int64_t first, int64_t n_units, char* to) {
    for (int64_t i = first; i < n_units; i++)
        for (int r = 0; r < N; r++)
            memcpy(to + (i * N + r) * sizeof(Unit), from + r * stride + i * sizeof(Unit), sizeof(Unit));
}

#if QUIRE_AVX512

// Lane l of vector V takes its turn from unit (V * W + l) / N of row (V * W + l) % N.
template <int V, int N, int R> constexpr uint16_t lanes_of_row() {
    uint16_t lanes = 0;
    for (int l = 0; l < W; l++) lanes |= (uint16_t)(((V * W + l) % N == R) << l);
    return lanes;
}

template <int V, int N> QUIRE_INLINE vi units_of_vector() {
    vi units;
    for (int l = 0; l < W; l++) units[l] = (V * W + l) / N;
    return units;
}

template <int N, int V, int... R>
QUIRE_INLINE void store_interleaved(const vi (&rows)[N], char* to, std::integer_sequence<int, R...>) {
    const __m512i units = (__m512i)units_of_vector<V, N>();
    __m512i mixed = _mm512_permutexvar_epi32(units, (__m512i)rows[0]);
    ((mixed = _mm512_mask_permutexvar_epi32(mixed, lanes_of_row<V, N, R + 1>(), units, (__m512i)rows[R + 1])), ...);
    store_bits(to + V * sizeof(vi), mixed);
}

template <int N, int... V>
QUIRE_INLINE void store_all_interleaved(const vi (&rows)[N], char* to, std::integer_sequence<int, V...>) {
    (store_interleaved<N, V>(rows, to, std::make_integer_sequence<int, N - 1>()), ...);
}

template <class Unit, int N> void interleave(const char* from, int64_t stride, int64_t n_units, char* to) {
    int64_t i = 0;
    if constexpr (sizeof(Unit) == 4)
        for (; i + W <= n_units; i += W) {
            vi rows[N];
            for (int r = 0; r < N; r++) rows[r] = load_bits<vi>(from + r * stride + i * 4);
            store_all_interleaved<N>(rows, to + i * N * 4, std::make_integer_sequence<int, N>());
        }
    interleave_slowly<Unit, N>(from, stride, i, n_units, to);
}

#else

template <class Unit, int N> void interleave(const char* from, int64_t stride, int64_t n_units, char* to) {
    interleave_slowly<Unit, N>(from, stride, 0, n_units, to);
}

#endif

}  // namespace quire
