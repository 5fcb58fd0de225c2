"""`collect` for Hopper without a GPU: emulated on the host, against sums and lists made in float64."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch
from emulation import EXACT, emulated_library, emulated_sources

from quire.kernels import jit
from quire.kernels.hopper import FLAGS as NVCC_FLAGS
from quire.kernels.sample import hopper

GROUP, SPAN, ROOM = 128, 4096, 1024
DONE, KNOWN, COUNT, MASS = range(4)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def library(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = emulated_sources(tmp_path_factory.mktemp("emulated"))
    made = emulated_library(folder / "sample.cu", "sample", *EXACT, f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}")
    made.quire_collect.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return made


@pytest.mark.parametrize("width", [5000, 4090, 40])
def test_wide_rows(library: ctypes.CDLL, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is done, one with a known floor, a number and a share that are sought, bans, a list that is full."""
    codes: list[int] = []
    monkeypatch.setattr(hopper, "launch", lambda _, args: codes.append(library.quire_collect(ctypes.byref(args), None)))
    kinds = torch.tensor([DONE, KNOWN, COUNT, MASS, MASS, MASS], dtype=torch.int32)
    n = len(kinds)
    ends = [[9, 9, 9], [0.5, 0.5, 0.5], [-9, 0, 1], [-9, 0.2, 1.1], [-torch.inf, -torch.inf, 2], [-9, -9, 3]]
    marks = torch.tensor([[3.0, *one] for one in ends])
    wide = torch.randn(n, -(-width // 64) * 64 + 64, generator=torch.Generator().manual_seed(width)).clamp(max=3)
    wide[:, width // 3 : width // 2] = -torch.inf
    logits = wide.to(dtype)[:, :width]
    controls = torch.rand(5, n, dtype=torch.float64) + 0.5
    n_spans, n_groups = -(-width // SPAN), -(-width // GROUP)
    sums, listed = torch.full((n, 2, n_spans), -5.0), torch.zeros(n, dtype=torch.int32)
    values, columns = torch.zeros(n, ROOM), torch.zeros(n, ROOM, dtype=torch.int32)
    floats = torch.full((n, 2 * (n_groups + 3)), -5.0)
    more = torch.full((n, n_groups + 3), 7)
    found = kinds, marks, sums, listed, values, columns, floats, more
    hopper.collect(logits, logits.stride(0), width, controls, n, n_spans, *found, 1e-38)
    assert codes == [0]
    assert bool((sums[0] == -5).all()) and int(listed[0]) == 0 and bool((more[0] == 7).all())
    for i in range(1, n):
        base, floor, lower, upper = marks[i].tolist()
        x = logits[i].double()
        weights = torch.where(x >= floor, ((x - base) * controls[1, i]).exp(), 0)
        certain = torch.where(x >= upper, weights, 0)
        groups = torch.nn.functional.pad(certain, (0, n_groups * GROUP - width)).view(n_groups, GROUP).sum(1)
        torch.testing.assert_close(floats[i, n_groups + 3 :][:n_groups].double(), groups, rtol=1e-5, atol=1e-6)
        assert bool((floats[i, : n_groups + 3] == -5).all()) and more[i].tolist() == [0] * n_groups + [7] * 3
        above = (x >= upper).double() if kinds[i] == COUNT else certain
        totals = torch.stack([above.sum(), weights.sum()])
        torch.testing.assert_close(sums[i].double().sum(1), totals, rtol=1e-5, atol=1e-6)
        expected = ((x >= lower) & (x < upper) & x.isfinite()).nonzero()[:, 0].tolist()
        assert int(listed[i]) == len(expected)
        places = columns[i, : min(len(expected), ROOM)]
        assert len(set(places.tolist())) == len(places) and set(places.tolist()) <= set(expected)
        assert torch.equal(values[i, : len(places)], logits[i].float()[places.long()])


def test_sums_do_not_depend_on_the_type(
    library: ctypes.CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour with a penalty has all rows widened, and a row must not notice."""
    monkeypatch.setattr(hopper, "launch", lambda _, args: library.quire_collect(ctypes.byref(args), None))
    n, width, n_spans, n_groups = 2, 5000, 2, 40
    narrow = torch.randn(n, 5056, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :width]
    kinds, controls = torch.full((n,), MASS, dtype=torch.int32), torch.rand(5, n, dtype=torch.float64) + 0.5
    marks = torch.tensor([[4.0, -torch.inf, -0.2, 0.3]]).repeat(n, 1)
    made = []
    for logits in (narrow, torch.nn.functional.pad(narrow.float(), (0, 56))[:, :width]):
        sums, listed = torch.zeros(n, 2, n_spans), torch.zeros(n, dtype=torch.int32)
        floats, more = torch.zeros(n, 2 * n_groups), torch.zeros(n, n_groups, dtype=torch.int64)
        found = kinds, marks, sums, listed, torch.zeros(n, ROOM), torch.zeros(n, ROOM, dtype=torch.int32), floats, more
        hopper.collect(logits, logits.stride(0), width, controls, n, n_spans, *found, 1e-38)
        made.append((sums, floats, listed))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True)) and made[0][2].min() > 0


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_machine_obstacle", lambda dtype: None)
    assert hopper.obstacle(torch.zeros(2, 16)) is None
    assert "rows of 15 logits" in str(hopper.obstacle(torch.zeros(2, 15)))
    assert hopper.obstacle(torch.zeros(40)[1:33].view(2, 16)) is not None


@pytest.mark.skipif(jit.compiler("nvcc") is None, reason="needs nvcc")
def test_it_compiles() -> None:
    source = str(jit.sources_folder() / "cuda" / "sample.cu")
    command = [str(jit.compiler("nvcc")), *NVCC_FLAGS, "-DQUIRE_BF16=1", "-Werror", "all-warnings", "-cubin"]
    done = subprocess.run([*command, "-o", "/dev/null", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
