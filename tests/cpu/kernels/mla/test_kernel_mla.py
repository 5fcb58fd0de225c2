"""Lines of latent attention and attention to them: the references against float64, the kernels in the interpreter."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from latent_case import Latent, attend, check_ask, check_attend, check_store, check_values, store_case

from quire.kernels import mla
from quire.kernels.attention import op, reference
from quire.kernels.attention.cpu import launcher
from quire.kernels.mla import reference as mla_reference

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def script(name: str, **variables: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, HERE.parent)))
    command = [sys.executable, str(HERE / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | variables | {"PYTHONPATH": paths}, check=False
    )
    return done.stdout.strip() or done.stderr[-3000:]


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_lines_match_float64(dtype: torch.dtype) -> None:
    check_store(mla.store, dtype)
    check_store(mla.store, dtype, n=1, n_heads=1, rank=6, d=2)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
def test_what_is_asked_and_values_match_float64(dtype: torch.dtype) -> None:
    for one in (mla, mla_reference):
        check_ask(one.ask, dtype)
        check_ask(one.ask, dtype, plain=5, n=1, n_heads=1, rank=6, d=2)
        check_values(one.values, dtype)
    if dtype is not torch.float64:
        check_attend(mla.attend, Latent([(40, 1), (9, 9), (70, 3)], page_size=7, dtype=dtype))


def test_products_that_do_not_fit_are_told() -> None:
    seen, matrices = torch.randn(2, 3, 40), torch.randn(3, 8, 40)
    for mistake, words in (((seen[:, :2], matrices), "heads"), ((seen, matrices.half()), "float32")):
        with pytest.raises(ValueError, match=words):
            mla.values(*mistake)
    case = Latent([(40, 1)], n_heads=3)
    asked, pages, table, _ = case.inputs()
    fits = [asked, pages, pages[..., :32], case.plan(table), op.Variant(1.0), torch.randn(3, 8, 32)]
    assert mla.attend(*fits).shape == (3, 3, 8)
    for place, wrong, words in ((0, asked[:, :2], "asked"), (1, pages[:, :, :8], "lines"), (5, matrices, "rank 32")):
        with pytest.raises(ValueError, match=words):
            mla.attend(*fits[:place], wrong, *fits[place + 1 :])
    lines, norm, eps, q, _, *rest = store_case(torch.float32)[0]
    for keys in (torch.randn(5, 0, 48), torch.randn(4, 8, 48), torch.randn(5, 8, 48).half()):
        with pytest.raises(ValueError, match="keys"):
            mla.ask(lines, norm, eps, torch.randn(9, 5, 8 + q.shape[2]), keys, *rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_to_lines_matches_float64(level: str, dtype: torch.dtype) -> None:
    case = Latent([(40, 1), (9, 9), (70, 3)], page_size=7, dtype=dtype)
    for one in (case, dataclasses.replace(case, n_heads=3, rank=520, rope=24, scale=0.05)):
        attend(one, reference.run if level == "torch" else launcher.run, reference.TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, lambda x: x[:, 1:], "lines"),
        (1, lambda x: x.double(), "must be torch.float32"),
        (3, lambda x: x[:-1], "q"),
        (4, lambda x: x.half(), "must be torch.float32"),
        (5, lambda x: x[:-1], "positions"),
        (7, lambda x: x[:, :, ::2], "pages"),
        (8, lambda x: x.int(), "cache_locs"),
    ],
)  # fmt: skip
def test_mistakes_are_told(place: int, change: Any, words: str) -> None:
    given, _, _ = store_case(torch.float32)
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=words):
        mla.store(*given)


def test_values_of_another_size_are_refused() -> None:
    case = Latent([(40, 1)])
    q, pages, table, _ = case.inputs()
    with pytest.raises(ValueError, match="values in 32"):
        op.run(q, pages, pages, case.plan(table), op.Variant(1.0))


def test_kernels_equal_formulas_by_hand_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert script("interpreted_latent.py", TRITON_INTERPRET="1") == "fine"


def test_kernels_compile_for_hopper(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    assert (
        script("compiled_latent.py", TRITON_INTERPRET="0", TRITON_DISABLE_LINE_INFO="1", TRITON_CACHE_DIR=str(tmp_path))
        == "fine"
    )
