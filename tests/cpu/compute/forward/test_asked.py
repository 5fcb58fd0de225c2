"""Which models' rows are alone on a CPU in any case, and which where that is asked for."""

from __future__ import annotations

import pathlib

import pytest

import quire
from quire.compute.forward.asked import rows_alone_on_cpu
from quire.config.model import read_arch
from quire.kernels.invariance import RowsAlone

SHAPES = pathlib.Path(quire.__file__).parent / "bench" / "shapes"
ANYWAY = (
    "qwen3-0.6b",
    "llama-3.2-1b",
    "mixtral-8x7b",
    "olmoe-1b-7b",
    "qwen3-30b-a3b",
    "command-r",
    "mamba2-2.7b",
    "lfm2-1.2b",
)
ASKED = {
    "deepseek-v2-lite": "latent attention",
    "qwen3-next-80b-a3b": "gated attention, a shared expert with a gate",
    "gpt-oss-20b": "another gating",
    "gemma-2-9b": "GELU by tanh, gated",
    "starcoder2-7b": "GELU by tanh",
}


@pytest.mark.parametrize("shape", [*ANYWAY, *ASKED])
def test_which_ask(shape: str) -> None:
    arch = read_arch(SHAPES / shape)
    found = [rows_alone_on_cpu(arch, deterministic=one) for one in (False, True)]
    assert found == ([RowsAlone.ASKED, RowsAlone.ALWAYS] if shape in ASKED else [RowsAlone.NEVER] * 2)
