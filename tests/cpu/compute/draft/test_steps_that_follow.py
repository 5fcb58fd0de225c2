"""Steps that begin where only the device knows: whatever it keeps, and whoever comes, tokens are the plain ones."""

from __future__ import annotations

import json
import pathlib
import random
import time
import types
from collections.abc import Callable
from typing import Any

import byte_model
import head_case
import pytest
import torch
from calling_device import CallingDevice, MovingPlan

from quire import LLM, StructuredOutputsParams
from quire.compute import platform
from quire.compute.draft.eagle import EagleDrafter
from quire.compute.draft.head_graphs import SLOT, HeadGraphs
from quire.compute.forward import graphs
from quire.compute.platform import CudaPlatform
from quire.compute.runner import runner, standing
from quire.compute.runner.lengths import SlotLengths
from quire.compute.runner.settled import Settled
from quire.compute.runner.tables import SlotTables
from quire.control.seen_costs import StepKind
from quire.core.clock import VirtualClock
from quire.core.commands import Cancel, Submit
from quire.core.events import FinishReason
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine import workers

pytestmark = pytest.mark.usefixtures("timed_briefly", "captured_apart")

Said = dict[str, list[int]]
SIZE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 120, "max_num_seqs": 60,
    "max_num_batched_tokens": 64, "block_size": 8,
}  # fmt: skip
APART = 1 << 30
"""Rows that verify drafts are spans of their own."""
CANCELLED = {"r4": 9, "r7": 3}
"""After so many tokens."""
FULL = ("r0", "r1", "r2", "r5", "r8", "r9")
"""Those that end by their length."""
WISHES: list[dict[str, Any]] = [
    {}, {"temperature": 0.9}, {"temperature": 1.1, "top_p": 0.9}, {"end": True}, {"temperature": 0.8},
    {"max_tokens": 5}, {"temperature": 0.7, "min_tokens": 9, "end": True}, {}, {"max_tokens": 1}, {"temperature": 1.0},
]  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"presence_penalty": 0.5, "temperature": 0.6, "max_tokens": 9},
    {"logprobs": 2, "max_tokens": 9},
    {"max_tokens": 12},
]
"""Of requests that are not chosen from logits alone, and of one that ends before them."""


@pytest.fixture(scope="module")
def folder(model_with_head: pathlib.Path) -> pathlib.Path:
    return model_with_head


def requests(others: bool) -> list[Request]:
    """Each prompt begins with a token of its own."""
    made = []
    for i, wish in enumerate(WISHES + (OTHERS if others else [])):
        params = {"temperature": 0.0} | {key: value for key, value in wish.items() if key not in ("end", "max_tokens")}
        made.append(Request(
            request_id=f"r{i}", prompt_token_ids=[i + 1, *((7 * i + 5 * k) % 250 for k in range(4 + 5 * i))],
            params=SamplingParams(**params, ignore_eos="end" not in wish), max_tokens=wish.get("max_tokens", 40 + i),
            seed=i, end_token_ids=list(range(0, 256, 24)) if "end" in wish else [],
        ))  # fmt: skip
    return made


def wholes_of(said: Said) -> list[list[int]]:
    return [[*one.prompt_token_ids, *said[one.request_id]] for one in requests(True)]


class Truth:
    """What the device's chains guess in place of the head's guesses: with a chance that goes with the place the token
    that plain decoding said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wholes: list[list[int]], chance: float) -> None:
        self._wholes, self._chance = {whole[0]: whole for whole in wholes}, chance
        real = HeadGraphs._guess

        def guess(steps: Any, size: int, *given: Any) -> None:
            real(steps, size, *given)
            place, tables = int(steps._place) - 1, steps._tables
            for i, slot in enumerate(steps._sequences.device[SLOT, :size].tolist()):
                token = self.token(int(tables.tokens[slot, 0]), int(tables.ends[slot]) + 1 + place)
                steps._newest[i] = token
                steps._found.view(-1)[place * size + i] = token

        monkeypatch.setattr(HeadGraphs, "_guess", guess)

    def token(self, first: int, at: int) -> int:
        whole = self._wholes.get(first, [])
        if at >= len(whole):
            return 7
        return whole[at] if random.Random(f"{first} {at}").random() < self._chance else (whole[at] + 1) % 250


def run(
    folder: pathlib.Path, n_drafts: tuple[int, ...], others: bool = False, chance: float = -1.0, **options: Any
) -> tuple[Said, LLM]:
    """Requests come a few steps apart; n_drafts: numbers of drafts that sequences may have in a step; chance: with
    which these count, -1: if they are right."""
    speculative = {"speculative_config": {"method": "eagle3", "model": str(folder / "head")}} if any(n_drafts) else {}
    llm = LLM(str(folder), skip_tokenizer_init=True, **SIZE | speculative | options)
    rng, policy = random.Random(3), llm.engine.scheduler.live.drafts
    if chance >= 0:
        worker: Any = llm.engine.executor.worker
        assert worker.guesses_all
        worker.replace_drafter(worker.drafter, chance)

    def choose(seqs: Any, n_rows: int, n_free: int, step: int) -> list[int]:
        found: list[int] = []
        for _ in seqs:
            found.append(min(rng.choice(n_drafts), n_free - sum(found)))
        return found

    if policy.most:
        policy.choose = choose
    said, waiting, n_steps = Said(), requests(others), 0
    while waiting or llm.engine.has_work():
        n_steps += 1
        if waiting and (n_steps % 2 == 1 or not llm.engine.has_work()):
            request = waiting.pop(0)
            said[request.request_id] = []
            llm.engine.handle(Submit(request))
        for delta in llm.engine.step():
            assert delta.finish_reason is not FinishReason.ERROR, delta.failure
            said[delta.request_id] += delta.token_ids
            if len(said[delta.request_id]) >= CANCELLED.get(delta.request_id, 1000):
                llm.engine.handle(Cancel([delta.request_id]))
    assert llm.stats().n_pages_free == llm.stats().n_pages
    llm.shutdown()
    return said, llm


@pytest.fixture(scope="module")
def plain(folder: pathlib.Path) -> dict[bool, Said]:
    """With and without the other requests; on the CPU, by operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform.cuda, "CudaDevice", CallingDevice)
        patch.setattr(workers, "platform_of", lambda config, rank: CudaPlatform(captures=False))
        return {others: run(folder, (0,), others)[0] for others in (False, True)}


def same(found: Said, plain: Said) -> bool:
    """But for how much of the cancelled ones came before their end."""
    assert found.keys() == plain.keys()
    return all(
        one[: CANCELLED.get(name, 1000)] == plain[name][: CANCELLED.get(name, 1000)] for name, one in found.items()
    )


@pytest.fixture
def n_followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that followed, whether the one before it was unknown."""
    found: list[bool] = []
    real = SlotLengths.follow

    def follow(self: SlotLengths, plan: Any) -> Any:
        newest = self._newest
        assert newest is not None
        found.append(not newest.ends)
        return real(self, plan)

    monkeypatch.setattr(SlotLengths, "follow", follow)
    return found


@pytest.mark.parametrize(
    ("depth", "chance", "n_pages", "others", "again_bytes"),
    [
        (1, 0.7, 120, False, APART), (2, 0.0, 20, False, 0), (2, 0.7, 120, True, APART), (2, 0.7, 20, False, 0),
        (2, 1.0, 20, True, APART), (3, 0.7, 20, False, APART), (4, 0.7, 20, True, 0),
    ],
)  # fmt: skip
def test_the_tokens_are_the_plain_ones(
    folder: pathlib.Path,
    plain: dict[bool, Said],
    monkeypatch: pytest.MonkeyPatch,
    n_followed: list[bool],
    depth: int,
    chance: float,
    n_pages: int,
    others: bool,
    again_bytes: int,
) -> None:
    """again_bytes: `APART`, or 0: steps that verify drafts are captured as those with prompts are."""
    monkeypatch.setattr(graphs, "AGAIN_BYTES", again_bytes)
    Truth(monkeypatch, wholes_of(plain[True]), chance)
    options = {"pipeline_depth": depth, "num_gpu_blocks_override": n_pages}
    found, llm = run(folder, (1, 2, 4, 4) if depth < 4 else (0, 1, 4, 4, 4, 4), others, **options)
    stats = llm.stats()
    assert same(found, plain[others])
    assert stats.accepted_tokens > (50 if chance else -1) and (stats.preemptions > 0) == (n_pages == 20)
    assert (sum(n_followed) > (2 if others or depth == 4 else 8)) == (depth > 1)


@pytest.mark.parametrize("most_again", [graphs.FOLLOWING_AGAIN_BYTES, 0])
def test_spans_too_long_to_be_placed_follow_row_by_row(
    folder: pathlib.Path,
    plain: dict[bool, Said],
    monkeypatch: pytest.MonkeyPatch,
    n_followed: list[bool],
    most_again: int,
) -> None:
    """Small lines hold one token here, as they hold four of a group of four heads: a mixed bucket cannot follow."""
    monkeypatch.setattr(graphs, "AGAIN_BYTES", 0)
    monkeypatch.setattr(graphs, "FOLLOWING_AGAIN_BYTES", most_again)
    monkeypatch.setattr(graphs, "small_rows_of", lambda group: group)
    Truth(monkeypatch, wholes_of(plain[True]), 0.7)
    found, _ = run(folder, (1, 2, 4, 4), others=False, num_gpu_blocks_override=120)
    assert same(found, plain[False])
    assert (sum(n_followed) > 8) == bool(most_again)


def without(where: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(where, name, lambda *given: None)


def another_guess(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(standing, "FIRST_PLACE", -1)


def old_places(patch: pytest.MonkeyPatch) -> None:
    real = standing.move

    def move(tables: SlotTables, rows: torch.Tensor) -> None:
        before = rows[2:].clone()
        real(tables, rows)
        rows[2:] = before

    patch.setattr(standing, "move", move)


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    real = standing.keep

    def keep(tables: SlotTables, spans: torch.Tensor, *given: Any) -> None:
        real(tables, spans, *given)
        tables.ends[spans[0]] += spans[1] == 0

    patch.setattr(standing, "keep", keep)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "nothing": lambda patch: None,
    "guesses do not come to the token table": lambda patch: (
        patch.setattr(graphs, "AGAIN_BYTES", 0),
        patch.setattr(standing, "write", lambda *given: None),
    )[0],
    "ends stay": without(standing, "keep"),
    "an end is one too far": one_too_many,
    "rows stay": without(standing, "move"),
    "keys are written where they were planned": old_places,
    "random numbers of planned positions": without(standing, "move_sampled"),
    "attention as planned": without(MovingPlan, "place"),
    "guesses are taken from the next place": another_guess,
}


def test_forced_acceptance(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, n_followed: list[bool]) -> None:
    """Drafts that count by chance, whatever is chosen: the device and the host count the same."""
    ends: dict[int, dict[int, int]] = {}
    queue_keep, keep, n_compared = SlotLengths.queue_keep, SlotLengths.keep, 0

    def on_device(self: SlotLengths, settled: Settled, sampled: Any) -> None:
        queue_keep(self, settled, sampled)
        ends[id(settled)] = {slot: int(self._tables.ends[slot]) for slot in settled.drafted}

    def on_host(self: SlotLengths, settled: Settled, *given: Any) -> Any:
        nonlocal n_compared
        found = keep(self, settled, *given)
        seen = ends.pop(id(settled))
        assert seen == {slot: settled.ends[slot] for slot in seen}
        n_compared += len(seen)
        return found

    monkeypatch.setattr(SlotLengths, "queue_keep", on_device)
    monkeypatch.setattr(SlotLengths, "keep", on_host)
    said, llm = run(folder, (1, 2, 4, 4), chance=0.6)
    stats = llm.stats()
    assert n_compared > 100 and sum(n_followed) > 8
    assert all(len(said[one.request_id]) == one.max_tokens for one in requests(False) if one.request_id in FULL)
    assert 0.4 < stats.accepted_at[0] / stats.n_drafts < 0.8


def test_a_step_is_charged_with_the_reading_that_its_own_guesses_take(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched before the step before it is committed, and yet behind its end: for that one it is no time."""
    clock, took, unread = VirtualClock(), dict[StepKind, set[float]](), EagleDrafter._unread

    def read(self: EagleDrafter, contexts: Any) -> Any:
        clock.advance(1.0)
        return unread(self, contexts)

    def note(step: int, n_seqs: int, n_drafted: Any, n_right: int, seconds: float, kind: StepKind) -> None:
        took.setdefault(kind, set()).add(seconds)

    monkeypatch.setattr(EagleDrafter, "_unread", read)
    clocks = types.SimpleNamespace(monotonic=clock.now_s, perf_counter=time.perf_counter)
    monkeypatch.setattr(runner, "time", clocks)
    speculative = {"method": "eagle3", "model": str(folder / "head")}
    llm = LLM(str(folder), skip_tokenizer_init=True, speculative_config=speculative, **SIZE)
    llm.engine.scheduler.clock = clock
    policy: Any = llm.engine.scheduler.live.drafts
    policy.choose = lambda seqs, n_rows, n_free, step: [int(step % 5 == 0)] * len(seqs)
    policy.time, policy.times = note, lambda step: True
    llm.engine.handle(Submit(requests(False)[0]))
    while llm.engine.has_work():
        llm.engine.step()
    llm.shutdown()
    assert took == {StepKind.DRAFTED: {1.0}, StepKind.PLAIN: {0.0}, StepKind.BEHIND: {0.0}}


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_bugs_are_caught(
    folder: pathlib.Path, plain: dict[bool, Said], monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    Truth(monkeypatch, wholes_of(plain[True]), 0.7)
    PLANTED[plant](monkeypatch)
    try:
        is_same = same(run(folder, (1, 2, 4, 4), True)[0], plain[True])
    except (AssertionError, IndexError, KeyError):
        is_same = False
    assert is_same == (plant == "nothing")


def test_a_grammar_beside(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, n_followed: list[bool]) -> None:
    """While it runs steps wait for the host, which makes its masks; before and behind it they follow."""
    folder = byte_model.make(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 384}
    head_case.write(folder / "head", **shape, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    constrained = StructuredOutputsParams(regex="[a-c]{3,12}-(\\d\\d|x+)y")
    params = [
        SamplingParams(temperature=0.5 * (i % 3), seed=i, max_tokens=8 + 12 * (i % 4), ignore_eos=i != 5,
                       structured_outputs=constrained if i == 5 else None)
        for i in range(8)
    ]  # fmt: skip
    prompts: list[Any] = [{"prompt_token_ids": [66 + i, *range(40, 44 + 3 * i)]} for i in range(8)]
    answers: list[list[list[int]]] = []
    for speculative in (None, {"method": "eagle3", "model": str(folder / "head")}):
        if answers:
            Truth(monkeypatch, [[*p["prompt_token_ids"], *a] for p, a in zip(prompts, answers[0], strict=True)], 0.7)
        llm = LLM(
            str(folder), load_format="dummy", speculative_config=speculative,
            **SIZE | {"max_num_seqs": 48, "max_num_batched_tokens": 128},
        )  # fmt: skip
        llm.engine.scheduler.live.drafts.costs = None
        answers.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
        assert llm.stats().n_pages_free == llm.stats().n_pages
        llm.shutdown()
    assert answers[0] == answers[1] and len(n_followed) > 2
