// Linear layers with weights of 8 or 4 bits and activations quantised to 8 bits in the call.
//
// Formats: quire/kernels/qgemm/reference.py and layout.py. A tile is TILE output channels with all of k; its bytes come
// in lines of TILE channels times four k. Invariant: a value is summed in an order that depends on k alone, so it is
// the same for any number of rows and threads.
#include <cmath>
#include <memory>

#include "dot.h"
#include "quire_cpu.h"
#include "scratch.h"
#include "simd.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int TILE = 64, LINE = TILE * 4, GROUP = 32, GROUP_LINES = GROUP / 4;
constexpr int PACKED_GROUP = TILE * GROUP / 2;  // bytes
constexpr int BLOCK_GROUPS = 8;  // groups of a tile unpacked at once: 16 KiB, half of an L1 cache
constexpr int AHEAD = 16 * LINE; // bytes between a load of weights and the prefetch
constexpr float SMALLEST = 1e-30f;  // activations below it count as zeros: 127 / x must be finite

// Sums in registers: rows times vectors.
#if QUIRE_AVX512
constexpr int ROWS = 6, VECTORS = 4;
#elif QUIRE_AVX2
constexpr int ROWS = 4, VECTORS = 2;
#else
constexpr int ROWS = 2, VECTORS = 2;
#endif
constexpr int DIRECT_ROWS = 2;  // up to here nibbles are unpacked in registers

#define UNROLL _Pragma("GCC unroll 8")

// Quantised activations: x = q * scale.
struct Rows {
    int8_t* q;
    float* scales;  // [m, n_groups]
    int32_t* sums;  // [m, n_groups]: of q
    int64_t stride, n_groups;

    const int8_t* row(int64_t i) const { return q + i * stride; }
};

// Quantises count values; returns the sum of q. A span with an infinity or a NaN gets the scale NaN.
template <class T> int32_t quantise(const T* x, int64_t count, int8_t* q, float* scale) {
    const auto get = [&](int64_t i) { return i + W <= count ? load(x + i) : load_some(x + i, (int)(count - i)); };
    vi magnitude = vi{};  // order of bits is order of magnitudes, with NaN above infinity
    for (int64_t i = 0; i < count; i += W) {
        const vi bits = (vi)get(i) & 0x7fffffff;
        magnitude = bits > magnitude ? bits : magnitude;
    }
    const vf largest = (vf)magnitude;
    float most = 0;
    bool finite = true;
    for (int i = 0; i < W; i++) {
        finite = finite && std::isfinite(largest[i]);
        most = largest[i] > most ? largest[i] : most;
    }
    const bool live = finite && most >= SMALLEST;
    *scale = !finite ? NAN : live ? most / 127.f : 0.f;
    if (!live) {
        memset(q, 0, count);
        return 0;
    }
    const vf factor = set1(127.f / most), magic = set1(12582912.f);  // 1.5 * 2^23: rounds to even in the low bits
    vi sum = vi{};
    for (int64_t i = 0; i < count; i += W) {
        const vi rounded = (vi)(get(i) * factor + magic) - (vi)magic;
        sum += rounded;
        if (i + W <= count) store_bytes(q + i, rounded);
        else
            for (int j = 0; j < count - i; j++) q[i + j] = (int8_t)rounded[j];
    }
    return hsum(sum);
}

template <class T> void quantise_row(const T* x, int64_t k, int64_t group, const Rows& rows, int64_t row) {
    int8_t* q = rows.q + row * rows.stride;
    for (int64_t g = 0; g < rows.n_groups; g++) {
        const int64_t first = g * group, count = first + group < k ? group : k - first, at = row * rows.n_groups + g;
        rows.sums[at] = quantise(x + first, count, q + first, rows.scales + at);
    }
    memset(q + k, 0, rows.stride - k);
}

// sums[r][c] = sum over k of weight c times q of row + r.
template <int R> void bytes_block(const uint8_t* w, int64_t n_lines, const Rows& x, int64_t row, float* sums) {
    for (int c = 0; c < TILE; c += VECTORS * W) {
        vi acc[R][VECTORS];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = set1i(-BYTE_ZERO * x.sums[row + r]);
        const uint8_t* at = w + c * 4;
        const int8_t* q = x.row(row);
        for (int64_t line = 0; line < n_lines; line++, at += LINE, q += 4) {
            vi weights[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) {
                weights[v] = load_bits<vi>(at + v * W * 4);
                if (R <= 4) __builtin_prefetch(at + AHEAD + v * W * 4);
            }
            UNROLL for (int r = 0; r < R; r++) {
                const vi values = repeat(q + r * x.stride);
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = dot_bytes(acc[r][v], weights[v], values);
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) store(sums + r * TILE + c + v * W, to_float(acc[r][v]));
    }
}

// The sums of a group, scaled, are added to the totals in the order of the groups.
QUIRE_INLINE vf add_group(vf total, vi acc, vf w_scale, float x_scale) {
    return fma(to_float(acc), w_scale * x_scale, total);
}

QUIRE_INLINE vi group_start(const Rows& x, int64_t at) { return set1i(-NIBBLE_ZERO * x.sums[at]); }

// sums[r][c] = weight c times row + r, nibbles unpacked in registers: few rows.
template <int R>
void nibbles_direct(const uint8_t* w, const bf16* w_scales, const Rows& x, int64_t row, float* sums) {
    const vi low = set1i(0x0f0f0f0f);
    for (int c = 0; c < TILE; c += VECTORS * W) {
        vf total[R][VECTORS] = {};
        const uint8_t* at = w + c * 4;
        for (int64_t g = 0; g < x.n_groups; g++, at += PACKED_GROUP) {
            vi acc[R][VECTORS];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = group_start(x, (row + r) * x.n_groups + g);
            UNROLL for (int line = 0; line < GROUP_LINES / 2; line++) {
                const int8_t* q = x.row(row) + g * GROUP + line * 4;
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const vi packed = load_bits<vi>(at + line * LINE + v * W * 4);
                    __builtin_prefetch(at + AHEAD + line * LINE + v * W * 4);
                    UNROLL for (int r = 0; r < R; r++) {
                        acc[r][v] = dot_nibbles(acc[r][v], packed & low, repeat(q + r * x.stride));
                        acc[r][v] = dot_nibbles(acc[r][v], (packed >> 4) & low, repeat(q + r * x.stride + GROUP / 2));
                    }
                }
            }
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const vf w_scale = load(w_scales + g * TILE + c + v * W);
                UNROLL for (int r = 0; r < R; r++)
                    total[r][v] = add_group(total[r][v], acc[r][v], w_scale, x.scales[(row + r) * x.n_groups + g]);
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) store(sums + r * TILE + c + v * W, total[r][v]);
    }
}

// n_groups groups of a tile: a byte for each weight, lines in the order of k.
void unpack(const uint8_t* w, const bf16* w_scales, int64_t n_groups, uint8_t* bytes, float* scales) {
    const vi low = set1i(0x0f0f0f0f);
    for (int64_t g = 0; g < n_groups; g++, w += PACKED_GROUP, bytes += 2 * PACKED_GROUP) {
        for (int i = 0; i < PACKED_GROUP; i += W * 4) {
            const vi packed = load_bits<vi>(w + i);
            __builtin_prefetch(w + AHEAD + i);
            store_bits(bytes + i, packed & low);
            store_bits(bytes + PACKED_GROUP + i, (packed >> 4) & low);
        }
        for (int c = 0; c < TILE; c += W) store(scales + g * TILE + c, load(w_scales + g * TILE + c));
    }
}

// sums[r][c] += weight c times row + r over unpacked groups, of which the first is group g0 of the rows.
template <int R>
void nibbles_block(
    const uint8_t* bytes, const float* w_scales, int64_t g0, int64_t n_groups, const Rows& x, int64_t row,
    float* sums) {
    for (int c = 0; c < TILE; c += VECTORS * W)
        for (int64_t g = 0; g < n_groups; g++) {
            const int64_t first = row * x.n_groups + g0 + g;
            vi acc[R][VECTORS];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = group_start(x, first + r * x.n_groups);
            const uint8_t* at = bytes + g * 2 * PACKED_GROUP + c * 4;
            const int8_t* q = x.row(row) + (g0 + g) * GROUP;
            UNROLL for (int line = 0; line < GROUP_LINES; line++) {
                vi weights[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = load_bits<vi>(at + line * LINE + v * W * 4);
                UNROLL for (int r = 0; r < R; r++) {
                    const vi values = repeat(q + r * x.stride + line * 4);
                    UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = dot_nibbles(acc[r][v], weights[v], values);
                }
            }
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* total = sums + r * TILE + c + v * W;
                    const vf w_scale = load(w_scales + g * TILE + c + v * W);
                    store(total, add_group(load(total), acc[r][v], w_scale, x.scales[first + r * x.n_groups]));
                }
        }
}

// Calls f(constant of n) for n in 1 .. MOST.
template <int MOST, class F> QUIRE_INLINE void by_count(int64_t n, const F& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return by_count<MOST - 1>(n, f);
    }
    f(std::integral_constant<int, MOST>());
}

// Calls f(first row, constant number of rows) over blocks of nearly equal heights.
template <class F> QUIRE_INLINE void row_blocks(int64_t m, const F& f) {
    const int64_t n_blocks = (m + ROWS - 1) / ROWS;
    for (int64_t b = 0; b < n_blocks; b++) {
        const int64_t first = b * m / n_blocks, end = (b + 1) * m / n_blocks;
        by_count<ROWS>(end - first, [&](auto n) { f(first, n); });
    }
}

// out[c] = sums[c] * w_scales[c] * x_scale + bias[c]; w_scales and bias may be null.
template <class T>
void finish(const float* sums, const float* w_scales, float x_scale, const T* bias, T* out, int64_t n) {
    for (int64_t c = 0; c < n; c += W) {
        const int count = n - c < W ? (int)(n - c) : W;
        vf value = load(sums + c);
        if (w_scales != nullptr) value = value * load(w_scales + c) * x_scale;
        if (bias != nullptr) value += count == W ? load(bias + c) : load_some(bias + c, count);
        if (count == W) store(out + c, value);
        else store_some(out + c, value, count);
    }
}

// One tile of int8 weights for all rows.
template <class T> void bytes_tile(const QuireQlinearArgs& a, const Rows& x, int64_t k_padded, int64_t tile) {
    const int64_t c0 = tile * TILE, live = a.n - c0 < TILE ? a.n - c0 : TILE;
    const uint8_t* w = a.weight + c0 * k_padded;
    const float* w_scales = (const float*)a.scales + c0;
    const T* bias = a.bias == nullptr ? nullptr : (const T*)a.bias + c0;
    row_blocks(a.m, [&](int64_t row, auto count) {
        alignas(64) float sums[count * TILE];
        bytes_block<count>(w, k_padded / 4, x, row, sums);
        for (int r = 0; r < count; r++)
            finish(sums + r * TILE, w_scales, x.scales[row + r], bias, (T*)a.out + (row + r) * a.n + c0, live);
    });
}

// sums [m, TILE] of one tile of int4 weights.
void nibbles_sums(const uint8_t* w, const bf16* w_scales, const Rows& x, int64_t m, const Scratch& scratch) {
    float* sums = (float*)scratch.piece(0);
    if (m <= DIRECT_ROWS)
        return by_count<DIRECT_ROWS>(m, [&](auto n) { nibbles_direct<n>(w, w_scales, x, 0, sums); });
    memset(sums, 0, m * TILE * sizeof(float));
    uint8_t* bytes = (uint8_t*)scratch.piece(1);
    float* wide_scales = (float*)scratch.piece(2);
    for (int64_t g = 0; g < x.n_groups; g += BLOCK_GROUPS) {
        const int64_t n_groups = x.n_groups - g < BLOCK_GROUPS ? x.n_groups - g : BLOCK_GROUPS;
        unpack(w + g * PACKED_GROUP, w_scales + g * TILE, n_groups, bytes, wide_scales);
        row_blocks(m, [&](int64_t row, auto count) {
            nibbles_block<count>(bytes, wide_scales, g, n_groups, x, row, sums + row * TILE);
        });
    }
}

// One tile of int4 weights for all rows.
template <class T> void nibbles_tile(const QuireQlinearArgs& a, const Rows& x, int64_t k_padded, int64_t tile) {
    const int64_t c0 = tile * TILE, live = a.n - c0 < TILE ? a.n - c0 : TILE;
    const Scratch scratch(
        {a.m * TILE * (int64_t)sizeof(float), 2 * PACKED_GROUP * BLOCK_GROUPS, TILE * BLOCK_GROUPS * 4});
    nibbles_sums(a.weight + c0 * k_padded / 2, (const bf16*)a.scales + c0 * x.n_groups, x, a.m, scratch);
    const float* sums = (const float*)scratch.piece(0);
    const T* bias = a.bias == nullptr ? nullptr : (const T*)a.bias + c0;
    for (int64_t r = 0; r < a.m; r++)
        finish<T>(sums + r * TILE, nullptr, 1.f, bias, (T*)a.out + r * a.n + c0, live);
}

// How many tiles are some 10 microseconds of work, which is worth waking a thread.
int64_t tiles_a_chunk(int64_t tile_bytes, int64_t m) {
    const int64_t chunk = 200000 * 8 / (tile_bytes * (8 + m));
    return chunk > 0 ? chunk : 1;
}

template <class T> void run(const QuireQlinearArgs& a) {
    if (a.m == 0) return;
    const int64_t n_groups = (a.k + GROUP - 1) / GROUP, k_padded = n_groups * GROUP;
    const bool nibbles = a.scheme == 1;
    Rows x{};
    x.stride = k_padded + 64;  // rows a power of two apart would share few cache sets
    x.n_groups = nibbles ? n_groups : 1;
    const std::unique_ptr<int8_t[]> q(new int8_t[a.m * x.stride]);
    const std::unique_ptr<float[]> scales(new float[a.m * x.n_groups]);
    const std::unique_ptr<int32_t[]> sums(new int32_t[a.m * x.n_groups]);
    x.q = q.get(), x.scales = scales.get(), x.sums = sums.get();
    parallel_for(a.m, 1 + 16384 / k_padded, a.n_threads, [&](int64_t row) {
        quantise_row((const T*)a.x + row * a.x_row, a.k, nibbles ? GROUP : k_padded, x, row);
    });
    const int64_t tile_bytes = nibbles ? TILE * k_padded / 2 : TILE * k_padded;
    parallel_for((a.n + TILE - 1) / TILE, tiles_a_chunk(tile_bytes, a.m), a.n_threads, [&](int64_t tile) {
        nibbles ? nibbles_tile<T>(a, x, k_padded, tile) : bytes_tile<T>(a, x, k_padded, tile);
    });
}

}  // namespace
}  // namespace quire

void quire_qlinear(const QuireQlinearArgs* args) {
    using namespace quire;
    if (args->dtype == 0) run<float>(*args);
    else if (args->dtype == 1) run<bf16>(*args);
    else run<f16>(*args);
}
