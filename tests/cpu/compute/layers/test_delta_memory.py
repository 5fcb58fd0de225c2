"""What a layer of the delta rule allocates for a step of prompts on a GPU, beside what the memory equation expects.

The layer's own data flow and its kernels' scratch, with launches that compute nothing.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from quire.compute.layers import delta
from quire.compute.schemes.choice import schemes_on
from quire.config.delta import DeltaSpec
from quire.config.model import read_arch
from quire.config.no_ffn import NoFfnSpec
from quire.config.states import PIECE
from quire.kernels.state import hopper, op, plan_spans, spans, spans_of
from quire.kernels.state.triton import launcher
from quire.planner.memory import MemoryEquation

NEXT = read_arch(pathlib.Path(quire.__file__).parent / "bench" / "shapes" / "qwen3-next-80b-a3b")
SPEC = next(one.mixer for one in NEXT.layers if isinstance(one.mixer, DeltaSpec))
NARROW = msgspec.structs.replace(SPEC, n_key_heads=1, n_value_heads=2)
HIDDEN = 64


class Peak(TorchDispatchMode):
    """Bytes of tensors made within it, the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes, self._held = 0, {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            given = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
            if storage._cdata not in given:
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held = {at: one for at, one in self._held.items() if not one[0].expired()}
        self.n_bytes = max(self.n_bytes, sum(n for _, n in self._held.values()))
        return found


class States:
    """A `Context` of one layer."""

    def __init__(self, spec: DeltaSpec, lengths: list[int], saves: list[tuple[int, int, int]]) -> None:
        indptr, n = np.cumsum([0, *lengths]), len(lengths)
        arrays = plan_spans(indptr, np.arange(n), np.zeros(n, np.int64), saves)
        self.spans = spans_of([torch.from_numpy(one) for one in arrays])
        conv, exact = spec.state_spec.parts
        self.tensors = torch.empty(1, *conv.shape, dtype=torch.bfloat16), torch.empty(1, *exact.shape)

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], spans.StateSpans]:
        return self.tensors, self.spans


@pytest.fixture(params=["hopper", "triton"])
def scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Of a back end, with the memory that it takes."""
    monkeypatch.setattr(hopper, "launch", lambda name, args, q: None)
    for name in ("solve_pieces", "scan_pieces"):
        monkeypatch.setattr(launcher.delta, name, NoLaunch())
    return hopper.scan_delta if request.param == "hopper" else launcher.scan_delta


class NoLaunch:
    """A Triton kernel that does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def allocated(
    spec: DeltaSpec, lengths: list[int], saves: list[tuple[int, int, int]], scan: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> int:  # fmt: skip
    """Bytes at once of one layer."""
    nothing: dict[str, Callable[..., Any]] = {
        "convolve": lambda *args: None, "scan_delta": scan, "norm_gated": lambda y, *args: torch.empty_like(y)
    }  # fmt: skip
    monkeypatch.setattr(op, "select", lambda family, name, *args: nothing[name])
    make = functools.partial(torch.empty, dtype=torch.bfloat16)
    layer = delta.Delta(
        spec, spec.parameters("", HIDDEN), 0, make, schemes_on(torch.device("cpu"), torch.bfloat16), torch.empty(0)
    )
    n_in = spec.conv_size + spec.inner_size + 2 * spec.n_value_heads
    monkeypatch.setattr(delta, "project", lambda linear, x, norm: make(len(x), n_in))
    layer.out = lambda y: make(len(y), HIDDEN)
    context, x = States(spec, lengths, saves), make(sum(lengths), HIDDEN)
    with Peak() as peak:
        layer(x, None, torch.empty(0), context)
    return peak.n_bytes


def expected(spec: DeltaSpec, n_rows: int, n_seqs: int, n_snapshots: int = 0) -> int:
    """Of a model of such layers alone, without the stream and the normed rows around them."""
    layer = msgspec.structs.replace(NEXT.layers[0], mixer=spec, ffn=NoFfnSpec())
    arch = msgspec.structs.replace(NEXT, layers=(layer,), hidden_size=HIDDEN)
    equation = MemoryEquation(
        arch=arch, page_size=16, max_num_seqs=n_seqs, max_num_batched_tokens=n_rows, max_model_len=8192,
        weights_bytes=0, n_snapshots=n_snapshots, on_gpu=True,
    )  # fmt: skip
    return equation.activations_bytes - 2 * 2 * n_rows * HIDDEN


@pytest.mark.parametrize("length", [2, 9, 17, 64, 65, 200])
def test_the_memory_equation_has_room_for_pieces(
    length: int, scan: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of one length each, in a step that they fill."""
    n = 2048 // length
    found = allocated(NARROW, [length] * n, [], scan, monkeypatch)
    assert found <= expected(NARROW, n * length, n)


def test_states_that_are_kept_cut_spans(scan: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    saves = [(span, 7, span) for span in range(200)]
    found = [allocated(NARROW, [9] * 200, some, scan, monkeypatch) for some in ([], saves)]
    assert found[1] - found[0] == NARROW.pieces_bytes(200, 2)
    assert found[1] <= expected(NARROW, 1800, 200, n_snapshots=200)


def test_short_spans_are_what_the_term_is_for(
    scan: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nine rows: all that is there is the equation's, and more than its rows would have had without pieces."""
    found = allocated(NARROW, [9] * 200, [], scan, monkeypatch)
    assert found > 1800 * NARROW.n_row_numbers * 2
    whole = expected(NARROW, 1800, 200)
    assert found + NARROW.pieces_bytes(1800 // PIECE, 2) == whole, "it takes whole pieces beside these"
    assert whole == 1800 * NARROW.n_solved_numbers * 2 + NARROW.pieces_bytes(200 + 1800 // PIECE, 2)


def test_a_step_of_long_prompts_takes_what_its_rows_do() -> None:
    assert expected(SPEC, 8192, 8) == 8192 * SPEC.n_row_numbers * 2
