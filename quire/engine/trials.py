"""Trials: requests of which an engine may have died run apart, in an engine that several API processes share.

Owns the order in which suspects reach the core, and what waits meanwhile. Does not own who is a suspect
(`quarantine.py`) nor how requests are scheduled.
The rule: one suspect at a time, and nothing else beside it, so that a death can have one reason only. After `ALONE_S`
of that, which is what others may lose by it, the rest is tried beside all others, and in groups if there are many. A
group dies as a whole, and its members are tried first in the next engine: with groups of the root of their number few
trials find the guilty, for one death more. A suspect has come through when it is well past the place where it was.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable

from quire.core.commands import Submit
from quire.core.events import SeqDelta

logger = logging.getLogger("quire.engine")

ALONE_S = 20.0
"""In the life of an engine, the time in which others wait for trials."""
GATHER_S = 0.5
"""After a death this long is waited for suspects, lest others run before them."""
FEW = 8
"""So many are tried one by one in any case."""

KNOWN, ON_TRIAL, THROUGH = 0, 1, 2
"""As in `Working.stage`."""


@dataclasses.dataclass(slots=True)
class _OnTrial:
    """What is left of a suspect's trial."""

    n_tokens: int
    n_made: dict[int, int]
    """Index of a sequence that is not through → its tokens so far."""


class Trials:
    """See the module. Times are of the monotonic clock."""

    def __init__(
        self, n_restarts_left: int, now_s: float, *, after_death: bool, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """after_death: suspects are to be expected at once. on_change: called when `stage_of` may say something new."""
        self._n_restarts_left = n_restarts_left
        self._on_change = on_change
        self._suspects: list[Submit] = []
        self._held: collections.deque[Submit] = collections.deque()
        self._on_trial: dict[str, _OnTrial] = {}
        self._through: set[str] = set()
        self._alone_left_s = ALONE_S
        self._group_size = 1
        self._gather_until_s = now_s + GATHER_S if after_death else now_s
        self._looked_s = now_s
        self._is_said = False

    @property
    def n_waiting(self) -> int:
        """Sequences that wait here."""
        return sum(submit.request.params.n for submit in (*self._suspects, *self._held))

    def stage_of(self, request_id: str) -> int:
        """`Working.stage` of a request that the core has."""
        if request_id in self._on_trial:
            return ON_TRIAL
        return THROUGH if request_id in self._through else KNOWN

    def take(self, submit: Submit, now_s: float) -> bool:
        """True if the core may have it now; otherwise `due` will bring it."""
        if submit.trial is not None:
            self._suspects.append(submit)
            return False
        if self._is_alone(now_s):
            self._held.append(submit)
            return False
        return True

    def due(self, now_s: float) -> list[Submit]:
        """What the core may have now, in order."""
        if now_s < self._gather_until_s:
            return []
        if self._is_alone(now_s):
            self._alone_left_s -= now_s - self._looked_s
        self._looked_s = now_s
        chosen: list[Submit] = []
        if self._suspects and not self._on_trial:
            self._suspects.sort(key=lambda submit: submit.trial.rank)  # type: ignore[union-attr]
            self._say()
            n = self._next_size()
            chosen, self._suspects = self._suspects[:n], self._suspects[n:]
            for submit in chosen:
                self._begin(submit)
            self._on_change()
        if self._held and not self._is_alone(now_s):
            chosen += self._held
            self._held.clear()
        return chosen

    def wait_s(self, limit_s: float, now_s: float) -> float:
        """Longest time, up to `limit_s`, after which `due` has to be asked again, if nothing else happens."""
        if not self._suspects and not self._held:
            return limit_s
        return max(0.0, min(limit_s, self._gather_until_s - now_s))

    def note(self, deltas: Iterable[SeqDelta]) -> None:
        """What sequences gained, or how they ended."""
        if not self._on_trial and not self._through:
            return
        for delta in deltas:
            is_end = delta.finish_reason is not None
            trial = self._on_trial.get(delta.request_id)
            if trial is None:
                if is_end:  # one of several sequences may go on: that matters only for what the others are called
                    self._through.discard(delta.request_id)
                continue
            n_made = trial.n_made.get(delta.index, 0) + len(delta.token_ids)
            trial.n_made[delta.index] = n_made
            if is_end or n_made >= trial.n_tokens:
                self.drop_seq(delta.request_id, delta.index, has_ended=is_end)

    def drop(self, request_ids: Iterable[str]) -> None:
        """These were cancelled."""
        gone = set(request_ids)
        self._suspects = [submit for submit in self._suspects if submit.request.request_id not in gone]
        if self._held:
            kept = [submit for submit in self._held if submit.request.request_id not in gone]
            self._held = collections.deque(kept)
        self._through -= gone
        if any(self._on_trial.pop(request_id, None) is not None for request_id in list(gone)):
            self._on_change()

    def drop_seq(self, request_id: str, index: int, *, has_ended: bool = True) -> None:
        """One sequence has ended, or has come through."""
        trial = self._on_trial.get(request_id)
        if trial is None:
            return
        trial.n_made.pop(index, None)
        if not has_ended:
            self._through.add(request_id)
        if not trial.n_made:
            del self._on_trial[request_id]
            self._on_change()

    def _say(self) -> None:
        """That throughput is low for a while, and why; once."""
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "on trial, as an engine was lost while it computed them: %d requests, one at a time; others wait for"
                " them, at most %g s", len(self._suspects), ALONE_S,
            )  # fmt: skip

    def _begin(self, submit: Submit) -> None:
        request, trial = submit.request, submit.trial
        assert trial is not None
        self._on_trial[request.request_id] = _OnTrial(trial.n_tokens, dict.fromkeys(range(request.params.n), 0))

    def _is_alone(self, now_s: float) -> bool:
        """Whether all others wait now."""
        if now_s < self._gather_until_s:
            return True
        return self._alone_left_s > 0 and bool(self._suspects or self._on_trial)

    def _next_size(self) -> int:
        """Suspects to be tried together next: the root of how many there were when trials in groups began."""
        # A group that dies takes one restart more than its guilty member alone.
        if self._alone_left_s <= 0 and len(self._suspects) > FEW and self._n_restarts_left >= 2:
            self._group_size = max(self._group_size, math.isqrt(len(self._suspects) - 1) + 1)
        return self._group_size
