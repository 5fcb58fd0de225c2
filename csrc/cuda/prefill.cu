// Attention of large lines (prefill, shared prefixes) on Hopper: wgmma, TMA, specialised warps; the design of
// FlashAttention-3 (Shah et al., 2024): two warpgroups of 64 rows take turns at the tensor cores (`turn`), and within a
// warpgroup the softmax of one block of keys runs under the product of the probabilities of the block before.
//
// Macros: QUIRE_HEAD_DIM (64, 96, 128, 192, 256), QUIRE_BF16 (1, or 0: fp16), QUIRE_LAYOUT (0 paged, 1 ragged,
// 2 block-sparse); Variant and Site come from the variant's header (see plain_variant.h).
//
// One block per multiprocessor takes (line, KV head) items from a queue (QuireAttnArgs::ticket; below 2^24 items). Its
// warps: 0 takes the items, 1 loads keys, 2 loads values, 3 and 0 load q, the last eight compute. Lines are sorted by
// falling cost, so the first empty line ends the queue. Blocks of keys run from the last to the first.
//
// Boxes of the copy engine cost time each, so one box brings all of a page's rows of a block (JOINED): blocks lie in
// shared memory as [8 rows][chunk of 64 elements][row of 128 bytes]. Ragged keys do not start at multiples of 8 and
// dimension 96 does not end with a chunk: there a box is one chunk, and blocks lie as [chunk][row].
#include "prefill/consumer.h"
#include "prefill/producer.h"
#include "shared_memory.h"

namespace quire {

__global__ void __launch_bounds__(N_THREADS, 1)
    attention_large(const __grid_constant__ QuireAttnArgs args, const __grid_constant__ CUtensorMap k_map,
                    const __grid_constant__ CUtensorMap v_map, int box_rows) {
    extern __shared__ uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
    if (threadIdx.x == 0) {
        constexpr int N_WARPS = 4 * N_CONSUMERS;
        const auto init = [](uint64_t& barrier, int n_arrivals) { barrier_init(shared_address(&barrier), n_arrivals); };
        for (int i = 0; i < K_STAGES; i++) init(shared.k_full[i], 1), init(shared.k_empty[i], N_WARPS);
        for (int i = 0; i < V_STAGES; i++) init(shared.v_full[i], 1), init(shared.v_empty[i], N_WARPS);
        for (int i = 0; i < N_ITEMS; i++) {
            init(shared.work_full[i], 1), init(shared.work_ends[i], 1);
            init(shared.work_empty[i], N_WARPS + 2);  // and the two warps that load keys and values
        }
        for (int i = 0; i < N_SLOTS; i++) init(shared.q_full[i], N_LOADERS), init(shared.q_empty[i], N_WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_down<40>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0) take_items(args, box_rows, shared);
        else if (warp == 1)
            load_blocks<K_STAGES, true>(args, &k_map, args.k_page / args.k_head, shared.k, shared.k_full,
                                        shared.k_empty, box_rows, shared);
        else if (warp == 2)
            load_blocks<V_STAGES, false>(args, &v_map, args.v_page / args.v_head, shared.v, shared.v_full,
                                         shared.v_empty, box_rows, shared);
        else load_queries(args, shared);
    } else {
        registers_up<232>();
        consume(args, warpgroup - 1, shared);
    }
    wait_for_previous_grid();  // who waits for this grid waits for the small lines, too
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Rows of a box: they lie in one page, and boxes tile the block.
int rows_of_box(int page_size) {
    int a = page_size, b = N_KEYS;
    while (b != 0) {
        const int rest = a % b;
        a = b, b = rest;
    }
    return a;
}

cudaError_t make_map(CUtensorMap* map, const QuireAttnArgs& args, const void* base, int64_t page, int64_t head,
                     int64_t token, int box_rows) {
    const uint64_t n_heads = args.n_kv_heads, n_pages = args.n_pages, head_bytes = head * 2, token_bytes = token * 2;
    if (JOINED) {  // 8 rows of a chunk, chunks, groups of 8 rows, (page, head)
        if (head <= 0 || page % head != 0) return cudaErrorInvalidValue;
        const uint64_t sizes[5] = {64, 8, N_CHUNKS, uint64_t(args.page_size / 8), n_pages * (page / head)};
        const uint64_t strides[4] = {token_bytes, ROW_BYTES, 8 * token_bytes, head_bytes};
        const uint32_t box[5] = {64, 8, N_CHUNKS, uint32_t(box_rows / 8), 1};
        return encode_map(map, base, 5, sizes, strides, box);
    }
    const bool ragged = LAYOUT == RAGGED;
    const uint64_t sizes[4] = {DIM, ragged ? n_pages : args.page_size, n_heads, ragged ? 1 : n_pages};
    const uint64_t strides[3] = {token_bytes, head_bytes, ragged ? head_bytes : page * 2};
    const uint32_t box[4] = {64, uint32_t(box_rows), 1, 1};
    return encode_map(map, base, 4, sizes, strides, box);
}

cudaError_t launch(const QuireAttnArgs& args, cudaStream_t stream) {
    if (args.head_dim != DIM || args.n_q_heads % args.n_kv_heads != 0) return cudaErrorInvalidValue;
    if (args.n_q_heads / args.n_kv_heads > N_ROWS) return cudaErrorInvalidValue;
    if (LAYOUT != RAGGED && (args.page_size <= 0 || args.page_size % 8 != 0)) return cudaErrorInvalidValue;
    if (!Variant::has_logits && !(args.scale > 0.0f)) return cudaErrorInvalidValue;  // maxima are taken of q.k
    if (args.q_row % 8 != 0 || args.q_head % 8 != 0) return cudaErrorInvalidValue;
    if (int64_t(args.n_large) * args.n_kv_heads >= 1 << 24) return cudaErrorInvalidValue;
    if (args.n_large == 0) return cudaSuccess;
    const int box_rows = LAYOUT == RAGGED ? N_KEYS : rows_of_box(args.page_size);
    CUtensorMap k_map, v_map;
    cudaError_t error = make_map(&k_map, args, args.k, args.k_page, args.k_head, args.k_token, box_rows);
    if (error != cudaSuccess) return error;
    error = make_map(&v_map, args, args.v, args.v_page, args.v_head, args.v_token, box_rows);
    if (error != cudaSuccess) return error;
    int device, n_sm;
    if ((error = cudaGetDevice(&device)) != cudaSuccess) return error;
    if ((error = cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device)) != cudaSuccess) return error;
    constexpr int SHARED_BYTES = sizeof(Shared) + 1024;
    error = allow_shared_memory<attention_large>(SHARED_BYTES);
    if (error != cudaSuccess) return error;
    const int n_items = args.n_large * args.n_kv_heads;
    // Behind small lines it starts where they are done, on what was there before them: their kernel waited for that.
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(n_items < n_sm ? n_items : n_sm);
    config.blockDim = dim3(N_THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = args.small_lines != nullptr;
    return cudaLaunchKernelEx(&config, attention_large, args, k_map, v_map, box_rows);
}

}  // namespace quire

extern "C" int quire_attention_large(const QuireAttnArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
