// The thread pool: a loop ends when its chunks are done, never later because some thread did not come.
//
// Chunks are claimed one by one from one counter, by the caller as well. A worker that wakes late finds nothing left
// and nobody waits for it. Workers spin some microseconds after their last chunk, for the next loop of the same step,
// then sleep. The only wait is for a chunk that another thread has begun; if that thread lost its core meanwhile, the
// caller notices (the wait is long beside the chunks it ran itself), and for a multiple of the time lost it works
// alone. So a taken core costs a share of the pool's speed, not a time slice a loop.
#include <atomic>
#include <chrono>
#include <thread>

#include "event_count.h"
#include "quire_cpu.h"
#include "threads.h"
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

using Body = QuireBody;

constexpr int MOST_WORKERS = 255;
constexpr int64_t SPIN_NS = 40000;        // a worker sleeps after so long without work
constexpr int64_t CALL_EVERY_NS = 100000;
constexpr int64_t LOST_CORE_NS = 20000;   // between two looks at the clock: something else ran
constexpr int64_t CALLER_SPIN_NS = 50000;  // the caller sleeps after so long a wait for begun chunks
constexpr int64_t STALL_NS = 30000, STALL_CHUNKS = 4;  // a wait beyond both is a lost core
constexpr int64_t ALONE_TIMES = 10, MOST_ALONE_NS = 200000000;
constexpr int64_t RELAPSE_TIMES = 20;  // a stall that followed so soon, in times what it lost, doubles the time alone

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// What was announced, and how much of it has been asked for. Threads may see parts of two announcements at once: a
// wrong prefetch is harmless.
class Prefetcher {
  public:
    void set(const PrefetchRange* ahead, int n) {
        for (int i = 0; i < MOST_RANGES; i++) {
            const char* data = i < n ? (const char*)ahead[i].data : nullptr;
            ends[i].store(data, std::memory_order_relaxed);
            at[i].store(data, std::memory_order_relaxed);
            ends[i].store(i < n ? data + ahead[i].bytes : nullptr, std::memory_order_relaxed);
        }
    }

    // Ask for the next piece, into an L2 cache; false if there is none.
    bool prefetch_piece() {
        for (int i = 0; i < MOST_RANGES; i++) {
            if (at[i].load(std::memory_order_relaxed) >= ends[i].load(std::memory_order_relaxed)) continue;
            const char* piece = at[i].fetch_add(PIECE, std::memory_order_relaxed);
            for (int64_t line = 0; line < PIECE; line += 64) __builtin_prefetch(piece + line, 0, 2);
            return true;
        }
        return false;
    }

  private:
    static constexpr int64_t PIECE = 1024;
    std::atomic<const char*> at[MOST_RANGES]{}, ends[MOST_RANGES]{};
};

class Pool {
  public:
    Prefetcher prefetcher;

    void run(Body body, const void* data, int64_t n_items, int64_t chunk, int n_threads) {
        const int64_t n_chunks = (n_items + chunk - 1) / chunk;
        const bool alone = n_threads <= 1 || n_chunks <= 1 || n_chunks > (int64_t)COUNT;
        // A loop inside a loop, or of another thread meanwhile, runs where it is.
        if (alone || taken.exchange(true, std::memory_order_acquire)) return body(data, 0, n_items);
        const int64_t begun = now_ns();
        if (begun < alone_until) {
            body(data, 0, n_items);
        } else {
            start_workers(n_threads - 1);
            open(begun, body, data, n_items, chunk, n_chunks, n_threads - 1);
            const int64_t n_own = work(0);
            finish(begun, n_own);
        }
        taken.store(false, std::memory_order_release);
    }

  private:
    static constexpr uint64_t COUNT = 0xffffffff;

    // Nobody can claim a chunk of the last loop any more, so its description may be overwritten.
    void open(
        int64_t begun, Body new_body, const void* new_data, int64_t items, int64_t size, int64_t n_chunks,
        int workers) {
        body.store(new_body, std::memory_order_release);
        data.store(new_data, std::memory_order_release);
        n_items.store(items, std::memory_order_release);
        chunk.store(size, std::memory_order_release);
        most_workers.store(workers, std::memory_order_release);
        pending.store((uint32_t)n_chunks, std::memory_order_release);
        n_chunks_in_all.store(n_chunks, std::memory_order_release);
        const uint64_t loop = (tickets.load(std::memory_order_relaxed) >> 32) + 1;
        tickets.store(loop << 32 | (uint64_t)n_chunks, std::memory_order_release);
        // Whoever sleeps again so soon after a call has no core, or found nothing: a call costs a system call.
        if (work_posted.notify(begun - called > CALL_EVERY_NS)) called = begun;
    }

    // Claim and run chunks until none is left; returns how many. index: 0 the caller, 1 .. the workers.
    int64_t work(int index) {
        int64_t n_done = 0;
        for (;;) {
            uint64_t ticket = tickets.load(std::memory_order_acquire);
            if ((ticket & COUNT) == 0) return n_done;
            if (index > most_workers.load(std::memory_order_relaxed)) return n_done;
            const Body f = body.load(std::memory_order_acquire);
            const void* of = data.load(std::memory_order_acquire);
            const int64_t size = chunk.load(std::memory_order_acquire), items = n_items.load(std::memory_order_acquire);
            const int64_t all = n_chunks_in_all.load(std::memory_order_acquire);
            // What was read belongs to this loop if its ticket still stands: the description changes only after the
            // count reached 0, and the number of the loop then.
            if (!tickets.compare_exchange_strong(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
            const int64_t first = (all - (int64_t)(ticket & COUNT)) * size;
            f(of, first, first + size < items ? first + size : items);
            n_done++;
            if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1 && index > 0) all_done.notify();
        }
    }

    // Wait for the chunks that workers have begun.
    void finish(int64_t begun, int64_t n_own) {
        if (pending.load(std::memory_order_acquire) == 0) return;
        const int64_t waiting = now_ns(), own_ns = n_own > 0 ? (waiting - begun) / n_own : 0;
        int64_t now = waiting;
        while (pending.load(std::memory_order_acquire) != 0) {
            if (now - waiting > CALLER_SPIN_NS) {
                const uint32_t seen = all_done.value();
                if (pending.load(std::memory_order_acquire) != 0) all_done.wait(seen);
            } else {
                pass();
            }
            now = now_ns();
        }
        const int64_t lost = now - waiting;
        if (lost > STALL_NS && lost > STALL_CHUNKS * own_ns) work_alone(now, lost);
    }

    void work_alone(int64_t now, int64_t lost) {
        const bool relapse = now - lost - alone_until < RELAPSE_TIMES * lost;
        alone_ns = relapse && 2 * alone_ns > ALONE_TIMES * lost ? 2 * alone_ns : ALONE_TIMES * lost;
        if (alone_ns > MOST_ALONE_NS) alone_ns = MOST_ALONE_NS;
        alone_until = now + alone_ns;
    }

    // A moment of waiting; true if it was of use.
    bool pass() {
        if (prefetcher.prefetch_piece()) return true;
        for (int i = 0; i < 8; i++) relax();
        return false;
    }

    // Runs chunks while there are any; true if one was found within SPIN_NS of the last useful moment and the core was
    // not taken away.
    bool spin(int index) {
        int64_t start = now_ns(), before = start;
        for (;;) {
            if (work(index) > 0) return true;
            const bool useful = pass();
            const int64_t now = now_ns();
            if (useful) start = now;
            if (now - start > SPIN_NS || now - before > LOST_CORE_NS) return false;
            before = now;
        }
    }

    void serve(int index) {
        for (;;) {
            const uint32_t seen = work_posted.value();
            if (!spin(index)) work_posted.wait(seen);
        }
    }

    // Threads that are not there yet; a forked child has none of its parent's.
    void start_workers(int n) {
#if defined(__unix__) || defined(__APPLE__)
        const int64_t process = getpid();
        if (process != owner) n_workers = 0, owner = process;
#endif
        for (; n_workers < n && n_workers < MOST_WORKERS; n_workers++) {
            const int index = n_workers + 1;
            start(index);
        }
    }

    // A thread that takes no signals: those are the program's.
    void start(int index) {
#if defined(__unix__) || defined(__APPLE__)
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
        std::thread([this, index] { serve(index); }).detach();
#if defined(__unix__) || defined(__APPLE__)
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    }

    alignas(64) std::atomic<uint64_t> tickets{0};  // number of the loop, chunks not yet claimed
    alignas(64) std::atomic<uint32_t> pending{0};  // chunks not yet done
    alignas(64) std::atomic<Body> body{nullptr};
    std::atomic<const void*> data{nullptr};
    std::atomic<int64_t> n_items{0}, chunk{1}, n_chunks_in_all{0};
    std::atomic<int> most_workers{0};
    alignas(64) EventCount work_posted;
    alignas(64) EventCount all_done;
    std::atomic<bool> taken{false};
    int n_workers = 0;
    int64_t owner = 0, alone_until = 0, alone_ns = 0, called = 0;
};

// Never destroyed: its threads may still look at it when the process ends.
Pool& pool() {
    static Pool* the_pool = new Pool;
    return *the_pool;
}

}  // namespace

void announce_prefetch(const PrefetchRange* ahead, int n) { pool().prefetcher.set(ahead, n); }

}  // namespace quire

void quire_parallel(QuireBody body, const void* data, int64_t n_items, int64_t chunk, int n_threads) {
    quire::pool().run(body, data, n_items, chunk, n_threads);
}
