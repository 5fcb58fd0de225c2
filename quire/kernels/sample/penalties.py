"""Repetition, presence and frequency penalties in torch, on any device."""

from __future__ import annotations

import torch

ROWS_AT_ONCE = 32
"""Bounds the count table to 32 x width integers."""


def penalise(logits: torch.Tensor, histories: torch.Tensor, tokens: torch.Tensor, longest: int) -> None:
    """See `op.penalise`."""
    for part in histories.split(ROWS_AT_ONCE, 1) if longest else ():  # type: ignore[no-untyped-call]
        _apply(logits, part, tokens, longest)


def widen(logits: torch.Tensor, out: torch.Tensor) -> None:
    """See `op.widen`."""
    out.copy_(logits)


def _apply(logits: torch.Tensor, histories: torch.Tensor, tokens: torch.Tensor, longest: int) -> None:
    rows, slots, positions, prompt_lens = histories[:4, :, None].long()
    repetition, frequency, presence = histories[4:, :, None].float()
    place = torch.arange(longest, device=logits.device)
    history = tokens[:, :longest][slots[:, 0]].long()
    # what lies beyond a row's position stands for its first token, which is in the history anyway
    ids = torch.where(place < positions, history, history[:, :1])
    is_output = (place >= prompt_lens) & (place < positions)
    counts = torch.zeros((len(ids), logits.shape[1]), dtype=torch.int32, device=logits.device)
    n_outputs = counts.scatter_add_(1, ids, is_output.to(torch.int32)).gather(1, ids)
    x = logits[rows, ids]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - frequency * n_outputs - presence * (n_outputs > 0)
    logits[rows, ids] = x  # equal ids of a row carry equal values, so their order does not matter
