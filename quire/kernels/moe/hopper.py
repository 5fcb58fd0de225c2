"""Experts in CUDA C++ for Hopper (csrc/cuda/moe_few.cu, moe_wide.cu, moe_rows.cu, moe_round.cu), built by the JIT.

Owns which builds there are, their arguments and their launches. Does not own the kernels nor how experts are cut
(plan.py). Invariant: a call launches by shapes alone, allocates only its result and scratch, and never waits, so it can
be captured in a CUDA graph.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch

from quire.config.experts import Gating
from quire.kernels.catalog import Slower
from quire.kernels.hopper import built, compile_variant, load_variant
from quire.kernels.invariance import are_rows_alone
from quire.kernels.moe.coded import Codes, Matrices
from quire.kernels.moe.plan import (
    CHUNK,
    FLOATING,
    MAX_CHOSEN,
    MAX_EXPERTS,
    MAX_FEW_PAIRS,
    CodesShape,
    ExpertsShape,
    FewPlan,
    WidePlan,
    few_plan,
    plan,
    wide_tokens,
)  # fmt: skip
from quire.kernels.w8a8 import BLOCK

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16
NVFP4 = 5
"""Kind of a `CodesShape` that no kernel here has."""
ROW_STEP = 8
"""As many elements of `DTYPES` take `ALIGNMENT_BYTES`."""
MAX_PAIRS = 1 << 24
SCALES_STEP = 4
"""As many scales take `ALIGNMENT_BYTES`. Those of a tile in blocks must begin there: the copy engine ends with CUDA
error 715 (an illegal instruction) elsewhere. So an expert's rows begin at multiples of so many slots."""


def _structure(pointers: str, strides: str, counts: str, floats: str = "") -> type[ctypes.Structure]:
    """Arguments of a kernel: pointers, then strides in elements, then floating numbers, then counts."""
    kinds = (
        (pointers, ctypes.c_void_p), (strides, ctypes.c_int64), (floats, ctypes.c_float), (counts, ctypes.c_int32),
    )  # fmt: skip
    fields = [(name, kind) for names, kind in kinds for name in names.split()]
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


_FewArgs = _structure(
    "x up down up_scales down_scales up_bias down_bias expert_ids weights residual h y shared_up shared_down", "x_row",
    "n_pairs n_chosen n_experts hidden inner n_stages n_blocks n_scales n_shared", "slope offset limit",
)  # fmt: skip
_WideArgs = _structure(
    "x w scales x_scales bias tokens tiles n_tiles y",
    "x_row", "n_slots n_experts n_rows k n_blocks x_scales_row", "slope offset limit",
)  # fmt: skip
_SortArgs = _structure("expert_ids ranks starts tiles n_tiles", "", "n_pairs n_experts tile_slots start_step")
_PlaceArgs = _structure("expert_ids starts slots tokens", "", "n_tokens n_chosen n_experts")
_RoundArgs = _structure(
    "x expert_ids starts slots codes scales", "x_row", "n_tokens n_chosen n_experts h scales_row in_blocks"
)
_SumArgs = _structure(
    "x expert_ids weights slots residual y", "residual_row y_row", "n_tokens n_chosen n_experts h n_shared"
)

Kernel = Callable[..., int]
Shared = tuple[torch.Tensor, torch.Tensor]
"""What every token goes through beside its experts: up and down, see `experts_with_shared` in op.py."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Compiled kernels and how to cut their products."""

    products: tuple[Kernel, ...]
    """Both in one, or the first and the second."""
    rows: ctypes.CDLL
    plan: FewPlan | WidePlan
    n_blocks: int
    round: Kernel | None = None
    """Rows to e4m3, for products of many of them."""

    def __call__(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        up: Matrices,
        down: Matrices,
        gating: Gating,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        shared: Shared | None = None,
    ) -> torch.Tensor:
        """See op.py; for the arguments that it was prepared for."""
        y = out if residual is None else residual
        if y is None:
            y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        call = _Call(self, x, expert_ids, weights, up, down, gating, (up_bias, down_bias), residual, y, shared)
        if isinstance(self.plan, FewPlan):
            call.run_few(self.plan)
        else:
            call.run_wide(self.plan)
        return y


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """What the kernel for many rows multiplies."""

    numbers: torch.Tensor
    """[pairs, k] in the order of the experts, or [tokens, k]; of x's dtype, or e4m3."""
    tokens: int | None = None
    """Address of the token of each pair in that order, where rows are those of tokens."""
    scales: torch.Tensor | None = None
    """float32: [pairs], or in blocks [ceil(k / 128), at least pairs], lines of whole 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One call: its launches, in order."""

    launch: Launch
    x: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    up: Matrices
    down: Matrices
    gating: Gating
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    residual: torch.Tensor | None
    y: torch.Tensor
    shared: Shared | None

    @property
    def shape(self) -> ExpertsShape:
        return shape_of(self.expert_ids, self.down, self.n_shared)

    @property
    def n_shared(self) -> int:
        return 0 if self.shared is None else self.shared[1].shape[1] // self.down.shape[2]

    def run_few(self, cut: FewPlan) -> None:
        shape, residual, gating = self.shape, self.residual, self.gating
        inner = self._scratch(shape.n_pairs, shape.inner)
        each = self.y if cut.lone else self._scratch(shape.n_pairs, shape.hidden)
        added = residual if cut.lone else None
        (up, up_scales), (down, down_scales) = (_parts(one) for one in (self.up, self.down))
        pointers = (
            self.x, up, down, up_scales, down_scales, *self.biases, self.expert_ids, self.weights, added, inner, each,
            *(self.shared or (None, None)),
        )  # fmt: skip
        _start(self.launch.products[0], self.x, _FewArgs(
            *(None if one is None else one.data_ptr() for one in pointers),
            self.x.stride(0), gating.slope, gating.offset, gating.limit,
            shape.n_pairs, shape.n_chosen, shape.n_experts, shape.hidden, shape.inner, cut.n_stages,
            self.launch.n_blocks, cut.n_scales, self.n_shared,
        ))  # fmt: skip
        if not cut.lone:
            self._sum(each, None)

    def run_wide(self, cut: WidePlan) -> None:
        shape, pairs, n_experts = self.shape, self.shape.n_pairs, self.shape.n_experts
        sizes_bytes = (16 * cut.n_tiles(shape), 4 * pairs, 4 * pairs, 4 * n_experts, 4)
        numbers = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=self.x.device)
        tiles, slots, tokens, starts, n_tiles, _ = itertools.accumulate(sizes_bytes, initial=numbers.data_ptr())
        ids, rows = self.expert_ids.data_ptr(), self.launch.rows
        in_blocks = self.launch.round is not None and shape.codes.group > 0
        step = SCALES_STEP if in_blocks else 1
        n_slots = pairs + (step - 1) * n_experts
        sort = _SortArgs(ids, slots, starts, tiles, n_tiles, pairs, n_experts, cut.tokens, step)
        inner = self._scratch(n_slots, shape.inner)
        _start(rows.quire_moe_sort, self.x, sort)
        if self.launch.round is None:
            place = _PlaceArgs(ids, starts, slots, tokens, shape.n, shape.n_chosen, n_experts)
            _start(rows.quire_moe_place, self.x, place)
            self._multiply(0, Rows(self.x, tokens), self.up, inner, tiles, n_tiles)
            between = Rows(inner)
        else:
            slots_of = (n_slots, shape.n_chosen, n_experts, ids, starts, slots)
            x = round_rows(self.launch.round, self.x, in_blocks, slots_of)
            self._multiply(0, x, self.up, inner, tiles, n_tiles)
            del x  # never more at once than rows of both sizes in the type of x, which the memory equation counts
            between = round_rows(self.launch.round, inner, in_blocks)
        del inner
        result = self._scratch(n_slots, shape.hidden)
        self._multiply(1, between, self.down, result, tiles, n_tiles)
        self._sum(result, slots)

    def _multiply(self, which: int, x: Rows, w: Matrices, y: torch.Tensor, tiles: int, n_tiles: int) -> None:
        """The first product, with the activation behind it, or the second."""
        gating, parts = self.gating, (x.numbers, *_parts(w), x.scales, self.biases[which])
        _start(self.launch.products[which], self.x, _WideArgs(
            *(None if one is None else one.data_ptr() for one in parts), x.tokens, tiles, n_tiles, y.data_ptr(),
            x.numbers.stride(0), gating.slope, gating.offset, gating.limit,
            len(y), self.shape.n_experts, y.shape[1], x.numbers.shape[1], self.launch.n_blocks,
            0 if x.scales is None else x.scales.shape[-1],
        ))  # fmt: skip

    def _sum(self, each: torch.Tensor, slots: int | None) -> None:
        shape, residual = self.shape, self.residual
        _start(self.launch.rows.quire_moe_sum, self.x, _SumArgs(
            each.data_ptr(), self.expert_ids.data_ptr(), self.weights.data_ptr(), slots,
            None if residual is None else residual.data_ptr(), self.y.data_ptr(),
            0 if residual is None else residual.stride(0), self.y.stride(0),
            shape.n, shape.n_chosen, shape.n_experts, shape.hidden, self.n_shared,
        ))  # fmt: skip

    def _scratch(self, n_rows: int, width: int) -> torch.Tensor:
        return torch.empty(n_rows, width, dtype=self.x.dtype, device=self.x.device)


def round_rows(kernel: Kernel, x: torch.Tensor, in_blocks: bool, spread: tuple[int, ...] = ()) -> Rows:
    """x [n, k] in e4m3, where its rows stand; or each for the experts of its token. spread: how many slots there are,
    experts of a token, experts, and addresses of ids, starts and slots."""
    n, k = x.shape
    n_slots, n_each, n_experts, *places = spread or (n, 1, 0, None, None, None)
    codes = torch.empty(n_slots, k, dtype=torch.float8_e4m3fn, device=x.device)
    lines = (-(-k // BLOCK), -(-n_slots // SCALES_STEP) * SCALES_STEP) if in_blocks else (n_slots,)
    scales = torch.empty(lines, dtype=torch.float32, device=x.device)
    _start(kernel, x, _RoundArgs(
        x.data_ptr(), *places, codes.data_ptr(), scales.data_ptr(), x.stride(0),
        n, n_each, n_experts, k, lines[-1], in_blocks,
    ))  # fmt: skip
    return Rows(codes, scales=scales)


def _start(kernel: Kernel, x: torch.Tensor, *args: ctypes.Structure) -> None:
    code = kernel(*map(ctypes.byref, args), torch.cuda.current_stream(x.device).cuda_stream)
    if code:
        raise RuntimeError(f"experts of {tuple(x.shape)} could not be launched: CUDA error {code}")


def prepare(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    gating: Gating,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Launch | str:
    """`experts` ready for these arguments, or why it is not for these kernels. Compiles what is new (seconds)."""
    if are_rows_alone():
        return Slower("these kernels sum in an order that depends on the number of rows")
    target = out if residual is None else residual
    matrices = [(name, part) for name, one in (("up", up), ("down", down)) for part in _parts(one)]
    for name, tensor in (("x", x), *matrices, ("the result", target)):
        if tensor is not None and tensor.data_ptr() % ALIGNMENT_BYTES:
            return f"the address of {name} is not a multiple of {ALIGNMENT_BYTES} bytes"
    for name, rows in (("x", x), ("the result", target)):
        if rows is not None and rows.stride(0) % ROW_STEP:
            return f"rows of {name} are {rows.stride(0)} elements apart, not a multiple of {ALIGNMENT_BYTES} bytes"
    if _codes(up) != _codes(down):
        return f"matrices of experts are kept in two ways: {_codes(up)}, {_codes(down)}"
    return prepared(shape_of(expert_ids, down), x.dtype, x.device)


def _parts(matrices: Matrices) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(numbers or codes, scales)."""
    return (matrices, None) if isinstance(matrices, torch.Tensor) else (matrices.codes, matrices.scales)


def _codes(matrices: Matrices) -> CodesShape:
    if isinstance(matrices, torch.Tensor):
        return FLOATING
    kinds = {torch.float8_e4m3fn: 1, torch.int8: 2}
    kind = {Codes.INT4: 3, Codes.FP4: 4}.get(matrices.kind) or kinds[matrices.codes.dtype]
    kind = kind if matrices.factors is None else NVFP4
    return CodesShape(kind, matrices.group, matrices.has_zeros)


def static_obstacle(shape: ExpertsShape, dtype: torch.dtype) -> str | None:
    """Why no machine could run this with these kernels, or None."""
    if dtype not in DTYPES:
        return f"x is {dtype}: it must be bfloat16 or float16"
    if shape.codes.kind == NVFP4:
        return "experts are in NVFP4, which these kernels do not read"
    if shape.hidden % CHUNK or shape.inner % CHUNK:
        return f"experts are {shape.hidden} x {shape.inner}: both must be multiples of {CHUNK}"
    if shape.n_experts > MAX_EXPERTS or shape.n_chosen > MAX_CHOSEN:
        return f"{shape.n_chosen} of {shape.n_experts} experts: at most {MAX_CHOSEN} of {MAX_EXPERTS}"
    if not 1 <= shape.n_pairs <= MAX_PAIRS:
        return f"{shape.n_pairs} pairs of a token and an expert are not within 1..{MAX_PAIRS}"
    return None


def shape_of(expert_ids: torch.Tensor, down: Matrices, n_shared: int = 0) -> ExpertsShape:
    """Of a call where every token has n_shared experts more."""
    n, n_chosen = expert_ids.shape
    n_experts, hidden, inner = down.shape
    return ExpertsShape(n, n_chosen + n_shared, n_experts + n_shared, hidden, inner, _codes(down), n_shared)


@functools.cache
def prepared(shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> Launch | str:
    """The kernels for a shape, or why there are none."""
    found = static_obstacle(shape, dtype)
    if found:
        return found

    def make() -> Launch:
        _build(dataclasses.replace(shape, n=1), dtype)
        return load(plan(shape), dtype, device, shape.codes)

    return built(make)


@functools.cache
def _build(shape: ExpertsShape, dtype: torch.dtype) -> None:
    """Compile what any number of tokens will want, in parallel, so that later numbers need not wait."""
    shapes = [dataclasses.replace(shape, n=n) for n in range(1, MAX_FEW_PAIRS // shape.n_chosen + 2)]
    cuts: set[FewPlan | WidePlan] = set(map(WidePlan, wide_tokens(shape.codes)))
    cuts |= {dataclasses.replace(cut, n_stages=0, n_scales=0) for cut in map(few_plan, shapes) if cut is not None}
    around = ["moe_rows.cu", *(["moe_round.cu"] if shape.codes.is_rounded else [])]
    wanted = {
        *((source, _definitions(dtype)) for source in around),
        *(one for cut in cuts for one in variants(cut, dtype, shape.codes)),
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: compile_variant(*one), sorted(wanted)))


@functools.cache
def load(cut: FewPlan | WidePlan, dtype: torch.dtype, device: torch.device, codes: CodesShape = FLOATING) -> Launch:
    """The kernels of a plan, compiled if they are new. Raises BuildError."""
    products = tuple(_function(*one) for one in variants(cut, dtype, codes))
    rows = load_variant("moe_rows.cu", _definitions(dtype))
    rounds = isinstance(cut, WidePlan) and codes.is_rounded
    for name in ("sort", "place", "sum"):
        getattr(rows, f"quire_moe_{name}").argtypes = [ctypes.c_void_p] * 2
    n_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(products, rows, cut, n_blocks, _function("moe_round.cu", _definitions(dtype)) if rounds else None)


def variants(
    cut: FewPlan | WidePlan, dtype: torch.dtype, codes: CodesShape = FLOATING
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(source in csrc/cuda, definitions) of both products in one, or of the first and the second."""
    kept = {"CODES": codes.kind, "GROUP": codes.group, "ZEROS": int(codes.zeros)} if codes.kind else {}
    if isinstance(cut, WidePlan):
        if codes.is_rounded:
            kept = {"FP8": 2 if codes.group else 1}
        return tuple(("moe_wide.cu", _definitions(dtype, TOKENS=cut.tokens, SILU=silu, **kept)) for silu in (1, 0))
    macros = {"TOKENS": cut.tokens, "UP_CHUNKS": cut.up_chunks, "DOWN_CHUNKS": cut.down_chunks}
    macros |= {"LONE": int(cut.lone), "SHARED": int(cut.shared)}
    macros |= {"UP_BLOCKS": cut.blocks[0], "DOWN_BLOCKS": cut.blocks[1]}
    return (("moe_few.cu", _definitions(dtype, **macros, **kept)),)


def _definitions(dtype: torch.dtype, **macros: int) -> tuple[str, ...]:
    macros["BF16"] = int(dtype is torch.bfloat16)
    return tuple(f"-DQUIRE_{name}={value}" for name, value in macros.items())


def _function(source: str, definitions: tuple[str, ...]) -> Kernel:
    library = load_variant(source, definitions)
    function = getattr(library, f"quire_{source.removesuffix('.cu')}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return function  # type: ignore[no-any-return]


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    up: Matrices,
    down: Matrices,
    gating: Gating,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See op.py. Raises ValueError where these kernels do not take the arguments."""
    arguments = (x, expert_ids, weights, up, down, gating, up_bias, down_bias, residual, out)
    launch = prepare(*arguments)
    if isinstance(launch, str):
        raise ValueError(f"these experts are not for the Hopper kernels: {launch}")
    return launch(*arguments)
