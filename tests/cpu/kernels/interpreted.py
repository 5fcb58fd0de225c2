"""Run by `test_kernels_triton.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from paged_case import PagedCase, random_case, worst_error

from quire.kernels.act import reference as act_reference
from quire.kernels.act import triton as act
from quire.kernels.attention import Variant, reference
from quire.kernels.attention import triton as attention
from quire.kernels.kvstore import reference as kvstore_reference
from quire.kernels.kvstore import triton as kvstore
from quire.kernels.norm import reference as norm_reference
from quire.kernels.norm import triton as norm
from quire.kernels.rope import reference as rope_reference
from quire.kernels.rope import triton as rope

DTYPES = (torch.float32, torch.float16)


def attend(case: PagedCase, variant: Variant, work: attention.CudaTiles) -> torch.Tensor:
    plan = dataclasses.replace(case.bare_plan(), tiles=work)
    out = torch.full(case.q.shape, float("nan"), dtype=case.dtype)
    return attention.run(case.q, case.k_pages, case.v_pages, plan, variant, out)[: case.n_tokens]


def check_attention() -> None:
    cases = [random_case(seed, DTYPES[seed % 2], [16, 20, 64, 80], longest=90) for seed in range(8)]
    split = PagedCase([(700, 1), (300, 3), (520, 2), (40, 1), (9, 0)], 32, 1, 2, 16, torch.float32)
    cases += [(split, Variant(0.25)), (split, Variant(0.25, window=90)), (split, Variant(0.25, softcap=4.0))]
    cases += [(PagedCase([(600, 30)], 8, 2, 3, 24, torch.float16), Variant(0.2))]
    n_split = 0
    for case, variant in cases:
        work = attention.tiles(case.bare_plan(), n_programs=8)
        n_split += len(work.merges)
        error = worst_error(attend(case, variant, work), case.expected(variant))
        assert error <= reference.TOLERANCE[case.dtype], (case.spans, variant, error)
    assert n_split > 0


def check_buffers() -> None:
    """One set of buffers, several decode steps: addresses and grid stay, the answers follow the plan."""
    first = PagedCase([(700, 1), (300, 3), (520, 1)], 16, 2, 2, 16, torch.float32)
    buffers = attention.Buffers(first.bare_plan(), max_spans=4, n_programs=8)
    addresses = buffers.tiles.tiles.data_ptr(), buffers.tiles.merges.data_ptr(), buffers.tiles.n_small
    for case in (first, PagedCase([(9, 1)], 16, 2, 2, 16, torch.float32), first):
        work = buffers.fill(case.bare_plan())
        assert worst_error(attend(case, Variant(0.25), work), case.expected(Variant(0.25))) < 5e-6
        assert addresses == (work.tiles.data_ptr(), work.merges.data_ptr(), work.n_small)
    for spans in ([(9, 1)] * 5, [(90, 9)]):
        try:
            buffers.fill(PagedCase(spans, 16, 2, 2, 16, torch.float32).bare_plan())
        except ValueError as error:
            assert "do not fit buffers" in str(error)
        else:
            raise AssertionError(spans)


def check_rows() -> None:
    for dtype in DTYPES:
        fused = torch.randn(5, 400, dtype=dtype)
        x, heads = fused[:, :100], fused[:, 20:212].unflatten(1, (4, 48))
        for one in (x, heads):
            weight = torch.randn(one.shape[-1], dtype=dtype)
            expected = norm_reference.rms_norm(one.double(), weight.double(), 1e-5)
            close(norm.rms_norm(one, weight, 1e-5), expected, norm_reference)
        weight, residual = torch.randn(100, dtype=dtype), torch.randn(5, 100, dtype=dtype)
        total = x + residual
        normed, new_residual = norm.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(new_residual, total)
        close(normed, norm_reference.rms_norm(total.double(), weight.double(), 1e-5), norm_reference)
        gate_up = torch.randn(3, 2 * 1100, dtype=dtype) * 3
        close(act.silu_mul(gate_up), act_reference.silu_mul(gate_up.double()), act_reference)
        q, k = fused[:, :240].unflatten(1, (3, 80)), fused[:, 240:].unflatten(1, (2, 80))
        positions, cos_sin = torch.tensor([0, 9, 3, 3, 19]), torch.randn(20, 36)
        expected = rope_reference.apply_rope(q.double(), k.double(), positions, cos_sin.double())
        for got, right in zip(rope.apply_rope(q, k, positions, cos_sin), expected, strict=True):
            close(got, right, rope_reference)


def close(got: torch.Tensor, expected: torch.Tensor, oracle: object) -> None:
    error = float(((got.double() - expected).abs() / (1 + expected.abs())).max())
    assert error <= oracle.TOLERANCE[got.dtype], error


def check_pages() -> None:
    fused = torch.randn(7, 3 * 24 * 2)
    k, v = fused.unflatten(1, (2, 3, 24)).unbind(1)
    pools = [torch.randn(5, 3, 4, 24) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    cells = torch.tensor([4, 19, 7, 5, 12, 6, 13])
    kvstore.store_kv(k, v, *pools, cells)
    kvstore_reference.store_kv(k, v, *expected, cells)
    kvstore.copy_pages(*pools, [1, 3], [2, 4], [4, 3])
    kvstore_reference.copy_pages(*expected, [1, 3], [2, 4], [4, 3])
    assert all(torch.equal(got, right) for got, right in zip(pools, expected, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        check_attention()
        check_buffers()
        check_rows()
        check_pages()
    print("fine")
