// What each shared library has of its own: the way to the pool, and which header it was built with.
#include "threads.h"

namespace quire {

QuireParallel run_parallel = nullptr;

}  // namespace quire

void quire_use_pool(QuireParallel pool) { quire::run_parallel = pool; }

#ifndef QUIRE_INTERFACE
#define QUIRE_INTERFACE 0
#endif

int64_t quire_interface() { return QUIRE_INTERFACE; }
