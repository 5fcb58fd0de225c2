"""Cases of the ops that take rows of the batch: norm, qkv, lines, activation, copies. Torch's peer is the reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeGuard

import torch

from quire.bench.kernels.case import Case, Check, Contender, Setting
from quire.bench.kernels.limits import Work
from quire.kernels import catalog
from quire.kernels.act import reference as act_reference
from quire.kernels.mla import reference as mla_reference
from quire.kernels.norm import reference as norm_reference
from quire.kernels.qkv import reference as qkv_reference

EPS = 1e-5
PAGE = 16
COPY_PAGES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class RowShape:
    """The model whose rows are taken, and how many of them."""

    hidden: int
    ffn: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    rows: tuple[int, ...]


SHAPES = {"cuda": RowShape(4096, 14336, 32, 8, 128, (64, 8192)), "cpu": RowShape(1024, 3072, 16, 8, 128, (8, 512))}
SMALL = RowShape(256, 192, 4, 2, 64, (5,))

Arguments = tuple[object, ...]
Function = Callable[..., object]


@dataclasses.dataclass(frozen=True, slots=True)
class RowOp:
    """One function of one op."""

    op: str
    function: str
    arguments: Callable[[Setting, RowShape, int], Arguments]
    """(setting, shape, rows) → fresh random arguments."""
    elements: Callable[[RowShape, int], tuple[int, int]]
    """(shape, rows) → elements read, elements written."""
    changed: tuple[int, ...] = ()
    """Positions of arguments that hold results, beside what is returned."""
    capture: bool = True
    by_head: bool = False
    """Errors are relative to the largest value of a head, whose values the op mixes, not to each value."""


def _norm(setting: Setting, shape: RowShape, n: int) -> Arguments:
    return setting.randn(n, shape.hidden), setting.randn(shape.hidden), EPS


def _add_norm(setting: Setting, shape: RowShape, n: int) -> Arguments:
    return setting.randn(n, shape.hidden), setting.randn(n, shape.hidden), setting.randn(shape.hidden), EPS


def _layer_norm(setting: Setting, shape: RowShape, n: int) -> Arguments:
    return setting.randn(n, shape.hidden), setting.randn(shape.hidden), setting.randn(shape.hidden), EPS


def _gelu(setting: Setting, shape: RowShape, n: int) -> Arguments:
    return setting.randn(n, 2 * shape.ffn), "gelu_tanh", True


def _silu(setting: Setting, shape: RowShape, n: int) -> Arguments:
    return (setting.randn(n, 2 * shape.ffn),)


def _pages(setting: Setting, shape: RowShape, n_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (setting.randn(n_pages, shape.n_kv_heads, PAGE, shape.head_dim) for _ in range(2))
    return k, v


def _qkv(setting: Setting, shape: RowShape, n: int) -> Arguments:
    angles = setting.randn(n + 7, shape.head_dim // 2, dtype=torch.float32)
    positions = torch.randperm(n + 7)[:n].to(setting.device)
    qkv = setting.randn(n, (shape.n_q_heads + 2 * shape.n_kv_heads) * shape.head_dim)
    q_norm, k_norm = (setting.randn(shape.head_dim) for _ in range(2))
    n_pages = 2 + n // PAGE
    cache_locs = PAGE + torch.randperm((n_pages - 1) * PAGE)[:n].to(setting.device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return qkv, q_norm, k_norm, EPS, positions, cos_sin, *_pages(setting, shape, n_pages), cache_locs


def _lines(setting: Setting, shape: RowShape, n: int) -> Arguments:
    rank, d, n_pages = 4 * shape.head_dim, shape.head_dim // 2, 2 + n // PAGE
    angles = setting.randn(n + 7, d // 2, dtype=torch.float32)
    positions = torch.randperm(n + 7)[:n].to(setting.device)
    q, rotated = (setting.randn(n, shape.n_q_heads, d) for _ in range(2))
    cache_locs = PAGE + torch.randperm((n_pages - 1) * PAGE)[:n].to(setting.device)
    cos_sin, pages = torch.cat((angles.cos(), angles.sin()), dim=-1), setting.randn(n_pages, 1, PAGE, rank + d)
    return setting.randn(n, rank + d), setting.randn(rank), EPS, q, rotated, positions, cos_sin, pages, cache_locs


def _stored(shape: RowShape, n: int) -> tuple[int, int]:
    n_elements = n * (shape.n_q_heads + 9) * shape.head_dim // 2
    return n_elements, n_elements


def _copy(setting: Setting, shape: RowShape, n: int) -> Arguments:
    order = torch.randperm(2 * COPY_PAGES).tolist()
    return *_pages(setting, shape, 2 * COPY_PAGES), order[:COPY_PAGES], order[COPY_PAGES:], [PAGE] * COPY_PAGES


def _copied(shape: RowShape, n: int) -> tuple[int, int]:
    n_elements = 2 * COPY_PAGES * PAGE * shape.n_kv_heads * shape.head_dim
    return n_elements, n_elements


def _moved(shape: RowShape, n: int) -> tuple[int, int]:
    n_elements = n * (shape.n_q_heads + 2 * shape.n_kv_heads) * shape.head_dim
    return n_elements, n_elements


ROW_OPS = (
    RowOp("norm", "rms_norm", _norm, lambda s, n: (n * s.hidden, n * s.hidden)),
    RowOp("norm", "add_rms_norm", _add_norm, lambda s, n: (2 * n * s.hidden, 2 * n * s.hidden)),
    RowOp("norm", "layer_norm", _layer_norm, lambda s, n: (n * s.hidden, n * s.hidden)),
    RowOp("act", "activate", _gelu, lambda s, n: (2 * n * s.ffn, n * s.ffn)),
    RowOp("act", "silu_mul", _silu, lambda s, n: (2 * n * s.ffn, n * s.ffn)),
    RowOp("qkv", "rotate_and_store", _qkv, _moved, changed=(6, 7), by_head=True),
    RowOp("mla", "store", _lines, _stored, changed=(4, 7), by_head=True),
    # The lists of pages come from the host, through pinned memory, so this is not for graphs.
    RowOp("kvstore", "copy_pages", _copy, _copied, changed=(0, 1), capture=False),
)

TOLERANCES = {
    "norm": norm_reference.TOLERANCE,
    "act": act_reference.TOLERANCE,
    "qkv": qkv_reference.TOLERANCE,
    "mla": mla_reference.TOLERANCE,
    "kvstore": {},
}
"""Op → dtype → tolerance; copies are exact."""


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """The cases of one op."""
    shape = SHAPES[setting.device.type]
    for entry in (entry for entry in ROW_OPS if entry.op == op):
        copies = entry.function == "copy_pages"
        for n in (COPY_PAGES,) if copies else shape.rows:
            read, written = (count * setting.element_bytes for count in entry.elements(shape, n))
            yield Case(
                op,
                f"{entry.function} {n} {'pages' if copies else 'rows'}",
                Work(read, written),
                functools.partial(_contenders, entry, setting, shape, n, read),
                entry.function,
                quick=copies or n == shape.rows[-1],
            )


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """One check an implementation and function."""
    for entry in (entry for entry in ROW_OPS if entry.op == op):
        functions = dict(_that_have(entry, setting))
        reference = functions.pop("reference")
        for name, function in functions.items():
            error = functools.partial(_error, entry, setting, function, reference)
            yield Check(op, entry.function, name, error, TOLERANCES[op].get(setting.dtype, 0.0))


def _that_have(entry: RowOp, setting: Setting) -> Iterator[tuple[str, Function]]:
    """(implementation, the function) for those of the op that can run here and have it."""
    for implementation in catalog.runnable(entry.op, setting.device.type):
        if entry.function in implementation.functions:
            yield implementation.name, getattr(implementation.load(), entry.function)


def _contenders(entry: RowOp, setting: Setting, shape: RowShape, n: int, read_bytes: float) -> Iterable[Contender]:
    copies = [entry.arguments(setting, shape, n) for _ in range(setting.timer.n_copies(read_bytes))]
    for implementation, function in _that_have(entry, setting):
        is_peer = implementation == "reference"
        calls = [functools.partial(function, *arguments) for arguments in copies]
        name = "torch" if is_peer else implementation
        yield Contender(name, functools.partial(list, calls), is_peer, entry.capture)


def _error(entry: RowOp, setting: Setting, function: Function, reference: Function) -> float:
    """Largest |got - reference| / (1 + |reference|), where by_head takes the largest |reference| of a head."""
    arguments = entry.arguments(setting, SMALL, SMALL.rows[0])
    wide = tuple(x.double() if _is_float(x) else x for x in arguments)
    given = tuple(x.clone() if _is_float(x) else x for x in arguments)
    expected = _results(entry, reference(*wide), wide)
    got = _results(entry, function(*given), given)
    scales = [1 + (b.abs().amax(-1, keepdim=True) if entry.by_head else b.abs()) for b in expected]
    errors = [(a.double() - b).abs() / scale for a, b, scale in zip(got, expected, scales, strict=True)]
    return max(float(error.max()) for error in errors)


def _is_float(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _results(entry: RowOp, returned: object, arguments: Arguments) -> list[torch.Tensor]:
    found = [*(returned if isinstance(returned, tuple) else [returned]), *(arguments[i] for i in entry.changed)]
    return [x for x in found if isinstance(x, torch.Tensor)]
