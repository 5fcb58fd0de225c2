"""An adapter merged into the checkpoint that it was trained for, a file at a time: W' = W + s B A; of DoRA, which no
engine can have beside other adapters, W' = m (W + s B A) / |W + s B A|, outputs by themselves.

Owns which tensors change, and to what, in float32, rounded once to the tensor's own type. Does not own the folder that
is written (`quantize/folder`) nor the keys of the adapter's configuration (`config/adapter`).
DoRA: Liu et al. 2024 (arXiv 2402.09353, equation 5), the norm over inputs as in PEFT's `lora/dora.py`.
"""

from __future__ import annotations

import io
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
import torch

from quire.compute.adapters.files import MAX_HEADER_BYTES, WEIGHTS, inside, read_file
from quire.compute.adapters.pairs import TENSOR_NAME, finite_tensor
from quire.compute.weights.checkpoint import Shard, open_checkpoint, open_shard, read_into
from quire.compute.weights.coded import DTYPES
from quire.compute.weights.header import Entry, read_header
from quire.compute.weights.names import Names
from quire.compute.weights.pieces import TORCH_DTYPES
from quire.config.adapter import CONFIG, MAX_CONFIG_BYTES, MAX_RANK, AdapterConfig, parse_adapter_config
from quire.config.arch import ModelArch
from quire.config.families import Order
from quire.config.gguf import is_gguf
from quire.config.parameters import HEAD
from quire.core.errors import ConfigError, LoadError, shown

A, B, MAGNITUDE, BASE = "A", "B", "magnitude_vector", "base_layer"
_BASE: Final = re.compile(r"^(?:base_model\.model\.)?(.+)\.base_layer\.weight$")
"""PEFT stores the matrix of a head beside its adapter: that one counts, in the place of the checkpoint's."""
LISTED: Final = 5


class Delta(msgspec.Struct, frozen=True):
    """What one matrix of the checkpoint gains."""

    a: torch.Tensor
    """float32 [rank, n_in]."""
    b: torch.Tensor
    """float32 [n_out, rank]."""
    scale: float
    transposed: bool
    """The checkpoint has it as inputs by outputs."""
    magnitude: torch.Tensor | None = None
    """float32 [n_out], of DoRA."""
    base: torch.Tensor | None = None
    """float32, in the checkpoint's order: what is there in its place."""

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """The matrix with it, in its own order and type."""
        wide = (weight if self.base is None else self.base).to(torch.promote_types(weight.dtype, torch.float32))
        whole = (wide.t() if self.transposed else wide) + self.scale * (self.b @ self.a)
        if self.magnitude is not None:
            whole *= (self.magnitude / torch.linalg.vector_norm(whole, dim=1)).unsqueeze(1)
        return (whole.t() if self.transposed else whole).to(weight.dtype).contiguous()


class Merge:
    """An adapter and its checkpoint, matched from headers; iterate it for the tensors of each file."""

    def __init__(self, folder: pathlib.Path, arch: ModelArch, adapter: str) -> None:
        """folder: of safetensors. Raises LoadError and ConfigError naming what does not fit."""
        if is_gguf(folder):
            raise ConfigError(f"{folder} is a GGUF file: take a folder of safetensors, from which it was made")
        if arch.codings is not None:
            raise ConfigError(f"{folder} is quantised ({arch.codings.words}): merge into what it was made from")
        place = inside(adapter, "")
        text = read_file(place / CONFIG, MAX_CONFIG_BYTES)
        self.config: Final = parse_adapter_config(text, place / CONFIG, MAX_RANK, to_merge=True)
        self.shards: Final[Sequence[Shard]] = open_checkpoint(folder)
        self._deltas = self._matched(place / WEIGHTS, arch)

    @property
    def n_matrices(self) -> int:
        """That change."""
        return len(self._deltas)

    @property
    def n_bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.n_bytes for shard in self.shards for entry in shard.entries)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for shard in self.shards:
            with open_shard(shard) as descriptor:
                yield {entry.name: self._tensor(descriptor, entry, shard.path) for entry in shard.entries}

    def _tensor(self, descriptor: int, entry: Entry, path: pathlib.Path) -> torch.Tensor:
        raw = torch.empty(entry.n_bytes, dtype=torch.uint8)
        read_into(descriptor, raw.numpy().data, entry.start, path)
        tensor, delta = raw.view(DTYPES[entry.dtype]).view(entry.shape), self._deltas.get(entry.name)
        if delta is None:
            return tensor
        merged = delta.merged(tensor)
        if not bool(merged.isfinite().all()):
            raise LoadError(f"tensor {entry.name} in {path} has NaN or infinite values, with the adapter or without")
        return merged

    def _matched(self, file: pathlib.Path, arch: ModelArch) -> dict[str, Delta]:
        """Name of a tensor of the checkpoint → what it gains."""
        names, places = Names(arch, in_gguf=False), dict[str, Entry]()
        for entry in (entry for shard in self.shards for entry in shard.entries):
            if entry.dtype not in DTYPES:
                raise LoadError(f"tensor {entry.name} has dtype {entry.dtype}; usable are {', '.join(DTYPES)}")
            places[names.parameter(entry.name)[0]] = entry
        most = MAX_HEADER_BYTES + 8 * MAX_RANK * sum(sum(one.shape) for one in places.values() if len(one.shape) == 2)
        content = read_file(file, most)
        found, modules = dict[str, Delta](), _modules(content, str(file))
        for module, tensors in modules.items():
            if not self.config.is_target(module):
                raise LoadError(f"{file}: {shown(module)} is none of target_modules in {CONFIG}")
            target, rows = names.parameter(f"{module}.weight")
            if target == f"{HEAD}.weight" and arch.tie_embeddings:
                raise LoadError(f"{file}: the head is the embedding (tie_word_embeddings), which would change too")
            if target not in places:
                raise LoadError(f"{file}: {shown(module)} is adapted, and the checkpoint has no such matrix")
            entry = places[target]
            found[entry.name] = _delta(module, tensors, entry, self.config, rows.order is Order.TRANSPOSED, str(file))
        targets = () if self.config.excludes else self.config.targets or ()
        absent = [one for one in targets if not any(f".{module}".endswith(f".{one}") for module in modules)]
        if not found or absent:
            raise LoadError(f"{file} has nothing for {', '.join(map(shown, absent[:LISTED])) or 'any matrix'}")
        return found


def _modules(content: bytes, where: str) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Name of a module → its tensors, float32, by kind."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for entry in read_header(io.BytesIO(content), len(content), where):
        match, base = TENSOR_NAME.match(entry.name), _BASE.match(entry.name)
        module, kind = (base[1], BASE) if base else match.groups() if match else ("", "")
        if kind not in (A, B, MAGNITUDE, BASE):
            raise LoadError(f"{where}: tensor {shown(entry.name)} is none of a linear layer's adapter")
        kinds = found.setdefault(module, {})
        if kind in kinds:
            raise LoadError(f"{where}: module {shown(module)} has {kind} twice")
        if entry.dtype not in TORCH_DTYPES:
            usable = ", ".join(TORCH_DTYPES)
            raise LoadError(f"{where}: {shown(entry.name)} has dtype {entry.dtype}; usable are {usable}")
        kinds[kind] = finite_tensor(content, entry, where)
    return found


def _delta(
    module: str, tensors: Mapping[str, torch.Tensor], entry: Entry, config: AdapterConfig, transposed: bool, where: str
) -> Delta:
    if len(entry.shape) != 2 or entry.dtype not in TORCH_DTYPES:
        raise LoadError(f"tensor {entry.name} has shape {entry.shape} and dtype {entry.dtype}: no floating matrix")
    n, k = reversed(entry.shape) if transposed else entry.shape
    rank = config.rank_of(module)
    wanted: dict[str, tuple[int, ...]] = {A: (rank, k), B: (n, rank)} | ({MAGNITUDE: (n,)} if config.is_dora else {})
    if set(tensors) - {BASE} != set(wanted):
        raise LoadError(
            f"{where}: module {shown(module)} has lora_{' and lora_'.join(tensors)}; with use_dora ="
            f" {str(config.is_dora).lower()} in {CONFIG} it must be lora_{' and lora_'.join(wanted)}"
        )
    for kind, tensor in tensors.items():
        shape = wanted.get(kind, entry.shape)
        if tensor.shape != shape:
            raise LoadError(
                f"{where}: lora_{kind} of {shown(module)} has shape {tuple(tensor.shape)}; {CONFIG} and tensor"
                f" {entry.name} imply {shape}"
            )
    return Delta(
        tensors[A], tensors[B], config.scale_of(module), transposed, tensors.get(MAGNITUDE), tensors.get(BASE)
    )  # fmt: skip
