"""Which expert is in which slot of which rank, so that all ranks have as much to do: EPLB, of measured loads.

The two greedy steps of DeepSeek's load balancer (github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv 2412.19437, section
3.4): copies of the heaviest, then packs of equally many, the heaviest first into the lightest. Owns the choice. Does
not own the loads, nor how experts move. Torch-free.
Invariants: slots of a rank are neighbours, equally many each; every expert has a slot; the same input gives the same
slots, on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

LEAST_GAIN: Final = 0.02
"""A layer stays as it is where the most loaded rank would lose less than this share of its load. A round guess: moves
have to pay, and loads of two windows are never quite equal."""


def rearranged(loads: Sequence[float], slots: Sequence[int], n_ranks: int) -> list[int]:
    """loads: of each expert. slots: [n_slots] the expert in each now. → the same, better balanced; `slots` where that
    gains less than `LEAST_GAIN`."""
    packs = _packs(loads, _n_copies(loads, len(slots), n_ranks), n_ranks)
    found = _kept_in_place(packs, slots)
    before, after = imbalance(loads, slots, n_ranks), imbalance(loads, found, n_ranks)
    return found if before - after >= LEAST_GAIN * before > 0 else list(slots)


def imbalance(loads: Sequence[float], slots: Sequence[int], n_ranks: int) -> float:
    """The load of the most loaded rank over that of the mean one, copies sharing an expert's; 0 without loads."""
    n_copies, own = [0] * len(loads), len(slots) // n_ranks
    for expert in slots:
        n_copies[expert] += 1
    of_ranks = [
        sum(loads[expert] / n_copies[expert] for expert in slots[first : first + own])
        for first in range(0, len(slots), own)
    ]
    total = sum(of_ranks)
    return max(of_ranks) * n_ranks / total if total else 0.0


def sources(old: Sequence[int], new: Sequence[int], n_ranks: int) -> list[tuple[int, int]]:
    """(slot to copy from, slot to fill) of each slot whose expert changes, in the order of the latter. From the rank
    itself where it has the expert, else from one of those that have it, in turn."""
    own, holders = len(old) // n_ranks, dict[int, list[int]]()
    for slot, expert in enumerate(old):
        holders.setdefault(expert, []).append(slot)
    found = []
    for slot, expert in enumerate(new):
        if old[slot] != expert:
            have = holders[expert]
            near = [one for one in have if one // own == slot // own]
            found.append((near[0] if near else have[slot % len(have)], slot))
    return found


def _n_copies(loads: Sequence[float], n_slots: int, n_ranks: int) -> list[int]:
    """One of each expert; each further one of that whose copies have the most, until every rank could have it."""
    found = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(n_slots - len(loads)):
        _, expert = heapq.heappop(heap)
        found[expert] += 1
        if found[expert] < n_ranks:
            heapq.heappush(heap, (-loads[expert] / found[expert], expert))
    return found


def _packs(loads: Sequence[float], n_copies: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Experts of each rank, equally many; two copies of one only where no rank without it has room: side by side they
    share no load, and take the memory of two."""
    size = sum(n_copies) // n_ranks
    packs: list[list[int]] = [[] for _ in range(n_ranks)]
    weights = [0.0] * n_ranks
    copies = [(loads[expert] / n, expert) for expert, n in enumerate(n_copies) for _ in range(n)]
    for weight, expert in sorted(copies, key=lambda one: (-one[0], one[1])):
        with_room = [number for number in range(n_ranks) if len(packs[number]) < size]
        pack = min(with_room, key=lambda number: (expert in packs[number], weights[number]))
        packs[pack].append(expert)
        weights[pack] += weight
    return packs


def _kept_in_place(packs: Sequence[Sequence[int]], slots: Sequence[int]) -> list[int]:
    """Slots of packs: each pack goes to the rank that has most of it, as far as that is free, and what the rank has
    stays in its slot."""
    n_ranks, own = len(packs), len(slots) // len(packs)
    held = [set(slots[first : first + own]) for first in range(0, len(slots), own)]
    pairs = [
        (-len(held[rank].intersection(pack)), rank, number)
        for rank in range(n_ranks)
        for number, pack in enumerate(packs)
    ]
    pack_of: dict[int, int] = {}
    taken = set[int]()
    for _, rank, number in sorted(pairs):
        if rank not in pack_of and number not in taken:
            pack_of[rank] = number
            taken.add(number)
    found: list[int] = []
    for rank in range(n_ranks):
        coming, mine = list(packs[pack_of[rank]]), list[int | None]()
        for expert in slots[rank * own : (rank + 1) * own]:
            stays = expert in coming
            mine.append(expert if stays else None)
            if stays:
                coming.remove(expert)
        found += [coming.pop(0) if expert is None else expert for expert in mine]
    return found
