"""Cases of dense attention for every test of it: random tensors, variants by name, errors against float64 autograd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from quire.kernels.attention.variant import Params, Site, Variant, variants
from quire.kernels.attention.variant.expression import Expr, Operand, as_float, exp, log, maximum, sigmoid, where
from quire.kernels.flash import flash_attention, reference


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, and the name of a variant."""

    variant: str
    n_seqs: int
    q_len: int
    kv_len: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
        """q, k, v of about unit size; v with strides of a transposed tensor."""
        q = torch.randn(self.n_seqs, self.q_len, self.n_q_heads, self.head_dim, dtype=dtype, device=device)
        k = torch.randn(self.n_seqs, self.kv_len, self.n_kv_heads, self.head_dim, dtype=dtype, device=device)
        v = torch.randn(self.n_seqs, self.n_kv_heads, self.kv_len, self.head_dim, dtype=dtype, device=device)
        return [x.requires_grad_() for x in (q, k, v.transpose(1, 2))]

    def build(self, device: str = "cpu") -> Variant:
        return VARIANTS[self.variant](self, device)


def own(case: Case, device: str) -> Variant:
    """Everything a transform may do, in one: scalars, tensors, every coordinate, functions with derivatives."""

    def shaped(x: Expr, site: Site, p: Params) -> Operand:
        far = as_float(maximum(site.q_pos - site.k_pos, 0)) / p.reach
        bent = where(x > 0, log(1.0 + x * x), p.cap * (sigmoid(x / p.cap) - 0.5))
        return bent * p.gains[site.kv_head] + exp(-far) * as_float(site.q_row % p.period) - as_float(site.q_head)

    gains = torch.linspace(0.5, 1.5, case.n_kv_heads, device=device)
    params = {"reach": 7.5, "cap": 1.1, "period": 3, "gains": gains}
    return Variant(case.head_dim**-0.5, window=40, n_first=3, logits_transform=shaped, params=params)


def masked(case: Case, device: str) -> Variant:
    """A random mask in which some rows see nothing."""
    mask = torch.rand(case.n_seqs * case.q_len, case.kv_len, device=device) < 0.3
    mask[::5] = False
    return variants.custom_mask(case.head_dim**-0.5, mask)


VARIANTS: dict[str, Callable[[Case, str], Variant]] = {
    "causal": lambda case, device: Variant(case.head_dim**-0.5),
    "full": lambda case, device: Variant(case.head_dim**-0.5, causal=False),
    "window": lambda case, device: Variant(case.head_dim**-0.5, window=13),
    "full window": lambda case, device: Variant(case.head_dim**-0.5, window=20, causal=False),
    "sinks": lambda case, device: Variant(case.head_dim**-0.5, window=50, n_first=37),
    "soft-cap": lambda case, device: variants.soft_cap(1.0, 1.5, window=45),
    "alibi": lambda case, device: variants.alibi(
        case.head_dim**-0.5, torch.linspace(0.1, 0.4, case.n_q_heads, device=device)
    ),
    "mask": masked,
    "own": own,
}


def errors(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Name of a result → its error as a share of the tolerance: more than 1 is wrong."""
    inputs, variant = case.inputs(dtype, device), case.build(device)
    got = flash_attention(*inputs, variant, return_lse=True)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference.flash_attention(*wide, variant)
    blind = torch.isinf(expected[1])
    assert torch.equal(blind, torch.isinf(got[1]))
    assert not got[0][blind].any()
    seeds = [torch.randn_like(got[0]), torch.where(blind, 0.0, torch.randn_like(got[1]))]
    slopes = torch.autograd.grad(got, inputs, seeds)
    got = [x.detach() for x in got]
    right_slopes = torch.autograd.grad(expected, wide, [seed.double() for seed in seeds])
    expected = [x.detach() for x in expected]
    assert not slopes[0][blind].any(), "a row that sees nothing has a gradient"
    tolerance, gradient_tolerance = reference.TOLERANCE[dtype], reference.GRADIENT_TOLERANCE[dtype]
    lse = got[1].masked_fill(blind, 0.0) - expected[1].masked_fill(blind, 0.0)
    found = {
        "out": float(((got[0] - expected[0]).abs() / (1 + expected[0].abs())).max()) / tolerance,
        "lse": float(lse.abs().max()) / (tolerance if dtype == torch.float64 else reference.TOLERANCE[torch.float32]),
    }
    for name, slope, right in zip("qkv", slopes, right_slopes, strict=True):
        found[f"d{name}"] = float((slope - right).abs().max() / right.abs().max().clamp_min(1.0)) / gradient_tolerance
    return found


def check(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    found = errors(case, dtype, device)
    assert max(found.values()) <= 1, (case, dtype, found)
    assert all(error == error for error in found.values()), (case, dtype, found)
