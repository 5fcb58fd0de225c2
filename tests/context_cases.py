"""Steps of ranks that share tokens, and of one rank: the same plans, and what both make of them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from rank_models import GREEDY, worker_of
from thread_ranks import ThreadComm, together
from worker_rank import spans

from quire.compute.dist.context_groups import ContextGroups
from quire.compute.platform import Platform
from quire.compute.worker import Allocation, Worker
from quire.config.context import n_dividing_heads, page_tokens
from quire.config.engine import EngineConfig
from quire.config.kv import kv_layout
from quire.core.plan import PageAppend, SlotOpen, StepPlan

LENGTHS: Final = (53, 17, 1, 30)
"""Of four prompts."""
STEPS: Final = (
    ((0, 0, 19), (1, 0, 17)),  # divided: beginnings
    ((0, 19, 23), (1, 17, 1), (2, 0, 1)),  # divided: a chunk behind a past, a decode, the first token of a sequence
    ((0, 42, 11), (1, 18, 1), (2, 1, 1)),  # not divided: a chunk and decodes
    ((0, 53, 1), (1, 19, 1), (2, 2, 1), (3, 0, 3)),
    ((0, 54, 1), (1, 20, 1), (2, 3, 1), (3, 3, 27)),  # divided again
    ((0, 55, 1), (1, 21, 1), (2, 4, 1), (3, 30, 1)),
)
"""(slot, start, length)."""
PARAMS: Final = msgspec.structs.replace(GREEDY, logprobs=5)
ASKING: Final = msgspec.structs.replace(PARAMS, prompt_logprobs=2)


def prompt_of(slot: int) -> list[int]:
    """Of fixed tokens."""
    return [(7 * i + 11 * slot + 5) % 190 + 1 for i in range(LENGTHS[slot])]


def plans(n_tokens: int) -> list[StepPlan]:
    """n_tokens: of a page. Slot 3 wants all states of its prompt; pages of slots lie mixed."""
    found, opened = [], set[int]()
    for number, rows in enumerate(STEPS):
        ends = {slot: start + length for slot, start, length in rows}
        opens = [slot for slot, *_ in rows if slot not in opened]
        opened.update(opens)
        n_pages = -(-max(len(prompt_of(slot)) + 8 for slot in range(4)) // n_tokens)
        found.append(StepPlan(
            number,
            **spans(*((slot, start, length, ends[slot] >= LENGTHS[slot]) for slot, start, length in rows)),
            opened=[SlotOpen(slot, prompt_of(slot), LENGTHS[slot], PARAMS if slot < 3 else ASKING) for slot in opens],
            pages=[PageAppend(slot, 0, [1 + slot + 4 * page for page in range(n_pages)]) for slot in opens],
        ))  # fmt: skip
    return found


def run(worker: Worker, n_tokens: int) -> list[Any]:
    """Of each step: tokens, and the logprobs of the likeliest at each place, also of prompts, by span and place."""
    found = []
    for plan in plans(n_tokens):
        result = worker.run(plan)
        assert not result.faults
        places = {("new", at, 0): packed.rows()[0] for at, packed in result.logprobs.items()}
        for span, rows in result.prompt_logprobs.items():
            places |= {("prompt", span, at): row for at, row in enumerate(rows)}
        found.append((result.tokens, {place: msgspec.to_builtins(row) for place, row in places.items()}))
    return found


def allocated(worker: Worker) -> Worker:
    """With its weights and pages."""
    worker.load()
    worker.allocate(Allocation(40, 100, layout=kv_layout(worker.shared, hybrid=False)))
    return worker


def groups_of(comm: ThreadComm, asked: Mapping[str, Any]) -> ContextGroups:
    """Of one rank of an engine with these options."""
    return ContextGroups(comm, n_dividing_heads(EngineConfig(**asked)), comm.connect, "")


def of_one(path: pathlib.Path, **options: Any) -> list[Any]:
    """What one rank makes."""
    return run(allocated(worker_of(path, **options)), 8)


def of_ranks(
    path: pathlib.Path, size: int, method: str, platform: Callable[[], Platform] | None = None, **options: Any
) -> list[tuple[list[Any], dict[str, int]]]:
    """What each of several makes, and what it has sent. platform: None: the CPU."""
    asked = {"prefill_context_parallel_size": size, "context_parallel_method": method, **options}

    def live(comm: ThreadComm) -> tuple[list[Any], dict[str, int]]:
        worker = worker_of(path, comm, groups_of(comm, asked), **asked)
        if platform is not None:
            worker.platform = platform()
        allocated(worker)
        comm.sent_bytes.clear()
        return run(worker, page_tokens(worker._config)), comm.sent_bytes

    return together(size, live)


def sent_of_prompt(path: pathlib.Path, size: int, method: str, chunks: Sequence[int]) -> list[dict[str, int]]:
    """What each rank sends in a step with the last of these chunks of a prompt, by call."""
    asked = {"prefill_context_parallel_size": size, "context_parallel_method": method}
    ids = [(7 * i + 5) % 190 + 1 for i in range(sum(chunks))]

    def live(comm: ThreadComm) -> dict[str, int]:
        worker = allocated(worker_of(path, comm, groups_of(comm, asked), **asked))
        opened, start = [SlotOpen(0, ids, len(ids), PARAMS)], 0
        pages = [PageAppend(0, 0, list(range(1, 1 + 96 // page_tokens(worker._config))))]
        for step, n in enumerate(chunks):
            comm.sent_bytes.clear()
            plan = StepPlan(step, **spans((0, start, n, step == len(chunks) - 1)), opened=opened, pages=pages)
            worker.run(plan)
            opened, pages, start = [], [], start + n
        return comm.sent_bytes

    return together(size, live)
