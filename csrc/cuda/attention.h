// The interface of the CUDA attention kernels: plain C, filled by quire/kernels/attention/hopper/launcher.py through
// ctypes.
//
// Work is a list of lines that the host has planned (quire/kernels/attention/schedule/tiles.py). A line is a tile:
// tokens of one span, or gathered from several spans, times the query heads of one KV head (packed row = token * group +
// head of the group), against a range of keys. Small lines (few packed rows: decode) are handed to the CTAs of a
// persistent grid, one a multiprocessor; large lines (up to 128 packed rows: prefill, shared prefixes) form a queue,
// dear ones first, and each is computed for every KV head.
// Keys are counted by their index in the list of keys of the tile's sequence. Strides count elements.
#pragma once
#include <cstdint>

constexpr int QUIRE_MAX_PARAMS = 8;

// One line of work: int32 [12]. Lists of lines and of merges are aligned to 16 bytes, `rows` to 8.
struct QuireTile {
    int32_t row;        // contiguous: first row of q; gathered: first line of `rows`
    int32_t n_tokens;   // 0: skip the line
    int32_t position;   // contiguous: of the first token, the others follow; gathered: of the first, see `rows`
    int32_t begin, end; // keys begin .. end - 1; causal: token i sees key j only if position_of(j) <= position of i
    int32_t kv_at;      // pages: index of the sequence's first entry in `pages`; ragged: row of its key 0 in k and v
    int32_t blocks_at;  // block-sparse: index of the tile's first entry in `blocks`
    int32_t partial;    // packed row in partial_out of the tile's first row, or -1: the result is final.
                        // Large lines: KV head h writes from partial + h * n_tokens * group on.
    int32_t kv_head;    // small lines; large lines are computed for every KV head
    int32_t gathered;   // 1: token i is rows[row + i] = (row of q, position)
    int32_t spare[2];
};

struct QuireMerge {      // one token of one KV head: all rows of the group
    int32_t row;         // of out
    int32_t kv_head;
    int32_t parts_at, n_parts;  // parts[parts_at + i]: packed row in partial_out of the token's first query head
};

struct QuireAttnArgs {
    const void *q, *k, *v;      // q [n, n_q_heads, head_dim]; k, v: pages [n_pages, n_kv_heads, page_size, head_dim],
                                // in decode.cu of q's type or e4m3,
                                // or ragged rows [n_keys, n_kv_heads, head_dim]; any strides, last dimension contiguous
    void* out;                  // [n, n_q_heads, head_dim], contiguous
    float* lse;                 // [n, n_q_heads], natural logarithm, or null
    const QuireTile *small_lines, *large_lines;  // null: none. Small lines are launched first, and nothing between
    const int32_t* queue;       // [n_ctas + 1]: CTA c runs small lines queue[c] .. queue[c + 1] - 1, in order
    const int32_t* rows;        // [.., 2], see QuireTile::gathered
    const int32_t* pages;       // flat page table
    const int32_t* blocks;      // block-sparse: page of the sequence (position / page_size) of each entry, ascending
    const QuireMerge* merges;
    const int32_t* parts;
    float* partial_out;         // [n_partial_rows, head_dim]
    float* partial_lse;         // [n_partial_rows], base 2
    int32_t* ticket;            // one counter for the device's own queue of large lines: 0 before and after a launch
    int64_t q_row, q_head;      // strides
    int64_t k_page, k_head, k_token, v_page, v_head, v_token;  // ragged: k_page is unused
    int64_t n_pages;            // ragged: number of rows of k and v
    int32_t n_ctas, n_large, n_merges;  // grid sizes; lines and merges beyond the real ones have n_tokens / n_parts 0
    int32_t page_size, n_q_heads, n_kv_heads, head_dim;
    int32_t window, n_first;    // sliding window (0: none), and leading positions that stay visible beside it
    int32_t settled;            // 1: keys below the first token of a tile were stored before the previous grid began
    int32_t one_merge;          // 1: parts are always added by the same kernel, however many rows have some
    float scale;                // of the logits, the scale of keys in e4m3 counted in
    float v_scale;              // of values in e4m3
    float scalars[QUIRE_MAX_PARAMS];          // parameters of the variant
    float inverses[QUIRE_MAX_PARAMS];         // 1 / scalars: hooks multiply by them instead of dividing
    const void* tensors[QUIRE_MAX_PARAMS];
};
