"""Trees of drafts between steps that have none: which have some is left to chance, and so is which thread is late."""

from __future__ import annotations

import pathlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import test_draft_trees
import test_drafts
from test_draft_trees import N_DRAFTS, hiding
from test_drafts import run

from quire.compute.forward.fused import ReadyStep
from quire.compute.runner.branching import Branching
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import Runner
from quire.control.draft_policy import DraftPolicy
from quire.control.scheduler import Scheduler
from quire.control.seq import Seq
from quire.core.request import Request

LATE_S = 0.002


@pytest.fixture(scope="module", autouse=True)
def only_plain() -> Iterator[None]:
    """Requests whose steps are native calls, made ready before their turn."""
    real = test_drafts.requests

    def requests() -> list[Request]:
        return [one for one in real() if one.request_id not in ("r2", "r4", "r5")]

    with pytest.MonkeyPatch.context() as patch:
        for module in (test_drafts, test_draft_trees):
            patch.setattr(module, "requests", requests)
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    return run(tmp_path_factory.mktemp("plain"), 1, 0, None)[0]


def late(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, rng: random.Random) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def waits(self: Any, *given: Any, **options: Any) -> Any:
        if rng.random() < 0.3:
            time.sleep(LATE_S * rng.random())
        return real(self, *given, **options)

    monkeypatch.setattr(owner, name, waits)


def disturb(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[str]:
    """Returns what will be: each step made ready, and each tree that was bent."""
    rng, seen = random.Random(seed), list[str]()

    def choose(self: DraftPolicy, seqs: Sequence[Seq], n_rows: int, n_free: int, step: int) -> list[int]:
        lengths = []
        for _ in seqs:
            lengths.append(min(n_free, rng.choice([0, 0, 1, 2, N_DRAFTS])) if step % 5 > 2 else 0)
            n_free -= lengths[-1]
        return lengths

    monkeypatch.setattr(DraftPolicy, "choose", choose)
    for owner, name in [(Runner, "launch"), (ReadyStep, "compute"), (Scheduler, "schedule"), (Scheduler, "commit"),
                        (KVPool, "move"), (Branching, "straighten")]:  # fmt: skip
        late(monkeypatch, owner, name, random.Random(f"{seed} {name}"))
    prepare, move = Runner.prepare, KVPool.move
    monkeypatch.setattr(Runner, "prepare", lambda self, plan: _told(prepare(self, plan), "ready", seen))
    monkeypatch.setattr(KVPool, "move", lambda self, *given: _told(move(self, *given), "bent", seen, True))
    return seen


def _told(found: Any, what: str, seen: list[str], always: bool = False) -> Any:
    if always or found is not None:
        seen.append(what)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_those_of_plain_decoding(
    tmp_path: pathlib.Path, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, depth: int, seed: int
) -> None:
    seen = disturb(monkeypatch, seed)
    drafter = hiding(plain, 0.7)
    assert run(tmp_path, depth, N_DRAFTS, drafter, 60 if seed % 2 else 26)[0] == plain
    assert drafter.n_trees > 5 and "bent" in seen and "ready" in seen


def test_keys_that_move_too_late_are_seen(
    tmp_path: pathlib.Path, plain: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the next step."""
    disturb(monkeypatch, 1)
    move, waiting = KVPool.move, list[Any]()

    def lags(self: KVPool, *given: Any) -> None:
        waiting.append(given)
        if len(waiting) > 1:
            move(self, *waiting.pop(0))

    monkeypatch.setattr(KVPool, "move", lags)
    with pytest.raises(AssertionError):
        assert run(tmp_path, 2, N_DRAFTS, hiding(plain, 0.7))[0] == plain
