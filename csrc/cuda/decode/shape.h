// Sizes of the kernel of small lines, what its shared memory holds, and places in its rings. See decode.cu.
#pragma once
#include "decode/out.h"

namespace quire {
namespace {

enum Layout { PAGED = 0, RAGGED = 1, SPARSE = 2 };

constexpr Layout LAYOUT = static_cast<Layout>(QUIRE_LAYOUT);
constexpr int DIM = QUIRE_HEAD_DIM, ROWS = QUIRE_ROWS;
constexpr bool CODED = QUIRE_CODED;  // pages hold e4m3, a byte a number, and tokens of a page are contiguous
static_assert(!CODED || LAYOUT != RAGGED, "codes lie in pages");
// Hooks on every logit take longer than the copies: more warps share them, and a longer stage. Of codes a stage of as
// many bytes has twice the keys and twice the work, where registers suffice for it.
constexpr bool TWICE = CODED && ROWS <= 16;
constexpr bool HOOKED = (Variant::has_logits || Variant::has_mask) && ROWS <= 16 && DIM <= 128;
constexpr int KEYS = HOOKED ? 128 : (DIM > 192 && ROWS > 8 ? 32 : 64) * (TWICE ? 2 : 1);  // of a stage
constexpr int WARPS =  // consumers
    HOOKED || (TWICE && (ROWS == 8 ? DIM > 128 : DIM != 192)) || ROWS > 16 ? 8 : 4;
constexpr int WRITERS = 2;  // warps that load q and write results
constexpr int WARP_ROWS = ROWS < 16 || DIM > 192 || (DIM > 128 && ROWS > 16) ? 8 : 16;  // packed rows of a consumer
constexpr int ROW_WARPS = ROWS / WARP_ROWS;       // consumers side by side in rows ..
constexpr int KEY_WARPS = WARPS / ROW_WARPS;      // .. and in keys
constexpr int KEY_TILES = KEYS / 16 / KEY_WARPS;  // of 16 keys, of a consumer in a stage
constexpr int ROW_TILES = WARP_ROWS / 8;
constexpr int DIM_TILES = DIM / 16;
// In shared memory a key is chunks of 64 elements, 128 bytes, and the chunks of a box lie one after the other. Heads of
// 96 would waste half of their second chunk and much bandwidth: where the tokens of a page are contiguous they are
// copied as they are, two tokens in three chunks (`packed`). So are codes of any dimension: rows of 128 bytes, one after
// the other.
constexpr int CHUNKS = (DIM + 63) / 64;
constexpr bool MAY_PACK = CODED || (DIM == 96 && LAYOUT != RAGGED);
constexpr int NUMBER_BYTES = CODED ? 1 : 2;
static_assert(ROW_WARPS * WARP_ROWS == ROWS && KEY_WARPS * ROW_WARPS == WARPS, "warps do not cover the rows");
static_assert(KEY_TILES * KEY_WARPS * 16 == KEYS && DIM % 32 == 0, "warps do not cover the keys");

constexpr int HALF_BYTES = CODED ? KEYS * DIM : KEYS * CHUNKS * 128;  // keys, or values, of a stage
constexpr int STAGE_BYTES = 2 * HALF_BYTES;
constexpr int MAX_BOXES = KEYS / 8;               // copies of a half
constexpr int QUERIES = ROWS <= 16 ? 2 : 1;       // q of lines in flight
constexpr int Q_ROW_BYTES = DIM * 2 + 16;         // in shared memory: rows begin in different banks
constexpr int Q_BYTES = ROWS * Q_ROW_BYTES;
// Results of lines on their way to the writers. A line's sums pass in rounds of ROUND_DIM dimensions, which keeps their
// meeting place small.
constexpr int RESULTS = 2;
// The consumers write a CTA's last line themselves: 0.3 us sooner. With more rows this costs 8 % of short lines.
constexpr bool FINISH = ROWS < 16;
constexpr int ROUNDS_WANTED = (KEY_WARPS * ROWS * DIM + 4095) / 4096;
constexpr int ROUNDS = ROUNDS_WANTED < 2 ? 1 : (ROUNDS_WANTED == 2 || DIM_TILES % 4 ? 2 : 4);
constexpr int ROUND_DIM = DIM / ROUNDS;
constexpr int SUM_STRIDE = ROUND_DIM + (ROUND_DIM % 16 == 0 ? 4 : 12);  // 4 mod 16: no bank conflicts
static_assert(SUM_STRIDE % 16 == 4 && DIM_TILES % ROUNDS == 0, "uneven rounds");

constexpr int SUMS = KEY_WARPS * ROWS * SUM_STRIDE, STATES = KEY_WARPS * ROWS;  // of a result
constexpr int RESULT_BYTES = SUMS * 4 + STATES * 8;
constexpr int LINE_BARRIERS = 2 * RESULTS + 2;    // besides those of the stages
constexpr int FIXED_BYTES = RESULTS * RESULT_BYTES + QUERIES * Q_BYTES + LINE_BARRIERS * 8;
// Less the alignment of the ring, and room for a block of the merge kernel, which waits beside this one for its end.
constexpr int SHARED_LIMIT = 232448 - 1024 - 13312;
constexpr int STAGES_FIT = (SHARED_LIMIT - FIXED_BYTES) / (STAGE_BYTES + 16 + 4 * MAX_BOXES);
constexpr int STAGES_ENOUGH = (128 * 1024 + STAGE_BYTES - 1) / STAGE_BYTES;
constexpr int STAGES = STAGES_FIT < STAGES_ENOUGH ? STAGES_FIT : STAGES_ENOUGH;
constexpr int SHARED_BYTES = 1024 + STAGES * (STAGE_BYTES + 16 + 4 * MAX_BOXES) + FIXED_BYTES;
static_assert(STAGES >= 2 && STAGES <= STAGES_FIT, "the ring does not fit");

constexpr bool STARTS_EARLY = LAYOUT == PAGED && Variant::causal;  // knows which keys are settled
constexpr float SLACK = 8.f;         // the maximum moves when a score passes it by this much (base 2)

struct BoxShape {  // of one copy: keys of a page, or of the ragged rows
    int rows;  // a power of two
    bool packed;
    __device__ __forceinline__ int bytes() const { return rows * (MAY_PACK && packed ? DIM * NUMBER_BYTES : CHUNKS * 128); }
};

struct Shared {
    uint32_t ring, filled, drained;  // stages; barriers, 8 bytes for each stage
    uint32_t queries, q_filled;      // [QUERIES][ROWS][Q_ROW_BYTES]; its barriers
    uint32_t written, read;          // barriers of results
    float* sums;                     // [RESULTS][KEY_WARPS][ROWS][SUM_STRIDE]
    float2* states;                  // [RESULTS][KEY_WARPS][ROWS] (maximum, sum of weights)
    int* box_positions;              // [STAGES][MAX_BOXES]; block-sparse: position of a box's first key
};

__device__ __forceinline__ Shared shared_layout() {
    extern __shared__ char raw[];
    char* ring = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    char* queries = ring + STAGES * STAGE_BYTES;
    char* sums = queries + QUERIES * Q_BYTES;
    char* states = sums + RESULTS * SUMS * 4;
    char* barriers = states + RESULTS * STATES * 8;
    const uint32_t of_stages = shared_address(barriers), of_lines = of_stages + STAGES * 16;
    return {shared_address(ring),
            of_stages,
            of_stages + STAGES * 8,
            shared_address(queries),
            of_lines + RESULTS * 16,
            of_lines,
            of_lines + RESULTS * 8,
            reinterpret_cast<float*>(sums),
            reinterpret_cast<float2*>(states),
            reinterpret_cast<int*>(barriers + STAGES * 16 + LINE_BARRIERS * 8)};
}

template <int N>
struct Slot {  // a place in a ring of N, and the parity of its current use
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++at == N) at = 0, parity ^= 1;
    }
};

}  // namespace
}  // namespace quire
