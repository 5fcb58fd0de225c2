"""The seam in motion: whatever takes a `StepPlan` and brings its `StepResult`. Owns the protocol only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from quire.core.errors import DeviceOutOfMemory, EngineError
from quire.core.events import EndKind
from quire.core.plan import SpanDrafts, StepMasks, StepPlan
from quire.core.result import StepResult


class Executor(Protocol):
    """Executes plans in the order in which they are submitted; several may be in flight."""

    def prepare(self, plan: StepPlan) -> None:
        """This plan is submitted next, as soon as the newest step has its masks: there is time until then."""
        ...

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step and return at once. A step that fails as a whole carries its exception in the future."""
        ...

    def drafts(self) -> Future[list[SpanDrafts]]:
        """Of each masked span of the newest plan, which `masks_drafts`. Empty if the step has failed before."""
        ...

    def mask(self, masks: StepMasks) -> None:
        """The masks of the newest plan, which has `masked` spans: its tokens are chosen now."""
        ...

    def shutdown(self) -> None:
        """Wait for what runs, free the device. Nothing may be submitted afterwards."""
        ...


class RanksLost(EngineError):
    """A rank is gone, or makes no progress: those that are left cannot go on, and are ended. kind: how it ended."""

    def __init__(self, message: str, kind: EndKind) -> None:
        super().__init__(message)
        self.kind = kind


class OtherRanks(Protocol):
    """Those beside rank 0, which is in the engine's process."""

    is_late: bool
    """One of them gives no sign of life."""
    on_late: Callable[[], None] | None
    """Called again and again while one is late and rank 0 waits for its device, by the thread that does: the engine's
    loop, or what wakes it."""
    on_loss: Callable[[RanksLost], None] | None
    """Told once they are lost, by a thread that watches: rank 0 may stand still in the middle of a step."""

    def wait_ended(self) -> None:
        """They are lost: returns when they are ended, and what they had to say is in the log."""
        ...


def is_out_of_memory(error: Exception) -> bool:
    """True if a step failed for want of memory, on whatever device; torch need not be there to know."""
    if isinstance(error, (MemoryError, DeviceOutOfMemory)):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return "OutOfMemoryError" in names or "can't allocate memory" in str(error)
