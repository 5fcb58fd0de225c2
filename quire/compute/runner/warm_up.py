"""Steps for nobody before the first request, so that kernels are compiled and loaded while nobody waits.

Owns which steps these are. Does not own how they run (`runner`), nor what is captured (`compute/forward`).
Invariant: nothing is left of them that a request sees: no slot is open, and no page but the first two was written,
of which one takes padding and the other one is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from quire.compute.forward.buckets import MAX_MIXED_ROWS
from quire.compute.runner.runner import Runner
from quire.core.plan import PageCopy, SlotOpen, SlotParams, Spans, StepMasks, StepPlan
from quire.kernels.attention.schedule.tiles import small_rows_of

GREEDY: Final = SlotParams(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, -1, {}, None, [], [], 0)
"""Of sequences that are computed for nobody, before the first request."""
PLAIN: Final = msgspec.structs.replace(GREEDY, temperature=0.7)
TRUNCATED: Final = msgspec.structs.replace(PLAIN, top_p=0.9)
PENALISED: Final = msgspec.structs.replace(TRUNCATED, presence_penalty=0.1, logprobs=1)
"""How tokens are chosen: from all, from a part of the vocabulary, and such a one with a penalty and its logprob."""
FEW_TOKENS: Final = 5
"""Of a short prompt beside a long one."""
UNCAPTURED: Final = MAX_MIXED_ROWS + 16
"""More tokens than a captured step has."""


def of_every_alignment(most: int) -> list[int]:
    """Numbers of tokens, at most so many, for which Triton compiles kernels apart: whether an argument is taken for a
    multiple of 16, or of 16 bytes, depends on the largest power of 2 in them."""
    most = min(most, UNCAPTURED)
    return [n for power in (1, 2, 4, 8, 16) if (n := most - (most - power) % (2 * power)) > 0]


def warm_up(runner: Runner, n_tokens: int, apart: Sequence[int] = ()) -> None:
    """Prompts of `n_tokens`, and of what attention has kernels of their own for: one token, and as many as a small tile
    holds; then the sampler beyond what is captured at start.

    apart: numbers of tokens that are also run kernel by kernel, as steps are that are too long to be captured, where
    kernels are compiled when they are first wanted (`of_every_alignment`); the first of them with a short prompt beside
    it; then the sampler, likewise, with masks, too.
    """
    group = runner.pool.group
    for n in sorted({1, min(max(1, small_rows_of(group) // group), n_tokens), n_tokens}):
        _run(runner, [n], PLAIN)
    _run(runner, [1], TRUNCATED)
    _run(runner, [1], PENALISED)
    if apart:
        with runner.kernel_by_kernel():
            for n in apart:
                _run(runner, [n], PLAIN)
            if runner.tables.spare_slot > 1 and apart[0] > FEW_TOKENS:
                _run(runner, [apart[0] - FEW_TOKENS, FEW_TOKENS], PLAIN)
            for params in (TRUNCATED, PENALISED):
                _run(runner, [1], params)
                _run(runner, [1], params, is_masked=True)
    runner.take_all()


def _run(runner: Runner, lengths: Sequence[int], params: SlotParams, *, is_masked: bool = False) -> None:
    """A step with prompts of so many tokens, in slots of each of `warm_slots` on, and how the next ones are chosen.
    Page 0 is copied to page 1, as pages are at a fork. is_masked: a mask allows the first 32 tokens alone."""
    places = [(slot + i, n) for slot in runner.warm_slots for i, n in enumerate(lengths)]
    slots, each, zeros = [slot for slot, _ in places], [n for _, n in places], [0] * len(places)
    masked = list(range(len(places))) if is_masked else []
    plan = StepPlan(
        0,
        Spans(slots, zeros, each, zeros, [True] * len(places)),
        sum(each),
        opened=[SlotOpen(slot, [0] * n, n, params) for slot, n in places],
        copies=[PageCopy(0, 1, 1, slot) for slot in runner.warm_slots],
        masked=masked,
    )
    launched = runner.launch(plan)
    if masked:
        launched.mask(StepMasks(0, b"\xff" * 4 * len(masked)))
    launched.result()
    for i in range(len(lengths)):
        runner.close(i)
