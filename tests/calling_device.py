"""A device whose graphs are calls: strategies of a GPU on a CPU, to see what they stage, pad and choose.

Attention plans are replaced by the CPU's: nothing of CUDA is shown by this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.compute.device.cpu import CpuDevice
from quire.compute.draft import head_graphs
from quire.compute.forward import graphs
from quire.compute.runner.pool import PagedContext, plan_attention
from quire.kernels import mla
from quire.kernels.attention import op as attention


class Section:
    def __init__(self, staging: Staging, memory: torch.Tensor) -> None:
        self._staging, self.device, self.host = staging, memory, np.zeros_like(memory.numpy())

    def filled(self, n: int) -> None:
        self._staging.is_filled = True


class Staging:
    """Two memories, and a copy of all where a section was said to be filled, whichever; of nothing otherwise."""

    def __init__(self) -> None:
        self._sections: list[Section] = []
        self.is_filled = False

    def section(self, shape: tuple[int, ...], dtype: torch.dtype) -> Section:
        self._sections.append(self.rest(dtype, 0, shape))
        return self._sections[-1]

    def rest(self, dtype: torch.dtype, after: int = 0, shape: tuple[int, ...] = (1,)) -> Section:
        return Section(self, torch.zeros(shape, dtype=dtype))

    def begin(self) -> None:
        self.is_filled = False

    def send(self) -> None:
        if self.is_filled:
            for section in self._sections:
                section.device.copy_(torch.from_numpy(section.host))


class CallingDevice(CpuDevice):
    """Memory that the host does not share, and graphs that are calls."""

    is_host = False

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.n_replays = self.n_captures = 0

    def download(self, tensors: list[torch.Tensor]) -> Any:
        """Copies: what a graph writes is written again by the next step, which does not wait."""
        return super().download([tensor.clone() for tensor in tensors])

    def staging(self, n_bytes: int) -> Staging:
        return Staging()

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        launches()
        self.n_captures += 1

        def replay() -> None:
            self.n_replays += 1
            launches()

        return replay


class MovingPlan:
    """Stands for a plan in fixed buffers: what was written last, with its rows where they were placed since."""

    n_ints = 0

    def __init__(self, memory: Section) -> None:
        self.memory = memory

    def write(self, *given: Any) -> None:
        """given: as of `plan_attention`."""
        self.memory.filled(1)
        self._given, self.now = given, plan_attention(*given)

    def place(self, positions: torch.Tensor) -> None:
        pool, tables, most, slots, *rest = self._given
        q_indptr = rest[0] if rest and rest[0] is not None else np.arange(len(most) + 1, dtype=np.int32)
        lens = np.minimum(positions.numpy()[q_indptr[1:] - 1] + 1, most).astype(np.int32)
        self.now = plan_attention(pool, tables, lens, slots, q_indptr)


class LivePlans:
    """Stands for fixed buffers: a captured context attends by the plan that was written last, in its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._written = threading.local()
        monkeypatch.setattr(
            graphs.attention, "plan_buffers", lambda *given, memory, **options: MovingPlan(memory),
        )  # fmt: skip
        monkeypatch.setattr(graphs, "plan_attention", self.plan)
        live = self

        class Context(PagedContext):
            def attend(self, layer: int, q: torch.Tensor, variant: Any) -> torch.Tensor:
                self.plans = live.last.now
                return super().attend(layer, q, variant)

            def attend_lines(self, layer: int, asked: torch.Tensor, variant: Any, matrices: torch.Tensor) -> Any:
                self.plans = live.last.now
                return super().attend_lines(layer, asked, variant, matrices)

        monkeypatch.setattr(graphs, "PagedContext", Context)

    def plan(self, *given: Any, buffers: Any = (), shared: Any = (), settled: bool = False) -> Any:
        if not buffers:
            return plan_attention(*given)
        for one in buffers:
            one.write(*given)
        self._written.last = buffers[0]
        return list(buffers)

    @property
    def last(self) -> Any:
        """See the class."""
        return self._written.last


class LiveChains:
    """As `LivePlans`, for the chains of a head."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(head_graphs.attention, "plan_buffers", lambda *given, memory, **options: MovingPlan(memory))

        def plan(*given: Any, buffers: Sequence[MovingPlan] = ()) -> list[Any]:
            if not buffers:
                return list(plan_attention(*given))
            buffers[0].write(*given)
            return list(buffers)

        class Context(PagedContext):
            def attend(self, layer: int, q: torch.Tensor, variant: Any) -> torch.Tensor:
                moving: Any = self.plans[0]
                return attention.run(q, *self.pool.pages_of[layer], moving.now[0], variant)

            def attend_lines(self, layer: int, asked: torch.Tensor, variant: Any, matrices: torch.Tensor) -> Any:
                moving: Any = self.plans[0]
                return mla.attend(asked, *self.pool.pages_of[layer], moving.now[0], variant, matrices)

        monkeypatch.setattr(head_graphs, "plan_attention", plan)
        monkeypatch.setattr(head_graphs, "PagedContext", Context)
