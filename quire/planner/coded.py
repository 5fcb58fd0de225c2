"""What becomes of the matrices of a quantised checkpoint on a device: a format of the planner for each, or none.

Owns that table for plans, from the description alone: docs/quantization.md has it in words. Does not own what the
engine does, which sees the files too (`compute/schemes/holding`), nor formats (`formats`).
Invariant: what the engine decodes has no format here.
"""

from __future__ import annotations

import collections
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.codings import Coding, Codings, Layout
from quire.config.parameters import HEAD, LAYER, Kept, Matrix, layer_parameters
from quire.config.pattern import PatternError
from quire.core.errors import ConfigError
from quire.planner.accelerators import Accelerator
from quire.planner.formats import FORMATS, Formats, WeightFormat, formats_named
from quire.planner.shape import layer_kinds

BLOCK: Final = 128
"""Outputs and inputs that share a scale of e4m3, where a GPU keeps it."""
TILE: Final = 64
"""Outputs of the CPU's kernels: a part that ends within one is decoded with its matrix."""
INT4_GROUPS: Final = (("int4-g128", 128), ("int4", 64), ("int4-g32", 32))
"""The widest first. Wider groups, or none, count as 128: a scale for so many weights is 3 % of their bytes."""
ZERO_BYTES: Final = 2
"""Of a zero point, beside its scale."""
INTEGERS: Final = (Layout.GPTQ, Layout.AWQ, Layout.PACKED)
CPU_INTEGERS: Final = (Layout.GPTQ, Layout.PACKED, Layout.SCALED)


class CodedMatrices(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of device keeps those of a checkpoint."""

    codings: Codings
    on_gpu: bool
    has_e4m3: bool
    """It multiplies it, as GPUs do from Ada on."""
    head: WeightFormat | None = None
    """None: floating numbers, or the embedding."""
    layer: int = 0
    """A plan names matrices of all layers as the first's. What the checkpoint says of this one holds for them: one in
    the middle, as writers mostly leave the first and the last as they were."""

    def of(self, matrix: Matrix) -> WeightFormat | None:
        """Of a layer's matrix; None: it is decoded, or was never coded."""
        whole = [self._named(matrix.whole)] if matrix.whole else []
        found = {self.codings.implied(self._named(name), *whole) for name, _ in matrix.parts}
        coding = found.pop()
        if found or coding is None:
            return None
        rows = [n_rows for _, n_rows in matrix.parts[:-1]]
        if self.on_gpu:
            return _on_gpu(coding, self.has_e4m3, rows, in_bank=bool(matrix.bank))
        return _on_cpu(coding, rows)

    def _named(self, name: str) -> str:
        first = LAYER.format(0)
        return LAYER.format(self.layer) + name.removeprefix(first) if name.startswith(first) else name


def formats_of(arch: ModelArch, weights: str, kv: str, device: Accelerator, dtype: str = "") -> Formats:
    """As `formats_named`; of 'auto', what the device keeps of a quantised checkpoint stays as it is. dtype: of the
    model, where it is not the checkpoint's.

    ConfigError for an unknown name, and for a pattern of the checkpoint that is not read.
    """
    formats = formats_named(weights, kv, dtype or arch.dtype)
    if weights != "auto" or arch.codings is None:
        return formats
    coded = CodedMatrices(
        codings=arch.codings, on_gpu=not device.is_host, has_e4m3=not device.is_host and "fp8" in device.flops_per_s,
        layer=arch.n_layers // 2,
    )  # fmt: skip
    try:
        if not arch.tie_embeddings:
            head = Matrix(n_in=arch.hidden_size, parts=((HEAD, arch.vocab_size),))
            coded = msgspec.structs.replace(coded, head=coded.of(head))
        main = _main(arch, coded)
    except PatternError as error:
        raise ConfigError(f"quantization_config: {error}", param="quantization_config") from None
    return formats if main is None else msgspec.structs.replace(formats, weights=main, coded=coded)


def _main(arch: ModelArch, coded: CodedMatrices) -> WeightFormat | None:
    """The format of most weights that are kept as they are; None: none is."""
    numbers: dict[WeightFormat, int] = collections.Counter()
    banks: dict[tuple[str, int], WeightFormat | None] = {}  # experts are alike, and there may be hundreds
    for kind, (spec, n_layers) in enumerate(layer_kinds(arch)):
        for one in layer_parameters(spec, arch.hidden_size, 0).matrices:
            if one.kept is not Kept.BY_SCHEME:
                continue
            bank = (one.bank or one.name, kind)
            kept = banks[bank] if bank in banks else banks.setdefault(bank, coded.of(one))
            if kept is not None:
                numbers[kept] += n_layers * one.n_in * one.n_out
    return max(numbers, key=lambda one: numbers[one], default=None)


def _on_gpu(coding: Coding, has_e4m3: bool, rows: list[int], *, in_bank: bool) -> WeightFormat | None:
    """rows: of all parts but the last."""
    if coding.layout in (Layout.MXFP4, Layout.NVFP4):
        return FORMATS[coding.layout.value]
    if coding.layout in INTEGERS:
        is_kept = coding.bits == 4 and (coding.group % 64 == 0 or coding.group == 32)
        if not is_kept or (in_bank and coding.act_order):
            return None
        kept = _int4(coding.group)
        return kept if coding.symmetric else msgspec.structs.replace(kept, scale_bytes=kept.scale_bytes + ZERO_BYTES)
    if coding.layout is not Layout.SCALED or not coding.rounds_inputs or not coding.symmetric:
        return None
    if not coding.is_float:
        return None if coding.group or coding.static_inputs else FORMATS["int8"]
    if not has_e4m3:
        return None
    if not coding.group:
        return FORMATS["fp8"]
    in_blocks = (coding.block_rows, coding.group) == (BLOCK, BLOCK) and all(n % BLOCK == 0 for n in rows)
    return FORMATS["fp8-block128"] if in_blocks else None


def _on_cpu(coding: Coding, rows: list[int]) -> WeightFormat | None:
    """Whole numbers, and MXFP4, whose halves are."""
    if coding.layout is Layout.MXFP4:
        return None if any(n % TILE for n in rows) else _int4(coding.group)
    are_integers = coding.layout in CPU_INTEGERS and not coding.is_float
    if not are_integers or not coding.symmetric or coding.act_order or any(n % TILE for n in rows):
        return None
    if coding.bits == 8 and not coding.group:
        return FORMATS["int8"]
    if coding.group % 32:
        return None
    return {8: FORMATS["int8-g32"], 4: _int4(coding.group)}.get(coding.bits)


def _int4(group: int) -> WeightFormat:
    return next(FORMATS[name] for name, size in INT4_GROUPS if group % size == 0)
