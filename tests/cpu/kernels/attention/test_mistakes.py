"""Mistakes of a user end in one error that names the value and what to do, never in foreign memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.kernels import attention
from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant, variants

HEADS = {"n_q_heads": 4, "n_kv_heads": 2, "head_dim": 16}
CPU = torch.device("cpu")


def ragged(n_keys: int = 9, n_rows: int = 3, **options: object) -> AttnPlan:
    return attention.plan_ragged(np.array([0, n_rows]), np.array([0, n_keys]), device=CPU, **HEADS, **options)


def run(variant: Variant, plan: AttnPlan | None = None, n_keys: int = 9, n_rows: int = 3) -> torch.Tensor:
    q, (k, v) = torch.randn(n_rows, 4, 16), torch.randn(2, n_keys, 2, 16)
    return attention.run(q, k, v, plan or ragged(n_keys, n_rows, variant=variant), variant)


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (variants.alibi(1.0, torch.ones(3)), r"p.slopes\[0 .. 3\], but 'slopes' has 3 elements"),
        (variants.custom_mask(1.0, torch.ones(2, 9, dtype=torch.bool)), r"'mask' has 18 elements"),
        (variants.rotary(1.0, torch.ones(8, 16)), r"'cos_sin' has 128 elements"),
        (Variant(1.0, logits_mask=lambda site, p: p.t[site.q_pos - site.k_pos] > 0, params={"t": torch.ones(9)}), "-8"),
    ],
)
def test_indices_that_leave_a_tensor_are_refused(variant: Variant, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(variant)


def test_indices_inside_a_tensor_pass() -> None:
    run(variants.alibi(1.0, torch.ones(4)))
    run(variants.custom_mask(1.0, torch.ones(3, 9, dtype=torch.bool)))
    run(variants.rotary(1.0, torch.ones(9, 16)))
    starts, tree = torch.full((3,), 6, dtype=torch.int32), torch.ones(3, 3, dtype=torch.bool)
    run(variants.tree_mask(1.0, tree, starts))


@pytest.mark.parametrize("variant", [Variant(1.0, window=4), Variant(1.0, causal=False)])
def test_rows_are_placed_only_where_their_keys_are_planned(variant: Variant) -> None:
    with pytest.raises(ValueError, match="no window"):
        ragged(variant=variant).place(torch.zeros(3, dtype=torch.int64))


def test_keys_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="k has 5 rows, but kv_indptr of the plan reaches 9"):
        run(Variant(1.0), ragged(9), n_keys=5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"logits_mask": lambda site, p: site.q_pos // 0 > 1}, TypeError, "positive constant"),
        ({"logits_mask": lambda site, p: site.q_pos % site.kv_head > 1}, TypeError, "positive constant"),
        ({"logits_mask": lambda site, p: site.q_pos // p.n > 1, "params": {"n": 0}}, ValueError, "'n' is 0"),
        ({"logits_transform": lambda x, site, p: math.tanh(x)}, TypeError, "functions of quire.kernels"),
        ({"logits_transform": lambda x, site, p: x**2}, TypeError, "multiply"),
        (
            {"logits_transform": lambda x, site, p: x * p.t, "params": {"t": torch.ones(2)}},
            TypeError,
            r"p.t \(a tensor",
        ),
        ({"logits_transform": lambda x, site, p: x * p.t[0], "params": {"t": 3.0}}, TypeError, "no elements"),
        ({"logits_transform": lambda x, site, p: None}, TypeError, "returned None"),
        ({"logits_transform": lambda x: x}, TypeError, r"function of \(x, site, p\)"),
        ({"logits_mask": 3}, TypeError, "must be a function"),
        ({"scale": None}, ValueError, "scale is None"),
        ({"scale": math.nan}, ValueError, "scale is nan"),
        ({"params": {"n": "3"}}, ValueError, "'n' is '3'"),
    ],
)
def test_variants_that_cannot_be(options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(Variant(**{"scale": 1.0, **options}))


def test_parameters_cannot_change_behind_a_variant() -> None:
    variant = variants.soft_cap(1.0, 30.0)
    with pytest.raises(TypeError):
        variant.params["cap"] = 9.0  # type: ignore[index]


def test_arguments_of_other_types() -> None:
    q, (k, v) = torch.randn(3, 4, 16), torch.randn(2, 9, 2, 16)
    variant, plan = Variant(1.0), ragged()
    with pytest.raises(ValueError, match="plan is a Variant"):
        attention.run(q, k, v, variant, plan)
    with pytest.raises(ValueError, match="q is a ndarray"):
        attention.run(q.numpy(), k, v, plan, variant)
    with pytest.raises(ValueError, match=r"q is torch\.int32"):
        attention.run(q.int(), k.int(), v.int(), plan, variant)
    with pytest.raises(ValueError, match="has no gradient"):
        attention.run(q.requires_grad_(), k, v, plan, variant)
    with pytest.raises(ValueError, match=r"float64 values up to 3\.5"):
        attention.plan_ragged(np.array([0, 3.5]), np.array([0, 9]), device=CPU, **HEADS)
    with pytest.raises(ValueError, match="int64 values up to 8589934592"):
        attention.plan_ragged(np.array([0, 3]), np.array([0, 1 << 33]), device=CPU, **HEADS)
    with pytest.raises(ValueError, match="one state or more"):
        attention.merge([], [])
