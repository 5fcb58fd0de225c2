"""Attention by every path that this machine has, against float64 on the same rounded inputs.

After the forward microbenchmark of Golden et al. 2024 ('Is Flash Attention Stable?', arXiv 2405.02803). Beside Quire's
kernels stand the baseline (softmax written out, each step rounded) and a flash attention that keeps every value in the
type, as the paper's does. Owns the paths and their inputs. Does not own kernels nor the figures.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from quire.bench.numerics.deviation import BASELINE, DTYPES, FLASH, OURS, PEER, ROUNDED, Row, deviation
from quire.kernels import attention, catalog
from quire.kernels.attention.schedule.plan import AttnPlan, Heads
from quire.kernels.attention.variant import Variant
from quire.kernels.catalog import Implementation
from quire.kernels.kvstore import entry

PAGE: Final = 16
MAX_LOGITS: Final = 1 << 24
"""Logits of one head that are held at once where softmax is written out."""
FLASH_TILES: Final = (16, 64, 256)
"""Keys of a tile of the flash attention in one type."""
SPAN_ROWS: Final = (1, 16)
"""Rows of queries that our kernels are given at once, beside all of them: 1 is decoding."""
PIECES: Final = (2, 8)
"""Pieces of the keys whose results are merged."""
LOW_KEYS: Final = {"cpu": (torch.int8,), "cuda": (torch.float8_e4m3fn, torch.int8)}
"""Device type → types of low-precision keys and values, the fastest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One sequence whose every position asks: q [n, n_q_heads, head_dim], k, v [n, n_kv_heads, head_dim], float64."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    variant: Variant

    def first(self, n: int) -> Sample:
        """The sequence up to its n-th token."""
        return dataclasses.replace(self, q=self.q[:n], k=self.k[:n], v=self.v[:n])

    def rounded(self, dtype: torch.dtype, device: torch.device) -> Sample:
        """The same numbers in another type and place."""
        q, k, v = (x.to(device, dtype) for x in (self.q, self.k, self.v))
        return dataclasses.replace(self, q=q, k=k, v=v)


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """A way to compute attention. run: a rounded sample → the outputs [n, n_q_heads, head_dim] of its last n rows."""

    name: str
    kind: str
    tile: str
    run: Callable[[Sample], torch.Tensor]
    least: int = 1
    """Keys below which it is the same as another path."""


class NotTaken(Exception):
    """An implementation does not take these inputs, and why."""


def random_sample(heads: Heads, length: int, seed: int) -> Sample:
    """Normal numbers; the same for each machine."""
    made = torch.Generator().manual_seed(seed)
    counts = (heads.n_q_heads, heads.n_kv_heads, heads.n_kv_heads)
    q, k, v = (torch.randn(length, n, heads.head_dim, generator=made, dtype=torch.float64) for n in counts)
    return Sample("random", q, k, v, Variant(heads.head_dim**-0.5))


def paths(device: torch.device) -> list[Path]:
    """All of this machine, the baseline first. The reference stands for what a CPU runs without native kernels."""
    found = [Path("softmax written out", BASELINE, "all rows", written_out)]
    found += [
        Path("flash in one type", FLASH, f"{n} keys", functools.partial(flash_in_one_type, n_keys=n), n)
        for n in FLASH_TILES
    ]
    found.append(Path("torch sdpa", PEER, "its own", torch_sdpa))
    for one in catalog.runnable("attention", device.type, "run"):
        found += paths_of(one, device.type)
    return found


def kernel_path(device: torch.device) -> Path:
    """What a prompt runs on this device: the best implementation, all rows at once."""
    best = catalog.runnable("attention", device.type, "run")[0]
    return Path(best.name, OURS, "all rows", functools.partial(_run, best))


def rows(
    sample: Sample, dtype_name: str, listed: Sequence[Path], device: torch.device, skipped: dict[str, str]
) -> Iterator[Row]:
    """A row for each path, in order; `skipped` gets the paths that do not take these inputs, and why."""
    rounded = sample.rounded(DTYPES[dtype_name], device)
    exact = written_out(rounded.rounded(torch.float64, device))
    apart = (written_out(rounded).double() - exact).abs()
    for path in listed:
        if len(sample.q) < path.least:
            continue
        try:
            got = path.run(rounded)
        except NotTaken as reason:
            skipped[f"{path.name}, {dtype_name}"] = str(reason)
            continue
        found = deviation(got, exact[-len(got) :])
        unit = float(apart[-len(got) :].mean())
        ratio = found.mean_abs / unit if unit else None
        length = len(sample.q)
        yield Row("attention", sample.name, dtype_name, path.name, path.kind, path.tile, length, found, ratio)


def written_out(sample: Sample) -> torch.Tensor:
    """softmax(scale q k^T) v, each step rounded to the sample's type: the baseline, and in float64 the truth."""
    q, k, v = _by_head(sample)
    out = torch.empty_like(q)
    positions = torch.arange(q.shape[1], device=q.device)
    for at in torch.split(positions, max(1, MAX_LOGITS // q.shape[1])):
        hidden = _hidden(sample.variant, at, positions)
        for head in range(len(q)):
            logits = (q[head, at] @ k[head].T * sample.variant.scale).masked_fill_(hidden, float("-inf"))
            out[head, at] = logits.softmax(-1) @ v[head]
    return out.transpose(0, 1)


def flash_in_one_type(sample: Sample, n_keys: int) -> torch.Tensor:
    """Tiles of n_keys keys with a running maximum, sum and output (Dao et al. 2022, algorithm 1), all in the sample's
    type: the output is divided by the sum after every tile. No kernel of Quire keeps its sums in 16 bits."""
    q, k, v = _by_head(sample)
    positions = torch.arange(q.shape[1], device=q.device)
    out = torch.zeros_like(q)
    top = torch.full((*q.shape[:2], 1), float("-inf"), dtype=q.dtype, device=q.device)
    total = torch.zeros_like(top)
    for at in torch.split(positions, n_keys):
        logits = q @ k[:, at].transpose(1, 2) * sample.variant.scale
        logits.masked_fill_(_hidden(sample.variant, positions, at), float("-inf"))
        new_top = torch.maximum(top, logits.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top == float("-inf"), 0.0)
        weights, kept = (logits - safe).exp(), (top - safe).exp() * total
        new_total = kept + weights.sum(-1, keepdim=True)
        divisor = new_total.masked_fill(new_total == 0, 1.0)
        out, top, total = (kept * out + weights @ v[:, at]) / divisor, new_top, new_total
    return out.transpose(0, 1)


def torch_sdpa(sample: Sample) -> torch.Tensor:
    """torch's scaled_dot_product_attention, whichever of its kernels it takes."""
    q, k, v = (x.transpose(0, 1)[None] for x in (sample.q, sample.k, sample.v))
    variant = sample.variant
    if variant.window:
        positions = torch.arange(q.shape[2], device=q.device)
        mask = ~_hidden(variant, positions, positions)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=variant.scale, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=variant.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _by_head(sample: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n_q_heads, n, head_dim] each, keys and values once for every query head."""
    group = sample.q.shape[1] // sample.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (sample.k, sample.v))
    q, k, v = (x.transpose(0, 1).contiguous() for x in (sample.q, k, v))
    return q, k, v


def _hidden(variant: Variant, q_pos: torch.Tensor, k_pos: torch.Tensor) -> torch.Tensor:
    """bool [n_q, n_k]: what a row does not see."""
    hidden = k_pos > q_pos[:, None]
    if variant.window:
        hidden |= (k_pos <= q_pos[:, None] - variant.window) & (k_pos >= variant.n_first)
    return hidden


def paths_of(one: Implementation, device_type: str) -> Iterator[Path]:
    """The paths of one implementation of Quire: tiles of rows, split keys, low-precision keys."""

    def path(name: str, tile: str, run: Callable[..., torch.Tensor] = _run, least: int = 1, **options: Any) -> Path:
        kind = ROUNDED if "low" in options else OURS
        return Path(name, kind, tile, functools.partial(run, one, **options), least)

    fastest = LOW_KEYS[device_type][0]
    if one.name == "hopper-e4m3":  # takes no others
        name = f"{one.name}, {type_word(fastest)} keys"
        yield path(name, "all rows", low=fastest)
        yield path(f"{name}, last row alone", "split keys", _run_last, low=fastest)
        return
    yield path(one.name, "all rows")
    if one.name != "reference":
        for n in SPAN_ROWS:
            yield path(one.name, f"{n} row{'s' * (n > 1)}", least=n, n_rows=n)
        for n in PIECES:
            yield path(one.name, f"{n} pieces", _run_pieces, n * PAGE, n_pieces=n)
        if device_type == "cuda":
            yield path(f"{one.name}, last row alone", "split keys", _run_last)
            yield path(f"{one.name}, batch invariant", "all rows", batch_invariant=True)
    for low in LOW_KEYS[device_type]:
        yield path(f"{one.name}, {type_word(low)} keys", "all rows", low=low)


def type_word(dtype: torch.dtype) -> str:
    """Its name."""
    return str(dtype).removeprefix("torch.")


def _run(
    one: Implementation, sample: Sample, n_rows: int = 0, low: torch.dtype | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """n_rows: of a span, 0 for all; low: type of the keys and values in their pages."""
    pages = _Pages(sample, low or sample.k.dtype)
    ends = np.arange(n_rows or pages.n, pages.n + (n_rows or 1), n_rows or pages.n).clip(max=pages.n)
    return pages.run(one, sample.q, ends, batch_invariant=batch_invariant)[0]


def _run_last(one: Implementation, sample: Sample, low: torch.dtype | None = None) -> torch.Tensor:
    """The last row as a step of its own: its keys are spread over the whole chip."""
    pages = _Pages(sample, low or sample.k.dtype)
    return pages.run(one, sample.q[-1:].contiguous(), np.array([pages.n]))[0]


def _run_pieces(one: Implementation, sample: Sample, n_pieces: int) -> torch.Tensor:
    """Each piece of the keys by itself, all rows, then `attention.merge`."""
    pages = _Pages(sample, sample.k.dtype)
    every = np.arange(-(-pages.n // PAGE))
    ends = np.array([pages.n])
    states = [pages.run(one, sample.q, ends, part) for part in np.array_split(every, n_pieces)]
    return attention.merge([out for out, _ in states], [lse for _, lse in states])[0]


class _Pages:
    """The keys and values of a sample in pages of a random order."""

    def __init__(self, sample: Sample, kv_dtype: torch.dtype) -> None:
        self.n, self._sample = len(sample.k), sample
        n_pages = -(-self.n // PAGE)
        order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(0))
        self._table = order.int()[None].to(sample.q.device)
        self._k, self._v = (self._pool(x, order.to(x.device), kv_dtype) for x in (sample.k, sample.v))

    @staticmethod
    def _pool(x: torch.Tensor, order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n_pages, n_kv_heads, PAGE, entry]. What no token owns is 0, which no kernel may read into a result."""
        entries = entry.encode(x, dtype)
        n, n_heads, size = entries.shape
        pool = torch.zeros(len(order), n_heads, PAGE, size, dtype=dtype, device=x.device)
        at = torch.arange(n, device=x.device)
        entry.movable(pool)[order[at // PAGE], :, at % PAGE] = entry.movable(entries)
        return pool

    def run(
        self, one: Implementation, q: torch.Tensor, ends: np.ndarray, blocks: np.ndarray | None = None,
        batch_invariant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Spans that end at these positions, over all pages or `blocks` of them: outputs, logarithms of the sums.

        Raises NotTaken when the implementation does not take this.
        """
        plan = self._plan(len(q), ends, blocks, batch_invariant)
        variant, dtype = self._sample.variant, q.dtype
        reason = one.obstacle(dtype, plan, variant, dtype, self._k.dtype)
        if reason is not None:
            raise NotTaken(reason)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        one.load().run(q, self._k, self._v, plan, variant, out, lse)
        return out, lse

    def _plan(self, n_rows: int, ends: np.ndarray, blocks: np.ndarray | None, batch_invariant: bool) -> AttnPlan:
        sample = self._sample
        listed = None if blocks is None else (np.array([0, len(blocks)]), blocks)
        return attention.plan(
            np.concatenate(([0], ends - (self.n - n_rows))), ends, np.zeros(len(ends), np.int32), self._table,
            page_size=PAGE, n_q_heads=sample.q.shape[1], n_kv_heads=sample.k.shape[1], head_dim=sample.q.shape[2],
            variant=sample.variant, blocks=listed, batch_invariant=batch_invariant,
        )  # fmt: skip
