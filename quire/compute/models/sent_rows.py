"""Models whose experts are divided among ranks that have other rows: who is told, and what is computed for others.

Owns neither what is sent (`compute/dist/exchange`) nor what experts compute (`layers/experts`).
"""

from __future__ import annotations

import torch

from quire.compute.dist.exchange import Exchange
from quire.compute.layers.experts import experts_of
from quire.compute.models.decoder import Decoder


def send_rows(model: Decoder, exchange: Exchange) -> None:
    """Have rows go to experts of other ranks; before there is a forward strategy."""
    for experts in experts_of(model.layers):
        experts.exchange = exchange


def exchange_of(model: Decoder) -> Exchange | None:
    """Through which rows go; None: all experts are here, or with ranks that have the same rows."""
    return next((experts.exchange for experts in experts_of(model.layers)), None)


def sent_of(model: Decoder) -> tuple[int, int, int]:
    """(bytes of a row, experts that it chooses, experts that a rank holds), as `Exchange.may_be_common` is asked."""
    spec = experts_of(model.layers)[0].spec
    return model.arch.hidden_size * model.dtype.itemsize, spec.routing.n_chosen, spec.n_held


def compute_for_others(model: Decoder) -> None:
    """What experts here make of the rows of other ranks, in a step of which this one has none."""
    no_rows = torch.empty(0, model.arch.hidden_size, dtype=model.dtype, device=model.device)
    for experts in experts_of(model.layers):
        experts.join(no_rows)
