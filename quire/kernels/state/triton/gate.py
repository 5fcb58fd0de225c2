"""The gated norm in Triton: a group of columns of a row a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def norm_rows(  # type: ignore[no-untyped-def]
    y, y_stride, gate, gate_stride, weight, out, columns, n_weights, eps,
    SIZE: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See op.py."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    acted = tl.load(gate + row * gate_stride + first + i, mask=inside, other=0.0).to(tl.float32)
    acted = acted * tl.sigmoid(acted)
    x = tl.load(y + row * y_stride + first + i, mask=inside, other=0.0).to(tl.float32)
    if GATE_FIRST:
        x *= acted
    x *= tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    x *= tl.load(weight + (first + i) % n_weights, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        x *= acted
    tl.store(out + row * columns + first + i, x.to(out.dtype.element_ty), mask=inside)
