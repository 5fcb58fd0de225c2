"""Random attention cases over poisoned memory, random variants, and the float64 answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.attention import op, reference
from quire.kernels.attention.schedule.plan import AttnPlan, AttnSpans, Heads, Layout, SharedPrefix
from quire.kernels.attention.variant import COORDINATES, Params, Site, Variant, variants
from quire.kernels.attention.variant import expression as ex
from quire.kernels.attention.variant.expression import Expr, Operand, as_float, tanh, where
from quire.kernels.kvstore import entry

NAN = float("nan")


@dataclasses.dataclass
class PagedCase:
    """Spans (kv_len, length) of one batch in any layout. Memory that no key owns, and padding rows of q, are NaN.

    q, k, v, page_table: what `run` takes. k and v are float32 values rounded to `kv_dtype` (default: dtype).
    """

    spans: list[tuple[int, int]]
    page_size: int
    n_kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    seed: int = 0
    n_padding: int = 3
    layout: Layout = Layout.PAGED
    kv_dtype: torch.dtype | None = None
    """torch.float8_e4m3fn for fp8 pages, torch.int8 for entries with a scale."""
    strided: bool = False
    """k and v are views of one token-major tensor (NHD), q of a fused projection."""
    sequences: list[int] | None = None
    """Sequence (slot) of each span; spans of one sequence share all pages. Default: each its own. Not RAGGED."""
    shared: list[SharedPrefix] = dataclasses.field(default_factory=list)
    """Sequences (here: spans with a sequence of their own) whose first pages are the same pages."""
    density: float = 0.5
    """SPARSE: how likely a page is listed."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.q_indptr = np.concatenate(([0], np.cumsum([length for _, length in self.spans]))).astype(np.int32)
        self.kv_lens = np.array([kv_len for kv_len, _ in self.spans], np.int32)
        self.n_q_heads = self.n_kv_heads * self.group
        self.heads = Heads(self.n_q_heads, self.n_kv_heads, self.head_dim)
        k, v = self._ragged(rng) if self.layout is Layout.RAGGED else self._paged(rng)
        if self.layout is Layout.SPARSE:
            self._list_blocks(rng)
        both = torch.stack((k, v), dim=1)
        if self.strided and self.layout is not Layout.RAGGED:
            both = both.transpose(2, 3).contiguous().transpose(2, 3)
        both = entry.encode(both) if self.kv_dtype == torch.int8 else both.to(self.kv_dtype or self.dtype)
        both = both.to(self.device)
        self.k, self.v = (x if self.strided else x.contiguous() for x in both.unbind(1))
        q = self._normal(rng, self.n_rows + self.n_padding, self.n_q_heads * (2 if self.strided else 1))
        q[self.n_rows :] = NAN
        self.q = q.to(self.dtype).to(self.device)[:, -self.n_q_heads :]
        if self.page_table is not None:
            self.page_table = self.page_table.to(self.device)

    @property
    def n_rows(self) -> int:
        """Real rows of q."""
        return int(self.q_indptr[-1])

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def longest(self) -> int:
        return int(self.kv_lens.max(initial=1))

    def per_head(self, rng: np.random.Generator) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(self.n_q_heads, np.float32)).to(self.device)

    def _normal(self, rng: np.random.Generator, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((*shape, self.head_dim), np.float32))

    def _ragged(self, rng: np.random.Generator) -> list[torch.Tensor]:
        self.page_table, self.page_size = None, 1
        self.kv_indptr = np.concatenate(([0], np.cumsum(self.kv_lens))).astype(np.int32)
        self.kv_at = self.kv_indptr[:-1]
        n_keys = int(self.kv_indptr[-1])
        poison = torch.full((5, self.n_kv_heads, self.head_dim), NAN)
        return [torch.cat((self._normal(rng, n_keys, self.n_kv_heads), poison)) for _ in range(2)]

    def _paged(self, rng: np.random.Generator) -> list[torch.Tensor]:
        """Fill `page_table`, `slots`; return the pools. Page 0 is nobody's: unused places of the table name it."""
        sequences = self.sequences or list(range(len(self.spans)))
        n_sequences = max(sequences, default=-1) + 1
        lengths = np.zeros(n_sequences, int)
        np.maximum.at(lengths, sequences, self.kv_lens)
        counts = -(-lengths // self.page_size)
        free = list(rng.permutation(np.arange(1, counts.sum() + 4)))
        rows = rng.permutation(n_sequences + 2)[:n_sequences]
        self.slots = self.kv_at = rows[sequences].astype(np.int32)
        self.page_table = torch.zeros(n_sequences + 2, int(counts.max(initial=0)) + 1, dtype=torch.int32)
        pools = [torch.full((len(free) + 1, self.n_kv_heads, self.page_size, self.head_dim), NAN) for _ in range(2)]
        for sequence in range(n_sequences):
            n_shared, pages = self._shared_pages(sequence, sequences, rows)
            own = [free.pop() for _ in range(counts[sequence] - n_shared)]
            table = torch.tensor([*pages, *own], dtype=torch.int32)
            self.page_table[rows[sequence], : len(table)] = table
            at = torch.arange(n_shared * self.page_size, int(lengths[sequence]))
            for pool in pools:
                fresh = self._normal(rng, len(at), self.n_kv_heads)
                pool[table.long()[at // self.page_size], :, at % self.page_size] = fresh
        return pools

    def _shared_pages(self, sequence: int, sequences: list[int], rows: np.ndarray) -> tuple[int, list[int]]:
        """Pages that the sequence takes from one filled before it."""
        for prefix in self.shared:
            members = [sequences[span] for span in prefix.spans]
            if sequence in members and sequence != min(members):
                n_pages = prefix.n_keys // self.page_size
                return n_pages, self.page_table[rows[min(members)], :n_pages].tolist()
        return 0, []

    def _list_blocks(self, rng: np.random.Generator) -> None:
        lists = []
        for kv_len in self.kv_lens:
            n_pages = -(-int(kv_len) // self.page_size)
            chosen = rng.random(n_pages) < rng.choice([0.0, self.density, self.density, 1.0])
            lists.append(np.flatnonzero(chosen))
        self.block_indptr = np.concatenate(([0], np.cumsum([len(x) for x in lists]))).astype(np.int32)
        self.blocks = np.concatenate([np.zeros(0), *lists]).astype(np.int32)

    def plan(self, variant: Variant | None = None, **options: object) -> AttnPlan:
        """The plan of the public `op.plan` or `op.plan_ragged`, with the device's work list."""
        shape = dataclasses.asdict(self.heads)
        if self.layout is Layout.RAGGED:
            device = self.q.device
            return op.plan_ragged(self.q_indptr, self.kv_indptr, **shape, device=device, variant=variant, **options)
        where_ = (self.q_indptr, self.kv_lens, self.slots, self.page_table)
        if self.layout is Layout.SPARSE:
            options["blocks"] = (self.block_indptr, self.blocks)
        options.setdefault("shared", self.shared)
        return op.plan(*where_, page_size=self.page_size, **shape, variant=variant, **options)

    def bare_plan(self, variant: Variant | None = None, **options: object) -> AttnPlan:
        """The plan without a work list."""
        sparse = (self.block_indptr, self.blocks) if self.layout is Layout.SPARSE else (None, None)
        spans = AttnSpans(self.q_indptr, self.kv_lens, self.kv_at, *sparse)
        if variant is not None:
            options.update(causal=variant.causal, window=variant.window, n_first=variant.n_first)
        options.setdefault("shared", self.shared)
        return AttnPlan(self.layout, self.heads, self.page_size, spans, self.page_table, **options)

    def expected_state(self, variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 out [n_rows, n_q_heads, head_dim] and lse [n_rows, n_q_heads], from the reference."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        lse = torch.zeros(self.q.shape[:2], dtype=torch.float64, device=self.q.device)
        wide = (x.double() if x.is_floating_point() else x for x in (self.q, self.k, self.v))
        reference.run(*wide, self.bare_plan(variant), variant, out, lse)
        return out[: self.n_rows], lse[: self.n_rows]

    def expected(self, variant: Variant) -> torch.Tensor:
        """The output alone."""
        return self.expected_state(variant)[0]


def worst_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities differ by 0; NaN anywhere gives NaN."""
    got, expected = got.double(), expected.double()
    return float(torch.where(got == expected, 0.0, (got - expected).abs()).max()) if expected.numel() else 0.0


def random_case(
    seed: int,
    dtype: torch.dtype,
    head_dims: list[int],
    longest: int,
    *,
    layouts: tuple[Layout, ...] = tuple(Layout),
    page_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128),
    transforms: bool = True,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[PagedCase, Variant]:
    """A mix of empty, decode, chunk and whole-prompt spans with random shapes, and a random variant."""
    rng = np.random.default_rng(seed)
    layout, page_size = Layout(int(rng.choice(layouts))), int(rng.choice(page_sizes))
    spans: list[tuple[int, int]] = []
    for _ in range(int(rng.integers(1, 6))):
        kv_len = int(rng.integers(1, longest + 1))
        spans.append((kv_len, int(rng.choice([0, 1, 1, min(kv_len, 7), min(kv_len, 100), kv_len]))))
    sequences, shared = list(range(len(spans))), []
    if layout is Layout.SPARSE:  # one more sequence, in blocks of rows with a list each
        n, first = int(rng.integers(1, 5)), int(rng.integers(1, longest // 2 + 2))
        spans += [(first + 16 * i + 15, 16) for i in range(n)]
        sequences += [len(sequences)] * n
    elif layout is Layout.PAGED and rng.random() < 0.5:
        members = np.flatnonzero(rng.random(len(spans)) < 0.8).tolist()
        n_keys = min((spans[i][0] - spans[i][1] for i in members), default=0) // page_size * page_size
        shared = [SharedPrefix(members, n_keys)] if len(members) > 1 and n_keys else []
    n_kv_heads, group, head_dim = int(rng.choice([1, 2, 3])), int(rng.integers(1, 9)), int(rng.choice(head_dims))
    memory = {"kv_dtype": kv_dtype, "strided": bool(rng.random() < 0.5), "device": device}
    ties = {} if layout is Layout.RAGGED else {"sequences": sequences, "shared": shared}
    case = PagedCase(spans, page_size, n_kv_heads, group, head_dim, dtype, seed=seed, layout=layout, **memory, **ties)
    return case, random_variant(rng, case, transforms)


def _masked(rng: np.random.Generator, case: PagedCase) -> Variant:
    mask = torch.from_numpy(rng.random((case.n_rows, case.longest)) < 0.4)
    mask[::5] = False  # rows that see nothing
    return variants.custom_mask(case.scale, mask.to(case.device))


def _tree(rng: np.random.Generator, case: PagedCase) -> Variant:
    ancestors = torch.from_numpy(rng.random((case.n_rows, 9)) < 0.5)
    starts = np.repeat(case.kv_lens - np.diff(case.q_indptr), np.diff(case.q_indptr)).astype(np.int32)
    return variants.tree_mask(case.scale, ancestors.to(case.device), torch.from_numpy(starts).to(case.device))


def _rotary(rng: np.random.Generator, case: PagedCase) -> Variant:
    dim = case.head_dim
    angles = torch.outer(torch.arange(case.longest).double(), 1e4 ** -(torch.arange(dim // 2).double() * 2 / dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    return variants.rotary(case.scale, cos_sin.to(case.device))


def _own(rng: np.random.Generator, case: PagedCase) -> Variant:
    """A variant that nobody ships: bent logits, a dilated mask, a gated output."""

    def bent(logits: Expr, site: Site, p: Params) -> Operand:
        distance = ex.absolute(as_float(site.q_pos - site.k_pos))
        return tanh(logits) * p.gain[site.q_head] - ex.minimum(distance * p.fall, 3.0) + where(site.kv_head < 1, 0.5, 0)

    def dilated(site: Site, p: Params) -> Operand:
        return (site.k_pos % p.every == site.q_pos % p.every) | ~(site.q_pos - site.k_pos >= 8)

    def gated(o: Expr, site: Site, p: Params) -> Operand:
        lse = where(site.lse < -1e9, 2.0, site.lse * 0.1)
        return o * ex.sigmoid(p.gain[site.kv_head] + ex.exp(-lse) + as_float(site.dim) / p.softness) + site.q_row / 1e4

    numbers = {"fall": 0.07, "every": int(rng.integers(1, 5)), "softness": float(case.head_dim)}
    params = {"gain": case.per_head(rng).sigmoid(), **numbers}
    return Variant(case.scale, logits_transform=bent, logits_mask=dilated, output_transform=gated, params=params)


def _own_transforms(rng: np.random.Generator, case: PagedCase) -> Variant:
    """Elementwise changes of queries, keys and values."""
    gate = torch.from_numpy(rng.random((case.n_kv_heads, case.head_dim), np.float32)).to(case.device)
    return Variant(
        case.scale,
        query_transform=lambda x, site, p: x * p.gate[site.kv_head * p.size + site.dim] + site.q_row % 3 * 0.1,
        key_transform=lambda x, site, p: x + tanh(x) * p.gate[site.kv_head * p.size + site.dim],
        value_transform=lambda x, site, p: where(site.k_pos % 7 < 3, x, -x) + as_float(site.dim) / p.size,
        params={"gate": gate, "size": case.head_dim},
    )


VARIANTS: dict[str, Callable[[np.random.Generator, PagedCase], Variant]] = {
    "causal": lambda rng, case: variants.causal(case.scale),
    "window": lambda rng, case: variants.causal(case.scale, int(rng.choice([1, 5, 64, 100])), int(rng.integers(9))),
    "full": lambda rng, case: Variant(case.scale, causal=False),
    "soft_cap": lambda rng, case: variants.soft_cap(case.scale, float(rng.integers(2, 30)), int(rng.choice([0, 70]))),
    "alibi": lambda rng, case: variants.alibi(case.scale, case.per_head(rng).sigmoid()),
    "learned_sinks": lambda rng, case: variants.learned_sinks(case.scale, case.per_head(rng), int(rng.choice([0, 20]))),
    "sigmoid": lambda rng, case: variants.sigmoid_attention(case.scale, -math.log(case.longest)),
    "custom_mask": _masked,
    "tree_mask": _tree,
    "own": _own,
    "power_law": lambda rng, case: Variant(  # NaN for keys above the row
        case.scale,
        logits_transform=lambda x, site, p: x - p.rate * ex.log(as_float(site.q_pos - site.k_pos + 1)),
        params={"rate": 0.3},
    ),
    "rotary": _rotary,
    "own_transforms": _own_transforms,
}
WITH_TRANSFORMS = ("rotary", "own_transforms")


def random_variant(rng: np.random.Generator, case: PagedCase, transforms: bool = True) -> Variant:
    """One of `VARIANTS`, or two of them combined, and at times a window with first positions."""
    names = [name for name in VARIANTS if transforms or name not in WITH_TRANSFORMS]
    if case.head_dim % 2 and transforms:
        names.remove("rotary")
    variant = VARIANTS[rng.choice(names)](rng, case)
    if variant.softmax and rng.random() < 0.4:
        others = [name for name in names if name not in ("sigmoid", "power_law")]
        variant = combined(variant, VARIANTS[rng.choice(others)](rng, case))
    if not variant.window and rng.random() < 0.2:
        return dataclasses.replace(variant, window=int(rng.choice([3, 50])), n_first=int(rng.integers(0, 5)))
    return variant


def combined(first: Variant, second: Variant) -> Variant:
    """The hooks of both; where both have one, and for parameters of one name, those of the first."""
    hooks = {name: getattr(first, name) or getattr(second, name) for name in COORDINATES}
    return dataclasses.replace(first, **hooks, params={**second.params, **first.params})
