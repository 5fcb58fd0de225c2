"""What each variant means: the reference against formulas written out here, and against code that others wrote."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quire.kernels.attention import reference
from quire.kernels.attention.schedule.plan import AttnPlan, AttnSpans, Heads, Layout
from quire.kernels.attention.variant import Variant, variants
from quire.kernels.attention.variant.expression import as_float, exp, tanh, where

N_Q_HEADS, N_KV_HEADS, DIM, SCALE = 6, 2, 16, 0.3
GROUP = N_Q_HEADS // N_KV_HEADS
N_KEYS, N_ROWS = 40, 25
POSITIONS = torch.arange(N_KEYS)
ROWS = POSITIONS[-N_ROWS:, None]
CAUSAL = ROWS >= POSITIONS
torch.set_num_threads(1)


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 q [n, n_q_heads, d] at the last positions of k, v [n_keys, n_kv_heads, d]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((N_ROWS, N_Q_HEADS), (N_KEYS, N_KV_HEADS), (N_KEYS, N_KV_HEADS))
    return tuple(2 * torch.randn(*shape, DIM, dtype=torch.float64, generator=generator) for shape in shapes)


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's out [n, n_q_heads, d] and lse [n, n_q_heads]."""
    heads = Heads(q.shape[1], k.shape[1], q.shape[2])
    spans = AttnSpans(np.array([0, len(q)], np.int32), np.array([len(k)], np.int32), np.array([0], np.int32))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=q.dtype)
    reference.run(q, k, v, AttnPlan(Layout.RAGGED, heads, 1, spans, None), variant, out, lse)
    return out, lse


def batched(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[n, h, d] → [1, h, n, d], as others have it."""
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def dense_logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """SCALE * q·k, [n_q_heads, n, n_keys], by the definition."""
    logits = torch.empty(q.shape[1], len(q), len(k), dtype=q.dtype)
    for head in range(q.shape[1]):
        logits[head] = SCALE * q[:, head] @ k[:, head // GROUP].T
    return logits


def dense(logits: torch.Tensor, visible: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax over the visible keys, by the definition; 0 for rows that see nothing."""
    weights = torch.exp(logits) * visible
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.where(total > 0, 1.0)
    return torch.stack([weights[head] @ v[:, head // GROUP] for head in range(len(logits))], dim=1)


def additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, float("-inf"))[None, None]


def assert_same(got: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=0, atol=atol)


# By the definition ----------------------------------------------------------------------------------------------------


def test_causal() -> None:
    q, k, v = inputs()
    out, lse = solve(q, k, v, variants.causal(SCALE))
    logits = dense_logits(q, k)
    assert_same(out, dense(logits, CAUSAL, v))
    assert_same(lse, (torch.exp(logits) * CAUSAL).sum(-1).log().T)


@pytest.mark.parametrize(("window", "n_first"), [(1, 0), (7, 0), (7, 3), (1, 1), (100, 5)])
def test_window_and_first_positions(window: int, n_first: int) -> None:
    q, k, v = inputs()
    visible = torch.zeros(N_ROWS, N_KEYS, dtype=torch.bool)
    for row in range(N_ROWS):
        position = N_KEYS - N_ROWS + row
        last = list(range(position + 1))[-window:]
        for key in {*last, *range(min(n_first, position + 1))}:
            visible[row, key] = True
    out, _ = solve(q, k, v, variants.causal(SCALE, window, n_first))
    assert_same(out, dense(dense_logits(q, k), visible, v))


def test_full() -> None:
    q, k, v = inputs()
    out, _ = solve(q, k, v, Variant(SCALE, causal=False))
    assert_same(out, dense(dense_logits(q, k), torch.ones_like(CAUSAL), v))


def test_soft_cap() -> None:
    q, k, v = inputs()
    out, _ = solve(q, k, v, variants.soft_cap(SCALE, 1.5, window=9))
    assert_same(out, dense(1.5 * torch.tanh(dense_logits(q, k) / 1.5), CAUSAL & (POSITIONS > ROWS - 9), v))


def test_alibi() -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.03, 2.0, 0.0])
    out, _ = solve(q, k, v, variants.alibi(SCALE, slopes))
    bias = slopes.double()[:, None, None] * (POSITIONS - ROWS)
    assert_same(out, dense(dense_logits(q, k) + bias, CAUSAL, v))


def test_learned_sinks() -> None:
    """A sink is one more key with a zero value."""
    q, k, v = inputs()
    sinks = torch.tensor([0.5, -20.0, 3.0, 0.0, 20.0, 1.0])
    out, lse = solve(q, k, v, variants.learned_sinks(SCALE, sinks))
    logits = torch.cat((dense_logits(q, k), sinks.double()[:, None, None].expand(-1, N_ROWS, 1)), dim=-1)
    visible = torch.cat((CAUSAL, torch.ones(N_ROWS, 1, dtype=torch.bool)), dim=-1)
    assert_same(out, dense(logits, visible, torch.cat((v, torch.zeros_like(v[:1])))))
    assert_same(lse, (torch.exp(dense_logits(q, k)) * CAUSAL).sum(-1).log().T)


def test_sigmoid_attention() -> None:
    q, k, v = inputs()
    out, _ = solve(q, k, v, variants.sigmoid_attention(SCALE, -2.5))
    weights = CAUSAL / (1 + torch.exp(-(dense_logits(q, k) - 2.5)))
    assert_same(out, torch.einsum("hnk,khd->nhd", weights, v.repeat_interleave(GROUP, dim=1)))


def test_custom_mask_and_rows_that_see_nothing() -> None:
    q, k, v = inputs()
    mask = torch.rand(N_ROWS, N_KEYS + 3) < 0.3
    mask[[0, 7]] = False
    out, lse = solve(q, k, v, variants.custom_mask(SCALE, mask))
    assert_same(out, dense(dense_logits(q, k), mask[:, :N_KEYS], v))
    assert bool((out[[0, 7]] == 0).all())
    assert bool((lse[[0, 7]] == float("-inf")).all())
    assert bool(lse[1:7].isfinite().all())
    narrow = mask.clone()
    narrow[:, N_KEYS - 3 :] = False
    out, _ = solve(q, k, v, variants.custom_mask(SCALE, mask[:, : N_KEYS - 3].contiguous()))
    assert_same(out, dense(dense_logits(q, k), narrow[:, :N_KEYS], v))


def test_tree_mask_is_the_tree() -> None:
    """Draft tokens after committed ones; parents[i] is the draft that draft i continues, -1 the committed text."""
    parents = [-1, 0, 0, 1, 1, 2, -1, 6]
    n_drafts, start = len(parents), N_KEYS - len(parents)
    ancestors = torch.zeros(n_drafts, n_drafts, dtype=torch.bool)
    visible = torch.zeros(n_drafts, N_KEYS, dtype=torch.bool)
    visible[:, :start] = True
    for draft in range(n_drafts):
        above = draft
        while above >= 0:
            ancestors[draft, above] = visible[draft, start + above] = True
            above = parents[above]
    q, k, v = inputs()
    q = q[:n_drafts]
    starts = torch.full((n_drafts,), start, dtype=torch.int32)
    out, _ = solve(q, k, v, variants.tree_mask(SCALE, ancestors, starts))
    assert_same(out, dense(dense_logits(q, k), visible, v))


def test_an_own_variant_with_every_hook() -> None:
    q, k, v = inputs()
    gate, decay = torch.rand(N_KV_HEADS * DIM), torch.rand(N_Q_HEADS)
    variant = Variant(
        SCALE,
        query_transform=lambda x, site, p: x * (1.0 + as_float(site.q_head) / 10) + as_float(site.q_row % 2),
        key_transform=lambda x, site, p: tanh(x) * p.gate[site.kv_head * p.dim + site.dim],
        value_transform=lambda x, site, p: where(site.k_pos % 3 == 0, 2 * x, x),
        logits_transform=lambda logits, site, p: logits * exp(p.decay[site.q_head] * as_float(site.k_pos - site.q_pos)),
        logits_mask=lambda site, p: (site.k_pos % 2 == site.q_pos % 2) | (site.k_pos == 5),
        output_transform=lambda o, site, p: o * site.lse + as_float(site.dim),
        params={"gate": gate, "decay": decay, "dim": DIM},
    )
    out, lse = solve(q, k, v, variant)
    turned = q * (1 + torch.arange(N_Q_HEADS).double()[:, None] / 10) + (torch.arange(N_ROWS) % 2)[:, None, None]
    logits = dense_logits(turned, torch.tanh(k) * gate.double().view(N_KV_HEADS, DIM))
    logits = logits * torch.exp(decay.double()[:, None, None] * (POSITIONS - ROWS).clamp(max=0))
    visible = CAUSAL & ((POSITIONS % 2 == ROWS % 2) | (POSITIONS == 5))
    plain = dense(logits, visible, torch.where(POSITIONS[:, None, None] % 3 == 0, 2 * v, v))
    state = (torch.exp(logits) * visible).sum(-1).log().T
    assert_same(lse, state)
    assert_same(out, plain * state[..., None] + torch.arange(DIM))


# By others' code ------------------------------------------------------------------------------------------------------


def test_causal_is_torchs_own() -> None:
    q, k, v = (x[-N_ROWS:] for x in inputs())
    out, _ = solve(q, k, v, variants.causal(SCALE))
    expected = F.scaled_dot_product_attention(*batched(q, k, v), is_causal=True, scale=SCALE, enable_gqa=True)
    assert_same(out, expected[0].transpose(0, 1))


def test_masks_are_torchs_own() -> None:
    q, k, v = inputs()
    mask = torch.rand(N_ROWS, N_KEYS) < 0.3
    mask[:, 4] = True
    out, _ = solve(q, k, v, variants.custom_mask(SCALE, mask))
    expected = F.scaled_dot_product_attention(*batched(q, k, v), attn_mask=mask, scale=SCALE, enable_gqa=True)
    assert_same(out, expected[0].transpose(0, 1))


def test_soft_cap_is_gemmas() -> None:
    """Gemma 2's softmax is always float32."""
    q, k, v = inputs()
    module = types.SimpleNamespace(num_key_value_groups=GROUP, training=False)
    expected, _ = modeling_gemma2.eager_attention_forward(
        module, *batched(q, k, v), additive(CAUSAL), scaling=SCALE, softcap=2.0
    )
    out, _ = solve(q, k, v, variants.soft_cap(SCALE, 2.0))
    assert_same(out, expected[0], atol=reference.TOLERANCE[torch.float32])


@pytest.mark.parametrize("window", [0, 8])
def test_learned_sinks_are_those_of_gpt_oss(window: int) -> None:
    q, k, v = inputs()
    sinks = torch.randn(N_Q_HEADS)
    module = types.SimpleNamespace(num_key_value_groups=GROUP, training=False, sinks=sinks.double())
    visible = CAUSAL & (POSITIONS + window > ROWS) if window else CAUSAL
    expected, _ = modeling_gpt_oss.eager_attention_forward(module, *batched(q, k, v), additive(visible), scaling=SCALE)
    out, _ = solve(q, k, v, variants.learned_sinks(SCALE, sinks, window))
    assert_same(out, expected[0])


def test_alibi_is_blooms() -> None:
    """Bloom adds slope * position of the key: the same up to a constant in each row."""
    q, k, v = inputs()
    bias = build_alibi_tensor(torch.ones(1, N_KEYS), N_Q_HEADS, torch.float64)
    slopes = bias[:, 0, 1].float().contiguous()
    out, _ = solve(q, k, v, variants.alibi(SCALE, slopes))
    mask = bias[None] + additive(CAUSAL)
    expected = F.scaled_dot_product_attention(*batched(q, k, v), attn_mask=mask, scale=SCALE, enable_gqa=True)
    assert_same(out, expected[0].transpose(0, 1))


def rotary_table(n: int) -> torch.Tensor:
    """float32 [n, DIM]: cosines, then sines."""
    angles = torch.outer(torch.arange(n), 100.0 ** (-torch.arange(0, DIM, 2) / DIM))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x [n, h, d] at these positions, by transformers."""
    cos, sin = table[positions].double().chunk(2, dim=1)
    cos, sin = torch.cat((cos, cos), dim=1)[None], torch.cat((sin, sin), dim=1)[None]
    return apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)[0][0]


def test_rotary_is_llamas() -> None:
    q, k, v = inputs()
    table = rotary_table(N_KEYS)
    turned = rotated(q, POSITIONS[-N_ROWS:], table), rotated(k, POSITIONS, table)
    out, _ = solve(q, k, v, variants.rotary(SCALE, table))
    assert_same(out, dense(dense_logits(*turned), CAUSAL, v))


def test_streaming_llm_drops_pages_of_the_middle() -> None:
    """A cache that keeps the first page and the last ones, with positions counted inside the cache."""
    page_size, kept = 8, [0, 3, 4]
    q, k, v = inputs()
    pages = [x.view(-1, page_size, N_KV_HEADS, DIM).transpose(1, 2).contiguous() for x in (k, v)]
    cached = torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in kept])
    n = len(cached)
    table, page_table = rotary_table(n), torch.tensor([kept], dtype=torch.int32)
    plan = AttnPlan(
        Layout.PAGED,
        Heads(N_Q_HEADS, N_KV_HEADS, DIM),
        page_size,
        AttnSpans(np.array([0, 1], np.int32), np.array([n], np.int32), np.array([0], np.int32)),
        page_table,
    )
    out = torch.empty_like(q[-1:])
    reference.run(q[-1:], *pages, plan, variants.rotary(SCALE, table), out, None)
    inside = torch.arange(n)
    logits = dense_logits(rotated(q[-1:], inside[-1:], table), rotated(k[cached], inside, table))
    assert_same(out, dense(logits, torch.ones(1, n, dtype=torch.bool), v[cached]))


FLEX = {
    "causal": (variants.causal(SCALE), None, lambda i, j: j <= i),
    "soft_cap": (variants.soft_cap(SCALE, 2.0), lambda s, h, i, j: 2.0 * torch.tanh(s / 2.0), lambda i, j: j <= i),
    "alibi": (
        variants.alibi(SCALE, torch.arange(6) / 8),
        lambda s, h, i, j: s + h / 8 * (j - i),
        lambda i, j: j <= i,
    ),
    "window": (variants.causal(SCALE, 9, 2), None, lambda i, j: (j <= i) & ((i - j < 9) | (j < 2))),
    "dilated": (
        Variant(SCALE, causal=False, logits_mask=lambda site, p: (site.q_pos + site.k_pos) % 3 == 0),
        None,
        lambda i, j: (i + j) % 3 == 0,
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_agrees(name: str) -> None:
    variant, score, mask = FLEX[name]
    q, k, v = (x[-N_ROWS:].float() for x in inputs())
    out, lse = solve(q.double(), k.double(), v.double(), variant)
    visible = flex.create_block_mask(lambda b, h, i, j: mask(i, j), None, None, N_ROWS, N_ROWS, device="cpu")
    arguments: dict[str, Any] = {"block_mask": visible, "scale": SCALE, "enable_gqa": True}
    if score is not None:
        arguments["score_mod"] = lambda s, b, h, i, j: score(s, h, i, j)
    expected, extra = flex.flex_attention(*batched(q, k, v), **arguments, return_aux=flex.AuxRequest(lse=True))
    assert_same(out, expected[0].transpose(0, 1), atol=reference.TOLERANCE[torch.float32])
    assert_same(lse, extra.lse[0].T, atol=reference.TOLERANCE[torch.float32])
