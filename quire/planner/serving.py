"""What an engine serves in a steady state: time to a first token, time a token, tokens a second, at a concurrency.

Owns the closed form: each step has one token of every running sequence, and as many prompt tokens as sequences end
meanwhile, on average. Does not own queues, bursts or the order of admission: `quire simulate` runs the real scheduler.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import msgspec

from quire.config.mesh import Mesh
from quire.core.plan import Spans
from quire.planner.cost import CostModel, SharedPrefixes
from quire.planner.placement import Placement
from quire.planner.workload import Objective, Workload

FINE: Final = 16
"""The most sequences within an objective are found to a sixteenth."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """At so many sequences at once in each replica."""

    n_seqs: int
    ttft_s: float
    """Of a request that is admitted at once."""
    tpot_s: float
    tokens_per_s: float
    """Output, of all replicas."""
    requests_per_s: float

    def meets(self, objective: Objective) -> bool:
        """Both limits."""
        return self.ttft_s <= objective.ttft_s and self.tpot_s <= objective.tpot_s

    def excess(self, objective: Objective) -> float:
        """The worse of its times to its limit; at most 1 where it meets both."""
        return max(self.ttft_s / objective.ttft_s, self.tpot_s / objective.tpot_s)


def steady_point(cost: CostModel, workload: Workload, n_seqs: int, mesh: Mesh, max_tokens: int) -> Point:
    """n_seqs: of each replica; a pipeline has them in as many steps as stages, which run beside each other."""
    n_step = max(1, math.ceil(n_seqs / mesh.pp))
    context = round(workload.shared + workload.input + workload.output / 2)
    new_tokens = min(workload.input, max_tokens)
    prompt = n_step / workload.output * workload.input
    plain_s = cost.step_s(mixed(n_step, context, 0, 0))
    chunk = max(1, round(min(new_tokens, max_tokens)))
    with_prompt_s = cost.step_s(mixed(n_step, context, workload.shared, chunk))
    n_prompt_steps = prompt / chunk  # prompts in each step, in the mean
    mean_s = plain_s + n_prompt_steps * max(0.0, with_prompt_s - plain_s)
    n_chunks = max(1, math.ceil(workload.input / max_tokens))
    first_s = cost.first_token_s + (n_chunks + mesh.pp - 1) * with_prompt_s + mean_s / 2
    tpot_s = mean_s * mesh.pp
    replica = n_seqs / tpot_s * workload.output / (workload.output + first_s / tpot_s)
    return Point(
        n_seqs=n_seqs, ttft_s=first_s, tpot_s=tpot_s, tokens_per_s=replica * mesh.dp,
        requests_per_s=replica * mesh.dp / workload.output,
    )  # fmt: skip


def mixed(n_seqs: int, context: int, start: int, n_prompt: int) -> Spans:
    """A token of each sequence, and `n_prompt` tokens of one prompt behind `start` cached ones."""
    n_spans = n_seqs + (1 if n_prompt else 0)
    starts, lengths = [context - 1] * n_seqs, [1] * n_seqs
    if n_prompt:
        starts.append(start)
        lengths.append(n_prompt)
    return Spans(list(range(n_spans)), starts, lengths, [0] * n_spans, [True] * n_spans)


def batch_sizes(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most`."""
    n = 1
    while n < most:
        yield n
        n *= 2
    if most > 0:
        yield most


def frontier(
    cost: CostModel, workload: Workload, placement: Placement, max_tokens: int, objective: Objective
) -> list[Point]:
    """From one sequence to as many as the memory holds at their full length, and the most that meet the objective."""
    most = min(placement.seqs_within(workload.longest, workload.shared), placement.equation.max_num_seqs)
    points = [steady_point(cost, workload, n, placement.mesh, max_tokens) for n in batch_sizes(most)]
    met = [one.n_seqs for one in points if one.meets(objective)]
    beyond = [one.n_seqs for one in points if met and one.n_seqs > met[-1]]
    low, high = (met[-1], beyond[0]) if beyond else (0, 0)
    while high - low > max(1, low // FINE):  # the last number of sequences within the objective
        middle = (low + high) // 2
        points.append(steady_point(cost, workload, middle, placement.mesh, max_tokens))
        low, high = (middle, high) if points[-1].meets(objective) else (low, middle)
    return sorted(points, key=lambda one: one.n_seqs)


def best_point(points: list[Point], objective: Objective) -> Point | None:
    """The most tokens a second within the objective; None: no number of sequences meets it."""
    return max((one for one in points if one.meets(objective)), key=lambda one: one.tokens_per_s, default=None)


@dataclasses.dataclass(slots=True, eq=False)
class _Running:
    """A sequence of `closed_batch_s`."""

    computed: int
    prompt: int
    end: int
    """Its length when it is done."""
    ready: int = 0
    """The step from which on its newest token is known."""

    @property
    def is_decoding(self) -> bool:
        return self.computed >= self.prompt


def closed_batch_s(
    cost: CostModel, lengths: list[tuple[int, int]], max_seqs: int, max_tokens: int, pool_tokens: int, shared: int = 0
) -> float:
    """Seconds until a batch that comes at once is done: first come, first served; prompts fill each step beside the
    decodes; a sequence is admitted where its whole length fits. Each step is counted; no pages, no preemption.
    Of a pipeline a token is known once its step is through all stages, so that sequences which decode are dealt out to
    as many steps.

    shared: tokens at the front of every prompt, counted in its length, which the first one computes for all."""
    n_stages, waiting, running = cost.timer.mesh.pp, list(reversed(lengths)), list[_Running]()
    total_s = last_s = 0.0
    held = step = 0
    while waiting or running:
        decoding = [one for one in running if one.is_decoding]
        due = set([one for one in decoding if one.ready <= step][: math.ceil(len(decoding) / n_stages)])
        n_prompts, room = len(running) - len(decoding), max_tokens
        while waiting and len(running) < max_seqs and held + sum(waiting[-1]) <= max(pool_tokens, sum(waiting[-1])):
            if room - len(due) - n_prompts <= sum(max(0, one.prompt - one.computed) for one in running):
                break
            n_in, n_out = waiting.pop()
            is_first = len(waiting) + 1 == len(lengths)
            running.append(_Running(0 if is_first else shared, n_in, n_in + n_out))
            held += n_in + n_out
            n_prompts += 1
        spans, prefixes = _next_step(running, due, room - len(due), step + n_stages, shared // cost.page_size)
        last_s = cost.step_s(spans, prefixes) if spans.slots else last_s  # stages wait for what others have
        total_s += last_s
        held -= sum(one.end for one in running if one.computed + 1 >= one.end)
        running = [one for one in running if one.computed + 1 < one.end]
        step += 1
    return total_s + (n_stages - 1) * last_s


def _next_step(
    running: list[_Running], due: set[_Running], room: int, ready: int, n_shared: int
) -> tuple[Spans, SharedPrefixes]:
    """A token of each that is due, and as many of prompts as there is room for. n_shared: pages that all have."""
    spans = Spans([], [], [], [], [])
    for slot, one in enumerate(running):
        n = int(one in due) if one.is_decoding else min(room, one.prompt - one.computed)
        if n <= 0:
            continue
        room -= 0 if one.is_decoding else n
        spans.add(slot, one.computed, n, one.computed + n >= one.prompt)
        one.computed += n
        one.ready = ready
    decodes = [slot for slot, n in zip(spans.slots, spans.lengths, strict=True) if n == 1]
    return spans, [(decodes, n_shared)] if n_shared and len(decodes) > 1 else ()
