// Stands in for CUDA's header: blocks run one after another here, so there are no clusters.
#pragma once
#include <cstdlib>

namespace cooperative_groups {
struct cluster_group {
    void sync() const { std::abort(); }
    template <class T> T* map_shared_rank(T*, int) const { std::abort(); }
};
inline cluster_group this_cluster() { return {}; }
}  // namespace cooperative_groups
