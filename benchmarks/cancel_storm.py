"""1,000 requests, half of them cancelled at random moments: nothing may leak and nobody else may notice.

    python -m benchmarks.cancel_storm

A quiet run gives each request's text. The storm sends the same requests at once and cancels half of them before,
while or after they run: by leaving the stream, by cancelling the task, by `abort`. Afterwards the engine must hold no
sequence and no page, this process no task, every survivor the bytes of the quiet run, and so must a repeat of some.
Exit code 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import pathlib
import random
import sys
import time

from quire import AsyncLLM, EngineConfig, SamplingParams
from quire.bench.report import build_report, write_report
from quire.core.events import EngineStats
from quire.core.sampling import OutputKind

RESULTS = pathlib.Path(__file__).with_name("results")
WAYS = ("leave", "task", "abort")
SETTLE_S = 10.0
STATS_AGE_S = 1.5
"""The engine sends its gauges about once a second."""


@dataclasses.dataclass(slots=True)
class Plan:
    """One request, and how it is cancelled, if it is."""

    prompt: list[int]
    params: SamplingParams
    way: str = ""
    after_s: float = 0.0
    after_outputs: int = 0


@dataclasses.dataclass(slots=True)
class Answer:
    """What came of a request."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cancel half of many requests and look for what is left.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=str(RESULTS / "cancel_storm.json"))
    return parser.parse_args()


def make_plans(n: int, vocab_size: int, seed: int) -> list[Plan]:
    """Prompts of 8 to 96 tokens, a third with a shared head; sampled with a seed of their own; 4 to 48 tokens out."""
    rng = random.Random(seed)
    head = rng.choices(range(vocab_size), k=48)
    plans = []
    for i in range(n):
        own = rng.choices(range(vocab_size), k=rng.randint(8, 48))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.randint(4, 48), ignore_eos=True,
            output_kind=OutputKind.DELTA,
        )  # fmt: skip
        plans.append(Plan(head + own if i % 3 == 0 else own, params))
    return plans


def doom_half(plans: list[Plan], duration_s: float, seed: int) -> set[int]:
    """Give half of the plans a way and a moment to be cancelled; returns their indices."""
    rng = random.Random(f"{seed}/doom")
    doomed = set(rng.sample(range(len(plans)), len(plans) // 2))
    for i in doomed:
        plans[i].way = rng.choice(WAYS)
        # Early enough that nearly all are cancelled while they wait or run: the storm is shorter than the quiet run.
        plans[i].after_outputs = rng.randint(0, (plans[i].params.max_tokens or 1) // 4)
        plans[i].after_s = rng.uniform(0, duration_s / 4)
    return doomed


async def ask(llm: AsyncLLM, plan: Plan, request_id: str) -> Answer:
    """Read a stream to its end, or leave it after `after_outputs` parts if that is the plan."""
    answer = Answer()
    n_outputs = 0
    if plan.way == "leave" and plan.after_outputs == 0:
        stream = await llm.submit(plan.prompt, plan.params, request_id=request_id)
        await stream.aclose()
        return answer
    async with contextlib.aclosing(llm.generate(plan.prompt, plan.params, request_id)) as outputs:
        async for output in outputs:
            answer.text += output.outputs[0].text
            answer.token_ids += output.outputs[0].token_ids
            answer.finished = output.finished
            n_outputs += 1
            if plan.way == "leave" and n_outputs >= plan.after_outputs:
                break
    return answer


async def ask_and_cancel(llm: AsyncLLM, plan: Plan, request_id: str) -> Answer | None:
    """Run one request, carrying out its cancellation from outside. None if it was cancelled that way."""
    task = asyncio.create_task(ask(llm, plan, request_id))
    if plan.way not in ("task", "abort"):
        return await task
    await asyncio.wait([task], timeout=plan.after_s)
    if plan.way == "abort":
        await llm.abort(request_id)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


async def settle(llm: AsyncLLM, n_tasks: int) -> tuple[EngineStats, int]:
    """Wait until the engine is idle, at most `SETTLE_S`; returns its last gauges and the tasks beyond `n_tasks`."""
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s and (llm.stats().n_running or llm.stats().n_waiting):
        await asyncio.sleep(0.1)
    await asyncio.sleep(STATS_AGE_S)
    return llm.stats(), len(asyncio.all_tasks()) - n_tasks


async def storm(args: argparse.Namespace) -> dict[str, object]:
    """Quiet run, storm, repeat; returns what was found."""
    llm = await AsyncLLM.create(EngineConfig(model=args.model, max_num_seqs=args.max_num_seqs))
    try:
        plans = make_plans(args.requests, llm.logits_width, args.seed)
        n_tasks = len(asyncio.all_tasks())
        begin_s = time.perf_counter()
        quiet = await asyncio.gather(*(ask(llm, plan, f"quiet-{i}") for i, plan in enumerate(plans)))
        quiet_s = time.perf_counter() - begin_s
        before, _ = await settle(llm, n_tasks)
        doomed = doom_half(plans, quiet_s / 2, args.seed)
        begin_s = time.perf_counter()
        loud = await asyncio.gather(*(ask_and_cancel(llm, plan, f"loud-{i}") for i, plan in enumerate(plans)))
        storm_s = time.perf_counter() - begin_s
        after, n_tasks_left = await settle(llm, n_tasks)
        for plan in plans:
            plan.way = ""
        again = await asyncio.gather(*(ask(llm, plan, f"again-{i}") for i, plan in enumerate(plans[:64])))
    finally:
        await llm.shutdown()
    survivors = [i for i in range(len(plans)) if i not in doomed]
    differing = [i for i in survivors if loud[i] != quiet[i]]
    return {
        "n_requests": len(plans),
        "n_doomed": len(doomed),
        "n_aborted_while_open": after.finished.get("abort", 0) - before.finished.get("abort", 0),
        "n_survivors": len(survivors),
        "n_survivors_that_differ": len(differing),
        "n_repeats_that_differ": sum(one != other for one, other in zip(again, quiet, strict=False)),
        "n_unfinished_survivors": sum(not quiet[i].finished for i in survivors),
        "running_left": after.n_running,
        "waiting_left": after.n_waiting,
        "pages_left": after.n_pages - after.n_pages_free,
        "slots_taken_left": after.n_slots_taken,
        "tasks_left": n_tasks_left,
        "quiet_s": quiet_s,
        "storm_s": storm_s,
    }


MUST_BE_ZERO = (
    "n_survivors_that_differ", "n_repeats_that_differ", "n_unfinished_survivors", "running_left", "waiting_left",
    "pages_left", "slots_taken_left", "tasks_left",
)  # fmt: skip


def main() -> int:
    args = parse_arguments()
    results = asyncio.run(storm(args))
    for name, value in results.items():
        print(f"{name:<28}{value}")
    write_report(args.output, build_report("cancel_storm", vars(args), results))
    return 1 if any(results[name] for name in MUST_BE_ZERO) else 0


if __name__ == "__main__":
    sys.exit(main())
