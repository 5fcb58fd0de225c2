"""What a rank has of every parameter of a model: each matrix as its scheme cuts it, norms of heads, the vocabulary.

Owns the sum of it: a rank's own description and parameters, and where they lie in those of the whole. Does not own the
arithmetic (`config/shares`) nor what schemes say (`compute/schemes`). Invariant: of the only rank, everything is whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.compute.schemes.choice import Schemes
from quire.config.arch import ModelArch
from quire.config.parameters import Cut, LayerParameters, Matrix, NormTable, Tensor, embedding, head, layer_parameters
from quire.config.shares import Region, Share, is_held, share, share_arch, share_norm, share_tensor
from quire.config.stages import LayerRange, stage_arch


class RankParts:
    """Of one rank."""

    def __init__(
        self, arch: ModelArch, schemes: Schemes, rank: int, n_ranks: int, layers: LayerRange | None = None
    ) -> None:
        """arch: the whole model. rank, n_ranks: among those that share each layer; layers: those that they have, None:
        all. Raises ConfigError where the model, or a matrix under its scheme, cannot be divided."""
        self._schemes, self._rank, self._n_ranks = schemes, rank, n_ranks
        self.whole = arch
        layers = LayerRange(0, arch.n_layers, arch.n_layers) if layers is None else layers
        self.range = layers
        self.arch = stage_arch(share_arch(arch, rank, n_ranks), layers)
        self._cuts: list[tuple[Matrix, Share]] = []
        """(whole, share) of what is divided."""
        self._norms: list[tuple[NormTable, NormTable]] = []
        self._tensors: dict[str, Region] = {}
        self.layers = [
            self._layer(layer_parameters(arch.layers[layer], arch.hidden_size, layer))
            for layer in range(layers.first, layers.end)
        ]
        self.embedding = self._cut(embedding(arch), share(embedding(arch), rank, n_ranks))
        whole = head(arch)
        self.head = self._cut(whole, schemes.of(whole).cut(whole, rank, n_ranks))

    def _layer(self, whole: LayerParameters) -> LayerParameters:
        held = {
            place: matrix for place, matrix in whole.ffn.matrices.items() if is_held(matrix, self._rank, self._n_ranks)
        }
        if self._n_ranks == 1:
            return msgspec.structs.replace(whole, ffn=msgspec.structs.replace(whole.ffn, matrices=held))
        mixer = msgspec.structs.replace(
            whole.mixer,
            matrices={place: self._matrix(matrix) for place, matrix in whole.mixer.matrices.items()},
            norms={place: self._norm(table) for place, table in whole.mixer.norms.items()},
            tensors={place: self._tensor(table) for place, table in whole.mixer.tensors.items()},
        )
        ffn = {place: self._matrix(matrix) for place, matrix in held.items()}
        return msgspec.structs.replace(whole, mixer=mixer, ffn=msgspec.structs.replace(whole.ffn, matrices=ffn))

    def _matrix(self, whole: Matrix) -> Matrix:
        return self._cut(whole, self._schemes.of(whole).cut(whole, self._rank, self._n_ranks)).matrix

    def _norm(self, whole: NormTable) -> NormTable:
        mine = share_norm(whole, self._rank, self._n_ranks)
        if whole.cut is not Cut.REPLICATED:
            self._norms.append((whole, mine))
        return mine

    def _tensor(self, whole: Tensor) -> Tensor:
        mine, rows = share_tensor(whole, self._rank, self._n_ranks)
        if whole.cut is not Cut.REPLICATED:
            self._tensors[f"{whole.name}.{whole.kind}"] = Region(rows)
        return mine

    def _cut(self, whole: Matrix, mine: Share) -> Share:
        if self._n_ranks > 1 and whole.cut not in (Cut.REPLICATED, Cut.EXPERT):
            self._cuts.append((whole, mine))
        return mine

    def cuts(self) -> dict[str, tuple[Matrix, Share]]:
        """Name of a matrix → the whole one, and this rank's share; not those of which it has all."""
        return {whole.name: (whole, mine) for whole, mine in self._cuts}

    def regions(self) -> dict[str, Region]:
        """Name of a parameter with its kind, or of several as one, → its place, where it is not all of it."""
        matrices = {name: region for cut in self._cuts for name, region in _of_matrix(*cut)}
        return (
            matrices
            | self._tensors
            | {
                f"{mine.name}.{kind}": Region(((mine.first_row, mine.shape[0]),))
                for whole, mine in self._norms
                if not whole.is_apart
                for kind in ("weight", "bias")
            }
        )


def _of_matrix(whole: Matrix, mine: Share) -> Iterator[tuple[str, Region]]:
    if whole.cut is Cut.ROW:
        columns = (mine.first_column, mine.matrix.n_in)
        yield f"{whole.name}.weight", Region(((0, whole.n_out),), columns)
        return
    ranges, start = [], 0
    for (name, n_rows), rows in zip(whole.parts, mine.rows, strict=True):
        for kind in ("weight", "bias"):
            yield f"{name}.{kind}", Region(rows)
        ranges += [(start + first, number) for first, number in rows]
        start += n_rows
    if whole.whole:
        for kind in ("weight", "bias"):
            yield f"{whole.whole}.{kind}", Region(tuple(ranges))
