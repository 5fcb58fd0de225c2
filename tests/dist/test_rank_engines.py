"""Engines of several ranks say what one rank says, whatever else an engine does: chunks, prefixes, preemption, drafts,
masks. Processes beside this one, which is rank 0."""

from __future__ import annotations

import pathlib

import pytest
from rank_cases import FAMILIES, NGRAM, SIZE, answers, checkpoint

from quire import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_say_what_one_says(name: str, folder: pathlib.Path) -> None:
    model = checkpoint(name, folder / name)
    alone = LLM(model, **SIZE)
    expected = answers(alone)
    alone.shutdown()
    llm = LLM(model, **SIZE, tensor_parallel_size=2, speculative_config=NGRAM)
    try:
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.accepted_tokens > 0
    finally:
        llm.shutdown()
