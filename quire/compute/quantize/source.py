"""The checkpoint that is quantised, a layer at a time: what is read of it, and what each of its tensors is.

Owns which part of the model is in memory. Does not own reading (`weights/loader`) nor names (`weights/names`).
Invariant: of the layers at most one is there; beside it what stands before the first and behind the last.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import torch

from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.rotary import rotary_tables
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.quantize.watched import watched_schemes
from quire.compute.weights.checkpoint import Shard, open_shard, read_into
from quire.compute.weights.found import Copy, Found
from quire.compute.weights.loader import fill, find_copies
from quire.compute.weights.names import Names
from quire.compute.weights.pieces import TORCH_DTYPES
from quire.config.arch import ModelArch
from quire.config.families import Order
from quire.config.gguf import is_gguf
from quire.config.parameters import LAYER, Kept, Matrix, layer_parameters, matrices
from quire.core.errors import ConfigError

LAYERS: Final = LAYER.partition("{}")[0]


class Source:
    """A checkpoint of floating numbers."""

    def __init__(self, folder: pathlib.Path, arch: ModelArch, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: in which layers are computed. Reads headers alone. Raises LoadError as `load_model`, ConfigError for a
        checkpoint that cannot be written in a format that others read."""
        if is_gguf(folder):
            raise ConfigError(f"{folder} is a GGUF file: take a folder of safetensors, from which it was made")
        self.folder, self.arch, self.dtype = folder, arch, dtype
        self._device = device
        self._names = Names(arch, False)
        self._nowhere = decoder_on(torch.device("meta"), arch, dtype, 1)
        self._found = find_copies(folder, self._nowhere, "auto")
        if self._found.coded:
            raise ConfigError(f"{folder} is quantised already: take the checkpoint that it was made from")
        self._check_order()

    def _check_order(self) -> None:
        quantised = {f"{name}.weight" for matrix in self.quantised() for name in (*dict(matrix.parts), matrix.whole)}
        for _, copy in self.tensors():
            if copy.target in quantised and (copy.rows.order is Order.TRANSPOSED or copy.entry.name.endswith("]")):
                kind = "the matrices of all experts in one" if copy.entry.name.endswith("]") else "inputs by outputs"
                raise ConfigError(
                    f"tensor {copy.entry.name} holds {kind}, and compressed-tensors has no quantised form of it: this"
                    f" family ({self.arch.family}) cannot be written"
                )

    def quantised(self, group: int = 0) -> Iterator[Matrix]:
        """Matrices that can be rounded, with rows of whole groups."""
        for matrix in matrices(msgspec.structs.replace(self.arch, tie_embeddings=True)):
            if matrix.name.startswith(LAYERS) and matrix.kept is Kept.BY_SCHEME and not (group and matrix.n_in % group):
                yield matrix

    def ignored(self, group: int) -> list[str]:
        """Names, as in the checkpoint, of linear layers that are left as they are."""
        done = {matrix.name for matrix in self.quantised(group)}
        left = [matrix for matrix in matrices(self.arch) if matrix.name not in done]
        return [self.module(name) for matrix in left for name, _ in matrix.parts]

    def module(self, name: str) -> str:
        """Of a part of a matrix, as the checkpoint calls it."""
        return self._names.in_checkpoint(f"{name}.weight").removesuffix(".weight")

    def ends(self, length: int) -> Decoder:
        """A model without layers: embedding, norm and head; its rotary tables are those of all layers."""
        schemes = watched_schemes(self.dtype)
        bare = msgspec.structs.replace(self.arch, layers=())
        tables = {rope: table.to(self._device) for rope, table in rotary_tables(self.arch, length).items()}
        model = Decoder(bare, self._make, tables, schemes)
        fill(model, self._of(lambda target: not target.startswith(LAYERS)))
        model.finish()
        return model

    def layer(self, number: int, tables: Decoder) -> DecoderLayer:
        """Layer `number`, made as number 0 of its context. tables: the model that has the rotary tables."""
        hollow = self._nowhere.layers[number]
        spec, parameters = hollow.spec, layer_parameters(hollow.spec, self.arch.hidden_size, number)
        layer = type(hollow)(
            spec, parameters, 0, self._make, watched_schemes(self.dtype), tables.tables[spec.mixer.rope]
        )
        at = LAYER.format(number)
        self._nowhere.layers[number] = layer
        fill(self._nowhere, self._of(lambda target: target.startswith(at)))
        self._nowhere.layers[number] = hollow
        return layer

    def tensors(self, number: int | None = None) -> Iterator[tuple[Shard, Copy]]:
        """All that the files have of layer `number`, None: of everything; without what the model does not use."""
        at = "" if number is None else LAYER.format(number)
        for shard, copies in zip(self._found.shards, self._found.copies, strict=True):
            yield from ((shard, copy) for copy in copies if copy.target.startswith(at))

    def rest(self) -> Iterator[tuple[Shard, Copy]]:
        """All that is of no layer."""
        yield from ((shard, copy) for shard, copy in self.tensors() if not copy.target.startswith(LAYERS))

    def _of(self, wanted: Callable[[str], bool]) -> Found:
        copies = [[copy for copy in of_shard if wanted(copy.target)] for of_shard in self._found.copies]
        return msgspec.structs.replace(self._found, copies=copies)

    def _make(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)


def raw(shard: Shard, copy: Copy) -> torch.Tensor:
    """A tensor as the file has it, on the CPU."""
    data = torch.empty(copy.entry.n_bytes, dtype=torch.uint8)
    with open_shard(shard) as descriptor:
        read_into(descriptor, data.numpy().data, copy.entry.start, shard.path)
    return data.view(TORCH_DTYPES[copy.entry.dtype]).view(copy.entry.shape)
