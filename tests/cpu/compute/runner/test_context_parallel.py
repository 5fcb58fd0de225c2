"""Ranks that share the tokens of steps make what one rank makes: heads divided (Ulysses), or tokens in turn (ring)."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
from context_cases import of_one, of_ranks
from rank_cases import checkpoint

from quire.compute.runner.ring import Ring

FOLDER: dict[str, pathlib.Path] = {}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDER["models"] = tmp_path_factory.mktemp("models")
    alone.cache_clear()


def model(name: str) -> pathlib.Path:
    return pathlib.Path(checkpoint(name, FOLDER["models"] / name))


@functools.cache
def alone(name: str) -> list[Any]:
    return of_one(model(name))


def check(name: str, found: list[tuple[list[Any], dict[str, int]]]) -> None:
    """Tokens and logprobs, of prompts too; on every rank the same bits."""
    for own, _ in found:
        assert own == found[0][0], "ranks must agree bit for bit"
    for (tokens, places), (own_tokens, own_places) in zip(alone(name), found[0][0], strict=True):
        assert own_tokens == tokens and own_places.keys() == places.keys()
        for place, (chosen, rank, ids, logprobs) in places.items():
            own_chosen, own_rank, own_ids, own_logprobs = own_places[place]
            assert (own_rank, own_ids) == (rank, ids)
            assert [own_chosen, *own_logprobs] == pytest.approx([chosen, *logprobs], abs=1e-4)


@pytest.mark.parametrize("name, size", [
    ("llama", 2), ("qwen3", 4), ("gemma3", 2), ("gemma2", 4), ("gpt_oss", 2), ("olmo2", 2), ("bloom", 4), ("qwen2_moe", 2),
])  # fmt: skip
def test_divided_heads(name: str, size: int) -> None:
    check(name, of_ranks(model(name), size, "ulysses"))


@pytest.mark.parametrize("goes", ["keys", "queries", "fewer"])
@pytest.mark.parametrize("name, size", [("llama", 2), ("qwen3", 4), ("gemma3", 3), ("gemma2", 2), ("deepseek_v2", 3)])
def test_tokens_in_turn(name: str, size: int, goes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if goes != "fewer":
        monkeypatch.setattr(Ring, "keys_bytes", lambda *_: 0.0 if goes == "keys" else float("inf"))
    check(name, of_ranks(model(name), size, "ring"))
