"""The operators of a step: bytes, FLOPs and kind of each, for some spans on one rank of a mesh.

Owns the work. Does not own time (`timing`) nor what goes over wires (`communication`). Derived from `ModelArch` alone.
Sources: Williams et al. 2009 ("Roofline") for intensity; Pope et al. 2022 (arXiv 2211.05102) for partitioned decoders.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.core.plan import Spans
from quire.planner.calibration import Ceilings
from quire.planner.communication import step_transfers
from quire.planner.formats import Formats
from quire.planner.mesh import own_rows
from quire.planner.parts import AttentionGroup, Product, RankParts, rank_parts

STATE_FLOPS = 6
"""Operations of a token and a number of a state: decay, outer product, sum, and reading it out (Dao and Gu 2024)."""


@enum.unique
class Kind(enum.Enum):
    """What an operator's efficiency is looked up by."""

    GATHER = "gather"
    PRODUCT = "product"
    EXPERTS = "experts"
    ATTENTION = "attention"
    STATE = "state"
    ROWS = "rows"
    COLLECTIVE = "collective"


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one kind in a step."""

    name: str
    kind: Kind
    n_times: int
    weight_bytes: float = 0.0
    """Read, of one call; the same of the next four."""
    cache_bytes: float = 0.0
    """Keys, values and states, read and written."""
    row_bytes: float = 0.0
    """Activations read and written."""
    wire_bytes: float = 0.0
    """Sent by one rank."""
    n_flops: float = 0.0
    products: str = "bfloat16"
    """Type of its arithmetic."""

    def limit_s(self, ceilings: Ceilings) -> float:
        """Of all calls at best: the roofline, the longer of memory and arithmetic. What goes over wires is left out."""
        return self.n_times * max(self.n_bytes / ceilings.read_bytes_per_s, self.n_flops / ceilings.rate(self.products))

    @property
    def n_bytes(self) -> float:
        """Memory traffic of one call."""
        return self.weight_bytes + self.cache_bytes + self.row_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte of memory traffic."""
        return self.n_flops / self.n_bytes if self.n_bytes else 0.0


class Seen(msgspec.Struct, frozen=True):
    """What the rows of a step see in a layer."""

    n_read: float
    """Tokens whose keys are read, once a span."""
    n_pairs: float
    """Of a row and a token that it sees."""


def seen(starts: Sequence[int], lengths: Sequence[int], window: int) -> Seen:
    """Of one layer; window 0: rows see all before them."""
    if not window:
        n_tokens = sum(lengths)
        if n_tokens == len(lengths):  # decodes alone
            n_read = sum(starts) + n_tokens
            return Seen(n_read, n_read)
        pairs = sum(n * (start + (n + 1) / 2) for start, n in zip(starts, lengths, strict=True))
        return Seen(sum(starts) + n_tokens, pairs)
    n_read, n_pairs = 0, 0.0
    for start, n in zip(starts, lengths, strict=True):
        n_whole = min(max(window - start, 0), n)  # rows that see everything before them
        n_read += min(start + n, window + n - 1)
        n_pairs += n_whole * (start + (n_whole + 1) / 2) + (n - n_whole) * window
    return Seen(n_read, n_pairs)


def step_operators(
    arch: ModelArch,
    spans: Spans,
    mesh: Mesh | None = None,
    formats: Formats | None = None,
    n_spared: int = 0,
    parts: RankParts | None = None,
) -> list[Operator]:
    """In the order of a layer, the head last; of the first rank of each stage, all stages together.

    n_spared: tokens whose keys need not be read, as another span of the step reads them, in layers without a window.
    parts: those of the mesh, where they are known.
    """
    mesh, formats = mesh or Mesh(), formats or Formats()
    parts = parts or rank_parts(arch, mesh, formats)
    n_all, n_wants = sum(spans.lengths), sum(spans.wants)
    n_rows = own_rows(mesh, n_all)
    width = arch.hidden_size * formats.itemsize
    found = [
        Operator(name="embedding", kind=Kind.GATHER, n_times=1, row_bytes=2 * n_rows * width),
        Operator(name="norms", kind=Kind.ROWS, n_times=parts.n_norms, row_bytes=2 * n_rows * width,
                 n_flops=4 * n_rows * arch.hidden_size),
    ]  # fmt: skip
    found += [product_operator(one, n_rows, formats) for one in parts.products]
    for group in parts.attentions:
        found += attention_operators(group, spans, n_rows, formats, 0 if group.window else n_spared)
    n_moved = 2 * len(spans) - spans.starts.count(0)  # read and written; the first is of zeros
    for state in parts.states:
        found.append(Operator(
            name="state update", kind=Kind.STATE, n_times=state.n_times, cache_bytes=n_moved * state.n_bytes,
            n_flops=STATE_FLOPS * n_rows * state.n_numbers,
        ))  # fmt: skip
    found += [
        Operator(name=one.name, kind=Kind.COLLECTIVE, n_times=one.n_times, wire_bytes=one.n_bytes)
        for one in step_transfers(parts, mesh, n_all, n_wants, formats.itemsize, held_bytes(parts, spans, formats))
    ]
    if n_wants:
        found.append(product_operator(parts.head, n_wants, formats))
    return found


def held_bytes(parts: RankParts, spans: Spans, formats: Formats) -> dict[AttentionGroup, float]:
    """Of keys and values that the spans see in a layer, of those that a rank has."""
    found = {}
    for group in parts.attentions:
        token_bytes = group.token_numbers * formats.kv_itemsize(group.head_dim)
        found[group] = seen(spans.starts, spans.lengths, group.window).n_read * token_bytes
    return found


def product_operator(product: Product, n_rows: float, formats: Formats) -> Operator:
    """With rows read and written once."""
    row_numbers = (product.n_in + product.n_out) * product.products_of_row
    return Operator(
        name=product.name, kind=Kind.EXPERTS if product.is_experts else Kind.PRODUCT, n_times=product.n_times,
        weight_bytes=product.read_bytes(n_rows), row_bytes=row_numbers * n_rows * formats.itemsize,
        n_flops=product.flops(n_rows), products=product.products,
    )  # fmt: skip


def attention_operators(
    group: AttentionGroup, spans: Spans, n_rows: float, formats: Formats, n_spared: int = 0
) -> list[Operator]:
    """Rotation with the write of keys and values, then scores and values of them in one kernel."""
    found = seen(spans.starts, spans.lengths, group.window)
    token_bytes = group.token_numbers * formats.kv_itemsize(group.head_dim)
    row_bytes = 2 * group.q_numbers * n_rows * formats.itemsize
    return [
        Operator(name="rotate and store", kind=Kind.ROWS, n_times=group.n_times, cache_bytes=n_rows * token_bytes,
                 row_bytes=row_bytes + group.token_numbers * n_rows * formats.itemsize,
                 n_flops=3 * n_rows * group.q_numbers),
        Operator(name=f"attention{f' ({group.window})' if group.window else ''}", kind=Kind.ATTENTION,
                 n_times=group.n_times, cache_bytes=(found.n_read - n_spared) * token_bytes, row_bytes=row_bytes,
                 n_flops=group.flops(spans.starts, spans.lengths, found.n_pairs)),
    ]  # fmt: skip


def limit_s(operators: Sequence[Operator], ceilings: Ceilings) -> float:
    """Of a step at best: its operators one after the other, without launches, gaps and imbalance."""
    return sum(one.limit_s(ceilings) for one in operators)


def totals(operators: Sequence[Operator]) -> tuple[float, float, float]:
    """(bytes, FLOPs, bytes over wires) of a step."""
    return (
        sum(one.n_times * one.n_bytes for one in operators),
        sum(one.n_times * one.n_flops for one in operators),
        sum(one.n_times * one.wire_bytes for one in operators),
    )


def prefill_spans(n_tokens: int, start: int = 0, n_seqs: int = 1) -> Spans:
    """A step of whole prompts, or of chunks that begin at `start`."""
    return _equal(n_seqs, start, n_tokens)


def decode_spans(n_seqs: int, context: int) -> Spans:
    """A step in which each sequence has one token, which sees `context` tokens, itself included."""
    return _equal(n_seqs, context - 1, 1)


def _equal(n_seqs: int, start: int, length: int) -> Spans:
    return Spans(list(range(n_seqs)), [start] * n_seqs, [length] * n_seqs, [0] * n_seqs, [True] * n_seqs)
