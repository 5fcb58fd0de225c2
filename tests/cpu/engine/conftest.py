"""One engine on the small checkpoint, shared by the tests of this folder."""

from __future__ import annotations

import pathlib

import pytest

from quire.engine.llm import LLM


@pytest.fixture(scope="session")
def llm(checkpoint: pathlib.Path) -> LLM:
    """One engine with a small pool and chunked prefill, shared by the tests."""
    return LLM(str(checkpoint), max_num_seqs=16, max_num_batched_tokens=48, num_gpu_blocks_override=129, device="cpu")
