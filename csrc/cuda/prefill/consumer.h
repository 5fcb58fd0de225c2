// The consumer warpgroups: products at the tensor cores, in turn, with the softmax of the next block under them.
#pragma once
#include "prefill/results.h"

#include <type_traits>

namespace quire {

__device__ __forceinline__ void to_elements(uint32_t (&p)[N_KEYS / 4], const float (&s)[N_KEYS / 2]) {
#pragma unroll
    for (int i = 0; i < N_KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void start_logits(float (&s)[N_KEYS / 2], Operand q, const uint8_t* keys) {
    const Operand k = rows_operand(uniform(shared_address(keys)), GROUP_BYTES);
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
        Product<N_KEYS>::rows(s, q.further(i / 4 * N_ROWS * ROW_BYTES + i % 4 * 32),
                              k.further(i / 4 * CHUNK_BYTES + i % 4 * 32), i > 0);
    products_commit();
}
__device__ __forceinline__ void start_output(float (&o)[DIM / 2], const uint32_t (&p)[N_KEYS / 4],
                                             const uint8_t* values) {
    const Operand v = columns_operand(uniform(shared_address(values)), CHUNK_BYTES, GROUP_BYTES);
#pragma unroll
    for (int i = 0; i < N_KEYS / 16; i++) Product<DIM>::columns(o, p + 4 * i, v.further(i * 2 * GROUP_BYTES), 1);
    products_commit();
}

// Zeroes the values that no row may read (0 * NaN is NaN). Both warpgroups do it: each waits for its own threads only.
__device__ __forceinline__ void clear_hidden_values(const QuireAttnArgs& args, const Work& work, int first_key,
                                                    uint8_t* values, uint64_t* full, uint32_t parity, int warpgroup) {
    const bool gap = Variant::window && LAYOUT != SPARSE && first_key < work.low && first_key + N_KEYS > args.n_first;
    if (!gap && first_key >= work.begin && first_key + N_KEYS <= work.end) return;
    await(shared_address(full), parity);
    const auto clear = [&](int from, int to) {
        constexpr int CELLS = N_CHUNKS * 8;
        from = max(from - first_key, 0), to = min(to - first_key, N_KEYS);
        for (int i = from * CELLS + threadIdx.x % 128; i < to * CELLS; i += 128) {
            const int row = i / CELLS, cell = i % CELLS;
            const int at = row / 8 * GROUP_BYTES + cell / 8 * CHUNK_BYTES + row % 8 * ROW_BYTES;
            *reinterpret_cast<uint4*>(values + at + cell % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
    };
    clear(first_key, work.begin);
    clear(work.end, first_key + N_KEYS);
    if (gap) clear(args.n_first, work.low);
    async_fence();
    named_sync(BARRIER_VALUES + warpgroup, 128);
}

__device__ __forceinline__ void consume(const QuireAttnArgs& args, int warpgroup, Shared& shared) {
    const int lane = threadIdx.x % 32;
    const int first_row = 64 * warpgroup + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float scale = Variant::has_logits ? LOG2E : args.scale * LOG2E;
    const auto release = [&](uint64_t* barrier) {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(barrier));
    };
    float s[N_KEYS / 2];
    uint32_t p[N_KEYS / 4];
    float o[DIM / 2];
    Softmax softmax;
    const Work* current;  // with two items in flight it is copied; else it stays valid until its end
    Operand q;
    Ring item, slot, k, v;
    const auto next_work = [&] {
        await(shared_address(&shared.q_full[slot.index]), slot.parity);
        current = &shared.work[item.index];
        q = rows_operand(uniform(shared_address(shared.q[slot.index])) + warpgroup * 64 * ROW_BYTES);
        if (current->n_tokens > 0) await(shared_address(&shared.k_full[k.index]), k.parity);
    };
    next_work();
    if (current->n_tokens == 0) return;
    if (warpgroup == 1) named_arrive(BARRIER_TURN, 256);  // warpgroup 0 has the first turn
    products_begin();
    start_logits(s, q, shared.k[k.index]);
    while (true) {  // the logits of the item's first block are on their way
        std::conditional_t<(N_SLOTS > 1), const Work, const Work&> now = *current;
        const auto release_work = [&] {
            release(&shared.work_empty[item.index]);
            item.advance<N_ITEMS>();
        };
        if constexpr (N_SLOTS > 1) release_work();
        const Rows rows = read_rows(args, now, first_row);
        const int n_blocks = now.n_blocks();
        const auto clear_values = [&](int i) {
            clear_hidden_values(args, now, now.key_of(i), shared.v[v.index], &shared.v_full[v.index], v.parity,
                                warpgroup);
        };
        // Logits of block i and output of the block before. The softmax stands between the two waits without a branch:
        // at a branch ptxas would move the second wait up.
        const auto next_block = [&](int i, auto edge) {
            await(shared_address(&shared.k_full[k.index]), k.parity);
            if (LAYOUT == SPARSE || at_edge(args, now, i - 1)) clear_values(i - 1);
            named_sync(BARRIER_TURN + warpgroup, 256);
            pin(s), pin(o);
            products_begin();
            start_logits(s, q, shared.k[k.index]);
            await(shared_address(&shared.v_full[v.index]), v.parity);
            products_begin();
            start_output(o, p, shared.v[v.index]);
            named_arrive(BARRIER_TURN + 1 - warpgroup, 256);
            products_wait<1>();
            pin(s);
            release(&shared.k_empty[k.index]);
            k.advance<K_STAGES>();
            weigh<decltype(edge)::value>(s, args, now, rows, now.key_of(i));
            softmax.step(s, scale);
            pin(s);
            keep_before_wait(softmax.sum[0] + softmax.sum[1], shared_address(&shared));
            products_wait<0>();
            pin(o), pin(s);
            release(&shared.v_empty[v.index]);
            v.advance<V_STAGES>();
            to_elements(p, s);
            softmax.rescale(o);
        };
        products_wait<0>();
        pin(s);
        release(&shared.k_empty[k.index]);
        k.advance<K_STAGES>();
        if (at_edge(args, now, 0)) weigh<true>(s, args, now, rows, now.key_of(0));
        else weigh<false>(s, args, now, rows, now.key_of(0));
        softmax.start();
        softmax.step(s, scale);
        to_elements(p, s);
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) o[i] = 0.0f;
        for (int i = 1; i < n_blocks; i++) {
            if (at_edge(args, now, i)) next_block(i, std::true_type());
            else next_block(i, std::false_type());
        }
        release(&shared.q_empty[slot.index]);
        slot.advance<N_SLOTS>();
        clear_values(n_blocks - 1);
        await(shared_address(&shared.v_full[v.index]), v.parity);
        // With q of two items in flight the first logits of the next item run under the results of this one; after the
        // last item they are computed from what lies there, for nobody.
        if constexpr (N_SLOTS > 1) next_work();
        pin(o);
        products_begin();
        start_output(o, p, shared.v[v.index]);
        if constexpr (N_SLOTS > 1) {
            start_logits(s, q, shared.k[k.index]);
            products_wait<1>();
        } else {
            products_wait<0>();
        }
        pin(o);
        release(&shared.v_empty[v.index]);
        v.advance<V_STAGES>();
        write_results(o, softmax, scale, args, now, rows);
        if constexpr (N_SLOTS == 1) {
            release_work();
            next_work();
            products_begin();
            start_logits(s, q, shared.k[k.index]);
        }
        if (current->n_tokens == 0) break;
    }
    products_wait<0>();
}

}  // namespace quire
