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
    """int64 [r], host: how many of the k entries the line asked for; -1: its row asked for nothing."""
    cells: torch.Tensor
    """int32 [r, 1 + k, 2], half of them the bits of float32: as `PackedLogprobs.cells`. Of equally probable tokens the
    lowest id comes first, whatever k is."""


def logprobs(logits: torch.Tensor, targets: torch.Tensor, rows: np.ndarray, n_top: np.ndarray) -> LogprobTensors:
    """Lines for `logits` [r, width], as `kernels.sample.lines` takes them, and the tokens `targets` int32 [r]; nothing
    waits for the device.

    rows, n_top: host int64 [r], as in `LogprobTensors`.
    """
    n_top = np.minimum(n_top, logits.shape[1])
    return LogprobTensors(rows, n_top, lines(logits, targets, int(n_top.max(initial=0))))


def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, k: int) -> LogprobTensors:
    """Lines of k entries for prompt positions: `logits` that predict the tokens `targets`, both as in `logprobs`."""
    return logprobs(logits, targets, np.arange(len(logits)), np.full(len(logits), k))


def token_logprobs(n_top: np.ndarray, cells: torch.Tensor) -> list[TokenLogprobs]:
    """Plain values from `LogprobTensors.n_top` and `cells`, once these are on the host."""
    rows = PackedLogprobs(cells.shape[1] - 1, cells.numpy().tobytes()).rows()
    return [
        TokenLogprobs(row.chosen, row.rank, row.top_ids[:n], row.top_logprobs[:n])
        for row, n in zip(rows, n_top.tolist(), strict=True)
    ]


def packed_logprobs(rows: np.ndarray, n_top: np.ndarray, cells: torch.Tensor) -> dict[int, PackedLogprobs]:
    """The same by `LogprobTensors.rows`, each by itself and packed, without those that asked for nothing."""
    packed, size = cells.numpy().tobytes(), CELL_BYTES * cells.shape[1]
    starts = np.arange(len(cells)) * size
    columns = rows, n_top, starts, starts + (1 + n_top) * CELL_BYTES
    return {
        row: PackedLogprobs(n, packed[start:end])
        for row, n, start, end in zip(*(column.tolist() for column in columns), strict=True)
        if n >= 0
    }
