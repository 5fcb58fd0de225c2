// The entry point of the thread pool: one in each shared library.
#include "threads.h"

#include "quire_cpu.h"

namespace quire {

Fork fork_threads = nullptr;

}  // namespace quire

void quire_set_fork(void* gomp_parallel) { quire::fork_threads = (quire::Fork)gomp_parallel; }
