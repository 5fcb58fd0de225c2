"""Tests go on when the process that runs some of them crashes (pytest-xdist, `--dist loadfile`).

The test that it ran has failed, and others run what it had before it. pytest-xdist 3.8 gives out all of that again,
the crashed test with it, and waits for ever when a new process has got nothing but what is done.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class Scheduler(LoadFileScheduling):
    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that it ran; None if nothing was left to it."""
        left = {
            scope: [test for test, is_done in tests.items() if not is_done]
            for scope, tests in self.assigned_work.pop(node).items()
        }
        crashed = next((test for tests in left.values() for test in tests), None)
        for scope, tests in reversed(left.items()):
            if rest := [test for test in tests if test != crashed]:
                self.workqueue[scope] = dict.fromkeys(rest, False)
                self.workqueue.move_to_end(scope, last=False)
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """A process runs a test once it knows the next one, or that none will come."""
        if node not in self.registered_collections:  # it is new, and asks when it knows the tests
            return
        while not node.shutting_down and self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            with contextlib.suppress(OSError):  # it has crashed, too, and this comes back when that is heard
                self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    return Scheduler(config, log) if config.getoption("dist") == "loadfile" else None
