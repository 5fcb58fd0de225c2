"""The point between a row-parallel product and its residual: nothing, an adapter's delta, the sum over two ranks.

The ranks are threads here, so that there can be many; `test_rank_models.py` has processes and workers.
"""

from __future__ import annotations

import functools
import json
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from family_cases import checkpoint_of

from quire.compute.dist.added import RankSum
from quire.compute.dist.comm import Reduction, SoloComm
from quire.compute.forward.obstacle import obstacle
from quire.compute.layers.linear import Linear
from quire.compute.layers.norm import Norm
from quire.compute.layers.residual import ResidualProduct
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.schemes.choice import floating
from quire.compute.schemes.plain import PlainProduct
from quire.compute.weights.pieces import take
from quire.config.arch import ModelArch
from quire.config.layers import NormSpec
from quire.config.model import read_arch
from quire.config.parameters import Matrix, NormTable
from quire.kernels import native

CPU = torch.device("cpu")
IDS = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64]
PLAIN = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"architectures": ["Qwen3ForCausalLM"], **PLAIN},
    "norms after": {"architectures": ["Gemma2ForCausalLM"], **PLAIN, "sliding_window": 8, "query_pre_attn_scalar": 32},
    "parallel": {"architectures": ["CohereForCausalLM"], **PLAIN, "logit_scale": 1.0, "use_qk_norm": False},
    "scaled": {"architectures": ["GraniteForCausalLM"], **PLAIN, "residual_multiplier": 0.5},
}


class ThreadComm:
    """`Comm` of a rank that is a thread."""

    def __init__(self, rank: int, given: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(given)
        self._given, self._barrier = given, barrier

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        assert reduction is Reduction.SUM
        self._given[self.rank] = x.clone()
        self._barrier.wait(timeout=60)
        x.copy_(torch.stack([one for one in self._given if one is not None]).sum(0))
        self._barrier.wait(timeout=60)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._given[self.rank] = x.clone()
        self._barrier.wait(timeout=60)
        found = torch.stack([one for one in self._given if one is not None])
        self._barrier.wait(timeout=60)
        return found

    def close(self) -> None: ...


def filled(arch: ModelArch) -> Decoder:
    """Random weights, not finished."""
    torch.manual_seed(0)
    model = decoder_on(CPU, arch, torch.float32, 128)
    for name, tensor in model.weights():
        is_norm = "norm" in name
        tensor.copy_(1 + torch.randn(tensor.shape) / 10 if is_norm else torch.randn(tensor.shape) / 6)
    return model


def rank_model(whole: Decoder, arch: ModelArch, comm: ThreadComm) -> Decoder:
    """One rank's part of `whole`, which is not finished."""
    model = decoder_on(CPU, arch, torch.float32, 128, comm=comm)
    given, regions = dict(whole.weights()), model.regions()
    for name, target in model.weights():
        target.copy_(take(given[name], regions[name]) if name in regions else given[name])
    model.finish()
    return model


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_are_the_whole(
    name: str, n_ranks: int, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]]
) -> None:
    """Two KV heads: two of four ranks have the same one."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    check_ranks(read_arch(tmp_path), n_ranks, tools)


def check_ranks(arch: ModelArch, n_ranks: int, tools: dict[str, Callable[..., Any]]) -> None:
    """Their logits, and what memory they take."""
    whole = filled(arch)
    barrier, given = threading.Barrier(n_ranks), [None] * n_ranks
    ranks = [rank_model(whole, arch, ThreadComm(rank, given, barrier)) for rank in range(n_ranks)]  # type: ignore[arg-type]
    whole.finish()
    expected = tools["run_chunks"](whole, torch.float32, IDS, [7, 4, 1])

    def run(model: Decoder) -> torch.Tensor:
        with torch.inference_mode():
            return tools["run_chunks"](model, torch.float32, IDS, [7, 4, 1])

    with ThreadPoolExecutor(n_ranks) as threads:
        found = list(threads.map(run, ranks))
    assert all(torch.equal(found[0], one) for one in found[1:]), "ranks have the same bits"
    assert expected.abs().max() > 1 and (found[0] - expected).abs().max() < 2e-4
    for rank in ranks:
        assert rank.n_bytes < whole.n_bytes / n_ranks * 1.4 and not rank.is_plain
        assert "divided among" in (obstacle(rank) or "")


@pytest.mark.parametrize(("case", "n_ranks"), [("bamba", 4), ("mamba2", 2), ("olmo2", 4), ("qwen3_next-dense", 2)])
def test_ranks_of_other_mixers_are_the_whole(
    case: str, n_ranks: int, tmp_path: pathlib.Path, tools: dict[str, Callable[..., Any]]
) -> None:
    """A group of Mamba-2 on two ranks, and whole ones; norms of all heads, of which two ranks have the same keys."""
    checkpoint_of(case, tmp_path)
    check_ranks(read_arch(tmp_path), n_ranks, tools)


def product(post_norm: bool, scale: float) -> tuple[ResidualProduct, torch.Tensor]:
    make = functools.partial(torch.empty, dtype=torch.float32)
    linear = Linear(make, Matrix(n_in=48, parts=(("m", 64),)), floating(CPU, torch.float32))
    assert linear.weight is not None
    weight = linear.weight.normal_(0, 0.2).clone()
    linear.finish()
    norm = None
    if post_norm:
        norm = Norm(make, NormTable(name="n", shape=(64,), spec=NormSpec(eps=1e-5)))
        assert norm.weight is not None
        norm.weight.fill_(1.5)
    return ResidualProduct(linear, norm, scale), weight


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_delta_comes_before_norm_and_factor(post_norm: bool, scale: float) -> None:
    """As an adapter adds it: from what the product took."""
    point, weight = product(post_norm, scale)
    x, y = torch.randn(5, 64), torch.randn(5, 48)
    down, up = torch.randn(48, 2), torch.randn(2, 64)
    point.between = lambda taken, z: z.addmm_(taken @ down, up)
    z = y @ weight.T + y @ down @ up
    if post_norm:
        z = torch.nn.functional.rms_norm(z, (64,), torch.full((64,), 1.5), 1e-5)
    expected = x + scale * z
    assert point(y, x) is x
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("n", [4, 20])
def test_the_sum_over_ranks_norms_what_no_product_does(n: int, post_norm: bool) -> None:
    """Many rows of a stream that takes the sum as it is; then the norm is not done again."""
    point, _ = product(post_norm, scale=1.0)
    norm = Norm(torch.empty, NormTable(name="n", shape=(64,), spec=NormSpec(eps=1e-5)))
    assert norm.weight is not None
    norm.weight.uniform_(0.5, 2)
    x, y = torch.randn(n, 64), torch.randn(n, 48)
    expected = point(y, x.clone())
    point.ranks = RankSum(SoloComm())
    assert not point.adds
    rows, left = point.then(y, x, norm)
    torch.testing.assert_close(x, expected)
    assert (left is None) == (n == 20 and not post_norm)
    torch.testing.assert_close(rows if left is None else left(rows), norm(expected))


class SendingComm(SoloComm):
    """Of two ranks, whose products may send their terms."""

    sends_to = 2

    def __init__(self) -> None:
        self.sent: list[bool] = []

    def add_product(
        self, y: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, norm: Any
    ) -> torch.Tensor | None:
        self.sent.append(norm is not None)
        x.add_(torch.nn.functional.linear(y, w, bias))
        return None if norm is None else torch.nn.functional.rms_norm(x, x.shape[1:], *norm)


def test_products_of_many_rows_send_their_terms() -> None:
    """With the norm that follows, if any; not of few rows, nor where anything stands between."""
    (point, weight), comm = product(post_norm=False, scale=1.0), SendingComm()
    point.linear.run = PlainProduct(weight)
    norm = Norm(torch.empty, NormTable(name="n", shape=(64,), spec=NormSpec(eps=1e-5)))
    assert norm.weight is not None
    norm.weight.uniform_(0.5, 2)
    few, many = (torch.randn(n, 48) for n in (64, 65))
    expected = point(many, torch.ones(65, 64))
    point.ranks = RankSum(comm)
    assert point.sends_to == 2
    x = torch.ones(65, 64)
    rows, left = point.then(many, x, norm)
    assert left is None and comm.sent == [True]
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(rows, norm(expected))
    torch.testing.assert_close(point(many, torch.ones(65, 64)), expected)
    assert comm.sent == [True, False]
    point(few, torch.ones(64, 64))
    point.then(few, torch.ones(64, 64), norm)
    point.between = lambda taken, z: z
    assert point.sends_to == 0
    point.then(many, torch.ones(65, 64), norm)
    others, weight = product(post_norm=True, scale=1.0)
    others.linear.run = PlainProduct(weight)
    others.ranks = RankSum(comm)
    others(many, torch.ones(65, 64))
    assert comm.sent == [True, False]


def test_nothing_between_is_one_launch() -> None:
    point, _ = product(post_norm=False, scale=1.0)
    calls: list[dict[str, Any]] = []
    original = point.linear.product

    class Counting:
        tensors = original.tensors

        def __call__(self, *given: Any, **options: Any) -> torch.Tensor:
            calls.append(options)
            return original(*given, **options)

    point.linear.run = Counting()
    x, y = torch.randn(5, 64), torch.randn(5, 48)
    expected = original(y, None, residual=x.clone())
    assert torch.equal(point(y, x), expected) and len(calls) == 1 and calls[0]["residual"] is x
    point.between = lambda taken, z: z
    point(y, x)
    assert calls[1]["residual"] is None


@pytest.mark.skipif(native.library() is None, reason="no native library was built")
def test_a_step_in_one_native_call_has_nothing_between(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["plain"]))
    model = filled(read_arch(tmp_path))
    model.finish()
    assert obstacle(model) is None
    model.layers[1].ffn.sum.between = lambda y, z: z
    assert "between a product and its sum" in (obstacle(model) or "")
