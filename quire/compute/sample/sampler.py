"""The vectorised sampler: one call a step for all rows that want a token.

Owns the order of the parts (edits, penalties, choice, logprobs) and the per-slot parameters. Does not own the
arithmetic of a choice (`kernels/sample`) nor the token table, which it only reads.
Invariant: a row's token depends on its logits, tokens, parameters, seed and position, never on other rows.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import numpy as np
import torch

from quire.compute.sample import edits
from quire.compute.sample.logprobs import LogprobTensors, logprobs
from quire.compute.sample.slots import SlotTable
from quire.core.failure import Code
from quire.core.plan import SlotOpen
from quire.core.result import Fault
from quire.kernels.sample import (
    EMPTY,
    FINE,
    LONGEST_COMPARED,
    N_HISTORY,
    NON_FINITE,
    Choice,
    TokenMasks,
    choose_by,
    lines,
    penalise,
    widen,
)
from quire.kernels.transfer import upload

FAULT_CODES: Final = {NON_FINITE: Code.NON_FINITE_LOGITS, EMPTY: Code.EMPTY_MASK}
"""Status → code of `core.result.Fault`."""


MOST_TOP: Final = (1, 5, 20)
"""Most probable tokens that a captured choice finds: as many as are asked for, or more."""


class ChoiceKind(NamedTuple):
    """What a captured choice does beyond what all do."""

    truncates: bool
    """Some rows keep only a part of the vocabulary."""
    changes: bool = False
    """Penalties, of some rows, in a float32 copy of the logits."""
    n_top: int = -1
    """Of `MOST_TOP`, for the logprobs of each row; -1: nobody wants them."""


@dataclasses.dataclass(slots=True)
class Sampled:
    """Device tensors; row i answers row i of the logits."""

    token_ids: torch.Tensor
    """int32 [m]; 0 in a row that failed."""
    status: torch.Tensor
    """uint8 [m]: 0, or a key of `FAULT_CODES`."""
    logprobs: LogprobTensors | None
    """For the rows that asked."""

    @property
    def ok(self) -> torch.Tensor:
        """bool [m]: a token was chosen."""
        return self.status == FINE


def split_faults(
    token_ids: list[int], statuses: list[int], slots: np.ndarray
) -> tuple[list[int], list[int], list[Fault]]:
    """The tokens that were chosen, how many each row has, and the faults of rows without one. slots: of the rows."""
    if not any(statuses):
        return token_ids, [1] * len(token_ids), []
    tokens = [token for token, code in zip(token_ids, statuses, strict=True) if code not in FAULT_CODES]
    codes = [FAULT_CODES.get(code) for code in statuses]
    faults = [Fault(slot, code) for slot, code in zip(slots.tolist(), codes, strict=True) if code is not None]
    return tokens, [int(code is None) for code in codes], faults


class Sampler:
    """Samples for up to `n_slots` sequences. `vocab_limit` ids exist; logits beyond it are padding, never chosen."""

    def __init__(self, n_slots: int, logits_width: int, device: torch.device, vocab_limit: int | None = None) -> None:
        self._table = SlotTable(n_slots)
        self._device = device
        self._width = logits_width
        self._wide: torch.Tensor | None = None
        """float32 [n, logits_width] of changed logits: one for all choices, which are queued one after another."""
        self.vocab_limit = logits_width if vocab_limit is None else min(vocab_limit, logits_width)

    def open(self, opened: SlotOpen) -> None:
        """Take over a slot's parameters; nothing of its former owner is left."""
        self._table.open(opened, self._width)

    def close(self, slot: int) -> None:
        """The slot has no owner any more."""
        self._table.close(slot)

    def is_plain(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """True if the tokens of these rows depend on logits and `controls` alone, and nothing but them is asked for.

        slots, positions: host int64 [m], as in `sample`.
        """
        return not np.count_nonzero(positions < self._table.plain_from[slots])

    def kind(self, slots: np.ndarray, positions: np.ndarray, *, masked: bool) -> ChoiceKind | None:
        """What a captured choice for these rows does; None: their tokens are chosen by `sample`.

        masked: a mask changes the logits of some, which logprobs are not to see.
        """
        table, truncates = self._table, self.is_truncated(slots)
        if self.is_plain(slots, positions):
            return ChoiceKind(truncates)
        penalised, asked = table.penalised[slots], int(table.n_top[slots].max())
        n_top = -1 if asked < 0 else next((n for n in MOST_TOP if n >= asked), self._width + 1)
        too_long = np.count_nonzero(penalised & (positions > LONGEST_COMPARED))
        if too_long or n_top > self._width or np.count_nonzero(positions < table.unedited_from[slots]):
            return None
        return ChoiceKind(truncates, bool(penalised.any()) or (masked and asked >= 0), n_top)

    def histories(self, slots: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        """Into `out`, float64 [N_HISTORY, m]: what a captured choice that changes logits is told of these rows."""
        self._table.penalties(np.arange(len(slots)), slots, positions, out)

    def asked(self, slots: np.ndarray) -> np.ndarray:
        """int64 [m]: how many most probable tokens these rows want beside their own logprob; -1: nothing."""
        found: np.ndarray = self._table.n_top[slots]
        return found

    def keep_wide(self, n_rows: int) -> None:
        """Have memory at one address for so many rows of logits that captured choices change. Raises
        torch.OutOfMemoryError."""
        if self._wide is None:
            self._wide = torch.zeros((n_rows, self._width), dtype=torch.float32, device=self._device)

    def choose_captured(
        self,
        logits: torch.Tensor,
        controls: torch.Tensor,
        choice: Choice,
        masks: TokenMasks,
        kind: ChoiceKind,
        histories: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor | None:
        """As `sample`, with everything at fixed addresses and for any later contents: it can be captured.

        logits: [m, width], OVERWRITTEN; if the kind changes them, m rows are kept (`keep_wide`). controls, choice,
        masks: as in `choose_by`; histories, tokens: as in `penalise`. Returns `LogprobTensors.cells` of all rows, None
        if nobody wants logprobs.
        """
        raw = logits
        if kind.changes:
            logits = self._widened(logits)
            penalise(logits, histories, tokens, min(tokens.shape[1], LONGEST_COMPARED))
        choose_by(logits[:, : self.vocab_limit], controls, choice, masks, truncates=kind.truncates)
        return lines(raw, choice.token_ids, kind.n_top) if kind.n_top >= 0 else None

    def is_truncated(self, slots: np.ndarray) -> bool:
        """True if some of these rows keep only a part of the vocabulary."""
        return bool(np.count_nonzero(self._table.truncated[slots]))

    def reads_tokens(self, slot: int) -> bool:
        """True if the choice for an open slot depends on tokens before it: penalties, banned phrases."""
        edited = self._table.edits[slot]
        return bool(self._table.penalised[slot]) or (edited is not None and len(edited.phrases) > 0)

    def controls(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float64 [N_CONTROLS, m] for `kernels.sample.choose_by` on the first `vocab_limit` logits."""
        return self._table.controls(slots, positions)

    def keys(self, slots: np.ndarray) -> np.ndarray:
        """int64 [m]: `draw.seed_key` of their seeds."""
        found: np.ndarray = self._table.key[slots]
        return found

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """Choose the token at `positions[i]` of the sequence in `slots[i]` from `logits[i]`, without any wait.

        logits: [m, width] with contiguous rows, float32 or a type that `choose_by` takes, perhaps OVERWRITTEN (what is
        changed is changed in place, or in a float32 copy).
        slots, positions: host int64 [m]. tokens: int32 [n_slots, >= max position], row `slots[i]` holds the
        sequence's tokens before `positions[i]`; it is read only: the caller writes the new tokens.
        masks: for rows that may choose from some ids only, on top of their other parameters.
        """
        table = self._table
        asked = np.flatnonzero(table.n_top[slots] >= 0)
        masked = positions < table.masked_until[slots]
        edited = np.flatnonzero(table.edited[slots] | masked)
        is_changed = len(edited) > 0 or bool(table.penalised[slots].any())
        # no copy for what is asked where the logits stay as they are: what changes is another one, or nothing does
        stays = logits.dtype is not torch.float32 if is_changed else masks is None
        raw = None
        if len(asked):
            raw = logits if stays and len(asked) == len(slots) else logits[upload(asked, self._device)]
        if is_changed:
            logits = self._widened(logits)
            self._edit(logits, edited, masked, slots, positions, tokens)
            self._penalise(logits, slots, positions, tokens)
        controls = upload(table.controls(slots, positions), self._device)
        truncates = self.is_truncated(slots)
        choice = choose_by(logits[:, : self.vocab_limit], controls, masks=masks, truncates=truncates)
        found = None
        if raw is not None:
            targets = choice.token_ids if len(asked) == len(slots) else choice.token_ids[upload(asked, self._device)]
            found = logprobs(raw, targets, asked, table.n_top[slots[asked]])
        return Sampled(choice.token_ids, choice.status, found)

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        wide = self._wide
        return widen(logits, None if wide is None or len(logits) > len(wide) else wide[: len(logits)])

    def _edit(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        masked: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        tokens: torch.Tensor,
    ) -> None:
        table = self._table
        if len(rows):
            found = [one for one in (table.edits[slot] for slot in slots[rows]) if one is not None]
            edits.apply(logits, rows, found, slots[rows], positions[rows], masked[rows], tokens)

    def _penalise(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, tokens: torch.Tensor) -> None:
        table = self._table
        rows = np.flatnonzero(table.penalised[slots])
        if len(rows):
            of = slots[rows]
            histories = np.empty((N_HISTORY, len(rows)))
            longest = table.penalties(rows, of, positions[rows], histories)
            penalise(logits, upload(histories, self._device), tokens, longest)
