"""Which steps are captured: by number of rows, and what is captured of each.

Does not own the captures (`graphs.py`). Invariant: `bucket` gives the smallest size that holds a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch

from quire.compute.runner.spans_apart import Room
from quire.compute.sample.sampler import ChoiceKind
from quire.config.arch import ModelArch
from quire.kernels.attention.schedule.plan import PlanBuffers
from quire.kernels.attention.schedule.tiles import large_tokens_of, small_rows_of
from quire.kernels.invariance import are_rows_alone
from quire.planner.shape import read_weights

MOST_VERIFYING: Final = 512
"""Rows of the largest step that verifies drafts each as a span of its own."""
MAX_MIXED_ROWS: Final = 2048
HIDDEN_FLOPS: Final = 7e12
"""Work of a step behind which launching it kernel by kernel is hidden: 11 ms at 650 TFLOP/s."""


def rows_of(arch: ModelArch, flops: float) -> int:
    """Of a step that is so much work."""
    return int(flops / (2.0 * arch.n_layers * read_weights(arch, 1)))


def mixed_sizes(arch: ModelArch, largest: int, max_num_seqs: int) -> list[int]:
    """Every 32 to 512, every 64 to 1,024, then every 128, while launches are not hidden anyway; at most `largest`.

    Every decode step fits one: it may share prefixes.
    """
    most = min(largest, MAX_MIXED_ROWS, max(max_num_seqs, rows_of(arch, HIDDEN_FLOPS)))
    sizes = [*range(32, 512, 32), *range(512, 1024, 64), *range(1024, MAX_MIXED_ROWS + 1, 128)]
    return sorted({size for size in sizes if size < most} | {most})


def most_large_lines(group: int, max_num_seqs: int, mixed_rows: int) -> int:
    """Large lines of a mixed step: of spans longer than a small line, of groups of more rows than that; or of all
    prompts where rows are alone, and of all rows where a token's heads, `group`, are more."""
    if are_rows_alone() or group > small_rows_of(group):
        return mixed_rows // large_tokens_of(group) + max_num_seqs
    return (mixed_rows + max_num_seqs) // (small_rows_of(group) // group + 1) + 1


@dataclasses.dataclass(slots=True)
class ForwardGraphs:
    """Captured forwards of one kind of step, and the attention buffers they share."""

    sizes: list[int]
    buffers: list[PlanBuffers]
    """Of each kind of window."""
    room: Room
    """In `buffers`, where rows are alone."""
    replays: dict[int, Callable[[], None]] = dataclasses.field(default_factory=dict)

    def bucket(self, n_rows: int) -> int:
        """The smallest size that holds n_rows."""
        return next(size for size in self.sizes if size >= n_rows)

    def holds(self, n_rows: int, n_writes: int) -> bool:
        """Whether there is such a size, and room in it for so many new pages of each group."""
        return bool(self.sizes) and n_rows <= self.sizes[-1] and n_writes <= self.bucket(n_rows)


NOTHING: Final = ForwardGraphs([], [], Room(0))
"""Of a kind of step that never comes."""


SamplingKey = tuple[int, ChoiceKind]
"""Rows, and what is done with them."""
Sampling = Callable[[], torch.Tensor | None]
"""A captured choice, which returns where its logprobs are; see `Tail.captured`."""


@dataclasses.dataclass(slots=True)
class Captures:
    """Graphs of one kind of kernels: the fastest, or those of `kernels/invariance`."""

    decode: ForwardGraphs
    mixed: ForwardGraphs
    verifying: ForwardGraphs
    """Where drafts are verified: a span for each row, so that it is computed as a decode step is."""
    adapted: bool = False
    """Products look for the adapters of rows."""
    sampling: dict[SamplingKey, Sampling | None] = dataclasses.field(default_factory=dict)
    """None: there was no memory for it."""

    def have(self, forwards: ForwardGraphs, size: int, sampling: SamplingKey | None) -> bool:
        """Whether all of a step is captured. sampling: its key, if it samples by a captured choice."""
        return size in forwards.replays and (sampling is None or sampling in self.sampling)
