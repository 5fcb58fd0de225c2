"""Which scheme each matrix of a model has: by --quantization, by the device, and by what a GGUF file holds.

Owns the choice. Does not own the schemes. Invariant: the choice needs shapes and headers only, no weights, so that
memory can be counted before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from quire.compute.schemes import integers
from quire.compute.schemes.coded import Source
from quire.compute.schemes.fp4 import Fp4
from quire.compute.schemes.holding import holding, in_banks
from quire.compute.schemes.packed import HELD, Blocks, Held, Packed, Rounded, Scheme
from quire.compute.schemes.plain import OneDnn, Plain, can_reorder
from quire.compute.schemes.scheme import FilledScheme, MatrixScheme
from quire.compute.schemes.w4a16 import GROUPS, Int4, RoundedInt4
from quire.compute.schemes.w8a8 import RoundedEightBits
from quire.compute.weights.header import Entry
from quire.config.arch import ModelArch
from quire.config.parameters import EMBEDDING, HEAD, Kept, Matrix, matrices
from quire.config.resolve import NOT_ROUNDED
from quire.kernels import native
from quire.kernels.e4m3 import E4M3
from quire.kernels.hopper import lacks_e4m3
from quire.kernels.qgemm.weight import TILE

CPU: Final = torch.device("cpu")
TABLE: Final = f"{EMBEDDING}.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Schemes:
    """The scheme of each matrix of a model."""

    default: MatrixScheme
    own: Mapping[str, Scheme] = dataclasses.field(default_factory=dict)
    """Name of a matrix (`Matrix.name`) → its own scheme."""
    exact: Mapping[Kept, MatrixScheme] = dataclasses.field(default_factory=dict)
    """Of matrices that are not kept by scheme."""
    rounds_banks: bool = True
    """Matrices of experts are rounded too, which one launch multiplies by."""

    def of(self, matrix: Matrix) -> Scheme:
        """Of one matrix."""
        kept = Kept.FLOATING if matrix.bank and not self.rounds_banks and matrix.kept is Kept.BY_SCHEME else matrix.kept
        return self.own.get(matrix.name) or self.exact.get(kept, self.default)


def floating(device: torch.device, dtype: torch.dtype) -> MatrixScheme:
    """How matrices that nothing rounds are kept on `device`, for its fastest products."""
    if device.type == "cpu" and native.library() is not None and dtype in native.DTYPES:
        return Packed(dtype)
    return OneDnn(dtype) if can_reorder(device.type, dtype) else Plain(dtype)


def rounding(quantization: str, device: torch.device, dtype: torch.dtype) -> MatrixScheme | None:
    """What rounds the matrices of a model of `dtype`, for a value of --quantization; None: nothing does, they are in
    the model's dtype, except those that 'auto' takes from a file as they are."""
    if quantization in NOT_ROUNDED:
        return None
    if quantization == "fp8":
        return RoundedEightBits(E4M3)
    if device.type == "cpu":
        return Rounded(quantization)
    return RoundedEightBits(torch.int8) if quantization == "int8" else RoundedInt4(dtype, GROUPS[quantization])


def schemes_on(
    device: torch.device,
    dtype: torch.dtype,
    default: MatrixScheme | None = None,
    own: Mapping[str, Scheme] | None = None,
) -> Schemes:
    """For a model of `dtype`. default: None: nothing is rounded."""
    exact = {Kept.FLOATING: floating(device, dtype), Kept.FLOAT32: floating(device, torch.float32)}
    default = exact[Kept.FLOATING] if default is None else default
    needs_e4m3 = default == RoundedEightBits(E4M3)
    return Schemes(default, own or {}, exact, rounds_banks=not (needs_e4m3 and lacks_e4m3(device)))


def choose(
    quantization: str,
    device: torch.device,
    dtype: torch.dtype,
    arch: ModelArch | None = None,
    entries: Mapping[str, Entry] | None = None,
    sources: Mapping[str, Source] | None = None,
) -> Schemes:
    """For a value of --quantization and a model of `dtype`.

    entries: name of a parameter with its kind → tensor of a GGUF file; sources: → what a checkpoint has of a coded
    matrix. Either, with `arch`.
    """
    default = rounding(quantization, device, dtype)
    if arch is None or entries is None:
        held = {} if arch is None else holding(quantization, device, dtype, arch, sources or {})
        return schemes_on(device, dtype, default, held)
    allowed = _allowed(quantization, device, dtype)
    by_scheme = (matrix for matrix in matrices(arch) if matrix.kept is Kept.BY_SCHEME)
    found = {matrix.name: holder(parts_of(matrix, arch, entries).values(), allowed) for matrix in by_scheme}
    own = {name: scheme for name, scheme in found.items() if scheme is not None}
    return schemes_on(device, dtype, default, in_banks(own, arch) if device.type == "cuda" else own)


def parts_of(matrix: Matrix, arch: ModelArch, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Name of a parameter → the tensor of a file with its blocks, in the order of a matrix's rows. A tied head has the
    blocks of the embedding, which are read a second time for the table itself."""
    is_tied = arch.tie_embeddings and matrix.name == HEAD
    names = [TABLE] if is_tied else [f"{name}.weight" for name, _ in matrix.parts]
    return {name: entries[name] for name in names}


def holder(parts: Iterable[Entry], allowed: Held) -> FilledScheme | None:
    """The smallest of the allowed schemes for a matrix of these parts, in the order of rows; None where none can hold
    their types or, on a CPU, one ends within a tile."""
    entries = list(parts)
    if any(entry.shape[0] % TILE for entry in entries[:-1]):
        allowed = {one: types for one, types in allowed.items() if not isinstance(one, Blocks)}
    return next((one for one, types in allowed.items() if all(entry.dtype in types for entry in entries)), None)


def _allowed(quantization: str, device: torch.device, dtype: torch.dtype) -> Held:
    """Which may hold matrices for a value of --quantization: without one, any that is fast here."""
    held = held_on(device, dtype)
    if quantization == "auto":
        return held if device.type != "cpu" or native.library() is not None else {}
    asked = (quantization, quantization.partition("-")[0])  # another group is no reason to round again
    return {scheme: types for scheme, types in held.items() if scheme.name in asked}


def held_on(device: torch.device, dtype: torch.dtype) -> Held:
    """On a GPU Q4_0 is whole numbers of 4 bits in groups of 32, and MXFP4 what it is; other types are decoded."""
    if device.type == "cpu":
        return {**HELD, integers.MXFP4: ("MXFP4",)}
    return {Int4(dtype, 32): ("Q4_0",), Fp4(nv=False): ("MXFP4",)}
