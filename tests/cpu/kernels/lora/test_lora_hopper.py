"""Products with adapters on Hopper without a GPU: emulated on the host, against float64 and against themselves.

Not shown: how fast they are, blocks that wait for one another (slices of K, clusters), that copies and products are
ordered as on a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from emulation import emulated_gemm_sources, emulated_library
from lora_case import Case, Made

from quire.kernels import jit, lora
from quire.kernels.gemm import ahead
from quire.kernels.gemm.hopper_product import Build, CompiledProduct, variant_of
from quire.kernels.gemm.plan import ProductShape
from quire.kernels.gemm.wide import WidePlan
from quire.kernels.hopper import FLAGS as NVCC_FLAGS
from quire.kernels.lora import hopper, reference

PLACES = (2, -1, 0, 2, *[1] * 12, 4, -1)
"""Of rows: more than eight of one adapter. Five adapters are more than a chunk of rank 16 has."""


@dataclasses.dataclass(frozen=True)
class One:
    case: Case
    silu: bool = False
    residual: bool = False


def case(sizes: tuple[int, ...], rank: int, dtype: torch.dtype, k: int = 64) -> Case:
    ranks = ((rank,), (3,), (rank - 1,), (rank,), (rank,), (0,))
    places = (*PLACES, 3, 3, 5)
    return Case(k, sizes, tuple(one * len(sizes) for one in ranks), places, dtype)


ALL = [
    One(case((128, 72), 16, torch.bfloat16), residual=True),
    One(case((40, 40), 32, torch.float16), silu=True),
    One(case((64, 64), 64, torch.bfloat16), silu=True),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The kernels' folder, with what needs a GPU replaced."""
    return emulated_gemm_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def compiled(
    sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, tuple[str, ...], str], Callable[..., int]]:
    def function(source: str, definitions: tuple[str, ...], name: str) -> Callable[..., int]:
        made = sources / f"{source}{abs(hash(definitions))}.so"
        if not made.exists():
            emulated_library(sources / source, made.stem, *definitions)
        found: Callable[..., int] = getattr(ctypes.CDLL(str(made)), name)
        return found

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    return function


class Layer:
    """A layer with the adapters of a case."""

    def __init__(self, one: One, compiled: Callable[[str, tuple[str, ...], str], Callable[..., int]]) -> None:
        self.one, self.made = one, Made(one.case)
        case, k, n = one.case, one.case.k, sum(one.case.sizes)
        generator = torch.Generator().manual_seed(9)
        self.w = (torch.randn(n, k, generator=generator) / k**0.5).to(case.dtype)
        self.bias = torch.randn(n, generator=generator).to(case.dtype)
        product = ProductShape(len(case.places), n, k, silu=one.silu)
        plan = WidePlan(64, 1, n_teams=2, n_together=1)
        build = Build(case.dtype, one.residual, True, False)
        bf16 = int(case.dtype is torch.bfloat16)
        shrink = compiled("lora.cu", (f"-DQUIRE_BF16={bf16}", "-DQUIRE_CLUSTER=1", "-DQUIRE_UNITS=2"), "quire_shrink")
        adapted = compiled(*variant_of(product, plan, build, {"RANK": self.made.stack.most}), "quire_gemm_wide")
        self.adapted = hopper.Launch(adapted, plan, shrink, case.sizes)
        self.bare = CompiledProduct(compiled(*variant_of(product, plan, build), "quire_gemm_wide"), plan)

    def residual(self) -> torch.Tensor | None:
        return torch.ones(len(self.made.y), self.made.y.shape[1], dtype=self.w.dtype) if self.one.residual else None

    def with_adapters(self, places: np.ndarray) -> torch.Tensor:
        made = self.made
        return self.adapted(
            made.x, self.w, made.stack, made.tiles(places), self.bias, None, self.residual(), self.one.silu, None
        )

    def without(self) -> torch.Tensor:
        x, w = self.made.x, self.w
        return self.bare.start(x, w, w.shape, x.dtype, self.bias, None, self.residual(), self.one.silu, None)

    def expected(self) -> torch.Tensor:
        made = self.made
        y = made.x.double() @ self.w.double().T + self.bias.double()
        reference.add(made.x, made.stack, made.tiles(made.places), y)
        if self.one.silu:
            gate, up = y.chunk(2, 1)
            y = torch.nn.functional.silu(gate) * up
        residual = self.residual()
        return y if residual is None else y + residual.double()


@pytest.mark.parametrize("one", ALL, ids=str)
def test_a_product_adds_what_adapters_do(
    one: One, compiled: Callable[[str, tuple[str, ...], str], Callable[..., int]]
) -> None:
    layer = Layer(one, compiled)
    places = layer.made.places
    y, bare, expected = layer.with_adapters(places), layer.without(), layer.expected()
    error = ((y.double() - expected).abs() / (1 + expected.abs())).max()
    assert error <= reference.TOLERANCE[one.case.dtype]
    without = torch.tensor([place < 0 or not any(one.case.ranks[place]) for place in places])
    assert torch.equal(y[without], bare[without])
    assert not any(torch.equal(y[row], bare[row]) for row in range(len(y)) if not without[row])
    alone = np.where(np.isin(np.arange(len(places)), (0, 5, 18)), places, -1).astype(np.int32)
    found = layer.with_adapters(alone)  # with other neighbours, and elsewhere among the adapters of the step
    assert all(torch.equal(found[row], y[row]) for row in (0, 5, 18))


class Far(torch.Tensor):
    """A tensor in this machine's memory that says it is on a GPU."""

    is_cuda = True


def test_a_kernel_that_cannot_be_built_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unlike steps of few rows, which lose nothing."""

    def fail(*arguments: object) -> None:
        raise jit.BuildError("lora.so: nvcc failed")

    monkeypatch.setattr("quire.kernels.hopper.machine_obstacle", lambda: None)
    monkeypatch.setattr(hopper, "n_processors_of", lambda device: 132)
    monkeypatch.setattr(hopper, "function_of", fail)
    made = Made(dataclasses.replace(case((4096,), 16, torch.bfloat16, k=4096), places=tuple(range(-1, 5)) * 10))
    w = made.x.new_zeros(4096, 4096)
    for n_rows in (60, 60, 8):
        x, tiles = made.x[:n_rows].as_subclass(Far), made.tiles(made.places[:n_rows])
        assert isinstance(lora.prepare_linear(x, w, made.stack, tiles, None, None, None, False, None), str)
    said = "lora: 'triton' runs instead of the faster 'hopper' (lora.so: nvcc failed)"
    assert [one.getMessage() for one in caplog.records] == [said]
    hopper._prepared.cache_clear()


def test_both_kernels_are_built_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(ahead, "machine_obstacle", lambda: None)
    monkeypatch.setattr(ahead, "n_processors_of", lambda device: 132)
    monkeypatch.setattr(ahead, "compile_variant", lambda *variant: built.append(variant))
    layers = [ahead.LinearShape(4096, 4096), ahead.LinearShape(4096, 14336)]
    ahead.build(layers, torch.bfloat16, torch.device("cuda"), 64, 16, lora.variant_of)
    first = {hopper.variant_of(torch.bfloat16, k) for k in (4096, 14336)}
    assert first == {one for one in built if one[0] == "lora.cu"} and len(first) == 2
    assert any("-DQUIRE_RANK=16" in one[1] for one in built)
    built.clear()
    ahead.build(layers, torch.bfloat16, torch.device("cuda"), 64, 0, lora.variant_of)
    assert built and not {one for one in built if one[0] == "lora.cu"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_compiles(dtype: torch.dtype) -> None:
    nvcc = jit.compiler("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source, definitions = hopper.variant_of(dtype, 14336)
    command = [nvcc, *NVCC_FLAGS, *definitions, "-Werror", "all-warnings", "-cubin", "-o", "/dev/null"]
    path = jit.sources_folder() / "cuda" / source
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
