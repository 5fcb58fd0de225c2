"""Sampling in plain torch, float64, one row at a time: the oracle."""

from __future__ import annotations

import math

import torch

from quire.kernels.sample.draw import EMPTY, FINE, NON_FINITE, Choice, Draw

TOLERANCE = 2e-6
"""An implementation may differ only where `uniform` is this near to a step of the float64 cumulative distribution."""


def choose(logits: torch.Tensor, draw: Draw) -> Choice:
    """See `op.choose`. logits: [m, width] of any float type, on any device."""
    token_ids, statuses = [], []
    for i, row in enumerate(logits.detach().cpu().double()):
        status = _status(row)
        statuses.append(status)
        if status != FINE:
            token_ids.append(0)
        elif not draw.random[i]:
            token_ids.append(int((row == row.max()).nonzero()[0]))
        else:
            token_ids.append(_first_above(distribution(row, draw, i), float(draw.uniform[i])))
    to_device = {"device": logits.device}
    return Choice(
        torch.tensor(token_ids, dtype=torch.int32, **to_device), torch.tensor(statuses, dtype=torch.uint8, **to_device)
    )


def distribution(row: torch.Tensor, draw: Draw, i: int) -> torch.Tensor:
    """float64 [width]: probabilities of the random row i after temperature, min_p, top_k and top_p."""
    weights = ((row.double() - row.max()) / float(draw.temperature[i])).exp()
    if draw.min_p[i] > 0:
        weights[row < row.max() + float(draw.temperature[i]) * math.log(draw.min_p[i])] = 0
    if 0 < draw.top_k[i] < len(row):
        weights[row < row.sort(descending=True).values[int(draw.top_k[i]) - 1]] = 0
    if draw.top_p[i] < 1:
        order = row.argsort(descending=True)
        larger = torch.searchsorted(-row[order].contiguous(), -row.contiguous())  # how many logits are strictly larger
        above = torch.cat([torch.zeros(1, dtype=torch.float64), weights[order].cumsum(0)])[larger]
        weights[above >= float(draw.top_p[i]) * weights.sum()] = 0
    return weights / weights.sum()


def _status(row: torch.Tensor) -> int:
    if bool(row.isnan().any()) or bool((row == torch.inf).any()):
        return NON_FINITE
    return EMPTY if bool((row == -torch.inf).all()) else FINE


def _first_above(probabilities: torch.Tensor, uniform: float) -> int:
    above = (probabilities.cumsum(0) > uniform).nonzero()
    return int(above[0]) if len(above) else int(probabilities.nonzero()[-1])
