"""What compute remembers between steps for each slot: its tokens and its pages.

Owns the token table and the page table (a host mirror and a device copy). Does not own which page a slot gets.
Invariant: row `slot` of the device tables equals what the plans so far said; the token table also holds sampled
tokens that the host has not seen.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import torch

from quire.compute.device.device import Device
from quire.core.plan import PageAppend, SlotOpen


@dataclasses.dataclass(frozen=True, slots=True)
class PageWrites:
    """New entries of the page table on the device: `pages.view(-1)[at] = values`."""

    at: np.ndarray
    """int64 [k]."""
    values: np.ndarray
    """int64 [k]."""


NO_WRITES: Final = PageWrites(np.zeros(0, np.int64), np.zeros(0, np.int64))


class SlotTables:
    """`tokens` int32 [n_slots + 1, max_model_len + 1] and `pages` int32 [n_groups, n_slots + 1, max_pages] on the
    device: a page table for each group of layers (`KVLayout`).

    The extra token column takes the last sampled token, which is never computed; the extra row of both belongs to no
    sequence and takes what padding writes.
    """

    def __init__(self, n_slots: int, max_model_len: int, page_size: int, device: Device, n_groups: int = 1) -> None:
        self._device = device
        n_columns = -(-max_model_len // page_size)
        self.page_size = page_size
        self.spare_slot = n_slots
        self.prompt_lens = np.zeros(n_slots + 1, np.int32)
        """Of the sequence in each slot: later tokens are its own."""
        self.deterministic = np.zeros(n_slots + 1, bool)
        self.adapters = np.full(n_slots + 1, -1, np.int32)
        """Of the sequence in each slot, the place of its adapter; -1: none."""
        self.host_pages = np.zeros((n_groups, n_slots + 1, n_columns), np.int32)
        self.is_shared: Final = device.is_host
        """The host sees the token table, and writes it."""
        self.pages = torch.from_numpy(self.host_pages) if self.is_shared else device.upload(self.host_pages)
        self.tokens = torch.zeros((n_slots + 1, max_model_len + 1), dtype=torch.int32, device=device.torch_device)
        self.ends = torch.zeros(n_slots + 1, dtype=torch.int64, device=device.torch_device)
        """On the device, where it guesses: tokens of each slot whose keys are computed and kept."""
        self.behind = torch.zeros(n_slots + 1, dtype=torch.int64, device=device.torch_device)
        """How far before its planned start the newest span of each slot that verifies the device's guesses begins."""

    def open(self, opened: list[SlotOpen]) -> None:
        """Write the known tokens of new sequences, in one upload."""
        if not opened:
            return
        ids = self._device.upload(np.concatenate([np.asarray(one.token_ids, np.int32) for one in opened]))
        at = 0
        for one in opened:
            n_tokens = len(one.token_ids)
            self.tokens[one.slot, :n_tokens] = ids[at : at + n_tokens]
            self.prompt_lens[one.slot] = one.prompt_len
            self.deterministic[one.slot] = one.params.deterministic
            self.adapters[one.slot] = one.adapter
            at += n_tokens

    def adapters_of(self, row_slots: np.ndarray, *, always: bool = False) -> np.ndarray | None:
        """int32 [n]: place of the adapter of each row, -1: none; None if no row has one, unless the kernels are always
        to be those for rows that may have one, lest the bits of a row tell whether another has."""
        found: np.ndarray = self.adapters[row_slots]
        return found if always or (len(found) and int(found.max()) >= 0) else None

    def set_tokens(self, at: np.ndarray, found: torch.Tensor | None = None) -> None:
        """Write single tokens, in one upload. at: int64 [3, k], slots, positions, token ids, or their places in
        `found`, int32."""
        slots, positions, token_ids = self._device.upload(at)
        self.tokens[slots, positions] = token_ids.to(torch.int32) if found is None else found[token_ids]

    def upload(self, values: np.ndarray) -> torch.Tensor:
        """To the device of the tables."""
        return self._device.upload(values)

    def append(self, added: list[PageAppend]) -> PageWrites:
        """Extend page lists on the host. Returns what the device's table still lacks: for `write`, or a graph."""
        for one in added:
            self.host_pages[one.group, one.slot, one.first_index : one.first_index + len(one.pages)] = one.pages
        if self.is_shared or not added:
            return NO_WRITES
        _, n_slots, n_columns = self.host_pages.shape
        lengths = [len(one.pages) for one in added]
        rows = [(one.group * n_slots + one.slot) * n_columns + one.first_index for one in added]
        first = np.repeat(rows, lengths)
        within = np.arange(len(first)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return PageWrites(first + within, np.concatenate([np.asarray(one.pages, np.int64) for one in added]))

    def write(self, writes: PageWrites) -> None:
        """Bring the device's page table up to date, in one upload and one scatter."""
        if len(writes.at):
            at, values = self._device.upload(np.stack([writes.at, writes.values]))
            self.pages.view(-1)[at] = values.to(torch.int32)

    def cache_locs(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [n_groups, n]: index `page * page_size + offset` of each (slot, position) in the KV pool."""
        pages = self.host_pages[:, slots, positions // self.page_size].astype(np.int64)
        cache_locs: np.ndarray = pages * self.page_size + positions % self.page_size
        return cache_locs

    def locs(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`cache_locs` on the device, of the pages that are there: slots, positions int64 [n]."""
        pages = self.pages[:, slots, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size
