"""Why a request took as long as it did: a bounded memory of what happened to those that have a label.

Owns what is noted and for how long. Does not own any decision: nothing reads it but `explain`.
Invariants: at most `MAX_REQUESTS` ended requests and `MAX_STEPS` steps are remembered; a step costs the same however
long the requests in it are.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

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


class _Record:
    """One request."""

    __slots__ = ("arrival_s", "first_step", "found", "last_step")

    def __init__(self, request: Request, now_s: float, n_waiting: int) -> None:
        self.arrival_s = now_s
        self.first_step = self.last_step = -1
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
        self._steps: list[tuple[int, float, int, int]] = [(-1, 0.0, 0, 0)] * MAX_STEPS
        """Step, time of its commit, sequences, prompt tokens; step i at i modulo `MAX_STEPS`."""

    def arrive(self, request: Request, n_waiting: int) -> None:
        """A request is queued."""
        if request.label:
            record = _Record(request, self._clock.now_s(), n_waiting)
            self._live[request.request_id] = record
            self._fresh.add(request.request_id)
            self._labels.setdefault(_base(request.label), []).append(record)

    def admit(self, admitted: Sequence[Seq]) -> None:
        """These sequences got a slot."""
        for seq in admitted:
            record = self._live.get(seq.request.request_id)
            if record is not None and record.found.admitted_s is None:
                seq.queued_s = record.found.admitted_s = self._clock.now_s() - record.arrival_s
                record.first_step = seq.last_step
                record.found.n_cached = seq.first_cached
                if seq.miss is not None:
                    miss, seq.miss = seq.miss, None
                    record.found.miss_position = miss.position
                    record.found.miss_wanted, record.found.miss_cached = miss.wanted, miss.cached
                    record.found.miss_lost = miss.n_lost

    def chunk(self, builder: PlanBuilder, n_decodes: int) -> None:
        """The spans of a step from `n_decodes` on compute parts of prompts."""
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
        now_s, n_seqs = self._clock.now_s(), len(builder.seqs)
        n_prompt_tokens = builder.plan.n_tokens - sum(builder.plan.spans.wants) - sum(builder.plan.spans.n_drafts)
        self._steps[builder.step % MAX_STEPS] = (builder.step, now_s, n_seqs, max(0, n_prompt_tokens))
        if self._fresh:
            for delta in deltas:
                if delta.request_id in self._fresh and delta.token_ids:
                    self._fresh.discard(delta.request_id)
                    record = self._live.get(delta.request_id)
                    if record is not None:
                        record.found.first_token_s = now_s - record.arrival_s

    def end(self, seqs: Sequence[Seq], reason: str) -> None:
        """All sequences of a request have ended, the last of them so."""
        request_id = seqs[0].request.request_id
        record = self._live.pop(request_id, None)
        if record is None:
            return
        found = record.found
        found.ended_s, found.end = self._clock.now_s() - record.arrival_s, reason
        found.n_outputs = sum(seq.n_outputs for seq in seqs)
        found.n_preemptions = sum(max(0, seq.n_admissions - 1) for seq in seqs)
        record.last_step = max(seq.last_step for seq in seqs)
        if request_id in self._fresh:  # its first token is its last, and is being committed; or it never got one
            self._fresh.discard(request_id)
            if found.n_outputs:
                found.first_token_s = found.ended_s
        self._ended.append(record)
        while len(self._ended) > MAX_REQUESTS:
            self._forget(self._ended.popleft())

    def explain(self, label: str) -> list[Explanation]:
        """What is known of the requests whose labels begin with `label` and a hyphen, in order."""
        found = []
        for record in self._labels.get(label, ()):
            last = record.last_step if record.last_step >= 0 else max(step for step, *_ in self._steps)
            found.append(msgspec.structs.replace(record.found, steps=self._groups(record, last)))
        return found

    def _groups(self, record: _Record, last: int) -> list[StepGroup]:
        if record.first_step < 0:
            return []
        numbers = range(max(record.first_step, last - MAX_STEPS + 1), last + 1)
        steps = [
            entry for entry in (self._steps[i % MAX_STEPS] for i in numbers) if record.first_step <= entry[0] <= last
        ]
        size = -(-len(steps) // MAX_GROUPS) or 1
        groups = []
        for i in range(0, len(steps), size):
            part = steps[i : i + size]
            n_seqs = sum(entry[2] for entry in part) / len(part)
            groups.append(StepGroup(part[-1][1] - record.arrival_s, len(part), n_seqs, sum(entry[3] for entry in part)))
        return groups

    def _forget(self, record: _Record) -> None:
        base = _base(record.found.label)
        records = self._labels[base]
        records.remove(record)
        if not records:
            del self._labels[base]


def _base(label: str) -> str:
    return label.rpartition("-")[0] or label
