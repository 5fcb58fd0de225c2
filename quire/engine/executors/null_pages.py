"""The slots and pages of the null device: what a plan changes of them, and K/V read back through the page tables.

Does not own what rows hold (`digests.py`) nor spans (`null.py`).
Invariant: a page that one open slot may still read is not written by another.
"""

from __future__ import annotations

from quire.config.kv import first_page
from quire.core.errors import EngineError
from quire.core.failure import Code
from quire.core.plan import PageAppend, PageCopy, SlotOpen, StepPlan
from quire.engine.executors.digests import ROW_BYTES, UNWRITTEN, first_seen


class PlanError(EngineError):
    """A plan contradicts itself or the plans before it."""

    code = Code.BAD_PLAN


class NullSlot:
    """What the device keeps of an open slot."""

    __slots__ = ("end", "held_from", "params", "prompt_len", "rejected", "tables", "tokens")

    def __init__(self, opened: SlotOpen, n_groups: int) -> None:
        self.tokens = list(opened.token_ids)
        self.prompt_len = opened.prompt_len
        self.params = opened.params
        self.tables: list[list[int]] = [[] for _ in range(n_groups)]
        """The pages of each group; 0 before the first that was appended, and where none is seen any more."""
        self.held_from = [0] * n_groups
        """The first page of each table that is still seen."""
        self.end = -1
        """Tokens with K/V after its last span; -1 before its first."""
        self.rejected: list[int] = []
        """Drafts that its latest spans rejected, the last first: the host may not have heard of them."""

    def begin(self, planned: int, depth: int) -> int:
        """Where its next span begins, which the plan says as far as the host knows."""
        if self.end < 0:
            return planned
        unheard = {sum(self.rejected[:n]) for n in range(depth)}
        require(planned - self.end in unheard, f"a span is planned at {planned}, the slot stands at {self.end}")
        return self.end

    def hear(self, n_rejected: int, depth: int) -> None:
        """Its newest span rejected so many drafts."""
        self.rejected = [n_rejected, *self.rejected][: depth - 1]


class NullPages:
    """See the module."""

    def __init__(
        self, n_pages: int, page_size: int, max_num_seqs: int, max_model_len: int, windows: tuple[int, ...]
    ) -> None:
        """windows: of each group of layers, as `KVLayout.windows`."""
        self.windows = windows
        self.n_pages, self.page_size = n_pages, page_size
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self._rows = [bytearray(page_size * ROW_BYTES) for _ in range(n_pages)]
        self._holders: list[set[int]] = [set() for _ in range(n_pages)]
        """Open slots one of whose page tables has the page."""
        self._slots: dict[int, NullSlot] = {}

    def change(self, plan: StepPlan) -> None:
        """Close, open, append pages and copy, as the plan says."""
        for slot in plan.closed:
            self._close(slot, known=len(plan.closed) < self.max_num_seqs)
        for opened in plan.opened:
            self._open(opened)
        for append in plan.pages:
            self._append(append)
        self._copy(plan.copies)

    def _close(self, slot: int, *, known: bool) -> None:
        """known: the host says that it is open; False when it closes every slot after a failure."""
        require(slot in self._slots or not known, f"slot {slot} is closed but was not open")
        if slot in self._slots:
            for page in (page for table in self._slots.pop(slot).tables for page in table):
                self._holders[page].discard(slot)

    def _open(self, opened: SlotOpen) -> None:
        require(0 <= opened.slot < self.max_num_seqs, f"slot {opened.slot} does not exist")
        require(opened.slot not in self._slots, f"slot {opened.slot} is opened while it is open")
        require(0 < opened.prompt_len <= len(opened.token_ids) < self.max_model_len, "a slot opens with bad lengths")
        self._slots[opened.slot] = NullSlot(opened, len(self.windows))

    def _append(self, append: PageAppend) -> None:
        require(append.slot in self._slots, f"pages for slot {append.slot}, which is not open")
        require(0 <= append.group < len(self.windows), f"pages for group {append.group}, which is not there")
        slot = self._slots[append.slot]
        table, window = slot.tables[append.group], self.windows[append.group]
        if window and not table:
            table += [0] * append.first_index
        require(append.first_index == len(table), "pages are not appended at the end of the table")
        require(all(0 < page < self.n_pages for page in append.pages), f"page ids {append.pages} out of range")
        table += append.pages
        for page in append.pages:
            require(append.slot not in self._holders[page], f"slot {append.slot} has a page twice")
            self._holders[page].add(append.slot)

    def forget_unseen(self, number: int, slot: NullSlot) -> None:
        """Pages behind every later token are the slot's no more: others may have them."""
        for group, window in enumerate(self.windows):
            table, first = slot.tables[group], first_page(window, slot.end, self.page_size)
            for index in range(slot.held_from[group], first):
                self._holders[table[index]].discard(number)
                table[index] = 0
            slot.held_from[group] = first

    def _copy(self, copies: list[PageCopy]) -> None:
        """Copies of one plan may run in any order, so no page is both read and written."""
        targets = [copy.target for copy in copies]
        require(len(set(targets)) == len(targets), "a page is the target of two copies")
        for copy in copies:
            require(copy.source not in targets, f"page {copy.source} is both source and target of copies")
            require(copy.source > 0 and copy.target > 0, "the dummy page is copied")
            require(0 < copy.n_tokens <= self.page_size, f"{copy.n_tokens} rows of a page are copied")
            rows = self._rows[copy.source][: copy.n_tokens * ROW_BYTES]
            require(UNWRITTEN not in rows, f"rows of page {copy.source} are copied that were never written")
            for holder in self._holders[copy.target]:
                require(self._slots[holder].end < 0, f"page {copy.target} is overwritten while slot {holder} uses it")
            self._rows[copy.target][: len(rows)] = rows

    def _rows_of(self, slot: NullSlot, group: int, end: int) -> bytes:
        """K/V that token number `end` sees before it in a group, read through the page table."""
        first, size = first_seen(self.windows[group], end), self.page_size
        at = first // size
        pages = slot.tables[group][at : -(-end // size)]
        require(0 not in pages, "K/V is read in a page that was never there, or was given back")
        rows = b"".join([self._rows[page] for page in pages])
        return rows[(first - at * size) * ROW_BYTES : (end - at * size) * ROW_BYTES]

    def rows_seen(self, slot: NullSlot, end: int) -> list[bytes]:
        return [self._rows_of(slot, group, end) for group in range(len(self.windows))]

    def check_exclusive(self, number: int, page: int, first: int) -> None:
        """Nobody else may have used the K/V of `page` from position `first` on."""
        for other in self._holders[page]:
            used = self._slots[other].end
            require(other == number or used <= first, f"slot {number} writes page {page}, which slot {other} shares")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
