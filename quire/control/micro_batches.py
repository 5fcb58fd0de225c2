"""Which decoding sequences a step takes where the device is a pipeline of stages.

A stage can begin a sequence's next token only when the last stage has chosen the one before. So each step takes an
equal part of the decoding sequences, and a sequence comes again when its token is back at the first stage: then every
stage always has a step to compute.
Owns that choice. Invariant: with nothing in flight the first sequence in key order has its turn: there is a plan.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from quire.control.live_seqs import LiveSeqs
from quire.control.seq import Seq


def micro_batch(live: LiveSeqs, step: int, committed: int) -> Iterator[Seq]:
    """Running sequences whose turn it is in this step, in key order, and all that have prompt left. Preemption may
    shorten the list meanwhile.

    committed: the last step whose result has come. Where there is nothing else to do, sequences whose token is not back
    are taken too: the first stage waits for it, but the host's work is done by then.
    """
    n_stages = live.config.n_stages
    decoding = [seq for seq in live.running if seq.prefill_end <= seq.planned < seq.limit]
    due = [seq for seq in decoding if seq.last_step <= max(committed, step - n_stages)]
    if not due and len(decoding) == len(live.running) and not len(live.waiting):
        due = decoding
    least, n_larger = divmod(len(decoding), n_stages)
    sizes = collections.Counter(seq.last_step for seq in decoding if seq.last_step > step - n_stages)
    has_larger = sum(size > least for size in sizes.values()) >= n_larger  # among the steps that others compute now
    most = max(1, least if has_larger else least + 1)
    chosen = set(sorted(due, key=_last_step)[:most])
    if committed == step - 1:  # those that are chosen may have to give way to the first, which never has to
        chosen.update(decoding[:1])
    for seq in live.running:
        if seq in chosen or seq.planned < seq.prefill_end or seq.search is not None:
            yield seq


def _last_step(seq: Seq) -> int:
    return seq.last_step
