"""Trees of drafts under a grammar: each node is chosen under the mask of its own path, and a branch that was not taken
leaves nothing in the grammar's state."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import byte_model
import numpy as np
import pytest
from grammar_draft_cases import answers, check, drafting, engine, hide, wholes_of, wishes
from test_drafts_grammar import APART, set_apart

from quire import LLM
from quire.compute.runner.lengths import SlotLengths
from quire.compute.runner.tail import Tail
from quire.core.commands import Cancel, Submit
from quire.core.plan import SpanDrafts, StepMasks

pytestmark = pytest.mark.usefixtures("timed_briefly")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return byte_model.make(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def plain(folder: pathlib.Path) -> list[Any]:
    llm = engine(folder)
    said = answers(llm)
    llm.shutdown()
    return said


@pytest.mark.parametrize("few_pages", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_answers_are_those_without_drafts(
    folder: pathlib.Path, plain: list[Any], depth: int, few_pages: bool
) -> None:
    """Few pages: some are preempted between their drafts."""
    llm = drafting(folder, pipeline_depth=depth, num_gpu_blocks_override=40 if few_pages else 0)
    check(llm, plain, (0.6, 1.0), hide)


@pytest.mark.parametrize("captures", [True, False])
def test_a_device_apart(folder: pathlib.Path, captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which launches a step at once, and the choice of its tokens when the masks have come."""
    set_apart(monkeypatch, captures)
    llm = engine(folder, pipeline_depth=1, **APART)
    said = answers(llm)
    llm.shutdown()
    check(drafting(folder, pipeline_depth=2, **APART), said, (0.8,), hide)


@pytest.fixture(scope="module")
def hiding(folder: pathlib.Path, plain: list[Any]) -> Iterator[LLM]:
    llm = drafting(folder)
    hide(llm, wholes_of(llm, plain), 0.8)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("n_steps", [1, 4, 7, 12])
def test_cancelled_at_any_step(hiding: LLM, plain: list[Any], n_steps: int) -> None:
    """The neighbours say what they say without, and neither a matcher nor a page is left."""
    prompts, params = wishes()
    made = [hiding._input_processor.request(*one) for one in zip(prompts[:6], params[:6], strict=True)]
    for request in made:
        hiding.engine.handle(Submit(request))
    names = [request.request_id for request in made]
    said: dict[str, list[int]] = {name: [] for name in names}

    def step() -> None:
        for delta in hiding.engine.step():
            said[delta.request_id] += delta.token_ids

    while hiding.engine.grammars.n_compiling:
        step()
    for _ in range(n_steps):
        step()
    hiding.engine.handle(Cancel(names[::2]))
    while hiding.engine.has_work():
        step()
    assert hiding.engine.grammars.n_live == 0
    stats = hiding.engine.stats()
    assert stats.n_pages_free == stats.n_pages
    for at in (1, 3, 5):
        assert said[names[at]] == plain[at][1]


Patch = pytest.MonkeyPatch


def masks_of_the_row_before(patch: Patch) -> None:
    """A stale state of the grammar: a draft's row is chosen under the mask of the row before it."""
    real = Tail._sample

    def sample(self: Tail, step: Any, logits: Any, bits: Any) -> Any:
        lines, slots = step.batch.mask_lines, step.batch.sampled_slots
        is_behind = np.r_[False, (slots[1:] == slots[:-1]) & (lines[1:] > 0)]
        step.batch.mask_lines = np.where(is_behind, lines - 1, lines).astype(np.int32)
        return real(self, step, logits, bits)

    patch.setattr(Tail, "_sample", sample)


def branches_are_one_chain(patch: Patch) -> None:
    """The matcher goes on from the branch before."""
    real = SlotLengths.drafts_of
    patch.setattr(SlotLengths, "drafts_of", lambda *given: [SpanDrafts(one.tokens) for one in real(*given)])


def masks_by_depth(patch: Patch) -> None:
    """One state for each depth: that of the first node there."""
    real, newest = Tail.choose, list[Any]()
    drafts_of = SlotLengths.drafts_of

    def noted(self: SlotLengths, settled: Any) -> list[SpanDrafts]:
        newest[:] = drafts_of(self, settled)
        return list(newest)

    def choose(self: Tail, step: Any, read: Any, masks: StepMasks | None, then: Any = None) -> Any:
        if masks is not None and step.plan.masks_drafts:
            lines = np.frombuffer(masks.bits, "<i4").reshape(step.batch.n_masks, -1).copy()
            at = 0
            for drafts in newest:
                first, depths = dict[int, int](), list[int]()
                for place in range(len(drafts)):
                    above = drafts.above(place)
                    depths.append(1 + (depths[above] if above >= 0 else 0))
                    lines[at + 1 + place] = lines[at + 1 + first.setdefault(depths[-1], place)]
                at += 1 + len(drafts)
            masks = StepMasks(masks.step, lines.reshape(-1).view(np.uint8).data)
        return real(self, step, read, masks, then)

    patch.setattr(SlotLengths, "drafts_of", noted)
    patch.setattr(Tail, "choose", choose)


@pytest.mark.parametrize("plant", [masks_of_the_row_before, branches_are_one_chain, masks_by_depth])
def test_planted_bugs_are_caught(
    folder: pathlib.Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch, plant: Callable[[Patch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(drafting(folder), plain, (0.5, 0.8), hide)
