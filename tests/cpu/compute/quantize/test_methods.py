"""GPTQ and AWQ against what they are by definition, in float64; the layout of codes."""

from __future__ import annotations

import pytest
import torch

from quire.compute.quantize.awq import N_STEPS, Reader, best_scales
from quire.compute.quantize.gptq import gptq
from quire.compute.quantize.grid import Grid, Rounded, nearest, output_error
from quire.compute.quantize.sparse import two_of_four
from quire.compute.quantize.stored import packed
from quire.config.quantize import FORMATS, Format
from quire.core.errors import ConfigError


def inputs(k: int, seed: int = 0) -> torch.Tensor:
    """Rows of float64 whose columns depend on one another and are of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(3 * k, k, dtype=torch.float64, generator=generator)
    mixed = mixed @ (torch.eye(k) + 0.3 * torch.randn(k, k, generator=generator)).double()
    return mixed * torch.rand(k, dtype=torch.float64, generator=generator).mul(3).exp()


def by_definition(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, order: list[int] | None) -> Rounded:
    """Optimal brain quantisation, a column at a time (Frantar et al. 2022, eq. 2 and 3): the inverse of the Hessian of
    what is left is computed anew after each column."""
    k = weight.shape[1]
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    w, codes, scales = weight.clone(), torch.zeros_like(weight), grid.scales(weight)
    group = grid.form.group or k
    left = list(range(k)) if order is None else order
    for j in list(left):
        if order is None and grid.form.group and j % group == 0:
            scales[:, j // group] = grid.scales(w[:, j : j + group])[:, 0]
        inverse = torch.linalg.inv(damped[left][:, left])
        scale = scales[:, j // group]
        codes[:, j] = grid.codes(w[:, j], scale)
        error = (w[:, j] - grid.dequantised(codes[:, j], scale)) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return Rounded(grid, codes, scales)


@pytest.mark.parametrize(
    ("form", "act_order"),
    [(Format(4, 32, "pack-quantized"), False), (Format(4, 32, "pack-quantized"), True), (FORMATS["int8"], False)],
)
def test_gptq_is_its_definition(form: Format, act_order: bool) -> None:
    k = 160  # more than a block, and no multiple of it
    x = inputs(k)
    weight = torch.randn(12, k, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hessian, grid = x.T @ x, Grid(form, torch.float64)
    order = hessian.diagonal().argsort(descending=True, stable=True).tolist() if act_order else None
    wanted = by_definition(weight, hessian, grid, order)
    got = gptq(weight, hessian, grid, act_order=act_order)
    assert torch.equal(got.codes, wanted.codes)
    assert torch.allclose(got.scales, wanted.scales, rtol=1e-12)
    error, plain = (
        float((x @ (one.matrix - weight).T).norm() / (x @ weight.T).norm()) for one in (got, nearest(weight, grid))
    )
    assert error < 0.8 * plain
    assert output_error(got.matrix - weight, weight, hessian) == pytest.approx(error)


def test_gptq_of_inputs_that_never_were_there_and_of_no_inverse() -> None:
    x = inputs(64)
    x[:, 5] = 0
    weight = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grid = Grid(FORMATS["int4-g32"], torch.float64)
    scales = grid.scales(weight)[:, 0]
    got = gptq(weight, x.T @ x, grid)
    assert torch.equal(got.codes[:, 5], grid.codes(weight[:, 5], got.scales[:, 0])) and bool((scales > 0).all())
    with pytest.raises(ConfigError, match=r"no inverse with --damping 0\.01.*larger --damping, as 0\.1"):
        gptq(weight, -(x.T @ x), grid)


def test_awq_finds_the_exponent_with_the_least_error_of_outputs() -> None:
    x = inputs(64, seed=3)
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(n, 64, dtype=torch.float64, generator=generator) for n in (8, 24)]
    grid, magnitudes = Grid(FORMATS["int4-g32"], torch.bfloat16), x.abs().mean(0)
    found, exponent = best_scales([Reader(weight, x.T @ x) for weight in weights], magnitudes, grid)

    def error(step: int) -> float:
        factors = magnitudes ** (step / N_STEPS)
        factors /= (factors.max() * factors.min()).sqrt()
        return sum(float((x / factors @ nearest(w * factors, grid).matrix.T - x @ w.T).square().sum()) for w in weights)

    errors = [error(step) for step in range(N_STEPS)]
    assert exponent == errors.index(min(errors)) / N_STEPS and 0 < exponent < 1
    assert torch.allclose(found / found[0], (magnitudes / magnitudes[0]) ** exponent)


def test_scales_and_codes_are_those_of_compressed_tensors() -> None:
    weight = torch.tensor([[0.75, -1.5, 0.0, 0.1] * 8, [0.0] * 32])
    rounded = nearest(weight, Grid(FORMATS["int4-g32"], torch.float32))
    assert rounded.scales.tolist() == [[pytest.approx(0.2 * 0.95)], [1.0]]  # 0.2 and 0.19 cut nothing off
    assert rounded.codes[0, :4].tolist() == [4, -8, 0, 1] and not bool(rounded.codes[1].any())
    words = packed(torch.tensor([[-8, 7, 0, 1, -1, 2, 3, -2, 5, 0]]))
    assert words.shape == (1, 2) and words.dtype == torch.int32
    assert [(int(words[0, i // 8]) >> 4 * (i % 8) & 15) - 8 for i in range(10)] == [-8, 7, 0, 1, -1, 2, 3, -2, 5, 0]
    fp8 = nearest(torch.tensor([[1.0, -0.3, 0.01, 0.0]]), Grid(FORMATS["fp8"], torch.float32))
    assert fp8.codes.tolist() == [[448.0, -128.0, 4.5, 0.0]]


def test_of_four_neighbours_the_two_with_larger_scores_stay() -> None:
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5, 4.0, 0.0, 0.0, 0.0]])
    assert two_of_four(weight).matrix.tolist() == [[0.0, -3.0, 2.0, 0.0, 4.0, 0.0, 0.0, 0.0]]
    norms = torch.tensor([9.0, 1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0])
    assert two_of_four(weight, norms).matrix.tolist() == [[1.0, 0.0, 0.0, 0.5, 4.0, 0.0, 0.0, 0.0]]
