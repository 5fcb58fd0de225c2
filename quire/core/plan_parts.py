"""What of a plan concerns one data-parallel rank, and the one result that the results of all of them come to.

What has a slot in a plan is that slot's rank's: each of these ranks has `n_slots` neighbouring ones. Places of adapters
are the same on all. Page ids and snapshots are counted by each for itself. Owns that arithmetic; plans with drafts have
no parts.
Invariant: a part is a plan of its own, with slots from 0 on, and may have no spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quire.core.plan import PageAppend, PageCopy, SlotOpen, Spans, StateRestore, StateSave, StepMasks, StepPlan
from quire.core.result import Fault, StepResult, StepTimings

SharedPrefixes = list[tuple[list[int], int]]
"""As in `StepPlan`."""
HasSlot = TypeVar("HasSlot", SlotOpen, PageAppend, PageCopy, StateRestore, StateSave)


def part_of(plan: StepPlan, dp_rank: int, n_slots: int) -> StepPlan:
    """The part of one rank. O(spans) of all."""
    first = dp_rank * n_slots
    own = range(first, first + n_slots)
    whole, spans, number_of = plan.spans, Spans([], [], [], [], []), dict[int, int]()
    for number, slot in enumerate(whole.slots):
        if slot in own:
            number_of[number] = len(spans)
            spans.add(slot - first, whole.starts[number], whole.lengths[number], whole.wants[number])

    def moved(parts: list[HasSlot]) -> list[HasSlot]:
        return [msgspec.structs.replace(one, slot=one.slot - first) for one in parts if one.slot in own]

    closed = [at for at, slot in enumerate(plan.closed) if slot in own]
    return StepPlan(
        step=plan.step,
        spans=spans,
        n_tokens=sum(spans.lengths),
        closed=[plan.closed[at] - first for at in closed],
        closed_lens=[plan.closed_lens[at] for at in closed] if plan.closed_lens else [],
        opened=moved(plan.opened),
        pages=moved(plan.pages),
        copies=moved(plan.copies),
        restores=moved(plan.restores),
        saves=moved(plan.saves),
        shared_prefixes=[
            ([slot - first for slot in slots], n_pages) for slots, n_pages in plan.shared_prefixes if slots[0] in own
        ],
        masked=[number_of[span] for span in plan.masked if span in number_of],
        adapters=plan.adapters,
    )


def masks_of(masks: StepMasks, plan: StepPlan, dp_rank: int, n_slots: int) -> StepMasks:
    """The lines of one rank's part of a plan. masks: of the whole plan, which has a line for each masked span."""
    bits, n_bytes = memoryview(masks.bits), len(masks.bits) // len(plan.masked)
    lines = [line for line, span in enumerate(plan.masked) if plan.spans.slots[span] // n_slots == dp_rank]
    return StepMasks(masks.step, b"".join([bits[line * n_bytes : (line + 1) * n_bytes] for line in lines]))


def rows_of(plan: StepPlan, n_dp_ranks: int, n_slots: int) -> list[int]:
    """Rows that each rank has in this step."""
    rows = [0] * n_dp_ranks
    for slot, length in zip(plan.spans.slots, plan.spans.lengths, strict=True):
        rows[slot // n_slots] += length
    return rows


def spans_of(plan: StepPlan, n_dp_ranks: int, n_slots: int) -> list[tuple[Spans, SharedPrefixes]]:
    """Spans and shared prefixes of each rank, under the slots of all: what its time depends on. O(spans)."""
    found: list[tuple[Spans, SharedPrefixes]] = [(Spans([], [], [], [], []), []) for _ in range(n_dp_ranks)]
    whole = plan.spans
    for slot, start, length, wants in zip(whole.slots, whole.starts, whole.lengths, whole.wants, strict=True):
        found[slot // n_slots][0].add(slot, start, length, wants)
    for slots, n_pages in plan.shared_prefixes:
        found[slots[0] // n_slots][1].append((slots, n_pages))
    return found


def joined(plan: StepPlan, results: Sequence[StepResult], n_slots: int) -> StepResult:
    """results: of the parts of a plan, in the order of ranks."""
    found = StepResult(plan.step, tokens=[], n_new=[], logprobs={}, prompt_logprobs={}, pooled={}, faults=[])
    n_spans, n_rows, n_tokens = ([0] * len(results) for _ in range(3))
    for number, (slot, wants) in enumerate(zip(plan.spans.slots, plan.spans.wants, strict=True)):
        dp_rank = slot // n_slots
        own, span = results[dp_rank], n_spans[dp_rank]
        n_spans[dp_rank] += 1
        if own.prompt_logprobs and span in own.prompt_logprobs:
            found.prompt_logprobs[number] = own.prompt_logprobs[span]
        if own.pooled and span in own.pooled:
            found.pooled[number] = own.pooled[span]
        if not wants:
            continue
        n_new, at = own.n_new[n_rows[dp_rank]], n_tokens[dp_rank]
        n_rows[dp_rank] += 1
        n_tokens[dp_rank] += n_new
        if own.logprobs:
            rows = ((at + i, len(found.tokens) + i) for i in range(n_new))
            found.logprobs |= {to: own.logprobs[one] for one, to in rows if one in own.logprobs}
        found.n_new.append(n_new)
        found.tokens += own.tokens[at : at + n_new]
    for dp_rank, own in enumerate(results):
        found.faults += [Fault(dp_rank * n_slots + fault.slot, fault.code) for fault in own.faults]
    timings = [own.timings for own in results]
    found.timings = StepTimings(max(one.host_s for one in timings), max(one.total_s for one in timings))
    return found
