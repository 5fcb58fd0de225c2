"""Which coded matrices of a checkpoint are kept as they are, and by which scheme; the others are decoded.

Owns the choice for a device. Does not own what a scheme can hold (its siblings), nor how matrices are read
(`weights/coded`). Invariant: the choice needs shapes and headers only.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from quire.compute.schemes import fp4, integers, w4a16, w8a8
from quire.compute.schemes.coded import Source
from quire.compute.schemes.scheme import FilledScheme
from quire.config.arch import ModelArch
from quire.config.parameters import Kept, Matrix, matrices
from quire.kernels import native
from quire.kernels.qgemm.weight import TILE

Holder = Callable[[Matrix, Sequence[Source], torch.device, torch.dtype], FilledScheme | None]
"""(matrix, what the file has of its parts, or of all as one, device, the model's dtype) → what holds it as it is; None:
nothing does."""


def holding(
    quantization: str, device: torch.device, dtype: torch.dtype, arch: ModelArch, sources: Mapping[str, Source]
) -> dict[str, FilledScheme]:
    """Name of a matrix → what holds it, for a value of --quantization and a model of `dtype`.

    sources: name of a parameter with its kind, or of several as one → what the file has.
    """
    found = {}
    for matrix in matrices(arch) if sources else ():
        names = [f"{matrix.whole}.weight"]
        if names[0] not in sources:
            names = [f"{name}.weight" for name, _ in matrix.parts]
        if matrix.kept is not Kept.BY_SCHEME or any(name not in sources for name in names):
            continue
        own = [sources[name] for name in names]
        schemes = (holder(matrix, own, device, dtype) for holder in HOLDERS.get(device.type, ()))
        asked = (quantization, quantization.partition("-")[0])  # another group is no reason to round again
        allowed = (one for one in schemes if one is not None and (quantization == "auto" or one.name in asked))
        scheme = next(allowed, None)
        if scheme is not None:
            found[matrix.name] = scheme
    return in_banks(found, arch) if device.type == "cuda" else found


def in_banks(found: dict[str, FilledScheme], arch: ModelArch) -> dict[str, FilledScheme]:
    """Without those of experts that are not alike: on a GPU one launch multiplies by all of a layer."""
    banks: dict[str, list[str]] = collections.defaultdict(list)
    for matrix in matrices(arch):
        if matrix.bank:
            banks[matrix.bank].append(matrix.name)
    left = dict(found)
    for names in banks.values():
        schemes = {found.get(name) for name in names}
        scheme = schemes.pop()
        if schemes or scheme is None or not scheme.makes_banks:
            for name in names:
                left.pop(name, None)
    return left


def on_cpu(matrix: Matrix, sources: Sequence[Source], device: torch.device, dtype: torch.dtype) -> FilledScheme | None:
    """Integers alike, where no part ends within a tile of the kernels."""
    found = {integers.holder(source) for source in sources}
    is_whole = len(sources) == 1 or all(rows % TILE == 0 for _, rows in matrix.parts[:-1])
    return found.pop() if len(found) == 1 and is_whole and native.library() is not None else None


HOLDERS: Final[dict[str, tuple[Holder, ...]]] = {
    "cpu": (on_cpu,),
    "cuda": (w8a8.holder, w4a16.holder, fp4.holder),
}
"""Type of a device → who is asked, in order."""
