"""Beams take lanes: a chosen beam goes on in its parent's lane, or forks from it into another one.

A fork shares the full pages before its place by reference count, and copies the rows of the partial one before it
writes there (copy on write). The first child of a beam inherits its lane, pages and all; lanes of beams without a
child are given up first, so that their pages can be taken.
Owns those moves. Does not own which beams go on (`beam_group.py`).
Invariant: nothing is moved unless there are slots and pages for every beam of the group.
"""

from __future__ import annotations

from quire.control.beam_group import Beam, BeamGroup
from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq


def place_beams(live: LiveSeqs, builder: PlanBuilder, group: BeamGroup) -> bool:
    """Give every chosen beam a lane that is open in this plan; False if the group had to give way instead.

    No later sequence has a span in the plan yet: those that give way for it come after it in key order.
    """
    children: dict[Seq, list[Beam]] = {}
    for beam in group.beams:
        children.setdefault(beam.source, []).append(beam)
    spare = [lane for lane in group.lanes if lane not in children]
    for lane in spare:
        live.cache.release(lane, keep=False)
        lane.strip(live.cache.n_groups)
    if not _make_room(live, builder, group, list(children)):
        return False
    for source, (_, *others) in children.items():
        for beam in others:
            _fork(live, builder, group, beam, source, spare.pop() if spare else None)
    for source, (heir, *_) in children.items():
        _inherit(live, builder, group, heir, source)
    group.is_placed, group.is_ready = True, False
    group.sampled.clear()
    return True


def _make_room(live: LiveSeqs, builder: PlanBuilder, group: BeamGroup, heirs: list[Seq]) -> bool:
    """Slots for the forks, and a page in each table for every lane that needs one now."""
    n_forks = len(group.beams) - len(heirs)
    n_slots = max(0, len(group.beams) - len(group.lanes))
    n_pages = n_forks + sum(lane.planned >= lane.room for lane in heirs)
    while len(live.free_slots) < n_slots or not live.cache.has(n_pages * live.cache.n_groups):
        builder.is_tight = True
        victim = live.running[-1]
        live.preempt(victim)
        if victim.group is group:
            return False
    return True


def _fork(
    live: LiveSeqs, builder: PlanBuilder, group: BeamGroup, beam: Beam, source: Seq, lane: Seq | None
) -> None:
    """Into a lane that was given up, or a new one."""
    n_known = len(source.tokens)
    n_shared, n_rows = divmod(n_known, live.config.page_size)
    pages = [table[n_shared] for table in source.tables] if n_rows else []
    is_new = lane is None
    if lane is None:
        lane = live.new_lane(group)
    tail = beam.tail
    lane.tokens = beam.tokens
    live.cache.fork(lane, source, n_known)
    group.place(beam, lane)
    if is_new:
        live.admit(lane, n_known, pages)
    else:
        live.reopen(lane)
        lane.reenter(n_known, pages)
    for page, table in zip(pages, lane.tables, strict=False):
        builder.copy(page, table[n_shared], n_rows)
    _open(builder, lane, n_known, len(tail))


def _inherit(live: LiveSeqs, builder: PlanBuilder, group: BeamGroup, beam: Beam, lane: Seq) -> None:
    """Go on where the parent stands. Its slot is opened anew if the device has put another token there."""
    n_known, tail = len(lane.tokens), beam.tail
    lane.tokens += tail
    group.place(beam, lane)
    if tail == [group.sampled[lane]]:
        lane.prefill_end = n_known
        return
    live.reopen(lane)
    _open(builder, lane, n_known, len(tail))


def _open(builder: PlanBuilder, lane: Seq, n_known: int, n_tail: int) -> None:
    """Announce it. One token behind what is computed is a decode, more are a chunk like a prompt's."""
    lane.prefill_end = n_known if n_tail == 1 else n_known + n_tail
    lane.last_step = builder.step
    builder.open(lane)
