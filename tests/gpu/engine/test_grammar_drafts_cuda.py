"""Drafts of sequences under a grammar on a GPU, in captured steps and kernel by kernel: in float32 the tokens are those
without."""

from __future__ import annotations

import pathlib
from typing import Any

import byte_model
import pytest
from grammar_draft_cases import answers, check, compared, drafting, engine, hide

from quire.compute.runner.runner import Runner
from quire.core.plan import StepPlan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n_pages", [200, 40])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_the_answers_are_those_without_drafts(tmp_path: pathlib.Path, eager: bool, depth: int, n_pages: int) -> None:
    """With 40 pages some are preempted between their drafts."""
    folder = byte_model.make(tmp_path)
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float32", "enforce_eager": eager, "pipeline_depth": depth,
        "num_gpu_blocks_override": n_pages,
    }  # fmt: skip
    llm = engine(folder, **options)
    expected = answers(llm)
    llm.shutdown()
    check(drafting(folder, **options), expected, (0.0, 0.6, 1.0))


@pytest.mark.parametrize("n_pages", [200, 40])
@pytest.mark.parametrize("depth", [1, 2])
def test_trees_under_a_grammar(tmp_path: pathlib.Path, depth: int, n_pages: int) -> None:
    """The truth is hidden in random branches; each node has the mask of its own path."""
    folder = byte_model.make(tmp_path)
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float32", "pipeline_depth": depth, "num_gpu_blocks_override": n_pages,
    }  # fmt: skip
    llm = engine(folder, **options)
    expected = answers(llm)
    llm.shutdown()
    check(drafting(folder, **options), expected, (0.6, 1.0), hide)


@pytest.mark.parametrize("depth", [2, 3])
def test_what_is_staged_while_masks_are_made_is_what_is_launched(
    tmp_path: pathlib.Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said, n_staged = byte_model.make(tmp_path), list[list[Any]](), 0
    stage = Runner.stage

    def counted(runner: Runner, plan: StepPlan) -> Any:
        nonlocal n_staged
        found = stage(runner, plan)
        n_staged += found is not None
        return found

    for each in (counted, lambda runner, plan: None):
        monkeypatch.setattr(Runner, "stage", each)
        llm = engine(folder, device="cuda", dtype="float32", pipeline_depth=depth, num_gpu_blocks_override=200)
        said.append([compared(llm, one) for one in answers(llm) + answers(llm)])
        llm.shutdown()
    assert said[0] == said[1] and n_staged > 20
