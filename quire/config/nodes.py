"""Which ranks are on which machine. Torch-free.

Owns the arithmetic, and what of a division may reach across machines. Does not own how nodes find each other
(`engine/ranks/nodes.py`).
Invariant: ranks that share a layer are on one node, whose ranks are neighbours; stages of a pipeline may lie apart.
"""

from __future__ import annotations

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError


def check_nodes(config: EngineConfig) -> None:
    """Raises ConfigError for what cannot be on several machines."""
    check_node_rank(config)
    n, pp = config.nnodes, config.pipeline_parallel_size
    if n == 1:
        return
    if config.master_addr in ("0.0.0.0", "::", "*", ""):
        raise ConfigError(
            f"master_addr = {config.master_addr!r} is no address at which node 0 can be reached: give one of its own",
            param="master_addr",
        )
    if pp % n:
        raise ConfigError(
            f"nnodes = {n} and pipeline_parallel_size = {pp}: machines have whole stages of a pipeline, as many each:"
            f" give --pipeline-parallel-size {n}, or a multiple, and --tensor-parallel-size for the ranks within one",
            param="nnodes",
        )
    if config.enable_lora:
        raise ConfigError(
            f"nnodes = {n} and enable_lora = True: adapters are read by ranks of one machine: leave --enable-lora out,"
            " and serve weights that quire merge has made",
            param="nnodes",
        )


def check_node_rank(config: EngineConfig) -> None:
    """Raises ConfigError for a node that is none of them."""
    n = config.nnodes
    if config.node_rank >= n:
        hint = "" if n > 1 else ": give --nnodes too"
        raise ConfigError(
            f"node_rank = {config.node_rank} and nnodes = {n}: nodes are numbered from 0 to {n - 1}{hint}",
            param="node_rank",
        )


def n_local_ranks(config: EngineConfig, n_ranks: int) -> int:
    """Of the n_ranks of an engine those of each node."""
    return n_ranks // config.nnodes


def ranks_of_node(config: EngineConfig, n_ranks: int, node: int) -> range:
    """Numbers of the ranks of a node; rank 0 is on node 0."""
    n = n_local_ranks(config, n_ranks)
    return range(node * n, (node + 1) * n)
