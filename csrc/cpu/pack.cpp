// Matrices rounded to bytes or nibbles with a scale for each group along k: lanes are channels.
//
// What is searched for, and the oracle: quire/kernels/qgemm/rounding.py. Layouts: weight.py there.
#include "quire_cpu.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"

namespace quire {
namespace {

constexpr int MOST_GROUP = 256, LINE_BYTES = TILE * 4;
constexpr float FACTORS[] = {0.8f, 0.9f, 1.f};  // of the scale that maps the largest weight to an end
constexpr float STEPS[] = {0.05f, 0.025f};      // up and down from the best so far

// Sixteen floats to choose from by lane.
struct Choices {
    float values[16];
    QUIRE_INLINE vf at(const Choices& from, vi index) {
#if QUIRE_AVX512
        return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(from.values));
#elif QUIRE_AVX2
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(from.values), (__m256i)index);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(from.values + 8), (__m256i)index);
        return (vf)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
        vf chosen;
        for (int i = 0; i < W; i++) chosen[i] = from.values[index[i]];
        return chosen;
#endif
    }
};

struct Codebook {
    Choices values, bounds;  // bounds[i]: half way from value i - 1 to value i

    explicit Codebook(const float* table) {
        for (int i = 0; i < 16; i++) {
            values.values[i] = table[i];
            bounds.values[i] = i > 0 ? (table[i - 1] + table[i]) / 2 : 0.f;
        }
    }

    // Index of the value nearest to u, the lower one half way between two.
    QUIRE_INLINE vi nearest(const Codebook& codebook, vf u) {
        vi index = vi{};
        UNROLL for (int step = 8; step > 0; step /= 2) {
            const vi next = index + step;
            index = u > Choices::at(codebook.bounds, next) ? next : index;
        }
        return index;
    }
};

// values[k] of W channels from row `first` on; zeros beyond the matrix.
template <class T> void load_group(const QuirePack& a, int64_t first, int64_t k0, vf* values) {
    for (int64_t k = 0; k < a.group; k += W) {
        const int64_t left = a.k - k0 - k;
        vf rows[W];
        for (int r = 0; r < W; r++) {
            const T* at = (const T*)a.weight + (first + r) * a.row + k0 + k;
            rows[r] = first + r >= a.n || left <= 0 ? vf{} : get_lanes(at, left < W ? (int)left : W);
        }
        transpose(rows);
        for (int i = 0; i < W; i++) values[k + i] = rows[i];
    }
}

// The value of largest magnitude.
vf largest(const vf* values, int64_t group) {
    vf least = values[0], most = values[0];
    for (int64_t k = 1; k < group; k++) least = values[k] < least ? values[k] : least, most = vmax(values[k], most);
    return -least > most ? least : most;
}

QUIRE_INLINE vf inverse(vf x) { return x == 0.f ? vf{} : 1.f / x; }

// The scale for the first `count` values that leaves the least squared error of those tried.
vf best_scale(const vf* values, int64_t count, const Codebook& codebook) {
    const vf big = largest(values, count);
    vf best = vf{}, least_error = set1(__builtin_inff());
    const auto attempt = [&](vf ratio) {  // of the scale to the largest value
        const vf factor = inverse(big * ratio);
        vf error = vf{};
        for (int64_t k = 0; k < count; k++) {
            const vf u = values[k] * factor, wrong = u - Choices::at(codebook.values, Codebook::nearest(codebook, u));
            error = fma(wrong, wrong, error);
        }
        error *= ratio * ratio;
        const vi better = error < least_error;
        best = better ? ratio : best, least_error = better ? error : least_error;
    };
    for (int end = 0; end < 16; end += 15)
        for (const float factor : FACTORS) attempt(set1(factor / codebook.values.values[end]));
    for (const float step : STEPS) {
        const vf from = best;
        attempt(from * (1.f + step));
        attempt(from * (1.f - step));
    }
    return big * best;
}

// Stores the scales of W channels; returns what comes back.
vf store_scales(const QuirePack& a, vf scale, f16* to) {
    store(to, scale * (1.f / a.unit));
    return load(to) * a.unit;
}

void pack_bytes(const QuirePack& a, const vf* values, f16* scales, char* to) {
    const vf big = largest(values, a.group), scale = store_scales(a, (vf)((vi)big & 0x7fffffff) / 127.f, scales);
    const vf divisor = scale == 0.f ? set1(1.f) : scale, magic = set1(12582912.f), end = set1(127.f);
    for (int64_t k = 0; k < a.group; k += 4, to += LINE_BYTES) {
        vi line = vi{};
        for (int b = 0; b < 4; b++) {
            vf u = values[k + b] / divisor;
            u = u > end ? end : u < -end ? -end : u;
            line |= ((vi)(u + magic) - (vi)magic + 128) << (8 * b);
        }
        store_bits(to, line);
    }
}

void pack_nibbles(
    const QuirePack& a, const vf* values, int64_t count, const Codebook& codebook, f16* scales, char* to) {
    const vf factor = inverse(store_scales(a, best_scale(values, count, codebook), scales));
    for (int64_t k = 0; k < a.group; k += 8, to += LINE_BYTES) {
        vi line = vi{};
        for (int i = 0; i < 8; i++)
            line |= Codebook::nearest(codebook, values[k + i] * factor) << (i % 4 * 8 + i / 4 * 4);
        store_bits(to, line);
    }
}

template <class T> void pack(const QuirePack& a) {
    const int64_t n_groups = (a.k + a.group - 1) / a.group, n_tiles = (a.n + TILE - 1) / TILE;
    const int64_t group_bytes = TILE * a.group * a.bits / 8;
    const Codebook codebook(a.table);
    parallel_for(n_tiles * n_groups, 16, a.n_threads, [&](int64_t task) {
        vf values[MOST_GROUP];
        const int64_t k = task % n_groups * a.group, count = a.k - k < a.group ? a.k - k : a.group;
        for (int c = 0; c < TILE; c += W) {
            load_group<T>(a, task / n_groups * TILE + c, k, values);
            f16* scales = (f16*)a.scales + task * TILE + c;
            char* to = (char*)a.data + task * group_bytes + c * 4;
            a.bits == 8 ? pack_bytes(a, values, scales, to) : pack_nibbles(a, values, count, codebook, scales, to);
        }
    });
}

}  // namespace
}  // namespace quire

void quire_pack(const QuirePack* args) {
    using namespace quire;
    by_dtype(args->dtype, [&](auto* type) { pack<std::remove_pointer_t<decltype(type)>>(*args); });
}
