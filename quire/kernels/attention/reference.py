"""Attention in plain torch: the oracle of every implementation, and what a variant means.

Arithmetic in float32, or float64 for float64 inputs. Reads nothing but the keys and values that a plan names.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.attention.schedule.plan import AttnPlan, Layout
from quire.kernels.attention.variant import Variant, lowering
from quire.kernels.kvstore import entry

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""dtype → largest |kernel - float64 reference| for values of about unit size: probabilities and output rounded once."""

MAX_BLOCK_ROWS = 256
MAX_LOGITS = 1 << 24
"""Rows of a span are taken in blocks of at most so many rows and logits, which bounds the memory."""


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: entry.Scales = entry.UNIT,
) -> None:
    """One span after another, in blocks of rows. Shapes: see `op.run`; keys and values of 8 bits are converted.

    lse [n, n_q_heads] gets the natural logarithm of the sum of weights, -inf for a row that sees nothing (its output
    transform is given 0). Without softmax there is none: NaN.
    """
    bounds, kv_lens = plan.spans.q_indptr.tolist(), plan.spans.kv_lens.tolist()
    for span, (start, stop, kv_len) in enumerate(zip(bounds, bounds[1:], kv_lens, strict=False)):
        if start == stop:
            continue
        if plan.spans.trees is not None and plan.spans.trees.firsts[span] < kv_len:
            _run_tree(q, k, v, plan, variant, span, out, lse, scales)
            continue
        k_pos = torch.from_numpy(_positions(plan, span)).to(q.device)
        block = _Block(plan, variant, *_gather(k, v, plan, span, k_pos), k_pos, q, scales)
        n_rows = max(1, min(MAX_BLOCK_ROWS, MAX_LOGITS // max(1, q.shape[1] * len(k_pos))))
        for first in range(start, stop, n_rows):
            rows = torch.arange(first, min(first + n_rows, stop), device=q.device)
            block.put(q, rows, rows + (kv_len - stop), out, lse)


def _run_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttnPlan,
    variant: Variant,
    span: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: entry.Scales,
) -> None:
    """Row after row, each over the keys of its path in their order."""
    assert plan.spans.trees is not None
    first = int(plan.spans.trees.firsts[span])
    for row in range(*plan.spans.q_indptr[span : span + 2].tolist()):
        path = int(plan.spans.trees.paths[row])
        nodes = [first + i for i in range(path.bit_length()) if path >> i & 1]
        places = torch.tensor([*range(first), *nodes], device=q.device)
        k_pos = torch.arange(len(places), device=q.device)
        block = _Block(plan, variant, *_gather(k, v, plan, span, places), k_pos, q, scales)
        block.put(q, torch.tensor([row], device=q.device), k_pos[-1:], out, lse)


def _positions(plan: AttnPlan, span: int) -> np.ndarray:
    """int64: the positions of the span's keys."""
    every = np.arange(plan.spans.kv_lens[span])
    if plan.layout is not Layout.SPARSE:
        return every
    indptr, blocks = plan.spans.listed
    entries = slice(*indptr[span : span + 2])
    listed = blocks[entries, None] * np.int64(plan.page_size) + np.arange(plan.page_size)
    seen: np.ndarray = listed[listed < len(every)]
    return seen


def _gather(
    k: torch.Tensor, v: torch.Tensor, plan: AttnPlan, span: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of keys and values at these positions, [n_keys, n_kv_heads, entry]."""
    at = int(plan.spans.kv_at[span])
    if plan.layout is Layout.RAGGED:
        return k[at + positions], v[at + positions]
    pages = plan.paged_table[at].long()[positions // plan.page_size]
    offsets = positions % plan.page_size
    return k[pages, :, offsets], v[pages, :, offsets]


class _Block:
    """The keys of one span, and how rows attend to them."""

    def __init__(
        self,
        plan: AttnPlan,
        variant: Variant,
        keys: torch.Tensor,
        values: torch.Tensor,
        k_pos: torch.Tensor,
        q: torch.Tensor,
        scales: entry.Scales,
    ) -> None:
        self.variant, self.k_pos = variant, k_pos
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.params = {("load", name): value for name, value in variant.tensors.items()}
        for name, value in variant.scalars.items():
            self.params["scalar", name] = torch.tensor(value, dtype=torch.float64, device=q.device)
        self.q_head = torch.arange(plan.heads.n_q_heads, device=q.device)
        self.kv_head = self.q_head // plan.heads.group
        self.dim = torch.arange(plan.heads.head_dim, device=q.device)
        # Site of one element of a key or value: [n_keys, n_kv_heads, head_dim].
        site = {
            "k_pos": k_pos[:, None, None],
            "kv_head": torch.arange(plan.heads.n_kv_heads, device=q.device)[:, None],
            "dim": self.dim,
        }
        self.keys = self._hook("key_transform", entry.decode(keys, self.wide, scales.k), site)
        self.values = self._hook("value_transform", entry.decode(values, self.wide, scales.v), site)

    def put(
        self, q: torch.Tensor, rows: torch.Tensor, q_pos: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Attend rows of q, which stand at q_pos."""
        result, state = self.attend(q[rows], rows, q_pos)
        out[rows] = result.to(out.dtype)
        if lse is not None:
            lse[rows] = state.to(lse.dtype)

    def attend(self, q: torch.Tensor, q_row: torch.Tensor, q_pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, n_q_heads, head_dim] → output of the same shape, lse [n, n_q_heads]."""
        site = {
            "q_row": q_row[:, None, None],
            "q_pos": q_pos[:, None, None],
            "q_head": self.q_head[:, None],
            "kv_head": self.kv_head[:, None],
        }
        q = self._hook("query_transform", q.to(self.wide), site | {"dim": self.dim})
        grouped = q.unflatten(1, (self.keys.shape[1], -1))  # type: ignore[no-untyped-call]
        logits = torch.einsum("nhgd,khd->nhgk", grouped, self.keys).flatten(1, 2) * self.variant.scale
        pair = site | {"k_pos": self.k_pos}
        logits = self._hook("logits_transform", logits, pair)
        weights, lse = self._weigh(logits, self._visible(pair, logits))
        grouped = weights.unflatten(1, (self.keys.shape[1], -1))  # type: ignore[no-untyped-call]
        o = torch.einsum("nhgk,khd->nhgd", grouped, self.values).flatten(1, 2)
        return self._hook("output_transform", o, site | {"dim": self.dim, "lse": lse.unsqueeze(-1)}), lse

    def _visible(self, site: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """bool [n, n_q_heads, n_keys]."""
        q_pos, k_pos = site["q_pos"], site["k_pos"]
        visible = torch.ones_like(like, dtype=torch.bool)
        if self.variant.causal:
            visible &= k_pos <= q_pos
        if self.variant.window > 0:
            visible &= (k_pos > q_pos - self.variant.window) | (k_pos < self.variant.n_first)
        if "logits_mask" in self.variant.program.hooks:
            visible &= self._hook("logits_mask", visible, site)
        return visible

    def _weigh(self, logits: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [n, n_q_heads, n_keys], 0 where a key is hidden, and the logarithm of their sum before division."""
        if not self.variant.softmax:
            return logits.masked_fill(~visible, 0.0), logits.new_full(logits.shape[:2], float("nan"))
        logits = logits.masked_fill(~visible, float("-inf"))
        lse = logits.logsumexp(-1)
        finite = lse.masked_fill(lse == float("-inf"), 0.0)
        return torch.exp(logits - finite.unsqueeze(-1)), lse

    def _hook(self, name: str, x: torch.Tensor, site: dict[str, torch.Tensor]) -> torch.Tensor:
        """The hook's value for each element of x, or x if the variant has no such hook."""
        expr = self.variant.program.hooks.get(name)
        if expr is None:
            return x
        leaves = {("site", coordinate): value for coordinate, value in site.items()} | self.params
        if "dim" in site:
            first, second = x.chunk(2, dim=-1) if x.shape[-1] % 2 == 0 else (x, x[..., :0])
            leaves["partner", "half"] = torch.cat((-second, first), dim=-1)
        return lowering.evaluate(expr, {**leaves, ("value", "x"): x}, self.wide).expand(x.shape)
