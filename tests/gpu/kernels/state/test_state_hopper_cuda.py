"""Updates of the delta rule in CUDA C++ on a real GPU: against float64, through the op, in graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import state_case
import torch

from quire.kernels import hopper as machine
from quire.kernels.state import hopper, plan_spans, reference, scan_delta, single_rows, spans_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(machine.machine_obstacle() is not None, reason=f"needs Hopper: {machine.machine_obstacle()}"),
]
SHAPE = {"key_heads": 16, "heads": 32, "d": 128, "e": 128}


def case_of(dtype: torch.dtype, *, single: bool = True) -> state_case.ScanCase:
    """Values that this type has; decays in float32, as models have them; lines of fresh spans full of NaN."""
    case = state_case.delta_case(single=single, **SHAPE).to(dtype, torch.float32, "cuda")
    case.state[case.spans.lines[case.spans.fresh != 0].long()] = torch.nan
    return dataclasses.replace(case, before=(*case.before[:5], *(one.float() for one in case.before[5:])))


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("dtype", hopper.DTYPES, ids=str)
def test_matches_float64(dtype: torch.dtype, single: bool) -> None:
    torch.manual_seed(0)
    case = case_of(dtype, single=single)
    assert hopper.obstacle(*case.before, case.state, case.spans) is None
    y, state = case.to(torch.float64, torch.float64, "cuda").run(reference.scan_delta)
    got, left = case.run(scan_delta)
    used = case.spans.lines.tolist()
    if case.spans.keep is not None:
        used += [line for line in case.spans.keep.tolist() if line >= 0]
    assert state_case.error(got, y) <= reference.TOLERANCE[dtype]
    assert state_case.error(left[used], state[used]) <= (1e-5 if single else reference.TOLERANCE[dtype])
    others = [i for i in range(len(state)) if i not in used]
    assert torch.equal(left[others], case.state[others])


def test_long_prompts_in_chunks() -> None:
    """Five prompts of 1,000 to 3,000 rows, at once and in two steps each, against float64."""
    torch.manual_seed(2)
    lengths = np.array([1000, 1500, 2048, 2999, 3000])
    indptr, halves = np.array([0, *lengths.cumsum()]), lengths // 2
    n, heads, keys = int(indptr[-1]), SHAPE["heads"], SHAPE["key_heads"]
    q, k, v = (torch.randn(n, h, 128, device="cuda").bfloat16() for h in (keys, keys, heads))
    a, b = (torch.randn(n, heads, device="cuda").bfloat16() for _ in range(2))
    decays = [torch.randn(heads, device="cuda") for _ in range(2)]
    begun = torch.randn(len(lengths), heads, 128, 128, device="cuda")

    def run(function: Callable[..., torch.Tensor], first: np.ndarray, end: np.ndarray, state: torch.Tensor) -> Any:
        """Rows `first` .. `end` of each prompt."""
        rows = np.concatenate([indptr[i] + np.arange(first[i], end[i]) for i in range(len(lengths))])
        at = torch.from_numpy(rows).cuda()
        arrays = plan_spans(np.array([0, *(end - first).cumsum()]), np.arange(len(lengths)), first + 1)
        spans = spans_of([torch.from_numpy(one).cuda() for one in arrays])
        wide = [one.to(state.dtype) for one in decays]
        given = [one[at].double() if state.dtype is torch.float64 else one[at] for one in (q, k, v, a, b)]
        return at, function(*given, *wide, state, spans)

    none, expected = np.zeros_like(lengths), begun.double()
    _, y = run(reference.scan_delta, none, lengths, expected)
    whole, parts = begun.clone(), begun.clone()
    _, got = run(hopper.scan_delta, none, lengths, whole)
    in_parts = torch.empty_like(got)
    for first, end in ((none, halves), (halves, lengths)):
        at, one = run(hopper.scan_delta, first, end, parts)
        in_parts[at] = one
    for outputs, state in ((got, whole), (in_parts, parts)):
        assert state_case.error(outputs, y) <= reference.TOLERANCE[torch.bfloat16]
        assert state_case.error(state, expected) <= reference.TOLERANCE[torch.bfloat16]


def test_steps_of_a_graph_follow_one_another() -> None:
    """Each may start before the one before has ended: it must not read what that has not written."""
    torch.manual_seed(1)
    case, n_steps = case_of(torch.bfloat16), 40
    case.state.nan_to_num_()
    lines, positions = case.spans.lines.long(), torch.tensor([4, 3, 9, 1], device="cuda")
    rows = [torch.randn_like(case.before[2]) for _ in range(n_steps)]

    def steps(state: torch.Tensor) -> torch.Tensor:
        value = rows[0]
        for row in rows:  # what one gives is what the next one stores
            inputs = (*case.before[:2], row + value, *case.before[3:])
            value = hopper.scan_delta(*inputs, state, single_rows(lines, positions))
        return value

    expected = case.state.clone()
    value = steps(expected)
    torch.cuda.synchronize()
    state = case.state.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps(state)
    for _ in range(3):
        state.copy_(case.state)
        graph.replay()
        assert torch.equal(out, value) and torch.equal(state, expected)
