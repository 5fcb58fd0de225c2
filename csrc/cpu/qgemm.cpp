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
constexpr int BLOCK_GROUPS = 8;                    // groups of bytes worked on at once: 16 KiB, half of an L1 cache
constexpr int BLOCK_LINES = BLOCK_GROUPS * GROUP_LINES;
constexpr int AHEAD = 16 * LINE;                   // bytes between a load of weights and the prefetch
constexpr float SMALLEST = 1e-30f;                 // activations below it count as zeros: 127 / x must be finite

// Sums in registers: rows times vectors. Nibbles have two kinds, integers and floats.
#if QUIRE_AVX512
constexpr int ROWS = 6, VECTORS = 4, NIBBLE_VECTORS = 2;
#elif QUIRE_AVX2
constexpr int ROWS = 4, VECTORS = 2, NIBBLE_VECTORS = 2;
#else
constexpr int ROWS = 2, VECTORS = 2, NIBBLE_VECTORS = 1;
#endif

#define UNROLL _Pragma("GCC unroll 8")

// Quantised activations: x = q * scale.
struct Rows {
    int8_t* q;        // [m, stride]
    float* scales;    // [n_groups, m]
    int32_t* starts;  // [n_groups, m]: what the zero point of the weights adds to the sums, negative
    int64_t m, stride, n_groups;
};

// Quantises count values; returns the sum of q. A span with an infinity or a NaN gets the scale NaN.
template <class T> int32_t quantise(const T* x, int64_t count, int8_t* q, float* scale) {
    const auto get = [&](int64_t i) { return i + W <= count ? load(x + i) : load_some(x + i, (int)(count - i)); };
    vi magnitudes = vi{};  // bits have the order of magnitudes, with NaN above infinity
    for (int64_t i = 0; i < count; i += W) {
        const vi bits = (vi)get(i) & 0x7fffffff;
        magnitudes = bits > magnitudes ? bits : magnitudes;
    }
    const int32_t bits = hmax(magnitudes);
    float most;
    memcpy(&most, &bits, 4);
    const bool finite = bits < 0x7f800000, live = finite && most >= SMALLEST;
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

template <class T> void quantise_row(const T* x, int64_t k, int64_t group, int32_t zero, const Rows& rows, int64_t row) {
    int8_t* q = rows.q + row * rows.stride;
    for (int64_t g = 0; g < rows.n_groups; g++) {
        const int64_t first = g * group, count = first + group < k ? group : k - first, at = g * rows.m + row;
        rows.starts[at] = -zero * quantise(x + first, count, q + first, rows.scales + at);
    }
    memset(q + k, 0, rows.stride - k);
}

// sums[r][c] += weight c times row r of q over n_lines lines. Prefetches PREFETCHES cache lines of `next` a line.
template <int R, int PREFETCHES>
void bytes_block(
    const uint8_t* w, int64_t n_lines, const int8_t* q, int64_t stride, int32_t* sums, const uint8_t* next) {
    for (int c = 0; c < TILE; c += VECTORS * W) {
        vi acc[R][VECTORS];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = load_bits<vi>(sums + r * TILE + c + v * W);
        const uint8_t *at = w + c * 4, *hint = next;
        const int8_t* x = q;
        for (int64_t line = 0; line < n_lines; line++, at += LINE, x += 4, hint += PREFETCHES * 64) {
            vi weights[VECTORS];
            UNROLL for (int p = 0; p < PREFETCHES; p++) __builtin_prefetch(hint + p * 64);
            UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = load_bits<vi>(at + v * W * 4);
            UNROLL for (int r = 0; r < R; r++) {
                const vi values = repeat(x + r * stride);
                UNROLL for (int v = 0; v < VECTORS; v++) acc[r][v] = dot_bytes(acc[r][v], weights[v], values);
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) store_bits(sums + r * TILE + c + v * W, acc[r][v]);
    }
}

// sums[r][c] += weight c times row + r over groups first_group .. end_group of the tile. Prefetches like bytes_block.
template <int R, int PREFETCHES>
void nibbles_block(
    const uint8_t* w, const bf16* w_scales, int64_t first_group, int64_t end_group, const Rows x, int64_t row,
    float* sums, const uint8_t* next) {
    constexpr int N = R <= 2 ? VECTORS : NIBBLE_VECTORS;
    constexpr int HINTS = PREFETCHES * N * W / TILE;  // the columns share the work
    const vi low = set1i(0x0f0f0f0f);
    for (int c = 0; c < TILE; c += N * W) {
        vf total[R][N];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < N; v++) total[r][v] = load(sums + r * TILE + c + v * W);
        const uint8_t *at = w + first_group * PACKED_GROUP + c * 4, *hint = next + c * PREFETCHES;
        const int8_t* q = x.q + row * x.stride + first_group * GROUP;
        for (int64_t g = first_group; g < end_group; g++, at += PACKED_GROUP, q += GROUP) {
            const int64_t first = g * x.m + row;
            vi acc[R][N];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < N; v++) acc[r][v] = begin_nibbles(x.starts[first + r]);
            UNROLL for (int line = 0; line < GROUP_LINES / 2; line++, hint += PREFETCHES * 64) {
                UNROLL for (int p = 0; p < HINTS; p++) __builtin_prefetch(hint + p * 64);
                UNROLL for (int v = 0; v < N; v++) {
                    const vi packed = load_bits<vi>(at + line * LINE + v * W * 4);
                    UNROLL for (int r = 0; r < R; r++) {
                        const int8_t* values = q + r * x.stride + line * 4;
                        acc[r][v] = dot_nibbles(acc[r][v], packed & low, repeat(values));
                        acc[r][v] = dot_nibbles(acc[r][v], (packed >> 4) & low, repeat(values + GROUP / 2));
                    }
                }
            }
            UNROLL for (int v = 0; v < N; v++) {
                const vf w_scale = load(w_scales + g * TILE + c + v * W);
                UNROLL for (int r = 0; r < R; r++) {
                    const vi sum = end_nibbles(acc[r][v], x.starts[first + r]);
                    total[r][v] = fma(to_float(sum), w_scale * x.scales[first + r], total[r][v]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < N; v++) store(sums + r * TILE + c + v * W, total[r][v]);
    }
}

// Calls f(constant of n) for n in 1 .. MOST.
template <int MOST, class F> QUIRE_INLINE void by_count(int64_t n, const F& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return by_count<MOST - 1>(n, f);
    }
    f(std::integral_constant<int, MOST>());
}

// Calls f(first row, constant number of rows, index of the block) over blocks of nearly equal heights.
template <class F> QUIRE_INLINE void row_blocks(int64_t m, const F& f) {
    const int64_t n_blocks = (m + ROWS - 1) / ROWS;
    for (int64_t b = 0; b < n_blocks; b++) {
        const int64_t first = b * m / n_blocks, end = (b + 1) * m / n_blocks;
        by_count<ROWS>(end - first, [&](auto n) { f(first, n, b); });
    }
}

// out[c] = value(c) + bias[c] for n channels; bias may be null.
template <class T, class F> QUIRE_INLINE void finish(const T* bias, T* out, int64_t n, const F& value) {
    for (int64_t c = 0; c < n; c += W) {
        const int count = n - c < W ? (int)(n - c) : W;
        vf y = value(c);
        if (bias != nullptr) y += count == W ? load(bias + c) : load_some(bias + c, count);
        if (count == W) store(out + c, y);
        else store_some(out + c, y, count);
    }
}

// What row block b prefetches while it works on w .. end: one row block alone a fixed distance, several of them the
// block behind this one, each a part of it. Later ones find all done.
template <int PREFETCHES> const uint8_t* prefetched(const uint8_t* w, const uint8_t* end, int64_t b) {
    if (PREFETCHES == 4) return w + AHEAD;
    return b * PREFETCHES < 4 ? end + b * (end - w) * PREFETCHES / 4 : w;
}

// sums [m, TILE] of a tile of int8 weights. PREFETCHES: cache lines of the next block for each line of this one.
template <int PREFETCHES> void bytes_sums(const uint8_t* w, int64_t n_lines, const Rows& x, int32_t* sums) {
    for (int64_t row = 0; row < x.m; row++)
        for (int c = 0; c < TILE; c += W) store_bits(sums + row * TILE + c, set1i(x.starts[row]));
    const int64_t step = PREFETCHES == 4 ? n_lines : BLOCK_LINES;
    for (int64_t line = 0; line < n_lines; line += step) {
        const int64_t count = n_lines - line < step ? n_lines - line : step;
        const uint8_t* block = w + line * LINE;
        row_blocks(x.m, [&](int64_t row, auto n, int64_t b) {
            const uint8_t* next = prefetched<PREFETCHES>(block, block + count * LINE, b);
            const int8_t* q = x.q + row * x.stride + line * 4;
            bytes_block<n, PREFETCHES>(block, count, q, x.stride, sums + row * TILE, next);
        });
    }
}

// One tile of int8 weights for all rows.
template <class T> void bytes_tile(const QuireQlinearArgs& a, const Rows& x, int64_t k_padded, int64_t tile) {
    const int64_t c0 = tile * TILE, live = a.n - c0 < TILE ? a.n - c0 : TILE;
    const Scratch scratch({x.m * TILE * (int64_t)sizeof(int32_t)});
    int32_t* sums = (int32_t*)scratch.piece(0);
    const uint8_t* w = a.weight + c0 * k_padded;
    const auto compute = x.m <= ROWS ? bytes_sums<4> : x.m <= 3 * ROWS ? bytes_sums<2> : bytes_sums<1>;
    compute(w, k_padded / 4, x, sums);
    const float* w_scales = (const float*)a.scales + c0;
    const T* bias = a.bias == nullptr ? nullptr : (const T*)a.bias + c0;
    for (int64_t r = 0; r < x.m; r++)
        finish(bias, (T*)a.out + r * a.n + c0, live, [&](int64_t c) {
            return to_float(load_bits<vi>(sums + r * TILE + c)) * load(w_scales + c) * x.scales[r];
        });
}

// sums [m, TILE] of a tile of int4 weights.
template <int PREFETCHES>
void nibbles_sums(const uint8_t* w, const bf16* w_scales, const Rows& x, float* sums) {
    memset(sums, 0, x.m * TILE * sizeof(float));
    const int64_t step = PREFETCHES == 4 ? x.n_groups : BLOCK_GROUPS * 2;
    for (int64_t g = 0; g < x.n_groups; g += step) {
        const int64_t end = g + step < x.n_groups ? g + step : x.n_groups;
        const uint8_t *block = w + g * PACKED_GROUP, *after = w + end * PACKED_GROUP;
        row_blocks(x.m, [&](int64_t row, auto n, int64_t b) {
            const uint8_t* next = prefetched<PREFETCHES>(block, after, b);
            nibbles_block<n, PREFETCHES>(w, w_scales, g, end, x, row, sums + row * TILE, next);
        });
    }
}

// One tile of int4 weights for all rows.
template <class T> void nibbles_tile(const QuireQlinearArgs& a, const Rows& x, int64_t k_padded, int64_t tile) {
    const int64_t c0 = tile * TILE, live = a.n - c0 < TILE ? a.n - c0 : TILE;
    const Scratch scratch({x.m * TILE * (int64_t)sizeof(float)});
    float* sums = (float*)scratch.piece(0);
    const auto compute = x.m <= ROWS ? nibbles_sums<4> : x.m <= 3 * ROWS ? nibbles_sums<2> : nibbles_sums<1>;
    compute(a.weight + c0 * k_padded / 2, (const bf16*)a.scales + c0 * x.n_groups, x, sums);
    const T* bias = a.bias == nullptr ? nullptr : (const T*)a.bias + c0;
    for (int64_t r = 0; r < x.m; r++)
        finish(bias, (T*)a.out + r * a.n + c0, live, [&](int64_t c) { return load(sums + r * TILE + c); });
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
    x.m = a.m;
    x.stride = k_padded + 64;  // rows a power of two apart would share few cache sets
    x.n_groups = nibbles ? n_groups : 1;
    const std::unique_ptr<int8_t[]> q(new int8_t[a.m * x.stride]);
    const std::unique_ptr<float[]> scales(new float[a.m * x.n_groups]);
    const std::unique_ptr<int32_t[]> starts(new int32_t[a.m * x.n_groups]);
    x.q = q.get(), x.scales = scales.get(), x.starts = starts.get();
    parallel_for(a.m, 1 + 16384 / k_padded, a.n_threads, [&](int64_t row) {
        const int64_t group = nibbles ? GROUP : k_padded;
        quantise_row((const T*)a.x + row * a.x_row, a.k, group, nibbles ? NIBBLE_ZERO : BYTE_ZERO, x, row);
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
