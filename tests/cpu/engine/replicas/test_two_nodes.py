"""Replicas on two Ray nodes of this machine, of which one is killed under load. Skipped without ray, as in CI.

pip install '.[ray]' && pytest tests/cpu/engine/replicas/test_two_nodes.py
"""

from __future__ import annotations

import asyncio
import collections

import msgspec
import psutil
import pytest

ray = pytest.importorskip("ray", reason="quire[ray] is not installed")

from ray.cluster_utils import Cluster as Nodes  # noqa: E402
from replicas.test_link import SHORT, complete, until  # noqa: E402

from quire.config.cluster import ClusterConfig  # noqa: E402
from quire.config.engine import EngineConfig  # noqa: E402
from quire.core.errors import EngineLost  # noqa: E402
from quire.core.sampling import OutputKind, SamplingParams  # noqa: E402
from quire.engine.async_llm import AsyncLLM  # noqa: E402
from quire.engine.replicas.cluster import Cluster  # noqa: E402
from quire.engine.replicas.link import ReplicaLink  # noqa: E402

START_S = 90.0
N_CLIENTS = 24
WHOLE = SamplingParams(seed=1, max_tokens=60, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
STREAMED = msgspec.structs.replace(WHOLE, output_kind=OutputKind.DELTA)
BYTES = {"object_store_memory": 100_000_000, "num_gpus": 0}


def kill(nodes: Nodes) -> None:
    """SIGKILL to every process of the second node, at once."""
    (node,) = nodes.worker_nodes
    mains = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
    every = [one for main in mains for one in (main, *main.children(recursive=True))]
    assert any("quire.engine.process" in " ".join(one.cmdline()) for one in every)
    for one in every:
        one.kill()


async def load_and_kill(llm: AsyncLLM, nodes: Nodes, cluster: Cluster) -> None:
    link = llm._client
    assert isinstance(link, ReplicaLink)
    await until(lambda: llm.ready.max_num_seqs == 32, START_S)
    await until(lambda: len(cluster._chooser.routable) == 2, START_S)
    await until(lambda: [one.is_known for one in cluster._chooser.stats().replicas] == [True, True])
    assert len(await complete(llm, [5] * 40, SHORT)) == 8
    await until(lambda: any(one.prefix_pages >= 2 for one in cluster._chooser.stats().replicas))

    ends = collections.Counter[str]()
    is_over, midway = asyncio.Event(), set[int]()
    n_in = 0

    async def ask(number: int, params: SamplingParams) -> None:
        n = 0
        async for output in llm.generate([number + 1, n_in % 500, 8], params):
            n += sum(len(one.token_ids) for one in output.outputs)
            midway.add(number)
        ends["whole" if n == params.max_tokens else "short"] += 1

    async def client(number: int) -> None:
        """Asks again and again, and once more when all is over."""
        nonlocal n_in
        streams, is_last = number // 2 % 2 == 1, False  # of both kinds on each node
        while not is_last:
            is_last = is_over.is_set()
            n_in += 1
            try:
                await ask(number, STREAMED if streams else WHOLE)
            except EngineLost:
                ends["a stream was lost" if streams else "lost"] += 1
            midway.discard(number)

    clients = [asyncio.create_task(client(number)) for number in range(N_CLIENTS)]
    await until(lambda: len(midway) > N_CLIENTS // 3 and ends.total() >= N_CLIENTS)
    assert min(one.n_open for one in cluster._chooser.stats().replicas) > 0
    kill(nodes)
    await until(lambda: ends["a stream was lost"] > 0)
    is_over.set()
    await asyncio.wait_for(asyncio.gather(*clients), START_S)
    assert set(ends) == {"whole", "a stream was lost"} and ends.total() == n_in, ends
    assert link._n_attempts - 1 > n_in, "what had sent nothing ran again"


def test_a_killed_node_loses_no_request_that_has_sent_nothing() -> None:
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **BYTES})
    try:
        nodes.add_node(num_cpus=1, **BYTES)
        engine = EngineConfig(model="demo", device="cpu", max_num_seqs=16, disable_log_stats=True)
        cluster = Cluster("two-nodes", engine, ClusterConfig(replicas=2, ray_address=nodes.address))
        cluster.connect()

        async def main() -> None:
            llm = await cluster.load()
            try:
                await load_and_kill(llm, nodes, cluster)
            finally:
                await llm.shutdown()

        try:
            asyncio.run(main())
        finally:
            ray.shutdown()  # `cluster.close` would wait for the replica of the dead node
    finally:
        nodes.shutdown()


def below(nodes: Nodes, what: str) -> list[list[psutil.Process]]:
    """Of each node the processes with this in their command line."""
    found = []
    for node in (nodes.head_node, *nodes.worker_nodes):
        mains = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
        every = [one for main in mains for one in main.children(recursive=True)]
        found.append([one for one in every if what in " ".join(one.cmdline())])
    return found


def test_a_replica_of_two_stages_lies_on_two_nodes_and_outlives_the_process_on_the_other() -> None:
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **BYTES})
    try:
        nodes.add_node(num_cpus=1, **BYTES)
        one = EngineConfig(model="demo", device="cpu", dtype="float32", max_num_seqs=8, disable_log_stats=True)
        engine = msgspec.structs.replace(one, pipeline_parallel_size=2, nnodes=2)
        cluster = Cluster("stages", engine, ClusterConfig(ray_address=nodes.address))
        cluster.connect()

        async def main() -> None:
            alone = await AsyncLLM.create(one)
            expected = await complete(alone, [5, 6, 7] * 20, SHORT)
            await alone.shutdown()
            llm = await cluster.load()
            try:
                assert await complete(llm, [5, 6, 7] * 20, SHORT) == expected
                engines, others = below(nodes, "quire.engine.process"), below(nodes, "quire.engine.ranks.node")
                assert sorted(map(len, engines)) == [0, 1] and sorted(map(len, others)) == [0, 1]
                assert [len(one) + len(other) for one, other in zip(engines, others, strict=True)] == [1, 1]
                (held,) = others[0] + others[1]
                (rank,) = held.children()
                held.kill()
                await until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
                assert await asyncio.wait_for(complete(llm, [5, 6, 7] * 20, SHORT), START_S) == expected
            finally:
                await llm.shutdown()

        try:
            asyncio.run(main())
        finally:
            cluster.close()
        assert below(nodes, "quire.engine") == [[], []]
    finally:
        nodes.shutdown()
