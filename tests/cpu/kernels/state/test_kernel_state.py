"""Recurrent mixers on CPU: the chunked forms of torch against token by token, snapshots, steps against one pass."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import numpy as np
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import state_case

from quire.config.states import PIECE
from quire.kernels import native
from quire.kernels.selector import select
from quire.kernels.state import (
    chunked,
    convolve,
    cpu,
    norm_gated,
    plan_spans,
    reference,
    scan_delta,
    scan_ssm,
    single_rows,
)
from quire.kernels.state.spans import StateSpans


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", state_case.CASES)
def test_pieces_equal_token_by_token(name: str, single: bool) -> None:
    torch.manual_seed(0)
    case = state_case.CASES[name](single=single)
    y, state = case.run(getattr(reference, name))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        states = dtype if name == "convolve" or dtype is torch.float64 else torch.float32
        got, left = case.to(dtype, states).run(getattr(chunked, name))
        assert got.dtype is dtype and left.dtype is states
        tolerance = reference.TOLERANCE[dtype]
        assert state_case.error(got, y) <= tolerance
        assert state_case.error(left, state) <= tolerance


@pytest.mark.parametrize("name", state_case.CASES)
def test_a_snapshot_is_the_state_of_a_shorter_span(name: str) -> None:
    """And going on from it is going on."""
    torch.manual_seed(1)
    case = state_case.CASES[name](single=False)
    function = getattr(reference, name)
    y, state = case.run(function)
    first, length = sum(state_case.LENGTHS[:4]), state_case.LENGTHS[4]

    def part(begin: int, end: int, line: int, left: torch.Tensor) -> torch.Tensor:
        arrays = plan_spans(np.array([0, end - begin]), np.array([line]), np.array([7 + begin]))
        spans = StateSpans(*map(torch.from_numpy, arrays))
        n = state_case.spans_of(False)[1]
        before = tuple(x[first + begin : first + end] if x is not None and len(x) == n else x for x in case.before)
        return function(*before, left, spans, *case.after)

    left = case.state.clone()
    part(0, 128, 7, left)
    assert torch.equal(left[7], state[11])
    rest = part(128, length, 11, state.clone())
    assert torch.equal(rest, y[first + 128 : first + length])


def test_spans_are_cut_where_a_state_is_kept() -> None:
    arrays = plan_spans(np.array([0, 2, 2 + 3 * PIECE]), np.array([4, 5]), np.array([9, 0]), [(1, 70, 8), (1, 128, 9)])
    lines, fresh, piece_ptr, row_ptr, keep, span_of = (one.tolist() for one in arrays)
    assert (lines, fresh, piece_ptr) == ([4, 5], [0, 1], [0, 1, 5])
    assert row_ptr == [0, 2, 66, 72, 130, 194] and keep == [-1, -1, 8, 9, -1]
    assert span_of == [0, 1, 1, 1, 1]


def test_single_rows_that_stand_first_begin_with_zeros() -> None:
    spans = single_rows(torch.tensor([3, 1]), torch.tensor([5, 0]))
    assert spans.is_single and spans.lines.tolist() == [3, 1] and spans.fresh.tolist() == [0, 1]


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = state_case.conv_case(single=True)
    with pytest.raises(ValueError, match="do not fit"):
        convolve(*case.before, case.state[:, 1:], case.spans, silu=True)
    case = state_case.ssm_case(single=True)
    with pytest.raises(ValueError, match="do not fit"):
        scan_ssm(*case.before, case.state[..., 1:], case.spans)
    case = state_case.delta_case(single=True)
    with pytest.raises(ValueError, match="do not fit"):
        scan_delta(*case.before, case.state[:, 1:], case.spans)


@pytest.mark.parametrize("name", state_case.CASES)
def test_sequences_that_decode_beside_prompts_are_taken_apart(name: str) -> None:
    torch.manual_seed(4)
    case = state_case.CASES[name](single=False)
    lengths = np.array([1, 1, *state_case.LENGTHS[1:-1]])
    indptr, lines, starts = (
        np.array([0, *lengths.cumsum()]),
        np.array([3, 2, 0, 5, 1, 7]),
        np.array([5, 0, 0, 64, 0, 7]),
    )
    whole, tail = (
        StateSpans(*map(torch.from_numpy, plan_spans(indptr[n:] - n, lines[n:], starts[n:], [(5 - n, 128, 9)])))
        for n in (0, 2)
    )
    first = StateSpans(whole.lines[:2], whole.fresh[:2])
    both = [dataclasses.replace(case, spans=one) for one in (whole, dataclasses.replace(tail, first=first))]
    keywords = dict(zip({"convolve": ["silu"], "scan_ssm": ["dt_limit"]}.get(name, []), case.after, strict=True))
    function = {"convolve": convolve, "scan_ssm": scan_ssm, "scan_delta": scan_delta}[name]
    (y, state), (apart, left) = (
        (function(*one.before, state, one.spans, **keywords), state) for one in both for state in [case.state.clone()]
    )
    torch.testing.assert_close(apart, y)
    torch.testing.assert_close(left, state)


def test_the_ops_run_what_the_catalogue_says() -> None:
    torch.manual_seed(2)
    for name, function in (("convolve", convolve), ("scan_ssm", scan_ssm), ("scan_delta", scan_delta)):
        case = state_case.CASES[name](single=False)
        keywords = dict(zip({"convolve": ["silu"], "scan_ssm": ["dt_limit"]}.get(name, []), case.after, strict=True))
        state = case.state.clone()
        y = function(*case.before, state, case.spans, **keywords)
        expected, left = case.run(getattr(chunked, name))
        assert torch.equal(y, expected) and torch.equal(state, left), "float64 has no compiled kernels"
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.empty(0, dtype=dtype)
            module = chunked if native.library() is None else cpu
            assert select("state", name, x) is getattr(module, name)


def test_the_gate_and_its_norm_are_those_of_transformers() -> None:
    torch.manual_seed(3)
    y, gate, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2").MambaRMSNormGated(48, 16, 1e-5)
    mamba.weight.data.copy_(weight)
    with torch.no_grad():
        torch.testing.assert_close(norm_gated(y, gate, weight, 1e-5, size=16, gate_first=True), mamba(y, gate))
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").Qwen3NextRMSNormGated(16, 1e-5)
    qwen.weight.data.copy_(weight[:16])
    with torch.no_grad():
        expected = qwen(y.view(-1, 16), gate.view(-1, 16)).view(5, 48)
    torch.testing.assert_close(norm_gated(y, gate, weight[:16], 1e-5, size=16, gate_first=False), expected)
    with pytest.raises(ValueError, match="do not fit"):
        norm_gated(y, gate, weight, 1e-5, size=20, gate_first=True)
