"""Recurrent states on the device: a line for each slot, one for padding, one for each snapshot.

Owns their memory and the copies between lines. Does not own which snapshot is what (`control/snapshots`), nor what a
state is (`kernels/state`). Invariant: addresses do not change, so that steps can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.runner.batch_builder import FlatBatch
from quire.config.arch import ModelArch
from quire.core.plan import StateRestore, StateSave
from quire.kernels.state import StateSpans, plan_spans


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
        """Those of a step, which keeps states on its way."""
        starts = batch.kv_lens - np.diff(batch.q_indptr)
        span_of = {slot: span for span, slot in enumerate(batch.span_slots.tolist())} if saves else {}
        kept = [
            (span_of[one.slot], one.n_tokens - int(starts[span_of[one.slot]]), self._first + one.snapshot)
            for one in saves
        ]
        arrays = plan_spans(batch.q_indptr, batch.span_slots, starts, kept)
        joined = self._device.upload(np.concatenate(arrays))
        return StateSpans(*joined.split([len(one) for one in arrays]))  # type: ignore[no-untyped-call]
