"""Replicas on two Ray nodes of this machine, of which one is killed under load. Skipped without ray, as in CI.

pip install 'quire[ray]' && pytest tests/cpu/engine/replicas/test_two_nodes.py
"""

from __future__ import annotations

import asyncio
import collections

import pytest

ray = pytest.importorskip("ray", reason="quire[ray] is not installed")

from ray.cluster_utils import Cluster as Nodes  # noqa: E402
from replicas.test_link import STREAMED, WHOLE, complete, until  # noqa: E402

from quire.config.cluster import ClusterConfig  # noqa: E402
from quire.config.engine import EngineConfig  # noqa: E402
from quire.core.errors import EngineLost  # noqa: E402
from quire.engine.async_llm import AsyncLLM  # noqa: E402
from quire.engine.replicas.cluster import Cluster  # noqa: E402

START_S = 90.0
BYTES = {"object_store_memory": 100_000_000, "num_gpus": 0}


async def load_and_kill(llm: AsyncLLM, nodes: Nodes, cluster: Cluster) -> None:
    await until(lambda: llm.ready.max_num_seqs == 32, START_S)
    await until(lambda: len(cluster._chooser.routable) == 2, START_S)
    ids = await complete(llm, [5] * 40, WHOLE)
    stats = cluster._chooser.stats()
    await until(lambda: any(one.prefix_pages >= 2 for one in cluster._chooser.stats().replicas))
    assert len(ids) == 300 and all(one.is_known for one in stats.replicas)

    n_in, ends = 0, collections.Counter[str]()

    async def ask(number: int) -> None:
        streams = number % 2 == 1
        try:
            n = len(await complete(llm, [number + 1, 7, 8], STREAMED if streams else WHOLE))
            ends["whole" if n == 300 else "short"] += 1
        except EngineLost:
            ends["a stream was lost" if streams else "lost"] += 1

    tasks = []
    for _ in range(6):
        tasks += [asyncio.create_task(ask(number)) for number in range(n_in, n_in + 4)]
        n_in += 4
        await asyncio.sleep(0.05)
    before = {one.name: one.n_open for one in cluster._chooser.stats().replicas}
    assert min(before.values()) > 0, "both nodes are at work"
    await asyncio.to_thread(nodes.remove_node, next(iter(nodes.worker_nodes)), allow_graceful=False)
    for _ in range(6):
        tasks += [asyncio.create_task(ask(number)) for number in range(n_in, n_in + 4)]
        n_in += 4
        await asyncio.sleep(0.05)
    await asyncio.wait_for(asyncio.gather(*tasks), START_S)
    assert ends.total() == n_in
    assert set(ends) <= {"whole", "a stream was lost"}, ends
    assert ends["a stream was lost"] <= sum(before.values()), "and none that came afterwards"
    await until(lambda: llm.ready.max_num_seqs == 16 and llm.n_engines_lost == 1)


def test_a_killed_node_loses_no_request_that_has_sent_nothing() -> None:
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **BYTES})
    try:
        nodes.add_node(num_cpus=1, **BYTES)
        engine = EngineConfig(device="null", max_num_seqs=16, disable_log_stats=True)
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
            cluster.close()
    finally:
        nodes.shutdown()
