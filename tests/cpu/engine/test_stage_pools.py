"""Memory is shared out by the layers that stages really have, also where they were asked for."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest

from quire.bench.shape import FOLDER
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.engine.build import _stage_pools
from quire.engine.capacity import layout_of


@pytest.mark.parametrize("partition, counts", [("", [16, 16]), ("17,15", [17, 15]), ("31,1", [31, 1])])
def test_pools_are_of_the_layers_that_were_asked_for(partition: str, counts: list[int]) -> None:
    arch = read_arch(pathlib.Path(FOLDER) / "llama-3.1-8b")
    config = EngineConfig(pipeline_parallel_size=2, pp_layer_partition=partition)
    layout = layout_of(config, resolve(config, arch, "cuda"), arch)
    own: Any = types.SimpleNamespace(weights_bytes=0, others_bytes=0, room=None)
    facts: Any = types.SimpleNamespace(stages=[own, own])
    pools = _stage_pools(arch, layout, facts, config.pp_layer_partition)
    assert [pool.arch.n_layers for pool in pools] == counts
    assert [pool.kv.n_lanes for pool in pools] == counts
