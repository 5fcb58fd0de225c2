"""How many KV pages the pool gets: the memory equation with what the device really has, and what to say about it.

Owns the choice of budget. Does not own the equation (`planner/memory`).
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.resolve import Limits
from quire.core.errors import ConfigError
from quire.core.units import format_bytes, parse_bytes
from quire.planner.memory import MemoryEquation

logger = logging.getLogger("quire.engine")

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
INT8_SCALE_BYTES = 4
"""Beside the 8-bit keys, or values, of each token and head (`kernels.kvstore.cell`)."""
CPU_SHARE = 0.25
"""The default pool on a CPU: this share of free memory, but not more than all slots at full length can fill."""


class Memory(Protocol):
    """What a device says of its memory, after the weights were loaded."""

    name: str

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...


def equation(
    config: EngineConfig,
    limits: Limits,
    arch: ModelArch,
    taken_bytes: int = 0,
    graph_sizes: tuple[int, ...] = (),
    mixed_rows: int = 0,
) -> MemoryEquation:
    """The terms for one engine; taken_bytes: memory in use once the weights are loaded (0: computed); graph_sizes: the
    decode steps that will be captured; mixed_rows: the largest other one."""
    return MemoryEquation(
        shape=arch,
        page_size=config.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        weight_itemsize=ITEMSIZES[limits.dtype],
        kv_itemsize=kv_itemsize(limits, arch),
        loaded_weights_bytes=taken_bytes,
        graph_sizes=graph_sizes,
        mixed_rows=mixed_rows,
    )


def kv_itemsize(limits: Limits, arch: ModelArch) -> float:
    """Bytes a number in the KV cache, scales counted in."""
    return 1 + INT8_SCALE_BYTES / arch.head_dim if limits.kv_dtype == "int8" else ITEMSIZES[limits.kv_dtype]


def size_pool(
    config: EngineConfig,
    limits: Limits,
    arch: ModelArch,
    memory: Memory,
    graph_sizes: tuple[int, ...] = (),
    mixed_rows: int = 0,
    weights_bytes: int = 0,
) -> tuple[int, Limits]:
    """Number of pages (dummy included), and the limits, with a max_model_len that the pool can hold.

    weights_bytes: what the loaded weights take (0: computed from the shape); on a GPU all memory in use counts instead.
    Raises ConfigError with every term when less than two pages, or less than an explicit max_model_len, fit.
    """
    taken_bytes = memory.total_bytes() - memory.free_bytes()
    terms = equation(
        config, limits, arch, taken_bytes if memory.name != "cpu" else weights_bytes, graph_sizes, mixed_rows
    )
    budget_bytes = _budget(config, terms, memory)
    n_pages = config.num_gpu_blocks_override or terms.pages_within(budget_bytes)
    if n_pages * terms.page_bytes + terms.fixed_bytes > memory.total_bytes():
        machine_bytes = memory.total_bytes()
        raise ConfigError(
            f"{n_pages} KV pages do not fit into {format_bytes(machine_bytes)}:\n{terms.explain(machine_bytes)}"
        )
    n_tokens = (n_pages - 1) * config.block_size
    if n_tokens < limits.max_model_len:
        if config.max_model_len:
            raise ConfigError(
                f"max_model_len = {config.max_model_len} tokens do not fit the KV pool of {n_tokens} tokens:\n"
                f"{terms.explain(budget_bytes)}"
            )
        logger.warning(
            "the KV pool holds %d tokens, so max_model_len is lowered from %d to that", n_tokens, limits.max_model_len
        )
        limits = msgspec.structs.replace(limits, max_model_len=n_tokens)
    logger.info(
        "KV pool: %d pages of %d tokens in %s, %s",
        n_pages, config.block_size, limits.kv_dtype, format_bytes(n_pages * terms.page_bytes),
    )  # fmt: skip
    return n_pages, limits


def _budget(config: EngineConfig, terms: MemoryEquation, memory: Memory) -> int:
    """Bytes for the whole engine."""
    if config.kv_cache_memory_bytes:
        return terms.fixed_bytes + parse_bytes(config.kv_cache_memory_bytes)
    if memory.name == "cpu":
        useful_pages = 1 + terms.max_num_seqs * -(-terms.max_model_len // terms.page_size)
        return terms.fixed_bytes + min(int(memory.free_bytes() * CPU_SHARE), useful_pages * terms.page_bytes)
    return int(memory.total_bytes() * config.gpu_memory_utilization)
