"""Mixtures of experts: routing against the routers of transformers, products against one token after another."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import adapted_expert_case
import pytest
import route_cases
import shared_cases
import torch
from coded_experts import CODINGS, Coding, error

from quire.config.experts import Gating, RoutingSpec, Scores
from quire.kernels import moe, w8a8
from quire.kernels.invariance import rows_alone
from quire.kernels.moe import cpu, reference

GPT_OSS = Gating(slope=1.702, offset=1.0, limit=7.0)


def chosen(scores: torch.Tensor, weights: torch.Tensor) -> list[dict[int, float]]:
    return [dict(zip(*row, strict=True)) for row in zip(scores.tolist(), weights.tolist(), strict=True)]


def same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Experts and weights, whatever their order."""
    for one, other in zip(chosen(*got), chosen(*expected), strict=True):
        assert one == pytest.approx(other, abs=2e-6)


def deepseek_v2(logits: torch.Tensor, **config: object) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    return _routed(DeepseekV2TopkRouter, logits, None, topk_method="group_limited_greedy", **config)


def deepseek_v3(logits: torch.Tensor, bias: torch.Tensor, **config: object) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    return _routed(DeepseekV3TopkRouter, logits, bias, norm_topk_prob=True, **config)


def _routed(router: type, logits: torch.Tensor, bias: torch.Tensor | None, **config: object):
    n = logits.shape[1]
    made = router(SimpleNamespace(hidden_size=n, num_experts=n, num_local_experts=n, n_routed_experts=n, **config))
    made.weight.data = torch.eye(n)  # so that the logits are what goes in
    if bias is not None:
        made.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, weights, expert_ids = made(logits)
    return expert_ids, weights


GROUPS = {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 2.5}


def test_the_native_choice_is_that_of_the_reference(native_level: str) -> None:
    route_cases.check(cpu.route, reference.route, reference.ROUTE_TOLERANCE)
    logits, routing = torch.randn(200, 40), RoutingSpec(n_chosen=5, renormalise=True)
    ids, weights = cpu.route(logits, routing, None)
    for row in (0, 63, 199):
        alone = cpu.route(logits[row : row + 1], routing, None)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])


def test_group_limited_routing_is_that_of_deepseek() -> None:
    logits, bias = torch.randn(50, 64) * 2, torch.randn(64)
    routing = RoutingSpec(n_chosen=6, n_groups=8, n_chosen_groups=3, scale=2.5)
    same(moe.route(logits, routing), deepseek_v2(logits, **GROUPS))
    both = RoutingSpec(
        n_chosen=6, n_groups=8, n_chosen_groups=3, scale=2.5, scores=Scores.SIGMOID, renormalise=True, n_group_best=2
    )
    same(moe.route(logits, both, bias), deepseek_v3(logits, bias, **GROUPS))


def test_sparse_mixer_is_that_of_phi() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.cat([torch.randn(50, 16) * scale for scale in (0.01, 1.0, 30.0)])
    weights, expert_ids = sparsemixer(logits, 0.01, False)
    routing = RoutingSpec(n_chosen=2, scores=Scores.SPARSE_MIXER, mixer_margin=0.02)
    same(moe.route(logits, routing), (expert_ids, weights))


def test_renormalised_weights_are_the_softmax_over_the_chosen() -> None:
    logits = torch.randn(20, 40) * 3
    best, expert_ids = logits.topk(4)
    got = moe.route(logits, RoutingSpec(n_chosen=4, renormalise=True))
    same(got, (expert_ids, best.softmax(dim=-1)))
    assert got[0].dtype == torch.int32 and torch.equal(got[0].long(), expert_ids)
    full = logits.softmax(dim=-1)
    same(moe.route(logits, RoutingSpec(n_chosen=4)), (expert_ids, full.gather(1, expert_ids)))


@pytest.mark.parametrize("scores", Scores)
def test_ids_are_distinct_and_in_range_whatever_the_logits(scores: Scores) -> None:
    logits = torch.randn(6, 8)
    logits[0], logits[1], logits[2], logits[3, ::2] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[4] = 0.0
    expert_ids, _ = moe.route(logits, RoutingSpec(n_chosen=3, scores=scores))
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 8 for row in expert_ids.tolist())
    assert expert_ids[4].tolist() == ([4, 5, 6] if scores is Scores.EVEN else [0, 1, 2])


def test_even_routing_chooses_every_expert_as_often() -> None:
    expert_ids, weights = moe.route(torch.randn(12, 8), RoutingSpec(n_chosen=2, scores=Scores.EVEN))
    assert torch.bincount(expert_ids.flatten()).tolist() == [3] * 8
    assert torch.equal(weights, torch.full((12, 2), 0.5))


def one_by_one(x, expert_ids, weights, up, down, gating, up_bias, down_bias):
    y = torch.zeros_like(x)
    for t, j in ((t, j) for t in range(len(x)) for j in range(expert_ids.shape[1])):
        e = int(expert_ids[t, j])
        if e >= 0:
            both = up[e] @ x[t] + (0 if up_bias is None else up_bias[e])
            g, u = both.split(len(both) // 2)
            if gating.limit:
                g, u = g.clamp(max=gating.limit), u.clamp(-gating.limit, gating.limit)
            z = down[e] @ ((u + gating.offset) * g / (1 + torch.exp(-gating.slope * g)))
            y[t] += weights[t, j] * (z + (0 if down_bias is None else down_bias[e]))
    return y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gating", [Gating(), GPT_OSS], ids=["swiglu", "clamped"])
def test_experts_match_one_token_after_another(dtype: torch.dtype, gating: Gating) -> None:
    for n, k, n_experts, biased in ((1, 2, 4, False), (9, 3, 5, True), (30, 1, 7, False)):
        x = torch.randn(n, 24, dtype=torch.float64).to(dtype)
        expert_ids = torch.rand(n, n_experts).argsort(1)[:, :k].int().contiguous()
        expert_ids[n // 2, 0] = -1
        weights = torch.rand(n, k)
        weights[n // 2, 0] = torch.nan
        up, down = (torch.randn(n_experts, *s, dtype=torch.float64).to(dtype) * 0.3 for s in ((32, 24), (24, 16)))
        biases = [torch.randn(n_experts, w).to(dtype) if biased else None for w in (32, 24)]
        wide = [None if t is None else t.double() for t in (x, up, down, *biases)]
        expected = one_by_one(wide[0], expert_ids, weights, *wide[1:3], gating, *wide[3:])
        options = {"gating": gating, "up_bias": biases[0], "down_bias": biases[1]}
        out, residual = torch.full_like(x, torch.nan), torch.randn(n, 24).to(dtype)
        close(moe.experts(x, expert_ids, weights, up, down, **options, out=out), expected)
        before = residual.clone()
        got = moe.experts(x, expert_ids, weights, up, down, **options, residual=residual)
        assert got is residual
        close(got, expected, before)


@pytest.mark.parametrize("coding", [one for one in CODINGS if one.dtype.is_floating_point], ids=["rows", "blocks"])
def test_experts_in_e4m3_are_dense_layers_one_after_another(coding: Coding) -> None:
    """Both products round what goes in as `w8a8.linear_fp8` does, and that of a row does not know of others."""
    n, n_experts, hidden, inner = 6, 3, 320, 192
    up, down = (coding.matrices(n_experts, *size, torch.bfloat16) for size in ((2 * inner, hidden), (hidden, inner)))
    x, ids = torch.randn(n, hidden).bfloat16(), torch.rand(n, n_experts).argsort(1)[:, :2].int().contiguous()
    weights, y = torch.rand(n, 2), torch.zeros(n, hidden, dtype=torch.float64)
    for t, j in ((t, j) for t in range(n) for j in range(2)):
        expert = int(ids[t, j])
        parts = [(one.codes[expert], one.scales[expert]) for one in (up, down)]
        both = w8a8.linear_fp8(x[t : t + 1].float(), *parts[0])
        between = moe.gate(both, moe.SWIGLU).bfloat16()
        y[t] += weights[t, j].double() * w8a8.linear_fp8(between.float(), *parts[1])[0].double()
    got = reference.experts(x, ids, weights, up, down, moe.SWIGLU, out=torch.empty_like(y))
    assert float((got - y).norm() / y.norm()) < 2e-3, "but for numbers whose float32 rounds to another bfloat16"
    assert torch.equal(moe.experts(x[2:3], ids[2:3], weights[2:3], up, down), got[2:3].bfloat16())


def close(got: torch.Tensor, expected: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    found = error(got, expected, residual)
    assert found <= reference.TOLERANCE[got.dtype], found


def test_kernels_of_cuda_match_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    script = pathlib.Path(__file__).with_name("interpreted_moe.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[4])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]


def test_every_kind_of_block_is_built_beforehand() -> None:
    pytest.importorskip("triton")
    from quire.kernels.moe import triton

    for n_experts, k, most in ((128, 8, 8192), (5, 2, 300), (64, 6, 20)):
        kinds = {triton._block_rows(n * k, n_experts) for n in moe.build_rows(n_experts, k, most)}
        assert kinds == {triton._block_rows(n * k, n_experts) for n in range(1, most + 1)}


def test_what_does_not_fit_is_refused() -> None:
    x, up, down = torch.zeros(2, 8), torch.zeros(3, 8, 8), torch.zeros(3, 8, 4)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    for arguments in (
        (x, ids.long(), weights, up, down),
        (x, ids, weights, up, torch.zeros(3, 8, 5)),
        (x, ids[:1], weights, up, down),
        (x.double(), ids, weights, up, down),
        (x, ids, weights, up, down.mT.contiguous().mT),
    ):
        with pytest.raises(ValueError, match=r"must|fit"):
            moe.experts(*arguments)
    with pytest.raises(ValueError, match="residual"):
        moe.experts(x, ids, weights, up, down, residual=x.clone(), out=x.clone())
    for routing in (RoutingSpec(n_chosen=5), RoutingSpec(n_chosen=3, n_groups=2), RoutingSpec(n_chosen=1, n_groups=3)):
        with pytest.raises(ValueError, match="experts cannot be"):
            moe.route(torch.zeros(2, 4), routing)


def test_adapters_of_experts_are_merged_matrices() -> None:
    n, n_experts, hidden, inner = 17, 4, 32, 24
    own = adapted_expert_case.made(n, 2, n_experts, hidden, inner, torch.float64)
    x, weights = torch.randn(n, hidden, dtype=torch.float64), torch.rand(n, 2)
    ids = torch.rand(n, n_experts).argsort(1)[:, :2].int().contiguous()
    up = torch.randn(n_experts, 2 * inner, hidden, dtype=torch.float64)
    down = torch.randn(n_experts, hidden, inner, dtype=torch.float64)
    got = moe.adapted_experts(x, ids, weights, up, down, own)
    for row, place in enumerate(own.places.tolist()):
        matrices = (up, down)
        if place >= 0:
            pairs = ((up, own.up), (down, own.down))
            matrices = tuple(adapted_expert_case.merged(one, stack, place) for one, stack in pairs)
        alone = moe.experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1], *matrices)
        assert (got[row] - alone[0]).abs().max() <= 1e-9
    with pytest.raises(ValueError, match="adapters of down"):
        moe.adapted_experts(x, ids, weights, up, down, dataclasses.replace(own, down=own.up))
    with pytest.raises(ValueError, match="places"):
        moe.adapted_experts(x, ids, weights, up, down, dataclasses.replace(own, places=own.places[1:]))


@pytest.mark.parametrize("n", [5, 70])
@pytest.mark.parametrize("has_residual", [False, True])
def test_what_all_tokens_share_is_added_before_experts_or_behind(n: int, has_residual: bool) -> None:
    torch.manual_seed(n)
    *given, residual = shared_cases.arguments((n, 2, 5, 64, 32, 2), torch.float32)
    sums, before = shared_cases.expected(*given), residual.clone() if has_residual else None
    got = moe.experts_with_shared(*given, residual=residual if has_residual else None)
    assert (got is residual) == has_residual
    assert error(got, sums, before) <= reference.TOLERANCE[torch.float32]


def exact_arguments(n: int) -> list[torch.Tensor]:
    """As `shared_cases.arguments`, of bfloat16: float32 holds all sums, so that only roundings to bfloat16 show."""
    hidden, inner, n_experts = 64, 32, 5

    def numbers(most: int, *size: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, size).bfloat16()

    x = numbers(1, n, hidden)
    x[:, 0] = 1
    ups = [numbers(1, n_experts, 2 * inner, hidden), numbers(1, 4 * inner, hidden)]
    for up in ups:
        gate = up[..., : up.shape[-2] // 2, :]
        gate.zero_()[..., 0] = 32  # SiLU of 32 is 32
    downs = [numbers(3, n_experts, hidden, inner), numbers(3, hidden, 2 * inner)]
    ids = torch.rand(n, n_experts).argsort(1)[:, :2].int().contiguous()
    weights = 2.0 ** torch.randint(-2, 2, (n, 2))
    return [x, ids, weights, ups[0], downs[0], ups[1], downs[1], numbers(1000, n, hidden)]


def test_rows_alone_have_the_same_bits_however_many_they_are() -> None:
    """What all tokens share is rounded into the stream before experts are, or behind: that must not depend on n."""
    torch.manual_seed(0)
    x, ids, weights, *matrices, residual = exact_arguments(200)

    def run(n: int) -> torch.Tensor:
        return moe.experts_with_shared(x[:n], ids[:n], weights[:n], *matrices, residual=residual[:n].clone())

    with rows_alone():
        whole = run(200)
        for n in (1, 8, 48, 64, 65, 130):
            assert torch.equal(run(n), whole[:n]), n
    assert torch.equal(run(48), whole[:48]), "of few rows they come behind in any case"
    assert not torch.equal(run(200), whole), "of many, elsewhere, first"
