// Experts in codes for moe_few.cu: 64 columns of 16 rows of w, made to numbers in registers and multiplied by one warp.
//
// A thread has two of the rows, lane / 4 of the upper eight and of the lower, and 16 columns of each. Columns are added
// in an order of their own, which x follows: of bytes a thread has 16 that lie side by side, of words the order is that of
// quire/kernels/nibbles.py. Sums are scaled after each group of columns that share a scale.
//
// Scales of an item are copied to shared memory by the warp that loads: nobody who multiplies waits for memory.
#pragma once
#include "moe/codes.h"
#include "moe/few_lists.h"

namespace quire {

#if QUIRE_CODES
struct FewCodes : FewLists {
    using FewLists::FewLists;

    // ---- scales ----

    template <class K> __device__ void copy_part(uint32_t to, int expert, int row) const {  // of OUT_ROWS rows
        const int n_bytes = scales_row_bytes(columns<K>()), n = K::IS_UP ? 2 * a.inner : a.hidden;
        const int lane = threadIdx.x % 32;
        const char* from = static_cast<const char*>(K::IS_UP ? a.up_scales : a.down_scales);
        if (IN_BLOCKS) {
            from += (int64_t(expert) * ((n + 127) / 128) + row / 128) * n_bytes;
            for (int i = lane; i < n_bytes / 4; i += 32) copy_4_bytes(to + i * 4, from + i * 4);
            return;
        }
        from += (int64_t(expert) * n + row) * n_bytes;
        const bool is_padded = scales_step(columns<K>()) != n_bytes;
        for (int i = lane; i < K::OUT_ROWS * n_bytes / 16; i += 32)
            copy_16_bytes(to + i * 16 + (is_padded ? i / (n_bytes / 16) * 16 : 0), from + i * 16, true);
    }
    __device__ uint32_t scales_of(const Ring& ring) const { return base + at.scales + ring.stage * at.scales_bytes; }
    __device__ uint32_t scales_full(int i) const { return base + at.barriers + (2 * MAX_STAGES + i) * 8; }
    __device__ uint32_t scales_empty(int i) const { return scales_full(MAX_SCALES + i); }
    __device__ void init_scales() const {
        for (int i = 0; i < a.n_scales; i++) {
            barrier_init(scales_full(i), 32);
            barrier_init(scales_empty(i), WARPS);
        }
    }
    // By all lanes of the warp that loads: one of them asks for the weights, and the others wait for it.
    template <class K> __device__ void copy_scales(int tile, int row, Ring& ring) const {
        const int n_bytes = Layout::part_bytes<K>(columns<K>());
        const uint32_t to = scales_of(ring);
        __syncwarp();
        if (ring.turn > 0) barrier_wait(scales_empty(ring.stage), (ring.turn - 1) & 1);
        if (K::IN_PARTS) {
            for (int part = 0; part < n_tiles(); part++) copy_part<K>(to + part * n_bytes, tiles()[part].expert, row);
        } else {
            const int expert = tiles()[tile].expert;
            copy_part<K>(to, expert, row);
            if (K::IS_UP) copy_part<K>(to + n_bytes, expert, a.inner + row);
        }
        barrier_arrive_after_copies(scales_full(ring.stage));
        ring.advance(a.n_scales);
        __syncwarp();
    }
    __device__ void wait_for_scales(const Ring& ring) const { barrier_wait(scales_full(ring.stage), ring.turn & 1); }
    __device__ void leave_scales(Ring& ring) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(scales_empty(ring.stage));
        ring.advance(a.n_scales);
    }
    // Of the 64 columns from `column` of a row whose scales begin at `from`.
    __device__ __forceinline__ static RowScales read_scales(uint32_t from, int column) {
        constexpr uint32_t WIDE = QUIRE_GROUP ? QUIRE_GROUP : 1, BYTES = !IN_WORDS ? 4 : IS_FP4 ? 1 : 2 * (1 + QUIRE_ZEROS);
        from += QUIRE_GROUP ? column / WIDE * BYTES : 0;
        RowScales found;
        if (SCALES == 4) {
            const uint2 four = read_pair(from);
            found.bits[0] = four.x, found.bits[SCALES > 2 ? 1 : 0] = four.y;
        } else {
            found.bits[0] = IS_FP4 || (IN_WORDS && SCALES == 1) ? read_two_bytes(from) : read_word(from);
        }
        return found;
    }

    // What a thread's sums of e4m3 are scaled by, of its two tokens of each eight: rows of x are codes, too. Scales lie
    // [group][TOKENS], and of the parts of a sum [part][group].
    template <class K> __device__ __forceinline__ uint32_t x_scales_of(int row) const {
        return base + this->at.x_scales + (K::IN_PARTS ? row * Layout::n_groups(columns<K>()) : row) * 4;
    }
    template <class K> static constexpr int X_SCALES_STEP = K::IN_PARTS ? 4 : TOKENS * 4;  // to the next group
    template <class K> __device__ __forceinline__ void read_x_scales(float2 (&by)[EIGHTS], int column, int part) const {
        const uint32_t from = x_scales_of<K>(part) + (QUIRE_GROUP ? column / 128 : 0) * X_SCALES_STEP<K>;
#pragma unroll
        for (int v = 0; v < EIGHTS; v++) {
            by[v] = make_float2(1.0f, 1.0f);
            if (QUIRE_CODES == 1 && K::IN_PARTS) by[v].x = by[v].y = __uint_as_float(read_word(from));
            if (QUIRE_CODES == 1 && !K::IN_PARTS) by[v] = read8(from + (v * 8 + threadIdx.x % 4 * 2) * 4);
        }
    }

    // ---- numbers ----

    // Where a lane's rows of x begin, of each eight tokens of a tile.
    __device__ __forceinline__ void find_x(uint32_t (&at)[EIGHTS], const Tile& tile, int row_bytes) const {
        const int lane = threadIdx.x % 32, row = IN_WORDS ? lane % 8 : lane / 4;
#pragma unroll
        for (int v = 0; v < EIGHTS; v++)
            at[v] = base + this->at.x + min(v * 8 + row, tile.n - 1) * row_bytes +
                    (IN_WORDS ? lane / 8 * 16 : lane % 4 * 32);
    }
    // x of 64 columns: of step s, of 16, [2 s] and [2 s + 1].
    __device__ __forceinline__ static void read_x(uint32_t (&x)[8], uint32_t from) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t four[4];
            if (IN_WORDS) {
                load_matrices(four, from + half * 64);
            } else {
                const uint4 own = read16(from + half * 16);
                four[0] = own.x, four[1] = own.y, four[2] = own.z, four[3] = own.w;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) x[half * 4 + i] = four[i];
        }
    }
    struct Codes {  // of 64 columns of both rows of a thread
        uint32_t upper[4], lower[4];  // words: [0], [1]
    };
    // w: of rows of 128 bytes; below: from the upper rows to the lower ones, in bytes; part: which 64 columns of them.
    __device__ __forceinline__ static Codes read_codes(uint32_t w, int below, int part) {
        const int lane = threadIdx.x % 32, row = lane / 4, cell = IN_WORDS ? part * 2 + lane % 4 / 2 : part * 4 + lane % 4;
        const uint32_t from = w + row * 128 + ((cell ^ row) << 4);
        Codes found = {};
        if (IN_WORDS) {
            const uint2 upper = read_pair(from + lane % 2 * 8), lower = read_pair(from + lane % 2 * 8 + below);
            found.upper[0] = upper.x, found.upper[1] = upper.y, found.lower[0] = lower.x, found.lower[1] = lower.y;
        } else {
            const uint4 upper = read16(from), lower = read16(from + below);
            found.upper[0] = upper.x, found.upper[1] = upper.y, found.upper[2] = upper.z, found.upper[3] = upper.w;
            found.lower[0] = lower.x, found.lower[1] = lower.y, found.lower[2] = lower.z, found.lower[3] = lower.w;
        }
        return found;
    }
    // The fragment of w for step s of 16 columns.
    __device__ __forceinline__ static void fragment(uint32_t (&left)[4], const Codes& codes, int s, uint32_t upper_point,
                                                    uint32_t lower_point) {
#if QUIRE_CODES >= 3
        fragment_of_words(left, codes.upper, codes.lower, s, upper_point, lower_point);
#else
        left[0] = elements<false>(codes.upper[s]), left[1] = elements<false>(codes.lower[s]);
        left[2] = elements<true>(codes.upper[s]), left[3] = elements<true>(codes.lower[s]);
#endif
    }
    // d += 64 columns of 16 rows of w times x.
    __device__ __forceinline__ static void add(float (*d)[4], const Codes& codes, const uint32_t (&x)[EIGHTS][8],
                                               const float2 (&by)[EIGHTS], const RowScales& upper, const RowScales& lower) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float above = upper.scale(g), below = lower.scale(g);
            const uint32_t upper_point = raised_point(upper.point(g)), lower_point = raised_point(lower.point(g));
            float sums[EIGHTS][4] = {};
#pragma unroll
            for (int s = g * 4 / GROUPS; s < (g + 1) * 4 / GROUPS; s++) {
                uint32_t left[4];
                fragment(left, codes, s, upper_point, lower_point);
#pragma unroll
                for (int v = 0; v < EIGHTS; v++) multiply_add(sums[v], left, x[v][2 * s], x[v][2 * s + 1]);
            }
#pragma unroll
            for (int v = 0; v < EIGHTS; v++) {
                d[v][0] += sums[v][0] * (above * by[v].x), d[v][1] += sums[v][1] * (above * by[v].y);
                d[v][2] += sums[v][2] * (below * by[v].x), d[v][3] += sums[v][3] * (below * by[v].y);
            }
        }
    }
    // A warp has 64 columns of a stage, or some times 64, and all rows or half of them. Upper rows are of gate, lower ones
    // of up.
    template <class K>
    __device__ void multiply(float (&d)[K::QUADS][4], uint32_t w, const uint32_t (&x_at)[EIGHTS], int unit,
                             uint32_t scales) const {
#pragma unroll
        for (int pass = 0; pass < K::PASSES; pass++)
            multiply_pass<K>(d, w, x_at, unit, scales, pass * K::COLUMN_WARPS + threadIdx.x / 32 % K::COLUMN_WARPS);
    }
    template <class K>
    __device__ __forceinline__ void multiply_pass(float (&d)[K::QUADS][4], uint32_t w, const uint32_t (&x_at)[EIGHTS],
                                                  int unit, uint32_t scales, int part) const {
        const int column = unit * K::COLUMNS + part * 64;
        const int first = (K::ROW_GROUPS > 1 ? threadIdx.x / 32 / K::COLUMN_WARPS : 0) * K::OWN_BLOCKS;
        if (column >= columns<K>()) return;
        const int step = scales_step(columns<K>()), below = K::IS_UP ? Layout::part_bytes<K>(columns<K>()) : 8 * step;
        w += part * 64 / WIDTH * K::CHUNK_BYTES;
        scales += threadIdx.x % 32 / 4 * step;
        uint32_t x[EIGHTS][8];
        Codes codes[K::OWN_BLOCKS];
        RowScales upper[K::OWN_BLOCKS], lower[K::OWN_BLOCKS];
#pragma unroll
        for (int b = 0; b < K::OWN_BLOCKS; b++) {
            const int row = (first + b) * K::BLOCK_ROWS;
            codes[b] = read_codes(w + row * 128, (K::IS_UP ? K::OUT_ROWS : 8) * 128, part % (WIDTH / 64));
            upper[b] = read_scales(scales + row * step, column);
            lower[b] = read_scales(scales + row * step + below, column);
        }
#pragma unroll
        for (int v = 0; v < EIGHTS; v++) read_x(x[v], x_at[v] + column * 2);
        float2 by[EIGHTS];
        read_x_scales<K>(by, column, 0);
#pragma unroll
        for (int b = 0; b < K::OWN_BLOCKS; b++) add(d + b * EIGHTS, codes[b], x, by, upper[b], lower[b]);
    }
    // A whole stage of one part by one warp.
    __device__ void multiply_part(float (&d)[2][4], uint32_t w, uint32_t x_at, int unit, int part, uint32_t scales) const {
        const int step = scales_step(a.inner);
        scales += part * Layout::part_bytes<Down>(a.inner) + threadIdx.x % 32 / 4 * step;
#pragma unroll
        for (int j = 0; j < WARPS; j++) {
            const int column = unit * Down::COLUMNS + j * 64;
            if (column >= a.inner) break;
            uint32_t x[EIGHTS][8];
            read_x(x[0], x_at + (part * a.inner + column) * 2);
            const Codes codes = read_codes(w + j * 64 / WIDTH * 2048, 1024, j % (WIDTH / 64));
            float2 by[EIGHTS];
            read_x_scales<Down>(by, column, part);
            add(d, codes, x, by, read_scales(scales, column), read_scales(scales + 8 * step, column));
        }
    }
};
#else
using FewCodes = FewLists;
#endif

}  // namespace quire
