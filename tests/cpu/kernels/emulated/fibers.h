// The threads of emulated blocks: fibers of one thread of the host, which change where CUDA's threads wait, in an order
// drawn anew at each change. So what is read without a barrier is read too early by some; no two run at once.
#pragma once
#include <sched.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
inline int cta = 0;  // of the cluster
struct Fiber {
    ucontext_t begin;
    jmp_buf at;
    dim3 thread, block;
    int cta = 0;
    bool is_begun = false;
};
constexpr size_t STACK_BYTES = 1 << 20;
inline std::vector<void*> stacks;  // kept for the next launch
inline std::vector<Fiber*> ready;
inline Fiber* current = nullptr;
inline uint32_t drawn = 1;
inline size_t n_passed = 0;  // in a row

__attribute__((noinline)) inline void change_to(Fiber* next) {
    if (current && _setjmp(current->at)) return;
    current = next;
    threadIdx = next->thread, blockIdx = next->block, cta = next->cta;
    if (next->is_begun) _longjmp(next->at, 1);
    next->is_begun = true;
    setcontext(&next->begin);
}
inline Fiber* next_one() {
    if (ready.empty()) {
        std::fprintf(stderr, "all threads of an emulated block wait\n");
        std::abort();
    }
    drawn = drawn * 1664525 + 1013904223;
    std::swap(ready[(uint64_t(drawn) * ready.size()) >> 32], ready.back());
    Fiber* found = ready.back();
    ready.pop_back();
    return found;
}
inline void wait() {  // until somebody makes it ready
    n_passed = 0;
    change_to(next_one());
}
inline void pass() {  // it asks again, perhaps for what another process writes
    if (++n_passed > ready.size()) n_passed = 0, sched_yield();
    if (ready.empty()) return;
    ready.push_back(current);
    change_to(next_one());
}

class Waiting {  // fibers
    std::vector<Fiber*> fibers;

  public:
    void wait() {
        fibers.push_back(current);
        emulated::wait();
    }
    void notify_all() {
        ready.insert(ready.end(), fibers.begin(), fibers.end());
        fibers.clear();
    }
};
class Barrier {
    const int n;
    int pending;
    Waiting others;

  public:
    explicit Barrier(int n) : n(n), pending(n) {}
    void arrive() {
        if (--pending) return;
        pending = n;
        others.notify_all();
    }
    void arrive_and_wait() {
        if (pending > 1) {
            --pending;
            others.wait();
        } else {
            arrive();
        }
    }
};

inline const std::function<void()>* work = nullptr;
inline int n_left = 0;
inline Fiber host;
inline void run_one() {
    (*work)();
    change_to(--n_left ? next_one() : &host);
}
// Runs `what` as each of these threads, until all are over.
inline void run(std::vector<Fiber>& threads, const std::function<void()>& what) {
    work = &what, n_left = threads.size(), ready.clear();
    while (stacks.size() < threads.size()) {
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, 4096, PROT_NONE)) {  // what overflows it ends
            std::perror("the stack of an emulated thread");
            std::abort();
        }
        stacks.push_back(stack);
    }
    for (size_t i = 0; i < threads.size(); ++i) {
        getcontext(&threads[i].begin);
        threads[i].begin.uc_stack.ss_sp = stacks[i], threads[i].begin.uc_stack.ss_size = STACK_BYTES;
        makecontext(&threads[i].begin, run_one, 0);
        ready.push_back(&threads[i]);
    }
    host.is_begun = true, current = &host;
    change_to(next_one());
    current = nullptr;
}
}  // namespace emulated
