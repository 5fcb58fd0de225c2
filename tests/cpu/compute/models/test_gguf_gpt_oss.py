"""gpt-oss from GGUF files against transformers, and against the checkpoint that a file was made from, bit for bit."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from family_cases import IDS
from gguf_experts import as_on_gpus, checkpoints, names_of, numbers_of, schemes, write_gpt_oss

from quire.compute.models.decoder import Decoder
from quire.config.model import read_arch
from quire.kernels import native

Tools = dict[str, Callable[..., Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return checkpoints(tmp_path_factory.mktemp("gpt-oss"))


def logits_of(folder: pathlib.Path) -> torch.Tensor:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.Tensor(oracle(torch.tensor([IDS])).logits[0])


def check_near(tools: Tools, model: Decoder, expected: torch.Tensor) -> None:
    found = tools["run_chunks"](model, torch.float32, IDS, [len(IDS)])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_the_architecture_is_that_of_the_checkpoint(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Windows in every second layer, sinks, YaRN whose borders are not rounded, which no key says, and experts."""
    ours, theirs = read_arch(write_gpt_oss(folder / "coded", tmp_path / "m.gguf")), read_arch(folder / "coded")
    assert [layer.mixer for layer in ours.layers] == [layer.mixer for layer in theirs.layers]
    assert [layer.ffn for layer in ours.layers] == [layer.ffn for layer in theirs.layers]
    assert set(ours.windows) == {0, 9} and not ours.ropes[0].truncate and ours.ropes[0].attention_factor > 1
    assert (ours.vocab_size, ours.max_position, ours.tie_embeddings) == (256, theirs.max_position, False)


@pytest.mark.parametrize("dense", ["F32", "Q8_0"])
def test_logits(folder: pathlib.Path, dense: str, tmp_path: pathlib.Path, tools: Tools) -> None:
    """With the numbers that the package decodes; what is in Q8_0, as in published files, is kept beside experts."""
    path = write_gpt_oss(folder / "coded", tmp_path / "m.gguf", dense)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32)
    numbers = {name: numbers_of(path, own) for name, own in names_of(folder / "coded").items() if "exps" not in own}
    left = oracle.load_state_dict(numbers, strict=False)
    assert not left.unexpected_keys and all(".experts." in name for name in left.missing_keys)
    with torch.inference_mode():
        expected = oracle(torch.tensor([IDS])).logits[0]
    check_near(tools, tools["load"](path, quantization="none"), expected)
    model = tools["load"](path, quantization="auto")
    assert schemes(model) == {"int4-g32" if native.library() is not None else "float32"}
    for layer in model.layers:
        kept = {linear.scheme.name for linear in layer.mixer.linears}
        assert kept == {"int8-g32" if dense == "Q8_0" and native.library() is not None else "float32"}


@pytest.mark.parametrize(
    ("experts", "on_cpu", "on_gpu"),
    [("F32", "float32", "float32"), ("Q8_0", "int8-g32", "float32"), ("Q4_0", "int4-g32", "int4")],
)
def test_experts_in_other_types(
    folder: pathlib.Path, experts: str, on_cpu: str, on_gpu: str, tmp_path: pathlib.Path, tools: Tools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = write_gpt_oss(folder / "floating", tmp_path / "m.gguf", experts=experts)
    plain, kept = (tools["load"](path, quantization=one) for one in ("none", "auto"))
    if experts == "F32":
        check_near(tools, plain, logits_of(folder / "floating"))
    assert schemes(kept) == {on_cpu if native.library() is not None else "float32"}
    expected, found = (tools["run_chunks"](one, torch.float32, IDS, [len(IDS)]) for one in (plain, kept))
    assert float((found - expected).norm() / expected.norm()) < 0.1
    as_on_gpus(monkeypatch)
    model = tools["load"](path, quantization="auto")
    assert schemes(model) == {on_gpu}
    check_near(tools, model, expected)




def test_a_gpu_multiplies_by_blocks(
    folder: pathlib.Path, tmp_path: pathlib.Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the references of its ops."""
    as_on_gpus(monkeypatch)
    model = tools["load"](write_gpt_oss(folder / "coded", tmp_path / "m.gguf"), quantization="auto")
    assert schemes(model) == {"mxfp4"}
    check_near(tools, model, logits_of(folder / "plain"))
