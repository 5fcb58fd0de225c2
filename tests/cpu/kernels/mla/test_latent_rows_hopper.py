"""What stands around attention to lines, for Hopper without a GPU: emulated on the host, against float64."""

from __future__ import annotations

import ctypes
import pathlib
from typing import Any

import pytest
import torch
from emulated_latent import emulate
from latent_case import Latent, check_ask, check_attend, check_values, store_case

from quire.kernels import jit
from quire.kernels.catalog import Slower
from quire.kernels.mla import hopper, hopper_ask, hopper_attend, hopper_values

LINE: dict[str, Any] = {"rank": 512, "d": 64, "before": 8}


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path, monkeypatch)


@pytest.mark.parametrize("dtype", hopper.DTYPES, ids=str)
def test_the_kernels_match_float64(emulation: None, dtype: torch.dtype) -> None:
    """Rows that fill no tile, one tile, several blocks; more heads than a row's threads turn at once."""
    check_ask(hopper_ask.ask, dtype, plain=128, n=5, n_heads=2, **LINE)
    check_values(hopper_values.values, dtype, n=3, n_heads=2, rank=512, v=128)
    if dtype is torch.bfloat16:
        check_ask(hopper_ask.ask, dtype, plain=128, wide=False, n=65, n_heads=1, **LINE)
        check_ask(hopper_ask.ask, dtype, plain=128, n=1, n_heads=32, **LINE)
        check_values(hopper_values.values, dtype, n=19, n_heads=1, rank=512, v=128)
        check_values(hopper_values.values, dtype, n=35, n_heads=1, rank=512, v=128)


def test_positions_that_the_previous_grid_writes_late(emulation: None) -> None:
    """Before the wait they are others, also beyond the table."""
    dtype = torch.bfloat16
    library = hopper.library(dtype)
    library.emulated_arrival.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def late(*given: Any) -> torch.Tensor:
        positions, arrived = given[5], given[5].clone()
        positions.copy_(torch.tensor([-(10**6), 10**6, 3])[: len(positions)])
        library.emulated_arrival(arrived.data_ptr(), positions.data_ptr(), positions.nbytes)
        asked = hopper_ask.ask(*given)
        library.emulated_arrival(None, None, 0)
        return asked

    check_ask(late, dtype, plain=128, n=3, n_heads=1, **LINE)


def test_values_of_lines_that_were_split_match_float64(emulation: None) -> None:
    """One row in many parts, some rows in parts and some whole, rows of drafts, as many rows as the kernel takes."""
    lines: dict[str, Any] = {"rank": 512, "rope": 64, "scale": 0.07, "dtype": torch.bfloat16}
    for case, n_ctas in (
        (Latent([(1500, 1)], n_heads=2, seed=1, **lines), 24),
        (Latent([(300, 1), (40, 1), (290, 3)], n_heads=2, page_size=48, seed=2, **lines), 5),
        (Latent([(260, 1)] + [(9, 1)] * 4 + [(300, 1)], n_heads=1, seed=3, **lines), 8),
    ):
        check_attend(hopper_attend.attend, case, n_ctas, v=128)


def test_what_they_cannot_run_is_told() -> None:
    def asked(n: int = 5, plain: int = 128, **more: Any) -> str | None:
        lines, norm, eps, _, _, *rest = store_case(torch.bfloat16, n=n, n_heads=2, **LINE | more)[0]
        d, rank = rest[1].shape[1], len(norm)
        q, keys = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((n, 2, plain + d), (2, plain, rank)))
        return hopper_ask.static_obstacle(lines, norm, eps, q, keys, *rest)

    assert asked() is None and "16 bytes" in str(asked(before=7))
    assert isinstance(asked(n=513), Slower)
    assert "64 numbers are not" in str(asked(plain=64)) and "lines of 256 + 64" in str(asked(rank=256))
    seen, matrices = torch.zeros(3, 2, 512, dtype=torch.float16), torch.zeros(2, 128, 512, dtype=torch.float16)
    why = hopper_values.static_obstacle
    assert why(seen, matrices) is None
    assert "apart" in str(why(seen.transpose(0, 1).contiguous().transpose(0, 1), matrices))
    assert "64 numbers" in str(why(seen, matrices[:, :64])) and "float32" in str(why(seen.float(), matrices.float()))
    assert isinstance(why(seen.new_zeros(513, 2, 512), matrices), Slower)


@pytest.mark.skipif(jit.compiler("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("dtype", hopper.DTYPES, ids=str)
def test_they_compile(dtype: torch.dtype) -> None:
    assert hopper.library(dtype)
