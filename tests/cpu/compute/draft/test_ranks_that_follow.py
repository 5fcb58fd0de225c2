"""Ranks that are never asked for a result, as all but one are: they guess what the one guesses that is, row by row.

Workers take the plans that an engine of one rank has made: alone, or sharing the model, as threads. Where one had
learnt less of the texts, it would read more of them for its guesses, and ranks that compute unlike numbers of rows wait
for each other for ever.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from thread_ranks import ThreadComm, together

from quire import LLM, SamplingParams
from quire.compute.draft.choice import drafter_of
from quire.compute.draft.head_graphs import HeadGraphs
from quire.compute.draft.head_steps import EagerSteps, HeadRows
from quire.compute.draft.suffix import SuffixDrafter
from quire.compute.draft.with_head import HeadCheckpoint
from quire.compute.platform import CudaPlatform
from quire.compute.runner.runner import Runner
from quire.compute.worker import Allocation, Worker
from quire.config.eagle import read_head
from quire.config.speculative import SpeculativeConfig
from quire.core.plan import StepPlan
from quire.engine.capacity import layout_of

pytestmark = pytest.mark.usefixtures("timed_briefly")

Step = tuple[StepPlan, list[Any]]
"""And what came of it."""
Asked = dict[int, list[Any]]
"""By table of slots: rows that guesses were asked behind, and these, and rows that were read before."""
SIZE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 120, "max_num_seqs": 24,
    "max_num_batched_tokens": 64, "block_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(model_with_head: pathlib.Path) -> pathlib.Path:
    return model_with_head


@pytest.fixture
def asked(captured_apart: None, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """From now on; engines have a captured device apart."""
    found: Asked = {}

    def spied(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def spy(self: Any, rows: HeadRows, *given: Any, **how: Any) -> Any:
            spans = rows.span_slots.tolist(), rows.q_indptr.tolist(), rows.kv_lens.tolist()
            made = real(self, rows, *given, **how)
            said = made.read() if name == "queue" else made
            found.setdefault(id(self._tables), []).append((name, *spans, said, how))
            return made

        monkeypatch.setattr(kind, name, spy)

    spied(HeadGraphs, "queue")
    spied(EagerSteps, "read")
    spied(EagerSteps, "chain")
    return found


def plans_of(
    folder: pathlib.Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, speculative: dict[str, Any] | None = None
) -> tuple[Worker, Allocation, list[Step]]:
    """Of a run, what the engine's worker was allocated, and plans with results. Later prompts begin as texts of the
    first ones, which ended by their tokens while others went on."""
    made, steps, allocate = list[tuple[Worker, Allocation]](), list[Any](), Worker.allocate
    monkeypatch.setattr(Worker, "allocate", lambda self, said: made.append((self, said)) or allocate(self, said))
    speculative = speculative or {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
    llm = LLM(str(folder), skip_tokenizer_init=True, speculative_config=speculative, **SIZE)
    llm.engine.scheduler.live.drafts.choose = lambda seqs, n_rows, n_free, step: [3] * len(seqs)
    asked.clear()
    executor: Any = llm.engine.executor
    submit = executor.submit

    def noted(plan: StepPlan) -> Any:
        again = copy.deepcopy(plan)
        future = submit(plan)
        steps.append((again, future))
        return future

    monkeypatch.setattr(executor, "submit", noted)
    prompts = [[n, *range(60, 70 + 5 * n)] for n in range(1, 6)]
    for _ in range(3):
        ends = [list(range(n, 256, 25)) for n in range(len(prompts))]
        params = [SamplingParams(temperature=1, max_tokens=30, seed=5, stop_token_ids=ids) for ids in ends]
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        prompts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]
    llm.shutdown()
    return *made[0], [(plan, said_of(future)) for plan, future in steps]


def said_of(launched: Any) -> list[Any]:
    """Of its result."""
    found = launched.result()
    return [found.tokens, found.n_new, found.n_drafted]


def begun(worker: Worker, allocation: Allocation) -> None:
    layout = layout_of(worker._config, worker._limits, worker.shared)
    worker.load()
    worker.allocate(dataclasses.replace(allocation, layout=layout))
    worker.draft_costs()


def rows_of(asked: Asked, worker: Worker) -> list[Any]:
    """Behind which it has guessed, or that it has read, since its start."""
    return asked.pop(id(worker.runner.tables), [])


def test_a_rank_that_nobody_asks_learns_the_same_texts(
    folder: pathlib.Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else its guesses by suffixes are others."""
    learnt, close = dict[int, list[Any]](), SuffixDrafter.close

    def noted(self: SuffixDrafter, slot: int, tokens: np.ndarray) -> None:
        learnt.setdefault(id(self), []).append(tokens.tolist())
        close(self, slot, tokens)

    monkeypatch.setattr(SuffixDrafter, "close", noted)
    speculative = {"method": "suffix", "num_speculative_tokens": 3}
    one, allocation, steps = plans_of(folder, asked, monkeypatch, speculative)
    (expected,) = learnt.values()
    for takes_in in (True, False):
        if not takes_in:
            monkeypatch.setattr(Runner, "_keep_committed", lambda self, step: None)
        learnt.clear()
        drafter = drafter_of(SpeculativeConfig(method="suffix"))
        worker = Worker(one._config, one._limits, folder, one._arch, CudaPlatform(), drafter=drafter)
        begun(worker, allocation)
        for plan, _ in steps:
            worker.launch(copy.deepcopy(plan))
        (found,) = learnt.values()
        assert (found == expected) == takes_in


def test_a_rank_that_nobody_asks(folder: pathlib.Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes in what control knows. If it does not, it reads other rows, and the steps that it remembers are many."""
    one, allocation, steps = plans_of(folder, asked, monkeypatch)
    (expected,) = asked.values()
    assert sum(how.get("is_late", False) for *_, how in expected) > 20
    assert any(name == "read" for name, *_ in expected)
    for takes_in in (True, False):
        if not takes_in:
            monkeypatch.setattr(Runner, "_keep_committed", lambda self, step: None)
        worker = Worker(one._config, one._limits, folder, one._arch, CudaPlatform(), draft=one._draft)
        begun(worker, allocation)
        rows_of(asked, worker)
        n_unkept = 0
        for plan, _ in steps:
            worker.launch(copy.deepcopy(plan))
            n_unkept = max(n_unkept, len(worker.runner._unkept))
        assert (rows_of(asked, worker) == expected) == takes_in == (n_unkept < 4)


def test_ranks_that_share_the_model(folder: pathlib.Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """In captured chains, too, they guess as one rank does."""
    one, allocation, steps = plans_of(folder, asked, monkeypatch)
    (expected,) = asked.values()
    config = msgspec.structs.replace(one._config, tensor_parallel_size=2)
    draft = HeadCheckpoint(folder / "head", read_head(folder / "head"), None, 2)

    def live(comm: ThreadComm) -> list[Any]:
        worker = Worker(config, one._limits, folder, one._arch, CudaPlatform(), comm, draft=draft)
        begun(worker, allocation)
        rows_of(asked, worker)
        with torch.inference_mode():
            launched = [worker.launch(copy.deepcopy(plan)) for plan, _ in steps]
        if comm.rank == 0:
            assert [said_of(step) for step in launched] == [said for _, said in steps]
        return rows_of(asked, worker)

    assert together(2, live) == [expected] * 2
