"""What weights will take, computed from headers, against what they take when they are loaded."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from family_cases import TINY

from quire.bench.shape import FOLDER
from quire.compute.weights.footprint import Weights
from quire.config.model import read_arch
from quire.config.resolve import NOT_ROUNDED, ROUNDED_ON
from quire.kernels import native

CPU = torch.device("cpu")
ODD = {"hidden_size": 96, "intermediate_size": 104, "num_hidden_layers": 2, "head_dim": 32}
EVEN = {"hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64}


@pytest.mark.parametrize("scheme", [*NOT_ROUNDED, *ROUNDED_ON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [ODD | {"tie_word_embeddings": True}, EVEN | {"attention_bias": True}])
def test_equal_to_the_loaded_model(
    fields: dict[str, Any], dtype: torch.dtype, scheme: str, tmp_path: pathlib.Path, tools: dict[str, Any]
) -> None:
    tools["random_checkpoint"](tmp_path, "Llama", **fields)
    arch = read_arch(tmp_path)
    for load_format in ("auto", "dummy"):
        found = Weights(tmp_path, arch, CPU, load_format).footprint(dtype, scheme)
        model = tools["load"](tmp_path, dtype, quantization=scheme, load_format=load_format)
        assert found.held_bytes == model.n_bytes
        assert found.held_bytes <= found.peak_bytes <= found.address_bytes


@pytest.mark.parametrize("scheme", [*NOT_ROUNDED, *ROUNDED_ON])
@pytest.mark.parametrize("family", ["Phi3", "GPTNeoX", "Olmo"])
def test_fused_matrices_and_norms_without_weights(
    family: str, scheme: str, tmp_path: pathlib.Path, tools: dict[str, Any]
) -> None:
    tools["random_checkpoint"](tmp_path, family, **EVEN)
    found = Weights(tmp_path, read_arch(tmp_path), CPU).footprint(torch.bfloat16, scheme)
    assert found.held_bytes == tools["load"](tmp_path, torch.bfloat16, quantization=scheme).n_bytes
    assert found.held_bytes <= found.peak_bytes <= found.address_bytes


def test_without_the_native_kernels(
    tmp_path: pathlib.Path, tools: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools["random_checkpoint"](tmp_path, "Qwen3", **ODD)
    monkeypatch.setattr(native, "library", lambda: None)
    for dtype in (torch.float32, torch.bfloat16):
        found = Weights(tmp_path, read_arch(tmp_path), CPU).footprint(dtype, "auto")
        assert found.held_bytes == tools["load"](tmp_path, dtype, quantization="auto").n_bytes


@pytest.mark.parametrize("scheme", ["auto", "none", "int8-g32", "int4-g32", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf(
    tied: bool, scheme: str, tmp_path: pathlib.Path, tools: dict[str, Any], write_gguf: Callable[..., Any]
) -> None:
    oracle = tools["random_checkpoint"](tmp_path / "hf", "Llama", **EVEN, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "m.gguf", oracle, "llama", lambda name: "Q8_0" if "attn" in name else "Q4_0")
    found = Weights(path, read_arch(path), CPU).footprint(torch.bfloat16, scheme)
    assert found.held_bytes == tools["load"](path, torch.bfloat16, quantization=scheme).n_bytes


def test_a_gpu_holds_a_tied_head_once_and_rounds_nothing(tmp_path: pathlib.Path, tools: dict[str, Any]) -> None:
    tools["random_checkpoint"](tmp_path, "Llama", **ODD, tie_word_embeddings=True)
    arch = read_arch(tmp_path)
    found = Weights(tmp_path, arch, torch.device("cuda")).footprint(torch.bfloat16, "auto")
    assert found.held_bytes == found.peak_bytes == 2 * arch.n_parameters


PEAK = """
import resource, sys, torch
from quire.compute.weights.footprint import Weights
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch
from quire.config.resolve import NOT_ROUNDED, ROUNDED_ON
from quire.core import host
import pathlib
folder, scheme = pathlib.Path(sys.argv[1]), sys.argv[2]
arch = read_arch(folder)
weights = Weights(folder, arch, torch.device("cpu"), "dummy").footprint(torch.bfloat16, scheme)
torch.ones(8).normal_()
before = host.resident_bytes()
load_model(folder, arch, dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=64, load_format="dummy",
           quantization=scheme)
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
files = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssFile"))
print(weights.peak_bytes, peak - files - before)
"""


@pytest.mark.parametrize(("scheme", "least"), [("none", 0.9), ("int4", 0.9), ("auto", 0.6)])
def test_the_peak_is_that_of_the_process(scheme: str, least: float, tmp_path: pathlib.Path) -> None:
    """Random weights of 0.3 GB, where a head that is rounded is there twice; other memory of a process is small.
    'auto': in codes, which a CPU has no pages for until they are filled, after all others."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "vocab_size": 32000}
    config = transformers.LlamaConfig(**{**TINY, **sizes}, head_dim=64, architectures=["LlamaForCausalLM"])
    coded = {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}} if scheme == "auto" else {}
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), **coded, "dtype": "float32"}))
    command = [sys.executable, "-c", PEAK, str(tmp_path), scheme]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    expected, found = map(int, done.stdout.split())
    assert least * expected < found < expected + (160 << 20)


def test_llama_8b_by_its_config_alone() -> None:
    """The count that its authors publish, two bytes each; in the other forms what the format says."""
    folder = FOLDER / "llama-3.1-8b"
    weights = Weights(folder, read_arch(folder), CPU, "dummy")
    n_parameters, table, norms = 8_030_261_248, 128256 * 4096, 65 * 4096
    found = {scheme: weights.footprint(torch.bfloat16, scheme).held_bytes for scheme in ("auto", "int4-g32")}
    assert found["auto"] == 2 * n_parameters
    assert found["int4-g32"] == 2 * (table + norms) + (n_parameters - table - norms) * (4 + 16 / 32) / 8
