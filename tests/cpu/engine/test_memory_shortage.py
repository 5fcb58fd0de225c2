"""A device that runs out of memory: steps get smaller, nobody notices but the one that does not fit alone."""

from __future__ import annotations

import pytest
from test_faults import VOCAB, FakeLauncher, assert_one_end_each, assert_works, engine, request, run

from quire.control.backoff import GOOD_STEPS, Backoff
from quire.control.slot_params import slot_params
from quire.core.commands import Submit
from quire.core.events import FinishReason
from quire.core.failure import Code
from quire.core.plan import StepPlan
from quire.engine.executors.digests import null_reference
from quire.engine.executors.executor import is_out_of_memory
from quire.engine.executors.inline import LaunchExecutor, ThreadExecutor


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


class SmallLauncher(FakeLauncher):
    """Cannot hold more than so many tokens in a step."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.n_failed = 0

    def launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        if plan.n_tokens > self.most:
            self.n_failed += 1
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().launch(plan)


@pytest.mark.parametrize("make", [LaunchExecutor, ThreadExecutor])
@pytest.mark.parametrize("most", [1, 3, 7, 15])
def test_steps_shrink_until_they_fit_and_every_token_is_right(make, most: int, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("quire.control.backoff.MIN_TOKENS", 1)
    launcher = SmallLauncher(most)
    core = engine(make(launcher))
    requests = [request(name, n=1) for name in ("a", "bb", "ccc", "dddd", "eeeee", "ffffff")]
    for one in requests:
        core.handle(Submit(one))
    heard = run(core)
    assert launcher.n_failed > 0
    assert_one_end_each(heard, [one.request_id for one in requests])
    for one in requests:
        said = [token for delta in heard if delta.request_id == one.request_id for token in delta.token_ids]
        assert said == null_reference(one.prompt_token_ids, slot_params(one, 0), one.max_tokens, VOCAB)
    assert_works(core)
    core.shutdown()


def test_what_does_not_fit_alone_ends_with_an_error_and_the_engine_lives() -> None:
    class Picky(FakeLauncher):
        """Fails whenever the sequence with the long prompt computes."""

        big: set[int] = set()

        def launch(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            for opened in plan.opened:
                (self.big.add if opened.prompt_len > 35 else self.big.discard)(opened.slot)
            if self.big & set(plan.spans.slots):
                raise MemoryError
            return super().launch(plan)

    core = engine(LaunchExecutor(Picky()))
    small = [request("s"), request("t")]
    for one in (small[0], request("toolarge"), small[1]):
        core.handle(Submit(one))
    ends = {delta.request_id: delta for delta in run(core) if delta.finish_reason is not None}
    assert ends["toolarge"].failure is not None and ends["toolarge"].failure.code is Code.DEVICE_OUT_OF_MEMORY
    assert {one: ends[one].finish_reason for one in ("s", "t")} == dict.fromkeys(("s", "t"), FinishReason.LENGTH)
    assert_works(core)


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    assert not is_out_of_memory(RuntimeError("device-side assert triggered")) and not is_out_of_memory(TimeoutError())


def test_the_ration_comes_back() -> None:
    backoff = Backoff(8, 64)
    while backoff.halve():
        assert backoff.n_tokens >= backoff.n_seqs >= 1
    assert (backoff.n_seqs, backoff.n_tokens) == (1, 16)
    for _ in range(10 * GOOD_STEPS):
        backoff.count_step()
    assert (backoff.n_seqs, backoff.n_tokens) == (8, 64)
