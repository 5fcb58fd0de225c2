"""Cases of the recurrent mixers: one token of many sequences, and a long prompt, at the sizes of known models.

Peers: flash-linear-attention's kernels for the delta rule, where it is installed; torch is the reference, which goes
token by token and takes no part in prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.timing import Call
from quire.kernels import catalog
from quire.kernels.state import reference
from quire.kernels.state.spans import PIECE, StateSpans, plan_spans, single_rows, spans_of

SEQS: Final = {"cuda": (64, 8192), "cpu": (8, 512)}
"""Sequences of an update, tokens of a prompt."""
STATE_BYTES: Final = 4
FEW: Final = 17
"""Sequences of a check's update, and rows of a check's prompt behind two whole pieces."""
LESS: Final = 4
"""A check has so many times fewer heads of a group than a case, but two of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Of one scan."""

    heads: int
    shared: int
    """Groups of Mamba-2, or key heads of the delta rule."""
    head_dim: int
    """Of x, or of values."""
    size: int
    """Of a line of the state of each head: of b and c, or of keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """One function at the sizes of a model."""

    function: str
    model: str
    cuda: Sizes
    cpu: Sizes

    def on(self, device_type: str) -> Sizes:
        return self.cuda if device_type == "cuda" else self.cpu

    def smaller(self, device_type: str) -> Sizes:
        """Fewer heads and groups, of the same sizes: kernels are compiled for these."""
        sizes = self.on(device_type)
        shared, of_group = min(sizes.shared, 2), sizes.heads // sizes.shared
        return dataclasses.replace(sizes, heads=shared * max(2, of_group // LESS), shared=shared)


SCANS: Final = (
    Scan("convolve", "Qwen3-Next", Sizes(64, 1, 128, 4), Sizes(16, 1, 64, 4)),
    Scan("scan_ssm", "Mamba-2 2.7B", Sizes(80, 1, 64, 128), Sizes(16, 1, 64, 64)),
    Scan("scan_delta", "Qwen3-Next", Sizes(32, 16, 128, 128), Sizes(8, 4, 64, 64)),
)


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """An update and a prompt of each."""
    n_seqs, n_tokens = SEQS[setting.device.type]
    for scan in SCANS:
        sizes = scan.on(setting.device.type)
        for single, n in ((True, n_seqs), (False, n_tokens)):
            what = f"{n} sequences" if single else f"prompt of {n}"
            make = functools.partial(_contenders, setting, scan.function, sizes, n, single)
            work = _work(setting, scan.function, sizes, n, single)
            model = scan.model if setting.device.type == "cuda" else "small"
            name, is_quick = f"{scan.function} {what}, {model}", scan.function != "convolve"
            yield Case(op, name, work, make, _kind(scan, single), quick=is_quick)


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """Rows and prompts of each."""
    for scan in SCANS:
        for implementation in _that_have(scan.function, setting):
            for single in (True, False):
                error = functools.partial(_error, setting, implementation, scan, single)
                allowed = reference.TOLERANCE[setting.dtype]
                yield Check(op, _kind(scan, single), implementation.name, error, allowed)


def _that_have(function: str, setting: Setting) -> list[catalog.Implementation]:
    """The implementations of ours that run here and have it."""
    listed = catalog.runnable("state", setting.device.type)
    return [one for one in listed if one.name != "reference" and function in one.functions]


def _kind(scan: Scan, single: bool) -> str:
    return f"{scan.function} {'rows' if single else 'prompt'}"


def _work(setting: Setting, function: str, sizes: Sizes, n: int, single: bool) -> Work:
    """Inputs and outputs once, and the states of all sequences; products of the dual form within pieces of `PIECE`."""
    width, item = sizes.heads * sizes.head_dim, setting.element_bytes
    n_states = n if single else 1
    if function == "convolve":
        kept = n_states * width * (sizes.size - 1) * item
        return Work(n * width * item + kept, n * width * item + kept, 2.0 * n * width * sizes.size)
    states = n_states * sizes.heads * sizes.head_dim * sizes.size * STATE_BYTES
    read = n * (width + 2 * sizes.shared * sizes.size + 2 * sizes.heads) * item + states
    each = 2 * sizes.head_dim * sizes.size
    flops = 2.0 * n * sizes.heads * (each if single else each + PIECE * (sizes.size + sizes.head_dim) // 2)
    return Work(read, n * width * item + states, flops)


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a function is called with."""

    rows: tuple[torch.Tensor, ...]
    state: torch.Tensor
    spans: StateSpans
    more: tuple[object, ...]

    def call(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        return function(*self.rows, self.state, self.spans, *self.more)


def _inputs(setting: Setting, function: str, sizes: Sizes, n: int, single: bool) -> Inputs:
    width = sizes.heads * sizes.head_dim
    n_lines = n if single else 1
    spans = _spans(setting, n, single)
    if function == "convolve":
        state = setting.randn(n_lines, sizes.size - 1, width)
        return Inputs(
            (setting.randn(n, width), setting.randn(width, sizes.size), setting.randn(width)), state, spans, (True,)
        )
    x, heads = setting.randn(n, sizes.heads, sizes.head_dim), functools.partial(setting.randn, sizes.heads)
    first, second = (setting.randn(n, sizes.shared, sizes.size) for _ in range(2))
    kind = torch.float64 if setting.dtype is torch.float64 else torch.float32
    steps = setting.randn(n, sizes.heads)
    if function == "scan_ssm":
        state = setting.randn(n_lines, sizes.heads, sizes.head_dim, sizes.size, dtype=kind)
        rows = (x, steps, first, second, heads(), heads(), heads())
        return Inputs(rows, state, spans, ((0.0, float("inf")),))
    state = setting.randn(n_lines, sizes.heads, sizes.size, sizes.head_dim, dtype=kind)
    return Inputs((first, second, x, steps, setting.randn(n, sizes.heads), heads(), heads()), state, spans, ())


def _spans(setting: Setting, n: int, single: bool) -> StateSpans:
    if single:
        lines = torch.arange(n, device=setting.device)
        return single_rows(lines, lines + 1)
    arrays = plan_spans(np.array([0, n]), np.array([0]), np.array([1]))
    return spans_of([torch.from_numpy(one).to(setting.device) for one in arrays])


def _contenders(setting: Setting, function: str, sizes: Sizes, n: int, single: bool) -> Iterable[Contender]:
    n_bytes = _work(setting, function, sizes, n, single).read_bytes
    copies = [_inputs(setting, function, sizes, n, single) for _ in range(setting.timer.n_copies(n_bytes))]
    for implementation in _that_have(function, setting):
        run = getattr(implementation.load(), function)
        calls = [functools.partial(one.call, run) for one in copies]
        yield Contender(implementation.name, functools.partial(list, calls))
    if function == "scan_delta" and setting.device.type == "cuda":
        yield Contender("fla", functools.partial(_fla_calls, copies, single), is_peer=True)


def _fla_calls(copies: Sequence[Inputs], single: bool) -> Sequence[Call]:
    """Its kernels take decays and weights as they are, and states by sequence: less work than ours do."""
    if importlib.util.find_spec("fla") is None:
        raise NotRun("flash-linear-attention is not installed")
    ops: Any = importlib.import_module("fla.ops.gated_delta_rule")
    run = ops.fused_recurrent_gated_delta_rule if single else ops.chunk_gated_delta_rule
    calls = []
    for one in copies:
        q, k, v, a, b, *_ = (x.unsqueeze(1 if single else 0) for x in one.rows)
        g = -torch.nn.functional.softplus(a.float())
        calls.append(functools.partial(
            run, q, k, v, g=g, beta=b.sigmoid(), initial_state=one.state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        ))  # fmt: skip
    return calls


def _error(setting: Setting, implementation: catalog.Implementation, scan: Scan, single: bool) -> float:
    """Largest difference of outputs and states, over 1 + the largest value."""
    sizes, n = scan.smaller(setting.device.type), FEW if single else 2 * PIECE + FEW
    inputs, kind = _inputs(setting, scan.function, sizes, n, single), torch.float64
    wide = Inputs(tuple(x.to(kind) for x in inputs.rows), inputs.state.to(kind), inputs.spans, inputs.more)
    expected = wide.call(getattr(reference, scan.function))
    got = inputs.call(getattr(implementation.load(), scan.function))
    pairs = ((got, expected), (inputs.state, wide.state))
    return max(float((a.double() - b).abs().max() / (1 + b.abs().max())) for a, b in pairs)
