"""The variants that are measured and explained by name, with example parameters of a sensible size.

Names are those of quire/kernels/attention/variant/variants.py, and `window` for its causal with a window.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.bench.kernels.paged import Batch
from quire.kernels.attention.schedule.plan import Heads
from quire.kernels.attention.variant import Variant, variants

CAP, SIGMOID_BIAS = 30.0, -7.0
N_FIRST = 4

Maker = Callable[[Batch, torch.device], Variant]
"""(batch that it is for, device of its parameters) → variant."""


def _scale(heads: Heads) -> float:
    return float(heads.head_dim**-0.5)


def _causal(batch: Batch, device: torch.device) -> Variant:
    return variants.causal(_scale(batch.heads))


def _soft_cap(batch: Batch, device: torch.device) -> Variant:
    return variants.soft_cap(_scale(batch.heads), CAP)


def _window(batch: Batch, device: torch.device) -> Variant:
    """A quarter of the longest sequence, and the first positions."""
    return variants.causal(_scale(batch.heads), window=max(1, batch.longest // 4), n_first=N_FIRST)


def _sinks(batch: Batch, device: torch.device) -> Variant:
    return variants.learned_sinks(_scale(batch.heads), torch.randn(batch.heads.n_q_heads, device=device))


def _sigmoid(batch: Batch, device: torch.device) -> Variant:
    return variants.sigmoid_attention(_scale(batch.heads), SIGMOID_BIAS)


def _alibi(batch: Batch, device: torch.device) -> Variant:
    n = batch.heads.n_q_heads
    slopes = torch.exp2(-8.0 * torch.arange(1, n + 1, dtype=torch.float32) / n)
    return variants.alibi(_scale(batch.heads), slopes.to(device))


def _mask(batch: Batch, device: torch.device) -> Variant:
    """Any mask: here three keys of four, at random."""
    return variants.custom_mask(_scale(batch.heads), torch.rand(batch.n_rows, batch.longest, device=device) < 0.75)


def _tree(batch: Batch, device: torch.device) -> Variant:
    """The new rows of each sequence are drafts in a binary tree: the parent of draft i is draft (i - 1) / 2."""
    width = max(1, int(batch.lengths.max()))
    above = np.eye(width, dtype=bool)
    for draft in range(1, width):
        above[draft] |= above[(draft - 1) // 2]
    rows = np.concatenate([above[:length] for length in batch.lengths])
    starts = np.repeat(batch.kv_lens - batch.lengths, batch.lengths).astype(np.int32)
    ancestors = torch.from_numpy(rows).to(device)
    return variants.tree_mask(_scale(batch.heads), ancestors, torch.from_numpy(starts).to(device))


def _rotary(batch: Batch, device: torch.device) -> Variant:
    head_dim = batch.heads.head_dim
    angles = torch.arange(batch.longest)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return variants.rotary(_scale(batch.heads), torch.cat((angles.cos(), angles.sin()), dim=-1).to(device))


NAMED: dict[str, Maker] = {
    "causal": _causal,
    "window": _window,
    "soft_cap": _soft_cap,
    "alibi": _alibi,
    "learned_sinks": _sinks,
    "sigmoid_attention": _sigmoid,
    "custom_mask": _mask,
    "tree_mask": _tree,
    "rotary": _rotary,
}
"""Name → its maker."""

SHORT = {"sinks": "learned_sinks", "sigmoid": "sigmoid_attention", "mask": "custom_mask"}
"""Other names for some, as the names of cases have them."""


def example(name: str, batch: Batch, device: torch.device) -> Variant:
    """A variant by its name or short name. KeyError for another."""
    return NAMED[SHORT.get(name, name)](batch, device)
