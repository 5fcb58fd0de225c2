"""Linear layers with weights of 8 and 4 bits: the references against others' numbers, kernels by the interpreter."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import quantised_case as case
import torch

from quire.kernels import mxfp4, nibbles, w4a16, w8a8
from quire.kernels.mxfp4 import reference as fp4_reference
from quire.kernels.w4a16.plan import Int4Shape, plan, shared_bytes
from quire.kernels.w8a8 import builds
from quire.kernels.w8a8.triton_tiles import tile

HERE = pathlib.Path(__file__).parent


def test_kernels_match_the_references() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, str(HERE / "interpreted_quantised.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_rounded_weights_and_rows_are_near_the_product_of_floats() -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(5, 200), torch.randn(140, 200) / 14
    wanted = x @ matrix.T
    scale = matrix.abs().amax(1) / 448
    y = w8a8.linear_fp8(x, (matrix / scale[:, None]).to(torch.float8_e4m3fn), scale)
    assert 1e-3 < float((y - wanted).abs().max()) < 0.15  # three bits of each factor
    scale = matrix.abs().amax(1) / 127
    y = w8a8.linear_int8(x, (matrix / scale[:, None]).round().to(torch.int8), scale)
    assert float((y - wanted).abs().max()) < 0.05
    blocks = torch.tensor([[0.5, 2.0], [4.0, 1.0]])
    coded = matrix.to(torch.float8_e4m3fn)
    y = w8a8.linear_fp8(x, coded, blocks)
    spread = blocks.repeat_interleave(128, 0)[:140].repeat_interleave(128, 1)[:, :200]
    wanted = x @ (coded.float() * spread).T
    assert float((y - wanted).abs().max() / wanted.abs().max()) < 0.05


def test_static_activations_are_cut_off_at_the_largest() -> None:
    x = torch.tensor([[1.0, 1000.0]])
    y = w8a8.linear_fp8(x, torch.eye(2).to(torch.float8_e4m3fn), torch.ones(1), x_scale=torch.tensor([0.5]))
    assert y.tolist() == [[1.0, 224.0]]


def test_codes_of_4_bits_come_back() -> None:
    codes = torch.randint(0, 16, (3, 200), dtype=torch.uint8)
    assert torch.equal(nibbles.unpack(nibbles.pack(codes), 200), codes)
    where = nibbles.place(torch.arange(128))
    assert sorted(where.tolist()) == list(range(128))
    # Of one instruction a lane's pairs of columns are 16 bits apart in one word.
    assert torch.equal(where[1::2] - where[0::2], torch.full((64,), 4))


def test_a_matrix_of_4_bits_is_what_its_parts_say() -> None:
    torch.manual_seed(0)
    codes, order = torch.randint(0, 16, (6, 128), dtype=torch.uint8), torch.randperm(128)
    scales, zeros = torch.rand(6, 4), torch.randint(0, 17, (6, 4), dtype=torch.uint8)
    packed = w4a16.pack(codes, scales, zeros, group=32, order=order)
    declared = w4a16.layout(6, 128, 32, torch.float32, zeros=True, order=True)
    assert {name: (tuple(one.shape), one.dtype) for name, one in packed.tensors.items()} == declared
    wanted = torch.empty(6, 128)
    for column in range(128):
        group = column // 32
        wanted[:, order[column]] = (codes[:, column].float() - zeros[:, group].float()) * scales[:, group]
    got = w4a16.linear(torch.eye(128), packed)
    torch.testing.assert_close(got, wanted.T, rtol=1e-6, atol=0)


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (1, 10, 3, 16), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (1, 10, 3), dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16)[0].T
    packed = mxfp4.pack(blocks[0].flatten(1), exponents[0])
    assert torch.equal(fp4_reference.dequantise(packed, torch.bfloat16), wanted)
    assert {name: (tuple(one.shape), one.dtype) for name, one in packed.tensors.items()} == mxfp4.layout(10, 96)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(2, 256)
    weight, scale = case.fp8(12, 256, "channel")
    with pytest.raises(ValueError, match=r"\[1\] or \[12\] or \[1, 2\]"):
        w8a8.linear_fp8(x, weight, scale[:5])
    with pytest.raises(ValueError, match="x_scale cannot be given"):
        w8a8.linear_fp8(x, weight, torch.ones(1, 2), x_scale=torch.ones(1))
    with pytest.raises(ValueError, match="does not fit a matrix"):
        w8a8.linear_fp8(x[:, :100], weight, scale)
    with pytest.raises(ValueError, match="groups of 48"):
        w4a16.pack(torch.zeros(4, 256, dtype=torch.uint8), torch.ones(4, 6), group=48)
    with pytest.raises(ValueError, match="x is torch"):
        w4a16.linear(x, case.int4(12, 256, 64, torch.float16, zeros=False, order=False))


def test_products_of_few_rows_have_plans() -> None:
    for m in (1, 8, 16):
        for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (1024, 3072)):
            product = Int4Shape(m, n, k, 32, True)
            made = plan(product, 132)
            assert made is not None and made.n_stages > 0 and (made.turns or made.n_stages % made.groups == 0)
            assert shared_bytes(product, made, made.n_stages) <= 232_448
            assert made.n_clusters * made.cluster <= 132
    assert "multiples of 8 and 128" in str(builds.static_obstacle(64, 192, torch.bfloat16, False))


@pytest.mark.parametrize("m, n, is_int, found", [
    (1, 4096, True, (16, 32, 256)), (1, 4096, False, (16, 32, 128)), (64, 4096, True, (64, 32, 128)),
    (1, 28672, True, (16, 64, 128)), (256, 4096, True, (128, 64, 128)), (8192, 8192, True, (128, 128, 128)),
])  # fmt: skip
def test_tiles_of_8_bits_are_narrower_where_few_cover_the_result(
    m: int, n: int, is_int: bool, found: tuple[int, int, int]
) -> None:
    """Only integers may be summed in another order; in a deterministic step m says nothing."""
    assert tile(m, n, False, is_int=is_int) == found
    assert tile(m, n, True, is_int=is_int) == (64, 64, 128)
