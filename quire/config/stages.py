"""Stages of a pipeline: which neighbouring layers one has, and what follows for its description and pages. Torch-free.

Owns the arithmetic. Does not own what ranks within a stage divide (`shares`) nor how stages speak (`compute/dist`).
Invariant: the ranges of all stages are all layers, each once; every stage has the groups of pages of the whole model,
so that one page table serves all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.kv import KVGroup, KVLayout, kv_layout
from quire.config.layers import KVSpec
from quire.core.errors import ConfigError, shown

MAX_DIGITS: Final = 9


class LayerRange(msgspec.Struct, frozen=True):
    """Layers first, ..., end - 1 of n_layers."""

    first: int
    end: int
    n_layers: int

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with norm and head."""
        return self.end == self.n_layers


def stage_layers(n_layers: int, n_stages: int) -> list[range]:
    """Layers of each stage, as even as they go: those between the ends are the first to have one more, and the last,
    which has the head, never has."""
    least, n_more = divmod(n_layers, n_stages)
    turns = [*range(1, n_stages - 1), 0][:n_more]
    return _ranges([least + (stage in turns) for stage in range(n_stages)])


def _ranges(sizes: Sequence[int]) -> list[range]:
    """One behind the other, of so many layers."""
    return [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def layer_range(arch: ModelArch, stage: int, n_stages: int, partition: str) -> LayerRange:
    """Of one stage. partition: `EngineConfig.pp_layer_partition`; empty: even stages. Raises ConfigError where there
    are fewer layers than stages, layers that none can have, or a partition that is none of theirs."""
    if arch.n_layers < n_stages:
        raise ConfigError(
            f"pipeline_parallel_size = {n_stages}: {arch.family} has {arch.n_layers} layers, and each stage needs one:"
            " lower it",
            param="pipeline_parallel_size",
        )
    layers = (_asked(partition, arch, n_stages) if partition else stage_layers(arch.n_layers, n_stages))[stage]
    return LayerRange(layers.start, layers.stop, arch.n_layers)


def refuse_uneven(arch: ModelArch, n_stages: int, partition: str, why: str) -> None:
    """ConfigError where stages are to have other layers than without a partition. why: they may not."""
    if partition and _asked(partition, arch, n_stages) != stage_layers(arch.n_layers, n_stages):
        raise ConfigError(
            f"pp_layer_partition = {shown(partition)}: {why}. Leave it out to see what even stages do",
            param="pp_layer_partition",
        )


def _asked(partition: str, arch: ModelArch, n_stages: int) -> list[range]:
    """As somebody wants them."""
    words = [word.strip() for word in partition.split(",")]
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and 0 < len(word) <= MAX_DIGITS)]
    sizes = [0] if wrong else [int(word) for word in words]
    if wrong or not all(sizes):
        why = f"{shown(wrong[0] if wrong else '0')} is no number of layers that a stage could have"
    elif len(sizes) != n_stages:
        why = f"{len(sizes)} numbers, and pipeline_parallel_size = {n_stages}"
    elif sum(sizes) != arch.n_layers:
        why = f"{' + '.join(map(str, sizes))} = {sum(sizes)}, and {arch.family} has {arch.n_layers} layers"
    else:
        return _ranges(sizes)
    even = ",".join(str(len(layers)) for layers in stage_layers(arch.n_layers, n_stages))
    instead = f"Give each stage its layers, such as {even}" if n_stages > 1 else "Add --pipeline-parallel-size"
    raise ConfigError(f"pp_layer_partition = {shown(partition)}: {why}. {instead}", param="pp_layer_partition")


def stage_arch(arch: ModelArch, layers: LayerRange) -> ModelArch:
    """What a stage computes, as a description of its own; only the first has what is done to embeddings."""
    found = msgspec.structs.replace(arch, layers=arch.layers[layers.first : layers.end])
    return found if layers.is_first else msgspec.structs.replace(found, embedding_scale=1.0, n_positions=0)


def spread(layout: KVLayout) -> KVLayout:
    """The same groups, but layers of one kind are dealt out to them in turn, so that each stage has a like part of
    each: where groups were neighbouring layers, a stage would have all of one and nothing of another."""
    found, seen = [], dict[KVSpec, int]()
    for group in layout.groups:
        alike = [one for one in layout.groups if one.spec == group.spec]
        layers = sorted(layer for one in alike for layer in one.layers)
        seen[group.spec] = turn = seen.get(group.spec, -1) + 1
        found.append(KVGroup(group.spec, tuple(layers[turn :: len(alike)])))
    return KVLayout(tuple(found), layout.n_lanes)


def layout_over(arch: ModelArch, max_model_len: int, n_stages: int, *, hybrid: bool = True) -> KVLayout:
    """The groups of layers with page tables of their own, as all stages of a model have them. The rule of the engine
    and of the planner."""
    layout = kv_layout(arch, max_model_len, hybrid=hybrid)
    return layout if n_stages == 1 else spread(layout)


def stage_layout(layout: KVLayout, layers: LayerRange) -> KVLayout:
    """The groups of the whole model, with the layers that a stage has, by their numbers in it. A page has as many lanes
    as the largest of them."""
    if layers.is_first and layers.is_last:
        return layout
    groups = tuple(
        msgspec.structs.replace(
            group, layers=tuple(one - layers.first for one in group.layers if layers.first <= one < layers.end)
        )
        for group in layout.groups
    )
    return KVLayout(groups, max(len(group.layers) for group in groups))
