"""The engine in its own process: streams, cancellation, death, refusal, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.config.engine import EngineConfig
from quire.core.commands import Command
from quire.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    LoadError,
    QueueFull,
    RequestError,
)
from quire.core.events import SeqDelta
from quire.core.failure import Code
from quire.core.outputs import RequestOutput
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM

DELTA = OutputKind.DELTA


@contextlib.asynccontextmanager
async def engine(folder: pathlib.Path, **options: object) -> AsyncIterator[AsyncLLM]:
    defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 129, "device": "cpu"}
    llm = await AsyncLLM.create(EngineConfig(model=str(folder), **{**defaults, **options}))  # type: ignore[arg-type]
    try:
        yield llm
    finally:
        await llm.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(checkpoint: pathlib.Path) -> AsyncIterator[AsyncLLM]:
    """One engine for the tests that leave it as it was; each ends with `settled`."""
    async with engine(checkpoint) as llm:
        yield llm


SHARED = pytest.mark.asyncio(loop_scope="module")


async def settled(llm: AsyncLLM, limit_s: float = 60.0) -> None:
    """Wait until nothing runs and every page is free again."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        stats = llm.stats()
        if stats.n_running == stats.n_waiting == 0 and stats.n_pages_free == stats.n_pages > 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not settled: {llm.stats()}")


@SHARED
async def test_streams_equal_the_offline_engine(served: AsyncLLM, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=DELTA)
    expected = llm.generate(
        ["def add", "The quick"], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )

    async def collect(prompt: str) -> tuple[str, list[int], str | None]:
        text, ids, reason = "", [], None
        async for output in served.generate(prompt, params):
            text += output.outputs[0].text
            ids += output.outputs[0].token_ids
            reason = output.outputs[0].finish_reason
        return text, ids, reason

    for (text, ids, reason), one in zip(
        await asyncio.gather(collect("def add"), collect("The quick")), expected, strict=True
    ):
        assert (text, ids, reason) == (one.outputs[0].text, one.outputs[0].token_ids, "length")
    await settled(served)


@SHARED
async def test_cancelled_requests_leave_nothing_and_disturb_nobody(served: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=100, ignore_eos=True, output_kind=DELTA)

    async def run(prompt: list[int], stop_after: int | None) -> list[int]:
        ids: list[int] = []
        stream = await served.submit(prompt, params)
        async for output in stream:
            ids += output.outputs[0].token_ids
            if stop_after is not None and len(ids) >= stop_after:
                await stream.aclose()
                await stream.aclose()
                break
        return ids

    quiet = await run([5, 6, 7, 8], None)
    results = await asyncio.gather(*(run([5, 6, 7, 8], None if i % 3 == 0 else i % 7) for i in range(30)))
    assert all(ids == quiet for i, ids in enumerate(results) if i % 3 == 0)
    await settled(served)


async def test_refusals_come_before_anything_starts(checkpoint: pathlib.Path) -> None:
    async with engine(checkpoint, max_num_waiting=2, max_num_seqs=2) as served:
        with pytest.raises(ContextLengthExceeded):
            await served.submit([1] * 511, SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match="request_id"):
            await served.submit([1], SamplingParams(), request_id="")
        slow = SamplingParams(max_tokens=400, ignore_eos=True)
        os.kill(served._supervisor.pid, signal.SIGSTOP)  # none ends before the last is refused
        streams = [await served.submit([1, 2], slow) for _ in range(2)]
        streams.append(await served.submit([1, 2], SamplingParams(n=2, max_tokens=400, ignore_eos=True)))
        with pytest.raises(QueueFull, match="4 sequences are open"):
            await served.submit([1, 2], slow)
        os.kill(served._supervisor.pid, signal.SIGCONT)
        for stream in streams:
            await stream.aclose()
        await settled(served)


async def test_the_engines_own_refusal_is_queue_full(checkpoint: pathlib.Path) -> None:
    """Which come with others together: three more are one too many. Five fit never, and are told so."""
    async with engine(checkpoint, max_num_waiting=2, max_num_seqs=2) as served:
        os.kill(served._supervisor.pid, signal.SIGSTOP)  # none ends before the others come
        first = await served.submit([1, 2], SamplingParams(n=2, max_tokens=400, ignore_eos=True))
        stream = await served.submit([1, 2], SamplingParams(n=3, max_tokens=4))
        os.kill(served._supervisor.pid, signal.SIGCONT)
        with pytest.raises(QueueFull, match="try again later"):
            await asyncio.wait_for(anext(stream), 60)
        await first.aclose()
        await settled(served)
        never = await served.submit([1, 2], SamplingParams(n=5, max_tokens=4))
        with pytest.raises(RequestError, match=r"^n = 5 .*at most 4"):
            await asyncio.wait_for(anext(never), 60)
        assert [o.finished async for o in served.generate([1, 2], SamplingParams(n=2, max_tokens=4))][-1]


@SHARED
async def test_ids_are_the_callers_and_abort_takes_them(served: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=DELTA)
    stream = await served.submit([1, 2, 3], params, request_id="mine")
    assert (await anext(stream)).request_id == "mine"
    with pytest.raises(RequestError) as caught:
        await served.submit([1, 2, 3], params, request_id="mine")
    assert caught.value.code == "duplicate_request_id"
    await served.abort("min")
    await served.abort("mine-0")
    assert (await anext(stream)).outputs[0].finish_reason is None
    reading = asyncio.create_task(_collect(stream))
    await served.abort("mine")
    await served.abort("mine")
    last = (await asyncio.wait_for(reading, 60))[-1]
    assert last.finished and last.outputs[0].finish_reason == "abort"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    again = served.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True), "mine")
    assert [o.request_id async for o in again][-1] == "mine"
    await settled(served)


async def _collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


@SHARED
async def test_text_that_cannot_be_made_ends_one_request_alone(served: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, output_kind=DELTA)

    def broken(token_ids: list[int], finished: bool) -> tuple[str, str | None]:
        raise ValueError("no text today")

    good, bad = [await served.submit([5, 6, 7], params) for _ in range(2)]
    bad.opened._texts[0].feed = broken  # type: ignore[method-assign, assignment]
    of_good, of_bad = await asyncio.wait_for(asyncio.gather(_collect(good), _collect(bad)), 60)
    assert of_bad[-1].outputs[0].finish_reason == "error"
    assert of_bad[-1].outputs[0].failure.code is Code.OUTPUT_FAILED
    assert "today" not in str(of_bad[-1].outputs[0].failure)
    assert sum(len(o.outputs[0].token_ids) for o in of_good) == 60
    assert served.healthy() and served.failure() is None
    await settled(served)


async def test_a_reader_that_fails_fails_every_stream(checkpoint: pathlib.Path) -> None:
    async with engine(checkpoint) as served:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        streams = [await served.submit([1, 2], params) for _ in range(2)]

        def explode(delta: SeqDelta) -> Command | None:
            raise ValueError("not a delta")

        streams[0].take = explode  # type: ignore[method-assign]
        for stream in streams:
            with pytest.raises(EngineDead, match="could not be read"):
                await asyncio.wait_for(_collect(stream), 60)
        assert served.failure() is not None and not served.healthy()
        with pytest.raises(EngineDead):
            await served.submit([1], SamplingParams())


async def test_requests_without_a_seed_follow_the_engines(checkpoint: pathlib.Path) -> None:
    async def texts(seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
        async with engine(checkpoint, seed=seed) as served:
            streams = [await served.submit([1, 2, 3], params) for _ in range(3)]
            return [(await _collect(stream))[-1].outputs[0].token_ids for stream in streams]

    first, second, other = await texts(1), await texts(1), await texts(2)
    assert first == second != other
    assert len(set(map(tuple, first))) == 3, "each request has its own seed"


@SHARED
async def test_stop_string_ends_the_sequence_in_the_engine(served: AsyncLLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    whole = [o async for o in served.generate("def add", free)][-1].outputs[0].text
    cut = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, stop=[whole[5:8]])
    last = [o async for o in served.generate("def add", cut)][-1]
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].text == whole[: whole.index(whole[5:8])]
    await settled(served)


async def test_a_killed_engine_fails_open_requests_soon(checkpoint: pathlib.Path) -> None:
    async with engine(checkpoint, max_engine_restarts=0) as served:
        os.kill(served._supervisor.pid, signal.SIGSTOP)  # lest it has answered before it is killed
        stream = await served.submit([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
        os.kill(served._supervisor.pid, signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(EngineDead, match="SIGKILL, which the system sends when memory runs out, and people"):
            async for _ in stream:
                pass
        assert time.monotonic() - start_s < 20
        assert not served.healthy()
        with pytest.raises(EngineDead):
            await served.submit([1], SamplingParams())


async def test_a_bad_checkpoint_is_refused_with_its_reason(tmp_path: pathlib.Path) -> None:
    with pytest.raises((ConfigError, LoadError), match=r"config\.json"):
        await AsyncLLM.create(EngineConfig(model=str(tmp_path)))
