"""Where sequences stand when only the device knows: rows that were planned for the latest place move to the true one.

Owns the arithmetic on the device. Does not own the memory (`SlotTables.ends`, `behind`) nor when it is asked.
Invariants: nothing here waits for the device; rows that stand where they were planned keep every value.
"""

from __future__ import annotations

import torch

from quire.compute.runner.tables import SlotTables
from quire.kernels.sample.draw import INVERSE, UNIFORM, keyed_bits

NO_GUESS = -1
"""The row's token is in the token table."""
FIRST_PLACE = -2
"""From there down: the token is the guess number 0, 1, .. of those on the device."""


def fill_in(guesses: torch.Tensor, found: torch.Tensor) -> None:
    """Guesses of rows, int64 [n], in place: token ids or as above; places become the ids in `found`, int32."""
    ids = found[(FIRST_PLACE - guesses).clamp_(min=0)].long()
    guesses.copy_(torch.where(guesses < NO_GUESS, ids, guesses))


def move(tables: SlotTables, rows: torch.Tensor) -> None:
    """Rows of a step, in place. rows: int64 [2 + n_groups, n], slots, positions and cache locations."""
    slots, positions = rows[0], rows[1]
    positions -= tables.behind[slots]
    rows[2:] = tables.locs(slots, positions)


def write(tables: SlotTables, rows: torch.Tensor, guesses: torch.Tensor) -> None:
    """Token ids of guesses to where their rows stand."""
    slots, positions = rows[0], rows[1]
    known = tables.tokens[slots, positions]
    tables.tokens[slots, positions] = torch.where(guesses == NO_GUESS, known, guesses.to(torch.int32))


def move_sampled(tables: SlotTables, sampled: torch.Tensor, controls: torch.Tensor, keys: torch.Tensor) -> None:
    """Rows that tokens are chosen of, in place. sampled: int64 [2, m], slots and positions of the tokens; controls: as
    in `choose_by`, whose random numbers follow; keys: int64 [m], `seed_key` of each."""
    slots, positions = sampled[0], sampled[1]
    positions -= tables.behind[slots]
    uniform = keyed_bits(keys, positions) * 2.0**-53
    controls[UNIFORM] = torch.where(controls[INVERSE] > 0, uniform, 0.0)


def keep(
    tables: SlotTables,
    spans: torch.Tensor,
    most: int,
    stride: int,
    found: torch.Tensor,
    token_ids: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Moves the ends of slots behind what a step has kept of their spans.

    spans: int64 [5, n]: slot, first sampled row, number of drafts (at most `most`), place of the first draft in `found`
    (the next is `stride` behind it), and how many of them count (-1: those that equal the choice). token_ids, status:
    of the step's sampled rows.
    """
    slots, row, n_drafts, at, forced = spans[:, :, None]
    place = torch.arange(most + 1, device=spans.device)
    rows, drafts = (row + place).clamp_(max=len(token_ids) - 1), (at + place * stride).clamp_(max=len(found) - 1)
    is_right = torch.where(forced < 0, token_ids[rows] == found[drafts], place < forced)
    is_right &= (place < n_drafts) & (status[rows] == 0)
    n_right = is_right.long().cumprod(1).sum(1, keepdim=True)
    is_chosen = status[row + n_right] == 0
    tables.ends[slots] += n_right + is_chosen
