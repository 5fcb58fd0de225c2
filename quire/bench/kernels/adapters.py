"""Cases of adapters: 16 of rank 16 over an 8B's layers, 64 rows of decoding and 4,096 of prompts, or a few of a 0.6B's
on a CPU, beside the product.

The limit is the time to read what is added to and each adapter that some row has, once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.timing import Call
from quire.kernels import gemm, lora
from quire.kernels.lora import reference
from quire.kernels.lora.weight import blocks_of, most_tiles
from quire.kernels.selector import select

LAYERS = {
    "8b qkv": (4096, (4096, 1024, 1024)),
    "8b o": (4096, (4096,)),
    "8b gate_up": (4096, (14336, 14336)),
    "8b down": (14336, (4096,)),
}
SMALL_LAYERS = {"0.6b qkv": (1024, (2048, 1024, 1024))}
N_ADAPTERS, RANK = 16, 16
Shape = tuple[int, tuple[int, ...]]
"""(inputs, outputs of each part)."""


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """A batch of decoding sequences, and on a GPU their prompts. Gates and ups are activated too."""
    on_cpu = setting.device.type == "cpu"
    for name, shape in (SMALL_LAYERS if on_cpu else LAYERS).items():
        for n_rows in (16,) if on_cpu else (64, 4096):
            k, n_out = shape[0], sum(shape[1])
            n_stored = n_rows * (n_out // 2 if _activates(shape) else n_out)
            numbers = N_ADAPTERS * RANK * (len(shape[1]) * k + n_out) + n_rows * (k + n_out)
            work = Work(setting.element_bytes * numbers, setting.element_bytes * n_stored)
            yield Case(
                op, f"{name}, {N_ADAPTERS} adapters of {RANK}, {n_rows} rows", work,
                functools.partial(_contenders, shape, n_rows, setting), "add", quick="qkv" in name and n_rows < 100,
            )  # fmt: skip


def _activates(shape: Shape) -> bool:
    return len(shape[1]) == 2


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """A small mixed batch."""
    name = "cpu" if setting.device.type == "cpu" else "triton"
    yield Check(op, "add", name, functools.partial(_error, setting), reference.TOLERANCE[setting.dtype])


class _Inputs:
    """Adapters of every place, and rows that take turns with them; every fifth has none."""

    def __init__(self, shape: Shape, n_places: int, n_rows: int, setting: Setting) -> None:
        k, sizes = shape
        self.x, self.y = setting.randn(n_rows, k), setting.randn(n_rows, sum(sizes))
        a = setting.randn(n_places, len(sizes) * RANK, k).mul_(k**-0.5)
        b = setting.randn(n_places, sum(sizes), RANK).mul_(RANK**-0.5)
        ranks = torch.full((n_places, len(sizes)), RANK, dtype=torch.int32, device=setting.device)
        blocks = torch.tensor(blocks_of(sizes), dtype=torch.int32, device=setting.device)
        self.stack = lora.Stack(a, b, ranks, blocks, sizes)
        self.places = np.array([-1 if row % 5 == 4 else row % n_places for row in range(n_rows)], np.int32)
        sorted_rows = lora.tiles_of(self.places, most_tiles(n_rows, n_places))
        self.tiles = lora.Tiles(*(torch.from_numpy(one).to(setting.device) for one in sorted_rows))

    def call(self) -> Call:
        """Adds to y, by the best implementation of the device."""
        if self.x.device.type != "cpu":
            run = select("lora", "add", self.x)
            is_gated = len(self.stack.sizes) == 2 and self.stack.sizes[0] == self.stack.sizes[1]
            activated = self.y.new_empty(len(self.y), self.stack.sizes[0]) if is_gated else None
            return functools.partial(run, self.x, self.stack, self.tiles, self.y, None, activated)
        return functools.partial(lora.add_lines, self.x, self._lines(), self.places, self.y)

    def _lines(self) -> lora.Places:
        found = lora.Places(len(self.stack.a), sum(self.stack.sizes), self.stack.a.shape[2])
        starts = [0, *itertools.accumulate(self.stack.sizes)]
        for place, (a, b) in enumerate(zip(self.stack.a, self.stack.b, strict=True)):
            parts = [
                (start, a[part * RANK : (part + 1) * RANK], b[start:end])
                for part, (start, end) in enumerate(itertools.pairwise(starts))
            ]
            found.put(place, lora.Lines.of(parts, a.dtype))
        return found


def _contenders(shape: Shape, n_rows: int, setting: Setting) -> Iterable[Contender]:
    inputs = _Inputs(shape, N_ADAPTERS, n_rows, setting)
    yield Contender("cpu" if setting.device.type == "cpu" else "triton", lambda: [inputs.call()])
    if setting.device.type != "cpu":
        yield Contender("hopper, with the product", functools.partial(_together, shape, n_rows, setting))
        yield Contender("the product itself (gemm)", functools.partial(_alone, shape, n_rows, setting), is_peer=True)
    yield Contender("the product itself (torch)", functools.partial(_product, shape, n_rows, setting), is_peer=True)


def _copies(shape: Shape, n_rows: int, setting: Setting) -> list[tuple[_Inputs, torch.Tensor]]:
    """As many layers, with adapters of their own, as leave the cache."""
    n_bytes = setting.element_bytes * shape[0] * sum(shape[1])
    made = range(setting.timer.n_copies(n_bytes))
    return [(_Inputs(shape, N_ADAPTERS, n_rows, setting), setting.randn(sum(shape[1]), shape[0])) for _ in made]


def _together(shape: Shape, n_rows: int, setting: Setting) -> Sequence[Call]:
    """Products that add, and activate: what they take without adapters is to be subtracted."""
    calls: list[Call] = []
    for inputs, weight in _copies(shape, n_rows, setting):
        given = (inputs.x, weight, inputs.stack, inputs.tiles, None, None, None, _activates(shape), None)
        launch = lora.prepare_linear(*given)
        if isinstance(launch, str):
            raise NotRun(launch)
        calls.append(functools.partial(launch, *given))
    return calls


def _alone(shape: Shape, n_rows: int, setting: Setting) -> Sequence[Call]:
    made = _copies(shape, n_rows, setting)
    return [functools.partial(gemm.linear, one.x, weight, silu_mul=_activates(shape)) for one, weight in made]


def _product(shape: Shape, n_rows: int, setting: Setting) -> Sequence[Call]:
    weight, x = setting.randn(sum(shape[1]), shape[0]), setting.randn(n_rows, shape[0])
    return [functools.partial(F.linear, x, weight)]


def _error(setting: Setting) -> float:
    """Largest |got - reference| / (1 + |reference|)."""
    inputs = _Inputs((200, (96, 32)), 3, 37, setting)
    expected = inputs.y.clone()
    reference.add(inputs.x, inputs.stack, inputs.tiles, expected)
    inputs.call()()
    return float(((inputs.y.double() - expected.double()).abs() / (1 + expected.double().abs())).max())
