"""Why a request took as long as it did: a bounded memory of what happened to those that have a label.

Owns what is noted and for how long. Does not own any decision: nothing reads it but `explain`.
Invariants: at most `MAX_REQUESTS` ended requests and `MAX_STEPS` steps are remembered; a step costs the same however
long the requests in it are.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq
from quire.core.clock import Clock
from quire.core.events import Chunk, Explanation, SeqDelta, StepGroup
from quire.core.request import Request

MAX_REQUESTS = 4096
MAX_STEPS = 1 << 15
MAX_GROUPS = 48
MAX_CHUNKS = 256


class _Step(NamedTuple):
    """One that was committed."""

    number: int = -1
    time_s: float = 0.0
    n_seqs: int = 0
    n_prompt_tokens: int = 0
    n_chunks: int = 0
    """Spans that compute parts of prompts."""
    n_before: int = 0
    """Tokens before those that it computed, of all its sequences."""


class _Record:
    """One request."""

    __slots__ = ("arrival_s", "arrival_step", "first_step", "found", "last_step", "token_step")

    def __init__(self, request: Request, now_s: float, n_waiting: int, step: int) -> None:
        self.arrival_s, self.arrival_step = now_s, step
        self.first_step = self.token_step = self.last_step = -1
        self.found = Explanation(
            request.label, request.terms.tenant, len(request.prompt_token_ids), request.params.n,
            n_waiting_before=n_waiting,
        )  # fmt: skip


class History:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: dict[str, _Record] = {}
        """By request id."""
        self._ended: collections.deque[_Record] = collections.deque()
        self._labels: dict[str, list[_Record]] = {}
        """By the part of the label before its last hyphen."""
        self._fresh: set[str] = set()
        """Live ones without a token."""
        self._steps = [_Step()] * MAX_STEPS
        """Step i at i modulo `MAX_STEPS`."""
        self._newest = -1
        """The last step that was committed."""

    def arrive(self, request: Request, n_waiting: int) -> None:
        """A request is queued."""
        if request.label:
            record = _Record(request, self._clock.now_s(), n_waiting, self._newest)
            self._live[request.request_id] = record
            self._fresh.add(request.request_id)
            self._labels.setdefault(_base(request.label), []).append(record)

    def admit(self, admitted: Sequence[Seq]) -> None:
        """These sequences got a slot."""
        for seq in admitted:
            record = self._live.get(seq.request.request_id)
            if record is not None and record.found.admitted_s is None:
                seq.queued_s = record.found.admitted_s = self._clock.now_s() - record.arrival_s
                record.first_step = self._newest + 1
                record.found.n_cached = seq.first_cached
                if seq.miss is not None:
                    miss, seq.miss = seq.miss, None
                    record.found.miss_position = miss.position
                    record.found.miss_wanted, record.found.miss_cached = miss.wanted, miss.cached
                    record.found.miss_lost = miss.n_lost

    def chunk(self, builder: PlanBuilder, n_decodes: int) -> None:
        """The spans of a step from `n_decodes` on compute parts of prompts."""
        builder.n_chunks = len(builder.seqs) - n_decodes
        spans, now_s = builder.plan.spans, self._clock.now_s()
        for row in range(n_decodes, len(builder.seqs)):
            record = self._live.get(builder.seqs[row].request.request_id)
            if record is not None and len(record.found.chunks) < MAX_CHUNKS:
                chunk = Chunk(
                    builder.step, now_s - record.arrival_s, spans.starts[row], spans.lengths[row], len(builder.seqs) - 1
                )
                record.found.chunks.append(chunk)

    def step(self, builder: PlanBuilder, deltas: list[SeqDelta]) -> None:
        """A step is committed; `deltas` is what sequences gained."""
        now_s, spans = self._clock.now_s(), builder.plan.spans
        n_prompt_tokens = 0
        if builder.n_chunks:
            n_prompt_tokens = max(0, builder.plan.n_tokens - sum(spans.wants) - sum(spans.n_drafts))
        self._steps[builder.step % MAX_STEPS] = _Step(
            builder.step, now_s, len(builder.seqs), n_prompt_tokens, builder.n_chunks, sum(spans.starts)
        )
        self._newest = builder.step
        if self._fresh:
            for delta in deltas:
                if delta.request_id in self._fresh and delta.token_ids:
                    self._fresh.discard(delta.request_id)
                    record = self._live.get(delta.request_id)
                    if record is not None:
                        record.found.first_token_s, record.token_step = now_s - record.arrival_s, builder.step

    def end(self, seqs: Sequence[Seq], reason: str) -> None:
        """All sequences of a request have ended, the last of them so."""
        request_id = seqs[0].request.request_id
        record = self._live.pop(request_id, None)
        if record is None:
            return
        found = record.found
        found.ended_s, found.end = self._clock.now_s() - record.arrival_s, reason
        found.n_outputs = sum(seq.n_outputs for seq in seqs)
        found.n_drafts = sum(seq.n_draft_spans for seq in seqs)
        found.draft_tokens = sum(seq.n_drafts for seq in seqs)
        found.drafts_kept = sum(seq.n_drafts_kept for seq in seqs)
        found.n_preemptions = sum(max(0, seq.n_admissions - 1) for seq in seqs)
        record.last_step = max(seq.last_step for seq in seqs)
        if request_id in self._fresh:  # its first token is its last, and is being committed; or it never got one
            self._fresh.discard(request_id)
            if found.n_outputs:
                found.first_token_s, record.token_step = found.ended_s, record.last_step
        self._ended.append(record)
        while len(self._ended) > MAX_REQUESTS:
            self._forget(self._ended.popleft())

    def explain(self, label: str) -> list[Explanation]:
        """What is known of the requests whose labels begin with `label` and a hyphen, in order."""
        found = []
        for record in self._labels.get(label, ()):
            last = record.last_step if record.last_step >= 0 else self._newest
            first = record.first_step if record.first_step >= 0 else last + 1
            token = record.token_step if record.token_step >= 0 else last
            groups = self._groups(record, first, token, MAX_GROUPS // 3)
            n_first = len(groups)
            groups += self._groups(record, token + 1, last, MAX_GROUPS - n_first)
            waits = self._groups(record, record.arrival_step + 1, min(first - 1, last), MAX_GROUPS)
            found.append(msgspec.structs.replace(record.found, steps=groups, n_first=n_first, waits=waits))
        return found

    def _groups(self, record: _Record, first: int, last: int, n_most: int) -> list[StepGroup]:
        """The steps from `first` to `last` that are remembered, in at most so many groups."""
        numbers = range(max(first, last - MAX_STEPS + 1), last + 1)
        steps = [one for one in (self._steps[i % MAX_STEPS] for i in numbers) if first <= one.number <= last]
        size = -(-len(steps) // n_most) or 1
        return [_group(steps[i : i + size], record.arrival_s) for i in range(0, len(steps), size)]

    def _forget(self, record: _Record) -> None:
        base = _base(record.found.label)
        records = self._labels[base]
        records.remove(record)
        if not records:
            del self._labels[base]


def _group(steps: list[_Step], arrival_s: float) -> StepGroup:
    n, mixed = len(steps), [one.n_chunks > 0 for one in steps]
    return StepGroup(
        steps[-1].time_s - arrival_s, n, sum(one.n_seqs for one in steps) / n,
        sum(one.n_prompt_tokens for one in steps), sum(mixed),
        sum(one.n_chunks for one in steps), sum(one.n_before for one in steps) / n,
        sum(now and not before for before, now in itertools.pairwise([False, *mixed])),
    )  # fmt: skip


def _base(label: str) -> str:
    return label.rpartition("-")[0] or label
