"""Packed weights: what the numbers of a format are, and where they lie in memory.

Owns the formats, rounding of weights and the layout that csrc/cpu/linear.cpp reads; owns no product. The layout is the
same for every instruction set. Invariant: `unpack(packed)` gives back exactly the integers that `pack` laid out.
"""

from __future__ import annotations

import dataclasses
import typing

import torch
import torch.nn.functional as F

from quire.kernels.qgemm.arena import arena

Scheme = typing.Literal["int8", "int4"]
SCHEMES: tuple[Scheme, ...] = typing.get_args(Scheme)
Format = typing.Literal["int8", "int4", "float32", "bfloat16", "float16"]
FORMATS: tuple[Format, ...] = typing.get_args(Format)
"""In the order of QuireFormat in csrc/cpu/quire_cpu.h."""
FLOATS: dict[torch.dtype, Format] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Types that are packed as they are."""

GROUP = 32
"""Values along k that share a scale in int4; k is padded with zeros to a multiple of it in both schemes."""
TILE = 64
"""Output channels that lie together; n is padded with zeros to a multiple of it."""
MAX_K = 1 << 17
"""Beyond it a sum of products may not fit 32 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [n, k]; weight = integer * scale, or the number itself."""

    scheme: Format
    n: int
    k: int
    data: torch.Tensor
    """float32, float16: [n/64, k, 64]. bfloat16: [n/64, k/2, 64, 2]. The others uint8. int8: [n/64, k/4, 64, 4], the
    integer plus 128. int4: [n/64, k/32, 4, 64, 4], two integers plus 8: in the low half that of a k of the group's
    first 16, in the high half that of the k 16 further."""
    scales: torch.Tensor
    """int8: float32 [n]. int4: bfloat16 [n/64, k/32, 64]. Both with n padded. Else empty."""

    @property
    def n_bytes(self) -> int:
        """Of data and scales: what a product reads."""
        return self.data.nbytes + self.scales.nbytes

    def dequantized(self) -> torch.Tensor:
        """float32 [n, k]."""
        if self.scheme not in SCHEMES:
            return unpack_floats(self).float()
        integers, scales = unpack(self)
        wide = integers.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]
        return wide.flatten(1)[:, : self.k].contiguous()


def pack(weight: torch.Tensor, scheme: Scheme) -> PackedWeight:
    """See op.py."""
    n, k = weight.shape
    padded = F.pad(weight.detach().float(), (0, -k % GROUP, 0, -n % TILE))
    integers, scales = quantized(padded, scheme)
    if not bool(scales.isfinite().all()):
        raise ValueError(f"weight [{n}, {k}] holds an infinity or a NaN: it cannot be quantised to {scheme}")
    if scheme == "int8":
        lines = (integers + 128).to(torch.uint8).view(-1, TILE, padded.shape[1] // 4, 4)
        return PackedWeight(scheme, n, k, lines.transpose(1, 2).contiguous(), scales.flatten())
    halves = (integers + 8).to(torch.uint8).view(-1, TILE, padded.shape[1] // GROUP, 2, GROUP // 8, 4)
    packed = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).permute(0, 2, 3, 1, 4).contiguous()
    scales = scales.bfloat16().view(-1, TILE, scales.shape[1]).transpose(1, 2).contiguous()
    return PackedWeight(scheme, n, k, packed, scales)


def pack_floats(weight: torch.Tensor) -> PackedWeight:
    """See op.py."""
    n, k = weight.shape
    name = FLOATS[weight.dtype]
    unit = 2 if name == "bfloat16" else 1
    whole = n % TILE == 0 and k % unit == 0
    padded = weight.detach().contiguous() if whole else F.pad(weight.detach(), (0, -k % unit, 0, -n % TILE))
    lines = padded.view(-1, TILE, padded.shape[1] // unit, unit)
    if unit == 2:  # pairs move as 32 bits
        lines = lines.view(torch.int32)
    lines = lines.transpose(1, 2)
    data = arena().empty(lines.shape, lines.dtype).copy_(lines).view(weight.dtype)
    return PackedWeight(name, n, k, data if unit == 2 else data.squeeze(3), weight.new_empty(0))


def unpack_floats(packed: PackedWeight) -> torch.Tensor:
    """The matrix [n, k] in its own type."""
    lines = packed.data if packed.data.dim() == 4 else packed.data.unsqueeze(3)
    return lines.transpose(1, 2).flatten(2).flatten(0, 1)[: packed.n, : packed.k]


def quantized(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, k] → float32 integers [n, k] and scales [n, 1 or k / 32], in int4 rounded to bfloat16.

    int8: -127..127, the largest magnitude of a row is 127. int4: -8..7, the value of largest magnitude of a group is
    -8 (the choice of llama.cpp's Q4_0).
    """
    if scheme == "int8":
        groups = weight[:, None, :]
        scales = groups.abs().amax(-1) / 127
        low, high = -127, 127
    else:
        groups = weight.unflatten(1, (-1, GROUP))
        least, most = groups.aminmax(dim=-1)
        scales = (torch.where(-least > most, least, most) / -8).bfloat16().float()
        low, high = -8, 7
    divided = groups / torch.where(scales == 0, 1.0, scales)[:, :, None]
    return divided.round_().clamp_(low, high).flatten(1), scales


def unpack(packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [n, k padded] and float32 scales [n, 1 or k / 32]."""
    if packed.scheme == "int8":
        integers = packed.data.transpose(1, 2).flatten(2).flatten(0, 1).to(torch.int16) - 128
        scales = packed.scales[:, None]
    else:
        halves = torch.stack((packed.data & 15, packed.data >> 4), dim=2).permute(0, 4, 1, 2, 3, 5)
        integers = halves.flatten(2).flatten(0, 1).to(torch.int16) - 8
        scales = packed.scales.transpose(1, 2).flatten(0, 1).float()
    return integers[: packed.n].to(torch.int8), scales[: packed.n]
