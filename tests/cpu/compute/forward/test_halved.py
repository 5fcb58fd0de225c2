"""A step in two halves is the step: states and pages, whatever is cut, with sums that come when they are waited for.

The oracle is the step as a whole, of the same rank. That ranks say what one rank says: `test_rank_models.py`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_fused import PAGE_SIZE, QWEN2, QWEN3

from quire.compute.device.cpu import CpuDevice
from quire.compute.dist.comm import Reduction, SoloComm
from quire.compute.forward import halved
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.halved import HalvedForward, cut_of, spans_within
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.runner.batch_builder import build_batch
from quire.compute.runner.pool import KVPool
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import NO_WRITES, SlotTables
from quire.config.model import read_arch
from quire.core.plan import PageAppend, Spans, StepPlan
from quire.kernels.attention.schedule.plan import SharedPrefix
from quire.kernels.norm import rms_norm

Rows = list[tuple[int, int, int, bool]]
STEPS: list[Rows] = [  # slot, start, length, wants a token
    [(0, 0, 37, True)],  # one span, cut in the middle
    [(0, 37, 1, True), (1, 0, 5, False), (2, 0, 30, True)],
    [(1, 5, 60, True), (0, 38, 1, True), (2, 30, 1, True)],  # cut behind keys of an earlier step
    [(3, 0, 48, False)],  # no token is wanted
    [(slot, at, 4, True) for slot, at in ((0, 39), (1, 65), (2, 31), (3, 48))],  # cut between spans
]
WINDOW = {**QWEN2, "architectures": ["MistralForCausalLM"], "sliding_window": 20, "hidden_size": 64}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(halved, "TILE_ROWS", 4)
    with torch.inference_mode():
        yield


class LateComm(SoloComm):
    """Rank 0 of two, of which the other one has the same; sums that go beside are NaN until they are waited for."""

    size = 2

    def __init__(self) -> None:
        self.is_beside, self.late = False, list[tuple[torch.Tensor, torch.Tensor]]()
        self.n_late = self.n_pending = 0

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        return x.mul_(2)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])

    def add_reduced(
        self, z: torch.Tensor, x: torch.Tensor, norm: Any = None, *, beside: bool = False
    ) -> torch.Tensor | None:
        assert beside == self.is_beside
        assert beside or not self.n_pending, "a sum that does not follow the one before"
        x.add_(z, alpha=2)
        normed = None if norm is None else rms_norm(x, *norm)
        for one in (x, normed) if self.is_beside else ():
            if one is not None:
                self.late.append((one, one.clone()))
                self.n_late += 1
                one.fill_(torch.nan)
        return normed


class LateDevice(CpuDevice):
    """What goes beside comes when it is waited for, and not before."""

    def __init__(self, comm: LateComm) -> None:
        super().__init__()
        self._comm = comm

    def beside(self, launch: Callable[[], None]) -> Callable[[], None]:
        comm, n_before = self._comm, len(self._comm.late)
        comm.is_beside = True
        launch()
        comm.is_beside = False
        comm.n_pending += 1
        mine = comm.late[n_before:]

        def arrive() -> None:
            comm.n_pending -= 1
            for place, value in mine:
                place.copy_(value)

        return arrive


class Side:
    """A rank's part of a model with pages of its own."""

    def __init__(self, folder: pathlib.Path, config: dict[str, Any]) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        self.comm = LateComm()
        self.device = LateDevice(self.comm)
        arch = read_arch(folder)
        self.model: Decoder = decoder_on(torch.device("cpu"), arch, torch.float32, 256, comm=self.comm)
        generator = torch.Generator().manual_seed(0)
        for name, tensor in self.model.weights():
            values = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + values / 10 if "norm" in name else values / 7)
        self.model.finish()
        self.tables = SlotTables(4, 255, PAGE_SIZE, self.device)
        self.pool = KVPool(self.model.arch, 100, PAGE_SIZE, torch.float32, self.device)
        rng = np.random.default_rng(0)
        self.tables.tokens.copy_(torch.from_numpy(rng.integers(0, arch.vocab_size, self.tables.tokens.shape)))
        pages = rng.permutation(np.arange(1, 100))
        for slot in range(4):
            self.tables.append([PageAppend(slot, 0, pages[slot * 24 : slot * 24 + 24].tolist())])

    def halved(self, least_rows: int = 2) -> HalvedForward:
        return HalvedForward(self.device, self.model, self.pool, self.tables, least_rows)

    def eager(self) -> EagerForward:
        return EagerForward(self.device, self.model, self.pool, self.tables, 64)


def step_of(rows: Rows) -> Step:
    plan = Spans()
    for span in rows:
        plan.add(*span)
    return Step(StepPlan(0, plan), build_batch(plan), NO_WRITES, [], wants_all=False)


def sampled(step: Step, states: States) -> torch.Tensor:
    return states.hidden[torch.from_numpy(step.batch.sampled_rows)] if states.has_all else states.hidden


@pytest.mark.parametrize("config", [QWEN2, {**QWEN3, "num_hidden_layers": 3}, WINDOW])
def test_halves_are_the_step(tmp_path: pathlib.Path, config: dict[str, Any]) -> None:
    late, whole = Side(tmp_path, config), Side(tmp_path, config)
    forward, eager = late.halved(), whole.eager()
    for rows in STEPS:
        step = step_of(rows)
        states, expected = forward.run(step), eager.run(step)
        assert states is not None
        assert states.has_all == expected.has_all and (states.sampled is None) == (expected.sampled is None)
        found, wanted = (sampled(step, one) for one in (states, expected))
        assert found.shape == wanted.shape and torch.isfinite(states.hidden).all()
        assert torch.allclose(found, wanted, atol=1e-4)
        assert torch.allclose(late.pool.k, whole.pool.k, atol=1e-4)
        assert torch.allclose(late.pool.v, whole.pool.v, atol=1e-4)
    n_beside = 2 * (len(late.model.layers) - 1)
    assert late.comm.n_late >= n_beside * len(STEPS), "a sum of each half in each layer but the last"
    assert whole.comm.n_late == 0 and float(whole.pool.k.abs().max()) > 0.1


@pytest.mark.parametrize("n_rows, cut", [(5, 4), (8, 4), (9, 8), (16, 8), (17, 12), (24, 12)])
def test_the_cut_is_in_the_middle_at_a_tile(n_rows: int, cut: int) -> None:
    assert cut_of(n_rows) == cut


def test_spans_of_halves() -> None:
    batch = build_batch(step_of([(0, 10, 6, True), (1, 20, 1, True), (2, 0, 8, True)]).plan.spans)
    first, second = spans_within(batch, 0, 9), spans_within(batch, 9, 15)
    assert [one.tolist() for one in first] == [[0, 6, 7, 9], [16, 21, 2], [0, 1, 2]]
    assert [one.tolist() for one in second] == [[0, 6], [8], [2]]
    assert [one.tolist() for one in spans_within(batch, 0, 15)] == [[0, 6, 7, 15], [16, 21, 8], [0, 1, 2]]


def test_what_is_not_cut(tmp_path: pathlib.Path) -> None:
    side, rows = Side(tmp_path, QWEN2), [(0, 0, 12, True)]
    step = step_of(rows)
    assert side.halved(least_rows=13).run(step) is None
    others: dict[str, Any] = {"adapters": np.full(12, -1), "shared": [SharedPrefix([0], PAGE_SIZE)]}
    for name, value in others.items():
        assert side.halved().run(dataclasses.replace(step, **{name: value})) is None, name
    states = side.halved(least_rows=12).run(dataclasses.replace(step, wants_all=True))
    assert states is not None and states.has_all and len(states.hidden) == 12
