"""`quire quantize` on a random model of bytes."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import byte_model
import pytest
import torch
from family_cases import random_checkpoint
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from quire.compute.weights.loader import fits
from quire.config.model import read_arch

SMALL = ["--samples", "4", "--sample-tokens", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("model")
    random_checkpoint(folder, "Llama", vocab_size=byte_model.N_LOGITS, num_hidden_layers=2, dtype=torch.bfloat16)
    byte_model.make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, again. " * 30)
    return str(path)


def test_a_folder_and_its_figures(
    model: pathlib.Path, text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    out.mkdir()
    words = ["quantize", str(model), str(out), "--scheme", "int4-g32", "--calibrate", text, "--act-order"]
    assert main([*words, "--json", str(report), *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "layer 1: self_attn.q_proj" in printed and "bits per byte of 124 held-out bytes: " in printed, printed
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "generation_config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"] and config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for name, home in index.items():
        assert name in load_file(out / home)
    found = load_file(out / index["model.layers.1.mlp.down_proj.weight_packed"])
    assert found["model.layers.1.mlp.down_proj.weight_packed"].shape == (64, 12)
    assert found["model.layers.1.mlp.down_proj.weight_scale"].dtype == torch.bfloat16
    assert fits(out, read_arch(out)) == (3, len(index))
    results = json.loads(report.read_text())["results"]
    assert results["bits_per_byte"]["after"] == pytest.approx(results["bits_per_byte"]["before"], rel=0.02)


def test_what_is_wrong_is_said_before_anything_is_made(
    model: pathlib.Path, text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    out, full, short, link = (tmp_path / name for name in ("out", "full", "short.txt", "link"))
    full.mkdir()
    link.symlink_to(full)
    (full / "note").write_text("mine")
    short.write_text("Too short.")
    quantised, damaged = tmp_path / "quantised", tmp_path / "damaged"
    shutil.copytree(model, damaged)
    once = ["--calibrate", text, "--scheme", "int4-g32", "--method", "rtn", *SMALL]
    assert main(["quantize", str(model), str(quantised), *once]) == 0
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, damaged / "model.safetensors")
    cases: list[tuple[list[str], str]] = [
        ([str(model), str(out)], "--calibrate FILE is needed"),
        ([str(model), str(out), "--calibrate", str(tmp_path / "none")], "cannot be read: No such file"),
        ([str(model), str(out), "--calibrate", str(short)], "has 10 tokens, and at least 64 are needed"),
        ([str(model), str(full), "--calibrate", text], "is not empty"),
        ([str(model), str(short), "--calibrate", text], "is not a folder: give the name of a new folder"),
        ([str(model), str(link), "--calibrate", text], "is a link: give the name of a new folder"),
        ([str(model), ".", "--calibrate", text], "OUTDIR '.' is the current folder: give the name of a new folder"),
        ([str(model), str(out / "inner"), "--calibrate", text], "cannot be made"),
        ([str(model), str(out), "--calibrate", text, "--act-order", "--method", "rtn"], "belongs to --method gptq"),
        ([str(quantised), str(out), "--calibrate", text], "is quantised already"),
        ([str(damaged), str(out), "--calibrate", text], "model.layers.1.mlp.up_proj.weight in"),
        ([str(model), str(out), "--calibrate", text, "--sample-tokens", "4096"], "more than the model's context, 128"),
    ]
    for words, said in cases:
        assert main(["quantize", *SMALL, *words]) == 2, said
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["quantize", str(model), str(out), "--scheme", "int5"])
    assert "'int5'" in capsys.readouterr().err
    left = {full.name, short.name, link.name, quantised.name, damaged.name}
    assert {path.name for path in tmp_path.iterdir()} == left and [*full.iterdir()] == [full / "note"]


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_at_the_end_of_loops(given: dict[str, str], expected: str) -> None:
    """Else cores that others use make it many times as slow. It must be said before OpenMP is loaded, with torch."""
    code = (
        "import os, sys; from quire.cli import main, quantize\n"
        "quantize.make = lambda *_: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules) or {}\n"
        "main.main(['quantize', 'demo', 'out', '--calibrate', 'text'])\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean | given, check=True)
    assert ran.stdout.split() == [expected, "False"]
