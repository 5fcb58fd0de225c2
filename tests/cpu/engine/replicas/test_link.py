"""Several engines behind one `AsyncLLM`: what is lost with a replica, what runs again, and what is added up."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from replicas.local_fleet import LocalFleet, ToyReplica, serving

from quire.core.adapters import AdapterFacts, LoRARequest
from quire.core.commands import LoadAdapter, UnloadAdapter
from quire.core.errors import EngineError, EngineLost, QueueFull, RequestError, RequestQuarantined
from quire.core.events import Done, Event, FinishReason, PrefixUpdate, SeqDelta, StepOutputs
from quire.core.request import Request
from quire.core.routing import ReplicaRouting
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.replicas.channel import Outbox
from quire.engine.replicas.link import ReplicaLink
from quire.engine.replicas.replica import EngineReplica
from quire.engine.wire import decode_commands

WHOLE = SamplingParams(seed=1, max_tokens=300, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
LONG = SamplingParams(seed=1, max_tokens=900, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
SHORT = SamplingParams(seed=1, max_tokens=8, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
STREAMED = SamplingParams(seed=1, max_tokens=300, ignore_eos=True, output_kind=OutputKind.DELTA)


async def complete(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
    ids: list[int] = []
    async for output in llm.generate(prompt, params):
        for one in output.outputs:
            ids += one.token_ids
    return ids


async def busy(fleet: LocalFleet, n: int) -> None:
    """Until the replicas were given `n` requests, and some time later."""
    async with asyncio.timeout(20):
        while sum(fleet.n_runs.values()) < n:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)


async def until(is_so: object, limit_s: float = 20) -> None:
    async with asyncio.timeout(limit_s):
        while not is_so():  # type: ignore[operator]
            await asyncio.sleep(0.02)


async def test_requests_are_spread_and_figures_add_up() -> None:
    async with serving(2, max_num_seqs=8) as (llm, fleet, _):
        await until(lambda: llm.ready.max_num_seqs == 16)
        found = await asyncio.gather(*(complete(llm, [100 + number, 5, 6], SHORT) for number in range(8)))
        assert [len(ids) for ids in found] == [8] * 8
        assert sorted(fleet.n_runs.values()) == [4, 4]
        await until(lambda: llm.stats().generation_tokens == 64)
        assert llm.stats().finished["length"] == 8
        assert llm.healthy() and llm.n_open == 0


async def test_who_has_sent_nothing_runs_again_and_the_others_are_told() -> None:
    async with serving(2, max_num_seqs=64) as (llm, fleet, chooser):
        whole = [asyncio.create_task(complete(llm, [100 + number], WHOLE)) for number in range(10)]
        streams = [asyncio.create_task(complete(llm, [200 + number], STREAMED)) for number in range(10)]
        await busy(fleet, 20)
        await fleet.kill("r0")
        ends = await asyncio.gather(*whole, *streams, return_exceptions=True)
        assert [len(end) for end in ends[:10]] == [300] * 10  # type: ignore[arg-type]
        lost = [end for end in ends[10:] if isinstance(end, Exception)]
        assert len(lost) == 5 and {type(end) for end in lost} == {EngineLost}
        assert sum(fleet.n_runs.values()) == 25
        assert llm.n_engines_lost == 1
        assert llm.n_open == 0 and chooser.n_open("r1") == 0
        await until(lambda: llm.ready.max_num_seqs == 64)
        assert len(await complete(llm, [1], SHORT)) == 8


@pytest.mark.parametrize("kind", [ToyReplica, EngineReplica])
async def test_every_lost_replica_is_counted_and_none_that_leaves(kind: type[EngineReplica] | type[ToyReplica]) -> None:
    """Also one that has nothing to do: nobody's request tells of it."""
    async with serving(3, kind, max_num_seqs=8) as (llm, fleet, chooser):
        await until(lambda: llm.ready.max_num_seqs == 24 and "r1" in chooser.was_routable)
        await fleet.kill("r0")
        await until(lambda: llm.ready.max_num_seqs == 16)
        assert llm.n_engines_lost == 1
        await fleet.retire("r1")
        await until(lambda: llm.ready.max_num_seqs == 8)
        assert llm.n_engines_lost == 1
        await fleet.add("r3")
        await until(lambda: llm.ready.max_num_seqs == 16)
        await fleet.kill("r2")
        await until(lambda: llm.ready.max_num_seqs == 8)
        assert llm.n_engines_lost == 2


async def test_a_request_waits_for_the_next_replica_when_all_are_gone() -> None:
    async with serving(1) as (llm, fleet, _):
        task = asyncio.create_task(complete(llm, [1], WHOLE))
        await busy(fleet, 1)
        await fleet.kill("r0")
        await asyncio.sleep(0.2)
        assert not task.done() and not llm.healthy()
        later = asyncio.create_task(complete(llm, [2], SHORT))
        await fleet.add("r1")
        assert (len(await task), len(await later)) == (300, 8)
        await until(llm.healthy)


async def test_a_request_of_which_replicas_die_is_not_run_for_ever() -> None:
    async with serving(3, max_num_seqs=64) as (llm, fleet, chooser):
        task = asyncio.create_task(complete(llm, [1], WHOLE))
        for n in range(1, 4):
            await busy(fleet, n)
            (name,) = (name for name in fleet.replicas if chooser.n_open(name))
            await fleet.kill(name)
        with pytest.raises(RequestQuarantined, match="3 replicas"):
            await task


async def test_an_engine_that_dies_inside_a_replica_is_passed_by_until_it_is_back() -> None:
    async with serving(2, EngineReplica, max_num_seqs=64) as (llm, fleet, _):
        replica = fleet.replicas["r0"]
        assert isinstance(replica, EngineReplica)
        pid = replica._supervisor.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # or its requests may have ended before it is killed
        whole = [asyncio.create_task(complete(llm, [100 + number], LONG)) for number in range(8)]
        await busy(fleet, 8)
        os.kill(pid, signal.SIGKILL)
        assert [len(ids) for ids in await asyncio.gather(*whole)] == [900] * 8
        assert fleet.n_runs == {"r0": 4, "r1": 8}
        await until(lambda: llm.n_engines_lost == 1)
        await asyncio.gather(*(complete(llm, [200 + number], SHORT) for number in range(4)))
        assert fleet.n_runs["r0"] > 4


async def test_a_replica_that_says_nothing_gets_no_requests_until_it_speaks_again() -> None:
    async with serving(2, max_num_seqs=64) as (llm, fleet, chooser):
        replica = fleet.replicas["r0"]
        assert isinstance(replica, ToyReplica)
        report = replica._tasks.pop()
        report.cancel()
        await until(lambda: chooser.silent == {"r0"})
        await asyncio.gather(*(complete(llm, [100 + number], SHORT) for number in range(8)))
        assert fleet.n_runs == {"r0": 0, "r1": 8}
        assert llm.healthy()
        replica._tasks.append(asyncio.create_task(replica._report()))
        await until(lambda: not chooser.silent)
        await asyncio.gather(*(complete(llm, [200 + number], SHORT) for number in range(8)))
        assert fleet.n_runs["r0"] > 0


class Stopped(ToyReplica):
    """Its process was stopped, once it has got requests: it says nothing, and ends nothing."""

    async def run(self, message: bytes) -> None:
        if self is self.stopped:
            for task in self._tasks:
                task.cancel()
            await asyncio.Event().wait()
        await super().run(message)

    stopped: ToyReplica | None = None


async def test_what_a_replica_had_that_was_stopped_and_replaced_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.replicas.link.SILENT_S", 0.5)
    async with serving(2, Stopped, max_num_seqs=64) as (llm, fleet, chooser):
        monkeypatch.setattr(Stopped, "stopped", fleet.replicas["r0"])
        whole = [asyncio.create_task(complete(llm, [100 + number], SHORT)) for number in range(8)]
        await busy(fleet, 8)
        replica = fleet.replicas.pop("r0")
        fleet._tell()  # Ray gives it no more, and cannot end it
        assert [len(ids) for ids in await asyncio.gather(*whole)] == [8] * 8
        assert fleet.n_runs == {"r0": 4, "r1": 8} and chooser.n_open("r1") == 0
        await until(lambda: not fleet._runs["r0"])
        await replica.stop()


class Hesitant(ToyReplica):
    """It says nothing for a while, and goes on."""

    async def run(self, message: bytes) -> None:
        if self is self.hesitant:
            self._tasks.pop().cancel()
            await asyncio.sleep(3)
            self._tasks.append(asyncio.create_task(self._report()))
        await super().run(message)

    hesitant: ToyReplica | None = None


async def test_a_replica_that_leaves_and_speaks_again_ends_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.replicas.link.SILENT_S", 1.5)
    async with serving(2, Hesitant, max_num_seqs=64) as (llm, fleet, _):
        monkeypatch.setattr(Hesitant, "hesitant", fleet.replicas["r0"])
        longs = [asyncio.create_task(complete(llm, [100 + number], LONG)) for number in range(2)]
        await busy(fleet, 2)
        await fleet.retire("r0")
        assert [len(ids) for ids in await asyncio.gather(*longs)] == [900] * 2
        assert fleet.n_runs == {"r0": 1, "r1": 1}


async def test_cancelling_reaches_the_replica() -> None:
    async with serving(2) as (llm, _, chooser):
        tasks = [asyncio.create_task(complete(llm, [number], STREAMED)) for number in range(1, 9)]
        await until(lambda: llm.stats().n_running == 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: llm.stats().n_running == 0)
        assert llm.stats().finished["length"] == 0
        assert chooser.n_open("r0") == chooser.n_open("r1") == 0


async def test_a_sequence_that_is_cancelled_leaves_its_brothers() -> None:
    async with serving(1) as (llm, _, _):
        params = SamplingParams(n=3, seed=1, max_tokens=50, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
        assert len(await complete(llm, [1, 2], params)) == 150


async def test_the_same_request_gives_the_same_tokens_on_any_replica() -> None:
    async with serving(2) as (llm, fleet, _):
        found = [await complete(llm, [1, 2, 3], SHORT) for _ in range(4)]
        assert all(ids == found[0] for ids in found)
        assert sorted(fleet.n_runs.values()) == [2, 2]


async def test_orders_go_to_all() -> None:
    async with serving(2) as (llm, _, _):
        await until(lambda: llm.ready.max_num_seqs == 128)
        assert await llm.reset_prefix_cache()


@pytest.mark.parametrize("end", ["gone", "gap", "new engine"])
async def test_an_order_does_not_wait_for_a_replica_that_was_lost(end: str) -> None:
    """Of two replicas the first one hears the order and never answers."""
    async with serving(2) as (llm, fleet, _):
        await until(lambda: llm.ready.max_num_seqs == 128)
        silent, link = fleet.replicas["r0"], llm._client
        assert isinstance(silent, ToyReplica) and isinstance(link, ReplicaLink)
        silent._tasks[0].cancel()  # it listens no more
        order = asyncio.create_task(llm.reset_prefix_cache())
        await until(lambda: any(question.left == {"r0"} for question in link._questions._asked.values()))
        if end == "gone":
            await until(lambda: "r0" in link._chooser.was_routable)
            await fleet.kill("r0")
        elif end == "gap":
            silent._outbox._number += 1
        else:
            silent._outbox.send(silent._ready)
        with pytest.raises(EngineError, match="replica r0 was lost before it answered"):
            await asyncio.wait_for(order, 10)
        assert not link._questions._asked


async def test_real_engines_answer_count_cancel_and_explain() -> None:
    async with serving(1, EngineReplica, max_num_seqs=8) as (llm, _, chooser):
        params = SamplingParams(n=3, seed=1, max_tokens=50, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
        stream = await llm.submit([1] * 40, params, request_id="chat-0")
        (output,) = [output async for output in stream]
        assert [len(one.token_ids) for one in output.outputs] == [50] * 3
        assert len(await llm.explain("chat")) == 1
        assert await llm.reset_prefix_cache()
        await until(lambda: llm.stats().generation_tokens == 150)
        tasks = [asyncio.create_task(complete(llm, [number], LONG)) for number in range(1, 61)]
        await until(lambda: llm.stats().n_running == 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: llm.stats().n_running == llm.stats().n_waiting == 0)
        await until(lambda: llm.stats().finished["abort"] > 0)
        assert chooser.n_open("r0") == 0


async def test_real_engines_say_what_they_hold_also_after_a_gap() -> None:
    async with serving(1, EngineReplica, max_num_seqs=8) as (llm, fleet, chooser):

        def facts() -> ReplicaRouting:
            return chooser.stats().replicas[0]

        await until(lambda: facts().is_known)
        ids = await complete(llm, [1] * 40, SHORT)
        await until(lambda: facts().prefix_pages == 2 and not facts().coming_pages)
        await complete(llm, [1] * 40 + ids + [2] * 20, SHORT)
        await until(lambda: facts().prefix_pages == 4)
        assert (chooser.stats().expected_tokens, chooser.stats().missed_tokens) == (32, 0)
        assert await llm.reset_prefix_cache()
        await until(lambda: facts().prefix_pages == 0)
        n_pictures = chooser.stats().pictures
        outbox, dropped = fleet.replicas["r0"]._outbox, list[Event]()
        send = outbox.send
        outbox.send = lambda event: (  # type: ignore[method-assign]
            send(event) if dropped or not isinstance(event, PrefixUpdate) or not event.added else dropped.append(event)
        )
        await complete(llm, [3] * 40, SHORT)
        await until(lambda: chooser.stats().gaps == 1)
        await until(lambda: facts().prefix_pages == 2)
        assert chooser.stats().pictures > n_pictures and facts().is_known
        await until(lambda: llm.stats().routing == chooser.stats())


async def test_the_queue_grows_with_the_replicas() -> None:
    async with serving(1, max_num_seqs=1, max_num_waiting=1) as (llm, fleet, _):
        await fleet.add("r1")
        await until(lambda: llm.ready.max_num_seqs == 2)
        tasks = [asyncio.create_task(complete(llm, [number + 1], WHOLE)) for number in range(3)]
        await busy(fleet, 2)
        with pytest.raises(QueueFull):
            await llm.submit([9], SHORT)
        await asyncio.gather(*tasks)


async def test_a_replica_comes_with_the_load_and_goes_with_it_and_no_request_notices() -> None:
    """As Ray Serve scales them: `benchmarks/replica_scaling.py` has it do so."""
    async with serving(1, max_num_seqs=8) as (llm, fleet, chooser):
        expected = await complete(llm, [7], WHOLE)
        await fleet.add("r1")
        await until(lambda: llm.ready.max_num_seqs == 16)
        tasks = [asyncio.create_task(complete(llm, [7], WHOLE)) for _ in range(8)]
        await busy(fleet, 9)
        assert chooser.n_open("r0") and chooser.n_open("r1"), "both have some"
        n_before = fleet.n_runs["r1"]
        await fleet.retire("r1")
        assert await complete(llm, [7], WHOLE) == expected
        assert await asyncio.gather(*tasks) == [expected] * 8
        assert fleet.n_runs["r1"] == n_before and sum(fleet.n_runs.values()) == 10, "nothing ran again"
        await until(lambda: llm.ready.max_num_seqs == 8)
        assert llm.ready.engine == 0, "none counts as lost"


async def test_what_a_dead_replica_still_says_reaches_nobody() -> None:
    async with serving(2, max_num_seqs=64) as (llm, fleet, chooser):
        expected = await complete(llm, [7], WHOLE)
        task = asyncio.create_task(complete(llm, [7], WHOLE))
        await busy(fleet, 2)
        name = next(name for name in fleet.replicas if chooser.n_open(name))
        await fleet.kill(name)
        await busy(fleet, 3)
        assert fleet.address is not None
        ghost = Outbox(fleet.address, name)
        ghost.send(StepOutputs([SeqDelta(fleet.wire_ids[1], 0, [4095], FinishReason.STOP)]))
        await asyncio.sleep(0.1)
        ghost.close()
        assert await task == expected


async def test_a_message_that_was_lost_on_the_way_is_noticed() -> None:
    async with serving(1) as (llm, fleet, _):
        expected = await complete(llm, [7], WHOLE)
        tasks = [asyncio.create_task(complete(llm, [7], params)) for params in (WHOLE, STREAMED)]
        await busy(fleet, 3)
        fleet.replicas["r0"]._outbox._number += 1
        found, error = await asyncio.gather(*tasks, return_exceptions=True)
        assert found == expected
        assert isinstance(error, EngineLost) and "on the way" in error.message


class Adapted(ToyReplica):
    """Loads adapters, at once or when it may."""

    may = asyncio.Event()

    async def _listen(self) -> None:
        while True:
            for command in await self._outbox.receive():
                if isinstance(command, LoadAdapter | UnloadAdapter):
                    await self.may.wait()
                    others = [one for one in self._stats.adapters if one.name != command.name]
                    if isinstance(command, LoadAdapter):
                        others.append(AdapterFacts(command.name, command.path, command.path, 8))
                    elif len(others) == len(self._stats.adapters):
                        self._outbox.send(Done(command.ticket, value=False, error="no adapter has this name"))
                        continue
                    self._stats.adapters = others
                    self._outbox.send(StepOutputs([], self._stats))
                    self._outbox.send(Done(command.ticket))


def names_at(fleet: LocalFleet) -> list[list[str]]:
    return [[one.name for one in replica._stats.adapters] for replica in fleet.replicas.values()]  # type: ignore[union-attr]


async def test_who_comes_while_an_adapter_is_loaded_or_later_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapted, "may", asyncio.Event())
    async with serving(1, Adapted) as (llm, fleet, chooser), asyncio.timeout(20):
        loading = asyncio.create_task(llm.add_lora(LoRARequest("x", 1, "/x")))
        await until(lambda: llm._client._questions._asked)
        await fleet.add("during")
        await until(lambda: llm.ready.max_num_seqs == 128)
        Adapted.may.set()
        assert await loading
        assert names_at(fleet) == [["x"], ["x"]]
        await llm.add_lora(LoRARequest("y", 2, "/y"))
        assert await llm.remove_lora("x")
        Adapted.may.clear()
        await fleet.add("later")
        await until(lambda: llm.ready.max_num_seqs == 192)
        await asyncio.sleep(0.2)  # it reports meanwhile
        assert "later" not in chooser._n_slots, "no request before it has what others have"
        assert [one.name for one in llm.stats().adapters] == ["y"]
        Adapted.may.set()
        await until(lambda: "later" in chooser._n_slots)
        assert names_at(fleet) == [["y"]] * 3
        assert [one.name for one in llm.stats().adapters] == ["y"]


async def test_who_comes_and_cannot_load_an_adapter_serves_all_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unable(Adapted):
        async def _listen(self) -> None:
            for command in await self._outbox.receive():
                assert isinstance(command, LoadAdapter)
                self._outbox.send(Done(command.ticket, value=False, error="/x is no folder"))

    monkeypatch.setattr(Adapted, "may", asyncio.Event())
    Adapted.may.set()
    async with serving(1, Adapted) as (llm, fleet, chooser), asyncio.timeout(20):
        await llm.add_lora(LoRARequest("x", 1, "/x"))
        fleet._kind = Unable
        await fleet.add("r1")
        await until(lambda: "r1" in chooser._n_slots)
        assert "replica r1 lacks the adapter 'x'" in caplog.text and "/x is no folder" in caplog.text
        await until(lambda: llm.stats().adapters == [])


async def test_replicas_with_other_adapters_under_one_name_say_so() -> None:
    """Each reports what it has before it answers; requests carry the hash of what all have."""
    sent: list[Request] = []
    contents = ["1", "1", "2", "3"]  # two replicas, two loads

    class Loading(ToyReplica):
        async def _listen(self) -> None:
            while True:
                for command in await self._outbox.receive():
                    if isinstance(command, LoadAdapter):
                        self._stats.adapters = [AdapterFacts(command.name, command.path, contents.pop(0), 8)]
                        self._outbox.send(StepOutputs([], self._stats))
                        self._outbox.send(Done(command.ticket))

        async def run(self, message: bytes) -> None:
            sent.append(decode_commands(message)[0].request)  # type: ignore[union-attr]
            await super().run(message)

    async with serving(2, Loading) as (llm, _, _), asyncio.timeout(20):
        await llm.add_lora(LoRARequest("x", 1, "/x"))
        async for _ in llm.generate([1], SHORT, lora_request=LoRARequest("x")):
            pass
        assert [one.content_id for one in sent] == ["1"]
        with pytest.raises(RequestError, match="different adapters under the name 'x'"):
            await llm.add_lora(LoRARequest("x", 1, "/x", load_inplace=True))
        await until(lambda: llm.stats().adapters == [])
