"""Bad K/V of an early prompt chunk is noticed chunks later, and then leaves the cache with everything built on it."""

from __future__ import annotations

from test_scheduler_cases import VOCAB, Rig

from quire.control.slot_params import slot_params
from quire.core.events import FinishReason
from quire.core.failure import Code
from quire.core.plan import StepPlan
from quire.engine.executors.digests import NON_FINITE, null_reference
from quire.engine.executors.null import NullExecutor

PROMPT = list(range(1, 31))


class PoisonedDevice(NullExecutor):
    """Writes non-finite K/V in one span of one step."""

    at: tuple[int, int] | None = None

    def poison(self, plan: StepPlan, row: int) -> bool:
        return (plan.step, row) == self.at


def poisoned_rig(at: tuple[int, int], **limits: object) -> Rig:
    rig = Rig(max_num_batched_tokens=8, **limits)
    config = rig.config
    rig.device = PoisonedDevice(
        n_pages=config.n_pages, page_size=config.page_size, max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len, vocab_size=VOCAB, clock=rig.clock, windows=config.kv.windows,
    )  # fmt: skip
    rig.device.at = at
    return rig


def poisoned_pages_in_tree(rig: Rig) -> list[int]:
    tree = rig.scheduler.live.cache.tree
    nodes = [node for root in tree.roots.values() for node in tree.subtree(root)]
    pages = [page for node in nodes for table in node.tables for page in table]
    return [page for page in pages if NON_FINITE in rig.device._rows[page]]


def test_an_unsampled_chunk_is_distrusted_when_the_fault_shows() -> None:
    rig = poisoned_rig(at=(0, 0))
    rig.submit("bad", PROMPT)
    rig.turn()
    assert poisoned_pages_in_tree(rig), "nobody can know yet"
    rig.run()
    assert rig.ends["bad", 0] is FinishReason.ERROR and not poisoned_pages_in_tree(rig)
    again = rig.submit("again", PROMPT)
    rig.run()
    rig.check(again)


def test_a_cached_prefix_under_a_fault_leaves_too() -> None:
    """The writer was cancelled before it sampled: its pages stay, and the first reader that samples pays for it."""
    rig = poisoned_rig(at=(0, 0))
    rig.submit("writer", PROMPT)
    rig.turn()
    rig.scheduler.cancel("writer")
    rig.submit("reader", PROMPT)
    assert rig.turn().spans.starts == [8], "the reader starts on the bad prefix"
    rig.run()
    assert rig.ends["reader", 0] is FinishReason.ERROR and not poisoned_pages_in_tree(rig)
    again = rig.submit("again", PROMPT)
    rig.run()
    rig.check(again)


def test_sharers_compute_again() -> None:
    rig = poisoned_rig(at=(0, 0), pipeline_depth=1)
    rig.submit("bad", PROMPT[:17])
    rig.turn()
    sharer = rig.submit("sharer", [*PROMPT[:16], *[50] * 40], 3)
    rig.run()
    assert rig.ends["bad", 0] is FinishReason.ERROR
    rig.check(sharer)
    assert rig.scheduler.stats().preemptions == 1 and not poisoned_pages_in_tree(rig)


def test_a_sound_neighbour_is_left_alone() -> None:
    rig = poisoned_rig(at=(0, 0))
    rig.submit("bad", PROMPT)
    rig.turn()
    other = rig.submit("other", [77] * 9)
    rig.run()
    rig.check(other)
    assert rig.scheduler.stats().preemptions == 0


def test_a_sample_that_copied_bad_rows_computes_again() -> None:
    """The prompt is shorter than a page: the copy is all that the two samples have in common."""
    rig = poisoned_rig(at=(0, 0), pipeline_depth=2)
    request = rig.submit("a", [1, 2, 3], 4, n=2)
    rig.plan()
    assert rig.plan().copies, "the second sample copies the first one's rows"
    rig.commit()
    assert rig.ends == {("a", 0): FinishReason.ERROR} and rig.scheduler.stats().preemptions == 1
    rig.commit()
    rig.run()
    assert rig.ends["a", 1] is FinishReason.LENGTH
    assert rig.said["a", 1] == null_reference([1, 2, 3], slot_params(request, 1), 4, VOCAB)


class FailingDevice(NullExecutor):
    """Finds no number in some spans, and writes none."""

    at: frozenset[tuple[int, int]]

    def fault(self, plan: StepPlan, row: int) -> Code | None:
        return Code.NON_FINITE_LOGITS if (plan.step, row) in self.at else None


def test_who_was_sent_back_for_its_later_pages_may_have_written_bad_ones_before() -> None:
    """It got a page of one that was cancelled in the middle of a step that fails, and its own step fails after that:
    what it has left in the tree is no good either."""
    rig = Rig(max_num_batched_tokens=5, max_num_seqs=4, pipeline_depth=3)
    rig.device.__class__, rig.device.at = FailingDevice, frozenset({(0, 0), (1, 0)})
    for name in "ac":
        rig.submit(name, [ord(name)])
    rig.plan()
    for name in "ac":
        rig.scheduler.cancel(name)
    reader = rig.submit("b", PROMPT[:9])
    assert rig.plan().spans.lengths == [5]
    rig.commit()
    live = rig.scheduler.live
    assert live.preemptions == 1 and live.cache.tree.n_pages == 1, "its first page is good, as far as is known"
    rig.commit()
    assert not live.cache.tree.n_pages
    rig.run()
    rig.check(reader)
