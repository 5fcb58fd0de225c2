"""Sampling parameters by slot, as host arrays. Which rows of a step need what is decided here, without the device.

Invariant: `open` overwrites every value of a slot, so that a reused slot equals a fresh one.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire.compute.sample.edits import SlotEdits
from quire.core.plan import SlotOpen
from quire.kernels.sample import N_CONTROLS, N_HISTORY, Draw
from quire.kernels.sample.draw import INVERSE, UNIFORM, keyed_uniform, seed_key

NEVER: Final = 1 << 62
"""A position that does not come."""


class SlotTable:
    """Arrays of length n_slots; only the values of open slots mean something."""

    def __init__(self, n_slots: int) -> None:
        self.lines = np.zeros((N_CONTROLS, n_slots))
        """Controls of `kernels.sample` but for the random numbers, which depend on positions."""
        self.truncated = np.zeros(n_slots, bool)
        self.key = np.zeros(n_slots, np.int64)
        """`seed_key` of its seed."""
        self.histories = np.zeros((N_HISTORY - 3, n_slots))
        """Lines of `penalise` from the length of the prompt on."""
        self.n_top = np.full(n_slots, -1, np.int64)
        self.masked_until = np.zeros(n_slots, np.int64)
        self.penalised = np.zeros(n_slots, bool)
        self.edited = np.zeros(n_slots, bool)
        self.plain_from = np.zeros(n_slots, np.int64)
        """The position from which on a token depends on its logits and controls alone, and nothing else is wanted:
        `NEVER` for a slot that is edited or penalised, or that wants logprobs."""
        self.unedited_from = np.zeros(n_slots, np.int64)
        """The same without regard to penalties and logprobs."""
        self.edits: list[SlotEdits | None] = [None] * n_slots

    def open(self, opened: SlotOpen, logits_width: int) -> None:
        """Take over the parameters of a sequence. Raises ValueError if a token id is not below `logits_width`."""
        slot, params = opened.slot, opened.params
        edits = SlotEdits(params, logits_width)
        draw = Draw(
            temperature=np.array([params.temperature], np.float32),
            uniform=np.zeros(1),
            top_k=np.array([params.top_k if 0 < params.top_k < logits_width else 0], np.int32),
            top_p=np.array([params.top_p], np.float32),
            min_p=np.array([params.min_p], np.float32),
        )
        self.lines[:, slot] = draw.controls()[:, 0]
        self.truncated[slot] = draw.truncated[0]
        self.key[slot] = seed_key(np.array([params.seed]))[0]
        strengths = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.histories[:, slot] = opened.prompt_len, *np.array(strengths, np.float32)
        self.n_top[slot] = params.logprobs
        self.masked_until[slot] = params.masked_until if params.masked_end_ids else 0
        self.penalised[slot] = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.edited[slot] = edits.always
        self.unedited_from[slot] = NEVER if edits.always else self.masked_until[slot]
        is_special = self.penalised[slot] or params.logprobs >= 0
        self.plain_from[slot] = NEVER if is_special else self.unedited_from[slot]
        self.edits[slot] = edits

    def close(self, slot: int) -> None:
        """Forget a slot's edits; its numbers stay until the next `open` overwrites them, and nobody asks for them."""
        self.edits[slot] = None

    def controls(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float64 [N_CONTROLS, m]: what the tokens at `positions` int64 [m] of `slots` int64 [m] depend on."""
        lines = self.lines.take(slots, axis=1)  # contiguous lines
        random = lines[INVERSE] > 0
        if np.count_nonzero(random):
            lines[UNIFORM] = np.where(random, keyed_uniform(self.key[slots], positions), 0)
        return lines

    def penalties(self, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray, out: np.ndarray) -> int:
        """Into `out`, float64 [N_HISTORY, m]: the histories of these rows, those without a penalty of no tokens.

        rows, slots, positions: int64 [m]. Returns the largest position written.
        """
        at = np.where(self.penalised[slots], positions, 0)
        out[0], out[1], out[2] = rows, slots, at
        out[3:] = self.histories.take(slots, axis=1)
        return int(at.max(initial=0))
