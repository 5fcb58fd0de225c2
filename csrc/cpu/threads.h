// Parallel loops. Without a pool (see quire_use_pool) everything runs on the calling thread.
#pragma once
#include <cstdint>

#include "quire_cpu.h"

namespace quire {

extern QuireParallel run_parallel;  // the pool's entry point, or null

// Calls f(i) once for each i in 0 .. n_items-1, in any order, on up to n_threads threads, `chunk` items at a time.
// Which thread runs an item must not matter to its result.
template <class F> void parallel_for(int64_t n_items, int64_t chunk, int n_threads, const F& f) {
    if (n_threads <= 1 || n_items <= chunk || run_parallel == nullptr) {
        for (int64_t i = 0; i < n_items; i++) f(i);
        return;
    }
    const auto body = [](const void* data, int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) (*static_cast<const F*>(data))(i);
    };
    run_parallel(body, &f, n_items, chunk, n_threads);
}

// Memory that will be read soon. Threads of the pool that wait ask for it meanwhile, so that memory does not rest; these
// are prefetches only. Replaces what was announced before; at most MOST_RANGES.
struct PrefetchRange {
    const void* data;
    int64_t bytes;
};
constexpr int MOST_RANGES = 4;
void announce_prefetch(const PrefetchRange* ahead, int n);

}  // namespace quire
