"""Packed linear layers: integers exactly, results against float64, row by row bitwise, what is fused, hostile rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from quire.core.errors import ConfigError
from quire.kernels import qgemm
from quire.kernels.act import silu_mul
from quire.kernels.norm import rms_norm
from quire.kernels.qgemm import reference, rounding
from quire.kernels.qgemm import weight as weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TABLE = (-127, -126, -100, -8, -3, -1, 0, 1, 2, 5, 20, 60, 90, 99, 126, 127)
TILE_K = {False: 4, True: 8}
"""Whether weights have 4 bits → k in a line of the layout."""
SHAPES = [(1, 1, 1), (2, 7, 3), (3, 64, 32), (4, 65, 33), (5, 1, 1030), (7, 200, 300), (13, 130, 96), (70, 100, 257)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    yield
    torch.set_num_threads(before)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """As reference.TOLERANCE defines it."""
    return float(((got.double() - expected).abs() / (1 + expected.abs())).max())


@pytest.mark.parametrize("scheme", qgemm.SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_the_reference(level: str, scheme: str, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        packed = qgemm.pack(torch.randn(n, k) * k**-0.5, scheme)
        wide, bias = torch.randn(m, k + 5).to(dtype), torch.randn(n).to(dtype)
        x = wide[:, 2 : k + 2]
        for added in (None, bias):
            expected = reference.exact(x, packed, added)
            assert error(qgemm.linear(x, packed, added), expected) <= reference.TOLERANCE[dtype], (m, n, k)


@pytest.mark.parametrize("scheme", qgemm.SCHEMES)
def test_integers_are_exact(level: str, scheme: str) -> None:
    """Integers with scales of one on both sides, at the ends of their ranges: the sums are integers, bit for bit."""
    table = () if qgemm.SCHEMES[scheme].bits == 8 else TABLE
    for m, ends in [(1, False), (2, True), (3, False), (11, True), (20, False)]:
        weight = torch.randint(-127, 128, (70, 992)).float()
        if table:
            weight = torch.tensor(table)[torch.randint(0, 16, (70, 992))].float()
        x = torch.randint(-127, 128, (m, 992)).float()
        if ends:
            weight = torch.where(weight > 0, 127.0, -127.0)
            weight[:2] = torch.tensor([[-127.0], [127.0]])
            x = torch.where(x > 0, 127.0, -127.0)
            x[0] = 127
        weight[:, ::32], x[:, ::32] = -127, 127
        packed = of_integers(weight, scheme, table)
        assert torch.equal(packed.dequantized(), weight)
        assert torch.equal(qgemm.linear(x, packed), (x.double() @ weight.double().T).float())


def of_integers(weight: torch.Tensor, scheme: str, table: tuple[int, ...]) -> qgemm.PackedWeight:
    """A matrix of integers in -127..127, or of those in the table, with scales of one."""
    packed = weights.empty(scheme, *weight.shape, unit=0.25, table=table)
    k = packed.data.shape[1] * TILE_K[bool(table)]
    rows = F.pad(weight, (0, k - weight.shape[1], 0, -len(weight) % weights.TILE))
    codes = torch.searchsorted(torch.tensor(table).float(), rows) if table else rows
    group = qgemm.SCHEMES[scheme].group
    if group:
        weights.lay_out(packed, 0, codes, torch.full((len(rows), k // group), 4.0))
    else:
        weights.lay_out(dataclasses.replace(packed, unit=1.0), 0, codes, torch.ones(len(rows)))
    return packed


@pytest.mark.parametrize("scheme", qgemm.SCHEMES)
def test_any_rows_and_threads(level: str, scheme: str) -> None:
    """A row's result is the same bits for any number of rows around it, and for one and two threads."""
    packed, x, bias = qgemm.pack(torch.randn(520, 1000), scheme), torch.randn(67, 1000), torch.randn(520)
    whole = qgemm.linear(x, packed, bias)
    if level == "torch":
        assert error(qgemm.linear(x[:3], packed, bias), whole[:3].double()) < 1e-6
        return
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 17):
        assert torch.equal(qgemm.linear(x[20 : 20 + m], packed, bias), whole[20 : 20 + m]), m
    torch.set_num_threads(2)
    assert torch.equal(qgemm.linear(x, packed, bias), whole)
    assert torch.equal(qgemm.linear(x[:1], packed, bias), whole[:1])


@pytest.mark.parametrize("scheme", qgemm.SCHEMES)
def test_hostile_rows(level: str, scheme: str) -> None:
    packed, x = qgemm.pack(torch.randn(40, 70), scheme), torch.randn(9, 70)
    clean = qgemm.linear(x, packed)
    x[1] = 0
    x[2], x[3] = x[2] * 1e-42, x[3] * 1e35
    x[4, 69], x[5, 0], x[6, 33] = torch.nan, torch.inf, -torch.inf
    got = qgemm.linear(x, packed)
    assert torch.equal(got[[0, 7, 8]], clean[[0, 7, 8]])
    assert not got[[1, 2]].any()
    assert torch.allclose(got[3] / 1e35, clean[3], rtol=1e-4, atol=1e-4)
    assert got[4:7].isnan().all()


@pytest.mark.parametrize("scheme", ["int8", "int8-g32"])
def test_rounding_to_8_bits(level: str, scheme: str) -> None:
    """Half a step is the largest error."""
    weight = torch.randn(37, 100).double() * torch.logspace(-2, 2, 37).double()[:, None]
    weight[5] = 0
    packed = qgemm.pack(weight, scheme)
    integers, scales = weights.unpack(packed)
    assert integers.shape == (37, 128)
    assert not integers[:, 100:].any() and int(integers.abs().max()) == 127
    steps = scales.abs().repeat_interleave(128 // scales.shape[1], dim=1)[:, :100]
    assert bool(((packed.dequantized() - weight.float()).abs() <= 0.531 * steps).all())


@pytest.mark.parametrize("scheme", ["int4-g32", "int4", "int4-g128"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_to_4_bits(level: str, scheme: str, dtype: torch.dtype) -> None:
    """The native search finds what the oracle finds, but for ties; each code is the nearest for its scale."""
    weight = torch.randn(70, 330).to(dtype)
    weight[5], weight[6] = 0, weight[6] * 1e-3
    packed = qgemm.pack(weight, scheme)
    expected = weights.pack(weight, scheme, packed.unit)
    got, wanted = packed.dequantized(), expected.dequantized()
    assert float((got != wanted).float().mean()) < 0.01
    assert not got[5].any()
    errors = [float((one - weight.float()).square().sum()) for one in (got, wanted)]
    assert abs(errors[0] / errors[1] - 1) < 1e-3
    levels = torch.tensor(rounding.CODEBOOK).float()
    group = qgemm.SCHEMES[scheme].group
    scales = weights.unpack(packed)[1].repeat_interleave(group, dim=1)[:, :330]
    best = (scales[..., None] * levels - weight.float()[..., None]).abs().amin(-1)
    assert torch.allclose((got - weight.float()).abs(), best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("scheme", "most"), [("int4-g32", 0.0760), ("int4", 0.0830), ("int4-g128", 0.0880)])
def test_the_error_of_4_bits(scheme: str, most: float) -> None:
    """Relative error of normal weights; 0.086 for groups of 32 on a uniform grid."""
    weight = torch.randn(512, 1024)
    wrong = qgemm.pack(weight, scheme).dequantized() - weight
    assert 0.9 * most < float(wrong.norm() / weight.norm()) < most


@pytest.mark.parametrize("scheme", ["int8-g32", "int4"])
@pytest.mark.parametrize("size", [1e-25, 1e-9, 1e9, 1e30])
def test_scales_of_any_size(level: str, scheme: str, size: float) -> None:
    """float16 scales are relative to the largest weight; groups a thousandth of it lose nothing."""
    weight = torch.randn(64, 128)
    weight[:, :64] *= 1e-3
    wrong = qgemm.pack(weight * size, scheme).dequantized() / size - weight
    for half in (slice(0, 64), slice(64, 128)):
        assert float(wrong[:, half].norm() / weight[:, half].norm()) < (0.006 if scheme == "int8-g32" else 0.09)


@pytest.mark.parametrize("scheme", qgemm.SCHEMES)
def test_the_least_weights(level: str, scheme: str) -> None:
    """Weights are packed as exactly as others, or refused; never do they become 0."""
    weight, least = torch.randn(64, 128), torch.tensor(rounding.LEAST)
    weight /= weight.abs().max()
    plain, small = qgemm.pack(weight, scheme), qgemm.pack(weight * least, scheme)
    assert torch.equal(small.dequantized(), plain.dequantized() * least)
    assert not qgemm.pack(torch.zeros(64, 128), scheme).dequantized().any()
    if scheme != "int8":
        with pytest.raises(ValueError, match="too small"):
            qgemm.pack(weight * 1e-38, scheme)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_match_the_reference(level: str, dtype: torch.dtype) -> None:
    for m, n, k in SHAPES:
        weight = (torch.randn(n, k) * k**-0.5).to(dtype)
        packed = qgemm.pack_floats(weight)
        assert torch.equal(packed.dequantized(), weight.float())
        x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
        expected = x.double() @ weight.double().T + bias.double()
        assert error(qgemm.linear(x, packed, bias), expected) <= reference.TOLERANCE[dtype], (m, n, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats_of_any_rows_and_threads(level: str, dtype: torch.dtype) -> None:
    if level == "torch":
        pytest.skip("the reference promises no bits")
    packed, x = qgemm.pack_floats(torch.randn(520, 1700).to(dtype)), torch.randn(300, 1700).to(dtype)
    whole = qgemm.linear(x, packed)
    for m in (1, 2, 3, 5, 6, 7, 8, 12, 13, 19, 40):
        assert torch.equal(qgemm.linear(x[20 : 20 + m], packed), whole[20 : 20 + m]), m
    torch.set_num_threads(2)
    assert torch.equal(qgemm.linear(x, packed), whole)
    assert torch.equal(qgemm.linear(x[:1], packed), whole[:1])


def packed_as(form: str, weight: torch.Tensor) -> qgemm.PackedWeight:
    return qgemm.pack_floats(weight) if form == "floats" else qgemm.pack(weight, form)


@pytest.mark.parametrize("form", ["floats", *qgemm.SCHEMES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [256, 150], ids=str)
def test_fused_is_the_same_as_step_by_step(level: str, form: str, dtype: torch.dtype, n: int) -> None:
    """Norm before; activation, residual or widening after: the bits of separate operations."""
    packed = packed_as(form, (torch.randn(n, 200) / 14).to(dtype))
    norm = (torch.randn(200).to(dtype), 1e-5)
    bias = torch.randn(n).to(dtype)
    for m in (1, 5, 40):
        x = torch.randn(m, 200).to(dtype)
        plain = qgemm.linear(rms_norm(x, *norm), packed, bias)
        assert torch.equal(qgemm.linear(x, packed, bias, norm=norm), plain)
        assert torch.equal(qgemm.linear(x, packed, bias, norm=norm, silu_mul=True), silu_mul(plain))
        stream = torch.randn(m, n).to(dtype)
        expected = stream + plain
        assert qgemm.linear(x, packed, bias, norm=norm, residual=stream) is stream
        assert torch.equal(stream, expected)
        wide = qgemm.linear(x, packed, bias, norm=norm, out=torch.empty(m, n))
        assert torch.equal(wide, plain.float())


def test_no_rows(level: str) -> None:
    assert qgemm.linear(torch.zeros(0, 40), qgemm.pack(torch.randn(8, 40), "int4")).shape == (0, 8)


def test_mismatches_are_refused() -> None:
    packed = qgemm.pack(torch.randn(8, 40), "int8")
    with pytest.raises(ValueError, match="k = 40"):
        qgemm.linear(torch.zeros(2, 41), packed)
    with pytest.raises(ValueError, match="bias"):
        qgemm.linear(torch.zeros(2, 40), packed, torch.zeros(9))
    with pytest.raises(ValueError, match="int3"):
        qgemm.pack(torch.zeros(8, 40), "int3")
    with pytest.raises(ValueError, match="131072"):
        qgemm.pack(torch.zeros(1, 131073), "int8")
    for bad in (torch.nan, torch.inf):
        for scheme in qgemm.SCHEMES:
            with pytest.raises(ValueError, match="NaN"):
                qgemm.pack(torch.full((3, 40), bad), scheme)
    with pytest.raises(ConfigError, match="CPU only"):
        qgemm.linear(torch.zeros(2, 40, device="meta"), packed)
