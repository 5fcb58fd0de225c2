"""Places of adapters on the device: which adapter is where, and which leaves when another one is wanted.

Owns the places and their order of use. Does not own weights (`compute/adapters`) nor names (`engine/adapters`).
Invariants: an adapter that a running sequence has keeps its place; so a step has at most as many different ones as
there are places. What sequences hold is looked up among the running ones: no count can go wrong.
"""

from __future__ import annotations

from quire.control.seq import Seq
from quire.core.plan import AdapterPut, StepPlan

NO_PLACE = -1
PATIENCE_STEPS = 64
"""So long others with adapters pass a sequence for whose adapter there is no place; then only those without one do."""


class AdapterPlaces:
    """running: the sequences that have slots, as `LiveSeqs` keeps them."""

    def __init__(self, n_places: int, running: list[Seq]) -> None:
        self._running = running
        self._free = list(range(n_places - 1, -1, -1))
        self._place_of: dict[str, int] = {}
        """Least recently wanted first."""
        self._refused: tuple[tuple[int, int, int], int] | None = None
        """The key of the first sequence that waits for a place, and the step since which it does."""

    def has_room(self, seq: Seq) -> bool:
        """Whether `seq` can enter, as far as its adapter is concerned."""
        content_id = seq.request.content_id
        return not content_id or content_id in self._place_of or bool(self._free) or self._leaving() is not None

    def may_pass(self, seq: Seq, step: int) -> bool:
        """Whether `seq` may go before one that waits for a place, in this step."""
        since = step if self._refused is None else self._refused[1]
        return not seq.request.content_id or step < since + PATIENCE_STEPS

    def note_refused(self, seq: Seq, step: int) -> None:
        """`seq`, before which none was refused in this step, was not admitted for want of a place."""
        if self._refused is None or self._refused[0] != seq.key:
            self._refused = seq.key, step

    def hold(self, seq: Seq, plan: StepPlan) -> int:
        """The place of a sequence's adapter, where the plan puts it if it is not there; there is room for it."""
        content_id = seq.request.content_id
        if not content_id:
            return NO_PLACE
        place = self._place_of.pop(content_id, None)
        if place is None:
            leaving = None if self._free else self._leaving()
            place = self._free.pop() if leaving is None else self._place_of.pop(leaving)
            plan.adapters.append(AdapterPut(place, content_id))
        self._place_of[content_id] = place
        return place

    def _leaving(self) -> str | None:
        """The one that was not wanted for the longest time, and that no running sequence has."""
        used = {seq.request.content_id for seq in self._running}
        return next((content_id for content_id in self._place_of if content_id not in used), None)
