"""Log-probabilities of chosen tokens and of the most probable ones, on the device, and their way to the host.

The distribution is the model's own: before penalties, masks, temperature and truncation.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch

from quire.compute.sample.top import top
from quire.core.logprobs import PackedLogprobs, TokenLogprobs

CACHE: Final = 1 << 15
"""Logits worked on at a time on CPU, or one row: torch does not split the sum of so few, so its order is fixed."""


@dataclasses.dataclass(slots=True)
class LogprobTensors:
    """One line for each row that asked; r lines, k = most entries that any of them asked for."""

    rows: np.ndarray
    """int64 [r], host: which row each line belongs to."""
    n_top: np.ndarray
    """int64 [r], host: how many of the k entries the line asked for."""
    chosen: torch.Tensor
    """float32 [r]: natural-log probability of the token that stands there."""
    ranks: torch.Tensor
    """int32 [r]: 1 + the number of tokens that are strictly more probable."""
    top_ids: torch.Tensor
    """int32 [r, k], most probable first, of equally probable ones the lowest id, whatever k is."""
    top_logprobs: torch.Tensor
    """float32 [r, k]."""

    def tensors(self) -> list[torch.Tensor]:
        """The four device tensors, in the order that `token_logprobs` takes them back."""
        return [self.chosen, self.ranks, self.top_ids, self.top_logprobs]


def logprobs(logits: torch.Tensor, targets: torch.Tensor, rows: np.ndarray, n_top: np.ndarray) -> LogprobTensors:
    """Lines for `logits` float32 [r, width] and the tokens `targets` int [r]; nothing waits for the device.

    rows, n_top: host int64 [r], as in `LogprobTensors`.
    """
    n_rows, width = logits.shape
    k = min(int(n_top.max(initial=0)), width)
    n_chunk = max(1, CACHE // width) if logits.device.type == "cpu" else max(1, n_rows)
    parts = [
        _lines(logits[start : start + n_chunk], targets[start : start + n_chunk].long()[:, None], k)
        for start in range(0, max(1, n_rows), n_chunk)
    ]
    return LogprobTensors(rows, np.minimum(n_top, k), *(torch.cat(column) for column in zip(*parts, strict=True)))


def _lines(logits: torch.Tensor, targets: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Chosen, ranks, top ids and top logprobs of a few rows; targets: int64 [r, 1]."""
    chosen = logits.gather(1, targets)
    peaks = logits.amax(-1, keepdim=True)
    # on CUDA the order of the sum depends on the number of rows, which the rounding of float64 hides
    total = (logits - peaks).exp_().sum(-1, keepdim=True, dtype=torch.float64 if logits.is_cuda else None)
    normaliser = total.log_().add_(peaks).to(logits.dtype)
    ranks = torch.gt(logits, chosen, out=torch.empty_like(logits)).sum(-1).to(torch.int32) + 1
    top_logits, top_ids = top(logits, k)
    return (chosen - normaliser)[:, 0], ranks, top_ids.to(torch.int32), top_logits - normaliser


def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, k: int) -> LogprobTensors:
    """Lines of k entries for prompt positions: logits float32 [r, width] that predict the tokens `targets` int [r]."""
    return logprobs(logits, targets, np.arange(len(logits)), np.full(len(logits), k))


def token_logprobs(n_top: np.ndarray, tensors: list[torch.Tensor]) -> list[TokenLogprobs]:
    """Plain values from `LogprobTensors.n_top` and the four `tensors()`, once these are on the host."""
    chosen, ranks, top_ids, top_logprobs = (tensor.tolist() for tensor in tensors)
    return [
        TokenLogprobs(chosen[i], ranks[i], top_ids[i][:n], top_logprobs[i][:n]) for i, n in enumerate(n_top.tolist())
    ]


def packed_logprobs(n_top: np.ndarray, tensors: list[torch.Tensor]) -> list[PackedLogprobs]:
    """The same, each row by itself and packed."""
    k = tensors[2].shape[1]
    chosen, ranks, top_ids, top_logprobs = (tensor.numpy().tobytes() for tensor in tensors)
    return [
        PackedLogprobs(
            n,
            chosen[at : at + 4],
            ranks[at : at + 4],
            top_ids[at * k : at * k + 4 * n],
            top_logprobs[at * k : at * k + 4 * n],
        )
        for at, n in zip(range(0, len(chosen), 4), n_top.tolist(), strict=True)
    ]
