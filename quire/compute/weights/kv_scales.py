"""Scales of a KV cache in e4m3 that a checkpoint brings: one of all keys of a layer, one of all values.

Owns their names and checks. Does not own what is done with them (`kernels.kvstore.entry`): number = code * scale, as in
vLLM. Names: in a layer, compressed-tensors and vLLM write `self_attn.k_scale`, ModelOpt `self_attn.k_proj.k_scale`,
older ones `self_attn.k_proj.output_scale`, or one `kv_scale` of both; what a layer is called is the family's. A layer
without any has scales of 1, as in vLLM.
"""

from __future__ import annotations

import collections
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Final

import torch

from quire.compute.weights.checkpoint import Shard, open_checkpoint, open_shard, read_into
from quire.compute.weights.header import Entry
from quire.compute.weights.pieces import TORCH_DTYPES
from quire.config.families import family_named
from quire.config.gguf import is_gguf
from quire.config.parameters import LAYER
from quire.config.stages import LayerRange
from quire.core.errors import LoadError
from quire.kernels.kvstore.entry import Scales

IN_LAYER: Final = (
    r"(\d+)\.(?:[a-z_]+\.)+"
    r"(?:(?P<k>k_scale|k_proj\.output_scale)|(?P<v>v_scale|v_proj\.output_scale)|(?P<kv>kv_scale))"
)


def read_kv_scales(folder: pathlib.Path, family: str, layers: LayerRange) -> dict[int, Scales]:
    """Of the layers of a stage that have some, by their numbers in it; family: of the model. Raises LoadError for
    scales that are not one positive number each."""
    if is_gguf(folder):
        return {}
    pattern = _pattern(family)
    found: dict[int, dict[str, float]] = collections.defaultdict(dict)
    for shard in open_checkpoint(folder):
        named = [(entry, match) for entry in shard.entries if (match := pattern.fullmatch(entry.name))]
        for entry, match in named:
            layer, kind = int(match[1]), str(match.lastgroup)
            if layers.first <= layer < layers.end:
                found[layer - layers.first][kind] = _read(shard, entry)
    return {layer: _scales(kinds) for layer, kinds in found.items()}


def _pattern(family: str) -> re.Pattern[str]:
    """Of a scale's name in the model's own layers: another tower of the checkpoint has layers by other names."""
    names = (LAYER, *family_named(family).names)
    before = {re.escape(name.partition("{}")[0]) for name in names if "{}" in name}
    return re.compile(f"(?:{'|'.join(sorted(before))}){IN_LAYER}")


def _scales(kinds: Mapping[str, float]) -> Scales:
    both = kinds.get("kv", 1.0)
    return Scales(kinds.get("k", both), kinds.get("v", both))


def _read(shard: Shard, entry: Entry) -> float:
    if math.prod(entry.shape) != 1 or entry.dtype not in TORCH_DTYPES:
        raise LoadError(
            f"{shard.path.name}: {entry.name} is {entry.dtype} {list(entry.shape)}: --kv-cache-dtype fp8 reads one "
            "floating-point scale for all keys, or values, of a layer; leave the option out"
        )
    buffer = bytearray(entry.n_bytes)
    with open_shard(shard) as descriptor:
        read_into(descriptor, memoryview(buffer), entry.start, shard.path)
    scale = float(torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype])[0])
    if not (math.isfinite(scale) and scale > 0):
        raise LoadError(
            f"{shard.path.name}: {entry.name} is {scale}: a scale must be a positive number; leave --kv-cache-dtype out"
        )
    return scale
