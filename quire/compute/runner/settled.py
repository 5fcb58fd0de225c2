"""A step that verifies drafts, from when it begins until it is known what it kept: the records of `SlotLengths`.

Owns no rule of what is kept. Invariant: a record stays true whoever is in its slots meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from quire.compute.draft.drafter import DraftTree, Queued
from quire.compute.runner.step import Guesses
from quire.compute.runner.trees import Walk
from quire.compute.sample.sampler import split_faults
from quire.core.plan import StepPlan
from quire.core.result import Fault, StepResult, StepTimings


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What of a step's sampled rows counts."""

    n_new: list[int]
    """Tokens of each span that wants one; 0 if the first of its rows failed."""
    rows: list[int]
    """The rows that have them, and those that failed first."""
    n_drafted: list[int]
    """As in `StepResult`."""
    walks: list[Walk]
    """Of the spans that were trees."""

    def split_faults(
        self, token_ids: list[int], statuses: list[int], slots: np.ndarray
    ) -> tuple[list[int], list[int], list[Fault], dict[int, int]]:
        """As `sampler.split_faults` of all sampled rows, with the number of tokens up to each row that counts."""
        ids, codes = [token_ids[row] for row in self.rows], [statuses[row] for row in self.rows]
        tokens, each, faults = split_faults(ids, codes, slots[self.rows])
        return tokens, self.n_new, faults, dict(zip(self.rows, itertools.accumulate(each), strict=True))

    def result(
        self, step: int, token_ids: list[int], statuses: list[int], slots: np.ndarray, timings: StepTimings
    ) -> StepResult:
        """Of a step of which nothing but tokens is wanted, by all its sampled rows."""
        tokens, n_new, faults, _ = self.split_faults(token_ids, statuses, slots)
        return StepResult(step, tokens, n_new, self.n_drafted, faults=faults, timings=timings)


@dataclasses.dataclass(slots=True, eq=False)
class Settled:
    """A step that verifies drafts."""

    plan: StepPlan
    """With as many drafts as there are guesses, and true starts; the latest ones if it follows."""
    n_opened: int
    """As in `SlotLengths`, when it was launched."""
    n_drafted: list[int]
    """As in `StepResult`."""
    drafts: list[int]
    """At the places of its sampled rows."""
    guesses: Guesses | None = None
    """Those that the device's token table lacks."""
    trees: Mapping[int, DraftTree] = dataclasses.field(default_factory=dict)
    """By span."""
    queued: Queued | None = None
    """Where guesses are on the device: of the spans with drafts, in order."""
    forced: list[int] | None = None
    """Of each of these spans, how many of the queued guesses count, whatever is chosen."""
    earliest: dict[int, int] = dataclasses.field(default_factory=dict)
    """Where the span of each slot may begin."""
    before: Settled | None = None
    """The step that it follows."""
    ends: dict[int, int] = dataclasses.field(default_factory=dict)
    """Of each slot what is computed and kept behind this step; once that is known."""

    @property
    def drafted(self) -> dict[int, int]:
        """Drafts of each slot that has some."""
        spans = self.plan.spans
        return {slot: n for slot, n in zip(spans.slots, spans.n_drafts, strict=True) if n}

    @property
    def starts(self) -> list[int]:
        """True ones of its spans; of a step that follows once the one before it is kept."""
        spans = self.plan.spans
        return spans.starts if self.before is None else [self.before.ends[slot] for slot in spans.slots]
