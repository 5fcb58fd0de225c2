"""What a request should have taken, from the steps that it lived through: its first token, and each one behind it.

Owns the sums, and what each part of them is for: the queue, the request alone, the others. Does not own the cost of a
step (`cost`) nor the memory of the steps (`control/history`).
A group of steps is taken for equal ones: sequences of one length, and prompts of one length. Times are of commits, so
that of a step that ran when the request came, half is counted.
In a pipeline steps of other sequences lie between two tokens of one: a round, in which there may be fewer steps than
stages. Then stages wait, and a round takes as long as one step takes through all of them. Of a queue, and of a prompt's
chunks, steps follow each other without a wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.core.events import Explanation, StepGroup
from quire.core.plan import Spans
from quire.planner.cost import CostModel
from quire.planner.operators import decode_spans

Parts = dict[str, float]
QUEUE, ALONE, SEQUENCES, PROMPTS = "queue", "alone", "sequences", "prompts"
"""Waiting for a slot; the request with nobody beside it; what other sequences add, and what other prompts do."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """One time of a request, in seconds."""

    took_s: float
    parts_s: Parts
    n_tokens: float = 1.0
    """For each of which this is."""

    @property
    def expected_s(self) -> float:
        """All parts."""
        return sum(self.parts_s.values())

    @property
    def rest_s(self) -> float:
        """That the model has no reason for; below 0: it was faster."""
        return self.took_s - self.expected_s


def first_token(cost: CostModel, one: Explanation) -> Expected | None:
    """From its arrival to its first token; None: there is none."""
    if one.first_token_s is None or one.admitted_s is None:
        return None
    queue_s = sum(_group_s(cost, group) for group in one.waits)
    if one.waits:
        queue_s -= _group_s(cost, one.waits[0]) / one.waits[0].n_steps / 2
    own = [chunk for chunk in one.chunks if chunk.time_s <= one.first_token_s]
    prompt = [_spans([chunk.start], [chunk.length]) for chunk in own]
    alone_s = cost.first_token_s + sum(map(cost.step_s, prompt))
    steps_s = cost.first_token_s + sum(_group_s(cost, group) for group in one.steps[: one.n_first])
    if prompt:  # the last chunk goes through all stages before there is a token
        alone_s += cost.round_s(prompt[-1], 1) - cost.step_s(prompt[-1])
        steps_s += cost.round_s(prompt[-1], 1) - cost.step_s(prompt[-1])
    return Expected(
        took_s=one.first_token_s, parts_s={QUEUE: queue_s, ALONE: alone_s, PROMPTS: max(0.0, steps_s - alone_s)}
    )


def later_token(cost: CostModel, one: Explanation) -> Expected | None:
    """Each one behind the first, in the mean; None: there is none, or it has not ended."""
    n_tokens = one.n_outputs / one.n - 1
    if one.first_token_s is None or one.ended_s is None or n_tokens <= 0:
        return None
    context, groups = round(one.prompt_len + n_tokens / 2), one.steps[one.n_first :]
    n_steps = sum(group.n_steps for group in groups)
    n_beside = max(1.0, min(n_steps / n_tokens, cost.timer.mesh.pp))
    n_rounds = n_steps / n_beside
    alone_s = n_rounds * cost.round_s(decode_spans(one.n, context), 1)
    decodes_s = sum(group.n_steps / n_beside * cost.round_s(_decodes(group), n_beside) for group in groups)
    all_s = decodes_s + sum(_more_s(cost, group) for group in groups)
    parts_s = {ALONE: alone_s, SEQUENCES: max(0.0, decodes_s - alone_s), PROMPTS: max(0.0, all_s - decodes_s)}
    return Expected(
        took_s=(one.ended_s - one.first_token_s) / n_tokens,
        parts_s={name: seconds / n_tokens for name, seconds in parts_s.items()},
        n_tokens=n_tokens,
    )


def _group_s(cost: CostModel, group: StepGroup) -> float:
    """Of all its steps, one behind the other."""
    plain_s = (group.n_steps - group.n_mixed) * cost.step_s(_decodes(group)) if group.n_mixed < group.n_steps else 0.0
    return plain_s + (group.n_mixed * cost.step_s(_mixed(group)) if group.n_mixed else 0.0)


def _more_s(cost: CostModel, group: StepGroup) -> float:
    """What prompts add to its steps. Behind the last step of a run all wait until it is through all stages."""
    if not group.n_mixed:
        return 0.0
    n_steps = group.n_mixed + group.n_runs * (cost.timer.mesh.pp - 1)
    return n_steps * (cost.step_s(_mixed(group)) - cost.step_s(_decodes(group)))


def _decodes(group: StepGroup) -> Spans:
    n_seqs = max(1, round(group.mean_seqs))
    return decode_spans(n_seqs, 1 + round(group.mean_before / n_seqs))


def _mixed(group: StepGroup) -> Spans:
    """Prompts of one length among sequences that decode: each of these has the mean of what is before a step."""
    n_chunks = max(1, round(group.n_chunks / group.n_mixed))
    n_decodes = max(0, round(group.mean_seqs) - n_chunks)
    length = max(1, round(group.n_prompt_tokens / group.n_mixed / n_chunks) + 1)
    before = round(group.mean_before / (n_decodes or n_chunks))
    starts = [before] * n_decodes + [0 if n_decodes else before] * n_chunks
    return _spans(starts, [1] * n_decodes + [length] * n_chunks)


def _spans(starts: Sequence[int], lengths: Sequence[int]) -> Spans:
    n = len(starts)
    return Spans(list(range(n)), list(starts), list(lengths), [0] * n, [True] * n)
