// Several linear layers in one call.
#pragma once
#include "quire_cpu.h"

namespace quire {

// Products of matrices of one format and size, with equal `then` and types, each with at least one row of its own. The
// list is reordered.
void run_linears(QuireLinear* all, int64_t n);

}  // namespace quire
