"""`quire kernels list` and `explain`, with and without a GPU."""

from __future__ import annotations

import importlib.util

import pytest

from quire.bench.kernels.variants import NAMED
from quire.cli.main import main
from quire.kernels import catalog


def out_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["kernels", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_list_names_every_implementation_and_the_toolchain(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "list")
    for op in catalog.OPS:
        assert f"{op}: " in text
    n_lines = sum("available" in line or " no: " in line for line in text.splitlines())
    assert n_lines == len(catalog.CATALOGUE)
    assert "avx" in text or "portable" in text or "native" in text.lower()
    assert "kernels, " in text, "the cache folder and its size"
    if catalog.cuda_obstacle():
        assert "no: no CUDA device" in text


def test_explain_on_the_cpu_shows_the_choice_the_program_and_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "explain", "attention", "--device", "cpu", "--variant", "soft_cap", "--head-dim", "64")
    assert ("cpu: runs" if catalog.native_obstacle() is None else "reference: runs") in text
    assert "logits_transform: (mul (scalar cap) (tanh" in text
    assert "quire_tanh(" in text and "tiles of rows" in text


@pytest.mark.parametrize("variant", NAMED)
def test_explain_for_a_gpu_needs_none(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "explain", "attention", "--device", "cuda", "--variant", variant)
    assert "Program" in text and "small lines of work" in text and "large lines" in text
    if variant == "rotary":
        assert "hopper: no: the variant has a" in text
    elif variant not in ("causal", "window"):
        assert "struct Variant" in text


def test_explain_says_what_is_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "explain", "attention", "--device", "cuda", "--head-dim", "80")
    assert "head_dim 80 is not one of" in text
    if importlib.util.find_spec("triton") is not None:
        assert "triton: runs\n" in text
    assert "3 is not a multiple" in out_of(capsys, "explain", "attention", "--device", "cuda", "--page-size", "3")


def test_explain_of_other_ops_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "quire.kernels.norm.triton" in out_of(capsys, "explain", "norm")
    assert "did you mean attention" in out_of(capsys, "explain", "atention", code=2)
    assert "did you mean sinks" in out_of(capsys, "explain", "attention", "--variant", "sink", code=2)
    error = out_of(capsys, "explain", "attention", "--q-heads", "9", "--kv-heads", "2", code=2)
    assert "9 query heads for 2 KV heads" in error


def test_every_entry_of_the_catalogue_is_a_module() -> None:
    for entry in catalog.CATALOGUE:
        assert importlib.util.find_spec(entry.module) is not None, entry.module
