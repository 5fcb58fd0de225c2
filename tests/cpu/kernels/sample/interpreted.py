"""Run by `test_sample_triton.py` in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from test_sample_choose import FEATURES, assert_agrees, joined, make_draw

from quire.kernels.sample import draw as plain
from quire.kernels.sample import triton as kernels
from quire.kernels.sample.draw import Choice, Draw

plain.tl = tl  # the interpreter looks for it beside the function
_mix = triton.jit(plain.mix)


@triton.jit
def _bits(seeds, positions, out, N: tl.constexpr):
    """`uniform_bits` spelled with the same `mix`."""
    at = tl.arange(0, N)
    keyed = _mix(tl.load(seeds + at) - 7046029254386353131)
    tl.store(out + at, (_mix(keyed + (tl.load(positions + at) + 1) * -7046029254386353131) >> 11) & 0x1FFFFFFFFFFFFF)


def check_random_bits() -> None:
    seeds, positions = torch.arange(64) * 2**56 + 3, torch.arange(64) * 1001
    out = torch.empty(64, dtype=torch.int64)
    _bits[(1,)](seeds, positions, out, N=64)
    assert torch.equal(out, plain.uniform_bits(seeds, positions))


def choose(logits: torch.Tensor, draw: Draw) -> Choice:
    out = Choice(torch.zeros(len(draw), dtype=torch.int32), torch.zeros(len(draw), dtype=torch.uint8))
    kernels.choose_by(logits, torch.from_numpy(draw.controls()), out)
    return out


def check_choices(width: int) -> None:
    features = list(FEATURES.values())
    logits = torch.randn(len(features) * 2, width, generator=torch.Generator().manual_seed(width)) * 3
    logits[1, :] = (logits[1] * 2).round()
    draw = joined([make_draw(1, seed=i, **features[i % len(features)]) for i in range(len(logits))])
    logits[3, width // 2], logits[4, 0], logits[5] = torch.nan, torch.inf, -torch.inf
    choice = choose(logits, draw)
    assert_agrees(choice, logits, draw)
    assert choice.token_ids[3:6].tolist() == [0, 0, 0]
    few = np.array([7, 8])
    assert choose(logits[few], draw.take(few)).token_ids.tolist() == choice.token_ids[few].tolist()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):
        check_random_bits()
        for n_columns in (5, 4500):
            check_choices(n_columns)
    print("fine")
