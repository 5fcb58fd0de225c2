"""Random traffic over the CPU engine with poisoned memory: no wrong token, nothing leaked; and a judge that can see."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import transformers
from traffic import soak as soak_module
from traffic.arrivals import ODD
from traffic.checkpoint import SMALL, write_checkpoint
from traffic.soak import CPU, Soak

from quire.compute.runner import runner
from quire.compute.runner.batch_builder import FlatBatch, build_batch
from quire.compute.runner.pool import KVPool
from quire.compute.sample import sampler, slots
from quire.compute.worker import Worker
from quire.control.pages import PagePool
from quire.control.scheduler import Scheduler

Checkpoint = tuple[pathlib.Path, transformers.PreTrainedModel]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("traffic")
    return folder, write_checkpoint(folder, "Llama", SMALL)


def test_no_wrong_token_and_nothing_leaked(llama: Checkpoint) -> None:
    found = Soak(*llama, seed=0, **CPU).run(n_steps=700)
    assert not found.faults
    assert found.preemptions > 10 and found.cancels > 10 and found.doomed > 0 and found.prefix_hits > 5000
    assert found.verdicts.n_tokens == found.tokens > 5000 and found.verdicts.n_logprobs > 500
    assert found.verdicts.n_best > 0.999 * found.tokens and found.verdicts.n_pages > 50


def test_every_odd_parameter_is_refused(llama: Checkpoint) -> None:
    """A long run may meet any of them, a short one meets few."""
    soak = Soak(*llama, seed=0, **CPU)
    assert all(soak.arrivals.refuse(params).code for params in ODD)


@pytest.mark.parametrize(
    ("family", "dtype"), [("Mistral", torch.bfloat16), ("Qwen2", torch.float32), ("Qwen3", torch.float32)]
)
def test_other_models_and_settings(tmp_path: pathlib.Path, family: str, dtype: torch.dtype) -> None:
    model = write_checkpoint(tmp_path, family, SMALL, dtype)
    odd = {"block_size": 4, "num_gpu_blocks_override": 300, "pipeline_depth": 3, "scheduling_policy": "priority"}
    found = Soak(tmp_path, model, seed=1, **{**CPU, **odd}).run(n_steps=150, n_idle=1)
    assert not found.faults
    assert found.verdicts.n_best > 0.9 * found.tokens > 300


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_with_drafts(llama: Checkpoint, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is room for, among prompts in parts, preemption, cancels and forks."""
    monkeypatch.setattr(Worker, "draft_costs", lambda self: None)
    soak = Soak(*llama, seed=2, **CPU | {"speculative_config": {"method": method, "num_speculative_tokens": 5}})
    found = soak.run(n_steps=250)
    assert not found.faults
    drafts = soak.core.scheduler.live.drafts
    assert drafts.n_verified > 500 and sum(drafts.n_right) > 20 and found.cancels > 0 and found.preemptions > 0


def nothing(*_: Any, **__: Any) -> None: ...


def one_key_too_many(spans: Any, masked: Any) -> FlatBatch:
    batch = build_batch(spans, masked)
    batch.kv_lens += 1
    return batch


def all_but_one(drop: Callable[..., None]) -> Callable[..., None]:
    lost: list[int] = []

    def forgetful(pool: PagePool, pages: Iterable[int]) -> None:
        pages = list(pages)
        if not lost:
            lost.append(pages.pop())
        drop(pool, pages)

    return forgetful


BUGS: dict[str, tuple[object, str, Callable[[Any], Any], str]] = {
    "copy on write does nothing": (KVPool, "copy", lambda _: nothing, "wrong|error"),
    "attention reads a key too many": (runner, "build_batch", lambda _: one_key_too_many, "non_finite_logits"),
    "penalties do nothing": (sampler, "penalise", lambda _: nothing, "wrong token"),
    "seeds are ignored": (slots, "seed_key", lambda seed_key: lambda seed: seed_key(0 * seed), "wrong token"),
    "cancel does nothing": (Scheduler, "cancel", lambda _: nothing, "after its end"),
    "a page is not given back": (PagePool, "drop", all_but_one, "owner|engine_error"),
}
"""What is broken, how, and what the report must say."""


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_seen(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    place, attribute, broken, report = BUGS[name]
    soak = Soak(*llama, seed=0, **CPU)
    monkeypatch.setattr(soak_module, "MAX_KEPT_FAULTS", 1)
    monkeypatch.setattr(place, attribute, broken(getattr(place, attribute)))
    found = soak.run(n_steps=250, n_idle=0)
    assert any(word in fault for fault in found.faults for word in report.split("|")), found.faults[:3]


@pytest.mark.parametrize("value", [float("nan"), 0.3])
def test_a_page_with_other_contents_is_seen(llama: Checkpoint, value: float) -> None:
    soak = Soak(*llama, seed=0, **CPU)
    for _ in range(100):
        soak._arrive()
        soak.turn()
    soak.poison.write(soak.core.scheduler.live.running[0].tables[0][0], value)
    assert soak.run(n_steps=50, n_idle=0).faults
