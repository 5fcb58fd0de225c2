"""Captured decode steps of a model with recurrent layers, on a device whose graphs are calls, against eager ones."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from calling_device import CallingDevice, LivePlans
from family_cases import IDS, checkpoint_of

from quire.compute.forward.eager import EagerForward
from quire.compute.forward.graphs import GraphForward
from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import Runner
from quire.compute.runner.states import StatePool
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample import Sampler
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch
from quire.core.plan import PageAppend, SlotOpen, SlotParams, Spans, StateRestore, StateSave, StepPlan
from quire.kernels import native
from quire.kernels.invariance import RowsAlone

N_SLOTS, PAGE_SIZE, N_SNAPSHOTS = 5, 8, 2
GREEDY = SlotParams(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, -1, {}, None, [], [], 0)


@pytest.fixture(params=["lfm2", "mamba2", "qwen3_next-dense"])
def model(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Decoder:
    checkpoint_of(request.param, tmp_path)
    device = torch.device("cpu")
    return load_model(tmp_path, read_arch(tmp_path), dtype=torch.float32, device=device, max_model_len=128)


def runner_over(model: Decoder, captures: bool, alone: RowsAlone) -> tuple[Runner, CallingDevice]:
    device = CallingDevice()
    pool = KVPool(model.arch, 64, PAGE_SIZE, torch.float32, device)
    pool.states = StatePool(model.arch, N_SLOTS, N_SNAPSHOTS, torch.float32, device)
    tables = SlotTables(N_SLOTS, 128, PAGE_SIZE, device)
    tail = Tail(device, model, tables, Sampler(N_SLOTS, 256, torch.device("cpu")))
    eager = EagerForward(device, model, pool, tables, 64)
    if not captures:
        return Runner(pool, tables, tail, [eager], alone=alone), device
    sizes: Any = {"max_num_seqs": N_SLOTS, "max_num_batched_tokens": 40}
    forward = GraphForward(device, model, pool, tables, tail, **sizes)
    forward.capture()
    return Runner(pool, tables, tail, [forward, eager], alone=alone), device


def plan(step: int, *rows: tuple[int, int, int], **more: Any) -> StepPlan:
    spans = Spans()
    for slot, start, length in rows:
        spans.add(slot, start, length, True)
    return StepPlan(step, spans, sum(length for *_, length in rows), **more)


def plans() -> list[tuple[StepPlan, int]]:
    """Two prompts; steps that decode; a state kept while decoding; a sequence that goes on from it; and the replays."""

    def opened(slot: int, ids: list[int]) -> SlotOpen:
        return SlotOpen(slot, ids, len(ids), GREEDY)

    pages = [PageAppend(0, 0, [1, 2]), PageAppend(1, 0, [3])]
    pages.append(PageAppend(4, 0, [6]))
    sequences = [opened(0, IDS[:14]), opened(1, [9]), opened(4, IDS[3:6])]
    start = plan(0, (0, 0, 14), (1, 0, 1), (4, 0, 3), opened=sequences, pages=pages)
    return [
        (start, 0),
        (plan(1, (1, 1, 1), (4, 3, 1), (0, 14, 1)), 1),
        (plan(2, (0, 15, 1), saves=[StateSave(0, 16, 1)]), 1),
        (plan(3, (0, 16, 1), (1, 2, 1), pages=[PageAppend(0, 2, [4])]), 1),
    ]


@pytest.mark.parametrize("alone", [RowsAlone.NEVER, RowsAlone.ALWAYS])
@torch.inference_mode()
def test_replays_give_what_eager_steps_give(
    model: Decoder, alone: RowsAlone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are alone graphs are captured between steps, and the states are the same bits."""
    LivePlans(monkeypatch)
    eager, _ = runner_over(model, False, alone)
    graphs, device = runner_over(model, True, alone)
    said: list[list[int]] = []
    for one, n_replays in plans():
        before = device.n_replays
        said.append([eager.launch(one).result().tokens, graphs.launch(one).result().tokens])
        assert device.n_replays - before in (n_replays, n_replays + 1)  # and that of sampling
    first, second = said[1][0][2], said[2][0][0]
    known = [*IDS[:14], said[0][0][0], first]
    again = plan(
        4, (2, 16, 1), restores=[StateRestore(2, 1)], opened=[SlotOpen(2, [*known, second], 17, GREEDY)],
        pages=[PageAppend(2, 0, [1, 2, 5])],
    )  # fmt: skip
    said.append([runner.launch(again).result().tokens for runner in (eager, graphs)])
    assert all(ours == theirs for ours, theirs in said)
    assert said[4][0] == said[3][0][:1]
    for layer, tensors in eager.pool.states.of.items():
        for ours, theirs in zip(graphs.pool.states.of[layer], tensors, strict=True):
            keep = [0, 1, 2, 4, 7]  # padding has a line of its own, 5
            tolerance = 0.0 if alone is RowsAlone.ALWAYS and native.library() is not None else 1e-4
            torch.testing.assert_close(ours[keep], theirs[keep], atol=tolerance, rtol=tolerance)
