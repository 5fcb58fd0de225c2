// Linear layers with what stands around them in a decoder: norm before, activation or residual after.
//
// The rows are normed and brought into the format of the product once; then tiles of output channels are computed by
// whoever comes. Layouts: quire/kernels/qgemm/weight.py; meaning of the numbers: reference.py there. Invariant: a row's
// result depends on that row alone, bit for bit, whatever the other rows, their number and the threads.
#include <algorithm>

#include "amx_groups.h"
#include "groups.h"
#include "interleave.h"
#include "linears.h"
#include "lines.h"
#include "outputs.h"
#include "quantise.h"
#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace quire {
namespace {

// Activations that many tiles share: they should stay in an L2 cache.
#if QUIRE_AMX
constexpr int64_t X_BYTES_AT_ONCE = 1114112, ROWS_TOGETHER = PAIR_ROWS;
#else
constexpr int64_t X_BYTES_AT_ONCE = 524288, ROWS_TOGETHER = 1;
#endif
constexpr int64_t LEAST_ROWS_AT_ONCE = 48;   // fewer would read the weights too often
constexpr int64_t RANGE_BYTES = 524288;      // weights that one thread takes at once, at most
constexpr int64_t AHEAD_OF_STEP = 4 << 20;   // weights of later products that waiting threads ask for, at most

constexpr int64_t INT8_K = 32;               // k of a matrix of 8 bits without groups is padded to a multiple

bool has_groups(const QuireMatrix& w) { return w.format == QUIRE_NIBBLES || w.format == QUIRE_BYTES; }

bool is_quantised(const QuireMatrix& w) { return w.format == QUIRE_INT8 || has_groups(w); }

int64_t groups_of(const QuireMatrix& w) { return has_groups(w) ? (w.k + w.group - 1) / w.group : 1; }

// k with zeros: whole groups for integers, whole pairs for bfloat16.
int64_t padded_k(const QuireMatrix& w) {
    const int64_t whole = has_groups(w) ? w.group : INT8_K;
    const int64_t unit = is_quantised(w) ? whole : w.format == QUIRE_BF16 ? Bf16Lines::K : 1;
    return (w.k + unit - 1) / unit * unit;
}

int64_t tile_bytes(const QuireMatrix& w) {
    constexpr int64_t HALF_BYTES[] = {2, 1, 8, 4, 4, 2};  // of a weight, by format
    return padded_k(w) * TILE * HALF_BYTES[w.format] / 2;
}

// Bytes between rows of activations: rows a power of two apart would share few cache sets.
int64_t x_stride(const QuireMatrix& w) {
    const int64_t bytes = is_quantised(w) ? 1 : w.format == QUIRE_BF16 ? sizeof(Bf16Lines::Stored) : 4;
    return ((padded_k(w) * bytes + 63) & ~(int64_t)63) + 64;
}

// Bytes of activations in one line of one row.
int64_t x_unit(const QuireMatrix& w) { return w.format == QUIRE_BF16 ? Bf16Lines::X_BYTES : 4; }

#if QUIRE_AMX
// Whether m rows are placed for, and multiplied by, tile registers.
bool on_amx(const QuireMatrix& w, int64_t m) {
    if (has_groups(w)) return w.group % STEP_BYTES == 0 && m >= LEAST_AMX_ROWS;
    return w.format == QUIRE_INT8 || w.format == QUIRE_BF16;
}
#endif

// One row as the product reads it, alone: `stride` bytes.
template <class T> void prepare_row(const QuireLinear& a, const Activations& x, int64_t row, T* normed, char* to) {
    const QuireMatrix& w = *a.matrix;
    const T* values = (const T*)a.x + row * a.x_row;
    if (a.norm != nullptr) {
        norm_row<T>(values, nullptr, nullptr, (const T*)a.norm, normed, w.k, a.eps);
        values = normed;
    }
    if (w.format == QUIRE_INT8) quantise_row(values, w.k, padded_k(w), 1.f, x, row, (int8_t*)to, x.stride);
    else if (has_groups(w)) quantise_row(values, w.k, w.group, w.unit, x, row, (int8_t*)to, x.stride);
    else if (w.format == QUIRE_BF16) pack_floats<Bf16Lines>(values, w.k, to, x.stride);
    else pack_floats<WideLines<float>>(values, w.k, to, x.stride);
}

#if QUIRE_AMX
// The rows begin .. end - 1 of n_rows rows from `first` on, which tiles are computed for together.
template <class T>
void place_rows(const QuireLinear& a, const Activations& x, int64_t first, int64_t n_rows, int64_t begin, int64_t end) {
    const Scratch own({a.matrix->k * (int64_t)sizeof(T), x.stride});
    char* alone = (char*)own.piece(1);
    for (int64_t r = begin; r < end; r++) {
        prepare_row<T>(a, x, first + r, (T*)own.piece(0), alone);
        place_row(alone, x.stride, r, n_rows, x.data + first * x.stride);
    }
}
#endif

// The rows first .. end - 1, one block.
template <class T> void prepare_block(const QuireLinear& a, const Activations& x, int64_t first, int64_t end) {
    const QuireMatrix& w = *a.matrix;
    const int64_t n = end - first;
    const Scratch own({w.k * (int64_t)sizeof(T), n > 1 ? n * x.stride : 0});
    char *block = x.data + first * x.stride, *rows = n > 1 ? (char*)own.piece(1) : block;
    for (int64_t r = 0; r < n; r++) prepare_row<T>(a, x, first + r, (T*)own.piece(0), rows + r * x.stride);
    if (n == 1) return;
    with_count<TILE_ROWS>(n, [&](auto count) {
        if (x_unit(w) == 4) interleave<uint32_t, count>(rows, x.stride, x.stride / 4, block);
        else interleave<uint64_t, count>(rows, x.stride, x.stride / 8, block);
    });
}

constexpr int64_t NONE = -1;  // no tile

// sums [n_rows, TILE] of a tile for the rows from `first` on: integers for QUIRE_INT8, else floats. next: the tile that
// follows, or NONE: then what is asked for is there already.
void tile_sums(
    const QuireMatrix& w, const Activations& x, int64_t tile, int64_t first, int64_t n_rows, float* sums,
    int64_t next) {
    const uint8_t* data = (const uint8_t*)w.data + tile * tile_bytes(w);
    const int64_t last = next == NONE ? (tile + 1) * tile_bytes(w) - ahead(n_rows) : next * tile_bytes(w);
    const uint8_t* after = (const uint8_t*)w.data + last;
    const int64_t k = padded_k(w);
    const auto lines = [&](auto format) {
        using Format = decltype(format);
        lines_sums<Format>(data, k / Format::K, x, first, n_rows, (char*)sums, after);
    };
    if (has_groups(w)) {
        const auto at = [&](const uint8_t* codes, int64_t t) {
            return GroupTile{codes, (const f16*)w.scales + t * TILE * x.n_groups, w.group, x.n_groups};
        };
        const GroupTile weights = at(data, tile), following = at(after, next == NONE ? tile : next);
        const GroupNibbles nibbles{table_of(w.table)};
        if (w.format == QUIRE_BYTES) groups_sums(GroupBytes(), weights, x, first, n_rows, sums, following);
        else groups_sums(nibbles, weights, x, first, n_rows, sums, following);
    } else if (w.format == QUIRE_INT8) {
        lines(ByteLines());
    } else if (w.format == QUIRE_BF16) {
        lines(Bf16Lines());
    } else if (w.format == QUIRE_F16) {
        lines(WideLines<f16>());
    } else {
        lines(WideLines<float>());
    }
}

#if QUIRE_AMX
// tile_sums a few rows at a time, of a tile and of the `other` one unless it is NONE, each time followed by
// put(row, number of rows).
template <bool INTEGERS, class Put>
void run_on_amx(
    const QuireMatrix& w, const Activations& x, int64_t tile, int64_t other, int64_t first, int64_t n_rows, float* sums,
    float* other_sums, int64_t next, const Put& put) {
    const auto at = [&](int64_t t) { return (const uint8_t*)w.data + t * tile_bytes(w); };
    const int64_t n_lines = padded_k(w) / (INTEGERS ? ByteLines::K : Bf16Lines::K), after = next == NONE ? tile : next;
    const bool turns = n_rows > PAIR_ROWS;  // two tiles are read again and again
    AmxTile tiles[2] = {{at(tile), at(after), (char*)sums}};
    if (other != NONE) {
        if (!turns) tiles[0].next = at(other);
        tiles[1] = {at(other), at(turns ? after + other - tile : after), (char*)other_sums};
    }
    amx_products<INTEGERS>(tiles, other == NONE ? 1 : 2, n_lines, x, first, n_rows, put);
}

// The same for weights in groups.
template <class Put>
void run_groups_on_amx(
    const QuireMatrix& w, const Activations& x, int64_t tile, int64_t other, int64_t first, int64_t n_rows, float* sums,
    float* other_sums, int64_t next, const Put& put) {
    const int64_t size = w.format == QUIRE_NIBBLES ? padded_k(w) * TILE : 0;
    const Scratch scratch({size, size}, Use::LOOKED_UP);
    const GroupNibbles nibbles{table_of(w.table)};
    const auto prepared = [&](int64_t t, float* to, int i) {
        const uint8_t *data = (const uint8_t*)w.data, *at = data + t * tile_bytes(w);
        if (size > 0) look_up_lines(nibbles, at, padded_k(w) / PAIR_K, (uint8_t*)scratch.piece(i));
        const int64_t after = next == NONE ? t : next + t - tile;
        return AmxGroupTile{
            size > 0 ? (const uint8_t*)scratch.piece(i) : at, (const f16*)w.scales + t * TILE * x.n_groups, to,
            data + after * tile_bytes(w), tile_bytes(w)};
    };
    AmxGroupTile tiles[2] = {prepared(tile, sums, 0)};
    if (other != NONE) tiles[1] = prepared(other, other_sums, 1);
    amx_group_products(tiles, other == NONE ? 1 : 2, w.group, x, first, n_rows, put);
}
#endif

// One tile for the rows from `first` on; with an activation, one of gates and the one of ups that belongs to it.
// next: the tile that this thread computes afterwards.
template <class T>
void run_tile(const QuireLinear& a, const Activations& x, int64_t tile, int64_t first, int64_t n_rows, int64_t next) {
    const QuireMatrix& w = *a.matrix;
    const int64_t n_out = a.then == QUIRE_SILU_MUL ? w.n / 2 : w.n, c0 = tile * TILE, other = tile + n_out / TILE;
    const int64_t size = n_rows * TILE * sizeof(float);
    const Scratch scratch({size, size});
    float *sums = (float*)scratch.piece(0), *up_sums = (float*)scratch.piece(1);
    const T* bias = w.bias == nullptr ? nullptr : (const T*)w.bias + c0;
    const auto put = [&](int64_t row, int64_t n) {  // rows whose sums begin at `sums`
        const int64_t out_bytes = a.then == QUIRE_WIDEN ? sizeof(float) : sizeof(T);
        const Outputs<T> to{
            (char*)a.out + ((first + row) * a.out_row + c0) * out_bytes, n, a.out_row,
            n_out - c0 < TILE ? n_out - c0 : TILE, bias, bias == nullptr ? nullptr : bias + n_out};
        if (w.format == QUIRE_INT8) {
            const float *scales = (const float*)w.scales + c0, *row_scales = x.scales + first + row;
            using P = Products<true>;
            put_outputs(to, a.then, P{sums, scales, row_scales}, P{up_sums, scales + n_out, row_scales});
        } else {
            using P = Products<false>;
            put_outputs(to, a.then, P{sums, nullptr, nullptr}, P{up_sums, nullptr, nullptr});
        }
    };
    const int64_t second = a.then == QUIRE_SILU_MUL ? other : NONE;
#if QUIRE_AMX
    if (w.format == QUIRE_INT8)
        return run_on_amx<true>(w, x, tile, second, first, n_rows, sums, up_sums, next, put);
    if (w.format == QUIRE_BF16)
        return run_on_amx<false>(w, x, tile, second, first, n_rows, sums, up_sums, next, put);
    if (on_amx(w, a.m)) return run_groups_on_amx(w, x, tile, second, first, n_rows, sums, up_sums, next, put);
#endif
    tile_sums(w, x, tile, first, n_rows, sums, second == NONE ? next : second);
    if (second != NONE) tile_sums(w, x, second, first, n_rows, up_sums, next);
    put(0, n_rows);
}

// Cuts n tasks into ranges for threads to take, n + 1 bounds at most; returns their number. Long ones first, since what
// follows in memory is prefetched within a range only; short ones last, so that threads end together.
int64_t cut(int64_t n, int64_t task_bytes, int64_t n_rows, int n_threads, int32_t* bounds) {
    const int64_t least = 1 + 60000 * 8 / (task_bytes * (8 + n_rows)), most = 1 + RANGE_BYTES / task_bytes;
    int64_t n_ranges = 0;
    for (int64_t at = 0; at < n; n_ranges++) {
        const int64_t share = (n - at) / (2 * n_threads), size = share < least ? least : share < most ? share : most;
        bounds[n_ranges] = (int32_t)at, at += size;
    }
    bounds[n_ranges] = (int32_t)n;
    return n_ranges;
}

// Announce the matrices that follow.
void prefetch_next(const QuireMatrix& w) {
    PrefetchRange ahead[MOST_RANGES];
    int n = 0;
    int64_t left = AHEAD_OF_STEP;
    for (const QuireMatrix* next = w.next; next != nullptr && n + 2 <= MOST_RANGES && left > 0; next = next->next) {
        const int64_t n_tiles = (next->n + TILE - 1) / TILE, bytes = n_tiles * tile_bytes(*next);
        ahead[n++] = {next->data, bytes < left ? bytes : left};
        left -= bytes;
        if (has_groups(*next)) ahead[n++] = {next->scales, n_tiles * TILE * groups_of(*next) * (int64_t)sizeof(f16)};
    }
    announce_prefetch(ahead, n);
}

template <class T> void run(const QuireLinear& a) {
    const QuireMatrix& w = *a.matrix;
    Activations x{};
    x.m = a.m;
    x.stride = x_stride(w);
    x.n_groups = groups_of(w);
    const Scratch scratch(
        {x.m * x.stride, x.m * x.n_groups * (int64_t)sizeof(float), x.m * x.n_groups * (int64_t)sizeof(int32_t)},
        Use::LOOP);
    x.data = (char*)scratch.piece(0), x.scales = (float*)scratch.piece(1), x.starts = (int32_t*)scratch.piece(2);
    const int64_t fitting = X_BYTES_AT_ONCE / x.stride / ROWS_TOGETHER * ROWS_TOGETHER;
    const int64_t most = fitting > LEAST_ROWS_AT_ONCE ? fitting : LEAST_ROWS_AT_ONCE;
    const int64_t n_parts = (a.m + most - 1) / most, n_blocks = n_row_blocks((a.m + n_parts - 1) / n_parts);
    const auto part_begin = [&](int64_t part) { return part * a.m / n_parts; };
    parallel_for(n_parts * n_blocks, 1 + 16384 / (w.k * TILE_ROWS), a.n_threads, [&](int64_t task) {
        const int64_t part = task / n_blocks, b = task % n_blocks;
        const int64_t first = part_begin(part), n_rows = part_begin(part + 1) - first;
        if (b >= n_row_blocks(n_rows)) return;
        const int64_t begin = block_begin(n_rows, b), end = block_begin(n_rows, b + 1);
#if QUIRE_AMX
        if (on_amx(w, a.m)) return place_rows<T>(a, x, first, n_rows, begin, end);
#endif
        prepare_block<T>(a, x, first + begin, first + end);
    });
    const int64_t paired = a.then == QUIRE_SILU_MUL ? 2 : 1, n_tiles = (w.n / paired + TILE - 1) / TILE;
    const int64_t n_tasks = n_parts * n_tiles;
    const Scratch bounds_memory({(n_tasks + 1) * (int64_t)sizeof(int32_t)}, Use::BOUNDS);
    int32_t* bounds = (int32_t*)bounds_memory.piece(0);
    const int64_t n_ranges = cut(n_tasks, paired * tile_bytes(w), a.m / n_parts, a.n_threads, bounds);
    if (a.n_threads > 1) prefetch_next(w);
    parallel_for(n_ranges, 1, a.n_threads, [&](int64_t range) {
        for (int64_t task = bounds[range]; task < bounds[range + 1]; task++) {
            const int64_t part = task / n_tiles, first = part_begin(part), tile = task % n_tiles;
            const int64_t next = task + 1 < bounds[range + 1] ? (tile + 1) % n_tiles : NONE;
            run_tile<T>(a, x, tile, first, part_begin(part + 1) - first, next);
        }
    });
}

// Several products at once, of matrices of one format and size, each with few rows of its own: one loop over the tiles of
// all of them.
template <class T> void run_together(const QuireLinear* all, int64_t n) {
    const QuireMatrix& w = *all->matrix;
    const int64_t stride = x_stride(w), n_groups = groups_of(w);
    int64_t m = 0, most_rows = 0;
    for (int64_t i = 0; i < n; i++) {
        m += all[i].m;
        most_rows = all[i].m > most_rows ? all[i].m : most_rows;
    }
    const int64_t per_group = m * n_groups * (int64_t)sizeof(float);
    const Scratch scratch({m * stride, per_group, per_group, n * (int64_t)sizeof(Activations)}, Use::LOOP);
    Activations* x = (Activations*)scratch.piece(3);
    for (int64_t i = 0, row = 0; i < n; row += all[i++].m) {
        const int64_t at = row * n_groups;
        x[i] = {
            (char*)scratch.piece(0) + row * stride, (float*)scratch.piece(1) + at, (int32_t*)scratch.piece(2) + at,
            all[i].m, stride, n_groups};
    }
    const int64_t n_blocks = n_row_blocks(most_rows);
    parallel_for(n * n_blocks, 1 + 16384 / (w.k * TILE_ROWS), all->n_threads, [&](int64_t task) {
        const QuireLinear& a = all[task / n_blocks];
        const int64_t b = task % n_blocks;
        if (b >= n_row_blocks(a.m)) return;
        const int64_t begin = block_begin(a.m, b), end = block_begin(a.m, b + 1);
#if QUIRE_AMX
        if (on_amx(w, a.m)) return place_rows<T>(a, x[task / n_blocks], 0, a.m, begin, end);
#endif
        prepare_block<T>(a, x[task / n_blocks], begin, end);
    });
    const int64_t paired = all->then == QUIRE_SILU_MUL ? 2 : 1, n_tiles = (w.n / paired + TILE - 1) / TILE;
    const Scratch bounds_memory({(n * n_tiles + 1) * (int64_t)sizeof(int32_t)}, Use::BOUNDS);
    int32_t* bounds = (int32_t*)bounds_memory.piece(0);
    const int64_t n_ranges = cut(n * n_tiles, paired * tile_bytes(w), m / n, all->n_threads, bounds);
    parallel_for(n_ranges, 1, all->n_threads, [&](int64_t range) {
        for (int64_t task = bounds[range]; task < bounds[range + 1]; task++) {
            const int64_t i = task / n_tiles, tile = task % n_tiles;
            const bool follows = task + 1 < bounds[range + 1] && tile + 1 < n_tiles;
            run_tile<T>(all[i], x[i], tile, 0, all[i].m, follows ? tile + 1 : NONE);
        }
    });
}

bool is_apart(const QuireLinear& a) { return a.then == QUIRE_SILU_MUL && a.matrix->n % (2 * TILE) != 0; }

// An activation whose gates and ups do not lie in whole tiles of their own: after the product, row by row.
template <class T> void run_apart(const QuireLinear& a) {
    const QuireMatrix& w = *a.matrix;
    const Scratch scratch({a.m * w.n * (int64_t)sizeof(T)}, Use::APART);
    QuireLinear plain = a;
    plain.then = QUIRE_NOTHING, plain.out = scratch.piece(0), plain.out_row = w.n;
    run<T>(plain);
    parallel_for(a.m, rows_a_chunk(w.n), a.n_threads, [&](int64_t row) {
        silu_row((const T*)plain.out + row * w.n, (T*)a.out + row * a.out_row, w.n / 2);
    });
}

}  // namespace
}  // namespace quire

void quire_linear(const QuireLinear* args) {
    using namespace quire;
    if (args->m == 0) return;
    by_dtype(args->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        is_apart(*args) ? run_apart<T>(*args) : run<T>(*args);
    });
}

void quire::run_linears(QuireLinear* all, int64_t n) {
    const auto has_few = [](const QuireLinear& a) { return a.m <= LEAST_ROWS_AT_ONCE && !is_apart(a); };
    const int64_t n_few = std::partition(all, all + n, has_few) - all;
    for (int64_t i = n_few; i < n; i++) quire_linear(all + i);
    if (n_few == 0) return;
    by_dtype(all->dtype, [&](auto* type) { run_together<std::remove_pointer_t<decltype(type)>>(all, n_few); });
}
