"""Cases of dense attention with gradients: forward, and backward by recomputation, against torch's SDPA."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.bench.kernels.case import Case, Check, Contender, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.timing import Call
from quire.kernels import catalog
from quire.kernels.attention.variant import Variant, variants
from quire.kernels.flash import reference

BACKWARD_FLOPS = 2.5
"""Of the forward's: five products instead of two (Dao et al. 2022)."""
MAX_COPIES = 4
"""Arithmetic binds here, a few inputs will do."""
BACKENDS = {
    "cuda": {"torch cudnn": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION},
    "cpu": {"torch flash": SDPBackend.FLASH_ATTENTION},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Dense:
    """A dense causal batch."""

    n_seqs: int
    length: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int

    def work(self, element_bytes: int, backward: bool) -> Work:
        """Tensors moved once; half of the pairs of rows and keys are visible."""
        q_bytes, kv_bytes = (
            element_bytes * self.n_seqs * self.length * heads * self.head_dim
            for heads in (self.n_q_heads, self.n_kv_heads)
        )
        flops = 4.0 * self.n_seqs * self.length**2 / 2 * self.head_dim * self.n_q_heads
        if backward:
            return Work(3 * q_bytes + 2 * kv_bytes, q_bytes + 2 * kv_bytes, BACKWARD_FLOPS * flops)
        return Work(q_bytes + 2 * kv_bytes, q_bytes, flops)

    def inputs(self, setting: Setting) -> tuple[torch.Tensor, ...]:
        """q, k, v, and a gradient of the output, [n_seqs, length, heads, head_dim]."""
        heads = (self.n_q_heads, self.n_kv_heads, self.n_kv_heads, self.n_q_heads)
        return tuple(setting.randn(self.n_seqs, self.length, n, self.head_dim) for n in heads)

    @property
    def variant(self) -> Variant:
        return variants.causal(self.head_dim**-0.5)


SIZES = {
    "cuda": {"1 x 4k": Dense(1, 4096, 32, 8, 128), "1 x 16k": Dense(1, 16384, 32, 8, 128),
             "16 x 1k, d 64": Dense(16, 1024, 16, 16, 64)},
    "cpu": {"1 x 512": Dense(1, 512, 8, 4, 64)},
}  # fmt: skip
QUICK = ("1 x 4k", "1 x 512")
SMALL = Dense(2, 133, 4, 2, 64)


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """Forward and backward of each size."""
    for name, dense in SIZES[setting.device.type].items():
        for backward in (False, True):
            yield Case(
                op,
                f"{'backward' if backward else 'forward'} {name}",
                dense.work(setting.element_bytes, backward),
                functools.partial(_contenders, dense, setting, backward),
                _kind(backward, dense),
                in_flops=True,
                quick=name in QUICK,
            )


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """The output, and the gradients of q, k and v, of heads of each size."""
    sizes = {dense.head_dim: dataclasses.replace(SMALL, head_dim=dense.head_dim) for dense in _sizes(setting)}
    for implementation in catalog.runnable(op, setting.device.type):
        if implementation.name != "reference":
            for dense, backward in itertools.product(sizes.values(), (False, True)):
                tolerance = reference.GRADIENT_TOLERANCE if backward else reference.TOLERANCE
                error = functools.partial(_error, dense, setting, implementation, backward)
                yield Check(op, _kind(backward, dense), implementation.name, error, tolerance[setting.dtype])


def _sizes(setting: Setting) -> Iterable[Dense]:
    return SIZES[setting.device.type].values()


def _kind(backward: bool, dense: Dense) -> str:
    return f"{'gradients' if backward else 'out'}, d {dense.head_dim}"


def _contenders(dense: Dense, setting: Setting, backward: bool) -> Iterable[Contender]:
    work = dense.work(setting.element_bytes, backward=False)
    copies = [dense.inputs(setting) for _ in range(min(MAX_COPIES, setting.timer.n_copies(work.total_bytes)))]
    for implementation in catalog.runnable("flash", setting.device.type):
        if implementation.name != "reference":
            make = functools.partial(_own_calls, implementation, dense.variant, copies, backward)
            yield Contender(implementation.name, make, capture=not backward)
    for name, backend in BACKENDS[setting.device.type].items():
        make = functools.partial(_torch_calls, backend, copies, backward)
        yield Contender(name, make, is_peer=True, capture=not backward)


def _own_calls(
    implementation: catalog.Implementation,
    variant: Variant,
    copies: Sequence[tuple[torch.Tensor, ...]],
    backward: bool,
) -> Sequence[Call]:
    module = implementation.load()
    if not backward:
        return [functools.partial(module.forward, q, k, v, variant, None) for q, k, v, _ in copies]
    calls = []
    for q, k, v, d_out in copies:
        out, lse = module.forward(q, k, v, variant, None)
        calls.append(functools.partial(module.backward, q, k, v, out, lse, d_out, None, variant, None))
    return calls


def _torch_calls(backend: SDPBackend, copies: Sequence[tuple[torch.Tensor, ...]], backward: bool) -> Sequence[Call]:
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    calls: list[Call] = []
    for copy in copies:
        q, k, v, d_out = (x.transpose(1, 2).contiguous() for x in copy)
        if backward:
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = forward(*leaves)
            calls.append(functools.partial(torch.autograd.grad, out, leaves, d_out, retain_graph=True))
        else:
            calls.append(functools.partial(forward, q, k, v))
    return calls


def _error(dense: Dense, setting: Setting, implementation: catalog.Implementation, gradients: bool) -> float:
    """As flash/reference.py defines its tolerances."""
    module = implementation.load()
    q, k, v, d_out = dense.inputs(setting)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = reference.flash_attention(wide[0], wide[1], wide[2], dense.variant)
    out, lse = module.forward(q, k, v, dense.variant, None)
    if not gradients:
        wanted = expected.detach()
        return float(((out.double() - wanted).abs() / (1 + wanted.abs())).max())
    grads = torch.autograd.grad(expected, wide, d_out.double())
    got = module.backward(q, k, v, out, lse, d_out, None, dense.variant, None)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, grads, strict=True))
