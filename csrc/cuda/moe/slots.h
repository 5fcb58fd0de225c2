// Where a pair of a token and an expert lies among all pairs, sorted by expert: its slot.
#pragma once
#include "gemm.h"

namespace quire {

constexpr int MAX_CHOSEN = 32;

// From the L2 cache, which all grids share, and where it stands.
template <class T> __device__ __forceinline__ T load_shared(const T* from) { return *const_cast<const volatile T*>(from); }

struct Pairs {
    const int32_t* expert_ids;  // of pairs; others than 0 .. n_experts are left out
    int n_chosen, n_experts;    // of a token, and in all
    int n_shared;               // last of both, which all tokens have and expert_ids has not
    __device__ __forceinline__ int expert_of(int pair) const {  // -1: none
        if (n_shared > 0) {
            const int token = pair / n_chosen, place = pair % n_chosen, n_routed = n_chosen - n_shared;
            if (place >= n_routed) return n_experts - n_chosen + place;
            pair = token * n_routed + place;
        }
        const int expert = load_shared(expert_ids + pair);
        return expert >= 0 && expert < n_experts - n_shared ? expert : -1;
    }
};

// slots: holds the pair's rank among those of its expert, then its slot. -1: it has no expert.
__device__ __forceinline__ int find_slot(const Pairs& pairs, const int32_t* starts, int32_t* slots, int pair) {
    const int expert = pairs.expert_of(pair);
    if (expert < 0) return -1;
    const int slot = load_shared(starts + expert) + load_shared(slots + pair);
    slots[pair] = slot;
    return slot;
}

}  // namespace quire
