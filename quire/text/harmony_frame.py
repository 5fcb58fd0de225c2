"""A constraint amid the messages of the Harmony format: behind the model's reasoning, in the message to the user.

Does not own the grammars of heads and calls (`tool_grammar.py`). Invariant: what the model says to itself is free, and
bounded by the budget; a text that is constrained is the whole of the content.
"""

from __future__ import annotations

from typing import Final

import msgspec

from quire.core.structured import StructuredOutputsParams
from quire.text.harmony import CHANNEL, END, MESSAGE, ROLE, START
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_grammar import answer_head, note_rules

_FIRST: Final = f"{CHANNEL}analysis{MESSAGE}"
_NEXT: Final = f"{END}{START}{ROLE}"
"""Ends a message, and begins another one."""


def framed(
    constraint: StructuredOutputsParams | None, tokenizer: HfTokenizer, budget: int | None
) -> StructuredOutputsParams:
    """A constraint of the answer, None for none; the reasoning before it has `budget` tokens at most.

    Once they are spent the answer follows, or the call where there is no answer.
    """
    made, head = constraint or StructuredOutputsParams(), answer_head(tokenizer)
    if budget is not None:
        is_call = constraint is not None and constraint.kind == "calls"
        mark = _NEXT if is_call else f"{_NEXT}{CHANNEL}final{MESSAGE}"
        made = msgspec.structs.replace(made, begins_after=mark, may_begin_with=_FIRST, begins_within=budget)
    start = f"thought* {head} @body"
    if made.kind == "calls":
        start = "note* @calls" if budget is None else "thought? @calls"
    elif made.calls is not None:
        start = f"thought* ({head} @body | @calls)"
    return msgspec.structs.replace(made, frame=f"start: {start}\n{note_rules(tokenizer)}")
