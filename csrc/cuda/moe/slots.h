// Where a pair of a token and an expert lies among all pairs, sorted by expert: its slot.
#pragma once
#include "gemm.h"

namespace quire {

constexpr int MAX_CHOSEN = 32;

// From the L2 cache, which all grids share, and where it stands.
template <class T> __device__ __forceinline__ T load_shared(const T* from) { return *const_cast<const volatile T*>(from); }

// slots: holds the pair's rank among those of its expert, then its slot. -1: it has no expert.
__device__ __forceinline__ int find_slot(const int32_t* expert_ids, const int32_t* starts, int32_t* slots, int pair,
                                         int n_experts) {
    const int expert = load_shared(expert_ids + pair);
    if (expert < 0 || expert >= n_experts) return -1;
    const int slot = load_shared(starts + expert) + load_shared(slots + pair);
    slots[pair] = slot;
    return slot;
}

}  // namespace quire
