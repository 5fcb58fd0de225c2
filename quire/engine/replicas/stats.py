"""The figures of several engines as those of one. Counters only grow: what a replica counted stays when it is gone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Final

import msgspec

from quire.core.adapters import AdapterFacts
from quire.core.events import EngineReady, EngineStats

GAUGES: Final = (
    "n_running", "n_waiting", "n_pages", "n_pages_free", "n_pages_cached", "n_tree_nodes", "n_tokens_held",
    "n_slots_taken", "n_pages_saved", "steps_in_flight",
)  # fmt: skip
"""Sums over the replicas that live."""
COUNTERS: Final = (
    "steps", "prompt_tokens", "computed_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "n_drafts",
    "draft_tokens", "draft_saved_s", "preemptions",
)  # fmt: skip
MAX_MAP_BYTES: Final = 4096


@dataclasses.dataclass(slots=True)
class _Figures:
    ready: EngineReady
    stats: EngineStats
    before: EngineStats
    """Counts of the engines that this replica had before."""


class ReplicaFigures:
    """What each replica has said last, by its name."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Figures] = {}
        self._gone = EngineStats()
        self.joining: set[str] = set()
        """Those that have not yet all the adapters that the others have."""

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def names(self) -> list[str]:
        """Those that are loaded, in the order in which they came."""
        return list(self._replicas)

    def ready_of(self, replica: str) -> EngineReady:
        """What it said of itself. KeyError for one that is not here."""
        return self._replicas[replica].ready

    def introduce(self, replica: str, ready: EngineReady) -> None:
        """A replica is loaded, or has a new engine."""
        old = self._replicas.get(replica)
        before = EngineStats() if old is None else _counted(old.before, old.stats)
        self._replicas[replica] = _Figures(ready, EngineStats(), before)

    def note(self, replica: str, stats: EngineStats) -> None:
        """Its latest figures."""
        if replica in self._replicas:
            self._replicas[replica].stats = stats

    def dismiss(self, replica: str) -> None:
        """It is gone."""
        self.joining.discard(replica)
        old = self._replicas.pop(replica, None)
        if old is not None:
            self._gone = _counted(self._gone, old.before, old.stats)

    def stats(self) -> EngineStats:
        """The figures of all, without those of data-parallel ranks and of experts that move. The live view's tree has a
        root for each root of each; its map shows one after the other, the first `MAX_MAP_BYTES`."""
        every = [each.stats for each in self._replicas.values()]
        whole = _counted(self._gone, *(each.before for each in self._replicas.values()), *every)
        for name in GAUGES:
            setattr(whole, name, sum(getattr(one, name) for one in every))
        uneven = max(every, key=lambda one: one.expert_imbalance, default=whole)
        whole.expert_imbalance, whole.expert_map = uneven.expert_imbalance, uneven.expert_map
        whole.expert_layers = uneven.expert_layers
        whole.adapters = self._adapters()
        whole.running_adapters, whole.waiting_adapters = (
            list(dict.fromkeys(name for one in every for name in getattr(one, field)))
            for field in ("running_adapters", "waiting_adapters")
        )
        whole.is_late = any(one.is_late for one in every)
        whole.last_step_age_s = max((one.last_step_age_s for one in every), default=0.0)
        whole.is_asleep = bool(every) and all(one.is_asleep for one in every)
        for one in every:
            n_before = len(whole.tree)
            whole.tree += [
                (parent + n_before if parent >= 0 else -1, n_pages, n_seqs) for parent, n_pages, n_seqs in one.tree
            ]
        whole.page_map = b"".join(one.page_map for one in every)[:MAX_MAP_BYTES]
        return whole

    def content_of(self, adapter: str) -> str:
        """Hash of what a name stands for, the same at all replicas; empty: at one it is another, or there is none."""
        return next((facts.content_id for facts in self._adapters() if facts.name == adapter), "")

    def _adapters(self) -> list[AdapterFacts]:
        """Those that all have which have them all."""
        every = [each.stats.adapters for name, each in self._replicas.items() if name not in self.joining]
        shared = set.intersection(*(set(map(_identity, one)) for one in every)) if every else set()
        return [facts for facts in every[0] if _identity(facts) in shared] if every else []

    def ready(self, n_lost: int) -> EngineReady:
        """The facts of all as those of one engine, whose number is `n_lost`: slots and pages are summed, limits are
        those that every replica keeps. RuntimeError without any."""
        every = [each.ready for each in self._replicas.values()]
        if not every:
            raise RuntimeError("no replica is loaded")
        return msgspec.structs.replace(
            every[0],
            max_model_len=min(one.max_model_len for one in every),
            n_pages=sum(one.n_pages for one in every),
            max_num_seqs=sum(one.max_num_seqs for one in every),
            engine=n_lost,
            ends=[],
            no_determinism=next((one.no_determinism for one in every if one.no_determinism), ""),
        )


def _identity(facts: AdapterFacts) -> tuple[str, str]:
    """Requests may name an adapter wherever they are placed if all have this of it: one name may stand for others."""
    return facts.name, facts.content_id


def _counted(*every: EngineStats) -> EngineStats:
    """Their counters added up; no gauge."""
    whole = EngineStats(finished={}, accepted_at=[], tree=[])
    for name in COUNTERS:
        setattr(whole, name, sum(getattr(one, name) for one in every))
    for one in every:
        for reason, count in one.finished.items():
            whole.finished[reason] = whole.finished.get(reason, 0) + count
    accepted: Iterable[tuple[int, ...]] = itertools.zip_longest(*(one.accepted_at for one in every), fillvalue=0)
    whole.accepted_at = [sum(places) for places in accepted]
    return whole
