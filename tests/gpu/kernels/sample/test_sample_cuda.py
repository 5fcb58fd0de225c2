"""Sampling on a GPU: kernels against the oracle, rows in different batches, and no wait for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.sample import Sampler
from quire.core.plan import SlotOpen, SlotParams
from quire.kernels.sample import Choice, Draw, choose, reference

pytestmark = pytest.mark.gpu

FEATURES = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e-5},
    {"top_k": 7},
    {"top_k": 900},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"min_p": 0.01, "top_k": 40, "top_p": 0.9},
]


def make_draw(n_rows: int, features: list[dict[str, float]]) -> Draw:
    defaults = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    fields = [defaults | features[i % len(features)] for i in range(n_rows)]
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    columns = {name: np.array([one[name] for one in fields], kind) for name, kind in kinds.items()}
    return Draw(uniform=np.random.default_rng(n_rows).random(n_rows), **columns)


@pytest.mark.parametrize("width", [5, 4096, 32000, 151936])
def test_kernels_equal_the_oracle(width: int) -> None:
    logits = torch.randn(32, width, device="cuda", generator=torch.Generator("cuda").manual_seed(width)) * 4
    logits[9] = (logits[9] * 2).round()
    logits[10, width // 2], logits[11, 0], logits[12] = torch.nan, torch.inf, -torch.inf
    draw = make_draw(32, FEATURES)
    controls = draw.controls()
    choice, expected = (
        choose(logits, draw),
        Choice(torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.uint8)),
    )
    reference.choose_by(logits, torch.from_numpy(controls), expected)
    assert torch.equal(choice.status.cpu(), expected.status)
    for i in (choice.token_ids.cpu() != expected.token_ids).nonzero()[:, 0].tolist():
        row = logits[i].cpu()
        probabilities = reference.distribution(row, controls[:, i])
        low, high = sorted([int(choice.token_ids[i]), int(expected.token_ids[i])])
        steps = probabilities.cumsum(0)[low:high]
        assert (steps - draw.uniform[i]).abs().max() < reference.TOLERANCE, i


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(64, 151936, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 2
    draw = make_draw(64, FEATURES)
    together = choose(logits, draw).token_ids.tolist()
    for i in range(64):
        assert int(choose(logits[i : i + 1].clone(), draw.take(np.array([i]))).token_ids) == together[i]
    assert choose(logits[:17].clone(), draw.take(np.arange(17))).token_ids.tolist() == together[:17]


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
