// A counter of events that threads can wait on (an eventcount): notify costs a system call only while somebody waits.
//
// value() first, then look for what one waits for, then wait(what value() said): a notify in between is not missed.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace quire {

class EventCount {
  public:
    uint32_t value() const { return count.load(); }

    // Those who wait are woken only if `wakes`; true if some were.
    bool notify(bool wakes = true) {
        count.fetch_add(1);
        if (!wakes || n_waiting.load() == 0) return false;
        futex_wake();
        return true;
    }

    // Returns once somebody has notified since value() gave `seen`, or earlier.
    void wait(uint32_t seen) {
        n_waiting.fetch_add(1);
        futex_wait(seen);
        n_waiting.fetch_sub(1);
    }

  private:
#if defined(__linux__)
    void futex_wake() { syscall(SYS_futex, &count, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
    void futex_wait(uint32_t seen) { syscall(SYS_futex, &count, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
#else
    void futex_wake() {
        { const std::lock_guard<std::mutex> lock(mutex); }
        changed.notify_all();
    }
    void futex_wait(uint32_t seen) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return count.load() != seen; });
    }
    std::mutex mutex;
    std::condition_variable changed;
#endif

    std::atomic<uint32_t> count{0}, n_waiting{0};
};

}  // namespace quire
