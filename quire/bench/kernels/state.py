"""Cases of the recurrent mixers: one token of many sequences, and a long prompt, at the sizes of known models.

The peer of the delta rule is flash-linear-attention (`state_peer`); torch is the reference, which goes token by token
and takes no part in prompts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from quire.bench.kernels import state_peer
from quire.bench.kernels.case import Case, Check, Contender, NotRun, Setting
from quire.bench.kernels.limits import Work
from quire.config.states import PIECE
from quire.kernels import catalog
from quire.kernels.catalog import Implementation
from quire.kernels.invariance import rows_alone
from quire.kernels.state import reference
from quire.kernels.state.spans import StateSpans, plan_spans, single_rows, spans_of


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Sequences of one length."""

    n_seqs: int
    n_tokens: int = 1
    """Of each; 1: an update, as steps of decodes have it."""

    @property
    def n_rows(self) -> int:
        return self.n_seqs * self.n_tokens

    @property
    def single(self) -> bool:
        return self.n_tokens == 1

    def __str__(self) -> str:
        if self.single:
            return f"{self.n_seqs} sequence{'s' * (self.n_seqs != 1)}"
        return f"prompt of {self.n_tokens}" if self.n_seqs == 1 else f"{self.n_seqs} prompts of {self.n_tokens}"


LOADS: Final = {"cuda": (Load(64), Load(1, 8192)), "cpu": (Load(8), Load(1, 512))}
"""Of every function; what `--quick` measures."""
MORE_LOADS: Final = (Load(1), Load(8), Load(32), Load(256), Load(1, 1024), Load(1, 2048), Load(8, 1024))
"""Of the delta rule on a GPU, where there is a peer."""
STATE_BYTES: Final = 4
FEW: Final = 33
"""Times the heads of a check 128 or more: fewer have another kernel for updates on Hopper."""
CHECKED: Final = {"rows": Load(FEW), "prompts": Load(2, 2 * PIECE + FEW)}
"""What is compared with the reference; prompts end within a piece."""
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

    @property
    def has_peer(self) -> bool:
        """On a GPU."""
        return self.function == "scan_delta"


SCANS: Final = (
    Scan("convolve", "Qwen3-Next", Sizes(64, 1, 128, 4), Sizes(16, 1, 64, 4)),
    Scan("scan_ssm", "Mamba-2 2.7B", Sizes(80, 1, 64, 128), Sizes(16, 1, 64, 64)),
    Scan("scan_delta", "Qwen3-Next", Sizes(32, 16, 128, 128), Sizes(8, 4, 64, 64)),
)


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """Updates and prompts of each."""
    device = setting.device.type
    for scan in SCANS:
        for load in LOADS[device] + (MORE_LOADS if scan.has_peer and device == "cuda" else ()):
            sizes = scan.on(device)
            work = _work(setting, scan.function, sizes, load)
            make = functools.partial(_contenders, setting, scan.function, sizes, load)
            name = f"{scan.function} {load}, {scan.model if device == 'cuda' else 'small'}"
            quick = scan.function != "convolve" and load in LOADS[device]
            yield Case(op, name, work, make, _kind(scan, "rows" if load.single else "prompts"), quick=quick)


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """Rows and prompts of each; of the delta rule on a GPU the peer's too."""
    device = setting.device.type
    for scan in SCANS:
        takers: list[tuple[str, Taker]] = [
            (one.name, functools.partial(_taker, one, scan.function)) for one in _ours(scan.function, setting)
        ]
        for what, load in CHECKED.items():
            also: list[tuple[str, Taker]] = [(state_peer.NAME, functools.partial(_peer_taker, load))]
            for name, taker in (*takers, *(also if scan.has_peer and device == "cuda" else ())):
                error = functools.partial(_error, setting, taker, scan.function, scan.smaller(device), load)
                yield Check(op, _kind(scan, what), name, error, reference.TOLERANCE[setting.dtype])


def _kind(scan: Scan, what: str) -> str:
    return f"{scan.function} {what}"


def _ours(function: str, setting: Setting) -> list[Implementation]:
    """What computes it here, but for the reference."""
    runnable = catalog.runnable("state", setting.device.type)
    return [one for one in runnable if function in one.functions and one.name != "reference"]


def _taker(implementation: Implementation, function: str, inputs: Inputs) -> Callable[..., torch.Tensor]:
    """The function that takes the inputs. Raises NotRun with the reason where it does not; that rows are not alone is
    none."""
    module = implementation.load()
    condition = catalog.condition_of(module)
    with rows_alone():
        refused = None if condition is None else condition(*inputs.rows, inputs.state, inputs.spans)
    if isinstance(refused, str):
        raise NotRun(refused)
    run: Callable[..., torch.Tensor] = getattr(module, function)
    return run


def _work(setting: Setting, function: str, sizes: Sizes, load: Load) -> Work:
    """Inputs and outputs once, and the states of all sequences; products of the dual form within pieces of `PIECE`."""
    n, width, item = load.n_rows, sizes.heads * sizes.head_dim, setting.element_bytes
    if function == "convolve":
        kept = load.n_seqs * width * (sizes.size - 1) * item
        return Work(n * width * item + kept, n * width * item + kept, 2.0 * n * width * sizes.size)
    states = load.n_seqs * sizes.heads * sizes.head_dim * sizes.size * STATE_BYTES
    read = n * (width + 2 * sizes.shared * sizes.size + 2 * sizes.heads) * item + states
    each = 2 * sizes.head_dim * sizes.size
    within = 0 if load.single else PIECE * (sizes.size + sizes.head_dim) // 2
    return Work(read, n * width * item + states, 2.0 * n * sizes.heads * (each + within))


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a function is called with."""

    rows: tuple[torch.Tensor, ...]
    state: torch.Tensor
    spans: StateSpans
    more: tuple[object, ...]

    def call(self, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        return function(*self.rows, self.state, self.spans, *self.more)


Taker = Callable[[Inputs], Callable[..., torch.Tensor]]
"""What gives the function that takes some inputs."""


def _inputs(setting: Setting, function: str, sizes: Sizes, load: Load) -> Inputs:
    n, width = load.n_rows, sizes.heads * sizes.head_dim
    spans = _spans(setting, load)
    if function == "convolve":
        state = setting.randn(load.n_seqs, sizes.size - 1, width)
        return Inputs(
            (setting.randn(n, width), setting.randn(width, sizes.size), setting.randn(width)), state, spans, (True,)
        )
    x = setting.randn(n, sizes.heads, sizes.head_dim)
    first, second = (setting.randn(n, sizes.shared, sizes.size) for _ in range(2))
    kind = torch.float64 if setting.dtype is torch.float64 else torch.float32
    steps, heads = setting.randn(n, sizes.heads), functools.partial(setting.randn, sizes.heads, dtype=kind)
    if function == "scan_ssm":
        state = setting.randn(load.n_seqs, sizes.heads, sizes.head_dim, sizes.size, dtype=kind)
        rows = (x, steps, first, second, heads(), heads(), heads())
        return Inputs(rows, state, spans, ((0.0, float("inf")),))
    state = setting.randn(load.n_seqs, sizes.heads, sizes.size, sizes.head_dim, dtype=kind)
    return Inputs((first, second, x, steps, setting.randn(n, sizes.heads), heads(), heads()), state, spans, ())


def _spans(setting: Setting, load: Load) -> StateSpans:
    lines = torch.arange(load.n_seqs, device=setting.device)
    if load.single:
        return single_rows(lines, lines + 1)
    indptr = np.arange(load.n_seqs + 1) * load.n_tokens
    arrays = plan_spans(indptr, np.arange(load.n_seqs), np.ones(load.n_seqs, np.int64))
    return spans_of([torch.from_numpy(one).to(setting.device) for one in arrays])


def _contenders(setting: Setting, function: str, sizes: Sizes, load: Load) -> Iterable[Contender]:
    n_bytes = _work(setting, function, sizes, load).read_bytes
    copies = [_inputs(setting, function, sizes, load) for _ in range(setting.timer.n_copies(n_bytes))]
    for one in _ours(function, setting):
        yield Contender(one.name, functools.partial(_calls, functools.partial(_taker, one, function), copies))
    if function == "scan_delta" and setting.device.type == "cuda":
        yield Contender(state_peer.NAME, lambda: _peer_calls(copies, load), is_peer=True)


def _peer_taker(load: Load, _: Inputs) -> Callable[..., torch.Tensor]:
    return functools.partial(state_peer.scan_delta, n_seqs=load.n_seqs)


def _calls(taker: Taker, copies: Sequence[Inputs]) -> Sequence[Callable[[], object]]:
    run = taker(copies[0])
    return [functools.partial(one.call, run) for one in copies]


def _peer_calls(copies: Iterable[Inputs], load: Load) -> Sequence[Callable[[], object]]:
    """Without the copy of its states into ours; with the blocks that are best at this size."""
    calls = [state_peer.call_of(one.rows, one.state, load.n_seqs) for one in copies]
    state_peer.tune_anew()
    return calls


def _error(setting: Setting, taker: Taker, function: str, sizes: Sizes, load: Load) -> float:
    """Largest difference of outputs and states, over 1 + the largest value. Raises NotRun."""
    inputs = _inputs(setting, function, sizes, load)
    kind = torch.float64
    wide = Inputs(tuple(x.to(kind) for x in inputs.rows), inputs.state.to(kind), inputs.spans, inputs.more)
    expected = wide.call(getattr(reference, function))
    got = inputs.call(taker(inputs))
    pairs = ((got, expected), (inputs.state, wide.state))
    return max(float((a.double() - b).abs().max() / (1 + b.abs().max())) for a, b in pairs)
