"""Run by `test_kernels_triton.py` in a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import numpy as np
import quick_interpreter  # noqa: F401
import torch

from quire.kernels.act import ACTIVATIONS
from quire.kernels.act import reference as act_reference
from quire.kernels.act import triton as act
from quire.kernels.kvstore import reference as kvstore_reference
from quire.kernels.kvstore import triton as kvstore
from quire.kernels.norm import reference as norm_reference
from quire.kernels.norm import triton as norm

DTYPES = (torch.float32, torch.float16)


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
        check_layer_norm(x, heads)
        gate_up = torch.randn(3, 2 * 1100, dtype=dtype) * 3
        for activation in ACTIVATIONS:
            for gated in (True, False):
                expected = act_reference.activate(gate_up.double(), activation, gated)
                close(act.activate(gate_up, activation, gated), expected, act_reference)
        close(act.silu_mul(gate_up), act_reference.silu_mul(gate_up.double()), act_reference)


def check_layer_norm(x: torch.Tensor, heads: torch.Tensor) -> None:
    h, dtype = x.shape[-1], x.dtype
    of_heads = torch.randn(*heads.shape[1:], dtype=dtype)
    weight, bias = torch.randn(h, dtype=dtype), torch.randn(h, dtype=dtype)
    for one, *tables in ((x, weight, bias), (x, weight, None), (x, None, None), (heads, of_heads, None)):
        wide = [None if table is None else table.double() for table in tables]
        got = norm.layer_norm(one, *tables, 1e-5)
        close(got, norm_reference.layer_norm(one.double(), *wide, 1e-5), norm_reference)


def close(got: torch.Tensor, expected: torch.Tensor, oracle: object) -> None:
    error = float(((got.double() - expected).abs() / (1 + expected.abs())).max())
    assert error <= oracle.TOLERANCE[got.dtype], error


def check_pages() -> None:
    for heads, d in ((3, 24), (1, 600)):
        pools = [torch.randn(5, heads, 4, d) for _ in range(2)]
        expected = [pool.clone() for pool in pools]
        kvstore.copy_pages(*pools, [1, 3], [2, 4], [4, 3])
        kvstore_reference.copy_pages(*expected, [1, 3], [2, 4], [4, 3])
        assert all(torch.equal(got, right) for got, right in zip(pools, expected, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        check_rows()
        check_pages()
    print("fine")
