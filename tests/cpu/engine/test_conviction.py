"""A request that ends every engine which runs it, among innocents: it is found and refused before the server gives up,
and nobody else is. Deaths that come from outside convict nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
from collections.abc import AsyncIterator

import pytest
from faulty_engine import CRASH, HANG, KILL, SLOW

from quire.config.engine import EngineConfig
from quire.core.errors import EngineError, EngineLost, RequestQuarantined
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine import supervisor as supervisor_module
from quire.engine.async_llm import AsyncLLM
from quire.engine.supervisor import EngineSupervisor

COMMAND = (str(pathlib.Path(__file__).with_name("faulty_engine.py")),)
SHORT_TRIALS = (*COMMAND, "1", "0.02")
"""Others wait for trials 1 s, and a slow step takes 20 ms; what 20 s are good for is computed in
`tests/null/engine/test_trials.py`."""
PARAMS = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
STREAMED = SamplingParams(seed=1, max_tokens=40, ignore_eos=True, output_kind=OutputKind.DELTA)
LIMIT_S = 240


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_S", 1.0)


class Server:
    """One engine and its API processes, all in this one."""

    def __init__(self, supervisor: EngineSupervisor, llms: list[AsyncLLM]) -> None:
        self.supervisor = supervisor
        self.llms = llms

    def submit(self, number: int, prompt: list[int], params: SamplingParams = PARAMS) -> asyncio.Task[list[int]]:
        """Complete a prompt at one of the API processes."""
        return asyncio.create_task(complete(self.llms[number % len(self.llms)], prompt, params))

    @contextlib.asynccontextmanager
    async def within_limits(self) -> AsyncIterator[None]:
        """For at most `LIMIT_S`, and no longer than engines come: clients alone would wait for one for ever."""
        try:
            async with asyncio.timeout(LIMIT_S) as limit:
                ending = asyncio.create_task(self.supervisor.ended.wait())
                ending.add_done_callback(lambda _: limit.when() is None or limit.reschedule(0))
                try:
                    yield
                finally:
                    limit.reschedule(None)
                    ending.cancel()
        except TimeoutError:
            assert self.supervisor.failure is None, self.supervisor.failure
            raise


@contextlib.asynccontextmanager
async def serving(n: int, command: tuple[str, ...] = COMMAND, **options: object) -> AsyncIterator[Server]:
    config = EngineConfig(device="null", disable_log_stats=True, **options)  # type: ignore[arg-type]
    supervisor = EngineSupervisor(config, command)
    starting = asyncio.create_task(supervisor.start())
    llms = [await AsyncLLM.connect(config, supervisor.address, index) for index in range(n)]
    await starting
    try:
        yield Server(supervisor, llms)
    finally:
        for llm in llms:
            await llm.shutdown()
        await supervisor.shutdown()


async def complete(llm: AsyncLLM, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    ids: list[int] = []
    async for output in llm.generate(prompt, params):
        ids += output.outputs[0].token_ids
    return ids


async def settled(llm: AsyncLLM, limit_s: float = 60) -> None:
    async with asyncio.timeout(limit_s):
        while not llm.healthy():
            await asyncio.sleep(0.05)


def innocent(number: int) -> list[int]:
    return [number % 200, 7, number]


@pytest.mark.parametrize(
    ("fault", "token", "sizes"),
    [
        (CRASH, 0, [(0, 1), (3, 2), (100, 1)]), (CRASH, 3, [(0, 2), (3, 1), (100, 2)]),
        (HANG, 3, [(0, 1), (3, 2), (100, 2)]), (KILL, 3, [(0, 2), (3, 1), (100, 1)]),
    ],
)  # fmt: skip
async def test_the_guilty_is_found(fault: int, token: int, sizes: list[tuple[int, int]]) -> None:
    """At its prompt or at a later token, by a signal or by a hang, and by kills, which may come from outside.
    Each two of fault, number of innocents and number of processes meet; servers of one fault wait side by side."""
    async with asyncio.TaskGroup() as servers:
        for n_innocents, n_processes in sizes:
            servers.create_task(find_the_guilty(fault, token, n_innocents, n_processes))


async def find_the_guilty(fault: int, token: int, n_innocents: int, n_processes: int) -> None:
    async with serving(n_processes, engine_stall_timeout=2.0) as server:
        golden = await asyncio.gather(*[server.submit(i, innocent(i)) for i in range(n_innocents)])
        waiting = [server.submit(i, innocent(i)) for i in range(n_innocents // 2)]
        guilty = server.submit(0, [fault, token])
        waiting += [server.submit(i, innocent(i)) for i in range(n_innocents // 2, n_innocents)]
        async with server.within_limits():
            with pytest.raises(RequestQuarantined, match="times while it ran this request"):
                await guilty
            assert await asyncio.gather(*waiting) == golden
        assert server.supervisor.n_restarts == (3 if fault == KILL else 2)
        assert server.supervisor.failure is None
        for llm in server.llms:  # whichever process the client comes back to
            with pytest.raises(RequestQuarantined):
                await complete(llm, [fault, token])
            assert len(await complete(llm, [3, 7])) == 40


async def test_clients_that_stream_and_try_again() -> None:
    """The guilty has sent output, so it fails each time and comes back as a new request, to another API process;
    so do innocents, and requests arrive all the time. With one process and with three, side by side."""
    await asyncio.gather(stream_and_try_again(1), stream_and_try_again(3))


async def stream_and_try_again(n_processes: int) -> None:
    async with serving(n_processes, engine_stall_timeout=2.0) as server:

        async def insist(number: int, prompt: list[int]) -> list[int]:
            while True:
                number += 1
                try:
                    return await server.submit(number, prompt, STREAMED)
                except EngineLost:
                    await asyncio.sleep(0.05)

        golden = [await server.submit(i, innocent(i), STREAMED) for i in range(20)]
        waiting = [asyncio.create_task(insist(i, innocent(i))) for i in range(10)]
        guilty = asyncio.create_task(insist(0, [HANG, 3]))
        async with server.within_limits():
            for i in range(10, 20):
                await asyncio.sleep(0.5)
                waiting.append(asyncio.create_task(insist(i, innocent(i))))
            with pytest.raises(RequestQuarantined):
                await guilty
            assert await asyncio.gather(*waiting) == golden
        assert server.supervisor.n_restarts <= 3 and server.supervisor.failure is None


async def test_two_that_are_guilty() -> None:
    """Three deaths find both if the first engine computes both. The second is submitted later where this process is
    held up between: then each takes two."""
    async with serving(1, max_engine_restarts=4) as server:
        innocents = [server.submit(i, innocent(i)) for i in range(3)]
        guilty = [server.submit(0, [CRASH, 0]), server.submit(0, [CRASH, 5])]
        innocents += [server.submit(i, innocent(i)) for i in range(3, 6)]
        async with server.within_limits():
            for one in guilty:
                with pytest.raises(RequestQuarantined):
                    await one
            assert [len(ids) for ids in await asyncio.gather(*innocents)] == [40] * 6
        assert server.supervisor.n_restarts in (3, 4)


async def test_kills_from_outside_convict_nobody() -> None:
    """Four of them, during 400 requests: most of them suspects afterwards, and on trial when the next kill comes.
    With one process and with two, side by side."""
    await asyncio.gather(killed_from_outside(1), killed_from_outside(2))


async def killed_from_outside(n_processes: int) -> None:
    async with serving(n_processes, SHORT_TRIALS, max_engine_restarts=10) as server:
        slow = [SLOW, 0]
        waiting = [server.submit(i, [*slow, i], PARAMS) for i in range(400)]
        for number in range(4):
            await settled(server.llms[0])
            while not server.llms[0].stats().generation_tokens:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert server.supervisor.pid is not None
            os.kill(server.supervisor.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while server.supervisor.n_restarts == number:
                    await asyncio.sleep(0.01)
        async with server.within_limits():
            answers = await asyncio.gather(*waiting)
        assert [len(ids) for ids in answers] == [40] * 400
        assert server.supervisor.n_restarts == 4


async def test_requests_that_only_waited_are_no_suspects() -> None:
    async with serving(1, max_num_seqs=4, engine_stall_timeout=2.0) as server:
        waiting = [server.submit(i, [SLOW, 0, i]) for i in range(3)]
        guilty = server.submit(0, [HANG, 2])
        waiting += [server.submit(i, innocent(i)) for i in range(300)]
        known = server.llms[0]._recovery.quarantine._known
        async with server.within_limits():
            while not server.supervisor.n_restarts or not server.llms[0].healthy():
                await asyncio.sleep(0.01)
            assert 1 <= len(known) <= 4
            with pytest.raises(RequestQuarantined):
                await guilty
            assert [len(ids) for ids in await asyncio.gather(*waiting)] == [40] * 303


async def test_an_engine_that_dies_while_it_is_started_again_has_another_try(tmp_path: pathlib.Path) -> None:
    """A failed restart counts as one, and is not the end."""
    script = tmp_path / "unlucky.py"
    script.write_text(f"""
import os, pathlib, signal, sys
count = pathlib.Path({str(tmp_path / "count")!r})
count.write_text(count.read_text() + "x" if count.exists() else "x")
if count.read_text() in ("xx", "xxx"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import faulty_engine
sys.exit(faulty_engine.main(faulty_engine.build))
""")
    llm = await AsyncLLM.create(EngineConfig(device="null", disable_log_stats=True), (str(script),))
    try:
        golden = await complete(llm, [5, 7])
        assert llm._supervisor is not None and llm._supervisor.pid is not None
        answer = asyncio.create_task(complete(llm, [SLOW, 1]))
        await asyncio.sleep(0.3)
        os.kill(llm._supervisor.pid, signal.SIGKILL)
        assert len(await asyncio.wait_for(answer, 60)) == 40
        await settled(llm)
        assert await complete(llm, [5, 7]) == golden and llm._supervisor.n_restarts == 3
        os.kill(llm._supervisor.pid, signal.SIGKILL)
        with contextlib.suppress(EngineError):
            await complete(llm, [5, 7])
        await asyncio.wait_for(llm._supervisor.ended.wait(), 30)
        assert "most allowed" in str(llm.failure())
    finally:
        await llm.shutdown()
