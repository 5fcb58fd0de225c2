"""Layers in groups: pages of their own, given back behind windows, against one group that keeps everything."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.compute.device.cpu import CpuDevice
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.fused import FusedForward
from quire.compute.forward.obstacle import obstacle
from quire.compute.forward.strategy import Forward
from quire.compute.models.decoder import Decoder
from quire.compute.runner.batch_builder import build_batch
from quire.compute.runner.pool import KVPool
from quire.compute.runner.step import Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample.sampler import Sampler
from quire.compute.weights.loader import decoder_on
from quire.config.kv import KVLayout, first_page, kv_layout
from quire.config.model import read_arch
from quire.core.plan import PageAppend, PageCopy, SlotOpen, SlotParams, Spans, StepPlan
from quire.kernels import native

WINDOW, PAGE_SIZE, N_SLOTS, LENGTH = 20, 8, 3, 120
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 200, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "use_sliding_window": True, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
EVERY_WINDOW = QWEN2 | {"layer_types": ["sliding_attention"] * 6}
NOT_PLAIN = SlotParams(1.0, 5, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, -1, {}, None, [], [], 0)
"""Nothing chooses tokens: the known ones stay in the table."""


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def model_of(folder: pathlib.Path, config: dict[str, object], dtype: torch.dtype) -> Decoder:
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    made = decoder_on(torch.device("cpu"), read_arch(folder), dtype, 256)
    for name, tensor in made.weights():
        tensor.copy_(1 + torch.randn(tensor.shape) / 10 if "norm" in name else torch.randn(tensor.shape) / 7)
    made.finish()
    return made


class Side:
    """Sequences in slots over a pool of one layout. What lies behind every window of a group is NaN."""

    def __init__(self, model: Decoder, layout: KVLayout, fused: bool = False) -> None:
        self.layout, self.model = layout, model
        device, n_each = CpuDevice(), -(-LENGTH // PAGE_SIZE)
        n_groups = len(layout.groups)
        n_pages = 1 + N_SLOTS * n_groups * n_each
        self.pool = KVPool(model.arch, n_pages, PAGE_SIZE, model.dtype, device, layout)
        self.tables = SlotTables(N_SLOTS, LENGTH, PAGE_SIZE, device, n_groups)
        tail = Tail(device, model, self.tables, Sampler(N_SLOTS, 200, torch.device("cpu"), vocab_limit=190))
        self.forward: Forward = EagerForward(device, model, self.pool, self.tables, 64)
        if fused:
            assert obstacle(model) is None
            self.forward = FusedForward(device, model, self.pool, self.tables, tail, max_rows=160, max_sampled=N_SLOTS)
        order = np.random.default_rng(0).permutation(np.arange(1, n_pages))
        self.pages = order.reshape(n_groups, N_SLOTS, n_each)
        for slot in range(N_SLOTS):
            ids = np.random.default_rng(slot).integers(0, 200, LENGTH).tolist()
            opened = SlotOpen(slot, ids, LENGTH, NOT_PLAIN)
            self.tables.open([opened])
            tail.open(opened)
        for group in range(n_groups):
            added = [PageAppend(slot, 0, self.pages[group, slot].tolist(), group) for slot in range(N_SLOTS)]
            self.tables.append(added)

    def logits(self, spans: list[tuple[int, int, int, bool]]) -> torch.Tensor:
        """Of the sampled rows of a step."""
        plan = Spans()
        for span in spans:
            plan.add(*span)
            self._poison(*span[:2])
        batch = build_batch(plan)
        states = self.forward.run(Step(StepPlan(0, plan), batch, self.tables.append([]), [], wants_all=False))
        assert states is not None
        if states.logits is not None:
            return states.logits.clone()
        hidden = states.hidden[torch.from_numpy(batch.sampled_rows)] if states.has_all else states.hidden
        return self.model.logits(hidden)

    def _poison(self, slot: int, start: int) -> None:
        for group, window in enumerate(self.layout.windows):
            behind = self.pages[group, slot, : first_page(window, start, PAGE_SIZE)]
            self.pool.k[:, behind] = self.pool.v[:, behind] = math.nan


STEPS = [
    [(0, 0, 50, True), (1, 0, 7, False)],
    [(0, 50, 1, True), (1, 7, 40, True), (2, 0, 24, True)],
    *([(slot, start + i, 1, True) for slot, start in ((0, 51), (1, 47), (2, 24))] for i in range(20)),
    [(1, 67, 30, True), (0, 71, 1, True)],
    [(1, 97, 1, True), (2, 44, 9, True), (0, 72, 40, False)],
]


@pytest.mark.parametrize("config", [QWEN2, EVERY_WINDOW], ids=["every third is full", "all have windows"])
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_those_of_one_group_that_keeps_everything(
    tmp_path: pathlib.Path, config: dict[str, object], fused: bool, dtype: torch.dtype
) -> None:
    if fused and native.library() is None:
        pytest.skip("no native library was built")
    model = model_of(tmp_path, config, dtype)
    layout = kv_layout(model.arch)
    assert layout.windows == ((0, WINDOW, WINDOW) if config is QWEN2 else (WINDOW,))
    one, groups = Side(model, kv_layout(model.arch, hybrid=False)), Side(model, layout, fused)
    for number, spans in enumerate(STEPS):
        expected, found = one.logits(spans), groups.logits(spans)
        assert torch.equal(found[: len(expected)], expected), number


def test_copies_reach_every_lane(tmp_path: pathlib.Path) -> None:
    model = model_of(tmp_path, QWEN2, torch.float32)
    side = Side(model, kv_layout(model.arch))
    side.logits([(0, 0, 13, True)])
    assert len(side.pool.k) == 2
    for group in range(3):
        source, target = (int(side.pages[group, slot, 1]) for slot in (0, 1))
        side.pool.copy([PageCopy(source, target, 5)])
        for pages in (side.pool.k, side.pool.v):
            assert pages[:, source, :, :5].any() and torch.equal(pages[:, target, :, :5], pages[:, source, :, :5])
            assert not pages[:, target, :, 5:].any()
