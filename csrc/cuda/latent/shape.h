// Sizes of the kernel of latent attention with few rows, and what its shared memory holds. See latent.cu.
#pragma once
#include "latent/lines.h"
#include "wgmma.h"

namespace quire {
namespace {

constexpr int CHAINS = ROWS == 16 ? 2 : 1;  // sums of the logits
constexpr int CONSUMERS = 128, THREADS = CONSUMERS + 32;
constexpr int STAGES = 2;
constexpr int TILES = RANK / 64;            // of 64 dimensions of the result
static_assert(ROWS == 16 || ROWS == 32, "rows of a tile");

// In shared memory 8 keys are 9 chunks of 64 columns, each 8 swizzled rows of 128 bytes. So keys of any page size that
// is a multiple of 8 lie evenly, and a stage is one operand. Queries and weights: chunks of all rows.
constexpr int CHUNK_BYTES = 1024, CHUNKS = DIM / 64;
constexpr int EIGHT_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int STAGE_BYTES = KEYS / 8 * EIGHT_BYTES;
constexpr int Q_CHUNK_BYTES = ROWS * 128, Q_BYTES = CHUNKS * Q_CHUNK_BYTES;
constexpr int WEIGHTS_BYTES = ROWS * KEYS * 2;
constexpr int RESULT_BYTES = RANK * 2 + 16;      // a row of the result, in the place of the queries
static_assert(ROWS * RESULT_BYTES <= Q_BYTES, "results do not fit");
constexpr int SHARED_BYTES = 1024 + STAGES * (STAGE_BYTES + 16) + Q_BYTES + WEIGHTS_BYTES + ROWS * 5 * 4;
static_assert(SHARED_BYTES <= 232448, "a multiprocessor has less shared memory");

constexpr int BARRIER_ALL = 1;

struct Shared {
    uint32_t ring, queries, weights;  // [STAGES][STAGE_BYTES]; [CHUNKS][ROWS][128]; [ROWS][128]
    uint32_t filled, drained;         // barriers, 8 bytes for each stage
    float* of_warps;                  // [4][ROWS]: maxima, or sums, of the warps
    int* positions;                   // [ROWS]
};

__device__ __forceinline__ Shared shared_layout() {
    extern __shared__ char raw[];
    char* ring = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    const uint32_t at = shared_address(ring), queries = at + STAGES * STAGE_BYTES, weights = queries + Q_BYTES;
    const uint32_t filled = weights + WEIGHTS_BYTES;
    float* numbers = reinterpret_cast<float*>(ring + STAGES * (STAGE_BYTES + 16) + Q_BYTES + WEIGHTS_BYTES);
    return {at, queries, weights, filled, filled + STAGES * 8, numbers,
            reinterpret_cast<int*>(numbers + 4 * ROWS)};
}

struct Stage {  // a place in the ring, and the parity of its current use
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance() {
        if (++at == STAGES) at = 0, parity ^= 1;
    }
};

}  // namespace
}  // namespace quire
