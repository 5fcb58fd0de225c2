"""Triton compiles a kernel again for arguments that are no multiples of 16, which must not be while requests wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import jit

from quire.kernels.mla import triton as mla
from quire.kernels.qkv import triton as qkv
from quire.kernels.sample import triton as sample
from quire.kernels.sample.draw import Choice

N_HEADS, D, RANK = 4, 64, 32


def store_heads(positions: torch.Tensor, cache_locs: torch.Tensor) -> None:
    pages = torch.zeros((8, 2, 16, D), dtype=torch.bfloat16)
    rows = torch.zeros((len(positions), (N_HEADS + 2 * 2) * D), dtype=torch.bfloat16)
    qkv.rotate_and_store(rows, None, None, 1e-6, positions, torch.zeros(9, D), pages, pages.clone(), cache_locs)


def store_lines(positions: torch.Tensor, cache_locs: torch.Tensor) -> None:
    n, rotated = len(positions), torch.zeros((len(positions), N_HEADS, D), dtype=torch.bfloat16)
    lines, pages = torch.zeros((n, RANK + D)), torch.zeros((8, 1, 16, RANK + D))
    mla.store(lines, torch.ones(RANK), 1e-6, rotated, rotated.clone(), positions, torch.zeros(9, D), pages, cache_locs)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """By kernel, what Triton would compile it for at each launch."""
    found, backend = dict[str, list[str]](), make_backend(GPUTarget("cuda", 90, 32))

    def run(kernel: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        found.setdefault(kernel.fn.__name__, []).append(str(binder(*args, **options)[1]))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    return found


@pytest.mark.parametrize("store", [store_heads, store_lines])
def test_any_number_of_rows_is_one_kernel(
    store: Callable[[torch.Tensor, torch.Tensor], None], kinds: dict[str, list[str]]
) -> None:
    """What rows are for goes to the device in one copy, line after line: with an odd number of rows a line begins at
    no multiple of 16 bytes."""
    for n in (512, 511, 1, 5813):
        _, positions, _, cache_locs = torch.zeros((4, n), dtype=torch.int64)
        store(positions, cache_locs)
    [of_launches] = kinds.values()
    assert len(of_launches) == 4 and len(set(of_launches)) == 1


def test_any_number_of_choices_is_one_kernel(kinds: dict[str, list[str]]) -> None:
    """Of rows so wide that their lists are counted, behind a line of as many rows."""
    for n in (4, 1, 2, 3, 7):
        controls, ids = torch.zeros((5, n), dtype=torch.float64), torch.zeros((2, n), dtype=torch.int32)
        out = Choice(ids[1], torch.zeros((3, n), dtype=torch.uint8)[2])
        sample.choose_by(torch.zeros((n, 50_048), dtype=torch.bfloat16), controls, out)
    assert set(kinds) == {"_group_stats", "_select", "collect", "_finish"}
    assert all(len(of_launches) == 5 and len(set(of_launches)) == 1 for of_launches in kinds.values()), kinds
