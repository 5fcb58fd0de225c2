"""How many sequences of a recurrent model run at once, where nobody says: by the room that their states leave."""

from __future__ import annotations

import logging
import pathlib

import pytest
from msgspec.structs import replace

from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import EngineLimits, resolve
from quire.core.errors import ConfigError
from quire.engine.capacity import StagePool, equation, layout_of, size_pool, snapshots_within
from quire.engine.concurrency import with_fitting_seqs
from quire.planner.memory import Room

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes"
MAMBA, LFM2, QWEN = (read_arch(SHAPES / name) for name in ("mamba2-2.7b", "lfm2-1.2b", "qwen3-0.6b"))
GIB = 1 << 30


def limits_of(room: Room, arch: object, **options: object) -> tuple[EngineConfig, EngineLimits, StagePool]:
    """pool: with 6 GiB of weights loaded."""
    config = EngineConfig(**options)  # type: ignore[arg-type]
    limits = resolve(config, arch, "cpu" if room.is_main else "cuda")  # type: ignore[arg-type]
    pool = StagePool(arch, layout_of(config, limits, arch), 6 * GIB, 0, room)  # type: ignore[arg-type]
    return config, limits, pool


def length(config: EngineConfig, limits: EngineLimits, pool: StagePool) -> int:
    """Of the longest sequence that the pool is made for; 0: there is no pool."""
    n_snapshots = snapshots_within(config, limits, [pool])
    try:
        _, sized = size_pool(
            config, limits, pool.arch, pool.room, weights_bytes=pool.weights_bytes, n_snapshots=n_snapshots
        )
    except ConfigError:
        return 0
    return sized.max_model_len


@pytest.mark.parametrize("total", [40, 24, 16])
def test_as_many_as_fit_a_gpu_and_one_more_does_not(total: int, caplog: pytest.LogCaptureFixture) -> None:
    room = Room(total * GIB, (total - 6) * GIB, is_main=False)
    config, limits, pool = limits_of(room, MAMBA, max_model_len=4096)
    assert not length(config, limits, pool)  # 1,024 states of 170 MB
    with caplog.at_level(logging.INFO, "quire.engine"):
        found = with_fitting_seqs(config, limits, MAMBA, [pool])
    assert 1 < found.max_num_seqs < total * 6
    assert length(config, found, pool) == 4096
    assert not length(config, replace(found, max_num_seqs=found.max_num_seqs + 1), pool)
    assert f"max_num_seqs is {found.max_num_seqs}, not 1024: each sequence keeps a recurrent state of" in caplog.text


def test_states_and_pages_share_what_is_free_of_main_memory() -> None:
    room = Room(24 * GIB, 6 * GIB)
    config, limits, pool = limits_of(room, MAMBA, max_model_len=4096)
    found = with_fitting_seqs(config, limits, MAMBA, [pool])

    def n_bytes(n_seqs: int) -> int:
        asked = replace(limits, max_num_seqs=n_seqs)
        n_snapshots = snapshots_within(config, asked, [pool])
        n_pages, _ = size_pool(config, asked, MAMBA, room, n_snapshots=n_snapshots)
        return equation(config, asked, MAMBA, n_snapshots=n_snapshots).total_bytes(n_pages)

    assert n_bytes(found.max_num_seqs) <= 6 * GIB < n_bytes(found.max_num_seqs + 1)


def test_states_leave_room_for_keys() -> None:
    """Where not even one sequence could be as long as the model allows: half of the length that it could have."""
    room = Room(8 * GIB, 2 * GIB, is_main=False)
    config, limits, pool = limits_of(room, LFM2)
    assert limits.max_model_len == 128_000
    found = with_fitting_seqs(config, limits, LFM2, [pool])
    alone = length(config, replace(limits, max_num_seqs=1), pool)
    assert alone < 128_000 and found.max_num_seqs > 1
    assert length(config, found, pool) >= alone // 2 - 16


def test_nothing_changes_where_it_was_asked_for_or_no_state_is_kept() -> None:
    room = Room(24 * GIB, 18 * GIB, is_main=False)
    for arch, options in ((MAMBA, {"max_num_seqs": 900}), (QWEN, {})):
        config, limits, pool = limits_of(room, arch, **options)
        assert with_fitting_seqs(config, limits, arch, [pool]) is limits


def test_where_one_does_not_fit_the_refusal_is_about_one() -> None:
    config, limits, pool = limits_of(Room(7 * GIB, GIB // 8, is_main=False), MAMBA)
    found = with_fitting_seqs(config, limits, MAMBA, [pool])
    assert found.max_num_seqs == 1 and not length(config, found, pool)
