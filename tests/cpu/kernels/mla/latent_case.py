"""Latent attention by hand in float64, on random lines in pages that nobody else owns; their storing likewise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quire.kernels.attention import op
from quire.kernels.attention.schedule import work
from quire.kernels.attention.schedule.plan import AttnPlan, SharedPrefix
from quire.kernels.mla import reference

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Latent:
    """Spans (kv_len, rows) of one step. n_shared: first keys that all have in the same pages."""

    spans: Sequence[tuple[int, int]]
    n_heads: int = 4
    rank: int = 32
    rope: int = 16
    page_size: int = 16
    n_shared: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    scale: float = 0.2

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q with padding rows, pages in random order with NaN where no token is, their table, the lines of spans."""
        rng, make = np.random.default_rng(self.seed), torch.Generator().manual_seed(self.seed)
        counts = [-(-kv_len // self.page_size) for kv_len, _ in self.spans]
        n_pages, width = sum(counts) + 3, self.rank + self.rope
        free = rng.permutation(np.arange(1, n_pages))
        table = torch.full((len(counts), max(counts) + 1), -(1 << 24), dtype=torch.int32)
        pages = torch.full((n_pages, 1, self.page_size, width), float("nan"))
        lines = torch.randn(len(counts), max(kv_len for kv_len, _ in self.spans), width, generator=make)
        lines[:, : self.n_shared] = lines[:1, : self.n_shared].clone()
        lines = lines.to(self.dtype)
        n_same = self.n_shared // self.page_size
        for i, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            own = free[end - count : end].astype(np.int32)
            own[:n_same] = free[:n_same]
            table[i, :count] = torch.from_numpy(own)
            at = torch.arange(self.spans[i][0])
            pages[torch.from_numpy(own).long()[at // self.page_size], 0, at % self.page_size] = lines[i, at].float()
        q = torch.randn(sum(n for _, n in self.spans) + 2, self.n_heads, width, generator=make).to(self.dtype)
        return q.to(self.device), pages.to(self.device, self.dtype), table.to(self.device), lines

    def plan(self, table: torch.Tensor, n_ctas: int = 0) -> AttnPlan:
        """n_ctas: cut for so many programs, wherever the table is; 0: for the device."""
        lengths = [n for _, n in self.spans]
        shared = [SharedPrefix(range(len(lengths)), self.n_shared)] if self.n_shared else []
        plan = op.plan(
            np.cumsum([0, *lengths]), np.array([kv_len for kv_len, _ in self.spans]), np.arange(len(lengths)), table,
            page_size=self.page_size, n_q_heads=self.n_heads, n_kv_heads=1, head_dim=self.rank + self.rope,
            value_dim=self.rank, shared=shared,
        )  # fmt: skip
        return dataclasses.replace(plan, work=work.make(plan, table.device, n_ctas)) if n_ctas else plan

    def expected(self, q: torch.Tensor, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 outputs [n_rows, n_heads, rank], and logarithms of the sums of weights."""
        outs, sums, start = [], [], 0
        for i, (kv_len, n) in enumerate(self.spans):
            keys, rows = lines[i, :kv_len].double(), q[start : start + n].cpu().double()
            logits = torch.einsum("nhd,kd->nhk", rows, keys) * self.scale
            seen = torch.arange(kv_len)[None] <= (kv_len - n + torch.arange(n))[:, None]
            logits = logits.masked_fill(~seen[:, None], float("-inf"))
            outs.append(logits.softmax(-1) @ keys[:, : self.rank])
            sums.append(logits.logsumexp(-1))
            start += n
        return torch.cat(outs), torch.cat(sums)


def store_case(
    dtype: torch.dtype, device: str = "cpu", n: int = 9, n_heads: int = 5, rank: int = 48, d: int = 16, before: int = 7
) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    """Arguments of `mla.store`, lines (behind `before` numbers) and queries being parts of wider rows, and what it must
    leave in the entries and in the queries, float64."""
    make = torch.Generator().manual_seed(n)
    wide = torch.randn(n, before + rank + d, generator=make).to(dtype)
    q = torch.randn(n, n_heads, 24 + d, generator=make).to(dtype)
    norm = torch.randn(rank, generator=make).to(dtype)
    angles = torch.randn(30, d // 2, generator=make)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randint(0, 30, (n,), generator=make)
    n_pages = 6 + n // 4
    locs = 4 + torch.randperm(4 * (n_pages - 1), generator=make)[:n]
    asked = torch.full((n, n_heads, rank + d), 7.0, dtype=dtype)
    pages = torch.full((n_pages, 1, 4, rank + d), 7.0, dtype=dtype)
    lines, table = wide[:, before:], cos_sin

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*x.double().chunk(2, -1)) * torch.complex(*table.double().chunk(2, -1))[positions]
        return torch.cat((pairs.real, pairs.imag), -1)

    entries = torch.cat((F.rms_norm(lines[:, :rank].double(), (rank,), norm.double(), EPS), turned(lines[:, rank:])), 1)
    queries = turned(q[:, :, 24:].transpose(0, 1)).transpose(0, 1)
    wide, q, norm, asked, positions, cos_sin, pages, locs = (
        x.to(device) for x in (wide, q, norm, asked, positions, cos_sin, pages, locs)
    )
    given = [wide[:, before:], norm, EPS, q[:, :, 24:], asked[:, :, rank:], positions, cos_sin, pages, locs]
    return given, entries, queries


def check_store(run: Callable[..., None], dtype: torch.dtype, **more: Any) -> None:
    """One case: the entries, the queries, and nothing else written; queries beside themselves, and where they stood."""
    for in_place in (False, True):
        given, entries, queries = store_case(dtype, **more)
        if in_place:
            given[4] = given[3]
        run(*given)
        pages, locs, asked = given[7].cpu(), given[8].cpu(), given[4]
        stored = pages[locs // 4, 0, locs % 4].double()
        for got, right in ((stored, entries), (asked.cpu().double(), queries)):
            error = float(((got - right).abs() / (1 + right.abs().amax(-1, keepdim=True))).max())
            assert error <= reference.TOLERANCE[dtype], error
        others = torch.ones(4 * len(pages), dtype=torch.bool)
        others[locs] = False
        assert bool((pages.transpose(1, 2).flatten(0, 1)[others] == 7.0).all()), "an entry that no row names"


def check_ask(
    run: Callable[..., torch.Tensor], dtype: torch.dtype, plain: int = 24, wide: bool = True, **more: Any
) -> None:
    """What queries ask of lines, and the entries of `check_store`; queries and keys are parts of wider rows."""
    given, entries, turned = store_case(dtype, **more)
    lines, norm, eps, q, _, positions, cos_sin, pages, locs = given
    (n, n_heads, d), rank = q.shape, len(norm)
    make = torch.Generator().manual_seed(rank)
    queries = torch.randn(n, n_heads + 1, plain + d, generator=make).to(dtype).to(q.device)[:, 1:]
    queries[:, :, plain:] = q
    keys = (torch.randn(n_heads, plain + 8, rank, generator=make) * plain**-0.5).to(dtype).to(q.device)[:, :plain]
    given = [lines, norm, eps, queries, keys, positions if wide else positions.int(), cos_sin, pages, locs]
    got = run(*given).cpu().double()
    products = torch.einsum("nhd,hdr->nhr", queries[:, :, :plain].cpu().double(), keys.cpu().double())
    stored = pages.cpu()[locs.cpu() // 4, 0, locs.cpu() % 4].double()
    for found, right in ((got[:, :, :rank], products), (got[:, :, rank:], turned), (stored, entries)):
        error = float(((found - right).abs() / (1 + right.abs().amax(-1, keepdim=True))).max())
        assert error <= reference.TOLERANCE[dtype], error
    others = torch.ones(4 * len(pages), dtype=torch.bool)
    others[locs.cpu()] = False
    assert bool((pages.cpu().transpose(1, 2).flatten(0, 1)[others] == 7.0).all()), "another entry was written"


def check_values(
    run: Callable[..., torch.Tensor], dtype: torch.dtype, n: int = 5, n_heads: int = 3, rank: int = 40, v: int = 24,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Values of what is seen, the matrices being parts of wider ones."""
    make = torch.Generator().manual_seed(n)
    seen = torch.randn(n, n_heads, rank, generator=make).to(dtype).to(device)
    matrices = (torch.randn(n_heads, v + 8, rank, generator=make) * rank**-0.5).to(dtype).to(device)[:, 8:]
    right = torch.einsum("nhr,hvr->nhv", seen.cpu().double(), matrices.cpu().double())
    got = run(seen, matrices)
    assert got.shape == right.shape and got.is_contiguous()
    error = float(((got.cpu().double() - right).abs() / (1 + right.abs().amax(-1, keepdim=True))).max())
    assert error <= reference.TOLERANCE[dtype], error


def attend(case: Latent, run: Callable[..., None], tolerance: float, n_ctas: int = 0) -> None:
    """One case: outputs, logarithms of sums, and rows of padding left alone."""
    q, pages, table, lines = case.inputs()
    plan, out = case.plan(table, n_ctas), torch.full((*q.shape[:2], case.rank), 7.0, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], 7.0, device=q.device)
    run(q, pages, pages[..., : case.rank], plan, op.Variant(case.scale), out, lse)
    right, sums = case.expected(q, lines)
    n = len(right)
    error = ((out[:n].cpu().double() - right).abs() / (1 + right.abs().amax(-1, keepdim=True))).max()
    assert float(error) <= tolerance, case
    assert float((lse[:n].cpu().double() - sums).abs().max()) <= max(1e-4, tolerance), case
    assert bool((out[n:] == 7.0).all()), "padding rows were written"


def check_attend(run: Callable[..., torch.Tensor], case: Latent, n_ctas: int = 0, v: int = 24) -> None:
    """Values of what attention sees of lines; the queries' padding rows are left out."""
    q, pages, table, lines = case.inputs()
    make = torch.Generator().manual_seed(v)
    matrices = torch.randn(case.n_heads, v + 8, case.rank, generator=make) * case.rank**-0.5
    matrices = matrices.to(case.dtype).to(case.device)[:, 8:]
    plan = case.plan(table, n_ctas)
    got = run(q, pages, pages[..., : case.rank], plan, op.Variant(case.scale), matrices)
    right = torch.einsum("nhr,hvr->nhv", case.expected(q, lines)[0], matrices.cpu().double())
    assert got.shape == (*q.shape[:2], v) and got.is_contiguous()
    error = ((got[: len(right)].cpu().double() - right).abs() / (1 + right.abs().amax(-1, keepdim=True))).max()
    assert float(error) <= reference.TOLERANCE[case.dtype], case
