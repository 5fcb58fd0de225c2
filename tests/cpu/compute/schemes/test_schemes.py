"""Schemes: what each layer becomes, what it takes, and loading with few matrices in memory twice."""

from __future__ import annotations

import functools
import json
import pathlib
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.schemes.packed import PackedProduct, Rounded
from quire.compute.weights.loader import load_model
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.parameters import Matrix
from quire.config.resolve import NOT_ROUNDED, ROUNDED_ON
from quire.core.errors import LoadError
from quire.kernels import qgemm
from quire.kernels.qgemm import reference
from quire.kernels.qgemm import weight as weights

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NAMES = tuple(qgemm.SCHEMES)


def matrix(n_in: int, *rows: int, bias: bool = False) -> Matrix:
    return Matrix(n_in=n_in, parts=tuple((str(part), n) for part, n in enumerate(rows)), bias=bias)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def write(folder: pathlib.Path, *, tied: bool) -> ModelArch:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    arch = read_arch(folder)
    torch.manual_seed(0)
    blank = decoder_on(torch.device("cpu"), arch, torch.float32, 1)
    tensors = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in blank.weights()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return arch


def load(folder: pathlib.Path, quantization: str, **options: Any) -> Decoder:
    return load_model(
        folder,
        read_arch(folder),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_model_len=64,
        quantization=quantization,
        **options,
    )


def packed(linear: Linear) -> qgemm.PackedWeight:
    assert isinstance(linear.product, PackedProduct)
    return linear.product.packed


def test_the_option_names_the_schemes() -> None:
    hint = typing.get_type_hints(EngineConfig)["quantization"]
    assert list(typing.get_args(hint)) == ["auto", "none", *NAMES, "fp8"]
    assert set(typing.get_args(hint)) == {*NOT_ROUNDED, *ROUNDED_ON}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(64, 32), (200, 48), (64 * 5 + 1, 96)])
def test_pieces_make_the_same_matrix(name: str, shape: tuple[int, int], monkeypatch: Any) -> None:
    """Of the path without a library, and of 8 bits without groups."""
    weight = torch.randn(shape).bfloat16()
    whole = weights.pack(weight, name, 2.0**-18)
    monkeypatch.setattr(weights, "PIECE_VALUES", 1)
    pieces = weights.pack(weight, name, 2.0**-18)
    assert (pieces.scheme, pieces.n, pieces.k) == (whole.scheme, whole.n, whole.k)
    assert torch.equal(pieces.data, whole.data) and torch.equal(pieces.scales, whole.scales)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_its_packed_matrix(name: str) -> None:
    make = functools.partial(torch.empty, dtype=torch.bfloat16)
    linear = Linear(make, matrix(96, 64, 32, 32, bias=True), Rounded(name))
    for index in range(3):
        for tensor in linear.part(index).values():
            tensor.normal_()
    assert linear.weight is not None
    weight, bias = linear.weight.clone(), linear.bias
    linear.finish()
    x = torch.randn(5, 96).bfloat16()
    expected = reference.linear(x, qgemm.pack(weight, name), bias)
    assert torch.allclose(linear(x).float(), expected.float(), rtol=8e-3, atol=8e-2)
    product = linear.product
    linear.finish()
    assert linear.product is product


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_is_packed_from_its_own_weights(name: str, tied: bool, tmp_path: pathlib.Path) -> None:
    arch = write(tmp_path, tied=tied)
    model = load(tmp_path, name)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for i, block in enumerate(model.layers):
        at = f"model.layers.{i}."
        expected = {
            "qkv": torch.cat([stored[f"{at}self_attn.{one}_proj.weight"] for one in "qkv"]),
            "out": stored[f"{at}self_attn.o_proj.weight"],
            "up": torch.cat([stored[f"{at}mlp.{one}_proj.weight"] for one in ("gate", "up")]),
            "down": stored[f"{at}mlp.down_proj.weight"],
        }
        for key, weight in expected.items():
            layer = getattr(block.mixer if key in ("qkv", "out") else block.ffn, key)
            assert torch.equal(packed(layer).dequantized(), qgemm.pack(weight, name).dequantized()), f"{i} {key}"
    head = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert packed(model.head).scheme == name
    assert torch.equal(packed(model.head).dequantized(), qgemm.pack(head, name).dequantized())
    assert torch.equal(model.embed.weight, stored["model.embed_tokens.weight"])
    assert arch.tie_embeddings == tied


def test_bytes_are_those_of_the_tensors(tmp_path: pathlib.Path) -> None:
    """Against what is reachable from the model, tensor by tensor."""
    write(tmp_path, tied=True)
    for name in NAMES:
        model = load(tmp_path, name)
        tensors, seen = [model], set()
        total = 0
        while tensors:
            one = tensors.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, torch.Tensor):
                is_rotary = any(one is table for table in model.tables.values())
                total += 0 if is_rotary else one.untyped_storage().nbytes()
            elif isinstance(one, (list, tuple)):
                tensors += one
            elif isinstance(one, qgemm.PackedWeight):
                total += one.data.nbytes + one.scales.nbytes  # they share memory with those of other models
            elif isinstance(one, PackedProduct):
                tensors.append(one.packed)
            elif type(one).__module__.startswith("quire.compute") and hasattr(one, "__dict__"):
                tensors += vars(one).values()
        assert model.n_bytes == total


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_floating_matrices_do_not_pile_up(load_format: str, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """When a matrix is packed, those before it but the last one are gone."""
    write(tmp_path, tied=False)
    packed: list[StorageWeakRef] = []
    most = 0
    original = qgemm.pack

    def counted(weight: torch.Tensor, name: str) -> qgemm.PackedWeight:
        nonlocal most
        packed.append(StorageWeakRef(weight.untyped_storage()))
        most = max(most, sum(not one.expired() for one in packed))
        return original(weight, name)

    monkeypatch.setattr(qgemm, "pack", counted)
    load(tmp_path, "int4", load_format=load_format)
    assert len(packed) == 3 * 4 + 1
    assert most <= 2


def test_dummy_weights_are_the_same_numbers(tmp_path: pathlib.Path) -> None:
    """Packing between two layers does not change what the generator gives to the next."""
    write(tmp_path, tied=False)
    plain = load(tmp_path, "none", load_format="dummy", seed=3)
    model = load(tmp_path, "int8", load_format="dummy", seed=3)
    assert torch.equal(plain.embed.weight, model.embed.weight)
    x = torch.randn(7, 48).bfloat16()
    close = functools.partial(torch.allclose, rtol=0.03, atol=0.02)
    assert close(plain.head(x), model.head(x))
    assert close(plain.layers[2].ffn.up(x).float(), model.layers[2].ffn.up(x).float())


def test_a_matrix_with_an_infinity_is_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path, tied=True)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="without --quantization"):
        load(tmp_path, "int8", check_finite=False)


def test_a_tied_head_has_its_own_copy() -> None:
    table = torch.randn(130, 64).bfloat16()
    kept = table.clone()
    head = Linear(torch.empty, matrix(64, 130), Rounded("int4"), tied=table)
    head.finish()
    assert torch.equal(table, kept)
    logits = head(kept[:3], out=torch.empty(3, 130))
    assert logits.dtype == torch.float32 and logits.shape == (3, 130)
    assert head.n_bytes == 192 * 64 // 2 + 192 * 2
    expected = kept[:3].float() @ kept.float().T
    assert float((logits - expected).norm() / expected.norm()) < 0.1
