"""Steps of a head over rows of several sequences: in native calls, or operation by operation.

Owns the memory of a step's rows, and how a guess becomes the next row. Does not own the parameters (`head.py`) nor
which rows there are (`eagle.py`).
Invariants: all ways compute the same; the native one is for the CPU with its library. Only that one writes guesses
into the token table, which is the host's there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.compute.draft.drafter import Queued
from quire.compute.draft.head import Head
from quire.compute.forward.obstacle import unpacked
from quire.compute.layers.fused_rows import LayerRows, expert_rows
from quire.compute.layers.norm import Norm
from quire.compute.runner.features import Features
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.config.attention import AttentionSpec
from quire.kernels import fused_step
from quire.kernels.fused_step import TreeRows
from quire.kernels.qgemm.cpu import ADD, WIDEN


@dataclasses.dataclass(slots=True)
class HeadRows:
    """Rows of one step: of each span (slot, start, length), one after another."""

    slots: np.ndarray
    """int64 [n]."""
    positions: np.ndarray
    """int64 [n]."""
    q_indptr: np.ndarray
    """int32 [n_spans + 1]."""
    kv_lens: np.ndarray
    """int32 [n_spans]."""
    span_slots: np.ndarray
    """int32 [n_spans]."""
    trees: TreeRows | None = None
    """Where spans are trees."""

    @property
    def places(self) -> np.ndarray:
        """int64 [n]: where the tokens stand, and their keys."""
        return self.positions if self.trees is None else self.trees.places

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int]]) -> HeadRows:
        """(slot, start, length) of each."""
        return cls(
            np.array([slot for slot, _, length in spans for _ in range(length)], np.int64),
            np.array([at for _, start, length in spans for at in range(start, start + length)], np.int64),
            np.array([0, *itertools.accumulate(length for _, _, length in spans)], np.int32),
            np.array([start + length for _, start, length in spans], np.int32),
            np.array([slot for slot, _, _ in spans], np.int32),
        )

    @property
    def last(self) -> np.ndarray:
        """int64 [n_spans]: the last row of each span."""
        return self.q_indptr[1:].astype(np.int64) - 1

    def behind(self, n: int, place: int) -> HeadRows:
        """One row for each of the first n spans: `place` positions behind its last."""
        slots, positions = self.span_slots[:n], self.kv_lens[:n] + np.int32(place - 1)
        indptr = np.arange(n + 1, dtype=np.int32)
        return HeadRows(slots.astype(np.int64), positions.astype(np.int64), indptr, positions + np.int32(1), slots)

    def advance(self) -> None:
        """The next position of each span, all of which have one row."""
        self.positions += 1
        self.kv_lens += 1


class KnownFeatures:
    """What rows of known tokens read: the feature of the token before, as the model's pages have it."""

    def __init__(self, features: Features, tables: SlotTables, model_norm: Norm | None) -> None:
        """model_norm: what the features go through before they are read."""
        self._features, self._tables, self._norm = features, tables, model_norm

    def locs(self, rows: HeadRows) -> np.ndarray:
        """int64 [n]: where they lie in the pages."""
        locs: np.ndarray = self._tables.cache_locs(rows.slots, np.maximum(rows.positions - 1, 0))[0]
        return locs

    def read(self, locs: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """locs, positions: int64 [n] of the rows; the first of a sequence has zeros."""
        self._features.read(locs, out)
        if self._norm is not None:
            out.copy_(self._norm(out))
        out.masked_fill_((positions == 0)[:, None], 0)


class HeadSteps(Protocol):
    """A way to compute steps."""

    most_each: int
    """Rows of one sequence that `chain` should be given."""

    def read(self, rows: HeadRows) -> None:
        """Keys and values of rows of known tokens."""
        ...

    def chain(self, rows: HeadRows, n_drafts: Sequence[int]) -> list[list[int]]:
        """Guesses behind each span, the model's token ids: as many as n_drafts says, in which no number rises, each at
        least 1. rows: of known tokens, the last known one of each sequence at the end."""
        ...

    def begin(self, rows: HeadRows) -> np.ndarray:
        """float32 [n_spans, the head's vocabulary]: logits of what follows each span of known tokens."""
        ...

    def level(self, rows: HeadRows, token_ids: np.ndarray, above: np.ndarray) -> np.ndarray:
        """float32 [n, the head's vocabulary]: logits of what follows rows of trees, one span for each tree. token_ids:
        int32 [n], of the rows; above: int64 [n], which logits of the last call, `begin` or `level`, each was found
        in."""
        ...


class QueuingSteps(Protocol):
    """A way whose chains stay on the device, so that nobody need wait for them."""

    def queues(self, n_sequences: int) -> bool:
        """Whether `queue` takes chains of so many, with at most `HeadSteps.most_each` rows each."""
        ...

    def queue(self, rows: HeadRows, n_drafts: Sequence[int], *, is_late: bool) -> Queued:
        """`HeadSteps.chain` without a wait. is_late: the device knows where spans begin, behind what this was given
        before, and where they end (`SlotTables.ends`): both at the latest where they say, and their rows are the
        most."""
        ...


class EagerSteps:
    """Operation by operation, on any device. Guesses stay there until all are made."""

    def __init__(
        self, device: Device, head: Head, pool: KVPool, tables: SlotTables, known: KnownFeatures, max_rows: int
    ) -> None:
        self._device, self._head, self._pool, self._tables = device, head, pool, tables
        self._features = known
        self._token_ids = device.upload(head.token_ids)
        self._states = torch.empty(0)
        """What rows of a tree read next."""
        self.most_each = max_rows

    @torch.inference_mode()
    def read(self, rows: HeadRows) -> None:
        """See `HeadSteps`."""
        self._known(rows, rows.last[-1:])  # some row has to be wanted

    @torch.inference_mode()
    def chain(self, rows: HeadRows, n_drafts: Sequence[int]) -> list[list[int]]:
        """See `HeadSteps`."""
        states, logits = self._known(rows, rows.last)
        best, after = self._token_ids[logits.argmax(1)], rows
        found = [best]
        for place in range(1, n_drafts[0]):
            n = sum(most > place for most in n_drafts)
            if place == 1 or n < len(states):
                after = rows.behind(n, place)
            else:
                after.advance()
            slots_and_places = np.stack([after.positions, self._tables.cache_locs(after.slots, after.positions)[0]])
            positions, locs = self._device.upload(slots_and_places)
            states, logits = self._step(after, best[:n], states[:n], positions, locs)
            best = self._token_ids[logits.argmax(1)]
            found.append(best)
        ids = iter(self._device.download([torch.cat(found)]).wait()[0].tolist())
        places = [list(itertools.islice(ids, len(one))) for one in found]
        return [[places[place][i] for place in range(most)] for i, most in enumerate(n_drafts)]

    @torch.inference_mode()
    def begin(self, rows: HeadRows) -> np.ndarray:
        """See `HeadSteps`."""
        self._states, logits = self._known(rows, rows.last)
        return self._on_host(logits)

    @torch.inference_mode()
    def level(self, rows: HeadRows, token_ids: np.ndarray, above: np.ndarray) -> np.ndarray:
        """See `HeadSteps`."""
        lines = np.stack([token_ids, above, rows.positions, self._tables.cache_locs(rows.slots, rows.places)[0]])
        tokens, parents, positions, locs = self._device.upload(lines)
        self._states, logits = self._step(rows, tokens, self._states[parents], positions, locs)
        return self._on_host(logits)

    def _on_host(self, logits: torch.Tensor) -> np.ndarray:
        found: np.ndarray = self._device.download([logits.float()]).wait()[0].numpy()
        return found

    def _known(self, rows: HeadRows, wanted: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """`_step` of rows of known tokens."""
        places = self._tables.cache_locs(rows.slots, rows.positions)[0], self._features.locs(rows)
        slots, positions, locs, before = self._device.upload(np.stack([rows.slots, rows.positions, *places]))
        features = locs.new_empty((len(locs), self._head.arch.arch.hidden_size), dtype=self._head.dtype)
        self._features.read(before, positions, features)
        token_ids = self._tables.tokens[slots, positions]
        return self._step(rows, token_ids, features, positions, locs, self._device.upload(wanted))

    def _step(
        self,
        rows: HeadRows,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        cache_locs: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next guess reads [m, hidden], and logits of these guesses, for the rows wanted or all."""
        plans = plan_attention(
            self._pool, self._tables, rows.kv_lens, rows.span_slots, rows.q_indptr,
            trees=None if rows.trees is None else rows.trees.trees,
        )  # fmt: skip
        context = PagedContext(self._pool, plans, [cache_locs])
        states, logits = self._head.forward(token_ids, features, positions, context, wanted)
        return self._head.chained(states), logits


def obstacle(head: Head) -> str | None:
    """Why steps of this head cannot be native calls here, or None."""
    if head.n_ranks > 1:
        return f"its layer is divided among {head.n_ranks} ranks, which wait for each other within it"
    found = fused_step.obstacle(head.dtype, head.arch.arch.head_dim) or unpacked([*head.linears, head.head])
    if found is not None:
        return found
    if head.model_norm is not None and head.model_norm.pair is None:
        return "the states that it reads are not RMS normed"
    variant = head.layer.mixer.variant
    if not head.layer.is_plain or variant is None or not variant.built_in or head.embedded_norm.pair is None:
        return "its layer is not RMS norm, attention, RMS norm, and SwiGLU or experts of it, and nothing else"
    return None


class NativeSteps:
    """One native call a chain, or a level of a tree; there must be no obstacle."""

    def __init__(
        self,
        device: Device,
        head: Head,
        pool: KVPool,
        tables: SlotTables,
        features: Features,
        *,
        max_rows: int,
        max_sampled: int,
    ) -> None:
        self.most_each = max_rows
        arch, layer = head.arch.arch, head.layer
        mixer = layer.spec.mixer
        assert isinstance(mixer, AttentionSpec), "a plain layer has no other mixer"

        def rows(width: int) -> torch.Tensor:
            return device.zeros((max_rows, width), head.dtype)

        states, embedded = rows(arch.hidden_size), rows(arch.hidden_size)
        memory = LayerRows(
            rows(arch.hidden_size) if head.makes_input else states, rows(mixer.q_size + 2 * mixer.kv_size),
            rows(mixer.q_size), rows(arch.ffn_size), {0: (pool.pages_of[0], 0)},
            expert_rows([layer.spec], arch.hidden_size, max_rows, head.dtype, device.zeros),
        )  # fmt: skip
        self._ids, self._tokens, self._states = head.token_ids, tables.tokens.numpy(), states
        self._logits = device.zeros((max_sampled, arch.vocab_size), torch.float32)
        self._fused = fused = fused_step.FusedStep(
            tables.tokens, tables.pages, tables.page_size, arch.n_heads, arch.n_kv_heads, arch.head_dim
        )
        fused.load(states, features.first, features.second)
        if head.model_norm is not None and head.model_norm.pair is not None:
            fused.norm(states, head.model_norm.pair, states)
        fused.begin_link()
        fused.embed(head.embed.weight, embedded)
        joined = memory.x if head.makes_input else memory.qkv
        head.embedded.record(fused, embedded, joined, norm=head.embedded_norm.pair)
        head.feature.record(fused, states, joined, norm=head.feature_norm.pair, then=ADD)
        if head.makes_input:
            layer.record(fused, memory, is_last=True)
        else:
            layer.record_behind(fused, memory, is_last=True)
        head.head.record(fused, memory.x, self._logits, norm=head.norm.pair, then=WIDEN)
        if head.makes_input:  # else what the rows wanted leave is the next feature as it is, and where it is read
            assert head.norm.pair is not None
            fused.norm(memory.x, head.norm.pair, states)

    def read(self, rows: HeadRows) -> None:
        """See `HeadSteps`."""
        self._fused.run(*_arrays(rows, rows.last[:0]))

    def chain(self, rows: HeadRows, n_drafts: Sequence[int]) -> list[list[int]]:
        """See `HeadSteps`. The guesses are in the token table then."""
        places = np.array(n_drafts, np.int32)
        found = self._fused.chain(self._logits, places, *_arrays(rows, rows.last), ids=self._ids)
        return [guesses[:most] for guesses, most in zip(found.T.tolist(), n_drafts, strict=True)]

    def begin(self, rows: HeadRows) -> np.ndarray:
        """See `HeadSteps`."""
        self._fused.run(*_arrays(rows, rows.last))
        return self._logits[: len(rows.last)].numpy()

    def level(self, rows: HeadRows, token_ids: np.ndarray, above: np.ndarray) -> np.ndarray:
        """See `HeadSteps`. The tokens are in the token table then."""
        n = len(token_ids)
        self._tokens[rows.slots, rows.places] = token_ids
        self._states[:n] = self._states[torch.from_numpy(above)]
        self._fused.run(*_arrays(rows, np.arange(n)), trees=rows.trees, is_link=True)
        return self._logits[:n].numpy()


def _arrays(rows: HeadRows, wanted: np.ndarray) -> tuple[np.ndarray, ...]:
    """As `kernels.fused_step.FusedStep.run` takes them."""
    return rows.slots, rows.positions, rows.q_indptr, rows.kv_lens, rows.span_slots, wanted
