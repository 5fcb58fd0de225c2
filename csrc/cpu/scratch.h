// Memory of one thread for the work at hand, cut into aligned pieces.
#pragma once
#include <cstdint>
#include <cstdlib>

namespace quire {

// Who uses it: a task of a parallel loop, what surrounds the loop, or several of them, or a step, or experts.
enum class Use { TASK, LOOP, BOUNDS, APART, STEP, LOOKED_UP, EXPERTS };

class Scratch {
  public:
    // N pieces of these sizes in bytes: piece(0), piece(1), ... They are lost when the thread makes another Scratch for
    // the same use.
    template <int N> explicit Scratch(const int64_t (&sizes)[N], Use use = Use::TASK) {
        static_assert(N <= MOST);
        int64_t total = 0;
        for (int i = 0; i < N; i++) {
            offsets[i] = total;
            total += (sizes[i] + 63) & ~(int64_t)63;
        }
        start = buffer(total, (int)use);
    }

    void* piece(int i) const { return start + offsets[i]; }

  private:
    static constexpr int MOST = 9;

    // Lives until the thread ends; grows, never shrinks.
    static char* buffer(int64_t bytes, int use) {
        struct Buffer {
            char* raw = nullptr;
            int64_t size = 0;
            ~Buffer() { free(raw); }
        };
        static thread_local Buffer buffers[7];
        Buffer& one = buffers[use];
        if (one.size < bytes) {
            free(one.raw);
            one.raw = (char*)malloc(bytes + 64);
            if (one.raw == nullptr) __builtin_trap();
            one.size = bytes;
        }
        return (char*)(((uintptr_t)one.raw + 63) & ~(uintptr_t)63);
    }

    int64_t offsets[MOST];
    char* start;
};

}  // namespace quire
