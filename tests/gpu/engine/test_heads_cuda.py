"""Heads on a GPU, captured and kernel by kernel: guesses are the oracle's; in float32 the tokens are those without."""

from __future__ import annotations

import pathlib
from typing import Any

import head_case
import mtp_case
import pytest
from family_cases import random_checkpoint
from head_case import Guess, drafting, watched, work, wrong
from speculative_cases import COPIES, METHODS

from quire import LLM, SamplingParams
from quire.compute.draft.head_graphs import HeadGraphs
from quire.compute.forward import graphs
from quire.compute.runner.lengths import SlotLengths

pytestmark = pytest.mark.gpu
TAPS = (1, 2, 4)
SIZE: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 400,
}  # fmt: skip
NEARLY: float = 0.02
"""Of guesses: two tokens may be as good as equal, and sums are rounded in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(folder: pathlib.Path) -> head_case.Oracle:
    model = random_checkpoint(folder, "Llama", num_hidden_layers=6, max_position_embeddings=256)
    head_case.write(folder / "head", eagle_aux_hidden_state_layer_ids=list(TAPS))
    return head_case.Oracle(model, folder / "head", TAPS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    return watched(monkeypatch)


def said_with(folder: pathlib.Path, seen: list[Guess], **options: Any) -> list[list[int]]:
    """Tokens; afterwards `seen` has the guesses that were made for them."""
    llm = drafting(folder, **SIZE | options)
    seen.clear()  # what was timed at the start
    said, stats = work(llm), llm.stats()
    llm.shutdown()
    assert stats.n_pages_free == stats.n_pages
    return said


@pytest.mark.parametrize("how", ["captured", "mixed", "eager"])
@pytest.mark.parametrize("n_pages", [400, 15], ids=["pages enough", "few pages"])
def test_a_random_head(
    folder: pathlib.Path,
    oracle: head_case.Oracle,
    seen: list[Guess],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    n_pages: int,
) -> None:
    """mixed: steps that verify drafts are captured as those with prompts are. A step follows where all of its
    sequences have drafts: four leave room for that, and so do few pages."""
    if how == "mixed":
        monkeypatch.setattr(graphs, "AGAIN_BYTES", 0)
    followed: list[object] = []
    real = SlotLengths.follow
    monkeypatch.setattr(SlotLengths, "follow", lambda *given: followed.append(given) or real(*given))
    options = {"enforce_eager": how == "eager", "num_gpu_blocks_override": n_pages}
    options["max_num_seqs"] = 4 if n_pages == 400 else 48
    plain = said_with(folder, seen, **options)
    speculative = {"method": "eagle3", "model": str(folder / "head")}
    assert said_with(folder, seen, speculative_config=speculative, **options) == plain
    assert len(seen) > 60 and wrong(oracle, seen, 250) <= NEARLY
    assert bool(followed) == (how != "eager")


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("case", mtp_case.CASES)
def test_a_random_module(tmp_path: pathlib.Path, seen: list[Guess], case: str, eager: bool) -> None:
    oracle = mtp_case.write(tmp_path, case)
    plain = said_with(tmp_path, seen, enforce_eager=eager)
    assert said_with(tmp_path, seen, enforce_eager=eager, speculative_config={"method": "mtp"}) == plain
    assert len(seen) > 60 and wrong(oracle, seen, 100) <= NEARLY


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_demos_head_is_often_right(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """In bfloat16, on questions as the demo is asked them, by captured chains; as often as on a CPU."""
    chains: list[object] = []
    real = HeadGraphs._fill_known
    monkeypatch.setattr(
        HeadGraphs, "_fill_known", lambda *given, is_late: chains.append(given) or real(*given, is_late=is_late)
    )
    llm = LLM("", speculative_config=METHODS[method], **SIZE)
    llm.engine.scheduler.live.drafts.costs = None
    chains.clear()
    asked = ["what is 53 * 25?", "write a function that finds the smallest number in a list.", "Who is Ada Adams?"]
    llm.chat([[{"role": "user", "content": one}] for one in asked], SamplingParams(temperature=0.0, max_tokens=80))
    stats = llm.stats()
    llm.shutdown()
    assert stats.n_drafts > 10 and stats.accepted_at[0] > 0.5 * stats.n_drafts and len(chains) > 10


@pytest.mark.parametrize(("level", "method"), [(1, "eagle3"), (1, "mtp"), (2, "eagle3")])
def test_a_head_sleeps_and_wakes(level: int, method: str) -> None:
    """Its weights go with the model's; its keys, and the features that it reads, are made again."""
    llm = LLM("", enable_sleep_mode=True, dtype="float32", speculative_config=METHODS[method], **SIZE)
    llm.engine.scheduler.live.drafts.costs = None
    params, said, n_right = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), [], []
    for _ in range(2):
        before = llm.stats().accepted_tokens
        said.append(llm.generate(COPIES, params)[0].outputs[0].token_ids)
        n_right.append(llm.stats().accepted_tokens - before)
        worker: Any = llm.engine.executor.worker
        own = [linear.product.tensors["weight"] for linear in worker._small.head.linears]
        llm.sleep(level)
        assert level == 2 or {one.device.type for one in own} == {"cpu"}
        llm.wake_up()
        assert level == 2 or {one.device.type for one in own} == {"cuda"}
        assert llm.engine.scheduler.live.drafts.costs is None
    llm.shutdown()
    assert said[0] == said[1] and n_right[0] == n_right[1] > 0
