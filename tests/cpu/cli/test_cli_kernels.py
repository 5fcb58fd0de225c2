"""`quire kernels list` and `explain`, with and without a GPU."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from quire.bench.kernels.variants import NAMED, SHORT
from quire.cli.main import main
from quire.kernels import catalog, jit
from quire.kernels.attention.variant import variants


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


CODED = ("w8a8", "w4a16", "mxfp4")
"""Of a GPU: a CPU packs such matrices for `qgemm`, or decodes them."""


@pytest.mark.parametrize("op", [op for op in catalog.OPS if op not in CODED])
def test_every_op_has_more_than_the_reference_on_a_cpu(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "explain", op, "--device", "cpu")
    entries = [entry for entry in catalog.CATALOGUE if entry.op == op and "cpu" in entry.devices]
    entries = [entry for entry in entries if op != "attention" or "run" in entry.functions]
    assert len(entries) > 1 and all(entry.name in text for entry in entries)


def test_list_creates_no_cache_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unwanted() -> None:
        raise AssertionError("the folder was made")

    monkeypatch.setattr(jit, "folder", unwanted)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "new"))
    assert "new/jit, 0 kernels" in out_of(capsys, "list") and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "file is not a folder): set QUIRE_CACHE_DIR" in out_of(capsys, "list")


def test_explain_on_the_cpu_shows_the_choice_the_program_and_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "explain", "attention", "--device", "cpu", "--variant", "soft_cap", "--head-dim", "64")
    assert "tensors: none" in text.splitlines() and "scalars: none" not in text
    assert ("cpu: runs" if catalog.native_obstacle() is None else "reference: runs") in text
    assert "logits_transform: (mul (scalar cap) (tanh" in text
    assert ("quire_tanh(" in text) == (catalog.native_obstacle() is None) and "tiles of rows" in text


@pytest.mark.parametrize("variant", NAMED)
def test_explain_for_a_gpu_needs_none(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "explain", "attention", "--device", "cuda", "--variant", variant)
    assert "Program" in text and "small lines of work" in text and "large lines" in text
    if variant == "rotary":
        assert "hopper: no: the variant has a" in text and "CUDA C++" not in text
    elif variant not in ("causal", "window"):
        assert "struct Variant" in text


def test_names_of_variants_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    library = {name for name, value in vars(variants).items() if getattr(value, "__module__", "") == variants.__name__}
    assert library == set(NAMED) - {"window"}
    assert set(SHORT.values()) <= set(NAMED)
    short, name = next(iter(SHORT.items()))  # each that is explained is compiled
    one, other = (out_of(capsys, "explain", "attention", "--variant", word) for word in (short, name))
    assert one.splitlines()[1:] == other.splitlines()[1:]
    with pytest.raises(SystemExit):
        main(["kernels", "explain", "--help"])
    words = capsys.readouterr().out.replace(",", " ").replace(".", " ").split()
    assert set(NAMED) <= set(words)


def test_only_what_could_run_shows_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", "attention", "--device", "cuda", "--variant", "alibi", "--dtype", "fp32")
    text = out_of(capsys, *words)
    assert "hopper: no: q is torch.float32" in text and "CUDA C++" not in text
    assert ("--- Triton ---" in text) == (importlib.util.find_spec("triton") is not None)


def test_explain_says_what_is_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "explain", "attention", "--device", "cuda", "--head-dim", "80")
    assert "head_dim 80 is not one of" in text
    if importlib.util.find_spec("triton") is not None:
        assert "triton: runs\n" in text
    assert "3 is not a multiple" in out_of(capsys, "explain", "attention", "--device", "cuda", "--page-size", "3")


def test_explain_of_other_ops_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "quire.kernels.norm.triton" in out_of(capsys, "explain", "norm")
    assert "needs an op: attention, " in out_of(capsys, "explain", code=2)
    assert "did you mean attention" in out_of(capsys, "explain", "atention", code=2)
    assert "did you mean sinks" in out_of(capsys, "explain", "attention", "--variant", "sink", code=2)
    error = out_of(capsys, "explain", "attention", "--q-heads", "9", "--kv-heads", "2", code=2)
    assert "9 query heads for 2 KV heads" in error


def test_every_entry_of_the_catalogue_is_a_module() -> None:
    for entry in catalog.CATALOGUE:
        assert importlib.util.find_spec(entry.module) is not None, entry.module
