"""What an adapter adds to one projection, and its tensors: shared by whoever reads files of adapters.

Owns these values. Does not own which tensor belongs where (`files`, `expert_files`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Final

import msgspec
import torch

from quire.compute.weights.header import Entry
from quire.compute.weights.names import Rows
from quire.config.families import Order
from quire.core.errors import LoadError, shown

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TENSOR_NAME: Final = re.compile(
    r"^(?:base_model\.model\.)?(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(?:\.default)?(?:\.weight)?$"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """What is added to one projection: B A."""

    a: torch.Tensor
    """float32 [rank, n_in]."""
    b: torch.Tensor
    """float32 [rows, rank], in the order of the model's rows, the scale multiplied in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A projection, or several that a checkpoint has as one, that an adapter may add to."""

    parts: tuple[tuple[str, int], ...]
    """(name, rows) of each."""
    n_in: int

    @property
    def n_out(self) -> int:
        """Rows of all."""
        return sum(rows for _, rows in self.parts)


def upright(rows: Rows) -> Rows:
    """How the rows of B differ from the model's: PEFT has B the right way round, whatever it is added to."""
    return msgspec.structs.replace(rows, order=Order.ROWS) if rows.order is Order.TRANSPOSED else rows


def check_dtype(entry: Entry, where: str) -> None:
    """LoadError unless its numbers can be used."""
    if entry.dtype not in DTYPES:
        raise LoadError(f"{where}: {shown(entry.name)} has dtype {entry.dtype}; usable are {', '.join(DTYPES)}")


def finite_tensor(content: bytes, entry: Entry, where: str) -> torch.Tensor:
    """Of a file that was read, one of DTYPES; float32, its own memory. LoadError unless it is finite."""
    raw = torch.frombuffer(bytearray(content[entry.start : entry.start + entry.n_bytes]), dtype=DTYPES[entry.dtype])
    numbers = raw.to(torch.float32).view(entry.shape)
    if not math.isfinite(float(numbers.abs().max())):
        raise LoadError(f"{where}: {shown(entry.name)} has NaN or infinite values")
    return numbers
