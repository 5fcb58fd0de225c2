// The plain C interface of the CPU kernels. No framework header, no allocation that outlives a call except one scratch
// buffer a thread. Strides count elements. dtype: 0 float32, 1 bfloat16, 2 float16.
#pragma once
#include <cstdint>

#define QUIRE_API extern "C" __attribute__((visibility("default")))

// Calls body(data, first, end) for chunks of 0 .. n_items-1, each once, in any order, on up to n_threads threads.
typedef void (*QuireBody)(const void* data, int64_t first, int64_t end);
typedef void (*QuireParallel)(QuireBody body, const void* data, int64_t n_items, int64_t chunk, int n_threads);

// The thread pool of this library.
QUIRE_API void quire_parallel(QuireBody body, const void* data, int64_t n_items, int64_t chunk, int n_threads);

// The pool on which this library's kernels run: quire_parallel of this or another library, or null for one thread.
QUIRE_API void quire_use_pool(QuireParallel pool);

// Checksum of this header (setup.py, quire/kernels/native.py): a library that was built with another one is not used.
QUIRE_API int64_t quire_interface();

// Asks the system for the registers that this library's instructions need, for the whole process. 0, or an error number:
// then no other function may be called.
QUIRE_API int64_t quire_enable();

constexpr int QUIRE_MAX_PARAMS = 8;

// One step's attention work, the same for every layer. Spans: quire/kernels/attention/schedule/plan.py.
struct QuireAttnPlan {
    const int32_t* q_indptr;      // [n_spans + 1]
    const int32_t* kv_lens;       // [n_spans]
    const int32_t* kv_at;         // [n_spans]: row of page_table; ragged: row of k and v of the span's first key
    const int32_t* block_indptr;  // [n_spans + 1], sparse only
    const int32_t* blocks;        // sparse only: the pages of a span (position / page_size) that it reads, ascending
    const int32_t* tiles;         // [n_tiles, 3]: span, first token of the span, number of tokens
    const int32_t* page_table;    // [n_slots, table_stride]
    const uint64_t* tree_paths;   // [n_rows], paged only: bit i: node i is the row's own, or above it; null: no trees
    const int32_t* tree_firsts;   // [n_spans]: where the key of node 0 lies; kv_lens: the span is no tree
    int64_t table_stride;
    int64_t work;                 // about how many multiplications: too few are not worth waking threads
    int32_t layout;               // 0 paged, 1 ragged, 2 sparse
    int32_t n_tiles, page_size, n_q_heads, n_kv_heads, head_dim;
};

// Attention of q [n, n_q_heads, head_dim] to k and v: pages [n_pages, n_kv_heads, page_size, head_dim] or ragged rows
// [n_keys, n_kv_heads, head_dim] of q's type, or, with int8_keys, entries of 8 bits (entries.h), then with strides in
// bytes. out [n, n_q_heads, head_dim] is contiguous; lse float32 [n, n_q_heads] (natural logarithm of the sum of
// weights) may be null. Keys a row sees: see Variant in quire/kernels/attention/variant/definition.py.
struct QuireAttnArgs {
    const QuireAttnPlan* plan;
    const void *q, *k, *v;
    void* out;
    float* lse;
    int64_t q_row, q_head;  // strides; ragged: k_page and v_page are unused
    int64_t k_page, k_head, k_token, v_page, v_head, v_token;
    int32_t dtype, int8_keys, causal, window, n_first, n_threads;
    float scale;
    float scalars[QUIRE_MAX_PARAMS];  // parameters of the variant
    const void* tensors[QUIRE_MAX_PARAMS];
};

QUIRE_API void quire_attention(const QuireAttnArgs* args);

// out[i, j] = norm(x[i, j]) * weight over h elements; residual may be null, else total = x + residual is stored in
// `total` (may alias residual or x) and normalised. x has strides (row, head), residual and total (row); out is
// contiguous.
QUIRE_API void quire_rms_norm(
    int dtype, const void* x, int64_t x_row, int64_t x_head, const void* residual, int64_t residual_row, void* total,
    const void* weight, void* out, int64_t n, int64_t n_heads, int64_t h, float eps, int n_threads);

// Rotate q and k in place. cos_sin [max_pos, rotary] float32; positions are int64 if wide, else int32.
QUIRE_API void quire_rope(
    int dtype, void* q, int64_t q_row, int64_t q_head, int n_q_heads, void* k, int64_t k_row, int64_t k_head,
    int n_kv_heads, int64_t n, const void* positions, int wide, const float* cos_sin, int rotary, int n_threads);

// out[i, :] = silu(x[i, :f]) * x[i, f:].
QUIRE_API void quire_silu_mul(int dtype, const void* x, int64_t x_row, void* out, int64_t n, int64_t f, int n_threads);

// Copy k and v rows of head_dim numbers into their entries, which are of the same type or have 8 bits.
QUIRE_API void quire_store_kv(
    int dtype, int int8_keys, const void* k, int64_t k_row, int64_t k_head, const void* v, int64_t v_row,
    int64_t v_head, void* k_pages, void* v_pages, const int64_t* cache_locs, int64_t n, int n_kv_heads, int page_size,
    int head_dim, int n_threads);

// A matrix [n, k] packed for products. Layouts of data and scales: quire/kernels/qgemm/weight.py.
// NIBBLES and BYTES have groups of `group` values along k, a multiple of 32 that divides 256.
enum QuireFormat {
    QUIRE_INT8 = 0, QUIRE_NIBBLES = 1, QUIRE_F32 = 2, QUIRE_BF16 = 3, QUIRE_F16 = 4, QUIRE_BYTES = 5
};

struct QuireMatrix {
    const void* data;
    const void* scales;  // int8: float32, a channel; groups: float16, in `unit`, a power of two
    const void* bias;    // [n], type of the activations; may be null
    const QuireMatrix* next;  // of the product that follows in a step: threads that wait ask memory for it; may be null
    int64_t n, k;
    int32_t format, group;
    float unit;
    uint8_t table[16];  // nibbles: what each stands for, plus 128
};

// What becomes of y = norm(x) @ matrix.T + bias, rounded to the type of x: it is stored; added to what `out` holds;
// its first half of columns, the gates, goes through silu and is multiplied with the second; or is stored as float32.
enum QuireThen { QUIRE_NOTHING = 0, QUIRE_ADD = 1, QUIRE_SILU_MUL = 2, QUIRE_WIDEN = 3 };

// x [m, k], out [m, n], or [m, n / 2] for SILU_MUL, with these row strides; norm: [k], weight of an RMS norm, or null.
struct QuireLinear {
    const QuireMatrix* matrix;
    const void *x, *norm;
    void* out;
    int64_t m, x_row, out_row;
    float eps;
    int32_t dtype, then, n_threads;
};

QUIRE_API void quire_linear(const QuireLinear* args);

// The adapter of one matrix [n, k] of several parts, one under another: y[part] += B (A x) of each part that has one.
struct QuireAdapterPart {
    const void* b;                  // [ceil(n / 64), rank, 64]: B, its scale multiplied in
    int64_t first, rank, start, n;  // lines of a from `first` on; outputs from `start` on
};

struct QuireAdapter {
    const void* a;  // [ceil(n_lines / 16), k, 16]: lines of the parts one under another
    const QuireAdapterPart* parts;
    int64_t n_lines, n_parts;
};

// y [m, n] += what the adapter in the place of each row makes of norm(x) [m, k]; places below 0, and null: nothing.
struct QuireLora {
    const QuireAdapter* const* adapters;  // by place
    const void *x, *norm;                 // norm: as for QuireLinear
    void* y;
    const int32_t* places;                // [m]
    int64_t m, n, k, x_row, y_row, n_places;
    float eps;
    int32_t dtype, n_threads;
};

QUIRE_API void quire_lora(const QuireLora* args);

// The n_chosen best of n_experts for each row of logits, the best first, and their weights. correction [n_experts] (or
// null) is added to the scores for the choice. Scores and the rest: see RoutingSpec in quire/config/experts.py.
enum QuireScores { QUIRE_SOFTMAX = 0, QUIRE_SIGMOID = 1, QUIRE_SPARSE_MIXER = 2, QUIRE_EVEN = 3 };

struct QuireRoute {
    const float *logits, *correction;
    int32_t* expert_ids;  // [n, n_chosen]
    float* weights;       // [n, n_chosen]
    int64_t* load;        // [n_experts]: the tokens that chose each are added; may be null
    int64_t n, n_experts, n_chosen, logits_row, n_groups, n_chosen_groups, n_group_best;
    float scale, mixer_margin;
    int32_t scores, renormalise, n_threads;
};

QUIRE_API void quire_route(const QuireRoute* args);

// out [n, hidden] = sum over j of weights[t, j] * down_e(silu(gate_e x[t]) * up_e x[t]), e = expert_ids[t, j], or this
// added to what out holds. Ids below 0 add nothing. Matrices of a product are of one format and size.
struct QuireExperts {
    const QuireMatrix *up, *down;  // [n_experts]; up: gates, then as many ups
    const void* x;
    const int32_t* expert_ids;     // [n, n_chosen]
    const float* weights;          // [n, n_chosen]
    void *out, *scratch;           // scratch: n * n_chosen * (hidden + inner) numbers
    int64_t n, n_chosen, n_experts, x_row, out_row;
    int32_t dtype, adds, n_threads;
};

QUIRE_API void quire_experts(const QuireExperts* args);

// Rounds a matrix [n, k] of rows `row` apart into groups: codes and scales in units of `unit`. bits 8: integers in
// -127..127; 4: indices into `table`, ascending, whose ends are the largest magnitudes below and above zero.
struct QuirePack {
    const void* weight;
    void *data, *scales;
    int64_t n, k, row;
    int32_t dtype, bits, group, n_threads;
    float unit, table[16];
};

QUIRE_API void quire_pack(const QuirePack* args);

// --- rows that are alone: each in one order, token after token (quire/kernels/state/cpu.py) ------------------------
// Rows of spans, and the line of each state that a span goes on from, and writes: see StateSpans in
// quire/kernels/state/spans.py. piece_ptr null: each span is one row, and nothing is kept.
struct QuireStateSpans {
    const int32_t *lines, *fresh;               // [n_spans]
    const int32_t *piece_ptr, *row_ptr, *keep;  // [n_spans + 1], [n_pieces + 1], [n_pieces]
    int64_t n_spans;
};

// out [n, c] = the causal convolution of x [n, c] with taps float32 [k, c], plus bias float32 [c] (or null), then SiLU
// if asked. state [n_lines, k - 1, c].
struct QuireConvolve {
    const QuireStateSpans* spans;
    const void* x;
    const float *taps, *bias;
    void *state, *out;
    int64_t n_columns, k, x_row;
    int32_t dtype, silu, n_threads;
};

QUIRE_API void quire_convolve(const QuireConvolve* args);

// The recurrence of Mamba-2: x, out [n, heads, p], steps and decays float32 [n, heads], b and c [n, groups, s], skip
// float32 [heads], state float32 [n_lines, heads, p, s]. decays: what is left of a state.
struct QuireScanSsm {
    const QuireStateSpans* spans;
    const void *x, *b, *c;
    const float *steps, *decays, *skip;
    float* state;
    void* out;
    int64_t n_heads, n_groups, p, s, x_row, b_row, c_row;
    int32_t dtype, n_threads;
};

QUIRE_API void quire_scan_ssm(const QuireScanSsm* args);

// The gated delta rule of unit keys and queries: q, k [n, key heads, d], v, out [n, heads, e], decays and betas float32
// [n, heads], state float32 [n_lines, heads, d, e].
struct QuireScanDelta {
    const QuireStateSpans* spans;
    const void *q, *k, *v;
    const float *decays, *betas;
    float* state;
    void* out;
    int64_t n_key_heads, n_heads, d, e, q_row, k_row, v_row;
    float eps, scale;  // eps: of lengths; scale: of queries
    int32_t dtype, n_threads;
};

QUIRE_API void quire_scan_delta(const QuireScanDelta* args);

// out [n, c] = RMS norm of `size` columns each, and SiLU of the gate before it, or behind it; weight float32 [n_weights],
// repeated.
struct QuireNormGated {
    const void *y, *gate;
    const float* weight;
    void* out;
    int64_t n, n_columns, size, n_weights, y_row, gate_row;
    float eps;
    int32_t dtype, gate_first, n_threads;
};

QUIRE_API void quire_norm_gated(const QuireNormGated* args);

// out[i, h] = x[i, h] (k numbers) times the matrix of head h: [k, m], or [m, k] if transposed. Strides (row, head).
struct QuireHeads {
    const void *x, *matrices;
    void* out;
    int64_t n, n_heads, k, m, x_row, x_head, matrix_row, matrix_head, out_row, out_head;
    int32_t dtype, transposed, n_threads;
};

QUIRE_API void quire_heads(const QuireHeads* args);

// out [n, f] = a function of each element of x.
enum QuireFunction {
    QUIRE_SIGMOID_OF = 0, QUIRE_SOFTPLUS_OF = 1, QUIRE_EXP_OF = 2, QUIRE_SILU_OF = 3, QUIRE_GELU_TANH_OF = 4
};

QUIRE_API void quire_apply(
    int dtype, int function, const void* x, int64_t x_row, void* out, int64_t n, int64_t f, int n_threads);

// One token for each row of logits [n_rows, width]: the largest where inverses[i] (1 / temperature) is 0, else the
// first at which the cumulative weight exceeds uniforms[i] times the total. Logits below floors[i] weigh nothing;
// floors may be null. status: 0 fine, 1 NaN or +inf, 2 nothing above -inf.
struct QuireChoice {
    const float* logits;
    const double *uniforms, *inverses;
    const float* floors;
    int32_t* token_ids;
    uint8_t* status;
    int64_t logits_row, width, n_rows, n_threads;
};

QUIRE_API void quire_choose(const QuireChoice* args);

// --- what the host does before a step --------------------------------------------------------------------------------
// The list of work of a decode step on a GPU: spans of one row, with all keys of a window (0: all). The caller has room
// for n_spans * n_kv_heads + n_ctas lines (QuireTile in csrc/cuda/attention.h) in `small`, twice n_ctas parts, n_ctas
// merges and n_ctas + 1 entries of `queue`; the counts are set. table_stride: entries of a row of the page table.
struct QuireDecodeWork {
    const int32_t *kv_lens, *slots;
    int32_t *small, *merges, *parts, *queue;
    int64_t n_spans, n_kv_heads, group, window, table_stride, n_ctas;
    int64_t n_small, n_merges, n_parts;
};

QUIRE_API void quire_decode_work(QuireDecodeWork* args);

// The latest place before the last of n tokens up to which the most tokens equal those up to the last, `longest` at most;
// -1: nowhere `shortest` do.
QUIRE_API int64_t quire_latest_match(const int32_t* tokens, int64_t n, int64_t shortest, int64_t longest);

// --- a step of a whole model in one call -------------------------------------------------------------------------
// A fused step is an array of operations that Python makes once for a model (quire/kernels/fused_step.py). They run in
// order on the rows of a step; TAKE leaves the rows wanted. Then, if `choice` is given, tokens are chosen for the rows
// wanted and written behind their rows. With `n_places` they run again, on the tokens just chosen. Counts of rows in the
// structs are overwritten.
enum QuireOpCode {
    QUIRE_EMBED = 0, QUIRE_LINEAR = 1, QUIRE_ROTATE = 2, QUIRE_ATTEND = 3, QUIRE_TAKE = 4, QUIRE_NORM = 5,
    QUIRE_LOAD = 6, QUIRE_ROUTE = 7, QUIRE_EXPERTS = 8, QUIRE_LORA = 9, QUIRE_SILU = 10
};

struct QuireOp {
    int64_t code;
    void* args;        // the struct that its name says; ATTEND: QuireAttnArgs
    int64_t table_at;  // ROTATE, ATTEND: entry of the step's page table at which that of the layer's group begins
};

// out [n, row_bytes] = rows of the table for the tokens of the step.
struct QuireEmbed {
    const void* table;
    void* out;
    int64_t row_bytes;
};

// Norm (where there are weights) and rotate q and k of qkv [n, (n_q_heads + 2 n_kv_heads) * head_dim] in place; write k
// and v to the step's entries of pages [n_pages, n_kv_heads, page_size, entry].
struct QuireRotate {
    void* qkv;
    const void *q_norm, *k_norm;
    void *k_pages, *v_pages;
    const float* cos_sin;  // [max_pos, rotary]
    int32_t n_q_heads, n_kv_heads, head_dim, rotary, page_size, dtype, int8_keys;
    float eps;
};

// rows [n, row_bytes]: those wanted move to the front.
struct QuireTake {
    void* rows;
    int64_t row_bytes;
};

// out [n, width] = RMS norm of x [n, width]; both may be parts of wider rows, and the same.
struct QuireNorm {
    const void *x, *weight;
    void* out;
    int64_t width, x_row, out_row;
    float eps;
    int32_t dtype;
};

// rows [n, 2 * half_bytes] = what two pools of pages [n_pages, page_size, half_bytes] have of the token before each row;
// zeros before the first token.
struct QuireLoad {
    void* rows;
    const void *first, *second;
    int64_t half_bytes;
};

// out [n, width] = silu(x[:, :width]) * x[:, width:], both of contiguous rows.
struct QuireSilu {
    const void* x;
    void* out;
    int64_t width;
    int32_t dtype;
};

// A chain chooses n_places[i] tokens for the row wanted i, each from the one before it. Token k of all rows: choice's
// token_ids from k * n_wanted on; it has room for as many as the longest chain has, the status for one a row. Behind the
// first token the first n_once operations are left out.
struct QuireStep {
    const int64_t *slots, *positions;              // [n_rows]
    const int64_t* places;                         // [n_rows]: where the row's token stands and its key lies
    const int32_t *q_indptr, *kv_lens, *kv_at;     // [n_spans + 1], [n_spans], [n_spans]: as in QuireAttnPlan
    const uint64_t* tree_paths;                    // as there
    const int32_t* tree_firsts;
    const int64_t* wanted;                         // [n_wanted], ascending rows
    int32_t* tokens;                               // [n_slots, stride]
    const int32_t* page_table;                     // [n_groups, n_slots, stride]
    QuireChoice* choice;
    const int32_t* n_places;                       // [n_wanted], not rising, at least 1; null: one each
    const int32_t* ids;                            // the token each logit stands for; null: its number
    const int32_t* adapters;                       // [n_rows]: place of each row's, for LORA, of which a chain has none
    int64_t tokens_stride, table_stride, n_rows, n_spans, n_wanted, n_once;
    int32_t page_size, n_q_heads, n_kv_heads, head_dim, tile_tokens, n_threads;
};

QUIRE_API void quire_fused_step(const QuireOp* ops, int64_t n_ops, const QuireStep* step);
