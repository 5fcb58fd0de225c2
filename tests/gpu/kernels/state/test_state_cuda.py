"""Recurrent mixers on a real GPU: against float64, at the sizes of known models, poisoned lines, in graphs, long."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import state_case
import torch

from quire.kernels.state import plan_spans, reference, single_rows
from quire.kernels.state.spans import StateSpans
from quire.kernels.state.triton import launcher

pytestmark = pytest.mark.gpu

SIZES: list[tuple[str, dict[str, int]]] = [
    ("convolve", {"columns": 24}),
    ("convolve", {"columns": 8192}),
    ("convolve", {"columns": 2050, "k": 3}),
    ("scan_ssm", {"heads": 2, "groups": 1, "p": 12, "s": 20}),
    ("scan_ssm", {"heads": 80, "groups": 1, "p": 64, "s": 128}),
    ("scan_ssm", {"heads": 24, "groups": 1, "p": 64, "s": 256}),
    ("scan_delta", {"key_heads": 1, "heads": 2, "d": 20, "e": 12}),
    ("scan_delta", {"key_heads": 16, "heads": 32, "d": 128, "e": 128}),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if name == "convolve" else torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_matches_float64(name: str, sizes: dict[str, int], single: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states = states_of(name, dtype)
    case = state_case.CASES[name](single=single, **sizes).to(dtype, states).to(torch.float64, torch.float64)
    case.state[8] = torch.nan  # nobody's line
    y, state = case.run(getattr(reference, name))
    got, left = case.to(dtype, states, "cuda").run(getattr(launcher, name))
    keep = [i for i in range(len(state)) if i != 8]
    assert state_case.error(got.cpu(), y) <= reference.TOLERANCE[dtype]
    assert state_case.error(left.cpu()[keep], state[keep]) <= reference.TOLERANCE[dtype]


@pytest.mark.parametrize("name", state_case.CASES)
def test_fresh_spans_do_not_see_what_their_line_holds(name: str) -> None:
    torch.manual_seed(1)
    case = state_case.CASES[name](single=False).to(torch.float32, torch.float32, "cuda")
    y, _ = case.run(getattr(launcher, name))
    poisoned = dataclasses.replace(case, state=case.state.clone())
    poisoned.state[[0, 1, 2]] = torch.nan  # lines of the spans that begin at 0
    again, left = poisoned.run(getattr(launcher, name))
    assert torch.equal(y, again) and not left[[0, 1, 2]].isnan().any()


@pytest.mark.parametrize("name", ["scan_ssm", "scan_delta"])
def test_a_long_prompt_is_its_chunks(name: str) -> None:
    """Two chunks of 1,500 tokens, against one span, and float64."""
    torch.manual_seed(2)
    case = state_case.CASES[name](single=False, **dict(SIZES)[name])
    n, line = 3000, torch.zeros_like(case.state[:2])

    def rows(x: Any, first: int, end: int) -> Any:
        if x is None or len(x) != state_case.spans_of(False)[1]:
            return x
        return x.repeat(1 + n // len(x), *[1] * (x.dim() - 1))[first:end]

    def part(first: int, end: int, state: torch.Tensor) -> torch.Tensor:
        arrays = plan_spans(np.array([0, end - first]), np.array([1]), np.array([first]))
        spans = StateSpans(*(torch.from_numpy(one).cuda() for one in arrays))
        before = tuple(rows(x, first, end) for x in case.before)
        moved = state_case.ScanCase(before, state, spans, case.after).to(torch.bfloat16, torch.float32, "cuda")
        return getattr(launcher, name)(*moved.before, state, spans, *case.after)

    one, two = (line.float().cuda() for _ in range(2))
    whole = part(0, n, one)
    parts = torch.cat((part(0, 1500, two), part(1500, n, two)))
    assert state_case.error(parts.float().cpu(), whole.float().cpu()) <= reference.TOLERANCE[torch.bfloat16]
    assert state_case.error(two[1].cpu(), one[1].cpu()) <= reference.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", state_case.CASES)
def test_updates_can_be_captured(name: str) -> None:
    torch.manual_seed(3)
    case = state_case.CASES[name](single=True).to(torch.float32, torch.float32, "cuda")
    function, lines = getattr(launcher, name), torch.tensor([3, 0, 5, 7], device="cuda")
    positions, state = torch.tensor([4, 0, 9, 1], device="cuda"), case.state.clone()

    def step() -> torch.Tensor:
        return function(*case.before, state, single_rows(lines, positions), *case.after)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lines.copy_(torch.tensor([1, 6, 2, 8]))
    positions.copy_(torch.tensor([3, 3, 0, 3]))
    state.copy_(case.state)
    graph.replay()
    expected = case.state.clone()
    y = function(*case.before, expected, single_rows(lines, positions), *case.after)
    assert torch.equal(out, y) and torch.equal(state, expected)


def test_equal_keys_do_not_cancel() -> None:
    """A series over all rows of a piece would lose every digit here."""
    n, heads, d = 64, 2, 64
    k = torch.ones(n, 1, d)
    v, b, a = torch.randn(n, heads, d), torch.full((n, heads), 9.0), torch.full((n, heads), -30.0)
    case = state_case.ScanCase(
        (k, k, v, a, b, torch.zeros(heads), torch.zeros(heads)), torch.zeros(1, heads, d, d),
        StateSpans(*map(torch.from_numpy, plan_spans(np.array([0, n]), np.array([0]), np.array([0])))),
    )  # fmt: skip
    y, _ = case.to(torch.float64, torch.float64).run(reference.scan_delta)
    got, _ = case.to(torch.float32, torch.float32, "cuda").run(launcher.scan_delta)
    assert state_case.error(got.cpu(), y) <= reference.TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "n_weights", "first"), [(5120, 5120, True), (128, 128, False), (640, 5120, True)])
def test_gated_norm_matches_float64(dtype: torch.dtype, size: int, n_weights: int, first: bool) -> None:
    wide = torch.randn(70, 2 * 5120).to(dtype)
    weight = torch.randn(n_weights).to(dtype)
    y, gate = wide.split(5120, dim=1)
    expected = reference.norm_gated(y.double(), gate.double(), weight.double(), 1e-5, size, first)
    y, gate = wide.cuda().split(5120, dim=1)
    got = launcher.norm_gated(y, gate, weight.cuda(), 1e-5, size, first)
    assert state_case.error(got.cpu(), expected) <= reference.TOLERANCE[dtype]
