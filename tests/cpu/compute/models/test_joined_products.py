"""Queries and lines of latent attention as one product, where matrices lie as on a GPU (here in float64)."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from family_cases import IDS, checkpoint_of
from thread_ranks import ThreadComm, together

from quire.compute.layers.latent import LatentAttention
from quire.compute.models.decoder import Decoder
from quire.compute.weights.footprint import Weights
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch

Tools = dict[str, Callable[..., Any]]
CPU = torch.device("cpu")
CHUNKS = [17, len(IDS) - 17]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("lite")
    return folder, checkpoint_of("deepseek_v2-lite", folder)


def load(folder: pathlib.Path, dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    return load_model(folder, read_arch(folder), dtype=dtype, device=CPU, max_model_len=128, **options)


def mixers(model: Decoder) -> list[LatentAttention]:
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, LatentAttention)]


def test_one_product_gives_what_two_do(
    made: tuple[pathlib.Path, transformers.PreTrainedModel], tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = made
    model = load(folder)
    assert len(mixers(model)) == len(model.layers)
    expected = oracle(torch.tensor([IDS])).logits[0]
    with monkeypatch.context() as context:
        for mixer in mixers(model):
            assert mixer.joined is not None and mixer.joined.are_bare
            context.setattr(mixer, "first", None), context.setattr(mixer, "queries", None)  # what is not to be called
        together = tools["run_chunks"](model, torch.float64, IDS, CHUNKS)
    assert (together - expected).abs().max() <= 1e-4
    called = []
    for mixer in mixers(model):
        for linear in mixer.joined.linears:  # as adapters do
            linear.run = lambda *given, of=linear, **options: called.append(of) or of.product(*given, **options)
        assert not mixer.joined.are_bare
    apart = tools["run_chunks"](model, torch.float64, IDS, CHUNKS)
    assert len(called) == 2 * len(CHUNKS) * len(model.layers)
    assert (apart - together).abs().max() <= 1e-12


def test_it_is_counted_once_and_moved_as_one(made: tuple[pathlib.Path, Any]) -> None:
    model = load(made[0])
    assert model.n_bytes == Weights(made[0], model.arch, CPU).footprint(torch.float64, "none").held_bytes
    for layer, mixer in zip(model.layers, mixers(model), strict=True):
        held = sum(one.nbytes for one in layer.tensors())
        assert held == sum(linear.n_bytes for linear in layer.linears)
        assert all(linear.weight is None for linear in mixer.linears), "views would keep what is moved"
        for tensor in layer.tensors():
            tensor.data = torch.zeros_like(tensor)  # as memory that is given back and taken again
        assert not mixer.joined.weight.any()
        assert not any(one.product.tensors["weight"].any() for one in mixer.linears)


def test_ranks_have_the_rows_of_their_heads(made: tuple[pathlib.Path, Any], tools: Tools) -> None:
    folder = made[0]
    expected = tools["run_chunks"](load(folder), torch.float64, IDS, CHUNKS)

    def run(comm: ThreadComm) -> torch.Tensor:
        model = load(folder, comm=comm)
        mixer = mixers(model)[0]
        assert mixer.joined.linears[0].matrix.n_out == mixer.spec.n_heads * mixer.spec.qk_head_dim
        with torch.inference_mode():
            return tools["run_chunks"](model, torch.float64, IDS, CHUNKS)

    for found in together(2, run):
        assert (found - expected).abs().max() <= 1e-9


def test_they_are_apart_where_they_are_kept_otherwise(made: tuple[pathlib.Path, Any]) -> None:
    assert all(mixer.joined is None for mixer in mixers(load(made[0], torch.float32, quantization="int8")))
