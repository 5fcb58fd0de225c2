"""Dense attention in plain torch, scores and all: the oracle, with gradients by torch's own autograd.

Also owns what the CPU implementation shares with it: which keys are visible, and hooks evaluated on a block of logits.
"""

from __future__ import annotations

import torch

from quire.kernels.attention.variant import Variant, lowering
from quire.kernels.attention.variant.expression import Expr

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""dtype → largest |out - float64 reference| / (1 + |reference|): probabilities and output are rounded once."""

GRADIENT_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""The same for gradients, as a share of the largest: probabilities, their gradients and the result are rounded."""


class LogitBlock:
    """Coordinates of logits [.., hk, group, rows, keys] of one sequence or, where lengths agree, of several."""

    def __init__(self, first_row: torch.Tensor, rows: range, keys: range, q_len: int, kv_len: int) -> None:
        """first_row: [n_seqs], the flat row of each sequence's first query. rows, keys: of the block."""
        device = first_row.device
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        self.q_row = first_row[:, None, None, None, None] + row
        self.q_pos = row + (kv_len - q_len)
        self.k_pos = torch.arange(keys.start, keys.stop, device=device)

    def visible(self, variant: Variant, heads: torch.Tensor) -> torch.Tensor:
        """True where the query sees the key; broadcasts to the logits. heads: int64 [hk, group], query heads."""
        seen = torch.ones(self.q_pos.shape[0], self.k_pos.shape[0], dtype=torch.bool, device=self.k_pos.device)
        if variant.causal:
            seen = seen & (self.k_pos <= self.q_pos)
        if variant.window > 0:
            seen = seen & ((self.k_pos > self.q_pos - variant.window) | (self.k_pos < variant.n_first))
        mask = variant.program.hooks.get("logits_mask")
        if mask is not None:
            seen = seen & self.evaluate(mask, variant, heads, torch.zeros((), device=seen.device))
        return seen

    def evaluate(self, expr: Expr, variant: Variant, heads: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """A hook on the block."""
        heads = heads[:, :, None, None]
        site = {"q_row": self.q_row, "q_pos": self.q_pos, "k_pos": self.k_pos, "q_head": heads}
        site["kv_head"] = heads // heads.shape[1]
        leaves = {("site", name): value for name, value in site.items()} | {("value", "x"): logits}
        for name, scalar in variant.scalars.items():
            leaves["scalar", name] = torch.tensor(scalar, dtype=torch.float64, device=logits.device)
        for name, tensor in variant.tensors.items():
            leaves["load", name] = tensor
        return lowering.evaluate(expr, leaves, logits.dtype)


def q_heads(n_q_heads: int, n_kv_heads: int, device: torch.device) -> torch.Tensor:
    """int64 [n_kv_heads, group]: the query heads that read each head of keys."""
    return torch.arange(n_q_heads, device=device).view(n_kv_heads, -1)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of batched q, k, v as in op.py: softmax(logits) v. Differentiable; memory grows with q_len * kv_len.

    Arithmetic in float32, or in float64 for float64 inputs.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    n_seqs, q_len, hq, _ = q.shape
    kv_len, hk = k.shape[1:3]
    heads = q_heads(hq, hk, q.device)
    first_row = torch.arange(n_seqs, device=q.device) * q_len
    block = LogitBlock(first_row, range(q_len), range(kv_len), q_len, kv_len)
    logits = torch.einsum("bqhgd,bkhd->bhgqk", q.to(wide).unflatten(2, (hk, -1)), k.to(wide)) * variant.scale  # type: ignore[no-untyped-call]
    if "logits_transform" in variant.program.hooks:
        logits = block.evaluate(variant.program.hooks["logits_transform"], variant, heads, logits)
    visible = block.visible(variant, heads).expand(logits.shape)
    any_visible = visible.any(-1, keepdim=True)
    logits = logits.masked_fill(~visible & any_visible, float("-inf"))
    weights = torch.softmax(logits, dim=-1) * any_visible
    lse = torch.logsumexp(logits, dim=-1).masked_fill(~any_visible.squeeze(-1), float("-inf"))
    out = torch.einsum("bhgqk,bkhd->bqhgd", weights, v.to(wide)).flatten(2, 3)
    return out.to(q.dtype), lse.flatten(1, 2).transpose(1, 2)
