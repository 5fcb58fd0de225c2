"""What a Ray leaves behind, as it looks on the disk."""

from __future__ import annotations

import pathlib

from quire.engine.replicas.machine import remove_session


def test_a_session_goes_with_the_link_to_it_and_no_other_does(tmp_path: pathlib.Path) -> None:
    mine, other, latest = (tmp_path / name for name in ("session_1", "session_2", "session_latest"))
    for session in (mine, other):
        (session / "logs").mkdir(parents=True)
        (session / "logs" / "raylet.out").write_text("x")
    latest.symlink_to(other)
    remove_session(str(mine))
    assert sorted(tmp_path.iterdir()) == [other, latest] and (other / "logs" / "raylet.out").exists()
    remove_session(str(other))
    assert list(tmp_path.iterdir()) == []
