"""Why drafts gained nothing in a row of `bench speculate`, from what a step costs and what was kept of it.

Owns the words and the arithmetic. Does not own the costs (`planner/drafts.py`) nor the rows (`speculate.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.planner.drafts import DraftCosts

SPREAD: Final = 0.02
"""Of a speed-up of which there is but one turn: turns of one engine differ by as much."""


def spread_of(plain_s: Sequence[float], drafting_s: Sequence[float]) -> float:
    """How far a speed-up may be off by chance: the standard error of those of the turns, `SPREAD` for one turn."""
    each = [plain / drafting for plain, drafting in zip(plain_s, drafting_s, strict=True)]
    return SPREAD if len(each) < 2 else statistics.stdev(each) / math.sqrt(len(each))


def why_no_gain(row: Mapping[str, Any], costs: DraftCosts | None, n_tokens: int) -> str:
    """One line, or nothing where drafts were verified and the speed-up is above 1 by more than its spread.

    row: of `bench speculate`. costs: None where no step was measured. n_tokens: that all sequences of the row made in
    their decode steps, over all timed turns.
    """
    is_gain = row["speedup"] - 1 > row["speedup_spread"]
    n_drafting, n_drafts = row["drafting_spans"], row["drafts_per_span"]
    if not n_drafting or not n_drafts:
        costly = f": with 1 draft a sequence it takes {_steps(1, row, costs)}" if costs is not None else ""
        begin = f"a speed-up of {row['speedup']:.2f} that is not that of drafts" if is_gain else "no gain"
        return f"{begin}: no step had drafts, as nothing was guessed or none was expected to pay{costly}"
    if is_gain:
        return ""
    n_kept = 1 + row["accepted_per_span"]
    n_spans = n_drafting + max(0.0, n_tokens - n_drafting * n_kept)  # a step without drafts keeps one token
    said = (
        f"no gain: {n_drafting / n_spans:.0%} of a sequence's steps had drafts, {n_drafts:.1f} each (acceptance"
        f" {row['acceptance']:.2f}); such a step keeps {n_kept:.2f} tokens"
    )
    if costs is None:
        return said
    return f"{said} and takes {_steps(n_drafts, row, costs)}, and pays where it keeps more than it takes"


def _steps(n_drafts: float, row: Mapping[str, Any], costs: DraftCosts) -> str:
    """Of a step in which all sequences have so many drafts."""
    n = row["batch_size"]
    guesses_s = n_drafts * (costs.place_s + n * costs.guess_s)
    took_s = costs.seconds(round(n * (1 + n_drafts))) + guesses_s + costs.exposed(n)
    return f"{took_s / costs.seconds(n):.2f} plain steps"
