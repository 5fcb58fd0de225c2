"""The kernel of small lines for Hopper without a GPU: emulated on host threads, against float64, with pages of q's type
and of e4m3.

Not shown: how fast it is, that copies are ordered as on a GPU, dependent launch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import torch
from paged_case import VARIANTS, PagedCase, worst_error

from quire.kernels import jit
from quire.kernels.attention import coded, reference
from quire.kernels.attention.hopper import hooks, launcher
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import Layout
from quire.kernels.attention.variant import Variant
from quire.kernels.kvstore import entry

EMULATED = pathlib.Path(__file__).resolve().parents[2] / "emulated"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", "-pthread", "-x", "c++")
BF16, HALF, CODES = torch.bfloat16, torch.float16, {"kv_dtype": entry.E4M3}
SCALES = entry.Scales(0.5, 1.75)


@dataclasses.dataclass(frozen=True)
class One:
    spans: list[tuple[int, int]]
    page_size: int
    group: int
    head_dim: int
    dtype: torch.dtype
    variant: str = "causal"
    n_ctas: int = 2
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = (  # ends inside pages, split lines, windows, lines of several rows, pages smaller than a stage and larger
    One([(150, 1), (1, 1)], 16, 4, 128, BF16, others=CODES),
    One([(300, 1)], 8, 2, 64, HALF, "window", others=CODES),
    One([(140, 3)], 256, 5, 96, BF16, others=CODES),
    One([(70, 1)], 16, 2, 192, BF16, "custom_mask", n_ctas=1, others=CODES | {"layout": Layout.SPARSE}),
    One([(40, 2)], 32, 3, 256, BF16, n_ctas=1, others=CODES),
    One([(77, 2)], 16, 4, 128, BF16),
)


@pytest.fixture
def emulation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = jit.compiler("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path / "cuda"
    shutil.copytree(jit.sources_folder() / "cuda", folder)
    for header in EMULATED.glob("*.h"):
        shutil.copy(header, folder)
    (folder / "cuda_runtime.h").touch()
    shape = folder / "decode" / "shape.h"
    declared = "extern __shared__ char raw[];"
    assert declared in shape.read_text()
    shape.write_text(shape.read_text().replace(declared, "char* raw = emulated::memory;"))

    @functools.cache
    def library(build: launcher.Build) -> ctypes.CDLL:
        made = tmp_path / f"{abs(hash(build))}.so"
        variant = made.with_suffix(".h")
        variant.write_text(hooks.header(build.program))
        macros = [f"-DQUIRE_{name}={value}" for name, value in launcher.macros(build).items()]
        command = [
            compiler, *FLAGS, f"-I{folder}", *macros, "-include", str(folder / "fragments.h"),
            "-include", str(variant), str(folder / build.source), "-o", str(made),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return ctypes.CDLL(str(made))

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(launcher, "library", library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())


def test_small_lines_match_float64(emulation: None) -> None:
    for seed, one in enumerate(CASES):
        case = PagedCase(one.spans, one.page_size, 1 + seed % 2, one.group, one.head_dim, one.dtype, seed, **one.others)
        variant: Variant = VARIANTS[one.variant](np.random.default_rng(seed), case)
        bare = case.bare_plan(variant)
        plan = dataclasses.replace(bare, work=work.make(bare, n_ctas=one.n_ctas))
        assert plan.work.n_small and not plan.work.n_large
        kind, scales = (coded, (SCALES,)) if case.k.dtype == entry.E4M3 else (launcher, ())
        assert kind.static_obstacle(plan, variant, case.dtype, case.k.dtype) is None
        out, lse = torch.full_like(case.q, 7.0).contiguous(), torch.full(case.q.shape[:2], 7.0)
        kind.run(case.q, case.k, case.v, plan, variant, out, lse, *scales)
        wanted, wanted_lse = out.double(), lse.double()
        numbers = [x.double() * (scale if scales else 1.0) for x, scale in zip((case.k, case.v), SCALES, strict=True)]
        reference.run(case.q.double(), *numbers, plan, variant, wanted, wanted_lse)
        assert worst_error(out, wanted) <= 2 * reference.TOLERANCE[case.dtype], one
        assert worst_error(lse, wanted_lse) <= 1e-3, one
