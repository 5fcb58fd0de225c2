"""The largest logits of each row, in an order that depends on the row alone.

`torch.topk` leaves open which of several equal logits it takes and in what order; its answer changes with k, and so
with what neighbours ask for. Logits rounded to bfloat16 have many equal ones. Here the lower token id comes first.
"""

from __future__ import annotations

import math

import torch


def top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [r, k] and token ids int64 [r, k] of the k largest of `logits` float32 [r, width], k <= width.

    Larger values first, lower ids first among equal ones; NaN counts as the largest. The host waits for nothing. A row
    is cut into blocks; the k best blocks, by their largest value and then by their place, hold its k best logits:
    every other block has k blocks before it, each with a logit that goes before all of its own.
    """
    n_rows, width = logits.shape
    if k == 0:
        return logits.new_empty((n_rows, 0)), torch.empty((n_rows, 0), dtype=torch.int64, device=logits.device)
    size = 1 << max(3, round(math.log2(width / k) / 2))  # as many blocks as logits in the k best of them
    whole = width - width % size
    parts = [logits[:, :whole].unflatten(1, (-1, size)).amax(-1)] if whole else []  # type: ignore[no-untyped-call]
    parts += [logits[:, whole:].amax(-1, keepdim=True)] if whole < width else []
    blocks = _largest(torch.cat(parts, 1), min(k, -(-width // size))).sort(-1).values
    ids = (blocks[:, :, None] * size + torch.arange(size, device=logits.device)).flatten(1)
    found = logits.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, -torch.inf)
    places = _largest(found, k)
    return found.gather(1, places), ids.gather(1, places)


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest of each row stand, int64 [r, k], of equal ones the first: no two keys are equal.

    A key is a float's bits as an integer of the same order, and below them how far from the end it stands.
    """
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    keys = ((bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32) - torch.arange(values.shape[1], device=values.device)
    return keys.topk(k, dim=-1).indices
