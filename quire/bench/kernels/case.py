"""What is measured: cases, who takes part in them, and checks against the reference. Plain values; measures nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

from quire.bench.kernels.limits import Work
from quire.bench.kernels.timing import Call, Timer

RANDOM_BLOCK = 1 << 20


class NotRun(Exception):
    """A contender cannot take part, and why. Not a failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """Where and in which type a run measures."""

    timer: Timer
    dtype: torch.dtype
    quick: bool = False

    @property
    def device(self) -> torch.device:
        return self.timer.device

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal random values; on CPU a large tensor repeats a block of them."""
        dtype = dtype or self.dtype
        made = torch.empty(shape, dtype=dtype, device=self.device)
        if self.device.type != "cpu" or made.numel() <= RANDOM_BLOCK:
            return made.normal_()
        block, flat = torch.randn(RANDOM_BLOCK).to(dtype), made.view(-1)
        for start in range(0, len(flat), RANDOM_BLOCK):
            part = flat[start : start + RANDOM_BLOCK]
            part.copy_(block[: len(part)])
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """An implementation or a peer in one case."""

    name: str
    make: Callable[[], Sequence[Call]]
    """One call for each copy of the inputs. Raises NotRun with the reason when it cannot take part."""
    is_peer: bool = False
    capture: bool = True
    """Its calls may go into a CUDA graph."""
    on_host: bool = False
    """The host's time counts, whatever the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One size of one op."""

    op: str
    name: str
    work: Work | None
    """None: only the time counts (work of the host)."""
    contenders: Callable[[], Iterable[Contender]]
    """Makes the inputs; they live as long as the contenders."""
    kind: str = ""
    """The checks of this kind, of the same op, test what is timed here; '': there is no result to test, as of a plan
    of the host."""
    in_flops: bool = False
    """Its rate is told in FLOP/s, else in bytes a second."""
    baseline: str = ""
    """Name of the case whose time of the same implementation is the unit of the ratio."""
    quick: bool = False
    """Part of a --quick run."""
    prepare: Callable[[], object] | None = None
    """Builds what its implementations need, without inputs; several may run in threads at the same time."""
    prepare_key: Hashable = None
    """Cases of one key need the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One comparison of one implementation with the float64 reference: of as many rows or experts as do, but of the
    sizes for which what is timed was built."""

    op: str
    name: str
    """Also of the kind of cases whose implementations it tests."""
    implementation: str
    error: Callable[[], float]
    """Largest error, as the op's reference.py defines it. Raises NotRun."""
    tolerance: float
    quick: bool = True
    """Part of a --quick run that times nothing of its kind."""
