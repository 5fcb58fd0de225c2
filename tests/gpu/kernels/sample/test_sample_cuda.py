"""Sampling on a GPU: kernels against the oracle, rows in different batches, and no wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.sample import Sampler
from quire.compute.sample.sampler import ChoiceKind
from quire.core.plan import SlotOpen, SlotParams
from quire.kernels.catalog import hopper_obstacle
from quire.kernels.sample import (
    N_CONTROLS,
    N_HISTORY,
    Choice,
    Draw,
    TokenMasks,
    choose,
    choose_by,
    hopper,
    penalise,
    reference,
)

pytestmark = pytest.mark.gpu

FEATURES = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e-5},
    {"top_k": 7},
    {"top_k": 900},
    {"top_p": 0.8},
    {"top_k": 3000},
    {"min_p": 0.1},
    {"min_p": 1e-12, "top_k": 20000, "top_p": 0.95},
    {"min_p": 0.01, "top_k": 40, "top_p": 0.9},
]


def make_draw(n_rows: int, features: list[dict[str, float]]) -> Draw:
    defaults = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    fields = [defaults | features[i % len(features)] for i in range(n_rows)]
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    columns = {name: np.array([one[name] for one in fields], kind) for name, kind in kinds.items()}
    return Draw(uniform=np.random.default_rng(n_rows).random(n_rows), **columns)


def make_logits(n_rows: int, width: int, kind: str) -> torch.Tensor:
    """Few logits that matter, thousands, all of them, or many equal ones."""
    generator = torch.Generator("cuda").manual_seed(width)
    normal = torch.randn(n_rows, width, device="cuda", generator=generator)
    return {"peaked": normal * 4, "wide": normal, "flat": normal * 0.02, "ties": (normal * 2).round()}[kind]


def empty_choice(n_rows: int, device: str = "cuda") -> Choice:
    ids = torch.full((n_rows,), -1, dtype=torch.int32, device=device)
    return Choice(ids, torch.full((n_rows,), 9, dtype=torch.uint8, device=device))


def assert_agrees(choice: Choice, logits: torch.Tensor, draw: Draw) -> None:
    """Tokens equal the oracle's, or the random number lies on a step of the oracle's cumulative distribution."""
    controls, expected = draw.controls(), empty_choice(len(draw), "cpu")
    reference.choose_by(logits, torch.from_numpy(controls), expected)
    assert torch.equal(choice.status.cpu(), expected.status)
    for i in (choice.token_ids.cpu() != expected.token_ids).nonzero()[:, 0].tolist():
        probabilities = reference.distribution(logits[i].cpu(), controls[:, i])
        low, high = sorted([int(choice.token_ids[i]), int(expected.token_ids[i])])
        steps = probabilities.cumsum(0)[low:high]
        assert (steps - draw.uniform[i]).abs().max() < reference.TOLERANCE, i


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["peaked", "wide", "flat", "ties"])
@pytest.mark.parametrize("width", [5, 4096, 32000, 151936])
def test_kernels_equal_the_oracle(width: int, kind: str, dtype: torch.dtype) -> None:
    logits, draw = make_logits(36, width, kind).to(dtype), make_draw(36, FEATURES)
    logits[9] = (logits[9] * 2).round()
    logits[10, width // 2], logits[11, 0], logits[12] = torch.nan, torch.inf, -torch.inf
    assert_agrees(choose(logits, draw), logits, draw)


@pytest.mark.parametrize(("width", "n_words"), [(151936, 4748), (151936, 4740), (9001, 282)])
def test_masks_leave_what_they_allow(width: int, n_words: int) -> None:
    logits, draw = make_logits(12, width, "wide"), make_draw(12, FEATURES)
    generator = torch.Generator("cuda").manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (5, n_words), device="cuda", generator=generator).to(torch.int32)
    lines = torch.tensor([0, -1, 1, 2, -1, 3, 4, -1, -1, 0, 0, 1], dtype=torch.int32, device="cuda")
    spread = ((bits[:, :, None] >> torch.arange(32, device="cuda")) & 1).view(5, -1)[:, :width] != 0
    spread = torch.nn.functional.pad(spread, (0, width - spread.shape[1]))
    expected = torch.where(spread[lines.long()] | (lines < 0)[:, None], logits, -torch.inf)
    controls = torch.from_numpy(draw.controls()).cuda()
    choice = choose_by(logits, controls, masks=TokenMasks(lines, bits))
    assert torch.equal(logits, expected)
    assert_agrees(choice, expected, draw)


@pytest.mark.parametrize("width", [151936, 9001])
def test_a_row_does_not_depend_on_its_neighbours(width: int) -> None:
    logits = torch.cat([make_logits(32, width, kind) for kind in ("peaked", "flat")])
    draw = make_draw(64, FEATURES)
    together = choose(logits, draw).token_ids.tolist()
    for i in range(64):
        assert int(choose(logits[i : i + 1].clone(), draw.take(np.array([i]))).token_ids) == together[i]
    assert choose(logits[:17].clone(), draw.take(np.arange(17))).token_ids.tolist() == together[:17]


@pytest.mark.parametrize("width", [9001, 9008])
def test_a_narrow_dtype_gives_the_tokens_of_float32(width: int) -> None:
    logits, draw = torch.cat([make_logits(20, width, kind) for kind in ("peaked", "flat")]), make_draw(40, FEATURES)
    if hopper_obstacle() is None:
        taken = [hopper.obstacle(logits.to(dtype)) is None for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        assert taken == [width == 9008] * 3
    for dtype in (torch.bfloat16, torch.float16):
        narrow = logits.to(dtype)
        assert torch.equal(choose(narrow, draw).token_ids, choose(narrow.float(), draw).token_ids)


def test_a_captured_graph_serves_any_controls_and_logits() -> None:
    n_rows, width = 12, 32000
    buffer, logits = torch.zeros(N_CONTROLS, 64, dtype=torch.float64, device="cuda"), torch.zeros(n_rows, width).cuda()
    controls, out = buffer[:, 3 : 3 + n_rows], empty_choice(n_rows)
    choose_by(logits, controls, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_by(logits, controls, out)
    for turn, kind in enumerate(("peaked", "flat", "ties", "wide")):
        draw = make_draw(n_rows, FEATURES[turn:] + FEATURES[:turn])
        logits.copy_(make_logits(n_rows, width, kind))
        controls.copy_(torch.from_numpy(draw.controls()))
        graph.replay()
        eager = choose(logits, draw)
        assert torch.equal(out.token_ids, eager.token_ids)
        assert torch.equal(out.status, eager.status)
        assert_agrees(out, logits, draw)


def test_a_captured_choice_serves_any_histories() -> None:
    """Penalties and logprobs of rows that had neither when it was captured, bit for bit."""
    n_rows, width, longest = 12, 32000, 300
    rng, device = np.random.default_rng(3), torch.device("cuda")
    sampler = Sampler(n_rows, width, device, vocab_limit=31990)
    tokens = torch.from_numpy(rng.integers(0, 900, (n_rows, 5000)).astype(np.int32)).cuda()
    logits = torch.zeros(n_rows, width, dtype=torch.bfloat16, device=device)
    controls = torch.zeros(N_CONTROLS, n_rows, dtype=torch.float64, device=device)
    histories = torch.zeros(N_HISTORY, 64, dtype=torch.float64, device=device)[:, :n_rows]
    masks = TokenMasks(torch.full((n_rows,), -1, dtype=torch.int32, device=device), torch.zeros(1, 1000).int().cuda())
    choice, kind = empty_choice(n_rows), ChoiceKind(truncates=True, changes=True, n_top=5)
    given = logits, controls, choice, masks, kind, histories, tokens
    sampler.keep_wide(n_rows)
    sampler.choose_captured(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sampler.choose_captured(*given)
    slots = np.arange(n_rows)
    for turn in range(3):
        for slot in range(n_rows):
            params = SlotParams(
                0.8, 0, 1.0, 0.05, 0.5 * (slot % 2), 0.0, 1 + turn / 10, slot, 5, -1, {}, None, [], [], 0
            )
            sampler.open(SlotOpen(slot, [0], 10, params))
        positions, host = rng.integers(20, longest, n_rows), np.zeros((N_HISTORY, n_rows))
        sampler.histories(slots, positions, host)
        histories.copy_(torch.from_numpy(host))
        controls.copy_(torch.from_numpy(sampler.controls(slots, positions)))
        raw = torch.randn(n_rows, width, device=device).to(torch.bfloat16)
        logits.copy_(raw)
        graph.replay()
        eager = sampler.sample(raw, slots, positions, tokens)
        assert eager.logprobs is not None
        assert torch.equal(choice.token_ids, eager.token_ids) and torch.equal(choice.status, eager.status)
        assert torch.equal(found, eager.logprobs.cells)


def test_a_step_never_waits_for_the_device() -> None:
    width, n_rows = 5000, 8
    sampler = Sampler(n_rows, width, torch.device("cuda"), vocab_limit=4900)
    tokens = torch.zeros(n_rows, 64, dtype=torch.int32, device="cuda")
    for slot in range(n_rows):
        params = SlotParams(
            temperature=0.8 * (slot % 2), top_k=20, top_p=0.9, min_p=0.01, presence_penalty=0.5, frequency_penalty=0.1,
            repetition_penalty=1.1, seed=slot, logprobs=slot % 3 - 1, prompt_logprobs=-1, logit_bias={3: 1.0},
            allowed_token_ids=list(range(50)) if slot == 3 else None, bad_token_seqs=[[1], [0, 0, 2]],
            masked_end_ids=[7], masked_until=40,
        )  # fmt: skip
        sampler.open(SlotOpen(slot, [0], 1, params))
    logits = torch.randn(n_rows, width, device="cuda")
    sampler.sample(logits.clone(), np.arange(n_rows), np.full(n_rows, 30), tokens)
    copy = logits.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = sampler.sample(copy, np.arange(n_rows), np.full(n_rows, 30), tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sampled.ok.all()
    assert (sampled.token_ids < 4900).all()


@pytest.mark.parametrize("longest", [1, 130, 2000, 4100])
def test_penalties_are_those_of_the_reference(longest: int) -> None:
    """Compared with each other, and counted in a table where that is too much."""
    rng, n, width = np.random.default_rng(longest), 40, 3000
    positions = rng.integers(0, longest + 1, n)
    positions[0] = longest
    tokens = torch.from_numpy(rng.integers(0, width, (n + 3, longest + 1)).astype(np.int32)).cuda()
    spans = np.stack([rng.permutation(n + 1)[:n], rng.permutation(n + 3)[:n], positions, positions // 3])
    strengths = np.stack([rng.choice([0.7, 1.3], n), rng.choice([-1, 0.4], n), rng.choice([-0.5, 2], n)])
    logits = torch.randn(n + 1, width)
    found = logits.cuda()
    histories = torch.from_numpy(np.concatenate([spans, strengths.astype(np.float32)]).astype(np.float64))
    penalise(found, histories.cuda(), tokens, longest)
    reference.penalise(logits, histories, tokens.cpu(), longest)
    torch.testing.assert_close(found.cpu(), logits, rtol=1e-5, atol=1e-5)
