"""`quire serve --replicas` and `run-batch --replicas` on a Ray of this machine. Skipped without ray, as in CI.

pip install '.[ray]' && pytest tests/cpu/serve/test_replicas.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from quire.engine.replicas.machine import remove_session

pytest.importorskip("ray", reason="quire[ray] is not installed")

KEY = "secret"
START_S = 120.0
OPTIONS = {"model": "demo", "temperature": 0.0, "max_tokens": 150, "extra_body": {"ignore_eos": True}}


def found_below(process: subprocess.Popen[bytes], what: str) -> list[psutil.Process]:
    """Processes below it with this in their command lines."""
    found: list[psutil.Process] = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends just now
            found += [one] if what in " ".join(one.cmdline()) else []
    return found


class Cluster:
    """A server with two replicas of the demo model, and the clients for it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def client(self) -> openai.AsyncOpenAI:
        """One for each call, as each test has an event loop of its own."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def pids(self, what: str) -> list[int]:
        return [one.pid for one in found_below(self.process, what)]

    def n_slots(self) -> int:
        headers = {"authorization": f"Bearer {KEY}"}
        return int(httpx.get(f"{self.url}/v1/load", headers=headers).json()["max_num_seqs"])

    def routing(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {KEY}"}
        return dict(httpx.get(f"{self.url}/v1/engine", headers=headers).json()["stats"]["routing"])

    def wait_slots(self, n: int) -> None:
        end_s = time.monotonic() + START_S
        while self.n_slots() != n:
            assert time.monotonic() < end_s and self.process.poll() is None
            time.sleep(0.2)

    async def say(self, number: int) -> str:
        """The text, streamed to the end, or the code of the error event."""
        text, client = "", self.client()
        try:
            stream = await client.chat.completions.create(
                messages=[{"role": "user", "content": f"{number}: a story, please"}], stream=True, **OPTIONS
            )  # type: ignore[call-overload]
            async for event in stream:
                text += event.choices[0].delta.content or "" if event.choices else ""
        except openai.APIError as error:
            return str(error.code)
        finally:
            await client.close()
        return text

    async def ask(self, number: int) -> int:
        """Tokens of a whole answer."""
        async with self.client() as client:
            answer = await client.chat.completions.create(
                messages=[{"role": "user", "content": f"{number}: a poem, please"}], **OPTIONS
            )  # type: ignore[call-overload]
        return int(answer.usage.completion_tokens)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("replicas")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    file = folder / "cluster.yaml"
    file.write_text(
        f"replicas: 2\nport: {port}\napi_key: {KEY}\nmax_num_seqs: 32\nray_actor_options: {{num_cpus: 0.5}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "cluster", str(file)], stdout=log, stderr=log, start_new_session=True
        )
    found_one = Cluster(process, port)
    try:
        end_s = time.monotonic() + START_S
        while b"Quire serves" not in (folder / "log").read_bytes():
            assert process.poll() is None and time.monotonic() < end_s, (folder / "log").read_text()
            time.sleep(0.2)
        found_one.wait_slots(64)
        time.sleep(3)  # Ray tells a little later than a replica that it serves
        yield found_one
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        _, left = psutil.wait_procs(below, 10)
        assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        process.kill()


async def test_the_official_client_streams_and_is_refused_without_a_key(cluster: Cluster) -> None:
    texts = await asyncio.gather(*(cluster.say(number) for number in range(8)))
    assert all(len(text) > 50 for text in texts)
    async with asyncio.timeout(START_S):
        while any(one["prefix_pages"] < 8 for one in cluster.routing()["replicas"]):
            await asyncio.sleep(0.1)
    with pytest.raises(openai.AuthenticationError) as caught:
        await openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"


async def test_a_killed_replica_loses_no_request_that_has_sent_nothing(cluster: Cluster) -> None:
    whole = [asyncio.create_task(cluster.ask(number)) for number in range(12)]
    streams = [asyncio.create_task(cluster.say(100 + number)) for number in range(12)]
    await asyncio.sleep(1)
    psutil.Process(cluster.pids("ray::ServeReplica")[0]).kill()
    assert await asyncio.gather(*whole) == [150] * 12
    ends = await asyncio.gather(*streams)
    assert all(end == "engine_lost" or len(end) > 50 for end in ends)
    await asyncio.to_thread(cluster.wait_slots, 64)


async def test_a_rolling_update_loses_nothing(cluster: Cluster) -> None:
    before = set(cluster.pids("ray::ServeReplica"))
    cluster.process.send_signal(signal.SIGHUP)
    end_s = time.monotonic() + START_S
    number = 1000
    while before & set(cluster.pids("ray::ServeReplica")):
        assert time.monotonic() < end_s
        number += 4
        assert await asyncio.gather(*(cluster.ask(number + one) for one in range(4))) == [150] * 4
    assert len(await cluster.say(1)) > 50


def started(tmp_path: pathlib.Path, **options: object) -> subprocess.Popen[bytes]:
    """`quire cluster` with one replica; it writes to the file `log`."""
    text = json.dumps({"replicas": 1, "port": 0, "ray_actor_options": {"num_cpus": 0.5}} | options)
    (tmp_path / "cluster.yaml").write_text(text)
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "quire", "cluster", str(tmp_path / "cluster.yaml")]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def child_of(process: subprocess.Popen[bytes], what: str) -> psutil.Process:
    """The first process below it with this in its command line, once there is one."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        for one in found_below(process, what):
            return one
        time.sleep(0.05)
    raise AssertionError(f"no {what}")


def sessions(process: subprocess.Popen[bytes]) -> list[pathlib.Path]:
    """Folders of the Ray that this process has started."""
    return [*pathlib.Path("/tmp/ray").glob(f"session_*_{process.pid}")]


def test_a_refused_start_leaves_no_folder_of_ray(tmp_path: pathlib.Path) -> None:
    process = started(tmp_path, replicas=1000)
    try:
        child_of(process, "raylet")
        assert len(sessions(process)) == 1
        assert process.wait(START_S) == 2
        assert "1000 replicas need 0.5 CPU each" in (tmp_path / "log").read_text()
        assert sessions(process) == []
    finally:
        process.kill()


def test_an_interrupt_while_ray_starts_leaves_no_process(tmp_path: pathlib.Path) -> None:
    before = set(psutil.pids())
    process = started(tmp_path)
    try:
        child_of(process, "raylet")
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 130
        left = [one for one in psutil.process_iter() if one.pid not in before and one.name().startswith("ray")]
        _, left = psutil.wait_procs(left, 3)
        assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
        assert "Traceback" not in (tmp_path / "log").read_text()
    finally:
        process.kill()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_server_ends_though_a_replica_does_not(tmp_path: pathlib.Path, is_known: bool) -> None:
    """One of which it is known that it says nothing is killed at once, another one after the wait."""
    process = started(tmp_path)

    def wait_said(what: str) -> None:
        end_s = time.monotonic() + START_S
        while what not in (tmp_path / "log").read_text():
            assert process.poll() is None and time.monotonic() < end_s
            time.sleep(0.2)

    try:
        wait_said("Quire serves")
        below = psutil.Process(process.pid).children(recursive=True)
        child_of(process, "ray::ServeReplica").suspend()
        if is_known:
            wait_said("has said nothing for 2 s")
        process.send_signal(signal.SIGINT)
        assert process.wait(START_S) == 0
        said = (tmp_path / "log").read_text()
        assert ("not all replicas have ended in 15 s" in said) is not is_known and "quire: error" not in said
        (session,) = sessions(process)  # its logs may say why
        remove_session(str(session))
        _, left = psutil.wait_procs(below, 10)
        assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        process.kill()


def test_a_batch_over_two_replicas(tmp_path: pathlib.Path) -> None:
    ids = [f"r{number}" for number in range(150)]
    bodies = {"model": "demo", "prompt": "One, two,", "max_tokens": 4}
    lines = [json.dumps({"custom_id": one, "url": "/v1/completions", "body": bodies}) for one in [*ids, "r3"]]
    (tmp_path / "in").write_text("\n".join([*lines[:70], "", "{", *lines[70:]]) + "\n")
    command = [sys.executable, "-m", "quire", "run-batch", "-i", "in", "-o", "out", "--replicas", "2"]
    options = ["--ray-actor-options", '{"num_cpus": 0.5}']
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "150 lines answered, 2 failed" in done.stderr
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [*ids[:70], None, *ids[70:], "r3"]
    assert found[-1]["error"]["code"] == "duplicate_custom_id"
