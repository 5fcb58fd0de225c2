"""Early exit: keys and values of skipped layers have the bits of the whole model; which tokens leave, and with what."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import torch
from test_fused import PAGE_SIZE, QWEN3, STEPS, Side, make_model

from quire.compute.forward.early_exit import MOST_WAITING, EarlyExitForward, ExitRule, exit_obstacle
from quire.compute.models.decoder import Decoder
from quire.config.model import read_arch
from quire.core.errors import EngineError
from quire.core.plan import PageCopy
from quire.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")

N_LAYERS, LAYER, PROMPTS = 4, 2, [(0, 0, 37, True), (1, 0, 50, True)]
NEVER, ALWAYS = 1.1, 0.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": N_LAYERS}))
    return make_model(read_arch(folder), torch.bfloat16, "none")


def forward_of(model: Decoder, side: Side, threshold: float) -> EarlyExitForward:
    rule = ExitRule(LAYER, threshold)
    return EarlyExitForward(side.device, model, side.pool, side.tables, side.tail, rule, max_rows=160)


def decode(at: int) -> list[tuple[int, int, int, bool]]:
    return [(0, 37 + at, 1, True), (1, 50 + at, 1, True)]


@torch.inference_mode()
def test_none_leaves(model: Decoder) -> None:
    plain, early = Side(model), Side(model)
    forward, expected = forward_of(model, early, NEVER), plain.fused(model)
    for spans in STEPS:
        states, wanted = forward.run(early.step(spans)), expected.run(plain.step(spans))
        assert wanted is not None and torch.equal(states.logits, wanted.logits)
        assert torch.equal(early.tables.tokens, plain.tables.tokens)
        assert torch.equal(early.pool.k, plain.pool.k) and torch.equal(early.pool.v, plain.pool.v)
    assert forward.n_exits == 0 < forward.n_tokens


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_layers_above_are_caught_up_exactly(model: Decoder, temperature: float) -> None:
    """Tokens leave for some steps, then none does: the pages are those of all layers on the same tokens."""
    early, plain = (Side(model, temperatures=(temperature,) * 4) for _ in range(2))
    forward, whole = forward_of(model, early, ALWAYS), plain.fused(model)
    forward.run(early.step(PROMPTS))
    for at in range(5):
        states = forward.run(early.step(decode(at)))
        assert states.choose is not None and bool((states.choose(None).status == 0).all())
    lower, upper = slice(0, LAYER), slice(LAYER, None)
    forward._rule = ExitRule(LAYER, NEVER)
    last = forward.run(early.step(decode(5)))
    plain.tables.tokens.copy_(early.tables.tokens)
    expected = None
    for spans in (PROMPTS, *(decode(at) for at in range(6))):
        kept = plain.tables.tokens.clone()
        expected = whole.run(plain.step(spans))
        plain.tables.tokens.copy_(kept)  # the sequence is the one that was made with exits
    assert expected is not None
    for part in (lower, upper):
        assert torch.equal(early.pool.k[part], plain.pool.k[part])
        assert torch.equal(early.pool.v[part], plain.pool.v[part])
    assert torch.equal(last.logits, expected.logits)
    assert (forward.n_tokens, forward.n_exits) == (12, 10)


@torch.inference_mode()
def test_one_leaves_and_one_goes_on(model: Decoder) -> None:
    """The threshold lies between the two: each has the logits of its own layer."""
    early, plain = Side(model), Side(model)
    forward_of(model, early, NEVER).run(early.step(PROMPTS))
    expected = plain.fused(model)
    expected.run(plain.step(PROMPTS))
    tokens = early.tables.tokens.clone()
    probe = forward_of(model, early, ALWAYS)
    first = probe.run(early.step(decode(0)))
    sure = probe._confidence(first.logits)
    early.tables.tokens.copy_(tokens)
    both = forward_of(model, early, float(sure.mean()))
    states = both.run(early.step(decode(0)))
    whole = expected.run(plain.step(decode(0)))
    assert whole is not None and whole.logits is not None
    leaves, goes = int(np.argmax(sure)), int(np.argmin(sure))
    assert torch.equal(states.logits[goes], whole.logits[goes])
    assert torch.equal(states.logits[leaves], first.logits[leaves])
    assert not torch.equal(states.logits[leaves], whole.logits[leaves])
    assert states.choose is not None
    assert states.choose(None).token_ids.tolist() == states.logits[:, :190].argmax(-1).tolist()


@torch.inference_mode()
def test_states_of_all_rows(model: Decoder) -> None:
    """A text's rows leave each by its own confidence; the head makes of their states the logits of their layers."""
    sides = [Side(model) for _ in range(3)]

    def logits(side: Side, threshold: float) -> torch.Tensor:
        step = side.step([(0, 0, 60, True)])
        step.wants_all = True
        states = forward_of(model, side, threshold).run(step)
        assert states.has_all and states.choose is None and states.logits is None
        return model.logits(states.hidden)

    whole, inner = logits(sides[0], NEVER), logits(sides[1], ALWAYS)
    known = inner[:, :190]
    sure = (known.amax(-1) - known.logsumexp(-1)).exp()
    threshold = float(sure.median())
    mixed = logits(sides[2], threshold)
    assert torch.equal(mixed, torch.where((sure >= threshold)[:, None], inner, whole))
    assert not torch.equal(mixed, whole) and not torch.equal(mixed, inner)
    for side in sides[1:]:
        assert torch.equal(side.pool.k, sides[0].pool.k)  # whatever leaves


@torch.inference_mode()
def test_a_sequence_that_leaves_for_long_goes_on_once(model: Decoder) -> None:
    side = Side(model)
    forward = forward_of(model, side, ALWAYS)
    forward.run(side.step(PROMPTS))
    for at in range(MOST_WAITING + 2):
        forward.run(side.step(decode(at)[:1]))
    assert (forward.n_tokens, forward.n_exits) == (MOST_WAITING + 2, MOST_WAITING + 1)
    upper = side.pool.k[LAYER]
    pages = side.tables.host_pages[0, 0]
    last = 37 + MOST_WAITING
    assert upper[int(pages[last // PAGE_SIZE]), :, last % PAGE_SIZE].any()
    assert not upper[int(pages[(last + 1) // PAGE_SIZE]), :, (last + 1) % PAGE_SIZE].any()


@torch.inference_mode()
def test_what_it_refuses(model: Decoder, tmp_path: pathlib.Path) -> None:
    side = Side(model)
    step = side.step(decode(0))
    step.plan.copies.append(PageCopy(1, 2, 3))
    with pytest.raises(EngineError, match="without copied pages"):
        forward_of(model, side, ALWAYS).run(step)
    for layer in (0, N_LAYERS):
        assert f"the model has {N_LAYERS}" in (exit_obstacle(model, ExitRule(layer, 0.5)) or "")
    assert exit_obstacle(model, ExitRule(LAYER, 0.5)) is None


@torch.inference_mode()
def test_a_slot_that_closes_has_nothing_waiting(model: Decoder) -> None:
    side = Side(model)
    forward = forward_of(model, side, ALWAYS)
    for spans in (PROMPTS, decode(0), decode(1)):
        forward.run(side.step(spans))
    step = side.step(decode(2)[1:])
    step.plan.closed.append(0)
    forward.run(step)
    assert forward._n_waiting.tolist() == [0, 3, 0, 0]
