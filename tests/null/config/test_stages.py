"""Stages have all layers, each once, in even parts, and the groups of pages of the whole model."""

from __future__ import annotations

import msgspec
import pytest
from test_kv import GEMMA
from test_shares import SHAPES

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.kv import kv_layout
from quire.config.mesh import Mesh, depth_of, mesh_of
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.config.stages import layer_range, refuse_uneven, spread, stage_arch, stage_layout
from quire.core.errors import ConfigError
from quire.engine.capacity import StagePool, equation, layout_of, tightest
from quire.planner.memory import Room

GIB = 1 << 30


@pytest.fixture(scope="module")
def qwen() -> ModelArch:
    return read_arch(SHAPES / "qwen3-0.6b")


@pytest.mark.parametrize("n_layers, counts, asked", [
    (28, [28], ""), (28, [14, 14], ""), (7, [4, 3], ""), (5, [1, 2, 1, 1], ""), (11, [3, 3, 3, 2], ""),
    (4, [1, 1, 1, 1], ""), (28, [15, 13], "15,13"), (5, [3, 1, 1], " 3, 1,1"), (4, [4], "4"),
])  # fmt: skip
def test_all_layers_once(n_layers: int, counts: list[int], asked: str, qwen: ModelArch) -> None:
    layers = tuple(GEMMA.layers[i % GEMMA.n_layers] for i in range(n_layers))  # with and without windows
    arch = msgspec.structs.replace(qwen, layers=layers, embedding_scale=3.0)
    ranges = [layer_range(arch, stage, len(counts), asked) for stage in range(len(counts))]
    assert [one.end - one.first for one in ranges] == counts
    assert [layer for one in ranges for layer in range(one.first, one.end)] == list(range(n_layers))
    stages = [stage_arch(arch, one) for one in ranges]
    assert tuple(layer for stage in stages for layer in stage.layers) == arch.layers
    assert [stage.embedding_scale for stage in stages] == [3.0] + [1.0] * (len(counts) - 1)
    assert [one.is_first for one in ranges].count(True) == [one.is_last for one in ranges].count(True) == 1


def test_what_has_no_stages(qwen: ModelArch) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 29: qwen3 has 28 layers, and each stage needs one"):
        layer_range(qwen, 0, 29, "")


@pytest.mark.parametrize(
    "asked, why",
    [
        ("14", "1 numbers, and pipeline_parallel_size = 2"), ("14,13", r"14 \+ 13 = 27, and qwen3 has 28 layers"),
        ("28,0", "'0' is no number"), ("14,14,1", "3 numbers"), ("14;14", "'14;14' is no number"),
        ("-1,29", "'-1' is no number"), ("14,", "'' is no number"), ("x,y", "'x' is no number"),
        ("9" * 5000, "'999.* is no number"), ("1e1,18", "'1e1' is no number"), ("١٤,١٤", "'١٤' is no number"),
    ],
)  # fmt: skip
def test_layers_that_are_not_those_of_the_stages(asked: str, why: str, qwen: ModelArch) -> None:
    with pytest.raises(ConfigError, match=rf"^pp_layer_partition = .*{why}.*\. Give each .* such as 14,14$"):
        layer_range(qwen, 0, 2, asked)


def test_groups_are_those_of_the_whole() -> None:
    """Gemma 3: 22 windows and 4 full layers in pages of 4 lanes. Neighbours in one group would all be in one stage,
    whose pages would need as many lanes as the whole model's."""
    whole = kv_layout(GEMMA)
    dealt = spread(whole)
    assert dealt.windows == whole.windows and sorted(dealt.places) == sorted(whole.places)
    for layout, n_lanes in ((whole, 4), (dealt, 2)):
        stages = [stage_layout(layout, layer_range(GEMMA, stage, 2, "")) for stage in range(2)]
        assert all(one.windows == whole.windows for one in stages)
        assert sum(len(one.places) for one in stages) == 26
        assert max(one.n_lanes for one in stages) == n_lanes
    assert stage_layout(whole, layer_range(GEMMA, 0, 1, "")) is whole


def test_the_fullest_stage_decides_how_many_pages_there_are(qwen: ModelArch) -> None:
    config = EngineConfig(pipeline_parallel_size=2)
    limits = resolve(config, qwen, "cuda")
    layout = layout_of(config, limits, qwen)

    def stage(number: int, weights_bytes: int) -> StagePool:
        layers = layer_range(qwen, number, 2, "")
        room = Room(80 * GIB, 80 * GIB - weights_bytes, is_main=False)
        return StagePool(stage_arch(qwen, layers), stage_layout(layout, layers), weights_bytes, 0, room)

    first, last = stage(0, 20 * GIB), stage(1, 21 * GIB)
    assert tightest(config, limits, [first, last], ()) is last
    assert equation(config, limits, first.arch, kv=first.kv).page_bytes * 2 == equation(config, limits, qwen).page_bytes


def test_places_in_the_mesh() -> None:
    shape = mesh_of(EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3))
    assert shape == Mesh(tp=2, pp=3) and shape.n_ranks == 6 and shape.telling_ranks == [4]
    assert [(shape.stage_of(rank), shape.place_in_stage(rank)) for rank in range(6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)
    ]  # fmt: skip
    shape = mesh_of(EngineConfig(tensor_parallel_size=2, data_parallel_size=3))
    assert shape == Mesh(tp=2, dp=3) and shape.n_ranks == 6 and shape.telling_ranks == [0, 2, 4]
    assert [(shape.dp_rank_of(rank), shape.place_in_stage(rank)) for rank in range(6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)
    ]  # fmt: skip
    assert depth_of(EngineConfig(pipeline_parallel_size=3)) == 4 and depth_of(EngineConfig()) == 2


def test_only_even_stages_are_simulated_and_planned(qwen: ModelArch) -> None:
    for even in ("", "14,14", " 14 ,14"):
        refuse_uneven(qwen, 2, even, "they may not")
    with pytest.raises(ConfigError, match=r"^pp_layer_partition = '15,13': they may not\. Leave it out"):
        refuse_uneven(qwen, 2, "15,13", "they may not")
    with pytest.raises(ConfigError, match=r"2 numbers, and pipeline_parallel_size = 1\. Add --pipeline-parallel-size$"):
        refuse_uneven(qwen, 1, "14,14", "they may not")
