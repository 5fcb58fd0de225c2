"""Loading into the fused parameters: what lands where, what is tolerated, and every refusal with the tensor's name."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch

from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.weights import loader, pieces
from quire.compute.weights.loader import load_model
from quire.config.arch import ModelArch
from quire.config.model import read_arch
from quire.core import ticker
from quire.core.errors import ConfigError, LoadError

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def blank(arch: ModelArch, dtype: torch.dtype = torch.float32) -> Decoder:
    return decoder_on(torch.device("cpu"), arch, dtype, 1)


def write(folder: pathlib.Path, *, config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> ModelArch:
    """A checkpoint of distinct numbers; `changes` replace, add (or with None drop) tensors; '__' stands for a dot."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    arch = read_arch(folder)
    torch.manual_seed(0)
    tensors = {name: torch.randn(tensor.shape) for name, tensor in blank(arch).weights()}
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return arch


def load(folder: pathlib.Path, **options: Any) -> Decoder:
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "max_model_len": 64, **options}
    return load_model(folder, read_arch(folder), **settings)


def refused(folder: pathlib.Path, *parts: str, **options: Any) -> None:
    with pytest.raises(LoadError) as caught:
        load(folder, **options)
    for part in parts:
        assert part in caught.value.message, caught.value.message


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the parameters readable after loading."""
    monkeypatch.setattr(Linear, "finish", lambda self: None)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("buffer_bytes", [64, 1 << 20])
def test_every_tensor_lands_in_its_place(
    buffer_bytes: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a tensor needs many reads."""
    write(tmp_path)
    monkeypatch.setattr(loader, "BUFFER_BYTES", buffer_bytes)
    model = load(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, tensor in model.weights():
        assert torch.equal(tensor, stored.pop(name)), name
    assert not stored
    block, weights = model.layers[1], dict(model.weights())
    assert torch.equal(block.mixer.qkv.weight[16:24], weights["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(block.ffn.up.weight[24:], weights["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.usefixtures("unpacked")
def test_converts(tmp_path: pathlib.Path) -> None:
    embedding = torch.randn(32, 16, dtype=torch.float64)
    write(tmp_path, model__embed_tokens__weight=embedding)
    assert torch.equal(load(tmp_path, dtype=torch.bfloat16).embed.weight, embedding.to(torch.bfloat16))


def test_missing(tmp_path: pathlib.Path) -> None:
    write(tmp_path, model__norm__weight=None, model__layers__1__self_attn__k_proj__bias=None)
    refused(tmp_path, "no tensor", "'model.layers.1.self_attn.k_proj.bias', 'model.norm.weight'")


def test_many_missing_are_counted(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 9}))
    refused(tmp_path, "no tensor", "and 76 more")


def test_left_over(tmp_path: pathlib.Path) -> None:
    write(tmp_path, model__layers__0__self_attn__o_proj__bias=torch.zeros(16))
    refused(tmp_path, "does not use", "model.layers.0.self_attn.o_proj.bias")


def test_mis_shaped(tmp_path: pathlib.Path) -> None:
    write(tmp_path, model__layers__0__mlp__up_proj__weight=torch.zeros(16, 24))
    refused(tmp_path, "model.layers.0.mlp.up_proj.weight has shape (16, 24)", "(24, 16)")


def test_unusable_dtype(tmp_path: pathlib.Path) -> None:
    write(tmp_path, model__norm__weight=torch.zeros(16, dtype=torch.int64))
    refused(tmp_path, "model.norm.weight has dtype I64")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite(value: float, tmp_path: pathlib.Path) -> None:
    weight = torch.randn(24, 16)
    weight[7, 3] = value
    write(tmp_path, model__layers__1__mlp__gate_proj__weight=weight)
    refused(tmp_path, "model.layers.1.mlp.gate_proj.weight", "NaN or infinite")
    load(tmp_path, check_finite=False)


def test_overflow_in_conversion(tmp_path: pathlib.Path) -> None:
    write(tmp_path, model__norm__weight=torch.full((16,), 1e5))
    load(tmp_path)
    refused(tmp_path, "model.norm.weight", "infinite values as torch.float16", dtype=torch.float16)


def test_tied_head(tmp_path: pathlib.Path) -> None:
    """A head in the file of a tied model must be the embedding."""
    table = torch.randn(32, 16)
    tied = {"tie_word_embeddings": True}
    write(tmp_path, config=tied, model__embed_tokens__weight=table)
    load(tmp_path)
    write(tmp_path, config=tied, model__embed_tokens__weight=table, lm_head__weight=table.clone())
    load(tmp_path)
    load(tmp_path, dtype=torch.bfloat16)
    other = table.clone()
    other[31, 15] += 1
    write(tmp_path, config=tied, model__embed_tokens__weight=table, lm_head__weight=other)
    refused(tmp_path, "lm_head.weight differs from model.embed_tokens.weight")
    write(tmp_path, lm_head__weight=None)
    refused(tmp_path, "no tensor 'lm_head.weight'")


def test_computed_buffers_are_skipped(tmp_path: pathlib.Path) -> None:
    buffer = torch.full((2,), float("nan"))
    write(
        tmp_path,
        model__rotary_emb__inv_freq=buffer,
        model__layers__0__self_attn__rotary_emb__inv_freq=buffer.clone(),
    )
    load(tmp_path)
    write(tmp_path, model__layers__0__mlp__rotary_emb__inv_freq=buffer)
    refused(tmp_path, "does not use")


def test_truncated_while_loading(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    path, real = tmp_path / "model.safetensors", pieces.read_into

    def shrink(*arguments: Any) -> None:
        os.truncate(path, 4096)
        real(*arguments)

    monkeypatch.setattr(pieces, "read_into", shrink)
    refused(tmp_path, str(path), "was truncated meanwhile")


def test_damage_is_found_before_anything_is_allocated(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, model__norm__weight=torch.zeros(15))
    places = []
    real = torch.empty

    def recording(*shape: int, **options: Any) -> torch.Tensor:
        places.append(str(options.get("device")))
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", recording)
    refused(tmp_path, "model.norm.weight has shape")
    assert set(places) == {"meta"}


def test_context_limit(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    for length in (0, 65):
        with pytest.raises(ConfigError, match=r"max_model_len = \d+ must be from 1 to 64"):
            load(tmp_path, max_model_len=length)


@pytest.mark.usefixtures("unpacked")
def test_dummy(tmp_path: pathlib.Path) -> None:
    """Needs config.json only; the seed decides; scales are those of a fresh model."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 4096}))
    one, same, other = (dict(load(tmp_path, load_format="dummy", seed=seed).weights()) for seed in (1, 1, 2))
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name]) and not torch.equal(tensor, other[name]), name
    table = one["model.embed_tokens.weight"]
    assert abs(table.mean()) < 1e-3 and abs(table.std() - 0.02) < 1e-3
    assert abs(one["model.layers.0.input_layernorm.weight"].mean() - 1) < 0.05
    assert abs(one["model.norm.weight"].mean() - 1) < 0.05


def test_progress(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    load(tmp_path)
    assert capfd.readouterr().err == "", "no bar where there is no terminal"
    load(tmp_path, progress=True)
    assert "Loading weights: 100%" in capfd.readouterr().err


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_progress_without_a_terminal(load_format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are counted, and counted once."""
    tickers: list[ticker.Ticker] = []
    plain = ticker.Ticker.__init__

    def noted(self: ticker.Ticker, *arguments: Any) -> None:
        plain(self, *arguments)
        tickers.append(self)

    monkeypatch.setattr(ticker.Ticker, "__init__", noted)
    write(tmp_path)
    load(tmp_path, load_format=load_format, progress=False)
    assert len(tickers) == 1 and tickers[0].done == tickers[0]._total > 0
