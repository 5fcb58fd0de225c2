// Parallel loops on the thread pool that torch already runs.
//
// The loader hands over the address of GOMP_parallel of the OpenMP library found in the process, so there is one pool:
// no second set of spinning threads, no link dependency. Without it everything runs on the calling thread.
#pragma once
#include <atomic>
#include <cstdint>

namespace quire {

using Fork = void (*)(void (*body)(void*), void* data, unsigned n_threads, unsigned flags);
extern Fork fork_threads;  // GOMP_parallel, or null

// Calls f(i) once for each i in 0 .. n_items-1, in any order, on up to n_threads threads, `chunk` items at a time.
template <class F> void parallel_for(int64_t n_items, int64_t chunk, int n_threads, const F& f) {
    if (n_threads <= 1 || n_items <= chunk || fork_threads == nullptr) {
        for (int64_t i = 0; i < n_items; i++) f(i);
        return;
    }
    struct Work {
        std::atomic<int64_t> next;
        int64_t n_items, chunk;
        const F* f;
    } work{{0}, n_items, chunk, &f};
    const auto body = [](void* data) {
        Work& w = *static_cast<Work*>(data);
        for (;;) {
            const int64_t first = w.next.fetch_add(w.chunk, std::memory_order_relaxed);
            if (first >= w.n_items) return;
            const int64_t end = first + w.chunk < w.n_items ? first + w.chunk : w.n_items;
            for (int64_t i = first; i < end; i++) (*w.f)(i);
        }
    };
    const int64_t most = (n_items + chunk - 1) / chunk;
    fork_threads(body, &work, (unsigned)(n_threads < most ? n_threads : most), 0);
}

}  // namespace quire
