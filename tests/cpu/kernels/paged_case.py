"""Random attention cases: spans over a poisoned pool of pages, and the float64 answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from quire.kernels import attention
from quire.kernels.attention import reference

NAN = float("nan")


@dataclasses.dataclass
class PagedCase:
    """Spans (kv_len, length) of one batch. Whatever no token owns, in pages and in the table, is poison."""

    spans: list[tuple[int, int]]
    page_size: int
    n_kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    seed: int = 0
    n_padding: int = 3

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        counts = [-(-kv_len // self.page_size) for kv_len, _ in self.spans]
        n_pages = sum(counts) + 4
        free = rng.permutation(np.arange(1, n_pages))
        slots = rng.permutation(len(self.spans) + 2)[: len(self.spans)]
        self.slots = slots.astype(np.int32)
        self.page_table = torch.zeros(len(self.spans) + 2, max(counts, default=0) + 1, dtype=torch.int32)
        shape = (n_pages, self.n_kv_heads, self.page_size, self.head_dim)
        self.k_pages = torch.full(shape, NAN, dtype=self.dtype)
        self.v_pages = torch.full(shape, NAN, dtype=self.dtype)
        for (kv_len, _), slot, count, end in zip(self.spans, slots, counts, np.cumsum(counts), strict=True):
            self.page_table[slot, :count] = torch.from_numpy(free[end - count : end].astype(np.int32))
            self._fill(int(slot), kv_len, rng)
        self.q_indptr = np.concatenate(([0], np.cumsum([length for _, length in self.spans]))).astype(np.int32)
        self.kv_lens = np.array([kv_len for kv_len, _ in self.spans], np.int32)
        self.q = self._normal(rng, int(self.q_indptr[-1]) + self.n_padding, self.n_kv_heads * self.group)
        self.q[self.n_tokens :] = NAN

    @property
    def n_tokens(self) -> int:
        return int(self.q_indptr[-1])

    def _normal(self, rng: np.random.Generator, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((*shape, self.head_dim), np.float32)).to(self.dtype)

    def _fill(self, slot: int, kv_len: int, rng: np.random.Generator) -> None:
        positions = torch.arange(kv_len)
        pages, offsets = self.page_table[slot].long()[positions // self.page_size], positions % self.page_size
        self.k_pages[pages, :, offsets] = self._normal(rng, kv_len, self.n_kv_heads)
        self.v_pages[pages, :, offsets] = self._normal(rng, kv_len, self.n_kv_heads)

    def to(self, device: str) -> PagedCase:
        """Move the tensors, in place."""
        for name in ("q", "k_pages", "v_pages", "page_table"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def shape(self) -> dict[str, int]:
        """Keyword arguments of `attention.plan`."""
        n_q_heads = self.n_kv_heads * self.group
        sizes = {"page_size": self.page_size, "n_q_heads": n_q_heads}
        return {**sizes, "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim}

    def plan(self) -> attention.AttnPlan:
        return attention.plan(self.q_indptr, self.kv_lens, self.slots, self.page_table, **self.shape())

    def bare_plan(self) -> attention.AttnPlan:
        """The plan without a device's work list."""
        return attention.AttnPlan(self.q_indptr, self.kv_lens, self.slots, self.page_table, **self.shape())

    def expected(self, variant: attention.Variant) -> torch.Tensor:
        """float64 [n_tokens, n_q_heads, head_dim] from the reference."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        wide = (x.double() for x in (self.q, self.k_pages, self.v_pages))
        return reference.run(*wide, self.bare_plan(), variant, out)[: self.n_tokens]


def worst_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; NaN anywhere gives NaN."""
    return float((got.double() - expected).abs().max()) if expected.numel() else 0.0


def random_case(
    seed: int, dtype: torch.dtype, head_dims: list[int], longest: int
) -> tuple[PagedCase, attention.Variant]:
    """A mix of empty, decode, chunk and whole-prompt spans with random shapes and a random variant."""
    rng = np.random.default_rng(seed)
    spans = []
    for _ in range(int(rng.integers(1, 6))):
        kv_len = int(rng.integers(1, longest + 1))
        spans.append((kv_len, int(rng.choice([0, 1, 1, min(kv_len, 7), min(kv_len, 100), kv_len]))))
    case = PagedCase(
        spans=spans,
        page_size=int(rng.choice([1, 2, 4, 8, 16, 32, 64, 128])),
        n_kv_heads=int(rng.choice([1, 2, 3])),
        group=int(rng.integers(1, 9)),
        head_dim=int(rng.choice(head_dims)),
        dtype=dtype,
        seed=seed,
    )
    window, softcap = int(rng.choice([0, 0, 1, 5, 64, 100])), float(rng.choice([0.0, 0.0, 5.0, 30.0]))
    return case, attention.Variant(case.head_dim**-0.5, window=window, softcap=softcap)
