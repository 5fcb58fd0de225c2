"""Formats of quantised checkpoints: what is written, loaded and measured of each, on a tiny model."""

from __future__ import annotations

import json
import pathlib
import shutil

import byte_model
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.format_quality import BLOCKS, CODINGS, RESULT, measure, rows, table
from benchmarks.peers import codings, models
from benchmarks.peers.codings import Written
from quire.bench.tasks import Task

TEXTS = {"code": "def add(a, b):\n    return a + b\n" * 3, "docs": "It adds two numbers. " * 4}
TASKS = [Task("def ", "", r"\A()", "empty"), Task("def ", "nothing like it", "", "text")]
N_TOKENS = 258
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "quantization.md"


@pytest.fixture
def source(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """In bfloat16, its key and value matrices of 128 x 256."""
    shape = tmp_path / "shapes" / "tiny"
    shape.mkdir(parents=True)
    byte_model.make(shape)
    config = json.loads((shape / "config.json").read_text()) | {"vocab_size": N_TOKENS, "rope_scaling": None}
    (shape / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(models, "FOLDER", shape.parent)
    folder = tmp_path / "source"
    models.random_checkpoint(folder, "tiny")
    tokenizer = json.loads((shape / "tokenizer.json").read_text())
    tokenizer["model"] |= {"merges": [["d", "d"]], "vocab": tokenizer["model"]["vocab"] | {"dd": N_TOKENS - 1}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(shape / "tokenizer_config.json", folder)
    return folder


def unknown(weight: torch.Tensor) -> Written:
    return {"quant_method": "hqq"}, {"weight": weight}, weight


def test_a_format_is_written_loaded_and_measured(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One that is decoded, with the bits of the numbers that it stands for; one that a CPU keeps; one that is
    refused."""
    place = tmp_path / "place"
    place.mkdir()
    found, refused = rows(source, place, TEXTS, TASKS, 1, {"fp8": codings.fp8_blocks, "hqq": unknown}, ["Q8_0"])
    assert list(found) == ["bfloat16", "float32", "fp8", "gguf Q8_0"] and not list(place.iterdir())
    assert list(refused) == ["hqq"] and "hqq" in refused["hqq"] and str(tmp_path) not in refused["hqq"]
    for row in found.values():
        assert row["tasks"] == {"empty": (1, 1), "text": (0, 1)} and row["accuracy"] == 0.5
        assert row["mean"] == pytest.approx(sum(row["bits_per_byte"].values()) / 2) and 7 < row["mean"] < 9
    plain, fp8, gguf = found["bfloat16"], found["fp8"], found["gguf Q8_0"]
    assert 0.02 < fp8["error_of_weights"] < 0.04 and 0.003 < gguf["error_of_weights"] < 0.01
    assert fp8["file_bytes"] < 0.7 * plain["file_bytes"] and gguf["file_bytes"] < 0.7 * plain["file_bytes"]
    assert fp8["held_as"] == "bfloat16" and "weights_alone" not in fp8
    assert gguf["held_as"] == "int8-g32" and gguf["weights_alone"]["held_as"] == "bfloat16"
    assert gguf["weights_alone"]["bits_per_byte"] != gguf["bits_per_byte"] != plain["bits_per_byte"]

    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if "_proj" in name:
            weights[name] = codings.fp8_blocks(weight)[2].bfloat16()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    again = measure(source, TEXTS, (), 1)
    assert again["bits_per_byte"] == fp8["bits_per_byte"] != plain["bits_per_byte"]


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0"])
def test_blocks_of_gguf(kind: str) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    blocks, numbers = codings.gguf_blocks(weight, kind)
    assert len(blocks) == 8 and 0 < float((numbers - weight.float()).abs().max()) < 0.5


def test_codes_of_packers_are_cut_off() -> None:
    """The largest of 4 bits would be 16."""
    weight = torch.tensor([[-0.52, 15.5, 3.2, 0.6]])
    scales, zeros = torch.ones(1, 1), torch.zeros(1, 1)
    assert codings.at_levels(weight, scales, zeros, 4).tolist() == [[0.0, 15.0, 3.0, 1.0]]


def test_the_page_has_the_recorded_table() -> None:
    results = json.loads(RESULT.read_text())["results"]
    figures, refused = results["formats"], results["refused"]
    assert "\n".join(table(figures)) in PAGE.read_text()
    assert {*figures, *refused} == {"bfloat16", "float32", *CODINGS, *(f"gguf {kind}" for kind in BLOCKS)}
