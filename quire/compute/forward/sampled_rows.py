"""Rows of a captured step that tokens are chosen of: the memory through which they are reached, and the choice.

Owns its sections of the step's staging, the logits and what was chosen. Does not own when a choice is captured
(`graphs.py`) nor what it does (`runner/tail`). Invariant: padding is greedy, and writes to the spare slot.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import torch

from quire.compute.device.cuda import CudaDevice, Staging
from quire.compute.forward.buckets import Sampling, SamplingKey
from quire.compute.models.decoder import Decoder
from quire.compute.runner import standing
from quire.compute.runner.step import Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample.sampler import ChoiceKind, Sampled
from quire.core.plan import MASK_WORD_BITS
from quire.kernels.sample import N_CONTROLS, N_HISTORY, Choice, TokenMasks
from quire.planner.captured import decode_sizes

logger = logging.getLogger("quire.engine")

N_LINES: Final = 3
"""Of a row: which of the step's it is, slot and position of its token."""
PLAIN: Final = ChoiceKind(truncates=False)
"""Captured before the first step; other choices are when they come."""
MOST_OTHERS: Final = 96
"""Of these, of any size, in one region: each keeps memory of the driver, which `planner.memory.GRAPH_OWN_BYTES` counts
one of for a size."""


class SampledRows:
    """Up to `max_sampled` of them."""

    def __init__(
        self, device: CudaDevice, staging: Staging, model: Decoder, tables: SlotTables, tail: Tail, max_sampled: int
    ) -> None:
        self._device, self._staging, self._tables, self._tail = device, staging, tables, tail
        self.sizes = decode_sizes(max_sampled)
        self._rows = staging.section((N_LINES, max_sampled), torch.int64)
        self._controls = staging.section((N_CONTROLS, max_sampled), torch.float64)
        self._keys = staging.section((max_sampled,), torch.int64)
        self._histories = staging.section((N_HISTORY, max_sampled), torch.float64)
        self._mask_lines = staging.section((max_sampled,), torch.int32)
        self._no_history = np.array([0, tables.spare_slot, 0, 0, 1, 0, 0])[:, None]
        # One for all buckets: a graph's own output would be kept for each of them.
        self._logits = device.zeros((max_sampled, model.arch.vocab_size), model.dtype)
        # as wide as masks are, so that they come in one piece
        self._mask_bits = device.zeros((max_sampled, -(-tail.vocab_limit // MASK_WORD_BITS)), torch.int32)
        self._choice = Choice(device.zeros((max_sampled,), torch.int32), device.zeros((max_sampled,), torch.uint8))

    def bucket(self, n_sampled: int) -> int:
        """The smallest size that holds so many."""
        return next(size for size in self.sizes if size >= n_sampled)

    def key(self, step: Step) -> SamplingKey | None:
        """Of the captured choice of a step's tokens, of no rows where none is sampled; None: they are chosen kernel by
        kernel."""
        n_sampled = len(step.batch.sampled_rows)
        kind = self._tail.kind(step) if n_sampled <= self.sizes[-1] else None
        return None if kind is None else (self.bucket(n_sampled) if n_sampled else 0, kind)

    def fill(self, step: Step, kind: ChoiceKind) -> None:
        """Those of a step, between `begin` and `send` of the staging."""
        batch = step.batch
        n_sampled, lines = len(batch.sampled_rows), self._rows.host
        for line, values in enumerate((batch.sampled_rows, batch.sampled_slots, batch.sampled_positions)):
            lines[line, :n_sampled] = values
        self._controls.host[:, :n_sampled] = self._tail.controls(step)
        self._keys.host[:n_sampled] = self._tail.keys(batch.sampled_slots)
        self._mask_lines.host[:n_sampled] = batch.mask_lines
        if kind.changes:
            self._tail.histories(step, self._histories.host[:, :n_sampled])
        self._pad(n_sampled, self.bucket(n_sampled))

    def move(self, n_sampled: int) -> None:
        """What was sent was planned for the latest positions; see `standing`."""
        controls = self._controls.device[:, :n_sampled]
        standing.move_sampled(
            self._tables, self._rows.device[1:, :n_sampled], controls, self._keys.device[:n_sampled]
        )  # fmt: skip

    def choose(self, step: Step, replay: Sampling, bits: np.ndarray | None) -> Sampled:
        """By a captured choice, under masks: see `States.choose`."""
        if bits is not None:
            n_words = min(bits.shape[1], self._mask_bits.shape[1])  # the others stay zero: not allowed
            self._device.send(bits[:, :n_words], self._mask_bits[: len(bits), :n_words])
        return self._tail.sampled(step, self._choice, replay())

    def replay(
        self, captured: dict[SamplingKey, Sampling | None], key: SamplingKey, hidden: torch.Tensor
    ) -> Sampling | None:
        """Captured now, for rows of `hidden`, if it never was; None where there is no memory for what it does beyond
        plain sampling, or `MOST_OTHERS` were captured."""
        if key not in captured:
            is_plain = key[1] == PLAIN
            if not is_plain and sum(one[1] != PLAIN for one in captured) >= MOST_OTHERS:
                captured[key] = None
                return None
            try:
                captured[key] = self._capture(hidden, *key) if key[0] else _nothing
            except torch.OutOfMemoryError as error:
                if is_plain:
                    raise
                logger.warning("tokens of %d rows (%s) are chosen kernel by kernel: %s", *key, error)
                captured[key] = None
        return captured[key]

    def _capture(self, hidden: torch.Tensor, size: int, kind: ChoiceKind) -> Sampling:
        if kind.changes:
            self._tail.keep_wide(len(self._logits))
        self._staging.begin()
        self._pad(0, size)
        self._mask_lines.filled(size)  # the last of these sections: a step's rows must not be there while it runs once
        self._staging.send()
        rows, *at = self._rows.device[:, :size]
        controls, logits = self._controls.device[:, :size], self._logits[:size]
        choice = Choice(self._choice.token_ids[:size], self._choice.status[:size])
        masks, histories = TokenMasks(self._mask_lines.device[:size], self._mask_bits), self._histories.device[:, :size]
        where, cells = (at[0], at[1]), None

        def choose() -> None:
            nonlocal cells  # who holds them keeps their memory from the next graph
            cells = self._tail.captured(hidden, rows, where, controls, masks, logits, choice, kind, histories)

        replay = self._device.capture(choose)

        def chosen() -> torch.Tensor | None:
            replay()
            return cells

        return chosen

    def _pad(self, n_sampled: int, size: int) -> None:
        self._rows.host[:, n_sampled:size] = np.array([0, self._tables.spare_slot, 0])[:, None]
        self._controls.host[:, n_sampled:size] = 0  # greedy
        histories = self._histories.host[:, n_sampled:size]
        histories[:], histories[0] = self._no_history, np.arange(n_sampled, size)
        self._mask_lines.host[n_sampled:size] = -1


def _nothing() -> None:
    """The choice of no rows."""
