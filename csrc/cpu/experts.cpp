// Mixtures of experts: rows of tokens sorted by expert, both products of all chosen experts, weighted sums.
//
// Invariant: an expert's output for a row is that of its linear layers alone, bit for bit, whatever the other rows.
#include <cstring>

#include "linears.h"
#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "threads.h"

namespace quire {
namespace {

constexpr int32_t NOWHERE = -1;

// A slot is a place among all pairs of a token and an expert, sorted by expert. starts: [n_experts + 1].
void sort(const QuireExperts& e, int64_t* starts, int32_t* slot_of_pair, int32_t* token_of_slot) {
    const int64_t n_pairs = e.n * e.n_chosen;
    memset(starts, 0, (e.n_experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < n_pairs; i++)
        if (e.expert_ids[i] >= 0) starts[e.expert_ids[i] + 1]++;
    for (int64_t expert = 0; expert < e.n_experts; expert++) starts[expert + 1] += starts[expert];
    for (int64_t i = 0; i < n_pairs; i++) {
        const int32_t expert = e.expert_ids[i];
        slot_of_pair[i] = expert < 0 ? NOWHERE : (int32_t)starts[expert]++;
        if (expert >= 0) token_of_slot[slot_of_pair[i]] = (int32_t)(i / e.n_chosen);
    }
    for (int64_t expert = e.n_experts; expert > 0; expert--) starts[expert] = starts[expert - 1];
    starts[0] = 0;
}

template <class T> void run_experts(const QuireExperts& e) {
    const int64_t hidden = e.up->k, inner = e.down->k, n_pairs = e.n * e.n_chosen;
    const int64_t n_int = n_pairs * (int64_t)sizeof(int32_t);
    const Scratch scratch(
        {(e.n_experts + 1) * (int64_t)sizeof(int64_t), n_int, n_int, e.n_experts * (int64_t)sizeof(QuireLinear)},
        Use::EXPERTS);
    int64_t* starts = (int64_t*)scratch.piece(0);
    int32_t *slots = (int32_t*)scratch.piece(1), *tokens = (int32_t*)scratch.piece(2);
    QuireLinear* products = (QuireLinear*)scratch.piece(3);
    T *sorted = (T*)e.scratch, *between = sorted + n_pairs * hidden, *each = sorted;  // x is not read any more by then
    sort(e, starts, slots, tokens);
    parallel_for(starts[e.n_experts], rows_a_chunk(hidden), e.n_threads, [&](int64_t slot) {
        memcpy(sorted + slot * hidden, (const T*)e.x + tokens[slot] * e.x_row, hidden * sizeof(T));
    });
    const auto multiply = [&](const QuireMatrix* w, const T* from, int64_t from_row, T* to, int64_t to_row, int then) {
        int64_t n = 0;
        for (int64_t expert = 0; expert < e.n_experts; expert++) {
            const int64_t first = starts[expert], m = starts[expert + 1] - first;
            if (m == 0) continue;
            products[n++] = {
                w + expert, from + first * from_row, nullptr, to + first * to_row, m, from_row, to_row,
                0.f, e.dtype, then, e.n_threads};
        }
        if (n > 0) run_linears(products, n);
    };
    multiply(e.up, sorted, hidden, between, inner, QUIRE_SILU_MUL);
    multiply(e.down, between, inner, each, hidden, QUIRE_NOTHING);
    parallel_for(e.n, rows_a_chunk(hidden * e.n_chosen), e.n_threads, [&](int64_t token) {
        T* out = (T*)e.out + token * e.out_row;
        each_vector(hidden, [&](int64_t i, int n) {
            vf sum = e.adds ? get_lanes(out + i, n) : vf{};
            for (int64_t pair = token * e.n_chosen; pair < (token + 1) * e.n_chosen; pair++) {
                if (slots[pair] == NOWHERE) continue;
                sum = fma(set1(e.weights[pair]), get_lanes(each + slots[pair] * hidden + i, n), sum);
            }
            put_lanes(out + i, sum, n);
        });
    });
}

}  // namespace
}  // namespace quire

void quire_experts(const QuireExperts* args) {
    using namespace quire;
    if (args->n == 0) return;
    by_dtype(args->dtype, [&](auto* type) { run_experts<std::remove_pointer_t<decltype(type)>>(*args); });
}
