"""The most probable tokens on a GPU: those of the CPU, ties included, for any k and any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.sample.logprobs import logprobs
from quire.kernels.sample.top import top

pytestmark = pytest.mark.gpu


def make_logits(n_rows: int, width: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width + n_rows)
    logits = torch.randn(n_rows, width, generator=generator) * 3
    if kind == "bfloat16":
        return logits.bfloat16().float()
    if kind == "level":
        return logits.round() * 0.0  # zeros of both signs
    return logits.clamp(max=4.0) if kind == "plateau" else logits


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "level", "plateau"])
@pytest.mark.parametrize("width", [9, 1000, 32_000, 151_936])
def test_equals_the_cpu(width: int, kind: str) -> None:
    logits = make_logits(7, width, kind)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    for k in (1, 5, 20, 1000):
        k = min(k, width)
        for rows in (slice(0, 7), slice(3, 4)):
            values, ids = top(logits[rows].cuda(), k)
            assert torch.equal(ids.cpu(), expected.indices[rows, :k])
            assert torch.equal(values.cpu(), expected.values[rows, :k])
            on_host = top(logits[rows], k)
            assert torch.equal(ids.cpu(), on_host[1])


def test_a_line_keeps_its_tokens_whatever_neighbours_ask_for() -> None:
    logits = make_logits(16, 151_936, "bfloat16").cuda()
    targets = torch.zeros(16, dtype=torch.int32, device="cuda")
    alone = logprobs(logits, targets, np.arange(16), np.full(16, 5))
    for n_neighbour in (6, 7, 20):
        n_top = np.where(np.arange(16) % 2, n_neighbour, 5)
        found = logprobs(logits, targets, np.arange(16), n_top)
        assert torch.equal(found.cells[:, :6], alone.cells)


def test_a_line_keeps_its_values_whoever_else_asks() -> None:
    logits = make_logits(64, 151_936, "float32").cuda()
    targets = torch.arange(64, dtype=torch.int32, device="cuda") * 31
    whole = logprobs(logits, targets, np.arange(64), np.full(64, 5))
    for n_rows in (1, 2, 3, 17):
        part = logprobs(logits[:n_rows], targets[:n_rows], np.arange(n_rows), np.full(n_rows, 5))
        assert torch.equal(part.cells, whole.cells[:n_rows])


def test_nothing_waits_for_the_device() -> None:
    logits = make_logits(64, 151_936, "bfloat16").cuda()
    top(logits, 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        top(logits, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
