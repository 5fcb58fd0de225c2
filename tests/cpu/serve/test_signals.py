"""Signals to a server's processes: files are read again, stacks are shown, nothing ends that should not."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import termios
import time

import httpx
import pytest
from light_server import BODY, PATH, Light, light, wait_for

ONE_OR_SEVERAL = pytest.mark.parametrize("flags", [[], ["--api-processes", "2"]], ids=["one", "several"])


def write_keys(path: pathlib.Path, *keys: str) -> None:
    path.write_text(json.dumps({"keys": [{"key": key} for key in keys]}))


def statuses(server: Light, key: str) -> set[int]:
    """Of requests with this key, at several connections."""
    headers = {"authorization": f"Bearer {key}"}
    return {httpx.post(server.base + PATH, json=BODY, headers=headers, timeout=60).status_code for _ in range(8)}


@ONE_OR_SEVERAL
def test_hangup_reads_keys_again_and_opens_the_record_again(tmp_path: pathlib.Path, flags: list[str]) -> None:
    """The key file has the size and time that it had, so that only the signal says that it has changed; the record was
    moved away as logrotate does."""
    keys, record = tmp_path / "keys.json", tmp_path / "record"
    write_keys(keys, "aaaa")
    stamp = keys.stat()
    with light(tmp_path, "--api-key-file", str(keys), "--record", str(record), *flags) as server:
        server.wait_ready()
        assert (statuses(server, "aaaa"), statuses(server, "bbbb")) == ({200}, {401})
        wait_for(lambda: len(record.read_text().splitlines()) == 8)
        time.sleep(1.1)  # the file is looked at once a second
        write_keys(tmp_path / "new", "bbbb")
        os.utime(tmp_path / "new", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        (tmp_path / "new").rename(keys)  # at once: between the two lines above it could be looked at
        assert (statuses(server, "aaaa"), statuses(server, "bbbb")) == ({200}, {401})
        wait_for(lambda: len(record.read_text().splitlines()) == 16)
        record.rename(tmp_path / "record.1")
        before = [process.pid for process in server.processes()]
        server.process.send_signal(signal.SIGHUP)
        wait_for(record.exists)
        wait_for(lambda: (statuses(server, "aaaa"), statuses(server, "bbbb")) == ({401}, {200}))
        n_old = len((tmp_path / "record.1").read_text().splitlines())  # one process may have turned later than another
        n_new = len(record.read_text().splitlines())
        assert n_old >= 16 and (statuses(server, "aaaa"), statuses(server, "bbbb")) == ({401}, {200})
        wait_for(lambda: len(record.read_text().splitlines()) >= n_new + 8)
        assert len((tmp_path / "record.1").read_text().splitlines()) == n_old
        assert [process.pid for process in server.processes()] == before
        assert "again" in server.log


@ONE_OR_SEVERAL
def test_signals_that_every_process_outlives(tmp_path: pathlib.Path, flags: list[str]) -> None:
    """To all of them: SIGHUP and SIGUSR1 many times, from the first moment on; SIGPIPE too once they serve (between
    fork and exec Python lets it end a child)."""
    with light(tmp_path, *flags) as server:
        wait_for(lambda: "SigCgt" in pathlib.Path(f"/proc/{server.process.pid}/status").read_text())
        wait_for(lambda: catches(server.process.pid, signal.SIGUSR1) and catches(server.process.pid, signal.SIGHUP))
        end_s = time.monotonic() + 4
        seen = set()
        while time.monotonic() < end_s:
            for process in server.processes():
                seen.add(process.pid)
                for number in (signal.SIGHUP, signal.SIGUSR1):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)
            time.sleep(0.01)
        server.wait_ready()
        golden = server.canary()
        processes = server.processes()
        # With the one for grammars, which the engine starts once it is loaded.
        assert {process.pid for process in processes} >= seen and len(seen) in ((4, 5) if flags else (2, 3))
        for process in processes:
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
                process.send_signal(number)
        time.sleep(0.5)
        assert server.canary() == golden and server.process.poll() is None
        assert "starting it again" not in server.log


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal."""
    lines = dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


@ONE_OR_SEVERAL
def test_stacks_of_every_process(tmp_path: pathlib.Path, flags: list[str]) -> None:
    with light(tmp_path, *flags) as server:
        server.wait_ready()
        for process in server.processes():
            before = len(server.log)
            process.send_signal(signal.SIGUSR1)
            wait_for(lambda: "(most recent call first):" in server.log[before:])  # noqa: B023
            wait_for(lambda: " in main\n" in server.log[before:] or " in run\n" in server.log[before:])  # noqa: B023


@ONE_OR_SEVERAL
def test_nohup_is_respected(tmp_path: pathlib.Path, flags: list[str]) -> None:
    """With SIGHUP ignored when it starts, it stays ignored: nothing is read again, and nothing ends."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = Light(tmp_path, *flags)
    finally:
        signal.signal(signal.SIGHUP, previous)
    try:
        server.wait_ready()
        for process in server.processes():
            process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        server.canary()
        assert server.process.poll() is None and "SIGHUP" not in server.log
    finally:
        server.stop()


@ONE_OR_SEVERAL
def test_a_closed_terminal_ends_the_server(tmp_path: pathlib.Path, flags: list[str]) -> None:
    """The system sends the same signal then; who has closed the window does not want a server that runs on."""
    master, slave = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    options = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": False}
    with light(tmp_path, *flags, preexec_fn=take_terminal, **options) as server:
        os.close(slave)
        server.wait_ready()
        os.kill(server.process.pid, signal.SIGHUP)
        time.sleep(0.5)
        server.canary()
        processes = server.processes()
        os.close(master)
        assert server.process.wait(60) == 0
        assert not any(process.is_running() for process in processes[1:])


def test_hangup_before_it_serves(tmp_path: pathlib.Path) -> None:
    """The command as it is installed, from before its libraries are loaded."""
    command = [sys.executable, "-m", "quire", "serve", "--device", "null", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: catches(process.pid, signal.SIGHUP))
        for _ in range(20):
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.02)
        assert process.stdout is not None
        for line in process.stdout:
            if "Quire serves" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
