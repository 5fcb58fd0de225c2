"""Marks of a prompt: one for each whole page of its beginning, equal where the prefix tree of a replica would match.

Owns how a prefix becomes marks. A mark hashes all tokens up to the end of its page, and the salt. Two prompts whose
marks collide are only routed alike: what is reused is decided by the tree, on exact tokens.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from typing import Final

MARK_BYTES: Final = 8
MAX_MARKS: Final = 4096
"""Of one prompt; what lies behind changes no decision."""


def page_marks(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Marks of the pages that a replica may know: the last token of a prompt is always computed."""
    n_pages = min((len(token_ids) - 1) // page_size, MAX_MARKS)
    data = array.array("I", token_ids[: n_pages * page_size])
    state = hashlib.blake2b(salt.encode(), digest_size=MARK_BYTES)
    marks = []
    for start in range(0, n_pages * page_size, page_size):
        state.update(data[start : start + page_size].tobytes())
        marks.append(state.copy().digest())
    return marks
