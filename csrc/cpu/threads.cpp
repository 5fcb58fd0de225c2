// What each shared library has of its own: the way to the pool, which header it was built with, what it asks for.
#include "threads.h"

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace quire {

QuireParallel run_parallel = nullptr;

}  // namespace quire

void quire_use_pool(QuireParallel pool) { quire::run_parallel = pool; }

#ifndef QUIRE_INTERFACE
#define QUIRE_INTERFACE 0
#endif

int64_t quire_interface() { return QUIRE_INTERFACE; }

// Linux gives tile registers, 8 KB of state a thread, to processes that ask (Documentation/arch/x86/xstate.rst).
int64_t quire_enable() {
#if defined(__AMX_TILE__)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : errno;
#else
    return 0;
#endif
}
