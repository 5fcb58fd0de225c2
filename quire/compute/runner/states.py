"""Recurrent states on the device: a line for each slot, one for padding, one for each snapshot.

Owns their memory and the copies between lines. Does not own which snapshot is what (`control/snapshots`), nor what a
state is (`kernels/state`). Invariant: addresses do not change, so that steps can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.runner.batch_builder import FlatBatch
from quire.config.arch import ModelArch
from quire.core.plan import StateRestore, StateSave
from quire.kernels.state import StateSpans, plan_spans, spans_of

ALIGNED: Final = 4
"""Integers: arrays begin at multiples, as Triton compiles a kernel for each mix of those that do and do not."""


class StatePool:
    """`of`: layer → its tensors [n_lines, ...], in the order of its `StateSpec`."""

    def __init__(self, arch: ModelArch, n_slots: int, n_snapshots: int, dtype: torch.dtype, device: Device) -> None:
        """dtype: of activations."""
        self._device = device
        self._first = n_slots + 1
        n_lines = self._first + n_snapshots
        self.of = {
            layer: tuple(
                device.zeros((n_lines, *part.shape), torch.float32 if part.is_exact else dtype) for part in spec.parts
            )
            for layer, spec in arch.state_specs.items()
        }

    def restore(self, restores: Sequence[StateRestore]) -> None:
        """Slots go on from snapshots."""
        if restores:
            self._copy([self._first + one.snapshot for one in restores], [one.slot for one in restores])

    def keep(self, saves: Sequence[StateSave]) -> None:
        """Snapshots of slots as they are."""
        if saves:
            self._copy([one.slot for one in saves], [self._first + one.snapshot for one in saves])

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        at, to = self._device.upload(np.array([sources, targets], np.int64))
        for tensors in self.of.values():
            for tensor in tensors:
                tensor[to] = tensor[at]

    def spans(self, batch: FlatBatch, saves: Sequence[StateSave]) -> StateSpans:
        """Those of a step, which keeps states on its way. Sequences that decode come first in a step."""
        starts, indptr = batch.kv_lens - np.diff(batch.q_indptr), batch.q_indptr
        span_of = {slot: span for span, slot in enumerate(batch.span_slots.tolist())} if saves else {}
        kept = [
            (span_of[one.slot], one.n_tokens - int(starts[span_of[one.slot]]), self._first + one.snapshot)
            for one in saves
        ]
        n_first = _n_single(indptr, [span for span, *_ in kept])
        later = [(span - n_first, n_rows, line) for span, n_rows, line in kept]
        arrays = plan_spans(indptr[n_first:] - n_first, batch.span_slots[n_first:], starts[n_first:], later)
        single = batch.span_slots[:n_first].astype(np.int32), (starts[:n_first] == 0).astype(np.int32)
        lines, fresh, *rest = self._sent([*single, *arrays])
        first = StateSpans(lines, fresh) if n_first else None
        if first is not None and n_first == len(batch.span_slots):
            return first
        return spans_of(rest, first)

    def _sent(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """int32 arrays on the device by one copy, each from where kernels find any: they are compiled for that."""
        starts = np.cumsum([0, *(-(-len(one) // ALIGNED) * ALIGNED for one in arrays)])
        packed = np.zeros(int(starts[-1]), np.int32)
        for at, one in zip(starts, arrays, strict=False):
            packed[at : at + len(one)] = one
        sent = self._device.upload(packed)
        return [sent[at : at + len(one)] for at, one in zip(starts.tolist(), arrays, strict=False)]


def _n_single(indptr: np.ndarray, kept: list[int]) -> int:
    """How many spans at the beginning have one row and keep nothing."""
    longer = np.flatnonzero(np.diff(indptr) != 1)
    return min([int(longer[0]) if len(longer) else len(indptr) - 1, *kept])
