"""Run by `test_decode_hopper.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import quick_interpreter  # noqa: F401
import torch
from emulated_decode import emulate
from paged_case import PagedCase, worst_error

from quire.kernels.attention import coded, reference
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import SharedPrefix
from quire.kernels.attention.triton import launcher as triton
from quire.kernels.attention.triton import widening
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry

SCALES = entry.Scales(0.5, 1.75)


def check() -> None:
    spans = [(1030 + i, 1) for i in range(20)]
    case = PagedCase(
        spans, 16, 1, 4, 64, torch.float16, shared=[SharedPrefix(range(20), 1024)], kv_dtype=E4M3
    )  # fmt: skip
    variant = Variant(case.scale)
    bare = case.bare_plan(variant)
    plan = dataclasses.replace(bare, work=work.make(bare, n_ctas=8))
    assert plan.work.n_small and plan.work.n_large and plan.work.n_merges
    out, lse = torch.full_like(case.q, 7.0).contiguous(), torch.full(case.q.shape[:2], 7.0)
    coded.run(case.q, case.k, case.v, plan, variant, out, lse, SCALES)
    wanted, wanted_lse = out.double(), lse.double()
    keys, values = case.k.double() * SCALES.k, case.v.double() * SCALES.v
    reference.run(case.q.double(), keys, values, plan, variant, wanted, wanted_lse)
    assert worst_error(out[: case.n_rows], wanted[: case.n_rows]) <= reference.TOLERANCE[case.dtype]
    assert worst_error(lse[: case.n_rows], wanted_lse[: case.n_rows]) <= 1e-4


def launch_large(name: str, build: object, args: tuple[Any, ...], device: torch.device) -> None:
    """In place of the kernel of large lines over pages of q's type, which needs a GPU: Triton's."""
    assert name == "quire_attention_large", name
    q, k, v, plan, variant, out, lse, scales = args
    assert k.dtype == v.dtype == q.dtype, "not widened"
    triton.run_large(q, k, v, plan, dataclasses.replace(variant, scale=variant.scale * scales.k), out, lse)
    out.mul_(scales.v)


def check_widened(patch: pytest.MonkeyPatch) -> None:
    """Pages are found, named and widened: whole prompts, chunks, a window, several pages a block and several blocks a
    page. Pages that nobody has are NaN, and places of the new table that are not written name pages far outside."""
    patch.setattr(coded.launcher, "arguments", lambda *arguments: arguments)
    patch.setattr(coded.launcher, "launch", launch_large)
    patch.setattr(widening.torch, "empty_like", lambda like: torch.full_like(like, 1 << 20))
    for spans, page_size, window in (
        ([(300, 300), (410, 200)], 16, 0), ([(700, 250), (290, 290)], 48, 200), ([(400, 400)], 128, 0),
    ):  # fmt: skip
        case = PagedCase(spans, page_size, 2, 2, 32, torch.float16, kv_dtype=E4M3)
        variant = Variant(case.scale, window=window)
        bare = case.bare_plan(variant)
        plan = dataclasses.replace(bare, work=work.make(bare, n_ctas=1))
        assert coded.widens(plan, case.k, 2) and not plan.work.n_small and not plan.work.n_merges, spans
        out, lse = torch.full(case.q.shape, 7.0, dtype=case.dtype), torch.full(case.q.shape[:2], 7.0)
        coded.run(case.q, case.k, case.v, plan, variant, out, lse, SCALES)
        wanted, wanted_lse = out.double(), lse.double()
        keys, values = case.k.double() * SCALES.k, case.v.double() * SCALES.v
        reference.run(case.q.double(), keys, values, plan, variant, wanted, wanted_lse)
        error = worst_error(out[: case.n_rows], wanted[: case.n_rows]) / SCALES.v  # values are so large
        assert error <= reference.TOLERANCE[case.dtype], (spans, error)
        assert worst_error(lse[: case.n_rows], wanted_lse[: case.n_rows]) <= 1e-4, spans


def check_not_widened() -> None:
    """Where few rows read much, where a row's bits must not depend on others, in buffers, and beyond the limit."""
    case = PagedCase([(2000, 20)], 16, 1, 4, 32, torch.float16, kv_dtype=E4M3)
    chunk = PagedCase([(600, 600)], 16, 1, 4, 32, torch.float16, kv_dtype=E4M3)
    plans = {"few": case.bare_plan(), "chunk": chunk.bare_plan(), "alone": chunk.bare_plan(batch_invariant=True)}
    found = {
        name: coded.widens(dataclasses.replace(bare, work=work.make(bare, n_ctas=8)), chunk.k, 2)
        for name, bare in plans.items()
    }
    assert found == {"few": False, "chunk": True, "alone": False}
    buffers = work.Buffers(plans["chunk"], max_spans=4, max_large=80, n_ctas=8)
    fixed = dataclasses.replace(plans["chunk"], work=buffers.fill(plans["chunk"]))
    assert fixed.work.n_large and not coded.widens(fixed, chunk.k, 2)
    made = dataclasses.replace(plans["chunk"], work=work.make(plans["chunk"], n_ctas=8))
    assert not coded.widens(made, torch.empty(1, 1 << 20, 1, 32, dtype=E4M3), 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        emulate(pathlib.Path(sys.argv[1]), patch)
        check()
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        check_widened(patch)
    check_not_widened()
    print("fine")
