"""What stages load is the whole model, each layer once, in every form, and of other stages' tensors no byte is read."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from family_cases import checkpoint_of, random_checkpoint
from gguf_files import write_gguf
from test_rank_weights import CPU, QWEN3

from quire.compute.models.decoder import Decoder
from quire.compute.schemes.packed import PackedProduct
from quire.compute.weights import loader
from quire.compute.weights.footprint import Weights
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch
from quire.config.stages import LayerRange, layer_range


def load(path: pathlib.Path, layers: LayerRange | None, **options: Any) -> Decoder:
    arch = read_arch(path)
    return load_model(
        path, arch, layers=layers, progress=False, dtype=torch.float32, device=CPU, max_model_len=64, **options
    )


def numbers(model: Decoder) -> dict[str, torch.Tensor]:
    """Name of each parameter → its numbers, of packed matrices dequantised."""
    found = {f"{norm.table.name}": norm.weight for norm in model.norms() if norm.weight is not None}
    if model.range.is_first:
        found["embedding"] = model.embed.weight
    for linear in model.linears():
        product = linear.product
        packed = isinstance(product, PackedProduct)
        found[linear.matrix.name] = product.packed.dequantized() if packed else product.tensors["weight"]  # type: ignore[attr-defined]
    return found


def made(name: str, folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]]:
    """A checkpoint of several layers, and options."""
    if name in ("int8", "dummy"):
        random_checkpoint(folder, "Qwen3", **QWEN3, num_hidden_layers=5, tie_word_embeddings=name == "int8")
        return folder, {"quantization": "int8"} if name == "int8" else {"load_format": "dummy", "seed": 3}
    if name == "gguf":
        fields = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}
        model = random_checkpoint(folder, "Llama", **fields, num_hidden_layers=5, vocab_size=256)
        return write_gguf(folder / "model.gguf", model, "llama", "Q8_0"), {"quantization": "auto"}
    checkpoint_of(name, folder)
    return folder, {}


@pytest.mark.parametrize("name, n_stages", [("int8", 3), ("dummy", 2), ("gguf", 2), ("gemma2", 2), ("gpt2", 2)])
def test_stages_have_each_layer_once(
    name: str, n_stages: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = made(name, tmp_path)
    arch, read = read_arch(path), list[str]()
    whole, original = numbers(load(path, None, **options)), loader.pieces

    def pieces(descriptor: int, entry: Any, *rest: Any) -> Any:
        read.append(entry.name)
        return original(descriptor, entry, *rest)

    monkeypatch.setattr(loader, "pieces", pieces)
    found: dict[str, torch.Tensor] = {}
    for stage in range(n_stages):
        layers = layer_range(arch, stage, n_stages, "")
        model = load(path, layers, **options)
        own = numbers(model)
        assert not found.keys() & own.keys(), "nothing is twice"
        found |= own
        load_format, quantization = options.get("load_format", "auto"), options.get("quantization", "none")
        weights = Weights(path, arch, CPU, load_format, layers=layers)
        assert weights.footprint(torch.float32, quantization).held_bytes == model.n_bytes
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[one], whole[one]) for one in whole)
    n_twice = len(read) - len(set(read))
    assert n_twice <= (n_stages - 1 if arch.tie_embeddings else 0), "what no two stages have is read once"
