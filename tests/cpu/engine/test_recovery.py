"""An engine that dies or hangs: what runs again, what fails, who is blamed, and that the next one serves the same."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import time
from collections.abc import AsyncIterator

import pytest
from faulty_engine import CRASH, HANG, KILL, SLOW

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineDead, EngineLost, RequestQuarantined
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.async_llm import AsyncLLM

COMMAND = (str(pathlib.Path(__file__).with_name("faulty_engine.py")),)
PARAMS = SamplingParams(seed=1, max_tokens=8, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
STREAMED = SamplingParams(seed=1, max_tokens=100, ignore_eos=True, output_kind=OutputKind.DELTA)


@contextlib.asynccontextmanager
async def engine(**options: object) -> AsyncIterator[AsyncLLM]:
    config = EngineConfig(device="null", disable_log_stats=True, **options)  # type: ignore[arg-type]
    llm = await AsyncLLM.create(config, COMMAND)
    try:
        yield llm
    finally:
        await llm.shutdown()


async def complete(llm: AsyncLLM, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    ids: list[int] = []
    async for output in llm.generate(prompt, params):
        ids += output.outputs[0].token_ids
        assert output.outputs[0].finish_reason in (None, "length")
    return ids


async def healthy(llm: AsyncLLM, limit_s: float = 30) -> None:
    end_s = time.monotonic() + limit_s
    while not llm.healthy():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


async def test_the_guilty_is_found_and_the_others_run_again() -> None:
    """Six requests beside one that kills: the engine dies, dies of the trial of that one, and lives on without it."""
    async with engine() as llm:
        alone = {i: await complete(llm, [i, 7]) for i in range(6)}
        streamed = await llm.submit([SLOW, 1], STREAMED)
        await anext(streamed)  # its reader has seen output: it cannot run again
        waiting = [asyncio.create_task(complete(llm, [i, 7])) for i in range(6)]
        killer = asyncio.create_task(complete(llm, [CRASH, 0]))
        waiting += [asyncio.create_task(complete(llm, [i, 7])) for i in range(6)]
        with pytest.raises(EngineLost, match="send the request again"):
            async for _ in streamed:
                pass
        with pytest.raises(RequestQuarantined, match="died 2 times"):
            await asyncio.wait_for(killer, 60)
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 30)
        assert answers == [alone[i % 6] for i in range(12)]
        with pytest.raises(RequestQuarantined):
            await complete(llm, [CRASH, 0])
        assert llm.n_engines_lost == 2 and llm.healthy() and await complete(llm, [3, 7]) == alone[3]


async def test_m16_loading_that_stands_still_is_ended_with_a_message(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that does not answer, as of a server of files that is gone: here a FIFO that nobody writes to."""
    os.mkfifo(tmp_path / "weights")
    script = tmp_path / "stalled.py"
    script.write_text(f"""
import sys
from quire.engine.stdio import show_stacks_on_signal
show_stacks_on_signal()  # as the engine's own process does first of all
sys.stdin.readline()
def read_weights():
    return open({str(tmp_path / "weights")!r}, "rb").read()
read_weights()
""")
    config = EngineConfig(device="null", disable_log_stats=True, load_timeout=1.0)
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"not loaded within load_timeout = 1 s.*file system"):
        await AsyncLLM.create(config, (str(script),))
    assert time.monotonic() - began_s < 30
    assert "in read_weights" in capfd.readouterr().err


async def test_restarts_are_bounded() -> None:
    async with engine(max_engine_restarts=1) as llm:
        with pytest.raises((EngineDead, RequestQuarantined)):
            await complete(llm, [KILL, 0])
        with pytest.raises(EngineDead, match="SIGKILL"):
            await complete(llm, [1, 1])
        assert llm.failure() is not None and not llm.healthy()


async def test_requests_are_refused_while_there_is_no_engine() -> None:
    async with engine() as llm:
        golden = await complete(llm, [5, 6])
        os.kill(llm._supervisor.pid, signal.SIGKILL)
        began_s = time.monotonic()
        while llm.healthy():
            assert time.monotonic() - began_s < 30
            await asyncio.sleep(0.01)
        with pytest.raises(EngineLost):
            await complete(llm, [5, 6])
        await healthy(llm)
        assert await complete(llm, [5, 6]) == golden


async def test_a_hung_engine_shows_its_stacks_and_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    async with engine(engine_stall_timeout=1.0) as llm:
        golden = await complete(llm, [5, 6])
        hung = asyncio.create_task(complete(llm, [HANG, 0], STREAMED))
        while llm.healthy():
            await asyncio.sleep(0.05)
        hung.cancel()  # the client leaves; the stacks are shown and the engine is ended all the same
        await healthy(llm)
        assert await complete(llm, [5, 6]) == golden
    log = capfd.readouterr().err
    assert "faulty_engine.py" in log and "submit" in log, "the stack of the hung step is in the log"


async def test_a_stopped_engine_is_left_alone() -> None:
    async with engine(engine_stall_timeout=0.5) as llm:
        pid = llm._supervisor.pid
        answer = asyncio.create_task(complete(llm, [SLOW, 2], STREAMED))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(4.0)
        assert not llm.healthy(), "nothing comes from it"
        os.kill(pid, signal.SIGCONT)
        await healthy(llm)
        assert len(await asyncio.wait_for(answer, 60)) == 100 and llm._supervisor.pid == pid
