"""The sum over ranks added to the residual stream, and its norm: in one launch where a `Comm` has one.

Owns what it is made of where there is none. Does not own where in a layer it stands (`layers/residual.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from quire.compute.dist.comm import Comm
from quire.kernels.gemm import Norm
from quire.kernels.norm import rms_norm

Launch = Callable[[], torch.Tensor | None]


class RankSum:
    """What the ranks' terms of a row-parallel product come to."""

    def __init__(self, comm: Comm) -> None:
        self.all_reduce = comm.all_reduce
        self._comm = comm
        self._own = getattr(comm, "add_reduced", None)
        """A comm's own launch for `add`, if it has one."""
        self._through: Callable[[Launch], torch.Tensor | None] | None = None

    @contextlib.contextmanager
    def through(self, queue: Callable[[Launch], torch.Tensor | None]) -> Iterator[None]:
        """Within it `add` is called by `queue`, and what it gives may come later: see `Device.beside`."""
        self._through = queue
        try:
            yield
        finally:
            self._through = None

    def add(self, z: torch.Tensor, x: torch.Tensor, norm: Norm | None = None) -> torch.Tensor | None:
        """z: this rank's term [n, h], which may be overwritten; x: the stream [n, h], the same on all ranks, takes the
        sum in place. norm: (weight [h], eps) → the rows of x normed, else None."""
        launch = functools.partial(self._add, z, x, norm)
        return launch() if self._through is None else self._through(launch)

    def _add(self, z: torch.Tensor, x: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        if self._own is None:
            return reduced_then_added(self._comm, z, x, norm)
        normed: torch.Tensor | None = self._own(z, x, norm, beside=self._through is not None)
        return normed


def reduced_then_added(comm: Comm, z: torch.Tensor, x: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
    """See `RankSum.add`; one after another."""
    x.add_(comm.all_reduce(z))
    return None if norm is None else rms_norm(x, *norm)
