"""Changes to single logits: bias, allowed ids, banned ids and phrases, end tokens before the minimum length.

Owns their order: allowed ids, then bias and bans (a ban adds -inf). Changes the logits in place, by scatter.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.core.plan import SlotParams
from quire.kernels.transfer import upload


class SlotEdits:
    """One slot's changes as host arrays, made once."""

    def __init__(self, params: SlotParams, logits_width: int) -> None:
        single = [seq[0] for seq in params.bad_token_seqs if len(seq) == 1]
        self.ids = np.array([*params.logit_bias, *single], np.int64)
        self.values = np.array([*params.logit_bias.values(), *[-np.inf] * len(single)], np.float32)
        self.allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self.end_ids = np.array(params.masked_end_ids, np.int64)
        self.phrases = [seq for seq in params.bad_token_seqs if len(seq) > 1]
        self.always = len(self.ids) > 0 or self.allowed is not None or len(self.phrases) > 0
        """Something applies at every position."""
        allowed = [] if self.allowed is None else [self.allowed]
        for ids in [self.ids, self.end_ids, *allowed, *map(np.array, self.phrases)]:
            if len(ids) and (ids.min() < 0 or ids.max() >= logits_width):
                bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
                raise ValueError(f"token id {bad} is outside the {logits_width} logits")


def apply(
    logits: torch.Tensor,
    rows: np.ndarray,
    edits: list[SlotEdits],
    slots: np.ndarray,
    positions: np.ndarray,
    masked: np.ndarray,
    tokens: torch.Tensor,
) -> None:
    """Change `logits` [m, width] in place at the given rows.

    rows, slots, positions: int64 [e]; edits: e of them; masked: bool [e], the end tokens are still masked there.
    """
    _restrict(logits, rows, edits)
    cells = [np.stack([np.full(len(one.ids), row), one.ids]) for row, one in zip(rows, edits, strict=True)]
    values = [one.values for one in edits]
    for i in np.flatnonzero(masked):
        cells.append(np.stack([np.full(len(edits[i].end_ids), rows[i]), edits[i].end_ids]))
        values.append(np.full(len(edits[i].end_ids), -np.inf, np.float32))
    if sum(map(len, values)):
        row, column = upload(np.concatenate(cells, 1), logits.device)
        logits.index_put_((row, column), upload(np.concatenate(values), logits.device), accumulate=True)
    _ban_phrases(logits, rows, edits, slots, positions, tokens)


def _restrict(logits: torch.Tensor, rows: np.ndarray, edits: list[SlotEdits]) -> None:
    """-inf for all but the allowed ids."""
    limited = [(row, one.allowed) for row, one in zip(rows, edits, strict=True) if one.allowed is not None]
    if not limited:
        return
    cells = np.concatenate([np.stack([np.full(len(allowed), row), allowed]) for row, allowed in limited], 1)
    row, column = upload(cells, logits.device)
    kept = logits[row, column]
    logits.index_fill_(0, upload(np.array([row for row, _ in limited]), logits.device), -torch.inf)
    logits[row, column] = kept


def _ban_phrases(
    logits: torch.Tensor,
    rows: np.ndarray,
    edits: list[SlotEdits],
    slots: np.ndarray,
    positions: np.ndarray,
    tokens: torch.Tensor,
) -> None:
    """-inf for the last token of each banned sequence whose other tokens are the newest ones of the row.

    Prefixes are compared on the device, because the newest token may not be known to the host yet:

        token table   ... t[p-3] t[p-2] t[p-1]   (position p is being sampled)
        prefix            -1     a      b        (aligned to the right; -1 fits anything)
    """
    found = [(i, phrase) for i, one in enumerate(edits) for phrase in one.phrases if len(phrase) <= positions[i] + 1]
    if not found:
        return
    longest = max(len(phrase) for _, phrase in found) - 1
    prefixes = np.full((len(found), longest), -1, np.int32)
    for line, (_, phrase) in enumerate(found):
        prefixes[line, longest - len(phrase) + 1 :] = phrase[:-1]
    owner = np.array([i for i, _ in found])
    columns = np.maximum(positions[owner, None] - np.arange(longest, 0, -1), 0)
    where = upload(np.stack([rows[owner], np.array([phrase[-1] for _, phrase in found])]), logits.device)
    table = upload(np.stack([np.broadcast_to(slots[owner, None], columns.shape), columns]), logits.device)
    prefix = upload(prefixes, logits.device)
    fits = ((tokens[table[0], table[1]] == prefix) | (prefix < 0)).all(-1)
    penalty = torch.where(fits, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((where[0], where[1]), penalty, accumulate=True)
