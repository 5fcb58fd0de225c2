"""/v1/files and /v1/batches with openai-python: whole batches, broken lines, restarts, cancels, full disks, owners."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serve_fakes import reply_to
from test_http_hostile import check_error

TEXT = "/v1/completions"
N_SLOTS = 32


def line(name: Any, body: dict[str, Any] | None = None, url: str = TEXT, **more: Any) -> bytes:
    body = {"model": "fake", "prompt": str(name), "max_tokens": 4} if body is None else body
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **more}).encode() + b"\n"


@pytest.fixture
def batching(make_server: Any, tmp_path: Path) -> Any:
    server = make_server(data_dir=str(tmp_path / "data"))
    server.llm.ready.max_num_seqs = N_SLOTS
    return server


def client_of(server: Any) -> openai.OpenAI:
    key = server.config.api_key or "unused"
    return openai.OpenAI(base_url=server.base + "/v1", api_key=key, max_retries=0)


def start(client: openai.OpenAI, content: bytes, endpoint: Any = TEXT, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    return until(
        lambda: client.batches.retrieve(batch_id),
        lambda batch: batch.status in ("completed", "failed", "cancelled", "expired"),
    )


def until(look: Callable[[], Any], good: Callable[[Any], bool], limit_s: float = 60) -> Any:
    end_s = time.monotonic() + limit_s
    while not good(found := look()):
        assert time.monotonic() < end_s, found
        time.sleep(0.02)
    return found


def rows(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    return {row["custom_id"]: row for row in map(json.loads, client.files.content(file_id).text.splitlines())}


def test_a_batch(batching: Any) -> None:
    client = client_of(batching)
    names = [f"line {i}" for i in range(100)]
    batch = start(client, b"".join(map(line, names)), metadata={"a": "b"})
    assert batch.status == "validating" and batch.object == "batch" and batch.metadata == {"a": "b"}
    done = ended(client, batch.id)
    assert done.status == "completed" and done.error_file_id is None and done.completed_at >= done.in_progress_at
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (100, 100, 0)
    found = rows(client, done.output_file_id)
    assert list(found) == names
    for name, row in found.items():
        assert row["error"] is None and row["response"]["status_code"] == 200
        assert row["response"]["request_id"].startswith("req_")
        text = row["response"]["body"]["choices"][0]["text"]
        assert text == reply_to(batching.llm.tokenizer.encode(name))[:4]
    assert [one.id for one in client.batches.list()] == [batch.id]
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.bytes == len(client.files.content(output.id).content)


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses"])
def test_every_endpoint(batching: Any, url: str) -> None:
    client = client_of(batching)
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "fake", "messages": messages, "max_tokens": 3}
    if url == "/v1/responses":
        body = {"model": "fake", "input": "x", "max_output_tokens": 3}
    done = ended(client, start(client, line("a", body, url), url).id)
    assert rows(client, done.output_file_id)["a"]["response"]["status_code"] == 200


def test_broken_lines_are_errors_of_their_own(batching: Any) -> None:
    client = client_of(batching)
    broken = [
        b"{\n", b"[]\n", b"\xff\xfe\n", b'{"custom_id": "no body", "url": "/v1/completions"}\n', line(5), line(""),
        line("get", method="GET"), line("other", url="/v1/chat/completions"), line("where", url="/metrics"),
        line("stream", {"model": "fake", "prompt": "x", "stream": True}),
        line("field", {"model": "fake", "prompt": "x", "echo": 1}), line("model", {"model": "x", "prompt": "x"}),
        line("body", ["x"]), line("twice"), line("twice"), b'{"custom_id": "deep", "body": ' + b"[" * 100_000 + b"\n",
        line("k" * 600),
    ]  # fmt: skip
    batch = start(client, line("good") + b"\n" + b"".join(broken) + b"   \n" + line("last")[:-1])
    done = ended(client, batch.id)
    assert done.status == "completed"
    assert done.request_counts.total == len(broken) + 2
    assert (done.request_counts.completed, done.request_counts.failed) == (3, len(broken) - 1)
    assert set(rows(client, done.output_file_id)) == {"good", "last", "twice"}
    errors = list(map(json.loads, client.files.content(done.error_file_id).text.splitlines()))
    assert len(errors) == len(broken) - 1
    answered = {row["custom_id"]: row["response"]["status_code"] for row in errors if row["response"] is not None}
    assert answered == {"field": 400, "model": 404}
    assert all(row["error"]["code"] and row["error"]["message"] for row in errors if row["response"] is None)
    (double,) = (row["error"]["message"] for row in errors if row["custom_id"] == "twice")
    assert double == "line 17: line 16 has this custom_id already."  # the second one is blank


def test_nothing_to_do_is_a_failure(batching: Any) -> None:
    client = client_of(batching)
    done = ended(client, start(client, b"\n \n").id)
    assert done.status == "failed" and done.errors.data[0].code == "invalid_input"


def test_cancel(batching: Any) -> None:
    client = client_of(batching)
    batching.engine.delay_s = 0.05
    batch = start(client, b"".join(line(f"{i}") for i in range(500)))
    until(lambda: batching.engine.running, bool)
    until(lambda: client.batches.retrieve(batch.id), lambda found: found.request_counts.completed > 0)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelled_at >= done.cancelling_at
    assert len(rows(client, done.output_file_id)) == done.request_counts.completed < 500
    until(lambda: batching.engine.running, lambda running: not running)
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(start_and_end(client).id)


def test_an_expired_batch_says_so_of_every_line_that_never_ran(batching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.batch.batches.WINDOW_S", 2)
    monkeypatch.setattr("quire.serve.batch.end.FILL_LINES", 7)
    client = client_of(batching)
    batching.engine.delay_s = 0.05
    batch = start(client, b"".join(line(f"{i}") for i in range(400)) + b"\n" + b"no json\n")
    done = ended(client, batch.id)
    assert done.status == "expired" and done.expired_at >= done.expires_at and done.completed_at is None
    good, errors = rows(client, done.output_file_id), rows(client, done.error_file_id)
    assert 0 < len(good) < 400 and set(good) | set(errors) == {f"{i}" for i in range(400)} | {None}
    assert not set(good) & set(errors) and len(good) + len(errors) == 401
    assert errors["399"] | {"id": ""} == {
        "id": "", "custom_id": "399", "response": None,
        "error": {"code": "batch_expired",
                  "message": "This request could not be executed before the completion window expired."},
    }  # fmt: skip
    assert (done.request_counts.completed, done.request_counts.failed) == (len(good), len(errors))
    until(lambda: batching.engine.running, lambda running: not running)


def start_and_end(client: openai.OpenAI) -> Any:
    return ended(client, start(client, line("a")).id)


def test_a_batch_goes_on_after_a_restart(make_server: Any, tmp_path: Path) -> None:
    first = make_server(data_dir=str(tmp_path))
    first.llm.ready.max_num_seqs = N_SLOTS
    first.engine.delay_s = 0.02
    batch = start(client_of(first), b"".join(line(f"{i}") for i in range(200)))
    until(lambda: client_of(first).batches.retrieve(batch.id), lambda found: found.request_counts.completed > 20)
    first.call(first.state.close)
    first.stop()
    n_made = len(first.engine.submitted)
    second = make_server(data_dir=str(tmp_path))
    done = ended(client_of(second), batch.id)
    assert done.status == "completed" and done.request_counts.completed == 200
    assert len(rows(client_of(second), done.output_file_id)) == 200
    assert len(second.engine.submitted) < 200 <= n_made + len(second.engine.submitted)


def test_draining_ends_nothing(batching: Any) -> None:
    client = client_of(batching)
    batching.engine.delay_s = 0.02
    batch = start(client, b"".join(line(f"{i}") for i in range(300)))
    until(lambda: batching.engine.running, bool)
    batching.call(lambda: setattr(batching.state, "draining", True))
    until(lambda: batching.engine.running or batching.state.live, lambda left: not left)
    batching.call(lambda: setattr(batching.state, "draining", False))
    assert ended(client, batch.id).request_counts.completed == 300


def test_one_of_several_processes_runs_the_batches(make_server: Any, tmp_path: Path) -> None:
    servers = [make_server(data_dir=str(tmp_path)) for _ in range(2)]
    clients = [client_of(server) for server in servers]
    batches = [start(client, b"".join(line(f"{i}") for i in range(20))) for client in clients * 2]
    for batch in batches:
        assert ended(clients[0], batch.id).request_counts.completed == 20
        assert ended(clients[1], batch.id).status == "completed"
    ran = [server for server in servers if server.engine.submitted]
    assert len(ran) == 1 and len(ran[0].engine.submitted) == 80
    first, other = ran[0], next(server for server in servers if server is not ran[0])
    first.call(first.state.close)
    first.stop()
    last = start(client_of(other), line("a"))
    until(lambda: client_of(other).batches.retrieve(last.id).status, lambda status: status == "completed", 20)
    assert len(other.engine.submitted) == 1


def test_a_line_that_comes_to_no_end_is_an_error(batching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes, *more: Any) -> Any:
        if b"bad" in data:
            raise RuntimeError("a bug")
        return real(data, *more)

    from quire.serve.batch import runner as batch_runner

    real = batch_runner.read_line
    monkeypatch.setattr(batch_runner, "read_line", read)
    client = client_of(batching)
    done = ended(client, start(client, line("good") + line("bad") + line("fine")).id)
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    row = json.loads(client.files.content(done.error_file_id).text)
    assert row["custom_id"] == "bad" and row["error"]["code"] == "internal_error"


def test_batches_leave_room(batching: Any) -> None:
    client = client_of(batching)
    batching.engine.held = True
    start(client, b"".join(line(f"{i}") for i in range(300)))
    until(lambda: len(batching.engine.running), lambda n: n == N_SLOTS - N_SLOTS // 8)
    time.sleep(0.2)
    assert len(batching.engine.running) == N_SLOTS - N_SLOTS // 8
    batching.engine.held = False
    with batching.client() as plain:
        assert plain.post(TEXT, json={"model": "fake", "prompt": "x", "max_tokens": 2}).status_code == 200


def test_batch_lines_run_behind_everything(make_server: Any, tmp_path: Path) -> None:
    server = make_server(data_dir=str(tmp_path), engine_options={"scheduling_policy": "priority"})
    client = client_of(server)
    ended(client, start(client, line("a", {"model": "fake", "prompt": "x", "max_tokens": 2, "priority": -5})).id)
    assert server.engine.submitted[-1].priority == 2**31 - 1


def test_a_disk_that_refuses(batching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(batching)
    store = batching.state.store.store
    monkeypatch.setattr("quire.serve.batch.attempt.DISK_RETRY_S", 0.05)
    real, n_refused = store.lines.finish, []

    def full(*args: Any, **options: Any) -> None:
        if len(n_refused) < 3:
            n_refused.append(1)
            raise sqlite3.OperationalError("database or disk is full")
        real(*args, **options)

    monkeypatch.setattr(store.lines, "finish", full)
    done = ended(client, start(client, line("a") + line("b")).id)
    assert done.request_counts.completed == 2 and len(n_refused) == 3
    monkeypatch.setattr(store, "keep_upload", full)
    n_refused.clear()
    with pytest.raises(openai.InternalServerError) as caught:
        client.files.create(file=("in.jsonl", io.BytesIO(line("a"))), purpose="batch")
    assert caught.value.status_code == 507 and caught.value.code == "storage_failed"
    assert caught.value.response.headers["x-should-retry"] == "false"
    with batching.client() as plain:
        assert plain.get("/health").status_code == 200


# ---- files


def contents(server: Any) -> list[Path]:
    return list((Path(server.config.data_dir) / "files").iterdir())


def test_files(batching: Any) -> None:
    client = client_of(batching)
    made = [client.files.create(file=(f"{i}.jsonl", io.BytesIO(line(i) * (i + 1))), purpose="batch") for i in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in made[::-1]]
    assert client.files.content(made[3].id).content == line(3) * 4
    assert client.files.retrieve(made[2].id) == made[2] and made[2].filename == "2.jsonl"
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    assert len(contents(batching)) == 4
    batching.engine.held = True
    batch = client.batches.create(input_file_id=made[1].id, endpoint=TEXT, completion_window="24h")
    with pytest.raises(openai.BadRequestError):
        client.files.delete(made[1].id)
    batching.engine.held = False
    ended(client, batch.id)


def form(*parts: tuple[str, str, bytes], boundary: bytes = b"xyz", end: bytes = b"--\r\n") -> bytes:
    pieces = []
    for name, filename, content in parts:
        extra = f'; filename="{filename}"' if filename else ""
        head = f'content-disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode()
        pieces.append(b"--" + boundary + b"\r\n" + head + content + b"\r\n")
    return b"".join(pieces) + b"--" + boundary + end


GOOD = form(("purpose", "", b"batch"), ("file", "a.jsonl", line("a")))
FORMS = {
    "empty": b"",
    "not a form": b"{}",
    "no end": GOOD[:-4],
    "cut": GOOD[: len(GOOD) // 2],
    "no boundary": b"x" * 100_000,
    "no purpose": form(("file", "a", b"x")),
    "no file": form(("purpose", "", b"batch")),
    "empty file": form(("purpose", "", b"batch"), ("file", "a", b"")),
    "other purpose": form(("purpose", "", b"fine-tune"), ("file", "a", b"x")),
    "long purpose": form(("purpose", "", b"b" * 5000), ("file", "a", b"x")),
    "two purposes": form(("purpose", "", b"batch"), ("purpose", "", b"batch"), ("file", "a", b"x")),
    "two files": form(("purpose", "", b"batch"), ("file", "a", b"x"), ("file", "b", b"x")),
    "expiry": form(("purpose", "", b"batch"), ("expires_after[seconds]", "", b"9"), ("file", "a", b"x")),
    "many parts": form(*[("purpose", "", b"batch")] * 100),
    "no name": b"--xyz\r\ncontent-type: text/plain\r\n\r\nx\r\n--xyz--\r\n",
    "long headers": b"--xyz\r\n" + b"x: y\r\n" * 10_000 + b"\r\n\r\n--xyz--\r\n",
    "endless headers": b"--xyz\r\n" + b"x" * 100_000,
    "not utf-8": b'--xyz\r\ncontent-disposition: form-data; name="\xff"\r\n\r\nx\r\n--xyz--\r\n',
    "after the boundary": b"--xyzzy\r\n\r\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_bad_forms(batching: Any, name: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    with batching.client() as http:
        check_error(http.post("/v1/files", content=FORMS[name], headers=headers), 400)
        assert not contents(batching)
        assert http.post("/v1/files", content=GOOD, headers=headers).status_code == 200


def test_a_form_in_any_pieces(batching: Any) -> None:
    """Through the reader alone: every way to cut gives the same parts."""
    from quire.serve.http.multipart import MultipartReader, PartBegin

    data = form(("purpose", "", b"batch"), ("file", 'a"b', b"\r\n--xy\r\n\r\n--xyz" + b"z" * 50), ("e", "", b""))
    data = data.replace(b'a"b', b'a\\"b').replace(b"--xyzzz", b"--xyYzz")
    whole: list[Any] | None = None
    for size in [*range(1, 40), len(data)]:
        reader, parts = MultipartReader(b"xyz"), []
        for at in range(0, len(data), size):
            for found in reader.feed(data[at : at + size]):
                if isinstance(found, PartBegin):
                    parts.append([found, b""])
                else:
                    parts[-1][1] += found
        reader.finish()
        whole = whole or parts
        assert parts == whole and [part[0].name for part in parts] == ["purpose", "file", "e"]
    assert whole is not None and whole[2][1] == b"" and whole[1][1].startswith(b"\r\n--xy\r\n")


def test_limits_of_files(make_server: Any, tmp_path: Path) -> None:
    server = make_server(data_dir=str(tmp_path), max_file_bytes=10_000, max_data_bytes=25_000)
    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    with server.client() as http:
        big = form(("purpose", "", b"batch"), ("file", "a", b"x" * 10_001))
        check_error(http.post("/v1/files", content=big, headers=headers), 413)
        huge = form(("purpose", "", b"batch"), ("file", "a", b"x" * 200_000))
        check_error(http.post("/v1/files", content=huge, headers=headers), 413)
        fits = form(("purpose", "", b"batch"), ("file", "../../etc/x\x07", b"x" * 10_000))
        names = [http.post("/v1/files", content=fits, headers=headers).json()["filename"] for _ in range(2)]
        assert names == ["../../etc/x"] * 2, "a label, never a path"
        check_error(http.post("/v1/files", content=fits, headers=headers), 507)
        assert len(contents(server)) == 2
        for media in ("application/json", "multipart/form-data", "multipart/mixed; boundary=xyz", ""):
            check_error(http.post("/v1/files", content=GOOD, headers={"content-type": media}), 415)


def test_an_upload_that_stops(make_server: Any, tmp_path: Path) -> None:
    server = make_server(data_dir=str(tmp_path), body_timeout=0.3)
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=xyz\r\n"
    head += b"content-length: 9999\r\n\r\n"
    assert server.exchange(head + GOOD[:150]).startswith(b"HTTP/1.1 408")
    assert not contents(server)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"endpoint": "/metrics"}, 400, "endpoint"), ({"endpoint": 5}, 400, "endpoint"),
    ({"completion_window": "1h"}, 400, "completion_window"), ({"input_file_id": "file-none"}, 404, "input_file_id"),
    ({"input_file_id": "../x"}, 404, "input_file_id"), ({"metadata": {"k": "v" * 600}}, 400, "metadata"),
    ({"output_expires_after": {"seconds": 3600}}, 400, "output_expires_after"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED, ids=[f"{row[2]}-{i}" for i, row in enumerate(REFUSED)])
def test_bad_batches(batching: Any, fields: dict[str, Any], status: int, param: str) -> None:
    file = client_of(batching).files.create(file=("in.jsonl", io.BytesIO(line("a"))), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": TEXT, "completion_window": "24h"}
    with batching.client() as http:
        check_error(http.post("/v1/batches", json={**body, **fields}), status, param)


def test_bad_queries_and_ids(batching: Any) -> None:
    with batching.client() as http:
        for path in ("/v1/files", "/v1/batches"):
            for query in ("limit=0", "limit=x", "limit=99999", "limit=1&limit=2", "after=" + "x" * 200,
                          "order=asc", "limit=%ff", "&".join(["a=1"] * 50)):  # fmt: skip
                check_error(http.get(f"{path}?{query}"), 400)
            for name in ("none", "..%2f..%2fetc%2fpasswd", "%00", "x" * 5000):
                check_error(http.get(f"{path}/{name}"), 404)
            assert http.get(path).json() == {
                "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
            }  # fmt: skip


def test_what_belongs_to_another_is_not_there(make_server: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": "k-a", "name": "a"}, {"key": "k-b", "name": "b"}]}))
    server = make_server(data_dir=str(tmp_path / "data"), api_key_file=str(keys))
    one, other = (openai.OpenAI(base_url=server.base + "/v1", api_key=key, max_retries=0) for key in ("k-a", "k-b"))
    done = ended(one, start(one, line("a")).id)
    assert done.request_counts.completed == 1
    for look in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            look(done.id)
    for look in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            look(done.output_file_id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=done.input_file_id, endpoint=TEXT, completion_window="24h")
    assert list(other.files.list()) == [] == list(other.batches.list())


def test_without_a_folder_files_are_off(make_server: Any) -> None:
    server = make_server()
    with server.client() as http:
        for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/files/x/content")):
            error = check_error(http.request(method, path), 400)
            assert error["code"] == "files_disabled" and "--data-dir" in error["message"]
        answer = http.post("/v1/files", content=GOOD, headers={"content-type": "multipart/form-data; boundary=xyz"})
        assert check_error(answer, 400)["code"] == "files_disabled"


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    from quire.core.errors import ConfigError
    from quire.serve.batch.store import DATABASE, BatchStore

    BatchStore(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("pragma user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="another version"):
        BatchStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        BatchStore(tmp_path / "file" / "data")


def test_httpx_sees_a_list_of_pages(batching: Any) -> None:
    client = client_of(batching)
    made = [start(client, line("a")).id for _ in range(3)]
    with batching.client() as http:
        first = http.get("/v1/batches?limit=2").json()
        assert [one["id"] for one in first["data"]] == made[:0:-1] and first["has_more"]
        rest = http.get(f"/v1/batches?limit=2&after={first['last_id']}").json()
        assert [one["id"] for one in rest["data"]] == made[:1] and not rest["has_more"]
    assert isinstance(first, dict) and httpx
    for batch_id in made:
        ended(client, batch_id)


def test_lookalikes_of_a_boundary_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that is slow to read is read in turns with other work, whatever the size of its chunks."""
    from quire.serve.http import multipart

    monkeypatch.setattr(multipart, "TURN_S", 0.0)
    content = b"\r\n--xya" * 20_000
    data = form(("file", "a", content))

    async def chunks() -> AsyncIterator[bytes]:
        yield data

    async def read() -> tuple[int, int]:
        n_turns, is_over = 0, False

        async def other() -> None:
            nonlocal n_turns
            while not is_over:
                n_turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        found = [one async for one in multipart.read_parts(chunks(), b"xyz")]
        is_over = True
        await beside
        return sum(len(one) for one in found if isinstance(one, bytes)), n_turns

    n_bytes, n_turns = asyncio.run(read())
    assert n_bytes == len(content) and n_turns >= len(data) // multipart.FEED_BYTES


def test_a_broken_form_is_not_repeated(batching: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The library logs what it does not like; the log and the answer say nothing of the client's bytes."""
    with batching.client() as http:
        headers = {"content-type": "multipart/form-data; boundary=xyz"}
        answer = http.post("/v1/files", content=b"--xyz\r\nse\xc3cret: 1\r\n\r\n", headers=headers)
    assert check_error(answer, 400)["message"] == "The form cannot be read: the headers of a part are no headers."
    assert not [record for record in caplog.records if record.name.startswith("python_multipart")]


def test_unknown_fields_of_forms_and_queries_are_named(batching: Any) -> None:
    """As those of JSON: let through and named, refused when the request is strict."""
    data = form(("purpose", "", b"batch"), ("note", "", b"x" * 50_000), ("file", "a", b"x"))
    headers = {"content-type": "multipart/form-data; boundary=xyz"}
    with batching.client() as http:
        answer = http.post("/v1/files", content=data, headers=headers)
        assert answer.headers["x-ignored-params"] == "note" and answer.json()["bytes"] == 1
        strict = http.post("/v1/files", content=data, headers={**headers, "x-strict": "1"})
        assert check_error(strict, 400)["param"] == "note" and len(contents(batching)) == 1
        for path in ("/v1/files", "/v1/batches"):
            answer = http.get(f"{path}?limti=1&after=")
            assert answer.status_code == 200 and answer.headers["x-ignored-params"] == "limti"
            strict = http.get(f"{path}?limti=1", headers={"x-strict": "1"})
            assert "did you mean limit?" in check_error(strict, 400, "limti")["message"]
