// Choosing a token for each row of logits: argmax, or the inverse of the cumulative distribution of what a floor leaves.
//
// Semantics: quire/kernels/sample/op.py. Weights are summed in blocks, blocks in float64; the chosen block is computed
// again. Invariant: a row's token is a function of its logits and controls alone.
#include <cmath>

#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int BLOCK = 128;
constexpr uint8_t FINE = 0, NON_FINITE = 1, EMPTY = 2;
constexpr float INF = __builtin_inff();

struct Peak {
    float value;  // NaN if there is one
    int32_t at;   // the first of equal ones
};

Peak largest(const float* x, int64_t n) {
    vf best = set1(-INF), wrong = vf{};
    vi at = vi{}, lane;
    for (int l = 0; l < W; l++) lane[l] = l;
    each_vector(n, [&](int64_t i, int live) {
        vf v = live == W ? load(x + i) : load_some(x + i, live);
        if (live < W) v = lane < set1i(live) ? v : set1(-INF);
        const vi more = v > best;
        at = more ? lane + set1i((int32_t)i) : at;
        best = more ? v : best;
        wrong = v == v ? wrong : v;
    });
    Peak peak{best[0], at[0]};
    for (int l = 0; l < W; l++) {
        if (wrong[l] != wrong[l]) return {NAN, 0};
        if (best[l] > peak.value || (best[l] == peak.value && at[l] < peak.at)) peak = {best[l], at[l]};
    }
    return peak;
}

struct Row {
    const float* x;
    int64_t n;
    float peak, inverse, floor;

    // Weights of up to W logits from i on: exp((x - peak) / temperature), 0 below the floor and beyond the end.
    vf weights(int64_t i) const {
        const int live = n - i < W ? (int)(n - i) : W;
        const vf v = get_lanes(x + i, live);
        vf w = exp2((v - peak) * inverse * 1.4426950408889634f);
        w = v >= set1(floor) ? w : vf{};
        for (int l = live; l < W; l++) w[l] = 0;
        return w;
    }

    float block_sum(int64_t block) const {
        vf sum = vf{};
        for (int64_t i = block * BLOCK; i < n && i < (block + 1) * BLOCK; i += W) sum += weights(i);
        return hsum(sum);
    }
};

// Just below the total at most, so that the entry found always added something.
double target_in(double target, double total) {
    const double below = std::nextafter(total, 0.0);
    return target < below ? target : below;
}

int32_t draw(const Row& row, double uniform) {
    const int64_t n_blocks = (row.n + BLOCK - 1) / BLOCK;
    const Scratch scratch({n_blocks * (int64_t)sizeof(float)});
    float* sums = (float*)scratch.piece(0);
    double total = 0;
    for (int64_t b = 0; b < n_blocks; b++) total += sums[b] = row.block_sum(b);
    const double target = target_in(uniform * total, total);
    double before = 0;
    int64_t block = 0;
    while (block < n_blocks - 1 && before + sums[block] <= target) before += sums[block++];
    float weights[BLOCK];
    const int64_t first = block * BLOCK, live = row.n - first < BLOCK ? row.n - first : BLOCK;
    for (int64_t i = 0; i < live; i += W) store(weights + i, row.weights(first + i));
    double inside = 0;
    for (int64_t i = 0; i < live; i++) inside += weights[i];
    const double rest = target_in(target - before, inside);
    int64_t found = 0;
    for (double sum = weights[0]; found < live - 1 && sum <= rest; sum += weights[found]) found++;
    return (int32_t)(first + found);
}

void choose_row(const QuireChoice& a, int64_t i) {
    const float* x = a.logits + i * a.logits_row;
    const Peak peak = largest(x, a.width);
    const bool fine = peak.value > -INF && peak.value < INF;
    a.status[i] = fine ? FINE : peak.value == -INF ? EMPTY : NON_FINITE;
    a.token_ids[i] = 0;
    if (!fine) return;
    const double inverse = a.inverses[i];
    const Row row{x, a.width, peak.value, (float)inverse, a.floors == nullptr ? -INF : a.floors[i]};
    a.token_ids[i] = inverse > 0 ? draw(row, a.uniforms[i]) : peak.at;
}

}  // namespace
}  // namespace quire

void quire_choose(const QuireChoice* args) {
    using namespace quire;
    parallel_for(args->n_rows, rows_a_chunk(args->width), args->n_threads, [&](int64_t i) { choose_row(*args, i); });
}
