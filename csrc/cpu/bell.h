// A counter that threads can sleep on: ringing it costs a system call only while somebody sleeps.
//
// look() first, then look for what one waits for, then sleep(what look() said): a ring in between is not missed.
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

class Bell {
  public:
    uint32_t look() const { return rings.load(); }

    // Sleepers are woken only if `loud`; true if some were.
    bool ring(bool loud = true) {
        rings.fetch_add(1);
        if (!loud || n_asleep.load() == 0) return false;
        wake();
        return true;
    }

    // Returns once the bell has been rung since look() gave `seen`, or earlier.
    void sleep(uint32_t seen) {
        n_asleep.fetch_add(1);
        wait(seen);
        n_asleep.fetch_sub(1);
    }

  private:
#if defined(__linux__)
    void wake() { syscall(SYS_futex, &rings, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
    void wait(uint32_t seen) { syscall(SYS_futex, &rings, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
#else
    void wake() {
        { const std::lock_guard<std::mutex> lock(mutex); }
        changed.notify_all();
    }
    void wait(uint32_t seen) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return rings.load() != seen; });
    }
    std::mutex mutex;
    std::condition_variable changed;
#endif

    std::atomic<uint32_t> rings{0}, n_asleep{0};
};

}  // namespace quire
