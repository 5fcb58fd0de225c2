"""The size of the KV pool: by need on a CPU, by the share of memory on a GPU, and what is said when it does not fit."""

from __future__ import annotations

import pathlib

import pytest

from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.engine.capacity import equation, size_pool
from quire.planner.memory import Room

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes"
ARCH = read_arch(SHAPES / "qwen3-0.6b")
GIB = 1 << 30


def main(total: int, free: int) -> Room:
    return Room(total, free)


def own(total: int, free: int) -> Room:
    return Room(total, free, is_main=False)


def pages(room: Room, **options: object) -> int:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return size_pool(config, resolve(config, ARCH, "cpu" if room.is_main else "cuda"), ARCH, room)[0]


def test_cpu_pool_holds_all_slots_at_full_length_and_no_more() -> None:
    room = main(1000 * GIB, 900 * GIB)
    assert pages(room, max_model_len=2048, max_num_seqs=4) == 1 + 4 * 128


def test_cpu_pool_takes_at_most_a_quarter_of_free_memory() -> None:
    room = main(24 * GIB, 16 * GIB)
    config = EngineConfig(max_model_len=4096, max_num_seqs=256)
    page_bytes = equation(config, resolve(config, ARCH, "cpu"), ARCH).page_bytes
    assert pages(room, max_model_len=4096, max_num_seqs=256) == 4 * GIB // page_bytes


def test_gpu_pool_fills_the_share_beside_what_is_taken() -> None:
    roomy, tight = (pages(own(140 * GIB, free), max_model_len=4096) for free in (130 * GIB, 100 * GIB))
    assert 0 < tight < roomy


def test_cpu_pool_holds_one_sequence_of_a_length_that_was_asked_for() -> None:
    """More than a quarter of what is free, where that is too little."""
    room = main(24 * GIB, 6 * GIB)
    assert pages(room, max_model_len=32768) == 1 + 32768 // 16
    with pytest.raises(ConfigError, match="do not fit the KV pool"):
        pages(main(24 * GIB, 3 * GIB), max_model_len=32768)


def test_memory_of_others_is_not_weights() -> None:
    room, config = own(40 * GIB, 5 * GIB), EngineConfig()
    with pytest.raises(ConfigError) as caught:
        size_pool(config, resolve(config, ARCH, "cuda"), ARCH, room, others_bytes=33 * GIB)
    lines = {line.split()[0]: line for line in str(caught.value).splitlines()}
    assert "33.000 GiB" in lines["others"] and "2.000 GiB" in lines["weights"]


def test_a_length_that_was_asked_for_must_fit_and_another_is_lowered() -> None:
    room = main(24 * GIB, 16 * GIB)
    with pytest.raises(ConfigError, match="max_model_len = 4096 tokens do not fit the KV pool of 1584 tokens"):
        pages(room, max_model_len=4096, num_gpu_blocks_override=100)
    config = EngineConfig(num_gpu_blocks_override=100)
    assert size_pool(config, resolve(config, ARCH, "cpu"), ARCH, room)[1].max_model_len == 1584


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="weights"):
        pages(own(2 * GIB, 1 * GIB))
