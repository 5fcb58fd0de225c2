"""`Seq`: one of the `n` sequences of a request: its tokens, its pages and how far it has come.

Owns the order `cached <= computed <= planned <= limit` and the legal changes of state, checked where they change by
raised exceptions (also under python -O). Does not own pages (`cache.py`) nor membership (`live_seqs.py`).

    tokens   |--- prompt (prompt_len) ---|--- outputs ---|
    K/V      |-- cached --|-- computed --|-- planned --|............| limit = prompt_len + max_tokens - 1

While drafts are in flight `planned` is an upper bound: what a result rejects is taken off.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from quire.control.acceptance import Acceptance
from quire.control.node import Miss, Node
from quire.core.errors import EngineError
from quire.core.failure import Code
from quire.core.logprobs import TokenLogprobs
from quire.core.plan import SlotParams
from quire.core.request import Pooling, Request

if TYPE_CHECKING:
    from quire.control.beam_search import BeamSearch

Foretold = tuple[int, list[int]]
"""A position, and the tokens from there on, at least two."""
NEVER = 1 << 62
"""A step number that does not come."""


class InvariantError(EngineError):
    """Control contradicted itself: a bug in Quire, never a user's fault."""

    code = Code.CONTROL_INVARIANT


@enum.unique
class SeqState(enum.Enum):
    """WAITING → RUNNING → WAITING (preempted) or ENDED; WAITING → ENDED."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


_LEGAL = {
    (SeqState.WAITING, SeqState.RUNNING),
    (SeqState.RUNNING, SeqState.WAITING),
    (SeqState.RUNNING, SeqState.ENDED),
    (SeqState.WAITING, SeqState.ENDED),
}


class Seq:
    """Plain attributes, read in tight loops; the methods are the checked ways to change them together."""

    __slots__ = (
        "acceptance",
        "cached",
        "computed",
        "copied_pages",
        "dp_rank",
        "drafts_from",
        "first_cached",
        "foretold",
        "held_from",
        "ignore_through",
        "index",
        "is_masked",
        "key",
        "last_step",
        "left_tables",
        "limit",
        "min_tokens",
        "miss",
        "n_admissions",
        "n_draft_spans",
        "n_drafts",
        "n_drafts_kept",
        "n_shared",
        "n_tree_pages",
        "node",
        "params",
        "planned",
        "pooled",
        "prefill_end",
        "prompt_len",
        "prompt_rows",
        "prompt_step",
        "queued_s",
        "request",
        "returns_at",
        "room",
        "search",
        "slot",
        "snapshots",
        "state",
        "stop_ids",
        "tables",
        "tokens",
        "wants_more",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, key: tuple[int, int, int], params: SlotParams) -> None:
        self.request = request
        self.index = index
        self.key = key
        """(priority, arrival number, index): the order of admission; the largest is preempted first."""
        self.params = params
        self.tokens = request.prompt_token_ids
        """All tokens known to the host; the request's own list until the first admission (`n` samples share it)."""
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + request.max_tokens - 1
        """Tokens whose K/V must be computed for the longest output (the last output's is not needed)."""
        self.stop_ids = frozenset(request.end_token_ids).union(request.params.stop_token_ids)
        self.min_tokens = request.params.min_tokens
        self.is_masked = request.is_constrained
        """Its tokens are chosen under masks, which the engine sends after the plan."""
        self.wants_more = params.logprobs >= 0 or request.pooling is not None
        """Results bring more for it than tokens."""
        self.search: BeamSearch | None = None
        """The beam search that it is a member of."""
        self.acceptance: Acceptance | None = None
        """None until it is asked for drafts."""
        self.drafts_from = 0
        """The step from which it is asked again."""
        self.n_draft_spans = self.n_drafts = self.n_drafts_kept = 0
        """Times that it verified drafts, these drafts, and those that became tokens of its output."""
        self.state = SeqState.WAITING
        self.dp_rank = 0
        """The data-parallel rank whose slot and pages it has, or had last."""
        self.n_admissions = 0
        self.first_cached = 0
        """Prompt tokens found in the cache at the first admission."""
        self.copied_pages: list[int] = []
        """The page of each group whose first rows it copied when it last entered; empty: none."""
        self.queued_s = 0.0
        """Seconds until its first admission, for a request with a history."""
        self.miss: Miss | None = None
        """Why the rest of its prompt was not in the cache at its first admission, for a request with a history."""
        self.prompt_rows: list[TokenLogprobs | None] | None = None
        """Prompt logprobs by position - 1, until they are delivered; None when not asked or delivered."""
        if request.params.prompt_logprobs is not None and index == 0:
            self.prompt_rows = [None] * (self.prompt_len - 1)
        self.last_step = -1
        """Last step that has a span of this sequence."""
        self.ignore_through = -1
        """Results of steps up to this one are void for this sequence."""
        self.left_tables: list[list[int]] = []
        """The page tables it had when it last left its slot: what its spans in flight write to."""
        self._reset()

    def _reset(self) -> None:
        """What holds outside a slot."""
        self.slot = -1
        self.tables: list[list[int]] = []
        """Its pages in each group of layers, all lists of one length; 0 for a page that was given back."""
        self.held_from: list[int] = []
        """The first page of each table that it holds."""
        self.room = 0
        """Tokens that fit into its tables."""
        self.returns_at = NEVER
        """Computed tokens at which it gives the next page back."""
        self.node: Node | None = None
        """Where its locked path in the prefix tree ends."""
        self.n_tree_pages = 0
        """Leading pages that are this path."""
        self.snapshots: dict[int, int] = {}
        """Number of its pages → the kept state behind them, until these are in the tree."""
        self.n_shared = 0
        """Leading pages that the tree had in common with it when it entered."""
        self.cached = self.computed = self.planned = self.prefill_end = 0
        self.prompt_step = NEVER
        """The step that plans the last of its prompt."""
        self.foretold: Foretold | None = None
        """While its grammar leaves no choice."""
        self.pooled: list[float] = []
        """Sum of the states of its tokens computed so far, or the last one's, for a request with `pooling`."""

    @property
    def needs_every_row(self) -> bool:
        """True if every token of the prompt must be computed: for its logprobs, or for the mean of its states."""
        return self.prompt_rows is not None or self.request.pooling is Pooling.MEAN

    @property
    def n_table_pages(self) -> int:
        """Length of each of its tables."""
        return len(self.tables[0])

    @property
    def n_outputs(self) -> int:
        """Output tokens known to the host."""
        return len(self.tokens) - self.prompt_len

    def enter(self, slot: int, cached: int, copied_pages: list[int]) -> None:
        """WAITING → RUNNING: a slot, and pages (which it has) of which the first `cached` tokens hold K/V."""
        self.change(SeqState.RUNNING)
        self.slot = slot
        self.cached = self.computed = self.planned = cached
        self.prefill_end = len(self.tokens)
        self.copied_pages = copied_pages
        self.n_admissions += 1
        if self.n_admissions == 1:
            self.first_cached = cached
            self.tokens = list(self.tokens)
        self.check()

    def strip(self, n_groups: int) -> None:
        """A running member gives its pages up (the caller has given them back), and keeps its slot."""
        slot = self.slot
        self._reset()
        self.slot, self.tables, self.held_from = slot, [[] for _ in range(n_groups)], [0] * n_groups

    def reenter(self, cached: int, copied_pages: list[int]) -> None:
        """A running member goes on with other pages, of which the first `cached` tokens hold K/V."""
        self.cached = self.computed = self.planned = cached
        self.copied_pages = copied_pages
        self.check()

    def leave(self, state: SeqState) -> None:
        """RUNNING → WAITING or ENDED; its pages must have been given back by the caller."""
        self.change(state)
        self.left_tables = self.tables
        self._reset()

    def requeue(self) -> None:
        """Back to WAITING without any K/V, in an engine that has lost all of it; results in flight are void."""
        if self.state is SeqState.RUNNING:
            self.change(SeqState.WAITING)
        self.ignore_through = self.last_step
        self._reset()
        self.left_tables, self.copied_pages = [], []

    def change(self, state: SeqState) -> None:
        """Go to `state` (InvariantError if that is not legal)."""
        if (self.state, state) not in _LEGAL:
            raise InvariantError(f"a sequence cannot go from {self.state.value} to {state.value}")
        self.state = state

    def plan(self, length: int, step: int) -> None:
        """`length` more tokens are in flight."""
        self.planned += length
        self.last_step = step
        self.check()

    def foretell(self, n_drafts: int, tokens: list[int]) -> None:
        """The tokens that must come next behind those that are known and `n_drafts` more in flight. The first is chosen
        in flight; those after it are sure drafts, where there are any."""
        self.foretold = (len(self.tokens) + n_drafts, tokens) if len(tokens) > 1 else None

    @property
    def can_draft(self) -> bool:
        """Whether its steps may verify drafts."""
        return self.request.pooling is None and self.search is None

    def advance(self, start: int, length: int, n_rejected: int) -> None:
        """A span of `length` tokens, planned to begin at `start` or before, is computed; drafts of it were rejected."""
        end = self.computed + length
        if self.computed > start or end > self.planned:
            raise InvariantError(f"computed {self.computed} to {end} of {self.planned} planned tokens, from {start}")
        self.computed = end - n_rejected
        self.planned -= n_rejected

    def check(self) -> None:
        """InvariantError unless cached <= computed <= planned <= limit and the pages hold what is planned."""
        if not 0 <= self.cached <= self.computed <= self.planned <= self.limit or self.planned > self.room:
            raise InvariantError(
                f"lengths out of order: cached {self.cached}, computed {self.computed}, planned {self.planned}, "
                f"limit {self.limit}, room {self.room}"
            )
