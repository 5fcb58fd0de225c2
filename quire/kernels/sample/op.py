"""Public sampling op. Checks shapes and picks the implementation by device."""

from __future__ import annotations

import torch

from quire.kernels import backends
from quire.kernels.sample.draw import Choice, Draw


def choose(logits: torch.Tensor, draw: Draw) -> Choice:
    """One token for each row of `logits`, float32 [m, width] with contiguous rows; nothing waits for the device.

    Greedy rows: the largest logit, the lowest id on ties. Random rows: the first token, in vocabulary order, at which
    the cumulative weight exceeds `uniform` times the total. The weight of a logit x is exp((x - max) / temperature),
    and 0 unless it survives, in this order:
      min_p  weight >= min_p times the largest weight
      top_k  x >= the k-th largest x (ties at the border all stay, as in transformers and vLLM)
      top_p  the weight of strictly larger logits is < top_p of what top_k left (Holtzman et al. 2019; ties at the
             border all stay)
    A row's result does not depend on the other rows, bit for bit. -inf logits are never chosen. Raises ValueError on
    a mismatch of shapes or types.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be float32 [m, width], rows contiguous: {tuple(logits.shape)} {logits.dtype}")
    if len(draw) != logits.shape[0] or logits.shape[1] == 0:
        raise ValueError(f"{len(draw)} draws for logits {tuple(logits.shape)}: one a row, and at least one column")
    return backends.module("sample", logits.device.type).choose(logits, draw)
