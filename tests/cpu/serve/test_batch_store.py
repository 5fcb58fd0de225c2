"""The data folder by itself: room, locks, turns, damage, full disks, and folders of the version before."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import sqlite3
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest

from quire.core.errors import ConfigError
from quire.serve.batch.lines import custom_id_of
from quire.serve.batch.locks import FileLock, Holder, is_dead
from quire.serve.batch.outputs import ContentLost, append
from quire.serve.batch.queue import Line, ScannedLine, doubled
from quire.serve.batch.scan import InputScan, read_at
from quire.serve.batch.schema import BatchRecord, FileRecord
from quire.serve.batch.space import SpaceLimits, StorageFull
from quire.serve.batch.store import DATABASE, BatchStore, FileInUse, StoreDamaged

ENDPOINT = "/v1/completions"


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Any:
    made = BatchStore(tmp_path, SpaceLimits(whole=10_000, owner=6000))
    yield made
    made.close()


def add_file(store: BatchStore, owner: str, file_id: str, content: bytes = b"x\n") -> None:
    record = FileRecord(id=file_id, purpose="batch", filename="a", bytes=len(content), created_at=1)
    store.transact(lambda disk: disk.space.reserve(file_id, owner, len(content)))
    store.content_path(file_id).write_bytes(content)
    assert store.transact(lambda disk: disk.keep_upload(owner, record))


def add_batch(store: BatchStore, owner: str, batch_id: str, n_lines: int, length: int = 10) -> None:
    """A batch whose lines are known."""
    if store.file(owner, f"file-{owner}") is None:
        add_file(store, owner, f"file-{owner}")
    batch = BatchRecord(
        id=batch_id, endpoint=ENDPOINT, input_file_id=f"file-{owner}", completion_window="24h", created_at=1,
        expires_at=1 << 40,
    )  # fmt: skip
    lines = [ScannedLine(number, number * length, length, 0) for number in range(n_lines)]
    assert store.transact(lambda disk: disk.create_batch(owner, batch))
    store.transact(lambda disk: disk.lines.add_lines(batch_id, lines))
    store.transact(lambda disk: disk.begin_work(batch_id, n_lines))


def take(store: BatchStore, n: int, most_bytes: int = 1 << 30, running: Any = None, after: str = "") -> list[Line]:
    return store.transact(lambda disk: disk.lines.take_lines(n, most_bytes, running or {}, set(), after))[0]


# ---- whose turn it is


def test_owners_take_turns(store: BatchStore) -> None:
    add_batch(store, "a", "a1", 50)
    for owner in ("b", "c"):
        add_batch(store, owner, f"{owner}1", 3)
    assert [line.owner for line in take(store, 12)] == ["a", "b", "c"] * 3 + ["a"] * 3
    assert [line.number for line in take(store, 2)] == [6, 7]


def test_who_has_fewest_lines_running_comes_first(store: BatchStore) -> None:
    for owner in ("a", "b"):
        add_batch(store, owner, f"{owner}1", 50)
    assert [line.owner for line in take(store, 5, running={"a": 3})] == ["b"] * 3 + ["a", "b"]
    assert [line.owner for line in take(store, 1, after="a")] == ["b"]
    paused = store.transact(lambda disk: disk.lines.take_lines(3, 1 << 30, {}, {"b"}, ""))
    assert [line.owner for line in paused[0]] == ["a"] * 3 and paused[1]


def test_lines_wait_for_room_in_bytes(store: BatchStore) -> None:
    add_batch(store, "a", "a1", 5, length=100)
    assert len(take(store, 5, most_bytes=250)) == 2
    assert len(take(store, 5, most_bytes=50, running={"a": 2})) == 0
    assert len(take(store, 5, most_bytes=50)) == 1, "a line that is longer than all runs alone"


def test_a_batch_of_an_owner_comes_after_the_other(store: BatchStore) -> None:
    for name in ("a1", "a2"):
        add_batch(store, "a", name, 2)
    assert [(line.batch_id, line.number) for line in take(store, 9)] == [("a1", 0), ("a1", 1), ("a2", 0), ("a2", 1)]


def test_few_batches_of_an_owner_are_read_ahead(store: BatchStore) -> None:
    add_file(store, "a", "f")
    for name in ("a1", "a2"):
        add_batch(store, "a", name, 2)
    batch = BatchRecord(
        id="a3", endpoint=ENDPOINT, input_file_id="f", completion_window="24h", created_at=1, expires_at=9
    )
    store.transact(lambda disk: disk.create_batch("a", batch))
    assert store.transact(lambda disk: disk.lines.take_input(set(), "")) is None
    store.transact(lambda disk: disk.begin_end("a1", "cancelled"))
    line = store.transact(lambda disk: disk.lines.take_input(set(), ""))
    assert line is not None and line.batch_id == "a3" and line.is_whole_input


def test_queries_need_no_walk_over_all_lines(store: BatchStore) -> None:
    """Whose turn it is is found by indices, however many batches and lines there are."""
    from quire.serve.batch import queue as batch_queue

    for query in (batch_queue._IDLE_LINE, batch_queue._IDLE_INPUT, batch_queue._OWNERS_QUEUED,
                  batch_queue._OWNERS_RUNNING, batch_queue._SUSPECTS):  # fmt: skip
        values = ("a",) * query.count("?")
        plan = [row[3] for row in store._database.execute(f"explain query plan {query}", values)]
        walks = [step for step in plan if step.startswith("SCAN") and step != "SCAN found" and "INDEX" not in step]
        assert not walks, plan
        assert "USE TEMP B-TREE FOR ORDER BY" not in plan or query is batch_queue._SUSPECTS, plan


# ---- deaths


def test_marks_tell_what_ran_when_a_process_died(store: BatchStore) -> None:
    add_batch(store, "a", "a1", 4)
    taken = take(store, 3)
    assert store.transact(lambda disk: disk.lines.accuse()) == 3
    assert [line.number for line in take(store, 9)] == [3], "suspects wait for a trial"
    store.transact(lambda disk: disk.lines.release())
    for n_deaths in range(3):
        suspect = store.transact(lambda disk: disk.lines.suspect(set()))
        assert suspect is not None and suspect.deaths == 0 and suspect.number == n_deaths
        on_trial = store.transact(lambda disk, suspect=suspect: disk.lines.begin_trial(suspect))
        assert on_trial.is_on_trial
        assert store.transact(lambda disk: disk.lines.accuse()) == 1
    assert store.transact(lambda disk: disk.lines.convicts(2)) == []
    assert [line.deaths for line in store.transact(lambda disk: disk.lines.convicts(1))] == [1, 1, 1]
    assert store.transact(lambda disk: disk.lines.suspect({"a"})) is None, "its owner has to wait"
    store.transact(lambda disk: disk.lines.put_back(taken[0]))
    assert [line.number for line in take(store, 9)] == [0, 3]


# ---- room


def test_room_is_reserved_as_it_is_written(store: BatchStore) -> None:
    store.transact(lambda disk: disk.space.reserve("f1", "a", 4000))
    with pytest.raises(StorageFull) as own:
        store.transact(lambda disk: disk.space.reserve("f2", "a", 2001))
    assert own.value.code == "storage_quota_exceeded" and "4000" in own.value.message and "6000" in own.value.message
    store.transact(lambda disk: disk.space.reserve("f2", "b", 5000))
    with pytest.raises(StorageFull) as whole:
        store.transact(lambda disk: disk.space.reserve("f3", "c", 1001))
    assert whole.value.code == "storage_full" and "9000" not in whole.value.message, "what others have is not told"
    store.transact(lambda disk: disk.space.release("f1"))
    store.transact(lambda disk: disk.space.reserve("f3", "c", 1001))
    assert store.space.used() == 6001 and store.space.used("a") == 0


def test_results_count_and_moving_them_changes_nothing(store: BatchStore) -> None:
    add_batch(store, "a", "a1", 3)
    before = store.space.used("a")
    for number in (2, 0):
        store.transact(lambda disk, n=number: disk.lines.finish("a", "a1", n, b"o" * (n + 1), is_error=n == 0))
    assert store.space.used("a") == before + 6
    with pytest.raises(StorageFull):
        store.transact(lambda disk: disk.lines.finish("a", "a1", 1, b"o" * 6000, is_error=False))
    assert store.transact(lambda disk: disk.lines.left("a1", 9)) == [ScannedLine(1, 10, 10, 0)], "it is not lost"
    store.transact(lambda disk: disk.begin_end("a1", "failed", "storage_full", "no room"))
    piece = store.transact(lambda disk: disk.outputs.next_piece("a", "a1"))
    assert piece is not None
    for kind, (file_id, n_before) in piece.targets.items():
        append(store.content_path(file_id), n_before, piece.data[kind])
    store.transact(lambda disk: disk.outputs.moved("a1", piece))
    assert store.transact(lambda disk: disk.outputs.next_piece("a", "a1")) is None
    assert store.transact(lambda disk: disk.end_batch("a", "a1")) == "failed"
    assert store.space.used("a") == before + 6
    batch = store.batch("a", "a1")
    assert batch is not None and batch.output_file_id is not None and batch.error_file_id is not None
    assert store.content_path(batch.output_file_id).read_bytes() == b"ooo\n"
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.request_counts.total) == (1, 1, 3)


def test_what_the_dead_had_reserved_is_free_once_it_is_needed(tmp_path: pathlib.Path) -> None:
    code = (
        "import os, pathlib, sys; from quire.serve.batch.store import BatchStore\n"
        "store = BatchStore(pathlib.Path(sys.argv[1]))\n"
        "store.transact(lambda disk: disk.space.reserve('file-dead', 'a', 900))\n"
        "store.content_path('file-dead').write_bytes(b'x' * 900)\n"
        "print('ready', flush=True); sys.stdin.read(1); os._exit(1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    store = BatchStore(tmp_path, SpaceLimits(whole=1000))
    with pytest.raises(StorageFull):
        store.transact(lambda disk: disk.space.reserve("file-new", "b", 200))
    process.communicate(b"x")
    store.transact(lambda disk: disk.space.reserve("file-new", "b", 200))
    assert store.space.used() == 200 and not store.content_path("file-dead").exists()
    store.close()
    assert list((tmp_path / "holders").iterdir()) == []


def test_locks(tmp_path: pathlib.Path) -> None:
    first = FileLock.take(tmp_path / "lock")
    assert first is not None and FileLock.take(tmp_path / "lock") is None
    (tmp_path / "lock").unlink()  # by hand
    second = FileLock.take(tmp_path / "lock")
    assert second is not None, "the name is free"
    first.release()
    first.release()
    second.release(remove=True)
    assert not (tmp_path / "lock").exists()
    holder = Holder(tmp_path / "holders")
    assert not is_dead(tmp_path / "holders", holder.name)
    holder.close()
    assert is_dead(tmp_path / "holders", holder.name) and is_dead(tmp_path / "holders", "nobody")


# ---- deletions and creations


def test_an_open_batch_keeps_its_input(store: BatchStore) -> None:
    add_batch(store, "a", "a1", 1)
    with pytest.raises(FileInUse):
        store.transact(lambda disk: disk.delete_file("a", "file-a"))
    assert not store.transact(lambda disk: disk.delete_file("b", "file-a"))
    store.transact(lambda disk: disk.begin_end("a1", "cancelled"))
    with pytest.raises(FileInUse):
        store.transact(lambda disk: disk.delete_file("a", "file-a"))
    store.transact(lambda disk: disk.end_batch("a", "a1"))
    assert store.transact(lambda disk: disk.delete_file("a", "file-a"))
    assert not store.content_path("file-a").exists() and store.space.used() == 0


def test_a_deletion_that_does_not_hold_removes_nothing(store: BatchStore) -> None:
    add_file(store, "a", "f1")

    def work(disk: BatchStore) -> None:
        assert disk.delete_file("a", "f1")
        raise ValueError

    with pytest.raises(ValueError):
        store.transact(work)
    assert store.content_path("f1").exists() and store.file("a", "f1") is not None and store.space.used() == 2
    add_file(store, "a", "f2")
    assert store.content_path("f1").exists()


def test_contents_without_a_record_go(store: BatchStore) -> None:
    add_file(store, "a", "f1")
    store.transact(lambda disk: disk.space.reserve("f2", "a", 1))
    for name in ("f2", "f3"):
        store.content_path(name).write_bytes(b"x")
    for names in list(store.content_names()):
        store.transact(lambda disk, names=names: disk.unknown(names))
    assert {path.name for path in (store.folder / "files").iterdir()} == {"f1", "f2"}


# ---- disks


def test_a_full_disk_leaves_no_transaction_open(store: BatchStore) -> None:
    """As real as can be had: SQLite may not have another page."""
    add_batch(store, "a", "a1", 2)
    database = store._database
    n_pages = database.execute("pragma page_count").fetchone()[0]
    database.execute(f"pragma max_page_count = {n_pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.transact(lambda disk: database.execute("insert into results values ('b', 1, 0, ?)", (b"x" * 100_000,)))
    assert not database.in_transaction
    database.execute("pragma max_page_count = 1000000")
    store.transact(lambda disk: disk.lines.finish("a", "a1", 0, b"o", is_error=False))


class Refusing:
    """A connection that refuses some statements once."""

    def __init__(self, database: sqlite3.Connection, *statements: str) -> None:
        self._database = database
        self._statements = list(statements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def execute(self, statement: str, *values: Any) -> Any:
        if statement in self._statements:
            self._statements.remove(statement)
            raise sqlite3.OperationalError("disk I/O error")
        return self._database.execute(statement, *values)


@pytest.mark.parametrize("statements", [("commit",), ("commit", "rollback"), ("rollback",), ("begin immediate",)])
def test_a_commit_that_fails_is_taken_back(store: BatchStore, statements: tuple[str, ...]) -> None:
    real = store._database
    store._database = Refusing(real, *statements)  # type: ignore[assignment]

    def work(disk: BatchStore) -> None:
        disk.space.charge("a", 7)
        if statements == ("rollback",):
            raise ValueError

    with pytest.raises((sqlite3.OperationalError, ValueError)):
        store.transact(work)
    assert store.transact(lambda disk: disk.space.used("a")) == 0
    store.transact(lambda disk: disk.space.charge("a", 1))
    store._database = real
    assert store.space.used("a") == 1


def test_damage_is_said_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    store = BatchStore(tmp_path)
    add_batch(store, "a", "a1", 2)
    store._database.execute("pragma wal_checkpoint(truncate)")
    size = (tmp_path / DATABASE).stat().st_size
    with (tmp_path / DATABASE).open("r+b") as database:
        database.seek(4096)
        database.write(b"\xff" * (size - 4096))
    store._database.execute("pragma cache_size = 0")
    with caplog.at_level(logging.ERROR, "quire.batch"):
        for _ in range(5):
            with pytest.raises(StoreDamaged):
                store.transact(lambda disk: disk.batches("a", None, 10))
    assert [record.message.count("is damaged") for record in caplog.records] == [1]
    store.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / DATABASE).write_bytes(b"no database at all" * 1000)
    with pytest.raises(ConfigError, match="move it away"):
        BatchStore(tmp_path / "other")


def test_a_record_that_cannot_be_read_stands_for_itself_alone(store: BatchStore) -> None:
    for name in ("a1", "a2"):
        add_batch(store, "a", name, 1)
    store._database.execute("update batches set record = '{' where id = 'a1'")
    found = {batch.id: batch for batch in store.batches("a", None, 10)}
    assert found["a1"].errors is not None and found["a1"].errors["data"][0]["code"] == "record_damaged"
    assert found["a1"].status == "in_progress" and found["a2"].errors is None
    store.transact(lambda disk: disk.begin_end("a1", "failed", "record_damaged", "why"))
    assert store.transact(lambda disk: disk.end_batch("a", "a1")) == "failed"


# ---- contents


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
def test_lines_are_found_whatever_they_are(tmp_path: pathlib.Path, monkeypatch: Any, read_bytes: int) -> None:
    monkeypatch.setattr("quire.serve.batch.scan.READ_BYTES", read_bytes)
    monkeypatch.setattr("quire.serve.batch.scan.SOME_LINES", 2)
    good = [json.dumps({"custom_id": name}).encode() for name in ("a", "b", "a")]
    lines = [b"", good[0] + b"\r", b"  \t", b"{", good[1], b"x" * 300, b" " * 300, good[2], b"\xff", b"", good[1]]
    for end in (b"", b"\n"):
        path = tmp_path / "input"
        path.write_bytes(b"\n".join(lines) + end)
        scan = InputScan(path, path.stat().st_size, 100)
        found: list[ScannedLine] = []
        while not scan.is_done:
            found += scan.some()
        scan.close()
        assert [read_at(path, line.offset, line.length) for line in found] == [
            line.rstrip(b"\r") for line in lines if line.strip()
        ]
        assert [line.number for line in found] == [1, 3, 4, 5, 7, 8, 10] and scan.n_lines == 7
        assert [line.double for line in found] == [0, 0, 0, 0, doubled(1), 0, doubled(4)]
        with pytest.raises(ContentLost):
            InputScan(path, path.stat().st_size + 1, 100)
        with pytest.raises(ContentLost):
            read_at(path, found[-1].offset, found[-1].length + 2)


def test_an_input_that_gets_shorter_is_lost(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("quire.serve.batch.scan.READ_BYTES", 10)
    path = tmp_path / "input"
    path.write_bytes(b"{}\n" * 100)
    scan = InputScan(path, 300, 100)
    with path.open("r+b") as content:
        content.truncate(150)
    with pytest.raises(ContentLost):
        while not scan.is_done:
            scan.some()
    with pytest.raises(ContentLost):
        InputScan(tmp_path / "none", 1, 100)


def test_ids_of_lines_that_are_broken() -> None:
    def named(text: str) -> str | None:
        return custom_id_of(text.encode(), 1 << 20)

    assert named('{"custom_id": "a", "nonsense": [1]}') == "a"
    assert named('{"custom_id": "\\u00e9\\n"}') == "é\n"
    for text in ("{", "[]", '{"custom_id": 5}', '{"custom_id": null}', "{}", '{"custom_id": "%s"}' % ("x" * 513)):
        assert named(text) is None
    assert named(json.dumps({"custom_id": [[]] * 10_000})) is None
    assert named('{"custom_id": "%s"}' % ("\\ud83d\\ude00" * 512)) == "😀" * 512


def test_ids_of_lines_that_are_no_json() -> None:
    def named(text: str) -> str | None:
        return custom_id_of(text.encode("utf-8", "surrogateescape"), 1 << 20)

    for text in (
        '{"custom_id": "a", "body": {"messages": [}',
        '{"custom_id" :"a"',
        '{"custom_id": "a", "body": "without an end',
        '{"custom_id": "a",}',
        ' {"url": "\\"", "n" : 5, "method":"POST","custom_id": "a", "body": {"custom_id": "b", "x": [tru]}}',
        '{"custom_id": "a", "body": "\udcff"}',  # no UTF-8
        '{"custom_id": "a", "custom_id": "b", x}',
    ):
        assert named(text) == "a", text
    assert named('{"custom_id": "\\u00e9\\"\\n", x}') == 'é"\n'
    for text in (
        '{"custom_id": "a',
        '{"custom_id": "\udcff", x}',
        '{"custom_id": 5, x}',
        '{"body": {"custom_id": "b"}, x}',
        '{"body": {"custom_id": "b", x',
        '{"body": ["custom_id": "b", x',
        '{"x": "custom_id": "b"',
        '"custom_id": "b"',
        '{"custom_id": "%s", x}' % ("x" * 513),
        '{"body": {}, "custom_id": "a", x}',
    ):
        assert named(text) is None, text


def test_append_goes_on_where_the_record_is(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "files" / "out"
    append(path, 0, b"one\n")
    append(path, 4, b"two, never recorded\n")
    append(path, 4, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    with pytest.raises(ContentLost):
        append(path, 9, b"three\n")


# ---- the version before

V1 = """
create table files (
    id text primary key, owner text not null, purpose text not null, filename text not null, bytes integer not null,
    created_at integer not null);
create table batches (
    id text primary key, owner text not null, status text not null, created_at integer not null, record text not null);
create index batches_by_status on batches (status);
create table results (
    batch_id text not null, line integer not null, is_error integer not null, output blob not null,
    primary key (batch_id, line)) without rowid;
pragma user_version = 1;
"""


def test_a_folder_of_the_version_before_goes_on(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as old:
        old.executescript(V1)
        old.execute("insert into files values ('f', 'a', 'batch', 'n', 30, 1)")
        for status in ("validating", "in_progress", "cancelling", "completed"):
            record = {
                "id": status, "endpoint": ENDPOINT, "input_file_id": "f", "completion_window": "24h", "created_at": 1,
                "expires_at": 99, "status": status, "request_counts": {"total": 9, "completed": 4, "failed": 5},
            }  # fmt: skip
            row = (status, "a", status, 1, json.dumps(record))
            old.execute("insert into batches values (?, ?, ?, ?, ?)", row)
        old.execute("insert into results values ('in_progress', 1, 0, ?)", (b"out",))
        old.commit()
    store = BatchStore(tmp_path, SpaceLimits(whole=100))
    found = {batch.id: batch for batch in store.batches("a", None, 10)}
    assert {name: batch.status for name, batch in found.items()} == {
        "validating": "validating", "in_progress": "validating", "cancelling": "cancelling", "completed": "completed",
    }  # fmt: skip
    assert msgspec.to_builtins(found["completed"].request_counts) == {"total": 9, "completed": 4, "failed": 5}
    assert store.space.used("a") == 34
    assert [row[1] for row in store.endings()] == ["cancelling"]
    taken = [store.transact(lambda disk: disk.lines.take_input(set(), "")) for _ in range(3)]
    assert [line.batch_id for line in taken if line is not None] == ["validating", "in_progress"]
    lines = [ScannedLine(number, number * 10, 9, 0) for number in range(3)]
    store.transact(lambda disk: disk.lines.add_lines("in_progress", lines))
    store.transact(lambda disk: disk.begin_work("in_progress", 3))
    assert [line.number for line in take(store, 9)] == [0, 2], "a line that has its output does not run again"
    batch = store.batch("a", "in_progress")
    assert batch is not None and msgspec.to_builtins(batch.request_counts) == {"total": 3, "completed": 1, "failed": 0}
    with pytest.raises(FileInUse):
        store.transact(lambda disk: disk.delete_file("a", "f"))
    store.close()
    again = BatchStore(tmp_path)
    assert Counter(batch.status for batch in again.batches("a", None, 10))["validating"] == 1
    again.close()
