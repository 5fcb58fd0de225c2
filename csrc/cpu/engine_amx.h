// AmxEngine: products of bf16 pairs by Intel's tile registers.
//
// Scores are computed transposed, keys times queries, so that keys are read where they lie: a tile is 16 keys, a step
// 32 dimensions. Values become pairs of keys as in Bf16Engine. Few rows and many take the same way, with the same bits.
#pragma once
#include "amx.h"
#include "engine_bf16.h"

namespace quire {

#if QUIRE_AMX

struct AmxEngine : Bf16Engine {
    static constexpr int R = 16, GROUPS = B / R, DIMENSIONS = 32, KEY_STEP = 32;
    static constexpr bool PANELS_ONLY = true;
    // Every register has 16 rows of 64 bytes while a tile of attention is at work.
    struct Session {
        Session() { _tile_loadconfig(&SHAPES.of[PAIR_ROWS]); }
        ~Session() { _tile_release(); }
    };
    struct Keys {
        const void* at;
        int64_t stride;  // bytes
    };
    struct Panels {
        Keys* keys;      // [GROUPS]: where 16 keys lie
        uint32_t* copy;  // [B, pairs(d)]: keys that do not lie apart equally, or have other than whole steps
        uint32_t* v;     // [B / 2, padded d]
    };

    static size_t panel_bytes(int d) { return 64 + sizeof(uint32_t) * (B * pairs(d) + B / 2 * padded(d)); }
    static Panels panels(char* at, int d) {
        uint32_t* copy = (uint32_t*)(at + 64);
        return {(Keys*)at, copy, copy + B * pairs(d)};
    }

    // Queries: [blocks of 16 rows][pairs(d)][16].
    static void pack_query(const T* from, bf16* query, int r, int d) {
        uint32_t* to = (uint32_t*)query + (int64_t)(r / R) * pairs(d) * R + r % R;
        for (int i = 0; i < pairs(d) * 2; i += 2 * W) {
            const vu part = i < d ? (vu)load_pairs(from + i, d - i) : vu{};
            for (int l = 0; l < W; l++) to[(i / 2 + l) * R] = part[l];
        }
    }

    static void pack(const Panels& p, const KeyBlock<T>& block, const KeyBlock<T>& next, int d) {
        for (int g = 0; g < GROUPS; g++)
            if (g * R < block.n) p.keys[g] = find_keys(block, g * R, d, p.copy + g * R * pairs(d));
        for (int j = 0; j < B; j += W)
            for (int i = 0; i < d; i += 2 * W) prefetch(next, j, i);
        for (int t = 0; t < key_steps(block.n) * KEY_STEP / 2; t++)
            for (int i = 0; i < d; i += W)
                store_bits(
                    p.v + t * padded(d) + i, value_pair(block.values[2 * t] + i, block.values[2 * t + 1] + i, d - i));
    }

    // 16 keys from j on, if need be as a copy.
    static Keys find_keys(const KeyBlock<T>& block, int j, int d, uint32_t* copy) {
        const T* const* keys = block.keys + j;
        const int64_t apart = keys[1] - keys[0];
        bool equal = d % DIMENSIONS == 0 && j + R <= block.n;
        for (int i = 1; i < R; i++) equal &= keys[i] - keys[i - 1] == apart;
        if (equal) return {keys[0], apart * (int64_t)sizeof(T)};
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2 * pairs(d); i += 2 * W)
                store_bits(copy + r * pairs(d) + i / 2, i < d ? load_pairs(keys[r] + i, d - i) : vf{});
        return {copy, (int64_t)sizeof(uint32_t) * pairs(d)};
    }

    static void scores(int n_rows, const bf16* query, int row, const Panels& p, int n_keys, int d, float* s) {
        alignas(64) vf turned[B];
        asm volatile("" ::: "memory");  // compilers know not what tile loads read
        const char* q = (const char*)((const uint32_t*)query + (int64_t)(row / R) * pairs(d) * R);
        const int n_steps = pairs(d) / (DIMENSIONS / 2), n_groups = (n_keys + R - 1) / R;
        by_count<GROUPS>(n_groups, [&](auto groups) {
            constexpr int N = decltype(groups)::value;
            const auto keys = [&](int g, int t) { return (const char*)p.keys[g].at + t * STEP_BYTES; };
            load_sums<N>(ZEROS, 0, 0);
            for (int t = 0; t < n_steps; t++) {
                _tile_loadd(7, q + t * R * STEP_BYTES, STEP_BYTES);
                _tile_loadd(4, keys(0, t), p.keys[0].stride);
                _tile_dpbf16ps(0, 4, 7);
                if constexpr (N > 1) {
                    _tile_loadd(5, keys(1, t), p.keys[1].stride);
                    _tile_dpbf16ps(1, 5, 7);
                }
                if constexpr (N > 2) {
                    _tile_loadd(6, keys(2, t), p.keys[2].stride);
                    _tile_dpbf16ps(2, 6, 7);
                }
                if constexpr (N > 3) {
                    _tile_loadd(4, keys(3, t), p.keys[3].stride);
                    _tile_dpbf16ps(3, 4, 7);
                }
            }
            store_sums<N>((char*)turned, sizeof(vf), sizeof(vf) * R);
        });
        for (int g = 0; g < n_groups; g++) {
            vf block[R];
            for (int j = 0; j < R; j++) block[j] = turned[g * R + j];
            transpose(block);
            for (int r = 0; r < n_rows; r++) store(s + r * B + g * R, block[r]);
        }
    }

    static void accumulate(
        int n_rows, const bf16* w, const float* rescale, const Panels& p, int n_keys, int lanes_d, float* acc) {
        for (int r = 0; r < n_rows; r++)
            if (rescale[r] != 1.f)
                for (int i = 0; i < lanes_d; i += W) {
                    float* at = acc + r * lanes_d + i;
                    store(at, load(at) * rescale[r]);
                }
        asm volatile("" ::: "memory");
        const int64_t stride = lanes_d * sizeof(float);
        const int n_steps = key_steps(n_keys);
        for (int i = 0; i < lanes_d; i += COLUMNS * W) {
            const int left = (lanes_d - i) / W;
            by_count<COLUMNS>(left < COLUMNS ? left : COLUMNS, [&](auto columns) {
                constexpr int N = decltype(columns)::value;
                load_sums<N>((const char*)(acc + i), stride, sizeof(vf));
                for (int t = 0; t < n_steps; t++) {
                    const uint32_t* v = p.v + (int64_t)t * KEY_STEP / 2 * lanes_d + i;
                    _tile_loadd(7, w + t * KEY_STEP, B * sizeof(bf16));
                    _tile_loadd(4, v, stride);
                    _tile_dpbf16ps(0, 7, 4);
                    if constexpr (N > 1) {
                        _tile_loadd(5, v + W, stride);
                        _tile_dpbf16ps(1, 7, 5);
                    }
                    if constexpr (N > 2) {
                        _tile_loadd(6, v + 2 * W, stride);
                        _tile_dpbf16ps(2, 7, 6);
                    }
                    if constexpr (N > 3) {
                        _tile_loadd(4, v + 3 * W, stride);
                        _tile_dpbf16ps(3, 7, 4);
                    }
                }
                store_sums<N>((char*)(acc + i), stride, sizeof(vf));
            });
        }
    }

    // N tiles of sums, `apart` bytes from one to the next.
    template <int N> QUIRE_INLINE void load_sums(const char* at, int64_t stride, int64_t apart) {
        _tile_loadd(0, at, stride);
        if constexpr (N > 1) _tile_loadd(1, at + apart, stride);
        if constexpr (N > 2) _tile_loadd(2, at + 2 * apart, stride);
        if constexpr (N > 3) _tile_loadd(3, at + 3 * apart, stride);
    }

    template <int N> QUIRE_INLINE void store_sums(char* at, int64_t stride, int64_t apart) {
        _tile_stored(0, at, stride);
        if constexpr (N > 1) _tile_stored(1, at + apart, stride);
        if constexpr (N > 2) _tile_stored(2, at + 2 * apart, stride);
        if constexpr (N > 3) _tile_stored(3, at + 3 * apart, stride);
    }

    alignas(64) static inline const char ZEROS[64] = {};

    static int key_steps(int n_keys) { return (n_keys + KEY_STEP - 1) / KEY_STEP; }
};

using PairEngine = AmxEngine;

#else

using PairEngine = Bf16Engine;

#endif

}  // namespace quire
