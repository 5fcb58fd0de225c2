"""A state machine of hypothesis over files and batches: two tenants do anything in any order, disks and processes fail.

What must hold is in `check` (after every step) and `settle` (at the end, when everything has come to its end).
"""

from __future__ import annotations

import json
import pathlib
import random
import shutil
import sqlite3
import tempfile
from typing import Any

from batch_world import World
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.serve.batch import batches, files

OWNERS = ("anna", "bert")
SHM = pathlib.Path("/dev/shm")
KINDS = {"good": 30, "bad": 2, "raise": 1, "cut": 1, "broken": 2, "blank": 2, "double": 2, "long": 1, "poison": 1}
"""What becomes of a line, and how often."""
ENDS = {"completed", "failed", "cancelled", "expired"}
REASONS = {
    "internal_error": {"raise", "cut"}, "invalid_value": {"bad"},
    "duplicate_custom_id": {"double"}, "invalid_json": {"broken"}, "line_too_long": {"long"},
}  # fmt: skip
"""Code of a line's error → the lines that have it."""
FORM = {"content-type": "multipart/form-data; boundary=xyz"}
JSON = {"content-type": "application/json"}
SETTLE_S = 900
GUILTY_DEATHS = 3
MAX_DEATHS = 60
"""Deaths of processes within a settling, beyond which lines that kill are not found out."""


class File:
    """An input as the tenant knows it."""

    def __init__(self, owner: str, number: int, kinds: list[str], n_filler: int) -> None:
        self.owner = owner
        self.id = ""
        self.is_deleted = self.is_spoiled = False
        """Deleted through the API; removed or cut on the disk."""
        self.names: list[str | None] = []
        """Of its lines that are not blank."""
        self.kinds: list[str] = []
        lines = []
        for at, kind in enumerate(kinds):
            name = f"{owner}/{number}.{at}"
            if kind == "double" and self.names and self.names[-1] is not None:
                name = self.names[-1]
            body = {"name": name, "kind": kind, "n_filler": n_filler}
            line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
            text = json.dumps(line)
            if kind == "long":
                text += " " * 1200
            lines.append({"blank": "  ", "broken": "{"}.get(kind, text))
            if kind != "blank":
                self.names.append(None if kind in ("broken", "long") else name)
                self.kinds.append(kind)
        self.content = "\n".join(lines).encode() + b"\n"


class BatchMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        """hypothesis chooses what happens; `seed` how much, to which, and in which order."""
        self.chance = random.Random(seed)
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=SHM if SHM.is_dir() else None, prefix="quire-batches-"))
        self.whole = self.chance.choice([4000, 10_000, 100_000, 100_000])
        self.share = self.chance.choice([0, 0, self.whole // 3])
        self.world = World(self.folder, seed, whole=self.whole, owner=self.share)
        self.look = sqlite3.connect(self.folder / "quire.sqlite3", isolation_level=None, timeout=1)
        self.files: list[File] = []
        self.batches: dict[str, tuple[str, File]] = {}
        self.cancelled: set[str] = set()
        self.is_troubled = False
        self.n_made = 0
        for owner in OWNERS * 2:
            self.upload_of(owner)

    # ---- what tenants do

    @rule()
    def upload(self) -> None:
        self.upload_of(self.chance.choice(OWNERS))

    def upload_of(self, owner: str) -> None:
        """An input, on which batches are made at once, mostly."""
        self.n_made += 1
        chance = self.chance
        is_cut = chance.random() < 0.15
        kinds = chance.choices(list(KINDS), list(KINDS.values()), k=chance.randrange(1, 10))
        file = File(owner, self.n_made, kinds, chance.choice([0, 0, 40, 250]))
        n_batches = chance.choice([0, 0, 1, 1, 2])
        head = b'--xyz\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        head += b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        whole = head + file.content + b"\r\n--xyz--\r\n"
        parts = [whole[at : at + 97] for at in range(0, len(whole), 97)]
        if is_cut:
            parts = [*parts[: len(parts) // 2], b"CUT"]

        async def send() -> None:
            status, data = await self.world.ask(owner, files.serve_file_upload, parts, FORM)
            assert status in ((0, 507) if is_cut else (200, 413, 507)), (status, data)
            if status == 200:
                file.id = json.loads(data)["id"]
                self.files.append(file)
                for _ in range(n_batches):
                    await self.make(owner, file)

        self.world.begin(send())

    def some_file(self) -> File | None:
        """One of those that are there, if any is."""
        found = [file for file in self.files if not file.is_deleted] or self.files
        return self.chance.choice(found) if found else None

    def somebody(self, owner: str) -> str:
        """The owner, mostly."""
        return self.chance.choice([owner, owner, owner, *OWNERS])

    @rule()
    def use(self) -> None:
        """Make batches of files, delete them, or both at once."""
        for _ in range(3):
            file = self.some_file()
            if file is None:
                return
            what = self.chance.choice(["create", "delete", "both", "both"])
            if what != "delete":
                self.world.begin(self.make(self.somebody(file.owner), file))
            if what != "create":
                self.delete(self.somebody(file.owner), file)

    async def make(self, owner: str, file: File) -> None:
        """A batch."""
        body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
        status, data = await self.world.ask(owner, batches.serve_batch_create, [json.dumps(body).encode()], JSON)
        if status == 200:
            assert owner == file.owner, "a batch on another's file"
            self.batches[json.loads(data)["id"]] = (owner, file)
        elif status == 404:
            assert owner != file.owner or file.is_deleted, "the file is there"
        else:
            assert status == 507, (status, data)

    def delete(self, owner: str, file: File) -> None:
        was_deleted = file.is_deleted
        file.is_deleted |= owner == file.owner  # it may be so from now on

        async def send() -> None:
            status, data = await self.world.ask(owner, files.serve_file_delete, [], {}, file_id=file.id)
            assert status in (200, 400, 404, 507), (status, data)
            assert status != 200 or owner == file.owner, "another's file"
            if status == 400:
                file.is_deleted = was_deleted

        self.world.begin(send())

    @rule()
    def cancel(self) -> None:
        if not self.batches:
            return
        batch_id = self.chance.choice(list(self.batches))
        owner = self.somebody(self.batches[batch_id][0])
        if owner == self.batches[batch_id][0]:
            self.cancelled.add(batch_id)

        async def send() -> None:
            status, data = await self.world.ask(owner, batches.serve_batch_cancel, [], {}, batch_id=batch_id)
            assert status in (200, 400, 404, 507), (status, data)
            assert (status == 404) == (owner != self.batches[batch_id][0]) or status == 507, "another's batch"

        self.world.begin(send())

    @rule()
    def read(self) -> None:
        file = self.some_file()
        if file is None:
            return
        owner = self.somebody(file.owner)

        async def send() -> None:
            status, data = await self.world.ask(owner, files.serve_file_content, [], {}, file_id=file.id)
            if status == 200:
                assert owner == file.owner and data == file.content, "not what was stored"
            elif status in (0, 500):
                assert file.is_spoiled or file.is_deleted or self.is_troubled, data
            else:
                assert status == 507 or owner != file.owner or file.is_deleted, (status, data)

        self.world.begin(send())

        for one in OWNERS:
            self.list_all(one)

    def list_all(self, owner: str) -> None:
        async def send() -> None:
            for handler in (files.serve_files, batches.serve_batches):
                status, data = await self.world.ask(owner, handler, [], {})
                assert status in (200, 507), (status, data)
                for one in json.loads(data)["data"] if status == 200 else []:
                    known = self.batches.get(one["id"])
                    assert known is None or known[0] == owner, "another's batch"

        self.world.begin(send())

    # ---- what befalls the server

    @rule()
    def go_on(self) -> None:
        self.world.turns(self.chance.randrange(1, 80))

    @rule()
    def wait(self) -> None:
        self.world.wait(self.chance.choice([0.3, 2.0, 20.0]))

    @rule()
    def crash(self) -> None:
        """The process dies, at some look at the disk from now on."""
        self.world.store.n_until_death = self.chance.randrange(1, 150)

    @rule()
    def restart(self) -> None:
        """A stop in order."""
        self.world.restart()

    @rule()
    def spoil(self) -> None:
        """A content is removed, or cut, by hand."""
        file, keep = self.some_file(), self.chance.choice([0, 0, 30])
        if file is not None and not file.is_deleted and (self.folder / "files" / file.id).exists():
            file.is_spoiled = True
            if keep:
                with (self.folder / "files" / file.id).open("r+b") as content:
                    content.truncate(keep)
            else:
                (self.folder / "files" / file.id).unlink()

    @rule()
    def overload(self) -> None:
        file = self.some_file()
        for name in file.names if file is not None else ():
            if name is not None:
                self.world.busy[name] = self.chance.randrange(1, 4)

    @rule()
    def trouble(self) -> None:
        """The disk refuses some times."""
        n = self.chance.randrange(1, 7)
        if self.chance.random() < 0.5:
            self.is_troubled = True
            self.world.store.n_unreadable = n
        else:
            self.world.store.n_refusals = n

    @rule()
    def a_day_passes(self) -> None:
        self.world.jumped_s += 25 * 3600

    # ---- what must hold

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "look"):
            return
        row = self.look.execute
        used = dict(row("select owner, bytes from usage").fetchall())
        counted = dict(
            row(
                "select owner, sum(bytes) from (select owner, bytes from files union all select owner, bytes from"
                " unfinished union all select b.owner, length(r.output) + 1 from results r join batches b"
                " on b.id = r.batch_id) group by owner"
            ).fetchall()
        )
        for owner in OWNERS:
            assert used.get(owner, 0) == counted.get(owner, 0), "bytes are miscounted"
            assert not self.share or used.get(owner, 0) <= self.share, "a tenant has more than its share"
        assert sum(used.values()) <= self.whole, "more than the whole is stored"
        lost = row(
            "select id from batches where status in ('validating', 'in_progress', 'finalizing', 'cancelling')"
            " and input_file_id not in (select id from files)"
        ).fetchall()
        assert not lost, "an open batch without its input"
        twice = row("select 1 from lines join results using (batch_id, line)").fetchall()
        assert not twice, "a line is to be run that has its output"
        self.check_disk(row)
        holder = self.world.store.store.space._holder
        if holder is not None and not self.world.tasks and not self.world.store._litter:
            held = row("select id from unfinished where holder = ?", (holder.name,)).fetchall()
            assert not held, "room is reserved for no upload"

    def check_disk(self, row: Any) -> None:
        sizes = {path.name: path.stat().st_size for path in (self.folder / "files").iterdir()}
        spoiled = {file.id for file in self.files if file.is_spoiled}
        for file_id, n_bytes in row("select id, bytes from files").fetchall():
            assert file_id in spoiled or sizes.get(file_id) == n_bytes, "a content differs from its record"
        for file_id, n_bytes, holder in row("select id, bytes, holder from unfinished").fetchall():
            if holder:
                assert sizes.get(file_id, 0) <= n_bytes, "more was written than was reserved"
            else:
                assert sizes.get(file_id, 0) >= n_bytes, "results were dropped that are in no file"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.settle()
        finally:
            self.world.close()
            self.look.close()
            shutil.rmtree(self.folder)

    def settle(self) -> None:
        """Everything comes to its end, and is what it should be."""
        self.world.store.n_refusals = self.world.store.n_unreadable = 0
        for _ in range(3):  # batches end now: so may the process
            self.crash()
            self.world.wait(10)
        self.world.store.n_until_death = -1
        n_before, waited_s = self.world.n_crashes, 0
        open_ones = "select id, status from batches where status not in ('completed', 'failed', 'cancelled', 'expired')"
        while self.world.tasks or self.look.execute(open_ones).fetchall():
            self.world.wait(10)
            self.check()
            waited_s += 10
            assert self.world.n_crashes - n_before <= MAX_DEATHS, "a line that kills is run for ever"
            assert waited_s <= SETTLE_S * (1 + self.world.n_crashes - n_before), "a batch comes to no end"
        self.world.restart()  # sweeps
        self.world.wait(30)
        self.check()
        for table in ("lines", "results", "unfinished"):
            assert not self.look.execute(f"select * from {table}").fetchall(), f"{table} is not empty"
        for batch_id in self.batches:
            self.check_batch(batch_id)
        self.delete_all()

    def delete_all(self) -> None:
        rows = self.look.execute("select owner, id from files").fetchall()

        async def send(owner: str, file_id: str) -> None:
            status, data = await self.world.ask(owner, files.serve_file_delete, [], {}, file_id=file_id)
            assert status == 200, (status, data)

        for owner, file_id in rows:
            self.world.begin(send(owner, file_id))
            self.world.turns(20)
        assert not self.look.execute("select * from usage where bytes <> 0").fetchall(), "bytes of nothing"
        assert not list((self.folder / "files").iterdir()), "contents without a record"

    def check_batch(self, batch_id: str) -> None:
        owner, file = self.batches[batch_id]
        query = "select record, n_total, n_completed, n_failed from batches where id = ?"
        record, n_total, n_completed, n_failed = self.look.execute(query, (batch_id,)).fetchone()
        batch = json.loads(record)
        good, bad = (self.rows_of(owner, batch[f"{kind}_file_id"]) for kind in ("output", "error"))
        assert (len(good), len(bad)) == (n_completed, n_failed), "counts are not those of the files"
        if batch["status"] == "completed" or (batch["status"] == "expired"):
            assert len(good) + len(bad) == n_total == len(file.names), "not one output for each line"
        assert len(good) + len(bad) <= len(file.names), "more outputs than lines"
        if batch["status"] == "cancelled":
            assert batch_id in self.cancelled
        if batch["status"] == "failed":
            self.check_failure(batch, file)
        self.check_rows(file, good, bad, may_convict=self.world.trials[batch_id] >= GUILTY_DEATHS)

    def check_failure(self, batch: dict[str, Any], file: File) -> None:
        code = batch["errors"]["data"][0]["code"]
        assert batch["errors"]["data"][0]["message"] and batch["failed_at"]
        reasons = {
            "input_file_lost": file.is_spoiled,
            "input_file_unreadable": self.is_troubled,
            "storage_full": True,
            "storage_quota_exceeded": bool(self.share),
            "invalid_input": not file.names,
            "request_quarantined": self.world.trials[batch["id"]] >= GUILTY_DEATHS,
        }
        assert reasons.get(code), f"failed without reason: {code}"

    def check_rows(self, file: File, good: list[Any], bad: list[Any], *, may_convict: bool) -> None:
        names = {name for name, kind in zip(file.names, file.kinds, strict=True) if kind in ("good", "double")}
        order = {name: at for at, name in reversed(list(enumerate(file.names)))}
        for rows in (good, bad):
            places = [order[row["custom_id"]] for row in rows if row["custom_id"] is not None]
            assert places == sorted(places), "outputs are not in order"
        seen: set[str] = set()
        for row in good:
            name = row["custom_id"]
            assert name in names and name not in seen, "an output twice, or of nobody"
            seen.add(name)
            assert row["response"]["status_code"] == 200 and row["response"]["body"]["echo"] == name
        kinds: dict[str | None, set[str]] = {None: {"raise", "cut", "poison", "broken", "long"}}
        for name, kind in zip(file.names, file.kinds, strict=True):
            kinds.setdefault(name, set()).add(kind)
        for row in bad:
            code = (row["error"] or row["response"]["body"]["error"])["code"]
            known = REASONS.get(code)
            if code == "request_quarantined":
                assert may_convict, "too few have died of it"
            else:
                assert known is None or known & kinds[row["custom_id"]], f"an error without reason: {row}"

    def rows_of(self, owner: str, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        found = self.look.execute("select owner, bytes from files where id = ?", (file_id,)).fetchone()
        assert found is not None and found[0] == owner, "the output is another's"
        return [json.loads(line) for line in (self.folder / "files" / file_id).read_bytes().splitlines()]
