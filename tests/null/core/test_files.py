"""Files that somebody else names: what is no regular file is refused in words, and nobody waits for it."""

from __future__ import annotations

import os
import pathlib
import socket
import threading

import pytest

from quire.core.errors import ConfigError
from quire.core.files import (
    check_output,
    check_regular,
    open_output,
    open_regular,
    read_regular,
    write_output,
)


@pytest.fixture
def fifo(tmp_path: pathlib.Path) -> pathlib.Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_what_is_no_regular_file_is_not_read(tmp_path: pathlib.Path, fifo: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        (tmp_path / "link").symlink_to(fifo)
        kinds = {fifo: "a pipe", tmp_path / "link": "a pipe", tmp_path: "a folder", tmp_path / "socket": "a socket"}
        for path, kind in (kinds | {pathlib.Path("/dev/zero"): "a device"}).items():
            for attempt in (open_regular, check_regular, lambda path: read_regular(path, 10)):
                with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
                    attempt(path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")
    check_regular(tmp_path / "missing")


def test_what_is_read_is_bounded(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_regular(tmp_path / "file", 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than 99 bytes"):
        read_regular(tmp_path / "file", 99)


def test_a_pipe_is_written_if_somebody_reads_it(fifo: pathlib.Path) -> None:
    with pytest.raises(OSError, match="it is a pipe that nobody reads"):
        open_output(fifo, os.O_APPEND)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    got = bytearray()

    def read() -> None:
        os.set_blocking(reading, True)
        while data := os.read(reading, 65536):
            got.extend(data)

    descriptor = open_output(fifo, os.O_APPEND)
    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"x" * 500_000)  # more than the pipe holds: it waits for the reader
    reader.join(60)
    os.close(reading)
    assert len(got) == 500_000


def test_outputs(tmp_path: pathlib.Path, fifo: pathlib.Path) -> None:
    write_output(tmp_path / "new", "über")
    write_output(tmp_path / "new", "x")
    assert (tmp_path / "new").read_text() == "x"
    check_output(str(tmp_path / "new"), "--flag")
    for path, reason in (
        (tmp_path, "is a folder"), (fifo, "is a pipe"), (tmp_path / "none" / "x", "the folder does not exist"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^--flag .*{reason}"):
            check_output(str(path), "--flag")
