"""Shared prefixes: spans whose first keys lie in the same pages attend to them together, so these are read once.

Owns the decision whether that pays, and the gathered tiles (composable formats: FlashInfer, Ye et al. 2025, section
3.1.2). The spans' own tiles then begin behind the prefix.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.attention.schedule.pieces import (
    BEGIN,
    END,
    FIELDS,
    GATHERED,
    KV_AT,
    LARGE_ROWS,
    N_TOKENS,
    PARTIAL,
    POSITION,
    ROW,
    repeat,
)
from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.schedule.stream import MERGE_COST, TILE_COST

STEP = 128
"""Prefixes are shared up to a multiple of this, so that own tiles begin at whole blocks."""
ROW_COST = 4
"""Keys; a packed row's two more partial results, written and read."""


def choose(plan: AttnPlan, spans: np.ndarray, small_rows: int, n_ctas: int) -> list[tuple[np.ndarray, int]]:
    """(spans with rows, shared keys) of each prefix that is worth sharing. spans: int32 [n_spans, 12], whole spans."""
    if not plan.shared or plan.batch_invariant or plan.window or plan.layout is Layout.SPARSE:
        return []
    group, gains, chosen = plan.heads.group, 0, []
    for shared in plan.shared:
        members = np.asarray(shared.spans, np.int64)
        members = members[spans[members, N_TOKENS] > 0]
        n_keys = shared.n_keys // STEP * STEP
        n_rows = spans[members, N_TOKENS].astype(np.int64) * group
        n_own = int(_n_lines(n_rows, group, small_rows).sum())
        n_lines = int(_n_lines(n_rows.sum(), group, small_rows))
        n_splits = -(-n_ctas // plan.heads.n_kv_heads)
        gain = (n_own - n_lines) * n_keys - ROW_COST * int(n_rows.sum()) - TILE_COST * (n_lines + n_splits)
        if gain > 0:
            chosen.append((members, n_keys))
            gains += gain
    return chosen if gains * plan.heads.n_kv_heads > MERGE_COST * n_ctas else []


def gather(
    plan: AttnPlan, spans: np.ndarray, groups: list[tuple[np.ndarray, int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(rows [n, 2], a gathered tile for each group, bool [n_spans]: in a group); moves the begin of spans in place."""
    if not groups:
        return np.zeros((0, 2), np.int32), np.zeros((0, FIELDS), np.int32), None
    joined = np.zeros(len(spans), bool)
    tiles = np.zeros((len(groups), FIELDS), np.int32)
    rows, at = [], 0
    for tile, (members, n_keys) in zip(tiles, groups, strict=True):
        joined[members] = True
        spans[members, BEGIN] = n_keys
        owner, index = repeat(spans[members, N_TOKENS])
        rows.append(spans[members][owner][:, (ROW, POSITION)] + index[:, None])
        first = spans[members[0]]
        tile[[ROW, N_TOKENS, END, KV_AT]] = at, len(owner), n_keys, first[KV_AT]
        tile[[POSITION, PARTIAL, GATHERED]] = first[POSITION], -1, 1
        at += len(owner)
    return np.concatenate(rows).astype(np.int32), tiles, joined


def _n_lines(n_rows: np.ndarray, group: int, small_rows: int) -> np.ndarray:
    return np.where(n_rows <= small_rows, 1, -(-n_rows // (LARGE_ROWS // group * group)))
