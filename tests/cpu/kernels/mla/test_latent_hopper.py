"""The kernel of latent attention for Hopper without a GPU: emulated on host threads, against float64."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch
from emulated_latent import emulate
from latent_case import Latent, attend

from quire.kernels.attention import reference
from quire.kernels.attention.hopper import latent
from quire.kernels.attention.schedule.plan import Heads, Layout
from quire.kernels.attention.variant import Variant

DEEPSEEK: dict[str, Any] = {"rank": 512, "rope": 64, "scale": 0.07}
CASES = (  # and programs: lines of a program, rings that turn, ends inside a page, few parts of a row and many
    (Latent([(210, 1), (1, 1), (77, 1)], n_heads=16, dtype=torch.bfloat16, seed=1, **DEEPSEEK), 2),
    (Latent([(1100, 1)], n_heads=5, page_size=48, dtype=torch.bfloat16, seed=2, **DEEPSEEK), 16),
    (Latent([(170, 1), (165, 1)], n_heads=16, n_shared=144, dtype=torch.bfloat16, seed=3, **DEEPSEEK), 2),
    (Latent([(300, 1), (65, 1)], n_heads=40, page_size=8, dtype=torch.float16, seed=4, **DEEPSEEK), 3),
    (Latent([(90, 1), (70, 2)], n_heads=128, dtype=torch.float16, seed=5, **DEEPSEEK), 3),
)


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(tmp_path, monkeypatch)


def test_attention_to_lines_matches_float64(emulation: None) -> None:
    for case, n_ctas in CASES:
        attend(case, latent.run, reference.TOLERANCE[case.dtype], n_ctas)


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
