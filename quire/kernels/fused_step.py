"""A step of a whole model on the CPU in one native call: operations recorded once, run for any rows.

Owns the structs that csrc/cpu/fused_step.cpp reads and the tensors that they point into. Does not own the data flow of
a model (`compute/forward/fused.py`), nor arithmetic: each operation is the one of `qgemm`, `norm`, `qkv`, `moe`
and `attention`.
Invariant: a run has the bits of the same operations called one by one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any

import numpy as np
import torch

from quire.config.experts import RoutingSpec
from quire.kernels import native
from quire.kernels.attention.cpu.launcher import MAX_HEAD_DIM, native_args
from quire.kernels.attention.cpu.work import TILE_ROWS
from quire.kernels.attention.schedule.plan import Trees
from quire.kernels.attention.variant import Variant
from quire.kernels.gemm import Norm
from quire.kernels.lora import Places
from quire.kernels.lora.cpu import native_lora
from quire.kernels.moe import PackedExperts
from quire.kernels.moe.cpu import native_experts, native_route
from quire.kernels.qgemm import PackedWeight
from quire.kernels.qgemm import cpu as products
from quire.kernels.sample.cpu import NativeChoice
from quire.kernels.sample.draw import INVERSE, UNIFORM

EMBED, LINEAR, ROTATE, ATTEND, TAKE, NORM, LOAD, ROUTE, EXPERTS, LORA, SILU = range(11)
"""QuireOpCode in csrc/cpu/quire_cpu.h."""

N_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Op(ctypes.Structure):
    _fields_ = (("code", _L), ("args", _P), ("table_at", _L))


class _Embed(ctypes.Structure):
    _fields_ = (("table", _P), ("out", _P), ("row_bytes", _L))


class _Rotate(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("qkv", "q_norm", "k_norm", "k_pages", "v_pages", "cos_sin")),
        *((name, _I) for name in ("n_q_heads", "n_kv_heads", "head_dim", "rotary", "page_size", "dtype", "int8_keys")),
        ("eps", ctypes.c_float),
    )


class _Take(ctypes.Structure):
    _fields_ = (("rows", _P), ("row_bytes", _L))


class _Load(ctypes.Structure):
    _fields_ = (("rows", _P), ("first", _P), ("second", _P), ("half_bytes", _L))


class _Norm(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("x", "weight", "out")), *((name, _L) for name in ("width", "x_row", "out_row")),
        ("eps", ctypes.c_float), ("dtype", _I),
    )  # fmt: skip


class _Silu(ctypes.Structure):
    _fields_ = (("x", _P), ("out", _P), ("width", _L), ("dtype", _I))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("slots", "positions", "places", "q_indptr", "kv_lens", "kv_at")),
        *((name, _P) for name in ("tree_paths", "tree_firsts", "wanted")),
        *((name, _P) for name in ("tokens", "page_table", "choice", "n_places", "ids", "adapters")),
        *((name, _L) for name in ("tokens_stride", "table_stride", "n_rows", "n_spans", "n_wanted", "n_once")),
        *((name, _I) for name in ("page_size", "n_q_heads", "n_kv_heads", "head_dim", "tile_tokens", "n_threads")),
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """A step in which some spans are trees: then positions of rows are those of their depth."""

    places: np.ndarray
    """int64 [n_rows]: where each row's token stands in the token table, and its key in the pages."""
    trees: Trees


class FusedStepCall:
    """A fused step of which nothing is left to do but the native call."""

    __slots__ = ("_array", "_first", "_function", "_kept", "_step")

    def __init__(self, array: Any, step: _Step, kept: tuple[Any, ...]) -> None:
        self._function = native.required().quire_fused_step
        self._array, self._step, self._kept = array, step, kept
        self._first = 0

    def run(self) -> None:
        """Compute the step."""
        first = ctypes.addressof(self._array) + self._first * ctypes.sizeof(_Op)
        self._function(first, len(self._array) - self._first, ctypes.addressof(self._step))

    def leave_out(self, n: int) -> None:
        """Not to do the first n operations."""
        self._first = n

    def repeat(self, n_places: int, ids: int | None) -> None:
        """Make it a chain. The addresses of what `FusedStep.chain` says."""
        self._step.n_places, self._step.ids = n_places, ids

    def leave_a_core(self) -> None:
        """Run on all cores but one until `spread`: a thread of the pool that is preempted holds up all others."""
        self._step.n_threads = min(self._step.n_threads, max(1, N_CORES - 1))

    def spread(self) -> None:
        """Run on all threads: from the next operation on, if the step is being computed."""
        self._step.n_threads = torch.get_num_threads()


class FusedStep:
    """Operations on tensors of `max_rows` rows, in the order in which they are added.

    tokens: int32 [n_slots, width], page_tables: int32 [n_groups, n_slots, max_pages]; `run` reads both, and writes new
    tokens.
    """

    def __init__(
        self, tokens: torch.Tensor, page_tables: torch.Tensor, page_size: int, n_q_heads: int, n_kv_heads: int, d: int,
        *, has_adapters: bool = False,
    ) -> None:  # fmt: skip
        """has_adapters: its rows may have some, and `run` is always told which."""
        self.has_adapters = has_adapters
        self._between: dict[int, torch.Tensor] = {}
        """By width."""
        self._ops: list[_Op] = []
        self._table_stride = page_tables.stride(0)
        self._kept: list[Any] = [tokens, page_tables]
        """What the operations point into."""
        self._matrices: list[products.NativeMatrix] = []
        """Of the products, in the order of a step."""
        self._array: Any = None
        self._heads = (n_q_heads, n_kv_heads, d)
        tile_tokens = max(1, TILE_ROWS * n_kv_heads // n_q_heads)
        self._step = _Step(
            tokens=tokens.data_ptr(), page_table=page_tables.data_ptr(), tokens_stride=tokens.stride(0),
            table_stride=page_tables.stride(1), page_size=page_size, n_q_heads=n_q_heads, n_kv_heads=n_kv_heads,
            head_dim=d, tile_tokens=tile_tokens,
        )  # fmt: skip

    def embed(self, table: torch.Tensor, out: torch.Tensor) -> None:
        """out = rows of `table` [vocab, hidden], for the tokens of the step."""
        self._add(EMBED, _Embed(table.data_ptr(), out.data_ptr(), table.stride(0) * table.element_size()), table, out)

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedWeight,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        *,
        norm: Norm | None = None,
        then: int = products.NOTHING,
    ) -> None:
        """out = what `qgemm.linear` gives; then: one of NOTHING, ADD (to `out`), SILU_MUL, WIDEN of `qgemm.cpu`."""
        matrix = products.matrix(packed, bias)
        self._link(matrix)
        weight, eps = (None, 0.0) if norm is None else norm
        call = products.NativeLinear(
            ctypes.addressof(matrix), x.data_ptr(), None if weight is None else weight.data_ptr(), out.data_ptr(),
            0, x.stride(0), out.stride(0), eps, native.DTYPES[x.dtype], then, 0,
        )  # fmt: skip
        self._add(LINEAR, call, matrix, x, packed, bias, out, weight)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        cos_sin: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        group: int = 0,
    ) -> None:
        """As `qkv.rotate_and_store`; queries stay in `qkv`, which is contiguous. group: whose page table it is."""
        norms = [None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)]
        call = _Rotate(
            qkv.data_ptr(), *norms, k_pages.data_ptr(), v_pages.data_ptr(), cos_sin.data_ptr(), *self._heads,
            cos_sin.shape[1], self._step.page_size, native.DTYPES[qkv.dtype], k_pages.dtype == torch.int8, eps,
        )  # fmt: skip
        self._add(ROTATE, call, qkv, q_norm, k_norm, cos_sin, k_pages, v_pages, group=group)

    def store(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: int = 0) -> None:
        """The halves of each row, as they are, to the entries of its token in two pools of pages.

        rows: [max_rows, 2 * d], contiguous; first, second: [n_pages, 1, page_size, d], of the same type.
        """
        call = _Rotate(
            rows.data_ptr(), None, None, first.data_ptr(), second.data_ptr(), None, 0, 1, first.shape[-1], 0,
            self._step.page_size, native.DTYPES[rows.dtype], 0, 0.0,
        )  # fmt: skip
        self._add(ROTATE, call, rows, first, second, group=group)

    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        variant: Variant,
        out: torch.Tensor,
        group: int = 0,
    ) -> None:
        """As `attention.run` for a variant without hooks. q, out: [max_rows, n_q_heads, head_dim]."""
        self._add(ATTEND, native_args(q, k_pages, v_pages, variant, out), q, k_pages, v_pages, out, group=group)

    def take(self, rows: torch.Tensor) -> None:
        """Later operations see the rows wanted, which move to the front of `rows`; to be added for each tensor."""
        self._add(TAKE, _Take(rows.data_ptr(), rows.stride(0) * rows.element_size()), rows)

    def load(self, rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: int = 0) -> None:
        """Each row = what `store` put into two pools for the token before its own, zeros before the first token."""
        half_bytes = first.shape[-1] * first.element_size()
        call = _Load(rows.data_ptr(), first.data_ptr(), second.data_ptr(), half_bytes)
        self._add(LOAD, call, rows, first, second, group=group)

    def begin_link(self) -> None:
        """Operations added so far are not repeated for further tokens of a chain."""
        self._step.n_once = len(self._ops)

    def norm(self, x: torch.Tensor, norm: Norm, out: torch.Tensor) -> None:
        """out = what `norm.rms_norm` gives for the rows of x. Both: [max_rows, width], contiguous rows; it may be x."""
        weight, eps = norm
        call = _Norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[1], x.stride(0), out.stride(0), eps,
            native.DTYPES[x.dtype],
        )  # fmt: skip
        self._add(NORM, call, x, weight, out)

    def route(
        self,
        logits: torch.Tensor,
        routing: RoutingSpec,
        correction: torch.Tensor | None,
        load: torch.Tensor | None,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """As `moe.route`; expert_ids int32 and weights float32 [max_rows, k] take the choice."""
        call = native_route(logits, routing, correction, load, expert_ids, weights)
        self._add(ROUTE, call, logits, correction, load, expert_ids, weights)

    def experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        matrices: PackedExperts,
        scratch: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """As `moe.packed_experts`, added to `out`. scratch: of `moe.cpu.scratch_size` numbers for max_rows tokens."""
        call = native_experts(x, expert_ids, weights, matrices, out, scratch, adds=True)
        self._add(EXPERTS, call, x, expert_ids, weights, matrices, scratch, out)

    def between(self, out: torch.Tensor, width: int) -> torch.Tensor:
        """Memory for as many rows as `out` has, of another width, for what lies between two operations."""
        if width not in self._between:
            self._between[width] = out.new_zeros(len(out), width)
        return self._between[width]

    def add_lines(self, x: torch.Tensor, adapters: Places, y: torch.Tensor, *, norm: Norm | None) -> None:
        """As `lora.add_lines`, of the adapters of the step's rows."""
        call = native_lora(x, adapters, y, norm)
        self._add(LORA, call, x, adapters, y, norm)

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gates) * ups of the rows of x, gates first. Both contiguous."""
        self._add(SILU, _Silu(x.data_ptr(), out.data_ptr(), out.shape[1], native.DTYPES[x.dtype]), x, out)

    def run(
        self,
        row_slots: np.ndarray,
        row_positions: np.ndarray,
        q_indptr: np.ndarray,
        kv_lens: np.ndarray,
        span_slots: np.ndarray,
        wanted: np.ndarray,
        *,
        trees: TreeRows | None = None,
        adapters: np.ndarray | None = None,
        is_link: bool = False,
    ) -> None:
        """One step: int64 [n_rows] x 2, int32 [n_spans + 1], [n_spans] x 2, int64 [n_wanted]; all contiguous.

        The rows of a span are the last tokens of the kv_lens ones of its slot; wanted: rows that `take` leaves.
        trees: where some spans are trees. adapters: int32 [n_rows], contiguous, place of each row's, -1: none. is_link:
        operations before `begin_link` are left out.
        """
        call = self._call(None, (row_slots, row_positions, q_indptr, kv_lens, span_slots, wanted), trees, adapters)
        if is_link:
            call.leave_out(self._step.n_once)
        call.run()

    def choosing(
        self, logits: torch.Tensor, controls: np.ndarray, *step: np.ndarray, trees: TreeRows | None = None,
        adapters: np.ndarray | None = None,
    ) -> tuple[FusedStepCall, np.ndarray, np.ndarray]:  # fmt: skip
        """A call that does `run` and finds a token for each row wanted, written behind its row; and where it will put
        them: ids int32 and status uint8 [n_wanted].

        logits: float32 [>= n_wanted, width], which the call fills. controls: as in `kernels.sample.choose_by`, of rows
        that are not truncated. step, trees, adapters: arguments of `run`.
        """
        token_ids, status = np.empty(len(step[-1]), np.int32), np.empty(len(step[-1]), np.uint8)
        lines, line_bytes = _address(controls), controls.strides[0]
        choice = NativeChoice(
            logits.data_ptr(), lines + UNIFORM * line_bytes, lines + INVERSE * line_bytes, None,
            _address(token_ids), _address(status), logits.stride(0), logits.shape[1],
        )  # fmt: skip
        return self._call(choice, (*step, controls, token_ids, status), trees, adapters), token_ids, status

    def chain(
        self, logits: torch.Tensor, n_places: np.ndarray, *step: np.ndarray, ids: np.ndarray | None = None
    ) -> np.ndarray:
        """Does `run`, then finds the best token of each row wanted, and runs on that token for the next, n_places
        int32 [n_wanted] tokens in all, not rising, at least 1; all are written to the token table.

        Returns them: int32 [most, n_wanted], of which column i has n_places[i]. logits: float32 [>= n_wanted, width],
        is filled. ids: int32 [width], the tokens that logits stand for. step: arguments of `run`.
        """
        n = len(n_places)
        found, status, greedy = np.empty((int(n_places[0]), n), np.int32), np.empty(n, np.uint8), np.zeros(n)
        choice = NativeChoice(
            logits.data_ptr(), _address(greedy), _address(greedy), None, _address(found), _address(status),
            logits.stride(0), logits.shape[1],
        )  # fmt: skip
        call = self._call(choice, step, None, None)
        call.repeat(_address(n_places), None if ids is None else _address(ids))
        call.run()
        return found

    def _call(
        self, choice: NativeChoice | None, arrays: tuple[np.ndarray, ...], trees: TreeRows | None,
        adapters: np.ndarray | None,
    ) -> FusedStepCall:  # fmt: skip
        """arrays: those of `run`, and what else is to be kept."""
        step = _Step.from_buffer_copy(self._step)
        step.slots, step.positions, step.q_indptr = map(_address, arrays[:3])
        step.kv_lens, step.kv_at, step.wanted = map(_address, arrays[3:6])
        step.places = step.positions
        if trees is not None:
            of_trees = trees.places, trees.trees.paths, trees.trees.firsts
            step.places, step.tree_paths, step.tree_firsts = map(_address, of_trees)
        if adapters is not None:
            step.adapters = _address(adapters)
        step.n_rows, step.n_spans, step.n_wanted = len(arrays[0]), len(arrays[3]), len(arrays[5])
        step.choice, step.n_threads = None if choice is None else ctypes.addressof(choice), torch.get_num_threads()
        if self._array is None:
            self._array = (_Op * len(self._ops))(*self._ops)
        return FusedStepCall(self._array, step, (choice, trees, adapters, *arrays))

    def _link(self, matrix: products.NativeMatrix) -> None:
        """Each matrix names the one of the next product, the last one the first of the next step."""
        if self._matrices:
            self._matrices[-1].next = ctypes.addressof(matrix)
        self._matrices.append(matrix)
        matrix.next = ctypes.addressof(self._matrices[0])

    def _add(self, code: int, args: ctypes.Structure, *kept: object, group: int = 0) -> None:
        self._ops.append(_Op(code, ctypes.addressof(args), group * self._table_stride))
        self._kept += [args, *kept]


def _address(array: np.ndarray) -> int:
    """Of a contiguous array; a fifth of the time of `array.ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array)) if array.size else 0  # type: ignore[arg-type]


def obstacle(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why steps of a model cannot run as fused steps here, or None."""
    if native.library() is None:
        return native.explain()
    if dtype not in native.DTYPES:
        return f"the native kernels take float32, bfloat16 or float16, not {dtype}"
    most = f"a head has {head_dim} numbers, and the native step takes {MAX_HEAD_DIM} at most"
    return most if head_dim > MAX_HEAD_DIM else None
