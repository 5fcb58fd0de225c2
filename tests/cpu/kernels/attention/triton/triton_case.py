"""Random attention cases for the Triton kernels: storage full of poison, lines of work cut at random, float64 answers.

The formulas here are written by hand, apart from quire's own expressions and reference.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.attention.schedule.plan import AttnPlan, AttnSpans, Heads, Layout
from quire.kernels.attention.variant import Variant, variants
from quire.kernels.attention.variant.expression import as_float, rotate_half
from quire.kernels.kvstore import entry

NAN = float("nan")
SMALL_ROWS = 16


@dataclasses.dataclass
class Case:
    """Spans (kv_len, length) over keys in one layout. Cells that no token owns, and padding rows, are NaN."""

    spans: list[tuple[int, int]]
    layout: Layout = Layout.PAGED
    page_size: int = 16
    n_kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    scales: entry.Scales = entry.UNIT
    """Of e4m3."""
    n_shared: int = 0
    """Keys of a common prefix of all spans, in the same pages, computed by gathered lines."""
    n_pieces: int = 3
    """Most parts that the keys of a line are cut into."""
    seed: int = 0
    tokens_first: bool = False
    """Pages are stored [n_pages, page_size, 2, n_kv_heads, head_dim]: keys beside values, other strides."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.kv_dtype = self.kv_dtype or self.dtype
        self.page_size = 1 if self.layout is Layout.RAGGED else self.page_size
        lengths = [length for _, length in self.spans]
        self.q_indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        self.kv_lens = np.array([kv_len for kv_len, _ in self.spans], np.int32)
        self.n_q_heads = self.n_kv_heads * self.group
        fused = self._normal(int(self.q_indptr[-1]) + 3, self.n_q_heads + 1).to(self.dtype)
        self.q = fused[:, 1:]
        self.q[self.q_indptr[-1] :] = NAN
        self.keys = [self._normal(kv_len, self.n_kv_heads).to(self.kv_dtype) for kv_len in self.kv_lens]
        self.values = [self._normal(kv_len, self.n_kv_heads).to(self.kv_dtype) for kv_len in self.kv_lens]
        for key, value in zip(self.keys[1:], self.values[1:], strict=True):
            key[: self.n_shared], value[: self.n_shared] = (
                self.keys[0][: self.n_shared],
                self.values[0][: self.n_shared],
            )
        self._ragged() if self.layout is Layout.RAGGED else self._paged()
        self._lists()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((*shape, self.head_dim), np.float32))

    def _ragged(self) -> None:
        n_keys = int(self.kv_lens.sum()) + 7
        self.kv_at = (np.cumsum(self.kv_lens) - self.kv_lens + 4).astype(np.int32)
        self.page_table = None
        self.k, self.v = (torch.full((n_keys, self.n_kv_heads, self.head_dim), NAN).to(self.kv_dtype) for _ in "kv")
        for at, key, value in zip(self.kv_at, self.keys, self.values, strict=True):
            self.k[at : at + len(key)], self.v[at : at + len(key)] = key, value

    def _paged(self) -> None:
        counts = -(-self.kv_lens // self.page_size)
        n_pages, n_slots = int(counts.sum()) + 3, len(self.spans) + 2
        free = self.rng.permutation(np.arange(1, n_pages))
        self.kv_at = self.rng.permutation(n_slots)[: len(self.spans)].astype(np.int32)
        self.page_table = torch.full((n_slots, int(counts.max(initial=0)) + 1), -(1 << 24), dtype=torch.int32)
        shape = (n_pages, self.page_size, 2, self.n_kv_heads, self.head_dim)
        if self.tokens_first:
            pools = torch.full(shape, NAN).to(self.kv_dtype)
            self.k, self.v = (pools[:, :, i].transpose(1, 2) for i in range(2))
        else:
            pools = torch.full([shape[i] for i in (2, 0, 3, 1, 4)], NAN).to(self.kv_dtype)
            self.k, self.v = pools
        for slot, count, end, key, value in zip(
            self.kv_at, counts, np.cumsum(counts), self.keys, self.values, strict=True
        ):
            pages = free[end - count : end].astype(np.int32)
            n_same = self.n_shared // self.page_size
            pages[:n_same] = free[:n_same]
            self.page_table[slot, :count] = torch.from_numpy(pages)
            at = torch.arange(len(key))
            where = torch.from_numpy(pages).long()[at // self.page_size], slice(None), at % self.page_size
            raw = (lambda x: x.view(torch.uint8)) if self.kv_dtype.itemsize == 1 else (lambda x: x)
            raw(self.k)[where], raw(self.v)[where] = raw(key), raw(value)

    def _lists(self) -> None:
        """positions: those of each span's keys. SPARSE: of random pages."""
        self.positions = [np.arange(kv_len) for kv_len in self.kv_lens]
        self.blocks, self.block_indptr = np.zeros(1, np.int32), np.zeros(len(self.spans), np.int32)
        if self.layout is Layout.SPARSE:
            listed = [np.flatnonzero(self.rng.random(-(-n // self.page_size)) < 0.6) for n in self.kv_lens]
            self.blocks = np.concatenate([*listed, [0]]).astype(np.int32)
            self.block_indptr = np.concatenate(([0], np.cumsum([len(x) for x in listed]))).astype(np.int32)
            self.positions = [
                at[np.isin(at // self.page_size, pages)] for at, pages in zip(self.positions, listed, strict=True)
            ]

    def to(self, device: str) -> Case:
        """Move the storage, in place."""
        self.q, self.k, self.v = (x.to(device) for x in (self.q, self.k, self.v))
        self.page_table = None if self.page_table is None else self.page_table.to(device)
        return self

    def plan(self) -> AttnPlan:
        """With lines cut at random."""
        sparse = self.layout is Layout.SPARSE
        spans = AttnSpans(
            self.q_indptr,
            self.kv_lens,
            self.kv_at,
            self.block_indptr if sparse else None,
            self.blocks[:-1] if sparse else None,
        )
        heads = Heads(self.n_q_heads, self.n_kv_heads, self.head_dim)
        work = Lines(self).work()
        return AttnPlan(self.layout, heads, self.page_size, spans, self.page_table, work=work)


class Lines:
    """Cuts a case at random: small and large lines, each in up to `n_pieces` ranges of keys, and their merges."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, case.rng
        self.small: list[list[int]] = []
        self.large: list[list[int]] = []
        self.rows: list[tuple[int, int]] = [(0, 0)]
        self.parts: dict[tuple[int, int], list[int]] = {}
        """(row, KV head) → where its partial results are."""
        self.n_partial = 0
        for span, (start, stop, kv_len) in enumerate(zip(case.q_indptr, case.q_indptr[1:], case.kv_lens, strict=False)):
            self._span(span, int(start), int(stop), int(kv_len))
        if case.n_shared:
            self._prefix()

    def _span(self, span: int, start: int, stop: int, kv_len: int) -> None:
        case = self.case
        is_small = (stop - start) * case.group <= SMALL_ROWS
        n_tokens = max(1, (SMALL_ROWS if is_small else 128) // case.group)
        for row in range(start, stop, n_tokens):
            tokens = [(i, kv_len - stop + i) for i in range(row, min(row + n_tokens, stop))]
            self._lines(tokens, span, is_small, case.n_shared, len(case.positions[span]), gathered=False)

    def _prefix(self) -> None:
        """The common prefix: rows of all spans gathered, some in small and some in large lines."""
        case = self.case
        every = [
            (int(row), int(kv_len - stop + row))
            for start, stop, kv_len in zip(case.q_indptr, case.q_indptr[1:], case.kv_lens, strict=False)
            for row in range(start, stop)
        ]
        some = SMALL_ROWS // case.group
        for chunk, is_small in ((every[:some], True), (every[some:][: 128 // case.group], False)):
            if chunk:
                self._lines(chunk, 0, is_small, 0, case.n_shared, gathered=True)
        assert len(every) <= some + 128 // case.group

    def _lines(
        self, tokens: list[tuple[int, int]], span: int, is_small: bool, begin: int, end: int, gathered: bool
    ) -> None:
        case = self.case
        n_cuts = int(self.rng.integers(0, case.n_pieces)) if end - begin > 1 else 0
        cuts = sorted(self.rng.integers(begin, end + 1, n_cuts).tolist())
        table = 0 if case.page_table is None else case.page_table.shape[1]
        at = int(case.kv_at[span]) * (table if table else 1)
        first = len(self.rows) if gathered else tokens[0][0]
        self.rows += tokens if gathered else []
        n_packed = len(tokens) * case.group
        for low, high in zip([begin, *cuts], [*cuts, end], strict=True):
            for head in range(case.n_kv_heads) if is_small else [0]:
                partial = self.n_partial if cuts or case.n_shared else -1
                where = [low, high, at, int(case.block_indptr[span]), partial, head, int(gathered), 0, 0]
                (self.small if is_small else self.large).append([first, len(tokens), tokens[0][1], *where])
                for one in [head] if is_small else range(case.n_kv_heads) if partial >= 0 else []:
                    for i, (row, _) in enumerate(tokens if partial >= 0 else []):
                        place = partial + (0 if is_small else one * n_packed) + i * case.group
                        self.parts.setdefault((row, one), []).append(place)
                self.n_partial += n_packed * (1 if is_small else case.n_kv_heads) if partial >= 0 else 0

    def work(self) -> types.SimpleNamespace:
        """As work.CudaWork."""
        device = self.case.q.device
        n_ctas = 5
        self.small = [self.small[i] for i in self.rng.permutation(len(self.small))]
        self.small.insert(len(self.small) // 2, [0] * 12)
        bounds = np.sort(self.rng.integers(0, len(self.small) + 1, n_ctas - 1))
        queue = [0, *bounds.tolist(), len(self.small)]
        merges, parts = [[0] * 4], []
        for (row, head), places in self.parts.items():
            merges.append([row, head, len(parts), len(places)])
            parts += places

        def upload(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return types.SimpleNamespace(
            small=upload(self.small),
            large=upload([*self.large, [0] * 12]),
            queue=upload(queue),
            rows=upload(self.rows),
            merges=upload(merges),
            parts=upload([*parts, 0]),
            blocks=torch.from_numpy(self.case.blocks).to(device),
            partial_out=torch.full((self.n_partial + 1, self.case.head_dim), NAN, device=device),
            partial_lse=torch.full((self.n_partial + 1,), NAN, device=device),
            ticket=upload([0]),
            n_ctas=n_ctas,
            n_small=len(self.small),
            n_large=len(self.large) + 1,
            n_merges=len(merges),
            small_rows=SMALL_ROWS,
            n_tokens_large=128 // self.case.group,
        )


@dataclasses.dataclass
class Formula:
    """A variant by hand. Functions get float64 tensors that broadcast over [rows, query heads, keys]."""

    visible: Callable[..., torch.Tensor] = lambda row, i, j, h: j <= i
    logits: Callable[..., torch.Tensor] = lambda s, row, i, j, h: s
    query: Callable[..., torch.Tensor] = lambda x, at: x
    key: Callable[..., torch.Tensor] = lambda x, at: x
    value: Callable[..., torch.Tensor] = lambda x, at: x
    output: Callable[..., torch.Tensor] = lambda o, i, h, lse: o
    softmax: bool = True


def expected(case: Case, scale: float, formula: Formula) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [n_rows, n_q_heads, head_dim], and the natural logarithm of the sum of weights."""
    outs, lses = [], []
    h = torch.arange(case.n_q_heads)[None, :, None]
    for span, (start, stop) in enumerate(zip(case.q_indptr, case.q_indptr[1:], strict=False)):
        j = torch.from_numpy(case.positions[span])
        row = torch.arange(start, stop)
        i = int(case.kv_lens[span]) - int(stop) + row
        q = formula.query(case.q[start:stop].cpu().double(), i[:, None, None])
        keys, values = case.keys[span].double()[j] * case.scales.k, case.values[span].double()[j] * case.scales.v
        k = formula.key(keys, j[:, None, None]).repeat_interleave(case.group, 1)
        v = formula.value(values, j[:, None, None]).repeat_interleave(case.group, 1)
        row, i, j = row[:, None, None], i[:, None, None], j[None, None, :]
        s = formula.logits(torch.einsum("nhd,khd->nhk", q, k) * scale, row, i, j, h)
        seen = formula.visible(row, i, j, h).expand(s.shape)
        if formula.softmax:
            lse = s.masked_fill(~seen, float("-inf")).logsumexp(-1)
            weights = torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None]) * seen
        else:
            weights = s * seen
            lse = weights.sum(-1).log()
        o = torch.einsum("nhk,khd->nhd", weights, v)
        outs.append(formula.output(o, i, h, lse[..., None]))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = at * 100.0 ** -(torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def _window(w: int, n_first: int = 0) -> Callable[..., torch.Tensor]:
    return lambda row, i, j, h: (j <= i) & ((j > i - w) | (j < n_first))


def _tree(case: Case) -> tuple[Variant, Formula]:
    """The last rows of each span are drafts; parents at random."""
    n, width = int(case.q_indptr[-1]), max(1, int(np.diff(case.q_indptr).max()))
    ancestors, starts = torch.zeros(n, width, dtype=torch.bool), torch.zeros(n, dtype=torch.int32)
    for start, stop, kv_len in zip(case.q_indptr, case.q_indptr[1:], case.kv_lens, strict=False):
        starts[start:stop] = int(kv_len - (stop - start))
        for i in range(stop - start):
            if i:
                ancestors[start + i] = ancestors[start + int(case.rng.integers(0, i))]
            ancestors[start + i, i] = True

    def visible(row: torch.Tensor, i: torch.Tensor, j: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        draft = j - starts[row].long()
        return (j <= i) & ((draft < 0) | ancestors[row, draft.clamp(0, width - 1)])

    return variants.tree_mask(0.2, ancestors.to(case.q.device), starts.to(case.q.device)), Formula(visible)


def _masked(case: Case) -> tuple[Variant, Formula]:
    mask = torch.from_numpy(case.rng.random((int(case.q_indptr[-1]), int(case.kv_lens.max()))) < 0.3)
    return variants.custom_mask(0.2, mask.to(case.q.device)), Formula(lambda row, i, j, h: mask[row, j])


def _rotary(case: Case) -> tuple[Variant, Formula]:
    half = case.head_dim // 2
    angles = torch.arange(int(case.kv_lens.max()))[:, None] * 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    table = torch.cat((angles.cos(), angles.sin()), 1).float().to(case.q.device)
    return variants.rotary(0.2, table, 40, 5), Formula(_window(40, 5), query=_rotated, key=_rotated)


def _everything(case: Case) -> tuple[Variant, Formula]:
    """All transforms at once, integer and float scalars, a constant where a function of x is usual."""
    gains = torch.from_numpy(case.rng.random(case.n_kv_heads, np.float32)) + 0.5
    variant = Variant(
        -0.2,
        query_transform=lambda x, site, p: x * p.gain + 0.25 * rotate_half(x),
        value_transform=lambda x, site, p: x * p.gains[site.kv_head] + as_float(site.k_pos % p.step) - rotate_half(x),
        output_transform=lambda o, site, p: p.gain * o + as_float(site.dim // p.step),
        logits_mask=lambda site, p: ~(site.k_pos % p.step == site.q_head % 3),
        params={"gain": 1.5, "step": 3, "gains": gains.to(case.q.device)},
    )

    def turned(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    formula = Formula(
        lambda row, i, j, h: (j <= i) & (j % 3 != h % 3),
        query=lambda x, at: 1.5 * x + 0.25 * turned(x),
        value=lambda x, at: x * gains.double()[:, None] + at % 3 - turned(x),
        output=lambda o, i, h, lse: 1.5 * o + torch.arange(case.head_dim) // 3,
    )
    return variant, formula


def _alibi(case: Case) -> tuple[Variant, Formula]:
    slopes = 2.0 ** -torch.arange(1, case.n_q_heads + 1)
    return variants.alibi(0.2, slopes.to(case.q.device)), Formula(
        logits=lambda s, row, i, j, h: s + slopes.double()[h] * (j - i)
    )


def _sinks(case: Case) -> tuple[Variant, Formula]:
    sinks = torch.from_numpy(case.rng.standard_normal(case.n_q_heads).astype(np.float32))
    return variants.learned_sinks(0.2, sinks.to(case.q.device), 30), Formula(
        _window(30), output=lambda o, i, h, lse: o / (1 + torch.exp(sinks.double()[h] - lse))
    )


VARIANTS: dict[str, Callable[[Case], tuple[Variant, Formula]]] = {
    "causal": lambda case: (variants.causal(0.2), Formula()),
    "window": lambda case: (variants.causal(0.2, 37), Formula(_window(37))),
    "window of one": lambda case: (variants.causal(0.2, 1), Formula(_window(1))),
    "first and window": lambda case: (variants.causal(0.2, 50, 6), Formula(_window(50, 6))),
    "many first": lambda case: (variants.causal(0.2, 20, 140), Formula(_window(20, 140))),
    "full": lambda case: (Variant(0.2, causal=False), Formula(lambda row, i, j, h: j >= 0)),
    "full window": lambda case: (
        Variant(0.2, causal=False, window=30, n_first=2),
        Formula(lambda row, i, j, h: (j > i - 30) | (j < 2)),
    ),
    "soft cap": lambda case: (
        variants.soft_cap(0.4, 5.0),
        Formula(logits=lambda s, row, i, j, h: 5.0 * torch.tanh(s / 5.0)),
    ),
    "alibi": _alibi,
    "sinks": _sinks,
    "sigmoid": lambda case: (
        variants.sigmoid_attention(0.2, -3.0),
        Formula(logits=lambda s, row, i, j, h: torch.sigmoid(s - 3.0), softmax=False),
    ),
    "mask": _masked,
    "tree": _tree,
    "rotary": _rotary,
    "everything": _everything,
}
"""Name → the variant, and the same by hand."""
