"""Files and batches over HTTP when things go wrong: races, lost contents, no room, slow readers, other tenants."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import json
import logging
import os
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import read_all
from test_http_batches import GOOD, N_SLOTS, TEXT, client_of, ended, form, line, rows, start, until
from test_http_connections import statuses
from test_http_hostile import check_error

from quire.serve.batch import files
from quire.serve.batch import worker as batch_worker
from quire.serve.batch.store import DATABASE, BatchStore

FORM = {"content-type": "multipart/form-data; boundary=xyz"}


@pytest.fixture
def batching(make_server: Any, tmp_path: Path) -> Any:
    server = make_server(data_dir=str(tmp_path / "data"))
    server.llm.ready.max_num_seqs = N_SLOTS
    return server


@pytest.fixture
def tenants(make_server: Any, tmp_path: Path) -> Callable[..., Any]:
    """A server with the tenants a and b, and their clients."""

    def make(a: dict[str, Any] | None = None, **options: Any) -> tuple[Any, openai.OpenAI, openai.OpenAI]:
        keys = tmp_path / "keys.json"
        keys.write_text(json.dumps({"keys": [{"key": "k-a", "name": "a", **(a or {})}, {"key": "k-b", "name": "b"}]}))
        server = make_server(data_dir=str(tmp_path / "data"), api_key_file=str(keys), **options)
        server.llm.ready.max_num_seqs = N_SLOTS
        clients = [openai.OpenAI(base_url=server.base + "/v1", api_key=f"k-{name}", max_retries=0) for name in "ab"]
        return server, clients[0], clients[1]

    return make


def content(server: Any, file_id: str) -> Path:
    return Path(server.config.data_dir) / "files" / file_id


def check_canary(server: Any, client: openai.OpenAI) -> None:
    """A whole batch still works, and its bytes are right."""
    done = ended(client, start(client, line("canary")).id)
    assert done.status == "completed" and set(rows(client, done.output_file_id)) == {"canary"}


def stored_bytes(server: Any) -> int:
    return sum(path.stat().st_size for path in (Path(server.config.data_dir) / "files").iterdir())


# ---- a file that goes


def test_creating_and_deleting_at_once(batching: Any) -> None:
    """Whoever comes first: the other is told. An open batch never lacks its input."""
    client = client_of(batching)
    outcomes = set()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number in range(40):
            file = client.files.create(file=("in.jsonl", io.BytesIO(line("a"))), purpose="batch")
            body = {"input_file_id": file.id, "endpoint": TEXT, "completion_window": "24h"}
            with batching.client() as one, batching.client() as other:
                first = pool.submit(one.post, "/v1/batches", json=body)
                second = pool.submit(other.delete, f"/v1/files/{file.id}")
                made, deleted = first.result(), second.result()
            outcomes.add((made.status_code, deleted.status_code))
            assert made.status_code in (200, 404), number
            if made.status_code == 200:
                assert ended(client, made.json()["id"]).status == "completed"
    assert outcomes <= {(200, 400), (404, 200), (200, 200)}, "deleted while it was open, or lost"
    check_canary(batching, client)


def test_a_lost_input_fails_its_batch_alone(batching: Any) -> None:
    client = client_of(batching)
    batching.engine.held = True
    first = start(client, b"".join(line(f"{i}") for i in range(100)))
    until(lambda: batching.engine.running, bool)
    queued = [start(client, line(f"{i}")) for i in range(3)]
    until(lambda: client.batches.retrieve(queued[0].id).status, lambda status: status == "in_progress")
    content(batching, first.input_file_id).unlink()
    content(batching, queued[1].input_file_id).unlink()
    content(batching, queued[2].input_file_id).write_bytes(b"{")
    batching.engine.held = False
    done = ended(client, first.id)
    assert done.status == "failed" and done.errors.data[0].code == "input_file_lost"
    assert "upload it again" in done.errors.data[0].message
    n_done = done.request_counts.completed
    assert 0 < n_done < 100 and len(rows(client, done.output_file_id)) == n_done, "what was done is kept"
    assert ended(client, queued[0].id).status == "completed"
    for batch in queued[1:]:
        assert ended(client, batch.id).errors.data[0].code == "input_file_lost"
    assert client.files.delete(first.input_file_id).deleted
    check_canary(batching, client)


def test_a_disk_that_cannot_be_read_for_a_while(batching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.batch.attempt.DISK_RETRY_S", 0.05)
    refusals = [0]

    def read(*args: Any) -> bytes:
        if refusals[0] > 0:
            refusals[0] -= 1
            raise OSError(5, "Input/output error")
        return real(*args)

    from quire.serve.batch import runner as batch_runner

    real = batch_runner.read_at
    monkeypatch.setattr(batch_runner, "read_at", read)
    client = client_of(batching)
    refusals[0] = 3
    assert ended(client, start(client, line("a") + line("b")).id).request_counts.completed == 2
    refusals[0] = 1 << 30
    done = ended(client, start(client, line("a") + line("b")).id)
    assert done.status == "failed" and done.errors.data[0].code == "input_file_unreadable"
    refusals[0] = 0
    check_canary(batching, client)


def test_a_lost_output(batching: Any) -> None:
    client = client_of(batching)
    done = ended(client, start(client, line("a")).id)
    content(batching, done.output_file_id).unlink()
    with batching.client() as http:
        error = check_error(http.get(f"/v1/files/{done.output_file_id}/content"), 500)
        assert error["code"] == "content_lost"
        assert http.get(f"/v1/files/{done.output_file_id}/content").headers["x-should-retry"] == "false"
    content(batching, done.input_file_id).write_bytes(b"x")
    with batching.client() as http:
        check_error(http.get(f"/v1/files/{done.input_file_id}/content"), 500)
    assert client.files.delete(done.output_file_id).deleted
    check_canary(batching, client)


def test_a_folder_of_contents_that_goes_comes_back(batching: Any) -> None:
    client = client_of(batching)
    start_and_lose = start(client, line("a"))
    ended(client, start_and_lose.id)
    for path in (Path(batching.config.data_dir) / "files").iterdir():
        path.unlink()
    (Path(batching.config.data_dir) / "files").rmdir()
    check_canary(batching, client)


# ---- the worker lives


def test_a_fault_of_the_worker_is_said_and_mended(batching: Any, monkeypatch: Any, caplog: Any) -> None:
    """Also one that no line or batch can answer for."""
    monkeypatch.setattr("quire.serve.ops.beside.RESTART_S", 0.05)
    client = client_of(batching)
    n_faults = [2]

    def endings(*args: Any) -> Any:
        if n_faults[0]:
            n_faults[0] -= 1
            raise RuntimeError("a bug")
        return real(*args)

    real = BatchStore.endings
    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr(BatchStore, "endings", endings)
        check_canary(batching, client)
    assert sum("ended unexpectedly" in record.message for record in caplog.records) == 2
    query = "select count(*) from lines where state >= 2"
    assert batching.state.store.store._database.execute(query).fetchone() == (0,), "no process has died"


def test_an_end_that_goes_wrong_is_tried_again_then_given_up(batching: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(batch_worker, "DISK_RETRY_S", 0.02)
    n_faults = [2]

    def append(path: Path, n_before: int, data: bytes) -> None:
        if n_faults[0]:
            n_faults[0] -= 1
            raise RuntimeError("a bug") if n_faults[0] % 2 else OSError(28, "No space left on device")
        real(path, n_before, data)

    from quire.serve.batch import end as batch_end

    real = batch_end.append
    monkeypatch.setattr(batch_end, "append", append)
    client = client_of(batching)
    assert ended(client, start(client, line("a")).id).request_counts.completed == 1
    n_faults[0] = 20
    done = ended(client, start(client, line("a")).id)
    assert done.status == "failed" and done.errors.data[0].code == "internal_error"
    n_faults[0] = 0
    check_canary(batching, client)
    assert stored_bytes(batching) == batching.state.store.store.space.used()


def test_a_record_that_cannot_be_read(batching: Any) -> None:
    client = client_of(batching)
    batching.engine.held = True
    batch = start(client, line("a") + line("b"))
    until(lambda: batching.engine.running, bool)
    other = start(client, line("c"))
    database = sqlite3.connect(Path(batching.config.data_dir) / DATABASE)
    with database:
        database.execute("update batches set record = 'nonsense' where id in (?, ?)", (batch.id, other.id))
    database.close()
    batching.engine.held = False
    for one in (batch, other):
        done = ended(client, one.id)
        assert done.errors.data[0].code == "record_damaged"
    assert {one.id for one in client.batches.list()} == {batch.id, other.id}
    check_canary(batching, client)


def test_a_damaged_database_leaves_the_rest_alone(batching: Any, monkeypatch: Any, caplog: Any) -> None:
    client = client_of(batching)
    check_canary(batching, client)

    def broken(self: BatchStore, work: Any) -> Any:
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error

    monkeypatch.setattr(BatchStore, "_transact", broken)
    with caplog.at_level(logging.ERROR), batching.client() as http:
        for _ in range(3):
            assert check_error(http.get("/v1/batches"), 500)["code"] == "storage_damaged"
            assert check_error(http.post("/v1/files", content=GOOD, headers=FORM), 500)["code"] == "storage_damaged"
            assert http.post(TEXT, json={"model": "fake", "prompt": "x", "max_tokens": 2}).status_code == 200
            assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        until(lambda: caplog.text, lambda text: "batches stop until the server is started again" in text)
    # Another server of this session has a folder too, whose damage it says by itself.
    said = [record.message for record in caplog.records if "is damaged (" in record.message]
    assert said and len(set(said)) == len(said) and "ended unexpectedly" not in caplog.text


def test_a_lock_that_cannot_be_had_is_said_and_waited_for(
    make_server: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(batch_worker, "POLL_S", 0.02)
    (tmp_path / "data" / "worker.lock").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        server = make_server(data_dir=str(tmp_path / "data"))
        batch = start(client_of(server), line("a"))
        until(lambda: caplog.text, lambda text: "worker.lock in the data folder cannot be locked" in text)
    assert client_of(server).batches.retrieve(batch.id).status == "validating"
    (tmp_path / "data" / "worker.lock").rmdir()
    assert ended(client_of(server), batch.id).status == "completed"


# ---- tenants beside each other


def test_a_tenant_with_a_large_batch_does_not_block_another(tenants: Any) -> None:
    server, anna, bert = tenants()
    server.engine.delay_s = 0.02
    large = start(anna, b"".join(line(f"{i}") for i in range(2000)))
    until(lambda: len(server.engine.running), lambda n: n >= N_SLOTS // 2)
    small = start(bert, b"".join(line(f"{i}") for i in range(10)))
    assert ended(bert, small.id).status == "completed"
    found = anna.batches.retrieve(large.id)
    assert found.status == "in_progress" and found.request_counts.completed < 2000
    anna.batches.cancel(large.id)
    ended(anna, large.id)
    check_canary(server, anna)


def test_a_tenant_that_has_used_up_its_rate_does_not_block_another(tenants: Any) -> None:
    server, anna, bert = tenants(a={"tokens_per_minute": 10})
    batch = start(anna, b"".join(line(f"{i}") for i in range(200)))
    until(lambda: anna.batches.retrieve(batch.id).request_counts.completed, bool)
    for _ in range(3):
        check_canary(server, bert)
    found = anna.batches.retrieve(batch.id)
    assert found.status == "in_progress" and found.request_counts.failed == 0, "it waits, it does not fail"
    anna.batches.cancel(batch.id)
    assert ended(anna, batch.id).status == "cancelled"
    check_canary(server, bert)


# ---- room


def upload_all(servers: list[Any], n: int, n_bytes: int, keys: list[str]) -> list[int]:
    """Statuses of uploads that come at once, slowly, so that they are all under way together."""

    async def one(http: httpx.AsyncClient, number: int, gate: asyncio.Barrier) -> int:
        data = form(("purpose", "", b"batch"), ("file", f"{number}", os.urandom(n_bytes // 2).hex().encode()))

        async def pieces() -> Any:
            yield data[: len(data) // 2]
            await gate.wait()
            yield data[len(data) // 2 :]

        headers = {**FORM, "authorization": f"Bearer {keys[number % len(keys)]}"}
        server = servers[number % len(servers)]
        answer = await http.post(server.base + "/v1/files", content=pieces(), headers=headers)
        return answer.status_code

    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=n)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            gate = asyncio.Barrier(n)
            found = await asyncio.gather(*(one(http, i, gate) for i in range(n)), return_exceptions=True)
            return [status if isinstance(status, int) else 0 for status in found]

    return asyncio.run(run())


def test_uploads_at_once_do_not_pass_the_limit(make_server: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Two processes on one folder; the client of a refused upload may see its connection end while it still sends."""
    monkeypatch.setattr(files, "WRITE_BYTES", 4096)
    servers = [make_server(data_dir=str(tmp_path), max_data_bytes=500_000, max_file_bytes=100_000) for _ in range(2)]
    found = upload_all(servers, 40, 40_000, ["any"])
    assert set(found) <= {200, 507, 0} and found.count(200) <= 12, found  # all may be refused, each half-way
    until(lambda: stored_bytes(servers[0]), lambda n: n == 40_000 * found.count(200))
    assert servers[0].state.store.store.space.used() == stored_bytes(servers[0]) <= 500_000
    with servers[0].client() as http:
        for file in http.get("/v1/files?limit=100").json()["data"]:
            assert http.delete(f"/v1/files/{file['id']}").status_code == 200
        assert servers[1].state.store.store.space.used() == stored_bytes(servers[0]) == 0
        assert http.post("/v1/files", content=GOOD, headers=FORM).status_code == 200
    check_canary(servers[0], client_of(servers[0]))


def test_a_share_for_each_tenant(tenants: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "WRITE_BYTES", 4096)
    server, anna, bert = tenants(max_data_bytes=500_000, max_data_bytes_per_key=100_000, max_file_bytes=60_000)
    found = upload_all([server], 12, 40_000, ["k-a"])
    assert set(found) <= {200, 507, 0} and found.count(200) <= 2
    full = form(("purpose", "", b"batch"), ("file", "a", b"x" * 59_000))
    with httpx.Client(base_url=server.base, headers={**FORM, "authorization": "Bearer k-a"}) as http:
        answers = [http.post("/v1/files", content=full) for _ in range(2)]
    error = check_error(answers[-1], 507)
    assert error["code"] == "storage_quota_exceeded" and "--max-data-bytes-per-key" in error["message"]
    check_canary(server, bert)
    for file in anna.files.list():
        anna.files.delete(file.id)
    check_canary(server, anna)


def test_outputs_that_do_not_fit_end_their_batch(make_server: Any, tmp_path: Path) -> None:
    server = make_server(data_dir=str(tmp_path), max_data_bytes=30_000, max_file_bytes=20_000)
    server.llm.ready.max_num_seqs = N_SLOTS
    client = client_of(server)
    batch = start(client, b"".join(line(f"{i}", {"model": "fake", "prompt": f"{i}"}) for i in range(150)))
    done = ended(client, batch.id)
    assert done.status == "failed" and done.errors.data[0].code == "storage_full"
    assert "--max-data-bytes" in done.errors.data[0].message
    found = rows(client, done.output_file_id)
    assert 0 < len(found) == done.request_counts.completed < 150, "what it has is kept"
    assert 29_000 < server.state.store.store.space.used() == stored_bytes(server) <= 30_000
    client.files.delete(done.output_file_id)
    check_canary(server, client)


def test_an_upload_that_is_left_gives_its_room_back(make_server: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "WRITE_BYTES", 100)
    server = make_server(data_dir=str(tmp_path), body_timeout=20)
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=xyz\r\n"
    with server.connect() as connection:
        connection.sendall(head + b"content-length: 99999\r\n\r\n" + GOOD[: GOOD.index(b"custom_id")] + b"x" * 5000)
        until(lambda: server.state.store.store.space.used(), bool)
    until(lambda: server.state.store.store.space.used(), lambda n: n == 0)
    until(lambda: stored_bytes(server), lambda n: n == 0)


# ---- readers


def slow_reader(server: Any, path: str) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    return connection


def put(client: openai.OpenAI, content: bytes) -> Any:
    return client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")


def test_nothing_foreign_in_a_file_that_is_read_too_slowly(make_server: Any, tmp_path: Path, caplog: Any) -> None:
    server = make_server(data_dir=str(tmp_path), write_timeout=0.3)
    data = random.Random(5).randbytes(24_000_000)
    file = put(client_of(server), data)
    with slow_reader(server, f"/v1/files/{file.id}/content") as connection:
        until(lambda: server.call(lambda: len(asyncio.all_tasks())), bool)
        time.sleep(1.5)  # it does not read for longer than it may
        found = read_all(connection)
    head, _, body = found.partition(b"\r\n\r\n")
    assert statuses(found) == [200] and b"content-length: 24000000" in head
    assert len(body) < len(data) and data.startswith(body), "something foreign is in it"
    assert b"error" not in found
    assert client_of(server).files.content(file.id).content == data
    assert "request" not in caplog.text, "a client that does not read is no failure of ours"
    assert "ASGI" not in caplog.text
    check_canary(server, client_of(server))


def test_nothing_foreign_in_a_file_that_gets_shorter(make_server: Any, tmp_path: Path, caplog: Any) -> None:
    server = make_server(data_dir=str(tmp_path))
    data = random.Random(6).randbytes(24_000_000)
    file = put(client_of(server), data)
    with slow_reader(server, f"/v1/files/{file.id}/content") as connection:
        connection.recv(100, socket.MSG_PEEK | socket.MSG_WAITALL)
        os.truncate(content(server, file.id), 1000)
        found = read_all(connection)
    body = found.partition(b"\r\n\r\n")[2]
    assert statuses(found) == [200] and len(body) < len(data) and data.startswith(body) and b"error" not in found
    assert "shorter than its record" in caplog.text and "ASGI" not in caplog.text
    check_canary(server, client_of(server))


def test_a_head_of_a_content(batching: Any) -> None:
    file = put(client_of(batching), b"x" * 5000)
    with batching.client() as http:
        answer = http.head(f"/v1/files/{file.id}/content")
        assert answer.status_code == 200 and answer.headers["content-length"] == "5000" and answer.content == b""
        assert http.get("/health").status_code == 200


def test_an_answer_that_was_cut_off_is_a_failure_of_its_line(batching: Any, monkeypatch: Any) -> None:
    """What an endpoint began and could not end is not the line's output."""
    from quire.serve.http.exchange import Exchange

    async def write(self: Exchange, data: bytes, *, more: bool = True) -> None:
        if self.is_background and b'"choices"' in data:
            raise RuntimeError("a bug")
        await real(self, data, more=more)

    real = Exchange.write
    client = client_of(batching)
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "write", write)
        done = ended(client, start(client, line("a")).id)
    row = rows(client, done.error_file_id)["a"]
    assert row["response"]["status_code"] == 500 and row["response"]["body"]["error"]["code"] == "internal_error"
    check_canary(batching, client)


# ---- long lines


def test_long_lines_leave_the_loop_alone_and_are_few_at_once(batching: Any, monkeypatch: Any) -> None:
    """Nothing that grows with a line is done on the loop, and the bytes of what runs are bounded."""
    monkeypatch.setattr(batch_worker, "MAX_RUNNING_BYTES", 1_000_000)
    batching.engine.held = True
    loop_thread = batching.call(threading.get_ident)
    from quire.serve.batch import runner as batch_runner
    from quire.serve.batch import scan as batch_scan

    def watched(real: Any) -> Any:
        def work(*args: Any) -> Any:
            assert threading.get_ident() != loop_thread
            return real(*args)

        return work

    for module, name in ((batch_runner, "read_line"), (batch_scan, "custom_id_of"), (batch_runner, "read_at")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    client = client_of(batching)
    long = [line(f"{i}")[:-2] + b" " * 400_000 + b"}\n" for i in range(4)]
    batch = start(client, b"".join(long) + line("small"))
    until(lambda: len(batching.engine.running), lambda n: n == 2)
    time.sleep(0.2)
    assert len(batching.engine.running) == 2, "a third does not fit, and the small one does not pass it"
    batching.engine.held = False
    done = ended(client, batch.id)
    assert done.request_counts.completed == 5, done
