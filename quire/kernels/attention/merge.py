"""Joining attention states: the answers over disjoint sets of keys become the answer over all of them.

Owns the public `merge`. Does not own the merge of split tiles, which the kernels do themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.selector import select


def merge(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state over the union of the key sets of several states.

    outs: states' outputs [n, n_heads, head_dim], a sequence or stacked in front. lses: natural logarithms of their
    sums of weights, float32 [n, n_heads]; a state with lse -inf saw nothing and weighs nothing, whatever its output
    holds. Returns out in the outputs' dtype, accumulated in float32 (float64 for float64), and lse; where no state saw
    anything they are 0 and -inf. Softmax variants without an output transform only. Raises ValueError on a mismatch.
    Source: Ye et al. 2025 (FlashInfer), section 2.2; Milakov & Gimelshein 2018, section 3.1.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outs and {len(lses)} lses: give one state or more, an lse for each out")
    o = outs if isinstance(outs, torch.Tensor) else torch.stack(list(outs))
    s = lses if isinstance(lses, torch.Tensor) else torch.stack(list(lses))
    if o.dim() != 4 or s.shape != o.shape[:3] or not s.dtype.is_floating_point:
        raise ValueError(
            f"outs {tuple(o.shape)} and lses {tuple(s.shape)} {s.dtype} must be [n_states, n, n_heads, head_dim] and "
            "float32 [n_states, n, n_heads]"
        )
    out, lse = select("attention", "merge", o, s)(o, s)
    return out, lse
