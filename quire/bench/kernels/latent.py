"""Cases of latent attention: decode, drafts and prefill over pages of one line a token, and lines into pages.

The limit is what must be read: each line once, whatever the number of heads. Torch's peer has lines without pages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from quire.bench.kernels import rows
from quire.bench.kernels.attention import able, implementations
from quire.bench.kernels.case import Case, Check, Contender, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.paged import Batch, lognormal
from quire.bench.kernels.timing import Call
from quire.kernels.attention import op, reference
from quire.kernels.attention.schedule.plan import AttnPlan, Heads
from quire.kernels.attention.variant import Variant

RANK, ROPE = 512, 64
"""DeepSeek-V2 and V3."""
VARIANT = Variant((128 + ROPE) ** -0.5)
TAKING = {"hopper-latent", "latent", "cpu", "reference"}
"""Implementations of attention that take values which are a part of keys."""
SPANS = {
    "decode": ((2100, 1), (300, 1), (7, 1)),
    "verify": ((2100, 4), (300, 4), (7, 4)),
    "prefill": ((300, 300), (77, 77), (150, 50)),
}
"""Of checks, by the kind of the batch: keys that are split, and few."""


def _heads(n: int, rank: int = RANK, rope: int = ROPE) -> Heads:
    return Heads(n, 1, rank + rope, rank)


def _batches(device: str) -> dict[str, Batch]:
    """Name of a case → its batch. 16 heads: V2-Lite, or V3 on 8 ranks; 128: V3."""
    if device == "cpu":
        return {"decode 4 x 512, 16 heads": Batch(((512, 1),) * 4, _heads(16))}
    found = {
        f"decode {b} x {k}k, {n} heads": Batch(((1024 * k, 1),) * b, _heads(n))
        for n in (16, 128)
        for b, k in ((1, 4), (64, 4), (256, 1), (16, 16))
    }
    found["decode 64 lognormal, 16 heads"] = Batch(tuple(lognormal(7.3, 0.8, seed=1106)), _heads(16))
    found["verify 4 rows, 64 x 4k, 16 heads"] = Batch(((4096, 4),) * 64, _heads(16))
    found["prefill 4k, 16 heads"] = Batch(((4096, 4096),), _heads(16))
    return found


def cases(op_name: str, setting: Setting) -> Iterator[Case]:
    """Attention first, then what stores its lines."""
    for name, batch in _batches(setting.device.type).items():
        yield Case(
            op_name, name, _work(batch, setting.element_bytes), functools.partial(_contenders, batch, setting),
            _kind(batch), in_flops="prefill" in name, quick="64 x 4k" in name or setting.device.type == "cpu",
        )  # fmt: skip
    yield from rows.cases(op_name, setting)


def checks(op_name: str, setting: Setting) -> Iterator[Check]:
    """Each kind of batch that is timed, by each implementation of attention that takes it here; the storing."""
    kinds = {_kind(batch): batch.heads for batch in _batches(setting.device.type).values()}
    for name in sorted(TAKING.intersection(implementations(setting.device.type))):
        for kind, heads in kinds.items():
            error = functools.partial(_error, name, Batch(SPANS[kind.split(",")[0]], heads), setting)
            yield Check(op_name, kind, name, error, reference.TOLERANCE[setting.dtype])
    yield from rows.checks(op_name, setting)


def _kind(batch: Batch) -> str:
    n_rows = batch.lengths.max()
    return f"{'decode' if n_rows == 1 else 'verify' if n_rows <= 16 else 'prefill'}, {batch.heads.n_q_heads} heads"


def _work(batch: Batch, element_bytes: int) -> Work:
    heads = batch.heads
    n_pairs = sum(length * kv_len - length * (length - 1) // 2 for kv_len, length in batch.spans)
    rows_bytes = batch.n_rows * heads.n_q_heads * element_bytes
    read_bytes = int(batch.kv_lens.sum()) * heads.head_dim * element_bytes + rows_bytes * heads.head_dim
    flops = 2.0 * n_pairs * heads.n_q_heads * (heads.head_dim + heads.out_dim)
    return Work(read_bytes, rows_bytes * heads.out_dim, flops)


@dataclasses.dataclass(frozen=True, slots=True)
class _Inputs:
    """Queries, pools of lines, and the plan of a batch."""

    q: torch.Tensor
    pools: list[torch.Tensor]
    plan: AttnPlan


def _inputs(batch: Batch, setting: Setting, n_copies: int = 0) -> _Inputs:
    heads, (table, n_pages) = batch.heads, batch.page_table()
    n_copies = n_copies or setting.timer.n_copies(_work(batch, setting.element_bytes).read_bytes)
    shape = (n_pages, 1, batch.page_size, heads.head_dim)
    plan = op.plan(
        batch.q_indptr(), batch.kv_lens, np.arange(len(batch.spans), dtype=np.int32),
        torch.from_numpy(table).to(setting.device), page_size=batch.page_size, **dataclasses.asdict(heads),
    )  # fmt: skip
    q = setting.randn(batch.n_rows, heads.n_q_heads, heads.head_dim)
    return _Inputs(q, [setting.randn(*shape) for _ in range(n_copies)], plan)


def _contenders(batch: Batch, setting: Setting) -> Iterable[Contender]:
    inputs = _inputs(batch, setting)
    for name in implementations(setting.device.type):
        yield Contender(name, functools.partial(_calls, name, inputs))
    if batch.uniform and batch.spans[0][1] == 1:
        yield Contender("torch", functools.partial(_dense, batch, setting), is_peer=True)


def _calls(name: str, inputs: _Inputs) -> Sequence[Call]:
    """Raises NotRun, as most implementations take keys and values of heads."""
    module, q, plan = able(name, inputs.plan, VARIANT, inputs.q.dtype, inputs.q.dtype), inputs.q, inputs.plan
    out = q.new_empty(*q.shape[:2], plan.heads.out_dim)
    views = [(pool, pool[..., : plan.heads.out_dim]) for pool in inputs.pools]
    return [functools.partial(module.run, q, k, v, plan, VARIANT, out, None) for k, v in views]


def _dense(batch: Batch, setting: Setting) -> Sequence[Call]:
    """One row of each of equally long sequences: two batched products and a softmax."""
    (kv_len, _), n, heads = batch.spans[0], len(batch.spans), batch.heads
    q = setting.randn(n, heads.n_q_heads, heads.head_dim)
    n_copies = setting.timer.n_copies(_work(batch, setting.element_bytes).read_bytes)

    def attend(lines: torch.Tensor) -> torch.Tensor:
        weights = torch.bmm(q, lines.transpose(1, 2)).mul_(VARIANT.scale).softmax(-1)
        return torch.bmm(weights, lines[..., : heads.out_dim])

    return [functools.partial(attend, setting.randn(n, kv_len, heads.head_dim)) for _ in range(n_copies)]


def _error(name: str, batch: Batch, setting: Setting) -> float:
    """Largest difference from the reference in float64, with NaN wherever no token is."""
    inputs = _inputs(batch, setting, n_copies=1)
    _poison(batch, inputs.pools[0])
    module = able(name, inputs.plan, VARIANT, inputs.q.dtype, inputs.q.dtype)
    k, rank = inputs.pools[0], inputs.plan.heads.out_dim
    got, expected = (
        torch.empty(*inputs.q.shape[:2], rank, dtype=dtype, device=k.device) for dtype in (k.dtype, torch.float64)
    )
    module.run(inputs.q, k, k[..., :rank], inputs.plan, VARIANT, got, None)
    wide = k.double()
    reference.run(inputs.q.double(), wide, wide[..., :rank], inputs.plan, VARIANT, expected, None)
    return float((got.double() - expected).abs().max())


def _poison(batch: Batch, lines: torch.Tensor) -> None:
    size, (table, _) = batch.page_size, batch.page_table()
    lines[0] = torch.nan
    for row, kv_len in zip(table, batch.kv_lens.tolist(), strict=True):
        if kv_len % size:
            lines[int(row[kv_len // size]), :, kv_len % size :] = torch.nan
