"""One step on its way: prepared for the forward strategies (`Step`), and what these made of it (`States`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from quire.compute.runner.batch_builder import FlatBatch
from quire.compute.runner.tables import PageWrites
from quire.compute.sample.sampler import Sampled
from quire.core.plan import StepPlan
from quire.kernels.attention.schedule.plan import SharedPrefix


@dataclasses.dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts that the device's token table lacks."""

    rows: np.ndarray
    """int64 [k]: rows of the step that stand on them."""
    at: np.ndarray
    """int64 [3, k]: slots, positions, token ids, or their places in `found`."""
    found: torch.Tensor | None = None
    """int32, on the device: where it guesses, the host may not know the tokens yet."""
    most_behind: np.ndarray | None = None
    """int64 [k']: how far before its planned start each span may begin (`SlotTables.behind`); None: none does."""


@dataclasses.dataclass(slots=True)
class Step:
    """A plan whose changes to slots and pages are applied on the host."""

    plan: StepPlan
    batch: FlatBatch
    writes: PageWrites
    """What the device's page table still lacks."""
    shared: list[SharedPrefix]
    wants_all: bool
    """States are wanted of other rows than those that tokens are sampled from."""
    adapters: np.ndarray | None = None
    """int32 [n]: place of the adapter of each row, -1: none; None: of all rows."""
    guesses: Guesses | None = None
    """To be in the token table before the rows are computed; None: they are, or there are none."""
    n_common: int = 0
    """Rows to which each data-parallel rank fills it up, as any of them may have it captured; 0: none has."""


@dataclasses.dataclass(slots=True)
class States:
    """States of a step's rows, before the final norm; on the device, overwritten by the next step."""

    hidden: torch.Tensor
    """[n, hidden]: all rows of the step, or the sampled ones in their order."""
    has_all: bool
    """The sampled ones are to be picked out of `hidden`."""
    sampled: torch.Tensor | None = None
    """int64 [m], which they are, if that is on the device already."""
    logits: torch.Tensor | None = None
    """float32 [m, vocab_size] of the sampled rows, if the strategy makes them in one go."""
    choose: Callable[[np.ndarray | None], Sampled] | None = None
    """The end of sampling, where the strategy has it captured or done: given the masks (int32 [k, words], the
    lines of `FlatBatch.mask_lines`) → the choice; new tokens are in the token table then."""
