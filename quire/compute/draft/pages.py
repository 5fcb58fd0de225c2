"""Which pages a drafter has filled with keys of its own, under the page numbers of the model that it guesses for.

Owns the marks. Does not own pages nor keys. Invariant: a page with a mark holds what the tokens up to its end give, so
whoever is given the page with the same tokens need not read them again. Two marks that are equal by accident cost time,
no token.
"""

from __future__ import annotations

import numpy as np

from quire.compute.runner.tables import SlotTables


class FilledPages:
    """Of one drafter; a page table's first group is asked."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self._marks: dict[int, int] = {}
        """Page → mark of the tokens up to its end, if the keys of them are there."""
        self._chains: dict[int, list[int]] = {}
        """Slot → marks of its whole pages."""
        self._n_marked: dict[int, int] = {}
        """Slot → how many of these were given to their pages."""

    def open(self, slot: int) -> None:
        """Another sequence."""
        self._chains[slot], self._n_marked[slot] = [], 0

    def close(self, slot: int) -> None:
        """The keys stay with the pages."""
        self._chains.pop(slot, None)
        self._n_marked.pop(slot, None)

    def found(self, slot: int, tokens: np.ndarray) -> int:
        """Tokens at the beginning whose keys another sequence has left in the pages that this one was given."""
        chain, table = self._extended(slot, tokens), self._tables.host_pages[0, slot]
        n = 0
        while n < len(chain) and self._marks.get(int(table[n])) == chain[n]:
            n += 1
        return n * self._tables.page_size

    def mark(self, slot: int, tokens: np.ndarray) -> None:
        """The whole pages of these tokens are filled, or will be before anybody reads them."""
        chain, table = self._extended(slot, tokens), self._tables.host_pages[0, slot]
        n_pages = len(tokens) // self._tables.page_size
        for index in range(self._n_marked.get(slot, 0), n_pages):
            self._marks[int(table[index])] = chain[index]
        self._n_marked[slot] = n_pages

    def _extended(self, slot: int, tokens: np.ndarray) -> list[int]:
        """Marks of the whole pages of a sequence: each of all tokens up to the page's end."""
        chain, size = self._chains.setdefault(slot, []), self._tables.page_size
        for index in range(len(chain), len(tokens) // size):
            page = tokens[index * size : (index + 1) * size].tobytes()
            chain.append(hash((chain[-1] if chain else 0, page)))
        return chain
