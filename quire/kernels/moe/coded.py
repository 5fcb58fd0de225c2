"""A matrix of each expert in codes of 8 or 4 bits with scales, all in one tensor.

Owns the layout: that of `kernels/w8a8`, `w4a16` and `mxfp4` with the experts in front, and scales of a row side by
side; and whether what is multiplied by it is rounded. Does not own products.
Invariant: a weight is (code - zero) * scale, or what e2m1 says of the code times a power of two, or times a scale and a
factor.
"""

from __future__ import annotations

import dataclasses
import enum

import torch

from quire.kernels import mxfp4, nibbles, w4a16
from quire.kernels.mxfp4 import reference as fp4_reference
from quire.kernels.w4a16 import reference as int4_reference
from quire.kernels.w8a8 import BLOCK


@enum.unique
class Codes(enum.Enum):
    """What codes are; each has the scales of the op that is named."""

    BYTES = "bytes"
    """int8 or e4m3 (w8a8): a scale for each output, or for each block of 128 x 128."""
    INT4 = "int4"
    """Whole numbers (w4a16): a scale, and perhaps a zero point, for each group of inputs."""
    FP4 = "fp4"
    """e2m1 (mxfp4): an exponent for each 32 inputs; or an e4m3 for each 16, and a factor for each output."""


@dataclasses.dataclass(frozen=True, slots=True)
class CodedMatrices:
    """A matrix [n, k] of each of E experts."""

    kind: Codes
    k: int
    codes: torch.Tensor
    """[E, n, k] int8 or float8_e4m3fn; of 4 bits [E, n, nibbles.n_words(k)] int32. Contiguous."""
    scales: torch.Tensor
    """BYTES: float32 [E, n], or [E, ceil(n / 128), ceil(k / 128)]; INT4: [E, n, lines] of x's dtype, the lines of
    `Int4Weight`; FP4: [E, n, ceil(k / group)] uint8. Contiguous."""
    group: int = 0
    """Inputs that share a scale; 0: all."""
    has_zeros: bool = False
    """INT4: behind the scales of each group stand its zero points."""
    factors: torch.Tensor | None = None
    """FP4, those of NVFP4: float32 [E, n]."""

    def __post_init__(self) -> None:
        """Raises ValueError on a mismatch."""
        n_experts, n, width = self.codes.shape
        in_words = self.kind is not Codes.BYTES
        if width != (nibbles.n_words(self.k) if in_words else self.k):
            raise ValueError(f"codes {tuple(self.codes.shape)} are not of {self.k} columns in {self.kind.value}")
        n_groups = -(-self.k // self.group) if self.group else 1
        lines = {
            Codes.BYTES: (-(-n // BLOCK), n_groups) if self.group else (n,),
            Codes.INT4: (n, n_groups * (1 + self.has_zeros)),
            Codes.FP4: (n, n_groups),
        }
        if self.scales.shape != (n_experts, *lines[self.kind]):
            raise ValueError(
                f"scales {tuple(self.scales.shape)} of [{n_experts}, {n}, {self.k}] in {self.kind.value} and groups of"
                f" {self.group} must be {[n_experts, *lines[self.kind]]}"
            )
        steps = {Codes.BYTES: (0, BLOCK), Codes.INT4: (0, 32), Codes.FP4: self._fp4_blocks}[self.kind]
        if self.group not in steps and not (self.kind is Codes.INT4 and self.group % 64 == 0):
            known = " or ".join(map(str, steps))
            raise ValueError(f"groups of {self.group} columns in {self.kind.value} must be {known}")
        if not (self.codes.is_contiguous() and self.scales.is_contiguous()):
            raise ValueError("codes and scales must be contiguous")
        if self.factors is not None and (
            self.factors.shape != (n_experts, n)
            or self.factors.dtype != torch.float32
            or not self.factors.is_contiguous()
        ):
            raise ValueError(
                f"factors {tuple(self.factors.shape)} {self.factors.dtype} must be {[n_experts, n]} float32, contiguous"
            )

    @property
    def _fp4_blocks(self) -> tuple[int, ...]:
        return (mxfp4.BLOCK,) if self.factors is None else (mxfp4.NV_BLOCK,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, n, k)."""
        return self.codes.shape[0], self.codes.shape[1], self.k

    @property
    def rounds_inputs(self) -> bool:
        """Rows that are multiplied by e4m3 are rounded to it, however many there are: each 128 columns have a scale
        where the matrix has blocks, else each row, as `w8a8.linear_fp8` does."""
        return self.codes.dtype is torch.float8_e4m3fn

    @property
    def device(self) -> torch.device:
        """Where both lie."""
        return self.codes.device

    def __getitem__(self, expert: int) -> torch.Tensor:
        """The matrix [n, k] float32 of one expert."""
        codes, scales = self.codes[expert], self.scales[expert]
        if self.kind is Codes.FP4:
            factors = None if self.factors is None else self.factors[expert]
            return fp4_reference.dequantise(mxfp4.Fp4Weight(self.k, codes, scales.T, factors), torch.float32)
        if self.kind is Codes.INT4:
            weight = w4a16.Int4Weight(self.k, self.group or self.k, codes, scales.T, self.has_zeros)
            return int4_reference.dequantise(weight).float()
        if not self.group:
            return codes.float() * scales[:, None]
        wide = scales.repeat_interleave(BLOCK, 0)[: len(codes)].repeat_interleave(BLOCK, 1)[:, : self.k]
        return codes.float() * wide


Matrices = torch.Tensor | CodedMatrices
"""A matrix of each expert: [E, n, k], or in codes."""
