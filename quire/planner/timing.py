"""Seconds of a step from its spans: every operator at its own efficiency, one after the other.

Owns the arithmetic of time. Does not own the efficiencies (`calibration`) nor the work (`parts`, `operators`).
t = fixed(rows) + (memory^p + arithmetic^p)^(1/p). Products of a row count are computed once and remembered, so that a
simulator can ask for thousands of steps a second.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.core.plan import Spans
from quire.planner.calibration import LATENT, SHARPNESS, Calibration, Curve, Sums, curve_of_format
from quire.planner.captured import padded_rows
from quire.planner.communication import (
    Pattern,
    Transfer,
    context_transfers,
    exchange_transfers,
    logits_transfers,
    n_late_sums,
    step_transfers,
    sum_transfer,
)
from quire.planner.formats import Formats
from quire.planner.links import Links
from quire.planner.mesh import own_rows
from quire.planner.operators import STATE_FLOPS, Seen, held_bytes, seen
from quire.planner.parts import AttentionGroup, Product, RankParts, rank_parts

HALF_PAIR = 0.5
"""Of a layer's two products of experts, whose fixed cost is measured together."""
ROW_KERNELS = "norms and rotation"
Columns = tuple[Sequence[int], Sequence[int]]
"""Starts and lengths of some spans."""
NO_SPANS: Columns = ([], [])
ROTATED_PARTS = 3
"""Reads and writes of rotation, in queries of a row."""
SUMMED_PARTS = 3
"""Reads and writes of an addition, in rows."""
PLAIN_LAUNCHES = 3
"""Of a plain layer: two norms and a rotation, of which `Calibration.row_kernels` has the time together."""


class StepTimer:
    """Of one rank of a mesh; all stages of a pipeline together where `pp` > 1, see `step_s`."""

    def __init__(
        self,
        arch: ModelArch,
        calibration: Calibration,
        formats: Formats,
        mesh: Mesh,
        links: Links | None = None,
        parts: RankParts | None = None,
    ) -> None:
        """links: how devices are joined; None for one device. parts: those of the mesh, where they are known."""
        self.arch, self.calibration, self.formats, self.mesh, self.links = arch, calibration, formats, mesh, links
        self.parts = parts or rank_parts(arch, mesh, formats)
        self._captured = () if mesh.ring > 1 else calibration.captured
        """Sizes to which decode steps are filled up. Those that merge states are not captured."""
        self._rows_s: dict[int, float] = {}
        self._exchanged_s: dict[tuple[int, float], float] = {}
        self._wants_s: dict[int, float] = {}
        self._spared_s: dict[tuple[int, int], float] = {}
        self._by_counts_s: dict[tuple[int, int, bool], float] = {}
        self._bytes_per_s = calibration.read_bytes_per_s
        self._reads = [
            (group, self._read_s(group), self._lines_s(group), group.has_other_way, self._attention_curve(group))
            for group in self.parts.attentions
        ]

    def step_s(self, spans: Spans, shared_tokens: int = 0, shared_pairs: int = 0) -> float:
        """Of the device, from the first kernel to the last.

        shared_tokens: keys that spans have together and are read once; shared_pairs: rows times keys of these.
        A pipeline's stages work on other steps meanwhile: the time of one of them, and what is sent between two.
        """
        n_rows = sum(spans.lengths)
        counts = n_rows, spans.wants.count(True), n_rows == len(spans.slots)
        total_s = self._by_counts_s.get(counts)
        if total_s is None:
            total_s = self._by_counts_s[counts] = self._counted_s(*counts)
        if self._reads:
            by_size = ((spans.starts, spans.lengths), NO_SPANS) if counts[2] else self._by_size(spans)
            attention_s = self._attention_s(*by_size, shared_tokens, shared_pairs)
            total_s += attention_s if self.mesh.ring == 1 else attention_s - self._hidden_s(spans, n_rows, attention_s)
        if self.parts.states:
            total_s += self._states_s(spans)
        return total_s / self.mesh.pp + self.calibration.step_s

    def _counted_s(self, n_rows: int, n_wants: int, are_decodes: bool) -> float:
        """What follows from the numbers of a step's rows and tokens alone."""
        if are_decodes and self._captured:
            n_rows = n_wants = padded_rows(n_rows, self._captured)
        return self.rows_s(n_rows) - self.spared_s(n_rows, n_wants) + self.wants_s(n_wants)

    def parts_s(self, spans: Spans) -> dict[str, float]:
        """A step as a profile's breakdown has it: linear, attention, other kernels."""
        n_rows, n_wants = sum(spans.lengths), sum(spans.wants)
        if n_rows == len(spans) and self._captured:
            n_rows = n_wants = padded_rows(n_rows, self._captured)
        by_rows = dict(self.row_parts_s(n_rows))
        others_s = by_rows.pop(ROW_KERNELS) + n_wants * self.calibration.row_s + self.calibration.step_s
        head_s = self._head_s(n_wants) if n_wants else 0.0
        linear_s = sum(by_rows.values()) - self.spared_s(n_rows, n_wants) + head_s
        attention_s = self.attention_s(spans) + self._states_s(spans)
        return {"linear": linear_s, "attention": attention_s, "other kernels": others_s}

    def rows_s(self, n_rows: int) -> float:
        """Products, norms, rotation and collectives of all layers."""
        found = self._rows_s.get(n_rows)
        if found is None:
            found = self._rows_s[n_rows] = sum(seconds for _, seconds in self.row_parts_s(n_rows))
        return found

    def row_parts_s(self, n_rows: int) -> list[tuple[str, float]]:
        """(operator, seconds) of what a step's number of rows decides, the head left out."""
        own = max(1.0, own_rows(self.mesh, n_rows))
        found = [(one.name, one.n_times * self.product_s(one, own)) for one in self.parts.products]
        found.append((ROW_KERNELS, self._row_kernels_s(own)))
        found += [
            (one.name, one.n_times * self.transfer_s(one))
            for one in step_transfers(self.parts, self.mesh, n_rows, 0, self.formats.itemsize)
        ]
        return found

    def exchanged_s(self, n_most: int, n_mean: float) -> float:
        """Experts of data-parallel ranks that send each other rows, and the sending; a part of `rows_s`, which takes
        all to have as many rows. n_most: of the rank that has the most; n_mean: of all in the mean."""
        found = self._exchanged_s.get((n_most, n_mean))
        if found is None:
            experts = [one for one in self.parts.products if one.is_experts]
            sent = exchange_transfers(self.parts, self.mesh, n_most, n_mean, self.formats.itemsize)
            found = sum(one.n_times * self.product_s(one, n_mean) for one in experts)
            found += sum(one.n_times * self.transfer_s(one) for one in sent)
            self._exchanged_s[n_most, n_mean] = found
        return found

    def spared_s(self, n_rows: int, n_wants: int) -> float:
        """What the last layer saves, as only rows that want a token go on behind its attention; all do where other
        ranks wait for them."""
        if n_wants == n_rows or self.mesh.sends_rows:
            return 0.0
        key = (n_rows, n_wants)
        found = self._spared_s.get(key)
        if found is None:
            most, own = max(1, n_wants), own_rows(self.mesh, n_rows)
            found = sum(max(0.0, self.product_s(one, own) - self.product_s(one, most)) for one in self.parts.last)
            n_late, size = n_late_sums(self.parts, self.mesh), self.formats.itemsize
            if n_late:
                whole, wanted = (sum_transfer(self.parts, self.mesh, n_late, n, size) for n in (own, most))
                found += n_late * (self.transfer_s(whole) - self.transfer_s(wanted))
            self._spared_s[key] = found
        return found

    def wants_s(self, n_wants: int) -> float:
        """The head and the choice of tokens."""
        found = self._wants_s.get(n_wants)
        if found is None:
            found = 0.0
            if n_wants:
                found = self._head_s(n_wants) + n_wants * self.calibration.row_s
            self._wants_s[n_wants] = found
        return found

    def _head_s(self, n_wants: int) -> float:
        """The product, and what ranks send each other of its result."""
        sent = logits_transfers(self.parts, self.mesh, n_wants, self.formats.itemsize)
        return self.product_s(self.parts.head, n_wants) + sum(self.transfer_s(one) for one in sent)

    def product_s(self, product: Product, n_rows: float) -> float:
        """One call; of experts, of all of a layer."""
        curve = self._curve(product)
        row_numbers = (product.n_in + product.n_out) * product.products_of_row * n_rows
        memory_s = (product.read_bytes(n_rows) + row_numbers * self.formats.itemsize) / (
            curve.bytes_share * self._bytes_per_s
        )
        rate = self.calibration.rate(product.products)
        n_all = n_rows * product.row_factor
        if product.is_experts:
            n_each = n_rows * product.products_of_row / product.n_of
            n_flops = product.flops(n_rows) * curve.padding(n_each, are_equal=product.takes_turns)
        else:
            n_flops = product.flops(curve.multiplied(n_rows))
        arithmetic_s = n_flops / (curve.rate_share(n_all) * rate)
        fixed_s = curve.fixed(n_all) * (HALF_PAIR if product.is_experts else product.n_calls)
        return fixed_s + row_numbers * curve.row_number_s + _joined(memory_s, arithmetic_s)

    def _curve(self, product: Product) -> Curve:
        known = self.calibration.experts if product.is_experts else self.calibration.products
        return curve_of_format(known, product.kept, product.products)

    def attention_s(self, spans: Spans, shared_tokens: int = 0, shared_pairs: int = 0) -> float:
        """Of all layers."""
        return self._attention_s(*self._by_size(spans), shared_tokens, shared_pairs)

    def _attention_s(self, small: Columns, large: Columns, shared_tokens: int, shared_pairs: int) -> float:
        """The same of short spans and long ones."""
        total_s = 0.0
        for group, read_s, lines_s, has_other_way, curve in self._reads:
            n_hidden, n_pairs = (0, 0) if group.window else (shared_tokens, shared_pairs)
            one_s = 0.0
            if small[0]:
                found = seen(*small, group.window)
                memory_s = (found.n_read - n_hidden) * read_s
                one_s = self._latent_s(group, small, found, memory_s) if has_other_way else memory_s
                one_s += curve.fixed_s[0] + len(small[0]) * lines_s
            if large[0] or n_pairs:
                one_s += self._prompts_s(group, large, n_pairs)
            total_s += group.n_times * one_s
        return total_s

    def _hidden_s(self, spans: Spans, n_rows: int, attention_s: float) -> float:
        """What a ring takes less than queries that are waited for, which `rows_s` counts: keys and values go round
        where they are fewer bytes, and while a rank computes with one part, the next one comes."""
        if own_rows(self.mesh, n_rows) == n_rows:
            return 0.0
        held = held_bytes(self.parts, spans, self.formats)
        queries_s, sent_s = (
            sum(
                one.n_times * self.transfer_s(one)
                for one in context_transfers(self.parts, self.mesh, n_rows, self.formats.itemsize, of)
                if one.pattern is Pattern.SEND
            )
            for of in (None, held)
        )
        return queries_s - sent_s + min(sent_s, attention_s * (self.mesh.ring - 1) / self.mesh.ring)

    def _read_s(self, group: AttentionGroup) -> float:
        """Of the keys and values of one token in one layer."""
        n_bytes = group.token_numbers * self.formats.kv_itemsize(group.head_dim)
        return n_bytes / (self._attention_curve(group).bytes_share * self._bytes_per_s)

    def _attention_curve(self, group: AttentionGroup) -> Curve:
        known = self.calibration.attentions
        return known.get(LATENT if group.has_other_way else self.formats.kv) or self.calibration.attention

    def _by_size(self, spans: Spans) -> tuple[Columns, Columns]:
        """Of short spans, and of long ones."""
        limit = self.calibration.small_rows
        if max(spans.lengths, default=0) <= limit:
            return (spans.starts, spans.lengths), NO_SPANS
        starts, lengths = spans.starts, spans.lengths
        long = [i for i, length in enumerate(lengths) if length > limit]
        large = [starts[i] for i in long], [lengths[i] for i in long]
        n_short = len(lengths) - len(long)
        if long[0] == n_short:  # as the engine plans: what decodes comes first
            return (starts[:n_short], lengths[:n_short]), large
        short = [i for i, length in enumerate(lengths) if length <= limit]
        return ([starts[i] for i in short], [lengths[i] for i in short]), large

    def _lines_s(self, group: AttentionGroup) -> float:
        """Of a sequence in one layer, beside its keys and values: a line for each KV head."""
        n_heads = max(1.0, group.token_numbers / (2 * group.head_dim))
        return n_heads * self._attention_curve(group).line_s

    def _latent_s(self, group: AttentionGroup, spans: Columns, found: Seen, memory_s: float) -> float:
        """Where all heads read one line a token, arithmetic may bind."""
        rate = self._attention_curve(group).flops_share[0] * self.calibration.rate("bfloat16")
        return _joined(memory_s, group.flops(*spans, found.n_pairs) / rate)

    def _prompts_s(self, group: AttentionGroup, spans: Columns, shared_pairs: int) -> float:
        curve = self._attention_curve(group)
        n_flops = group.flops(*spans, seen(*spans, group.window).n_pairs) + group.pair_flops * shared_pairs
        rate = curve.rate_share(max(spans[1], default=1)) * self.calibration.rate("bfloat16")
        moved_s = group.made_numbers(*spans) * 2 * self.formats.itemsize / self._bytes_per_s  # written and read
        return curve.fixed_s[-1] + n_flops / rate + moved_s

    def _states_s(self, spans: Spans) -> float:
        curve, total_s = self.calibration.state, 0.0
        n_rows = sum(spans.lengths)
        for group in self.parts.states:
            memory_s = 2 * len(spans) * group.n_bytes / (curve.bytes_share * self._bytes_per_s)
            rate = curve.rate_share(n_rows) * self.calibration.rate("bfloat16")
            one_s = curve.fixed(n_rows) + _joined(memory_s, STATE_FLOPS * n_rows * group.n_numbers / rate)
            total_s += group.n_times * one_s
        return total_s

    def _row_kernels_s(self, n_rows: float) -> float:
        """Two norms and a rotation a layer, whose fixed cost is of all three; it is less for one row, where products
        take norms in. What no product takes in costs as much as one of three, whatever the rows."""
        curve, parts = self.calibration.row_kernels, self.parts
        numbers = (2 * parts.n_norms + SUMMED_PARTS * parts.apart.n_sums) * parts.hidden_size
        numbers += sum(one.n_times * ROTATED_PARTS * one.q_numbers for one in parts.attentions)
        n_bytes = n_rows * numbers * self.formats.itemsize
        fixed_s = parts.n_layers * curve.fixed(n_rows) + parts.apart.n * curve.fixed_s[-1] / PLAIN_LAUNCHES
        return fixed_s + n_bytes / (curve.bytes_share * self._bytes_per_s)

    def transfer_s(self, transfer: Transfer) -> float:
        """One call: latency, and bytes over the link that all its ranks share."""
        links, n_lie = self.links, transfer.n_ranks * transfer.n_inner
        if links is None:
            return 0.0
        sums = self.calibration.sums
        if transfer.pattern is Pattern.ALL_REDUCE and sums is not None and n_lie <= links.n_in_host:
            return self._sum_s(transfer, sums, links.device_bytes_per_s)
        n_hops = 1 if transfer.pattern is Pattern.SEND else max(1, (transfer.n_ranks - 1).bit_length())
        return links.latency_s * n_hops + transfer.n_bytes / links.bytes_per_s(n_lie)

    def _sum_s(self, transfer: Transfer, sums: Sums, link_bytes_per_s: float) -> float:
        """Within a host; of more than two ranks by the faster way."""
        if transfer.n_ranks == 2:
            return sums.pair.seconds(transfer.n_bytes, link_bytes_per_s)
        return min(
            sums.one_hop.seconds((transfer.n_ranks - 1) * transfer.data_bytes, link_bytes_per_s),
            sums.two_hops.seconds(transfer.n_bytes, link_bytes_per_s),
        )


def _joined(memory_s: float, arithmetic_s: float) -> float:
    """A maximum with a round corner."""
    most = max(memory_s, arithmetic_s)
    if most <= 0:
        return 0.0
    ratio = min(memory_s, arithmetic_s) / most
    return float(most * (1.0 + ratio**SHARPNESS) ** (1 / SHARPNESS))
