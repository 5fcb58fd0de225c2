"""`quire plan ORG/NAME` against a hub of this machine: config.json and headers, and not a byte of weights."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire.bench.shape import FOLDER
from quire.config.model import read_arch
from quire.config.parameters import shapes

CONFIG = (FOLDER / "qwen3-0.6b" / "config.json").read_bytes()
PAD = 150_000
"""Of blanks in the first header, which so needs a second request."""


def header(tensors: dict[str, tuple[int, ...]], n_blanks: int = 0) -> tuple[bytes, int]:
    """(what stands before the weights, bytes of the whole file)."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        n_bytes = 2
        for n in shape:
            n_bytes *= n
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(entries).encode() + b" " * n_blanks
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


class Hub(http.server.BaseHTTPRequestHandler):
    """Files of one model; `sizes`: of those of which only the front is there."""

    files: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    asked: list[tuple[str, str]] = []
    knows_ranges = True

    def do_HEAD(self) -> None:
        self._answer(whole=False)

    def do_GET(self) -> None:
        self._answer(whole=True)

    def _answer(self, *, whole: bool) -> None:
        name = self.path.rpartition("/resolve/main/")[2]
        if whole:
            self.asked.append((name, self.headers.get("Range", "")))
        if name not in self.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body, size = self.files[name], self.sizes.get(name, len(self.files[name]))
        span = self.headers.get("Range") if self.knows_ranges else None
        if span and whole:
            first, last = (int(text) for text in span.removeprefix("bytes=").split("-"))
            body = body[first : last + 1].ljust(min(last + 1, size) - first, b"\0")
        self.send_response(206 if span and whole else 200)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(name.encode()).hexdigest()}"')
        self.send_header("Content-Length", str(len(body) if span and whole else size))
        self.end_headers()
        if whole:
            try:
                self.wfile.write(body)
                for _ in range(0 if span else (size - len(body)) // (1 << 16)):
                    self.wfile.write(bytes(1 << 16))
            except ConnectionError:
                pass

    def log_message(self, *words: object) -> None: ...


@pytest.fixture(scope="module")
def hub() -> Iterator[tuple[type[Hub], str]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Hub, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def plan(endpoint: str, home: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    code = "import sys; from quire.cli.main import main; code = main(sys.argv[1:]); "
    code += "assert not {'torch', 'numpy'} & sys.modules.keys(); sys.exit(code)"
    return subprocess.run(
        [sys.executable, "-c", code, "plan", *words], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_headers_alone_are_read(hub: tuple[type[Hub], str], tmp_path: pathlib.Path) -> None:
    """Two shards of 1.2 GB in all, which are not there; the first one's header is longer than the first request."""
    kind, endpoint = hub
    tensors = dict(shapes(read_arch(FOLDER / "qwen3-0.6b")))
    names = list(tensors)
    halves = [{name: tensors[name] for name in part} for part in (names[:100], names[100:])]
    shards = {f"model-{i}.safetensors": header(half, PAD * (i == 0)) for i, half in enumerate(halves)}
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, half in enumerate(halves) for name in half}}
    kind.files = {"config.json": CONFIG, "model.safetensors.index.json": json.dumps(index).encode()}
    kind.files |= {name: front for name, (front, _) in shards.items()}
    kind.sizes = {name: size for name, (_, size) in shards.items()}
    kind.asked.clear()
    done = plan(endpoint, tmp_path, "some/model")
    assert done.returncode == 0, done.stderr
    n = read_arch(FOLDER / "qwen3-0.6b").n_parameters
    assert f"some/model: qwen3, 28 layers, {n:,} parameters" in done.stdout
    assert f"checkpoint 2 files, 1.11 GiB: {n:,} BF16, as described" in done.stdout
    spans = {(name, span) for name, span in kind.asked if "safetensors" in name and "index" not in name}
    assert all(span for _, span in spans) and {name for name, _ in spans} == shards.keys() and len(spans) == 3

    kind.knows_ranges = False
    try:
        told = json.loads(plan(endpoint, tmp_path, "some/model", "--json").stdout)["facts"]["checkpoint"]
    finally:
        kind.knows_ranges = True
    assert told["n_files"] == 2 and told["numbers"] == {"BF16": n} and not told["is_rounded"]


def test_what_cannot_be_had_is_said(hub: tuple[type[Hub], str], tmp_path: pathlib.Path) -> None:
    kind, endpoint = hub
    kind.files, kind.sizes = {"config.json": CONFIG}, {}
    done = plan(endpoint, tmp_path, "other/model")
    assert done.returncode == 0 and "checkpoint unknown: 'other/model' has neither model.safetensors nor" in done.stdout
    kind.files["model.safetensors"], kind.sizes = header({"x": (4,)})[0], {"model.safetensors": 10**9}
    done = plan(endpoint, tmp_path, "other/model")
    assert "bytes after its last tensor" in done.stdout, "a file that is not what its header says"
    done = plan("http://127.0.0.1:9", tmp_path / "empty", "other/model")
    assert done.returncode and "config.json of 'other/model' cannot be had: the hub cannot be reached" in done.stderr
    assert "run this where there is a network" in done.stderr
