"""The parameters of a decoder, derived from its description: names, shapes, how they are cut, and which are one matrix.

Owns the names that checkpoints of Llama have, which Quire uses for all (a family maps its own to them). Does not own
what a matrix is stored as (`compute/schemes`), nor what a rank's part of it is (`shares`). Everything that counts,
loads or fills parameters reads them from here.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from quire.config.layers import LayerSpec, NormSpec, Placement

if TYPE_CHECKING:
    from quire.config.arch import ModelArch

EMBEDDING: Final = "model.embed_tokens"
POSITIONS: Final = "model.embed_positions"
FINAL_NORM: Final = "model.norm"
HEAD: Final = "lm_head"
LAYER: Final = "model.layers.{}."


@enum.unique
class Cut(enum.Enum):
    """How a matrix is divided among ranks (Shoeybi et al. 2019, "Megatron-LM", section 3)."""

    REPLICATED = "replicated"
    """Every rank has all of it."""
    COLUMN = "column"
    """Outputs are divided: each rank makes its own, of the whole input. (Columns of the transposed matrix.)"""
    ROW = "row"
    """Inputs are divided: each rank makes a term of every output, to be summed over ranks."""
    VOCABULARY = "vocabulary"
    """Rows are divided as COLUMN, in the order of token ids; the last rank has fewer where they do not divide."""
    EXPERT = "expert"
    """One rank has all of it, or several have, and the others nothing: see `Matrix.turns`."""


@enum.unique
class Kept(enum.Enum):
    """In what numbers a matrix is kept, whatever its scheme could."""

    BY_SCHEME = "by_scheme"
    """As the scheme says."""
    FLOATING = "floating"
    """Never rounded: in the model's dtype."""
    FLOAT32 = "float32"
    """And what it multiplies too."""


class Section(msgspec.Struct, frozen=True):
    """Rows of a parameter that are divided among ranks by themselves, where it has several kinds under one another."""

    n_rows: int
    unit: int = 1
    """Rows that stay together."""
    is_repeated: bool = False
    """Several ranks have the same unit, where there are fewer units than ranks."""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Projections of one input, under one another in one matrix [n_out, n_in]."""

    n_in: int
    parts: tuple[tuple[str, int], ...]
    """(name, rows) of each projection."""
    bias: bool = False
    whole: str = ""
    """Name under which a checkpoint may hold all of them as one."""
    cut: Cut = Cut.REPLICATED
    unit: int = 1
    """Outputs of a part (`Cut.COLUMN`) or inputs (`Cut.ROW`) that stay together: those of a head."""
    n_repeated: int = 0
    """Last parts of which several ranks have the same unit, where there are fewer units than ranks: keys and values."""
    sections: tuple[tuple[Section, ...], ...] = ()
    """Of each part (`Cut.COLUMN`); (): each part is one, with `unit` and `n_repeated`."""
    kept: Kept = Kept.BY_SCHEME
    bank: str = ""
    """Name that it shares with those alike, one of each expert, which a device may multiply by together; '': alone."""
    turns: tuple[tuple[int, ...], int] = ((0,), 1)
    """(numbers, of how many) of its copies among matrices that are alike, of which each rank has as many neighbours
    (`Cut.EXPERT`). A number that is not among them is of no rank here."""

    @property
    def name(self) -> str:
        """Of its first part."""
        return self.parts[0][0]

    @property
    def n_out(self) -> int:
        """Rows of all projections."""
        return sum(rows for _, rows in self.parts)


class NormTable(msgspec.Struct, frozen=True, kw_only=True):
    """The weight, and the bias, of a norm."""

    name: str
    shape: tuple[int, ...]
    spec: NormSpec
    is_apart: bool = False
    """Each row is a tensor of its own, under the name with its number."""
    cut: Cut = Cut.REPLICATED
    """COLUMN: its rows are heads, which are divided."""
    is_repeated: bool = False
    """See `Matrix.n_repeated`."""
    unit: int = 1
    """Rows of a head then, where the table has one dimension."""
    first_row: int = 0
    """In the whole table, of a rank's part of one."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Name of each tensor, without its kind."""
        rows = range(self.first_row, self.first_row + self.shape[0])
        return tuple(f"{self.name}.{row}" for row in rows) if self.is_apart else (self.name,)


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the model's dtype that no scheme stores in another way: the layer reads them as they are."""

    name: str
    """Without its kind."""
    shape: tuple[int, ...]
    kind: str = "weight"
    """What its name ends in."""
    is_float32: bool = False
    """Whatever the model's dtype is."""
    cut: Cut = Cut.REPLICATED
    """COLUMN: rows are divided."""
    unit: int = 1
    """Rows that stay together then."""
    sections: tuple[Section, ...] = ()
    """Of its rows; (): they are one."""


class MixerParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a mixer stores, by the place that it has there (`MixerSpec.parameters`)."""

    matrices: Mapping[str, Matrix]
    """In the order of computing; 'out' is the last."""
    norms: Mapping[str, NormTable] = {}
    tensors: Mapping[str, Tensor] = {}


class FfnParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a feed-forward stores, by the place that it has there (`FfnSpec.parameters`)."""

    matrices: Mapping[str, Matrix]
    """In the order of computing."""
    tensors: Mapping[str, Tensor] = {}


class LayerParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer stores, by the place that it has there. Norms that do not exist, or store nothing, are None."""

    mixer: MixerParameters
    ffn: FfnParameters
    attention_norm: NormTable | None
    attention_post_norm: NormTable | None
    ffn_norm: NormTable | None
    ffn_post_norm: NormTable | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """In the order of computing."""
        return *self.mixer.matrices.values(), *self.ffn.matrices.values()

    @property
    def norms(self) -> tuple[NormTable, ...]:
        """Those that exist."""
        around = (self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm)
        return *(norm for norm in around if norm is not None), *self.mixer.norms.values()


def layer_parameters(spec: LayerSpec, hidden_size: int, layer: int) -> LayerParameters:
    """The parameters of layer number `layer`."""
    at = LAYER.format(layer)
    placement = spec.placement

    def norm(name: str) -> NormTable:
        return NormTable(name=at + name, shape=(hidden_size,), spec=spec.norm)

    before = placement is not Placement.AFTER
    after = placement in (Placement.AFTER, Placement.BOTH)
    ffn = spec.ffn.parameters(at, hidden_size)
    own_ffn_norm = placement in (Placement.BEFORE, Placement.BOTH, Placement.PARALLEL) and bool(ffn.matrices)
    return LayerParameters(
        mixer=spec.mixer.parameters(at, hidden_size),
        ffn=ffn,
        attention_norm=norm("input_layernorm") if before else None,
        attention_post_norm=norm("attention_post_norm") if after else None,
        ffn_norm=norm("post_attention_layernorm") if own_ffn_norm else None,
        ffn_post_norm=norm("ffn_post_norm") if after else None,
    )  # fmt: skip


def final_norm(arch: ModelArch) -> NormTable:
    """The norm before the head."""
    return NormTable(name=FINAL_NORM, shape=(arch.hidden_size,), spec=arch.norm)


def embedding(arch: ModelArch) -> Matrix:
    """The table of tokens. Nothing is multiplied by it, but it is cut like a matrix, and as the head."""
    return Matrix(n_in=arch.hidden_size, parts=((EMBEDDING, arch.vocab_size),), cut=Cut.VOCABULARY)


def head(arch: ModelArch) -> Matrix:
    """The output head, which is the embedding where these are tied."""
    return Matrix(n_in=arch.hidden_size, parts=((HEAD, arch.vocab_size),), bias=arch.head_bias, cut=Cut.VOCABULARY)


def matrices(arch: ModelArch) -> Iterator[Matrix]:
    """All of them in the order of computing, the head last, tied or not."""
    for layer, spec in enumerate(arch.layers):
        yield from layer_parameters(spec, arch.hidden_size, layer).matrices
    yield head(arch)


def shapes(arch: ModelArch) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name with its kind, shape) of every stored parameter, a tied head left out."""
    yield f"{EMBEDDING}.weight", (arch.vocab_size, arch.hidden_size)
    if arch.n_positions:
        yield f"{POSITIONS}.weight", (arch.n_positions, arch.hidden_size)
    for layer, spec in enumerate(arch.layers):
        parameters = layer_parameters(spec, arch.hidden_size, layer)
        for matrix in parameters.matrices:
            yield from _of_matrix(matrix)
        for norm in parameters.norms:
            yield from _of_norm(norm)
        for tensor in (*parameters.mixer.tensors.values(), *parameters.ffn.tensors.values()):
            yield f"{tensor.name}.{tensor.kind}", tensor.shape
    yield from _of_norm(final_norm(arch))
    if not arch.tie_embeddings:
        yield from _of_matrix(head(arch))


def n_parameters(arch: ModelArch) -> int:
    """Numbers stored, a tied head counted once."""
    return sum(math.prod(shape) for _, shape in shapes(arch))


def _of_matrix(matrix: Matrix) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in matrix.parts:
        yield f"{name}.weight", (rows, matrix.n_in)
        if matrix.bias:
            yield f"{name}.bias", (rows,)


def _of_norm(norm: NormTable) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = norm.shape[1:] if norm.is_apart else norm.shape
    for name in norm.parts:
        if norm.spec.weight:
            yield f"{name}.weight", shape
        if norm.spec.bias:
            yield f"{name}.bias", shape
