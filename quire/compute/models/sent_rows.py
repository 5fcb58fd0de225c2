"""Models whose experts are divided among ranks that have other rows: who is told, and what is computed for others.

Owns neither what is sent (`compute/dist/exchange`) nor what experts compute (`layers/experts`).
"""

from __future__ import annotations

import torch

from quire.compute.dist.exchange import Exchange
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder


def experts_of(model: Decoder) -> list[Experts]:
    """Of each layer that has any."""
    return [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]


def send_rows(model: Decoder, exchange: Exchange) -> None:
    """Have rows go to experts of other ranks; before there is a forward strategy."""
    for experts in experts_of(model):
        experts.exchange = exchange


def exchange_of(model: Decoder) -> Exchange | None:
    """Through which rows go; None: all experts are here, or with ranks that have the same rows."""
    return next((experts.exchange for experts in experts_of(model)), None)


def compute_for_others(model: Decoder) -> None:
    """What experts here make of the rows of other ranks, in a step of which this one has none."""
    no_rows = torch.empty(0, model.arch.hidden_size, dtype=model.dtype, device=model.device)
    for experts in experts_of(model):
        experts.join(no_rows)
