"""Sampling in plain torch, float64, one row at a time: the oracle."""

from __future__ import annotations

import collections

import numpy as np
import torch

from quire.kernels.sample.cells import pack
from quire.kernels.sample.draw import DROP, EMPTY, FINE, INVERSE, NON_FINITE, TOP_K, TOP_P, UNIFORM, Choice, TokenMasks

TOLERANCE = 2e-6
"""An implementation may differ only where `uniform` is this near to a step of the float64 cumulative distribution."""


def choose_by(
    logits: torch.Tensor, controls: torch.Tensor, out: Choice, masks: TokenMasks | None = None, _truncates: bool = True
) -> None:
    """See `op.choose_by`. logits: [m, width] of any float type, on any device."""
    if masks is not None:
        for row, line in enumerate(masks.lines.tolist()):
            for column in range(logits.shape[1] if line >= 0 else 0):
                word = int(masks.bits[line, column // 32]) if column // 32 < masks.bits.shape[1] else 0
                if not word >> column % 32 & 1:
                    logits[row, column] -= torch.inf
    token_ids, statuses = [], []
    for row, control in zip(logits.detach().cpu().double(), controls.cpu().numpy().T, strict=True):
        status = _status(row)
        statuses.append(status)
        if status != FINE:
            token_ids.append(0)
        elif control[INVERSE] == 0:
            token_ids.append(int((row == row.max()).nonzero()[0]))
        else:
            token_ids.append(_first_above(distribution(row, control), float(control[UNIFORM])))
    out.token_ids.copy_(torch.tensor(token_ids))
    out.status.copy_(torch.tensor(statuses))


def distribution(row: torch.Tensor, control: np.ndarray) -> torch.Tensor:
    """float64 [width]: probabilities of a random row after temperature, min_p, top_k and top_p.

    control: float64 [N_CONTROLS], the row's column of `Draw.controls`.
    """
    row, k, top_p = row.double(), int(control[TOP_K]), float(control[TOP_P])
    weights = ((row - row.max()) * float(control[INVERSE])).exp()
    weights[row < row.max() + float(control[DROP])] = 0
    if 0 < k < len(row):
        weights[row < row.sort(descending=True).values[k - 1]] = 0
    if top_p < 1:
        order = row.argsort(descending=True)
        larger = torch.searchsorted(-row[order].contiguous(), -row.contiguous())  # how many logits are strictly larger
        above = torch.cat([torch.zeros(1, dtype=torch.float64), weights[order].cumsum(0)])[larger]
        weights[above >= top_p * weights.sum()] = 0
    return weights / weights.sum()


def _status(row: torch.Tensor) -> int:
    if bool(row.isnan().any()) or bool((row == torch.inf).any()):
        return NON_FINITE
    return EMPTY if bool((row == -torch.inf).all()) else FINE


def _first_above(probabilities: torch.Tensor, uniform: float) -> int:
    above = (probabilities.cumsum(0) > uniform).nonzero()
    return int(above[0]) if len(above) else int(probabilities.nonzero()[-1])


def penalise(logits: torch.Tensor, histories: torch.Tensor, tokens: torch.Tensor, longest: int) -> None:
    """See `op.penalise`."""
    assert not histories.numel() or int(histories[2].max()) <= longest
    for numbers, (repetition, frequency, presence) in zip(histories.T[:, :4], histories.T[:, 4:].tolist(), strict=True):
        row, slot, position, prompt_len = numbers.long().tolist()
        ids = tokens[slot, :position].tolist()
        counts = collections.Counter(ids[prompt_len:])
        for token in set(ids):
            x = float(logits[row, token])
            x = x / repetition if x > 0 else x * repetition
            logits[row, token] = x - frequency * counts[token] - presence * (counts[token] > 0)


def widen(logits: torch.Tensor, out: torch.Tensor) -> None:
    """See `op.widen`."""
    out.copy_(logits)


def lines(logits: torch.Tensor, targets: torch.Tensor, k: int) -> torch.Tensor:
    """See `op.lines`."""
    logprobs = logits.double().log_softmax(-1)
    targets = targets.long()[:, None]
    chosen = logits.gather(1, targets)
    ids = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ranks = (logits > chosen).sum(-1) + 1
    return pack(logprobs.gather(1, targets)[:, 0], ranks, ids, logprobs.gather(1, ids))
