"""The null device: refuses what contradicts itself, notices wrong pages, agrees with its sequential reference."""

from __future__ import annotations

import random

import pytest

from quire.config.model import parse_arch
from quire.core.clock import VirtualClock
from quire.core.plan import PageAppend, PageCopy, SlotOpen, SlotParams, Spans, StepPlan
from quire.core.result import StepResult
from quire.engine.executors.digests import null_reference
from quire.engine.executors.null import NullExecutor, PlanError
from quire.planner.accelerators import accelerator_named
from quire.planner.cost import CostModel, calibrated

VOCAB, SIZE = 50, 4


def params(**changes: object) -> SlotParams:
    values = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "seed": 3, "logprobs": -1, "prompt_logprobs": -1, "logit_bias": {},
        "allowed_token_ids": None, "bad_token_seqs": [], "masked_end_ids": [], "masked_until": 0, **changes,
    }  # fmt: skip
    return SlotParams(**values)  # type: ignore[arg-type]


def device(cost: CostModel | None = None, clock: VirtualClock | None = None) -> NullExecutor:
    return NullExecutor(
        n_pages=16, page_size=SIZE, max_num_seqs=4, max_model_len=32, vocab_size=VOCAB,
        clock=clock or VirtualClock(), cost=cost,
    )  # fmt: skip


def plan(step: int, *spans: tuple[int, int, int, bool], **parts: object) -> StepPlan:
    columns = Spans([], [], [], [], [])
    for slot, start, length, wants in spans:
        columns.add(slot, start, length, wants)
    return StepPlan(step, columns, sum(columns.lengths), **parts)  # type: ignore[arg-type]


def opened(prompt: list[int], slot: int = 0, pages: tuple[int, ...] = (1, 2), **changes: object) -> dict[str, object]:
    return {
        "opened": [SlotOpen(slot, prompt, len(prompt), params(**changes))],
        "pages": [PageAppend(slot, 0, list(pages))],
    }


def run(executor: NullExecutor, one: StepPlan) -> StepResult:
    return executor.submit(one).result()


def test_any_chunking_gives_the_reference() -> None:
    rng = random.Random(0)
    for _ in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(7)]
        executor, said, start, step = device(), [], 0, 0
        parts = opened(prompt)
        while start < 7:
            length = rng.randint(1, 7 - start)
            said += run(executor, plan(step, (0, start, length, start + length == 7), **parts)).tokens
            start, step, parts = start + length, step + 1, {}
        said += run(executor, plan(step, (0, 7, 1, True))).tokens
        assert said == null_reference(prompt, params(), 2, VOCAB)


def test_pages_may_be_shared_but_not_confused() -> None:
    executor, prompt = device(), [1, 2, 3, 4, 5]
    first = run(executor, plan(0, (0, 0, 5, True), **opened(prompt)))
    second = run(executor, plan(1, (1, 4, 1, True), **opened(prompt, 1, (1, 3))))
    assert first.tokens == second.tokens == null_reference(prompt, params(), 1, VOCAB)
    wrong = run(executor, plan(2, (2, 4, 1, True), **opened([9, 2, 3, 4, 5], 2, (1, 4))))
    assert wrong.tokens != null_reference([9, 2, 3, 4, 5], params(), 1, VOCAB), "a foreign page changes the token"


def test_a_stale_page_changes_the_token() -> None:
    executor, prompt = device(), [1, 2, 3, 4, 5]
    run(executor, plan(0, (0, 0, 5, True), **opened(prompt)))
    run(executor, plan(1, (0, 0, 4, False), closed=[0], **opened([7, 7, 7, 7], 0, (1,))))
    assert run(executor, plan(2, (1, 4, 1, True), **opened(prompt, 1, (1, 3)))).tokens != null_reference(
        prompt, params(), 1, VOCAB
    )


def test_copies_carry_rows() -> None:
    executor, prompt = device(), [1, 2, 3]
    expected = null_reference(prompt, params(), 1, VOCAB)
    assert run(executor, plan(0, (0, 0, 3, True), **opened(prompt, pages=(1,)))).tokens == expected
    copied = run(executor, plan(1, (1, 2, 1, True), copies=[PageCopy(1, 2, 2)], **opened(prompt, 1, (2,))))
    assert copied.tokens == expected


def test_masks_are_kept_and_an_empty_one_is_a_fault() -> None:
    prompt = [1, 2]
    free = null_reference(prompt, params(), 1, VOCAB)[0]
    masked = {"masked_end_ids": [free], "masked_until": 3}
    token = run(device(), plan(0, (0, 0, 2, True), **opened(prompt, **masked))).tokens
    assert token == null_reference(prompt, params(**masked), 1, VOCAB) != [free]
    only = {"allowed_token_ids": [9]}
    assert run(device(), plan(0, (0, 0, 2, True), **opened(prompt, **only))).tokens == [9]
    result = run(device(), plan(0, (0, 0, 2, True), **opened(prompt, **only, masked_end_ids=[9], masked_until=9)))
    assert result.tokens == [] and result.n_new == [0] and result.faults[0].code == "empty_mask"


def test_logprobs_when_asked() -> None:
    prompt = [1, 2, 3]
    result = run(device(), plan(0, (0, 0, 3, True), **opened(prompt, logprobs=2, prompt_logprobs=1)))
    (row,) = result.logprobs[0].rows()
    assert row.top_ids[0] == result.tokens[0] and len(row.top_ids) == 2
    assert [row.top_ids for row in result.prompt_logprobs[0]] == [[2], [3]]


PROMPT = [1, 2, 3, 4, 5]
FIRST = plan(0, (0, 0, 5, True), **opened(PROMPT))
BAD = {
    "not open": plan(1, (1, 0, 1, False)),
    "planned at 6": plan(1, (0, 6, 1, False)),
    "token 6": plan(1, (0, 5, 2, False)),
    "beyond its": plan(1, (0, 5, 1, True), (1, 0, 5, True), **opened(PROMPT, 1, (3,))),
    "two spans": plan(1, (0, 5, 1, True), (0, 6, 1, True)),
    "never written": plan(1, (1, 4, 1, True), **opened(PROMPT, 1, (3, 4))),
    "out of range": plan(1, (1, 0, 5, True), **opened(PROMPT, 1, (0, 4))),
    "twice": plan(1, (1, 0, 5, True), **opened(PROMPT, 1, (4, 4))),
    "shares": plan(1, (1, 0, 5, True), **opened(PROMPT, 1, (1, 4))),
    "while it is open": plan(1, (0, 0, 5, True), **opened(PROMPT)),
    "does not exist": plan(1, (9, 0, 5, True), **opened(PROMPT, 9)),
    "was not open": plan(1, (0, 5, 1, True), closed=[2]),
    "at the end of the table": plan(1, (0, 5, 1, True), pages=[PageAppend(0, 3, [5])]),
    "both source and target": plan(1, (0, 5, 1, True), copies=[PageCopy(1, 3, 1), PageCopy(3, 4, 1)]),
    "target of two": plan(1, (0, 5, 1, True), copies=[PageCopy(1, 3, 1), PageCopy(2, 3, 1)]),
    "that were never written": plan(1, (0, 5, 1, True), copies=[PageCopy(2, 3, 2)]),
    "the dummy page": plan(1, (0, 5, 1, True), copies=[PageCopy(0, 3, 2)]),
    "is wanted at": plan(1, (1, 0, 4, True), **opened(PROMPT, 1, (3,))),
    "after step": plan(0, (0, 5, 1, True)),
    "says 0 tokens": plan(1),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_plan_is_refused(message: str) -> None:
    executor = device()
    executor.execute(FIRST)
    with pytest.raises(PlanError, match=message):
        executor.submit(BAD[message]).result()


SMALL = parse_arch(
    {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 50, "max_position_embeddings": 128,
    }
)  # fmt: skip


def test_the_clock_moves_by_the_cost_model() -> None:
    clock = VirtualClock()
    cost = calibrated(SMALL, accelerator_named("h200"))
    result = run(device(cost, clock), FIRST)
    assert clock.now_s() == result.timings.total_s == cost.step_s(FIRST.spans) > 0
