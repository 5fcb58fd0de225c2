"""What groups of layers with a window leave behind: promises to the next turn of a conversation."""

from __future__ import annotations

import pytest
from control_model import layout_of
from test_scheduler_cases import Rig


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("windows", [(0, 1), (0, 2, 5), (7,), (0, 12, 13)])
def test_the_next_turn_finds_as_much_as_without_windows(windows: tuple[int, ...], depth: int) -> None:
    """Whatever the length of the answer: it ends anywhere in a page, and the hit ends at a page border."""
    for max_tokens in range(1, 9):
        rig = Rig(kv=layout_of(*windows), n_pages=200, pipeline_depth=depth)
        rig.submit("first turn", list(range(21)), max_tokens)
        rig.run()
        turn = list(range(21)) + rig.said["first turn", 0]
        found = rig.scheduler.live.cache.tree.match("", [*turn, 1], len(turn))
        assert found.n_pages == (len(turn) - 1) // rig.config.page_size
