"""`Found`: what the files of a checkpoint give to a model, as `loader` matched them from headers alone."""

from __future__ import annotations

import msgspec

from quire.compute.schemes.coded import Source
from quire.compute.weights.checkpoint import Shard
from quire.compute.weights.coded import CodedTensor
from quire.compute.weights.header import Entry
from quire.compute.weights.names import Rows


class Copy(msgspec.Struct, frozen=True):
    """One tensor to read and where it goes."""

    entry: Entry
    target: str
    """Name among the model's weights."""
    compare: bool = False
    """Do not write: the target is loaded already and must be equal."""
    rows: Rows = Rows()
    """How they are ordered in the file."""


class Found(msgspec.Struct, frozen=True):
    """Of one checkpoint."""

    shards: list[Shard]
    copies: list[list[Copy]]
    """Of each shard."""
    coded: list[CodedTensor]
    in_gguf: bool
    zeros: list[list[Entry]] = []
    """Tensors of each shard that are read only to see that they are zero: the model has none of their names."""

    @property
    def gguf_entries(self) -> dict[str, Entry] | None:
        """Name of a parameter → tensor of a GGUF file."""
        return {copy.target: copy.entry for copy in self.copies[0] if not copy.compare} if self.in_gguf else None

    @property
    def sources(self) -> dict[str, Source]:
        """Name of a parameter, or of several as one → its coding."""
        return {one.target: one.source for one in self.coded}

    @property
    def n_bytes(self) -> int:
        """To read."""
        plain = sum(copy.entry.n_bytes for shard_copies in self.copies for copy in shard_copies)
        zeros = sum(entry.n_bytes for entries in self.zeros for entry in entries)
        return plain + zeros + sum(one.n_bytes for one in self.coded)
