"""What the time limit on loading covers: file systems that do not answer, here as well as there; not downloads."""

from __future__ import annotations

import asyncio
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import huggingface_hub
import pytest

from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.core.errors import ConfigError, EngineError, LoadError, QuireError
from quire.core.events import EndKind, EngineFailed, EngineReady, Fetching
from quire.engine.frontend import Frontend, load_beside, load_tokenizer
from quire.engine.llm import LLM
from quire.engine.process import fetch
from quire.engine.status_pipe import StatusPipe
from quire.engine.supervisor import EngineSupervisor
from quire.engine.wire import decode_status, encode_status

ROOT = pathlib.Path(__file__).resolve().parents[3]
READY = EngineReady(128, n_pages=65, page_size=4, logits_width=320, device="null")


@pytest.fixture
def fifo(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file that does not answer: nobody writes to it."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def engine_script(tmp_path: pathlib.Path, *steps: str) -> tuple[str, ...]:
    """An engine process that only says things: `steps` are Python lines, with `say(bytes)`."""
    lines = [
        "import json, os, sys, time",
        "fd = json.loads(sys.stdin.readline())['status_fd']",
        "say = lambda line: os.write(fd, line + b'\\n')",
        *steps,
    ]
    script = tmp_path / "engine.py"
    script.write_text("\n".join(lines))
    return (str(script),)


@pytest.mark.parametrize("is_ready", [True, False])
async def test_downloads_are_not_limited_and_loading_after_them_is(is_ready: bool, tmp_path: pathlib.Path) -> None:
    begin, end = encode_status(Fetching(is_over=False)), encode_status(Fetching(is_over=True))
    last = f"say({encode_status(READY)!r})" if is_ready else "time.sleep(60)"
    command = engine_script(tmp_path, f"say({begin!r})", "time.sleep(1.2)", f"say({end!r})", last, "sys.stdin.read()")
    supervisor = EngineSupervisor(EngineConfig(device="null", load_timeout=0.6), command)
    began_s = time.monotonic()
    try:
        if is_ready:
            assert await supervisor.start() == READY
        else:
            with pytest.raises(ConfigError, match=r"within load_timeout = 0\.6 s, downloads from the hub not counted"):
                await supervisor.start()
        assert time.monotonic() - began_s > 1.2
    finally:
        await supervisor.close()


@pytest.mark.parametrize("kind", EndKind)
async def test_only_what_is_refused_is_a_wrong_option(kind: EndKind, tmp_path: pathlib.Path) -> None:
    command = engine_script(tmp_path, f"say({encode_status(EngineFailed('why', kind))!r})")
    supervisor = EngineSupervisor(EngineConfig(device="null"), command)
    try:
        with pytest.raises(QuireError, match=r"^why$") as error:
            await supervisor.start()
        assert type(error.value) is (ConfigError if kind is EndKind.REFUSED else EngineError)
    finally:
        await supervisor.close()


@pytest.fixture
def brief_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.supervisor.LEAVE_S", 0.2)
    monkeypatch.setattr("quire.engine.supervisor.ENDS_S", 0.4)


async def test_a_start_that_says_how_it_ends_and_does_not_is_killed(tmp_path: pathlib.Path, brief_ends: None) -> None:
    said = encode_status(EngineFailed("rank 1 ended", EndKind.KILLED))
    supervisor = EngineSupervisor(
        EngineConfig(device="null"), engine_script(tmp_path, f"say({said!r})", "time.sleep(600)")
    )
    try:
        with pytest.raises(EngineError, match=r"^rank 1 ended$"):
            async with asyncio.timeout(60):
                await supervisor.start()
    finally:
        await supervisor.close()


@pytest.mark.parametrize("last_words", [False, True])
async def test_a_process_that_says_how_it_ends_and_does_not_is_killed(
    last_words: bool, tmp_path: pathlib.Path, brief_ends: None, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As one does that a driver holds; the next engine is started for the reason that it gave. One that still ends
    others, and writes their stacks, has the time for it."""
    if last_words:
        monkeypatch.setattr("quire.engine.supervisor.ENDS_S", 30.0)
    said, mark = encode_status(EngineFailed("rank 1 ended", EndKind.KILLED)), tmp_path / "was here"
    command = engine_script(
        tmp_path, f"is_first = not os.path.exists({str(mark)!r})", f"open({str(mark)!r}, 'w')",
        f"say({encode_status(READY)!r})", f"is_first and say({said!r})",
        "is_first and time.sleep(1.0)" if last_words else "time.sleep(600)",
        f"is_first and open({str(tmp_path / 'stacks')!r}, 'w')", "is_first or time.sleep(600)",
    )  # fmt: skip
    supervisor = EngineSupervisor(EngineConfig(device="null"), command)
    try:
        await supervisor.start()
        first = supervisor.pid
        async with asyncio.timeout(60):
            while supervisor.pid == first:
                await asyncio.sleep(0.02)
        assert supervisor.n_restarts == 1 and supervisor.failure is None
        assert f"rank 1 ended; the engine process, number {first}, has not ended yet" in caplog.text
        assert (f"number {first}, does not end: it is killed" in caplog.text) != last_words
        assert (tmp_path / "stacks").exists() == last_words
        assert "rank 1 ended; starting the engine again (1)" in caplog.text and "no progress" not in caplog.text
    finally:
        await supervisor.close()


def test_the_engine_process_says_when_it_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    reading, writing = os.pipe()
    fetched: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **options: object) -> str:
        assert decode_status(os.read(reading, 4096)) == Fetching(is_over=False) if not fetched else True
        fetched.append((name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    status = StatusPipe(writing)
    got = fetch(EngineConfig(model="org/name", tokenizer="org/words", revision="v1", seed=3), status)
    assert fetched == [("org/name", "v1"), ("org/words", "v1")]
    assert got == EngineConfig(model=f"{tmp_path}/org/name", tokenizer=f"{tmp_path}/org/words", seed=3)
    assert decode_status(os.read(reading, 4096)) == Fetching(is_over=True)
    local = EngineConfig(model=str(tmp_path))
    assert fetch(local, status) is local
    os.close(writing)
    assert os.read(reading, 1) == b"", "nothing is said without a download"
    os.close(reading)


def test_a_wrong_tokenizer_names_its_option(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its own error speaks of a model, or of a file without its folder; by the engine process, too."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    demo = ROOT / "quire" / "_models" / "demo"
    arch = read_arch(demo)
    for name, said in (
        (str(tmp_path / "none"), "is neither an existing folder"),
        (str(tmp_path), "tokenizer.json is missing"),
    ):
        with pytest.raises((ConfigError, LoadError), match=f"^--tokenizer {name}: .*{said}") as error:
            load_tokenizer(EngineConfig(tokenizer=name), demo, arch)
        assert isinstance(error.value, QuireError) and error.value.param == "tokenizer"
    reading, writing = os.pipe()
    with pytest.raises((ConfigError, LoadError), match=r"^--tokenizer no/such: "):
        fetch(EngineConfig(tokenizer="no/such"), StatusPipe(writing))
    os.close(reading)
    os.close(writing)
    with pytest.raises(ConfigError, match=r"^tokenizer\.json is missing"):
        load_tokenizer(EngineConfig(model=str(tmp_path)), tmp_path, arch)


def test_a_shape_takes_the_tokenizer_that_is_named() -> None:
    """If its ids have rows in the shape's embedding. Its chat template comes with it."""
    demo = str(ROOT / "quire" / "_models" / "demo")
    assert Frontend.load(EngineConfig(model="shape:qwen3-0.6b")).tokenizer is None
    own = EngineConfig(model="shape:qwen3-0.6b", tokenizer=demo)
    found = Frontend.load(own)
    assert found.tokenizer is not None and found.tokenizer.decode(found.tokenizer.encode("a word")) == "a word"
    assert found.chat_template is not None and found.arch is not None and found.arch.vocab_size == 151_936
    assert own.load_format == "dummy", "its weights are random all the same"
    small = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2}
    few = EngineConfig(model="shape:qwen3-0.6b", tokenizer=demo, hf_overrides=small)
    with pytest.raises(ConfigError, match=f"^--tokenizer {demo}: .* the model embeds only 1000 tokens"):
        Frontend.load(few)
    left_out = EngineConfig(model="shape:qwen3-0.6b", tokenizer=demo, skip_tokenizer_init=True)
    assert Frontend.load(left_out).tokenizer is None


def test_a_missing_tokenizer_is_found_before_weights_are_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder. A shape has none, and is not asked for one."""
    shutil.copy(ROOT / "quire" / "_models" / "demo" / "config.json", tmp_path)
    built: list[EngineConfig] = []

    def build(config: EngineConfig) -> None:
        built.append(config)
        raise EngineError("weights are made")

    monkeypatch.setattr("quire.engine.offline.build_engine", build)
    with pytest.raises(ConfigError, match=r"^tokenizer\.json is missing"):
        LLM(str(tmp_path), load_format="dummy")
    assert not built
    with pytest.raises(EngineError, match="weights are made"):
        LLM("shape:olmoe-1b-7b", hf_overrides={"num_hidden_layers": 2})
    assert [(one.model, one.load_format) for one in built] == [("shape:olmoe-1b-7b", "dummy")]


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reading a chat template takes until this is set."""
    answers = threading.Event()

    def read(path: str, max_bytes: int) -> bytes:
        answers.wait(60)
        return b""

    monkeypatch.setattr("quire.text.chat_template.read_regular", read)
    yield answers
    answers.set()


async def test_m16_a_frontend_that_stalls_alone(checkpoint: pathlib.Path, stalled: threading.Event) -> None:
    async def engine() -> EngineReady:
        return READY

    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"of {checkpoint} .* load_timeout = 0.3 s after the engine"):
        await load_beside(engine(), EngineConfig(model=str(checkpoint), chat_template="any", load_timeout=0.3))
    assert time.monotonic() - began_s < 20
    await release(stalled)


async def test_the_first_failure_ends_the_other(checkpoint: pathlib.Path, stalled: threading.Event) -> None:
    async def broken() -> EngineReady:
        raise EngineError("no memory")

    waits = asyncio.Event()

    async def endless() -> EngineReady:
        try:
            await asyncio.sleep(60)
        finally:
            waits.set()
        return READY

    with pytest.raises(EngineError, match="no memory"):
        await load_beside(broken(), EngineConfig(model=str(checkpoint), chat_template="any"))
    await release(stalled)
    with pytest.raises(ConfigError, match="revision"):
        await load_beside(endless(), EngineConfig(model=str(checkpoint), revision="v1"))
    assert waits.is_set()


async def release(stalled: threading.Event) -> None:
    """Let the thread that reads go on, and wait for its end."""
    stalled.set()
    end_s = time.monotonic() + 60
    while any(thread.name == "quire-frontend" for thread in threading.enumerate()):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


def test_m16_a_server_whose_model_folder_stalls_ends(
    checkpoint: pathlib.Path, fifo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Both processes stand still at the same file of the model; the server says so and is gone, and so is the engine.

    A FIFO in the folder would be refused: instead, opening the file goes to one, whoever does it.
    """
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, sys
def stall(event, arguments):
    if event == "open" and str(arguments[0]) == {str(checkpoint / "config.json")!r}:
        print("stalls:", sys.argv[0], file=sys.stderr, flush=True)
        os.open({str(fifo)!r}, os.O_RDONLY)
sys.addaudithook(stall)
""")
    command = [sys.executable, "-m", "quire", "serve", str(checkpoint), "--port", "0", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.Popen(
        [*command, "--load-timeout", "2"], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        _, said = process.communicate(timeout=60)  # the engine has the same stderr: its end is awaited too
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2
    assert f"stalls: {ROOT}/quire/__main__.py" in said
    assert "quire: error: the model was not loaded within load_timeout = 2 s" in said
