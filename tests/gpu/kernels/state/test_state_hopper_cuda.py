"""Updates of the delta rule in CUDA C++ on a real GPU: against float64, through the op, in graphs."""

from __future__ import annotations

import dataclasses

import pytest
import state_case
import torch

from quire.kernels import hopper as machine
from quire.kernels.state import hopper, reference, scan_delta, single_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(machine.machine_obstacle() is not None, reason=f"needs Hopper: {machine.machine_obstacle()}"),
]
SHAPE = {"key_heads": 16, "heads": 32, "d": 128, "e": 128}


def case_of(dtype: torch.dtype) -> state_case.ScanCase:
    """Values that this type has; decays in float32, as models have them."""
    case = state_case.delta_case(single=True, **SHAPE).to(dtype, torch.float32, "cuda")
    return dataclasses.replace(case, before=(*case.before[:5], *(one.float() for one in case.before[5:])))


@pytest.mark.parametrize("dtype", hopper.DTYPES, ids=str)
def test_matches_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = case_of(dtype)
    case.state[case.spans.lines[case.spans.fresh != 0].long()] = torch.nan
    assert hopper.obstacle(*case.before, case.state, case.spans) is None
    y, state = case.to(torch.float64, torch.float64).run(reference.scan_delta)
    got, left = case.run(scan_delta)
    used = case.spans.lines.long().cpu()
    assert state_case.error(got.cpu(), y.cpu()) <= reference.TOLERANCE[dtype]
    assert state_case.error(left.cpu()[used], state.cpu()[used]) <= 1e-5
    others = [i for i in range(len(state)) if i not in used.tolist()]
    assert torch.equal(left[others], case.state[others])


def test_steps_of_a_graph_follow_one_another() -> None:
    """Each may start before the one before has ended: it must not read what that has not written."""
    torch.manual_seed(1)
    case, n_steps = case_of(torch.bfloat16), 40
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
