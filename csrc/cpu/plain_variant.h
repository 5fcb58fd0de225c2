// The variant without hooks, and the form of a generated one (quire/kernels/attention/cpu/hooks.py), which is included
// before everything else and defines QUIRE_VARIANT. Hooks that are absent need no function. With lanes over keys:
//   vf logits(vf x, const Site&, vi k_pos, const QuireAttnArgs&)    x = scale * q.k in natural units
//   vi mask(const Site&, vi k_pos, const QuireAttnArgs&)            0 or -1
// and with lanes over the elements `dim` of one head, `partner` as `rotate_half` in expression.py:
//   vf query | key | value(vf x, vf partner, const Site&, vi dim, const QuireAttnArgs&)
//   vf output(vf x, const Site&, vi dim, const QuireAttnArgs&)
#pragma once
#include "functions.h"

namespace quire {

struct Variant {
    static constexpr bool softmax = true;  // false: `logits` gives the weight itself, hidden keys weigh 0
    static constexpr bool has_logits = false, has_mask = false, has_output = false;
    static constexpr bool has_query = false, has_key = false, has_value = false;
    static constexpr bool has_partner = false;  // some hook uses `partner`
};

}  // namespace quire
