"""Tools of the oracle tests: tiny random checkpoints written by transformers, and a paged context on references."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from family_cases import random_checkpoint

from quire.compute.models.decoder import Decoder
from quire.compute.weights.loader import load_model
from quire.config.arch import ModelArch
from quire.config.model import read_arch
from quire.kernels import attention, mla
from quire.kernels.qkv import rotate_and_store
from quire.kernels.state import StateSpans, plan_spans

PAGE = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(n_threads)


class PagedContext:
    """`Context` for tests: pages in a shuffled order, each step set by `begin`."""

    expanded = None

    def __init__(self, arch: ModelArch, dtype: torch.dtype, n_slots: int = 2, max_len: int = 256) -> None:
        n_pages = n_slots * max_len // PAGE
        order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(1)).int()
        self.table = order.view(n_slots, -1)
        shape = (arch.n_layers, n_pages, arch.n_kv_heads, PAGE, arch.head_dim)
        self.k_pages, self.v_pages = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.value_dim = next((spec.value_in_key for spec in arch.kv_specs.values()), 0)
        if self.value_dim:
            self.v_pages = self.k_pages[..., : self.value_dim]
        self.arch = arch
        self.lines = {
            layer: tuple(torch.full((n_slots, *part.shape), torch.nan) for part in spec.parts)
            for layer, spec in arch.state_specs.items()
        }
        """Of recurrent layers: what nobody wrote is no number."""

    def begin(self, spans: list[tuple[int, int, int]]) -> torch.Tensor:
        """spans: (slot, start, length). Returns the positions of the flat batch."""
        slots, starts, lengths = (np.array(column, np.int32) for column in zip(*spans, strict=True))
        self.plan = attention.plan(
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            starts + lengths,
            slots,
            self.table,
            page_size=PAGE,
            n_q_heads=self.arch.n_heads,
            n_kv_heads=self.arch.n_kv_heads,
            head_dim=self.arch.head_dim,
            value_dim=self.value_dim,
        )
        indptr = np.concatenate(([0], np.cumsum(lengths)))
        self.spans = StateSpans(*map(torch.from_numpy, plan_spans(indptr, slots, starts)))
        positions = torch.cat([torch.arange(start, start + length) for _, start, length in spans])
        rows = torch.repeat_interleave(torch.from_numpy(slots).long(), torch.from_numpy(lengths).long())
        self.cache_locs = self.table[rows, positions // PAGE].long() * PAGE + positions % PAGE
        return positions

    def store(self, layer: int, *given: Any) -> torch.Tensor:
        return rotate_and_store(*given, self.k_pages[layer], self.v_pages[layer], self.cache_locs)

    def store_lines(self, layer: int, *given: Any) -> None:
        mla.store(*given, self.k_pages[layer], self.cache_locs)

    def ask_lines(self, layer: int, *given: Any) -> torch.Tensor:
        return mla.ask(*given, self.k_pages[layer], self.cache_locs)

    def attend(self, layer: int, q: torch.Tensor, variant: attention.Variant) -> torch.Tensor:
        return attention.run(q, self.k_pages[layer], self.v_pages[layer], self.plan, variant)

    def attend_lines(
        self, layer: int, asked: torch.Tensor, variant: attention.Variant, matrices: torch.Tensor
    ) -> torch.Tensor:
        return mla.attend(asked, self.k_pages[layer], self.v_pages[layer], self.plan, variant, matrices)

    def states(self, layer: int) -> tuple[tuple[torch.Tensor, ...], StateSpans]:
        return self.lines[layer], self.spans


def run_chunks(model: Decoder, dtype: torch.dtype, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocab] of a prompt computed in chunks of the given lengths."""
    context, start, rows = PagedContext(model.arch, dtype), 0, []
    for length in chunks:
        positions = context.begin([(1, start, length)])
        hidden = model.forward(torch.tensor(ids[start : start + length]), positions, context)
        rows.append(model.logits(hidden))
        start += length
    assert start == len(ids)
    return torch.cat(rows)


def greedy(model: Decoder, dtype: torch.dtype, ids: list[int], n_tokens: int) -> list[int]:
    """Tokens chosen one at a time, keys and values cached."""
    context, known, fresh = PagedContext(model.arch, dtype), list(ids), len(ids)
    for _ in range(n_tokens):
        positions = context.begin([(0, len(known) - fresh, fresh)])
        hidden = model.forward(torch.tensor(known[-fresh:], dtype=torch.int32), positions.int(), context)
        known.append(int(model.logits(hidden[-1:]).argmax()))
        fresh = 1
    return known[len(ids) :]


def load(folder: pathlib.Path, dtype: torch.dtype = torch.float32, max_model_len: int = 0, **options: Any) -> Decoder:
    """The checkpoint as Quire loads it on CPU."""
    arch = read_arch(folder)
    length = max_model_len or arch.max_position
    return load_model(folder, arch, dtype=dtype, device=torch.device("cpu"), max_model_len=length, **options)


@pytest.fixture
def tools() -> dict[str, Callable[..., Any]]:
    """The functions above, for test modules (test folders are not packages)."""
    functions = {"run_chunks": run_chunks, "greedy": greedy, "random_checkpoint": random_checkpoint, "load": load}
    return {**functions, "context": PagedContext}
