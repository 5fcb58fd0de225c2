"""What kernels of experts are compared by: with a residual as without, and a wrong residual does not pass."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from coded_experts import CODINGS, Coding, check, error

SHAPE: Final = (700, 1024)
ROUNDED: Final = [one for one in CODINGS if one.dtype.is_floating_point]
DTYPES: Final = [torch.bfloat16, torch.float16]


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and a residual that nearly cancels the largest of each row."""
    torch.manual_seed(0)
    sums, residual = torch.randn(SHAPE, dtype=torch.float64) * 2, torch.randn(SHAPE).to(dtype)
    largest = sums.abs().argmax(1, keepdim=True)
    residual.scatter_(1, largest, -sums.gather(1, largest).to(dtype))
    return sums, residual


def rounded(sums: torch.Tensor) -> torch.Tensor:
    """Each is off by as much as e4m3 may do, in proportion to itself."""
    wrong = 0.14 * (1 + sums.abs()) * torch.randn(SHAPE, dtype=torch.float64).sign()
    largest = sums.abs().argmax(1, keepdim=True)
    return sums.scatter_add(1, largest, wrong.gather(1, largest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_those_of_the_sums(dtype: torch.dtype) -> None:
    """Measured by what a residual left of them they would be several times as large."""
    sums, residual = case(dtype)
    got = rounded(sums)
    assert 0.13 < error(got.to(dtype), sums) < 0.15
    total = (got + residual.double()).to(dtype)
    assert 0.13 < error(total, sums, residual) < 0.15 < error(total, sums + residual.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coding", [None, *ROUNDED], ids=["floating", "e4m3", "e4m3 blocks"])
@pytest.mark.parametrize("times", [-1, 0, 1, 2])
def test_a_residual_that_is_left_out_or_added_twice_fails(
    times: int, coding: Coding | None, dtype: torch.dtype
) -> None:
    sums, residual = case(dtype)
    total = (sums + times * residual.double()).to(dtype)
    if times == 1:
        check(total, sums, coding, residual=residual)
    else:
        with pytest.raises(AssertionError):
            check(total, sums, coding, residual=residual)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("coding", ROUNDED, ids=["e4m3", "e4m3 blocks"])
def test_the_norm_of_all_errors_is_that_of_the_sums(coding: Coding, has_residual: bool) -> None:
    """A residual that is much larger must not hide them: 2.5 % of the sums are too much, 1.5 % are not."""
    sums = case(torch.float32)[0]
    residual = torch.randn(SHAPE) * 20 if has_residual else None
    for share, fits in ((0.015, True), (0.025, False)):
        got = sums + share * sums.std() * torch.randn(SHAPE, dtype=torch.float64)
        total = got.float() if residual is None else got.float() + residual
        if fits:
            check(total, sums, coding, residual=residual)
        else:
            with pytest.raises(AssertionError):
                check(total, sums, coding, residual=residual)
