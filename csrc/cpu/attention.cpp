// Paged ragged causal attention, straight from pages: flash tiling with an online softmax (Dao 2022, algorithm 1).
//
// A task is one tile of tokens of one span for one KV head; its rows are tokens x query heads of the group, so a KV
// head is read once for its group. KV is walked in blocks of E::B keys that begin at multiples of E::B of the absolute
// position, and a row's arithmetic in a block has one fixed order. What surrounds a row (other rows of the tile,
// chunking, page ids, threads) only adds terms that are exactly neutral: a masked key has probability 0, an unchanged
// maximum rescales by 1. So the output of a row is bitwise a function of its q and its keys and values alone.
#include "engine.h"
#include "quire_cpu.h"
#include "threads.h"

namespace quire {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NEG_INF = -__builtin_inff();

// Bytes of one thread that live until it ends; grows, never shrinks.
static char* scratch(size_t bytes) {
    struct Block {
        char* raw = nullptr;
        size_t size = 0;
        ~Block() { free(raw); }
    };
    static thread_local Block block;
    if (block.size < bytes) {
        free(block.raw);
        block.raw = (char*)malloc(bytes + 64);
        if (block.raw == nullptr) __builtin_trap();
        block.size = bytes;
    }
    return (char*)(((uintptr_t)block.raw + 63) & ~(uintptr_t)63);
}

struct Call {
    const QuireAttnPlan* plan;
    const void *q, *k_pages, *v_pages;
    void* out;
    int64_t q_row, q_head;
    float scale, softcap;
    int window;
};

// One row's state: scores of the running block, running maximum, running sum of each lane.
struct Row {
    float max;
    vf sum;
    int64_t position;
};

// Find block `b` of a sequence in its pages; positions at or beyond `end` are not valid.
template <class E>
static void locate(const Call& c, int64_t head, int slot, int64_t b, int64_t end, const typename E::T* zeros, Block<typename E::T>& to) {
    using T = typename E::T;
    const QuireAttnPlan& p = *c.plan;
    const int32_t* pages = p.page_table + slot * p.table_stride;
    const int64_t first = b * E::B, last = first + E::B < end ? first + E::B : end;
    for (int64_t j = first; j < last;) {
        const int64_t page = pages[j / p.page_size], offset = j % p.page_size;
        const int64_t stop = j + p.page_size - offset < last ? j + p.page_size - offset : last;
        int64_t cell = ((page * p.n_kv_heads + head) * p.page_size + offset) * p.head_dim;
        for (; j < stop; j++, cell += p.head_dim) {
            to.keys[j - first] = (const T*)c.k_pages + cell;
            to.values[j - first] = (const T*)c.v_pages + cell;
        }
    }
    to.n = last > first ? (int)(last - first) : 0;
    for (int j = to.n; j < E::B; j++) to.keys[j] = to.values[j] = zeros;
}

// Turn the scores of one row in block [first, first + B) into probabilities, update its state, return the rescaling of
// what was accumulated before. Probabilities are 2^(score - max), 0 where masked.
template <class E>
QUIRE_INLINE float softmax(const Call& c, const float* s, typename E::Weight* weights, Row& row, int64_t first) {
    constexpr int B = E::B, N = B / W;
    vf v[N], top = set1(NEG_INF);
    const float factor = c.scale * LOG2E;
    const int64_t lowest = c.window > 0 ? row.position - c.window + 1 : 0;
    const bool all_seen = first + B - 1 <= row.position && first >= lowest;
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
        v[i] = load(s + i * W);
        if (c.softcap > 0) v[i] = tanh(v[i] * (c.scale / c.softcap)) * (c.softcap * LOG2E);
        else v[i] = v[i] * factor;
        if (!all_seen) {
            const vi key = lane + (int32_t)(i * W);  // index in the block; bounds fit 32 bits after the subtraction
            const vi seen = (key <= (int32_t)(row.position - first < B ? row.position - first : B)) &
                            (key >= (int32_t)(lowest > first ? lowest - first : 0));
            v[i] = seen ? v[i] : set1(NEG_INF);
        }
        top = vmax(top, v[i]);
    }
    const float before = row.max, peak = hmax(top), now = peak > before ? peak : before;
    const float base = now == NEG_INF ? 0.f : now;  // nothing seen yet: every exponent below is -inf, not NaN
    vf sum = vf{};
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
        sum = sum + E::put(weights + i * W, exp2(v[i] - base));
    }
    const float rescale = before == now ? 1.f : exp2(set1(before - base))[0];
    row.max = now;
    row.sum = fma(row.sum, set1(rescale), sum);
    return rescale;
}

template <class E> struct Tile {
    using T = typename E::T;
    const Call& c;
    typename E::Panels panels;
    float* acc;  // [rows, padded head_dim]
    T* zeros;    // [head_dim]
    Row* rows;
    typename E::Query* query;
    int n_rows, group;
    int64_t head, first_position;

    Tile(const Call& call, int most_rows) : c(call) {
        const int d = c.plan->head_dim, lanes_d = padded(d);
        const size_t panel_bytes = E::panel_bytes(d), acc_bytes = sizeof(float) * lanes_d * most_rows;
        const size_t query_bytes = (E::query_bytes(d) * most_rows + 63) & ~(size_t)63;
        const size_t row_bytes = sizeof(Row) * most_rows;
        char* at = scratch(panel_bytes + acc_bytes + query_bytes + row_bytes + sizeof(T) * d);
        panels = E::panels(at, d);
        acc = (float*)(at + panel_bytes);
        query = (typename E::Query*)(at + panel_bytes + acc_bytes);
        rows = (Row*)(at + panel_bytes + acc_bytes + query_bytes);
        zeros = (T*)(at + panel_bytes + acc_bytes + query_bytes + row_bytes);
        memset(zeros, 0, sizeof(T) * d);
    }

    // Rows of the tile: token t, query head g of the group at row t * group + g.
    void open(int64_t first_row, int n_tokens, int64_t kv_head, int64_t position) {
        const QuireAttnPlan& p = *c.plan;
        const int lanes_d = padded(p.head_dim);
        group = p.n_q_heads / p.n_kv_heads;
        head = kv_head;
        n_rows = n_tokens * group;
        first_position = position;
        for (int r = 0; r < n_rows; r++) {
            const int64_t at = (first_row + r / group) * c.q_row + (kv_head * group + r % group) * c.q_head;
            E::pack_query((const T*)c.q + at, query, r, p.head_dim);
            rows[r] = Row{NEG_INF, vf{}, position + r / group};
        }
        memset(acc, 0, sizeof(float) * lanes_d * n_rows);
    }

    // Few enough rows that repacking a block would cost more than it saves.
    bool few() const { return n_rows <= E::R && c.plan->head_dim % W == 0; }

    // Fold one block of keys, the first of them at position `first`, into the rows that see any of it.
    // The next block is asked for while this one is computed, line by line: a burst would fill the miss buffers.
    void fold(int64_t first, const Block<typename E::T>& block, const Block<typename E::T>& next) {
        const int d = c.plan->head_dim, lanes_d = padded(d), n_keys = block.n;
        alignas(64) float s[E::R * E::B];
        alignas(64) typename E::Weight weights[E::R * E::B];
        float rescale[E::R];
        if (!few()) E::pack(panels, block, next, d);
        for (int r = 0; r < n_rows; r += E::R) {
            const int n = n_rows - r < E::R ? n_rows - r : E::R;
            const int64_t seen = rows[r + n - 1].position - first + 1;
            if (seen <= 0 || (c.window > 0 && first + n_keys <= rows[r].position - c.window + 1)) continue;
            if (few()) E::scores_of_few(n, query, block, next, d, s);
            else E::scores(n, query, r, panels, d, s);
            for (int i = 0; i < n; i++)
                rescale[i] = softmax<E>(c, s + i * E::B, weights + i * E::B, rows[r + i], first);
            const int n_seen = seen < n_keys ? (int)seen : n_keys;
            if (few()) E::accumulate_few(n, weights, rescale, block.values, n_seen, d, acc);
            else E::accumulate(n, weights, rescale, panels, n_seen, lanes_d, acc + (int64_t)r * lanes_d);
        }
    }

    void close(int64_t first_row) {
        const QuireAttnPlan& p = *c.plan;
        const int d = p.head_dim, lanes_d = padded(d);
        for (int r = 0; r < n_rows; r++) {
            const vf norm = set1(1.f / hsum(rows[r].sum));
            T* to = (T*)c.out + ((first_row + r / group) * p.n_q_heads + head * group + r % group) * d;
            for (int i = 0; i < d; i += W) {
                const vf v = load(acc + (int64_t)r * lanes_d + i) * norm;
                if (i + W <= d) store(to + i, v);
                else store_some(to + i, v, d - i);
            }
        }
    }
};

template <class E> static void run_tile(const Call& c, int64_t head, const int32_t* tile, Tile<E>& work) {
    const QuireAttnPlan& p = *c.plan;
    const int span = tile[0], n_tokens = tile[2];
    const int64_t first_row = p.q_indptr[span] + tile[1];
    const int64_t start = p.kv_lens[span] - (p.q_indptr[span + 1] - p.q_indptr[span]) + tile[1];
    const int64_t end = start + n_tokens;
    const int64_t lowest = c.window > 0 && start - c.window + 1 > 0 ? start - c.window + 1 : 0;
    Block<typename E::T> blocks[2];  // the one at work and the next
    int64_t b = lowest / E::B;
    locate<E>(c, head, p.slots[span], b, end, work.zeros, blocks[b & 1]);
    work.open(first_row, n_tokens, head, start);
    for (; blocks[b & 1].n > 0; b++) {
        Block<typename E::T>& next = blocks[(b + 1) & 1];
        locate<E>(c, head, p.slots[span], b + 1, end, work.zeros, next);
        work.fold(b * E::B, blocks[b & 1], next);
    }
    work.close(first_row);
}

// Multiplications (and elements read) below which waking a thread costs more than it saves: some 20 microseconds.
constexpr int64_t SMALL_WORK = 1 << 20;

template <class E> static void run_all(const Call& c, int n_threads) {
    const QuireAttnPlan& p = *c.plan;
    const int group = p.n_q_heads / p.n_kv_heads;
    int most_tokens = 0;
    int64_t work = 0;
    for (int i = 0; i < p.n_tiles; i++) {
        const int n_tokens = p.tiles[3 * i + 2];
        if (n_tokens > most_tokens) most_tokens = n_tokens;
        work += (int64_t)(n_tokens * group + 4) * p.kv_lens[p.tiles[3 * i]] * p.head_dim * p.n_kv_heads;
    }
    if (work < SMALL_WORK) n_threads = 1;
    const int most_rows = most_tokens * group;
    parallel_for((int64_t)p.n_tiles * p.n_kv_heads, 1, n_threads, [&](int64_t task) {
        Tile<E> work(c, most_rows);
        run_tile<E>(c, task % p.n_kv_heads, p.tiles + 3 * (task / p.n_kv_heads), work);
    });
}

}  // namespace quire

using namespace quire;

void quire_attention(
    const QuireAttnPlan* plan, int dtype, const void* q, int64_t q_row, int64_t q_head, const void* k_pages,
    const void* v_pages, void* out, float scale, int window, float softcap, int n_threads) {
    const Call call{plan, q, k_pages, v_pages, out, q_row, q_head, scale, softcap, window};
    if (dtype == 0) run_all<WideEngine<float>>(call, n_threads);
    else if (dtype == 1) run_all<Bf16Engine>(call, n_threads);
    else run_all<WideEngine<f16>>(call, n_threads);
}
