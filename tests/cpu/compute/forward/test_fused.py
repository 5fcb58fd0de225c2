"""A fused step against the same step operation by operation: the same bits, for any mix of spans."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from quire.compute.adapters.files import Adapter
from quire.compute.adapters.pairs import Pair
from quire.compute.adapters.places import LinesAdapters
from quire.compute.device.cpu import CpuDevice
from quire.compute.forward.eager import EagerForward
from quire.compute.forward.fused import FusedForward
from quire.compute.forward.obstacle import obstacle
from quire.compute.layers.experts import Experts
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.runner.batch_builder import build_batch
from quire.compute.runner.pool import KVPool
from quire.compute.runner.step import Step
from quire.compute.runner.tables import NO_WRITES, SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample import Sampler
from quire.compute.schemes.choice import choose
from quire.config.arch import ModelArch
from quire.config.experts import ExpertsSpec, RoutingSpec, Scores, SharedExpert
from quire.config.feed_forward import FeedForwardSpec
from quire.config.model import read_arch
from quire.core.plan import PageAppend, SlotOpen, SlotParams, Spans, StepPlan
from quire.kernels import native
from quire.kernels.sample import choose_by

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 200, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
QWEN3 = {
    **QWEN2, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "intermediate_size": 128, "hidden_size": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL = {**QWEN2, "architectures": ["MistralForCausalLM"], "sliding_window": 20, "hidden_size": 64}
OLMOE = {
    **QWEN2, "architectures": ["OlmoeForCausalLM"], "hidden_size": 64, "num_key_value_heads": 4, "num_experts": 8,
    "intermediate_size": 32, "num_experts_per_tok": 3, "norm_topk_prob": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
PAGE_SIZE = 8
STEPS = [  # slot, start, length, wants a token
    [(0, 0, 37, True), (1, 0, 5, False)],
    [(0, 37, 1, True), (1, 5, 60, True), (2, 0, 1, True)],
    [(0, 38, 1, True), (1, 65, 1, True), (2, 1, 1, True), (3, 0, 130, False)],
    [(3, 130, 20, False)],
    [(3, 150, 1, True)],
]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def make_model(arch: ModelArch, dtype: torch.dtype, quantization: str) -> Decoder:
    torch.manual_seed(0)
    model = decoder_on(torch.device("cpu"), arch, dtype, 256, choose(quantization, torch.device("cpu"), dtype))
    for name, tensor in model.weights():
        tensor.copy_(1 + torch.randn(tensor.shape) / 10 if "norm" in name else torch.randn(tensor.shape) / 7)
    model.finish()
    return model


class Side:
    """Pages and tables of one way to run. top_k: of all sequences; temperatures: of each slot."""

    def __init__(
        self,
        model: Decoder,
        kv_dtype: torch.dtype | None = None,
        top_k: int = 0,
        temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0),
    ) -> None:
        self.device = CpuDevice()
        self.tables = SlotTables(4, 255, PAGE_SIZE, self.device)
        self.pool = KVPool(model.arch, 100, PAGE_SIZE, kv_dtype or model.dtype, self.device)
        sampler = Sampler(4, model.arch.vocab_size, torch.device("cpu"), vocab_limit=190)
        self.tail = Tail(self.device, model, self.tables, sampler)
        self.eager = EagerForward(self.device, model, self.pool, self.tables, 64)
        rng = np.random.default_rng(0)
        pages = rng.permutation(np.arange(1, 100))
        for slot, temperature in enumerate(temperatures):
            ids = rng.integers(0, model.arch.vocab_size, 200).tolist()
            params = SlotParams(temperature, top_k, 1.0, 0.0, 0.0, 0.0, 1.0, slot, -1, -1, {}, None, [], [], 0)
            self.tables.open([SlotOpen(slot, ids, 200, params)])
            self.tail.open(SlotOpen(slot, ids, 200, params))
            self.tables.append([PageAppend(slot, 0, pages[slot * 24 : slot * 24 + 24].tolist())])

    def step(self, spans: list[tuple[int, int, int, bool]]) -> Step:
        plan = Spans()
        for span in spans:
            plan.add(*span)
        return Step(StepPlan(0, plan), build_batch(plan), NO_WRITES, [], wants_all=False)

    def fused(self, model: Decoder) -> FusedForward:
        return FusedForward(self.device, model, self.pool, self.tables, self.tail, max_rows=160, max_sampled=4)


def by_operations(model: Decoder, side: Side, spans: list[tuple[int, int, int, bool]]) -> torch.Tensor:
    """Logits of the sampled rows."""
    step = side.step(spans)
    states = side.eager.run(step)
    hidden = states.hidden[torch.from_numpy(step.batch.sampled_rows)] if states.has_all else states.hidden
    return model.logits(hidden)


@pytest.mark.parametrize(
    "config, dtype, quantization, kv_dtype",
    [
        (QWEN3, torch.bfloat16, "none", None), (QWEN3, torch.bfloat16, "int8", torch.int8),
        (QWEN2, torch.float32, "none", None), (QWEN2, torch.bfloat16, "int4", None),
        (MISTRAL, torch.float16, "none", torch.int8), (OLMOE, torch.bfloat16, "int4-g32", None),
        (OLMOE, torch.float32, "none", None),
    ],
)  # fmt: skip
def test_the_same_bits(
    tmp_path: pathlib.Path,
    config: dict[str, object],
    dtype: torch.dtype,
    quantization: str,
    kv_dtype: torch.dtype | None,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = make_model(read_arch(tmp_path), dtype, quantization)
    assert obstacle(model) is None
    expected, recorded = Side(model, kv_dtype), Side(model, kv_dtype, top_k=5, temperatures=(1.0,) * 4)
    forward = recorded.fused(model)
    for spans in STEPS:
        states = forward.run(recorded.step(spans))
        assert states is not None and states.logits is not None and not states.has_all
        assert states.choose is None or not any(span[3] for span in spans)
        assert states.logits.shape == (sum(span[3] for span in spans), model.arch.vocab_size)
        assert torch.equal(states.logits, by_operations(model, expected, spans))
        assert torch.equal(states.logits, model.logits(states.hidden))
        assert torch.equal(recorded.pool.k, expected.pool.k)
        assert torch.equal(recorded.pool.v, expected.pool.v)


def adapter_of(model: Decoder, rank: int, seed: int) -> Adapter:
    """Of most projections."""
    generator = torch.Generator().manual_seed(seed)
    parts = [(linear.matrix.n_in, part) for linear in model.adaptable() for part in linear.matrix.parts]
    pairs = {
        name: Pair(torch.randn(rank, k, generator=generator) / 4, torch.randn(rows, rank, generator=generator) / 4)
        for number, (k, (name, rows)) in enumerate(parts)
        if (number + seed) % 5
    }
    return Adapter(pairs, "", rank)


@pytest.mark.parametrize("config, dtype, quantization", [
    (QWEN3, torch.bfloat16, "none"), (QWEN2, torch.float32, "int8"), (MISTRAL, torch.float16, "none"),
    (OLMOE, torch.float32, "none"),
])  # fmt: skip
def test_the_same_bits_with_adapters(
    tmp_path: pathlib.Path, config: dict[str, object], dtype: torch.dtype, quantization: str
) -> None:
    """Slots with two of them, with none and with an empty place; the rows of the last two are what they are without."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = make_model(read_arch(tmp_path), dtype, quantization)
    plain = Side(model)
    before = [by_operations(model, plain, spans) for spans in STEPS]
    model.adapters = adapters = LinesAdapters(list(model.adaptable()), 3, dtype)
    for place, rank in ((0, 5), (2, 16)):
        adapters.put(place, adapters.keep(adapter_of(model, rank, place)))
    places = np.array([2, -1, 0, 1], np.int32)
    expected, recorded = Side(model), Side(model, top_k=5, temperatures=(1.0,) * 4)
    forward = recorded.fused(model)
    n_others = 0
    for spans, base in zip(STEPS, before, strict=True):
        steps = [side.step(spans) for side in (expected, recorded)]
        for step in steps:
            step.adapters = places[step.batch.row_slots]
        states = forward.run(steps[1])
        assert states is not None and states.logits is not None
        hidden = expected.eager.run(steps[0]).hidden[torch.from_numpy(steps[0].batch.sampled_rows)]
        assert torch.equal(states.logits, model.logits(hidden))
        assert torch.equal(recorded.pool.k, expected.pool.k) and torch.equal(recorded.pool.v, expected.pool.v)
        without = np.isin(steps[0].batch.sampled_slots, (1, 3))
        assert torch.equal(states.logits[without], base[without])
        n_others += int((states.logits != base).any(1).sum())
    assert n_others == 5


def test_an_expert_for_all_tokens_beside_those_chosen(tmp_path: pathlib.Path) -> None:
    """Sigmoids, groups and a correction, before a layer without experts."""
    (tmp_path / "config.json").write_text(json.dumps(OLMOE))
    arch = read_arch(tmp_path)
    first, second = arch.layers
    assert isinstance(second.ffn, ExpertsSpec)
    routing = RoutingSpec(
        n_chosen=2, scores=Scores.SIGMOID, renormalise=True, scale=1.5, n_groups=4, n_chosen_groups=2, n_group_best=2
    )
    experts = replace(second.ffn, routing=routing, correction_bias=True, shared=SharedExpert(size=48))
    layers = replace(first, ffn=experts), replace(second, ffn=FeedForwardSpec(size=96))
    model = make_model(replace(arch, layers=layers), torch.bfloat16, "int8")
    assert obstacle(model) is None
    expected, recorded = Side(model), Side(model, top_k=5, temperatures=(1.0,) * 4)
    forward = recorded.fused(model)
    (load,) = (layer.ffn.load for layer in model.layers if isinstance(layer.ffn, Experts))
    part = replace(experts, are_apart=True).share(1, 2)
    assert not make_model(replace(arch, layers=(replace(first, ffn=part),)), torch.bfloat16, "int8").is_plain
    for spans in STEPS:
        before = load.clone()
        states = forward.run(recorded.step(spans))
        ours, before = load - before, load.clone()
        assert states is not None and states.logits is not None
        assert torch.equal(states.logits, by_operations(model, expected, spans))
        assert torch.equal(load - before, ours) and int(ours.sum()) == 2 * sum(n for _, _, n, _ in spans)


def test_tokens_chosen_in_the_same_call(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model = make_model(read_arch(tmp_path), torch.bfloat16, "none")
    temperatures = (0.0, 1.5, 0.7, 0.0)
    apart, together = Side(model), Side(model, temperatures=temperatures)
    forward = together.fused(model)
    for spans in STEPS:
        step = together.step(spans)
        states = forward.run(step)
        controls = together.tail.controls(step)
        assert states is not None and states.choose is not None and controls is not None
        choice = states.choose(None)
        expected = choose_by(by_operations(model, apart, spans)[:, :190], torch.from_numpy(controls))
        assert torch.equal(choice.token_ids, expected.token_ids)
        assert not choice.status.any() and bool((choice.token_ids < 190).all())
        written = together.tables.tokens[
            torch.from_numpy(step.batch.sampled_slots), torch.from_numpy(step.batch.sampled_positions)
        ]
        assert torch.equal(written, choice.token_ids)
        for side in (apart, together):  # the sequences go on with the tokens that they were made with
            side.tables.tokens.copy_(Side(model).tables.tokens)


def test_states_of_other_rows_are_for_another_strategy(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model = make_model(read_arch(tmp_path), torch.bfloat16, "none")
    side = Side(model)
    step = side.step(STEPS[0])
    step.wants_all = True
    forward = side.fused(model)
    assert forward.run(step) is None and forward.ready(step, 0.0) is None
    assert not side.pool.k.any()


def test_calls_that_were_made_before_their_turn(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model = make_model(read_arch(tmp_path), torch.bfloat16, "none")
    found = []
    for n_ahead in (1, 4):
        side = Side(model)
        forward = side.fused(model)
        forward.run(side.step([(0, 0, 37, True), (1, 0, 50, True)]))
        plans = [[(0, 37 + i, 1, True), (1, 50 + i, 1, True)] for i in range(8)]
        tokens = []
        for at in range(0, len(plans), n_ahead):
            ready = [forward.ready(side.step(one), 0.0) for one in plans[at : at + n_ahead]]
            for one in ready:
                assert one is not None
                one.compute()
                one.hurry()
            tokens += [one.result().tokens for one in ready if one is not None]
        found.append(tokens)
    assert found[0] == found[1] and len({tuple(pair) for pair in found[0]}) > 1


def test_an_unpacked_model_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    model = decoder_on(torch.device("cpu"), read_arch(tmp_path), torch.float32, 256)
    assert "matrices that are kept as float32 are multiplied from Python" in (obstacle(model) or "")
