"""Schedulers of the past, for comparison: small policies over the same cost model, beside the real engine.

- `StaticBatching`: a batch leaves when it is full and runs until its longest request has ended, padded.
- `DynamicBatching`: the same, but a batch of a preferred size leaves at once, and a smaller one after a delay (Triton).
- `Reserved`: each iteration takes whoever fits; KV for the longest context is set aside for each (Yu et al. 2022,
  "Orca", with its maximum reserved).
- `PagedWhole`: pages on demand; whole prompts in steps of their own, before decodes (Kwon et al. 2023, "vLLM").
Owns who runs next in each of them, and nothing of the real scheduler. Tokens count when they are made, for all.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from quire.bench.simulate.record import Outcome, StepLog
from quire.bench.simulate.requests import SimRequest
from quire.core.events import PrefixUpdate
from quire.core.failure import Code
from quire.core.plan import Spans
from quire.engine.simulated import SimulatedMachine


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One request and how far it has come."""

    outcome: Outcome
    n_made: int = 0
    """Output tokens."""
    n_kept: int = 0
    """Of these, made before it was preempted: to be computed again with the prompt."""
    n_pages: int = 0
    token_s: float = 0.0
    """When its newest token came."""

    @property
    def n_prompt(self) -> int:
        """Tokens to compute before its next one, when it enters."""
        return self.outcome.input_len + self.n_kept

    @property
    def n_held(self) -> int:
        """Tokens of it with keys in the cache, while it runs: its newest has none yet."""
        return self.outcome.input_len + max(0, self.n_made - 1)

    @property
    def is_done(self) -> bool:
        """Nothing is missing."""
        return self.n_made >= self.outcome.output_len


class Policy:
    """What all have in common: a clock, a queue, and a step of given spans."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.page_size = machine.page_tokens
        self.n_slots = (machine.n_pages - 1) * self.page_size
        self.log = StepLog(kv_slots=self.n_slots)
        self.queue: collections.deque[Job] = collections.deque()
        self.running: list[Job] = []
        self.now_s = 0.0

    @property
    def next_s(self) -> float:
        """When the next step begins."""
        return self.now_s if self.queue or self.running else math.inf

    def close(self) -> None:
        """No request comes any more."""

    def follow(self) -> None:
        """It keeps no prefixes."""

    def update(self) -> PrefixUpdate:
        """It holds none."""
        return PrefixUpdate(0, b"", b"")

    def submit(self, outcome: Outcome, request: SimRequest, prompt: list[int]) -> None:
        """Queue it, or refuse it as the engine would."""
        n_tokens, n_live = request.input_len + request.output_len, len(self.queue) + len(self.running)
        most_live = self.machine.config.max_num_waiting + self.machine.limits.max_num_seqs
        most = min(self.machine.limits.max_model_len, self.n_slots)
        if n_tokens > most:
            outcome.refusal = Code.CONTEXT_LENGTH_EXCEEDED.value
            outcome.reason = f"{n_tokens:,} tokens, prompt and output, are more than the {most:,} of a sequence"
        elif n_live >= most_live:
            outcome.refusal, outcome.reason = Code.OVERLOADED.value, f"{n_live:,} requests were running or waiting"
        else:
            if not (self.queue or self.running):
                self.now_s = max(self.now_s, request.arrival_s)
            self.queue.append(Job(outcome))

    def step(self) -> list[Outcome]:
        """See `Replica`."""
        raise NotImplementedError

    def _run(
        self, prompts: Sequence[tuple[int, int]], decodes: Sequence[int], takers: Sequence[Job], taken: int
    ) -> list[Outcome]:
        """One step: prompts of (start, tokens), decodes at positions; `takers` get a token each.

        taken: token slots of the cache that are set aside in it. Returns those that got their first token or ended.
        """
        n = len(prompts) + len(decodes)
        starts, lengths = [*[start for start, _ in prompts], *decodes], [length for _, length in prompts]
        spans = Spans(list(range(n)), starts, lengths + [1] * len(decodes), [0] * n, [True] * n)
        seconds = self.machine.cost.step_s(spans)
        self.now_s += seconds
        told, held = [], sum(job.n_held for job in self.running)
        before_s = collections.Counter(job.token_s for job in takers if job.n_made)
        for job in takers:
            job.n_made += 1
            job.token_s = self.now_s
            if job.n_made == 1:
                job.outcome.first_s = self.now_s
            if job.is_done:
                job.outcome.end_s = self.now_s
            if job.n_made == 1 or job.is_done:
                told.append(job.outcome)
        log, n_prefill = self.log, sum(lengths)
        n_running = sum(not job.is_done for job in self.running)
        log.busy_s += seconds
        log.step(self.now_s, seconds, n_running, len(self.queue), n_prefill + len(decodes), n_prefill)
        log.sample(self.now_s, seconds, held, taken, 0)
        log.gaps_s.extend([self.now_s - token_s for token_s in before_s])
        log.n_gaps.extend(before_s.values())
        return told


class StaticBatching(Policy):
    """See the module. size: of a batch."""

    def __init__(self, machine: SimulatedMachine, size: int) -> None:
        super().__init__(machine)
        self.size = size
        self._width = self._longest = self._n_steps = 0
        self._is_closed = False

    def close(self) -> None:
        """What waits will not become a full batch."""
        self._is_closed = True

    @property
    def next_s(self) -> float:
        """When the running batch goes on, or the next one leaves."""
        return self.now_s if self.running else max(self.now_s, self._leave_s())  # inf where nobody waits

    def _leave_s(self) -> float:
        """When the next batch is ready to leave."""
        if len(self.queue) >= self.size:
            return self.queue[self.size - 1].outcome.arrival_s
        return self.queue[-1].outcome.arrival_s if self._is_closed and self.queue else math.inf

    def _n_leaving(self) -> int:
        return min(self.size, len(self.queue))

    def step(self) -> list[Outcome]:
        """The prompts of a new batch, padded to the longest; or a token for each of its requests, ended ones too."""
        prompts, decodes = [], []
        if not self.running:
            self.now_s = self.next_s
            self._form()
            prompts = [(0, self._width)] * len(self.running)
        else:
            decodes = [self._width + self._n_steps - 1] * len(self.running)
        takers = [job for job in self.running if not job.is_done]
        told = self._run(prompts, decodes, takers, len(self.running) * (self._width + self._longest))
        self._n_steps += 1
        if self._n_steps == self._longest:
            self.running = []
        return told

    def _form(self) -> None:
        """As many of the queue's first as the cache has room for, at their longest."""
        width = longest = 0
        batch: list[Job] = []
        for job in itertools.islice(self.queue, self._n_leaving()):
            new_width, new_longest = max(width, job.outcome.input_len), max(longest, job.outcome.output_len)
            if batch and (len(batch) + 1) * (new_width + new_longest) > self.n_slots:
                break
            width, longest = new_width, new_longest
            batch.append(job)
        for _ in batch:
            self.queue.popleft()
        self.running, self._width, self._longest, self._n_steps = batch, width, longest, 0


class DynamicBatching(StaticBatching):
    """See the module. preferred: sizes that leave at once; delay_s: the longest that a request waits for others."""

    def __init__(self, machine: SimulatedMachine, preferred: Sequence[int], delay_s: float) -> None:
        super().__init__(machine, max(preferred))
        self._preferred, self._delay_s = sorted(preferred), delay_s

    def _leave_s(self) -> float:
        least = self._preferred[0]
        if not self.queue:
            return math.inf
        late_s = self.queue[0].outcome.arrival_s + self._delay_s
        return min(late_s, self.queue[least - 1].outcome.arrival_s) if len(self.queue) >= least else late_s

    def _n_leaving(self) -> int:
        n = min(self.size, len(self.queue))
        return max((size for size in self._preferred if size <= n), default=n)


class Reserved(Policy):
    """See the module."""

    def step(self) -> list[Outcome]:
        """One token for everybody who runs, and the whole prompts of those who enter beside them."""
        limits = self.machine.limits
        decoding, entering, n_tokens = list(self.running), [], len(self.running)
        while self.queue and len(self.running) < limits.max_num_seqs:
            n_prompt = self.queue[0].n_prompt
            if (len(self.running) + 1) * limits.max_model_len > self.n_slots:
                break
            if n_tokens + n_prompt > limits.max_num_batched_tokens and n_tokens:
                break
            job = self.queue.popleft()
            entering.append(job)
            self.running.append(job)
            n_tokens += n_prompt
        prompts, decodes = [(0, job.n_prompt) for job in entering], [job.n_held for job in decoding]
        taken = len(self.running) * limits.max_model_len
        told = self._run(prompts, decodes, self.running, taken)
        self.running = [job for job in self.running if not job.is_done]
        return told


class PagedWhole(Policy):
    """See the module."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(machine)
        self._n_free = machine.n_pages - 1

    def step(self) -> list[Outcome]:
        """Whole prompts while some wait and fit; else a token for each sequence that runs."""
        entering = self._enter()
        if not entering:
            self._make_room()
        takers = entering or list(self.running)
        prompts = [(0, job.n_prompt) for job in entering]
        decodes = [] if entering else [job.n_held for job in self.running]
        taken = sum(job.n_pages for job in self.running) * self.page_size
        told = self._run(prompts, decodes, takers, taken)
        for job in [job for job in takers if job.is_done]:
            self._leave(job)
        return told

    def _pages(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def _enter(self) -> list[Job]:
        limits, n_tokens = self.machine.limits, 0
        entering: list[Job] = []
        while self.queue and len(self.running) < limits.max_num_seqs:
            job = self.queue[0]
            n_pages = self._pages(job.n_prompt + 1)
            too_many = entering and n_tokens + job.n_prompt > limits.max_num_batched_tokens
            if too_many or n_pages > self._n_free:
                break
            self.queue.popleft()
            job.n_pages, self._n_free = n_pages, self._n_free - n_pages
            n_tokens += job.n_prompt
            entering.append(job)
            self.running.append(job)
        return entering

    def _make_room(self) -> None:
        """A page for each token to come; the last that entered gives way, and computes again later."""
        for job in list(self.running):
            while job in self.running and self._pages(job.n_held + 1) > job.n_pages:
                if self._n_free:
                    job.n_pages, self._n_free = job.n_pages + 1, self._n_free - 1
                    continue
                victim = self.running[-1]
                self._leave(victim)
                victim.n_kept = victim.n_made
                self.queue.appendleft(victim)
                self.log.preemptions += 1

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        self._n_free, job.n_pages = self._n_free + job.n_pages, 0
