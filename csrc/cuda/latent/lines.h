// Lines of work as the warps of latent attention see them: blocks of keys, and rows.
#pragma once
#include "decode/out.h"

namespace quire {
namespace {

constexpr int RANK = OUT_DIM, DIM = RANK + 64;  // of a value, of a key: the value is its first part
constexpr int ROWS = QUIRE_ROWS;                // packed rows of a tile
constexpr int KEYS = 64;                        // of a stage
constexpr float SLACK = 8.f;                    // the maximum moves when a logit passes it by this much (base 2)

// What a CTA does: lines first .. last - 1, of each the packed rows from first_row on.
struct Share {
    const QuireTile* lines;
    int first, last, first_row;
};

struct Line {
    QuireTile tile;
    int n_rows;            // that are real; none: nothing is loaded or written
    int begin, end;        // keys that some row may see
    int start, n_blocks;   // `begin`, rounded down to a copy; blocks of KEYS keys from there
    int first_position;    // all rows see the keys up to it
};

__device__ __forceinline__ Line load_line(const Share& share, int index, int group, int box_rows) {
    union {
        int4 words[3];
        QuireTile tile;
    } both;
    const int4* from = reinterpret_cast<const int4*>(share.lines + index);
    for (int i = 0; i < 3; ++i) both.words[i] = load_here(from + i);
    const QuireTile tile = both.tile;
    Line line{tile, min(tile.n_tokens * group - share.first_row, ROWS), tile.begin, tile.end, 0, 0, -1};
    line.start = line.begin & ~(box_rows - 1);
    if (line.n_rows <= 0) return line;
    if (!tile.gathered) {
        line.first_position = tile.position + share.first_row / group;
        line.end = min(line.end, tile.position + (share.first_row + line.n_rows - 1) / group + 1);
    }
    if (line.end > line.begin) line.n_blocks = (line.end - line.start + KEYS - 1) / KEYS;
    return line;
}

struct Row {
    int q_row, position, head;
};

__device__ __forceinline__ Row find_row(const QuireTile& tile, int packed, int group, const QuireAttnArgs& args) {
    const int token = packed / group, head = packed - token * group;
    if (!tile.gathered) return {tile.row + token, tile.position + token, head};
    const int* found = args.rows + 2 * (tile.row + token);
    return {load_here(found), load_here(found + 1), head};
}

}  // namespace
}  // namespace quire
