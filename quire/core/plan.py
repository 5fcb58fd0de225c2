"""The seam, downwards: what compute must do in one step. Plain values, msgspec-serialisable, only what changed.

Owns `StepPlan` and its parts; owns no policy and no tensor.
Invariants: plans are executed in the order of `step`; within one plan the order is
close, open, pages, copies, then all spans as one flat batch (every layer writes its K/V before it attends,
so a span may read pages that another span of the same plan fills).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from quire.core.request import Pooling


class SlotParams(msgspec.Struct, array_like=True):
    """The token-level part of `SamplingParams`, fixed for the life of a slot."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    """Sampling of the token at position p depends on (seed, p) only."""
    logprobs: int
    """-1: none; k >= 0: chosen token plus the k most probable ones."""
    prompt_logprobs: int
    """The same for prompt positions."""
    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | None
    bad_token_seqs: list[list[int]]
    masked_end_ids: list[int]
    """Ids that may not be chosen before position `masked_until`."""
    masked_until: int
    """First position (prompt included) at which `masked_end_ids` may appear: prompt_len + min_tokens."""
    pooling: Pooling | None = None
    """Spans of the slot want no token, but what their states give to the vector of the prompt."""
    deterministic: bool = False
    """As of `SamplingParams`."""


class SlotOpen(msgspec.Struct, array_like=True):
    """A sequence gets a slot. Everything a slot held before is void."""

    slot: int
    token_ids: list[int]
    """All tokens known to the host: prompt, and outputs so far when the sequence resumes after preemption."""
    prompt_len: int
    """Tokens of the prompt proper; later ones are output (for penalties)."""
    params: SlotParams
    salt: str = ""
    """What drafts learn from the sequence is for sequences with the same salt."""
    adapter: int = -1
    """Place of its adapter; -1: it has none."""


class AdapterPut(msgspec.Struct, array_like=True):
    """An adapter is in this place from now on, in that of another."""

    place: int
    content_id: str


class PageAppend(msgspec.Struct, array_like=True):
    """`page_table[group][slot][first_index : first_index + len(pages)] = pages`."""

    slot: int
    first_index: int
    """Pages before the first append of a slot are behind the group's window: nobody reads them."""
    pages: list[int]
    group: int = 0
    """Of `KVLayout.groups`."""


class PageCopy(msgspec.Struct, array_like=True):
    """Copy the first `n_tokens` K/V rows of a page in all its lanes (copy on write), before the spans run."""

    source: int
    target: int
    n_tokens: int
    slot: int = 0
    """Of the sequence that has the target: it says whose pages both are, where data-parallel ranks have their own."""


class StateSave(msgspec.Struct, array_like=True):
    """Keep the recurrent state of a slot as it is behind `n_tokens` tokens of its sequence, which end within, or with,
    its span of this step."""

    slot: int
    n_tokens: int
    snapshot: int


class StateRestore(msgspec.Struct, array_like=True):
    """A sequence that enters goes on from a state that was kept."""

    slot: int
    snapshot: int


class Spans(msgspec.Struct, array_like=True):
    """Columns of equal length, one row a span: tokens [start, start+length) of the sequence in `slot`.

    Token ids are read from the slot's own row on the device: the host wrote the known ones when the slot was opened,
    and the sampler writes each new one at its position. The host need not know them.
    """

    slots: list[int] = []
    starts: list[int] = []
    """Where drafts are in flight, an upper bound: the device knows how many it kept, and begins there."""
    lengths: list[int] = []
    n_drafts: list[int] = []
    """Trailing tokens of the span that are drafts to be made and verified by the device; it may make fewer."""
    wants: list[bool] = []
    """True: sample the token that follows the span's last token."""

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, slot: int, start: int, length: int, wants_token: bool, n_draft: int = 0) -> None:
        """Append one row."""
        self.slots.append(slot)
        self.starts.append(start)
        self.lengths.append(length)
        self.n_drafts.append(n_draft)
        self.wants.append(wants_token)


class StepPlan(msgspec.Struct):
    """One step. `n_tokens` is the sum of span lengths, the rows of the flat batch."""

    step: int
    spans: Spans
    n_tokens: int = 0
    closed: list[int] = []
    """Slots that are free from now on (applied before `opened`, which may reuse them).

    After a failure the host closes every slot at once, also those that are not open."""
    closed_lens: list[int] = []
    """Tokens of the sequences that ended in these slots; 0: it did not, or is not to be remembered; empty: neither."""
    adapters: list[AdapterPut] = []
    """Before the slots are opened that want them; only in a plan that opens some."""
    opened: list[SlotOpen] = []
    pages: list[PageAppend] = []
    copies: list[PageCopy] = []
    restores: list[StateRestore] = []
    """Of models with recurrent states; before the spans run."""
    saves: list[StateSave] = []
    """Likewise, from what the spans make of them. A span that starts at 0 begins with zeros."""
    shared_prefixes: list[tuple[list[int], int]] = []
    """Hint for composable formats: (slots, number of leading pages they share)."""
    masked: list[int] = []
    """Spans, in order, whose tokens are chosen under masks that follow in `StepMasks`. The forward pass does not wait
    for them, the choice of the step's tokens does."""
    foretold: list[tuple[int, int, list[int]]] = []
    """(span, position, tokens): what the span's sequence must say from that position on. Where that is how it stands,
    the tokens that the device does not know yet are its drafts, before any guess."""
    knows_starts: bool = True
    """Spans begin where they say: no draft is in flight. Else only the device knows where."""
    committed: int = -1
    """The newest step whose result control had. Of several ranks one tells results; by this the others take in as
    much as it has, before this step."""

    @property
    def masks_drafts(self) -> bool:
        """Whether a masked span verifies drafts: its masks depend on what these are, which the device says."""
        return any(self.spans.n_drafts[span] for span in self.masked)


class SpanDrafts(msgspec.Struct, array_like=True):
    """What the device has guessed for a span, in the order of its rows."""

    tokens: list[int] = []
    parents: list[int] = []
    """Of each the place of the one that it follows, which is less than its own; -1: the known token. Empty: each
    follows the one before it."""

    def __len__(self) -> int:
        return len(self.tokens)

    def above(self, place: int) -> int:
        """The place of the draft that this one follows; -1: it follows the known token."""
        return self.parents[place] if self.parents else place - 1


OnDrafts = Callable[[list[SpanDrafts]], None]
"""Takes the drafts of each masked span of a plan."""
MASK_WORD_BITS: Final = 32
"""Tokens of one word of a mask."""


class StepMasks(msgspec.Struct, array_like=True):
    """The masks of a plan with `masked` spans: for each of these one, and behind it one for each draft that the device
    has made for it, as if that and the drafts that it follows had been chosen. They follow when every earlier
    step is committed: a mask depends on the token before, which the host learns while the step computes. No later plan
    is submitted in between."""

    step: int
    bits: bytes | memoryview
    """int32 [lines, words], little-endian: token t of line i is allowed if bit t % 32 of word [i, t // 32] is set.
    There may be fewer words than the logits are wide: what is beyond is not allowed. Where a draft's line allows
    nothing, no token of its place counts."""
