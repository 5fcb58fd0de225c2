"""The delta rule for Hopper without a GPU: emulated on the host against the reference in float64."""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import state_case
from emulation import emulated_library, emulated_sources, share_memory

from quire.kernels import jit
from quire.kernels.hopper import FLAGS as NVCC_FLAGS
from quire.kernels.state import hopper, plan_spans, reference, spans_of

SHAPE = {"key_heads": 1, "heads": 2, "d": 128, "e": 32}
SPANS = spans_of([
    torch.from_numpy(one)
    for one in plan_spans(np.array([0, 70, 73]), np.array([3, 5]), np.array([7, 0]), [(0, 33, 9), (1, 3, 10)])
])  # fmt: skip
"""Pieces of 33, 31, 6 and 3 rows; one state is kept in the middle of a span, one at its end."""
SHARED = "extern __shared__ __align__(1024) char memory[];"


@pytest.fixture(scope="module", params=hopper.DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def functions(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes._NamedFuncPointer]:
    folder, made = emulated_sources(tmp_path_factory.mktemp("emulated")), {}
    options = f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}", "-include", str(folder / "fragments.h")
    for source, name in hopper.FUNCTIONS.items():
        if SHARED in (folder / source).read_text():
            share_memory(folder / source, SHARED, "memory")
        library = emulated_library(folder / source, name, *options)
        made[name] = getattr(library, name)
        made[name].argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.emulated_arrival.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        made[name].arrival = library.emulated_arrival
    return made


@pytest.fixture(autouse=True)
def emulation(
    functions: dict[str, ctypes._NamedFuncPointer], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(name: str, args: ctypes.Structure, q: torch.Tensor) -> None:
        assert functions[name](ctypes.byref(args), None) == 0, name

    empty = torch.empty

    def poisoned(*arguments: Any, **keywords: Any) -> torch.Tensor:
        made = empty(*arguments, **keywords)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(hopper, "launch", launch)
    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(hopper, "_machine_obstacle", lambda dtype: None)
    monkeypatch.setattr(hopper, "LEAST_HEADS", 1)


def case_of(dtype: torch.dtype, *, single: bool, **shape: int) -> state_case.ScanCase:
    """Values that this type has; decays in float32, as models have them; lines of fresh spans full of NaN."""
    case = state_case.delta_case(single=single, **(SHAPE | shape)).to(dtype, torch.float32)
    before = (*case.before[:5], *(one.float() for one in case.before[5:]))
    if not single:
        before, case = (
            tuple(one[:73] if len(one) > 73 else one for one in before),
            dataclasses.replace(case, spans=SPANS),
        )
    case.state[case.spans.lines[case.spans.fresh != 0].long()] = torch.nan
    return dataclasses.replace(case, before=before)


def compare(case: state_case.ScanCase, tolerance: float, of_states: float) -> None:
    assert hopper.obstacle(*case.before, case.state, case.spans) is None
    y, state = case.to(torch.float64, torch.float64).run(reference.scan_delta)
    got, left = case.run(hopper.scan_delta)
    assert state_case.error(got, y) <= tolerance
    used = case.spans.lines.tolist()
    if case.spans.keep is not None:
        used += [line for line in case.spans.keep.tolist() if line >= 0]
    assert state_case.error(left[used], state[used]) <= of_states
    others = [i for i in range(len(state)) if i not in used]
    assert torch.equal(left[others], case.state[others])


@pytest.mark.parametrize(("e", "full"), [(32, 1), (64, 1), (64, 1000)], ids=["32", "64 at once", "64 in two blocks"])
def test_prompts_equal_the_reference(dtype: torch.dtype, e: int, full: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(hopper, "FULL", full)
    case = case_of(dtype, single=False, heads=3 if e == 32 else 1, e=e)
    compare(case, reference.TOLERANCE[dtype], reference.TOLERANCE[dtype])


def test_equal_keys_do_not_cancel(dtype: torch.dtype) -> None:
    """A series over all rows of a piece would lose every digit here. As nothing decays, what weights lose by rounding
    adds up over the rows of a piece."""
    torch.manual_seed(1)
    case = case_of(dtype, single=False, heads=1)
    _, k, v, a, b, *decays = case.before
    equal = torch.ones_like(k), torch.ones_like(k), v, torch.full_like(a, -30), torch.full_like(b, 9), *decays
    tolerance = 4 * reference.TOLERANCE[dtype]
    compare(dataclasses.replace(case, before=equal), tolerance, tolerance)


@pytest.mark.parametrize("many", [1, 1000], ids=["blocks of 64", "of 32"])
def test_rows_equal_the_reference(dtype: torch.dtype, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    monkeypatch.setattr(hopper, "MANY_HEADS", many)
    compare(case_of(dtype, single=True, e=64), reference.TOLERANCE[dtype], 1e-5)


@pytest.mark.parametrize("single", [True, False])
def test_keys_that_the_previous_grid_writes_late(
    functions: dict[str, ctypes._NamedFuncPointer], dtype: torch.dtype, single: bool
) -> None:
    case = case_of(dtype, single=single, heads=1)
    y, state = case.run(hopper.scan_delta)
    late = case.before[1]
    rows = late.as_strided((late.stride(0) * (len(late) - 1) + late.shape[2],), (1,))
    arrived = rows.clone()
    rows.fill_(7)
    arrival = functions["quire_delta_rows" if single else "quire_solve"].arrival
    arrival(arrived.data_ptr(), rows.data_ptr(), arrived.nbytes)
    got, left = case.run(hopper.scan_delta)
    arrival(None, None, 0)
    assert torch.equal(got, y) and torch.equal(left.nan_to_num(), state.nan_to_num())


def test_what_they_do_not_take(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(case: state_case.ScanCase) -> str:
        return str(hopper.obstacle(*case.before, case.state, case.spans))

    assert "float32" in found(case_of(torch.float32, single=True))
    assert "have 64 dimensions" in found(case_of(dtype, single=False, d=64))
    assert "values 48" in found(case_of(dtype, single=True, e=48))
    case = case_of(dtype, single=True)
    *before, a, b, a_log, dt_bias = case.before
    assert "some are torch.float32" in found(dataclasses.replace(case, before=(*before, a, b.float(), a_log, dt_bias)))
    assert "states torch.float64" in found(dataclasses.replace(case, state=case.state.double()))
    q = torch.zeros(4 * 128 + 1, dtype=dtype)[1:].view(4, 1, 128)
    assert "16 bytes" in found(dataclasses.replace(case, before=(q, *case.before[1:])))
    monkeypatch.setattr(hopper, "LEAST_HEADS", 128)
    assert "8 heads" in found(case)


@pytest.mark.skipif(jit.compiler("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", hopper.FUNCTIONS)
def test_they_compile(dtype: torch.dtype, source: str) -> None:
    flags = [*NVCC_FLAGS, f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}", "-Werror", "all-warnings", "-cubin"]
    command = [str(jit.compiler("nvcc")), *flags, "-o", "/dev/null", str(jit.sources_folder() / "cuda" / source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
