// Attention straight from pages or ragged rows: flash tiling with an online softmax (Dao 2022, algorithm 1).
//
// A task is one tile of tokens of one span for one KV head; its rows are tokens x query heads of the group, so a KV
// head is read once for its group. The keys of a span are a list (keys.h); it is walked in blocks of E::B that begin at
// multiples of E::B, and a row's arithmetic in a block has one fixed order. What surrounds a row (other rows of the
// tile, chunking, page ids, threads) only adds terms that are exactly neutral: a hidden key has weight 0, an unchanged
// maximum rescales by 1. So the output of a row is bitwise a function of its q and its keys and values alone.
// Keys and values of 8 bits are multiplied as integers; the scale of a key is applied to its scores, that of a value to
// its weights. Query, key and value transforms are computed in float32, and so is all after them (`Staged`).
#ifndef QUIRE_VARIANT
#include "plain_variant.h"
#define QUIRE_ONLY_DTYPE -1
#define QUIRE_ONLY_INT8 -1
#endif
#include "engine.h"
#include "keys.h"
#include "scratch.h"
#include "softmax.h"
#include "threads.h"

namespace quire {

constexpr float LN2 = 0.6931471805599453f;

template <class V> constexpr bool transforms = V::has_query || V::has_key || V::has_value;
template <class V> constexpr bool needs_positions = V::has_logits || V::has_mask || V::has_key || V::has_value;

// W elements of a row of d at i, zeros beyond.
template <class T> QUIRE_INLINE vf get(const T* row, int i, int d) {
    return i + W <= d ? load(row + i) : load_some(row + i, d - i);
}

// What rotate_half means: -x[i + d / 2] in the lower half, x[i - d / 2] in the upper one.
QUIRE_INLINE vf partner(const float* row, int i, int d) {
    const int half = d / 2;
    if (half % W == 0) return i < half ? -load(row + i + half) : load(row + i - half);
    vf v = vf{};
    for (int l = 0; l < W && i + l < d; l++) v[l] = i + l < half ? -row[i + l + half] : row[i + l - half];
    return v;
}

// to[r, :] = hook(r, from[r, :]) for n rows of [padded d] floats. A few rows take turns at the same dimensions, so that
// what depends on the dimension alone is computed once for them, and they stay in the nearest cache.
template <bool PARTNER, class F> static void transform(const float* from, float* to, int n, int d, const F& hook) {
    constexpr int FEW = 8;
    const int64_t stride = padded(d);
    for (int first = 0; first < n; first += FEW) {
        const int end = first + FEW < n ? first + FEW : n;
        for (int i = 0; i < d; i += W) {
            vi dim;
            for (int l = 0; l < W; l++) dim[l] = i + l < d ? i + l : d - 1;
            for (int r = first; r < end; r++) {
                vf other = vf{};
                if constexpr (PARTNER) other = partner(from + r * stride, i, d);
                store(to + r * stride + i, hook(r, load(from + r * stride + i), other, dim));
            }
        }
    }
}

// A tile at work. S: what q and out hold; K: what k and v hold; E: how it is multiplied; V: the variant.
template <class E, class S, class K, class V> struct Tile {
    using T = typename E::T;
    using Query = typename E::Query;
    static constexpr bool STAGED = transforms<V>;
    const QuireAttnArgs& a;
    const int d, lanes_d, group;
    typename E::Panels panels;
    float *acc, *spare;    // [rows, padded d]; spare: one for each row and at least B, only where hooks need it
    float *keys, *values;  // staged: [B, padded d]
    const void* zeros;     // an entry
    Row* rows;
    Query* query;
    int n_rows = 0;
    int32_t n_first = 0, lowest = 0;  // the lowest key that some row sees
    bool ascends = true;              // what rows see begins and ends in their order
    int64_t head = 0;
    float* own;  // [rows of a token, padded d], for trees
    typename E::Session session;

    Tile(const QuireAttnArgs& args, int most_rows)
        : a(args), d(args.plan->head_dim), lanes_d(padded(d)), group(args.plan->n_q_heads / args.plan->n_kv_heads) {
        const bool spared = STAGED || V::has_output;
        const int64_t block = sizeof(float) * E::B * lanes_d, all_rows = sizeof(float) * most_rows * lanes_d;
        const Scratch scratch({
            (int64_t)E::panel_bytes(d), all_rows, spared ? (block > all_rows ? block : all_rows) : 0,
            STAGED ? block : 0, STAGED ? block : 0, (int64_t)(most_rows * sizeof(Row)),
            (int64_t)E::query_bytes(d) * most_rows, (int64_t)sizeof(float) * (d + 1),
            args.plan->tree_paths == nullptr ? 0 : (int64_t)sizeof(float) * (group + E::R) * lanes_d,
        });
        panels = E::panels((char*)scratch.piece(0), d);
        acc = (float*)scratch.piece(1);
        spare = (float*)scratch.piece(2);
        keys = (float*)scratch.piece(3);
        values = (float*)scratch.piece(4);
        rows = (Row*)scratch.piece(5);
        query = (Query*)scratch.piece(6);
        zeros = memset(scratch.piece(7), 0, sizeof(float) * (d + 1));
        own = (float*)scratch.piece(8);
    }

    // Rows of the tile: token t, query head g of the group at row t * group + g.
    void open(const KeyList& list, int64_t first_row, int n_tokens, int64_t kv_head, int64_t position) {
        head = kv_head;
        n_rows = n_tokens * group;
        n_first = a.window > 0 ? list.below(a.n_first) : 0;
        ascends = !list.is_tree();
        for (int t = 0; t < n_tokens; t++) {
            const int64_t at = list.is_tree() ? list.position_of(a.plan->tree_paths[first_row + t]) : position + t;
            const int32_t from = a.window > 0 ? list.below(at - a.window + 1) : 0;
            lowest = t == 0 || from < lowest ? from : lowest;
            const int32_t end = a.causal ? list.below(at + 1) : list.size();
            for (int g = 0; g < group; g++) {
                const int32_t q_head = (int32_t)(kv_head * group + g);
                const Site site{(int32_t)(first_row + t), (int32_t)at, q_head, (int32_t)kv_head, 0, 0.f};
                rows[t * group + g] = Row{NEG_INF, vf{}, from, end, site};
            }
        }
        pack_queries();
        memset(acc, 0, sizeof(float) * lanes_d * n_rows);
    }

    void pack_queries() {
        const auto from = [&](int r) {
            return (const S*)a.q + rows[r].site.q_row * a.q_row + rows[r].site.q_head * a.q_head;
        };
        if constexpr (STAGED) {
            for (int r = 0; r < n_rows; r++)
                for (int i = 0; i < d; i += W) store(spare + r * lanes_d + i, get(from(r), i, d));
            float* ready = spare;
            if constexpr (V::has_query) {
                ready = acc;
                transform<V::has_partner>(spare, acc, n_rows, d, [&](int r, vf x, vf other, vi dim) {
                    return V::query(x, other, rows[r].site, dim, a);
                });
            }
            for (int r = 0; r < n_rows; r++) E::pack_query(ready + r * lanes_d, query, r, d);
        } else {
            for (int r = 0; r < n_rows; r++) E::pack_query(from(r), query, r, d);
        }
    }

    // Calls fold_own with the rows of token t alone, which keep what they have seen.
    template <class F> void alone(int t, const F& fold_own) {
        Row* const all = rows;
        float* const all_acc = acc;
        const int n_all = n_rows, all_lowest = lowest;
        const size_t bytes = sizeof(float) * group * lanes_d;
        rows += t * group, n_rows = group, lowest = rows[0].lowest;
        memcpy(own, acc + (int64_t)t * group * lanes_d, bytes);
        acc = own;
        pack_queries();
        fold_own();
        memcpy(all_acc + (int64_t)t * group * lanes_d, own, bytes);
        rows = all, acc = all_acc, n_rows = n_all, lowest = all_lowest;
    }

    // Few enough rows that repacking a block would cost more than it saves.
    bool few() const { return !E::PANELS_ONLY && n_rows <= E::R && d % W == 0; }

    // Fold one block of keys, the first of them number `first`, into the rows that see any of it.
    void fold(int32_t first, const KeyBlock<K>& block, const KeyBlock<K>& next) {
        if constexpr (STAGED) {
            KeyBlock<float> staged;
            stage(block, next, staged);
            fold_block(first, staged, staged);
        } else {
            fold_block(first, block, next);
        }
    }

    // Convert and transform the keys and values of a block.
    void stage(const KeyBlock<K>& block, const KeyBlock<K>& next, KeyBlock<float>& to) {
        for (int i = 0; i < d; i += W)
            for (int j = 0; j < E::B; j += W) prefetch(next, j, i);
        Site site{0, 0, 0, (int32_t)head, 0, 0.f};
        stage_rows<V::has_key>(block.keys, block.n, keys, [&](int j, vf x, vf other, vi dim) {
            site.k_pos = block.positions[j];
            if constexpr (V::has_key) return V::key(x, other, site, dim, a);
            else return x;
        });
        stage_rows<V::has_value>(block.values, block.n, values, [&](int j, vf x, vf other, vi dim) {
            site.k_pos = block.positions[j];
            if constexpr (V::has_value) return V::value(x, other, site, dim, a);
            else return x;
        });
        for (int j = 0; j < E::B; j++) {
            to.keys[j] = j < block.n ? keys + j * lanes_d : (const float*)zeros;
            to.values[j] = j < block.n ? values + j * lanes_d : (const float*)zeros;
        }
        memcpy(to.positions, block.positions, sizeof to.positions);
        to.n = block.n;
    }

    template <bool HOOKED, class F> void stage_rows(const K* const* from, int n, float* to, const F& hook) {
        float* raw = HOOKED ? spare : to;
        for (int j = 0; j < n; j++) {
            float scale = 1.f;
            if constexpr (has_scales<K>) scale = scale_of(from[j], d);
            for (int i = 0; i < d; i += W) store(raw + j * lanes_d + i, get(from[j], i, d) * scale);
        }
        if constexpr (HOOKED) transform<V::has_partner>(raw, to, n, d, hook);
    }

    // The next block is asked for while this one is computed, line by line: a burst would fill the miss buffers.
    void fold_block(int32_t first, const KeyBlock<T>& block, const KeyBlock<T>& next) {
        const int n_keys = block.n;
        alignas(64) float s[E::R * E::B];
        alignas(64) typename E::Weight weights[E::R * E::WEIGHTS];
        alignas(64) float rescale[W] = {};
        vf sums[E::R];
        const Scales<E> scales(block, d);
        if (!few()) E::pack(panels, block, next, d);
        for (int r = 0; r < n_rows; r += E::R) {
            const int n = n_rows - r < E::R ? n_rows - r : E::R;
            const int32_t seen = rows[r + n - 1].end - first;
            if (seen <= 0 || (first + n_keys <= (ascends ? rows[r].lowest : lowest) && first >= n_first)) continue;
            const int n_seen = seen < n_keys ? seen : n_keys;
            if (few()) E::scores_of_few(n, query, block, next, d, s);
            else E::scores(n, query, r, panels, n_seen, d, s);
            for (int i = 0; i < n; i++)
                rescale[i] = weigh<E, V>(
                    a, s + i * E::B, weights + i * E::WEIGHTS, rows[r + i], first, n_first, block.positions, scales,
                    sums[i]);
            store(rescale, exp2(load(rescale)));  // no branch: whether a maximum rises is anybody's guess
            for (int i = 0; i < n; i++) rows[r + i].sum = fma(rows[r + i].sum, set1(rescale[i]), sums[i]);
            if (few()) E::accumulate_few(n, weights, rescale, block.values, n_seen, d, acc);
            else E::accumulate(n, weights, rescale, panels, n_seen, lanes_d, acc + (int64_t)r * lanes_d);
        }
    }

    // A row that sees nothing has a sum of 0: its output is 0 and its lse -inf.
    void close() {
        for (int r = 0; r < n_rows; r++) {
            float* at = acc + (int64_t)r * lanes_d;
            Row& row = rows[r];
            const float sum = hsum(row.sum), norm = !V::softmax ? 1.f : sum == 0.f ? 0.f : 1.f / sum;
            if (V::has_output || a.lse != nullptr) {
                row.site.lse = sum == 0.f ? NEG_INF : (V::softmax ? row.max * LN2 : 0.f) + std::log(sum);
                if (a.lse != nullptr) a.lse[out_row(row)] = row.site.lse;
            }
            for (int i = 0; i < lanes_d; i += W) store(at + i, load(at + i) * set1(norm));
        }
        const float* result = acc;
        if constexpr (V::has_output) {
            result = spare;
            transform<false>(acc, spare, n_rows, d, [&](int r, vf x, vf, vi dim) {
                return V::output(x, rows[r].site, dim, a);
            });
        }
        for (int r = 0; r < n_rows; r++) {
            S* to = (S*)a.out + out_row(rows[r]) * d;
            for (int i = 0; i < d; i += W) {
                const vf v = load(result + (int64_t)r * lanes_d + i);
                if (i + W <= d) store(to + i, v);
                else store_some(to + i, v, d - i);
            }
        }
    }

    int64_t out_row(const Row& row) const { return (int64_t)row.site.q_row * a.plan->n_q_heads + row.site.q_head; }
};

// Where the keys and values lie that task number `task` begins with, if there is such a task.
template <class K> static void locate_first(const QuireAttnArgs& a, int64_t task, const K* zeros, KeyBlock<K>& to) {
    const QuireAttnPlan& p = *a.plan;
    if (task >= (int64_t)p.n_tiles * p.n_kv_heads) return;
    const KeyList list(p, p.tiles[3 * (task / p.n_kv_heads)]);
    const int32_t end = std::min(list.size(), list.n_shared());  // of a tree: keys behind the root are on no path yet
    list.locate<false>(a, task % p.n_kv_heads, 0, Seen{end, 0, 0}, zeros, to);
}

// Fold what the tile's rows see of a list, from block `b` on.
template <class E, class S, class K, class V>
static void fold_keys(
    const QuireAttnArgs& a, int64_t task, const KeyList& list, int32_t b, int32_t end, Tile<E, S, K, V>& work) {
    const Seen seen{end, work.n_first, work.lowest};
    const int32_t opening = (work.n_first + E::B - 1) / E::B, window = work.lowest / E::B;
    const auto from = [&](int32_t b) { return b < opening || b >= window ? b : window; };  // no block between is seen
    KeyBlock<K> blocks[2];  // the one at work and the next
    const auto locate = [&](int32_t b, KeyBlock<K>& to) {
        list.locate<needs_positions<V>>(a, work.head, b * E::B, seen, (const K*)work.zeros, to);
    };
    b = from(b);
    locate(b, blocks[0]);
    bool more = blocks[0].n > 0;
    for (int turn = 0; more; turn ^= 1) {
        const int32_t after = from(b + 1);
        KeyBlock<K>& next = blocks[turn ^ 1];
        locate(after, next);
        more = next.n > 0;
        if (!more) locate_first(a, task + a.n_threads, (const K*)work.zeros, next);  // likely this thread's next task
        work.fold(b * E::B, blocks[turn], next);
        b = after;
    }
}

template <class E, class S, class K, class V>
static void run_tile(const QuireAttnArgs& a, int64_t task, Tile<E, S, K, V>& work) {
    const QuireAttnPlan& p = *a.plan;
    const int32_t* tile = p.tiles + 3 * (task / p.n_kv_heads);
    const int span = tile[0], n_tokens = tile[2];
    const KeyList list(p, span);
    const int64_t start = (int64_t)p.kv_lens[span] - (p.q_indptr[span + 1] - p.q_indptr[span]) + tile[1];
    const int64_t first_row = p.q_indptr[span] + tile[1];
    work.open(list, first_row, n_tokens, task % p.n_kv_heads, start);
    if (list.is_tree()) {  // whole blocks before the nodes for all rows, then what is left for each
        const int32_t whole = list.n_shared() / E::B;
        fold_keys(a, task, list, 0, whole * E::B, work);
        for (int t = 0; t < n_tokens; t++)
            work.alone(t, [&] {
                fold_keys(a, task, list.along(p.tree_paths[first_row + t]), whole, work.rows[0].end, work);
            });
    } else {
        fold_keys(a, task, list, 0, work.rows[work.n_rows - 1].end, work);
    }
    work.close();
}

// Multiplications (and elements read) below which waking a thread costs more than it saves: some 5 microseconds.
constexpr int64_t SMALL_WORK = 1 << 17;

template <class E, class S, class K> static void run_all(const QuireAttnArgs& a) {
    const QuireAttnPlan& p = *a.plan;
    int most_tokens = 0;
    for (int i = 0; i < p.n_tiles; i++)
        if (p.tiles[3 * i + 2] > most_tokens) most_tokens = p.tiles[3 * i + 2];
    const int most_rows = (most_tokens * (p.n_q_heads / p.n_kv_heads) + E::R - 1) / E::R * E::R;
    parallel_for((int64_t)p.n_tiles * p.n_kv_heads, 1, p.work < SMALL_WORK ? 1 : a.n_threads, [&](int64_t task) {
        Tile<E, S, K, Variant> work(a, most_rows);
        run_tile(a, task, work);
    });
}

template <class E, class S, class K> static void run_keys(const QuireAttnArgs& a) {
    run_all<std::conditional_t<transforms<Variant>, WideEngine<float>, E>, S, K>(a);
}

template <class E> static void run_dtype(const QuireAttnArgs& a) {
    using S = typename E::T;
    constexpr auto runs = [](int int8) { return QUIRE_ONLY_INT8 < 0 || QUIRE_ONLY_INT8 == int8; };
    if constexpr (runs(0)) if (a.int8_keys == 0) run_keys<E, S, S>(a);
    if constexpr (runs(1)) if (a.int8_keys != 0) run_keys<CellEngine<S>, S, q8>(a);
}

}  // namespace quire

using namespace quire;

void quire_attention(const QuireAttnArgs* args) {
    constexpr auto runs = [](int dtype) { return QUIRE_ONLY_DTYPE < 0 || QUIRE_ONLY_DTYPE == dtype; };
    if constexpr (runs(0)) if (args->dtype == 0) run_dtype<WideEngine<float>>(*args);
    if constexpr (runs(1)) if (args->dtype == 1) run_dtype<PairEngine>(*args);
    if constexpr (runs(2)) if (args->dtype == 2) run_dtype<WideEngine<f16>>(*args);
}
