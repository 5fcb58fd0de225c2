"""Ranks that are never asked for a result, as all but one are: they guess what the one guesses that is, row by row.

Two workers of one process take the same plans. Where one had learnt less of the texts, it would read more of them for
its guesses, and ranks that compute unlike numbers of rows wait for each other for ever.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Iterator
from typing import Any

import head_case
import pytest
import torch
from calling_device import CallingDevice, LiveChains, LivePlans
from family_cases import random_checkpoint

from quire import LLM, SamplingParams
from quire.compute import platform
from quire.compute.draft.head_graphs import HeadGraphs
from quire.compute.draft.head_steps import EagerSteps, HeadRows
from quire.compute.platform import CudaPlatform
from quire.compute.runner.runner import Runner
from quire.compute.worker import Worker
from quire.config.model import read_arch
from quire.engine import workers

pytestmark = pytest.mark.usefixtures("timed_briefly")

Asked = dict[int, list[Any]]
"""By table of slots: rows that guesses were asked behind, and rows that were read before."""
SIZE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 120, "max_num_seqs": 24,
    "max_num_batched_tokens": 64, "block_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    found = tmp_path_factory.mktemp("model")
    random_checkpoint(found, "Llama", num_hidden_layers=4, max_position_embeddings=256)
    head_case.write(found / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """From now on; engines have a captured device apart."""
    found: Asked = {}
    n_threads = torch.get_num_threads()
    LivePlans(monkeypatch)
    LiveChains(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(workers, "platform_of", lambda config, rank: CudaPlatform())
    torch.set_num_threads(1)

    def spied(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def spy(self: Any, rows: HeadRows, *given: Any, **how: Any) -> Any:
            spans = rows.span_slots.tolist(), rows.q_indptr.tolist(), rows.kv_lens.tolist()
            found.setdefault(id(self._tables), []).append((name, *spans, how))
            return real(self, rows, *given, **how)

        monkeypatch.setattr(kind, name, spy)

    spied(HeadGraphs, "queue")
    spied(EagerSteps, "read")
    spied(EagerSteps, "chain")
    yield found
    torch.set_num_threads(n_threads)


def both(folder: pathlib.Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any], int]:
    """What the rank that tells results was asked, and the other one; and the most steps that this one had not taken in.
    Later prompts begin as texts of the first ones, which ended by their tokens while others went on."""
    made, allocate = list[Any](), Worker.allocate
    monkeypatch.setattr(Worker, "allocate", lambda self, said: made.append((self, said)) or allocate(self, said))
    speculative = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
    llm = LLM(str(folder), skip_tokenizer_init=True, speculative_config=speculative, **SIZE)
    llm.engine.scheduler.live.drafts.choose = lambda seqs, n_rows, n_free, step: [3] * len(seqs)
    one, said = made[0]
    other = workers.make_worker(one._config, folder, read_arch(folder), is_server=False).worker
    other.load()
    other.allocate(said)
    other.draft_costs()
    asked.clear()
    executor: Any = llm.engine.executor
    submit, tables, most = executor.submit, [one.runner.tables for one in (one, other)], 0

    def to_both(plan: Any) -> Any:
        nonlocal most
        again = copy.deepcopy(plan)
        future = submit(plan)
        other.launch(again)
        most = max(most, len(other.runner._unkept))
        return future

    monkeypatch.setattr(executor, "submit", to_both)
    prompts = [[n, *range(60, 70 + 5 * n)] for n in range(1, 6)]
    for _ in range(3):
        ends = [list(range(n, 256, 25)) for n in range(len(prompts))]
        params = [SamplingParams(temperature=1, max_tokens=30, seed=5, stop_token_ids=ids) for ids in ends]
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        prompts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]
    llm.shutdown()
    told, untold = (asked[id(table)] for table in tables)
    return told, untold, most


def test_they_guess_alike(folder: pathlib.Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    told, untold, most = both(folder, asked, monkeypatch)
    assert untold == told and most < 4
    assert sum(how.get("is_late", False) for *_, how in told) > 20
    assert any(name == "read" for name, *_ in told)


def test_what_was_not_taken_in_in_time_is_caught(
    folder: pathlib.Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "_keep_committed", lambda self, step: None)
    told, untold, most = both(folder, asked, monkeypatch)
    assert untold != told and most > 4
