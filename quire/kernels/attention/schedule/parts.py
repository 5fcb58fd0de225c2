"""Where lines write partial results, and which of them make up each token.

Invariant: the parts of a token stand in the order of keys, so that a merge adds in an order that the plan alone fixes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kernels.attention.schedule.pieces import GATHERED, KV_HEAD, N_TOKENS, PARTIAL, ROW, Pieces, repeat
from quire.kernels.attention.schedule.plan import AttnPlan


def join(plan: AttnPlan, small: Pieces, large: Pieces, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(merges int32 [n, 4], parts int32 [n], partial rows); sets `partial` of the lines in place.

    Every token of every KV head that has partial results gets an id. The ids of a tile's tokens follow one another in
    the order of its partial rows: token by token, one KV head after another.
    """
    n_partial, n_ids = 0, 0
    own, gathered, tables = [], [], []
    for kind in (small, large):
        if not len(kind.partial):
            continue
        lines = kind.lines[kind.partial]
        n_rows = lines[:, N_TOKENS] * kind.n_heads
        first = np.cumsum(n_rows) - n_rows
        lines[:, PARTIAL] = n_partial + first * plan.heads.group
        kind.lines[kind.partial, PARTIAL] = lines[:, PARTIAL]
        n_partial += int(n_rows.sum()) * plan.heads.group
        leads = kind.leads.nonzero()[0]
        tile = np.cumsum(kind.leads) - 1
        piece = np.arange(len(lines)) - leads[tile]
        mine = lines[:, GATHERED] == 0
        if not mine.all():
            gathered.append((lines[~mine], piece[~mine], kind.n_heads))
            lines, piece, n_rows = lines[mine], piece[mine], n_rows[mine]
            lead = piece == 0
            leads, tile = lead.nonzero()[0], np.cumsum(lead) - 1
        n_new = n_rows[leads]
        ids = n_ids + (np.cumsum(n_new) - n_new)[tile]
        line, index = repeat(n_rows)
        row, head = _rows_heads(lines, line, index)
        own.append((ids[line] + index, piece[line], lines[line, PARTIAL] + index * plan.heads.group))
        lead = piece[line] == 0
        tables.append(np.stack((row[lead], head[lead]), axis=1))
        n_ids += int(n_new.sum())
    if not own:
        return np.zeros((0, 4), np.int32), np.zeros(0, np.int32), 0
    rows_heads = np.concatenate(tables)
    before = [_gathered_parts(*some, rows, rows_heads, plan) for some in gathered]
    return (*_table(rows_heads, own, before), n_partial)


def _rows_heads(lines: np.ndarray, line: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row (of q, or line of the gathered rows) and KV head of the index-th token and head of each line."""
    head, token = np.divmod(index, lines[line, N_TOKENS])
    return lines[line, ROW] + token, lines[line, KV_HEAD] + head


def _gathered_parts(
    lines: np.ndarray, piece: np.ndarray, n_heads: int, rows: np.ndarray, ids: np.ndarray, plan: AttnPlan
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(id, index of the piece, packed row) of each token and KV head of gathered lines. ids: row and head of each."""
    n_kv_heads = plan.heads.n_kv_heads
    id_of = np.zeros(plan.n_rows * n_kv_heads, np.int64)
    id_of[ids[:, 0] * n_kv_heads + ids[:, 1]] = np.arange(len(ids))
    line, index = repeat(lines[:, N_TOKENS] * n_heads)
    at, head = _rows_heads(lines, line, index)
    return id_of[rows[at, 0] * n_kv_heads + head], piece[line], lines[line, PARTIAL] + index * plan.heads.group


def _table(
    tokens: np.ndarray, own: Sequence[tuple[np.ndarray, ...]], before: Sequence[tuple[np.ndarray, ...]]
) -> tuple[np.ndarray, np.ndarray]:
    """Merges and parts; parts `before` come first."""
    n_before = np.zeros(len(tokens), np.int64)
    for ids, _, _ in before:
        n_before += np.bincount(ids, minlength=len(tokens))
    count = n_before.copy()
    for ids, _, _ in own:
        count += np.bincount(ids, minlength=len(tokens))
    ends = np.cumsum(count)
    at = ends - count
    parts = np.empty(int(ends[-1]), np.int32)
    for ids, piece, packed in before:
        parts[at[ids] + piece] = packed
    for ids, piece, packed in own:
        parts[(at + n_before)[ids] + piece] = packed
    merges = np.empty((len(tokens), 4), np.int32)
    merges[:, :2] = tokens
    merges[:, 2] = at
    merges[:, 3] = count
    return merges, parts
