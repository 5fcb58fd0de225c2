// A step of a whole model in one call: its operations one after another, each on all threads.
//
// Owns no arithmetic: operations are those that Python calls one by one, so both ways give the same bits.
#include <algorithm>

#include "quire_cpu.h"
#include "rows.h"
#include "scratch.h"
#include "store.h"
#include "threads.h"

namespace quire {
namespace {

// What of a step is the same for every operation.
struct Running {
    const QuireStep& step;
    QuireAttnPlan& plan;  // its page table is that of the operation
    int64_t n_rows;       // all, or those wanted after TAKE
};

// Python may change it while the step runs (FusedStepCall.spread): each operation reads it once, whichever value that is.
int32_t n_threads_now(const QuireStep& step) { return __atomic_load_n(&step.n_threads, __ATOMIC_RELAXED); }

void embed(const QuireEmbed& a, const Running& now) {
    const QuireStep& s = now.step;
    for (int64_t i = 0; i < now.n_rows; i++) {
        const int64_t token = s.tokens[s.slots[i] * s.tokens_stride + s.places[i]];
        memcpy((char*)a.out + i * a.row_bytes, (const char*)a.table + token * a.row_bytes, a.row_bytes);
    }
}

template <class T> void rotate_row(const QuireRotate& a, const QuireStep& s, const int32_t* page_table, int64_t i) {
    const int d = a.head_dim, n_q = a.n_q_heads, n_kv = a.n_kv_heads;
    T* heads = (T*)a.qkv + i * (int64_t)(n_q + 2 * n_kv) * d;
    const float *cos = a.cos_sin + s.positions[i] * a.rotary, *sin = cos + a.rotary / 2;
    for (int h = 0; h < n_q + n_kv; h++) {
        T* head = heads + h * d;
        const T* norm = (const T*)(h < n_q ? a.q_norm : a.k_norm);
        if (norm != nullptr) norm_row<T>(head, nullptr, nullptr, norm, head, d, a.eps);
        rope_head(head, cos, sin, a.rotary / 2);
    }
    const int64_t page = page_table[s.slots[i] * s.table_stride + s.places[i] / a.page_size];
    const int64_t offset = s.places[i] % a.page_size;
    const EntryWriter<T> writer{d, a.int8_keys != 0};
    for (int64_t h = 0; h < n_kv; h++) {
        const int64_t entry = ((page * n_kv + h) * a.page_size + offset) * writer.bytes();
        writer.write(heads + (n_q + h) * d, (char*)a.k_pages + entry);
        writer.write(heads + (n_q + n_kv + h) * d, (char*)a.v_pages + entry);
    }
}

void rotate(const QuireRotate& a, const Running& now) {
    const int64_t width = (int64_t)(a.n_q_heads + 2 * a.n_kv_heads) * a.head_dim;
    by_dtype(a.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(now.n_rows, rows_a_chunk(width), n_threads_now(now.step), [&](int64_t i) {
            rotate_row<T>(a, now.step, now.plan.page_table, i);
        });
    });
}

void take(const QuireTake& a, const QuireStep& s) {
    for (int64_t i = 0; i < s.n_wanted; i++)
        if (s.wanted[i] != i)
            memcpy((char*)a.rows + i * a.row_bytes, (const char*)a.rows + s.wanted[i] * a.row_bytes, a.row_bytes);
}

void run(const QuireOp& op, Running& now) {
    now.plan.page_table = now.step.page_table + op.table_at;
    switch (op.code) {
        case QUIRE_EMBED: return embed(*(const QuireEmbed*)op.args, now);
        case QUIRE_ROTATE: return rotate(*(const QuireRotate*)op.args, now);
        case QUIRE_LINEAR: {
            QuireLinear& a = *(QuireLinear*)op.args;
            a.m = now.n_rows, a.n_threads = n_threads_now(now.step);
            return quire_linear(&a);
        }
        case QUIRE_ATTEND: {
            QuireAttnArgs& a = *(QuireAttnArgs*)op.args;
            a.plan = &now.plan, a.n_threads = n_threads_now(now.step);
            return quire_attention(&a);
        }
        case QUIRE_TAKE: {
            now.n_rows = now.step.n_wanted;
            return take(*(const QuireTake*)op.args, now.step);
        }
    }
}

// Tokens for the rows wanted; each goes behind its row, 0 where none was found (the status tells).
void choose(const QuireStep& s) {
    QuireChoice& a = *s.choice;
    a.n_rows = s.n_wanted, a.n_threads = n_threads_now(s);
    quire_choose(&a);
    for (int64_t i = 0; i < s.n_wanted; i++) {
        const int64_t row = s.wanted[i];
        s.tokens[s.slots[row] * s.tokens_stride + s.positions[row] + 1] = a.token_ids[i];
    }
}

// The spans in tiles of at most tile_tokens tokens, the dearest first. Returns their number.
int32_t cut(const QuireStep& s, int32_t* tiles, int64_t* work) {
    struct Tile { int32_t span, first, n_tokens; };
    Tile* const list = (Tile*)tiles;
    const auto n_keys = [&](const Tile& t) {
        return (int64_t)s.kv_lens[t.span] - (s.q_indptr[t.span + 1] - s.q_indptr[t.span]) + t.first + t.n_tokens;
    };
    int32_t n = 0;
    *work = 0;
    const int64_t group = s.n_q_heads / s.n_kv_heads;
    for (int32_t span = 0; span < s.n_spans; span++) {
        const int32_t length = s.q_indptr[span + 1] - s.q_indptr[span];
        for (int32_t first = 0; first < length; first += s.tile_tokens) {
            list[n] = {span, first, std::min(length - first, s.tile_tokens)};
            *work += (list[n].n_tokens * group + 4) * n_keys(list[n]) * s.head_dim * s.n_kv_heads;
            n++;
        }
    }
    std::sort(list, list + n, [&](const Tile& a, const Tile& b) {
        return a.n_tokens * n_keys(a) > b.n_tokens * n_keys(b);
    });
    return n;
}

}  // namespace
}  // namespace quire

void quire_fused_step(const QuireOp* ops, int64_t n_ops, const QuireStep* step) {
    using namespace quire;
    const QuireStep& s = *step;
    const int64_t most_tiles = s.n_rows / s.tile_tokens + s.n_spans;
    const Scratch scratch({most_tiles * 3 * (int64_t)sizeof(int32_t)}, Use::STEP);
    QuireAttnPlan plan{};
    plan.q_indptr = s.q_indptr, plan.kv_lens = s.kv_lens, plan.kv_at = s.kv_at;
    plan.tree_paths = s.tree_paths, plan.tree_firsts = s.tree_firsts;
    plan.table_stride = s.table_stride;
    plan.page_size = s.page_size, plan.n_q_heads = s.n_q_heads, plan.n_kv_heads = s.n_kv_heads;
    plan.head_dim = s.head_dim;
    plan.tiles = (int32_t*)scratch.piece(0);
    plan.n_tiles = cut(s, (int32_t*)scratch.piece(0), &plan.work);
    Running now{s, plan, s.n_rows};
    for (int64_t i = 0; i < n_ops && now.n_rows > 0; i++) run(ops[i], now);
    if (s.choice != nullptr && s.n_wanted > 0) choose(s);
}
