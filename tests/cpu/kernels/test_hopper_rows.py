"""The row kernels for Hopper without a GPU: emulated on the host against the references, and that they compile."""

from __future__ import annotations

import ctypes
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "qkv"))
from emulation import EXACT, emulated_library, emulated_sources
from qkv_case import Shape, arguments, check, check_codes, copied

from quire.kernels import hopper_rows, jit
from quire.kernels.act import hopper as act
from quire.kernels.act import reference as act_reference
from quire.kernels.norm import hopper as norm
from quire.kernels.norm import reference as norm_reference
from quire.kernels.qkv import hopper as qkv
from quire.kernels.qkv import reference as qkv_reference
from quire.kernels.w8a8 import reference as codes_reference
from quire.kernels.w8a8 import rounding


@pytest.fixture(scope="module", params=hopper_rows.DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def library(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = emulated_sources(tmp_path_factory.mktemp("emulated"))
    made = emulated_library(folder / "rows.cu", "rows", *EXACT, f"-DQUIRE_BF16={int(dtype is torch.bfloat16)}")
    made.emulated_arrival.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    for name in hopper_rows.FUNCTIONS:
        getattr(made, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return made


@pytest.fixture(autouse=True)
def emulation(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(name: str, x: torch.Tensor, args: ctypes.Structure) -> None:
        assert getattr(library, name)(ctypes.byref(args), None) == 0, name

    monkeypatch.setattr(hopper_rows, "launch", launch)
    monkeypatch.setattr(hopper_rows, "obstacle", lambda dtype: None)


def nearly_equal(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Rounded at the same points: rarely another bit, never far."""
    assert float((got == expected).double().mean()) > 0.995
    wide = expected.double()
    assert float(((got.double() - wide).abs() / (1 + wide.abs())).max()) <= tolerance


@pytest.mark.parametrize(("n", "h"), [(2, 1024), (1, 4096), (2, 2056), (1, 16384), (3, 8)])
def test_norm(dtype: torch.dtype, n: int, h: int) -> None:
    x, residual, weight = (
        torch.randn(n, h + 16).to(dtype)[:, 8:-8],
        torch.randn(n, h).to(dtype),
        torch.randn(h).to(dtype),
    )
    assert norm.obstacle(x, weight, residual) is None
    tolerance = norm_reference.TOLERANCE[dtype]
    nearly_equal(norm.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5), tolerance)
    expected, total = norm_reference.add_rms_norm(x, residual, weight, 1e-5)
    normed, summed = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total) and summed is residual
    nearly_equal(normed, expected, tolerance)


def test_norm_of_heads(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 6, 128).to(dtype)[:, 1:4], torch.randn(128).to(dtype)
    expected = norm_reference.rms_norm(x, weight, 1e-5)
    nearly_equal(norm.rms_norm(x, weight, 1e-5), expected, norm_reference.TOLERANCE[dtype])


@pytest.mark.parametrize(("n", "f"), [(3, 8), (2, 1032), (1, 3072)])
def test_activation(dtype: torch.dtype, n: int, f: int) -> None:
    x = (torch.randn(n, 2 * f + 8) * 4).to(dtype)[:, 8:]
    nearly_equal(act.silu_mul(x), act_reference.silu_mul(x), act_reference.TOLERANCE[dtype])


@pytest.mark.parametrize("k", [128, 640, 4096, 14336])
@pytest.mark.parametrize("kind", ["rows", "blocks", "given"])
def test_rows_become_codes(dtype: torch.dtype, kind: str, k: int) -> None:
    """Bit for bit: of x those of the reference, at ties, too; of a norm those of what the norm's kernel gives."""
    torch.manual_seed(k)
    x, weight = torch.randn(3, k + 16).to(dtype)[:, 8:-8], torch.randn(k).to(dtype)
    x[0, :128] = torch.arange(128).sub(15) * 7 / 64  # the largest is a multiple of 7
    blocks, given = kind == "blocks", torch.tensor([0.004]) if kind == "given" else None
    for norm_of_x in (None, (weight, 1e-5)):
        rounded_x = x if norm_of_x is None else norm.rms_norm(x, *norm_of_x)
        codes, scales = codes_reference.quantise(rounded_x, torch.float8_e4m3fn, 128 if blocks else k, given)
        got = rounding.round_rows(x, blocks, given, room=8, norm=norm_of_x)
        assert torch.equal(got.codes.view(torch.uint8), codes.view(torch.uint8))
        if given is None:
            assert torch.equal(got.scales[..., :3], scales.T if blocks else scales[:, 0])


@pytest.mark.parametrize(
    "shape",
    [
        Shape(3, 16, 8, 128, 128),
        Shape(3, 4, 2, 96, 96, k_norm=False, n_padding=1),
        Shape(2, 6, 2, 88, 32, page_size=1),
        Shape(2, 3, 1, 512, 64, q_norm=False, page_size=4),
        Shape(2, 9, 3, 24, 0, wide_positions=False),
    ],
    ids=str,
)
def test_rotate_and_store(dtype: torch.dtype, shape: Shape) -> None:
    assert qkv.obstacle(*arguments(shape, dtype)) is None
    check(qkv.rotate_and_store, shape, dtype)
    check_codes(qkv.rotate_and_store, shape, dtype)


@pytest.mark.parametrize("n", [2, 513])
@pytest.mark.parametrize("wide", [True, False])
def test_positions_that_the_previous_grid_writes_late(
    library: ctypes.CDLL, dtype: torch.dtype, n: int, wide: bool
) -> None:
    """Before the wait they are others, also beyond the table; without norms the results are the reference's bits."""
    given = arguments(Shape(n, 2, 1, 32, 16, q_norm=False, k_norm=False, wide_positions=wide), dtype)
    wanted, positions = copied(given), given[4].clone()
    given[4].copy_(torch.randint(-(10**6), 10**6, positions.shape))
    library.emulated_arrival(positions.data_ptr(), given[4].data_ptr(), positions.nbytes)
    got = qkv.rotate_and_store(*given)
    library.emulated_arrival(None, None, 0)
    assert torch.equal(got, qkv_reference.rotate_and_store(*wanted))
    assert torch.equal(given[6], wanted[6]) and torch.equal(given[7], wanted[7])


def test_obstacles(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 264).to(dtype), torch.randn(256).to(dtype)
    assert norm.obstacle(x[:, 8:], weight) is None
    assert "16 bytes" in str(norm.obstacle(x[:, 4:260], weight))
    assert "252 elements" in str(norm.obstacle(x[:, :252], weight[:252]))
    assert "not contiguous" in str(norm.obstacle(x[:, :128], weight[::2]))
    assert act.obstacle(x[:, :256]) is None and "2 x 12" in str(act.obstacle(x[:, :24]))
    assert "16 bytes" in str(act.obstacle(torch.randn(4, 68).to(dtype)[:, 1:65]))
    assert "rotary_dim 20" in str(qkv.obstacle(*arguments(Shape(2, 4, 2, 64, 20), dtype)))
    assert "head_dim 520" in str(qkv.obstacle(*arguments(Shape(2, 2, 1, 520, 16), dtype)))
    given = [*arguments(Shape(2, 4, 2, 64, 32), dtype)]
    given[5] = given[5].double()
    assert "float64" in str(qkv.obstacle(*given))


@pytest.mark.skipif(jit.compiler("nvcc") is None, reason="needs nvcc")
def test_they_compile(dtype: torch.dtype) -> None:
    assert all(getattr(hopper_rows._library(dtype), name) for name in hopper_rows.FUNCTIONS)
