"""The variants that models use, each a few lines over `Variant`. Copy one to start your own."""

from __future__ import annotations

import torch

from quire.kernels.attention.variant import Params, Site, Variant
from quire.kernels.attention.variant.expression import (
    Expr,
    Operand,
    as_float,
    maximum,
    minimum,
    rotate_half,
    sigmoid,
    tanh,
)


def causal(scale: float, window: int = 0, n_first: int = 0) -> Variant:
    """Plain causal attention, or with a sliding window beside the first `n_first` positions."""
    return Variant(scale, window=window, n_first=n_first)


def soft_cap(scale: float, cap: float, window: int = 0) -> Variant:
    """Logits become cap * tanh(logit / cap) (Gemma 2, section 2)."""

    def capped(logits: Expr, site: Site, p: Params) -> Operand:
        return p.cap * tanh(logits / p.cap)

    return Variant(scale, window=window, logits_transform=capped, params={"cap": cap})


def alibi(scale: float, slopes: torch.Tensor) -> Variant:
    """Logits fall linearly with distance (Press et al. 2022, section 3). slopes: float32 [n_q_heads]."""

    def biased(logits: Expr, site: Site, p: Params) -> Operand:
        return logits + p.slopes[site.q_head] * as_float(site.k_pos - site.q_pos)

    return Variant(scale, logits_transform=biased, params={"slopes": slopes})


def learned_sinks(scale: float, sinks: torch.Tensor, window: int = 0) -> Variant:
    """Each head has one more logit in its softmax that has no value (gpt-oss). sinks: float32 [n_q_heads]."""

    def drained(o: Expr, site: Site, p: Params) -> Operand:
        return o * sigmoid(site.lse - p.sinks[site.q_head])

    return Variant(scale, window=window, output_transform=drained, params={"sinks": sinks})


def sigmoid_attention(scale: float, bias: float) -> Variant:
    """Weights are sigmoid(logit + bias), not normalised (Ramapuram et al. 2024, equation 3)."""

    def weight(logits: Expr, site: Site, p: Params) -> Operand:
        return sigmoid(logits + p.bias)

    return Variant(scale, softmax=False, logits_transform=weight, params={"bias": bias})


def custom_mask(scale: float, mask: torch.Tensor) -> Variant:
    """Any mask. mask: bool [n_rows, width], row = row of the flat batch, column = position of the key.

    Keys beyond its width are hidden.
    """

    def visible(site: Site, p: Params) -> Operand:
        return (site.k_pos < p.width) & p.mask[site.q_row * p.width + minimum(site.k_pos, p.width - 1)]

    return Variant(scale, causal=False, logits_mask=visible, params={"mask": mask, "width": mask.shape[1]})


def tree_mask(scale: float, ancestors: torch.Tensor, starts: torch.Tensor) -> Variant:
    """Draft tokens in a tree: each sees the committed text and its own ancestors (Miao et al. 2024, section 4).

    ancestors: bool [n_rows, width], [i, j]: draft j of the span is draft i or above it. starts: int32 [n_rows],
    position of the first draft of the row's span. Rows are those of the flat batch; drafts have consecutive positions.
    """

    def visible(site: Site, p: Params) -> Operand:
        draft = site.k_pos - p.starts[site.q_row]
        column = minimum(maximum(draft, 0), p.width - 1)
        return (draft < 0) | p.ancestors[site.q_row * p.width + column]

    params: dict[str, float | torch.Tensor] = {"ancestors": ancestors, "starts": starts, "width": ancestors.shape[1]}
    return Variant(scale, logits_mask=visible, params=params)


def rotary(scale: float, cos_sin: torch.Tensor, window: int = 0, n_first: int = 0) -> Variant:
    """Rotary positions applied while reading: keys are stored unrotated, positions are those inside the cache.

    cos_sin: float32 [max_positions, head_dim], cosines of d/2 angles, then their sines. With pages of the middle of a
    text dropped from its table this is StreamingLLM (Xiao et al. 2024, section 3.2).
    """

    def turned(x: Expr, position: Expr, site: Site, p: Params) -> Operand:
        at = position * dim + site.dim % (dim // 2)
        return x * p.cos_sin[at] + rotate_half(x) * p.cos_sin[at + dim // 2]

    dim = cos_sin.shape[1]
    return Variant(
        scale,
        window=window,
        n_first=n_first,
        query_transform=lambda x, site, p: turned(x, site.q_pos, site, p),
        key_transform=lambda x, site, p: turned(x, site.k_pos, site, p),
        params={"cos_sin": cos_sin},
    )
