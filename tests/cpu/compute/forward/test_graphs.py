"""Captured steps on a device whose graphs are calls: what is staged, padded and chosen, against steps by kernels."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from calling_device import CallingDevice, LivePlans

from quire.compute.adapters.files import Adapter, targets_of
from quire.compute.adapters.pairs import Pair
from quire.compute.adapters.places import StackedAdapters, device_bytes
from quire.compute.forward import sampled_rows
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.graphs import GraphForward
from quire.compute.forward.sampled_rows import SampledRows
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import LaunchedStep, Runner
from quire.compute.runner.step import States, Step
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.runner.warm_up import of_every_alignment, warm_up
from quire.compute.sample import Sampler, sampler
from quire.compute.sample.sampler import ChoiceKind
from quire.compute.schemes.choice import Schemes
from quire.compute.schemes.plain import Plain
from quire.config.model import read_arch
from quire.core.plan import AdapterPut, PageAppend, SlotOpen, SlotParams, Spans, StepMasks, StepPlan
from quire.core.request import Pooling
from quire.core.result import StepResult
from quire.kernels.invariance import RowsAlone

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 200, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PLAIN = SlotParams(0.9, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 5, -1, -1, {}, None, [], [], 0)
N_SLOTS, PAGE_SIZE = 6, 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


LATENT = {
    **CONFIG, "architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 32, "q_lora_rank": None, "v_head_dim": 20,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: pathlib.Path) -> Decoder:
    return model_of(tmp_path, CONFIG)


EXPERTS = {
    **CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip


def model_of(tmp_path: pathlib.Path, config: dict[str, Any], schemes: Schemes | None = None) -> Decoder:
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    made = decoder_on(torch.device("cpu"), read_arch(tmp_path), torch.float32, 256, schemes)
    for name, tensor in made.weights():
        tensor.copy_(1 + torch.randn(tensor.shape) / 10 if "norm" in name else torch.randn(tensor.shape) / 7)
    made.finish()
    return made


def runner_over(
    model: Decoder, captures: bool, put: Callable[[AdapterPut], None] | None = None
) -> tuple[Runner, CallingDevice]:
    device = CallingDevice()
    pool = KVPool(model.arch, 64, PAGE_SIZE, torch.float32, device)
    tables = SlotTables(N_SLOTS, 128, PAGE_SIZE, device)
    tail = Tail(device, model, tables, Sampler(N_SLOTS, 200, torch.device("cpu"), vocab_limit=190))
    eager = EagerForward(device, model, pool, tables, 64)
    if not captures:
        return Runner(pool, tables, tail, [eager], alone=RowsAlone.ASKED, put=put), device
    forward = GraphForward(
        device,
        model,
        pool,
        tables,
        tail,
        max_num_seqs=N_SLOTS,
        max_num_batched_tokens=40,  # type: ignore[arg-type]
    )
    forward.capture()
    return Runner(pool, tables, tail, [forward, eager], alone=RowsAlone.ASKED, put=put), device


def spans(*rows: tuple[int, int, int, bool]) -> dict[str, Any]:
    made = Spans()
    for row in rows:
        made.add(*row)
    return {"spans": made, "n_tokens": sum(row[2] for row in rows)}


def plans(**asked: Any) -> list[tuple[StepPlan, int]]:
    """Plans, and how many replays each takes with plain sampling. asked: what slot 2 wants beyond it."""
    ids = np.random.default_rng(0).integers(0, 200, 200).tolist()
    special = msgspec.structs.replace(PLAIN, **asked)
    opened = [SlotOpen(0, ids[:70], 70, PLAIN), SlotOpen(1, ids[:3], 3, PLAIN), SlotOpen(2, ids[:9], 9, special)]
    pages = [PageAppend(0, 0, list(range(1, 11))), PageAppend(1, 0, [20]), PageAppend(2, 0, [30, 31])]
    chunk = spans((0, 0, 25, False), (1, 0, 3, True), (2, 0, 9, True))
    return [
        (StepPlan(0, **chunk, opened=opened, pages=pages), 2),
        (StepPlan(1, **spans((0, 25, 45, True))), 0),  # too many rows for a bucket
        (StepPlan(2, **spans((0, 70, 1, True), (1, 3, 1, True), (2, 9, 1, True))), 2),
        (StepPlan(3, **spans((1, 4, 1, True), (2, 10, 1, True)), pages=[PageAppend(1, 1, [21])], masked=[0]), 2),
        (StepPlan(4, **spans((0, 71, 1, True), (1, 5, 1, True))), 2),
    ]


def run(runner: Runner, plan: StepPlan) -> StepResult:
    step = runner.launch(plan)
    if plan.masked:
        allowed = (0).to_bytes(12, "little") + (0b1010).to_bytes(4, "little")
        step.mask(StepMasks(plan.step, allowed * len(plan.masked)))
    result = step.result()
    result.timings = type(result.timings)()
    return result


ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a part of the vocabulary": {"top_p": 0.5},
    "a penalty": {"presence_penalty": 0.5},
    "several penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "min_p": 0.01},
    "logprobs": {"logprobs": 2},
    "its own logprob": {"logprobs": 0},
    "logprobs beside a penalty": {"logprobs": 7, "presence_penalty": 0.5},
    "logprobs of most ids": {"logprobs": 100},
    "logprobs of the prompt": {"prompt_logprobs": 1},
    "a vector": {"pooling": Pooling.MEAN},
    "few ids": {"allowed_token_ids": [3, 7, 11]},
    "company that changes nothing": {"deterministic": True},
}


@pytest.mark.parametrize("what", ASKED)
def test_as_kernel_by_kernel(model: Decoder, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    LivePlans(monkeypatch)
    captured, device = runner_over(model, captures=True)
    eager, _ = runner_over(model, captures=False)
    for plan, n_replays in plans(**ASKED[what]):
        before = device.n_replays
        assert run(captured, plan) == run(eager, plan), plan.step
        has_tail = what not in ("logprobs of most ids", "few ids") or 2 not in plan.spans.slots
        assert device.n_replays - before == (n_replays if has_tail else min(n_replays, 1))
        assert torch.equal(captured.tables.pages[:, :N_SLOTS], eager.tables.pages[:, :N_SLOTS])
        assert torch.equal(captured.tables.tokens[:N_SLOTS], eager.tables.tokens[:N_SLOTS])


def test_warming_up_leaves_nothing_to_compile(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are captured never run kernel by kernel; longer ones do, with numbers of tokens of every alignment."""
    LivePlans(monkeypatch)
    runner, device = runner_over(model, captures=True)
    n_rows, chosen, eagerly, result = list[int](), list[tuple[bool, list[int]]](), EagerForward.run, LaunchedStep.result

    def counted(self: EagerForward, step: Step) -> States:
        n_rows.append(len(step.batch.row_slots))
        return eagerly(self, step)

    def seen(self: LaunchedStep) -> StepResult:
        found = result(self)
        chosen.append((bool(self._step.plan.masked), found.tokens))
        return found

    monkeypatch.setattr(EagerForward, "run", counted)
    monkeypatch.setattr(LaunchedStep, "result", seen)
    warm_up(runner, 20)
    assert not n_rows and not any(is_masked for is_masked, _ in chosen), "on a CPU nothing is compiled"
    warm_up(runner, 20, of_every_alignment(20))
    assert n_rows == [19, 18, 20, 8, 16, 14 + 5, *[1] * 4]
    masked = [tokens for is_masked, tokens in chosen if is_masked]
    assert [len(tokens) for tokens in masked] == [1, 1] and max(map(max, masked)) < 32
    before = device.n_replays
    run(runner, plans()[0][0])
    assert device.n_replays > before and len(n_rows) == 10, "steps are captured ones again"


def test_numbers_of_every_alignment() -> None:
    """The largest powers of 2 in them are 1 to 16; as large as they may be."""
    assert of_every_alignment(1) == [1]
    assert of_every_alignment(2) == [1, 2]
    assert of_every_alignment(5000) == [2063, 2062, 2060, 2056, 2064]


@pytest.mark.parametrize("captures", [False, True])
def test_warming_up_leaves_nothing_that_a_request_sees(
    captures: bool, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of a runner that never ran; of pages only the padding's and a free one were written."""
    LivePlans(monkeypatch)
    cold, _ = runner_over(model, captures=captures)
    warm, _ = runner_over(model, captures=captures)
    for pages in (warm.pool.k, warm.pool.v):
        pages.zero_()
    warm_up(warm, 20, of_every_alignment(20))
    assert warm.pool.k[:, 1].any(), "a page was copied"
    assert not warm.pool.k[:, 2:].any() and not warm.pool.v[:, 2:].any()
    for plan, _ in plans(logprobs=2, presence_penalty=0.5):
        assert run(warm, plan) == run(cold, plan)


@pytest.mark.parametrize("with_experts", [False, True])
def test_adapters_as_kernel_by_kernel(
    with_experts: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of each of two adapters, and one without, whose bits are what they were. with_experts: in one tensor, as
    on a GPU."""
    LivePlans(monkeypatch)
    plain_schemes = Schemes(Plain(torch.float32), {}, {})
    model = model_of(tmp_path, EXPERTS, plain_schemes) if with_experts else model_of(tmp_path, CONFIG)
    experts = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Experts)]
    plain, _ = runner_over(model, captures=True)
    before = [run(plain, plan) for plan, _ in plans(logprobs=2)]
    sizes = 3, 8, torch.float32
    adapters = StackedAdapters(list(model.adaptable()), *sizes, CallingDevice(), experts)
    kept = {name: adapters.keep(adapter_of(model, seed)) for seed, name in enumerate("ab")}
    n_bytes = device_bytes(CallingDevice(), model.adaptable(), *sizes, experts)
    assert 0 <= adapters.n_bytes - n_bytes < n_bytes / 100
    adapters.leave_device()
    assert not adapters._numbers.nbytes and not any(bank.n_bytes for one in adapters._experts for bank in one._banks)
    adapters.enter_device()
    model.adapters = adapters

    def put(one: AdapterPut) -> None:
        adapters.put(one.place, kept[one.content_id])

    captured, device = runner_over(model, captures=True, put=put)
    eager, _ = runner_over(model, captures=False, put=put)
    n_others = 0
    for (plan, n_replays), base in zip(plans(logprobs=2), before, strict=True):
        for opened, place in zip(plan.opened, (2, 0, -1), strict=False):
            opened.adapter = place
        plan.adapters = [AdapterPut(2, "a"), AdapterPut(0, "b")] if plan.opened else []
        n_before = device.n_replays
        found, expected = run(captured, plan), run(eager, plan)
        assert found.tokens == expected.tokens, plan.step
        assert device.n_replays > n_before or not n_replays
        if 2 in plan.spans.slots:
            assert found.tokens[-1] == base.tokens[-1]
        n_others += found.tokens != base.tokens
    assert n_others >= 3


def adapter_of(model: Decoder, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        name: Pair(
            torch.randn(4 + seed, one.n_in, generator=generator) / 3,
            torch.randn(one.parts[0][1], 4 + seed, generator=generator) / 3,
        )
        for name, one in targets_of(model, with_experts=True).items()
        if len(one.parts) == 1 and name != "model.layers.0.mlp.experts.2.down_proj"
    }
    return Adapter(pairs, str(seed), 4 + seed)


def test_lines_as_kernel_by_kernel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention and experts; tokens alone are compared, as torch's products depend on the padding."""
    LivePlans(monkeypatch)
    model = model_of(tmp_path, LATENT)
    captured, device = runner_over(model, captures=True)
    eager, _ = runner_over(model, captures=False)
    for plan, n_replays in plans():
        before = device.n_replays
        assert run(captured, plan).tokens == run(eager, plan).tokens, plan.step
        assert device.n_replays - before == n_replays


def test_steps_with_a_deterministic_request_are_captured_when_they_come(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first such forward and the first such choice; a bucket that comes again is there."""
    LivePlans(monkeypatch)
    captured, device = runner_over(model, captures=True)
    given, counts = plans(deterministic=True), []
    again = StepPlan(5, **spans((0, 72, 1, True), (1, 6, 1, True), (2, 11, 1, True)))
    for plan in [*(plan for plan, _ in given), again]:
        before = device.n_captures
        run(captured, plan)
        counts.append(device.n_captures - before)
    assert counts == [2, 0, 2, 1, 0, 0]


def test_without_memory_they_go_kernel_by_kernel(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    LivePlans(monkeypatch)
    captured, device = runner_over(model, captures=True)
    eager, _ = runner_over(model, captures=False)

    def refuse(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(GraphForward, "_new_captures", refuse)
    n_replays = 0
    for plan, n_usual in plans(deterministic=True):
        assert run(captured, plan) == run(eager, plan), plan.step
        n_replays += 0 if 2 in plan.spans.slots else n_usual
    assert device.n_replays == n_replays


def test_padding_writes_to_nobody(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows in a bucket of four: page 0 and the spare slot take the fourth."""
    LivePlans(monkeypatch)
    captured, _ = runner_over(model, captures=True)
    eager, _ = runner_over(model, captures=False)
    for plan, _ in plans():
        run(captured, plan)
        run(eager, plan)
        assert torch.equal(captured.pool.k[:, 1:], eager.pool.k[:, 1:])
        assert torch.equal(captured.pool.v[:, 1:], eager.pool.v[:, 1:])
    assert captured.pool.k[:, 0].any() and not eager.pool.k[:, 0].any()


def test_logprobs_do_not_see_masks(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor penalties: of rows that are masked, one of them penalised."""
    LivePlans(monkeypatch)
    for asked in ({"logprobs": 3}, {"logprobs": 3, "presence_penalty": 0.5}):
        captured, device = runner_over(model, captures=True)
        eager, _ = runner_over(model, captures=False)
        first, _, second, *_ = (plan for plan, _ in plans(**asked))
        second = StepPlan(1, **spans((1, 3, 1, True), (2, 9, 1, True)), masked=[0, 1])
        for plan in (first, second):
            before = device.n_replays
            found = run(captured, plan)
            assert found == run(eager, plan) and device.n_replays - before == 2
        assert found.tokens[1] in (97, 99) and len(set(found.logprobs[1].rows()[0].top_ids) - {97, 99}) > 0


def test_a_history_too_long_to_compare_goes_kernel_by_kernel(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    LivePlans(monkeypatch)
    monkeypatch.setattr(sampler, "LONGEST_COMPARED", 9)
    captured, device = runner_over(model, captures=True)
    eager, _ = runner_over(model, captures=False)
    n_replays = []
    for plan, _ in plans(presence_penalty=0.5):
        before = device.n_replays
        assert run(captured, plan) == run(eager, plan), plan.step
        n_replays.append(device.n_replays - before)
    assert n_replays == [2, 0, 1, 1, 2]  # its tokens stand at 9, 10 and 11; then it is not there


@pytest.mark.parametrize("asked", [{"presence_penalty": 0.5}, {"top_p": 0.5}, {"logprobs": 2}])
def test_without_memory_for_more_than_plain_choices_they_go_kernel_by_kernel(
    asked: dict[str, Any], model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    LivePlans(monkeypatch)
    captured, device = runner_over(model, captures=True)
    eager, _ = runner_over(model, captures=False)
    real = SampledRows._capture

    def refuse(self: Any, hidden: torch.Tensor, size: int, kind: ChoiceKind) -> Any:
        if kind != ChoiceKind(truncates=False):
            raise torch.OutOfMemoryError("no memory")
        return real(self, hidden, size, kind)

    monkeypatch.setattr(SampledRows, "_capture", refuse)
    for plan, n_usual in plans(**asked):
        before = device.n_replays
        assert run(captured, plan) == run(eager, plan), plan.step
        assert device.n_replays - before == (min(n_usual, 1) if 2 in plan.spans.slots else n_usual)


def test_no_more_than_some_choices_are_captured(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    LivePlans(monkeypatch)
    monkeypatch.setattr(sampled_rows, "MOST_OTHERS", 0)
    captured, device = runner_over(model, captures=True)
    eager, _ = runner_over(model, captures=False)
    for plan, n_usual in plans(top_p=0.5):
        before = device.n_replays
        assert run(captured, plan) == run(eager, plan), plan.step
        assert device.n_replays - before == (min(n_usual, 1) if 2 in plan.spans.slots else n_usual)


def test_sampling_from_a_part_is_captured_when_it_comes(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    LivePlans(monkeypatch)
    runner, device = runner_over(model, captures=True)
    n_captures = []
    for plan, _ in plans(top_p=0.5):
        before = device.n_captures
        run(runner, plan)
        n_captures.append(device.n_captures - before)
    assert n_captures == [1, 0, 1, 0, 0]  # two rows, three of them; two again, and two that keep everything


def test_what_runs_once_to_be_captured_writes_to_nobody(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a sequence, whose last rows and their places are on the device still."""
    LivePlans(monkeypatch)
    found, real_captured, real_capture = list[set[int]](), Tail.captured, CallingDevice.capture
    capturing: list[object] = []

    def captured(self: Tail, hidden: Any, rows: Any, where: Any, *given: Any) -> Any:
        if capturing:
            found.append(set(where[0].tolist()))
        return real_captured(self, hidden, rows, where, *given)

    def capture(self: CallingDevice, launches: Any) -> Any:
        capturing.append(launches)
        replay = real_capture(self, launches)
        capturing.clear()
        return replay

    monkeypatch.setattr(Tail, "captured", captured)
    monkeypatch.setattr(CallingDevice, "capture", capture)
    runner, _ = runner_over(model, captures=True)
    n_early = len(found)
    for plan, _ in plans(top_p=0.5):
        run(runner, plan)
    assert len(found) > n_early > 0
    assert set().union(*found) == {runner.tables.spare_slot}
