"""Six families in every way to divide them among two and four ranks, and five with states or norms over all heads in
most: what they say is what one rank says.

Too long for each change, and so not collected by itself: `pytest -n 0 tests/dist/every_division.py`. DEVICE=cuda: ranks
have a GPU each. What is refused is skipped with the reason, and SKIPPED below says which that may be.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from family_cases import CASES, RECURRENT
from rank_cases import FAMILIES, NGRAM, SIZE, answers, checkpoint

from quire import LLM
from quire.control.draft_policy import DraftPolicy
from quire.core.errors import ConfigError

DEVICE: Final = os.environ.get("DEVICE", "cpu")
EXPERTS: Final = ("qwen2_moe", "deepseek_v2", "qwen3_next")
N_LAYERS: Final = 4
"""So that four stages have one each."""
SIZES: Final = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
DIVISIONS: Final = (
    "tp2", "tp4", "pp2", "pp4", "tp2 pp2", "dp2", "dp2 tp2", "tp2 ep", "tp4 ep", "dp2 ep", "pcp2 ulysses", "pcp2 ring",
    "pcp4 ulysses", "pcp4 ring",
)  # fmt: skip
OTHERS: Final = ("olmo2", "qwen3_next", "bamba", "granitemoehybrid", "lfm2")
OF_OTHERS: Final = ("tp2", "tp4", "pp2", "pp4", "tp2 pp2", "dp2", "tp2 ep")
SKIPPED: Final = {("deepseek_v2", "ulysses"), ("qwen3_next", "tp4")}
"""(family, part of a division) that Quire refuses: latent attention has no heads to divide, two heads of keys not four
parts."""


def options_of(name: str, division: str) -> tuple[dict[str, Any], int]:
    """Options of `LLM`, and how many ranks there are."""
    options, n_ranks = dict[str, Any](), 1
    for part in division.split():
        if part[:2] in SIZES and part[2:].isdigit():
            options[SIZES[part[:2]]] = int(part[2:])
            n_ranks *= int(part[2:])
        elif part.startswith("pcp"):
            options["prefill_context_parallel_size"] = n_ranks = int(part[3:])
        elif part == "ep":
            options["enable_expert_parallel"] = True
        else:
            options["context_parallel_method"] = part
    if set(options) <= {"tensor_parallel_size", "enable_expert_parallel"} and name not in RECURRENT:
        options["speculative_config"] = NGRAM
    return options, n_ranks


def cases() -> Iterator[tuple[str, str]]:
    for name in FAMILIES + OTHERS:
        for division in DIVISIONS if name in FAMILIES else OF_OTHERS:
            if "ep" not in division.split() or name in EXPERTS:
                yield name, division


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def answers_of(model: str) -> list[Any]:
    """Of one rank."""
    llm = LLM(model, **SIZE | {"device": DEVICE})
    try:
        found: list[Any] = answers(llm)
    finally:
        llm.shutdown()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "division"), cases())
def test_they_say_what_one_rank_says(name: str, division: str, folder: pathlib.Path) -> None:
    options, n_ranks = options_of(name, division)
    if DEVICE == "cuda" and torch.cuda.device_count() < n_ranks:
        pytest.skip(f"needs {n_ranks} GPUs")
    types = CASES.get(name, ("", {}))[1].get("layer_types")
    more: dict[str, Any] = {} if types is None else {"layer_types": (types * N_LAYERS)[:N_LAYERS]}
    model = checkpoint(name, folder / name, num_hidden_layers=N_LAYERS, **more)
    expected = answers_of(model)
    try:
        llm = LLM(model, **SIZE | {"device": DEVICE} | options)
    except ConfigError as refused:
        assert any(name == family and part in division for family, part in SKIPPED), refused
        pytest.skip(str(refused))
    try:
        if "speculative_config" in options:
            llm.engine.scheduler.live.drafts = DraftPolicy(3, None)  # as many as there may be, whatever steps take here
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.prefix_hits > 0
        assert stats.draft_tokens > 0 or "speculative_config" not in options
    finally:
        llm.shutdown()
