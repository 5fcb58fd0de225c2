// The way to the pool: one pointer in each shared library.
#include "threads.h"

namespace quire {

QuireParallel run_parallel = nullptr;

}  // namespace quire

void quire_use_pool(QuireParallel pool) { quire::run_parallel = pool; }
