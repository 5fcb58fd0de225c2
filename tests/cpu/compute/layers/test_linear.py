"""Linear layers: values against float64, and the same bits for a row whatever the batch around it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from quire.compute.layers.linear import Embedding, Linear
from quire.compute.schemes.choice import floating
from quire.compute.schemes.plain import Plain
from quire.compute.schemes.scheme import MatrixScheme
from quire.config.parameters import Matrix

SHAPES = [(64, 96), (320, 960), (864, 320), (2048, 1024), (1024, 2048), (4096, 256)]
ROWS = [1, 2, 3, 4, 7, 8, 31, 64]


def matrix(n_in: int, *rows: int, bias: bool = False) -> Matrix:
    return Matrix(n_in=n_in, parts=tuple((str(part), n) for part, n in enumerate(rows)), bias=bias)


def of(dtype: torch.dtype) -> MatrixScheme:
    return floating(torch.device("cpu"), dtype)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode():
        yield request.param
    torch.set_num_threads(before)


def layer(dtype: torch.dtype, in_size: int, out_size: int, *, bias: bool = False) -> tuple[Linear, torch.Tensor]:
    torch.manual_seed(0)
    made = Linear(functools.partial(torch.empty, dtype=dtype), matrix(in_size, out_size, bias=bias), of(dtype))
    for tensor in made.part(0).values():
        tensor.normal_(0, in_size**-0.5)
    assert made.weight is not None
    weight = made.weight.clone()
    made.finish()
    return made, weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_see_one_another(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if type(of(dtype)) is Plain:
        pytest.skip(f"this CPU has no kernel for {dtype} whose sums are in a fixed order")
    linear, weight = layer(dtype, *shape, bias=True)
    x = torch.randn(300, shape[0]).to(dtype)
    expected = linear(x)
    exact = x.double() @ weight.double().T + linear.bias.double()
    assert (expected - exact).abs().max() <= (2e-5 if dtype == torch.float32 else 0.05)
    for n_rows in ROWS:
        assert torch.equal(linear(x[:n_rows]), expected[:n_rows]), f"{n_rows} rows"
        assert torch.equal(linear(x[-n_rows:]), expected[-n_rows:]), f"last {n_rows} rows"


def test_no_rows() -> None:
    linear, _ = layer(torch.float32, 64, 96)
    assert linear(torch.empty(0, 64)).shape == (0, 96)


def test_parts_are_views_in_order() -> None:
    linear = Linear(torch.empty, matrix(8, 4, 2, 6, bias=True), of(torch.float32))
    for index, size in enumerate((4, 2, 6)):
        part = linear.part(index)
        assert part["weight"].shape == (size, 8) and part["bias"].shape == (size,)
        for tensor in part.values():
            tensor.fill_(index)
    assert linear.bias is not None and linear.weight is not None
    assert linear.bias.tolist() == linear.weight[:, 0].tolist() == [0] * 4 + [1] * 2 + [2] * 6


def test_tied_head_leaves_the_embedding_alone() -> None:
    make = functools.partial(torch.empty, dtype=torch.bfloat16)
    embedding = Embedding(make, "table", 96, 64)
    embedding.weight.normal_()
    head = Linear(make, matrix(64, 96), of(torch.bfloat16), tied=embedding.weight)
    kept = embedding.weight.clone()
    head.finish()
    assert torch.equal(embedding(torch.arange(96, dtype=torch.int32)), kept)
    logits = head(kept[:3], out=torch.empty(3, 96))
    assert logits.dtype == torch.float32
    assert torch.allclose(logits, kept[:3].float() @ kept.float().T, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("is_packed", [False, True])
def test_norm_activation_and_residual_around_a_product(is_packed: bool) -> None:
    torch.manual_seed(0)
    linear = Linear(functools.partial(torch.empty, dtype=torch.bfloat16), matrix(64, 96, 96), of(torch.bfloat16))
    assert linear.weight is not None
    linear.weight.normal_(0, 0.1)
    x, weight = torch.randn(5, 64).bfloat16(), 1 + torch.randn(64).bfloat16() / 10
    products = F.linear(F.rms_norm(x.float(), (64,), weight.float(), 1e-5).bfloat16(), linear.weight)
    if is_packed:
        linear.finish()
    y = linear(x, norm=(weight, 1e-5), silu_mul=True)
    gate, up = products.float().chunk(2, -1)
    torch.testing.assert_close(y.float(), F.silu(gate) * up, rtol=0.03, atol=0.03)
    stream = torch.randn(5, 192).bfloat16()
    wanted = stream.float() + products.float()
    assert linear(x, norm=(weight, 1e-5), residual=stream) is stream
    torch.testing.assert_close(stream.float(), wanted, rtol=0.03, atol=0.03)
