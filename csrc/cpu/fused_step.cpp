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

// What of a step is the same for every operation, but for what TAKE leaves.
struct Running {
    const QuireStep& step;
    QuireAttnPlan& plan;  // its page table is that of the operation
    int64_t n_rows;       // all, or those wanted after TAKE
    const int32_t* adapters;  // of these rows
    int32_t* taken;           // room for those of the rows wanted
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

// Of the rows wanted, where rows have adapters.
void take_adapters(Running& now) {
    const QuireStep& s = now.step;
    if (s.adapters == nullptr) return;
    for (int64_t i = 0; i < s.n_wanted; i++) now.taken[i] = s.adapters[s.wanted[i]];
    now.adapters = now.taken;
}

void norm(const QuireNorm& a, const Running& now) {
    by_dtype(a.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(now.n_rows, rows_a_chunk(a.width), n_threads_now(now.step), [&](int64_t i) {
            T* const no = nullptr;
            norm_row<T>((const T*)a.x + i * a.x_row, no, no, (const T*)a.weight, (T*)a.out + i * a.out_row, a.width, a.eps);
        });
    });
}

void load(const QuireLoad& a, const Running& now) {
    const QuireStep& s = now.step;
    for (int64_t i = 0; i < now.n_rows; i++) {
        char* const row = (char*)a.rows + i * 2 * a.half_bytes;
        const int64_t before = s.positions[i] - 1;
        if (before < 0) {
            memset(row, 0, 2 * a.half_bytes);
            continue;
        }
        const int64_t page = now.plan.page_table[s.slots[i] * s.table_stride + before / s.page_size];
        const int64_t at = (page * s.page_size + before % s.page_size) * a.half_bytes;
        memcpy(row, (const char*)a.first + at, a.half_bytes);
        memcpy(row + a.half_bytes, (const char*)a.second + at, a.half_bytes);
    }
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
            take_adapters(now);
            return take(*(const QuireTake*)op.args, now.step);
        }
        case QUIRE_NORM: return norm(*(const QuireNorm*)op.args, now);
        case QUIRE_LOAD: return load(*(const QuireLoad*)op.args, now);
        case QUIRE_ROUTE: {
            QuireRoute& a = *(QuireRoute*)op.args;
            a.n = now.n_rows, a.n_threads = n_threads_now(now.step);
            return quire_route(&a);
        }
        case QUIRE_LORA: {
            QuireLora& a = *(QuireLora*)op.args;
            a.m = now.n_rows, a.places = now.adapters, a.n_threads = n_threads_now(now.step);
            return quire_lora(&a);
        }
        case QUIRE_SILU: {
            const QuireSilu& a = *(const QuireSilu*)op.args;
            return quire_silu_mul(a.dtype, a.x, 2 * a.width, a.out, now.n_rows, a.width, n_threads_now(now.step));
        }
        case QUIRE_EXPERTS: {
            QuireExperts& a = *(QuireExperts*)op.args;
            a.n = now.n_rows, a.n_threads = n_threads_now(now.step);
            return quire_experts(&a);
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
        if (s.ids != nullptr) a.token_ids[i] = s.ids[a.token_ids[i]];
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

// All operations, then the choice. tiles: room for what `cut` gives; taken: for a number of each row wanted.
void run_step(const QuireOp* ops, int64_t n_ops, const QuireStep& s, int32_t* tiles, int32_t* taken) {
    QuireAttnPlan plan{};
    plan.q_indptr = s.q_indptr, plan.kv_lens = s.kv_lens, plan.kv_at = s.kv_at;
    plan.tree_paths = s.tree_paths, plan.tree_firsts = s.tree_firsts;
    plan.table_stride = s.table_stride;
    plan.page_size = s.page_size, plan.n_q_heads = s.n_q_heads, plan.n_kv_heads = s.n_kv_heads;
    plan.head_dim = s.head_dim;
    plan.tiles = tiles;
    plan.n_tiles = cut(s, tiles, &plan.work);
    Running now{s, plan, s.n_rows, s.adapters, taken};
    for (int64_t i = 0; i < n_ops && now.n_rows > 0; i++) run(ops[i], now);
    if (s.choice != nullptr && s.n_wanted > 0) choose(s);
}

// A step of one row for each chain that is not at its end: the token just chosen. What it reads besides lies in the
// front rows, where the step before it left that of the rows wanted.
struct Links {
    int64_t *slots, *positions, *wanted;
    int32_t *q_indptr, *kv_lens, *kv_at;
    QuireChoice choice;
    QuireStep step;

    // Behind `first`, the step that chose each chain's first token; `memory` gives arrays for its rows wanted.
    Links(const QuireStep& first, const Scratch& memory, int piece) : choice(*first.choice), step(first) {
        slots = (int64_t*)memory.piece(piece), positions = (int64_t*)memory.piece(piece + 1);
        wanted = (int64_t*)memory.piece(piece + 2), q_indptr = (int32_t*)memory.piece(piece + 3);
        kv_lens = (int32_t*)memory.piece(piece + 4), kv_at = (int32_t*)memory.piece(piece + 5);
        for (int64_t i = 0; i < first.n_wanted; i++) {
            slots[i] = first.slots[first.wanted[i]], positions[i] = first.positions[first.wanted[i]];
            wanted[i] = i, q_indptr[i] = (int32_t)i, kv_at[i] = (int32_t)slots[i];
            kv_lens[i] = (int32_t)positions[i] + 1;
        }
        q_indptr[first.n_wanted] = (int32_t)first.n_wanted;
        step.slots = slots, step.positions = step.places = positions, step.wanted = wanted, step.choice = &choice;
        step.q_indptr = q_indptr, step.kv_lens = kv_lens, step.kv_at = kv_at;
    }

    // To the chains' tokens number `place`; false if none has so many.
    bool advance(int64_t n_chains, int32_t place) {
        int64_t n = 0;
        for (; n < n_chains && step.n_places[n] > place; n++) positions[n]++, kv_lens[n]++;
        step.n_rows = step.n_spans = step.n_wanted = n;
        choice.token_ids += n_chains;
        return n > 0;
    }
};

}  // namespace
}  // namespace quire

void quire_fused_step(const QuireOp* ops, int64_t n_ops, const QuireStep* step) {
    using namespace quire;
    const QuireStep& s = *step;
    const int64_t most_tiles = s.n_rows / s.tile_tokens + s.n_spans, n = s.n_places == nullptr ? 0 : s.n_wanted;
    const int64_t wide = n * (int64_t)sizeof(int64_t), narrow = (n + 1) * (int64_t)sizeof(int32_t);
    const Scratch scratch(
        {most_tiles * 3 * (int64_t)sizeof(int32_t), wide, wide, wide, narrow, narrow, narrow,
         s.n_wanted * (int64_t)sizeof(int32_t)}, Use::STEP);
    int32_t *const tiles = (int32_t*)scratch.piece(0), *const taken = (int32_t*)scratch.piece(7);
    run_step(ops, n_ops, s, tiles, taken);
    if (n == 0) return;
    Links links(s, scratch, 1);
    for (int32_t place = 1; links.advance(n, place); place++)
        run_step(ops + s.n_once, n_ops - s.n_once, links.step, tiles, taken);
}
