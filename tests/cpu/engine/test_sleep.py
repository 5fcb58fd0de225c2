"""Sleep on the demo model: memory is given up at each level, and the same prompt has the same answer afterwards."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any, cast

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineAsleep, InvalidParameter, SleepFailed
from quire.core.events import EngineStats
from quire.core.failure import Code
from quire.engine.sleep import SleepMode

OPTIONS: Any = {"num_threads": 1, "num_gpu_blocks_override": 200, "max_model_len": 512, "enable_sleep_mode": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "def read_file(path):"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    found = LLM(**OPTIONS)
    yield found
    found.shutdown()


def said(llm: LLM) -> str:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_memory_is_given_up_and_taken_again(llm: LLM) -> None:
    before = said(llm)
    for level, is_kept in ((1, True), (2, False), (1, True)):
        worker = llm.engine.executor.worker  # type: ignore[attr-defined]
        pool, model = weakref.ref(worker.runner.pool), weakref.ref(worker.model)
        llm.sleep(level)
        gc.collect()
        assert llm.is_sleeping() and llm.stats().is_asleep
        assert pool() is None and (model() is not None) == is_kept
        llm.wake_up()
        assert not llm.is_sleeping() and said(llm) == before


def test_asleep_requests_are_refused_and_streams_end(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    llm.sleep()
    *_, last = stream
    assert last.outputs[0].finish_reason == "error" and last.outputs[0].failure.code is Code.ENGINE_ASLEEP
    with pytest.raises(EngineAsleep, match="wake"):
        said(llm)
    llm.sleep()
    llm.sleep(2)
    with pytest.raises(EngineAsleep):
        llm.embed("x", use_tqdm=False)
    llm.wake_up()
    llm.wake_up()
    assert said(llm)
    assert not llm.engine.has_work()


def test_what_cannot_be_asked_for(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="level"):
        llm.sleep(3)
    with pytest.raises(InvalidParameter, match="mode"):
        llm.sleep(1, mode="keep")
    with pytest.raises(InvalidParameter, match="tags"):
        llm.wake_up(["weights"])
    assert not llm.is_sleeping()
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        LLM.sleep(type("Off", (), {"config": EngineConfig()})())  # type: ignore[arg-type]


class Sleeper:
    """A worker that wakes up when there is no shortage."""

    def __init__(self, shortage: list[Exception]) -> None:
        self.shortage, self.is_loaded, self.level = shortage, True, 0

    def sleep(self, level: int) -> None:
        self.is_loaded &= level == 1
        self.level = level

    def wake(self) -> None:
        self.is_loaded, self.level = True, 0
        if self.shortage:
            raise self.shortage.pop()


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_cannot_wake_sleeps_on(level: int) -> None:
    worker = Sleeper([MemoryError("no memory"), RuntimeError("CUDA out of memory\nmore")])
    sleep_mode: SleepMode[Sleeper] = SleepMode(worker, lambda _: cast(Any, "executor"))
    sleep_mode.sleep(level)
    for reason in ("CUDA out of memory", "no memory"):
        with pytest.raises(SleepFailed, match=reason):
            sleep_mode.wake_up()
        assert sleep_mode.is_asleep
        assert worker.level == level and worker.is_loaded == (level == 1)
    assert sleep_mode.wake_up() == "executor" and not sleep_mode.is_asleep  # type: ignore[comparison-overlap]
    assert worker.level == 0


def test_an_engine_process_sleeps_and_wakes() -> None:
    async def run() -> None:
        llm = await AsyncLLM.create(EngineConfig(**OPTIONS))
        try:
            texts = []
            for level in (1, 2):
                async for output in llm.generate(PROMPT, GREEDY):
                    last = output
                texts.append(last.outputs[0].text)
                assert await llm.reset_prefix_cache()
                await llm.sleep(level)
                assert await llm.is_sleeping() and llm.healthy()
                with pytest.raises(EngineAsleep):
                    await llm.submit(PROMPT, GREEDY)
                llm._stats = EngineStats()  # another client may not know yet
                async for output in llm.generate(PROMPT, GREEDY):
                    assert output.outputs[0].finish_reason == "error"
                await llm.wake_up()
                assert not await llm.is_sleeping()
            assert texts[0] == texts[1]
        finally:
            await llm.shutdown()

    asyncio.run(run())
