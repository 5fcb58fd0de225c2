"""Plans with trees (`schedule.plan.Trees`): what is refused, and how kernels that know nothing of them run one.

Owns the checks and the mask. A kernel that takes trees gives each row a list of keys of its own (csrc/cpu/keys.h); the
others see a variant whose mask hides what is not on a row's path. For them keys of nodes lie at other positions than
their tokens', so there are no windows, and no hook may ask for a position.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch

from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.variant import Params, Site, Variant
from quire.kernels.attention.variant.expression import Expr, Operand, maximum, minimum

MAX_NODES: Final = 64
"""Of a tree, the root not counted: the bits of a path."""
TRANSFORMS: Final = {"query_transform", "key_transform", "value_transform"}
POSITIONS: Final = {"q_pos", "k_pos"}


def obstacle(variant: Variant, device: torch.device) -> str:
    """Why rows of a tree cannot be computed by this variant on this device; empty: they can."""
    transforms = TRANSFORMS & variant.program.hooks.keys()
    if transforms:
        return f"its attention has {', '.join(sorted(transforms))}"
    if device.type == "cpu":
        return ""
    if variant.window:
        return f"its attention has a window of {variant.window} keys, and the device is {device.type}"
    nodes = (node for hook in variant.program.hooks.values() for node in hook.walk())
    if any(node.op == "site" and node.name in POSITIONS for node in nodes):
        return f"its attention depends on positions, and the device is {device.type}"
    return ""


def check(plan: AttnPlan) -> None:
    """Raises ValueError on a mismatch."""
    trees = plan.spans.trees
    if trees is None:
        return
    if plan.layout is not Layout.PAGED or not plan.causal or plan.batch_invariant:
        raise ValueError("trees are for causal attention over pages, not for lists of blocks nor rows alone")
    n_rows, n_spans = plan.n_rows, len(plan.spans.kv_lens)
    for array, dtype, n in ((trees.paths, np.uint64, n_rows), (trees.firsts, np.int32, n_spans)):
        if array.dtype != dtype or array.shape != (n,):
            raise ValueError(f"trees need {np.dtype(dtype)} [{n}], not {array.dtype} {list(array.shape)}")
    n_nodes = plan.spans.kv_lens - trees.firsts
    wrong = np.flatnonzero((n_nodes < 0) | (n_nodes > MAX_NODES) | ((n_nodes > 0) & (trees.firsts < 1)))
    if len(wrong):
        raise ValueError(f"span {wrong[0]} has {n_nodes[wrong[0]]} nodes: 0 to {MAX_NODES} behind a root are possible")
    of_row = n_nodes[_owners(plan)]
    beyond = trees.paths >> np.minimum(of_row, MAX_NODES - 1).astype(np.uint64)
    if ((beyond != 0) & (of_row < MAX_NODES)).any():
        raise ValueError("a row of a tree has a node that its span has not")


def masked(variant: Variant, plan: AttnPlan, device: torch.device) -> Variant:
    """The variant for a kernel that takes rows of a tree for tokens that follow one another."""
    trees, base = plan.spans.trees, variant.logits_mask
    assert trees is not None
    is_tree = trees.is_tree(plan.spans.kv_lens)[_owners(plan)]
    paths = np.where(is_tree, trees.paths, ~np.uint64(0))
    bits = torch.from_numpy((paths[:, None] >> np.arange(MAX_NODES, dtype=np.uint64) & np.uint64(1)).astype(bool))
    firsts = np.where(is_tree, trees.firsts[_owners(plan)], plan.spans.kv_lens[_owners(plan)]).astype(np.int32)

    def visible(site: Site, p: Params) -> Operand:
        node = site.k_pos - p.tree_firsts[site.q_row]
        column = minimum(maximum(node, 0), MAX_NODES - 1)
        seen: Expr = (node < 0) | p.tree_paths[site.q_row * MAX_NODES + column]
        return seen if base is None else seen & base(site, p)

    tensors = {"tree_paths": bits.to(device), "tree_firsts": torch.from_numpy(firsts).to(device)}
    return dataclasses.replace(variant, logits_mask=visible, params={**variant.params, **tensors})


def _owners(plan: AttnPlan) -> np.ndarray:
    """int64 [n_rows]: the span of each row."""
    return np.repeat(np.arange(len(plan.spans.kv_lens)), plan.spans.lengths)
