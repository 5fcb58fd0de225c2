"""The kernel of latent attention for Hopper without a GPU: emulated on the host, against float64."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from emulated_latent import emulate
from latent_case import Latent, attend

from quire.kernels.attention import op, reference
from quire.kernels.attention.hopper import latent
from quire.kernels.attention.schedule import tiles, work
from quire.kernels.attention.schedule.plan import Heads, Layout
from quire.kernels.attention.variant import Variant

DEEPSEEK: dict[str, Any] = {"rank": 512, "rope": 64, "scale": 0.07}
CASES = (  # and programs: lines of a program, rings that turn, ends inside a page, few parts of a row and many
    (Latent([(210, 1), (1, 1), (77, 1)], n_heads=16, dtype=torch.bfloat16, seed=1, **DEEPSEEK), 2),
    (Latent([(1100, 1)], n_heads=5, page_size=48, dtype=torch.bfloat16, seed=2, **DEEPSEEK), 16),
    (Latent([(170, 1), (165, 1)], n_heads=16, n_shared=144, dtype=torch.bfloat16, seed=3, **DEEPSEEK), 2),
    (Latent([(300, 1), (65, 1)], n_heads=40, page_size=8, dtype=torch.float16, seed=4, **DEEPSEEK), 3),
    (Latent([(90, 1), (70, 2)], n_heads=128, dtype=torch.float16, seed=5, **DEEPSEEK), 3),
    (Latent([(330, 4), (129, 3), (64, 2)], n_heads=16, dtype=torch.bfloat16, seed=6, **DEEPSEEK), 2),
    # Maxima that move in both teams' blocks.
    (Latent([(450, 1), (200, 1)], n_heads=40, dtype=torch.float16, seed=7, **DEEPSEEK | {"scale": 1.0}), 1),
)


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path, monkeypatch)


def test_attention_to_lines_matches_float64(emulation: None) -> None:
    for case, n_ctas in CASES:
        attend(case, latent.run, reference.TOLERANCE[case.dtype], n_ctas)


def test_a_token_of_many_heads_has_the_same_bits_in_any_company(emulation: None) -> None:
    case = Latent([(150, 1), (90, 1)], n_heads=128, dtype=torch.bfloat16, **DEEPSEEK | {"scale": 1.0})
    q, pages, table, _ = case.inputs()

    def seen(first: int, last: int) -> torch.Tensor:
        n, kv_lens = last - first, np.array([kv_len for kv_len, _ in case.spans[first:last]])
        plan = op.plan(
            np.arange(n + 1), kv_lens, np.arange(first, last), table, page_size=16, n_q_heads=128, n_kv_heads=1,
            head_dim=576, value_dim=512, batch_invariant=True,
        )  # fmt: skip
        plan = dataclasses.replace(plan, work=work.make(plan, table.device, 3))
        out = torch.zeros(n, 128, 512, dtype=case.dtype)
        latent.run(q[first:last], pages, pages[..., :512], plan, Variant(case.scale), out, None)
        return out

    together = seen(0, 2)
    assert bool(together.abs().amax() > 0)
    assert torch.equal(seen(0, 1), together[:1]) and torch.equal(seen(1, 2), together[1:])


def test_a_prompt_has_the_same_bits_in_any_chunks(emulation: None) -> None:
    """Tokens of 16 heads where rows are alone: tiles begin elsewhere, the last ones have few rows, keys end earlier."""
    n = 83
    case = Latent([(n, n)], n_heads=16, dtype=torch.bfloat16, **DEEPSEEK | {"scale": 1.0})
    q, pages, table, _ = case.inputs()

    def seen(first: int, last: int, *, few: bool = False) -> torch.Tensor:
        n_spans = last - first if few else 1
        behind = pages.clone()
        at = torch.arange(last, 16 * table.shape[1])
        behind[table[0, at // 16].long().clamp(min=0), 0, at % 16] = torch.nan
        plan = op.plan(
            np.linspace(0, last - first, n_spans + 1).astype(int), np.arange(last - n_spans, last) + 1,
            np.zeros(n_spans, int), table, page_size=16, n_q_heads=16, n_kv_heads=1, head_dim=576, value_dim=512,
            batch_invariant=True, few=np.full(n_spans, few),
        )  # fmt: skip
        plan = dataclasses.replace(plan, work=work.make(plan, table.device, 3))
        assert len(plan.work.small) == n_spans * few
        out = torch.zeros(last - first, 16, 512, dtype=case.dtype)
        latent.run(q[first:last], behind, behind[..., :512], plan, Variant(case.scale), out, None)
        return out

    whole = seen(0, n)
    assert bool(whole.abs().amax(2).gt(0).all())
    for bounds in ((0, 48, n), (0, 1, 66, n), (0, n - 1, n)):
        assert torch.equal(torch.cat([seen(*one) for one in itertools.pairwise(bounds)]), whole), bounds
    outputs = seen(60, n, few=True)
    assert torch.equal(torch.cat((seen(60, 61, few=True), seen(61, n, few=True))), outputs)


@pytest.mark.parametrize("n_heads", [16, 128])
def test_buffers_of_a_captured_step_serve_later_ones(n_heads: int, emulation: None) -> None:
    """Steps of other numbers and lengths through the same launches: lines behind the real ones are nothing."""
    most = Latent([(140, 1), (200, 1), (40, 1)], n_heads=n_heads, dtype=torch.bfloat16, **DEEPSEEK)
    q, pages, table, lines = most.inputs()
    buffers: work.Buffers | None = None
    for spans in (most.spans, [(17, 1)], [(139, 1), (65, 1)], most.spans):
        n, kv_lens = len(spans), np.array([kv_len for kv_len, _ in spans])
        plan = op.plan(
            np.arange(n + 1), kv_lens, np.arange(n), table, page_size=16, n_q_heads=n_heads, n_kv_heads=1,
            head_dim=576, value_dim=512,
        )  # fmt: skip
        max_large = 4 if n_heads > latent.MAX_ROWS else 0
        buffers = buffers or work.Buffers(plan, max_spans=4, max_large=max_large, span_tokens=1, n_ctas=6)
        plan = dataclasses.replace(plan, work=buffers.fill(plan))
        out = torch.full((len(q), n_heads, 512), 7.0, dtype=most.dtype)
        latent.run(q, pages, pages[..., :512], plan, Variant(most.scale), out, None)
        expected, _ = dataclasses.replace(most, spans=spans).expected(q, lines)
        assert float((out[:n].double() - expected).abs().max()) <= reference.TOLERANCE[most.dtype]
        assert bool((out[n:] == 7.0).all())


@pytest.mark.parametrize(("n_heads", "n_rows", "n_lines"), [(128, 1, 64), (16, 4, 128), (40, 3, 64)])
def test_lines_are_split_where_their_ctas_leave_some_idle(n_heads: int, n_rows: int, n_lines: int) -> None:
    """On 132 of them: lines of more than 64 packed rows have two, so 64 lines of these are 128 CTAs."""
    n, kv_len, table = 64, 1024, torch.zeros(64, 64, dtype=torch.int32)
    plan = op.plan(
        np.arange(n + 1) * n_rows, np.full(n, kv_len), np.arange(n), table, page_size=16, n_q_heads=n_heads,
        n_kv_heads=1, head_dim=576, value_dim=512,
    )  # fmt: skip
    made = tiles.cut(plan, 132)
    assert len(made.large) == n_lines and bool(len(made.merges)) == (n_lines > n)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": Heads(16, 1, 160, 128)}, "not 512 of 576"),
        ({"page_size": 12}, "not a multiple of 8"),
        ({"layout": Layout.SPARSE}, "in pages"),
    ],
)
def test_what_it_cannot_run_is_told(change: dict[str, Any], words: str) -> None:
    case = CASES[0][0]
    plan = case.plan(case.inputs()[2])
    assert latent.static_obstacle(plan, Variant(0.1), case.dtype, case.dtype) is None
    changed = dataclasses.replace(plan, **change)
    assert words in str(latent.static_obstacle(changed, Variant(0.1), case.dtype, case.dtype))
