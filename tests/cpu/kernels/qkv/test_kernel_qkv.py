"""From the fused projection to rotated queries and pages: against float64, transformers, and in the interpreter."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from qkv_case import Shape, arguments, check, copied, random_shape
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from quire.kernels.kvstore import entry
from quire.kernels.qkv import rotate_and_store

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("seeds", [range(8), range(8, 16)], ids=str)
def test_matches_float64(level: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check(rotate_and_store, random_shape(seed), dtype)


def test_all_threads_agree(level: str) -> None:
    shape, n_threads = Shape(300, 8, 2, 64, 64), torch.get_num_threads()
    results = []
    for count in (1, 4):
        given = arguments(shape, torch.bfloat16)
        torch.set_num_threads(count)
        results.append((rotate_and_store(*given), given[6], given[7]))
    torch.set_num_threads(n_threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_entries_of_8_bits_hold_what_the_reference_rounds(level: str, dtype: torch.dtype) -> None:
    """Bit for bit what float pages would hold, rounded; queries as they are; places that no row names untouched."""
    for shape in (Shape(40, 12, 3, 80, 80, page_size=4), Shape(9, 4, 4, 24, 20, q_norm=False, n_padding=2)):
        given = arguments(shape, dtype)
        heads = given[0].unflatten(1, (-1, shape.d))
        for row, value in enumerate((0.0, 1e-38, float("inf"), float("nan"), 1000.0)):
            heads[row, -1, 1:] = value
        float_pages = copied(given)
        pages = [torch.full((*one.shape[:3], shape.d + 4), 7, dtype=torch.int8) for one in given[6:8]]
        q, expected_q = rotate_and_store(*given[:6], *pages, given[8]), rotate_and_store(*float_pages)
        assert torch.equal(q, expected_q)
        real = given[8][given[8] > 0]
        for entries, floats in zip(pages, float_pages[6:8], strict=True):
            flat, expected = entries.transpose(1, 2).flatten(0, 1), floats.transpose(1, 2).flatten(0, 1)
            assert torch.equal(flat[real], entry.encode(expected[real]))
            others = torch.ones(len(flat), dtype=torch.bool)
            others[given[8]] = False
            assert bool((flat[others] == 7).all())


def test_a_cell_of_8_bits() -> None:
    """Largest magnitude 127, half to even, an error of at most half a step, scales that survive odd sizes."""
    x = torch.tensor([[63.5, -127.0, 0.5, 1.5, 0.0], [0.0] * 5, [1e-31] * 5, [1.0, float("nan"), 0.0, 0.0, 0.0]])
    entries = entry.encode(x)
    assert entries.shape == (4, 9) and entries.dtype == torch.int8
    assert entries[0, :5].tolist() == [64, -127, 0, 2, 0]
    assert bool((entry.decode(entries[1:3], torch.float32) == 0).all())
    assert bool(entry.decode(entries, torch.float64)[3].isnan().all())
    many = torch.randn(50, 3, 7)
    steps = many.abs().amax(-1, keepdim=True) / 127
    assert bool(((entry.decode(entry.encode(many), torch.float64) - many).abs() <= steps * 0.5001).all())


@pytest.mark.parametrize("with_norms", [True, False])
def test_matches_transformers(level: str, with_norms: bool) -> None:
    shape = Shape(11, 4, 2, 32, 32, page_size=4, q_norm=with_norms, k_norm=with_norms)
    for is_wide in (True, False):
        given = arguments(shape, torch.float32)
        given = (*given[:4], given[4] if is_wide else given[4].int(), *given[5:])
        qkv, q_weight, k_weight, eps, positions, cos_sin = copied(given)[:6]
        q, k, v = qkv.unflatten(1, (8, 32)).split((4, 2, 2), dim=1)
        if with_norms:
            norms = [Qwen3RMSNorm(32, eps) for _ in range(2)]
            for norm, weight in zip(norms, (q_weight, k_weight), strict=True):
                norm.weight.data.copy_(weight)
            q, k = norms[0](q).detach(), norms[1](k).detach()
        cos, sin = (torch.cat((half, half), 1)[positions][None] for half in cos_sin.chunk(2, dim=1))
        theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        ours = rotate_and_store(*given)
        stored_k, stored_v = (pages.transpose(1, 2).flatten(0, 1)[given[8]] for pages in given[6:8])
        assert torch.allclose(ours, theirs[0][0].transpose(0, 1), atol=5e-6)
        assert torch.allclose(stored_k, theirs[1][0].transpose(0, 1), atol=5e-6)
        assert torch.equal(stored_v, v)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda x: x[:, :-1], "does not fit pages"),
        (0, lambda x: x[:, : 4 * 16], "does not fit pages"),
        (0, lambda x: x.half(), "does not fit pages"),
        (0, lambda x: x.t().contiguous().t(), "contiguous"),
        (1, lambda x: x[:-1], "q_norm"),
        (2, lambda x: x.half(), "k_norm"),
        (4, lambda x: x[:-1], "do not fit qkv"),
        (5, lambda x: torch.cat((x, x), 1), "does not fit heads of 16"),
        (5, lambda x: torch.cat((x, x), 1)[:, :16], "contiguous"),
        (6, lambda x: x[1:], "equal 4-d pools"),
        (8, lambda x: x.int(), "do not fit qkv"),
    ],
)
def test_mismatches_are_refused(place: int, change: object, message: str) -> None:
    given = list(arguments(Shape(3, 2, 2, 16, 16), torch.float32))
    given[place] = change(given[place])
    with pytest.raises(ValueError, match=message):
        rotate_and_store(*given)


def test_equals_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE.parents[3]}{os.pathsep}{HERE.parent}"}
    command = [sys.executable, str(HERE / "interpreted_qkv.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]
