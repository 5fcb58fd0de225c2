"""API processes that die, hang or are stopped: replaced, the reason said, the server as a whole goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import pathlib
import re
import signal
import time

import httpx
import psutil
import pytest
from light_server import BODY, PATH, Light, light, wait_for

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError
from quire.serve.api_processes import MAX_FRUITLESS, STANDS_ABOVE, ApiProcesses
from quire.serve.config import ServerConfig


def pids(server: Light) -> set[int]:
    return {process.pid for process in server.api_processes()}


def test_one_that_dies_again_and_again(tmp_path: pathlib.Path) -> None:
    """Its place is filled each time, later and later, and the others serve all the time."""
    with light(tmp_path, "--api-processes", "3") as server:
        server.wait_ready()
        golden = server.canary()
        server.wait_processes(3)
        steady = server.api_processes()[1:]
        for number, sign in enumerate([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]):
            [victim] = set(server.wait_processes(3)) - set(steady)
            victim.send_signal(sign)
            wait_for(lambda pid=victim.pid: f"(pid {pid}) ended with" in server.log)
            assert server.process.poll() is None
            for _ in range(4):
                with contextlib.suppress(httpx.TransportError):  # its socket may still be among those that are chosen
                    assert server.canary() == golden
            assert len(re.findall("starting it again", server.log)) == number + 1
        server.wait_processes(3)
        server.wait_ready()
        assert {one.pid for one in steady} < pids(server)
        assert [server.canary() for _ in range(6)] == [golden] * 6
        said = re.findall(r"API process 0 \(pid \d+\) ended with ([^;]+); starting it again (now|in \S+ s)", server.log)
        assert [reason.split(",")[0] for reason, _ in said] == ["SIGKILL", "SIGKILL", "SIGSEGV", "exit status 0"]
        assert [when for _, when in said] == ["now", "in 0.5 s", "in 1 s", "in 2 s"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_those_that_cannot_answer_are_replaced(tmp_path: pathlib.Path) -> None:
    """One hangs and one is stopped, at the same time."""
    with light(tmp_path, "--api-processes", "3", "--api-stall-timeout", "6") as server:
        server.wait_ready()
        golden = server.canary()
        hanging, stopped, other = server.wait_processes(3)
        hanging.send_signal(signal.SIGUSR2)
        stopped.send_signal(signal.SIGSTOP)
        for victim in (hanging, stopped):
            wait_for(lambda one=victim: not one.is_running() or one.status() == psutil.STATUS_ZOMBIE)
        server.wait_processes(3)
        server.wait_ready()
        assert not {hanging.pid, stopped.pid} & pids(server) and other.pid in pids(server)
        assert [server.canary() for _ in range(6)] == [golden] * 6
        said = server.log
        assert "in stand_still" in said and f"(pid {hanging.pid}) gave no sign of life for 6 s" in said
        assert f"(pid {stopped.pid}) was stopped by a signal" in said


def test_time_in_which_the_parent_or_all_were_stopped_counts_against_nobody(tmp_path: pathlib.Path) -> None:
    """Two servers wait side by side."""

    def stop(name: str) -> None:
        (folder := tmp_path / name).mkdir()
        with light(folder, "--api-processes", "2", "--api-stall-timeout", "4") as server:
            server.wait_ready()
            server.wait_processes(2)
            before, everybody = pids(server), server.processes()
            stopped = [psutil.Process(server.process.pid)] if name == "parent" else everybody
            for process in stopped:
                process.suspend()
            time.sleep(5.5)
            if name == "parent":
                assert httpx.get(server.base + "/health").status_code == 200, "it is not needed for serving"
            for process in stopped:
                process.resume()
            time.sleep(2)
            assert pids(server) == before and "starting it again" not in server.log
            server.canary()

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(stop, ["parent", "all"]))


def test_the_server_ends_when_no_process_ever_serves(tmp_path: pathlib.Path) -> None:
    site = """
import os, sys
if "quire.serve.api_process" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGILL)
"""
    with light(tmp_path, "--api-processes", "2", site=site) as server:
        assert server.process.wait(120) == 1
        assert len(re.findall("starting it again", server.log)) >= 2 * MAX_FRUITLESS - 1
        last = server.log.strip().splitlines()[-1]
        assert last.startswith("quire: error: no API process can serve: each has ended 5 times")
        assert last.endswith("ended with SIGILL")


def test_the_server_ends_at_once_when_the_options_are_bad_for_all(tmp_path: pathlib.Path) -> None:
    site = """
import sys
if "quire.serve.api_process" in sys.orig_argv:
    print("bad", file=sys.stderr)
    sys.exit(2)
"""
    site = site.replace("sys.exit(2)", "import os; os._exit(2)")
    with light(tmp_path, "--api-processes", "2", site=site) as server:
        assert server.process.wait(60) == 2
        assert "no API process can serve with these options" in server.log.strip().splitlines()[-1]


def test_a_stop_for_all_processes_at_once_cuts_nobody_off(tmp_path: pathlib.Path) -> None:
    """As service managers send it: to the parent, the API processes and the engine, and twice."""
    with light(tmp_path, "--api-processes", "2", "--shutdown-timeout", "120") as server:
        server.wait_ready()
        server.wait_processes(2)
        body = BODY | {"prompt": [204, 0], "max_tokens": 60, "stream": True}
        with contextlib.ExitStack() as stack:
            http = stack.enter_context(httpx.Client(timeout=90))
            answers = [stack.enter_context(http.stream("POST", server.base + PATH, json=body)) for _ in range(4)]
            lines = [answer.iter_lines() for answer in answers]
            for one in lines:
                next(one)
            for process in server.processes():
                process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            for process in server.processes()[1:]:
                process.send_signal(signal.SIGTERM)
            for one in lines:
                assert "data: [DONE]" in list(one)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.log


def test_a_reason_that_all_have_is_said_once(tmp_path: pathlib.Path) -> None:
    with light(tmp_path, "--api-processes", "3", "--tokenizer", "/nowhere/at/all") as server:
        assert server.process.wait(120) == 2
        reasons = re.findall("^quire: error: .*/nowhere/at/all", server.log, re.MULTILINE)
        assert len(reasons) == 1, server.log
        assert server.log.strip().splitlines()[-1].startswith("quire: error: ")


@pytest.mark.parametrize(("told", "last"), [(True, STANDS_ABOVE), (False, "no such folder")])
def test_a_reason_that_the_engine_has_too_is_said_once(told: bool, last: str) -> None:
    """The engine finds out after an API process has said it."""

    async def refused() -> None:
        processes = ApiProcesses(EngineConfig(device="null"), ServerConfig(), ())
        if told:
            processes._on_refused("no such folder")
        loading: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        loading.set_exception(ConfigError("no such folder"))
        processes._check_loaded(loading)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=f"^{last}$"):
        asyncio.run(refused())
