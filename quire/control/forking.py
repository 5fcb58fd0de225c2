"""Where beams go on: the first child of a beam in its parent's sequence, the others in forks of it.

A fork shares the full pages before its place by reference count, and copies the rows of the partial one before it
writes there (copy on write). Sequences of beams without a child are given up first, so that their pages can be taken,
and forks enter them.
Owns those moves. Does not own which beams go on (`beam_search.py`).
Invariant: nothing is moved unless there are slots and pages for every beam of the search.
"""

from __future__ import annotations

from quire.control.beam_search import Beam, BeamSearch
from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import Seq


def place_beams(live: LiveSeqs, builder: PlanBuilder, search: BeamSearch) -> bool:
    """Give every chosen beam a sequence that is open in this plan; False if the search had to give way instead.

    No later sequence has a span in the plan yet: those that give way for it come after it in key order.
    """
    children: dict[Seq, list[Beam]] = {}
    for beam in search.beams:
        children.setdefault(beam.source, []).append(beam)
    spare = [member for member in search.members if member not in children]
    for member in spare:
        live.caches[member.dp_rank].release(member, keep=False)
        member.strip(live.cache.n_groups)
    if not _make_room(live, builder, search, list(children)):
        return False
    for source, (_, *others) in children.items():
        for beam in others:
            _fork(live, builder, search, beam, source, spare.pop() if spare else None)
    for source, (heir, *_) in children.items():
        _inherit(live, builder, search, heir, source)
    search.is_placed, search.is_ready = True, False
    search.sampled.clear()
    return True


def _make_room(live: LiveSeqs, builder: PlanBuilder, search: BeamSearch, heirs: list[Seq]) -> bool:
    """Slots for the forks, and a page in each table for every member that needs one now."""
    dp_rank = search.root.dp_rank
    free_slots, cache = live.free_slots[dp_rank], live.caches[dp_rank]
    n_forks = len(search.beams) - len(heirs)
    n_slots = max(0, len(search.beams) - len(search.members))
    n_pages = n_forks + sum(member.planned >= member.room for member in heirs)
    while len(free_slots) < n_slots or not cache.has(n_pages * cache.n_groups):
        builder.tight.add(dp_rank)
        victim = live.last_running(dp_rank)
        live.preempt(victim)
        if victim.search is search:
            return False
    return True


def _fork(
    live: LiveSeqs, builder: PlanBuilder, search: BeamSearch, beam: Beam, source: Seq, member: Seq | None
) -> None:
    """Go on in a sequence that was given up, or a new one."""
    n_known = len(source.tokens)
    n_shared, n_rows = divmod(n_known, live.config.page_size)
    pages = [table[n_shared] for table in source.tables] if n_rows else []
    is_new = member is None
    if member is None:
        member = live.new_member(search)
    tail = beam.tail
    member.tokens = beam.tokens
    live.caches[source.dp_rank].fork(member, source, n_known)
    search.place(beam, member)
    if is_new:
        live.admit(member, n_known, pages)
    else:
        live.reopen(member)
        member.reenter(n_known, pages)
    for page, table in zip(pages, member.tables, strict=False):
        builder.copy(member, page, table[n_shared], n_rows)
    _open(builder, member, n_known, len(tail))


def _inherit(live: LiveSeqs, builder: PlanBuilder, search: BeamSearch, beam: Beam, member: Seq) -> None:
    """Go on where the parent stands. Its slot is opened anew if the device has put another token there."""
    n_known, tail = len(member.tokens), beam.tail
    member.tokens += tail
    search.place(beam, member)
    if tail == [search.sampled[member]]:
        member.prefill_end = n_known
        return
    live.reopen(member)
    _open(builder, member, n_known, len(tail))


def _open(builder: PlanBuilder, member: Seq, n_known: int, n_tail: int) -> None:
    """Announce it. One token behind what is computed is a decode, more are a chunk like a prompt's."""
    member.prefill_end = n_known if n_tail == 1 else n_known + n_tail
    member.last_step = builder.step
    builder.open(member)
