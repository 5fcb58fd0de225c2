"""Structured output in the engine: which request waits for its grammar, and which sequence has which matcher.

Owns the way of a constrained request from its submission to its last mask. Does not own grammars (`text/grammar`),
their trials (`trials.py`), the matchers (`links.py`) nor scheduling.
Invariant: a matcher that fails, or that takes too long, ends its own request, and nothing else.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence

import numpy as np

from quire.control.scheduler import Scheduler
from quire.control.seq import Seq
from quire.core.clock import Clock, MonotonicClock
from quire.core.errors import QuireError, RequestError, RequestExpired, error_of
from quire.core.events import FinishReason, SeqDelta
from quire.core.plan import SpanDrafts, StepMasks, StepPlan
from quire.core.request import Request
from quire.core.structured import StructuredOutputsParams
from quire.engine.grammars.links import MatcherLinks
from quire.engine.grammars.processes import GrammarProcesses
from quire.engine.grammars.trials import GrammarTrials, Passed, key_of
from quire.engine.time_limits import TimedRequest
from quire.text.leading import lead_bound
from quire.text.matchers import End

Ready = tuple[Request, QuireError | None]


def n_matcher_processes() -> int:
    """Three quarters of the cores, up to 16."""
    return max(1, min(16, (os.cpu_count() or 1) * 3 // 4))


@dataclasses.dataclass(slots=True)
class _Asked(TimedRequest):
    """A request whose grammar is not ready."""

    key: bytes
    trial: concurrent.futures.Future[Passed] | None
    """None once it has passed and its matchers are being made."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unmasked:
    """A plan that waits for its masks."""

    plan: StepPlan
    seqs: Sequence[Seq]
    """Of its spans."""
    drafts: list[SpanDrafts]
    """Of each masked span; empty: none has any."""


@dataclasses.dataclass(frozen=True, slots=True)
class _AskedFor:
    """Moves, and perhaps the masks of a plan."""

    plan: StepPlan | None
    owners: list[Seq]
    """Of the masked spans."""


class StructuredOutput:
    """See the module. processes None: the engine has no tokenizer, and constrained requests are refused."""

    def __init__(self, processes: GrammarProcesses | None, pin: Callable[[np.ndarray], None] | None = None) -> None:
        """pin: is told the memory that all masks will lie in, once there is a constrained request."""
        self._processes, self._pin = processes, pin
        self._trials = None if processes is None else GrammarTrials(processes)
        self._links: MatcherLinks | None = None
        self._handles = itertools.count(1)
        self._asked: dict[str, _Asked] = {}
        self._live: dict[str, dict[int, int]] = {}
        """Request → sequence → handle."""
        self._owners: dict[int, tuple[str, int, bytes, str, str]] = {}
        """Handle → request, sequence, key and kind of its constraint, tenant."""
        self._asked_for: _AskedFor | None = None
        """What the matchers are working on."""
        self._handles_of: tuple[list[Seq], list[int]] = [], []
        """Of the newest masked spans, as long as no sequence leaves."""
        self._ends: list[End] = []
        """Of sequences, which nobody has been told."""
        self._made: StepMasks | None = None
        """The newest masks, until they are used."""
        self.clock: Clock = MonotonicClock()
        """The scheduler's, by which limits on a request's time count."""
        self.most_foretold = 0
        """Tokens that sequences are to be told of beforehand where their grammar leaves no choice."""
        self.on_wait: Callable[[], None] | None = None
        """Called now and then while masks are waited for."""

    @property
    def n_compiling(self) -> int:
        """Requests whose grammar is not ready."""
        return len(self._asked)

    @property
    def compiling(self) -> list[Request]:
        """They."""
        return [one.request for one in self._asked.values()]

    @property
    def n_live(self) -> int:
        """Sequences that have a matcher."""
        return sum(map(len, self._live.values())) if self._live else 0

    def start(self) -> None:
        """Have the first process ready before the first request."""
        if self._processes is not None:
            self._processes.start()

    def check(self, params: StructuredOutputsParams) -> None:
        """Wait for the trial of a constraint. RequestError if it is of no use."""
        trials = self._require()
        params.verify()
        key, n_chars = key_of(params)
        if trials.passed(key) is None:
            trials.submit(key, n_chars, params, "").result()

    def admit(self, request: Request) -> None:
        """Take a constrained request; `ready` says when it can be queued. RequestError if it never can be."""
        trials, params = self._require(), request.params.structured_outputs
        assert params is not None
        params.verify()
        key, n_chars = key_of(params)
        passed, now_s = trials.passed(key), self.clock.now_s()
        if passed is not None:
            self._asked[request.request_id] = _Asked(request, now_s, key, None)
            self._begin(request, key, passed)
        else:
            trial = trials.submit(key, n_chars, params, request.terms.tenant)
            self._asked[request.request_id] = _Asked(request, now_s, key, trial)

    def ready(self, wait_s: float) -> list[Ready]:
        """Requests that can be queued now, or are refused with an error, also for their time being over; waits for the
        first up to `wait_s`."""
        found: list[Ready] = []
        tried = [one for one in self._asked.values() if one.trial is not None]
        if tried and wait_s:
            futures = [one.trial for one in tried if one.trial is not None]
            concurrent.futures.wait(futures, wait_s, concurrent.futures.FIRST_COMPLETED)
        for one in tried:
            if one.trial is None or not one.trial.done():
                continue
            error = one.trial.exception()
            if error is None:
                self._begin(one.request, one.key, one.trial.result())
                one.trial = None
            elif isinstance(error, QuireError):
                del self._asked[one.request.request_id]
                found.append((one.request, error))
            else:
                raise error
        if self._links is not None:
            for begun in self._links.begun(0.0 if tried or found else wait_s):
                found += self._take_begun(begun.handles, begun.ends)
        return found + self._late()

    def _late(self) -> list[Ready]:
        """Their time is over."""
        now_s, found = self.clock.now_s(), list[Ready]()
        for one in [one for one in self._asked.values() if one.is_late(now_s)]:
            self.drop(one.request.request_id)
            limit_s, code = one.limit
            message = (
                f"the grammar of its output was not ready within {limit_s:g} s, which the server allows: try again"
            )
            found.append((one.request, RequestExpired(message, code=code)))
        return found

    def drop(self, request_id: str) -> None:
        """The request is cancelled or was refused."""
        self._asked.pop(request_id, None)
        for index in list(self._live.get(request_id, ())):
            self.drop_seq(request_id, index)

    def drop_seq(self, request_id: str, index: int) -> None:
        """One sequence of a request has ended."""
        if request_id in self._asked:
            return
        seqs = self._live.get(request_id, {})
        handle = seqs.pop(index, None)
        if not seqs:
            self._live.pop(request_id, None)
        if handle is not None:
            self._handles_of = [], []
            self._owners.pop(handle, None)
            if self._links is not None:
                self._links.drop([handle])

    def follow(self, deltas: list[SeqDelta], unmasked: Unmasked | None = None) -> None:
        """Have matchers moved by committed tokens, and the masks of the next plan that needs them made: `masks` and
        `ended` wait for that, so there is time for other work."""
        moves: dict[int, list[int]] = {}
        live = self._live
        for delta in deltas:
            seqs = live.get(delta.request_id)
            handle = None if seqs is None else seqs.get(delta.index)
            if handle is None:
                continue
            if delta.finish_reason is not None:
                self.drop_seq(delta.request_id, delta.index)
            elif handle in moves:
                moves[handle] = moves[handle] + delta.token_ids
            elif delta.token_ids:
                moves[handle] = delta.token_ids
        if moves or unmasked is not None:
            self._ask(list(moves.items()), unmasked)

    def masks(self, unmasked: Unmasked) -> StepMasks:
        """The masks of a plan whose earlier steps are all committed.

        A sequence that has ended meanwhile, whose token nobody will take, may say anything.
        """
        self._take()
        made, self._made = self._made, None
        if made is None or made.step != unmasked.plan.step:
            self._ask([], unmasked)
            self._take()
            made, self._made = self._made, None
            assert made is not None
        return made

    def ended(self, scheduler: Scheduler) -> list[SeqDelta]:
        """End the sequences, in the scheduler too, that are complete or whose matcher failed; returns their ends."""
        self._take()
        if not self._ends:
            return []
        ends, self._ends = self._ends, []
        deltas = list[SeqDelta]()
        for end in ends:
            owner = self._owners.get(end.handle)
            if owner is None:
                continue
            request_id, index, *_ = owner
            self.drop_seq(request_id, index)
            if not end.is_free:
                reason = FinishReason.STOP if end.failure is None else FinishReason.ERROR
                scheduler.cancel_seq(request_id, index, reason)
                deltas.append(SeqDelta(request_id, index, [], reason, failure=end.failure))
        return deltas

    def clear(self) -> None:
        """Every queued sequence has ended; those whose grammar is not ready have not been queued."""
        for request_id in [one for one in self._live if one not in self._asked]:
            self.drop(request_id)
        self._made = None

    def shutdown(self) -> None:
        """End the processes."""
        if self._trials is not None:
            self._trials.close()
        if self._links is not None:
            self._links.close()
        if self._processes is not None:
            self._processes.close()

    # ----

    def _require(self) -> GrammarTrials:
        if self._trials is None:
            raise RequestError("this engine has no tokenizer: output cannot be constrained", param="structured_outputs")
        return self._trials

    def _begin(self, request: Request, key: bytes, passed: Passed) -> None:
        params = request.params.structured_outputs
        assert params is not None
        handles = list(itertools.islice(self._handles, request.params.n))
        self._live[request.request_id] = dict(enumerate(handles))
        for index, handle in enumerate(handles):
            self._owners[handle] = request.request_id, index, key, params.kind, request.terms.tenant
        lead = lead_bound(params)
        self._matchers().begin(handles, passed.grammar, passed.compile_s, lead)

    def _take_begun(self, handles: list[int], ends: list[End]) -> list[Ready]:
        """A request's matchers are there, or have failed in the making."""
        owner = next((self._owners[handle] for handle in handles if handle in self._owners), None)
        asked = None if owner is None else self._asked.pop(owner[0], None)
        if asked is None:
            return []
        failure = next((end.failure for end in ends if end.failure is not None), None)
        if failure is None:
            return [(asked.queued(self.clock.now_s()), None)]
        self.drop(asked.request.request_id)
        return [(asked.request, error_of(failure))]

    def _matchers(self) -> MatcherLinks:
        if self._links is None:
            assert self._processes is not None
            self._links = MatcherLinks(self._processes, self._wait, self._blame, self._pin)
        return self._links

    def _ask(self, moves: list[tuple[int, list[int]]], unmasked: Unmasked | None) -> None:
        self._take()
        rows, drafts, owners = list[int](), list[SpanDrafts](), list[Seq]()
        if unmasked is not None:
            owners, drafts = [unmasked.seqs[span] for span in unmasked.plan.masked], unmasked.drafts
            rows = self._rows(owners)
        if self.most_foretold:
            for owner in owners:
                owner.foretold = None
        if moves or any(rows):
            self._matchers().ask(moves, rows, drafts, self.most_foretold)
            self._asked_for = _AskedFor(None if unmasked is None else unmasked.plan, owners)
        elif unmasked is not None:  # they have ended, or are free from now on
            n_words = 0 if self._processes is None else self._processes.settings.n_words
            free = np.full((len(rows) + sum(map(len, drafts)), n_words), -1, "<i4")
            self._made = _step_masks(unmasked.plan, free)

    def _rows(self, owners: list[Seq]) -> list[int]:
        """Their handles; 0 of one that has none, or none any more."""
        known, rows = self._handles_of
        if known != owners:
            rows = [self._live.get(one.request.request_id, {}).get(one.index, 0) for one in owners]
            self._handles_of = owners, rows
        return rows

    def _take(self) -> None:
        """Wait for what was asked for, if anything was."""
        asked_for, self._asked_for = self._asked_for, None
        if asked_for is None:
            return
        found = self._matchers().answer()
        self._ends += found.ends
        for owner, one in zip(asked_for.owners, found.foretold, strict=False):  # nothing where no drafts are verified
            owner.foretell(one.n_drafts, one.tokens)
        if asked_for.plan is not None:
            self._made = _step_masks(asked_for.plan, found.bits)

    def _blame(self, handle: int) -> None:
        owner = self._owners.get(handle)
        if owner is not None and self._trials is not None:
            _, _, key, kind, tenant = owner
            self._trials.ban(key, tenant, kind, "it has stopped the process that follows grammars")

    def _wait(self) -> None:
        if self.on_wait is not None:
            self.on_wait()


def _step_masks(plan: StepPlan, bits: np.ndarray) -> StepMasks:
    return StepMasks(plan.step, bits.reshape(-1).view(np.uint8).data)
