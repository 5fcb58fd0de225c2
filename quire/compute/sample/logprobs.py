"""Log-probabilities of chosen tokens and of the most probable ones, on the device, and their way to the host.

The distribution is the model's own: before penalties, masks, temperature and truncation.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.core.logprobs import CELL_BYTES, PackedLogprobs, TokenLogprobs
from quire.kernels.sample import lines


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
    """Lines for `logits` [r, width], as `kernels.sample.lines` takes them, and the tokens `targets` int [r]; nothing
    waits for the device.

    rows, n_top: host int64 [r], as in `LogprobTensors`.
    """
    n_top = np.minimum(n_top, logits.shape[1])
    return LogprobTensors(rows, n_top, *lines(logits, targets.long(), int(n_top.max(initial=0))))


def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, k: int) -> LogprobTensors:
    """Lines of k entries for prompt positions: logits float32 [r, width] that predict the tokens `targets` int [r]."""
    return logprobs(logits, targets, np.arange(len(logits)), np.full(len(logits), k))


def token_logprobs(n_top: np.ndarray, tensors: list[torch.Tensor]) -> list[TokenLogprobs]:
    """Plain values from `LogprobTensors.n_top` and the four `tensors()`, once these are on the host."""
    chosen, ranks, top_ids, top_logprobs = (tensor.tolist() for tensor in tensors)
    return [
        TokenLogprobs(chosen[i], ranks[i], top_ids[i][:n], top_logprobs[i][:n]) for i, n in enumerate(n_top.tolist())
    ]


def packed_logprobs(rows: np.ndarray, n_top: np.ndarray, tensors: list[torch.Tensor]) -> dict[int, PackedLogprobs]:
    """The same by `LogprobTensors.rows`, each by itself and packed."""
    chosen, ranks, top_ids, top_logprobs = (tensor.numpy().view(np.int32) for tensor in tensors)
    cells = np.empty((len(chosen), 1 + top_ids.shape[1], 2), np.int32)
    cells[:, 0, 0], cells[:, 0, 1], cells[:, 1:, 0], cells[:, 1:, 1] = ranks, chosen, top_ids, top_logprobs
    packed, size = cells.tobytes(), CELL_BYTES * cells.shape[1]
    starts = np.arange(len(cells)) * size
    columns = rows, n_top, starts, starts + (1 + n_top) * CELL_BYTES
    return {
        row: PackedLogprobs(n, packed[start:end])
        for row, n, start, end in zip(*(column.tolist() for column in columns), strict=True)
    }
