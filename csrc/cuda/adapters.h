// Which adapters the rows of a step have: the places of its tiles (quire/kernels/lora/weight.py), each once.
#pragma once
#include "gemm.h"

namespace quire {

// Of tile i: its place, or -1 where there is no tile or its rows have no adapter.
__device__ __forceinline__ int place_of(const int32_t* tiles, int n_tiles, int i) {
    if (i < 0 || i >= n_tiles) return -1;
    return load_here(tiles + 3 * i + 2) > 0 ? load_here(tiles + 3 * i) : -1;
}

// How many different places the first n_tiles tiles have; those of a place stand together. By a whole warp; `take`
// gets the number of each and the place itself, in one of its lanes.
template <class Take> __device__ __forceinline__ int count_places(const int32_t* tiles, int n_tiles, const Take& take) {
    const int lane = threadIdx.x & 31;
    int n = 0;
    for (int first = 0; first < n_tiles; first += 32) {
        const int i = first + lane, place = place_of(tiles, n_tiles, i);
        const bool is_new = place >= 0 && place != place_of(tiles, n_tiles, i - 1);
        const unsigned found = __ballot_sync(0xffffffffu, is_new);
        if (is_new) take(n + __popc(found & ((1u << lane) - 1)), place);
        n += __popc(found);
    }
    return n;
}

}  // namespace quire
