"""Joining attention states in one pass: some rows of some heads a program.

The states of a ring's ranks are as large as activations, and in torch they are read and written ten times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS = 4096
"""Of one state in a program."""


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention.merge`; stacked in front."""
    outs, lses = outs.contiguous(), lses.float().contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    n_lines, dim = lse.numel(), out.shape[-1]
    width = triton.next_power_of_2(max(1, dim))
    lines = max(1, NUMBERS // width)
    if n_lines:
        grid = (triton.cdiv(n_lines, lines),)
        _merge[grid](outs, lses, out, lse, len(outs), n_lines, D=dim, WIDTH=width, LINES=lines, num_warps=4)
    return out, lse


@triton.jit(do_not_specialize=["n_states", "n_lines"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    outs, lses, out, lse, n_states, n_lines, D: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A line is a row of a head. What a state that saw nothing holds is not read."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    live, dims = line < n_lines, tl.arange(0, WIDTH)
    top = tl.full([LINES], float("-inf"), tl.float32)
    for state in range(n_states):
        top = tl.maximum(top, tl.load(lses + line + state * n_lines, mask=live, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, WIDTH], tl.float32)
    for state in range(n_states):
        at = line + state * n_lines
        seen = tl.load(lses + at, mask=live, other=float("-inf"))
        weight = tl.exp(seen - base)
        cells = (seen > float("-inf"))[:, None] & (dims < D)[None, :]
        acc += weight[:, None] * tl.load(outs + at[:, None] * D + dims[None, :], mask=cells, other=0.0).to(tl.float32)
        total += weight
    whole = tl.where(total == 0.0, 1.0, total)
    cells = live[:, None] & (dims < D)[None, :]
    tl.store(out + line[:, None] * D + dims[None, :], (acc / whole[:, None]).to(out.dtype.element_ty), mask=cells)
    tl.store(lse + line, tl.where(total == 0.0, float("-inf"), base + tl.log(whole)), mask=live)
