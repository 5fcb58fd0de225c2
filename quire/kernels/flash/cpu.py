"""Dense attention on the CPU, in torch, block by block: memory linear in the sequence length, any floating dtype.

Flash attention (Dao et al. 2022, algorithms 2 and 4) over blocks of `ROWS` queries and `KEYS` keys of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels.attention.variant import Variant, expression
from quire.kernels.flash.op import Ragged
from quire.kernels.flash.reference import LogitBlock, q_heads

ROWS, KEYS = 128, 512


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, ragged: Ragged | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.py. lse: [batch, n_q_heads, rows]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide)
    for first_row, at, keys_at in _sequences(q, k, ragged):
        part = _Part(first_row, q[:, at], k[:, keys_at], variant)
        values = v[:, keys_at]
        for rows in part.row_blocks():
            queries = part.fold(q[:, at][:, rows.start : rows.stop])
            acc = torch.zeros_like(queries)
            total = torch.zeros_like(queries[..., :1])
            top = torch.full_like(total, float("-inf"))
            for keys in part.key_blocks(rows):
                logits, visible, _ = part.logits(queries, rows, keys)
                logits = logits.masked_fill(~visible, float("-inf"))
                new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
                base = new_top.masked_fill(new_top == float("-inf"), 0.0)
                weights, rescale = torch.exp(logits - base), torch.exp(top - base)
                acc = acc * rescale + weights @ part.heads_first(values, keys)
                total = total * rescale + weights.sum(-1, keepdim=True)
                top = new_top
            base = top.masked_fill(top == float("-inf"), 0.0)
            out[:, at][:, rows.start : rows.stop] = part.unfold(acc / total.masked_fill(total == 0, 1.0)).to(q.dtype)
            lse[:, :, at][:, :, rows.start : rows.stop] = part.unfold(base + total.log()).squeeze(-1).transpose(1, 2)
    return out, lse


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    variant: Variant,
    ragged: Ragged | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; d_lse like lse."""
    wide = lse.dtype
    dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
    for first_row, at, keys_at in _sequences(q, k, ragged):
        part = _Part(first_row, q[:, at], k[:, keys_at], variant)
        for rows in part.row_blocks():
            here = slice(at.start + rows.start, at.start + rows.stop)
            queries, d_rows = part.fold(q[:, here]), part.fold(d_out[:, here])
            delta = (d_rows * part.fold(out[:, here])).sum(-1, keepdim=True)
            if d_lse is not None:
                delta = delta - part.fold(d_lse[:, :, here].transpose(1, 2).unsqueeze(-1))
            norm = part.fold(lse[:, :, here].transpose(1, 2).unsqueeze(-1))
            d_queries = torch.zeros_like(queries)
            for keys in part.key_blocks(rows):
                there = slice(keys_at.start + keys.start, keys_at.start + keys.stop)
                logits, visible, slope = part.logits(queries, rows, keys)
                weights = torch.exp(logits - norm).masked_fill(~visible, 0.0)
                dv[:, there] += (weights.mT @ d_rows).transpose(1, 2)
                d_weights = d_rows @ part.heads_first(v[:, keys_at], keys).mT
                d_logits = (weights * (d_weights - delta) * slope).masked_fill(~visible, 0.0) * variant.scale
                d_queries += d_logits @ part.heads_first(k[:, keys_at], keys)
                dk[:, there] += (d_logits.mT @ queries).transpose(1, 2)
            dq[:, here] = part.unfold(d_queries)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sequences(q: torch.Tensor, k: torch.Tensor, ragged: Ragged | None) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """(flat row of each first query, rows, keys): all of a batch at once, or one ragged sequence at a time."""
    if ragged is None:
        yield torch.arange(q.shape[0]) * q.shape[1], slice(0, q.shape[1]), slice(0, k.shape[1])
        return
    bounds = zip(ragged.q_bounds[:-1], ragged.q_bounds[1:], ragged.kv_bounds[:-1], ragged.kv_bounds[1:], strict=True)
    for begin, end, kv_begin, kv_end in (map(int, line) for line in bounds):
        yield torch.tensor([begin]), slice(begin, end), slice(kv_begin, kv_end)


class _Part:
    """Sequences of one length. "Folded": [batch, n_kv_heads, group * rows, d] in the wide dtype."""

    def __init__(self, first_row: torch.Tensor, q: torch.Tensor, k: torch.Tensor, variant: Variant) -> None:
        self._first_row, self._k, self._variant = first_row, k, variant
        self._q_len, self._kv_len = q.shape[1], k.shape[1]
        self._heads = q_heads(q.shape[2], k.shape[2], q.device)
        self._wide = torch.promote_types(q.dtype, torch.float32)
        self._transform = variant.program.hooks.get("logits_transform")
        self._slope = None if self._transform is None else expression.derivative(self._transform)

    def row_blocks(self) -> Iterator[range]:
        yield from (range(i, min(i + ROWS, self._q_len)) for i in range(0, self._q_len, ROWS))

    def key_blocks(self, rows: range) -> Iterator[range]:
        """Blocks with keys that causality and window leave to some row."""
        variant, shift = self._variant, self._kv_len - self._q_len
        end = min(self._kv_len, rows.stop + shift) if variant.causal else self._kv_len
        begin = max(0, rows.start + shift - variant.window + 1) if variant.window else 0
        for i in range(0, end, KEYS):
            if i + KEYS > begin or i < variant.n_first:
                yield range(i, min(i + KEYS, end))

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, rows, n_q_heads, d] → folded."""
        n_kv_heads = self._heads.shape[0]
        by_head: torch.Tensor = x.to(self._wide).unflatten(2, (n_kv_heads, -1))  # type: ignore[no-untyped-call]
        return by_head.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def unfold(self, x: torch.Tensor) -> torch.Tensor:
        by_head: torch.Tensor = x.unflatten(2, (self._heads.shape[1], -1))  # type: ignore[no-untyped-call]
        return by_head.flatten(1, 2).transpose(1, 2)

    def heads_first(self, x: torch.Tensor, keys: range) -> torch.Tensor:
        """[batch, keys, n_kv_heads, d] → [batch, n_kv_heads, keys, d] of one block, wide."""
        return x[:, keys.start : keys.stop].transpose(1, 2).to(self._wide)

    def logits(
        self, queries: torch.Tensor, rows: range, keys: range
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
        """Logits, which are visible, d logits / d (scale * q k), folded: [batch, n_kv_heads, group * rows, keys]."""
        variant, heads = self._variant, self._heads
        logits = queries @ self.heads_first(self._k, keys).mT * variant.scale
        deep = logits.unflatten(2, (heads.shape[1], -1))  # type: ignore[no-untyped-call]
        block = LogitBlock(self._first_row, rows, keys, self._q_len, self._kv_len)
        visible = block.visible(variant, heads).expand(deep.shape).flatten(2, 3)
        if self._transform is None or self._slope is None:
            return logits, visible, 1.0
        slope = block.evaluate(self._slope, variant, heads, deep).expand(deep.shape).flatten(2, 3)
        return block.evaluate(self._transform, variant, heads, deep).expand(deep.shape).flatten(2, 3), visible, slope
