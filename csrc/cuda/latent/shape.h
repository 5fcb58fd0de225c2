// Sizes of the kernel of latent attention, what its shared memory holds, and lines as its warps see them. See latent.cu.
#pragma once
#include "decode/out.h"
#include "wgmma.h"

namespace quire {
namespace {

constexpr int RANK = OUT_DIM, DIM = RANK + 64;       // of a value, of a key: the value is its first part
constexpr int ROWS = QUIRE_ROWS;                 // packed rows of a tile
constexpr int KEYS = 64;                         // of a stage
constexpr int TEAMS = ROWS > 32 ? 2 : 1;         // consumer warpgroups
constexpr int TEAM_ROWS = ROWS / TEAMS;          // whose logits a team computes ..
constexpr int TEAM_TILES = RANK / 64 / TEAMS;    // .. and tiles of 64 dimensions that it sums, of all rows
constexpr int CHAINS = ROWS == 16 ? 2 : 1;       // sums of the logits
constexpr int CONSUMERS = 128 * TEAMS;           // threads
// With two teams the producer's registers go to them, which takes whole warpgroups.
constexpr bool SHIFTS_REGISTERS = TEAMS > 1;
constexpr int THREADS = CONSUMERS + (SHIFTS_REGISTERS ? 128 : 32);
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
constexpr int STAGES = 2;
static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64, "rows of a tile");

// In shared memory 8 keys are 9 chunks of 64 columns, each 8 swizzled rows of 128 bytes. So keys of any page size that
// is a multiple of 8 lie evenly, and a stage is one operand. Queries and weights: chunks of all rows.
constexpr int CHUNK_BYTES = 1024, CHUNKS = DIM / 64;
constexpr int EIGHT_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int STAGE_BYTES = KEYS / 8 * EIGHT_BYTES;
constexpr int Q_CHUNK_BYTES = ROWS * 128, Q_BYTES = CHUNKS * Q_CHUNK_BYTES;
constexpr int WEIGHTS_BYTES = ROWS * KEYS * 2;
constexpr int RESULT_BYTES = RANK * 2 + 16;      // a row of the result, in the place of the queries
static_assert(ROWS * RESULT_BYTES <= Q_BYTES, "results do not fit");
constexpr int SHARED_BYTES = 1024 + STAGES * (STAGE_BYTES + 16) + Q_BYTES + WEIGHTS_BYTES + ROWS * 6 * 4;
static_assert(SHARED_BYTES <= 232448, "a multiprocessor has less shared memory");

constexpr float SLACK = 8.f;  // the maximum moves when a logit passes it by this much (base 2)
constexpr int BARRIER_ALL = 1;

struct Shared {
    uint32_t ring, queries, weights;  // [STAGES][STAGE_BYTES]; [CHUNKS][ROWS][128]; [ROWS][128]
    uint32_t filled, drained;         // barriers, 8 bytes for each stage
    float* of_warps;                  // [4][ROWS]: maxima, or sums, of the warps of a team
    float* moves;                     // [ROWS]: what sums under the former maximum are multiplied by
    int* positions;                   // [ROWS]
};

__device__ __forceinline__ Shared shared_layout() {
    extern __shared__ char raw[];
    char* ring = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    const uint32_t at = shared_address(ring), queries = at + STAGES * STAGE_BYTES, weights = queries + Q_BYTES;
    const uint32_t filled = weights + WEIGHTS_BYTES;
    float* numbers = reinterpret_cast<float*>(ring + STAGES * (STAGE_BYTES + 16) + Q_BYTES + WEIGHTS_BYTES);
    return {at, queries, weights, filled, filled + STAGES * 8, numbers, numbers + 4 * ROWS,
            reinterpret_cast<int*>(numbers + 5 * ROWS)};
}

struct Stage {  // a place in the ring, and the parity of its current use
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

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
