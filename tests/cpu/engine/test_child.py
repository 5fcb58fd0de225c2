"""A process that is gone takes its process group with it, and only as long as the group's number is its own."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from quire.engine.child import Child

LEAVES_ONE = (
    "import os, subprocess, sys\n"
    "fd = int(sys.stdin.readline())\n"
    "one = subprocess.Popen(['sleep', '600'], pass_fds=())\n"
    "os.kill(one.pid, 19)\n"
    "os.write(fd, b'%d\\n' % one.pid)\n"
)
STAYS = LEAVES_ONE + "sys.stdin.readline()\n"


async def started(program: str) -> tuple[Child, int]:
    """And the process that it has started and stopped."""
    said: list[bytes] = []
    child = Child(("-c", program), lambda fd: b"%d\n" % fd, said.append)
    end_s = time.monotonic() + 30
    while not said:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    return child, int(said[0])


async def is_gone(pid: int) -> bool:
    end_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end_s:
            return False
        await asyncio.sleep(0.01)
    return True


async def test_the_group_ends_with_a_child_that_is_ended() -> None:
    child, left = await started(STAYS)
    assert await child.end() == -signal.SIGKILL
    assert await is_gone(left)


async def test_the_group_ends_when_the_end_is_seen_and_its_number_is_left_alone_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child, left = await started(LEAVES_ONE)
    assert await child.wait(30) == 0
    assert await is_gone(left)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("the number may be another group's"))
    assert await child.end() == 0 == await child.end()


async def test_a_group_of_somebody_else_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: int, number: int) -> None:
        asked.append(group)
        raise PermissionError

    child, left = await started(STAYS)
    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        child.say(b"\n")
        assert await child.wait(30) == 0 == await child.end()
    assert asked == [child.pid]
    os.kill(left, signal.SIGKILL)
