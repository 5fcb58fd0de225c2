"""Repetition, presence and frequency penalties, computed from the device token table in every step.

Invariant: nothing is remembered between steps, so nothing can go stale; entries of the table at or after the
sampled position are never used.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.transfer import upload

ROWS_AT_ONCE = 32
"""Bounds the count table to 32 x width integers."""


def apply(
    logits: torch.Tensor,
    rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    prompt_lens: np.ndarray,
    strengths: np.ndarray,
    tokens: torch.Tensor,
) -> None:
    """Change `logits` [m, width] in place at `rows` int64 [e].

    For a token in prompt or output: x / repetition if x > 0 else x * repetition (Keskar et al. 2019). Then, for a
    token in the output: x - frequency * count - presence. strengths: float32 [3, e]: repetition, frequency, presence.
    """
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        spans = np.stack([rows[part], slots[part], positions[part], prompt_lens[part]])
        _apply(logits, spans, strengths[:, part], tokens)


def _apply(logits: torch.Tensor, spans: np.ndarray, strengths: np.ndarray, tokens: torch.Tensor) -> None:
    longest = int(spans[2].max(initial=0))
    if longest == 0:
        return
    rows, slots, positions, prompt_lens = upload(spans, logits.device)[:, :, None]
    repetition, frequency, presence = upload(strengths, logits.device)[:, :, None]
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
