"""Recurrent mixers on CPU token after token: right, and the same bits however a sequence is cut."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import state_case
from state_case import ScanCase

from quire.kernels import native
from quire.kernels.state import chunked, convolve, norm_gated, plan_spans, reference, scan_delta, scan_ssm, single_rows
from quire.kernels.state.spans import StateSpans, spans_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the compiled CPU kernels")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = {"convolve": convolve, "scan_ssm": scan_ssm, "scan_delta": scan_delta}
ODD: dict[str, dict[str, int]] = {
    "convolve": {"columns": 130, "k": 3, "silu": False, "bias": False},
    "scan_ssm": {"heads": 2, "groups": 1, "p": 12, "s": 20},
    "scan_delta": {"key_heads": 1, "heads": 2, "d": 20, "e": 100},
}
"""Sizes that are no multiples of a vector, some beyond a block of them."""


def computed(name: str, case: ScanCase) -> tuple[torch.Tensor, torch.Tensor]:
    """By the op."""
    keywords = dict(zip({"convolve": ["silu"], "scan_ssm": ["dt_limit"]}.get(name, []), case.after, strict=True))
    function: Callable[..., torch.Tensor] = FUNCTIONS[name]
    return case.run(lambda *given: function(*given[: len(case.before) + 2], **keywords))


@pytest.mark.parametrize("shape", ["even", "odd"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_right(level: str, name: str, shape: str) -> None:
    torch.manual_seed(0)
    for single in (False, True):
        case = state_case.CASES[name](single=single, **(ODD[name] if shape == "odd" else {}))
        y, state = case.run(getattr(reference, name))
        for dtype in DTYPES:
            got, left = computed(name, case.to(dtype, dtype if name == "convolve" else torch.float32))
            assert got.dtype is dtype
            assert state_case.error(got, y) <= reference.TOLERANCE[dtype]
            assert state_case.error(left, state) <= reference.TOLERANCE[dtype]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_bit_depends_on_where_a_sequence_is_cut(name: str) -> None:
    """A span of 129 rows, in one step beside others, in steps of other sizes, and from its snapshot on."""
    torch.manual_seed(1)
    case = state_case.CASES[name](single=False).to(torch.float32, torch.float32)
    y, state = computed(name, case)
    first, length = sum(state_case.LENGTHS[:4]), state_case.LENGTHS[4]

    def part(begin: int, end: int, line: int, left: torch.Tensor) -> torch.Tensor:
        if end - begin == 1:
            spans = single_rows(torch.tensor([line]), torch.tensor([7 + begin]))
        else:
            spans = spans_of([
                torch.from_numpy(one)
                for one in plan_spans(np.array([0, end - begin]), np.array([line]), np.array([7 + begin]))
            ])  # fmt: skip
        before = tuple(x[first + begin : first + end] if x is not None and len(x) == len(y) else x for x in case.before)
        got, after = computed(name, ScanCase(before, left, spans, case.after))
        left.copy_(after)
        return got

    for size in (1, 16, 50, length):
        left = case.state.clone()
        rows = [part(begin, min(begin + size, length), 7, left) for begin in range(0, length, size)]
        assert torch.equal(torch.cat(rows), y[first : first + length]), size
        assert torch.equal(left[7], state[7]), size
    left = state.clone()
    assert torch.equal(part(128, length, 11, left), y[first + 128 : first + length])
    assert torch.equal(left[11], state[7])


def test_pieces_of_products_do_depend_on_it() -> None:
    """What the test above would find: what runs without the compiled kernels."""
    torch.manual_seed(1)
    case = state_case.ssm_case(single=False).to(torch.float32, torch.float32)
    whole, _ = case.run(chunked.scan_ssm)
    at, length = sum(state_case.LENGTHS[:4]), state_case.LENGTHS[4]
    state, rows = case.state, []
    for begin, end in ((0, 50), (50, length)):
        arrays = plan_spans(np.array([0, end - begin]), np.array([7]), np.array([7 + begin]))
        before = tuple(x[at + begin : at + end] if len(x) == len(whole) else x for x in case.before if x is not None)
        part = ScanCase(before, state, spans_of([torch.from_numpy(one) for one in arrays]), case.after)
        got, state = part.run(chunked.scan_ssm)
        rows.append(got)
    assert not torch.equal(torch.cat(rows), whole[at : at + length])


def test_the_gate_and_its_norm() -> None:
    torch.manual_seed(3)
    wide = torch.randn(33, 2 * 60, dtype=torch.float64) * 2
    for n_weights, first in ((60, True), (20, False)):
        weight = torch.randn(n_weights, dtype=torch.float64)
        expected = reference.norm_gated(wide[:, :60], wide[:, 60:], weight, 1e-5, 20, first)
        for dtype in DTYPES:
            y, gate = wide.to(dtype).split([60, 60], dim=1)
            got = norm_gated(y, gate, weight.to(dtype), 1e-5, size=20, gate_first=first)
            one = norm_gated(y[5:6], gate[5:6], weight.to(dtype), 1e-5, size=20, gate_first=first)
            assert state_case.error(got, expected) <= reference.TOLERANCE[dtype]
            assert torch.equal(one, got[5:6])


def test_spans_are_fresh_or_go_on() -> None:
    """Planted elsewhere too: a line full of NaN is not read where a span begins."""
    torch.manual_seed(4)
    for name in FUNCTIONS:
        case = state_case.CASES[name](single=False).to(torch.float32, torch.float32)
        lines, fresh = case.spans.lines.tolist(), case.spans.fresh.tolist()
        state = case.state.clone()
        state[[line for line, is_fresh in zip(lines, fresh, strict=True) if is_fresh]] = torch.nan
        spans: StateSpans = case.spans
        y, left = computed(name, ScanCase(case.before, state, spans, case.after))
        assert torch.isfinite(y).all() and torch.isfinite(left[lines]).all()
