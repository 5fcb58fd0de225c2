// The experts of each token: scores from the router's logits, the best groups, the best experts, their weights.
//
// Invariant: a row is computed alone, in one order: its bits do not depend on the other rows.
#include <cfloat>
#include <cmath>

#include "quire_cpu.h"
#include "scratch.h"
#include "threads.h"

namespace quire {
namespace {

// As numbers: NaN and -inf are the lowest, +inf is the largest.
float finite(float x) { return std::isnan(x) ? -FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x > FLT_MAX ? FLT_MAX : x; }

void finish(const QuireRoute& r, float* weights) {
    float sum = FLT_MIN;
    for (int64_t j = 0; j < r.n_chosen; j++) sum += weights[j];
    for (int64_t j = 0; j < r.n_chosen; j++) weights[j] = (r.renormalise ? weights[j] / sum : weights[j]) * r.scale;
}

// logits, finite, become scores.
void score(const QuireRoute& r, float* x) {
    float largest = -FLT_MAX, sum = 0.f;
    for (int64_t e = 0; e < r.n_experts; e++) largest = std::fmax(largest, x[e]);
    for (int64_t e = 0; e < r.n_experts; e++) {
        x[e] = r.scores == QUIRE_SIGMOID ? 1.f / (1.f + std::exp(-x[e])) : std::exp(x[e] - largest);
        sum += x[e];
    }
    for (int64_t e = 0; r.scores == QUIRE_SOFTMAX && e < r.n_experts; e++) x[e] /= sum;
}

// The largest of n values that is not taken, the first of equal ones; it is taken then.
int64_t take_largest(const float* values, bool* taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = true;
    return best;
}

// Experts outside the best groups are -inf. A group is as good as the sum of its n_group_best best experts. taken: [E],
// all false, and so it is left; groups: [n_groups].
void keep_groups(const QuireRoute& r, float* choice, bool* taken, float* groups) {
    if (r.n_chosen_groups == r.n_groups) return;
    const int64_t size = r.n_experts / r.n_groups, n_best = r.n_group_best < size ? r.n_group_best : size;
    for (int64_t g = 0; g < r.n_groups; g++) {
        groups[g] = 0.f;
        for (int64_t i = 0; i < n_best; i++)
            groups[g] += choice[g * size + take_largest(choice + g * size, taken + g * size, size)];
    }
    for (int64_t e = 0; e < r.n_experts; e++) taken[e] = false;
    for (int64_t i = 0; i < r.n_chosen_groups; i++) take_largest(groups, taken, r.n_groups);
    for (int64_t g = 0; g < r.n_groups; g++)
        for (int64_t e = g * size; !taken[g] && e < (g + 1) * size; e++) choice[e] = -INFINITY;
    for (int64_t g = 0; g < r.n_groups; g++) taken[g] = false;
}

// One expert after another; each weighs what a softmax over those not yet taken gives it, where those far below count
// nothing.
void mix_sparsely(const QuireRoute& r, const float* logits, bool* taken, int32_t* ids, float* weights) {
    for (int64_t j = 0; j < r.n_chosen; j++) {
        float sum = 0.f;
        int64_t best = -1;
        for (int64_t e = 0; e < r.n_experts; e++)
            if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
        for (int64_t e = 0; e < r.n_experts; e++) {
            const bool is_far = (logits[best] - logits[e]) / std::fmax(std::fabs(logits[e]), logits[best]) > r.mixer_margin;
            if (!taken[e] && !is_far) sum += std::exp(logits[e] - logits[best]);
        }
        ids[j] = (int32_t)best, weights[j] = 1.f / sum;
        taken[best] = true;
    }
}

void route_row(const QuireRoute& r, int64_t row) {
    int32_t* ids = r.expert_ids + row * r.n_chosen;
    float* weights = r.weights + row * r.n_chosen;
    if (r.scores == QUIRE_EVEN) {
        for (int64_t j = 0; j < r.n_chosen; j++)
            ids[j] = (int32_t)((row * r.n_chosen + j) % r.n_experts), weights[j] = 1.f / (float)r.n_chosen;
        return finish(r, weights);
    }
    const int64_t bytes = r.n_experts * (int64_t)sizeof(float);
    const Scratch scratch({bytes, bytes, bytes, r.n_experts * (int64_t)sizeof(bool)});
    float *scores = (float*)scratch.piece(0), *choice = (float*)scratch.piece(1), *groups = (float*)scratch.piece(2);
    bool* taken = (bool*)scratch.piece(3);
    for (int64_t e = 0; e < r.n_experts; e++) scores[e] = finite(r.logits[row * r.logits_row + e]), taken[e] = false;
    if (r.scores == QUIRE_SPARSE_MIXER) {
        mix_sparsely(r, scores, taken, ids, weights);
        return finish(r, weights);
    }
    score(r, scores);
    for (int64_t e = 0; e < r.n_experts; e++) choice[e] = r.correction == nullptr ? scores[e] : scores[e] + r.correction[e];
    keep_groups(r, choice, taken, groups);
    for (int64_t j = 0; j < r.n_chosen; j++) {
        ids[j] = (int32_t)take_largest(choice, taken, r.n_experts);
        weights[j] = scores[ids[j]];
    }
    finish(r, weights);
}

}  // namespace
}  // namespace quire

void quire_route(const QuireRoute* args) {
    using namespace quire;
    const QuireRoute& r = *args;
    constexpr int64_t ROWS = 32;  // fewer are not worth another thread
    parallel_for(r.n, ROWS, r.n_threads, [&](int64_t row) { route_row(r, row); });
    if (r.load == nullptr) return;
    for (int64_t i = 0; i < r.n * r.n_chosen; i++) r.load[r.expert_ids[i]]++;
}
