// Sizes of the kernel of latent attention with 33 to 64 rows, and what its shared memory holds. See latent_wide.cu.
#pragma once
#include "cluster.h"
#include "latent/lines.h"
#include "wgmma.h"

namespace quire {
namespace {

constexpr int TEAMS = 2, TEAM_THREADS = 128, CONSUMERS = TEAMS * TEAM_THREADS;  // consumer warpgroups
constexpr int THREADS = CONSUMERS + 128;  // registers go from a whole warpgroup, of which a warp copies
constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;
constexpr int STAGES = 2;                 // one for each team
constexpr int TEAM_DIM = RANK / TEAMS;    // dimensions of the result that a team sums
static_assert(ROWS == 64, "rows of a tile");

// In shared memory a stage is four parts of columns, which are copied, multiplied and given back one after the other:
// each team's 256 dimensions of the values are two parts, the last one has the rotated 64 columns, too. Of a part 8 keys
// are chunks of 64 columns, each 8 swizzled rows of 128 bytes. So keys of any page size that is a multiple of 8 lie
// evenly, and a part is one operand. Once a team has multiplied its keys, their rotated columns are no longer needed:
// there it puts its weights.
constexpr int CHUNK_BYTES = 1024, CHUNKS = DIM / 64;
constexpr int PARTS = 4, TEAM_PARTS = PARTS / TEAMS, LAST = PARTS - 1, PART_DIM = RANK / PARTS;
constexpr int PART_CHUNKS = PART_DIM / 64, LAST_CHUNKS = PART_CHUNKS + 1;
constexpr int PART_BYTES = KEYS / 8 * PART_CHUNKS * CHUNK_BYTES;
constexpr int STAGE_BYTES = KEYS / 8 * CHUNKS * CHUNK_BYTES;
constexpr int WEIGHTS_AT = LAST * PART_BYTES + PART_CHUNKS * CHUNK_BYTES;
__device__ __forceinline__ constexpr int chunks_of(int part) { return part == LAST ? LAST_CHUNKS : PART_CHUNKS; }
__device__ __forceinline__ constexpr int eight_of(int part) { return chunks_of(part) * CHUNK_BYTES; }  // bytes
constexpr int Q_CHUNK_BYTES = ROWS * 128, Q_BYTES = CHUNKS * Q_CHUNK_BYTES;
constexpr int RESULT_BYTES = RANK * 2 + 16;  // a row of the result, in the place of the queries
static_assert(ROWS * RESULT_BYTES <= Q_BYTES, "results do not fit");
constexpr int N_BARRIERS = STAGES * PARTS;   // of each kind
constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + Q_BYTES + N_BARRIERS * 16 + ROWS * (2 * TEAMS + 1) * 4;
static_assert(SHARED_BYTES <= 232448, "a multiprocessor has less shared memory");

constexpr int BARRIER_ALL = 1, BARRIER_TEAM = 2, BARRIER_WEIGHTS = 4, BARRIER_TURN = 6;  // the middle two: of team 0, of team 1

struct Shared {
    uint32_t ring, queries;    // [STAGES][STAGE_BYTES]; [CHUNKS][ROWS][128]
    uint32_t filled, drained;  // barriers, 8 bytes for each part of each stage
    float* tops;               // [TEAMS][ROWS]: the maximum behind a team's last block
    float* sums;               // [TEAMS][ROWS]
    int* positions;            // [ROWS]

    __device__ __forceinline__ uint32_t stage(int i) const { return ring + i * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t filled_of(int stage, int part) const {
        return filled + (stage * PARTS + part) * 8;
    }
    __device__ __forceinline__ uint32_t drained_of(int stage, int part) const {
        return drained + (stage * PARTS + part) * 8;
    }
};

__device__ __forceinline__ Shared shared_layout() {
    extern __shared__ char raw[];
    char* ring = raw + ((1024 - shared_address(raw) % 1024) % 1024);
    char* barriers = ring + STAGES * STAGE_BYTES + Q_BYTES;
    const uint32_t at = shared_address(ring), filled = shared_address(barriers);
    float* numbers = reinterpret_cast<float*>(barriers + N_BARRIERS * 16);
    return {at,
            at + STAGES * STAGE_BYTES,
            filled,
            filled + N_BARRIERS * 8,
            numbers,
            numbers + TEAMS * ROWS,
            reinterpret_cast<int*>(numbers + 2 * TEAMS * ROWS)};
}

}  // namespace
}  // namespace quire
