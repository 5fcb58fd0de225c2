"""Random inputs of `rotate_and_store`, and the error against the float64 reference."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch

from quire.kernels.e4m3 import E4M3
from quire.kernels.kvstore import entry
from quire.kernels.qkv import reference

POISON = 7.0
"""What pages hold before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    n: int
    n_q: int
    n_kv: int
    d: int
    rotary: int
    page_size: int = 16
    q_norm: bool = True
    k_norm: bool = True
    n_padding: int = 0
    """Rows at the end that write to place 0."""
    wide_positions: bool = True


def random_shape(seed: int) -> Shape:
    one = random.Random(seed)
    n, d = one.choice((0, 1, 2, one.randrange(300))), one.choice((16, 24, 64, 80, 96, 128, 256))
    n_kv = one.randint(1, 9)
    return Shape(
        n, n_kv * one.choice((1, 2, 3, 4)), n_kv, d, one.choice((d, d, d // 4 // 2 * 2, 2, 0)),
        page_size=one.choice((1, 4, 16, 128)), q_norm=one.random() < 0.5, k_norm=one.random() < 0.5,
        n_padding=one.randint(0, n), wide_positions=one.random() < 0.5,
    )  # fmt: skip


Arguments = tuple[torch.Tensor | float | None, ...]


def arguments(shape: Shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Arguments:
    """What the op takes, qkv as a slice of wider rows."""
    made = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=made).to(dtype).to(device)

    n, d, max_pos = shape.n, shape.d, 500
    width, n_pages = (shape.n_q + 2 * shape.n_kv) * d, 1 + -(-(n + 20) // shape.page_size)
    angles = torch.rand(max_pos, shape.rotary // 2, generator=made) * 7
    cache_locs = shape.page_size + torch.randperm((n_pages - 1) * shape.page_size, generator=made)[:n]
    cache_locs[n - shape.n_padding :] = 0
    positions = torch.randint(0, max_pos, (n,), generator=made)
    pages = [torch.full((n_pages, shape.n_kv, shape.page_size, d), POISON, dtype=dtype) for _ in range(2)]
    return (
        randn(n, width + 16)[:, 8 : 8 + width],
        randn(d) if shape.q_norm else None,
        randn(d) if shape.k_norm else None,
        1e-5,
        (positions if shape.wide_positions else positions.int()).to(device),
        torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        *(one.to(device) for one in pages),
        cache_locs.to(device),
    )


def copied(given: Arguments, double: bool = False) -> Arguments:
    """Arguments of their own memory; double: all floating point in float64."""
    return tuple(
        (one.double() if double and one.is_floating_point() else one.clone()) if isinstance(one, torch.Tensor) else one
        for one in given
    )


def check(function: Callable[..., torch.Tensor], shape: Shape, dtype: torch.dtype, device: str = "cpu") -> None:
    """Queries and pages within the tolerance of the reference; places that no row names untouched, values exact."""
    given = arguments(shape, dtype, device)
    wanted = copied(given, double=True)
    expected_q, got_q = reference.rotate_and_store(*wanted), function(*given)
    assert got_q.shape == (shape.n, shape.n_q, shape.d) and got_q.dtype == dtype
    close(got_q, expected_q)
    cache_locs = given[8]
    real = cache_locs[cache_locs > 0]
    for index, is_exact in ((6, False), (7, True)):
        got, expected = (side[index].transpose(1, 2).flatten(0, 1) for side in (given, wanted))
        close(got[real], expected[real], is_exact)
        others = torch.ones(len(got), dtype=torch.bool, device=got.device)
        others[cache_locs] = False
        assert bool((got[others] == POISON).all())


def check_codes(function: Callable[..., torch.Tensor], shape: Shape, dtype: torch.dtype, device: str = "cpu") -> None:
    """Pages in e4m3: queries as with other pages, codes those of torch's conversion, numbers beyond 448 cut off."""
    given = arguments(shape, dtype, device)
    given[0][:, ::7] *= 3000  # type: ignore[index]
    scales = entry.Scales(0.75, 2.5)
    floats = copied(given)
    expected_q = function(*floats)
    pages = [torch.full(one.shape, POISON, device=device).to(E4M3) for one in given[6:8]]  # type: ignore[union-attr]
    q = function(*given[:6], *pages, given[8], scales)
    assert torch.equal(q, expected_q)
    cache_locs = given[8]
    real, n_cut = cache_locs[cache_locs > 0], 0  # type: ignore[operator,index]
    for wide, codes, scale in zip(floats[6:8], pages, scales, strict=True):
        wanted, got = ((x if x.dtype == dtype else x.float()).transpose(1, 2).flatten(0, 1) for x in (wide, codes))
        wanted = (wanted[real].float() * (1 / scale)).clamp(-448, 448).to(E4M3).float()
        assert torch.equal(got[real], wanted)
        n_cut += int((wanted.abs() == 448).sum())
        others = torch.ones(len(got), dtype=torch.bool, device=got.device)
        others[cache_locs] = False
        assert bool((got[others] == POISON).all())
    assert n_cut or not len(real)


def check_integers(
    function: Callable[..., torch.Tensor], shape: Shape, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Pages of int8 entries: what pages of the type would hold, rounded; zeros, infinities and NaN too. Bit for bit on
    a CPU."""
    given = arguments(shape, dtype, device)
    heads = given[0].unflatten(1, (-1, shape.d))  # type: ignore[union-attr]
    for row, value in enumerate((0.0, 1e-38, float("inf"), float("nan"), 1000.0)[: shape.n]):
        heads[row, -1, 1:] = value
        heads[row, -1, 0] = 0.0
    floats = copied(given)
    expected_q = function(*floats)
    pages = [torch.full((*one.shape[:3], shape.d + 4), 7, dtype=torch.int8, device=device) for one in given[6:8]]
    assert torch.equal(function(*given[:6], *pages, given[8]), expected_q)
    cache_locs = given[8]
    real = cache_locs[cache_locs > 0]  # type: ignore[operator,index]
    for entries, wide in zip(pages, floats[6:8], strict=True):
        flat, expected = (x.transpose(1, 2).flatten(0, 1) for x in (entries, wide))
        if not len(real):
            continue
        got, wanted = flat[real].cpu(), entry.encode(expected[real].cpu())  # GPUs divide by 127 another way in torch
        integers, wanted_integers = (x[..., :-4].int() for x in (got, wanted))
        scales, wanted_scales = (
            x[..., -4:].contiguous().view(torch.float32).nan_to_num(nan=-1.0) for x in (got, wanted)
        )
        if device != "cpu":  # there the product of a number and a factor is part of the sum that rounds: ties differ
            off = (integers - wanted_integers).abs()
            assert off.max() <= 1 and float(off.double().mean()) < 5e-3
            torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
        else:
            assert torch.equal(integers, wanted_integers) and torch.equal(scales, wanted_scales)
        others = torch.ones(len(flat), dtype=torch.bool, device=device)
        others[cache_locs] = False
        assert bool((flat[others] == 7).all())


def close(got: torch.Tensor, expected: torch.Tensor, is_exact: bool = False) -> None:
    if is_exact:
        assert torch.equal(got.double(), expected)
    elif got.numel():
        error = (got.double() - expected).abs() / (1 + expected.abs().amax(-1, keepdim=True))
        assert float(error.max()) <= reference.TOLERANCE[got.dtype], float(error.max())
