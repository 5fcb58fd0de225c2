"""`Reader`: how the tensors of one layout of a checkpoint are a coded matrix.

Owns the interface, and the bits that layouts share. Does not own the layouts (its siblings, a file for each), files or
targets (`weights/coded`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.header import Entry
from quire.config.codings import Coding

Shape = tuple[int, ...]
Kinds = Mapping[str, tuple[tuple[Shape, ...], tuple[str, ...]]]
"""Kind of a tensor → (shapes that it may have, dtypes that it may have)."""
FLOATS: Final = ("F16", "BF16", "F32")
WORD_BITS: Final = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Of one layout."""

    kinds: tuple[str, ...]
    """Ends of its tensors' names, behind the module's; the longest first where one is the end of another."""
    needed: Callable[[Coding], Iterable[str]]
    """Those that each matrix has."""
    allowed: Callable[[Coding, int, int], Kinds]
    """What they may be, for a matrix [n, k]; what is not here may be anything and is not looked at."""
    read: Callable[[Coding, Mapping[str, torch.Tensor], int, int], Coded]
    """coding, kind → tensor, n, k → the matrix. Raises ValueError where numbers contradict the coding."""
    more: Callable[[Coding, Mapping[str, Entry], int, int], str] = lambda *_: ""
    """What is wrong with the tensors of a matrix beside their shapes, in words; or nothing."""


def n_groups(coding: Coding, k: int) -> int:
    """Scales of one output."""
    return -(-k // coding.group) if coding.group else 1


def words_of(number: int, bits: int) -> int:
    """Words of 32 bits that hold that many numbers."""
    return -(-number * bits // WORD_BITS)


def check_order(index: torch.Tensor | None, name: str, coding: Coding, k: int, key: str) -> None:
    """ValueError where a table gives inputs other groups than their neighbours', and the coding has no such table. key:
    what would say that there is one, and with which value. -1 stands for no group, in tables that were never filled."""
    if index is None or coding.act_order or bool((index == -1).any()):
        return
    if not torch.equal(index.long(), torch.arange(k) // (coding.group or k)):
        raise ValueError(f"{name} has groups in another order than inputs, which are read where config.json has {key}")


def unpack(words: torch.Tensor, bits: int, number: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """int32 [r, words], or bytes → uint8 [r, number]: of each word the lowest bits first, or in the order of these
    places."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :number]
    mask, each = (1 << bits) - 1, 8 // bits
    if order:
        octets = octets.view(len(words), -1, WORD_BITS // 8)
        fields = [octets[:, :, place // each] >> place % each * bits & mask for place in order]
    else:
        fields = [octets >> shift & mask for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=2).flatten(1)[:, :number]
