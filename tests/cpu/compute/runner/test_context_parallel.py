"""Ranks that share the tokens of steps make what one rank makes: heads divided (Ulysses), or tokens in turn (ring)."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
from calling_device import CallingDevice, LivePlans
from context_cases import of_one, of_ranks, sent_of_prompt
from rank_cases import checkpoint

from quire.compute import platform, worker
from quire.compute.platform import CudaPlatform
from quire.compute.runner.ring import Ring
from quire.config import resolve
from quire.kernels.kvstore.entry import Scales
from quire.planner import context

FOLDER: dict[str, pathlib.Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDER["models"] = tmp_path_factory.mktemp("models")
    alone.cache_clear()


def model(name: str) -> pathlib.Path:
    return pathlib.Path(checkpoint(name, FOLDER["models"] / name))


@functools.cache
def alone(name: str, **options: Any) -> list[Any]:
    return of_one(model(name), **options)


def check(name: str, found: list[tuple[list[Any], dict[str, int]]], **options: Any) -> None:
    """Tokens and logprobs, of prompts too; on every rank the same bits."""
    for own, _ in found:
        assert own == found[0][0], "ranks must agree bit for bit"
    for (tokens, places), (own_tokens, own_places) in zip(alone(name, **options), found[0][0], strict=True):
        assert own_tokens == tokens and own_places.keys() == places.keys()
        for place, (chosen, rank, ids, logprobs) in places.items():
            own_chosen, own_rank, own_ids, own_logprobs = own_places[place]
            assert (own_rank, own_ids) == (rank, ids)
            assert [own_chosen, *own_logprobs] == pytest.approx([chosen, *logprobs], abs=1e-4)


@pytest.mark.parametrize("name, size", [
    ("llama", 2), ("qwen3", 4), ("gemma3", 2), ("gemma2", 4), ("gpt_oss", 2), ("olmo2", 2), ("qwen2_moe", 2),
    ("falcon-alibi-parallel", 4),
])  # fmt: skip
def test_divided_heads(name: str, size: int) -> None:
    check(name, of_ranks(model(name), size, "ulysses"))


@pytest.mark.parametrize("goes", ["keys", "queries", "fewer"])
@pytest.mark.parametrize("name, size", [("llama", 2), ("qwen3", 4), ("gemma3", 3), ("gemma2", 2), ("deepseek_v2", 3)])
def test_tokens_in_turn(name: str, size: int, goes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if goes != "fewer":
        monkeypatch.setattr(Ring, "keys_bytes", lambda *_: 0.0 if goes == "keys" else float("inf"))
    check(name, of_ranks(model(name), size, "ring"))


@pytest.mark.parametrize("goes", ["keys", "queries"])
@pytest.mark.parametrize("name, size", [("llama", 4), ("gemma3", 4), ("qwen3", 6)])
def test_heads_divided_in_a_ring(name: str, size: int, goes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have the same turn."""
    monkeypatch.setattr(Ring, "keys_bytes", lambda *_: 0.0 if goes == "keys" else float("inf"))
    check(name, of_ranks(model(name), size, "ring", ulysses_degree=2))


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("name, options", [
    ("qwen3", {"kv_cache_dtype": "int8"}), ("qwen3", {"quantization": "int8", "dtype": "float32"}),
    ("qwen2_moe", {"quantization": "int8", "dtype": "float32"}),
])  # fmt: skip
def test_numbers_of_8_bits(name: str, method: str, options: dict[str, Any]) -> None:
    """Entries are rounded by token and head, wherever they are stored, and travel as they are; each rank has all
    experts."""
    check(name, of_ranks(model(name), 2, method, **options), **options)


@pytest.mark.parametrize("method, goes", [("ulysses", ""), ("ring", "keys"), ("ring", "queries")])
def test_numbers_of_e4m3(method: str, goes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU keeps them, by the kernels' references: under the scales of a checkpoint, other ones in each layer."""
    scales = {layer: Scales(0.03 * (layer + 1), 0.02 * (layer + 1)) for layer in range(LAYERS)}
    monkeypatch.setattr(worker, "read_kv_scales", lambda *_: scales)
    monkeypatch.setitem(resolve.KV_ROUNDED, "fp8", ("fp8", ("cpu",)))
    monkeypatch.setattr(platform, "obstacle", lambda _: "keys of e4m3")
    monkeypatch.setattr(Ring, "keys_bytes", lambda *_: 0.0 if goes == "keys" else float("inf"))
    check("qwen3", of_ranks(model("qwen3"), 2, method, kv_cache_dtype="fp8"), kv_cache_dtype="fp8")


@pytest.mark.parametrize("method, n_captures", [("ulysses", True), ("ring", False)])
def test_as_on_a_gpu(method: str, n_captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are calls here: steps of few rows are captured where heads are divided, long ones never are."""
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(platform.cuda, "n_devices", lambda: 2)
    monkeypatch.setitem(context.LEAST_ROWS, "cuda", 16)
    LivePlans(monkeypatch)
    made: list[CallingDevice] = []

    def on_gpu() -> CudaPlatform:
        found = CudaPlatform()
        assert isinstance(found.device, CallingDevice)
        made.append(found.device)
        return found

    check("qwen3", of_ranks(model("qwen3"), 2, method, on_gpu))
    assert all((device.n_replays > 0) is n_captures for device in made) and len(made) == 2


LAYERS, HEADS, KV_HEADS, DIM, ITEM = 3, 4, 2, 32, 4
"""Of the small Qwen 3."""


@pytest.mark.parametrize("size, kv_each", [(2, 1), (4, 1)])
def test_divided_heads_send_what_the_formula_says(size: int, kv_each: int) -> None:
    row, out = (HEADS // size + 2 * kv_each) * DIM, HEADS // size * DIM
    expected = LAYERS * context.ulysses_bytes(60 / size, row, out, ITEM, size)
    for sent in sent_of_prompt(model("qwen3"), size, "ulysses", (60,)):
        assert sent["all_to_all"] == expected and set(sent) == {"all_to_all", "all_reduce"}


def test_what_goes_round_is_what_is_fewer() -> None:
    size, token = 2, 2 * KV_HEADS * DIM * ITEM
    queries = LAYERS * context.ring_queries_bytes(16, HEADS, DIM, DIM, ITEM, size)
    for chunks, keys in (((32,), 16), ((24, 24, 32), 40), ((64, 32), 48)):  # of a rank, in whole pages of 8
        fewer = min(LAYERS * context.ring_keys_bytes(keys, token, size), queries)
        assert (fewer < queries) is (chunks == (32,))
        for sent in sent_of_prompt(model("qwen3"), size, "ring", chunks):
            assert sent["exchange"] == fewer and set(sent) == {"exchange", "all_reduce"}
