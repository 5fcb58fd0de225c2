"""Whether a cluster has room for replicas, told before Ray would wait for it without a word; what a replica makes of
its room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from quire.config.cluster import ClusterConfig
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError

DEFAULT_CPUS: Final = 1
"""Ray Serve's, where `num_cpus` is not given."""
_NAMES: Final = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


def needs_of(actor_options: Mapping[str, Any]) -> dict[str, float]:
    """Ray's name of a resource → how much of it one replica takes."""
    options = {"num_cpus": DEFAULT_CPUS} | dict(actor_options)
    needs = {_NAMES[name]: float(amount) for name, amount in options.items() if name in _NAMES}
    needs |= {name: float(amount) for name, amount in options.get("resources", {}).items()}
    return {name: amount for name, amount in needs.items() if amount > 0}


def n_places(nodes: Sequence[Mapping[str, float]], needs: Mapping[str, float]) -> int:
    """How many replicas these nodes hold, each whole on one node. Shares of a ten-thousandth count, as Ray has it."""
    if not needs:
        return 1 << 30
    return sum(
        min(round(node.get(name, 0.0) * 10_000) // max(1, round(amount * 10_000)) for name, amount in needs.items())
        for node in nodes
    )


def n_spread(n_replicas: int, nodes: Sequence[Mapping[str, float]], needs: Mapping[str, float], n_each: int) -> int:
    """How many of these replicas the nodes hold, each with parts on n_each different nodes; needs: of a part."""
    places = [n_places([node], needs) for node in nodes]
    while n_replicas and sum(min(n, n_replicas) for n in places) < n_replicas * n_each:
        n_replicas -= 1
    return n_replicas


def check_room(
    n_replicas: int, actor_options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]], n_each: int = 1
) -> None:
    """ConfigError if the nodes, were they empty, could not hold so many replicas. n_each: nodes of one replica, each of
    which takes what the options say."""
    needs = needs_of(actor_options)
    room = n_places(nodes, needs) if n_each == 1 else n_spread(n_replicas, nodes, needs, n_each)
    if room >= n_replicas:
        return
    each = "each" if n_each == 1 else f"on each of {n_each} nodes"
    has = "; ".join(_listed(node, needs) for node in nodes) or "no node"
    who = f"{n_replicas} replicas need" if n_replicas > 1 else "1 replica needs"
    raise ConfigError(
        f"{who} {_listed(needs, needs)} {each}, and Ray has room for {room}: its {len(nodes)}"
        f" node{'s have' if len(nodes) != 1 else ' has'} {has}. Ask for fewer replicas, for less with"
        " --ray-actor-options, or add nodes"
    )


def check_spread(engine: EngineConfig, cluster: ClusterConfig) -> None:
    """ConfigError for options that replicas of several nodes do not go by."""
    for name in ("accelerator_type", "label_selector"):
        if engine.nnodes > 1 and name in cluster.ray_actor_options:
            raise ConfigError(
                f"nnodes = {engine.nnodes} and ray_actor_options: {name}: nodes of one replica are found by num_cpus,"
                " num_gpus, memory and resources: name a resource of Ray's nodes instead", param="ray_actor_options",
            )  # fmt: skip


def idle_gpus(actor_options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> str:
    """What to tell if the nodes have GPUs and the options do not say whether replicas get some; else empty."""
    n_gpus = sum(node.get("GPU", 0.0) for node in nodes)
    if not n_gpus or "num_gpus" in actor_options:
        return ""
    return (
        f"Ray's nodes have {n_gpus:g} GPU{'s' if n_gpus != 1 else ''}, and nothing sets one aside for a replica, which"
        " then computes on the CPU: --ray-actor-options '{\"num_gpus\": 1}' gives each one; --device cpu or"
        " num_gpus: 0 says that the CPU is meant"
    )


def engine_of_replica(engine: EngineConfig, cluster: ClusterConfig) -> EngineConfig:
    """A replica without a GPU computes on as many cores as Ray sets aside for it."""
    options = cluster.ray_actor_options
    if engine.num_threads or options.get("num_gpus"):
        return engine
    return msgspec.structs.replace(engine, num_threads=max(1, int(options.get("num_cpus", 1))))


def _listed(amounts: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names)
