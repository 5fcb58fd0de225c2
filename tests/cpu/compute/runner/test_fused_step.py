"""A fused step against the same step operation by operation: the same bits, for any mix of spans."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.compute.device.cpu import CpuDevice
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.quant import SCHEMES
from quire.compute.runner import fused_step
from quire.compute.runner.batch_builder import FlatBatch, build_batch
from quire.compute.runner.fused_step import FusedDecoder
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.config.arch import ModelArch
from quire.config.model import read_arch
from quire.core.plan import PageAppend, SlotOpen, SlotParams, Spans
from quire.kernels import native
from quire.kernels.sample import Draw, choose_by

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 200, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
QWEN3 = {
    **QWEN2, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "intermediate_size": 128, "hidden_size": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL = {**QWEN2, "architectures": ["MistralForCausalLM"], "sliding_window": 20, "hidden_size": 64}
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
    scheme = SCHEMES[quantization]
    model = decoder_on(torch.device("cpu"), arch, dtype, 256, scheme)
    for name, tensor in model.weights():
        tensor.copy_(1 + torch.randn(tensor.shape) / 10 if "norm" in name else torch.randn(tensor.shape) / 7)
    model.pack()
    return model


class Side:
    """Pages and tables of one way to run."""

    def __init__(self, model: Decoder, kv_dtype: torch.dtype | None = None) -> None:
        self.device = CpuDevice()
        self.tables = SlotTables(4, 255, PAGE_SIZE, self.device)
        self.pool = KVPool(model.arch, 100, PAGE_SIZE, kv_dtype or model.dtype, self.device)
        params = SlotParams(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, -1, {}, None, [], [], 0)
        rng = np.random.default_rng(0)
        pages = rng.permutation(np.arange(1, 100))
        for slot in range(4):
            ids = rng.integers(0, model.arch.vocab_size, 200).tolist()
            self.tables.open([SlotOpen(slot, ids, 200, params)])
            self.tables.append([PageAppend(slot, 0, pages[slot * 24 : slot * 24 + 24].tolist())])

    def batch(self, spans: list[tuple[int, int, int, bool]]) -> tuple[FlatBatch, np.ndarray]:
        plan = Spans()
        for span in spans:
            plan.add(*span)
        batch = build_batch(plan)
        return batch, self.tables.cache_locs(batch.row_slots, batch.row_positions)


def by_operations(model: Decoder, side: Side, spans: list[tuple[int, int, int, bool]]) -> torch.Tensor:
    batch, cache_locs = side.batch(spans)
    plan = plan_attention(side.pool, side.tables, batch.kv_lens, batch.span_slots, batch.q_indptr)
    slots, positions = torch.from_numpy(batch.row_slots), torch.from_numpy(batch.row_positions)
    context = PagedContext(side.pool, plan, torch.from_numpy(cache_locs))
    hidden = model.forward(side.tables.tokens[slots, positions], positions, context)
    return model.logits(hidden[torch.from_numpy(batch.sampled_rows)])


@pytest.mark.parametrize(
    "config, dtype, quantization, kv_dtype",
    [
        (QWEN3, torch.bfloat16, "none", None), (QWEN3, torch.bfloat16, "int8", torch.int8),
        (QWEN2, torch.float32, "none", None), (QWEN2, torch.bfloat16, "int4", None),
        (MISTRAL, torch.float16, "none", torch.int8),
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
    assert fused_step.obstacle(model) is None
    expected, recorded = Side(model, kv_dtype), Side(model, kv_dtype)
    steps = FusedDecoder(
        recorded.device, model, recorded.pool, recorded.tables, vocab_limit=190, max_rows=160, max_num_seqs=4
    )
    for spans in STEPS:
        logits = steps.run(recorded.batch(spans)[0])
        assert logits.shape == (sum(span[3] for span in spans), model.arch.vocab_size)
        assert torch.equal(logits, by_operations(model, expected, spans))
        assert torch.equal(recorded.pool.k, expected.pool.k)
        assert torch.equal(recorded.pool.v, expected.pool.v)


def test_tokens_chosen_in_the_same_call(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model = make_model(read_arch(tmp_path), torch.bfloat16, "none")
    apart, together = Side(model), Side(model)
    sizes = {"vocab_limit": 190, "max_rows": 160, "max_num_seqs": 4}
    logits_of = FusedDecoder(apart.device, model, apart.pool, apart.tables, **sizes)
    tokens_of = FusedDecoder(together.device, model, together.pool, together.tables, **sizes)
    for spans in STEPS:
        batch, m = together.batch(spans)[0], sum(span[3] for span in spans)
        controls = Draw(
            temperature=np.array([0.0, 1.5, 0.7][:m], np.float32), uniform=np.array([0.0, 0.99, 0.4][:m]),
            top_k=np.zeros(m, np.int32), top_p=np.ones(m, np.float32), min_p=np.zeros(m, np.float32),
        ).controls()  # fmt: skip
        call, choice = tokens_of.choosing(batch, controls)
        call.run()
        expected = choose_by(logits_of.run(batch)[:, :190], torch.from_numpy(controls))
        assert torch.equal(choice.token_ids, expected.token_ids)
        assert not choice.status.any() and bool((choice.token_ids < 190).all())
        written = together.tables.tokens[
            torch.from_numpy(batch.sampled_slots), torch.from_numpy(batch.sampled_positions)
        ]
        assert torch.equal(written, choice.token_ids)
        for side in (apart, together):  # the sequences go on with the tokens that they were made with
            side.tables.tokens.copy_(Side(model).tables.tokens)


def test_calls_that_were_made_before_their_turn(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model = make_model(read_arch(tmp_path), torch.bfloat16, "none")
    found = []
    for n_ahead in (1, 4):
        side = Side(model)
        steps = FusedDecoder(side.device, model, side.pool, side.tables, vocab_limit=190, max_rows=160, max_num_seqs=4)
        steps.run(side.batch([(0, 0, 37, True), (1, 0, 50, True)])[0])
        plans = [[(0, 37 + i, 1, True), (1, 50 + i, 1, True)] for i in range(8)]
        tokens = []
        for at in range(0, len(plans), n_ahead):
            calls = [steps.choosing(side.batch(one)[0], np.zeros((5, 2))) for one in plans[at : at + n_ahead]]
            for call, _ in calls:
                call.leave_a_core()
                call.run()
                call.spread()
            tokens += [choice.token_ids.tolist() for _, choice in calls]
        found.append(tokens)
    assert found[0] == found[1] and len({tuple(pair) for pair in found[0]}) > 1


def test_an_unpacked_model_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    model = decoder_on(torch.device("cpu"), read_arch(tmp_path), torch.float32, 256)
    assert "packed" in (fused_step.obstacle(model) or "")
