"""The judge of random traffic, judged: it takes what the reference sampler chooses, and little else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from traffic.rules import Control, explains, is_best

from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.kernels.sample import Choice, Draw, reference

CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.01, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.02},
]
WIDTH, N_ROWS = 64, 200


def chosen(control: Control, rows: np.ndarray) -> list[int]:
    """Tokens that the reference sampler takes at positions 0, 1, ..."""
    params = control.request.params
    n = len(rows)
    draw = Draw(
        temperature=np.full(n, params.temperature, np.float32),
        uniform=np.array([control.uniform(position) for position in range(n)]),
        top_k=np.full(n, params.top_k, np.int32),
        top_p=np.full(n, params.top_p, np.float32),
        min_p=np.full(n, params.min_p, np.float32),
    )
    out = Choice(torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.uint8))
    reference.choose_by(torch.from_numpy(rows), torch.from_numpy(draw.controls()), out)
    return out.token_ids.tolist()


def make_control(**fields: Any) -> Control:
    params = SamplingParams(**fields)
    return Control(Request(request_id="a", prompt_token_ids=[1], params=params, max_tokens=1, seed=3), 1)


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("error", [0.0, 1e-3, 0.3])
def test_choices_from_logits_within_the_error_are_explained(fields: dict[str, Any], error: float) -> None:
    control = make_control(**fields)
    source = np.random.default_rng(0)
    right = source.normal(0, 3, (N_ROWS, WIDTH))
    tokens = chosen(control, right + source.uniform(-error, error, right.shape))
    assert all(explains(control, x, token, i, error) for i, (x, token) in enumerate(zip(right, tokens, strict=True)))
    if error == 0:
        assert all(is_best(control, x, token, i) for i, (x, token) in enumerate(zip(right, tokens, strict=True)))


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_other_tokens_and_other_logits_are_not(fields: dict[str, Any]) -> None:
    control = make_control(**fields)
    source = np.random.default_rng(1)
    right, other = source.normal(0, 3, (2, N_ROWS, WIDTH))
    for tokens in (chosen(control, other), [(token + 1) % WIDTH for token in chosen(control, right)]):
        n_taken = sum(
            explains(control, x, token, i, 1e-3) for i, (x, token) in enumerate(zip(right, tokens, strict=True))
        )
        assert n_taken < 0.2 * N_ROWS


def test_edits_follow_the_definitions() -> None:
    params = SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={5: 3.0},
        stop_token_ids=[9], min_tokens=4,
    )  # fmt: skip
    request = Request(
        request_id="a", prompt_token_ids=[1, 2], params=params, max_tokens=9, seed=0, end_token_ids=[8],
        bad_token_seqs=[[4], [3, 7], [2, 6]],
    )  # fmt: skip
    x = Control(request, 0).edited(np.array([2.0, 2, -2, 2, 2, 2, 2, 2, 2, 2]), [1, 2, 3, 3])
    assert x.tolist() == [2.0, 1, -4, 1 - 0.5 - 0.5, -np.inf, 5, 2, -np.inf, -np.inf, -np.inf]
    allowed = SamplingParams(temperature=0, allowed_token_ids=[1, 2])
    only = Control(Request(request_id="a", prompt_token_ids=[0], params=allowed, max_tokens=1, seed=0), 0)
    assert only.edited(np.zeros(4), [0]).tolist() == [-np.inf, 0, 0, -np.inf]
